"""The debug command: the project's own configurations are clean, its report says so, its exit codes tell the rest."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from dflash_graph import debugging
from dflash_graph.__main__ import main
from dflash_graph.debugging import debug
from dflash_graph.kernels import layers
from dflash_graph.step import DrafterStep
from tests.tiny import SIZES, make_tiny, tiny_config, tiny_settings

ROOT = Path(__file__).parents[1]
SMALL = ("drafter.num_micro_step_sizes=2",)

TARGETS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen3": Qwen3Config(**SIZES, head_dim=8),
    "Qwen3 with sliding layers": Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "Qwen3.5 hybrid": Qwen3_5TextConfig(
        **SIZES, head_dim=8, partial_rotary_factor=1.0, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
}  # fmt: skip
OPTIONS = {
    "plain": (),
    "teacher, D-PACE, anchor groups": (
        "loss.kl_weight=0.5", "loss.labels=target", "loss.weighting=d_pace", "devices.anchor_groups=3",
    ),
    "reduced head, causal, sliding, two targets": (
        "drafter.draft_vocab_size=40", "drafter.causal=true", "drafter.sliding_window=6", "devices.num_targets=2",
        "drafter.layer_types=[sliding_attention,full_attention]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", TARGETS.values(), ids=TARGETS)
def test_small_targets_of_every_kind_are_clean(tmp_path: Path, config: PretrainedConfig) -> None:
    make_tiny(tmp_path, config)
    report = debug(tiny_config(tmp_path, tmp_path / "run", *SMALL), trained_steps=2)
    assert not report.findings, str(report)
    assert "nothing stands in the way" in str(report)
    assert {step.name for step in report.steps} == {
        "target.64", "target.128", "micro_step.16", "validate.16", "micro_step.32", "validate.32", "apply",
    }  # fmt: skip
    assert all(step.num_ops > 20 and step.num_external > 3 for step in report.steps)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("overrides", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_the_drafter_is_clean(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    make_tiny(tmp_path)
    report = debug(tiny_config(tmp_path, tmp_path / "run", *SMALL, *overrides), trained_steps=2)
    assert not report.findings, str(report)


@pytest.mark.slow  # three minutes
def test_the_demo_is_clean(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct as examples/demo.yaml trains it."""
    folder = pytest.importorskip("examples.demo").find_target()
    code = main(["debug", "--config", str(ROOT / "examples/demo.yaml"), f"target.path={folder}", f"run_dir={tmp_path}"])
    assert code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_configuration_for_cuda_is_checked_where_there_is_none(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    cuda = (
        "devices.device=cuda",
        "devices.target_devices=[cuda:1]",
        "devices.kernels=triton",
        "graphs.mode=cuda_graph",
    )
    report = debug(tiny_config(tmp_path, tmp_path / "run", *SMALL, *cuda), trained_steps=1)
    assert not report.findings, str(report)
    assert "stands in for devices.device=cuda" in str(report)


def test_many_micro_step_sizes_are_checked_by_a_few(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    report = debug(tiny_config(tmp_path, tmp_path / "run", "drafter.num_micro_step_sizes=16"), trained_steps=1)
    sizes = {int(step.name.split(".")[1]) for step in report.steps if step.name.startswith("micro_step")}
    assert len(sizes) == debugging.CHECKED_SIZES
    assert {2, 32} <= sizes


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_it_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path)
    settings = [*tiny_settings(tmp_path, tmp_path / "run"), *SMALL]
    assert main(["debug", *settings, "--json", str(tmp_path / "report.json")]) == 0
    assert "nothing stands in the way of a capture" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"] == []
    assert report["environment"]["torch"] == torch.__version__
    assert [step["worker"] for step in report["steps"]].count("drafter") == 5


def test_the_report_alone_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path)
    capsys.readouterr()
    settings = [*tiny_settings(tmp_path, tmp_path / "run"), "drafter.num_micro_step_sizes=1"]
    assert main(["debug", *settings, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["findings"] == []
    assert "nothing stands in the way of a capture" in printed.err


def test_the_command_names_the_line_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path)
    project = layers.project

    def reading(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = project(x, weight)
        out.backward_scale = float(out.detach().abs().max())  # type: ignore[attr-defined]
        return out

    monkeypatch.setattr(layers, "project", reading)
    settings = [*tiny_settings(tmp_path, tmp_path / "run"), "drafter.num_micro_step_sizes=1"]
    assert main(["debug", *settings, "--json", str(tmp_path / "report.json")]) == 1
    printed = capsys.readouterr().out
    assert "float(tensor)" in printed
    assert "tests/test_debugging.py:" in printed
    assert "What to do: keep the value on the device" in printed
    (finding,) = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert finding["check"] == "illegal_op"
    assert finding["site"]["file"] == __file__
    assert finding["worker"] == "drafter"


def test_bad_settings_are_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path)
    settings = tiny_settings(tmp_path, tmp_path / "run")
    assert main(["debug", *settings, "schedule.slots=2"]) == 2
    assert "slots must be at least" in capsys.readouterr().err
    for path in (tmp_path / "nowhere" / "report.json", tmp_path):
        assert main(["debug", *settings, "--json", str(path)]) == 2
        assert "--json must name a file in an existing folder" in capsys.readouterr().err


def test_a_step_that_raises_is_a_finding_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path)
    body = DrafterStep.apply_body

    def failing(self: DrafterStep) -> None:
        body(self)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(DrafterStep, "apply_body", failing)
    report = debug(tiny_config(tmp_path, tmp_path / "run", *SMALL))
    (finding,) = report.findings
    assert finding.check == "error"
    assert "ZeroDivisionError: planted" in finding.what
    assert "drafter" in finding.what
    assert finding.site is not None
    assert finding.site.file == __file__


def test_an_interrupted_check_does_not_come_out_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first SIGINT ends it after the step that is checked now."""
    make_tiny(tmp_path)
    check, checked = debugging.check_step, []

    def interrupted(step: Any, *args: Any, **kwargs: Any) -> Any:
        checked.append(step.name)
        os.kill(os.getpid(), signal.SIGINT)
        return check(step, *args, **kwargs)

    monkeypatch.setattr(debugging, "check_step", interrupted)
    assert main(["debug", *tiny_settings(tmp_path, tmp_path / "run"), *SMALL]) == 130
    assert checked == ["target.64"]


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_graph", "debug", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert "without a GPU" in done.stdout
