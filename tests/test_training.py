"""The whole run: resume is exact, errors end it at once, signals end it in good order, and nothing moves."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_graph import evaluate, training
from dflash_graph.checkpoint import find_latest
from dflash_graph.config import TargetConfig
from dflash_graph.data import load_tokenizer
from dflash_graph.decoding import greedy_decode
from dflash_graph.metrics import read_records
from dflash_graph.schedule import EpochSchedule
from dflash_graph.static_buffers import Ring
from dflash_graph.step import DrafterStep
from dflash_graph.target import Target, load_full_model
from dflash_graph.trainer import Trainer
from dflash_graph.training import train
from tests.tiny import tiny_config, tiny_settings, weights


@pytest.fixture(scope="module")
def straight(tiny: Path) -> Path:
    """The uninterrupted run that resumed ones are compared with."""
    train(tiny_config(tiny, tiny / "straight"))
    return tiny / "straight"


def test_loss_falls_and_the_run_folder_is_complete(straight: Path) -> None:
    records = read_records(straight)
    losses = [r["loss"] for r in records if r["kind"] == "validation"]
    assert len(losses) == 3  # before training, and after each epoch
    assert losses[-1] < losses[0] - 0.1
    assert {r["kind"] for r in records} == {"train", "validation", "schedule"}
    assert sum(sum(map(sum, r["length_mix"])) for r in records if r["kind"] == "train") == _jobs(straight) * 2
    assert (straight / "config.yaml").is_file()
    assert {p.name for p in (straight / "schedule").iterdir()} == {"epoch_00000.npz", "epoch_00001.npz"}


def _jobs(run: Path) -> int:
    return EpochSchedule.load(run / "schedule" / "epoch_00000.npz").num_jobs


def test_two_runs_agree_bitwise(tiny: Path, straight: Path) -> None:
    train(tiny_config(tiny, tiny / "again", "devices.num_targets=2", "schedule.padding_workers=3"))
    assert weights(tiny / "again") == weights(straight)


# ---- killed and resumed ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a SIGKILL inside the process: nothing after it runs in the drafter's thread."""


def _trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(step reached, epoch, job) of every trained job, in order."""
    trained: list[tuple[int, int, int]] = []
    step = Trainer._step

    def traced(self: Trainer, num_jobs: int) -> list[int]:
        epoch = self.progress.epoch
        jobs = step(self, num_jobs)
        trained.extend((self.progress.step + 1, epoch, job) for job in jobs)
        return jobs

    monkeypatch.setattr(Trainer, "_step", traced)
    return trained


def _run_killed(config: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and die at the apply of the `steps`-th step of this process, without any orderly end."""
    count = 0
    apply = DrafterStep.apply

    def dying(self: DrafterStep, lr: float) -> None:
        nonlocal count
        count += 1
        if count > steps:
            raise Killed
        apply(self, lr)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterStep, "apply", dying)
        with pytest.raises(Killed):
            train(config, resume="auto")


@pytest.mark.parametrize("draw", ["seeded", "ready", "round_robin"])
def test_interrupted_runs_train_every_job_once_per_epoch(
    tiny: Path, straight: Path, tmp_path: Path, draw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny, tmp_path / "run", f"schedule.draw={draw}", "checkpoint.every=1")
    trained = _trace(monkeypatch)
    rng = random.Random(1)
    lineage: dict[int, list[tuple[int, int]]] = {}
    for _ in range(10):
        _run_killed(config, rng.randint(0, 2), monkeypatch)
    assert train(config, resume="auto").complete
    for step, epoch, job in trained:  # a step trained again after a kill replaces the one that was lost
        lineage.setdefault(step, [])
        if len(lineage[step]) >= 2 or (lineage[step] and lineage[step][0] == (epoch, job)):
            lineage[step] = []
        lineage[step].append((epoch, job))
    survived = Counter(pair for pairs in lineage.values() for pair in pairs)
    jobs = _jobs(tmp_path / "run")
    assert survived == Counter({(epoch, job): 1 for epoch in range(2) for job in range(jobs)})
    if draw == "seeded":
        assert weights(tmp_path / "run") == weights(straight)


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    """Ten real SIGKILLs of a process, `epochs` raised from 2 to 3 on the way: bitwise the straight run's weights."""
    train(tiny_config(tiny, tmp_path / "straight", "epochs=3"))
    command = [
        sys.executable,
        "-m",
        "dflash_graph",
        "train",
        *tiny_settings(tiny, tmp_path / "run"),
        "--resume",
        "auto",
    ]
    rng = random.Random(2)
    for i in range(10):
        process = subprocess.Popen([*command, "epochs=2" if i < 5 else "epochs=3", "checkpoint.every=1"])
        time.sleep(rng.uniform(3, 9))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, "epochs=3", "checkpoint.every=1"], check=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")
    steps = [r["step"] for r in read_records(tmp_path / "run") if r["kind"] == "train"]
    assert steps == sorted(set(steps))


