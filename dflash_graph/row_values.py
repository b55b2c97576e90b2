"""The small rules that every shape of row shares: what may count as text, as a JSON value, as a line of JSON.

Owns `RowError`, the one exception that a bad row may raise. Nothing is repaired: a value is what it says, or an error
with a named reason. Called by row_messages.py and row_shapes.py; knows no tokenizer.
"""

import json
import math
from typing import Any

MAX_DEPTH = 64  # of a value inside a row (tool arguments, schemas): templates and digests recurse


class RowError(Exception):
    """A row that cannot be used. `reason` is one short name, counted in the report; `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


def checked_text(text: str) -> str:
    """The text itself.

    Raises:
        RowError: it holds half a surrogate pair, or a NUL.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("invalid_unicode", str(error)) from None
    if "\0" in text:
        raise RowError("nul_character", f"at character {text.index(chr(0))} of {text[:40]!r}")
    return text


def checked_value(value: Any, *, drop_nulls: bool, depth: int = 0) -> Any:
    """A JSON value as plain dicts, lists, strings and numbers.

    Args:
        drop_nulls: leave out entries of objects that are null. A table gives every object of a column all the keys
            that any of them has; a line of JSON means the null that it says.

    Raises:
        RowError: a string is no text, a number is not finite, something is no JSON, or it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise RowError("nested_too_deeply", f"more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise RowError("not_json", "a key that is no string")
        return {
            checked_text(key): checked_value(item, drop_nulls=drop_nulls, depth=depth + 1)
            for key, item in value.items()
            if item is not None or not drop_nulls
        }
    if isinstance(value, (list, tuple)):
        return [checked_value(item, drop_nulls=drop_nulls, depth=depth + 1) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise RowError("huge_integer", "an integer of more than 64 bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError("not_json", f"the number {value}")
        return value
    raise RowError("not_json", f"a value of type {type(value).__name__}")


def shown(value: Any) -> str:
    """A short form of any value for a message: the start of a string, the type of anything else."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def load_json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        RowError: it is no JSON (`invalid_json`; NaN and Infinity are none), or an object names a key twice
            (`duplicate_key`: which one is meant cannot be known).
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", str(error)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError("duplicate_key", f"an object names {twice[:40]!r} twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
