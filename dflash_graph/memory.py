"""Where a run's GPU memory goes: what was planned per device, and what the allocator says once everything is captured.

Planned bytes are exact for all that is allocated once (weights, optimizer, slots, buffers); graph pools and operator
workspaces are only known when they exist. Called by the drafter's worker at the end of the set-up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_graph.static_buffers import BufferTable


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One device's bytes.

    Attributes:
        planned: by kind: "weights", "drafter state", "slots", "target buffers", "workspace".
        measured: "allocated" and "reserved" by this process, "graph_pool" of all its workers.
    """

    device: str
    planned: Mapping[str, int]
    measured: Mapping[str, int]

    @property
    def beyond_plan(self) -> int:
        """Allocated bytes that are in no planned kind: operator workspaces, graph pools, tables."""
        return self.measured["allocated"] - sum(self.planned.values())

    def __str__(self) -> str:
        planned = ", ".join(f"{kind} {_mib(size)}" for kind, size in self.planned.items())
        measured = self.measured
        return (
            f"{self.device:<9} planned {_mib(sum(self.planned.values()))} ({planned}); measured allocated "
            f"{_mib(measured['allocated'])}, so {_mib(self.beyond_plan)} beyond the plan, graph pools "
            f"{_mib(measured['graph_pool'])}, reserved {_mib(measured['reserved'])}"
        )


def measure(
    table: BufferTable,
    tensors: Mapping[str, Iterable[Tensor]],
    contexts: Iterable[tuple[torch.device, Mapping[str, int]]],
) -> list[DeviceMemory]:
    """Figures of every device that holds a buffer or a tensor.

    Args:
        tensors: by kind, all that lives outside the table; what shares memory counts once.
        contexts: each worker's device and `WorkerContext.memory()`.
    """
    planned: dict[str, Counter[str]] = {}
    for spec in table.specs:
        kind = {"slot": "slots", "target": "target buffers"}.get(spec.name.partition(".")[0], "workspace")
        planned.setdefault(str(spec.device), Counter())[kind] += spec.nbytes
    seen: set[int] = set()
    for kind, group in tensors.items():
        for tensor in group:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                planned.setdefault(str(tensor.device), Counter())[kind] += storage.nbytes()
    measured: dict[str, dict[str, int]] = {}
    for device, figures in contexts:
        known = measured.setdefault(str(device), {"allocated": 0, "reserved": 0, "graph_pool": 0})
        known["allocated"], known["reserved"] = figures["allocated"], figures["reserved"]  # of the whole process
        known["graph_pool"] += figures["graph_pool"]
    empty = {"allocated": 0, "reserved": 0, "graph_pool": 0}
    return [
        DeviceMemory(device=device, planned=dict(kinds), measured=measured.get(device, empty))
        for device, kinds in sorted(planned.items())
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
