"""Buckets against brute force, samples into jobs exactly once, job and draw order, and the file of an epoch."""

import itertools
import json
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_graph.schedule import (
    Bucket,
    EpochSchedule,
    Purpose,
    build_epoch,
    choose_buckets,
    length_mix,
    random_keys,
)

T = 16384


def log_normal(n: int, seed: int = 0) -> np.ndarray:
    """n lengths, log-normal around a median of 700 tokens, redrawn outside 32..4,096."""
    x = np.random.default_rng(seed).lognormal(np.log(700), 1.0, size=2 * n)
    lengths = x[(x >= 32) & (x < 4097)][:n].astype(np.int32)
    assert len(lengths) == n
    return lengths


def build(lengths: np.ndarray, buckets: tuple[Bucket, ...] | None = None, **changes: Any) -> EpochSchedule:
    arguments: dict[str, Any] = {
        "seed": 1,
        "epoch": 0,
        "order": "shuffle",
        "draw": "seeded",
        "min_ready": 10,
        "jobs_per_step": 8,
        "data_fingerprint": "data",
        "token_budget": T,
        **changes,
    }
    if buckets is None:
        buckets = choose_buckets(lengths, token_budget=arguments["token_budget"], num_buckets=16)
    return build_epoch(lengths, buckets, **arguments)


def one_bucket_per_job(counts: list[int]) -> tuple[np.ndarray, tuple[Bucket, ...]]:
    """Lengths and buckets that give counts[b] jobs of one sample each in bucket b."""
    buckets = tuple(Bucket(64 * (b + 1), 1) for b in range(len(counts)))
    return np.repeat([b.length for b in buckets], counts), buckets


# ---- buckets ----


def edge_sets(lengths: list[int], num_buckets: int, multiple: int) -> list[tuple[int, ...]]:
    """Every set of at most `num_buckets` bucket lengths whose longest holds all samples."""
    top = -(-max(lengths) // multiple)
    sets = []
    for k in range(num_buckets):
        sets += [tuple(multiple * c for c in (*rest, top)) for rest in itertools.combinations(range(1, top), k)]
    return sets


def fewest_jobs_of_any_packing(lengths: list[int], edges: tuple[int, ...], token_budget: int) -> int:
    """Over all partitions of the samples into jobs and any bucket for each job."""

    def legal(job: list[int]) -> bool:
        return any(max(job) <= edge and len(job) * edge <= token_budget for edge in edges)

    def place(i: int, jobs: list[list[int]], best: int) -> int:
        if len(jobs) >= best:
            return best
        if i == len(lengths):
            return len(jobs)
        for job in [*jobs, []]:
            job.append(lengths[i])
            if legal(job):
                best = place(i + 1, jobs if any(job is x for x in jobs) else [*jobs, job], best)
            job.pop()
        return best

    return place(0, [], len(lengths) + 1)


def fewest_jobs_longest_first(lengths: list[int], edges: tuple[int, ...], token_budget: int) -> int:
    left = sorted(lengths, reverse=True)
    jobs = 0
    while left:
        rows = token_budget // min(edge for edge in edges if edge >= left[0])
        left = left[rows:]
        jobs += 1
    return jobs


def check_choice(lengths: list[int], token_budget: int, num_buckets: int, multiple: int, count: Any) -> None:
    cost = {edges: count(lengths, edges, token_budget) for edges in edge_sets(lengths, num_buckets, multiple)}
    fewest = min(cost.values())
    fewest_buckets = min(len(edges) for edges, jobs in cost.items() if jobs == fewest)
    chosen = choose_buckets(np.array(lengths), token_budget=token_budget, num_buckets=num_buckets, multiple=multiple)
    assert cost[tuple(bucket.length for bucket in chosen)] == fewest
    assert len(chosen) == fewest_buckets
    assert [bucket.rows for bucket in chosen] == [token_budget // bucket.length for bucket in chosen]
    assert build(np.array(lengths), chosen, token_budget=token_budget).num_jobs == fewest


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(6, 14), st.integers(1, 4))
def test_buckets_match_all_edge_sets_and_all_packings(lengths: list[int], token_budget: int, num_buckets: int) -> None:
    check_choice(lengths, token_budget, num_buckets, 1, fewest_jobs_of_any_packing)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8 * 64), min_size=1, max_size=60), st.integers(512, 3000), st.integers(1, 5))
