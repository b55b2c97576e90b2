"""hs-connectors' and speculators' own code writes and checks hidden-state files: `python ... ROWS OUT plain|fp8`.

ROWS is a safetensors file with `tokens.<i>` and `hidden.<i>` (n, layers, D). vLLM itself does not run here: of it the
connector needs a base class, whose file writing (`example_hidden_states_connector.py`, `_write_tensors`: safetensors'
save_file of `hidden_states` and `token_ids`) stands below for the plain files. Nothing here imports our package.
"""

import sys
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file, save_file

for name in (
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer",
    "vllm.distributed.kv_transfer.kv_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector",
):
    module = sys.modules[name] = ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


class Base:
    @staticmethod
    def _write_tensors(tensors, event, filename, lock_fd):
        event.synchronize()
        save_file(tensors, filename)


module.ExampleHiddenStatesConnector = Base


class Event:
    def synchronize(self):
        pass


from hs_connectors import FileTransfer, FP8Transfer  # noqa: E402
from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector  # noqa: E402
from speculators.data_generation.offline import check_hidden_states, get_existing_hidden_state_indices  # noqa: E402

rows, folder, kind = load_file(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
folder.mkdir()
writer = FP8HiddenStatesConnector if kind == "fp8" else Base
count = sum(name.startswith("tokens.") for name in rows)
for i in range(count):
    tensors = {"hidden_states": rows[f"hidden.{i}"], "token_ids": rows[f"tokens.{i}"]}
    writer._write_tensors(tensors, Event(), str(folder / f"hs_{i}.safetensors"), None)
assert get_existing_hidden_state_indices(folder) == list(range(count))
transfer = (FP8Transfer if kind == "fp8" else FileTransfer)(folder)
read = {}
for i in range(count):
    data = transfer.get_cached(i)
    check_hidden_states(data, rows[f"tokens.{i}"].tolist())
    read[f"hidden.{i}"] = data["hidden_states"].contiguous()
save_file(read, sys.argv[4])  # as their trainer reads them
