"""One block of raw rows becomes one shard: its tokens and masks, and what became of every row, in one file.

Owns the shard's format and the rules that look at one row alone: parsing, encoding, the cut at max_length and what
makes a row untrainable. A shard depends on its block and the settings only, so that it does not matter which process
makes it, or when. What looks at several rows (duplicates, hold-out, weights) is selection.py's. Called by shard_runner.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_graph.chat import ChatEncoder, EncodedRow
from dflash_graph.row_keys import KEY_BYTES, row_keys
from dflash_graph.row_shapes import Conversation, Row
from dflash_graph.row_values import RowError
from dflash_graph.sources import Block, LineFile, RawRow, Table, parse_raw

_BATCH_ROWS = 256
_BATCH_BYTES = 2 << 20  # of rows tokenised at once, so that long rows do not add up
CUT_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)

# One input row. `reason` is -1, or the index of the reason why it is dropped.
ROW = np.dtype(
    [("number", "<i8"), ("reason", "<i2"), ("parts", "<i2"), ("content", f"S{KEY_BYTES}"), ("prompt", f"S{KEY_BYTES}")]
)
# One encoded row. `length` tokens are in the shard (0 if it is dropped for `reason`); `lost[i]` supervised tokens lie
# behind CUT_LENGTHS[i]; `text` is 1 where every token may be supervised.
PART = np.dtype(
    [
        ("row", "<i4"),
        ("reason", "<i2"),
        ("length", "<i4"),
        ("supervised", "<i4"),
        ("full_length", "<i4"),
        ("full_supervised", "<i4"),
        ("max_token_id", "<i4"),
        ("lost", "<i4", (len(CUT_LENGTHS),)),
        ("text", "u1"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Everything that a process needs to make any shard of a preparation.

    Attributes:
        blocks: (index of a part, its block), one per shard, in the order of the input.
        folder: shard i is the file `shard_path(folder, i)`.
    """

    parts: Sequence[LineFile | Table]
    blocks: Sequence[tuple[int, Block]]
    tokenizer: Any
    template: str | None
    max_length: int
    overlong: Literal["truncate", "drop"]
    folder: Path


def shard_path(folder: Path, index: int) -> Path:
    """Where shard `index` stands."""
    return folder / f"{index:06d}.npz"


@dataclass
class Shard:
    """A finished shard.

    Attributes:
        block: (part, start, stop) of its block.
        tokens, loss_mask: (n,) of all parts that were not dropped, one after the other.
        rows, parts: records of ROW and PART.
        reasons: names of the reasons that records point at.
        first: reason -> index of the first row it dropped, and the detail.
    """

    block: tuple[int, int, int]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    rows: NDArray[Any]
    parts: NDArray[Any]
    reasons: list[str]
    first: dict[str, tuple[int, str]]


