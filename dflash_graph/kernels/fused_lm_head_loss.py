"""Weighted loss of hidden rows against a frozen lm_head, and its gradient, without (R, V) memory.

With z_i = soft_cap(logit_scale * (W x_i + b)), lse_i = log sum_v exp(z_iv), nll_i = lse_i - z_i[y_i] and
p = exp(z - lse), the op computes sum_i w_i nll_i and d nll_i / d x_i = sum_v p_iv dz_iv - dz_i[y_i] over chunks of
rows: GEMM into a preallocated scratch, a row pass that turns logits into their gradients, GEMM into the gradient rows.
All of it runs in the forward, 4*R*V*D FLOPs; the backward multiplies each row by its weight and the incoming gradient.
The head never gets a gradient. Rows that do not count are zero by selection, never by a product.

Optional, for a target that knows better than its argmax: KL(target || drafter) of row i needs only the target's mean
head row M = sum_v P_v W_v and its entropy H, because
    KL = lse - logit_scale * (x . M + sum_v P_v b_v) - H,    d KL / d x = logit_scale * (sum_v p_v W_v - M).

`fused_lm_head_loss_torch` and `fused_lm_head_loss_triton` hold the row passes, `fused_lm_head_loss_workspace` the
memory, `fused_lm_head_loss_arguments` the checks; the chunk loop here is shared.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_graph.kernels import fused_lm_head_loss_torch as torch_passes
from dflash_graph.kernels import gemm
from dflash_graph.kernels.backend import Operator
from dflash_graph.kernels.fused_lm_head_loss_arguments import (
    DPace,
    Teacher,
    check_arguments,
    check_labels,
    check_options,
)
from dflash_graph.kernels.fused_lm_head_loss_torch import LossOptions
from dflash_graph.kernels.fused_lm_head_loss_workspace import (
    IGNORE_INDEX,
    NO_RANK,
    LmHeadLossWorkspace,
    LossBuffers,
    choose_chunk_rows,
    make_workspace,
)

__all__ = [
    "IGNORE_INDEX",
    "NO_RANK",
    "DPace",
    "LmHeadLossWorkspace",
    "Teacher",
    "check_labels",
    "choose_chunk_rows",
    "fused_lm_head_loss",
    "make_workspace",
]


def _triton_passes() -> ModuleType:
    from dflash_graph.kernels import fused_lm_head_loss_triton  # only here: the package works without Triton

    return fused_lm_head_loss_triton


# ---- operators ------------------------------------------------------------------------------------------------------


def _forward_body(
    hidden: Tensor,  # (R, D)
    head_weight: Tensor,  # (V, D)
    labels: Tensor,  # (R,)
    weights: Tensor,  # (R,)
    num_rows: Tensor | None,  # ()
    host_rows: int,
    bias: Tensor | None,
    trained_rows: Tensor | None,
    mean: Tensor | None,
    entropy: Tensor | None,
    teacher_rows: Tensor | None,
    bias_mean: Tensor | None,
    buffers: list[Tensor],  # of LossBuffers
    implementation: str,
    chunk_rows: int,
    tile_columns: int,
    row_stride: int,
    host_reads: bool,
    skips_dead_chunks: bool,
    logit_scale: float,
    soft_cap: float | None,
    alpha: float,
    kl_weight: float,
    with_rank: bool,
    with_grad: bool,
) -> None:
    b, total = LossBuffers(*buffers), hidden.shape[0]
    whole = slice(0, total)
    options = LossOptions(
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        kl_weight=kl_weight,
        with_rank=with_rank,
        with_grad=with_grad,
        tile_columns=tile_columns,
        host_reads=host_reads,
    )
    positions = None if teacher_rows is None or entropy is None else (teacher_rows, entropy.shape[0])
    _select_rows(labels, weights, host_rows if num_rows is None else num_rows, head_weight.shape[0], positions, b)
    if teacher_rows is not None:
        b.source_rows[whole].copy_(teacher_rows).masked_fill_(b.ignored[whole], 0)
    live, step = total, 1
    if skips_dead_chunks:
        live, most = host_rows, chunk_rows
        if num_rows is not None:
            live = min(total, max(0, int(num_rows)))  # sync: free on the CPU, the only device that skips
        num_chunks = max(1, -(-live // chunk_rows))
        chunk_rows = max(1, -(-live // num_chunks))  # equal: a last chunk of a few rows would read the head for them
        if gemm.is_onednn(hidden.device, hidden.dtype):
            step = gemm.ROW_STEP
            chunk_rows = min(most, -(-chunk_rows // step) * step)
    for start in range(0, live, chunk_rows):
        size = min(chunk_rows, -(-(live - start) // step) * step)  # the last chunk may take dead rows along
        rows = slice(start, min(start + size, total))
        # In 16 bits the KL's gradient wants the product in 32: see kl_pass.
        product = b.grad_hidden[rows]
        if mean is not None and b.accumulated.numel():
            product = b.accumulated[: product.shape[0]]
        if implementation == "triton":
            _triton_chunk(hidden[rows], head_weight, bias, b, rows, options, row_stride, product)
        else:
            torch_passes.run_chunk(hidden[rows], head_weight, bias, b, rows, options)
        if mean is not None and entropy is not None:
            if implementation == "triton":
                _triton_passes().kl_pass(
                    hidden[rows], mean, entropy, bias_mean, b.source_rows[rows], b.logsumexp[rows], b.counts[rows],
                    product, b.grad_hidden[rows], b.kl[rows],
                    logit_scale=logit_scale, kl_weight=kl_weight, with_grad=with_grad,
                )  # fmt: skip
            else:
                torch_passes.teacher_pass(hidden[rows], mean, entropy, bias_mean, b, rows, options)
    if implementation != "triton":
        for result in (b.nll, b.logsumexp) if mean is None else (b.nll, b.logsumexp, b.kl):
            result[whole].masked_fill_(b.ignored[whole], 0)
        b.label_rank[whole].masked_fill_(b.ignored[whole], NO_RANK)
    if trained_rows is not None:
        _weigh_blocks(trained_rows, alpha, b)
    kl = None if mean is None else b.kl[whole]
    if implementation == "triton":
        _triton_passes().reduce(
            b.nll[whole], kl, b.row_weights[whole], b.loss_sum, b.weight_sum, kl_weight=kl_weight
        )  # fmt: skip
    else:
        _reduce(kl, kl_weight, total, b)


def _select_rows(
    labels: Tensor,
    weights: Tensor,
    num_rows: Tensor | int,
    vocab_size: int,
    positions: tuple[Tensor, int] | None,  # the teacher's rows, and how many it knows
    b: LossBuffers,
) -> None:
    """Which rows count, their labels and weights; 0 elsewhere. Nothing is used as an index before this."""
    n = labels.shape[0]
    counts, ignored, flags = b.counts[:n], b.ignored[:n], b.flags[:n]
    torch.lt(b.row_index[:n], num_rows, out=counts)
    for index, most in ((labels, vocab_size), *([] if positions is None else [positions])):
        counts.logical_and_(torch.ge(index, 0, out=flags))
        counts.logical_and_(torch.lt(index, most, out=flags))
    counts.logical_and_(torch.ne(weights, 0, out=flags))
    torch.logical_not(counts, out=ignored)
    b.safe_labels[:n].copy_(labels).masked_fill_(ignored, 0)
    b.row_weights[:n].copy_(weights).masked_fill_(ignored, 0)


def _triton_chunk(
    hidden: Tensor,
    head_weight: Tensor,
    bias: Tensor | None,
    b: LossBuffers,
    rows: slice,
    options: LossOptions,
    row_stride: int,
    product: Tensor,
) -> None:
    """GEMM, row pass and GEMM over whole rows of one chunk; 16-bit gradients lie in the front half of their rows."""
    passes = _triton_passes()
    logits = b.scratch.as_strided((hidden.shape[0], head_weight.shape[0]), (row_stride, 1))
    narrow = hidden.dtype if hidden.dtype.itemsize == 2 else None
    gemm.matmul_into(hidden, head_weight.t(), logits)
    passes.row_pass(
        logits, b.safe_labels[rows], b.counts[rows], bias, b.nll[rows], b.logsumexp[rows], b.label_rank[rows],
        logit_scale=options.logit_scale, soft_cap=options.soft_cap, label_share=1 - options.kl_weight,
        with_grad=options.with_grad, with_rank=options.with_rank, narrow=narrow,
    )  # fmt: skip
    if options.with_grad:
        gradients = logits if narrow is None else passes.narrow_view(logits, narrow)
        gemm.matmul_into(gradients, head_weight, product)


def _weigh_blocks(trained_rows: Tensor, alpha: float, b: LossBuffers) -> None:
    """row_weights of D-PACE, see `DPace`. Rows that do not count go to place 0, an anchor's, which nothing reads."""
    n, (blocks, k) = trained_rows.shape[0], b.block_values.shape
    ignored, place, terms = b.ignored[:n], b.source_rows[:n], b.row_values[:n]
    # Clamped only so that a wrong place never writes outside the buffer.
    place.copy_(trained_rows).masked_fill_(ignored, 0).clamp_(0, blocks * k - 1)
    torch.neg(b.nll[:n], out=terms).exp_().mul_(1 - alpha).add_(alpha)
    values, present = b.block_values.fill_(1), b.block_flags.fill_(False)
    values.view(-1).scatter_(0, place, terms)
    present.view(-1).scatter_(0, place, b.counts[:n])
    for j in range(2, k):
        values[:, j].mul_(values[:, j - 1])
    values.masked_fill_(present.logical_not_(), 0)
    for j in range(k - 2, 0, -1):
        values[:, j].add_(values[:, j + 1])
    torch.index_select(values.view(-1), 0, place, out=b.row_weights[:n]).masked_fill_(ignored, 0)


