"""torch.cuda as far as graphs need it, over CPU tensors: `CudaBackend` runs on it under stricter rules than a GPU's.

A capture runs nothing (what it wrote is undone), needs the worker's thread, its own stream, garbage collection off and
backward in the calling thread, and dies by a device-wide synchronisation. A replay runs the recorded operators on the
recorded addresses, and only after all memory of its pool was overwritten, since another graph may have used it.
Every call is logged; a rule that is broken where nothing can be raised (in a destructor) is a `fault`.
"""

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph.graph_backends import Tape
from dflash_graph.tracing import capturing_predicate


class FakeStream:
    def __init__(self, cuda: "FakeCuda", device: int, name: str) -> None:
        self.cuda, self.device, self.name = cuda, device, name

    def __repr__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        self.cuda.event(f"sync {self.name}")
        for graph in self.cuda.capturing:
            if graph.stream is self:
                graph.invalid = True
                raise RuntimeError("operation not permitted when stream is capturing")


class FakePool:
    def __init__(self, cuda: "FakeCuda", number: int) -> None:
        self.id, self._cuda = (0, number), cuda
        cuda.pools.add(self.id)
        cuda.event(f"pool {number}")

    def snapshot(self) -> list[dict[str, Any]]:
        own = [t.nbytes for graph in self._cuda.graphs if graph.pool_id == self.id for t in graph.memory]
        return [{"total_size": size} for size in [*own, self._cuda.pool_bytes]]

    def __del__(self) -> None:
        self._cuda.pools.discard(self.id)
        self._cuda.event(f"drop pool {self.id[1]}")
        if any(graph.pool_id == self.id for graph in self._cuda.graphs):
            self._cuda.faults.append(f"pool {self.id} was dropped before its graphs were reset")


class FakeGraph:
    """torch.cuda.CUDAGraph as of torch 2.11."""

    def __init__(self, cuda: "FakeCuda", keep_graph: bool) -> None:
        self.cuda, self.keep_graph = cuda, keep_graph
        self.stream: FakeStream | None = None
        self.pool_id: tuple[int, int] | None = None
        self.tape: Tape | None = None
        self.memory: list[Tensor] = []
        self.invalid, self.instantiated, self.debug = False, False, False
        self._thread = 0
        self._stack = ExitStack()

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        cuda, stream = self.cuda, self.cuda.current_stream()
        _must(self.tape is None, "this graph already holds a capture")
        _must(capture_error_mode == "thread_local", f"mode {capture_error_mode} would police other threads")
        _must(not stream.name.startswith("default"), "CUDA graphs must be captured on a non-default stream")
        _must(pool in cuda.pools, f"pool {pool} does not live")
        _must(not gc.isenabled(), "garbage collection must be off in a capture")
        _must(not torch.autograd.is_multithreading_enabled(), "backward must stay in the calling thread")
        _must(not any(g._thread == threading.get_ident() for g in cuda.capturing), "a capture in a capture")
        _must(not cuda.synchronizing[stream.device], "another thread synchronises this device")
        cuda.event(f"begin on {stream.name} pool {pool and pool[1]}")
        self.stream, self.pool_id, self._thread = stream, pool, threading.get_ident()
        self._stack.enter_context(capturing_predicate(True))
        spy = self._stack.enter_context(_Spy())
        self.tape = self._stack.enter_context(Tape())
        self.memory = spy.memory
        cuda.capturing.append(self)
        cuda.graphs.append(self)

    def capture_end(self) -> None:
        _must(self in self.cuda.capturing, "no capture is under way")
        _must(threading.get_ident() == self._thread, "a capture must end in the thread that began it")
        # An operation that failed made the capture invalid, and so did one on another stream.
        if self.cuda.current_stream() is not self.stream or sys.exc_info()[1] is not None:
            self.invalid = True
        self.cuda.capturing.remove(self)
        self._stack.close()
        _poison(self.memory)
        self.cuda.event("end")
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def instantiate(self) -> None:
        _must(self.keep_graph and self not in self.cuda.capturing, "only a kept graph, after its capture")
        self.instantiated = True

    def enable_debug_mode(self) -> None:
        self.debug = True

    def debug_dump(self, path: str) -> None:
        _must(self.debug, "debug mode is not on")
        Path(path).write_text("digraph dot {}\n")

    def replay(self) -> None:
        cuda = self.cuda
        _must(self.tape is not None and not self.invalid and self not in cuda.capturing, "nothing was captured")
        _must(self.pool_id in cuda.pools, "the pool of this graph is gone")
        _must(cuda.current_stream() is self.stream, "a replay on another stream than the capture's")
        _must(not any(g._thread == threading.get_ident() for g in cuda.capturing), "a replay in a capture")
        for graph in cuda.graphs:
            if graph.pool_id == self.pool_id:
                _poison(graph.memory)
        assert self.tape is not None
        self.tape.replay()

    def reset(self) -> None:
        _must(self not in self.cuda.capturing, "the stream still captures; end the capture first")
        self.cuda.event("reset")
        if self in self.cuda.graphs:
            self.cuda.graphs.remove(self)
        if self.tape is not None:
            self.tape.reset()
        self.tape, self.memory = None, []

    def __del__(self) -> None:
        if self.tape is not None:
            self.cuda.faults.append("a graph was dropped without a reset")


