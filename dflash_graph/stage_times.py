"""How long targets and drafter take for a job, from their FLOPs and bytes at assumed rates: enough to choose a layout.

Only ratios matter there, so one rate stands for every GPU. The formulas are those of docs/design.md. Called by the
command line on a machine with several GPUs.
"""

from dataclasses import dataclass
from math import prod

from dflash_graph.drafter import DrafterSpec
from dflash_graph.layout import StageTimes
from dflash_graph.plan import RunPlan
from dflash_graph.target import ModelFacts


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU is assumed to reach, per second: bf16 FLOPs, bytes of its memory, bytes to another GPU."""

    flops: float = 400e12
    memory: float = 2.5e12
    link: float = 100e9


def target_flops(facts: ModelFacts, *, num_tokens: int, row_length: float, num_layers: int) -> float:
    """FLOPs of a target's forward pass over `num_tokens` positions in rows of `row_length`, dense MLPs assumed."""
    d, e = facts.hidden_size, facts.head_dim
    q, kv = facts.num_attention_heads * e, facts.num_key_value_heads * e
    weights = 2 * d * q + 2 * d * kv + 3 * d * facts.intermediate_size
    return num_layers * num_tokens * (2 * weights + 2 * row_length * q)  # a token sees half of its row


def drafter_flops(spec: DrafterSpec, *, num_tokens: int, num_anchors: int, row_length: float) -> float:
    """FLOPs of a micro-step, forward and backward, with `num_anchors` live anchors whose rows are all trained."""
    t, a, k, d, f = num_tokens, num_anchors, spec.block_size, spec.hidden_size, spec.intermediate_size
    n, r, depth = a * k, a * (k - 1), spec.num_hidden_layers
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    inner = max(0, depth - 2) * n
    queries = a + 1 + inner + (r if depth > 1 else 0)
    return (
        4 * t * len(spec.target_layer_ids) * d * d
        + 12 * depth * t * d * kv
        + 6 * d * q * queries
        + 12 * d * kv * (a + 1 + (depth - 1) * n)
        + 6 * (d * q + 3 * d * f) * ((depth - 1) * n + r)
        + 4 * r * spec.head_vocab_size * d
        + 14 * depth * n * (row_length / 2 + k) * q
    )


def num_parameters(spec: DrafterSpec) -> int:
    """Of the drafter itself."""
    return sum(prod(shape) for shape in spec.parameter_shapes().values())


def stage_times(plan: RunPlan, device_bytes: int, rates: Rates | None = None) -> StageTimes:
    """Seconds of a run's stages on one GPU each, and whether target and drafter fit into `device_bytes` together."""
    rates = rates or Rates()
    config, spec, facts = plan.config, plan.spec, plan.facts
    row = float(plan.rows.lengths.mean())
    layers = spec.target_layer_ids[-1] + 1 if plan.teacher is None else facts.num_hidden_layers
    features = config.token_budget * len(spec.target_layer_ids) * spec.hidden_size * 2
    parameters = num_parameters(spec)
    d, e = facts.hidden_size, facts.head_dim
    layer = 2 * d * e * (facts.num_attention_heads + facts.num_key_value_heads) + 3 * d * facts.intermediate_size
    weights = 2 * (layers * layer + (1 if facts.tied else 2) * facts.vocab_size * d)
    state = 18 * parameters  # masters, two moments and gradients in float32, a bf16 copy
    used = weights + state + (plan.slots + 2) * features + plan.kept_bytes(plan.anchor_groups)
    return StageTimes(
        target_s=target_flops(facts, num_tokens=config.token_budget, row_length=row, num_layers=layers) / rates.flops,
        drafter_s=drafter_flops(spec, num_tokens=config.token_budget, num_anchors=config.num_anchors, row_length=row)
        / rates.flops,
        apply_s=40 * parameters / rates.memory + 8 * parameters / rates.link,
        copy_s=features / rates.link,
        jobs_per_step=config.schedule.jobs_per_step,
        colocated_fits=used <= 0.9 * device_bytes,
    )
