"""Steps as graphs, captured and replayed in the thread that owns the device; knows no model.

A worker makes one `WorkerContext` inside its thread, declares its steps as `StepGraph`s, and `prepare`s them once, in
the run's `CapturePhase`, before any worker works. From then on a call of a step is a replay ("cuda_graph", "recorded"),
the function itself ("eager"), or the function under an observer's eyes ("debug"). Nothing else of the package knows the
difference. A graph must never be used from another thread, and nothing is captured after the phase.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from dflash_graph.graph_backends import Captured, CudaBackend, GraphBackend, GraphError, TapeBackend

__all__ = ["CapturePhase", "GraphBackend", "GraphError", "Mode", "Observer", "StepGraph", "WorkerContext"]

Mode = Literal["cuda_graph", "eager", "recorded", "debug"]
CAPTURING_MODES = ("cuda_graph", "recorded")


class Observer(Protocol):
    """Who watches the steps of mode "debug"."""

    def run(self, graph: "StepGraph", function: Callable[[], None]) -> None:
        """Run `function` exactly once."""


class CapturePhase:
    """The time at start-up in which workers capture, one at a time; one for all workers of a process.

    A device-wide synchronisation or allocation of another thread on the same device can end a capture, so no worker
    runs meanwhile; garbage collection, which may destroy CUDA objects, is off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def turn(self, who: str) -> Iterator[None]:
        """Capture as the only one.

        Raises:
            GraphError: the phase is over.
        """
        with self._lock:
            if self._closed:
                raise GraphError(
                    f"{who} must capture at start-up, before any worker runs; the capture phase is over. Declare every "
                    "step before the run begins"
                )
            collecting = gc.isenabled()
            gc.collect()
            gc.disable()
            try:
                yield
            finally:
                if collecting:
                    gc.enable()

    def close(self) -> None:
        """From now on nothing is captured. Waits for a turn that is under way."""
        with self._lock:
            self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed


