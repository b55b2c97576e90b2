"""Keeps the ranks of a run from waiting for each other for ever: signs of life, and the first error of any of them.

Every rank has a thread with a connection of its own to the rendezvous store. It writes a sign of life twice a second,
reads those of the others, and ends its own rank when another one has failed, has fallen silent, or when the store or
the launcher is gone. The first error wins, so every rank tells the same. It must work while all other threads of the
process are stuck. Used by `ranks.py`.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANK_DIR = "DFLASH_RANK_DIR"  # set by our launcher: this process is one of several ranks
LAYOUT = "DFLASH_LAYOUT"  # set by our launcher: the ranks of this machine and their devices
RESTARTS = "DFLASH_RESTARTS"  # set by our launcher: how often it has started all ranks again
LAUNCHER = "DFLASH_LAUNCHER"  # set by our launcher: its process id
PERIOD_S = 0.5
_SILENT_S = 4 * PERIOD_S  # from here on a rank that is silent is worth naming
_GRACE_S = 15.0  # for the main thread to end in good order; then the process ends itself
_NOTHING = "-"
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

EXIT_PEER = 3  # a rank that ended because another one failed


def end_with_launcher() -> None:
    """From now on this rank ends when its launcher does, whatever its threads are stuck in; call it first of all.

    On Linux the kernel sees to it, even where the rank is stopped; elsewhere a thread does.
    """
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(PERIOD_S)
        print(f"rank {os.environ.get('RANK', '?')}: the launcher is gone; ending", file=sys.stderr, flush=True)
        os._exit(EXIT_PEER)

    threading.Thread(target=look, name="launcher-watch", daemon=True).start()


class PeerFailed(RuntimeError):
    """Another rank ended the run. `rank` is that one, or None where it is not known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The first error of a run, as all ranks tell it.

    Attributes:
        rank: which failed, or fell silent.
        worker: thread of that rank, "" if not known.
    """

    rank: int
    host: str
    worker: str
    error: str
    time: float

    def __str__(self) -> str:
        worker = f", {self.worker}" if self.worker else ""
        return f"rank {self.rank} ({self.host}{worker}): {self.error}"


class Watch:
    """The watching thread of one rank.

    Args:
        store: a `torch.distributed.Store` that no other thread uses.
        timeout_s: a rank without a sign of life for so long has failed.
        folder: of the launcher, which finds errors there; None without one.
    """

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float, folder: Path | None = None) -> None:
        self._store, self.rank, self.world, self._timeout_s, self._folder = store, rank, world, timeout_s, folder
        self._lock = threading.Lock()
        self._place = "starting"
        self._seen: dict[int, tuple[str, float]] = {}  # rank -> (last sign of life, when it was new here)
        self._reached = time.monotonic()  # the store answered
        self._on_failure: Callable[[str, BaseException], None] | None = None
        self.failure: PeerFailed | None = None
        self._failed_at = 0.0
        self._told = False
        self._stop = threading.Event()
        store.compare_set("error", "", _NOTHING)
        store.set(self._key(rank), "0 starting")
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def _key(self, rank: int) -> str:
        return f"alive/{rank}"

    def start(self) -> None:
        """Begin to watch; every rank must have made its `Watch` before."""
        self._thread.start()

    def on_failure(self, call: Callable[[str, BaseException], None]) -> None:
        """Have `call(worker, error)` called from the watching thread when another rank fails, or at once if one has."""
        with self._lock:
            self._on_failure, failure = call, self.failure
        if failure is not None:
            call("rank-watch", failure)

    def at(self, place: str) -> None:
        """Say what this rank is doing; the others tell it when they wait in vain."""
        self._place = place

    def tell(self, error: BaseException, worker: str) -> None:
        """Make this rank's error known, unless another one was first or it is only the echo of another one's."""
        if self._told:
            return
        self._told = True
        own, notes = not isinstance(error, PeerFailed), getattr(error, "__notes__", [])
        record = RankError(
            rank=self.rank,
            host=socket.gethostname(),
            worker=worker,
            error="; ".join([f"{type(error).__name__}: {error}" if own else str(error), *notes]),
            time=time.time(),
        )
        if self._folder is not None:
            values = asdict(record) | {
                "own": own,
                "caused_by": None if own else getattr(error, "rank", None),
                "bad_input": isinstance(error, ValueError),
            }
            (self._folder / f"error-{self.rank}.json").write_text(json.dumps(values), encoding="utf-8")
        if own and not self._stop.is_set():
            # In a thread: the store may be out of reach, and this rank must end all the same.
            thread = threading.Thread(target=self._publish, args=(record,), daemon=True)
            thread.start()
            thread.join(4 * PERIOD_S)
            time.sleep(2 * PERIOD_S)  # the store may end with this rank: everyone shall have read it

    def _publish(self, record: RankError) -> None:
        try:
            self._store.clone().compare_set("error", _NOTHING, json.dumps(asdict(record)))
        except Exception as error:  # the store's host is gone: the others notice that themselves
            print(f"rank {self.rank} could not tell the others of its error: {error}", file=sys.stderr, flush=True)

    def explain(self, what: str, error: BaseException) -> PeerFailed:
        """Turn a failed collective into the reason for it: waits a little for another rank's error or its silence."""
        deadline = time.monotonic() + 2 * _SILENT_S
        while time.monotonic() < deadline:
            if self.failure is not None:
                return self.failure
            if silent := self._silent(_SILENT_S):
                return PeerFailed(f"{what} failed ({_line(error)}); {self.describe()}", rank=silent[0])
            time.sleep(0.1)
        return PeerFailed(f"{what} failed: {_line(error)}. {self.describe()}")

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [r for r, (_, at) in sorted(self._seen.items()) if r != self.rank and now - at > seconds]

    def describe(self) -> str:
        """What each rank was doing when it was last heard of."""
        now = time.monotonic()
        lines = []
        for rank, (sign, at) in sorted(self._seen.items()):
            if rank == self.rank:
                lines.append(f"rank {rank}: {self._place}")
                continue
            quiet = f", silent for {now - at:.0f} s" if now - at > _SILENT_S else ""
            lines.append(f"rank {rank}: {sign.split(' ', 1)[-1]}{quiet}")
        return "; ".join(lines)

    def stop(self) -> None:
        """End watching, in good order: the other ranks no longer count on this one. Idempotent."""
        self._stop.set()

    # ---- in the watching thread ----

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(PERIOD_S):
            number += 1
            try:
                self._look(number)
                self._reached = time.monotonic()
            except Exception as error:
                if time.monotonic() - self._reached > self._timeout_s or "Connection" in str(error):
                    self._fail(PeerFailed(f"the rendezvous store cannot be reached: {_line(error)}. {self.describe()}"))
            self._end_if_stuck()

    def _look(self, number: int) -> None:
        self._store.set(self._key(self.rank), f"{number} {self._place}")
        answers = self._store.multi_get(["error", *(self._key(r) for r in range(self.world))])
        first, signs = answers[0].decode(), [answer.decode() for answer in answers[1:]]
        now = time.monotonic()
        for rank, sign in enumerate(signs):
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = (sign, now)
            elif sign.endswith(" done"):
                self._seen[rank] = (sign, now)  # ended in good order: never silent
        if first != _NOTHING:
            record = RankError(**json.loads(first))
            if record.rank != self.rank:
                self._fail(PeerFailed(f"another rank failed first: {record}", rank=record.rank))
        elif silent := self._silent(self._timeout_s):
            text = f"no sign of life for {self._timeout_s:g} s. {self.describe()}"
            record = RankError(rank=silent[0], host="?", worker="", error=text, time=time.time())
            self._store.compare_set("error", _NOTHING, json.dumps(asdict(record)))
            self._fail(PeerFailed(f"another rank failed first: {record}", rank=silent[0]))

    def blind_for(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self._reached

    def check(self) -> None:
        """From the main thread: notice that the watching thread itself is stuck in a store that does not answer."""
        if self._thread.is_alive() and self.blind_for() > self._timeout_s + 4 * PERIOD_S:
            self._fail(
                PeerFailed(
                    f"the rendezvous store has not answered for {self.blind_for():.0f} s (limit "
                    f"{self._timeout_s:g} s): its host or the network is gone. {self.describe()}"
                )
            )

    def _fail(self, failure: PeerFailed) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._failed_at, call = failure, time.monotonic(), self._on_failure
        if call is not None:
            call("rank-watch", failure)

    def _end_if_stuck(self) -> None:
        """The last resort: the other threads had their time and sit in a collective that cannot be interrupted."""
        if self.failure is not None and time.monotonic() - self._failed_at > _GRACE_S:
            print(f"rank {self.rank} ends: {self.failure}", file=sys.stderr, flush=True)
            self.tell(self.failure, "rank-watch")
            os._exit(EXIT_PEER)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
