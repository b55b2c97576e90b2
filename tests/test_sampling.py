"""Speculative sampling is lossless: 20,000 texts of a toy target follow its exact joint distribution, and a planted
fault in any part of the test does not.

The toy target's next token depends on the last two, the toy drafter's drafts on the anchor alone, so that drafts are
often wrong and residuals and bonus tokens matter at every position. Texts go through the same `speculate` as those of
a real model.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from dflash_graph import sampling as sampling_module
from dflash_graph.decoding import decode_alone, replay_accepts, speculate, speculative_decode
from dflash_graph.sampling import Sampler, Sampling, draw, residual, spread, verify
from tests.test_decoding import make_drafter, make_model, prompt_of

VOCAB, K, LENGTH, DRAWS = 3, 4, 5, 20_000
CPU = torch.device("cpu")


class ToyTarget:
    """A second-order Markov chain with the interface of a cached model; its features are the positions' numbers."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)  # by the last two tokens
        self.text: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.text = list(tokens)
        return self.logits[tokens[-2], tokens[-1]][None], torch.arange(float(len(tokens)))[:, None]

    def extend(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        start = len(self.text)
        self.text += tokens
        last = self.text[start:]
        before = self.text[start - 1 : -1]
        return self.logits[before, last], torch.arange(float(start), float(len(self.text)))[:, None]

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]


