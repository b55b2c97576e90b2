"""The loss's Triton kernels against dense float64: interpreted without a GPU, compiled with one.

Also what an interpreter cannot show by itself: warps that drift cannot hurt the narrowing in place (simulated over
bytes, and the barrier found in the compiled code), and the order of the programs does not matter.
"""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_graph.kernels.backend import interpreting
from dflash_graph.kernels.fused_lm_head_loss import NO_RANK

pytest.importorskip("triton", reason="Triton is not installed")
from dflash_graph.kernels import fused_lm_head_loss_triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = kernels._BLOCK
# NaN and infinite logits are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="permutes the interpreter's programs")


@dataclass
class Rows:
    """Raw logits in a scratch whose padding and whose rows that do not count are poisoned, and the dense truth."""

    scratch: Tensor  # (C, Vs) fp32
    vocab: int
    labels: Tensor
    counts: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    share: float = 1.0

    @property
    def logits(self) -> Tensor:
        return self.scratch[:, : self.vocab]

    def z(self) -> tuple[Tensor, Tensor]:
        """Logits in float64 and their slope by the raw ones."""
        z = self.logits.double()
        if self.bias is not None:
            z = z + self.bias.double()
        z = z * self.scale
        if self.cap is None:
            return z, torch.full_like(z, self.scale)
        return self.cap * torch.tanh(z / self.cap), self.scale / torch.cosh(z / self.cap) ** 2

    def run(self, *, grad: bool = True, rank: bool = True, narrow: torch.dtype | None = None) -> "Results":
        out = Results(self.scratch.clone(), self.vocab, narrow)
        rows = len(self.labels)
        out.nll, out.lse = torch.full((2, rows), float("nan"), device=DEVICE).unbind()
        out.rank = torch.full((rows,), -7, device=DEVICE)
        kernels.row_pass(
            out.scratch[:, : self.vocab], self.labels, self.counts, self.bias, out.nll, out.lse, out.rank,
            logit_scale=self.scale, soft_cap=self.cap, label_share=self.share,
            with_grad=grad, with_rank=rank, narrow=narrow,
        )  # fmt: skip
        return out


class Results:
    nll: Tensor
    lse: Tensor
    rank: Tensor

    def __init__(self, scratch: Tensor, vocab: int, narrow: torch.dtype | None) -> None:
        self.scratch, self.vocab, self.narrow = scratch, vocab, narrow

    @property
    def grad(self) -> Tensor:
        logits = self.scratch[:, : self.vocab]
        return logits if self.narrow is None else kernels.narrow_view(logits, self.narrow)

    def tensors(self) -> list[Tensor]:
        return [self.scratch.view(torch.int32), self.nll.view(torch.int32), self.lse.view(torch.int32), self.rank]


