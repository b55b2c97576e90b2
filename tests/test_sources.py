"""sources.py, source_files.py, spill.py, json_documents.py: every kind of input, how it is cut, and what is refused."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_graph import json_documents, sources
from dflash_graph.config_groups import SourceConfig
from dflash_graph.data import prepare
from dflash_graph.json_documents import iterate_rows
from dflash_graph.row_values import RowError
from dflash_graph.source_files import file_digest, find_files
from dflash_graph.sources import LineFile, Source, open_source, parse_raw
from tests.test_data import chat, word_tokenizer

ROWS = [chat("a " * (i % 4 + 1), "b c " * (i % 3 + 1)) for i in range(12)]


def as_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_table(rows: list[Any]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def write_jsonl(folder: Path) -> str:
    (folder / "rows.jsonl").write_bytes(as_lines(ROWS))
    return str(folder / "rows.jsonl")


def write_compressed(
    ending: str, compress: Callable[[bytes], bytes], name: str = "rows.jsonl"
) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        content = as_lines(ROWS) if name.endswith("jsonl") else json.dumps(ROWS).encode()
        (folder / f"{name}{ending}").write_bytes(compress(content))
        return str(folder / f"{name}{ending}")

    return write


def write_text(name: str, text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    return write


def write_parquet(folder: Path) -> str:
    pq.write_table(as_table(ROWS), folder / "rows.parquet", row_group_size=5)
    return str(folder / "rows.parquet")


def write_feather(folder: Path) -> str:
    feather.write_feather(as_table(ROWS), folder / "rows.feather", compression="lz4")
    return str(folder / "rows.feather")


def write_arrow_stream(folder: Path) -> str:
    with pa.ipc.new_stream(folder / "rows.arrow", as_table(ROWS).schema) as writer:
        writer.write_table(as_table(ROWS))
    return str(folder / "rows.arrow")


def write_datasets(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


def write_folder(folder: Path) -> str:
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / ".hidden.jsonl").write_text("{")
    (folder / "data" / "README.md").write_text("not data")
    (folder / "data" / "a.jsonl").write_bytes(as_lines(ROWS[:5]))
    pq.write_table(as_table(ROWS[5:]), folder / "data" / "deep" / "b.parquet")
    return str(folder / "data")


def write_globbed(folder: Path) -> str:
    for i in range(3):
        (folder / f"part-{i}.jsonl").write_bytes(as_lines(ROWS[4 * i : 4 * i + 4]))
    return str(folder / "part-*.jsonl")


KINDS: dict[str, Callable[[Path], str]] = {
    "jsonl": write_jsonl,
    "ndjson": write_text("rows.ndjson", as_lines(ROWS).decode()),
    "gz": write_compressed(".gz", gzip.compress),
    "bz2": write_compressed(".bz2", bz2.compress),
    "xz": write_compressed(".xz", lzma.compress),
    "json-array": write_text("rows.json", json.dumps(ROWS, indent=2)),
    "json-array-gz": write_compressed(".gz", gzip.compress, "rows.json"),
    "json-object": write_text("rows.json", json.dumps({"version": 3, "data": ROWS})),
    "json-lines": write_text("rows.json", as_lines(ROWS).decode()),
    "parquet": write_parquet,
    "feather": write_feather,
    "arrow": write_arrow_stream,
    "datasets": write_datasets,
    "folder": write_folder,
    "glob": write_globbed,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    source = open_source(KINDS[kind](tmp_path))
    assert [parse_raw(raw).messages for raw in source] == [row["messages"] for row in ROWS]
    again = open_source(source.config)
    assert again.digest == source.digest
    rows = prepare([source.config], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache")
    plain = prepare([write_jsonl(tmp_path)], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache")
    assert np.array_equal(rows.tokens, plain.tokens)
    assert np.array_equal(rows.loss_mask, plain.loss_mask)
    assert np.array_equal(rows.origins["content"], plain.origins["content"])
    assert (rows.report.rows_in, rows.report.kept) == (12, 12)


def test_where_rows_stand(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + as_lines(ROWS[:1]) + b"  \r\n" + as_lines(ROWS[1:2]))
    assert [raw.where for raw in open_source(str(tmp_path / "a.jsonl"))] == ["a.jsonl:2", "a.jsonl:4"]
    assert [raw.where for raw in open_source(write_parquet(tmp_path))][4:6] == ["rows.parquet:5", "rows.parquet:6"]


# ---- cutting lines into blocks ----


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50), st.booleans())
def test_blocks_hold_every_line_once_with_its_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "x.jsonl"
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path.write_bytes(content)
    part = LineFile("x", path, len(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK_BYTES", size)
        blocks = part.blocks(2)
    assert all(block.start < block.stop for block in blocks)
    assert b"".join(content[b.start : b.stop] for b in blocks) == content
    found = [(raw.where, raw.value) for block in blocks for raw in part.read(block)]
    split = content.split(b"\n")
    if split and split[0].startswith(b"\xef\xbb\xbf"):
        split[0] = split[0][3:]
    assert found == [(f"x:{i}", line.strip()) for i, line in enumerate(split, 1) if line.strip()]
    assert sum(block.rows for block in blocks) >= len(found)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path))
    part = LineFile("rows.jsonl", path, path.stat().st_size)
    blocks = part.blocks()
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="changed while it was read"):
        list(part.read(blocks[0]))


def test_max_rows(tmp_path: Path) -> None:
    def count(path: str, limit: int) -> list[str]:
        source = open_source(SourceConfig(path=path, max_rows=limit))
        return [raw.where for raw in source]

    (tmp_path / "gaps.jsonl").write_bytes(b"\xef\xbb\xbf\n\n" + as_lines(ROWS[:1]) + b"\n" + as_lines(ROWS[1:4]))
    assert count(str(tmp_path / "gaps.jsonl"), 2) == ["gaps.jsonl:3", "gaps.jsonl:5"]
    assert count(write_parquet(tmp_path), 7)[-1] == "rows.parquet:7"
    assert len(count(write_datasets(tmp_path), 3)) == 3
    assert count(write_globbed(tmp_path), 6) == [f"part-0.jsonl:{i}" for i in (1, 2, 3, 4)] + [
        "part-1.jsonl:1",
        "part-1.jsonl:2",
    ]
    assert len(count(write_globbed(tmp_path), 99)) == 12


# ---- JSON documents ----


def read_json(text: str, chunk: int = 1 << 20) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_documents, "_CHUNK", chunk)
        return list(iterate_rows(io.StringIO(text), lambda value: isinstance(value, dict) and "messages" in value))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON_VALUES, max_size=6), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_an_array_is_read_as_json_reads_it(rows: list[Any], chunk: int, indent: int | None, escape: bool) -> None:
    assert read_json(json.dumps(rows, indent=indent, ensure_ascii=escape), chunk) == rows


@pytest.mark.parametrize(
    "text, rows",
    [
        ("", []),
        (" \n", []),
        ("[]", []),
        ("\ufeff[1]", [1]),
        ('{"messages": [1]}', [{"messages": [1]}]),
        ('{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        ('{"n": 2, "rows": [1, 2]}', [1, 2]),
    ],
)
def test_shapes_of_documents(text: str, rows: list[Any]) -> None:
    for chunk in (1, 1 << 20):
        assert read_json(text, chunk) == rows


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2", "end of the file"),
        ("[1 2]", "found '2'"),
        ("[1,]", "character 3"),
        ("[1] x", "behind the array"),
        ("[{]", "character"),
        ('["a', "character 1"),
        ("[" * 100_000, "RecursionError"),
        ("3", "an array of rows, or an object with a list; found int"),
        ('{"a": 1}', r"no list among the keys \['a'\]"),
        ('{"a": [], "b": []}', r"exactly one list, of rows; found lists \['a', 'b'\]"),
    ],
)
def test_broken_documents(text: str, message: str) -> None:
    for chunk in (1, 1 << 20):
        with pytest.raises(ValueError, match=f"(?i){message}|recursion"):
            read_json(text, chunk)


# ---- refusals ----


def refused(source: str | SourceConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(open_source(source))


def test_missing_and_unknown_sources(tmp_path: Path) -> None:
    refused(str(tmp_path / "gone.jsonl"), r"must exist and be at least one; missing: .*gone\.jsonl")
    refused(str(tmp_path / "*.jsonl"), r"no file matches '.*\*\.jsonl'")
    refused("org/name", r"missing: org/name\. A data set of the hub is named hf:org/name")
    (tmp_path / "rows.csv").write_text("a,b")
    refused(str(tmp_path / "rows.csv"), r"must end in \.jsonl, .*its `format`; found .*rows\.csv")
    refused(str(tmp_path), r"holds 1 files of other kinds \(rows\.csv\)")
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), "holds no file")
    (tmp_path / "rows.txt").write_bytes(as_lines(ROWS))
    assert len(list(open_source(SourceConfig(path=str(tmp_path / "rows.txt"), format="jsonl")))) == 12
    refused(SourceConfig(path=write_jsonl(tmp_path), split="train"), "split and subset belong to hub ids")
    refused(SourceConfig(path=write_folder(tmp_path), subset="x"), "is a folder of files")
    refused(SourceConfig(path=str(tmp_path / "data"), format="arrow"), r"no file of format arrow; found jsonl, parquet")
    chosen = open_source(SourceConfig(path=str(tmp_path / "data"), format="parquet"))
    assert [file.path.name for file in chosen.files] == ["b.parquet"]


def test_a_file_named_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(as_lines(ROWS[:1]))
    (tmp_path / "a1.jsonl").write_bytes(as_lines(ROWS))
    assert [file.path.name for file in find_files(SourceConfig(path=str(tmp_path / "a[1].jsonl")))] == ["a[1].jsonl"]


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_cut_off_gzip(tmp_path: Path, keep: float) -> None:
    content = gzip.compress(as_lines(ROWS * 50))
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content[: int(keep * len(content))])
    refused(str(path), r"rows\.jsonl\.gz is damaged or no gzip \(jsonl\) file: .*end-of-stream.*Fetch it again")
    path.write_bytes(as_lines(ROWS))
    refused(str(path), "no gzip")
    path.write_bytes(content[:200] + bytes(40) + content[240:])
    refused(str(path), "damaged")


def test_zstd_without_its_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec import compression

    monkeypatch.delitem(compression.compr, "zstd", raising=False)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"x")
    refused(str(tmp_path / "rows.jsonl.zst"), r"knows no zstd.*pip install zstandard")


@pytest.mark.parametrize("write", [write_parquet, write_feather, write_arrow_stream])
def test_damaged_tables(tmp_path: Path, write: Callable[[Path], str]) -> None:
    path = Path(write(tmp_path))
    content = path.read_bytes()
    middle = content[:60] + bytes(80) + content[140:]  # of a feather file only a second copy of the schema
    for damaged in (content[: len(content) // 2], b"PAR1" + bytes(50), b"", middle)[
        : 3 if "feather" in path.name else 4
    ]:
        path.write_bytes(damaged)
        refused(str(path), rf"{path.name} is damaged or no")
    assert open_source(str(path)).digest != file_digest(path)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"folder", "glob"}))
def test_any_damage_is_a_refusal_or_a_counted_row(tmp_path: Path, kind: str) -> None:
    """Bytes changed, cut out or put in: never another error, let alone the end of the process."""
    source = KINDS[kind](tmp_path)
    file = next(Path(source).glob("*.arrow")) if kind == "datasets" else Path(source)
    content = file.read_bytes()
    rng = random.Random(kind)
    outcomes = set()
    for _ in range(25):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            at, size = rng.randrange(len(damaged)), rng.randrange(1, 20)
            damaged[at : at + rng.choice((0, 1, size))] = rng.randbytes(rng.choice((0, 1, size)))
        file.write_bytes(damaged)
        try:
            for raw in open_source(source):
                with contextlib.suppress(RowError):
                    parse_raw(raw)
            outcomes.add("read")
        except ValueError as error:
            outcomes.add(str(error))
    refusals = outcomes - {"read"}
    assert all("damaged" in text or "must" in text for text in refusals), refusals
    assert bool(refusals) == (kind not in ("jsonl", "ndjson"))


def test_damaged_datasets_folder(tmp_path: Path) -> None:
    folder = Path(write_datasets(tmp_path))
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    refused(str(folder), "is damaged")
    (folder / "state.json").write_text("{")
    refused(str(folder), "is damaged")


def test_table_without_usable_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"quality": [1, 2], "label": ["a", "b"]}), tmp_path / "x.parquet")
    refused(str(tmp_path / "x.parquet"), r"x\.parquet must have columns .*found the columns quality, label")


def test_a_table_may_begin_with_rows_of_nothing(tmp_path: Path) -> None:
    pq.write_table(as_table([*[{"messages": None}] * 30, *ROWS]), tmp_path / "x.parquet")
    report = prepare([tmp_path / "x.parquet"], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache").report
    assert (report.kept, report.dropped) == (12, {"unknown_shape": 30})


def test_rows_of_a_table_that_are_no_conversation_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {"messages": []}, {"messages": None}]
    pq.write_table(as_table(rows), tmp_path / "x.parquet")
    report = prepare([tmp_path / "x.parquet"], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache").report
    assert (report.rows_in, report.kept, sum(report.dropped.values())) == (14, 12, 2)
    assert report.first_dropped["empty_conversation"].startswith("x.parquet:13: ")


def test_text_of_a_table_that_is_no_utf8_costs_one_row(tmp_path: Path) -> None:
    table = as_table([chat("a", "b c"), chat("X", "b c"), chat("b", "c d")])
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False)
    (tmp_path / "x.parquet").write_bytes(sink.getvalue().replace(b"\x01\x00\x00\x00X", b"\x01\x00\x00\x00\xff"))
    report = prepare([tmp_path / "x.parquet"], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache").report
    assert (report.kept, report.dropped) == (2, {"invalid_utf8": 1})
    assert report.first_dropped["invalid_utf8"].startswith("x.parquet:2: ")


def test_offsets_outside_an_arrow_file_are_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["a" * 3, "b" * 5, "c" * 7]})
    feather.write_feather(table, tmp_path / "x.arrow", compression="uncompressed")
    good, bad = (np.array([0, 3, 8, end], np.int32).tobytes() for end in (15, 1 << 30))
    content = (tmp_path / "x.arrow").read_bytes()
    assert content.count(good) == 1
    (tmp_path / "x.arrow").write_bytes(content.replace(good, bad))
    refused(str(tmp_path / "x.arrow"), r"x\.arrow is damaged")


def test_bytes_that_are_no_text_in_a_json_array_cost_one_row(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(json.dumps([chat("a", "b c"), chat("X", "b c")]).encode().replace(b"X", b"\xff"))
    report = prepare([tmp_path / "x.json"], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache").report
    assert (report.kept, report.dropped) == (1, {"invalid_unicode": 1})


def test_broken_json_document_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(ROWS)[:-40])
    refused(str(tmp_path / "x.json"), r"x\.json is damaged or no json file: character \d+")


def test_media_columns_are_not_decoded(tmp_path: Path) -> None:
    pictures = datasets.Dataset.from_list([{**row, "image": {"bytes": b"no picture", "path": None}} for row in ROWS])
    pictures = pictures.cast_column("image", datasets.Image())
    pictures.save_to_disk(tmp_path / "saved")
    assert set(next(iter(open_source(str(tmp_path / "saved")))).value) == {"messages"}  # type: ignore[call-overload]


# ---- splits and the hub ----


def test_splits_of_a_datasets_folder(tmp_path: Path) -> None:
    splits = {"first": datasets.Dataset.from_list(ROWS[:3]), "train": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert len(list(open_source(str(tmp_path / "two")))) == 12
    assert len(list(open_source(SourceConfig(path=str(tmp_path / "two"), split="first")))) == 3
    refused(SourceConfig(path=str(tmp_path / "two"), split="test"), "one of its splits, first, train; found split=test")
    datasets.DatasetDict({"only": splits["first"]}).save_to_disk(tmp_path / "one")
    assert len(list(open_source(str(tmp_path / "one")))) == 3
    refused(SourceConfig(path=write_datasets(tmp_path), split="train"), "has no splits; found split=train")


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None = None, *, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        if name == "org/none":
            raise datasets.exceptions.DatasetNotFoundError("no such data set")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("hf:org/name")
    assert [parse_raw(raw).messages for raw in source] == [row["messages"] for row in ROWS]
    open_source("hf:org/name:train[:10]")
    open_source(SourceConfig(path="hf:org/name", split="test", subset="en"))
    assert asked == [("org/name", None, "train"), ("org/name", None, "train[:10]"), ("org/name", "en", "test")]
    refused("hf:org/none", "cannot load the data set 'org/none' from the hub: no such data set")
    refused("hf:", "must look like hf:org/name")
    refused(SourceConfig(path="hf:org/name:train", split="test"), "named twice")


def test_hub_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused("hf:nobody/nothing-at-all", "cannot load the data set 'nobody/nothing-at-all' from the hub")


# ---- digests ----


def test_digest_is_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(path: str | Path) -> str:
        source: Source = open_source(str(path))
        return source.digest

    first = digest(write_jsonl(tmp_path))
    (tmp_path / "other.jsonl").write_bytes(as_lines(ROWS))
    assert digest(tmp_path / "other.jsonl") == first
    (tmp_path / "other.jsonl").write_bytes(as_lines(ROWS[:-1]))
    assert digest(tmp_path / "other.jsonl") != first
    saved = digest(write_datasets(tmp_path))
    (tmp_path / "again").mkdir()
    assert digest(write_datasets(tmp_path / "again")) == saved
    datasets.Dataset.from_list(ROWS[::-1]).save_to_disk(tmp_path / "reversed")
    assert digest(tmp_path / "reversed") != saved
    monkeypatch.setattr("dflash_graph.source_files._DIGEST_CHUNK", 100)
    path = tmp_path / "rows.jsonl"
    chunked = file_digest(path)
    assert chunked == file_digest(path, 4)
    content = bytearray(path.read_bytes())
    content[150] ^= 1
    path.write_bytes(content)
    assert file_digest(path) != chunked
