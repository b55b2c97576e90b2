"""The feature store on disk: what is written is read, damage is named, a full disk and a kill leave whole shards."""

import errno
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dflash_graph import store_shard, store_writer
from dflash_graph.config import TargetConfig
from dflash_graph.store import FeatureStore
from dflash_graph.store_build import batches
from dflash_graph.store_codec import TORCH_DTYPES, bytes_per_token, decode, encode, find_fault, relative_errors
from dflash_graph.store_identity import StoreSpec, target_digests
from dflash_graph.store_shard import DamagedStoreError, StoredRow, row_key
from dflash_graph.store_verify import describe, verify
from dflash_graph.store_writer import StoreFullError, StoreWriter
from tests.tiny import make_tiny

TAPS, D = (1, 3), 8


def spec(**changes: Any) -> StoreSpec:
    values = {"weights": "w", "config": "c", "target": "toy", "target_layer_ids": TAPS, "hidden_size": D}
    return StoreSpec(**{**values, "dtype": "float32", **changes})


def features(n: int, seed: int = 0) -> torch.Tensor:
    """(n, N*D) with what real hidden states have: a huge first position and taps of different size."""
    x = torch.randn(n, len(TAPS) * D, generator=torch.Generator().manual_seed(seed))
    x[:, D:] *= 37
    x[0, 3] = 50_000
    return x


def stored(n: int, of: StoreSpec, seed: int = 0) -> tuple[StoredRow, torch.Tensor]:
    tokens = np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)
    x = features(n, seed)
    values, exponents = encode(x, len(TAPS), of.dtype)
    row = StoredRow(
        row_key(tokens),
        tokens,
        values.contiguous().view(torch.uint8).numpy(),
        None if exponents is None else exponents.numpy(),
    )
    return row, x


def fill(folder: Path, of: StoreSpec, count: int = 10, shard_bytes: int = 900) -> list[StoredRow]:
    """A store of rows of odd lengths in several shards."""
    store = FeatureStore.open(folder, of, create=True)
    writer = StoreWriter(store, origin={"source": "test"}, shard_bytes=shard_bytes)
    rows = [stored(3 + 4 * i, of, seed=i)[0] for i in range(count)]
    for row in rows:
        writer.add(row)
    writer.flush()
    return rows


def read(store: FeatureStore, key: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    n = len(store.token_ids(key))
    values = np.empty((n, store.spec.feature_size * TORCH_DTYPES[store.spec.dtype].itemsize), np.uint8)
    exponents = np.empty((n, len(TAPS)), np.int8) if store.spec.dtype == "fp8" else None
    store.read(key, values, exponents)
    return values, exponents


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_fp8_is_within_half_a_step_and_decodes_alike_in_both_dtypes() -> None:
    x = features(64)
    x[5] = 0
    values, exponents = encode(x, len(TAPS), "fp8")
    assert exponents is not None
    exact, short = torch.empty(64, 2 * D), torch.empty(64, 2 * D, dtype=torch.bfloat16)
    decode(values, exponents, exact)
    decode(values, exponents, short)
    assert torch.equal(exact, short.float())
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, or a step of the smallest exponent.
    step = torch.exp2(exponents.float()).repeat_interleave(D, 1) * 2.0**-10
    assert bool(((exact - x).abs() <= x.abs() / 16 + step).all())
    assert float(relative_errors(exact, x, 2)[0].median()) < 0.03
    assert torch.equal(exact[5], x[5])


def test_a_scale_per_token_and_tap_survives_a_huge_first_position() -> None:
    x = features(32)
    values, exponents = encode(x, len(TAPS), "fp8")
    out = torch.empty_like(x)
    decode(values, exponents, out)
    others = relative_errors(out[1:], x[1:], 2)[0]
    assert float(others.max()) < 0.06  # one scale for the row would flush these to zero
    one = (x / (x.abs().max() / 448)).to(torch.float8_e4m3fn).float() * (x.abs().max() / 448)
    assert float(relative_errors(one[1:], x[1:], 2)[0].max()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_bytes_per_token_are_those_on_disk(tmp_path: Path, dtype: Any) -> None:
    of = spec(dtype=dtype)
    rows = fill(tmp_path / "s", of)
    tokens = sum(len(row.token_ids) for row in rows)
    assert of.bytes_per_token == bytes_per_token(2, D, dtype) + 4
    store = FeatureStore(tmp_path / "s")
    tables = sum(32 * len(shard) + 8 for shard in store.shards)
    headers = sum(8 + struct.unpack("<Q", shard.path.read_bytes()[:8])[0] for shard in store.shards)
    assert store.nbytes == tokens * of.bytes_per_token + tables + headers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.index_put_((torch.tensor(4), torch.tensor(9)), torch.tensor(float("nan"))), "tap 3 holds non-fin"),
        (lambda x: x.index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(float("inf"))), "tap 1 holds non-fin"),
        (lambda x: x[:, :D].fill_(0), "tap 1 is the same"),
        (lambda x: x[:, D:].copy_(x[:1, D:].clone().expand(len(x), D)), "tap 3 is the same"),
    ],
    ids=["nan", "inf", "zero", "constant"],
)
def test_features_that_carry_nothing_are_found(change: Callable[[torch.Tensor], Any], words: str) -> None:
    x = features(6)
    assert find_fault(x, TAPS) is None
    change(x)
    assert words in (find_fault(x, TAPS) or "")


