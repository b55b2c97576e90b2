"""Streams conversations to files of tokens and counts what became of every row.

Owns the writer behind `data.prepare` and its report. Every row of the input is either kept or counted under one
reason; memory stays bounded by one batch, whatever the size of the files. Called by data.py.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from dflash_graph.chat import ChatEncoder, Conversation, EncodedRow, RowError, parse_line

_BATCH_ROWS = 256
_BATCH_BYTES = 2 << 20  # of JSON text held at once, so that long rows do not add up
CUT_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class CutShare(NamedTuple):
    """What a max_length would cut: shares in [0, 1] of all usable rows, before any truncation."""

    rows: float
    tokens: float
    supervised: float


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What became of the input: rows_in == kept + sum(dropped.values()).

    Attributes:
        dropped: rows by reason; `first_dropped` names the first one of each, as file:line and detail.
        truncated: kept rows that were cut to max_length.
        num_tokens, num_supervised: of the kept rows, after truncation.
        length_quantiles: share in [0, 1] -> length in tokens of the kept rows.
        cut_share: max_length -> share of rows it would truncate, of tokens and of supervised tokens it would lose.
        mask_source: "generation tags" or "prefix rendering".
        max_token_id: highest token id of the kept rows.
    """

    rows_in: int
    kept: int
    dropped: dict[str, int]
    first_dropped: dict[str, str]
    truncated: int
    max_length: int
    num_tokens: int
    num_supervised: int
    length_quantiles: dict[float, int]
    cut_share: dict[int, CutShare]
    mask_source: str
    max_token_id: int

    @property
    def supervised_share(self) -> float:
        return self.num_supervised / self.num_tokens if self.num_tokens else 0.0

    def __str__(self) -> str:
        lines = [f"rows        {self.rows_in:,} in = {self.kept:,} kept + {sum(self.dropped.values()):,} dropped"]
        lines += _dropped_lines(self.dropped, self.first_dropped)
        lines.append(f"truncated   {self.truncated:,} kept rows cut to max_length = {self.max_length:,}")
        lines.append(
            f"tokens      {self.num_tokens:,}, of which {self.num_supervised:,} supervised "
            f"({self.supervised_share:.1%}; mask from {self.mask_source})"
        )
        quantiles = "  ".join(f"{share:.0%} {length:,}" for share, length in self.length_quantiles.items())
        lines.append(f"lengths     {quantiles}")
        lines.append("max_length  truncates rows  loses tokens  loses supervised tokens")
        for length, cut in self.cut_share.items():
            lines.append(f"{length:>10,}  {cut.rows:>14.2%}  {cut.tokens:>12.2%}  {cut.supervised:>23.2%}")
        return "\n".join(lines)


def _dropped_lines(dropped: dict[str, int], first: dict[str, str]) -> list[str]:
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return [f"  dropped   {count:,} {reason} (first: {first[reason]})" for reason, count in ordered]


def _lines(paths: Sequence[Path]) -> Iterator[tuple[bytes, str]]:
    """Non-blank lines of all files and where they stand. A byte-order mark and carriage returns are no content."""
    with tqdm(total=sum(p.stat().st_size for p in paths), unit="B", unit_scale=True, desc="data", disable=None) as bar:
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    bar.update(len(line))
                    text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
                    if text:
                        yield text, f"{path.name}:{number}"


