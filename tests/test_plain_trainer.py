"""Static buffers change nothing: fifty steps equal those of a trainer that allocates afresh, bit for bit."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.config import OptimConfig
from dflash_graph.drafter import BlockInputs, Drafter, FlatParameters
from dflash_graph.graphs import CapturePhase, WorkerContext
from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op
from dflash_graph.step import learning_rate
from tests.test_step import MIXED, jobs_of, make_toy
from tests.toys import CPU, Toy, ToyJob

STEPS, SKIPPED = 50, 17
OPTIM = OptimConfig(lr=5e-3, warmup_ratio=0.1, weight_decay=0.1, max_grad_norm=0.5, lr_schedule="cosine")
Tensors = dict[str, Tensor]


class PlainTrainer:
    """The same mathematics with nothing static: parameters, gradients, inputs, workspaces, optimizer are new each step.

    Values travel from step to step as copies. Operators (attention, loss, layers) are the engine's; its loads, anchor
    groups, sums, normalisation, clipping and update are written out here.
    """

    def __init__(self, toy: Toy, anchor_groups: int = 1) -> None:
        self.toy, self.anchor_groups = toy, anchor_groups
        self.values = {name: value.clone() for name, value in toy.masters().items()}
        self.moments: dict[str, Tensors] = {}

    def step(self, jobs: list[ToyJob], lr: float) -> tuple[float, Tensors]:
        """One update; returns sum(w * nll) / sum(w) and the unnormalised gradients by name."""
        parameters = FlatParameters(self.toy.spec.parameter_shapes(), device=CPU, compute_dtype=self.toy.dtype)
        parameters.load(self.values)
        results = [result for job in jobs for result in self._micro_step(parameters, job)]
        sums = {name: grad.clone() for name, grad in parameters.views(parameters.grads).items()}
        weight = torch.zeros(())
        for _, w in results:
            weight = weight + w
        grads = {group: grad * (1 / weight) for group, grad in parameters.grads.items()}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        if torch.isfinite(norm) and weight > 0:
            factor = (self.toy.step.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            self._update(parameters, {group: grad * factor for group, grad in grads.items()}, lr)
            self.values = {name: v.clone() for name, v in parameters.views(parameters.masters).items()}
        return float(sum(loss.double() for loss, _ in results) / sum(w.double() for _, w in results)), sums

    def _update(self, parameters: FlatParameters, grads: Tensors, lr: float) -> None:
        optim = self.toy.step.optim
        groups = []
        for group, master in parameters.masters.items():
            master.grad = grads[group]
            groups.append({"params": [master], "weight_decay": optim.weight_decay if group == "decay" else 0.0})
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(lr), betas=optim.betas, eps=optim.eps, fused=True)
        for group, master in parameters.masters.items():
            if group in self.moments:
                optimizer.state[master] = {name: t.clone() for name, t in self.moments[group].items()}
        optimizer.step()
        self.moments = {
            group: {name: t.clone() for name, t in optimizer.state[master].items()}
            for group, master in parameters.masters.items()
        }

    def _micro_step(self, parameters: FlatParameters, toy_job: ToyJob) -> Iterator[tuple[Tensor, Tensor]]:
        """(sum of w * nll, sum of w) of each anchor group of one job; adds the job's gradients."""
        toy, spec, job = self.toy, self.toy.spec, toy_job.job
        size = next(size for size in toy.step.sizes if size >= job.num_anchors)
        count = math.ceil(toy.step.sizes[-1] / self.anchor_groups)
        features = torch.zeros(job.token_ids.shape[0], len(spec.target_layer_ids) * spec.hidden_size, dtype=toy.dtype)
        for r, (_, _, values) in enumerate(toy_job.rows):
            start = r * job.bucket_length
            features[start : start + len(values)] = values.to(toy.dtype)
        drafter = self._drafter(parameters, min(size, count))
        if size <= count:
            yield self._group(drafter, toy_job, features, slice(size), None)
            return
        # All groups read the context's keys and values; their gradients are summed, and then run back, once.
        context = drafter.project_context(features, count)
        totals = [torch.zeros_like(t) for t in context]
        for first in range(0, size, count):
            group = slice(first, min(first + count, size))
            leaves = [t.detach().clone().requires_grad_() for t in context]
            rows = drafter.context_rows(self._inputs(toy_job, features, group)[0])
            lent = [leaf[:n].clone() for leaf, n in zip(leaves, rows, strict=True)]
            yield self._group(drafter, toy_job, features, group, lent)
            for total, leaf in zip(totals, leaves, strict=True):
                assert leaf.grad is not None
                total += leaf.grad
        torch.autograd.backward(context, totals)

    def _drafter(self, parameters: FlatParameters, num_anchors: int) -> Drafter:
        toy, spec = self.toy, self.toy.spec
        return Drafter(
            spec,
            parameters,
            embed_weight=toy.embed.to(toy.dtype),
            rope_length=spec.max_trained_length + spec.block_size,
            attention=attention_op.make_workspace(
                num_anchors=num_anchors,
                block_size=spec.block_size,
                num_tokens=toy.shape.token_budget,
                num_heads=spec.num_attention_heads,
                num_key_value_heads=spec.num_key_value_heads,
                head_dim=spec.head_dim,
                max_context=spec.max_trained_length,
                dtype=toy.dtype,
                device=CPU,
            ),
        )

    def _inputs(self, toy_job: ToyJob, features: Tensor, group: slice) -> tuple[BlockInputs, Tensor, Tensor, int]:
        """Inputs, labels and weights of the anchors of `group`, and how many of its rows are live."""
        job, k = toy_job.job, self.toy.spec.block_size
        anchors, first = len(range(*group.indices(len(job.anchors)))), group.start or 0
        mine = [i for i in range(job.num_trained_rows) if first <= int(job.trained_rows[i]) // k < first + anchors]
        room = anchors * (k - 1)
        trained, labels, weights = torch.zeros(room, dtype=torch.int64), torch.full((room,), -100), torch.zeros(room)
        for place, i in enumerate(mine):
            trained[place], labels[place], weights[place] = (
                job.trained_rows[i] - first * k,
                job.labels[i],
                job.weights[i],
            )
        inputs = BlockInputs(
            features=features.clone(),
            positions=job.positions.clone(),
            anchors=job.anchors[group].clone(),
            row_starts=job.anchor_row_starts[group].clone(),
            anchor_tokens=job.anchor_tokens[group].clone(),
            trained_rows=trained,
            num_anchors=torch.tensor(min(max(job.num_anchors - first, 0), anchors)),
        )
        return inputs, labels, weights, len(mine)

    def _group(
        self, drafter: Drafter, toy_job: ToyJob, features: Tensor, group: slice, context: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        inputs, labels, weights, live = self._inputs(toy_job, features, group)
        head = self.toy.head.to(self.toy.dtype)
        workspace = loss_op.make_workspace(
            num_rows=len(labels),
            hidden_size=head.shape[1],
            vocab_size=head.shape[0],
            dtype=self.toy.dtype,
            device=CPU,
        )
        loss = loss_op.fused_lm_head_loss(
            drafter(inputs, context),
            head,
            labels,
            weights,
            num_rows=torch.tensor(live),
            with_rank=True,
            workspace=workspace,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone(), workspace.weight_sum.clone()


def first_difference(toy: Toy, *, anchor_groups: int = 1) -> tuple[str, list[float]]:
    """The first bit in which the engine's losses, gradients or weights differ ("" if none does), and the losses.

    Step i trains 1 to 3 jobs; one step's features hold a NaN, so that both must skip it.
    """
    plain, losses, jobs = PlainTrainer(toy, anchor_groups), [], jobs_of(toy, at_least=9)
    for i in range(STEPS):
        chosen = [jobs[(2 * i + n) % len(jobs)] for n in range(1 + i % 3)]
        lr = learning_rate(toy.step.optim, i + 1, STEPS)
        first = chosen[0].rows[0][2][0]
        kept = first.clone()
        if i == SKIPPED:
            first.fill_(math.nan)
        toy.accumulate(*chosen)
        grads = toy.grads()
        toy.step.apply(lr)
        counts = toy.step.read_counts()
        loss, sums = plain.step(chosen, lr)
        losses.append(loss)
        if i == SKIPPED:
            first.copy_(kept)
            if not (math.isnan(loss) and math.isnan(counts.loss_sum)):
                return f"step {i}: both losses must be nan; found {loss} and {counts.loss_sum}", losses
        elif counts.loss_sum / counts.weight_sum != loss:
            return f"step {i}: loss", losses
        if counts.skipped_steps != (i == SKIPPED):
            return f"step {i}: {counts.skipped_steps} steps skipped", losses
        for kind, ours, theirs in (("gradient", grads, sums), ("weight", toy.masters(), plain.values)):
            for name, value in theirs.items():
                # Which NaN a NaN is depends on nothing but the machine.
                if ours[name].nan_to_num(1e30).numpy().tobytes() != value.nan_to_num(1e30).numpy().tobytes():
                    return f"step {i}: {kind} {name}", losses
    return "", losses


SETTINGS: dict[str, dict[str, Any]] = {
    "sliding and full": {"spec": MIXED, "num_sizes": 3},
    "causal": {"spec": {"causal": True}, "num_sizes": 3},
    "bfloat16": {"spec": MIXED, "num_sizes": 3, "dtype": torch.bfloat16},
    "anchor groups": {"spec": MIXED, "num_sizes": 3, "anchor_groups": 2},
    "anchor groups, bfloat16, causal": {
        "spec": {"causal": True}, "num_sizes": 4, "dtype": torch.bfloat16, "anchor_groups": 3,
    },
}  # fmt: skip


@contextmanager
def recorded(toy: Toy) -> Iterator[None]:
    """The steps are captured and replayed by the CPU's stand-in for CUDA graphs."""
    with WorkerContext("drafter", CPU, mode="recorded", phase=CapturePhase()) as context:
        toy.step.make_graphs(context, validation=False)
        context.prepare()
        yield
        assert all(graph.calls for graph in context.graphs), "a graph was never replayed"


@pytest.mark.parametrize("mode", ["eager", "recorded"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_fifty_steps_equal_those_of_a_trainer_that_allocates_afresh(settings: dict[str, Any], mode: str) -> None:
    """Several jobs a step and sizes of micro-step, a schedule of rates, clipping, decay, and a step that is skipped."""
    toy = make_toy(optim=OPTIM, shape={"num_anchors": 28}, **settings)
    used = {toy.step.size_for(job.job.num_anchors) for job in jobs_of(toy, at_least=9)}
    assert used == set(toy.step.sizes)
    with recorded(toy) if mode == "recorded" else nullcontext():
        difference, losses = first_difference(toy, anchor_groups=settings.get("anchor_groups", 1))
    assert difference == ""
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(finite) == STEPS - 1
    assert sum(finite[-5:]) < sum(finite[:5]) - 0.5, "nothing was trained"


# ---- stale data is noticed -------------------------------------------------------------------------------------------

PatchOf = Callable[[pytest.MonkeyPatch, Toy], None]


def forget_input(name: str, patch: pytest.MonkeyPatch, toy: Toy) -> None:
    """One tensor of the workspace keeps what the first job wrote there."""
    load, buffer, kept = toy.step.load, toy.table[f"workspace.{name}"], []

    def forgetful(source: Tensors, job: Any) -> int:
        size = load(source, job)
        kept.append(buffer.clone())
        buffer.copy_(kept[0])
        return size

    patch.setattr(toy.step, "load", forgetful)


def keep_gradients(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    patch.setattr(toy.parameters, "zero_grads", lambda: None)


def keep_weight_sum(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    body = toy.step._apply

    def apply() -> None:
        before = toy.step.weight_sum.clone()
        body()
        toy.step.weight_sum.copy_(before)

    patch.setattr(toy.step, "_apply", apply)


def keep_rate(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    apply, rates = toy.step.apply, []

    def stale(lr: float) -> None:
        rates.append(lr)
        apply(rates[0])

    patch.setattr(toy.step, "apply", stale)


def keep_compute_copy(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    patch.setattr(toy.parameters, "refresh_compute", lambda: None)


def cache_rotary_rows(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    """A cache keyed by identity, as libraries have them: a tensor rewritten in place gets the old result."""
    rope, cache = toy.step.drafter._rope, {}

    def cached(x: BlockInputs) -> tuple[Tensor, Tensor]:
        key = (x.positions.data_ptr(), x.anchors.data_ptr(), len(x.anchors))
        if key not in cache:
            cache[key] = rope(x)
        return cache[key]

    patch.setattr(toy.step.drafter, "_rope", cached)


def keep_skipping(patch: pytest.MonkeyPatch, toy: Toy) -> None:
    """The mark of a skipped step outlives the step."""
    optimizer, found = toy.step.optimizer, toy.step._found_inf
    step, sticky = optimizer.step, torch.zeros(())

    def stale() -> None:
        found.copy_(torch.maximum(sticky, found))
        sticky.copy_(found)
        step()

    patch.setattr(optimizer, "step", stale)


# Not anchor_row_starts: with the anchors of another job they give negative positions, and an IndexError at once.
INPUTS = (
    "features", "positions", "anchors", "anchor_tokens", "trained_rows", "labels", "weights",
    "num_anchors", "num_trained_rows",
)  # fmt: skip
PLANTS: dict[str, PatchOf] = {
    **{f"input {name}": partial(forget_input, name) for name in INPUTS},
    "gradients": keep_gradients,
    "weight sum": keep_weight_sum,
    "learning rate": keep_rate,
    "compute copy": keep_compute_copy,
    "rotary rows": cache_rotary_rows,
    "skipped": keep_skipping,
}


def one_size() -> Toy:
    """One size of micro-step, so that what is stale has the right shape and nothing but its values can be noticed."""
    return make_toy(optim=OPTIM, dtype=torch.bfloat16)


def test_nothing_is_noticed_where_nothing_is_planted() -> None:
    assert first_difference(one_size())[0] == ""


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_buffer_that_keeps_stale_data_is_noticed(plant: PatchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing that each job or step must write anew keeps what was there before: never bitwise equal then."""
    toy = one_size()
    plant(monkeypatch, toy)
    difference, _ = first_difference(toy)
    assert difference.startswith("step ")
    step = int(difference.removeprefix("step ").split(":")[0])
    assert step > 0 or plant not in (keep_gradients, keep_weight_sum, keep_rate, keep_compute_copy)
    assert step > SKIPPED or plant is not keep_skipping, "noticed for another reason"
