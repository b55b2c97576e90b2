"""Metrics: arithmetic on hand-made counts, records and their truncation, TensorBoard, the progress lines."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_graph.config import LogConfig
from dflash_graph.counters import Counts
from dflash_graph.counts import JobCounts, add_counts, bottleneck, count_metrics
from dflash_graph.metrics import METRICS_FILE, MetricsLogger, read_records, truncate_to_step

QUIET = LogConfig(tensorboard=False, progress=False)
SNAPSHOT: dict[str, Any] = {"waits": {}, "depths": {"READY": 3}, "ready_by_bucket": {}}


def job(bucket: int = 0, **changes: int) -> Any:
    """A job of T = 100 positions and A = 10 anchor places."""
    counts = {"num_tokens": 80, "num_supervised": 40, "num_candidates": 30, "num_covered": 20, "num_anchors": 5}
    counts |= {"num_trained_rows": 12} | changes
    return SimpleNamespace(bucket=bucket, token_ids=torch.zeros(100), anchors=torch.zeros(10), **counts)


def make_counts(rows: list[int], correct: list[int], leading: list[int], **changes: Any) -> Counts:
    values: dict[str, Any] = {
        "loss_sum": 6.0,
        "weight_sum": 2.0,
        "rows": np.array(rows, dtype=float),
        "correct": np.array(correct, dtype=float),
        "correct_top_k": np.array(rows, dtype=float),
        "blocks": np.array(rows, dtype=float),
        "leading": np.array(leading, dtype=float),
        "grad_norm": 1.5,
        "skipped_steps": 1,
        "skipped_in_a_row": 0,
    }
    return Counts(**(values | changes))


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / METRICS_FILE).read_text().splitlines()


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def tally(*steps: list[Any]) -> JobCounts:
    counts = JobCounts(num_buckets=3)
    for step in steps:
        counts.add_step(step)
    return counts


def test_job_metrics_by_hand() -> None:
    counts = JobCounts(num_buckets=3)
    counts.add_step([job(0), job(2, num_tokens=20, num_supervised=10, num_covered=10, num_anchors=10)])
    counts.add_step([job(2)])
    assert counts.steps == [[1, 0, 1], [0, 0, 1]]
    found = counts.metrics(seconds=2.0)
    assert found == {
        "train_tok_s": 180 / 2,
        "rows_s": 36 / 2,
        "jobs_s": 3 / 2,
        "anchors_per_1k": pytest.approx(1000 * 20 / 90),
        "padding_efficiency": pytest.approx(180 / 300),
        "anchor_fill": pytest.approx(20 / 30),
        "coverage": pytest.approx(50 / 90),
        "candidate_share": 90 / 90,
    }


def test_nothing_counted_gives_none_not_nan() -> None:
    assert set(JobCounts(num_buckets=1).metrics(0.0).values()) == {None}
    empty = count_metrics(make_counts([0, 0], [0, 0], [0, 0], loss_sum=0.0, weight_sum=0.0))
    assert empty["loss"] is None
    assert empty["accept_length"] is None
    assert empty["accuracy"] == [None, None]


def test_count_metrics_by_hand() -> None:
    found = count_metrics(make_counts([10, 8, 0], [5, 6, 0], [5, 2, 0]))
    assert found["loss"] == 3.0
    assert found["accuracy"] == [0.5, 0.75, None]
    assert found["acceptance"] == [0.5, 0.25, None]
    assert found["accept_length"] == 1.75
    assert found["top_k_accuracy"] == [1.0, 1.0, None]
    assert "top_k_accuracy" not in count_metrics(make_counts([1], [1], [1]), top_k=False)


def test_counts_are_pooled_not_averaged() -> None:
    """1 of 1 right and 0 of 9 right is 10 %, not 50 %; the loss is weighted by its weight sum."""
    a = make_counts([1], [1], [1], loss_sum=1.0, weight_sum=1.0, grad_norm=9.0, skipped_in_a_row=4)
    b = make_counts([9], [0], [0], loss_sum=90.0, weight_sum=9.0, grad_norm=2.0, skipped_in_a_row=0)
    pooled = add_counts(a, b)
    found = count_metrics(pooled)
    assert (found["accuracy"], found["accept_length"], found["loss"]) == ([0.1], 1.1, 9.1)
    assert (pooled.grad_norm, pooled.skipped_in_a_row, pooled.skipped_steps) == (2.0, 0, 2)


def test_the_two_parts_of_a_distilled_loss_are_pooled_alike() -> None:
    plain = make_counts([1], [1], [1])
    assert not {"nll", "kl"} & count_metrics(plain).keys()
    assert add_counts(plain, plain).kl_sum is None
    a = make_counts([1], [1], [1], loss_sum=2.0, weight_sum=1.0, nll_sum=3.0, kl_sum=1.0)
    b = make_counts([9], [0], [0], loss_sum=90.0, weight_sum=9.0, nll_sum=97.0, kl_sum=69.0)
    found = count_metrics(add_counts(a, b))
    assert (found["loss"], found["nll"], found["kl"]) == (9.2, 10.0, 7.0)


D, T0, T1 = "drafter", "target-0", "target-1"


@pytest.mark.parametrize(
    "waits, expected",
    [
        ({}, "balanced"),
        ({(D, "ready"): 9.0}, "balanced"),  # 9 %
        ({(D, "ready"): 30.0, (T0, "slot"): 0.1}, "target"),
        ({(D, "ready"): 30.0, (T0, "job"): 1.0}, "target"),  # a short wait for a job does not explain a long one
        ({(D, "ready"): 30.0, (T0, "job"): 40.0}, "padding"),
        ({(D, "ready"): 30.0, (T0, "job"): 20.0, (T1, "turn"): 20.0}, "padding"),
        ({(D, "ready"): 5.0, (T0, "slot"): 60.0}, "drafter"),
        ({(D, "ready"): 1.0, (T0, "slot"): 12.0, (T1, "slot"): 2.0}, "balanced"),  # 7 % of the targets' time
        ({(D, "ready"): 1.0, (T0, "slot"): 12.0, (T1, "turn"): 11.0}, "drafter"),  # a turn is a wait for a slot here
        ({("padding-0", "window"): 99.0}, "balanced"),  # padding ahead of its consumers is no fault
        ({(D, "checkpoint"): 20.0, (D, "ready"): 15.0}, "checkpoint"),
        ({(D, "validation"): 20.0}, "validation"),
    ],
)
def test_bottleneck(waits: dict[tuple[str, str], float], expected: str) -> None:
    assert bottleneck(waits, 100.0) == expected
    assert bottleneck(waits, 0.0) == "balanced"


# ---- records --------------------------------------------------------------------------------------------------------


def make_logger(run_dir: Path, log: LogConfig = QUIET, **changes: Any) -> MetricsLogger:
    values: dict[str, Any] = {"total_jobs": 8, "bucket_lengths": (64, 128, 256)}
    return MetricsLogger(run_dir, log, **(values | changes))


def test_records_hold_the_interval_since_the_last_one(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        logger.add_jobs(tally([job(0), job(1)], [job(1)]))
        logger.add_counts(make_counts([1], [1], [1]))
        logger.add_counts(make_counts([3], [0], [0]))
        waits = {("drafter", "ready"): 2.0, ("drafter", "checkpoint"): 0.25}
        snapshot = {"waits": waits, "depths": {"READY": 3}, "ready_by_bucket": {2: 4}}
        first = logger.log(2, epoch=0, jobs_trained=3, lr=1e-3, **snapshot)
        logger.add_jobs(tally([job(2)]))
        snapshot["waits"] = waits | {("drafter", "ready"): 2.5}
        second = logger.log(3, epoch=1, jobs_trained=4, lr=2e-3, **snapshot)
        report = logger.report()
    assert [json.loads(line) for line in lines_of(tmp_path)] == [first, second] == read_records(tmp_path)
    assert first["length_mix"] == [[1, 1, 0], [0, 1, 0]]
    assert second["length_mix"] == [[0, 0, 1]]
    assert first["accuracy"] == [0.25]
    assert "loss" not in second  # no device counters were read
    assert first["ready_by_bucket"] == [0, 0, 4]
    assert first["waits"] == {"drafter": {"ready": 2.0, "checkpoint": 0.25}}
    assert second["waits"] == {"drafter": {"ready": 0.5, "checkpoint": 0.0}}
    assert (first["tokens"], second["tokens"]) == (240, 80)
    assert first["skipped_steps"] == 2
    assert {k: second[k] for k in ("kind", "step", "epoch", "jobs_trained", "lr")} == {
        "kind": "train", "step": 3, "epoch": 1, "jobs_trained": 4, "lr": 2e-3,
    }  # fmt: skip
    assert (report.steps, report.counts.jobs, report.counts.tokens, report.skipped_steps) == (3, 4, 320, 2)
    assert report.waits == {("drafter", "ready"): 2.5, ("drafter", "checkpoint"): 0.25}
    assert report.counts.steps == []
    assert "4 jobs, 320 tokens" in str(report)


def test_top_k_is_sampled(tmp_path: Path) -> None:
    log = LogConfig(tensorboard=False, progress=False, every=2, top_k_every=5)
    with make_logger(tmp_path, log) as logger:
        for step in range(2, 13, 2):
            logger.add_counts(make_counts([1], [1], [1]))
            logger.log(step, epoch=0, jobs_trained=step, lr=0.0, **SNAPSHOT)
    assert [r["step"] for r in read_records(tmp_path) if "top_k_accuracy" in r] == [6, 10]


def test_what_is_not_finite_becomes_null_and_is_counted(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        logger.add_counts(make_counts([1], [1], [1], loss_sum=math.nan, grad_norm=math.inf))
        record = logger.log(1, epoch=0, jobs_trained=1, lr=np.float32(0.5), **SNAPSHOT)
    assert (record["loss"], record["grad_norm"], record["nonfinite"], record["lr"]) == (None, None, 2, 0.5)
    json.loads(lines_of(tmp_path)[0], parse_constant=lambda name: pytest.fail(f"{name} in the metrics file"))


def test_a_record_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    logger = make_logger(tmp_path)
    logger.log(1, epoch=0, jobs_trained=1, lr=0.0, **SNAPSHOT)
    assert len(lines_of(tmp_path)) == 1
    logger.close()
    logger.close()


def test_schedule_is_recorded_once_per_epoch_over_all_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        with make_logger(tmp_path) as logger:
            for epoch in (0, 1):
                logger.log_schedule(0, epoch=epoch, jobs_per_bucket=[1, 2, 3], padding_share=0.1)
    records = read_records(tmp_path)
    assert [r["epoch"] for r in records] == [0, 1]
    assert records[0]["bucket_lengths"] == [64, 128, 256]


def test_truncation_on_resume(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        for step in (10, 20, 30):
            logger.log(step, epoch=0, jobs_trained=step, lr=0.0, **SNAPSHOT)
    path = tmp_path / METRICS_FILE
    whole = lines_of(tmp_path)
    path.write_text("\n".join(whole) + "\n" + whole[0][:40])
    assert [r["step"] for r in read_records(tmp_path)] == [10, 20, 30]
    message = truncate_to_step(tmp_path, 20)
    assert message == f"{METRICS_FILE}: kept 2 records, cut 1 after step 20 and 1 half-written"
    assert lines_of(tmp_path) == whole[:2]
    with make_logger(tmp_path, step=20, jobs_trained=20) as logger:
        logger.log(30, epoch=0, jobs_trained=30, lr=0.0, **SNAPSHOT)
    assert [r["step"] for r in read_records(tmp_path)] == [10, 20, 30]
    truncate_to_step(tmp_path, -1)
    assert lines_of(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == [METRICS_FILE]
    assert "none yet" in truncate_to_step(tmp_path / "new", 5)


def test_truncation_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before the rename leaves the old file as it was."""
    with make_logger(tmp_path) as logger:
        logger.log(10, epoch=0, jobs_trained=1, lr=0.0, **SNAPSHOT)
    before = lines_of(tmp_path)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate_to_step(tmp_path, 0)
    assert lines_of(tmp_path) == before


