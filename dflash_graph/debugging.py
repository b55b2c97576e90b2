"""`dflash-graph debug`: can this target, this drafter and this configuration run as CUDA graphs? No GPU is needed.

It sets a run up by the run's own code, checks every step of every worker inside that worker's thread, then lets the
workers train a few steps under watch. Nothing is kept on disk. A finding names the line that stands in the way, what it
would mean in a graph, and what to do. The run of the same configuration uses the same functions.
"""

import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dflash_graph import ring
from dflash_graph.config import Config, FeaturesConfig
from dflash_graph.debug_checks import (
    StepReport,
    StepUnderTest,
    check_step,
    distinct,
    error_site,
    loads_watched,
    moved,
    swapped,
)
from dflash_graph.findings import Finding, Site
from dflash_graph.graph_backends import CudaBackend, GraphBackend, TapeBackend
from dflash_graph.graphs import StepGraph
from dflash_graph.observer import SLOT_ADVICE, SLOT_MEANING, SlotGuard, TrainingObserver
from dflash_graph.padding import IGNORED_LABEL, PaddedJob, pad_job
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.ring import SlotState
from dflash_graph.static_buffers import write_metadata
from dflash_graph.tracing import AddressBook, Tracer
from dflash_graph.trainer import Trainer
from dflash_graph.training import Run
from dflash_graph.workers import TargetWorker, Worker

CHECKED_SIZES = 4  # of the micro-step, the smallest and the largest among them: they differ in nothing else
TRIED_STEPS = 4  # of training, after the checks of single steps; at least


@dataclass(kw_only=True)
class DebugReport:
    """What was checked and what was found; `findings` is empty for a configuration that can be captured."""

    environment: dict[str, str]
    steps: list[StepReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    trained_steps: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "steps": [{k: v for k, v in asdict(step).items() if k != "findings"} for step in self.steps],
            "trained_steps": self.trained_steps,
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": round(self.seconds, 2),
        }

    def __str__(self) -> str:
        lines = [_line(step) for step in self.steps]
        lines += [str(finding) for finding in self.findings]
        count = len(self.findings)
        verdict = "nothing stands in the way of a capture" if not count else f"{count} finding{'s' * (count > 1)}"
        lines.append(
            f"{self.environment['device']}: {len(self.steps)} steps checked, {self.trained_steps} steps trained under "
            f"watch: {verdict}"
        )
        return "\n".join(lines)


def _line(step: StepReport) -> str:
    nodes = step.captured.get("nodes")
    graph = f", {sum(nodes.values())} nodes" if nodes else ""
    if pool := step.captured.get("pool_bytes"):
        graph += f", captured in {step.captured['seconds']:.1f} s, graph pool {pool / 2**20:.1f} MiB so far"
    return f"{step.worker:<10} {step.name:<18} {step.num_ops:6} operations{graph}"


def debug(config: Config, *, trained_steps: int | None = None, dot: str | Path | None = None) -> DebugReport:
    """Check a configuration; see the module. Without a GPU, the CPU stands in for devices.device=cuda.

    Args:
        dot: on CUDA, an existing folder for a drawing of each graph.
        trained_steps: optimizer steps that the workers run under watch after the checks of single steps; None is so
            many that slots come to serve a second job.

    Raises:
        ValueError: the configuration itself is refused, as `train` would.
        KeyboardInterrupt: it was asked to stop.
    """
    started = time.monotonic()
    devices, stand_in = config.devices, ""
    if devices.device == "cuda" and not torch.cuda.is_available():
        devices = replace(devices, device="cpu", target_devices=None, kernels="auto")
        stand_in = ", whose CPU stands in for devices.device=cuda"
    # Rows of a store come by plain copies; the steps that could be graphs are the target's own.
    config = replace(config, devices=devices, graphs=replace(config.graphs, mode="debug"), features=FeaturesConfig())
    plan = make_plan(config)
    if trained_steps is None:
        trained_steps = max(TRIED_STEPS, plan.slots // config.schedule.jobs_per_step + 1)
    report = DebugReport(environment=_environment(stand_in))
    observer = CollectingObserver(steps=config.graphs.debug_steps, every=1)
    run = Run(plan, {}, dry_steps=trained_steps, observer=observer)
    workers: list[_Inspected] = []

    def wrap(worker: Worker) -> Worker:
        workers.append(_Inspected(worker, run, report, None if dot is None else Path(dot)))
        return workers[-1]

    try:
        run.run(wrap)
        report.trained_steps = trained_steps
    except Exception as error:
        report.findings.append(_failure(error))
    if run.finish.is_set():
        raise KeyboardInterrupt  # half a check says nothing
    report.findings += [f for step in report.steps for f in step.findings] + observer.findings
    report.findings += [f for worker in workers for f in worker.findings]
    report.findings = _of_one_line_once(report.findings)
    report.seconds = time.monotonic() - started
    return report


def _environment(stand_in: str) -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "device": device + stand_in,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _failure(error: Exception) -> Finding:
    """The error that ended the run, at the innermost of its lines that is nobody's library.

    The ring refuses a lease that is not, or no longer, right: that is a misuse of a slot by whoever called it.
    """
    notes = "; ".join(getattr(error, "__notes__", []))
    lines = traceback.extract_tb(error.__traceback__)
    if type(error) is RuntimeError and lines and lines[-1].filename == ring.__file__:
        what = f"{error}{f' ({notes})' if notes else ''}"
        return Finding("slot_misuse", what, SLOT_MEANING, SLOT_ADVICE, error_site(error, outside=ring.__file__))
    return Finding(
        "error",
        f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}",
        "the step cannot run at all, or not a second time",
        "see the message; findings above or below may have the same cause",
        error_site(error),
    )