def make_rows(vocab: int, rows: int = 4, *, spread: float = 3.0, dead: int | None = 1) -> Rows:
    """Labels: the last row's lies in the last partial tile. Row `dead` does not count and is NaN; so is the padding."""
    scratch = torch.full((rows, -(-vocab // 16) * 16), float("nan"))
    scratch[:, :vocab] = torch.randn(rows, vocab) * spread
    labels = torch.randint(0, vocab, (rows,))
    labels[-1] = vocab - 1
    counts = torch.ones(rows, dtype=torch.bool)
    if dead is not None:
        counts[dead] = False
        scratch[dead] = float("nan")
    return Rows(scratch.to(DEVICE), vocab, labels.to(DEVICE), counts.to(DEVICE))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_matches(case: Rows, out: Results, *, grad: bool = True, rank: bool = True, digits: float = 1e-5) -> None:
    """Values of the rows that count; everything else is as it was, bit for bit."""
    z, slope = case.z()
    live = case.counts
    z_label = z.gather(1, case.labels[:, None])
    lse = torch.logsumexp(z, 1)
    others = z.scatter(1, case.labels[:, None], -torch.inf)
    # log(sum / e_label) without the cancellation of lse - z_label where the label has nearly all
    nll = torch.where(z_label[:, 0] > others.amax(1), torch.log1p((others - z_label).exp().sum(1)), lse - z_label[:, 0])
    torch.testing.assert_close(out.nll[live].double(), nll[live], rtol=digits, atol=1e-30)
    torch.testing.assert_close(out.lse[live].double(), lse[live], rtol=1e-6, atol=1e-6)
    assert not out.nll[~live].any()
    assert not out.lse[~live].any()
    assert bool((out.rank[~live] == NO_RANK).all())
    # Two logits that differ by rounding may swap places.
    near = 1e-6 * z.abs().amax(1, keepdim=True)
    least, most = (others > z_label + near).sum(1), (others > z_label - near).sum(1)
    seen = out.rank[live]
    if rank:
        assert bool(((least[live] <= seen) & (seen <= most[live])).all())
    else:
        right = seen == 0
        assert bool((right | (seen == NO_RANK)).all())
        assert bool((right | (most[live] > 0)).all())
        assert bool((~right | (least[live] == 0)).all())
    if not grad:
        assert torch.equal(bits(out.scratch), bits(case.scratch))
        return
    p = (z - lse[:, None]).exp()
    p_rest = (others - lse[:, None]).exp().sum(1, keepdim=True)
    label_term = torch.where(p_rest < 0.5, (1.0 - case.share) - p_rest, z_label.sub(lse[:, None]).exp() - case.share)
    truth = p.scatter(1, case.labels[:, None], label_term) * slope
    error = (out.grad.double() - truth)[live]
    if out.narrow is None:
        assert bool((error.norm(dim=1) <= digits * truth[live].norm(dim=1)).all())
        label_error = error.gather(1, case.labels[live, None]).abs()
        assert bool((label_error <= digits * truth[live].gather(1, case.labels[live, None]).abs() + 1e-30).all())
    written = torch.zeros(case.scratch.shape[1] * 4, dtype=torch.bool, device=DEVICE)
    written[: case.vocab * (4 if out.narrow is None else 2)] = True
    kept = ~written | ~live[:, None]
    assert torch.equal(bits(out.scratch)[kept], bits(case.scratch)[kept])


# Below, beside and above one tile; odd; two tiles exactly; a partial tile of one; a large odd vocabulary.
VOCABS = [1, 7, 17, 257, 1000, BLOCK, BLOCK + 1, 2 * BLOCK, 32001]


@pytest.mark.parametrize("vocab", VOCABS)
def test_statistics_and_gradient_equal_the_dense_ones(vocab: int) -> None:
    case = make_rows(vocab)
    assert_matches(case, case.run())


def test_the_largest_vocabulary() -> None:
    case = make_rows(151936, 2, dead=None)
    assert_matches(case, case.run(narrow=None))


OPTIONS = {
    "bias": {"bias": True},
    "negative scale": {"scale": -0.37},
    "cap": {"cap": 5.0},
    "wide cap": {"cap": 50.0},
    "half a label": {"share": 0.5},
    "no label": {"share": 0.0},
    "all": {"bias": True, "scale": 1.7, "cap": 4.0, "share": 0.7},
}


def with_options(case: Rows, options: dict[str, object]) -> Rows:
    fields = dict(options)
    if fields.pop("bias", False):
        case.bias = torch.randn(case.vocab).mul(2).to(DEVICE)
    for name, value in fields.items():
        setattr(case, name, value)
    return case


@pytest.mark.parametrize("vocab", [7, 2 * BLOCK + 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_bias_scale_cap_and_share_of_the_label(name: str, vocab: int) -> None:
    case = with_options(make_rows(vocab), OPTIONS[name])
    assert_matches(case, case.run())


@pytest.mark.parametrize("vocab", [7, BLOCK + 5])
@pytest.mark.parametrize("rank", [True, False])
def test_without_a_gradient_the_logits_stay(vocab: int, rank: bool) -> None:
    case = make_rows(vocab, 6)
    case.labels[0] = case.logits[0].argmax()
    assert_matches(case, case.run(grad=False, rank=rank), grad=False, rank=rank)


# Relative rounding of a store: to nearest, or (bfloat16 in the interpreter) truncated.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if interpreting() else 2.0**-8}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("vocab", [1, 7, 17, 257, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 1, 32001])
def test_narrowed_gradients_are_the_wide_ones_rounded(vocab: int, dtype: torch.dtype) -> None:
    case = with_options(make_rows(vocab), {"share": 0.8})
    wide, out = case.run(), case.run(narrow=dtype)
    assert_matches(case, out)
    live = case.counts
    error = (out.grad.float() - wide.grad).abs()[live]
    assert bool((error <= ROUNDING[dtype] * 1.001 * wide.grad[live].abs() + 2.0**-25).all())
    assert all(torch.equal(a, b) for a, b in zip(out.tensors()[1:], wide.tensors()[1:], strict=True))


def test_the_narrow_view_is_the_front_half_of_each_row() -> None:
    scratch = torch.zeros(3, 32)
    view = kernels.narrow_view(scratch[:, :21], torch.bfloat16)
    assert view.shape == (3, 21)
    assert view.stride() == (64, 1)
    view[1] = torch.arange(21)
    assert torch.equal(scratch.view(torch.bfloat16)[1, :21].float(), torch.arange(21.0))
    assert int(scratch.count_nonzero()) == 11, "the 21 values of one row fill 11 elements"


@pytest.mark.parametrize("cap", [None, 3.0])
def test_equal_logits_are_a_uniform_distribution_of_rank_zero(cap: float | None) -> None:
    case = make_rows(BLOCK + 7, 3, dead=None)
    case.scratch.fill_(1.37)
    case.cap = cap
    out = case.run()
    assert_matches(case, out)
    assert not out.rank.any()
    assert not case.run(rank=False).rank.any()


def test_large_logits_do_not_overflow() -> None:
    case = make_rows(BLOCK + 7, 6, dead=None)
    z = torch.rand(6, case.vocab) * 400 - 200
    z[0], z[1] = 200, -200
    z[2, 3], z[3, 5] = 200, -200
    case.logits.copy_(z)
    case.labels[:] = torch.tensor([0, 1, 3, 5, 7, case.vocab - 1])
    assert_matches(case, case.run(), digits=3e-5)  # a logit of 200 has 24 bits: exp keeps 1e-5


@pytest.mark.parametrize("lead", [10.0, 30.0, 60.0, 85.0])
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_a_nearly_certain_label_keeps_its_digits(lead: float, share: float) -> None:
    """1 - p is far below the rounding of p; nll and the label's gradient keep their relative precision."""
    case = make_rows(BLOCK + 7, 3, dead=None, spread=1.0)
    case.share = share
    case.logits.scatter_(1, case.labels[:, None], lead)
    out = case.run()
    assert_matches(case, out, digits=3e-5)
    assert bool((out.nll > 0).all())


def test_minus_infinity_is_probability_zero() -> None:
    case = make_rows(2 * BLOCK + 7, 4, dead=None)
    case.labels[:] = torch.tensor([0, 1, BLOCK, 2 * BLOCK + 6])
    case.logits[0, 5] = case.logits[1, 1:] = case.logits[2, :BLOCK] = -torch.inf  # one; all but one; a whole tile
    case.labels[1] = 0
    out = case.run()
    assert_matches(case, out)
    case.logits[3, case.labels[3]] = -torch.inf  # the label itself: an infinite loss with a finite gradient
    out = case.run()
    assert out.nll[3] == torch.inf
    assert bool(out.grad[3].isfinite().all())
    assert out.grad[3, case.labels[3]] == -1


@pytest.mark.parametrize("where", [0, 3, BLOCK + 2])  # the label, a full tile, the last tile
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_softmax_is_nan_and_has_no_rank_and_others_are_untouched(value: float, where: int) -> None:
    case = make_rows(BLOCK + 7, 3, dead=None)
    case.labels[1] = 0
    clean = case.run()
    case.logits[1, where] = value
    for rank in (True, False):
        out = case.run(rank=rank)
        assert bool(out.nll[1].isnan())
        assert bool(out.lse[1].isnan())
        assert out.rank[1] == NO_RANK
    out = case.run()
    assert bool(out.grad[1].isnan().any())
    for a, b in zip(out.tensors(), clean.tensors(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    case.logits[1] = -torch.inf
    assert bool(case.run().nll[1].isnan())


def test_no_rows_and_no_row_that_counts() -> None:
    case = make_rows(BLOCK + 7, 3)
    none = Rows(case.scratch[:0], case.vocab, case.labels[:0], case.counts[:0])
    assert none.run().nll.shape == (0,)
    case.counts.fill_(False)
    assert_matches(case, case.run())


def check_random_rows(data: st.DataObject) -> None:
    vocab = data.draw(st.one_of(st.integers(1, 40), st.integers(BLOCK - 3, BLOCK + 3), st.integers(1, 2 * BLOCK + 40)))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    rows, spread = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 1.0, 20.0]))
    case = make_rows(vocab, rows, spread=spread, dead=None)
    case.counts.copy_(torch.rand(len(case.counts)) < 0.8)
    options = {
        "bias": data.draw(st.booleans()),
        "scale": data.draw(st.sampled_from([1.0, 0.25, -1.5])),
        "cap": data.draw(st.sampled_from([None, 3.0, 30.0])),
        "share": data.draw(st.sampled_from([1.0, 0.0, 0.6])),
    }
    case = with_options(case, options)
    grad, rank = data.draw(st.booleans()), data.draw(st.booleans())
    narrow = data.draw(st.sampled_from([None, torch.float16])) if grad else None
    digits = 1e-5 + 4e-7 * float(case.z()[0].abs().max())
    out = case.run(grad=grad, rank=rank, narrow=narrow)
    assert_matches(case, out, grad=grad, rank=rank, digits=digits)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_rows(data: st.DataObject) -> None:
    check_random_rows(data)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_many_random_rows(data: st.DataObject) -> None:
    check_random_rows(data)


# --- offsets beyond 32 bits


# A stride that needs 64 bits itself, and one whose product with the row does.
@pytest.fixture(params=[(2, 2**31 + 16), (5, 2**29 + 16)], ids=["stride", "product"])
def far_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """(C, V) fp32 whose last row starts beyond element 2^31; only the touched pages exist."""
    rows, stride = request.param
    vocab = BLOCK + 7
    elements = (rows - 1) * stride + 2 * BLOCK
    if DEVICE == "cuda":
        return torch.zeros(elements, device=DEVICE).as_strided((rows, vocab), (stride, 1))
    if sys.platform != "linux":
        pytest.skip("maps 8 GiB of untouched memory in Linux's way")
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
    try:
        memory = mmap.mmap(-1, 4 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"cannot map {4 * elements / 2**30:.1f} GiB of untouched memory here: {error}")
    # The interpreter would copy every storage onto itself after a launch, and so touch all the mapped pages.
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided((rows, vocab), (stride, 1))


def ends_only(rows: int) -> Tensor:
    counts = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    counts[[0, -1]] = True
    return counts


@pytest.mark.parametrize("narrow", [None, torch.float16])
def test_rows_beyond_two_billion_elements(far_rows: Tensor, narrow: torch.dtype | None) -> None:
    rows, vocab = far_rows.shape
    near = with_options(make_rows(vocab, rows, dead=None), {"bias": True})
    near.counts = ends_only(rows)
    far_rows.copy_(near.logits)
    expected = near.run(narrow=narrow)
    nll, lse = torch.zeros(2, rows, device=DEVICE).unbind()
    rank = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    kernels.row_pass(
        far_rows, near.labels, near.counts, near.bias, nll, lse, rank,
        logit_scale=1.0, soft_cap=None, label_share=1.0, with_grad=True, with_rank=True, narrow=narrow,
    )  # fmt: skip
    grad = far_rows if narrow is None else kernels.narrow_view(far_rows, narrow)
    assert torch.equal(grad[[0, -1]], expected.grad[[0, -1]])
    assert torch.equal(nll, expected.nll)
    assert torch.equal(rank, expected.rank)


@pytest.mark.parametrize("narrow", [None, torch.float16])
def test_teacher_rows_beyond_two_billion_elements(far_rows: Tensor, narrow: torch.dtype | None) -> None:
    rows = far_rows.shape[0]
    far_rows.copy_(torch.randn(far_rows.shape))
    truth = far_rows[[0, -1]].double().softmax(1)
    entropy = torch.zeros(rows, device=DEVICE)
    argmax = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    kernels.teacher_pass(
        far_rows, ends_only(rows), None, entropy, argmax, None, logit_scale=1.0, with_probabilities=True, narrow=narrow
    )
    p = far_rows if narrow is None else kernels.narrow_view(far_rows, narrow)
    torch.testing.assert_close(p[[0, -1]].double(), truth, rtol=1e-5 if narrow is None else 2.0**-10, atol=1e-7)
    assert torch.equal(argmax[[0, -1]], truth.argmax(1))


# --- the other kernels


@dataclass
class KlCase:
    hidden: Tensor
    mean: Tensor
    entropy: Tensor
    bias_mean: Tensor | None
    rows: Tensor
    lse: Tensor
    counts: Tensor
    grad: Tensor

    def run(self, *, with_grad: bool = True) -> tuple[Tensor, Tensor]:
        grad, kl = self.grad.clone(), torch.full_like(self.lse, float("nan"))
        kernels.kl_pass(
            self.hidden, self.mean, self.entropy, self.bias_mean, self.rows, self.lse, self.counts, grad, grad, kl,
            logit_scale=1.3, kl_weight=0.4, with_grad=with_grad,
        )  # fmt: skip
        return grad, kl


def make_kl(size: int, dtype: torch.dtype = torch.float32, *, bias: bool = False, rows: int = 5) -> KlCase:
    positions = 3
    case = KlCase(
        torch.randn(rows, size).to(dtype), torch.randn(positions, size), torch.rand(positions),
        torch.randn(positions) if bias else None, torch.randint(0, positions, (rows,)), torch.rand(rows) * 10,
        torch.ones(rows, dtype=torch.bool), torch.randn(rows, size).to(dtype),
    )  # fmt: skip
    case.counts[1] = False
    case.rows[1] = 2**40  # of a row that does not count: never used
    case.hidden[1] = case.grad[1] = float("nan")
    case.lse[1] = float("nan")
    return KlCase(**{name: None if value is None else value.to(DEVICE) for name, value in vars(case).items()})


def test_kl_gradient_in_16_bits_rounds_once() -> None:
    """Target and drafter nearly agree: the difference of product and mean keeps its digits."""
    case = make_kl(576, torch.float16)
    live, u = case.counts, case.rows[case.counts]
    product = torch.zeros(case.grad.shape, device=DEVICE)
    product[live] = 0.52 * case.mean[u] + 1e-3 * torch.randn(int(live.sum()), 576, device=DEVICE)
    grad, kl = torch.full_like(case.grad, float("nan")), torch.empty_like(case.lse)
    kernels.kl_pass(
        case.hidden, case.mean, case.entropy, None, case.rows, case.lse, case.counts, product, grad, kl,
        logit_scale=1.3, kl_weight=0.4, with_grad=True,
    )  # fmt: skip
    truth = product[live].double() - 0.4 * 1.3 * case.mean[u].double()
    error = (grad[live].double() - truth).norm() / truth.norm()
    rounded = product.half()[live].double() - 0.4 * 1.3 * case.mean[u].double()
    assert error < 1e-3
    assert (rounded - truth).norm() / truth.norm() > 0.05  # what a 16-bit product would have cost
    assert grad[~live].isnan().all()


@pytest.mark.parametrize("size", [1, 12, 576, BLOCK, 2 * BLOCK + 16])
@pytest.mark.parametrize("bias", [False, True])
def test_kl_and_its_gradient_equal_the_dense_ones(size: int, bias: bool) -> None:
    case = make_kl(size, bias=bias)
    grad, kl = case.run()
    live, u = case.counts, case.rows[case.counts]
    dot = (case.hidden.double()[live] * case.mean.double()[u]).sum(1)
    if case.bias_mean is not None:
        dot += case.bias_mean.double()[u]
    torch.testing.assert_close(
        kl[live].double(), case.lse[live].double() - 1.3 * dot - case.entropy[u].double(), rtol=1e-5, atol=3e-5
    )
    torch.testing.assert_close(
        grad[live].double(), case.grad[live].double() - 0.4 * 1.3 * case.mean[u].double(), rtol=1e-6, atol=1e-6
    )
    assert kl[1] == 0
    assert torch.equal(bits(grad[1]), bits(case.grad[1]))
    still, again = case.run(with_grad=False)
    assert torch.equal(bits(still), bits(case.grad))
    assert torch.equal(again, kl)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_kl_in_16_bits(dtype: torch.dtype) -> None:
    case = make_kl(576, dtype)
    wide = make_kl(1)  # same layout, other dtype: the same numbers in 32 bits
    wide.__dict__.update({**vars(case), "hidden": case.hidden.float(), "grad": case.grad.float()})
    (grad, kl), (wide_grad, wide_kl) = case.run(), wide.run()
    assert torch.equal(kl, wide_kl)
    live = case.counts
    error = (grad.float() - wide_grad).abs()[live]
    assert bool((error <= ROUNDING[dtype] * 1.001 * wide_grad[live].abs() + 2.0**-25).all())


def run_reduce(nll: Tensor, kl: Tensor | None, weights: Tensor, kl_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    loss, total = torch.full((2,), float("nan"), device=DEVICE).unbind()
    kernels.reduce(nll, kl, weights, loss, total, kl_weight=kl_weight)
    return loss, total


@pytest.mark.parametrize("rows", [0, 1, 7, 4095, 4096, 4097, 3 * 4096 + 5])
@pytest.mark.parametrize("with_kl", [False, True])
def test_the_sum_selects_rows_of_weight_zero_away(rows: int, with_kl: bool) -> None:
    nll, kl, weights = (torch.rand(rows).to(DEVICE) * 10 for _ in range(3))
    truth = 0.7 * nll.double() + 0.3 * kl.double() if with_kl else nll.double()
    weights[::3] = 0
    truth = (truth * weights.double()).sum()
    nll[::3], kl[::6] = float("nan"), float("inf")
    share = 0.3 if with_kl else 0.0
    loss, total = run_reduce(nll, kl if with_kl else None, weights, share)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), weights.double().sum(), rtol=1e-6, atol=0)
    again = run_reduce(nll, kl if with_kl else None, weights, share)
    assert torch.equal(torch.stack(again), torch.stack((loss, total)))


def test_a_nan_that_counts_shows_in_the_sum() -> None:
    nll = torch.tensor([1.0, float("nan")], device=DEVICE)
    assert bool(run_reduce(nll, None, torch.ones(2, device=DEVICE))[0].isnan())


@pytest.mark.parametrize("size", [1, 12, 576, BLOCK + 16])
@pytest.mark.parametrize("dtype", [torch.float32, *ROUNDING])
def test_scaled_rows(size: int, dtype: torch.dtype) -> None:
    grad = torch.randn(5, size).to(dtype).to(DEVICE)
    weights = torch.tensor([0.5, 0.0, 3.0, 0.0, -1.0], device=DEVICE)
    upstream = torch.tensor(-2.5, device=DEVICE)
    truth = grad.double() * (weights * upstream).double()[:, None]
    grad[1] = float("nan")
    grad[3] = float("inf")
    out = torch.full_like(grad, 7)
    kernels.scale_rows(grad, weights, upstream, out)
    rounding = ROUNDING.get(dtype, 2.0**-22)
    assert bool(((out.double() - truth).abs() <= rounding * 1.001 * truth.abs() + 2.0**-25).all())
    assert not out[weights == 0].any()
    kernels.scale_rows(grad, weights, upstream, grad)
    assert torch.equal(grad, out)


# --- races


@needs_interpreter
@pytest.mark.parametrize("narrow", [None, torch.float16, torch.bfloat16])
def test_the_order_of_the_programs_does_not_matter(narrow: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    rows = 6
    case = make_rows(2 * BLOCK + 7, rows)
    kl_case = make_kl(BLOCK + 16, rows=rows)
    scaled = torch.randn(rows, 40).to(DEVICE)
    weights = torch.rand(rows).to(DEVICE)

    def everything() -> list[Tensor]:
        results = case.run(narrow=narrow).tensors() + list(kl_case.run())
        logits = case.scratch.clone()
        outs = [torch.zeros(rows, dtype=torch.float32 if i == 0 else torch.int64) for i in range(2)]
        kernels.teacher_pass(
            logits[:, : case.vocab], case.counts, None, *outs, None,
            logit_scale=1.0, with_probabilities=True, narrow=narrow,
        )  # fmt: skip
        inside = scaled.clone()
        kernels.scale_rows(inside, weights, torch.tensor(2.0), inside)
        return [bits(t) for t in (*results, logits, *outs, inside)]

    expected = everything()
    place = interpreter_builder.set_grid_idx
    orders = [list(range(rows))[::-1], [3, 0, 5, 1, 4, 2], [1, 3, 5, 0, 2, 4]]
    visited: list[int] = []
    for order in orders:

        def permuted(x: int, y: int, z: int, order: list[int] = order) -> None:
            visited.append(order[x])
            place(order[x], y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", permuted)
        assert all(torch.equal(a, b) for a, b in zip(everything(), expected, strict=True))
    assert visited[:rows] == orders[0], "the orders were really used"


def narrowed(x: np.ndarray) -> np.ndarray:
    return (0.5 * x + 1).astype(np.float16)


def drift(vocab: int, block: int, warps: int, seed: int, *, barrier: str) -> bool:
    """Narrow one fp32 row in place with warps in a random interleaving; True if the result is the sequential one.

    Every warp owns a part of each tile, which it loads in two halves, narrows and stores in two halves, as the kernels
    do. `barrier` is where it waits for the others in each tile: "before" the store, "after" it, or "nowhere".
    """
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(vocab).astype(np.float32)
    memory = row.copy().view(np.uint8)
    expected = np.concatenate([narrowed(row).view(np.uint8), memory[2 * vocab :]])

    def warp(index: int) -> Iterator[str]:
        for start in range(0, vocab, block):
            own = start + index * (block // warps) + np.arange(block // warps)
            halves = [part[part < vocab] for part in np.array_split(own, 2)]
            values = []
            for part in halves:
                values.append(memory.view(np.float32)[part])
                yield "load"
            if barrier == "before":
                yield "barrier"
            for part, value in zip(halves, values, strict=True):
                memory.view(np.float16)[part] = narrowed(value)
                yield "store"
            if barrier == "after":
                yield "barrier"

    running = dict(enumerate(warp(i) for i in range(warps)))
    waiting: dict[int, Iterator[str]] = {}
    eager = rng.random(warps) ** 4 + 1e-3  # some warps run far ahead
    while running or waiting:
        if not running:
            running, waiting = waiting, {}
        names = list(running)
        name = int(rng.choice(names, p=eager[names] / eager[names].sum()))
        step = next(running[name], None)
        if step is None:
            del running[name]
        elif step == "barrier":
            waiting[name] = running.pop(name)
    return bool(np.array_equal(memory, expected))


SHAPES = [(3, 16, 4), (16, 16, 2), (77, 16, 4), (96, 32, 8), (130, 16, 2)]  # one tile, whole tiles, a partial last one


@pytest.mark.parametrize("vocab, block, warps", SHAPES)
def test_drifting_warps_cannot_hurt_the_narrowing(vocab: int, block: int, warps: int) -> None:
    assert all(drift(vocab, block, warps, seed, barrier="before") for seed in range(60))


@pytest.mark.parametrize("barrier", ["nowhere", "after"])
@pytest.mark.parametrize("vocab, block, warps", SHAPES[1:])
def test_without_the_barrier_drifting_warps_do_hurt(vocab: int, block: int, warps: int, barrier: str) -> None:
    assert not all(drift(vocab, block, warps, seed, barrier=barrier) for seed in range(60))


PROBE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dflash_graph.kernels import fused_lm_head_loss_triton as kernels

found = {}
for case in kernels.compile_cases():
    if case.name not in NAMES:
        continue
    names = case.kernel.arg_names
    source = ASTSource(
        case.kernel,
        {name: case.signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in case.constexprs.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    steps = re.findall(r"(ld|st)\\.global\\.(\\S+)|(bar)\\.sync", ptx)
    found[case.name] = [" ".join(filter(None, step)) for step in steps]
print(json.dumps(found))
"""


def test_the_compiled_code_waits_between_the_load_and_the_store_of_each_tile() -> None:
    """In the order of the code: after the first pass, every wide load or tail meets a barrier before its store."""
    names = ["loss_row_bf16", "loss_row_fp32", "loss_teacher_bf16"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", f"NAMES = {names!r}\n{PROBE}"],
        env=env, cwd=Path(kernels.__file__).parents[2], capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert sorted(found) == sorted(names)
    for name, steps in found.items():
        # The main loop stores 128 bits; the tail (an odd vocabulary) single numbers of the gradient's type.
        wide = [i for i, step in enumerate(steps) if step == "st v4.b32"]
        assert wide, name
        loop_start = next(i for i in range(wide[0], 0, -1) if steps[i] == "bar")
        assert steps[loop_start - 2 : loop_start] == ["ld v4.b32", "ld v4.b32"], name
        assert set(steps[loop_start + 1 : wide[-1] + 1]) == {"st v4.b32"}, name
        tail = steps[wide[-1] + 1 :]
        assert tail[:17] == ["ld b32"] * 8 + ["bar"] + [tail[9]] * 8, name
        assert tail[9] in ("st b16", "st b32"), name


def test_compile_cases_name_every_argument_of_every_kernel_once() -> None:
    cases = kernels.compile_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert sorted([*case.signature, *case.constexprs]) == sorted(case.kernel.arg_names), case.name
        assert set(case.divisible) <= set(case.signature), case.name
    launched = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {case.kernel.__name__ for case in cases} == launched
