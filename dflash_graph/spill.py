"""Turns files that cannot be read from the middle into files that can, in the work folder of a preparation.

A compressed file or a JSON document becomes plain lines of JSON, a Parquet or Feather file becomes an Arrow stream in
small batches. The result is put in place whole, so that a preparation that was killed finds it again. A file that is
cut off or damaged is an error with its name. Called by sources.py.
"""

import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dflash_graph.json_documents import iterate_rows
from dflash_graph.source_files import InputFile

_COPY = 1 << 20
_BATCH_ROWS = 256  # of an Arrow stream: what a reader of one row pays for


@contextmanager
def _whole_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that stands at `target` once it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def open_bytes(file: InputFile) -> IO[bytes]:
    """The file's content, decompressed.

    Raises:
        ValueError: this installation cannot read the compression.
    """
    if file.compression is None:
        return file.path.open("rb")
    from fsspec.compression import compr

    if file.compression not in compr:
        raise ValueError(
            f"cannot decompress {file.path}: this installation knows no {file.compression}. Decompress the file, or "
            "run `pip install zstandard` for .zst"
        )
    return compr[file.compression](file.path.open("rb"), mode="rb")  # type: ignore[no-any-return]


@contextmanager
def naming(file: InputFile) -> Iterator[None]:
    """Turn what goes wrong inside a damaged file into an error that names it."""
    import pyarrow as pa

    damaged = (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, MemoryError, pa.ArrowException)
    try:
        yield
    except damaged as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's matter, such as a full disk
        kind = file.format if file.compression is None else f"{file.compression} ({file.format})"
        raise ValueError(
            f"the data file {file.path} is damaged or no {kind} file: {error}. Fetch it again, or take it out of the "
            "data"
        ) from error


def lines_of(file: InputFile, target: Path, is_row: Callable[[object], bool]) -> None:
    """Write the rows of a compressed or JSON file as lines of JSON to `target`, unless they stand there."""
    if target.exists():
        return
    with _whole_file(target) as out, naming(file), open_bytes(file) as stream:
        if file.format == "jsonl":
            while chunk := stream.read(_COPY):
                out.write(chunk)
            return
        # Bytes that are no UTF-8 become lone surrogates, which the reader of rows refuses one row at a time.
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape")
        for row in iterate_rows(text, is_row):
            out.write(json.dumps(row).encode() + b"\n")


def arrow_of(file: InputFile, target: Path) -> None:
    """Write a Parquet or Arrow file as an Arrow stream of small batches to `target`, unless it stands there."""
    import pyarrow as pa

    if target.exists():
        return
    with _whole_file(target) as out, naming(file), open_bytes(file) as stream:
        schema, batches = (_parquet if file.format == "parquet" else _arrow)(stream)
        with pa.ipc.new_stream(out, schema) as writer:
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    writer.write_batch(batch.slice(start, _BATCH_ROWS))


def _parquet(stream: IO[bytes]) -> tuple[Any, Iterator[Any]]:
    import pyarrow.parquet as pq

    reader = pq.ParquetFile(stream, pre_buffer=False, buffer_size=_COPY)
    return reader.schema_arrow, reader.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


def _arrow(stream: IO[bytes]) -> tuple[Any, Iterator[Any]]:
    """An Arrow file, or the stream format that `datasets` writes.

    Batches are checked throughout: an offset that points outside could end the process that reads there.
    """
    import pyarrow as pa

    def checked(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            batch.validate(full=True)
            yield batch

    try:
        reader = pa.ipc.open_file(stream)
        return reader.schema, checked(reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        stream.seek(0)
        batches = pa.ipc.open_stream(stream)
        return batches.schema, checked(iter(batches))
