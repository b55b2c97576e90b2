"""An epoch's jobs, their order and the drafter's draw order: one small file per epoch.

Owns the choice of bucket lengths and the cutting of samples into jobs. All of it is a pure function of (lengths,
settings, seed, epoch), drawn from counter-based generators, so that resume needs no state but the epoch's file and the
number of jobs trained. It must never lose or repeat a sample. Called by `plan.py` and `training.py`, host only, once an
epoch; everything later reads the finished `EpochSchedule`.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np

Order = Literal["shuffle", "interleave"]
Draw = Literal["seeded", "ready", "round_robin"]

_FORMAT = 1
_ARRAYS = {"job_bucket": np.int32, "job_offsets": np.int64, "job_rows": np.int32, "draw_order": np.int32}


class Purpose(IntEnum):
    """Which random numbers: each purpose has a stream of its own, for every (seed, epoch, index)."""

    ROWS = 0
    ORDER = 1
    PHASE = 2
    DRAW = 3
    REDRAW = 4
    ANCHORS = 5
    THINNING = 6


def random_keys(count: int, purpose: Purpose, *, seed: int, epoch: int, index: int = 0) -> np.ndarray:
    """`count` random uint64, a pure function of all arguments (Philox counters; stable across numpy versions)."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    raw: np.ndarray = np.random.Philox(key=key, counter=counter).random_raw(count)
    return raw


