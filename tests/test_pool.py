"""The pool: what each draw waits for and takes, and what is trained, over epochs and resumes."""

import numpy as np
import pytest

from dflash_graph.control import RunControl, WaitTimeoutError
from dflash_graph.static_buffers import Lease, Pool, Ring
from tests.ring_simulation import Job, ListSource, Schedule


class Bench:
    """A ring filled by hand, one thread, waits of at most 50 ms."""

    def __init__(self, slots: int, draw: str, jobs: list[Job], seed: int = 0) -> None:
        self.ring = Ring(RunControl(wait_timeout_s=0.05), slots)
        self.pool = Pool(self.ring, draw, seed)
        self.source = ListSource(jobs)

    def take(self) -> Lease:
        lease = self.ring.take(self.source, "target")
        assert lease is not None
        return lease

    def fill(self, *leases: Lease) -> None:
        for lease in leases:
            self.ring.wait_drained(lease)
            self.ring.filled(lease)

    def add(self, count: int) -> None:
        """Take and fill the next jobs."""
        for _ in range(count):
            self.fill(self.take())

    def next(self) -> int:
        lease = self.pool.next("drafter")
        self.ring.release(lease)
        return lease.job.index

    def waits(self) -> None:
        with pytest.raises(WaitTimeoutError, match="drafter waited"):
            self.pool.next("drafter")


def schedule(order: list[int], min_ready: int, epoch: int = 0, buckets: list[int] | None = None) -> Schedule:
    made = Schedule(epoch, len(order), min_ready)
    made.draw_order = np.array(order, dtype=np.int32)
    made.job_bucket = np.array(buckets or [0] * len(order), dtype=np.int32)
    return made


# ---- seeded ----------------------------------------------------------------------------------------------------------


def test_seeded_waits_for_exactly_the_next_job_and_for_nothing_else() -> None:
    plan = schedule([1, 0, 2, 3], min_ready=3)
    bench = Bench(5, "seeded", plan.jobs())
    bench.pool.start_epoch(plan)
    zero, one = bench.take(), bench.take()
    bench.fill(zero)
    bench.waits()  # job 0 is READY, job 1 is wanted
    bench.fill(one)
    assert bench.next() == 1  # two READY, fewer than min_ready
    assert bench.next() == 0
    bench.waits()


