"""Starts the ranks of one machine with torch's elastic launcher, passes signals on, and says how it ended.

On one machine this process is the launcher. Across machines `torchrun` starts one of it on each, and these start the
ranks of theirs. It never trains: a rank is the same command again, told by its environment that it is one. No rank
outlives it (`rank_watch.py`). Called by `train_command.py`.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from dflash_graph.layout import Layout
from dflash_graph.rank_watch import EXIT_PEER, LAUNCHER, LAYOUT, RANK_DIR, RESTARTS

EXIT_BAD_INPUT = 2
_JOIN_TIMEOUT_S = 300
_TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node 1 ... -m dflash_graph train ..."


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, as torchrun told this process."""

    rank: int
    count: int
    host: str  # of the first one
    port: int  # of torchrun's store there


def nodes_of_torchrun() -> Nodes | None:
    """What torchrun says, or None where it did not start this process.

    Raises:
        ValueError: it started more than one process on this machine.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env or RANK_DIR in env:
        return None
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        nodes = int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
        raise ValueError(
            f"torchrun must start one process on each machine, which starts the ranks of that machine; found "
            f"--nproc-per-node {env['LOCAL_WORLD_SIZE']}. Use: {_TORCHRUN.format(nodes=nodes)}"
        )
    return Nodes(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]))


def launch(command: Sequence[str], layout: Layout, *, nodes: Nodes | None = None, max_restarts: int = 0) -> int:
    """Run `command` once per rank of this machine, with all machines' ranks as one world; return the exit code.

    Args:
        command: arguments of the Python interpreter, such as ("-m", "dflash_graph", "train", ...).
        layout: the ranks of this machine; other machines may have another number.
        max_restarts: after a failure that is not bad input, start all ranks again so many times; they continue from
            the last checkpoint.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the summary says it better
    meeting = _Meeting(nodes)
    for attempt in range(max_restarts + 1):
        with tempfile.TemporaryDirectory(prefix="dflash-ranks-") as folder, _Signals(Path(folder), nodes) as signals:
            os.environ |= {
                RANK_DIR: folder, RESTARTS: str(attempt), LAYOUT: layout.to_json(), LAUNCHER: str(os.getpid()),
            }  # fmt: skip
            if nodes is None and Path("/sys/class/net/lo").exists():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            failures = _run(command, len(layout.ranks), meeting, attempt)
            if not failures:
                return 0
            first = _first_failure(Path(folder), failures)
        print(f"ranks     {first.text}", file=sys.stderr)
        if first.code == EXIT_BAD_INPUT or signals.count:
            return EXIT_BAD_INPUT if first.code == EXIT_BAD_INPUT else 1
        if attempt < max_restarts:
            print(f"ranks     starting all ranks again ({attempt + 1} of {max_restarts})", file=sys.stderr, flush=True)
    print("ranks     to go on from the last checkpoint, run the same command with --resume auto", file=sys.stderr)
    return 1


# ---- starting -------------------------------------------------------------------------------------------------------


class _Meeting:
    """Where the launchers of all machines meet: an endpoint on the first one, another one at each attempt."""

    def __init__(self, nodes: Nodes | None) -> None:
        self.nodes = nodes
        self._store: Any = None
        if nodes is not None and nodes.count > 1:
            from torch._C._distributed_c10d import TCPStore

            wait = timedelta(seconds=_JOIN_TIMEOUT_S)
            self._store = TCPStore(nodes.host, nodes.port, is_master=False, timeout=wait)

    def endpoint(self, attempt: int) -> str:
        nodes = self.nodes
        if self._store is None or nodes is None:
            return f"127.0.0.1:{_free_port('127.0.0.1')}"
        key = f"dflash/endpoint/{attempt}"
        if nodes.rank == 0:
            self._store.set(key, f"{nodes.host}:{_free_port('')}")
        return str(self._store.get(key).decode())


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _run(command: Sequence[str], ranks_here: int, meeting: _Meeting, attempt: int) -> dict[int, int]:
    """Start the ranks and wait for them: rank -> exit code of those that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes = meeting.nodes
    count, own = (1, 0) if nodes is None else (nodes.count, nodes.rank)
    options: dict[str, Any] = {
        "min_nodes": count,
        "max_nodes": count,
        "nproc_per_node": ranks_here,
        "run_id": f"dflash-{attempt}",
        "role": "rank",
        "rdzv_backend": "static",  # the first machine stays the first one: it holds the run folder
        "rdzv_endpoint": meeting.endpoint(attempt),
        "rdzv_configs": {"rank": own, "timeout": _JOIN_TIMEOUT_S},
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "signals_to_handle": "SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are ours
    }
    known = {field.name for field in fields(LaunchConfig)}
    config = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    inherited = {name: os.environ.pop(name, None) for name in _OUTER}
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return {rank: int(failure.exitcode) for rank, failure in error.failures.items()}
    finally:
        os.environ |= {name: value for name, value in inherited.items() if value is not None}
    return {}


# What torchrun tells this process is not true of its ranks.
_OUTER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


# ---- signals --------------------------------------------------------------------------------------------------------


class _Signals:
    """Passes SIGINT and SIGTERM on to the ranks, those that start later included, and ends with its own parent.

    Attributes:
        count: signals received.
    """

    def __init__(self, folder: Path, nodes: Nodes | None) -> None:
        self.count = 0
        self._folder, self._nested, self._parent = folder, nodes is not None, os.getppid()
        self._sent: dict[Path, int] = {}
        self._previous: dict[int, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="signals", daemon=True)

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def _work(self) -> None:
        while not self._stop.wait(0.1):
            if self._nested and os.getppid() != self._parent:
                print("the launcher's parent is gone; ending all ranks", file=sys.stderr, flush=True)
                os._exit(EXIT_PEER)
            for path in self._folder.glob("rank-*.pid"):
                while self._sent.get(path, 0) < self.count:
                    self._sent[path] = self._sent.get(path, 0) + 1
                    with suppress(ProcessLookupError, ValueError):  # ended, or its file is not whole yet
                        os.kill(int(path.read_text()), signal.SIGTERM)


# ---- the end --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    code: int
    text: str


def _first_failure(folder: Path, codes: dict[int, int]) -> _Failure:
    """Which rank failed first, in one line, from what the ranks wrote down and how they ended."""
    told = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("error-*.json"))]
    own = sorted((error for error in told if error["own"]), key=lambda error: error["time"])
    others = sum(not error["own"] for error in told)
    after = f"; {others} other rank{'s' * (others != 1)} of this machine ended because of it" if others else ""
    killed = {rank: code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed and not own:
        rank, code = next(iter(killed.items()))
        when = time.strftime("%H:%M:%S")
        return _Failure(code, f"rank {rank} was killed by {signal.Signals(-code).name} at about {when}{after}")
    if own:
        first = own[0]
        worker = f", {first['worker']}" if first["worker"] else ""
        code = EXIT_BAD_INPUT if first["bad_input"] else 1
        return _Failure(code, f"rank {first['rank']} ({first['host']}{worker}) failed first: {first['error']}{after}")
    if told:
        return _Failure(1, f"all ranks of this machine ended because of another one: {told[0]['error']}")
    rank, code = next(iter(codes.items()))
    return _Failure(code, f"rank {rank} ended with exit code {code}, and left no word: see its output above")
