"""Faults that keep a run from being CUDA graphs, planted one at a time: debug finds each and names its line."""

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_graph import step as step_module
from dflash_graph.debugging import DebugReport, debug
from dflash_graph.drafter import BlockInputs, Drafter, FlatParameters
from dflash_graph.findings import Finding
from dflash_graph.ring import Lease, Ring
from dflash_graph.step import DrafterStep
from dflash_graph.target import Target
from dflash_graph.trainer import Trainer
from tests.tiny import tiny_config

Patch = pytest.MonkeyPatch


def run_debug(tiny: Path, *overrides: str) -> DebugReport:
    small = ("drafter.num_micro_step_sizes=1", "drafter.num_hidden_layers=1", "drafter.target_layer_ids=[1]")
    return debug(tiny_config(tiny, tiny / "unused", *small, *overrides))


def is_planted(finding: Finding, fault: Callable[..., Any]) -> bool:
    """Whether a finding names the line of `fault` that is marked as planted."""
    lines, first = inspect.getsourcelines(fault)
    marked = [first + i for i, line in enumerate(lines) if "# planted" in line]
    assert len(marked) == 1
    site = finding.site
    return site is not None and site.file == __file__ and site.line == marked[0]


def test_the_run_itself_is_clean(tiny: Path) -> None:
    report = run_debug(tiny)
    assert not report.findings, str(report)
    assert {s.name for s in report.steps} == {"target.64", "target.128", "micro_step.32", "validate.32", "apply"}
    assert report.trained_steps == 5, "2 jobs each, over 8 slots"
    assert not (tiny / "unused").exists(), "debug keeps nothing"


# ---- the faults -----------------------------------------------------------------------------------------------------


def item_in_the_loss(patch: Patch) -> None:
    loss_op = step_module.loss_op.fused_lm_head_loss

    def logged(*args: Any, **kwargs: Any) -> Any:
        loss = loss_op(*args, **kwargs)
        if loss.item() > 1e9:  # planted
            print("loss explodes")
        return loss

    patch.setattr(step_module.loss_op, "fused_lm_head_loss", logged)


def boolean_indexing_of_anchors(patch: Patch) -> None:
    whole = DrafterStep._whole

    def thinned(self: DrafterStep, size: int) -> Any:
        x, rows = whole(self, size)
        assert x.anchors[x.anchors >= 0].dim() == 1  # planted
        return x, rows

    patch.setattr(DrafterStep, "_whole", thinned)


def zero_grad_set_to_none(patch: Patch) -> None:
    @torch.no_grad()
    def body(self: DrafterStep) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # planted
        self.weight_sum.zero_()

    patch.setattr(DrafterStep, "apply_body", body)


def gradients_of_leaves_set_to_none(patch: Patch) -> None:
    def zero_grads(self: FlatParameters) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None  # planted

    patch.setattr(FlatParameters, "zero_grads", zero_grads)


def optimizer_state_rebound_on_resume(patch: Patch) -> None:
    load_state = DrafterStep.load_state

    def rebinding(self: DrafterStep, drafter: Any, optimizer: Any) -> None:
        load_state(self, drafter, optimizer)
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        self.optimizer.load_state_dict(state)  # planted

    patch.setattr(DrafterStep, "load_state", rebinding)


def optimizer_state_rebound_by_hand(patch: Patch) -> None:
    load_state = DrafterStep.load_state

    def rebinding(self: DrafterStep, drafter: Any, optimizer: Any) -> None:
        load_state(self, drafter, optimizer)
        state = self.optimizer.state_dict()
        for values in state["state"].values():
            for kind in values:
                values[kind] = values[kind].clone()  # planted
        self.optimizer.load_state_dict(state)

    patch.setattr(DrafterStep, "load_state", rebinding)


