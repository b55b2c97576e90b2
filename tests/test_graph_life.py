"""State machine: workers in threads of their own declare, capture, run, fail and close in any order, in every mode."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_graph.graphs import CAPTURING_MODES, CapturePhase, GraphError, StepGraph, WorkerContext
from tests.graph_backend import FakeCuda
from tests.graph_toys import Counter, in_thread, open_context

Kind = Literal["good", "failing", "disturbed"]
MODES = st.sampled_from(["eager", "debug", "recorded", "fake cuda_graph", "fake cuda_graph"])
KINDS = st.sampled_from(["good", "good", "good", "failing", "disturbed"])
PICK = st.integers(0, 63)


@dataclass
class Step:
    """A step, and what must be true of it."""

    counter: Counter
    graph: StepGraph
    kind: list[Kind]  # one, that can be changed
    total: torch.Tensor
    calls: int = 0
    captured: bool = False
    moved: bool = False
    frozen: torch.Tensor | None = None  # what a captured step still writes after its total has moved


@dataclass
class Worker:
    mode: str
    thread: ThreadPoolExecutor
    context: WorkerContext
    closed: bool = False
    steps: list[Step] = field(default_factory=list)

    def do(self, function: Callable[[], Any]) -> Any:
        return self.thread.submit(function).result(60)

    @property
    def captures(self) -> bool:
        return self.context.mode in CAPTURING_MODES


class Life(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.phase, self.cuda = CapturePhase(timeout_s=30), FakeCuda()
        self.workers: list[Worker] = []

    # ---- workers and steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 3)
    @rule(mode=MODES)
    def add_worker(self, mode: str) -> None:
        name = f"w{len(self.workers)}"
        options: dict[str, Any] = {"cuda": self.cuda} if mode == "fake cuda_graph" else {}
        context = open_context(mode, name=name, phase=self.phase, **options)
        worker = Worker(mode, ThreadPoolExecutor(1, thread_name_prefix=name), context)
        worker.do(context.__enter__)
        self.workers.append(worker)

    def _worker(self, pick: int) -> Worker:
        return self.workers[pick % len(self.workers)]

    def _step(self, pick: int) -> tuple[Worker, Step]:
        steps = [(worker, step) for worker in self.workers for step in worker.steps]
        return steps[pick % len(steps)]

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, kind=KINDS)
    def declare(self, pick: int, kind: Kind) -> None:
        worker, counter, kinds = self._worker(pick), Counter(), [kind]

        def function() -> None:
            counter.step()
            if kinds[0] == "failing":
                raise ZeroDivisionError("the first error")
            if kinds[0] == "disturbed":
                in_thread(lambda: self.cuda.synchronize(0) or 0)

        def make() -> StepGraph:
            return counter.make(worker.context, f"step-{len(worker.steps)}", function)

        if worker.closed:
            with pytest.raises(GraphError, match="destroyed"):
                worker.do(make)
            return
        worker.steps.append(Step(counter, worker.do(make), kinds, counter.total.clone()))

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def prepare(self, pick: int) -> None:
        worker = self._worker(pick)
        waiting = [step for step in worker.steps if not step.captured]
        if worker.closed:
            with pytest.raises(GraphError, match="destroyed"):
                worker.do(worker.context.prepare)
        elif not worker.captures or not waiting:
            worker.do(worker.context.prepare)
        elif self.phase.closed:
            with pytest.raises(GraphError, match="the capture phase is over"):
                worker.do(worker.context.prepare)
        else:
            bad = next((step for step in waiting if self._fails(worker, step)), None)
            good = waiting if bad is None else waiting[: waiting.index(bad)]
            for step in good:
                step.captured = True
            if bad is None:
                worker.do(worker.context.prepare)
            else:
                with pytest.raises(GraphError, match=f"could not capture {bad.graph.name}: "):
                    worker.do(worker.context.prepare)

    @staticmethod
    def _fails(worker: Worker, step: Step) -> bool:
        disturbed = step.kind[0] == "disturbed" and worker.mode == "fake cuda_graph"
        return step.kind[0] == "failing" or disturbed or step.moved

    # ---- runs -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(pick=PICK, value=st.integers(-100, 100))
    def run(self, pick: int, value: int) -> None:
        worker, step = self._step(pick)
        step.counter.x.fill_(float(value))
        if worker.closed:
            with pytest.raises(GraphError, match="destroyed"):
                worker.do(step.graph)
            return
        if worker.captures and not step.captured:
            with pytest.raises(GraphError, match="must be captured before it runs"):
                worker.do(step.graph)
            return
        fails = step.kind[0] == "failing" and not worker.captures
        if fails:
            with pytest.raises(ZeroDivisionError):
                worker.do(step.graph)
        else:
            worker.do(step.graph)
            step.calls += 1
        if step.frozen is None:
            step.total += float(value)
        else:
            step.frozen += float(value)
        assert step.counter.out.tolist() == [2.0 * value] * 2

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(pick=PICK)
    def run_elsewhere(self, pick: int) -> None:
        worker, step = self._step(pick)
        for use in (step.graph, worker.context.prepare):
            with pytest.raises(GraphError, match="destroyed" if worker.closed else "belongs to the thread of worker"):
                in_thread(use)

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(pick=PICK)
    def mend(self, pick: int) -> None:
        self._step(pick)[1].kind[0] = "good"

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(pick=PICK)
    def move(self, pick: int) -> None:
        _, step = self._step(pick)
        if step.moved:
            return
        step.moved = True
        if step.captured:
            step.frozen = step.counter.total.detach()
            step.total = step.total.clone()
        step.counter.total.data = step.counter.total.clone()

    @precondition(lambda self: any(worker.steps for worker in self.workers))
    @rule(pick=PICK)
    def check(self, pick: int) -> None:
        _, step = self._step(pick)
        if step.moved:
            with pytest.raises(GraphError, match="\ntotal: was"):
                step.graph.check_addresses()
        else:
            step.graph.check_addresses()

    # ---- ends -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) > 1)
    @rule()
    def close_phase(self) -> None:
        self.phase.close()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, elsewhere=st.booleans())
    def close_worker(self, pick: int, elsewhere: bool) -> None:
        worker = self._worker(pick)
        if elsewhere and not worker.closed:
            with pytest.raises(GraphError, match=r"close\(\) belongs to the thread"):
                in_thread(worker.context.close)
            return
        worker.do(worker.context.close)
        worker.closed = True

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        for worker in self.workers:
            worker.do(worker.context.close)
            worker.thread.shutdown()
        assert self.cuda.leftovers() == []
        assert self.cuda.events().count("reset") >= self.cuda.events().count("end")

    # ---- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        for worker in getattr(self, "workers", ()):
            for step in worker.steps:
                assert step.counter.total.tolist() == step.total.tolist()
                assert step.graph.calls == step.calls
                assert (step.graph.captured is not None) == (step.captured and not worker.closed)

    @invariant()
    def nothing_is_left_on(self) -> None:
        assert gc.isenabled()
        assert torch.autograd.is_multithreading_enabled()
        if hasattr(self, "cuda"):
            assert not self.cuda.capturing
            assert not self.cuda.faults


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