def test_buckets_match_all_edge_sets_on_more_samples(lengths: list[int], token_budget: int, num_buckets: int) -> None:
    check_choice(lengths, token_budget, num_buckets, 64, fewest_jobs_longest_first)


def test_buckets_by_hand() -> None:
    # Budget 256. The two longest fill a job each. The other five need two jobs of 4 rows (64 x 4), or three of 128 x 2.
    lengths = np.array([250, 193, 64, 1, 30, 64, 50])
    buckets = choose_buckets(lengths, token_budget=256, num_buckets=4)
    assert buckets == (Bucket(64, 4), Bucket(256, 1))
    assert build(lengths, buckets, token_budget=256).num_jobs == 4
    # Three rows of 128 leave a row free, which the one short sample takes: a bucket of 64 would not help.
    assert choose_buckets(np.array([100, 128, 90, 10]), token_budget=256, num_buckets=4) == (Bucket(128, 2),)
    # Free rows count: 5 and 4 alone, then 3 with one 2, then 2, 1, 1. A bucket of 4 for the 4 would cost the last one.
    lengths = np.array([1, 1, 2, 2, 3, 4, 5])
    buckets = choose_buckets(lengths, token_budget=6, num_buckets=3, multiple=1)
    assert buckets == (Bucket(2, 3), Bucket(3, 2), Bucket(5, 1))
    assert build(lengths, buckets, token_budget=6).num_jobs == 4


