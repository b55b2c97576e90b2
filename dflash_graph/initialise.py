"""The parameters a run starts from: random, the target's own layers, or the drafter of another checkpoint.

Pure functions of their arguments, on the CPU in float32; `drafter.init` chooses among them. Called by `trainer.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_graph.checkpoint import load_checkpoint
from dflash_graph.drafter import DrafterSpec


def initial_parameters(
    spec: DrafterSpec, init: str, *, seed: int, target_layers: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Named float32 tensors for `FlatParameters.load`.

    Args:
        init: "random", "target", or the folder of a checkpoint.
        target_layers: state dicts of `num_hidden_layers` decoder layers of the target (`Target.kept_layers`).

    Raises:
        ValueError: the target's layers or the checkpoint do not have this drafter's shapes.
    """
    if init == "random":
        return random_parameters(spec, seed)
    if init == "target":
        return _target_parameters(spec, seed, target_layers)
    return _checkpoint_parameters(spec, init)


def random_parameters(spec: DrafterSpec, seed: int) -> dict[str, Tensor]:
    """Matrices from N(0, 0.02), norm weights 1; a pure function of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for name, shape in spec.parameter_shapes().items()
    }


def _target_parameters(
    spec: DrafterSpec, seed: int, target_layers: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The target layers that follow the deepest tap, fed as in the target.

    fc passes the deepest tap through (the other taps start at zero) and hidden_norm is the first layer's input norm,
    so that the first layer's context keys and values start as the target's own. What the target lacks (its layers may
    have no q/k norm) keeps its random start.
    """
    tensors = random_parameters(spec, seed)
    if len(target_layers) < spec.num_hidden_layers:
        raise ValueError(
            f"drafter.init=target needs a target of at least {spec.num_hidden_layers} layers; found "
            f"{len(target_layers)}. Lower drafter.num_hidden_layers or use drafter.init=random"
        )
    for i, layer in enumerate(target_layers):
        for name, value in layer.items():
            mine = f"layers.{i}.{name}"
            if mine not in tensors:
                continue
            if value.shape != tensors[mine].shape:
                raise ValueError(
                    f"drafter.init=target needs the target's shapes; {mine} is {tuple(tensors[mine].shape)}, the "
                    f"target's is {tuple(value.shape)}. Leave drafter.num_attention_heads, num_key_value_heads, "
                    "head_dim and intermediate_size unset, or use drafter.init=random"
                )
            tensors[mine] = value
    tensors["fc.weight"].zero_()
    tensors["fc.weight"][:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
    tensors["hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"].clone()
    return tensors


def _checkpoint_parameters(spec: DrafterSpec, folder: str) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(Path(folder), torch.device("cpu"))
    theirs = DrafterSpec.from_dict(checkpoint.state["drafter"])
    differing = [
        f"{name}: {ours!r} here, {theirs.to_dict()[name]!r} there"
        for name, ours in spec.to_dict().items()
        if name not in ("max_trained_length", "target_path", "gguf_file", "draft_vocab_size")
        and ours != theirs.to_dict()[name]
    ]
    if differing:
        raise ValueError(f"drafter.init={folder} was trained with other settings: {'; '.join(differing)}")
    return {name: checkpoint.drafter[name] for name in spec.parameter_shapes()}
