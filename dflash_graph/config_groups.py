"""The groups of a run's settings, one class each; `config.py` makes the `Config` of them.

A group checks what it can check alone when it is made. Values that follow from others are properties.
"""

import re
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetConfig:
    """The frozen language model.

    Attributes:
        path: local folder, hub id, or the folder that holds `gguf_file`.
        gguf_file: name of a GGUF file inside `path`; None for an ordinary checkpoint.
        dtype: "auto" is float32 on the CPU and bfloat16 on CUDA.
    """

    path: str
    gguf_file: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SourceConfig:
    """One source of rows, where a plain path says too little.

    Attributes:
        path: a file, a glob, a folder of files, a folder of `datasets.save_to_disk`, or `hf:org/name[:split]`.
        name: what reports call it; None is the path.
        weight: expected number of times that each of its rows appears: 2 is twice, 0.25 a quarter of the rows, 1.5
            once or twice. Which rows fall to the fraction depends on `seed` and the row, not on the run's seed.
        max_rows: only its first so many rows are read.
        split, subset: of a hub id or a `datasets` folder.
        format: of files whose names do not tell ("jsonl", "json", "parquet" or "arrow").
    """

    path: str
    name: str | None = None
    weight: float = 1.0
    seed: int = 0
    max_rows: int | None = None
    split: str | None = None
    subset: str | None = None
    format: Literal["jsonl", "json", "parquet", "arrow"] | None = None

    def __post_init__(self) -> None:
        require(bool(self.path), "path of a data source must not be empty")
        require(0 < self.weight <= 1000, f"weight of {self.path} must be above 0 and at most 1000; found {self.weight}")
        require(0 <= self.seed < 2**63, f"seed of {self.path} must be a non-negative 63-bit integer; found {self.seed}")
        require(
            self.max_rows is None or self.max_rows >= 1,
            f"max_rows of {self.path} must be at least 1; found {self.max_rows}",
        )

    def __str__(self) -> str:
        return self.name or self.path


def _read_sources(values: Any) -> Any:
    """Paths stay text; mappings become `SourceConfig`s, so that errors name the key and not a kind of union."""
    if isinstance(values, str) or not isinstance(values, (list, tuple)):
        raise ValueError(f"data.train and data.validation must be lists of sources; found {values!r}: write [{values}]")
    sources: list[str | SourceConfig] = []
    known = [f.name for f in fields(SourceConfig)]
    for value in values:
        if isinstance(value, (str, SourceConfig)):
            sources.append(value)
            continue
        if not isinstance(value, dict):
            raise ValueError(f"a data source must be a path or a mapping with `path`; found {value!r}")
        if unknown := [key for key in value if key not in known]:
            raise ValueError(f"a data source knows the keys {', '.join(known)}; found {unknown[0]!r} in {value}")
        if "path" not in value:
            raise ValueError(f"a data source must have a `path`; found {value}")
        if bools := [key for key in value if isinstance(value[key], bool)]:
            raise ValueError(f"{bools[0]} of a data source must not be true or false; found {value}")
        try:
            sources.append(SourceConfig(**value))
        except ValidationError as error:
            item = error.errors()[0]
            where = ".".join(str(part) for part in item["loc"])
            text = item["msg"].removeprefix("Value error, ")
            message = f"{where} of {value['path']}: {text}; found {item['input']!r}" if where else text
            raise ValueError(message) from None
    return tuple(sources)


