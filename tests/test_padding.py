"""Padded jobs against tables worked out by hand and plain loops, and the statistics of the anchor draw."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_graph.control import RunControl
from dflash_graph.dispatch import Dispatcher, JobShape, PaddedJob, draw_anchors, find_candidates, pad_job
from dflash_graph.schedule import Bucket, EpochSchedule, build_epoch, choose_buckets


class Rows:
    """In-memory stand-in for `TokenRows`."""

    fingerprint = "data"

    def __init__(self, rows: list[tuple[list[int], list[int]]]) -> None:
        self._rows = [(np.array(tokens, np.int32), np.array(mask, np.uint8)) for tokens, mask in rows]
        self.lengths = np.array([len(tokens) for tokens, _ in rows], np.int32)

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows[i]


def random_rows(lengths: list[int], seed: int = 0, vocab: int = 50) -> Any:
    rng = np.random.default_rng(seed)
    return Rows([(rng.integers(1, vocab, n).tolist(), (rng.random(n) < 0.7).astype(int).tolist()) for n in lengths])


def make_shape(**changes: Any) -> JobShape:
    values: dict[str, Any] = {
        "token_budget": 256,
        "num_anchors": 32,
        "block_size": 4,
        "gamma": 2.0,
        "anchor_rate": 0.25,
        "num_anchors_per_sample": None,
        "seed": 0,
        "head_index": None,
        **changes,
    }
    return JobShape(**values)


def make_schedule(rows: Any, buckets: tuple[Bucket, ...] | None = None, **changes: Any) -> EpochSchedule:
    values: dict[str, Any] = {
        "seed": 1,
        "epoch": 0,
        "order": "shuffle",
        "draw": "seeded",
        "min_ready": 4,
        "jobs_per_step": 2,
        "data_fingerprint": "data",
        "token_budget": 256,
        **changes,
    }
    if buckets is None:
        buckets = choose_buckets(rows.lengths, token_budget=values["token_budget"], num_buckets=4)
    return build_epoch(rows.lengths, buckets, **values)


# ---- one job by hand ----

# position   0   1   2   3   4   5   6   7   8   9  10  11
TOKENS = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
MASK = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]
# Candidates (mask 1 here and at the next position): 3, 4, 7, 10. Fewer than 8, so all of them are anchors.
# K = 4, gamma 2: anchor 3 trains 4 (k=1) and 5 (k=2), not 6 (mask 0);
#                 anchor 4 trains 5 (k=1) and 7 (k=3); anchor 7 trains 8 (k=1) and 10 (k=3), not 9;
#                 anchor 10 trains 11 (k=1); 12 and 13 are outside the row.
# Index a*K + k: 0*4+1, 0*4+2, 1*4+1, 1*4+3, 2*4+1, 2*4+3, 3*4+1.
TRAINED = [1, 2, 5, 7, 9, 11, 13]
LABELS = [14, 15, 15, 17, 18, 20, 21]
W1, W2, W3 = 1.0, 0.6065306597126334, 0.36787944117144233  # exp(0), exp(-1/2), exp(-2/2)
WEIGHTS = [W1, W2, W1, W3, W1, W3, W1]


def padded_list(values: list[Any], size: int, fill: Any) -> list[Any]:
    return values + [fill] * (size - len(values))


def test_a_row_of_12_tokens_by_hand() -> None:
    rows: Any = Rows([(TOKENS, MASK)])
    shape = make_shape(token_budget=64, num_anchors=6)
    job = pad_job(rows, make_schedule(rows, token_budget=64), 0, shape)

    assert job.token_ids.tolist() == padded_list(TOKENS, 64, 0)
    assert job.positions.tolist() == padded_list(list(range(12)), 64, 0)
    assert job.row_ids.tolist() == padded_list([0] * 12, 64, -1)
    assert job.anchors.tolist() == [3, 4, 7, 10, 0, 0]
    assert job.anchor_row_starts.tolist() == [0, 0, 0, 0, 0, 0]
    assert job.anchor_tokens.tolist() == [13, 14, 17, 20, 0, 0]
    assert job.trained_rows.tolist() == padded_list(TRAINED, 18, 0)
    assert job.labels.tolist() == padded_list(LABELS, 18, -100)
    assert job.weights.tolist() == pytest.approx(padded_list(WEIGHTS, 18, 0.0), abs=1e-7)
    assert (job.epoch, job.index, job.bucket, job.bucket_length, job.num_rows) == (0, 0, 0, 64, 1)
    assert (job.num_anchors, job.num_trained_rows, job.num_tokens) == (4, 7, 12)
    # Positions 4, 5, 7, 8, 10, 11 are trained, of the supervised 3, 4, 5, 7, 8, 10, 11.
    assert (job.num_supervised, job.num_candidates, job.num_covered) == (7, 4, 6)


def test_teacher_positions_of_that_row_by_hand() -> None:
    """Labels lie at 4, 5, 5, 7, 8, 10, 11: the target predicts them at the positions before, each read once."""
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(
        rows, make_schedule(rows, token_budget=64), 0, make_shape(token_budget=64, num_anchors=6, with_teacher=True)
    )
    assert job.teacher_positions is not None
    assert job.teacher_rows is not None
    assert job.teacher_positions.tolist() == padded_list([3, 4, 6, 7, 9, 10], 18, 0)
    assert job.teacher_rows.tolist() == padded_list([0, 1, 1, 2, 3, 4, 5], 18, 0)
    assert job.num_covered == 6
    without = pad_job(rows, make_schedule(rows, token_budget=64), 0, make_shape(token_budget=64, num_anchors=6))
    assert without.teacher_positions is without.teacher_rows is None


def test_teacher_positions_with_a_reduced_head_by_hand() -> None:
    """Only labels 15 (at 5, twice), 18 (at 8) and 21 (at 11) are trained."""
    head = np.full(22, -1, np.int32)
    head[[15, 18, 21]] = [0, 1, 2]
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(rows, make_schedule(rows), 0, make_shape(num_anchors=6, head_index=head, with_teacher=True))
    assert job.teacher_positions is not None
    assert job.teacher_rows is not None
    assert job.teacher_positions.tolist() == padded_list([4, 7, 10], 18, 0)
    assert job.teacher_rows.tolist() == padded_list([0, 0, 1, 2], 18, 0)
    assert job.num_covered == 3


@pytest.mark.parametrize("num_anchors, budget, most", [(6, 64, 18), (32, 96, 96), (21, 64, 63), (22, 64, 64)])
def test_most_teacher_positions(num_anchors: int, budget: int, most: int) -> None:
    """A * (K - 1) rows, or every position of the job if there are more rows than that."""
    rows: Any = Rows([(TOKENS, MASK)])
    shape = make_shape(token_budget=budget, num_anchors=num_anchors, with_teacher=True)
    job = pad_job(rows, make_schedule(rows, token_budget=budget), 0, shape)
    assert job.teacher_positions is not None
    assert shape.max_teacher_positions == len(job.teacher_positions) == most


def test_without_a_decay_every_trained_row_weighs_one() -> None:
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(rows, make_schedule(rows), 0, make_shape(num_anchors=6, gamma=None))
    assert job.weights.tolist() == padded_list([1.0] * 7, 18, 0.0)
    assert job.trained_rows.tolist() == padded_list(TRAINED, 18, 0)


@pytest.mark.parametrize("with_teacher", [False, True])
def test_dtypes_are_those_of_the_slots(with_teacher: bool) -> None:
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(rows, make_schedule(rows), 0, make_shape(with_teacher=with_teacher))
    dtypes = {name: value.dtype for name, value in vars(job).items() if isinstance(value, torch.Tensor)}
    assert dtypes == {
        **({"teacher_positions": torch.int64, "teacher_rows": torch.int64} if with_teacher else {}),
        "token_ids": torch.int64,
        "positions": torch.int64,
        "row_ids": torch.int32,
        "anchors": torch.int64,
        "anchor_row_starts": torch.int64,
        "anchor_tokens": torch.int64,
        "trained_rows": torch.int64,
        "labels": torch.int64,
        "weights": torch.float32,
    }


def test_second_row_anchors_at_row_start_and_end() -> None:
    # Row 0 fills its 64 positions to the last one: its neighbour's first token must be neither candidate nor label.
    # Row 1 has 3 tokens, fewer than K: anchors 64 (empty context) and 65, the last with a next token.
    first, second = list(range(100, 164)), [7, 8, 9]
    rows: Any = Rows([(first, [0] * 62 + [1, 1]), (second, [1, 1, 1])])
    schedule = make_schedule(rows, (Bucket(64, 2),), token_budget=130)
    order = schedule.rows_of(0).tolist()
    start = {sample: 64 * r for r, sample in enumerate(order)}
    job = pad_job(rows, schedule, 0, make_shape(token_budget=130, num_anchors=5))

    anchors = sorted([(start[0] + 62, 162, start[0]), (start[1], 7, start[1]), (start[1] + 1, 8, start[1])])
    assert job.anchors.tolist() == [*(a for a, _, _ in anchors), 0, 0]
    assert job.anchor_tokens.tolist() == [*(token for _, token, _ in anchors), 0, 0]
    assert job.anchor_row_starts.tolist() == [*(s for _, _, s in anchors), 0, 0]
    if order == [0, 1]:
        # a=0 (62): k=1; a=1 (64): k=1, 2; a=2 (65): k=1.
        assert job.trained_rows.tolist() == padded_list([1, 5, 6, 9], 15, 0)
        assert job.labels.tolist() == padded_list([163, 8, 9, 9], 15, -100)
    else:
        # a=0 (0): k=1, 2; a=1 (1): k=1; a=2 (64 + 62): k=1.
        assert job.trained_rows.tolist() == padded_list([1, 2, 5, 9], 15, 0)
        assert job.labels.tolist() == padded_list([8, 9, 9, 163], 15, -100)
    assert (job.num_trained_rows, job.num_covered, job.num_candidates) == (4, 3, 3)
    assert job.num_supervised == 4  # the mask of row 1's first token has no token before it
    assert job.num_tokens == 67
    assert job.row_ids[128:].tolist() == [-1, -1]
    assert job.positions[start[1] : start[1] + 5].tolist() == [0, 1, 2, 0, 0]


def test_both_orders_of_the_two_rows_occur() -> None:
    rows: Any = Rows([([1] * 64, [1] * 64), ([2] * 3, [1] * 3)])
    orders = {tuple(make_schedule(rows, (Bucket(64, 2),), epoch=e).rows_of(0).tolist()) for e in range(20)}
    assert orders == {(0, 1), (1, 0)}


def test_reduced_head_maps_labels_and_drops_rows_outside() -> None:
    head = np.full(22, -1, np.int32)
    head[[15, 18, 21]] = [0, 1, 2]
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(rows, make_schedule(rows), 0, make_shape(num_anchors=6, head_index=head))
    # Of LABELS only 15, 15, 18, 21 are in the head. All anchors stay drawn, and the index stays a*K+k.
    assert job.num_anchors == 4
    assert job.trained_rows.tolist() == padded_list([2, 5, 9, 13], 18, 0)
    assert job.labels.tolist() == padded_list([0, 0, 1, 2], 18, -100)
    assert job.weights.tolist() == pytest.approx(padded_list([W2, W1, W1, W1], 18, 0.0), abs=1e-7)
    assert (job.num_trained_rows, job.num_covered) == (4, 3)


def test_a_weight_that_rounds_to_zero_is_not_trained() -> None:
    rows: Any = Rows([(TOKENS, MASK)])
    job = pad_job(rows, make_schedule(rows), 0, make_shape(gamma=0.005))  # exp(-200) is 0 in float32
    assert job.trained_rows[:5].tolist() == [1, 5, 9, 13, 0]
    assert job.num_trained_rows == 4


def test_a_job_without_candidates() -> None:
    rows: Any = Rows([([1, 2, 3], [0, 1, 0]), ([4], [1])])
    job = pad_job(rows, make_schedule(rows), 0, make_shape())
    assert (job.num_anchors, job.num_trained_rows, job.num_candidates, job.num_covered) == (0, 0, 0, 0)
    assert (job.num_tokens, job.num_supervised) == (4, 1)
    assert not job.anchors.any()
    assert not job.weights.any()
    assert (job.labels == -100).all()


def reference(rows: Any, schedule: EpochSchedule, index: int, job: PaddedJob, shape: JobShape) -> None:
    """Check every field of a padded job with plain loops over its rows; the anchors are taken as drawn."""
    length, k_size = job.bucket_length, shape.block_size
    token_ids, positions, row_ids = [0] * shape.token_budget, [0] * shape.token_budget, [-1] * shape.token_budget
    mask, candidates, row_of = {}, set(), {}
    samples = schedule.rows_of(index).tolist()
    for r, sample in enumerate(samples):
        tokens, loss_mask = (x.tolist() for x in rows.row(sample))
        for p, token in enumerate(tokens):
            at = r * length + p
            token_ids[at], positions[at], row_ids[at], mask[at], row_of[at] = token, p, r, loss_mask[p], r
            if loss_mask[p] and p + 1 < len(tokens) and loss_mask[p + 1]:
                candidates.add(at)
    anchors = job.anchors[: job.num_anchors].tolist()
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= candidates
    trained, labels, weights, covered, before = [], [], [], set(), []
    for a, anchor in enumerate(anchors):
        for k in range(1, k_size):
            at = anchor + k
            if row_of.get(at) != row_of[anchor] or not mask[at]:
                continue
            label = token_ids[at] if shape.head_index is None else int(shape.head_index[token_ids[at]])
            if label >= 0:
                trained.append(a * k_size + k)
                labels.append(label)
                weights.append(np.exp(-(k - 1) / shape.gamma))
                covered.add(at)
                before.append(at - 1)
    num_max = shape.num_anchors * (k_size - 1)
    assert job.token_ids.tolist() == token_ids
    assert job.positions.tolist() == positions
    assert job.row_ids.tolist() == row_ids
    assert job.anchors.tolist() == padded_list(anchors, shape.num_anchors, 0)
    starts = [row_of[a] * length for a in anchors]
    assert job.anchor_row_starts.tolist() == padded_list(starts, shape.num_anchors, 0)
    assert job.anchor_tokens.tolist() == padded_list([token_ids[a] for a in anchors], shape.num_anchors, 0)
    assert job.trained_rows.tolist() == padded_list(trained, num_max, 0)
    assert job.labels.tolist() == padded_list(labels, num_max, -100)
    assert job.weights.tolist() == pytest.approx(padded_list(weights, num_max, 0.0), rel=1e-6)
    counts = (job.num_rows, job.num_trained_rows, job.num_tokens, job.num_candidates, job.num_covered)
    assert counts == (len(samples), len(trained), len(mask), len(candidates), len(covered))
    if shape.with_teacher:
        assert job.teacher_positions is not None
        assert job.teacher_rows is not None
        positions_max = min(num_max, shape.token_budget)
        assert job.teacher_positions.tolist() == padded_list(sorted(set(before)), positions_max, 0)
        assert job.teacher_positions[job.teacher_rows[: len(trained)]].tolist() == before
        assert not job.teacher_rows[len(trained) :].any()
    assert job.num_supervised == sum(m for at, m in mask.items() if positions[at] > 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.integers(2, 9),
    st.sampled_from([3, 17, 64]),
    st.booleans(),
    st.sampled_from([None, 1, 20]),
    st.integers(0, 5),
)
def test_padded_jobs_equal_plain_loops(
    lengths: list[int], block_size: int, num_anchors: int, reduced: bool, per_sample: int | None, epoch: int
) -> None:
    rows = random_rows(lengths, seed=epoch)
    head = np.where(np.arange(50) % 3 > 0, np.arange(50) // 3, -1).astype(np.int32) if reduced else None
    shape = make_shape(
        token_budget=300,
        block_size=block_size,
        num_anchors=num_anchors,
        head_index=head,
        num_anchors_per_sample=per_sample,
        with_teacher=True,
    )
    schedule = make_schedule(rows, token_budget=300, epoch=epoch)
    for index in range(schedule.num_jobs):
        reference(rows, schedule, index, pad_job(rows, schedule, index, shape), shape)


def test_shapes_do_not_depend_on_the_job() -> None:
    rows = random_rows([5, 30, 64, 65, 100, 128, 200, 256, 250, 40, 12, 90] * 3)
    schedule = make_schedule(rows)
    assert len(set(schedule.job_bucket.tolist())) > 1
    shapes = set()
    for index in range(schedule.num_jobs):
        job = pad_job(rows, schedule, index, make_shape(num_anchors=11))
        shapes.add(tuple((k, tuple(v.shape)) for k, v in vars(job).items() if isinstance(v, torch.Tensor)))
    assert shapes == {
        (
            *((name, (256,)) for name in ("token_ids", "positions", "row_ids")),
            *((name, (11,)) for name in ("anchors", "anchor_row_starts", "anchor_tokens")),
            *((name, (33,)) for name in ("trained_rows", "labels", "weights")),
        )
    }


# ---- anchor draw ----


def draw(counts: list[int], shape: JobShape, *, epoch: int = 0, job: int = 0, bucket_length: int = 1000) -> np.ndarray:
    """Anchors drawn from rows with candidates at their positions 0..counts[r]-1."""
    candidates = np.concatenate([r * bucket_length + np.arange(n) for r, n in enumerate(counts)])
    return draw_anchors(candidates, bucket_length=bucket_length, shape=shape, epoch=epoch, job=job)


@pytest.mark.parametrize(
    "changes, counts, expected",
    [
        # 0.25 * n rounded half up, at least min(8, n).
        ({}, [1, 8, 9, 34, 35, 37, 38, 400], [1, 8, 8, 9, 9, 9, 10, 100]),
        ({}, [33, 34, 36], [8, 9, 9]),
        ({"anchor_rate": 1.0}, [1, 9, 50], [1, 9, 50]),
        ({"anchor_rate": 0.01}, [5, 900], [5, 9]),
        ({"num_anchors_per_sample": 5}, [1, 5, 6, 900], [1, 5, 5, 5]),
        ({}, [0, 10, 0], [0, 8, 0]),
    ],
)
def test_number_of_anchors_per_row(changes: dict[str, Any], counts: list[int], expected: list[int]) -> None:
    anchors = draw(counts, make_shape(num_anchors=1000, **changes))
    assert np.bincount(anchors // 1000, minlength=len(counts)).tolist() == expected
    assert anchors.dtype == np.int64
    assert (np.diff(anchors) > 0).all()


def test_candidates_stay_in_their_row() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], np.uint8)  # rows of 4, and one position that no row uses
    assert find_candidates(mask, 4).tolist() == [0, 4]
    assert find_candidates(np.zeros(5, np.uint8), 4).tolist() == []
    assert find_candidates(np.ones(1, np.uint8), 1).tolist() == []


@pytest.mark.parametrize("changes", [{"num_anchors": 1000}, {"num_anchors": 40, "anchor_rate": 1.0}])
def test_draw_is_a_function_of_seed_epoch_and_job(changes: dict[str, Any]) -> None:
    # Once by the draw per row alone, once by the thinning alone.
    counts = [300, 200, 80]
    base = draw(counts, make_shape(**changes))
    assert np.array_equal(base, draw(counts, make_shape(**changes)))
    others = [
        draw(counts, make_shape(seed=1, **changes)),
        draw(counts, make_shape(**changes), epoch=1),
        draw(counts, make_shape(**changes), job=1),
    ]
    assert len({x.tobytes() for x in [base, *others]}) == 4


def chi_square_sigmas(counts: np.ndarray, expected: np.ndarray, variance: np.ndarray) -> float:
    """How many sigmas the sum of squared standardised counts is from its mean (degrees of freedom = cells, nearly)."""
    statistic = ((counts - expected) ** 2 / variance).sum()
    return float((statistic - len(counts)) / np.sqrt(2 * len(counts)))


def test_draw_is_uniform_inside_every_row() -> None:
    counts, epochs = [400, 100, 20, 3], 2000
    hits = np.zeros(4000)
    for epoch in range(epochs):
        hits[draw(counts, make_shape(num_anchors=1000), epoch=epoch)] += 1
    for r, (n, quota) in enumerate(zip(counts, [100, 25, 8, 3], strict=True)):
        mine = hits[r * 1000 : r * 1000 + n]
        assert mine.sum() == quota * epochs
        if quota < n:
            share = quota / n
            expected = np.full(n, share * epochs)
            assert abs(chi_square_sigmas(mine, expected, expected * (1 - share))) < 5
        else:
            assert (mine == epochs).all()  # a short row is trained whole, not starved


def test_thinning_takes_every_drawn_anchor_alike() -> None:
    # Rows draw 100 + 25 + 8 + 3 = 136 anchors, thinned to 34: each row keeps a quarter of its own, short or long.
    counts, epochs = [400, 100, 20, 3], 3000
    hits = np.zeros(4000)
    for epoch in range(epochs):
        anchors = draw(counts, make_shape(num_anchors=34), epoch=epoch)
        assert len(anchors) == 34
        assert (np.diff(anchors) > 0).all()
        hits[anchors] += 1
    for r, (n, quota) in enumerate(zip(counts, [100, 25, 8, 3], strict=True)):
        share = quota / n / 4
        mine = hits[r * 1000 : r * 1000 + n]
        assert np.abs(mine - share * epochs).max() < 5 * np.sqrt(epochs * share * (1 - share))
        # All rows draw the same share of their quota; sigma from 0.25 * 0.75 per drawn anchor.
        assert abs(mine.sum() - quota * epochs / 4) < 5 * np.sqrt(quota * epochs * 0.25 * 0.75)


def test_draw_without_rows() -> None:
    anchors = draw_anchors(np.zeros(0, np.int64), bucket_length=64, shape=make_shape(), epoch=0, job=0)
    assert anchors.shape == (0,)


# ---- errors and speed ----


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 1}, "block_size >= 2"),
        ({"num_anchors": 0}, "num_anchors >= 1"),
        ({"gamma": 0.0}, "gamma > 0"),
        ({"anchor_rate": 1.5}, "anchor_rate <= 1"),
        ({"num_anchors_per_sample": 0}, "num_anchors_per_sample must be at least 1"),
        ({"head_index": np.zeros(3)}, r"head_index must be \(vocab,\) int32; found \(3,\) float64"),
    ],
)
def test_shape_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(**changes)


def test_a_schedule_of_other_data_or_budget_is_refused() -> None:
    rows = random_rows([10, 20])
    with pytest.raises(ValueError, match="found data other and data"):
        pad_job(rows, make_schedule(rows, data_fingerprint="other"), 0, make_shape())
    with pytest.raises(ValueError, match="budgets 256 and 512"):
        pad_job(rows, make_schedule(rows), 0, make_shape(token_budget=512))


@pytest.mark.parametrize("length", [64, 4096])
def test_padding_a_large_job_takes_milliseconds(length: int) -> None:
    rows = random_rows([length] * (16384 // length), vocab=1000)
    schedule = make_schedule(rows, token_budget=16384)
    shape = make_shape(token_budget=16384, num_anchors=2048, block_size=16, head_index=np.arange(1000, dtype=np.int32))
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        job = pad_job(rows, schedule, 0, shape)
        seconds.append(time.perf_counter() - started)
    assert job.num_anchors > 1000
    assert min(seconds) < 0.02  # about 2 ms on one core; a Python loop over anchors takes 10 times the limit


def test_jobs_padded_in_parallel_equal_jobs_padded_alone() -> None:
    rows = random_rows(np.random.default_rng(0).integers(3, 256, 60).tolist())
    shape = make_shape()
    schedules = [make_schedule(rows, epoch=e) for e in range(2)]
    jobs = [(schedule, i) for schedule in schedules for i in range(schedule.num_jobs)]
    dispatcher = Dispatcher(RunControl(), iter(jobs), lambda s, i: pad_job(rows, s, i, shape), num_workers=3, window=5)
    for schedule, index in jobs:
        job = dispatcher.take("t")
        assert job is not None
        assert (job.epoch, job.index) == (schedule.epoch, index)
        alone = pad_job(rows, schedule, index, shape)
        for name, value in vars(alone).items():
            np.testing.assert_array_equal(value, getattr(job, name), err_msg=name)
    assert dispatcher.take("t") is None
    dispatcher.close()


def test_rows_and_whole_blocks_are_counted_with_labels_outside_the_head() -> None:
    """By hand, from the table above: a head without tokens 15 and 21 trains less, but misses there still count."""
    head = np.full(32, -1, np.int32)
    kept = [t for t in range(32) if t not in (15, 21)]
    head[kept] = np.arange(len(kept))
    for head_index, num_trained in ((None, 7), (head, 4)):
        rows = Rows([(TOKENS, MASK)])
        job = pad_job(rows, make_schedule(rows), 0, make_shape(head_index=head_index))
        assert job.num_trained_rows == num_trained
        assert job.rows_per_k.tolist() == [4, 1, 2]
        assert job.blocks_per_k.tolist() == [4, 1, 0]
