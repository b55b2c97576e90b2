"""Weighted cross-entropy of hidden rows against a frozen lm_head, and its gradient, without (R, V) memory.

With z_i = W x_i, lse_i = log sum_v exp(z_iv), nll_i = lse_i - z_i[y_i] and p = exp(z - lse), the op computes
    loss = sum_i w_i nll_i,    d loss / d x_i = w_i (sum_v p_iv W_v - W[y_i]),
over chunks of rows: GEMM into one preallocated scratch, row statistics, the scratch turned in place into unnormalised
gradients e = exp(z - max) with e[y] -= s = sum_v e_v, GEMM into the gradient rows, which are then scaled by w_i / s_i
(saves a pass over the scratch). All of it runs in the forward, 4*R*V*D FLOPs; the backward multiplies by the
incoming gradient. The head never gets a gradient. Rows that do not count are zero by selection, never by a product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
NO_RANK = 2**62  # label_rank of rows that do not count, and of wrong rows when ranks were not asked for

_RANK_ROWS = 8  # rows compared with their label's logit at once
_CPU_CHUNK_ROWS = 512  # measured at D 576, V 4,096-49,152: 1,024 rows gain under 2 %, 128 rows lose 5-25 %
_GPU_MULTIPROCESSORS = 132  # H100, H200; tiles of 128 x 256 in the second GEMM
_GPU_LEAST_ROWS = 1536  # below it two waves per chunk cost less than a second pass over the head


@dataclass(kw_only=True, eq=False)
class LmHeadLossWorkspace:
    """Scratch and results of `fused_lm_head_loss`, allocated once.

    A forward and its backward are one use: another forward with the same workspace before the backward is refused.
    The results of a call with R rows are the first R entries; later entries are left alone.
    """

    logits: Tensor  # (C, V) float32 (float64 for float64 hidden rows); logits, then gradients
    narrow: Tensor | None  # (C, V) hidden dtype, when that is a 16-bit type
    above: Tensor  # (8, V) dtype of logits, 1 where a logit exceeds the label's
    row_stats: Tensor  # (5, C, 1) dtype of logits
    row_index: Tensor  # (R,) int64 0, 1, ...
    grad_hidden: Tensor  # (R, D) hidden dtype, gradient of loss_sum
    nll: Tensor  # (R,) dtype of logits; 0 where the row does not count
    logsumexp: Tensor  # (R,) dtype of logits; 0 where the row does not count
    right: Tensor  # (R,) bool, no logit exceeds the label's
    label_rank: Tensor  # (R,) int64, logits strictly greater than the label's; NO_RANK where the row does not count
    weight_sum: Tensor  # () dtype of logits, sum of the weights that count
    read_counts: bool  # the host reads num_rows and skips dead chunks: 32 and 64 bits on the CPU only
    use: int = 0  # forwards so far

    @property
    def chunk_rows(self) -> int:
        """C, rows whose logits exist at once."""
        return self.logits.shape[0]

    def nbytes(self) -> int:
        """Bytes of all tensors of the workspace."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