Sources = Annotated[tuple[str | SourceConfig, ...], BeforeValidator(_read_sources)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Conversations and how they become rows of tokens.

    Attributes:
        train: files, globs, folders or hub ids of conversations, each a path or the settings of a `SourceConfig`.
        validation: held-out conversations for the teacher-forced validation pass, named likewise (no weights).
        holdout: instead of `validation`: rows of `train` that are held out, as a share of all (0.01) or a number of
            rows (500). Which ones depends on their prompts alone, and rows of one prompt are held out together. With a
            share, added data moves no row between the sets; with a number, added data may take the place of held-out
            rows, which then are trained on.
        deduplicate: "exact" drops rows whose whole content stood before (Unicode form and white space aside), "prompt"
            rows whose prompt did; over all sources, and against the held-out rows.
        max_length: longest row in tokens.
        overlong: what happens to longer ones: "truncate" cuts their end, "drop" drops them. Both are counted.
        chat_template: path of a Jinja file that replaces the tokenizer's own template.
        workers: processes that tokenise; 1 is this process, None one per core where the data is worth it. The result
            does not depend on it.
        cache_dir: where tokenised rows are kept; None is `.cache/dflash_graph` under the working folder.
    """

    train: Sources
    validation: Sources = ()
    holdout: int | float | None = None
    deduplicate: Literal["none", "exact", "prompt"] = "none"
    max_length: int = 4096
    overlong: Literal["truncate", "drop"] = "truncate"
    chat_template: str | None = None
    workers: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        require(len(self.train) > 0, "data.train must name at least one JSONL file, or another source")
        require(self.max_length >= 2, f"data.max_length must be at least 2 tokens; found {self.max_length}")
        require(
            self.workers is None or self.workers >= 1, f"data.workers must be at least 1 process; found {self.workers}"
        )
        holdout = self.holdout
        require(
            holdout is None or (0 < holdout < 1 if isinstance(holdout, float) else holdout >= 1),
            f"data.holdout must be a share between 0 and 1 or a whole number of rows; found {holdout}",
        )
        require(
            holdout is None or not self.validation,
            "data.holdout takes its rows from data.train and data.validation names rows of their own: set one of them; "
            f"found {holdout} and {len(self.validation)} sources",
        )
        for source in self.validation:
            require(
                isinstance(source, str) or source.weight == 1,
                f"a source of data.validation must have weight 1; found {source}",
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Jobs, their order, and the ring they pass through.

    Attributes:
        token_budget: T, the positions of one job; None is max(16384, data.max_length).
        num_buckets: at most so many row lengths; None is 16.
        order: "shuffle" puts all buckets' jobs into one random list; "interleave" spreads each bucket evenly.
        draw: how the drafter picks its next job ("seeded", "ready" or "round_robin").
        jobs_per_step: jobs of one optimizer step.
        slots: S, slots of the ring; None is as many as needed, 20 at most.
        min_ready: ready slots below which the drafter waits; None is min(10, jobs left).
        padding_workers: host threads that pad jobs.
        reorder_window: jobs that may be padded or waiting to be emitted at once; None is slots - 2.
        wait_timeout_s: longest wait of any thread for another before the run ends with an explanation.
    """

    token_budget: int | None = None
    num_buckets: int = 16
    order: Literal["shuffle", "interleave"] = "shuffle"
    draw: Literal["seeded", "ready", "round_robin"] = "seeded"
    jobs_per_step: int = 8
    slots: int | None = None
    min_ready: int | None = None
    padding_workers: int = 2
    reorder_window: int | None = None
    wait_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("num_buckets", "jobs_per_step", "padding_workers"):
            require(getattr(self, name) >= 1, f"schedule.{name} must be at least 1; found {getattr(self, name)}")
        for name in ("token_budget", "slots", "min_ready", "reorder_window"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"schedule.{name} must be at least 1; found {value}")
        require(self.wait_timeout_s > 0, f"schedule.wait_timeout_s must be positive; found {self.wait_timeout_s}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DrafterConfig:
    """The drafter's architecture, its anchors and the decay of its loss weights.

    Attributes:
        block_size: K, positions of a block; position 0 is the anchor's real token.
        target_layer_ids: taps; id k is the output of decoder layer k (0-based); None applies the default rule.
        mask_token_id: id of the mask token; None takes the tokenizer's mask token or a reserved id that the data
            never uses.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size: None takes the target's.
        layer_types: "full_attention" or "sliding_attention" per layer; None is full everywhere.
        sliding_window: context positions p with query - p < sliding_window are visible to a sliding layer.
        causal: True lets a block position see only itself and earlier positions of its block.
        draft_vocab_size: reduced head over the most frequent ids of the training data; None is the full head.
        anchor_rate: share of a row's candidate anchors drawn per epoch.
        num_anchors_per_sample: draw so many per row instead of a share.
        num_anchors: A, anchors a job can hold; None is token_budget // 8.
        num_micro_step_sizes: a micro-step exists in so many sizes, equal shares of A.
        loss_decay_gamma: decay of the loss weight along the block; None is the default of the block size.
        init: "random", "target" (the target's layers after the deepest tap), or the folder of a checkpoint or of a
            released drafter.
        compute_dtype: "auto" is float32 on the CPU and bfloat16 on CUDA; masters and moments are always float32.
    """

    num_hidden_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: int | None = None
    causal: bool = False
    draft_vocab_size: int | None = None
    anchor_rate: float = 0.25
    num_anchors_per_sample: int | None = None
    num_anchors: int | None = None
    num_micro_step_sizes: int = 4
    loss_decay_gamma: float | None = None
    init: str = "random"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        require(self.num_hidden_layers >= 1, f"drafter.num_hidden_layers must be >= 1; found {self.num_hidden_layers}")
        require(self.block_size >= 2, f"drafter.block_size must be at least 2; found {self.block_size}")
        require(0 < self.anchor_rate <= 1, f"drafter.anchor_rate must be in (0, 1]; found {self.anchor_rate}")
        require(self.num_micro_step_sizes >= 1, "drafter.num_micro_step_sizes must be at least 1")
        for name in (
            "num_anchors_per_sample", "num_anchors", "draft_vocab_size", "sliding_window", "num_attention_heads",
            "num_key_value_heads", "head_dim", "intermediate_size",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value >= 1, f"drafter.{name} must be at least 1; found {value}")
        gamma = self.loss_decay_gamma
        require(gamma is None or gamma > 0, f"drafter.loss_decay_gamma must be positive; found {gamma}")
        types = self.layer_types
        if types is not None:
            require(
                len(types) == self.num_hidden_layers,
                f"drafter.layer_types must name all {self.num_hidden_layers} layers; found {len(types)}",
            )
        has_sliding = types is not None and "sliding_attention" in types
        require(
            has_sliding == (self.sliding_window is not None),
            "drafter.sliding_window and a 'sliding_attention' entry of drafter.layer_types go together: set both or "
            f"neither; found sliding_window={self.sliding_window}, layer_types={types}",
        )

    @property
    def gamma(self) -> float:
        """Decay constant of weight(k) = exp(-(k-1)/gamma); 7, 5 and 4 are the family's values for K = 16, 10, 8."""
        if self.loss_decay_gamma is not None:
            return self.loss_decay_gamma
        return {16: 7.0, 10: 5.0, 8: 4.0}.get(self.block_size, max(1.0, self.block_size / 2.25))

    @property
    def resolved_layer_types(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LossConfig:
    """What a trained row costs: (1 - kl_weight) * cross-entropy + kl_weight * KL(target || drafter), and its weight.

    Attributes:
        weighting: "decay" is exp(-(k-1)/gamma) of `drafter.loss_decay_gamma`; "d_pace" follows the drafter's own
            confidence along the block (D-PACE) and has no gamma.
        d_pace_alpha: with "d_pace": 0 follows the confidence wholly, 1 not at all (a row weighs as much as rows of its
            block follow, itself included).
        labels: of the cross-entropy: "data" are the conversation's tokens; "target" is what the target itself would
            say there (its most likely token). Which rows are trained follows the data's loss mask either way.
        kl_weight: share of the KL divergence from the target's distribution.
    """

    weighting: Literal["decay", "d_pace"] = "decay"
    d_pace_alpha: float = 0.5
    labels: Literal["data", "target"] = "data"
    kl_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("d_pace_alpha", "kl_weight"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"loss.{name} must be in [0, 1]; found {value}")
        require(
            self.weighting == "d_pace" or self.d_pace_alpha == 0.5,
            f"loss.d_pace_alpha={self.d_pace_alpha} has no effect with loss.weighting={self.weighting}; set "
            "loss.weighting=d_pace or leave it out",
        )

    @property
    def with_kl(self) -> bool:
        return self.kl_weight > 0

    @property
    def with_teacher(self) -> bool:
        """The target's distribution is needed: its last layers, its final norm and its head run, too."""
        return self.with_kl or self.labels == "target"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    """AdamW over flat float32 masters. The learning rate is a function of jobs trained / total jobs.

    Attributes:
        warmup_ratio: share of all jobs over which the rate rises linearly from 0.
        min_lr_ratio: end of the cosine or linear decay, as a share of `lr`.
        max_skipped_steps: so many skipped steps in a row (non-finite gradient, or no trained row) end the run.
    """

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 5

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), f"optim.lr must be positive and finite; found {self.lr}")
        require(all(0 <= b < 1 for b in self.betas), f"optim.betas must lie in [0, 1); found {self.betas}")
        require(self.eps > 0, f"optim.eps must be positive; found {self.eps}")
        require(self.weight_decay >= 0, f"optim.weight_decay must not be negative; found {self.weight_decay}")
        require(0 <= self.warmup_ratio < 1, f"optim.warmup_ratio must be in [0, 1); found {self.warmup_ratio}")
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio must be in [0, 1]; found {self.min_lr_ratio}")
        require(self.max_grad_norm > 0, f"optim.max_grad_norm must be positive; found {self.max_grad_norm}")
        require(self.max_skipped_steps >= 1, "optim.max_skipped_steps must be at least 1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RankConfig:
    """Devices of one rank, such as drafter cuda:0 and targets [cuda:1, cuda:2]."""

    drafter: str
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.targets) >= 1, f"every rank needs a target; found none beside drafter {self.drafter}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceConfig:
    """Where the work runs.

    Attributes:
        device: "cpu" or "cuda".
        num_targets: target workers of this process, each with its own copy of the target.
        target_threads, drafter_threads: CPU threads of one target worker and of the drafter worker; None shares the
            machine's cores between them. Ignored by CUDA kernels.
        kernels: implementation of the package's own operators; "auto" is Triton on CUDA and plain torch on the CPU.
        target_devices: a CUDA device for each target, such as ["cuda:1", "cuda:2"]; None puts all on the drafter's. A
            target too large for one device names several: "cuda:1+cuda:2"; it then runs without a graph.
        anchor_groups: parts in which a micro-step runs a job's anchors, one after the other, so that activations of one
            part exist at a time; None is the fewest of 1, 2, 4, 8 that fit. Sums round differently for another number.
        layout: of the ranks on a machine with several GPUs: "colocated", each GPU holds target and drafter; "split",
            some hold targets that feed the drafters on the others; "auto", the faster one that fits.
        split_targets: with layout=split, GPUs that hold targets; None is the fastest number.
        ranks: processes on this machine, each with a drafter; a number of equal ones, or a list of {drafter: cuda:0,
            targets: [cuda:1, cuda:2]}. None follows the layout; on a CPU it is one.
        rank_jobs: jobs of a step that each rank takes, all machines' ranks in order; None is in proportion to their
            targets.
        rank_timeout_s: a rank without a sign of life for so long ends the run.
        check_every: steps between two comparisons of all ranks' parameters.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    num_targets: int = 1
    target_devices: tuple[str, ...] | None = None
    target_threads: int | None = None
    drafter_threads: int | None = None
    kernels: Literal["auto", "torch", "triton"] = "auto"
    anchor_groups: int | None = None
    layout: Literal["auto", "colocated", "split"] = "auto"
    split_targets: int | None = None
    ranks: int | tuple[RankConfig, ...] | None = None
    rank_jobs: tuple[int, ...] | None = None
    rank_timeout_s: float = 60.0
    check_every: int = 100

    def __post_init__(self) -> None:
        for name in (
            "num_targets",
            "target_threads",
            "drafter_threads",
            "anchor_groups",
            "split_targets",
            "check_every",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"devices.{name} must be at least 1; found {value}")
        self._check_ranks()
        names = self.target_devices
        if names is not None:
            require(
                self.device == "cuda" and all(re.fullmatch(r"cuda:\d+(\+cuda:\d+)*", name) for name in names),
                "devices.target_devices must name CUDA devices, such as cuda:1, beside devices.device=cuda; found "
                f"{list(names)} beside {self.device}",
            )
            require(
                len(names) == self.num_targets,
                f"devices.target_devices must name one device for each of the {self.num_targets} targets "
                f"(devices.num_targets); found {len(names)}",
            )

    def _check_ranks(self) -> None:
        count = self.ranks if isinstance(self.ranks, int) or self.ranks is None else len(self.ranks)
        require(count is None or count >= 1, f"devices.ranks must be at least 1; found {count}")
        require(self.rank_timeout_s > 0, f"devices.rank_timeout_s must be positive; found {self.rank_timeout_s}")
        require(
            self.rank_jobs is None or (min(self.rank_jobs, default=-1) >= 0 and sum(self.rank_jobs) > 0),
            f"devices.rank_jobs must not be negative, nor all 0; found {self.rank_jobs}",
        )
        require(
            self.layout == "auto" or (self.device == "cuda" and count is None and self.target_devices is None),
            f"devices.layout={self.layout} places ranks on GPUs by itself: it needs devices.device=cuda, and neither "
            "devices.ranks nor devices.target_devices",
        )
        require(
            self.split_targets is None or self.layout == "split",
            "devices.split_targets has no effect without devices.layout=split",
        )
        if isinstance(self.ranks, tuple):
            require(
                self.num_targets == 1 and self.target_devices is None,
                "a list of devices.ranks names all targets: leave devices.num_targets and devices.target_devices out",
            )
            names = [name for rank in self.ranks for name in (rank.drafter, *rank.targets)]
            pattern = r"cpu" if self.device == "cpu" else r"cuda:\d+(\+cuda:\d+)*"
            wrong = [name for name in names if not re.fullmatch(pattern, name)]
            require(not wrong, f"devices.ranks must name devices of kind {self.device}; found {', '.join(wrong)}")

    @property
    def implementation(self) -> Literal["torch", "triton"] | None:
        """What the operators' `make_workspace` takes; None lets it choose."""
        return None if self.kernels == "auto" else self.kernels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GraphConfig:
    """How the steps of target and drafter run.

    Attributes:
        mode: "cuda_graph" captures each step once and replays it; "recorded" is its stand-in on a CPU, for tests;
            "eager" runs the functions themselves; "debug" does so under watch. "auto" is cuda_graph on CUDA, and eager
            on a CPU, where rows that a job leaves empty are then skipped.
        warmups: runs of each step before its capture.
        debug_steps, debug_every: in mode debug, the first so many calls of each step are checked, and one in so many
            after them; None checks no more.
        strict: a pair of GPUs that cannot copy to each other directly is an error, not staged through host memory.
    """

    mode: Literal["auto", "cuda_graph", "eager", "recorded", "debug"] = "auto"
    warmups: int = 3
    debug_steps: int = 3
    debug_every: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("warmups", "debug_steps", "debug_every"):
            value = getattr(self, name)
            least = 3 if name == "warmups" else 1  # libraries settle in the first two runs
            require(value is None or value >= least, f"graphs.{name} must be at least {least}; found {value}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are written (steps) and how many stay; the best by held-out accept_length is always kept."""

    every: int = 1000
    keep: int = 3

    def __post_init__(self) -> None:
        require(self.every >= 1, f"checkpoint.every must be at least 1 step; found {self.every}")
        require(self.keep >= 1, f"checkpoint.keep must be at least 1; found {self.keep}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Speculative decoding of held-out prompts during training, with the drafter as it is (steps).

    Attributes:
        every: decode the prompts every so many steps and at the end; None never does.
        prompts: sets of conversations, each "path" or "name=path"; () takes the held-out rows, each up to its last
            answer.
        num_prompts: prompts in all, the first of each set in equal shares.
        max_new_tokens: of each answer.
    """

    every: int | None = None
    prompts: tuple[str, ...] = ()
    num_prompts: int = 32
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("every", "num_prompts", "max_new_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"eval.{name} must be at least 1; found {value}")
        require(
            self.every is not None or (self.prompts, self.num_prompts, self.max_new_tokens) == ((), 32, 128),
            "eval.prompts, eval.num_prompts and eval.max_new_tokens have no effect without eval.every; set it to a "
            "number of steps or leave them out",
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FeaturesConfig:
    """Where the target's hidden states come from.

    Attributes:
        source: "online" runs the target in every epoch; "store" reads what was written to disk once.
        path: folder of the store.
        dtype: of the features. "auto" is the drafter's compute dtype online, and what the store holds or, when it is
            made, the compute dtype. Online features are rounded to float32 or bfloat16; "fp8" is a store's (e4m3 with
            an exponent per token and tap).
        missing: rows that the store lacks are an "error", or "generate": the target makes them when they first come,
            and they are kept.
        readers: threads of each worker that read rows at once.
        shard_mib: the store grows by files of about this size.
    """

    source: Literal["online", "store"] = "online"
    path: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    missing: Literal["error", "generate"] = "error"
    readers: int = 4
    shard_mib: int = 1024

    def __post_init__(self) -> None:
        for name in ("readers", "shard_mib"):
            require(getattr(self, name) >= 1, f"features.{name} must be at least 1; found {getattr(self, name)}")
        stored = self.source == "store"
        require(
            stored or (self.path, self.missing, self.readers, self.shard_mib) == (None, "error", 4, 1024),
            "features.path, features.missing, features.readers and features.shard_mib have no effect with "
            "features.source=online; set features.source=store or leave them out",
        )
        require(not stored or bool(self.path), "features.source=store needs features.path, the folder of the store")
        require(
            stored or self.dtype != "fp8",
            "features.dtype=fp8 is how a store keeps features; online they are float32 or bfloat16. Set "
            "features.source=store, or another features.dtype",
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig:
    """What is reported and how often (steps).

    Attributes:
        every: metrics are read from the device and written every so many steps.
        top_k_every: top-k accuracies are computed every so many steps.
        validate_every: teacher-forced validation every so many steps; None is at each epoch's end.
        tensorboard: write TensorBoard event files into the run folder.
        trackers: services that get the same numbers: "wandb", "trackio", "mlflow". Each is configured as its own
            package says (environment, log-in, offline mode).
        project: of the trackers. run_name: there; None is the run folder's name.
    """

    every: int = 10
    top_k_every: int = 50
    validate_every: int | None = None
    tensorboard: bool = True
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = ()
    project: str = "dflash_graph"
    run_name: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "top_k_every", "validate_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"log.{name} must be at least 1 step; found {value}")
        require(len(set(self.trackers)) == len(self.trackers), f"log.trackers repeats one; found {self.trackers}")
