"""Adds rows to a feature store: collects them and writes them as shards, in a thread of its own.

Owns what is not on disk yet. A full disk ends it with all shards before whole; rows can be read from here until the
store has them. Called by what makes features: `store_worker.py`, `store_build.py`, `store_import.py`.
"""

import errno
import os
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dflash_graph.store import FeatureStore, gib
from dflash_graph.store_shard import StoredRow, remove_unfinished, write_shard

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreFullError(ValueError):
    """The disk took no more; whole shards were kept."""


class StoreWriter:
    """Collects rows and writes them as shards, in a thread of its own; any thread may add.

    At most two shards of rows are in memory, one of them on its way to disk. What is not flushed is lost with the
    process.

    Args:
        shard_bytes: a shard is written once its rows reach this size. flush_s: or once the first waits for so long.
        origin: what makes the features, kept in each shard.

    Attributes:
        num_rows, num_bytes: on disk.
    """

    def __init__(
        self, store: FeatureStore, *, origin: dict[str, Any], shard_bytes: int = 1 << 30, flush_s: float = 60.0
    ) -> None:
        self._store, self._origin, self._shard_bytes, self._flush_s = store, origin, shard_bytes, flush_s
        self._rows: dict[bytes, StoredRow] = {}
        self._going: dict[bytes, StoredRow] = {}  # on their way to disk
        self._bytes, self._since = 0, 0.0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._write_in_flight: Future[None] | None = None
        self._failed: BaseException | None = None
        self.num_rows = self.num_bytes = 0
        remove_unfinished(store.folder / "shards")

    def pending(self, key: bytes) -> StoredRow | None:
        """A row that was added and may not be on disk yet. One that is not pending any more is in the store."""
        return self._rows.get(key) or self._going.get(key)

    def add(self, row: StoredRow) -> None:
        """Take a row, whose arrays must not change any more; one that is there already is dropped.

        Raises:
            StoreFullError: an earlier shard could not be written for want of space.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self.pending(row.key) is not None or row.key in self._store:
                return
            if not self._rows:
                self._since = time.monotonic()
            self._rows[row.key] = row
            self._bytes += row.nbytes
            if self._bytes >= self._shard_bytes or time.monotonic() - self._since >= self._flush_s:
                self._start()

    def flush(self) -> None:
        """Write what was added, and wait until it is on disk. Does nothing once an error has been raised.

        Raises:
            StoreFullError: the disk is full; the rows are given up, and what stood there before is whole.
        """
        with self._lock:
            if self._failed is None:
                if self._rows:
                    self._start()
                self._finish()

    def _start(self) -> None:
        """Send the rows collected on their way, when those before have arrived."""
        self._finish()
        # In this order: whoever looks meanwhile finds a row in one place or the other.
        self._going = self._rows
        self._rows, self._bytes = {}, 0
        self._write_in_flight = self._thread.submit(self._write, self._going)

    def _finish(self) -> None:
        write, self._write_in_flight = self._write_in_flight, None
        if write is None:
            return
        try:
            write.result()
        except BaseException as error:
            self._failed = error  # the rows stay readable here: others may be about to
            raise

    def _write(self, rows: dict[bytes, StoredRow]) -> None:
        size, folder = sum(row.nbytes for row in rows.values()), self._store.folder
        try:
            name = f"{time.time_ns():016x}-{uuid.uuid4().hex[:8]}"
            write_shard(folder / "shards", name, self._store.spec, list(rows.values()), self._origin)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StoreFullError(
                f"the disk of store {folder} is full ({os.strerror(error.errno)}): {self.num_rows} rows were added and "
                f"are kept, the next {len(rows)} rows ({gib(size)}) were not. Free space or move the store; the same "
                "command then goes on where this one stopped"
            ) from None
        self._store.refresh()
        self.num_rows += len(rows)
        self.num_bytes += size
        self._going = {}  # only now: until they are in the store, others find them here
