"""SpecForge's own code writes and checks hidden-state files: `python side_store_specforge.py ROWS OUT LAYERS`.

ROWS is a safetensors file with `tokens.<i>`, `mask.<i>` and `hidden.<i>` (n, layers, D). The names in a file come from
the layout that the package registers for DFlash, the file from its feature store, and its reader and normaliser, which
training uses, must accept it. Nothing here imports our package.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from specforge.algorithms.common.dflash_family_data import build_offline_reader, normalize_offline_sample
from specforge.algorithms.dflash.providers import ALGORITHM_NAME, algorithm_providers
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file

rows, folder = load_file(sys.argv[1]), Path(sys.argv[2])
layout = algorithm_providers().offline_for("text").capture_layout
assert layout.capture_method == "dflash"
store = LocalFeatureStore(dump_dir=str(folder))
count = sum(name.startswith("tokens.") for name in rows)
for i in range(count):
    sources = {"input_ids": rows[f"tokens.{i}"], "loss_mask": rows[f"mask.{i}"]}
    sample = {feature: sources[source] for source, feature in dict(layout.passthrough).items()}
    sample[layout.aux_feature] = rows[f"hidden.{i}"].flatten(1)
    store.put(sample, sample_id=f"data_{i}", metadata={})
refs = list(build_offline_reader(ALGORITHM_NAME, str(folder), run_id="r", ttt_length=1, max_len=4096))
assert len(refs) == count
for ref in refs:
    raw = load_feature_file(ref.feature_store_uri.removeprefix("file://"))
    if int((raw["loss_mask"][1:] * raw["loss_mask"][:-1]).sum()):  # it refuses rows without an anchor
        assert torch.equal(normalize_offline_sample(raw, 4096)["hidden_states"][0], raw["hidden_states"])
