"""The drafter's forward pass for decoding: one block at a time, context keys and values cached per layer.

Writes the architecture of `drafter.py` out a second time, from the same definition and none of the same code, so that
what training optimises and what decoding measures are two implementations that must agree. Called by `evaluation.py`.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.drafter import DrafterSpec


class PlainDrafter:
    """The drafter of a checkpoint: one block per proposal, context keys and values cached per layer.

    Args:
        tensors: drafter parameters by name.
        embed_weight, head_weight: (vocab, D) the target's; their dtype and device are the drafter's.
        draft_vocab_ids: (V,) full ids of the reduced head in head order, or None for the full head.

    Raises:
        ValueError: the reduced head does not fit the spec.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        tensors: Mapping[str, Tensor],
        *,
        embed_weight: Tensor,
        head_weight: Tensor,
        draft_vocab_ids: Tensor | None = None,
    ) -> None:
        found = None if draft_vocab_ids is None else draft_vocab_ids.numel()
        if found != spec.draft_vocab_size:
            raise ValueError(f"draft_vocab_ids must have draft_vocab_size = {spec.draft_vocab_size} ids; found {found}")
        self.spec = spec
        self.block_size, self.target_layer_ids = spec.block_size, spec.target_layer_ids
        self.weights = {name: tensor.to(embed_weight) for name, tensor in tensors.items()}
        self.embed_weight = embed_weight
        self.draft_vocab_ids = None if draft_vocab_ids is None else draft_vocab_ids.to(embed_weight.device)
        self.head_weight = head_weight if self.draft_vocab_ids is None else head_weight[self.draft_vocab_ids]
        self.reset()

    def fresh(self) -> "PlainDrafter":
        """Another drafter with the same weights and a context of its own, to decode another text at the same time."""
        other = copy.copy(self)
        other.reset()
        return other

    def fork(self) -> "PlainDrafter":
        """Another drafter with the same weights and the same context so far; neither sees what the other adds."""
        other = copy.copy(self)
        other._keys, other._values = list(self._keys), list(self._values)
        return other

    def reset(self) -> None:
        empty = self.embed_weight.new_empty(self.spec.num_key_value_heads, 0, self.spec.head_dim)
        self._keys = [empty] * self.spec.num_hidden_layers  # per layer (H_kv, context, E)
        self._values = [empty] * self.spec.num_hidden_layers

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        """See `decoding.Proposer`. The most likely token of the (reduced) head per position, as full ids."""
        best = self.logits(tokens, features).argmax(dim=-1)  # (K-1,)
        return (best if self.draft_vocab_ids is None else self.draft_vocab_ids[best]).tolist()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], features: Tensor) -> Tensor:  # (K-1, V)
        """Extend the context by `features`, then run one block at the last token's position."""
        self._extend(features)
        anchor = len(tokens) - 1
        if self._keys[0].shape[1] != anchor:
            raise ValueError(
                f"the context must have {anchor} positions before the anchor; found {self._keys[0].shape[1]}"
            )
        spec = self.spec
        ids = torch.tensor([tokens[-1]] + [spec.mask_token_id] * (spec.block_size - 1), device=self.embed_weight.device)
        x = F.embedding(ids, self.embed_weight)  # (K, D)
        for i in range(spec.num_hidden_layers):
            x = self._layer(i, x, anchor)
        return F.linear(self._norm(x[1:], "norm"), self.head_weight)

    def _extend(self, features: Tensor) -> None:  # (n, N*D)
        context = self._norm(F.linear(features.to(self.embed_weight), self.weights["fc.weight"]), "hidden_norm")
        start = self._keys[0].shape[1]
        for i in range(self.spec.num_hidden_layers):
            keys, values = self._keys_values(i, context, start)
            self._keys[i] = torch.cat([self._keys[i], keys], dim=1)
            self._values[i] = torch.cat([self._values[i], values], dim=1)

    def _layer(self, i: int, x: Tensor, anchor: int) -> Tensor:  # (K, D) -> (K, D)
        w, attn, mlp = self.weights, f"layers.{i}.self_attn", f"layers.{i}.mlp"
        inner = self._norm(x, f"layers.{i}.input_layernorm")
        q = self._rope(self._norm(self._heads(inner, f"{attn}.q_proj"), f"{attn}.q_norm"), anchor)
        keys, values = self._keys_values(i, inner, anchor)
        mixed = F.scaled_dot_product_attention(
            q[None],
            torch.cat([self._keys[i], keys], dim=1)[None],
            torch.cat([self._values[i], values], dim=1)[None],
            attn_mask=self._mask(i, anchor),
            scale=self.spec.head_dim**-0.5,
            enable_gqa=True,
        )[0]  # (H, K, E)
        x = x + F.linear(mixed.transpose(0, 1).flatten(1), w[f"{attn}.o_proj.weight"])
        inner = self._norm(x, f"layers.{i}.post_attention_layernorm")
        gate = F.silu(F.linear(inner, w[f"{mlp}.gate_proj.weight"])) * F.linear(inner, w[f"{mlp}.up_proj.weight"])
        return x + F.linear(gate, w[f"{mlp}.down_proj.weight"])

    def _mask(self, i: int, anchor: int) -> Tensor | None:  # (K, anchor + K), True where visible
        """Context p is visible iff query - p < sliding_window; the window never hides the block itself."""
        spec, k = self.spec, self.block_size
        sliding = spec.layer_types[i] == "sliding_attention"
        if not sliding and not spec.causal:
            return None
        device = self.embed_weight.device
        query = anchor + torch.arange(k, device=device)[:, None]
        key = torch.arange(anchor + k, device=device)[None, :]
        visible = torch.ones(k, anchor + k, dtype=torch.bool, device=device)
        if sliding:
            assert spec.sliding_window is not None
            visible &= (query - key < spec.sliding_window) | (key >= anchor)
        if spec.causal:
            visible &= key <= query
        return visible

    def _keys_values(self, i: int, source: Tensor, start: int) -> tuple[Tensor, Tensor]:  # (n, D) -> (H_kv, n, E) twice
        prefix = f"layers.{i}.self_attn"
        keys = self._norm(self._heads(source, f"{prefix}.k_proj"), f"{prefix}.k_norm")
        return self._rope(keys, start), self._heads(source, f"{prefix}.v_proj")

    def _heads(self, x: Tensor, name: str) -> Tensor:  # (n, D) -> (heads, n, E)
        weight = self.weights[f"{name}.weight"]
        e = self.spec.head_dim
        return F.linear(x, weight).view(x.shape[0], weight.shape[0] // e, e).transpose(0, 1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_norm_eps)

    def _rope(self, x: Tensor, start: int) -> Tensor:  # (heads, n, E), positions start .. start + n - 1
        half = self.spec.head_dim // 2
        frequency = self.spec.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(start, start + x.shape[1], dtype=torch.float64), frequency)
        cos, sin = angle.cos().to(x), angle.sin().to(x)  # (n, E/2)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
