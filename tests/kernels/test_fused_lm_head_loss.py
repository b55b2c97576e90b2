"""The fused loss against a dense float64 one: values, gradients, rows that do not count, memory and refusals.

Chunks of 8 rows and tiles of 16 columns, so that every shape below has several, the last ones partial. Options (bias,
soft-cap, D-PACE, KL) have a file of their own, `test_loss_options.py`; `test_loss_limits.py` has large shapes.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dflash_graph.kernels import gemm
from dflash_graph.kernels.backend import Implementation, in_the_open
from dflash_graph.kernels.fused_lm_head_loss import (
    IGNORE_INDEX,
    NO_RANK,
    LmHeadLossWorkspace,
    check_labels,
    choose_chunk_rows,
    fused_lm_head_loss,
    make_workspace,
)

D = 12


def workspace_for(
    rows: int,
    vocab: int,
    dtype: torch.dtype = torch.float64,
    *,
    chunk: int = 8,
    tile: int | None = 16,
    implementation: Implementation = "torch",
) -> LmHeadLossWorkspace:
    return make_workspace(
        num_rows=rows,
        hidden_size=D,
        vocab_size=vocab,
        dtype=dtype,
        device="cpu",
        chunk_rows=chunk,
        tile_columns=tile if implementation == "torch" else None,
        implementation=implementation,
    )


def make_case(rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, D, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, D, dtype=torch.float64).to(dtype)
    return hidden, head, torch.randint(0, vocab, (rows,)), torch.rand(rows) + 0.1


class Truth:
    """Dense, float64, written from the formula; rows in `keep` count."""

    def __init__(self, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, keep: Tensor) -> None:
        x, w = hidden.detach().double(), weights.double()
        self.nll, self.lse = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
        self.grad, self.rank = torch.zeros_like(x), torch.full((len(x),), NO_RANK)
        self.loss = self.weight_sum = 0.0
        for i in keep.nonzero().flatten().tolist():
            z, y = head.double() @ x[i], int(labels[i])
            self.lse[i] = torch.logsumexp(z, 0)
            self.nll[i] = self.lse[i] - z[y]
            self.grad[i] = w[i] * ((z - self.lse[i]).exp() @ head.double() - head[y].double())
            self.rank[i] = int((z > z[y]).sum())
            self.loss += float(w[i] * self.nll[i])
            self.weight_sum += float(w[i])


def assert_matches(loss: Tensor, hidden: Tensor, ws: LmHeadLossWorkspace, truth: Truth, tolerance: float) -> None:
    rows = hidden.shape[0]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss.detach().double(), torch.tensor(truth.loss, dtype=torch.float64), **close)
    torch.testing.assert_close(ws.weight_sum.double(), torch.tensor(truth.weight_sum, dtype=torch.float64), **close)
    torch.testing.assert_close(ws.nll[:rows].double(), truth.nll, **close)
    torch.testing.assert_close(ws.logsumexp[:rows].double(), truth.lse, **close)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), truth.grad, **close)


@pytest.mark.parametrize("vocab", [7, 17, 257, 1000])  # below, beside and far above the chunk of 8 rows
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 20])  # nothing, one, and around one chunk
def test_loss_statistics_and_gradient_equal_the_dense_ones(rows: int, vocab: int) -> None:
    hidden, head, labels, weights = make_case(rows, vocab)
    ws = workspace_for(rows, vocab)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=True)
    (loss * 2.5).backward()
    truth = Truth(hidden, head, labels, weights, torch.ones(rows, dtype=torch.bool))
    assert hidden.grad is not None
    hidden.grad /= 2.5
    assert_matches(loss, hidden, ws, truth, 1e-11)
    assert torch.equal(ws.label_rank, truth.rank)


def test_argmax_accuracy_is_available_without_ranks() -> None:
    hidden, head, labels, weights = make_case(64, 7)
    ws = workspace_for(64, 7)
    fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    truth = Truth(hidden, head, labels, weights, torch.ones(64, dtype=torch.bool))
    assert torch.equal(ws.label_rank == 0, truth.rank == 0)
    assert set(ws.label_rank.tolist()) == {0, NO_RANK}


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("on_host", [True, False])  # False is what a device that must not sync runs
@pytest.mark.parametrize("live", [0, 1, 8, 13, 20])
def test_rows_beyond_the_live_ones_do_not_count(live: int, on_host: bool, as_tensor: bool) -> None:
    hidden, head, labels, weights = make_case(20, 17)
    with torch.no_grad():
        hidden[live:] = float("nan")
    ws = workspace_for(20, 17)
    ws.host_reads = ws.skips_dead_chunks = on_host
    count = torch.tensor(live) if as_tensor else live
    loss = fused_lm_head_loss(hidden, head, labels, weights, count, workspace=ws, with_rank=True)
    loss.backward()
    truth = Truth(hidden, head, labels, weights, torch.arange(20) < live)
    assert_matches(loss, hidden, ws, truth, 1e-11)
    assert torch.equal(ws.label_rank, truth.rank)


@pytest.mark.parametrize("label", [IGNORE_INDEX, -1, 17, -(2**40), 2**40])
def test_labels_outside_the_head_are_neither_read_nor_counted(label: int) -> None:
    hidden, head, labels, weights = make_case(11, 17)
    labels[3] = labels[10] = label
    with torch.no_grad():
        hidden[3] = float("nan")
    ws = workspace_for(11, 17)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=True)
    loss.backward()
    keep = torch.ones(11, dtype=torch.bool)
    keep[3] = keep[10] = False
    assert_matches(loss, hidden, ws, Truth(hidden, head, labels, weights, keep), 1e-11)
    assert ws.label_rank[3] == NO_RANK


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e300])
def test_a_poisoned_row_of_weight_zero_changes_nothing(poison: float) -> None:
    hidden, head, labels, weights = make_case(20, 17)
    weights[4] = weights[11] = 0.0
    results = []
    for value in (0.0, poison):
        with torch.no_grad():
            hidden[4] = hidden[11] = value
        hidden.grad = None
        ws = workspace_for(20, 17)
        loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=True)
        loss.backward()
        assert hidden.grad is not None
        results.append([loss.detach(), hidden.grad, ws.nll, ws.logsumexp, ws.label_rank, ws.weight_sum])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    assert not results[1][1][4].any()


def test_nothing_counts_and_one_row_counts() -> None:
    for kept in ([], [12]):
        hidden, head, labels, weights = make_case(20, 17)
        keep = torch.zeros(20, dtype=torch.bool)
        keep[kept] = True
        labels[~keep] = IGNORE_INDEX
        ws = workspace_for(20, 17)
        loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
        loss.backward()
        assert_matches(loss, hidden, ws, Truth(hidden, head, labels, weights, keep), 1e-11)


def test_a_live_row_of_nan_is_loud_and_never_counted_as_right() -> None:
    hidden, head, labels, weights = make_case(9, 17)
    with torch.no_grad():
        hidden[2] = float("nan")
    for with_rank in (False, True):
        ws = workspace_for(9, 17)
        assert fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=with_rank).isnan()
        assert ws.label_rank[2] == NO_RANK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_logits_and_extreme_logits(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    hidden, head, labels, weights = make_case(6, 17, dtype)
    with torch.no_grad():
        hidden[0] = 0.0  # all logits equal: nll = log V, rank 0
        for i, sign in (
            (1, 1.0),
            (2, -1.0),
        ):  # the label's logit at +200 and -200: p -> 1, p -> 0 below float32's range
            hidden[i] = sign * 200 * head[labels[i]] / head[labels[i]].square().sum()
    ws = workspace_for(6, 17, dtype)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=True)
    loss.backward()
    truth = Truth(hidden, head, labels, weights, torch.ones(6, dtype=torch.bool))
    assert truth.nll[2] > 100
    assert_matches(loss, hidden, ws, truth, tolerance)
    assert ws.label_rank[0] == 0


def test_confident_rows_keep_relative_accuracy_in_float32() -> None:
    """1 - p is computed from the other columns, so tiny losses and gradients are not rounded to zero."""
    head = torch.eye(D)[:, :]
    hidden = torch.zeros(1, D)
    hidden[0, 3] = 19.0  # nll = log1p(11 e^-19), about 6e-8: below half an ulp of 1
    hidden.requires_grad_()
    labels, weights = torch.tensor([3]), torch.ones(1)
    ws = workspace_for(1, D, torch.float32)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    loss.backward()
    truth = Truth(hidden, head, labels, weights, torch.ones(1, dtype=torch.bool))
    assert truth.loss > 0
    assert float(loss.detach()) == pytest.approx(truth.loss, rel=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), truth.grad, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_plain_torch(dtype: torch.dtype) -> None:
    hidden, head, labels, weights = make_case(200, 257, dtype)
    truth = Truth(hidden, head, labels, weights, torch.ones(200, dtype=torch.bool))
    plain = hidden.detach().clone().requires_grad_()
    nll = torch.nn.functional.cross_entropy(plain @ head.t(), labels, reduction="none")
    (nll.float() * weights).sum().backward()
    ws = workspace_for(200, 257, dtype, chunk=64)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    loss.backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    ours, theirs = ((g.double() - truth.grad).norm() / truth.grad.norm() for g in (hidden.grad, plain.grad))
    nll_error = ((ws.nll.double() - truth.nll).norm(), (nll.detach().double() - truth.nll).norm())
    assert ours <= 2 * theirs
    assert nll_error[0] <= 2 * nll_error[1]
    if dtype == torch.float32:
        assert ours < 1e-5
        assert abs(float(loss.detach()) - truth.loss) < 1e-5 * truth.loss


def test_error_does_not_grow_with_the_number_of_chunks() -> None:
    hidden, head, labels, weights = make_case(2048, 17, torch.float32)
    truth = Truth(hidden, head, labels, weights, torch.ones(2048, dtype=torch.bool))
    for chunk, tile in ((2048, None), (128, 16), (2, 5)):
        ws = workspace_for(2048, 17, torch.float32, chunk=chunk, tile=tile)
        loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws).detach()
        assert abs(float(loss) - truth.loss) < 3e-7 * truth.loss
        assert float(ws.weight_sum) == pytest.approx(truth.weight_sum, rel=3e-7)


def test_repeats_are_bitwise_equal() -> None:
    hidden, head, labels, weights = make_case(100, 257, torch.float32)
    results = []
    for _ in range(3):
        hidden.grad = None
        ws = workspace_for(100, 257, torch.float32, chunk=32)
        loss = fused_lm_head_loss(hidden, head, labels, weights, 90, workspace=ws)
        loss.backward()
        assert hidden.grad is not None
        results.append([loss.detach(), hidden.grad, ws.nll, ws.logsumexp])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_the_tail_of_a_larger_workspace_is_left_alone() -> None:
    ws = workspace_for(30, 17)
    results = (ws.nll, ws.logsumexp, ws.label_rank, ws.row_weights, ws.grad_hidden)
    for tensor in results:
        tensor.fill_(1)
    hidden, head, labels, weights = make_case(20, 17)
    fused_lm_head_loss(hidden, head, labels, weights, 13, workspace=ws, with_rank=True).backward()
    assert all(bool((tensor[20:] == 1).all()) for tensor in results)


def test_loss_and_gradient_are_the_callers_own() -> None:
    """A leaf may keep the tensor that the backward returns; the next step must not overwrite it, nor the loss."""
    hidden, head, labels, weights = make_case(9, 17)
    ws = workspace_for(9, 17)
    loss = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    loss.backward()
    assert hidden.grad is not None
    kept, value = hidden.grad.clone(), float(loss.detach())
    other = torch.randn_like(hidden).requires_grad_()
    fused_lm_head_loss(other, head, labels, weights, workspace=ws).backward()
    assert torch.equal(hidden.grad, kept)
    assert float(loss.detach()) == value


def test_two_live_uses_of_a_workspace_are_refused() -> None:
    hidden, head, labels, weights = make_case(9, 17)
    ws = workspace_for(9, 17)
    first = fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    with pytest.raises(RuntimeError, match="another forward"):
        first.backward()


def test_flops_are_two_gemms_and_one_without_gradient() -> None:
    hidden, head, labels, weights = make_case(40, 257, torch.float32)
    ws = workspace_for(40, 257, torch.float32)
    with FlopCounterMode(display=False, custom_mapping=gemm.flop_formulas()) as counter, in_the_open():
        fused_lm_head_loss(hidden, head, labels, weights, workspace=ws).backward()
    assert counter.get_total_flops() == 4 * 40 * 257 * D
    with FlopCounterMode(display=False, custom_mapping=gemm.flop_formulas()) as counter, in_the_open(), torch.no_grad():
        fused_lm_head_loss(hidden, head, labels, weights, workspace=ws)
    assert counter.get_total_flops() == 2 * 40 * 257 * D


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of every allocation of a call by torch's CPU allocator, in order, but for single numbers."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_rank", [False, True])
def test_allocations_do_not_depend_on_the_data(
    dtype: torch.dtype, with_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_ONEDNN", False)  # its products are new tensors, of the live rows
    hidden, head, _, weights = make_case(100, 3000, dtype)
    ws = workspace_for(100, 3000, dtype, chunk=16)

    def step(live: int, labels: Tensor) -> object:
        loss = fused_lm_head_loss(
            hidden, head, labels, weights, torch.tensor(live), workspace=ws, with_rank=with_rank
        )  # fmt: skip
        return torch.autograd.grad(loss, hidden)

    data = [(live, torch.randint(-1, 3000, (100,))) for live in (0, 3, 60, 100)]
    seen = [allocations(partial(step, *case)) for case in data]
    assert seen[0]
    assert all(other == seen[0] for other in seen[1:])
    assert max(seen[0]) < 100 * 3000  # nothing of (R, V), even of one byte each
    if dtype == torch.float32:
        # The gradient of the caller's own, and two vectors of its backward.
        assert seen[0] == [hidden.nbytes, 4 * 100, 100]


def test_chunk_rows_stay_within_the_scratch_and_follow_the_waves() -> None:
    def rows(hidden_size: int, vocab: int, scratch: int, device: str = "cuda", num_rows: int = 10**6) -> int:
        return choose_chunk_rows(
            num_rows=num_rows,
            hidden_size=hidden_size,
            vocab_size=vocab,
            row_bytes=4,
            scratch_bytes=scratch,
            device_type=device,
        )

    unlimited = 2**50
    assert [rows(d, 1000, unlimited) for d in (2048, 2560, 4096, 5120)] == [2048, 1664, 2048, 1664]
    assert rows(4096, 151936, 768 * 2**20) == 1024
    for hidden_size in (64, 576, 2560):
        chosen = rows(hidden_size, 151936, 768 * 2**20)
        assert 4 * chosen * 151936 <= 768 * 2**20
        assert chosen % 128 == 0
    assert rows(576, 49152, 768 * 2**20, "cpu") == 512
    ws = make_workspace(num_rows=10**4, hidden_size=8, vocab_size=9999, dtype=torch.float32, device="cpu")
    assert (ws.chunk_rows, ws.tile_columns) == (1024, 1024 if gemm.is_onednn(ws.nll.device, torch.float32) else 512)
    assert rows(576, 49152, 1, "cpu") == 1
    assert rows(576, 49152, unlimited, "cpu", num_rows=33) == 33


def test_check_labels_names_the_first_wrong_one() -> None:
    check_labels(torch.tensor([0, IGNORE_INDEX, 6]), 7)
    check_labels(torch.tensor([], dtype=torch.int64), 7)
    with pytest.raises(ValueError, match=r"found 7 in row 2"):
        check_labels(torch.tensor([0, IGNORE_INDEX, 7, -1]), 7)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden": torch.zeros(9, D + 1)}, ValueError, "must be"),
        ({"hidden": torch.zeros(9, D, dtype=torch.float64)}, TypeError, "share a dtype"),
        ({"hidden": torch.zeros(D, 9).t()}, ValueError, "hidden must be contiguous"),
        (
            {"hidden": torch.zeros(40, D), "labels": torch.zeros(40).long(), "weights": torch.ones(40)},
            ValueError,
            "R <=",
        ),
        ({"head_weight": torch.zeros(18, D)}, ValueError, "V = 17"),
        ({"head_weight": torch.zeros(17, D, requires_grad=True)}, ValueError, "frozen"),
        ({"head_weight": torch.zeros(17, D, device="meta")}, ValueError, "device"),
        ({"labels": torch.zeros(9, dtype=torch.int32)}, TypeError, "int64"),
        ({"labels": torch.zeros(8).long()}, ValueError, "one per row"),
        ({"weights": torch.ones(9, dtype=torch.float64)}, TypeError, "float32"),
        ({"num_rows": 10}, ValueError, "num_rows"),
        ({"num_rows": torch.tensor([3])}, ValueError, "scalar"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], error: type[Exception], match: str) -> None:
    hidden, head, labels, weights = make_case(9, 17, torch.float32)
    arguments = {"hidden": hidden, "head_weight": head, "labels": labels, "weights": weights, "num_rows": None} | change
    with pytest.raises(error, match=match):
        fused_lm_head_loss(**arguments, workspace=workspace_for(9, 17, torch.float32))  # type: ignore[arg-type]


def test_workspace_refuses_wrong_sizes() -> None:
    with pytest.raises(TypeError, match="dtype"):
        workspace_for(9, 17, torch.int32)
    with pytest.raises(ValueError, match="at least 1"):
        workspace_for(9, 0)
    with pytest.raises(ValueError, match="belong together"):
        make_workspace(num_rows=9, hidden_size=D, vocab_size=17, dtype=torch.float32, device="cpu", num_blocks=3)
    with pytest.raises(ValueError, match="whole rows"):
        make_workspace(
            num_rows=9, hidden_size=D, vocab_size=17, dtype=torch.float32, device="cpu", tile_columns=16,
            implementation="triton",
        )  # fmt: skip
    with pytest.raises(ValueError, match="float64"):
        workspace_for(9, 17, implementation="triton")
