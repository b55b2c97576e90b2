"""Every tensor that work touches, allocated once from one table of specs, and the slots made of them.

Owns the memory: nothing here is rebound or resized after the table is made, and `check_addresses` proves it. Who may
write or read which slot is the matter of `ring.py` and `pool.py`, whose names are exported here too. Called to plan and
to allocate, by target workers (`write_metadata`) and by tests (`poison`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_graph.pool import Draw, Pool
from dflash_graph.ring import JobSource, Lease, Ring, SlotState, StreamEvent, check_ring, default_slots

if TYPE_CHECKING:
    from dflash_graph.dispatch import PaddedJob

__all__ = [
    "SLOT_METADATA",
    "BufferSpec",
    "BufferTable",
    "Draw",
    "JobSource",
    "Lease",
    "Pool",
    "Ring",
    "SlotState",
    "StreamEvent",
    "TeacherSpec",
    "check_ring",
    "default_slots",
    "describe_specs",
    "slot_specs",
    "write_metadata",
]

# The tensors of a padded job that its slot holds, by their common name.
SLOT_METADATA = (
    "token_ids",
    "positions",
    "row_ids",
    "anchors",
    "anchor_row_starts",
    "anchor_tokens",
    "trained_rows",
    "labels",
    "weights",
)


@dataclass(frozen=True)
class BufferSpec:
    """One static tensor: what it is, where it lives, who writes it and who reads it.

    Raises:
        ValueError: no name, or a dimension that is not at least 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    writer: str
    readers: tuple[str, ...]
    fill: float = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a buffer must have a name")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"every dimension of buffer {self.name!r} must be at least 1; found {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """Sizes of what the target says about its own next token, where a loss needs it.

    Attributes:
        num_positions: U, most positions of a job. hidden_size: D. dtype: of the target's hidden rows.
        with_kl: the mean head row and the entropy of its distribution are needed.
        with_labels: its most likely token is needed.
    """

    num_positions: int
    hidden_size: int
    dtype: torch.dtype
    with_kl: bool
    with_labels: bool

    @property
    def statistics(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each statistic that travels from a target through a slot to the step, by name."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.with_kl:
            # float32 whatever the compute dtype: the KL is a small difference of large terms.
            found["teacher_mean"] = ((self.num_positions, self.hidden_size), torch.float32)
            found["teacher_entropy"] = ((self.num_positions,), torch.float32)
        if self.with_labels:
            found["teacher_argmax"] = ((self.num_positions,), torch.int64)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the statistics in one slot."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.statistics.values())

    def target_specs(self, i: int, device: torch.device) -> list[BufferSpec]:
        """Specs of what target `i` fills: `target.<i>.teacher_*`, the rows its head reads and what comes of them."""
        u = self.num_positions
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "teacher_positions": ((u,), torch.int64),
            "num_teacher_positions": ((), torch.int64),
            "teacher_hidden": ((u, self.hidden_size), self.dtype),
            # The operator writes these two in any case.
            "teacher_entropy": ((u,), torch.float32),
            "teacher_argmax": ((u,), torch.int64),
            **self.statistics,
        }
        return [
            BufferSpec(f"target.{i}.{name}", shape, dtype, device, f"target {i}", (f"target {i}",))
            for name, (shape, dtype) in shapes.items()
        ]


def _signature(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class BufferTable:
    """Allocates every spec on construction, filled with its `fill`; `table["name"]` is the tensor, for ever.

    Raises:
        ValueError: two specs share a name.
        RuntimeError: memory ran out; a note names the buffer and the whole plan.
    """

    def __init__(self, specs: Iterable[BufferSpec]) -> None:
        self.specs = tuple(specs)
        names = [spec.name for spec in self.specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"buffer names must be unique; found {', '.join(twice)} more than once")
        self._tensors: dict[str, Tensor] = {}
        for spec in self.specs:
            try:
                self._tensors[spec.name] = torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=spec.device)
            except RuntimeError as error:
                error.add_note(f"while allocating buffer {spec.name!r} of this plan:\n{self}")
                raise
        self._originals = dict(self._tensors)
        self._addresses = self.addresses()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"no buffer is named {name!r}; there are {', '.join(self._tensors)}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def addresses(self) -> dict[str, tuple[object, ...]]:
        """(data_ptr, shape, stride, dtype, device) of each buffer now."""
        return {name: _signature(tensor) for name, tensor in self._tensors.items()}

    def check_addresses(self, held: Mapping[str, Tensor] | None = None) -> None:
        """Prove that no buffer moved, changed its shape, stride or dtype, or was rebound since it was allocated.

        Args:
            held: by buffer name, the whole-buffer tensors that a worker holds and uses; each must be that same memory.

        Raises:
            RuntimeError: names each buffer that differs, with what it was and what it is.
        """
        faults = []
        for name, was in self._addresses.items():
            now = _signature(self._tensors[name])
            if now != was:
                faults.append(f"{name}: was {was}, is {now}")
            elif self._tensors[name] is not self._originals[name]:
                faults.append(f"{name}: rebound to another tensor object")
        for name, tensor in (held or {}).items():
            now = _signature(tensor)
            if now != self._addresses[name]:
                faults.append(f"{name}: its holder was given {self._addresses[name]}, holds {now}")
        if faults:
            raise RuntimeError(
                "static buffers must keep their memory for the whole run; write into them in place. Changed "
                "(data_ptr, shape, stride, dtype, device):\n" + "\n".join(faults)
            )

    def nbytes(self, device: torch.device | str | None = None) -> int:
        """Bytes of all buffers, or of those on `device` ("cuda" counts every GPU, "cuda:0" one)."""
        if device is None:
            return sum(spec.nbytes for spec in self.specs)
        wanted = torch.device(device)
        return sum(
            spec.nbytes
            for spec in self.specs
            if spec.device.type == wanted.type and wanted.index in (None, spec.device.index)
        )

    def poison(self, names: Iterable[str] | None = None) -> None:
        """Overwrite buffers (all, or those named) with what no correct reader survives: NaN, or the largest integer."""
        for name in self if names is None else names:
            tensor = self[name]
            if tensor.dtype == torch.bool:
                tensor.fill_(True)
            elif tensor.is_floating_point():
                tensor.fill_(math.nan)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    def __str__(self) -> str:
        return describe_specs(self.specs)


def _human(num_bytes: int) -> str:
    unit, size = ("GiB", 1 << 30) if num_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{num_bytes / size:.2f} {unit}"


def describe_specs(specs: Sequence[BufferSpec]) -> str:
    """The plan as text: one line per buffer, then the total of each device. Allocates nothing."""
    header = ("buffer", "shape", "dtype", "device", "writer", "readers", "bytes")
    rows = [
        (
            spec.name,
            "x".join(map(str, spec.shape)) or "scalar",
            str(spec.dtype).removeprefix("torch."),
            str(spec.device),
            spec.writer,
            ", ".join(spec.readers),
            _human(spec.nbytes),
        )
        for spec in specs
    ]
    totals: dict[str, int] = {}
    for spec in specs:
        totals[str(spec.device)] = totals.get(str(spec.device), 0) + spec.nbytes
    rows += [(f"total on {device}", "", "", "", "", "", _human(total)) for device, total in totals.items()]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]))
    return "\n".join(lines)


