"""The whole evaluation of a tiny run folder, the near-tie rule, and the definitions of accept_length."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_graph.checkpoint import load_checkpoint
from dflash_graph.config import TargetConfig, load_config
from dflash_graph.decoding import DecodeResult, full_forward_gaps, greedy_decode, replay_accepts, speculative_decode
from dflash_graph.drafter import DrafterSpec
from dflash_graph.evaluation import evaluate, other_features
from dflash_graph.near_ties import check_greedy
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.prompts import load_prompts
from dflash_graph.report import by_prompt_length, summarise, teacher_forced_accept_length
from tests.eval_tiny import K, make_prompts, make_run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), prompts)


def test_whole_evaluation(run: Path, prompts: Path) -> None:
    report = evaluate(run, prompts, max_new_tokens=24, control_prompts=5, alone_prompts=7, workers=2)
    assert (report.num_prompts, report.num_skipped, report.alone_prompts) == (7, 1, 7)
    assert report.near_ties == ()
    assert report.checkpoint.endswith("step_00000005")
    assert 1.0 < report.drafter.accept_length < K
    assert len(report.drafter.at_least) == K - 1
    assert list(report.baselines) == ["bigram table", "context-blind table"]
    assert report.other_features is not None
    assert report.other_features.num_verifications > 0
    assert sum(g.num_prompts for g in report.by_prompt_length) == 7
    assert [g.shortest for g in report.by_prompt_length] == sorted(g.shortest for g in report.by_prompt_length)
    text = str(report)
    for words in ("accept_length", "bigram table", "context-blind table", "features of another prompt", "near-ties"):
        assert words in text
    assert json.loads(json.dumps(report.to_dict()))["drafter"]["accept_length"] == report.drafter.accept_length
    # The same by hand, without threads: same acceptance.
    checkpoint = load_checkpoint(run / "checkpoints" / "step_00000005")
    target = load_config(run / "config.yaml").target.path
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    spec = DrafterSpec.from_dict(checkpoint.state["drafter"])
    weights = {name: checkpoint.drafter[name] for name in spec.parameter_shapes()}
    drafter = PlainDrafter(
        spec,
        weights,
        embed_weight=model.get_input_embeddings().weight.detach(),
        head_weight=model.get_output_embeddings().weight.detach(),
        draft_vocab_ids=checkpoint.drafter["draft_vocab_ids"],
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    results = [
        speculative_decode(model, drafter, prompt, max_new_tokens=24, eos_ids={257})
        for prompt in load_prompts(prompts, tokenizer)[:7]
    ]
    assert summarise([a for r in results for a in r.accepts], K) == report.drafter
    foreign = []
    for i in range(5):  # each prompt's text drafted from the features of the prompt before it, the first from the fifth
        length = len(results[i].prompt) + len(results[i].tokens) - 1
        foreign += replay_accepts(drafter, results[i], other_features(results[i - 1 if i else 4].features, length))
    assert summarise(foreign, K) == report.other_features
    assert foreign != [a for r in results[:5] for a in r.accepts]


def test_checkpoint_alone_says_what_it_cannot_measure(run: Path, prompts: Path, tmp_path: Path) -> None:
    alone = tmp_path / "a" / "b" / "step_00000005"
    alone.parent.mkdir(parents=True)
    (run / "checkpoints" / "step_00000005").rename(alone)
    try:
        report = evaluate(alone, prompts, max_new_tokens=12, limit=2, control_prompts=0, alone_prompts=0)
    finally:
        alone.rename(run / "checkpoints" / "step_00000005")
    assert report.baselines == {}
    assert report.other_features is None
    assert report.alone_tokens_per_s is None
    assert "baselines not measured" in str(report)


def test_unusable_input_is_refused(run: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run folder with a whole checkpoint"):
        evaluate(tmp_path, prompts)
    with pytest.raises(ValueError, match=r"prompts of set none cannot be used: .*missing"):
        evaluate(run, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no prompt leaves room for 200 new tokens"):
        evaluate(run, prompts, max_new_tokens=200)


# ---- equality with greedy decoding ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied() -> Any:
    """A model whose ids 2i and 2i + 1 have almost the same head row: every choice is a near-tie of about 1e-4."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=1.0)
        model.lm_head.weight[1::2] = model.lm_head.weight[::2] * (1 - 1e-5)
    return model


