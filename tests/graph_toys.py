"""What tests of graphs share: contexts in every mode, the smallest step, threads, and bits of tensors."""

import threading
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from dflash_graph.graph_backends import CudaBackend
from dflash_graph.graphs import CapturePhase, Mode, StepGraph, WorkerContext
from tests.graph_backend import FakeCuda

REPLAYING = ("recorded", "fake cuda_graph")


def open_context(mode: str, *, name: str = "worker", **options: Any) -> WorkerContext:
    """A context in one of the modes; "fake cuda_graph" is mode cuda_graph over the strict stand-in."""
    phase = options.pop("phase", None) or CapturePhase()
    if mode != "fake cuda_graph":
        assert mode in get_args(Mode)
        return WorkerContext(name, "cpu", mode=mode, phase=phase, **options)  # type: ignore[arg-type]
    cuda = options.pop("cuda", None) or FakeCuda()
    backend = CudaBackend(torch.device("cuda", options.pop("index", 0)), debug=options.pop("debug", False), cuda=cuda)
    return WorkerContext(name, "cpu", mode="cuda_graph", phase=phase, backend=backend, **options)


class Counter:
    """The smallest step: total += x, and out = 2 x."""

    def __init__(self) -> None:
        self.x, self.total, self.out = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.full((2,), 5.0)
        self.runs = 0

    def step(self) -> None:
        self.runs += 1
        self.total += self.x
        torch.mul(self.x, 2.0, out=self.out)

    def make(
        self, context: WorkerContext, name: str = "count", function: Callable[[], None] | None = None
    ) -> StepGraph:
        return context.graph(
            name, function or self.step, inputs={"x": self.x}, outputs={"out": self.out}, state={"total": self.total}
        )


def none(function: Callable[[], Any]) -> Callable[[], None]:
    """`function`, whose result is dropped."""

    def run() -> None:
        function()

    return run


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def snapshot(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def in_thread(function: Callable[[], Any], name: str = "other") -> Any:
    """What `function` returns, or raises, in a thread of its own."""
    outcome: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    if error:
        raise error[0]
    assert outcome, f"thread {name} did not end within 60 s"
    return outcome[0]