def _of_one_line_once(findings: list[Finding]) -> list[Finding]:
    """What several steps found at the same line is told once, with the first of them."""
    return distinct(sorted(findings, key=lambda f: f.check == "error"))


class CollectingObserver(TrainingObserver):
    """Keeps findings instead of ending the run by them."""

    def __init__(self, *, steps: int, every: int | None) -> None:
        super().__init__(steps=steps, every=every)
        self.findings: list[Finding] = []

    def report(self, graph: StepGraph, findings: list[Finding]) -> None:
        self.findings += [replace(f, graph=graph.name, worker=graph.worker) for f in findings]


class _Inspected:
    """A worker that is checked after its set-up and watched while it works, in its own thread."""

    def __init__(self, worker: Worker, run: Run, report: DebugReport, dot: Path | None) -> None:
        self._dot = dot
        self.name, self._worker, self._run, self._report = worker.name, worker, run, report
        self.findings: list[Finding] = []

    def load(self) -> None:
        self._worker.load()
        worker, plan = self._worker, self._run.plan
        assert isinstance(worker, TargetWorker | Trainer)
        steps = target_steps(worker, plan) if isinstance(worker, TargetWorker) else drafter_steps(worker, plan)
        backend: GraphBackend = TapeBackend()
        if plan.device.type == "cuda":
            assert worker.context is not None
            backend = worker.context.backend
            assert isinstance(backend, CudaBackend)
        for step in steps:
            if self._run.finish.is_set():
                return
            self._report.steps.append(check_step(step, backend, self._run.phase, dot=self._dot))
            self._run.control.beat()  # the other workers wait meanwhile
        if isinstance(worker, Trainer):
            self.findings += _check_resume(worker, plan)

    def run(self) -> None:
        worker, run = self._worker, self._run
        target = isinstance(worker, TargetWorker)
        names = partial(target_book, worker) if isinstance(worker, TargetWorker) else self._drafter_book
        book, loads = AddressBook(names), dict[str, Site | None]()
        guard = SlotGuard(run.ring, run.table, self.name, SlotState.FILLING if target else SlotState.DRAINING)
        tracer = Tracer(device=run.plan.device)
        try:
            with tracer, guard, loads_watched(names, loads):
                worker.run()
        finally:
            found = [*guard.findings, *moved(book, loads, tracer.trace)]
            self.findings += [replace(finding, worker=self.name) for finding in found]

    def _drafter_book(self) -> Mapping[str, Tensor | None]:
        assert isinstance(self._worker, Trainer)
        return drafter_book(self._worker)

    def close(self) -> None:
        self._worker.close()


def _check_resume(trainer: Trainer, plan: RunPlan) -> list[Finding]:
    """Load the state of a checkpoint, as a resumed run does: it must land in the memory that is there."""
    drafter, optimizer = trainer.step.state_tensors()
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (drafter, optimizer)]
    names, loads = partial(drafter_book, trainer), dict[str, Site | None]()
    book = AddressBook(names)
    with Tracer(device=plan.device) as tracer, loads_watched(names, loads):
        trainer.step.load_state(*copies)
    return [replace(finding, worker=trainer.name, graph="resume") for finding in moved(book, loads, tracer.trace)]


