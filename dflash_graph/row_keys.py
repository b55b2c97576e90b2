"""Two digests of a row's content: of the whole, and of its prompt. Hold-out, weights and de-duplication go by them.

The content counts, not its form: text is compared in Unicode's NFC form with runs of white space as one blank, objects
whatever the order of their keys. The prompt is everything before the first answer. A row without a prompt (raw text)
has its whole content as both. Called by shards.py; knows no tokenizer.
"""

import hashlib
import json
import unicodedata
from typing import Any

from dflash_graph.row_shapes import Conversation, PlainText, PromptCompletion, Row

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
    if isinstance(row, PlainText):
        text = _normal(row.text)
        return _digest("c", "text", text), _digest("p", "text", text)
    if isinstance(row, PromptCompletion):
        prompt, completion = _normal(row.prompt), _normal(row.completion)
        return _digest("c", "completion", prompt, completion), _digest("p", "completion", prompt or completion)
    if not isinstance(row, Conversation):
        first = row.loss_mask.index(1) if 1 in row.loss_mask else 0
        return _digest("c", "ids", row.tokens, row.loss_mask), _digest("p", "ids", row.tokens[:first] or row.tokens)
    messages, tools = _normal(row.messages), _normal(row.tools)
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    context = sorted(row.unsupervised)
    return _digest("c", tools, messages, context), _digest("p", tools, messages[:first] or messages)
