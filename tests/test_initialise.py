"""What a run starts from: a pure function of the seed, the target's own layers, or another checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.config import TargetConfig
from dflash_graph.drafter import DrafterSpec
from dflash_graph.export import export
from dflash_graph.initialise import initial_parameters, random_parameters
from dflash_graph.plan import make_plan
from dflash_graph.serving_layouts import Layout, ServedTarget, write_servable
from dflash_graph.target import Target, load_full_model
from dflash_graph.training import train
from tests.tiny import tiny_config, weights
from tests.toys import random_tensors


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
    with pytest.raises(ValueError, match=r"block_size: 3 here, 4 there.*Train with drafter.block_size=4, or use"):
        train(tiny_config(tiny, tmp_path / "third", f"drafter.init={newest}", "drafter.block_size=3"))


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_a_run_can_start_from_a_released_drafter(tiny: Path, tmp_path: Path, layout: Layout) -> None:
    train(tiny_config(tiny, tmp_path / "first", "epochs=1"))
    folder = export(tmp_path / "first", to=layout, output=tmp_path / "released").folder
    train(tiny_config(tiny, tmp_path / "second", f"drafter.init={folder}", "epochs=1", "optim.lr=1e-30"))
    first, second = (find_latest(tmp_path / name) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    masters, resumed = load_checkpoint(first).drafter, load_checkpoint(second).drafter
    for name, tensor in masters.items():  # such a small rate rounds away; what was released is bf16
        assert torch.equal(resumed[name], tensor.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("drafter.block_size=3", r"block_size: 3 here, 4 there\. Train with drafter\.block_size=4, or"),
        (
            "drafter.target_layer_ids=[0, 3]",
            r"target_layer_ids: \(0, 3\) here, \(1, 3\) there\. Train with drafter\.target_layer_ids=\[1,3\], or",
        ),
        ("drafter.mask_token_id=90", r"mask_token_id: 90 here, 5 there\. Train with drafter\.mask_token_id=5, or"),
        ("drafter.intermediate_size=48", r"intermediate_size: 48 here, 64 there"),
        ("drafter.causal=true", r"causal: True here, False there\. Train with drafter\.causal=false, or"),
        ("drafter.num_hidden_layers=1", r"num_hidden_layers: 1 here, 2 there; layer_types: "),
    ],
)
@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_a_released_drafter_of_other_settings_is_refused_by_name(
    tiny: Path, tmp_path: Path, layout: Layout, setting: str, message: str
) -> None:
    spec = _spec(tiny)
    target = ServedTarget(max_position_embeddings=512, name=str(tiny / "model"))
    write_servable(tmp_path / "released", spec, random_tensors(spec), target, layout=layout)
    with pytest.raises(ValueError, match=message):
        initial_parameters(_spec(tiny, setting), str(tmp_path / "released"), seed=0, target_layers=[])


def test_a_released_drafter_of_another_target_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    spec = _spec(tiny)
    other = DrafterSpec.from_dict({**spec.to_dict(), "vocab_size": 128, "num_target_layers": 6, "rope_theta": 5e5})
    target = ServedTarget(max_position_embeddings=512, name="another")
    write_servable(tmp_path / "released", other, random_tensors(other), target)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (looked at below)
        initial_parameters(spec, str(tmp_path / "released"), seed=0, target_layers=[])
    text = str(raised.value)
    for difference in (
        "vocab_size: 96 here, 128 there",
        "num_target_layers: 5 here, 6 there",
        "rope_theta: 10000.0 here",
    ):
        assert difference in text
    assert "Choose the target it belongs to: rope_theta, vocab_size, num_target_layers follow from the target" in text
    assert "Train with" not in text


def test_what_a_released_drafter_does_not_say_is_no_contradiction(tiny: Path, tmp_path: Path) -> None:
    """speculators does not write how many layers the target has; the deepest tap is no answer."""
    spec = _spec(tiny)
    target = ServedTarget(max_position_embeddings=512, name=str(tiny / "model"))
    folder, tensors = tmp_path / "released", random_tensors(spec)
    write_servable(folder, spec, tensors, target, layout="speculators")
    settings = json.loads((folder / "config.json").read_text())
    del settings["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(settings))
    found = initial_parameters(spec, str(folder), seed=0, target_layers=[])
    assert torch.equal(found["fc.weight"], tensors["fc.weight"].to(torch.bfloat16).float())
