"""The GPU acceptance script, with a stand-in for Python: all parts run, failures are reported, absences are named."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu_acceptance.sh"
PARTS = ("gpu_tests", "kernel_table", "bench_kernels", "graph_storm", "graph_debug", "graph_replay", "graph_times")
# Runs the script's own snippets, with a GPU that is pretended, and answers for the parts.
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
  bench.graph_acceptance) printf '{{"parts": {{"%s": {{"it": 1}}}}}}' "$4" >"$6"; [ "$4" != storm ] || exit {storm} ;;
esac
"""
CASES = '<testcase classname="m" name="a"/><testcase classname="m" name="b">{}</testcase>'
XML = f"<testsuites><testsuite>{CASES}</testsuite></testsuites>"
PRETEND = """import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda *a: "pretended"
"""


def run(
    *args: str | Path, python: str | Path = sys.executable, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": str(python), "TRITON_INTERPRET": "1", **variables}
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *map(str, args)], env=env, cwd=cwd, text=True, capture_output=True, timeout=120
    )  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "outcome", "failed"),
    [
        ({}, "", set()),
        ({"table": 3}, "", set()),  # no entry for this Triton version is not a failure
        ({"table": 1, "bench": 1}, "", {"kernel_table", "bench_kernels"}),
        ({"storm": 124}, "", {"graph_storm"}),  # out of time: what it has left is in the report
        ({"pytest": 1}, "<failure/>", {"gpu_tests"}),
        ({}, "<failure/>", {"gpu_tests"}),
    ],
)
def test_all_parts_run_and_one_failure_fails_the_whole(
    statuses: dict[str, int], outcome: str, failed: set[str], tmp_path: Path
) -> None:
    stand_in, results = tmp_path / "python", tmp_path / "results"
    values = {"pytest": 0, "table": 0, "bench": 0, "storm": 0, **statuses}
    stand_in.write_text(STAND_IN.format(folder=tmp_path, python=sys.executable, **values))
    stand_in.chmod(0o755)
    (tmp_path / "tests.xml").write_text(XML.format(outcome))
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    result = run(results, python=stand_in)
    assert result.returncode == (1 if failed else 0), result.stdout + result.stderr
    report = json.loads((results / "gpu_acceptance.json").read_text())
    assert list(report["parts"]) == list(PARTS)
    assert {name for name in PARTS if not report["parts"][name]["passed"]} == failed
    assert all(report["parts"][name]["result"] == {"it": 1} for name in PARTS if name.startswith("graph_"))
    if 124 in statuses.values():
        assert report["parts"]["graph_storm"]["status"] == 124
    assert report["parts"]["gpu_tests"]["ran"] == 2
    assert report["parts"]["gpu_tests"]["failed"] == (["m::b"] if outcome else [])
    assert "+ kernel sm_90: registers=9" in report["parts"]["kernel_table"]["output"]
    assert report["gpu"] == "pretended"
    assert report["versions"]["torch"] == torch.__version__
    for part in PARTS:
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


def test_the_time_limits_of_all_parts_sum_to_less_than_eight_minutes() -> None:
    """Side by side, the longest counts: tests, table, storm, or debug and replay; then what runs alone."""
    text = SCRIPT.read_text()
    limits = {n: int(s) for n, s in re.findall(r"^ *(?:part|graphs) (\w+) (\d+)", text, re.MULTILINE)}
    single = ("gpu_tests", "kernel_table", "storm")
    together = max(limits["debug"] + limits["replay"], *(limits[name] for name in single))
    assert together + limits["bench_kernels"] + limits["times"] <= 465, "the rest is for start-up and the report"
    assert set(limits) == {"gpu_tests", "kernel_table", "bench_kernels", "storm", "debug", "replay", "times"}


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "results", python=tmp_path / "nowhere")
    assert result.returncode == 2
    assert f"PYTHON must name a Python interpreter with PyTorch; found '{tmp_path}/nowhere'" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_python_may_be_a_path_from_where_the_script_is_started(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(sys.executable)
    result = run(tmp_path / "results", python="./mine", cwd=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert result.returncode == 3, result.stderr


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    missing = run(tmp_path / "results", python=tmp_path / "no-python")
    assert missing.returncode == 2
    assert "PYTHON must name" in missing.stderr
    assert run().returncode == 2
    assert run(tmp_path / "results", tmp_path / "nowhere").returncode == 2
