"""`dflash-graph eval --server`: what a drafter is worth where it serves, from the server's own counters.

Sends the held-out prompts as token ids to a running vLLM or SGLang and reads its speculation counters as differences,
so that served acceptance stands beside the acceptance measured here. With a second server that has no drafter it also
gives the speed-up. Nothing of training or local decoding takes part. A server counts each answer's last verification
although max_new_tokens may cut it short, where `evaluate` does not: on short answers it reads a little lower. Called by
`eval_command.py`.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dflash_graph.prompts import PromptSet
from dflash_graph.server_client import Completion, Counters, Server, ServerError

if TYPE_CHECKING:
    from dflash_graph.report import EvalReport

_WARM_UP_TOKENS = 16
_SETTLE_S = 0.2  # counters are published after a step, a moment after its answer
_OTHERS = 1.02  # tokens of all requests against ours, above which somebody else was served


@dataclass(frozen=True, kw_only=True)
class ServedSet:
    """One set of prompts. `accept_length` is None where nothing was verified."""

    name: str
    num_prompts: int
    num_tokens: int
    accept_length: float | None
    local_accept_length: float | None


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """What a server did with the prompts.

    Attributes:
        at_least: share of verifications with at least k = 1.. accepted drafts; empty where the server does not say.
        tokens_per_s: generated tokens of all requests per second of wall-clock, prefill included.
        baseline_tokens_per_s: the same of the server without a drafter. speed_up: their ratio.
        notes: what the figures do not say by themselves.
    """

    server: str
    dialect: str
    model: str
    concurrency: int
    temperature: float
    num_tokens: int
    seconds: float
    tokens_per_s: float
    accept_length: float | None
    local_accept_length: float | None
    at_least: tuple[float, ...]
    sets: tuple[ServedSet, ...]
    baseline_tokens_per_s: float | None
    speed_up: float | None
    failed: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.server} ({self.dialect}, {self.model}), {self.concurrency} requests at once, "
            f"temperature {self.temperature:g}: {self.num_tokens} tokens in {self.seconds:.1f} s",
            f"{'':<20}  served  local",
        ]
        every = ServedSet(
            name="all sets",
            num_prompts=sum(each.num_prompts for each in self.sets),
            num_tokens=self.num_tokens,
            accept_length=self.accept_length,
            local_accept_length=self.local_accept_length,
        )
        for each in (*self.sets, every) if len(self.sets) > 1 else self.sets:
            lines.append(f"{each.name:<20}  {_number(each.accept_length):>6}  {_number(each.local_accept_length):>5}")
        if self.at_least:
            shares = "  ".join(f">= {k} {share:.0%}" for k, share in enumerate(self.at_least, 1))
            lines.append(f"accepted drafts: {shares}")
        speed = f"tokens/s: {self.tokens_per_s:.1f}"
        if self.baseline_tokens_per_s is not None:
            speed += f"; without a drafter {self.baseline_tokens_per_s:.1f}: speed-up {self.speed_up:.2f}"
        lines.append(speed)
        if self.failed:
            lines.append(f"{len(self.failed)} requests failed; the first: {self.failed[0]}")
        return "\n".join([*lines, *self.notes])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True)
class _Settings:
    max_new_tokens: int
    concurrency: int
    temperature: float
    seed: int


def evaluate_server(
    server: str,
    prompts: Sequence[PromptSet],
    *,
    baseline_server: str | None = None,
    max_new_tokens: int = 128,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    local: "EvalReport | None" = None,
    api_key: str | None = None,
) -> ServerReport:
    """Drive a server with the prompts and read what its drafter was worth.

    Args:
        server, baseline_server: base URLs; the second serves the same target without a drafter.
        concurrency: requests in flight.
        local: the evaluation of the same drafter on the same prompts here.

    Raises:
        ValueError: a server cannot be reached, does not speculate (the baseline: does), hides its counters, or answers
            no request.
    """
    try:
        served = Server(server, api_key=api_key)
        baseline = None if baseline_server is None else Server(baseline_server, api_key=api_key)
        if baseline is not None and baseline.url == served.url:
            raise ServerError(f"--baseline-server must be another server than --server; found {served.url} twice")
        settings = _Settings(max_new_tokens=max_new_tokens, concurrency=concurrency, temperature=temperature, seed=seed)
        _check_speculation(served, prompts, settings)
        runs = [_Run(served, each, settings) for each in prompts]
        plain = None if baseline is None else [_Run(baseline, each, settings) for each in prompts]
    except ServerError as error:
        raise ValueError(str(error)) from error
    return _report(served, runs, baseline, plain, prompts, settings, local)


def _warm_up(server: Server, prompts: Sequence[PromptSet], settings: _Settings) -> Completion:
    return server.complete(
        prompts[0].prompts[0], max_new_tokens=_WARM_UP_TOKENS, temperature=settings.temperature, seed=settings.seed
    )


def _check_speculation(server: Server, prompts: Sequence[PromptSet], settings: _Settings) -> None:
    """Before the measurement, and as its warm-up: is there a drafter, and can its work be read?"""
    if server.dialect == "openai":
        raise ServerError(
            f"{server.url} must be a vLLM or an SGLang whose counters can be read; found neither /metrics of vLLM nor "
            "/get_server_info of SGLang there. Name the server itself, not a proxy before it"
        )
    answer = _warm_up(server, prompts, settings)
    counters = answer.counters if server.dialect == "sglang" else server.counters()
    if counters is None:
        how = "--speculative-config" if server.dialect == "vllm" else "--speculative-algorithm"
        raise ServerError(
            f"{server.url} serves {server.model} without a drafter, or without statistics: no counter of speculation. "
            f"Start it with {how} (and without --disable-log-stats)"
        )


class _Run:
    """One set of prompts through one server."""

    def __init__(self, server: Server, prompts: PromptSet, settings: _Settings) -> None:
        self.name, self.num_prompts = prompts.name, len(prompts.prompts)
        self.failed: list[str] = []
        before = _settled(server)
        started = time.monotonic()
        with ThreadPoolExecutor(settings.concurrency, thread_name_prefix="requests") as pool:
            answers = list(pool.map(lambda prompt: self._ask(server, prompt, settings), prompts.prompts))
        self.seconds = time.monotonic() - started
        self.answers = [answer for answer in answers if answer is not None]
        if not self.answers:
            raise ServerError(f"{server.url} answered none of {self.num_prompts} requests; the first: {self.failed[0]}")
        self.num_tokens = sum(answer.num_tokens for answer in self.answers)
        if server.dialect == "sglang":
            own = [answer.counters for answer in self.answers if answer.counters is not None]
            self.counters = sum(own, Counters())
        else:
            self.counters = (_settled(server) or Counters()).since(before or Counters())

    def _ask(self, server: Server, prompt: list[int], settings: _Settings) -> Completion | None:
        try:
            return server.complete(
                prompt,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
            )
        except ServerError as error:
            self.failed.append(str(error))
            return None


def _settled(server: Server) -> Counters | None:
    """Counters that stand still."""
    if server.dialect != "vllm":
        return None
    found = server.counters()
    for _ in range(25):
        time.sleep(_SETTLE_S)
        again = server.counters()
        if again == found:
            break
        found = again
    return found


def _report(
    server: Server,
    runs: Sequence[_Run],
    baseline: Server | None,
    plain: Sequence[_Run] | None,
    prompts: Sequence[PromptSet],
    settings: _Settings,
    local: "EvalReport | None",
) -> ServerReport:
    counters = sum((run.counters for run in runs), Counters())
    tokens, seconds = sum(run.num_tokens for run in runs), sum(run.seconds for run in runs)
    notes = []
    generated = counters.generated
    if server.dialect == "vllm" and generated is not None and generated > _OTHERS * tokens:
        notes.append(
            f"the server generated {generated:.0f} tokens meanwhile, {tokens} of them for this evaluation: others used "
            "it, and its counters hold their requests too"
        )
    if counters.drafts == 0:
        notes.append("the server verified no draft: its drafter was not used on these prompts")
    if baseline is not None and plain is not None:
        drafts = sum(run.counters.drafts for run in plain)
        if drafts:
            notes.append(f"the baseline server verified {drafts:.0f} drafts: it has a drafter, so this is no speed-up")
        if baseline.model != server.model:
            notes.append(f"the baseline server's model is called {baseline.model}, not {server.model}")
    rate = tokens / seconds
    plain_rate = None if plain is None else sum(r.num_tokens for r in plain) / sum(r.seconds for r in plain)
    return ServerReport(
        server=server.url,
        dialect=server.dialect,
        model=server.model,
        concurrency=settings.concurrency,
        temperature=settings.temperature,
        num_tokens=tokens,
        seconds=seconds,
        tokens_per_s=rate,
        accept_length=counters.accept_length,
        local_accept_length=None if local is None else local.drafter.accept_length,
        at_least=tuple(n / counters.drafts for n in counters.per_position) if counters.drafts else (),
        sets=tuple(
            ServedSet(
                name=run.name,
                num_prompts=run.num_prompts,
                num_tokens=run.num_tokens,
                accept_length=run.counters.accept_length,
                local_accept_length=_local(local, run.name),
            )
            for run in runs
        ),
        baseline_tokens_per_s=plain_rate,
        speed_up=None if plain_rate is None else rate / plain_rate,
        failed=tuple(failure for run in (*runs, *(plain or ())) for failure in run.failed),
        notes=tuple(notes),
    )


def _local(local: "EvalReport | None", name: str) -> float | None:
    if local is None:
        return None
    found = [each.drafter for each in local.sets if each.name == name]
    return found[0].accept_length if found and found[0] is not None else None
