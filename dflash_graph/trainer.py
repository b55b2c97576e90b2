"""The drafter worker: the thread that draws slots, trains, validates, logs and saves.

It owns the drafter, its optimizer and the run's progress. One step is `jobs_per_step` jobs over all ranks: this rank's
draws, each a load into the workspace and a micro-step, then the sum over the ranks and one apply. A job counts as
trained when its step is done. All ranks make the same exchanges in the same order, whatever their jobs. Called by
`training.py`.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_graph.balance import Adviser
from dflash_graph.checkpoint import Checkpoint, CheckpointWriter
from dflash_graph.control import RunControl
from dflash_graph.counters import Counts
from dflash_graph.counts import JobCounts, merge_counts, ratio
from dflash_graph.drafter import FlatParameters
from dflash_graph.graphs import CapturePhase, Observer, WorkerContext
from dflash_graph.held_out import HeldOut
from dflash_graph.initialise import initial_parameters
from dflash_graph.memory import DeviceMemory, measure
from dflash_graph.metrics import MetricsLogger, RankRecord, merge_records
from dflash_graph.padding import PaddedJob, pad_job
from dflash_graph.plan import RunPlan
from dflash_graph.progress import Progress
from dflash_graph.rank_checks import check_same_parameters, check_same_schedule
from dflash_graph.rank_share import RankShare
from dflash_graph.ranks import Ranks
from dflash_graph.schedule import EpochSchedule
from dflash_graph.static_buffers import BufferTable, Pool, Ring
from dflash_graph.step import DrafterStep, learning_rate
from dflash_graph.workers import Schedules, TargetWorker, make_context, set_cpu_threads


class Trainer:
    """Everything that happens in the drafter's thread.

    Args:
        settings: nested plain settings and derived facts, kept in each checkpoint.
        checkpoint: what to resume from, or None for a fresh start.
        writer, logger: None in a dry run, which keeps nothing, and in all ranks but the first.
        other_waits: seconds per (worker, cause) and depths known to the dispatcher.
        phase: of captures. observer: of graph mode "debug".
        dry_steps: run so many steps and keep nothing.
        ranks, share: the other processes of the run, and what this one takes of each step.
        finish: set when the user asks this process to stop: all ranks finish the current step, save, and end.
    """

    def __init__(
        self,
        plan: RunPlan,
        table: BufferTable,
        ring: Ring,
        schedules: Schedules,
        targets: list[TargetWorker],
        *,
        settings: dict[str, Any],
        progress: Progress,
        checkpoint: Checkpoint | None,
        writer: CheckpointWriter | None,
        logger: MetricsLogger | None,
        dispatcher_state: Callable[[], tuple[dict[tuple[str, str], float], dict[str, int]]],
        control: RunControl,
        finish: threading.Event,
        phase: CapturePhase,
        ranks: Ranks,
        share: RankShare,
        observer: Observer | None = None,
        dry_steps: int | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self.name = "drafter"
        self.plan, self.table, self.ring, self.schedules, self.targets = plan, table, ring, schedules, targets
        self.settings, self.progress, self.writer, self.logger = settings, progress, writer, logger
        self.control = control
        self.pool = Pool(ring, plan.config.schedule.draw, plan.config.seed)
        self.last_validation: Counts | None = None
        self.context: WorkerContext | None = None
        self._phase, self._observer, self._dry_steps = phase, observer, dry_steps
        self._checkpoint, self._dispatcher_state, self._finish = checkpoint, dispatcher_state, finish
        self._validation_jobs: list[PaddedJob] = []
        self._validated_step = self._saved_step = -1 if checkpoint is None else progress.step
        self._logged_step = progress.step
        self._best = ranks.broadcast(0.0 if writer is None else writer.best_accept_length())
        self._ranks, self._share = ranks, share
        self._held_out = held_out if dry_steps is None else None
        self._ending = False  # what all ranks agree on; `finish` is this one's wish
        self._tally = JobCounts(num_buckets=len(plan.buckets))
        self._own_waits: dict[tuple[str, str], float] = {}
        self._adviser = Adviser()

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make the drafter and its optimizer, restore or initialise them, and capture their steps.

        Needs the first target loaded.
        """
        plan, config = self.plan, self.plan.config
        set_cpu_threads(config.devices.drafter_threads, plan.workers_here)
        context = self.context = make_context(self.name, plan.device, plan, self._phase, self._observer)
        context.__enter__()
        target = self.targets[0].target
        assert target is not None, "targets are set up before the drafter"
        parameters = FlatParameters(plan.spec.parameter_shapes(), device=plan.device, compute_dtype=plan.compute_dtype)
        head = target.head_weight
        if plan.head_ids is not None:
            head = head.index_select(0, torch.from_numpy(plan.head_ids).to(head.device))
        self.step = DrafterStep(
            plan.spec,
            parameters,
            config.optim,
            sizes=plan.sizes,
            table=self.table,
            embed_weight=target.embed_weight.to(plan.device, plan.compute_dtype),
            head_weight=head.to(plan.device, plan.compute_dtype),
            anchor_groups=plan.anchor_groups,
            loss=config.loss,
            kernels=config.devices.implementation,
        )
        if not self._ranks.leads:
            pass  # the first rank's state is copied below
        elif self._checkpoint is None:
            parameters.load(
                initial_parameters(plan.spec, config.drafter.init, seed=config.seed, target_layers=target.kept_layers)
            )
        else:
            masters = {name: self._checkpoint.drafter[name] for name in plan.spec.parameter_shapes()}
            self.step.load_state(masters, self._checkpoint.optimizer)
            self._checkpoint = None
        self._ranks.broadcast_tensors(self.step.shared_state())
        parameters.refresh_compute()
        if self.writer is not None:
            self.writer.reserve(*self._checkpoint_tensors())
        if plan.validation_rows is not None and (epoch := plan.validation_epoch) is not None:
            self._validation_jobs = [
                pad_job(plan.validation_rows, epoch, job, plan.validation_shape)
                for job in range(self._ranks.rank, epoch.num_jobs, self._ranks.world)
            ]
        self._addresses = self.step.addresses()
        self.step.make_graphs(context, validation=plan.validation_rows is not None)
        context.prepare()
        if self._held_out is not None:
            self._held_out.load(target)
        if plan.device.type == "cuda":
            print("memory", *self.memory(), sep="\n", flush=True)

    def memory(self) -> list[DeviceMemory]:
        """Bytes of each device, planned and measured; once every worker is set up."""
        contexts = [*(target.context for target in self.targets), self.context]
        models = [target.target.decoder for target in self.targets if target.target is not None]
        drafter, optimizer = self.step.state_tensors()
        state = [*drafter.values(), *optimizer.values(), *self.step.parameters.grads.values()]
        return measure(
            self.table,
            {
                "weights": [tensor for model in models for tensor in (*model.parameters(), *model.buffers())],
                "head and embedding": [self.step.head_weight, self.step.drafter.embed_weight],
                "drafter state": [*state, *self.step.parameters.compute.values()],
            },
            [(context.device, context.memory()) for context in contexts if context is not None],
        )

    def check_addresses(self) -> None:
        """Raise if anything a step touches was moved or rebound since set-up."""
        self.table.check_addresses()
        now = self.step.addresses()
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            raise RuntimeError(f"tensors of the step must keep their addresses; moved: {', '.join(moved)}")
        assert self.context is not None
        for graph in self.context.graphs:
            graph.check_addresses()

    # ---- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train from `progress` to the last epoch's end, or until asked to finish; save what was reached.

        In a dry run: the first steps of the first epoch, by the same code.
        """
        if self._dry_steps is not None:
            self._run_dry(self._dry_steps)
            return
        self._check_ranks()
        if self.progress.step == 0:
            self._validate()
            self._save()  # before any training: a disk or a folder that cannot hold a checkpoint shows now
        self._vote()
        while self.progress.epoch < self.plan.config.epochs and not self._ending:
            self._run_epoch(self.schedules[self.progress.epoch])
        self._log()
        self._save()
        self._check_ranks()
        self.check_addresses()
        if self.logger is not None:
            report = self.logger.report()
            print(report, flush=True)
            if report.steps and report.skipped_steps == report.steps:
                raise RuntimeError(
                    f"all {report.steps} steps of this run were skipped: their gradient was not finite, or no row had "
                    "a weight. Lower optim.lr, or check the data, drafter.draft_vocab_size and the hidden states"
                )

    def _run_dry(self, num_steps: int) -> None:
        schedule = self.schedules[0]
        self.pool.start_epoch(schedule, 0, self._share.jobs(schedule))
        left = schedule.num_jobs
        for _ in range(num_steps):
            window = min(self.plan.config.schedule.jobs_per_step, left)
            if not window or self._ending:
                break
            self.pool.mark_trained(self._step(window))
            left -= window
            self.progress.jobs += window
            counts = merge_counts(self._ranks.all_gather(self.step.read_counts()))
            self._check_counts(counts)
            loss = ratio(counts.loss_sum, counts.weight_sum)
            self._say(f"one step: loss {'-' if loss is None else f'{loss:.4f}'}, gradient norm {counts.grad_norm:.4f}")
        self.check_addresses()

    def close(self) -> None:
        """Destroy the graphs; in the drafter's thread, like all but `finish_files`."""
        if self.context is not None:
            self.context.close()

    def finish_files(self) -> None:
        """Finish the checkpoint in flight and close the metrics, when no worker runs any more."""
        try:
            if self.writer is not None:
                self.writer.close()
        finally:
            if self.logger is not None:
                self.logger.close()

    def _run_epoch(self, schedule: EpochSchedule) -> None:
        plan, progress = self.plan, self.progress
        check_same_schedule(self._ranks, schedule)
        trained = progress.mask(self.schedules, schedule.num_jobs)
        self.pool.start_epoch(schedule, progress.trained, self._share.jobs(schedule, trained))
        if self.logger is not None:
            self.logger.log_schedule(
                progress.step,
                epoch=schedule.epoch,
                jobs_per_bucket=np.bincount(schedule.job_bucket, minlength=len(plan.buckets)).tolist(),
                padding_share=schedule.padding_share(plan.rows.lengths),
            )
        left = int((~trained).sum())
        while left and not self._ending:
            window = min(plan.config.schedule.jobs_per_step, left)
            self.pool.mark_trained(self._step(window))
            left -= window
            progress.step += 1
            progress.jobs += window
            # A checkpoint of the epoch's last step starts the next epoch.
            progress.epoch = schedule.epoch + (not left)
            so_far = schedule.num_jobs - left if schedule.draw == "seeded" else self.pool.trained
            progress.trained = so_far if left else 0
            progress.schedule = (schedule.fingerprint, schedule.min_ready) if left else None
            self._after_step(at_end=not left)

    def _check_ranks(self) -> None:
        drafter, optimizer = self.step.state_tensors()
        check_same_parameters(self._ranks, drafter | optimizer, step=self.progress.step)

    def _after_step(self, at_end: bool) -> None:
        step, config = self.progress.step, self.plan.config
        every = config.log.validate_every
        if step % config.devices.check_every == 0:
            self._check_ranks()
        if step % config.log.every == 0 or at_end:
            self._log()
        if (at_end if every is None else step % every == 0) or self.progress.epoch == config.epochs:
            self._validate()
        if self._held_out is not None and (step % self._held_out.every == 0 or self.progress.epoch == config.epochs):
            self._evaluate(self._held_out)
        if step % config.checkpoint.every == 0:
            self._save()
        if self.writer is not None:
            self.writer.check()

    def _step(self, window: int) -> list[int]:
        """One optimizer step over the next `window` jobs of all ranks; this rank's job indices in the order drawn."""
        drawn = []
        quota = self._share.quota(window)
        for i in range(quota):
            self._ranks.at(f"step {self.progress.step + 1}, micro-step {i + 1} of {quota}")
            lease = self.pool.next("drafter")
            size = self.step.load_slot(lease.slot, lease.job)
            self.ring.release(lease)
            self.step.micro_step(size)
            self.control.beat()
            drawn.append(lease.job)
        self._reduce_and_apply(window)
        self._tally.add_step(drawn)
        if self.logger is not None:
            self.logger.advance(window)
        return [job.index for job in drawn]

    def _reduce_and_apply(self, window: int) -> None:
        """The end of a step: the sum over all ranks, one update, and whether this was the last step."""
        self._ranks.at(f"step {self.progress.step + 1}, adding up gradients")
        vote, started = self._ranks.start_vote(self._finish.is_set), time.monotonic()
        self._ranks.all_reduce(self.step.parameters.sums)
        waited = time.monotonic() - started
        self._lr = learning_rate(self.plan.config.optim, self.progress.jobs + window, self.plan.total_jobs)
        self.step.apply(self._lr)
        started = time.monotonic()
        self._ending = vote() or self._ending
        if self._ranks.world > 1:
            self._add_wait("ranks", waited + time.monotonic() - started)
        self.control.beat()

    def _vote(self) -> bool:
        """Whether all ranks end now, since one of them was asked to."""
        self._ending = self._ranks.start_vote(self._finish.is_set)() or self._ending
        return self._ending

    def _add_wait(self, cause: str, seconds: float) -> None:
        key = self.name, cause
        self._own_waits[key] = self._own_waits.get(key, 0.0) + seconds

    def _say(self, text: str) -> None:
        if self._ranks.leads:
            print(text, flush=True)

    # ---- now and then -----------------------------------------------------------------------------------------------

    def _log(self) -> None:
        """Sum what all ranks counted since the last time, exactly, and write it down."""
        if self._dry_steps is not None or self._logged_step == self.progress.step:
            return
        waits, depths = self._dispatcher_state()
        own = RankRecord(
            jobs=self._tally,
            counts=self.step.read_counts(),
            waits=self.ring.wait_seconds() | waits | self._own_waits,
            depths=self.ring.depths() | depths,
            ready_by_bucket=self.ring.ready_by_bucket(),
        )
        records = self._ranks.gather(own)
        if self.logger is not None:
            merged = merge_records(records)
            self.logger.add_jobs(merged.jobs)
            self.logger.add_counts(merged.counts)
            self.logger.log(
                self.progress.step,
                epoch=self.progress.epoch,
                jobs_trained=self.progress.jobs,
                lr=self._lr,
                waits=merged.waits,
                depths=merged.depths,
                ready_by_bucket=merged.ready_by_bucket,
                world=self._ranks.world,
            )
        busy_s = sum(target.busy_s for target in self.targets)
        if advice := self._adviser.advice(own, num_targets=len(self.targets), target_busy_s=busy_s):
            print(advice, flush=True)
        self._tally = JobCounts(num_buckets=len(self.plan.buckets))
        self._logged_step = self.progress.step
        self._check_counts(own.counts)

    def _check_counts(self, counts: Counts) -> None:
        limit = self.plan.config.optim.max_skipped_steps
        if counts.skipped_in_a_row >= limit:
            raise RuntimeError(
                f"the last {counts.skipped_in_a_row} steps were skipped (limit optim.max_skipped_steps = {limit}): "
                f"their gradient was not finite, or no row had a weight (weight sum {counts.weight_sum:g}). Lower "
                "optim.lr, or check the data and the target's hidden states"
            )

    @torch.no_grad()
    def _validate(self) -> None:
        """Teacher-forced pass over the held-out rows, with the first target between two of its own jobs."""
        plan = self.plan
        if plan.validation_epoch is None or self._dry_steps is not None or self._validated_step == self.progress.step:
            return
        self._log()  # the counters are shared: what training has counted is read first
        started = time.monotonic()
        target = self.targets[0]
        for i in range(0, plan.validation_epoch.num_jobs, self._ranks.world):  # a round: one job of each rank
            self._ranks.at(f"step {self.progress.step}, validation")
            if self._vote() or self.control.stopping:
                self.step.read_counts()  # half a pass says nothing; the run is asked to end
                return
            self.control.beat()
            if (number := i // self._ranks.world) < len(self._validation_jobs):
                job = self._validation_jobs[number]
                with target.borrowed():
                    size = self.step.load(target.extract(job), job)
                self.step.micro_step(size, train=False)
        counts = merge_counts(self._ranks.all_gather(self.step.read_counts()))
        seconds = time.monotonic() - started
        self._add_wait("validation", seconds)
        if self.logger is not None:
            self.logger.log_validation(self.progress.step, counts, seconds=seconds)
        loss = ratio(counts.loss_sum, counts.weight_sum)
        self._say(
            f"validation at step {self.progress.step}: loss {'-' if loss is None else f'{loss:.4f}'}, teacher-forced "
            f"accept_length {counts.accept_length:.3f} ({seconds:.1f} s)"
        )
        self.last_validation, self._validated_step = counts, self.progress.step
        if counts.accept_length > self._best:
            self._best = counts.accept_length
            self._save()  # the best checkpoint is one that exists

    def _evaluate(self, held_out: HeldOut) -> None:
        """Speculative decoding of the held-out prompts with the drafter as it is."""
        self._log()  # what follows is no time of training
        self._ranks.at(f"step {self.progress.step}, evaluation")
        result = held_out.evaluate(self.step.parameters, self._ranks, self.control, self._vote)
        if result is None:  # half a pass says nothing; the run is asked to end
            return
        self._add_wait("evaluation", result.seconds)
        if self.logger is not None:
            self.logger.log_eval(self.progress.step, result.to_record())
        self._say(f"evaluation at step {self.progress.step}: {result}")

    def _checkpoint_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        drafter, optimizer = self.step.state_tensors()
        if self.plan.head_ids is not None:
            drafter["draft_vocab_ids"] = torch.from_numpy(self.plan.head_ids)
        return drafter, optimizer

    def _save(self) -> None:
        if self._dry_steps is not None or self._saved_step == self.progress.step:
            return
        self._log()
        self._saved_step = self.progress.step
        if isinstance(self.progress.trained, np.ndarray):  # each rank knows its own jobs
            self.progress.trained = np.logical_or.reduce(self._ranks.all_gather(self.progress.trained))
        if self.writer is None:
            return
        drafter, optimizer = self._checkpoint_tensors()
        fresh = self.last_validation is not None and self._validated_step == self.progress.step
        stall = self.writer.save(
            self.progress.step,
            drafter,
            optimizer,
            {"progress": self.progress.to_dict(), "settings": self.settings, "drafter": self.plan.spec.to_dict()},
            accept_length=self.last_validation.accept_length if fresh and self.last_validation else None,
        )
        self._add_wait("checkpoint", stall)
        self._say(f"checkpoint at step {self.progress.step}: held training for {stall * 1000:.0f} ms")