# ---- the steps of a run ---------------------------------------------------------------------------------------------


def _jobs(plan: RunPlan, bucket: int | None = None) -> list[PaddedJob]:
    """A few jobs of the first epoch, of one bucket or of any."""
    schedule = plan.first_epoch
    chosen = [j for j in range(schedule.num_jobs) if bucket is None or schedule.job_bucket[j] == bucket][:6]
    return [pad_job(plan.rows, schedule, job, plan.job_shape) for job in chosen]


def target_book(worker: TargetWorker) -> dict[str, Tensor | None]:
    """Everything that a target's steps reach."""
    assert worker.target is not None
    assert worker.context is not None
    decoder = worker.target.decoder
    book: dict[str, Tensor | None] = {f"target.{name}": tensor for name, tensor in decoder.named_parameters()}
    book |= {f"target.{name}": tensor for name, tensor in decoder.named_buffers()}
    for graph in worker.context.graphs:
        book |= graph.inputs | graph.outputs
    return book


def target_steps(worker: TargetWorker, plan: RunPlan) -> Iterator[StepUnderTest]:
    """The step of each bucket."""
    assert worker.context is not None
    for index, graph in enumerate(worker.context.graphs):
        jobs = _jobs(plan, index) or _jobs(plan)
        tokens = graph.inputs["token_ids"]
        live = jobs[0].row_ids >= 0

        def load(i: int, jobs: list[PaddedJob] = jobs, tokens: Tensor = tokens) -> None:
            worker.stage(jobs[i % len(jobs)])
            tokens.add_(i).remainder_(plan.facts.vocab_size)  # other data where there is one job only

        def spoil(
            spoiled: bool, load: Callable[[int], None] = load, tokens: Tensor = tokens, live: Tensor = live
        ) -> None:
            load(0)
            if spoiled:
                other = (tokens + 1).remainder_(plan.facts.vocab_size)
                tokens.copy_(torch.where(live.to(tokens.device), tokens, other))

        def part(name: str, tensor: Tensor, live: Tensor = live) -> Tensor:
            return tensor[live.to(tensor.device)] if name == "output" else tensor

        def fresh(graph: StepGraph = graph) -> AbstractContextManager[None]:
            return swapped(worker, "_token_ids", graph.inputs["token_ids"].clone())

        yield StepUnderTest(
            name=graph.name,
            worker=worker.name,
            device=graph.device,
            function=graph.function,
            results={name: t for name, t in graph.outputs.items() if name == "output" or "teacher_" in name},
            load=load,
            book=partial(target_book, worker),
            fresh=fresh,
            spoil=spoil,
            run_spoiled=graph.function,
            live=part,
        )


def drafter_book(trainer: Trainer) -> dict[str, Tensor | None]:
    """Everything that the drafter's steps reach, as it is bound now."""
    step, table = trainer.step, trainer.table
    parameters, optimizer = step.parameters, step.optimizer
    book: dict[str, Tensor | None] = {name: table[name] for name in table}
    book |= {f"master.{group}": tensor for group, tensor in parameters.masters.items()}
    book |= {f"grad.{group}": tensor for group, tensor in parameters.grads.items()}
    book |= {f"compute.{group}": tensor for group, tensor in parameters.compute.items()}
    for name, leaf in parameters.leaves.items():
        book |= {f"leaf.{name}": leaf, f"leaf.{name}.grad": leaf.grad}
    for group, master in parameters.masters.items():
        book[f"master.{group}.grad"] = master.grad
        for kind, value in optimizer.state[master].items():
            book[f"optimizer.{kind}.{group}"] = value
    for i, settings in enumerate(optimizer.param_groups):
        rate = settings["lr"]
        book[f"optimizer.lr.{i}"] = rate if isinstance(rate, Tensor) else None
    return book | {"weight_sum": step.weight_sum, "lr": step.lr, "embed": step.drafter.embed_weight}


