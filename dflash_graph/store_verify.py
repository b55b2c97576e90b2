"""Says what a store holds, and reads all of it to see whether it is what was written: `store info`, `store verify`.

Owns the report over all shards, where one damaged file must not hide the others.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_graph.store import FeatureStore, gib
from dflash_graph.store_codec import TORCH_DTYPES
from dflash_graph.store_shard import UNFINISHED, DamagedStoreError, Shard


def describe(folder: Path) -> tuple[str, bool]:
    """What a store holds, in words; and whether a shard cannot be opened."""
    store = FeatureStore(folder, keep_going=True)
    origins = Counter({json.dumps(shard.origin): 0 for shard in store.shards})
    for shard in store.shards:
        origins[json.dumps(shard.origin)] += len(shard)
    lengths = np.concatenate([np.diff(shard.offsets) for shard in store.shards] or [np.zeros(0, np.int64)])
    lines = [str(store), f"target    weights {store.spec.weights[:16]}, configuration {store.spec.config[:16]}"]
    if len(lengths):
        lines.append(f"lengths   {lengths.min()} to {lengths.max()} tokens, median {int(np.median(lengths))}")
    lines += [f"made by   {origin}: {count} rows" for origin, count in origins.items()]
    if twice := len(lengths) - len(store):
        lines.append(f"twice     {twice} rows stand in several shards")
    if unfinished := len(list((folder / "shards").glob("*" + UNFINISHED))):
        lines.append(f"unfinished {unfinished} files that are being written, or were when their process ended")
    lines += [f"damaged   {fault}" for fault in store.damaged.values()]
    return "\n".join(lines), bool(store.damaged)


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What reading a whole store found.

    Attributes:
        damaged: what is wrong with a file. removed: those that were deleted.
    """

    rows: int
    num_bytes: int
    damaged: dict[Path, str]
    removed: set[Path]

    def __str__(self) -> str:
        lines = [f"verified  {self.rows} rows, {gib(self.num_bytes)}: {len(self.damaged)} damaged files"]
        lines += [f"{'removed' if p in self.removed else 'damaged':<10}{fault}" for p, fault in self.damaged.items()]
        return "\n".join(lines)


def verify(folder: Path, *, remove: bool = False) -> VerifyReport:
    """Read every row and compare it with its checksum, and its token ids with its key.

    Args:
        remove: delete files whose content is damaged, whole rows in them included; not those that cannot be read or
            belong to another store.
    """
    store = FeatureStore(folder, keep_going=True)
    damaged, rows, num_bytes = dict(store.damaged), 0, 0
    for shard in store.shards:
        try:
            rows += _verify_shard(shard, store)
            num_bytes += shard.nbytes
        except DamagedStoreError as error:
            damaged[shard.path] = error
    removed = {path for path, error in damaged.items() if remove and error.removable}
    for path in removed:
        path.unlink()
    faults = {path: str(error) for path, error in damaged.items()}
    return VerifyReport(rows=rows, num_bytes=num_bytes, damaged=faults, removed=removed)


def _verify_shard(shard: Shard, store: FeatureStore) -> int:
    spec = store.spec
    for row in range(len(shard)):
        n = len(shard.row_tokens(row))
        values = torch.empty(n, spec.feature_size, dtype=TORCH_DTYPES[spec.dtype]).view(torch.uint8).numpy()
        exponents = np.empty((n, len(spec.target_layer_ids)), np.int8) if spec.dtype == "fp8" else None
        shard.read(row, values, exponents)
    return len(shard)
