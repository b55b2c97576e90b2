"""Any input as numbered rows, in blocks that can be read from anywhere: by several processes, or where one stopped.

Owns what a source is once its files are known: lines of JSON (`LineFile`) or a table (`Table`, memory-mapped through
`datasets`), a digest of the content, and the cut into blocks. Lines are cut by our own reader, because a damaged line
must be counted as one dropped row where the JSON reader of `datasets` gives up on the file. Nothing is skipped in
silence: blank lines are no rows, everything else is yielded. Called by data.py and by whoever reads rows.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_graph.config_groups import SourceConfig
from dflash_graph.row_shapes import UNKNOWN_SHAPE, Row, parse_line, parse_row
from dflash_graph.row_values import RowError
from dflash_graph.source_files import (
    HUB,
    InputFile,
    as_source,
    file_digest,
    find_files,
    is_datasets_folder,
)
from dflash_graph.spill import arrow_of, lines_of, naming

BLOCK_BYTES = 4 << 20  # of lines; a block is what a worker takes and what a killed preparation loses
_BLOCK_ROWS = 2048  # of a table, at most
_BATCH = 1000
_UNDECODED = ("Image", "Audio", "Video", "Pdf", "Nifti")  # kinds of columns that hold no text and cost time to decode


@dataclass(frozen=True)
class RawRow:
    """One row as it was found: a decoded record, a line of JSON, or the reason why it could not be read."""

    value: object  # a dict, as a rule; bytes: a line to parse; RowError: unreadable
    where: str


def parse_raw(raw: RawRow) -> Row:
    """A raw row as what it says.

    Raises:
        RowError: it could not be read, or is no row.
    """
    if isinstance(raw.value, RowError):
        raise raw.value
    return parse_line(raw.value, raw.where) if isinstance(raw.value, bytes) else parse_row(raw.value, raw.where)


@dataclass(frozen=True)
class Block:
    """A stretch of one part: bytes [start, stop) of a file of lines, or rows [start, stop) of a table.

    Attributes:
        number: line or row number (from 1) of its first row.
        rows: how many rows it holds, about (blank lines count here).
    """

    start: int
    stop: int
    number: int
    rows: int


@dataclass(frozen=True)
class LineFile:
    """A file of lines of JSON, whole or up to byte `stop`."""

    name: str
    path: Path
    stop: int

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.stop

    def blocks(self, threads: int = 1) -> list[Block]:
        """Blocks of about BLOCK_BYTES that begin with a line."""

        def scan(start: int) -> tuple[int, int]:
            """Line ends in the stretch from the byte before `start`, and the first one's place (-1 if none)."""
            begin, end = max(0, start - 1), min(start - 1 + BLOCK_BYTES, self.stop)
            with self.path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
            first = data.find(b"\n")
            return data.count(b"\n"), begin + first if first >= 0 else -1

        starts = range(0, self.stop, BLOCK_BYTES)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            scanned = list(pool.map(scan, starts))
        edges, lines = [(0, 1)] if self.stop else [], 0
        for i, (count, first) in enumerate(scanned):
            if i > 0 and 0 <= first < self.stop - 1:
                edges.append((first + 1, lines + 2))
            lines += count
        edges.append((self.stop, lines + 2))
        return [Block(a, b, number, after - number) for (a, number), (b, after) in pairwise(edges)]

    def read(self, block: Block) -> Iterator[RawRow]:
        """The block's lines that are not blank. A byte-order mark and carriage returns are no content."""
        with self.path.open("rb") as file:
            file.seek(block.start)
            data = file.read(block.stop - block.start)
        if len(data) != block.stop - block.start:
            raise ValueError(f"{self.path} changed while it was read: it ends before byte {block.stop}")
        for number, line in enumerate(data.split(b"\n"), block.number):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if text:
                yield RawRow(text, f"{self.name}:{number}")


