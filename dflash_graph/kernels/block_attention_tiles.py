"""Layout of `block_attention` in plain torch: tiles of the context, and the scratch in the shapes of one call.

Consecutive anchors of a row form a tile and share one range of context positions, which starts where the first anchor's
does and stops at the last anchor, as in causal attention; only the ragged ends of the range are masked. Where the host
must not read the anchors, every tile spans all positions and all of it is masked. Called by `block_attention.py` alone.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

UNSEEN = -1e30  # score of a position that a query does not see; finite, because a tile may hide a whole row


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


def make_tiles(
    anchors: list[int],
    row_starts: list[int],
    *,
    block_size: int,
    window: int | None,
    most_cells: int,
    most_hidden: int,
) -> list[Tile]:
    """Cut live anchors into tiles of one row each, ascending, whose range holds no position that nobody sees.

    Neighbours with an empty context form one tile without positions, whatever their rows. A cell is one anchor against
    one position.

    Args:
        most_cells: cells of a tile; a single anchor is a tile whatever its size.
        most_hidden: cells of a tile whose position its anchor does not see.
    """
    if not anchors:
        return []
    starts = [_first_visible(anchor, start, window) for anchor, start in zip(anchors, row_starts, strict=True)]
    cuts, seen = [0], 0  # first anchor of each tile; cells that the last tile's anchors see
    for i, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
        first, before, seen = cuts[-1], seen, seen + anchor - start
        cells = (i + 1 - first) * (anchor - starts[first])
        joins = row_starts[i] == row_starts[first] and start <= anchors[i - 1] <= anchor
        if i and seen and not (before and joins and cells <= min(most_cells, seen + most_hidden)):
            cuts.append(i)
            seen = anchor - start
    tiles = []
    for first, last in pairwise([*cuts, len(anchors)]):
        start = starts[first]
        stop = start if starts[first:last] == anchors[first:last] else anchors[last - 1]
        clear_start = start if window is None else max(start, min(stop, stop + block_size - window))
        tiles.append(Tile(first, last, start, stop, clear_start, max(start, anchors[first])))
    return tiles


def _first_visible(anchor: int, row_start: int, window: int | None) -> int:
    return row_start if window is None else max(row_start, min(anchor, anchor - window + 1))


class Scratch(NamedTuple):
    """Flat buffers, of which a call uses the front in the shapes given; made by `block_attention.make_workspace`.

    n live blocks, N = anchors of a tile * K * G, C context positions of a tile; compute is float32, or float64 for
    float64 inputs.
    """

    q: Tensor  # (Hk, n*K*G, E) compute; in the backward also the output, and the gradient of the queries
    out: Tensor  # (Hk, n*K*G, E) compute; output, in the backward its gradient
    k_block: Tensor  # (Hk, n*K, E) compute
    v_block: Tensor  # (Hk, n*K, E) compute
    own_scores: Tensor  # (Hk, n*K*G, K) compute
    own_dscores: Tensor  # (Hk, n*K*G, K) compute
    largest: Tensor  # (2, Hk, n*K*G, 1) compute, largest score over the context and over the own keys
    peak: Tensor  # (2, Hk, n*K*G, 1) compute, largest probability likewise; in the backward delta
    scores: Tensor  # (Hk, N, C) compute
    dscores: Tensor  # (Hk, N, C) compute
    above: Tensor  # (A, 1, 1, T) bool, positions behind what an anchor's queries see
    below: Tensor  # (tile anchors, K or 1, 1, C) bool, positions before what a query sees
    context: Tensor  # (4, T, Hk, E) compute: k, v, dk, dv of 16-bit inputs; empty for others
    later: Tensor  # (K, 1, K) bool, own key after its query; not written
    positions: Tensor  # (max(T, A, K),) int64 0, 1, ...; not written


def front(buffer: Tensor, *shape: int) -> Tensor:
    """The front of a contiguous buffer in a shape, as one view: to launch views costs as much as small products."""
    return buffer.as_strided(shape, [prod(shape[i + 1 :]) for i in range(len(shape))])


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The blocks that a call computes, its tiles, which cover them in order, and the scratch in the call's shapes.

    Rows are the queries of live blocks, ordered by key head, block, position, head of the group.
    """

    scratch: Scratch
    block_size: int  # K
    kv_heads: int  # Hk
    group: int  # G
    live: int  # n, blocks that are computed: the live prefix where the host reads the layout, all elsewhere
    tiles: list[Tile]
    dead: Tensor | None  # (A,) bool, blocks to be selected to zero when all are computed
    above: Tensor  # (n, 1, 1, T) bool, positions behind what a block sees
    lower: Tensor | None  # (A, K or 1, 1, 1) int64, first visible context position; None when the tile's start is

    def load(self, buffer: Tensor, blocks: Tensor) -> Tensor:  # (Hk, n*K*heads/Hk, E)
        """Copy blocks (A, K, heads, E) into a buffer, dead ones as zeros."""
        group, e = blocks.shape[2] // self.kv_heads, blocks.shape[3]
        into = front(buffer, self.kv_heads, self.live, self.block_size, group, e)
        into.copy_(self._grouped(blocks).permute(2, 0, 1, 3, 4))
        if self.dead is not None:
            into.masked_fill_(self.dead[:, None, None, None], 0)
        return into.view(self.kv_heads, self.live * self.block_size * group, e)

    def store(self, rows: Tensor, blocks: Tensor) -> None:
        """Copy rows (Hk, n*K*heads/Hk, E) into blocks (A, K, heads, E), zeros beyond the live ones."""
        into = self._grouped(blocks).permute(2, 0, 1, 3, 4)
        into.copy_(rows.view(into.shape))
        if self.live < blocks.shape[0]:
            blocks[self.live :].zero_()

    def _grouped(self, blocks: Tensor) -> Tensor:
        """(A, K, heads, E) -> (n, K, Hk, heads/Hk, E)."""
        k, hk = self.block_size, self.kv_heads
        return front(blocks, self.live, k, hk, blocks.shape[2] // hk, blocks.shape[3])

    def per_row(self, buffer: Tensor) -> Tensor:
        """(2, Hk, n*K*G, 1), the front of a buffer."""
        return front(buffer, 2, self.kv_heads, self.live * self.block_size * self.group, 1)

    def per_block(self, rows: Tensor) -> Tensor:
        """(Hk, n*x, y) -> (Hk*n, x, y)."""
        heads, total, last = rows.shape
        return rows.view(heads * self.live, total // self.live, last)

    def per_tile(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(Hk, n*K*G, x) -> (Hk, N, x) of each tile."""
        return torch.split(
            rows, [(tile.last - tile.first) * self.block_size * self.group for tile in self.tiles], dim=1
        )

    def own_scores(self, queries: Tensor, keys: Tensor, *, scale: float, causal: bool) -> Tensor:  # (Hk, n*K*G, K)
        """Scores of every block against its own keys."""
        k = self.block_size
        scores = front(self.scratch.own_scores, self.kv_heads * self.live, k * self.group, k)
        scores.baddbmm_(self.per_block(queries), self.per_block(keys).transpose(1, 2), beta=0, alpha=scale)
        if causal:
            front(scores, self.kv_heads * self.live, k, self.group, k).masked_fill_(self.scratch.later, UNSEEN)
        return scores.view(self.kv_heads, self.live * k * self.group, k)

    def tile_scores(self, tile: Tile, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:  # (Hk, N, C)
        """Scores of a tile's rows (Hk, N, E) against its range of the context keys (Hk, T, E)."""
        _, _, start, stop, clear_start, clear_stop = tile
        scores = front(self.scratch.scores, *queries.shape[:2], stop - start)
        scores.baddbmm_(queries, keys[:, start:stop].transpose(1, 2), beta=0, alpha=scale)
        if clear_stop < stop:
            self._hide(scores, tile, clear_stop, self.above[tile.first : tile.last, ..., clear_stop:stop])
        if self.lower is not None and clear_start > start:
            bound = self.lower[tile.first : tile.last]
            below = front(self.scratch.below, *bound.shape[:3], clear_start - start)
            self._hide(scores, tile, start, torch.lt(self.scratch.positions[start:clear_start], bound, out=below))
        return scores

    def _hide(self, scores: Tensor, tile: Tile, begin: int, unseen: Tensor) -> None:
        """Hide scores from position `begin` on where unseen (anchors, K or 1, 1, positions) holds."""
        count, steps, _, stretch = unseen.shape
        edge = scores.view(self.kv_heads, count, steps, self.block_size * self.group // steps, tile.stop - tile.start)
        edge.narrow(-1, begin - tile.start, stretch).masked_fill_(unseen, UNSEEN)

    def wide(self, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(T, Hk, E) in the compute dtype: the tensors themselves, or for 16-bit ones two buffers of `context`."""
        if keys.dtype.itemsize > 2:
            return keys, values
        buffers = front(self.scratch.context, 4, *keys.shape)
        return buffers[first], buffers[first + 1]

    def load_context(self, k_context: Tensor, v_context: Tensor) -> tuple[Tensor, Tensor]:
        """Context keys and values (Hk, T, E) in the compute dtype."""
        wide = self.wide(0, k_context, v_context)
        for into, given in zip(wide, (k_context, v_context), strict=True):
            if into is not given:
                into.copy_(given)
        return wide[0].transpose(0, 1), wide[1].transpose(0, 1)


def plan_layout(
    tensors: list[Tensor],
    scratch: list[Tensor],
    *,
    window: int | None,
    most_cells: int,
    most_hidden: int,
    read_layout: bool,
) -> Layout:
    """The layout of a call. With `read_layout` the host reads the anchors; without, nothing syncs.

    Args:
        tensors: what `block_attention` is called with, in its order; more may follow.
        scratch: the fields of Scratch.

    Raises:
        ValueError: with `read_layout`, a live anchor lies outside [row_start, T), or its context exceeds most_cells.
    """
    q, k_context, _, k_block, _, anchors, row_starts, num_anchors, *_ = tensors
    buffers, num_tokens = Scratch(*scratch), k_context.shape[0]
    total, k, heads, _ = q.shape
    upper, floor = anchors[:, None, None, None], row_starts[:, None, None, None]
    lower = None if window is None else upper + (buffers.positions[:k, None, None] - (window - 1))
    dead = None
    if read_layout:
        live = min(total, max(0, int(num_anchors)))  # sync: free on the CPU, the only device that reads the layout
        ends, starts = anchors[:live].tolist(), row_starts[:live].tolist()  # sync: as above
        tiles = make_tiles(ends, starts, block_size=k, window=window, most_cells=most_cells, most_hidden=most_hidden)
        _check_layout(ends, starts, tiles, num_tokens, most_cells)
    else:
        live, step = total, most_cells // num_tokens
        dead = buffers.positions[:total] >= num_anchors
        upper = upper.masked_fill(dead[:, None, None, None], 0)
        lower = floor if lower is None else torch.maximum(lower, floor)
        tiles = [Tile(i, min(i + step, total), 0, num_tokens, num_tokens, 0) for i in range(0, total, step)]
    above = front(buffers.above, live, 1, 1, num_tokens)
    return Layout(
        scratch=buffers,
        block_size=k,
        kv_heads=k_block.shape[2],
        group=heads // k_block.shape[2],
        live=live,
        tiles=tiles,
        dead=dead,
        above=torch.ge(buffers.positions[:num_tokens], upper[:live], out=above),
        lower=lower,
    )


def _check_layout(
    anchors: list[int], row_starts: list[int], tiles: list[Tile], num_tokens: int, most_cells: int
) -> None:
    wrong = [(r, a) for r, a in zip(row_starts, anchors, strict=True) if not 0 <= r <= a < num_tokens]
    if wrong:
        raise ValueError(
            f"each live anchor must satisfy 0 <= row_start <= anchor < T = {num_tokens}; found (row_start, anchor) "
            f"{wrong[0]}"
        )
    longest = max((tile.stop - tile.start for tile in tiles), default=0)
    if longest > most_cells:
        raise ValueError(
            f"the workspace holds {most_cells} context positions of an anchor; found {longest}. Make it with a larger "
            "max_context"
        )
