"""Speculative decoding of held-out prompts during training, in the drafter's thread, between two steps.

The whole target is needed, of which a run has the layers up to the deepest tap: those, embedding and head are shared,
tensor by tensor, and only the rest is loaded a second time, once, at set-up. Modules are not shared, so that nothing
here touches what a target's worker or a graph uses. A text that is not greedy is counted and reported; it never ends
the run. Called by `training.py` and `trainer.py`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dflash_graph.cached_target import check_rollback, target_settings
from dflash_graph.config import TargetConfig
from dflash_graph.control import RunControl, Stopped
from dflash_graph.decoding import DecodeResult, speculative_decode
from dflash_graph.drafter import FlatParameters
from dflash_graph.evaluation import Prompt, eos_ids, fitting_prompts
from dflash_graph.near_ties import NEAR_TIE_GAP, check_greedy
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.plan import RunPlan
from dflash_graph.prompts import PromptSet, load_prompt_sets, prompt_of
from dflash_graph.ranks import Ranks
from dflash_graph.report import Acceptance, summarise
from dflash_graph.target import Target, load_full_model
from dflash_graph.token_rows import TokenRows
from dflash_graph.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class HeldOutResult:
    """What one pass found. `not_greedy`: texts that the target itself would not have written (0 unless it is ill)."""

    acceptance: Acceptance | None
    by_set: dict[str, float | None]
    num_prompts: int
    num_tokens: int
    not_greedy: int
    seconds: float

    def to_record(self) -> dict[str, Any]:
        """For the metrics file."""
        a = self.acceptance
        return {
            "accept_length": None if a is None else a.accept_length,
            "acceptance": [] if a is None else list(a.at_least),
            "verifications": 0 if a is None else a.num_verifications,
            "sets": self.by_set,
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "not_greedy": self.not_greedy,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        length = "-" if self.acceptance is None else f"{self.acceptance.accept_length:.3f}"
        sets = "".join(f", {n} {'-' if v is None else f'{v:.3f}'}" for n, v in self.by_set.items())
        wrong = f", {self.not_greedy} TEXTS ARE NOT GREEDY" if self.not_greedy else ""
        return (
            f"accept_length {length} by decoding {self.num_prompts} prompts"
            f"{sets if len(self.by_set) > 1 else ''}, {self.num_tokens} tokens{wrong} ({self.seconds:.1f} s)"
        )


class HeldOut:
    """The prompts of `eval.prompts`, and what it takes to decode them.

    Raises:
        ValueError: the prompts cannot be read, or none leaves room for its answer; before anything is loaded.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan, self.every = plan, plan.config.eval.every or 0
        config, facts = plan.config.eval, plan.facts
        self._settings = target_settings(plan.config.target)
        check_rollback(self._settings)
        if len(plan.placement.targets[0]) > 1:
            raise ValueError(
                "eval.every needs a target on one device; the first one is spread over several. Leave eval.every out, "
                "and evaluate checkpoints with dflash-graph eval"
            )
        self._tokenizer = load_tokenizer(plan.config.target)
        if config.prompts:
            share = -(-config.num_prompts // len(config.prompts))
            template = plan.config.data.chat_template
            sets = load_prompt_sets(config.prompts, self._tokenizer, template, limit=share)
        elif plan.validation_rows is not None:
            sets = [_prompts_of(plan.validation_rows, config.num_prompts)]
        else:
            raise ValueError(
                "eval.every needs prompts: set eval.prompts to one or several files of conversations, or hold data out "
                "(data.validation)"
            )
        fitting = [
            fitting_prompts(
                s,
                positions=facts.max_position_embeddings,
                vocab_size=facts.vocab_size,
                max_new_tokens=config.max_new_tokens,
                block_size=plan.spec.block_size,
            )
            for s in sets
        ]
        every = [prompt for found, _ in fitting for prompt in found]
        self.num_skipped = sum(skipped for _, skipped in fitting)
        self.prompts: list[Prompt] = every[: config.num_prompts]
        self.names = [s.name for s in sets]
        if not self.prompts:
            raise ValueError(
                f"no prompt of eval.prompts leaves room for eval.max_new_tokens = {config.max_new_tokens} in the "
                f"target's {facts.max_position_embeddings} positions"
            )

    @classmethod
    def of(cls, plan: RunPlan) -> "HeldOut | None":
        """None where the configuration asks for no evaluation."""
        return None if plan.config.eval.every is None else cls(plan)

    def __str__(self) -> str:
        """A line for the plan: what is decoded, and the memory that it takes."""
        config, plan = self.plan.config.eval, self.plan
        rest, host = _bytes_of_rest(plan, self._settings), ""
        item = plan.target_dtype.itemsize
        longest = max(len(prompt.tokens) for prompt in self.prompts) + config.max_new_tokens + plan.spec.block_size
        cache = 2 * plan.facts.num_hidden_layers * plan.facts.num_key_value_heads * plan.facts.head_dim * longest * item
        shapes = plan.spec.parameter_shapes().values()
        same = plan.compute_dtype == plan.target_dtype and plan.target_devices[0] == plan.device
        copy = 0 if same else item * sum(torch.Size(shape).numel() for shape in shapes)
        if plan.target_devices[0].type != "cpu":
            host = "; at set-up the whole target once on the host"
        skipped = f" ({self.num_skipped} skipped as too long)" if self.num_skipped else ""
        mib = 2**20
        return (
            f"eval      {len(self.prompts)} prompts of {', '.join(self.names)}{skipped} every {config.every} steps, up "
            f"to {config.max_new_tokens} tokens each; memory beside the target: target layers {rest / mib:.1f} MiB, "
            f"caches {cache / mib:.1f} MiB, the drafter's weights {copy / mib:.1f} MiB{host}"
        )

    def load(self, target: Target) -> None:
        """Complete a run's target into a whole model, in the thread that will decode."""
        plan = self.plan
        self.model = whole_model(plan.config.target, target)
        self._eos_ids = eos_ids(self.model, self._tokenizer)
        self._head_ids = None if plan.head_ids is None else torch.from_numpy(plan.head_ids)

    def evaluate(
        self, parameters: FlatParameters, ranks: Ranks, control: RunControl, end: Callable[[], bool]
    ) -> HeldOutResult | None:
        """Decode the prompts with the drafter as it is, one prompt of each rank at a time.

        Args:
            end: asks all ranks whether the run ends; they call it alike.

        Returns:
            what all ranks found together, or None if the run is asked to end meanwhile.

        Raises:
            Stopped: the run ends now.
        """
        started = time.monotonic()
        drafter = self._drafter(parameters)
        mine: list[tuple[str, DecodeResult, bool]] = []
        for i in range(0, len(self.prompts), ranks.world):
            if end():
                return None
            if i + ranks.rank < len(self.prompts):
                mine.append(self._decode(drafter, self.prompts[i + ranks.rank], control))
        rows = [(name, r.accepts, len(r.tokens), wrong) for name, r, wrong in mine]
        every = [row for found in ranks.all_gather(rows) for row in found]
        by_set = {name: [a for other, accepts, *_ in every if other == name for a in accepts] for name in self.names}
        pooled = [a for accepts in by_set.values() for a in accepts]
        k = self.plan.spec.block_size
        return HeldOutResult(
            acceptance=summarise(pooled, k) if pooled else None,
            by_set={name: summarise(found, k).accept_length if found else None for name, found in by_set.items()},
            num_prompts=len(every),
            num_tokens=sum(tokens for _, _, tokens, _ in every),
            not_greedy=sum(wrong for *_, wrong in every),
            seconds=time.monotonic() - started,
        )

    @torch.no_grad()
    def _drafter(self, parameters: FlatParameters) -> PlainDrafter:
        """Over the live weights where their dtype is the target's, else over a copy."""
        embed = self.model.get_input_embeddings().weight
        flat = parameters.compute if self.plan.compute_dtype == embed.dtype else parameters.masters
        return PlainDrafter(
            self.plan.spec,
            parameters.views(flat),
            embed_weight=embed,
            head_weight=self.model.get_output_embeddings().weight,
            draft_vocab_ids=self._head_ids,
        )

    @torch.no_grad()
    def _decode(self, drafter: PlainDrafter, prompt: Prompt, control: RunControl) -> tuple[str, DecodeResult, bool]:
        def tick() -> None:
            control.beat()
            if control.stopping:
                raise Stopped

        result = speculative_decode(
            self.model,
            drafter,
            prompt.tokens,
            max_new_tokens=self.plan.config.eval.max_new_tokens,
            eos_ids=self._eos_ids,
            tick=tick,
        )
        wrong = False
        try:
            check_greedy(self.model, result, gap=NEAR_TIE_GAP[self.plan.target_dtype], name=f"prompt {prompt.key}")
        except RuntimeError as error:
            print(f"evaluation: {error}", flush=True)
            wrong = True
        return prompt.name, result, wrong


def _prompts_of(rows: TokenRows, count: int) -> PromptSet:
    """Prompts from rows of tokens: each up to the last stretch that is supervised, which is its last answer."""
    prompts = [prompt_of(*(x.tolist() for x in rows.row(i))) for i in range(min(count, len(rows)))]
    return PromptSet(name="validation", path="validation", prompts=prompts, messages=[[] for _ in prompts])


def whole_model(config: TargetConfig, target: Target) -> Any:
    """The whole causal LM, with the tensors that `target` has: its layers up to the deepest tap, embedding and head."""
    shared = target.embed_weight
    model = load_full_model(config, torch.device("cpu"), shared.dtype)
    decoder = model.get_decoder()
    for mine, theirs in zip(decoder.layers, target.decoder.layers, strict=False):
        _share(mine, theirs)
    model.get_input_embeddings().weight = nn.Parameter(shared, requires_grad=False)
    model.get_output_embeddings().weight = nn.Parameter(target.head_weight, requires_grad=False)
    return model.to(shared.device)


def _share(mine: nn.Module, theirs: nn.Module) -> None:
    """Let a module's parameters be another's, which is of the same class."""
    ours = dict(mine.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert ours[name].shape == tensor.shape, f"{name} was loaded with two shapes"
        path, _, last = name.rpartition(".")
        setattr(mine.get_submodule(path), last, nn.Parameter(tensor.detach(), requires_grad=False))


def _bytes_of_rest(plan: RunPlan, settings: Any) -> int:
    """Bytes of the layers that the run itself does not hold, from the model's configuration.

    Zero where a loss keeps them anyway, all layers where features come from a store.
    """
    if plan.teacher is not None:
        return 0
    first = plan.spec.target_layer_ids[-1] + 1 if plan.features.spec is None else 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=plan.config.target.trust_remote_code)
    layers = model.get_decoder().layers[first:]
    count: int = sum(p.numel() for layer in layers for p in layer.parameters())
    return count * plan.target_dtype.itemsize