def choose_chunk_rows(
    *, num_rows: int, hidden_size: int, vocab_size: int, row_bytes: int, scratch_bytes: int, device_type: str
) -> int:
    """C, rows of one chunk: what keeps the GEMMs busy, within `scratch_bytes` of (C, V) scratch.

    On CUDA the second GEMM, (C, V) x (V, D), should fill whole waves of the multiprocessors: C is 128 times the row
    tiles that fit one wave (two, when one is short). Computed, not measured.

    Args:
        row_bytes: scratch bytes of one logit, over all scratch buffers.
    """
    most = max(1, scratch_bytes // (row_bytes * vocab_size))
    rows = _CPU_CHUNK_ROWS
    if device_type != "cpu":
        column_tiles = -(-hidden_size // 256)
        waves = [128 * (k * _GPU_MULTIPROCESSORS // column_tiles) for k in (1, 2)]
        rows = waves[0] if waves[0] >= _GPU_LEAST_ROWS or waves[1] > most else waves[1]
        if most >= 128:
            most -= most % 128
    return max(1, min(rows, most, num_rows))


def make_workspace(
    *,
    num_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    scratch_bytes: int = 768 * 2**20,
    chunk_rows: int | None = None,
) -> LmHeadLossWorkspace:
    """Allocate the workspace for calls of up to `num_rows` rows.

    Args:
        num_rows: R, most rows of a call. hidden_size: D. vocab_size: V, rows of the (possibly reduced) head.
        dtype: of the hidden rows and of the head.
        scratch_bytes: upper bound of the (C, V) scratch, bytes.
        chunk_rows: C; None chooses it.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
        ValueError: hidden_size, vocab_size or chunk_rows is not positive, or num_rows is negative.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64; found {dtype}")
    if num_rows < 0 or min(hidden_size, vocab_size) < 1 or (chunk_rows is not None and chunk_rows < 1):
        raise ValueError(
            "hidden_size, vocab_size and chunk_rows must be at least 1 and num_rows at least 0; found "
            f"{hidden_size}, {vocab_size}, {chunk_rows} and {num_rows}"
        )
    device = torch.device(device)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    narrows = dtype.itemsize == 2
    if chunk_rows is None:
        chunk_rows = choose_chunk_rows(
            num_rows=num_rows,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            row_bytes=stats.itemsize + (dtype.itemsize if narrows else 0),
            scratch_bytes=scratch_bytes,
            device_type=device.type,
        )

    def zeros(*shape: int, of: torch.dtype = stats) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    return LmHeadLossWorkspace(
        logits=zeros(chunk_rows, vocab_size),
        narrow=zeros(chunk_rows, vocab_size, of=dtype) if narrows else None,
        above=zeros(min(_RANK_ROWS, chunk_rows), vocab_size),
        row_stats=zeros(5, chunk_rows, 1),
        row_index=torch.arange(num_rows, device=device),
        grad_hidden=zeros(num_rows, hidden_size, of=dtype),
        nll=zeros(num_rows),
        logsumexp=zeros(num_rows),
        right=zeros(num_rows, of=torch.bool),
        label_rank=zeros(num_rows, of=torch.int64),
        weight_sum=zeros(),
        # The CPU's 16-bit GEMM allocates scratch of its own, so the number of its calls may not depend on the data.
        read_counts=device.type == "cpu" and not narrows,
    )


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


def _check(
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
    if labels.dtype != torch.int64 or weights.dtype not in (torch.float32, ws.logits.dtype):
        raise TypeError(f"labels must be int64 and weights float32; found {labels.dtype} and {weights.dtype}")
    if head_weight.requires_grad:
        raise ValueError("head_weight must be frozen: it never gets a gradient here. Pass head_weight.detach()")
    if (
        rows[0] > ws.nll.shape[0]
        or hidden.shape[1] != ws.grad_hidden.shape[1]
        or head_weight.shape[0] != ws.logits.shape[1]
    ):
        raise ValueError(
            f"the workspace holds R <= {ws.nll.shape[0]}, D = {ws.grad_hidden.shape[1]}, V = {ws.logits.shape[1]}; "
            f"found hidden {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)}. Make one for these shapes"
        )
    for name, tensor in (("hidden", hidden), ("head_weight", head_weight), ("labels", labels), ("weights", weights)):
        if tensor.device != ws.logits.device:
            raise ValueError(f"{name} must be on the workspace's device {ws.logits.device}; found {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; found strides {tensor.stride()}. Copy it before the call")
    if isinstance(num_rows, Tensor):
        if num_rows.ndim != 0 or num_rows.is_floating_point():
            raise ValueError(
                f"num_rows must be an integer scalar; found {num_rows.dtype} of shape {tuple(num_rows.shape)}"
            )
    elif num_rows is not None and not 0 <= num_rows <= rows[0]:
        raise ValueError(f"num_rows must lie in [0, {rows[0]}], the rows of hidden; found {num_rows}")


def _rank_chunk(logits: Tensor, label_logit: Tensor, above: Tensor, count: Tensor, rank: Tensor) -> None:
    """rank[i] = logits of row i strictly greater than the label's, a few rows at a time.

    Counted in floats, exact below 2**24: a sum of booleans would allocate in every chunk.
    """
    step = above.shape[0]
    for i in range(0, logits.shape[0], step):
        j = min(i + step, logits.shape[0])
        part = torch.sub(logits[i:j], label_logit[i:j], out=above[: j - i]).sign_().clamp_(min=0)
        torch.sum(part, 1, keepdim=True, out=count[i:j])
    rank.copy_(count.view(-1))


def _chunk(
    hidden: Tensor,  # (c, D)
    head_weight: Tensor,  # (V, D)
    labels: Tensor,  # (c, 1) int64, all inside the head
    ws: LmHeadLossWorkspace,
    rows: slice,  # of the chunk, in ws
    with_rank: bool,
    with_grad: bool,
) -> None:
    """Statistics of one chunk of rows into ws, and e @ W / s into ws.grad_hidden (not yet times the weight)."""
    count = hidden.shape[0]
    logits = ws.logits[:count]
    label_logit, row_max, label_exp, rest, spare = ws.row_stats[:, :count].unbind()
    narrow = None if ws.narrow is None else ws.narrow[:count]
    if narrow is None:
        torch.mm(hidden, head_weight.t(), out=logits)
    elif hidden.is_cuda:
        torch.mm(hidden, head_weight.t(), out_dtype=logits.dtype, out=logits)
    else:  # the CPU has no GEMM from 16 to 32 bits
        torch.mm(hidden, head_weight.t(), out=narrow)
        logits.copy_(narrow)
    torch.gather(logits, 1, labels, out=label_logit)
    torch.amax(logits, 1, keepdim=True, out=row_max)
    torch.ge(label_logit, row_max, out=ws.right[rows].view(-1, 1))
    if with_rank:
        _rank_chunk(logits, label_logit, ws.above, spare, ws.label_rank[rows])
    logits.sub_(row_max).exp_()
    # The label's term stays out of the sum: where p is near 1, rest is accurate and s - e[y] would cancel.
    torch.gather(logits, 1, labels, out=label_exp)
    logits.scatter_(1, labels, 0.0)
    torch.sum(logits, 1, keepdim=True, out=rest)
    nll, lse = ws.nll[rows].view(-1, 1), ws.logsumexp[rows].view(-1, 1)
    torch.expm1(torch.sub(label_logit, row_max, out=spare), out=nll).add_(rest).log1p_()
    torch.add(nll, row_max, out=lse)
    nll.sub_(spare)
    if not with_grad:
        return
    logits.scatter_(1, labels, torch.neg(rest, out=spare))
    scale = torch.add(rest, label_exp, out=spare).reciprocal_()
    if narrow is None:
        torch.mm(logits, head_weight, out=ws.grad_hidden[rows]).mul_(scale)
    else:
        torch.mm(torch.mul(logits, scale, out=narrow), head_weight, out=ws.grad_hidden[rows])


def fused_lm_head_loss_ref(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_rows: Tensor | int | None,
    workspace: LmHeadLossWorkspace,
    *,
    with_rank: bool,
    with_grad: bool,
) -> Tensor:
    """Loss and, into the workspace, statistics and gradient, in plain torch; arguments as `fused_lm_head_loss`.

    On the CPU, in 32 or 64 bits, the host reads `num_rows` and skips dead chunks; elsewhere every chunk runs, unsynced.
    """
    ws, total = workspace, hidden.shape[0]
    counts = (labels >= 0) & (labels < head_weight.shape[0]) & (weights != 0)
    live = total
    if num_rows is not None:
        counts &= ws.row_index[:total] < num_rows
        if ws.read_counts:
            live = min(total, max(0, int(num_rows)))  # sync: free on the CPU, the only device that reads counts
    ignored = ~counts
    safe_labels = labels.masked_fill(ignored, 0)[:, None]
    row_weights = weights.to(ws.nll.dtype).masked_fill(ignored, 0)
    for start in range(0, live, ws.chunk_rows):
        rows = slice(start, min(start + ws.chunk_rows, live))
        _chunk(hidden[rows], head_weight, safe_labels[rows], ws, rows, with_rank, with_grad)
    nll = ws.nll[:total].masked_fill_(ignored, 0)
    ws.logsumexp[:total].masked_fill_(ignored, 0)
    rank, right = ws.label_rank[:total], ws.right[:total]
    if with_rank:
        rank.masked_fill_((rank == 0) & ~right, NO_RANK)  # NaN exceeds nothing and must not pass for right
    else:
        rank.fill_(NO_RANK).masked_fill_(right, 0)
    rank.masked_fill_(ignored, NO_RANK)
    if with_grad:
        ws.grad_hidden[:total].mul_(row_weights[:, None]).masked_fill_(ignored[:, None], 0)
    torch.sum(row_weights, 0, out=ws.weight_sum)
    return (nll * row_weights).sum()


class _FusedLmHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        num_rows: Tensor | int | None,
        workspace: LmHeadLossWorkspace,
        with_rank: bool,
        with_grad: bool,
    ) -> Tensor:
        workspace.use += 1
        ctx.workspace, ctx.use, ctx.num_rows = workspace, workspace.use, hidden.shape[0]
        return fused_lm_head_loss_ref(
            hidden, head_weight, labels, weights, num_rows, workspace, with_rank=with_rank, with_grad=with_grad
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        ws = ctx.workspace
        if ws.use != ctx.use:
            raise RuntimeError(
                "the workspace of fused_lm_head_loss was used by another forward before this backward; run the "
                "backward first, or give each live loss a workspace of its own"
            )
        # A fresh tensor: a leaf could keep a view of the workspace as its .grad, and the next step would overwrite it.
        grad_hidden = ws.grad_hidden[: ctx.num_rows] * grad_loss.to(ws.grad_hidden.dtype)
        return grad_hidden, None, None, None, None, None, None, None


def fused_lm_head_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    num_rows: Tensor | int | None = None,
    *,
    workspace: LmHeadLossWorkspace,
    with_rank: bool = False,
) -> Tensor:
    """Sum of w_i * nll_i over rows, differentiable in `hidden`; no allocation of it depends on the data.

    A row counts if it is below `num_rows`, its label lies in [0, V) and its weight is not 0. Others give exact zeros
    whatever they hold, NaN included. No label is used as an index before that check; `check_labels` refuses wrong ones.

    Args:
        hidden: (R, D) rows. head_weight: (V, D), same dtype, frozen; a reduced head is a smaller V.
        labels: (R,) int64. weights: (R,) float32.
        num_rows: live rows, a prefix; an int or an integer scalar tensor; None is all.
        workspace: receives nll, logsumexp, label_rank (R,) and weight_sum (), see `LmHeadLossWorkspace`.
        with_rank: True fills label_rank with the full rank; False with 0 where the label is the argmax, else NO_RANK.

    Returns:
        () float32 (float64 for float64 rows).

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, device or strides, or does not fit the workspace.
        RuntimeError: in the backward, if the workspace was used again in between.
    """
    _check(hidden, head_weight, labels, weights, num_rows, workspace)
    with_grad = hidden.requires_grad and torch.is_grad_enabled()
    loss: Tensor = _FusedLmHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, labels, weights, num_rows, workspace, with_rank, with_grad
    )
    return loss
