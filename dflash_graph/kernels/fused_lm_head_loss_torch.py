"""One chunk of rows of the fused loss in plain torch: an online softmax over tiles of the vocabulary, 4*c*V*D FLOPs.

A tile of logits is made, used and turned into gradients while it lies in the cache, and feeds the second GEMM at once;
no whole row of logits exists. With u = log2(e) z, per row over v != y (the label's own term stays out):
    ref >= u_y,   rest = sum_v 2^(u_v - ref),   acc = sum_v 2^(u_v - ref) W_v,
where ref is the greatest logit of the first tile or the label's, raised (rest and acc rescaled) only when a later tile
exceeds it by a margin that float32 holds easily. With e_y = 2^(u_y - ref) and s = rest + e_y, at the end of the chunk,
    nll = log(rest + e_y) - log(e_y),   d nll / dx = acc / s - (rest / s) W_y,
so 1 - p = rest / s is never the difference of two near numbers. Base 2 because the factor log2(e) costs nothing as the
GEMM's alpha (or in the rows, scaled once a chunk) and exp2 takes a quarter of exp's time on the CPU.

The label's logit is needed before its tile: it is a dot product of its own, which rounds differently from the GEMM. A
logit counts as greater than the label's only when it is so by more than that rounding, so equal columns never do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_graph.kernels import gemm
from dflash_graph.kernels.fused_lm_head_loss_workspace import NO_RANK, LossBuffers

_LOG2_E = 1 / math.log(2)
_MARGIN = 40.0  # log2 of what a term may exceed the first tile's greatest by; sums stay far inside float32


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a call asks for, the same for every chunk.

    Attributes:
        kl_weight: share of the KL in a row's loss; 0 without a teacher.
        tile_columns: T.
        host_reads: the host may look at the device's numbers.
    """

    logit_scale: float
    soft_cap: float | None
    kl_weight: float
    with_rank: bool
    with_grad: bool
    tile_columns: int
    host_reads: bool


class _Rows(NamedTuple):
    """Running numbers of a chunk's rows, (c, 1) F each. All but the logits u are in base 2 and after the soft-cap."""

    label_u: Tensor
    threshold: Tensor  # a u above it ranks before the label
    top: Tensor  # greatest u but the label's
    rank: Tensor  # u above the threshold so far; exact in float32 below 2**24
    ref: Tensor
    rest: Tensor
    spare: Tensor
    spare2: Tensor
    spare3: Tensor


def run_chunk(
    hidden: Tensor,  # (c, D)
    head_weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    buffers: LossBuffers,
    rows: slice,  # of the chunk, in the results
    options: LossOptions,
) -> None:
    """Statistics of one chunk into nll, logsumexp and label_rank, and its gradient rows into grad_hidden.

    Rows that do not count get numbers without meaning, which the caller deselects.
    """
    _Chunk(hidden, head_weight, bias, buffers, rows, options).run()


