"""The worker that fills slots from a feature store instead of from a target; and which workers a run has.

It takes jobs as a target worker does and publishes slots the same way, so nothing after the ring knows the difference.
A job's rows are found by the hash of their tokens, read by several threads into one staging buffer, checked, and
decoded into the output buffer. Rows that the store lacks are made by a target, if the settings say so, encoded as the
store would, and kept. Called by `training.py`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_graph.control import RunControl
from dflash_graph.dispatch import PaddedJob
from dflash_graph.graphs import CapturePhase, Observer
from dflash_graph.handoff import FeatureCopy, choose_route
from dflash_graph.plan import RunPlan
from dflash_graph.static_buffers import SLOT_METADATA, BufferTable, JobSource, Ring
from dflash_graph.store import FeatureStore
from dflash_graph.store_codec import TORCH_DTYPES, decode, encode, find_fault
from dflash_graph.store_identity import StoreSpec
from dflash_graph.store_plan import check_space
from dflash_graph.store_shard import StoredRow, row_key
from dflash_graph.store_target import HeadTarget
from dflash_graph.store_writer import StoreWriter
from dflash_graph.target import Target
from dflash_graph.workers import TargetWorker, make_context, set_cpu_threads


def make_feature_workers(
    plan: RunPlan,
    table: BufferTable,
    ring: Ring,
    source: JobSource,
    control: RunControl,
    *,
    phase: CapturePhase,
    observer: Observer | None = None,
    dry_run: bool = False,
) -> list[TargetWorker]:
    """The workers that fill the ring: a target each, or readers of one store.

    Args:
        dry_run: nothing may be kept: where rows are missing, targets make all of them.

    Raises:
        ValueError: the store is damaged, foreign, or its disk has no room for what the run would add.
    """
    if plan.features.spec is None or (dry_run and plan.features.missing_rows):
        return [
            TargetWorker(i, plan, table, ring, source, control, phase=phase, observer=observer)
            for i in range(plan.num_targets)
        ]
    config = plan.config.features
    folder = Path(config.path or "")
    store = FeatureStore.open(folder, plan.features.spec, create=config.missing == "generate")
    writer = None
    if config.missing == "generate":
        check_space(folder, plan.features)
        writer = StoreWriter(store, origin=origin_of(plan), shard_bytes=config.shard_mib << 20)
    return [
        StoreWorker(i, plan, table, ring, source, control, phase=phase, observer=observer, store=store, writer=writer)
        for i in range(plan.num_targets)
    ]


def origin_of(plan: RunPlan) -> dict[str, Any]:
    """What a shard says of features that our own target makes."""
    return {"source": "target", "dtype": str(plan.target_dtype).removeprefix("torch."), "torch": torch.__version__}


@dataclass(frozen=True)
class JobRow:
    """One row of a padded job: where it lies, and its name in the store."""

    start: int
    token_ids: NDArray[np.int32]
    key: bytes

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + len(self.token_ids))


def rows_of(job: PaddedJob) -> list[JobRow]:
    """The live rows of a job."""
    row_ids = job.row_ids.numpy()
    lengths = np.bincount(row_ids[row_ids >= 0], minlength=job.num_rows)
    found = []
    for row, length in enumerate(lengths.tolist()):
        start = row * job.bucket_length
        token_ids = job.token_ids.numpy()[start : start + length].astype(np.int32)
        found.append(JobRow(start, token_ids, row_key(token_ids)))
    return found


def encode_row(spec: StoreSpec, row: JobRow, features: Tensor) -> StoredRow:
    """A row as the store keeps it.

    Args:
        features: (n, N*D) on any device.

    Raises:
        ValueError: the features carry nothing.
    """
    # A row of one token alone, repeated, is the same at every position for good reason.
    constant = bool((row.token_ids == row.token_ids[0]).all())
    if (fault := find_fault(features[:1] if constant else features, spec.target_layer_ids)) is not None:
        raise ValueError(
            f"features of a row of {len(row.token_ids)} tokens must be finite and differ between positions; {fault}. "
            "The target's weights are damaged, or target.dtype overflows"
        )
    values, exponents = encode(features, len(spec.target_layer_ids), spec.dtype)
    host = torch.empty(values.shape, dtype=values.dtype).copy_(values)  # sync: on CUDA, the row on its way to disk
    return StoredRow(
        row.key, row.token_ids, host.view(torch.uint8).numpy(), None if exponents is None else exponents.cpu().numpy()
    )


class _Staging:
    """Host memory that one job's rows are read into, as they are stored; pinned where a GPU copies from it."""

    def __init__(self, plan: RunPlan, spec: StoreSpec) -> None:
        tokens, cuda = plan.config.token_budget, plan.device.type == "cuda"
        dtype, taps = TORCH_DTYPES[spec.dtype], len(spec.target_layer_ids)
        self.values = torch.empty(tokens, spec.feature_size, dtype=dtype, pin_memory=cuda)
        self.exponents = torch.empty(tokens, taps, dtype=torch.int8, pin_memory=cuda) if spec.dtype == "fp8" else None
        self.bytes: NDArray[np.uint8] = self.values.view(torch.uint8).numpy()
        self.exponent_bytes = None if self.exponents is None else self.exponents.numpy()
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def parts(self, place: slice) -> tuple[NDArray[np.uint8], NDArray[np.int8] | None]:
        """(values, exponents) of some positions."""
        return self.bytes[place], None if self.exponent_bytes is None else self.exponent_bytes[place]

    def wait(self) -> None:
        """Until the GPU has read what was staged before."""
        if self._copied is not None:
            self._copied.synchronize()  # sync: before the host writes into it again

    def decode(self, out: Tensor, device_values: Tensor | None, num_positions: int) -> None:
        """Into the first positions of `out`, on the current stream."""
        values, exponents = self.values[:num_positions], None
        if self.exponents is not None:
            exponents = self.exponents[:num_positions].to(out.device, non_blocking=True)
        if device_values is not None:
            values = device_values[:num_positions].copy_(values, non_blocking=True)
        decode(values, exponents, out[:num_positions])
        if self._copied is not None:
            self._copied.record()


