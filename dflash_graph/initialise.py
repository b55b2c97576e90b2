"""The parameters a run starts from: random, the target's own layers, another checkpoint, or a released drafter.

Pure functions of their arguments, on the CPU in float32; `drafter.init` chooses among them. Called by `trainer.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_graph.checkpoint import load_checkpoint
from dflash_graph.drafter import DrafterSpec
from dflash_graph.released import is_released, read_released

# What a drafter's weights do not depend on: where its target lies, how long its rows were, which ids its head has.
_FREE = frozenset({"max_trained_length", "target_path", "gguf_file", "draft_vocab_size"})
# The setting that brings a run to the drafter it starts from; the others follow from the target.
_SETTINGS = frozenset(
    {
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
        *("block_size", "target_layer_ids", "mask_token_id", "layer_types", "sliding_window", "causal"),
    }
)


def initial_parameters(
    spec: DrafterSpec, init: str, *, seed: int, target_layers: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Named float32 tensors for `FlatParameters.load`.

    Args:
        init: "random", "target", the folder of a checkpoint, or that of a released drafter of either layout.
        target_layers: state dicts of `num_hidden_layers` decoder layers of the target (`Target.kept_layers`).

    Raises:
        ValueError: the target's layers do not have this drafter's shapes, or the folder's drafter is another one; the
            message names what differs.
    """
    if init == "random":
        return random_parameters(spec, seed)
    if init == "target":
        return _target_parameters(spec, seed, target_layers)
    return _stored_parameters(spec, init)


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


def _stored_parameters(spec: DrafterSpec, folder: str) -> dict[str, Tensor]:
    if is_released(folder):
        released = read_released(folder)
        _check_same(spec, released.spec, folder, unknown=released.unknown)
        return released.tensors
    checkpoint = load_checkpoint(Path(folder), torch.device("cpu"))
    _check_same(spec, DrafterSpec.from_dict(checkpoint.state["drafter"]), folder)
    return {name: checkpoint.drafter[name] for name in spec.parameter_shapes()}


def _check_same(spec: DrafterSpec, other: DrafterSpec, folder: str, unknown: Iterable[str] = ()) -> None:
    """Refuse a drafter that is not the one this run trains; `unknown` is what its folder does not say."""
    theirs = other.to_dict()
    skipped = _FREE | set(unknown)
    names = [name for name, ours in spec.to_dict().items() if name not in skipped and ours != theirs[name]]
    if not names:
        return
    differing = "; ".join(f"{name}: {spec.to_dict()[name]!r} here, {theirs[name]!r} there" for name in names)
    settings = " ".join(f"drafter.{name}={_as_setting(theirs[name])}" for name in names if name in _SETTINGS)
    target = [name for name in names if name not in _SETTINGS]
    advice = [f"Train with {settings}"] * bool(settings)
    advice += [f"Choose the target it belongs to: {', '.join(target)} follow from the target"] * bool(target)
    raise ValueError(
        f"drafter.init={folder} was trained with other settings: {differing}. {'. '.join(advice)}, or use "
        "drafter.init=random"
    )


def _as_setting(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower()
