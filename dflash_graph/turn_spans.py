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

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash_graph.chat_template import ChatTemplate, answer_part
from dflash_graph.row_messages import Message
from dflash_graph.row_shapes import Conversation
from dflash_graph.row_values import RowError

_FEW_TURNS = 2  # up to here rendering each turn costs no more than marks do
_MARKS = (("\ue000", "\ue001"), ("\uf8f0", "\uf8f1"), ("\U000f0000", "\U000f0001"))  # private use
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
        self._end_token: str | None = None
        self._end_token_known = False

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The conversation's rows, in order of their turns: one, or more where the template rewrites earlier turns.

        Raises:
            ValueError: the template has a syntax error.
            RowError: the template refuses the row or leaves something out, or its turns cannot be found.
        """
        return _Finder(self, conversation).rows()

    def end_token(self) -> str | None:
        """The special token that ends a plain turn, found by rendering one."""
        if not self._end_token_known:
            self._end_token_known = True
            probe = Conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "probe")
            try:
                turn = _Finder(self, probe).exact(1)
            except RowError:
                return None
            ending = turn.text[turn.body[1] : turn.end]
            self._end_token = next((name for name in self.template.special_tokens if ending.endswith(name)), None)
        return self._end_token


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
        self._whole: str | None = None

    def rows(self) -> list[Rendered]:
        if not self.turns:
            return []
        if len(self.turns) > _FEW_TURNS and (spans := self._linear()) is not None:
            self.template.check_rendered(self.whole(), self.messages, self.tools)
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
        self.template.check_rendered(text, self.messages[:last], self.tools)
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
        at = next((k for k, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
        return (
            f"the template is not prefix-stable: before message {i} the prompt reads {prompt[at : at + 30]!r} where "
            f"the answered conversation reads {text[at : at + 30]!r}; data.chat_template may name a copy with "
            "{% generation %} tags"
        )

    def _find_body(self, i: int, text: str, prompt: int) -> tuple[int, int]:
        """First and last character in `text` of what message i says."""
        message = self.messages[i]
        parts = _parts(message)
        cores = [message_text[a:b] for message_text, a, b in parts]
        if not cores:
            return prompt, prompt
        if len(cores) == 1 and "tool_calls" not in message and text.count(cores[0], prompt) == 1:
            at = text.index(cores[0], prompt)
            return at, at + len(cores[0])
        marked = self._mark(self.messages[: i + 1], [i], text)
        if marked is not None and (found := marked.get(i)) is not None and found[0] >= prompt:
            return found
        at, places = prompt, []
        for core in cores:
            at = text.find(core, at)
            if at < 0:
                raise RowError(*_missing(message, core))
            places += [at, at := at + len(core)]
        if any(name in core for name in self.template.special_tokens for core in cores):
            raise RowError("turn_not_found", f"the template changes message {i}, which holds special tokens")
        return places[0], places[-1]

    def _start(self, i: int, text: str, prompt: int, body: int) -> int:
        """Where turn i begins, given the end of its generation prompt and the start of what it says."""
        message = self.messages[i]
        if not self.template.has_generation_prompt:
            said = message.get("reasoning_content", "") or message["content"]
            lead = said.lstrip()[: _core(said)[0] - (len(said) - len(said.lstrip()))]
            return body - len(lead) if text.endswith(lead, 0, body) else body
        if message.get("reasoning_content", "").strip() or "</think>" in message["content"]:
            return prompt
        empty = _EMPTY_REASONING.match(text, prompt, body)
        if empty and (empty[1] == empty[2] or (empty[1] is None and text[:prompt].rstrip().endswith(empty[2] + ">"))):
            return empty.end()
        return prompt

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
        # Tokens that close a call are the target's too.
        if "tool_calls" in self.messages[i] and len(run) > 1:
            return next((end for name, end in reversed(run) if name == self.spans.end_token()), run[-1][1])
        return run[-1][1]

    # ---- all turns at once ----

    def _linear(self) -> list[tuple[int, int]] | None:
        """Spans of all turns in the whole text, or None where that cannot be vouched for."""
        text = self.whole()
        marked = self._mark(self.messages, [i for i, _ in enumerate(self.messages)], text)
        if marked is None or any(i not in marked for i in self.turns):
            return None
        header = self._header()
        if header is None:
            return None
        # The checked turns: what each kind of turn looks like before and behind what it says.
        known: dict[Any, tuple[str, str]] = {}
        checked: dict[int, tuple[int, int]] = {}
        for i in self._sample():
            turn = self.exact(i)
            if not text.startswith(turn.text[: turn.end]) or turn.body != marked[i]:
                return None
            checked[i] = (turn.start, turn.end)
            gap = text[turn.prompt : turn.body[0]].strip()
            known.setdefault(self._kind(i), (gap, text[turn.body[1] : turn.end]))
        spans, floor = [], 0
        places = [*sorted((at, i) for i, (at, _) in marked.items()), (len(text), -1)]
        following = {i: after for (_, i), (after, _) in pairwise(places)}
        for i in self.turns:
            body, stop = marked[i]
            gap, tail = known[self._kind(i)]
            prompt = body
            if self.template.has_generation_prompt:
                at = text.rfind(header, floor, body)
                prompt = at + len(header)
                if at < 0 or text[prompt:body].strip() != gap:
                    return None
            start = self._start(i, text, prompt, body)
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
        """What the generation prompt adds, or None if that cannot be told."""
        if not self.template.has_generation_prompt:
            return ""
        before = self.messages[: self.turns[0]]
        plain, prompt = (self.template.render(before, self.tools, flag) for flag in (False, True))
        return prompt[len(plain) :] or None if prompt.startswith(plain) else None

    def _kind(self, i: int) -> tuple[Any, ...]:
        message = self.messages[i]
        after = self.messages[i + 1]["role"] if i + 1 < len(self.messages) else ""
        said = (bool(message.get("reasoning_content")), "</think>" in message["content"], bool(message["content"].strip()))
        return (*said, "tool_calls" in message, self.messages[i - 1]["role"], after)

    def _sample(self) -> list[int]:
        """The turns to check: the first of each kind, the last, and some between whose texts add up to little."""
        firsts: dict[Any, int] = {}
        for i in self.turns:
            firsts.setdefault(self._kind(i), i)
        places, at = [len(self.turns) - 1], len(self.turns) // 4
        while at > 0:
            places.append(at)
            at //= 4
        return sorted({*firsts.values(), *(self.turns[place] for place in places)})

    # ---- marks ----

    def _mark(self, messages: list[Message], which: list[int], plain: str) -> dict[int, tuple[int, int]] | None:
        """[start, end) in `plain` of what the messages `which` say, by rendering them with marks.

        None if the marks change anything but themselves: then the template looks at the text, and so do we.
        """
        pair = next((pair for pair in _MARKS if not any(mark in plain for mark in pair)), None)
        if pair is None:
            return None
        count = 0
        owners: list[int] = []

        def mark(text: str, start: int, end: int) -> str:
            nonlocal count
            count += 2
            return "".join(
                (text[:start], f"{pair[0]}{count - 2}{pair[1]}", text[start:end], f"{pair[0]}{count - 1}{pair[1]}", text[end:])
            )

        copies = list(messages)
        for i in which:
            before = count
            copies[i] = _marked(messages[i], mark)
            owners += [i] * (count - before)
        try:
            text = self.template.render(copies, self.tools, False)
        except RowError:
            return None
        pieces = re.split(f"{pair[0]}(\\d+){pair[1]}", text)
        if "".join(pieces[::2]) != plain or [int(number) for number in pieces[1::2]] != list(range(count)):
            return None
        found: dict[int, tuple[int, int]] = {}
        for i, at in zip(owners, _starts(pieces[::2]), strict=True):
            found[i] = (found.get(i, (at, at))[0], at)
        return found


def _starts(pieces: list[str]) -> Iterator[int]:
    at = 0
    for piece in pieces[:-1]:
        at += len(piece)
        yield at


def _core(text: str) -> tuple[int, int]:
    """[start, end) of a text without white space around it, and without the reasoning tag that it may begin with."""
    start = len(text) - len(text.lstrip())
    if text.startswith("<think>", start):
        start += len("<think>")
        start += len(text[start:]) - len(text[start:].lstrip())
    return start, max(start, len(text.rstrip()))


def _parts(message: Message) -> list[tuple[str, int, int]]:
    """(text, start, end) of everything that an assistant message says, in the order in which templates write it."""
    parts = [(message.get("reasoning_content", ""), *_core(message.get("reasoning_content", "")))]
    content = message["content"]
    parts += [(content, start, end) for start, end in _content_cores(content)]
    parts += [
        (call["function"]["name"], 0, len(call["function"]["name"])) for call in message.get("tool_calls", ())
    ]
    return [part for part in parts if part[1] < part[2]]


def _content_cores(content: str) -> list[tuple[int, int]]:
    """Reasoning inside the content, and what follows it: templates take them apart."""
    answer = answer_part(content)
    cut = len(content) - len(answer)
    if cut == 0:
        start = len(content) - len(content.lstrip())
        return [(start, max(start, len(content.rstrip())))]
    first = _core(content[: cut - len("</think>")])
    start = cut + len(answer) - len(answer.lstrip())
    return [first, (start, max(start, len(content.rstrip())))]


def _marked(message: Message, mark: Any) -> Message:
    """A copy with marks around its parts; of a message that is not the assistant's, around its content."""
    copy = dict(message)
    assistant = message["role"] == "assistant"
    reasoning = message.get("reasoning_content", "")
    if assistant and reasoning.strip():
        copy["reasoning_content"] = mark(reasoning, *_core(reasoning))
    content, offset = message["content"], 0
    cores = _content_cores(content) if assistant else [(len(content) - len(content.lstrip()), len(content.rstrip()))]
    for start, end in cores:
        if start < end:
            longer = mark(content, start + offset, end + offset)
            offset += len(longer) - len(content)
            content = longer
    copy["content"] = content
    if assistant and "tool_calls" in message:
        copy["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark(name, 0, len(name))}}
            for call in message["tool_calls"]
            for name in [call["function"]["name"]]
        ]
    return copy


def _missing(message: Message, core: str) -> tuple[str, str]:
    if core in message.get("reasoning_content", "") or core not in answer_part(message["content"]):
        if any(core == call["function"]["name"] for call in message.get("tool_calls", ())):
            return "tool_calls_not_rendered", f"the template does not show the call of {core!r}"
        return "reasoning_not_rendered", "the template does not show the reasoning of an answer that ends its text"
    return "message_not_rendered", f"the template does not show the answer {core[:40]!r}"
