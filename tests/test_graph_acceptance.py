"""The graph part of the GPU acceptance over CPU stand-ins: each part runs, and a fault in what it watches fails it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import graph_acceptance, graph_times
from bench.graph_acceptance import main
from bench.graph_models import Task
from bench.graph_replay import JOBS_PER_STEP, QUICK_STEPS, digest
from bench.graph_storm import QUICK_CAPTURES, run_storm
from dflash_graph.debug_checks import StepUnderTest
from dflash_graph.graph_backends import CudaBackend, Tape
from dflash_graph.graphs import CapturePhase, StepGraph, WorkerContext
from dflash_graph.step import DrafterStep
from tests.graph_backend import FakeCuda


def report_of(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["--device", "cpu", "--mode", "recorded", "--quick", "--output", str(path), *arguments])
    return code, json.loads(path.read_text())["parts"]


def test_all_parts_pass_on_the_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, parts = report_of(tmp_path / "out.json")
    assert code == 0, parts
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads((tmp_path / "out.json").read_text())
    assert list(parts) == ["debug", "replay", "storm", "times"]
    assert parts["debug"]["trained_steps"] == 2
    replay = parts["replay"]
    assert replay["steps"] >= QUICK_STEPS
    assert replay["first_difference"] is None
    assert replay["replays"]["target-0"] == JOBS_PER_STEP * replay["steps"]
    assert replay["replays"]["drafter"] >= (JOBS_PER_STEP + 1) * replay["steps"]
    assert {"features", "grad.decay", "after the update: exp_avg_sq.no_decay"} <= set(replay["buffers"])
    assert parts["storm"]["captures"] == [QUICK_CAPTURES] * 2
    assert parts["storm"]["noise_rounds"] > 10
    (found,) = parts["times"]["budgets"].values()
    assert set(found["steps"]) == {"target.128", "micro_step.32", "apply"}
    for row in found["steps"].values():
        assert row["rounds"] == 3
        assert all(0 < row[f"{way}_host_ms"] <= row[f"{way}_max_ms"] for way in ("eager", "graph"))
        assert all(row[f"{way}_min_ms"] <= row[f"{way}_ms"] <= row[f"{way}_max_ms"] for way in ("eager", "graph"))
    slowest = sum(row["graph_ms"] for row in found["steps"].values())
    assert found["positions_per_s"]["graph"] == round(256 / slowest * 1e3)


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fifth", "buffer"),
    [
        ("target", 2 * 5, "features"),
        ("micro_step", 2 * 5, "grad.decay"),
        ("apply", 5, "after the update: exp_avg.decay"),
    ],
)
def test_a_replay_that_differs_is_named_by_step_and_buffer(
    kind: str, fifth: int, buffer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one float, after the fifth step's replay of one kind of graph."""
    call, count = StepGraph.__call__, 0

    def wrong(self: StepGraph) -> None:
        nonlocal count
        call(self)
        if self.captured is None or not self.name.startswith(kind):
            return
        count += 1
        if count == fifth:
            tensors = self.outputs | self.state
            tensor = tensors[{"target": "output", "micro_step": "grad.decay", "apply": "exp_avg.decay"}[kind]]
            bits = tensor.reshape(-1)[:1].view(torch.int32)
            bits ^= 1

    monkeypatch.setattr(StepGraph, "__call__", wrong)
    code, parts = report_of(tmp_path / "out.json", "--parts", "replay")
    assert code == 1
    first = parts["replay"]["first_difference"]
    assert first["buffer"] == buffer
    if kind != "target":  # whose jobs are drawn in another order
        assert first["step"] == 5
    assert str(first["step"]) in parts["replay"]["faults"][0]


def test_steps_that_are_no_replays_fail_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterStep, "make_graphs", lambda *args, **kwargs: None)
    code, parts = report_of(tmp_path / "out.json", "--parts", "replay")
    assert code == 1
    assert "not every step was a replay" in parts["replay"]["faults"][0]


def test_digests_see_every_bit_and_its_place() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        x = torch.arange(12).view(3, 4).to(dtype)
        y, z = x.clone(), x.flip(0)
        y[1, 1] += 1
        assert len({int(digest(t)) for t in (x, y, z)}) == 3
        assert digest(x) == digest(x.clone())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
    assert digest(torch.tensor(1.5)) == digest(torch.tensor(1.5))


# ---- storm ----------------------------------------------------------------------------------------------------------


def fake_storm(cuda: FakeCuda, tmp_path: Path) -> dict[str, Any]:
    """The storm over the strict stand-in for CUDA graphs."""
    task = Task(folder=tmp_path, device="cpu", mode="cuda_graph", quick=True)
    return run_storm(task, lambda: CudaBackend(torch.device("cuda", 0), cuda=cuda))


