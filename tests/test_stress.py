"""Sixteen thousand hand-offs between real threads: slots stamped in every row by producers, read back whole.

Only the protocol of ring and pool keeps the stamps whole; what it must prevent is planted here, too, and seen.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from dflash_graph.control import RunControl
from dflash_graph.pool import Pool
from dflash_graph.ring import Lease, Ring
from dflash_graph.static_buffers import BufferSpec, BufferTable
from tests.ring_simulation import ListSource, PaddedSource, Schedule
from tests.test_ring import run_threads

SLOTS, TARGETS, MIN_READY, ROWS, WIDTH = 9, 3, 4, 64, 8
LIMIT_S = 60
Fault = Literal["", "released before the copy", "published before it is whole", "written after it was published"]


class Stress:
    """Producers and one consumer over real slots; everything that a slot holds is its job's number and generation.

    Args:
        target_s, drafter_s: the longest pause per job; pauses are random.
        fault: what producers or consumer do wrong.
    """

    def __init__(
        self, jobs: int, *, target_s: float = 0.0, drafter_s: float = 0.0, draw: str = "seeded", fault: Fault = ""
    ) -> None:
        self.control = RunControl(wait_timeout_s=20)
        self.ring = Ring(self.control, SLOTS)
        cpu = torch.device("cpu")
        self.table = BufferTable(
            [
                BufferSpec("slot.features", (SLOTS, ROWS, WIDTH), torch.float32, cpu, "targets", ("drafter",)),
                BufferSpec("slot.row_ids", (SLOTS, ROWS), torch.int64, cpu, "targets", ("drafter",)),
            ]
        )
        self.features, self.row_ids = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
        self.schedule = Schedule(epoch=0, num_jobs=jobs, min_ready=MIN_READY)
        self.pool = Pool(self.ring, draw, seed=0)  # type: ignore[arg-type]
        self.source = PaddedSource(self.control, self.schedule.jobs(), window=SLOTS - 2)
        self.target_s, self.drafter_s, self.fault = target_s, drafter_s, fault
        self.drawn: list[int] = []
        self.produced: Counter[str] = Counter()

    def produce(self, name: str) -> None:
        rng = random.Random(name)
        last: Lease | None = None
        while (lease := self.ring.take(self.source, name)) is not None:
            _pause(rng.random() * self.target_s)
            if self.fault == "written after it was published" and last is not None:
                self._write(slice(ROWS), last.slot, lease)
            self.ring.wait_drained(lease)
            self._write(slice(ROWS // 2), lease.slot, lease)
            if self.fault == "published before it is whole":
                self.ring.filled(lease)
            _pause(1e-6)  # another thread may run between the halves
            self._write(slice(ROWS // 2, ROWS), lease.slot, lease)
            if self.fault != "published before it is whole":
                self.ring.filled(lease)
            self.produced[name] += 1
            last = lease

    def _write(self, rows: slice, slot: int, stamp: Lease) -> None:
        self.table["slot.features"][slot, rows] = float(stamp.job.index)
        self.table["slot.row_ids"][slot, rows] = stamp.generation

    def consume(self) -> None:
        rng = random.Random(0)
        self.pool.start_epoch(self.schedule)  # type: ignore[arg-type]
        while self.pool.jobs_left:
            lease = self.pool.next("drafter")
            early = self.fault == "released before the copy"
            if early:
                self.ring.release(lease)
                _pause(1e-4)
            self.features.copy_(self.table["slot.features"][lease.slot])
            self.row_ids.copy_(self.table["slot.row_ids"][lease.slot])
            if not early:
                self.ring.release(lease)
            _pause(rng.random() * self.drafter_s)
            _check(self.features, float(lease.job.index), f"slot {lease.slot}: features")
            _check(self.row_ids, lease.generation, f"slot {lease.slot}: row ids")
            self.drawn.append(lease.job.index)
            self.pool.mark_trained([lease.job.index])

    def run(self) -> None:
        functions: dict[str, Callable[[], None]] = {"drafter": self.consume}
        for i in range(TARGETS):
            functions[f"target-{i}"] = lambda name=f"target-{i}": self.produce(name)  # type: ignore[misc]
        for i in range(2):
            functions[f"padding-{i}"] = lambda name=f"padding-{i}": self.source.pad(name, lambda: None)  # type: ignore[misc]
        run_threads(self.control, functions, limit_s=LIMIT_S)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _check(tensor: Tensor, stamp: float, what: str) -> None:
    if not bool((tensor == stamp).all()):
        raise AssertionError(f"{what} must all be {stamp}; found {tensor.unique().tolist()}")


@pytest.mark.parametrize(
    "jobs, settings",
    [
        (10_000, {}),
        (2000, {"drafter_s": 2e-4}),
        (2000, {"target_s": 1e-3}),
        (2000, {"target_s": 2e-4, "drafter_s": 1e-4, "draw": "ready"}),
    ],
    ids=["as fast as they can", "slow consumer", "slow producers", "ready draw"],
)
def test_every_hand_off_is_whole(jobs: int, settings: dict[str, Any]) -> None:
    before, started = set(threading.enumerate()), time.monotonic()
    stress = Stress(jobs, **settings)
    stress.run()
    assert time.monotonic() - started < LIMIT_S
    assert sorted(stress.drawn) == list(range(jobs))
    if stress.pool.draw == "seeded":
        assert stress.drawn == stress.schedule.draw_order.tolist()
    assert stress.ring.depths() == {"FREE": SLOTS, "FILLING": 0, "READY": 0, "DRAINING": 0}
    assert set(stress.produced) == {f"target-{i}" for i in range(TARGETS)}, "a producer had nothing to do"
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("fault", [fault for fault in get_args(Fault) if fault])
def test_the_stamps_show_what_the_protocol_must_prevent(fault: Fault) -> None:
    """Whatever the race between the threads, a stamp that is not the lease's is seen long before the last job."""
    stress = Stress(10_000, fault=fault)
    with pytest.raises(AssertionError, match=r"slot \d: (features|row ids) must all be"):
        stress.run()
    assert len(stress.drawn) < 5000


def test_a_source_without_padding_threads_hands_off_the_same() -> None:
    stress = Stress(300)
    stress.source = ListSource(stress.schedule.jobs())  # type: ignore[assignment]
    functions: dict[str, Callable[[], None]] = {
        "drafter": stress.consume,
        "target-0": lambda: stress.produce("target-0"),
    }
    run_threads(stress.control, functions, limit_s=LIMIT_S)
    assert stress.drawn == stress.schedule.draw_order.tolist()
