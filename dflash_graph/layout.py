"""Which devices of a machine hold which ranks: layouts, and the choice between them."""

from dataclasses import dataclass
from typing import Literal

from dflash_graph.config_groups import DeviceConfig


@dataclass(frozen=True)
class RankDevices:
    """Devices of one rank; targets may repeat a device."""

    drafter: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The ranks of one machine."""

    kind: Literal["single", "colocated", "split", "explicit"]
    ranks: tuple[RankDevices, ...]


def resolve_layout(devices: DeviceConfig, *, num_cuda: int) -> Layout:
    """The layout that the settings ask for."""
    if devices.device == "cpu":
        count = devices.ranks if isinstance(devices.ranks, int) else 1
        here = RankDevices("cpu", ("cpu",) * devices.num_targets)
        return Layout("single" if count == 1 else "colocated", (here,) * count)
    names = devices.target_devices or ("cuda:0",) * devices.num_targets
    return Layout("single", (RankDevices("cuda:0", tuple(names)),))
