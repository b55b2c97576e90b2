"""Registers, spills, shared memory, tensor-core and 128-bit instructions of every Triton kernel, without a GPU.

    python -m bench.kernel_table            compile all cases, enforce the rules, compare with kernel_table.json
    python -m bench.kernel_table --write    the same, then renew the entry of the installed Triton version

Each case of the `compile_cases()` of `dflash_graph/kernels/*_triton.py` is compiled ahead of time for sm_80, sm_90 and
sm_100, and the machine code is read with the tools inside the Triton package. Some rules hold whatever the table says
(see `broken_rules`). Exit status: 0 all well, 1 a rule is broken or the table differs, 2 refused, 3 the rules hold but
the table has no entry for this Triton version.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("kernel_table.json")
RENEW = "python -m bench.kernel_table --write"
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes one thread block may use (CUDA guide)
CHIPS = tuple(SHARED_LIMIT)
_MOST_WORKERS = 8  # about 0.7 GB each
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_TENSOR_CORE = re.compile(r"(HMMA|HGMMA|UTC\w*MMA)$")  # Ampere's, Hopper's, Blackwell's
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # of a local access; 4 without a suffix


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the machine code of one case on one chip says. Counts are of instructions in the code, not of executions."""

    registers: int  # per thread
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int  # per thread block
    tensor_core: int
    wide_loads: int  # global loads of 128 bits or more, asynchronous and bulk copies included
    wide_stores: int

    def line(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def find_modules() -> list[str]:
    """Names of the package's modules that hold Triton kernels."""
    import dflash_graph.kernels as kernels

    names = sorted(m.name for m in pkgutil.iter_modules(kernels.__path__) if m.name.endswith("_triton"))
    return [f"{kernels.__name__}.{name}" for name in names]


def load_cases(modules: Iterable[str]) -> dict[str, Any]:
    """All compile cases of the modules by name.

    Raises:
        ValueError: a name occurs twice, or signature and constexprs do not name each argument of the kernel once.
    """
    cases: dict[str, Any] = {}
    for module in modules:
        for case in importlib.import_module(module).compile_cases():
            if case.name in cases:
                raise ValueError(f"the names of compile cases must differ; found {case.name!r} twice")
            given, wanted = [*case.signature, *case.constexprs], case.kernel.arg_names
            if sorted(given) != sorted(wanted):
                raise ValueError(
                    f"{case.name}: signature and constexprs must name each argument of the kernel once; missing "
                    f"{sorted(set(wanted) - set(given))}, unknown or twice {sorted(Counter(given) - Counter(wanted))}"
                )
            cases[case.name] = case
    return cases


def compile_case(case: Any, chip: int) -> Compiled:
    """Compile one case for one chip and read its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    # Fusion is what launches use today; it is named because its default changes in Triton 3.10.
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constexprs), hints),
        target=GPUTarget("cuda", chip, 32),
        options=options,
    )
    return read_machine_code(kernel.asm["cubin"], kernel.metadata.shared)


def read_machine_code(cubin: bytes, shared_bytes: int) -> Compiled:
    """Registers and instruction counts of a cubin, from the `cuobjdump` inside the Triton package."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(what: str) -> str:
            command = [knobs.nvidia.cuobjdump.path, what, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage, code = dump("--dump-resource-usage"), dump("-sass")
    registers = [int(n) for n in re.findall(r"REG:(\d+)", usage)]
    instructions = Counter(_INSTRUCTION.findall(code))
    if not registers or not instructions:
        raise RuntimeError(f"cuobjdump shows no code; it printed {usage!r} and {len(code)} characters of code")
    found = dict.fromkeys(("LDL", "STL", "tensor", "loads", "stores"), 0)
    for instruction, count in instructions.items():
        kind, *suffixes = instruction.split(".")
        wide = "128" in suffixes or "256" in suffixes
        if kind in ("LDL", "STL"):
            found[kind] += count * next((_BYTES[s] for s in suffixes if s in _BYTES), 4)
        elif _TENSOR_CORE.match(kind):
            found["tensor"] += count
        elif kind == "UTMALDG" or (wide and kind in ("LDG", "LDGSTS")):
            found["loads"] += count
        elif kind == "UTMASTG" or (wide and kind == "STG"):
            found["stores"] += count
    return Compiled(
        registers=max(registers),
        spill_store_bytes=found["STL"],
        spill_load_bytes=found["LDL"],
        shared_bytes=shared_bytes,
        tensor_core=found["tensor"],
        wide_loads=found["loads"],
        wide_stores=found["stores"],
    )


def broken_rules(case: Any, chip: int, compiled: Compiled) -> list[str]:
    """What no table can excuse: spills, too much shared memory, products off the tensor cores, narrow loads only."""
    spilled = compiled.spill_store_bytes + compiled.spill_load_bytes
    rules = {
        f"spills {spilled} bytes": spilled and not case.may_spill,
        f"uses {compiled.shared_bytes} bytes of shared memory; the chip has {SHARED_LIMIT[chip]} for a block": (
            compiled.shared_bytes > SHARED_LIMIT[chip]
        ),
        "has no tensor-core instruction": case.tensor_cores and not compiled.tensor_core,
        "has no 128-bit global load": not compiled.wide_loads,
    }
    return [text for text, broken in rules.items() if broken]


_cases: dict[str, Any] = {}  # what forked workers find: kernels cannot be pickled


def _compile_in_worker(job: tuple[str, int]) -> Compiled | str:
    """The compiled case, or the error as text: a compiler's exceptions do not all survive pickling."""
    try:
        return compile_case(_cases[job[0]], job[1])
    except Exception as error:
        return f"does not compile: {type(error).__name__}: {error}"


def compile_all(cases: dict[str, Any]) -> dict[tuple[str, int], Compiled | str]:
    """Every case on each chip that uses it, by (name, chip), from as many worker processes as there are cores."""
    jobs = [(name, chip) for name, case in cases.items() for chip in CHIPS if chip in case.chips]
    _cases.update(cases)
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), len(jobs))
    # Forked, so that torch and Triton are imported once; nothing here has started a thread.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return dict(zip(jobs, pool.map(_compile_in_worker, jobs), strict=True))


