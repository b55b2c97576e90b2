"""From one JSONL line to the tokens of a conversation and the mask of its assistant tokens.

Owns what may count as a conversation (everything else is a `RowError` with a named reason), how the target's chat
template is rendered, and which tokens are supervised. The mask comes from the template's `{% generation %}` tags where
it has them, else from the renderings of the conversation's prefixes. It must never guess: a template whose prefixes
do not render alike is refused. Called by data.py.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

Message = dict[str, str]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_LEADING_ROLES = ("system", "developer")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
_TOOL_ROLES = frozenset(("tool", "function", "ipython", "tool_response", "tool_call", "function_call", "observation"))
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class RowError(Exception):
    """A row that cannot be used. `reason` is one short name, counted in the report; the message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages in order (an optional leading system message, then user and assistant in turn) and where they stood."""

    messages: list[Message]
    where: str


def parse_line(line: bytes, where: str) -> Conversation:
    """Read one JSONL line: `messages` of role/content, or ShareGPT's `conversations` of from/value.

    Raises:
        RowError: the line is no such conversation.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", str(error)) from None
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"found {type(row).__name__}")
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is None:
        raise RowError("no_messages", f"keys {list(row)[:8]}")
    if not isinstance(turns, list):
        raise RowError("messages_not_a_list", f"found {type(turns).__name__}")
    if not turns:
        raise RowError("empty_conversation")
    if row.get("tools") not in (None, [], "", "[]"):
        raise RowError("tool_calls", "the row declares tools")
    messages = [_parse_message(turn) for turn in turns]
    _check_order([message["role"] for message in messages])
    return Conversation(messages, where)


def _parse_message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("message_not_an_object", f"found {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    content = turn["content"] if "content" in turn else turn.get("value")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    is_tool = isinstance(name, str) and name.strip().lower() in _TOOL_ROLES
    if is_tool or turn.get("tool_calls") or turn.get("function_call"):
        raise RowError("tool_calls", f"role {name!r}")
    if role is None:
        raise RowError("unknown_role", f"role {name!r}")
    if content is None:
        raise RowError("null_content", f"role {name!r}")
    if not isinstance(content, str):
        raise RowError("content_not_text", f"content of role {name!r} is {type(content).__name__}")
    message = {"role": role, "content": content}
    message |= {key: turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)}
    for value in message.values():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("invalid_unicode", str(error)) from None
    return message


