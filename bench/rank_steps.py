"""`python -m bench.rank_steps train ...`: `dflash-graph train` whose steps only take time, and that says where it goes.

Targets, micro-steps and updates sleep for the seconds in the JSON of STAND_IN; everything else is the package's own
code: the ring, the job list, the ranks and what they exchange. Each rank writes `steps-<rank>.json` into `folder`: per
step, seconds of the drafter's thread in all, in the stand-ins, in waits for a slot and in collectives, and the rest,
which is our own host work. With `one_device`, a rank's target and drafter take turns, as on one GPU. Used by
`bench_ranks.py`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dflash_graph import launch, ranks, train_command
from dflash_graph.__main__ import _rank_main, main
from dflash_graph.dispatch import PaddedJob
from dflash_graph.pool import Pool
from dflash_graph.rank_watch import RANK_DIR
from dflash_graph.step import DrafterStep
from dflash_graph.trainer import Trainer
from dflash_graph.workers import TargetWorker


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Seconds of each stage, and where the measurements go."""

    target_s: float
    drafter_s: float
    apply_s: float
    one_device: bool
    folder: str


@dataclass
class Clock:
    """Seconds of the drafter's thread by kind, and how much of them was CPU time."""

    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    thread: int = 0
    depth: int = 0

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted under `kind`; not what it calls in turn, nor in other threads."""

        @wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread or self.depth:
                return call(*args, **kwargs)
            self.depth += 1
            started, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.wall[kind] += time.perf_counter() - started
                self.cpu[kind] += time.thread_time() - cpu
                self.depth -= 1

        return inner


KINDS = ("stand_in", "ready", "gradients", "exchange")
_EXCHANGES = ("gather_object", "all_gather_object", "broadcast_object_list", "barrier")


def plant(stand_in: StandIn) -> None:
    """Put the stand-ins and clocks in the package's place."""
    clock, device, steps = Clock(), threading.Lock() if stand_in.one_device else nullcontext(), []

    def take(seconds: float, *_: Any, **__: Any) -> None:
        with device:
            time.sleep(seconds)

    def forward(worker: TargetWorker, job: PaddedJob) -> dict[str, Tensor]:
        take(stand_in.target_s)
        return {"features": worker._output}

    TargetWorker._forward = forward  # type: ignore[method-assign]
    DrafterStep.micro_step = clock.timed("stand_in", partial(take, stand_in.drafter_s))  # type: ignore[method-assign]
    DrafterStep.apply = clock.timed("stand_in", partial(take, stand_in.apply_s))  # type: ignore[method-assign]
    Pool.next = clock.timed("ready", Pool.next)  # type: ignore[method-assign]
    ranks.dist = _timed_collectives(clock)  # type: ignore[assignment]
    step, after = Trainer._step, Trainer._after_step

    def timed_step(trainer: Trainer, window: int) -> list[int]:
        clock.thread = threading.get_ident()
        clock.wall, clock.cpu = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        steps.append({"started": time.perf_counter(), "cpu": time.thread_time(), "jobs": window})
        return step(trainer, window)

    def timed_after(trainer: Trainer, at_end: bool) -> None:
        after(trainer, at_end)
        now = steps[-1]
        now |= {
            "step": trainer.progress.step,
            "wall_s": time.perf_counter() - now["started"],
            "own_cpu_s": time.thread_time() - now.pop("cpu") - sum(clock.cpu.values()),
            "exchange_cpu_s": clock.cpu["exchange"],
            **{f"{kind}_s": seconds for kind, seconds in clock.wall.items()},
        }
        now["own_s"] = now["wall_s"] - sum(clock.wall.values())
        if trainer.progress.epoch == trainer.plan.config.epochs:
            rank, size = trainer._ranks.rank, 4 * trainer.step.parameters.sums.numel()
            report = {"rank": rank, "gradient_bytes": size, "stand_in": asdict(stand_in), "steps": steps}
            Path(stand_in.folder, f"steps-{rank}.json").write_text(json.dumps(report))

    Trainer._step, Trainer._after_step = timed_step, timed_after  # type: ignore[method-assign]


def _timed_collectives(clock: Clock) -> SimpleNamespace:
    """`torch.distributed`, with every collective's time counted: gradients apart from all others."""
    timed = SimpleNamespace(**vars(dist))

    def all_reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = clock.timed("exchange" if async_op else "gradients", dist.all_reduce)(*args, async_op=async_op, **kwargs)
        return SimpleNamespace(wait=clock.timed("exchange", work.wait)) if async_op else work

    timed.all_reduce = all_reduce
    for name in _EXCHANGES:
        setattr(timed, name, clock.timed("exchange", getattr(dist, name)))
    return timed


def _launch(command: list[str], *args: Any, **kwargs: Any) -> int:
    return launch.launch(["-m", "bench.rank_steps", *command[2:]], *args, **kwargs)


if __name__ == "__main__":
    train_command.launch = _launch  # type: ignore[assignment]
    plant(StandIn(**json.loads(os.environ["STAND_IN"])))
    if RANK_DIR in os.environ:
        _rank_main()
    sys.exit(main())
