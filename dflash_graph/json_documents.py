"""Reads a JSON document of rows piece by piece: one array, an object that holds a list, or rows one after the other.

Owns nothing but the cutting: `iterate_rows` yields decoded values of a text stream and holds one value at a time of an
array, so that a file of any size can be read. A document that is no JSON raises; it cannot be cut behind its damage.
Called by spill.py.
"""

import json
from collections.abc import Callable, Iterator
from typing import TextIO

_CHUNK = 1 << 20  # characters
_MAX_VALUE = 1 << 28  # characters of one value, beyond which a document counts as damaged
_SPACE = " \t\n\r\ufeff"


class _Reader:
    """Decodes values one after the other from a growing window of the text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    @property
    def position(self) -> int:
        """Characters of the document that were read."""
        return self._before + self._at

    def _grow(self, chunk: int) -> None:
        more = self._stream.read(chunk)
        self._ended = len(more) < chunk
        self._before += self._at
        self._text, self._at = self._text[self._at :] + more, 0

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            rest = len(self._text)
            while self._at < rest and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < rest:
                return self._text[self._at]
            if self._ended:
                return ""
            self._grow(_CHUNK)

    def skip(self) -> None:
        """Pass the character that `peek` showed."""
        self._at += 1

    def value(self) -> object:
        """The next value.

        Raises:
            ValueError: no value stands there.
        """
        self.peek()
        chunk = _CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # A number may go on behind the window: "1", "1." or "1.0e" may be the start of 1.0e5.
                if self._ended or self._text[end:].lstrip("0123456789+-.eE"):
                    self._at = end
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended or isinstance(error, RecursionError) or len(self._text) - self._at > _MAX_VALUE:
                    raise ValueError(f"character {self.position}: {error or type(error).__name__}") from None
            chunk *= 2  # so that a long value is not decoded again and again
            self._grow(chunk)


def iterate_rows(stream: TextIO, is_row: Callable[[object], bool]) -> Iterator[object]:
    """The rows of a JSON document: an array's values, the values of an object's one list, or values in a row.

    Args:
        is_row: whether an object that stands alone is itself a row (an object of one list may also be one).

    Raises:
        ValueError: the text is no JSON, or an object whose rows cannot be told.
    """
    reader = _Reader(stream)
    first = reader.peek()
    if first == "[":
        reader.skip()
        yield from _array(reader)
        return
    if first == "":
        return
    value = reader.value()
    if reader.peek() != "" or is_row(value):
        while True:
            yield value
            if reader.peek() == "":
                return
            value = reader.value()
    yield from _only_list(value)


def _array(reader: _Reader) -> Iterator[object]:
    if reader.peek() == "]":
        reader.skip()
    else:
        while True:
            yield reader.value()
            mark = reader.peek()
            if mark not in (",", "]") or mark == "":
                found = repr(mark) if mark else "the end of the file"
                raise ValueError(
                    f"character {reader.position}: an array goes on with ',' or ends with ']'; found {found}"
                )
            reader.skip()
            if mark == "]":
                break
    if reader.peek() != "":
        raise ValueError(f"character {reader.position}: found {reader.peek()!r} behind the array")


def _only_list(value: object) -> Iterator[object]:
    if not isinstance(value, dict):
        raise ValueError(
            f"a JSON file must be an array of rows, or an object with a list; found {type(value).__name__}"
        )
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    if len(lists) != 1:
        found = f"lists {list(lists)[:8]}" if lists else f"no list among the keys {list(value)[:8]}"
        raise ValueError(f"an object must hold exactly one list, of rows; found {found}")
    yield from next(iter(lists.values()))