def test_a_row_that_starts_as_it_ends_is_no_constant() -> None:
    x = features(5)
    x[-1] = x[0]
    assert find_fault(x, TAPS) is None
    assert find_fault(features(1), TAPS) is None


# ---- what is written is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_rows_come_back_bit_for_bit(tmp_path: Path, dtype: Any) -> None:
    rows = fill(tmp_path / "s", spec(dtype=dtype))
    store = FeatureStore.open(tmp_path / "s", spec(dtype=dtype))
    assert len(store.shards) > 1
    assert len(store) == len(rows)
    for row in rows:
        values, exponents = read(store, row.key)
        assert np.array_equal(values, row.values)
        assert (exponents is None) == (row.exponents is None)
        assert exponents is None or np.array_equal(exponents, row.exponents)
        assert np.array_equal(store.token_ids(row.key), row.token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_shard_is_a_safetensors_file(tmp_path: Path, dtype: Any) -> None:
    fill(tmp_path / "s", spec(dtype=dtype))
    store = FeatureStore(tmp_path / "s")
    for shard in store.shards:
        with safe_open(shard.path, framework="pt") as file:
            kept = file.get_tensor("features")
            offsets = file.get_tensor("offsets").tolist()
            assert file.metadata()["store"] == store.spec.fingerprint
            assert kept.dtype == TORCH_DTYPES[store.spec.dtype]
        for i, key in enumerate(shard.keys):
            part = kept[offsets[i] : offsets[i + 1]].contiguous().view(torch.uint8).numpy()
            assert np.array_equal(part, read(store, key)[0])


def test_a_key_depends_on_the_tokens_alone() -> None:
    tokens = np.array([5, 6, 7])
    assert row_key(tokens) == row_key(tokens.astype(np.int32)) == row_key(np.array([0, 5, 6, 7, 8])[1:4])
    assert row_key(tokens) == row_key(np.array([5, 0, 6, 0, 7])[::2])
    assert row_key(tokens) != row_key(np.array([5, 6, 7, 0]))
    assert row_key(tokens) != row_key(np.array([7, 6, 5]))


def test_rows_are_found_before_they_are_on_disk_and_written_once(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)
    writer = StoreWriter(store, origin={})
    row, _ = stored(5, spec())
    writer.add(row)
    writer.add(row)
    assert writer.pending(row.key) is row
    assert row.key not in store
    writer.flush()
    assert writer.pending(row.key) is None
    assert row.key in store
    writer.add(row)
    writer.flush()
    assert len(store.shards) == 1
    assert writer.num_rows == 1


def test_rows_do_not_wait_for_a_whole_shard_for_ever(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)
    writer = StoreWriter(store, origin={}, flush_s=0.05)
    writer.add(stored(5, spec(), 0)[0])
    assert not store.shards
    time.sleep(0.06)
    writer.add(stored(6, spec(), 1)[0])
    deadline = time.monotonic() + 10
    while len(store) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(store) == 2


def test_rows_are_collected_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`add` does not wait for the disk, and a row is found wherever it is on its way."""
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)
    writer = StoreWriter(store, origin={}, shard_bytes=1)
    go, write = threading.Event(), store_writer.write_shard

    def slow(*args: Any) -> Path:
        assert go.wait(10)
        return write(*args)

    monkeypatch.setattr(store_writer, "write_shard", slow)
    first, second = stored(5, spec(), 0)[0], stored(6, spec(), 1)[0]
    writer.add(first)
    assert writer.pending(first.key) is first
    assert first.key not in store
    threading.Timer(0.2, go.set).start()
    writer.add(second)  # waits for the first: two shards of rows are in memory, not more
    assert first.key in store
    writer.flush()
    assert second.key in store
    assert writer.pending(first.key) is writer.pending(second.key) is None


def test_many_writers_and_readers_of_one_store(tmp_path: Path) -> None:
    FeatureStore.open(tmp_path / "s", spec(), create=True)
    rows = [stored(3 + i % 17, spec(), seed=i)[0] for i in range(120)]
    faults: list[BaseException] = []

    def write(part: int) -> None:
        try:
            store = FeatureStore.open(tmp_path / "s", spec(), create=True)
            writer = StoreWriter(store, origin={"part": part}, shard_bytes=4000)
            for row in rows[part::3]:
                writer.add(row)
                store.refresh()
                for key in rows[part].key, *list(store)[-3:]:
                    if key in store:
                        read(store, key)
            writer.flush()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault
    assert {row.key for row in rows} == set(FeatureStore(tmp_path / "s"))


def test_a_row_that_two_processes_wrote_is_read_from_the_first(tmp_path: Path) -> None:
    fill(tmp_path / "s", spec(), count=2)
    first = FeatureStore(tmp_path / "s")
    writer = StoreWriter(first, origin={})
    row, _ = stored(9, spec(), seed=50)
    second = FeatureStore(tmp_path / "s")
    other = StoreWriter(second, origin={})
    writer.add(row)
    other.add(row)
    writer.flush()
    other.flush()
    store = FeatureStore(tmp_path / "s")
    assert len(store) == 3
    assert "twice     1 rows" in describe(tmp_path / "s")[0]
    assert np.array_equal(read(store, row.key)[0], row.values)


def test_a_key_is_found_only_when_its_row_can_be_read(tmp_path: Path) -> None:
    """Readers look keys up without a lock while another thread takes in shards."""
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)

    class Watched(dict[bytes, tuple[int, int]]):
        def setdefault(self, key: bytes, default: Any = None) -> Any:
            assert store.shards[default[0]].keys[default[1]] == key
            return super().setdefault(key, default)

    store._index = Watched()
    rows = fill(tmp_path / "s", spec())
    store.refresh()
    assert len(store) == len(rows)


def test_a_file_that_was_cleared_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)
    writer = StoreWriter(store, origin={})
    row, _ = stored(5, spec())
    lock, cleared = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not cleared:
            cleared.append(True)
            monkeypatch.setattr(store_shard.fcntl, "flock", lock)
            assert store_shard.remove_unfinished(tmp_path / "s" / "shards") == 1
        lock(file, how)

    monkeypatch.setattr(store_shard.fcntl, "flock", late)
    writer.add(row)
    writer.flush()
    assert cleared
    assert np.array_equal(read(store, row.key)[0], row.values)


def test_batches_hold_every_row_once_and_fit() -> None:
    lengths = np.array([5, 64, 65, 128, 1, 100, 64])
    found = list(batches(lengths, [(64, 2), (128, 1)]))
    assert sorted(i for _, rows in found for i in rows.tolist()) == list(range(7))
    for length, rows in found:
        assert len(rows) <= {64: 2, 128: 1}[length]
        assert (lengths[rows] <= length).all()
        assert length == 64 or (lengths[rows] > 64).all()


# ---- whose store it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "x"}, "other weights"),
        ({"config": "x"}, "another configuration"),
        ({"target_layer_ids": (0, 2)}, r"taps is \[1, 3\], needed is \[0, 2\]"),
        ({"hidden_size": 4}, "hidden size is 8, needed is 4"),
        ({"dtype": "fp8"}, "dtype is float32, needed is fp8"),
    ],
)
def test_a_foreign_store_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    fill(tmp_path / "s", spec())
    with pytest.raises(ValueError, match=words):
        FeatureStore.open(tmp_path / "s", spec(**change))
    with pytest.raises(ValueError, match=words):
        FeatureStore.open(tmp_path / "s", spec(**change), create=True)


def test_a_copy_of_the_target_under_another_name_is_the_same(tmp_path: Path) -> None:
    fill(tmp_path / "s", spec())
    FeatureStore.open(tmp_path / "s", spec(target="elsewhere"))


def test_a_shard_of_another_store_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path / "s", spec())
    fill(tmp_path / "other", spec(weights="x"))
    stray = next((tmp_path / "other" / "shards").iterdir())
    shutil.copy(stray, tmp_path / "s" / "shards" / stray.name)
    with pytest.raises(DamagedStoreError, match=f"{stray.name}.*belongs to another store"):
        FeatureStore(tmp_path / "s")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name a feature store"):
        FeatureStore(tmp_path)
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="holds other files"):
        FeatureStore.open(tmp_path, spec(), create=True)
    fill(tmp_path / "s", spec())
    document = json.loads((tmp_path / "s" / "store.json").read_text())
    document["spec"]["dtype"] = "bfloat16"
    (tmp_path / "s" / "store.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="it was changed"):
        FeatureStore(tmp_path / "s")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    return folder / "model"


def test_the_digest_follows_the_weights_and_not_their_files(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    wanted = target_digests(TargetConfig(path=str(model)))
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)

    def copied(name: str) -> Path:
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        return tmp_path / name

    sharded = copied("sharded")
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, sharded / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert target_digests(TargetConfig(path=str(sharded))) == wanted

    for place in (0, -1):  # the first and the last number of a tensor in the middle of the file
        changed = copied(f"changed{place}")
        other = {n: t.clone() for n, t in tensors.items()}
        other[names[len(names) // 2]].view(-1)[place] += 1e-3
        save_file(other, changed / "model.safetensors")
        assert target_digests(TargetConfig(path=str(changed)))[0] != wanted[0]

    config = json.loads((model / "config.json").read_text())
    told = copied("told")
    shutil.copy(model / "model.safetensors", told)
    (told / "config.json").write_text(json.dumps({**config, "transformers_version": "9", "use_cache": False}))
    assert target_digests(TargetConfig(path=str(told))) == wanted
    (told / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert target_digests(TargetConfig(path=str(told)))[1] != wanted[1]


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """Every region of the file: length, header, table, features, exponents."""
    rows = fill(tmp_path / "s", spec(dtype="fp8"), count=3, shard_bytes=1 << 20)
    (path,) = (tmp_path / "s" / "shards").iterdir()
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    rng = np.random.default_rng(0)
    places = [0, 3, 8, header, 8 + header, 8 + header + 20, len(whole) - 1, *rng.integers(0, len(whole), 150).tolist()]
    # a space or the form of a number may be written in several ways: such a header must still not pass
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=path.name):  # noqa: PT012
            store = FeatureStore(tmp_path / "s")
            for row in rows:
                read(store, row.key)
    path.write_bytes(whole)
    assert not verify(tmp_path / "s").damaged


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    fill(tmp_path / "s", spec(), count=2, shard_bytes=1 << 20)
    (path,) = (tmp_path / "s" / "shards").iterdir()
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedStoreError, match=path.name):
            FeatureStore(tmp_path / "s")
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedStoreError, match="bytes instead of"):
        FeatureStore(tmp_path / "s")


def test_a_file_that_shrinks_or_goes_while_it_is_open_is_named(tmp_path: Path) -> None:
    rows = fill(tmp_path / "s", spec(), count=2, shard_bytes=1 << 20)
    store = FeatureStore(tmp_path / "s")
    (path,) = (tmp_path / "s" / "shards").iterdir()
    os.truncate(path, 600)
    with pytest.raises(DamagedStoreError, match=f"{path.name}.*ends too early"):
        read(store, rows[1].key)
    path.unlink()
    with pytest.raises(DamagedStoreError, match=f"{path.name} cannot be read: No such file"):
        read(store, rows[1].key)


def test_verify_names_and_removes_damaged_files_and_keeps_the_others(tmp_path: Path) -> None:
    rows = fill(tmp_path / "s", spec())
    paths = sorted((tmp_path / "s" / "shards").iterdir())
    assert len(paths) >= 3
    flipped = bytearray(paths[0].read_bytes())
    flipped[-5] ^= 1
    paths[0].write_bytes(flipped)
    os.truncate(paths[1], 10)
    report = verify(tmp_path / "s")
    assert set(report.damaged) == set(paths[:2])
    assert "2 damaged files" in str(report)
    assert describe(tmp_path / "s")[1]
    verify(tmp_path / "s", remove=True)
    store = FeatureStore(tmp_path / "s")
    assert 0 < len(store) < len(rows)
    assert not verify(tmp_path / "s").damaged


def test_what_is_only_foreign_or_unreadable_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "s", spec())
    fill(tmp_path / "other", spec(weights="x"))
    stray = next((tmp_path / "other" / "shards").iterdir())
    shutil.copy(stray, tmp_path / "s" / "shards" / stray.name)
    locked = min((tmp_path / "s" / "shards").iterdir())
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    report = verify(tmp_path / "s", remove=True)
    assert len(report.damaged) == 2
    assert not report.removed
    assert "Move it back to its own" in str(report)
    assert "cannot be read: Permission denied" in str(report)
    assert locked.exists()


# ---- a full disk, and a kill ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_whole_shards_and_goes_on_later(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = spec()
    store = FeatureStore.open(tmp_path / "s", of, create=True)
    writer = StoreWriter(store, origin={}, shard_bytes=1500)
    rows = [stored(3 + 4 * i, of, seed=i)[0] for i in range(8)]
    left, write = 4000, os.write

    def full(descriptor: int, data: Any) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(number, os.strerror(number))
        count = write(descriptor, data[:left])
        left -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(store_shard.os, "write", full)
        with pytest.raises(StoreFullError, match=r"is full .*rows were added and are kept.*goes on where"):
            list(map(writer.add, rows))
        with pytest.raises(StoreFullError):
            writer.add(rows[0])
        writer.flush()  # the error is told; what was given up can still be read
    kept = FeatureStore(tmp_path / "s")
    assert 0 < len(kept) < len(rows)
    assert not list((tmp_path / "s" / "shards").glob("*.part"))
    again = StoreWriter(kept, origin={}, shard_bytes=1500)
    for row in rows:
        again.add(row)
    again.flush()
    assert again.num_rows == len(rows) - writer.num_rows
    for row in rows:
        assert np.array_equal(read(kept, row.key)[0], row.values)


def test_another_error_of_the_disk_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FeatureStore.open(tmp_path / "s", spec(), create=True)
    writer = StoreWriter(store, origin={})
    writer.add(stored(5, spec())[0])

    def broken(descriptor: int, data: Any) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(store_shard.os, "write", broken)
    with pytest.raises(OSError, match="input/output error"):
        writer.flush()


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
import dflash_graph.store_shard as shard
from tests.test_store import *
write, count = shard._write, 0
def slow(descriptor, data):
    global count
    count += 1
    if count > 30:
        write(descriptor, bytes(data)[:100])
        print("half", flush=True)
        time.sleep(60)
    write(descriptor, data)
shard._write = slow
fill(Path({folder!r}), spec(), count=200)
"""


def test_a_kill_while_writing_leaves_whole_shards(tmp_path: Path) -> None:
    code = KILLED.format(root=str(Path(__file__).parents[1]), folder=str(tmp_path / "s"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "half"
        shards = tmp_path / "s" / "shards"
        assert len(list(shards.glob("*.part"))) == 1
        StoreWriter(FeatureStore(tmp_path / "s"), origin={})  # another writer leaves a living one's file alone
        assert len(list(shards.glob("*.part"))) == 1
        process.send_signal(signal.SIGKILL)
    kept = FeatureStore(tmp_path / "s")
    assert len(kept) > 5
    assert not verify(tmp_path / "s").damaged
    before = len(kept)
    rows = fill(tmp_path / "s", spec(), count=40)
    assert not list(shards.glob("*.part"))
    after = FeatureStore(tmp_path / "s")
    assert len(after) == len(rows) > before
    for row in rows:
        assert np.array_equal(read(after, row.key)[0], row.values)


def test_a_changed_spec_has_another_fingerprint() -> None:
    of = spec()
    for change in (
        {"weights": "x"},
        {"config": "x"},
        {"target_layer_ids": (1, 2)},
        {"hidden_size": 9},
        {"dtype": "fp8"},
    ):
        assert replace(of, **change).fingerprint != of.fingerprint
    assert replace(of, target="other").fingerprint == of.fingerprint
