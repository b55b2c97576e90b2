"""Attention of blocks that hang off anchors: each query sees its row's context before the anchor, and its own block.

For query k of block a and head h (key head h // G), over keys j = context p with row_start <= p < anchor (and, with a
window, anchor + k - p < window) and the block's own keys k' (k' <= k if causal):
    S = scale q.k_j,  lse = log sum_j e^S,  P = e^(S - lse),  out = sum_j P v_j
    delta = dout.out,  dS = P (dout.v_j - delta),  dq = scale sum_j dS k_j,  dk_j = scale sum dS q,  dv_j = sum P dout.
The blocks' own keys are one small product per anchor. For the context, consecutive anchors of a row form a tile whose
key range starts where its first anchor's does and stops at its last anchor, as in causal attention; only the ragged
ends of that range are masked. No (A*K, T) mask and no scores beyond one tile exist. The softmax needs no empty-row
case, because every query sees itself. Rotary embedding is applied before, outside.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Measured on one CPU core, fp32, K 6, 9/3 heads of 64, rows of 100-1,500, tiles of 4 to 64 anchors: 4 is within 5 % of
# the best at every shape, 8 within 13 %; larger tiles waste scores at their ragged edge, those beyond 4 MiB the cache.
_TILE_ANCHORS = 4
_SCORE_BYTES = 2 * 2**20


class Tile(NamedTuple):
    """Anchors first..last-1 and the context positions start..stop-1 that at least one of them sees.

    Positions below `clear_start` or from `clear_stop` on are visible to some of the tile's queries only.
    """

    first: int
    last: int
    start: int
    stop: int
    clear_start: int
    clear_stop: int


@dataclass(kw_only=True, eq=False)
class BlockAttentionWorkspace:
    """Scratch of `block_attention`, allocated once; all layers of one thread share it, since nothing outlives a call.

    Flat buffers; a call uses the front of each, in the shapes given (n live anchors, N = anchors of a tile * K * G,
    C context positions of a tile). "compute" is float32, or float64 for float64 inputs.
    """

    q: Tensor  # (Hk, n, K*G, E) compute, scaled
    out: Tensor  # (Hk, n, K*G, E) compute; output in the forward, its gradient in the backward
    dq: Tensor  # (Hk, n, K*G, E) compute
    k_block: Tensor  # (Hk, n, K, E) compute
    v_block: Tensor  # (Hk, n, K, E) compute
    block_scores: Tensor  # (Hk, n, K*G, K) compute
    block_dscores: Tensor  # (Hk, n, K*G, K) compute
    row_stats: Tensor  # (3, Hk * n * K*G) compute
    scores: Tensor  # (Hk, N, C) compute
    dscores: Tensor  # (Hk, N, C) compute
    hidden: Tensor  # (tile anchors, K, C) bool, context positions that a query does not see
    context: Tensor  # (4, T, Hk, E) compute: k, v, dk, dv of 16-bit inputs; empty for others
    positions: Tensor  # (T,) int64 0, 1, ...
    offsets: Tensor  # (K,) int64 0, 1, ...
    anchor_index: Tensor  # (A,) int64 0, 1, ...
    later: Tensor  # (K, K) bool, key after query
    dtype: torch.dtype  # of the inputs
    shape: tuple[int, int, int, int, int]  # A, K, H, Hk, E
    tile_anchors: int  # most anchors of a tile
    read_layout: bool  # the host reads the anchors and cuts tight tiles; if not, every tile spans all T positions

    def nbytes(self) -> int:
        """Bytes of all tensors of the workspace."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


