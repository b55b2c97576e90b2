"""The two folders that servers load: what each holds, and how one is written.

`hf` is the layout of z-lab's dflash, which vLLM and SGLang load, too; `speculators` is that of the package so named.
A folder holds bf16 tensors and settings, and neither optimizer nor embedding; the head only where it is a reduced one.
Settings stand in every place that some reader looks at. Nothing here reads a target or a run: `checkpoint.py` and
`export.py` call `write_servable`; `released.py` reads both layouts back.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_graph.drafter import DrafterSpec

Layout = Literal["hf", "speculators"]
WEIGHTS, SETTINGS, SHIM = "model.safetensors", "config.json", "dflash.py"
SLIDING = "sliding_attention"

# `auto_map` promises this file to transformers' AutoModel; the class itself is z-lab's.
_SHIM_TEXT = '''"""Loads this drafter with z-lab's package: `pip install dflash`."""

from dflash.model import DFlashDraftModel

__all__ = ["DFlashDraftModel"]
'''


@dataclass(frozen=True, kw_only=True)
class ServedTarget:
    """What a served drafter's settings say of its target beyond the spec.

    Attributes:
        max_position_embeddings: longest context of the target: servers make the drafter's rotary table as long.
        name: hub id or folder of the target, which speculators loads.
        architectures: the target's own, such as ("Qwen3ForCausalLM",); () where they are not known.
    """

    max_position_embeddings: int
    name: str
    architectures: tuple[str, ...] = ()


def check_servable(spec: DrafterSpec) -> None:
    """Refuse a drafter that no server would run as it was trained.

    Raises:
        ValueError: a tap is no layer of the target, the mask token is no row of its embedding, or a window is shorter
            than the block (servers let a window hide positions of the block itself; training does not).
    """
    wrong = [k for k in spec.target_layer_ids if not 0 <= k < spec.num_target_layers]
    if wrong or not spec.target_layer_ids:
        raise ValueError(
            f"target_layer_ids must be layers of the target, 0..{spec.num_target_layers - 1}; found "
            f"{list(spec.target_layer_ids)}"
        )
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        raise ValueError(
            f"mask_token_id must be a row of the exported vocabulary, 0..{spec.vocab_size - 1}; found "
            f"{spec.mask_token_id}"
        )
    if len(spec.layer_types) != spec.num_hidden_layers or (SLIDING in spec.layer_types) != (
        spec.sliding_window is not None
    ):
        raise ValueError(
            f"layer_types must name all {spec.num_hidden_layers} layers, and a sliding one goes with sliding_window; "
            f"found {list(spec.layer_types)} with sliding_window={spec.sliding_window}"
        )
    if spec.sliding_window is not None and spec.sliding_window < spec.block_size:
        raise ValueError(
            f"sliding_window must be at least block_size = {spec.block_size} to be served as trained (servers apply it "
            f"inside the block, too); found {spec.sliding_window}"
        )


def differences(spec: DrafterSpec, layout: Layout) -> dict[str, str]:
    """Loaders of a layout that would compute something other than what was trained, each with the reason.

    vLLM, z-lab's dflash and speculators run whatever is not named here as trained.
    """
    found: dict[str, str] = {}
    sliding, full = SLIDING in spec.layer_types, set(spec.layer_types) != {SLIDING}
    if layout == "speculators":
        found["SGLang"] = "does not read this layout; export --to hf"
        if sliding:
            found["speculators"] = (
                "counts sliding_window from the anchor, training and vLLM count it from each position of the block"
            )
        if spec.causal and full:
            found["speculators"] = "runs full-attention layers bidirectionally inside the block; this drafter is causal"
    elif sliding and not spec.causal:
        found["SGLang"] = "runs sliding layers causally inside the block; this drafter is bidirectional there"
    elif spec.causal and full:
        found["SGLang"] = "runs full-attention layers bidirectionally inside the block; this drafter is causal"
    if layout == "hf" and spec.num_target_layers - 1 in spec.target_layer_ids:
        found["z-lab's dflash"] = "reads the last target layer's output after the final norm, training before it"
    return found


def hf_settings(spec: DrafterSpec, target: ServedTarget) -> dict[str, Any]:
    """config.json of the `hf` layout: old and new readers look at the top level and into `dflash_config`."""
    block = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "num_target_layers": spec.num_target_layers,
        "target_layer_ids": list(spec.target_layer_ids),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **_layer_settings(spec, target),
        **block,
        "dflash_config": {**block, "causal": spec.causal, "max_trained_length": spec.max_trained_length},
    }


def speculators_settings(spec: DrafterSpec, target: ServedTarget) -> dict[str, Any]:
    """config.json of the `speculators` layout. Its layer ids name a layer's input, ours its output: ours + 1."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [k + 1 for k in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.head_vocab_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": False,
        # vLLM takes the opposite of this for every layer, full ones included, where `is_causal` does not say so first.
        "sliding_window_non_causal": not spec.causal,
        "target_hidden_size": spec.hidden_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "num_target_layers": spec.num_target_layers,
        "max_trained_length": spec.max_trained_length,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": _layer_settings(spec, target),
    }


def _layer_settings(spec: DrafterSpec, target: ServedTarget) -> dict[str, Any]:
    """The Qwen3 layers: sizes, both rope styles, window and causality."""
    sliding = spec.sliding_window is not None
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": sliding,
        # Layers from this one on slide where a reader knows no layer_types.
        "max_window_layers": spec.num_hidden_layers,
        "is_causal": spec.causal,
    }


def servable_tensors(spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's tensors in bf16 on the CPU, by the names that all loaders know.

    Raises:
        ValueError: a tensor is missing, has another shape, or is not finite; the message names it.
    """
    found = {}
    for name, shape in spec.parameter_shapes().items():
        if name not in tensors:
            raise ValueError(f"a drafter to export must have every tensor; {name} is missing")
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; found {tuple(tensor.shape)}")
        found[name] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if not torch.isfinite(found[name]).all():
            raise ValueError(f"{name} must be finite in bf16; found NaN or infinity. Export an earlier checkpoint")
    return found


def reduced_head(spec: DrafterSpec, ids: Tensor, head_weight: Tensor) -> dict[str, Tensor]:
    """What the `speculators` layout stores beside a drafter whose head has only some ids of the target's.

    Args:
        ids: (V,) full ids in head order, ascending.
        head_weight: (vocab, D) the target's, or the (V, D) rows of it that the drafter uses.

    Raises:
        ValueError: ids or head do not fit the spec.
    """
    if ids.shape != (spec.draft_vocab_size,) or not bool((ids.diff() > 0).all()):
        raise ValueError(f"a reduced head must have {spec.draft_vocab_size} ascending ids; found {tuple(ids.shape)}")
    ids = ids.to("cpu", torch.int64)
    if head_weight.shape == (spec.vocab_size, spec.hidden_size):
        head_weight = head_weight[ids.to(head_weight.device)]
    if head_weight.shape != (len(ids), spec.hidden_size):
        raise ValueError(
            f"the target's head must be {(spec.vocab_size, spec.hidden_size)}; found {tuple(head_weight.shape)}"
        )
    kept = torch.zeros(spec.vocab_size, dtype=torch.bool)
    kept[ids] = True
    return {
        "lm_head.weight": head_weight.detach().to("cpu", torch.bfloat16).contiguous(),
        "d2t": ids - torch.arange(len(ids)),  # an offset: target id = draft id + d2t[draft id]
        "t2d": kept,
    }


def write_servable(
    folder: str | Path,
    spec: DrafterSpec,
    tensors: Mapping[str, Tensor],
    target: ServedTarget,
    *,
    layout: Layout = "hf",
    head: Mapping[str, Tensor] | None = None,
    card: str | None = None,
) -> list[Path]:
    """Write a servable folder, which must not exist yet or be empty; every file is on the disk when this returns.

    Args:
        tensors: the drafter's parameters by name; others are left out.
        head: of `reduced_head`, for the layout `speculators` alone.
        card: text of README.md; None writes none.

    Returns:
        the files written.

    Raises:
        ValueError: the drafter cannot be served as trained, or the folder is in use.
    """
    check_servable(spec)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"a drafter is exported into a new or an empty folder; {folder} is neither")
    if (head is not None) != (layout == "speculators" and spec.draft_vocab_size is not None):
        raise ValueError(
            f"a reduced head is stored by the layout speculators, and by no other; found layout={layout}, "
            f"draft_vocab_size={spec.draft_vocab_size}, head={'given' if head else 'none'}"
        )
    settings = hf_settings(spec, target) if layout == "hf" else speculators_settings(spec, target)
    texts = {SETTINGS: json.dumps(settings, indent=2) + "\n"}
    if layout == "hf":
        texts[SHIM] = _SHIM_TEXT
    if card is not None:
        texts["README.md"] = card
    weights = {**servable_tensors(spec, tensors), **(head or {})}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes files that only the owner can read; a server is often another user.
    (folder / WEIGHTS).chmod((folder / SETTINGS).stat().st_mode)
    files = [folder / name for name in (WEIGHTS, *texts)]
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return files
