"""Layouts: which devices hold which ranks, what is refused, and what `auto` chooses."""

from pathlib import Path
from typing import Any

import pytest

from dflash_graph import training
from dflash_graph.config import DeviceConfig, load_config
from dflash_graph.layout import (
    Layout,
    RankDevices,
    StageTimes,
    candidates,
    colocated,
    needs_times,
    predict,
    resolve_layout,
    split,
)
from dflash_graph.plan import RunPlan
from dflash_graph.training import train
from tests.tiny import tiny_config


def targets_of(layout: Layout) -> list[list[str]]:
    return [list(rank.targets) for rank in layout.ranks]


def cuda(**options: Any) -> DeviceConfig:
    return DeviceConfig(device="cuda", **options)


def test_a_cpu_is_one_rank_unless_told_otherwise() -> None:
    assert resolve_layout(DeviceConfig(num_targets=2), num_cuda=8) == Layout(
        "single", (RankDevices("cpu", ("cpu", "cpu")),)
    )
    three = resolve_layout(DeviceConfig(ranks=3), num_cuda=0)
    assert (three.kind, len(three.ranks)) == ("colocated", 3)


def test_every_gpu_is_a_rank() -> None:
    layout = resolve_layout(cuda(), num_cuda=4)
    assert layout == colocated(4)
    assert [rank.drafter for rank in layout.ranks] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert targets_of(layout) == [["cuda:0"], ["cuda:1"], ["cuda:2"], ["cuda:3"]]
    assert resolve_layout(cuda(), num_cuda=1).kind == "single"
    assert len(resolve_layout(cuda(ranks=2), num_cuda=4).ranks) == 2


def test_a_layout_travels_to_its_ranks() -> None:
    layout = split(8, 5)
    assert Layout.from_json(layout.to_json()) == layout
    assert str(layout) == (
        "split, 3 ranks: cuda:5 fed by cuda:0+cuda:1, cuda:6 fed by cuda:2+cuda:3, cuda:7 fed by cuda:4"
    )


