"""`python -m bench.rank_ledger train ...`: `dflash-graph train` that writes down which rank trained which job when.

Every rank appends to `<LEDGER>/<rank>`, one line of JSON at its start ({"life", "rank", "pid", "from_step"}) and one
after each step ({"life", "step", "epoch", "jobs"}); a life is one start of all ranks: (starts of the launcher,
restarts by it). One write each, so that a kill leaves whole lines. `read_ledger` says what survived. Used by
`soak_ranks.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER, START = "LEDGER", "LEDGER_START"
Life = tuple[int, int]


@dataclass(frozen=True)
class Ledger:
    """What all ranks wrote down.

    Attributes:
        started: life -> the step it continued from.
        steps: (life, step) -> (epoch, jobs) of all ranks together.
    """

    started: Mapping[Life, int]
    steps: Mapping[tuple[Life, int], list[tuple[int, int]]]

    def survivors(self) -> dict[int, list[tuple[int, int]]]:
        """step -> its (epoch, job)s, without what a later life rolled back: it started at an earlier step.

        Raises:
            ValueError: a step survives in two lives.
        """
        kept: dict[int, list[tuple[int, int]]] = {}
        for (life, step), jobs in self.steps.items():
            if all(step <= start for later, start in self.started.items() if later > life):
                if step in kept:
                    raise ValueError(f"step {step} must survive in one life; found two, the later is {life}")
                kept[step] = jobs
        return kept

    def faults(self, jobs_per_epoch: int, epochs: int) -> list[str]:
        """Jobs lost or doubled among the survivors, and missing steps; empty if each job was trained once an epoch."""
        kept = self.survivors()
        found = [f"step {step} is missing" for step in range(1, max(kept, default=0) + 1) if step not in kept]
        counts = Counter(pair for jobs in kept.values() for pair in jobs)
        found += [f"epoch {e} job {j} was trained {n} times" for (e, j), n in sorted(counts.items()) if n > 1]
        everything = {(epoch, job) for epoch in range(epochs) for job in range(jobs_per_epoch)}
        found += [f"epoch {epoch} job {job} was lost" for epoch, job in sorted(everything - counts.keys())]
        return found + [f"epoch {epoch} job {job} does not exist" for epoch, job in sorted(counts.keys() - everything)]


def read_ledger(folder: Path) -> Ledger:
    """Every rank's lines; a step counts as trained by a life only where all ranks of that life finished it."""
    started: dict[Life, int] = {}
    steps: dict[tuple[Life, int], list[tuple[int, int]]] = {}
    writers: Counter[tuple[Life, int]] = Counter()
    paths = sorted(folder.iterdir())
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            life = (record["life"][0], record["life"][1])
            if "from_step" in record:
                started.setdefault(life, record["from_step"])
                continue
            key = life, record["step"]
            writers[key] += 1
            steps.setdefault(key, []).extend((record["epoch"], job) for job in record["jobs"])
    return Ledger(started, {key: jobs for key, jobs in steps.items() if writers[key] == len(paths)})


def plant() -> None:
    """Have this rank keep its ledger."""
    from dflash_graph.rank_watch import RESTARTS
    from dflash_graph.trainer import Trainer

    descriptor = os.open(
        Path(os.environ[FOLDER], os.environ.get("RANK", "0")), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    life = [int(os.environ[START]), int(os.environ.get(RESTARTS, 0))]
    load, step = Trainer.load, Trainer._step

    def write(**values: Any) -> None:
        os.write(descriptor, (json.dumps({"life": life, **values}) + "\n").encode())

    def noted_load(trainer: Trainer) -> None:
        load(trainer)
        write(rank=trainer._ranks.rank, pid=os.getpid(), from_step=trainer.progress.step)

    def noted_step(trainer: Trainer, window: int) -> list[int]:
        jobs = step(trainer, window)
        assert trainer.pool._epoch is not None
        write(step=trainer.progress.step + 1, epoch=trainer.pool._epoch.schedule.epoch, jobs=jobs)
        return jobs

    Trainer.load, Trainer._step = noted_load, noted_step  # type: ignore[method-assign]


def _main() -> int:
    from dflash_graph import launch, train_command
    from dflash_graph.__main__ import _rank_main, main
    from dflash_graph.rank_watch import RANK_DIR

    if RANK_DIR in os.environ:
        plant()
        _rank_main()

    def launched(command: list[str], *args: Any, **kwargs: Any) -> int:
        return launch.launch(["-m", "bench.rank_ledger", *command[2:]], *args, **kwargs)

    train_command.launch = launched  # type: ignore[assignment]
    return main()


if __name__ == "__main__":
    sys.exit(_main())
