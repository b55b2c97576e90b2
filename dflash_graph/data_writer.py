"""Puts the shards of a preparation together: the selected rows in order, the held-out ones apart, and the report.

Owns what looks at all rows at once. Memory holds the records of all rows (48 bytes each) and the tokens of one shard,
whatever the size of the data. Called by data.py, once all shards stand.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.data_report import CutShare, DataReport, SourceReport, no_trainable_row
from dflash_graph.selection import DUPLICATE, HELD_OUT, SelectionRules, select
from dflash_graph.shards import CUT_LENGTHS, ROW, load_shard, shard_path

_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# Where each written row comes from: an index into meta.json's `files`, its line or row number there, its length before
# truncation and its keys.
ORIGIN = np.dtype([("file", "<i4"), ("number", "<i8"), ("full_length", "<i4"), ("content", "S16"), ("prompt", "S16")])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the shards of a preparation hold.

    Attributes:
        folder: of the shards.
        files: name of each file, or table.
        shard_files: the file that each shard is a block of, as an index into `files`.
        file_sources: the source that each file belongs to, as an index into `source_names`.
    """

    folder: Path
    files: Sequence[str]
    shard_files: Sequence[int]
    file_sources: Sequence[int]
    source_names: Sequence[str]


class Writer:
    """Selects and writes the rows of all shards."""

    def __init__(self, layout: Layout, rules: SelectionRules, max_length: int, known: NDArray[Any] | None) -> None:
        self.layout, self.max_length, self.rules = layout, max_length, rules
        records, first = [], []
        for i in range(len(layout.shard_files)):
            shard = load_shard(shard_path(layout.folder, i), with_tokens=False)
            records.append((shard.rows, shard.reasons))
            first.append(shard.first)
        self.starts = np.cumsum([0, *(len(rows) for rows, _ in records)])  # of each shard's rows among all
        self.rows = np.concatenate([rows for rows, _ in records]) if records else np.empty(0, ROW)
        files = np.repeat(np.asarray(layout.shard_files, np.int32), np.diff(self.starts))
        self.row_files: NDArray[np.int32] = files
        self.row_sources: NDArray[np.int32] = np.asarray(layout.file_sources, np.int32)[files]
        self.selection = select(self.rows, self.row_sources, rules, known)
        self._encode_reasons = [[reasons[r] for r in rows["reason"][rows["reason"] >= 0]] for rows, reasons in records]
        self._first = first

    def where(self, row: int) -> str:
        """File and line of an input row."""
        return f"{self.layout.files[self.row_files[row]]}:{self.rows['number'][row]}"

    def write(self, folder: Path, mask_source: str, *, held_out: bool = False) -> DataReport:
        """Write the training rows, or the held-out ones, into the folder.

        Raises:
            ValueError: nothing is trainable, or everything is supervised.
        """
        selection = self.selection
        copies = selection.held_out.astype(np.int32) if held_out else selection.copies
        sources = self._accounts(copies, held_out)
        rows_in, kept = sum(s.rows_in for s in sources), sum(s.kept for s in sources)
        dropped: Counter[str] = Counter()
        first_dropped: dict[str, str] = {}
        for source in sources:
            dropped.update(source.dropped)
            first_dropped = source.first_dropped | first_dropped
        self._check_kept(rows_in, kept, dict(dropped), first_dropped, held_out)
        totals = _Totals()
        offsets, origins = [np.zeros(1, np.int64)], []
        with (folder / "tokens.bin").open("wb") as tokens, (folder / "loss_mask.bin").open("wb") as loss_mask:
            for i in range(len(self.layout.shard_files)):
                part_lengths, part_origins = self._write_shard(i, copies, tokens, loss_mask, totals, held_out)
                offsets.append(part_lengths)
                origins.append(part_origins)
            for file in (tokens, loss_mask):
                file.flush()
                os.fsync(file.fileno())
        ends = np.cumsum(np.concatenate(offsets))
        ends.tofile(folder / "offsets.bin")
        np.save(folder / "origins.npy", np.concatenate(origins))
        if totals.chat_supervised and totals.chat_supervised >= totals.chat_tokens - totals.chat_rows:
            raise ValueError(
                f"the loss mask must cover assistant tokens only; found {totals.chat_supervised} of "
                f"{totals.chat_tokens} tokens supervised: the template's {{% generation %}} tags enclose the prompt "
                "too. Correct the tags"
            )
        lengths = np.diff(ends)
        shares = totals.cut / np.maximum(totals.usable, 1)
        return DataReport(
            rows_in=rows_in,
            kept=kept,
            dropped=dict(sorted(dropped.items())),
            first_dropped=dict(sorted(first_dropped.items())),
            truncated=totals.truncated,
            max_length=self.max_length,
            num_tokens=int(ends[-1]),
            num_supervised=totals.supervised,
            length_quantiles={
                share: int(value)
                for share, value in zip(_QUANTILES, np.quantile(lengths, _QUANTILES, method="nearest"), strict=True)
            },
            cut_share={length: CutShare(*map(float, shares[i])) for i, length in enumerate(CUT_LENGTHS)},
            mask_source=mask_source,
            max_token_id=totals.max_token_id,
            rows_written=len(lengths),
            parts_dropped=dict(sorted(totals.parts_dropped.items())),
            sources=sources,
        )

    def _check_kept(self, rows_in: int, kept: int, dropped: dict[str, int], first: dict[str, str], held: bool) -> None:
        if kept == 0 and held:
            raise ValueError(
                f"data.holdout = {self.rules.holdout} holds out none of {len(self.rows):,} rows: set a larger share, "
                "or a number of rows"
            )
        if kept == 0 and dropped.get(HELD_OUT):
            raise ValueError(
                f"data.holdout = {self.rules.holdout} leaves nothing to train on: it takes {dropped[HELD_OUT]:,} of "
                f"{rows_in:,} rows. Rows with one prompt are held out together; lower it, or name data.validation"
            )
        if kept == 0:
            raise ValueError(no_trainable_row(rows_in, dropped, first, self.max_length))

    def _accounts(self, copies: NDArray[np.int32], held_out: bool) -> tuple[SourceReport, ...]:
        """Each source's rows in, kept, written and dropped. The held-out set's input is what was held out."""
        count = len(self.layout.source_names)
        kept = np.bincount(self.row_sources[copies > 0], minlength=count)
        written = np.bincount(self.row_sources, weights=copies * self.rows["parts"], minlength=count).astype(np.int64)
        rows_in = kept if held_out else np.bincount(self.row_sources, minlength=count)
        dropped: list[Counter[str]] = [Counter() for _ in range(count)]
        first: list[dict[str, str]] = [{} for _ in range(count)]
        if not held_out:
            for i, reasons in enumerate(self._encode_reasons):
                source = self.layout.file_sources[self.layout.shard_files[i]]
                dropped[source].update(reasons)
                for reason, (row, detail) in self._first[i].items():
                    if reason in dropped[source]:
                        first[source].setdefault(reason, f"{self.where(int(self.starts[i]) + row)}: {detail}"[:200])
            self._add_selected(dropped, first)
        return tuple(
            SourceReport(
                self.layout.source_names[i],
                int(rows_in[i]),
                int(kept[i]),
                int(written[i]),
                dict(sorted(dropped[i].items())),
                dict(sorted(first[i].items())),
            )
            for i in range(count)
        )

    def _add_selected(self, dropped: list[Counter[str]], first: list[dict[str, str]]) -> None:
        taken = np.flatnonzero(self.selection.reason != "")
        for row in taken:
            source, reason = int(self.row_sources[row]), str(self.selection.reason[row])
            dropped[source][reason] += 1
            if reason not in first[source]:
                detail = f": repeats {self.where(int(self.selection.original[row]))}" if reason == DUPLICATE else ""
                first[source][reason] = self.where(int(row)) + detail

    def _write_shard(
        self, i: int, copies: NDArray[np.int32], tokens: Any, loss_mask: Any, totals: "_Totals", held_out: bool
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        shard = load_shard(shard_path(self.layout.folder, i))
        part_rows = shard.parts["row"].astype(np.int64)
        mine = copies[self.starts[i] : self.starts[i + 1]]
        totals.add(
            shard.parts, mine[part_rows], shard.rows["reason"][part_rows], shard.reasons, self.max_length, held_out
        )
        written = shard.parts["reason"] < 0
        ends = np.cumsum(np.where(written, shard.parts["length"], 0))
        times = np.where(written, mine[part_rows], 0)
        # All parts of a row stand together, and its copies one after the other: order[j] is the part written j-th.
        order = _copies_of_rows(part_rows, times)
        begin, end = ends[order] - shard.parts["length"][order], ends[order]
        if len(order) == int(written.sum()) and bool((times[written] == 1).all()):
            shard.tokens.tofile(tokens)
            shard.loss_mask.tofile(loss_mask)
        elif len(order):
            np.concatenate([shard.tokens[a:b] for a, b in zip(begin, end, strict=True)]).tofile(tokens)
            np.concatenate([shard.loss_mask[a:b] for a, b in zip(begin, end, strict=True)]).tofile(loss_mask)
        origins = np.zeros(len(order), ORIGIN)
        origins["file"] = self.layout.shard_files[i]
        origins["full_length"] = shard.parts["full_length"][order]
        for name in ("number", "content", "prompt"):
            origins[name] = shard.rows[name][part_rows[order]]
        return (end - begin).astype(np.int64), origins


def _copies_of_rows(part_rows: NDArray[np.int64], times: NDArray[Any]) -> NDArray[np.int64]:
    """Part indices in the order of writing: the rows in order, each row's parts as a group, the group repeated."""
    order: list[int] = []
    index = np.flatnonzero(times > 0)
    if bool((times[index] == 1).all()):
        return index
    at = 0
    while at < len(index):
        stop = at
        while stop < len(index) and part_rows[index[stop]] == part_rows[index[at]]:
            stop += 1
        order += index[at:stop].tolist() * int(times[index[at]])
        at = stop
    return np.asarray(order, np.int64)


class _Totals:
    """Sums over the parts of all shards."""

    def __init__(self) -> None:
        self.truncated = self.supervised = self.chat_rows = self.chat_tokens = self.chat_supervised = 0
        self.max_token_id = -1
        self.parts_dropped: Counter[str] = Counter()
        # Before truncation: usable rows, their tokens, their supervised tokens; and what each length would cut.
        self.usable = np.zeros(3, dtype=np.int64)
        self.cut = np.zeros((len(CUT_LENGTHS), 3), dtype=np.int64)

    def add(
        self,
        parts: NDArray[Any],
        copies: NDArray[np.int32],  # of each part's row
        row_reason: NDArray[np.int16],  # of each part's row
        reasons: Sequence[str],
        max_length: int,
        held_out: bool,
    ) -> None:
        """Count a shard's parts, as often as they are written."""
        good = parts["reason"] < 0
        times = np.where(good, copies, 0).astype(np.int64)
        self.truncated += int(times[parts["full_length"] > max_length].sum())
        self.supervised += int((times * parts["supervised"]).sum())
        chat = times * (parts["text"] == 0)
        self.chat_rows += int(chat.sum())
        self.chat_tokens += int((chat * parts["length"]).sum())
        self.chat_supervised += int((chat * parts["supervised"]).sum())
        if bool((times > 0).any()):
            self.max_token_id = max(self.max_token_id, int(parts["max_token_id"][times > 0].max()))
        alone = ~good & (row_reason < 0) & (copies > 0)
        self.parts_dropped.update(reasons[r] for r in parts["reason"][alone])
        # What is dropped for its length was usable before the cut.
        cut = ~good & (parts["full_supervised"] > 0)
        weigh = times + (cut if not held_out else 0)
        full, supervised = parts["full_length"].astype(np.int64), parts["full_supervised"].astype(np.int64)
        self.usable += np.array([weigh.sum(), (weigh * full).sum(), (weigh * supervised).sum()])
        for i, limit in enumerate(CUT_LENGTHS):
            over = np.maximum(full - limit, 0)
            self.cut[i] += np.array(
                [weigh[over > 0].sum(), (weigh * over).sum(), (weigh * parts["lost"][:, i]).sum()], dtype=np.int64
            )


def write_meta(folder: Path, fingerprint: str, report: DataReport, files: Sequence[str], build: dict[str, Any]) -> None:
    """Write meta.json, which makes the folder a finished set of rows."""
    meta = {
        "fingerprint": fingerprint,
        "num_rows": report.rows_written,
        "num_tokens": report.num_tokens,
        "report": asdict(report),
        "files": list(files),
        "build": build,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
