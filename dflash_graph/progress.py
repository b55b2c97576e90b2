"""Where a run stands: what its checkpoints keep beside tensors, and what a resumed run starts from.

Owned by the trainer, which changes it at step boundaries only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_graph.checkpoint import decode_mask, encode_mask
from dflash_graph.workers import Schedules


@dataclass(kw_only=True)
class Progress:
    """Where a run stands, at a step boundary.

    Attributes:
        epoch: the epoch to train next; equal to `epochs` when the run is complete.
        trained: what `Pool.start_epoch` takes: jobs trained in that epoch ("seeded"), or their (J,) bool mask.
        jobs: jobs trained in all epochs.
        schedule: fingerprint and min_ready of that epoch's schedule once a part of it is trained, else None.
    """

    step: int = 0
    epoch: int = 0
    trained: int | np.ndarray = 0
    jobs: int = 0
    schedule: tuple[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        trained = encode_mask(self.trained) if isinstance(self.trained, np.ndarray) else self.trained
        return vars(self) | {"trained": trained}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        trained, schedule = values["trained"], values["schedule"]
        return cls(
            **{
                **values,
                "trained": trained if isinstance(trained, int) else decode_mask(trained),
                "schedule": None if schedule is None else (schedule[0], schedule[1]),
            }
        )

    def mask(self, schedules: Schedules, jobs_per_epoch: int) -> np.ndarray:
        """(J,) bool, the jobs of `epoch` that are trained."""
        if isinstance(self.trained, np.ndarray):
            return self.trained
        mask = np.zeros(jobs_per_epoch, dtype=bool)
        if self.trained:
            mask[schedules[self.epoch].draw_order[: self.trained]] = True
        return mask
