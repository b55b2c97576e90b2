"""Named sets of prompts: conversations up to where the assistant would answer, as token ids and as messages.

Whatever evaluates reads its prompts here, local decoding and served models alike, so that both answer the same
questions. Nothing is skipped in silence: a row that is no prompt is an error that names it. Called by `evaluation.py`,
`held_out.py` and `eval_command.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_graph.chat import ChatEncoder, read_template
from dflash_graph.row_adapter import Row, RowError, parse_line, parse_row
from dflash_graph.sources import RawRow, open_source


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts of one source.

    Attributes:
        prompts: token ids, generation prompt included.
        messages: the same as messages for a chat server; an empty list where a prompt is no conversation.
    """

    name: str
    path: str
    prompts: list[list[int]]
    messages: list[list[dict[str, Any]]]


def load_prompt_sets(
    specs: Sequence[str | Path], tokenizer: Any, chat_template: str | None = None, *, limit: int | None = None
) -> list[PromptSet]:
    """Read the prompts of each set: what `prepare` reads (JSONL, JSON, Parquet, Arrow, a `datasets` folder, a hub id).

    A trailing assistant turn is dropped.

    Args:
        specs: "name=source", or "source", whose stem is the name then.
        chat_template: a Jinja file; None is the tokenizer's own template.
        limit: take the first so many rows of each set.

    Raises:
        ValueError: a spec, a source or a row of it cannot be used, or two sets have the same name.
    """
    if not specs:
        raise ValueError("at least one set of prompts must be named; found none")
    named = [_name_and_source(str(spec)) for spec in specs]
    names = [name for name, _ in named]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"sets of prompts must have names of their own (name=path); found {', '.join(repeated)} more than once"
        )
    reader = _Reader(tokenizer, chat_template)
    return [reader.read(name, source, limit) for name, source in named]


def load_prompts(path: str | Path, tokenizer: Any, chat_template: str | None = None) -> list[list[int]]:
    """Token ids of one source's prompts; see `load_prompt_sets`."""
    return load_prompt_sets([path], tokenizer, chat_template)[0].prompts


def _name_and_source(spec: str) -> tuple[str, str]:
    name, separator, source = spec.partition("=")
    if not separator or Path(spec).exists():
        return Path(spec).stem, spec
    if not name or not source:
        raise ValueError(f"a set of prompts must look like name=path; found {spec!r}")
    return name, source


class _Reader:
    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        has_none = chat_template is None and not getattr(tokenizer, "chat_template", None)
        self.template = None if has_none else read_template(tokenizer, chat_template)
        encoder = ChatEncoder(tokenizer, self.template or "")
        self.bos_token_id = encoder.bos_token_id if encoder.adds_bos else None

    def read(self, name: str, source: str, limit: int | None) -> PromptSet:
        prompts, messages = [], []
        try:
            rows = islice(open_source(source), limit)
            for raw in rows:
                ids, turns = self._prompt(raw)
                if not ids:
                    raise ValueError(f"{raw.where}: a prompt must have at least one token; this one has none")
                prompts.append(ids)
                messages.append(turns)
        except ValueError as error:
            raise ValueError(f"prompts of set {name} cannot be used: {error}") from None
        if not prompts:
            raise ValueError(f"prompts of set {name} must be at least one; {source} holds none")
        return PromptSet(name=name, path=source, prompts=prompts, messages=messages)

    def _prompt(self, raw: RawRow) -> tuple[list[int], list[dict[str, Any]]]:
        """Token ids and, of a conversation, the messages, up to where the last answer would begin."""
        try:
            row: Any = _parse(raw)
        except RowError as error:
            raise ValueError(f"{raw.where} is no conversation: {error}") from None
        if hasattr(row, "messages"):
            turns = [dict(message) for message in row.messages]
            turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
            return self._tokenise(self._render(turns, getattr(row, "tools", None), raw.where)), turns
        if hasattr(row, "tokens"):
            return prompt_of(row.tokens, row.loss_mask), []
        return self._tokenise(row.prompt if hasattr(row, "prompt") else row.text), []

    def _render(self, turns: list[dict[str, Any]], tools: list[Any] | None, where: str) -> str:
        """The conversation and the generation prompt."""
        if self.template is None:
            raise ValueError(f"{where} is a conversation, and the tokenizer has no chat template: name one")
        declared = {} if tools is None else {"tools": tools}
        try:
            text = self.tokenizer.apply_chat_template(
                turns, chat_template=self.template, tokenize=False, add_generation_prompt=True, **declared
            )
        except Exception as error:  # a template may raise anything on a conversation it does not like
            raise ValueError(f"{where}: the chat template cannot render it: {error}") from error
        return str(text)

    def _tokenise(self, text: str) -> list[int]:
        """Token ids, with exactly one BOS where the tokenizer adds one."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids


def prompt_of(tokens: Sequence[int], loss_mask: Sequence[int]) -> list[int]:
    """A row's tokens up to its last supervised stretch, which is its last answer; all where there is none.

    At least one token, even of a row that is supervised throughout.
    """
    if not any(loss_mask):
        return [int(token) for token in tokens]
    start = len(tokens)
    while start and not loss_mask[start - 1]:
        start -= 1
    while start and loss_mask[start - 1]:
        start -= 1
    return [int(token) for token in tokens[: max(1, start)]]


def _parse(raw: RawRow) -> Row:
    if isinstance(raw.value, RowError):
        raise raw.value
    value = raw.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return parse_line(value, raw.where)  # says what is wrong
    return parse_row(_with_answer(value), raw.where)


def _with_answer(row: Any) -> Any:
    """The row with a placeholder answer where it has none: rows to train on need one."""
    for key in ("messages", "conversations"):
        turns = row.get(key) if isinstance(row, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            last = turns[-1]
            if last.get("role", last.get("from")) in ("user", "human"):
                return {**row, key: [*turns, {"role": "assistant", "content": "-"}]}
    if isinstance(row, dict) and "prompt" in row and row.get("completion") is None:
        prompt = row["prompt"]
        answer = "-" if isinstance(prompt, str) else [{"role": "assistant", "content": "-"}]
        return {**row, "completion": answer}
    return row
