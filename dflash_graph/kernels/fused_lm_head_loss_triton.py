# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the loss and of the teacher's statistics: what happens to a chunk of logits between two GEMMs.

One program owns one row, walks its tiles in order and writes nothing outside it; there are no atomics, so two runs
agree bitwise. Callers are the chunk loops of `fused_lm_head_loss` and `teacher_statistics`, which check the arguments.

Sums. Every lane keeps its own running maximum m and sum s of exp(z - m), so the first pass needs no barrier. With
d = z - m and e = exp(-|d|), one exponential serves both cases: d <= 0 gives s + e, d > 0 gives s * e + 1 and m = z.
The label's term stays out of s. With M the maximum over all, r the sum of exp(z - M) over the other tokens and
d_y = z_y - M: nll = log1p(r) if d_y = 0, and otherwise r >= 1 and nll = log(r + exp(d_y)) - d_y. Neither cancels.
The label's gradient p_y - share is (1 - share) - r / (r + e_y) where e_y > r, so it keeps its digits as p_y -> 1.

In-place narrowing. The gradient of tile j, elements [jB, (j + 1)B) of B, is written as 16-bit numbers into bytes
[2jB, 2(j + 1)B) of its own fp32 row, that is over the fp32 elements [jB/2, (j + 1)B/2): all of them in tile floor(j/2),
never in a tile after j. Warps drift, so a warp that stores tile j could overwrite what a slower warp has yet to load.
One barrier per tile, after the tile's load and before its store, rules that out: who stores tile j has passed
barrier j, which every warp reaches only after its loads of tiles 0..j, and the store touches no other tile. The loads
of tile j + 1 meet no store either: a store that reaches tile j + 1 belongs to a tile after j, and so comes after
barrier j + 1. The first pass and the label's logit are loaded before barrier 0. Programs cannot meet: each reads and
writes its own row alone. `narrow=None` stores where it loads; it passes the same barrier, so that its safety does not
hang on the layouts. `kl_pass` and `scale_rows` load and store an element through the same pointers in one thread, once.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_graph.kernels.backend import CompileCase, launch
from dflash_graph.kernels.fused_lm_head_loss_workspace import NO_RANK

_NO_RANK = tl.constexpr(NO_RANK)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # a finite start: -inf - -inf would be NaN

# One launch configuration for every shape: 8 elements per lane, one 128-bit access in 16 bits and two in 32. Programs
# of 4 warps with 40-72 registers (compiled, not measured): 7-12 fit on a multiprocessor, so that some load while others
# wait at a barrier, and 1,024 rows of the loss are a single wave on 132 multiprocessors.
_BLOCK, _WARPS = 1024, 4
# The reduction is one program on the whole chip: the most loads in flight that it can have.
_REDUCE_BLOCK, _REDUCE_WARPS = 4096, 16


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0 to about 2 ulp: 2 atanh(x / (2 + x)), where the logarithm would lose x."""
    t = x / (2.0 + x)
    q = t * t
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11)))))
    return tl.where(x < 0.5, 2.0 * t * series, tl.log(1.0 + x))


@triton.jit
def _bounded(x, soft_cap):
    """z = cap * tanh(x / cap) and dz/dx; the polynomial for small arguments is that of the Cephes library's tanhf."""
    u = x / soft_cap
    t = tl.exp(-2.0 * tl.abs(u))
    far = tl.where(u < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    q = u * u
    p = -5.70498872745e-3 * q + 2.06390887954e-2
    p = p * q - 5.37397155531e-2
    p = p * q + 1.33314422036e-1
    p = p * q - 3.33332819422e-1
    near = p * q * u + u
    return soft_cap * tl.where(tl.abs(u) < 0.625, near, far), 4.0 * t / ((1.0 + t) * (1.0 + t))


@triton.jit
def _logit(x, bias_ptr, offs_v, mask_v, logit_scale, soft_cap):
    """z and dz/dx (without the scale) of raw logits x = h . W; the bias is read where the mask allows, None is all."""
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs_v, mask=mask_v)
    z = x * logit_scale
    if soft_cap is not None:
        z, slope = _bounded(z, soft_cap)
    else:
        slope = 1.0
    return z, slope


