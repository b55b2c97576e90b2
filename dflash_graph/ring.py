"""The ring of slots between targets and drafter: who may write or read which slot, and when.

Owns the state, generation and hand-off events of every slot; deals in slot indices and host-side jobs, never in
tensors. Target workers call `take`, `wait_drained` and `filled`; the drafter draws through `Pool` (pool.py) and calls
`release`. No thread holds the ring's lock while it waits for anything else, so a target that waits for a job or a slot
never blocks the `filled` and `release` of others.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch

from dflash_graph.control import RunControl

if TYPE_CHECKING:
    from dflash_graph.dispatch import PaddedJob

DEFAULT_SLOTS = 20


def check_ring(slots: int, min_ready: int, targets: int, window: int) -> None:
    """Refuse a ring that could deadlock or starve.

    Each draw of the seeded order is one of the `min_ready` oldest undrawn jobs. While the drafter waits for job j that
    no target has taken yet, all slots in use hold undrawn jobs older than j, at most min_ready - 1 (jobs are taken in
    order, each together with its slot), plus the one slot that the drafter may still be draining: with slots >=
    min_ready + 1 one is FREE, so the next job can be taken, and by induction j. Once taken, j has its slot and its
    target needs nothing else. The other draws wait for min(min_ready, jobs left) READY slots, and the same count holds.
    Jobs of the next epoch enter only after every job of this one has its slot. That excludes deadlock. So that targets
    do not starve either, all of them can be FILLING, one slot DRAINING and one FREE while min_ready are READY:
    min_ready + targets + 2.

    Args:
        slots: S.
        min_ready: the draw window of the schedule.
        targets: target workers that fill this ring.
        window: jobs the dispatcher may have padded or waiting at once.

    Raises:
        ValueError: the configuration is refused; the message says what must hold, what was found and what to change.
    """
    for name, value in (("slots", slots), ("min_ready", min_ready), ("targets", targets), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; found {value}")
    needed = min_ready + targets + 2
    if slots < needed:
        effect = "deadlock" if slots < min_ready + 1 else "starve"
        raise ValueError(
            f"slots must be at least min_ready + targets + 2 = {min_ready} + {targets} + 2 = {needed}; found {slots}, "
            f"with which the run can {effect}. Raise schedule.slots, or lower schedule.min_ready or devices.num_targets"
        )
    if window < targets:
        raise ValueError(
            f"the reorder window must be at least the number of targets, {targets}, so that each can find a padded "
            f"job; found {window}. Raise schedule.reorder_window"
        )


def default_slots(min_ready: int, targets: int, fits: int | None = None) -> int:
    """S when the user chose none: 20 or what fits, never below the floor of `check_ring`.

    Args:
        fits: slots that fit into the drafter device's memory; None if memory is no limit.

    Raises:
        ValueError: fewer slots fit than the floor.
    """
    floor = min_ready + targets + 2
    if fits is not None and fits < floor:
        raise ValueError(
            f"the drafter's device must hold at least min_ready + targets + 2 = {floor} slots; {fits} fit. Lower "
            "schedule.min_ready, schedule.token_budget, drafter.num_anchors or the number of taps"
        )
    return max(floor, DEFAULT_SLOTS if fits is None else min(DEFAULT_SLOTS, fits))


class SlotState(IntEnum):
    """FREE -> FILLING (a target has taken its job) -> READY -> DRAINING (the drafter copies it out) -> FREE."""

    FREE = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


class JobSource(Protocol):
    """Where targets get jobs: the dispatcher. One source serves a ring for the whole run."""

    def take(self, who: str) -> PaddedJob | None: ...


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to fill or drain one slot, for one generation of it. `job` carries the host-side facts."""

    slot: int
    generation: int
    job: PaddedJob


