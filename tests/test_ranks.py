"""Whole runs of two and three ranks on the CPU: the same training as one rank, whatever the number of processes."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.metrics import read_records
from dflash_graph.ranks import Ranks
from dflash_graph.training import train
from tests.rank_harness import RankProcesses, start_ranks
from tests.tiny import tiny_config, tiny_settings


def run_ranks(
    tiny: Path, tmp_path: Path, name: str, world: int, *overrides: str, resume: str = "never"
) -> RankProcesses:
    settings = [*tiny_settings(tiny, tmp_path / name), f"devices.ranks={world}", *overrides]
    folder = tmp_path / f"launcher-{name}-{len(list(tmp_path.glob('launcher-*')))}"
    return start_ranks(folder, world, ["-m", "dflash_graph", "train", *settings, "--resume", resume])


def finished(tiny: Path, tmp_path: Path, name: str, world: int, *overrides: str, **kwargs: str) -> RankProcesses:
    ranks = run_ranks(tiny, tmp_path, name, world, *overrides, **kwargs)
    codes = ranks.wait()
    assert codes == [0] * world, "\n".join(ranks.output(r) for r in range(world))
    return ranks


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = find_latest(run)
    assert newest is not None
    checkpoint = load_checkpoint(newest)
    return checkpoint.drafter | checkpoint.optimizer


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return float((difference / sum(float(t.double().square().sum()) for t in a.values())) ** 0.5)


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run) if record["kind"] == kind]


SETTINGS = ("schedule.jobs_per_step=5", "checkpoint.every=4", "log.every=1")


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank that others must equal."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_config(tiny, run, *SETTINGS))
    return run


@pytest.mark.parametrize("world, more", [(2, ()), (3, ("devices.rank_jobs=[3,0,2]",))])
def test_ranks_train_what_one_rank_trains(
    tiny: Path, tmp_path: Path, alone: Path, world: int, more: tuple[str, ...]
) -> None:
    finished(tiny, tmp_path, "run", world, *SETTINGS, *more)
    run = tmp_path / "run"
    # Sums round differently, and Adam divides by small numbers: equal to a few float32 roundings, not bitwise.
    assert distance(tensors(alone), tensors(run)) < 1e-5
    ours, theirs = of_kind(run, "train"), of_kind(alone, "train")
    for a, b in zip(ours, theirs, strict=True):
        for name in ("step", "epoch", "jobs_trained", "tokens", "rows_per_k", "blocks_per_k", "length_mix", "lr"):
            assert a[name] == b[name], (name, a["step"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert 0 <= a["slowest_rank"] < world
        assert all(worker.startswith("rank") for worker in a["waits"])
    for a, b in zip(of_kind(run, "validation"), of_kind(alone, "validation"), strict=True):
        assert a["rows_per_k"] == b["rows_per_k"]
        assert a["accept_length"] == pytest.approx(b["accept_length"], rel=1e-4)


def test_summed_gradients_are_those_of_one_rank(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a step's jobs and their weights: 2 + 1 + 2 jobs in three processes, and all 5 in one."""
    settings = [*tiny_settings(tiny, tmp_path / "run"), "devices.ranks=3", *SETTINGS, "epochs=1"]
    kept = str(tmp_path / "sums-")
    command = ["-m", "tests.rank_program", "train", *settings, "devices.rank_jobs=[2,1,2]", "--dry-run"]
    ranks = start_ranks(tmp_path / "launcher", 3, command, env={"KEEP_SUMS": kept})
    assert ranks.wait() == [0, 0, 0], ranks.output(0)
    theirs = [torch.load(f"{kept}{rank}") for rank in range(3)]
    found: list[torch.Tensor] = []
    monkeypatch.setattr(Ranks, "all_reduce", lambda self, tensor: found.append(tensor.clone()))
    train(tiny_config(tiny, tmp_path / "alone", *SETTINGS, "epochs=1"), dry_run=True)
    (ours,) = found
    assert all(torch.equal(tensor, theirs[0]) for tensor in theirs)
    gradient, weight = theirs[0][:-1].double() - ours[:-1].double(), float(theirs[0][-1] / ours[-1])
    assert float(ours[:-1].norm()) > 0
    assert float(gradient.norm() / ours[:-1].double().norm()) < 1e-6
    assert weight == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("draw", ["ready", pytest.param("round_robin", marks=pytest.mark.slow)])
