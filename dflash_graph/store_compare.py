"""Compares the features of a store with those of our own target: `dflash-graph store compare`.

Owns the question whether a tap is the tap it is called: beside the layer itself, its neighbours, the other taps, the
embeddings and the final norm are tried, and the one that fits best is named. Reads a store, writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.config import Config
from dflash_graph.store import FeatureStore
from dflash_graph.store_codec import TORCH_DTYPES, decode, relative_errors
from dflash_graph.store_identity import target_digests
from dflash_graph.target import Target, read_facts, resolve_dtype

# Median relative error that two correct engines may have of each other: 16-bit arithmetic, and e4m3 on top.
LIMITS = {"float32": 0.05, "bfloat16": 0.05, "fp8": 0.08}


@dataclass(frozen=True, kw_only=True)
class TapReport:
    """One tap over all tokens compared.

    Attributes:
        median, maximum: of ||stored - ours|| / ||ours|| per token. cosine: the median; lowest_cosine: the smallest.
        best: what of our target fits best, in words; best_median: its median error. fits: it is the tap itself.
    """

    tap: int
    median: float
    maximum: float
    cosine: float
    lowest_cosine: float
    best: str
    best_median: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class CompareReport:
    """A store against our own target; `findings` is empty when the store is what it says."""

    rows: int
    tokens: int
    taps: list[TapReport]
    findings: list[str]

    def __str__(self) -> str:
        lines = [
            f"compared  {self.rows} rows, {self.tokens} tokens; relative error of a token's features",
            f"{'tap':>5}  {'median':>9}  {'max':>9}  {'cosine':>9}  {'lowest':>9}  fits best",
        ]
        lines += [
            f"{t.tap:>5}  {t.median:>9.2e}  {t.maximum:>9.2e}  {t.cosine:>9.6f}  {t.lowest_cosine:>9.6f}  {t.best}"
            + ("" if t.fits else f" ({t.best_median:.2e})")
            for t in self.taps
        ]
        return "\n".join([*lines, *(self.findings or ["the store agrees with this target"])])


def compare_store(config: Config, folder: Path, num_rows: int = 100) -> CompareReport:
    """Run our target over rows of a store, evenly spread over it, and compare.

    Raises:
        ValueError: the folder is no store, it is damaged or empty, or its sizes are not the target's.
    """
    store, facts = FeatureStore(folder), read_facts(config.target)
    spec = store.spec
    if spec.hidden_size != facts.hidden_size or spec.target_layer_ids[-1] >= facts.num_hidden_layers:
        raise ValueError(
            f"store {folder} must have this target's sizes to be compared; it has hidden size {spec.hidden_size} and "
            f"taps {list(spec.target_layer_ids)}, the target hidden size {facts.hidden_size} and "
            f"{facts.num_hidden_layers} layers"
        )
    keys = list(store)
    if not keys:
        raise ValueError(f"store {folder} must hold rows to be compared; it is empty")
    chosen = [keys[i] for i in np.unique(np.linspace(0, len(keys) - 1, num_rows).astype(int))]
    device = torch.device(config.devices.device)
    ours = _Ours(
        config, spec.target_layer_ids, facts.num_hidden_layers, max(len(store.token_ids(key)) for key in chosen), device
    )
    errors: list[Tensor] = []  # per row (n, taps, candidates)
    cosines: list[Tensor] = []
    for key in chosen:
        tokens = store.token_ids(key)
        stored, candidates = _stored(store, key, device), ours.candidates(torch.from_numpy(tokens.astype(np.int64)))
        count = len(spec.target_layer_ids)
        pairs = [relative_errors(stored, candidate.repeat(1, count), count) for candidate in candidates]
        errors.append(torch.stack([error for error, _ in pairs], 2).cpu())
        cosines.append(torch.stack([cosine for _, cosine in pairs], 2).cpu())
    taps = _tap_reports(torch.cat(errors), torch.cat(cosines), spec.target_layer_ids, ours.names)
    findings = (
        []
        if (spec.weights, spec.config) == target_digests(config.target)
        else [f"the store says that it belongs to another target: {spec.target}"]
    )
    return CompareReport(
        rows=len(chosen),
        tokens=sum(len(store.token_ids(key)) for key in chosen),
        taps=taps,
        findings=findings + _findings(taps, LIMITS[spec.dtype]),
    )


class _Ours:
    """Our target's hidden states at the taps and around them.

    Attributes:
        names: of each candidate, in the order of `candidates`.
    """

    def __init__(
        self, config: Config, taps: Sequence[int], num_layers: int, num_positions: int, device: torch.device
    ) -> None:
        near = {layer for tap in taps for layer in (tap - 1, tap, tap + 1)}
        self.layers = sorted(layer for layer in near if 0 <= layer < num_layers)
        dtype = resolve_dtype(config.target.dtype, device)
        size = read_facts(config.target).hidden_size
        self._output = torch.zeros(num_positions, len(self.layers) * size, dtype=dtype, device=device)
        self._target = Target(
            config.target, target_layer_ids=self.layers, output=self._output, device=device, dtype=dtype
        )
        self.names = [f"the output of layer {layer}" for layer in self.layers]
        self._embeds, self._norms = -1 in near, num_layers - 1 in taps
        if self._embeds:
            self.names.append("the embeddings")
        if self._norms:
            self.names.append("the final norm after the last layer")

    @torch.no_grad()
    def candidates(self, token_ids: Tensor) -> list[Tensor]:  # (n,) -> each (n, D)
        """Of one row."""
        target, n = self._target, len(token_ids)
        padded = torch.zeros(len(self._output), dtype=torch.int64, device=self._output.device)
        padded[:n] = token_ids
        target.forward(padded, 1, n)
        found = list(self._output[:n].chunk(len(self.layers), 1))
        last = found[-1]
        if self._embeds:
            found.append(F.embedding(padded[:n], target.embed_weight))
        if self._norms:
            found.append(last if target.final_norm is None else target.final_norm(last))
        return found


def _stored(store: FeatureStore, key: bytes, device: torch.device) -> Tensor:  # (n, N*D) float32
    spec, n = store.spec, len(store.token_ids(key))
    values = torch.empty(n, spec.feature_size, dtype=TORCH_DTYPES[spec.dtype])
    exponents = torch.empty(n, len(spec.target_layer_ids), dtype=torch.int8) if spec.dtype == "fp8" else None
    store.read(key, values.view(torch.uint8).numpy(), None if exponents is None else exponents.numpy())
    out = torch.empty(n, spec.feature_size)
    decode(values, exponents, out)
    return out.to(device)


def _tap_reports(errors: Tensor, cosines: Tensor, taps: Sequence[int], names: list[str]) -> list[TapReport]:
    found = []
    for i, tap in enumerate(taps):
        own = names.index(f"the output of layer {tap}")
        medians = errors[:, i].median(0).values  # (candidates,)
        best = int(medians.argmin())
        found.append(
            TapReport(
                tap=tap,
                median=float(medians[own]),
                maximum=float(errors[:, i, own].max()),
                cosine=float(cosines[:, i, own].median()),
                lowest_cosine=float(cosines[:, i, own].min()),
                best=names[best],
                best_median=float(medians[best]),
                fits=best == own,
            )
        )
    return found


def _findings(taps: list[TapReport], limit: float) -> list[str]:
    found = []
    for t in taps:
        if not t.fits:
            found.append(
                f"tap {t.tap} is not the output of layer {t.tap}: {t.best} fits better (median error "
                f"{t.best_median:.2e} instead of {t.median:.2e}). The layer ids were counted in another way "
                "when the features were made"
            )
        elif not t.median <= limit:
            found.append(
                f"tap {t.tap} differs from this target's by {t.median:.2e} (median; up to {limit:g} is rounding): "
                "other weights, another quantisation, or another model"
            )
    return found
