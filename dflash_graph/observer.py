"""Watches workers while they train: their steps in graph mode "debug", their slots in the debug command.

`TrainingObserver`: the first calls of each step and then one in so many run under a `Tracer`; operations that cannot be
captured, anything that differs from the call before, and declared tensors that moved end the run, by line. One observer
serves all workers of a run; each step is only ever seen from its worker's thread. Made by `training.py`.
`SlotGuard`: what one thread does with the ring's slots. Made by `debugging.py`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from dflash_graph.findings import Finding, Site, SiteFinder
from dflash_graph.graphs import GraphError, StepGraph
from dflash_graph.traces import Trace
from dflash_graph.tracing import Tracer, compare_traces, find_illegal_ops

if TYPE_CHECKING:  # they come later in the order of modules
    from dflash_graph.ring import Ring, SlotState
    from dflash_graph.static_buffers import BufferTable


class TrainingObserver:
    """A `graphs.Observer`.

    Args:
        steps: calls of each step that are checked from the start.
        every: after these, one call in so many is; None checks no more.
    """

    def __init__(self, *, steps: int, every: int | None) -> None:
        self._steps, self._every = steps, every
        self._traces: dict[StepGraph, Trace] = {}  # of the last checked call

    def run(self, graph: StepGraph, function: Callable[[], None]) -> None:
        """Run the step, and check it if its turn has come.

        Raises:
            GraphError: with every finding.
        """
        if graph.calls >= self._steps and (self._every is None or graph.calls % self._every):
            function()
            return
        graph.check_addresses()
        with Tracer(device=graph.device) as tracer:
            function()
        findings = find_illegal_ops(tracer.trace)
        if graph in self._traces:
            names = graph.inputs | graph.outputs | graph.state
            findings += compare_traces(self._traces[graph], tracer.trace, check="frozen_world", names=names)
        self._traces[graph] = tracer.trace
        if findings:
            self.report(graph, findings)
        graph.check_addresses()

    def report(self, graph: StepGraph, findings: list[Finding]) -> None:
        """End the run by a GraphError that has every finding."""
        raise GraphError(_describe(graph, findings))


def _describe(graph: StepGraph, findings: list[Finding]) -> str:
    lines = "\n".join(str(finding) for finding in findings)
    return (
        f"{graph.name} cannot be a CUDA graph ({len(findings)} finding{'s' if len(findings) > 1 else ''}, in call "
        f"{graph.calls + 1} of this step):\n{lines}"
    )


# ---- slots ----------------------------------------------------------------------------------------------------------


class SlotGuard(TorchDispatchMode):
    """Watches the calling thread's use of the slots: is each slot it touches this worker's now, and of this job?

    Every operator that touches the memory of a slot must find the slot in this worker's hands. A view of a slot belongs
    to the generation in which it was made: its owner may hold the slot again, for another job.

    Args:
        state: in which a slot belongs to this worker: FILLING for a target, DRAINING for the drafter.
    """

    def __init__(self, ring: "Ring", table: "BufferTable", worker: str, state: "SlotState") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings: list[Finding] = []
        self._ring, self._worker, self._state = ring, worker, state
        self._finder = SiteFinder(None)
        self._views = _Views(self)
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # view -> (buffer, slot, generation)
        self._ranges = [
            (name, table[name].data_ptr(), table[name].nbytes, table[name].nbytes // ring.num_slots)
            for name in table
            if name.startswith("slot.")
        ]

    def __enter__(self) -> Self:
        self._views.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._views.__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            for leaf in _pytree.tree_leaves((args, kwargs)):
                for name, slot in self._slots(leaf):
                    state, holder = self._ring.owner(slot)
                    if (state, holder) != (self._state, self._worker):
                        allowed = f"it may use slots that are {self._state.name} and its own"
                        self._report(name, slot, f", which is {state.name} and held by {holder}; {allowed}")
        return func(*args, **(kwargs or {}))

    def called(self, arguments: Sequence[Any], result: Any) -> None:
        """After a call of torch: a view of a slot gets its generation, any other call needs the right one."""
        known = [self._made[leaf] for leaf in arguments if isinstance(leaf, Tensor) and leaf in self._made]
        if isinstance(result, Tensor) and not any(result is leaf for leaf in arguments):
            slots = self._slots(result)
            if slots:  # shares the memory of slots: a view
                if known:
                    self._made[result] = known[0]
                elif len(slots) == 1:
                    self._made[result] = *slots[0], self._generation(slots[0][1])
                return
        for name, slot, made in known:
            now = self._generation(slot)
            if made != now and self._ring.owner(slot) == (self._state, self._worker):
                self._report(name, slot, f" of generation {made} in generation {now}: another job's")

    def _generation(self, slot: int) -> int:
        return self._ring._slots[slot].generation

    def _slots(self, tensor: Any) -> list[tuple[str, int]]:
        """The slots whose memory a tensor touches."""
        if not isinstance(tensor, Tensor) or tensor.numel() == 0 or tensor.device.type == "meta":
            return []
        begin = tensor.data_ptr()
        for name, start, size, each in self._ranges:
            if start <= begin < start + size:
                extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.itemsize
                return [(name, i) for i in range((begin - start) // each, (begin + extent - start) // each + 1)]
        return []

    def _report(self, name: str, slot: int, what: str) -> None:
        site: Site | None = self._finder.find(sys._getframe())[0]
        self.findings.append(
            Finding(
                "slot_misuse",
                f"{self._worker} uses {name}[{slot}]{what}",
                SLOT_MEANING,
                SLOT_ADVICE,
                site,
                worker=self._worker,
            )
        )


class _Views(TorchFunctionMode):
    """Shows a guard the calls of torch's Python interface, where a view is the object that the caller keeps."""

    def __init__(self, guard: SlotGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":  # of a shape or a dtype: no use of the memory
            with torch._C.DisableTorchFunction():
                self._guard.called(_pytree.tree_leaves((args, kwargs)), result)
        return result


SLOT_MEANING = (
    "another worker may write or read the slot at the same time: the data of another job are trained, or half of them"
)
SLOT_ADVICE = (
    "touch a slot between taking and publishing it (target), or between drawing and releasing it (drafter), through "
    "views made in that time; copy out what is needed later"
)
