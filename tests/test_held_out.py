"""Decoding held-out prompts during training: it measures the drafter as it is, and changes nothing of the run."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_graph import training
from dflash_graph.config import TargetConfig
from dflash_graph.control import RunControl
from dflash_graph.drafter import FlatParameters
from dflash_graph.drafter_folder import read_drafter
from dflash_graph.evaluation import evaluate
from dflash_graph.graphs import StepGraph
from dflash_graph.held_out import HeldOut, whole_model
from dflash_graph.initialise import random_parameters
from dflash_graph.metrics import read_records
from dflash_graph.plan import make_plan
from dflash_graph.ranks import Ranks
from dflash_graph.target import Target, load_full_model
from dflash_graph.training import Run, train
from tests.rank_harness import start_ranks
from tests.tiny import SPECIAL, WORDS, make_tiny, tiny_config, tiny_settings, weights

EVAL = ("eval.every=4", "eval.num_prompts=5", "eval.max_new_tokens=24")


def evals(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(run) if record["kind"] == "eval"]


def write_questions(folder: Path) -> Path:
    """Two questions in the words of the held-out rows."""
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("w1 w4 w7 w10", "w2 w5 w8")]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("mode", ["recorded", "eager", "auto"])
@pytest.mark.parametrize("changes", [(), ("loss.labels=target", "drafter.draft_vocab_size=40")], ids=["", "teacher"])
def test_evaluation_changes_no_weight(tiny: Path, tmp_path: Path, mode: str, changes: tuple[str, ...]) -> None:
    """Bitwise: masters and moments of the last checkpoint, with and without it, in graphs and without them."""
    settings = (f"graphs.mode={mode}", "epochs=1", "checkpoint.every=100", *changes)
    train(tiny_config(tiny, tmp_path / "with", *settings, *EVAL))
    train(tiny_config(tiny, tmp_path / "without", *settings))
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    found = evals(tmp_path / "with")
    assert [record["step"] for record in found] == [4, 8, 11]
    assert not evals(tmp_path / "without")
    assert all(record["prompts"] == 5 and record["not_greedy"] == 0 for record in found)


def test_graphs_replay_before_and_after_with_the_same_result(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's last replay, repeated from the same state before and after a pass, gives the same bytes."""
    compared: list[bool] = []
    last: list[StepGraph] = []
    call, evaluate_ = StepGraph.__call__, HeldOut.evaluate

    def noting(self: StepGraph) -> None:
        if self.name.startswith("micro"):
            last[:] = [self]
        call(self)

    def replay() -> list[bytes]:
        graph = last[0]
        assert graph.captured is not None
        tensors = [*graph.state.values(), *graph.outputs.values()]
        saved = [tensor.clone() for tensor in tensors]
        graph()
        found = [tensor.contiguous().numpy().tobytes() for tensor in tensors]
        changed = any(not torch.equal(a, b) for a, b in zip(tensors, saved, strict=True))
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        assert changed, "a replay that changes nothing would prove nothing"
        return found

    def watched(self: HeldOut, *args: Any) -> Any:
        before = replay()
        result = evaluate_(self, *args)
        compared.append(before == replay())
        return result

    monkeypatch.setattr(StepGraph, "__call__", noting)
    monkeypatch.setattr(HeldOut, "evaluate", watched)
    train(tiny_config(tiny, tmp_path / "run", "graphs.mode=recorded", "epochs=1", *EVAL))
    assert compared == [True] * 3


