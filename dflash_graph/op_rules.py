"""What a CUDA graph cannot hold: rules over single operators and over single Python calls, without a GPU.

An operator (as a dispatch mode sees it) is judged by its tags, its arguments and the devices of its tensors; a call (as
a function mode sees it) by what it would do if the step's tensors lay on a GPU, which on the CPU leaves no operator
behind (`.cpu()`, `.tolist()`, a scalar assigned through an index). Pure functions; called by `tracing.py` and by
whoever records operators.
"""

import ast
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True)
class Problem:
    """Why an operation cannot be part of a CUDA graph, or would not do in it what it does outside.

    Attributes:
        kind: "host_sync", "dynamic_shape", "boolean_index", "host_copy", "device_copy", "pinned_memory", "generator",
            "host_random" or "seed".
        generator: the generator of an operation with an explicit one; whether it is registered is not known here.
    """

    kind: str
    what: str
    generator: torch.Generator | None = None

    @property
    def meaning(self) -> str:
        return _MEANINGS[self.kind]

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


_MEANINGS = {
    "host_sync": "the host waits for the GPU and reads a value: capture fails, and a replay would keep the value of "
    "the capture",
    "dynamic_shape": "the output's shape depends on values, so the host waits for the GPU to learn it: capture fails",
    "boolean_index": "a boolean index is turned into positions, whose number the host waits for: capture fails",
    "host_copy": "it copies from pageable host memory to the GPU: capture fails, and a replay would never copy again",
    "device_copy": "a copy between devices (or with pageable host memory) cannot be captured in one device's graph",
    "pinned_memory": "it allocates page-locked host memory, a device-wide call: capture fails",
    "generator": "a generator that is not registered with the graph is not advanced by a replay: capture fails, or "
    "every replay draws the same numbers",
    "host_random": "the number is drawn on the host once, at capture, and is a constant in every replay",
    "seed": "the generator's state is set on the host: capture fails, and a replay would not set it again",
}
_ADVICE = {
    "host_sync": "keep the value on the device (torch.where, masks, counters that are read between steps), or move the "
    "read out of the step",
    "dynamic_shape": "use a form of fixed size: masks and torch.where, sums over masks, positions made on the host, "
    "torch.repeat_interleave(..., output_size=n), torch.nonzero_static(size=n)",
    "boolean_index": "use torch.where or masked_fill_ for values, and an index list of fixed length (made on the host "
    "with the batch) for rows",
    "host_copy": "make the tensor once, before the step, on the step's device, and fill it in place between steps; or "
    "build it on the device (torch.full, torch.arange(..., device=...), fill_)",
    "device_copy": "copy between steps, on a stream of its own, into a static buffer of the step's device",
    "pinned_memory": "allocate pinned buffers once, before any capture",
    "generator": "use the device's default generator, register this one (CUDAGraph.register_generator_state) and name "
    "it as known, or draw on the host between steps into a static buffer",
    "host_random": "draw on the device (device=...), or between steps into a static buffer",
    "seed": "seed between steps",
}

# ---- operators ------------------------------------------------------------------------------------------------------

_BOOLEAN = (torch.bool, torch.uint8)
_INDEX = frozenset({"aten::index", "aten::_unsafe_index", "aten::_index_put_impl_"})
_INDEX_PUT = frozenset({"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"})
# Their CUDA kernels read values on the host although no tag says so.
_HIDDEN_SYNCS = frozenset({
    "aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_eigvals", "aten::_linalg_svd",
    "aten::linalg_eig", "aten::linalg_eigvals", "aten::linalg_lstsq", "aten::is_nonzero", "aten::multinomial",
    "aten::embedding_renorm_", "aten::segment_reduce", "aten::_pack_padded_sequence", "aten::_to_sparse",
    "aten::_coalesce", "aten::to_sparse", "aten::histogram",
})  # fmt: skip
# Autograd nodes that look for zeros on the host, except under a dispatch mode, where they take another way.
_SYNCING_NODES = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0"})
_CHECKED_NORMAL = frozenset({"Tensor_Tensor", "float_Tensor", "Tensor_Tensor_out", "float_Tensor_out"})
COPIES = frozenset({"aten::copy_", "aten::copy", "aten::_to_copy", "aten::_copy_from"})


