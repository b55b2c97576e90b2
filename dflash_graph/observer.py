"""Watches the steps of a training run in graph mode "debug": what a CUDA graph could not hold ends the run, by line.

The first calls of each step and then one in so many run under a `Tracer`: operations that cannot be captured, anything
that differs from the call before, and declared tensors that moved. One observer serves all workers of a run; each step
is only ever seen from its worker's thread. Made by `training.py`.
"""

from collections.abc import Callable

from dflash_graph.findings import Finding
from dflash_graph.graphs import GraphError, StepGraph
from dflash_graph.traces import Trace
from dflash_graph.tracing import Tracer, compare_traces, find_illegal_ops


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
