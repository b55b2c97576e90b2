"""How good a drafter is: real speculative decoding on held-out prompts, beside trivial baselines and a control.

Decodes each prompt with the drafter of a run, a checkpoint or an exported folder, greedily or at a temperature, and
replays the decoded texts with two tables made from the training rows and with the features of another prompt. It must
never report a number for greedy texts that differ from the target's own. Called by the command line and by users.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

from dflash_graph.baselines import BigramTable, BlockTable
from dflash_graph.cached_target import check_rollback, target_settings
from dflash_graph.config import Config, TargetConfig
from dflash_graph.data import prepare_run
from dflash_graph.decoding import DecodeResult, Proposer, decode_alone, replay_accepts, speculative_decode
from dflash_graph.drafter_folder import check_borrowed, read_drafter
from dflash_graph.near_ties import NEAR_TIE_GAP, check_greedy
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.prompts import PromptSet, load_prompt_sets
from dflash_graph.report import Acceptance, EvalReport, TextResult, by_prompt_length, report_set, summarise
from dflash_graph.sampling import Sampling
from dflash_graph.step_times import measure_step_times
from dflash_graph.target import load_full_model, read_facts, resolve_dtype
from dflash_graph.tokenizer import load_tokenizer

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def other_features(features: Tensor, length: int) -> Tensor:
    """Another text's features (n, N*D) repeated cyclically or cut to `length` positions."""
    return features[torch.arange(length, device=features.device) % features.shape[0]]