def make_workspace(
    *,
    num_anchors: int,
    block_size: int,
    num_tokens: int,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    max_context: int | None = None,
    tile_anchors: int = _TILE_ANCHORS,
    score_bytes: int = _SCORE_BYTES,
    read_layout: bool | None = None,
) -> BlockAttentionWorkspace:
    """Allocate the workspace for calls of up to `num_anchors` blocks over up to `num_tokens` positions.

    Args:
        num_anchors: A. block_size: K. num_tokens: T. num_heads: H. num_key_value_heads: Hk. head_dim: E.
        dtype: of queries, keys and values.
        max_context: most context positions of one anchor (longest row - 1); None is T.
        tile_anchors: most anchors of a tile.
        score_bytes: aim for one tile's scores, bytes; at least one anchor's scores always fit.
        read_layout: the host may read anchors, and cuts tiles by them; None is True on the CPU, False elsewhere.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
        ValueError: a size is not positive, or H is not a multiple of Hk.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64; found {dtype}")
    sizes = (num_anchors, block_size, num_tokens, num_heads, num_key_value_heads, head_dim, tile_anchors)
    if min(sizes) < 1 or num_heads % num_key_value_heads:
        raise ValueError(
            "num_anchors, block_size, num_tokens, num_heads, num_key_value_heads, head_dim and tile_anchors must be at "
            f"least 1 and num_heads a multiple of num_key_value_heads; found {sizes}"
        )
    device = torch.device(device)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    read_layout = device.type == "cpu" if read_layout is None else read_layout
    longest = num_tokens if max_context is None or not read_layout else min(max_context, num_tokens)
    anchor_scores = block_size * num_heads * max(1, longest)
    scores = max(anchor_scores, min(score_bytes // compute.itemsize, tile_anchors * anchor_scores))
    if not read_layout:
        tile_anchors = scores // anchor_scores
    block, own = num_anchors * block_size * num_heads, num_anchors * block_size * num_key_value_heads

    def zeros(*shape: int, of: torch.dtype = compute) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    return BlockAttentionWorkspace(
        q=zeros(block * head_dim),
        out=zeros(block * head_dim),
        dq=zeros(block * head_dim),
        k_block=zeros(own * head_dim),
        v_block=zeros(own * head_dim),
        block_scores=zeros(block * block_size),
        block_dscores=zeros(block * block_size),
        row_stats=zeros(3, block),
        scores=zeros(scores),
        dscores=zeros(scores),
        hidden=zeros(scores // num_heads, of=torch.bool),
        context=zeros(4 if dtype.itemsize == 2 else 0, num_tokens, num_key_value_heads, head_dim),
        positions=torch.arange(num_tokens, device=device),
        offsets=torch.arange(block_size, device=device),
        anchor_index=torch.arange(num_anchors, device=device),
        later=torch.ones(block_size, block_size, dtype=torch.bool, device=device).triu(1),
        dtype=dtype,
        shape=(num_anchors, block_size, num_heads, num_key_value_heads, head_dim),
        tile_anchors=tile_anchors,
        read_layout=read_layout,
    )


def make_tiles(
    anchors: list[int],
    row_starts: list[int],
    *,
    block_size: int,
    window: int | None,
    most_anchors: int,
    most_cells: int,
) -> list[Tile]:
    """Cut live anchors into tiles: one row each, ascending, `most_anchors`, and anchors * positions <= `most_cells`.

    A tile without context positions is left out. A single anchor is a tile whatever its size.
    """
    tiles: list[Tile] = []
    first = 0
    for i in range(1, len(anchors) + 1):
        start = _first_visible(anchors[first], row_starts[first], window)
        if i < len(anchors):
            fits = i - first < most_anchors and (i - first + 1) * (anchors[i] - start) <= most_cells
            if fits and row_starts[i] == row_starts[first] and anchors[i] >= anchors[i - 1]:
                continue
        stop = anchors[i - 1]
        if stop > start:
            clear_start = start if window is None else max(start, min(stop, stop + block_size - window))
            tiles.append(Tile(first, i, start, stop, clear_start, max(start, anchors[first])))
        first = i
    return tiles


def _first_visible(anchor: int, row_start: int, window: int | None) -> int:
    return row_start if window is None else max(row_start, min(anchor, anchor - window + 1))


@dataclass(kw_only=True, eq=False)
class _Call:
    """What a call computes and where its tiles lie, with views of the workspace in the call's shapes."""

    ws: BlockAttentionWorkspace
    live: int  # n, blocks that are computed: the live prefix on the CPU, all elsewhere
    tiles: list[Tile]
    dead: Tensor | None  # (A,) bool, blocks to be selected to zero when all are computed
    upper: Tensor  # (A, 1, 1) int64, first context position that is not visible
    lower: Tensor | None  # (A, K, 1) int64, first visible context position; None when it is the tile's start
    causal: bool
    scale: float

    def view(self, buffer: Tensor, group: int, last: int) -> Tensor:
        """(Hk, n, K*group, last): the front of a flat buffer as rows of blocks, key heads outermost."""
        _, k, _, hk, _ = self.ws.shape
        return buffer[: self.live * k * hk * group * last].view(hk, self.live, k * group, last)

    def load(self, buffer: Tensor, blocks: Tensor) -> Tensor:
        """Copy (A, K, heads, last) into a flat buffer, dead blocks as zeros; returns (Hk, n, K*group, last)."""
        _, k, _, hk, _ = self.ws.shape
        group, last = blocks.shape[2] // hk, blocks.shape[3]
        into = self.view(buffer, group, last)
        rows = into.view(hk, self.live, k, group, last)
        rows.copy_(blocks[: self.live].view(self.live, k, hk, group, last).permute(2, 0, 1, 3, 4))
        if self.dead is not None:
            rows.masked_fill_(self.dead[:, None, None, None], 0)
        return into

    def store(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """Copy rows (Hk, n, K*group, last) into blocks (A, K, heads, last), zeros beyond the live ones."""
        _, k, _, hk, _ = self.ws.shape
        group, last = blocks.shape[2] // hk, blocks.shape[3]
        into = blocks[: self.live].view(self.live, k, hk, group, last)
        into.copy_(rows.view(hk, self.live, k, group, last).permute(1, 2, 0, 3, 4))
        blocks[self.live :].zero_()
        return blocks

    def block_scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(Hk, n, K*G, K) scores of every block against its own keys, in ws.block_scores."""
        k = self.ws.shape[1]
        scores = self.view(self.ws.block_scores, queries.shape[2] // k, k)
        torch.bmm(_batch(queries), _batch(keys).transpose(1, 2), out=_batch(scores))
        if self.causal:
            scores.view(-1, k, scores.shape[2] // k, k).masked_fill_(self.ws.later[:, None], float("-inf"))
        return scores

    def tile_scores(self, tile: Tile, queries: Tensor, k_context: Tensor) -> Tensor:
        """(Hk, N, C) scores of a tile in ws.scores, -inf where a query does not see a position."""
        first, last, start, stop, clear_start, clear_stop = tile
        rows = queries[:, first:last].flatten(1, 2)
        scores = _front(self.ws.scores, rows.shape[0], rows.shape[1], stop - start)
        torch.bmm(rows, k_context[start:stop].permute(1, 2, 0), out=scores)
        if clear_stop < stop:
            self._hide(scores, tile, clear_stop, stop, torch.ge, self.upper[first:last])
        if self.lower is not None and clear_start > start:
            self._hide(scores, tile, start, clear_start, torch.lt, self.lower[first:last])
        return scores

    def _hide(self, scores: Tensor, tile: Tile, begin: int, end: int, compare: Any, bound: Tensor) -> None:
        """Set the scores of positions begin..end-1 for which compare(position, bound of the query) holds to -inf."""
        count, per_block, _ = bound.shape
        hidden = _front(self.ws.hidden, count, per_block, end - begin)
        compare(self.ws.positions[begin:end], bound, out=hidden)
        heads, rows, stretch = scores.shape
        edge = scores.view(heads, count, per_block, rows // (count * per_block), stretch)
        edge = edge[..., begin - tile.start : end - tile.start]
        edge.masked_fill_(hidden[:, :, None], float("-inf"))


def _front(buffer: Tensor, *shape: int) -> Tensor:
    """The front of a flat buffer in a shape."""
    return buffer[: prod(shape)].view(shape)


def _batch(x: Tensor) -> Tensor:
    """(Hk, n, ...) -> (Hk*n, ...), a view."""
    return x.flatten(0, 1)


def _plan(
    anchors: Tensor,
    row_starts: Tensor,
    num_anchors: Tensor | int,
    scale: float,
    causal: bool,
    window: int | None,
    ws: BlockAttentionWorkspace,
    num_tokens: int,
) -> _Call:
    """Where the tiles of a call lie: on the CPU from the anchors' values, elsewhere each tile spans all T positions."""
    total, k, h = anchors.shape[0], ws.shape[1], ws.shape[2]
    upper = anchors[:, None, None]
    lower = None if window is None else upper + (ws.offsets[:, None] - (window - 1))
    if not ws.read_layout:
        dead = ws.anchor_index[:total] >= num_anchors
        upper = upper.masked_fill(dead[:, None, None], 0)
        floor = row_starts[:, None, None]
        lower = floor if lower is None else torch.maximum(lower, floor)
        firsts = range(0, total, ws.tile_anchors)
        tiles = [Tile(i, min(i + ws.tile_anchors, total), 0, num_tokens, num_tokens, 0) for i in firsts]
        return _Call(ws=ws, live=total, tiles=tiles, dead=dead, upper=upper, lower=lower, causal=causal, scale=scale)
    live = min(total, max(0, int(num_anchors)))  # sync: free on the CPU, the only device that reads the layout
    ends, starts = anchors[:live].tolist(), row_starts[:live].tolist()  # sync: as above
    wrong = [(start, end) for start, end in zip(starts, ends, strict=True) if not 0 <= start <= end < num_tokens]
    if wrong:
        raise ValueError(
            f"each live anchor must satisfy 0 <= row_start <= anchor < T = {num_tokens}; found (row_start, anchor) "
            f"{wrong[0]}"
        )
    most_cells = ws.scores.numel() // (k * h)
    tiles = make_tiles(ends, starts, block_size=k, window=window, most_anchors=ws.tile_anchors, most_cells=most_cells)
    longest = max((tile.stop - tile.start for tile in tiles), default=0)
    if longest > most_cells:
        raise ValueError(
            f"the workspace holds {most_cells} context positions of an anchor; found {longest}. Make it with a larger "
            "max_context"
        )
    return _Call(ws=ws, live=live, tiles=tiles, dead=None, upper=upper, lower=lower, causal=causal, scale=scale)


def _widen(ws: BlockAttentionWorkspace, k_context: Tensor, v_context: Tensor) -> tuple[Tensor, Tensor]:
    """Context keys and values in the compute dtype: themselves, or copies of 16-bit ones in the workspace."""
    if not ws.context.shape[0]:
        return k_context, v_context
    total = k_context.shape[0]
    return ws.context[0, :total].copy_(k_context), ws.context[1, :total].copy_(v_context)


def block_attention_ref_forward(
    call: _Call, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (A, K, H, E) and logsumexp (A, K, H, 1), in plain torch."""
    ws, group = call.ws, q.shape[2] // k_block.shape[2]
    k_context, v_context = _widen(ws, k_context, v_context)
    queries = call.load(ws.q, q).mul_(call.scale)
    keys, values = call.load(ws.k_block, k_block), call.load(ws.v_block, v_block)
    own = call.block_scores(queries, keys)
    out = call.view(ws.out, group, q.shape[3]).zero_()
    row_max, context_sum, own_sum = (call.view(x, group, 1) for x in ws.row_stats)
    torch.amax(own, -1, keepdim=True, out=row_max)
    context_sum.zero_()
    for tile in call.tiles:
        blocks = slice(tile.first, tile.last)
        scores = call.tile_scores(tile, queries, k_context)
        # own_sum is free until the tiles are done: it holds the tile's maxima.
        torch.amax(scores, -1, keepdim=True, out=own_sum[:, blocks].flatten(1, 2))
        peak = torch.maximum(own_sum[:, blocks], row_max[:, blocks], out=row_max[:, blocks]).flatten(1, 2)
        scores.sub_(peak).exp_()
        torch.sum(scores, -1, keepdim=True, out=context_sum[:, blocks].flatten(1, 2))
        torch.bmm(scores, v_context[tile.start : tile.stop].transpose(0, 1), out=out[:, blocks].flatten(1, 2))
    own.sub_(row_max).exp_()
    torch.sum(own, -1, keepdim=True, out=own_sum)
    total = own_sum.add_(context_sum)
    _batch(out).baddbmm_(_batch(own), _batch(values))
    result = call.store(out.div_(total), torch.empty_like(q))
    lse = call.store(total.log_().add_(row_max), q.new_empty((*q.shape[:3], 1), dtype=out.dtype))
    return result, lse


def block_attention_ref_backward(
    call: _Call,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k_context, v_context, k_block, v_block, in plain torch; probabilities are recomputed."""
    q, k_context, v_context, k_block, v_block = inputs
    ws, k, group = call.ws, q.shape[1], q.shape[2] // k_block.shape[2]
    wide_k, wide_v = _widen(ws, k_context, v_context)
    queries = call.load(ws.q, q).mul_(call.scale)
    keys, values = call.load(ws.k_block, k_block), call.load(ws.v_block, v_block)
    grads = call.load(ws.out, grad_out)
    logsums, delta = call.load(ws.row_stats[0], lse), call.view(ws.row_stats[1], group, 1)
    dq = call.load(ws.dq, out)
    torch.sum(dq.mul_(grads), -1, keepdim=True, out=delta)

    own = call.block_scores(queries, keys).sub_(logsums).exp_()
    own_dscores = call.view(ws.block_dscores, group, k)
    torch.bmm(_batch(grads), _batch(values).transpose(1, 2), out=_batch(own_dscores))
    own_dscores.sub_(delta).mul_(own)
    torch.bmm(_batch(own_dscores), _batch(keys), out=_batch(dq))
    torch.bmm(_batch(own).transpose(1, 2), _batch(grads), out=_batch(values))
    dv_block = call.store(values, torch.empty_like(v_block))
    torch.bmm(_batch(own_dscores).transpose(1, 2), _batch(queries), out=_batch(keys))
    dk_block = call.store(keys, torch.empty_like(k_block))

    if ws.context.shape[0]:
        dk_context, dv_context = ws.context[2:, : k_context.shape[0]].zero_()
    else:
        dk_context, dv_context = torch.zeros_like(k_context), torch.zeros_like(v_context)
    for tile in call.tiles:
        _backward_tile(call, tile, (queries, grads, logsums, delta), (wide_k, wide_v), (dq, dk_context, dv_context))
    grad_q = call.store(dq.mul_(call.scale), torch.empty_like(q))
    return grad_q, dk_context.to(q.dtype), dv_context.to(q.dtype), dk_block, dv_block


def _backward_tile(
    call: _Call,
    tile: Tile,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],  # queries, output gradients, logsumexp, delta: (Hk, n, K*G, ...)
    context: tuple[Tensor, Tensor],  # keys, values: (T, Hk, E)
    into: tuple[Tensor, Tensor, Tensor],  # dq (Hk, n, K*G, E), dk, dv (T, Hk, E), added to
) -> None:
    queries, grads, logsums, delta = (x[:, tile.first : tile.last].flatten(1, 2) for x in rows)
    keys, values, dk, dv = (x[tile.start : tile.stop].transpose(0, 1) for x in (*context, *into[1:]))
    probs = call.tile_scores(tile, rows[0], context[0]).sub_(logsums).exp_()
    dv.baddbmm_(probs.transpose(1, 2), grads)
    dscores = _front(call.ws.dscores, *probs.shape)
    torch.bmm(grads, values.transpose(1, 2), out=dscores)
    dscores.sub_(delta).mul_(probs)
    into[0][:, tile.first : tile.last].flatten(1, 2).baddbmm_(dscores, keys)
    dk.baddbmm_(dscores.transpose(1, 2), queries)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> Tensor:  # q, k_context, v_context, k_block, v_block
        out, lse = block_attention_ref_forward(call, *inputs)
        ctx.call = call
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        return (None, *block_attention_ref_backward(ctx.call, tuple(inputs), out, lse, grad_out.contiguous()))


def _check(
    blocks: dict[str, Tensor], context: dict[str, Tensor], index: dict[str, Tensor], ws: BlockAttentionWorkspace
) -> None:
    most, k, h, hk, e = ws.shape
    total = blocks["q"].shape[0]
    if not 1 <= total <= most:
        raise ValueError(f"the workspace holds 1 to {most} blocks; found {total}. Make a larger one")
    tokens = context["k_context"].shape[0]
    if not 1 <= tokens <= ws.positions.shape[0]:
        raise ValueError(
            f"the workspace holds 1 to {ws.positions.shape[0]} positions; found {tokens}. Make a larger one"
        )
    shapes: dict[str, tuple[int, ...]] = {name: (total, k, h if name == "q" else hk, e) for name in blocks}
    shapes |= dict.fromkeys(context, (tokens, hk, e)) | dict.fromkeys(index, (total,))
    for name, tensor in (blocks | context | index).items():
        dtype = torch.int64 if name in index else ws.dtype
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}; found {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name} must be {dtype}; found {tensor.dtype}. Cast before the call, or remake the workspace"
            )
        if tensor.device != ws.q.device:
            raise ValueError(f"{name} must be on the workspace's device {ws.q.device}; found {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; found strides {tensor.stride()}. Copy it before the call")


