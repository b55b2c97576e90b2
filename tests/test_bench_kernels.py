"""The kernel benchmark at small shapes on the CPU: it measures, refuses wrong results, and names what did not run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_kernels
from bench.bench_kernels import Contestant
from dflash_graph.kernels import backend, fused_lm_head_loss

SMALL = bench_kernels.SIZES["cpu"]


def test_a_run_measures_every_contestant_and_ends_with_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_kernels.main(["--device", "cpu", "--rounds", "2", "--output", str(tmp_path / "out.json")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["targets"]) == set(bench_kernels.TARGETS)
    for outcome in report["targets"].values():
        assert outcome["value"] > 0
        assert outcome["met"] is None, "a target is one of the GPU"
    loss, attention = report["loss"]["contestants"], report["attention"]["contestants"]
    assert {"ours", "GEMMs alone", "naive"} <= {n for n, c in loss.items() if c.get("median_ms", 0) > 0}
    assert {"ours forward", "ours backward", "SDPA with a mask forward", "SDPA with a mask backward"} <= {
        n for n, c in attention.items() if c.get("median_ms", 0) > 0
    }
    # Every contestant is there, the ones that cannot run here with the reason.
    assert "liger fused_linear_cross_entropy" in loss
    assert "backward on the CPU" in attention["flex_attention forward"]["failed"]


def test_a_wrong_loss_of_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    true_loss = fused_lm_head_loss.fused_lm_head_loss
    monkeypatch.setattr(fused_lm_head_loss, "fused_lm_head_loss", lambda *a, **k: 1.01 * true_loss(*a, **k))
    assert bench_kernels.main(["--device", "cpu", "--rounds", "1"]) == 1
    assert "our loss is wrong" in capsys.readouterr().err


def test_contestants_that_disagree_or_fail_are_named_and_not_timed() -> None:
    def runs_out() -> Any:
        raise torch.OutOfMemoryError("much")

    def wrong() -> tuple[Tensor]:
        return (torch.tensor([1.0, 2.1]),)

    contestants = [
        Contestant(name="good", run=lambda: (torch.tensor([1.0, 2.0]),)),
        Contestant(name="wrong", run=wrong),
        Contestant(name="large", run=runs_out),
    ]
    bench_kernels.admit(contestants, [torch.tensor([1.0, 2.0])], [0.01], ["loss"])
    assert contestants[0].failed is None
    assert contestants[1].failed == "loss differs from ours by 0.05 of the largest value"
    assert contestants[2].failed == "out of memory"
    bench_kernels.run_rounds("cpu", contestants, 3)
    assert [len(c.ms) for c in contestants] == [3, 0, 0]


def test_pairs_count_what_the_mask_shows() -> None:
    problem = bench_kernels.AttentionProblem.make("cpu", SMALL)
    mask = problem.mask()
    assert int(mask.sum()) == problem.pairs
    queries, keys = (torch.arange(n) for n in mask.shape)
    nothing = torch.tensor(0)
    assert torch.equal(problem.mask_mod(nothing, nothing, queries[:, None], keys), mask)


@pytest.mark.skipif(not backend.interpreting(), reason="Triton's interpreter is off")
def test_the_row_pass_is_timed_on_fresh_logits() -> None:
    ws = fused_lm_head_loss.make_workspace(
        num_rows=3, hidden_size=8, vocab_size=40, dtype=torch.float32, device="cpu", implementation="triton"
    )
    sizes = replace(SMALL, rows=3, vocab=40)
    contestant = bench_kernels.row_pass_alone(torch.tensor([0, 7, 39]), ws, sizes)
    assert bench_kernels.time_ms("cpu", contestant) > 0
    gradient = ws.scratch.as_strided((3, 40), (ws.row_stride, 1)).clone()
    # softmax minus one-hot: rows sum to 0, and only the label's entry is negative.
    torch.testing.assert_close(gradient.sum(1), torch.zeros(3), atol=1e-5, rtol=0)
    assert (gradient < 0).nonzero().tolist() == [[0, 0], [1, 7], [2, 39]]
    bench_kernels.time_ms("cpu", contestant)
    assert torch.equal(ws.scratch.as_strided((3, 40), (ws.row_stride, 1)), gradient)