@triton.jit
def _add(z, best, total):
    """One more value per lane into (m, s); see the module's first lines."""
    d = z - best
    e = tl.exp(-tl.abs(d))
    return tl.where(d > 0, z, best), tl.where(d > 0, total * e + 1.0, total + e)


@triton.jit
def _row_kernel(
    logits_ptr,  # (C, V) fp32, row_stride apart
    grad_ptr,  # the same memory as (C, V) of the gradient's dtype, grad_stride apart; None without a gradient
    labels_ptr,  # (C,) int64
    counts_ptr,  # (C,) bool
    bias_ptr,  # (V,) fp32 or None
    nll_ptr,  # (C,) fp32
    lse_ptr,  # (C,) fp32
    rank_ptr,  # (C,) int64
    row_stride,
    grad_stride,
    vocab_size,
    logit_scale,
    soft_cap,  # None: no cap
    label_share,
    other_share,  # 1 - label_share
    WITH_RANK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counts_ptr + row):
        row_ptr = logits_ptr + row * row_stride
        label = tl.load(labels_ptr + row).to(tl.int32)  # below V, which has 32 bits as all offsets in a row
        z_label = _logit(tl.load(row_ptr + label), bias_ptr, label, None, logit_scale, soft_cap)[0]
        lanes = tl.arange(0, BLOCK_V)
        best = tl.full([BLOCK_V], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_V], tl.float32)
        above = tl.zeros([BLOCK_V], tl.int32)
        full = vocab_size // BLOCK_V * BLOCK_V
        for start in range(0, full, BLOCK_V):
            offs_v = start + lanes
            z = _logit(tl.load(row_ptr + offs_v), bias_ptr, offs_v, None, logit_scale, soft_cap)[0]
            z = tl.where(offs_v == label, -float("inf"), z)
            best, total = _add(z, best, total)
            if WITH_RANK:
                above += (z > z_label).to(tl.int32)
        if full < vocab_size:
            offs_v = full + lanes
            mask_v = offs_v < vocab_size
            x = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)
            z = _logit(x, bias_ptr, offs_v, mask_v, logit_scale, soft_cap)[0]
            z = tl.where(mask_v & (offs_v != label), z, -float("inf"))
            best, total = _add(z, best, total)
            if WITH_RANK:
                above += (z > z_label).to(tl.int32)
        others = tl.max(best, 0)
        top = tl.where(z_label > others, z_label, others)
        rest = tl.sum(total * tl.exp(best - top), 0)
        d_label = z_label - top
        e_label = tl.exp(d_label)
        nll = tl.where(d_label == 0, _log1p(rest), tl.log(rest + e_label) - d_label)
        if WITH_RANK:
            rank = tl.sum(above, 0).to(tl.int64)
        else:
            rank = tl.where(d_label == 0, 0, _NO_RANK).to(tl.int64)
        tl.store(nll_ptr + row, nll)
        tl.store(lse_ptr + row, nll + z_label)
        tl.store(rank_ptr + row, tl.where(nll == nll, rank, _NO_RANK))

        if grad_ptr is not None:
            inverse = 1.0 / (rest + e_label)
            g_label = tl.where(e_label > rest, other_share - rest * inverse, e_label * inverse - label_share)
            g_row_ptr = grad_ptr + row * grad_stride
            for start in range(0, full, BLOCK_V):
                offs_v = start + lanes
                z, slope = _logit(tl.load(row_ptr + offs_v), bias_ptr, offs_v, None, logit_scale, soft_cap)
                tl.debug_barrier()
                p = tl.where(offs_v == label, g_label, tl.exp(z - top) * inverse)
                tl.store(g_row_ptr + offs_v, (p * slope * logit_scale).to(grad_ptr.dtype.element_ty))
            if full < vocab_size:
                offs_v = full + lanes
                mask_v = offs_v < vocab_size
                x = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)
                z, slope = _logit(x, bias_ptr, offs_v, mask_v, logit_scale, soft_cap)
                tl.debug_barrier()
                p = tl.where(offs_v == label, g_label, tl.exp(z - top) * inverse)
                tl.store(g_row_ptr + offs_v, (p * slope * logit_scale).to(grad_ptr.dtype.element_ty), mask=mask_v)
    else:
        tl.store(nll_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        tl.store(rank_ptr + row, tl.full([], _NO_RANK, tl.int64))


@triton.jit
def _add_teacher(z, offs_v, best, total, moment, where):
    """One more value per lane into m, s, the sum of (z - m) exp(z - m) and m's first place.

    |d| is cut at 1,000, where exp is 0: -inf would turn 0 * d into NaN.
    """
    d = z - best
    e = tl.exp(-tl.abs(d))
    cut = tl.minimum(tl.maximum(d, -1000.0), 1000.0)
    moment = tl.where(d > 0, e * (moment - cut * total), moment + e * cut)
    total = tl.where(d > 0, total * e + 1.0, total + e)
    return tl.where(d > 0, z, best), total, moment, tl.where(d > 0, offs_v, where)


@triton.jit
def _teacher_kernel(
    logits_ptr,  # (C, V) fp32, row_stride apart
    prob_ptr,  # the same memory as (C, V) of the probabilities' dtype, prob_stride apart; None: not wanted
    counts_ptr,  # (C,) bool
    bias_ptr,  # (V,) fp32 or None
    entropy_ptr,  # (C,) fp32
    argmax_ptr,  # (C,) int64
    bias_mean_ptr,  # (C,) fp32 or None
    row_stride,
    prob_stride,
    vocab_size,
    logit_scale,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counts_ptr + row):
        row_ptr = logits_ptr + row * row_stride
        lanes = tl.arange(0, BLOCK_V)
        best = tl.full([BLOCK_V], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_V], tl.float32)
        moment = tl.zeros([BLOCK_V], tl.float32)
        where = tl.zeros([BLOCK_V], tl.int32)
        full = vocab_size // BLOCK_V * BLOCK_V
        for start in range(0, full, BLOCK_V):
            offs_v = start + lanes
            z = _logit(tl.load(row_ptr + offs_v), bias_ptr, offs_v, None, logit_scale, None)[0]
            best, total, moment, where = _add_teacher(z, offs_v, best, total, moment, where)
        if full < vocab_size:
            offs_v = full + lanes
            mask_v = offs_v < vocab_size
            x = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)
            z = _logit(x, bias_ptr, offs_v, mask_v, logit_scale, None)[0]
            z = tl.where(mask_v, z, -float("inf"))
            best, total, moment, where = _add_teacher(z, offs_v, best, total, moment, where)
        top = tl.max(best, 0)
        shift = best - top
        share = tl.exp(shift)
        mass = tl.sum(share * total, 0)
        inverse = 1.0 / mass
        entropy = tl.log(mass) - tl.sum(share * (moment + shift * total), 0) * inverse
        tl.store(entropy_ptr + row, entropy)
        first = tl.min(tl.where(best == top, where, 2147483647), 0)
        tl.store(argmax_ptr + row, first.to(tl.int64))

        if prob_ptr is not None:
            p_row_ptr = prob_ptr + row * prob_stride
            bias_mean = tl.zeros([BLOCK_V], tl.float32)
            for start in range(0, full, BLOCK_V):
                offs_v = start + lanes
                z = _logit(tl.load(row_ptr + offs_v), bias_ptr, offs_v, None, logit_scale, None)[0]
                tl.debug_barrier()
                p = tl.exp(z - top) * inverse
                tl.store(p_row_ptr + offs_v, p.to(prob_ptr.dtype.element_ty))
                if bias_mean_ptr is not None:
                    bias_mean += p * tl.load(bias_ptr + offs_v)
            if full < vocab_size:
                offs_v = full + lanes
                mask_v = offs_v < vocab_size
                x = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)
                z = _logit(x, bias_ptr, offs_v, mask_v, logit_scale, None)[0]
                tl.debug_barrier()
                p = tl.exp(z - top) * inverse
                tl.store(p_row_ptr + offs_v, p.to(prob_ptr.dtype.element_ty), mask=mask_v)
                if bias_mean_ptr is not None:
                    bias_mean += tl.where(mask_v, p * tl.load(bias_ptr + offs_v, mask=mask_v), 0.0)
            if bias_mean_ptr is not None:
                tl.store(bias_mean_ptr + row, tl.sum(bias_mean, 0))
    else:
        tl.store(entropy_ptr + row, 0.0)
        tl.store(argmax_ptr + row, tl.full([], 0, tl.int64))
        if bias_mean_ptr is not None:
            tl.store(bias_mean_ptr + row, 0.0)


