"""Rows of any source become memory-mapped rows of tokens with a loss mask, once, in a cache keyed by content.

Owns the way from sources to the cache folder: the fingerprint, the work folder that a killed preparation leaves and
the next one takes up, and the exchange of a finished folder. Every row of the input is either kept or counted under one
reason; a data set with nothing to train on is an error here, before any model is loaded. Called by train, evaluate and
the command line.
"""

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_graph.chat import ChatEncoder
from dflash_graph.chat_template import find_template
from dflash_graph.config_groups import DataConfig, SourceConfig
from dflash_graph.data_report import CutShare as CutShare
from dflash_graph.data_report import DataReport as DataReport
from dflash_graph.data_writer import Layout, Writer, write_meta
from dflash_graph.mask_token import check_mask_token as check_mask_token
from dflash_graph.mask_token import choose_mask_token as choose_mask_token
from dflash_graph.selection import SelectionRules
from dflash_graph.shard_runner import make_shards
from dflash_graph.shards import ShardTask
from dflash_graph.source_files import as_source
from dflash_graph.sources import LineFile, Source, Table, open_source
from dflash_graph.token_rows import HOLDOUT
from dflash_graph.token_rows import TokenRows as TokenRows
from dflash_graph.tokenizer import load_tokenizer as load_tokenizer
from dflash_graph.tokenizer import tokenizer_identity
from dflash_graph.work_folder import check_space, locked, put_in_place

logger = logging.getLogger(__name__)

_FORMAT = 3  # raise it when the files or the meaning of a row change
_DIGEST_THREADS = 4


@dataclass(frozen=True)
class RunRows:
    """The rows of a run: to train on, and held out (or None)."""

    rows: TokenRows
    validation: TokenRows | None


def prepare_run(data: DataConfig, tokenizer: Any) -> RunRows:
    """Prepare, or open, all rows that a configuration names.

    Raises:
        ValueError: as `prepare`.
    """
    options: dict[str, Any] = {
        "max_length": data.max_length,
        "cache_dir": data.cache_dir or ".cache/dflash_graph",
        "chat_template": data.chat_template,
        "deduplicate": data.deduplicate,
        "overlong": data.overlong,
        "workers": data.workers,
    }
    validation = prepare(data.validation, tokenizer, **options) if data.validation else None
    rows = prepare(data.train, tokenizer, holdout=data.holdout, validation=validation, **options)
    return RunRows(rows, validation or rows.holdout)


def prepare(
    files: Sequence[str | Path | SourceConfig],
    tokenizer: Any,
    *,
    max_length: int,
    cache_dir: str | Path,
    chat_template: str | Path | None = None,
    holdout: int | float | None = None,
    deduplicate: Literal["none", "exact", "prompt"] = "none",
    overlong: Literal["truncate", "drop"] = "truncate",
    validation: TokenRows | None = None,
    workers: int | None = None,
) -> TokenRows:
    """Tokenise the rows of sources, or open the cached result of the same content and settings.

    Args:
        files: paths, globs, folders, hub ids or `SourceConfig`s; their rows keep this order.
        max_length: rows are cut to so many tokens, or dropped where they are longer (`overlong`).
        cache_dir: the rows are kept in cache_dir/<fingerprint>/, written to a work folder beside it and renamed.
        chat_template: path of a Jinja file that replaces the tokenizer's own template.
        holdout: share or number of rows that are held out; they are the result's `holdout`.
        deduplicate: what counts as a row that stood before; see `DataConfig`.
        validation: with `deduplicate`, rows that these contain are dropped; without, they are counted and warned about.
        workers: processes; no matter for the result.

    Raises:
        ValueError: a source is missing, of unknown kind or damaged, no row is trainable, every token is supervised, or
            the template is unusable.
    """
    if not files:
        raise ValueError("data files must exist and be at least one; found none")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens; found {max_length}")
    template = find_template(tokenizer, chat_template)
    specs = [spec if isinstance(spec, SourceConfig) else as_source(str(spec)) for spec in files]
    sources = [open_source(spec, threads=_DIGEST_THREADS) for spec in specs]
    settings = {
        "tokenizer": tokenizer_identity(tokenizer),
        "template": template,
        "max_length": max_length,
        "holdout": holdout,
        "deduplicate": deduplicate,
        "overlong": overlong,
        "validation": validation.fingerprint if validation is not None and deduplicate != "none" else None,
    }
    fingerprint = _fingerprint(sources, settings)
    folder = Path(cache_dir) / fingerprint
    rows = _open_finished(folder)
    if rows is None:
        if "strftime_now" in (template or ""):
            logger.warning("the chat template writes the current date: rows built on another day will differ")
        known = None
        if validation is not None and deduplicate != "none":
            known = validation.origins["prompt" if deduplicate == "prompt" else "content"]
        rules = SelectionRules(deduplicate, holdout, [s.weight for s in specs], [s.seed for s in specs])
        job = _Job(sources, tokenizer, template, max_length, overlong, rules, known, workers)
        _build(job, folder)
        rows = TokenRows(folder)
    if validation is not None:
        _warn_of_leaks(rows, validation)
    return rows


