"""The drafter's differentiable parts: projections joined with the norms, activations and sums around them.

Each part is one `autograd.Function` that keeps the least and recomputes what a pass over the rows restores: a norm
keeps its input and one number a row, never its output; the MLP keeps gate and up. **Weight gradients do not pass
through autograd**: a backward adds them to `weight.grad`, which must exist (a view of the flat gradients). On CUDA the
matrix product does so itself, with no temporary of the weight's size and, for 16-bit weights, no rounding to 16 bits.
Rows are 2-D, (rows, features). Sums run in a fixed order. Called by `drafter.py`; calls the passes of `pointwise.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_graph.kernels.gemm import matmul, matmul_into
from dflash_graph.kernels.pointwise import (
    Pointwise,
    grad_of,
    rms_norm,
    rms_norm_again,
    rms_norm_backward,
    rotate,
    rotate_pair,
    swiglu,
    swiglu_backward,
)


def add_weight_grad(weight: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """weight.grad (O, I) += grad_out (rows, O)^T x (rows, I); nothing for a frozen weight."""
    if weight.requires_grad:
        matmul_into(grad_out.t(), x, grad_of(weight), add=True)


def _back_project(grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
    """Sum of grads[i] (rows, O_i) @ weights[i] (O_i, I), added up by the products: (rows, I)."""
    total = matmul(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = matmul(grad, weight, plus=total, spend=True)
    return total


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        add_weight_grad(ctx.weight, grad, x)
        return matmul(grad, ctx.weight) if ctx.needs_input_grad[0] else None, None


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, I) @ weight (O, I)^T: (rows, O)."""
    out: Tensor = _Project.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _AddProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return matmul(x, weight.t(), plus=residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        add_weight_grad(ctx.weight, grad, x)
        return grad if ctx.needs_input_grad[0] else None, matmul(grad, ctx.weight), None


def add_project(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual (rows, O) + x (rows, I) @ weight (O, I)^T."""
    out: Tensor = _AddProject.apply(residual, x, weight)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Pointwise) -> Tensor:
        y, rstd = rms_norm(x, weight, how)
        ctx.weight, ctx.how = weight, how
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd = ctx.saved_tensors
        return rms_norm_backward(grad, x, rstd, ctx.weight, ctx.how), None, None


def norm(x: Tensor, weight: Tensor, how: Pointwise) -> Tensor:
    """RMSNorm of x (..., n) over its last dimension, weight (n,)."""
    out: Tensor = _Norm.apply(x, weight, how)  # type: ignore[no-untyped-call]
    return out


class _NormProject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        how: Pointwise,
        rooms: tuple[int, ...],
        behind: Tensor | None,
        carry: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        y, rstd = rms_norm(x, norm_weight, how)
        ctx.norm_weight, ctx.how, ctx.weights, ctx.rows = norm_weight, how, weights, []
        ctx.save_for_backward(x, rstd)
        outs: list[Tensor] = []
        for weight, room in zip(weights, rooms, strict=True):
            rows = slice(0, x.shape[0])
            if behind is not None and not outs:
                ctx.mark_dirty(behind)
                rows = slice(behind.shape[0] - x.shape[0], None)
                outs.append(behind)
                matmul_into(y, weight.t(), behind[rows])
            elif room:
                outs.append(x.new_empty(x.shape[0] + room, weight.shape[0]))
                matmul_into(y, weight.t(), outs[-1][rows])
            else:
                outs.append(matmul(y, weight.t()))
            ctx.rows.append(rows)
        if not carry:
            return tuple(outs)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(x)
            ctx.set_materialize_grads(False)
        return (*outs, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd = ctx.saved_tensors
        parts = tuple(grad[rows] for grad, rows in zip(grads, ctx.rows, strict=False))
        plus = grads[-1] if len(grads) > len(parts) else None
        y, unit = rms_norm_again(x, rstd, ctx.norm_weight, ctx.how)
        for weight, part in zip(ctx.weights, parts, strict=True):
            add_weight_grad(weight, part, y)
        dy = _back_project(parts, ctx.weights)
        need_dx = ctx.needs_input_grad[0]
        dx = rms_norm_backward(dy, x, rstd, ctx.norm_weight, ctx.how, unit=unit, plus=plus, need_dx=need_dx)
        behind = grads[0] if ctx.needs_input_grad[4] else None
        return (dx, None, None, None, behind, None, *(None for _ in parts))


def norm_project(
    x: Tensor,
    norm_weight: Tensor,
    weights: list[Tensor],
    how: Pointwise,
    *,
    rooms: list[int] | None = None,
    behind: Tensor | None = None,
    carry: bool = False,
) -> tuple[Tensor, ...]:
    """RMSNorm of x (rows, I), projected by each of the weights (O_i, I): tensors (rows + rooms[i], O_i).

    Args:
        rooms: rows left free behind each result, not written here; none by default.
        behind: a result of another call with exactly enough room: the first product is written there, in place, and the
            whole tensor is the first result. So rows of two sources make one tensor without a copy.
        carry: x is the last result too: what adds to it (a residual) sends its gradient through here, where the norm's
            own pass adds it up.
    """
    out: tuple[Tensor, ...] = _NormProject.apply(  # type: ignore[no-untyped-call]
        x, norm_weight, how, tuple(rooms or [0] * len(weights)), behind, carry, *weights
    )
    return out


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        how: Pointwise,
    ) -> Tensor:
        y, rstd = rms_norm(x, norm_weight, how)
        gate, up = matmul(y, w_gate.t()), matmul(y, w_up.t())
        ctx.norm_weight, ctx.weights, ctx.how = norm_weight, (w_gate, w_up, w_down), how
        ctx.save_for_backward(x, rstd, gate, up)
        return matmul(swiglu(gate, up, how), w_down.t(), plus=x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, gate, up = ctx.saved_tensors
        w_gate, w_up, w_down = ctx.weights
        act, *inner = swiglu_backward(matmul(grad, w_down), gate, up, ctx.how)
        add_weight_grad(w_down, grad, act)
        del act
        y, unit = rms_norm_again(x, rstd, ctx.norm_weight, ctx.how)
        for weight, d in zip((w_gate, w_up), inner, strict=True):
            add_weight_grad(weight, d, y)
        dy = _back_project(tuple(inner), (w_gate, w_up))
        dx = rms_norm_backward(dy, x, rstd, ctx.norm_weight, ctx.how, unit=unit, plus=grad)
        return dx, None, None, None, None, None


def mlp(x: Tensor, norm_weight: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, how: Pointwise) -> Tensor:
    """x (rows, D) + down(silu(gate y) * up y) with y = RMSNorm(x); w_gate, w_up (F, D), w_down (D, F)."""
    out: Tensor = _Mlp.apply(x, norm_weight, w_gate, w_up, w_down, how)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, num_tokens: int, how: Pointwise
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.num_tokens, ctx.how = num_tokens, how
        ctx.save_for_backward(cos, sin)
        if how.rope is None:
            k = rotate(k, cos, sin)
            return rotate(q, cos[num_tokens:], sin[num_tokens:]), k[:num_tokens], k[num_tokens:]
        # In place: q and k are a norm's results, which it does not keep, and nobody else has them.
        rotate_pair(q, k[num_tokens:], cos[num_tokens:], sin[num_tokens:], how)
        context = rotate(k[:num_tokens], cos[:num_tokens], sin[:num_tokens])
        return q.detach(), context, k[num_tokens:].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk_context: Tensor, dk_block: Tensor) -> tuple[Tensor | None, ...]:
        n, (cos, sin) = ctx.num_tokens, ctx.saved_tensors
        if ctx.how.rope is None:
            dk = rotate(torch.cat([dk_context, dk_block]), cos, sin, back=True)
            return rotate(dq, cos[n:], sin[n:], back=True), dk, None, None, None, None
        # In place: block_attention makes these gradients for this call, and nobody else gets them.
        dq, dk_block = dq.contiguous(), dk_block.contiguous()
        rotate_pair(dq, dk_block, cos[n:], sin[n:], ctx.how, back=True)
        dk_context = rotate(dk_context, cos[:n], sin[:n], back=True)
        return dq, torch.cat([dk_context, dk_block]), None, None, None, None


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, num_tokens: int, how: Pointwise
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embedding: q (n, H, E), and k (T + n, Hk, E) cut into the context's (T, Hk, E) and the blocks' (n, Hk, E).

    q and k must be results that nobody keeps: liger-kernel works in place.

    Args:
        cos, sin: (T + n, E). num_tokens: T.
    """
    out: tuple[Tensor, Tensor, Tensor] = _Rotate.apply(q, k, cos, sin, num_tokens, how)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block_size: int, skip: int) -> Tensor:
        ctx.block_size, ctx.skip = block_size, skip
        shape = (x.shape[0] - skip - 1, block_size - 1, *x.shape[1:])
        blocks = torch.cat([x[skip:-1, None], x[-1].expand(shape)], dim=1).flatten(0, 1)
        return torch.cat([x[:skip], blocks]) if skip else blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        skip = ctx.skip
        blocks = grad[skip:].view(-1, ctx.block_size, *grad.shape[1:])
        return torch.cat([grad[:skip], blocks[:, 0], blocks[:, 1:].sum((0, 1)).unsqueeze(0)]), None, None


def spread(x: Tensor, block_size: int, skip: int = 0) -> Tensor:
    """Rows of blocks, (skip + A*K, ...), of x (skip + A + 1, ...): the first `skip` rows, then for each of the A next
    rows a block that opens with it and goes on with the last row of x.
    """
    out: Tensor = _Spread.apply(x, block_size, skip)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.num_rows = x.shape[0]
        ctx.save_for_backward(rows)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_add_(0, rows, grad), None


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], x (n, D), rows (R,) int64. Rows that occur twice must get zero gradients for the result to be exact."""
    out: Tensor = _Gather.apply(x, rows)  # type: ignore[no-untyped-call]
    return out


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, tie: Tensor) -> Tensor:
        ctx.total = total
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.total.add_(grad)
        return None, None, None


class Lender:
    """Results that several graphs read, one after the other, before their own backward runs, once.

    Args:
        results: of one graph, (rows, ...) each. A borrower may write in place where nobody reads the gradient.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        self._results = results
        self._totals = [torch.zeros_like(x) for x in results] if results[0].requires_grad else []
        self._tie = results[0].new_empty(0).requires_grad_()  # makes autograd record a loan

    def lend(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The first rows[i] rows of each result; run the borrower's backward before the next loan."""
        if not self._totals:
            return tuple(x[:n] for x, n in zip(self._results, rows, strict=True))
        each = zip(self._results, self._totals, rows, strict=True)
        return tuple(_Lend.apply(x.detach()[:n], total[:n], self._tie) for x, total, n in each)  # type: ignore[no-untyped-call]

    def backward(self) -> None:
        """Backward of the results, from the sum of all loans' gradients."""
        torch.autograd.backward(self._results, self._totals)
