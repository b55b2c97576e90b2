"""The training step: sanitised loads, exact accumulation, AdamW over flat masters, counters, and steady memory."""

import gc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dflash_graph.config import OptimConfig
from dflash_graph.counters import Counts
from dflash_graph.kernels.backend import in_the_open
from dflash_graph.kernels.gemm import flop_formulas
from dflash_graph.step import learning_rate, micro_step_sizes
from tests.dense import Dense, dense, dense_with_grads
from tests.toys import (
    FULL,
    SLIDING,
    Toy,
    ToyJob,
    make_jobs,
    norm_of,
    random_rows,
    random_tensors,
    relative_error,
    state_bytes,
    toy_shape,
    toy_spec,
)

MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 5}
LENGTHS = [30, 9, 12, 4, 40, 2, 17, 8, 25, 33, 11, 6, 20, 38, 3, 14, 28, 36]


def jobs_of(
    toy: Toy, *, at_least: int = 1, supervised: float = 0.8, num_ids: int | None = None, seed: int = 0
) -> list[ToyJob]:
    """Jobs over `LENGTHS`, as many epochs of other tokens and features as it takes."""
    jobs: list[ToyJob] = []
    while len(jobs) < at_least:
        rows = random_rows(toy.spec, LENGTHS, supervised=supervised, num_ids=num_ids, seed=seed)
        jobs += make_jobs(rows, toy.shape)
        seed += 1
    return jobs


def make_toy(**kwargs: Any) -> Toy:
    spec = toy_spec(**kwargs.pop("spec", MIXED))
    return Toy(spec, toy_shape(spec, token_budget=42, **kwargs.pop("shape", {})), **kwargs)


def truth_of(toy: Toy, job: ToyJob) -> tuple[Dense, dict[str, Tensor]]:
    return dense_with_grads(toy.spec, toy.tensors, toy.embed, toy.head, job.rows, job.anchors, gamma=toy.shape.gamma)


# ---- padding is legal work ------------------------------------------------------------------------------------------

HUGE = {torch.int64: 2**63 - 1, torch.int32: -(2**31), torch.float32: math.nan}  # row ids of padding stay negative


def spoil(toy: Toy, job: ToyJob, value: float) -> None:
    """Fill what a slot holds beyond its job: padded positions, unused anchors, and the tails of the row lists."""
    padded = job.job.row_ids < 0
    for name in ("features", "token_ids", "positions", "row_ids"):
        slot = toy.table[f"slot.{name}"][0]
        slot[padded] = value if name == "features" else HUGE[slot.dtype]
    for names, live in (
        (("anchors", "anchor_row_starts", "anchor_tokens"), job.job.num_anchors),
        (("trained_rows", "labels", "weights"), job.job.num_trained_rows),
    ):
        for name in names:
            slot = toy.table[f"slot.{name}"][0]
            slot[live:] = HUGE[slot.dtype]
            assert live < len(slot), f"{name} has no tail to spoil"


