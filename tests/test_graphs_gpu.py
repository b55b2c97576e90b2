"""Graphs on a CUDA device: capture, replay against eager bit for bit, refusals, pools of two workers, whole runs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.debugging import debug
from dflash_graph.graphs import CapturePhase, GraphError, StepGraph, WorkerContext
from dflash_graph.training import train
from tests.tiny import make_tiny, tiny_config, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = ("devices.device=cuda",)


class Small:
    """A step with forward, backward and a fused update over static tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.w = torch.randn(128, 128, device="cuda", requires_grad=True)
        self.w.grad = torch.zeros_like(self.w)
        self.x = torch.randn(64, 128, device="cuda")
        self.lr = torch.tensor(1e-2, device="cuda")
        self.loss = torch.zeros((), device="cuda")
        self.optimizer = torch.optim.AdamW([self.w], lr=self.lr, fused=True, capturable=True)
        self.optimizer.state[self.w] = {
            "step": torch.zeros((), device="cuda"),
            "exp_avg": torch.zeros_like(self.w),
            "exp_avg_sq": torch.zeros_like(self.w),
        }

    def __call__(self) -> None:
        loss = (self.x @ self.w).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.copy_(loss.detach())
        self.optimizer.step()
        assert self.w.grad is not None
        self.w.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        assert self.w.grad is not None
        moments: dict[str, Tensor] = dict(self.optimizer.state[self.w])
        return {"w": self.w.detach(), "grad": self.w.grad, **moments}

    def declare(self, context: WorkerContext) -> StepGraph:
        inputs = {"x": self.x, "lr": self.lr}
        return context.graph("small", self, inputs=inputs, outputs={"loss": self.loss}, state=self.state())


def worker(mode: str = "cuda_graph", phase: CapturePhase | None = None, **kwargs: Any) -> WorkerContext:
    return WorkerContext("small", "cuda", mode=mode, phase=phase or CapturePhase(), **kwargs)  # type: ignore[arg-type]


def run_steps(step: Small, graph: StepGraph, steps: int = 20) -> list[bytes]:
    generator, losses = torch.Generator().manual_seed(1), []
    for i in range(steps):
        step.x.copy_(torch.randn(step.x.shape, generator=generator))
        step.lr.fill_(1e-2 / (1 + i))
        graph()
        losses.append(step.loss.cpu().numpy().tobytes())
    return losses + [t.cpu().numpy().tobytes() for t in step.state().values()]


def test_replays_equal_eager_steps_bitwise_while_data_and_rate_change() -> None:
    results = []
    for mode in ("eager", "cuda_graph"):
        step = Small()
        before = {name: t.clone() for name, t in step.state().items()}
        with worker(mode) as context:
            graph = step.declare(context)
            context.prepare()
            assert all(torch.equal(t, before[name]) for name, t in step.state().items()), "warm-up is undone"
            results.append(run_steps(step, graph))
            assert (graph.captured is not None) == (mode == "cuda_graph")
            if mode == "cuda_graph":
                assert context.memory()["graph_pool"] > 0
    assert results[0] == results[1]


def test_replays_allocate_nothing() -> None:
    step = Small()
    with worker() as context:
        graph = step.declare(context)
        context.prepare()
        graph()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(10):
            graph()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_refusals() -> None:
    phase = CapturePhase()
    step = Small()
    with worker(phase=phase) as context:
        graph = step.declare(context)
        with pytest.raises(GraphError, match="must be captured"):
            graph()
        context.prepare()
        errors: list[Exception] = []

        def elsewhere() -> None:
            try:
                graph()
            except GraphError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "belongs to the thread" in str(errors[0])
        phase.close()
        context.graph("late", lambda: None, inputs={}, outputs={}, state={})
        with pytest.raises(GraphError, match="phase is over"):
            context.prepare()
    with pytest.raises(GraphError, match="destroyed"):
        graph()


def test_a_sync_in_a_step_is_an_error_that_leaves_no_capture_behind() -> None:
    step = Small()
    with worker() as context:
        context.graph("bad", lambda: print(step.w.sum().item()), inputs={}, outputs={}, state=step.state())
        with pytest.raises(GraphError, match="dflash-graph"):
            context.prepare()
    assert not torch.cuda.is_current_stream_capturing()
    with worker() as context:
        graph = step.declare(context)
        context.prepare()
        graph()


def test_two_workers_share_a_device_with_a_stream_and_pool_each() -> None:
    phase, results, errors = CapturePhase(), {}, []
    ready = threading.Barrier(2)

    def live(name: str) -> None:
        try:
            step = Small()
            with WorkerContext(name, "cuda", mode="cuda_graph", phase=phase) as context:
                graph = step.declare(context)
                context.prepare()
                ready.wait(60)
                results[name] = (run_steps(step, graph, 200), context.backend.stream.cuda_stream)
        except Exception as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=live, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert results["a"][0] == results["b"][0]
    assert results["a"][1] != results["b"][1]


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [(), ("devices.num_targets=2", "devices.anchor_groups=3"), ("loss.kl_weight=0.5", "loss.labels=target")],
    ids=["plain", "two targets, groups", "teacher"],
)
def test_whole_runs_end_with_the_weights_of_eager_ones(tiny: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    for mode in ("eager", "cuda_graph"):
        train(tiny_config(tiny, tmp_path / mode, *CUDA, *overrides, f"graphs.mode={mode}"))
    assert weights(tmp_path / "eager") == weights(tmp_path / "cuda_graph")


def test_debug_finds_nothing_on_the_device(tiny: Path, tmp_path: Path) -> None:
    report = debug(tiny_config(tiny, tmp_path / "run", *CUDA, "drafter.num_micro_step_sizes=1"))
    assert not report.findings, str(report)
