"""The ordered dispatcher: emission order, window, lazy sources, and the end of every wait."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_graph.control import RunControl, Stopped, WaitTimeoutError
from dflash_graph.dispatch import Dispatcher


class Job:
    """What a fake `pad` returns."""

    def __init__(self, schedule: Any, index: int) -> None:
        self.schedule, self.index = schedule, index


def make_dispatcher(
    control: RunControl, jobs: Any, pad: Any = Job, *, num_workers: int = 3, window: int = 5
) -> Dispatcher:
    return Dispatcher(control, jobs, pad, num_workers=num_workers, window=window)


def take_all(dispatcher: Dispatcher) -> list[tuple[Any, int]]:
    taken = []
    while (job := dispatcher.take("target-0")) is not None:
        taken.append((job.schedule, job.index))  # type: ignore[attr-defined]
    return taken


def until(predicate: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.002)


def test_workers_that_finish_out_of_order_emit_in_order() -> None:
    finished = []
    rng = random.Random(0)

    def pad(schedule: str, index: int) -> Job:
        time.sleep(rng.random() * 0.004)
        finished.append(index)
        return Job(schedule, index)

    dispatcher = make_dispatcher(RunControl(), [("epoch", i) for i in range(150)], pad, num_workers=6, window=12)
    assert take_all(dispatcher) == [("epoch", i) for i in range(150)]
    dispatcher.close()
    assert sorted(finished) == list(range(150))
    assert finished != sorted(finished)  # the test did exercise the reordering


def test_a_slow_first_job_holds_back_all_later_ones() -> None:
    release = threading.Event()

    def pad(schedule: str, index: int) -> Job:
        if index == 0:
            assert release.wait(5)
        return Job(schedule, index)

    dispatcher = make_dispatcher(RunControl(), [("e", i) for i in range(20)], pad, window=6)
    until(lambda: dispatcher.depths() == {"padding": 1, "padded": 5})
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.extend(take_all(dispatcher)), daemon=True)
    taker.start()
    time.sleep(0.05)
    assert taken == []
    assert dispatcher.depths() == {"padding": 1, "padded": 5}
    release.set()
    taker.join(5)
    assert [index for _, index in taken] == list(range(20))
    assert dispatcher.wait_seconds()["target-0", "job"] >= 0.04
    dispatcher.close()


@pytest.mark.parametrize("num_workers, window", [(1, 1), (4, 1), (4, 3), (2, 8)])
def test_window_bounds_jobs_padded_or_waiting(num_workers: int, window: int) -> None:
    lock = threading.Lock()
    issued = emitted = highest = 0

    def source() -> Iterator[tuple[str, int]]:
        nonlocal issued, highest
        for i in range(60):
            with lock:
                issued += 1
                highest = max(highest, issued - emitted)
            yield "e", i

    dispatcher = make_dispatcher(RunControl(), source(), num_workers=num_workers, window=window)
    until(lambda: dispatcher.depths()["padded"] == window)
    time.sleep(0.02)
    assert dispatcher.depths() == {"padding": 0, "padded": window}
    for i in range(60):
        with lock:
            emitted += 1  # before the take, since the source may be read before take returns
        job = dispatcher.take("t")
        assert job is not None
        assert job.index == i
    assert highest == window
    assert dispatcher.take("t") is None
    assert sum(s for (who, cause), s in dispatcher.wait_seconds().items() if cause == "window") > 0.01
    dispatcher.close()


def test_several_takers_share_one_queue() -> None:
    dispatcher = make_dispatcher(RunControl(), [("e", i) for i in range(200)], window=8)
    taken: dict[str, list[int]] = {}

    def work(who: str) -> None:
        taken[who] = []
        while (job := dispatcher.take(who)) is not None:
            taken[who].append(job.index)

    threads = [threading.Thread(target=work, args=(f"target-{i}",), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert sorted(i for mine in taken.values() for i in mine) == list(range(200))
    assert all(mine == sorted(mine) for mine in taken.values())
    dispatcher.close()


def test_a_lazy_source_over_epochs_is_read_by_one_thread_as_needed() -> None:
    readers = most_readers = 0
    built = []

    def source() -> Iterator[tuple[str, int]]:
        nonlocal readers, most_readers
        for epoch in range(3):
            readers += 1
            most_readers = max(most_readers, readers)
            time.sleep(0.01)  # building the epoch
            readers -= 1
            built.append(epoch)
            for i in range(10):
                yield f"epoch {epoch}", i

    dispatcher = make_dispatcher(RunControl(), source(), num_workers=4, window=4)
    until(lambda: dispatcher.depths()["padded"] == 4)
    assert built == [0]
    assert take_all(dispatcher) == [(f"epoch {e}", i) for e in range(3) for i in range(10)]
    assert most_readers == 1
    assert dispatcher.take("t") is None
    dispatcher.close()


def test_padded_jobs_do_not_wait_for_a_source_that_builds_an_epoch() -> None:
    building, done = threading.Event(), threading.Event()

    def source() -> Iterator[tuple[str, int]]:
        yield "e", 0
        building.set()
        assert done.wait(5)
        yield "e", 1

    dispatcher = make_dispatcher(RunControl(), source())
    assert building.wait(5)
    started = time.monotonic()
    first = dispatcher.take("t")
    assert first is not None
    assert time.monotonic() - started < 1
    done.set()
    assert take_all(dispatcher) == [("e", 1)]
    dispatcher.close()


def test_an_empty_source_is_exhausted_at_once() -> None:
    dispatcher = make_dispatcher(RunControl(), [])
    assert dispatcher.take("t") is None
    assert dispatcher.take("t") is None
    dispatcher.close()


def test_waiters_are_woken_at_once() -> None:
    # A wait that nobody wakes looks again after 0.5 s, so ten of them would take 5 s.
    def source(job: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        time.sleep(0.02)
        yield from job

    def pad(schedule: str, index: int) -> Job:
        time.sleep(0.02)
        return Job(schedule, index)

    started = time.monotonic()
    for i in range(10):
        dispatcher = make_dispatcher(RunControl(), source([("e", 0)] * (i % 2)), pad, num_workers=1, window=1)
        if i % 2:
            assert dispatcher.take("t") is not None
        assert dispatcher.take("t") is None
        dispatcher.close()
    assert time.monotonic() - started < 2


def takers_that_wait(dispatcher: Dispatcher, count: int = 3) -> tuple[list[threading.Thread], list[Any]]:
    ends: list[Any] = []

    def work(who: str) -> None:
        try:
            while dispatcher.take(who) is not None:
                pass
            ends.append(None)
        except Exception as error:
            ends.append(type(error))

    threads = [threading.Thread(target=work, args=(f"target-{i}",), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, ends


def assert_all_end_with(ends: list[Any], threads: list[threading.Thread], dispatcher: Dispatcher, kind: Any) -> None:
    started = time.monotonic()
    for thread in [*threads, *dispatcher._threads]:
        thread.join(1)
        assert not thread.is_alive()
    assert time.monotonic() - started < 1
    assert ends == [kind] * len(threads)


def test_a_worker_exception_ends_everyone() -> None:
    control = RunControl()

    def pad(schedule: str, index: int) -> Job:
        time.sleep(0.02)
        if index == 7:
            raise OSError("disk gone")
        return Job(schedule, index)

    dispatcher = make_dispatcher(control, [("e", i) for i in range(1000)], pad)
    threads, ends = takers_that_wait(dispatcher)
    until(lambda: control.error is not None)
    assert_all_end_with(ends, threads, dispatcher, Stopped)
    assert control.failed_worker is not None
    assert control.failed_worker.startswith("padding-")
    with pytest.raises(OSError, match="disk gone"):
        control.raise_first_error()
    dispatcher.close()


def test_an_exception_of_the_source_is_not_taken_for_its_end() -> None:
    for _ in range(20):
        control = RunControl()

        def source() -> Iterator[tuple[str, int]]:
            yield "e", 0
            raise RuntimeError("cannot build epoch 1")

        dispatcher = make_dispatcher(control, source(), num_workers=4)
        threads, ends = takers_that_wait(dispatcher)
        until(lambda control=control: control.error is not None)
        assert_all_end_with(ends, threads, dispatcher, Stopped)
        assert str(control.error) == "cannot build epoch 1"
        dispatcher.close()


def test_stop_releases_takers_and_padders() -> None:
    control = RunControl()
    hold = threading.Event()

    def pad(schedule: str, index: int) -> Job:
        hold.wait(0.2 if index == 0 else 0)
        return Job(schedule, index)

    dispatcher = make_dispatcher(control, [("e", i) for i in range(1000)], pad)
    threads, ends = takers_that_wait(dispatcher)
    time.sleep(0.05)
    control.stop()
    assert_all_end_with(ends, threads, dispatcher, Stopped)
    assert control.error is None
    with pytest.raises(Stopped):
        dispatcher.take("t")
    dispatcher.close()


def test_close_joins_padders_and_releases_takers() -> None:
    control = RunControl()
    gate = threading.Event()
    dispatcher = make_dispatcher(control, [("e", 0)] * 100, lambda s, i: (gate.wait(0.2), Job(s, i))[1])
    threads, ends = takers_that_wait(dispatcher)
    time.sleep(0.02)
    dispatcher.close()
    assert not any(thread.is_alive() for thread in dispatcher._threads)
    assert_all_end_with(ends, threads, dispatcher, Stopped)
    assert not control.stopping
    dispatcher.close()


def test_close_releases_padders_that_wait_for_the_window() -> None:
    dispatcher = make_dispatcher(RunControl(wait_timeout_s=5), [("e", 0)] * 100)
    until(lambda: dispatcher.depths() == {"padding": 0, "padded": 5})
    started = time.monotonic()
    dispatcher.close()
    assert time.monotonic() - started < 0.4  # woken, not at its next look


def test_close_names_a_padder_that_does_not_return() -> None:
    release = threading.Event()
    control = RunControl(wait_timeout_s=0.1)
    dispatcher = make_dispatcher(control, [("e", 0)], lambda s, i: (release.wait(5), Job(s, i))[1], num_workers=1)
    with pytest.raises(WaitTimeoutError, match=r"padding-0 is still padding\. dispatcher: 1 jobs issued, 0 taken"):
        dispatcher.close()
    release.set()
    dispatcher._threads[0].join(1)


def test_a_wait_that_is_too_long_says_for_what() -> None:
    release = threading.Event()
    control = RunControl(wait_timeout_s=0.1)
    dispatcher = make_dispatcher(control, [("e", 0)], lambda s, i: (release.wait(5), Job(s, i))[1], num_workers=1)
    message = (
        r"target-3 waited .* for the next padded job, .* 1 jobs issued, 0 taken, 1 being padded, 0 waiting, window 5"
    )
    with pytest.raises(WaitTimeoutError, match=message):
        dispatcher.take("target-3")
    release.set()
    dispatcher.close()


@pytest.mark.parametrize("num_workers, window", [(0, 1), (1, 0)])
def test_dispatcher_refuses(num_workers: int, window: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1; found {num_workers} and {window}"):
        make_dispatcher(RunControl(), [], num_workers=num_workers, window=window)
