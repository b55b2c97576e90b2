"""What only a GPU can show of graphs: 2,000 replayed steps against eager ones, a capture storm, debug, and step times.

    python -m bench.graph_acceptance [--device cuda|cpu] [--quick] [--parts debug,replay,storm,times] [--output FILE]

Models and data are made on the spot, with random weights; no network. On a CPU the same code runs over the recorded
stand-in, as a smoke test. Every part runs whatever happens to the others. Prints one line of JSON last. Exit status 1:
a part failed.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from bench.bench_kernels import describe
from dflash_graph.checkpoint_files import checkpoint_folders
from dflash_graph.debug_checks import StepUnderTest, same_bits
from dflash_graph.debugging import debug, drafter_steps, target_steps
from dflash_graph.graphs import CapturePhase, Mode, StepGraph, WorkerContext
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.trainer import Trainer
from dflash_graph.training import Run, train
from dflash_graph.workers import TargetWorker, Worker
from tests.tiny import SIZES, make_tiny, tiny_config


def _settings(device: str) -> list[str]:
    """Settings of a run over models of random weights."""
    return [f"devices.device={device}", "log.validate_every=1000000", "log.every=100"]


def _mode(device: str) -> Mode:
    return "cuda_graph" if device == "cuda" else "recorded"


# ---- debug ----------------------------------------------------------------------------------------------------------


def run_debug(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """`dflash-graph debug` of a small Qwen3."""
    report = debug(tiny_config(folder, folder / "debug", *_settings(device)), trained_steps=2 if quick else 4)
    print(report)
    return {"passed": not report.findings, **report.to_dict()}


# ---- replay against eager -------------------------------------------------------------------------------------------


def run_replay(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """Whole runs, target and drafter, of 2,000 optimizer steps: checkpoints of replayed and eager steps, bit for bit."""
    steps, every = (22, 11) if quick else (2002, 143)  # 22 jobs an epoch
    seconds: dict[str, float] = {}
    for mode in ("eager", _mode(device)):
        started = time.monotonic()
        result = train(
            tiny_config(
                folder, folder / mode, *_settings(device), f"graphs.mode={mode}", f"epochs={steps // 22}",
                "schedule.jobs_per_step=1", f"checkpoint.every={every}", "checkpoint.keep=1000", "optim.lr=1e-3",
            )
        )  # fmt: skip
        seconds[mode] = time.monotonic() - started
        if result.step != steps:
            return {"passed": False, "error": f"{mode} made {result.step} of {steps} steps"}
    first = _first_difference(folder / "eager", folder / _mode(device))
    return {"passed": first is None, "steps": steps, "first_difference": first, "seconds": seconds}


def _first_difference(a: Path, b: Path) -> str | None:
    """The first checkpoint and tensor in which two runs differ in a bit."""
    pairs = zip(sorted(checkpoint_folders(a)), sorted(checkpoint_folders(b)), strict=True)
    for (step, left), (_, right) in pairs:
        for file in sorted(left.glob("*.safetensors")):
            found, expected = load_file(right / file.name), load_file(file)
            for name, tensor in expected.items():
                if not same_bits(tensor, found[name]):
                    return f"step {step}, {file.name}, {name}: {float((tensor - found[name]).abs().max()):.3e}"
    return None


# ---- capture storm --------------------------------------------------------------------------------------------------


def run_storm(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """Two threads capture 200 steps in turns of one phase while a third one allocates and copies on the device."""
    captures, phase, errors = 10 if quick else 200, CapturePhase(), []
    stop, done, noise = threading.Event(), [0, 0], [0]

    def capture(i: int) -> None:
        try:
            for n in range(captures // 2):
                with WorkerContext(f"storm-{i}-{n}", device, mode=_mode(device), phase=phase, warmups=2) as context:
                    x = torch.full((256, 256), 1.0 + n, device=device)
                    total = torch.zeros((), device=device)

                    def step(x: torch.Tensor = x, total: torch.Tensor = total) -> None:
                        total.add_((x @ x).mean())

                    graph = context.graph("step", step, inputs={"x": x}, outputs={}, state={"total": total})
                    context.prepare()
                    for _ in range(3):
                        graph()
                    expected = 3 * 256 * (1.0 + n) ** 2
                    found = float(total)  # sync: the check of this capture
                    if abs(found / expected - 1) > 1e-3:
                        raise AssertionError(f"capture {n} of thread {i} gave {found}, not {expected}")
                    done[i] += 1
                time.sleep(0.001 * i)
        except Exception as error:
            errors.append(f"thread {i}: {type(error).__name__}: {error}")

    def disturb() -> None:
        if device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())
        while not stop.is_set():
            a = torch.empty(1 + noise[0] % 7, 1 << 16, device=device).fill_(1.0)
            torch.empty_like(a).copy_(a)
            noise[0] += 1
            time.sleep(0.0005)

    threads = [threading.Thread(target=capture, args=(i,)) for i in (0, 1)]
    other = threading.Thread(target=disturb)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    return {"passed": not errors, "captures": sum(done), "disturbances": noise[0], "errors": errors}


# ---- times ----------------------------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {
    **SIZES, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 4096,
}  # fmt: skip


def run_times(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """Milliseconds of each step, replayed and eager, in turns, over token budgets; and the host's share of them."""
    budgets = (256,) if quick else (1024, 2048, 4096, 8192, 16384)
    big = folder if quick else folder / "big"
    if not quick:
        big.mkdir()
        make_tiny(big, Qwen3Config(**MODEL, head_dim=64))
    result: dict[str, Any] = {"passed": True, "budgets": {}}
    for budget in budgets:
        plan = make_plan(
            tiny_config(
                big, big / "times", *_settings(device), f"graphs.mode={_mode(device)}",
                f"schedule.token_budget={budget}", "schedule.slots=7", "drafter.num_micro_step_sizes=1", "drafter.num_hidden_layers=2",
            )
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        lock = threading.Lock()
        Run(plan, {}, dry_steps=0).run(partial(_Timed, plan=plan, lock=lock, rows=rows, quick=quick))
        result["budgets"][budget] = rows
        for row in rows:
            eager, graph = row["eager_ms"], row["graph_ms"]
            print(f"T {budget:6} {row['step']:18} eager {eager:9.3f} ms, graph {graph:9.3f} ms, {eager / graph:.2f}x")
    return result


class _Timed:
    """A worker that times its steps instead of working, one worker at a time."""

    def __init__(
        self, worker: Worker, *, plan: RunPlan, lock: threading.Lock, rows: list[dict[str, Any]], quick: bool
    ) -> None:
        self.name, self._worker, self._plan, self._lock, self._rows = worker.name, worker, plan, lock, rows
        self._rounds = 3 if quick else 20

    def load(self) -> None:
        self._worker.load()

    def run(self) -> None:
        worker = self._worker
        assert isinstance(worker, TargetWorker | Trainer)
        assert worker.context is not None
        steps = (
            target_steps(worker, self._plan) if isinstance(worker, TargetWorker) else drafter_steps(worker, self._plan)
        )
        graphs = {graph.name: graph for graph in worker.context.graphs}
        with self._lock:
            for step in steps:
                step.load(1)
                self._rows.append(self._time(step, graphs[step.name]))

    def close(self) -> None:
        self._worker.close()

    def _time(self, step: StepUnderTest, graph: StepGraph) -> dict[str, Any]:
        ways: dict[str, Callable[[], None]] = {"eager": step.function, "graph": graph}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for i in range(self._rounds + 2):
            for name, function in ways.items():
                elapsed = _elapsed_ms(function, step.device)
                if i >= 2:
                    times[name].append(elapsed)
        row: dict[str, Any] = {"step": step.name}
        for name, values in times.items():
            row[f"{name}_ms"] = statistics.median(total for total, _ in values)
            row[f"{name}_host_ms"] = statistics.median(host for _, host in values)
        return row


def _elapsed_ms(function: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """(milliseconds until the work is done, milliseconds until the host is free again)."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # sync: timing
    started = time.perf_counter()
    function()
    host = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # sync: timing
    return (time.perf_counter() - started) * 1e3, host * 1e3


# ---- all ------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Path, str, bool], dict[str, Any]]] = {
    "debug": run_debug, "replay": run_replay, "storm": run_storm, "times": run_times,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few steps of the smallest sizes")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts must be among {', '.join(PARTS)}; found {', '.join(sorted(unknown))}")
    report: dict[str, Any] = {**describe(options.device), "parts": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder, Qwen3Config(**SIZES, head_dim=16))
        for part in options.parts.split(","):
            started = time.monotonic()
            print(f"\n== {part}", flush=True)
            try:
                result = PARTS[part](folder, options.device, options.quick)
            except Exception as error:
                traceback.print_exc()
                result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            report["parts"][part] = result | {"seconds": round(time.monotonic() - started, 1)}
            print(f"{part}: {'passed' if result['passed'] else 'FAILED'} in {report['parts'][part]['seconds']} s")
    text = json.dumps(report)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(result["passed"] for result in report["parts"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
