"""A soak of several ranks on the CPU: killed at random, started again, and every job still trained exactly once.

    python -m bench.soak_ranks [--minutes 30] [--ranks 3] [--every 25] [--epochs 200] [--seed 0] [--output FILE]

Rounds of one run each, over a tiny target. At random moments, start-up included: SIGKILL to a rank (most often) or to
the launcher, SIGTERM to a rank, SIGSTOP of a rank. The launcher starts all ranks again (`--max-restarts`); where it
ended itself, this script runs the same command with `--resume auto`. Every rank notes its jobs (`rank_ledger.py`).
A round passes if, of the steps that no later start rolled back, each job of each epoch was trained exactly once, and
its last checkpoint equals, bit for bit, that of the same run left alone. No event may be followed by a silence: the
ranks must be gone and the next step trained within --limit seconds. Memory: growth of each process that trained for
half a minute, from 10 s after its first step to its end; and of the launcher over its restarts. Ends with one line of
JSON; exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.bench_kernels import describe
from bench.rank_ledger import FOLDER, START, read_ledger
from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.metrics import read_records
from tests.tiny import make_tiny, tiny_settings

KINDS = {"kill rank": 14, "kill launcher": 2, "terminate rank": 2, "stop rank": 2}  # out of 20
RANK_TIMEOUT_S = 8.0
SETTLED_S, LONG_S = 10.0, 30.0
GROWTH_LIMIT_MIB = 24.0
MIB = 2**20


@dataclass
class Life:
    """One process that was watched: seconds since it was first seen, and its resident memory then."""

    first: float
    samples: list[tuple[float, int]] = field(default_factory=list)

    def growth(self, settled_s: float, long_s: float) -> float | None:
        """MiB between `settled_s` and the end (medians of three samples); None for a life too short to tell."""
        kept = [bytes_ for seconds, bytes_ in self.samples if seconds >= settled_s]
        if len(kept) < 6 or self.samples[-1][0] - settled_s < long_s:
            return None
        return (statistics.median(kept[-3:]) - statistics.median(kept[:3])) / MIB


class Memory:
    """Resident memory of launchers and of ranks that have trained a step."""

    def __init__(self) -> None:
        self.launchers: dict[int, Life] = {}
        self.ranks: dict[int, Life] = {}
        self.descriptors: dict[int, list[int]] = {}
        self.peak = 0

    def sample(self, launcher: psutil.Process, ranks: Sequence[psutil.Process], training: set[int]) -> None:
        now = time.monotonic()
        with suppress(psutil.Error):
            self._add(self.launchers, launcher, now)
            self.descriptors.setdefault(launcher.pid, []).append(launcher.num_fds())
        for process in ranks:
            if process.pid in training:
                with suppress(psutil.Error):
                    self._add(self.ranks, process, now)

    def _add(self, lives: dict[int, Life], process: psutil.Process, now: float) -> None:
        resident = process.memory_info().rss
        self.peak = max(self.peak, resident)
        life = lives.setdefault(process.pid, Life(now))
        life.samples.append((now - life.first, resident))

    def summary(self) -> dict[str, Any]:
        ranks = [g for life in self.ranks.values() if (g := life.growth(SETTLED_S, LONG_S)) is not None]
        launchers = [g for life in self.launchers.values() if (g := life.growth(SETTLED_S, LONG_S)) is not None]
        descriptors = [counts[-1] - counts[len(counts) // 4] for counts in self.descriptors.values() if len(counts) > 8]
        return {
            "rank_lives_measured": len(ranks),
            "rank_growth_mib": [round(x, 1) for x in (min(ranks), statistics.median(ranks), max(ranks))]
            if ranks
            else None,
            "launcher_growth_mib": [round(x, 1) for x in launchers],
            "launcher_descriptors_growth": descriptors,
            "largest_process_mib": round(self.peak / MIB),
        }

    def faults(self) -> list[str]:
        found = []
        for kind, lives in (("rank", self.ranks), ("launcher", self.launchers)):
            for pid, life in lives.items():
                growth = life.growth(SETTLED_S, LONG_S)
                if growth is not None and growth > GROWTH_LIMIT_MIB:
                    found.append(f"{kind} {pid} grew by {growth:.1f} MiB in {life.samples[-1][0]:.0f} s")
        return found


class Round:
    """One run, from its first start to its end, through all that is done to it."""

    def __init__(self, folder: Path, settings: Sequence[str], limit_s: float, memory: Memory) -> None:
        self.folder, self.limit_s, self.memory = folder, limit_s, memory
        self.run, self.ledger = folder / "run", folder / "ledger"
        self.ledger.mkdir(parents=True)
        self._command = [
            sys.executable, "-m", "bench.rank_ledger", "train", *settings, f"run_dir={self.run}",
            "--max-restarts", "1000",
        ]  # fmt: skip
        self.starts = 0
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", FOLDER: str(self.ledger), START: str(self.starts)}
        resume = ["--resume", "auto"] if self.starts else []
        self.starts += 1
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen([*self._command, *resume], env=environment, stdout=output, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    @property
    def complete(self) -> bool:
        """Whether the last epoch was trained to its end."""
        records = [record for record in read_records(self.run) if record["kind"] == "train"]
        return bool(records) and records[-1]["jobs_trained"] == self.total_jobs

    @property
    def total_jobs(self) -> int:
        first = next((r for r in read_records(self.run) if r["kind"] == "schedule"), None)
        return -1 if first is None else sum(first["jobs_per_bucket"]) * self.epochs

    epochs = 0

    def ranks(self) -> list[psutil.Process]:
        """The living ranks, whatever became of their launcher."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if f"run_dir={self.run}" in line and process.pid != self.launcher.pid:
                found.append(process)
        return found

    def lines(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.ledger.iterdir())

    def trained(self) -> tuple[int, set[int]]:
        """(ledger lines of steps, pids that have loaded)."""
        pids = set()
        steps = 0
        for path in self.ledger.iterdir():
            for line in path.read_text().splitlines():
                if '"pid"' in line:
                    pids.add(json.loads(line)["pid"])
                else:
                    steps += 1
        return steps, pids

    def watch(self, seconds: float) -> bool:
        """Sample memory for so long; True if the run ended meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.launcher.poll() is not None:
                return True
            self.memory.sample(psutil.Process(self.launcher.pid), self.ranks(), self.trained()[1])
            time.sleep(min(2.0, max(0.05, deadline - time.monotonic())))
        return self.launcher.poll() is not None

    def disturb(self, kind: str, rng: random.Random) -> dict[str, Any]:
        """Do it, and wait until the run trains again. Raises RuntimeError if it does not, or outlives its end."""
        ranks = self.ranks()
        if kind != "kill launcher" and not ranks:
            return {"kind": kind, "skipped": "between two starts"}
        before, _ = self.trained()
        started = time.monotonic()
        victims = {process.pid for process in ranks}
        if kind == "kill launcher":
            self.launcher.kill()
            self.launcher.wait()
        else:
            number = {"kill rank": signal.SIGKILL, "terminate rank": signal.SIGTERM, "stop rank": signal.SIGSTOP}[kind]
            with suppress(ProcessLookupError):
                os.kill(rng.choice(ranks).pid, number)
        gone = self._wait(lambda: not victims & {p.pid for p in self.ranks()}, f"after '{kind}' the ranks did not end")
        if gone is None:
            return {"kind": kind, "ended_s": round(time.monotonic() - started, 1), "back_s": None}
        ended_s = time.monotonic() - started
        if self.launcher.poll() is not None and not self.complete:
            self.launcher = self._start()
        self._wait(lambda: self.trained()[0] > before, f"after '{kind}' no step was trained")
        return {"kind": kind, "ended_s": round(ended_s, 1), "back_s": round(time.monotonic() - started, 1)}

    def _wait(self, done: Any, what: str) -> bool | None:
        """Until `done()`; None if the run is complete instead."""
        deadline = time.monotonic() + self.limit_s
        while not done():
            code = self.launcher.poll()
            if code is not None and self.complete and not self.ranks():
                return None
            if code not in (None, 0, -signal.SIGKILL):
                raise RuntimeError(f"the launcher ended with exit code {code}:\n{self.text[-3000:]}")
            if code is not None and not self.ranks():
                self.launcher = self._start()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} within {self.limit_s:g} s:\n{self.text[-3000:]}")
            time.sleep(0.1)
        return True

    def finish(self) -> None:
        """Let the run come to its end, untroubled."""
        deadline = time.monotonic() + 900
        while True:
            if self.watch(5.0):
                if self.launcher.returncode != 0:
                    raise RuntimeError(f"exit code {self.launcher.returncode}:\n{self.text[-3000:]}")
                if self.complete:
                    return
                self.launcher = self._start()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not come to its end:\n{self.text[-3000:]}")

    def close(self) -> None:
        """Nothing of it lives on."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for process in self.ranks():
            with suppress(psutil.Error):
                process.kill()