def test_600_rows_use_no_more_positions_than_any_other_edges_tried() -> None:
    lengths = log_normal(600)
    fewest = build(lengths).num_jobs
    rng = np.random.default_rng(0)
    classes = np.unique(-(-lengths // 64) * 64)
    for _ in range(300):
        edges = np.append(rng.choice(classes[:-1], size=15, replace=False), classes[-1])
        assert fewest_jobs_longest_first(lengths.tolist(), tuple(np.sort(edges).tolist()), T) >= fewest


def test_padding_share_on_a_broad_distribution() -> None:
    lengths = log_normal(200_000)
    schedule = build(lengths)
    assert len(schedule.buckets) == 16
    tokens = lengths.sum(dtype=np.int64)
    assert schedule.padding_share(lengths) == pytest.approx(1 - tokens / (schedule.num_jobs * T))
    assert schedule.padding_share(lengths) <= 0.11
    doubling = tuple(Bucket(64 << i, T // (64 << i)) for i in range(7))
    assert build(lengths, doubling).padding_share(lengths) >= 0.2


@pytest.mark.parametrize(
    "lengths, budget, num_buckets, message",
    [
        (np.zeros(0, np.int32), T, 16, "at least one sample"),
        (np.zeros((2, 2), np.int32), T, 16, r"found shape \(2, 2\)"),
        (np.array([5, 0]), T, 16, "sample 1 has none"),
        (np.array([65]), 64, 16, "must hold the longest sample, 65 tokens, rounded up to 128"),
        (np.array([64]), 64, 0, "at least 1; found 0"),
    ],
)
def test_buckets_refuse(lengths: np.ndarray, budget: int, num_buckets: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_buckets(lengths, token_budget=budget, num_buckets=num_buckets)


# ---- jobs ----


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=300),
    st.sampled_from(["shuffle", "interleave"]),
    st.integers(0, 2**31),
)
def test_each_sample_is_in_one_job_that_holds_it(lengths: list[int], order: Any, epoch: int) -> None:
    array = np.array(lengths)
    schedule = build(array, token_budget=2048, order=order, epoch=epoch)
    assert sorted(schedule.job_rows.tolist()) == list(range(len(lengths)))
    assert schedule.job_offsets[0] == 0
    assert schedule.job_offsets[-1] == len(lengths)
    partial = 0
    for job in range(schedule.num_jobs):
        bucket = schedule.buckets[schedule.job_bucket[job]]
        rows = schedule.rows_of(job)
        assert 1 <= len(rows) <= bucket.rows
        assert array[rows].max() <= bucket.length
        partial += len(rows) < bucket.rows
    assert partial <= 1


def test_rows_are_shuffled_inside_buckets_and_between_epochs() -> None:
    lengths = np.full(64, 64)
    drawn = np.stack([build(lengths, token_budget=512, epoch=e).job_rows for e in range(400)])
    # Row 0 is equally likely in each of the 64 places; sigma of a count is 2.5.
    counts = np.bincount(np.argmax(drawn == 0, axis=1), minlength=64)
    assert len({row.tobytes() for row in drawn}) == 400
    assert counts.max() <= 6.25 + 5 * 2.5


def test_the_samples_that_fill_another_buckets_job_are_random() -> None:
    # Budget 256: one sample of 128 opens a job of 2 rows; one of the eight short ones takes the other row.
    lengths = np.array([128] + [64] * 8)
    buckets = (Bucket(64, 4), Bucket(128, 2))
    fillers = []
    for epoch in range(400):
        schedule = build(lengths, buckets, token_budget=256, epoch=epoch)
        job = next(j for j in range(schedule.num_jobs) if 0 in schedule.rows_of(j))
        assert schedule.job_bucket[job] == 1
        fillers.append(int(schedule.rows_of(job).max()))
    counts = np.bincount(fillers, minlength=9)[1:]
    assert counts.min() >= 50 - 5 * 7
    assert counts.max() <= 50 + 5 * 7


def test_shuffle_mixes_all_buckets_over_the_whole_list() -> None:
    lengths, buckets = one_bucket_per_job([300, 100, 20])
    where = [np.flatnonzero(build(lengths, buckets, epoch=e).job_bucket == 2) for e in range(50)]
    # 1,000 uniform places in 0..419: the mean has a sigma of 121 / sqrt(1000) = 3.8.
    assert abs(np.mean(where) - 209.5) < 5 * 3.8
    assert np.min(where) < 20
    assert np.max(where) > 400
    assert len({w.tobytes() for w in where}) == 50


@pytest.mark.parametrize("epoch", range(5))
def test_interleave_spreads_each_bucket_evenly(epoch: int) -> None:
    counts = [300, 100, 20, 1]
    lengths, buckets = one_bucket_per_job(counts)
    schedule = build(lengths, buckets, order="interleave", epoch=epoch)
    assert np.bincount(schedule.job_bucket).tolist() == counts
    for bucket, count in enumerate(counts):
        every = schedule.num_jobs / count
        places = np.flatnonzero(schedule.job_bucket == bucket)
        # Ideal places are i * every plus a phase; each other bucket moves one by at most one job.
        assert np.abs(np.diff(places) - every).max(initial=0) <= len(counts)
    other = build(lengths, buckets, order="interleave", epoch=epoch + 1)
    assert not np.array_equal(schedule.job_rows, other.job_rows)


def test_a_bucket_without_samples_gets_no_job() -> None:
    schedule = build(np.array([300, 310]), (Bucket(64, 8), Bucket(128, 4), Bucket(320, 1), Bucket(512, 1)))
    assert schedule.job_bucket.tolist() == [2, 2]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"order": "sorted"}, "order must be 'shuffle' or 'interleave'; found 'sorted'"),
        ({"draw": "random"}, "draw must be"),
        ({"min_ready": 0}, "min_ready and jobs_per_step must be at least 1; found 0 and 8"),
        ({"jobs_per_step": 0}, "at least 1; found 10 and 0"),
        ({"buckets": ()}, "ascending order"),
        ({"buckets": (Bucket(128, 1), Bucket(64, 1))}, "ascending order"),
        ({"buckets": (Bucket(64, 1),)}, "must hold the longest sample, 100 tokens; found 64"),
        ({"buckets": (Bucket(128, 200),)}, "rows \\* length <= token_budget = 16384"),
    ],
)
def test_build_epoch_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(np.array([100, 20]), **{"buckets": (Bucket(128, 8),), **changes})


# ---- draw order ----


def windows(schedule: EpochSchedule, size: int) -> list[list[int]]:
    """The jobs that each draw may choose from: the `size` lowest not yet drawn."""
    left = list(range(schedule.num_jobs))
    found = []
    for job in schedule.draw_order.tolist():
        found.append(left[:size])
        left.remove(job)
    return found


@pytest.mark.parametrize("min_ready", [1, 2, 10, 1000])
def test_every_draw_is_among_the_oldest_jobs_not_yet_drawn(min_ready: int) -> None:
    lengths, buckets = one_bucket_per_job([150, 40, 11])
    schedule = build(lengths, buckets, min_ready=min_ready)
    assert sorted(schedule.draw_order.tolist()) == list(range(201))
    assert schedule.min_ready == min(min_ready, 201)
    for job, window in zip(schedule.draw_order.tolist(), windows(schedule, min_ready), strict=True):
        assert job in window
    if min_ready == 1:
        assert schedule.draw_order.tolist() == list(range(201))


