"""What an evaluation reports: acceptance of a drafter, by set, block position and prompt length, and the whole table.

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
from dflash_graph.sampling import Sampling
from dflash_graph.step_times import StepTimes


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
            f"no verification to count: every text ends at once or is shorter than one block of {block_size}; raise "
            "max_new_tokens, or use other prompts"
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
    if not ordered:
        return ()
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
class TextResult:
    """One decoded text.

    Attributes:
        prompt_tokens: length of its prompt.
        tokens, accepts: as in `DecodeResult`.
        near_tie: the text leaves the target's greedy text where that is open; None for sampled text.
    """

    set: str
    index: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    accepts: tuple[int, ...]
    near_tie: bool | None


@dataclass(frozen=True, kw_only=True)
class SetReport:
    """Results on one set of prompts.

    Attributes:
        num_skipped: prompts left out because they and max_new_tokens exceed the target's positions.
        num_tokens: generated tokens.
        drafter: None where no verification was counted.
        by_prompt_length: quartiles, shortest prompts first.
    """

    name: str
    path: str
    num_prompts: int
    num_skipped: int
    num_tokens: int
    drafter: Acceptance | None
    by_prompt_length: tuple[LengthGroup, ...]


def report_set(
    name: str, path: str, results: Sequence[DecodeResult], block_size: int, *, num_skipped: int
) -> SetReport:
    accepts = [a for r in results for a in r.accepts]
    return SetReport(
        name=name,
        path=path,
        num_prompts=len(results),
        num_skipped=num_skipped,
        num_tokens=sum(len(r.tokens) for r in results),
        drafter=summarise(accepts, block_size) if accepts else None,
        by_prompt_length=by_prompt_length(results, block_size),
    )


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Result of `evaluate`; figures without a set are over all prompts.

    Attributes:
        checkpoint, prompts: what was evaluated on what.
        sets: each set of prompts, in the order given.
        sampling: how tokens were drawn; None is greedy decoding.
        num_skipped: prompts left out because they and max_new_tokens exceed the target's positions.
        num_tokens: generated tokens.
        drafter: acceptance of the checkpoint's drafter.
        baselines: the same of the tables made from the training rows; empty without those rows.
        other_features: the same of the drafter fed with another prompt's features, on the first prompts.
        by_prompt_length: quartiles, shortest prompts first.
        tokens_per_s: generated tokens per second of one decoding thread, prefill excluded.
        alone_tokens_per_s: the target alone, one token per forward, on the first `alone_prompts` prompts of each set.
            In greedy decoding these texts were also compared token by token.
        measured_speedup: on those prompts, decoding with the drafter over the target alone.
        step_times, estimated_speedup: measured step by step, and what they make of accept_length.
        near_ties: prompts ("set/index") whose text leaves the target's greedy text where its top-2 gap is below
            `near_tie_gap`.
        texts: every text.
        notes: what could not be measured, and why.
        seconds: wall-clock of the whole evaluation.
        environment: hardware and versions.
    """

    checkpoint: str
    prompts: str
    sets: tuple[SetReport, ...]
    sampling: Sampling | None
    block_size: int
    num_prompts: int
    num_skipped: int
    num_tokens: int
    max_new_tokens: int
    drafter: Acceptance
    baselines: dict[str, Acceptance]
    other_features: Acceptance | None
    by_prompt_length: tuple[LengthGroup, ...]
    tokens_per_s: float | None
    alone_tokens_per_s: float | None
    alone_prompts: int
    measured_speedup: float | None
    step_times: StepTimes | None
    near_ties: tuple[str, ...]
    near_tie_gap: float
    texts: tuple[TextResult, ...]
    notes: tuple[str, ...]
    seconds: float
    environment: dict[str, str]

    @property
    def estimated_speedup(self) -> float | None:
        return None if self.step_times is None else self.step_times.speedup(self.drafter.accept_length)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"estimated_speedup": self.estimated_speedup}

    def __str__(self) -> str:
        lines: list[tuple[str, Acceptance | None]] = [("drafter", self.drafter)]
        if len(self.sets) > 1:
            lines += [(f"  on {s.name}", s.drafter) for s in self.sets]
        lines += self.baselines.items()
        if self.other_features is not None:
            lines.append(("drafter, features of another prompt", self.other_features))
        width = max(len(name) for name, _ in lines)
        positions = "  ".join(f">= {k}" for k in range(1, self.block_size))
        tokens = f"{self.num_tokens} tokens, {self.drafter.num_verifications} counted verifications"
        skipped = f", {self.num_skipped} skipped as too long" if self.num_skipped else ""
        return "\n".join(
            [
                f"{self.checkpoint} on {self.num_prompts} prompts of {self.prompts}{skipped}: {tokens}, "
                f"block {self.block_size}",
                f"{'':<{width}}  accept_length  {positions}",
                *(f"{name:<{width}}  {_row(acceptance)}" for name, acceptance in lines),
                f"by prompt length: {_lengths(self.by_prompt_length)}",
                *(
                    f"  on {s.name}: {_lengths(s.by_prompt_length)}"
                    for s in self.sets
                    if len(self.sets) > 1 and s.by_prompt_length
                ),
                *self._speed(),
                self._text_rule(),
                *self.notes,
                f"{self.seconds:.0f} s; " + ", ".join(f"{k} {v}" for k, v in self.environment.items()),
            ]
        )

    def _speed(self) -> list[str]:
        lines = []
        if self.tokens_per_s is not None:
            alone = f"; the target alone {self.alone_tokens_per_s:.1f}" if self.alone_tokens_per_s else ""
            ratio = (
                f": measured speed-up {self.measured_speedup:.2f} on {self.alone_prompts} prompts"
                if self.measured_speedup
                else ""
            )
            lines.append(f"tokens/s per thread: {self.tokens_per_s:.1f}{alone}{ratio}")
        if (times := self.step_times) is not None:
            lines.append(
                f"estimated speed-up {self.estimated_speedup:.2f} = accept_length {self.drafter.accept_length:.3f} x "
                f"{times.target_1_ms:.2f} ms (target, 1 token) / ({times.target_block_ms:.2f} ms (target, "
                f"{self.block_size} tokens) + {times.draft_ms:.2f} ms (drafter)); medians of {times.repeats} at "
                f"{', '.join(map(str, times.positions))} positions"
            )
        return lines

    def _text_rule(self) -> str:
        if self.sampling is not None:
            return f"texts drawn from the target's own distribution: {self.sampling}"
        ties = f" (prompts {', '.join(self.near_ties)})" if self.near_ties else ""
        return (
            f"equal to the target's greedy text, except near-ties (gap < {self.near_tie_gap:g}) in "
            f"{len(self.near_ties)} of {self.num_prompts} prompts{ties}"
        )


def _row(acceptance: Acceptance | None) -> str:
    if acceptance is None:
        return f"{'-':>13}  (no verification to count)"
    shares = "  ".join(f"{100 * share:3.0f}%" for share in acceptance.at_least)
    return f"{acceptance.accept_length:13.3f}  {shares}"


def _lengths(groups: Sequence[LengthGroup]) -> str:
    return ", ".join(f"{g.shortest}-{g.longest} tokens: {g.accept_length:.3f}" for g in groups)
