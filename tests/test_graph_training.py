"""Whole runs whose steps are graphs: recorded equals eager bit for bit, debug finds faults, errors end cleanly."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_graph import training
from dflash_graph.graphs import CapturePhase, GraphError, StepGraph, WorkerContext
from dflash_graph.step import DrafterStep
from dflash_graph.target import Target
from dflash_graph.trainer import Trainer
from dflash_graph.training import train
from dflash_graph.workers import TargetWorker
from tests.tiny import tiny_config, weights

RUNS = {
    "plain": (),
    "accumulation, schedule, decay": (
        "schedule.jobs_per_step=3", "optim.lr_schedule=cosine", "optim.warmup_ratio=0.3", "optim.weight_decay=0.1",
    ),
    "two targets, groups": ("devices.num_targets=2", "devices.anchor_groups=3"),
    "teacher": ("loss.kl_weight=0.5", "loss.labels=target", "loss.weighting=d_pace"),
    "reduced head, causal, sliding": (
        "drafter.draft_vocab_size=40", "drafter.causal=true", "drafter.sliding_window=6",
        "drafter.layer_types=[sliding_attention,full_attention]",
    ),
    "validation in mid-epoch": ("log.validate_every=2",),
}  # fmt: skip


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_recorded_runs_end_with_the_weights_of_eager_ones(
    tiny: Path, tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise: masters, moments, and the losses of every validation; and the recorded run did replay."""
    replays = 0
    call = StepGraph.__call__

    def counting(self: StepGraph) -> None:
        nonlocal replays
        replays += self.captured is not None
        call(self)

    monkeypatch.setattr(StepGraph, "__call__", counting)
    lengths = [
        train(tiny_config(tiny, tmp_path / mode, *overrides, f"graphs.mode={mode}")).accept_length
        for mode in ("eager", "recorded")
    ]
    assert lengths[0] == lengths[1]
    assert weights(tmp_path / "eager") == weights(tmp_path / "recorded")
    jobs = 2 * 22
    assert replays > 2 * jobs, "each job is a target's step and a micro-step"


