"""The drafter and its loss once more, dense and slow, from their definition: the truth that tests compare with.

Rows are not padded, anchors are (row, position) pairs, the mask is an (A*K, T + A*K) boolean table filled by plain
loops, logits are whole, gradients are autograd's. Uses no code of the package.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = list[tuple[list[int], list[int], Tensor]]  # tokens, loss mask, features (n, N*D) of each row


@dataclass
class Dense:
    """loss = sum(w * row loss), weight = sum(w), logits (A, K, V), trained: (a, k) -> label; nll, kl: sums times w."""

    loss: Tensor
    weight: float
    logits: Tensor
    trained: dict[tuple[int, int], int]
    nll: float
    kl: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """x: (n, heads, E); components j and j + E/2 turn together by position * theta^(-2j/E)."""
    half = x.shape[-1] // 2
    angles = torch.tensor(
        [[p * theta ** (-2 * j / (2 * half)) for j in range(half)] for p in positions], dtype=torch.float64
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def visible(spec: Any, layer_type: str, lengths: list[int], anchors: list[tuple[int, int]]) -> Tensor:
    """(A*K, T + A*K) bool, T the sum of the rows' lengths: which keys each position of each block sees."""
    where = [(r, p) for r, n in enumerate(lengths) for p in range(n)]
    size, total = spec.block_size, len(where)
    mask = np.zeros((len(anchors) * size, total + len(anchors) * size), dtype=bool)
    for a, (row, anchor) in enumerate(anchors):
        for k in range(size):
            for t, (r, p) in enumerate(where):
                near = layer_type == "full_attention" or (anchor + k) - p < spec.sliding_window
                mask[a * size + k, t] = r == row and p < anchor and near
            for other in range(size):
                mask[a * size + k, total + a * size + other] = not spec.causal or other <= k
    return torch.from_numpy(mask)


def hidden_states(spec: Any, w: dict[str, Tensor], embed: Tensor, rows: Rows, anchors: list[tuple[int, int]]) -> Tensor:
    """(A*K, D) final-norm hidden states of all block positions."""
    heads, kv_heads, e, eps = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.rms_norm_eps
    lengths = [len(tokens) for tokens, _, _ in rows]
    offsets = range(spec.block_size)
    block_at = [p + k for _, p in anchors for k in offsets]
    context_at = [p for n in lengths for p in range(n)]
    ids = [rows[r][0][p] if k == 0 else spec.mask_token_id for r, p in anchors for k in offsets]
    context = rms_norm(torch.cat([f for _, _, f in rows]) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embed[ids]
    for i, layer_type in enumerate(spec.layer_types):
        p = f"layers.{i}."
        inner = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        keys_from = torch.cat([context, inner])
        q = (inner @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, e)
        k = (keys_from @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, e)
        v = (keys_from @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, e)
        q = rope(rms_norm(q, w[p + "self_attn.q_norm.weight"], eps), block_at, spec.rope_theta)
        k = rope(rms_norm(k, w[p + "self_attn.k_norm.weight"], eps), context_at + block_at, spec.rope_theta)
        mask = visible(spec, layer_type, lengths, anchors)
        mixed = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            scores = (q[:, h] @ k[:, shared].T / math.sqrt(e)).masked_fill(~mask, -math.inf)
            mixed.append(torch.softmax(scores, -1) @ v[:, shared])
        x = x + torch.cat(mixed, -1) @ w[p + "self_attn.o_proj.weight"].T
        inner = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = inner @ w[p + "mlp.gate_proj.weight"].T, inner @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"], eps)


def dense(
    spec: Any,
    w: dict[str, Tensor],
    embed: Tensor,  # (vocab, D)
    head: Tensor,  # (V, D)
    rows: Rows,
    anchors: list[tuple[int, int]],
    *,
    gamma: float,
    head_ids: list[int] | None = None,  # full ids of the reduced head, in head order
    teacher: list[Tensor] | None = None,  # (n, V) of each row: the target's logits for the token after each position
    kl_weight: float = 0.0,
    labels: str = "data",
    d_pace_alpha: float | None = None,
) -> Dense:
    """Loss and logits of one job. Decayed weights are rounded to float32, as jobs hold them."""
    logits = (hidden_states(spec, w, embed, rows, anchors) @ head.T).view(len(anchors), spec.block_size, -1)
    loss, weight, trained, parts = torch.zeros((), dtype=torch.float64), 0.0, {}, [0.0, 0.0]
    for a, (row, anchor) in enumerate(anchors):
        tokens, loss_mask, _ = rows[row]
        nlls, kls = {}, {}
        for k in range(1, spec.block_size):
            at = anchor + k
            if at >= len(tokens) or not loss_mask[at]:
                continue
            if head_ids is not None and tokens[at] not in head_ids:
                continue
            label = tokens[at] if head_ids is None else head_ids.index(tokens[at])
            if labels == "target":
                assert teacher is not None
                label = int(teacher[row][at - 1].argmax())
            log_q = torch.log_softmax(logits[a, k], 0)
            nlls[k] = -log_q[label]
            log_p = log_q.detach() if teacher is None else torch.log_softmax(teacher[row][at - 1], 0)
            kls[k] = (log_p.exp() * (log_p - log_q)).sum()
            trained[a, k] = label
        for k, row_weight in row_weights(spec.block_size, nlls, gamma, d_pace_alpha).items():
            loss = loss + row_weight * ((1 - kl_weight) * nlls[k] + kl_weight * kls[k])
            weight += row_weight
            parts = [part + row_weight * float(x[k].detach()) for part, x in zip(parts, (nlls, kls), strict=True)]
    return Dense(loss, weight, logits, trained, *parts)


def row_weights(size: int, nlls: dict[int, Tensor], gamma: float, d_pace_alpha: float | None) -> dict[int, float]:
    """Weight of each trained row k of one block: static decay, or D-PACE from the probabilities of the labels."""
    if d_pace_alpha is None:
        return {k: float(np.float32(math.exp(-(k - 1) / gamma))) for k in nlls}
    reached, product = [0.0] * size, 1.0
    for k in range(1, size):
        if k in nlls:
            product *= (1 - d_pace_alpha) * math.exp(-float(nlls[k].detach())) + d_pace_alpha
            reached[k] = product
    return {k: sum(reached[k:]) for k in nlls}


def dense_with_grads(spec: Any, w: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Dense, dict[str, Tensor]]:
    """`dense`, and d loss / d w for every parameter (zero where a parameter has no part in the loss)."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
    result = dense(spec, leaves, *args, **kwargs)
    grads = torch.autograd.grad(result.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    result.logits, result.loss = result.logits.detach(), result.loss.detach()
    return result, dict(zip(leaves, grads, strict=True))
