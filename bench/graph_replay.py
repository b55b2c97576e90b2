"""Whole runs of replayed steps against eager ones: every optimizer step's buffers, bit for bit.

Both runs are the engine's own, with its threads, ring and checkpoints; only `graphs.mode` differs. Around each update
of the drafter, digests of what it read and wrote are taken on the device, without waiting for them, and compared when
both runs are over.
"""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.graph_models import Task
from dflash_graph.graphs import Mode
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.trainer import Trainer
from dflash_graph.training import Run
from dflash_graph.workers import TargetWorker, Worker

STEPS, QUICK_STEPS = 2000, 20
JOBS_PER_STEP = 2  # gradients accumulate over two micro-steps


@dataclass(kw_only=True)
class Record:
    """What one run left behind.

    Attributes:
        names: of the buffers, in the order of the data's way through a step.
        digests: (steps, buffers) int64. sums: (steps, 2) sums of loss and weight, since the last log.
        replays: calls of captured steps, by worker.
    """

    names: list[str] = field(default_factory=list)
    digests: Tensor | None = None
    sums: Tensor | None = None
    replays: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def losses(self) -> list[float]:
        """Mean loss of each step."""
        assert self.sums is not None
        found, last = [], [0.0, 0.0]
        for loss, weight in self.sums.tolist():
            if weight <= last[1]:  # the log has read and reset them
                last = [0.0, 0.0]
            found.append((loss - last[0]) / (weight - last[1]))
            last = [loss, weight]
        return found


def run_replay(task: Task) -> dict[str, Any]:
    """`steps` optimizer steps, eager and replayed; the first step and buffer that differ, if any."""
    steps = task.steps or (QUICK_STEPS if task.quick else STEPS)
    records = {mode: record_run(task, mode, steps) for mode in ("eager", task.mode)}
    eager, replayed = records["eager"], records[task.mode]
    first = first_difference(eager, replayed)
    losses = eager.losses()
    result: dict[str, Any] = {
        "steps": len(losses),
        "buffers": eager.names,
        "first_difference": first,
        "replays": replayed.replays,
        "losses": {"first": losses[0], "last": losses[-1]},
        "seconds_of": {mode: round(record.seconds, 2) for mode, record in records.items()},
    }
    faults = []
    if first is not None:
        faults.append(f"step {first['step']}: {first['buffer']} is the first that differs")
    if len(losses) < steps:
        faults.append(f"only {len(losses)} of {steps} steps were made")
    if not all(map(math.isfinite, losses)) or len(set(losses)) < len(losses) // 2:
        faults.append("the losses are no training")
    if task.mode in ("cuda_graph", "recorded") and min(replayed.replays.values(), default=0) < steps:
        faults.append(f"not every step was a replay: {replayed.replays}")
    return {"passed": not faults, "faults": faults, **result}


def record_run(task: Task, mode: Mode, steps: int) -> Record:
    """Train in one mode."""
    settings = (
        f"graphs.mode={mode}", f"schedule.jobs_per_step={JOBS_PER_STEP}", "optim.lr=1e-3", "optim.weight_decay=0.1",
        "optim.lr_schedule=cosine", "optim.warmup_ratio=0.05", "checkpoint.every=1000000",
    )  # fmt: skip
    config = task.config(task.model(), f"replay-{mode}", *settings)
    per_epoch = math.ceil(make_plan(config).jobs_per_epoch / JOBS_PER_STEP)
    plan = make_plan(replace(config, epochs=math.ceil(steps / per_epoch)))
    record = Record()
    (task.folder / f"replay-{mode}").mkdir()
    started = time.monotonic()
    Run(plan, plan.config.to_dict() | {"derived": plan.identity()}).run(lambda worker: Watched(worker, plan, record))
    record.seconds = time.monotonic() - started
    return record


def first_difference(a: Record, b: Record) -> dict[str, Any] | None:
    """The first step (from 1) in which two runs differ, and its first buffer that does."""
    assert a.digests is not None
    assert b.digests is not None
    for step, (left, right) in enumerate(zip(a.digests, b.digests, strict=False), 1):
        differing = [name for name, x, y in zip(a.names, left, right, strict=True) if x != y]
        if differing:
            return {"step": step, "buffer": differing[0], "all": differing}
    return None


class Watched:
    """A worker of a run; around each update of the drafter digests are taken in its thread, on its stream."""

    def __init__(self, worker: Worker, plan: RunPlan, record: Record) -> None:
        self.name, self._worker, self._plan, self._record = worker.name, worker, plan, record
        self._digests: list[Tensor] = []
        self._sums: list[Tensor] = []

    def load(self) -> None:
        self._worker.load()
        if isinstance(self._worker, Trainer):
            self._watch(self._worker)

    def run(self) -> None:
        worker, record = self._worker, self._record
        worker.run()
        assert isinstance(worker, TargetWorker | Trainer)
        assert worker.context is not None
        record.replays[worker.name] = sum(g.calls for g in worker.context.graphs if g.captured is not None)
        if isinstance(worker, Trainer):
            record.digests, record.sums = (torch.stack(x).cpu() for x in (self._digests, self._sums))

    def close(self) -> None:
        self._worker.close()

    def _watch(self, trainer: Trainer) -> None:
        step = trainer.step
        apply, counters = step.apply, step.counters.tensors()
        flat = {name: t for name, t in step.parameters.buffers() if not name.startswith("leaf.")}
        # The last job's features as they came from the target, then what its micro-step made of them.
        before = {name: trainer.table[f"workspace.{name}"] for name in ("features", "anchors", "labels", "weights")}
        before |= {f"counters.{name}": counters[name] for name in ("sums", "per_k")}
        before |= {"weight_sum": step.weight_sum} | {n: t for n, t in flat.items() if n.startswith("grad.")}
        after = {"lr": step.lr, "counters.grad_norm": counters["grad_norm"], "counters.skipped": counters["skipped"]}
        for group, master in step.parameters.masters.items():
            after |= {f"{kind}.{group}": t for kind, t in step.optimizer.state[master].items()}
        after |= {name: t for name, t in flat.items() if not name.startswith("grad.")}
        self._record.names = [*before, *(f"after the update: {name}" for name in after)]

        def watched(lr: float) -> None:
            self._sums.append(counters["sums"][:2].clone())
            row = [digest(t) for t in before.values()]
            apply(lr)
            self._digests.append(torch.stack(row + [digest(t) for t in after.values()]))

        step.apply = watched  # type: ignore[method-assign]


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """() int64 that another bit anywhere, or the same bits elsewhere, changes; on the device."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().reshape(-1).view(kind).to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
