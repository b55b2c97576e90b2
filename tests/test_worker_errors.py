"""An error in any worker, at any phase of its life, ends the run within seconds, as the first, and leaves no thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph import training
from dflash_graph.checkpoint import CheckpointWriter
from dflash_graph.graphs import StepGraph, WorkerContext
from dflash_graph.metrics import MetricsLogger
from dflash_graph.ring import Ring
from dflash_graph.step import DrafterStep
from dflash_graph.target import Target
from dflash_graph.trainer import Trainer
from dflash_graph.training import train
from dflash_graph.workers import TargetWorker
from tests.tiny import tiny_config


class Planted(Exception):
    """The error of a test; no code of the package raises it."""


def fail_at(owner: Any, method: str, *, call: int = 1, when: Callable[..., bool] = lambda *a, **k: True) -> Any:
    """(owner, method, replacement): the method, which raises at the `call`-th call for which `when` holds."""
    original, lock, seen = getattr(owner, method), threading.Lock(), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            with lock:
                seen[0] += 1
                now = seen[0] == call
            if now:
                failing.raised_at = time.monotonic()  # type: ignore[attr-defined]
                raise Planted(method)
        return original(*args, **kwargs)

    failing.raised_at = None  # type: ignore[attr-defined]
    return owner, method, failing


def _of(name: str) -> Callable[..., bool]:
    return lambda self, *args, **kwargs: self.name == name


def _step_of(name: str) -> Callable[..., bool]:
    return lambda self, *args, **kwargs: self.worker == name


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "target 0 loads": (lambda: fail_at(TargetWorker, "load", when=_of("target-0")), "target-0"),
    "target 1 loads": (lambda: fail_at(TargetWorker, "load", when=_of("target-1")), "target-1"),
    "target checks its attention": (lambda: fail_at(Target, "check_attention"), "target-0"),
    "target warms up": (lambda: fail_at(TargetWorker, "_step", when=_of("target-0")), "target-0"),
    "target captures": (lambda: fail_at(TargetWorker, "_step", call=4, when=_of("target-1")), "target-1"),
    "target's first job": (lambda: fail_at(StepGraph, "__call__", when=_step_of("target-0")), "target-0"),
    "target 1 in the middle": (lambda: fail_at(StepGraph, "__call__", call=4, when=_step_of("target-1")), "target-1"),
    "target publishes": (lambda: fail_at(Ring, "filled", call=7), "target-"),
    "target closes": (lambda: fail_at(TargetWorker, "close", when=_of("target-0")), "target-0"),
    "drafter loads": (lambda: fail_at(Trainer, "load"), "drafter"),
    "drafter warms up": (lambda: fail_at(DrafterStep, "micro_step_body"), "drafter"),
    "drafter captures": (lambda: fail_at(DrafterStep, "apply_body", call=4), "drafter"),
    "drafter's first job": (lambda: fail_at(DrafterStep, "load_slot"), "drafter"),
    "drafter in the middle": (lambda: fail_at(StepGraph, "__call__", call=9, when=_step_of("drafter")), "drafter"),
    "drafter updates": (lambda: fail_at(DrafterStep, "apply", call=3), "drafter"),
    "drafter validates": (lambda: fail_at(TargetWorker, "extract", call=2), "drafter"),
    "drafter logs": (lambda: fail_at(MetricsLogger, "log"), "drafter"),
    "drafter saves": (lambda: fail_at(CheckpointWriter, "save", call=2), "drafter"),
    "drafter closes": (lambda: fail_at(Trainer, "close"), "drafter"),
    "padding, first job": (lambda: fail_at(training, "pad_job"), "padding-"),
    "padding in the middle": (lambda: fail_at(training, "pad_job", call=12), "padding-"),
}


@pytest.mark.parametrize("fault, worker", CASES.values(), ids=CASES)
def test_an_error_ends_the_run_as_the_first_one(
    tiny: Path, tmp_path: Path, fault: Callable[[], Any], worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    owner, method, failing = fault()
    monkeypatch.setattr(owner, method, failing)
    config = tiny_config(tiny, tmp_path / "run", "devices.num_targets=2", "graphs.mode=recorded", "checkpoint.every=1")
    with pytest.raises(Exception, match=method) as error:
        train(config)
    ended = time.monotonic()
    cause = error.value if isinstance(error.value, Planted) else error.value.__cause__
    assert isinstance(cause, Planted), error.value
    assert any(worker in note for note in error.value.__notes__), error.value.__notes__
    assert failing.raised_at is not None
    assert ended - failing.raised_at < 5
    _wait_for_threads(before)


def test_a_second_error_does_not_hide_the_first(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the drafter's error ends the run, tearing down the contexts fails, too."""
    owner, method, failing = fail_at(DrafterStep, "apply", call=2)
    monkeypatch.setattr(owner, method, failing)

    def close(self: WorkerContext) -> None:
        raise RuntimeError("a later error")

    monkeypatch.setattr(WorkerContext, "close", close)
    with pytest.raises(Planted) as error:
        train(tiny_config(tiny, tmp_path / "run", "graphs.mode=recorded"))
    assert any("drafter" in note for note in error.value.__notes__)
    assert any("a later error" in note for note in error.value.__notes__)


def test_the_checkpoint_writers_error_ends_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes in a thread of its own; the drafter learns of it at its next step."""
    before = set(threading.enumerate())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device (planted)")

    monkeypatch.setattr(CheckpointWriter, "_write", full)
    with pytest.raises(RuntimeError, match="planted"):
        train(tiny_config(tiny, tmp_path / "run", "graphs.mode=recorded", "checkpoint.every=1"))
    _wait_for_threads(before)


def _wait_for_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 5
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"threads outlive the run: {left}"


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that were not there before; a progress bar's monitor belongs to tqdm and stays."""
    return [t for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]