@dataclass(frozen=True)
class Table:
    """The first `stop` rows of a `datasets.Dataset`, memory-mapped; it travels to another process as a path."""

    name: str
    dataset: Any
    stop: int

    @property
    def size(self) -> int:
        """Bytes in Arrow's form."""
        return int(self.dataset.data.nbytes * self.stop / max(1, self.dataset.data.num_rows))

    def blocks(self, threads: int = 1) -> list[Block]:
        """Blocks of rows, fewer where rows are large."""
        rows = _BLOCK_ROWS
        while rows > 16 and rows * self.size > BLOCK_BYTES * max(1, self.stop):
            rows //= 2
        return [Block(i, min(i + rows, self.stop), i + 1, min(rows, self.stop - i)) for i in range(0, self.stop, rows)]

    def read(self, block: Block) -> Iterator[RawRow]:
        """The block's rows, each a dict of all columns."""
        try:
            columns = self.dataset[block.start : block.stop]
        except UnicodeDecodeError:
            yield from (self._read_alone(i) for i in range(block.start, block.stop))
            return
        for i in range(block.stop - block.start):
            yield RawRow({name: column[i] for name, column in columns.items()}, f"{self.name}:{block.start + i + 1}")

    def _read_alone(self, i: int) -> RawRow:
        try:
            return RawRow(self.dataset[i], f"{self.name}:{i + 1}")
        except UnicodeDecodeError as error:
            return RawRow(RowError("invalid_utf8", str(error)), f"{self.name}:{i + 1}")


@dataclass(frozen=True)
class Source:
    """One source of the configuration: files found, content digested.

    Attributes:
        name: what reports call it.
        digest: sha256 hex of the content, whatever its path.
        files: in order; empty for a `datasets` folder or a hub id, whose rows are `dataset`.
    """

    config: SourceConfig
    name: str
    digest: str
    files: tuple[InputFile, ...] = ()
    dataset: Any = None
    stamps: tuple[tuple[int, int], ...] = ()  # of each file, before it was digested

    def check_unchanged(self) -> None:
        """Refuse files that were written to since they were digested: the digest would stand for other rows.

        Raises:
            ValueError: one was.
        """
        for file, stamp in zip(self.files, self.stamps, strict=True):
            if not file.path.exists() or _stamp(file.path) != stamp:
                raise ValueError(f"the data file {file.path} changed while it was read: run again once it is complete")

    def parts(self, work: Path) -> list[LineFile | Table]:
        """Files and tables in order, cut to `max_rows`; what can only be read from its start is unpacked into `work`.

        Raises:
            ValueError: a file is damaged, or a table has no column that a row could be made of.
        """
        left = self.config.max_rows
        parts: list[LineFile | Table] = []
        for i, file in enumerate(self.files):
            part = _open_file(file, work / f"{self.digest[:16]}-{i}", left)
            parts.append(part)
            if left is not None and (left := left - _count_rows(part)) <= 0:
                break
        if self.dataset is not None:
            parts.append(Table(self.name, self.dataset, min(len(self.dataset), left or len(self.dataset))))
        for part in parts:
            _check_columns(part)
        return parts

    def __iter__(self) -> Iterator[RawRow]:
        """Every row in order."""
        with tempfile.TemporaryDirectory(prefix="dflash-graph-") as work:
            for part in self.parts(Path(work)):
                for block in part.blocks():
                    yield from part.read(block)


