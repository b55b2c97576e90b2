"""RMSNorm, rotary embedding and SwiGLU, forward and backward, as few passes over their rows as the libraries allow.

No kernel is written here: plain torch, torch's fused RMSNorm on CUDA, and liger-kernel's rotary embedding and SwiGLU on
CUDA where that package is installed. Nothing here syncs or allocates by the data. These are the passes alone;
`layers.py` joins them with the matrix products and with autograd.

What was chosen on CUDA, counted in kernels, and in bytes as reads and writes of one tensor of the rows:
    RMSNorm   torch: 1 kernel forward, 2 to 3 backward. liger-kernel: 1, and 4 with the copy that keeps the incoming
              gradient, the reduction of its partial weight gradients and its cast; a program for each row even where a
              row is a head of 64. torch it is.
    rotary    torch: 3 kernels for each of q and k, 5 units each. liger-kernel: 1 kernel for both, in place, 2 units; it
              takes q and k of the same positions only, so the context's keys, which have no queries, stay with torch.
    SwiGLU    torch: 2 kernels forward (5 units), 3 backward (8). liger-kernel: 1 (3 units) and 1 (5), in place.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_graph.kernels.backend import Implementation, choose_implementation


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointwise:
    """Which implementations run; made once by `choose`.

    Attributes:
        eps: of every RMSNorm. eps_tensor: the same, () on the device, in the dtype that plain torch computes in:
            float32, or float64 for float64 rows.
        fused_norm: torch's fused RMSNorm, which exists on CUDA.
        rope, swiglu: liger-kernel's modules of that name, or None for plain torch.
    """

    eps: float
    eps_tensor: Tensor
    fused_norm: bool = False
    rope: Any = None
    swiglu: Any = None


def choose(kernels: Implementation | None, *, eps: float, device: torch.device | str, dtype: torch.dtype) -> Pointwise:
    """The implementations for a device and dtype; "torch" keeps liger-kernel out, None and "triton" use it on CUDA.

    Args:
        eps: of every RMSNorm.

    Raises:
        ValueError: "triton" was asked for where Triton cannot run.
    """
    device = torch.device(device)
    triton = choose_implementation(kernels, device, dtype) == "triton" and device.type == "cuda"
    liger = triton and importlib.util.find_spec("liger_kernel") is not None
    return Pointwise(
        eps=eps,
        eps_tensor=torch.tensor(eps, dtype=torch.promote_types(dtype, torch.float32), device=device),
        fused_norm=device.type == "cuda",
        rope=importlib.import_module("liger_kernel.ops.rope") if liger else None,
        swiglu=importlib.import_module("liger_kernel.ops.swiglu") if liger else None,
    )


def grad_of(weight: Tensor) -> Tensor:
    """weight.grad, which backward passes add to.

    Raises:
        RuntimeError: it is None.
    """
    if weight.grad is None:
        raise RuntimeError(
            "a drafter's gradients are views of flat buffers and must stay bound; found .grad None. Zero them with "
            "FlatParameters.zero_grads(), not with zero_grad(set_to_none=True)"
        )
    return weight.grad


# ---- RMSNorm: y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) -----------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, how: Pointwise) -> tuple[Tensor, Tensor]:
    """(y (..., n), rstd (..., 1)) of x (..., n), normalised over the last dimension; 16-bit rows compute in float32."""
    if how.fused_norm:
        y, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, how.eps)
        return y, rstd
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=how.eps_tensor.dtype)
    rstd = torch.addcmul(how.eps_tensor, root, root, value=1 / x.shape[-1]).rsqrt_()
    return (x * rstd).mul_(weight).to(x.dtype), rstd


def rms_norm_again(x: Tensor, rstd: Tensor, weight: Tensor, how: Pointwise) -> tuple[Tensor, Tensor | None]:
    """y once more, for a backward that did not keep it, and x * rstd where that is made on the way."""
    if how.fused_norm:
        return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, how.eps)[0], None
    unit = x * rstd
    return (unit * weight).to(x.dtype), unit


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    how: Pointwise,
    *,
    unit: Tensor | None = None,
    plus: Tensor | None = None,
    need_dx: bool = True,
) -> Tensor | None:
    """Gradient of x (..., n) for `grad` of y, None if not needed; that of the weight is added to `weight.grad`.

    With u = x rstd: dx = rstd (grad w - u mean(grad w u)), dw = sum over rows of grad u. `grad` is left as it is.

    Args:
        unit: u, if the caller has it.
        plus: (..., n) added to the result, the gradient of a residual that passes the norm by.
    """
    need_dw = weight.requires_grad
    if how.fused_norm:
        dx, dw = torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, rstd, weight, [need_dx, need_dw])
        if need_dw:
            grad_of(weight).add_(dw)
        if not need_dx:
            return None
        fused: Tensor = dx if plus is None else dx.add_(plus)
        return fused
    size, wide = x.shape[-1], rstd.dtype
    grad, scale = grad.to(wide), weight.to(wide)
    product = (grad * x).view(-1, size)
    if need_dw:
        grad_of(weight).addmv_(product.t(), rstd.view(-1))
    if not need_dx:
        return None
    # Matrix-vector products read the rows once, where a product and its sum would also write them.
    mean = torch.mv(product, scale).view_as(rstd).mul_(rstd)
    if unit is None:
        unit = x * rstd
    inner = (grad * scale).addcmul_(unit, mean, value=-1 / size)
    return (inner.mul_(rstd) if plus is None else torch.addcmul(plus, inner, rstd)).to(x.dtype)


# ---- rotary embedding in the rotate-half form -----------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x (..., heads, E) turned by the angles of its positions; the gradient is the same turn `back`.

    Args:
        cos, sin: (..., E), the same in both halves.
    """
    half, sign = x.shape[-1] // 2, -1 if back else 1
    cos, sin = cos.unsqueeze(-2), sin[..., :half].unsqueeze(-2)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, how: Pointwise, *, back: bool = False) -> None:
    """Turn q (n, H, E) and k (n, Hk, E), contiguous, in place by liger-kernel; cos, sin: (n, E)."""
    turn = how.rope.rope_backward if back else how.rope.rope_forward
    # It wants (B, H, L, E) and transposes that back: no copy. It launches on the current device, whatever its tensors'.
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        turn(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])


# ---- SwiGLU: silu(gate) * up ----------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor, how: Pointwise) -> Tensor:
    """silu(gate) * up; all (rows, F), contiguous."""
    if how.swiglu is not None:
        with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
            out: Tensor = how.swiglu.swiglu_forward(gate, up)[2]
        return out
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, how: Pointwise) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) * up, gradient of gate, gradient of up), all (rows, F), in the memory of grad, gate and up.

    One temporary of their size. All three are overwritten, so autograd refuses a second backward over them.
    """
    if how.swiglu is not None:
        out = swiglu(gate, up, how)
        with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
            dgate, dup = how.swiglu.swiglu_backward(gate, up, grad)
        torch.autograd.graph.increment_version((gate, up))  # liger-kernel writes past autograd's back
        return out, dgate, dup
    dgate = grad * up
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    act = torch.nn.functional.silu(gate, inplace=True)
    return up.mul_(act), dgate, grad.mul_(act)
