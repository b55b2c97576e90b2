"""Makes all shards of a preparation, in this process or in several, and takes up where a killed one stopped.

`datasets.map` would share the work too, but its pieces are as many as its processes: a killed run would lose most of
them, and the next one, with another number of processes, all. Shards here are small, their content depends on nothing
but their block, and those that stand in the work folder are checked and kept. Called by data.py.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from dflash_graph.shards import ShardMaker, ShardTask, load_shard, shard_path

logger = logging.getLogger(__name__)

_SHARDS_PER_WORKER = 8  # fewer are not worth a process's start (3 to 5 s)
_MAX_WORKERS = 16
_LINE_EVERY_S = 30.0


@dataclass(frozen=True)
class ShardRun:
    """What making the shards took."""

    workers: int
    seconds: float
    rows: int  # of the shards made now
    tokens: int
    reused: int  # shards that stood there


def choose_workers(workers: int | None, num_shards: int) -> int:
    """Processes for so many shards: as set, or one per core that the data keeps busy."""
    if workers is not None:
        return max(1, min(workers, num_shards))
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _MAX_WORKERS, num_shards // _SHARDS_PER_WORKER))


def make_shards(task: ShardTask, workers: int | None) -> ShardRun:
    """Make every shard that does not stand in the task's folder yet.

    Raises:
        ValueError: the template or a file is unusable.
        RuntimeError: a process died.
    """
    task.folder.mkdir(parents=True, exist_ok=True)
    todo = [i for i in range(len(task.blocks)) if not _stands(task, i)]
    reused = len(task.blocks) - len(todo)
    if reused:
        logger.info("%d of %d shards stand in %s and are kept", reused, len(task.blocks), task.folder)
    count = choose_workers(workers, len(todo))
    started = time.monotonic()
    with _Progress(task, todo) as progress:
        if count == 1:
            maker = ShardMaker(task)  # here, so that an unusable template shows at once
            for i in todo:
                progress.add(i, *maker.make(i))
        else:
            _in_processes(task, todo, count, progress.add)
    return ShardRun(count, time.monotonic() - started, progress.rows, progress.tokens, reused)


def _stands(task: ShardTask, index: int) -> bool:
    path = shard_path(task.folder, index)
    if not path.exists():
        return False
    part, block = task.blocks[index]
    try:
        if load_shard(path).block == (part, block.start, block.stop):
            return True
        logger.info("the shard %s is of another cut of the data and made again", path)
    except ValueError as error:
        logger.warning("%s; it is made again", error)
    path.unlink()
    return False


def _in_processes(task: ShardTask, todo: list[int], count: int, done: Callable[[int, int, int], None]) -> None:
    try:
        payload = pickle.dumps(task)
    except Exception as error:  # pickling may raise anything
        raise ValueError(
            f"data.workers = {count} needs a tokenizer that can be sent to another process: {error}. Set data.workers=1"
        ) from error
    left = iter(todo)
    lock = threading.Lock()
    failed = threading.Event()

    def serve(_: int) -> None:
        try:
            with _worker(payload) as worker:
                while not failed.is_set():
                    with lock:
                        index = next(left, None)
                    if index is None:
                        return
                    rows, tokens = _ask(worker, index, task)
                    with lock:
                        done(index, rows, tokens)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(count) as pool:
        try:
            list(pool.map(serve, range(count)))
        finally:
            failed.set()


@contextmanager
def _worker(payload: bytes) -> Iterator["subprocess.Popen[bytes]"]:
    # One thread each: the processes share the cores, and a library's own threads would fight them.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # finds what this process finds
    command = [sys.executable, "-m", "dflash_graph.shard_worker"]
    # In a session of its own: an interrupt from the keyboard is for this process, which lets the others finish.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the first answer tells
            process.stdin.write(payload)
            process.stdin.flush()
        yield process
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(worker: "subprocess.Popen[bytes]", index: int, task: ShardTask) -> tuple[int, int]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(b"%d\n" % index)
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = b""
    if not line:
        part, block = task.blocks[index]
        raise RuntimeError(
            f"a process that tokenises ended with code {worker.wait()} at {task.parts[part].name}:{block.number}; if "
            "it was killed for memory, lower data.workers. Finished shards are kept: run again to go on"
        )
    answer: dict[str, Any] = json.loads(line)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["error"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["rows"], answer["tokens"]


class _Progress:
    """A bar on a terminal; elsewhere a line every half minute, of what takes that long."""

    def __init__(self, task: ShardTask, todo: list[int]) -> None:
        self._blocks = task.blocks
        self.rows = self.tokens = 0
        total = sum(block.rows for _, block in task.blocks)
        begun = total - sum(task.blocks[i][1].rows for i in todo)
        every = 0.2 if sys.stderr.isatty() else _LINE_EVERY_S
        delay = 0.0 if sys.stderr.isatty() else _LINE_EVERY_S
        self._bar = tqdm(total=total, initial=begun, unit="row", desc="data", mininterval=every, delay=delay)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, index: int, rows: int, tokens: int) -> None:
        """Count a finished shard."""
        self.rows += rows
        self.tokens += tokens
        self._bar.update(self._blocks[index][1].rows)