def _random_shares(count: int, purpose: Purpose, *, seed: int, epoch: int) -> np.ndarray:
    """`count` uniform floats in [0, 1): 53 random bits each."""
    return (random_keys(count, purpose, seed=seed, epoch=epoch) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Bucket:
    """A row length and how many rows of it fit into one job: rows * length <= token_budget."""

    length: int
    rows: int


def choose_buckets(
    lengths: np.ndarray, *, token_budget: int, num_buckets: int, multiple: int = 64
) -> tuple[Bucket, ...]:
    """The bucket lengths that need the fewest jobs; at equal cost the fewest buckets.

    For given lengths the best packing goes from the longest sample down: a job takes the bucket of the longest sample
    left, and its rows the next longest samples, so only the very last job is partial. Hence an exact dynamic programme
    over the length classes, longest first, whose state is (jobs so far, free rows of the last one). Fewest jobs, then
    most free rows, is the best state: a saved job can be opened later, at a shorter bucket, with more rows than any
    job open now has free.

    Args:
        lengths: (n,) tokens per sample.
        token_budget: T, positions of a job.
        num_buckets: at most so many buckets.
        multiple: bucket lengths are multiples of it.

    Returns:
        Buckets in ascending order of length.

    Raises:
        ValueError: no sample, an empty sample, or a sample that does not fit into a job.
    """
    if num_buckets < 1 or multiple < 1:
        raise ValueError(f"num_buckets and multiple must be at least 1; found {num_buckets} and {multiple}")
    _check_lengths(lengths)
    classes, counts = np.unique(-(-lengths.astype(np.int64) // multiple), return_counts=True)
    edges = classes[::-1] * multiple  # (C,) longest first
    if edges[0] > token_budget:
        raise ValueError(
            f"token_budget must hold the longest sample, {lengths.max()} tokens, rounded up to {edges[0]} (a multiple "
            f"of {multiple}); found {token_budget}. Raise the budget or lower max_length"
        )
    rows = token_budget // edges
    above = np.concatenate([[0], np.cumsum(counts[::-1])])  # (C+1,) samples in the i longest classes
    came_from, jobs = _best_groups(above, rows, min(num_buckets, len(edges)))
    k, end = int(np.argmin(jobs)), len(edges)  # argmin takes the first, the fewest buckets
    buckets = []
    while k > 0:
        end = int(came_from[k, end])
        buckets.append(Bucket(int(edges[end]), int(rows[end])))
        k -= 1
    return tuple(buckets)


def _best_groups(above: np.ndarray, rows: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """The dynamic programme: `came_from[k, end]`, where the last of k groups starts, and `jobs[k]` for all classes.

    Args:
        above: (C+1,) samples in the i longest classes.
        rows: (C,) rows of a job whose bucket is class i.
    """
    num_classes = len(rows)
    unreachable, step = 1 << 40, int(rows.max()) + 1
    jobs = np.full((num_buckets + 1, num_classes + 1), unreachable, dtype=np.int64)
    free = np.zeros_like(jobs)
    came_from = np.zeros_like(jobs)
    jobs[0, 0] = 0
    for end in range(1, num_classes + 1):
        n = above[end] - above[:end]  # (end,) samples of a group that starts there
        old_jobs, old_free = jobs[:-1, :end], free[:-1, :end]  # (num_buckets, end)
        new = -(-np.maximum(n - old_free, 0) // rows[:end])
        left = old_free + new * rows[:end] - n
        best = np.argmin((old_jobs + new) * step - left, axis=1)[:, None]
        came_from[1:, end] = best[:, 0]
        jobs[1:, end] = np.take_along_axis(old_jobs + new, best, axis=1)[:, 0]
        free[1:, end] = np.take_along_axis(left, best, axis=1)[:, 0]
    return came_from, jobs[:, num_classes]


def _check_lengths(lengths: np.ndarray) -> None:
    if lengths.ndim != 1 or len(lengths) == 0:
        raise ValueError(f"lengths must be (n,) with at least one sample; found shape {lengths.shape}")
    if lengths.min() < 1:
        raise ValueError(f"every sample must have at least one token; sample {int(lengths.argmin())} has none")


@dataclass(frozen=True, eq=False, kw_only=True)
class EpochSchedule:
    """The ordered jobs of an epoch, J of them.

    Attributes:
        job_bucket: (J,) int32 index into `buckets`.
        job_offsets: (J+1,) int64; job j owns `job_rows[job_offsets[j]:job_offsets[j+1]]`.
        job_rows: (n,) int32 samples of the data set, each exactly once.
        draw_order: (J,) int32, the job of each draw; empty unless draw == "seeded".
        min_ready: size of the draw window, at most J.
        data_fingerprint: of the data the samples belong to.
        fingerprint: sha256 of all of it.
    """

    epoch: int
    seed: int
    token_budget: int
    buckets: tuple[Bucket, ...]
    job_bucket: np.ndarray
    job_offsets: np.ndarray
    job_rows: np.ndarray
    draw_order: np.ndarray
    jobs_per_step: int
    min_ready: int
    order: Order
    draw: Draw
    data_fingerprint: str
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            getattr(self, name).setflags(write=False)

    @property
    def num_jobs(self) -> int:
        return len(self.job_bucket)

    def rows_of(self, job: int) -> np.ndarray:
        """Samples of a job, in the order of its rows."""
        return self.job_rows[self.job_offsets[job] : self.job_offsets[job + 1]]

    def padding_share(self, lengths: np.ndarray) -> float:
        """Share of all positions paid for (jobs * T) that hold no token; `lengths` (n,) are those of the data set."""
        return 1.0 - float(lengths[self.job_rows].sum(dtype=np.int64)) / (self.num_jobs * self.token_budget)

    def _header(self) -> dict[str, Any]:
        names = ("epoch", "seed", "token_budget", "jobs_per_step", "min_ready", "order", "draw", "data_fingerprint")
        return {
            "format": _FORMAT,
            "buckets": [asdict(b) for b in self.buckets],
            **{name: getattr(self, name) for name in names},
        }

    def _digest(self) -> str:
        sha = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            sha.update(f"{name} {array.shape}".encode())
            sha.update(np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
        return sha.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a .npz file, whole or not at all."""
        path = Path(path)
        header = json.dumps({**self._header(), "fingerprint": self.fingerprint}).encode()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                np.savez(file, header=np.frombuffer(header, dtype=np.uint8), **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "EpochSchedule":
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, of another format, or its content is not that of its fingerprint.
        """
        remedy = "Delete it to have the schedule built again"
        with Path(path).open("rb") as file:
            try:
                with np.load(file, allow_pickle=False) as stored:
                    header = json.loads(stored["header"].tobytes())
                    arrays = {name: stored[name].astype(dtype, copy=False) for name, dtype in _ARRAYS.items()}
                found = header.pop("format")
                header["buckets"] = tuple(Bucket(**bucket) for bucket in header["buckets"])
                schedule = cls(**header, **arrays) if found == _FORMAT else None
            except Exception as error:  # zip, zlib, npy and JSON each raise their own kinds
                raise ValueError(f"schedule file {path} is damaged ({error!r}). {remedy}") from error
        if schedule is None:
            raise ValueError(f"schedule file {path} must have format {_FORMAT}; found {found!r}. {remedy}")
        digest = schedule._digest()
        if digest != schedule.fingerprint:
            raise ValueError(
                f"schedule file {path} is damaged: its content has fingerprint {digest}, but it states "
                f"{schedule.fingerprint}. {remedy}"
            )
        return schedule


def build_epoch(
    lengths: np.ndarray,
    buckets: tuple[Bucket, ...],
    *,
    seed: int,
    epoch: int,
    order: Order,
    draw: Draw,
    min_ready: int,
    jobs_per_step: int,
    data_fingerprint: str,
    token_budget: int,
) -> EpochSchedule:
    """Cut one epoch into jobs and order them.

    Samples are shuffled inside their bucket, then cut into jobs from the longest bucket down; a bucket's last job is
    filled up with samples of the next shorter one, which are random too.

    Args:
        lengths: (n,) tokens per sample.
        buckets: ascending; the longest must hold the longest sample.
        order: "shuffle" is one random list of all jobs; "interleave" spreads each bucket's jobs evenly over the list.
        draw: "seeded" also computes the draw order.
        min_ready: size of the draw window; clipped to the number of jobs.

    Raises:
        ValueError: an unknown order or draw, a number below 1, or buckets that do not fit the lengths or the budget.
    """
    _check_epoch(lengths, buckets, token_budget, order, draw)
    if min_ready < 1 or jobs_per_step < 1:
        raise ValueError(f"min_ready and jobs_per_step must be at least 1; found {min_ready} and {jobs_per_step}")
    # Bucket 0 is the longest here, so that one stable sort lays the samples out from the longest bucket down.
    edges = np.array([bucket.length for bucket in buckets])
    rank = (len(buckets) - 1 - np.searchsorted(edges, lengths)).astype(np.uint16)
    shuffled = np.argsort(random_keys(len(lengths), Purpose.ROWS, seed=seed, epoch=epoch), kind="stable")
    packed = shuffled[np.argsort(rank[shuffled], kind="stable")]
    starts, job_bucket = _cut_jobs(np.bincount(rank, minlength=len(buckets))[::-1], buckets)
    sizes = np.diff(starts, append=len(lengths))

    permutation = _order_jobs(job_bucket, order, seed=seed, epoch=epoch)
    job_bucket, starts, sizes = job_bucket[permutation], starts[permutation], sizes[permutation]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    gather = np.repeat(starts - offsets[:-1], sizes) + np.arange(len(lengths))
    min_ready = min(min_ready, len(job_bucket))
    draw_order = np.zeros(0, dtype=np.int32)
    if draw == "seeded":
        draw_order = _draw_order(job_bucket, min_ready, jobs_per_step, seed=seed, epoch=epoch)
    schedule = EpochSchedule(
        epoch=epoch,
        seed=seed,
        token_budget=token_budget,
        buckets=tuple(buckets),
        job_bucket=job_bucket.astype(np.int32),
        job_offsets=offsets.astype(np.int64),
        job_rows=packed[gather].astype(np.int32),
        draw_order=draw_order,
        jobs_per_step=jobs_per_step,
        min_ready=min_ready,
        order=order,
        draw=draw,
        data_fingerprint=data_fingerprint,
    )
    return replace(schedule, fingerprint=schedule._digest())


def _check_epoch(lengths: np.ndarray, buckets: tuple[Bucket, ...], token_budget: int, order: Order, draw: Draw) -> None:
    _check_lengths(lengths)
    if order not in ("shuffle", "interleave"):
        raise ValueError(f"order must be 'shuffle' or 'interleave'; found {order!r}")
    if draw not in ("seeded", "ready", "round_robin"):
        raise ValueError(f"draw must be 'seeded', 'ready' or 'round_robin'; found {draw!r}")
    edges = [bucket.length for bucket in buckets]
    if not edges or edges != sorted(set(edges)):
        raise ValueError(f"buckets must be in strictly ascending order of length; found lengths {edges}")
    if edges[-1] < lengths.max():
        raise ValueError(
            f"the longest bucket must hold the longest sample, {lengths.max()} tokens; found {edges[-1]}. Choose the "
            "buckets from the lengths of the same data"
        )
    for bucket in buckets:
        if bucket.rows < 1 or bucket.rows * bucket.length > token_budget:
            raise ValueError(f"1 <= rows and rows * length <= token_budget = {token_budget} must hold; found {bucket}")


def _cut_jobs(counts: np.ndarray, buckets: tuple[Bucket, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Cut the samples, laid out from the longest bucket down, into runs: (first sample, bucket) of each job, (J,) both.

    Args:
        counts: (num_buckets,) samples of each bucket, ascending like `buckets`.
    """
    starts, job_bucket = [], []
    done = covered = 0  # samples seen; samples that jobs so far have rows for
    for b in range(len(buckets) - 1, -1, -1):
        done += int(counts[b])
        num_new = max(0, -(-(done - covered) // buckets[b].rows))
        starts.append(covered + buckets[b].rows * np.arange(num_new, dtype=np.int64))
        job_bucket.append(np.full(num_new, b, dtype=np.int64))
        covered += num_new * buckets[b].rows
    return np.concatenate(starts), np.concatenate(job_bucket)


def _order_jobs(job_bucket: np.ndarray, order: Order, *, seed: int, epoch: int) -> np.ndarray:
    """(J,) permutation of the jobs."""
    shuffled = np.argsort(random_keys(len(job_bucket), Purpose.ORDER, seed=seed, epoch=epoch), kind="stable")
    if order == "shuffle":
        return shuffled
    # Job i of a bucket's n jobs goes to (i + phase) / n of the list; the random phase is the bucket's own.
    by_bucket = shuffled[np.argsort(job_bucket[shuffled], kind="stable")]
    counts = np.bincount(job_bucket)
    phase = _random_shares(len(counts), Purpose.PHASE, seed=seed, epoch=epoch)
    first = np.cumsum(counts) - counts
    bucket = job_bucket[by_bucket]
    place = (np.arange(len(job_bucket)) - first[bucket] + phase[bucket]) / counts[bucket]
    return by_bucket[np.argsort(place, kind="stable")]


def _draw_order(job_bucket: np.ndarray, window: int, jobs_per_step: int, *, seed: int, epoch: int) -> np.ndarray:
    """(J,) int32: each pick is uniform among the `window` lowest jobs not yet drawn.

    If a step's picks would all share a bucket while the window holds another, its last pick is drawn again, from the
    window's jobs of other buckets. Steps of one job are left alone.
    """
    num_jobs = len(job_bucket)
    picks = _random_shares(num_jobs, Purpose.DRAW, seed=seed, epoch=epoch).tolist()
    num_steps = -(-num_jobs // jobs_per_step)
    redraws = _random_shares(num_steps, Purpose.REDRAW, seed=seed, epoch=epoch).tolist()
    buckets = job_bucket.tolist()
    oldest = list(range(min(window, num_jobs)))  # ascending
    order: list[int] = []
    for i in range(num_jobs):
        place = int(picks[i] * len(oldest))
        if jobs_per_step > 1 and i % jobs_per_step == jobs_per_step - 1:
            step = {buckets[job] for job in order[i + 1 - jobs_per_step :]} | {buckets[oldest[place]]}
            others = [at for at, job in enumerate(oldest) if buckets[job] not in step]
            if len(step) == 1 and others:
                place = others[int(redraws[i // jobs_per_step] * len(others))]
        order.append(oldest.pop(place))
        if i + window < num_jobs:
            oldest.append(i + window)
    return np.array(order, dtype=np.int32)


def length_mix(schedule: EpochSchedule) -> np.ndarray:
    """(steps, num_buckets) int64: jobs of each bucket in each step, in the seeded draw order.

    Raises:
        ValueError: the schedule has no draw order.
    """
    if schedule.draw != "seeded":
        raise ValueError(f"the length mix is known beforehand only for draw 'seeded'; found {schedule.draw!r}")
    num_buckets = len(schedule.buckets)
    step = np.arange(schedule.num_jobs) // schedule.jobs_per_step
    cell = step * num_buckets + schedule.job_bucket[schedule.draw_order]
    num_steps = int(step[-1]) + 1
    return np.bincount(cell, minlength=num_steps * num_buckets).reshape(num_steps, num_buckets)
