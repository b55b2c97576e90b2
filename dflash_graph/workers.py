"""The target worker: a thread that owns one target and turns jobs into filled slots, and the job list it pulls from.

A worker makes everything of its own inside its thread and never touches the drafter's state. It takes a job and its
slot together, runs the target into its output buffer, copies that into the slot, and publishes the slot. Called by
`training.py`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_graph.control import RunControl, Stopped
from dflash_graph.dispatch import PaddedJob
from dflash_graph.graphs import CapturePhase, Mode, Observer, StepGraph, WorkerContext
from dflash_graph.handoff import FeatureCopy, choose_route
from dflash_graph.kernels import teacher_statistics as teacher_op
from dflash_graph.plan import RunPlan
from dflash_graph.rank_share import RankShare
from dflash_graph.schedule import EpochSchedule
from dflash_graph.static_buffers import SLOT_METADATA, BufferTable, JobSource, Ring, write_metadata
from dflash_graph.target import Target


def start_thread(control: RunControl, name: str, run: Callable[[], None]) -> threading.Thread:
    """Run `run` in a thread whose first error ends the run. A `Stopped` is an orderly end."""

    def guarded() -> None:
        try:
            run()
        except Stopped:
            pass
        except BaseException as error:
            control.fail(name, error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class Worker(Protocol):
    """What a thread of a run does, all of it in that thread."""

    name: str

    def load(self) -> None:
        """Set up, captures included; the other workers wait."""

    def run(self) -> None: ...

    def close(self) -> None:
        """Give up what `load` made, as far as it came. Runs whatever happened before."""


class StartUp:
    """Workers set themselves up inside their own threads, one at a time and in order, before any of them runs.

    Args:
        count: of workers. phase: of captures, which ends when all are set up.
    """

    def __init__(self, control: RunControl, count: int, phase: CapturePhase) -> None:
        self._control, self._count, self._phase, self._loaded = control, count, phase, 0
        self._changed = control.condition()

    def live(self, index: int, worker: Worker) -> None:
        """The life of worker `index`: its turn to load, the others' turns, its run, its end."""
        self._wait(lambda: self._loaded == index, index, "its turn to set up")
        try:
            worker.load()
            with self._changed:
                self._loaded += 1
                if self._loaded == self._count:
                    self._phase.close()
                self._control.beat()
                self._changed.notify_all()
            self._wait(lambda: self._loaded == self._count, index, "the other workers' set-up")
            worker.run()
        except BaseException as error:
            try:
                worker.close()
            except Exception as later:  # the first error is the one to tell
                error.add_note(f"while it was torn down: {type(later).__name__}: {later}")
            raise
        worker.close()

    def _wait(self, predicate: Callable[[], bool], index: int, what: str) -> None:
        with self._changed:
            self._control.wait_for(
                self._changed,
                predicate,
                who=f"worker {index}",
                what=what,
                describe=lambda: f"{self._loaded} of {self._count} workers are set up",
            )


