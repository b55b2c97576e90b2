"""Optional arguments of the fused loss, and what all its arguments must be."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_graph.kernels.backend import check_count, check_tensors
from dflash_graph.kernels.fused_lm_head_loss_workspace import IGNORE_INDEX, LmHeadLossWorkspace


@dataclass(frozen=True, kw_only=True, eq=False)
class DPace:
    """Row weights from the block's own probabilities, detached (D-PACE).

    With s_j = (1 - alpha) exp(-nll_j) + alpha and C_j = s_1 ... s_j over the rows j = 1..K-1 of a block, row k weighs
    C_k + ... + C_{K-1}; a row that is absent or does not count has s = 1 and adds nothing to the sum.

    Attributes:
        alpha: in [0, 1]; 1 weighs row k by the number of counting rows from k on.
        trained_rows: (R,) int64, block * K + k with k >= 1; distinct among the rows that count. Not checked: a place
            outside the blocks is moved to their ends.
    """

    alpha: float
    trained_rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """The target's distribution at U positions, as the KL needs it. A row's loss is (1-weight) * nll + weight * kl.

    Attributes:
        weight: share of the KL, in [0, 1].
        mean: (U, D) float32 (float64 for float64 rows), sum_v P_v W_v with the head of the call.
        entropy: (U,), nats.
        rows: (R,) int64 into U. A row whose entry lies outside [0, U) does not count, like one with a wrong label.
        bias_mean: (U,) sum_v P_v b_v; with a bias only.
    """

    weight: float
    mean: Tensor
    entropy: Tensor
    rows: Tensor
    bias_mean: Tensor | None = None


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Refuse labels that are neither rows of the head nor -100. Reads the device: for set-up and tests, not for steps.

    Raises:
        ValueError: some label lies outside [0, vocab_size) and is not -100; names the first.
    """
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != IGNORE_INDEX)
    if bool(wrong.any()):  # sync: set-up check
        row = int(wrong.flatten().to(torch.int8).argmax())  # sync: error path
        raise ValueError(
            f"labels must lie in [0, {vocab_size}) or be {IGNORE_INDEX}; found {int(labels.flatten()[row])} in row "
            f"{row}. Map the labels to rows of the head that is used"
        )


def check_arguments(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_rows: Tensor | int | None,
    ws: LmHeadLossWorkspace,
) -> None:
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden must be (R, D) and head_weight (V, D); found {tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        )
    rows = (hidden.shape[0],)
    if labels.shape != rows or weights.shape != rows:
        raise ValueError(
            f"labels and weights must have shape {rows}, one per row of hidden; found {tuple(labels.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if hidden.dtype != ws.grad_hidden.dtype or head_weight.dtype != hidden.dtype:
        raise TypeError(
            f"hidden, head_weight and the workspace must share a dtype; found {hidden.dtype}, {head_weight.dtype} and "
            f"{ws.grad_hidden.dtype}. Cast before the call, or make the workspace for that dtype"
        )
    if labels.dtype != torch.int64 or weights.dtype not in (torch.float32, ws.nll.dtype):
        raise TypeError(f"labels must be int64 and weights float32; found {labels.dtype} and {weights.dtype}")
    if head_weight.requires_grad:
        raise ValueError("head_weight must be frozen: it never gets a gradient here. Pass head_weight.detach()")
    if weights.requires_grad:
        raise ValueError("weights never get a gradient here. Pass weights.detach()")
    if rows[0] > ws.nll.shape[0] or hidden.shape[1] != ws.grad_hidden.shape[1] or head_weight.shape[0] != ws.vocab_size:
        raise ValueError(
            f"the workspace holds R <= {ws.nll.shape[0]}, D = {ws.grad_hidden.shape[1]}, V = {ws.vocab_size}; "
            f"found hidden {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)}. Make one for these shapes"
        )
    given = {"hidden": hidden, "head_weight": head_weight, "labels": labels, "weights": weights}
    check_tensors(ws.scratch.device, given)
    if num_rows is not None:
        check_count("num_rows", num_rows, most=rows[0], device=ws.scratch.device)


def check_options(
    rows: int,
    ws: LmHeadLossWorkspace,
    bias: Tensor | None,
    logit_scale: float,
    soft_cap: float | None,
    d_pace: DPace | None,
    teacher: Teacher | None,
) -> None:
    if not 0 < logit_scale < math.inf or not (soft_cap is None or 0 < soft_cap < math.inf):
        raise ValueError(f"logit_scale and soft_cap must be positive and finite; found {logit_scale} and {soft_cap}")
    floats: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    indices: dict[str, Tensor] = {}
    if bias is not None:
        floats["bias"] = bias, (ws.vocab_size,)
    if d_pace is not None:
        if not 0 <= d_pace.alpha <= 1:
            raise ValueError(f"alpha of D-PACE must lie in [0, 1]; found {d_pace.alpha}")
        if not ws.block_values.numel():
            raise ValueError("D-PACE needs a workspace made with num_blocks and block_size")
        indices["trained_rows"] = d_pace.trained_rows
    if teacher is not None:
        if not 0 <= teacher.weight <= 1:
            raise ValueError(f"the teacher's weight must lie in [0, 1]; found {teacher.weight}")
        if soft_cap is not None:
            raise ValueError("the KL needs logits that are linear in the hidden rows: no teacher with a soft_cap")
        if (teacher.bias_mean is None) != (bias is None):
            raise ValueError("the teacher's bias_mean and the bias belong together; found only one of them")
        positions = teacher.entropy.numel()
        if not positions:
            raise ValueError("the teacher must know at least one position; found none")
        floats["the teacher's mean"] = teacher.mean, (positions, ws.grad_hidden.shape[1])
        floats["the teacher's entropy"] = teacher.entropy, (positions,)
        if teacher.bias_mean is not None:
            floats["the teacher's bias_mean"] = teacher.bias_mean, (positions,)
        indices["the teacher's rows"] = teacher.rows
    for name, (tensor, shape) in floats.items():
        if tensor.shape != shape or tensor.dtype != ws.nll.dtype:
            raise ValueError(
                f"{name} must be {ws.nll.dtype} of shape {shape}; found {tensor.dtype} of {tuple(tensor.shape)}"
            )
        if tensor.requires_grad:
            raise ValueError(f"{name} never gets a gradient here. Detach it")
    for name, tensor in indices.items():
        if tensor.shape != (rows,) or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 of shape ({rows},); found {tensor.dtype} of {tuple(tensor.shape)}")
    check_tensors(ws.scratch.device, {name: tensor for name, (tensor, _) in floats.items()} | indices)
