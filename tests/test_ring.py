"""The ring: its state machine, its hand-off events, its refusals, and that no run over it deadlocks."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_graph import ring as ring_module
from dflash_graph.control import RunControl, Stopped, WaitTimeoutError
from dflash_graph.static_buffers import Lease, Ring, SlotState, StreamEvent, check_ring, default_slots
from tests.ring_simulation import DeadlockError, Job, ListSource, Setup, schedules, simulate, start

TRANSITIONS = ("wait_drained", "filled", "draw", "release")


def any_lease(ready: list[Lease]) -> Lease | None:
    return ready[0] if ready else None


def drawn(ring: Ring, lease: Lease) -> Lease:
    return ring.draw(lease.job.epoch, lambda ready: lease, "drafter", "that lease")


def apply(ring: Ring, action: str, lease: Lease) -> None:
    if action == "draw":
        drawn(ring, lease)
    else:
        getattr(ring, action)(lease)


def jobs(count: int, epoch: int = 0) -> list[Job]:
    return [Job(epoch, index, index % 3) for index in range(count)]


# ---- state machine ---------------------------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """Right and wrong calls in any order, against a model of what each slot must be."""

    NUM_SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(RunControl(wait_timeout_s=0.002), self.NUM_SLOTS)
        self.source = ListSource(jobs(10_000))
        self.state = [SlotState.FREE] * self.NUM_SLOTS
        self.generation = [0] * self.NUM_SLOTS
        self.writable = [False] * self.NUM_SLOTS
        self.current: list[Lease | None] = [None] * self.NUM_SLOTS
        self.past: list[Lease] = []
        self.next_job = 0

    @rule()
    def take(self) -> None:
        if SlotState.FREE not in self.state:
            with pytest.raises(WaitTimeoutError, match=r"target waited .* for a FREE slot .*slot 0 "):
                self.ring.take(ListSource([Job(0, self.next_job, 0)]), "target")
            return
        lease = self.ring.take(self.source, "target")
        assert self.state[lease.slot] == SlotState.FREE
        assert lease.generation == self.generation[lease.slot] + 1
        assert lease.job.index == self.next_job
        self.next_job += 1
        self.state[lease.slot], self.current[lease.slot] = SlotState.FILLING, lease
        self.generation[lease.slot], self.writable[lease.slot] = lease.generation, False

    @rule(slot=st.integers(0, NUM_SLOTS - 1), action=st.sampled_from(TRANSITIONS))
    def act_on_current(self, slot: int, action: str) -> None:
        lease = self.current[slot]
        if lease is None:
            return
        needed = {"wait_drained": SlotState.FILLING, "filled": SlotState.FILLING, "draw": SlotState.READY}
        right = self.state[slot] == needed.get(action, SlotState.DRAINING)
        if action == "filled":
            right = right and self.writable[slot]
        if not right:
            with pytest.raises(RuntimeError, match=rf"{action}.*slot {slot} .*{self.state[slot].name}"):
                apply(self.ring, action, lease)
            return
        apply(self.ring, action, lease)
        if action == "wait_drained":
            self.writable[slot] = True
        elif action == "filled":
            self.state[slot] = SlotState.READY
        elif action == "draw":
            self.state[slot] = SlotState.DRAINING
        else:
            self.state[slot], self.current[slot] = SlotState.FREE, None
            self.past.append(lease)

    @precondition(lambda self: self.past)
    @rule(data=st.data(), action=st.sampled_from(TRANSITIONS))
    def act_on_past(self, data: st.DataObject, action: str) -> None:
        lease = data.draw(st.sampled_from(self.past))
        with pytest.raises(RuntimeError, match=f"generation {lease.generation}; found slot {lease.slot}"):
            apply(self.ring, action, lease)

    @invariant()
    def ring_is_the_model(self) -> None:
        assert self.ring.depths() == {s.name: self.state.count(s) for s in SlotState}
        text = self.ring.describe()
        for slot, (state, generation) in enumerate(zip(self.state, self.generation, strict=True)):
            assert f"slot {slot} {state.name} generation {generation} " in text
        ready = [x.job.bucket for x in self.current if x is not None and self.state[x.slot] == SlotState.READY]
        assert self.ring.ready_by_bucket() == {b: ready.count(b) for b in set(ready)}


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# What brings a fresh lease into each state; every other call on it is wrong there.
REACH = {
    SlotState.FILLING: ["wait_drained"],
    SlotState.READY: ["wait_drained", "filled"],
    SlotState.DRAINING: ["wait_drained", "filled", "draw"],
    SlotState.FREE: ["wait_drained", "filled", "draw", "release"],
}
RIGHT = {SlotState.FILLING: {"wait_drained", "filled"}, SlotState.READY: {"draw"}, SlotState.DRAINING: {"release"}}


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("action", TRANSITIONS)
def test_every_wrong_transition_raises_and_changes_nothing(state: SlotState, action: str) -> None:
    ring = Ring(RunControl(wait_timeout_s=0.05), 2)
    lease = ring.take(ListSource(jobs(1)), "target7")
    for step in REACH[state]:
        apply(ring, step, lease)
    before = ring.describe()
    if action in RIGHT.get(state, set()):
        apply(ring, action, lease)
        return
    holder = {SlotState.DRAINING: "drafter", SlotState.FREE: "nobody"}.get(state, "target7")
    with pytest.raises(RuntimeError, match=f"{action} needs slot 0 .*found slot 0 {state.name} .*holder {holder}"):
        apply(ring, action, lease)
    assert ring.describe() == before


def test_filling_without_waiting_for_the_last_reader_raises() -> None:
    ring = Ring(RunControl(), 1)
    source = ListSource(jobs(2))
    for _ in range(2):  # the second time the slot was writable before
        lease = ring.take(source, "target")
        with pytest.raises(RuntimeError, match="filled without wait_drained"):
            ring.filled(lease)
        ring.wait_drained(lease)
        ring.filled(lease)
        ring.release(drawn(ring, lease))


def test_jobs_out_of_order_or_twice_raise() -> None:
    for second in (Job(0, 5, 0), Job(0, 4, 0)):
        ring = Ring(RunControl(), 4)
        ring.take(ListSource([Job(0, 5, 0)]), "target")
        with pytest.raises(RuntimeError, match="ascending order"):
            ring.take(ListSource([second]), "target")
    assert ring.take(ListSource([Job(1, 0, 0)]), "target").job.epoch == 1  # the next epoch counts from 0


def test_the_longest_free_slot_is_taken_first() -> None:
    ring = Ring(RunControl(), 3)
    source = ListSource(jobs(9))
    leases = [ring.take(source, "target") for _ in range(3)]
    for lease in (leases[1], leases[0], leases[2]):
        ring.wait_drained(lease)
        ring.filled(lease)
        ring.release(drawn(ring, lease))
    assert [ring.take(source, "target").slot for _ in range(3)] == [1, 0, 2]


def test_exhausted_source_gives_none_to_every_target() -> None:
    ring = Ring(RunControl(), 2)
    assert [ring.take(ListSource([]), "target") for _ in range(3)] == [None] * 3
    assert ring.depths()["FREE"] == 2
    assert "no jobs left" in ring.describe()


# ---- hand-off events -------------------------------------------------------------------------------------------------


def test_events_are_recorded_before_the_state_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[int, str, str]] = []

    class Recorder:
        count = 0

        def __init__(self, device: torch.device) -> None:
            self.number, Recorder.count = Recorder.count, Recorder.count + 1

        def _log(self, action: str) -> None:
            log.append((self.number, action, ring._slots[0].state.name))

        def record(self) -> None:
            self._log("record")

        def wait(self) -> None:
            self._log("wait")

    monkeypatch.setattr(ring_module, "StreamEvent", Recorder)
    ring = Ring(RunControl(), 1)
    filled, drained = 0, 1
    lease = ring.take(ListSource(jobs(1)), "target")
    assert log == []  # the forward is not held up by the last reader
    ring.wait_drained(lease)
    ring.filled(lease)
    ring.release(drawn(ring, lease))
    assert log == [
        (drained, "wait", "FILLING"),
        (filled, "record", "FILLING"),
        (filled, "wait", "DRAINING"),
        (drained, "record", "DRAINING"),
    ]


def test_a_wrong_call_records_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(RunControl(), 1)
    source = ListSource(jobs(2))
    old = ring.take(source, "target")
    ring.wait_drained(old)
    ring.filled(old)
    ring.release(drawn(ring, old))
    ring.wait_drained(ring.take(source, "target"))
    monkeypatch.setattr(StreamEvent, "record", lambda self: pytest.fail("recorded"))
    monkeypatch.setattr(StreamEvent, "wait", lambda self: pytest.fail("waited"))
    for action in TRANSITIONS:
        with pytest.raises(RuntimeError, match="needs slot 0"):
            apply(ring, action, old)


def test_events_use_the_current_stream_of_the_slots_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_event(self, event: object) -> None:
            log.append(("wait", str(self.device), event))

    class Event:
        def record(self, stream: Stream) -> None:
            log.append(("record", str(stream.device), self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    event = StreamEvent(torch.device("cuda", 1))
    event.record()
    event.wait()
    assert [entry[:2] for entry in log] == [("record", "cuda:1"), ("wait", "cuda:1")]
    assert log[0][2] is log[1][2]
    silent = StreamEvent(torch.device("cpu"))
    silent.record()
    silent.wait()
    assert len(log) == 2


@pytest.mark.gpu
def test_hand_off_between_streams_keeps_the_contents() -> None:
    """A slow producer and a slow consumer on two streams; without the events the sums are wrong."""
    device = torch.device("cuda", 0)
    count, size = 40, 1 << 16
    control = RunControl(wait_timeout_s=30)
    ring = Ring(control, 2, device=device)
    slots, sums = torch.zeros(2, size, device=device), torch.zeros(count, device=device)
    torch.cuda.synchronize()  # sync: the buffers exist before the threads start
    source = ListSource(jobs(count))

    def produce() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            while (lease := ring.take(source, "target")) is not None:
                ring.wait_drained(lease)
                torch.cuda._sleep(2_000_000)
                slots[lease.slot].fill_(lease.job.index)
                ring.filled(lease)

    def consume() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(count):
                lease = ring.draw(0, any_lease, "drafter", "any slot")
                torch.cuda._sleep(2_000_000)
                sums[lease.job.index] = slots[lease.slot].sum()
                ring.release(lease)

    run_threads(control, {"target": produce, "drafter": consume}, limit_s=60)
    torch.cuda.synchronize()  # sync: read the result
    assert torch.equal(sums.cpu(), torch.arange(count) * float(size))


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 2, 6])
@pytest.mark.parametrize("min_ready", [1, 4, 10])
def test_ring_sizes_below_the_floor_are_refused(min_ready: int, targets: int) -> None:
    floor = min_ready + targets + 2
    check_ring(floor, min_ready, targets, targets)
    with pytest.raises(ValueError, match=f"= {floor}; found {floor - 1}, with which the run can starve"):
        check_ring(floor - 1, min_ready, targets, floor)
    with pytest.raises(ValueError, match=f"found {min_ready}, with which the run can deadlock. Raise schedule.slots"):
        check_ring(min_ready, min_ready, targets, floor)
    with pytest.raises(ValueError, match="the reorder window must be at least" if targets > 1 else "window must be"):
        check_ring(floor, min_ready, targets, targets - 1)


@pytest.mark.parametrize("name", ["slots", "min_ready", "targets", "window"])
def test_ring_sizes_must_be_positive(name: str) -> None:
    values = {"slots": 20, "min_ready": 4, "targets": 2, "window": 18} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1; found 0"):
        check_ring(**values)
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        Ring(RunControl(), 0)


def test_default_slots() -> None:
    assert default_slots(10, 1) == 20
    assert default_slots(10, 1, fits=100) == 20
    assert default_slots(10, 1, fits=15) == 15
    assert default_slots(10, 1, fits=13) == 13
    assert default_slots(16, 6) == 24
    with pytest.raises(ValueError, match="at least min_ready \\+ targets \\+ 2 = 13 slots; 12 fit"):
        default_slots(10, 1, fits=12)


# ---- whole runs, simulated -------------------------------------------------------------------------------------------


def random_setup(seed: int) -> Setup:
    """S from 2 to 20, every number of targets, one of them 20x slower; draw and reorder windows of S - 2 included.

    Smaller rings than `check_ring` allows are in it too: they may starve, but must not deadlock.
    """
    rng = random.Random(seed)
    slots = rng.randint(2, 20)
    jobs = (rng.randint(1, 60), rng.randint(1, 12), rng.randint(1, 30))
    return Setup(
        slots=slots,
        min_ready=max(1, slots - 2) if seed % 3 == 0 else rng.randint(1, slots - 1),
        targets=1 + seed % 6,
        window=max(1, slots - 2) if seed % 2 == 0 else rng.randint(1, slots),
        jobs=jobs,
        resume_at=rng.randint(0, jobs[0]) if seed % 4 == 0 else 0,
        seed=seed,
        drafter_s=rng.choice([0.0, 0.02, 0.25, 5.0]),
        target_s=rng.choice([0.0, 0.1, 1.0]),
        padding_s=rng.choice([0.0, 0.1, 1.0]),
    )


def expected_draws(setup: Setup) -> list[list[int]]:
    orders = [schedule.draw_order.tolist() for schedule in schedules(setup)]
    return [orders[0][setup.resume_at :], *orders[1:]]


def test_200_seeded_runs_finish_in_draw_order() -> None:
    for seed in range(200):
        setup = random_setup(seed)
        outcome, _ = simulate(setup)
        assert outcome.drawn == expected_draws(setup), setup
        assert outcome.ring.depths()["FREE"] == setup.slots, setup


@pytest.mark.parametrize("draw", ["ready", "round_robin"])
def test_60_unordered_runs_draw_every_job_once(draw: str) -> None:
    for seed in range(60):
        setup = random_setup(seed)
        setup.draw, setup.resume_at = draw, 0
        outcome, _ = simulate(setup)
        assert [sorted(d) for d in outcome.drawn] == [list(range(n)) for n in setup.jobs], setup


def test_a_drafter_that_still_drains_one_slot_needs_one_slot_more_than_the_window() -> None:
    """The bound of `check_ring` is tight: S = min_ready + 1 never deadlocks, S = min_ready does."""
    for seed in range(40):
        setup = Setup(slots=6, min_ready=5, targets=1 + seed % 6, window=4, held=2, seed=seed)
        assert simulate(setup)[0].drawn == expected_draws(setup)
    setup = Setup(slots=6, min_ready=5, targets=2, window=4, held=2, draw_window=6)
    with pytest.raises(DeadlockError, match="wait for each other"):
        simulate(setup)


def test_a_slot_taken_after_the_forward_deadlocks() -> None:
    """The fault that the order of locks prevents; shows that the simulation finds deadlocks."""
    with pytest.raises(RuntimeError, match="cannot come any more") as caught:
        simulate(Setup(slots=12, min_ready=10, targets=6, window=10, slot_after_forward=True))
    assert str(caught.value).count(" READY generation ") == 12


@pytest.mark.parametrize("draw", ["seeded", "ready", "round_robin"])
@pytest.mark.parametrize("target_s, drafter_s", [(0.01, 5.0), (5.0, 0.01)], ids=["slow consumer", "slow producers"])
def test_the_slower_side_is_named_by_its_waits(draw: str, target_s: float, drafter_s: float) -> None:
    setup = Setup(8, 3, 3, 6, draw, target_s=target_s, drafter_s=drafter_s, slow_factor=1.0, padding_s=0.001)
    outcome, simulation = simulate(setup)
    assert [sorted(d) for d in outcome.drawn] == [list(range(n)) for n in setup.jobs]
    slow_s = sum(setup.jobs) * max(drafter_s * 1.1, target_s / 3)
    assert simulation.now < 1.35 * slow_s  # the slower side sets the length of the run
    waits = outcome.ring.wait_seconds()
    drafter_share = waits["drafter", "ready"] / simulation.now
    target_share = sum(s for (who, _), s in waits.items() if who != "drafter") / (3 * simulation.now)
    slow_share, fast_share = (drafter_share, target_share) if drafter_s > target_s else (target_share, drafter_share)
    assert slow_share < 0.3
    assert fast_share > 0.7


# ---- whole runs, real threads ----------------------------------------------------------------------------------------


def run_threads(control: RunControl, functions: dict[str, Callable[[], None]], limit_s: float = 20.0) -> None:
    """Run each function in a thread; raise the first error."""

    def body(name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Stopped:
            pass
        except BaseException as error:
            control.fail(name, error)

    threads = [threading.Thread(target=body, args=item, name=item[0], daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    control.raise_first_error()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("draw", ["seeded", "ready", "round_robin"])
def test_threaded_runs_finish(draw: str) -> None:
    for seed in range(20 if draw == "seeded" else 5):
        setup = random_setup(seed)
        setup.draw, setup.jobs, setup.resume_at = draw, (25, 6), 0
        setup.target_s, setup.drafter_s, setup.padding_s = 2e-4, random.Random(seed).choice([0.0, 2e-4]), 1e-4
        control = RunControl(wait_timeout_s=10)
        functions: dict[str, Callable[[], None]] = {}
        outcome = start(setup, control, time.sleep, functions.__setitem__)
        run_threads(control, functions)
        if draw == "seeded":
            assert outcome.drawn == expected_draws(setup)
        assert [sorted(d) for d in outcome.drawn] == [list(range(n)) for n in setup.jobs]
        assert outcome.ring.depths()["FREE"] == setup.slots
        waits = outcome.ring.wait_seconds()
        assert {who for who, _ in waits} == {"drafter", *(f"target{i}" for i in range(setup.targets))}
        assert all(seconds >= 0 for seconds in waits.values())


def test_a_taker_that_waits_does_not_block_filled_and_release() -> None:
    control = RunControl(wait_timeout_s=5)
    ring = Ring(control, 2)
    source = ListSource(jobs(3))
    first, second = ring.take(source, "a"), ring.take(source, "a")
    got: list[Lease | None] = []
    taker = threading.Thread(target=lambda: got.append(ring.take(source, "b")), daemon=True)
    taker.start()
    wait_until(lambda: "Taking: b" in ring.describe())
    for lease in (first, second):
        ring.wait_drained(lease)
        ring.filled(lease)
    assert not got
    ring.release(drawn(ring, second))
    taker.join(1)
    assert got[0].job.index == 2
    assert got[0].slot == second.slot
    assert ring.wait_seconds()["b", "slot"] > 0


def wait_until(predicate: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_drafter_that_waits_when_the_jobs_run_out_learns_it_at_once() -> None:
    ring = Ring(RunControl(), 2)
    ended: list[BaseException] = []

    def drafter() -> None:
        try:
            ring.draw(0, any_lease, "drafter", "any slot")
        except RuntimeError as error:
            ended.append(error)

    thread = threading.Thread(target=drafter, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not ended
    assert ring.take(ListSource([]), "target") is None
    thread.join(2)
    assert "which cannot come any more" in str(ended[0])


def blocked_source(control: RunControl) -> ListSource:
    condition = control.condition()

    class Blocked(ListSource):
        def take(self, who: str) -> Job | None:
            with condition:
                control.wait_for(condition, lambda: False, who=who, what="a padded job")
            return None

    return Blocked([])


@pytest.mark.parametrize("wait_for_slot", [True, False], ids=["slot", "job"])
def test_the_first_error_ends_every_wait_within_a_second(wait_for_slot: bool) -> None:
    """Waiters of each kind: a slot or a job, the turn to take, READY slots."""
    control = RunControl()
    ring = Ring(control, 2)
    source = ListSource(jobs(9))
    ring.take(source, "slow")
    if wait_for_slot:
        ring.take(source, "slow")
    else:
        source = blocked_source(control)
    ended: dict[str, BaseException] = {}

    def waiter(name: str, call: Callable[[], object]) -> threading.Thread:
        def body() -> None:
            try:
                call()
            except BaseException as error:
                ended[name] = error

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    threads = [waiter("taker", lambda: ring.take(source, "taker"))]
    wait_until(lambda: "Taking: taker" in ring.describe())
    threads.append(waiter("next taker", lambda: ring.take(source, "next taker")))
    threads.append(waiter("drafter", lambda: ring.draw(0, any_lease, "drafter", "any")))
    time.sleep(0.05)
    assert not ended
    started = time.monotonic()
    control.fail("slow", ValueError("first"))
    for thread in threads:
        thread.join(2)
    assert time.monotonic() - started < 1
    assert {name: type(error) for name, error in ended.items()} == dict.fromkeys(
        ["taker", "next taker", "drafter"], Stopped
    )
    assert "Taking: nobody" in ring.describe()
    with pytest.raises(ValueError, match="first"):
        control.raise_first_error()


def test_a_time_out_names_the_waiter_and_all_slots() -> None:
    ring = Ring(RunControl(wait_timeout_s=0.05), 2)
    ring.take(ListSource([Job(3, 14, 1)]), "target5")
    with pytest.raises(WaitTimeoutError) as caught:
        ring.draw(3, any_lease, "drafter", "epoch 3 job 14 to be READY")
    for part in (
        "drafter waited 0.",
        "for epoch 3 job 14 to be READY",
        "slot 0 FILLING generation 1 holder target5 (epoch 3 job 14 bucket 1)",
        "slot 1 FREE generation 0 holder nobody",
        "last taken (epoch, job): (3, 14)",
    ):
        assert part in str(caught.value)
