"""Writes held-out rows as they were read, for evaluation by decoding or for good as a validation file.

Owns the way back from a tokenised row to the row of its source. Called by the command line.
"""

import json
import os
import tempfile
from pathlib import Path

from dflash_graph.config_groups import DataConfig
from dflash_graph.data import open_parts
from dflash_graph.row_shapes import to_json
from dflash_graph.sources import open_source, parse_raw
from dflash_graph.token_rows import TokenRows


def write_holdout(data: DataConfig, rows: TokenRows, path: Path) -> int:
    """Write the rows that were held out of `rows` to a JSONL file, in the order of the sources; how many they are.

    Raises:
        ValueError: nothing was held out, or the sources are not what `rows` were made of.
    """
    held_out = rows.holdout
    if held_out is None:
        raise ValueError("data.holdout must be set to write held-out rows")
    wanted: dict[int, set[int]] = {}
    for origin in held_out.origins:
        wanted.setdefault(int(origin["file"]), set()).add(int(origin["number"]))
    written = 0
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-graph-") as work, unfinished.open("w") as out:
            parts, _ = open_parts([open_source(spec) for spec in data.train], Path(work))
            for i, part in enumerate(parts):
                for block in part.blocks():
                    for raw in part.read(block):
                        if int(raw.where.rpartition(":")[2]) in wanted.get(i, ()):
                            out.write(json.dumps(to_json(parse_raw(raw)), ensure_ascii=False) + "\n")
                            written += 1
        if written != sum(map(len, wanted.values())):
            raise ValueError(f"the sources changed: {written} of {sum(map(len, wanted.values()))} held-out rows found")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return written