def slot_specs(
    *,
    num_slots: int,
    num_targets: int,
    token_budget: int,
    feature_size: int,
    num_anchors: int,
    block_size: int,
    feature_dtype: torch.dtype,
    device: torch.device | str,
    teacher: TeacherSpec | None = None,
    target_devices: Sequence[torch.device] | None = None,
    output_dtype: torch.dtype | None = None,
) -> list[BufferSpec]:
    """Specs of the ring's S slots and of each target's input and output buffers, on `device`.

    Names: `slot.features` (S, T, N*D), `slot.<name>` for each of `SLOT_METADATA` with S in front of the job's shape,
    and `target.<i>.output` (T, N*D), both in `feature_dtype` so that the copy into the slot converts nothing (unless
    features are to be rounded to another `output_dtype` first);
    `target.<i>.token_ids` (T,) is what its step reads. With a teacher also `slot.teacher_rows`, and its statistics in
    the slots and per target.

    Args:
        feature_size: N*D.
        target_devices: where each target's buffers lie; None is the slots' device.
    """
    device = torch.device(device)
    homes = list(target_devices or [device] * num_targets)
    features = (token_budget, feature_size)
    per_token, per_anchor, per_row = (token_budget,), (num_anchors,), (num_anchors * (block_size - 1),)

    def slot(name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0) -> BufferSpec:
        return BufferSpec(f"slot.{name}", (num_slots, *shape), dtype, device, "targets", ("drafter",), fill)

    outputs = [
        BufferSpec(f"target.{i}.{name}", size, dtype, home, f"target {i}", (f"target {i}",))
        for i, home in enumerate(homes)
        for name, size, dtype in (
            ("token_ids", per_token, torch.int64),
            ("output", features, output_dtype or feature_dtype),
        )
    ]
    slots = [
        slot("features", features, feature_dtype),
        slot("token_ids", per_token, torch.int64),
        slot("positions", per_token, torch.int64),
        slot("row_ids", per_token, torch.int32, -1),
        slot("anchors", per_anchor, torch.int64),
        slot("anchor_row_starts", per_anchor, torch.int64),
        slot("anchor_tokens", per_anchor, torch.int64),
        slot("trained_rows", per_row, torch.int64),
        slot("labels", per_row, torch.int64, -100),
        slot("weights", per_row, torch.float32),
    ]
    if teacher is not None:
        slots.append(slot("teacher_rows", per_row, torch.int64))
        slots += [slot(name, shape, dtype) for name, (shape, dtype) in teacher.statistics.items()]
        outputs += [spec for i, home in enumerate(homes) for spec in teacher.target_specs(i, home)]
    return [*slots, *outputs]


def write_metadata(table: BufferTable, slot: int, job: PaddedJob) -> None:
    """Copy a padded job's tensors into the views of `slot`, on the current stream of the slots' device.

    Raises:
        ValueError: a tensor's shape or dtype is not the slot's (a copy would broadcast or cast without a word).
    """
    names = (*SLOT_METADATA, "teacher_rows") if "slot.teacher_rows" in table else SLOT_METADATA
    for name in names:
        source: Tensor | None = getattr(job, name)
        view = table[f"slot.{name}"][slot]
        if source is None:
            raise ValueError(f"the job must be padded with {name!r}, as the buffers were planned; set its with_teacher")
        if source.shape != view.shape or source.dtype != view.dtype:
            raise ValueError(
                f"job tensor {name!r} must be {view.dtype} {tuple(view.shape)} as its slot; found {source.dtype} "
                f"{tuple(source.shape)}. Pad jobs with the settings the buffers were planned with"
            )
        view.copy_(source, non_blocking=True)
