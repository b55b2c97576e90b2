"""Triton kernels of block_attention, whose module has the maths: forward, dq, dk/dv of context and blocks.

Per key head the queries form A*K*G rows (block a, slot k, query head g of the key head's G; row (a*K + k)*G + g), so
that one tile of rows shares its keys. `forward` and `dq` give a program BLOCK_M rows and walk the context positions
that any of them sees: a masked head, a middle that every row sees and that has no masks, a masked tail. `dkv_context`
gives a program BLOCK_N positions and walks the rows of the blocks that see any of them, cut in the same three parts;
`dkv_block` does so for the blocks' own keys. Each output element is written once, by one program, in a fixed order:
no atomics, nothing to zero before, equal bits in every run. No kernel reads what a program of the same launch writes,
so the programs may run in any order.

Any order of the anchors is correct; ascending ones within a row make the ranges tight. Dead blocks (from num_anchors
on) are neither read nor walked. Context positions between the first and the last one that a tile sees must be finite.
"""

# Triton kernels are not typed: their arguments are the compiler's, and the decorator hides what it returns.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_graph.kernels.backend import CHIPS, CompileCase, launch

_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
_LN_2: tl.constexpr = tl.constexpr(math.log(2.0))
_FAR: tl.constexpr = tl.constexpr(2**31 - 1)  # beyond every position, block and row


@triton.jit
def _load(ptr, offs, mask, E: tl.constexpr, BLOCK_E: tl.constexpr, MASKED: tl.constexpr):
    """Rows of E elements from ptr + offs on, padded to BLOCK_E with zeros; with MASKED, rows off the mask are zeros."""
    offs_e = tl.arange(0, BLOCK_E)
    ptrs = ptr + offs[:, None] + offs_e[None, :]
    if E != BLOCK_E:
        inside = offs_e[None, :] < E
        return tl.load(ptrs, mask=(mask[:, None] & inside) if MASKED else inside, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=mask[:, None], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _store(ptr, offs, mask, values, E: tl.constexpr, BLOCK_E: tl.constexpr):
    offs_e = tl.arange(0, BLOCK_E)
    ptrs = ptr + offs[:, None] + offs_e[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (offs_e[None, :] < E))


@triton.jit
def _live_blocks(num_anchors_ptr, total):
    return tl.minimum(tl.maximum(tl.load(num_anchors_ptr), 0), total).to(tl.int32)


@triton.jit
def _bounds(anchors_ptr, row_starts_ptr, blocks, mask, num_tokens):
    """First position of the row and the anchor, both within [0, T] whatever the memory holds; 0 off the mask."""
    anchor = tl.load(anchors_ptr + blocks, mask=mask, other=0)
    start = tl.load(row_starts_ptr + blocks, mask=mask, other=0)
    anchor = tl.minimum(tl.maximum(anchor, 0), num_tokens).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), num_tokens).to(tl.int32)
    return start, anchor


