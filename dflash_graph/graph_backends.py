"""What a captured step is on a device: a CUDA graph, or on the CPU a tape of operators that behaves like one.

A backend owns the stream, the pool and the capture of one worker; `graphs.py` decides when. Both record the addresses
of one run and replay its operators onto them, so that rebinding, baked-in numbers and stale gradients show up without a
GPU. Differences between PyTorch versions are handled here and nowhere else.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
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
    """The device's side of one worker. All calls come from the worker's thread, between `open` and `close`.

    Attributes:
        stream: the one of warm-up, capture and replay; None where a device has no streams.
    """

    stream: Any

    def open(self) -> None:
        """Make the worker's stream current, and its pool."""

    def close(self) -> None:
        """Give up the pool, then the stream. All captured steps were reset before."""

    def check_stream(self, what: str) -> None:
        """Raise a GraphError unless the worker's own stream is the current one."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run `function` once, in the memory that a capture of it would take, and wait for its end."""

    def capture(self, function: Callable[[], None]) -> Captured:
        """Record one run of `function`. Whatever it raises leaves no capture behind."""

    def synchronize(self) -> None:
        """Wait for the worker's own stream."""

    def trim(self) -> None:
        """Give unused memory outside the graphs' pool back to the device; while nobody captures."""

    def pool_bytes(self) -> int:
        """Bytes of device memory that the pool of the worker's steps has taken."""

    def free_bytes(self) -> int:
        """Bytes that could still be allocated."""

    def memory(self) -> dict[str, int]:
        """Bytes: "allocated" and "reserved" on the device by this process, "graph_pool" reserved by the graphs."""


# ---- CPU ------------------------------------------------------------------------------------------------------------


class TapeBackend:
    """The CPU's stand-in: a captured step is the list of operators of one run, backward and optimizer included."""

    stream = None

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def check_stream(self, what: str) -> None:
        pass

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def capture(self, function: Callable[[], None]) -> Captured:
        tape = Tape()
        with capturing_predicate(True), tape:
            function()
        return tape

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def pool_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 62

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "graph_pool": 0}


# The memory keeps what the last replay left in it.
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


