"""What a run starts from: a pure function of the seed, the target's own layers, or another checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.config import TargetConfig
from dflash_graph.drafter import DrafterSpec
from dflash_graph.initialise import initial_parameters, random_parameters
from dflash_graph.plan import make_plan
from dflash_graph.target import Target, load_full_model
from dflash_graph.training import train
from tests.tiny import tiny_config, weights


def _spec(tiny: Path, *overrides: str) -> DrafterSpec:
    return make_plan(tiny_config(tiny, tiny / "unused", *overrides)).spec


def _target(tiny: Path, taps: tuple[int, ...], keep: int) -> Target:
    config = TargetConfig(path=str(tiny / "model"))
    output = torch.zeros(64, 32 * len(taps))
    cpu = torch.device("cpu")
    return Target(config, target_layer_ids=taps, output=output, device=cpu, dtype=torch.float32, keep_layers=keep)


def test_random_start_is_a_function_of_the_seed(tiny: Path) -> None:
    spec = _spec(tiny)
    a, b, c = random_parameters(spec, 1), random_parameters(spec, 1), random_parameters(spec, 2)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert torch.equal(a["norm.weight"], torch.ones(32))


def test_target_start_gives_the_first_layer_the_targets_own_context_keys_and_values(tiny: Path) -> None:
    """With taps up to layer 2, K and V of the drafter's first layer are those of target layer 3 on the same tokens."""
    spec = _spec(tiny, "drafter.target_layer_ids=[1, 2]", "drafter.init=target")
    target = _target(tiny, (1, 2), keep=2)
    tensors = initial_parameters(spec, "target", seed=0, target_layers=target.kept_layers)
    ids = torch.arange(64) % 80 + 6
    target.forward(ids, 1, 64)
    model = load_full_model(TargetConfig(path=str(tiny / "model")), torch.device("cpu"), torch.float32)
    seen: dict[str, Tensor] = {}
    attention = model.get_decoder().layers[3].self_attn
    for kind in ("k", "v"):
        projection = getattr(attention, f"{kind}_proj")
        projection.register_forward_hook(lambda m, a, out, kind=kind: seen.__setitem__(kind, out[0]))
    with torch.no_grad():
        model(input_ids=ids[None])
    context = F.linear(target.output, tensors["fc.weight"])
    context = F.rms_norm(context, (32,), tensors["hidden_norm.weight"], spec.rms_norm_eps)
    for kind in ("k", "v"):
        ours = F.linear(context, tensors[f"layers.0.self_attn.{kind}_proj.weight"])
        torch.testing.assert_close(ours, seen[kind], rtol=1e-4, atol=1e-5)


def test_target_start_takes_the_last_layers_where_too_few_follow(tiny: Path) -> None:
    target = _target(tiny, (1, 3), keep=2)  # of 5 layers only layer 4 follows
    model = load_full_model(TargetConfig(path=str(tiny / "model")), torch.device("cpu"), torch.float32)
    for kept, layer in zip(target.kept_layers, model.get_decoder().layers[3:], strict=True):
        assert torch.equal(kept["mlp.up_proj.weight"], layer.mlp.up_proj.weight)


def test_target_start_refuses_other_shapes(tiny: Path) -> None:
    spec = _spec(tiny, "drafter.intermediate_size=48")
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight is \(48, 32\), the target's is \(64, 32\)"):
        initial_parameters(spec, "target", seed=0, target_layers=_target(tiny, (1, 3), keep=2).kept_layers)


def test_a_run_can_start_from_another_runs_checkpoint(tiny: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "first", "epochs=1"))
    newest = max((tmp_path / "first" / "checkpoints").glob("step_*"))
    train(tiny_config(tiny, tmp_path / "second", f"drafter.init={newest}", "epochs=1", "optim.lr=1e-30"))
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert first["fc.weight"] == second["fc.weight"]  # such a small rate rounds away
    with pytest.raises(ValueError, match="block_size: 3 here, 4 there"):
        train(tiny_config(tiny, tmp_path / "third", f"drafter.init={newest}", "drafter.block_size=3"))
