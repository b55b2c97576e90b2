"""Pads jobs in parallel and emits them in schedule order, through a bounded reorder window.

Owns the padding threads and the one queue that all targets share. Emission order is the order of the job source, no
matter which thread finishes first; a job is never lost, repeated or overtaken. Made by `training.py`; targets take jobs
through the ring. Every wait goes through the run's control, so a failure anywhere ends all of them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from dflash_graph.control import RunControl, Stopped, WaitTimeoutError
from dflash_graph.padding import JobShape, PaddedJob, draw_anchors, find_candidates, pad_job
from dflash_graph.schedule import EpochSchedule

__all__ = ["Dispatcher", "JobShape", "PaddedJob", "draw_anchors", "find_candidates", "pad_job"]


class Dispatcher:
    """Padding threads over a source of jobs; `take` gives the jobs out in the source's order.

    Args:
        control: its `fail` receives the first exception of a padding thread or of the source.
        jobs: (schedule, job index) pairs; may be lazy and span epochs. Read by one thread at a time, when needed.
        pad: makes the padded job; runs in the padding threads, several at a time.
        num_workers: P, padding threads.
        window: at most so many jobs are being padded or wait to be taken.
    """

    def __init__(
        self,
        control: RunControl,
        jobs: Iterable[tuple[EpochSchedule, int]],
        pad: Callable[[EpochSchedule, int], PaddedJob],
        *,
        num_workers: int,
        window: int,
    ) -> None:
        if num_workers < 1 or window < 1:
            raise ValueError(f"num_workers and window must be at least 1; found {num_workers} and {window}")
        self._control = control
        self._jobs = iter(jobs)
        self._pad = pad
        self._window = window
        self._changed = control.condition()
        self._padded: dict[int, PaddedJob] = {}  # by number in the source's order
        self._num_issued = 0  # to a padding thread
        self._num_emitted = 0  # to a taker
        self._reading = False  # a padding thread reads the source
        self._exhausted = False
        self._closed = False
        self._wait_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        names = [f"padding-{i}" for i in range(num_workers)]
        self._threads = [threading.Thread(target=self._work, args=(name,), name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def take(self, who: str) -> PaddedJob | None:
        """The next job in order; None, from then on always, when the source is exhausted.

        Raises:
            Stopped: the run is ending, or the dispatcher is closed.
            WaitTimeoutError: see `RunControl.wait_for`.
        """
        with self._changed:
            self._wait(lambda: self._num_emitted in self._padded or self._finished, who, "job", "the next padded job")
            if self._finished:
                return None
            job = self._padded.pop(self._num_emitted)
            self._num_emitted += 1
            self._changed.notify_all()
            return job

    def close(self) -> None:
        """Release all waiting threads and join the padding threads. Jobs not taken are dropped. Idempotent.

        Raises:
            WaitTimeoutError: a padding thread is still busy with its job after the control's time limit.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._control.wait_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitTimeoutError(f"{thread.name} is still padding. {self.describe()}")

    @property
    def _num_in_window(self) -> int:
        return self._num_issued - self._num_emitted

    @property
    def _finished(self) -> bool:
        return self._exhausted and self._num_in_window == 0

    def _work(self, who: str) -> None:
        try:
            while (issued := self._next_job(who)) is not None:
                number, schedule, job = issued
                padded = self._pad(schedule, job)
                with self._changed:
                    self._padded[number] = padded
                    self._changed.notify_all()
        except Stopped:
            pass
        except BaseException as error:
            self._control.fail(who, error)

    def _next_job(self, who: str) -> tuple[int, EpochSchedule, int] | None:
        """The next job of the source, once the window has room for it; None when the source is exhausted."""
        with self._changed:
            self._wait(
                lambda: self._exhausted or (not self._reading and self._num_in_window < self._window),
                who,
                "window",
                f"room in the reorder window of {self._window} jobs",
            )
            if self._exhausted:
                return None
            self._reading = True
        # Outside the lock, since a lazy source may build a whole epoch here. If it raises, `_reading` stays set: nobody
        # reads on, and takes the error for the source's end, before the run stops.
        issued = next(self._jobs, None)
        with self._changed:
            self._reading = False
            self._exhausted = issued is None
            self._num_issued += not self._exhausted
            self._changed.notify_all()
            return None if issued is None else (self._num_issued - 1, *issued)

    def _wait(self, predicate: Callable[[], bool], who: str, cause: str, what: str) -> None:
        """Wait for `predicate`, holding the condition; `Stopped` when closed or stopping, even if it holds."""
        waited = self._control.wait_for(
            self._changed, lambda: self._closed or predicate(), who=who, what=what, describe=self.describe
        )
        self._wait_seconds[who, cause] += waited
        if self._closed or self._control.stopping:
            raise Stopped

    def depths(self) -> dict[str, int]:
        """Jobs being padded ("padding") and jobs that wait to be taken ("padded")."""
        with self._changed:
            waiting = len(self._padded)
            return {"padding": self._num_in_window - waiting, "padded": waiting}

    def wait_seconds(self) -> dict[tuple[str, str], float]:
        """Seconds waited so far per (thread, cause): takers wait for a "job", padding threads for the "window"."""
        with self._changed:
            return dict(self._wait_seconds)

    def describe(self) -> str:
        """The dispatcher's state in one line; part of every time-out."""
        depths = self.depths()
        return (
            f"dispatcher: {self._num_issued} jobs issued, {self._num_emitted} taken, {depths['padding']} being padded, "
            f"{depths['padded']} waiting, window {self._window}" + (", source exhausted" if self._exhausted else "")
        )
