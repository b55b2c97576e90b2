"""`check_step` over small steps of one's own: what of it only a GPU shows runs here over the strict stand-in."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph import debug_checks
from dflash_graph.debug_checks import StepReport, StepUnderTest, check_step, loads_watched, moved
from dflash_graph.findings import Finding
from dflash_graph.graph_backends import CudaBackend, GraphBackend, TapeBackend
from dflash_graph.graphs import CapturePhase, GraphError
from dflash_graph.tracing import AddressBook, Tracer
from tests.graph_backend import FakeCuda
from tests.traced import line_of

CPU = torch.device("cpu")
Body = Callable[["Toy"], None]


class Toy:
    """A step over static tensors: out = 2 x, total += x; `body` runs after that.

    `data` (number of the data set) and `raw_out`, `raw_total` (the tensors' memory) are what torch cannot see.
    """

    def __init__(self, body: Body = lambda toy: None) -> None:
        self.x, self.out, self.total = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
        self.raw_out, self.raw_total = self.out.numpy(), self.total.numpy()
        self.body, self.data = body, 0

    def step(self) -> None:
        torch.mul(self.x, 2.0, out=self.out)
        self.total += self.x
        self.body(self)

    def load(self, i: int) -> None:
        self.data = i
        self.x.copy_(torch.arange(3.0) + i)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        with debug_checks.swapped(self, "x", self.x.clone()):
            yield

    def declared(self, device: torch.device = CPU) -> StepUnderTest:
        return StepUnderTest(
            name="toy",
            worker="worker",
            device=device,
            function=self.step,
            results={"out": self.out, "total": self.total},
            load=self.load,
            book=lambda: {"x": self.x, "out": self.out, "total": self.total},
            fresh=self.fresh,
        )


def check(toy: Toy, backend: GraphBackend | None = None, **options: Any) -> StepReport:
    return check_step(toy.declared(), backend or TapeBackend(), CapturePhase(), **options)


def only(report: StepReport) -> Finding:
    (finding,) = report.findings
    assert (finding.worker, finding.graph) == ("worker", "toy")
    return finding


@contextmanager
def opened(cuda: FakeCuda) -> Iterator[CudaBackend]:
    backend = CudaBackend(torch.device("cuda", 0), debug=True, cuda=cuda)
    with torch.autograd.set_multithreading_enabled(False):
        backend.open()
        try:
            yield backend
        finally:
            backend.close()


def test_a_clean_step_is_clean_and_its_results_are_as_before() -> None:
    toy = Toy()
    toy.total.fill_(7.0)
    report = check(toy)
    assert not report.findings, report.findings
    assert report.num_ops >= 2
    assert report.captured["seconds"] >= 0
    assert torch.equal(toy.total, torch.full((3,), 7.0))
    assert torch.equal(toy.out, torch.zeros(3))


# ---- what moves -----------------------------------------------------------------------------------------------------


def test_all_tensors_that_move_at_one_line_are_named() -> None:
    toy = Toy()
    step = replace(toy.declared(), book=lambda: {"x": toy.x, **{f"part{i}": part for i, part in enumerate(parts)}})
    parts = [torch.zeros(2) for _ in range(4)]

    def rebinding() -> None:
        toy.step()
        for i in range(3):
            parts[i] = parts[i].clone()  # moved here

    finding = only(check_step(replace(step, function=rebinding), TapeBackend(), CapturePhase()))
    assert finding.check == "frozen_world"
    assert finding.what.startswith("part0 moved from")
    assert finding.what.endswith("also part1, part2")
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "moved here")


def test_a_long_list_of_names_is_cut() -> None:
    tensors = {f"t{i}": torch.zeros(1) for i in range(40)}
    book = AddressBook(lambda: tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    (finding,) = moved(book, {})
    assert finding.what.endswith("t30 and 9 more")


def test_what_load_state_dict_replaces_is_put_to_its_call() -> None:
    layer = torch.nn.Linear(2, 2)
    other = torch.nn.Linear(2, 2).state_dict()

    def names() -> dict[str, Tensor]:
        return dict(layer.named_parameters())

    book, lines = AddressBook(names), {}
    with Tracer() as tracer, loads_watched(names, lines):
        layer.load_state_dict(other)
        assert not lines, "in place: nothing moved"
        layer.load_state_dict(other, assign=True)  # replaces
    (finding,) = moved(book, lines, tracer.trace)
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "replaces")
    assert {"weight", "bias"} == set(lines)


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_an_operator_that_remembers_inside_is_found_by_its_line() -> None:
    """The operations are the same for cached and for fresh tensors; only results tell them apart."""
    known: dict[int, Tensor] = {}

    @torch.library.custom_op("dflash_graph_tests::remembers", mutates_args=())
    def remembers(x: Tensor) -> Tensor:
        return known.setdefault(x.data_ptr(), x * 3).clone()

    def body(toy: Toy) -> None:
        toy.out += remembers(toy.x)  # remembered

    finding = only(check(Toy(body)))
    assert finding.check == "stale_cache"
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "remembered")


# ---- replays --------------------------------------------------------------------------------------------------------


def test_a_replay_that_differs_names_the_result_and_its_line() -> None:
    """NumPy writes around torch's dispatcher: neither trace nor tape see it."""

    def body(toy: Toy) -> None:
        toy.out.add_(1.0)  # last torch writer
        toy.raw_out[:] += 1.0 if toy.data > 3 else 0.0

    finding = only(check(Toy(body)))
    assert finding.check == "replay"
    assert finding.what.startswith("out differs from the function's after replay 1")
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "last torch writer")


