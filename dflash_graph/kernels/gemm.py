"""Matrix products of the plain-torch paths: oneDNN's for float32 on the CPU where torch has it, torch's own elsewhere.

For float32 torch calls MKL, which on AMD processors reaches less than half of what oneDNN does (torch 2.13, one core of
an AMD EPYC with AVX-512: 95-110 against 170-250 GFLOP/s at every shape of a drafter step). Both are true float32
products. The oneDNN operator is the one that torch's compiler emits for linear layers; it has no `out=`, so results are
new tensors. There is no gradient here: callers are `autograd.Function`s and mutating operators.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

_ONEDNN = bool(torch.backends.mkldnn.is_available()) and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)

ROW_STEP = 128  # oneDNN keeps some 0.8 MB for each shape it has met: callers round row counts up that follow the data


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """What torch's `FlopCounterMode` needs as `custom_mapping` to count these products: it does not know oneDNN's."""

    def linear(x: list[int], *args: Any, out_shape: list[int], **kwargs: Any) -> int:
        return 2 * prod(x) * out_shape[-1]

    return {torch.ops.mkldnn._linear_pointwise: linear} if _ONEDNN else {}


def is_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this device and dtype are oneDNN's: new tensors, and memory kept for each shape."""
    return _ONEDNN and dtype == torch.float32 and device.type == "cpu"


def _by_onednn(a: Tensor) -> bool:
    return is_onednn(a.device, a.dtype) and a.numel() > 0


def matmul(
    a: Tensor,  # (n, k)
    b: Tensor,  # (k, m)
    *,
    plus: Tensor | None = None,  # (n, m)
    spend: bool = False,
) -> Tensor:
    """a @ b (+ plus), (n, m): a new tensor, or with `spend` perhaps plus itself.

    oneDNN copies a transposed view that stands on the left; on the right it costs nothing.
    """
    if not _by_onednn(a):
        if plus is None:
            return torch.mm(a, b)
        return torch.addmm(plus, a, b, out=plus) if spend else torch.addmm(plus, a, b)
    linear = torch.ops.mkldnn._linear_pointwise
    product: Tensor
    if plus is None:
        product = linear(a, b.t(), None, "none", [], "")
    else:
        product = linear.binary(a, plus, b.t(), None, "add")
    return product


def matmul_into(
    a: Tensor,  # (n, k)
    b: Tensor,  # (k, m)
    out: Tensor,  # (n, m), written
    *,
    add: bool = False,
) -> Tensor:
    """out = a @ b, or out += a @ b; returns out, which may be float32 for 16-bit a and b.

    On CUDA such a product is summed and kept in float32; the CPU has none and rounds it to 16 bits on the way.
    """
    wider = out.dtype != a.dtype
    if _by_onednn(a) or (wider and not a.is_cuda):
        product = matmul(a, b)
        return out.add_(product) if add else out.copy_(product)
    if wider:
        kind = out.dtype
        return torch.addmm(out, a, b, out_dtype=kind, out=out) if add else torch.mm(a, b, out_dtype=kind, out=out)
    return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
