"""What all operators share: which implementation runs, one opaque operator per call, checked launches, compile cases.

Triton is imported by the `*_triton` modules alone, and those only when "triton" was chosen, so that the package works
where Triton is missing. Nothing here knows an operator's maths.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Implementation = Literal["torch", "triton"]

CHIPS = (80, 90, 100)  # compute capabilities that the kernels are compiled for ahead of time; 90 is 9.0

_interpreter = threading.Lock()  # Triton's interpreter keeps the running program in globals
_open = False  # a plain global, which torch.compile can trace past


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1, read by Triton when it is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose_implementation(
    wanted: Implementation | None, device: torch.device | str, dtype: torch.dtype
) -> Implementation:
    """The implementation to use; None chooses Triton on CUDA for 16- and 32-bit floats, and plain torch otherwise.

    Raises:
        ValueError: "triton" was asked for where it cannot run, or the name is unknown.
    """
    device = torch.device(device)
    if wanted not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation must be one of {get_args(Implementation)} or None; found {wanted!r}")
    if wanted is None:
        return "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if wanted == "triton" and dtype == torch.float64:
        raise ValueError("the Triton kernels compute in float32; use implementation='torch' for float64")
    if wanted == "triton" and device.type != "cuda" and not interpreting():
        raise ValueError(
            f"Triton kernels need a CUDA device, or TRITON_INTERPRET=1 set before Triton is imported; found {device}. "
            "Use implementation='torch' (devices.kernels=torch)"
        )
    return wanted


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an operator over `dtype` computes and sums in: float64 for float64, else float32.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64; found {dtype}")
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensors(device: torch.device, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse named tensors that are not on the workspace's device or not contiguous; None is absent.

    Raises:
        ValueError: the first such tensor, by name.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(f"{name} must be on the workspace's device {device}; found {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; found strides {tensor.stride()}. Copy it before the call")


def check_count(name: str, count: Tensor | int, *, most: int, device: torch.device) -> None:
    """Refuse a number of live rows or blocks that is not an integer, or an integer scalar on the operator's device.

    A scalar elsewhere would be read once and stay what it was in a captured graph.

    Raises:
        TypeError, ValueError: what must hold and what was found.
    """
    if isinstance(count, Tensor):
        if count.ndim or count.dtype not in (torch.int64, torch.int32) or count.device != device:
            raise ValueError(
                f"{name} must be an integer or an int64 or int32 scalar on {device}; found {count.dtype} of shape "
                f"{tuple(count.shape)} on {count.device}"
            )
    elif isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an integer or an integer scalar tensor; found {count!r}")
    elif not 0 <= count <= most:
        raise ValueError(f"{name} must lie in [0, {most}]; found {count}")


class Operator:
    """A mutating operator without a result: one node for tracing, fake tensors and capture checks.

    It writes into tensors of the caller and returns nothing, so its fake implementation does nothing. Gradients belong
    to the `autograd.Function` that calls it, because torch refuses an autograd formula for a mutating operator.

    Args:
        name: becomes torch.ops.dflash_graph.<name>.
        body: the implementation; its annotations give the schema (Tensor, Tensor | None, int, float, bool, str).
        mutates: names of the arguments that are written.
    """

    def __init__(self, name: str, body: Callable[..., None], *, mutates: Sequence[str]) -> None:
        self.body = body
        self._call = torch.library.custom_op(f"dflash_graph::{name}", body, mutates_args=tuple(mutates))
        self._call.register_fake(lambda *args, **kwargs: None)

    def __call__(self, *args: Any) -> None:
        (self.body if _open else self._call)(*args)


@contextmanager
def in_the_open() -> Iterator[None]:
    """Run the operators' bodies without the opaque node, so that dispatch modes (FLOP counters) see what they do.

    For counting in one thread: the switch is the process's.
    """
    global _open
    before, _open = _open, True
    try:
        yield
    finally:
        _open = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of its tensors; an empty grid launches nothing.

    Products and sums are fused (one rounding), whatever Triton's version has as its default.

    Raises:
        ValueError: the tensors lie on different devices.
    """
    devices = {a.device for a in (*args, *options.values()) if isinstance(a, Tensor)}
    if len(devices) != 1:
        raise ValueError(f"all tensors of a launch must lie on one device; found {sorted(map(str, devices))}")
    if min(grid) < 1:
        return
    options["enable_fp_fusion"] = True
    if interpreting():
        with _interpreter:
            kernel[grid](*args, **options)
        return
    device = devices.pop()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One kernel with one launch configuration, as it is compiled ahead of time without a GPU.

    Attributes:
        name: unique; says kernel, dtype and what else fixes the configuration.
        kernel: the @triton.jit function.
        signature: argument name -> Triton type ("*bf16", "i32", "i64", "fp32"); constexpr arguments are left out.
        constexprs: argument name -> value.
        divisible: arguments (pointers and integers) that are multiples of 16 at every launch.
        may_spill: registers may spill (recorded, not refused).
        tensor_cores: the code must hold tensor-core instructions.
        chips: those of `CHIPS` that use this configuration.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    may_spill: bool = False
    tensor_cores: bool = False
    chips: tuple[int, ...] = CHIPS
