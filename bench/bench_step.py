"""One whole micro-step of the drafter on the CPU, float32, against plain torch and the public trainers' own steps.

    python -m bench.bench_step [--peers DIR] [--shapes 1024x64x16,...] [--rounds N] [--threads N] [--output FILE]

Every contestant is a process of its own (`bench/peers/worker.py`) with the same data, anchors and initial weights; one
runs at a time, in interleaved rounds. Losses and gradients must agree before anything is timed. The public trainers run
unmodified in environments of their own, which `bench/peers/make_envs.sh DIR` makes; one that is missing or fails is in
the table with the reason. Prints the machine, the tables and a verdict, writes it all as JSON, and ends with one line
of JSON. Rules of counting: `bench/peers/counting.py`; of the memory: `bench/peers/worker.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.peers.problem import Shape
from bench.peers.worker import LOSSES, STEPS

ROOT = Path(__file__).parent.parent
SHAPES = ("1024x64x16", "2048x512x8", "4096x256x16")
PEERS = ("specforge", "nemo_automodel", "speculators")
ROUNDS = 7
ANSWER_TIMEOUT_S = 1800.0
# Largest relative error of the loss, and of any gradient tensor, against plain torch: float32 sums in another order.
LOSS_TOLERANCE, GRAD_TOLERANCE = 1e-5, 2e-3
MEMORY_SHARE, SPEED_AIM = 0.5, 1.5


class WorkerFailed(Exception):
    """A contestant could not run; the message is its error's last line."""


