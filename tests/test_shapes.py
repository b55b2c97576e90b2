"""Every shape of row under every family of templates: exact tokens and masks, those of all prefixes, linear."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_graph.chat import ChatEncoder
from dflash_graph.data import prepare
from dflash_graph.row_shapes import Conversation, PlainText, PromptCompletion, TokenIds, parse_line, parse_row, to_json
from dflash_graph.row_values import RowError
from tests.row_tools import TEMPLATES, byte_tokenizer, encode, load_fixtures, marked_text, pairs, word_tokenizer

FIXTURES = load_fixtures()
# How a turn ends, and what the template writes between the generation prompt and the content.
ENDINGS = {
    **dict.fromkeys(("chatml", "smollm2", "qwen3", "tags_plain"), "<|im_end|>"),
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "two_ends": "<|end|>",
}
THINKS = ("qwen3", "tags_history")
CALLS = ("two_ends", "llama3", "mistral", "qwen3")


def words_of(expected: list[list[list[Any]]]) -> set[str]:
    return {name for row in expected for name, _ in row}


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str) -> None:
    fixture = FIXTURES[name]
    expected = fixture.get("expected", [])
    numbers = {str(i) for i in range(1, 10)} if "input_ids" in fixture["row"] else set()
    tokenizer = word_tokenizer(words_of(expected) | numbers)
    result = encode(tokenizer, fixture["template"], fixture["row"])
    if "refused" in fixture:
        assert isinstance(result, RowError)
        assert result.reason == fixture["refused"]
        return
    assert not isinstance(result, RowError), f"{result.reason}: {result}"
    found = [pairs(tokenizer, row) for row in result]
    assert [marked_text(row) for row in found] == [marked_text(row) for row in expected]
    assert found == expected
    assert "<unk>" not in words_of(found)


def test_fixtures_cover_every_shape_and_template() -> None:
    assert {fixture["template"] for fixture in FIXTURES.values()} == {*TEMPLATES, None}
    shapes = {type(parse_row(fixture["row"], "x:1")) for fixture in FIXTURES.values()}
    assert shapes == {Conversation, PlainText, PromptCompletion, TokenIds}


@pytest.mark.parametrize("name", FIXTURES)
def test_rows_survive_the_way_back_to_json(name: str) -> None:
    row = parse_row(FIXTURES[name]["row"], "x:1")
    assert parse_line(json.dumps(to_json(row)).encode(), "x:1") == row


def test_nulls_of_a_table_are_absent_and_of_a_line_are_meant() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    def arguments(parsed: Any) -> Any:
        return parsed.messages[1]["tool_calls"][0]["function"]["arguments"]

    assert arguments(parse_row(row, "x:1")) == {"a": 1}
    assert arguments(parse_line(json.dumps(row).encode(), "x:1")) == {"a": 1, "b": None}
    call["function"]["arguments"] = '{"a": 1, "b": null}'  # type: ignore[index]
    assert arguments(parse_row(row, "x:1")) == {"a": 1, "b": None}


def test_every_shape_in_one_preparation(tmp_path: Path) -> None:
    names = [name for name, fixture in FIXTURES.items() if fixture["template"] in ("qwen3", None)]
    kept = [name for name in names if "expected" in FIXTURES[name]]
    words = set().union(*(words_of(FIXTURES[name]["expected"]) for name in kept))
    tokenizer = word_tokenizer(words)
    tokenizer.chat_template = TEMPLATES["qwen3"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(FIXTURES[name]["row"]) + "\n" for name in names))
    rows = prepare([file], tokenizer, max_length=1000, cache_dir=tmp_path / "cache")
    assert (rows.report.rows_in, rows.report.kept) == (len(names), len(kept))
    assert len(rows) == sum(len(FIXTURES[name]["expected"]) for name in kept)


# ---- linear in turns ----


def chain(turns: int, kind: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for i in range(turns):
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": i}}}
        if kind == "calls" and i:
            messages.append({"role": "tool", "content": f"seen {i}"})
        else:
            messages.append({"role": "user", "content": f"question {i} " + "word " * 20})
        answer: dict[str, Any] = {"role": "assistant", "content": f"answer {i} " + "word " * 20}
        if kind == "calls" and i < turns - 1:
            answer |= {"content": "", "tool_calls": [call]}
        if kind == "reasoning":
            answer["content"] = f"<think>\nthought {i}\n</think>\n\n" + answer["content"]
        messages.append(answer)
    return messages


@pytest.mark.parametrize(
    "template, kind",
    [
        *((name, "plain") for name in ("chatml", "smollm2", "llama3", "mistral", "gemma", "tags", "tags_plain")),
        ("chatml", "reasoning"),
        ("llama3", "calls"),
        ("mistral", "calls"),
        ("two_ends", "plain"),
        ("two_ends", "calls"),
    ],
)
def test_rendering_is_linear_in_turns(template: str, kind: str) -> None:
    """The characters rendered stay a small multiple of the text: every prefix would be 64 times at 128 turns."""
    tokenizer = byte_tokenizer()
    ratios = {}
    for turns in (2, 8, 32, 128):
        messages = chain(turns, kind)[1 if template == "mistral" else 0 :]
        encoder = ChatEncoder(tokenizer, TEMPLATES[template])
        (result,) = encoder.encode([Conversation(messages, "x:1")])
        assert not isinstance(result, RowError), f"{result.reason}: {result}"
        (row,) = result
        ratios[turns] = encoder.rendered_characters / len(tokenizer.decode(row.tokens))
        edges = np.diff(np.concatenate([[0], row.loss_mask, [0]]))
        assert int((edges == 1).sum()) == turns
    assert max(ratios.values()) <= 7, ratios


def test_a_row_per_turn_renders_no_more_than_it_writes() -> None:
    tokenizer = byte_tokenizer()
    encoder = ChatEncoder(tokenizer, TEMPLATES["qwen3"])
    (result,) = encoder.encode([Conversation(chain(32, "plain"), "x:1")])
    assert not isinstance(result, RowError)
    assert len(result) == 32
    assert encoder.rendered_characters <= 3 * sum(len(row.tokens) for row in result)


# ---- against all prefixes ----


def oracle(tokenizer: Any, template: str, row: Conversation) -> list[tuple[str, list[tuple[int, int]]]] | None:
    """(text, spans) of each row, from the rendering of every prefix; None where a prompt is no prefix of its answer.

    It knows how each template ends a turn, and takes every turn's rendering to be what stands before that.
    """

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                chat_template=TEMPLATES[template],
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )

    rows: list[tuple[str, list[tuple[int, int]]]] = [(render(row.messages, False), [])]
    for i in reversed(range(len(row.messages))):
        message = row.messages[i]
        if message["role"] != "assistant" or i in row.unsupervised:
            continue
        prompt, text = render(row.messages[:i], True), render(row.messages[: i + 1], False)
        if not text.startswith(prompt):
            return None
        start = len(prompt)
        block = "<think>\n\n</think>\n\n" + (message["content"] if template == "tags_history" else "")
        own = template == "qwen3" and re.match(r"\s*(<think>\s*)?</think>", message["content"])
        if template in THINKS and "reasoning_content" not in message and not own and text.startswith(block, start):
            start += len("<think>\n\n</think>\n\n")
        if template == "mistral" and text.startswith(" ", start):
            start += 1
        end = len(text.removesuffix("<|endoftext|>").rstrip("\n"))
        assert text[:end].endswith(ENDINGS[template])
        if not rows[-1][0].startswith(text[:end]):
            rows.append((text, []))
        rows[-1][1].insert(0, (start, end))
    return [(text, spans) for text, spans in rows if spans][::-1]


def as_mask(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Ids and mask under a tokenizer of bytes and added tokens, whose places in the text need no offsets."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = tokenizer.get_added_vocab()
    mask, at, done = [], 0, 0
    for name in tokenizer.convert_ids_to_tokens(ids):
        start, end = at, at + (len(name) if name in added else 1)
        done += 1
        if name in added or done == len(text[at].encode()):
            at, done = end, 0
        mask.append(int(any(start < last and end > first for first, last in spans)))
    return ids, mask


PIECES = ["a", "b c", "\n", " ", "é", "🙂", "e\u0301", "assistant", "{{ x }}", '{"name": "f"}', "user\n", "\ue000", "1"]
NASTY = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "<think>", "</think>", "<tool_call>", "<|eot_id|>", "[/INST]"]
NASTY += ["<think>\n\n</think>\n\n", "<end_of_turn>\n", "<tool_response>", "\ue0000\ue001"]


def conversations(pieces: list[str], template: str) -> Any:
    """Rows that the template shows in full, as a rule: without calls or reasoning where it knows none."""
    text = st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join)
    said = text.filter(str.strip)
    call = st.builds(
        lambda name, value: {"type": "function", "function": {"name": name, "arguments": {"x": value}}},
        st.sampled_from(["f", "look_up"]),
        st.one_of(text, st.integers(0, 9), st.lists(st.none(), max_size=2)),
    )
    answer = st.fixed_dictionaries({"role": st.just("assistant"), "content": said})
    thinking = st.fixed_dictionaries({"role": st.just("assistant"), "content": said, "reasoning_content": said})
    calling = st.builds(
        lambda content, calls, results: [
            {"role": "assistant", "content": content, "tool_calls": calls},
            *({"role": "tool", "content": result} for result in results),
        ],
        st.one_of(st.just(""), said if template == "qwen3" else st.just("")),
        st.lists(call, min_size=1, max_size=1 if template == "llama3" else 2),
        st.lists(said, min_size=1, max_size=2),
    )
    user = st.fixed_dictionaries({"role": st.just("user"), "content": text})
    turn = st.builds(
        lambda user, calls, answer: [user, *(m for each in calls for m in each), answer],
        user,
        st.one_of(st.just([]), st.just([]), st.lists(calling, max_size=2 if template in CALLS else 0)),
        st.one_of(answer, answer, thinking if template in THINKS else answer),
    )
    system = st.one_of(
        st.just([]),
        st.just([]) if template == "mistral" else said.map(lambda content: [{"role": "system", "content": content}]),
    )
    return st.builds(
        lambda system, turns, drop: Conversation(
            [*system, *(message for turn in turns for message in turn)], "x:1", None, frozenset(drop)
        ),
        system,
        st.lists(turn, min_size=1, max_size=6),
        st.one_of(st.just(set()), st.sets(st.integers(0, 12), max_size=2)),
    )


def compare(template: str, row: Conversation) -> str | None:
    """None if masks agree; else the reason of a refusal."""
    tokenizer = byte_tokenizer() if not _tokenizers else _tokenizers[0]
    _tokenizers[:] = [tokenizer]
    (result,) = ChatEncoder(tokenizer, TEMPLATES[template]).encode([row])
    if isinstance(result, RowError):
        return result.reason
    expected = oracle(tokenizer, template, row)
    assert expected is not None
    found = [(part.tokens.tolist(), part.loss_mask.tolist()) for part in result]
    assert found == [as_mask(tokenizer, text, spans) for text, spans in expected]
    return None


_tokenizers: list[Any] = []
_FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("template", ENDINGS)
@_FUZZ
@given(data=st.data())
def test_masks_equal_those_of_all_prefixes(template: str, data: st.DataObject) -> None:
    assert compare(template, data.draw(conversations(PIECES, template))) is None


@pytest.mark.parametrize("template", ENDINGS)
@_FUZZ
@given(data=st.data())
def test_no_text_makes_another_mask(template: str, data: st.DataObject) -> None:
    reason = compare(template, data.draw(conversations([*PIECES, *NASTY], template)))
    # Templates that take answers apart at reasoning tags may leave something out.
    assert reason is None or (template == "qwen3" and reason.endswith("_not_rendered")), reason
