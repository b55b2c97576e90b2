"""The target's attention: causal over whole rows, full or sliding, without any mask tensor over (L, L).

Registered by `target.py` through transformers' public `AttentionInterface`. Because no mask function is registered
beside it, transformers builds no mask, neither while a CUDA stream captures nor otherwise. It must never swallow a
keyword that would change the result: what it does not implement it refuses by name. Imports nothing of the package.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_NOT_GIVEN = -1  # the model passes no window: its module's own applies
# Keywords of the attention call that do not change its result: positions are already in the rotated q and k.
_HARMLESS_KEYWORDS = frozenset({"position_ids", "cache_position", "position_embeddings"})


def causal_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, L, E)
    key: Tensor,  # (B, H_kv, L, E)
    value: Tensor,  # (B, H_kv, L, E)
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    **keywords: Any,
) -> tuple[Tensor, None]:  # (B, L, H, E)
    """Causal attention over whole rows without a mask, in the form transformers' `AttentionInterface` calls.

    Raises:
        ValueError: a mask, a cache (key length differs), a bidirectional flag, dropout, or a keyword whose meaning
            this function does not know and would therefore swallow (soft-cap, sinks, biases).
    """
    unknown = [n for n, v in keywords.items() if v is not None and v is not False and n not in _HARMLESS_KEYWORDS]
    if unknown:
        raise ValueError(
            f"attention of {type(module).__name__} takes {', '.join(sorted(unknown))}, which this engine's attention "
            "does not implement. Choose a target without it"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or dropout or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"attention of {type(module).__name__} must be causal over whole rows, without mask, dropout or cache; "
            f"found mask={attention_mask is not None}, causal={causal}, dropout={dropout}, lengths {query.shape[2]} "
            f"and {key.shape[2]}"
        )
    gqa = key.shape[1] != query.shape[1]
    # None, given, means a full layer even where the module keeps a window for its other kind.
    window = getattr(module, "sliding_window", None) if sliding_window == _NOT_GIVEN else sliding_window
    if window is None or window >= query.shape[2]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    else:
        out = _sliding_attention(query, key, value, window=window, scaling=scaling, gqa=gqa)
    return out.transpose(1, 2).contiguous(), None


def _sliding_attention(
    query: Tensor, key: Tensor, value: Tensor, *, window: int, scaling: float | None, gqa: bool
) -> Tensor:
    """Position i sees i - window + 1 .. i, in chunks of `window` queries with a (W, 2W) mask instead of (L, L)."""
    length = query.shape[2]
    chunks = -(-length // window)
    padding = (0, 0, 0, chunks * window - length)
    query, key, value = F.pad(query, padding), F.pad(key, padding), F.pad(value, padding)
    first = slice(0, window)
    head = F.scaled_dot_product_attention(
        query[:, :, first], key[:, :, first], value[:, :, first], is_causal=True, scale=scaling, enable_gqa=gqa
    )
    # Query i of a chunk stands at i + W among the keys of the chunk before it and its own.
    q_index = torch.arange(window, device=query.device)[:, None]
    k_index = torch.arange(2 * window, device=query.device)[None, :]
    visible = (k_index > q_index) & (k_index <= q_index + window)  # (W, 2W)

    def chunked(x: Tensor, size: int) -> Tensor:  # (B, H, n*W, E) -> (B*(n-1), H, size, E)
        pieces = x[:, :, 2 * window - size :].unfold(2, size, window)  # (B, H, n-1, E, size)
        return pieces.permute(0, 2, 1, 4, 3).flatten(0, 1)

    tail = F.scaled_dot_product_attention(
        chunked(query, window),
        chunked(key, 2 * window),
        chunked(value, 2 * window),
        attn_mask=visible,
        scale=scaling,
        enable_gqa=gqa,
    )
    tail = tail.view(-1, chunks - 1, *tail.shape[1:]).transpose(1, 2).flatten(2, 3)  # (B, H, (n-1)*W, E)
    return torch.cat([head, tail], dim=2)[:, :, :length]
