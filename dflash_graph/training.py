"""`train(config)`: the whole run, top-down. Plan, buffers, threads, and an orderly end.

The main thread owns the start-up order, the signals and the first error; the work happens in the workers' threads
(`workers.py`, `trainer.py`).
"""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor

from dflash_graph.checkpoint import Checkpoint, CheckpointWriter, compare_settings, load_checkpoint, resolve_resume
from dflash_graph.config import Config, save_config
from dflash_graph.control import RunControl, WaitTimeoutError
from dflash_graph.dispatch import Dispatcher
from dflash_graph.graphs import CapturePhase, Observer
from dflash_graph.held_out import HeldOut
from dflash_graph.layout import Layout, resolve_layout
from dflash_graph.metrics import MetricsLogger, truncate_to_step
from dflash_graph.observer import TrainingObserver
from dflash_graph.padding import pad_job
from dflash_graph.plan import Placement, RunPlan, default_placement, make_plan, parse_devices
from dflash_graph.progress import Progress
from dflash_graph.rank_share import RankShare, proportional
from dflash_graph.rank_watch import LAYOUT
from dflash_graph.ranks import Ranks, is_rank, join
from dflash_graph.serving_layouts import ServedTarget, reduced_head, write_servable
from dflash_graph.static_buffers import BufferTable, Ring
from dflash_graph.store_worker import make_feature_workers
from dflash_graph.trackers import check_installed
from dflash_graph.trainer import Trainer
from dflash_graph.workers import Schedules, StartUp, Worker, start_thread

