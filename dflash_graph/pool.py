"""The pool: which READY slot the drafter trains next, and which jobs are trained.

Owns the drafter's place in an epoch; deals in leases of the ring. It must never give a job twice or lose one. Called by
the drafter's thread only. A job is drawn when its slot is handed out and trained once its step is done: a checkpoint
keeps `trained`, so a resumed run draws again what an unfinished step had drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from dflash_graph.ring import Lease, Ring

if TYPE_CHECKING:
    from dflash_graph.schedule import EpochSchedule

Draw = Literal["seeded", "ready", "round_robin"]


@dataclass
class _Epoch:
    schedule: EpochSchedule
    own: np.ndarray  # (n,) jobs to draw here, in draw order where there is one
    drawn: np.ndarray  # (J,) bool; what is not to be drawn here counts as drawn
    trained: np.ndarray  # (J,) bool, those before this start included
    rng: np.random.Generator
    num_before: int  # trained before this start
    num_drawn: int = 0
    num_trained: int = 0
    last_bucket: int = -1


class Pool:
    """The drafter's draw from the READY slots, and the record of which jobs are trained.

    Args:
        draw: "seeded" follows the schedule's draw order and waits for exactly that job. "ready" is uniform over the
            READY slots; "round_robin" goes from bucket to bucket over the READY slots, oldest job first. These two wait
            for min(schedule.min_ready, jobs left) READY slots, and their order depends on timing.
        seed: of the "ready" draw.
    """

    def __init__(self, ring: Ring, draw: Draw, seed: int) -> None:
        if draw not in ("seeded", "ready", "round_robin"):
            raise ValueError(f"draw must be 'seeded', 'ready' or 'round_robin'; found {draw!r}")
        self.ring = ring
        self.draw = draw
        self.seed = seed
        self._epoch: _Epoch | None = None

    def start_epoch(
        self, schedule: EpochSchedule, trained: np.ndarray | int = 0, own: np.ndarray | None = None
    ) -> None:
        """Draw from `schedule` from now on.

        Args:
            trained: what is trained already: for "seeded" the number of jobs (a prefix of the draw order); for the
                others a (J,) bool array, or 0.
            own: of several ranks, this one's untrained jobs in their order (`RankShare.jobs`); None is all of them.

        Raises:
            RuntimeError: the epoch before is not wholly trained.
            ValueError, TypeError: `trained` or the schedule does not fit the draw or the ring.
        """
        before = self._epoch
        if before is not None and before.num_trained < len(before.own):
            raise RuntimeError(
                f"epoch {before.schedule.epoch} must be trained before the next starts; trained "
                f"{before.num_before + before.num_trained} of {before.num_before + len(before.own)} jobs"
            )
        if schedule.min_ready >= self.ring.num_slots:
            raise ValueError(
                f"the ring must have more slots than the schedule's min_ready, {schedule.min_ready}, or it deadlocks; "
                f"found {self.ring.num_slots}. Raise schedule.slots, or rebuild the schedule with a smaller min_ready"
            )
        done = self._trained_mask(schedule, trained)
        count = int(done.sum())
        if own is None:
            order = schedule.draw_order if self.draw == "seeded" else np.arange(schedule.num_jobs)
            own = order[~done[order]]
        elif done[own].any():
            raise ValueError(f"jobs to draw must be untrained; found {own[done[own]][:8].tolist()} among them")
        drawn = np.ones(schedule.num_jobs, dtype=bool)
        drawn[own] = False
        rng = np.random.default_rng([self.seed, schedule.epoch, count])
        self._epoch = _Epoch(schedule, own, drawn, done, rng, num_before=count)

    def _trained_mask(self, schedule: EpochSchedule, trained: np.ndarray | int) -> np.ndarray:
        mask = np.zeros(schedule.num_jobs, dtype=bool)
        if self.draw == "seeded":
            if isinstance(trained, np.ndarray):
                raise TypeError("draw 'seeded' resumes from the number of trained jobs; found an array")
            if len(schedule.draw_order) != schedule.num_jobs:
                raise ValueError(
                    f"draw 'seeded' needs a schedule with a draw order of all {schedule.num_jobs} jobs; found "
                    f"{len(schedule.draw_order)}. Build the schedule with draw='seeded'"
                )
            if not 0 <= trained <= schedule.num_jobs:
                raise ValueError(f"trained must be between 0 and {schedule.num_jobs} jobs; found {trained}")
            mask[schedule.draw_order[:trained]] = True
        elif isinstance(trained, np.ndarray):
            if trained.shape != mask.shape or trained.dtype != bool:
                raise ValueError(f"trained must be bool {mask.shape}; found {trained.dtype} {trained.shape}")
            mask[:] = trained
        elif trained != 0:
            raise TypeError(f"draw {self.draw!r} resumes from a bool array of trained jobs; found {trained!r}")
        return mask

    def _current(self) -> _Epoch:
        if self._epoch is None:
            raise RuntimeError("call start_epoch first")
        return self._epoch

    @property
    def jobs_left(self) -> int:
        """Jobs of the current epoch to draw here and not drawn yet."""
        epoch = self._current()
        return len(epoch.own) - epoch.num_drawn

    @property
    def trained(self) -> np.ndarray | int:
        """What `start_epoch` takes to resume here: the number of trained jobs ("seeded"), else a (J,) bool copy.

        Of several ranks, each knows of its own jobs only, beside those trained before.
        """
        epoch = self._current()
        return epoch.num_before + epoch.num_trained if self.draw == "seeded" else epoch.trained.copy()

    def next(self, who: str) -> Lease:
        """The next slot to train, DRAINING and in the caller's hands until `Ring.release`.

        Raises:
            Stopped, WaitTimeoutError: see `RunControl.wait_for`.
            RuntimeError: no job of the epoch is left, or the awaited one cannot come any more.
        """
        epoch = self._current()
        left = self.jobs_left
        if left == 0:
            raise RuntimeError(f"all jobs of epoch {epoch.schedule.epoch} are drawn; call start_epoch")
        number = epoch.schedule.epoch
        if self.draw == "seeded":
            wanted = int(epoch.own[epoch.num_drawn])
            lease = self.ring.draw(
                number,
                lambda ready: next((x for x in ready if x.job.index == wanted), None),
                who,
                f"epoch {number} job {wanted} to be READY",
            )
        else:
            needed = min(epoch.schedule.min_ready, left)
            pick = self._pick_any if self.draw == "ready" else self._pick_bucket
            lease = self.ring.draw(
                number,
                lambda ready: pick(epoch, ready) if len(ready) >= needed else None,
                who,
                f"{needed} READY slots of epoch {number}",
            )
        job = lease.job
        if epoch.drawn[job.index]:
            raise RuntimeError(
                f"epoch {number} job {job.index} was already drawn; the source must skip trained jobs and those of "
                "other ranks"
            )
        epoch.drawn[job.index] = True
        epoch.num_drawn += 1
        epoch.last_bucket = job.bucket
        return lease

    @staticmethod
    def _pick_any(epoch: _Epoch, ready: Sequence[Lease]) -> Lease:
        return ready[int(epoch.rng.integers(len(ready)))]

    @staticmethod
    def _pick_bucket(epoch: _Epoch, ready: Sequence[Lease]) -> Lease:
        """The oldest job of the next bucket, cyclically, that has one."""
        return min(ready, key=lambda x: (x.job.bucket <= epoch.last_bucket, x.job.bucket, x.job.index))

    def mark_trained(self, jobs: Iterable[int]) -> None:
        """Record the jobs (indices in the current epoch, in the order drawn) of a finished step.

        Raises:
            RuntimeError: a job was not drawn, is trained already, or ("seeded") is not the next of the draw order.
        """
        epoch = self._current()
        for job in jobs:
            if not epoch.drawn[job] or epoch.trained[job]:
                state = "trained already" if epoch.trained[job] else "not drawn"
                raise RuntimeError(
                    f"only drawn, untrained jobs can be marked; epoch {epoch.schedule.epoch} job {job} is {state}"
                )
            expected = epoch.own[epoch.num_trained] if self.draw == "seeded" else job
            if job != expected:
                raise RuntimeError(f"jobs must be marked in draw order: next is {expected}; found {job}")
            epoch.trained[job] = True
            epoch.num_trained += 1
