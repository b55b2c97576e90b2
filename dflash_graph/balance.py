"""Says once when targets and drafter do not fit each other: a ring that stays full or empty, and the better split.

Pure arithmetic over waits and busy seconds. Called by the trainer at log intervals.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, replace

from dflash_graph.metrics import RankRecord

SHARE = 0.2  # of the wall-clock, above which a full or empty ring is worth a word
AFTER_S = 30.0  # of training, so that start-up does not count
AFTER_JOBS = 50


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What one rank has seen so far.

    Attributes:
        seconds: of wall-clock, from any beginning. jobs: trained by this rank.
        empty_s: the drafter waited for a READY slot. full_s: targets waited for a FREE slot, mean over targets.
        target_busy_s: targets computed, summed over targets. drafter_idle_s: the drafter waited, for whatever.
    """

    seconds: float
    jobs: int
    num_targets: int
    empty_s: float
    full_s: float
    target_busy_s: float
    drafter_idle_s: float

    def since(self, earlier: "Balance") -> "Balance":
        """What was seen after `earlier`."""
        names = ("seconds", "jobs", "empty_s", "full_s", "target_busy_s", "drafter_idle_s")
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def advice(self) -> str | None:
        """One line, or None while all is well or too little has been seen."""
        if self.seconds < AFTER_S or self.jobs < AFTER_JOBS:
            return None
        empty, full = self.empty_s / self.seconds, self.full_s / self.seconds
        if max(empty, full) <= SHARE:
            return None
        target, drafter = self.target_busy_s / self.jobs, (self.seconds - self.drafter_idle_s) / self.jobs
        state, waiting = ("empty", "the drafter waits") if empty >= full else ("full", "targets wait")
        ratio = target / max(drafter, 1e-9)
        better = f"{ratio:.1f} targets per drafter" if ratio >= 1 else f"{1 / max(ratio, 1e-9):.1f} drafters per target"
        return (
            f"the ring was {state} for {max(empty, full):.0%} of the time: {waiting}. A job takes a target "
            f"{target:.3g} s and the drafter {drafter:.3g} s, which {better} would balance (now {self.num_targets} to "
            "1): see devices.layout and devices.ranks; with the drafter on the same device, both slow each other"
        )


class Adviser:
    """Watches one rank's records and speaks up once. What came before the first record does not count."""

    def __init__(self) -> None:
        self._jobs, self._done = 0, False
        self._first: Balance | None = None

    def advice(self, record: RankRecord, *, num_targets: int, target_busy_s: float) -> str | None:
        """What to say after this record; None almost always."""
        self._jobs += record.jobs.jobs
        waits: defaultdict[str, float] = defaultdict(float)
        for (_, cause), seconds in record.waits.items():
            waits[cause] += seconds
        seen = Balance(
            seconds=time.monotonic(),
            jobs=self._jobs,
            num_targets=num_targets,
            empty_s=waits["ready"],
            full_s=waits["slot"] / num_targets,
            target_busy_s=target_busy_s,
            drafter_idle_s=sum(waits[cause] for cause in ("ready", "ranks", "validation", "evaluation", "checkpoint")),
        )
        if self._first is None:
            self._first = seen
        found = None if self._done else seen.since(self._first).advice()
        self._done |= found is not None
        return found