class _Chunk:
    """One chunk on its way through the tiles; holds views of the workspace only."""

    def __init__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        bias: Tensor | None,
        buffers: LossBuffers,
        rows: slice,
        options: LossOptions,
    ) -> None:
        c = hidden.shape[0]
        self.hidden, self.head_weight, self.bias = hidden, head_weight, bias
        self.b, self.rows, self.options = buffers, rows, options
        self.labels = buffers.safe_labels[rows].view(-1, 1)
        self.row = _Rows(*buffers.row_stats[:, :c].unbind())
        self.column, self.inside = buffers.row_columns[:, :c].unbind()
        self.flag = buffers.row_flags[:c]
        self.narrows = bool(buffers.narrow.numel())
        self.acc = buffers.accumulated[:c] if self.narrows else buffers.grad_hidden[rows]
        # u = scale * (x.W + b); a soft-cap wants z / cap, everything else base 2.
        cap = options.soft_cap
        self.scale = options.logit_scale * (_LOG2_E if cap is None else 1 / cap)
        self.scaled = hidden * self.scale if gemm.is_onednn(hidden.device, hidden.dtype) else None  # (c, D)
        self.cap = None if cap is None else cap * _LOG2_E

    def run(self) -> None:
        vocab_size, tile_columns = self.head_weight.shape[0], self.options.tile_columns
        self._start()
        for start in range(0, vocab_size, tile_columns):
            columns = slice(start, min(start + tile_columns, vocab_size))
            u = self._logits(columns)
            self._write_labels(u, slice(None), start, -math.inf)
            self._reference(u, first=start == 0)
            self._terms(u, start)
            if self.options.with_grad:
                self._gradient(u, self.head_weight[columns], first=start == 0)
        self._statistics()
        if self.options.with_grad:
            self._finish_gradient()

    def _start(self) -> None:
        """u of the labels, and what another column's u must exceed to rank before it."""
        r, acc = self.row, self.acc  # acc is free until the first tile
        acc.copy_(self.hidden).mul_(self._label_rows())
        torch.sum(acc, 1, keepdim=True, out=r.label_u)
        torch.sum(acc.abs_(), 1, keepdim=True, out=r.threshold)
        if self.bias is not None:
            torch.index_select(self.bias, 0, self.labels.view(-1), out=r.spare.view(-1))
            r.label_u.add_(r.spare)
            r.threshold.add_(r.spare.abs_())
        r.label_u.mul_(self.scale)
        # Rounding of the sums, and of the logits themselves where the GEMM has a 16-bit result.
        r.threshold.mul_(4 * self.scale * torch.finfo(acc.dtype).eps)
        if self.narrows and not self.hidden.is_cuda:
            r.threshold.add_(torch.abs(r.label_u, out=r.spare), alpha=torch.finfo(self.hidden.dtype).eps)
        r.threshold.clamp_(max=torch.finfo(acc.dtype).max).add_(r.label_u)  # finite, so that -inf stays -inf
        r.top.fill_(-math.inf)
        r.rank.zero_()
        r.rest.zero_()

    def _label_rows(self) -> Tensor:
        """(c, D) rows of the head, in memory that the next GEMM overwrites."""
        out = self.b.gathered[: len(self.labels)] if self.narrows else self.b.scratch[: self.acc.numel()]
        return torch.index_select(self.head_weight, 0, self.labels.view(-1), out=out.view_as(self.acc))

    def _narrow(self, u: Tensor) -> Tensor:
        """Contiguous 16-bit memory of the shape of a tile."""
        return self.b.narrow.view(-1)[: u.numel()].view_as(u)

    def _logits(self, columns: slice) -> Tensor:
        """u = scale * (x.W + b), (c, t)."""
        tile = self.head_weight[columns].t()
        bias = None if self.bias is None else self.bias[columns]
        if self.scaled is not None:
            product = gemm.matmul(self.scaled, tile)
            return product if bias is None else product.add_(bias, alpha=self.scale)
        u = self.b.scratch[: len(self.labels) * tile.shape[1]].view(len(self.labels), -1)
        if not self.narrows:
            added, beta = (u, 0.0) if bias is None else (bias, self.scale)
            return torch.addmm(added, self.hidden, tile, beta=beta, alpha=self.scale, out=u)
        if u.is_cuda:
            torch.mm(self.hidden, tile, out_dtype=u.dtype, out=u)
        else:  # the CPU has no GEMM from 16 to 32 bits
            u.copy_(torch.mm(self.hidden, tile, out=self._narrow(u)))
        if bias is not None:
            u.add_(bias)
        return u.mul_(self.scale)

    def _write_labels(self, values: Tensor, block: slice, start: int, value: float) -> None:
        """Write `value` into the label's column of a tile's rows; rows whose label lies elsewhere keep theirs."""
        column, inside, old = self.column[block], self.inside[block], self.row.spare[block]
        torch.sub(self.labels[block], start, out=column)
        torch.clamp(column, 0, values.shape[1] - 1, out=inside)
        torch.gather(values, 1, inside, out=old)
        old.masked_fill_(torch.eq(column, inside, out=self.flag[block]), value)
        values.scatter_(1, inside, old)

    def _blocks(self, u: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows of a tile, each with spare memory of its shape."""
        most = self.b.spare.shape[0]
        for start in range(0, u.shape[0], most):
            block = slice(start, min(start + most, u.shape[0]))
            yield block, self.b.spare.view(-1)[: (block.stop - start) * u.shape[1]].view(-1, u.shape[1])

    def _reference(self, u: Tensor, *, first: bool) -> None:
        """Maximum and rank of a tile, and ref, so that no term overflows."""
        r, greatest, factor = self.row, self.row.spare, self.row.spare2
        torch.amax(u, 1, keepdim=True, out=greatest)
        torch.maximum(r.top, greatest, out=r.top)
        if self.options.with_rank:
            for block, spare in self._blocks(u):
                torch.sum(torch.gt(u[block], r.threshold[block], out=spare), 1, keepdim=True, out=r.spare2[block])
            r.rank.add_(r.spare2)
        if self.cap is not None:
            greatest.tanh_().mul_(self.cap)
        if first:
            if self.cap is None:
                label = r.label_u
            else:
                label = torch.tanh(r.label_u, out=r.spare2).mul_(self.cap)
            torch.maximum(greatest, label, out=r.ref).clamp_(min=torch.finfo(u.dtype).min)  # finite: -inf - -inf is NaN
            return
        margin = 0.0 if self.hidden.dtype == torch.float16 else _MARGIN  # float16 may not hold terms above 1
        above = torch.gt(greatest, torch.add(r.ref, margin, out=r.spare2), out=self.flag)
        if self.options.host_reads and not bool(above.any()):  # sync: on the CPU alone
            return
        raised = torch.where(above, greatest, r.ref, out=r.spare3)
        torch.sub(r.ref, raised, out=factor).exp2_()  # 1 for the rows that stay
        r.ref.copy_(raised)
        r.rest.mul_(factor)
        if self.options.with_grad:
            self.acc.mul_(factor)

    def _terms(self, u: Tensor, start: int) -> None:
        """rest, and the tile turned in place into the factors of its head rows, 0 at the labels."""
        r, part = self.row, self.row.spare2
        if self.cap is None:
            r.rest.add_(torch.sum(u.sub_(r.ref).exp2_(), 1, keepdim=True, out=part))
            return
        for block, terms in self._blocks(u):
            torch.mul(u[block].tanh_(), self.cap, out=terms).sub_(r.ref[block]).exp2_()
            self._write_labels(terms, block, start, 0.0)  # tanh has made -1 of their -inf
            torch.sum(terms, 1, keepdim=True, out=part[block])
            u[block].square_().neg_().add_(1).mul_(terms)
        r.rest.add_(part)

    def _gradient(self, terms: Tensor, tile: Tensor, *, first: bool) -> None:
        """acc += terms @ tile, (c, D); written, not added, by the first tile."""
        acc = self.acc
        if self.scaled is not None:
            self.acc = gemm.matmul(terms, tile, plus=None if first else acc)
            return
        if not self.narrows:
            torch.addmm(acc, terms, tile, beta=0 if first else 1, out=acc)
            return
        narrow = self._narrow(terms).copy_(terms)
        if acc.is_cuda:  # the tile's own memory is free again
            part = torch.mm(narrow, tile, out_dtype=acc.dtype, out=self.b.scratch[: acc.numel()].view_as(acc))
        else:
            part = torch.mm(narrow, tile, out=self.b.gathered[: len(acc)])
        if first:
            acc.copy_(part)
        else:
            acc.add_(part)

    def _statistics(self) -> None:
        """nll, logsumexp and label_rank from the running numbers; leaves s in spare."""
        b, r, rows, total, distance = self.b, self.row, self.rows, self.row.spare, self.row.spare2
        above = torch.gt(r.top, r.threshold, out=self.flag)
        ranks = b.label_rank[rows].view(-1, 1)
        if self.options.with_rank:
            ranks.copy_(r.rank)
        else:
            ranks.zero_().masked_fill_(above, NO_RANK)
        label = r.label_u
        if self.cap is not None:
            label = torch.mul(r.label_u.tanh_(), self.cap, out=r.spare3)
        torch.sub(label, r.ref, out=distance)
        torch.exp2(distance, out=total).add_(r.rest)
        distance.mul_(1 / _LOG2_E)
        nll = b.nll[rows].view(-1, 1)
        torch.expm1(distance, out=nll).add_(r.rest).log1p_()  # log(s); exact for the label as the reference
        torch.add(nll, r.ref, alpha=1 / _LOG2_E, out=b.logsumexp[rows].view(-1, 1))
        nll.sub_(distance)
        ranks.masked_fill_(torch.ne(nll, nll, out=self.flag), NO_RANK)  # NaN must not pass for right

    def _finish_gradient(self) -> None:
        """grad_hidden from acc: divided by s, with the label's own term, times the logit scale."""
        r, acc, scale = self.row, self.acc, self.options.logit_scale
        factor = torch.div(r.rest, r.spare, out=r.spare2).sub_(self.options.kl_weight).mul_(-scale)
        if self.cap is not None:  # label_u holds the tanh by now
            factor.mul_(torch.square(r.label_u, out=r.spare3).neg_().add_(1))
        acc.mul_(r.spare.reciprocal_().mul_(scale))
        acc.addcmul_(self._label_rows(), factor)
        if self.narrows or self.scaled is not None:
            self.b.grad_hidden[self.rows].copy_(acc)


def teacher_pass(
    hidden: Tensor,  # (c, D)
    mean: Tensor,  # (U, D)
    entropy: Tensor,  # (U,)
    bias_mean: Tensor | None,  # (U,)
    buffers: LossBuffers,
    rows: slice,  # of the chunk, in the results
    options: LossOptions,
) -> None:
    """kl_i = lse_i - scale * (x_i . M_u + bias mean_u) - H_u, and grad_hidden -= kl_weight * scale * M_u."""
    o, b, c = options, buffers, hidden.shape[0]
    source, kl = b.source_rows[rows], b.kl[rows]
    target = torch.index_select(mean, 0, source, out=b.scratch[: hidden.numel()].view(c, -1))
    if o.with_grad:
        narrows = bool(b.narrow.numel())
        acc = b.accumulated[:c] if narrows else b.grad_hidden[rows]
        acc.add_(target, alpha=-o.kl_weight * o.logit_scale)
        if narrows:
            b.grad_hidden[rows].copy_(acc)
    torch.sum(target.mul_(hidden), 1, out=kl)
    value = b.row_values[rows]
    if bias_mean is not None:
        kl.add_(torch.index_select(bias_mean, 0, source, out=value))
    kl.mul_(-o.logit_scale).add_(b.logsumexp[rows])
    kl.sub_(torch.index_select(entropy, 0, source, out=value))
