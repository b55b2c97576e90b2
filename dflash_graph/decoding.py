"""Speculative decoding with a key/value cache, one text at a time, and the target's own decoding to hold it against.

What is decoded does not depend on the drafts: greedy text is the same, sampled text has the same distribution, and a
drafter decides only how many target forwards it takes. That is why a decoded text can be replayed with another drafter
without the target. Knows no drafter: anything with `propose` will do. Called by `evaluation.py` and `held_out.py`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dflash_graph.cached_target import CachedTarget, DecodingTarget
from dflash_graph.sampling import Sampler


class Proposer(Protocol):
    """Anything that drafts. One object decodes one text at a time; `reset` begins the next.

    Attributes:
        block_size: K; a proposal has K - 1 tokens.
        target_layer_ids: taps whose features it wants; empty when it reads tokens only.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]

    def reset(self) -> None:
        """Forget the text decoded so far."""

    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        """Draft K - 1 tokens after `tokens`.

        Args:
            tokens: the text so far, whose last token is the anchor.
            features: (n, N*D) taps of the positions verified since the last call; with them the context is whole, that
                is, it has len(tokens) - 1 positions.
        """


class SampledProposer(Proposer, Protocol):
    """A drafter whose drafts can be drawn from its distribution.

    Attributes:
        draft_vocab_ids: (V,) full ids of a reduced head in head order, or None.
    """

    draft_vocab_ids: Tensor | None

    def logits(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """(K-1, V); arguments as in `propose`, which it replaces for a round."""


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """One decoded text.

    Attributes:
        prompt: prompt tokens.
        tokens: generated tokens, end token included, at most max_new_tokens.
        accepts: accepted drafts of each counted verification, 0..K-1; accept_length is one more (the bonus token). A
            verification whose block reaches past max_new_tokens is decoded but not counted: it could not accept all.
            An end token counts as the bonus token.
        num_verifications: target forwards after the prefill, counted or not.
        seconds: wall-clock of the decoding after the prefill.
        features: (len(prompt) + len(tokens) - 1 or fewer, N*D) taps of the verified positions.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    accepts: tuple[int, ...]
    num_verifications: int
    seconds: float
    max_new_tokens: int
    features: Tensor


def leading_matches(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens of the draft are right before the first wrong one."""
    count = 0
    for a, b in zip(draft, truth, strict=False):
        if a != b:
            break
        count += 1
    return count


def _until_end(tokens: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """The tokens up to the first end token, that one included."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return list(tokens[: i + 1])
    return list(tokens)


def speculative_decode(
    model: Any,
    drafter: Proposer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampler: Sampler | None = None,
    tick: Callable[[], None] = lambda: None,
) -> DecodeResult:
    """Decode one text: each round the drafter proposes K - 1 tokens and the target verifies the block of K at once.

    Args:
        model: full causal LM from `load_full_model`.
        prompt: at least one token.
        sampler: draws the tokens; None is greedy decoding. Sampled drafts need a `SampledProposer`.
        tick: called before each verification; what it raises ends the decoding.
    """
    with CachedTarget(model, drafter.target_layer_ids) as target:
        return speculate(
            target,
            drafter,
            prompt,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            sampler=sampler,
            tick=tick,
        )


def speculate(
    target: DecodingTarget,
    drafter: Proposer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampler: Sampler | None = None,
    tick: Callable[[], None] = lambda: None,
) -> DecodeResult:
    """`speculative_decode` over any target."""
    drafter.reset()
    logits, features = target.prefill(prompt)
    tokens, known, accepts, verifications = [*prompt, _next_token(logits, sampler)], [features], [], 0
    limit = len(prompt) + max_new_tokens
    started = time.perf_counter()
    while len(tokens) < limit and tokens[-1] not in eos_ids:
        tick()
        draft, q = _draft(drafter, tokens, features, sampler, logits.shape[-1])
        logits, block = target.extend([tokens[-1], *draft])
        accepted, after = _verify(draft, q, logits, sampler)
        new = _until_end([*draft[:accepted], after], eos_ids)
        target.rollback(len(draft) - accepted)
        verifications += 1
        if len(tokens) + drafter.block_size <= limit:
            accepts.append(len(new) - 1)
        features = block[: accepted + 1]
        known.append(features)
        tokens += new
    seconds = time.perf_counter() - started
    tokens = tokens[:limit]
    return DecodeResult(
        prompt=tuple(prompt),
        tokens=tuple(tokens[len(prompt) :]),
        accepts=tuple(accepts),
        num_verifications=verifications,
        seconds=seconds,
        max_new_tokens=max_new_tokens,
        features=torch.cat(known)[: len(tokens) - 1],
    )


def _next_token(logits: Tensor, sampler: Sampler | None) -> int:  # (1, V)
    return int(logits[0].argmax()) if sampler is None else sampler.next_token(logits)


def _draft(
    drafter: Proposer, tokens: Sequence[int], features: Tensor, sampler: Sampler | None, vocab_size: int
) -> tuple[list[int], Tensor | None]:
    """K - 1 drafts, and the distribution (K-1, vocab) that they were drawn from, None if they are certain."""
    if sampler is None or sampler.sampling.draft == "greedy":
        return drafter.propose(tokens, features), None
    sampled = cast(SampledProposer, drafter)
    return sampler.draft(sampled.logits(tokens, features), sampled.draft_vocab_ids, vocab_size)


def _verify(draft: Sequence[int], q: Tensor | None, logits: Tensor, sampler: Sampler | None) -> tuple[int, int]:
    """How many drafts are kept under the target's logits (K, V), and the token that follows them."""
    if sampler is not None:
        return sampler.verify(draft, q, logits)
    truth = logits.argmax(dim=-1).tolist()
    accepted = leading_matches(draft, truth)
    return accepted, truth[accepted]


def replay_accepts(drafter: Proposer, result: DecodeResult, features: Tensor | None = None) -> list[int]:
    """Accepted drafts that `drafter` would have had on an already decoded text, without running the target.

    Equal to greedy `speculative_decode(...).accepts`, because the text does not depend on the drafts (near-ties of the
    target apart). Of a sampled text, equal in distribution to what decoding with these drafts would accept: a certain
    draft d is kept with probability p(d), which is how often the target itself draws d there.

    Args:
        features: used instead of the text's own features, (at least as many positions, N*D).
    """
    drafter.reset()
    text = [*result.prompt, *result.tokens]
    source = result.features if features is None else features
    limit = len(result.prompt) + result.max_new_tokens
    accepts, seen, length = [], 0, len(result.prompt) + 1
    while length < len(text) and length + drafter.block_size <= limit:
        draft = drafter.propose(text[:length], source[seen : length - 1])
        accepted = leading_matches(draft, text[length:])
        accepted = min(accepted, len(text) - length - 1)  # the end token counts as the bonus token
        accepts.append(accepted)
        seen = length - 1
        length += accepted + 1
    return accepts


def greedy_decode(model: Any, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """The target's own greedy decoding, one token per forward, with a key/value cache."""
    return decode_alone(model, prompt, max_new_tokens=max_new_tokens, eos_ids=eos_ids)[0]


def decode_alone(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampler: Sampler | None = None,
) -> tuple[list[int], float]:
    """The target's own decoding, one token per forward: the tokens, and the seconds after the prefill."""
    with CachedTarget(model, ()) as target:
        logits, _ = target.prefill(prompt)
        tokens = [_next_token(logits, sampler)]
        started = time.perf_counter()
        while len(tokens) < max_new_tokens and tokens[-1] not in eos_ids:
            logits, _ = target.extend([tokens[-1]])
            tokens.append(_next_token(logits, sampler))
        return tokens, time.perf_counter() - started


@torch.no_grad()
def full_forward_gaps(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Margins of each generated token under one full forward without a cache, given the tokens before it.

    Returns:
        shortfall: (n,) float32, best logit - the token's own; 0 where the token is the greedy one.
        top2_gap: (n,) float32, best logit - second best.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()  # (n, vocab)
    best = logits.topk(2, dim=-1).values
    own = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    return best[:, 0] - own, best[:, 0] - best[:, 1]