@triton.jit
def _head_rows(rows, kv_head, GROUP: tl.constexpr, KV_HEADS: tl.constexpr):
    """Query row -> row of (A*K*H, ...), 64 bits."""
    return (rows // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP


@triton.jit
def _cut(lo, clear_lo, clear_hi, hi, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Cut [lo, hi) into a masked head, an unmasked middle within [clear_lo, clear_hi), and a masked tail.

    The middle has whole blocks of BLOCK; the edges have blocks of EDGE, fewer registers beside their masks.
    Returns (blocks of the head, start of the middle, its blocks, start of the tail, its blocks).
    """
    hi = tl.maximum(lo, hi)
    clear_lo = tl.minimum(tl.maximum(clear_lo, lo), hi)
    head = tl.cdiv(clear_lo - lo, EDGE)
    middle_start = lo + head * EDGE
    middle = tl.maximum(tl.minimum(clear_hi, hi) - middle_start, 0) // BLOCK
    tail_start = middle_start + middle * BLOCK
    tail = tl.cdiv(tl.maximum(hi - tail_start, 0), EDGE)
    return head, middle_start, middle, tail_start, tail


@triton.jit
def _edge(i, lo, head, tail_start, EDGE: tl.constexpr):
    """Start of the i-th masked block: those of the head, then those of the tail."""
    return tl.where(i < head, lo + i * EDGE, tail_start + (i - head) * EDGE)


@triton.jit
def _anew(start, total):
    """`start`, written so that the compiler takes it for another value (total >= 0) and computes what hangs on it anew.

    Used after the loops: the store addresses would otherwise be kept through them, in registers that they lack.
    """
    return start + tl.minimum(total, 0)


@triton.jit
def _absorb(q, keys, values, seen, row_max, row_sum, acc, scale_log2, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """Online softmax over one more block of keys. FIRST: a row may have seen no key so far, nor see one here."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_max
    if FIRST:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.exp2(scores * scale_log2 - shift[:, None])
    shrink = tl.exp2(row_max - shift)
    row_sum = row_sum * shrink + tl.sum(probs, 1)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _tile(
    first_row,
    live,
    anchors_ptr,
    row_starts_ptr,
    num_tokens,
    window,
    kv_head,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Query rows of a tile: rows, their blocks and slots, which are alive, first and past-last position, head rows."""
    rows = first_row + tl.arange(0, BLOCK_M)
    blocks = rows // (K * GROUP)
    slots = rows // GROUP
    alive = blocks < live
    start, upper = _bounds(anchors_ptr, row_starts_ptr, blocks, alive, num_tokens)
    lower = tl.maximum(start, upper + slots % K - window + 1)
    return rows, blocks, slots, alive, lower, upper, _head_rows(rows, kv_head, GROUP, KV_HEADS)


@triton.jit
def _own_keys(
    k_ptr,
    v_ptr,
    own,
    last_own,
    blocks,
    slots,
    kv_head,
    K: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Keys and values of the tile's own blocks from `own` on, and which of them each row sees."""
    keys = own + tl.arange(0, EDGE)
    offs = (keys.to(tl.int64) * KV_HEADS + kv_head) * E
    seen = blocks[:, None] == (keys // K)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= slots[:, None])
    k = _load(k_ptr, offs, keys < last_own, E, BLOCK_E, True)
    v = _load(v_ptr, offs, keys < last_own, E, BLOCK_E, True)
    return k, v, seen


@triton.jit(do_not_specialize=["total", "num_tokens", "window"])
def _forward_kernel(
    q_ptr,  # (A, K, H, E)
    k_context_ptr,  # (T, Hk, E)
    v_context_ptr,  # (T, Hk, E)
    k_block_ptr,  # (A, K, Hk, E)
    v_block_ptr,  # (A, K, Hk, E)
    anchors_ptr,  # (A,) int64
    row_starts_ptr,  # (A,) int64
    num_anchors_ptr,  # () int64
    out_ptr,  # (A, K, H, E)
    lse_ptr,  # (A, K, H) f32
    total,  # A
    num_tokens,  # T
    window,
    scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    # Later anchors have the longer contexts: they start first, so that short programs fill the end.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1)
    live = _live_blocks(num_anchors_ptr, total)
    rows, blocks, slots, alive, lower, upper, head_rows = _tile(
        first_row, live, anchors_ptr, row_starts_ptr, num_tokens, window, kv_head, K, GROUP, KV_HEADS, BLOCK_M
    )
    q = _load(q_ptr, head_rows * E, alive, E, BLOCK_E, True)
    scale_log2 = scale * _LOG2_E

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    # Every query sees itself: after its own keys, the maximum of a live row is finite.
    first_own = first_row // (K * GROUP) * K
    last_own = tl.minimum((first_row + BLOCK_M - 1) // (K * GROUP) + 1, live) * K
    for own in range(first_own, last_own, EDGE):
        k, v, seen = _own_keys(
            k_block_ptr, v_block_ptr, own, last_own, blocks, slots, kv_head, K, KV_HEADS, E, BLOCK_E, CAUSAL, EDGE
        )
        row_max, row_sum, acc = _absorb(q, k, v, seen, row_max, row_sum, acc, scale_log2, True, True)

    lo, hi = tl.min(tl.where(alive, lower, _FAR)), tl.max(tl.where(alive, upper, 0))
    clear_lo, clear_hi = tl.max(tl.where(alive, lower, 0)), tl.min(tl.where(alive, upper, _FAR))
    head, middle_start, middle, tail_start, tail = _cut(lo, clear_lo, clear_hi, hi, BLOCK_N, EDGE)
    for i in range(head + tail):
        positions = _edge(i, lo, head, tail_start, EDGE) + tl.arange(0, EDGE)
        offs = (positions.to(tl.int64) * KV_HEADS + kv_head) * E
        seen = (positions[None, :] >= lower[:, None]) & (positions[None, :] < upper[:, None])
        k = _load(k_context_ptr, offs, positions < hi, E, BLOCK_E, True)
        v = _load(v_context_ptr, offs, positions < hi, E, BLOCK_E, True)
        row_max, row_sum, acc = _absorb(q, k, v, seen, row_max, row_sum, acc, scale_log2, True, False)
    for i in range(middle):
        positions = middle_start + i * BLOCK_N + tl.arange(0, BLOCK_N)
        offs = (positions.to(tl.int64) * KV_HEADS + kv_head) * E
        k = _load(k_context_ptr, offs, alive, E, BLOCK_E, False)
        v = _load(v_context_ptr, offs, alive, E, BLOCK_E, False)
        row_max, row_sum, acc = _absorb(q, k, v, alive, row_max, row_sum, acc, scale_log2, False, False)

    # Dead rows may hold NaN here: selected, never multiplied.
    rows = _anew(first_row, total) + tl.arange(0, BLOCK_M)
    head_rows = _head_rows(rows, kv_head, GROUP, KV_HEADS)
    alive = rows < live * (K * GROUP)
    mask = rows < total * (K * GROUP)
    row_sum = tl.where(alive, row_sum, 1.0)
    out = tl.where(alive[:, None], acc / row_sum[:, None], 0.0)
    lse = tl.where(alive, (row_max + tl.log2(row_sum)) * _LN_2, 0.0)
    _store(out_ptr, head_rows * E, mask, out, E, BLOCK_E)
    tl.store(lse_ptr + head_rows, lse, mask=mask)


@triton.jit
def _add_dq(q, grad, keys, values, seen, lse_log2, delta, dq, scale_log2, MASKED: tl.constexpr):
    """dq of one more block of keys, without the factor scale."""
    probs = tl.exp2(tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2 - lse_log2[:, None])
    dscores = probs * (tl.dot(grad, tl.trans(values), input_precision="ieee") - delta[:, None])
    if MASKED:
        dscores = tl.where(seen, dscores, 0.0)
    return tl.dot(dscores.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["total", "num_tokens", "window"])
def _dq_kernel(
    q_ptr,  # (A, K, H, E)
    k_context_ptr,  # (T, Hk, E)
    v_context_ptr,  # (T, Hk, E)
    k_block_ptr,  # (A, K, Hk, E)
    v_block_ptr,  # (A, K, Hk, E)
    anchors_ptr,  # (A,) int64
    row_starts_ptr,  # (A,) int64
    num_anchors_ptr,  # () int64
    out_ptr,  # (A, K, H, E)
    lse_ptr,  # (A, K, H) f32
    grad_out_ptr,  # (A, K, H, E)
    delta_ptr,  # (A, K, H) f32, written
    dq_ptr,  # (A, K, H, E), written
    total,  # A
    num_tokens,  # T
    window,
    scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1)
    live = _live_blocks(num_anchors_ptr, total)
    rows, blocks, slots, alive, lower, upper, head_rows = _tile(
        first_row, live, anchors_ptr, row_starts_ptr, num_tokens, window, kv_head, K, GROUP, KV_HEADS, BLOCK_M
    )
    mask = rows < total * (K * GROUP)
    q = _load(q_ptr, head_rows * E, alive, E, BLOCK_E, True)
    grad = _load(grad_out_ptr, head_rows * E, alive, E, BLOCK_E, True)
    out = _load(out_ptr, head_rows * E, alive, E, BLOCK_E, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head_rows, delta, mask=mask)
    lse_log2 = tl.load(lse_ptr + head_rows, mask=alive, other=0.0) * _LOG2_E
    scale_log2 = scale * _LOG2_E
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    first_own = first_row // (K * GROUP) * K
    last_own = tl.minimum((first_row + BLOCK_M - 1) // (K * GROUP) + 1, live) * K
    for own in range(first_own, last_own, EDGE):
        k, v, seen = _own_keys(
            k_block_ptr, v_block_ptr, own, last_own, blocks, slots, kv_head, K, KV_HEADS, E, BLOCK_E, CAUSAL, EDGE
        )
        dq = _add_dq(q, grad, k, v, seen, lse_log2, delta, dq, scale_log2, True)

    lo, hi = tl.min(tl.where(alive, lower, _FAR)), tl.max(tl.where(alive, upper, 0))
    clear_lo, clear_hi = tl.max(tl.where(alive, lower, 0)), tl.min(tl.where(alive, upper, _FAR))
    head, middle_start, middle, tail_start, tail = _cut(lo, clear_lo, clear_hi, hi, BLOCK_N, EDGE)
    for i in range(head + tail):
        positions = _edge(i, lo, head, tail_start, EDGE) + tl.arange(0, EDGE)
        offs = (positions.to(tl.int64) * KV_HEADS + kv_head) * E
        seen = (positions[None, :] >= lower[:, None]) & (positions[None, :] < upper[:, None])
        k = _load(k_context_ptr, offs, positions < hi, E, BLOCK_E, True)
        v = _load(v_context_ptr, offs, positions < hi, E, BLOCK_E, True)
        dq = _add_dq(q, grad, k, v, seen, lse_log2, delta, dq, scale_log2, True)
    for i in range(middle):
        positions = middle_start + i * BLOCK_N + tl.arange(0, BLOCK_N)
        offs = (positions.to(tl.int64) * KV_HEADS + kv_head) * E
        k = _load(k_context_ptr, offs, alive, E, BLOCK_E, False)
        v = _load(v_context_ptr, offs, alive, E, BLOCK_E, False)
        dq = _add_dq(q, grad, k, v, alive, lse_log2, delta, dq, scale_log2, False)

    rows = _anew(first_row, total) + tl.arange(0, BLOCK_M)
    head_rows = _head_rows(rows, kv_head, GROUP, KV_HEADS)
    dq = tl.where((rows < live * (K * GROUP))[:, None], dq * scale, 0.0)
    _store(dq_ptr, head_rows * E, rows < total * (K * GROUP), dq, E, BLOCK_E)


@triton.jit
def _load_stat(ptr, head_rows, mask, MASKED: tl.constexpr):
    return tl.load(ptr + head_rows, mask=mask, other=0.0) if MASKED else tl.load(ptr + head_rows)


@triton.jit
def _add_dkv(
    k,  # (N, E)
    v,  # (N, E)
    q,  # (M, E)
    grad,  # (M, E)
    lse_ptr,
    delta_ptr,
    head_rows,  # (M,)
    inside,  # (M,), rows to be read
    seen,  # (N, M)
    dk,
    dv,
    scale_log2,
    MASKED: tl.constexpr,
):
    """dk (without the factor scale) and dv of one more block of query rows.

    The scores are (keys, rows), so that they are left operands of the sums as they are. Each row statistic is loaded
    where it is used: per column of the scores, it takes 16 registers a thread.
    """
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    lse_log2 = _load_stat(lse_ptr, head_rows, inside, MASKED) * _LOG2_E
    probs = tl.exp2(scores * scale_log2 - lse_log2[None, :])
    if MASKED:
        probs = tl.where(seen, probs, 0.0)
    dv = tl.dot(probs.to(grad.dtype), grad, dv, input_precision="ieee")
    dprobs = tl.dot(v, tl.trans(grad), input_precision="ieee")
    dscores = probs * (dprobs - _load_stat(delta_ptr, head_rows, inside, MASKED)[None, :])
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["total", "num_tokens", "window"])
def _dkv_context_kernel(
    q_ptr,  # (A, K, H, E)
    k_context_ptr,  # (T, Hk, E)
    v_context_ptr,  # (T, Hk, E)
    anchors_ptr,  # (A,) int64
    row_starts_ptr,  # (A,) int64
    num_anchors_ptr,  # () int64
    lse_ptr,  # (A, K, H) f32
    grad_out_ptr,  # (A, K, H, E)
    delta_ptr,  # (A, K, H) f32
    dk_ptr,  # (T, Hk, E), written
    dv_ptr,  # (T, Hk, E), written
    total,  # A
    num_tokens,  # T
    window,
    scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    first_key = tl.program_id(0) * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, num_tokens) - 1
    kv_head = tl.program_id(1)
    live = _live_blocks(num_anchors_ptr, total)

    # Blocks first..last-1 see some of these positions; from clear_first until clear_last, each query sees all of them.
    first, last, clear_first, clear_last = live, 0, live, live
    for begin in range(0, live, BLOCK_A):
        blocks = begin + tl.arange(0, BLOCK_A)
        start, upper = _bounds(anchors_ptr, row_starts_ptr, blocks, blocks < live, num_tokens)
        seen = (upper > first_key) & (tl.maximum(start, upper - window + 1) <= last_key)
        first = tl.minimum(first, tl.min(tl.where(seen, blocks, live)))
        last = tl.maximum(last, tl.max(tl.where(seen, blocks + 1, 0)))
        clear = (upper > last_key) & (tl.maximum(start, upper + K - window) <= first_key)
        clear_first = tl.minimum(clear_first, tl.min(tl.where(clear, blocks, live)))
    for begin in range(0, live, BLOCK_A):
        blocks = begin + tl.arange(0, BLOCK_A)
        start, upper = _bounds(anchors_ptr, row_starts_ptr, blocks, blocks < live, num_tokens)
        clear = (upper > last_key) & (tl.maximum(start, upper + K - window) <= first_key)
        clear_last = tl.minimum(clear_last, tl.min(tl.where(clear | (blocks < clear_first), live, blocks)))

    keys = first_key + tl.arange(0, BLOCK_N)
    offs = (keys.to(tl.int64) * KV_HEADS + kv_head) * E
    k = _load(k_context_ptr, offs, keys < num_tokens, E, BLOCK_E, True)
    v = _load(v_context_ptr, offs, keys < num_tokens, E, BLOCK_E, True)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    scale_log2 = scale * _LOG2_E

    lo, hi = first * (K * GROUP), last * (K * GROUP)
    head, middle_start, middle, tail_start, tail = _cut(
        lo, clear_first * (K * GROUP), clear_last * (K * GROUP), hi, BLOCK_M, EDGE
    )
    # From the last row down: concurrent programs start at different rows but end at the same, so that going down they
    # read the same rows at the same time, from the cache.
    for i in range(middle):
        rows = middle_start + (middle - 1 - i) * BLOCK_M + tl.arange(0, BLOCK_M)
        head_rows = _head_rows(rows, kv_head, GROUP, KV_HEADS)
        q = _load(q_ptr, head_rows * E, keys, E, BLOCK_E, False)
        grad = _load(grad_out_ptr, head_rows * E, keys, E, BLOCK_E, False)
        dk, dv = _add_dkv(k, v, q, grad, lse_ptr, delta_ptr, head_rows, keys, keys, dk, dv, scale_log2, False)
    for i in range(head + tail):
        rows = _edge(i, lo, head, tail_start, EDGE) + tl.arange(0, EDGE)
        inside = rows < hi
        start, upper = _bounds(anchors_ptr, row_starts_ptr, rows // (K * GROUP), inside, num_tokens)
        lower = tl.maximum(start, upper + rows // GROUP % K - window + 1)
        seen = (keys[:, None] >= lower[None, :]) & (keys[:, None] < upper[None, :])
        head_rows = _head_rows(rows, kv_head, GROUP, KV_HEADS)
        q = _load(q_ptr, head_rows * E, inside, E, BLOCK_E, True)
        grad = _load(grad_out_ptr, head_rows * E, inside, E, BLOCK_E, True)
        dk, dv = _add_dkv(k, v, q, grad, lse_ptr, delta_ptr, head_rows, inside, seen, dk, dv, scale_log2, True)

    keys = _anew(first_key, total) + tl.arange(0, BLOCK_N)
    offs = (keys.to(tl.int64) * KV_HEADS + kv_head) * E
    _store(dk_ptr, offs, keys < num_tokens, dk * scale, E, BLOCK_E)
    _store(dv_ptr, offs, keys < num_tokens, dv, E, BLOCK_E)


@triton.jit(do_not_specialize=["total"])
def _dkv_block_kernel(
    q_ptr,  # (A, K, H, E)
    k_block_ptr,  # (A, K, Hk, E)
    v_block_ptr,  # (A, K, Hk, E)
    num_anchors_ptr,  # () int64
    lse_ptr,  # (A, K, H) f32
    grad_out_ptr,  # (A, K, H, E)
    delta_ptr,  # (A, K, H) f32
    dk_ptr,  # (A, K, Hk, E), written
    dv_ptr,  # (A, K, Hk, E), written
    total,  # A
    scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    first_key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    live = _live_blocks(num_anchors_ptr, total)
    keys = first_key + tl.arange(0, BLOCK_N)
    alive = keys < live * K
    offs = (keys.to(tl.int64) * KV_HEADS + kv_head) * E
    k = _load(k_block_ptr, offs, alive, E, BLOCK_E, True)
    v = _load(v_block_ptr, offs, alive, E, BLOCK_E, True)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    scale_log2 = scale * _LOG2_E

    lo = first_key // K * (K * GROUP)
    hi = tl.minimum((first_key + BLOCK_N - 1) // K + 1, live) * (K * GROUP)
    for row in range(lo, hi, EDGE):
        rows = row + tl.arange(0, EDGE)
        inside = rows < hi
        seen = (keys // K)[:, None] == (rows // (K * GROUP))[None, :]
        if CAUSAL:
            seen = seen & (keys[:, None] <= (rows // GROUP)[None, :])
        head_rows = _head_rows(rows, kv_head, GROUP, KV_HEADS)
        q = _load(q_ptr, head_rows * E, inside, E, BLOCK_E, True)
        grad = _load(grad_out_ptr, head_rows * E, inside, E, BLOCK_E, True)
        dk, dv = _add_dkv(k, v, q, grad, lse_ptr, delta_ptr, head_rows, inside, seen, dk, dv, scale_log2, True)

    keys = _anew(first_key, total) + tl.arange(0, BLOCK_N)
    offs = (keys.to(tl.int64) * KV_HEADS + kv_head) * E
    mask = keys < total * K
    _store(dk_ptr, offs, mask, dk * scale, E, BLOCK_E)
    _store(dv_ptr, offs, mask, dv, E, BLOCK_E)


class Launch(NamedTuple):
    """Tile and resources of one kernel.

    A program owns block_m query rows and walks keys in steps of block_n, or owns block_n keys (dkv) and walks rows in
    steps of block_m. Masked parts are walked in steps of `edge`; dkv_block has no other parts.
    """

    block_m: int  # query rows
    block_n: int  # keys
    edge: int
    num_warps: int
    num_stages: int


class Launches(NamedTuple):
    """One launch configuration per kernel."""

    forward: Launch
    dq: Launch
    dkv_context: Launch
    dkv_block: Launch


_MOST_HEAD_DIM = 256
_BLOCK_A = 1024  # anchors that a dkv_context program looks at in one go: 4 a thread


def launches(head_dim: int, dtype: torch.dtype, chip: int = 90) -> Launches:
    """Launch configurations, a function of head dim, dtype and chip (compute capability, 80 or above) alone.

    Raises:
        ValueError: head_dim is above 256.
    """
    if head_dim > _MOST_HEAD_DIM:
        raise ValueError(
            f"the Triton kernels hold a head of at most {_MOST_HEAD_DIM} elements in registers; found {head_dim}. "
            "Use implementation='torch'"
        )
    if dtype == torch.float32:
        # Products run on the plain cores (no TF32), operands in registers: 32 rows still fit at 128, 16 at 256.
        rows = Launch(32 if head_dim <= 128 else 16, 32, 16, 4, 2)
        keys = Launch(16, 32, 16, 4, 2)
        return Launches(forward=rows, dq=rows, dkv_context=keys, dkv_block=keys)
    # 128 rows or 128 keys stay in a program, so that an H100 at its full rate of 4,096 FLOP a clock and multiprocessor
    # asks the L2 cache for no more than 32 bytes a clock (forward) or 16 (dk/dv): it gives some 30. The walked side
    # has 64, the least that keeps the tensor cores from waiting for operands in shared memory. Two warp groups hold
    # the accumulators of 128 elements (64 registers a thread in the forward, 128 in dk/dv), one those of 64 in the
    # forward, where two programs then share a multiprocessor and one's exponentials hide behind the other's products.
    # Two stages load one step ahead, some thousand clocks; a third fits the registers of the forward, but not those of
    # dk/dv at 128 on an A100. Half steps at the edges leave registers for the masks.
    if head_dim <= 64:
        return Launches(
            forward=Launch(128, 64, 32, 4, 3),
            dq=Launch(128, 64, 32, 8, 3),
            dkv_context=Launch(64, 128, 32, 8, 2),
            dkv_block=Launch(64, 128, 32, 8, 2),
        )
    if head_dim <= 128:
        return Launches(
            forward=Launch(128, 64, 32, 8, 3),
            dq=Launch(128, 64, 32, 8, 2),
            # Triton 3.6 spills 8 to 32 bytes on an A100 unless half as many rows are walked at a time.
            dkv_context=Launch(64, 128, 32, 8, 2) if chip >= 90 else Launch(32, 128, 16, 8, 2),
            dkv_block=Launch(64, 128, 32, 8, 2),
        )
    # Half of everything: accumulators, shared memory and spills as at 128.
    return Launches(
        forward=Launch(64, 32, 16, 4, 3),
        dq=Launch(64, 32, 16, 8, 2),
        dkv_context=Launch(32, 64, 16, 8, 2),
        dkv_block=Launch(32, 64, 16, 8, 2),
    )


def _chip(x: Tensor) -> int:
    """Compute capability of x's device, 90 for 9.0; the interpreter takes the configurations of 90."""
    if not x.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


class _Sizes(NamedTuple):
    total: int  # A
    block_size: int  # K
    group: int  # G
    kv_heads: int  # Hk
    head_dim: int  # E
    num_tokens: int  # T
    window: int

    @property
    def num_rows(self) -> int:
        """Query rows of one key head."""
        return self.total * self.block_size * self.group

    def constexprs(self, tile: Launch, *, causal: bool) -> dict[str, Any]:
        return {
            "K": self.block_size,
            "GROUP": self.group,
            "KV_HEADS": self.kv_heads,
            "E": self.head_dim,
            "BLOCK_E": max(16, triton.next_power_of_2(self.head_dim)),  # 16: least depth of a tensor-core product
            "CAUSAL": causal,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "EDGE": tile.edge,
            "BLOCK_A": _BLOCK_A,
        }


def _sizes(q: Tensor, k_context: Tensor, scale: float, sliding_window: int | None) -> _Sizes:
    total, block_size, heads, head_dim = q.shape
    num_tokens, kv_heads, _ = k_context.shape
    if not scale > 0:
        raise ValueError(f"scale must be positive; found {scale}")
    if max(total * block_size * heads, num_tokens + block_size) >= 2**30:
        raise ValueError(
            f"rows and positions are counted in 32 bits; found {total} blocks of {block_size}, {heads} heads and "
            f"{num_tokens} positions"
        )
    # A window of T + K hides nothing, and stays within 32 bits.
    window = min(num_tokens + block_size, num_tokens + block_size if sliding_window is None else sliding_window)
    return _Sizes(total, block_size, heads // kv_heads, kv_heads, head_dim, num_tokens, window)


def forward(
    q: Tensor,  # (A, K, H, E)
    k_context: Tensor,  # (T, Hk, E)
    v_context: Tensor,  # (T, Hk, E)
    k_block: Tensor,  # (A, K, Hk, E)
    v_block: Tensor,  # (A, K, Hk, E)
    anchors: Tensor,  # (A,) int64
    row_starts: Tensor,  # (A,) int64
    num_anchors: Tensor,  # () int64
    out: Tensor,  # (A, K, H, E), written
    lse: Tensor,  # (A, K, H) f32, written
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    tiles: Launches | None = None,
) -> None:
    """Attention output and natural logsumexp; blocks from num_anchors on get zeros. All tensors contiguous.

    Args:
        tiles: launch configurations instead of those of `launches`.

    Raises:
        ValueError: the head dim is above 256, the scale not positive, or there are 2**30 rows or positions.
    """
    sizes = _sizes(q, k_context, scale, sliding_window)
    tile = (tiles or launches(sizes.head_dim, q.dtype, _chip(q))).forward
    _launch(
        _forward_kernel,
        (triton.cdiv(sizes.num_rows, tile.block_m), sizes.kv_heads),
        *(q, k_context, v_context, k_block, v_block, anchors, row_starts, num_anchors, out, lse),
        *(sizes.total, sizes.num_tokens, sizes.window, scale),
        tile=tile,
        constexprs=sizes.constexprs(tile, causal=causal),
    )


def backward(
    q: Tensor,  # (A, K, H, E)
    k_context: Tensor,  # (T, Hk, E)
    v_context: Tensor,  # (T, Hk, E)
    k_block: Tensor,  # (A, K, Hk, E)
    v_block: Tensor,  # (A, K, Hk, E)
    anchors: Tensor,  # (A,) int64
    row_starts: Tensor,  # (A,) int64
    num_anchors: Tensor,  # () int64
    out: Tensor,  # (A, K, H, E) of the forward
    lse: Tensor,  # (A, K, H) f32 of the forward
    grad_out: Tensor,  # (A, K, H, E)
    delta: Tensor,  # (A, K, H) f32 scratch, written
    dq: Tensor,  # (A, K, H, E), written
    dk_context: Tensor,  # (T, Hk, E), written
    dv_context: Tensor,  # (T, Hk, E), written
    dk_block: Tensor,  # (A, K, Hk, E), written
    dv_block: Tensor,  # (A, K, Hk, E), written
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    tiles: Launches | None = None,
) -> None:
    """All gradients; blocks from num_anchors on and positions that nobody sees get zeros. All tensors contiguous.

    Args:
        tiles: launch configurations instead of those of `launches`.

    Raises:
        ValueError: as `forward`.
    """
    sizes = _sizes(q, k_context, scale, sliding_window)
    tiles = tiles or launches(sizes.head_dim, q.dtype, _chip(q))
    layout = (anchors, row_starts, num_anchors)
    numbers = (sizes.total, sizes.num_tokens, sizes.window, scale)
    _launch(  # first: it writes delta, which the others read
        _dq_kernel,
        (triton.cdiv(sizes.num_rows, tiles.dq.block_m), sizes.kv_heads),
        *(q, k_context, v_context, k_block, v_block, *layout, out, lse, grad_out, delta, dq, *numbers),
        tile=tiles.dq,
        constexprs=sizes.constexprs(tiles.dq, causal=causal),
    )
    _launch(
        _dkv_context_kernel,
        (triton.cdiv(sizes.num_tokens, tiles.dkv_context.block_n), sizes.kv_heads),
        *(q, k_context, v_context, *layout, lse, grad_out, delta, dk_context, dv_context, *numbers),
        tile=tiles.dkv_context,
        constexprs=sizes.constexprs(tiles.dkv_context, causal=causal),
    )
    _launch(
        _dkv_block_kernel,
        (triton.cdiv(sizes.total * sizes.block_size, tiles.dkv_block.block_n), sizes.kv_heads),
        *(q, k_block, v_block, num_anchors, lse, grad_out, delta, dk_block, dv_block, sizes.total, scale),
        tile=tiles.dkv_block,
        constexprs=sizes.constexprs(tiles.dkv_block, causal=causal),
    )


def _launch(kernel: Any, grid: tuple[int, int], *args: Any, tile: Launch, constexprs: dict[str, Any]) -> None:
    options = _taken(kernel, constexprs)
    launch(kernel, grid, *args, **options, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _taken(kernel: Any, constexprs: dict[str, Any]) -> dict[str, Any]:
    """The constexprs that a kernel has, in its order."""
    return {name: constexprs[name] for name in kernel.arg_names if name in constexprs}


def compile_cases() -> list[CompileCase]:
    """Every kernel at head dims 64, 96, 128 and 256 in bf16, at 64 and 128 in fp32; K 16, 32/8 heads, not causal."""
    kernels = (_forward_kernel, _dq_kernel, _dkv_context_kernel, _dkv_block_kernel)
    types = dict.fromkeys(("anchors_ptr", "row_starts_ptr", "num_anchors_ptr"), "*i64")
    types |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("total", "num_tokens", "window"), "i32")
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = []
    for head_dim, dtype in ((64, bf16), (96, bf16), (128, bf16), (256, bf16), (64, fp32), (128, fp32)):
        element = "fp32" if dtype == fp32 else "bf16"
        sizes = _Sizes(total=2048, block_size=16, group=4, kv_heads=8, head_dim=head_dim, num_tokens=16384, window=0)
        for i, kernel in enumerate(kernels):
            chips: dict[Launch, list[int]] = {}
            for chip in CHIPS:
                chips.setdefault(launches(head_dim, dtype, chip)[i], []).append(chip)
            for tile, used_by in chips.items():
                name = f"block_attention{kernel.__name__.removesuffix('_kernel')}_{head_dim}_{element}"
                constexprs = _taken(kernel, sizes.constexprs(tile, causal=False))
                signature = {n: types.get(n, f"*{element}") for n in kernel.arg_names if n not in constexprs}
                cases.append(
                    CompileCase(
                        name=name if len(chips) == 1 else f"{name}_from_sm_{used_by[0]}",
                        kernel=kernel,
                        signature=signature,
                        constexprs=constexprs,
                        divisible=tuple(n for n, kind in signature.items() if kind.startswith("*")),
                        num_warps=tile.num_warps,
                        num_stages=tile.num_stages,
                        may_spill=head_dim > (64 if dtype == fp32 else 128),
                        tensor_cores=dtype != fp32,
                        chips=tuple(used_by),
                    )
                )
    return cases
