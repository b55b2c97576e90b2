"""Embedding and head of a target, and nothing else of it: what training from a store needs.

Owns the reading of these two tensors without the layers in between; where a checkpoint keeps them under other names
than the model does, or in another form, the whole model is loaded on the host and given up again. Called by
`store_worker.py`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_graph.config import TargetConfig
from dflash_graph.store_identity import weight_files
from dflash_graph.target import ModelFacts, Target, read_facts

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class HeadTarget:
    """What is left of a `Target` when its features come from disk.

    Attributes:
        embed_weight, head_weight: (V, D) frozen; the same tensor when the target ties them.
        decoder: no layers. kept_layers: as `Target`'s.
    """

    def __init__(
        self, config: TargetConfig, *, target_layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype,
        keep_layers: int = 0,
    ) -> None:  # fmt: skip
        self.facts: ModelFacts = read_facts(config)
        self.target_layer_ids = target_layer_ids
        self.kept_layers: list[dict[str, Tensor]] = []
        found = None if keep_layers else read_head(config)
        self.whole = found is None  # the whole model had to be loaded
        if found is None:
            full = Target(
                config,
                target_layer_ids=target_layer_ids,
                output=torch.empty(16, len(target_layer_ids) * self.facts.hidden_size, dtype=dtype),
                device=torch.device("cpu"),
                dtype=dtype,
                keep_layers=keep_layers,
            )
            found = full.embed_weight, full.head_weight
            self.kept_layers = full.kept_layers
        embed, head = found
        tied = embed.data_ptr() == head.data_ptr()
        self.embed_weight = embed.to(device, dtype)
        self.head_weight = self.embed_weight if tied else head.to(device, dtype)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()


def read_head(config: TargetConfig) -> tuple[Tensor, Tensor] | None:
    """(embedding, head) on the host as the checkpoint has them, or None where they cannot be told by name."""
    files = weight_files(config)
    if config.gguf_file is not None or any(path.suffix != ".safetensors" for path in files):
        return None
    if (names := _names(config)) is None:
        return None
    tensors = {name: _read(files, name) for name in names}
    embed, head = tensors[names[0]], tensors[names[1]]
    facts = read_facts(config)
    if head is None and facts.tied:
        head = embed
    if embed is None or head is None or embed.shape != head.shape or embed.shape[0] != facts.vocab_size:
        return None
    if embed.dtype not in _FLOATS or head.dtype not in _FLOATS:
        return None
    return embed, embed if facts.tied else head


def _names(config: TargetConfig) -> tuple[str, str] | None:
    """Parameter names of embedding and head, from a model without memory; None where none can be made."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    settings = AutoConfig.from_pretrained(config.path, revision=config.revision, **options)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, **options)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # code that cannot build without memory
        return None
    found = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        names = [name for name, other in model.named_modules() if other is module]
        found.append(f"{names[0]}.weight" if names else "")
    return found[0], found[1]


def _read(files: list[Path], name: str) -> Tensor | None:
    for path in files:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: Tensor = file.get_tensor(name)
                return tensor
    return None
