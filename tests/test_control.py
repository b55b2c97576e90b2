"""Run control: bounded waits, one first error, and no wait that outlives the run."""

import threading
import time

import pytest

from dflash_graph.control import RunControl, Stopped, WaitTimeoutError


def test_wait_returns_when_the_predicate_holds() -> None:
    control = RunControl()
    condition = control.condition()
    ready: list[int] = []

    def later() -> None:
        time.sleep(0.05)
        with condition:
            ready.append(1)
            condition.notify_all()

    threading.Thread(target=later).start()
    with condition:
        waited = control.wait_for(condition, lambda: bool(ready), who="a", what="b")
    assert 0.04 <= waited < 0.45  # by the notification, not by the half-second poll


def test_time_out_says_who_waits_for_what_and_what_it_saw() -> None:
    control = RunControl(wait_timeout_s=0.05)
    condition = control.condition()
    with (
        condition,
        pytest.raises(WaitTimeoutError, match=r"target-0 waited 0.* s for a slot.*limit of 0.05 s.*all READY"),
    ):
        control.wait_for(condition, lambda: False, who="target-0", what="a slot", describe=lambda: "slots: all READY")


def test_the_first_error_is_kept_and_ends_every_wait() -> None:
    control = RunControl()
    condition, ended = control.condition(), []

    def waiter() -> None:
        with condition:
            try:
                control.wait_for(condition, lambda: False, who="w", what="x")
            except Stopped:
                ended.append(1)

    threads = [threading.Thread(target=waiter) for _ in range(4)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    control.fail("target-1", KeyError("first"))
    control.fail("drafter", ValueError("second"))
    for thread in threads:
        thread.join(2)
    assert len(ended) == 4
    assert time.monotonic() - started < 1
    with pytest.raises(KeyError, match="first") as caught:
        control.raise_first_error()
    assert caught.value.__notes__ == ["raised in worker 'target-1'"]


def test_no_error_means_nothing_is_raised() -> None:
    control = RunControl()
    control.stop()
    control.raise_first_error()
    assert control.stopping


def test_time_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="wait_timeout_s must be positive"):
        RunControl(wait_timeout_s=0)


def test_a_wait_goes_on_while_some_worker_makes_progress() -> None:
    control = RunControl(wait_timeout_s=0.2)
    condition = control.condition()
    ended = threading.Event()

    def busy() -> None:
        for _ in range(8):
            time.sleep(0.05)
            control.beat()
        ended.set()

    thread = threading.Thread(target=busy)
    thread.start()
    with condition:
        waited = control.wait_for(condition, ended.is_set, who="padding-0", what="room")
    thread.join()
    assert waited > 0.3
