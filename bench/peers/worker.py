"""One contestant in a process of its own: builds the step, then answers commands, one line of JSON each.

    python -m bench.peers.worker '{"contestant": "ours", "shape": {...}, "threads": 2}'

Commands on stdin: `check PATH` (one step; its gradients into PATH), `count`, `time`, `quit`. The first line of output
says that it is ready, with the peak memory of the first step. Libraries' prints go to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.peers.contestant import Contestant
from bench.peers.counting import count, forget_peak, peak, resident
from bench.peers.problem import Problem, Shape, make_problem


def _ours(anchor_groups: int) -> Callable[[Problem], Contestant]:
    def build(problem: Problem) -> Contestant:
        from bench.peers.ours import Ours

        return Ours(problem, anchor_groups)

    return build


def _stock(kind: str) -> Callable[[Problem], Contestant]:
    def build(problem: Problem) -> Contestant:
        from bench.peers.stock import Stock

        return Stock(problem, kind)

    return build


def _specforge(problem: Problem) -> Contestant:
    from bench.peers.specforge import SpecForge

    return SpecForge(problem)


def _nemo_automodel(problem: Problem) -> Contestant:
    from bench.peers.nemo_automodel import NemoAutomodel

    return NemoAutomodel(problem)


def _speculators(problem: Problem) -> Contestant:
    from bench.peers.speculators import Speculators

    return Speculators(problem)


def _our_loss(problem: Problem) -> Contestant:
    from bench.peers.losses import OurLoss

    return OurLoss(problem)


def _stock_loss(kind: str) -> Callable[[Problem], Contestant]:
    def build(problem: Problem) -> Contestant:
        from bench.peers.losses import StockLoss

        return StockLoss(problem, kind)

    return build


STEPS: dict[str, Callable[[Problem], Contestant]] = {
    "ours": _ours(1),
    "ours:groups=4": _ours(4),
    "naive": _stock("naive"),
    "linear_cross_entropy": _stock("linear_cross_entropy"),
    "specforge": _specforge,
    "nemo_automodel": _nemo_automodel,
    "speculators": _speculators,
}
LOSSES: dict[str, Callable[[Problem], Contestant]] = {
    "loss:ours": _our_loss,
    "loss:naive": _stock_loss("naive"),
    "loss:linear_cross_entropy": _stock_loss("linear_cross_entropy"),
}
PACKAGES = ("torch", "transformers", "specforge", "nemo_automodel", "speculators")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _warm_up(build: Callable[[Problem], Contestant], shape: Shape) -> None:
    """A tiny step, so that lazily imported and loaded code is resident before memory is measured."""
    small = replace(
        shape, row_length=32, num_tokens=32, num_anchors=4, block_size=min(4, shape.block_size), vocab_size=64
    )
    contestant = build(make_problem(small))
    contestant.reset()
    contestant.step()


def start(name: str, shape: Shape) -> tuple[Contestant, dict[str, Any]]:
    """Build a contestant; returns it and what its first step showed.

    The extra memory is the peak during the first step over what was resident when only embedding, weights, features and
    tokens existed: gradients, workspaces and copies of any kind count, wherever they were allocated.
    """
    build = (STEPS | LOSSES)[name]
    _warm_up(build, shape)
    problem = make_problem(shape)
    if name in LOSSES:
        problem.features, problem.parameters = None, {}  # a loss has no use for them
    inputs = resident()
    contestant = build(problem)
    contestant.reset()
    prepared = resident()
    forget_peak()
    contestant.step()
    top = peak()
    return contestant, {
        "ready": name,
        "note": contestant.note,
        "versions": _versions(),
        "threads": torch.get_num_threads(),
        "inputs_bytes": inputs,
        "prepared_bytes": prepared - inputs - contestant.not_extra_bytes,
        "extra_bytes": top - inputs - contestant.not_extra_bytes,
        "loss": contestant.loss(),
    }


def answer(contestant: Contestant, command: str) -> dict[str, Any]:
    """Run one command."""
    word, _, argument = command.partition(" ")
    contestant.reset()
    if word == "count":
        return count(contestant)
    wall, cpu = time.perf_counter(), time.process_time()
    contestant.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result: dict[str, Any] = {"wall_s": wall, "cpu_s": cpu, "loss": contestant.loss()}
    if word == "check":
        torch.save({name: grad.clone() for name, grad in contestant.grads().items()}, argument)
    elif word != "time":
        raise ValueError(f"unknown command {command!r}")
    return result


def main() -> None:
    # transformers binds this package whenever it can import it, and its kernels need a GPU.
    sys.modules["fla"] = None  # type: ignore[assignment]
    task = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        torch.set_num_threads(task["threads"])
        contestant, report = start(task["contestant"], Shape(**task["shape"]))
        say(report)
        for line in sys.stdin:
            if line.strip() == "quit":
                return
            say(answer(contestant, line.strip()))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        say({"error": f"{type(error).__name__}: {lines[-1]}"})
        raise


if __name__ == "__main__":
    main()
