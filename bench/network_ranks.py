"""Ranks across a network boundary: two machines played by network namespaces, two ranks each, joined by a veth pair.

    python -m bench.network_ranks [--cut 30] [--phases plain,slow,cut,gone] [--output FILE]

Needs root and iproute2; without them it says so and ends with exit status 0. `torchrun` with one process per machine
does the rendezvous over the link. Phases: a plain run, whose weights must equal those of four ranks on one machine; a
slow link (20 ms, 100 Mbit/s); the link cut for --cut seconds, which a longer `devices.rank_timeout_s` must survive; and
the link cut for good, after which every process on both sides must be gone in bounded time. Prints one line of JSON
last; exit status 1: a phase failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.bench_kernels import describe
from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.metrics import read_records
from tests.tiny import make_tiny, tiny_settings

SIDES = ("dflash-a", "dflash-b")
ADDRESSES = ("10.77.77.1", "10.77.77.2")
PORT = 29517
LIMIT_S = 240.0


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing() -> str | None:
    """Why the machines cannot be made here, or None."""
    if shutil.which("ip") is None:
        return "iproute2 (the command `ip`) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else f"network namespaces are not allowed: {probe.stderr.decode().strip()}"


@contextmanager
def machines() -> Iterator[None]:
    """Two namespaces joined by a veth pair."""
    _remove()
    try:
        for side in SIDES:
            _run("ip", "netns", "add", side)
            _run("ip", "-n", side, "link", "set", "lo", "up")
        _run("ip", "link", "add", "veth-a", "netns", SIDES[0], "type", "veth", "peer", "veth-b", "netns", SIDES[1])
        for side, address, link in zip(SIDES, ADDRESSES, ("veth-a", "veth-b"), strict=True):
            _run("ip", "-n", side, "address", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", side, "link", "set", link, "up")
        yield
    finally:
        _remove()


def _remove() -> None:
    for side in SIDES:
        subprocess.run(["ip", "netns", "delete", side], capture_output=True, check=False)


def link(up: bool) -> None:
    """Cut or restore the link."""
    _run("ip", "-n", SIDES[0], "link", "set", "veth-a", "up" if up else "down")


@dataclass
class Machine:
    """One torchrun and all its descendants, which are in its session or were started by it."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")


def start(folder: Path, settings: Sequence[str]) -> list[Machine]:
    """Start both machines' torchruns."""
    found = []
    for number, side in enumerate(SIDES):
        environment = {
            "GLOO_SOCKET_IFNAME": f"veth-{side[-1]}",
            "OMP_NUM_THREADS": "1",
            "TP_SOCKET_IFNAME": f"veth-{side[-1]}",
        }
        command = [
            "ip", "netns", "exec", side, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}",
            "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", ADDRESSES[number],
            "-m", "dflash_graph", "train", *settings,
        ]  # fmt: skip
        output = folder / f"{side}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ) | environment,
                start_new_session=True,
            )  # fmt: skip
        found.append(Machine(process, output))
    return found


