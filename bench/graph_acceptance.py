"""What only a GPU can show of graphs: debug mode, 2,000 replayed steps against eager ones, a capture storm, step times.

    python -m bench.graph_acceptance [--device cuda|cpu] [--mode cuda_graph|recorded] [--quick] [--steps N]
                                     [--parts debug,replay,storm,times] [--seconds N] [--output FILE]

Models and data are made on the spot, with random weights; no network. On a CPU the same code runs over the recorded
stand-in. Every part runs whatever happens to the others, unless the device itself is lost: `gpu_acceptance.sh` gives
each one a process. Prints one line of JSON last. Exit status 1: a part failed.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.bench_kernels import describe
from bench.graph_models import Task
from bench.graph_replay import run_replay
from bench.graph_storm import run_storm
from bench.graph_times import run_times
from dflash_graph.debugging import debug


def run_debug(task: Task) -> dict[str, Any]:
    """`dflash-graph debug` of a small Qwen3 on the device."""
    report = debug(task.config(task.model(), "debug"), trained_steps=2 if task.quick else 4)
    print(report)
    return {"passed": not report.findings, **report.to_dict()}


PARTS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "debug": run_debug,
    "replay": run_replay,
    "storm": run_storm,
    "times": run_times,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", choices=("cuda_graph", "recorded"), help="what is set against eager steps")
    parser.add_argument("--quick", action="store_true", help="few steps of the smallest sizes")
    parser.add_argument("--steps", type=int, help="optimizer steps of the replay")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further token budget after so long")
    parser.add_argument("--output", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts must be among {', '.join(PARTS)}; found {', '.join(sorted(unknown))}")
    command = shlex.join(["python", "-m", "bench.graph_acceptance", *(arguments or ())])
    report: dict[str, Any] = {**describe(options.device), "command": command, "parts": {}}

    def save(part: str, result: dict[str, Any]) -> None:
        report["parts"][part] = result
        if options.output is not None:
            options.output.write_text(json.dumps(report) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        for part in names:
            started = time.monotonic()
            print(f"\n== {part}", flush=True)
            task = Task(
                folder=Path(folder),
                device=options.device,
                mode=options.mode or ("cuda_graph" if options.device == "cuda" else "recorded"),
                quick=options.quick,
                steps=options.steps,
                seconds=options.seconds,
                save=partial(save, part),
            )
            try:
                result = PARTS[part](task)
            except Exception as error:
                traceback.print_exc()
                notes = "; ".join(getattr(error, "__notes__", []))
                result = {"passed": False, "error": f"{type(error).__name__}: {error} {notes}".rstrip()}
            seconds = round(time.monotonic() - started, 1)
            save(part, result | {"seconds": seconds})
            print(f"{part}: {'passed' if result['passed'] else 'FAILED'} in {seconds} s", flush=True)
    print(json.dumps(report))
    return 0 if all(result["passed"] for result in report["parts"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
