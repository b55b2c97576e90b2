"""Checks of one declared step, without a GPU: would a CUDA graph of it do what the function does?

`check_step` runs a step over several data sets, in its worker's thread, and restores what it changed. It returns what
it finds, and raises what the step raises. Called by `debugging.py`.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph.findings import Finding, Site, SiteFinder
from dflash_graph.graph_backends import Captured, CudaBackend
from dflash_graph.graphs import CapturePhase, GraphBackend, GraphError
from dflash_graph.interception import intercept
from dflash_graph.traces import Trace
from dflash_graph.tracing import AddressBook, Tracer, capturing_predicate, compare_traces, find_illegal_ops


@dataclass(frozen=True, kw_only=True)
class StepUnderTest:
    """A step with what it takes to try it out.

    Attributes:
        function: the step. results: tensors that it writes or updates; put back after every run.
        load: writes data set i into the step's inputs, in place.
        book: every tensor that the step can reach, read anew at each call, so that rebinding shows.
        fresh: within it the step reads copies of its inputs: other tensors with the same content.
        spoil: puts data set 0 where data come from, with everything that is not live spoiled or not; run_spoiled: takes
            it from there and runs the step.
        live: what of a result padding must not change; all of it by default.
    """

    name: str
    worker: str
    device: torch.device
    function: Callable[[], None]
    results: Mapping[str, Tensor]
    load: Callable[[int], None]
    book: Callable[[], Mapping[str, Tensor | None]]
    fresh: Callable[[], AbstractContextManager[None]] | None = None
    spoil: Callable[[bool], None] | None = None
    run_spoiled: Callable[[], None] | None = None
    live: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What was seen of one step."""

    name: str
    worker: str
    num_ops: int
    num_external: int
    captured: dict[str, Any]  # seconds of the capture, bytes of the pool; on CUDA the nodes by kernel, too
    findings: list[Finding]


def check_step(
    step: StepUnderTest, backend: GraphBackend, phase: CapturePhase, *, dot: Path | None = None
) -> StepReport:
    """All checks of one step: operations, branches, a frozen world, caches, padding, and a replay against the function.

    Args:
        backend: captures the step once; a tape on the CPU. phase: of the run; the capture takes a turn in it.
        dot: folder for a drawing of each captured graph, on CUDA.
    """
    check = _StepCheck(step, backend, phase, dot)
    with torch.no_grad():
        saved = {name: tensor.clone() for name, tensor in step.results.items()}
    try:
        check.run()
    finally:
        check.restore(saved)
    trace = check.trace
    findings = distinct(replace(f, worker=step.worker, graph=step.name) for f in check.findings)
    return StepReport(
        name=step.name,
        worker=step.worker,
        num_ops=len(trace),
        num_external=len(trace.external_addresses()),
        captured=check.captured,
        findings=findings,
    )


def distinct(findings: Iterator[Finding] | Sequence[Finding]) -> list[Finding]:
    """Findings without those that say the same of the same line again."""
    seen: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        place = (finding.site.file, finding.site.line) if finding.site else finding.what
        seen.setdefault((finding.check, place, finding.meaning), finding)
    return list(seen.values())


