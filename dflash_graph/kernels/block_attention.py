"""Attention of blocks that hang off anchors: each query sees its row's context before the anchor, and its own block.

For query k of block a and head h (key head h // G), over keys j = context p with row_start <= p < anchor (and, with a
window, anchor + k - p < window) and the block's own keys k' (k' <= k if causal):
    S = scale q.k_j,  P = softmax(S),  out = sum_j P v_j,  delta = dout.out,  dS = P (dout.v_j - delta),
    dq = scale sum_j dS k_j,  dk_j = scale sum dS q,  dv_j = sum P dout.
No (A*K, T) mask and no scores beyond one tile exist. Rotary embedding is applied before, outside.

In plain torch (the CPU's path, and the reference) the context and a block's own keys each have a softmax of their own,
merged by the share w that the context has of the whole: P = w softmax(context scores), (1 - w) softmax(own scores).
The own keys are one small product per block, the context is cut into tiles (see `block_attention_tiles.py`).
The Triton kernels are in `block_attention_triton.py`, imported when they are first called.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_graph.kernels import backend
from dflash_graph.kernels.backend import Implementation
from dflash_graph.kernels.block_attention_tiles import UNSEEN, Layout, Scratch, front, plan_layout

# A tile costs 14 operators, forward and backward; larger tiles compute more scores in vain. Measured on one CPU core,
# fp32, 9/3 heads of 64, rows of 1,024 (T 1,024 A 64 K 16; T 2,048 A 512 K 8; T 4,096 A 256 K 16), as operators and time
# of a forward and backward: these 249, 669, 727 in 77, 262, 251 ms; 6 MiB and 300,000 hidden scores 111, 265, 307 in
# 88, 293, 289 ms; 16 MiB and 2 million 69, 153, 153 in 116, 378, 404 ms. Torch's attention under a dense mask: 200 ms
# at the first shape, 2,400 at the second. Below 50,000 nothing gets faster.
_SCORE_BYTES = 2 * 2**20
_HIDDEN_SCORES = 50_000


@dataclass(kw_only=True, eq=False)
class BlockAttentionWorkspace:
    """Scratch of `block_attention`, allocated once; shared by all layers of one thread: nothing outlives a call."""

    scratch: list[Tensor]  # "torch": the fields of Scratch; "triton": delta (A, K, H) float32
    shape: tuple[int, int, int, int, int]  # A, K, H, Hk, E
    num_tokens: int  # T
    dtype: torch.dtype  # of the inputs
    device: torch.device
    most_cells: int  # pairs of an anchor and a position in one tile
    most_hidden: int  # such pairs in one tile that see nothing of each other
    read_layout: bool  # the host reads the anchors and cuts tight tiles; if not, every tile spans all T positions
    implementation: Implementation

    def nbytes(self) -> int:
        """Bytes of all tensors of the workspace."""
        return sum(t.nbytes for t in self.scratch)

    @property
    def compute_dtype(self) -> torch.dtype:
        return backend.compute_dtype(self.dtype)

    def stats_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of what the forward keeps per query: Triton its logsumexp, plain torch the shares of context and block."""
        _, k, h, _, _ = self.shape
        return (num_blocks, k, h) if self.implementation == "triton" else (2, num_blocks * k * h)


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
    score_bytes: int = _SCORE_BYTES,
    hidden_scores: int = _HIDDEN_SCORES,
    read_layout: bool | None = None,
    implementation: Implementation | None = None,
) -> BlockAttentionWorkspace:
    """Allocate the workspace for calls of up to `num_anchors` blocks over up to `num_tokens` positions.

    Args:
        num_anchors: A. block_size: K. num_tokens: T. num_heads: H. num_key_value_heads: Hk. head_dim: E.
        dtype: of queries, keys and values.
        max_context: most context positions of one anchor (longest row - 1); None is T.
        score_bytes: aim for one tile's scores, bytes; at least one anchor's scores always fit.
        hidden_scores: most scores of a tile that are computed and then hidden, because their query does not see them.
        read_layout: the host may read anchors, and cuts tiles by them; None is True on the CPU, False elsewhere.
        implementation: None is Triton on CUDA and plain torch elsewhere. The four options before are plain torch's.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
        ValueError: a size is not positive, H is not a multiple of Hk, or the implementation cannot run there.
    """
    compute = backend.compute_dtype(dtype)
    sizes = (num_anchors, block_size, num_tokens, num_heads, num_key_value_heads, head_dim)
    if min(sizes) < 1 or num_heads % num_key_value_heads:
        raise ValueError(
            "num_anchors, block_size, num_tokens, num_heads, num_key_value_heads and head_dim must be at least 1 and "
            f"num_heads a multiple of num_key_value_heads; found {sizes}"
        )
    device = torch.device(device)
    implementation = backend.choose_implementation(implementation, device, dtype)
    read_layout = device.type == "cpu" if read_layout is None else read_layout
    queries = block_size * num_heads
    longest = num_tokens if max_context is None or not read_layout else min(max_context, num_tokens)
    most_cells = max(longest, score_bytes // (compute.itemsize * queries))
    rows, own = num_anchors * queries, num_anchors * block_size * num_key_value_heads

    def zeros(size: int, of: torch.dtype = compute) -> Tensor:
        return torch.zeros(size, dtype=of, device=device)

    if implementation == "triton":
        scratch = [zeros(rows).view(num_anchors, block_size, num_heads)]
    else:
        scratch = list(
            Scratch(
                q=zeros(rows * head_dim),
                out=zeros(rows * head_dim),
                k_block=zeros(own * head_dim),
                v_block=zeros(own * head_dim),
                own_scores=zeros(rows * block_size),
                own_dscores=zeros(rows * block_size),
                largest=zeros(2 * rows),
                peak=zeros(2 * rows),
                scores=zeros(most_cells * queries),
                dscores=zeros(most_cells * queries),
                above=zeros(num_anchors * num_tokens, torch.bool),
                below=zeros(most_cells * block_size, torch.bool),
                context=zeros(4 * num_tokens * num_key_value_heads * head_dim if dtype.itemsize == 2 else 0),
                later=torch.ones(block_size, block_size, dtype=torch.bool, device=device).triu(1)[:, None],
                positions=torch.arange(max(num_tokens, num_anchors, block_size), device=device),
            )
        )
    return BlockAttentionWorkspace(
        scratch=scratch,
        shape=(num_anchors, block_size, num_heads, num_key_value_heads, head_dim),
        num_tokens=num_tokens,
        dtype=dtype,
        device=scratch[0].device,  # with its index
        most_cells=most_cells,
        most_hidden=hidden_scores // queries,
        read_layout=read_layout,
        implementation=implementation,
    )


def _forward_torch(
    layout: Layout,
    inputs: list[Tensor],  # q, k_context, v_context, k_block, v_block
    out: Tensor,  # written
    shares: Tensor,  # (2, A*K*H): its front is written as (2, Hk, n*K*G, 1)
    scale: float,
    causal: bool,
) -> None:
    if not layout.live:
        out.zero_()
        return
    q, k_context, v_context, k_block, v_block = inputs
    s = layout.scratch
    queries, keys, values = layout.load(s.q, q), layout.load(s.k_block, k_block), layout.load(s.v_block, v_block)
    context_keys, context_values = layout.load_context(k_context, v_context)
    result, largest, peak = front(s.out, *queries.shape), layout.per_row(s.largest), layout.per_row(s.peak)
    own = layout.own_scores(queries, keys, scale=scale, causal=causal)
    torch.amax(own, -1, keepdim=True, out=largest[1])
    torch.softmax(own, -1, out=own)
    torch.amax(own, -1, keepdim=True, out=peak[1])
    rows = (layout.per_tile(x) for x in (queries, result, largest[0], peak[0]))
    for tile, tile_queries, tile_out, tile_largest, tile_peak in zip(layout.tiles, *rows, strict=True):
        if tile.start == tile.stop:
            tile_out.zero_()
            tile_largest.fill_(UNSEEN)
            tile_peak.fill_(1)
            continue
        scores = layout.tile_scores(tile, tile_queries, context_keys, scale=scale)
        torch.amax(scores, -1, keepdim=True, out=tile_largest)
        torch.softmax(scores, -1, out=scores)
        torch.amax(scores, -1, keepdim=True, out=tile_peak)
        torch.bmm(scores, context_values[:, tile.start : tile.stop], out=tile_out)
    # The largest term of a softmax is e^(largest - lse), so lse = largest - log(peak); the shares are a softmax of two.
    context_share, own_share = torch.softmax(largest.sub_(peak.log_()), 0, out=layout.per_row(shares))
    result.mul_(context_share)
    layout.per_block(result).baddbmm_(layout.per_block(own.mul_(own_share)), layout.per_block(values))
    layout.store(result, out)


def _backward_torch(
    layout: Layout,
    inputs: list[Tensor],  # q, k_context, v_context, k_block, v_block
    out: Tensor,
    shares: Tensor,  # as the forward left it
    grad_out: Tensor,
    into: list[Tensor],  # gradients of the inputs, written
    scale: float,
    causal: bool,
) -> None:
    if not layout.live:
        for grad in into:
            grad.zero_()
        return
    q, k_context, v_context, k_block, v_block = inputs
    dq, dk_context, dv_context, dk_block, dv_block = into
    s = layout.scratch
    context_share, own_share = layout.per_row(shares)
    grads, delta = layout.load(s.out, grad_out), layout.per_row(s.peak)[0]
    torch.sum(layout.load(s.q, out).mul_(grads), -1, keepdim=True, out=delta)
    queries, keys, values = layout.load(s.q, q), layout.load(s.k_block, k_block), layout.load(s.v_block, v_block)

    own = layout.own_scores(queries, keys, scale=scale, causal=causal)
    own = layout.per_block(torch.softmax(own, -1, out=own).mul_(own_share))
    block_queries, block_keys, block_values, block_grads = map(layout.per_block, (queries, keys, values, grads))
    own_dscores = front(s.own_dscores, *own.shape)
    torch.baddbmm(layout.per_block(delta), block_grads, block_values.transpose(1, 2), beta=-1, out=own_dscores)
    own_dscores.mul_(own)
    torch.bmm(own.transpose(1, 2), block_grads, out=block_values)
    layout.store(values, dv_block)
    block_values.baddbmm_(own_dscores.transpose(1, 2), block_queries, beta=0, alpha=scale)
    layout.store(values, dk_block)

    # Context probabilities carry the factor context_share: it goes to the output gradient and delta instead.
    grads.mul_(context_share)
    delta.mul_(context_share)
    context_keys, context_values = layout.load_context(k_context, v_context)
    wide = layout.wide(2, dk_context, dv_context)
    dk, dv = (x.zero_().transpose(0, 1) for x in wide)
    rows = (layout.per_tile(x) for x in (queries, grads, delta))
    for tile, tile_queries, tile_grads, tile_delta in zip(layout.tiles, *rows, strict=True):
        seen = slice(tile.start, tile.stop)
        probs = layout.tile_scores(tile, tile_queries, context_keys, scale=scale)
        torch.softmax(probs, -1, out=probs)
        dv[:, seen].baddbmm_(probs.transpose(1, 2), tile_grads)
        dscores = front(s.dscores, *probs.shape)
        torch.baddbmm(tile_delta, tile_grads, context_values[:, seen].transpose(1, 2), beta=-1, out=dscores)
        dscores.mul_(probs)
        dk[:, seen].baddbmm_(dscores.transpose(1, 2), tile_queries, alpha=scale)
        tile_queries.baddbmm_(dscores, context_keys[:, seen], beta=0, alpha=scale)  # from here on their gradient
    if wide[0] is not dk_context:
        dk_context.copy_(wide[0])
        dv_context.copy_(wide[1])
    block_queries.baddbmm_(own_dscores, block_keys, alpha=scale)
    layout.store(queries, dq)


def _forward_body(
    inputs: list[Tensor],  # q, k_context, v_context, k_block, v_block, anchors, row_starts, num_anchors
    out: Tensor,
    row_stats: Tensor,
    scratch: list[Tensor],
    scale: float,
    causal: bool,
    window: int | None,
    most_cells: int,
    most_hidden: int,
    read_layout: bool,
    implementation: str,
) -> None:
    if implementation == "triton":
        from dflash_graph.kernels import block_attention_triton as kernels

        kernels.forward(*[*inputs, out, row_stats], scale=scale, causal=causal, sliding_window=window)
        return
    layout = plan_layout(
        inputs, scratch, window=window, most_cells=most_cells, most_hidden=most_hidden, read_layout=read_layout
    )
    _forward_torch(layout, inputs[:5], out, row_stats, scale, causal)


def _backward_body(
    saved: list[Tensor],  # the inputs of the forward, out, row_stats
    grad_out: Tensor,
    grads: list[Tensor],  # of q, k_context, v_context, k_block, v_block
    scratch: list[Tensor],
    scale: float,
    causal: bool,
    window: int | None,
    most_cells: int,
    most_hidden: int,
    read_layout: bool,
    implementation: str,
) -> None:
    if implementation == "triton":
        from dflash_graph.kernels import block_attention_triton as kernels

        delta = scratch[0][: grad_out.shape[0]]
        tensors = [*saved, grad_out, delta, *grads]
        kernels.backward(*tensors, scale=scale, causal=causal, sliding_window=window)
        return
    layout = plan_layout(
        saved, scratch, window=window, most_cells=most_cells, most_hidden=most_hidden, read_layout=read_layout
    )
    _backward_torch(layout, saved[:5], saved[8], saved[9], grad_out, grads, scale, causal)


_forward = backend.Operator("block_attention_forward", _forward_body, mutates=["out", "row_stats", "scratch"])
_backward = backend.Operator("block_attention_backward", _backward_body, mutates=["grads", "scratch"])


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ws: BlockAttentionWorkspace, options: tuple[Any, ...], *inputs: Tensor) -> Tensor:
        q = inputs[0]
        out = torch.empty_like(q)
        row_stats = torch.empty(ws.stats_shape(q.shape[0]), dtype=ws.compute_dtype, device=q.device)
        _forward(list(inputs), out, row_stats, ws.scratch, *options)
        ctx.ws, ctx.options = ws, options
        ctx.save_for_backward(*inputs, out, row_stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grads = [torch.empty_like(x) for x in saved[:5]]
        _backward(saved, grad_out.contiguous(), grads, ctx.ws.scratch, *ctx.options)
        return (None, None, *grads, None, None, None)


def _check(
    blocks: dict[str, Tensor], context: dict[str, Tensor], index: dict[str, Tensor], ws: BlockAttentionWorkspace
) -> None:
    most, k, h, hk, e = ws.shape
    total = blocks["q"].shape[0]
    if not 1 <= total <= most:
        raise ValueError(f"the workspace holds 1 to {most} blocks; found {total}. Make a larger one")
    tokens = context["k_context"].shape[0]
    if not 1 <= tokens <= ws.num_tokens:
        raise ValueError(f"the workspace holds 1 to {ws.num_tokens} positions; found {tokens}. Make a larger one")
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
    backend.check_tensors(ws.device, blocks | context | index)


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
    depend on shapes only. Plain torch on the CPU reads the anchors on the host. Otherwise nothing syncs, anchors are
    not checked, and positions between those that are seen must hold finite keys and values.

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
            where the host reads the anchors also if a live one lies outside [row_start, T).
    """
    _check(
        {"q": q, "k_block": k_block, "v_block": v_block},
        {"k_context": k_context, "v_context": v_context},
        {"anchors": anchors, "row_starts": row_starts},
        workspace,
    )
    backend.check_count("num_anchors", num_anchors, most=q.shape[0], device=workspace.device)
    if sliding_window is not None and not 1 <= sliding_window < 2**31:
        raise ValueError(f"sliding_window must lie in [1, 2**31) or be None; found {sliding_window}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite; found {scale}")
    if not isinstance(num_anchors, Tensor):
        num_anchors = torch.full((), num_anchors, dtype=torch.int64, device=workspace.device)
    ws = workspace
    options = (scale, causal, sliding_window, ws.most_cells, ws.most_hidden, ws.read_layout, ws.implementation)
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        ws, options, q, k_context, v_context, k_block, v_block, anchors, row_starts, num_anchors
    )
    return out
