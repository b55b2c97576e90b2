"""What one step costs: FLOPs and operators, counted by dispatch modes, and peak memory, read from the kernel."""

import ctypes
import gc
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

# They only allocate, or only rename memory, although their schema does not say so.
_NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}


# Torch counts SDPA's CUDA operators only. These are its own formulas for them, under the names of the CPU's operators.
def _attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


# oneDNN's GEMM, which torch does not count either: (..., K) x (N, K), with or without a tensor added to the result.
def _linear(x: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * prod(x) * int(out_shape[-1])


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _FORMULAS[torch.ops.mkldnn._linear_pointwise] = _linear


class Operators(TorchDispatchMode):
    """Counts operators that do work: all but views and bare allocations; composite ones by their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = func._overloadpacket._qualified_op_name
        if not func.is_view and name.split("::")[1] not in _NOT_LAUNCHED:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class InTheOpen(TorchDispatchMode):
    """Runs the bodies of Python operators (`torch.library.custom_op`), so that the modes below see what they do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        definition = OPDEFS.get(func._overloadpacket._qualified_op_name)
        if definition is not None and func.namespace not in ("aten", "prims"):
            with self:
                return definition._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def count(contestant: Any) -> dict[str, Any]:
    """FLOPs and operators of one step.

    Returns:
        flops: with Python operators in the open and SDPA by torch's formula for it. flops_by_op: the same by operator.
        flops_torch: as torch counts on this device, where SDPA on the CPU counts as 0.
        operators, operators_by_op: in the open. operators_closed: opaque Python operators count as one each.
    """
    flops = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    operators = Operators()
    contestant.reset()
    with contestant.in_the_open(), flops, operators, InTheOpen():
        contestant.step()
    closed = Operators()
    contestant.reset()
    with closed:
        contestant.step()
    by_op = {str(op): n for op, n in flops.get_flop_counts()["Global"].items()}
    return {
        "flops": flops.get_total_flops(),
        "flops_by_op": by_op,
        "flops_torch": sum(n for op, n in by_op.items() if "for_cpu" not in op),
        "operators": operators.counts.total(),
        "operators_by_op": dict(operators.counts.most_common()),
        "operators_closed": closed.counts.total(),
    }


# ---- memory ---------------------------------------------------------------------------------------------------------


def _status(key: str) -> int:
    """A size of /proc/self/status, bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def resident() -> int:
    """Resident bytes, after everything that is free went back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def forget_peak() -> None:
    """Let the peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Most bytes that were resident since `forget_peak`."""
    return _status("VmHWM")
