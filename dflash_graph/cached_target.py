"""A full causal LM as decoding uses it: a key/value cache that can be rolled back, and the features of its taps.

Knows neither drafters nor how tokens are chosen: it gives logits. Called by `decoding.py` and `step_times.py`.
"""

import inspect
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache

from dflash_graph.config import TargetConfig


def target_settings(target: TargetConfig) -> Any:
    """transformers' configuration of a target."""
    options: dict[str, Any] = {} if target.gguf_file is None else {"gguf_file": target.gguf_file}
    return AutoConfig.from_pretrained(
        target.path, revision=target.revision, trust_remote_code=target.trust_remote_code, **options
    )


def check_rollback(config: Any) -> None:
    """Refuse a model, by its transformers configuration, whose memory of a text cannot be shortened.

    Raises:
        ValueError: it has linear-attention layers, which keep a state instead of keys and values.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if "linear_attention" in kinds:
        raise ValueError("speculative decoding cannot roll back linear-attention layers; this target has some")


class DecodingTarget(Protocol):
    """A target with a memory of the text, as `speculate` uses one."""

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def extend(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def rollback(self, count: int) -> None: ...


class CachedTarget:
    """A full causal LM with a key/value cache and hooks on its taps; lm_head runs only where it is asked for.

    Belongs to the thread that makes it; several threads may each have one over the same model.

    Raises:
        ValueError: the target has linear-attention layers, whose state cannot be rolled back.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        check_rollback(model.config)
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # renamed in transformers 5.24
        self._taps: dict[int, Tensor] = {}
        layers = model.get_decoder().layers
        self._handles = [layers[k].register_forward_hook(self._hook(k)) for k in target_layer_ids]
        self._target_layer_ids = tuple(target_layer_ids)
        self._cache: Any = None

    def _hook(self, k: int) -> Any:
        owner = threading.get_ident()

        def keep(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == owner:  # another thread may decode another text with the same model
                self._taps[k] = (result if isinstance(result, Tensor) else result[0])[0]  # (n, D)

        return keep

    def __enter__(self) -> "CachedTarget":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Begin a text: logits (1, V) of its next token, and the (n, N*D) features of all its positions."""
        # Without a config every layer of the cache grows, sliding ones too, so that any of them can be cropped.
        self._cache = DynamicCache()
        return self._run(tokens, 0, 1)

    def extend(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append tokens: logits (n, V) of the token after each of them, and their (n, N*D) features."""
        return self._run(tokens, int(self._cache.get_seq_length()), len(tokens))

    def rollback(self, count: int) -> None:
        """Remove the last `count` positions from the cache."""
        if count:
            self._cache.crop(-count)

    @torch.no_grad()
    def _run(self, tokens: Sequence[int], start: int, logits_to_keep: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        cache = {self._cache_name: self._cache}
        out = self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=logits_to_keep, **cache)
        taps = [self._taps[k] for k in self._target_layer_ids]
        features = torch.cat(taps, dim=-1) if taps else torch.empty(len(tokens), 0, device=self.device)
        return out.logits[0], features
