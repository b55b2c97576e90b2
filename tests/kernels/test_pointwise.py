"""Norms, rotary embedding, SwiGLU and the layers around them: each against plain definitions in float64 autograd.

liger-kernel's part is exercised through a stand-in that keeps its contract (in place, (B, H, L, E) arguments), and by
the tests marked gpu through the package itself.
"""

import importlib.util
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import layers
from dflash_graph.kernels.pointwise import Pointwise, choose

EPS = 1e-3  # large, so that a misplaced eps shows


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., heads, E) by definition: components j and j + E/2 turn together."""
    half = x.shape[-1] // 2
    c, s = cos[..., None, :half], sin[..., None, :half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def angles(rows: int, e: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, e // 2, dtype=torch.float64) * 2 * math.pi
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


class InPlaceRope:
    """liger-kernel's rope module as far as it is used: q (B, H, L, E) and k (B, Hk, L, E) in place."""

    calls = 0

    @classmethod
    def rope_forward(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        cls.calls += 1
        for x in (q, k):
            assert x.transpose(1, 2).is_contiguous(), "liger-kernel would turn a copy"
            assert cos.is_contiguous()
            assert cos.shape == (x.shape[0], x.shape[2], x.shape[3])
            x.copy_(turned(x.transpose(1, 2), cos, sin).transpose(1, 2))

    @classmethod
    def rope_backward(cls, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> None:
        cls.rope_forward(dq, dk, cos, -sin)


def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    dgate, dup = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
    # Through numpy, unseen by autograd's version counters, as Triton writes.
    gate.detach().numpy()[:], up.detach().numpy()[:] = dgate.numpy(), dup.numpy()
    return gate, up


IN_PLACE_SWIGLU = SimpleNamespace(
    swiglu_forward=lambda gate, up: (gate, up, swiglu(gate, up)), swiglu_backward=_swiglu_backward
)


def how(dtype: torch.dtype = torch.float64, **changes: Any) -> Pointwise:
    plain = choose("torch", eps=EPS, device="cpu", dtype=dtype)
    return Pointwise(**{**vars(plain), **changes})


WAYS = {"torch": how(), "in place": how(rope=InPlaceRope, swiglu=IN_PLACE_SWIGLU)}


def leaf(*shape: int) -> Tensor:
    """A weight with a gradient that is not zero, as after an earlier micro-step."""
    weight = (torch.randn(shape, dtype=torch.float64) + 0.5).requires_grad_()
    weight.grad = torch.ones_like(weight)
    return weight


def compare(ours: Callable[..., Any], truth: Callable[..., Any], inputs: list[Tensor], weights: list[Tensor]) -> None:
    """Values, gradients of the inputs, and what was added to the weights' gradients; to 1e-12 of each tensor."""
    inputs = [x.requires_grad_() for x in inputs]
    theirs = [x.detach().clone().requires_grad_() for x in (*inputs, *weights)]
    expected = truth(*theirs)
    found = ours(*inputs, *weights)
    expected, found = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (expected, found))
    grads = [torch.randn_like(x) for x in expected]
    truths = torch.autograd.grad(expected, theirs, grads)
    values = [x.detach().clone() for x in found]
    mine = torch.autograd.grad(found, inputs, [g.clone() for g in grads]) if inputs else ()
    if not inputs:
        torch.autograd.backward(found, grads)
    added = [w.grad - 1 for w in weights if w.grad is not None]
    for a, b in zip((*values, *mine, *added), (*expected, *truths), strict=True):
        assert a.shape == b.shape
        assert float((a - b).detach().norm()) <= 1e-12 * float(b.detach().norm()) + 1e-300


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 6), (1, 2), (4, 2, 1)], ids=str)
def test_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    compare(lambda x, w: layers.norm(x, w, how()), normed, [x], [leaf(shape[-1])])


def test_norm_of_zero_rows_is_finite() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    compare(lambda x, w: layers.norm(x, w, how()), normed, [x], [leaf(4)])


def test_project_and_its_sum_with_a_residual() -> None:
    x, residual = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    compare(layers.project, lambda x, w: x @ w.T, [x], [leaf(5, 6)])
    compare(layers.add_project, lambda r, x, w: r + x @ w.T, [residual, x], [leaf(5, 6)])


