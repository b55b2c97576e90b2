"""How the threads of a run stop: one first error, bounded waits, and no wait that outlives the run.

Every blocking wait of the package goes through `RunControl.wait_for`, so that a failure in any worker wakes all
others, and a wait that lasts too long says who waits for whom. Called by the dispatcher, the ring and the workers.
It must never swallow an error: the first one is kept and raised in the main thread.
"""

import threading
import time
from collections.abc import Callable


class Stopped(Exception):
    """Raised inside a wait when the run is ending; a worker lets it pass and returns."""


class WaitTimeoutError(RuntimeError):
    """A bounded wait ran out. The message names who waited, for what, for how long, and the state it saw."""


class RunControl:
    """Shared by all threads of a run: the stop flag, the first error, and the bounded wait."""

    def __init__(self, *, wait_timeout_s: float = 600.0) -> None:
        if wait_timeout_s <= 0:
            raise ValueError(f"wait_timeout_s must be positive; found {wait_timeout_s}")
        self.wait_timeout_s = wait_timeout_s
        self.error: BaseException | None = None
        self.failed_worker: str | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last_beat = time.monotonic()
        self._conditions: list[threading.Condition] = []

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def beat(self) -> None:
        """Tell that a worker has made progress: a long pass of one worker is no reason for the others to give up."""
        self._last_beat = time.monotonic()

    def condition(self) -> threading.Condition:
        """A new condition that `stop` and `fail` wake."""
        condition = threading.Condition()
        with self._lock:
            self._conditions.append(condition)
        return condition

    def stop(self) -> None:
        """Ask every waiting thread to leave its wait with `Stopped`. Idempotent."""
        self._stop.set()
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def fail(self, worker: str, error: BaseException) -> None:
        """Record `error` as the run's end if it is the first one, then stop every thread."""
        with self._lock:
            if self.error is None:
                self.error, self.failed_worker = error, worker
        self.stop()

    def raise_first_error(self) -> None:
        """Raise the first error of any worker, if there was one (called by the main thread)."""
        if self.error is not None:
            self.error.add_note(f"raised in worker {self.failed_worker!r}")
            raise self.error

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        *,
        who: str,
        what: str,
        describe: Callable[[], str] = lambda: "",
    ) -> float:
        """Wait, holding `condition`, until `predicate()` holds; return the seconds waited.

        Raises:
            Stopped: the run is ending.
            WaitTimeoutError: `wait_timeout_s` passed since the wait began and since the last `beat`; `describe()` is
                appended (for instance all slot states).
        """
        started = time.monotonic()
        while not predicate():
            if self.stopping:
                raise Stopped
            now = time.monotonic()
            idle = now - max(started, self._last_beat)
            if idle >= self.wait_timeout_s:
                raise WaitTimeoutError(
                    f"{who} waited {now - started:.1f} s for {what}, and no worker made progress for longer than the "
                    f"limit of {self.wait_timeout_s:g} s. {describe()}"
                )
            condition.wait(timeout=min(0.5, self.wait_timeout_s - idle))
        return time.monotonic() - started
