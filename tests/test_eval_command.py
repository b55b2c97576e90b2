"""`dflash-graph eval`: several sets, sampling, JSON and picture, and options that cannot work refused at once."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_graph import evaluation
from dflash_graph.__main__ import main
from dflash_graph.eval_plot import plot_evaluation
from dflash_graph.evaluation import evaluate
from dflash_graph.sampling import Sampling
from tests.eval_tiny import K, chat, make_prompts, make_run, write_jsonl


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), prompts)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("short") / "short.jsonl", [chat("one"), chat("two"), chat("three")])


def test_sets_json_and_picture(
    run: Path, prompts: Path, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(run), "--prompts", str(prompts), "--prompts", f"easy={short}", "--max-new-tokens", "12"]
    picture = tmp_path / "eval.png"
    assert main([*arguments, "--json", "-", "--plot", str(picture), "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out)  # stdout holds nothing else
    assert "picture:" in err
    assert [(s["name"], s["num_prompts"], s["num_skipped"]) for s in values["sets"]] == [
        ("prompts", 7, 1),
        ("easy", 3, 0),
    ]
    counted = [s["drafter"]["num_verifications"] for s in values["sets"]]
    assert sum(counted) == values["drafter"]["num_verifications"]
    mean = sum(n * s["drafter"]["accept_length"] for n, s in zip(counted, values["sets"], strict=True)) / sum(counted)
    assert values["drafter"]["accept_length"] == pytest.approx(mean)
    assert len(values["drafter"]["at_least"]) == K - 1
    for s in values["sets"]:
        assert sum(g["num_prompts"] for g in s["by_prompt_length"]) <= s["num_prompts"]
    times = values["step_times"]
    expected = (
        values["drafter"]["accept_length"] * times["target_1_ms"] / (times["target_block_ms"] + times["draft_ms"])
    )
    assert values["estimated_speedup"] == pytest.approx(expected)
    assert times["repeats"] >= 8
    assert values["measured_speedup"] > 0
    assert len(values["texts"]) == 10
    assert values["sampling"] is None
    for words in ("on easy", "estimated speed-up", "measured speed-up", "ms (drafter)", "near-ties"):
        assert words in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_sampling(run: Path, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds decide the texts, whatever the number of workers; greedy and sampled drafts are told apart."""
    found: dict[str, Any] = {}
    cases = {
        "a": ["--seed", "3", "--workers", "1"],
        "b": ["--seed", "3", "--workers", "2"],
        "c": ["--seed", "4"],
        "sampled": ["--seed", "3", "--draft", "sampled", "--top-p", "0.9", "--top-k", "20"],
    }
    for name, more in cases.items():
        file = tmp_path / f"{name}.json"
        arguments = ["--prompts", str(short), "--max-new-tokens", "20", "--temperature", "0.8", "--json", str(file)]
        assert main(["eval", str(run), *arguments, *more]) == 0
        found[name] = json.loads(file.read_text())
    texts = {name: [t["tokens"] for t in values["texts"]] for name, values in found.items()}
    assert texts["a"] == texts["b"]
    assert texts["a"] != texts["c"]
    assert texts["a"] != texts["sampled"]
    assert found["a"]["sampling"] == {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "draft": "greedy", "seed": 3}
    assert found["a"]["other_features"] is not None
    assert found["sampled"]["other_features"] is None
    assert all(t["near_tie"] is None for t in found["a"]["texts"])
    out = capsys.readouterr().out
    assert "drawn from the target's own distribution: temperature 0.8, greedy drafts, seed 3" in out
    assert "top-k 20, top-p 0.9, sampled drafts" in out
    assert "that needs greedy drafts" in out


