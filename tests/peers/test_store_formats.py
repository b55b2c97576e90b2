"""Hidden-state files that SpecForge's, hs-connectors' and speculators' own code wrote, added to a store of ours."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_graph.store import FeatureStore
from dflash_graph.store_import import add_features
from dflash_graph.store_shard import row_key
from tests.peers.environment import python_of
from tests.test_store_import import THEIRS, Row, rows, store_config

__all__ = ["rows"]  # the fixture


def _run(package: str, rows: list[Row], work: Path, *args: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for i, (tokens, mask, hidden) in enumerate(rows):
        tensors |= {f"tokens.{i}": tokens, f"mask.{i}": mask, f"hidden.{i}": hidden.contiguous()}
    save_file(tensors, work / "rows.safetensors")
    side = Path(__file__).with_name(f"side_store_{package}.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [python_of(package), side, work / "rows.safetensors", work / "theirs", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=work)
    assert done.returncode == 0, done.stderr[-4000:]


def _read(folder: Path, tokens: torch.Tensor) -> torch.Tensor:  # (n, 2, 32)
    store = FeatureStore(folder)
    values = torch.empty(len(tokens), 64)
    store.read(row_key(tokens.numpy().astype(np.int32)), values.view(torch.uint8).numpy(), None)
    return values.view(-1, 2, 32)


def test_specforges_files(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    _run("specforge", rows, tmp_path)
    report = add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"])
    assert (report.format, report.added, report.other_masks) == ("specforge", 68, 0)
    for tokens, _, hidden in rows:
        assert torch.equal(_read(tmp_path / "s", tokens), hidden[:, [1, 2]])


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_speculators_files(tiny: Path, rows: list[Row], tmp_path: Path, kind: str) -> None:
    _run("speculators", rows, tmp_path, kind, str(tmp_path / "read.safetensors"))
    report = add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["speculators"])
    assert (report.format, report.added, report.missing_rows) == ("speculators", 68, 0)
    as_they_read = load_file(tmp_path / "read.safetensors")
    for i, (tokens, _, hidden) in enumerate(rows):
        found, theirs = _read(tmp_path / "s", tokens), as_they_read[f"hidden.{i}"][:, [1, 2]]
        if kind == "plain":
            assert torch.equal(found, hidden[:, [1, 2]])
        # Their reader gives eight bits back as bfloat16.
        torch.testing.assert_close(found, theirs.float(), rtol=2**-7 if kind == "fp8" else 0, atol=0)