class StepGraph:
    """One step: a function over static tensors that returns nothing. Made by `WorkerContext.graph`.

    Attributes:
        inputs: tensors it reads and others rewrite in place between calls.
        outputs: tensors it writes, valid until its next call.
        state: tensors it updates and that persist: gradients, weights, moments, counters.
        calls: how often it ran since it was prepared.
        capture_s: seconds of warm-up and capture.
    """

    def __init__(
        self,
        context: "WorkerContext",
        name: str,
        function: Callable[[], None],
        *,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> None:
        self.name, self.function = name, function
        self.inputs, self.outputs, self.state = dict(inputs), dict(outputs), dict(state)
        self.calls, self.capture_s = 0, 0.0
        self._context = context
        self._captured: Captured | None = None
        self._addresses = {name: _signature(tensor) for name, tensor in self._tensors().items()}

    @property
    def mode(self) -> Mode:
        return self._context.mode

    @property
    def worker(self) -> str:
        return self._context.name

    @property
    def device(self) -> torch.device:
        return self._context.device

    @property
    def captured(self) -> Captured | None:
        """What a replay replays; None in modes without capture, before `prepare` and after `close`."""
        return self._captured

    def __call__(self) -> None:
        """Run the step once.

        Raises:
            GraphError: another thread than the worker's, before `prepare`, or after `close`.
        """
        context = self._context
        context.check_usable(self.name)
        if self._captured is not None:
            self._captured.replay()
        elif context.mode in CAPTURING_MODES:
            raise GraphError(f"{self.name} must be captured before it runs; call prepare() of worker {context.name!r}")
        elif context.mode == "debug" and context.observer is not None:
            context.observer.run(self, self.function)
        else:
            self.function()
        self.calls += 1

    def check_addresses(self) -> None:
        """Prove that no declared tensor moved since it was declared.

        Raises:
            GraphError: names each one that did, with what it was and is.
        """
        now = {name: _signature(tensor) for name, tensor in self._tensors().items()}
        moved = [
            f"{name}: was {self._addresses[name]}, is {now[name]}" for name in now if now[name] != self._addresses[name]
        ]
        if moved:
            raise GraphError(
                f"the tensors of {self.name} must keep their memory; write into them in place. Changed (address, "
                "shape, strides, dtype):\n" + "\n".join(moved)
            )

    def _tensors(self) -> dict[str, Tensor]:
        return self.inputs | self.outputs | self.state

    def _prepare(self, backend: GraphBackend, warmups: int) -> None:
        started = time.monotonic()
        for i in range(warmups):
            before = backend.allocations()
            self.function()
            backend.synchronize()
            if i and i == warmups - 1 and backend.allocations() != before:
                raise GraphError(
                    f"{self.name} must find all its memory by its last warm-up; it still allocated device memory in "
                    f"warm-up {warmups}. Raise graphs.warmups, or look for an allocation that grows from step to step"
                )
        self._captured = backend.capture(self.function)
        self.capture_s = time.monotonic() - started

    def _reset(self) -> None:
        if self._captured is not None:
            self._captured.reset()
            self._captured = None


class WorkerContext:
    """All that a worker's thread has of its own: device, stream, pool, torch's thread-local state, and its graphs.

    Enter it in the worker's thread and keep it open for the worker's life; leaving it tears down graphs, then the pool.
    Warm-up, capture and replay run on the same stream; backward passes run in the calling thread.

    Args:
        name: of the worker. phase: of the run.
        warmups: runs of each step before its capture.
        observer: of mode "debug"; without one its steps just run.
        backend: None is CUDA graphs on CUDA and a tape of operators on the CPU.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str,
        *,
        mode: Mode,
        phase: CapturePhase,
        warmups: int = 3,
        observer: Observer | None = None,
        backend: GraphBackend | None = None,
    ) -> None:
        self.name, self.device, self.mode, self.phase = name, torch.device(device), mode, phase
        if mode not in get_args(Mode):
            raise ValueError(f"a graph mode is one of {', '.join(get_args(Mode))}; found {mode!r}")
        if backend is None and mode == "cuda_graph" and self.device.type != "cuda":
            raise ValueError(
                f"mode cuda_graph needs a CUDA device; worker {name!r} is on {device}. Use recorded or eager"
            )
        if mode == "recorded" and self.device.type == "cuda":
            raise ValueError(f"mode recorded is the CPU's stand-in; worker {name!r} is on {device}. Use cuda_graph")
        if warmups < 1:
            raise ValueError(f"warmups must be at least 1; found {warmups}")
        self.warmups, self.observer = warmups, observer
        self.graphs: list[StepGraph] = []
        self._backend: GraphBackend = backend or (
            CudaBackend(self.device, debug=mode == "debug") if self.device.type == "cuda" else TapeBackend()
        )
        self._thread: int | None = None
        self._closed = False
        self._stack = ExitStack()

    @property
    def backend(self) -> GraphBackend:
        return self._backend

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise GraphError(f"the context of worker {self.name!r} is entered once; make another")
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            # The engine's own threads are not policed by a thread-local capture.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._backend.open()
            stack.callback(self._backend.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the graphs, then the pool, and restore the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for graph in reversed(self.graphs):
                graph._reset()
        finally:
            self._stack.close()

    def check_usable(self, what: str) -> None:
        """Raise a GraphError unless the caller is the worker's thread and the context is open."""
        if self._closed:
            raise GraphError(f"{what} of worker {self.name!r} was destroyed with its context; it cannot run any more")
        if self._thread is None:
            raise GraphError(f"enter the context of worker {self.name!r} in its thread before {what} is used")
        if threading.get_ident() != self._thread:
            raise GraphError(
                f"{what} belongs to the thread of worker {self.name!r}; found thread "
                f"{threading.current_thread().name!r}. Capture and replay in the thread that owns the device"
            )

    def graph(
        self,
        name: str,
        function: Callable[[], None],
        *,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> StepGraph:
        """Declare a step; `prepare` captures it. `function` touches static tensors only and returns nothing.

        Raises:
            ValueError: the name is taken.
        """
        self.check_usable(name)
        if any(graph.name == name for graph in self.graphs):
            raise ValueError(f"steps of worker {self.name!r} need names of their own; found a second {name!r}")
        graph = StepGraph(self, name, function, inputs=inputs, outputs=outputs, state=state)
        self.graphs.append(graph)
        return graph

    def prepare(self) -> None:
        """Warm up and capture every declared step that is not captured yet; nothing to do without capture.

        What the steps declare as state and outputs has afterwards the values it had before, bit for bit.

        Raises:
            GraphError: outside the phase, or a step cannot be captured; then nothing of it is left behind.
        """
        self.check_usable("prepare()")
        waiting = [graph for graph in self.graphs if graph.captured is None]
        if self.mode not in CAPTURING_MODES or not waiting:
            return
        with self.phase.turn(self.name):
            saved = self._save({name: t for g in waiting for name, t in (g.state | g.outputs).items()})
            try:
                for graph in waiting:
                    self._prepare(graph)
            finally:
                with torch.no_grad():
                    for tensor, value in saved:
                        tensor.copy_(value)
                self._backend.synchronize()

    def _prepare(self, graph: StepGraph) -> None:
        try:
            graph._prepare(self._backend, self.warmups)
        except GraphError:
            raise
        except Exception as error:
            raise GraphError(
                f"worker {self.name!r} could not capture {graph.name}: {type(error).__name__}: {error}. Run "
                "`dflash-graph debug` with this configuration to see which line stands in the way, or use "
                "graphs.mode=eager"
            ) from error

    def _save(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Copies of the tensors, on the host where the device has no room for them."""
        distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors.values()}.values()
        room = sum(t.nbytes for t in distinct) < self._backend.free_bytes() // 2
        return [(t, t.detach().clone() if room else t.detach().to("cpu", copy=True)) for t in distinct]

    def memory(self) -> dict[str, int]:
        """Bytes on the worker's device, see `GraphBackend.memory`; zeros on the CPU."""
        return self._backend.memory()


def _signature(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
