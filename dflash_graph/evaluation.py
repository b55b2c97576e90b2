"""How good a drafter is: real speculative decoding on held-out prompts, beside trivial baselines and a control.

Decodes each prompt greedily with the drafter of a checkpoint, checks that the text is the target's own greedy text,
and replays the decoded texts with two tables made from the training rows and with the features of another prompt.
It must never report a number for texts that differ from greedy decoding. Called by the command line and by users.
"""

import codecs
import json
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
from dflash_graph.chat import ChatEncoder, RowError, parse_line, read_template
from dflash_graph.checkpoint import Checkpoint, find_latest, load_checkpoint
from dflash_graph.config import Config, TargetConfig, load_config
from dflash_graph.data import load_tokenizer, prepare
from dflash_graph.decoding import (
    DecodeResult,
    Proposer,
    full_forward_gaps,
    greedy_decode,
    replay_accepts,
    speculative_decode,
)
from dflash_graph.drafter import DrafterSpec
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.report import Acceptance, EvalReport, by_prompt_length, summarise
from dflash_graph.report import teacher_forced_accept_length as teacher_forced_accept_length
from dflash_graph.target import load_full_model, resolve_dtype

# A token may differ from greedy only where the logits of a full forward leave the choice open: a cached forward of a
# few tokens sums in another order. In 16 bits, logits near 20 are themselves rounded to multiples of 1/8 or 1/64.
NEAR_TIE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def load_prompts(path: str | Path, tokenizer: Any, chat_template: str | None = None) -> list[list[int]]:
    """Token ids of each line's conversation up to where the assistant would answer last.

    A trailing assistant turn is dropped; the chat template adds the generation prompt; exactly one BOS where the
    tokenizer adds one.

    Raises:
        ValueError: the file is missing or empty, or a line is no conversation (named).
    """
    if not Path(path).is_file():
        raise ValueError(f"prompts must be an existing JSONL file of conversations; found {str(path)!r}")
    template = read_template(tokenizer, chat_template)
    encoder = ChatEncoder(tokenizer, template)
    prompts = []
    content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            messages = parse_line(_with_answer(line), f"{path}:{number}").messages
        except RowError as error:
            raise ValueError(f"{path}:{number} is no conversation: {error}") from None
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if encoder.adds_bos and ids[:1] != [encoder.bos_token_id]:
            ids.insert(0, encoder.bos_token_id or 0)
        prompts.append(ids)
    if not prompts:
        raise ValueError(f"{path} must hold at least one prompt; found none")
    return prompts


def _with_answer(line: bytes) -> bytes:
    """The line with a placeholder answer if its conversation is one question; `parse_line` wants an answer."""
    try:
        row = json.loads(line)
        turns = row.get("messages") or row.get("conversations")
        if turns and turns[-1].get("role", turns[-1].get("from")) in ("user", "human"):
            turns.append({"role": "assistant", "content": "-"})
            return json.dumps(row).encode()
    except (ValueError, AttributeError, TypeError):
        pass  # parse_line says what is wrong
    return line


def check_greedy(
    model: Any, result: DecodeResult, *, gap: float, greedy: Sequence[int] | None = None, name: str = "the text"
) -> bool:
    """Hold a decoded text against the target: every token must be the greedy one under a full forward of the text.

    That is greedy decoding itself, position by position. Where the token is not the best one, the best one may lead by
    less than `gap` only. `greedy`, the text of `greedy_decode`, may differ from a position on whose top-2 gap is below
    `gap`.

    Returns:
        whether there was such a near-tie.

    Raises:
        RuntimeError: any other difference.
    """
    shortfall, top2_gap = full_forward_gaps(model, result.prompt, result.tokens)
    worst = int(shortfall.argmax())
    if not bool(torch.isfinite(shortfall).all() & torch.isfinite(top2_gap).all()):
        raise RuntimeError(f"{name} cannot be checked: the target's logits are not finite. Try target.dtype=float32")
    if float(shortfall[worst]) >= gap:
        raise RuntimeError(
            f"{name} is not greedy: generated token {worst} falls short of the best by {float(shortfall[worst]):.3g} "
            f"under a full forward; less than {gap:g} is allowed"
        )
    differs = bool((shortfall > 0).any())
    if greedy is not None and tuple(greedy) != result.tokens:
        pairs = enumerate(zip(greedy, result.tokens, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(greedy), len(result.tokens)))
        if first >= len(top2_gap) or float(top2_gap[first]) >= gap:
            raise RuntimeError(
                f"{name} differs from the target's own greedy decoding at generated token {first}, where the target "
                f"is not near a tie (gap below {gap:g})"
            )
        differs = True
    return differs


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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What one evaluation runs: the model, a maker of drafters (one per prompt, they hold state), and the limits."""

    model: Any
    make_drafter: Callable[[], Proposer]
    prompts: list[list[int]]
    eos_ids: frozenset[int]
    max_new_tokens: int
    gap: float
    control_prompts: int
    greedy_prompts: int

    def decode(self, i: int) -> tuple[DecodeResult, bool, tuple[int, float] | None]:
        """Decode prompt i and check it: (result, near-tie, tokens and seconds of the target alone or None)."""
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "eos_ids": self.eos_ids}
        result = speculative_decode(self.model, self.make_drafter(), self.prompts[i], **limits)
        greedy, timing = None, None
        if i < self.greedy_prompts:
            started = time.perf_counter()
            greedy = greedy_decode(self.model, self.prompts[i], **limits)
            timing = len(greedy), time.perf_counter() - started
        near_tie = check_greedy(self.model, result, gap=self.gap, greedy=greedy, name=f"prompt {i}")
        if i >= self.control_prompts:
            result = replace(result, features=result.features[:0])  # only the control needs them later
        return result, near_tie, timing


def _checkpoint_and_config(run: Path) -> tuple[Checkpoint, Config | None]:
    """The checkpoint at `run`, or the newest of the run folder `run`, and the run's configuration if it is there."""
    folder = run if (run / "drafter.safetensors").is_file() else find_latest(run)
    if folder is None:
        raise ValueError(f"{run} must be a run folder with a whole checkpoint, or a checkpoint folder; found neither")
    config_file = folder.resolve().parent.parent / "config.yaml"
    return load_checkpoint(folder), load_config(config_file) if config_file.is_file() else None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


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

    drafter = make_drafter()
    return summarise((a for accepts in pool.map(replay, range(len(results))) for a in accepts), drafter.block_size)


