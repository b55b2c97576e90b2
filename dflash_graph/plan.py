"""Everything of a run that is known before any weight is loaded: rows, buckets, shapes, specs and buffers.

`make_plan` reads the data, the target's configuration and the tokenizer, checks them against each other, and decides
every shape once. A plan that cannot train raises here, before any expensive work. Called by `training.py`.
"""

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_graph.config import Config, LossConfig
from dflash_graph.data import TokenRows, choose_mask_token, load_tokenizer, prepare_run
from dflash_graph.dispatch import JobShape
from dflash_graph.drafter import DrafterSpec
from dflash_graph.kernels.backend import choose_implementation
from dflash_graph.schedule import Bucket, EpochSchedule, build_epoch, choose_buckets
from dflash_graph.serving_layouts import check_servable
from dflash_graph.static_buffers import BufferSpec, TeacherSpec, check_ring, default_slots, slot_specs
from dflash_graph.step import micro_step_sizes, workspace_specs
from dflash_graph.store_plan import FeaturePlan, plan_features
from dflash_graph.target import (
    ModelFacts,
    check_target_layer_ids,
    default_target_layer_ids,
    read_facts,
    resolve_dtype,
    weights_digest,
)

VALIDATION_EPOCH = 2**31  # key of the validation pass's anchor draw; no training epoch reaches it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one rank's workers run, and with how many ranks it shares its machine."""

    drafter: torch.device
    targets: tuple[tuple[torch.device, ...], ...]  # more than one where a target is spread over devices
    ranks_here: int = 1


def default_placement(config: Config) -> Placement:
    """A run of one process: the drafter on the CPU or the first GPU, targets where the settings say."""
    devices = config.devices
    drafter = torch.device("cuda:0" if devices.device == "cuda" else "cpu")
    names = devices.target_devices or (str(drafter),) * devices.num_targets
    return Placement(drafter=drafter, targets=tuple(map(parse_devices, names)))


