"""Checkpoints: how they reach the disk whole, which ones stay, and where a resumed run starts.

A checkpoint is written from a host copy by a thread, under a temporary name beside its place, synced and renamed, so
that a folder with a step's name is whole unless the disk damaged it. `training.py` saves and resumes, `evaluation.py`
and `drafter.init` load. Nothing here may delete the only whole checkpoint, or start over where a checkpoint was asked
for.
"""

import json
import math
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_graph.checkpoint_files import (
    DRAFTER,
    FORMAT,
    OPTIMIZER,
    SERVABLE,
    STATE,
    TEMPORARY,
    Checkpoint,
    check_float32,
    checkpoint_folders,
    decode_mask,
    encode_mask,
    file_digest,
    load_checkpoint,
    read_record,
    record_text,
    sync,
    verify,
    write_text,
)
from dflash_graph.settings import compare_settings

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "compare_settings",
    "decode_mask",
    "encode_mask",
    "find_latest",
    "load_checkpoint",
    "resolve_resume",
]

# ---- choosing -------------------------------------------------------------------------------------------------------


def _newest_whole(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    skipped: list[str] = []
    for _, folder in reversed(checkpoint_folders(run_dir)):
        try:
            verify(folder)
            return folder, skipped
        except ValueError as error:
            skipped.append(f"{folder.name}: {error}")
    return None, skipped


def find_latest(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder; damaged ones are skipped with a warning that says why."""
    folder, skipped = _newest_whole(run_dir)
    if skipped:
        warnings.warn("skipped damaged checkpoints: " + "; ".join(skipped), stacklevel=2)
    return folder


def resolve_resume(resume: str | Path | None, run_dir: str | Path) -> tuple[Path | None, str]:
    """Decide where a run starts.

    Args:
        resume: "auto" takes the newest whole checkpoint of `run_dir` or starts fresh; None or "never" starts fresh;
            anything else is the path of a checkpoint folder.

    Returns:
        (checkpoint folder or None, message to print that says which).

    Raises:
        ValueError: the path is not a whole checkpoint, or the run folder holds checkpoints that the choice would
            overwrite.
    """
    existing = checkpoint_folders(run_dir)
    if resume is None or resume == "never":
        if existing:
            raise ValueError(
                f"run_dir {run_dir} must not hold checkpoints of an earlier run; found {len(existing)}, the newest "
                f"{existing[-1][1].name}. Pass --resume auto to continue that run, or choose another run_dir"
            )
        return None, f"starting fresh in {run_dir}"
    if resume == "auto":
        folder, skipped = _newest_whole(run_dir)
        notes = "".join(f"\n  skipped damaged {line}" for line in skipped)
        if folder is None and existing:
            raise ValueError(
                f"run_dir {run_dir} holds {len(existing)} checkpoints, none of them whole; starting fresh would delete "
                f"them.{notes}\nRepair or remove them, or choose another run_dir"
            )
        if folder is None:
            return None, f"resume auto: no checkpoint in {run_dir}, starting fresh{notes}"
        return folder, f"resume auto: continuing from {folder}{notes}"
    folder = Path(resume)
    try:
        step = verify(folder)["step"]
    except ValueError as error:
        raise ValueError(
            f"--resume must be 'auto' or name a whole checkpoint folder; {resume} is not: {error}"
        ) from None
    inside = folder.resolve().parent == (Path(run_dir) / "checkpoints").resolve()
    for other_step, other in reversed(existing):
        if (not inside or other_step > step) and _is_whole(other):
            raise ValueError(
                f"resuming from {folder} would overwrite {other}, which is {'newer' if inside else 'of this run_dir'}. "
                "Move it away, pass --resume auto, or choose another run_dir"
            )
    return folder, f"resume: continuing from {folder}"


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except ValueError:
        return False
    return True


# ---- writing --------------------------------------------------------------------------------------------------------


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class CheckpointWriter:
    """Writes checkpoints of one run from a host copy, in a thread, one at a time.

    The trainer is held only while the previous write ends and the tensors are copied. The host copy is allocated once.
    An error of the thread is raised by the next `save`, `check` or `close`; a write in flight is finished before the
    process exits, unless it is killed.

    Args:
        run_dir: the run folder; unfinished writes of a killed run are removed from it.
        keep: so many newest checkpoints stay, and the best by held-out accept_length.
        write_servable: writes what servers load into a folder of the checkpoint, given the drafter's tensors, and
            returns its files; None leaves it out.
    """

    def __init__(
        self,
        run_dir: str | Path,
        keep: int,
        write_servable: Callable[[Path, Mapping[str, Tensor]], Sequence[Path]] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint; found {keep}")
        self.folder, self.keep = Path(run_dir) / "checkpoints", keep
        self._write_servable = write_servable
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self._host: dict[str, dict[str, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def reserve(self, drafter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Allocate the host copy and check that the disk will hold the run's checkpoints; call it at set-up.

        Raises:
            ValueError: too little free space, or a floating-point tensor that is not float32.
        """
        check_float32({**drafter, **optimizer})
        each = _num_bytes(drafter) + _num_bytes(optimizer)
        if self._write_servable is not None:
            each += _num_bytes(drafter) // 2  # bf16
        held = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        needed, free = (self.keep + 2) * each, shutil.disk_usage(self.folder).free
        if free + held < needed:
            raise ValueError(
                f"{self.folder} must have room for {self.keep + 2} checkpoints (keep, the best, and one being written) "
                f"of {each} bytes each, {needed} bytes; found {free} bytes free and {held} in old checkpoints. "
                "Free space, lower checkpoint.keep, or choose another run_dir"
            )
        self._host = {
            file: {
                # Pinned, so that the copy from a GPU runs at the bus's speed.
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                for name, tensor in tensors.items()
            }
            for file, tensors in ((DRAFTER, drafter), (OPTIMIZER, optimizer))
        }

    def save(
        self,
        step: int,
        drafter: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        accept_length: float | None = None,
    ) -> float:
        """Copy tensors and state and hand them to the writing thread; return the seconds the caller was held.

        A step whose checkpoint is whole on disk only has its state replaced (and keeps a measured accept_length).

        Args:
            drafter, optimizer: tensors by name, the same names, shapes and types at every save.
            state: plain JSON values: counters, settings, drafter spec; copied before this returns.
            accept_length: held-out accept_length measured at this step; decides which checkpoint is the best.

        Raises:
            RuntimeError: the previous write failed.
            ValueError, TypeError: tensors differ from those before, or the state is not plain finite JSON.
        """
        started = time.monotonic()
        if accept_length is not None and not math.isfinite(accept_length):
            raise ValueError(f"accept_length must be finite, or None if not measured; found {accept_length}")
        self._join()
        self.check()
        if not self._host:
            self.reserve(drafter, optimizer)
        record = {
            "format": FORMAT,
            "step": step,
            "accept_length": accept_length,
            "state": json.loads(json.dumps(state, allow_nan=False)),
        }
        for file, tensors in ((DRAFTER, drafter), (OPTIMIZER, optimizer)):
            self._copy(file, tensors)
        for device in {tensor.device for tensor in (*drafter.values(), *optimizer.values()) if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # sync: the copies must end before the next step writes
        # Not a daemon: an interpreter that exits in good order waits for the write.
        self._thread = threading.Thread(target=self._run, args=(step, record), name="checkpoint-writer")
        self._thread.start()
        return time.monotonic() - started

    def best_accept_length(self) -> float:
        """Held-out accept_length of the best checkpoint so far; 0 if there is none."""
        path = self.folder / "best.json"
        try:
            return float(json.loads(path.read_text(encoding="utf-8"))["accept_length"])
        except (OSError, ValueError, KeyError):
            return 0.0

    def check(self) -> None:
        """Raise the error of the last write, if it failed; cheap enough for every step."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish the write in flight and raise its error, if it failed. Idempotent."""
        self._join()
        self.check()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        host = self._host[file]
        if host.keys() != tensors.keys():
            raise ValueError(
                f"every save must name the same tensors; differing: {sorted(host.keys() ^ tensors.keys())}"
            )
        for name, tensor in tensors.items():
            copy = host[name]
            if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} must stay {copy.dtype} {tuple(copy.shape)}; found {tensor.dtype} {tuple(tensor.shape)}"
                )
            copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    # ---- in the writing thread ----

    def _run(self, step: int, record: dict[str, Any]) -> None:
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        try:
            self._write(temporary, final, record)
            self._mark_best_and_prune(step)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            needed, free = sum(map(_num_bytes, self._host.values())), shutil.disk_usage(self.folder).free
            self._error = RuntimeError(
                f"checkpoint {final} could not be written: {error}. It needs {needed} bytes; {free} are free"
            )
            self._error.__cause__ = error

    def _write(self, temporary: Path, final: Path, record: dict[str, Any]) -> None:
        if final.is_dir():
            try:
                kept = verify(final)
            except ValueError:
                self._remove(final)  # a damaged one that auto-resume skipped
            else:  # this step's tensors are on disk, from this run or the one it resumes: never take them away
                if record["accept_length"] is None:
                    record["accept_length"] = kept["accept_length"]
                write_text(final / STATE, record_text({**record, "files": kept["files"]}))
                return
        temporary.mkdir()
        paths = []
        for name, tensors in self._host.items():
            paths.append(temporary / name)
            save_file(tensors, paths[-1])
            sync(paths[-1])
        if self._write_servable is not None:
            paths += self._write_servable(temporary / SERVABLE, self._host[DRAFTER])
            sync(temporary / SERVABLE)
        files = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
            for path in paths
        }
        write_text(temporary / STATE, record_text({**record, "files": files}))
        for name in files:
            shutil.copymode(temporary / STATE, temporary / name)  # safetensors makes files that only the owner can read
        temporary.rename(final)
        sync(self.folder)

    def _remove(self, folder: Path) -> None:
        """Delete a checkpoint so that a kill half-way leaves nothing that bears a step's name."""
        doomed = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _mark_best_and_prune(self, step: int) -> None:
        # Folders newer than this step can only be damaged ones that were skipped on resume; they do not count.
        folders = [path for other, path in checkpoint_folders(self.folder.parent) if other <= step]
        scores = {}
        for path in folders:
            try:
                score = read_record(path)["accept_length"]
            except ValueError:
                continue
            if score is not None:
                scores[path] = score
        best = max(scores, key=lambda path: scores[path], default=None)  # the earliest of equals
        if best is not None:
            text = json.dumps(
                {"step": int(best.name.removeprefix("step_")), "folder": best.name, "accept_length": scores[best]}
            )
            write_text(self.folder / "best.json", text + "\n")
        for path in folders[: -self.keep]:
            if path != best:
                self._remove(path)
