"""One rank of several fails, dies, falls silent or is slow, at every stage: the others end in time and say why."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.metrics import read_records
from dflash_graph.training import train
from tests.rank_harness import LIMIT_S, RankProcesses, start_ranks
from tests.test_ranks import distance, of_kind, tensors
from tests.tiny import tiny_config, tiny_settings

TIMEOUT_S = 3.0


def start(
    tiny: Path, tmp_path: Path, rank: int, stage: str, kind: str, *overrides: str, world: int = 2
) -> RankProcesses:
    settings = [
        *tiny_settings(tiny, tmp_path / "run"), f"devices.ranks={world}", f"devices.rank_timeout_s={TIMEOUT_S}",
        "checkpoint.every=3", *overrides,
    ]  # fmt: skip
    fault = {"FAULT_RANK": str(rank), "FAULT_STAGE": stage, "FAULT_KIND": kind}
    return start_ranks(tmp_path / "launcher", world, ["-m", "tests.rank_program", "train", *settings], env=fault)


def cases(*fast: tuple[int, str], slow: tuple[tuple[int, str], ...]) -> list[Any]:
    """(rank, stage), the rest of the matrix only with --slow."""
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow if case not in fast)]


STAGES = ("start-up", "load", "first step", "mid-epoch", "after a micro-step", "end of epoch", "saving", "target")


@pytest.mark.parametrize(
    "rank, stage",
    cases(
        (0, "start-up"), (1, "mid-epoch"), (0, "writing"), (1, "target"),
        slow=tuple((rank, stage) for rank in (0, 1) for stage in STAGES),
    ),
)  # fmt: skip
def test_a_rank_that_raises_ends_all(tiny: Path, tmp_path: Path, rank: int, stage: str) -> None:
    ranks = start(tiny, tmp_path, rank, stage, "raise")
    codes = ranks.wait()
    assert codes[rank] == 1
    assert codes[1 - rank] == 3, ranks.output(1 - rank)
    assert "the planted error" in ranks.output(rank)
    assert f"another rank failed first: rank {rank}" in ranks.output(1 - rank)
    assert "the planted error" in ranks.output(1 - rank)
    own = json.loads((ranks.folder / f"error-{rank}.json").read_text())
    theirs = json.loads((ranks.folder / f"error-{1 - rank}.json").read_text())
    assert own["own"]
    assert (theirs["own"], theirs["caused_by"]) == (False, rank)


@pytest.mark.parametrize(
    "rank, stage",
    cases((1, "mid-epoch"), (0, "saving"), slow=((0, "start-up"), (0, "first step"), (0, "end of epoch"))),
)
def test_a_rank_that_is_killed_ends_all(tiny: Path, tmp_path: Path, rank: int, stage: str) -> None:
    ranks = start(tiny, tmp_path, rank, stage, "kill")
    codes = ranks.wait()
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 3
    assert f"rank {rank}" in ranks.output(1 - rank)
    assert "silent" in ranks.output(1 - rank) or "store" in ranks.output(1 - rank)


@pytest.mark.parametrize("rank, stage", cases((0, "mid-epoch"), slow=((1, "mid-epoch"), (0, "saving"), (1, "saving"))))
def test_a_rank_that_stops_answering_ends_all(tiny: Path, tmp_path: Path, rank: int, stage: str) -> None:
    ranks = start(tiny, tmp_path, rank, stage, "stop", world=3)
    others = [r for r in range(3) if r != rank]
    deadline = time.monotonic() + LIMIT_S
    while any(ranks.processes[r].poll() is None for r in others):
        assert time.monotonic() < deadline, "\n".join(map(ranks.output, range(3)))
        time.sleep(0.1)
    assert [ranks.processes[r].returncode for r in others] == [3, 3]
    ranks.kill()
    for other in others:
        assert f"rank {rank}" in ranks.output(other)
        assert "no sign of life" in ranks.output(other) or "has not answered" in ranks.output(other)


@pytest.mark.slow
def test_a_rank_that_hangs_alive_is_found_by_the_bounded_wait(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 1, "mid-epoch", "hang", "schedule.wait_timeout_s=4")
    codes = ranks.wait()
    assert codes[0] in (1, 3)
    assert 0 not in codes
    assert "rank 1: step 5" in ranks.output(0), ranks.output(0)


def test_a_slow_rank_is_waited_for_and_named(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 1, "every step", "slow", "log.every=1", "epochs=1")
    assert ranks.wait() == [0, 0]
    records = of_kind(tmp_path / "run", "train")
    assert len(records) == 11
    slowest = [record["slowest_rank"] for record in records]
    assert slowest.count(1) > len(slowest) / 2
    assert sum(record["waited_for_ranks_s"] for record in records) > 0.5 * 11 / 2


def test_nan_on_one_rank_skips_the_step_on_all(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 1, "after a micro-step", "nan", "log.every=1", "devices.check_every=1")
    assert ranks.wait() == [0, 0], ranks.output(0)
    skipped = [record["skipped_steps"] for record in of_kind(tmp_path / "run", "train")]
    assert skipped[5] == 1
    assert sum(skipped) == 1


def test_parameters_that_drift_apart_end_the_run_by_name(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 1, "mid-epoch", "drift", "devices.check_every=2")
    codes = ranks.wait()
    assert 0 not in codes
    assert "rank 1 and rank 0 must hold the same parameters at step 6" in ranks.output(0)
    assert "fc.weight" in ranks.output(0)


def test_a_rank_without_a_job_takes_part(tiny: Path, tmp_path: Path) -> None:
    """Steps of one job over three ranks: two of them never have an anchor, and take every exchange all the same."""
    ranks = start(tiny, tmp_path, 9, "", "", "schedule.jobs_per_step=1", "epochs=1", world=3)
    assert ranks.wait() == [0, 0, 0], ranks.output(0)
    train(tiny_config(tiny, tmp_path / "alone", "schedule.jobs_per_step=1", "epochs=1"))
    assert distance(tensors(tmp_path / "alone"), tensors(tmp_path / "run")) < 1e-5


def test_bad_input_is_told_to_all(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 0, "start-up", "bad input")
    assert ranks.wait() == [2, 3]
    assert "the planted refusal" in ranks.output(1)


def test_no_checkpoint_is_lost_when_a_rank_dies(tiny: Path, tmp_path: Path) -> None:
    ranks = start(tiny, tmp_path, 1, "mid-epoch", "kill")
    ranks.wait()
    newest = find_latest(tmp_path / "run")
    assert newest is not None
    assert load_checkpoint(newest).step == 3
    assert [r["step"] for r in read_records(tmp_path / "run") if r["kind"] == "train"][-1] >= 3
