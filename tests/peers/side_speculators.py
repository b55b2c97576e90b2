"""speculators, run by the interpreter of its own environment: `python side_speculators.py JOBS.json`.

`hidden` loads a folder and gives the hidden states of the drafted positions of blocks at given anchors from
`_backbone_forward`, with the head and embedding that the package itself fetches from the target; `write` saves a random
drafter. Each job writes one safetensors file. Nothing here imports our package.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


@torch.no_grad()
def hidden(job, target):
    config = DFlashSpeculatorConfig.from_pretrained(job["folder"])
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(job["folder"], config=config, dtype=torch.float32).eval()
    assert isinstance(model, DFlashDraftModel)
    # Its blocks must end inside the sequence: tokens that no context reaches go behind it.
    ids = torch.tensor([job["tokens"] + [0] * model.block_size])
    anchors = torch.tensor(job["anchors"])
    states = target(ids, output_hidden_states=True).hidden_states
    # Their id k names the input of layer k, which is the output of the layer before it.
    features = torch.cat([states[k] for k in model.target_layer_ids], dim=-1)
    core.select_anchors = lambda loss_mask, num_anchors, block_size: (anchors, anchors >= 0)
    found, logits, *_ = model._backbone_forward(
        hidden_states=features,
        input_ids=ids,
        loss_mask=torch.ones(ids.shape),
        verifier_last_hidden_states=states[-1],
        document_ids=torch.zeros_like(ids),
        max_anchors=len(anchors),
    )
    blocks = (len(anchors), model.block_size, -1)
    return {
        "hidden": found.view(blocks)[:, 1:].contiguous(),
        "logits": logits.view(blocks)[:, 1:].contiguous(),
        "features": features[0, : len(job["tokens"])].contiguous(),
        "speculative_tokens": torch.tensor(config.speculators_config.proposal_methods[0].speculative_tokens),
    }


def write(job, target):
    torch.manual_seed(0)
    layers = Qwen3Config(**job["config"])
    layers._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["settings"]["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(job["target"]),
        ),
        **job["settings"],
    )
    model = DFlashDraftModel(config)
    if (ids := job.get("draft_vocab_ids")) is not None:
        kept = torch.zeros(layers.vocab_size, dtype=torch.bool)
        kept[ids] = True
        model.load_vocab_mappings(kept, torch.tensor(ids) - torch.arange(len(ids)))
    model.load_verifier_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
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
        save_file(globals()[job["action"]]({**job, "target": jobs["target"]}, target), job["out"])


if __name__ == "__main__":
    main(sys.argv[1])
