"""A tiny target of byte tokens, prompts, and run folders with one checkpoint, for tests of the evaluation."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from dflash_graph.checkpoint import CheckpointWriter
from dflash_graph.config import config_from_dict, save_config
from dflash_graph.decoding import greedy_decode
from dflash_graph.drafter import DrafterSpec
from dflash_graph.initialise import random_parameters
from dflash_graph.prompts import load_prompts

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
K = 4


def save_tokenizer(folder: Path, *, bos: str | None = None) -> Any:
    """Bytes as tokens, with the special tokens of TEMPLATE."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|start|>", "<|end|>", "<|mask|>"] + ([bos] if bos else [])
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(special)
    if bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", bos_token=bos, mask_token="<|mask|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_target(folder: Path, **changes: Any) -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 160,
        "initializer_range": 0.3,
        "eos_token_id": 257,
        **changes,
    }
    config = transformers.LlamaConfig(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}


def frequent_ids(target: Path, prompts: Path, count: int) -> torch.Tensor:
    """The ids the target writes most, so that a random drafter over them is right now and then."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    texts = load_prompts(prompts, transformers.AutoTokenizer.from_pretrained(target))[:7]
    written = [t for text in texts for t in greedy_decode(model, text, max_new_tokens=24, eos_ids={257})]
    return torch.bincount(torch.tensor(written)).topk(count).indices.sort().values


def make_prompts(folder: Path) -> Path:
    """Seven prompts and one that leaves no room for an answer."""
    rows = [chat(f"prompt {'x' * (3 * i)}", "dropped", system=None if i % 2 else "be brief") for i in range(6)]
    rows += [chat("one question only"), chat("y" * 150)]
    return write_jsonl(folder / "prompts.jsonl", rows)


def make_run(folder: Path, prompts: Path, **changes: Any) -> Path:
    """A run folder with one checkpoint of a random drafter, with a reduced head unless `changes` say otherwise."""
    save_target(folder / "target")
    train = write_jsonl(folder / "train.jsonl", [chat(f"question {i}", f"answer {i} of many") for i in range(8)])
    config = config_from_dict(
        {
            "run_dir": str(folder / "run"),
            "target": {"path": str(folder / "target")},
            "data": {"train": [str(train)], "max_length": 128, "cache_dir": str(folder / "cache")},
        }
    )
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": 260,
        "block_size": K,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 258,
        "layer_types": ("full_attention",),
        "sliding_window": None,
        "causal": False,
        "draft_vocab_size": 4,
        "max_trained_length": 128,
        "target_path": str(folder / "target"),
        "gguf_file": None,
        **changes,
    }
    values["layer_types"] = changes.get("layer_types", ("full_attention",) * values["num_hidden_layers"])
    spec = DrafterSpec(**values)
    (folder / "run").mkdir()
    save_config(config, folder / "run" / "config.yaml")
    # Matrices large enough that the features decide the drafts; what bf16 can hold, as in an export.
    drafter = {
        name: (20 * w if w.dim() > 1 else w).bfloat16().float() for name, w in random_parameters(spec, 0).items()
    }
    if spec.draft_vocab_size is not None:
        drafter["draft_vocab_ids"] = frequent_ids(folder / "target", prompts, spec.draft_vocab_size)
    writer = CheckpointWriter(folder / "run", 1)
    writer.save(5, drafter, {}, {"drafter": spec.to_dict()})
    writer.close()
    return folder / "run"