class _StepCheck:
    def __init__(self, step: StepUnderTest, backend: GraphBackend, phase: CapturePhase, dot: Path | None) -> None:
        self.step, self.backend, self.phase, self.dot = step, backend, phase, dot
        self.captured: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.trace = Trace()

    def run(self) -> None:
        step = self.step
        start = self._values()
        book = AddressBook(step.book)
        loads: dict[str, Site | None] = {}
        with loads_watched(step.book, loads):
            cold = self._traced(0, start)  # what is made at the first call only, and libraries' own set-up
            with compilations_watched(self.findings):
                plain = self._traced(1, start)
                with capturing_predicate(True):
                    first = self.trace = self._traced(1, start)
                    second = self._traced(2, start)
        self.findings += find_illegal_ops(plain)
        self.findings += find_illegal_ops(first)
        self.findings += compare_traces(plain, first, check="capture_branch")
        self.findings += compare_traces(first, second, check="frozen_world", names=_present(step.book()))
        self.findings += moved(book, loads, cold, plain, first, second)
        if self._repeats(start):
            self._check_caches(start)
            self._check_padding(start)
            if not self.findings:
                self._check_replay(start)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def _values(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: tensor.clone() for name, tensor in self.step.results.items()}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.step.results.items():
                tensor.copy_(values[name])

    def _prepare(self, data: int, start: Mapping[str, Tensor]) -> None:
        self.restore(start)
        self.step.load(data)

    def _traced(self, data: int, start: Mapping[str, Tensor]) -> Trace:
        self._prepare(data, start)
        with Tracer(device=self.step.device) as tracer:
            self.step.function()
        return tracer.trace

    def _different(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
        """The first result that is not the same bit for bit."""
        for name in a:
            x, y = self.step.live(name, a[name]), self.step.live(name, b[name])
            if not same_bits(x, y):
                return name
        return None

    def _repeats(self, start: Mapping[str, Tensor]) -> bool:
        """Whether the step gives the same for the same data; one that draws random numbers has no values to compare."""
        values = []
        for _ in range(2):
            self._prepare(3, start)
            with _syncs_refused(self.step.device):
                try:
                    self.step.function()
                except RuntimeError as error:
                    if "synchroniz" not in str(error):
                        raise
                    site = error_site(error)
                    self.findings.append(Finding("host_sync", str(error), _SYNC_MEANING, _SYNC_ADVICE, site))
                    return False
            values.append(self._values())
        return self._different(*values) is None

    # ---- values -----------------------------------------------------------------------------------------------------

    def _check_caches(self, start: Mapping[str, Tensor]) -> None:
        """Data that came through the same buffers against the same data in tensors that nobody has seen."""
        if self.step.fresh is None:
            return
        reused, again = self._traced(3, start), self._values()
        self._prepare(3, start)
        with self.step.fresh(), Tracer(device=self.step.device) as tracer:
            self.step.function()
        name = self._different(again, self._values())
        if name is None:
            return
        pairs = zip_longest(tracer.trace.ops, reused.ops)
        site = next((a.site for a, b in pairs if a is not None and (b is None or a.name != b.name)), None)
        if site is None:  # the same operations: one of them remembers
            _, site = _first_difference(self._digests(3, start), self._digests(3, start, self.step.fresh()))
        self.findings.append(
            Finding(
                "stale_cache",
                f"{name} is not the same for data rewritten in place and for the same data in new tensors",
                "something remembers results by the identity of a tensor: a graph's buffers are always the same "
                "tensors, so the old result is used for new data",
                "compute it in every step, or key the cache by content; for a library, pass what it would cache, or "
                "call its uncached function",
                site,
            )
        )

    def _check_padding(self, start: Mapping[str, Tensor]) -> None:
        """Spoiled padding must not change a bit of what is live."""
        if self.step.spoil is None or self.step.run_spoiled is None:
            return
        runs = []
        for spoiled in (False, True):
            self.restore(start)
            self.step.spoil(spoiled)
            with Digests() as digests:
                self.step.run_spoiled()
            runs.append((self._values(), digests))
        (clean, before), (dirty, after) = runs
        name = self._different(clean, dirty)
        if name is None:
            return
        reader, site = _first_difference(before, after)
        self.findings.append(
            Finding(
                "padding_read",
                f"{name} changes with what lies in padding; the first operation that reads it is {reader}",
                "padding holds whatever a slot held before: losses, gradients and weights depend on it",
                "select live elements with torch.where before anything else reads them (a product with 0 keeps NaN)",
                site,
            )
        )

    def _digests(
        self, data: int, start: Mapping[str, Tensor], around: AbstractContextManager[None] | None = None
    ) -> "Digests":
        self._prepare(data, start)
        digests = Digests()
        with around or nullcontext(), digests:
            self.step.function()
        return digests

    def _check_replay(self, state: Mapping[str, Tensor]) -> None:
        """Capture once, then replay a few steps in a row, each compared with the function's, bit for bit."""
        self._prepare(1, state)
        started = time.monotonic()
        try:
            with self.phase.turn(f"debug of {self.step.worker}"):
                self.backend.warm_up(self.step.function)
                captured = self.backend.capture(self.step.function)
        except Exception as error:
            what = str(error) if isinstance(error, GraphError) else f"{type(error).__name__}: {error}"
            self.findings.append(_finding("capture", f"the step cannot be captured: {what}", error_site(error)))
            return
        try:
            self._describe(captured, time.monotonic() - started)
            for data in range(4, 8):
                self._prepare(data, state)
                self.step.function()
                expected = self._values()
                self._prepare(data, state)
                before = _allocations(self.step.device)
                captured.replay()
                self.backend.synchronize()
                if grown := _allocations(self.step.device) - before:
                    self.findings.append(_finding("replay", f"a replay allocated memory {grown} times", None))
                    return
                name = self._different(expected, self._values())
                if name is not None:
                    what = f"{name} differs from the function's after replay {data - 3}, over data that were not there"
                    site = _last_writer(self.trace, self.step.results[name])
                    self.findings.append(_finding("replay", f"{what} when it was captured", site))
                    return
                state = expected  # the next step starts where this one ended
        finally:
            captured.reset()

    def _describe(self, captured: Captured, seconds: float) -> None:
        self.captured |= {"seconds": round(seconds, 3), "pool_bytes": self.backend.memory()["graph_pool"]}
        if isinstance(self.backend, CudaBackend):
            self.captured["nodes"] = self.backend.census(captured)
            if self.dot is not None:
                self.backend.dump(captured, self.dot / f"{self.step.worker}-{self.step.name}.dot")


def _last_writer(trace: Trace, tensor: Tensor) -> Site | None:
    """The line of the last operation that touched a tensor's memory; writers are among the last to."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for op in reversed(trace.ops):
        facts = [*op.outputs, *(fact for _, fact in op.inputs)]
        if any(begin <= fact.address < end for fact in facts):
            return op.site
    return None


# ---- what moves, what compiles --------------------------------------------------------------------------------------


@contextmanager
def loads_watched(names: Callable[[], Mapping[str, Tensor | None]], lines: dict[str, Site | None]) -> Iterator[None]:
    """Note in `lines` which named tensors a load_state_dict replaces, and where it was called."""
    finder = SiteFinder(None)

    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        book = AddressBook(names)
        result = original(*args, **kwargs)
        site = finder.find(sys._getframe())[0]
        lines.update((_subject(finding), site) for finding in book.check())
        return result

    owners = (torch.optim.Optimizer, torch.nn.Module)
    with intercept([(owner, "load_state_dict") for owner in owners], load):
        yield


def moved(book: AddressBook, loads: Mapping[str, Site | None], *traces: Trace) -> list[Finding]:
    """What the book finds, one finding per line and cause, each with the names of all tensors."""
    groups: dict[tuple[Site | None, str], list[Finding]] = {}
    for finding in book.check(*traces):
        named = replace(finding, site=loads.get(_subject(finding), finding.site))
        groups.setdefault((named.site, named.advice), []).append(named)
    merged = []
    for first, *others in groups.values():
        names = [_subject(finding) for finding in others]
        shown = ", ".join(names[:NAMES_SHOWN])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        merged.append(replace(first, what=f"{first.what}; also {shown}{more}") if names else first)
    return merged


def _subject(finding: Finding) -> str:
    """The tensor that a finding of an address book is about."""
    return finding.what.split(" ", 1)[0]


@contextmanager
def compilations_watched(findings: list[Finding]) -> Iterator[None]:
    """A Triton kernel that is compiled within: the step was warm, so it would be compiled in any later step, too."""
    runtime = _triton_runtime()
    if runtime is None:
        yield
        return
    before, finder = runtime.jit_post_compile_hook, SiteFinder(None)

    def compiled(**facts: Any) -> Any:
        site = finder.find(sys._getframe())[0]
        what = f"the kernel {facts['fn'].name} was compiled again after the first run: {facts['repr']}"
        findings.append(Finding("jit_compile", what, _JIT_MEANING, _JIT_ADVICE, site))
        return None if before is None else before(**facts)

    runtime.jit_post_compile_hook = compiled
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before


def _triton_runtime() -> Any:
    """Triton's hooks (3.4 and later), if it was imported: nothing else can compile."""
    return getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)


