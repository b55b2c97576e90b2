"""Models, data and settings of the graph acceptance: made on the spot, random weights, no network.

Called by the parts of `graph_acceptance.py`; a `Task` is what each of them is given.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from dflash_graph.config import Config
from dflash_graph.graphs import Mode
from tests.tiny import SIZES, WORDS, make_tiny, tiny_config

# Large enough for the shapes that kernels prefer, small enough that a step is launches and little else.
SMALL: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1024}
TINY: dict[str, Any] = {**SIZES, "head_dim": 16}
# Qwen3-0.6B with a smaller vocabulary.
TIMED: dict[str, Any] = {
    **SIZES, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a part is to do, and where.

    Attributes:
        folder: empty but for what parts share. mode: of the replayed side.
        quick: the smallest sizes, few repeats. steps: of the replay; None is the part's own number.
        seconds: time after which the times begin no further budget.
        save: keeps a part's result so far, in case it is ended from outside.
    """

    folder: Path
    device: str
    mode: Mode
    quick: bool = False
    steps: int | None = None
    seconds: float = 1e9
    save: Callable[[dict[str, Any]], None] = field(default=lambda result: None)

    def model(self) -> Path:
        """Folder of a small Qwen3 with its tokenizer and conversations."""
        folder = self.folder / "small"
        if not folder.exists():
            folder.mkdir(parents=True)
            make_tiny(folder, Qwen3Config(**(SMALL if self.device == "cuda" and not self.quick else TINY)))
        return folder

    def timed_model(self) -> Path:
        """Folder of the model whose steps are timed, with rows of up to 1,024 tokens."""
        if self.quick:
            return self.model()
        folder = self.folder / "timed"
        folder.mkdir(parents=True)
        make_tiny(folder, Qwen3Config(**TIMED))
        rng = random.Random(0)

        def turn(role: str, words: int) -> dict[str, str]:
            return {"role": role, "content": " ".join(rng.choice(WORDS) for _ in range(words))}

        rows = [{"messages": [turn("user", 100), turn("assistant", rng.randint(500, 900))]} for _ in range(64)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    def config(self, model: Path, name: str, *settings: str) -> Config:
        """Of a run in the folder `name`; settings are overrides."""
        common = (
            f"devices.device={self.device}", "log.validate_every=1000000", "log.every=100",
            "schedule.wait_timeout_s=300",  # workers wait while others compile kernels
        )  # fmt: skip
        return tiny_config(model, self.folder / name, *common, *settings)
