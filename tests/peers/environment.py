"""Runs a script with the interpreter of a public package's own environment, made by `bench/peers/make_envs.sh`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]


def python_of(package: str) -> Path:
    """The interpreter; skips the test, with the reason, where the environment was not made."""
    folder = ROOT / ".cache" / "peers" / package
    if not (folder / "done").is_file():
        pytest.skip(f"needs the environment of {package}: bench/peers/make_envs.sh .cache/peers {package}")
    return folder / "bin" / "python"


def run_jobs(package: str, target: Path, work: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Run `side_PACKAGE.py` over named jobs; each job's tensors by the job's name."""
    listed = [{**job, "out": str(work / f"{name}.safetensors")} for name, job in jobs.items()]
    file = work / f"{package}.json"
    file.write_text(json.dumps({"target": str(target), "jobs": listed}))
    side = Path(__file__).with_name(f"side_{package}.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python_of(package), side, file], capture_output=True, text=True, timeout=280, env=environment, cwd=work
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: load_file(work / f"{name}.safetensors") for name in jobs}