class ToyDrafter:
    """Drafts each position from a table of its own, by the anchor; checks what it is told of the context."""

    target_layer_ids: tuple[int, ...] = (0,)
    block_size = K

    def __init__(self, ids: Sequence[int] | None = None, seed: int = 3) -> None:
        self.draft_vocab_ids = None if ids is None else torch.tensor(ids)
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, K - 1, VOCAB if ids is None else len(ids), generator=generator)
        self.seen = 0

    def reset(self) -> None:
        self.seen = 0

    def logits(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        assert features[:, 0].tolist() == list(range(self.seen, len(tokens) - 1))
        self.seen = len(tokens) - 1
        return self.table[tokens[-1]]

    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        best = self.logits(tokens, features).argmax(dim=-1)
        return (best if self.draft_vocab_ids is None else self.draft_vocab_ids[best]).tolist()


PROMPT = [0, 1, 2]


def texts_of(
    sampling: Sampling, drafter: ToyDrafter, draws: int = DRAWS, seed: int = 0
) -> tuple[Counter[tuple[int, ...]], list[int]]:
    """(how often each text of LENGTH tokens came out, accepted drafts of all counted verifications)."""
    target, sampler = ToyTarget(), Sampler(sampling, torch.Generator().manual_seed(seed))
    counts: Counter[tuple[int, ...]] = Counter()
    accepts: list[int] = []
    for _ in range(draws):
        result = speculate(target, drafter, PROMPT, max_new_tokens=LENGTH, eos_ids=(), sampler=sampler)
        counts[result.tokens] += 1
        accepts += result.accepts
    return counts, accepts


def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each text of LENGTH tokens under the target alone, from its tables."""
    table = sampling.distribution(ToyTarget().logits.view(-1, VOCAB)).view(VOCAB, VOCAB, VOCAB)
    found = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        whole, p = [*PROMPT, *text], 1.0
        for i in range(len(PROMPT), len(whole)):
            p *= float(table[whole[i - 2], whole[i - 1], whole[i]])
        found[text] = p
    return found


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square test; texts expected fewer than 5 times share one cell. 0 for an impossible text."""
    total = sum(counts.values())
    if any(expected[text] == 0 for text in counts):
        return 0.0
    rare = {text for text, p in expected.items() if p * total < 5}
    cells = [(counts[text], expected[text] * total) for text in expected if text not in rare]
    pooled = sum(expected[text] for text in rare) * total
    if pooled >= 5:
        cells.append((sum(counts[text] for text in rare), pooled))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


SETTINGS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "sampled drafts": ({"draft": "sampled"}, None),
    "greedy drafts": ({"draft": "greedy"}, None),
    "sampled, reduced head": ({"draft": "sampled"}, [2, 0]),  # never drafts 1; head order is not id order
    "hot": ({"temperature": 2.5, "draft": "sampled"}, None),
    "top-p": ({"top_p": 0.7, "draft": "sampled"}, None),
    "top-k, greedy": ({"top_k": 2, "draft": "greedy"}, None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_follow_the_targets_distribution(name: str) -> None:
    changes, ids = SETTINGS[name]
    sampling = Sampling(**{"temperature": 1.0, **changes})
    main = name in ("sampled drafts", "greedy drafts")
    counts, accepts = texts_of(sampling, ToyDrafter(ids), DRAWS if main else 6000)
    assert len(set(accepts)) == K, "rejections at every position, and bonus tokens"
    assert p_value(counts, exact(sampling)) > 1e-3
    other = exact(Sampling(temperature=1.3 if sampling.temperature == 1 else 1.7))
    assert p_value(counts, other) < 1e-6, "the test tells a slightly different temperature"


class Pairs(ToyDrafter):
    """K = 2: one draft and the bonus token."""

    block_size = 2

    def logits(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        return super().logits(tokens, features)[:1]


@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_blocks_of_two_and_texts_that_end(draft: Any) -> None:
    """With an end token, wherever it falls in a block: every text is cut after its first one."""
    sampling = Sampling(temperature=1.0, draft=draft)
    expected: Counter[tuple[int, ...]] = Counter()
    for text, p in exact(sampling).items():
        end = text.index(1) + 1 if 1 in text else LENGTH
        expected[text[:end]] += p  # type: ignore[assignment]
    for drafter in (Pairs(), ToyDrafter()):
        target, sampler = ToyTarget(), Sampler(sampling, torch.Generator().manual_seed(1))
        counts: Counter[tuple[int, ...]] = Counter()
        for _ in range(6000):
            result = speculate(target, drafter, PROMPT, max_new_tokens=LENGTH, eos_ids={1}, sampler=sampler)
            assert sum(a + 1 for a in result.accepts) <= len(result.tokens) - 1
            counts[result.tokens] += 1
        assert p_value(counts, dict(expected)) > 1e-3


def _no_residual(p: Tensor, q: Tensor) -> Tensor:
    return p


def _inverted(p: Tensor, q: Tensor) -> Tensor:
    return (q / p).clamp(max=1.0)


def _always(p: Tensor, q: Tensor) -> Tensor:
    return torch.ones_like(p)


def _shifted(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Every draft is tested against the distribution of the position after its own."""
    return lambda draft, q, p, generator: original(draft, q, torch.cat([p[1:], p[-1:]]), generator)


def _early_bonus(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """The bonus token is drawn from the distribution of the last draft's position."""

    def faulty(draft: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
        accepted, after = original(draft, q, p, generator)
        return accepted, draw(p[-2:-1], generator)[0] if accepted == len(draft) else after

    return faulty


FAULTS: dict[str, tuple[str, Any]] = {
    "rejected drafts are replaced by the target's samples": ("residual", _no_residual),
    "q/p": ("accept_probability", _inverted),
    "accepts everything": ("accept_probability", _always),
    "distribution of the next position": ("verify", _shifted(verify)),
    "bonus from the position before": ("verify", _early_bonus(verify)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_a_fault_is_found(fault: str, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "q/p" and draft == "greedy":
        fault = "accepts everything"  # with q = 1 that is what q/p does
    name, replacement = FAULTS[fault]
    monkeypatch.setattr(sampling_module, name, replacement)
    sampling = Sampling(temperature=1.0, draft=draft)
    draws = DRAWS if "bonus" in fault else 5000  # of all texts, few have a bonus token
    assert p_value(texts_of(sampling, ToyDrafter(), draws)[0], exact(sampling)) < 1e-6


def test_a_draft_that_was_drawn_from_another_distribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio needs the very distribution that the draft came from: here the drafter is hotter than it says."""
    original = Sampler.draft

    def hotter(self: Sampler, logits: Tensor, ids: Any, vocab_size: int) -> tuple[list[int], Tensor]:
        tokens, _ = original(self, logits / 3, ids, vocab_size)
        return tokens, original(self, logits, ids, vocab_size)[1]

    monkeypatch.setattr(Sampler, "draft", hotter)
    sampling = Sampling(temperature=1.0, draft="sampled")
    assert p_value(texts_of(sampling, ToyDrafter(), 5000)[0], exact(sampling)) < 1e-6


def test_replaying_a_sampled_text_has_the_acceptance_of_decoding_it() -> None:
    """What `replay_accepts` promises for certain drafts: another drafter's texts tell this one's acceptance."""
    sampling, drafter = Sampling(temperature=1.0), ToyDrafter(seed=5)
    _, accepts = texts_of(sampling, drafter, 5000)
    target, sampler = ToyTarget(), Sampler(sampling, torch.Generator().manual_seed(7))
    replayed = []
    for _ in range(5000):
        text = speculate(target, ToyDrafter(seed=1), PROMPT, max_new_tokens=LENGTH, eos_ids=(), sampler=sampler)
        replayed += replay_accepts(drafter, text)
    shares = [np.bincount(found, minlength=K) / len(found) for found in (accepts, replayed)]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.03)
    assert np.bincount(replayed, minlength=K).min() > 30


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    }  # fmt: skip
    return make_model(transformers.LlamaConfig(**sizes))


@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_a_models_texts_follow_its_full_forwards(model: Any, draft: Any) -> None:
    """Three tokens of at most 3 choices each, through the key/value cache, against forwards without one."""
    sampling = Sampling(temperature=0.8, top_k=3, draft=draft, seed=3)
    prompt = prompt_of(7)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in expected.items():
            with torch.no_grad():
                row = sampling.distribution(model(torch.tensor([[*prompt, *text]])).logits[0, -1:])[0]
            longer |= {(*text, t): p * float(row[t]) for t in row.nonzero()[:, 0].tolist()}
        expected = longer
    assert len(expected) == 27
    drafter, counts = make_drafter(model), Counter[tuple[int, ...]]()
    for i in range(500):
        sampler = sampling.sampler("test", i, CPU)
        result = speculative_decode(model, drafter, prompt, max_new_tokens=3, eos_ids=(), sampler=sampler)
        counts[result.tokens] += 1
    assert set(counts) <= set(expected)
    assert p_value(counts, expected) > 1e-3


def test_a_seed_decides_every_text(model: Any) -> None:
    def decode(seed: int, name: str, index: int) -> Any:
        sampler = Sampling(temperature=1.0, draft="sampled", seed=seed).sampler(name, index, CPU)
        result = speculative_decode(
            model, make_drafter(model), prompt_of(5), max_new_tokens=20, eos_ids=(), sampler=sampler
        )
        return result.tokens, result.accepts

    assert decode(0, "a", 0) == decode(0, "a", 0)
    assert len({decode(*key)[0] for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]}) == 4


def test_low_temperature_is_greedy(model: Any) -> None:
    sampling = Sampling(temperature=1e-4, draft="sampled")
    prompt = prompt_of(9)
    greedy, _ = decode_alone(model, prompt, max_new_tokens=20, eos_ids=())
    sampled = speculative_decode(
        model, make_drafter(model), prompt, max_new_tokens=20, eos_ids=(), sampler=sampling.sampler("a", 0, CPU)
    )
    assert list(sampled.tokens) == greedy
    alone, _ = decode_alone(model, prompt, max_new_tokens=20, eos_ids=(), sampler=sampling.sampler("a", 1, CPU))
    assert alone == greedy


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_distribution_is_that_of_generate() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    hot = Sampling(temperature=2.0).distribution(logits)
    torch.testing.assert_close(hot, (logits.double() / 2).softmax(-1))
    top = Sampling(temperature=1.0, top_k=2).distribution(logits)[0]
    assert top[2:].tolist() == [0, 0]
    assert float(top[0] / top[1]) == pytest.approx(np.e)
    # Probabilities .61, .22, .14, .03: top-p 0.7 keeps the token that crosses it; after top-k 2 there is less to cross.
    nucleus = Sampling(temperature=1.0, top_p=0.7).distribution(logits)[0]
    assert (nucleus > 0).tolist() == [True, True, False, False]
    both = Sampling(temperature=1.0, top_k=2, top_p=0.7).distribution(logits)[0]
    assert (both > 0).tolist() == [True, False, False, False]
    for bad in (torch.tensor([[float("nan"), 1.0]]), torch.full((1, 2), float("-inf"))):
        with pytest.raises(RuntimeError, match="not finite"):
            Sampling(temperature=1.0).distribution(bad)


def test_spread_and_residual_by_hand() -> None:
    q = spread(torch.tensor([[0.75, 0.25]], dtype=torch.float64), torch.tensor([3, 1]), 5)
    assert q.tolist() == [[0, 0.25, 0, 0.75, 0]]
    p = torch.tensor([0.5, 0.5, 0, 0, 0], dtype=torch.float64)
    assert residual(p, q[0]).tolist() == [0.5, 0.25, 0, 0, 0]
    assert residual(p, p) is p


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"draft": "both"}, {"seed": -1}],
)  # fmt: skip
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|greedy or sampled"):
        Sampling(**{"temperature": 1.0, **bad})