def test_it_measures_what_eval_measures(tmp_path: Path) -> None:
    """The last pass against `evaluate` on the last checkpoint; two sets, of which one holds two prompts."""
    make_tiny(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():  # a target that goes on as its data does, which a drafter learns quickly
        for word in range(len(WORDS)):
            head[len(SPECIAL) + (word + 3) % len(WORDS)] = embed[len(SPECIAL) + word]
    model.save_pretrained(tmp_path / "model")
    heldout, questions = tmp_path / "heldout.jsonl", write_questions(tmp_path)
    sets = ("eval.num_prompts=8", f"eval.prompts=[{heldout}, questions={questions}]")
    train(tiny_config(tmp_path, tmp_path / "run", "epochs=10", "eval.every=50", "eval.max_new_tokens=24", *sets))
    record = evals(tmp_path / "run")[-1]
    report = evaluate(
        tmp_path / "run", [heldout, f"questions={questions}"], limit=4, max_new_tokens=24, workers=1, step_times=False
    )
    assert record["prompts"] == report.num_prompts == 6
    assert record["accept_length"] == report.drafter.accept_length > 1.5, "a drafter that has learnt something"
    assert record["acceptance"] == list(report.drafter.at_least)
    assert record["verifications"] == report.drafter.num_verifications
    assert record["tokens"] == report.num_tokens
    servable = read_drafter(Path(report.checkpoint) / "servable", TargetConfig(path=str(tmp_path / "model")))
    assert servable.spec.to_dict() == read_drafter(tmp_path / "run").spec.to_dict()
    assert record["sets"] == {s.name: None if s.drafter is None else s.drafter.accept_length for s in report.sets}


def test_held_out_rows_become_prompts_up_to_their_last_answer(tiny: Path, tmp_path: Path) -> None:
    held_out = HeldOut(make_plan(tiny_config(tiny, tmp_path, *EVAL)))
    rows = [json.loads(line)["messages"] for line in (tiny / "heldout.jsonl").read_text().splitlines()]
    tokenizer = held_out._tokenizer
    for prompt, messages in zip(held_out.prompts, rows, strict=False):
        expected = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt.tokens).split() == expected.split()
    assert len(held_out.prompts) == 5


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_only_the_layers_behind_the_taps_are_loaded_twice(tiny: Path) -> None:
    config = TargetConfig(path=str(tiny / "model"))
    target = Target(
        config,
        target_layer_ids=(0, 2),
        output=torch.zeros(16, 64),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    model, reference = whole_model(config, target), load_full_model(config, torch.device("cpu"), torch.float32)
    mine = {p.data_ptr() for p in target.decoder.parameters()} | {target.head_weight.data_ptr()}
    own = [name for name, p in model.named_parameters() if p.data_ptr() not in mine]
    assert {name.split(".")[2] for name in own if ".layers." in name} == {"3", "4"}
    assert [name for name in own if ".layers." not in name] == ["model.norm.weight"]
    ids = torch.arange(12)[None]
    before = target.output.clone()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    assert torch.equal(target.output, before), "the target's own hooks are not there"
    assert model.config._attn_implementation != target.decoder.config._attn_implementation


@pytest.mark.parametrize("changes", [(), ("loss.labels=target",)], ids=["", "teacher"])
def test_the_plan_states_the_memory(
    tiny: Path, tmp_path: Path, changes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tiny_config(tiny, tmp_path / "run", *EVAL, *changes))
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    rest = 0 if changes else layer * 4  # taps 1 and 3 of 5 layers
    line = str(HeldOut(plan))
    assert f"target layers {rest / 2**20:.1f} MiB" in line
    assert "5 prompts of validation every 4 steps" in line
    train(tiny_config(tiny, tmp_path / "run", *EVAL, *changes), dry_run=True)
    assert line in capsys.readouterr().out


def test_a_run_from_a_store_loads_every_layer(tiny: Path, tmp_path: Path) -> None:
    """It holds embedding and head only; what is measured is the same."""
    made = ("features.source=store", f"features.path={tmp_path / 'store'}", "features.missing=generate", "epochs=1")
    train(tiny_config(tiny, tmp_path / "first", *made, *EVAL))
    read = ("features.source=store", f"features.path={tmp_path / 'store'}", "epochs=1")
    config = tiny_config(tiny, tmp_path / "second", *read, *EVAL)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert f"target layers {5 * layer * 4 / 2**20:.1f} MiB" in str(HeldOut(make_plan(config)))
    train(config)
    train(tiny_config(tiny, tmp_path / "online", "epochs=1", *EVAL))
    runs = [evals(tmp_path / name) for name in ("first", "second", "online")]
    figures = [[{k: v for k, v in r.items() if k not in ("seconds", "time")} for r in records] for records in runs]
    assert figures[0] == figures[1] == figures[2]
    assert len(figures[0]) == 3


# ---- an orderly end -------------------------------------------------------------------------------------------------


def test_a_request_to_finish_ends_the_pass_and_saves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = HeldOut._decode
    runs: list[Run] = []
    run = Run.run

    def asking(self: HeldOut, *args: Any) -> Any:
        asking.count += 1  # type: ignore[attr-defined]
        if asking.count == 2:  # type: ignore[attr-defined]
            runs[0].finish.set()  # what the first SIGINT does
        return decode(self, *args)

    asking.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(HeldOut, "_decode", asking)
    monkeypatch.setattr(Run, "run", lambda self: (runs.append(self), run(self))[1])
    result = train(tiny_config(tiny, tmp_path / "run", *EVAL))
    assert (result.step, result.complete, asking.count) == (4, False, 2)  # type: ignore[attr-defined]
    assert not evals(tmp_path / "run")
    assert weights(tmp_path / "run")
    assert train(tiny_config(tiny, tmp_path / "run", *EVAL), resume="auto").complete


def test_a_stop_ends_it_inside_a_text(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error elsewhere: the drafter leaves at its next verification."""
    beats = []
    beat = RunControl.beat

    class Planted(Exception):
        pass

    def counting(self: RunControl) -> None:
        if threading.current_thread().name == "drafter" and evaluating:
            beats.append(1)
            if len(beats) == 3:
                self.fail("another", Planted())
        beat(self)

    evaluating: list[int] = []
    evaluate_, original = HeldOut.evaluate, counting

    def entering(self: HeldOut, *args: Any) -> Any:
        evaluating.append(1)
        return evaluate_(self, *args)

    monkeypatch.setattr(RunControl, "beat", original)
    monkeypatch.setattr(HeldOut, "evaluate", entering)
    with pytest.raises(Planted):
        train(tiny_config(tiny, tmp_path / "run", *EVAL))
    assert len(beats) == 3


def test_a_text_that_is_not_greedy_is_reported_and_ends_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(training.HeldOut.evaluate.__globals__["NEAR_TIE_GAP"], torch.float32, -1.0)
    assert train(tiny_config(tiny, tmp_path / "run", *EVAL, "epochs=1")).complete
    assert [record["not_greedy"] for record in evals(tmp_path / "run")] == [5, 5, 5]
    assert "5 TEXTS ARE NOT GREEDY" in capsys.readouterr().out


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_ranks_share_the_prompts(tiny: Path, tmp_path: Path) -> None:
    """Two ranks, one after the other, then what each gives the other: all prompts, each once, and equal results."""
    plan = make_plan(tiny_config(tiny, tmp_path, *EVAL))
    held_out = HeldOut(plan)
    target = Target(
        plan.config.target,
        target_layer_ids=plan.spec.target_layer_ids,
        output=torch.zeros(256, 64),
        device=plan.device,
        dtype=plan.target_dtype,
    )
    held_out.load(target)
    parameters = FlatParameters(plan.spec.parameter_shapes(), device=plan.device, compute_dtype=plan.compute_dtype)
    parameters.load(random_parameters(plan.spec, 3))
    control, asked = RunControl(), []

    class One(Ranks):
        def __init__(self, rank: int, others: list[Any]) -> None:
            self.rank, self.world, self.others, self.sent = rank, 2, others, None

        def all_gather(self, value: Any) -> list[Any]:
            self.sent = value
            return [value, *self.others] if self.rank == 0 else [*self.others, value]

    def end() -> bool:
        asked.append(1)
        return False

    second = One(1, [[]])
    held_out.evaluate(parameters, second, control, end)
    first = One(0, [second.sent])
    both = held_out.evaluate(parameters, first, control, end)
    alone = held_out.evaluate(parameters, Ranks(), control, lambda: False)
    assert both is not None
    assert alone is not None
    assert len(asked) == 6, "both vote three times: for five prompts"
    assert (both.acceptance, both.by_set, both.num_prompts) == (alone.acceptance, alone.by_set, 5)
    assert both.num_tokens == alone.num_tokens


def test_two_processes_find_what_one_finds(tiny: Path, tmp_path: Path) -> None:
    """Real ranks, with a set that gives one rank more prompts than the other."""
    settings = ("schedule.jobs_per_step=4", "epochs=1", *EVAL)
    train(tiny_config(tiny, tmp_path / "alone", *settings))
    command = [*tiny_settings(tiny, tmp_path / "both"), "devices.ranks=2", *settings]
    ranks = start_ranks(tmp_path / "launcher", 2, ["-m", "dflash_graph", "train", *command])
    assert ranks.wait() == [0, 0], "\n".join(map(ranks.output, range(2)))
    alone, both = evals(tmp_path / "alone"), evals(tmp_path / "both")
    assert [(r["step"], r["prompts"]) for r in both] == [(r["step"], r["prompts"]) for r in alone]
    assert [(r["accept_length"], r["tokens"]) for r in both] == [(r["accept_length"], r["tokens"]) for r in alone]
    assert any(r["kind"] == "train" and "rank1.drafter" in r["waits"] for r in read_records(tmp_path / "both"))


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_without_an_effect_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no effect without eval\.every"):
        tiny_config(tiny, tmp_path, "eval.num_prompts=4")
    with pytest.raises(ValueError, match=r"eval\.every must be at least 1"):
        tiny_config(tiny, tmp_path, "eval.every=0")
    nothing = tiny_config(tiny, tmp_path / "run", "eval.every=5", "data.validation=[]")
    with pytest.raises(ValueError, match=r"set eval\.prompts"):
        train(nothing)
    with pytest.raises(ValueError, match=r"no prompt of eval\.prompts leaves room"):
        train(tiny_config(tiny, tmp_path / "run2", "eval.every=5", "eval.max_new_tokens=600"))
    assert not list((tmp_path / "run2").glob("checkpoints/*"))
    assert HeldOut.of(make_plan(tiny_config(tiny, tmp_path))) is None


def test_targets_that_it_cannot_decode_are_refused_at_once(tiny: Path, tmp_path: Path) -> None:
    plan = make_plan(tiny_config(tiny, tmp_path, *EVAL))
    spread = replace(plan, placement=replace(plan.placement, targets=((torch.device("cpu"),) * 2,)))
    with pytest.raises(ValueError, match="needs a target on one device"):
        HeldOut(spread)
    model = tmp_path / "linear"
    shutil.copytree(tiny / "model", model)
    settings = json.loads((model / "config.json").read_text())
    kinds = ["linear_attention"] + ["full_attention"] * 4
    (model / "config.json").write_text(json.dumps(settings | {"layer_types": kinds}))
    linear = replace(plan, config=tiny_config(tiny, tmp_path, *EVAL, f"target.path={model}"))
    with pytest.raises(ValueError, match="cannot roll back linear-attention"):
        HeldOut(linear)


def test_graph_mode_debug_is_clean(tiny: Path, tmp_path: Path) -> None:
    """The observer of the steps finds nothing in it."""
    assert train(tiny_config(tiny, tmp_path / "run", "graphs.mode=debug", "epochs=1", *EVAL)).complete
    assert len(evals(tmp_path / "run")) == 3
