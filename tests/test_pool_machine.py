"""The pool over a ring as a state machine: targets and drafter act in any order, over epochs and resumes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_graph.control import RunControl, WaitTimeoutError
from dflash_graph.static_buffers import Lease, Pool, Ring
from tests.ring_simulation import ListSource, Schedule

SLOTS = 6


class PoolMachine(RuleBasedStateMachine):
    """A model that knows which jobs are ready, drawn and trained; whatever the order, each is trained exactly once."""

    @initialize(
        draw=st.sampled_from(["seeded", "ready", "round_robin"]),
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
        min_ready=st.integers(1, SLOTS - 2),
        seed=st.integers(0, 1000),
    )
    def start(self, draw: str, sizes: list[int], min_ready: int, seed: int) -> None:
        self.draw, self.seed = draw, seed
        self.schedules = [Schedule(epoch, n, min(min_ready, n), seed) for epoch, n in enumerate(sizes)]
        self.epoch = 0
        self.open_run(0 if draw == "seeded" else np.zeros(sizes[0], dtype=bool))

    def open_run(self, trained: int | np.ndarray) -> None:
        """A new ring and pool in epoch `self.epoch`, over the jobs that are left."""
        plan = self.plan
        if isinstance(trained, np.ndarray):
            done = np.flatnonzero(trained).tolist()
        else:
            done = plan.draw_order[:trained].tolist()
        self.drawn: list[int] = list(done)  # of this epoch, in order; the first len(self.trained) are trained
        self.trained: list[int] = list(done)
        self.filling: list[Lease] = []
        self.ready: list[Lease] = []
        self.draining: list[Lease] = []
        left = [job for job in plan.jobs() if job.index not in done]
        self.source = ListSource(left + [job for later in self.schedules[self.epoch + 1 :] for job in later.jobs()])
        self.ring = Ring(RunControl(wait_timeout_s=0.002), SLOTS)
        self.pool = Pool(self.ring, self.draw, self.seed)  # type: ignore[arg-type]
        self.last_bucket = -1
        self.pool.start_epoch(plan, trained)  # type: ignore[arg-type]

    @property
    def plan(self) -> Schedule:
        return self.schedules[self.epoch]

    @property
    def left(self) -> list[int]:
        return [job for job in range(self.plan.num_jobs) if job not in self.drawn]

    def candidates(self) -> list[int]:
        """Jobs that the next draw may give; none if it must wait."""
        here = sorted(lease.job.index for lease in self.ready if lease.job.epoch == self.epoch)
        if self.draw == "seeded":
            return [job for job in here if job == self.plan.draw_order[len(self.drawn)]]
        if len(here) < min(self.plan.min_ready, len(self.left)):
            return []
        if self.draw == "ready":
            return here
        buckets = sorted({int(self.plan.job_bucket[job]) for job in here})
        following = [bucket for bucket in buckets if bucket > self.last_bucket] or buckets
        return [next(job for job in here if self.plan.job_bucket[job] == following[0])]

    @rule()
    def take(self) -> None:
        if len(self.filling) + len(self.ready) + len(self.draining) < SLOTS:
            lease = self.ring.take(self.source, "target")  # type: ignore[arg-type]
            if lease is not None:
                self.filling.append(lease)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        lease = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.ring.wait_drained(lease)
        self.ring.filled(lease)
        self.ready.append(lease)

    @rule()
    def next(self) -> None:
        if not self.left:
            with pytest.raises(RuntimeError, match=f"all jobs of epoch {self.epoch} are drawn"):
                self.pool.next("drafter")
        elif not (candidates := self.candidates()):
            # Never "cannot come any more": every job is in a slot or in the source.
            with pytest.raises(WaitTimeoutError, match="drafter waited"):
                self.pool.next("drafter")
        else:
            lease = self.pool.next("drafter")
            assert lease.job.epoch == self.epoch
            assert lease.job.index in candidates
            self.ready.remove(lease)
            self.draining.append(lease)
            self.drawn.append(lease.job.index)
            self.last_bucket = lease.job.bucket

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.ring.release(self.draining.pop(data.draw(st.integers(0, len(self.draining) - 1))))

    @rule(count=st.integers(0, 3))
    def mark_trained(self, count: int) -> None:
        jobs = self.drawn[len(self.trained) :][:count]
        self.pool.mark_trained(jobs)
        self.trained += jobs

    @rule(data=st.data())
    def mark_wrongly(self, data: st.DataObject) -> None:
        job = data.draw(st.integers(0, self.plan.num_jobs - 1))
        untrained = self.drawn[len(self.trained) :]
        if job not in untrained:
            with pytest.raises(RuntimeError, match=f"job {job} is (not drawn|trained already)"):
                self.pool.mark_trained([job])
        elif self.draw == "seeded" and job != untrained[0]:
            with pytest.raises(RuntimeError, match=f"next is {untrained[0]}; found {job}"):
                self.pool.mark_trained([job])

    @precondition(lambda self: self.epoch + 1 < len(self.schedules))
    @rule()
    def start_next_epoch(self) -> None:
        following = self.schedules[self.epoch + 1]
        if len(self.trained) < self.plan.num_jobs:
            with pytest.raises(RuntimeError, match=f"trained {len(self.trained)} of {self.plan.num_jobs} jobs"):
                self.pool.start_epoch(following)  # type: ignore[arg-type]
            return
        self.pool.start_epoch(following)  # type: ignore[arg-type]
        self.epoch += 1
        self.drawn, self.trained, self.last_bucket = [], [], -1

    @rule()
    def resume(self) -> None:
        """The run dies; another goes on from what was trained. What was drawn only is drawn again."""
        self.open_run(self.pool.trained)

    @invariant()
    def pool_is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.jobs_left == len(self.left)
        trained = self.pool.trained
        if self.draw == "seeded":
            assert trained == len(self.trained)
            assert self.drawn == self.plan.draw_order[: len(self.drawn)].tolist()
        else:
            assert isinstance(trained, np.ndarray)
            assert sorted(np.flatnonzero(trained)) == sorted(self.trained)
        assert len(set(self.drawn)) == len(self.drawn)
        held = len(self.filling) + len(self.ready) + len(self.draining)
        assert self.ring.depths() == {
            "FREE": SLOTS - held,
            "FILLING": len(self.filling),
            "READY": len(self.ready),
            "DRAINING": len(self.draining),
        }

    def teardown(self) -> None:
        """Wherever the machine stopped, a target and a drafter that go on finish every epoch."""
        while hasattr(self, "pool"):
            for lease in self.draining:
                self.ring.release(lease)
            self.draining.clear()
            self.take()
            for lease in self.filling:
                self.ring.wait_drained(lease)
                self.ring.filled(lease)
            self.ready += self.filling
            self.filling.clear()
            if self.left and (self.candidates() or len(self.ready) == SLOTS):
                assert self.candidates(), "a full ring holds nothing that may be drawn"
                self.next()
            self.mark_trained(len(self.drawn))
            if not self.left:
                assert sorted(self.trained) == list(range(self.plan.num_jobs))
                if self.epoch + 1 == len(self.schedules):
                    return
                self.start_next_epoch()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
