"""GPU memory figures: every byte of the plan in one kind, shared memory once, and what the allocator adds."""

import torch

from dflash_graph.memory import measure
from dflash_graph.static_buffers import BufferSpec, BufferTable

CPU = torch.device("cpu")
MIB = 2**20


def table() -> BufferTable:
    sizes = {"slot.features": 3, "target.0.output": 2, "workspace.labels": 1}
    specs = [BufferSpec(n, (size * MIB,), torch.uint8, CPU, "w", ("r",)) for n, size in sizes.items()]
    return BufferTable(specs)


def test_kinds_devices_and_what_lies_beyond_the_plan() -> None:
    weight = torch.zeros(4 * MIB, dtype=torch.uint8)
    tensors = {"weights": [weight, weight[:10], weight.view(2, -1)], "drafter state": [torch.zeros(MIB)]}
    worker = {"allocated": 20 * MIB, "reserved": 32 * MIB, "graph_pool": 5 * MIB}
    other = {"allocated": 20 * MIB, "reserved": 32 * MIB, "graph_pool": 2 * MIB}
    (found,) = measure(table(), tensors, [(CPU, worker), (CPU, other)])
    assert found.planned == {
        "slots": 3 * MIB, "target buffers": 2 * MIB, "workspace": MIB, "weights": 4 * MIB, "drafter state": 4 * MIB,
    }  # fmt: skip
    assert found.measured == {"allocated": 20 * MIB, "reserved": 32 * MIB, "graph_pool": 7 * MIB}
    assert found.beyond_plan == 6 * MIB
    text = str(found)
    assert "planned 14.0 MiB" in text
    assert "6.0 MiB beyond the plan, graph pools 7.0 MiB" in text


def test_a_device_without_a_worker_is_listed_too() -> None:
    (found,) = measure(table(), {}, [])
    assert found.measured["allocated"] == 0
    assert sum(found.planned.values()) == table().nbytes()
