"""Bias, logit scale, soft-cap, D-PACE and the KL of the fused loss against dense float64 autograd."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels.backend import Implementation
from dflash_graph.kernels.fused_lm_head_loss import IGNORE_INDEX, DPace, Teacher, fused_lm_head_loss
from tests.kernels.loss_truth import Case, assert_close, dense, error, run

D = 12
BOTH: tuple[Implementation, ...] = ("torch", "triton")


def make_case(rows: int = 20, vocab: int = 100, dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    """Rows that count, rows that do not in every way, and a teacher for some of them."""
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    labels, weights = torch.randint(0, vocab, (rows,)), torch.rand(rows) + 0.1
    labels[2], labels[5], weights[7] = IGNORE_INDEX, vocab, 0.0
    wanted = {name for name, value in options.items() if value is True}
    return Case(
        hidden=torch.randn(rows, D, dtype=torch.float64).to(dtype),
        head=torch.randn(vocab, D, dtype=torch.float64).to(dtype),
        labels=labels,
        weights=weights,
        num_rows=rows - 2,
        bias=torch.randn(vocab, dtype=stats) if "bias" in wanted else None,
        alpha=0.3 if "d_pace" in wanted else None,
        # Three rows per block of four; the block of rows 9-11 is complete, others miss rows that do not count.
        places=torch.arange(rows) // 3 * 4 + 1 + torch.arange(rows) % 3 if "d_pace" in wanted else None,
        kl_weight=0.4 if "kl" in wanted else 0.0,
        teacher_logits=torch.randn(7, vocab, dtype=torch.float64) * 2 if "kl" in wanted else None,
        teacher_rows=torch.arange(rows) % 7 if "kl" in wanted else None,
        **{name: value for name, value in options.items() if value is not True},
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"logit_scale": 0.3},
    {"soft_cap": 3.0},  # of logits with a deviation of 3.5: half of them saturate
    {"bias": True, "logit_scale": 1.7, "soft_cap": 5.0},
    {"d_pace": True},
    {"kl": True},
    {"bias": True, "logit_scale": 0.6, "d_pace": True, "kl": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "none")
def test_options_equal_the_dense_truth_in_float64(options: dict[str, Any]) -> None:
    case = make_case(**options)
    assert_close(run(case), dense(case), 1e-10)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "none")
def test_both_implementations_are_within_1e_5_in_float32(
    options: dict[str, Any], implementation: Implementation
) -> None:
    case = make_case(dtype=torch.float32, **options)
    found = run(case, case.make_workspace(implementation=implementation, tile_columns=None))
    truth = dense(case)
    for name in ("loss", "grad", "nll", "logsumexp", "row_weights", "weight_sum"):
        assert error(getattr(found, name), getattr(truth, name)) < 1e-5, name
    assert torch.equal(found.label_rank, truth.label_rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "none")
def test_16_bit_errors_are_at_most_twice_those_of_plain_torch(
    options: dict[str, Any], implementation: Implementation, dtype: torch.dtype
) -> None:
    case = make_case(200, 257, dtype, **options)
    case.workspace = {"chunk_rows": 64}
    found = run(case, case.make_workspace(implementation=implementation))
    truth, plain = dense(case), dense(case, dtype)
    for name in ("grad", "nll", "logsumexp"):
        limit = 2 * error(getattr(plain, name), getattr(truth, name))
        assert error(getattr(found, name), getattr(truth, name)) <= limit, name


@pytest.mark.parametrize("label_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_rise_by_hundreds_over_the_tiles(dtype: torch.dtype, label_first: bool) -> None:
    """The running reference must follow, and what was summed before must be scaled with it."""
    vocab = 100
    head = torch.zeros(vocab, D, dtype=dtype)
    head[:, 0] = torch.linspace(-2, 2, vocab)  # logits -200 ... 200
    head[:, 1:] = torch.randn(vocab, D - 1).to(dtype)
    hidden = torch.zeros(3, D, dtype=dtype)
    hidden[0, 0], hidden[1, 0], hidden[2] = 100.0, -100.0, torch.randn(D).to(dtype)
    for soft_cap in (None, 150.0):
        labels = torch.full((3,), 1 if label_first else vocab - 2)
        case = Case(hidden, head, labels, torch.ones(3), soft_cap=soft_cap)
        for host_reads in (True, False):
            ws = case.make_workspace()
            ws.host_reads = host_reads
            found, truth = run(case, ws), dense(case)
            tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 2e-2)
            for name in ("loss", "grad", "nll", "logsumexp"):
                assert error(getattr(found, name), getattr(truth, name)) < tolerance, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("implementation", BOTH)
def test_infinite_logits(implementation: Implementation) -> None:
    """-inf (a forbidden token) is exact; the label's own -inf is an infinite loss; +inf is NaN and never right."""
    dtype = torch.float32
    case = make_case(dtype=dtype, bias=True)
    assert case.bias is not None
    case.bias[:40] = -torch.inf  # whole tiles, the first among them
    case.labels[:] = torch.where(case.keep & (case.labels < 40), 41, case.labels)
    ws = {"implementation": implementation, "tile_columns": None if implementation == "triton" else 16}
    found, truth = run(case, case.make_workspace(**ws)), dense(case)
    assert_close(found, truth, 2e-5)
    case.labels[0] = 5
    found = run(case, case.make_workspace(**ws))
    assert found.nll[0] == torch.inf
    assert found.loss == torch.inf
    assert found.label_rank[0] == 60
    case.labels[0] = 50
    for column in (50, 60):
        case.bias[column] = torch.inf
        found = run(case, case.make_workspace(**ws))
        assert found.nll[0].isnan()
        assert bool((found.label_rank[case.keep] != 0).all())
        case.bias[column] = 0.0


