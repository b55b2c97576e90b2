"""Times for the choice of a layout: FLOPs against the measured ones, and what larger models do to the choice."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_graph.drafter import DrafterSpec
from dflash_graph.layout import candidates
from dflash_graph.plan import make_plan
from dflash_graph.stage_times import drafter_flops, num_parameters, stage_times, target_flops
from dflash_graph.target import ModelFacts
from tests.tiny import tiny_config

SMOLLM = DrafterSpec(
    hidden_size=576, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    intermediate_size=1536, rms_norm_eps=1e-5, rope_theta=1e4, vocab_size=49152, block_size=16,
    target_layer_ids=(1, 8, 14), num_target_layers=30, mask_token_id=5, layer_types=("full_attention",) * 3,
    sliding_window=None, causal=False, draft_vocab_size=None, max_trained_length=1024, target_path="", gguf_file=None,
)  # fmt: skip
QWEN = ModelFacts(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=12288, rms_norm_eps=1e-6, rope_theta=1e6, vocab_size=151936, max_position_embeddings=40960,
    model_type="qwen3", tied=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "tokens, anchors, block, least",
    [(1024, 64, 16, 177.7e9 + 3.2e9), (2048, 512, 8, 661.0e9 + 25.6e9), (4096, 256, 16, 710.6e9 + 50.8e9)],
)
def test_drafter_flops_are_those_of_the_design(tokens: int, anchors: int, block: int, least: float) -> None:
    """Figures of docs/design.md, four rows a job."""
    spec = replace(SMOLLM, block_size=block)
    found = drafter_flops(spec, num_tokens=tokens, num_anchors=anchors, row_length=tokens / 4)
    assert found == pytest.approx(least, rel=0.02)


def test_target_flops_are_two_per_weight_and_token() -> None:
    found = target_flops(QWEN, num_tokens=16384, row_length=2000, num_layers=36)
    assert found == pytest.approx(2 * 6.95e9 * 16384, rel=0.12)  # 8.2 B parameters without embedding and head
    assert target_flops(QWEN, num_tokens=16384, row_length=2000, num_layers=18) == pytest.approx(found / 2)


def test_a_device_that_is_too_small_for_both_calls_for_a_split(tiny: Path) -> None:
    plan = make_plan(tiny_config(tiny, tiny / "unused"))
    roomy, tight = stage_times(plan, 10**12), stage_times(plan, 10**5)
    assert (roomy.colocated_fits, tight.colocated_fits) == (True, False)
    assert min(roomy.target_s, roomy.drafter_s, roomy.apply_s, roomy.copy_s) > 0
    assert candidates(8, tight)[0].layout.kind == "split"
    assert num_parameters(plan.spec) == sum(v.numel() for v in _tensors(plan.spec))


def _tensors(spec: DrafterSpec) -> list:  # type: ignore[type-arg]
    import torch

    return [torch.empty(shape) for shape in spec.parameter_shapes().values()]
