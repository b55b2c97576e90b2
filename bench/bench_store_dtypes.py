"""What eight- and sixteen-bit features cost in acceptance: one run per stored dtype, same rows, same order.

    python -m bench.bench_store_dtypes --config FILE --folder DIR [--prompts FILE --limit 60] [--output FILE]
        [key=value ...]

Builds a float32 store, encodes it anew for each dtype, and trains from each with the settings of FILE. Columns:
relative error of a token's features (median, largest); teacher-forced accept_length on the held-out rows with the
features that it was trained on; the same drafter on float32 features; and with --prompts by speculative decoding, where
the features are the target's own. The last row is the drafter trained on float32 features, fed eight-bit ones. Gate:
every dtype trains the same number of steps. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_graph import evaluate, load_config, train
from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.config import Config
from dflash_graph.plan import make_plan
from dflash_graph.store import FeatureStore
from dflash_graph.store_build import build_store
from dflash_graph.store_codec import StoredDtype, decode, encode, relative_errors
from dflash_graph.store_identity import StoreSpec
from dflash_graph.store_shard import StoredRow
from dflash_graph.store_writer import StoreWriter
from dflash_graph.training import Run

DTYPES: tuple[StoredDtype, ...] = ("float32", "bfloat16", "fp8")


def encode_anew(store: FeatureStore, folder: Path, dtype: StoredDtype) -> torch.Tensor:
    """Write the rows of a float32 store in another dtype; return the relative errors per token and tap."""
    spec = store.spec
    taps = len(spec.target_layer_ids)
    values = {name: getattr(spec, name) for name in ("weights", "config", "target", "target_layer_ids", "hidden_size")}
    other = FeatureStore.open(folder, StoreSpec(**values, dtype=dtype), create=True)
    writer, errors = StoreWriter(other, origin={"source": "float32"}), []
    for key in store:
        tokens = store.token_ids(key)
        exact, out = torch.empty(len(tokens), spec.feature_size), torch.empty(len(tokens), spec.feature_size)
        store.read(key, exact.view(torch.uint8).numpy(), None)
        short, exponents = encode(exact, taps, dtype)
        decode(short, exponents, out)
        errors.append(relative_errors(out, exact, taps)[0])
        exponent_bytes = None if exponents is None else exponents.numpy()
        writer.add(StoredRow(key, np.array(tokens), short.clone().view(torch.uint8).numpy(), exponent_bytes))
    writer.flush()
    return torch.cat(errors)


def teacher_forced(config: Config, run_dir: Path) -> float:
    """accept_length on the held-out rows of the newest drafter of `run_dir`, with the features of `config`."""
    newest = find_latest(run_dir)
    assert newest is not None
    Path(config.run_dir).mkdir(exist_ok=True)
    run = Run(make_plan(config), {}, load_checkpoint(newest))
    trainer = run.trainer
    trainer._validated_step = -1
    trainer.run = trainer._validate  # type: ignore[method-assign]
    result = run.run()
    assert result.accept_length is not None
    return result.accept_length


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a new or empty folder, for stores and runs")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)

    def config(dtype: StoredDtype, run: str) -> Config:
        stored = ["features.source=store", f"features.path={args.folder / dtype}", f"features.dtype={dtype}"]
        return load_config(args.config, [*args.overrides, *stored, f"run_dir={args.folder / run}"])

    print(build_store(config("float32", "build")), flush=True)
    exact = FeatureStore(args.folder / "float32")
    rows: list[dict[str, Any]] = []
    steps = set()
    for dtype in DTYPES:
        errors = encode_anew(exact, args.folder / dtype, dtype) if dtype != "float32" else torch.zeros(1)
        settings, run = config(dtype, f"run-{dtype}"), args.folder / f"run-{dtype}"
        result = train(settings, resume="auto")
        steps.add(result.step)
        row = {
            "trained on": dtype,
            "bytes per token": FeatureStore(args.folder / dtype).spec.bytes_per_token,
            "median error": float(errors.median()),
            "largest error": float(errors.max()),
            "own features": teacher_forced(config(dtype, f"own-{dtype}"), run),
            "float32 features": teacher_forced(config("float32", f"exact-{dtype}"), run),
        }
        if args.prompts is not None:
            found = evaluate(run, args.prompts, limit=args.limit, max_new_tokens=args.max_new_tokens, control_prompts=0)
            row["decoding"] = found.drafter.accept_length
        rows.append(row)
    crossed = teacher_forced(config("fp8", "crossed"), args.folder / "run-float32")
    if len(steps) != 1:
        raise RuntimeError(f"every dtype must train the same number of steps; found {sorted(steps)}")
    names = list(rows[0])
    print("  ".join(f"{name:>16}" for name in names))
    for row in rows:
        print("  ".join(f"{v:>16.4g}" if isinstance(v, float) else f"{v:>16}" for v in row.values()))
    print(f"the drafter trained on float32 features, on fp8 features: {crossed:.4g}")
    line = {
        "bench": "store_dtypes",
        "machine": {"cpus": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__},
        "config": str(args.config),
        "overrides": args.overrides,
        "steps": steps.pop(),
        "rows": rows,
        "float32 drafter on fp8 features": crossed,
    }
    text = json.dumps(line)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