class Worker:
    """One contestant's process."""

    def __init__(self, name: str, shape: Shape, *, python: Path, threads: int) -> None:
        task = {"contestant": name, "shape": asdict(shape), "threads": threads}
        self.name, self._errors = name, tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.peers.worker", json.dumps(task)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        self.report = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIMEOUT_S):
                self._process.kill()
                raise WorkerFailed(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
        line = stdout.readline()
        if not line:
            raise WorkerFailed(self._last_error())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _last_error(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process ended with code {self._process.returncode}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


@dataclass(kw_only=True)
class Result:
    """What one contestant showed at one shape."""

    name: str
    failed: str | None = None
    loss: float = float("nan")
    grad_error: float = float("nan")  # largest relative error of a gradient tensor against plain torch
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    extra_bytes: int = 0
    prepared_bytes: int = 0  # of the extra bytes, those that existed before the step began
    counts: dict[str, Any] = field(default_factory=dict)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_s)

    def to_dict(self) -> dict[str, Any]:
        if self.failed is not None:
            return {"name": self.name, "failed": self.failed}
        return {**asdict(self), "cpu_median_s": self.cpu, "wall_median_s": self.wall}


def find_python(name: str, peers: Path) -> Path:
    """The interpreter a contestant runs in.

    Raises:
        WorkerFailed: a public trainer's environment is missing.
    """
    if name not in PEERS:
        return Path(sys.executable)
    python = (peers / name / "bin" / "python").absolute()  # not resolved: the link is what makes it that environment's
    if not python.exists():
        raise WorkerFailed(f"no environment {python.parent.parent}; bench/peers/make_envs.sh {peers} {name} makes it")
    return python


@contextmanager
def _started(names: Sequence[str], shape: Shape, peers: Path, threads: int) -> Iterator[dict[str, Worker | str]]:
    """Workers by name, started one after the other; in the place of one that fails, the reason."""
    workers: dict[str, Worker | str] = {}
    try:
        for name in names:
            try:
                workers[name] = Worker(name, shape, python=find_python(name, peers), threads=threads)
            except WorkerFailed as reason:
                workers[name] = str(reason)
        yield workers
    finally:
        for worker in workers.values():
            if isinstance(worker, Worker):
                worker.close()


def _grad_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest over tensors of ||found - truth|| / ||truth||."""
    if found.keys() != truth.keys():
        raise ValueError(f"gradients are of other tensors: {sorted(found.keys() ^ truth.keys())}")
    return max(float((found[name].double() - t).norm() / t.double().norm()) for name, t in truth.items())


def check(results: Sequence[Result], reference: str) -> None:
    """Refuse to time contestants that compute something else.

    Raises:
        ValueError: a loss or a gradient differs from plain torch's.
    """
    done = {r.name: r for r in results if r.failed is None}
    for r in done.values():
        loss_error = abs(r.loss / done[reference].loss - 1)
        if not loss_error <= LOSS_TOLERANCE or not r.grad_error <= GRAD_TOLERANCE:
            raise ValueError(
                f"{r.name} must agree with {reference} within {LOSS_TOLERANCE} of the loss and {GRAD_TOLERANCE} of "
                f"each gradient; found losses {r.loss} and {done[reference].loss}, gradient error {r.grad_error}"
            )


def run_shape(
    names: Sequence[str], shape: Shape, *, peers: Path, threads: int, rounds: int, reference: str
) -> list[Result]:
    """All measures of the named contestants and the reference at one shape; the reference must run.

    Raises:
        ValueError: contestants disagree.
        WorkerFailed: a contestant failed after its first step, or the reference did.
    """
    names = list(dict.fromkeys((*names, reference)))
    results = {name: Result(name=name) for name in names}
    with _started(names, shape, peers, threads) as workers, tempfile.TemporaryDirectory() as folder:
        running: dict[str, Worker] = {}
        for name, worker in workers.items():
            if isinstance(worker, str):
                results[name].failed = worker
            else:
                running[name] = worker
        if reference not in running:
            raise WorkerFailed(f"{reference}, which all are compared with, cannot run: {results[reference].failed}")
        for name in (reference, *(n for n in running if n != reference)):
            r, worker = results[name], running[name]
            path = Path(folder, name.replace(":", "_"))
            r.loss = worker.ask(f"check {path}")["loss"]
            r.grad_error = _grad_error(
                torch.load(path, weights_only=True), torch.load(Path(folder, reference.replace(":", "_")))
            )
            for key in ("note", "versions", "extra_bytes", "prepared_bytes"):
                setattr(r, key, worker.report[key])
            r.counts = worker.ask("count")
        check(list(results.values()), reference)
        order = list(running)
        for i in range(rounds):
            for name in order[i % len(order) :] + order[: i % len(order)]:
                times = running[name].ask("time")
                results[name].cpu_s.append(times["cpu_s"])
                results[name].wall_s.append(times["wall_s"])
    return list(results.values())


# ---- verdict --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """One requirement at one shape: ours against the best other contestant."""

    what: str
    shape: str
    ours: float
    other: float
    who: str
    holds: bool
    hard: bool = True

    def __str__(self) -> str:
        word = "holds" if self.holds else "FAILS" if self.hard else "not reached"
        kind = "" if self.hard else " (aim)"
        return f"{word:<11} {self.what}{kind}: ours {self.ours:.4g}, {self.who} {self.other:.4g}  [{self.shape}]"


def is_ours(name: str) -> bool:
    """Whether a contestant is this package, in any of its settings."""
    return "ours" in name.split(":")


def judge(results: Sequence[Result], ours: str, where: str) -> list[Line]:
    """The requirements at one shape, each against the best of those who are not us."""
    own = next(r for r in results if r.name == ours)
    others = [r for r in results if r.failed is None and not is_ours(r.name)]

    def line(what: str, value: Any, share: float = 1.0, *, strict: bool = False, hard: bool = True) -> Line:
        best = min(others, key=value)
        mine, other = float(value(own)), float(value(best))
        holds = mine < share * other if strict else mine <= share * other
        return Line(what=what, shape=where, ours=mine, other=other, who=best.name, holds=holds, hard=hard)

    return [
        line("fewer FLOPs, 1e9", lambda r: r.counts["flops"] / 1e9, strict=True),
        line("fewer operators, opened", lambda r: r.counts["operators"], strict=True),
        line("fewer operators, closed", lambda r: r.counts["operators_closed"], strict=True),
        line("at most half the peak memory, MB", lambda r: r.extra_bytes / 1e6, MEMORY_SHARE),
        line("not slower, CPU s", lambda r: r.cpu),
        line("not slower, wall s", lambda r: r.wall),
        line(f"{SPEED_AIM} times faster, CPU s", lambda r: r.cpu, 1 / SPEED_AIM, hard=False),
    ]


# ---- report ---------------------------------------------------------------------------------------------------------


def _cpu_model() -> str:
    for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def describe_machine(threads: int) -> dict[str, Any]:
    """Where and with what the numbers were made."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": shlex.join(["python", "-m", "bench.bench_step", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


_HEADER = (
    "contestant", "CPU s", "min-max", "wall s", "GFLOP", "as torch", "operators", "closed", "peak MB", "before", "loss",
)  # fmt: skip


def format_table(results: Sequence[Result]) -> str:
    """One line per contestant: CPU time (median, spread), wall time, counts, peak extra memory, loss."""
    rows = [_HEADER]
    for r in results:
        if r.failed is not None:
            continue
        rows.append(
            (
                r.name,
                f"{r.cpu:.3f}",
                f"{min(r.cpu_s):.2f}-{max(r.cpu_s):.2f}",
                f"{r.wall:.3f}",
                f"{r.counts['flops'] / 1e9:.1f}",
                f"{r.counts['flops_torch'] / 1e9:.1f}",
                str(r.counts["operators"]),
                str(r.counts["operators_closed"]),
                f"{r.extra_bytes / 1e6:.0f}",
                f"{r.prepared_bytes / 1e6:.0f}",
                f"{r.loss:.6f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines += [f"{r.name}: did not run: {r.failed}" for r in results if r.failed is not None]
    return "\n".join(lines)


LEGEND = """\
CPU s, wall s: medians of a micro-step. GFLOP: its GEMMs, SDPA by torch's formula; as torch: SDPA counts 0 on a CPU.
operators: aten calls without views and bare allocations, Python operators opened; closed: those count as one each.
peak MB: most memory during the first step over embedding, weights, features and tokens; before: what of it was there
before the step began."""


def parse_shape(text: str) -> Shape:
    """T x A x K, as "1024x64x16"; T is a multiple of the row length, 1,024."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"a shape is T x A x K, as 1024x64x16; found {text!r}")
    tokens, anchors, block_size = (int(n) for n in numbers)
    return Shape(num_tokens=tokens, num_anchors=anchors, block_size=block_size)


def run(
    shapes: Sequence[Shape],
    *,
    peers: Path,
    threads: int,
    rounds: int,
    steps: Sequence[str] = tuple(STEPS),
    losses: Sequence[str] = tuple(LOSSES),
) -> dict[str, Any]:
    """Measure, print, and return the whole report."""
    report: dict[str, Any] = {"machine": describe_machine(threads), "rounds": rounds, "shapes": []}
    print(json.dumps(report["machine"], indent=1), LEGEND, sep="\n", flush=True)
    lines: list[Line] = []
    for shape in shapes:
        entry: dict[str, Any] = {"shape": asdict(shape), "trained_rows": shape.trained_rows}
        for kind, names, reference in (("step", steps, "naive"), ("loss", losses, "loss:naive")):
            if not names:
                continue
            results = run_shape(names, shape, peers=peers, threads=threads, rounds=rounds, reference=reference)
            entry[kind] = [r.to_dict() for r in results]
            print(f"\n{kind} at {shape}, R {shape.trained_rows}", format_table(results), sep="\n", flush=True)
            mine = [r.name for r in results if is_ours(r.name)]
            if len(mine) < len(results):
                lines += [line for name in mine for line in judge(results, name, f"{name} at {shape}")]
        report["shapes"].append(entry)
    notes = {r["name"]: r["note"] for entry in report["shapes"] for r in entry.get("step", ()) if r.get("note")}
    print("", *(f"{name}: {note}" for name, note in notes.items()), "", *lines, sep="\n")
    report["verdict"] = [asdict(line) for line in lines]
    report["failed"] = sum(line.hard and not line.holds for line in lines)
    report["missing"] = sorted({r["name"] for e in report["shapes"] for r in e.get("step", ()) if r.get("failed")})
    if report["missing"]:
        print(f"not verified against {', '.join(report['missing'])}: they did not run")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".cache/peers", help="folder of the trainers' environments"
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="T x A x K, separated by commas; T a multiple of 1,024"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each contestant")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--steps", default=",".join(STEPS), help="contestants of the whole step")
    parser.add_argument("--losses", default=",".join(LOSSES), help="contestants of the loss alone")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/cpu_step.json")
    options = parser.parse_args(arguments)
    try:
        shapes = [parse_shape(text) for text in options.shapes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds and --threads must be at least 1; found {options.rounds} and {options.threads}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for option, known in (("steps", STEPS), ("losses", LOSSES)):
        unknown = set(getattr(options, option).split(",")) - {"", *known}
        if unknown:
            parser.error(f"--{option} must be among {', '.join(known)}; found {', '.join(sorted(unknown))}")
    report = run(
        shapes,
        peers=options.peers,
        threads=options.threads,
        rounds=options.rounds,
        steps=[name for name in options.steps.split(",") if name],
        losses=[name for name in options.losses.split(",") if name],
    )
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {"output": str(options.output), "hard_requirements_failed": report["failed"], "missing": report["missing"]}
        )
    )


if __name__ == "__main__":
    main()
