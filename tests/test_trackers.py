"""Trackers: what each service is told, that a run resumes there, and that none of them can stop or slow a run.

Services are played by modules that record their calls; with the real packages importable the same runs go through them.
"""

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_graph import trackers as trackers_module
from dflash_graph.config import LogConfig
from dflash_graph.metrics import MetricsLogger, read_records
from dflash_graph.trackers import Trackers, check_installed
from dflash_graph.training import train
from tests.tiny import tiny_config

ALL = ("wandb", "trackio", "mlflow")


class Service:
    """What the three packages have in common, recorded."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fail_at: int | None = None
        self.hold = threading.Event()
        self.hold.set()

    def take(self, step: int, scalars: dict[str, float]) -> None:
        self.hold.wait(20)
        if self.fail_at is not None and len(self.logged) >= self.fail_at:
            raise ConnectionError("no network")
        self.logged.append((step, scalars))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Service]]:
    """Stand-ins for the three packages, importable by their names."""
    found = {name: Service() for name in ALL}

    def wandb_init(**options: Any) -> Any:
        found["wandb"].inits.append(options)
        return SimpleNamespace(
            id=options["id"] or "made-by-wandb",
            define_metric=lambda *a, **k: None,
            log=lambda values: found["wandb"].take(values["step"], {k: v for k, v in values.items() if k != "step"}),
            finish=found["wandb"].close,
        )

    def trackio_init(**options: Any) -> Any:
        found["trackio"].inits.append(options)
        return SimpleNamespace(
            log=lambda values, step: found["trackio"].take(step, values), finish=found["trackio"].close
        )

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str) -> str:
            return f"experiment {name}"

        def create_run(self, experiment: str, run_name: str) -> Any:
            found["mlflow"].inits.append({"project": experiment, "name": run_name, "config": {}})
            return SimpleNamespace(info=SimpleNamespace(run_id="made-by-mlflow"))

        def update_run(self, run_id: str, status: str) -> None:
            found["mlflow"].inits.append({"id": run_id, "status": status})

        def log_param(self, run_id: str, key: str, value: str) -> None:
            found["mlflow"].inits[-1]["config"][key] = value

        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            assert len(metrics) <= 1000
            found["mlflow"].take(metrics[0].step, {m.key: m.value for m in metrics})

        def set_terminated(self, run_id: str) -> None:
            found["mlflow"].close()

    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    modules = {
        "wandb": {"init": wandb_init},
        "trackio": {"init": trackio_init},
        "mlflow": {"MlflowClient": Client, "entities": SimpleNamespace(Metric=metric)},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members, __spec__=importlib.util.spec_from_loader(name, loader=None))
        monkeypatch.setitem(sys.modules, name, module)
    yield found
    for service in found.values():
        service.hold.set()


def test_a_run_tells_every_service_what_its_file_says(services: dict[str, Service], tiny: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "run", "epochs=1", "log.trackers=[wandb, trackio, mlflow]", "log.project=mine"))
    records = read_records(tmp_path / "run")
    for name, service in services.items():
        assert service.closed == 1, name
        assert [step for step, _ in service.logged] == [record["step"] for record in records], name
        losses = [values["train/loss"] for _, values in service.logged if "train/loss" in values]
        assert losses == [record["loss"] for record in records if record["kind"] == "train"], name
        assert service.logged[1:]
        assert all(isinstance(v, float) for _, values in service.logged for v in values.values())
    wandb, trackio, mlflow = (services[name].inits[0] for name in ALL)
    assert (wandb["project"], wandb["name"], wandb["id"], wandb["resume"]) == ("mine", "run", None, "allow")
    assert wandb["config"]["optim"]["lr"] == 3e-3
    assert (trackio["project"], trackio["name"], trackio["resume"]) == ("mine", "run", "allow")
    assert (mlflow["project"], mlflow["name"]) == ("experiment mine", "run")
    assert mlflow["config"]["optim.lr"] == "0.003"


def test_a_resumed_run_goes_on_in_the_same_place(services: dict[str, Service], tmp_path: Path) -> None:
    log = LogConfig(trackers=ALL, run_name="first")
    for _ in range(2):
        Trackers(log, tmp_path, {}).close()
    assert [options["id"] for options in services["wandb"].inits] == [None, "made-by-wandb"]
    assert [options["name"] for options in services["trackio"].inits] == ["first", "first"]
    assert services["mlflow"].inits[1] == {"id": "made-by-mlflow", "status": "RUNNING"}


def test_a_service_that_fails_is_told_once_and_the_others_go_on(
    services: dict[str, Service], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    services["wandb"].fail_at = 2
    trackers = Trackers(LogConfig(trackers=ALL), tmp_path, {})
    for step in range(5):
        trackers.log({"train/loss": 1.0}, step)
    trackers.close()
    assert capfd.readouterr().err.count("wandb failed and gets nothing more of this run: ConnectionError") == 1
    assert [len(services[name].logged) for name in ALL] == [2, 5, 5]
    assert [services[name].closed for name in ALL] == [0, 1, 1]


def test_a_slow_service_holds_nobody_up(
    services: dict[str, Service], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers_module, "_QUEUE", 3)
    monkeypatch.setattr(trackers_module, "_CLOSE_S", 0.2)
    services["wandb"].hold.clear()
    trackers = Trackers(LogConfig(trackers=("wandb",)), tmp_path, {})
    started = time.monotonic()
    for step in range(50):
        trackers.log({"train/loss": 1.0}, step)
    trackers.close()
    assert time.monotonic() - started < 2
    text = capfd.readouterr().err
    assert text.count("wandb cannot keep up") == 1
    assert "did not take the last records within 0.2 s" in text


def test_a_service_that_refuses_the_start_is_an_error_and_the_others_are_closed(
    services: dict[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> Any:
        raise PermissionError("not logged in")

    monkeypatch.setattr(sys.modules["trackio"], "init", refuse)
    with pytest.raises(ValueError, match=r"trackio cannot start: PermissionError: not logged in"):
        Trackers(LogConfig(trackers=("wandb", "trackio")), tmp_path, {})
    assert services["wandb"].closed == 1


def test_a_missing_package_is_an_error_before_anything_else(tiny: Path, tmp_path: Path) -> None:
    log = LogConfig(trackers=ALL)
    absent = [name for name in ALL if importlib.util.find_spec(name) is None]
    if not absent:
        pytest.skip("all three packages are installed")
    with pytest.raises(ValueError, match=rf"packages {', '.join(absent)}, which are not installed: pip install"):
        check_installed(log)
    with pytest.raises(ValueError, match="not installed"):
        train(tiny_config(tiny, tmp_path / "run", f"log.trackers=[{absent[0]}]", "data.train=[/nowhere]"))
    assert not (tmp_path / "run").exists()


def test_trackers_are_named_once() -> None:
    with pytest.raises(ValueError, match=r"log\.trackers repeats one"):
        LogConfig(trackers=("wandb", "wandb"))


@pytest.mark.parametrize("name", ALL)
def test_the_real_package_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger writes two records, another one goes on in the same place."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    log = LogConfig(trackers=(name,), tensorboard=False, progress=False)  # type: ignore[arg-type]
    for start in (0, 5):
        options: dict[str, Any] = {"total_jobs": 9, "bucket_lengths": [64], "config": {"optim": {"lr": 1.0}}}
        with MetricsLogger(tmp_path / "run", log, step=start, **options) as logger:
            logger.log_eval(start + 1, {"accept_length": 1.5})
            logger.log_eval(start + 2, {"accept_length": 1.6})
    if name == "mlflow":
        import mlflow

        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("dflash_graph").experiment_id])
        history = client.get_metric_history(run.info.run_id, "eval/accept_length")
        assert [(metric.step, metric.value) for metric in history] == [(1, 1.5), (2, 1.6), (6, 1.5), (7, 1.6)]
        assert (run.data.params["optim.lr"], run.info.status) == ("1.0", "FINISHED")
    if name == "wandb":
        assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2
        ids = {folder.name.rpartition("-")[2] for folder in (tmp_path / "run" / "wandb").glob("offline-run-*")}
        assert len(ids) == 1
    if name == "trackio":
        assert list((tmp_path / "trackio").glob("*.db"))
