"""The operator stream of one run of a step, as a record: what ran, with which numbers, over which memory, from where.

A `Trace` keeps metadata and addresses, never a tensor. External memory is what an operation reads without the run
having produced it; a CUDA graph keeps its address for ever. Made by `tracing.Tracer`, compared by `frozen_world.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dflash_graph.findings import Phase, Site
from dflash_graph.op_rules import Problem

_SHORT_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def storage_ref(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Tells a storage from every other, also after it was freed; keeps its identity, not its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def is_freed(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor as an argument or result of an operation.

    Attributes:
        memory: index into `Trace.memories`: numbered in order of first appearance, so equal in equal runs.
        address: of its first element; 0 where there is none (meta, sparse, empty).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: int
    address: int

    @property
    def base(self) -> int:
        """Address of the tensor's storage."""
        return self.address and self.address - self.offset * self.dtype.itemsize

    def metadata(self) -> str:
        name = _SHORT_DTYPES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        text = f"{name}[{', '.join(map(str, self.shape))}]"
        if self.stride != _contiguous(self.shape):
            text += f" strides {self.stride}"
        if self.offset:
            text += f" offset {self.offset}"
        return text if self.device.type == "cpu" else f"{text} on {self.device}"


@dataclass(slots=True)
class Memory:
    """One storage that a run touched.

    Attributes:
        external: the run did not make it.
        size: bytes.
        temporary: a wrapped number, or host data, that came during the run unseen: its address means nothing.
    """

    external: bool
    first_op: int
    size: int
    ref: StorageWeakRef | None = field(repr=False)
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation.

    Attributes:
        scalars: (argument, value) of everything that is not a tensor, host scalars among the tensors included.
        node: autograd node in whose backward it ran, or "".
        of_forward: `site` is the line whose backward this is, not a line that runs now.
    """

    index: int
    name: str
    scalars: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, TensorFact], ...]
    outputs: tuple[TensorFact, ...]
    site: Site | None
    phase: Phase
    node: str = ""
    of_forward: bool = False
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A tensor attribute (.grad, .data) that was given another tensor, or None, during the run."""

    attribute: str
    storage: StorageWeakRef = field(repr=False)  # of what it held before
    site: Site | None


@dataclass
class Trace:
    """One run of a step, in order."""

    ops: list[OpRecord] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    rebindings: list[Rebinding] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ops)

    def names(self) -> list[str]:
        return [op.name for op in self.ops]

    def external_addresses(self) -> dict[int, int]:
        """Memory number -> address of its first use, for memory that lay there before the run."""
        found: dict[int, int] = {}
        for op in self.ops:
            for _, fact in op.inputs:
                memory = self.memories[fact.memory] if fact.memory >= 0 else None
                if memory is not None and memory.external and not memory.temporary:
                    found.setdefault(fact.memory, fact.address)
        return found

    def text(self, start: int = 0, stop: int | None = None, *, mark: int | None = None) -> str:
        """The stream for people: one line per operation; memory as %n, external memory as @n. `mark` gets an arrow."""
        return "\n".join(f"{'->' if op.index == mark else '  '} {self.line(op)}" for op in self.ops[start:stop])

    def line(self, op: OpRecord) -> str:
        arguments = [f"{name}={self._shown(fact)}" for name, fact in op.inputs]
        arguments += [f"{name}={_short(value)}" for name, value in op.scalars]
        results = ", ".join(self._shown(fact) for fact in op.outputs)
        where = f"{op.phase}{f' {op.node}' if op.node else ''}"
        faults = "".join(f"  !! {problem.kind}: {problem.what}" for problem in op.problems)
        site = f"  # {op.site}" if op.site is not None else ""
        return f"{op.index:5} {where}: {op.name}({', '.join(arguments)}) -> {results or '-'}{site}{faults}"

    def _shown(self, fact: TensorFact) -> str:
        external = fact.memory >= 0 and self.memories[fact.memory].external
        return f"{'@' if external else '%'}{fact.memory}:{fact.metadata()}"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