@triton.jit
def _kl_kernel(
    hidden_ptr,  # (C, D)
    mean_ptr,  # (U, D) fp32
    entropy_ptr,  # (U,) fp32
    bias_mean_ptr,  # (U,) fp32 or None
    rows_ptr,  # (C,) int64 into U
    lse_ptr,  # (C,) fp32
    counts_ptr,  # (C,) bool
    product_ptr,  # (C, D) fp32 or the gradient's dtype, perhaps the gradient itself; None without a gradient
    grad_ptr,  # (C, D), written; None without a gradient
    kl_ptr,  # (C,) fp32
    hidden_size,
    logit_scale,
    grad_scale,  # kl_weight * logit_scale
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counts_ptr + row):
        teacher = tl.load(rows_ptr + row)
        x_row_ptr = hidden_ptr + row * hidden_size
        m_row_ptr = mean_ptr + teacher * hidden_size
        dot = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, hidden_size, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask_d = offs_d < hidden_size
            m = tl.load(m_row_ptr + offs_d, mask=mask_d, other=0.0)
            dot += tl.load(x_row_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) * m
            if grad_ptr is not None:
                product = tl.load(product_ptr + row * hidden_size + offs_d, mask=mask_d, other=0.0)
                g = product.to(tl.float32) - grad_scale * m
                tl.store(grad_ptr + row * hidden_size + offs_d, g.to(grad_ptr.dtype.element_ty), mask=mask_d)
        z = tl.sum(dot, 0)
        if bias_mean_ptr is not None:
            z += tl.load(bias_mean_ptr + teacher)
        tl.store(kl_ptr + row, tl.load(lse_ptr + row) - logit_scale * z - tl.load(entropy_ptr + teacher))
    else:
        tl.store(kl_ptr + row, 0.0)


