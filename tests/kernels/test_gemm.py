"""Products of the plain-torch paths: the same numbers with and without oneDNN, for views, sums and empty matrices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash_graph.kernels import gemm

SHAPES = [(1, 1, 1), (5, 7, 3), (64, 33, 128), (130, 576, 257)]  # odd ones miss every vector width


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n, k, m", SHAPES)
def test_products_are_right(
    n: int, k: int, m: int, dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if onednn and not gemm._ONEDNN:
        pytest.skip("this torch has no oneDNN product")
    monkeypatch.setattr(gemm, "_ONEDNN", onednn)
    a, b, plus = (torch.randn(*shape, dtype=dtype) for shape in ((n, k), (k, m), (n, m)))
    exact = a.double() @ b.double()
    bound = 8 * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs() + plus.double().abs() + 1)
    variants = [(a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())]
    for left, right in variants:
        assert ((gemm.matmul(left, right).double() - exact).abs() <= bound).all()
        assert ((gemm.matmul(left, right, plus=plus).double() - exact - plus.double()).abs() <= bound).all()
        out = torch.full((n + 2, m), torch.nan, dtype=dtype)
        assert gemm.matmul_into(left, right, out[1:-1]).data_ptr() == out[1:-1].data_ptr()
        assert ((out[1:-1].double() - exact).abs() <= bound).all()
        assert out[0].isnan().all()
        assert out[-1].isnan().all()
        summed = plus.clone()
        gemm.matmul_into(left, right, summed, add=True)
        assert ((summed.double() - exact - plus.double()).abs() <= bound).all()


@pytest.mark.parametrize("n, k, m", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_matrices(n: int, k: int, m: int) -> None:
    plus = torch.randn(n, m)
    assert torch.equal(gemm.matmul(torch.ones(n, k), torch.ones(k, m)), torch.zeros(n, m) + (k and torch.full((), k)))
    assert torch.equal(gemm.matmul(torch.ones(n, k), torch.ones(k, m), plus=plus), plus + k)


def test_a_bad_row_stays_in_its_row() -> None:
    a = torch.randn(6, 32)
    a[2], a[4, 0] = torch.nan, torch.inf
    bad = ~gemm.matmul(a, torch.randn(32, 48), plus=torch.zeros(6, 48)).isfinite().all(1)
    assert bad.tolist() == [False, False, True, False, True, False]


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False, custom_mapping=gemm.flop_formulas()) as counter:
        gemm.matmul(torch.ones(5, 7), torch.ones(7, 3))
        gemm.matmul(torch.ones(5, 7), torch.ones(7, 3), plus=torch.ones(5, 3))
    assert counter.get_total_flops() == 2 * 2 * 5 * 7 * 3