def test_draws_that_follow_timing_lose_no_job(tiny: Path, tmp_path: Path, draw: str) -> None:
    finished(tiny, tmp_path, "run", 2, f"schedule.draw={draw}", "log.every=1")
    records = of_kind(tmp_path / "run", "train")
    total = of_kind(tmp_path / "run", "schedule")[0]["jobs_per_bucket"]
    assert records[-1]["jobs_trained"] == 2 * sum(total)
    first = [r["length_mix"] for r in records if r["step"] <= len(records) // 2]
    assert np.sum([mix for record in first for mix in record], axis=0).tolist() == total


def test_a_run_goes_on_with_other_numbers_of_ranks(tiny: Path, tmp_path: Path, alone: Path) -> None:
    """3 -> 2 -> 1: each part ends when one rank is asked to, and the last equals the run that was never interrupted."""
    run = tmp_path / "run"
    for world, after, resume in ((3, "checkpoint at step 4", "never"), (2, "checkpoint at step 8:", "auto")):
        ranks = run_ranks(tiny, tmp_path, "run", world, *SETTINGS, "devices.ranks=" + str(world), resume=resume)
        ranks.wait_for(0, after)
        ranks.signal(world - 1, signal.SIGTERM)  # any rank
        assert ranks.wait() == [0] * world, "\n".join(map(ranks.output, range(world)))
        assert "Traceback" not in "".join(map(ranks.output, range(world)))
    train(tiny_config(tiny, run, *SETTINGS), resume="auto")
    records, whole = of_kind(run, "train"), of_kind(alone, "train")
    assert [r["jobs_trained"] for r in records] == [r["jobs_trained"] for r in whole]
    assert [r["length_mix"] for r in records] == [r["length_mix"] for r in whole]
    assert distance(tensors(alone), tensors(run)) < 1e-5


@pytest.mark.slow
def test_evaluation_during_training_is_shared_out(tiny: Path, tmp_path: Path) -> None:
    """Five prompts over two ranks: the same result as one rank's, and no effect on the weights."""
    evaluation = (
        "eval.every=6", f"eval.prompts=[{tiny / 'heldout.jsonl'}]", "eval.num_prompts=5", "eval.max_new_tokens=12",
    )  # fmt: skip
    finished(tiny, tmp_path, "with", 2, "epochs=1", *evaluation)
    finished(tiny, tmp_path, "without", 2, "epochs=1")
    train(tiny_config(tiny, tmp_path / "alone", "epochs=1", *evaluation))
    a, b = tensors(tmp_path / "with"), tensors(tmp_path / "without")
    assert all(torch.equal(a[name], b[name]) for name in a)
    ours, theirs = of_kind(tmp_path / "with", "eval"), of_kind(tmp_path / "alone", "eval")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] == [6, 11]
    for one, other in zip(ours, theirs, strict=True):
        assert one["accept_length"] == pytest.approx(other["accept_length"], abs=0.1)
        assert one["accept_length"] >= 1


def test_a_dry_run_keeps_nothing(tiny: Path, tmp_path: Path) -> None:
    settings = [*tiny_settings(tiny, tmp_path / "run"), "devices.ranks=2"]
    ranks = start_ranks(tmp_path / "launcher", 2, ["-m", "dflash_graph", "train", *settings, "--dry-run"])
    assert ranks.wait() == [0, 0]
    assert not (tmp_path / "run").exists()
    assert "one step: loss" in ranks.output(0)
    assert "one step: loss" not in ranks.output(1)


def test_ranks_must_have_the_same_settings(tiny: Path, tmp_path: Path) -> None:
    settings = [*tiny_settings(tiny, tmp_path / "run"), "devices.ranks=2", "optim.lr=${oc.env:LEARNING_RATE}"]
    rates = {0: {"LEARNING_RATE": "1e-3"}, 1: {"LEARNING_RATE": "2e-3"}}
    ranks = start_ranks(tmp_path / "launcher", 2, ["-m", "dflash_graph", "train", *settings], env_of=rates)
    assert ranks.wait() == [3, 2]
    assert "rank 1 must have the settings and data of rank 0; they differ: optim.lr" in ranks.output(1)
    assert "optim.lr" in ranks.output(0)
    error = json.loads((tmp_path / "launcher" / "error-1.json").read_text())
    assert error["own"]
    assert "optim.lr" in error["error"]


def test_one_process_refuses_to_be_two_ranks(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 ranks, which are processes of their own"):
        train(tiny_config(tiny, tmp_path / "run", "devices.ranks=2"))