# ---- the table -----------------------------------------------------------------------------------------------------

Table = dict[str, dict[str, dict[str, dict[str, int]]]]  # Triton version -> case -> chip -> fields of Compiled


def read_table(path: Path) -> Table:
    table: Table = json.loads(path.read_text()) if path.exists() else {}
    return table


def write_table(path: Path, table: Table) -> None:
    """One line for each case and chip, so that a change reads well in a diff."""
    versions = []
    for version, cases in sorted(table.items()):
        blocks = []
        for name, chips in sorted(cases.items()):
            lines = ",\n".join(f"      {json.dumps(chip)}: {json.dumps(chips[chip])}" for chip in chips)
            blocks.append(f"    {json.dumps(name)}: {{\n{lines}\n    }}")
        versions.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(blocks) + "\n  }")
    path.write_text("{\n" + ",\n".join(versions) + "\n}\n")


def differences(old: dict[str, dict[str, dict[str, int]]], new: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Lines "- case chip: ..." of the table and "+ case chip: ..." of the code where the two differ."""

    def lines(cases: dict[str, dict[str, dict[str, int]]]) -> dict[tuple[str, str], str]:
        return {
            (name, chip): " ".join(f"{k}={v}" for k, v in fields.items())
            for name, chips in cases.items()
            for chip, fields in chips.items()
        }

    before, after, out = lines(old), lines(new), []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            where = " ".join(key)
            out += [f"- {where}: {before[key]}"] if key in before else []
            out += [f"+ {where}: {after[key]}"] if key in after else []
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_table", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the table's entry of the installed Triton version")
    parser.add_argument("--only", default="", metavar="NAME", help="only cases whose name holds NAME")
    parser.add_argument("--table", type=Path, default=TABLE, help="table to compare with or to write")
    parser.add_argument("--modules", nargs="+", help="modules with compile_cases(); the package's own by default")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off"):
        print("kernel_table compiles: it cannot run under the interpreter. Unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    import triton

    started = time.perf_counter()
    modules = args.modules or find_modules()
    cases = {name: case for name, case in load_cases(modules).items() if args.only in name}
    if not cases:
        print(f"no compile case's name holds {args.only!r} in {', '.join(modules) or 'no module'}", file=sys.stderr)
        return 2
    results = compile_all(cases)
    new: dict[str, dict[str, dict[str, int]]] = {name: {} for name in cases}
    broken = []
    for (name, chip), result in results.items():
        if isinstance(result, str):
            broken.append(f"{name} sm_{chip} {result}")
            continue
        print(f"{name} sm_{chip}: {result.line()}")
        new[name][f"sm_{chip}"] = asdict(result)
        broken += [f"{name} sm_{chip} {rule}" for rule in broken_rules(cases[name], chip, result)]
    seconds = time.perf_counter() - started
    print(f"{len(results)} binaries of {len(cases)} cases with Triton {triton.__version__} in {seconds:.1f} s")
    if broken:
        print("rules broken:\n" + "\n".join(broken))
        return 1
    table = read_table(args.table)
    old = {name: chips for name, chips in table.get(triton.__version__, {}).items() if args.only in name}
    if args.write:
        kept = {n: c for n, c in table.get(triton.__version__, {}).items() if args.only not in n}
        write_table(args.table, {**table, triton.__version__: {**kept, **new}})
        print(f"wrote the entry of Triton {triton.__version__} in {args.table}")
        return 0
    if triton.__version__ not in table:
        print(f"the rules hold; {args.table} has no entry for Triton {triton.__version__}. To add it: {RENEW}")
        return 3
    if changed := differences(old, new):
        print(f"{args.table.name} differs (- table, + code):\n" + "\n".join(changed) + f"\nTo renew it: {RENEW}")
        return 1
    print(f"{args.table.name} agrees")
    return 0


if __name__ == "__main__":
    sys.exit(main())