class Tape(TorchDispatchMode):
    """Records the operators of one run, then replays them onto the very tensors of that run.

    Results are kept: they are the tape's memory, as a graph's pool is. A replay runs every operator again on the
    recorded arguments and puts new results into the recorded ones; views are not run again, since they share memory. An
    operator from `torch.library` is one entry. What goes around torch's dispatcher (NumPy, a bare kernel launch) is not
    recorded.

    Raises:
        GraphError: at record, an operator that a CUDA graph cannot hold, with its line.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: list[tuple[Any, Sequence[Any], dict[str, Any], tuple[Tensor, ...]]] = []
        self._finder = SiteFinder(None)
        self._inference = False

    def __len__(self) -> int:
        return len(self._entries)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        problem = op_problem(func, args, kwargs)
        if problem is not None and not _is_default(problem.generator):
            raise GraphError(f"{problem.what}{self._place()}: {problem.meaning}. To do: {problem.advice}")
        # Aliases, so that a tensor that is given other memory, or a list that is filled anew, is not followed.
        recorded = _pytree.tree_map_only(Tensor, Tensor.detach, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if not _leaves_no_node(func):
            self._inference |= torch.is_inference_mode_enabled()
            self._entries.append((func, *recorded, tuple(x.detach() for x in _tensors(result))))
        return result

    def _place(self) -> str:
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        site, *_ = self._finder.find(frame)
        return f" at {site}" if site is not None else ""

    def replay(self) -> None:
        # The caller's own modes are no part of a recorded step. inference_mode(False) would turn gradients on: first.
        with torch.inference_mode(self._inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, results in self._entries:
                again = func(*args, **kwargs)
                if not results:
                    continue
                for old, new in zip(results, _tensors(again), strict=True):
                    if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                        old.copy_(new)

    def reset(self) -> None:
        self._entries.clear()


def _leaves_no_node(func: Any) -> bool:
    """Whether an operator touches no memory: a view, a change of shape in place, an allocation."""
    return func.is_view or torch.Tag.inplace_view in func.tags or func._schema.name.removeprefix("aten::") in _UNFILLED


def _is_default(generator: torch.Generator | None) -> bool:
    """Whether it is the one that every graph knows; an argument comes as another Python object."""
    return generator is not None and generator._cdata == torch.default_generator._cdata  # type: ignore[attr-defined]


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor)]


# ---- CUDA -----------------------------------------------------------------------------------------------------------


class CudaBackend:
    """Raw CUDA graphs of one worker: one stream for warm-up, capture and replay, one pool for all its graphs.

    Warm-ups take their memory from the graphs' pool, too, so that the captures find it there: in a pool of their own
    they would double the activations that the device has to hold.

    Args:
        debug: graphs keep their nodes, for `census` and `dump`, and refuse to replay over tensors that were freed.
        cuda: torch.cuda, or what stands for it where there is none.
    """

    def __init__(self, device: torch.device, *, debug: bool = False, cuda: Any = torch.cuda) -> None:
        self.device = torch.device("cuda", cuda.current_device() if device.index is None else device.index)
        self.stream: Any = None
        self.debug = debug
        self._cuda = cuda
        self._before: tuple[int, Any] | None = None  # device and stream of the thread
        self._pool: Any = None
        self._anchor: Any = None

    def open(self) -> None:
        cuda = self._cuda
        device, stream = cuda.current_device(), cuda.current_stream(self.device)
        try:
            cuda.set_device(self.device)
            self.stream = cuda.Stream(self.device)
            cuda.set_stream(self.stream)
            _set_triton_allocator(self.device)
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to tell
                cuda.set_stream(stream)
                cuda.set_device(device)
            raise
        self._before = device, stream

    def close(self) -> None:
        if self._before is None:
            return
        device, stream = self._before
        self._before = None
        try:
            self.stream.synchronize()
            if self._anchor is not None:
                self._anchor.reset()
        finally:
            self._anchor = self._pool = None
            self._cuda.set_stream(stream)
            self._cuda.set_device(device)

    def check_stream(self, what: str) -> None:
        device, stream = self._cuda.current_device(), self._cuda.current_stream(self.device)
        if device != self.device.index or stream != self.stream:
            raise GraphError(
                f"{what} must run on its worker's own stream, {self.stream} of {self.device}; the current one is "
                f"{stream}, the current device cuda:{device}. Leave other streams and devices before the call"
            )

    def warm_up(self, function: Callable[[], None]) -> None:
        self._open_pool()
        with self._cuda.use_mem_pool(self._pool, self.device):
            function()
        self.stream.synchronize()  # sync: what is wrong with a kernel shows here, not in the capture

    def capture(self, function: Callable[[], None]) -> Captured:
        self._open_pool()
        self.stream.synchronize()
        graph: Captured = self._captured(function, self._pool.id)
        return graph

    def _open_pool(self) -> None:
        """The pool, and an empty graph that keeps it alive while others are captured and reset."""
        if self._pool is not None:
            return
        pool = self._cuda.MemPool()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            self._anchor = self._captured(lambda: None, pool.id)
        self._pool = pool

    def _captured(self, function: Callable[[], None], pool: Any) -> Any:
        graph = self._new_graph()
        try:
            # An explicit stream is current; "thread_local" leaves other threads alone; no cache is emptied.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local", **self._liveness(graph))
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid already; the first error is the one to tell
                    graph.capture_end()
                raise
            graph.capture_end()
            if self.debug:
                graph.instantiate()
        except BaseException:
            with suppress(RuntimeError):
                graph.reset()
            raise
        return graph

    def _new_graph(self) -> Any:
        if not self.debug:
            return self._cuda.CUDAGraph()
        graph = self._cuda.CUDAGraph(keep_graph=True)
        graph.enable_debug_mode()
        return graph

    def _liveness(self, graph: Any) -> dict[str, bool]:
        """Torch 2.13 and later can tell freed inputs, by Python before each replay: for debugging."""
        found = self.debug and "check_input_liveness" in inspect.signature(graph.capture_begin).parameters
        return {"check_input_liveness": True} if found else {}

    def synchronize(self) -> None:
        self.stream.synchronize()

    def trim(self) -> None:
        self._cuda.empty_cache()

    def pool_bytes(self) -> int:
        # Of the pool alone: what other threads allocate meanwhile is no fault of a step.
        return 0 if self._pool is None else sum(segment["total_size"] for segment in self._pool.snapshot())

    def free_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[0])

    def memory(self) -> dict[str, int]:
        return {
            "allocated": int(self._cuda.memory_allocated(self.device)),
            "reserved": int(self._cuda.memory_reserved(self.device)),
            "graph_pool": self.pool_bytes(),
        }

    def census(self, captured: Captured) -> dict[str, int] | None:
        """Nodes of a graph captured in debug, by kernel or type.

        None where torch cannot tell: before 2.13, or without cuda.bindings.
        """
        try:
            nodes = captured.get_graph_data()["nodes"]  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            return None
        return dict(Counter(node["kernel_name"] or node["node_type"] for node in nodes).most_common())

    def dump(self, captured: Captured, path: Path) -> None:
        """Write a graph captured in debug as a dot file."""
        captured.debug_dump(str(path))  # type: ignore[attr-defined]


def _set_triton_allocator(device: torch.device) -> None:
    """Scratch that a Triton kernel asks for at launch; a ContextVar, so each worker's thread sets it."""
    try:
        import triton
    except ImportError:
        return

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
