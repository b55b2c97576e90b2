"""A process that makes shards: `python -m dflash_graph.shard_worker`, started by shard_runner.py and by nobody else.

It reads one pickled `ShardTask` from standard input, then one shard number per line, and answers each with one line of
JSON on standard output. It ends when its input ends, so that it cannot outlive the process that started it.
"""

import json
import os
import pickle
import sys


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    from dflash_graph.shards import ShardMaker, ShardTask

    task: ShardTask = pickle.load(sys.stdin.buffer)
    maker = None
    for line in sys.stdin.buffer:
        answer: dict[str, object] = {}
        try:
            maker = maker or ShardMaker(task)
            answer["rows"], answer["tokens"] = maker.make(int(line))
        except OSError as error:
            answer = {"error": str(error), "errno": error.errno}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