def test_draws_are_uniform_in_their_window() -> None:
    lengths, buckets = one_bucket_per_job([30])
    places = np.zeros((30, 5), dtype=int)
    for epoch in range(1000):
        schedule = build(lengths, buckets, min_ready=5, epoch=epoch)
        for i, window in enumerate(windows(schedule, 5)):
            places[i, window.index(schedule.draw_order[i])] += 1
    full = places[:26]  # 1,000 draws from 5 jobs each: sigma of a count is 12.6
    assert np.abs(full - 200).max() < 5 * 12.6
    chi_square = ((full - 200) ** 2 / 200).sum()  # 26 * 4 degrees of freedom, sigma 14.4
    assert abs(chi_square - 104) < 5 * 14.4
    assert places[29].tolist() == [1000, 0, 0, 0, 0]


@pytest.mark.parametrize("jobs_per_step", [2, 3, 8])
def test_a_step_has_one_bucket_only_where_the_window_had_no_other(jobs_per_step: int) -> None:
    lengths, buckets = one_bucket_per_job([170, 12, 6])
    redrawn = set()
    for epoch in range(60):
        schedule = build(lengths, buckets, min_ready=10, jobs_per_step=jobs_per_step, epoch=epoch)
        plain = build(lengths, buckets, min_ready=10, jobs_per_step=1, epoch=epoch)
        assert np.array_equal(schedule.job_bucket, plain.job_bucket)
        if not np.array_equal(schedule.draw_order, plain.draw_order):
            first = int(np.argmax(schedule.draw_order != plain.draw_order))
            assert first % jobs_per_step == jobs_per_step - 1
            step = plain.draw_order[first + 1 - jobs_per_step : first + 1]
            assert len(set(plain.job_bucket[step].tolist())) == 1  # other steps stay as drawn
            redrawn.add((schedule.draw_order[first] - first).item())
        seen = windows(schedule, 10)
        for step, mix in enumerate(length_mix(schedule)):
            last = step * jobs_per_step + jobs_per_step - 1
            if (mix > 0).sum() == 1 and last < schedule.num_jobs:
                assert len(set(schedule.job_bucket[seen[last]].tolist())) == 1
    assert len(redrawn) > 3  # not always the same place of the window


def test_redrawn_jobs_are_uniform_among_the_other_buckets() -> None:
    # The window is the whole list of 2 A and 3 B. If the first pick is an A (2 of 5), the second is a B, each alike.
    lengths, buckets = one_bucket_per_job([2, 3])
    second = []
    for epoch in range(3000):
        schedule = build(lengths, buckets, min_ready=5, jobs_per_step=2, epoch=epoch)
        first, last = schedule.draw_order[:2]
        assert schedule.job_bucket[first] != schedule.job_bucket[last]
        if schedule.job_bucket[first] == 0:
            second.append(np.flatnonzero(schedule.job_bucket == 1).tolist().index(last))
    counts = np.bincount(second)
    assert abs(counts.sum() - 1200) < 5 * 27
    assert np.abs(counts - counts.sum() / 3).max() < 5 * 16.4


def test_length_mix_counts_every_step() -> None:
    lengths, buckets = one_bucket_per_job([13, 6, 2])
    schedule = build(lengths, buckets, jobs_per_step=4)
    mix = length_mix(schedule)
    assert mix.shape == (6, 3)
    assert mix.sum(axis=1).tolist() == [4, 4, 4, 4, 4, 1]
    assert mix.sum(axis=0).tolist() == [13, 6, 2]
    for step in range(6):
        jobs = schedule.draw_order[step * 4 : step * 4 + 4]
        assert mix[step].tolist() == [int((schedule.job_bucket[jobs] == b).sum()) for b in range(3)]


@pytest.mark.parametrize("draw", ["ready", "round_robin"])
def test_other_draws_have_no_order(draw: Any) -> None:
    schedule = build(log_normal(100), draw=draw)
    assert schedule.draw_order.shape == (0,)
    with pytest.raises(ValueError, match=f"only for draw 'seeded'; found '{draw}'"):
        length_mix(schedule)


# ---- determinism, file, scale ----


def test_random_keys_are_pinned() -> None:
    # A run resumed under another numpy must draw the same numbers.
    first = random_keys(3, Purpose.DRAW, seed=7, epoch=2, index=5).tolist()
    assert first == [14688391305020295404, 13362631371893497944, 12507237807194071159]
    others = [
        random_keys(3, purpose, seed=seed, epoch=epoch, index=index).tolist()
        for purpose, seed, epoch, index in [(Purpose.ROWS, 7, 2, 5), (3, 8, 2, 5), (3, 7, 3, 5), (3, 7, 2, 6)]
    ]
    assert len({tuple(keys) for keys in [first, *others]}) == 5


