"""The store's benchmarks at small sizes: they measure, and print one JSON line last."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bench import bench_store, bench_store_dtypes
from tests.tiny import tiny_settings


def test_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--gib", "0.002", "--taps", "2", "--hidden-size", "64", "--repeats", "1"]
    assert bench_store.main([*arguments, "--output", str(tmp_path / "out.json")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    report = json.loads(last)
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert report["fp8"]["bytes_per_token"] == 2 * 64 + 2 + 4
    for dtype in bench_store.DTYPES:
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in report[dtype]["seconds"].values())


def test_acceptance_by_dtype(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.from_dotlist(tiny_settings(tiny, tmp_path / "run")), yaml)
    prompts = ["--prompts", str(tiny / "heldout.jsonl"), "--limit", "2", "--max-new-tokens", "16"]
    assert bench_store_dtypes.main(["--config", str(yaml), "--folder", str(tmp_path / "work"), *prompts]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    exact, half, eighth = report["rows"]
    assert exact["own features"] == exact["float32 features"]
    assert 0 == exact["median error"] < half["median error"] < eighth["median error"] < 0.05
    assert all(row["decoding"] >= 1 for row in report["rows"])
    assert report["float32 drafter on fp8 features"] >= 1
