"""Evaluation on a server: counters as differences, both dialects, a baseline, and every way a server can be wrong."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.__main__ import main
from dflash_graph.prompts import PromptSet
from dflash_graph.server_client import Counters, Server, ServerError
from dflash_graph.server_eval import evaluate_server
from tests.stand_in_server import ACCEPTED, StandIn, serving


def prompt_set(name: str, count: int, first: int = 0) -> PromptSet:
    prompts = [[1, 5, 9 + i, *range(i % 7)] for i in range(first, first + count)]
    return PromptSet(name=name, path=f"{name}.jsonl", prompts=prompts, messages=[[] for _ in prompts])


SETS = [prompt_set("chat", 6), prompt_set("code", 5, 100)]


def truth(state: StandIn, sets: list[PromptSet], limit: int) -> tuple[int, int, int]:
    """(tokens, verifications, accepted drafts) that the stand-in spends on the prompts."""
    other = StandIn()
    tokens = verified = 0
    for each in sets:
        for prompt in each.prompts:
            count = min(state.answer_tokens(prompt), limit)
            tokens += count
            verified += other.verify(count)
    return tokens, verified, other.accepted


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_served_acceptance_is_the_servers_own_count(dialect: str, concurrency: int) -> None:
    with serving(dialect=dialect, delay_s=0.01) as state:
        state.verify(500)  # what others did before does not count
        report = evaluate_server(state.url + "/v1", SETS, max_new_tokens=30, concurrency=concurrency)
        tokens, verified, accepted = truth(state, SETS, 30)
    assert report.dialect == dialect
    assert report.num_tokens == tokens
    assert report.accept_length == pytest.approx(1 + accepted / verified)
    assert [each.num_prompts for each in report.sets] == [6, 5]
    one, verified_one, accepted_one = truth(state, SETS[:1], 30)
    assert report.sets[0].num_tokens == one
    assert report.sets[0].accept_length == pytest.approx(1 + accepted_one / verified_one)
    assert state.most_at_once == concurrency
    assert (report.failed, report.notes, report.speed_up) == ((), (), None)
    if dialect == "vllm":
        assert report.at_least == tuple(sorted(report.at_least, reverse=True))
        assert sum(report.at_least) == pytest.approx(accepted / verified)
    sent = [request["body"].get("prompt") or request["body"]["input_ids"] for request in state.requests]
    assert sent[0] == SETS[0].prompts[0]  # the warm-up
    assert sorted(sent[1:]) == sorted(prompt for each in SETS for prompt in each.prompts)
    json.dumps(report.to_dict(), allow_nan=False)
    assert "chat" in str(report)
    assert ACCEPTED[0] == 3


def test_speed_up_over_a_server_without_a_drafter() -> None:
    with serving() as fast, serving(delay_s=0.2, drafter=False, model="stand-in") as plain:
        report = evaluate_server(fast.url, SETS, baseline_server=plain.url, max_new_tokens=20)
    assert report.speed_up is not None
    assert report.baseline_tokens_per_s is not None
    assert report.speed_up > 1.2  # of a busy machine, too
    assert report.speed_up == pytest.approx(report.tokens_per_s / report.baseline_tokens_per_s)
    assert f"speed-up {report.speed_up:.2f}" in str(report)
    assert len(plain.requests) == 11


def test_a_baseline_with_a_drafter_or_another_model_is_said() -> None:
    with serving() as one, serving(model="other") as two:
        notes = evaluate_server(one.url, SETS[:1], baseline_server=two.url).notes
    assert any("it has a drafter, so this is no speed-up" in note for note in notes)
    assert any("is called other, not stand-in" in note for note in notes)


def test_other_users_of_the_server_are_noticed() -> None:
    with serving(foreign_tokens=50) as state:
        notes = evaluate_server(state.url, SETS).notes
    assert any("others used it" in note for note in notes)


def test_failed_requests_are_counted_and_retried_ones_are_not() -> None:
    with serving(faults={2: 503, 4: 400, 6: "drop"}) as state:
        report = evaluate_server(state.url, SETS)
    assert len(report.failed) == 1
    assert "answered 400" in report.failed[0]
    assert report.num_tokens < truth(state, SETS, 128)[0]
    assert "1 requests failed" in str(report)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"drafter": False}, "without a drafter, or without statistics.*--speculative-config"),
        ({"drafter": False, "dialect": "sglang"}, "--speculative-algorithm"),
        ({"metrics": False}, "must be a vLLM or an SGLang whose counters can be read"),
        ({"dialect": "openai"}, "must be a vLLM or an SGLang"),
        ({"faults": dict.fromkeys(range(1, 100), 400)}, "answered none of 6 requests; the first: .*answered 400"),
        ({"faults": dict.fromkeys(range(100), "garbage")}, "must answer JSON"),
    ],
)
def test_servers_that_cannot_be_evaluated_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with serving(**options) as state, pytest.raises(ValueError, match=words):
        evaluate_server(state.url, SETS)


def test_an_unreachable_server_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/v1/models cannot be reached"):
        evaluate_server("http://127.0.0.1:9", SETS)
    with pytest.raises(ValueError, match="must begin with http"):
        evaluate_server("localhost:8000", SETS)
    with serving() as state, pytest.raises(ValueError, match="must be another server"):
        evaluate_server(state.url, SETS, baseline_server=state.url + "/")


def test_a_restarted_server_is_noticed() -> None:
    with serving() as state:
        before = Server(state.url).counters()
        assert before is not None
        state.verify(100)
        after = Server(state.url).counters()
        assert after is not None
        assert after.since(before).drafts == state.drafts - before.drafts
        with pytest.raises(ServerError, match="it was started again"):
            before.since(after)


def test_counters_of_sets_add_up() -> None:
    total = sum((Counters(2, 3, (2, 1), 7), Counters(1, 1, (1,), None), Counters()), Counters())
    assert total == Counters(3, 4, (3, 1), 7)
    assert total.accept_length == pytest.approx(1 + 4 / 3)
    assert Counters().accept_length is None


def test_a_model_is_chosen_by_name_and_a_key_is_sent() -> None:
    with serving() as state:
        with pytest.raises(ServerError, match=r"must serve other; found \['stand-in'\]"):
            Server(state.url, model="other")
        Server(state.url, api_key="secret").complete([1], max_new_tokens=4, temperature=0.0, seed=None)
    assert state.requests[-1]["auth"] == "Bearer secret"


def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.tiny import tiny_settings

    config = tmp_path / "run.yaml"
    config.write_text("{}")
    settings = tiny_settings(tiny, tmp_path / "run")
    assert main(["export", str(config), "--untrained", "--output", str(tmp_path / "export"), *settings]) == 0
    capsys.readouterr()
    with serving() as state:
        arguments = [
            "eval",
            str(tmp_path / "export"),
            "--prompts",
            f"held={tiny / 'heldout.jsonl'}",
            "--server",
            state.url,
        ]
        assert main([*arguments, "--no-local", "--max-new-tokens", "12", "--json", str(tmp_path / "r.json")]) == 0
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["local"] is None
    assert values["server"]["sets"][0]["name"] == "held"
    assert values["server"]["sets"][0]["num_prompts"] == 8
    assert threading.active_count() < 50