def learning_rate_as_a_python_float(patch: Patch) -> None:
    apply = DrafterStep.apply

    def with_float(self: DrafterStep, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        apply(self, lr)

    @torch.no_grad()
    def body(self: DrafterStep) -> None:
        self.optimizer.step()  # planted
        self.parameters.zero_grads()
        self.weight_sum.zero_()

    patch.setattr(DrafterStep, "apply", with_float)
    patch.setattr(DrafterStep, "apply_body", body)


def library_cache_by_identity(patch: Patch) -> None:
    forward = Target.forward
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cached(self: Target, token_ids: torch.Tensor, *args: Any) -> None:
        forward(self, token_ids, *args)
        if id(token_ids) not in known:
            known[id(token_ids)] = token_ids, (token_ids % 7).float().mean()  # planted
        self.output.mul_(known[id(token_ids)][1])

    patch.setattr(Target, "forward", cached)


def padding_that_is_read(patch: Patch) -> None:
    load = DrafterStep.load

    def unsanitised(self: DrafterStep, source: dict[str, torch.Tensor], job: Any) -> int:
        size = load(self, source, job)
        self._ws["features"].copy_(source["features"])  # planted
        return size

    patch.setattr(DrafterStep, "load", unsanitised)


def slot_used_after_its_release(patch: Patch) -> None:
    step = Trainer._step

    def peeking(self: Trainer, num_jobs: int) -> list[int]:
        done = step(self, num_jobs)
        self.table["slot.features"][0].abs().max()  # planted
        return done

    patch.setattr(Trainer, "_step", peeking)


def slot_view_kept_until_the_next_job(patch: Patch) -> None:
    load_slot, kept = DrafterStep.load_slot, dict[int, torch.Tensor]()

    def keeping(self: DrafterStep, slot: int, job: Any) -> int:
        if slot in kept:  # the drafter holds this slot again: the view looks right, its job is another one
            kept[slot].abs().max()  # planted
        kept.setdefault(slot, self.table["slot.features"][slot])
        return load_slot(self, slot, job)

    patch.setattr(DrafterStep, "load_slot", keeping)


def slot_released_twice(patch: Patch) -> None:
    release = Ring.release

    def eager(self: Ring, lease: Lease) -> None:
        release(self, lease)
        release(self, lease)  # planted

    patch.setattr(Ring, "release", eager)


def generator_of_ones_own(patch: Patch) -> None:
    forward, generator = Drafter.forward, torch.Generator()

    def noisy(self: Drafter, x: BlockInputs, context: Any = None) -> torch.Tensor:
        hidden: torch.Tensor = forward(self, x, context)
        return hidden + 1e-3 * torch.randn(hidden.shape, generator=generator, device=hidden.device)  # planted

    patch.setattr(Drafter, "forward", noisy)


def pageable_copy_in_the_step(patch: Patch) -> None:
    body = DrafterStep.micro_step_body

    def copying(self: DrafterStep, size: int, *, train: bool = True) -> None:
        body(self, size, train=train)
        self.weight_sum.add_(torch.tensor([0.0, 0.0], device=self.weight_sum.device).sum())  # planted

    patch.setattr(DrafterStep, "micro_step_body", copying)


FAULTS: list[tuple[Callable[[Patch], None], str]] = [
    (item_in_the_loss, "illegal_op"),
    (boolean_indexing_of_anchors, "illegal_op"),
    (zero_grad_set_to_none, "frozen_world"),
    (gradients_of_leaves_set_to_none, "frozen_world"),
    (optimizer_state_rebound_on_resume, "frozen_world"),
    (optimizer_state_rebound_by_hand, "frozen_world"),
    (learning_rate_as_a_python_float, "frozen_world"),
    (library_cache_by_identity, "stale_cache"),
    (padding_that_is_read, "padding_read"),
    (slot_used_after_its_release, "slot_misuse"),
    (slot_view_kept_until_the_next_job, "slot_misuse"),
    (slot_released_twice, "slot_misuse"),
    (generator_of_ones_own, "illegal_op"),
    (pageable_copy_in_the_step, "illegal_op"),
]


@pytest.mark.parametrize("fault, check", FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_found_and_its_line_named(
    tiny: Path, fault: Callable[[Patch], None], check: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    report = run_debug(tiny, "optim.warmup_ratio=0.5")
    hits = [finding for finding in report.findings if is_planted(finding, fault)]
    assert [finding.check for finding in hits].count(check) >= 1, str(report)
    assert all(finding.meaning and finding.advice for finding in hits)
    elsewhere = [f for f in report.findings if f not in hits and f.check not in ("error", "frozen_world")]
    assert not elsewhere, f"findings without a fault: {report}"


def test_a_mask_that_is_built_while_capturing_is_found_in_the_library(tiny: Path, monkeypatch: Patch) -> None:
    """transformers' stock attention asks whether a stream is capturing, and builds a mask if so."""
    check = Target.check_attention

    def then_stock(self: Target) -> None:
        check(self)
        self.decoder.set_attn_implementation("sdpa")

    monkeypatch.setattr(Target, "check_attention", then_stock)
    report = run_debug(tiny)
    found = [finding for finding in report.findings if finding.check == "capture_branch"]
    assert found, str(report)
    assert all(finding.site is not None and "masking_utils.py" in str(finding.site) for finding in found)
    assert found[0].graph.startswith("target.")


def test_nothing_is_watched_any_more(tiny: Path) -> None:
    """After all that, torch's functions are its own again and a run is clean."""
    assert "watched" not in torch.cuda.synchronize.__qualname__
    assert not run_debug(tiny).findings
