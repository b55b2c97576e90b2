"""The life of worker contexts and their steps: threads, addresses, the capture phase, warm-up, errors; all modes."""

import gc
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from dflash_graph.config import OptimConfig
from dflash_graph.graphs import CapturePhase, GraphError, StepGraph, WorkerContext
from tests.graph_backend import FakeCuda
from tests.graph_toys import REPLAYING, Counter, bits, in_thread, open_context, snapshot
from tests.test_graph_life import KINDS, MODES, Kind, Life
from tests.test_graph_tape import Training
from tests.test_step import jobs_of, make_toy
from tests.toys import state_bytes
from tests.traced import line_of


class Watching:
    """An observer that notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def run(self, graph: StepGraph, function: Callable[[], None]) -> None:
        self.seen.append(graph.name)
        function()


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    gc.collect()
    assert fake.leftovers() == []


# ---- addresses -------------------------------------------------------------------------------------------------------


def _replaced(c: Counter, declared: dict[str, Tensor]) -> None:
    declared["total"] = c.total.clone()


def _data(c: Counter, declared: dict[str, Tensor]) -> None:
    c.total.data = c.total.clone()


def _cast(c: Counter, declared: dict[str, Tensor]) -> None:
    c.total.data = c.total.double()


def _reshaped(c: Counter, declared: dict[str, Tensor]) -> None:
    c.total.resize_(1)


def _dropped(c: Counter, declared: dict[str, Tensor]) -> None:
    del declared["total"]


@pytest.mark.parametrize("change", [_replaced, _data, _cast, _reshaped, _dropped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["eager", "recorded"])
def test_a_moved_tensor_is_named(change: Callable[[Counter, dict[str, Tensor]], None], mode: str) -> None:
    c = Counter()
    declared = {"total": c.total}
    with open_context(mode) as context:
        graph = context.graph("count", c.step, inputs={"x": c.x}, outputs={"out": c.out}, state=declared)
        context.prepare()
        graph()
        graph.check_addresses()
        change(c, declared)
        with pytest.raises(GraphError, match=r"tensors of count must keep their memory.*\ntotal: was ") as error:
            graph.check_addresses()
        assert len(str(error.value).splitlines()) == 2, "the others stayed where they are"


def test_a_step_that_moves_a_declared_tensor_is_not_captured() -> None:
    c = Counter()

    def moving() -> None:
        c.step()
        c.total.data = c.total.clone()

    with open_context("recorded") as context:
        c.make(context, function=moving)
        with pytest.raises(GraphError, match=r"could not capture count: .*\ntotal: was"):
            context.prepare()
        assert context.graphs[0].captured is None


# ---- life of a context -----------------------------------------------------------------------------------------------

ALL = ["eager", "recorded", "fake cuda_graph", "debug"]


@pytest.mark.parametrize("mode", ALL)
def test_a_step_belongs_to_its_thread_and_to_an_open_context(mode: str) -> None:
    c = Counter()
    context = open_context(mode)
    with pytest.raises(GraphError, match="enter the context of worker 'worker' in its thread before count is used"):
        c.make(context)
    with context:
        graph = c.make(context)
        if mode in REPLAYING:
            with pytest.raises(GraphError, match="count must be captured before it runs; call prepare"):
                graph()
        for what, use in (("count", graph), ("prepare()", context.prepare), ("close()", context.close)):
            with pytest.raises(
                GraphError, match=r"belongs to the thread of worker 'worker'; found thread 'other'"
            ) as e:
                in_thread(use)
            assert str(e.value).startswith(what)
        context.prepare()
        with pytest.raises(GraphError, match="count belongs to the thread"):
            in_thread(graph)
        with pytest.raises(GraphError, match="late belongs to the thread"):
            in_thread(lambda: c.make(context, "late"))
        assert graph.calls == 0
        graph()
        assert (graph.calls, c.total.tolist()) == (1, [1.0, 2.0])
        with pytest.raises(GraphError, match="entered once"), context:
            pass
    for use in (graph, context.prepare, lambda: c.make(context, "later")):
        with pytest.raises(GraphError, match="destroyed with its context"):
            use()
    context.close()
    assert graph.calls == 1


def test_debug_hands_the_function_to_its_observer_once() -> None:
    c, watching = Counter(), Watching()
    with open_context("debug", observer=watching) as context:
        graph = c.make(context)
        context.prepare()
        assert c.runs == 0
        graph()
        graph()
    assert (watching.seen, c.runs, graph.calls) == (["count", "count"], 2, 2)


def test_an_error_of_a_step_passes_and_is_no_call() -> None:
    def failing() -> None:
        raise KeyError("mine")

    with open_context("eager") as context:
        graph = context.graph("f", failing, inputs={}, outputs={}, state={})
        with pytest.raises(KeyError, match="mine"):
            graph()
    assert graph.calls == 0


def test_a_context_gives_back_what_it_changed_in_its_thread(cuda: FakeCuda) -> None:
    cuda = FakeCuda(num_devices=2)
    assert torch.autograd.is_multithreading_enabled()
    before = cuda.current_device(), cuda.current_stream(0), cuda.current_stream(1)
    with open_context("fake cuda_graph", cuda=cuda, index=1) as context:
        assert not torch.autograd.is_multithreading_enabled()
        assert in_thread(torch.autograd.is_multithreading_enabled), "another thread's business"
        assert cuda.current_stream() is context.stream
        assert cuda.current_device() == 1
    assert torch.autograd.is_multithreading_enabled()
    assert (cuda.current_device(), cuda.current_stream(0), cuda.current_stream(1)) == before
    with open_context("recorded") as recorded:
        assert recorded.stream is None
        assert recorded.memory() == {"allocated": 0, "reserved": 0, "graph_pool": 0}


def test_a_context_that_cannot_open_leaves_the_thread_alone() -> None:
    cuda = FakeCuda(num_devices=2)
    cuda.fail["set stream-1"] = RuntimeError("no such device")
    before = cuda.current_device(), cuda.current_stream(0), cuda.current_stream(1)
    context = open_context("fake cuda_graph", cuda=cuda, index=1)
    with pytest.raises(RuntimeError, match="no such device"), context:
        pass
    assert (cuda.current_device(), cuda.current_stream(0), cuda.current_stream(1)) == before
    assert torch.autograd.is_multithreading_enabled()
    with pytest.raises(GraphError, match="destroyed with its context"):
        Counter().make(context)
    context.close()


def test_triton_kernels_find_their_scratch_in_the_workers_thread_alone() -> None:
    allocation = pytest.importorskip("triton.runtime._allocation", reason="Triton is not installed")

    def own() -> tuple[Any, Any]:
        before = allocation._allocator.get()
        with open_context("fake cuda_graph"):
            return before, allocation._allocator.get()

    before, inside = in_thread(own)
    assert inside is not before
    assert in_thread(allocation._allocator.get) is before, "each thread has its own"


def test_settings_that_cannot_be_are_refused() -> None:
    phase = CapturePhase()
    with pytest.raises(ValueError, match="a graph mode is one of cuda_graph, eager, recorded, debug; found 'fast'"):
        WorkerContext("w", "cpu", mode="fast", phase=phase)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode cuda_graph needs a CUDA device; worker 'w' is on cpu"):
        WorkerContext("w", "cpu", mode="cuda_graph", phase=phase)
    with pytest.raises(ValueError, match="mode recorded is the CPU's stand-in; worker 'w' is on cuda"):
        WorkerContext("w", "cuda:0", mode="recorded", phase=phase)
    with pytest.raises(ValueError, match="warmups must be at least 1 in mode recorded; found 0"):
        open_context("recorded", warmups=0)
    with pytest.raises(ValueError, match="warmups must be at least 3 in mode cuda_graph; found 2"):
        open_context("fake cuda_graph", warmups=2)


def test_declarations_that_cannot_be_are_refused() -> None:
    c = Counter()
    with open_context("recorded") as context:
        c.make(context)
        with pytest.raises(
            ValueError, match="steps of worker 'worker' need names of their own; found a second 'count'"
        ):
            c.make(context)
        with pytest.raises(ValueError, match="two are called 'x'"):
            context.graph("a", c.step, inputs={"x": c.x}, outputs={}, state={"x": c.total})
        with pytest.raises(ValueError, match=r"tensors of b must lie on cpu, .*; x is on meta"):
            context.graph("b", c.step, inputs={"x": torch.zeros(1, device="meta")}, outputs={}, state={})
        context.graph("same", c.step, inputs={"x": c.x}, outputs={}, state={"x": c.x})
        assert [graph.name for graph in context.graphs] == ["count", "same"]


# ---- the capture phase -----------------------------------------------------------------------------------------------


def test_turns_are_one_at_a_time_and_garbage_waits() -> None:
    phase, inside, most = CapturePhase(), 0, 0

    def capture(name: str) -> int:
        nonlocal inside, most
        with phase.turn(name):
            inside += 1
            most = max(most, inside)
            assert not gc.isenabled()
            time.sleep(0.01)
            inside -= 1
        return 0

    threads = [threading.Thread(target=capture, args=(f"w{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (most, gc.isenabled()) == (1, True)


def test_garbage_collection_is_as_it_was_after_a_turn() -> None:
    phase = CapturePhase()
    with pytest.raises(KeyError), phase.turn("w"):
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with phase.turn("w"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_collected_before_a_turn() -> None:
    class Node:
        dead = False
        me: "Node"

        def __del__(self) -> None:
            Node.dead = True

    gc.disable()
    try:
        node = Node()
        node.me = node
        del node
        assert not Node.dead
        with CapturePhase().turn("w"):
            assert Node.dead, "a CUDA object that died in a capture would end it"
    finally:
        gc.enable()


def test_nothing_is_captured_after_the_phase() -> None:
    phase, c = CapturePhase(), Counter()
    with open_context("recorded", phase=phase) as context:
        early = c.make(context)
        context.prepare()
        phase.close()
        assert phase.closed
        early()
        context.prepare()  # all are captured already
        late = c.make(context, "late")
        with pytest.raises(GraphError, match=r"worker must capture at start-up.* the capture phase is over"):
            context.prepare()
        with pytest.raises(GraphError, match="late must be captured before it runs"):
            late()
        early()
    assert gc.isenabled()
    with open_context("eager", phase=phase) as eager:
        c.make(eager)
        eager.prepare()  # nothing to capture


def test_the_end_of_the_phase_waits_for_a_turn_under_way() -> None:
    phase, entered, leave = CapturePhase(), threading.Event(), threading.Event()
    order: list[str] = []

    def capture() -> None:
        with phase.turn("slow"):
            entered.set()
            assert leave.wait(30)
            order.append("captured")

    thread = threading.Thread(target=capture)
    thread.start()
    assert entered.wait(30)
    closer = threading.Thread(target=lambda: (phase.close(), order.append("closed")))
    closer.start()
    leave.set()
    thread.join(30)
    closer.join(30)
    assert order == ["captured", "closed"]


def test_no_wait_for_a_turn_is_without_end() -> None:
    phase, entered, leave = CapturePhase(timeout_s=0.05), threading.Event(), threading.Event()

    def hang() -> None:
        with phase.turn("target-0"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(GraphError, match=r"drafter waited 0\.05 s .*; target-0 is still capturing"):
            phase.turn("drafter").__enter__()
    finally:
        leave.set()
        thread.join(30)
    with phase.turn("drafter"), pytest.raises(GraphError, match="x must wait until drafter, in the same thread"):
        phase.turn("x").__enter__()
    with phase.turn("again"):
        pass


# ---- prepare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", REPLAYING)
def test_warm_up_and_capture_leave_state_and_outputs_bit_for_bit(mode: str) -> None:
    run = Training()
    run.load(0)
    run.lr.fill_(0.1)
    run.loss.view(torch.int32).fill_(0x7FC0BEEF)  # a NaN with a payload
    before = snapshot(run.tensors())
    with open_context(mode) as context:
        run.make(context)
        context.prepare()
        assert snapshot(run.tensors()) == before
        assert all(graph.captured is not None and graph.capture_s > 0 for graph in context.graphs)
        context.prepare()
        assert snapshot(run.tensors()) == before


@pytest.mark.parametrize("free", [1 << 40, 0], ids=["copies on the device", "copies on the host"])
def test_overlapping_and_strided_state_is_restored(cuda: FakeCuda, free: int) -> None:
    cuda.free = free
    base = torch.arange(24.0).view(4, 6)
    state = {"base": base, "column": base[:, 1], "bits": base.view(torch.int32), "transposed": base.t(), "row": base[0]}
    before = bits(base)

    def step() -> None:
        base.add_(1)
        base[:, 1].mul_(3)

    with open_context("fake cuda_graph", cuda=cuda) as context:
        graph = context.graph("f", step, inputs={}, outputs={}, state=state)
        context.prepare()
        assert bits(base) == before
        graph()
        assert base[1, 1] == 3 * 8


@pytest.mark.parametrize("mode", REPLAYING)
@pytest.mark.parametrize("fails_at", [1, 2, 4], ids=["first warm-up", "second warm-up", "capture"])
def test_a_failed_capture_ends_with_its_first_error_and_restores(mode: str, fails_at: int) -> None:
    c, good = Counter(), Counter()

    def failing() -> None:
        c.step()
        if c.runs == fails_at:
            raise ZeroDivisionError("the first error")

    with open_context(mode, name="drafter") as context:
        first = good.make(context, "good")
        c.make(context, "bad", failing)
        after = Counter().make(context, "after")
        with pytest.raises(
            GraphError,
            match=r"'drafter' could not capture bad: ZeroDivisionError: the first error\. Run `dflash-graph debug`",
        ) as error:
            context.prepare()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        assert (c.total.tolist(), c.out.tolist(), good.total.tolist()) == ([0, 0], [5, 5], [0, 0])
        assert first.captured is not None
        assert after.captured is None
        assert gc.isenabled()
        first()
        c.runs = 10
        context.prepare()  # the cause is gone
        for graph in context.graphs:
            graph()
        assert (c.total.tolist(), good.total.tolist()) == ([1, 2], [2, 4])


def test_what_fails_while_state_is_restored_is_a_note_of_the_first_error(cuda: FakeCuda) -> None:
    c = Counter()

    def failing() -> None:
        cuda.fail["sync stream-1"] = RuntimeError("device in an error state")
        raise ZeroDivisionError("the first error")

    with open_context("fake cuda_graph", cuda=cuda) as context:
        c.make(context, function=failing)
        with pytest.raises(GraphError, match="the first error") as error:
            context.prepare()
    assert error.value.__notes__ == [
        "state could not be restored, too: RuntimeError: device in an error state",
    ]


@pytest.mark.parametrize("mode", REPLAYING)
def test_the_captured_run_sees_that_its_stream_is_capturing(mode: str) -> None:
    """Libraries take another path then (transformers' masks); a tape must take the one that a graph would hold."""
    seen: list[bool] = []

    def step() -> None:
        try:
            seen.append(torch.cuda.is_current_stream_capturing())
        except RuntimeError:  # a torch without CUDA cannot even ask
            seen.append(False)

    with open_context(mode) as context:
        context.graph("f", step, inputs={}, outputs={}, state={})
        context.prepare()
    assert seen == [False, False, False, True]


def test_out_of_memory_has_its_own_advice() -> None:
    def failing() -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with open_context("recorded") as context:
        context.graph("big", failing, inputs={}, outputs={}, state={})
        with pytest.raises(GraphError, match=r"OutOfMemoryError: tried .*lower schedule\.token_budget"):
            context.prepare()


@pytest.mark.parametrize("grows_in", [{3}, {1}, {1, 2}, {1, 2, 3}])
def test_memory_must_be_found_by_the_last_warm_up(cuda: FakeCuda, grows_in: set[int]) -> None:
    c = Counter()

    def allocating() -> None:
        c.step()
        cuda.pool_bytes += 512 * (c.runs in grows_in)

    with open_context("fake cuda_graph", cuda=cuda) as context:
        c.make(context, function=allocating)
        if 3 in grows_in:
            with pytest.raises(
                GraphError, match=r"count must .* allocated 512 bytes more in warm-up 3\..* graphs\.warmups"
            ):
                context.prepare()
        else:
            context.prepare()


def test_a_step_cannot_call_another() -> None:
    c, other = Counter(), Counter()
    with open_context("recorded") as context:
        inner = c.make(context, "inner")
        context.prepare()
        other.make(context, "outer", inner)
        with pytest.raises(GraphError, match="inner must not be called while outer is captured"):
            context.prepare()
        inner()


@pytest.mark.parametrize("free", [1 << 40, 0], ids=["copies on the device", "copies on the host"])
@pytest.mark.parametrize("fails_at", [1, 3, 4], ids=["first warm-up", "last warm-up", "capture"])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_leaves_no_capture_behind_and_every_bit(
    cuda: FakeCuda, free: int, fails_at: int, kind: type[BaseException]
) -> None:
    cuda.free = free
    run, runs, copies = Training(), 0, []
    run.load(0)
    run.lr.fill_(0.1)
    run.loss.view(torch.int32).fill_(0x7FC0BEEF)  # a NaN with a payload
    before = snapshot(run.tensors())

    def failing() -> None:
        nonlocal runs
        runs += 1
        run.micro_step()
        run.apply()
        if runs == fails_at:
            raise kind("the first error")

    with open_context("fake cuda_graph", cuda=cuda) as context:
        context._save = lambda tensors, save=context._save: copies.append(save(tensors)) or copies[-1]  # type: ignore[method-assign]
        state = run.tensors()
        graph = context.graph("all", failing, inputs={"lr": run.lr}, outputs={"loss": state.pop("loss")}, state=state)
        with pytest.raises(GraphError if issubclass(kind, Exception) else kind, match="the first error"):
            context.prepare()
        assert runs == fails_at
        assert snapshot(run.tensors()) == before
        assert copies == [[]], "the copies were given up"
        assert not cuda.capturing
        assert len(cuda.graphs) == 1, "more than the graph that keeps the pool"
        assert (graph.captured, context.preparing, gc.isenabled()) == (None, "", True)
        context.prepare()
        assert snapshot(run.tensors()) == before


# ---- what a graph keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", REPLAYING)
@pytest.mark.parametrize("on_device", [False, True], ids=["a Python number", "a tensor"])
def test_a_rate_is_baked_in_unless_it_is_a_tensor(mode: str, on_device: bool) -> None:
    """The fused optimizer itself; its first step moves a weight by about the rate, whatever the gradient."""
    weight, lr = torch.zeros(3, requires_grad=True), torch.tensor(0.5)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=lr if on_device else 0.5, fused=True, capturable=True, weight_decay=0.0)
    moments = {"step": torch.zeros(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    optimizer.state[weight] = dict(moments)
    with open_context(mode) as context:
        graph = context.graph(
            "adamw", lambda: optimizer.step() and None, inputs={}, outputs={}, state={"weight": weight, **moments}
        )
        context.prepare()
        if on_device:
            lr.fill_(0.01)
        else:
            optimizer.param_groups[0]["lr"] = 0.01
        graph()
    assert weight.detach().tolist() == pytest.approx([-0.01 if on_device else -0.5] * 3, rel=1e-5)


@pytest.mark.parametrize("mode", REPLAYING)
@pytest.mark.parametrize("rebind", ["None", "another tensor"])
def test_a_gradient_that_is_rebound_is_written_where_it_was(mode: str, rebind: str) -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = old = torch.zeros(1)
    new = None if rebind == "None" else torch.zeros(1)
    state: dict[str, Tensor] = {"grad": old}

    def step() -> None:
        (weight * 3).sum().backward()

    with open_context(mode) as context:
        graph = context.graph("backward", step, inputs={"weight": weight}, outputs={}, state=state)
        context.prepare()
        graph()
        weight.grad = new
        graph()
        assert old.item() == 6.0
        assert weight.grad is new
        assert new is None or new.item() == 0.0
        graph.check_addresses()
        if new is not None:
            state["grad"] = new  # as a table that is built from the gradients of now
            with pytest.raises(GraphError, match="\ngrad: was"):
                graph.check_addresses()


@pytest.mark.parametrize("how", ["empty", "pin_memory", "zeros"])
@pytest.mark.parametrize("mode", REPLAYING)
def test_pinned_memory_is_refused_with_its_line(mode: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the capture alone: what the warm-ups do is legal, and needs a GPU."""
    runs, x = 0, torch.zeros(3)

    def step() -> None:
        nonlocal runs
        runs += 1
        if runs <= 3:
            return
        if how == "empty":
            torch.empty(3, pin_memory=True)  # line: empty
        elif how == "pin_memory":
            x.pin_memory()  # line: pin_memory
        else:
            torch.zeros(3, pin_memory=True)  # line: zeros

    with open_context(mode) as context:
        context.graph("pins", step, inputs={}, outputs={}, state={"x": x})
        line = line_of(__file__, f"line: {how}")
        with pytest.raises(GraphError, match=rf"allocates pinned host memory at .*test_graphs\.py:{line} in "):
            context.prepare()
    assert runs == 4


# ---- two threads at once ---------------------------------------------------------------------------------------------


def test_two_hundred_captures_of_two_threads_take_turns(cuda: FakeCuda) -> None:
    """On one device, where a warm-up, a collection or a pool of one would end the other's capture."""
    phase, start = CapturePhase(timeout_s=60), threading.Barrier(2, timeout=30)
    totals: dict[str, list[list[float]]] = {"w0": [], "w1": []}

    def work(name: str) -> None:
        for _ in range(25):
            c = [Counter() for _ in range(4)]
            with open_context("fake cuda_graph", cuda=cuda, phase=phase, name=name) as context:
                graphs = [x.make(context, f"g{i}") for i, x in enumerate(c)]
                start.wait()
                context.prepare()
                for graph in graphs:
                    graph()
                totals[name] += [x.total.tolist() for x in c]

    threads = [threading.Thread(target=work, args=(name,), name=name) for name in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert totals == {name: [[1.0, 2.0]] * 100 for name in totals}
    who = [name for name, what in cuda.log if what.startswith(("begin", "warm-up")) or what == "end"]
    each = 2 + 4 * (3 + 2)  # the empty graph; then three warm-ups, begin and end of each of four
    assert len(who) == 50 * each
    turns = [who[i : i + each] for i in range(0, len(who), each)]
    assert all(len(set(turn)) == 1 for turn in turns), "the turns of two workers are mixed"
    assert Tally(turn[0] for turn in turns) == {"w0": 25, "w1": 25}


class Busy(Life):
    """`Life` that starts with workers who have steps already, so that captures, replays and their ends are common."""

    seen: ClassVar[Tally[str]] = Tally()

    @initialize(
        modes=st.lists(MODES, min_size=1, max_size=3),
        kinds=st.lists(KINDS, min_size=1, max_size=4),
        prepared=st.sampled_from([False, True, True]),
    )
    def begin(self, modes: list[str], kinds: list[Kind], prepared: bool) -> None:
        if not hasattr(self, "phase"):  # hypothesis runs what initialises in any order
            Life.start(self)
        for mode in modes:
            self.add_worker(mode)
        for i, kind in enumerate(kinds):
            self.declare(i, kind)
        for i in range(prepared * len(self.workers)):
            self.prepare(i)

    @initialize()
    def start(self) -> None:
        if not hasattr(self, "phase"):
            Life.start(self)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 63))
    def mend_and_prepare(self, pick: int) -> None:
        worker = self._worker(pick)
        for step in worker.steps:
            step.kind[0] = "good"
        self.prepare(pick)

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(values=st.lists(st.integers(-100, 100), min_size=1, max_size=2))
    def run_all(self, values: list[int]) -> None:
        for value in values:
            for pick in range(sum(len(worker.steps) for worker in self.workers)):
                self.run(pick, value)

    @precondition(lambda self: len(self.workers) > 1)
    @rule()
    def close_phase(self) -> None:
        self.phase.close()
        assert self.phase.closed, "what the rules of `prepare` go by"

    def teardown(self) -> None:
        steps = [step for worker in getattr(self, "workers", ()) if worker.captures for step in worker.steps]
        Busy.seen["captures"] += sum(step.captured for step in steps)
        Busy.seen["replays"] += sum(step.calls for step in steps if step.captured)
        Busy.seen["broken"] += sum(step.kind[0] != "good" and not step.captured for step in steps)
        super().teardown()


def test_workers_with_steps_live_in_any_order() -> None:
    """The same examples each time, so that how far they reach can be told; `TestLife` has others at each run."""
    Busy.seen.clear()
    options = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),  # to shrink a failure would outlast the test's time limit
    )
    run_state_machine_as_test(Busy, settings=options)
    for what, least in (("captures", 25), ("replays", 50), ("broken", 5)):
        assert Busy.seen[what] >= least, f"too shallow to show anything: {dict(Busy.seen)}"