NAMES_SHOWN = 30
_JIT_MEANING = (
    "a compile takes seconds and may load a module, which a capture does not allow; the graph holds the kernel of the "
    "arguments it was captured with"
)
_JIT_ADVICE = (
    "keep what the kernel is specialised on (constexpr arguments, dtypes, integers that are 1 or divisible by 16, "
    "alignment of pointers) the same for all data, or mark the argument do_not_specialize"
)
_SYNC_MEANING = "CUDA was asked to wait for the device inside the step: capture fails"
_SYNC_ADVICE = (
    "move it out of the step, or use a form that does not wait (non_blocking copies, values kept on the device)"
)


@contextmanager
def _syncs_refused(device: torch.device) -> Iterator[None]:
    """On CUDA torch raises at each synchronisation that it knows of."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _allocations(device: torch.device) -> int:
    """Allocations by this process on a device so far; 0 on the CPU, which does not count them."""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"]) if device.type == "cuda" else 0


def error_site(error: BaseException, *, outside: str | None = None) -> Site | None:
    """The innermost line of an error's traceback that is in nobody's library, and in no file `outside`."""
    finder, site, trace = SiteFinder(None), None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if finder.caller(frame) is frame and frame.f_code.co_filename != outside:
            site = finder.find(frame)[0] or site
        trace = trace.tb_next
    return site


def _finding(check: str, what: str, site: Site | None) -> Finding:
    return Finding(
        check,
        what,
        "the graph does not do what the function does",
        "look for what Python decides or remembers between two calls of the step",
        site,
    )


def _present(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and _bits(a) == _bits(b)


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


class Digests(TorchDispatchMode):
    """Name, digest of the results, and line of every operator, in order, but views and unfilled memory.

    In a backward the line is that of the call of backward().
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str, Site | None]] = []
        self._finder = SiteFinder(None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func._schema.name:
            sha = hashlib.sha1(usedforsecurity=False)
            for leaf in _pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    sha.update(_bits(leaf))
            site = self._finder.find(sys._getframe())[0]
            self.found.append((str(func), sha.hexdigest(), site))
        return result


def _first_difference(a: Digests, b: Digests) -> tuple[str, Site | None]:
    """Name and line of the first operator whose result is not the same."""
    pairs = zip(a.found, b.found, strict=False)
    return next(((y[0], y[2]) for x, y in pairs if x[:2] != y[:2]), ("?", None))


@contextmanager
def swapped(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Let an object hold another value for a while."""
    held = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, held)
