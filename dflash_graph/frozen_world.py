"""What must not change between two runs of a step: its operations, its numbers, and where its tensors lie.

`compare_traces` finds the first difference of two traces; `AddressBook` says which named tensor moved, and how. Memory
is told apart by storage, not by address alone: what was freed and allocated anew often lands where it was. Holds no
tensor alive. Used by the debug command through `tracing.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dflash_graph.findings import Finding, Site
from dflash_graph.traces import OpRecord, TensorFact, Trace, is_freed, storage_ref

# ---- two traces -----------------------------------------------------------------------------------------------------

_MEANINGS = {
    "ops": "a graph replays the operations of the run it captured, whatever the data: this step depends on something "
    "that the graph cannot see",
    "scalar": "the number is a constant of the captured graph: every replay uses the value of the capture",
    "metadata": "shapes, strides and dtypes are constants of the captured graph",
    "wiring": "a graph reads the memory that the captured run read: here the operations are the same but read others' "
    "results",
    "address": "the graph reads and writes the old address for ever: it would miss the new tensor, and touch memory "
    "that may belong to others",
}
_ADVICE = {
    "ops": "remove the branch (or the cache, or the first-call set-up) from the step; what must be done once belongs "
    "before the warm-up",
    "scalar": "keep the value in a tensor allocated before the step and fill it in place between steps (a learning "
    "rate: a 0-dim tensor with capturable=True)",
    "metadata": "give the tensor a fixed shape and layout: pad to the largest size and mask",
    "wiring": "let no Python state choose between tensors inside the step",
    "address": "allocate the tensor once, before the step, and write into it in place (copy_, zero_grad with "
    "set_to_none=False, load into existing state)",
}
_CAPTURE_MEANING = (
    "the step takes another path while a stream is capturing: warm-up ran other operations than the graph will hold, "
    "so the graph is not what was tested, and first-time work may fall into the capture"
)
_CAPTURE_ADVICE = (
    "take the path that does not ask for the capture state (for transformers' masks: an attention function of one's "
    "own, registered without a mask function, or an explicit attention_mask)"
)


def compare_traces(
    before: Trace, after: Trace, *, check: str, names: Mapping[str, Tensor] | None = None
) -> list[Finding]:
    """The first differences of two runs of one step: one finding per kind, the stream's first and last.

    Kinds are scalar arguments, tensor metadata, wiring (which memory an operation reads), external addresses, and the
    operations themselves; after the first differing operation nothing is compared.

    Args:
        check: "frozen_world" (two runs over different data) or "capture_branch" (before: not capturing; after:
            capturing).
        names: tensors that the step is known to reach, to name a moved one.
    """
    findings: dict[str, Finding] = {}
    book = _names_by_address(names)

    def report(kind: str, what: str, op: OpRecord) -> None:
        capture = check == "capture_branch" and kind != "address"
        findings.setdefault(
            kind,
            Finding(
                check,
                what,
                _CAPTURE_MEANING if capture else _MEANINGS[kind],
                _CAPTURE_ADVICE if capture else _ADVICE[kind],
                op.site,
            ),
        )

    first, second = ("not capturing", "capturing") if check == "capture_branch" else ("first run", "second run")
    for a, b in zip(before.ops, after.ops, strict=False):
        if a.name != b.name:
            what = (
                f"operation {a.index} differs: {first} {_described(a)}; {second} {_described(b)} "
                f"({len(before)} and {len(after)} operations in all)"
            )
            report("ops", what, b if check == "capture_branch" else a)
            break
        for kind, what in _differences(before, after, a, b, first, second, book):
            report(kind, what, a)
    else:
        if len(before) != len(after):
            longer, n = (before, len(after)) if len(before) > len(after) else (after, len(before))
            extra = longer.ops[n]
            what = (
                f"{first} has {len(before)} operations, {second} {len(after)}; the first one more: {_described(extra)}"
            )
            report("ops", what, extra)
    return list(findings.values())


def _differences(
    before: Trace, after: Trace, a: OpRecord, b: OpRecord, first: str, second: str, book: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    """(kind, what) of two operations of one name."""
    yield from _scalar_differences(a, b, first, second)
    if (len(a.inputs), len(a.outputs)) != (len(b.inputs), len(b.outputs)):
        counts = f"{len(a.inputs)} and {len(b.inputs)} tensors in, {len(a.outputs)} and {len(b.outputs)} out"
        yield "metadata", f"{a.name} has {counts} ({first}, {second})"
        return
    for (name, x), (_, y) in zip(_facts(a), _facts(b), strict=True):
        if (x.shape, x.stride, x.offset, x.dtype, x.device) != (y.shape, y.stride, y.offset, y.dtype, y.device):
            yield "metadata", f"{name} of {a.name} is {x.metadata()} in the {first} and {y.metadata()} in the {second}"
        if x.memory < 0 or y.memory < 0:
            continue
        p, q = before.memories[x.memory], after.memories[y.memory]
        if x.memory != y.memory or p.external != q.external:
            yield (
                "wiring",
                f"{name} of {a.name} is {_origin(before, x)} in the {first} and {_origin(after, y)} in the {second}",
            )
        elif p.external and not (p.temporary or q.temporary):
            called = book.get(y.address) or book.get(x.address)
            label = f"{called} ({name} of {a.name})" if called else f"{name} of {a.name}, {x.metadata()},"
            if x.base != y.base:
                yield "address", f"{label} lies at {x.address:#x} in the {first} and at {y.address:#x} in the {second}"
            elif p.ref is not None and q.ref is not None and p.ref != q.ref and is_freed(p.ref):
                what = f"was freed after the {first}; in the {second} another tensor lies at its address {x.address:#x}"
                yield "address", f"{label} {what}"


def _facts(op: OpRecord) -> list[tuple[str, TensorFact]]:
    return [*op.inputs, *(("result", fact) for fact in op.outputs)]


def _scalar_differences(a: OpRecord, b: OpRecord, first: str, second: str) -> Iterator[tuple[str, str]]:
    before, after = dict(a.scalars), dict(b.scalars)
    for name in sorted(before.keys() | after.keys()):
        x, y = repr(before.get(name, "absent")), repr(after.get(name, "absent"))
        if x != y:  # by text: NaN equals NaN, 1 is not True
            yield "scalar", f"{name} of {a.name} is {x} in the {first} and {y} in the {second}"


def _origin(trace: Trace, fact: TensorFact) -> str:
    memory = trace.memories[fact.memory]
    if memory.external:
        return f"external memory at {fact.address:#x}"
    return f"the result of {_described(trace.ops[memory.first_op])}"


def _described(op: OpRecord) -> str:
    return f"{op.name} at {op.site}" if op.site is not None else op.name


def _names_by_address(names: Mapping[str, Tensor] | None) -> dict[int, str]:
    return {tensor.data_ptr(): name for name, tensor in (names or {}).items() if tensor.numel() > 0}


# ---- addresses ------------------------------------------------------------------------------------------------------

_MOVED = (
    "a captured graph keeps reading and writing the memory it was captured with: it would miss this tensor, and touch "
    "memory that may belong to others"
)


@dataclass(frozen=True)
class _Entry:
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage: StorageWeakRef


class AddressBook:
    """Where named tensors lay when the book was made (or last `rewrite`d).

    Args:
        names: read at each check, so that rebinding shows; a tensor that does not exist may be missing or None.
    """

    def __init__(self, names: Callable[[], Mapping[str, Tensor | None]]) -> None:
        self._names = names
        self._entries: dict[str, _Entry | None] = {}
        self.rewrite()

    def rewrite(self) -> None:
        """Take what lies there now as right."""
        self._entries = {name: _entry(tensor) for name, tensor in self._names().items()}

    def check(self, *traces: Trace) -> list[Finding]:
        """One finding per tensor that moved, went, came, or changed its shape, strides, dtype or device.

        Args:
            traces: runs since the book was made; they may know the line where the tensor was replaced or made.
        """
        now = {name: _entry(tensor) for name, tensor in self._names().items()}
        findings = []
        for name in (*self._entries, *(n for n in now if n not in self._entries)):
            old, new = self._entries.get(name), now.get(name)
            change = _change(name, old, new)
            if change is not None:
                findings.append(Finding("frozen_world", change[0], _MOVED, change[1], _replaced_at(old, new, traces)))
        return findings


def _entry(tensor: Tensor | None) -> _Entry | None:
    if tensor is None:
        return None
    return _Entry(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.device,
        storage_ref(tensor.untyped_storage()),
    )


def _replaced_at(old: _Entry | None, new: _Entry | None, traces: tuple[Trace, ...]) -> Site | None:
    """Where an attribute that held the old tensor was rebound, or else where the new tensor's memory was made."""
    for trace in traces:
        for rebinding in trace.rebindings:
            if old is not None and rebinding.storage == old.storage:
                return rebinding.site
    for trace in traces:
        for memory in trace.memories:
            if new is None or memory.external or memory.ref is None:
                continue
            if memory.ref == new.storage:
                return trace.ops[memory.first_op].site
    return None


