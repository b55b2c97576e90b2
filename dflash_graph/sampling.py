"""Drawing tokens at a temperature, and the test that keeps speculative sampling lossless.

`Sampling` says how tokens are drawn, a `Sampler` draws them for one text; `verify` accepts or replaces a block of
drafts so that what comes out has the target's own distribution, whatever drafted it (Leviathan et al., arXiv
2211.17192; Chen et al., arXiv 2302.01318). Distributions are transformers' own: temperature, then top-k, then top-p, as
`generate` applies them. Knows neither models nor texts. Called by `decoding.py`.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: of target and drafter, above 0.
        top_p, top_k: of both; 1 and 0 leave every token in.
        draft: "greedy" drafts the drafter's most likely tokens, which count as certain (what vLLM does unless told
            otherwise, and SGLang always); "sampled" draws them from the drafter's distribution (z-lab's dflash, and
            vLLM's `draft_sample_method: probabilistic`). The texts have the same distribution either way.
        seed: of all draws; each prompt has a stream of its own.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    draft: Literal["greedy", "sampled"] = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1e-5 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be positive, at least 1e-5, and finite (greedy decoding has none); found "
                f"{self.temperature}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p must lie in (0, 1] and top_k must not be negative; found {self}")
        if self.draft not in ("greedy", "sampled"):
            raise ValueError(f"drafts must be greedy or sampled; found {self.draft!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a non-negative 63-bit integer; found {self.seed}")

    def __str__(self) -> str:
        more = f", top-k {self.top_k}" if self.top_k else ""
        more += f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{more}, {self.draft} drafts, seed {self.seed}"

    def sampler(self, name: str, index: int, device: torch.device) -> "Sampler":
        """For prompt `index` of the set `name`: the same draws for any number of workers."""
        state = np.random.SeedSequence((self.seed, zlib.crc32(name.encode()), index)).generate_state(1, np.uint64)
        return Sampler(self, torch.Generator(device).manual_seed(int(state[0]) >> 1))

    def distribution(self, logits: Tensor) -> Tensor:  # (n, V) -> (n, V) float64
        """What tokens are drawn from.

        Raises:
            RuntimeError: a logit is NaN, or a row has nothing but -inf.
        """
        scores = TemperatureLogitsWarper(float(self.temperature))(None, logits.double())
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(None, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(float(self.top_p))(None, scores)
        probabilities: Tensor = scores.softmax(dim=-1)
        if not bool(torch.isfinite(probabilities).all()):
            raise RuntimeError("cannot sample: the logits are not finite. Try target.dtype=float32")
        return probabilities


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the tokens of one text, on the device of its generator."""

    sampling: Sampling
    generator: torch.Generator

    def next_token(self, logits: Tensor) -> int:  # (1, V)
        return draw(self.sampling.distribution(logits), self.generator)[0]

    def draft(self, logits: Tensor, ids: Tensor | None, vocab_size: int) -> tuple[list[int], Tensor]:
        """Draw drafts as full ids from a drafter's logits (K-1, V), whose head has the ids `ids` if it is reduced.

        Returns:
            (K - 1 tokens, the distributions (K-1, vocab) that they were drawn from).
        """
        q = spread(self.sampling.distribution(logits), ids, vocab_size)
        return draw(q, self.generator), q

    def verify(self, draft: Sequence[int], q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """`verify`, given the target's logits (K, V) over a block; q None: the drafts are certain."""
        p = self.sampling.distribution(logits)
        tokens = torch.tensor(draft, device=p.device)
        return verify(tokens, one_hot(tokens, p.shape[1]) if q is None else q, p, self.generator)


def draw(probabilities: Tensor, generator: torch.Generator) -> list[int]:  # (n, V)
    """One token from each row."""
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:  # (n,) -> (n, vocab) float64
    """The distribution of drafts that are certain."""
    return torch.zeros(len(tokens), vocab_size, dtype=torch.float64, device=tokens.device).scatter_(
        1, tokens[:, None], 1.0
    )


def spread(probabilities: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:  # (n, V) -> (n, vocab)
    """A reduced head's distribution over the full vocabulary: 0 for every token that it does not have."""
    if ids is None:
        return probabilities
    full = probabilities.new_zeros(len(probabilities), vocab_size)
    full[:, ids] = probabilities
    return full


def accept_probability(p: Tensor, q: Tensor) -> Tensor:  # (n,), (n,) -> (n,)
    """Chance that a draft with target probability p and draft probability q > 0 is kept."""
    return (p / q).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:  # (V,), (V,) -> (V,)
    """Distribution of the token that replaces a rejected draft, not normalised."""
    rest = (p - q).clamp(min=0.0)
    return rest if float(rest.sum()) > 0 else p  # equal up to rounding: then nothing is ever rejected for good


def verify(
    draft: Tensor,  # (n,) int64
    q: Tensor,  # (n, vocab) float64, what draft[i] was drawn from
    p: Tensor,  # (n + 1, vocab) float64, the target's, given the text and draft[:i]
    generator: torch.Generator,
) -> tuple[int, int]:
    """Keep drafts up to the first rejected one, and draw the token that follows them.

    Returns:
        (number of drafts kept, the token after them: a replacement, or, if all are kept, the bonus token).
    """
    n = len(draft)
    index = draft[:, None]
    chance = accept_probability(p[:n].gather(1, index)[:, 0], q.gather(1, index)[:, 0])
    kept = torch.rand(n, dtype=torch.float64, device=draft.device, generator=generator) < chance
    accepted = int(kept.long().cumprod(dim=0).sum())
    after = p[n] if accepted == n else residual(p[accepted], q[accepted])
    return accepted, draw(after[None], generator)[0]