@dataclass
class RowWriter:
    """Streams rows to the two open files and counts everything the report needs."""

    encoder: ChatEncoder
    max_length: int
    tokens: BinaryIO
    loss_mask: BinaryIO
    offsets: "array[int]" = field(default_factory=lambda: array("q", [0]))

    def __post_init__(self) -> None:
        self.rows_in = self.truncated = self.num_supervised = 0
        self.max_token_id = -1
        self.dropped: Counter[str] = Counter()
        self.first_dropped: dict[str, str] = {}
        # Before truncation: usable rows, their tokens, their supervised tokens; and what each length would cut.
        self.usable = np.zeros(3, dtype=np.int64)
        self.cut = np.zeros((len(CUT_LENGTHS), 3), dtype=np.int64)

    def add_lines(self, paths: Sequence[Path]) -> None:
        batch: list[Conversation] = []
        batch_bytes = 0
        for line, where in _lines(paths):
            self.rows_in += 1
            try:
                batch.append(parse_line(line, where))
            except RowError as error:
                self._drop(error, where)
                continue
            batch_bytes += len(line)
            if len(batch) >= _BATCH_ROWS or batch_bytes >= _BATCH_BYTES:
                self._add_batch(batch)
                batch, batch_bytes = [], 0
        self._add_batch(batch)

    def _add_batch(self, batch: list[Conversation]) -> None:
        if not batch:
            return
        for conversation, row in zip(batch, self.encoder.encode(batch), strict=True):
            try:
                if isinstance(row, RowError):
                    raise row
                self._add_row(row)
            except RowError as error:
                self._drop(error, conversation.where)

    def _add_row(self, row: EncodedRow) -> None:
        length, num_supervised = len(row.tokens), int(row.loss_mask.sum())
        if num_supervised == 0:
            raise RowError("no_supervised_token", "the template marks no token of the row as the assistant's")
        self.usable += (1, length, num_supervised)
        for i, limit in enumerate(CUT_LENGTHS):
            if length > limit:
                self.cut[i] += (1, length - limit, int(row.loss_mask[limit:].sum()))
        tokens, mask = row.tokens[: self.max_length], row.loss_mask[: self.max_length]
        if not mask.any():
            raise RowError("supervised_tokens_cut", f"{length} tokens, none of the first {self.max_length} supervised")
        if not (mask[:-1] & mask[1:]).any():
            raise RowError("no_candidate_anchor", "no two supervised tokens stand side by side")
        self.tokens.write(tokens.tobytes())
        self.loss_mask.write(mask.tobytes())
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.num_supervised += int(mask.sum())
        self.truncated += length > self.max_length
        self.max_token_id = max(self.max_token_id, int(tokens.max()))

    def _drop(self, error: RowError, where: str) -> None:
        self.dropped[error.reason] += 1
        if error.reason not in self.first_dropped:
            self.first_dropped[error.reason] = f"{where}: {error}"[:200]

    def report(self) -> DataReport:
        """The finished report.

        Raises:
            ValueError: nothing is trainable, or everything is supervised.
        """
        kept, num_tokens = len(self.offsets) - 1, self.offsets[-1]
        assert self.rows_in == kept + self.dropped.total()
        if kept == 0:
            reasons = "\n".join(_dropped_lines(dict(self.dropped), self.first_dropped))
            raise ValueError(_no_trainable_row(self.rows_in, reasons, self.max_length))
        if self.num_supervised >= num_tokens - kept:
            raise ValueError(
                f"the loss mask must cover assistant tokens only; found {self.num_supervised} of {num_tokens} tokens "
                "supervised: the template's {% generation %} tags enclose the prompt too. Correct the tags"
            )
        lengths = np.diff(self.offsets)
        quantiles = np.quantile(lengths, _QUANTILES, method="nearest")
        shares = self.cut / np.maximum(self.usable, 1)
        return DataReport(
            rows_in=self.rows_in,
            kept=kept,
            dropped=dict(sorted(self.dropped.items())),
            first_dropped=dict(sorted(self.first_dropped.items())),
            truncated=self.truncated,
            max_length=self.max_length,
            num_tokens=num_tokens,
            num_supervised=self.num_supervised,
            length_quantiles={share: int(value) for share, value in zip(_QUANTILES, quantiles, strict=True)},
            cut_share={length: CutShare(*map(float, shares[i])) for i, length in enumerate(CUT_LENGTHS)},
            mask_source="generation tags" if self.encoder.has_generation_tags else "prefix rendering",
            max_token_id=self.max_token_id,
        )


def _no_trainable_row(rows_in: int, reasons: str, max_length: int) -> str:
    if rows_in == 0:
        return "no trainable row: the data files hold no line. A file has one JSON object per line"
    return (
        f"no trainable row among {rows_in:,}:\n{reasons}\n"
        "A row is one JSON object per line with `messages` (role, content) or `conversations` (from, value): an "
        "optional system message, then user and assistant in turn. A row needs two supervised tokens side by side "
        f"within max_length = {max_length}; raise data.max_length if rows are cut"
    )