def _change(name: str, old: _Entry | None, new: _Entry | None) -> tuple[str, str] | None:
    """(what, advice), or None if nothing changed."""
    gradient = "grad" in name.lower().replace("_", ".").split(".")
    if old is None and new is None:
        return None
    if new is None:
        what = f"{name} was set to None or is gone; it lay at {old.address:#x}" if old else ""
        return what, _GRADIENT if gradient else _REBOUND
    if old is None:
        return f"{name} did not exist before and now lies at {new.address:#x}", _GRADIENT if gradient else _EARLY
    if (old.dtype, old.device) != (new.dtype, new.device):
        kind = f"from {old.dtype} on {old.device} to {new.dtype} on {new.device}"
        return f"{name} was cast or moved {kind} ({old.address:#x} -> {new.address:#x})", _CAST
    if old.address != new.address:
        gone = "; the old memory is freed" if is_freed(old.storage) else "; the old memory still exists"
        return f"{name} moved from {old.address:#x} to {new.address:#x}{gone}", _GRADIENT if gradient else _REBOUND
    if old.storage != new.storage and is_freed(old.storage):
        what = f"{name} was freed and allocated anew; by chance it lies at {new.address:#x} again"
        return what, _GRADIENT if gradient else _REBOUND
    if (old.shape, old.stride) != (new.shape, new.stride):
        what = f"{name} changed from shape {old.shape}, strides {old.stride} to shape {new.shape}, strides {new.stride}"
        return what, _REBOUND
    return None


_GRADIENT = (
    "keep gradients allocated: zero_grad(set_to_none=False), or zero them in place inside the step; allocate them "
    "before the warm-up"
)
_REBOUND = (
    "write into the tensor in place (copy_, load_state_dict without assign=True) instead of binding another; optimizer "
    "state: copy each loaded tensor into the live one, because Optimizer.load_state_dict rebinds it"
)
_CAST = "cast or move the module before the capture, or keep a copy in the other dtype and refresh it in place"
_EARLY = "make the tensor before the warm-up (optimizer state: one step on zero gradients, or set it up by hand)"
