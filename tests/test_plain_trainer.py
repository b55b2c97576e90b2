"""Static buffers change nothing: fifty steps equal those of a trainer that allocates afresh, bit for bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.config import OptimConfig
from dflash_graph.drafter import BlockInputs, Drafter, FlatParameters
from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op
from dflash_graph.step import DrafterStep, learning_rate
from tests.test_step import MIXED, jobs_of, make_toy
from tests.toys import CPU, Toy, ToyJob

STEPS = 50
OPTIM = OptimConfig(lr=5e-3, warmup_ratio=0.1, weight_decay=0.1, max_grad_norm=0.5, lr_schedule="cosine")


class PlainTrainer:
    """The same mathematics with nothing static: parameters, gradients, inputs, workspaces, optimizer are new each step.

    Values travel from step to step as copies. Operators (attention, loss, layers) are the engine's; its loads, sums,
    normalisation, clipping and update are written out here.
    """

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.values = {name: value.clone() for name, value in toy.masters().items()}
        self.moments: dict[str, dict[str, Tensor]] = {}

    def step(self, jobs: list[ToyJob], lr: float) -> float:
        """One update; returns sum(w * nll) / sum(w)."""
        parameters = FlatParameters(self.toy.spec.parameter_shapes(), device=CPU, compute_dtype=torch.float32)
        parameters.load(self.values)
        results = [self._micro_step(parameters, job) for job in jobs]
        weight = torch.zeros(())
        for _, w in results:
            weight = weight + w
        grads = {group: grad * (1 / weight) for group, grad in parameters.grads.items()}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        if torch.isfinite(norm) and weight > 0:
            factor = (self.toy.step.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            self._update(parameters, {group: grad * factor for group, grad in grads.items()}, lr)
            self.values = {name: v.clone() for name, v in parameters.views(parameters.masters).items()}
        return float(sum(loss.double() for loss, _ in results) / sum(w.double() for _, w in results))

    def _update(self, parameters: FlatParameters, grads: dict[str, Tensor], lr: float) -> None:
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

    def _micro_step(self, parameters: FlatParameters, toy_job: ToyJob) -> tuple[Tensor, Tensor]:
        """(sum of w * nll, sum of w) of one job; adds its gradients."""
        toy, spec, job = self.toy, self.toy.spec, toy_job.job
        a = next(size for size in toy.step.sizes if size >= job.num_anchors)
        rows = a * (spec.block_size - 1)
        features = torch.zeros(job.token_ids.shape[0], len(spec.target_layer_ids) * spec.hidden_size)
        for r, (_, _, values) in enumerate(toy_job.rows):
            start = r * job.bucket_length
            features[start : start + len(values)] = values.float()
        sizes: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
        drafter = Drafter(
            spec,
            parameters,
            embed_weight=toy.embed.float(),
            rope_length=spec.max_trained_length + spec.block_size,
            attention=attention_op.make_workspace(
                num_anchors=a,
                block_size=spec.block_size,
                num_tokens=features.shape[0],
                num_heads=spec.num_attention_heads,
                num_key_value_heads=spec.num_key_value_heads,
                head_dim=spec.head_dim,
                max_context=spec.max_trained_length,
                **sizes,
            ),
        )
        head = toy.head.float()
        workspace = loss_op.make_workspace(
            num_rows=rows, hidden_size=spec.hidden_size, vocab_size=head.shape[0], **sizes
        )
        inputs = BlockInputs(
            features=features,
            positions=job.positions.clone(),
            anchors=job.anchors[:a].clone(),
            row_starts=job.anchor_row_starts[:a].clone(),
            anchor_tokens=job.anchor_tokens[:a].clone(),
            trained_rows=job.trained_rows[:rows].clone(),
            num_anchors=torch.tensor(job.num_anchors),
        )
        loss = loss_op.fused_lm_head_loss(
            drafter(inputs),
            head,
            job.labels[:rows].clone(),
            job.weights[:rows].clone(),
            num_rows=torch.tensor(job.num_trained_rows),
            with_rank=True,
            workspace=workspace,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone(), workspace.weight_sum.clone()


def compare(toy: Toy, jobs: list[ToyJob], *, poisoned_step: int | None = None) -> tuple[int, list[float]]:
    """Steps until the two trainers differ in a bit of loss or weights (STEPS if never), and the losses."""
    plain, losses = PlainTrainer(toy), []
    for i in range(STEPS):
        chosen = [jobs[(2 * i + n) % len(jobs)] for n in range(1 + i % 3)]
        lr = learning_rate(toy.step.optim, i + 1, STEPS)
        if i == poisoned_step:
            chosen[0].rows[0][2][0] = math.nan
        toy.accumulate(*chosen)
        toy.step.apply(lr)
        counts = toy.step.read_counts()
        losses.append(plain.step(chosen, lr))
        if i == poisoned_step:
            chosen[0].rows[0][2][0] = 0.5
            assert counts.skipped_steps == 1
            assert math.isnan(losses[-1])
        elif counts.loss_sum / counts.weight_sum != losses[-1]:
            return i, losses
        masters = toy.masters()
        if any(masters[name].numpy().tobytes() != value.numpy().tobytes() for name, value in plain.values.items()):
            return i, losses
    return STEPS, losses


@pytest.mark.parametrize("changes", [MIXED, {"causal": True}], ids=["sliding and full", "causal"])
def test_fifty_steps_equal_those_of_a_trainer_that_allocates_afresh(changes: dict[str, Any]) -> None:
    """Several jobs a step and sizes of micro-step, a schedule of rates, clipping, decay, and a step that is skipped."""
    toy = make_toy(spec=changes, num_sizes=3, optim=OPTIM)
    jobs = jobs_of(toy, at_least=9)
    assert len({toy.step.size_for(job.job.num_anchors) for job in jobs}) > 1
    agreed, losses = compare(toy, jobs, poisoned_step=17)
    assert agreed == STEPS
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(finite) == STEPS - 1
    assert sum(finite[-5:]) < sum(finite[:5]) - 0.5, "nothing was trained"


def test_a_buffer_that_keeps_stale_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load forgets to clear what the job before left in the anchors' tail: the comparison must not hold then."""
    load = DrafterStep.load

    def forgetful(self: DrafterStep, source: dict[str, Tensor], job: Any) -> int:
        before = self._ws["features"].clone()
        size = load(self, source, job)
        torch.where((source["row_ids"] >= 0)[:, None], self._ws["features"], before, out=self._ws["features"])
        self._ws["positions"].clamp_(min=1)
        return size

    monkeypatch.setattr(DrafterStep, "load", forgetful)
    toy = make_toy(num_sizes=3, optim=OPTIM)
    agreed, _ = compare(toy, jobs_of(toy, at_least=9))
    assert agreed < STEPS