def test_uneven_splits() -> None:
    layout = resolve_layout(cuda(layout="split", split_targets=5), num_cuda=8)
    assert [rank.drafter for rank in layout.ranks] == ["cuda:5", "cuda:6", "cuda:7"]
    assert targets_of(layout) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"], ["cuda:4"]]
    for count in range(2, 17):
        for targets in range(-(-count // 2), count):
            ranks = split(count, targets).ranks
            sizes = [len(rank.targets) for rank in ranks]
            assert max(sizes) - min(sizes) <= 1
            used = [name for rank in ranks for name in (rank.drafter, *rank.targets)]
            assert sorted(used) == sorted(f"cuda:{i}" for i in range(count))


def test_one_rank_with_targets_elsewhere() -> None:
    devices = cuda(num_targets=2, target_devices=("cuda:1", "cuda:2+cuda:3"))
    assert resolve_layout(devices, num_cuda=4) == Layout(
        "single", (RankDevices("cuda:0", ("cuda:1", "cuda:2+cuda:3")),)
    )


def test_explicit_lists(tmp_path: Any) -> None:
    config = load_config(
        None,
        [
            f"run_dir={tmp_path}", "target.path=x", "data.train=[y]", "devices.device=cuda",
            "devices.ranks=[{drafter: cuda:0, targets: [cuda:1, cuda:2]}, {drafter: cuda:3, targets: [cuda:3]}]",
        ],
    )  # fmt: skip
    layout = resolve_layout(config.devices, num_cuda=4)
    assert layout.kind == "explicit"
    assert targets_of(layout) == [["cuda:1", "cuda:2"], ["cuda:3"]]
    with pytest.raises(ValueError, match="torch finds 3 GPUs, without cuda:3"):
        resolve_layout(config.devices, num_cuda=3)
    assert config.to_dict()["devices"]["ranks"][0]["drafter"] == "cuda:0"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"ranks": 0}, "devices.ranks must be at least 1"),
        ({"ranks": ({"drafter": "cuda:0", "targets": []},)}, "every rank needs a target"),
        ({"ranks": ({"drafter": "cpu", "targets": ["cuda:0"]},)}, "must name devices of kind cuda; found cpu"),
        ({"ranks": ({"drafter": "cuda:0", "targets": ["cuda:1"]},), "num_targets": 2}, "leave devices.num_targets"),
        ({"layout": "split", "ranks": 2}, "devices.layout=split places ranks on GPUs by itself"),
        ({"split_targets": 3}, "no effect without devices.layout=split"),
        ({"rank_jobs": (2, -1)}, "devices.rank_jobs must not be negative"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be positive"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cuda(**options)


def test_layouts_that_the_machine_lacks() -> None:
    with pytest.raises(ValueError, match=r"needs devices\.device=cuda"):
        DeviceConfig(layout="split")
    with pytest.raises(ValueError, match="at most one per GPU; found 5 for 4"):
        resolve_layout(cuda(ranks=5), num_cuda=4)
    with pytest.raises(ValueError, match="needs at least two GPUs"):
        resolve_layout(cuda(layout="split"), num_cuda=1)
    with pytest.raises(ValueError, match="found 2 targets and 6 drafters"):
        resolve_layout(cuda(layout="split", split_targets=2), num_cuda=8)
    twice = cuda(ranks=({"drafter": "cuda:0", "targets": ["cuda:1"]}, {"drafter": "cuda:0", "targets": ["cuda:2"]}))
    with pytest.raises(ValueError, match="a device of its own; found cuda:0 twice"):
        resolve_layout(twice, num_cuda=4)


@pytest.mark.parametrize("target_s, drafter_s", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0), (6.0, 0.2)])
def test_the_slower_side_sets_the_pace(target_s: float, drafter_s: float) -> None:
    times = StageTimes(target_s=target_s, drafter_s=drafter_s)
    assert predict(colocated(8), times) == pytest.approx(8 / (target_s + drafter_s))
    assert predict(split(8, 6), times) == pytest.approx(min(6 / target_s, 2 / drafter_s))
    found = candidates(8, times)
    assert [each.layout.kind for each in found].count("colocated") == 1
    assert found[0].jobs_per_s == max(each.jobs_per_s for each in found)


def test_auto_takes_the_faster_one_that_fits() -> None:
    plain = StageTimes(target_s=3.0, drafter_s=1.0)
    assert resolve_layout(cuda(), num_cuda=8, times=plain) == colocated(8)
    tight = StageTimes(target_s=3.0, drafter_s=1.0, colocated_fits=False)
    assert resolve_layout(cuda(), num_cuda=8, times=tight) == split(8, 6)
    # Eight updates that cost as much as a job each: fewer drafters pay fewer of them.
    costly = StageTimes(target_s=3.0, drafter_s=1.0, apply_s=4.0, jobs_per_step=8)
    assert resolve_layout(cuda(), num_cuda=8, times=costly).kind == "split"
    assert resolve_layout(cuda(layout="split"), num_cuda=8, times=plain) == split(8, 6)
    assert "does not fit" in str(candidates(8, tight)[-1])


def test_when_there_is_a_choice_to_make() -> None:
    assert needs_times(cuda(), 8)
    assert needs_times(cuda(layout="split"), 8)
    assert not needs_times(cuda(), 1)
    assert not needs_times(cuda(layout="split", split_targets=4), 8)
    assert not needs_times(cuda(ranks=2), 8)
    assert not needs_times(DeviceConfig(), 8)


def test_one_rank_that_is_spelled_out_is_that_rank(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of one rank, like a split with one drafter, has its own devices: two targets, where one is default."""
    seen: list[RunPlan] = []
    monkeypatch.setattr(training, "Run", lambda plan, *_, **__: seen.append(plan) or pytest.skip("unreachable"))
    with pytest.raises(pytest.skip.Exception):
        train(tiny_config(tiny, tmp_path / "run", "devices.ranks=[{drafter: cpu, targets: [cpu, cpu]}]"))
    assert seen[0].num_targets == 2
