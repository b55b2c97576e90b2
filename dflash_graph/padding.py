"""One job as fixed-shape host tensors: rows laid out in T positions, anchors drawn, trained rows listed.

Owns the row layout (row r of bucket length L occupies [r*L, r*L + length)), the anchor draw and the loss weights. A
padded job is a pure function of (data, schedule, job, shape), so a resumed run gets the very same one. numpy only, no
torch operator: it runs in the dispatcher's threads beside the workers. Called by `dispatch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash_graph.schedule import EpochSchedule, Purpose, random_keys

if TYPE_CHECKING:
    from dflash_graph.data import TokenRows

IGNORED_LABEL = -100
MIN_ANCHORS_PER_ROW = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class JobShape:
    """What fixes the shapes of a padded job and its anchor draw.

    Attributes:
        token_budget: T, positions of a job.
        num_anchors: A, anchors a job can hold.
        block_size: K; position 0 of a block is the anchor's real token and is not trained.
        gamma: decay of weight(k) = exp(-(k-1)/gamma); None is a weight of 1 for every row.
        anchor_rate: share of each row's candidates drawn, rounded half up, at least min(8, candidates).
        num_anchors_per_sample: if set, draw so many per row instead, or all candidates if there are fewer.
        seed: of the anchor draw.
        head_index: (vocab,) int32 from full token id to row of the reduced head, -1 outside; None is the full head.
        with_teacher: list the positions at which trained rows need the target's distribution.
    """

    token_budget: int
    num_anchors: int
    block_size: int
    gamma: float | None
    anchor_rate: float
    num_anchors_per_sample: int | None
    seed: int
    head_index: np.ndarray | None
    with_teacher: bool = False

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.num_anchors < 1 or self.block_size < 2:
            raise ValueError(
                "token_budget >= 1, num_anchors >= 1 and block_size >= 2 must hold; found "
                f"{self.token_budget}, {self.num_anchors} and {self.block_size}"
            )
        if (self.gamma is not None and not self.gamma > 0) or not 0 < self.anchor_rate <= 1:
            raise ValueError(f"gamma > 0 and 0 < anchor_rate <= 1 must hold; found {self.gamma} and {self.anchor_rate}")
        if self.num_anchors_per_sample is not None and self.num_anchors_per_sample < 1:
            raise ValueError(f"num_anchors_per_sample must be at least 1; found {self.num_anchors_per_sample}")
        head = self.head_index
        if head is not None and (head.ndim != 1 or head.dtype != np.int32):
            raise ValueError(f"head_index must be (vocab,) int32; found {head.shape} {head.dtype}")

    @property
    def max_teacher_positions(self) -> int:
        """U, most distinct positions at which the trained rows of a job can need the target's distribution."""
        return min(self.num_anchors * (self.block_size - 1), self.token_budget)


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedJob:
    """A job ready for a slot. Tensors are on the CPU and have the same shapes for every job.

    Attributes:
        epoch, index: the job's place in the schedule.
        bucket: index into the schedule's buckets; bucket_length: L of it; num_rows: live rows.
        token_ids: (T,) int64, 0 in padding.
        positions: (T,) int64 position in the row, 0 in padding.
        row_ids: (T,) int32, -1 in padding.
        anchors: (A,) int64 flat index into T, ascending, so sorted by (row, position); the unused tail is 0.
        anchor_row_starts: (A,) int64 flat index of the first position of the anchor's row; the unused tail is 0, so an
            unused anchor has an empty context.
        anchor_tokens: (A,) int64; the unused tail is 0.
        trained_rows: (A*(K-1),) int64, a*K + k of each trained row, ascending; the unused tail is 0.
        labels: (A*(K-1),) int64 head row to predict; -100 in the unused tail.
        weights: (A*(K-1),) float32; 0 in the unused tail.
        teacher_positions: (U,) int64 flat positions before the distinct trained labels, ascending: there the target
            says what it expects. The first `num_covered` are live; the unused tail is 0. None without a teacher.
        teacher_rows: (A*(K-1),) int64 index into them for each trained row; the unused tail is 0. None without.
        num_anchors, num_trained_rows: live entries of the above.
        num_tokens: real positions. num_supervised: tokens of the loss mask that have a token before them.
        num_candidates: positions that could be anchors. num_covered: distinct supervised tokens trained, and so the
            live entries of teacher_positions.
        rows_per_k, blocks_per_k: (K-1,) int64, supervised rows k = 1..K-1 of the blocks, and blocks whose rows 1..k are
            all supervised. A label outside the reduced head counts here: the drafter cannot get it right.
    """

    epoch: int
    index: int
    bucket: int
    bucket_length: int
    num_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    row_ids: torch.Tensor
    anchors: torch.Tensor
    anchor_row_starts: torch.Tensor
    anchor_tokens: torch.Tensor
    trained_rows: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    teacher_positions: torch.Tensor | None
    teacher_rows: torch.Tensor | None
    num_anchors: int
    num_trained_rows: int
    num_tokens: int
    num_supervised: int
    num_candidates: int
    num_covered: int
    rows_per_k: np.ndarray
    blocks_per_k: np.ndarray