def _reduce(kl: Tensor | None, kl_weight: float, n: int, b: LossBuffers) -> None:
    """loss_sum and weight_sum; rows of weight 0 are selected away."""
    terms, row_weights = b.row_values[:n], b.row_weights[:n]
    torch.mul(b.nll[:n], 1 - kl_weight, out=terms)
    if kl is not None:
        terms.add_(kl, alpha=kl_weight)
    terms.mul_(row_weights).masked_fill_(torch.eq(row_weights, 0, out=b.flags[:n]), 0)
    torch.sum(terms, 0, out=b.loss_sum)
    torch.sum(row_weights, 0, out=b.weight_sum)


def _backward_body(
    grad_hidden: Tensor, row_weights: Tensor, grad_loss: Tensor, out: Tensor | None, implementation: str
) -> None:
    """out = grad_hidden * row_weights * grad_loss, rows of weight 0 selected to 0; without `out`, in place."""
    target = grad_hidden if out is None else out
    if implementation == "triton":
        _triton_passes().scale_rows(grad_hidden, row_weights, grad_loss, target)
        return
    factor = (row_weights * grad_loss)[:, None]
    torch.mul(grad_hidden, factor, out=target).masked_fill_((row_weights == 0)[:, None], 0)


_forward = Operator("fused_lm_head_loss", _forward_body, mutates=["buffers"])
_backward = Operator("fused_lm_head_loss_backward", _backward_body, mutates=["grad_hidden", "out"])


