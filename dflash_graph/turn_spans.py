"""Which characters of a rendered conversation the target itself writes, for templates without generation tags.

An assistant turn begins where the generation prompt after the messages before it ends, and ends with the first special
token behind what it says; reasoning that the template itself writes empty is not the target's. That is exact where the
text up to a turn is the same whatever follows, so every claim is checked by comparing renderings, never assumed:

- `_exact` renders the messages before and through one turn. Turns whose text later messages change (templates that
  drop earlier reasoning) get a row of their own, rendered as if they were the last.
- For many turns that would be quadratic. `_linear` renders the whole twice, plain and with unique marks around what
  the assistant says, takes the turns' places from the marks, and checks one turn of each kind, the last one and turns
  at a quarter, a sixteenth, ... of the conversation by `_exact`. Whenever anything disagrees, all turns are rendered.

Called by chat.py.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash_graph.chat_template import ChatTemplate, answer_part
from dflash_graph.row_messages import Message
from dflash_graph.row_shapes import Conversation
from dflash_graph.row_values import RowError
from dflash_graph.turn_marks import Place, begins_with_call, check_shown, find_marked, parts_of, refuse_missing

_FEW_TURNS = 2  # up to here rendering each turn costs no more than marks do
# Reasoning without content at the start of a turn; the opening may stand in the generation prompt.
_EMPTY_REASONING = re.compile(r"\s*(?:[<\[◁](\w+)[>\]▷]\s*)?[<\[◁]/(\w+)[>\]▷]\s*")


@dataclass(frozen=True)
class Rendered:
    """A text, and the [start, end) characters of it that are supervised, in order."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Turn:
    """One assistant turn within the rendering that ends with it.

    Attributes:
        text: of all messages through the turn.
        prompt: characters up to the end of the generation prompt.
        start, end: what is supervised.
        body: first and last character of what the message says.
    """

    text: str
    prompt: int
    start: int
    end: int
    body: tuple[int, int]


class TurnSpans:
    """Finds the supervised characters of conversations under one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._probe: tuple[str, str] | None = None

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The conversation's rows, in order of their turns: one, or more where the template rewrites earlier turns.

        Raises:
            ValueError: the template has a syntax error.
            RowError: the template refuses the row or leaves something out, or its turns cannot be found.
        """
        return _Finder(self, conversation).rows()

    def probe(self) -> tuple[str, str]:
        """Of a plain turn: what stands between the prompt and the content, and the special token that ends it ("")."""
        if self._probe is None:
            self._probe = ("", "")
            probe = Conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "probe")
            with contextlib.suppress(RowError):  # a template that refuses it
                turn = _Finder(self, probe).exact(1)
                ending = turn.text[turn.body[1] : turn.end]
                token = next((name for name in self.template.special_tokens if ending.endswith(name)), "")
                self._probe = (turn.text[turn.prompt : turn.body[0]], token)
        return self._probe


