"""One shard of a feature store: a safetensors file of whole rows, with a table of what it holds in front.

Owns the layout, the writing of a shard in one go, and the checks that a file is whole, unchanged and of this store. A
shard never changes: it is written under another name, synced, and renamed. Tensors: `keys` (r, 2), `checksums` (r,),
`offsets` (r + 1,), `token_ids` (n,), `features` (n, N*D), and for fp8 `exponents` (n, N), for r rows of n tokens.
"""

import fcntl
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dflash_graph.store_identity import StoreSpec

FORMAT, VERSION = "dflash_graph.features", "1"
SUFFIX, UNFINISHED = ".safetensors", ".part"
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "fp8": "F8_E4M3"}
_ITEM_BYTES = {"I64": 8, "I32": 4, "I8": 1, "F32": 4, "BF16": 2, "F8_E4M3": 1}


class DamagedStoreError(ValueError):
    """A file of a store is not what was written, cannot be read, or belongs to another store; the message names it.

    Attributes:
        removable: its content is damaged, so that nothing is lost with it.
    """

    def __init__(self, message: str, *, removable: bool = True) -> None:
        super().__init__(message)
        self.removable = removable


def row_key(token_ids: NDArray[Any]) -> bytes:
    """Name of a row: 16 bytes of hash of its (n,) token ids."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(token_ids, "<i4").data)


@dataclass(frozen=True, eq=False)
class StoredRow:
    """A row on its way to disk.

    Attributes:
        token_ids: (n,) int32. values: (n, bytes) uint8, the features as stored. exponents: (n, N) int8, or None.
    """

    key: bytes
    token_ids: NDArray[np.int32]
    values: NDArray[np.uint8]
    exponents: NDArray[np.int8] | None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.token_ids.nbytes + (0 if self.exponents is None else self.exponents.nbytes)


def row_checksum(values: NDArray[np.uint8], exponents: NDArray[np.int8] | None) -> int:
    """Of a row's features as stored."""
    sha = xxhash.xxh3_64(values.data)
    if exponents is not None:
        sha.update(exponents.data)
    return sha.intdigest()


