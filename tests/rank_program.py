"""One rank of a run in which something goes wrong: `python -m tests.rank_program train ...` under FAULT_* variables.

FAULT_RANK is the rank it happens in, FAULT_STAGE where, FAULT_KIND what, FAULT_ONCE a file that is made when it
happens, so that it does not happen again. KEEP_SUMS names a file for the first sum of
gradients and weights over all ranks. Called by `test_rank_faults.py` and `test_ranks.py`.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_graph import training
from dflash_graph.__main__ import _rank_main
from dflash_graph.checkpoint import CheckpointWriter
from dflash_graph.ranks import Processes, Ranks
from dflash_graph.trainer import Trainer
from dflash_graph.workers import TargetWorker


class Planted(RuntimeError):
    """The fault."""


def fault(trainer: Trainer | None = None) -> None:
    """Do what FAULT_KIND says, here and now."""
    kind = os.environ["FAULT_KIND"]
    if (once := os.environ.get("FAULT_ONCE")) is not None:
        if os.path.exists(once):
            return
        open(once, "w").close()
    if kind == "raise":
        raise Planted("the planted error")
    if kind == "bad input":
        raise ValueError("the planted refusal")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(1e6)
    if kind == "slow":
        time.sleep(0.5)
    if kind == "nan":
        assert trainer is not None
        trainer.step.parameters.sums.fill_(float("nan"))
    if kind == "drift":
        assert trainer is not None
        with torch.no_grad():
            next(iter(trainer.step.parameters.views(trainer.step.parameters.masters).values())).view(-1)[0].add_(1e-3)


def around(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Have the fault happen just before calls of `owner.name` for which `when` holds."""
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            fault(args[0] if args and isinstance(args[0], Trainer) else None)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def plant(stage: str) -> None:
    if stage == "start-up":
        around(training, "make_plan", lambda *_: True)
    elif stage == "load":
        around(TargetWorker, "load", lambda *_: True)
    elif stage == "first step":
        around(Trainer, "_step", lambda trainer, *_: trainer.progress.step == 0)
    elif stage == "mid-epoch":
        around(Trainer, "_step", lambda trainer, *_: trainer.progress.step == 5)
    elif stage == "every step":
        around(Trainer, "_step", lambda trainer, *_: True)
    elif stage == "after a micro-step":
        around(Trainer, "_reduce_and_apply", lambda trainer, *_: trainer.progress.step == 5)
    elif stage == "end of epoch":
        around(Trainer, "_validate", lambda trainer, *_: trainer.progress.epoch == 1)
    elif stage == "saving":
        around(Trainer, "_save", lambda trainer, *_: trainer.progress.step == 3)
    elif stage == "writing":
        around(CheckpointWriter, "_write", lambda *_: True)
    elif stage == "target":
        around(TargetWorker, "_forward", lambda worker, job: job.index > 8)
    else:
        raise AssertionError(stage)


def keep_first_sum(owner: type[Ranks], path: str) -> None:
    """Write what the first `all_reduce` of `owner` leaves in its tensor."""
    original = owner.all_reduce

    def all_reduce(self: Ranks, tensor: torch.Tensor) -> None:
        original(self, tensor)
        if not os.path.exists(path):
            torch.save(tensor.clone(), path)

    owner.all_reduce = all_reduce  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("FAULT_RANK") == os.environ["RANK"]:
        plant(os.environ["FAULT_STAGE"])
    if "KEEP_SUMS" in os.environ:
        keep_first_sum(Processes, os.environ["KEEP_SUMS"] + os.environ["RANK"])
    _rank_main()
