"""Greedy speculative decoding with a key/value cache, one text at a time, and greedy decoding to hold it against.

The greedy output does not depend on the drafts: a drafter decides only how many target forwards it takes. That is why
a decoded text can be replayed with another drafter without the target. Knows no drafter: anything with `propose` will
do. Called by `evaluation.py`.
"""

import inspect
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache


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


class CachedTarget:
    """A full causal LM with a key/value cache and hooks on its taps; lm_head runs only where it is asked for.

    Belongs to the thread that makes it; several threads may each have one over the same model.

    Raises:
        ValueError: the target has linear-attention layers, whose state cannot be rolled back.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
        if "linear_attention" in kinds:
            raise ValueError("speculative decoding cannot roll back linear-attention layers; this target has some")
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # renamed in transformers 5.24
        self._taps: dict[int, Tensor] = {}
        layers = model.get_decoder().layers
        self._handles = [layers[k].register_forward_hook(self._hook(k)) for k in target_layer_ids]
        self._target_layer_ids = tuple(target_layer_ids)
        self._cache: Any = None

    def _hook(self, k: int) -> Any:
        owner = threading.get_ident()

        def keep(module: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() == owner:  # another thread may decode another text with the same model
                self._taps[k] = (result if isinstance(result, Tensor) else result[0])[0]  # (n, D)

        return keep

    def __enter__(self) -> "CachedTarget":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def prefill(self, tokens: Sequence[int]) -> tuple[int, Tensor]:
        """Begin a text: its next token, and the (n, N*D) features of all its positions."""
        # Without a config every layer of the cache grows, sliding ones too, so that any of them can be cropped.
        self._cache = DynamicCache()
        best, features = self._run(tokens, 0, 1)
        return best[0], features

    def extend(self, tokens: Sequence[int]) -> tuple[list[int], Tensor]:
        """Append tokens: the most likely next token after each of them, and their (n, N*D) features."""
        return self._run(tokens, int(self._cache.get_seq_length()), len(tokens))

    def rollback(self, count: int) -> None:
        """Remove the last `count` positions from the cache."""
        if count:
            self._cache.crop(-count)

    @torch.no_grad()
    def _run(self, tokens: Sequence[int], start: int, logits_to_keep: int) -> tuple[list[int], Tensor]:
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        cache = {self._cache_name: self._cache}
        out = self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=logits_to_keep, **cache)
        taps = [self._taps[k] for k in self._target_layer_ids]
        features = torch.cat(taps, dim=-1) if taps else torch.empty(len(tokens), 0, device=self.device)
        return out.logits[0].argmax(dim=-1).tolist(), features


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
    model: Any, drafter: Proposer, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]
) -> DecodeResult:
    """Greedy decoding: each round the drafter proposes K - 1 tokens and the target verifies the block of K at once.

    Args:
        model: full causal LM from `load_full_model`.
        prompt: at least one token.
    """
    drafter.reset()
    with CachedTarget(model, drafter.target_layer_ids) as target:
        first, features = target.prefill(prompt)
        tokens, known, accepts, verifications = [*prompt, first], [features], [], 0
        limit = len(prompt) + max_new_tokens
        started = time.perf_counter()
        while len(tokens) < limit and tokens[-1] not in eos_ids:
            draft = drafter.propose(tokens, features)
            truth, block = target.extend([tokens[-1], *draft])
            accepted = leading_matches(draft, truth)
            new = _until_end(truth[: accepted + 1], eos_ids)
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


def replay_accepts(drafter: Proposer, result: DecodeResult, features: Tensor | None = None) -> list[int]:
    """Accepted drafts that `drafter` would have had on an already decoded text, without running the target.

    Equal to `speculative_decode(...).accepts`, because greedy output does not depend on the drafts (near-ties of the
    target apart).

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


@torch.no_grad()
def greedy_decode(model: Any, prompt: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """The target's own greedy decoding, one token per forward, with a key/value cache."""
    with CachedTarget(model, ()) as target:
        token, _ = target.prefill(prompt)
        tokens = [token]
        while len(tokens) < max_new_tokens and tokens[-1] not in eos_ids:
            best, _ = target.extend([tokens[-1]])
            tokens.append(best[0])
    return tokens


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
