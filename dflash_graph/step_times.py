"""How long the three steps of speculative decoding take, and the speed-up that they and an accept_length make.

A target forward of one token, one of K tokens, and a proposal of the drafter are timed in turn on decoded texts, so
that whatever else the machine does falls on all three. Called by `evaluation.py`, in a thread of its own settings.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dflash_graph.cached_target import CachedTarget
from dflash_graph.decoding import DecodeResult
from dflash_graph.plain_drafter import PlainDrafter


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians in milliseconds.

    Attributes:
        target_1_ms, target_block_ms: a target forward of 1 and of K tokens on a text in the cache, choice of tokens
            included.
        draft_ms: one proposal, with the context's new positions (as many as a verification yields on average).
        positions: text lengths at which they were measured.
        repeats: timings of each step in all.
    """

    target_1_ms: float
    target_block_ms: float
    draft_ms: float
    positions: tuple[int, ...]
    repeats: int

    def speedup(self, accept_length: float) -> float:
        """Tokens per second over those of the target alone, prefill left out."""
        return accept_length * self.target_1_ms / (self.target_block_ms + self.draft_ms)


def measure_step_times(
    model: Any, drafter: PlainDrafter, texts: Sequence[DecodeResult], accept_length: float, *, repeats: int = 9
) -> StepTimes | None:
    """Time the steps on up to three texts: the shortest, the middle and the longest that can hold a block.

    Args:
        repeats: of each step on each text, the first of which is a warm-up and not counted.

    Returns:
        None if no text is longer than a block.
    """
    k = drafter.block_size
    usable = sorted((t for t in texts if len(t.prompt) + len(t.tokens) > 2 * k), key=lambda t: len(t.prompt))
    if not usable:
        return None
    chosen = [usable[i] for i in sorted({0, len(usable) // 2, len(usable) - 1})]
    seconds: dict[str, list[float]] = {"one": [], "block": [], "draft": []}
    for text in chosen:
        with CachedTarget(model, drafter.target_layer_ids) as target:
            for times in _rounds(target, drafter.fresh(), text, round(accept_length), repeats):
                for name, value in times.items():
                    seconds[name].append(value)
    ms = {name: 1000 * median(values) for name, values in seconds.items()}
    return StepTimes(
        target_1_ms=ms["one"],
        target_block_ms=ms["block"],
        draft_ms=ms["draft"],
        positions=tuple(len(text.prompt) + len(text.tokens) for text in chosen),
        repeats=len(seconds["one"]),
    )


def _rounds(
    target: CachedTarget, drafter: PlainDrafter, text: DecodeResult, new: int, repeats: int
) -> Iterator[dict[str, float]]:
    """Seconds of each step at the end of a text, `repeats` times less the warm-up."""
    k = drafter.block_size
    tokens = [*text.prompt, *text.tokens]
    head, block = tokens[:-k], tokens[-k:]
    _, features = target.prefill(head)
    known = len(head) - 1 - max(1, min(new, len(head) - 1))  # positions before those of the last verification
    drafter.propose(head[: known + 1], features[:known])

    def extend(count: int) -> None:
        logits, _ = target.extend(block[:count])
        logits.argmax(dim=-1).tolist()

    for i in range(repeats):
        one = _timed(target.device, lambda: extend(1))
        target.rollback(1)
        whole = _timed(target.device, lambda: extend(k))
        target.rollback(k)
        fork = drafter.fork()
        draft = _timed(target.device, lambda: fork.propose(head, features[known : len(head) - 1]))  # noqa: B023
        if i:
            yield {"one": one, "block": whole, "draft": draft}


def _timed(device: torch.device, step: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync: a clock around one step
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync: as above
    return time.perf_counter() - started
