"""Stand-ins for jobs, schedules and the dispatcher, and a deterministic simulation of threads on a virtual clock.

`Simulation` is a `RunControl` under which exactly one thread runs at a time and time passes only in `sleep`, so a
deadlock is seen exactly (nothing can run), without time-outs, and a run with a 20x slower target costs no real time.
"""

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dflash_graph.control import RunControl, Stopped
from dflash_graph.ring import Ring
from dflash_graph.static_buffers import Pool


class DeadlockError(Exception):
    """Every thread waits for another."""


@dataclass(frozen=True)
class Job:
    epoch: int
    index: int
    bucket: int


@dataclass
class Schedule:
    """What the pool uses of an `EpochSchedule`. The draw order picks among the `window` oldest undrawn jobs."""

    epoch: int
    num_jobs: int
    min_ready: int
    seed: int = 0
    window: int | None = None
    num_buckets: int = 3
    jobs_per_step: int = 4
    draw_order: np.ndarray = field(init=False)
    job_bucket: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed}/{self.epoch}")
        window = self.window or self.min_ready
        undrawn, order = list(range(self.num_jobs)), []
        while undrawn:
            order.append(undrawn.pop(rng.randrange(min(window, len(undrawn)))))
        self.draw_order = np.array(order, dtype=np.int32)
        self.job_bucket = np.array([rng.randrange(self.num_buckets) for _ in range(self.num_jobs)], dtype=np.int32)

    def jobs(self, skip: int = 0) -> list[Job]:
        """Jobs still to train after the first `skip` draws, in job order."""
        done = {int(j) for j in self.draw_order[:skip]}
        return [Job(self.epoch, j, int(self.job_bucket[j])) for j in range(self.num_jobs) if j not in done]


class ListSource:
    """Jobs that are all padded already."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = list(jobs)

    def take(self, who: str) -> Job | None:
        return self.jobs.pop(0) if self.jobs else None


class PaddedSource:
    """The dispatcher in small: padding workers finish out of order inside a window, jobs leave in order."""

    def __init__(self, control: RunControl, jobs: list[Job], window: int) -> None:
        self.control, self.jobs, self.window = control, jobs, window
        self.changed = control.condition()
        self.claimed = self.emitted = 0
        self.padded: set[int] = set()

    def pad(self, who: str, pause: Callable[[], None]) -> None:
        while True:
            with self.changed:
                self.control.wait_for(self.changed, self._may_claim, who=who, what="room in the window")
                if self.claimed == len(self.jobs):
                    return
                number, self.claimed = self.claimed, self.claimed + 1
            pause()
            with self.changed:
                self.padded.add(number)
                self.changed.notify_all()

    def _may_claim(self) -> bool:
        return self.claimed == len(self.jobs) or self.claimed < self.emitted + self.window

    def take(self, who: str) -> Job | None:
        with self.changed:
            if self.emitted < len(self.jobs):
                self.control.wait_for(self.changed, lambda: self.emitted in self.padded, who=who, what="a padded job")
            if self.emitted == len(self.jobs):
                return None
            job = self.jobs[self.emitted]
            self.emitted += 1
            self.changed.notify_all()
            return job


@dataclass
class _Worker:
    name: str
    function: Callable[[], None]
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    predicate: Callable[[], bool] | None = None


class Simulation(RunControl):
    """Threads that pass one baton; `sleep` moves a virtual clock. Order among the runnable is drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = 0.0
        self.num_switches = 0
        self._rng = random.Random(seed)
        self._workers: list[_Worker] = []
        self._sleeping: list[tuple[float, float, int]] = []  # (wake time, tie breaker, worker)
        self._own = threading.local()
        self._left = 0
        self._over = threading.Event()

    def spawn(self, name: str, function: Callable[[], None]) -> None:
        self._workers.append(_Worker(name, function))

    def run(self) -> None:
        """Run all spawned functions to their end; raise the first error, `DeadlockError` included."""
        threads = []
        for number, worker in enumerate(self._workers):
            heapq.heappush(self._sleeping, (0.0, self._rng.random(), number))
            threads.append(threading.Thread(target=self._body, args=(worker,), name=worker.name, daemon=True))
            threads[-1].start()
        self._left = len(threads)
        self._pass_baton(None)
        self._over.wait()
        for thread in threads:
            thread.join()
        self.raise_first_error()

    def _body(self, worker: _Worker) -> None:
        worker.baton.acquire()
        self._own.worker = worker
        try:
            worker.function()
        except Stopped:
            pass
        except BaseException as error:
            self.fail(worker.name, error)
        self._left -= 1
        if self._left:
            self._pass_baton(None)
        else:
            self._over.set()

    def _pass_baton(self, me: _Worker | None) -> None:
        self.num_switches += 1
        chosen = self._choose()
        if chosen is me:
            return
        chosen.baton.release()
        if me is not None:
            me.baton.acquire()

    def _choose(self) -> _Worker:
        awake = [w for w in self._workers if w.predicate is not None and (self.stopping or self._holds(w.predicate))]
        if not awake and not self._sleeping:
            waiting = [w for w in self._workers if w.predicate is not None]
            self.error, self.failed_worker = DeadlockError(f"{[w.name for w in waiting]} wait for each other"), "all"
            self._stop.set()
            awake = waiting
        if awake:
            chosen = self._rng.choice(awake)
            chosen.predicate = None
            return chosen
        self.now, _, number = heapq.heappop(self._sleeping)
        return self._workers[number]

    @staticmethod
    def _holds(predicate: Callable[[], bool]) -> bool:
        try:
            return predicate()
        except RuntimeError:
            return True  # its owner meets the same error

    def sleep(self, seconds: float) -> None:
        me = self._own.worker
        heapq.heappush(self._sleeping, (self.now + seconds, self._rng.random(), self._workers.index(me)))
        self._pass_baton(me)

    def stop(self) -> None:
        self._stop.set()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        *,
        who: str,
        what: str,
        describe: Callable[[], str] = lambda: "",
    ) -> float:
        started = self.now
        while not predicate():
            if self.stopping:
                raise Stopped
            me = self._own.worker
            me.predicate = predicate
            condition.release()
            try:
                self._pass_baton(me)
            finally:
                condition.acquire()
        return self.now - started