def find_candidates(loss_mask: np.ndarray, bucket_length: int) -> np.ndarray:
    """Flat positions, ascending, where the loss mask is 1 and is 1 at the next position of the same row.

    Args:
        loss_mask: (T,) uint8, 0 in padding.
    """
    candidate = np.zeros(len(loss_mask), dtype=bool)
    np.logical_and(loss_mask[:-1], loss_mask[1:], out=candidate[:-1])
    candidate[bucket_length - 1 :: bucket_length] = False  # the next position belongs to the next row
    return np.flatnonzero(candidate)


def draw_anchors(candidates: np.ndarray, *, bucket_length: int, shape: JobShape, epoch: int, job: int) -> np.ndarray:
    """Draw anchors of a job from its candidates: per row uniformly without replacement, afresh each epoch.

    If the rows together draw more than A, the drawn anchors of the whole job are thinned uniformly to A, so that no row
    and no length is favoured.

    Args:
        candidates: flat positions, ascending, as `find_candidates` returns them.
        job: index of the job; with `shape.seed` and `epoch` it keys the generator.

    Returns:
        (n,) int64 flat positions, ascending, n <= A.
    """
    row = candidates // bucket_length
    counts = np.bincount(row)
    if shape.num_anchors_per_sample is not None:
        quota = np.minimum(counts, shape.num_anchors_per_sample)
    else:
        quota = np.floor(shape.anchor_rate * counts + 0.5).astype(np.int64)
        quota = np.maximum(quota, np.minimum(MIN_ANCHORS_PER_ROW, counts))
    keys = random_keys(len(candidates), Purpose.ANCHORS, seed=shape.seed, epoch=epoch, index=job)
    by_row_and_key = np.lexsort((keys, row))
    place = np.arange(len(candidates)) - (np.cumsum(counts) - counts)[row]
    drawn = by_row_and_key[place < quota[row]]
    if len(drawn) > shape.num_anchors:
        keys = random_keys(len(drawn), Purpose.THINNING, seed=shape.seed, epoch=epoch, index=job)
        drawn = drawn[np.argsort(keys, kind="stable")[: shape.num_anchors]]
    anchors: np.ndarray = candidates[np.sort(drawn)]
    return anchors


def pad_job(rows: TokenRows, schedule: EpochSchedule, job: int, shape: JobShape) -> PaddedJob:
    """Lay out one job of the schedule and fix its anchors, labels and weights.

    Raises:
        ValueError: the schedule was built from other data or for another token budget.
    """
    if schedule.data_fingerprint != rows.fingerprint or schedule.token_budget != shape.token_budget:
        raise ValueError(
            "the schedule must be built from the data and token budget it is used with; found data "
            f"{schedule.data_fingerprint} and {rows.fingerprint}, budgets {schedule.token_budget} and "
            f"{shape.token_budget}. Build the schedule again"
        )
    bucket = int(schedule.job_bucket[job])
    length = schedule.buckets[bucket].length
    samples = schedule.rows_of(job)
    token_ids = np.zeros(shape.token_budget, dtype=np.int64)
    loss_mask = np.zeros(shape.token_budget, dtype=np.uint8)
    lengths = np.zeros(len(samples), dtype=np.int64)
    for r, sample in enumerate(samples.tolist()):
        tokens, mask = rows.row(sample)
        lengths[r] = len(tokens)
        token_ids[r * length : r * length + len(tokens)] = tokens
        loss_mask[r * length : r * length + len(tokens)] = mask
    positions, row_ids = _row_layout(lengths, length, shape.token_budget)

    candidates = find_candidates(loss_mask, length)
    anchors = draw_anchors(candidates, bucket_length=length, shape=shape, epoch=schedule.epoch, job=job)
    anchor_rows = anchors // length
    row_ends = anchor_rows * length + lengths[anchor_rows]
    predicted, supervised = _supervised_rows(loss_mask, anchors, row_ends, shape.block_size)
    trained_rows, labels, weights, label_positions = _find_trained_rows(token_ids, predicted, supervised, shape)
    covered = np.zeros(shape.token_budget, dtype=bool)
    covered[label_positions] = True
    teacher = _teacher_rows(covered, label_positions, shape) if shape.with_teacher else (None, None)
    num_rows_max = shape.num_anchors * (shape.block_size - 1)
    return PaddedJob(
        epoch=schedule.epoch,
        index=job,
        bucket=bucket,
        bucket_length=length,
        num_rows=len(samples),
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        row_ids=torch.from_numpy(row_ids),
        anchors=_tensor(anchors, shape.num_anchors, 0, np.int64),
        anchor_row_starts=_tensor(anchor_rows * length, shape.num_anchors, 0, np.int64),
        anchor_tokens=_tensor(token_ids[anchors], shape.num_anchors, 0, np.int64),
        trained_rows=_tensor(trained_rows, num_rows_max, 0, np.int64),
        labels=_tensor(labels, num_rows_max, IGNORED_LABEL, np.int64),
        weights=_tensor(weights, num_rows_max, 0.0, np.float32),
        teacher_positions=teacher[0],
        teacher_rows=teacher[1],
        num_anchors=len(anchors),
        num_trained_rows=len(trained_rows),
        num_tokens=int(lengths.sum()),
        num_supervised=int(loss_mask.sum(dtype=np.int64)) - int(loss_mask[: len(samples) * length : length].sum()),
        num_candidates=len(candidates),
        num_covered=int(np.count_nonzero(covered)),
        rows_per_k=supervised.sum(axis=0),
        blocks_per_k=supervised.cumprod(axis=1).sum(axis=0),
    )


