"""Files of hidden states as other programs write them, one row per file, read into one form.

Owns what each format looks like and how it numbers layers; never what a store does with the rows. As read from the
sources: vLLM (`distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py`): a safetensors file per
request with `hidden_states` (n, layers, D) and `token_ids` (n,), in ascending order of
`eagle_aux_hidden_state_layer_ids`. speculators 0.9.0 (`cli/generate_offline_data.py`) moves such files to
`hs_<i>.safetensors`; hs-connectors 0.9.0 (`fp8_hidden_states_connector.py`) stores e4m3 with `hidden_states_scales`
(n, 1, 1). Both count a layer by its input, so that id k is the output of layer k - 1. SpecForge 0.2.0
(`algorithms/dflash/providers.py`, `runtime/data_plane/feature_store.py`): a `.ckpt` or `.ckpt.gz` of torch.save with
`input_ids` (n,), `loss_mask` (n,) and `hidden_states` (n, layers * D) or (1, n, layers * D), for EAGLE-3
`aux_hidden_state`; id k is the output of layer k.
"""

import fcntl
import gzip
import io
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

PeerFormat = Literal["vllm", "speculators", "specforge"]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class PeerRow:
    """One file.

    Attributes:
        token_ids: (n,) int32. loss_mask: (n,) uint8 if the format has one. features: (n, layers * D), or None if it was
            not asked for. shape: of the file's tensor, checked to be layers * D wide. dtype: as the file has it.
    """

    path: Path
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8] | None
    features: Tensor | None
    dtype: torch.dtype


def find_files(folder: Path, chosen: str) -> tuple[PeerFormat, list[Path]]:
    """The files of a folder, at any depth, in the order of their numbers, and their format.

    Args:
        chosen: a format, or "auto".

    Raises:
        ValueError: no such files, or files of several formats.
    """
    if not folder.is_dir():
        raise ValueError(f"--from must name a folder of hidden states; found {folder}")
    by_format: dict[PeerFormat, list[Path]] = {}
    for path in sorted((p for p in folder.rglob("*") if p.is_file()), key=_order):
        if (kind := _kind(path)) is not None:
            by_format.setdefault(kind, []).append(path)
    if chosen != "auto":
        wanted: PeerFormat = next(name for name in get_args(PeerFormat) if name == chosen)
        if wanted == "vllm" and wanted not in by_format and "speculators" in by_format:
            by_format = {"vllm": by_format["speculators"]}  # the same files under other names
        by_format = {name: files for name, files in by_format.items() if name == wanted}
    if len(by_format) != 1:
        found = ", ".join(f"{len(files)} of {name}" for name, files in by_format.items()) or "none"
        raise ValueError(
            f"{folder} must hold files of one format: hs_<i>.safetensors (speculators), other *.safetensors (vllm), "
            f"*.ckpt or *.ckpt.gz (specforge); found {found}. Name another folder, or choose one with --format"
        )
    return next(iter(by_format.items()))


def _kind(path: Path) -> PeerFormat | None:
    if path.name.endswith((".ckpt", ".ckpt.gz")):
        return "specforge"
    if path.suffix == ".safetensors":
        return "speculators" if re.fullmatch(r"hs_\d+", path.stem) else "vllm"
    return None


def _order(path: Path) -> tuple[str, int, str]:
    number = re.search(r"(\d+)(?=\.[a-z.]+$)", path.name)
    return str(path.parent), int(number[1]) if number else -1, path.name


def our_layer_ids(kind: PeerFormat, theirs: Sequence[int], num_layers: int) -> list[int]:
    """Layer ids of a format as taps of ours (id k = output of layer k).

    Raises:
        ValueError: an id that no tap can be, or an order that the format's writer never has.
    """
    shift = 0 if kind == "specforge" else 1
    ours = [layer - shift for layer in theirs]
    if list(theirs) != sorted(set(theirs)) or not all(0 <= layer < num_layers for layer in ours):
        raise ValueError(
            f"--layers must be the ascending layer ids that {kind} was told to save, {shift} to "
            f"{num_layers - 1 + shift} for this target (it means the {'input' if shift else 'output'} of a layer); "
            f"found {list(theirs)}"
        )
    return ours


def read_row(kind: PeerFormat, path: Path, num_layers: int, hidden_size: int, *, features: bool) -> PeerRow:
    """Read one file.

    Args:
        num_layers: that it must hold. features: read them, too; without them the file is only checked.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    try:
        read = _read_specforge if kind == "specforge" else _read_safetensors
        row, shape = read(path, features)
    except (OSError, EOFError, KeyError, SafetensorError, RuntimeError, pickle.UnpicklingError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole file of {kind}: {type(error).__name__}: {error}") from None
    n, width = len(row.token_ids), num_layers * hidden_size
    good = [[n, width], [1, n, width]] if kind == "specforge" else [[n, num_layers, hidden_size]]
    if shape not in good:
        raise ValueError(
            f"{path} must hold {n} tokens x {num_layers} layers (as many as --layers) x {hidden_size}, the target's "
            f"hidden size, as {' or '.join(map(str, good))}; its hidden states are {shape}"
        )
    return row


def _read_safetensors(path: Path, features: bool) -> tuple[PeerRow, list[int]]:
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        with lock.open("rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("its writer holds its lock; wait until the server has written it") from None
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if missing := {"hidden_states", "token_ids"} - names:
            raise KeyError(f"it lacks {', '.join(sorted(missing))}")
        tokens = file.get_tensor("token_ids")
        part = file.get_slice("hidden_states")
        shape = list(part.get_shape())
        hidden = file.get_tensor("hidden_states") if features else part[:1]
        dtype = hidden.dtype
        scales = file.get_tensor("hidden_states_scales") if "hidden_states_scales" in names else None
    if dtype not in (*_FLOATS, _FP8) or (dtype == _FP8) != (scales is not None):
        raise RuntimeError(f"its hidden states are {dtype} {'with' if scales is not None else 'without'} scales")
    if not features:
        return PeerRow(path, _ids(tokens), None, None, dtype), shape
    if scales is not None:
        hidden = hidden.float() * scales.float()
    return PeerRow(path, _ids(tokens), None, hidden.flatten(1), dtype), shape


def _read_specforge(path: Path, features: bool) -> tuple[PeerRow, list[int]]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            raw: dict[str, Any] = torch.load(io.BytesIO(file.read()), weights_only=True)
    else:
        raw = torch.load(path, weights_only=True, mmap=True)
    name = "hidden_states" if "hidden_states" in raw else "aux_hidden_state"
    if missing := {"input_ids", name} - raw.keys():
        raise KeyError(f"it lacks {', '.join(sorted(missing))}")
    hidden = raw[name]
    if hidden.dtype not in _FLOATS:
        raise RuntimeError(f"its hidden states are {hidden.dtype}")
    mask = raw.get("loss_mask")
    row = PeerRow(
        path,
        _ids(raw["input_ids"].view(-1)),
        None if mask is None else mask.view(-1).to(torch.uint8).numpy(),
        hidden.reshape(-1, hidden.shape[-1]) if features else None,
        hidden.dtype,
    )
    return row, list(hidden.shape)


def _ids(tokens: Tensor) -> NDArray[np.int32]:
    if tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        raise RuntimeError(f"its token ids are {tokens.dtype} {list(tokens.shape)}")
    return tokens.to(torch.int32).numpy()
