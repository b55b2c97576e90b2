"""What a run reports: sums between log points, ratios of those sums, and where they are written.

The drafter's thread adds host counts of every step's jobs and the device counters it has read back; `log` turns the
sums into one record for `run_dir/metrics.jsonl`, TensorBoard and the progress bar, and starts the next interval. A
ratio is always a ratio of sums, never an average of averages. Nothing here touches a device.
"""

import contextlib
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import numpy as np

from dflash_graph.config import LogConfig
from dflash_graph.counts import (
    JobCounts,
    Waits,
    add_counts,
    bottleneck,
    count_metrics,
    merge_counts,
    slowest_rank,
)
from dflash_graph.trackers import Trackers

if TYPE_CHECKING:
    from dflash_graph.counters import Counts

METRICS_FILE = "metrics.jsonl"

# ---- the end of a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Totals of this process, for the end of a run. `waits` are the seconds per (worker, cause)."""

    steps: int
    seconds: float
    skipped_steps: int
    counts: JobCounts
    waits: Waits
    bottleneck: str

    def __str__(self) -> str:
        counts, metrics = self.counts, self.counts.metrics(self.seconds)
        waited = [f"{worker} for {cause} {s:.1f} s" for (worker, cause), s in sorted(self.waits.items()) if s >= 0.05]
        return (
            f"trained   {self.steps} steps, {counts.jobs} jobs, {counts.tokens} tokens in {self.seconds:.1f} s; "
            f"{self.skipped_steps} steps skipped\n"
            f"speed     {_short(metrics['train_tok_s'])} tokens/s, {_short(metrics['rows_s'])} trained rows/s, "
            f"{_short(metrics['anchors_per_1k'])} anchors per 1,000 supervised tokens\n"
            f"use       padding efficiency {_percent(metrics['padding_efficiency'])}, anchor fill "
            f"{_percent(metrics['anchor_fill'])}, coverage {_percent(metrics['coverage'])}\n"
            f"waits     {', '.join(waited) or 'none'}; bottleneck: {self.bottleneck}"
        )


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f}K" if value >= 10_000 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# ---- the metrics file -----------------------------------------------------------------------------------------------


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read_records(run_dir: str | Path) -> list[dict[str, Any]]:
    """All whole records of a run's metrics file, in order; none if there is no file."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [record for record in map(_parse, lines) if record is not None]


def truncate_to_step(run_dir: str | Path, step: int) -> str:
    """Cut the metrics file back to a checkpoint: drop records of later steps and lines that a kill left half-written.

    Args:
        step: of the checkpoint; -1 for a run that starts fresh in a folder where one died before its first checkpoint.

    Returns:
        A message to print.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        return f"{METRICS_FILE}: none yet"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [(line, _parse(line)) for line in lines if line]
    damaged = sum(record is None for _, record in records)
    kept = [line for line, record in records if record is not None and record["step"] <= step]
    temporary = path.with_name(f".tmp-{METRICS_FILE}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    later = len(records) - damaged - len(kept)
    return f"{METRICS_FILE}: kept {len(kept)} records, cut {later} after step {step} and {damaged} half-written"


def _plain(value: Any, dropped: list[str], name: str = "") -> Any:
    """`value` as finite JSON: numpy becomes Python, what is not finite becomes None and its name goes to `dropped`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, dropped, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, dropped, name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        dropped.append(name)
        return None
    return value


# ---- several ranks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank reports of the steps since its last record; see `MetricsLogger.log`."""

    jobs: JobCounts
    counts: "Counts"
    waits: Waits
    depths: Mapping[str, int]
    ready_by_bucket: Mapping[int, int]


def merge_records(records: Sequence[RankRecord]) -> RankRecord:
    """All ranks together: counts are summed, waits stay apart under `rank<r>.<worker>`; one rank's is left alone."""
    if len(records) == 1:
        return records[0]
    waits = {
        (f"rank{rank}.{worker}", cause): seconds
        for rank, record in enumerate(records)
        for (worker, cause), seconds in record.waits.items()
    }
    return RankRecord(
        jobs=JobCounts.merged([record.jobs for record in records]),
        counts=merge_counts([record.counts for record in records]),
        waits=waits,
        depths=_summed([record.depths for record in records]),
        ready_by_bucket=_summed([record.ready_by_bucket for record in records]),
    )


_Key = TypeVar("_Key")


def _summed(parts: Sequence[Mapping[_Key, int]]) -> dict[_Key, int]:
    return {key: sum(part.get(key, 0) for part in parts) for key in dict.fromkeys(k for part in parts for k in part)}


# ---- the logger -----------------------------------------------------------------------------------------------------


class MetricsLogger:
    """Collects a run's counts and writes its records. Used by one thread.

    Args:
        run_dir: receives `metrics.jsonl` and, if configured, `tensorboard/`. Call `truncate_to_step` before.
        total_jobs: of all epochs, for the progress bar.
        bucket_lengths: L of each bucket, ascending.
        step, jobs_trained: where the run starts or resumes.
        config: the run's settings, for trackers.
        stream: of the progress bar: a bar on a terminal, a line per record elsewhere; default stderr.
    """

    def __init__(
        self,
        run_dir: str | Path,
        log: LogConfig,
        *,
        total_jobs: int,
        bucket_lengths: Sequence[int],
        step: int = 0,
        jobs_trained: int = 0,
        config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._total_jobs, self._bucket_lengths = log, total_jobs, list(bucket_lengths)
        self._logged_schedules = {r["epoch"] for r in read_records(folder) if r.get("kind") == "schedule"}
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._board: Any = None
        if log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            # Hides the events that a killed run wrote after the checkpoint.
            purge = step + 1 if step > 0 else 0
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._trackers = Trackers(log, folder, config or {})
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        if log.progress and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_jobs, initial=jobs_trained, unit="job", file=self._stream, smoothing=0.05)
        self._started = self._interval_started = time.monotonic()
        self._first_jobs, self._last_step = jobs_trained, step
        self._interval, self._total = (
            JobCounts(num_buckets=len(bucket_lengths)),
            JobCounts(num_buckets=len(bucket_lengths)),
        )
        self._counts: Counts | None = None
        self._waits: dict[tuple[str, str], float] = {}
        self._skipped_steps = 0
        self._steps = 0

    # ---- collecting ----

    def advance(self, jobs: int) -> None:
        """Move the progress bar by the jobs of one optimizer step."""
        if self._bar is not None:
            self._bar.update(jobs)

    def add_jobs(self, counts: JobCounts) -> None:
        """Count the jobs of the steps since the last call, all ranks together."""
        self._interval.add(counts)
        self._total.add(counts)
        self._total.steps.clear()  # the mix of each step is in the records; a run has too many steps to keep them here
        self._steps += len(counts.steps)

    def add_counts(self, counts: "Counts") -> None:
        """Add device counters that were read back (and reset) since the last call."""
        self._counts = counts if self._counts is None else add_counts(self._counts, counts)
        self._skipped_steps += counts.skipped_steps

    # ---- writing ----

    def log(
        self,
        step: int,
        *,
        epoch: int,
        jobs_trained: int,
        lr: float,
        waits: Waits,
        depths: Mapping[str, int],
        ready_by_bucket: Mapping[int, int],
        world: int = 1,
    ) -> dict[str, Any]:
        """Write the record of the steps since the last one, begin a new interval, and return the record.

        Call it before a checkpoint is saved, too: a resumed run counts from its checkpoint's step.

        Args:
            waits: seconds per (worker, cause) since the process started, all sources merged.
            depths: slots per state and jobs per dispatcher stage, now. ready_by_bucket: READY slots per bucket, now.
            world: number of ranks; of several, workers are named `rank<r>.<worker>`, and the slowest rank is named.
        """
        now = time.monotonic()
        seconds, interval, counts = now - self._interval_started, self._interval, self._counts
        waited = {key: value - self._waits.get(key, 0.0) for key, value in waits.items()}
        record: dict[str, Any] = {
            "kind": "train",
            "step": step,
            "epoch": epoch,
            "jobs_trained": jobs_trained,
            "seconds": seconds,
            "lr": lr,
        }
        if counts is not None:
            record |= count_metrics(
                counts, top_k=step // self._log.top_k_every > self._last_step // self._log.top_k_every
            )
            record |= {"grad_norm": counts.grad_norm, "skipped_steps": counts.skipped_steps}
        record |= interval.metrics(seconds)
        record |= {
            "tokens": interval.tokens,
            "length_mix": interval.steps,
            "ready_by_bucket": [ready_by_bucket.get(bucket, 0) for bucket in range(len(self._bucket_lengths))],
            "depths": dict(depths),
            "waits": _nested(waited),
            "bottleneck": bottleneck(waited, seconds),
        }
        if world > 1:
            record |= slowest_rank(waited, world)
        self._waits, self._interval_started, self._last_step = dict(waits), now, step
        self._interval, self._counts = JobCounts(num_buckets=len(self._bucket_lengths)), None
        written = self._write(record)
        self._show(written)
        return written

    def log_validation(self, step: int, counts: "Counts", **extra: float) -> dict[str, Any]:
        """Write the record of a teacher-forced validation pass."""
        return self._write({"kind": "validation", "step": step, **count_metrics(counts), **extra})

    def log_eval(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write the record of speculative decoding on held-out prompts."""
        return self._write({"kind": "eval", "step": step, **values})

    def log_schedule(self, step: int, *, epoch: int, jobs_per_bucket: Sequence[int], padding_share: float) -> None:
        """Write what an epoch's schedule holds, once per epoch and run folder."""
        if epoch not in self._logged_schedules:
            self._logged_schedules.add(epoch)
            mix = {"bucket_lengths": self._bucket_lengths, "jobs_per_bucket": list(jobs_per_bucket)}
            self._write({"kind": "schedule", "step": step, "epoch": epoch, **mix, "padding_share": padding_share})

    def report(self) -> RunReport:
        """Totals of this process up to the last record."""
        seconds = self._interval_started - self._started
        return RunReport(
            steps=self._steps,
            seconds=seconds,
            skipped_steps=self._skipped_steps,
            counts=self._total,
            waits=self._waits,
            bottleneck=bottleneck(self._waits, seconds),
        )

    def close(self) -> None:
        """Close files and bar. Idempotent."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        self._trackers.close()
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        dropped: list[str] = []
        plain: dict[str, Any] = _plain(record, dropped)
        plain |= {"nonfinite": len(dropped), "time": time.time()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        scalars = dict(_scalars(plain["kind"], plain))
        if self._board is not None:
            for tag, value in scalars.items():
                self._board.add_scalar(tag, value, plain["step"])
            self._board.flush()
        self._trackers.log(scalars, plain["step"])
        return plain

    def _show(self, record: dict[str, Any]) -> None:
        if not self._log.progress:
            return
        numbers = {name: record.get(key) for name, key in (("loss", "loss"), ("accept", "accept_length"), ("lr", "lr"))}
        text = "  ".join(f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in numbers.items())
        text += f"  {_short(record['train_tok_s'])} tok/s  {record['bottleneck']}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            return
        done, total = record["jobs_trained"], self._total_jobs
        rate = (done - self._first_jobs) / max(1e-9, self._interval_started - self._started)
        eta = f"{datetime.timedelta(seconds=round((total - done) / rate))} left" if rate > 0 else "no rate yet"
        with contextlib.suppress(BrokenPipeError):
            print(
                f"step {record['step']}  epoch {record['epoch']}  jobs {done}/{total}  {text}  {eta}",
                file=self._stream,
                flush=True,
            )


def _nested(waits: Waits) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {}
    for (worker, cause), seconds in waits.items():
        nested.setdefault(worker, {})[cause] = round(seconds, 4)
    return nested


def _scalars(prefix: str, value: Any) -> list[tuple[str, float]]:
    """(tag, number) of every number in a record; a list's tags are numbered, block positions from 1."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return []
    if isinstance(value, int | float):
        return [(prefix, float(value))]
    if isinstance(value, dict):
        skipped = ("step", "time", "length_mix", "bucket_lengths")
        return [pair for key, item in value.items() if key not in skipped for pair in _scalars(f"{prefix}/{key}", item)]
    return [pair for i, item in enumerate(value, start=1) for pair in _scalars(f"{prefix}/{i:02d}", item)]
