"""Two trivial drafters made from the training rows, which a trained drafter must beat.

`BigramTable` chains the most frequent next token; `BlockTable` looks up (anchor token, k). Neither sees the context.
Ties go to the smallest id; an unseen key gets the most frequent supervised token. Called by `evaluation.py`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_graph.data import TokenRows

_Ids = NDArray[np.int64]


def _most_frequent(keys: _Ids, values: _Ids) -> dict[int, int]:
    """Per key the most frequent value, the smallest among equals. keys, values: (n,) ids below 2^31."""
    pairs, counts = np.unique(keys << 32 | values, return_counts=True)
    key, value = pairs >> 32, pairs & 0xFFFFFFFF
    order = np.lexsort((value, -counts, key))
    first = np.ones(len(order), dtype=bool)
    first[1:] = key[order][1:] != key[order][:-1]
    chosen = order[first]
    return dict(zip(key[chosen].tolist(), value[chosen].tolist(), strict=True))


def _rows(rows: TokenRows) -> Iterator[tuple[_Ids, NDArray[np.bool_]]]:
    for i in range(len(rows)):
        tokens, mask = rows.row(i)
        yield tokens.astype(np.int64), mask.astype(bool)


def _fallback(rows: TokenRows) -> int:
    supervised = np.concatenate([tokens[1:][mask[1:]] for tokens, mask in _rows(rows)])
    return int(np.bincount(supervised).argmax())


class BigramTable:
    """Previous token -> its most frequent supervised successor, applied K - 1 times in a chain."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, rows: TokenRows, block_size: int) -> None:
        self.block_size = block_size
        keys = np.concatenate([tokens[:-1][mask[1:]] for tokens, mask in _rows(rows)])
        values = np.concatenate([tokens[1:][mask[1:]] for tokens, mask in _rows(rows)])
        self.table = _most_frequent(keys, values)
        self.fallback = _fallback(rows)

    def reset(self) -> None:
        """Nothing to forget."""

    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        """K - 1 tokens that follow the anchor, each from the one before it."""
        draft = [tokens[-1]]
        for _ in range(self.block_size - 1):
            draft.append(self.table.get(draft[-1], self.fallback))
        return draft[1:]


class BlockTable:
    """(anchor token, k) -> the most frequent token at anchor + k: the best that a drafter blind to context can do.

    Counted where a trainer would place an anchor (the anchor and the next token supervised) and train a row (the token
    at anchor + k supervised).
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, rows: TokenRows, block_size: int) -> None:
        self.block_size = block_size
        self.fallback = _fallback(rows)
        self.tables = []
        for k in range(1, block_size):
            keys, values = [], []
            for tokens, mask in _rows(rows):
                if len(tokens) > k:
                    chosen = mask[:-k] & mask[k:] & mask[1 : len(mask) - k + 1]
                    keys.append(tokens[:-k][chosen])
                    values.append(tokens[k:][chosen])
            self.tables.append(_most_frequent(np.concatenate(keys), np.concatenate(values)) if keys else {})

    def reset(self) -> None:
        """Nothing to forget."""

    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        """K - 1 tokens that follow the anchor, each from the anchor and its distance."""
        return [table.get(tokens[-1], self.fallback) for table in self.tables]
