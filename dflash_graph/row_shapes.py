"""From a line of JSON or a table's record to what it says: a conversation, raw text, prompt and completion, or tokens.

Owns which columns make a row of which shape (the first that is there counts: `input_ids` with a mask, `messages`,
`conversations`, `prompt` with `completion`, `text`) and what a row of that shape must hold; everything else is a
`RowError` with a named reason. Nothing is repaired and nothing is guessed. Knows no tokenizer. Called by sources.py and
prompts.py; the shapes are read by chat.py, row_keys.py and held_out_rows.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_graph.row_messages import Message, check_order, parse_messages, parse_tools, with_system
from dflash_graph.row_values import RowError as RowError
from dflash_graph.row_values import checked_text, load_json

UNKNOWN_SHAPE = "unknown_shape"  # the reason of a row whose columns make no known shape
_MAX_TOKEN_ID = (1 << 31) - 1
_IGNORED_LABEL = -100
_MASKS = ("loss_mask", "labels", "assistant_masks")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Conversation:
    """Messages in the common form of row_messages.py, in order.

    Attributes:
        tools: declared tools.
        unsupervised: indices of assistant messages that are context only.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Any]] | None = None
    unsupervised: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PlainText:
    """Raw text: every token but the first is supervised, and no chat template is used."""

    text: str
    where: str


@dataclass(frozen=True)
class PromptCompletion:
    """Text that goes before, and the text that is supervised; no chat template is used and nothing is added."""

    prompt: str
    completion: str
    where: str


@dataclass(frozen=True)
class TokenIds:
    """Tokens taken as they are, with a mask of 0 and 1 of the same length."""

    tokens: list[int]
    loss_mask: list[int]
    where: str


Row = Conversation | PlainText | PromptCompletion | TokenIds


def parse_line(line: bytes, where: str, *, answered: bool = True) -> Row:
    """Read one line of JSON. A byte-order mark before it and white space around it (CR) are no content.

    Args:
        answered: False allows conversations without an answer, and prompts without a completion (it is "" then).

    Raises:
        RowError: the line is no row.
    """
    try:
        text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", str(error)) from None
    return _parse(load_json(text), where, drop_nulls=False, answered=answered)


def parse_row(row: object, where: str, *, answered: bool = True) -> Row:
    """Read a decoded record. Nulls inside tool arguments and schemas count as absent: tables fill them in.

    Args:
        answered: as in `parse_line`.

    Raises:
        RowError: the record is no row.
    """
    return _parse(row, where, drop_nulls=True, answered=answered)


def to_json(row: Row) -> dict[str, Any]:
    """An object that `parse_line` reads as the same row."""
    if isinstance(row, PlainText):
        return {"text": row.text}
    if isinstance(row, PromptCompletion):
        return {"prompt": row.prompt, "completion": row.completion}
    if isinstance(row, TokenIds):
        return {"input_ids": row.tokens, "loss_mask": row.loss_mask}
    messages = [
        {**message, "weight": 0} if i in row.unsupervised else message for i, message in enumerate(row.messages)
    ]
    return {"messages": messages} | ({"tools": row.tools} if row.tools else {})


def _parse(row: object, where: str, *, drop_nulls: bool, answered: bool) -> Row:
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"found {type(row).__name__}")
    if media := [column for column in _MEDIA if row.get(column)]:
        raise RowError("media", f"the row has {', '.join(media)} beside its text")
    if row.get("input_ids") is not None and any(row.get(name) is not None for name in _MASKS):
        return _token_ids(row, where)
    for column in ("messages", "conversations"):
        if row.get(column) is not None:
            return _conversation(row, row[column], where, drop_nulls, answered)
    if row.get("input_ids") is not None:
        return _token_ids(row, where)
    if row.get("prompt") is not None and (row.get("completion") is not None or not answered):
        return _prompt_completion(row, where, drop_nulls, answered)
    if "chosen" in row and "rejected" in row:
        raise RowError("preference_pair", "columns chosen and rejected: keep the one to train on as `messages`")
    if row.get("text") is not None:
        if beside := [column for column in ("prompt", "completion", "instruction") if row.get(column) is not None]:
            raise RowError("ambiguous_shape", f"the column `text` stands beside {', '.join(beside)}")
        if not isinstance(row["text"], str):
            raise RowError("text_not_text", f"the column `text` is {type(row['text']).__name__}")
        if not row["text"].strip():
            raise RowError("empty_text")
        return PlainText(checked_text(row["text"]), where)
    columns = [str(key)[:40] if isinstance(key, str) else type(key).__name__ for key in list(row)[:8]]
    raise RowError(UNKNOWN_SHAPE, f"columns {columns}")