def test_the_storm_keeps_every_rule_of_cuda_graphs(tmp_path: Path) -> None:
    cuda = FakeCuda()
    result = fake_storm(cuda, tmp_path)
    assert result["passed"], result["errors"]
    assert not cuda.faults
    assert not cuda.graphs, "all graphs were reset"
    begins = [name for name, what in cuda.log if what.startswith("begin")]
    assert {"storm-0", "storm-1"} == set(begins)


def test_captures_that_take_no_turns_do_not_survive_the_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two captures at once: a warm-up, or garbage collection, of one falls into the other's."""
    meet = threading.Barrier(2)

    @contextmanager
    def at_once(self: CapturePhase, who: str) -> Iterator[None]:
        if not who.startswith("the end"):
            try:
                meet.wait(20)
            except threading.BrokenBarrierError as error:
                raise RuntimeError("the other worker is gone") from error
        yield

    monkeypatch.setattr(CapturePhase, "turn", at_once)
    result = fake_storm(FakeCuda(), tmp_path)
    assert not result["passed"]
    assert result["errors"]


def test_a_wrong_replay_fails_the_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, count = Tape.replay, 0

    def forgets_one(self: Tape) -> None:
        nonlocal count
        count += 1
        if count != 20:
            replay(self)

    monkeypatch.setattr(Tape, "replay", forgets_one)
    code, parts = report_of(tmp_path / "out.json", "--parts", "storm")
    assert code == 1
    assert "differs from the eager step's" in parts["storm"]["errors"][0]


def test_a_copy_that_comes_back_changed_fails_the_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Tensor.to

    def wrong(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        changed = threading.current_thread().name == "noise"
        return to(self + 1 if changed else self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", wrong)
    code, parts = report_of(tmp_path / "out.json", "--parts", "storm")
    assert code == 1
    assert "came back changed" in parts["storm"]["errors"][0]
    assert parts["storm"]["captures"] == [QUICK_CAPTURES] * 2


# ---- times, and all -------------------------------------------------------------------------------------------------


def test_eager_and_graph_are_timed_in_turns_each_from_the_same_state() -> None:
    seen: list[tuple[str, float]] = []
    state = torch.zeros(1)

    def run(way: str) -> None:
        seen.append((way, float(state)))
        state.add_(1)

    step = StepUnderTest(
        name="it",
        worker="w",
        device=torch.device("cpu"),
        function=partial(run, "eager"),
        results={},
        load=lambda i: state.fill_(7.0 * i),
        book=dict,
    )
    with WorkerContext("w", "cpu", mode="eager", phase=CapturePhase()) as context:
        graph = context.graph("it", partial(run, "graph"), inputs={}, outputs={}, state={"state": state})
        row = graph_times.time_step(step, graph, 3)
    assert seen == [("eager", 7.0), ("graph", 7.0)] * 5
    assert row["rounds"] == 3


def test_budgets_for_which_no_time_is_left_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_times, "QUICK_BUDGETS", (256, 512))
    code, parts = report_of(tmp_path / "out.json", "--parts", "times", "--seconds", "0.2")
    assert code == 0
    assert list(parts["times"]["budgets"]) == ["256"]
    assert parts["times"]["left_out"] == [512]
    code, parts = report_of(tmp_path / "none.json", "--parts", "times", "--seconds", "-1")
    assert code == 1


def test_what_was_timed_is_kept_when_the_next_budget_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_times, "QUICK_BUDGETS", (256, 512))
    once, count = graph_times.time_budget, 0

    def dies(*args: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 2:
            raise SystemExit(9)  # as a signal would end it: nothing more is written
        return once(*args)

    monkeypatch.setattr(graph_times, "time_budget", dies)
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--quick", "--output", str(tmp_path / "out.json"), "--parts", "times"])
    times = json.loads((tmp_path / "out.json").read_text())["parts"]["times"]
    assert list(times["budgets"]) == ["256"]
    assert times["passed"] is False


def test_a_part_that_raises_fails_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: Task) -> dict[str, Any]:
        raise RuntimeError("planted")

    monkeypatch.setitem(graph_acceptance.PARTS, "debug", broken)
    code, parts = report_of(tmp_path / "out.json", "--parts", "debug,storm")
    assert code == 1
    assert "planted" in parts["debug"]["error"]
    assert parts["storm"]["passed"]


def test_findings_of_the_debug_mode_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = DrafterStep.micro_step_body

    def reading(self: DrafterStep, size: int, *, train: bool = True) -> None:
        body(self, size, train=train)
        self.weight_sum.item()

    monkeypatch.setattr(DrafterStep, "micro_step_body", reading)
    code, parts = report_of(tmp_path / "out.json", "--parts", "debug")
    assert code == 1
    assert any("test_graph_acceptance.py" in str(f["site"]) for f in parts["debug"]["findings"])


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "storms"])
    assert "storms" in capsys.readouterr().err
