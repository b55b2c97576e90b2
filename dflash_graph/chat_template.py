"""One chat template: rendering messages of the common form, and refusing what the template leaves out.

Owns the call into the target's Jinja text (through the tokenizer, so that it sees what serving sees) and the rule that
nothing of a row may vanish in it: a message, a tool or an answer that the text does not show is a `RowError`. Called by
turn_spans.py and chat.py.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from dflash_graph.row_messages import Message
from dflash_graph.row_values import RowError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TELLING = 24  # characters of a text that hardly stands in another one by chance
_REASONING_NAMES = ("thinking", "reasoning")  # other names under which templates read `reasoning_content`


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
        raise ValueError(missing_template(tokenizer)) from None


def find_template(tokenizer: Any, path: str | Path | None) -> str | None:
    """`read_template`, or None where neither is there: raw text, completions and tokens need no template."""
    if path is None and not getattr(tokenizer, "chat_template", None):
        return None
    return read_template(tokenizer, path)


def missing_template(tokenizer: Any) -> str:
    """What to say of a conversation without a template."""
    return f"the tokenizer ({type(tokenizer).__name__}) has no chat template: set data.chat_template to a Jinja file"


def answer_part(content: str) -> str:
    """Content without the reasoning that it begins with."""
    return content.rpartition("</think>")[2]


class ChatTemplate:
    """Renders with one tokenizer and one template text.

    Attributes:
        has_tags: the template marks what the assistant writes by {% generation %}.
        has_generation_prompt: the template can begin the assistant's turn.
        special_tokens: names of the tokenizer's special tokens, longest first, so that none hides one that it ends.
        rendered_characters: how much text was rendered so far.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.has_tags = _GENERATION_TAG.search(text) is not None
        self.has_generation_prompt = "add_generation_prompt" in text
        self.rendered_characters = 0
        added = tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self.special_tokens = sorted(filter(str.strip, names), key=lambda name: (-len(name), name))
        # A template that knows `system` and not `developer` would leave the message out, or refuse it.
        self._developer_is_system = "developer" not in text and "system" in text
        self._reasoning_names = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", text)]

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        """The text of the messages, with the header of the assistant's next turn if `generation_prompt`.

        Raises:
            ValueError: the template has a syntax error.
            RowError: the template refuses the messages.
        """
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    self._adapt(messages),
                    tools=tools,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )
        except Exception as error:  # a template may raise anything on a row it does not like
            raise _template_error(error) from error
        self.rendered_characters += len(text)
        return text

    def render_tags(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [start, end) of each stretch inside generation tags.

        Raises:
            ValueError, RowError: as `render`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), (spans,) = render_jinja_template(
                conversations=[self._adapt(messages)],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _template_error(error) from error
        self.rendered_characters += len(text)
        return str(text), [(int(start), int(end)) for start, end in spans]

    def check_rendered(self, text: str, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> bool:
        """Refuse a row of which `text` leaves something out (an earlier answer's reasoning may go: templates drop it).

        Returns:
            Whether that is certain: a short text, or one that does not stand in its turn, may be another's.

        Raises:
            RowError: a message's content, the name of a called tool or of a declared one is not in the text.
        """
        for tool in tools or ():
            if tool["function"]["name"] not in text:
                raise RowError(
                    "tools_not_rendered", f"the template does not show the tool {tool['function']['name']!r}"
                )
        at, certain = 0, True
        for i, message in enumerate(messages):
            content = answer_part(message["content"]) if message["role"] == "assistant" else message["content"]
            core = content.strip()
            shown = _find(text, core, at)
            if shown < 0:
                raise RowError(
                    "message_not_rendered", f"the template does not show message {i} (role {message['role']})"
                )
            certain = certain and (not core or (len(core) >= _TELLING and shown >= at + len(core)))
            at = shown
            for call in message.get("tool_calls", ()):
                function = call["function"]
                if function["name"] not in text or any(_find(text, s, 0) < 0 for s in _texts(function["arguments"])):
                    raise RowError("tool_calls_not_rendered", f"the template does not show the calls of message {i}")
        return certain

    def _adapt(self, messages: Sequence[Message]) -> list[Message]:
        adapted = []
        for message in messages:
            if self._developer_is_system and message["role"] == "developer":
                message = {**message, "role": "system"}
            if self._reasoning_names and "reasoning_content" in message:
                message = {**dict.fromkeys(self._reasoning_names, message["reasoning_content"]), **message}
            if message.get("tool_calls") and self._wants_text_arguments:
                message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
            adapted.append(message)
        return adapted

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template writes arguments down as they are, so that it must get them as JSON text.

        Given an object, such a template would write it in Python's form, or fail.
        """
        arguments = {"key": "it's"}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        parameters = {"type": "object", "properties": {}}
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]

        def rendered(called: dict[str, Any]) -> str | None:
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
            with contextlib.suppress(Exception):  # a template may raise anything
                return str(
                    self.tokenizer.apply_chat_template(messages, tools=tools, chat_template=self.text, tokenize=False)
                )
            return None

        text = rendered(call)
        return str(arguments) in text if text is not None else rendered(_with_text(call)) is not None


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _texts(value: Any) -> Iterator[str]:
    """All texts inside a JSON value that are not blank."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _find(text: str, core: str, at: int) -> int:
    """Where `core` ends, at or behind `at` if it is there, as it is or escaped as in JSON. -1: nowhere in the text."""
    for start in (at, 0):
        for form in (core, json.dumps(core, ensure_ascii=False)[1:-1], json.dumps(core)[1:-1]):
            if (found := text.find(form, start)) >= 0:
                return found + len(form)
    return -1


def _template_error(error: Exception) -> Exception:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return ValueError(f"the chat template has a syntax error in line {error.lineno}: {error}")
    return RowError("template_error", f"{type(error).__name__}: {error}")