def test_raised_epochs_continue_the_same_run(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_config(tiny, tmp_path / "three", "epochs=3"))
    train(tiny_config(tiny, tmp_path / "run", "epochs=2"))
    train(tiny_config(tiny, tmp_path / "run", "epochs=3"), resume="auto")
    assert "epochs: 2 -> 3" in capsys.readouterr().out
    assert weights(tmp_path / "run") == weights(tmp_path / "three")


def test_changed_identity_is_refused_before_the_target_is_loaded(
    tiny: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "__init__", lambda *a, **k: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"drafter.anchor_rate: 0.5 -> 0.25"):
        train(tiny_config(tiny, straight, "drafter.anchor_rate=0.25"), resume="auto")


def test_a_finished_run_resumes_to_nothing(tiny: Path, straight: Path) -> None:
    before = weights(straight)
    result = train(tiny_config(tiny, straight), resume="auto")
    assert result.complete
    assert weights(straight) == before


def test_a_used_run_folder_is_not_overwritten(tiny: Path, straight: Path) -> None:
    with pytest.raises(ValueError, match="--resume auto"):
        train(tiny_config(tiny, straight))


def test_a_run_folder_in_use_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    held = training._lock(tmp_path / "run")
    with pytest.raises(ValueError, match="in use by another process"):
        train(tiny_config(tiny, tmp_path / "run"))
    held.close()


# ---- errors and signals ---------------------------------------------------------------------------------------------


def _broken_after(function: Any, calls: int) -> Any:
    count = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise OSError("planted")
        return function(*args, **kwargs)

    return broken


@pytest.mark.parametrize(
    "owner, name, calls, worker",
    [
        (Target, "__init__", 0, "target-0"),
        (Target, "forward", 0, ""),  # whoever is first: a target, or the drafter's validation pass
        (Target, "forward", 30, "target-"),
        (DrafterStep, "__init__", 0, "drafter"),
        (DrafterStep, "load_slot", 0, "drafter"),
        (DrafterStep, "micro_step", 9, "drafter"),
        (DrafterStep, "apply", 2, "drafter"),
        (training, "pad_job", 0, "padding-"),
        (training, "pad_job", 5, "padding-"),
    ],
)
def test_any_workers_error_ends_the_run_with_that_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, worker: str
) -> None:
    planted: list[float] = []
    broken = _broken_after(getattr(owner, name), calls)

    def timed(*args: Any, **kwargs: Any) -> Any:
        try:
            return broken(*args, **kwargs)
        except OSError:
            planted.append(time.monotonic())
            raise

    monkeypatch.setattr(owner, name, timed)
    with pytest.raises(OSError, match="planted") as caught:
        train(tiny_config(tiny, tmp_path / "run", "devices.num_targets=2"))
    assert time.monotonic() - planted[0] < 5
    assert worker in caught.value.__notes__[0]
    _assert_no_threads_left()


def _assert_no_threads_left() -> None:
    deadline = time.monotonic() + 5
    names = ("target-", "drafter", "padding-", "checkpoint-writer")
    while alive := [t.name for t in threading.enumerate() if t.name.startswith(names)]:
        assert time.monotonic() < deadline, f"threads still run: {alive}"
        time.sleep(0.05)