def parse_devices(name: str) -> tuple[torch.device, ...]:
    """The devices of one target: "cuda:1", or "cuda:1+cuda:2" for one that is spread over two."""
    return tuple(torch.device(part) for part in name.split("+"))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Shapes, specs and data of a run.

    Attributes:
        placement: devices of this rank; whatever they are called, a worker on one has it as its current device.
        teacher: what the loss needs of the target's own distribution, or None.
        head_ids: (V,) the full ids of the reduced head in head order, or None.
    """

    config: Config
    rows: TokenRows
    validation_rows: TokenRows | None
    facts: ModelFacts
    spec: DrafterSpec
    buckets: tuple[Bucket, ...]
    job_shape: JobShape
    teacher: TeacherSpec | None
    head_ids: np.ndarray | None
    head_coverage: float
    slots: int
    min_ready: int
    window: int
    placement: Placement
    features: FeaturePlan

    @property
    def device(self) -> torch.device:
        """The drafter's device."""
        return self.placement.drafter

    @property
    def target_devices(self) -> tuple[torch.device, ...]:
        """The device of each target, where its buffers lie; of one that is spread over several, the first."""
        return tuple(devices[0] for devices in self.placement.targets)

    @property
    def num_targets(self) -> int:
        return len(self.placement.targets)

    @property
    def workers_here(self) -> int:
        """Workers of all ranks that share this machine's cores."""
        return (self.num_targets + 1) * self.placement.ranks_here

    @property
    def target_dtype(self) -> torch.dtype:
        return resolve_dtype(self.config.target.dtype, self.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        return resolve_dtype(self.config.drafter.compute_dtype, self.device)

    @property
    def validation_shape(self) -> JobShape:
        """Held-out jobs: decayed cross-entropy against the data's labels, whatever is trained, so that runs compare."""
        return replace(self.job_shape, gamma=self.config.drafter.gamma, with_teacher=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        return micro_step_sizes(self.config.num_anchors, self.config.drafter.num_micro_step_sizes)

    @property
    def anchor_groups(self) -> int:
        """Parts of a micro-step: as set, or the fewest of 1, 2, 4, 8 whose kept activations fit; the same at resume."""
        chosen = self.config.devices.anchor_groups
        if chosen is not None:
            return min(chosen, self.config.num_anchors)
        counts = [count for count in (1, 2, 4, 8) if count <= self.config.num_anchors]
        return next((n for n in counts if self.kept_bytes(n) <= _activation_limit(self.device)), counts[-1])

    def kept_bytes(self, anchor_groups: int) -> int:
        """Bytes of activations that one part of a micro-step of all anchors keeps for its backward."""
        anchors = math.ceil(self.config.num_anchors / anchor_groups)
        return self.spec.kept_bytes(self.config.token_budget, anchors, self.compute_dtype.itemsize)

    @property
    def jobs_per_epoch(self) -> int:
        return self.first_epoch.num_jobs

    @property
    def total_jobs(self) -> int:
        return self.jobs_per_epoch * self.config.epochs

    @cached_property
    def first_epoch(self) -> EpochSchedule:
        return self.build_epoch(0)

    def build_epoch(self, epoch: int, min_ready: int | None = None) -> EpochSchedule:
        """The schedule of training epoch `epoch`; a pure function of the plan, the epoch and min_ready (the plan's)."""
        schedule = self.config.schedule
        return build_epoch(
            self.rows.lengths,
            self.buckets,
            seed=self.config.seed,
            epoch=epoch,
            order=schedule.order,
            draw=schedule.draw,
            min_ready=min_ready or self.min_ready,
            jobs_per_step=schedule.jobs_per_step,
            data_fingerprint=self.rows.fingerprint,
            token_budget=self.config.token_budget,
        )

    @cached_property
    def validation_epoch(self) -> EpochSchedule | None:
        """The jobs of the teacher-forced validation pass, the same at every pass."""
        if self.validation_rows is None:
            return None
        return build_epoch(
            self.validation_rows.lengths,
            self.buckets,
            seed=self.config.seed,
            epoch=VALIDATION_EPOCH,
            order="shuffle",
            draw="seeded",
            min_ready=1,
            jobs_per_step=1,
            data_fingerprint=self.validation_rows.fingerprint,
            token_budget=self.config.token_budget,
        )

    def buffer_specs(self) -> list[BufferSpec]:
        """Every buffer that a target or a micro-step writes or reads (parameters and optimizer state apart)."""
        config, spec = self.config, self.spec
        shape: dict[str, Any] = {
            "token_budget": config.token_budget,
            "feature_size": len(spec.target_layer_ids) * spec.hidden_size,
            "num_anchors": config.num_anchors,
            "block_size": spec.block_size,
            "device": self.device,
            "teacher": self.teacher,
        }
        return [
            *slot_specs(
                num_slots=self.slots,
                num_targets=self.num_targets,
                target_devices=self.target_devices,
                feature_dtype=self.compute_dtype,
                output_dtype=self.features.output_dtype,
                **shape,
            ),
            *workspace_specs(dtype=self.compute_dtype, **shape),
        ]

    def identity(self) -> dict[str, Any]:
        """Derived facts that a resumed run must share with its checkpoint."""
        return {
            "data_fingerprint": self.rows.fingerprint,
            "buckets": [[bucket.length, bucket.rows] for bucket in self.buckets],
            "target_layer_ids": list(self.spec.target_layer_ids),
            "mask_token_id": self.spec.mask_token_id,
            "jobs_per_epoch": self.jobs_per_epoch,
            "dtypes": [str(self.target_dtype), str(self.compute_dtype)],
            "target_weights": weights_digest(self.config.target),
            **self.features.identity(self.compute_dtype),
        }

    def __str__(self) -> str:
        epoch, config = self.first_epoch, self.config
        jobs = np.bincount(epoch.job_bucket, minlength=len(self.buckets))
        buckets = ", ".join(f"{b.length}x{b.rows}: {n}" for b, n in zip(self.buckets, jobs, strict=True))
        head = f"{self.spec.head_vocab_size} ids, {self.head_coverage:.2%} of supervised tokens"
        return (
            f"rows      {len(self.rows)} kept of {self.rows.report.rows_in}; "
            f"{self.rows.report.num_tokens} tokens, {self.rows.report.supervised_share:.1%} supervised\n"
            f"jobs      {epoch.num_jobs} per epoch of {config.token_budget} positions, "
            f"padding {epoch.padding_share(self.rows.lengths):.1%}; bucket length x rows: jobs = {buckets}\n"
            f"drafter   {self.spec.num_hidden_layers} layers, block {self.spec.block_size}, "
            f"taps {list(self.spec.target_layer_ids)} of {self.spec.num_target_layers} layers, "
            f"mask token {self.spec.mask_token_id}, head {head}\n"
            f"anchors   {config.num_anchors} per job, micro-steps of {list(self.sizes)}, "
            f"anchor groups {self.anchor_groups}, activations {self.kept_bytes(self.anchor_groups) / 2**20:.0f} MiB\n"
            f"ring      {self.slots} slots, min_ready {self.min_ready}, reorder window {self.window}, "
            f"draw {config.schedule.draw}" + self._describe_loss() + self.features.note
        )

    def _describe_loss(self) -> str:
        """Lines on the loss where it is not the default one, with what it costs the target."""
        loss, teacher = self.config.loss, self.teacher
        text = ""
        if loss != LossConfig():
            weighting = f"d_pace, alpha {loss.d_pace_alpha}" if loss.weighting == "d_pace" else "decay"
            text += f"\nloss      labels of the {loss.labels}, KL weight {loss.kl_weight}, weighting {weighting}"
        if teacher is not None:
            u, v, d = teacher.num_positions, self.spec.head_vocab_size, teacher.hidden_size
            flops = (4 if teacher.with_kl else 2) * u * v * d
            more = self.facts.num_hidden_layers - 1 - self.spec.target_layer_ids[-1]
            text += (
                f"\nteacher   {more} more target layers, and its head at up to {u} positions of a job x {v} head rows: "
                f"{flops / 1e9:.4g} GFLOP"
            )
        return text


def make_plan(config: Config, placement: Placement | None = None) -> RunPlan:
    """Read data and configurations and decide every shape; nothing is loaded onto a device.

    Args:
        placement: of one rank of several; None is `default_placement`.

    Raises:
        ValueError: data, target and settings do not fit each other; the message says which and what to change.
    """
    if config.devices.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("devices.device is 'cuda', but torch finds no CUDA device; use devices.device=cpu")
    known = torch.cuda.device_count()
    names = [part for name in config.devices.target_devices or () for part in name.split("+")]
    absent = [name for name in names if int(name.removeprefix("cuda:")) >= known]
    if absent:
        raise ValueError(
            f"devices.target_devices must exist; torch finds {known} CUDA devices, without {', '.join(absent)}"
        )
    _check_numbers(config)
    drafter = config.drafter
    if drafter.init not in ("random", "target") and not Path(drafter.init).is_dir():
        raise ValueError(
            f"drafter.init must be 'random', 'target', or the folder of a checkpoint or a released drafter; found "
            f"{drafter.init!r}, which is no folder"
        )
    facts = read_facts(config.target)
    taps = drafter.target_layer_ids
    if taps is None:
        taps = default_target_layer_ids(facts.num_hidden_layers, drafter.num_hidden_layers)
    check_target_layer_ids(taps, facts.num_hidden_layers)
    tokenizer = load_tokenizer(config.target)
    prepared = prepare_run(config.data, tokenizer)
    rows, validation = prepared.rows, prepared.validation
    _check_vocabulary(rows, facts.vocab_size)
    all_rows = [rows] if validation is None else [rows, validation]
    mask_token_id = choose_mask_token(tokenizer, facts.vocab_size, *all_rows, mask_token_id=drafter.mask_token_id)
    head_ids, coverage = _reduced_head(rows, facts.vocab_size, drafter.draft_vocab_size)
    lengths = rows.lengths if validation is None else np.concatenate([rows.lengths, validation.lengths])
    buckets = choose_buckets(lengths, token_budget=config.token_budget, num_buckets=config.schedule.num_buckets)
    spec = _spec(config, facts, taps, mask_token_id, None if head_ids is None else len(head_ids), buckets[-1].length)
    check_servable(spec)
    job_shape = JobShape(
        token_budget=config.token_budget,
        num_anchors=config.num_anchors,
        block_size=spec.block_size,
        gamma=drafter.gamma if config.loss.weighting == "decay" else None,
        anchor_rate=drafter.anchor_rate,
        num_anchors_per_sample=drafter.num_anchors_per_sample,
        seed=config.seed,
        head_index=None if head_ids is None else _invert(head_ids, facts.vocab_size),
        with_teacher=config.loss.with_teacher,
    )
    teacher = _teacher_spec(config, job_shape.max_teacher_positions, facts.hidden_size)
    placement = placement or default_placement(config)
    slots, min_ready, window = _ring_sizes(config, len(taps) * facts.hidden_size, teacher, placement)
    compute_dtype = resolve_dtype(drafter.compute_dtype, placement.drafter)
    return RunPlan(
        config=config,
        rows=rows,
        validation_rows=validation,
        facts=facts,
        spec=spec,
        buckets=buckets,
        job_shape=job_shape,
        teacher=teacher,
        head_ids=head_ids,
        head_coverage=coverage,
        slots=slots,
        min_ready=min_ready,
        window=window,
        placement=placement,
        features=plan_features(config, all_rows, tuple(taps), facts.hidden_size, compute_dtype),
    )


def _check_numbers(config: Config) -> None:
    """Refuse kernels and dtypes that do not go together."""
    device = torch.device(config.devices.device)
    target = resolve_dtype(config.target.dtype, device)
    compute = resolve_dtype(config.drafter.compute_dtype, device)
    choose_implementation(config.devices.implementation, device, compute)
    # The KL needs the very same head on both sides; in float32 the drafter's copy of a 16-bit head is exact.
    if config.loss.with_kl and compute not in (target, torch.float32):
        raise ValueError(
            f"loss.kl_weight > 0 needs the target's dtype, or float32, in the drafter; found {target} and {compute}. "
            "Set drafter.compute_dtype or target.dtype"
        )


def _check_vocabulary(rows: TokenRows, vocab_size: int) -> None:
    highest = int(rows.tokens.max())
    if highest >= vocab_size:
        raise ValueError(
            f"the data's token ids must be rows of the target's embedding, 0..{vocab_size - 1}; found {highest}. "
            "The tokenizer and the model do not belong together"
        )


def _reduced_head(rows: TokenRows, vocab_size: int, size: int | None) -> tuple[np.ndarray | None, float]:
    """Full ids of the `size` most frequent supervised tokens, ascending, and the share of tokens they cover."""
    if size is None:
        return None, 1.0
    if size > vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size must be at most the target's vocabulary, {vocab_size}; found {size}"
        )
    counts = rows.token_counts(vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    return ids, float(counts[ids].sum() / counts.sum())


def _invert(head_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    index = np.full(vocab_size, -1, dtype=np.int32)
    index[head_ids] = np.arange(len(head_ids), dtype=np.int32)
    return index


def _spec(
    config: Config, facts: ModelFacts, taps: tuple[int, ...], mask_token_id: int, head: int | None, longest: int
) -> DrafterSpec:
    drafter = config.drafter
    return DrafterSpec(
        hidden_size=facts.hidden_size,
        num_hidden_layers=drafter.num_hidden_layers,
        num_attention_heads=drafter.num_attention_heads or facts.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads or facts.num_key_value_heads,
        head_dim=drafter.head_dim or facts.head_dim,
        intermediate_size=drafter.intermediate_size or facts.intermediate_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        vocab_size=facts.vocab_size,
        block_size=drafter.block_size,
        target_layer_ids=tuple(taps),
        num_target_layers=facts.num_hidden_layers,
        mask_token_id=mask_token_id,
        layer_types=drafter.resolved_layer_types,
        sliding_window=drafter.sliding_window,
        causal=drafter.causal,
        draft_vocab_size=head,
        max_trained_length=longest,
        target_path=config.target.path,
        gguf_file=config.target.gguf_file,
    )


def _teacher_spec(config: Config, num_positions: int, hidden_size: int) -> TeacherSpec | None:
    loss = config.loss
    if not loss.with_teacher:
        return None
    return TeacherSpec(
        num_positions=num_positions,
        hidden_size=hidden_size,
        dtype=resolve_dtype(config.target.dtype, torch.device(config.devices.device)),
        with_kl=loss.with_kl,
        with_labels=loss.labels == "target",
    )


def _ring_sizes(
    config: Config, feature_size: int, teacher: TeacherSpec | None, placement: Placement
) -> tuple[int, int, int]:
    """(slots, min_ready, reorder window); slots default to min(20, what half the free memory holds)."""
    schedule, targets = config.schedule, len(placement.targets)
    min_ready = schedule.min_ready or 10
    slots = schedule.slots
    if slots is None:
        item = 2 if config.devices.device == "cuda" else 4
        slot_bytes = config.token_budget * feature_size * item + (0 if teacher is None else teacher.nbytes)
        fits = _free_bytes(placement) // 2 // slot_bytes
        slots = default_slots(min_ready, targets, fits)
    window = schedule.reorder_window or max(1, slots - 2)
    check_ring(slots, min_ready, targets, window)
    return slots, min_ready, window


def _activation_limit(device: torch.device) -> int:
    """Bytes that a micro-step's kept activations may take: a quarter of the GPU; on a CPU what helps its caches."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 4
    return 128 * 2**20


def _free_bytes(placement: Placement) -> int:
    """Free memory of the drafter's device; on a CPU this rank's share of it."""
    if placement.drafter.type == "cuda":
        return torch.cuda.mem_get_info(placement.drafter)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // placement.ranks_here