def test_seeded_trained_is_a_count_that_resumes() -> None:
    plan = schedule([1, 0, 3, 2, 4], min_ready=2)
    bench = Bench(5, "seeded", plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(5)
    drawn = [bench.next() for _ in range(4)]
    assert drawn == [1, 0, 3, 2]
    assert bench.pool.trained == 0  # drawn, but no step is done
    bench.pool.mark_trained(drawn[:2])
    assert bench.pool.trained == 2
    assert bench.pool.jobs_left == 1

    resumed = Bench(5, "seeded", plan.jobs(skip=2))
    resumed.pool.start_epoch(plan, bench.pool.trained)
    resumed.add(3)
    assert [resumed.next() for _ in range(3)] == [3, 2, 4]


def test_seeded_jobs_are_marked_in_draw_order() -> None:
    plan = schedule([1, 0, 2], min_ready=2)
    bench = Bench(4, "seeded", plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(2)
    bench.next()
    with pytest.raises(RuntimeError, match="job 0 is not drawn"):
        bench.pool.mark_trained([0])
    bench.next()
    with pytest.raises(RuntimeError, match="marked in draw order: next is 1; found 0"):
        bench.pool.mark_trained([0, 1])
    bench.pool.mark_trained([1])
    with pytest.raises(RuntimeError, match="job 1 is trained already"):
        bench.pool.mark_trained([1])


def test_a_seeded_job_that_cannot_come_is_an_error_at_once() -> None:
    plan = schedule([0, 1], min_ready=2)
    bench = Bench(4, "seeded", [Job(0, 1, 0)])  # job 0 was left out
    bench.pool.start_epoch(plan)
    bench.add(1)
    assert bench.ring.take(bench.source, "target") is None
    with pytest.raises(RuntimeError, match=r"epoch 0 job 0 to be READY, which cannot come any more.*no jobs left"):
        bench.pool.next("drafter")


def test_a_job_passed_over_for_the_next_epoch_is_an_error_at_once() -> None:
    bench = Bench(4, "seeded", [Job(0, 1, 0), Job(1, 0, 0)])
    bench.pool.start_epoch(schedule([0, 1], min_ready=2))
    bench.add(2)
    with pytest.raises(RuntimeError, match="cannot come any more"):
        bench.pool.next("drafter")


# ---- ready and round_robin -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["ready", "round_robin"])
def test_unordered_draws_wait_for_min_ready_until_the_epoch_drains(draw: str) -> None:
    plan = schedule(list(range(6)), min_ready=3)
    bench = Bench(6, draw, plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(2)
    bench.waits()
    bench.add(1)
    drawn = [bench.next()]  # 6 left, 3 READY
    bench.waits()
    bench.add(3)  # 5 READY = 5 left
    drawn += [bench.next() for _ in range(5)]  # the last ones with 2 and 1 READY
    assert sorted(drawn) == list(range(6))


def test_the_drain_waits_for_all_jobs_left() -> None:
    plan = schedule(list(range(4)), min_ready=3)
    bench = Bench(6, "ready", plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(3)
    bench.next()
    last = bench.take()
    bench.waits()  # 3 left, 2 READY
    bench.fill(last)
    assert len({bench.next() for _ in range(3)}) == 3


@pytest.mark.parametrize("draw", ["seeded", "ready", "round_robin"])
def test_an_epoch_drains_with_the_next_epochs_jobs_in_the_ring(draw: str) -> None:
    first, second = schedule([0, 1, 2], min_ready=2), schedule([1, 0], min_ready=2, epoch=1)
    bench = Bench(6, draw, first.jobs() + second.jobs())
    bench.pool.start_epoch(first)
    zero, one, two = bench.take(), bench.take(), bench.take()
    bench.add(2)  # the next epoch's jobs are READY before this one's
    bench.fill(zero)
    if draw != "seeded":
        bench.waits()  # 1 READY of this epoch, 3 of all
    bench.fill(one, two)
    assert bench.ring.ready_by_bucket(0) == {0: 3}
    assert bench.ring.ready_by_bucket() == {0: 5}
    drawn = [bench.next() for _ in range(3)]
    assert sorted(drawn) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="all jobs of epoch 0 are drawn"):
        bench.pool.next("drafter")
    with pytest.raises(RuntimeError, match="epoch 0 must be trained before the next starts; trained 0 of 3"):
        bench.pool.start_epoch(second)
    bench.pool.mark_trained(drawn)
    bench.pool.start_epoch(second)
    drawn = [bench.next(), bench.next()]
    assert sorted(drawn) == [0, 1]
    assert draw != "seeded" or drawn == [1, 0]


def test_ready_is_uniform_over_the_ready_slots_and_follows_its_seed() -> None:
    def first_draws(seed: int, count: int) -> list[int]:
        result = []
        for epoch in range(count):
            plan = schedule(list(range(4)), min_ready=4, epoch=epoch)
            bench = Bench(6, "ready", plan.jobs(), seed)
            bench.pool.start_epoch(plan)
            bench.add(4)
            result.append(bench.next())
        return result

    assert first_draws(1, 20) == first_draws(1, 20)
    assert first_draws(1, 20) != first_draws(2, 20)
    counts = np.bincount(first_draws(0, 400), minlength=4)
    assert (abs(counts - 100) < 45).all()  # 5 standard deviations of a fair draw


def test_ready_order_does_not_depend_on_the_slots_order() -> None:
    def draws(fill_reversed: bool) -> list[int]:
        plan = schedule(list(range(5)), min_ready=5)
        bench = Bench(7, "ready", plan.jobs())
        bench.pool.start_epoch(plan)
        leases = [bench.take() for _ in range(5)]
        bench.fill(*(reversed(leases) if fill_reversed else leases))
        return [bench.next() for _ in range(5)]

    assert draws(True) == draws(False)


def test_round_robin_goes_from_bucket_to_bucket_over_what_is_ready() -> None:
    buckets = [0, 0, 0, 0, 1, 3, 1]
    plan = schedule(list(range(7)), min_ready=1, buckets=buckets)
    bench = Bench(8, "round_robin", plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(7)
    assert bench.ring.ready_by_bucket() == {0: 4, 1: 2, 3: 1}
    drawn = [bench.next() for _ in range(7)]
    assert drawn == [0, 4, 5, 1, 6, 2, 3]  # buckets 0 1 3, 0 1, 0, 0


@pytest.mark.parametrize("draw", ["ready", "round_robin"])
def test_unordered_trained_is_a_set_that_resumes(draw: str) -> None:
    plan = schedule(list(range(6)), min_ready=2)
    bench = Bench(8, draw, plan.jobs())
    bench.pool.start_epoch(plan)
    bench.add(6)
    drawn = [bench.next() for _ in range(4)]
    bench.pool.mark_trained(reversed(drawn[:3]))  # in any order
    trained = bench.pool.trained
    assert trained.dtype == bool
    assert set(np.flatnonzero(trained)) == set(drawn[:3])
    trained[:] = False  # a copy
    trained = bench.pool.trained

    rest = [job for job in plan.jobs() if not trained[job.index]]
    resumed = Bench(8, draw, rest)
    resumed.pool.start_epoch(plan, trained)
    assert resumed.pool.jobs_left == 3
    resumed.add(3)
    assert sorted([resumed.next() for _ in range(3)] + drawn[:3]) == list(range(6))


def test_a_trained_job_that_comes_again_is_an_error() -> None:
    plan = schedule([0, 1], min_ready=1)
    bench = Bench(4, "ready", plan.jobs())
    bench.pool.start_epoch(plan, np.array([True, False]))
    bench.add(1)
    with pytest.raises(RuntimeError, match="job 0 was already drawn; the source must skip trained jobs"):
        bench.pool.next("drafter")


# ---- boundaries ------------------------------------------------------------------------------------------------------


def test_the_draw_must_be_known() -> None:
    with pytest.raises(ValueError, match="draw must be 'seeded', 'ready' or 'round_robin'; found 'random'"):
        Pool(Ring(RunControl(), 2), "random", 0)


def test_nothing_is_drawn_before_an_epoch_starts() -> None:
    pool = Pool(Ring(RunControl(), 2), "seeded", 0)
    for call in (lambda: pool.next("drafter"), lambda: pool.jobs_left, lambda: pool.mark_trained([])):
        with pytest.raises(RuntimeError, match="call start_epoch first"):
            call()


@pytest.mark.parametrize("draw", ["seeded", "ready"])
def test_a_schedule_whose_window_needs_more_slots_is_refused(draw: str) -> None:
    pool = Pool(Ring(RunControl(), 4), draw, 0)
    pool.start_epoch(Schedule(0, 9, min_ready=3))
    pool = Pool(Ring(RunControl(), 4), draw, 0)
    with pytest.raises(ValueError, match="more slots than the schedule's min_ready, 4, or it deadlocks; found 4"):
        pool.start_epoch(Schedule(0, 9, min_ready=4))


def test_a_resume_state_of_the_wrong_kind_is_refused() -> None:
    plan = Schedule(0, 4, min_ready=2)
    ring = Ring(RunControl(), 5)
    mask = np.zeros(4, dtype=bool)
    for draw, trained, error, message in [
        ("seeded", mask, TypeError, "resumes from the number of trained jobs; found an array"),
        ("seeded", 5, ValueError, "between 0 and 4 jobs; found 5"),
        ("seeded", -1, ValueError, "between 0 and 4 jobs; found -1"),
        ("ready", 2, TypeError, "resumes from a bool array of trained jobs; found 2"),
        ("ready", mask[:3], ValueError, r"must be bool \(4,\); found bool \(3,\)"),
        ("ready", mask.astype(int), ValueError, r"must be bool \(4,\); found int64 \(4,\)"),
    ]:
        with pytest.raises(error, match=message):
            Pool(ring, draw, 0).start_epoch(plan, trained)


def test_seeded_needs_a_draw_order() -> None:
    plan = schedule([0, 1], min_ready=1)
    plan.draw_order = np.zeros(0, dtype=np.int32)
    with pytest.raises(ValueError, match="a draw order of all 2 jobs; found 0"):
        Pool(Ring(RunControl(), 3), "seeded", 0).start_epoch(plan)
    Pool(Ring(RunControl(), 3), "ready", 0).start_epoch(plan)


def test_an_epoch_trained_wholly_has_nothing_left() -> None:
    plan = Schedule(0, 3, min_ready=2)
    for draw, trained in (("seeded", 3), ("ready", np.ones(3, dtype=bool))):
        pool = Pool(Ring(RunControl(), 4), draw, 0)
        pool.start_epoch(plan, trained)
        assert pool.jobs_left == 0
        pool.start_epoch(Schedule(1, 3, min_ready=2))
        assert pool.jobs_left == 3