class _FusedLmHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        num_rows: Tensor | int | None,
        ws: LmHeadLossWorkspace,
        bias: Tensor | None,
        logit_scale: float,
        soft_cap: float | None,
        d_pace: DPace | None,
        teacher: Teacher | None,
        with_rank: bool,
        with_grad: bool,
        lend_grad: bool,
    ) -> Tensor:
        ws.use += 1
        ws.spent = False
        ctx.workspace, ctx.use, ctx.num_rows, ctx.lend_grad = ws, ws.use, hidden.shape[0], lend_grad
        on_device = isinstance(num_rows, Tensor)
        _forward(
            hidden,
            head_weight,
            labels,
            weights,
            num_rows if on_device else None,
            hidden.shape[0] if on_device or num_rows is None else num_rows,
            bias,
            None if d_pace is None else d_pace.trained_rows,
            None if teacher is None else teacher.mean,
            None if teacher is None else teacher.entropy,
            None if teacher is None else teacher.rows,
            None if teacher is None else teacher.bias_mean,
            ws.tensors(),
            ws.implementation,
            ws.chunk_rows,
            ws.tile_columns,
            ws.row_stride,
            ws.host_reads,
            ws.skips_dead_chunks,
            logit_scale,
            soft_cap,
            0.0 if d_pace is None else d_pace.alpha,
            0.0 if teacher is None else teacher.weight,
            with_rank,
            with_grad,
        )
        return ws.loss_sum.clone()  # the caller's own: the next forward overwrites the workspace's

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        ws = ctx.workspace
        if ws.use != ctx.use:
            raise RuntimeError(
                "the workspace of fused_lm_head_loss was used by another forward before this backward; run the "
                "backward first, or give each live loss a workspace of its own"
            )
        if ws.spent:
            raise RuntimeError(
                "the gradient rows of this loss were lent to an earlier backward (lend_grad); run the forward again"
            )
        grad_hidden, row_weights = ws.grad_hidden[: ctx.num_rows], ws.row_weights[: ctx.num_rows]
        ws.spent = ctx.lend_grad
        out = None if ctx.lend_grad else torch.empty_like(grad_hidden)
        _backward(grad_hidden, row_weights, grad_loss, out, ws.implementation)
        return (grad_hidden if out is None else out, *[None] * 13)