def drafter_steps(trainer: Trainer, plan: RunPlan) -> Iterator[StepUnderTest]:
    """Micro-steps of a few sizes, with and without training, and the update."""
    assert trainer.context is not None
    data = _DrafterData(trainer, plan)
    sizes = {str(plan.sizes[i * (len(plan.sizes) - 1) // max(1, CHECKED_SIZES - 1)]) for i in range(CHECKED_SIZES)}
    for graph in trainer.context.graphs:
        kind, _, size = graph.name.partition(".")
        if size and size not in sizes:
            continue
        is_update = kind == "apply"
        yield StepUnderTest(
            name=graph.name,
            worker=trainer.name,
            device=plan.device,
            function=graph.function,
            results=graph.outputs | graph.state,
            load=data.load_update if is_update else partial(data.load, int(size)),
            book=partial(drafter_book, trainer),
            fresh=None if is_update else data.fresh,
            spoil=None if is_update else partial(data.write_slot, 0),
            run_spoiled=None if is_update else partial(data.run_slot, int(size), graph.function),
        )


class _DrafterData:
    """Jobs of the run with random features, through slot 0 into the step's workspace; nobody owns a slot yet."""

    def __init__(self, trainer: Trainer, plan: RunPlan) -> None:
        self._trainer, self._jobs = trainer, _jobs(plan)
        self._rng = torch.Generator()

    def load(self, size: int, i: int) -> None:
        """Job i from its slot into the workspace."""
        self.write_slot(i, False)
        self._load_slot(size, i)

    def write_slot(self, i: int, spoiled: bool) -> None:
        table, job = self._trainer.table, self._job(i)
        self._rng.manual_seed(i)
        for name in table:
            if name.startswith("slot.") and table[name].is_floating_point():
                slot = table[name][0]
                slot.copy_(torch.randn(slot.shape, generator=self._rng))
        write_metadata(table, 0, job)
        if "slot.teacher_argmax" in table:
            table["slot.teacher_argmax"][0].zero_()
        if "slot.teacher_entropy" in table:
            table["slot.teacher_entropy"][0].abs_()
        if spoiled:
            self._spoil(job)

    def run_slot(self, size: int, function: Callable[[], None]) -> None:
        self._load_slot(size, 0)
        function()

    def _job(self, i: int) -> PaddedJob:
        return self._jobs[i % len(self._jobs)]

    def _load_slot(self, size: int, i: int) -> None:
        table, step, job = self._trainer.table, self._trainer.step, self._job(i)
        step.load_slot(0, job)
        if job.num_anchors > size:  # a size that this job would not choose: its first anchors
            rows = int((job.trained_rows[: job.num_trained_rows] < size * step.spec.block_size).sum())
            table["workspace.num_anchors"].fill_(size)
            table["workspace.num_trained_rows"].fill_(rows)
            for name, dead in (("anchors", size), ("trained_rows", rows), ("weights", rows), ("labels", rows)):
                table[f"workspace.{name}"][dead:] = IGNORED_LABEL if name == "labels" else 0

    def _spoil(self, job: PaddedJob) -> None:
        """Everything of slot 0 that is not live."""
        table = self._trainer.table
        padded = job.row_ids < 0
        parts: dict[str, Any] = dict.fromkeys(("features", "token_ids", "positions"), padded)
        parts |= dict.fromkeys(("anchors", "anchor_row_starts", "anchor_tokens"), slice(job.num_anchors, None))
        rows = ("trained_rows", "labels", "weights", "teacher_rows")
        parts |= dict.fromkeys(rows, slice(job.num_trained_rows, None))
        covered = ("teacher_mean", "teacher_entropy", "teacher_argmax")
        parts |= dict.fromkeys(covered, slice(job.num_covered, None))
        for name, where in parts.items():
            if f"slot.{name}" in table:
                slot = table[f"slot.{name}"][0]
                slot[where] = float("nan") if slot.is_floating_point() else torch.iinfo(slot.dtype).max

    @contextmanager
    def fresh(self) -> Iterator[None]:
        step = self._trainer.step
        copies = {name: tensor.clone() for name, tensor in step._ws.items()}
        with swapped(step, "_ws", copies):
            yield

    def load_update(self, i: int) -> None:
        """Gradients, their weight and a rate, all other ones for each i."""
        step = self._trainer.step
        self._rng.manual_seed(i)
        for grad in step.parameters.grads.values():
            grad.copy_(torch.randn(grad.shape, generator=self._rng))
        step.weight_sum.fill_(1.0 + i)
        step.lr.fill_(1e-3 * (1 + i))
