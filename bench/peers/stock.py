"""The drafter in plain torch: transformers' Qwen3 modules, SDPA with a dense mask, and two ways to the loss.

`naive` has full (R, V) logits and `F.cross_entropy`; `linear_cross_entropy` has torch's chunked function of that name,
with its default options. Both run the head on the trained rows only.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.peers.contestant import ModuleContestant, load_weights
from bench.peers.problem import Problem, frozen_embedding, qwen3_config


def mean_loss(hidden: Tensor, head: Tensor, labels: Tensor, kind: str) -> Tensor:
    """Mean cross-entropy of hidden (R, D) against head (V, D) at labels (R,), by the named way."""
    if kind == "naive":
        return F.cross_entropy(F.linear(hidden, head), labels)
    if kind == "linear_cross_entropy":
        if not hasattr(F, "linear_cross_entropy"):
            raise RuntimeError(f"torch {torch.__version__} has no linear_cross_entropy; it needs 2.13")
        return F.linear_cross_entropy(hidden, head, labels, options=nn.LinearCrossEntropyOptions())
    raise ValueError(f"kind must be naive or linear_cross_entropy; found {kind!r}")


class Layer(nn.Module):
    """One decoder layer whose keys and values come from the context and the blocks."""

    def __init__(self, config, layer_index: int) -> None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

        super().__init__()
        self.self_attn = Qwen3Attention(config, layer_index)  # its projections and norms; its forward is not used
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """hidden (B, Q, D), context (B, L, D), rope over L + Q positions, mask (B, 1, Q, L + Q) bool."""
        hidden = hidden + self.attend(self.input_layernorm(hidden), context, rope, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def attend(self, inner: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, repeat_kv

        module, (cos, sin) = self.self_attn, rope
        sources = torch.cat([context, inner], dim=1)

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, module.head_dim))

        queries = module.q_norm(heads(module.q_proj(inner))).transpose(1, 2)
        keys = module.k_norm(heads(module.k_proj(sources))).transpose(1, 2)
        values = heads(module.v_proj(sources)).transpose(1, 2)
        count = inner.shape[1]
        queries, _ = apply_rotary_pos_emb(queries, queries, cos[:, -count:], sin[:, -count:])
        keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        groups = module.num_key_value_groups
        out = F.scaled_dot_product_attention(
            queries, repeat_kv(keys, groups), repeat_kv(values, groups), attn_mask=mask, scale=module.scaling
        )
        return module.o_proj(out.transpose(1, 2).flatten(-2))


class StockDrafter(nn.Module):
    def __init__(self, config) -> None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

        super().__init__()
        taps = len(config.dflash_config["target_layer_ids"])
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, features: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        context = self.hidden_norm(self.fc(features))
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, context, rope, mask)
        return self.norm(hidden)


def dense_mask(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """(B, 1, Q, L + Q) bool, Q = anchors * K: context before the anchor, and the block itself."""
    starts = anchors.repeat_interleave(block_size, dim=1)  # (B, Q)
    context = torch.arange(length) < starts[..., None]
    block = torch.arange(starts.shape[1]) // block_size
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


class Stock(ModuleContestant):
    def __init__(self, problem: Problem, kind: str) -> None:
        shape, self.kind = problem.shape, kind
        self.model = StockDrafter(qwen3_config(shape))
        load_weights(self.model, problem.take_parameters())
        self.problem, self.embed = problem, frozen_embedding(problem.embed)
        self.shape = shape

    def step(self) -> None:
        shape, problem = self.shape, self.problem
        anchors, k = problem.anchors, shape.block_size
        offsets = torch.arange(k)
        ids = torch.full((*anchors.shape, k), shape.mask_token_id)
        ids[..., 0] = torch.gather(problem.tokens, 1, anchors)
        context_positions = torch.arange(shape.row_length).expand(shape.num_rows, -1)
        positions = torch.cat([context_positions, (anchors[..., None] + offsets).flatten(1)], dim=1)
        mask = dense_mask(anchors, shape.row_length, k)
        hidden = self.model(problem.features, self.embed(ids.flatten(1)), positions, mask)
        trained = hidden.unflatten(1, (-1, k))[:, :, 1:].reshape(-1, shape.hidden_size)
        loss = mean_loss(trained, problem.embed, problem.labels().flatten(), self.kind)
        loss.backward()
        self.last = loss.detach()
