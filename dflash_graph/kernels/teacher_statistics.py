"""What distillation needs of the target at one position: one vector and two numbers, instead of V probabilities.

With P = softmax(scale * (W x + b)) of the target and q the drafter's distribution over the same head, h its row,
    KL(P || q) = logsumexp(scale * (W h + b)) - scale * (h . M + c) - H,      d KL / d h = scale * (q W - M),
where M = P W is the mean row of the head, c = P . b the mean bias and H = -sum_v P_v log P_v the entropy. M, c and H
are kept in 32 bits: a small KL is the difference of large terms. M costs 4*U*V*D FLOPs for U positions.

The op walks chunks of rows: GEMM into one preallocated scratch, row statistics, the scratch turned in place into P,
GEMM into `mean`. The row part has a plain-torch and a Triton version; both share the loop. There is no gradient. The
target's device calls it when it takes the positions out of a batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_graph.kernels.backend import (
    Implementation,
    Operator,
    check_count,
    check_tensors,
    choose_implementation,
    compute_dtype,
)
from dflash_graph.kernels.fused_lm_head_loss_workspace import aligned_stride, choose_chunk_rows

_STATISTICS_ROWS = 8  # rows of the plain version at once: its second buffer stays in the cache
_TILE_ROWS = 4096  # rows of the head converted to 32 bits at once where no GEMM goes from 16 to 32 bits
_FAR = -1000.0  # exp is 0 here in every type, and 0 * _FAR is 0 where 0 * -inf is NaN


@dataclass(kw_only=True, eq=False)
class TeacherWorkspace:
    """Scratch of `teacher_statistics`, allocated once; it holds no results."""

    logits: Tensor  # (C, V) float32 (float64 for float64 rows), row stride a multiple of 16; logits, then P
    narrow: Tensor | None  # (C, V) hidden dtype: P for the plain version's 16-bit GEMM on CUDA
    head_tile: Tensor | None  # (v, D) float32: a part of the head, on the CPU for 16-bit rows
    hidden_wide: Tensor | None  # (C, D) float32: a chunk of rows, on the CPU for 16-bit rows
    spare: Tensor | None  # (8, V) dtype of logits, plain version only
    row_stats: Tensor  # (3, C, 1) dtype of logits
    row_index: Tensor  # (U,) int64 0, 1, ...
    counts: Tensor  # (2, U) bool: the row is live; the row is dead
    dtype: torch.dtype  # of the hidden rows and the head
    hidden_size: int
    implementation: Implementation

    @property
    def chunk_rows(self) -> int:
        """C, rows whose logits exist at once."""
        return self.logits.shape[0]

    def nbytes(self) -> int:
        """Bytes of all tensors of the workspace."""
        return sum(t.untyped_storage().nbytes() for t in vars(self).values() if isinstance(t, Tensor))


def make_workspace(
    *,
    num_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    scratch_bytes: int = 768 * 2**20,
    chunk_rows: int | None = None,
    implementation: Implementation | None = None,
) -> TeacherWorkspace:
    """Allocate the workspace for calls of up to `num_rows` positions.

    Args:
        num_rows: U, most positions of a call. hidden_size: D. vocab_size: V, rows of the (possibly reduced) head.
        dtype: of the hidden rows and of the head.
        scratch_bytes: upper bound of the (C, V) scratch, bytes.
        chunk_rows: C; None chooses it.
        implementation: of the row part; None chooses Triton on CUDA and plain torch elsewhere.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
        ValueError: hidden_size, vocab_size or chunk_rows is not positive, num_rows is negative, or the implementation
            cannot run here.
    """
    stats = compute_dtype(dtype)
    if num_rows < 0 or min(hidden_size, vocab_size) < 1 or (chunk_rows is not None and chunk_rows < 1):
        raise ValueError(
            "hidden_size, vocab_size and chunk_rows must be at least 1 and num_rows at least 0; found "
            f"{hidden_size}, {vocab_size}, {chunk_rows} and {num_rows}"
        )
    device = torch.device(device)
    implementation = choose_implementation(implementation, device, dtype)
    converts = dtype.itemsize == 2 and device.type == "cpu"
    needs_narrow = dtype.itemsize == 2 and not converts and implementation == "torch"
    stride = aligned_stride(vocab_size)
    if chunk_rows is None:
        chunk_rows = choose_chunk_rows(
            num_rows=num_rows,
            hidden_size=hidden_size,
            vocab_size=stride,
            row_bytes=stats.itemsize + (dtype.itemsize if needs_narrow else 0),
            scratch_bytes=scratch_bytes,
            device_type=device.type,
        )

    def zeros(*shape: int, of: torch.dtype = stats) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    return TeacherWorkspace(
        logits=zeros(chunk_rows, stride)[:, :vocab_size],
        narrow=zeros(chunk_rows, vocab_size, of=dtype) if needs_narrow else None,
        head_tile=zeros(min(_TILE_ROWS, vocab_size), hidden_size) if converts else None,
        hidden_wide=zeros(chunk_rows, hidden_size) if converts else None,
        spare=zeros(min(_STATISTICS_ROWS, chunk_rows), vocab_size) if implementation == "torch" else None,
        row_stats=zeros(3, chunk_rows, 1),
        row_index=torch.arange(num_rows, device=device),
        counts=zeros(2, num_rows, of=torch.bool),
        dtype=dtype,
        hidden_size=hidden_size,
        implementation=implementation,
    )


def _logits(hidden: Tensor, head_weight: Tensor, logits: Tensor, wide: Tensor | None, tile: Tensor | None) -> None:
    """logits (c, V) = hidden (c, D) . head (V, D), summed and kept in the dtype of logits."""
    if hidden.dtype == logits.dtype:
        torch.mm(hidden, head_weight.t(), out=logits)
    elif wide is None or tile is None:
        torch.mm(hidden, head_weight.t(), out_dtype=logits.dtype, out=logits)
    else:
        rows = wide[: hidden.shape[0]].copy_(hidden)
        for start in range(0, head_weight.shape[0], tile.shape[0]):
            part = head_weight[start : start + tile.shape[0]]
            torch.mm(rows, tile[: part.shape[0]].copy_(part).t(), out=logits[:, start : start + part.shape[0]])


def _mean(prob: Tensor, head_weight: Tensor, mean: Tensor, tile: Tensor | None) -> None:
    """mean (c, D) = prob (c, V) . head (V, D), summed and kept in the dtype of mean."""
    if head_weight.dtype == mean.dtype:
        torch.mm(prob, head_weight, out=mean)
    elif tile is None:
        torch.mm(prob, head_weight, out_dtype=mean.dtype, out=mean)
    else:
        mean.zero_()
        for start in range(0, head_weight.shape[0], tile.shape[0]):
            part = head_weight[start : start + tile.shape[0]]
            part_prob = prob[:, start : start + part.shape[0]].to(mean.dtype)
            mean.addmm_(part_prob, tile[: part.shape[0]].copy_(part))


def _statistics(
    logits: Tensor,  # (c, V), in: raw logits; out: P, if wanted
    bias: Tensor | None,  # (V,)
    entropy: Tensor,  # (c, 1)
    argmax: Tensor,  # (c, 1) int64
    bias_mean: Tensor | None,  # (c,)
    spare: Tensor,  # (s, V)
    row_stats: Tensor,  # (3, c, 1)
    logit_scale: float,
    with_probabilities: bool,
) -> None:
    """Plain-torch row part, a few rows at a time: H = log S - sum of d exp(d) / S with d = z - max, S = sum exp(d)."""
    for i in range(0, logits.shape[0], spare.shape[0]):
        rows = slice(i, min(i + spare.shape[0], logits.shape[0]))
        d = logits[rows]
        top, mass, moment = row_stats[:, rows].unbind()
        if bias is not None:
            d.add_(bias)
        if logit_scale != 1.0:
            d.mul_(logit_scale)
        torch.max(d, 1, keepdim=True, out=(top, argmax[rows]))
        e = torch.exp(d.sub_(top), out=spare[: d.shape[0]])
        torch.sum(e, 1, keepdim=True, out=mass)
        torch.sum(d.clamp_(min=_FAR).mul_(e), 1, keepdim=True, out=moment)
        torch.log(mass, out=entropy[rows]).sub_(moment.div_(mass))
        if with_probabilities:
            torch.mul(e, mass.reciprocal_(), out=d)
            if bias is not None and bias_mean is not None:
                torch.mv(d, bias, out=bias_mean[rows])


def _teacher_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    num_rows: Tensor | None,
    most_rows: int,
    mean: Tensor | None,
    entropy: Tensor,
    argmax: Tensor,
    bias: Tensor | None,
    bias_mean: Tensor | None,
    logits: Tensor,
    narrow: Tensor | None,
    head_tile: Tensor | None,
    hidden_wide: Tensor | None,
    spare: Tensor | None,
    row_stats: Tensor,
    row_index: Tensor,
    counts: Tensor,
    logit_scale: float,
) -> None:
    """The operator's body; without `spare` the row part is Triton's. `most_rows` bounds the live rows on the host."""
    total, live, chunk_rows = hidden.shape[0], most_rows, logits.shape[0]
    if hidden.device.type == "cpu":
        if num_rows is not None:
            live = min(live, max(0, int(num_rows)))  # sync: free on the CPU, the only device that reads counts
        # Equal chunks: a last one of a few rows would read the whole head for them.
        chunk_rows = max(1, -(-live // max(1, -(-live // chunk_rows))))
    alive, dead = counts[0, :total], counts[1, :total]
    torch.lt(row_index[:total], live if num_rows is None else num_rows, out=alive)
    torch.logical_not(alive, out=dead)
    for start in range(0, live, chunk_rows):
        rows = slice(start, min(start + chunk_rows, live))
        z = logits[: rows.stop - start]
        _logits(hidden[rows], head_weight, z, hidden_wide, head_tile)
        prob = z
        row_bias_mean = None if bias_mean is None else bias_mean[rows]
        if spare is not None:
            _statistics(
                z,
                bias,
                entropy[rows, None],
                argmax[rows, None],
                row_bias_mean,
                spare,
                row_stats[:, : z.shape[0]],
                logit_scale,
                mean is not None,
            )
            if mean is not None and narrow is not None:
                prob = narrow[: z.shape[0]].copy_(z)
        else:
            # Imported late: Triton may be missing where the plain version runs.
            from dflash_graph.kernels.fused_lm_head_loss_triton import narrow_view, teacher_pass

            narrow_to = hidden.dtype if hidden.dtype.itemsize == 2 else None
            teacher_pass(
                z,
                alive[rows],
                bias,
                entropy[rows],
                argmax[rows],
                row_bias_mean,
                logit_scale=logit_scale,
                with_probabilities=mean is not None,
                narrow=narrow_to,
            )
            prob = z if narrow_to is None else narrow_view(z, narrow_to)
        if mean is not None:
            _mean(prob, head_weight, mean[rows], head_tile)
    for result in (entropy, argmax, bias_mean):
        if result is not None:
            result.masked_fill_(dead, 0)  # selected, not multiplied: dead rows may hold NaN
    if mean is not None:
        mean.masked_fill_(dead[:, None], 0)


_run = Operator(
    "teacher_statistics",
    _teacher_statistics,
    mutates=[
        "mean",
        "entropy",
        "argmax",
        "bias_mean",
        "logits",
        "narrow",
        "head_tile",
        "hidden_wide",
        "spare",
        "row_stats",
        "counts",
    ],
)


def _check(
    hidden: Tensor,
    head_weight: Tensor,
    num_rows: Tensor | int | None,
    results: dict[str, Tensor | None],
    bias: Tensor | None,
    ws: TeacherWorkspace,
    logit_scale: float,
) -> None:
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden must be (U, D) and head_weight (V, D); found {tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        )
    (total, size), vocab_size = hidden.shape, head_weight.shape[0]
    if total > ws.row_index.shape[0] or size != ws.hidden_size or vocab_size != ws.logits.shape[1]:
        raise ValueError(
            f"the workspace holds U <= {ws.row_index.shape[0]}, D = {ws.hidden_size}, V = {ws.logits.shape[1]}; found "
            f"hidden {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)}. Make one for these shapes"
        )
    if hidden.dtype != ws.dtype or head_weight.dtype != ws.dtype:
        raise TypeError(
            f"hidden, head_weight and the workspace must share a dtype; found {hidden.dtype}, {head_weight.dtype} and "
            f"{ws.dtype}. Cast before the call, or make the workspace for that dtype"
        )
    stats = ws.logits.dtype
    shapes = {"mean": (total, size), "entropy": (total,), "argmax": (total,), "bias_mean": (total,)}
    for name, tensor in {**results, "bias": bias}.items():
        if tensor is None:
            continue
        shape, dtype = shapes.get(name, (vocab_size,)), torch.int64 if name == "argmax" else stats
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; found {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype} for rows of {ws.dtype}; found {tensor.dtype}. Convert it first")
    if (bias is not None and results["mean"] is not None) != (results["bias_mean"] is not None):
        raise ValueError(
            "bias_mean must be given exactly when both bias and mean are, because the KL needs all of them; found "
            f"bias {'given' if bias is not None else 'missing'}, mean "
            f"{'given' if results['mean'] is not None else 'missing'}, bias_mean "
            f"{'given' if results['bias_mean'] is not None else 'missing'}"
        )
    given = {"hidden": hidden, "head_weight": head_weight, "bias": bias, **results}
    check_tensors(ws.logits.device, given)
    if num_rows is not None:
        check_count("num_rows", num_rows, most=total, device=ws.logits.device)
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite; found {logit_scale}")


def teacher_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    num_rows: Tensor | int | None = None,
    *,
    mean: Tensor | None,
    entropy: Tensor,
    argmax: Tensor,
    workspace: TeacherWorkspace,
    bias: Tensor | None = None,
    bias_mean: Tensor | None = None,
    logit_scale: float = 1.0,
) -> None:
    """Mean head row, entropy and argmax of P = softmax(logit_scale * (hidden . W + bias)), for live rows.

    Rows from `num_rows` on give exact zeros, whatever they hold. A row whose softmax is NaN (a NaN, a +inf, or all
    -inf) gets a NaN mean and entropy, and some argmax inside [0, V). No allocation depends on the data.

    Args:
        hidden: (U, D) rows after the final norm. head_weight: (V, D), same dtype.
        num_rows: live rows, a prefix; an int or an integer scalar tensor; None is all.
        mean: (U, D) float32, written: P . W. None skips it, and half of the FLOPs.
        entropy: (U,) float32, written: -sum P log P, natural logarithm. argmax: (U,) int64, written; lowest id of ties.
        workspace: its implementation runs the row part.
        bias: (V,) float32. bias_mean: (U,) float32, written: P . bias; needed when bias and mean are given.
        (float64 instead of float32 everywhere for float64 rows.)

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, device or strides, or does not fit the workspace.
    """
    ws = workspace
    results = {"mean": mean, "entropy": entropy, "argmax": argmax, "bias_mean": bias_mean}
    _check(hidden, head_weight, num_rows, results, bias, ws, logit_scale)
    with torch.no_grad():
        _run(
            hidden.detach(),
            head_weight.detach(),
            num_rows if isinstance(num_rows, Tensor) else None,
            num_rows if isinstance(num_rows, int) else hidden.shape[0],
            mean,
            entropy,
            argmax,
            bias,
            bias_mean,
            ws.logits,
            ws.narrow,
            ws.head_tile,
            ws.hidden_wide,
            ws.spare,
            ws.row_stats,
            ws.row_index,
            ws.counts,
            logit_scale,
        )
