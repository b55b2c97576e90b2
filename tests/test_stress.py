"""Ten thousand hand-offs between real threads, each slot stamped by its producer in every row and read back whole."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_graph.control import RunControl
from dflash_graph.pool import Pool
from dflash_graph.ring import Ring
from dflash_graph.static_buffers import BufferSpec, BufferTable
from tests.ring_simulation import ListSource, PaddedSource, Schedule
from tests.test_ring import run_threads

SLOTS, TARGETS, MIN_READY, ROWS, WIDTH = 9, 3, 4, 64, 8


class Stress:
    """Producers and one consumer over real slots; everything that a slot holds is its job's number and generation."""

    def __init__(
        self, jobs: int, *, target_s: float, drafter_s: float, draw: str = "seeded", early: bool = False
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
        self.workspace = torch.zeros(ROWS, WIDTH)
        self.schedule = Schedule(epoch=0, num_jobs=jobs, min_ready=MIN_READY)
        self.pool = Pool(self.ring, draw, seed=0)  # type: ignore[arg-type]
        self.source = PaddedSource(self.control, self.schedule.jobs(), window=SLOTS - 2)
        self.target_s, self.drafter_s, self.early = target_s, drafter_s, early
        self.drawn: list[int] = []

    def produce(self, name: str) -> None:
        rng = random.Random(name)
        while (lease := self.ring.take(self.source, name)) is not None:
            _pause(rng.random() * self.target_s)
            self.ring.wait_drained(lease)
            stamp = float(lease.job.index)
            features, ids = self.table["slot.features"][lease.slot], self.table["slot.row_ids"][lease.slot]
            half = ROWS // 2
            features[:half] = stamp
            ids[:half] = lease.generation
            _pause(0)  # another thread may run between the halves
            features[half:] = stamp
            ids[half:] = lease.generation
            self.ring.filled(lease)

    def consume(self) -> None:
        rng = random.Random(0)
        self.pool.start_epoch(self.schedule)  # type: ignore[arg-type]
        while self.pool.jobs_left:
            lease = self.pool.next("drafter")
            if self.early:
                self.ring.release(lease)
                _pause(1e-4)
            self.workspace.copy_(self.table["slot.features"][lease.slot])
            ids = self.table["slot.row_ids"][lease.slot].clone()
            if not self.early:
                self.ring.release(lease)
            _pause(rng.random() * self.drafter_s)
            _check(self.workspace, float(lease.job.index), f"slot {lease.slot}: features")
            _check(ids, lease.generation, f"slot {lease.slot}: row ids")
            self.drawn.append(lease.job.index)
            self.pool.mark_trained([lease.job.index])

    def run(self) -> None:
        functions: dict[str, Callable[[], None]] = {"drafter": self.consume}
        for i in range(TARGETS):
            functions[f"target-{i}"] = lambda name=f"target-{i}": self.produce(name)  # type: ignore[misc]
        for i in range(2):
            functions[f"padding-{i}"] = lambda name=f"padding-{i}": self.source.pad(name, lambda: None)  # type: ignore[misc]
        run_threads(self.control, functions, limit_s=120)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _check(tensor: Tensor, stamp: float, what: str) -> None:
    if not bool((tensor == stamp).all()):
        raise AssertionError(f"{what} must all be {stamp}; found {tensor.unique().tolist()}")


@pytest.mark.parametrize(
    "target_s, drafter_s, draw, jobs",
    [(0.0, 0.0, "seeded", 4000), (0.0, 2e-4, "seeded", 2000), (1e-3, 0.0, "seeded", 2000), (2e-4, 1e-4, "ready", 2000)],
    ids=["as fast as they can", "slow consumer", "slow producers", "ready draw"],
)
def test_ten_thousand_hand_offs_in_all(target_s: float, drafter_s: float, draw: str, jobs: int) -> None:
    stress = Stress(jobs, target_s=target_s, drafter_s=drafter_s, draw=draw)
    stress.run()
    assert sorted(stress.drawn) == list(range(jobs))
    if draw == "seeded":
        assert stress.drawn == stress.schedule.draw_order.tolist()
    assert stress.ring.depths()["FREE"] == SLOTS
    assert threading.active_count() < 20


def test_the_stamps_show_a_release_before_the_copy() -> None:
    """The fault that the stress test is there for: found although producers and consumer race for it."""
    stress = Stress(3000, target_s=0.0, drafter_s=0.0, early=True)
    with pytest.raises(AssertionError, match=r"must all be"):
        stress.run()


def test_a_source_without_padding_threads_hands_off_the_same() -> None:
    stress = Stress(300, target_s=0.0, drafter_s=0.0)
    stress.source = ListSource(stress.schedule.jobs())  # type: ignore[assignment]
    functions: dict[str, Callable[[], None]] = {
        "drafter": stress.consume,
        "target-0": lambda: stress.produce("target-0"),
    }
    run_threads(stress.control, functions, limit_s=60)
    assert stress.drawn == stress.schedule.draw_order.tolist()