def save_shard(shard: Shard, path: Path) -> None:
    """Write a shard so that it stands at `path` whole or not at all."""
    text = json.dumps({"block": shard.block, "reasons": shard.reasons, "first": shard.first})
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            np.savez(
                file,
                tokens=shard.tokens,
                loss_mask=shard.loss_mask,
                rows=shard.rows,
                parts=shard.parts,
                text=np.frombuffer(text.encode(), np.uint8),
            )
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_shard(path: Path, *, with_tokens: bool = True) -> Shard:
    """Read a shard; its checksums are checked on the way. `with_tokens=False` leaves the two large arrays empty.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        with np.load(path) as file:
            text = json.loads(file["text"].tobytes())
            part, start, stop = text["block"]
            return Shard(
                block=(part, start, stop),
                tokens=file["tokens"] if with_tokens else np.empty(0, np.int32),
                loss_mask=file["loss_mask"] if with_tokens else np.empty(0, np.uint8),
                rows=file["rows"],
                parts=file["parts"],
                reasons=text["reasons"],
                first={reason: (int(row), detail) for reason, (row, detail) in text["first"].items()},
            )
    except Exception as error:  # one wrong byte of an archive may raise anything
        raise ValueError(f"damaged shard {path}: {type(error).__name__}: {error}") from error


class ShardMaker:
    """Makes shards of one task in this process."""

    def __init__(self, task: ShardTask) -> None:
        self.task = task
        self.encoder = ChatEncoder(task.tokenizer, task.template)

    def make(self, index: int) -> tuple[int, int]:
        """Make shard `index` and put it in place; its rows and tokens.

        Raises:
            ValueError: the template is unusable, or a file changed.
        """
        part, block = self.task.blocks[index]
        builder = _ShardBuilder(self.task.max_length, self.task.overlong)
        for batch in _batches(self.task.parts[part].read(block)):
            builder.add(self.encoder, batch)
        shard = builder.finish((part, block.start, block.stop))
        save_shard(shard, shard_path(self.task.folder, index))
        return len(shard.rows), len(shard.tokens)


def _batches(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    batch: list[RawRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.value) if isinstance(row.value, bytes) else _BATCH_BYTES // _BATCH_ROWS
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class _ShardBuilder:
    """Collects the records of one block, batch by batch."""

    max_length: int
    overlong: Literal["truncate", "drop"]
    rows: list[tuple[int, int, int, bytes, bytes]] = field(default_factory=list)
    parts: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    loss_mask: list[NDArray[np.uint8]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, encoder: ChatEncoder, batch: Sequence[RawRow]) -> None:
        """Parse and encode a batch; one record per raw row, in order."""
        parsed = [_parsed(raw) for raw in batch]
        good = [row for row in parsed if not isinstance(row, RowError)]
        encoded = iter(encoder.encode(good))
        for raw, row in zip(batch, parsed, strict=True):
            number = int(raw.where.rpartition(":")[2])
            result = row if isinstance(row, RowError) else next(encoded)
            if isinstance(row, RowError) or isinstance(result, RowError):
                assert isinstance(result, RowError)
                self.rows.append((number, self._reason(result), 0, b"", b""))
                continue
            content, prompt = row_keys(row)
            text = not isinstance(row, Conversation)
            errors = [error for part in result if (error := self._add_part(part, text)) is not None]
            kept = len(result) - len(errors)
            if not result:
                errors = [RowError("no_supervised_token", "nothing of the row is the assistant's")]
            self.rows.append((number, -1 if kept else self._reason(errors[0]), kept, content, prompt))

    def _reason(self, error: RowError) -> int:
        self.first.setdefault(error.reason, (len(self.rows), str(error)[:200]))
        return self.reasons.setdefault(error.reason, len(self.reasons))

    def _add_part(self, row: EncodedRow, text: bool) -> RowError | None:
        """Record one encoded row, and keep its tokens unless it cannot be trained on: then the reason is returned."""
        full_length, full_supervised = len(row.tokens), int(row.loss_mask.sum())
        tokens, mask = row.tokens[: self.max_length], row.loss_mask[: self.max_length]
        error = self._untrainable(full_length, full_supervised, mask)
        lost = [int(row.loss_mask[limit:].sum()) if full_length > limit else 0 for limit in CUT_LENGTHS]
        if error is None:
            self.tokens.append(tokens)
            self.loss_mask.append(mask)
        record = (
            len(self.rows),
            -1 if error is None else self.reasons.setdefault(error.reason, len(self.reasons)),
            0 if error else len(tokens),
            0 if error else int(mask.sum()),
            full_length,
            full_supervised,
            -1 if error else int(tokens.max()),
            lost,
            text,
        )
        self.parts.append(record)
        return error

    def _untrainable(self, length: int, supervised: int, mask: NDArray[np.uint8]) -> RowError | None:
        if supervised == 0:
            return RowError("no_supervised_token", "the template marks no token of the row as the assistant's")
        if length > self.max_length and self.overlong == "drop":
            return RowError("overlong", f"{length} tokens, more than max_length = {self.max_length}")
        if not mask.any():
            return RowError("supervised_tokens_cut", f"{length} tokens, none of the first {self.max_length} supervised")
        if not (mask[:-1] & mask[1:]).any():
            return RowError("no_candidate_anchor", "no two supervised tokens stand side by side")
        return None

    def finish(self, block: tuple[int, int, int]) -> Shard:
        """The shard of everything added."""
        return Shard(
            block=block,
            tokens=np.concatenate(self.tokens) if self.tokens else np.empty(0, np.int32),
            loss_mask=np.concatenate(self.loss_mask) if self.loss_mask else np.empty(0, np.uint8),
            rows=np.array(self.rows, dtype=ROW),
            parts=np.array(self.parts, dtype=PART),
            reasons=list(self.reasons),
            first=self.first,
        )


def _parsed(raw: RawRow) -> Row | RowError:
    try:
        return parse_raw(raw)
    except RowError as error:
        return error
