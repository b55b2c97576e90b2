"""The folder in which a preparation works: held by one process, and exchanged for the finished folder as a whole.

Knows nothing of what is written. Called by data.py.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def check_space(text: int, work: Path) -> None:
    """Say early that the disk may not do: shards and rows take some 5 bytes for a token, which is 4 bytes of text."""
    free = shutil.disk_usage(work).free
    if free < 2.5 * text:
        logger.warning(
            "%s has %.1f GB free; %.1f GB of text may need up to %.1f GB there",
            work,
            free / 1e9,
            text / 1e9,
            text * 2.5e-9,
        )


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Hold the work folder for this process alone; others wait."""
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = (work / "lock").open("w")
        except FileNotFoundError:
            continue  # whoever had it has just removed it
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("another process prepares the same data in %s; waiting for it", work)
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(lock.fileno()), (work / "lock").stat())
            except FileNotFoundError:
                same = False
            if same:
                yield
                return


def put_in_place(result: Path, folder: Path) -> None:
    """Rename the finished `result` to `folder`; a damaged folder that stands there gives way."""
    try:
        result.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        # A damaged folder stands there: a whole one would have been opened.
        shutil.rmtree(folder)
        result.rename(folder)