def open_source(spec: str | SourceConfig, *, threads: int = 1) -> Source:
    """Find a source's files, or load its `datasets` folder or hub id, and digest the content.

    Raises:
        ValueError: nothing stands there, it is of an unknown kind, or it cannot be loaded.
    """
    config = as_source(spec)
    path = Path(config.path)
    if config.path.startswith(HUB):
        dataset = _load_hub(config)
    elif path.is_dir() and is_datasets_folder(path):
        dataset = _load_folder(config, path)
    else:
        files = find_files(config)
        stamps = tuple(_stamp(file.path) for file in files)
        digests = [(file.format, file.compression, file_digest(file.path, threads)) for file in files]
        return Source(config, str(config), hashlib.sha256(repr(digests).encode()).hexdigest(), files, stamps=stamps)
    return Source(config, str(config), _dataset_digest(dataset, config.path), dataset=_without_media(dataset))


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _load_hub(config: SourceConfig) -> Any:
    import datasets

    name, _, split = config.path.removeprefix(HUB).partition(":")
    if split and config.split not in (None, split):
        raise ValueError(f"the split of {config.path} is named twice; found also split={config.split}")
    if not name:
        raise ValueError(f"a hub id must look like hf:org/name or hf:org/name:split; found {config.path!r}")
    try:
        return datasets.load_dataset(name, config.subset, split=split or config.split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot load the data set {name!r} from the hub: {error}. Check the name, the split and the subset (which "
            "its source may set), or the network; a local copy can be named by its path"
        ) from error


def _load_folder(config: SourceConfig, path: Path) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the `datasets` folder {path} is damaged: {error}") from error
    splits = list(loaded) if isinstance(loaded, datasets.DatasetDict) else []
    chosen = config.split or (splits[0] if len(splits) == 1 else "train")
    if splits and chosen not in splits:
        raise ValueError(f"the source {path} must name one of its splits, {', '.join(splits)}; found split={chosen}")
    if not splits and config.split is not None:
        raise ValueError(f"the `datasets` folder {path} has no splits; found split={config.split}")
    return loaded[chosen] if splits else loaded


def _dataset_digest(dataset: Any, name: str) -> str:
    """sha256 hex of the columns and all rows, in Arrow's serialisation.

    Raises:
        ValueError: an offset points outside its batch: reading there could end the process.
    """
    import pyarrow as pa

    whole = hashlib.sha256(repr(dataset.features).encode())
    try:
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
            table.validate(full=True)
            for batch in table.combine_chunks().to_batches():
                whole.update(batch.serialize())
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"the `datasets` folder or hub id {name} is damaged: {error}") from error
    return whole.hexdigest()


def _without_media(dataset: Any) -> Any:
    media = [name for name, feature in dataset.features.items() if type(feature).__name__ in _UNDECODED]
    return dataset.remove_columns(media).with_format(None)


def _open_file(file: InputFile, target: Path, max_rows: int | None) -> LineFile | Table:
    if file.format in ("parquet", "arrow"):
        import datasets

        arrow_of(file, target)
        with naming(file):
            dataset = _without_media(datasets.Dataset.from_file(str(target)))
        return Table(file.path.name, dataset, len(dataset) if max_rows is None else min(max_rows, len(dataset)))
    path = file.path
    if file.format == "json" or file.compression is not None:
        lines_of(file, target, _is_row)
        path = target
    stop = path.stat().st_size if max_rows is None else _end_of_row(path, max_rows)
    return LineFile(file.path.name, path, stop)


def _end_of_row(path: Path, count: int) -> int:
    """Byte behind the `count`-th line that is not blank, or the file's size."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            count -= bool(line.removeprefix(b"\xef\xbb\xbf").strip())
            if count == 0:
                break
    return end


def _count_rows(part: LineFile | Table) -> int:
    if isinstance(part, Table):
        return part.stop
    return sum(1 for block in part.blocks() for _ in part.read(block))


def _is_row(value: object) -> bool:
    try:
        parse_row(value, "")
    except RowError:
        return False
    return True


def _check_columns(part: LineFile | Table) -> None:
    """Refuse a table of which no row is of any known shape: its columns are others than anybody's."""
    if isinstance(part, LineFile) or part.stop == 0:
        return
    for row in (row for block in part.blocks() for row in part.read(block)):
        try:
            parse_raw(row)
        except RowError as error:
            if error.reason == UNKNOWN_SHAPE:
                continue
        return
    raise ValueError(
        f"{part.name} must have columns that rows can be made of (`messages` or `conversations`; `input_ids` and "
        f"`loss_mask`; `prompt` and `completion`; `text`) and hold something there; found the columns "
        f"{', '.join(part.dataset.column_names)}"
    )
