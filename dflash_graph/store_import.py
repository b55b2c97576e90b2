"""Takes hidden states that another program wrote into a store: `dflash-graph store add`.

Owns the checks against the run's data: every file's token ids are a row of it, every row has its file. All files are
checked before the first is taken in. The formats themselves are the matter of `store_formats.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dflash_graph.config import Config
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.store import FeatureStore, gib
from dflash_graph.store_codec import TORCH_DTYPES, decode, relative_errors
from dflash_graph.store_formats import PeerFormat, PeerRow, find_files, our_layer_ids, read_row
from dflash_graph.store_identity import StoreSpec
from dflash_graph.store_plan import check_space
from dflash_graph.store_shard import StoredRow, row_key
from dflash_graph.store_worker import JobRow, encode_row
from dflash_graph.store_writer import StoreWriter

_MEASURED = 100  # rows whose rounding error is measured


@dataclass(frozen=True, kw_only=True)
class AddReport:
    """What became of the files: files == added + known + repeated + unknown.

    Attributes:
        known: rows that the store had already. repeated: files with the tokens of an earlier one. unknown: files whose
            tokens are no row of the data, left out.
        missing_rows: rows of the data that the store still lacks. other_masks: rows whose loss mask is not the data's.
        rounding: median relative error that the store's dtype adds per token and tap.
    """

    format: PeerFormat
    files: int
    added: int
    known: int
    repeated: int
    unknown: int
    missing_rows: int
    other_masks: int
    written_bytes: int
    rounding: float
    store: str

    def __str__(self) -> str:
        left_out = "".join(
            f", {count} {words}"
            for count, words in (
                (self.known, "were there already"),
                (self.repeated, "repeat an earlier one"),
                (self.unknown, "are no row of the data"),
            )
            if count
        )
        text = (
            f"read      {self.files} files of {self.format}: {self.added} rows added ({gib(self.written_bytes)})"
            f"{left_out}\nrounding  median relative error of the store's dtype {self.rounding:.2e}\n"
        )
        if self.other_masks:
            text += f"masks     {self.other_masks} files have another loss mask than the data, whose own is trained\n"
        if self.missing_rows:
            text += f"missing   {self.missing_rows} rows of the data have no features yet\n"
        return text + f"{self.store}\ncheck     `dflash-graph store compare` says whether they fit this target"


class _Data:
    """The run's rows by the hash of their tokens."""

    def __init__(self, plan: RunPlan) -> None:
        self.rows: dict[bytes, tuple[NDArray[np.int32], NDArray[np.uint8]]] = {}
        for part in (plan.rows, plan.validation_rows):
            for i in range(0 if part is None else len(part)):
                assert part is not None
                row = part.row(i)
                self.rows.setdefault(row_key(row[0]), row)

    def explain(self, found: NDArray[np.int32]) -> str:
        """How tokens that are no row of the data come closest to one."""
        best = 0
        nearest: NDArray[np.int32] | None = None
        for tokens, _ in self.rows.values():
            n = min(len(tokens), len(found))
            differing = np.flatnonzero(tokens[:n] != found[:n])
            common = int(differing[0]) if len(differing) else n
            if common > best:
                best, nearest = common, tokens
        if nearest is None:
            return "no row of the data starts with its first token"
        if best == len(found):
            return f"they are the first {best} tokens of a row of {len(nearest)}: another maximum length?"
        if best == len(nearest):
            return f"a row of {best} tokens is their beginning: another maximum length?"
        return (
            f"the nearest row, of {len(nearest)} tokens, differs from position {best} on, where it has "
            f"{nearest[best]} and the file {found[best]}: another chat template or tokenizer?"
        )


