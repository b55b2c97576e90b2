"""Which features a run trains on, decided before any weight is loaded: their dtype and, of a store, whether it fits.

Owns the checks that need the store and the data together: that it is this target's, that no row is missing, that
there is room for those that will be written, and the line that the plan prints. Called by `plan.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_graph.config import Config
from dflash_graph.data import TokenRows
from dflash_graph.store import FeatureStore, free_space, gib, read_spec
from dflash_graph.store_codec import TORCH_DTYPES, StoredDtype
from dflash_graph.store_identity import StoreSpec, target_digests
from dflash_graph.store_shard import row_key


@dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """The features of a run.

    Attributes:
        output_dtype: of a target's output buffer: online features pass through it on their way into a slot.
        spec: of the store, or None online.
        missing_rows, missing_tokens: what the store lacks. num_rows: that the run reads.
        note: a line for the plan, or "".
    """

    output_dtype: torch.dtype
    spec: StoreSpec | None = None
    num_rows: int = 0
    missing_rows: int = 0
    missing_tokens: int = 0
    note: str = ""

    @property
    def missing_bytes(self) -> int:
        """What the store would grow by if it took all of them."""
        return 0 if self.spec is None else self.missing_tokens * self.spec.bytes_per_token

    def identity(self, compute_dtype: torch.dtype) -> dict[str, str]:
        """What a resumed run must share with its checkpoint, where features are not in the compute dtype."""
        stored = self.output_dtype if self.spec is None else TORCH_DTYPES[self.spec.dtype]
        return {} if stored == compute_dtype else {"feature_dtype": str(stored)}


def plan_features(
    config: Config, rows: Sequence[TokenRows], taps: tuple[int, ...], hidden_size: int, compute_dtype: torch.dtype
) -> FeaturePlan:
    """Decide where features come from.

    Args:
        rows: all that the run reads: training rows and held-out rows.

    Raises:
        ValueError: the store is damaged, belongs to something else, or lacks rows.
    """
    features = config.features
    if features.source == "online":
        dtype = compute_dtype if features.dtype == "auto" else TORCH_DTYPES[features.dtype]
        return FeaturePlan(
            output_dtype=dtype, note="" if dtype == compute_dtype else f"\nfeatures  rounded to {features.dtype}"
        )
    folder = Path(features.path or "")
    spec = wanted_spec(config, taps, hidden_size, compute_dtype)
    exists = features.missing == "error" or (folder / "store.json").exists()
    store = FeatureStore.open(folder, spec) if exists else None
    lengths = {row_key(tokens): len(tokens) for tokens in all_rows(rows)}
    missing = [length for key, length in lengths.items() if store is None or key not in store]
    if missing and features.missing == "error":
        raise ValueError(
            f"features.missing=error needs every row of the data in store {folder}; {len(missing)} of {len(lengths)} "
            f"rows are not. Run `dflash-graph store build` with these settings, or set features.missing=generate"
        )
    rest = f"; the others will take {gib(sum(missing) * spec.bytes_per_token)}" if missing else ""
    return FeaturePlan(
        output_dtype=torch.float32 if spec.dtype == "float32" else compute_dtype,
        spec=spec,
        num_rows=len(lengths),
        missing_rows=len(missing),
        missing_tokens=sum(missing),
        note=f"\nfeatures  {len(lengths) - len(missing)} of {len(lengths)} different rows are in store {folder}, "
        f"{spec.dtype}, {spec.bytes_per_token} bytes per token{rest}",
    )


def all_rows(rows: Sequence[TokenRows]) -> Iterator[NDArray[np.int32]]:
    """Token ids of every row."""
    for part in rows:
        for i in range(len(part)):
            yield part.row(i)[0]


def wanted_spec(config: Config, taps: tuple[int, ...], hidden_size: int, compute_dtype: torch.dtype) -> StoreSpec:
    """What the store of a run must be: with features.dtype "auto", in the dtype that it has."""
    folder = Path(config.features.path or "")
    dtype: StoredDtype
    if config.features.dtype != "auto":
        dtype = config.features.dtype
    elif (folder / "store.json").exists():
        dtype = read_spec(folder).dtype
    else:
        dtype = "float32" if compute_dtype == torch.float32 else "bfloat16"
    weights, configuration = target_digests(config.target)
    return StoreSpec(
        weights=weights,
        config=configuration,
        target=config.target.gguf_file or config.target.path,
        target_layer_ids=tuple(taps),
        hidden_size=hidden_size,
        dtype=dtype,
    )


def check_space(folder: Path, plan: FeaturePlan) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        ValueError: with the size that is needed and the space there is.
    """
    assert plan.spec is not None
    free = free_space(folder)
    if plan.missing_bytes > free:
        raise ValueError(
            f"store {folder} must find room for {plan.missing_rows} rows: {plan.missing_tokens} tokens x "
            f"{plan.spec.bytes_per_token} bytes = {gib(plan.missing_bytes)}; the disk has {gib(free)} for it. Free "
            "space, choose another features.path or features.dtype=fp8, or write a part with `store build --partial`"
        )
