"""Two digests of a row's content: of the whole, and of its prompt. Hold-out, weights and de-duplication go by them.

The content counts, not its form: text is compared in Unicode's NFC form with runs of white space as one blank, objects
whatever the order of their keys. The prompt is everything before the first answer. A row without a prompt (raw text)
has its whole content as both. Called by shards.py; knows no tokenizer.
"""

import hashlib
import json
import unicodedata
from typing import Any

from dflash_graph.row_adapter import Row

KEY_BYTES = 16


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        text = value if value.isascii() else unicodedata.normalize("NFC", value)
        return " ".join(text.split())
    if isinstance(value, dict):
        return {str(key): _normal(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    return value


def _digest(*parts: Any) -> bytes:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def row_keys(row: Row) -> tuple[bytes, bytes]:
    """(content, prompt) digests of a parsed row, 16 bytes each."""
    messages = _normal(row.messages)
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    tools = _normal(getattr(row, "tools", None))
    return _digest("c", tools, messages), _digest("p", tools, messages[:first] or messages)