def add_features(
    config: Config, source: Path, *, layers: Sequence[int], chosen: str = "auto", partial: bool = False
) -> AddReport:
    """Add the hidden states of a folder to the store of `config`, which is made if it does not exist.

    Args:
        layers: the layer ids, in the format's own counting, that were saved.
        chosen: a format, or "auto".
        partial: take what fits, though rows of the data have no file or files no row of the data.

    Raises:
        ValueError: a file is damaged or does not belong to the data or the target; nothing was added.
        StoreFullError: the disk filled up; what was written is whole and kept.
    """
    kind, files = find_files(source, chosen)
    plan = make_plan(replace(config, features=replace(config.features, missing="generate")))
    spec, folder = plan.features.spec, Path(config.features.path or "")
    assert spec is not None
    ours = our_layer_ids(kind, layers, plan.facts.num_hidden_layers)
    if lacking := [tap for tap in spec.target_layer_ids if tap not in ours]:
        raise ValueError(
            f"--layers must cover the taps {list(spec.target_layer_ids)}; {kind}'s layers {list(layers)} are ours "
            f"{ours}, without {lacking}. Set drafter.target_layer_ids, or extract these layers as well"
        )
    columns = [ours.index(tap) for tap in spec.target_layer_ids]
    data = _Data(plan)
    store = FeatureStore.open(folder, spec) if (folder / "store.json").exists() else None
    wanted, counts = _check_files(kind, files, data, store, len(layers), spec.hidden_size, partial=partial)
    missing = [row for key, row in data.rows.items() if key not in wanted and (store is None or key not in store)]
    if missing and not partial:
        raise ValueError(
            f"{source} must have a file for each of the {len(data.rows)} different rows of the data, held-out rows "
            f"included, that the store lacks; {len(missing)} have none. Add the files with --partial and make the "
            "other rows with `store build`, or extract them"
        )
    num_tokens = sum(len(data.rows[key][0]) for key in wanted)
    check_space(folder, replace(plan.features, missing_rows=len(wanted), missing_tokens=num_tokens))
    store = store or FeatureStore.open(folder, spec, create=True)
    writer = StoreWriter(
        store,
        origin={"source": kind, "layers": list(layers)},
        shard_bytes=config.features.shard_mib << 20,
    )
    errors = []
    shown = config.log.progress
    for number, (key, path) in enumerate(tqdm(wanted.items(), unit=" rows", disable=not shown)):
        row = _pick(read_row(kind, path, len(layers), spec.hidden_size, features=True), columns, spec)
        try:
            stored = encode_row(spec, JobRow(0, data.rows[key][0], key), row)
        except ValueError as error:
            writer.flush()
            raise ValueError(f"{path}: {error}; the {writer.num_rows} rows before it were added") from None
        if number < _MEASURED:
            errors.append(relative_errors(_decoded(stored, spec), row, len(columns))[0])
        writer.add(stored)
    writer.flush()
    return AddReport(
        format=kind,
        files=len(files),
        added=len(wanted),
        missing_rows=len(missing),
        written_bytes=writer.num_bytes,
        rounding=float(torch.cat(errors).median()) if errors else 0.0,
        store=str(store),
        **counts,
    )


def _check_files(
    kind: PeerFormat,
    files: list[Path],
    data: _Data,
    store: FeatureStore | None,
    num_layers: int,
    hidden_size: int,
    *,
    partial: bool,
) -> tuple[dict[bytes, Path], dict[str, int]]:
    """The files to take, by row; and what became of the others."""
    wanted: dict[bytes, Path] = {}
    counts = {"known": 0, "repeated": 0, "unknown": 0, "other_masks": 0}
    for path in files:
        row = read_row(kind, path, num_layers, hidden_size, features=False)
        key = row_key(row.token_ids)
        if key not in data.rows:
            if not partial:
                raise ValueError(
                    f"the {len(row.token_ids)} token ids of {path} must be a row of this run's data; "
                    f"{data.explain(row.token_ids)}. Nothing was added; --partial leaves such files out"
                )
            counts["unknown"] += 1
        elif key in wanted:
            counts["repeated"] += 1
        elif store is not None and key in store:
            counts["known"] += 1
        else:
            wanted[key] = path
            if row.loss_mask is not None and not np.array_equal(row.loss_mask, data.rows[key][1]):
                counts["other_masks"] += 1
    return wanted, counts


def _pick(row: PeerRow, columns: list[int], spec: StoreSpec) -> Tensor:  # -> (n, N*D)
    """The store's taps of a file's layers."""
    assert row.features is not None
    layers = row.features.reshape(len(row.token_ids), -1, spec.hidden_size)
    return layers[:, columns].flatten(1)


def _decoded(row: StoredRow, spec: StoreSpec) -> Tensor:  # (n, N*D) float32
    out = torch.empty(len(row.token_ids), spec.feature_size)
    exponents = None if row.exponents is None else torch.from_numpy(row.exponents)
    decode(torch.from_numpy(row.values).view(TORCH_DTYPES[spec.dtype]), exponents, out)
    return out
