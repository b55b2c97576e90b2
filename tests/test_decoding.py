"""Speculative decoding against greedy decoding, and the plain drafter against a dense one written without a cache."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.cached_target import CachedTarget
from dflash_graph.decoding import (
    full_forward_gaps,
    greedy_decode,
    leading_matches,
    replay_accepts,
    speculative_decode,
)
from dflash_graph.drafter import DrafterSpec
from dflash_graph.plain_drafter import PlainDrafter

K = 4
NO_END: frozenset[int] = frozenset()
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def make_model(config: Any) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(transformers.LlamaConfig(**SIZES))


def make_spec(**changes: Any) -> DrafterSpec:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
        "vocab_size": 97,
        "block_size": K,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 96,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "causal": False,
        "draft_vocab_size": None,
        "max_trained_length": 128,
        "target_path": "none",
        "gguf_file": None,
    }
    return DrafterSpec(**{**values, **changes})


def make_tensors(spec: DrafterSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)).to(dtype)
        for name, shape in spec.parameter_shapes().items()
    }


def make_drafter(model: Any, **changes: Any) -> PlainDrafter:
    spec = make_spec(**changes)
    weights = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return PlainDrafter(spec, make_tensors(spec), embed_weight=weights[0], head_weight=weights[1])


class Scripted:
    """Drafts from a known continuation, shifted by `offset` ids."""

    target_layer_ids: tuple[int, ...] = ()
    block_size = K

    def __init__(self, text: Sequence[int], offset: int) -> None:
        self.text, self.offset = [*text, *([0] * K)], offset

    def reset(self) -> None:
        pass

    def propose(self, tokens: Sequence[int], features: Tensor) -> list[int]:
        return [(t + self.offset) % 97 for t in self.text[len(tokens) : len(tokens) + K - 1]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("new", [1, 2, K, 23])
def test_speculative_tokens_equal_greedy(model: Any, length: int, new: int) -> None:
    prompt = prompt_of(length, seed=length)
    greedy = greedy_decode(model, prompt, max_new_tokens=new, eos_ids=NO_END)
    result = speculative_decode(model, make_drafter(model), prompt, max_new_tokens=new, eos_ids=NO_END)
    assert len(greedy) == new
    assert list(result.tokens) == greedy
    assert result.features.shape == (length + new - 1, 64)
    shortfall, gap = full_forward_gaps(model, prompt, greedy)
    assert float(shortfall.max()) == 0.0
    assert float(gap.min()) > 1e-4


def test_oracle_gets_the_whole_block_and_a_wrong_drafter_gets_one(model: Any) -> None:
    prompt = prompt_of(9)
    greedy = greedy_decode(model, prompt, max_new_tokens=40, eos_ids=NO_END)
    text = [*prompt, *greedy]
    right = speculative_decode(model, Scripted(text, 0), prompt, max_new_tokens=33, eos_ids=NO_END)
    assert set(right.accepts) == {K - 1}
    assert right.num_verifications == 8  # 1 + 8 * 4 = 33 tokens
    wrong = speculative_decode(model, Scripted(text, 1), prompt, max_new_tokens=33, eos_ids=NO_END)
    assert set(wrong.accepts) == {0}
    assert wrong.num_verifications == 32
    assert list(right.tokens) == list(wrong.tokens) == greedy[:33]
    assert torch.allclose(right.features, wrong.features)


def test_a_block_cut_by_the_limit_is_not_counted(model: Any) -> None:
    prompt = prompt_of(9)
    text = [*prompt, *greedy_decode(model, prompt, max_new_tokens=40, eos_ids=NO_END)]
    result = speculative_decode(model, Scripted(text, 0), prompt, max_new_tokens=11, eos_ids=NO_END)
    assert result.accepts == (K - 1, K - 1)  # 1 + 4 + 4 tokens; two more tokens come from a third, cut block
    assert result.num_verifications == 3
    assert len(result.tokens) == 11


@pytest.mark.parametrize("where", range(7))
def test_an_end_token_ends_the_text_wherever_it_falls_in_a_block(model: Any, where: int) -> None:
    prompt = prompt_of(6, seed=3)
    plain = greedy_decode(model, prompt, max_new_tokens=30, eos_ids=NO_END)
    eos = plain[where]
    end = plain.index(eos)
    for offset in (0, 1):
        drafter = Scripted([*prompt, *plain], offset)
        result = speculative_decode(model, drafter, prompt, max_new_tokens=30, eos_ids={eos})
        assert list(result.tokens) == plain[: end + 1]
        assert sum(a + 1 for a in result.accepts) == end  # the first token comes from the prefill
        assert replay_accepts(drafter, result) == list(result.accepts)
    assert greedy_decode(model, prompt, max_new_tokens=30, eos_ids={eos}) == plain[: end + 1]


def test_features_are_the_taps_of_a_full_forward(model: Any) -> None:
    prompt = prompt_of(12, seed=4)
    result = speculative_decode(model, make_drafter(model), prompt, max_new_tokens=20, eos_ids=NO_END)
    text = torch.tensor([[*prompt, *result.tokens]])
    with torch.no_grad():
        hidden = model(text, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[1][0], hidden[3][0]], dim=-1)[:-1]  # entry k + 1 is the output of layer k
    torch.testing.assert_close(result.features, expected, rtol=1e-4, atol=1e-5)


def test_lm_head_never_runs_over_the_prompt(model: Any) -> None:
    lengths: list[int] = []
    hooks = len(model.model.layers[0]._forward_hooks)
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    speculative_decode(model, make_drafter(model), prompt_of(20), max_new_tokens=6, eos_ids=NO_END)
    handle.remove()
    assert lengths[0] == 1
    assert set(lengths[1:]) == {K}
    assert len(model.model.layers[0]._forward_hooks) == hooks  # decoding leaves none behind


def test_replay_equals_decoding(model: Any) -> None:
    accepts = []
    for seed in range(6):
        drafter = make_drafter(model)
        result = speculative_decode(model, drafter, prompt_of(8, seed), max_new_tokens=40, eos_ids={7})
        assert replay_accepts(drafter, result) == list(result.accepts)
        accepts += result.accepts
    assert sum(accepts) > 0  # not only rejections


def test_another_texts_features_change_the_proposals(model: Any) -> None:
    drafter = make_drafter(model)
    one, two = (
        speculative_decode(model, drafter, prompt_of(10, seed), max_new_tokens=16, eos_ids=NO_END) for seed in (1, 2)
    )
    tokens = [*one.prompt, *one.tokens[:4]]
    proposals = []
    for features in (one.features, two.features, one.features):
        drafter.reset()
        proposals.append(drafter.propose(tokens, features[: len(tokens) - 1]))
    assert proposals[0] == proposals[2]
    assert proposals[0] != proposals[1]


def test_threads_decode_different_texts_with_one_model(model: Any) -> None:
    base = make_drafter(model)
    prompts = [prompt_of(5 + 3 * seed, seed) for seed in range(8)]

    def decode(prompt: list[int]) -> Any:
        return speculative_decode(model, base.fresh(), prompt, max_new_tokens=20, eos_ids=NO_END)

    alone = [decode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4, initializer=lambda: torch.set_num_threads(1)) as pool:
        together = list(pool.map(decode, prompts))
    for a, b in zip(alone, together, strict=True):
        assert (a.tokens, a.accepts) == (b.tokens, b.accepts)
        assert torch.equal(a.features, b.features)


@pytest.mark.parametrize("config", ["mistral", "qwen3"])
def test_sliding_targets_decode_past_their_window(config: str) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    made = {
        "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
        "qwen3": lambda: transformers.Qwen3Config(
            **SIZES, use_sliding_window=True, sliding_window=9, layer_types=kinds
        ),
    }[config]()
    sliding = make_model(made)
    prompt = prompt_of(14, seed=8)
    result = speculative_decode(sliding, make_drafter(sliding), prompt, max_new_tokens=30, eos_ids=NO_END)
    assert list(result.tokens) == greedy_decode(sliding, prompt, max_new_tokens=30, eos_ids=NO_END)
    assert float(full_forward_gaps(sliding, prompt, result.tokens)[0].max()) == 0.0


def test_linear_attention_targets_are_refused(model: Any) -> None:
    class Config:
        layer_types = ("linear_attention", "full_attention")

        def get_text_config(self, decoder: bool) -> "Config":
            return self

    class Model:
        config = Config()

    with pytest.raises(ValueError, match="linear-attention"):
        CachedTarget(Model(), (0,))


def test_leading_matches() -> None:
    assert leading_matches([1, 2, 3], [1, 2, 3, 4]) == 3
    assert leading_matches([1, 2, 3], [1, 5, 3, 4]) == 1
    assert leading_matches([1, 2, 3], []) == 0


# ---- the plain drafter ---------------------------------------------------------------------------------------------


def naive_logits(
    spec: DrafterSpec, w: dict[str, Tensor], embed: Tensor, head: Tensor, tokens: Sequence[int], features: Tensor
) -> Tensor:
    """One block over the whole context at once, head by head, position by position, from the definition."""
    n, k, e = len(tokens) - 1, spec.block_size, spec.head_dim
    group = spec.num_attention_heads // spec.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * w[name + ".weight"]

    def rotated(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for j in range(e // 2):
            angle = torch.tensor(position * spec.rope_theta ** (-2 * j / e), dtype=x.dtype)
            out[j] = x[j] * angle.cos() - x[j + e // 2] * angle.sin()
            out[j + e // 2] = x[j + e // 2] * angle.cos() + x[j] * angle.sin()
        return out

    c = norm(features @ w["fc.weight"].T, "hidden_norm")
    x = torch.stack([embed[tokens[-1]]] + [embed[spec.mask_token_id]] * (k - 1))
    for i in range(spec.num_hidden_layers):
        p = f"layers.{i}.self_attn."
        inner = norm(x, f"layers.{i}.input_layernorm")
        source = torch.cat([c, inner])  # keys and values of context, then block; positions 0 .. n + k - 1
        keys = (source @ w[p + "k_proj.weight"].T).view(n + k, -1, e)
        values = (source @ w[p + "v_proj.weight"].T).view(n + k, -1, e)
        queries = (inner @ w[p + "q_proj.weight"].T).view(k, -1, e)
        mixed = torch.zeros_like(queries)
        for h in range(spec.num_attention_heads):
            for row in range(k):
                q = rotated(norm(queries[row, h], p + "q_norm"), n + row)
                seen = []
                for position in range(n + k):
                    if position < n:
                        window = spec.sliding_window if spec.layer_types[i] == "sliding_attention" else None
                        visible = window is None or n + row - position < window
                    else:
                        visible = not spec.causal or position <= n + row
                    if visible:
                        seen.append(position)
                scores = torch.stack([q @ rotated(norm(keys[s, h // group], p + "k_norm"), s) for s in seen])
                mixed[row, h] = (scores * e**-0.5).softmax(0) @ torch.stack([values[s, h // group] for s in seen])
        x = x + mixed.flatten(1) @ w[p + "o_proj.weight"].T
        inner, p = norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
        gate = F.silu(inner @ w[p + "gate_proj.weight"].T) * (inner @ w[p + "up_proj.weight"].T)
        x = x + gate @ w[p + "down_proj.weight"].T
    return norm(x, "norm")[1:] @ head.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 1, "causal": True},
        {"num_attention_heads": 6, "num_key_value_heads": 1},
    ],
    ids=["full", "causal", "sliding", "window 1 hides all context", "one key head"],
)
def test_plain_drafter_equals_a_dense_one_without_a_cache(changes: dict[str, Any]) -> None:
    """Context arrives in pieces of 7, 1 and 3 positions, as in decoding; float64 leaves no room for a wrong term."""
    spec = make_spec(**changes)
    tensors = make_tensors(spec, torch.float64)
    embed, head = torch.randn(97, 32, dtype=torch.float64), torch.randn(97, 32, dtype=torch.float64)
    features = torch.randn(11, 64, dtype=torch.float64)
    drafter = PlainDrafter(spec, tensors, embed_weight=embed, head_weight=head)
    tokens = prompt_of(12)
    seen = 0
    for n in (7, 8, 11):
        got = drafter.logits(tokens[: n + 1], features[seen:n])
        want = naive_logits(spec, tensors, embed, head, tokens[: n + 1], features[:n])
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        seen = n


def test_empty_context(model: Any) -> None:
    """A prompt of one token: its anchor could only follow a context of one, but none at all must work too."""
    drafter = make_drafter(model)
    got = drafter.logits([5], torch.zeros(0, 64))
    want = naive_logits(
        drafter.spec, drafter.weights, drafter.embed_weight, drafter.head_weight, [5], torch.zeros(0, 64)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_reduced_head_proposes_full_ids(model: Any) -> None:
    ids = torch.tensor([90, 3, 44, 17, 8, 61])  # head order is not id order
    full = make_drafter(model)
    weights = full.embed_weight, full.head_weight
    spec = make_spec(draft_vocab_size=6)
    reduced = PlainDrafter(
        spec, make_tensors(spec), embed_weight=weights[0], head_weight=weights[1], draft_vocab_ids=ids
    )
    for seed in range(5):
        tokens, features = prompt_of(6, seed), torch.randn(5, 64)
        full.reset()
        reduced.reset()
        logits = full.logits(tokens, features)
        assert reduced.propose(tokens, features) == ids[logits[:, ids].argmax(-1)].tolist()


def test_bad_drafter_calls_are_refused(model: Any) -> None:
    drafter = make_drafter(model)
    with pytest.raises(ValueError, match="must have 5 positions before the anchor; found 3"):
        drafter.propose(prompt_of(6), torch.zeros(3, 64))
    with pytest.raises(ValueError, match="draft_vocab_size = None ids; found 2"):
        PlainDrafter(
            make_spec(),
            {},
            embed_weight=drafter.embed_weight,
            head_weight=drafter.head_weight,
            draft_vocab_ids=torch.arange(2),
        )


def test_no_file_of_the_trainer_is_used() -> None:
    """The plain drafter shares no arithmetic with the trainer: of drafter.py it takes the spec only."""
    text = Path(__import__("dflash_graph.plain_drafter", fromlist=["x"]).__file__).read_text()
    imports = [line for line in text.splitlines() if "dflash_graph" in line and line.startswith(("from", "import"))]
    assert imports == ["from dflash_graph.drafter import DrafterSpec"]
