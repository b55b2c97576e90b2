"""From a target's output buffers into a slot: on one device a plain copy, between two GPUs on streams of their own.

Torch runs a copy between devices on the source's current stream and makes it wait for, and be waited for by, the
destination's: with the compute streams current that would tie both GPUs together. So a hand-off makes a dedicated copy
stream current on each of them. Order, all of it by events and none of it on the host: the slot is drained -> copy ->
`filled` is recorded -> the slot is published; features are ready -> copy -> the output buffer may be overwritten.
Called by the target workers; which slot may be written is the ring's matter.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Route = Literal["local", "direct", "staged"]
_PATTERN_BYTES = 1 << 22


def choose_route(source: torch.device, destination: torch.device, *, strict: bool) -> Route:
    """How features travel between two devices: tried out, because on some boards copies between GPUs go wrong.

    Args:
        strict: refuse a pair that cannot copy directly.

    Raises:
        RuntimeError: such a pair, with `strict`.
    """
    if source == destination:
        return "local"
    fault = find_copy_fault(source, destination)
    if fault is None:
        return "direct"
    message = (
        f"copies between {source} and {destination} must arrive as they were sent; {fault}. Check the driver's peer "
        "access (IOMMU and ACS settings), or choose other devices.target_devices"
    )
    if strict:
        raise RuntimeError(f"{message}; graphs.strict=false stages features through host memory instead")
    warnings.warn(f"{message}. Features are staged through pinned host memory, which is slower", stacklevel=2)
    return "staged"


def find_copy_fault(
    source: torch.device,
    destination: torch.device,
    copy: Callable[[Tensor, Tensor], object] = lambda target, origin: target.copy_(origin),
) -> str | None:
    """Send a pattern there and back; what went wrong in words, or None.

    Args:
        copy: copies its second argument into its first.
    """
    for turn in range(3):
        sent = torch.arange(_PATTERN_BYTES // 4, dtype=torch.int32).mul_(2654435761 % 2**31 + turn)
        there, back = torch.zeros_like(sent, device=destination), torch.zeros_like(sent, device=source)
        copy(there, sent.to(source))
        if wrong := int((there.cpu() != sent).sum()):  # sync: start-up check
            return f"of {len(sent)} numbers sent, {wrong} arrived changed"
        copy(back, there)
        if wrong := int((back.cpu() != sent).sum()):  # sync: start-up check
            return f"of {len(sent)} numbers sent back, {wrong} arrived changed"
    return None


class FeatureCopy:
    """The hand-off of one target.

    Args:
        cuda: torch.cuda, or what stands in for it.
    """

    def __init__(
        self, source: torch.device, destination: torch.device, route: Route, *, cuda: Any = torch.cuda
    ) -> None:
        self.route = route
        self._cuda, self._source, self._destination = cuda, source, destination
        self._host: dict[str, Tensor] = {}
        if route != "local":
            self._out, self._in = cuda.Stream(source), cuda.Stream(destination)
            self._ready, self._copied, self._arrived = cuda.Event(), cuda.Event(), cuda.Event()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate what a staged hand-off of these tensors needs, before any step."""
        if self.route == "staged":
            pinned = self._source.type == "cuda"
            self._host = {name: torch.empty_like(t, device="cpu", pin_memory=pinned) for name, t in tensors.items()}

    @contextmanager
    def order(self) -> Iterator[None]:
        """Around everything between the forward pass and the slot's publication: copy streams are current within.

        The compute stream, current outside, then waits until the output buffers have been read.
        """
        if self.route == "local":
            yield
            return
        compute = self._cuda.current_stream(self._source)
        self._ready.record(compute)
        self._out.wait_event(self._ready)
        with self._cuda.stream(self._in), self._cuda.stream(self._out):
            yield
            self._copied.record(self._out)
        compute.wait_event(self._copied)

    def copy(self, name: str, destination: Tensor, source: Tensor) -> None:
        """Copy one tensor; within `order`."""
        if self.route != "staged":
            destination.copy_(source, non_blocking=True)
            return
        host = self._host[name]
        host.copy_(source, non_blocking=True)
        self._arrived.record(self._out)
        self._in.wait_event(self._arrived)
        destination.copy_(host, non_blocking=True)
