"""A rank's share of an epoch: every job once, over all ranks; step by step; whatever the numbers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_graph.rank_share import RankShare, proportional
from dflash_graph.schedule import Draw, EpochSchedule, build_epoch, choose_buckets


def epoch_of(num_jobs: int, jobs_per_step: int, draw: Draw = "seeded", min_ready: int = 4) -> EpochSchedule:
    lengths = np.full(num_jobs, 64, dtype=np.int32)
    return build_epoch(
        lengths, choose_buckets(lengths, token_budget=64, num_buckets=1), seed=3, epoch=0, order="shuffle", draw=draw,
        min_ready=min_ready, jobs_per_step=jobs_per_step, data_fingerprint="x", token_budget=64,
    )  # fmt: skip


def shares(rank_jobs: tuple[int, ...]) -> list[RankShare]:
    return [RankShare(rank_jobs, rank) for rank in range(len(rank_jobs))]


@pytest.mark.parametrize(
    "total, weights, expected",
    [
        (8, [2, 2, 1], (3, 3, 2)), (8, [1, 1, 1], (3, 3, 2)), (10, [2, 2, 1], (4, 4, 2)), (2, [1, 1, 1], (1, 1, 0)),
        (7, [1], (7,)),
    ],
)  # fmt: skip
def test_jobs_in_proportion_to_targets(total: int, weights: list[int], expected: tuple[int, ...]) -> None:
    assert proportional(total, weights) == expected


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_proportional_is_exact_and_within_one(total: int, weights: list[int]) -> None:
    found = proportional(total, weights)
    assert sum(found) == total
    assert all(abs(f - total * w / sum(weights)) < 1 for f, w in zip(found, weights, strict=True))


def test_pattern_is_strided() -> None:
    assert RankShare((4, 4, 2), 0).pattern.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
    assert RankShare((2, 2), 0).pattern.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("bad", [((), 0), ((0, 0), 0), ((2, -1), 0), ((1, 1), 2)])
def test_bad_shares_are_refused(bad: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(ValueError, match="must"):
        RankShare(*bad)


WORLDS = [(1,), (1, 1), (3, 3, 2), (4, 4), (5, 0, 3), (1, 1, 1, 1, 1, 1, 1)]


@pytest.mark.parametrize("rank_jobs", WORLDS)
@pytest.mark.parametrize("draw", ["seeded", "ready"])
@pytest.mark.parametrize("num_jobs", [1, 2, 3, 6, 7, 8, 13, 97])
def test_each_job_once_and_the_same_steps_as_one_rank(rank_jobs: tuple[int, ...], draw: Draw, num_jobs: int) -> None:
    group = sum(rank_jobs)
    schedule = epoch_of(num_jobs, group, draw)
    all_shares = shares(rank_jobs)
    lists = [share.jobs(schedule).tolist() for share in all_shares]
    assert sorted(job for jobs in lists for job in jobs) == list(range(num_jobs))
    # Step by step: the quotas of all ranks make the same set of jobs as one rank would train.
    alone, done = RankShare((group,), 0).jobs(schedule).tolist(), [0] * len(lists)
    for start in range(0, num_jobs, group):
        window = min(group, num_jobs - start)
        step = []
        for rank, share in enumerate(all_shares):
            step += lists[rank][done[rank] : done[rank] + share.quota(window)]
            done[rank] += share.quota(window)
        assert sorted(step) == sorted(alone[start : start + window])
    assert done == [len(jobs) for jobs in lists]


@given(st.integers(0, 60), st.sampled_from(WORLDS), st.sampled_from(WORLDS))
def test_another_world_trains_what_is_left(steps: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """A run that stopped at a step's end goes on with other ranks: exactly the jobs left, each once."""
    schedule = epoch_of(61, 8)
    done = schedule.draw_order[: min(61, 8 * steps)]
    trained = np.zeros(61, dtype=bool)
    trained[done] = True
    for rank_jobs in (before, after):
        lists = [share.jobs(schedule, trained).tolist() for share in shares(rank_jobs)]
        assert sorted(job for jobs in lists for job in jobs) == sorted(set(range(61)) - set(done.tolist()))


@given(st.integers(1, 80), st.integers(1, 12), st.sampled_from(WORLDS))
def test_a_rank_never_waits_behind_more_than_the_window(
    num_jobs: int, min_ready: int, rank_jobs: tuple[int, ...]
) -> None:
    """When a rank waits for its next job, fewer than min_ready of its own undrawn jobs are older: no deadlock."""
    schedule = epoch_of(num_jobs, sum(rank_jobs), min_ready=min_ready)
    for share in shares(rank_jobs):
        own = share.jobs(schedule)
        for i, job in enumerate(own):
            assert (own[i:] < job).sum() < min_ready


def test_quotas_add_up_and_grow_by_one() -> None:
    for rank_jobs in WORLDS:
        for window in range(sum(rank_jobs) + 1):
            assert sum(share.quota(window) for share in shares(rank_jobs)) == window
        for share in shares(rank_jobs):
            quotas = [share.quota(window) for window in range(sum(rank_jobs) + 1)]
            assert all(0 <= b - a <= 1 for a, b in pairwise(quotas))
            assert quotas[-1] == share.rank_jobs[share.rank]
