"""The mask token: an id that the drafter reads where it must predict, and that no row may use.

Owns the choice and the check. Called by plan.py and export.py.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.token_rows import SCAN_TOKENS, TokenRows

logger = logging.getLogger(__name__)


def check_mask_token(rows: TokenRows, mask_token_id: int, name: str = "the data") -> None:
    """Refuse a mask token that the rows (called `name` in the message) use: it could not be told from text.

    Raises:
        ValueError: the id occurs in a row.
    """
    for start in range(0, len(rows.tokens), SCAN_TOKENS):
        hits = np.flatnonzero(rows.tokens[start : start + SCAN_TOKENS] == mask_token_id)
        if len(hits):
            row = int(np.searchsorted(rows.offsets, start + hits[0], side="right")) - 1
            raise ValueError(
                f"the mask token must not occur in {name}; id {mask_token_id} occurs first in row {row}: set "
                "drafter.mask_token_id to an id that no row uses, or leave it unset"
            )


def choose_mask_token(tokenizer: Any, vocab_size: int, *rows: TokenRows, mask_token_id: int | None = None) -> int:
    """The mask token's id; the log says where it came from.

    In order: `mask_token_id`; the tokenizer's mask token; an added special token that neither the rows nor the chat
    template use (one named reserved or unused first); an embedding row beyond the tokenizer; the highest id that the
    rows never use. Never the pad, end, begin or unknown token.

    Args:
        vocab_size: rows of the target's embedding.

    Raises:
        ValueError: `mask_token_id` occurs in the rows or is no free row of the embedding, or no id is free.
    """
    roles = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    taken = {getattr(tokenizer, role) for role in roles} - {None}
    if mask_token_id is not None:
        if not 0 <= mask_token_id < vocab_size or mask_token_id in taken:
            raise ValueError(
                f"drafter.mask_token_id must be in [0, {vocab_size}) and none of the tokenizer's pad, end, begin or "
                f"unknown tokens {sorted(taken)}; found {mask_token_id}"
            )
        for each in rows:
            check_mask_token(each, mask_token_id)
        return mask_token_id
    used = np.zeros(max([vocab_size, *taken, *(each.report.max_token_id for each in rows)]) + 1, dtype=bool)
    used[[*taken]] = True
    for each in rows:
        for start in range(0, len(each.tokens), SCAN_TOKENS):
            used[each.tokens[start : start + SCAN_TOKENS]] = True
    chosen, source = _free_id(tokenizer, vocab_size, used)
    logger.log(
        logging.WARNING if source.startswith("the ordinary") else logging.INFO, "mask token %d: %s", chosen, source
    )
    return chosen


def _free_id(tokenizer: Any, vocab_size: int, used: NDArray[np.bool_]) -> tuple[int, str]:
    own = tokenizer.mask_token_id
    if own is not None and own < vocab_size and not used[own]:
        return int(own), "the tokenizer's mask token"
    template = str(tokenizer.chat_template or "")
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < vocab_size}
    free = [i for i, name in added.items() if not used[i] and name not in template]
    free.sort(key=lambda i: (not any(word in added[i].lower() for word in ("mask", "reserved", "unused")), i))
    if free:
        return free[0], f"the special token {added[free[0]]!r}, which the data never uses"
    for beyond in range(len(tokenizer), vocab_size):
        if not used[beyond]:
            return beyond, "an embedding row beyond the tokenizer"
    unused = np.flatnonzero(~used[:vocab_size])
    if not len(unused):
        raise ValueError("no id of the vocabulary is free for the mask token: set drafter.mask_token_id")
    token = tokenizer.convert_ids_to_tokens(int(unused[-1]))
    return int(unused[-1]), f"the ordinary token {token!r}, the highest id that the data never uses"