@triton.jit
def _reduce_kernel(
    nll_ptr,  # (R,) fp32
    kl_ptr,  # (R,) fp32 or None
    weights_ptr,  # (R,) fp32
    loss_ptr,  # () fp32
    weight_sum_ptr,  # () fp32
    num_rows,
    nll_weight,
    kl_weight,
    BLOCK_R: tl.constexpr,
):
    loss = tl.zeros([BLOCK_R], tl.float32)
    weight = tl.zeros([BLOCK_R], tl.float32)
    full = num_rows // BLOCK_R * BLOCK_R
    for start in range(0, full, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        w = tl.load(weights_ptr + offs_r)
        value = tl.load(nll_ptr + offs_r)
        if kl_ptr is not None:
            value = nll_weight * value + kl_weight * tl.load(kl_ptr + offs_r)
        loss += tl.where(w != 0, w * value, 0.0)
        weight += w
    offs_r = full + tl.arange(0, BLOCK_R)
    mask_r = offs_r < num_rows
    w = tl.load(weights_ptr + offs_r, mask=mask_r, other=0.0)
    value = tl.load(nll_ptr + offs_r, mask=mask_r, other=0.0)
    if kl_ptr is not None:
        value = nll_weight * value + kl_weight * tl.load(kl_ptr + offs_r, mask=mask_r, other=0.0)
    loss += tl.where(w != 0, w * value, 0.0)
    weight += w
    tl.store(loss_ptr, tl.sum(loss, 0))
    tl.store(weight_sum_ptr, tl.sum(weight, 0))


@triton.jit
def _scale_kernel(
    grad_ptr,  # (R, D)
    weights_ptr,  # (R,) fp32
    grad_loss_ptr,  # () fp32
    out_ptr,  # (R, D)
    hidden_size,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row)
    scale = weight * tl.load(grad_loss_ptr)
    for start in range(0, hidden_size, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < hidden_size
        g = tl.load(grad_ptr + row * hidden_size + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        g = tl.where(weight != 0, g * scale, 0.0)
        tl.store(out_ptr + row * hidden_size + offs_d, g.to(out_ptr.dtype.element_ty), mask=mask_d)


def narrow_view(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The front half of each fp32 row as 16-bit numbers: (C, V) of `dtype` over the same memory, strides (2 Vs, 1).

    Args:
        logits: (C, V) fp32, row stride Vs.
        dtype: bfloat16 or float16.
    """
    assert (logits.dtype, dtype.itemsize) == (torch.float32, 2), "16-bit numbers in fp32 rows"
    return logits.view(dtype)[:, : logits.shape[1]]


def row_pass(
    logits: Tensor,  # (C, V) fp32, row stride Vs >= V
    labels: Tensor,  # (C,) int64, all inside [0, V)
    counts: Tensor,  # (C,) bool
    bias: Tensor | None,  # (V,) fp32
    nll: Tensor,  # (C,) fp32, written
    logsumexp: Tensor,  # (C,) fp32, written
    label_rank: Tensor,  # (C,) int64, written
    *,
    logit_scale: float,
    soft_cap: float | None,
    label_share: float,
    with_grad: bool,
    with_rank: bool,
    narrow: torch.dtype | None,
) -> None:
    """Statistics of a chunk of rows, and their logits turned into the gradient of the row's loss by h . W, in place.

    z = logit_scale * (x + bias), with a soft-cap z <- cap * tanh(z / cap), p = softmax(z) and
    g_v = logit_scale * z'_v * (p_v - label_share * [v = label]), z' = 1 without a cap.

    `label_rank` is the number of logits above the label's; without `with_rank` it is 0 where there is none and NO_RANK
    elsewhere. A row that does not count gets nll = logsumexp = 0 and NO_RANK, and its logits stay. A row whose softmax
    is NaN (a NaN, a +inf, or all -inf) gets NaN and NO_RANK.

    Args:
        narrow: bfloat16 or float16 writes g into the front half of each row (`narrow_view`); None writes fp32.
    """
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "logits must be fp32 rows"
    rows, vocab_size = logits.shape
    grad = None
    if with_grad:
        grad = logits if narrow is None else narrow_view(logits, narrow)
    launch(
        _row_kernel,
        (rows,),
        logits,
        grad,
        labels,
        counts,
        bias,
        nll,
        logsumexp,
        label_rank,
        logits.stride(0),
        0 if grad is None else grad.stride(0),
        vocab_size,
        logit_scale,
        soft_cap,
        label_share,
        1.0 - label_share,
        WITH_RANK=with_rank,
        BLOCK_V=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
    )


def teacher_pass(
    logits: Tensor,  # (C, V) fp32, row stride Vs >= V
    counts: Tensor,  # (C,) bool
    bias: Tensor | None,  # (V,) fp32
    entropy: Tensor,  # (C,) fp32, written
    argmax: Tensor,  # (C,) int64, written
    bias_mean: Tensor | None,  # (C,) fp32, written; needs a bias and the probabilities
    *,
    logit_scale: float,
    with_probabilities: bool,
    narrow: torch.dtype | None,
) -> None:
    """Entropy, argmax and mean bias of P = softmax(logit_scale * (x + bias)), and the logits turned into P in place.

    The lowest id wins ties. A row that does not count gets zeros, and its logits stay. A row whose softmax is NaN gets
    a NaN entropy and some argmax inside [0, V).

    Args:
        with_probabilities: False leaves the logits alone.
        narrow: bfloat16 or float16 writes P into the front half of each row (`narrow_view`); None writes fp32.
    """
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "logits must be fp32 rows"
    rows, vocab_size = logits.shape
    prob = None
    if with_probabilities:
        prob = logits if narrow is None else narrow_view(logits, narrow)
    launch(
        _teacher_kernel,
        (rows,),
        logits,
        prob,
        counts,
        bias,
        entropy,
        argmax,
        bias_mean,
        logits.stride(0),
        0 if prob is None else prob.stride(0),
        vocab_size,
        logit_scale,
        BLOCK_V=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
    )


def kl_pass(
    hidden: Tensor,  # (C, D)
    mean: Tensor,  # (U, D) fp32
    entropy: Tensor,  # (U,) fp32
    bias_mean: Tensor | None,  # (U,) fp32
    rows: Tensor,  # (C,) int64 into U
    logsumexp: Tensor,  # (C,) fp32
    counts: Tensor,  # (C,) bool
    product: Tensor,  # (C, D) gradient without the teacher's part, fp32 or as grad_hidden, which it may be
    grad_hidden: Tensor,  # (C, D), written with a gradient
    kl: Tensor,  # (C,) fp32, written
    *,
    logit_scale: float,
    kl_weight: float,
    with_grad: bool,
) -> None:
    """kl_i = lse_i - logit_scale * (x_i . M_u + bias_mean_u) - H_u, grad_i = product_i - kl_weight * logit_scale * M_u.

    The difference of two near vectors when target and drafter agree: a product rounded to 16 bits would spoil it.

    A row that does not count gets kl = 0; its gradient stays, and its entry of `rows` is not used.
    """
    assert all(t.is_contiguous() for t in (hidden, mean, product, grad_hidden)), "rows of D must be dense"
    num_rows, hidden_size = hidden.shape
    launch(
        _kl_kernel,
        (num_rows,),
        hidden,
        mean,
        entropy,
        bias_mean,
        rows,
        logsumexp,
        counts,
        product if with_grad else None,
        grad_hidden if with_grad else None,
        kl,
        hidden_size,
        logit_scale,
        kl_weight * logit_scale,
        BLOCK_D=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
    )


def reduce(
    nll: Tensor,  # (R,) fp32
    kl: Tensor | None,  # (R,) fp32
    row_weights: Tensor,  # (R,) fp32
    loss_sum: Tensor,  # () fp32, written
    weight_sum: Tensor,  # () fp32, written
    *,
    kl_weight: float,
) -> None:
    """loss_sum = sum of w * nll, or of w * ((1 - kl_weight) * nll + kl_weight * kl), and weight_sum = sum of w.

    One program adds in a fixed order. Rows of weight 0 are selected away, whatever they hold. No rows give zeros.
    """
    launch(
        _reduce_kernel,
        (1,),
        nll,
        kl,
        row_weights,
        loss_sum,
        weight_sum,
        nll.shape[0],
        1.0 - kl_weight,
        kl_weight,
        BLOCK_R=_REDUCE_BLOCK,
        num_warps=_REDUCE_WARPS,
        num_stages=1,
    )


def scale_rows(
    grad_hidden: Tensor,  # (R, D)
    row_weights: Tensor,  # (R,) fp32
    grad_loss: Tensor,  # () fp32
    out: Tensor,  # (R, D), written; may be grad_hidden
) -> None:
    """out_i = grad_hidden_i * (row_weights_i * grad_loss), computed in fp32; rows of weight 0 are exact zeros."""
    assert all(t.is_contiguous() for t in (grad_hidden, out)), "rows of D must be dense"
    rows, hidden_size = grad_hidden.shape
    launch(
        _scale_kernel,
        (rows,),
        grad_hidden,
        row_weights,
        grad_loss,
        out,
        hidden_size,
        BLOCK_D=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
    )


def _case(
    name: str,
    kernel: Any,
    arguments: Mapping[str, str | None],
    block: tuple[str, int] = ("BLOCK_V", _BLOCK),
    num_warps: int = _WARPS,
    **constexprs: Any,
) -> CompileCase:
    """A case whose pointers, strides and hidden size are multiples of 16; an argument of type None is absent."""
    return CompileCase(
        name=f"loss_{name}",
        kernel=kernel,
        signature={k: v for k, v in arguments.items() if v is not None},
        constexprs={k: None for k, v in arguments.items() if v is None} | constexprs | {block[0]: block[1]},
        # Not the vocabulary: it may be odd, and the unmasked loop must not need it.
        divisible=tuple(k for k, v in arguments.items() if v and (v[0] == "*" or k.endswith(("_stride", "n_size")))),
        num_warps=num_warps,
        num_stages=1,
    )


def _row_case(name: str, grad: str | None, *, extras: bool, rank: bool) -> CompileCase:
    arguments = {
        "logits_ptr": "*fp32",
        "grad_ptr": grad,
        "labels_ptr": "*i64",
        "counts_ptr": "*i1",
        "bias_ptr": "*fp32" if extras else None,
        "nll_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "rank_ptr": "*i64",
        "row_stride": "i32",
        "grad_stride": "i32",
        "vocab_size": "i32",
        "logit_scale": "fp32",
        "soft_cap": "fp32" if extras else None,
        "label_share": "fp32",
        "other_share": "fp32",
    }
    return _case(f"row_{name}", _row_kernel, arguments, WITH_RANK=rank)


def _teacher_case(name: str, prob: str | None, *, bias: bool) -> CompileCase:
    arguments = {
        "logits_ptr": "*fp32",
        "prob_ptr": prob,
        "counts_ptr": "*i1",
        "bias_ptr": "*fp32" if bias else None,
        "entropy_ptr": "*fp32",
        "argmax_ptr": "*i64",
        "bias_mean_ptr": "*fp32" if bias and prob else None,
        "row_stride": "i32",
        "prob_stride": "i32",
        "vocab_size": "i32",
        "logit_scale": "fp32",
    }
    return _case(f"teacher_{name}", _teacher_kernel, arguments)


def _hidden_cases(of: str) -> list[CompileCase]:
    kl = {
        "hidden_ptr": f"*{of}",
        "mean_ptr": "*fp32",
        "entropy_ptr": "*fp32",
        "bias_mean_ptr": "*fp32",
        "rows_ptr": "*i64",
        "lse_ptr": "*fp32",
        "counts_ptr": "*i1",
        "product_ptr": "*fp32",
        "grad_ptr": f"*{of}",
        "kl_ptr": "*fp32",
        "hidden_size": "i32",
        "logit_scale": "fp32",
        "grad_scale": "fp32",
    }
    scale = {
        "grad_ptr": f"*{of}",
        "weights_ptr": "*fp32",
        "grad_loss_ptr": "*fp32",
        "out_ptr": f"*{of}",
        "hidden_size": "i32",
    }
    block = ("BLOCK_D", _BLOCK)
    return [_case(f"kl_{of}", _kl_kernel, kl, block), _case(f"scale_rows_{of}", _scale_kernel, scale, block)]


def compile_cases() -> list[CompileCase]:
    """Every kernel in 16 and 32 bits, and the branches that cost registers."""
    reduce: dict[str, str | None] = {
        "nll_ptr": "*fp32",
        "kl_ptr": "*fp32",
        "weights_ptr": "*fp32",
        "loss_ptr": "*fp32",
        "weight_sum_ptr": "*fp32",
        "num_rows": "i32",
        "nll_weight": "fp32",
        "kl_weight": "fp32",
    }
    return [
        _row_case("bf16", "*bf16", extras=False, rank=False),
        _row_case("fp32", "*fp32", extras=False, rank=False),
        _row_case("bf16_rank", "*bf16", extras=False, rank=True),
        _row_case("bf16_bias_cap_rank", "*bf16", extras=True, rank=True),
        _row_case("statistics_rank", None, extras=False, rank=True),
        _teacher_case("bf16", "*bf16", bias=False),
        _teacher_case("fp32", "*fp32", bias=False),
        _teacher_case("bf16_bias", "*bf16", bias=True),
        _teacher_case("statistics", None, bias=False),
        *_hidden_cases("bf16"),
        *_hidden_cases("fp32"),
        _case("reduce", _reduce_kernel, reduce | {"kl_ptr": None}, ("BLOCK_R", _REDUCE_BLOCK), _REDUCE_WARPS),
        _case("reduce_kl", _reduce_kernel, reduce, ("BLOCK_R", _REDUCE_BLOCK), _REDUCE_WARPS),
    ]
