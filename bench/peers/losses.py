"""The loss alone, forward and backward into the hidden rows: ours, full logits, and torch's `linear_cross_entropy`."""

import torch
from torch import Tensor

from bench.peers.contestant import Contestant
from bench.peers.problem import Problem


class LossContestant(Contestant):
    """R hidden rows of unit size as a leaf; the labels are the problem's."""

    def __init__(self, problem: Problem) -> None:
        shape = problem.shape
        problem.features, problem.parameters = None, {}  # not of the loss
        self.head, self.labels = problem.embed, problem.labels().flatten()
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(shape.trained_rows, shape.hidden_size, generator=generator).requires_grad_()
        self.not_extra_bytes = self.hidden.nbytes  # an input

    def reset(self) -> None:
        self.hidden.grad = None

    def loss(self) -> float:
        return float(self.last)

    def grads(self) -> dict[str, Tensor]:
        assert self.hidden.grad is not None
        return {"hidden": self.hidden.grad}


class StockLoss(LossContestant):
    def __init__(self, problem: Problem, kind: str) -> None:
        super().__init__(problem)
        self.kind = kind

    def step(self) -> None:
        from bench.peers.stock import mean_loss

        loss = mean_loss(self.hidden, self.head, self.labels, self.kind)
        loss.backward()
        self.last = loss.detach()


class OurLoss(LossContestant):
    note = "the label's rank of every row is not asked for"

    def __init__(self, problem: Problem) -> None:
        from dflash_graph.kernels import fused_lm_head_loss as op

        super().__init__(problem)
        shape, self.op = problem.shape, op
        self.workspace = op.make_workspace(
            num_rows=shape.trained_rows,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            dtype=torch.float32,
            device="cpu",
        )
        self.weights = torch.full((shape.trained_rows,), 1 / shape.trained_rows)

    def step(self) -> None:
        loss = self.op.fused_lm_head_loss(self.hidden, self.head, self.labels, self.weights, workspace=self.workspace)
        loss.backward()
        self.last = loss.detach()

    def in_the_open(self):
        from dflash_graph.kernels import backend

        return backend.in_the_open()