def block_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    anchors: Tensor,
    row_starts: Tensor,
    *,
    num_anchors: Tensor | int,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    workspace: BlockAttentionWorkspace,
) -> Tensor:
    """Attention of A blocks over their context and themselves, differentiable in the first five arguments.

    Blocks from `num_anchors` on give zeros and get zero gradients, whatever they hold. The sizes of all allocations
    depend on shapes only. On the CPU the host reads the anchors; elsewhere nothing syncs, every tile spans all T
    positions, and positions that nobody sees must hold finite keys and values.

    Args:
        q: (A, K, H, E). k_block, v_block: (A, K, Hk, E). k_context, v_context: (T, Hk, E). One dtype, contiguous.
        anchors: (A,) int64 flat position of the anchor. row_starts: (A,) int64 flat first position of its row.
            Live anchors sorted by (row, position) make the tightest tiles; any order is correct.
        num_anchors: live blocks, a prefix; an int or an integer scalar tensor.
        causal: a block's queries see only its own keys up to themselves.
        sliding_window: context p is visible to query k if anchor + k - p < sliding_window; None is no limit.

    Returns:
        (A, K, H, E), dtype of q.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, device or strides, or does not fit the workspace;
            on the CPU also if a live anchor lies outside [row_start, T).
    """
    _check(
        {"q": q, "k_block": k_block, "v_block": v_block},
        {"k_context": k_context, "v_context": v_context},
        {"anchors": anchors, "row_starts": row_starts},
        workspace,
    )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None; found {sliding_window}")
    call = _plan(
        anchors, row_starts, num_anchors, scale, causal, sliding_window, workspace, num_tokens=k_context.shape[0]
    )
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        call, q, k_context, v_context, k_block, v_block
    )
    return out
