"""Dense float64 truth of the fused loss with all its options: full logits, full distributions, autograd.

Written from the definitions alone: the KL from both distributions, D-PACE by loops over the rows of a block.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_graph.kernels.fused_lm_head_loss import (
    NO_RANK,
    DPace,
    LmHeadLossWorkspace,
    Teacher,
    fused_lm_head_loss,
    make_workspace,
)


@dataclass
class Case:
    """Arguments of a call, and the options' full form. Tensors of any dtype."""

    hidden: Tensor  # (R, D)
    head: Tensor  # (V, D)
    labels: Tensor  # (R,)
    weights: Tensor  # (R,)
    num_rows: int | None = None
    bias: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    alpha: float | None = None
    places: Tensor | None = None  # (R,) block * K + k
    block_size: int = 4
    kl_weight: float = 0.0
    teacher_logits: Tensor | None = None  # (U, V)
    teacher_rows: Tensor | None = None  # (R,)
    upstream: float = 2.5
    workspace: dict[str, Any] = field(default_factory=lambda: {"chunk_rows": 8, "tile_columns": 16})

    @property
    def keep(self) -> Tensor:
        """(R,) bool, rows that count."""
        live = len(self.labels) if self.num_rows is None else self.num_rows
        inside = (self.labels >= 0) & (self.labels < self.head.shape[0])
        return inside & (self.weights != 0) & (torch.arange(len(self.labels)) < live)

    def teacher(self) -> Teacher | None:
        if self.teacher_logits is None or self.teacher_rows is None:
            return None
        stats = torch.float64 if self.hidden.dtype == torch.float64 else torch.float32
        log_p = self.teacher_logits.double().log_softmax(1)
        p = log_p.exp()
        return Teacher(
            weight=self.kl_weight,
            mean=(p @ self.head.double()).to(stats),
            entropy=-torch.where(p > 0, p * log_p, 0.0).sum(1).to(stats),
            rows=self.teacher_rows,
            bias_mean=None if self.bias is None else (p @ self.bias.double()).to(stats),
        )

    def make_workspace(self, **options: Any) -> LmHeadLossWorkspace:
        return make_workspace(
            **{
                "num_rows": self.hidden.shape[0],
                "hidden_size": self.hidden.shape[1],
                "vocab_size": self.head.shape[0],
                "dtype": self.hidden.dtype,
                "device": "cpu",
                "num_blocks": -(-self.hidden.shape[0] // (self.block_size - 1)) + 1,
                "block_size": self.block_size,
            }
            | self.workspace
            | options
        )


@dataclass
class Results:
    loss: Tensor
    grad: Tensor  # of upstream * loss
    nll: Tensor
    kl: Tensor
    logsumexp: Tensor
    label_rank: Tensor
    row_weights: Tensor
    weight_sum: Tensor


def run(case: Case, workspace: LmHeadLossWorkspace | None = None, **call: Any) -> Results:
    """The operator's results; grad is copied, the others are the workspace's own rows."""
    ws = workspace or case.make_workspace()
    hidden, n = case.hidden.detach().clone().requires_grad_(), case.hidden.shape[0]
    loss = fused_lm_head_loss(
        hidden, case.head, case.labels, case.weights, case.num_rows, workspace=ws,
        **{
            "with_rank": True, "bias": case.bias, "logit_scale": case.logit_scale, "soft_cap": case.soft_cap,
            "d_pace": None if case.alpha is None else DPace(alpha=case.alpha, trained_rows=case.places),
            "teacher": case.teacher(),
        } | call,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss * case.upstream, hidden)
    return Results(
        loss.detach(), grad, ws.nll[:n], ws.kl[:n], ws.logsumexp[:n], ws.label_rank[:n], ws.row_weights[:n],
        ws.weight_sum,
    )  # fmt: skip


def dense(case: Case, dtype: torch.dtype = torch.float64) -> Results:
    """The same by full logits in `dtype`; only rows that count are touched."""
    n, rows = case.hidden.shape[0], case.keep.nonzero().flatten()
    x = case.hidden.detach().to(dtype).requires_grad_()
    z = x[rows] @ case.head.to(dtype).t()
    if case.bias is not None:
        z = z + case.bias.to(dtype)
    z = z * case.logit_scale
    rank = (z > z.gather(1, case.labels[rows][:, None])).sum(1)  # the cap keeps the order, but rounds more to ties
    if case.soft_cap is not None:
        z = case.soft_cap * torch.tanh(z / case.soft_cap)
    log_q, labels = z.log_softmax(1), case.labels[rows]
    nll = -log_q.gather(1, labels[:, None])[:, 0]
    kl = torch.zeros_like(nll)
    if case.teacher_logits is not None and case.teacher_rows is not None:
        log_p = case.teacher_logits.to(dtype).log_softmax(1)[case.teacher_rows[rows]]
        kl = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1)
    weights = (
        case.weights[rows].to(dtype) if case.alpha is None else _d_pace(case, rows.tolist(), nll.tolist()).to(dtype)
    )
    loss = (weights * ((1 - case.kl_weight) * nll + case.kl_weight * kl)).sum()
    grad = torch.zeros_like(x) if not len(rows) else torch.autograd.grad(loss * case.upstream, x)[0]

    def spread(values: Tensor, of: int | float = 0.0) -> Tensor:
        return torch.full((n,), of, dtype=values.dtype).index_copy_(0, rows, values.detach())

    return Results(
        loss.detach(), grad, spread(nll), spread(kl), spread(z.logsumexp(1)), spread(rank, NO_RANK), spread(weights),
        weights.sum(),
    )  # fmt: skip


def _d_pace(case: Case, rows: list[int], nll: list[float]) -> Tensor:
    """Weight of row k: the sum over the counting rows j >= k of its block of the product of s_1 ... s_j."""
    assert case.alpha is not None
    assert case.places is not None
    s = {divmod(int(case.places[r]), case.block_size): 0.0 for r in rows}
    for r, value in zip(rows, nll, strict=True):
        s[divmod(int(case.places[r]), case.block_size)] = (1 - case.alpha) * float(
            torch.tensor(-value, dtype=torch.float64).exp()
        ) + case.alpha
    weights = []
    for r in rows:
        block, k = divmod(int(case.places[r]), case.block_size)
        total = 0.0
        for j in range(k, case.block_size):
            if (block, j) in s:
                product = 1.0
                for i in range(1, j + 1):
                    product *= s.get((block, i), 1.0)
                total += product
        weights.append(total)
    return torch.tensor(weights, dtype=torch.float64)


def assert_close(found: Results, truth: Results, tolerance: float, *, ranks: bool = True) -> None:
    for name in ("loss", "grad", "nll", "kl", "logsumexp", "row_weights", "weight_sum"):
        a, b = getattr(found, name).double(), getattr(truth, name).double()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    if ranks:
        assert torch.equal(found.label_rank, truth.label_rank)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-300))