def test_features_get_no_gradient() -> None:
    x, w = torch.randn(7, 6, dtype=torch.float64), leaf(5, 6)
    out = layers.project(x, w)
    out.sum().backward()
    assert w.grad is not None
    assert torch.allclose(w.grad, 1 + x.sum(0).expand(5, 6))
    assert x.grad is None


def test_norm_project_with_rooms_and_a_residual() -> None:
    """Two calls that share one tensor of keys, and a residual that passes the second norm by."""
    context, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)

    def ours(c: Tensor, x: Tensor, nc: Tensor, nx: Tensor, wk: Tensor, wv: Tensor, wq: Tensor) -> tuple[Tensor, ...]:
        keys, values = layers.norm_project(c, nc, [wk, wv], how(), rooms=[4, 0])
        assert keys.shape == (10, 5)
        keys, q, carried = layers.norm_project(x, nx, [wk, wq], how(), behind=keys, carry=True)
        return keys, values, q, carried * 2

    def truth(c: Tensor, x: Tensor, nc: Tensor, nx: Tensor, wk: Tensor, wv: Tensor, wq: Tensor) -> tuple[Tensor, ...]:
        yc, yx = normed(c, nc), normed(x, nx)
        return torch.cat([yc, yx]) @ wk.T, yc @ wv.T, yx @ wq.T, x * 2

    compare(ours, truth, [context, x], [leaf(8), leaf(8), leaf(5, 8), leaf(3, 8), leaf(7, 8)])