class StreamEvent:
    """Orders work of two CUDA streams of one device without a host sync; does nothing on the CPU.

    Both calls act on the stream that is current, for `device`, in the calling thread. A producer on another device
    therefore makes its copy stream on *this* device current around its copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Make the current stream wait for the last `record`; no effect before the first one."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


@dataclass
class _Slot:
    index: int
    filled_event: StreamEvent
    drained_event: StreamEvent
    state: SlotState = SlotState.FREE
    generation: int = 0
    holder: str = "nobody"
    writable: bool = False
    lease: Lease | None = None

    def __str__(self) -> str:
        text = f"slot {self.index} {self.state.name} generation {self.generation} holder {self.holder}"
        if self.lease is None:
            return text
        job = self.lease.job
        return f"{text} (epoch {job.epoch} job {job.index} bucket {job.bucket})"


class Ring:
    """S slots and their states, all behind one condition of the run's control.

    Args:
        num_slots: S.
        device: the drafter's device, where the slots live; decides whether hand-off events are real.
    """

    def __init__(self, control: RunControl, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1; found {num_slots}")
        device = torch.device(device)
        self.num_slots = num_slots
        self._control = control
        self._changed = control.condition()
        self._slots = [_Slot(i, StreamEvent(device), StreamEvent(device)) for i in range(num_slots)]
        self._free = deque(range(num_slots))  # longest free first: its drained event is the oldest
        self._taker: str | None = None
        self._last_taken = (-1, -1)  # (epoch, index)
        self._exhausted = False
        self._wait_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    # Target side.

    def take(self, source: JobSource, who: str) -> Lease | None:
        """Take the next job and a FREE slot for it together, before the forward; None when the source is exhausted.

        One target at a time is inside, so jobs get slots in job order; the others wait for their turn.

        Raises:
            Stopped, WaitTimeoutError: see `RunControl.wait_for`.
            RuntimeError: the source gave a job that does not come after the one before it.
        """
        with self._turn(who):
            started = time.monotonic()
            job = source.take(who)
            with self._changed:
                self._wait_seconds[who, "job"] += time.monotonic() - started
                self._exhausted = job is None
                if job is None:
                    return None  # leaving the turn wakes a drafter that waits for more jobs
                key = (job.epoch, job.index)
                if key <= self._last_taken:
                    raise RuntimeError(
                        f"jobs must come in ascending order; (epoch, job) {key} after {self._last_taken}"
                    )
                self._wait(lambda: bool(self._free), who, "slot", f"a FREE slot for epoch {job.epoch} job {job.index}")
                slot = self._slots[self._free.popleft()]
                slot.state, slot.holder, slot.writable = SlotState.FILLING, who, False
                slot.generation += 1
                slot.lease = Lease(slot.index, slot.generation, job)
                self._last_taken = key
                return slot.lease

    @contextmanager
    def _turn(self, who: str) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: self._taker is None, who, "turn", "its turn to take a job")
            self._taker = who
        try:
            yield
        finally:
            with self._changed:
                self._taker = None
                self._changed.notify_all()

    def wait_drained(self, lease: Lease) -> None:
        """Order the current stream after the last reader of the slot. Required before the first write into it."""
        with self._changed:
            slot = self._check(lease, SlotState.FILLING, "wait_drained")
            slot.drained_event.wait()
            slot.writable = True

    def filled(self, lease: Lease) -> None:
        """Publish the slot as READY, ordered after all work queued on the current stream."""
        with self._changed:
            slot = self._check(lease, SlotState.FILLING, "filled")
            if not slot.writable:
                raise RuntimeError(f"filled without wait_drained: call it before writing into the slot. {slot}")
            slot.filled_event.record()
            slot.state = SlotState.READY
            self._changed.notify_all()

    # Drafter side.

    def draw(self, epoch: int, choose: Callable[[Sequence[Lease]], Lease | None], who: str, what: str) -> Lease:
        """Wait until `choose` picks one of the READY leases of `epoch` (oldest job first) and start draining it.

        The current stream is ordered after the slot's producer.

        Raises:
            RuntimeError: `choose` declines and no further job of the epoch can become READY.
        """
        chosen: Lease | None = None

        def found() -> bool:
            nonlocal chosen
            chosen = choose(self._ready(epoch))
            if chosen is None and not self._can_progress(epoch):
                raise RuntimeError(f"{who} waits for {what}, which cannot come any more. {self.describe()}")
            return chosen is not None

        with self._changed:
            self._wait(found, who, "ready", what)
            assert chosen is not None
            slot = self._check(chosen, SlotState.READY, "draw")
            slot.state, slot.holder = SlotState.DRAINING, who
            slot.filled_event.wait()
            return chosen

    def release(self, lease: Lease) -> None:
        """Give the slot back, ordered after all work queued on the current stream."""
        with self._changed:
            slot = self._check(lease, SlotState.DRAINING, "release")
            slot.drained_event.record()
            slot.state, slot.holder, slot.lease = SlotState.FREE, "nobody", None
            self._free.append(slot.index)
            self._changed.notify_all()

    def _ready(self, epoch: int | None) -> list[Lease]:
        leases = [s.lease for s in self._slots if s.state == SlotState.READY and s.lease is not None]
        return sorted((x for x in leases if epoch in (None, x.job.epoch)), key=lambda x: (x.job.epoch, x.job.index))

    def _can_progress(self, epoch: int) -> bool:
        """Whether the READY slots of `epoch` can still grow without the drafter's help."""
        for slot in self._slots:
            if slot.state == SlotState.FILLING and slot.lease is not None and slot.lease.job.epoch == epoch:
                return True
        more_to_take = not self._exhausted and self._last_taken[0] <= epoch
        return more_to_take and any(slot.state != SlotState.READY for slot in self._slots)

    # Both sides.

    def _check(self, lease: Lease, state: SlotState, action: str) -> _Slot:
        slot = self._slots[lease.slot]
        if slot.lease is not lease or slot.state != state:
            raise RuntimeError(
                f"{action} needs slot {lease.slot} in state {state.name}, generation {lease.generation}; found {slot}"
            )
        return slot

    def _wait(self, predicate: Callable[[], bool], who: str, cause: str, what: str) -> None:
        waited = self._control.wait_for(self._changed, predicate, who=who, what=what, describe=self.describe)
        self._wait_seconds[who, cause] += waited

    def describe(self) -> str:
        """All slot states, who holds them and who is taking a job; part of every time-out."""
        with self._changed:
            states = "; ".join(map(str, self._slots))
            return f"{states}. Taking: {self._taker or 'nobody'}; last taken (epoch, job): {self._last_taken}" + (
                "; no jobs left" if self._exhausted else ""
            )

    def owner(self, slot: int) -> tuple[SlotState, str]:
        """State of a slot and who holds it ("nobody" when FREE)."""
        with self._changed:
            return self._slots[slot].state, self._slots[slot].holder

    def depths(self) -> dict[str, int]:
        """Slots per state, by its name."""
        with self._changed:
            counts = Counter(s.state for s in self._slots)
            return {state.name: counts[state] for state in SlotState}

    def ready_by_bucket(self, epoch: int | None = None) -> dict[int, int]:
        """READY slots per bucket, of one epoch or of all."""
        with self._changed:
            return dict(sorted(Counter(lease.job.bucket for lease in self._ready(epoch)).items()))

    def wait_seconds(self) -> dict[tuple[str, str], float]:
        """Seconds waited so far per (worker, cause); causes are "turn", "job", "slot" and "ready"."""
        with self._changed:
            return dict(self._wait_seconds)