class _Finder:
    """The work on one conversation."""

    def __init__(self, spans: TurnSpans, conversation: Conversation) -> None:
        self.spans, self.template = spans, spans.template
        self.messages, self.tools = conversation.messages, conversation.tools
        self.where = conversation.where
        self.turns = [
            i
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant" and i not in conversation.unsupervised
        ]
        self._exact: dict[int, _Turn] = {}
        self._is_shown = False
        self._marked: dict[int, list[Place]] | None = None  # every part in the whole text
        self._whole: str | None = None

    def rows(self) -> list[Rendered]:
        if not self.turns:
            return []
        if len(self.turns) > _FEW_TURNS and (spans := self._linear()) is not None:
            check_shown(self.template, self.whole(), self.messages, self.tools, self._marked)
            return [Rendered(self.whole(), spans)]
        rows: list[Rendered] = []
        text, spans, last = self.whole(), [], len(self.messages)
        for i in reversed(self.turns):
            turn = self.exact(i)
            if not text.startswith(turn.text[: turn.end]):
                if spans:
                    rows.append(self._checked(text, spans[::-1], last))
                text, spans, last = turn.text, [], i + 1
            spans.append((turn.start, turn.end))
        rows.append(self._checked(text, spans[::-1], last))
        return rows[::-1]

    def _checked(self, text: str, spans: list[tuple[int, int]], last: int) -> Rendered:
        if self._is_shown:  # as in the longest row: what a template leaves out, it leaves out there
            self.template.check_rendered(text, self.messages[:last], self.tools)
        else:
            check_shown(
                self.template, text, self.messages[:last], self.tools, self._marked if text == self._whole else None
            )
        self._is_shown = True
        return Rendered(text, spans)

    def whole(self) -> str:
        """The text of all messages."""
        if self._whole is None:
            self._whole = self.template.render(self.messages, self.tools, False)
        return self._whole

    # ---- one turn, exactly ----

    def exact(self, i: int) -> _Turn:
        """Turn i as it is when it is the last."""
        if i not in self._exact:
            prompt = self.template.render(self.messages[:i], self.tools, True)
            last = i == len(self.messages) - 1
            text = self.whole() if last else self.template.render(self.messages[: i + 1], self.tools, False)
            if not text.startswith(prompt):
                raise RowError("unstable_template", self._difference(i, prompt, text))
            first, stop = self._find_body(i, text, len(prompt))
            start = self._start(i, text, len(prompt), first)
            self._exact[i] = _Turn(text, len(prompt), start, self._end(i, text, stop), (first, stop))
        return self._exact[i]

    def _difference(self, i: int, prompt: str, text: str) -> str:
        at = _agreement(prompt, text)
        return (
            f"the template is not prefix-stable: before message {i} the prompt reads {prompt[at : at + 30]!r} where "
            f"the answered conversation reads {text[at : at + 30]!r}; data.chat_template may name a copy with "
            "{% generation %} tags"
        )

    def _find_body(self, i: int, text: str, prompt: int) -> tuple[int, int]:
        """First and last character in `text` of what message i says."""
        parts = parts_of(self.messages[i])
        if not parts:
            return prompt, prompt
        if len(parts) == 1 and parts[0].kind == "content" and text.count(parts[0].core, prompt) == 1:
            at = text.index(parts[0].core, prompt)
            return at, at + len(parts[0].core)
        marked = self._mark(self.messages[: i + 1], [i], text)
        if marked is not None:
            return self._body(i, marked[i])
        at, places = prompt, []
        for part in parts:
            at = text.find(part.core, at)
            if at < 0:
                raise refuse_missing(part, i)
            places += [at, at := at + len(part.core)]
        if any(name in part.core for name in self.template.special_tokens for part in parts):
            raise RowError("turn_not_found", f"the template changes message {i}, which holds special tokens")
        return places[0], places[-1]

    def _mark(self, messages: list[Message], which: Sequence[int], plain: str) -> dict[int, list[Place]] | None:
        return find_marked(self.template, messages, self.tools, which, plain)

    def _body(self, i: int, places: list[Place]) -> tuple[int, int]:
        """From the first part's start to the last one's end."""
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            raise refuse_missing(parts_of(self.messages[i])[places.index(None)], i)
        return found[0][0], found[-1][1]

    def _start(self, i: int, text: str, prompt: int, body: int) -> int:
        """Where turn i begins, given the end of its generation prompt and the start of what it says."""
        message = self.messages[i]
        if not self.template.has_generation_prompt:
            parts = parts_of(message)
            if not parts or parts[0].kind == "call":
                header = self.spans.probe()[0]
                return prompt + len(header) if text.startswith(header, prompt) else prompt
            lead = parts[0].before
            return body - len(lead) if text.endswith(lead, 0, body) else body
        start = without_empty_reasoning(message, text, (prompt, body))[0]
        # White space behind an empty block may be the answer's own: the template's ends where a plain answer begins.
        header = self.spans.probe()[0]
        return min(start, prompt + len(header)) if text.startswith(header, prompt) else start

    def _end(self, i: int, text: str, floor: int) -> int:
        """Where turn i, the last in `text`, ends: behind the first of the special tokens that follow what it says.

        Template text after that (a newline, a second end token) is never generated. A turn without an end token ends at
        its last character that is not white space.
        """
        stop = max(len(text.rstrip()), floor)
        run: list[tuple[str, int]] = []  # special tokens at the end of the text and where each ends, the last one first
        while name := next((name for name in self.template.special_tokens if text.endswith(name, floor, stop)), None):
            run.append((name, stop))
            stop = floor + len(text[floor : stop - len(name)].rstrip())
        if not run:
            return stop
        # Tokens that close a call, or stand around an answer that is blank, are the target's too.
        message = self.messages[i]
        if len(run) > 1 and ("tool_calls" in message or not answer_part(message["content"]).strip()):
            return next((end for name, end in reversed(run) if name == self.spans.probe()[1]), run[-1][1])
        return run[-1][1]

    # ---- all turns at once ----

    def _linear(self) -> list[tuple[int, int]] | None:
        """Spans of all turns in the whole text, or None where that cannot be vouched for."""
        text = self.whole()
        behind_calls = {i + 1 for i in self.turns if "tool_calls" in self.messages[i]} & set(range(len(self.messages)))
        found = self._marked = self._mark(self.messages, range(len(self.messages)), text)
        if found is None:  # what is not the assistant's may stand in another order
            answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
            found = self._mark(self.messages, sorted({*answers, *behind_calls}), text)
        # Reasoning that is gone from any turn, supervised or not, was there when the turns behind it were written.
        if found is None or not all(found[i] for i in self.turns) or any(None in places for places in found.values()):
            return None
        marked = {i: self._body(i, places) for i, places in found.items() if places and None not in places}
        header = self._header()
        if header is None:
            return None
        has_prompt = self.template.has_generation_prompt
        # The checked turns: what each kind of turn looks like before and behind what it says.
        known: dict[Any, tuple[str, str]] = {}
        checked: dict[int, tuple[int, int]] = {}
        for i in self._sample():
            turn = self.exact(i)
            if not text.startswith(turn.text[: turn.end]) or turn.body != marked[i]:
                return None
            checked[i] = (turn.start, turn.end)
            gap = text[turn.prompt if has_prompt else turn.start : turn.body[0]].strip()
            known.setdefault(self._kind(i), (gap, text[turn.body[1] : turn.end]))
        spans, floor = [], 0
        places = [*sorted((at, i) for i, (at, _) in marked.items()), (len(text), -1)]
        following = {i: after for (_, i), (after, _) in pairwise(places)}
        for i in self.turns:
            body, stop = marked[i]
            gap, tail = known[self._kind(i)]
            if has_prompt:
                at = text.rfind(header, floor, body)
                prompt = at + len(header)
                if at < 0 or text[prompt:body].strip() != gap:
                    return None
                start = self._start(i, text, prompt, body)
            elif begins_with_call(self.messages[i]):
                start = body - len(gap)
                if not text.startswith(gap, start):
                    return None
            else:
                start = self._start(i, text, body, body)
            end = self._tail_end(i, text, stop, following[i], tail)
            if end is None or checked.get(i, (start, end)) != (start, end):
                return None
            spans.append((start, end))
            floor = end
        return spans

    def _tail_end(self, i: int, text: str, stop: int, following: int, tail: str) -> int | None:
        if "tool_calls" not in self.messages[i]:
            return stop + len(tail) if text.startswith(tail, stop) else None
        # The mark is behind the last call's name: its arguments follow, then the end token, once.
        name = next((name for name in self.template.special_tokens if tail.endswith(name)), None)
        if name is None or text.count(name, stop, following) != 1:
            return None
        return text.index(name, stop, following) + len(name)

    def _header(self) -> str | None:
        """How the generation prompt ends, and nothing else does; None if that cannot be told."""
        if not self.template.has_generation_prompt:
            return ""
        before = self.messages[: self.turns[0]]
        try:
            plain, prompt = (self.template.render(before, self.tools, flag) for flag in (False, True))
        except RowError:  # a template may refuse a conversation that nobody is to answer
            return None
        return prompt[_agreement(plain, prompt) :] or None

    def _kind(self, i: int) -> tuple[Any, ...]:
        message = self.messages[i]
        after = self.messages[i + 1]["role"] if i + 1 < len(self.messages) else ""
        said = (
            bool(message.get("reasoning_content")),
            "</think>" in message["content"],
            bool(message["content"].strip()),
        )
        return (*said, "tool_calls" in message, self.messages[i - 1]["role"], after)

    def _sample(self) -> list[int]:
        """The turns to check: the first of each kind, the last, and some between whose texts add up to little."""
        firsts: dict[Any, int] = {}
        for i in self.turns:
            firsts.setdefault(self._kind(i), i)
        places = [len(self.turns) - 1, *sample_places(len(self.turns))]
        return sorted({*firsts.values(), *(self.turns[place] for place in places)})


def _agreement(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def sample_places(count: int) -> list[int]:
    """Places among `count` turns to check: the first, and a quarter, a sixteenth, ... of the way; not the last."""
    places, at = {0}, count // 4
    while at > 0:
        places.add(at)
        at //= 4
    return sorted(places - {count - 1})


def without_empty_reasoning(message: Message, text: str, span: tuple[int, int]) -> tuple[int, int]:
    """A turn's span without the empty reasoning block that the template wrote at its start, if there is one.

    A block that the message itself holds is what the target said, and stays.
    """
    start, end = span
    block = _EMPTY_REASONING.match(text, start, end)
    own = _EMPTY_REASONING.match(message["content"])
    if block is None or message.get("reasoning_content", "").strip() or (own is not None and own[2] == block[2]):
        return span
    opened = block[1] or re.search(r"[<\[◁](\w+)[>\]▷]\s*\Z", text[max(0, start - 80) : start])
    if opened == block[2] or (isinstance(opened, re.Match) and opened[1] == block[2]):
        return block.end(), end
    return span