class FakeGraph213(FakeGraph):
    """As of torch 2.13: with a check of its inputs, and nodes that can be read."""

    live: bool = False

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        super().capture_begin(pool, capture_error_mode)
        self.live = check_input_liveness

    def get_graph_data(self) -> dict[str, Any]:
        _must(self.keep_graph and self.instantiated, "keep_graph, and instantiate()")
        assert self.tape is not None
        names = [func.name() for func, *_ in self.tape._entries]
        return {"nodes": [{"kernel_name": n if n != "aten::copy_" else None, "node_type": "memcpy"} for n in names]}


class FakeCuda:
    """One per test. Its devices are numbers; their tensors lie on the CPU.

    Attributes:
        log: (thread name, event) in order. faults: see above.
        pool_bytes: what warm-ups took from the device; a test's step adds to it.
        fail: event -> error that its next occurrence raises.
    """

    def __init__(self, num_devices: int = 1, version: tuple[int, int] = (2, 13)) -> None:
        self.log: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.pool_bytes = 0
        self.free = 1 << 40
        self.graphs: list[FakeGraph] = []
        self.capturing: list[FakeGraph] = []
        self.pools: set[tuple[int, int]] = set()
        self.synchronizing = [0] * num_devices
        self._defaults = [FakeStream(self, i, f"default-{i}") for i in range(num_devices)]
        self._graph = FakeGraph213 if version >= (2, 13) else FakeGraph
        self._local = threading.local()
        self._count = 0
        self._lock = threading.Lock()

    def event(self, what: str) -> None:
        self.log.append((threading.current_thread().name, what))
        if what in self.fail:
            raise self.fail.pop(what)

    def events(self, thread: str | None = None) -> list[str]:
        return [what for name, what in self.log if thread in (None, name)]

    def leftovers(self) -> list[object]:
        """What a run must not leave behind: faults, graphs, captures, pools."""
        return [*self.faults, *self.graphs, *self.capturing, *self.pools]

    def _next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count

    # ---- torch.cuda -------------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: torch.device | int) -> None:
        self._local.device = _index(device)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, _index(device), f"stream-{self._next()}")

    def current_stream(self, device: torch.device | int | None = None) -> FakeStream:
        index = self.current_device() if device is None else _index(device)
        stream: FakeStream = self._streams().get(index, self._defaults[index])
        return stream

    def set_stream(self, stream: FakeStream) -> None:
        self.event(f"set {stream.name}")
        self._local.device = stream.device
        self._streams()[stream.device] = stream

    def _streams(self) -> dict[int, FakeStream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        streams: dict[int, FakeStream] = self._local.streams
        return streams

    def MemPool(self) -> FakePool:
        return FakePool(self, self._next())

    @contextmanager
    def use_mem_pool(self, pool: FakePool, device: torch.device) -> Iterator[None]:
        _must(pool.id in self.pools, "the pool does not live")
        _must(not self.capturing, "warm-up while a capture is under way")
        self.event(f"warm-up pool {pool.id[1]}")
        yield

    def CUDAGraph(self, keep_graph: bool = False) -> FakeGraph:
        return self._graph(self, keep_graph)

    @contextmanager
    def device_wide(self, device: int) -> Iterator[None]:
        """A device-wide synchronisation that takes as long as the block; kills what is captured on that device."""
        self.synchronizing[device] += 1
        try:
            for graph in self.capturing:
                if graph.stream is not None and graph.stream.device == device:
                    graph.invalid = True
            yield
        finally:
            self.synchronizing[device] -= 1

    def synchronize(self, device: int = 0) -> None:
        with self.device_wide(device):
            self.event("synchronize")

    def empty_cache(self) -> None:
        _must(not self.capturing, "the cache is emptied in a capture")
        self.event("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 1 << 41

    def memory_allocated(self, device: torch.device) -> int:
        return 1000

    def memory_reserved(self, device: torch.device) -> int:
        return 2000


class _Spy(TorchDispatchMode):
    """Undoes at its end what was written to memory from outside; keeps the memory that was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []
        self._inside: set[int] = set()  # storages
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = set()
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                key = _storage(tensor)
                read.add(key)
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and key not in self._inside and key not in self._saved:
                    whole = _whole(tensor)
                    self._saved[key] = whole, whole.clone()
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if _storage(tensor) not in read | self._inside:
                self._inside.add(_storage(tensor))
                self.memory.append(tensor.detach())
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        with torch.inference_mode():
            for whole, value in self._saved.values():
                whole.copy_(value)
        self._saved.clear()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    """The bytes of its storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


@torch.inference_mode()  # it may write to what a step made in that mode
def _poison(memory: Sequence[Tensor]) -> None:
    for tensor in memory:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def _index(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index or 0


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)
