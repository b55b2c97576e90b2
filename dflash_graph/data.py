"""Conversations in JSONL become memory-mapped rows of tokens with a loss mask, once, in a cache keyed by content.

Owns the rows on disk, what was kept and why the rest was dropped (`DataReport`), the tokenizer's loading and the
choice of the mask token. Every row of the input is either kept or counted under one reason; a data set with nothing
to train on is an error here, before any model is loaded. Called by train, evaluate and the command line.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.chat import ChatEncoder, read_template
from dflash_graph.config import TargetConfig
from dflash_graph.data_writer import CutShare as CutShare
from dflash_graph.data_writer import DataReport as DataReport
from dflash_graph.data_writer import RowWriter

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the files or the meaning of a row change
_SCAN_TOKENS = 1 << 24


class TokenRows:
    """Tokenised rows, memory-mapped and read-only.

    Attributes:
        tokens: (num_tokens,) int32, all rows one after the other.
        loss_mask: (num_tokens,) uint8, 1 on supervised tokens.
        offsets: (n + 1,) int64; row i is [offsets[i], offsets[i + 1]).
        fingerprint: sha256 hex of file contents, tokenizer, template and every setting.
    """

    def __init__(self, folder: Path) -> None:
        """Open a finished cache folder.

        Raises:
            ValueError: the folder is half-written or damaged.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            num_rows, num_tokens = int(meta["num_rows"]), int(meta["num_tokens"])
            self.fingerprint: str = meta["fingerprint"]
            self.report = _report_from_dict(meta["report"])
            sizes = {name: (folder / name).stat().st_size for name in ("tokens.bin", "loss_mask.bin", "offsets.bin")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"damaged data cache {folder}: {error}") from None
        wanted = {"tokens.bin": 4 * num_tokens, "loss_mask.bin": num_tokens, "offsets.bin": 8 * (num_rows + 1)}
        if sizes != wanted or num_rows < 1:
            raise ValueError(f"damaged data cache {folder}: files must have {wanted} bytes; found {sizes}")
        # Plain views of the maps: slicing an np.memmap itself is several times slower.
        self.tokens: NDArray[np.int32] = np.asarray(np.memmap(folder / "tokens.bin", np.int32, "r"))
        self.loss_mask: NDArray[np.uint8] = np.asarray(np.memmap(folder / "loss_mask.bin", np.uint8, "r"))
        self.offsets: NDArray[np.int64] = np.fromfile(folder / "offsets.bin", np.int64)
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or bool((np.diff(self.offsets) < 2).any()):
            raise ValueError(f"damaged data cache {folder}: offsets.bin does not describe {num_tokens} tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """(n,) int32, tokens of each row."""
        return np.diff(self.offsets).astype(np.int32)

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Row i's (length,) tokens and loss mask, as read-only views of the files."""
        if not 0 <= i < len(self):
            raise IndexError(f"row must be in [0, {len(self)}); found {i}")
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[part], self.loss_mask[part]

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """(vocab_size,) int64: how often each id is a supervised token that can be predicted (not first of its row).

        Raises:
            ValueError: a row holds an id outside the vocabulary.
        """
        if self.report.max_token_id >= vocab_size:
            raise ValueError(
                f"token ids must be below the target's vocabulary of {vocab_size}; found {self.report.max_token_id}: "
                "the tokenizer does not belong to this target"
            )
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(self.tokens), _SCAN_TOKENS):
            part = slice(start, start + _SCAN_TOKENS)
            supervised = self.tokens[part][self.loss_mask[part] == 1]
            counts += np.bincount(supervised, minlength=vocab_size)
        starts = self.offsets[:-1]
        counts -= np.bincount(self.tokens[starts[self.loss_mask[starts] == 1]], minlength=vocab_size)
        return counts


def _report_from_dict(values: dict[str, Any]) -> DataReport:
    # JSON turns the numeric keys into text and the named tuples into lists.
    values["length_quantiles"] = {float(k): v for k, v in values["length_quantiles"].items()}
    values["cut_share"] = {int(k): CutShare(*v) for k, v in values["cut_share"].items()}
    return DataReport(**values)


