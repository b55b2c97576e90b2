"""A capture storm: two workers of one device capture, replay and go, over and over, while a third thread is busy on it.

Captures take turns in one `CapturePhase`, as at the start of a run; replays of one worker fall into captures of the
other, and the third thread allocates new memory and copies all the time, on its own stream, without ever waiting for
the whole device. Teardown takes a turn, too: in a run it comes when nobody captures any more.
"""

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.graph_models import Task
from dflash_graph.graphs import CapturePhase, GraphBackend, StepGraph, WorkerContext

CAPTURES, QUICK_CAPTURES = 200, 16  # of each of the two workers
GRAPHS = 8  # of one context
REPLAYS = 5

MakeBackend = Callable[[], GraphBackend | None]


class SmallStep:
    """Forward, backward and update over static tensors."""

    def __init__(self, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(64, 64, generator=generator).to(device).requires_grad_()
        self.x = torch.randn(32, 64, generator=generator).to(device)
        self.loss, self.lr = torch.zeros((), device=device), torch.full((), 1e-2, device=device)
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer = torch.optim.AdamW([self.weight], lr=self.lr, fused=True, capturable=True)
        self.optimizer.state[self.weight] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self.weight),
            "exp_avg_sq": torch.zeros_like(self.weight),
        }

    def __call__(self) -> None:
        loss = (self.x @ self.weight).tanh().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.copy_(loss.detach())
        self.optimizer.step()
        assert self.weight.grad is not None
        self.weight.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        assert self.weight.grad is not None
        return {"weight": self.weight.detach(), "grad": self.weight.grad, **self.optimizer.state[self.weight]}

    def declare(self, context: WorkerContext, name: str) -> StepGraph:
        inputs = {"x": self.x, "lr": self.lr}
        return context.graph(name, self, inputs=inputs, outputs={"loss": self.loss}, state=self.state())


class Capturer:
    """A worker that lives many lives, each with some graphs."""

    def __init__(self, index: int, task: Task, phase: CapturePhase, captures: int, backend: MakeBackend) -> None:
        self.name, self._task, self._phase, self._captures = f"storm-{index}", task, phase, captures
        self._backend = backend
        self._rng = random.Random(index)
        self.captured = 0
        self.seconds: list[float] = []  # of each warm-up and capture

    def run(self) -> None:
        """Raises AssertionError when a replay is not its eager step, bit for bit."""
        while self.captured < self._captures:
            task = self._task
            context = WorkerContext(self.name, task.device, mode=task.mode, phase=self._phase, backend=self._backend())
            with context:
                self._live(context)
                with self._phase.turn(f"the end of {self.name}"):
                    context.close()

    def _live(self, context: WorkerContext) -> None:
        seeds = range(self.captured, min(self.captured + GRAPHS, self._captures))
        steps = [(SmallStep(self._task.device, seed), SmallStep(self._task.device, seed)) for seed in seeds]
        graphs = [replayed.declare(context, f"step.{seed}") for seed, (replayed, _) in zip(seeds, steps, strict=True)]
        time.sleep(self._rng.uniform(0, 0.02))  # the two are never in step with each other
        context.prepare()
        for _ in range(REPLAYS):
            for graph, (_, eager) in zip(graphs, steps, strict=True):
                graph()
                eager()
        for graph, (replayed, eager) in zip(graphs, steps, strict=True):
            for name, tensor in (replayed.state() | {"loss": replayed.loss}).items():
                if not torch.equal(tensor, (eager.state() | {"loss": eager.loss})[name]):  # sync: the check
                    raise AssertionError(f"{self.name}, {graph.name}: {name} differs from the eager step's")
        self.captured += len(graphs)
        self.seconds += [graph.capture_s for graph in graphs]


class Noise:
    """Allocates, fills and copies on the device, both ways, until told to stop."""

    def __init__(self, device: str) -> None:
        self._device, self._stop = device, threading.Event()
        self.rounds, self.allocated_bytes = 0, 0

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Raises AssertionError when what comes back is not what was sent."""
        on_gpu, rng = self._device == "cuda", random.Random(7)
        if on_gpu:
            # High priority: torch hands out the streams of one priority in a circle, so one would meet a worker's.
            torch.cuda.set_stream(torch.cuda.Stream(priority=-1))
        sent, back = (torch.empty(1 << 16, pin_memory=on_gpu) for _ in range(2))
        held: deque[Tensor] = deque(maxlen=4)
        while not self._stop.is_set():
            value = float(self.rounds)
            held.append(torch.empty(rng.randint(1, 1 << 22 if on_gpu else 1 << 17), device=self._device).fill_(value))
            self.allocated_bytes += held[-1].nbytes
            sent.fill_(value)
            there = sent.to(self._device, non_blocking=True)
            back.copy_(there.clone(), non_blocking=True)
            if on_gpu:
                event = torch.cuda.Event()
                event.record()
                event.synchronize()  # sync: this stream only
            if not bool((back == value).all()):
                raise AssertionError(f"round {self.rounds}: a copy there and back came back changed")
            self.rounds += 1
            time.sleep(0.0005)


def run_storm(task: Task, backend: MakeBackend = lambda: None) -> dict[str, Any]:
    """200 captures of each of two threads, and the third thread's work meanwhile.

    Args:
        backend: of each context; None is the device's own.
    """
    phase, errors = CapturePhase(timeout_s=120), []
    wanted = QUICK_CAPTURES if task.quick else CAPTURES
    capturers = [Capturer(i, task, phase, wanted, backend) for i in range(2)]
    noise = Noise(task.device)

    def guarded(worker: Capturer | Noise) -> None:
        try:
            worker.run()
        except Exception as error:
            errors.append(f"{threading.current_thread().name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(c,), name=c.name, daemon=True) for c in capturers]
    other = threading.Thread(target=guarded, args=(noise,), name="noise", daemon=True)
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    noise.stop()
    other.join()
    captured = [capturer.captured for capturer in capturers]
    if not errors and (captured != [wanted] * 2 or not noise.rounds):
        errors.append(f"captured {captured} of {wanted} each, {noise.rounds} rounds of noise")
    seconds = [s for capturer in capturers for s in capturer.seconds]
    return {
        "passed": not errors,
        "errors": errors,
        "captures": captured,
        "capture_ms": round(statistics.median(seconds) * 1e3, 2) if seconds else None,
        "noise_rounds": noise.rounds,
        "noise_allocated_bytes": noise.allocated_bytes,
    }