def test_fingerprint_is_a_function_of_everything_and_nothing_else() -> None:
    lengths = log_normal(500)
    base = build(lengths)
    assert build(lengths.astype(np.int64)).fingerprint == base.fingerprint
    changes: list[dict[str, Any]] = [
        {"seed": 2},
        {"epoch": 1},
        {"order": "interleave"},
        {"draw": "ready"},
        {"min_ready": 9},
        {"jobs_per_step": 7},
        {"data_fingerprint": "other"},
    ]
    assert len({base.fingerprint, *(build(lengths, **change).fingerprint for change in changes)}) == 8


def test_fingerprint_is_stable_across_processes() -> None:
    code = (
        "import numpy as np; from dflash_graph.schedule import *\n"
        "lengths = np.arange(1, 900); buckets = choose_buckets(lengths, token_budget=4096, num_buckets=5)\n"
        "print(build_epoch(lengths, buckets, seed=3, epoch=4, order='interleave', draw='seeded', min_ready=4,"
        " jobs_per_step=4, data_fingerprint='d', token_budget=4096).fingerprint)"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **extra}
        ).stdout.strip()
        for extra in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    ]
    assert printed[0] == printed[1]
    assert len(printed[0]) == 64


def assert_equal(a: EpochSchedule, b: EpochSchedule) -> None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            assert np.array_equal(value, other), name
        else:
            assert value == other, name


def test_save_and_load(tmp_path: Path) -> None:
    schedule = build(log_normal(300), order="interleave", epoch=2**31)
    path = tmp_path / "epoch_0000.npz"
    path.write_bytes(b"an older file")
    schedule.save(path)
    loaded = EpochSchedule.load(path)
    assert_equal(loaded, schedule)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ValueError, match="read-only"):
        loaded.job_rows[0] = 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "epoch.npz"
    old = build(log_normal(50))
    old.save(path)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(OSError, match="no space"):
        build(log_normal(50), epoch=1).save(path)
    assert_equal(EpochSchedule.load(path), old)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_load_refuses_every_damage(tmp_path: Path) -> None:
    schedule = build(log_normal(40))
    path = tmp_path / "epoch.npz"
    schedule.save(path)
    whole = path.read_bytes()
    refused = 0
    for i in range(0, len(whole), 3):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
        message = None
        try:
            loaded = EpochSchedule.load(path)
        except ValueError as error:
            message = str(error)
        if message is None:
            assert_equal(loaded, schedule)  # a byte that means nothing, such as a time stamp
        else:
            assert str(path) in message
            refused += 1
    assert refused > len(whole) // 6
    for end in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"epoch\.npz"):
            EpochSchedule.load(path)


class RunsWhenUnpickled:
    """What a hostile file would hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "was_run"),)


def test_load_refuses_changed_content_other_formats_and_pickles(tmp_path: Path) -> None:
    schedule = build(log_normal(40))
    path = tmp_path / "epoch.npz"
    replace(schedule, job_rows=schedule.job_rows[::-1].copy()).save(path)
    with pytest.raises(ValueError, match=r"epoch\.npz is damaged: its content has fingerprint"):
        EpochSchedule.load(path)
    replace(schedule, jobs_per_step=9).save(path)
    with pytest.raises(ValueError, match="states " + schedule.fingerprint):
        EpochSchedule.load(path)

    schedule.save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    header = json.loads(arrays["header"].tobytes())
    arrays["header"] = np.frombuffer(json.dumps({**header, "format": 99}).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="must have format 1; found 99"):
        EpochSchedule.load(path)

    np.savez(path, **{**arrays, "job_rows": np.array([RunsWhenUnpickled(tmp_path)], dtype=object)})
    with pytest.raises(ValueError, match=r"epoch\.npz is damaged"):
        EpochSchedule.load(path)
    assert not (tmp_path / "was_run").exists()
    with pytest.raises(FileNotFoundError):
        EpochSchedule.load(tmp_path / "missing.npz")


def test_one_million_samples_in_time_and_memory() -> None:
    lengths = log_normal(1_000_000)
    tracemalloc.start()
    started = time.perf_counter()
    schedule = build(lengths)
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert schedule.num_jobs > 50_000
    assert seconds < 10
    assert peak < 1e9