def _tables(config: Config | None, tokenizer: Any, block_size: int) -> tuple[dict[str, Proposer], tuple[str, ...]]:
    """The baselines made from the run's training rows; where these are out of reach, none and a note that says why."""
    if config is None:
        return {}, ("baselines not measured: the checkpoint lies in no run folder with a config.yaml",)
    try:
        rows = prepare(
            config.data.train,
            tokenizer,
            max_length=config.data.max_length,
            chat_template=config.data.chat_template,
            cache_dir=Path(config.data.cache_dir or ".cache/dflash_graph"),
        )
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


def evaluate(
    run: str | Path,
    prompts: str | Path,
    *,
    max_new_tokens: int = 128,
    limit: int | None = None,
    device: str = "cpu",
    target: TargetConfig | None = None,
    control_prompts: int = 20,
    greedy_prompts: int = 4,
    workers: int | None = None,
) -> EvalReport:
    """Evaluate a checkpoint by greedy speculative decoding on the conversations of a JSONL file.

    Args:
        run: run folder (its newest whole checkpoint) or checkpoint folder.
        limit: use the first so many prompts.
        target: where the target is; None takes the run's configuration, else the checkpoint's path.
        control_prompts: so many prompts are replayed with the features of another one; 0 leaves the control out.
        greedy_prompts: so many prompts are also decoded by the target alone and compared token by token. All prompts
            are always checked under a full forward.
        workers: prompts decoded at once; None is one per core on a CPU (4 at most) and 1 on a GPU.

    Raises:
        ValueError: checkpoint, prompts or target do not fit or cannot be read.
        RuntimeError: a text is not the target's greedy text.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; found {value}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device; use device='cpu'")
    started = time.perf_counter()
    checkpoint, config = _checkpoint_and_config(Path(run))
    spec = DrafterSpec.from_dict(checkpoint.state["drafter"])
    target = target or (config.target if config else TargetConfig(path=spec.target_path, gguf_file=spec.gguf_file))
    where = torch.device(device)
    dtype = resolve_dtype(target.dtype, where)
    tokenizer = load_tokenizer(target)
    texts = load_prompts(prompts, tokenizer, config.data.chat_template if config else None)[:limit]
    tables, notes = _tables(config, tokenizer, spec.block_size)
    model = load_full_model(target, where, dtype)
    room = int(model.config.get_text_config(decoder=True).max_position_embeddings) - max_new_tokens - spec.block_size
    chosen = [text for text in texts if len(text) <= room]
    if not chosen:
        raise ValueError(f"no prompt leaves room for {max_new_tokens} new tokens: prompts may have {room} tokens")
    drafter = PlainDrafter(
        spec,
        {name: checkpoint.drafter[name] for name in spec.parameter_shapes()},
        embed_weight=model.get_input_embeddings().weight,
        head_weight=model.get_output_embeddings().weight,
        draft_vocab_ids=checkpoint.drafter.get("draft_vocab_ids"),
    )
    job = _Job(
        model=model,
        make_drafter=drafter.fresh,
        prompts=chosen,
        eos_ids=_eos_ids(model, tokenizer),
        max_new_tokens=max_new_tokens,
        gap=NEAR_TIE_GAP[dtype],
        control_prompts=control_prompts,
        greedy_prompts=greedy_prompts,
    )
    workers = workers or (1 if where.type != "cpu" else max(1, min(4, os.cpu_count() or 1)))
    with _Workers(workers) as pool:
        decoded = pool.map(job.decode, range(len(chosen)))
        results = [result for result, _, _ in decoded]
        control = _control(pool, drafter.fresh, results[:control_prompts])
    timings = [timing for _, _, timing in decoded if timing is not None]
    return EvalReport(
        checkpoint=str(checkpoint.path),
        prompts=str(prompts),
        block_size=spec.block_size,
        num_prompts=len(chosen),
        num_skipped=len(texts) - len(chosen),
        num_tokens=sum(len(r.tokens) for r in results),
        max_new_tokens=max_new_tokens,
        drafter=summarise((a for r in results for a in r.accepts), spec.block_size),
        baselines={
            name: summarise((a for r in results for a in replay_accepts(table, r)), spec.block_size)
            for name, table in tables.items()
        },
        other_features=control,
        by_prompt_length=by_prompt_length(results, spec.block_size),
        tokens_per_s=sum(len(r.tokens) for r in results) / sum(r.seconds for r in results),
        greedy_tokens_per_s=sum(n for n, _ in timings) / sum(s for _, s in timings) if timings else None,
        greedy_prompts=len(timings),
        near_ties=tuple(i for i, (_, near_tie, _) in enumerate(decoded) if near_tie),
        near_tie_gap=NEAR_TIE_GAP[dtype],
        notes=notes,
        seconds=time.perf_counter() - started,
        environment=_environment(where, dtype, workers),
    )