def op_problem(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, host_value: bool = False
) -> Problem | None:
    """Why operator `func` (an OpOverload) with these arguments cannot be captured; None if it can.

    Args:
        host_value: the value of an indexed assignment is a Python number, which lies on the host on every device.
    """
    name, tags = _name_and_tags(func)
    shown = f"aten.{name[6:]}" if name.startswith("aten::") else name
    if kwargs.get("pin_memory") or name == "aten::_pin_memory":
        return Problem("pinned_memory", f"{shown} allocates pinned host memory")
    if "data_dependent_output" in tags:
        return Problem("host_sync", f"{shown} reads a tensor's value on the host")
    if name in _HIDDEN_SYNCS or (name == "aten::normal" and func._overloadname in _CHECKED_NORMAL):
        return Problem("host_sync", f"{shown} reads a tensor's value on the host (on CUDA)")
    if name in _INDEX or name in _INDEX_PUT:
        return _index_problem(name, shown, args, kwargs, host_value) or _device_problem(name, shown, args, kwargs)
    if name == "aten::repeat_interleave":
        size = kwargs.get("output_size", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
        return None if size is not None else Problem("dynamic_shape", f"{shown} without output_size")
    if "dynamic_output_shape" in tags:
        return Problem("dynamic_shape", f"{shown} has an output whose shape depends on values")
    generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
    if generator is not None:
        return Problem("generator", f"{shown} draws from an explicit generator on {generator.device}", generator)
    return _device_problem(name, shown, args, kwargs)


def node_problem(node: str) -> Problem | None:
    """What a node of autograd's own does that no operator shows while a dispatch mode watches."""
    if node not in _SYNCING_NODES:
        return None
    return Problem("host_sync", f"torch's {node} looks for zeros in its input on the host")


@cache
def _name_and_tags(func: Any) -> tuple[str, frozenset[str]]:
    return func._schema.name, frozenset(tag.name for tag in func.tags)


def is_random(func: Any) -> bool:
    return "nondeterministic_seeded" in _name_and_tags(func)[1]


def _index_problem(
    name: str, shown: str, args: Sequence[Any], kwargs: Mapping[str, Any], host_value: bool
) -> Problem | None:
    indices = [i for i in (kwargs.get("indices") or args[1]) if i is not None]
    masks = [i for i in indices if i.dtype in _BOOLEAN]
    if not masks:
        return None
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    if name in _INDEX_PUT and host_value and len(masks) == len(indices) == 1 and not accumulate:
        return None  # runs as masked_fill_, without positions
    return Problem("boolean_index", f"{shown} with a boolean index of shape {tuple(masks[0].shape)}")


def _device_problem(name: str, shown: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Problem | None:
    """A copy from one device to another, or an operator over tensors of several: only host scalars may be mixed in."""
    tensors = [leaf for leaf in _pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    if name in COPIES:
        devices = {t.device for t in tensors}
        if (target := kwargs.get("device")) is not None:
            devices.add(torch.device(target))
        pinned = {t.device.type for t in tensors} == {"cpu", "cuda"} and _asynchronous(args, kwargs, tensors)
        if len(devices) > 1 and not pinned:
            return Problem("device_copy", f"{shown} copies from {tensors[-1].device} to {_target(kwargs, tensors)}")
        return None
    devices = {t.device for t in tensors if t.ndim > 0 or t.device.type != "cpu"}
    if len(devices) > 1:
        return Problem("device_copy", f"{shown} reads tensors of {' and '.join(sorted(map(str, devices)))}")
    return None


def _target(kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> torch.device:
    return torch.device(kwargs["device"]) if kwargs.get("device") is not None else tensors[0].device


def _asynchronous(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a copy between host and GPU is one that a graph can hold: pinned host memory, non-blocking."""
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return bool(non_blocking) and all(t.is_pinned() for t in tensors if t.device.type == "cpu")


# ---- calls ----------------------------------------------------------------------------------------------------------

_READS: dict[Callable[..., Any], str] = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.cpu: ".cpu()",
    Tensor.__array__: "numpy's conversion (__array__)",
    Tensor.__bool__: "bool(tensor), an if or while over it",
    Tensor.__float__: "float(tensor)",
    Tensor.__int__: "int(tensor)",
    Tensor.__index__: "a tensor used as a Python index",
    Tensor.__complex__: "complex(tensor)",
    Tensor.__contains__: "'in' over a tensor",
    Tensor.__repr__: "printing a tensor",
    Tensor.__format__: "formatting a tensor into a string",
}
_FROM_DATA: frozenset[Callable[..., Any]] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
FACTORIES: frozenset[Callable[..., Any]] = frozenset({
    *_FROM_DATA, torch.arange, torch.bartlett_window, torch.blackman_window, torch.empty, torch.empty_permuted,
    torch.empty_strided, torch.eye, torch.full, torch.hamming_window, torch.hann_window, torch.kaiser_window,
    torch.linspace, torch.logspace, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.range,
    torch.scalar_tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
})  # fmt: skip
RANDOM_FACTORIES: frozenset[Callable[..., Any]] = frozenset({torch.rand, torch.randint, torch.randn, torch.randperm})
# The calls that `call_problem` judges.
JUDGED_CALLS: frozenset[Callable[..., Any]] = frozenset({
    *_READS, *FACTORIES, Tensor.to, Tensor.cuda, Tensor.new_tensor, Tensor.pin_memory, Tensor.__getitem__,
    Tensor.__setitem__,
})  # fmt: skip


def call_problem(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    on_host: Callable[[Any], bool],
    frame: FrameType | None,
) -> Problem | None:
    """Why a call of torch's Python interface could not be captured if the step's tensors lay on a GPU.

    Args:
        on_host: whether a value is a tensor that would be on the host even then.
        frame: the caller, whose source says whether a device was written as "cpu" or came from a variable.
    """
    read = _READS.get(func)
    if read is not None:
        return None if on_host(args[0]) else Problem("host_sync", f"{read} reads a tensor's value on the host")
    if func is Tensor.to or func is Tensor.cuda:
        return _move_problem(func, args, kwargs, on_host, frame)
    if func in _FROM_DATA:
        return _data_problem(func, args, kwargs, on_host, frame)
    if func is Tensor.new_tensor:
        return Problem("host_copy", ".new_tensor() copies Python data to the tensor's device")
    if func is Tensor.pin_memory or (kwargs.get("pin_memory") and func in FACTORIES):
        return Problem("pinned_memory", "pinned host memory is allocated")
    if func is Tensor.__getitem__ or func is Tensor.__setitem__:
        return _subscript_problem(func, args, on_host)
    return None


def _move_problem(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_host: Callable[[Any], bool], frame: FrameType | None
) -> Problem | None:
    target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    host = on_host(args[0])
    if isinstance(target, Tensor):
        moves = host and not on_host(target)
        return Problem("host_copy", ".to() moves a host tensor to the device") if moves else None
    if func is Tensor.to and not isinstance(target, str | int | torch.device):
        return None  # a dtype alone
    if func is Tensor.to and named_host(target, frame):
        return None if host else Problem("host_sync", ".to('cpu') copies a tensor to the host")
    return Problem("host_copy", f".{func.__name__}() moves a host tensor to the device") if host else None


def _data_problem(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_host: Callable[[Any], bool], frame: FrameType | None
) -> Problem | None:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    device = kwargs.get("device")
    to_device = device is not None and not named_host(device, frame)
    if isinstance(data, Tensor):
        moves = to_device and on_host(data)
        return Problem("host_copy", f"torch.{func.__name__}() moves a host tensor to the device") if moves else None
    if to_device or not isinstance(data, bool | int | float | complex):
        return Problem("host_copy", f"torch.{func.__name__}() makes a tensor from Python data")
    return None  # a host scalar: operators take it as a constant


def _subscript_problem(func: Any, args: Sequence[Any], on_host: Callable[[Any], bool]) -> Problem | None:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(i, list | range) or type(i).__module__ == "numpy" for i in index):
        return Problem("host_copy", "a Python list or NumPy array used as an index is copied to the device")
    if func is Tensor.__getitem__ or not is_number(args[2]):
        return None
    if any(isinstance(i, Tensor) and i.ndim > 0 and i.dtype not in _BOOLEAN for i in index):
        return Problem("host_copy", "a Python number assigned through an index tensor is copied to the device")
    if len(index) == args[0].ndim and all(isinstance(i, int) and not isinstance(i, bool) for i in index):
        return Problem("host_copy", "a Python number assigned to one element is copied to the device")
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def makes_host_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType | None) -> bool:
    """Whether a factory call makes a tensor on the host even in a step on a GPU: no device, or "cpu" written there."""
    if func not in FACTORIES or kwargs.get("out") is not None:
        return False
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if func in _FROM_DATA and isinstance(data, Tensor):
        return False
    device = kwargs.get("device")
    if device is not None:
        return named_host(device, frame)
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not any(type(mode).__name__ == "DeviceContext" for mode in modes)


def named_host(device: Any, frame: FrameType | None) -> bool:
    """Whether the caller's source names the CPU at this call. A CPU that came in a variable may be a GPU elsewhere."""
    if isinstance(device, Tensor | int) or torch.device(device).type != "cpu" or frame is None:
        return False
    return _names_cpu(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _names_cpu(code: CodeType, instruction: int) -> bool:
    positions = list(code.co_positions())
    first, last, begin, end = positions[instruction // 2]
    if first is None or last is None or begin is None or end is None:
        return False
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    if not lines or not lines[-1]:
        return False
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(call, ast.Call):
        return False
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cpu")
        for argument in (*call.args, *(k.value for k in call.keywords))
        for node in ast.walk(argument)
    )
