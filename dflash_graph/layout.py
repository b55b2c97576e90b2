"""Which devices of a machine hold which ranks: explicit lists, one rank per GPU, or targets that feed fewer drafters.

Pure arithmetic over device names and seconds; nothing here touches a device. `stage_times.py` has the seconds. Called
by the command line, which starts the ranks, and by each of them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dflash_graph.config_groups import DeviceConfig

Kind = Literal["single", "colocated", "split", "explicit"]


@dataclass(frozen=True)
class RankDevices:
    """Devices of one rank: "cpu", "cuda:0", ...; targets may repeat a device."""

    drafter: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The ranks of one machine."""

    kind: Kind
    ranks: tuple[RankDevices, ...]

    def __str__(self) -> str:
        if self.kind == "single":
            return "one rank"
        shapes = ", ".join(f"{rank.drafter} fed by {'+'.join(rank.targets)}" for rank in self.ranks)
        return f"{self.kind}, {len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}: {shapes}"

    def to_json(self) -> str:
        """For the environment of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        values = json.loads(text)
        ranks = tuple(RankDevices(rank["drafter"], tuple(rank["targets"])) for rank in values["ranks"])
        return cls(values["kind"], ranks)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of each stage, planned or measured, and what fits into a device.

    Attributes:
        target_s, drafter_s: of one job. apply_s: of one step's all-reduce and update. copy_s: of one job's features
            from one device to another.
        colocated_fits: target and drafter fit into one device together.
    """

    target_s: float
    drafter_s: float
    apply_s: float = 0.0
    copy_s: float = 0.0
    jobs_per_step: int = 8
    colocated_fits: bool = True


@dataclass(frozen=True)
class Candidate:
    """A layout and the jobs per second it should reach; `fits` is False where a device is too small for it."""

    layout: Layout
    jobs_per_s: float
    fits: bool = True

    def __str__(self) -> str:
        drafters = len(self.layout.ranks)
        targets = sum(len(rank.targets) for rank in self.layout.ranks)
        name = f"split {targets}:{drafters}" if self.layout.kind == "split" else self.layout.kind
        return f"{name} {self.jobs_per_s:.3g} jobs/s" + ("" if self.fits else " (does not fit)")


def colocated(count: int) -> Layout:
    """Every GPU is a rank with target and drafter: nothing crosses devices."""
    ranks = tuple(RankDevices(f"cuda:{i}", (f"cuda:{i}",)) for i in range(count))
    return Layout("single" if count == 1 else "colocated", ranks)