_GRACE_S = 4.0  # after an error, a worker inside a long operator is not waited for any longer


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. `accept_length` is that of the last validation pass (teacher-forced), if there was one."""

    run_dir: Path
    step: int
    jobs: int
    complete: bool
    accept_length: float | None


def train(config: Config, *, resume: str = "never", dry_run: bool = False, layout: Layout | None = None) -> TrainResult:
    """Train a drafter as `config` says; the command `dflash-graph train`.

    Args:
        resume: "never", "auto" (the run folder's newest whole checkpoint, or a fresh start), or a checkpoint's path.
        dry_run: validate, print the plan with its buffers, run one step, keep nothing.
        layout: of one rank, where the caller has chosen it; None follows `config.devices`. A rank of several has its
            launcher's.

    Raises:
        ValueError: settings, data, target or checkpoint do not fit; before any expensive work.
        Exception: the first error of any worker, with the worker's name as a note.
    """
    if is_rank():
        layout = Layout.from_json(os.environ[LAYOUT]) if LAYOUT in os.environ else None
    else:
        layout = layout or _layout(config)
        if layout is not None and len(layout.ranks) > 1:
            raise ValueError(
                f"the settings ask for {len(layout.ranks)} ranks, which are processes of their own: start them with "
                "`dflash-graph train`, or set devices.ranks=1"
            )
    ranks = join(
        torch.device(config.devices.device),
        timeout_s=config.devices.rank_timeout_s,
        wait_timeout_s=config.schedule.wait_timeout_s,
    )
    try:
        result = _train(config, layout, ranks, resume, dry_run=dry_run)
    except BaseException as error:
        ranks.tell(error, "main")
        raise
    ranks.close()
    return result


def _train(config: Config, layout: Layout | None, ranks: Ranks, resume: str, *, dry_run: bool) -> TrainResult:
    checkpoint = None
    if ranks.leads:
        check_installed(config.log)
    with ExitStack() as stack:
        if ranks.leads and not dry_run:
            stack.enter_context(_lock(Path(config.run_dir)))  # before anything in it is read or changed
            resume_path, message = resolve_resume("auto" if ranks.restarts else resume, config.run_dir)
            checkpoint = load_checkpoint(resume_path) if resume_path is not None else None
            _say(ranks, message)
        elif ranks.leads:
            _say(ranks, "dry run: one step, nothing is kept")
        checkpoint = _shared(ranks, checkpoint)
        plan = _make_plan(config, layout, ranks)
        settings = config.to_dict() | {"derived": plan.identity()}
        _check_equal(ranks, settings)
        if checkpoint is not None:
            for line in compare_settings(checkpoint.state["settings"], settings):
                _say(ranks, f"changed since the checkpoint: {line}")
        _say(ranks, f"{plan.rows.report}\n{plan}")
        share = _share(config, plan, ranks)
        return Run(plan, settings, checkpoint, dry_steps=1 if dry_run else None, ranks=ranks, share=share).run()


def _layout(config: Config) -> Layout | None:
    """The layout that the settings spell out; None where they leave it open, for a run of one process."""
    devices = config.devices
    if devices.ranks is None and devices.layout == "auto":
        return None
    return resolve_layout(devices, num_cuda=torch.cuda.device_count())


def _say(ranks: Ranks, text: str) -> None:
    if ranks.leads:
        print(text, flush=True)


def _shared(ranks: Ranks, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """The first rank's checkpoint without its tensors, which go from device to device."""
    if ranks.world == 1:
        return checkpoint
    bare = None if checkpoint is None else replace(checkpoint, drafter={}, optimizer={})
    heard = ranks.broadcast(bare)
    return checkpoint if ranks.leads else heard


def _make_plan(config: Config, layout: Layout | None, ranks: Ranks) -> RunPlan:
    """Each rank plans for itself; the first of each machine first, so that the data are prepared once."""
    placement = replace(default_placement(config), ranks_here=ranks.local_world)
    if layout is not None:
        here = layout.ranks[ranks.local_rank]
        placement = Placement(
            drafter=torch.device(here.drafter),
            targets=tuple(map(parse_devices, here.targets)),
            ranks_here=ranks.local_world,
        )
    plan = make_plan(config, placement) if ranks.local_rank == 0 else None
    ranks.barrier()
    return plan or make_plan(config, placement)


def _check_equal(ranks: Ranks, settings: dict[str, Any]) -> None:
    """All ranks must train the same thing, and meet at the same steps; machines may differ in devices and folders."""
    data = {key: value for key, value in settings["data"].items() if key not in ("cache_dir", "workers")}
    devices = {"check_every": settings["devices"]["check_every"]}
    settings = settings | {"run_dir": "", "data": data, "devices": devices}
    for rank, theirs in enumerate(ranks.all_gather(settings)):
        if theirs != settings and rank == 0:
            lines = "; ".join(compare_settings(theirs, settings)) or "in their data or packages"
            raise ValueError(f"rank {ranks.rank} must have the settings and data of rank 0; they differ: {lines}")


def _share(config: Config, plan: RunPlan, ranks: Ranks) -> RankShare:
    """Jobs of a step in proportion to the ranks' targets, unless the settings say otherwise."""
    chosen = config.devices.rank_jobs
    targets = ranks.all_gather(plan.num_targets)
    if chosen is not None and len(chosen) != ranks.world:
        raise ValueError(
            f"devices.rank_jobs must have one number for each of the {ranks.world} ranks; found {list(chosen)}"
        )
    share = RankShare(chosen or proportional(config.schedule.jobs_per_step, targets), ranks.rank)
    if ranks.world > 1:
        _say(ranks, f"ranks     {ranks.world}, with {targets} targets, take {list(share.rank_jobs)} jobs of each step")
    return share


def _lock(folder: Path) -> TextIO:
    """Hold a run folder until the file is closed or the process ends, however it ends.

    Raises:
        ValueError: another process trains into it, or it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ValueError(f"run_dir must be a folder that can be written; {folder}: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"run_dir {folder} is in use by another process; stop it or choose another run_dir") from None
    return file


class Run:
    """The parts of one run and their life cycle.

    Args:
        dry_steps: run so many steps and keep nothing; None is the whole run.
        observer: of graph mode "debug"; None is a `TrainingObserver`.
        ranks, share: the other processes of the run and what this one takes of each step; None is a run of one process.
    """

    def __init__(
        self,
        plan: RunPlan,
        settings: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        *,
        dry_steps: int | None = None,
        observer: Observer | None = None,
        ranks: Ranks | None = None,
        share: RankShare | None = None,
    ) -> None:
        config, dry_run = plan.config, dry_steps is not None
        self.plan, self.ranks = plan, ranks or Ranks()
        share = share or RankShare((config.schedule.jobs_per_step,), 0)
        leads = self.ranks.leads
        self.folder = Path(config.run_dir)
        progress = Progress() if checkpoint is None else Progress.from_dict(checkpoint.state["progress"])
        self.table = BufferTable(plan.buffer_specs())
        if dry_run:
            _say(self.ranks, str(self.table))
        self.control = RunControl(wait_timeout_s=config.schedule.wait_timeout_s)
        self.ranks.attach(self.control)
        self.finish = threading.Event()
        started = progress.schedule and (progress.epoch, *progress.schedule)
        schedules = Schedules(
            plan, self.folder / "schedule" if leads and not dry_run else None, fresh=checkpoint is None, started=started
        )
        self.ring = Ring(self.control, plan.slots, device=plan.device)
        if (held_out := HeldOut.of(plan)) is not None:
            _say(self.ranks, str(held_out))
        writer, logger = None, None
        if leads and not dry_run:
            save_config(config, self.folder / "config.yaml")
            served = ServedTarget(max_position_embeddings=plan.facts.max_position_embeddings, name=config.target.path)
            writer = CheckpointWriter(
                self.folder,
                config.checkpoint.keep,
                partial(self._write_servable, target=served),
            )
            print(truncate_to_step(self.folder, -1 if checkpoint is None else progress.step), flush=True)
            logger = MetricsLogger(
                self.folder,
                config.log,
                total_jobs=plan.total_jobs,
                bucket_lengths=[bucket.length for bucket in plan.buckets],
                step=progress.step,
                jobs_trained=progress.jobs,
                config=settings,
            )
        self.dispatcher = Dispatcher(
            self.control,
            schedules.jobs(progress.epoch, progress.mask(schedules, plan.jobs_per_epoch), share),
            lambda schedule, job: pad_job(plan.rows, schedule, job, plan.job_shape),
            num_workers=config.schedule.padding_workers,
            window=plan.window,
        )
        self.phase = CapturePhase()
        if config.graph_mode == "debug" and observer is None:
            observer = TrainingObserver(steps=config.graphs.debug_steps, every=config.graphs.debug_every)
        self.targets = make_feature_workers(
            plan,
            self.table,
            self.ring,
            self.dispatcher,
            self.control,
            phase=self.phase,
            observer=observer,
            dry_run=dry_run,
        )
        self.trainer = Trainer(
            plan,
            self.table,
            self.ring,
            schedules,
            self.targets,
            settings=settings,
            progress=progress,
            checkpoint=checkpoint,
            writer=writer,
            logger=logger,
            dispatcher_state=lambda: (self.dispatcher.wait_seconds(), self.dispatcher.depths()),
            control=self.control,
            finish=self.finish,
            phase=self.phase,
            ranks=self.ranks,
            share=share,
            observer=observer,
            dry_steps=dry_steps,
            held_out=held_out,
        )

    def _write_servable(self, folder: Path, tensors: Mapping[str, Tensor], *, target: ServedTarget) -> list[Path]:
        """What servers load of a checkpoint: `hf`, or the layout that has a place for a reduced head."""
        plan = self.plan
        if plan.head_ids is None:
            return write_servable(folder, plan.spec, tensors, target)
        head = reduced_head(plan.spec, torch.from_numpy(plan.head_ids), self.trainer.step.head_weight)
        return write_servable(folder, plan.spec, tensors, target, layout="speculators", head=head)

    def run(self, wrap: Callable[[Worker], Worker] = lambda worker: worker) -> TrainResult:
        """Start every worker and wait for their end.

        Args:
            wrap: puts something around a worker's life, in its thread.

        Raises:
            Exception: the first error of any worker.
        """
        started = time.monotonic()
        all_workers: list[Worker] = [*self.targets, self.trainer]
        workers = [wrap(worker) for worker in all_workers]
        start_up = StartUp(self.control, len(workers), self.phase)
        try:
            with self._signals():
                threads = [
                    start_thread(self.control, worker.name, partial(start_up.live, index, worker))
                    for index, worker in enumerate(workers)
                ]
                self._wait(threads)
        finally:
            try:
                self.trainer.finish_files()
            except RuntimeError as error:  # the last write failed; an earlier error of a worker stays the first
                self.control.fail("checkpoint-writer", error)
        if self.control.error is not None:
            if isinstance(self.control.error, WaitTimeoutError) and (places := self.ranks.describe()):
                self.control.error.add_note(places)
            self.ranks.tell(self.control.error, self.control.failed_worker or "")
        self.control.raise_first_error()
        progress, validation = self.trainer.progress, self.trainer.last_validation
        _say(self.ranks, f"ended at step {progress.step} after {time.monotonic() - started:.1f} s")
        return TrainResult(
            run_dir=self.folder,
            step=progress.step,
            jobs=progress.jobs,
            complete=progress.epoch >= self.plan.config.epochs,
            accept_length=None if validation is None else validation.accept_length,
        )

    def _wait(self, threads: list[threading.Thread]) -> None:
        """Until the drafter's thread (the last one) ends; then stop the others and join them."""
        drafter = threads[-1]
        try:
            while drafter.is_alive() and self.control.error is None:
                drafter.join(0.1)
                self.ranks.check()
        finally:
            self.control.stop()
            deadline = time.monotonic() + _GRACE_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if self.control.error is None:
                self.dispatcher.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM finishes the current step and saves; a second one ends the run at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.finish.is_set():
                raise KeyboardInterrupt
            self.finish.set()
            name = signal.Signals(number).name
            print(f"\n{name}: finishing the current step, then saving; once more ends at once", flush=True)

        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers; whoever calls from another one stops the run its own way
            return
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