def _row_layout(lengths: np.ndarray, bucket_length: int, token_budget: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions (T,) int64, row_ids (T,) int32): the one map from rows to positions of a job."""
    positions = np.zeros(token_budget, dtype=np.int64)
    row_ids = np.full(token_budget, -1, dtype=np.int32)
    used = len(lengths) * bucket_length
    column = np.arange(bucket_length)
    real = column < lengths[:, None]  # (rows, L)
    np.copyto(positions[:used].reshape(real.shape), column, where=real)
    np.copyto(row_ids[:used].reshape(real.shape), np.arange(len(lengths), dtype=np.int32)[:, None], where=real)
    return positions, row_ids


def _supervised_rows(
    loss_mask: np.ndarray, anchors: np.ndarray, row_ends: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Flat position anchor + k of each (a, k), 1 <= k < K, and whether it is inside its row and in the loss mask.

    Args:
        loss_mask: (T,).
        anchors, row_ends: (n,) flat position of each anchor and of its row's end (exclusive).

    Returns:
        two (n, K-1) arrays; positions outside the row are 0.
    """
    predicted = anchors[:, None] + np.arange(1, block_size)
    inside = predicted < row_ends[:, None]
    predicted = np.where(inside, predicted, 0)
    return predicted, inside & (loss_mask[predicted] != 0)


def _find_trained_rows(
    token_ids: np.ndarray, predicted: np.ndarray, supervised: np.ndarray, shape: JobShape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Trained rows (a, k): supervised, with a label inside the head and a weight above 0.

    Args:
        token_ids: (T,). predicted, supervised: (n, K-1) of `_supervised_rows`.

    Returns:
        Index a*K + k, label, weight and flat position of the label of each trained row, ascending by index.
    """
    k = np.arange(1, shape.block_size)
    weight = np.ones(len(k), np.float32) if shape.gamma is None else np.exp(-(k - 1) / shape.gamma).astype(np.float32)
    label = token_ids[predicted]
    if shape.head_index is not None:
        label = shape.head_index[label]
    trained = supervised & (label >= 0) & (weight > 0)
    a, column = np.nonzero(trained)
    return a * shape.block_size + k[column], label[trained], weight[column], predicted[trained]


def _teacher_rows(
    covered: np.ndarray, label_positions: np.ndarray, shape: JobShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PaddedJob.teacher_positions` and `teacher_rows`. The target predicts a label at the position before it.

    Args:
        covered: (T,) bool, the positions that are a label. label_positions: (n,) flat position of each row's label.
    """
    place = np.cumsum(covered) - 1  # of each covered position among them
    positions = _tensor(np.flatnonzero(covered) - 1, shape.max_teacher_positions, 0, np.int64)
    return positions, _tensor(place[label_positions], shape.num_anchors * (shape.block_size - 1), 0, np.int64)


def _tensor(values: np.ndarray, size: int, fill: float, dtype: type) -> torch.Tensor:
    """(size,) CPU tensor that starts with `values` and goes on with `fill`."""
    padded: np.ndarray = np.full(size, fill, dtype=dtype)
    padded[: len(values)] = values
    return torch.from_numpy(padded)