def result_of(prompt: list[int], tokens: list[int]) -> DecodeResult:
    return DecodeResult(
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        accepts=(),
        num_verifications=0,
        seconds=1.0,
        max_new_tokens=len(tokens),
        features=torch.zeros(0, 0),
    )


def test_near_tie_rule(tied: Any) -> None:
    prompt = [3, 1, 4]
    greedy = greedy_decode(tied, prompt, max_new_tokens=8, eos_ids=frozenset())
    assert not check_greedy(tied, result_of(prompt, greedy), gap=1e-3, greedy=greedy)
    # The twin of the greedy token, and from there on the greedy continuation of that other text.
    other = [*greedy[:3], greedy[3] ^ 1]
    other += greedy_decode(tied, [*prompt, *other], max_new_tokens=4, eos_ids=frozenset())
    shortfall, gap = full_forward_gaps(tied, prompt, other)
    assert 0 < float(shortfall[3]) < 1e-3
    assert float(gap[3]) < 1e-3
    assert check_greedy(tied, result_of(prompt, other), gap=1e-3, greedy=greedy)
    with pytest.raises(RuntimeError, match="generated token 3 falls short"):
        check_greedy(tied, result_of(prompt, other), gap=1e-7)


def test_any_other_difference_is_an_error(tied: Any) -> None:
    prompt = [3, 1, 4]
    greedy = greedy_decode(tied, prompt, max_new_tokens=8, eos_ids=frozenset())
    wrong = [*greedy[:5], (greedy[5] + 2) % 40]
    with pytest.raises(RuntimeError, match="prompt 7 is not greedy: generated token 5"):
        check_greedy(tied, result_of(prompt, wrong), gap=1e-3, name="prompt 7")
    with pytest.raises(RuntimeError, match="generated token 6"):  # cut short
        check_greedy(tied, result_of(prompt, greedy[:6]), gap=1e-3, greedy=greedy)


def test_a_difference_from_the_token_loop_needs_a_small_gap() -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    greedy = greedy_decode(model, [1], max_new_tokens=6, eos_ids=frozenset())
    claimed = [*greedy[:2], (greedy[2] + 1) % 40, *greedy[3:]]
    with pytest.raises(RuntimeError, match="own greedy decoding at generated token 2"):
        check_greedy(model, result_of([1], greedy), gap=1e-5, greedy=claimed)


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_summarise_by_hand() -> None:
    a = summarise([0, 3, 1, 1, 0], K)
    assert a.accept_length == pytest.approx(2.0)
    assert a.at_least == pytest.approx((3 / 5, 1 / 5, 1 / 5))
    assert a.conditional == pytest.approx((3 / 5, 1 / 3, 1.0))
    assert a.num_verifications == 5
    assert 1 + sum(a.at_least) == pytest.approx(a.accept_length)
    assert summarise([0, 0], K).conditional == (0.0, None, None)
    with pytest.raises(ValueError, match="raise max_new_tokens"):
        summarise([], K)


def test_teacher_forced_accept_length_by_hand() -> None:
    correct = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]]).bool()
    assert teacher_forced_accept_length(correct) == pytest.approx(1 + (3 + 1 + 0 + 2) / 4)
    assert teacher_forced_accept_length(torch.ones(2, K - 1).bool()) == K
    with pytest.raises(ValueError, match="A >= 1"):
        teacher_forced_accept_length(torch.zeros(0, 3).bool())
    with pytest.raises(ValueError, match="bool"):
        teacher_forced_accept_length(torch.zeros(2, 3))


def test_quartiles_by_prompt_length() -> None:
    results = [result_of([0] * n, [1]) for n in (9, 1, 5, 3, 7)]
    results = [DecodeResult(**{**r.__dict__, "accepts": (len(r.prompt) % 3,)}) for r in results]
    groups = by_prompt_length(results, K)
    assert [(g.shortest, g.longest, g.num_prompts) for g in groups] == [(1, 3, 2), (5, 5, 1), (7, 7, 1), (9, 9, 1)]
    assert [g.accept_length for g in groups] == [1.5, 3.0, 2.0, 1.0]


def test_other_features_fit_any_length() -> None:
    features = torch.arange(6.0).view(3, 2)
    assert torch.equal(other_features(features, 2), features[:2])
    assert torch.equal(other_features(features, 7)[:, 0], torch.tensor([0.0, 2, 4, 0, 2, 4, 0]))


def test_target_override_is_used(run: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a readable model folder"):
        evaluate(run, prompts, target=TargetConfig(path=str(tmp_path / "nowhere")))
