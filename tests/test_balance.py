"""When a ring that stays full or empty is worth a word, and what the word is."""

from dataclasses import replace

import pytest

from dflash_graph import balance
from dflash_graph.balance import Adviser, Balance
from dflash_graph.counts import JobCounts
from dflash_graph.metrics import RankRecord

STEADY = Balance(
    seconds=100.0, jobs=200, num_targets=1, empty_s=5.0, full_s=5.0, target_busy_s=80.0, drafter_idle_s=10.0
)


def test_nothing_to_say_while_all_is_well_or_young() -> None:
    assert STEADY.advice() is None
    assert replace(STEADY, empty_s=90.0, seconds=20.0).advice() is None
    assert replace(STEADY, empty_s=90.0, jobs=10).advice() is None


def test_an_empty_ring_asks_for_targets() -> None:
    text = replace(STEADY, empty_s=60.0, drafter_idle_s=60.0, target_busy_s=100.0).advice()
    assert text is not None
    assert "the ring was empty for 60% of the time: the drafter waits" in text
    assert "A job takes a target 0.5 s and the drafter 0.2 s, which 2.5 targets per drafter would balance" in text


def test_a_full_ring_asks_for_drafters() -> None:
    text = replace(STEADY, num_targets=2, full_s=50.0, target_busy_s=40.0, drafter_idle_s=0.0).advice()
    assert text is not None
    assert "the ring was full for 50% of the time: targets wait" in text
    assert "which 2.5 drafters per target would balance (now 2 to 1)" in text


def test_only_what_came_later_counts() -> None:
    start = replace(STEADY, empty_s=400.0, seconds=1000.0, jobs=5)
    later = replace(start, empty_s=401.0, seconds=1100.0, jobs=205, target_busy_s=170.0)
    assert later.since(start).advice() is None
    assert later.since(start).empty_s == pytest.approx(1.0)


def record(jobs: int, **waits: float) -> RankRecord:
    return RankRecord(
        jobs=JobCounts(num_buckets=1, jobs=jobs), counts=None, depths={}, ready_by_bucket={},  # type: ignore[arg-type]
        waits={("drafter", cause): seconds for cause, seconds in waits.items()},
    )  # fmt: skip


def test_an_adviser_speaks_once_and_of_what_came_after_the_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(balance.time, "monotonic", lambda: now[0])
    adviser = Adviser()
    assert adviser.advice(record(100, ready=500.0), num_targets=1, target_busy_s=0.0) is None
    now[0] += 100
    text = adviser.advice(record(100, ready=560.0, validation=10.0), num_targets=1, target_busy_s=90.0)
    assert text is not None
    assert "empty for 60% of the time" in text
    assert "a target 0.9 s and the drafter 0.3 s" in text
    now[0] += 100
    assert adviser.advice(record(100, ready=660.0), num_targets=1, target_busy_s=180.0) is None