# The use of a workspace is checked call by call, which a trace would leave out.
_apply = torch.compiler.disable(_FusedLmHeadLoss.apply)  # type: ignore[no-untyped-call]


def fused_lm_head_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_rows: Tensor | int | None = None,
    *,
    workspace: LmHeadLossWorkspace,
    with_rank: bool = False,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    d_pace: DPace | None = None,
    teacher: Teacher | None = None,
    lend_grad: bool = False,
) -> Tensor:
    """Sum of w_i * loss_i over rows, differentiable in `hidden`.

    No allocation depends on the data, but for the products of live rows on the CPU in float32 (`gemm`), which also
    keeps some 0.8 MB for each R that it meets: call it with few.

    A row counts if it is below `num_rows`, its label lies in [0, V) and its weight is not 0. Others give exact zeros
    whatever they hold, NaN included. No label is used as an index before that check; `check_labels` refuses wrong ones.

    Args:
        hidden: (R, D) rows. head_weight: (V, D), same dtype, frozen; a reduced head is a smaller V.
        labels: (R,) int64. weights: (R,) float32.
        num_rows: live rows, a prefix; an int or an integer scalar tensor; None is all.
        workspace: receives the statistics, see `LossBuffers`.
        with_rank: True fills label_rank with the full rank; False with 0 where the label is the argmax, else NO_RANK.
            In plain torch a logit is greater than the label's only if it is so by more than their rounding.
        bias: (V,) float32 (float64 for float64 rows), added to W x.
        logit_scale: positive factor of W x + b. soft_cap: c in z = c tanh(logit_scale (W x + b) / c); None is none.
        d_pace: weights of the rows; `weights` then only says which rows count.
        teacher: mixes in the KL against the target. Not with a soft_cap.
        lend_grad: the backward hands out the workspace's own gradient rows instead of a new tensor. Only where nothing
            that keeps its gradient (a leaf, or a view of one) receives them unchanged; one backward only.

    Returns:
        () float32 (float64 for float64 rows).

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, device or strides, or does not fit the workspace.
        RuntimeError: in the backward, if the workspace was used again in between.
    """
    check_arguments(hidden, head_weight, labels, weights, num_rows, workspace)
    check_options(hidden.shape[0], workspace, bias, logit_scale, soft_cap, d_pace, teacher)
    owner = hidden._base if hidden._is_view() else hidden
    if lend_grad and owner is not None and owner.is_leaf and owner.requires_grad:
        raise ValueError(
            "lend_grad would make the workspace's memory the .grad of hidden, a leaf or a view of one. Leave it out"
        )
    with_grad = hidden.requires_grad and torch.is_grad_enabled()
    loss: Tensor = _apply(
        hidden, head_weight, labels, weights, num_rows, workspace, bias, logit_scale, soft_cap, d_pace, teacher,
        with_rank, with_grad, lend_grad,
    )  # fmt: skip
    return loss
