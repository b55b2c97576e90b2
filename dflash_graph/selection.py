"""Which of the usable rows are trained on, how often, and which are held out: duplicates, leaks, hold-out, weights.

A pure function of the rows' records in the order of the input, so that neither processes nor interruptions matter. The
rules, in this order: a row whose key stood before is a duplicate; one whose key is in the validation rows is a leak; a
row is held out by the digest of its prompt, so that one prompt is never on both sides; the rest appears as often as
its source's weight says. Called by data_writer.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Deduplicate = Literal["none", "exact", "prompt"]
DUPLICATE, LEAK, HELD_OUT, WEIGHT = "duplicate", "in_validation", "held_out", "weight"


@dataclass(frozen=True)
class Selection:
    """What becomes of each of n input rows.

    Attributes:
        copies: (n,) how often a row is in the training rows; 0 for all others.
        held_out: (n,) bool.
        reason: (n,) "" for a row that is kept, was dropped before, or the name of the rule that took it out.
        original: (n,) for a duplicate, the index of the row it repeats; -1 elsewhere.
    """

    copies: NDArray[np.int32]
    held_out: NDArray[np.bool_]
    reason: NDArray[Any]
    original: NDArray[np.int64]


@dataclass(frozen=True)
class SelectionRules:
    """The settings of a selection; `holdout` is a share, a number of rows, or None."""

    deduplicate: Deduplicate = "none"
    holdout: int | float | None = None
    weights: Sequence[float] = ()  # of each source
    seeds: Sequence[int] = ()  # of each source


def _uniform(keys: NDArray[Any], salt: NDArray[np.uint64] | int) -> NDArray[np.float64]:
    """(n,) in [0, 1): a hash of the 16-byte keys and the salt (splitmix64's finaliser)."""
    words = keys.astype("S16").view(np.uint64).reshape(-1, 2)
    x = words[:, 0] ^ (np.asarray(salt, np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def first_of_each(keys: NDArray[Any], usable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(n,) index of the first usable row with the same key; a row itself where it is that, or not usable."""
    first = np.arange(len(keys))
    where = np.flatnonzero(usable)
    _, earliest, inverse = np.unique(keys[where], return_index=True, return_inverse=True)
    first[where] = where[earliest[inverse]]
    return first


def _hold_out(prompts: NDArray[Any], candidates: NDArray[np.bool_], holdout: int | float | None) -> NDArray[np.bool_]:
    """(n,) bool. A share takes the prompts whose hash lies below it; a number the rows of the lowest hashes."""
    if holdout is None:
        return np.zeros(len(prompts), dtype=bool)
    position = _uniform(prompts, 0)
    if isinstance(holdout, float):
        return np.asarray(candidates & (position < holdout))
    ordered = np.sort(position[candidates])
    if len(ordered) <= holdout:
        return candidates  # data_writer refuses a hold-out that leaves nothing to train on
    return np.asarray(candidates & (position <= ordered[holdout - 1]))


def select(
    rows: NDArray[Any], source: NDArray[np.int32], rules: SelectionRules, known: NDArray[Any] | None = None
) -> Selection:
    """Decide about all rows.

    Args:
        rows: (n,) records of shards.ROW in the order of the input.
        source: (n,) the index of each row's source.
        known: keys of validation rows, of the kind that `rules.deduplicate` compares.
    """
    count = len(rows)
    usable = rows["reason"] < 0
    reason = np.full(count, "", dtype="U16")
    original = np.full(count, -1, dtype=np.int64)
    keys = rows["prompt" if rules.deduplicate == "prompt" else "content"]
    if rules.deduplicate != "none":
        first = first_of_each(keys, usable)
        repeated = usable & (first != np.arange(count))
        original[repeated] = first[repeated]
        reason[repeated] = DUPLICATE
        usable &= ~repeated
        if known is not None:
            leaked = usable & np.isin(keys, known)
            reason[leaked] = LEAK
            usable &= ~leaked
    held_out = _hold_out(rows["prompt"], usable, rules.holdout)
    reason[held_out] = HELD_OUT
    usable &= ~held_out
    weights, seeds = np.asarray(rules.weights, np.float64), np.asarray(rules.seeds, np.uint64)
    whole = np.floor(weights)
    # A row's place among equal ones enters too, so that equal rows fall independently.
    salt = seeds[source] + np.uint64(1) + (_occurrence(rows["content"]).astype(np.uint64) << np.uint64(20))
    extra = _uniform(rows["content"], salt) < (weights - whole)[source]
    copies = np.where(usable, whole[source] + extra, 0).astype(np.int32)
    reason[usable & (copies == 0)] = WEIGHT
    return Selection(copies, held_out, reason, original)


def _occurrence(keys: NDArray[Any]) -> NDArray[np.int64]:
    """(n,) how many earlier rows have the same key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    starts = np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))
    result = np.empty(len(keys), dtype=np.int64)
    result[order] = np.arange(len(keys)) - starts
    return result