@dataclass
class Setup:
    """One run of targets, padding workers and a drafter over real `Ring` and `Pool` objects."""

    slots: int
    min_ready: int
    targets: int
    window: int
    draw: str = "seeded"
    jobs: tuple[int, ...] = (30, 11)  # per epoch
    resume_at: int = 0  # jobs of the first epoch trained already (seeded)
    seed: int = 0
    target_s: float = 1.0
    drafter_s: float = 0.25
    padding_s: float = 0.1
    slow_factor: float = 20.0  # of target 0
    held: int = 1  # slots the drafter holds at once
    draw_window: int | None = None  # of the draw order, if not min_ready
    slot_after_forward: bool = False  # the order of locks that deadlocks


@dataclass
class Outcome:
    """What a run did: per epoch the jobs in the order drawn."""

    drawn: list[list[int]]
    ring: Ring
    pool: Pool


def schedules(setup: Setup) -> list[Schedule]:
    return [
        Schedule(e, n, min(setup.min_ready, n), setup.seed, window=setup.draw_window) for e, n in enumerate(setup.jobs)
    ]


def start(setup: Setup, control: RunControl, sleep: Callable[[float], None], spawn: Callable) -> Outcome:
    """Spawn all workers of `setup`; the outcome fills while they run."""
    epochs = schedules(setup)
    skips = [setup.resume_at, *[0] * (len(epochs) - 1)]
    source = PaddedSource(
        control, [job for s, skip in zip(epochs, skips, strict=True) for job in s.jobs(skip)], setup.window
    )
    ring = Ring(control, setup.slots)
    pool = Pool(ring, setup.draw, setup.seed)
    outcome = Outcome([[] for _ in epochs], ring, pool)
    contents: list[object] = [None] * setup.slots  # stands for the features

    def target(number: int) -> None:
        rng = random.Random(setup.seed * 100 + number)
        seconds = setup.target_s * (setup.slow_factor if number == 0 else 1.0)
        name = f"target{number}"
        while True:
            jobs = source
            if setup.slot_after_forward:
                jobs = ListSource([job for job in [source.take(name)] if job is not None])
                sleep(seconds * rng.uniform(0.5, 1.5))
                ring._last_taken = (-1, -1)  # lift the check of the job order
            lease = ring.take(jobs, name)
            if lease is None:
                return
            if not setup.slot_after_forward:
                sleep(seconds * rng.uniform(0.5, 1.5))
            ring.wait_drained(lease)
            contents[lease.slot] = lease.job
            ring.filled(lease)

    def drafter() -> None:
        rng = random.Random(setup.seed)
        held: list = []
        for schedule, skip, drawn in zip(epochs, skips, outcome.drawn, strict=True):
            pool.start_epoch(schedule, skip)
            while pool.jobs_left:
                lease = pool.next("drafter")
                held.append(lease)
                sleep(setup.drafter_s * 0.1)  # the copy into the workspace
                assert contents[lease.slot] is lease.job, "the slot was overwritten while it drained"
                if len(held) >= setup.held:
                    ring.release(held.pop(0))
                sleep(setup.drafter_s * rng.uniform(0.5, 1.5))
                drawn.append(lease.job.index)
                pool.mark_trained([lease.job.index])
        for lease in held:
            ring.release(lease)

    for number in range(setup.targets):
        spawn(f"target{number}", lambda number=number: target(number))
    for number in range(2):
        rng = random.Random(number)
        spawn(
            f"padding{number}",
            lambda rng=rng, number=number: source.pad(
                f"padding{number}", lambda: sleep(setup.padding_s * rng.uniform(0.1, 3))
            ),
        )
    spawn("drafter", drafter)
    return outcome


def simulate(setup: Setup) -> tuple[Outcome, Simulation]:
    """Run `setup` on the virtual clock. Raises the first error of any worker, or `DeadlockError`."""
    control = Simulation(setup.seed)
    outcome = start(setup, control, control.sleep, control.spawn)
    control.run()
    return outcome, control
