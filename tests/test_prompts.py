"""Sets of prompts: what a conversation becomes, names, formats, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from dflash_graph.prompts import load_prompt_sets, load_prompts, prompt_of
from tests.eval_tiny import TEMPLATE, chat, save_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_prompts_end_where_the_assistant_begins(tokenizer: Any, tmp_path: Path) -> None:
    rows = [chat("a", "b"), chat("a"), chat("a", "b", "c"), chat("a", "b", system="s")]
    rows += [{"conversations": [{"from": "human", "value": "a"}]}]
    (found,) = load_prompt_sets([write_jsonl(tmp_path / "p.jsonl", rows)], tokenizer)
    texts = [tokenizer.decode(ids) for ids in found.prompts]
    one = "<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert texts[0] == texts[1] == texts[4] == one
    assert texts[2] == one + "b<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    assert texts[3] == "<|start|>system\ns<|end|>\n" + one
    assert found.messages[0] == found.messages[4] == [{"role": "user", "content": "a"}]
    assert [m["role"] for m in found.messages[2]] == ["user", "assistant", "user"]


def test_prompts_have_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, bos="<|bos|>")
    path = write_jsonl(tmp_path / "p.jsonl", [chat("a")])
    assert load_prompts(path, tokenizer)[0].count(tokenizer.bos_token_id) == 1
    template = tmp_path / "with_bos.jinja"
    template.write_text("{{ bos_token }}" + TEMPLATE)
    ids = load_prompts(path, tokenizer, str(template))[0]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_bad_rows_are_named(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(chat("a")) + "\n\nnot json\n")
    with pytest.raises(ValueError, match=r"prompts of set p cannot be used: .*p\.jsonl:3 is no prompt"):
        load_prompts(path, tokenizer)
    path.write_text("\n")
    with pytest.raises(ValueError, match="must be at least one"):
        load_prompts(path, tokenizer)
    path.write_text("")
    with pytest.raises(ValueError, match="must be at least one"):
        load_prompts(path, tokenizer)
    write_jsonl(path, [{"messages": [{"role": "user", "content": None}]}])
    with pytest.raises(ValueError, match=r"p\.jsonl:1 is no prompt"):
        load_prompts(path, tokenizer)
    with pytest.raises(ValueError, match=r"prompts of set none cannot be used: .*missing"):
        load_prompts(tmp_path / "none.jsonl", tokenizer)
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text("{{ raise_exception('no system here') }}")
    write_jsonl(path, [chat("a")])
    with pytest.raises(ValueError, match=r"p\.jsonl:1 is no prompt: .*no system here"):
        load_prompts(path, tokenizer, str(refusing))
    empty = tmp_path / "empty.jinja"
    empty.write_text("{% if false %}x{% endif %}")
    with pytest.raises(ValueError, match="at least one token"):
        load_prompts(path, tokenizer, str(empty))


def test_sets_have_names(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat("a"), chat("b"), chat("c")])
    odd = write_jsonl(tmp_path / "a=b.jsonl", [chat("d")])
    sets = load_prompt_sets([path, f"again={path}", odd], tokenizer, limit=2)
    assert [(s.name, s.path, len(s.prompts), len(s.messages)) for s in sets] == [
        ("chats", str(path), 2, 2),
        ("again", str(path), 2, 2),
        ("a=b", str(odd), 1, 1),
    ]
    for specs in ([path, path], [path, f"chats={odd}"]):
        with pytest.raises(ValueError, match="chats more than once"):
            load_prompt_sets(specs, tokenizer)
    for bad in (f"={path}", "chats="):
        with pytest.raises(ValueError, match="must look like name=path"):
            load_prompt_sets([bad], tokenizer)
    with pytest.raises(ValueError, match="at least one set"):
        load_prompt_sets([], tokenizer)


def test_every_format_of_rows_is_read(tokenizer: Any, tmp_path: Path) -> None:
    rows = [chat("a", "b"), chat("c")]
    expected = load_prompts(write_jsonl(tmp_path / "p.jsonl", rows), tokenizer)
    (tmp_path / "p.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).to_parquet(str(tmp_path / "p.parquet"))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("p.json", "p.parquet", "saved"):
        assert load_prompts(tmp_path / name, tokenizer) == expected


def test_rows_of_every_shape(tokenizer: Any, tmp_path: Path) -> None:
    """Token ids up to their last answer, a text prompt as it is, raw text whole; none of them has messages."""
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]},
        {"prompt": "ab", "completion": "c"},
        {"prompt": "ab"},
        {"text": "abc"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": []},
    ]
    (found,) = load_prompt_sets([write_jsonl(tmp_path / "p.jsonl", rows)], tokenizer)
    assert found.prompts[0] == [5, 6, 7]
    assert [tokenizer.decode(ids) for ids in found.prompts[1:4]] == ["ab", "ab", "abc"]
    assert (
        found.prompts[4]
        == found.prompts[5]
        == load_prompts(write_jsonl(tmp_path / "q.jsonl", [chat("a")]), tokenizer)[0]
    )
    assert [len(messages) for messages in found.messages] == [0, 0, 0, 0, 1, 1]


def test_a_tokenizer_without_a_template_reads_what_needs_none(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = None
    assert load_prompts(write_jsonl(tmp_path / "p.jsonl", [{"text": "abc"}]), tokenizer) == [tokenizer("abc").input_ids]
    with pytest.raises(ValueError, match=r"p\.jsonl:1 is no prompt: .*has no chat template"):
        load_prompts(write_jsonl(tmp_path / "p.jsonl", [chat("a")]), tokenizer)


def test_the_last_answer_of_a_row() -> None:
    assert prompt_of([1, 2, 3, 4], [0, 0, 1, 1]) == [1, 2]
    assert prompt_of([1, 2, 3, 4, 5], [0, 1, 0, 1, 0]) == [1, 2, 3]
    assert prompt_of([1, 2, 3], [1, 1, 1]) == [1]
    assert prompt_of([1, 2, 3], [0, 0, 0]) == [1, 2, 3]
