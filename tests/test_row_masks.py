"""Rows that a review found taken for something else, and masks that it found wrong; each stays found."""

import json
from typing import Any

import pytest

from dflash_graph.chat import ChatEncoder, EncodedRow
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


HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
TAGGED = "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
# Templates that leave something out, and a conversation whose other text holds what is missing.
LEAVES_OUT = {
    "the system message": (
        "{% for m in messages if m.role != 'system' %}" + HEADER + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        [{"role": "system", "content": "s"}, {"role": "user", "content": "as"}, {"role": "assistant", "content": "a"}],
    ),
    "text beside a call": (
        "{% for m in messages %}" + HEADER + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        [
            USER,
            {"role": "assistant", "content": "ok", "weight": 0, "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": "look"},
            {"role": "assistant", "content": "ok"},
        ],
    ),
    "earlier turns, under tags": (
        "{% for m in messages[-2:] %}" + HEADER + "{% if m.role == 'assistant' %}" + TAGGED + "{% else %}"
        "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}",
        [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "a"}],
    ),
}


@pytest.mark.parametrize("name", LEAVES_OUT)
def test_what_other_text_happens_to_hold_does_not_count_as_shown(name: str) -> None:
    template, messages = LEAVES_OUT[name]
    (result,) = ChatEncoder(byte_tokenizer(), template).encode([parse_row({"messages": messages}, "x:1")])
    assert isinstance(result, RowError), supervised(result)
    assert result.reason == "message_not_rendered"


@pytest.mark.parametrize("content", ["", "\n", " \n "])
def test_a_blank_answer_behind_reasoning_ends_with_the_end_token(content: str) -> None:
    encoded = encode(byte_tokenizer(), "harmony", {"messages": [USER, {**_answer(content), "reasoning": "r"}]})
    assert isinstance(encoded, list), encoded
    text = f"<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>{content}<|return|>"
    assert supervised(encoded) == [text]


def test_media_beside_a_message_is_refused() -> None:
    with pytest.raises(RowError) as caught:
        parse_row({"messages": [{**USER, "images": ["x.png"]}, _answer("a")]}, "here")
    assert caught.value.reason == "media"


def supervised(rows: list[EncodedRow]) -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(row.tokens[row.loss_mask == 1]) for row in rows]


@pytest.mark.parametrize("tags", [False, True])
def test_reasoning_that_goes_from_a_turn_of_no_weight_changes_the_turns_behind_it(tags: bool) -> None:
    """They were written behind the reasoning, and stand in a row that shows it."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}{{ '<|assistant|>' }}"
        "{% if messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ m.reasoning_content }}{% endif %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    if not tags:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    context = {"role": "assistant", "content": "c", "reasoning": "why", "weight": 0}
    messages = [USER, _answer("a"), _answer("b"), USER, context, _answer("d"), USER, _answer("e")]
    (rows,) = ChatEncoder(byte_tokenizer(), template).encode([parse_row({"messages": messages}, "x:1")])
    assert isinstance(rows, list), rows
    assert supervised(rows) == ["a<|im_end|>b<|im_end|>d<|im_end|>", "e<|im_end|>"]
    assert "why" in byte_tokenizer().decode(rows[0].tokens)
    assert "why" not in byte_tokenizer().decode(rows[1].tokens)