def split(count: int, targets: int) -> Layout:
    """`targets` of the GPUs hold targets and feed the drafters on the others, as evenly as possible.

    Raises:
        ValueError: a drafter would have no target, or there is none.
    """
    drafters = count - targets
    if not 1 <= drafters <= targets:
        raise ValueError(
            f"a split of {count} GPUs needs at least one drafter, and a target for each; found {targets} targets and "
            f"{drafters} drafters. Set devices.split_targets to {-(-count // 2)}..{count - 1}, or take "
            "devices.layout=colocated"
        )
    ranks = []
    for i in range(drafters):
        # 5 targets for 3 drafters are 2, 2 and 1.
        first, last = -(-targets * i // drafters), -(-targets * (i + 1) // drafters)
        ranks.append(RankDevices(f"cuda:{targets + i}", tuple(f"cuda:{t}" for t in range(first, last))))
    return Layout("split", tuple(ranks))


def predict(layout: Layout, times: StageTimes) -> float:
    """Jobs per second of one machine.

    A device that holds both stages does one after the other's work in turns: their times add. Where they lie on devices
    of their own, the slower side sets the pace. Ranks take jobs in proportion to their targets.
    """
    total = sum(len(rank.targets) for rank in layout.ranks)
    seconds_per_step = 0.0
    for rank in layout.ranks:
        jobs = times.jobs_per_step * len(rank.targets) / total
        alone = [name for name in rank.targets if name != rank.drafter]
        target = jobs * times.target_s / len(rank.targets)
        drafter = jobs * times.drafter_s + times.apply_s
        if len(alone) == len(rank.targets):
            pace = max(target + jobs * times.copy_s / len(rank.targets), drafter)
        else:
            pace = drafter + target * rank.targets.count(rank.drafter)
        seconds_per_step = max(seconds_per_step, pace)
    return times.jobs_per_step / seconds_per_step


def candidates(count: int, times: StageTimes) -> list[Candidate]:
    """Every layout of `count` GPUs, best first; of equals the co-located one."""
    found = [Candidate(colocated(count), predict(colocated(count), times), times.colocated_fits)]
    for targets in range(-(-count // 2), count):
        layout = split(count, targets)
        found.append(Candidate(layout, predict(layout, times)))
    return sorted(found, key=lambda each: (not each.fits, -each.jobs_per_s))


def needs_times(devices: DeviceConfig, num_cuda: int) -> bool:
    """Whether `resolve_layout` has a choice to make."""
    free = devices.device == "cuda" and devices.ranks is None and devices.target_devices is None
    undecided = devices.layout == "auto" or (devices.layout == "split" and devices.split_targets is None)
    return free and num_cuda > 1 and undecided and devices.num_targets == 1


def resolve_layout(devices: DeviceConfig, *, num_cuda: int, times: StageTimes | None = None) -> Layout:
    """The layout of one machine.

    Args:
        num_cuda: GPUs that torch finds.
        times: for `devices.layout=auto` and for a split whose targets are not numbered; None takes the co-located
            layout, or half of the GPUs (or one more) as targets.

    Raises:
        ValueError: the settings contradict the machine or each other.
    """
    if isinstance(devices.ranks, tuple):
        return _explicit(devices, num_cuda)
    if devices.device == "cpu":
        here = RankDevices("cpu", ("cpu",) * devices.num_targets)
        count = devices.ranks or 1
        return Layout("single" if count == 1 else "colocated", (here,) * count)
    if devices.ranks is not None or devices.target_devices is not None or devices.num_targets > 1:
        return _of_one_kind(devices, num_cuda)
    if devices.layout == "split":
        if devices.split_targets is not None:
            return split(num_cuda, devices.split_targets)
        if num_cuda < 2:
            raise ValueError(f"devices.layout=split needs at least two GPUs; torch finds {num_cuda}")
        splits = [] if times is None else [c for c in candidates(num_cuda, times) if c.layout.kind == "split"]
        return splits[0].layout if splits else split(num_cuda, -(-num_cuda // 2))
    if devices.layout == "auto" and times is not None and num_cuda > 1:
        return candidates(num_cuda, times)[0].layout
    return colocated(max(1, num_cuda))


def _of_one_kind(devices: DeviceConfig, num_cuda: int) -> Layout:
    """So many ranks, one per GPU, or one rank whose targets lie where the settings say."""
    count = devices.ranks if isinstance(devices.ranks, int) else 1
    if count > max(1, num_cuda):
        raise ValueError(f"devices.ranks must be at most one per GPU; found {count} for {num_cuda} GPUs")
    names = devices.target_devices
    ranks = tuple(
        RankDevices(f"cuda:{i}", (f"cuda:{i}",) * devices.num_targets if names is None else names) for i in range(count)
    )
    return Layout("single" if count == 1 else "colocated", ranks)


def _explicit(devices: DeviceConfig, num_cuda: int) -> Layout:
    assert isinstance(devices.ranks, tuple)
    ranks = tuple(RankDevices(rank.drafter, tuple(rank.targets)) for rank in devices.ranks)
    drafters = [rank.drafter for rank in ranks]
    repeated = sorted({name for name in drafters if name != "cpu" and drafters.count(name) > 1})
    if repeated:
        raise ValueError(f"devices.ranks must give each drafter a device of its own; found {', '.join(repeated)} twice")
    absent = _absent([*drafters, *(name for rank in ranks for name in rank.targets)], num_cuda)
    if absent and devices.device == "cuda":
        raise ValueError(f"devices.ranks must name devices that exist; torch finds {num_cuda} GPUs, without {absent}")
    return Layout("single" if len(ranks) == 1 else "explicit", ranks)


def _absent(names: Sequence[str], num_cuda: int) -> str:
    parts = {part for name in names for part in name.split("+") if part.startswith("cuda:")}
    return ", ".join(sorted(part for part in parts if int(part.removeprefix("cuda:")) >= num_cuda))