def bits(run: Path) -> dict[str, bytes]:
    """Every tensor of a run's newest checkpoint."""
    newest = find_latest(run)
    if newest is None:
        raise RuntimeError(f"{run} holds no checkpoint")
    checkpoint = load_checkpoint(newest)
    return {name: t.numpy().tobytes() for name, t in (checkpoint.drafter | checkpoint.optimizer).items()}


def check(found: Round, epochs: int, reference: dict[str, bytes]) -> list[str]:
    """What is wrong with a finished round."""
    records = read_records(found.run)
    mix = next(r for r in records if r["kind"] == "schedule")["jobs_per_bucket"]
    faults = read_ledger(found.ledger).faults(sum(mix), epochs)
    steps = [r["step"] for r in records if r["kind"] == "train"]
    if steps != sorted(set(steps)):
        faults.append("metrics.jsonl repeats a step or goes back")
    counted = sum(sum(step) for r in records if r["kind"] == "train" for step in r["length_mix"])
    if counted != sum(mix) * epochs:
        faults.append(f"metrics.jsonl counts {counted} jobs; {sum(mix) * epochs} were to be trained")
    ours = bits(found.run)
    if differing := [name for name, value in reference.items() if ours[name] != value]:
        faults.append(f"{len(differing)} of {len(reference)} tensors differ from the untroubled run: {differing[0]}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run rounds until the time is up; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=float, default=25.0, help="mean seconds of peace between two events")
    parser.add_argument("--epochs", type=int, default=200, help="of each round; 22 jobs each")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds until the run must train again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="keep everything here; default is a temporary folder")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-ranks-") as root:
        folder = args.folder or Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        report = soak(folder, args)
    text = json.dumps(report)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    return 0 if report["passed"] else 1


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds; see the module's docstring."""
    tiny = folder / "tiny"
    tiny.mkdir()
    make_tiny(tiny)
    settings = [
        *tiny_settings(tiny, ""), f"devices.ranks={args.ranks}", f"devices.rank_timeout_s={RANK_TIMEOUT_S}",
        "schedule.jobs_per_step=5", f"epochs={args.epochs}", "checkpoint.every=20", "log.every=1",
        "log.validate_every=1000000",
    ]  # fmt: skip
    settings = [item for item in settings if not item.startswith("run_dir=")]
    rng, memory, Round.epochs = random.Random(args.seed), Memory(), args.epochs
    events: list[dict[str, Any]] = []
    faults: list[str] = []
    started = time.monotonic()
    alone = Round(folder / "alone", settings, args.limit, memory)
    try:
        alone.finish()
    finally:
        alone.close()
    reference, alone_s = bits(alone.run), time.monotonic() - started
    print(f"alone: {alone_s:.0f} s, faults {check(alone, args.epochs, reference)}", flush=True)
    started, rounds = time.monotonic(), 0
    while time.monotonic() - started < 60 * args.minutes and not faults:
        found = Round(folder / f"round-{rounds}", settings, args.limit, memory)
        try:
            while time.monotonic() - started < 60 * args.minutes:
                if found.watch(rng.uniform(0, 2 * args.every)) and found.complete:
                    break
                (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
                events.append({"round": rounds} | found.disturb(kind, rng))
                print(f"{time.monotonic() - started:6.0f} s", json.dumps(events[-1]), flush=True)
            found.finish()
            faults += [f"round {rounds}: {fault}" for fault in check(found, args.epochs, reference)]
        except RuntimeError as error:
            faults.append(f"round {rounds}: {error}")
        finally:
            found.close()
        rounds += 1
        print(f"{time.monotonic() - started:6.0f} s round {rounds} ended, faults {faults}", flush=True)
    faults += memory.faults()
    real = [event for event in events if "skipped" not in event]
    seconds = {
        key: [max(values), statistics.median(values)] if values else None
        for key in ("ended_s", "back_s")
        for values in [[event[key] for event in real if event[key] is not None]]
    }
    return {
        "passed": not faults,
        "faults": faults,
        "machine": describe("cpu") | {"command": "python -m bench.soak_ranks " + " ".join(sys.argv[1:])},
        "ranks": args.ranks,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "alone_s": round(alone_s, 1),
        "rounds": rounds,
        "jobs_per_round": alone.total_jobs,
        "events": {kind: sum(event["kind"] == kind for event in real) for kind in KINDS},
        "ranks_gone_s_max_median": seconds["ended_s"],
        "trains_again_s_max_median": seconds["back_s"],
        **memory.summary(),
    }


if __name__ == "__main__":
    sys.exit(main())