def test_an_error_of_the_checkpoint_thread_ends_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_graph import checkpoint

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RuntimeError, match="No space left on device"):
        train(tiny_config(tiny, tmp_path / "run"))
    _assert_no_threads_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_exits_cleanly(
    tiny: Path, straight: Path, tmp_path: Path, number: int
) -> None:
    command = [sys.executable, "-m", "dflash_graph", "train", *tiny_settings(tiny, tmp_path / "run")]
    slow = [*command, "epochs=400", "checkpoint.every=100000"]
    process = subprocess.Popen(slow, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("validation at step") and not line.startswith("validation at step 0:"):
            break
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(timeout=20) == 0
    assert "finishing the current step" in rest
    newest = find_latest(tmp_path / "run")
    assert newest is not None
    assert newest.name != "step_00000000"
    state = json.loads((newest / "state.json").read_text())["state"]["progress"]
    assert f"ended at step {state['step']}" in rest


# ---- what may not happen --------------------------------------------------------------------------------------------


def test_repeated_non_finite_steps_end_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Target.forward

    def poisoned(self: Target, token_ids: torch.Tensor, num_rows: int, row_length: int) -> None:
        forward(self, token_ids, num_rows, row_length)
        self.output[0] = float("nan")  # a real position

    monkeypatch.setattr(Target, "forward", poisoned)
    with pytest.raises(RuntimeError, match=r"steps were skipped.*optim\.lr"):
        train(tiny_config(tiny, tmp_path / "run", "optim.max_skipped_steps=3"))


def test_stale_content_of_slots_changes_nothing(tiny: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and output buffers start as NaN and huge integers, and get NaN again when they are released."""
    release, build = Ring.release, training.BufferTable

    class Poisoned(build):  # type: ignore[valid-type, misc]
        def __init__(self, specs: Any) -> None:
            super().__init__(specs)
            self.poison()

    def poisoning(self: Ring, lease: Any) -> None:
        release(self, lease)
        features = tables[0]["slot.features"][lease.slot]
        features[features.shape[0] // 2 :].fill_(float("nan"))

    tables: list[Any] = []

    def make(specs: Any) -> Any:
        tables.append(Poisoned(specs))
        return tables[-1]

    monkeypatch.setattr(training, "BufferTable", make)
    monkeypatch.setattr(DrafterStep, "__init__", _restoring_workspace(DrafterStep.__init__))
    train(tiny_config(tiny, tiny / "poisoned"))
    assert weights(tiny / "poisoned") == weights(straight)


def _restoring_workspace(init: Any) -> Any:
    def wrapped(self: DrafterStep, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # `load` rewrites all of the workspace it reads; only these two are scratch of the counters.
        assert torch.isnan(self._ws["features"]).all()

    return wrapped


def test_dry_run_keeps_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_config(tiny, tmp_path / "run"), dry_run=True)
    out = capsys.readouterr().out
    assert "slot.features" in out
    assert "one step: loss" in out
    assert not (tmp_path / "run").exists()


def test_no_trainable_row_ends_before_the_target_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "__init__", lambda *a, **k: pytest.fail("the target was loaded"))
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    with pytest.raises(ValueError, match="row"):
        train(tiny_config(tiny, tmp_path / "run", f"data.train=[{tmp_path / 'empty.jsonl'}]"))


def test_schedule_of_other_data_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run")
    train(tiny_config(tiny, tmp_path / "run", "epochs=1"))
    path = tmp_path / "run" / "schedule" / "epoch_00001.npz"
    good = EpochSchedule.load(tmp_path / "run" / "schedule" / "epoch_00000.npz")
    good.save(path)
    with pytest.raises(ValueError, match="must be of epoch 1 of this run; it is of epoch 0"):
        train(config, resume="auto")


def test_metrics_are_cut_back_to_the_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tiny, tmp_path / "run", "log.every=1", "checkpoint.every=4")
    _run_killed(config, 6, monkeypatch)
    train(config, resume="auto")
    steps = [r["step"] for r in read_records(tmp_path / "run") if r["kind"] == "train"]
    assert steps == list(range(1, steps[-1] + 1))


def test_learning_rate_follows_jobs_trained(tiny: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "run", "log.every=1", "optim.lr_schedule=linear", "optim.min_lr_ratio=0"))
    records = [r for r in read_records(tmp_path / "run") if r["kind"] == "train"]
    total = 2 * _jobs(tmp_path / "run")
    expected = [3e-3 * (1 - r["jobs_trained"] / total) for r in records]
    np.testing.assert_allclose([r["lr"] for r in records], expected, atol=1e-9)


def test_one_conversation_is_learnt_by_heart(tiny: Path, tmp_path: Path) -> None:
    """The target's own greedy answer, overfitted, is drafted almost whole: accept_length above 0.9 * K."""
    target = TargetConfig(path=str(tiny / "model"))
    tokenizer = load_tokenizer(target)
    model = load_full_model(target, torch.device("cpu"), torch.float32)
    messages = [{"role": "user", "content": "w1 w12"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = greedy_decode(model, prompt, max_new_tokens=40, eos_ids=frozenset())
    assert len(set(answer)) > 5  # a text to learn, not one token repeated
    messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    settings = ["epochs=200", "schedule.jobs_per_step=1", "checkpoint.every=1000", "drafter.anchor_rate=1"]
    config = tiny_config(
        tiny, tmp_path / "run", f"data.train=[{tmp_path / 'one.jsonl'}]", "data.validation=[]", *settings
    )
    train(config)
    report = evaluate(tmp_path / "run", tmp_path / "one.jsonl", max_new_tokens=40, workers=1, control_prompts=0)
    assert report.drafter.accept_length > 0.9 * config.drafter.block_size


def test_schedules_of_a_run_that_died_before_its_first_checkpoint_are_not_used(tiny: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "other", "seed=7", "epochs=1"))
    (tmp_path / "run").mkdir()
    (tmp_path / "other" / "schedule").rename(tmp_path / "run" / "schedule")
    train(tiny_config(tiny, tmp_path / "run", "epochs=1"), resume="auto")
    assert EpochSchedule.load(tmp_path / "run" / "schedule" / "epoch_00000.npz").seed == 0


def test_a_missing_target_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.path .*nowhere.* must be a readable model folder"):
        train(tiny_config(tiny, tmp_path / "run", f"target.path={tmp_path / 'nowhere'}"))


def test_a_started_epoch_keeps_its_draw_order_when_min_ready_changes_and_the_file_is_gone(
    tiny: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny, tmp_path / "run", "checkpoint.every=1")
    _run_killed(config, 4, monkeypatch)
    for file in (tmp_path / "run" / "schedule").iterdir():
        file.unlink()
    trained = _trace(monkeypatch)
    train(tiny_config(tiny, tmp_path / "run", "schedule.min_ready=1", "epochs=1"), resume="auto")
    left = [job for _, epoch, job in trained if epoch == 0]
    order = EpochSchedule.load(straight / "schedule" / "epoch_00000.npz").draw_order.tolist()
    assert left in (order[6:], order[8:])  # the last checkpoint before the kill may or may not have been whole


def test_auto_resume_never_deletes_damaged_checkpoints(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", "epochs=1")
    train(config)
    for state in (tmp_path / "run" / "checkpoints").glob("step_*/state.json"):
        state.write_text("{}")
    with pytest.raises(ValueError, match="none of them whole"):
        train(config, resume="auto")


def test_the_best_checkpoint_exists_whatever_the_cadences(tiny: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "run", "checkpoint.every=1000", "log.validate_every=3", "checkpoint.keep=1"))
    records = read_records(tmp_path / "run")
    best = max((r["accept_length"], -r["step"]) for r in records if r["kind"] == "validation")
    kept = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert (kept["accept_length"], -kept["step"]) == best
    assert (tmp_path / "run" / "checkpoints" / kept["folder"] / "state.json").is_file()


def test_a_run_that_trained_on_nothing_is_an_error(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterStep, "apply", _with_nan(DrafterStep.apply))
    with pytest.raises(RuntimeError, match=r"all .* steps of this run were skipped"):
        train(tiny_config(tiny, tmp_path / "run", "epochs=1", "optim.max_skipped_steps=1000"))


def _with_nan(apply: Any) -> Any:
    def poisoned(self: DrafterStep, lr: float) -> None:
        self.parameters.grads["decay"][0] = float("nan")
        apply(self, lr)

    return poisoned


def test_another_target_under_the_same_path_is_refused_on_resume(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    override = f"target.path={tmp_path / 'model'}"
    train(tiny_config(tiny, tmp_path / "run", override, "epochs=1"))
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 64
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"derived\.target_weights"):
        train(tiny_config(tiny, tmp_path / "run", override), resume="auto")


def test_dead_hidden_states_are_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"hidden states of tap 1 .* same at every position"):
        train(tiny_config(tiny, tmp_path / "run", f"target.path={tmp_path / 'model'}"))


def test_evaluation_without_the_training_rows_keeps_its_result(tiny: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("train.jsonl", "gone.jsonl"))
    report = evaluate(tmp_path / "run", tiny / "heldout.jsonl", max_new_tokens=8, limit=3, workers=1)
    assert report.drafter.accept_length >= 1
    assert "baselines not measured" in report.notes[0]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        evaluate(tmp_path / "run", tiny / "heldout.jsonl", limit=0)


def test_a_target_whose_logits_are_not_finite_is_not_called_greedy(tiny: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][50] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    target = TargetConfig(path=str(tmp_path / "model"))
    with pytest.raises(RuntimeError, match="not finite"):
        evaluate(straight, tiny / "heldout.jsonl", max_new_tokens=8, limit=1, workers=1, target=target)
