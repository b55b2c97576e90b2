"""Watches one run of a step and says, on a machine without a GPU too, what would break it as a CUDA graph.

`Tracer` records every operation of the calling thread, in forward, backward and optimizer, with the line it comes from;
`find_illegal_ops` lists what a graph cannot hold, `compare_traces` what changed between two runs, `AddressBook` which
tensors moved, and `capturing_predicate` makes the step believe that its stream is capturing. On the CPU every tensor
of the step stands for one on the GPU, except those that would be on the host there, too: made without a device, or by
name on the "cpu". Watching changes no number and keeps no tensor alive. Knows torch only; called by the debug command.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph.findings import Finding, Root, Site, SiteFinder
from dflash_graph.frozen_world import AddressBook, compare_traces
from dflash_graph.interception import intercept
from dflash_graph.op_rules import (
    COPIES,
    FACTORIES,
    JUDGED_CALLS,
    RANDOM_FACTORIES,
    Problem,
    call_problem,
    is_number,
    is_random,
    makes_host_tensor,
    node_problem,
    op_problem,
)
from dflash_graph.traces import Memory, OpRecord, Rebinding, TensorFact, Trace, is_freed, storage_ref

__all__ = [
    "AddressBook", "Finding", "OpRecord", "Problem", "Site", "SiteFinder", "Trace", "Tracer", "capturing_predicate",
    "compare_traces", "find_illegal_ops", "op_problem",
]  # fmt: skip

_TENSOR: Any = torch.Tensor
_REBINDS = {_TENSOR.grad.__set__: ".grad", _TENSOR.data.__set__: ".data"}


@dataclass(slots=True)
class _Known:
    """What the tracer knows of one storage while it runs; `Memory.ref` keeps the identity, not the bytes."""

    number: int
    host: bool = False
    random: bool = False
    made_at: Site | None = None


class Tracer(TorchDispatchMode):
    """Context manager that records the calling thread's operations into `trace`.

    Backward runs in the calling thread meanwhile, so that it is seen, too. An operator of one's own (torch.library) is
    one operation; what happens inside it is not looked at.

    Args:
        root: files, folders or packages whose lines count as the user's; None is all but installed libraries, and this
            package.
        device: where the step's tensors lie; on "cpu" they stand for a GPU's.
    """

    trace: Trace

    def __init__(self, root: Root | Sequence[Root] | None = None, *, device: torch.device | str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._finder = SiteFinder(root)
        self._stands_in = torch.device(device).type == "cpu"
        self._calls_mode = _Calls(self)
        self._active = False

    def __enter__(self) -> Self:
        if self._active:
            raise RuntimeError("a Tracer watches one run at a time; this one is already watching. Make another")
        self._active = True
        self.trace = Trace()
        self._known: dict[int, _Known] = {}  # storage -> what is known of it
        self._forward_sites: dict[int, Site | None] = {}  # sequence number of an autograd node -> where it was made
        self._first_node: int = _next_node()
        self._calls: list[_Call] = []
        self._depth = 0  # inside an operator: what it does is its own affair
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, what, owner, names in _UNSEEN:
                for name in names:
                    problem = Problem(kind, f"{owner.__name__}.{name}() {what}")
                    stack.enter_context(intercept([(owner, name)], partial(self._unseen, problem)))
            stack.enter_context(intercept([(torch.autograd, "_engine_run_backward")], self._run_backward))
            stack.enter_context(self._calls_mode)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._stack.close()
        for memory in self.trace.memories:
            if memory.ref is not None and is_freed(memory.ref):
                memory.temporary |= memory.external and memory.size <= _NUMBER_BYTES
                memory.ref = memory.ref if memory.external else None
        self._known.clear()
        self._active = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            record, host, random = self._before(func, args, kwargs)
        self._depth += 1
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self.trace.ops.append(record)
            raise
        finally:
            self._depth -= 1
        with torch._C.DisableTorchFunction():
            outputs = []
            for leaf in _pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    fact, known = self._fact(leaf, external=False)
                    outputs.append(fact)
                    if known is not None and host:
                        known.host, known.random, known.made_at = True, random, record.site
            self.trace.ops.append(replace(record, outputs=tuple(outputs)))
        return result

    # ---- one operator -----------------------------------------------------------------------------------------------

    def _before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[OpRecord, bool, bool]:
        """The record without its results, whether the results lie on the host, and whether they are random there."""
        inputs: list[tuple[str, TensorFact]] = []
        scalars: list[tuple[str, Any]] = []
        on_host: list[tuple[str, Tensor, _Known]] = []
        on_device = 0
        for name, value in _named_leaves(func, args, kwargs):
            if not isinstance(value, Tensor):
                scalars.append((name, _plain(value)))
                continue
            fact, known = self._fact(value, external=True)
            inputs.append((name, fact))
            if known is not None and known.host:
                on_host.append((name, value, known))
                if value.ndim == 0 and value.device.type == "cpu" and not value.is_complex():
                    scalars.append((f"{name} (on the host)", value.item()))
            elif not self._on_host(value):
                on_device += 1
        site, phase, of_forward, node = self._site()
        problems = [
            op_problem(func, args, kwargs, host_value=self._host_value()),
            self._mixed(func, args, on_host, on_device, site),
        ]
        if node and not (self.trace.ops and self.trace.ops[-1].node == node):
            problems.append(node_problem(node))
        if func is _LIFT:  # a tensor made from host data, by Python or by C++
            self.trace.memories[inputs[0][1].memory].temporary = True
            if args[0].ndim > 0:
                problems.append(Problem("host_copy", "a tensor is made from host data (Python numbers, NumPy)"))
        all_host = bool(on_host) and not on_device
        kept = tuple(
            problem
            for problem in problems
            if problem is not None
            and not (problem.kind == "host_sync" and all_host)
            and not (self._calls and self._calls[-1].reported == problem.kind)
        )
        index = len(self.trace.ops)
        record = OpRecord(index, str(func), tuple(scalars), tuple(inputs), (), site, phase, node, of_forward, kept)
        random = any(known.random for _, _, known in on_host) or is_random(func)
        return record, all_host or func is _LIFT, random

    def _site(self) -> tuple[Site | None, Any, bool, str]:
        node: Any = torch._C._current_autograd_node()
        backward_of = None if node is None else self._forward_sites.get(node._sequence_nr())
        site, phase, of_forward = self._finder.find(sys._getframe(2), backward_of)
        made = _next_node() - 1  # the node of this operation, if it has one
        if made >= self._first_node:
            self._forward_sites.setdefault(made, site)
        if node is None:
            return site, phase, of_forward, ""
        return site, "backward", of_forward, node.name().rsplit("::", 1)[-1]

    def _mixed(
        self,
        func: Any,
        args: Sequence[Any],
        on_host: list[tuple[str, Tensor, _Known]],
        on_device: int,
        site: Site | None,
    ) -> Problem | None:
        """A tensor that would be on the host among tensors that would not."""
        if not on_host or not on_device:
            return None
        shown = str(func)
        if func._schema.name in COPIES:
            known = self._lookup(args[0])
            if known is not None and known.host:
                return Problem("host_sync", f"{shown} copies a tensor to the host")
            return Problem("host_copy", f"{shown} copies a host tensor to the device{_made(on_host[0][2], site)}")
        for name, tensor, known in on_host:
            if tensor.ndim > 0:
                return Problem(
                    "host_copy",
                    f"{shown} reads a host tensor of shape {tuple(tensor.shape)} as {name}{_made(known, site)}",
                )
        for name, _, known in on_host:
            if known.random:
                return Problem("host_random", f"{shown} reads a random host scalar as {name}{_made(known, site)}")
        return None

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _fact(self, tensor: Tensor, *, external: bool) -> tuple[TensorFact, _Known | None]:
        """What to remember of a tensor, and what is known of its storage."""
        shape, device = tuple(tensor.shape), tensor.device
        try:
            storage = tensor.untyped_storage()
            address = tensor.data_ptr() if device.type != "meta" else 0
        except (NotImplementedError, RuntimeError):  # sparse, opaque and fake tensors
            return TensorFact(shape, (), 0, tensor.dtype, device, -1, 0), None
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = _Known(len(self.trace.memories))
            self.trace.memories.append(Memory(external, len(self.trace.ops), storage.nbytes(), storage_ref(storage)))
        fact = TensorFact(
            shape,
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            device,
            known.number,
            address,
        )
        return fact, known

    def _lookup(self, tensor: Any) -> _Known | None:
        if not isinstance(tensor, Tensor):
            return None
        try:
            return self._known.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def _on_host(self, value: Any) -> bool:
        """Whether a value is a tensor that would be on the host even with a GPU."""
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return False
        known = self._lookup(value)
        return not self._stands_in or (known is not None and known.host)

    # ---- Python calls -----------------------------------------------------------------------------------------------

    def _host_value(self) -> bool:
        return bool(self._calls) and self._calls[-1].host_value

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Judge one call of torch's Python interface, then make it."""
        with torch._C.DisableTorchFunction():
            frame = self._finder.caller(sys._getframe(2))
            if func in _REBINDS:
                self._rebinding(_REBINDS[func], args)
            problem = call_problem(func, args, kwargs, on_host=self._on_host, frame=frame)
            if problem is not None:
                self._note(problem, f"call {getattr(func, '__qualname__', func)}")
            host_value = func is Tensor.__setitem__ and is_number(args[2])
            self._calls.append(_Call(host_value, None if problem is None else problem.kind))
            to_host = makes_host_tensor(func, args, kwargs, frame)
        try:
            result = func(*args, **kwargs)
        finally:
            self._calls.pop()
        if isinstance(result, Tensor) and func in FACTORIES:
            with torch._C.DisableTorchFunction():
                known = self._lookup(result)
                if known is not None and (to_host or problem is not None):
                    known.host, known.made_at = to_host, self._site()[0]
                    known.random = to_host and func in RANDOM_FACTORIES
        return result

    def _note(self, problem: Problem, name: str) -> None:
        """Put a call that leaves no operation behind into the stream."""
        site, phase, of_forward, node = self._site()
        self.trace.ops.append(
            OpRecord(len(self.trace.ops), name, (), (), (), site, phase, node, of_forward, (problem,))
        )

    def _rebinding(self, attribute: str, args: Sequence[Any]) -> None:
        old = args[0].grad if attribute == ".grad" else args[0]
        if isinstance(old, Tensor) and args[1] is not old:
            site, *_ = self._site()
            self.trace.rebindings.append(Rebinding(attribute, storage_ref(old.untyped_storage()), site))

    def _unseen(self, problem: Problem, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function that leaves neither an operator nor a call of a tensor's."""
        if not self._depth:
            self._note(problem, f"call {problem.what.split('(')[0]}")
        return original(*args, **kwargs)

    def _run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine with calls watched: whoever called backward() turned that off for its length."""
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self._depth or self._calls_mode in modes:
            return engine(*args, **kwargs)
        with self._calls_mode:
            return engine(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Call:
    host_value: bool
    reported: str | None  # kind of problem that the call itself was reported with


class _Calls(TorchFunctionMode):
    """Hands the calls that op_rules judges to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._tracer._depth or not (func in JUDGED_CALLS or func in _REBINDS):
            return func(*args, **(kwargs or {}))
        return self._tracer.call(func, args, kwargs or {})


# Functions that no mode shows, with the problem each is.
_UNSEEN: list[tuple[str, str, Any, tuple[str, ...]]] = [
    ("host_sync", "waits for the GPU", torch.cuda, ("synchronize",)),
    ("host_sync", "waits for the GPU", torch.cuda.Stream, ("synchronize",)),
    ("host_sync", "waits for the GPU", torch.cuda.Event, ("synchronize",)),
    ("host_sync", "waits for the GPU", torch.accelerator, ("synchronize",)),
    ("host_copy", "makes a tensor of host memory", torch, ("frombuffer",)),
    ("seed", "sets a generator", torch, ("manual_seed", "seed")),
    ("seed", "sets a generator", torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all")),
]
_autograd: Any = torch.autograd
_next_node: Callable[[], int] = _autograd._get_sequence_nr  # sequence number that this thread's next node will get
_NUMBER_BYTES = 16  # of the largest number, a complex one
_LIFT = torch.ops.aten.lift_fresh.default


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def _named_leaves(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = _argument_names(func)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, list | tuple):
            if any(isinstance(item, Tensor) for item in value):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
            else:
                yield name, tuple(map(_plain, value))
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """A value that holds nothing alive."""
    if isinstance(value, torch.Generator):
        return f"generator on {value.device}"
    if value is None or isinstance(value, bool | int | float | complex | str | tuple):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    return type(value).__name__


def _made(known: _Known, site: Site | None) -> str:
    return f", made at {known.made_at}" if known.made_at not in (None, site) else ""


# ---- checks ---------------------------------------------------------------------------------------------------------


def find_illegal_ops(trace: Trace, *, known_generators: Iterable[torch.Generator] = ()) -> list[Finding]:
    """What a CUDA graph cannot hold, one finding per line and kind, in the order of the run.

    Args:
        known_generators: generators that are registered with the graph.
    """
    allowed = {_identity(g) for g in (*known_generators, torch.default_generator, *torch.cuda.default_generators)}
    found: dict[tuple[Any, ...], list[tuple[OpRecord, Problem]]] = {}
    for op in trace.ops:
        for problem in op.problems:
            if problem.generator is None or _identity(problem.generator) not in allowed:
                place = (op.site.file, op.site.line) if op.site is not None else op.name
                found.setdefault((problem.kind, place), []).append((op, problem))
    findings = []
    for hits in found.values():
        op, problem = hits[0]
        seen = list(dict.fromkeys(p.what for _, p in hits))
        what = "; ".join([*seen[:3], *(["..."] if len(seen) > 3 else [])])
        times = f", {len(hits)} operations" if len(hits) > 1 else ""
        where = "the backward of this line" if op.of_forward else f"the {op.phase}"
        findings.append(Finding("illegal_op", f"{what} (in {where}{times})", problem.meaning, problem.advice, op.site))
    return findings


def _identity(generator: Any) -> int:
    """The same for every Python object around one generator: a dispatch mode sees a new one each time."""
    return int(generator._cdata)


@contextmanager
def capturing_predicate(value: bool) -> Iterator[None]:
    """Make torch say to the calling thread that its stream is capturing, or is not; needs no CUDA.

    Everything that asks through torch.cuda (transformers' `is_tracing`, torch's optimizers) gets this answer.
    """
    # torch.cuda's own function asks through the name in torch.cuda.graphs, whoever imported it before.
    name = "_cuda_isCurrentStreamCapturing"
    with intercept([(torch.cuda.graphs, name), (torch._C, name)], lambda original: value):
        if torch.cuda.is_current_stream_capturing() is not value:
            raise RuntimeError(
                f"torch.cuda.is_current_stream_capturing() must ask through torch.cuda.graphs.{name}; in torch "
                f"{torch.__version__} it does not. Correct dflash_graph/tracing.py for this version"
            )
        yield