def _check_order(roles: list[str]) -> None:
    turns = roles[1:] if roles[0] in _LEADING_ROLES else roles
    if not turns:
        raise RowError("system_only")
    if turns != [("user", "assistant")[i % 2] for i in range(len(turns))]:
        raise RowError("roles_out_of_order", ", ".join(roles[:8]))
    if len(turns) < 2:
        raise RowError("no_assistant_turn")


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One tokenised conversation, not yet truncated."""

    tokens: NDArray[np.int32]  # (length,)
    loss_mask: NDArray[np.uint8]  # (length,) 1 on supervised tokens


def read_template(tokenizer: Any, path: str | Path | None) -> str:
    """The Jinja text: the file at `path`, or the tokenizer's own template when `path` is None.

    Raises:
        ValueError: the file does not exist, or the tokenizer has no template.
    """
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"data.chat_template must name an existing Jinja file; found {str(path)!r}")
        return Path(path).read_text(encoding="utf-8-sig")
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no chat template: set data.chat_template to a Jinja file"
        ) from None


class ChatEncoder:
    """Renders, tokenises and masks conversations with one tokenizer and one template text.

    Attributes:
        has_generation_tags: the mask comes from the template's own tags instead of prefix renderings.
        adds_bos: the tokenizer puts a BOS before plain text, so a row must begin with one.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.has_generation_tags = _GENERATION_TAG.search(template) is not None
        if self.has_generation_tags and not tokenizer.is_fast:
            raise ValueError(
                f"a template with generation tags needs a tokenizer that reports offsets; {type(tokenizer).__name__} "
                "does not: use the fast tokenizer, or a template without {% generation %}"
            )
        self._has_generation_prompt = "add_generation_prompt" in template
        self.bos_token_id: int | None = tokenizer.bos_token_id
        plain, special = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
        self.adds_bos = self.bos_token_id in special[:1] and self.bos_token_id not in plain[:1]
        added = tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        # Longest first, so that no name hides a longer one that ends like it.
        self._special_tokens = sorted(filter(str.strip, names), key=lambda name: (-len(name), name))

    def encode(self, conversations: Sequence[Conversation]) -> list[EncodedRow | RowError]:
        """One result per conversation, in order.

        Raises:
            ValueError: the template has a syntax error, or its prefix renderings are not stable.
        """
        if self.has_generation_tags:
            return self._encode_by_tags(conversations)
        results: list[EncodedRow | RowError] = []
        rendered: list[tuple[str, list[tuple[int, int]]] | RowError] = []
        for conversation in conversations:
            try:
                rendered.append(self._render_with_spans(conversation))
            except RowError as error:
                rendered.append(error)
        encoded = self._tokenise([item[0] for item in rendered if not isinstance(item, RowError)])
        for item in rendered:
            if isinstance(item, RowError):
                results.append(item)
                continue
            ids, offsets = next(encoded)
            try:
                results.append(self._finish(ids, self._mask_of_spans(ids, offsets, *item)))
            except RowError as error:
                results.append(error)
        return results

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error
        except Exception as error:  # a template may raise anything on a row it does not like
            raise RowError("template_error", f"{type(error).__name__}: {error}") from error

    def _render_with_spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The whole text and the [start, end) characters of each assistant turn, end-of-turn token included."""
        messages = conversation.messages
        text = self._render(messages, False)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:i], True)
            through = text if i == len(messages) - 1 else self._render(messages[: i + 1], False)
            start, end = self._find_turn(through[len(prompt) :], message["content"].strip())
            if not text.startswith(prompt):
                self._refuse(conversation, i, "generation prompt", prompt, text)
            turn = through[: len(prompt) + end]
            if not text.startswith(turn):
                self._refuse(conversation, i, "rendered turn", turn, text)
            spans.append((len(prompt) + start, len(turn)))
        return text, spans

    def _find_turn(self, turn: str, content: str) -> tuple[int, int]:
        """[start, end) of what the target itself writes in `turn`, the text that follows the generation prompt.

        It ends with the first special token behind the content: template text after that (a newline, a second end
        token) is never generated. A turn without an end token ends at its last character that is not white space.
        A template that knows no generation prompt leaves the assistant's header in `turn`; it is left out.
        """
        found = turn.find(content)
        floor = found + len(content) if found >= 0 else 0
        end = stop = max(len(turn.rstrip()), floor)
        while name := next((name for name in self._special_tokens if turn.endswith(name, floor, stop)), None):
            end = stop
            stop = floor + len(turn[floor : stop - len(name)].rstrip())
        if self._has_generation_prompt:
            return 0, end
        if not turn.endswith(content, 0, stop):
            raise RowError("turn_not_found", f"the template neither has a generation prompt nor shows {content[:40]!r}")
        return stop - len(content), end

    def _refuse(self, conversation: Conversation, turn: int, what: str, expected: str, text: str) -> None:
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), min(map(len, (expected, text)))
        )
        raise ValueError(
            f"the chat template is not prefix-stable, so that its assistant tokens cannot be derived: at "
            f"{conversation.where}, message {turn}, the {what} reads {expected[at : at + 40]!r} where the whole "
            f"conversation reads {text[at : at + 40]!r} (character {at}). The template rewrites earlier turns or adds "
            "text that answers lack. Set data.chat_template to a copy of the template with {% generation %} ... "
            "{% endgeneration %} around what the assistant writes, or to one that renders every turn the same way "
            "wherever it stands"
        )

    def _tokenise(self, texts: list[str]) -> Iterator[tuple[list[int], NDArray[np.int64] | None]]:
        """Token ids of each text without added special tokens, with (length, 2) character offsets if known."""
        if not texts:
            return
        batch = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        for i, ids in enumerate(batch["input_ids"]):
            offsets = (
                np.asarray(batch.encodings[i].offsets, np.int64).reshape(-1, 2) if self.tokenizer.is_fast else None
            )
            yield list(ids), offsets

    def _mask_of_spans(
        self, ids: list[int], offsets: NDArray[np.int64] | None, text: str, spans: list[tuple[int, int]]
    ) -> NDArray[np.uint8]:
        """1 on each token that overlaps a span (the rule transformers applies to generation tags)."""
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in spans:
            if offsets is not None:
                mask[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = 1
            else:
                mask[self._token_count(text[:start], ids) : self._token_count(text[:end], ids)] = 1
        return mask

    def _token_count(self, prefix: str, ids: list[int]) -> int:
        """Tokens of `prefix`, for a tokenizer without offsets; they must be the first tokens of the row."""
        head = next(self._tokenise([prefix]))[0] if prefix else []
        if ids[: len(head)] != head:
            raise RowError(
                "turn_inside_token", "a turn begins or ends inside a token, and the tokenizer has no offsets"
            )
        return len(head)

    def _encode_by_tags(self, conversations: Sequence[Conversation]) -> list[EncodedRow | RowError]:
        try:
            batch = self._apply_tags([conversation.messages for conversation in conversations])
            return [self._finish(ids, mask) for ids, mask in batch]
        except RowError as error:
            if len(conversations) == 1:
                return [error]
            return [result for item in conversations for result in self._encode_by_tags([item])]

    def _apply_tags(self, batch: list[list[Message]]) -> list[tuple[list[int], NDArray[np.uint8]]]:
        try:
            encoded = self.tokenizer.apply_chat_template(
                batch,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error
        except Exception as error:  # a template may raise anything on a row it does not like
            raise RowError("template_error", f"{type(error).__name__}: {error}") from error
        masks = encoded["assistant_masks"]
        return [(ids, np.asarray(mask, np.uint8)) for ids, mask in zip(encoded["input_ids"], masks, strict=True)]

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