BAD: dict[str, tuple[list[str], str]] = {
    "json": (["--json", "none/x.json"], "--json must name a file in an existing folder"),
    "plot ending": (["--plot", "x.pdf"], r"--plot must name a \.png file"),
    "plot folder": (["--plot", "none/x.png"], r"--plot must name a \.png file in an existing folder"),
    "gguf": (["--target-gguf", "a.gguf"], "--target-gguf without --target"),
    "top-p": (["--top-p", "0.9"], "--top-p without --temperature"),
    "seed": (["--seed", "1"], "--seed without --temperature"),
    "concurrency": (["--concurrency", "2"], "--concurrency without --server"),
    "baseline": (["--baseline-server", "http://a"], "--baseline-server without --server"),
    "no local": (["--no-local"], "--no-local without --server"),
    "server": (["--server", "http://a", "--temperature", "1", "--top-k", "3"], "--top-k with --server"),
    "zero": (["--server", "http://a", "--concurrency", "0"], "--concurrency must be at least 1"),
    "cold": (["--temperature", "-1"], "temperature must be positive"),
    "nan": (["--temperature", "nan"], "temperature must be positive"),
    "limit": (["--limit", "0"], "limit must be at least 1"),
    "tokens": (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
    "workers": (["--workers", "0"], "workers must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    case: str, run: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluation, "load_full_model", never)
    more, message = BAD[case]
    assert main(["eval", str(run), "--prompts", str(short), *more]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_picture_needs_matplotlib(
    run: Path, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert main(["eval", str(run), "--prompts", str(short), "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'dflash-graph[plot]'" in capsys.readouterr().err
    monkeypatch.undo()
    report = evaluate(run, short, max_new_tokens=8, step_times=False, control_prompts=0, alone_prompts=0)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match="needs matplotlib"):
        plot_evaluation(report, tmp_path / "x.png")
    monkeypatch.undo()
    assert plot_evaluation(report, tmp_path / "deep" / "x.png").is_file(), "steps not timed, one set"


def test_a_server_gets_the_same_prompts(
    run: Path, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    class Served:
        def __str__(self) -> str:
            return "served"

        def to_dict(self) -> dict[str, Any]:
            return {"accept_length": 2.5}

    def evaluate_server(server: str, prompts: Any, **options: Any) -> Served:
        calls.append({"server": server, "prompts": prompts, **options})
        return Served()

    module = ModuleType("dflash_graph.server_eval")
    module.evaluate_server = evaluate_server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dflash_graph.server_eval", module)
    file = tmp_path / "served.json"
    arguments = [
        "eval",
        str(run),
        "--prompts",
        f"s={short}",
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
        "--json",
        str(file),
    ]
    assert main([*arguments, "--server", "http://a", "--baseline-server", "http://b", "--concurrency", "4"]) == 0
    (call,) = calls
    assert (call["server"], call["baseline_server"], call["concurrency"]) == ("http://a", "http://b", 4)
    assert (call["max_new_tokens"], call["temperature"]) == (8, 0.0)
    assert [(s.name, len(s.prompts)) for s in call["prompts"]] == [("s", 2)]
    values = json.loads(file.read_text())
    assert values["server"] == {"accept_length": 2.5}
    assert values["local"]["drafter"]["accept_length"] == call["local"].drafter.accept_length
    assert "served" in capsys.readouterr().out
    assert main([*arguments, "--server", "http://a", "--no-local"]) == 0
    assert calls[1]["local"] is None
    assert json.loads(file.read_text())["local"] is None


# ---- odd prompts ----------------------------------------------------------------------------------------------------


def test_prompts_that_end_at_once(run: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of one set end with their first token: the set has no acceptance, the others have theirs."""
    first = evaluate(run, short, max_new_tokens=8, limit=1, step_times=False).texts[0].tokens[0]
    original = evaluation.eos_ids
    monkeypatch.setattr(evaluation, "eos_ids", lambda *args: original(*args) | {first})
    with pytest.raises(ValueError, match="every text ends at once or is shorter than one block"):
        evaluate(run, short, max_new_tokens=8, limit=1)
    other = write_jsonl(short.parent / "other.jsonl", [chat("another question, longer")] * 2)
    report = evaluate(run, [f"ends={short}", other], max_new_tokens=12, limit=1)
    ends, rest = report.sets
    assert (ends.drafter, ends.by_prompt_length, ends.num_tokens) == (None, (), 1)
    assert rest.drafter == report.drafter
    assert "(no verification to count)" in str(report)


def test_texts_of_one_block_are_decoded_but_not_counted(run: Path, short: Path) -> None:
    with pytest.raises(ValueError, match="no verification to count"):
        evaluate(run, short, max_new_tokens=K)
    report = evaluate(run, short, max_new_tokens=K + 1, step_times=True)
    assert all(len(t.accepts) <= 1 for t in report.texts)


def test_every_token_counts_at_the_right_place(run: Path, short: Path) -> None:
    """Of sampled texts, too: accepted drafts, bonus tokens and the first token are all there is."""
    report = evaluate(run, short, max_new_tokens=30, sampling=Sampling(temperature=1.5, draft="sampled"), workers=1)
    for text in report.texts:
        assert len(text.tokens) <= 30
        assert sum(a + 1 for a in text.accepts) <= len(text.tokens) - 1
    assert report.tokens_per_s is not None
