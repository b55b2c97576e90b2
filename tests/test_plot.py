"""The picture of a run: drawn from a metrics file, with and without an evaluation report."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_graph.config import LogConfig
from dflash_graph.counters import Counts
from dflash_graph.counts import JobCounts
from dflash_graph.metrics import MetricsLogger
from dflash_graph.plot import _pooled_acceptance, plot_run

REPORT: dict[str, Any] = {
    "drafter": {"at_least": (0.5, 0.2, 0.1), "accept_length": 1.8, "num_verifications": 9},
    "other_features": None,
    "baselines": {"bigram": {"at_least": (0.3, 0.1, 0.0), "accept_length": 1.4}},
}


def make_run(run_dir: Path, steps: int, *, schedule: bool = True) -> None:
    log = LogConfig(tensorboard=False, progress=False)
    with MetricsLogger(run_dir, log, total_jobs=steps, bucket_lengths=(64, 128)) as logger:
        if schedule:
            logger.log_schedule(0, epoch=0, jobs_per_bucket=[steps, steps], padding_share=0.1)
        for step in range(1, steps + 1):
            n, right = np.array([8.0, 8.0, 0.0]), np.array([4.0, 2.0, 0.0])
            counts = Counts(
                loss_sum=80.0 / step, weight_sum=8.0, rows=n, correct=right, correct_top_k=n, blocks=n, leading=right,
                grad_norm=1.0, skipped_steps=0, skipped_in_a_row=0,
            )  # fmt: skip
            logger.add_jobs(JobCounts(num_buckets=2, steps=[[0, 0]]))
            logger.add_counts(counts)
            waits = {("drafter", "ready"): 0.001 * step, ("target-0", "a new cause"): 0.002 * step}
            logger.log(step, epoch=0, jobs_trained=step, lr=1e-3, waits=waits, depths={}, ready_by_bucket={})
        logger.log_validation(steps, counts)
        logger.log_eval(steps, {"accept_length": 1.5, "acceptance": [0.4, 0.1, 0.0]})


# 1: a single record; 150: more steps than columns, the last column narrower.
@pytest.mark.parametrize("steps, report", [(1, None), (150, REPORT), (2, {})])
def test_picture_is_drawn(tmp_path: Path, steps: int, report: dict[str, Any] | None) -> None:
    make_run(tmp_path, steps, schedule=report is not None)
    path = plot_run(tmp_path, report, tmp_path / "deep" / "run.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000


def test_acceptance_is_pooled_by_blocks() -> None:
    records = [
        {"acceptance": [1.0, None], "blocks_per_k": [1.0, 0.0]},
        {"acceptance": [0.0, 0.5], "blocks_per_k": [9.0, 4.0]},
        {"acceptance": None},
        {},
    ]
    assert _pooled_acceptance(records) == [0.1, 0.5]
    assert _pooled_acceptance([{}]) == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training record"):
        plot_run(tmp_path, None, tmp_path / "run.png")
