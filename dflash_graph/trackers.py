"""Where scalars go beside the run folder: Weights & Biases, trackio and MLflow, through one thin place.

Each takes the same (tag, number) pairs as TensorBoard. A package that is missing, or a service that refuses the start,
is an error before training; what fails later is said once and never stops or slows a run: a thread of its own feeds the
services, through a queue that drops what does not fit. A resumed run goes on in the same place. Called by `metrics.py`
and, for the check, by `training.py`.
"""

import contextlib
import importlib.util
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dflash_graph.config import LogConfig

_IDS_FILE = "trackers.json"  # in the run folder: tracker -> the run's id there
_QUEUE = 1000  # records
_CLOSE_S = 30.0  # for what is still queued at the end

Scalars = Mapping[str, float]


class Tracker(Protocol):
    """One service, for one run. Used by one thread after it is made."""

    def log(self, scalars: Scalars, step: int) -> None:
        """Send numbers by tag."""

    def close(self) -> None:
        """Finish the run there."""


def check_installed(log: LogConfig) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        ValueError: it is; the message says how to install it.
    """
    missing = [name for name in log.trackers if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"log.trackers needs the packages {', '.join(missing)}, which are not installed: pip install "
            f"'dflash-graph[{','.join(missing)}]', or leave them out (TensorBoard needs nothing)"
        )


# ---- the services ---------------------------------------------------------------------------------------------------


class _Wandb:
    def __init__(self, project: str, name: str, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )
        self.id = str(self.run.id)
        # The service wants rising steps of its own; a resumed run starts again from its checkpoint's.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, scalars: Scalars, step: int) -> None:
        self.run.log({"step": step, **scalars})

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, project: str, name: str, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self.id = run_id or name
        self.run: Any = trackio.init(project=project, name=self.id, resume="allow", config=dict(config))

    def log(self, scalars: Scalars, step: int) -> None:
        self.run.log(dict(scalars), step=step)

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    def __init__(self, project: str, name: str, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._metric = mlflow.entities.Metric
        self.client: Any = mlflow.MlflowClient()
        if run_id is None:
            experiment = self.client.get_experiment_by_name(project)
            number = experiment.experiment_id if experiment else self.client.create_experiment(project)
            run_id = self.client.create_run(number, run_name=name).info.run_id
            for key, value in _flat(config):
                self.client.log_param(run_id, key, str(value)[:500])
        else:
            self.client.update_run(run_id, status="RUNNING")
        self.id = str(run_id)

    def log(self, scalars: Scalars, step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(tag, value, now, step) for tag, value in scalars.items()]
        for start in range(0, len(metrics), 1000):  # of one request
            self.client.log_batch(self.id, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self.client.set_terminated(self.id)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return pairs


_KINDS: dict[str, Callable[..., Any]] = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _MLflow}


# ---- all of them ----------------------------------------------------------------------------------------------------


class Trackers:
    """The services of a run and the thread that feeds them.

    Args:
        folder: the run folder; it keeps the run's ids there.
        config: the run's settings, nested and plain.

    Raises:
        ValueError: a service refuses the start.
    """

    def __init__(self, log: LogConfig, folder: Path, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Tracker] = {}
        self._lost = 0
        name = log.run_name or folder.resolve().name
        path = folder / _IDS_FILE
        ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for kind in log.trackers:
            try:
                tracker = _KINDS[kind](log.project, name, ids.get(kind), folder, config)
            except Exception as error:  # each has its own kinds
                self._finish()
                raise ValueError(
                    f"log.trackers: {kind} cannot start: {type(error).__name__}: {error}. Log in to it, set it to "
                    "work offline, or leave it out"
                ) from error
            self._open[kind] = tracker
            ids[kind] = tracker.id
        if self._open:
            path.write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        if self._open:
            self._thread.start()

    def log(self, scalars: Scalars, step: int) -> None:
        """Hand over numbers by tag; never waits."""
        if not self._open:
            return
        try:
            self._queue.put_nowait((dict(scalars), step))
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                self._warn(f"{', '.join(self._open)} cannot keep up: records are left out there, not in metrics.jsonl")

    def close(self) -> None:
        """Send what is queued and finish the runs, within a time limit. Idempotent."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"{', '.join(self._open)} did not take the last records within {_CLOSE_S:g} s; going on")

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            for kind in [*self._open]:
                self._try(kind, lambda tracker, record=record: tracker.log(*record))  # type: ignore[misc]
        self._finish()

    def _finish(self) -> None:
        for kind in [*self._open]:
            self._try(kind, lambda tracker: tracker.close())

    def _try(self, kind: str, call: Callable[[Tracker], None]) -> None:
        try:
            call(self._open[kind])
        except Exception as error:  # a tracker never stops a run
            del self._open[kind]
            self._warn(f"{kind} failed and gets nothing more of this run: {type(error).__name__}: {error}")

    @staticmethod
    def _warn(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(f"trackers  {text}", file=sys.stderr, flush=True)