def load_tokenizer(target: TargetConfig) -> Any:
    """The target's own tokenizer (transformers), GGUF files included.

    Raises:
        ValueError: nothing that transformers can load stands at `target.path`.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    if target.gguf_file is not None:
        if Path(target.path).is_dir() and not (Path(target.path) / target.gguf_file).is_file():
            raise ValueError(f"target.gguf_file must be a file of {target.path}; found no {target.gguf_file!r} there")
        options["gguf_file"] = target.gguf_file
    try:
        return AutoTokenizer.from_pretrained(target.path, **{k: v for k, v in options.items() if v is not None})
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load a tokenizer from target.path = {target.path!r}, which must be a local model folder or a hub "
            f"id (with target.gguf_file for GGUF): {error}"
        ) from error


def prepare(
    files: Sequence[str | Path],
    tokenizer: Any,
    *,
    max_length: int,
    cache_dir: str | Path,
    chat_template: str | Path | None = None,
) -> TokenRows:
    """Tokenise JSONL files of conversations, or open the cached result of the same content and settings.

    Args:
        files: JSONL files; their rows keep this order.
        max_length: rows are cut to so many tokens.
        cache_dir: the rows are kept in cache_dir/<fingerprint>/, written to a temporary folder and renamed.
        chat_template: path of a Jinja file that replaces the tokenizer's own template.

    Raises:
        ValueError: a file is missing, no row is trainable, every token is supervised, or the template is unusable.
    """
    paths = [Path(file) for file in files]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"data files must exist and be at least one; missing: {', '.join(missing) or 'all'}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens; found {max_length}")
    template = read_template(tokenizer, chat_template)
    fingerprint = _fingerprint(paths, tokenizer, template, max_length)
    folder = Path(cache_dir) / fingerprint
    if folder.exists():
        try:
            return TokenRows(folder)
        except ValueError as error:
            logger.warning("%s; building it again", error)
    if "strftime_now" in template:
        logger.warning("the chat template writes the current date: rows built on another day will differ")
    _build(paths, ChatEncoder(tokenizer, template), max_length, folder)
    return TokenRows(folder)


def _fingerprint(paths: Sequence[Path], tokenizer: Any, template: str, max_length: int) -> str:
    contents = []
    for path in paths:
        with path.open("rb") as file:
            contents.append(hashlib.file_digest(file, "sha256").hexdigest())
    identity = {
        "format": _FORMAT,
        "files": contents,
        "tokenizer": _tokenizer_identity(tokenizer),
        "template": template,
        "max_length": max_length,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    identity: dict[str, Any] = {"special": tokenizer.special_tokens_map}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # A tokenizer remembers the padding and truncation of its last call; rows use neither.
        return identity | {"backend": {k: v for k, v in backend.items() if k not in ("padding", "truncation")}}
    identity |= {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    identity["added"] = {str(i): repr(token) for i, token in tokenizer.added_tokens_decoder.items()}
    vocab_file = getattr(tokenizer, "vocab_file", None)
    if vocab_file and Path(vocab_file).is_file():
        identity["vocab_file"] = hashlib.sha256(Path(vocab_file).read_bytes()).hexdigest()
    return identity


def _build(paths: Sequence[Path], encoder: ChatEncoder, max_length: int, folder: Path) -> None:
    """Write the rows into a temporary folder beside `folder`, then put it in place whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
    try:
        with (work / "tokens.bin").open("wb") as tokens, (work / "loss_mask.bin").open("wb") as loss_mask:
            writer = RowWriter(encoder, max_length, tokens, loss_mask)
            writer.add_lines(paths)
            for file in (tokens, loss_mask):
                file.flush()
                os.fsync(file.fileno())
        report = writer.report()
        np.asarray(writer.offsets, dtype=np.int64).tofile(work / "offsets.bin")
        meta = {
            "fingerprint": folder.name,
            "num_rows": report.kept,
            "num_tokens": report.num_tokens,
            "report": asdict(report),
        }
        (work / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        _put_in_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(work: Path, folder: Path) -> None:
    os.chmod(work, 0o755)  # mkdtemp makes folders private
    try:
        work.rename(folder)
    except OSError:
        # Something stands there: another process's finished rows, or a damaged folder.
        try:
            TokenRows(folder)
        except ValueError:
            shutil.rmtree(folder)
            work.rename(folder)


def check_mask_token(rows: TokenRows, mask_token_id: int, name: str = "the data") -> None:
    """Refuse a mask token that the rows (called `name` in the message) use: it could not be told from text.

    Raises:
        ValueError: the id occurs in a row.
    """
    for start in range(0, len(rows.tokens), _SCAN_TOKENS):
        hits = np.flatnonzero(rows.tokens[start : start + _SCAN_TOKENS] == mask_token_id)
        if len(hits):
            row = int(np.searchsorted(rows.offsets, start + hits[0], side="right")) - 1
            raise ValueError(
                f"the mask token must not occur in {name}; id {mask_token_id} occurs first in row {row}: set "
                "drafter.mask_token_id to an id that no row uses, or leave it unset"
            )


def choose_mask_token(tokenizer: Any, vocab_size: int, *rows: TokenRows, mask_token_id: int | None = None) -> int:
    """The mask token's id; the log says where it came from.

    In order: `mask_token_id`; the tokenizer's mask token; an added special token that neither the rows nor the chat
    template use (one named reserved or unused first); an embedding row beyond the tokenizer; the highest id that the
    rows never use. Never the pad, end, begin or unknown token.

    Args:
        vocab_size: rows of the target's embedding.

    Raises:
        ValueError: `mask_token_id` occurs in the rows or is no free row of the embedding, or no id is free.
    """
    roles = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    taken = {getattr(tokenizer, role) for role in roles} - {None}
    if mask_token_id is not None:
        if not 0 <= mask_token_id < vocab_size or mask_token_id in taken:
            raise ValueError(
                f"drafter.mask_token_id must be in [0, {vocab_size}) and none of the tokenizer's pad, end, begin or "
                f"unknown tokens {sorted(taken)}; found {mask_token_id}"
            )
        for each in rows:
            check_mask_token(each, mask_token_id)
        return mask_token_id
    used = np.zeros(max([vocab_size, *taken, *(each.report.max_token_id for each in rows)]) + 1, dtype=bool)
    used[[*taken]] = True
    for each in rows:
        for start in range(0, len(each.tokens), _SCAN_TOKENS):
            used[each.tokens[start : start + _SCAN_TOKENS]] = True
    chosen, source = _free_id(tokenizer, vocab_size, used)
    logger.log(
        logging.WARNING if source.startswith("the ordinary") else logging.INFO, "mask token %d: %s", chosen, source
    )
    return chosen


def _free_id(tokenizer: Any, vocab_size: int, used: NDArray[np.bool_]) -> tuple[int, str]:
    own = tokenizer.mask_token_id
    if own is not None and own < vocab_size and not used[own]:
        return int(own), "the tokenizer's mask token"
    template = str(tokenizer.chat_template or "")
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < vocab_size}
    free = [i for i, name in added.items() if not used[i] and name not in template]
    free.sort(key=lambda i: (not any(word in added[i].lower() for word in ("mask", "reserved", "unused")), i))
    if free:
        return free[0], f"the special token {added[free[0]]!r}, which the data never uses"
    for beyond in range(len(tokenizer), vocab_size):
        if not used[beyond]:
            return beyond, "an embedding row beyond the tokenizer"
    unused = np.flatnonzero(~used[:vocab_size])
    if not len(unused):
        raise ValueError("no id of the vocabulary is free for the mask token: set drafter.mask_token_id")
    token = tokenizer.convert_ids_to_tokens(int(unused[-1]))
    return int(unused[-1]), f"the ordinary token {token!r}, the highest id that the data never uses"