def _conversation(row: dict[str, Any], turns: Any, where: str, drop_nulls: bool, answered: bool) -> Conversation:
    messages, unsupervised = parse_messages(turns, drop_nulls=drop_nulls)
    messages, added = with_system(messages, row.get("system"))
    check_order(messages, answered=answered)
    declared = row["tools"] if row.get("tools") is not None else row.get("functions")
    tools = parse_tools(declared, drop_nulls=drop_nulls)
    return Conversation(messages, where, tools, frozenset(i + added for i in unsupervised))


def _prompt_completion(row: dict[str, Any], where: str, drop_nulls: bool, answered: bool) -> Row:
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str) and (completion is None or isinstance(completion, str)):
        if answered and not completion:
            raise RowError("empty_completion")
        return PromptCompletion(checked_text(prompt), checked_text(completion or ""), where)
    if not isinstance(prompt, (list, tuple)) or not (completion is None or isinstance(completion, (list, tuple, str))):
        raise RowError(
            "prompt_not_text", f"prompt is {type(prompt).__name__} and completion is {type(completion).__name__}"
        )
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion or ())
    whole = _conversation(row, [*prompt, *answer], where, drop_nulls, answered)
    first = len(whole.messages) - len(answer)
    if answered and all(message["role"] != "assistant" for message in whole.messages[first:]):
        raise RowError("no_assistant_turn", "the completion holds none")
    context = {i for i, message in enumerate(whole.messages[:first]) if message["role"] == "assistant"}
    return Conversation(whole.messages, where, whole.tools, whole.unsupervised | context)


def _token_ids(row: dict[str, Any], where: str) -> TokenIds:
    tokens = _integers(row["input_ids"], "input_ids", "bad_token_id", lambda value: 0 <= value <= _MAX_TOKEN_ID)
    if not tokens:
        raise RowError("empty_tokens")
    masks = {name: _mask(row[name], name) for name in ("loss_mask", "assistant_masks") if row.get(name) is not None}
    if row.get("labels") is not None:
        labels = _integers(row["labels"], "labels", "bad_label", lambda value: value == _IGNORED_LABEL or value >= 0)
        _check_length(labels, tokens, "labels")
        masks["labels"] = [int(label != _IGNORED_LABEL) for label in labels]
        if any(label not in (_IGNORED_LABEL, token) for label, token in zip(labels, tokens, strict=True)):
            raise RowError("labels_differ", "a label is neither -100 nor the token at its place (shifted labels?)")
    if not masks:
        raise RowError("no_loss_mask", "input_ids need loss_mask, labels or assistant_masks")
    for name, mask in masks.items():
        _check_length(mask, tokens, name)
    chosen, *others = masks.values()
    if any(mask != chosen for mask in others):
        raise RowError("masks_differ", f"{' and '.join(masks)} disagree")
    if row.get("attention_mask") is not None and not all(_mask(row["attention_mask"], "attention_mask")):
        raise RowError("padded_tokens", "attention_mask holds 0: rows must come without padding")
    return TokenIds(tokens, chosen, where)


def _check_length(values: list[int], tokens: list[int], name: str) -> None:
    if len(values) != len(tokens):
        raise RowError("mask_length", f"{name} has {len(values)} entries for {len(tokens)} tokens")


def _mask(values: Any, name: str) -> list[int]:
    if isinstance(values, (list, tuple)):
        values = [int(value) if isinstance(value, bool) else value for value in values]
    return _integers(values, name, "mask_not_0_or_1", lambda value: value in (0, 1))


def _integers(values: Any, name: str, reason: str, fits: Callable[[int], bool]) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise RowError(reason, f"{name} is {type(values).__name__}")
    for i, value in enumerate(values):
        if type(value) is not int or not fits(value):
            shown = value if isinstance(value, (int, float)) and abs(value) < 10**18 else type(value).__name__
            raise RowError(reason, f"{name}[{i}] is {shown}")
    return list(values)
