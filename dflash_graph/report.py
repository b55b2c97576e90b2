"""What an evaluation reports: acceptance of a drafter, by block position and by prompt length, and the whole table.

Holds the definitions of accept_length: tokens per verification, bonus token included, in real decoding (`summarise`)
and expected on the true text (`teacher_forced_accept_length`). Called by `evaluation.py` and the validation pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_graph.decoding import DecodeResult


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What a drafter achieved over a number of verifications.

    Attributes:
        accept_length: tokens per verification, bonus token included.
        at_least: (K-1,) share of verifications with at least k = 1..K-1 accepted drafts.
        conditional: (K-1,) the same among those with at least k - 1; None where there was none.
    """

    accept_length: float
    num_verifications: int
    at_least: tuple[float, ...]
    conditional: tuple[float | None, ...]


def summarise(accepts: Iterable[int], block_size: int) -> Acceptance:
    """Acceptance of verifications pooled over prompts.

    Raises:
        ValueError: there is no verification to count.
    """
    counts = np.asarray(list(accepts), dtype=np.int64)
    if len(counts) == 0:
        raise ValueError(
            f"no verification to count: the texts are shorter than one block of {block_size}; raise max_new_tokens"
        )
    reached = [int((counts >= k).sum()) for k in range(block_size)]
    return Acceptance(
        accept_length=float(counts.mean()) + 1.0,
        num_verifications=len(counts),
        at_least=tuple(n / len(counts) for n in reached[1:]),
        conditional=tuple(b / a if a else None for a, b in pairwise(reached)),
    )


def teacher_forced_accept_length(correct: Tensor) -> float:
    """Expected accept_length of blocks whose anchors lie on the true text: 1 + mean number of leading correct drafts.

    Args:
        correct: (A, K-1) bool, A >= 1; column k-1 tells whether the most likely token at anchor + k is the text's.
    """
    if correct.dim() != 2 or correct.shape[0] == 0 or correct.dtype != torch.bool:
        raise ValueError(f"correct must be (A, K-1) bool with A >= 1; found {tuple(correct.shape)} {correct.dtype}")
    return 1.0 + correct.long().cumprod(dim=1).sum(dim=1).double().mean().item()


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """A quartile of the prompts by prompt length (tokens)."""

    shortest: int
    longest: int
    num_prompts: int
    accept_length: float


def by_prompt_length(results: Sequence[DecodeResult], block_size: int) -> tuple[LengthGroup, ...]:
    """Quartiles of the decoded prompts by prompt length; texts without a counted verification are left out."""
    ordered = sorted((r for r in results if r.accepts), key=lambda r: len(r.prompt))
    groups = []
    for part in np.array_split(np.arange(len(ordered)), min(4, len(ordered))):
        chosen = [ordered[i] for i in part]
        groups.append(
            LengthGroup(
                shortest=len(chosen[0].prompt),
                longest=len(chosen[-1].prompt),
                num_prompts=len(chosen),
                accept_length=summarise((a for r in chosen for a in r.accepts), block_size).accept_length,
            )
        )
    return tuple(groups)


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Result of `evaluate`.

    Attributes:
        checkpoint, prompts: what was evaluated on what.
        num_skipped: prompts left out because they and max_new_tokens exceed the target's positions.
        num_tokens: generated tokens.
        drafter: acceptance of the checkpoint's drafter.
        baselines: the same of the tables made from the training rows; empty without those rows.
        other_features: the same of the drafter fed with another prompt's features, on the first prompts.
        by_prompt_length: quartiles, shortest prompts first.
        tokens_per_s: generated tokens per second of one decoding thread, prefill excluded.
        greedy_tokens_per_s: the target alone, one token per forward, on the `greedy_prompts` prompts that were also
            compared token by token.
        near_ties: prompts whose text leaves the target's greedy text where its top-2 gap is below `near_tie_gap`.
        notes: what could not be measured, and why.
        seconds: wall-clock of the whole evaluation.
        environment: hardware and versions.
    """

    checkpoint: str
    prompts: str
    block_size: int
    num_prompts: int
    num_skipped: int
    num_tokens: int
    max_new_tokens: int
    drafter: Acceptance
    baselines: dict[str, Acceptance]
    other_features: Acceptance | None
    by_prompt_length: tuple[LengthGroup, ...]
    tokens_per_s: float
    greedy_tokens_per_s: float | None
    greedy_prompts: int
    near_ties: tuple[int, ...]
    near_tie_gap: float
    notes: tuple[str, ...]
    seconds: float
    environment: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines: list[tuple[str, Acceptance]] = [("drafter", self.drafter), *self.baselines.items()]
        if self.other_features is not None:
            lines.append(("drafter, features of another prompt", self.other_features))
        width = max(len(name) for name, _ in lines)
        positions = "  ".join(f">= {k}" for k in range(1, self.block_size))
        rows = [
            f"{name:<{width}}  {a.accept_length:13.3f}  " + "  ".join(f"{100 * share:3.0f}%" for share in a.at_least)
            for name, a in lines
        ]
        groups = ", ".join(f"{g.shortest}-{g.longest} tokens: {g.accept_length:.3f}" for g in self.by_prompt_length)
        greedy = "" if self.greedy_tokens_per_s is None else f"; the target alone {self.greedy_tokens_per_s:.1f}"
        ties = f" (prompts {', '.join(map(str, self.near_ties))})" if self.near_ties else ""
        tokens = f"{self.num_tokens} tokens, {self.drafter.num_verifications} counted verifications"
        skipped = f", {self.num_skipped} skipped as too long" if self.num_skipped else ""
        return "\n".join(
            [
                f"{self.checkpoint} on {self.num_prompts} prompts of {self.prompts}{skipped}: {tokens}, "
                f"block {self.block_size}",
                f"{'':<{width}}  accept_length  {positions}",
                *rows,
                f"by prompt length: {groups}",
                f"tokens/s per thread: {self.tokens_per_s:.1f}{greedy}",
                f"equal to the target's greedy text, except near-ties (gap < {self.near_tie_gap:g}) in "
                f"{len(self.near_ties)} of {self.num_prompts} prompts{ties}",
                *self.notes,
                f"{self.seconds:.0f} s; " + ", ".join(f"{k} {v}" for k, v in self.environment.items()),
            ]
        )
