"""Named sets of prompts: conversations up to where the assistant would answer, as token ids and as messages.

Whatever evaluates reads its prompts here, local decoding and served models alike, so that both answer the same
questions. Nothing is skipped in silence: a row that is no prompt is an error that names it. Called by `evaluation.py`,
`held_out.py` and `eval_command.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_graph.chat import ChatEncoder
from dflash_graph.chat_template import ChatTemplate, find_template, missing_template
from dflash_graph.row_shapes import Conversation, PromptCompletion, Row, RowError, TokenIds, parse_line, parse_row
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
        template = find_template(tokenizer, chat_template)
        self.template = None if template is None else ChatTemplate(tokenizer, template)
        encoder = ChatEncoder(tokenizer, template or "")
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
            row = _parse(raw)
            if isinstance(row, TokenIds):
                return prompt_of(row.tokens, row.loss_mask), []
            if not isinstance(row, Conversation):
                return self._tokenise(row.prompt if isinstance(row, PromptCompletion) else row.text), []
            if self.template is None:
                raise ValueError(missing_template(self.tokenizer))
            turns = row.messages[:-1] if row.messages[-1]["role"] == "assistant" else row.messages
            return self._tokenise(self.template.render(turns, row.tools, True)), turns
        except (RowError, ValueError) as error:  # a template's syntax error is a ValueError
            raise ValueError(f"{raw.where} is no prompt: {error}") from None

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
    """A row, which need not have an answer."""
    if isinstance(raw.value, Exception):  # why it could not be read
        raise raw.value
    if isinstance(raw.value, bytes):
        return parse_line(raw.value, raw.where, answered=False)
    return parse_row(raw.value, raw.where, answered=False)
