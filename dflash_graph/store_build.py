"""Writes the features of a run's rows into its store, up front: `dflash-graph store build`.

Owns the loop over missing rows: bucket by bucket, one forward pass of the run's own shapes at a time, so that a row is
computed as training would. What is there already is left alone, so the same command goes on after any end: an
interrupt, a kill, a full disk. Several processes may each write a part.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_graph.config import Config
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.store import FeatureStore, free_space, gib
from dflash_graph.store_plan import all_rows, check_space
from dflash_graph.store_shard import row_key
from dflash_graph.store_worker import JobRow, encode_row, origin_of
from dflash_graph.store_writer import StoreWriter
from dflash_graph.target import Target


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a pass did: rows and bytes that it wrote, rows that are still missing, and the store as it is now."""

    written_rows: int
    written_bytes: int
    missing_rows: int
    store: str

    def __str__(self) -> str:
        rest = f"; {self.missing_rows} rows of the data are still missing" if self.missing_rows else ""
        return f"written   {self.written_rows} rows, {gib(self.written_bytes)}{rest}\n{self.store}"


def build_store(config: Config, *, part: tuple[int, int] = (0, 1), partial: bool = False) -> BuildReport:
    """Write the features of all rows, training and held-out, that the store lacks.

    Args:
        part: (i, n): only every n-th missing row from the i-th on, for several processes with a device each.
        partial: write as many rows as the disk holds, rather than refuse to begin.

    Raises:
        ValueError: the settings name no store, it is foreign or damaged, or the disk has no room.
        StoreFullError: the disk filled up meanwhile; what was written is whole and kept.
    """
    if config.features.source != "store":
        raise ValueError(
            "`store build` writes the store of features.source=store and features.path; found features.source=online"
        )
    plan = make_plan(replace(config, features=replace(config.features, missing="generate")))
    features, folder = plan.features, Path(config.features.path or "")
    assert features.spec is not None
    print(f"{plan.rows.report}{features.note}", flush=True)
    limit = free_space(folder) if partial else features.missing_bytes
    if not partial:
        check_space(folder, features)
    store = FeatureStore.open(folder, features.spec, create=True)
    rows = _missing_rows(plan, store, part)
    if partial:
        cost = np.cumsum([len(row) for row in rows]) * features.spec.bytes_per_token
        rows = rows[: int(np.searchsorted(cost, limit, side="right"))]
    writer = StoreWriter(store, origin=origin_of(plan), shard_bytes=config.features.shard_mib << 20)
    if rows:
        try:
            _write(plan, rows, writer)
        except KeyboardInterrupt:
            writer.flush()
            raise
    return BuildReport(
        written_rows=writer.num_rows,
        written_bytes=writer.num_bytes,
        missing_rows=len(_missing_rows(plan, store, (0, 1))),
        store=str(store),
    )


def _missing_rows(plan: RunPlan, store: FeatureStore, part: tuple[int, int]) -> list[NDArray[np.int32]]:
    """Token ids of the different rows that the store lacks."""
    found: dict[bytes, NDArray[np.int32]] = {}
    for number, tokens in enumerate(all_rows([rows for rows in (plan.rows, plan.validation_rows) if rows is not None])):
        if number % part[1] == part[0] and (key := row_key(tokens)) not in store:
            found[key] = tokens
    return list(found.values())


def _write(plan: RunPlan, rows: list[NDArray[np.int32]], writer: StoreWriter) -> None:
    """Run the target over rows, and keep what it says."""
    device, budget, spec = plan.target_devices[0], plan.config.token_budget, plan.features.spec
    assert spec is not None
    output = torch.zeros(budget, spec.feature_size, dtype=plan.features.output_dtype, device=device)
    target = Target(
        plan.config.target,
        target_layer_ids=plan.spec.target_layer_ids,
        output=output,
        device=device,
        dtype=plan.target_dtype,
    )
    target.check_attention()
    lengths = np.array([len(row) for row in rows])
    buckets = [(bucket.length, bucket.rows) for bucket in plan.buckets]
    shown = plan.config.log.progress
    with tqdm(total=int(lengths.sum()), unit=" tokens", unit_scale=True, disable=not shown) as progress:
        for length, members in batches(lengths, buckets):
            token_ids = np.zeros(budget, np.int64)
            for place, i in enumerate(members):
                token_ids[place * length : place * length + lengths[i]] = rows[i]
            target.forward(torch.from_numpy(token_ids).to(device), len(members), length)
            for place, i in enumerate(members):
                row = JobRow(place * length, np.ascontiguousarray(rows[i], np.int32), row_key(rows[i]))
                writer.add(encode_row(spec, row, output[row.place]))
            progress.update(int(lengths[members].sum()))
    writer.flush()


def batches(lengths: NDArray[Any], buckets: list[tuple[int, int]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Rows in groups that one forward pass holds: (row length of the bucket, indices of its rows).

    Args:
        lengths: (n,) tokens of each row. buckets: (length, rows) of each, ascending by length.
    """
    home = np.searchsorted([length for length, _ in buckets], lengths)
    for bucket, (length, rows) in enumerate(buckets):
        members = np.flatnonzero(home == bucket)
        for start in range(0, len(members), rows):
            yield length, members[start : start + rows]
