"""The processes of a run: what they exchange, over torch.distributed, and what a run of one process does instead.

A rank is one process with one drafter. Gradients are added up by NCCL between GPUs and by gloo on CPUs; everything else
(votes, counts, checks) goes through gloo, on the host. Only one thread at a time may call the collectives, and all
ranks call the same ones in the same order. Used by `training.py` and the trainer; `rank_watch.py` ends what would
wait for ever.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dflash_graph.control import RunControl
from dflash_graph.rank_watch import RANK_DIR, RESTARTS, PeerFailed, Watch

_T = TypeVar("_T")


def is_rank() -> bool:
    """Whether our launcher started this process as one of several ranks."""
    return RANK_DIR in os.environ


class Ranks:
    """A run of one process: every exchange is with itself. `Processes` is the other kind.

    Attributes:
        rank, world: of all processes. local_rank, local_world: of this machine's.
        restarts: how often the launcher has started all ranks again.
    """

    rank = 0
    world = 1
    local_rank = 0
    local_world = 1
    restarts = 0

    @property
    def leads(self) -> bool:
        """Whether this rank reads and writes the run folder."""
        return self.rank == 0

    def attach(self, control: RunControl) -> None:
        """From now on another rank's failure ends `control`'s run."""

    def check(self) -> None:
        """From the main thread, now and then: is anybody out of reach?"""

    def at(self, place: str) -> None:
        """Say what this rank is doing, for the others' error messages."""

    def describe(self) -> str:
        """What each rank was doing when it was last heard of; "" in a run of one process."""
        return ""

    def tell(self, error: BaseException, worker: str) -> None:
        """Make this rank's first error known to the others."""

    def start_vote(self, wish: Callable[[], bool]) -> Callable[[], bool]:
        """Ask all ranks something; the answer, read later, is whether anybody wishes it."""
        return wish

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a tensor of all ranks, in place, ordered on the current stream."""

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's tensors into those of all others."""

    def gather(self, value: _T) -> list[_T]:
        """All ranks' values in order, on rank 0; an empty list elsewhere."""
        return [value]

    def all_gather(self, value: _T) -> list[_T]:
        """All ranks' values in order."""
        return [value]

    def broadcast(self, value: _T) -> _T:
        """Rank 0's value."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Leave the others in good order, when all of them are done."""


class Processes(Ranks):
    """One of several processes, started by our launcher.

    Args:
        device: of the drafter; NCCL adds up gradients where it is a CUDA device.
        timeout_s: a rank without a sign of life for so long ends the run.
        wait_timeout_s: longest wait in a collective.
    """

    def __init__(self, device: torch.device, *, timeout_s: float, wait_timeout_s: float) -> None:
        env = os.environ
        self.rank, self.world = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.local_rank, self.local_world = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        self.restarts = int(env.get(RESTARTS, 0))
        folder = Path(env[RANK_DIR])
        (folder / f"rank-{self.rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
        timeout = timedelta(seconds=wait_timeout_s)
        self._watch: Watch | None = None
        with self._collective("joining the other ranks"):
            # The launcher of the first machine hosts the store, so that it outlives every rank.
            host, port, prefix = env["MASTER_ADDR"], int(env["MASTER_PORT"]), f"dflash/{self.restarts}"
            store = TCPStore(host, port, is_master=False, timeout=timeout)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{prefix}/groups", store),
                rank=self.rank,
                world_size=self.world,
                timeout=timeout,
            )
            # The watch has a connection of its own: a store call of another thread may block.
            watched = PrefixStore(f"{prefix}/watch", TCPStore(host, port, is_master=False, timeout=timeout))
            watch = Watch(watched, self.rank, self.world, timeout_s=timeout_s, folder=folder)
            self._control_group = dist.group.WORLD
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._gradients = dist.new_group(backend=backend, timeout=timeout)
            dist.barrier()
        self._watch = watch
        watch.start()

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """A failed collective is the other end's failure: name it."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerFailed):
                raise
            if self._watch is None:
                raise PeerFailed(f"{what} failed: {error}") from error
            raise self._watch.explain(what, error) from error

    def _watching(self) -> Watch:
        assert self._watch is not None
        return self._watch

    def attach(self, control: RunControl) -> None:
        self._watching().on_failure(control.fail)

    def check(self) -> None:
        self._watching().check()

    def at(self, place: str) -> None:
        self._watching().at(place)

    def describe(self) -> str:
        return self._watching().describe()

    def tell(self, error: BaseException, worker: str) -> None:
        self._watching().tell(error, worker)

    def start_vote(self, wish: Callable[[], bool]) -> Callable[[], bool]:
        ballot = torch.tensor([wish()], dtype=torch.int32)
        with self._collective("a vote"):
            work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, async_op=True)

        def result() -> bool:
            with self._collective("a vote"):
                work.wait()
            return bool(ballot.item())

        return result

    def all_reduce(self, tensor: Tensor) -> None:
        with self._collective("adding up the gradients of all ranks"):
            dist.all_reduce(tensor, group=self._gradients)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        with self._collective("copying the first rank's parameters"):
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self._gradients)

    def gather(self, value: _T) -> list[_T]:
        values: list[Any] | None = [None] * self.world if self.leads else None
        with self._collective("collecting all ranks' counts"):
            dist.gather_object(value, values, dst=0)
        return values or []

    def all_gather(self, value: _T) -> list[_T]:
        values: list[Any] = [None] * self.world
        with self._collective("comparing all ranks"):
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: _T) -> _T:
        box: list[Any] = [value if self.leads else None]
        with self._collective("hearing from the first rank"):
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def barrier(self) -> None:
        with self._collective("waiting for all ranks"):
            dist.barrier()

    def close(self) -> None:
        self._watching().at("done")
        self.barrier()
        self._watching().stop()
        dist.destroy_process_group()


def join(device: torch.device, *, timeout_s: float, wait_timeout_s: float) -> Ranks:
    """The ranks of this run: `Processes` where the launcher started this one, else a run of one process."""
    if not is_rank():
        return Ranks()
    return Processes(device, timeout_s=timeout_s, wait_timeout_s=wait_timeout_s)
