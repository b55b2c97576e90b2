"""The GPU acceptance script, with a stand-in for Python: all parts run, failures are reported, absences are named."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu_acceptance.sh"
# Runs the script's own snippets, with a GPU that is pretended, and answers for the four parts.
STAND_IN = """#!/bin/bash
case "$*" in
  -c*) exit 1 ;;
  -\\ *) PYTHONPATH="{folder}:$PYTHONPATH" exec {python} "$@" ;;
esac
echo "ran $2 with ${{TRITON_INTERPRET-no interpreter}}"
case "$2" in
  pytest) while [ "$1" != --junitxml ]; do shift; done; cp {folder}/tests.xml "$2"; exit {pytest} ;;
  bench.kernel_table) echo "+ kernel sm_90: registers=9"; exit {table} ;;
  bench.bench_kernels) [ {bench} = 0 ] && echo '{{"targets": 1}}' >"$4"; exit {bench} ;;
  bench.graph_acceptance) [ {graphs} = 0 ] && echo '{{"parts": 1}}' >"$4"; exit {graphs} ;;
esac
"""
CASES = '<testcase classname="m" name="a"/><testcase classname="m" name="b">{}</testcase>'
XML = f"<testsuites><testsuite>{CASES}</testsuite></testsuites>"
PRETEND = """import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda *a: "pretended"
"""


def run(*args: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": str(python), "TRITON_INTERPRET": "1"}
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *map(str, args)], env=env, text=True, capture_output=True, timeout=120
    )  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "outcome", "passed"),
    [
        ({}, "", [True, True, True, True]),
        ({"table": 3}, "", [True, True, True, True]),  # no entry for this Triton version is not a failure
        ({"table": 1, "bench": 1}, "", [True, False, False, True]),
        ({"graphs": 1}, "", [True, True, True, False]),
        ({"pytest": 1}, "<failure/>", [False, True, True, True]),
        ({}, "<failure/>", [False, True, True, True]),
    ],
)
def test_all_parts_run_and_one_failure_fails_the_whole(
    statuses: dict[str, int], outcome: str, passed: list[bool], tmp_path: Path
) -> None:
    stand_in, results = tmp_path / "python", tmp_path / "results"
    values = {"pytest": 0, "table": 0, "bench": 0, "graphs": 0, **statuses}
    stand_in.write_text(STAND_IN.format(folder=tmp_path, python=sys.executable, **values))
    stand_in.chmod(0o755)
    (tmp_path / "tests.xml").write_text(XML.format(outcome))
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    result = run(results, python=stand_in)
    assert result.returncode == (0 if all(passed) else 1), result.stdout + result.stderr
    report = json.loads((results / "gpu_acceptance.json").read_text())
    assert [report["parts"][n]["passed"] for n in ("gpu_tests", "kernel_table", "bench_kernels", "graphs")] == passed
    assert report["parts"]["gpu_tests"]["ran"] == 2
    assert report["parts"]["gpu_tests"]["failed"] == (["m::b"] if outcome else [])
    assert "+ kernel sm_90: registers=9" in report["parts"]["kernel_table"]["output"]
    assert report["gpu"] == "pretended"
    assert report["versions"]["torch"] == torch.__version__
    for part in ("gpu_tests", "kernel_table", "bench_kernels", "graphs"):
        assert "with no interpreter" in (results / f"{part}.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = run(tmp_path / "results")
    assert result.returncode == 3
    assert "no CUDA device" in result.stderr


def test_missing_packages_are_named_and_wheels_are_used(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    result = run(tmp_path / "results", python=bare)
    assert result.returncode == 2
    assert "missing packages: torch, triton, numpy" in result.stderr

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "Iniconfig-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("iniconfig/__init__.py", "")
    result = run(tmp_path / "results", wheels, python=bare)
    assert "taken from wheels: iniconfig" in result.stdout
    assert "iniconfig" not in result.stderr


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    missing = run(tmp_path / "results", python=tmp_path / "no-python")
    assert missing.returncode == 2
    assert "PYTHON must name" in missing.stderr
    assert run().returncode == 2
    assert run(tmp_path / "results", tmp_path / "nowhere").returncode == 2