def set_cpu_threads(chosen: int | None, num_workers: int) -> None:
    """Threads of the calling worker's CPU operators: as configured, or an equal share of the cores.

    Workers that share cores slow each other down far beyond the share: OpenMP threads spin while they wait.
    """
    torch.set_num_threads(chosen or max(1, len(os.sched_getaffinity(0)) // num_workers))


class Schedules:
    """The epoch schedules of a run, built when first needed and kept as files, so that a resumed run reads the same.

    Args:
        folder: `schedule/` of the run folder; None keeps them in memory only.
        fresh: the run starts from nothing: files of one that died before its first checkpoint are removed.
        started: (epoch, its fingerprint, its min_ready) of the epoch that a checkpoint stands in: part of it is
            trained, so it is rebuilt as it was, whatever `schedule.min_ready` is now.
    """

    def __init__(
        self, plan: RunPlan, folder: Path | None, *, fresh: bool, started: tuple[int, str, int] | None = None
    ) -> None:
        self._plan, self._folder, self._started = plan, folder, started
        if fresh and folder is not None:
            for stale in folder.glob("epoch_*.npz"):
                stale.unlink()
        self._known: dict[int, EpochSchedule] = {}
        self._lock = threading.Lock()

    def __getitem__(self, epoch: int) -> EpochSchedule:
        with self._lock:
            if epoch not in self._known:
                self._known = {e: s for e, s in self._known.items() if e >= epoch - 1}
                schedule = self._known[epoch] = self._read_or_build(epoch)
                if self._started and self._started[:2] != (epoch, schedule.fingerprint) and self._started[0] == epoch:
                    raise ValueError(
                        f"the schedule of epoch {epoch} must be the one that the checkpoint was trained on; its "
                        f"fingerprint is {schedule.fingerprint}, the checkpoint's {self._started[1]}. Resume in the "
                        "run folder that made the checkpoint"
                    )
            return self._known[epoch]

    def _read_or_build(self, epoch: int) -> EpochSchedule:
        min_ready = self._started[2] if self._started and self._started[0] == epoch else None
        if self._folder is None:
            return self._plan.build_epoch(epoch, min_ready)
        path = self._folder / f"epoch_{epoch:05d}.npz"
        if path.exists():
            schedule, ours = EpochSchedule.load(path), self._plan.first_epoch
            names = ("data_fingerprint", "seed", "token_budget", "buckets", "order", "draw", "jobs_per_step")
            differing = [name for name in names if getattr(schedule, name) != getattr(ours, name)]
            if differing or schedule.epoch != epoch:
                raise ValueError(
                    f"schedule file {path} must be of epoch {epoch} of this run; it is of epoch {schedule.epoch} and "
                    f"differs in {differing or 'nothing else'}. Delete the file, or use another run_dir"
                )
            return schedule
        self._folder.mkdir(parents=True, exist_ok=True)
        known = epoch == 0 and min_ready is None  # the plan has built it
        schedule = self._plan.first_epoch if known else self._plan.build_epoch(epoch, min_ready)
        schedule.save(path)
        return schedule

    def jobs(self, first_epoch: int, trained: np.ndarray, share: RankShare) -> Iterator[tuple[EpochSchedule, int]]:
        """A rank's linear job list from `first_epoch` on, without the jobs of that epoch marked in `trained` (J,)."""
        for epoch in range(first_epoch, self._plan.config.epochs):
            schedule = self[epoch]
            for job in np.sort(share.jobs(schedule, trained if epoch == first_epoch else None)).tolist():
                yield schedule, job


# Buffers of one target that its head reads and writes, whatever the loss takes of them.
_TEACHER = ("teacher_positions", "num_teacher_positions", "teacher_hidden", "teacher_entropy", "teacher_argmax")


class TeacherHead:
    """What one target says about the next token: its head over the rows that its forward pass gathered.

    Args:
        index: of the target; its buffers are `target.<index>.teacher_*`.
        head_weight: (V, D) the target's head; plan.head_ids, if any, picks the rows of a reduced one, over which the
            target's softmax is then taken anew.
    """

    def __init__(self, index: int, plan: RunPlan, table: BufferTable, head_weight: Tensor) -> None:
        assert plan.teacher is not None
        self.buffers = {name: table[f"target.{index}.{name}"] for name in _TEACHER}
        self.statistics = {name: table[f"target.{index}.{name}"] for name in plan.teacher.statistics}
        if plan.head_ids is not None:
            head_weight = head_weight.index_select(0, torch.from_numpy(plan.head_ids).to(head_weight.device))
        self._head_weight = head_weight
        self._workspace = teacher_op.make_workspace(
            num_rows=plan.teacher.num_positions,
            hidden_size=plan.teacher.hidden_size,
            vocab_size=head_weight.shape[0],
            dtype=plan.teacher.dtype,
            device=head_weight.device,
            implementation=plan.config.devices.implementation,
        )

    @property
    def positions(self) -> Tensor:  # (U,) int64
        return self.buffers["teacher_positions"]

    def load(self, job: PaddedJob) -> None:
        """Copy a job's teacher positions, and how many are live, to the target's device."""
        assert job.teacher_positions is not None
        self.buffers["num_teacher_positions"].fill_(job.num_covered)
        self.positions.copy_(job.teacher_positions, non_blocking=True)

    def compute(self) -> None:
        """Statistics of the rows in `teacher_hidden`; zeros beyond the live ones."""
        teacher_op.teacher_statistics(
            self.buffers["teacher_hidden"],
            self._head_weight,
            self.buffers["num_teacher_positions"],
            mean=self.statistics.get("teacher_mean"),
            entropy=self.buffers["teacher_entropy"],
            argmax=self.buffers["teacher_argmax"],
            workspace=self._workspace,
        )


class TargetWorker:
    """One target and the thread that runs it.

    Args:
        phase: of captures. observer: of mode "debug".

    Attributes:
        target: loaded by `load`, inside the worker's thread.
        context: what the thread owns, made there too.
        busy_s: seconds spent in forward passes and copies.
    """

    def __init__(
        self,
        index: int,
        plan: RunPlan,
        table: BufferTable,
        ring: Ring,
        source: JobSource,
        control: RunControl,
        *,
        phase: CapturePhase,
        observer: Observer | None = None,
    ) -> None:
        self.name, self._index = f"target-{index}", index
        self._plan, self._table, self._ring, self._source, self._control = plan, table, ring, source, control
        self._output, self._token_ids = table[f"target.{index}.output"], table[f"target.{index}.token_ids"]
        self._phase, self._observer = phase, observer
        # The validation pass borrows the target between two of its jobs.
        self._turn = threading.Lock()
        self.busy_s = 0.0
        self.target: Target | None = None
        self.context: WorkerContext | None = None
        self._teacher: TeacherHead | None = None
        self._steps: dict[int, StepGraph] = {}  # by row length
        # A plain CPU run skips the rows that a job leaves empty; wherever a step is fixed, all rows run.
        self._num_rows: int | None = None
        self._skips_rows = plan.config.graphs.mode == "auto"

    def load(self) -> None:
        """Load the target, check its attention against transformers' own, and capture its step for each bucket."""
        plan = self._plan
        set_cpu_threads(plan.config.devices.target_threads, plan.workers_here)
        device = plan.target_devices[self._index]
        spread = plan.placement.targets[self._index]
        context = self.context = make_context(
            self.name, device, plan, self._phase, self._observer, mode="eager" if len(spread) > 1 else None
        )
        context.__enter__()
        if len(spread) > 1:
            print(
                f"{self.name} lies on {', '.join(map(str, spread))} and runs eagerly: its step is no graph", flush=True
            )
        self._copy = FeatureCopy(
            device, plan.device, choose_route(device, plan.device, strict=plan.config.graphs.strict)
        )
        target = Target(
            plan.config.target,
            target_layer_ids=plan.spec.target_layer_ids,
            output=self._output,
            device=device,
            dtype=plan.target_dtype,
            keep_layers=plan.spec.num_hidden_layers if plan.config.drafter.init == "target" else 0,
            teacher_hidden=None if plan.teacher is None else self._table[f"target.{self._index}.teacher_hidden"],
            spread=spread,
        )
        target.check_attention()
        if plan.teacher is not None:
            self._teacher = TeacherHead(self._index, plan, self._table, target.head_weight)
        self.target = target
        outputs = {"output": self._output}
        if self._teacher is not None:
            outputs |= self._teacher.buffers | self._teacher.statistics
        self._copy.reserve({"features": self._output, **({} if self._teacher is None else self._teacher.statistics)})
        for bucket in plan.buckets:
            self._steps[bucket.length] = context.graph(
                f"target.{bucket.length}",
                partial(self._step, bucket.length),
                inputs={"token_ids": self._token_ids},
                outputs=outputs,
                state={},
            )
        context.prepare()

    def run(self) -> None:
        """Fill slots until the job list is exhausted."""
        while (lease := self._ring.take(self._source, self.name)) is not None:
            started = time.monotonic()
            with self._turn:
                results = self._forward(lease.job)
                with self._copy.order():
                    self._ring.wait_drained(lease)
                    for name, tensor in results.items():
                        self._copy.copy(name, self._table[f"slot.{name}"][lease.slot], tensor)
                    write_metadata(self._table, lease.slot, lease.job)
                    self.busy_s += time.monotonic() - started
                    self._ring.filled(lease)
            self._control.beat()

    def close(self) -> None:
        """Destroy the graphs; the target itself stays for a validation pass that borrows it."""
        if self.context is not None:
            with self._turn:
                self.context.close()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Let the calling thread run the target and read its output buffer, between two of its jobs."""
        with self._turn:
            self._synchronize()  # sync: the worker's last copy out of the output buffer
            try:
                yield
            finally:
                self._synchronize()  # sync: the borrower's copy out of it

    def extract(self, job: PaddedJob) -> dict[str, Tensor]:
        """Features and metadata of a job outside the ring, valid while the caller has `borrowed` (validation pass).

        Never a replay: graphs belong to the worker's thread. The job is padded without a teacher: validation needs
        none.
        """
        assert self.target is not None
        self.target.forward(job.token_ids.to(self._output.device), job.num_rows, job.bucket_length)
        metadata = {name: getattr(job, name).to(self._plan.device) for name in SLOT_METADATA}
        return {"features": self._output.to(self._plan.device, self._plan.compute_dtype)} | metadata

    def _forward(self, job: PaddedJob) -> dict[str, Tensor]:
        """Run the target over a job: its features (T, N*D) and, if the loss needs them, the teacher's statistics."""
        self.stage(job)
        self._steps[job.bucket_length]()
        return {"features": self._output, **({} if self._teacher is None else self._teacher.statistics)}

    def stage(self, job: PaddedJob) -> None:
        """Copy what the step reads of a job into its static inputs."""
        self._token_ids.copy_(job.token_ids, non_blocking=True)
        self._num_rows = job.num_rows if self._skips_rows else None
        if self._teacher is not None:
            self._teacher.load(job)

    def _step(self, row_length: int) -> None:
        """The device's part of a forward pass: what a graph holds."""
        assert self.target is not None
        rows = self._num_rows or self._token_ids.shape[0] // row_length
        if self._teacher is None:
            self.target.forward(self._token_ids, rows, row_length)
            return
        self.target.forward(self._token_ids, rows, row_length, self._teacher.positions)
        self._teacher.compute()

    def _synchronize(self) -> None:
        for device in {self._output.device, self._plan.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def make_context(
    name: str,
    device: torch.device,
    plan: RunPlan,
    phase: CapturePhase,
    observer: Observer | None,
    *,
    mode: Mode | None = None,
) -> WorkerContext:
    """The context of one worker of a run; to be entered in its thread. A mode of None is the run's."""
    config = plan.config
    return WorkerContext(
        name, device, mode=mode or config.graph_mode, phase=phase, warmups=config.graphs.warmups, observer=observer
    )