def three_steps(toy: Toy, value: float | None) -> tuple[list[Counts], dict[str, bytes]]:
    """Counters and the whole state of three steps of two jobs, each slot spoiled before it is loaded."""
    counts, jobs = [], jobs_of(toy, at_least=6)
    for i in range(3):
        for job in jobs[2 * i : 2 * i + 2]:
            toy.write_slot(job)
            if value is not None:
                spoil(toy, job, value)
            toy.step.micro_step(toy.step.load_slot(0, job.job))
        toy.step.apply(1e-2)
        counts.append(toy.step.read_counts())
    toy.accumulate(jobs[0])  # and gradients that no apply has zeroed
    return counts, state_bytes(toy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_does_not_reach_loss_gradients_or_weights(value: float, dtype: torch.dtype) -> None:
    """Bitwise, although each tensor of the table (workspace included) starts as NaN or the largest integer."""
    clean_counts, clean = three_steps(make_toy(dtype=dtype, num_sizes=2), None)
    counts, state = three_steps(make_toy(dtype=dtype, num_sizes=2, poisoned=True), value)
    assert state == clean
    for a, b in zip(counts, clean_counts, strict=True):
        assert all(np.array_equal(x, getattr(b, name)) for name, x in vars(a).items())
    assert clean_counts[-1].skipped_steps == 0
    assert all(np.isfinite(np.frombuffer(x, np.float32)).all() for x in clean.values())


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_load_leaves_zeros_where_nothing_is_live(value: float) -> None:
    """The workspace itself, from a poisoned table and a spoiled slot: no later reader has to sanitise again."""
    toy = make_toy(poisoned=True)
    job = next(j for j in jobs_of(toy, supervised=0.5) if j.job.num_anchors > 0 and (j.job.row_ids < 0).sum() > 2)
    toy.write_slot(job)
    spoil(toy, job, value)
    toy.step.load_slot(0, job.job)
    length, anchors, rows = job.job.bucket_length, job.job.num_anchors, job.job.num_trained_rows
    features = torch.zeros(42, 32)
    for r, (tokens, _, row_features) in enumerate(job.rows):
        features[r * length : r * length + len(tokens)] = row_features.float()
    assert torch.equal(toy.table["workspace.features"], features)
    for name in ("positions", "anchors", "anchor_row_starts", "anchor_tokens", "trained_rows", "labels", "weights"):
        assert torch.equal(toy.table[f"workspace.{name}"], getattr(job.job, name)), name
    # The job's own tails are what the workspace must hold: zeros, and labels that no head has.
    assert not job.job.positions[job.job.row_ids < 0].any()
    for name in ("anchors", "anchor_row_starts", "anchor_tokens"):
        assert not getattr(job.job, name)[anchors:].any()
    assert not job.job.trained_rows[rows:].any()
    assert not job.job.weights[rows:].any()
    assert (job.job.labels[rows:] == -100).all()
    assert int(toy.table["workspace.num_anchors"]) == anchors
    assert int(toy.table["workspace.num_trained_rows"]) == rows


def test_a_full_job_leaves_nothing_for_the_next() -> None:
    """The workspace after a long job, loaded with a short one, gives what a fresh workspace gives, bitwise."""
    toy, fresh = make_toy(shape={"num_anchors": 20}), make_toy(shape={"num_anchors": 20})
    long, short = jobs_of(toy)[0], jobs_of(toy, supervised=0.3)[0]
    assert (long.job.num_anchors, long.job.num_tokens) > (20 - 1, 30)
    assert 0 < short.job.num_anchors < 10
    assert short.job.num_tokens < 42
    toy.accumulate(long)
    toy.parameters.zero_grads()
    toy.accumulate(short)
    fresh.accumulate(short)
    assert all(torch.equal(grad, fresh.grads()[name]) for name, grad in toy.grads().items())


def test_load_reads_the_slot_it_is_given() -> None:
    spec = toy_spec(**MIXED)
    toy = Toy(spec, toy_shape(spec, token_budget=42), num_slots=3)
    jobs = jobs_of(toy)[:3]
    expected = []
    for job in jobs:
        toy.accumulate(job)
        expected.append(toy.grads())
        toy.parameters.zero_grads()
    for slot, job in enumerate(jobs):
        toy.write_slot(job, slot)
    for slot in (2, 0, 1):
        toy.step.micro_step(toy.step.load_slot(slot, jobs[slot].job))
        assert all(torch.equal(grad, expected[slot][name]) for name, grad in toy.grads().items())
        toy.parameters.zero_grads()


# ---- micro-step sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_anchors, num_sizes, expected",
    [
        (2048, 4, (512, 1024, 1536, 2048)),
        (10, 4, (3, 5, 8, 10)),
        (60, 1, (60,)),
        (3, 4, (1, 2, 3)),  # ceil of 0.75, 1.5, 2.25, 3: doubles are made once
        (1, 4, (1,)),
    ],
)
def test_micro_step_sizes(num_anchors: int, num_sizes: int, expected: tuple[int, ...]) -> None:
    assert micro_step_sizes(num_anchors, num_sizes) == expected


