"""What a worker asks of a contestant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class Contestant(ABC):
    """One way to run a micro-step. The constructor builds everything that exists before the first step.

    Attributes:
        note: where its rules differ from ours, or what the number does not say.
        not_extra_bytes: bytes it has allocated that are no part of a micro-step (an optimizer's moments).
    """

    note = ""
    not_extra_bytes = 0

    @abstractmethod
    def reset(self) -> None:
        """Forget the gradients; outside the measured time."""

    @abstractmethod
    def step(self) -> None:
        """One micro-step: forward, loss, and backward into gradients."""

    @abstractmethod
    def loss(self) -> float:
        """Mean loss of the trained rows in the last step; outside the measured time."""

    @abstractmethod
    def grads(self) -> dict[str, Tensor]:
        """Gradients of the mean loss in the last step, by the tensors' usual names."""

    def in_the_open(self) -> AbstractContextManager[None]:
        """Context in which dispatch modes see what the contestant's own opaque operators do."""
        return nullcontext()


class ModuleContestant(Contestant):
    """A contestant whose gradients are those of a module's parameters."""

    model: nn.Module
    last: Tensor

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def loss(self) -> float:
        return float(self.last)

    def grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a module's trained parameters; every one of both sides must be met."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trained.keys() != weights.keys():
        raise ValueError(f"the trained tensors differ: {sorted(trained.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights[name])
