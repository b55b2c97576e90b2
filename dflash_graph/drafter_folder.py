"""Any folder that holds a drafter, read for evaluation: a run, a checkpoint, or what a server loads, ours or not.

What the folder does not say is taken from its target or refused by name, and a drafter that does not belong to its
target is refused before a weight of the target is loaded. Called by `evaluation.py` and `eval_command.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.checkpoint_files import DRAFTER
from dflash_graph.config import Config, TargetConfig, load_config
from dflash_graph.drafter import DrafterSpec
from dflash_graph.released import is_released, read_released
from dflash_graph.serving_layouts import WEIGHTS
from dflash_graph.target import ModelFacts, read_facts

# What a released folder may leave open, because the target tells it or no forward pass needs it.
_FROM_TARGET = frozenset({"target_path", "gguf_file", "num_target_layers", "max_trained_length"})
# Rows of the target's own head and embedding that some layouts store beside the drafter.
_BORROWED = ("lm_head.weight", "verifier_lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundDrafter:
    """A drafter and the target that it belongs to.

    Attributes:
        path: the folder that was read: a run's newest checkpoint, for a run.
        tensors: by the spec's names, float32 on the CPU.
        draft_vocab_ids: (V,) full ids of a reduced head in head order, or None.
        config: of the run, where the folder lies in one.
        borrowed: stored copies of the target's own tensors, by name; `check_borrowed` compares them.
    """

    path: Path
    spec: DrafterSpec
    tensors: dict[str, Tensor]
    draft_vocab_ids: Tensor | None
    target: TargetConfig
    config: Config | None = None
    borrowed: dict[str, Tensor]


def read_drafter(path: str | Path, target: TargetConfig | None = None) -> FoundDrafter:
    """Read a run folder (its newest whole checkpoint), a checkpoint folder, or an exported folder of either layout.

    Args:
        target: where the target is; None takes what the run, the checkpoint or the export recorded.

    Raises:
        ValueError: the folder holds no drafter, the target is not known or cannot be read, or the two do not fit.
    """
    path = Path(path)
    checkpoint = path if (path / DRAFTER).is_file() else None
    if checkpoint is None and is_released(path):
        found = _released(path, target)
    else:
        folder = checkpoint or find_latest(path)
        if folder is None:
            raise ValueError(
                f"{path} must be a run folder with a whole checkpoint, a checkpoint folder, or an exported drafter "
                "(config.json and model.safetensors); found none of them"
            )
        found = _trained(folder, target)
    return _resolve(found)


def _trained(folder: Path, target: TargetConfig | None) -> FoundDrafter:
    checkpoint = load_checkpoint(folder)
    config_file = folder.resolve().parent.parent / "config.yaml"
    config = load_config(config_file) if config_file.is_file() else None
    spec = DrafterSpec.from_dict(checkpoint.state["drafter"])
    recorded = config.target if config else TargetConfig(path=spec.target_path, gguf_file=spec.gguf_file)
    return FoundDrafter(
        path=checkpoint.path,
        spec=spec,
        tensors={name: checkpoint.drafter[name] for name in spec.parameter_shapes()},
        draft_vocab_ids=checkpoint.drafter.get("draft_vocab_ids"),
        target=target or recorded,
        config=config,
        borrowed={},
    )


def _released(folder: Path, target: TargetConfig | None) -> FoundDrafter:
    released = read_released(folder)
    if guessed := sorted(released.unknown - _FROM_TARGET):
        raise ValueError(f"{folder} must say {', '.join(guessed)}; no target can tell. Add it to config.json")
    if target is None:
        recorded = released.spec.target_path or _base_model(folder)
        if not recorded:
            raise ValueError(f"{folder} does not say which model it drafts for; name it with --target PATH")
        target = TargetConfig(path=recorded)
    spec = released.spec
    if "num_target_layers" in released.unknown:
        layers = _facts(target).num_hidden_layers
        if max(spec.target_layer_ids) >= layers:
            raise ValueError(
                f"{folder} reads target layers {list(spec.target_layer_ids)}; target {target.path} has only {layers}"
            )
        spec = replace(spec, num_target_layers=layers)
    return FoundDrafter(
        path=folder,
        spec=spec,
        tensors=released.tensors,
        draft_vocab_ids=released.draft_vocab_ids,
        target=target,
        borrowed=_stored(folder),
    )


def _base_model(folder: Path) -> str:
    """The target that a model card names; "" where there is none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        start, header, _ = text.split("---\n", 2)
        base = yaml.safe_load(header).get("base_model") if not start.strip() else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ""
    if isinstance(base, list) and len(base) == 1:
        base = base[0]
    return base if isinstance(base, str) else ""


def _stored(folder: Path) -> dict[str, Tensor]:
    """Copies of the target's head and embedding among an exported folder's weights."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{Path(WEIGHTS).stem}*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    if name.removeprefix("model.") in _BORROWED:
                        found[name.removeprefix("model.")] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    return found


def _facts(target: TargetConfig) -> ModelFacts:
    try:
        return read_facts(target)
    except ValueError as error:
        raise ValueError(
            f"{error}\nIf the drafter's target is somewhere else, or a GGUF file, name it: --target PATH "
            "[--target-gguf FILE]"
        ) from None


def _resolve(found: FoundDrafter) -> FoundDrafter:
    """Refuse a drafter that does not fit its target; every difference is named."""
    spec, target = found.spec, found.target
    facts = _facts(target)
    expected: Mapping[str, tuple[Any, Any]] = {
        "hidden_size": (spec.hidden_size, facts.hidden_size),
        "layers": (spec.num_target_layers, facts.num_hidden_layers),
        "vocabulary": (spec.vocab_size, facts.vocab_size),
    }
    wrong = [
        f"{name}: {ours} in the drafter, {its} in the target" for name, (ours, its) in expected.items() if ours != its
    ]
    if wrong:
        raise ValueError(
            f"the drafter {found.path} does not belong to target {target.path}: {'; '.join(wrong)}. Name its own "
            "target (--target)"
        )
    return replace(found, spec=replace(spec, target_path=target.path, gguf_file=target.gguf_file))


def check_borrowed(found: FoundDrafter, embed_weight: Tensor, head_weight: Tensor) -> None:
    """Refuse a drafter that brings a head or an embedding of its own: decoding uses the target's.

    Args:
        embed_weight, head_weight: (vocab, D) the target's.

    Raises:
        ValueError: a stored copy differs from the target's by more than bf16 rounding.
    """
    for name, stored in found.borrowed.items():
        expected = embed_weight if name == "embed_tokens.weight" else head_weight
        if name == "lm_head.weight" and found.draft_vocab_ids is not None:
            expected = head_weight[found.draft_vocab_ids.to(head_weight.device)]
        same = stored.shape == expected.shape and torch.allclose(
            stored.float(), expected.detach().float().cpu(), rtol=2**-7, atol=1e-6
        )
        if not same:
            raise ValueError(
                f"{found.path} stores {name} of its own, which is not the one of target {found.target.path}: another "
                "target, or a drafter that was trained with a head of its own, which is not supported"
            )