@pytest.mark.parametrize("implementation", BOTH)
def test_a_poisoned_row_that_does_not_count_changes_nothing_with_all_options(implementation: Implementation) -> None:
    case = make_case(dtype=torch.float32, bias=True, d_pace=True, kl=True)
    dead = (~case.keep).nonzero().flatten()
    assert len(dead) == 5
    assert case.places is not None
    assert case.teacher_rows is not None
    results = []
    for value, index in ((0.0, 0), (float("nan"), 2**40), (float("inf"), -(2**40)), (7.0, 1)):
        case.hidden[dead] = value
        case.places[dead] = index  # 1 is the place of row 0, which counts
        case.teacher_rows[dead] = index
        ws = case.make_workspace(implementation=implementation, tile_columns=None)
        results.append(run(case, ws))
    for other in results[1:]:
        for name, clean in vars(results[0]).items():
            assert torch.equal(clean, getattr(other, name)), name
    assert not results[1].grad[dead].any()
    assert not results[1].kl[dead].any()
    assert not results[1].row_weights[dead].any()


def test_many_equal_columns_never_rank_before_the_label() -> None:
    """The label's logit is a sum of its own; its rounding must not make equal columns greater."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        head = torch.randn(1, 64).to(dtype).expand(1000, 64).contiguous()
        case = Case(torch.randn(50, 64).to(dtype), head, torch.randint(0, 1000, (50,)), torch.ones(50))
        for with_rank in (True, False):
            assert not run(case, with_rank=with_rank).label_rank.any()


# ---- D-PACE ---------------------------------------------------------------------------------------------------------


def test_d_pace_with_alpha_1_counts_the_rows_that_follow() -> None:
    case = replace(make_case(d_pace=True), alpha=1.0)
    found = run(case)
    keep, places = case.keep.tolist(), case.places
    assert places is not None
    for row, place in enumerate(places.tolist()):
        later = sum(keep[r] and p // 4 == place // 4 and p >= place for r, p in enumerate(places.tolist()))
        assert found.row_weights[row] == (later if keep[row] else 0)


def test_d_pace_weights_are_detached_and_ignore_the_given_sizes() -> None:
    case = make_case(d_pace=True)
    found = run(case)
    again = run(replace(case, weights=torch.where(case.weights != 0, 17.0, 0.0)))
    assert torch.equal(found.loss, again.loss)
    weighted = replace(case, alpha=None, places=None, weights=found.row_weights.clone())
    torch.testing.assert_close(run(weighted).grad, found.grad)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("implementation", BOTH)
def test_d_pace_without_a_floor_gives_an_impossible_label_no_weight(implementation: Implementation) -> None:
    """exp(-inf) = 0 weighs an infinite loss with 0: selected away, not NaN."""
    case = make_case(dtype=torch.float32, d_pace=True, bias=True)
    assert case.bias is not None
    case.alpha, case.bias[case.labels[9]] = 0.0, -torch.inf
    found = run(case, case.make_workspace(implementation=implementation, tile_columns=None))
    assert found.nll[9] == torch.inf
    assert not found.row_weights[9:12].any()
    assert found.loss.isfinite()
    assert not found.grad[9:12].any()
    assert bool(found.grad.isfinite().all())


@pytest.mark.parametrize("block_size", [2, 16])
def test_d_pace_in_the_smallest_and_the_usual_block(block_size: int) -> None:
    case = make_case(40, d_pace=True)
    k1 = block_size - 1
    case.block_size, case.places = block_size, torch.arange(40) // k1 * block_size + 1 + torch.arange(40) % k1
    assert_close(run(case), dense(case), 1e-11)


# ---- KL -------------------------------------------------------------------------------------------------------------


def test_the_kl_of_a_drafter_equal_to_its_target_is_zero() -> None:
    case = make_case(kl=True)
    case.kl_weight, case.num_rows = 1.0, None
    case.teacher_logits, case.teacher_rows = case.hidden @ case.head.t(), torch.arange(20)
    found = run(case)
    assert float(found.kl.abs().max()) < 1e-12
    assert float(found.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_kl_alone_mixed_and_only_watched(weight: float) -> None:
    case = make_case(kl=True)
    case.kl_weight = weight
    assert_close(run(case), dense(case), 1e-11)


def test_kl_against_a_target_renormalised_over_a_reduced_vocabulary() -> None:
    """The target knows 300 tokens and the head 100: the teacher's distribution is over the head's."""
    case = make_case(kl=True)
    kept = torch.randperm(300)[:100]
    full = (torch.randn(7, 300, dtype=torch.float64) * 2).softmax(1)
    p = full[:, kept] / full[:, kept].sum(1, keepdim=True)
    case.teacher_logits = p.log()
    found = run(case)
    assert_close(found, dense(case), 1e-11)
    assert bool((found.kl >= 0).all())
    case.teacher_logits = torch.zeros(7, 100, dtype=torch.float64)
    case.teacher_logits[:, 50:] = -torch.inf  # tokens the target excludes
    assert_close(run(case), dense(case), 1e-11)


def test_confident_rows_keep_relative_accuracy_under_the_mix() -> None:
    """1 - p stays accurate in the part of the cross-entropy when the KL takes the rest."""
    case = make_case(dtype=torch.float32, kl=True)
    case.hidden[0] = 40 * case.head[case.labels[0]] / case.head[case.labels[0]].square().sum()
    truth = dense(case)
    assert error(run(case).grad[0], truth.grad[0]) < 1e-5


# ---- refusals and lending -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bias": torch.zeros(99)}, "bias must be"),
        ({"bias": torch.zeros(100, dtype=torch.float64)}, "bias must be"),
        ({"bias": torch.zeros(100, requires_grad=True)}, "never gets a gradient"),
        ({"bias": torch.zeros(200)[::2]}, "bias must be contiguous"),
        ({"logit_scale": 0.0}, "positive and finite"),
        ({"logit_scale": float("nan")}, "positive and finite"),
        ({"soft_cap": -1.0}, "positive and finite"),
        ({"d_pace": DPace(alpha=1.5, trained_rows=torch.ones(20).long())}, "alpha"),
        ({"d_pace": DPace(alpha=0.5, trained_rows=torch.ones(19).long())}, "trained_rows must be int64"),
        ({"d_pace": DPace(alpha=0.5, trained_rows=torch.ones(20))}, "trained_rows must be int64"),
        ({"teacher": {"weight": -0.1}}, "weight must lie"),
        ({"teacher": {"mean": torch.zeros(7, D + 1)}}, "mean must be"),
        ({"teacher": {"mean": torch.zeros(7, D, dtype=torch.bfloat16)}}, "mean must be"),
        ({"teacher": {"entropy": torch.zeros(0)}}, "at least one position"),
        ({"teacher": {"rows": torch.zeros(20)}}, "rows must be int64"),
        ({"teacher": {"bias_mean": torch.zeros(7)}}, "belong together"),
        ({"teacher": {}, "bias": torch.zeros(100)}, "belong together"),
        ({"teacher": {}, "soft_cap": 30.0}, "no teacher with a soft_cap"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    case = make_case(dtype=torch.float32)
    if "teacher" in options:
        fields = {"weight": 0.5, "mean": torch.zeros(7, D), "entropy": torch.zeros(7), "rows": torch.zeros(20).long()}
        options = options | {"teacher": Teacher(**(fields | options["teacher"]))}
    with pytest.raises(ValueError, match=match):
        run(case, **options)


def test_d_pace_needs_a_workspace_with_blocks() -> None:
    case = make_case(d_pace=True)
    with pytest.raises(ValueError, match="num_blocks and block_size"):
        run(case, case.make_workspace(num_blocks=None, block_size=None))


@pytest.mark.parametrize("implementation", BOTH)
def test_lent_gradient_rows_are_the_workspace_s_own_and_serve_one_backward(implementation: Implementation) -> None:
    case = make_case(dtype=torch.float32)
    ws = case.make_workspace(implementation=implementation, tile_columns=None)

    def call(hidden: Tensor, lend_grad: bool) -> Tensor:
        return fused_lm_head_loss(
            hidden, case.head, case.labels, case.weights, case.num_rows, workspace=ws, lend_grad=lend_grad
        )

    leaf = case.hidden.clone().requires_grad_()
    with pytest.raises(ValueError, match="a leaf"):
        call(leaf, True)
    (wanted,) = torch.autograd.grad(call(leaf * 2, False) * 3, leaf)
    inner = leaf * 2
    loss = call(inner, True)
    (own,) = torch.autograd.grad(loss * 3, inner, retain_graph=True)
    assert own.data_ptr() == ws.grad_hidden.data_ptr()
    assert torch.equal(own * 2, wanted)
    with pytest.raises(RuntimeError, match="lent"):
        torch.autograd.grad(loss, inner)
    (again,) = torch.autograd.grad(call(leaf * 2, True) * 3, leaf)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("implementation", BOTH)
def test_a_second_backward_gives_the_same_gradient(implementation: Implementation) -> None:
    """The rows are kept unweighted and unscaled, so a backward may be repeated with another factor."""
    case = make_case(dtype=torch.float32)
    ws = case.make_workspace(implementation=implementation, tile_columns=None)
    leaf = case.hidden.clone().requires_grad_()
    loss = fused_lm_head_loss(leaf, case.head, case.labels, case.weights, workspace=ws)
    (one,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (four,) = torch.autograd.grad(loss * 4, leaf)
    assert torch.equal(one * 4, four)
