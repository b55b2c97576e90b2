"""Checkpoints: bitwise round trips, damage found and named, kills survived, pruning, errors of the writing thread."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_graph import checkpoint as module
from dflash_graph.checkpoint import (
    CheckpointWriter,
    decode_mask,
    encode_mask,
    find_latest,
    load_checkpoint,
    resolve_resume,
)

FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")


def tensors(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and moments that any rounding would change: neighbours of 1, subnormals, huge values, -0."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([1 + 2**-23, 1 - 2**-24, 1e-45, 3e38, -0.0, 1 / 3])
    drafter = {
        "layers.0.w": torch.randn(16, 9, generator=generator),
        "norm.weight": special.clone(),
        "draft_vocab_ids": torch.arange(5) + 2**40,
    }
    optimizer = {"step.decay": torch.tensor(float(seed)), "exp_avg.norm.weight": special * 1e-30}
    return drafter, optimizer


def write(run_dir: Path, steps: tuple[int, ...], *, keep: int = 10, scores: dict[int, float] | None = None) -> None:
    writer = CheckpointWriter(run_dir, keep)
    for step in steps:
        writer.save(step, *tensors(step), {"jobs": step}, accept_length=(scores or {}).get(step))
    writer.close()


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def steps_of(run_dir: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").glob("step_*"))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


# ---- round trips ----------------------------------------------------------------------------------------------------


def test_masters_moments_and_state_come_back_bitwise(tmp_path: Path) -> None:
    drafter, optimizer = tensors(3)
    state = {"epoch": 1, "settings": {"optim": {"lr": 0.1 + 0.2, "betas": (0.9, 0.95)}}, "trained": [1, 2]}
    writer = CheckpointWriter(tmp_path, 2)
    assert writer.save(100, drafter, optimizer, state, accept_length=1.25) >= 0
    writer.close()
    assert {p.name for p in folder(tmp_path, 100).iterdir()} == set(FILES)

    loaded = load_checkpoint(folder(tmp_path, 100), "cpu")
    assert (loaded.step, loaded.accept_length) == (100, 1.25)
    assert loaded.state == json.loads(json.dumps(state))
    for saved, found in ((drafter, loaded.drafter), (optimizer, loaded.optimizer)):
        assert saved.keys() == found.keys()
        for name in saved:
            assert found[name].dtype == saved[name].dtype
            assert found[name].shape == saved[name].shape
            assert bits(found[name]) == bits(saved[name]), name


def test_views_of_a_flat_buffer_and_later_updates(tmp_path: Path) -> None:
    """Parameters are views of one flat buffer; a step that follows the save must not reach the file."""
    flat = torch.arange(12.0)
    drafter = {"a": flat[:4].view(2, 2), "b": flat[4:]}
    writer = CheckpointWriter(tmp_path, 1)
    writer.save(1, drafter, {"m": torch.zeros(3)}, {})
    flat.fill_(-1)
    writer.close()
    assert load_checkpoint(folder(tmp_path, 1)).drafter["b"].tolist() == list(range(4, 12))


@pytest.mark.parametrize("kind", ["save", "load"])
def test_low_precision_is_refused(tmp_path: Path, kind: str) -> None:
    drafter, optimizer = tensors()
    if kind == "save":
        optimizer["exp_avg.norm.weight"] = optimizer["exp_avg.norm.weight"].bfloat16()
        with pytest.raises(ValueError, match=r"float32; found exp_avg\.norm\.weight in torch\.bfloat16"):
            CheckpointWriter(tmp_path, 1).save(1, drafter, optimizer, {})
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_float32", lambda tensors: None)
        writer = CheckpointWriter(tmp_path, 1)
        writer.save(1, {"w": torch.zeros(3, dtype=torch.bfloat16)}, optimizer, {})
        writer.close()
    with pytest.raises(ValueError, match=r"float32; found w in torch\.bfloat16"):
        load_checkpoint(folder(tmp_path, 1))


@pytest.mark.parametrize("length", [0, 1, 8, 1003])  # 0 and 1: edges; 8: whole byte; 1003: a torn one
def test_mask_of_trained_jobs(length: int) -> None:
    mask = np.random.default_rng(length).random(length) < 0.5
    found = decode_mask(json.loads(json.dumps(encode_mask(mask))))
    assert found.dtype == np.bool_
    assert np.array_equal(found, mask)


def test_host_copy_is_allocated_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2)
    writer.reserve(*tensors())
    before = {(f, n): t.data_ptr() for f, group in writer._host.items() for n, t in group.items()}
    for step in (1, 2, 3):
        writer.save(step, *tensors(step), {})
    writer.close()
    assert before == {(f, n): t.data_ptr() for f, group in writer._host.items() for n, t in group.items()}


def test_changed_tensors_are_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2)
    drafter, optimizer = tensors()
    writer.reserve(drafter, optimizer)
    with pytest.raises(ValueError, match=r"norm\.weight must stay torch\.float32 \(6,\)"):
        writer.save(1, drafter | {"norm.weight": torch.zeros(7)}, optimizer, {})
    with pytest.raises(ValueError, match=r"differing: .*'extra'"):
        writer.save(1, drafter | {"extra": torch.zeros(7)}, optimizer, {})


@pytest.mark.parametrize(
    "state, error", [({"x": np.int64(3)}, TypeError), ({"x": float("nan")}, ValueError), ({"x": {1, 2}}, TypeError)]
)
def test_state_must_be_plain_finite_json(tmp_path: Path, state: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        CheckpointWriter(tmp_path, 1).save(1, *tensors(), state)
    assert steps_of(tmp_path) == []


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip_bit(path: Path, at: float = 0.6) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])  # of state.json: the brace and the line feed


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_bit, truncate, cut_in_half, Path.unlink], ids=lambda f: f.__name__)
def test_damage_is_skipped_by_auto_and_refused_by_path(tmp_path: Path, name: str, damage: Any) -> None:
    write(tmp_path, (1, 2))
    damage(folder(tmp_path, 2) / name)

    with pytest.raises(ValueError, match=rf"step_00000002 is not: {name}"):
        load_checkpoint(folder(tmp_path, 2))
    with pytest.raises(ValueError, match=rf"--resume must be .* is not: {name}"):
        resolve_resume(str(folder(tmp_path, 2)), tmp_path)
    path, message = resolve_resume("auto", tmp_path)
    assert path == folder(tmp_path, 1)
    assert f"skipped damaged step_00000002: {name}" in message
    with pytest.warns(UserWarning, match=f"step_00000002: {name}"):
        assert find_latest(tmp_path) == folder(tmp_path, 1)


def test_every_bit_of_the_state_counts(tmp_path: Path) -> None:
    """Flip one bit anywhere in state.json: either reading fails, or what is read is the same."""
    write(tmp_path, (1,))
    path = folder(tmp_path, 1) / "state.json"
    whole, expected = path.read_bytes(), load_checkpoint(path.parent)
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(bytes(data))
        try:
            found = load_checkpoint(path.parent)
        except ValueError:
            continue
        assert (found.step, found.state) == (expected.step, expected.state), position


def test_another_format_is_named(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FORMAT", 99)
        write(tmp_path, (1,))
    with pytest.raises(ValueError, match="must be of format 1; found 99"):
        load_checkpoint(folder(tmp_path, 1))


def test_damaged_newer_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    write(tmp_path, (1, 2))
    flip_bit(folder(tmp_path, 2) / "drafter.safetensors")
    write(tmp_path, (2,))
    assert find_latest(tmp_path) == folder(tmp_path, 2)
    assert bits(load_checkpoint(folder(tmp_path, 2)).drafter["layers.0.w"]) == bits(tensors(2)[0]["layers.0.w"])


def test_same_step_again_replaces_only_the_state(tmp_path: Path) -> None:
    """A run that ends on a checkpoint's step saves it again; the whole one on disk is never taken away."""
    write(tmp_path, (5,), scores={5: 1.5})
    before = (folder(tmp_path, 5) / "drafter.safetensors").stat()
    writer = CheckpointWriter(tmp_path, 3)
    writer.save(5, *tensors(5), {"jobs": 7})
    writer.close()
    found = load_checkpoint(folder(tmp_path, 5))
    assert (found.state, found.accept_length) == ({"jobs": 7}, 1.5)
    after = (folder(tmp_path, 5) / "drafter.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# ---- kills ----------------------------------------------------------------------------------------------------------


def test_leftovers_of_killed_writes_are_ignored_and_removed(tmp_path: Path) -> None:
    write(tmp_path, (1,))
    parent = tmp_path / "checkpoints"
    shutil.copytree(folder(tmp_path, 1), parent / ".tmp-step_00000002")
    cut_in_half(parent / ".tmp-step_00000002" / "optimizer.safetensors")
    shutil.copytree(folder(tmp_path, 1), parent / ".tmp-old-step_00000000")
    (parent / ".tmp-best.json").write_text("{")
    assert find_latest(tmp_path) == folder(tmp_path, 1)
    CheckpointWriter(tmp_path, 1)
    assert [p.name for p in parent.iterdir()] == ["step_00000001"]


_SAVE_FOR_EVER = """
import sys, torch
from dflash_graph.checkpoint import CheckpointWriter
writer = CheckpointWriter(sys.argv[1], 2)
weights, moments = {"w": torch.zeros(3_000_000)}, {"m": torch.zeros(3_000_000)}
for step in range(1, 10_000):
    weights["w"].fill_(step)
    moments["m"].fill_(-step)
    writer.save(step, weights, moments, {"jobs": step}, accept_length=1.0 + step % 3)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write: the newest whole checkpoint is found, its tensors and state of one step."""
    process = subprocess.Popen([sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        in_flight = list((tmp_path / "checkpoints").glob(".tmp-step_*/drafter.safetensors"))
        if in_flight and find_latest(tmp_path) is not None:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was skipped: what bears a step's name is whole
        newest = find_latest(tmp_path)
    assert newest is not None
    found = load_checkpoint(newest)
    assert found.state == {"jobs": found.step}
    assert found.drafter["w"].unique().tolist() == [found.step]
    assert found.optimizer["m"].unique().tolist() == [-found.step]


def test_orderly_exit_finishes_the_write_in_flight(tmp_path: Path) -> None:
    script = _SAVE_FOR_EVER.replace("range(1, 10_000)", "range(1, 2)") + "\nraise SystemExit(3)\n"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 3
    assert find_latest(tmp_path) == folder(tmp_path, 1)


# ---- keeping --------------------------------------------------------------------------------------------------------


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    write(tmp_path, (1, 2, 3, 4, 5, 6), keep=2, scores={1: 1.1, 2: 1.9, 3: 1.9, 5: 1.2})
    assert steps_of(tmp_path) == [2, 5, 6]
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best == {"step": 2, "folder": "step_00000002", "accept_length": 1.9}
    write(tmp_path, (7, 8, 9), keep=1, scores={8: 2.5})  # another process finds the old best
    assert steps_of(tmp_path) == [8, 9]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] == 8


def test_without_a_measure_only_the_last_are_kept(tmp_path: Path) -> None:
    write(tmp_path, (1, 2, 3), keep=2)
    assert steps_of(tmp_path) == [2, 3]
    assert not (tmp_path / "checkpoints" / "best.json").exists()


# ---- the writing thread ---------------------------------------------------------------------------------------------


def _broken(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("surfaces_in", ["save", "check", "close"])
def test_error_of_the_thread_surfaces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surfaces_in: str) -> None:
    writer = CheckpointWriter(tmp_path, 2)
    writer.save(1, *tensors(1), {})
    writer.close()
    monkeypatch.setattr(module, "save_file", _broken)
    writer.save(2, *tensors(2), {})
    assert writer._thread is not None
    writer._thread.join()
    needed = sum(t.numel() * t.element_size() for group in tensors() for t in group.values())
    with pytest.raises(
        RuntimeError, match=rf"step_00000002 could not be written: .*No space left.*needs {needed} bytes"
    ):
        writer.save(3, *tensors(3), {}) if surfaces_in == "save" else getattr(writer, surfaces_in)()
    writer.close()  # not again
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_stall_is_the_wait_for_the_write_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gate = module.save_file, threading.Event()

    def slow(*args: Any) -> None:
        gate.wait(10)
        real(*args)

    monkeypatch.setattr(module, "save_file", slow)
    writer = CheckpointWriter(tmp_path, 2)
    assert writer.save(1, *tensors(1), {}) < 0.2  # the trainer goes on while the write hangs
    threading.Timer(0.3, gate.set).start()
    assert 0.2 < writer.save(2, *tensors(2), {}) < 5
    writer.close()
    assert steps_of(tmp_path) == [1, 2]


def test_too_small_a_disk_is_refused_at_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, optimizer = {"w": torch.zeros(1000)}, {"m": torch.zeros(1000)}
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((5 * 8000 - 1, False), (5 * 8000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        writer = CheckpointWriter(tmp_path, 3)
        if fits:
            writer.reserve(drafter, optimizer)
        else:
            with pytest.raises(ValueError, match=r"room for 5 checkpoints .* 40000 bytes; found 39999 bytes free"):
                writer.reserve(drafter, optimizer)


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    write(tmp_path, (1,))
    modes = {name: os.stat(folder(tmp_path, 1) / name).st_mode & 0o777 for name in FILES}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_accept_length_must_be_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="accept_length must be finite"):
        CheckpointWriter(tmp_path, 1).save(1, *tensors(), {}, accept_length=value)


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        CheckpointWriter(tmp_path, 0)


# ---- where a run starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["auto", "never", None])
def test_empty_run_folder_starts_fresh_and_says_so(tmp_path: Path, resume: str | None) -> None:
    path, message = resolve_resume(resume, tmp_path / "new")
    assert path is None
    assert "starting fresh" in message


def test_auto_takes_the_newest(tmp_path: Path) -> None:
    write(tmp_path, (9, 10, 100_000_000))  # nine digits: order is by number, not by name
    path, message = resolve_resume("auto", tmp_path)
    assert path == folder(tmp_path, 100_000_000)
    assert f"continuing from {path}" in message


@pytest.mark.parametrize("resume", ["never", None])
def test_checkpoints_are_not_overwritten_unasked(tmp_path: Path, resume: str | None) -> None:
    write(tmp_path, (3,))
    with pytest.raises(ValueError, match=r"must not hold checkpoints.*--resume auto.*another run_dir"):
        resolve_resume(resume, tmp_path)


def test_a_mistyped_path_never_starts_fresh(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step_00000007 is not a folder"):
        resolve_resume(str(folder(tmp_path, 7)), tmp_path)


def test_explicit_path(tmp_path: Path) -> None:
    write(tmp_path / "a", (1, 2))
    write(tmp_path / "b", (1,))
    newest = folder(tmp_path / "a", 2)
    assert resolve_resume(newest, tmp_path / "a")[0] == newest
    assert resolve_resume(str(newest), tmp_path / "c")[0] == newest  # a new folder continues another run
    with pytest.raises(ValueError, match=r"would overwrite .*step_00000002, which is newer"):
        resolve_resume(folder(tmp_path / "a", 1), tmp_path / "a")
    with pytest.raises(ValueError, match=r"would overwrite .*which is of this run_dir"):
        resolve_resume(newest, tmp_path / "b")
    flip_bit(newest / "optimizer.safetensors")
    assert resolve_resume(folder(tmp_path / "a", 1), tmp_path / "a")[0] == folder(tmp_path / "a", 1)