class StoreWorker(TargetWorker):
    """A target worker whose features lie on disk.

    Args:
        store, writer: shared by the workers of a process; without a writer a missing row is an error.
    """

    def __init__(
        self,
        index: int,
        plan: RunPlan,
        table: BufferTable,
        ring: Ring,
        source: JobSource,
        control: RunControl,
        *,
        phase: CapturePhase,
        observer: Observer | None,
        store: FeatureStore,
        writer: StoreWriter | None,
    ) -> None:
        super().__init__(index, plan, table, ring, source, control, phase=phase, observer=observer)
        self.name = f"store-{index}"
        self._store, self._writer, self._spec = store, writer, store.spec
        self._staged = 0
        self._pool: ThreadPoolExecutor | None = None

    def load(self) -> None:
        """Load the target, if it may be needed, or its embedding and head alone; and the staging buffers."""
        plan = self._plan
        if self._writer is not None:
            super().load()
        else:
            self._load_head()
        count = 2 if plan.device.type == "cuda" else 1
        self._staging = [_Staging(plan, self._spec) for _ in range(count)]
        # Eight-bit values go to the GPU as they are and are decoded there.
        on_gpu = plan.device.type == "cuda" and self._spec.dtype == "fp8"
        self._device_values = torch.empty_like(self._staging[0].values, device=self._output.device) if on_gpu else None
        self._pool = ThreadPoolExecutor(plan.config.features.readers, thread_name_prefix=f"{self.name}-reader")

    def _load_head(self) -> None:
        plan = self._plan
        set_cpu_threads(plan.config.devices.target_threads, plan.workers_here)
        device = plan.target_devices[self._index]
        context = self.context = make_context(self.name, device, plan, self._phase, self._observer)
        context.__enter__()
        route = choose_route(device, plan.device, strict=plan.config.graphs.strict)
        self._copy = FeatureCopy(device, plan.device, route)
        self._copy.reserve({"features": self._output})
        head = HeadTarget(
            plan.config.target,
            target_layer_ids=plan.spec.target_layer_ids,
            device=device,
            dtype=plan.target_dtype,
            keep_layers=plan.spec.num_hidden_layers if plan.config.drafter.init == "target" else 0,
        )
        self.target = cast(Target, head)  # nobody asks it for a forward pass
        context.prepare()

    def close(self) -> None:
        """Keep what was made on the fly, then as a target worker."""
        try:
            with self._turn:
                pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()
            if self._writer is not None:
                self._writer.flush()
        finally:
            super().close()

    def _forward(self, job: PaddedJob) -> dict[str, Tensor]:
        self._fill(job, partial(super()._forward, job))
        return {"features": self._output}

    def extract(self, job: PaddedJob) -> dict[str, Tensor]:
        """As a target worker's, from the store; also when the worker has ended."""

        def forward() -> None:
            assert self.target is not None
            self.target.forward(job.token_ids.to(self._output.device), job.num_rows, job.bucket_length)

        self._fill(job, forward)
        if self._pool is None and self._writer is not None:
            self._writer.flush()
        plan = self._plan
        metadata = {name: getattr(job, name).to(plan.device) for name in SLOT_METADATA}
        return {"features": self._output.to(plan.device, plan.compute_dtype)} | metadata

    def _fill(self, job: PaddedJob, forward: Callable[[], object]) -> None:
        """Fill the output buffer with a job's features as the store has them.

        Args:
            forward: runs the target over the job, into the output buffer; only where rows are missing.
        """
        rows = rows_of(job)
        missing = [row for row in rows if not self._has(row.key)]
        if missing and self._writer is not None:
            self._store.refresh()  # another process may have made them
            missing = [row for row in missing if row.key not in self._store]
        if missing:
            self._make(missing, forward)
        staging = self._staging[self._staged]
        self._staged = (self._staged + 1) % len(self._staging)
        staging.wait()
        read = partial(self._read, staging)
        list(map(read, rows) if self._pool is None else self._pool.map(read, rows))  # raises the first error
        staging.decode(self._output, self._device_values, job.num_rows * job.bucket_length)

    def _has(self, key: bytes) -> bool:
        return key in self._store or (self._writer is not None and self._writer.pending(key) is not None)

    def _make(self, missing: list[JobRow], forward: Callable[[], object]) -> None:
        if self._writer is None:
            raise RuntimeError(
                f"store {self._store.folder} lacks {len(missing)} rows of a job; the plan found them all"
            )
        forward()
        for row in missing:
            self._writer.add(encode_row(self._spec, row, self._output[row.place]))

    def _read(self, staging: _Staging, row: JobRow) -> None:
        values, exponents = staging.parts(row.place)
        # In this order: a row that is flushed in between is pending until it can be found in the store.
        made = None if self._writer is None else self._writer.pending(row.key)
        if made is None:
            self._store.read(row.key, values, exponents)
            return
        values[:] = made.values
        if exponents is not None and made.exponents is not None:
            exponents[:] = made.exponents
