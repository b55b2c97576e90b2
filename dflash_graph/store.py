"""A feature store: a folder of shards whose rows are found by the hash of their token ids.

Owns the folder: `store.json` (what all rows are features of) and `shards/`. Rows are keyed by content, so that another
budget, bucket set, order, block size, or a grown data set reuses them. Several processes may read and write it at once:
a shard appears whole or not at all, and a row that was written twice is read from the first. Called by everything that
reads or writes features on disk; what a run does with them is the matter of `store_worker.py`.
"""

import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_graph.store_identity import StoreSpec
from dflash_graph.store_shard import (
    FORMAT,
    SUFFIX,
    VERSION,
    DamagedStoreError,
    Shard,
)

_RESERVE = 64 << 20  # bytes of the disk that a store leaves alone


class FeatureStore:
    """An open store.

    Attributes:
        spec: what its rows are features of.
        damaged: what is wrong with the shards that could not be opened, if it was opened with `keep_going`.

    Raises:
        ValueError: the folder is no store. DamagedStoreError: a shard is damaged or foreign.
    """

    def __init__(self, folder: Path | str, *, keep_going: bool = False) -> None:
        self.folder = Path(folder)
        self.spec = read_spec(self.folder)
        self.shards: list[Shard] = []
        self.damaged: dict[Path, DamagedStoreError] = {}
        self._keep_going = keep_going
        self._known: set[str] = set()
        self._index: dict[bytes, tuple[int, int]] = {}  # shard and row of a key
        self._lock = threading.Lock()
        self.refresh()

    @classmethod
    def open(cls, folder: Path | str, spec: StoreSpec, *, create: bool = False) -> "FeatureStore":
        """Open the store of `spec`; with `create`, make an empty one where there is none.

        Raises:
            ValueError: the store belongs to something else; every difference is named.
        """
        folder = Path(folder)
        if create and not (folder / "store.json").exists():
            _make(folder, spec)
        store = cls(folder)
        if found := store.spec.differences(spec):
            raise ValueError(
                f"store {folder} must hold features of this run's target and taps; {'; '.join(found)}. Choose another "
                "features.path, or set the run to what the store holds"
            )
        return store

    def refresh(self) -> None:
        """Take in shards that other writers have added.

        Raises:
            DamagedStoreError: one of them is damaged or foreign.
        """
        with self._lock:
            for path in sorted((self.folder / "shards").glob("*" + SUFFIX)):
                if path.name not in self._known:
                    self._add(path)

    def _add(self, path: Path) -> None:
        try:
            shard = Shard(path, self.spec)
        except DamagedStoreError as error:
            if not self._keep_going:
                raise
            self.damaged[path] = error
        else:
            self.shards.append(shard)  # before its keys: other threads look a row up without the lock
            for row, key in enumerate(shard.keys):
                self._index.setdefault(key, (len(self.shards) - 1, row))
        self._known.add(path.name)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_tokens(self) -> int:
        """Of all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def __iter__(self) -> Iterator[bytes]:
        """Keys of all rows."""
        return iter(list(self._index))

    def token_ids(self, key: bytes) -> NDArray[np.int32]:
        """(n,) int32 of a row, read and checked.

        Raises:
            DamagedStoreError: names the file; KeyError: there is no such row.
        """
        shard, row = self._index[key]
        return self.shards[shard].row_tokens(row)

    def read(self, key: bytes, values: NDArray[np.uint8], exponents: NDArray[np.int8] | None) -> None:
        """Read one row, checked, into contiguous (n, bytes) and, for fp8, (n, N) arrays. Any thread may.

        Raises:
            DamagedStoreError: names the file; KeyError: there is no such row.
        """
        shard, row = self._index[key]
        here = self.shards[shard]
        if here.offsets[row + 1] - here.offsets[row] != len(values):
            raise DamagedStoreError(
                f"store file {here.path}: row {row} has {here.offsets[row + 1] - here.offsets[row]} tokens, needed are "
                f"{len(values)}: two rows have one hash"
            )
        here.read(row, values, exponents)

    def __str__(self) -> str:
        spec = self.spec
        return (
            f"store     {self.folder}: {len(self)} rows, {self.num_tokens} tokens, {gib(self.nbytes)} in "
            f"{len(self.shards)} shards; {spec.dtype}, {spec.bytes_per_token} bytes per token, taps "
            f"{list(spec.target_layer_ids)} x {spec.hidden_size} of {spec.target}"
        )


def gib(num_bytes: int) -> str:
    """In words, with a unit that shows something."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**20:.2f} MiB"


def free_space(folder: Path) -> int:
    """Bytes that a store in this folder, which need not exist yet, may grow by as the disk stands now."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return max(0, shutil.disk_usage(place).free - _RESERVE)


def read_spec(folder: Path) -> StoreSpec:
    """What the rows of the store in `folder` are features of.

    Raises:
        ValueError: the folder is no store, or its `store.json` is damaged.
    """
    path = folder / "store.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {values['format']}, version {values['version']}")
        spec = StoreSpec.from_dict(values["spec"])
        if spec.fingerprint != values["fingerprint"]:
            raise ValueError("it was changed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"features.path must name a feature store; {path} cannot be read as one ({error}). `dflash-graph store "
            "build` makes it"
        ) from None
    return spec


def _make(folder: Path, spec: StoreSpec) -> None:
    """Write `store.json`, whole or not at all; of several processes that try, one wins."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "shards").is_dir():
            raise ValueError(f"features.path must name a store, or a new or empty folder; {folder} holds other files")
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        values = {"format": FORMAT, "version": VERSION, "fingerprint": spec.fingerprint, "spec": asdict(spec)}
        temporary = folder / f"store.json.{uuid.uuid4().hex}"
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        try:
            os.link(temporary, folder / "store.json")
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    except OSError as error:
        raise ValueError(f"features.path must be a folder that can be written; {folder}: {error}") from None
