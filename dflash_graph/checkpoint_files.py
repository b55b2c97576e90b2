"""The files of a checkpoint: their names, their digests, and how they are read and verified.

A checkpoint is a folder `run_dir/checkpoints/step_00000100/` of `drafter.safetensors`, `optimizer.safetensors` and
`state.json`, which holds the digests of all three. Every reader checks every byte; nothing here casts a tensor. Called
by `checkpoint.py`, which writes and chooses checkpoints.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

FORMAT = 1
DRAFTER, OPTIMIZER, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
SERVABLE = "servable"  # a folder that servers load, in every checkpoint of a run
TEMPORARY = ".tmp-"  # what bears this prefix is an unfinished write or an unfinished deletion
_STEP_NAME = re.compile(r"step_(\d{8,})")

# ---- the set of trained jobs ----------------------------------------------------------------------------------------


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """A (J,) bool array as plain JSON values, one bit per job."""
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise TypeError(f"the mask of trained jobs must be one-dimensional bool; found {mask.dtype} {mask.shape}")
    return {"length": len(mask), "bits": base64.b64encode(np.packbits(mask).tobytes()).decode("ascii")}


def decode_mask(values: Mapping[str, Any]) -> np.ndarray:
    """The (J,) bool array that `encode_mask` was given."""
    bits = np.frombuffer(base64.b64decode(values["bits"]), dtype=np.uint8)
    return np.unpackbits(bits, count=values["length"]).astype(np.bool_)


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A whole checkpoint in memory. `drafter` and `optimizer` are tensors by name, `state` the trainer's own values.

    Attributes:
        accept_length: held-out accept_length at this step; None if it was not measured.
    """

    path: Path
    step: int
    drafter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    accept_length: float | None


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_digest(record: Mapping[str, Any]) -> str:
    """Digest of everything in state.json but the digest itself, whatever the white space."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def record_text(record: Mapping[str, Any]) -> str:
    return json.dumps({**record, "digest": _text_digest(record)}, sort_keys=True, indent=1, allow_nan=False) + "\n"


def read_record(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint; ValueError names the file and what is wrong with it."""
    path = folder / STATE
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not path.is_file():
        raise ValueError(f"{STATE} is missing")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        intact = isinstance(record, dict) and record["digest"] == _text_digest(record)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{STATE} is damaged: {type(error).__name__}: {error}") from None
    if not intact:
        raise ValueError(f"{STATE} is damaged: its content does not match its digest")
    if record["format"] != FORMAT:
        raise ValueError(
            f"{STATE} must be of format {FORMAT}; found {record['format']}, of another version of this package"
        )
    return record  # type: ignore[no-any-return]


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint and return its state.json; ValueError names the file and what is wrong."""
    record = read_record(folder)
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} must have {expected['bytes']} bytes; found {path.stat().st_size}")
        if file_digest(path) != expected["sha256"]:
            raise ValueError(f"{name} is damaged: its content does not match its sha256")
    return record


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Verify and read one checkpoint folder onto `device`.

    Raises:
        ValueError: the folder is missing or not whole; the message names the file and what is wrong with it.
    """
    folder = Path(path)
    try:
        record = verify(folder)
        drafter, optimizer = (load_file(folder / name, device=str(device)) for name in (DRAFTER, OPTIMIZER))
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"a checkpoint must be a whole folder step_*; {folder} is not: {error}") from None
    check_float32({**drafter, **optimizer})
    return Checkpoint(folder, record["step"], drafter, optimizer, record["state"], record["accept_length"])


def checkpoint_folders(run_dir: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a run, whole or not, ascending."""
    parent = Path(run_dir) / "checkpoints"
    if not parent.is_dir():
        return []
    matches = ((_STEP_NAME.fullmatch(path.name), path) for path in parent.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def check_float32(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ValueError(f"masters and moments must be stored in float32; found {name} in {tensor.dtype}")


# ---- small files ----------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole: never half of it, whatever happens."""
    temporary = path.with_name(TEMPORARY + path.name)
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
