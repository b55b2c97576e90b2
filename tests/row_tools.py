"""Tokenizer, templates and fixtures for tests of rows: what each shape becomes, token by token."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_graph.chat import ChatEncoder, EncodedRow
from dflash_graph.row_shapes import parse_row
from dflash_graph.row_values import RowError

FOLDER = Path(__file__).parent / "fixtures" / "rows"
TEMPLATES = {path.stem: path.read_text() for path in sorted((FOLDER / "templates").glob("*.jinja"))}
SPECIAL = [
    *(
        "<unk>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>"),
    *("<|channel|>", "<|return|>", "<|call|>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def byte_tokenizer() -> Any:
    """A token per byte, and the special tokens of all templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend)


def word_tokenizer(words: set[str]) -> Any:
    """A token per word, per run of white space and per other character; all others are `<unk>`."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *sorted(words - {"<unk>"})])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s+|[^\w\s]"), "isolated")
    return _finish(backend)


def _finish(backend: Any) -> Any:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, template: str | None, row: Any) -> list[EncodedRow] | RowError:
    """What becomes of one record; `template` is a name in TEMPLATES."""
    text = TEMPLATES[template] if template is not None else None
    try:
        return ChatEncoder(tokenizer, text).encode([parse_row(row, "x:1")])[0]
    except RowError as error:
        return error


def pairs(tokenizer: Any, row: EncodedRow) -> list[list[Any]]:
    """[token text, supervised] of each token."""
    names = tokenizer.convert_ids_to_tokens(row.tokens.tolist())
    return [[name, mask] for name, mask in zip(names, row.loss_mask.tolist(), strict=True)]


def marked_text(expected: list[list[Any]]) -> str:
    """Token texts with ⟦supervised⟧ stretches."""
    text, on = "", 0
    for name, mask in expected:
        text += ("⟦" if mask and not on else "⟧" if on and not mask else "") + name
        on = mask
    return text + ("⟧" if on else "")


def load_fixtures() -> dict[str, Any]:
    """Name -> {"template", "row", "expected" (list of rows of [token, supervised]) or "refused" (a reason)}."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
