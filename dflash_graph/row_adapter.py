"""The one place that binds reading and tokenising to the rows' shapes. Temporary: row_shapes.py takes its place."""

import json
from collections.abc import Sequence
from typing import Any

from dflash_graph.chat import ChatEncoder, Conversation, EncodedRow
from dflash_graph.chat import RowError as RowError
from dflash_graph.chat import parse_line as parse_line

UNKNOWN_SHAPE = ("no_messages",)
Row = Conversation


def parse_row(value: object, where: str) -> Row:
    return parse_line(json.dumps(value, default=str).encode(), where)


def encode(encoder: ChatEncoder, rows: Sequence[Row]) -> list[list[EncodedRow] | RowError]:
    return [[row] if isinstance(row, EncodedRow) else row for row in encoder.encode(rows)]


def to_json(row: Any) -> dict[str, Any]:
    return {"messages": row.messages}
