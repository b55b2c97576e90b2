"""The graph part of the GPU acceptance over the CPU stand-in: each part runs, and a fault in any of them fails it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import graph_acceptance
from bench.graph_acceptance import main
from dflash_graph.graph_backends import Tape


def report_of(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["--device", "cpu", "--quick", "--output", str(path), *arguments])
    return code, json.loads(path.read_text())["parts"]


def test_all_parts_pass_on_the_stand_in(tmp_path: Path) -> None:
    code, parts = report_of(tmp_path / "out.json")
    assert code == 0, parts
    assert list(parts) == ["debug", "replay", "storm", "times"]
    assert parts["replay"]["steps"] == 22
    assert parts["storm"]["captures"] == 10
    assert parts["storm"]["disturbances"] > 10
    (rows,) = parts["times"]["budgets"].values()
    assert {row["step"] for row in rows} == {"target.64", "target.128", "micro_step.32", "validate.32", "apply"}
    assert all(0 < row["graph_host_ms"] <= row["graph_ms"] for row in rows)


def test_a_replay_that_differs_is_named_by_step_and_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, count = Tape.replay, 0

    def wrong(self: Tape) -> None:
        nonlocal count
        replay(self)
        for func, args, *_ in self._entries:
            if "_fused_adamw_" in str(func):  # the update
                count += 1  # one for each of the two groups
                if count == 30:
                    args[0][0].add_(1e-3)

    monkeypatch.setattr(Tape, "replay", wrong)
    code, parts = report_of(tmp_path / "out.json", "--parts", "replay")
    assert code == 1
    assert "step 22" in parts["replay"]["first_difference"]


def test_a_part_that_raises_fails_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> dict[str, Any]:
        raise RuntimeError("planted")

    monkeypatch.setitem(graph_acceptance.PARTS, "debug", broken)
    code, parts = report_of(tmp_path / "out.json", "--parts", "debug,storm")
    assert code == 1
    assert "planted" in parts["debug"]["error"]
    assert parts["storm"]["passed"]


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "storms"])
    assert "storms" in capsys.readouterr().err
