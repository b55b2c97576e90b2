"""Graphs on a device: replay against eager bit for bit, refusals, workers that share it, teardown, whole runs.

Each test runs on a CUDA device and, where the CPU's stand-in can show the same, also there: so the tests themselves are
tried where no GPU is.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.graph_storm import SmallStep
from dflash_graph.debugging import debug
from dflash_graph.graphs import CapturePhase, GraphError, Mode, StepGraph, WorkerContext
from dflash_graph.training import train
from tests.tiny import tiny_config, weights

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
MODES: dict[str, Mode] = {"cpu": "recorded", "cuda": "cuda_graph"}


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def worker(device: str, mode: Mode | None = None, *, name: str = "it", phase: CapturePhase | None = None) -> Any:
    return WorkerContext(name, device, mode=mode or MODES[device], phase=phase or CapturePhase())


def run_steps(step: SmallStep, run: Callable[[], None], steps: int = 20) -> list[bytes]:
    """Losses of `steps` steps over changing data and rates, then the state, as bytes."""
    generator, losses = torch.Generator().manual_seed(1), []
    for i in range(steps):
        step.x.copy_(torch.randn(step.x.shape, generator=generator))
        step.lr.fill_(1e-2 / (1 + i))
        run()
        losses.append(as_bytes(step.loss))
    assert len(set(losses)) == steps
    return [*losses, *map(as_bytes, step.state().values())]


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def refusal(function: Callable[[], Any]) -> str:
    """The GraphError that `function` raises in another thread."""
    errors: list[str] = []

    def run() -> None:
        try:
            function()
        except GraphError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert errors, "it was not refused"
    return errors[0]


# ---- replay against eager -------------------------------------------------------------------------------------------


def test_replays_equal_eager_steps_bitwise_while_data_and_rate_change(device: str) -> None:
    results = {}
    for mode in ("eager", MODES[device]):
        step = SmallStep(device, 3)
        with worker(device, mode) as context:
            graph = step.declare(context, "step")
            context.prepare()
            results[mode] = run_steps(step, graph)
            assert (graph.captured is not None) == (mode != "eager")
    assert results["eager"] == results[MODES[device]]


def test_replays_equal_eager_steps_from_any_cloned_state(device: str) -> None:
    step = SmallStep(device, 3)
    with worker(device) as context:
        graph = step.declare(context, "step")
        context.prepare()
        run_steps(step, graph, 7)
        before = {name: t.clone() for name, t in step.state().items()}
        found = run_steps(step, graph)
        for name, tensor in step.state().items():
            tensor.copy_(before[name])
        assert run_steps(step, step) == found


def test_warm_up_and_capture_leave_state_and_outputs_as_they_were(device: str) -> None:
    step = SmallStep(device, 3)
    with worker(device) as context:
        run_steps(step, step, 3)  # moments, counter and loss are no zeros
        before = [as_bytes(t) for t in (*step.state().values(), step.loss)]
        step.declare(context, "step")
        context.prepare()
        assert [as_bytes(t) for t in (*step.state().values(), step.loss)] == before


def test_the_rate_of_a_replay_is_that_of_its_tensor(device: str) -> None:
    step = SmallStep(device, 3)
    with worker(device) as context:
        graph = step.declare(context, "step")
        context.prepare()
        before = step.weight.detach().clone()
        step.lr.fill_(0.0)
        graph()
        assert torch.equal(step.weight, before)
        step.lr.fill_(0.5)
        graph()
        assert 0.1 < float((step.weight.detach() - before).abs().max()) <= 0.6  # AdamW moves by about the rate


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_graph_is_refused_before_prepare_from_another_thread_and_after_close(device: str) -> None:
    step = SmallStep(device, 3)
    with worker(device) as context:
        graph = step.declare(context, "step")
        with pytest.raises(GraphError, match="must be captured before it runs"):
            graph()
        assert "belongs to the thread" in refusal(context.prepare)
        context.prepare()
        assert "belongs to the thread" in refusal(graph)
        assert "belongs to the thread" in refusal(context.close)
        graph()
    with pytest.raises(GraphError, match="destroyed"):
        graph()


def test_a_capture_after_the_phase_is_refused(device: str) -> None:
    phase = CapturePhase()
    with worker(device, phase=phase) as context:
        phase.close()
        SmallStep(device, 3).declare(context, "late")
        with pytest.raises(GraphError, match="phase is over"):
            context.prepare()


@pytest.mark.gpu
def test_a_replay_on_another_stream_is_refused() -> None:
    step = SmallStep("cuda", 3)
    with worker("cuda") as context:
        graph = step.declare(context, "step")
        context.prepare()
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(GraphError, match="own stream"):
            graph()
        graph()


def test_a_step_that_waits_for_the_device_is_refused_and_leaves_no_capture_behind(device: str) -> None:
    step, phase = SmallStep(device, 3), CapturePhase()
    with worker(device, phase=phase) as context:

        def reading() -> None:
            step()
            step.loss.item()

        before = as_bytes(step.weight)
        graph = context.graph("bad", reading, inputs={"x": step.x}, outputs={}, state=step.state())
        with pytest.raises(GraphError, match="could not capture bad"):
            context.prepare()
        assert graph.captured is None
        assert as_bytes(step.weight) == before
    assert device == "cpu" or not torch.cuda.is_current_stream_capturing()
    with worker(device, phase=phase) as context:
        good = step.declare(context, "good")
        context.prepare()
        good()


# ---- memory and teardown --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graphs_of_a_worker_share_a_pool_and_replays_allocate_nothing() -> None:
    with worker("cuda") as context:
        assert context.memory()["graph_pool"] == 0

        def large() -> None:
            x.copy_((x.expand(1 << 24) * 2.0)[:1])  # 64 MiB on the way

        x = torch.ones(1, device="cuda")
        graphs = [context.graph(n, large, inputs={}, outputs={}, state={"x": x}) for n in "ab"]
        context.prepare()
        pool = context.memory()["graph_pool"]
        assert 1 << 26 <= pool < 1 << 27, "one graph's memory, not two"
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for graph in graphs * 5:
            graph()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert float(x) == 2.0**10


def test_teardown_destroys_graphs_before_the_pool_and_gives_the_thread_back(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    stream = torch.cuda.current_stream() if device == "cuda" else None
    threaded = torch.autograd.is_multithreading_enabled()
    context = worker(device)
    close, reset = context.backend.close, StepGraph._reset
    monkeypatch.setattr(context.backend, "close", lambda: (events.append("pool"), close()))
    monkeypatch.setattr(StepGraph, "_reset", lambda self: (events.append(self.name), reset(self)))
    with context:
        graphs = [SmallStep(device, i).declare(context, f"step.{i}") for i in range(2)]
        context.prepare()
        assert not torch.autograd.is_multithreading_enabled()
        assert device == "cpu" or torch.cuda.current_stream() != stream
        held = torch.cuda.memory_reserved() if device == "cuda" else 0
    assert sorted(events[:2]) == ["step.0", "step.1"]
    assert events[2:] == ["pool"]
    assert all(graph.captured is None for graph in graphs)
    assert torch.autograd.is_multithreading_enabled() == threaded
    if device == "cuda":
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < held, "the pool is gone"


# ---- two workers of one device --------------------------------------------------------------------------------------


def test_two_workers_share_a_device_with_a_stream_and_a_pool_each(device: str) -> None:
    phase, errors = CapturePhase(), []
    results: dict[str, list[bytes]] = {}
    owned: dict[str, tuple[Any, Any]] = {}
    ready = threading.Barrier(2)

    def live(name: str) -> None:
        try:
            step = SmallStep(device, 3)
            with worker(device, name=name, phase=phase) as context:
                graph = step.declare(context, "step")
                context.prepare()
                owned[name] = context.stream, getattr(context.backend, "_pool", None)
                ready.wait(120)
                results[name] = run_steps(step, graph, 200)  # at the same time
                ready.wait(120)  # pools live together
        except Exception as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=live, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert not errors, errors
    alone = SmallStep(device, 3)
    with worker(device, "eager"):
        assert results["a"] == results["b"] == run_steps(alone, alone, 200)
    if device == "cuda":
        (stream_a, pool_a), (stream_b, pool_b) = owned["a"], owned["b"]
        assert stream_a.cuda_stream != stream_b.cuda_stream
        assert pool_a.id != pool_b.id


# ---- whole runs -----------------------------------------------------------------------------------------------------


# Workers wait for each other while one compiles kernels.
SETTINGS = ("schedule.wait_timeout_s=250", "log.every=1")
RUNS = {
    "plain": (),
    "two targets, groups": ("devices.num_targets=2", "schedule.jobs_per_step=3", "devices.anchor_groups=3"),
    "teacher": ("loss.kl_weight=0.5", "loss.labels=target"),
}  # fmt: skip


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_whole_runs_have_the_losses_and_the_weights_of_eager_ones(
    tiny: Path, tmp_path: Path, overrides: tuple[str, ...], device: str
) -> None:
    found = {}
    for mode in ("eager", MODES[device]):
        folder = tmp_path / mode
        settings = (f"devices.device={device}", f"graphs.mode={mode}", *SETTINGS, *overrides)
        result = train(tiny_config(tiny, folder, *settings))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[mode] = [r["loss"] for r in records if r.get("loss") is not None], weights(folder), result.accept_length
    assert len(found["eager"][0]) > 10
    assert found["eager"] == found[MODES[device]]


def test_a_resumed_run_ends_where_the_straight_one_does(tiny: Path, tmp_path: Path, device: str) -> None:
    """It captures anew, over restored masters and moments."""
    settings = (f"devices.device={device}", f"graphs.mode={MODES[device]}", *SETTINGS)
    train(tiny_config(tiny, tmp_path / "straight", *settings))
    train(tiny_config(tiny, tmp_path / "run", *settings, "epochs=1"))
    train(tiny_config(tiny, tmp_path / "run", *settings), resume="auto")
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_debug_finds_nothing(tiny: Path, tmp_path: Path, device: str) -> None:
    settings = (f"devices.device={device}", *SETTINGS, "drafter.num_micro_step_sizes=1")
    report = debug(tiny_config(tiny, tmp_path / "run", *settings))
    assert not report.findings, str(report)
    assert report.trained_steps > 0
