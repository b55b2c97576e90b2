"""Where a rendered text shows what an assistant message says, found by rendering it again with unique marks.

Owns the parts of a message (reasoning, content, called functions) and the marks around them. A mark stands inside the
white space and the reasoning tags around a part, where templates do not look. Nothing is concluded from a rendering
that the marks change in any other way. Called by turn_spans.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dflash_graph.chat_template import ChatTemplate, answer_part
from dflash_graph.row_messages import Message
from dflash_graph.row_values import RowError

_MARKS = (("\ue000", "\ue001"), ("\uf8f0", "\uf8f1"), ("\U000f0000", "\U000f0001"))  # private use
_OPENING = "<think>"
_MISSING = {
    "reasoning": ("reasoning_not_rendered", "the template does not show all reasoning of message {}"),
    "content": ("message_not_rendered", "the template does not show all content of message {}"),
    "call": ("tool_calls_not_rendered", "the template does not show all calls of message {}"),
}


@dataclass(frozen=True)
class Part:
    """text[start:end], the `core`, is something that a message says in one of its fields."""

    kind: Literal["reasoning", "content", "call"]
    field: str
    text: str
    start: int
    end: int

    @property
    def core(self) -> str:
        return self.text[self.start : self.end]

    @property
    def before(self) -> str:
        return self.text[: self.start].lstrip()


Place = tuple[int, int] | None  # [start, end) in a rendered text; None where the template does not show it


def parts_of(message: Message) -> list[Part]:
    """What a message says, in the order in which templates write it. Of other roles than the assistant: the content."""
    content = message["content"]
    if message["role"] != "assistant":
        return [part for part in [Part("content", "content", content, *_strip(content, 0, len(content)))] if part.core]
    reasoning = message.get("reasoning_content", "")
    cut = len(content) - len(answer_part(content))
    parts = [
        Part("reasoning", "reasoning_content", reasoning, *_reasoning(reasoning, len(reasoning))),
        Part("reasoning", "content", content, *_reasoning(content, max(0, cut - len("</think>")))),
        Part("content", "content", content, *_strip(content, cut, len(content))),
        *(Part("call", "tool_calls", name, 0, len(name)) for name in _called(message)),
    ]
    return [part for part in parts if part.core]


def begins_with_call(message: Message) -> bool:
    """A message that only calls functions."""
    return next((part.kind == "call" for part in parts_of(message)), False)


def refuse_missing(part: Part, i: int) -> RowError:
    """The error for a part of message i that the template does not show."""
    reason, text = _MISSING[part.kind]
    return RowError(reason, f"{text.format(i)}: {part.core[:30]!r}")


def find_marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    which: Sequence[int],
    plain: str,
) -> dict[int, list[Place]] | None:
    """Place in `plain` (the messages' rendering) of each part of the messages `which`, in order.

    None if marks change anything but themselves, or parts stand twice or in another order: then the template looks at
    the text, and nothing can be told this way.
    """
    rendered = _render_marked(template, messages, tools, which, plain)
    if rendered is None or any(a >= b for a, b in pairwise(number for number, _ in rendered[0])):
        return None
    places = dict(rendered[0])
    found: dict[int, list[Place]] = {}
    first = 0
    for i, count in zip(which, rendered[1], strict=True):
        edges = [(places.get(k), places.get(k + 1)) for k in range(2 * first, 2 * (first + count), 2)]
        found[i] = [(a, b) if a is not None and b is not None else None for a, b in edges]
        first += count
    return found


def check_shown(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    marked: dict[int, list[Place]] | None = None,
) -> None:
    """Refuse a row of which its rendering `text` leaves something out; see `ChatTemplate.check_rendered`.

    Where the text alone does not tell, marks around what every message says do, if they change nothing else.

    Args:
        marked: `find_marked` of all messages, if it is known.

    Raises:
        RowError: something is not shown.
    """
    if template.check_rendered(text, messages, tools):
        return
    if marked is not None:
        for i, places in marked.items():
            for part, place in zip(parts_of(messages[i]), places, strict=True):
                if place is None and part.kind != "reasoning":
                    raise refuse_missing(part, i)
        return
    rendered = _render_marked(template, messages, tools, range(len(messages)), text)
    if rendered is None:
        return
    shown, first = {number for number, _ in rendered[0]}, 0
    for i, message in enumerate(messages):
        for k, part in enumerate(parts_of(message), first):
            if part.kind != "reasoning" and not {2 * k, 2 * k + 1} <= shown:
                raise refuse_missing(part, i)
        first += rendered[1][i]


def _render_marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    which: Sequence[int],
    plain: str,
) -> tuple[list[tuple[int, int]], list[int]] | None:
    """(number, place in `plain`) of each mark in the order of the text, and how many parts each message has.

    None if the marks change anything but themselves.
    """
    pair = next((pair for pair in _MARKS if not any(mark in plain for mark in pair)), None)
    if pair is None:
        return None
    copies = list(messages)
    counts: list[int] = []
    for i in which:
        copies[i], count = _marked(messages[i], sum(counts), pair)
        counts.append(count)
    try:
        text = template.render(copies, tools, False)
    except RowError:
        return None
    pieces = re.split(f"{pair[0]}(\\d+){pair[1]}", text)
    if "".join(pieces[::2]) != plain:
        return None
    at, places = 0, []
    for number, piece in zip(pieces[1::2], pieces[::2], strict=False):
        at += len(piece)
        places.append((int(number), at))
    return places, counts


def _marked(message: Message, first: int, pair: tuple[str, str]) -> tuple[Message, int]:
    """A copy with marks 2 k and 2 k + 1 around part k, counted from `first`; and how many parts it has."""
    parts = parts_of(message)
    texts: dict[str, str] = {}
    calls = []
    for k, part in reversed(list(enumerate(parts, first))):  # from the end, so that places before stay
        a, b = (f"{pair[0]}{number}{pair[1]}" for number in (2 * k, 2 * k + 1))
        if part.kind == "call":
            calls.append(a + part.core + b)
            continue
        text = texts.get(part.field, part.text)
        texts[part.field] = text[: part.start] + a + part.core + b + text[part.end :]
    copy = {**message, **texts}
    if calls:
        names = reversed(calls)
        copy["tool_calls"] = [
            {**call, "function": {**call["function"], "name": name}}
            for call, name in zip(message["tool_calls"], names, strict=True)
        ]
    return copy, len(parts)


def _called(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) without white space at its ends."""
    start = end - len(text[start:end].lstrip())
    return start, start + len(text[start:end].rstrip())


def _reasoning(text: str, end: int) -> tuple[int, int]:
    """text[:end] without white space around it, and without the opening tag that it may begin with."""
    start, end = _strip(text, 0, end)
    return _strip(text, start + len(_OPENING), end) if text.startswith(_OPENING, start, end) else (start, end)