class _Workers:
    """Decodes several prompts at once: on a CPU small matrix products leave all cores but one idle."""

    def __init__(self, count: int) -> None:
        def one_thread() -> None:
            if count > 1:
                torch.set_num_threads(1)  # of the calling thread; the pool's threads share the cores

        self.pool = ThreadPoolExecutor(count, thread_name_prefix="evaluate", initializer=one_thread)

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        futures = [self.pool.submit(function, item) for item in items]
        return [future.result() for future in futures]


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompt:
    """One prompt to decode: number `index` of the set `name`."""

    name: str
    index: int
    tokens: list[int]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.index}"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Decoded:
    """What decoding one prompt gave.

    Attributes:
        near_tie: None for sampled text.
        alone: tokens and seconds (after the prefill) of the target alone, or None.
    """

    prompt: Prompt
    result: DecodeResult
    near_tie: bool | None
    alone: tuple[int, float] | None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What one evaluation runs: the model, a maker of drafters (one per prompt, they hold state), and the limits."""

    model: Any
    make_drafter: Callable[[], Proposer]
    device: torch.device
    eos_ids: frozenset[int]
    max_new_tokens: int
    sampling: Sampling | None
    gap: float
    alone: frozenset[str]  # prompts that the target alone decodes, too
    control: frozenset[str]  # prompts whose features the control needs later

    def decode(self, prompt: Prompt) -> _Decoded:
        """Decode a prompt and check the text."""
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "eos_ids": self.eos_ids}
        sampling = self.sampling
        sampler = None if sampling is None else sampling.sampler(prompt.name, prompt.index, self.device)
        result = speculative_decode(self.model, self.make_drafter(), prompt.tokens, sampler=sampler, **limits)
        greedy, alone = None, None
        if prompt.key in self.alone:
            other = None if sampling is None else sampling.sampler(f"{prompt.name} alone", prompt.index, self.device)
            text, seconds = decode_alone(self.model, prompt.tokens, sampler=other, **limits)
            greedy, alone = text, (len(text), seconds)
        near_tie = None
        if sampling is None:
            near_tie = check_greedy(self.model, result, gap=self.gap, greedy=greedy, name=f"prompt {prompt.key}")
        if prompt.key not in self.control:
            result = replace(result, features=result.features[:0])
        return _Decoded(prompt=prompt, result=result, near_tie=near_tie, alone=alone)


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the model's generation settings, and the tokenizer's."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def fitting_prompts(
    prompt_set: PromptSet, *, positions: int, vocab_size: int, max_new_tokens: int, block_size: int
) -> tuple[list[Prompt], int]:
    """(the prompts that leave room for their answer in the target's positions, how many do not).

    Raises:
        ValueError: a token id is no row of the target's embedding.
    """
    prompts = []
    for i, tokens in enumerate(prompt_set.prompts):
        if max(tokens) >= vocab_size:
            raise ValueError(
                f"prompt {i} of {prompt_set.name} holds token {max(tokens)}; the target's vocabulary has {vocab_size}. "
                "The prompts were made with another tokenizer"
            )
        if len(tokens) + max_new_tokens + block_size <= positions:
            prompts.append(Prompt(name=prompt_set.name, index=i, tokens=tokens))
    return prompts, len(prompt_set.prompts) - len(prompts)


def _control(
    pool: _Workers, make_drafter: Callable[[], Proposer], results: Sequence[DecodeResult]
) -> Acceptance | None:
    """Acceptance on the decoded texts when each is drafted from the features of the text before it."""
    if len(results) < 2:
        return None

    def replay(i: int) -> list[int]:
        result = results[i]
        foreign = other_features(results[i - 1].features, len(result.prompt) + len(result.tokens) - 1)
        return replay_accepts(make_drafter(), result, foreign)

    accepts = [a for found in pool.map(replay, range(len(results))) for a in found]
    return summarise(accepts, make_drafter().block_size) if accepts else None


def _tables(config: Config | None, tokenizer: Any, block_size: int) -> tuple[dict[str, Proposer], tuple[str, ...]]:
    """The baselines made from the run's training rows; where these are out of reach, none and a note that says why."""
    if config is None:
        return {}, ("baselines not measured: the drafter lies in no run folder with a config.yaml",)
    try:
        rows = prepare_run(config.data, tokenizer).rows
    except (OSError, ValueError) as error:
        return {}, (f"baselines not measured: {error}",)
    return {"bigram table": BigramTable(rows, block_size), "context-blind table": BlockTable(rows, block_size)}, ()


def _environment(device: torch.device, dtype: torch.dtype, workers: int) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "hardware": hardware,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": str(workers),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _rate(pairs: Sequence[tuple[int, float]]) -> float | None:
    """Tokens per second of (tokens, seconds after the prefill), whose first token is the prefill's."""
    tokens, seconds = sum(n - 1 for n, _ in pairs), sum(s for _, s in pairs)
    return tokens / seconds if tokens and seconds > 0 else None


def evaluate(
    run: str | Path,
    prompts: str | Path | Sequence[str | Path],
    *,
    max_new_tokens: int = 128,
    limit: int | None = None,
    device: str = "cpu",
    target: TargetConfig | None = None,
    dtype: str | None = None,
    chat_template: str | None = None,
    sampling: Sampling | None = None,
    control_prompts: int = 20,
    alone_prompts: int = 4,
    step_times: bool = True,
    workers: int | None = None,
) -> EvalReport:
    """Evaluate a drafter by speculative decoding on sets of conversations.

    Args:
        run: run folder (its newest whole checkpoint), checkpoint folder, or exported folder of either layout.
        prompts: one set or several, each "path" or "name=path"; see `load_prompt_sets`.
        limit: use the first so many prompts of each set.
        target: where the target is; None takes what the run, the checkpoint or the export recorded.
        dtype: of target and drafter ("auto", "float32", "bfloat16", "float16"); None is the target's setting.
        chat_template: a Jinja file; None is the run's, else the tokenizer's own template.
        sampling: None is greedy decoding.
        control_prompts: so many prompts are replayed with the features of another one; 0 leaves the control out.
        alone_prompts: the first so many prompts of each set are also decoded by the target alone, for its speed and,
            if greedy, compared token by token. All greedy texts are always checked under a full forward.
        step_times: time the steps for the estimated speed-up.
        workers: prompts decoded at once; None is one per core on a CPU (4 at most) and 1 on a GPU.

    Raises:
        ValueError: drafter, prompts or target do not fit or cannot be read.
        RuntimeError: a greedy text is not the target's own.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("limit", limit), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; found {value}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device; use device='cpu'")
    started = time.perf_counter()
    specs = [prompts] if isinstance(prompts, str | Path) else list(prompts)
    found = read_drafter(run, target)
    check_rollback(target_settings(found.target))
    spec, where = found.spec, torch.device(device)
    torch_dtype = resolve_dtype(dtype or found.target.dtype, where)
    tokenizer = load_tokenizer(found.target)
    template = chat_template or (found.config.data.chat_template if found.config else None)
    sets = load_prompt_sets(specs, tokenizer, template, limit=limit)
    tables, notes = _tables(found.config, tokenizer, spec.block_size)
    facts = read_facts(found.target)
    sizes = {"positions": facts.max_position_embeddings, "vocab_size": facts.vocab_size}
    limits = {"max_new_tokens": max_new_tokens, "block_size": spec.block_size}
    chosen = {s.name: fitting_prompts(s, **sizes, **limits) for s in sets}
    if not any(fitting for fitting, _ in chosen.values()):
        raise ValueError(
            f"no prompt leaves room for {max_new_tokens} new tokens and a block of {spec.block_size} in the target's "
            f"{facts.max_position_embeddings} positions"
        )
    model = load_full_model(found.target, where, torch_dtype)
    check_borrowed(found, model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    drafter = PlainDrafter(
        spec,
        found.tensors,
        embed_weight=model.get_input_embeddings().weight,
        head_weight=model.get_output_embeddings().weight,
        draft_vocab_ids=found.draft_vocab_ids,
    )
    every = [prompt for fitting, _ in chosen.values() for prompt in fitting]
    job = _Job(
        model=model,
        make_drafter=drafter.fresh,
        device=where,
        eos_ids=eos_ids(model, tokenizer),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        gap=NEAR_TIE_GAP[torch_dtype],
        alone=frozenset(prompt.key for fitting, _ in chosen.values() for prompt in fitting[:alone_prompts]),
        control=frozenset(prompt.key for prompt in every[:control_prompts]),
    )
    workers = workers or (1 if where.type != "cpu" else max(1, min(4, os.cpu_count() or 1)))
    with _Workers(workers) as pool:
        decoded = pool.map(job.decode, every)
        results = [d.result for d in decoded]
        accepts = [a for r in results for a in r.accepts]
        acceptance = summarise(accepts, spec.block_size)
        control = None
        if sampling is None or sampling.draft == "greedy":
            control = _control(pool, drafter.fresh, results[:control_prompts])
        else:
            notes += ("features of another prompt not measured: that needs greedy drafts",)
        times = None
        if step_times:  # in a worker's thread, which has their settings, while the others rest
            (times,) = pool.map(lambda r: measure_step_times(model, drafter, r, acceptance.accept_length), [results])
    timed = [d for d in decoded if d.alone is not None]
    speeds = [_rate([(len(d.result.tokens), d.result.seconds) for d in group]) for group in (decoded, timed)]
    alone = _rate([d.alone for d in timed if d.alone is not None])
    by_set = {s.name: [d.result for d in decoded if d.prompt.name == s.name] for s in sets}
    return EvalReport(
        checkpoint=str(found.path),
        prompts=", ".join(s.path for s in sets),
        sets=tuple(
            report_set(s.name, s.path, by_set[s.name], spec.block_size, num_skipped=chosen[s.name][1]) for s in sets
        ),
        sampling=sampling,
        block_size=spec.block_size,
        num_prompts=len(decoded),
        num_skipped=sum(skipped for _, skipped in chosen.values()),
        num_tokens=sum(len(r.tokens) for r in results),
        max_new_tokens=max_new_tokens,
        drafter=acceptance,
        baselines={
            name: summarise((a for r in results for a in replay_accepts(table, r)), spec.block_size)
            for name, table in tables.items()
        },
        other_features=control,
        by_prompt_length=by_prompt_length(results, spec.block_size),
        tokens_per_s=speeds[0],
        alone_tokens_per_s=alone,
        alone_prompts=len(timed),
        measured_speedup=speeds[1] / alone if speeds[1] and alone else None,
        step_times=times,
        near_ties=tuple(d.prompt.key for d in decoded if d.near_tie),
        near_tie_gap=NEAR_TIE_GAP[torch_dtype],
        texts=tuple(
            TextResult(
                set=d.prompt.name,
                index=d.prompt.index,
                prompt_tokens=len(d.prompt.tokens),
                tokens=d.result.tokens,
                accepts=d.result.accepts,
                near_tie=d.near_tie,
            )
            for d in decoded
        ),
        notes=notes,
        seconds=time.perf_counter() - started,
        environment=_environment(where, torch_dtype, workers),
    )
