"""Small kernels with known faults: what `bench.kernel_table` must refuse, and one that it must accept.

Compiled in a process without TRITON_INTERPRET; the tests never import this module.
"""

import triton
import triton.language as tl

from dflash_graph.kernels.backend import CompileCase


@triton.jit
def _subtract_max(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf"))
    tl.store(y_ptr + offs, x - tl.max(x, 0), mask=offs < n)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, depth, BLOCK: tl.constexpr, DEPTH: tl.constexpr, CORES: tl.constexpr):  # type: ignore[no-untyped-def]
    offs, offs_k = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(a_ptr + offs[:, None] * depth + k + offs_k[None, :])
        b = tl.load(b_ptr + offs[:, None] * depth + k + offs_k[None, :])
        if CORES:
            total = tl.dot(a, tl.trans(b), total)
        else:
            total += tl.sum(a[:, None, :].to(tl.float32) * b[None, :, :].to(tl.float32), 2)
    tl.store(c_ptr + offs[:, None] * BLOCK + offs[None, :], total)


@triton.jit
def _wrong(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros([2 * BLOCK], tl.float32))


def _vector(name: str, block: int, *, aligned: bool = True, may_spill: bool = False) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=_subtract_max,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"},
        constexprs={"BLOCK": block},
        divisible=("x_ptr", "y_ptr", "n") if aligned else (),
        num_warps=4,
        num_stages=1,
        may_spill=may_spill,
    )


def _matrix(name: str, block: int, depth: int, stages: int, *, cores: bool) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=_product,
        signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "depth": "i32"},
        constexprs={"BLOCK": block, "DEPTH": depth, "CORES": cores},
        divisible=("a_ptr", "b_ptr", "c_ptr", "depth"),
        num_warps=8,
        num_stages=stages,
        tensor_cores=True,
    )


def compile_cases() -> list[CompileCase]:
    return [
        _vector("sound_vector", 2048),
        _matrix("sound_product", 64, 64, 2, cores=True),
        _vector("spilling", 32768),
        _vector("allowed_to_spill", 32768, may_spill=True),
        _vector("unaligned", 2048, aligned=False),
        _matrix("off_the_tensor_cores", 16, 16, 1, cores=False),
        _matrix("too_much_shared_memory", 256, 128, 4, cores=True),
        CompileCase(
            name="wrong_shapes", kernel=_wrong, signature={"x_ptr": "*fp32"}, constexprs={"BLOCK": 128},
            divisible=("x_ptr",), num_warps=4, num_stages=1,
        ),
    ]  # fmt: skip