# ---- the drafter's step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", REPLAYING)
def test_the_drafters_step_replays_bit_for_bit(mode: str, dtype: torch.dtype, groups: int, cuda: FakeCuda) -> None:
    """Micro-steps of several sizes, validations and updates under another rate each, captured from a live state."""
    options: dict[str, Any] = {"dtype": dtype, "num_sizes": 3, "anchor_groups": groups, "shape": {"num_anchors": 20}}
    eager, graphed = (make_toy(optim=OptimConfig(weight_decay=0.1), **options) for _ in range(2))
    jobs = jobs_of(eager, at_least=10, supervised=0.4)
    sizes: set[int] = set()
    for toy in (eager, graphed):
        toy.accumulate(*jobs[:2])
        toy.step.apply(1e-2)  # moments are no zeros when it is captured
        toy.accumulate(jobs[2])
    with open_context(mode, **({"cuda": cuda} if mode == "fake cuda_graph" else {})) as context:
        before = state_bytes(graphed)
        graphed.step.make_graphs(context)
        context.prepare()
        assert state_bytes(graphed) == before == state_bytes(eager)
        for i in range(8):
            for toy in (eager, graphed):
                for job in (jobs[i % len(jobs)], jobs[(7 * i + 3) % len(jobs)]):
                    size = toy.load(job)
                    sizes.add(size)
                    toy.step.micro_step(size)
                toy.step.micro_step(toy.load(jobs[i]), train=False)
                toy.step.apply(1e-2 / (1 + i))
            assert state_bytes(graphed) == state_bytes(eager), f"step {i}"
            found, expected = (vars(toy.step.read_counts()) for toy in (graphed, eager))
            assert {n: np.asarray(v).tobytes() for n, v in found.items() if v is not None} == {
                n: np.asarray(v).tobytes() for n, v in expected.items() if v is not None
            }
        calls = {graph.name: graph.calls for graph in context.graphs}
        assert calls["apply"] == 8
        assert sum(n for name, n in calls.items() if name.startswith("micro_step")) == 16
        assert sum(n for name, n in calls.items() if name.startswith("validate")) == 8
        assert len(sizes) > 1, "one size only"
        for graph in context.graphs:
            graph.check_addresses()
    assert state_bytes(graphed) != before
