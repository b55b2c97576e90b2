"""Which files a data source means: a path, a glob, a folder or a hub id becomes a list of files of known formats.

Owns the names of formats and the digests of contents. Everything that does not exist, holds no data or has an unknown
ending is an error here, before anything is read. Called by sources.py.
"""

import glob
import hashlib
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dflash_graph.config_groups import SourceConfig

logger = logging.getLogger(__name__)

HUB = "hf:"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_DIGEST_CHUNK = 16 << 20  # bytes hashed at once by one thread
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
# Endings that fsspec opens, and what it calls them.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


@dataclass(frozen=True)
class InputFile:
    """One file of rows. `compression` is fsspec's name of it, or None."""

    path: Path
    format: str
    compression: str | None = None


def as_source(spec: str | SourceConfig) -> SourceConfig:
    """A plain path as the settings of a source."""
    return SourceConfig(path=spec) if isinstance(spec, str) else spec


def is_datasets_folder(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote the folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _classify(path: Path, format: str | None) -> InputFile | None:
    """Format and compression by the file's ending; None if it is unknown."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = path.with_suffix("") if compression else path
    found = format or FORMATS.get(inner.suffix.lower())
    return None if found is None else InputFile(path, found, compression)


def find_files(source: SourceConfig) -> tuple[InputFile, ...]:
    """The files of a source in order: a glob's and a folder's (searched to any depth) by name.

    Raises:
        ValueError: nothing stands there, or a named file has an unknown ending.
    """
    path = Path(source.path)
    if path.is_dir():
        return _folder(source, path)
    if path.is_file():
        paths = [path]
    else:
        paths = [Path(name) for name in sorted(glob.glob(source.path, recursive=True)) if Path(name).is_file()]
        if not paths and glob.has_magic(source.path):
            raise ValueError(f"data files must exist and be at least one; no file matches {source.path!r}")
        if not paths:
            hint = f". A data set of the hub is named {HUB}{source.path}" if _HUB_ID.fullmatch(source.path) else ""
            raise ValueError(f"data files must exist and be at least one; missing: {source.path}{hint}")
    if source.split is not None or source.subset is not None:
        raise ValueError(f"split and subset belong to hub ids and `datasets` folders; found them at {source.path}")
    files = [(each, _classify(each, source.format)) for each in paths]
    unknown = [str(each) for each, file in files if file is None]
    if unknown:
        raise ValueError(
            f"a data file must end in {', '.join(FORMATS)} (also with {', '.join(COMPRESSIONS)}), or its source must "
            f"say its `format`; found {', '.join(unknown[:3])}"
        )
    return tuple(file for _, file in files if file is not None)


def _folder(source: SourceConfig, path: Path) -> tuple[InputFile, ...]:
    if source.split is not None or source.subset is not None:
        raise ValueError(f"split and subset belong to hub ids and `datasets` folders; {path} is a folder of files")
    every = [p for p in sorted(path.rglob("*")) if p.is_file() and not any(x.startswith(".") for x in _below(p, path))]
    files = [(each, _classify(each, None)) for each in every]
    known = [file for _, file in files if file is not None]
    ignored = [each.name for each, file in files if file is None]
    if not known:
        found = f"{len(ignored)} files of other kinds ({', '.join(ignored[:3])})" if ignored else "no file"
        raise ValueError(f"a data folder must hold files that end in {', '.join(FORMATS)}; {path} holds {found}")
    if ignored:
        logger.warning("%s: %d files of other kinds are not read: %s", path, len(ignored), ", ".join(ignored[:5]))
    formats = {file.format for file in known}
    if source.format is not None:
        known = [file for file in known if file.format == source.format]
    if not known:
        raise ValueError(f"{path} holds no file of format {source.format}; found {', '.join(sorted(formats))}")
    return tuple(known)


def _below(path: Path, folder: Path) -> Sequence[str]:
    return path.relative_to(folder).parts


def file_digest(path: Path, threads: int = 1) -> str:
    """sha256 hex over the sha256 of each 16 MiB of the file, computed by several threads."""
    size = path.stat().st_size

    def digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_DIGEST_CHUNK)).digest()

    whole = hashlib.sha256(str(size).encode())
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for part in pool.map(digest, range(0, size, _DIGEST_CHUNK)):
            whole.update(part)
    return whole.hexdigest()
