"""Times of each step, eager and replayed in turns, over a range of token budgets; and how long the host is busy.

The steps are those of a run, over one job of its data, in the run's own workers and streams; one worker at a time. A
step is timed from an idle device to an idle device, its data and state put in place before. Times are medians.
"""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.graph_models import Task
from dflash_graph.debug_checks import StepUnderTest
from dflash_graph.debugging import drafter_steps, target_steps
from dflash_graph.graphs import StepGraph
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.trainer import Trainer
from dflash_graph.training import Run
from dflash_graph.workers import TargetWorker, Worker

BUDGETS, QUICK_BUDGETS = (1024, 2048, 4096, 8192, 16384), (256,)
ROUNDS, FEWEST_ROUNDS, STEP_S = 30, 5, 1.5  # at most so many rounds, or so many seconds for one step
WAYS = ("eager", "graph")


def run_times(task: Task) -> dict[str, Any]:
    """Of each budget: milliseconds and host milliseconds per step, positions per second, memory."""
    started = time.monotonic()
    folder = task.timed_model()
    result: dict[str, Any] = {"passed": False, "budgets": {}, "left_out": []}
    for budget in QUICK_BUDGETS if task.quick else BUDGETS:
        if time.monotonic() - started > task.seconds:
            result["left_out"].append(budget)
            continue
        result["budgets"][budget] = time_budget(task, folder, budget)
        _print(budget, result["budgets"][budget])
        task.save(result)
    result["passed"] = bool(result["budgets"])
    return result


def time_budget(task: Task, folder: Path, budget: int) -> dict[str, Any]:
    """All steps at one token budget."""
    sizes = () if task.quick else (
        "data.max_length=1024", "drafter.num_hidden_layers=5", "drafter.target_layer_ids=[1,7,13,19,25]",
        "drafter.block_size=16", "drafter.anchor_rate=0.25",
    )  # fmt: skip
    plan = make_plan(
        task.config(
            folder, "times", f"graphs.mode={task.mode}", f"schedule.token_budget={budget}", "schedule.slots=7",
            "schedule.num_buckets=1", "drafter.num_micro_step_sizes=1", "data.validation=[]", *sizes,
        )
    )  # fmt: skip
    turns = Turns()
    Run(plan, {}, dry_steps=0).run(lambda worker: Timed(worker, plan, turns, 3 if task.quick else ROUNDS))
    names = {kind: next(n for n in turns.steps if n.startswith(kind)) for kind in ("target", "micro_step", "apply")}
    totals = {way: sum(turns.steps[name][f"{way}_ms"] for name in names.values()) for way in WAYS}
    epoch = plan.first_epoch
    return {
        "steps": turns.steps,
        "memory": turns.memory,
        # One job an update, one step after the other; positions are those of the budget, padding included.
        "positions_per_s": {way: round(budget / totals[way] * 1e3) for way in WAYS},
        "padding_share": round(float(epoch.padding_share(plan.rows.lengths)), 4),
        "anchors": plan.sizes[-1],
    }


class Turns:
    """What the workers of one run found; targets are timed before the drafter, whose end is the run's."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, Any]] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.targets_done = threading.Event()


class Timed:
    """A worker that times its steps instead of working."""

    def __init__(self, worker: Worker, plan: RunPlan, turns: Turns, rounds: int) -> None:
        self.name, self._worker, self._plan, self._turns, self._rounds = worker.name, worker, plan, turns, rounds

    def load(self) -> None:
        self._worker.load()

    def run(self) -> None:
        worker, turns = self._worker, self._turns
        assert isinstance(worker, TargetWorker | Trainer)
        assert worker.context is not None
        try:
            if isinstance(worker, Trainer):
                turns.targets_done.wait()
                steps = drafter_steps(worker, self._plan)
            else:
                steps = target_steps(worker, self._plan)
            graphs = {graph.name: graph for graph in worker.context.graphs}
            for step in steps:
                graph = graphs[step.name]
                turns.steps[step.name] = time_step(step, graph, self._rounds)
                turns.steps[step.name]["capture_s"] = round(graph.capture_s, 3)
            turns.memory[worker.name] = worker.context.memory()
        finally:
            turns.targets_done.set()

    def close(self) -> None:
        self._worker.close()


def time_step(step: StepUnderTest, graph: StepGraph, rounds: int) -> dict[str, Any]:
    """Medians of the step's own function and of its graph, in turns, after two rounds of warm-up."""
    ways: dict[str, Callable[[], None]] = {"eager": step.function, "graph": graph}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    step.load(1)
    # Restored before each run: an update without a gradient would be skipped, and weights would drift.
    state = [(tensor, tensor.clone()) for tensor in graph.state.values()]
    begun = time.monotonic()
    for i in range(-2, rounds):
        if i >= FEWEST_ROUNDS and time.monotonic() - begun > STEP_S:
            break
        for way, function in ways.items():
            for tensor, value in state:
                tensor.copy_(value)
            times = time_ms(function, step.device)
            if i >= 0:
                found[way].append(times)
    row: dict[str, Any] = {"rounds": len(found["eager"])}
    for way, values in found.items():
        whole, host = zip(*values, strict=True)
        row |= {f"{way}_ms": statistics.median(whole), f"{way}_host_ms": statistics.median(host)}
        row |= {f"{way}_min_ms": min(whole), f"{way}_max_ms": max(whole)}
    return row


def time_ms(function: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """(until the work is done, until the host is free again)."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # sync: timing
    started = time.perf_counter()
    function()
    host = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # sync: timing
    return (time.perf_counter() - started) * 1e3, (host - started) * 1e3


def _print(budget: int, found: dict[str, Any]) -> None:
    for name, row in found["steps"].items():
        eager, graph = row["eager_ms"], row["graph_ms"]
        print(
            f"T {budget:6} {name:18} eager {eager:9.3f} ms (host {row['eager_host_ms']:8.3f}), graph {graph:9.3f} ms "
            f"(host {row['graph_host_ms']:8.3f}), {eager / graph:.2f}x"
        )
    print(f"T {budget:6} positions/s: {found['positions_per_s']}", flush=True)
