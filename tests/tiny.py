"""A tiny target, tokenizer and conversations on disk, and the configuration of a run over them (seconds on a CPU)."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from dflash_graph.config import Config, load_config

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<mask>"]
WORDS = [f"w{i}" for i in range(80)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_tiny(folder: Path, config: PretrainedConfig | None = None) -> None:
    """Write `model/`, `train.jsonl` (60 rows) and `heldout.jsonl` (8 rows) into `folder`.

    Args:
        config: of a target of `SIZES`; None is a Llama.
    """
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES))
    # Greedy text holds words only: no special token, none of the rows beyond the tokenizer.
    model.lm_head.weight.data[: len(SPECIAL)] = 0
    model.lm_head.weight.data[len(vocabulary) :] = 0
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)

    def turn(role: str, words: int) -> dict[str, str]:
        start = rng.randrange(len(WORDS))
        return {"role": role, "content": " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(words))}

    rows = [
        json.dumps({"messages": [turn("user", rng.randint(3, 10)), turn("assistant", rng.randint(5, 90))]})
        for _ in range(68)
    ]
    (folder / "train.jsonl").write_text("\n".join(rows[:60]) + "\n")
    (folder / "heldout.jsonl").write_text("\n".join(rows[60:]) + "\n")


def tiny_settings(folder: Path, run: Path | str) -> list[str]:
    """Overrides for `load_config` or the command line."""
    return [
        f"run_dir={run}",
        f"target.path={folder / 'model'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        f"data.validation=[{folder / 'heldout.jsonl'}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.max_length=128",
        "schedule.token_budget=256",
        "schedule.jobs_per_step=2",
        "schedule.min_ready=4",
        "schedule.slots=8",
        "schedule.num_buckets=4",
        "schedule.wait_timeout_s=60",
        "drafter.num_hidden_layers=2",
        "drafter.block_size=4",
        "drafter.target_layer_ids=[1, 3]",
        "drafter.anchor_rate=0.5",
        "optim.lr=3e-3",
        "optim.lr_schedule=constant",
        "optim.warmup_ratio=0",
        "devices.target_threads=1",
        "devices.drafter_threads=1",
        "checkpoint.every=3",
        "log.every=4",
        "log.tensorboard=false",
        "log.progress=false",
        "epochs=2",
    ]


def tiny_config(folder: Path, run: Path | str, *overrides: str) -> Config:
    return load_config(None, [*tiny_settings(folder, run), *overrides])


def weights(run: Path) -> dict[str, Any]:
    """Every tensor of a run's newest checkpoint, as bytes."""
    from dflash_graph.checkpoint import find_latest, load_checkpoint

    newest = find_latest(run)
    assert newest is not None, f"{run} holds no whole checkpoint"
    checkpoint = load_checkpoint(newest)
    return {name: t.numpy().tobytes() for name, t in (checkpoint.drafter | checkpoint.optimizer).items()}