def test_a_plain_cpu_run_differs_by_the_rows_it_skips_only(tiny: Path, tmp_path: Path) -> None:
    for mode in ("auto", "eager"):
        train(tiny_config(tiny, tmp_path / mode, f"graphs.mode={mode}", "epochs=1"))
    plain, fixed = weights(tmp_path / "auto"), weights(tmp_path / "eager")
    for name in plain:
        a, b = (torch.frombuffer(bytearray(w[name]), dtype=torch.float32) for w in (plain, fixed))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_resumed_recorded_run_ends_where_the_straight_one_does(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    settings = ("graphs.mode=recorded", "checkpoint.every=1")
    train(tiny_config(tiny, tmp_path / "straight", *settings))
    count, apply = 0, DrafterStep.apply

    def dying(self: DrafterStep, lr: float) -> None:
        nonlocal count
        count += 1
        if count in (4, 10):
            raise Killed
        apply(self, lr)

    monkeypatch.setattr(DrafterStep, "apply", dying)
    for _ in range(2):
        with pytest.raises(Killed):
            train(tiny_config(tiny, tmp_path / "run", *settings), resume="auto")
    assert train(tiny_config(tiny, tmp_path / "run", *settings), resume="auto").complete
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_memory_figures_hold_every_byte_of_a_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing is measured; the plan is the same sum as on a GPU."""
    figures: list[Any] = []
    load = Trainer.load

    def noting(self: Trainer) -> None:
        load(self)
        figures.extend(self.memory())

    monkeypatch.setattr(Trainer, "load", noting)
    train(tiny_config(tiny, tmp_path / "run"), dry_run=True)
    (found,) = figures
    shapes = {"embed": 96 * 32, "layers": 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 64 * 32 + 2 * 32)}
    assert found.planned["weights"] >= 4 * sum(shapes.values())
    assert found.planned["head and embedding"] == 4 * 96 * 32  # the embedding is the target's own tensor
    assert found.planned["drafter state"] > 3 * found.planned["weights"] // 4
    assert found.measured == {"allocated": 0, "reserved": 0, "graph_pool": 0}


# ---- the life of graphs in a run ------------------------------------------------------------------------------------


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[WorkerContext]:
    """Every context that a run made."""
    made: list[WorkerContext] = []
    init = WorkerContext.__init__

    def noting(self: WorkerContext, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(WorkerContext, "__init__", noting)
    return made


def test_workers_capture_in_their_threads_one_after_the_other_and_never_later(
    tiny: Path, tmp_path: Path, contexts: list[WorkerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, str, bool]] = []
    runs: list[str] = []
    turn, run = CapturePhase.turn, TargetWorker.run

    def noting(self: CapturePhase, who: str) -> Any:
        turns.append((who, threading.current_thread().name, self.closed))
        assert self.closed or not runs, "a worker runs while another captures"
        return turn(self, who)

    def late(self: TargetWorker) -> None:
        runs.append(self.name)
        assert self.context is not None
        self.context.graph("late", lambda: None, inputs={}, outputs={}, state={})
        with pytest.raises(GraphError, match="capture phase is over"):
            self.context.prepare()
        run(self)

    monkeypatch.setattr(CapturePhase, "turn", noting)
    monkeypatch.setattr(TargetWorker, "run", late)
    train(tiny_config(tiny, tmp_path / "run", "graphs.mode=recorded", "devices.num_targets=2", "epochs=1"))
    assert turns[:3] == [(n, n, False) for n in ("target-0", "target-1", "drafter")]
    assert sorted(runs) == ["target-0", "target-1"]
    names = {graph.name for context in contexts for graph in context.graphs}
    assert names >= {"target.64", "target.128", "micro_step.32", "validate.32", "apply"}
    assert all(graph.captured is None for context in contexts for graph in context.graphs), "graphs outlive the run"


def _with_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    body = DrafterStep.micro_step_body

    def reading(self: DrafterStep, size: int, *, train: bool = True) -> None:
        body(self, size, train=train)
        self.weight_sum.item()  # the planted line

    monkeypatch.setattr(DrafterStep, "micro_step_body", reading)


@pytest.mark.parametrize("mode", ["recorded", "debug"])
def test_a_step_that_cannot_be_captured_ends_the_run_and_names_its_line(
    tiny: Path, tmp_path: Path, mode: str, contexts: list[WorkerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_a_sync(monkeypatch)
    with pytest.raises(GraphError, match=r"test_graph_training\.py:\d+ in .*reading") as error:
        train(tiny_config(tiny, tmp_path / "run", f"graphs.mode={mode}"))
    assert "drafter" in "".join(error.value.__notes__)
    assert "keep the value on the device" in str(error.value)
    assert len(contexts) == 2
    for context in contexts:
        with pytest.raises(GraphError, match="destroyed"):
            context.check_usable("it")


def test_debug_trains_like_eager_and_checks_as_often_as_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[tuple[str, int]] = []
    tracer = training.TrainingObserver.run

    def noting(self: Any, graph: StepGraph, function: Any) -> None:
        tracer(self, graph, function)
        if graph in self._traces and len(self._traces[graph].ops):
            traced.append((graph.name, graph.calls))

    monkeypatch.setattr(training.TrainingObserver, "run", noting)
    watch = ("graphs.mode=debug", "graphs.debug_steps=2", "graphs.debug_every=5")
    train(tiny_config(tiny, tmp_path / "debug", *watch))
    train(tiny_config(tiny, tmp_path / "eager", "graphs.mode=eager"))
    assert weights(tmp_path / "debug") == weights(tmp_path / "eager")
    assert {name for name, _ in traced} >= {"target.64", "target.128", "micro_step.32", "apply"}


def test_debug_sees_a_target_that_changes_with_the_data(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Target.forward, 0

    def changing(self: Target, token_ids: torch.Tensor, num_rows: int, row_length: int) -> None:
        nonlocal calls
        calls += 1
        forward(self, token_ids, num_rows, row_length)
        self.output.mul_(1 + calls * 1e-3)

    monkeypatch.setattr(Target, "forward", changing)
    with pytest.raises(GraphError, match=r"frozen_world.*1\.00"):
        train(tiny_config(tiny, tmp_path / "run", "graphs.mode=debug"))


def test_a_moved_gradient_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def moving(self: Trainer, num_jobs: int) -> list[int]:
        done = step(self, num_jobs)
        masters = self.step.parameters.masters
        masters["decay"].data = masters["decay"].clone()
        return done

    monkeypatch.setattr(Trainer, "_step", moving)
    with pytest.raises(GraphError, match=r"master\.decay"):
        train(tiny_config(tiny, tmp_path / "run", "graphs.mode=debug"))
