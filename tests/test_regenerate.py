"""Answers rewritten by the target: one per row whatever happens, histories rewritten in order, ids kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.__main__ import main
from dflash_graph.answer_log import AnswerLog
from dflash_graph.regenerate import Sampling
from tests.stand_in_server import serving


def write_rows(path: Path, count: int, turns: int = 1) -> Path:
    rows = []
    for i in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]
        for t in range(turns):
            messages += [
                {"role": "user", "content": f"question {i}.{t}"}, {"role": "assistant", "content": "old answer"},
            ]  # fmt: skip
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def regenerate(source: Path, output: Path, url: str, *more: str) -> int:
    return main(["regenerate", str(source), "--output", str(output), "--endpoint", url, *more])


def test_every_turn_is_asked_over_the_history_as_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", 3, turns=2)
    with serving() as state:
        assert regenerate(source, tmp_path / "out.jsonl", state.url, "--concurrency", "2") == 0
    asked = {json.dumps(r["body"]["messages"]) for r in state.requests}
    assert len(state.requests) == len(asked) == 6
    assert "old answer" not in "".join(asked)
    for record in answers(tmp_path / "out.jsonl"):
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        first, second = record["messages"][2]["content"], record["messages"][4]["content"]
        assert first.startswith("answer to ")
        assert json.dumps(record["messages"][:2]) in asked
        assert json.dumps(record["messages"][:4]) in asked
        assert first != second
        assert "input_ids" not in record  # of a row with two answers the ids of the first are not known to stay
    assert "3 in = 3 answered + 0 before + 0 failed" in capsys.readouterr().out


def test_token_ids_are_kept_where_the_server_gives_them(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 2)
    with serving() as state:
        assert regenerate(source, tmp_path / "ids.jsonl", state.url) == 0
        state.token_ids = False
        assert regenerate(source, tmp_path / "texts.jsonl", state.url) == 0
    for record in answers(tmp_path / "ids.jsonl"):
        count = len(record["input_ids"]) - 7
        assert record["input_ids"] == [*range(1, 8), *range(100, 100 + count)]
        assert record["loss_mask"] == [0] * 7 + [1] * count
    assert all("input_ids" not in record for record in answers(tmp_path / "texts.jsonl"))


def test_retries_do_not_answer_twice_and_failures_are_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 8)
    faults: dict[int, Any] = {0: 429, 2: 503, 3: "drop", 5: 400, 7: "garbage"}
    with serving(faults=faults) as state:
        assert regenerate(source, tmp_path / "out.jsonl", state.url, "--concurrency", "1") == 1
        assert "6 answered + 0 before + 2 failed" in capsys.readouterr().out
        reasons = [record["reason"] for record in answers(tmp_path / "out.failed.jsonl")]
        assert any("answered 400" in reason for reason in reasons)
        assert any("must answer JSON" in reason for reason in reasons)
        state.faults.clear()
        assert regenerate(source, tmp_path / "out.jsonl", state.url) == 0
    assert "2 answered + 6 before + 0 failed" in capsys.readouterr().out
    assert sorted(record["row"] for record in answers(tmp_path / "out.jsonl")) == list(range(8))
    assert max(state.served.values()) == 1
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_a_second_endpoint_takes_over(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 6)
    with serving(faults=dict.fromkeys(range(99), 500)) as bad, serving() as good:
        code = regenerate(source, tmp_path / "out.jsonl", bad.url, "--endpoint", good.url, "--retries", "0")
    assert code == 0
    assert len(answers(tmp_path / "out.jsonl")) == 6
    assert len(bad.requests) == 3


def test_killed_at_any_moment_and_taken_up_again(tmp_path: Path) -> None:
    """SIGKILL four times; in the end each row has one answer, the same as without a kill."""
    source, output = write_rows(tmp_path / "in.jsonl", 120), tmp_path / "out.jsonl"
    with serving(delay_s=0.03) as state:
        command = [
            sys.executable, "-m", "dflash_graph", "regenerate", str(source), "--output", str(output), "--endpoint",
            state.url, "--concurrency", "4",
        ]  # fmt: skip
        for kill in range(4):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wanted = 20 * (kill + 1)
            deadline = time.monotonic() + 60
            while not output.exists() or output.read_bytes().count(b"\n") < wanted:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        with output.open("ab") as file:
            file.write(b'{"row": 119, "id": "torn')  # what a kill inside a write leaves
        assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    records = answers(output)
    assert sorted(record["row"] for record in records) == list(range(120))
    assert all(record["messages"][1]["content"] == f"question {record['row']}.0" for record in records)


def test_ctrl_c_ends_in_good_order(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    with serving(delay_s=0.05) as state:
        command = [
            sys.executable, "-m", "dflash_graph", "regenerate", str(source), "--output", str(output), "--endpoint",
            state.url, "--concurrency", "2",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while len(state.requests) < 10:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted: run the same command again to go on" in text
    assert len(answers(output)) == sum(state.served.values())  # nothing that was paid for is lost


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "out.jsonl", {"a": 1})
    with pytest.raises(ValueError, match="is being written by another process"):
        AnswerLog(tmp_path / "out.jsonl", {"a": 1})
    log.add(3, {"x": 1})
    with pytest.raises(RuntimeError, match="row 3 was answered twice"):
        log.add(3, {"x": 1})
    log.close()
    again = AnswerLog(tmp_path / "out.jsonl", {"a": 1})
    assert again.answered == {3}
    again.close()


def test_a_file_of_other_settings_or_damaged_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    log = AnswerLog(path, {"model": "a", "seed": None})
    for row in range(3):
        log.add(row, {})
    log.close()
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(model\)"):
        AnswerLog(path, {"model": "b", "seed": None})
    path.write_bytes(content.replace(b'"row": 1', b'"rox": 1'))
    with pytest.raises(ValueError, match="is damaged at byte"):
        AnswerLog(path, {"model": "a", "seed": None})
    path.write_bytes(content)
    (tmp_path / "out.settings.json").unlink()
    with pytest.raises(ValueError, match="is not of this command"):
        AnswerLog(path, {"model": "a", "seed": None})
    assert path.read_bytes() == content


def test_cut_and_unusable_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", 5)
    with source.open("a") as file:
        file.write('{"messages": [{"role": "user"\n')
    with serving(max_tokens=5) as state:
        assert regenerate(source, tmp_path / "kept.jsonl", state.url) == 0
        assert "6 in = 5 answered + 0 before + 0 failed + 1 invalid_json; 5 answers cut" in capsys.readouterr().out
        assert regenerate(source, tmp_path / "dropped.jsonl", state.url, "--drop-cut") == 0
        assert "0 answered + 0 before + 0 failed + 5 cut_answer + 1 invalid_json" in capsys.readouterr().out
    assert [record["finish_reasons"] for record in answers(tmp_path / "kept.jsonl")] == [["length"]] * 5


@pytest.mark.parametrize(
    "more, words",
    [
        (("--in-process", "x"), "either --endpoint"),
        (("--concurrency", "0"), "--concurrency must be positive"),
        (("--temperature", "-1"), "temperature must be at least 0"),
        (("--model", "other"), "must serve other"),
    ],
)
def test_bad_arguments_come_back_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 2)
    with serving() as state:
        assert regenerate(source, tmp_path / "out.jsonl", state.url, *more) == 2
    assert words in capsys.readouterr().err
    assert state.requests == []
    assert not (tmp_path / "out.jsonl").exists()


def test_in_process_answers_are_the_targets_greedy_text(tiny: Path, tmp_path: Path) -> None:
    import torch

    from dflash_graph.config import TargetConfig
    from dflash_graph.data import load_tokenizer
    from dflash_graph.decoding import greedy_decode
    from dflash_graph.prompts import load_prompts
    from dflash_graph.target import load_full_model

    source = tmp_path / "in.jsonl"
    source.write_text("".join((tiny / "heldout.jsonl").read_text().splitlines(keepends=True)[:3]))
    output = tmp_path / "out.jsonl"
    arguments = ["--in-process", str(tiny / "model"), "--max-tokens", "12"]
    assert main(["regenerate", str(source), "--output", str(output), *arguments]) == 0
    target = TargetConfig(path=str(tiny / "model"))
    tokenizer = load_tokenizer(target)
    model = load_full_model(target, torch.device("cpu"), torch.float32)
    for record, prompt in zip(answers(output), load_prompts(source, tokenizer), strict=True):
        expected = greedy_decode(model, prompt, max_new_tokens=12, eos_ids={tokenizer.eos_token_id})
        assert record["input_ids"][-len(expected) :] == expected
        assert sum(record["loss_mask"]) == len(expected)


def test_sampling_settings() -> None:
    assert Sampling(temperature=0.5, seed=3).body() == {"temperature": 0.5, "top_p": 1.0, "seed": 3}
    with pytest.raises(ValueError, match="top_p"):
        Sampling(top_p=0)
