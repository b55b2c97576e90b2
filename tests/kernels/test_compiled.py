"""Every Triton kernel compiles for every chip, within the rules, and as the committed table says; no GPU is needed.

Compilation runs in a process of its own, because the tests run under Triton's interpreter. The rules themselves are
tried on `compile_probes.py`, kernels with known faults.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from bench import kernel_table

ROOT = Path(kernel_table.__file__).parents[1]
PROBES = ("--modules", "tests.kernels.compile_probes")

pytest.importorskip("triton", reason="Triton is not installed")


def run(
    *args: str | Path, module: str = "bench.kernel_table", interpret: bool = False
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=880)


@cache
def refusals() -> str:
    """Output of a run over all probes; sound ones and faulty ones share the two workers."""
    result = run(*PROBES, "--table", os.devnull)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout.partition("rules broken:")[2]


@pytest.mark.timeout(900)  # about 35 kernels for 3 chips: a minute of two cores where Triton has no cached code
def test_the_kernels_compile_as_the_committed_table_says() -> None:
    result = run()
    assert result.returncode == 0, "\n".join(
        ["the kernels and bench/kernel_table.json disagree, or a rule is broken:", result.stdout, result.stderr]
    )
    assert "agrees" in result.stdout


def test_what_the_operators_launch_is_what_the_table_has() -> None:
    """The cases are written by hand; this compares them with the arguments of real calls."""
    result = run(module="tests.kernels.compile_launches")
    assert result.returncode == 0, result.stderr
    launched = [line.partition(" (")[0] for line in result.stdout.splitlines()]
    assert set(launched) == {
        "_forward_kernel", "_dq_kernel", "_dkv_context_kernel", "_dkv_block_kernel",
        "_row_kernel", "_reduce_kernel", "_scale_kernel",
    }  # fmt: skip
    assert "not in the table" not in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("probe", "complaint"),
    [
        ("spilling", "spills"),
        ("unaligned", "has no 128-bit global load"),
        ("off_the_tensor_cores", "has no tensor-core instruction"),
        ("too_much_shared_memory", "of shared memory; the chip has"),
        ("wrong_shapes", "does not compile"),
    ],
)
def test_a_faulty_kernel_is_refused_on_every_chip(probe: str, complaint: str) -> None:
    lines = [line for line in refusals().splitlines() if complaint in line]
    assert [line.split(" ")[1] for line in lines if line.startswith(f"{probe} sm_")] == ["sm_80", "sm_90", "sm_100"]


@pytest.mark.parametrize("probe", ["sound_vector", "sound_product", "allowed_to_spill"])
def test_a_sound_kernel_is_not_refused(probe: str) -> None:
    assert f"{probe} sm_" not in refusals()


def test_a_change_of_one_number_fails_until_the_table_is_renewed(tmp_path: Path) -> None:
    import triton

    table = tmp_path / "table.json"
    args = (*PROBES, "--only", "sound_vector", "--table", table)
    assert run(*args).returncode == 3, "no entry for this Triton version is not an agreement"
    assert run(*args, "--write").returncode == 0
    entry = kernel_table.read_table(table)[triton.__version__]["sound_vector"]
    assert list(entry) == ["sm_80", "sm_90", "sm_100"]
    assert entry["sm_90"]["registers"] > 8
    assert entry["sm_90"]["wide_loads"] >= 4  # 2048 values over 128 threads, four to a load

    table.write_text(table.read_text().replace('"wide_loads": 4', '"wide_loads": 5', 1))
    result = run(*args)
    assert result.returncode == 1
    changed = result.stdout.partition("differs")[2]
    assert "\n- sound_vector sm_80: " in changed
    assert "wide_loads=5" in changed
    assert "\n+ sound_vector sm_80: " in changed
    assert "sm_90" not in changed, "lines that agree are not printed"
    assert kernel_table.RENEW in changed


def test_renewing_some_cases_keeps_the_others_and_other_versions(tmp_path: Path) -> None:
    fields = {"registers": 1}
    table = tmp_path / "table.json"
    kernel_table.write_table(table, {"1.0": {"b": {"sm_80": fields}, "a": {"sm_80": fields}}})
    assert run(*PROBES, "--only", "sound_vector", "--table", table, "--write").returncode == 0
    after = json.loads(table.read_text())
    assert after["1.0"] == {"a": {"sm_80": fields}, "b": {"sm_80": fields}}
    assert len(after) == 2


def test_a_removed_and_an_added_case_are_differences() -> None:
    old = {"gone": {"sm_80": {"registers": 1}}, "same": {"sm_80": {"registers": 2}}}
    new = {"same": {"sm_80": {"registers": 2}}, "fresh": {"sm_80": {"registers": 3}}}
    assert kernel_table.differences(old, new) == ["+ fresh sm_80: registers=3", "- gone sm_80: registers=1"]


def test_the_interpreter_and_unknown_names_are_refused() -> None:
    result = run(interpret=True)
    assert result.returncode == 2
    assert "Unset TRITON_INTERPRET" in result.stderr
    result = run(*PROBES, "--only", "no_such_kernel")
    assert result.returncode == 2
    assert "no_such_kernel" in result.stderr


def test_every_module_with_triton_kernels_is_found() -> None:
    folder = ROOT / "dflash_graph" / "kernels"
    with_kernels = {p.stem for p in folder.glob("*.py") if re.search(r"^@triton\.jit", p.read_text(), re.MULTILINE)}
    assert {name.rpartition(".")[2] for name in kernel_table.find_modules()} == with_kernels
