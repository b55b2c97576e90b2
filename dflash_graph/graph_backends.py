"""What a captured step is on a device: a CUDA graph, or on the CPU a tape of operators that behaves like one.

A backend owns the stream, the pool and the capture of one worker; `graphs.py` decides when. Both record the addresses
of one run and replay its operators onto them, so that rebinding, baked-in numbers and stale gradients show up without a
GPU. Differences between PyTorch versions are handled here and nowhere else.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph.findings import SiteFinder
from dflash_graph.op_rules import op_problem
from dflash_graph.tracing import capturing_predicate


class GraphError(RuntimeError):
    """A step cannot be captured, or a graph was used where or when it must not be."""


class Captured(Protocol):
    """A captured step."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class GraphBackend(Protocol):
    """The device's side of one worker. All calls come from the worker's thread, between `open` and `close`."""

    def open(self) -> None:
        """Make the worker's stream current, and its pool."""

    def close(self) -> None:
        """Give up the pool, then the stream. All captured steps were reset before."""

    def capture(self, function: Callable[[], None]) -> Captured:
        """Record one run of `function`. Whatever it raises leaves no capture behind."""

    def synchronize(self) -> None:
        """Wait for the worker's own stream."""

    def allocations(self) -> int:
        """Segments of device memory allocated so far, by anybody on the device."""

    def free_bytes(self) -> int:
        """Bytes that could still be allocated."""

    def memory(self) -> dict[str, int]:
        """Bytes: "allocated" and "reserved" on the device by this process, "graph_pool" reserved by the graphs."""


# ---- CPU ------------------------------------------------------------------------------------------------------------


class TapeBackend:
    """The CPU's stand-in: a captured step is the list of operators of one run, backward and optimizer included."""

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def capture(self, function: Callable[[], None]) -> Captured:
        tape = Tape()
        with capturing_predicate(True), tape:
            function()
        return tape

    def synchronize(self) -> None:
        pass

    def allocations(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 62

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "graph_pool": 0}


_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


class Tape(TorchDispatchMode):
    """Records the operators of one run, then replays them onto the very tensors of that run.

    Results are kept: they are the tape's memory, as a graph's pool is. A replay runs every operator again on the
    recorded arguments and puts new results into the recorded ones; views are not run again, since they share memory. An
    operator from `torch.library` is one entry.

    Raises:
        GraphError: at record, an operator that a CUDA graph cannot hold, with its line.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: list[tuple[Any, Sequence[Any], dict[str, Any], tuple[Tensor, ...]]] = []
        self._finder = SiteFinder(None)

    def __len__(self) -> int:
        return len(self._entries)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        problem = op_problem(func, args, kwargs)
        if problem is not None and problem.generator is None:
            raise GraphError(f"{problem.what}{self._place()}: {problem.meaning}. To do: {problem.advice}")
        result = func(*args, **kwargs)
        if not func.is_view and func._schema.name.split("::")[1] not in _UNFILLED:
            tensors = tuple(x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor))
            self._entries.append((func, args, kwargs, tuple(x.detach() for x in tensors)))
        return result

    def _place(self) -> str:
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        site, *_ = self._finder.find(frame)
        return f" at {site}" if site is not None else ""

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self._entries:
            again = func(*args, **kwargs)
            if not results:
                continue
            for old, new in zip(results, (x for x in _pytree.tree_leaves(again) if isinstance(x, Tensor)), strict=True):
                if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                    old.copy_(new)

    def reset(self) -> None:
        self._entries.clear()


# ---- CUDA -----------------------------------------------------------------------------------------------------------


class CudaBackend:
    """Raw CUDA graphs of one worker: one stream for warm-up, capture and replay, one pool for all its graphs."""

    def __init__(self, device: torch.device, *, debug: bool = False) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.stream: Any = None
        self.debug = debug
        self._pool: Any = None
        self._anchor: Any = None

    def open(self) -> None:
        torch.cuda.set_device(self.device)
        self._before = torch.cuda.current_stream(self.device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.stream)
        _set_triton_allocator(self.device)

    def close(self) -> None:
        self.stream.synchronize()
        if self._anchor is not None:
            self._anchor.reset()
        self._anchor = self._pool = None
        torch.cuda.set_stream(self._before)

    def capture(self, function: Callable[[], None]) -> Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            scratch = torch.zeros((), device=self.device)
            self.stream.synchronize()
            # It keeps the pool alive when graphs are captured one after the other, and reset.
            self._anchor = self._captured(partial(_touch, scratch))
        self.stream.synchronize()
        return self._captured(function)

    def _captured(self, function: Callable[[], None]) -> Captured:
        graph: Any = new_cuda_graph(keep=self.debug)
        if self.debug:
            graph.enable_debug_mode()
        # sync: none. An explicit stream is current; "thread_local" leaves other threads alone; no cache is emptied.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local", **_liveness(graph))
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid already; the first error is the one to tell
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()
        if self.debug and hasattr(graph, "instantiate"):
            graph.instantiate()
        captured: Captured = graph
        return captured

    def synchronize(self) -> None:
        self.stream.synchronize()

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("segment.all.allocated", 0))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def memory(self) -> dict[str, int]:
        pool = 0
        if self._pool is not None:
            wanted = tuple(self._pool)
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            pool = sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == wanted)
        return {
            "allocated": int(torch.cuda.memory_allocated(self.device)),
            "reserved": int(torch.cuda.memory_reserved(self.device)),
            "graph_pool": int(pool),
        }


def _touch(scratch: Tensor) -> None:
    scratch.zero_()


def new_cuda_graph(*, keep: bool) -> Any:
    """A CUDAGraph, whose nodes can be read after the capture where torch has that (`keep_graph`)."""
    if not keep:
        return torch.cuda.CUDAGraph()
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()


def _liveness(graph: Any) -> dict[str, bool]:
    """Torch 2.13 and later can refuse a replay whose inputs are gone."""
    try:
        return (
            {"check_input_liveness": True}
            if "check_input_liveness" in str(inspect.signature(graph.capture_begin))
            else {}
        )
    except (TypeError, ValueError):  # bound C++ methods have no signature
        return {}


def _set_triton_allocator(device: torch.device) -> None:
    """Scratch that a Triton kernel asks for at launch; a ContextVar, so each worker's thread sets it."""
    try:
        import triton
    except ImportError:
        return

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
