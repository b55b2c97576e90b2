"""Tokenised rows on disk, memory-mapped: all that the rest of the package sees of the data.

Owns the reading of a finished cache folder and the check that it is whole. It never writes. Made by data.py.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.data_report import DataReport

HOLDOUT = "holdout"  # the folder, inside that of the training rows, of those that are held out
SCAN_TOKENS = 1 << 24  # read at once where all tokens are read


class TokenRows:
    """Tokenised rows, memory-mapped and read-only.

    Attributes:
        tokens: (num_tokens,) int32, all rows one after the other.
        loss_mask: (num_tokens,) uint8, 1 on supervised tokens.
        offsets: (n + 1,) int64; row i is [offsets[i], offsets[i + 1]).
        fingerprint: sha256 hex of file contents, tokenizer, template and every setting.
        report: what became of the input.
        files: names of the files that the rows come from; `origins` points at them.
        build: what making them took: seconds, workers, rows and tokens per second.
    """

    def __init__(self, folder: Path) -> None:
        """Open a finished cache folder.

        Raises:
            ValueError: the folder is half-written or damaged.
        """
        self.folder = folder
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            num_rows, num_tokens = int(meta["num_rows"]), int(meta["num_tokens"])
            self.fingerprint: str = meta["fingerprint"]
            self.report = DataReport.from_dict(meta["report"])
            self.files: list[str] = meta["files"]
            self.build: dict[str, Any] = meta["build"]
            sizes = {name: (folder / name).stat().st_size for name in ("tokens.bin", "loss_mask.bin", "offsets.bin")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"damaged data cache {folder}: {error}") from None
        wanted = {"tokens.bin": 4 * num_tokens, "loss_mask.bin": num_tokens, "offsets.bin": 8 * (num_rows + 1)}
        if sizes != wanted or num_rows < 1:
            raise ValueError(f"damaged data cache {folder}: files must have {wanted} bytes; found {sizes}")
        # Plain views of the maps: slicing an np.memmap itself is several times slower.
        self.tokens: NDArray[np.int32] = np.asarray(np.memmap(folder / "tokens.bin", np.int32, "r"))
        self.loss_mask: NDArray[np.uint8] = np.asarray(np.memmap(folder / "loss_mask.bin", np.uint8, "r"))
        self.offsets: NDArray[np.int64] = np.fromfile(folder / "offsets.bin", np.int64)
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or bool((np.diff(self.offsets) < 2).any()):
            raise ValueError(f"damaged data cache {folder}: offsets.bin does not describe {num_tokens} tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """(n,) int32, tokens of each row."""
        return np.diff(self.offsets).astype(np.int32)

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Row i's (length,) tokens and loss mask, as read-only views of the files."""
        if not 0 <= i < len(self):
            raise IndexError(f"row must be in [0, {len(self)}); found {i}")
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[part], self.loss_mask[part]

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """(vocab_size,) int64: how often each id is a supervised token that can be predicted (not first of its row).

        Raises:
            ValueError: a row holds an id outside the vocabulary.
        """
        if self.report.max_token_id >= vocab_size:
            raise ValueError(
                f"token ids must be below the target's vocabulary of {vocab_size}; found {self.report.max_token_id}: "
                "the tokenizer does not belong to this target"
            )
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(self.tokens), SCAN_TOKENS):
            part = slice(start, start + SCAN_TOKENS)
            supervised = self.tokens[part][self.loss_mask[part] == 1]
            counts += np.bincount(supervised, minlength=vocab_size)
        starts = self.offsets[:-1]
        counts -= np.bincount(self.tokens[starts[self.loss_mask[starts] == 1]], minlength=vocab_size)
        return counts

    @cached_property
    def origins(self) -> NDArray[Any]:
        """(n,) records of data_writer.ORIGIN: where each row comes from, its length before truncation, its keys."""
        origins: NDArray[Any] = np.load(self.folder / "origins.npy")
        if len(origins) != len(self):
            raise ValueError(f"damaged data cache {self.folder}: origins.npy describes {len(origins)} rows")
        return origins

    @cached_property
    def holdout(self) -> "TokenRows | None":
        """The rows that were held out of these, or None."""
        folder = self.folder / HOLDOUT
        return TokenRows(folder) if folder.is_dir() else None

    def where(self, i: int) -> str:
        """File and line of row i."""
        origin = self.origins[i]
        return f"{self.files[origin['file']]}:{origin['number']}"
