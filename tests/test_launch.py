"""The launcher: ranks started, signalled, restarted and ended, alone and under torchrun; no process outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.test_ranks import of_kind
from tests.tiny import tiny_settings

MODULE = "dflash_graph"


class Launched:
    """A launcher that was started, with what it and its ranks print."""

    def __init__(self, command: list[str], output: Path, env: dict[str, str]) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ) | env
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, limit: float = 90) -> None:
        deadline = time.monotonic() + limit
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def wait(self, limit: float = 90) -> int:
        return self.process.wait(limit)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tiny: Path, tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(
        *more: str, module: str = MODULE, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> Launched:
        settings = [*tiny_settings(tiny, tmp_path / "run"), "devices.ranks=2", "devices.rank_timeout_s=5", *more]
        command = [*prefix, "-m", module, "train", *settings]
        started.append(Launched(command, tmp_path / f"output-{len(started)}", {"OMP_NUM_THREADS": "1"} | (env or {})))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            for process in [*launched.descendants(), launched.process]:
                process.kill()


def gone(processes: list[psutil.Process], limit: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=limit)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_of_two_ranks_by_one_command(launch: Launch, tmp_path: Path) -> None:
    launched = launch("epochs=1")
    assert launched.wait() == 0, launched.text
    assert of_kind(tmp_path / "run", "train")[-1]["jobs_trained"] == 22
    assert "2, with [1, 1] targets, take [1, 1] jobs of each step" in launched.text


def test_sigterm_to_the_launcher_saves_once_and_ends_in_good_order(launch: Launch, tmp_path: Path) -> None:
    launched = launch("epochs=500", "checkpoint.every=100000", "log.validate_every=100000")
    launched.wait_for("checkpoint at step 0")
    time.sleep(1)
    ranks = launched.descendants()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait(60) == 0, launched.text
    assert gone(ranks, 5)
    assert launched.text.count("finishing the current step") == 2
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 2  # at the start, and now
    assert "failed" not in launched.text


def test_ranks_do_not_outlive_a_killed_launcher(launch: Launch) -> None:
    launched = launch("epochs=500")
    launched.wait_for("checkpoint at step 0")
    ranks = launched.descendants()
    assert len(ranks) >= 2
    launched.process.kill()
    assert gone(ranks, 15)


def test_a_failure_is_told_once_and_not_as_a_wall(launch: Launch, tmp_path: Path) -> None:
    fault = {"FAULT_RANK": "1", "FAULT_STAGE": "mid-epoch", "FAULT_KIND": "raise"}
    launched = launch(module="tests.rank_launcher", env=fault)
    assert launched.wait() == 1
    assert "failed first: Planted: the planted error" in launched.text
    assert "1 other rank of this machine ended because of it" in launched.text
    assert "--resume auto" in launched.text
    assert "ChildFailedError" not in launched.text


@pytest.mark.parametrize("kind", [pytest.param("raise", marks=pytest.mark.slow), "kill"])
def test_restarts_continue_from_the_last_checkpoint(launch: Launch, tmp_path: Path, kind: str) -> None:
    """The fault comes once, in the first attempt; every job is trained once all the same."""
    once = str(tmp_path / "once")
    fault = {"FAULT_RANK": "1", "FAULT_STAGE": "mid-epoch", "FAULT_KIND": kind, "FAULT_ONCE": once}
    launched = launch("--max-restarts", "2", "checkpoint.every=2", module="tests.rank_launcher", env=fault)
    assert launched.wait() == 0, launched.text
    assert launched.text.count("starting all ranks again (1 of 2)") == 1
    assert "starting all ranks again (2 of 2)" not in launched.text
    assert "resume auto: continuing from" in launched.text
    records = of_kind(tmp_path / "run", "train")
    assert records[-1]["jobs_trained"] == 44
    assert [record["step"] for record in records] == sorted({record["step"] for record in records})


def test_bad_input_is_not_tried_again(launch: Launch) -> None:
    launched = launch("--max-restarts", "3", "data.train=[/nowhere.jsonl]")
    assert launched.wait() == 2
    assert "/nowhere.jsonl" in launched.text
    assert "starting all ranks again" not in launched.text
    assert "Traceback" not in launched.text


def torchrun(*options: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", *options)


def test_torchrun_with_one_process_per_machine(launch: Launch, tmp_path: Path) -> None:
    """Two machines, played by two torchruns here, with two ranks and one."""
    port = _free_port()
    common = torchrun(
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"
    )
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    one = launch("epochs=1", prefix=common, env=env)
    two = launch("epochs=1", "devices.ranks=1", prefix=common, env=env)
    assert [one.wait(120), two.wait(60)] == [0, 0], one.text + two.text
    text = one.text + two.text
    assert "3, with [1, 1, 1] targets" in text
    assert text.count("validation at step 0") == 1
    assert of_kind(tmp_path / "run", "train")[-1]["jobs_trained"] == 22


def test_torchrun_with_more_processes_is_told_the_right_line(launch: Launch) -> None:
    launched = launch(prefix=torchrun("--standalone", "--nproc-per-node", "2"))
    assert launched.wait() != 0
    assert "torchrun must start one process on each machine" in launched.text
    assert "torchrun --nnodes 1 --nproc-per-node 1 ... -m dflash_graph train ..." in launched.text


def test_restarts_need_several_ranks(launch: Launch) -> None:
    launched = launch("devices.ranks=1", "--max-restarts", "1")
    assert launched.wait() == 2
    assert "--max-restarts is for runs of several ranks" in launched.text


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_summary_finds_the_first_of_several(tmp_path: Path) -> None:
    from dflash_graph.launch import _first_failure

    base: dict[str, Any] = {"host": "h", "worker": "drafter", "caused_by": None, "bad_input": False}
    for rank, own, when, text in ((0, False, 1.0, "echo"), (1, True, 5.0, "late"), (2, True, 3.0, "early")):
        values = base | {"rank": rank, "own": own, "time": when, "error": text}
        (tmp_path / f"error-{rank}.json").write_text(json.dumps(values))
    failure = _first_failure(tmp_path, {0: 3, 1: 1, 2: 1})
    assert failure.text == ("rank 2 (h, drafter) failed first: early; 1 other rank of this machine ended because of it")
    assert failure.code == 1
