"""Starts the ranks of a run as plain processes, as a launcher would, and waits for them with a time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

LIMIT_S = 150.0


@dataclass
class RankProcesses:
    """Ranks that were started; `folder` is the launcher's."""

    folder: Path
    processes: list[subprocess.Popen[bytes]]
    store: TCPStore  # hosted here, as a launcher does

    def wait(self, limit: float = LIMIT_S) -> list[int]:
        """Exit codes of all ranks. A rank that outlives the limit is killed, and fails the test."""
        deadline = time.monotonic() + limit
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            texts = "\n".join(f"--- rank {r}\n{self.output(r)}" for r in range(len(self.processes)))
            raise AssertionError(f"ranks did not end within {limit} s:\n{texts}") from None
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def output(self, rank: int) -> str:
        """What a rank has printed, errors included."""
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def wait_for(self, rank: int, text: str, limit: float = LIMIT_S) -> None:
        """Until a rank has printed `text`."""
        deadline = time.monotonic() + limit
        while text not in self.output(rank):
            if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                self.kill()
                raise AssertionError(f"rank {rank} never printed {text!r}:\n{self.output(rank)}")
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start_ranks(
    folder: Path,
    world: int,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    env_of: Mapping[int, Mapping[str, str]] | None = None,
) -> RankProcesses:
    """Start `python <command>` once per rank, all on this machine.

    Args:
        folder: new; of the launcher: pid files, errors and outputs.
        env, env_of: more environment, for all ranks and by rank.
    """
    folder.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = dict(os.environ) | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "DFLASH_RANK_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    processes = []
    for rank in range(world):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), **((env_of or {}).get(rank, {}))}
        with (folder / f"output-{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen([sys.executable, *command], env=own, stdout=output, stderr=subprocess.STDOUT)
            )
    return RankProcesses(folder, processes, store)
