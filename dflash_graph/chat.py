"""From parsed rows to tokens and the mask of supervised tokens, with one tokenizer and one chat template.

Owns the tokenisation and the rule from characters to tokens: a token is supervised when it holds a supervised
character. Which characters those are is told by the template's {% generation %} tags where it has them, else by
turn_spans.py; raw text, completions and tokens need no template. Called by shards.py and prompts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.chat_template import ChatTemplate, missing_template
from dflash_graph.chat_template import read_template as read_template
from dflash_graph.row_shapes import Conversation as Conversation
from dflash_graph.row_shapes import PlainText, PromptCompletion, Row, TokenIds
from dflash_graph.row_values import RowError as RowError
from dflash_graph.tag_spans import TagSpans
from dflash_graph.turn_spans import Rendered, TurnSpans


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One tokenised row, not yet truncated."""

    tokens: NDArray[np.int32]  # (length,)
    loss_mask: NDArray[np.uint8]  # (length,) 1 on supervised tokens


class ChatEncoder:
    """Renders, tokenises and masks rows with one tokenizer and one template text.

    Args:
        template: None is fine as long as no conversation comes.

    Attributes:
        has_generation_tags: the mask comes from the template's own tags instead of comparing renderings.
        adds_bos: the tokenizer puts a BOS before plain text, so a row must begin with one.
        rendered_characters: how much text the template has rendered so far.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._template = None if template is None else ChatTemplate(tokenizer, template)
        self.has_generation_tags = self._template is not None and self._template.has_tags
        if self.has_generation_tags and not tokenizer.is_fast:
            raise ValueError(
                f"a template with generation tags needs a tokenizer that reports offsets; {type(tokenizer).__name__} "
                "does not: use the fast tokenizer, or a template without {% generation %}"
            )
        self._spans: TagSpans | TurnSpans | None = None
        if self._template is not None:
            self._spans = TagSpans(self._template) if self.has_generation_tags else TurnSpans(self._template)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        plain, special = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
        self.adds_bos = self.bos_token_id in special[:1] and self.bos_token_id not in plain[:1]

    @property
    def rendered_characters(self) -> int:
        return 0 if self._template is None else self._template.rendered_characters

    @cached_property
    def _vocabulary(self) -> int:
        return int(max([len(self.tokenizer) - 1, *self.tokenizer.added_tokens_decoder])) + 1

    def encode(self, rows: Sequence[Row]) -> list[list[EncodedRow] | RowError]:
        """One result per row, in order: its encoded rows (several where the template rewrites history), or why not.

        Raises:
            ValueError: the template has a syntax error.
        """
        prepared = [self._prepare(row) for row in rows]
        texts = [text for item in prepared if isinstance(item, list) for text in item]
        encoded = iter(self._encode_texts(texts))
        results: list[list[EncodedRow] | RowError] = []
        for row, item in zip(rows, prepared, strict=True):
            if isinstance(item, EncodedRow):
                results.append([item])
                continue
            if isinstance(item, RowError):
                results.append(item)
                continue
            parts = [next(encoded) for _ in item]
            error = next((part for part in parts if isinstance(part, RowError)), None)
            whole = [part for part in parts if isinstance(part, EncodedRow)]
            if not isinstance(row, Conversation):
                for part in whole:
                    part.loss_mask[:1] = 0  # nothing comes before it that it could be predicted from
            results.append(error or whole)
        return results

    def _prepare(self, row: Row) -> list[Rendered] | EncodedRow | RowError:
        try:
            if isinstance(row, Conversation):
                return self._render(row)
            if isinstance(row, TokenIds):
                return self._take_tokens(row)
        except RowError as error:
            return error
        if isinstance(row, PlainText):
            return [Rendered(row.text, [(0, len(row.text))])]
        assert isinstance(row, PromptCompletion)
        text = row.prompt + row.completion
        return [Rendered(text, [(len(row.prompt), len(text))])]

    def _render(self, row: Conversation) -> list[Rendered]:
        if self._spans is None:
            raise RowError("no_chat_template", missing_template(self.tokenizer))
        return self._spans.render(row)

    def _take_tokens(self, row: TokenIds) -> EncodedRow:
        largest = max(row.tokens)
        if largest >= self._vocabulary:
            raise RowError("token_beyond_vocabulary", f"id {largest} does not fit a vocabulary of {self._vocabulary}")
        return EncodedRow(np.asarray(row.tokens, np.int32), np.asarray(row.loss_mask, np.uint8))

    def _encode_texts(self, texts: list[Rendered]) -> list[EncodedRow | RowError]:
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            return [self._encode_without_offsets(item) for item in texts]
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        encodings = backend.encode_batch([item.text for item in texts], add_special_tokens=False)
        return [
            self._finish(encoding.ids, _mask(encoding, item)) for encoding, item in zip(encodings, texts, strict=True)
        ]

    def _encode_without_offsets(self, item: Rendered) -> EncodedRow | RowError:
        """Spans become tokens by counting those before; a span must begin and end between tokens."""

        def ids_of(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

        ids = ids_of(item.text)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in item.spans:
            heads = [ids_of(item.text[:edge]) for edge in (start, end)]
            if any(ids[: len(head)] != head for head in heads):
                return RowError(
                    "turn_inside_token", "a turn begins or ends inside a token, and the tokenizer has no offsets"
                )
            mask[len(heads[0]) : len(heads[1])] = 1
        return self._finish(ids, mask)

    def _finish(self, ids: list[int], mask: NDArray[np.uint8]) -> EncodedRow:
        """Exactly one BOS at the start where the tokenizer or the template wants one."""
        bos = self.bos_token_id
        first = 0
        while bos is not None and ids[first : first + 2] == [bos, bos]:
            first += 1
        tokens, mask = np.asarray(ids[first:], dtype=np.int32), mask[first:]
        if self.adds_bos and (len(tokens) == 0 or tokens[0] != bos):
            tokens, mask = np.insert(tokens, 0, int(bos or 0)), np.insert(mask, 0, 0)
        return EncodedRow(tokens, mask)


def _mask(encoding: Any, item: Rendered) -> NDArray[np.uint8]:
    """1 on each token that holds a character of a span; characters without a token (dropped blanks) have none."""
    count = len(encoding.ids)
    mask = np.zeros(count, np.uint8)
    for start, end in item.spans:
        first = next((t for at in range(start, end) if (t := encoding.char_to_token(at)) is not None), None)
        if first is None:
            continue
        last = next(t for at in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(at)) is not None)
        while last + 1 < count and (chars := encoding.token_to_chars(last + 1)) is not None and chars[0] < end:
            last += 1  # one character may be several tokens
        mask[first : last + 1] = 1
    return mask
