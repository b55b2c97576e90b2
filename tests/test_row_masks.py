"""Rows that a review found taken for something else, and masks that it found wrong; each stays found."""

import json
from typing import Any

import pytest

from dflash_graph.chat import ChatEncoder
from dflash_graph.row_shapes import Conversation, RowError, TokenIds, parse_row
from tests.row_tools import byte_tokenizer, encode

USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": [USER, {"role": "assistant", "content": "a"}], "images": ["x.png"]}, "media"),
        ({"text": "b", "prompt": "a"}, "ambiguous_shape"),
        ({"chosen": [], "rejected": []}, "preference_pair"),
        ({"messages": [USER, {"role": "assistant", "content": " ", "reasoning": "\n"}]}, "empty_answer"),
    ],
)
def test_rows_that_say_something_else_are_refused_by_name(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row, "here")
    assert caught.value.reason == reason


def test_token_ids_come_before_the_messages_they_were_made_of() -> None:
    messages = [USER, {"role": "assistant", "content": "a"}]
    assert isinstance(parse_row({"messages": messages, "input_ids": [1, 2], "loss_mask": [0, 1]}, ""), TokenIds)
    assert isinstance(parse_row({"messages": messages, "input_ids": [1, 2]}, ""), Conversation)
    with pytest.raises(RowError, match=r"input_ids\[1\] is 4294967296"):
        parse_row({"input_ids": [1, 2**32], "loss_mask": [0, 1]}, "")


@pytest.mark.parametrize("answer", [" x", "x", "\tx y", "  x "])
def test_white_space_that_an_answer_begins_with_is_its_own(answer: str) -> None:
    """Behind the empty think block that the template writes."""
    tokenizer = byte_tokenizer()
    encoded = encode(tokenizer, "qwen3", {"messages": [USER, _answer(answer)]})
    assert isinstance(encoded, list)
    text = tokenizer.decode(encoded[0].tokens[encoded[0].loss_mask == 1])
    assert text.startswith(answer), repr(text)
    assert "think" not in text


def _answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


CALLS = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Oslo's é"}}}],
    },
]


@pytest.mark.parametrize(
    "expression",
    ["{{ call.function.arguments }}", "{{ '' + call.function.arguments }}", "{{ call.function.arguments | tojson }}"],
)
def test_arguments_are_json_in_whatever_form_a_template_wants_them(expression: str) -> None:
    """As they are, concatenated (which fails on an object), or made into JSON by the template."""
    tokenizer = byte_tokenizer()
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<tool_call>{{ call.function.name }} EXPRESSION</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("EXPRESSION", expression)
    (encoded,) = ChatEncoder(tokenizer, template).encode([parse_row({"messages": CALLS}, "")])
    assert isinstance(encoded, list), encoded
    said = tokenizer.decode(encoded[0].tokens[encoded[0].loss_mask == 1])
    arguments = said.partition("get ")[2].partition("</tool_call>")[0]
    assert json.loads(arguments) == {"city": "Oslo's é"}


def test_arguments_that_a_template_leaves_out_cost_the_row() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (result,) = ChatEncoder(byte_tokenizer(), template).encode([parse_row({"messages": CALLS}, "")])
    assert isinstance(result, RowError)
    assert result.reason == "tool_calls_not_rendered"