def write_shard(folder: Path, name: str, spec: StoreSpec, rows: Sequence[StoredRow], origin: dict[str, Any]) -> Path:
    """Write a shard of these rows; what cannot be written whole leaves nothing behind.

    Args:
        name: without its ending, new in the folder. origin: what made the features, for people.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    table = {
        "keys": np.frombuffer(b"".join(row.key for row in rows), "<i8"),
        "checksums": np.array([row_checksum(row.values, row.exponents) for row in rows], "<u8").view("<i8"),
        "offsets": np.concatenate([[0], np.cumsum([len(row.token_ids) for row in rows])]).astype("<i8"),
    }
    front = b"".join(array.tobytes() for array in table.values())
    token_ids = np.concatenate([row.token_ids for row in rows]).astype("<i4")
    num_tokens = len(token_ids)
    made_by = json.dumps(origin)
    header = _header(spec, len(rows), num_tokens, xxhash.xxh3_64_hexdigest(front + made_by.encode()), made_by)
    path = folder / (name + SUFFIX)
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with _create(unfinished) as file:
            _write(file.fileno(), header + front)
            _write(file.fileno(), token_ids.data)
            for row in rows:
                _write(file.fileno(), row.values.data)
            for row in rows:
                if row.exponents is not None:
                    _write(file.fileno(), row.exponents.data)
            os.fsync(file.fileno())
            unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return path


def _create(path: Path) -> FileIO:
    """A new file, locked while it is open: as long as its writer lives, nobody clears it away."""
    while True:
        file = path.open("xb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # whoever clears away may have come between the two
            return file
        file.close()


def remove_unfinished(folder: Path) -> int:
    """Remove what writers left behind that do not live any more; how many files."""
    count = 0
    for path in folder.glob("*" + UNFINISHED):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                count += 1
        except (BlockingIOError, FileNotFoundError):  # its writer lives, or has just ended
            continue
    return count


def _write(descriptor: int, data: bytes | memoryview) -> None:
    """All of the data; writes of more than 2 GiB, and interrupted ones, are short."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(spec: StoreSpec, num_rows: int, num_tokens: int, table: str, origin: str) -> bytes:
    """The front of a shard, a function of its arguments alone, so that a reader can make it again and compare."""
    shapes: list[tuple[str, str, list[int]]] = [
        ("keys", "I64", [num_rows, 2]),
        ("checksums", "I64", [num_rows]),
        ("offsets", "I64", [num_rows + 1]),
        ("token_ids", "I32", [num_tokens]),
        ("features", _DTYPE_NAMES[spec.dtype], [num_tokens, spec.feature_size]),
    ]
    if spec.dtype == "fp8":
        shapes.append(("exponents", "I8", [num_tokens, len(spec.target_layer_ids)]))
    metadata = {"format": FORMAT, "version": VERSION, "store": spec.fingerprint, "table": table, "origin": origin}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in shapes:
        start, end = end, end + int(np.prod(shape)) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Shard:
    """A shard that is whole and of this store; opened by reading its table.

    Attributes:
        keys: of its rows. offsets: (r + 1,) int64 in tokens. checksums: (r,) uint64. Token ids stay on disk: those of a
            large store are gigabytes.
        origin: what made its features.

    Raises:
        DamagedStoreError: names the file and what is wrong with it.
    """

    def __init__(self, path: Path, spec: StoreSpec) -> None:
        self.path, self._spec = path, spec
        try:
            with path.open("rb") as file:
                self._read_table(file.read)
            size = path.stat().st_size
        except DamagedStoreError:
            raise
        except OSError as error:
            raise self._unreadable(error) from None
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise DamagedStoreError(self._say(f"its header cannot be read ({error})")) from None
        if size != self._end:
            raise DamagedStoreError(self._say(f"it has {size} bytes instead of {self._end}"))

    def _read_table(self, read: Any) -> None:
        length = read(8)
        (size,) = struct.unpack("<Q", length)
        if size > 1 << 24:
            raise ValueError(f"{size} bytes long")
        text = read(size)
        header = json.loads(text)
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT or metadata["version"] != VERSION:
            raise ValueError(f"format {metadata['format']} {metadata['version']}")
        if metadata["store"] != self._spec.fingerprint:
            raise DamagedStoreError(
                f"store file {self.path} belongs to another store: of another target, other taps or another dtype. "
                "Move it back to its own",
                removable=False,
            )
        num_rows, num_tokens = header["keys"]["shape"][0], header["token_ids"]["shape"][0]
        if length + text != _header(self._spec, num_rows, num_tokens, metadata["table"], metadata["origin"]):
            raise ValueError("its entries contradict each other")
        front = read(header["offsets"]["data_offsets"][1])
        if xxhash.xxh3_64_hexdigest(front + metadata["origin"].encode()) != metadata["table"]:
            raise ValueError("its table differs from its checksum")
        starts = [header[name]["data_offsets"][0] for name in ("keys", "checksums", "offsets")]
        keys = front[: 16 * num_rows]
        self.keys = [keys[i : i + 16] for i in range(0, len(keys), 16)]
        self.checksums = np.frombuffer(front, "<u8", num_rows, starts[1])
        self.offsets = np.frombuffer(front, "<i8", num_rows + 1, starts[2])
        self.origin: dict[str, Any] = json.loads(metadata["origin"])
        self._token_ids_at = 8 + size + header["token_ids"]["data_offsets"][0]
        self._features_at = 8 + size + header["features"]["data_offsets"][0]
        self._exponents_at = 8 + size + header["features"]["data_offsets"][1]
        last = "exponents" if "exponents" in header else "features"
        self._end: int = 8 + size + header[last]["data_offsets"][1]

    def _say(self, fault: str) -> str:
        return (
            f"store file {self.path} must be whole and as it was written: {fault}. `dflash-graph store verify "
            "--remove` takes such files out; `store build` then writes their rows again"
        )

    def _unreadable(self, error: OSError) -> DamagedStoreError:
        return DamagedStoreError(
            f"store file {self.path} cannot be read: {error.strerror}. Check the disk and the file's permissions",
            removable=False,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        return self._end

    def row_tokens(self, row: int) -> NDArray[np.int32]:
        """(n,) int32 token ids of a row, read and checked."""
        start, end = int(self.offsets[row]), int(self.offsets[row + 1])
        token_ids = np.empty(end - start, "<i4")
        try:
            with self.path.open("rb", buffering=0) as file:
                self._read_at(file.fileno(), token_ids.data.cast("B"), self._token_ids_at + 4 * start)
        except OSError as error:
            raise self._unreadable(error) from None
        if row_key(token_ids) != self.keys[row]:
            raise DamagedStoreError(self._say(f"the tokens of its row {row} of {len(self)} are not those of its key"))
        return token_ids

    def read(self, row: int, values: NDArray[np.uint8], exponents: NDArray[np.int8] | None) -> None:
        """Read a row's features into contiguous (n, bytes) and, for fp8, (n, N) arrays, and check them.

        Raises:
            DamagedStoreError: the file is shorter than it was, or the row differs from its checksum.
        """
        start, taps = int(self.offsets[row]), len(self._spec.target_layer_ids)
        try:
            with self.path.open("rb", buffering=0) as file:
                self._read_at(file.fileno(), values.data.cast("B"), self._features_at + start * values.shape[1])
                if exponents is not None:
                    self._read_at(file.fileno(), exponents.data.cast("B"), self._exponents_at + start * taps)
        except OSError as error:
            raise self._unreadable(error) from None
        if row_checksum(values, exponents) != self.checksums[row]:
            raise DamagedStoreError(self._say(f"its row {row} of {len(self)} differs from its checksum"))

    def _read_at(self, descriptor: int, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(descriptor, [into], offset)
            if not count:
                raise DamagedStoreError(self._say("it ends too early"))
            into, offset = into[count:], offset + count