def test_norm_project_of_frozen_rows() -> None:
    """Rows without a gradient (embeddings) give the weights theirs, and are carried on without one."""
    x = torch.randn(4, 8, dtype=torch.float64)

    def ours(n: Tensor, w: Tensor) -> Tensor:
        out, carried = layers.norm_project(x, n, [w], how(), carry=True)
        assert not carried.requires_grad
        return out

    compare(ours, lambda n, w: normed(x, n) @ w.T, [], [leaf(8), leaf(5, 8)])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_mlp(way: Pointwise) -> None:
    def truth(x: Tensor, n: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = normed(x, n)
        return x + swiglu(y @ gate.T, y @ up.T) @ down.T

    x = torch.randn(6, 8, dtype=torch.float64)
    weights = [leaf(8), leaf(5, 8), leaf(5, 8), leaf(8, 5)]
    compare(lambda *args: layers.mlp(*args, way), truth, [x], weights)


def test_a_second_backward_over_overwritten_values_is_refused() -> None:
    x, weights = torch.randn(6, 8, dtype=torch.float64), [leaf(8), leaf(5, 8), leaf(5, 8), leaf(8, 5)]
    out = layers.mlp(x.requires_grad_(), *weights, WAYS["in place"])
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_rotate_heads(way: Pointwise) -> None:
    t, n, e = 5, 6, 4
    q, k = torch.randn(n, 3, e, dtype=torch.float64), torch.randn(t + n, 2, e, dtype=torch.float64)
    cos, sin = angles(t + n, e)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        out = layers.rotate_heads(q * 1, k * 1, cos, sin, t, way)  # as a norm's results, which nobody keeps
        assert all(x.is_contiguous() for x in out)
        return out

    def truth(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        k = turned(k, cos, sin)
        return turned(q, cos[t:], sin[t:]), k[:t], k[t:]

    before = InPlaceRope.calls
    compare(ours, truth, [q, k], [])
    assert InPlaceRope.calls - before == (2 if way.rope else 0)


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_spread(skip: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(skip + 4 + 1, *shape, dtype=torch.float64)
    rows = [*range(skip), *(skip + a if k == 0 else skip + 4 for a in range(4) for k in range(3))]
    compare(lambda x: layers.spread(x, 3, skip), lambda x: x[rows], [x], [])


def test_gather_of_distinct_rows() -> None:
    rows = torch.tensor([4, 0, 3])
    compare(lambda x: layers.gather(x, rows), lambda x: x[rows], [torch.randn(6, 5, dtype=torch.float64)], [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_are_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    """Error against float64 of the same rounded inputs: at most twice that of torch's own functions in the dtype."""
    x, weight = torch.randn(64, 48).to(dtype), (torch.rand(48) + 0.5).to(dtype)
    grad = torch.randn(64, 48).to(dtype)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    exact = normed(*wide)
    exact_dx, exact_dw = torch.autograd.grad(exact, wide, grad.double())

    def error(found: Tensor, truth: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    stock = [t.clone().requires_grad_() for t in (x, weight)]
    theirs = torch.nn.functional.rms_norm(stock[0], (48,), stock[1], EPS)
    dx, dw = torch.autograd.grad(theirs, stock, grad)

    ours_x, ours_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    ours_w.grad_dtype = torch.float32
    ours_w.grad = torch.zeros(48)
    ours = layers.norm(ours_x, ours_w, how(dtype))
    ours.backward(grad)
    assert ours_x.grad is not None
    assert ours.dtype == ours_x.grad.dtype == dtype
    assert ours_w.grad.dtype == torch.float32
    assert error(ours, exact.detach()) <= 2 * error(theirs, exact.detach())
    assert error(ours_x.grad, exact_dx) <= 2 * error(dx, exact_dx)
    assert error(ours_w.grad, exact_dw) <= 2 * error(dw, exact_dw)


def test_choice() -> None:
    for kernels in (None, "torch"):
        plain = choose(kernels, eps=EPS, device="cpu", dtype=torch.bfloat16)
        assert (plain.fused_norm, plain.rope, plain.swiglu) == (False, None, None)
        assert plain.eps_tensor.dtype == torch.float32
    assert choose(None, eps=EPS, device="cpu", dtype=torch.float64).eps_tensor.dtype == torch.float64
    with pytest.raises(ValueError, match="must be one of"):
        choose("cuda", eps=EPS, device="cpu", dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_on_cuda_as_on_the_cpu(kernels: Any, dtype: torch.dtype) -> None:
    """A whole layer's passes: torch's fused norm and, where installed, liger-kernel, against float64 on the CPU."""
    n, d, f, h, hk, e, t = 96, 64, 160, 4, 2, 32, 40
    cos, sin = angles(t + n, e)
    tensors = {
        "x": torch.randn(n, d), "norm": torch.rand(d) + 0.5, "gate": torch.randn(f, d) / 8, "up": torch.randn(f, d) / 8,
        "down": torch.randn(d, f) / 12, "q": torch.randn(1, n, h, e), "k": torch.randn(t + n, hk, e),
        "head": torch.rand(e) + 0.5,
    }  # fmt: skip

    def run(device: str, kind: torch.dtype, kernels: Any) -> dict[str, Tensor]:
        way = choose(kernels, eps=EPS, device=device, dtype=kind)
        if kernels == "triton" and device == "cuda":
            assert (way.rope is not None) == (importlib.util.find_spec("liger_kernel") is not None)
        v = {name: tensor.to(dtype).to(device, kind).requires_grad_() for name, tensor in tensors.items()}
        for weight in v.values():
            if kind.itemsize == 2:
                weight.grad_dtype = torch.float32
            weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(kind, torch.float32))
        c, s = cos.to(dtype).to(device, kind), sin.to(dtype).to(device, kind)
        out = layers.mlp(v["x"], v["norm"], v["gate"], v["up"], v["down"], way)
        q, k = layers.norm(v["q"][0], v["head"], way), layers.norm(v["k"], v["head"], way)
        q, kc, kb = layers.rotate_heads(q, k, c, s, t, way)
        ((out**2).sum() + (q**3).sum() + (kc**3).sum() + 2 * (kb**3).sum()).backward()
        grads = {f"grad {name}": tensor.grad.detach() for name, tensor in v.items() if tensor.grad is not None}
        return {name: x.double().cpu() for name, x in {"out": out, "q": q, "kc": kc, "kb": kb, **grads}.items()}

    exact, found = run("cpu", torch.float64, "torch"), run("cuda", dtype, kernels)
    again = run("cuda", dtype, kernels)
    for name, truth in exact.items():
        error = float((found[name] - truth).norm() / truth.norm())
        assert error <= (2e-5 if dtype == torch.float32 else 2e-2), (name, error)
        assert torch.equal(found[name], again[name]), name
