"""What a feature store belongs to: the target's weights and configuration, the taps, and the form of the numbers.

Owns `StoreSpec` and its comparison, by name, with what a run needs. The weights are told apart by samples of every
tensor, so that a copy, another sharding or another place of the same model stays the same. Knows no rows.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import cached_file

from dflash_graph.config import TargetConfig
from dflash_graph.store_codec import StoredDtype, bytes_per_token

_SAMPLE = 1024  # bytes, at the start, in the middle and at the end of every tensor
# Keys of a config.json that change no hidden state.
_VOLATILE = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_length"),
        *("model_name", "pad_token_id", "torch_dtype", "transformers_version", "use_cache"),
    }
)


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """All rows of a store are features of this.

    Attributes:
        weights, config: digests of the target. target: how it was called when the store was made, for people.
        target_layer_ids: taps; tap i fills columns i*D .. (i+1)*D of a row's features.
        hidden_size: D.
    """

    weights: str
    config: str
    target: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: StoredDtype

    @property
    def feature_size(self) -> int:
        """N*D."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """On disk: features and the token's id."""
        return bytes_per_token(len(self.target_layer_ids), self.hidden_size, self.dtype) + 4

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex of everything but the target's name."""
        values = {name: value for name, value in asdict(self).items() if name != "target"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def differences(self, other: "StoreSpec") -> list[str]:
        """What keeps rows of this from being rows of `other`, in words; empty when nothing does."""
        found = []
        if self.weights != other.weights:
            found.append(f"its target has other weights (it was made for {self.target})")
        if self.config != other.config:
            found.append(f"its target has another configuration (it was made for {self.target})")
        for name, word in (("target_layer_ids", "taps"), ("hidden_size", "hidden size"), ("dtype", "dtype")):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                mine, theirs = (list(x) if isinstance(x, tuple) else x for x in (mine, theirs))
                found.append(f"its {word} is {mine}, needed is {theirs}")
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StoreSpec":
        return cls(**{**values, "target_layer_ids": tuple(values["target_layer_ids"])})


def target_digests(config: TargetConfig) -> tuple[str, str]:
    """(weights, configuration) digests of a target, local or on the hub; a few KiB of every tensor are read.

    Raises:
        ValueError: no weight file is found.
    """
    files = weight_files(config)
    if not files:
        raise ValueError(f"target.path {config.path!r} must hold weight files (*.safetensors, *.bin or a GGUF file)")
    samples: dict[str, bytes] = {}
    for path in files:
        samples |= _tensor_samples(path) if path.suffix == ".safetensors" else {path.name: _file_samples(path)}
    sha = hashlib.sha256()
    for name in sorted(samples):
        sha.update(name.encode() + b"\0" + samples[name])
    return sha.hexdigest(), _config_digest(config)


def _find(config: TargetConfig, name: str) -> Path | None:
    """A file of the target: in its folder, or fetched from the hub into the hub's own cache."""
    if Path(config.path).is_dir():
        path = Path(config.path) / name
        return path if path.is_file() else None
    found = cached_file(config.path, name, revision=config.revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def weight_files(config: TargetConfig) -> list[Path]:
    """The files that hold the target's weights; of the hub's, the copies in its cache."""
    if config.gguf_file is not None:
        found = _find(config, config.gguf_file)
        return [] if found is None else [found]
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path := _find(config, index)) is not None:
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
            return [shard for name in names if (shard := _find(config, name)) is not None]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path := _find(config, name)) is not None:
            return [path]
    return []


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin.

    Raises:
        ValueError: the file is no whole safetensors file.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > 1 << 28:
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
            if not isinstance(header, dict):
                raise ValueError("the header is no mapping")
        return header, 8 + size
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(f"{path} must be a whole safetensors file: {error}") from None


def _tensor_samples(path: Path) -> dict[str, bytes]:
    header, start = safetensors_header(path)
    found = {}
    with path.open("rb") as file:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            what = f"{entry['dtype']} {entry['shape']}".encode()
            found[name] = what + b"".join(
                _read_at(file, start + at, min(_SAMPLE, last - at)) for at in _places(first, last)
            )
    return found


def _file_samples(path: Path) -> bytes:
    """Of a file whose tensors are not listed at its start: 257 samples, evenly spread."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return f"{size}".encode() + b"".join(_read_at(file, (size - _SAMPLE) * i // 256, _SAMPLE) for i in range(257))


def _places(first: int, last: int) -> Iterator[int]:
    yield from sorted({first, max(first, (first + last - _SAMPLE) // 2), max(first, last - _SAMPLE)})


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(max(0, offset))
    return file.read(size)


def _config_digest(config: TargetConfig) -> str:
    """Of the target's config.json; a GGUF file holds its configuration itself."""
    path = None if config.gguf_file is not None else _find(config, "config.json")
    values = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