# ---- where else it is shown -----------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_logger(tmp_path, LogConfig(progress=False)) as logger:
        logger.add_counts(make_counts([4, 4], [1, 2], [1, 1]))
        logger.log(7, epoch=0, jobs_trained=1, lr=0.25, **SNAPSHOT)
        logger.log_validation(7, make_counts([4, 4], [4, 2], [4, 2]), seconds=1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for tag, value in {"train/lr": 0.25, "train/accuracy/02": 0.5, "validation/accept_length": 2.5}.items():
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(7, value)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress(tmp_path: Path, stream: io.StringIO) -> None:
    with make_logger(tmp_path, LogConfig(tensorboard=False), stream=stream, jobs_trained=2) as logger:
        logger.advance(2)
        logger.add_jobs(tally([job(), job()]))
        logger.add_counts(make_counts([4], [2], [2]))
        logger.log(1, epoch=0, jobs_trained=4, lr=0.25, **SNAPSHOT)
    text = stream.getvalue()
    assert "4/8" in text
    assert "loss 3  accept 1.5  lr 0.25" in text
    if not stream.isatty():
        assert text.count("\n") == 1
        assert "left" in text


def test_no_progress_when_switched_off(tmp_path: Path) -> None:
    stream = Terminal()
    with make_logger(tmp_path, QUIET, stream=stream) as logger:
        logger.log(1, epoch=0, jobs_trained=4, lr=0.25, **SNAPSHOT)
    assert stream.getvalue() == ""


def test_the_import_is_light() -> None:
    """TensorBoard, tqdm and matplotlib are imported when they are used."""
    import subprocess
    import sys

    script = (
        "import sys, dflash_graph.metrics, dflash_graph.plot\n"
        "print([m for m in ('tensorboard', 'tqdm', 'matplotlib', 'torch.utils.tensorboard') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
