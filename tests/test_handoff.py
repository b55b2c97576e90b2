"""The hand-off of features between devices: the order of events, a pair that corrupts, and what staging does."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph import handoff
from dflash_graph.config import DeviceConfig
from dflash_graph.handoff import FeatureCopy, choose_route, find_copy_fault
from dflash_graph.plan import parse_devices
from dflash_graph.static_buffers import slot_specs

CPU = torch.device("cpu")
ONE, TWO = torch.device("cuda:0"), torch.device("cuda:1")


class FakeCuda:
    """torch.cuda's streams and events as a log; what runs is attributed to the streams that are current."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = {ONE: "compute-0", TWO: "compute-1"}
        self.events = 0

    def Stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, f"copy-{device.index}", device)

    def Event(self) -> "FakeEvent":
        self.events += 1
        return FakeEvent(self, f"event-{self.events}")

    def current_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, self.current[device], device)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream.name
        try:
            yield
        finally:
            self.current[stream.device] = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str, device: torch.device) -> None:
        self.cuda, self.name, self.device = cuda, name, device

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append((self.name, "waits", event.name))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append((stream.name, "records", self.name))


def test_a_hand_off_between_gpus_uses_copy_streams_of_both_and_ties_no_compute_stream_of_the_drafter() -> None:
    cuda = FakeCuda()
    copy = FeatureCopy(TWO, ONE, "direct", cuda=cuda)
    source, destination = torch.arange(6.0), torch.zeros(6)
    with copy.order():
        cuda.log.append((cuda.current[ONE], "wait_drained"))
        copy.copy("features", destination, source)
        cuda.log.append((cuda.current[TWO], "copies to", cuda.current[ONE]))
        cuda.log.append((cuda.current[ONE], "filled, published"))
    assert cuda.log == [
        ("compute-1", "records", "event-1"),  # the features are ready
        ("copy-1", "waits", "event-1"),
        ("copy-0", "wait_drained"),
        ("copy-1", "copies to", "copy-0"),
        ("copy-0", "filled, published"),
        ("copy-1", "records", "event-2"),  # the output buffer has been read
        ("compute-1", "waits", "event-2"),  # before the next replay overwrites it
    ]
    assert cuda.current == {ONE: "compute-0", TWO: "compute-1"}
    assert torch.equal(destination, source)


def test_the_streams_are_restored_after_an_error() -> None:
    cuda = FakeCuda()
    copy = FeatureCopy(TWO, ONE, "direct", cuda=cuda)
    with pytest.raises(ZeroDivisionError), copy.order():
        raise ZeroDivisionError
    assert cuda.current == {ONE: "compute-0", TWO: "compute-1"}


def test_on_one_device_it_is_a_plain_copy_without_streams() -> None:
    cuda = FakeCuda()
    copy = FeatureCopy(CPU, CPU, "local", cuda=cuda)
    source, destination = torch.arange(6.0), torch.zeros(6)
    copy.reserve({"features": source})
    with copy.order():
        copy.copy("features", destination, source)
    assert torch.equal(destination, source)
    assert (cuda.log, cuda.events) == ([], 0)


def test_a_staged_copy_passes_through_host_memory_that_was_there_before() -> None:
    cuda = FakeCuda()
    copy = FeatureCopy(CPU, ONE, "staged", cuda=cuda)
    source, destination = torch.arange(6.0), torch.zeros(6)
    copy.reserve({"features": source})
    (host,) = copy._host.values()
    copy.copy("features", destination, source)
    assert torch.equal(destination, source)
    assert torch.equal(host, source)
    assert [entry[:2] for entry in cuda.log] == [("copy-None", "records"), ("copy-0", "waits")]


# ---- the start-up check ---------------------------------------------------------------------------------------------


def corrupting(nth: int) -> Any:
    """A copy whose `nth` use loses one number."""
    count = 0

    def copy(destination: Tensor, source: Tensor) -> None:
        nonlocal count
        count += 1
        destination.copy_(source)
        if count == nth:
            destination[12345] ^= 1

    return copy


@pytest.mark.parametrize("nth, words", [(1, "numbers sent, 1"), (2, "sent back, 1"), (3, "numbers sent, 1")])
def test_a_pair_that_corrupts_is_found_in_either_direction(nth: int, words: str) -> None:
    assert find_copy_fault(CPU, CPU) is None
    assert words in (find_copy_fault(CPU, CPU, corrupting(nth)) or "")


def test_a_copy_that_does_nothing_is_found() -> None:
    assert find_copy_fault(CPU, CPU, lambda target, origin: None) is not None


def test_a_bad_pair_is_staged_with_a_warning_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "find_copy_fault", lambda a, b: "7 arrived changed")
    with pytest.warns(UserWarning, match=r"cuda:1 and cuda:0.*7 arrived changed.*staged through pinned host memory"):
        assert choose_route(TWO, ONE, strict=False) == "staged"
    with pytest.raises(RuntimeError, match=r"7 arrived changed.*graphs\.strict=false"):
        choose_route(TWO, ONE, strict=True)


def test_a_good_pair_copies_directly_and_one_device_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(handoff, "find_copy_fault", lambda *pair: tried.append(pair))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_route(TWO, ONE, strict=True) == "direct"
        assert choose_route(ONE, ONE, strict=True) == "local"
    assert tried == [(TWO, ONE)]


# ---- settings -------------------------------------------------------------------------------------------------------


def test_target_devices_need_a_cuda_drafter_and_one_name_for_each_target() -> None:
    assert DeviceConfig(device="cuda", num_targets=2, target_devices=("cuda:1", "cuda:2")).target_devices
    for values, words in (
        ({"target_devices": ("cuda:1",)}, "beside cpu"),
        ({"device": "cuda", "target_devices": ("gpu1",)}, "must name CUDA devices"),
        ({"device": "cuda", "num_targets": 2, "target_devices": ("cuda:1",)}, "each of the 2 targets"),
    ):
        with pytest.raises(ValueError, match=words):
            DeviceConfig(**values)  # type: ignore[arg-type]


def test_buffers_of_a_target_lie_on_its_device_and_slots_on_the_drafters() -> None:
    specs = slot_specs(
        num_slots=2, num_targets=2, token_budget=8, feature_size=4, num_anchors=2, block_size=2,
        feature_dtype=torch.bfloat16, device=ONE, target_devices=[ONE, TWO],
    )  # fmt: skip
    homes = {spec.name: spec.device for spec in specs}
    assert homes["target.0.output"] == homes["slot.features"] == ONE
    assert homes["target.1.output"] == homes["target.1.token_ids"] == TWO


def test_a_target_may_name_several_devices() -> None:
    names = ("cuda:1+cuda:2", "cuda:3")
    devices = DeviceConfig(device="cuda", num_targets=2, target_devices=names)
    assert devices.target_devices == names
    assert [parse_devices(name) for name in names] == [
        (torch.device("cuda:1"), torch.device("cuda:2")), (torch.device("cuda:3"),),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must name CUDA devices"):
        DeviceConfig(device="cuda", target_devices=("cuda:1+cpu",))
