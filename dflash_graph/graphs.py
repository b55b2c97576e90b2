"""Steps as graphs, captured and replayed in the thread that owns the device; knows no model.

A worker makes one `WorkerContext` inside its thread, declares its steps as `StepGraph`s, and `prepare`s them once, in
the run's `CapturePhase`, before any worker works. From then on a call of a step is a replay ("cuda_graph", "recorded"),
the function itself ("eager"), or the function under an observer's eyes ("debug"). Nothing else of the package knows the
difference. A graph must never be used from another thread, and nothing is captured after the phase.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args

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

    Args:
        timeout_s: the longest wait for another worker's captures, compilation of kernels included.
    """

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._holder: tuple[int, str] | None = None  # thread and name of who has the lock
        self._closed = False

    @contextmanager
    def turn(self, who: str) -> Iterator[None]:
        """Capture as the only one.

        Raises:
            GraphError: the phase is over, a turn inside a turn, or another's turn lasts too long.
        """
        with self._alone(who):
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
        with self._alone("the end of the capture phase"):
            self._closed = True

    @contextmanager
    def _alone(self, who: str) -> Iterator[None]:
        holder = self._holder
        if holder is not None and holder[0] == threading.get_ident():
            raise GraphError(f"{who} must wait until {holder[1]}, in the same thread, has captured")
        if not self._lock.acquire(timeout=self._timeout_s):
            raise GraphError(
                f"{who} waited {self._timeout_s:g} s for its turn in the capture phase; "
                f"{holder[1] if holder else 'another worker'} is still capturing. See what holds it up"
            )
        try:
            self._holder = threading.get_ident(), who
            yield
        finally:
            self._holder = None
            self._lock.release()

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
        self._declared = inputs, outputs, state  # as given: a mapping that is rebound shows
        self._addresses: dict[str, _Signature] = {}
        for mapping in self._declared:
            for tensor_name, tensor in mapping.items():
                if self._addresses.setdefault(tensor_name, _signature(tensor)) != _signature(tensor):
                    raise ValueError(f"tensors of {name} need names of their own; two are called {tensor_name!r}")
                if not _same_device(tensor.device, context.device):
                    raise ValueError(
                        f"tensors of {name} must lie on {context.device}, the device of worker {context.name!r}; "
                        f"{tensor_name} is on {tensor.device}. Copy it there between two calls"
                    )

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
            GraphError: another thread than the worker's, another stream, before `prepare`, or after `close`.
        """
        context = self._context
        context.check_usable(self.name)
        if context.preparing:
            raise GraphError(f"{self.name} must not be called while {context.preparing} is captured; call its function")
        if self._captured is not None:
            context.backend.check_stream(self.name)
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
        now = {name: _signature(tensor) for mapping in self._declared for name, tensor in mapping.items()}
        moved = [
            f"{name}: was {was}, is {now.get(name, 'gone')}"
            for name, was in self._addresses.items()
            if now.get(name) != was
        ]
        if moved:
            raise GraphError(
                f"the tensors of {self.name} must keep their memory; write into them in place. Changed (address, "
                "shape, strides, dtype):\n" + "\n".join(moved)
            )

    def _prepare(self, backend: GraphBackend, warmups: int) -> None:
        started = time.monotonic()
        for i in range(warmups):
            before = backend.pool_bytes()
            backend.warm_up(self.function)
            grown = backend.pool_bytes() - before
            if i and i == warmups - 1 and grown:
                raise GraphError(
                    f"{self.name} must find all its memory by its last warm-up; it allocated {grown:,} bytes more in "
                    f"warm-up {warmups}. Raise graphs.warmups, or look for an allocation that grows from step to step"
                )
        captured = backend.capture(self.function)
        try:
            self.check_addresses()
        except GraphError:
            captured.reset()
            raise
        self._captured = captured
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
        least = 3 if mode == "cuda_graph" else 1
        if warmups < least:
            raise ValueError(f"warmups must be at least {least} in mode {mode}; found {warmups}")
        self.warmups, self.observer = warmups, observer
        self.graphs: list[StepGraph] = []
        self._backend: GraphBackend = backend or (
            CudaBackend(self.device, debug=mode == "debug") if self.device.type == "cuda" else TapeBackend()
        )
        self.preparing = ""  # name of the step that is warmed up or captured now
        self._thread: int | None = None
        self._closed = False
        self._stack = ExitStack()

    @property
    def backend(self) -> GraphBackend:
        return self._backend

    @property
    def stream(self) -> Any:
        """The worker's own stream, current while the context is open; None on a CPU."""
        return self._backend.stream

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise GraphError(f"the context of worker {self.name!r} is entered once; make another")
        self._thread, self._closed = threading.get_ident(), True  # what cannot open cannot be used, either
        with ExitStack() as stack:
            # The engine's own threads are not policed by a thread-local capture.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._backend.open()
            stack.callback(self._backend.close)
            self._stack, self._closed = stack.pop_all(), False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the graphs, then the pool, and restore the thread; in the worker's thread. Idempotent.

        While an error is under way, one of the teardown becomes a note of it: the first is the one to tell.
        """
        if self._closed:
            return
        if self._thread is not None:
            self._check_thread("close()")
        first = sys.exc_info()[1]
        self._closed = True
        try:
            with self._stack, ExitStack() as graphs:
                for graph in self.graphs:
                    graphs.callback(graph._reset)
        except Exception as error:
            if first is None:
                raise
            first.add_note(f"the end of worker {self.name!r} failed, too: {type(error).__name__}: {error}")

    def check_usable(self, what: str) -> None:
        """Raise a GraphError unless the caller is the worker's thread and the context is open."""
        if self._closed:
            raise GraphError(f"{what} of worker {self.name!r} was destroyed with its context; it cannot run any more")
        if self._thread is None:
            raise GraphError(f"enter the context of worker {self.name!r} in its thread before {what} is used")
        self._check_thread(what)

    def _check_thread(self, what: str) -> None:
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
            self._backend.check_stream("prepare()")
            with self._restored(waiting):
                for graph in waiting:
                    self._prepare(graph)
            self._backend.trim()  # the copies' memory

    @contextmanager
    def _restored(self, graphs: list[StepGraph]) -> Iterator[None]:
        """Give state and outputs the values they had, whatever happens."""
        saved = self._save({f"{g.name} {name}": t for g in graphs for name, t in (g.state | g.outputs).items()})

        def restore() -> None:
            with torch.inference_mode():  # a step may have made an output in that mode
                for tensor, value in saved:
                    tensor.copy_(value)
            self._backend.synchronize()
            saved.clear()

        try:
            yield
        except BaseException as first:
            try:
                restore()
            except Exception as error:
                first.add_note(f"state could not be restored, too: {type(error).__name__}: {error}")
            raise
        restore()

    def _prepare(self, graph: StepGraph) -> None:
        self.preparing = graph.name
        try:
            graph._prepare(self._backend, self.warmups)
        except Exception as error:
            kind = "" if isinstance(error, GraphError) else f"{type(error).__name__}: "
            advice = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else _NOT_CAPTURED
            raise GraphError(f"worker {self.name!r} could not capture {graph.name}: {kind}{error}. {advice}") from error
        finally:
            self.preparing = ""

    def _save(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Copies of the tensors, on the host where the device has no room for them."""
        distinct = {_signature(t): t for t in tensors.values()}.values()
        room = sum(t.nbytes for t in distinct) < self._backend.free_bytes() // 2
        return [(t, t.detach().clone() if room else t.detach().to("cpu", copy=True)) for t in distinct]

    def memory(self) -> dict[str, int]:
        """Bytes on the worker's device, see `GraphBackend.memory`; zeros on the CPU."""
        return self._backend.memory()


_NOT_CAPTURED = (
    "Run `dflash-graph debug` with this configuration to see which line stands in the way, or use graphs.mode=eager"
)
_OUT_OF_MEMORY = (
    "The graphs of a worker hold their memory for the whole run: lower schedule.token_budget or schedule.slots, raise "
    "devices.anchor_groups, or use graphs.mode=eager"
)
_Signature = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _signature(tensor: Tensor) -> _Signature:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _same_device(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (wanted.index is None or found.index is None or found.index == wanted.index)
