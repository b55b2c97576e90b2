"""z-lab's dflash, run by the interpreter of its own environment: `python side_dflash.py JOBS.json`.

`hidden` loads a folder and gives the final hidden states of the drafted positions of blocks at given anchors, over the
hidden states of the real target. `generate` decodes prompts with `dflash_generate`. `write` saves a random drafter.
Each job writes one safetensors file. Nothing here imports our package.
"""

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as zlab
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


def load(folder, through="class"):
    if through == "auto":  # by the settings' own auto_map, as a user of transformers does
        return AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    return zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def hidden(job, target):
    model = load(job["folder"], job.get("through", "class"))
    ids = torch.tensor([job["tokens"]])
    states = target(ids, output_hidden_states=True).hidden_states
    features = zlab.extract_context_feature(states, model.target_layer_ids)
    found = []
    for anchor in job["anchors"]:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = ids[0, anchor]
        out = model(
            target_hidden=features[:, :anchor],
            noise_embedding=target.get_input_embeddings()(block),
            position_ids=torch.arange(anchor + model.block_size)[None],
            past_key_values=DynamicCache(),
            use_cache=True,
        )
        found.append(out[0, 1:])
    return {"hidden": torch.stack(found), "features": features[0].contiguous()}


def generate(job, target):
    zlab._cuda_time = time.perf_counter  # it reads a CUDA clock
    model, found = load(job["folder"]), {}
    for i, prompt in enumerate(job["prompts"]):
        out = zlab.dflash_generate(
            model, target, torch.tensor([prompt]), job["max_new_tokens"], job["stop_ids"], return_stats=True
        )
        found[f"tokens.{i}"] = out.output_ids[0, len(prompt) :].contiguous()
        found[f"accepts.{i}"] = torch.tensor(out.acceptance_lengths)
    return found


def write(job, target):
    torch.manual_seed(0)
    model = zlab.DFlashDraftModel(Qwen3Config(**job["config"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.2))
            if parameter.ndim == 1:
                parameter.add_(1)
    model.save_pretrained(job["folder"])
    return {}


def main(path):
    jobs = json.loads(Path(path).read_text())
    target = AutoModelForCausalLM.from_pretrained(
        jobs["target"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    for job in jobs["jobs"]:
        save_file(globals()[job["action"]](job, target), job["out"])


if __name__ == "__main__":
    main(sys.argv[1])
