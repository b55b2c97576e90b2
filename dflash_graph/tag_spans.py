"""Which characters are supervised under a template that marks them itself, by {% generation %} tags.

The tags say where the assistant writes; what they cannot say is whether a turn reads the same once others follow it.
So the first turn and turns at a quarter, a sixteenth, ... of the conversation are rendered as the last ones too, and
everything that a turn says must be shown. Where a template rewrites earlier turns, each gets a row of its own. A
template with another number of tagged stretches than turns is taken at its word. Called by chat.py.
"""

import contextlib
import json
from functools import cached_property

from dflash_graph.chat_template import ChatTemplate
from dflash_graph.row_messages import Message
from dflash_graph.row_shapes import Conversation
from dflash_graph.row_values import RowError
from dflash_graph.turn_marks import Part, check_shown, parts_of, refuse_missing
from dflash_graph.turn_spans import Rendered, sample_places, without_empty_reasoning

_Tagged = tuple[str, list[tuple[int, int]]]


class TagSpans:
    """Finds the supervised characters of conversations under one template with tags."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The conversation's rows, in order of their turns: one, or more where the template rewrites earlier turns.

        Raises:
            ValueError: the template has a syntax error.
            RowError: the template refuses the row or leaves something out.
        """
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.render_tags(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            if conversation.unsupervised:
                raise RowError(
                    "tags_without_turns", f"{len(spans)} tagged stretches for {len(turns)} turns with weights"
                )
            check_shown(self.template, text, messages, tools)
            return [Rendered(text, spans)]
        wanted = [k for k, i in enumerate(turns) if i not in conversation.unsupervised]
        if not wanted:
            return []
        missing = [_missing(conversation, i, k, (text, spans)) for k, i in enumerate(turns)]
        places = sample_places(len(wanted))
        if turns[wanted[-1]] != len(messages) - 1:
            places.append(len(wanted) - 1)
        checked = (self._last(conversation, turns[wanted[place]], wanted[place]) for place in places)
        if not any(missing) and all(_fits((text, spans), tagged) for tagged in checked):
            return [self._row(conversation, (text, spans), wanted, len(messages))]
        rows: list[Rendered] = []
        current, group, last = (text, spans), list[int](), len(messages)
        for k in reversed(wanted):
            tagged = self._last(conversation, turns[k], k)
            if part := _missing(conversation, turns[k], k, tagged):
                raise refuse_missing(part, turns[k])
            if not _fits(current, tagged):
                if group:
                    rows.append(self._row(conversation, current, group[::-1], last))
                current, group, last = tagged, [], turns[k] + 1
            group.append(k)
        rows.append(self._row(conversation, current, group[::-1], last))
        return rows[::-1]

    def _last(self, conversation: Conversation, i: int, k: int) -> _Tagged:
        """The rendering that ends with message i, the k-th turn."""
        text, spans = self.template.render_tags(conversation.messages[: i + 1], conversation.tools)
        if len(spans) != k + 1:
            raise RowError("tags_without_turns", f"{len(spans)} tagged stretches for {k + 1} turns")
        return text, spans

    def _row(self, conversation: Conversation, tagged: _Tagged, wanted: list[int], last: int) -> Rendered:
        text, spans = tagged
        check_shown(self.template, text, conversation.messages[:last], conversation.tools)
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        return Rendered(text, [self._span(answers[k], text, spans[k]) for k in wanted])

    def _span(self, message: Message, text: str, span: tuple[int, int]) -> tuple[int, int]:
        start, end = without_empty_reasoning(message, text, span)
        # White space behind an empty block may be the answer's own: the template's ends where a plain answer begins.
        header = self._header
        return (min(start, span[0] + len(header)), end) if text.startswith(header, span[0]) else (start, end)

    @cached_property
    def _header(self) -> str:
        """What the tags of a plain turn enclose before its content."""
        probe: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        with contextlib.suppress(RowError):  # a template that refuses it
            text, spans = self.template.render_tags(probe, None)
            if len(spans) == 1:
                return text[spans[0][0] : max(spans[0][0], text.find("y", *spans[0]))]
        return ""


def _fits(whole: _Tagged, tagged: _Tagged) -> bool:
    """Whether a rendering that ends with a turn stands in the whole one, with the same last stretch."""
    (text, spans), (start, end) = whole, tagged[1][-1]
    return text.startswith(tagged[0][:end]) and spans[len(tagged[1]) - 1] == (start, end)


def _missing(conversation: Conversation, i: int, k: int, tagged: _Tagged) -> Part | None:
    """The first part of message i, the k-th turn, that its stretch of the text does not show."""
    text, spans = tagged
    shown = text[spans[k - 1][1] if k else 0 : spans[k][1]]
    forms = [
        (part, (part.core, json.dumps(part.core, ensure_ascii=False)[1:-1]))
        for part in parts_of(conversation.messages[i])
    ]
    return next((part for part, texts in forms if not any(form in shown for form in texts)), None)
