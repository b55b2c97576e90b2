"""The file that regenerated answers are appended to: each row once, whatever is killed, and by one process at a time.

Lines reach the disk at most a second after their answer; what a kill leaves half-written is cut off when the file is
opened again, and those rows are asked again. Called by `regenerate.py`.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SYNC_S = 1.0


class AnswerLog:
    """Answered rows, by number, in one JSONL file, and failed ones in another.

    Attributes:
        answered: numbers of the rows whose answers are in the file.

    Args:
        settings: what the answers depend on; a file of other settings is refused.

    Raises:
        ValueError: another process writes the file, or it holds answers to other rows or settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.failed_path = path, path.with_name(f"{path.stem}.failed{path.suffix}")
        self._settings_path = path.with_name(f"{path.stem}.settings.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = path.with_name(f".{path.name}.lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.close()
            raise ValueError(
                f"{path} is being written by another process; stop it or choose another --output"
            ) from None
        self._check_settings(dict(settings))
        self.answered = self._read()
        self._file = path.open("ab")
        self._failed = self.failed_path.open("wb")  # they are asked again
        self.num_failed = 0
        self._mutex = threading.Lock()
        self._synced = time.monotonic()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if not self.path.exists():
            self._settings_path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(self._settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._lock_file.close()
            raise ValueError(f"{self.path} exists and is not of this command; choose another --output") from None
        changed = [key for key in settings if settings[key] != before.get(key)]
        if changed:
            self._lock_file.close()
            raise ValueError(
                f"{self.path} holds answers that were made with other settings ({', '.join(changed)}); use the same, "
                "or another --output"
            )

    def _read(self) -> set[int]:
        """Numbers of the whole lines; what follows the last of them is cut off."""
        if not self.path.exists():
            return set()
        found: set[int] = set()
        end = 0
        with self.path.open("rb+") as file:
            for line in file:
                try:
                    number = json.loads(line)["row"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    number = None
                if number is None:
                    break
                found.add(int(number))
                end += len(line)
            rest = os.fstat(file.fileno()).st_size - end
            if rest and b"\n" in _from(file, end)[:-1]:
                self._lock_file.close()
                raise ValueError(f"{self.path} is damaged at byte {end}, before its end; repair it or choose another")
            file.truncate(end)
        return found

    def add(self, row: int, record: Mapping[str, Any]) -> None:
        """Append an answered row; it is on disk at most a second later, or when the log is closed.

        Raises:
            RuntimeError: the row has an answer.
        """
        line = json.dumps({"row": row, **record}, ensure_ascii=False).encode() + b"\n"
        with self._mutex:
            if row in self.answered:
                raise RuntimeError(f"row {row} was answered twice")
            self._file.write(line)
            self.answered.add(row)
            if time.monotonic() - self._synced > _SYNC_S:
                self._sync()

    def fail(self, row: int, reason: str) -> None:
        """Note a row that could not be answered."""
        with self._mutex:
            self._failed.write(json.dumps({"row": row, "reason": reason}).encode() + b"\n")
            self._failed.flush()
            self.num_failed += 1

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Bring everything to disk. Idempotent."""
        if self._file.closed:
            return
        with self._mutex:
            self._sync()
            self._file.close()
            self._failed.close()
            self._lock_file.close()
        if not self.num_failed:
            self.failed_path.unlink(missing_ok=True)


def _from(file: Any, start: int) -> bytes:
    file.seek(start)
    content: bytes = file.read()
    return content
