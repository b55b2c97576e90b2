"""Timing of the three steps: what each timing holds, in turn, and the speed-up that they make."""

from typing import Any

import pytest
import torch
import transformers

from dflash_graph import step_times
from dflash_graph.decoding import DecodeResult, speculative_decode
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.step_times import StepTimes, measure_step_times
from tests.test_decoding import SIZES, K, make_drafter, make_model, prompt_of


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(transformers.LlamaConfig(**SIZES))


def texts(model: Any, *lengths: int) -> list[DecodeResult]:
    drafter = make_drafter(model)
    return [
        speculative_decode(model, drafter, prompt_of(n, seed=n), max_new_tokens=9, eos_ids=frozenset()) for n in lengths
    ]


def test_each_step_is_timed_in_turn(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which one token takes 4 ms, a block 8 and a proposal 2: so the medians say."""
    seen: list[str] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: slow(kwargs["input_ids"].shape[1], kwargs["position_ids"]), with_kwargs=True
    )
    starts: list[int] = []
    clock = [0.0]
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])

    def slow(count: int, positions: torch.Tensor) -> None:
        if count in (1, K):
            starts.append(int(positions[0, 0]))
            seen.append({1: "one", K: "block"}[count])
            clock[0] += {1: 0.004, K: 0.008}[count]

    found = texts(model, 20, 40, 60, 30)
    propose = PlainDrafter.propose

    def slow_propose(self: PlainDrafter, tokens: Any, features: Any) -> list[int]:
        seen.append(f"draft {len(features)}")
        clock[0] += 0.002
        return propose(self, tokens, features)

    monkeypatch.setattr(PlainDrafter, "propose", slow_propose)
    seen.clear()
    starts.clear()
    times = measure_step_times(model, make_drafter(model), found, 2.4, repeats=5)
    handle.remove()
    assert times is not None
    assert (times.positions, times.repeats) == ((29, 49, 69), 12), "shortest, middle and longest; one warm-up each"
    assert starts == [25] * 10 + [45] * 10 + [65] * 10, "every timing sees the same text"
    rounds = ["one", "block", "draft 2"]  # a verification yields 2.4 tokens, so two new positions
    per_text = len(seen) // 3
    for start, context in zip(range(0, len(seen), per_text), (22, 42, 62), strict=True):
        assert seen[start : start + per_text] == [f"draft {context}", *rounds * 5]
    assert (times.target_1_ms, times.target_block_ms, times.draft_ms) == pytest.approx((4, 8, 2))


def test_speedup_by_hand() -> None:
    times = StepTimes(target_1_ms=10.0, target_block_ms=12.0, draft_ms=3.0, positions=(5,), repeats=4)
    assert times.speedup(3.0) == pytest.approx(2.0)


def test_the_texts_drafter_is_left_alone(model: Any) -> None:
    drafter = make_drafter(model)
    drafter.propose([1, 2, 3], torch.zeros(2, 64))
    fork = drafter.fork()
    fork.propose([1, 2, 3, 4], torch.zeros(1, 64))
    assert drafter._keys[0].shape[1] == 2
    assert fork._keys[0].shape[1] == 3
    assert measure_step_times(model, drafter, texts(model, 5), 1.0, repeats=2) is not None
    assert drafter._keys[0].shape[1] == 2


def test_texts_too_short_for_a_block_are_not_timed(model: Any) -> None:
    short = speculative_decode(model, make_drafter(model), [3], max_new_tokens=2, eos_ids=frozenset())
    assert measure_step_times(model, make_drafter(model), [short], 1.0) is None
    assert measure_step_times(model, make_drafter(model), [], 1.0) is None
