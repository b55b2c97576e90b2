"""`dflash-graph regenerate`: the assistant's turns of a data set rewritten by the target itself.

A drafter learns what its target says, not what somebody else's data say. Each conversation keeps its system, user and
tool messages; every assistant turn is asked for in order, over the history as rewritten so far. Through servers that
speak OpenAI's protocol, several requests at once, or in this process. Exactly one answer per row, however often the run
is killed and taken up again (`answer_log.py`). Called by `regenerate_command.py`.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from dflash_graph.answer_log import AnswerLog
from dflash_graph.chat import Conversation, RowError
from dflash_graph.config import TargetConfig
from dflash_graph.server_client import Completion, Server, ServerError
from dflash_graph.sources import open_source, parse_raw

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn; they are part of what an output file's answers depend on."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1:
            raise ValueError(
                f"temperature must be at least 0, top_p in (0, 1], max_tokens at least 1; found {self.temperature}, "
                f"{self.top_p} and {self.max_tokens}"
            )

    def body(self) -> dict[str, Any]:
        """Fields of a chat request."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"temperature": self.temperature, "top_p": self.top_p} | seed


class Answerer(Protocol):
    """Whoever answers: servers, or a model of this process."""

    def answer(self, row: int, messages: list[Message], tools: list[Any] | None) -> Completion:
        """One assistant turn.

        Raises:
            ServerError: there is no answer.
        """


class ServerAnswerer:
    """Asks servers in turn; a row that one of them fails to answer is asked of the next.

    Raises:
        ServerError: a server cannot be reached, or they serve different models.
    """

    def __init__(self, endpoints: Sequence[str], sampling: Sampling, **options: Any) -> None:
        self.servers = [Server(endpoint, **options) for endpoint in endpoints]
        self.model = self.servers[0].model
        if others := sorted({server.model for server in self.servers} - {self.model}):
            raise ServerError(f"all endpoints must serve the same model; found {self.model}, {', '.join(others)}")
        self._sampling = sampling

    def answer(self, row: int, messages: list[Message], tools: list[Any] | None) -> Completion:
        for attempt in range(len(self.servers)):
            server = self.servers[(row + attempt) % len(self.servers)]
            try:
                return server.chat(
                    messages, tools=tools, max_tokens=self._sampling.max_tokens, sampling=self._sampling.body()
                )
            except ServerError as error:
                last = error
        raise last


class ModelAnswerer:
    """Answers in this process with transformers' own `generate`, one row at a time."""

    def __init__(self, target: TargetConfig, sampling: Sampling, *, device: str, chat_template: str | None) -> None:
        import torch

        from dflash_graph.chat import read_template
        from dflash_graph.target import load_full_model, resolve_dtype
        from dflash_graph.tokenizer import load_tokenizer

        where = torch.device(device)
        self.model, self._sampling = target.path, sampling
        self._tokenizer = load_tokenizer(target)
        self._template = read_template(self._tokenizer, chat_template)
        self._model = load_full_model(target, where, resolve_dtype(target.dtype, where))

    def answer(self, row: int, messages: list[Message], tools: list[Any] | None) -> Completion:
        import torch

        sampling = self._sampling
        inputs = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, add_generation_prompt=True, return_dict=True,
            return_tensors="pt",
        ).to(self._model.device)  # fmt: skip
        prompt = inputs["input_ids"]
        room = int(self._model.config.get_text_config(decoder=True).max_position_embeddings) - prompt.shape[1]
        if room < 1:
            raise ServerError(f"the prompt has {prompt.shape[1]} tokens, which leaves the target no room for an answer")
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed + row)  # of a row, whatever was answered before it
        with torch.no_grad():
            out = self._model.generate(**inputs, max_new_tokens=min(room, sampling.max_tokens), **drawn)[0].tolist()
        ids = out[prompt.shape[1] :]
        ends = self._model.generation_config.eos_token_id
        stopped = bool(ids) and ids[-1] in {*(ends if isinstance(ends, list) else [ends]), self._tokenizer.eos_token_id}
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(
            text,
            len(ids),
            "stop" if stopped else "length",
            token_ids=tuple(ids),
            prompt_token_ids=tuple(out[: -len(ids)]),
        )


@dataclass(kw_only=True)
class RegenerateReport:
    """What became of the rows: rows_in == already + answered + failed + sum(dropped.values()).

    Attributes:
        already: answered by an earlier run. dropped: by reason, not asked for.
        cut: answers that reached max_tokens, of those answered now.
    """

    output: Path
    rows_in: int = 0
    already: int = 0
    answered: int = 0
    failed: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def __str__(self) -> str:
        parts = [f"{self.answered:,} answered", f"{self.already:,} before", f"{self.failed:,} failed"]
        parts += [f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())]
        rate = f"{self.tokens / self.seconds:.0f} tokens/s" if self.seconds else "no time"
        lines = [
            f"rows      {self.rows_in:,} in = {' + '.join(parts)}; {self.cut:,} answers cut at the limit",
            f"answers   {self.tokens:,} tokens in {self.seconds:.1f} s ({rate}); {self.output}",
        ]
        if self.failed:
            lines.append(f"failed rows and why: {self.output.stem}.failed{self.output.suffix}; run again to ask again")
        if self.interrupted:
            lines.append("interrupted: run the same command again to go on")
        return "\n".join(lines)


