"""Holds a decoded text against the target's own greedy text, with an exception for near-ties alone.

A cached forward of a few tokens sums in another order than one of the whole text, so a token may differ where the
logits of a full forward leave the choice open, and nowhere else. Called by `evaluation.py` and `held_out.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dflash_graph.decoding import DecodeResult, full_forward_gaps

# In 16 bits, logits near 20 are themselves rounded to multiples of 1/8 or 1/64.
NEAR_TIE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}


def check_greedy(
    model: Any, result: DecodeResult, *, gap: float, greedy: Sequence[int] | None = None, name: str = "the text"
) -> bool:
    """Hold a decoded text against the target: every token must be the greedy one under a full forward of the text.

    That is greedy decoding itself, position by position. Where the token is not the best one, the best one may lead by
    less than `gap` only. `greedy`, the text of `greedy_decode`, may differ from a position on whose top-2 gap is below
    `gap`.

    Returns:
        whether there was such a near-tie.

    Raises:
        RuntimeError: any other difference.
    """
    shortfall, top2_gap = full_forward_gaps(model, result.prompt, result.tokens)
    worst = int(shortfall.argmax())
    if not bool(torch.isfinite(shortfall).all() & torch.isfinite(top2_gap).all()):
        raise RuntimeError(f"{name} cannot be checked: the target's logits are not finite. Try target.dtype=float32")
    if float(shortfall[worst]) >= gap:
        raise RuntimeError(
            f"{name} is not greedy: generated token {worst} falls short of the best by {float(shortfall[worst]):.3g} "
            f"under a full forward; less than {gap:g} is allowed"
        )
    differs = bool((shortfall > 0).any())
    if greedy is not None and tuple(greedy) != result.tokens:
        pairs = enumerate(zip(greedy, result.tokens, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(greedy), len(result.tokens)))
        if first >= len(top2_gap) or float(top2_gap[first]) >= gap:
            raise RuntimeError(
                f"{name} differs from the target's own greedy decoding at generated token {first}, where the target "
                f"is not near a tie (gap below {gap:g})"
            )
        differs = True
    return differs