def test_load_takes_the_smallest_size_that_holds_the_live_anchors() -> None:
    toy = make_toy(num_sizes=4)
    assert toy.step.sizes == (15, 30, 45, 60)
    expected = {0: 15, 1: 15, 15: 15, 16: 30, 30: 30, 45: 45, 46: 60, 60: 60}
    assert {n: toy.step.size_for(n) for n in expected} == expected
    for job in jobs_of(toy):
        assert toy.load(job) == expected.get(job.job.num_anchors, -(-job.job.num_anchors // 15) * 15)


@pytest.mark.parametrize("changes", [MIXED, {"causal": True}])
def test_a_larger_micro_step_gives_the_same(changes: dict[str, Any]) -> None:
    toy = make_toy(spec=changes, num_sizes=4)
    job = min((j for j in jobs_of(toy, supervised=0.4) if j.job.num_anchors), key=lambda j: j.job.num_anchors)
    assert toy.load(job) == 15
    results = []
    for size in toy.step.sizes:
        toy.load(job)
        toy.step.micro_step(size)
        results.append((toy.grads(), toy.step.read_counts()))
        toy.parameters.zero_grads()
    for grads, counts in results[1:]:
        errors = relative_error(grads, results[0][0])
        assert max(errors.values()) <= 1e-6, errors
        assert counts.loss_sum == pytest.approx(results[0][1].loss_sum, rel=1e-6)
        assert counts.weight_sum == pytest.approx(results[0][1].weight_sum, rel=1e-6)
        for name in ("rows", "correct", "correct_top_k", "blocks", "leading"):
            assert np.array_equal(getattr(counts, name), getattr(results[0][1], name))


GROUPED = [MIXED, {"causal": True}, {"num_hidden_layers": 1, "layer_types": (FULL,)}]


@pytest.mark.parametrize("groups", [2, 4, 7])
@pytest.mark.parametrize("changes", GROUPED, ids=["mixed", "causal", "one layer"])
def test_anchors_in_groups_give_the_same(changes: dict[str, Any], groups: int) -> None:
    """Whole jobs and jobs that end inside a group, groups that divide A and that do not, sizes of fewer groups."""
    shape = {"num_anchors": 20}
    toy, whole = (make_toy(spec=changes, shape=shape, num_sizes=3, anchor_groups=n) for n in (groups, 1))
    jobs = sorted(jobs_of(toy, supervised=0.6), key=lambda job: job.job.num_anchors)
    ends = {job.job.num_anchors % math.ceil(toy.shape.num_anchors / groups) for job in jobs}
    assert len(ends) > 1
    assert jobs[0].job.num_anchors < jobs[-1].job.num_anchors == 20
    for job in (jobs[0], jobs[len(jobs) // 2], jobs[-1]):
        for each in (toy, whole):
            each.parameters.zero_grads()
            each.accumulate(job)
        found, expected = toy.step.read_counts(), whole.step.read_counts()
        errors = relative_error(toy.grads(), whole.grads())
        assert max(errors.values()) <= 2e-6, errors
        assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
        assert found.weight_sum == pytest.approx(expected.weight_sum, rel=1e-6)
        for name in ("rows", "correct", "correct_top_k", "blocks", "leading"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        for each in (toy, whole):
            each.step.micro_step(each.load(job), train=False)
        assert toy.step.read_counts().loss_sum == pytest.approx(whole.step.read_counts().loss_sum, rel=1e-6)


def test_groups_compute_the_context_once() -> None:
    """As many FLOPs as in one group: neither fc nor the context's keys and values are computed again."""
    flops = []
    for groups in (1, 3):
        toy = make_toy(anchor_groups=groups)
        size = toy.load(jobs_of(toy)[0])
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as mode, in_the_open():
            toy.step.micro_step(size)
        products = {str(op): n for op, n in mode.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
        flops.append(sum(products.values()))
    assert flops[0] > 0
    assert flops[1] == pytest.approx(flops[0], rel=0.02)


# ---- accumulation ---------------------------------------------------------------------------------------------------


def test_eight_jobs_as_8_and_4_4_and_2_2_2_2() -> None:
    """Partial sums of gradients and weights, added, are those of all eight micro-steps (as ranks will add theirs)."""
    toy = make_toy()
    jobs = jobs_of(toy, at_least=8)[:8]
    sums = []
    for per_part in (8, 4, 2):
        total = {name: torch.zeros_like(grad) for name, grad in toy.grads().items()}
        weight = torch.zeros(())
        for i in range(0, 8, per_part):
            toy.parameters.zero_grads()
            toy.step.weight_sum.zero_()
            toy.accumulate(*jobs[i : i + per_part])
            total = {name: t + toy.grads()[name] for name, t in total.items()}
            weight = weight + toy.step.weight_sum
        sums.append((total, float(weight)))
    for total, weight in sums[1:]:
        difference = {name: total[name].double() - grad.double() for name, grad in sums[0][0].items()}
        assert norm_of(difference) <= 1e-6 * norm_of(sums[0][0])
        assert weight == pytest.approx(sums[0][1], rel=1e-6)
    # And they are the truth's: the sum over jobs, not a mean of means.
    truths = [truth_of(toy, job) for job in jobs]
    assert sums[0][1] == pytest.approx(sum(truth.weight for truth, _ in truths), rel=1e-6)
    expected = {name: sum((g[name] for _, g in truths[1:]), truths[0][1][name]) for name in sums[0][0]}
    errors = relative_error(sums[0][0], expected)
    assert max(errors.values()) < 1e-4, errors


def test_identical_gradients_give_bitwise_identical_updates() -> None:
    """The second step gets its gradients as a copy, not from jobs, and starts with stale content all over."""
    optim = OptimConfig(weight_decay=0.1)
    first, second = make_toy(optim=optim), make_toy(optim=optim, poisoned=True)
    for job in jobs_of(first, at_least=3)[:3]:
        first.accumulate(job)
        for group, grad in first.parameters.grads.items():
            second.parameters.grads[group].copy_(grad)
        second.step.weight_sum.copy_(first.step.weight_sum)
        first.step.apply(1e-3)
        second.step.apply(1e-3)
        assert state_bytes(first) == state_bytes(second)


def test_the_loss_is_the_weighted_mean_over_the_step() -> None:
    """sum(w * nll) / sum(w) over jobs of unlike size, which a mean of the jobs' means is not."""
    toy = make_toy()
    small = min(
        (j for j in jobs_of(toy, supervised=0.4) if j.job.num_trained_rows), key=lambda j: j.job.num_trained_rows
    )
    jobs = [*jobs_of(toy)[:2], small]
    toy.accumulate(*jobs)
    truths = [truth_of(toy, job)[0] for job in jobs]
    loss = sum(float(t.loss) for t in truths) / sum(t.weight for t in truths)
    counts = toy.step.read_counts()
    assert counts.loss_sum / counts.weight_sum == pytest.approx(loss, rel=1e-6)
    means = sum(float(t.loss) / t.weight for t in truths) / len(truths)
    assert abs(means - loss) > 1e-3 * loss


# ---- apply ----------------------------------------------------------------------------------------------------------


class HandAdamW:
    """Decoupled weight decay (Loshchilov and Hutter), global norm clipping, in float64, parameter by parameter."""

    def __init__(self, tensors: dict[str, Tensor], optim: OptimConfig) -> None:
        self.w = {name: tensor.double().clone() for name, tensor in tensors.items()}
        self.m = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.optim, self.steps, self.norm = optim, 0, 0.0

    def apply(self, grad_sums: dict[str, Tensor], weight_sum: float, lr: float) -> None:
        grads = {name: grad.double() / weight_sum for name, grad in grad_sums.items()}
        self.norm = norm_of(grads)
        factor = min(1.0, self.optim.max_grad_norm / self.norm)
        self.steps += 1
        b1, b2 = self.optim.betas
        for name, w in self.w.items():
            grad = grads[name] * factor
            self.m[name] = b1 * self.m[name] + (1 - b1) * grad
            self.v[name] = b2 * self.v[name] + (1 - b2) * grad * grad
            m, v = self.m[name] / (1 - b1**self.steps), self.v[name] / (1 - b2**self.steps)
            decay = self.optim.weight_decay if w.ndim > 1 else 0.0
            self.w[name] = w * (1 - lr * decay) - lr * m / (v.sqrt() + self.optim.eps)


@pytest.mark.parametrize("max_grad_norm, clipped", [(1e-3, True), (1e6, False)])
def test_apply_equals_adamw_by_hand(max_grad_norm: float, clipped: bool) -> None:
    # eps is large beside most gradients, so that a gradient which is not divided or not clipped shows.
    optim = OptimConfig(betas=(0.8, 0.9), eps=1e-4, weight_decay=0.3, max_grad_norm=max_grad_norm)
    toy = make_toy(optim=optim)
    hand = HandAdamW(toy.masters(), optim)
    for i, job in enumerate(jobs_of(toy, at_least=6)[:6]):
        lr = [1e-2, 3e-3, 0.0, 2e-2, 1e-4, 5e-3][i]
        toy.accumulate(job)
        hand.apply(toy.grads(), float(toy.step.weight_sum), lr)
        toy.step.apply(lr)
        errors = relative_error(toy.masters(), hand.w)
        assert max(errors.values()) <= 1e-6, errors
        assert (hand.norm > max_grad_norm) == clipped
        assert toy.step.read_counts().grad_norm == pytest.approx(hand.norm, rel=1e-5)
        assert norm_of(toy.grads()) == 0
        assert float(toy.step.weight_sum) == 0
    _, optimizer = toy.step.state_tensors()
    for kind, moments in (("exp_avg", hand.m), ("exp_avg_sq", hand.v)):
        errors = relative_error({name: optimizer[f"{kind}.{name}"] for name in moments}, moments)
        assert max(errors.values()) <= 2e-5, errors
    assert {name: float(t) for name, t in optimizer.items() if name.startswith("step.")} == {
        "step.decay": 6,
        "step.no_decay": 6,
    }


def test_only_matrices_decay() -> None:
    """With gradients of zero and a weight sum, an update is the decay alone."""
    toy = make_toy(optim=OptimConfig(weight_decay=0.5))
    before = toy.masters()
    toy.step.weight_sum.fill_(1.0)
    toy.step.apply(0.1)
    for name, after in toy.masters().items():
        factor = 0.95 if after.ndim == 2 else 1.0
        assert torch.allclose(after, before[name] * factor, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf, 3e38, "no weight"])
def test_a_faulty_step_is_skipped_and_the_next_is_sound(fault: float | str, dtype: torch.dtype) -> None:
    """3e38 is finite, but its norm is not. After the skip the state is bitwise that of a run without the step."""
    optim = OptimConfig(weight_decay=0.1)
    toy, other = make_toy(optim=optim, dtype=dtype), make_toy(optim=optim, dtype=dtype)
    jobs = jobs_of(toy, at_least=3)
    for each in (toy, other):
        each.accumulate(jobs[0])
        each.step.apply(1e-2)
    before = state_bytes(toy)
    for n in (1, 2):
        if fault == "no weight":
            toy.accumulate(*make_jobs(random_rows(toy.spec, [9, 12], supervised=0.0), toy.shape))
        else:
            toy.accumulate(jobs[1])
            toy.parameters.grads["decay"][17] = fault
        toy.step.apply(1e-2)
        assert state_bytes(toy) == before
        counts = toy.step.read_counts()
        assert (counts.skipped_steps, counts.skipped_in_a_row) == (1, n)
    for each in (toy, other):
        each.accumulate(jobs[2])
        each.step.apply(1e-2)
    assert state_bytes(toy) == state_bytes(other)
    counts = toy.step.read_counts()
    assert (counts.skipped_steps, counts.skipped_in_a_row) == (0, 0)
    assert state_bytes(toy) != before


def test_nan_in_a_real_feature_is_caught_by_the_step() -> None:
    toy = make_toy()
    job = jobs_of(toy)[0]
    before = state_bytes(toy)
    job.rows[0][2][0] = math.nan
    toy.accumulate(job)
    toy.step.apply(1e-2)
    assert state_bytes(toy) == before
    assert toy.step.read_counts().skipped_steps == 1


def test_the_learning_rate_is_read_at_every_apply() -> None:
    """A rate of 0 moves nothing, a rate given later does: nothing is baked in, and the scalar keeps its address."""
    toy = make_toy()
    job, address = jobs_of(toy)[0], toy.step.lr.data_ptr()
    moved = []
    for lr in (0.0, 1e-3, 0.0, 1e-2):
        before = toy.masters()
        toy.accumulate(job)
        toy.step.apply(lr)
        moved.append(norm_of({name: w - before[name] for name, w in toy.masters().items()}))
        assert toy.step.lr.data_ptr() == address
    assert moved[0] == moved[2] == 0
    assert 5 < moved[3] / moved[1] < 20


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [2e-5, 1e-4, 2e-4, 2e-4, 2e-4, 2e-4]),
        ("linear", [2e-5, 1e-4, 2e-4, 1.55e-4, 1.1e-4, 2e-5]),
        # a quarter of the way down: 0.1 + 0.9 * (1 + cos(pi / 4)) / 2
        ("cosine", [2e-5, 1e-4, 2e-4, 2e-4 * (0.1 + 0.9 * 0.8535533905932737), 1.1e-4, 2e-5]),
    ],
)
def test_learning_rate_by_hand(schedule: Any, expected: list[float]) -> None:
    """1,000 jobs, a tenth of them warm-up, down to a tenth of the rate."""
    optim = OptimConfig(lr=2e-4, lr_schedule=schedule, warmup_ratio=0.1, min_lr_ratio=0.1)
    found = [learning_rate(optim, jobs, 1000) for jobs in (10, 50, 100, 325, 550, 1000)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_learning_rate_at_its_ends() -> None:
    none = OptimConfig(lr=1.0, warmup_ratio=0.0, min_lr_ratio=0.0, lr_schedule="linear")
    assert [learning_rate(none, jobs, 4) for jobs in (0, 1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    # More jobs than planned (never, but a resumed run may have been given fewer epochs) stay at the end's rate.
    assert learning_rate(OptimConfig(lr=1.0), 2000, 1000) == pytest.approx(0.1)
    # Warm-up never falls, decay never rises, and all of it stays within (0, lr].
    rates = [learning_rate(OptimConfig(lr=1.0, warmup_ratio=0.3), jobs, 77) for jobs in range(1, 78)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < min(rates) <= max(rates) <= 1.0


# ---- low precision --------------------------------------------------------------------------------------------------


def test_bf16_keeps_float32_masters_moments_and_gradients() -> None:
    """Norm weights start at 1.0, where a bf16 update of 1e-4 is lost: in float32 masters they all move."""
    toy = make_toy(dtype=torch.bfloat16, optim=OptimConfig())
    ones = {name: torch.ones_like(t) if t.ndim == 1 else t for name, t in random_tensors(toy.spec).items()}
    toy.parameters.load(ones)
    addresses = {name: leaf.grad.data_ptr() for name, leaf in toy.parameters.leaves.items() if leaf.grad is not None}
    assert len(addresses) == len(toy.tensors)
    for job in jobs_of(toy, at_least=4)[:4]:
        toy.accumulate(job)
        for name, leaf in toy.parameters.leaves.items():
            assert leaf.grad is not None
            assert (leaf.grad.dtype, leaf.grad.data_ptr()) == (torch.float32, addresses[name])
        toy.step.apply(1e-4)
    drafter, optimizer = toy.step.state_tensors()
    assert {t.dtype for t in (*drafter.values(), *optimizer.values())} == {torch.float32}
    for name, master in drafter.items():
        compute = toy.parameters.leaves[name].detach()
        assert compute.dtype == torch.bfloat16
        assert torch.equal(compute, master.bfloat16()), name
        if master.ndim == 1:
            moved = (master - 1).abs()
            assert 0.5e-4 < float(moved.mean()) < 4.1e-4, name
            assert (compute == 1).all()  # what a bf16 parameter would have stayed at


def test_bf16_gradients_accumulate_in_float32() -> None:
    """64 equal micro-steps add up to 64 times one; in bf16 the sum would stop growing by its 8-bit mantissa."""
    toy = make_toy(dtype=torch.bfloat16)
    job = jobs_of(toy)[0]
    toy.accumulate(job)
    once = toy.grads()
    for _ in range(63):
        toy.accumulate(job)
    errors = relative_error(toy.grads(), {name: 64 * grad.double() for name, grad in once.items()})
    assert max(errors.values()) < 1e-5, errors


def test_bf16_is_near_the_truth() -> None:
    """Loss within 1 %; gradients point the same way, as nearly as 8 bits of mantissa through 2 layers allow."""
    toy = make_toy(dtype=torch.bfloat16)
    jobs = jobs_of(toy)[:4]
    truths = [truth_of(toy, job) for job in jobs]
    toy.accumulate(*jobs)
    loss = sum(float(truth.loss) for truth, _ in truths)
    assert toy.step.read_counts().loss_sum == pytest.approx(loss, rel=0.01)
    for name, grad in toy.grads().items():
        expected = torch.stack([grads[name] for _, grads in truths]).sum(0)
        cosine = torch.cosine_similarity(grad.double().flatten(), expected.flatten(), 0)
        assert cosine > 0.97, name


# ---- counters -------------------------------------------------------------------------------------------------------


def count_by_brute_force(truths: Sequence[Dense], block_size: int) -> dict[str, list[int]]:
    """Counters of several jobs, from their whole logits, block by block."""
    names = ("rows", "correct", "correct_top_k", "blocks", "leading")
    counts = {name: [0] * (block_size - 1) for name in names}
    for truth in truths:
        for a in range(len(truth.logits)):
            unbroken = right_so_far = True
            for k in range(1, block_size):
                label = truth.trained.get((a, k))
                order = truth.logits[a, k].argsort(descending=True).tolist()
                right = label is not None and order[0] == label
                unbroken, right_so_far = unbroken and label is not None, right_so_far and right
                counts["rows"][k - 1] += label is not None
                counts["correct"][k - 1] += right
                counts["correct_top_k"][k - 1] += label in order[:5]
                counts["blocks"][k - 1] += unbroken
                counts["leading"][k - 1] += right_so_far
    return counts


COUNTERS = ("rows", "correct", "blocks", "leading")


def counted() -> tuple[Toy, Counts, dict[str, list[int]]]:
    """Counters of jobs, half of them trained and half evaluated, beside those of the whole logits.

    Nine ids in the head, of which three win most of the time and are all labels there are, so that chance gets
    several rows of a block right.
    """
    spec = toy_spec(vocab_size=9, mask_token_id=8, block_size=5, **MIXED)
    toy = Toy(spec, toy_shape(spec, token_budget=42))
    for tensor in (toy.head, toy.step.head_weight):
        tensor[3:] *= 0.3
    jobs = jobs_of(toy, at_least=60, supervised=0.85, num_ids=3)
    truths = [
        dense(spec, toy.tensors, toy.embed, toy.head, job.rows, job.anchors, gamma=toy.shape.gamma) for job in jobs
    ]
    for i, job in enumerate(jobs):
        toy.step.micro_step(toy.load(job), train=i % 2 == 0)
    return toy, toy.step.read_counts(), count_by_brute_force(truths, spec.block_size)


def test_counters_equal_a_count_from_whole_logits() -> None:
    toy, counts, expected = counted()
    assert expected["leading"][2] > 0, "no block has three rows right: the test shows nothing"
    assert expected["blocks"][3] < expected["rows"][3], "the loss masks have no gaps"
    for name in COUNTERS:
        assert getattr(counts, name).tolist() == expected[name], name
    accept = 1 + sum(a / b for a, b in zip(expected["leading"], expected["blocks"], strict=True))
    assert counts.accept_length == pytest.approx(accept, rel=1e-12)
    assert counts.accept_length > 1.3
    empty = toy.step.read_counts()
    assert empty.accept_length == 1.0
    assert all(not np.any(getattr(empty, name)) for name in (*expected, "loss_sum", "weight_sum"))


def test_top_k_counter_equals_a_count_from_whole_logits() -> None:
    _, counts, expected = counted()
    assert expected["correct"][0] < expected["correct_top_k"][0] < expected["rows"][0]
    assert counts.correct_top_k.tolist() == expected["correct_top_k"]


def test_accept_length_by_hand() -> None:
    """8 of 10 blocks have row 1 right, 3 of 6 have rows 1 and 2 right; no block has a third row."""
    zeros = np.zeros(3)
    counts = Counts(
        loss_sum=0.0,
        weight_sum=1.0,
        rows=zeros,
        correct=zeros,
        correct_top_k=zeros,
        blocks=np.array([10.0, 6.0, 0.0]),
        leading=np.array([8.0, 3.0, 0.0]),
        grad_norm=0.0,
        skipped_steps=0,
        skipped_in_a_row=0,
    )
    assert counts.accept_length == pytest.approx(1 + 0.8 + 0.5)


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_makes_the_round_trip_bitwise_and_in_place(dtype: torch.dtype) -> None:
    toy, other = make_toy(dtype=dtype), make_toy(dtype=dtype)
    jobs = jobs_of(toy, at_least=4)
    for job in jobs[:2]:
        toy.accumulate(job)
        toy.step.apply(1e-2)
    other.accumulate(jobs[3])
    other.step.apply(0.3)  # another past, to be overwritten
    addresses = other.step.addresses()
    drafter, optimizer = ({name: t.clone() for name, t in group.items()} for group in toy.step.state_tensors())
    other.step.load_state(drafter, optimizer)
    assert other.step.addresses() == addresses
    assert state_bytes(other) == state_bytes(toy)
    for each in (toy, other):
        each.accumulate(jobs[2])
        each.step.apply(1e-2)
    assert state_bytes(other) == state_bytes(toy)


def test_load_state_refuses_other_tensors() -> None:
    toy = make_toy()
    drafter, optimizer = toy.step.state_tensors()
    missing = {name: t for name, t in optimizer.items() if name != "exp_avg.norm.weight"}
    with pytest.raises(ValueError, match=r"optimizer tensors do not match: .*exp_avg.norm.weight"):
        toy.step.load_state(drafter, missing)
    with pytest.raises(ValueError, match="missing"):
        toy.step.load_state({}, optimizer)


# ---- steady memory --------------------------------------------------------------------------------------------------


def full_jobs(toy: Toy, count: int) -> list[ToyJob]:
    """Jobs of unlike data that all need the same, largest micro-step."""
    jobs = [j for j in jobs_of(toy, at_least=3 * count) if toy.step.size_for(j.job.num_anchors) == toy.step.sizes[-1]]
    assert len(jobs) >= count
    assert len({(j.job.num_anchors, j.job.num_trained_rows, j.job.bucket_length) for j in jobs[:count]}) > 3
    return jobs[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_keep_their_addresses_over_50_steps(dtype: torch.dtype) -> None:
    toy = make_toy(dtype=dtype, num_sizes=3)
    jobs = jobs_of(toy, at_least=20)
    held = {f"workspace.{name}": tensor for name, tensor in toy.step._ws.items()}
    addresses, leaves = toy.step.addresses(), list(toy.parameters.leaves.values())
    for step in range(50):
        toy.accumulate(jobs[step % len(jobs)], jobs[(7 * step + 1) % len(jobs)])
        toy.step.apply(1e-3)
        if step == 20:
            toy.step.load_state(*({n: t.clone() for n, t in group.items()} for group in toy.step.state_tensors()))
        toy.table.check_addresses(held)
        assert toy.step.addresses() == addresses
    assert all(a is b for a, b in zip(leaves, toy.parameters.leaves.values(), strict=True))
    inputs = toy.step.inputs(toy.step.sizes[-1])
    assert inputs.features.data_ptr() == toy.table["workspace.features"].data_ptr()


def allocations(toy: Toy, job: ToyJob) -> tuple[int, int]:
    """(number, bytes) of allocations during one step."""
    toy.write_slot(job)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        toy.step.micro_step(toy.step.load_slot(0, job.job))
        toy.step.apply(1e-3)
    events = profiler.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return len(sizes), sum(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, MIXED, {"causal": True}], ids=["full", "mixed", "causal"])
def test_every_step_allocates_the_same(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever its data: rows, anchors and trained rows differ from step to step, the micro-step's size does not."""
    toy = make_toy(spec=changes, dtype=dtype)
    found = [allocations(toy, job) for job in full_jobs(toy, 12)]
    assert found[3][0] > 0
    assert len(set(found[3:])) == 1, found


@pytest.mark.slow
def test_resident_memory_is_flat_over_500_steps() -> None:
    spec = toy_spec(hidden_size=64, vocab_size=512, mask_token_id=511, **MIXED)
    toy = Toy(spec, toy_shape(spec, token_budget=642, num_anchors=256))
    rows = random_rows(spec, np.random.default_rng(0).integers(4, 60, 200).tolist())
    jobs = make_jobs(rows, toy.shape)
    process, resident = psutil.Process(), []
    for step in range(500):
        toy.accumulate(jobs[step % len(jobs)])
        toy.step.apply(1e-4)
        if step % 50 == 49:
            gc.collect()
            resident.append(process.memory_info().rss)
    assert max(resident[1:]) - resident[0] < 4 * 2**20, [r / 2**20 for r in resident]


def test_frozen_parameters_stay_and_others_get_the_same_gradients() -> None:
    frozen = ["fc.weight", "layers.0.self_attn.q_proj.weight", "layers.1.mlp.gate_proj.weight"]
    frozen += ["layers.1.self_attn.k_norm.weight", "layers.1.input_layernorm.weight", "norm.weight"]
    plain, toy = make_toy(), make_toy()
    for name in frozen:
        toy.parameters.leaves[name].requires_grad_(False)
    before = toy.masters()
    for each in (plain, toy):
        each.accumulate(*jobs_of(each)[:2])
    expected, found = plain.grads(), toy.grads()
    for name, grad in found.items():
        assert torch.equal(grad, torch.zeros_like(grad) if name in frozen else expected[name]), name
        assert name not in frozen or expected[name].any()
    toy.step.apply(1e-2)
    assert all(torch.equal(toy.masters()[name], before[name]) for name in frozen)


def test_gradients_that_were_unbound_are_missed_by_name_of_the_remedy() -> None:
    toy = make_toy()
    for leaf in toy.parameters.leaves.values():
        leaf.grad = None
    with pytest.raises(RuntimeError, match="zero_grads"):
        toy.accumulate(jobs_of(toy)[0])