def regenerate(
    sources: Sequence[str],
    output: Path,
    answerer: Callable[[], Answerer],
    sampling: Sampling,
    *,
    model: str,
    concurrency: int = 16,
    limit: int | None = None,
    drop_cut: bool = False,
) -> RegenerateReport:
    """Write every conversation of the sources with the target's answers to `output`, or go on with it.

    Args:
        answerer: makes it, once the output file is known to be usable. model: what it answers with.
        concurrency: rows asked for at once.
        limit: take the first so many rows.
        drop_cut: leave out conversations with an answer that reached the token limit.

    Raises:
        ValueError: a source, the output file or a server is unusable.
    """
    opened = [open_source(source) for source in sources]
    settings = {
        "sources": [source.digest for source in opened],
        "sampling": vars(sampling),
        "drop_cut": drop_cut,
        "model": model,
    }
    log = AnswerLog(output, settings)
    try:
        work = _Work(log, answerer(), RegenerateReport(output=output), drop_cut=drop_cut)
        rows = (raw for source in opened for raw in source)
        with ThreadPoolExecutor(concurrency, thread_name_prefix="rows") as pool:
            work.run(enumerate(rows), pool, concurrency, limit)
        return work.report
    finally:
        log.close()


class _Work:
    def __init__(self, log: AnswerLog, answerer: Answerer, report: RegenerateReport, *, drop_cut: bool) -> None:
        self.log, self.answerer, self.report, self.drop_cut = log, answerer, report, drop_cut
        self._mutex = threading.Lock()
        self._stop = threading.Event()

    def run(
        self, rows: Iterator[tuple[int, Any]], pool: ThreadPoolExecutor, concurrency: int, limit: int | None
    ) -> None:
        report, running = self.report, set[Future[None]]()
        started = time.monotonic()
        try:
            with tqdm(unit="row", desc="answers", disable=None) as bar:
                for number, raw in rows:
                    if limit is not None and number >= limit:
                        break
                    report.rows_in += 1
                    bar.update()
                    if number in self.log.answered:
                        report.already += 1
                        continue
                    try:
                        row = parse_raw(raw)
                        if not isinstance(row, Conversation):
                            raise RowError("no_conversation")
                    except RowError as error:
                        report.dropped[error.reason] += 1
                        continue
                    running.add(pool.submit(self._row, number, row))
                    while len(running) >= 2 * concurrency:
                        running = self._finished(running)
                while running:
                    running = self._finished(running)
        except KeyboardInterrupt:
            report.interrupted = True
            self._stop.set()  # rows that wait are given up; requests in flight are waited for
            for future in running:
                future.cancel()
        finally:
            report.seconds = time.monotonic() - started

    @staticmethod
    def _finished(running: set[Future[None]]) -> set[Future[None]]:
        done, left = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        return left

    def _row(self, number: int, row: Conversation) -> None:
        """Ask for every assistant turn of a row, then write it down."""
        tools = getattr(row, "tools", None)
        messages: list[Message] = []
        answers: list[Completion] = []
        try:
            for message in row.messages:
                if self._stop.is_set():
                    return
                if message["role"] != "assistant":
                    messages.append(dict(message))
                    continue
                answers.append(self.answerer.answer(number, messages, tools))
                messages.append(_message(answers[-1]))
        except ServerError as error:
            self.log.fail(number, str(error))
            with self._mutex:
                self.report.failed += 1
            return
        cut = any(answer.finish_reason == "length" for answer in answers)
        empty = any(not answer.text and not answer.message.get("tool_calls") for answer in answers)
        with self._mutex:
            if (cut and self.drop_cut) or empty:
                self.report.dropped["empty_answer" if empty else "cut_answer"] += 1
                return
            self.report.answered += 1
            self.report.cut += cut
            self.report.tokens += sum(answer.num_tokens for answer in answers)
        self.log.add(number, _record(row, messages, tools, answers))


def _message(answer: Completion) -> Message:
    """An assistant's message as it goes on in the conversation."""
    said = answer.message
    kept = {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):  # newer servers
        kept["reasoning_content"] = reasoning
    return {"role": "assistant", "content": answer.text, **kept}


def _record(
    row: Conversation, messages: list[Message], tools: list[Any] | None, answers: list[Completion]
) -> dict[str, Any]:
    """A line that `prepare` reads: as tokens where a single answer's are known, else as messages."""
    identity = hashlib.sha256(json.dumps(row.messages, sort_keys=True).encode()).hexdigest()[:16]
    record: dict[str, Any] = {
        "id": identity,
        "messages": messages,
        "finish_reasons": [answer.finish_reason for answer in answers],
    }
    if tools:
        record["tools"] = tools
    (first, *more) = answers
    if not more and first.token_ids and first.prompt_token_ids:
        record["input_ids"] = [*first.prompt_token_ids, *first.token_ids]
        record["loss_mask"] = [0] * len(first.prompt_token_ids) + [1] * len(first.token_ids)
    return record