def living(folder: Path) -> list[int]:
    """Launchers and ranks of this phase, whose command lines name its folder; torchrun itself is not ours."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command and b"torch.distributed.run" not in command:
                found.append(int(entry.name))
    return found


def finish(machines_: Sequence[Machine], limit: float) -> list[int | None]:
    """Exit codes; None for one that outlived the limit (and is killed)."""
    deadline = time.monotonic() + limit
    codes: list[int | None] = []
    for machine in machines_:
        try:
            codes.append(machine.process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for machine in machines_:
        if machine.process.poll() is None:
            os.killpg(machine.process.pid, signal.SIGKILL)
    return codes


def wait_for(machines_: Sequence[Machine], text: str) -> None:
    """Until one of the machines has printed `text`."""
    deadline = time.monotonic() + LIMIT_S
    while not any(text in machine.text for machine in machines_):
        if time.monotonic() > deadline or any(machine.process.poll() is not None for machine in machines_):
            raise RuntimeError(f"{text!r} never came:\n" + "\n".join(machine.text[-3000:] for machine in machines_))
        time.sleep(0.05)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = find_latest(run)
    if newest is None:
        raise RuntimeError(f"{run} holds no checkpoint")
    return load_checkpoint(newest).drafter


def step_seconds(run: Path) -> float:
    """Median wall-clock of a step."""
    seconds = sorted(r["seconds"] for r in read_records(run) if r["kind"] == "train")
    return float(seconds[len(seconds) // 2])


def phase_plain(folder: Path, settings: Sequence[str], cut: float) -> dict[str, Any]:
    both = start(folder, [*settings, f"run_dir={folder / 'run'}"])
    codes = finish(both, LIMIT_S)
    if codes != [0, 0]:
        raise RuntimeError(f"exit codes {codes}:\n" + "\n".join(machine.text[-3000:] for machine in both))
    command = [sys.executable, "-m", "dflash_graph", "train", *settings, "devices.ranks=4", f"run_dir={folder / 'one'}"]
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    two, one = tensors(folder / "run"), tensors(folder / "one")
    difference = max(float((two[name] - one[name]).abs().max()) for name in one)
    return {"passed": difference < 1e-5, "largest_difference": difference, "step_s": step_seconds(folder / "run")}


def _shape(shaping: Sequence[str]) -> bool:
    """Slow the link down on both sides; False where the kernel cannot."""
    commands = [
        ["ip", "netns", "exec", side, "tc", "qdisc", "add", "dev", name, "root", *shaping]
        for side, name in zip(SIDES, ("veth-a", "veth-b"), strict=True)
    ]
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def phase_slow(folder: Path, settings: Sequence[str], cut: float) -> dict[str, Any]:
    shapings = {
        "20 ms, 100 Mbit/s": ["netem", "delay", "20ms", "rate", "100mbit"],
        "10 Mbit/s": ["tbf", "rate", "10mbit", "burst", "64kbit", "latency", "400ms"],
    }
    shaped = next((name for name, shaping in shapings.items() if _shape(shaping)), None)
    if shaped is None:
        return {"passed": True, "skipped": "this kernel has neither netem nor tbf"}
    try:
        codes = finish(start(folder, [*settings, f"run_dir={folder / 'run'}"]), LIMIT_S)
    finally:
        for side, name in zip(SIDES, ("veth-a", "veth-b"), strict=True):
            subprocess.run(["ip", "netns", "exec", side, "tc", "qdisc", "delete", "dev", name, "root"], check=False)
    return {"passed": codes == [0, 0], "link": shaped, "codes": codes, "step_s": step_seconds(folder / "run")}


def phase_cut(folder: Path, settings: Sequence[str], cut: float) -> dict[str, Any]:
    more = ["epochs=60", f"devices.rank_timeout_s={2 * cut}", f"run_dir={folder / 'run'}"]
    both = start(folder, [*settings, *more])
    wait_for(both, "checkpoint at step 3:")
    before = len(read_records(folder / "run"))
    link(False)
    time.sleep(cut)
    during = len(read_records(folder / "run")) - before
    alive = [machine.process.poll() is None for machine in both]
    link(True)
    restored = time.monotonic()
    while len(read_records(folder / "run")) <= before + during and time.monotonic() - restored < 2 * cut + 60:
        if any(machine.process.poll() is not None for machine in both):
            break
        time.sleep(0.1)
    resumed = time.monotonic() - restored
    went_on = len(read_records(folder / "run")) > before + during
    for machine in both:
        os.killpg(machine.process.pid, signal.SIGTERM)
    codes = finish(both, 60)
    result = {"went_on": went_on, "alive_during": alive, "s_to_go_on": round(resumed, 1), "codes": codes}
    if not went_on:
        result["log"] = [machine.text[-1500:] for machine in both]
    return {"passed": went_on, **result}


def phase_gone(folder: Path, settings: Sequence[str], cut: float) -> dict[str, Any]:
    timeout = 10.0
    both = start(folder, [*settings, "epochs=500", f"devices.rank_timeout_s={timeout}", f"run_dir={folder / 'run'}"])
    wait_for(both, "checkpoint at step 3:")
    link(False)
    started = time.monotonic()
    while living(folder) and time.monotonic() - started < timeout + 60:
        time.sleep(0.1)
    ended, left = time.monotonic() - started, living(folder)
    link(True)
    codes = finish(both, 90)  # torchrun waits for its own store
    texts = [machine.text for machine in both]
    said = [
        next((li for li in text.splitlines() if "sign of life" in li or "not answered" in li), "") for text in texts
    ]
    passed = not left and 0 not in codes and all(said)
    result = {"passed": passed, "s_to_end": round(ended, 1), "left": len(left), "torchruns": codes, "said": said}
    return result if passed else result | {"log": [text[-2000:] for text in texts]}


PHASES = {"plain": phase_plain, "slow": phase_slow, "cut": phase_cut, "gone": phase_gone}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the phases; exit status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cut", type=float, default=30.0, help="seconds without a link")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if (reason := missing()) is not None:
        print(json.dumps({"skipped": reason}))
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="network-ranks-") as root, machines():
        tiny = Path(root) / "tiny"
        tiny.mkdir()
        make_tiny(tiny)
        settings = [*tiny_settings(tiny, Path(root)), "devices.ranks=2", "schedule.jobs_per_step=4", "log.every=1"]
        for name in args.phases.split(","):
            folder = Path(root) / name
            folder.mkdir()
            try:
                results[name] = PHASES[name](folder, settings, args.cut)
            except Exception as error:  # the other phases run all the same
                results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            finally:
                link(True)
                for process in living(folder):
                    os.kill(process, signal.SIGKILL)
            print(name, json.dumps(results[name]), flush=True)
    passed = all(result["passed"] for result in results.values())
    text = json.dumps({"passed": passed, "machine": describe("cpu"), "cut_s": args.cut, **results})
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
