"""Start-up and run-time checks that all ranks do the same thing. Every rank must call them at the same point."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_graph.ranks import Ranks
from dflash_graph.schedule import EpochSchedule


def check_same_schedule(ranks: Ranks, schedule: EpochSchedule) -> None:
    """Every rank builds the schedule of an epoch itself; it must be the first rank's.

    Raises:
        RuntimeError: it is not; the message names the ranks.
    """
    found = ranks.all_gather(schedule.fingerprint)
    other = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if other:
        raise RuntimeError(
            f"all ranks must have the schedule of rank 0 for epoch {schedule.epoch}; ranks {other} have another: "
            "their data, packages or settings differ"
        )


def check_same_parameters(ranks: Ranks, tensors: Mapping[str, Tensor], *, step: int) -> None:
    """Masters and moments must be equal, bit for bit, on all ranks: all took the same updates.

    Args:
        tensors: float32, by name; their bits are summed on their device, and the sums are read back once.

    Raises:
        RuntimeError: they are not; the message names the rank and the first tensor.
    """
    if ranks.world == 1:
        return
    sums = [tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
    found = ranks.all_gather(torch.stack(sums).tolist())  # sync: once in devices.check_every steps
    for rank, theirs in enumerate(found):
        names = [name for name, ours, first in zip(tensors, theirs, found[0], strict=True) if ours != first]
        if names:
            raise RuntimeError(
                f"rank {rank} and rank 0 must hold the same parameters at step {step}; the first that differs is "
                f"{names[0]} ({len(names)} of {len(tensors)} do). A device that computes wrongly, or unequal packages "
                "on the machines, do this"
            )