@dataclass(frozen=True)
class _Job:
    """What `_build` builds."""

    sources: Sequence[Source]
    tokenizer: Any
    template: str | None
    max_length: int
    overlong: Literal["truncate", "drop"]
    rules: SelectionRules
    known: Any
    workers: int | None


def _open_finished(folder: Path) -> TokenRows | None:
    if not folder.exists():
        return None
    try:
        rows = TokenRows(folder)
        _ = rows.holdout, rows.origins
    except (ValueError, OSError) as error:
        logger.warning("%s; building it again", error)
        return None
    return rows


def _fingerprint(sources: Sequence[Source], settings: dict[str, Any]) -> str:
    """sha256 hex of contents and settings. Paths do not count; a name that someone chose stands in the report."""
    named = []
    for source in sources:
        config = source.config
        named.append([source.digest, config.name, config.weight, config.seed, config.max_rows])
    identity = {"format": _FORMAT, "sources": named, **settings}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _build(job: _Job, folder: Path) -> None:
    """Make the shards in a work folder beside `folder`, put them together there, and put the result in place whole.

    The work folder stays if the process is killed or interrupted, or the disk is full: the next call goes on with its
    shards. It is removed when the rows are finished, and when they cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name[:16]}.work")
    with locked(work):
        if _open_finished(folder) is not None:
            shutil.rmtree(work, ignore_errors=True)
            return  # another process was faster
        try:
            _build_locked(job, folder, work)
        except ValueError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"the disk of {folder.parent} is full. What is done stays in {work}: free some space, or move "
                "data.cache_dir with it, and run again"
            ) from error
        shutil.rmtree(work, ignore_errors=True)


def _build_locked(job: _Job, folder: Path, work: Path) -> None:
    started = time.monotonic()
    parts, file_sources = open_parts(job.sources, work)
    blocks = [(i, block) for i, part in enumerate(parts) for block in part.blocks(_DIGEST_THREADS)]
    check_space(sum(part.size for part in parts), work)
    task = ShardTask(
        parts=parts,
        blocks=blocks,
        tokenizer=job.tokenizer,
        template=job.template,
        max_length=job.max_length,
        overlong=job.overlong,
        folder=work / "shards",
    )
    run = make_shards(task, job.workers)
    layout = Layout(
        folder=task.folder,
        files=[part.name for part in parts],
        shard_files=[i for i, _ in blocks],
        file_sources=file_sources,
        source_names=[source.name for source in job.sources],
    )
    writer = Writer(layout, job.rules, job.max_length, job.known)
    mask_source = _mask_source(job)
    result = work / "rows"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    report = writer.write(result, mask_source)
    build = {
        "seconds": round(time.monotonic() - started, 3),
        "workers": run.workers,
        "rows_per_s": round(run.rows / max(run.seconds, 1e-9), 1),
        "tokens_per_s": round(run.tokens / max(run.seconds, 1e-9), 1),
        "shards_reused": run.reused,
    }
    if job.rules.holdout is not None:
        (result / HOLDOUT).mkdir()
        held_out = writer.write(result / HOLDOUT, mask_source, held_out=True)
        name = hashlib.sha256(f"{folder.name} {HOLDOUT}".encode()).hexdigest()
        write_meta(result / HOLDOUT, name, held_out, layout.files, build)
    write_meta(result, folder.name, report, layout.files, build)
    for each in job.sources:
        each.check_unchanged()
    put_in_place(result, folder)
    for source in report.sources:
        if source.rows_in == 0:
            logger.warning("the data source %s holds no row", source.name)


def _mask_source(job: _Job) -> str:
    if job.template is None:
        return "the rows"
    has_tags = ChatEncoder(job.tokenizer, job.template).has_generation_tags
    return "generation tags" if has_tags else "prefix rendering"


def open_parts(sources: Sequence[Source], work: Path) -> tuple[list[LineFile | Table], list[int]]:
    """All files and tables of the sources in order, and the source that each belongs to, as an index."""
    parts, file_sources = [], []
    for i, source in enumerate(sources):
        mine = source.parts(work / "inputs")
        parts += mine
        file_sources += [i] * len(mine)
    return parts, file_sources


def _warn_of_leaks(rows: TokenRows, validation: TokenRows) -> None:
    """Name training rows that the validation rows hold too; with `deduplicate`, there are none of that kind."""
    import numpy as np

    for key, what, remedy in (("content", "stand", "exact"), ("prompt", "have their prompt", "prompt")):
        count = int(np.isin(rows.origins[key], validation.origins[key]).sum())
        if count:
            logger.warning(
                "%d of %d training rows %s in the validation rows too; data.deduplicate=%s takes them out",
                count,
                len(rows),
                what,
                remedy,
            )
            return