def test_replays_follow_one_another() -> None:
    """A replay starts from what the one before it left: what only a later step shows is found."""

    def body(toy: Toy) -> None:
        if toy.raw_total[0] > 9:
            toy.raw_out[:] = 0.0

    finding = only(check(Toy(body)))
    assert "out differs from the function's after replay 3" in finding.what  # 4 + 5 + 6 > 9 >= 4 + 5


def test_a_step_that_cannot_be_captured_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(toy: Toy) -> None:
        if threading.current_thread().name == "capturing":
            raise ZeroDivisionError("planted")  # raised here

    class Refusing(TapeBackend):
        def capture(self, function: Callable[[], None]) -> Any:
            threading.current_thread().name = "capturing"
            try:
                return super().capture(function)
            finally:
                threading.current_thread().name = "MainThread"

    finding = only(check(Toy(body), Refusing()))
    assert finding.check == "capture"
    assert "ZeroDivisionError: planted" in finding.what
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "raised here")


def test_a_capture_needs_the_phase() -> None:
    phase = CapturePhase()
    phase.close()
    report = check_step(Toy().declared(), TapeBackend(), phase)
    assert "the capture phase is over" in only(report).what


# ---- as on CUDA -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(2, 11), (2, 13)])
def test_a_capture_as_on_cuda_is_legal_and_described(tmp_path: Path, version: tuple[int, int]) -> None:
    cuda = FakeCuda(version=version)
    with opened(cuda) as backend:
        report = check(Toy(), backend, dot=tmp_path)
        assert not report.findings, report.findings
    assert report.captured["pool_bytes"] == cuda.pool_bytes
    assert (tmp_path / "worker-toy.dot").read_text().startswith("digraph")
    nodes = report.captured["nodes"]
    assert nodes is None if version < (2, 13) else sum(nodes.values()) == 2
    assert not cuda.leftovers()


def test_a_failed_capture_as_on_cuda_leaves_nothing_behind() -> None:
    cuda = FakeCuda()
    cuda.fail["end"] = RuntimeError("out of graph memory")
    with opened(cuda) as backend:
        assert "out of graph memory" in only(check(Toy(), backend)).what
    assert not cuda.graphs
    assert not cuda.capturing


class FakeCounters:
    """torch.cuda's process-wide counters and modes, as far as the checks ask."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode: Any = 0
        self.modes: list[Any] = []
        self.allocated = 0
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)
        patch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": self.allocated})

    def set_mode(self, mode: Any) -> None:
        self.mode = mode
        self.modes.append(mode)


def test_a_sync_that_no_trace_sees_is_refused_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = FakeCounters(monkeypatch)

    def body(toy: Toy) -> None:
        if counters.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")  # waits

    step = Toy(body).declared(torch.device("cuda", 0))
    finding = only(check_step(step, TapeBackend(), CapturePhase()))
    assert finding.check == "host_sync"
    assert finding.site is not None
    assert finding.site.line == line_of(__file__, "waits")
    assert counters.modes == ["error", 0], "put back"


def test_another_error_of_a_warm_up_is_not_called_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = FakeCounters(monkeypatch)

    def body(toy: Toy) -> None:
        if counters.mode == "error":
            raise RuntimeError("planted")

    toy = Toy(body)
    with pytest.raises(RuntimeError, match="planted"):
        check_step(toy.declared(torch.device("cuda", 0)), TapeBackend(), CapturePhase())
    assert counters.mode == 0
    assert torch.equal(toy.total, torch.zeros(3)), "restored"


def test_a_replay_that_allocates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = FakeCounters(monkeypatch)

    class Growing(TapeBackend):
        def synchronize(self) -> None:
            counters.allocated += 2

    finding = only(check_step(Toy().declared(torch.device("cuda", 0)), Growing(), CapturePhase()))
    assert finding.what == "a replay allocated memory 2 times"


# ---- compilers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's hooks."""
    hooks = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setattr(debug_checks, "_triton_runtime", lambda: hooks)
    return hooks


def compile_kernel(hooks: SimpleNamespace) -> None:
    if hooks.jit_post_compile_hook is not None:
        facts = {"fn": SimpleNamespace(name="scale"), "repr": "scale[num_warps=4](n: i32)", "key": ""}
        hooks.jit_post_compile_hook(**facts)  # compiled here


@pytest.mark.parametrize("first_data, count", [(0, 0), (2, 1)], ids=["at the first run only", "for other data"])
def test_a_kernel_compiled_in_a_warm_step_is_found(runtime: SimpleNamespace, first_data: int, count: int) -> None:
    told: list[Any] = []
    runtime.jit_post_compile_hook = hook = lambda **facts: told.append(facts["fn"].name)

    def body(toy: Toy) -> None:
        if toy.data == first_data:
            compile_kernel(runtime)

    report = check(Toy(body))
    assert len(report.findings) == count
    assert told, "a hook that was there before is still called"
    assert runtime.jit_post_compile_hook is hook
    for finding in report.findings:
        assert finding.check == "jit_compile"
        assert "scale[num_warps=4](n: i32)" in finding.what
        assert finding.site is not None
        assert finding.site.line == line_of(__file__, "compiled here")


def test_triton_has_the_hook_that_is_watched() -> None:
    triton = pytest.importorskip("triton")
    assert debug_checks._triton_runtime() is triton.knobs.runtime
    findings: list[Finding] = []
    with debug_checks.compilations_watched(findings):
        triton.knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="scale"), repr="scale()", key="")
    assert [finding.check for finding in findings] == ["jit_compile"]
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_a_graph_error_of_the_tape_is_a_finding() -> None:
    class Refusing(TapeBackend):
        def capture(self, function: Callable[[], None]) -> Any:
            raise GraphError("not this one")

    assert only(check(Toy(), Refusing())).what == "the step cannot be captured: not this one"
