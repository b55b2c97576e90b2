"""Rates of the feature store: write, read (cold and warm, by threads), check and decode, for each stored dtype.

    python -m bench.bench_store [--folder DIR] [--gib 2] [--taps 5] [--hidden-size 4096] [--repeats 5] [--output FILE]

Writes a store of random rows (256 to 3,072 tokens) in DIR, which should lie on the disk that is to be measured, and
removes it. Cold means that the kernel was told to drop the files' pages (posix_fadvise). As a baseline the same rows
are copied out of memory maps, unchecked. Gate: what is read is what was written. Prints the machine, a table, and one
JSON line last; rates are GiB/s of stored bytes, median of the repeats (smallest, largest).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_graph.store import FeatureStore
from dflash_graph.store_codec import TORCH_DTYPES, StoredDtype, decode, encode
from dflash_graph.store_identity import StoreSpec, safetensors_header
from dflash_graph.store_shard import StoredRow, row_checksum, row_key
from dflash_graph.store_writer import StoreWriter

GIB = 2**30
DTYPES: tuple[StoredDtype, ...] = ("float32", "bfloat16", "fp8")
THREADS = (1, 4)


def make_rows(spec: StoreSpec, num_bytes: int) -> list[StoredRow]:
    """Rows of random tokens, about `num_bytes` together; a few random blocks of features serve all of them."""
    rng, taps = np.random.default_rng(0), len(spec.target_layer_ids)
    block, exponents = encode(torch.randn(4096, spec.feature_size), taps, spec.dtype)
    values = block.view(torch.uint8).numpy()
    rows, total = [], 0
    while total < num_bytes:
        length = int(rng.integers(256, 3073))
        start = int(rng.integers(0, 4096 - length))
        tokens = rng.integers(0, 150_000, length).astype(np.int32)
        part = None if exponents is None else exponents.numpy()[start : start + length]
        rows.append(StoredRow(row_key(tokens), tokens, values[start : start + length], part))
        total += rows[-1].nbytes
    return rows


def drop_pages(store: FeatureStore) -> None:
    """Ask the kernel to forget the store's files."""
    for shard in store.shards:
        descriptor = os.open(shard.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(function: Callable[[], Any], repeats: int, before: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return found


def measure(
    folder: Path, dtype: StoredDtype, taps: int, hidden_size: int, num_bytes: int, repeats: int
) -> dict[str, Any]:
    """Seconds of everything for one dtype, and the bytes they are of."""
    spec = StoreSpec(
        weights="", config="", target="bench", target_layer_ids=tuple(range(taps)), hidden_size=hidden_size, dtype=dtype
    )
    rows = make_rows(spec, num_bytes)
    size = sum(row.values.nbytes + (0 if row.exponents is None else row.exponents.nbytes) for row in rows)

    def write() -> None:
        shutil.rmtree(folder / dtype, ignore_errors=True)
        writer = StoreWriter(FeatureStore.open(folder / dtype, spec, create=True), origin={}, shard_bytes=GIB // 2)
        for row in rows:
            writer.add(row)
        writer.flush()

    seconds = {"write": timed(write, 1)}
    store = FeatureStore(folder / dtype)
    into = [
        (np.empty_like(row.values), None if row.exponents is None else np.empty_like(row.exponents)) for row in rows
    ]

    def read(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: store.read(rows[i].key, *into[i]), range(len(rows))))

    read(1)
    for row, (values, exponents) in zip(rows, into, strict=True):
        if not np.array_equal(row.values, values) or not (
            exponents is None or np.array_equal(row.exponents, exponents)
        ):  # type: ignore[arg-type]
            raise RuntimeError("what was read must be what was written; it is not")
    for threads in THREADS:
        seconds[f"read cold, {threads} threads"] = timed(partial(read, threads), repeats, lambda: drop_pages(store))
        seconds[f"read warm, {threads} threads"] = timed(partial(read, threads), repeats)
    places = _map_places(store, rows)

    def copy_maps() -> None:
        for (path, start), row, (values, _) in zip(places, rows, into, strict=True):
            values[:] = np.memmap(path, np.uint8, "r", start, row.values.shape)

    seconds["memory map cold, 1 thread"] = timed(copy_maps, repeats, lambda: drop_pages(store))
    seconds["memory map warm, 1 thread"] = timed(copy_maps, repeats)
    seconds["checksum alone"] = timed(lambda: [row_checksum(*pair) for pair in into], repeats)
    out = torch.empty(max(len(row.values) for row in rows), spec.feature_size, dtype=torch.bfloat16)

    def decode_all() -> None:
        for values, exponents in into:
            stored = torch.from_numpy(values).view(TORCH_DTYPES[dtype])
            decode(stored, None if exponents is None else torch.from_numpy(exponents), out[: len(values)])

    seconds["decode to bfloat16"] = timed(decode_all, repeats)
    shutil.rmtree(folder / dtype)
    return {"bytes": size, "bytes_per_token": spec.bytes_per_token, "rows": len(rows), "seconds": seconds}


def _map_places(store: FeatureStore, rows: Sequence[StoredRow]) -> list[tuple[Path, int]]:
    """File and offset of each row's values."""
    width, where = rows[0].values.shape[1], {}
    for shard in store.shards:
        header, start = safetensors_header(shard.path)
        first = start + header["features"]["data_offsets"][0]
        where |= {key: (shard.path, first + int(shard.offsets[i]) * width) for i, key in enumerate(shard.keys)}
    return [where[row.key] for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for dtype in DTYPES:
            size = int(args.gib * GIB)
            found[dtype] = measure(Path(folder), dtype, args.taps, args.hidden_size, size, args.repeats)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{args.taps} taps x {args.hidden_size}; GiB/s of stored bytes, median (smallest, largest)")
    print(f"{'':<28}" + "".join(f"{dtype:>24}" for dtype in DTYPES))
    print(f"{'bytes per token':<28}" + "".join(f"{found[dtype]['bytes_per_token']:>24,}" for dtype in DTYPES))
    for name in found[DTYPES[0]]["seconds"]:
        cells = []
        for dtype in DTYPES:
            rates = [found[dtype]["bytes"] / GIB / s for s in found[dtype]["seconds"][name]]
            cells.append(f"{statistics.median(rates):.2f} ({min(rates):.2f}, {max(rates):.2f})")
        print(f"{name:<28}" + "".join(f"{cell:>24}" for cell in cells))
    line = json.dumps(
        {"bench": "store", "machine": machine, "args": {k: str(v) for k, v in vars(args).items()}, **found}
    )
    if args.output is not None:
        args.output.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
