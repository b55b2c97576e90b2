"""Which jobs of an epoch one rank takes: pure arithmetic over the order that all ranks share.

The jobs not yet trained, in draw order, are cut into windows of `jobs_per_step`; window w is step w of all ranks
together, and its last one may be short. Inside a window each position belongs to one rank, by one pattern that spreads
every rank's positions evenly. Called by the trainer and by the source of jobs; knows no process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_graph.schedule import EpochSchedule


def proportional(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split `total` jobs of a step in proportion to `weights`, by largest remainder; the first of equals gets more.

    Raises:
        ValueError: no weight, a weight below 1, or no job.
    """
    if total < 1 or not weights or min(weights) < 1:
        raise ValueError(f"jobs and weights must be at least 1; found {total} jobs and weights {list(weights)}")
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda r: (shares[r] - exact[r], r))
    for r in by_remainder[: total - sum(shares)]:
        shares[r] += 1
    return tuple(shares)


@dataclass(frozen=True)
class RankShare:
    """One rank's part of every step.

    Attributes:
        rank_jobs: G_r, jobs that each rank takes of a whole step; 0 is allowed, their sum is `jobs_per_step`.
        rank: whose share it is.
    """

    rank_jobs: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if min(self.rank_jobs, default=-1) < 0 or sum(self.rank_jobs) < 1:
            raise ValueError(f"jobs per rank must not be negative, nor all 0; found {list(self.rank_jobs)}")
        if not 0 <= self.rank < len(self.rank_jobs):
            raise ValueError(f"rank must be in [0, {len(self.rank_jobs)}); found {self.rank}")

    @property
    def jobs_per_step(self) -> int:
        return sum(self.rank_jobs)

    @cached_property
    def pattern(self) -> np.ndarray:
        """(jobs_per_step,) rank of each position of a window: the k-th of G_r jobs lies at (k + 1/2) / G_r of it."""
        places = [((2 * k + 1) / (2 * count), rank) for rank, count in enumerate(self.rank_jobs) for k in range(count)]
        return np.array([rank for _, rank in sorted(places)], dtype=np.int64)

    def quota(self, window: int) -> int:
        """This rank's jobs of a step over `window` jobs, at most `jobs_per_step`."""
        return int((self.pattern[:window] == self.rank).sum())

    def jobs(self, schedule: EpochSchedule, trained: np.ndarray | None = None) -> np.ndarray:
        """This rank's jobs of an epoch in the order of their steps: job indices, in draw order where there is one.

        Args:
            trained: (J,) bool, jobs that no rank trains again; None is none.
        """
        seeded = schedule.draw == "seeded"
        order = schedule.draw_order if seeded else np.arange(schedule.num_jobs, dtype=np.int32)
        if trained is not None:
            order = order[~trained[order]]
        owner: np.ndarray = self.pattern[np.arange(len(order)) % self.jobs_per_step]
        own: np.ndarray = order[owner == self.rank]
        return own
