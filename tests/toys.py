"""Small drafters and jobs in memory: random rows, padded jobs with known samples, and a step over its buffer table.

What a test compares with is drawn here in float64 and copied into the step, so that a reference needs no package code.
`tiny.py` has the same for whole runs (a model, a tokenizer and conversations on disk).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_graph.config import LossConfig, OptimConfig
from dflash_graph.dispatch import JobShape, PaddedJob, pad_job
from dflash_graph.drafter import DrafterSpec, FlatParameters
from dflash_graph.kernels.backend import Implementation
from dflash_graph.schedule import Bucket, build_epoch, choose_buckets
from dflash_graph.static_buffers import BufferTable, TeacherSpec, slot_specs, write_metadata
from dflash_graph.step import DrafterStep, micro_step_sizes, workspace_specs

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"


def toy_spec(**changes: Any) -> DrafterSpec:
    """A drafter whose sizes all differ: D 16, H 4, Hk 2, E 6 (H * E is not D), 2 taps, K 4, vocabulary 23."""
    values: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "vocab_size": 23,
        "block_size": 4,
        "target_layer_ids": (1, 3),
        "num_target_layers": 5,
        "mask_token_id": 22,
        "layer_types": None,
        "sliding_window": None,
        "causal": False,
        "draft_vocab_size": None,
        "max_trained_length": 64,
        "target_path": "",
        "gguf_file": None,
        **changes,
    }
    values["layer_types"] = values["layer_types"] or (FULL,) * values["num_hidden_layers"]
    return DrafterSpec(**values)


class ToyRows:
    """In-memory stand-in for `TokenRows`, with the features (n, N*D) float64 that a target would give for each row."""

    fingerprint = "toy"

    def __init__(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], feature_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._rows = [(np.array(tokens, np.int32), np.array(mask, np.uint8)) for tokens, mask in rows]
        self.lengths = np.array([len(tokens) for tokens, _ in rows], np.int32)
        self.features = [torch.from_numpy(rng.standard_normal((n, feature_size))) for n in self.lengths]

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows[i]


def random_rows(
    spec: DrafterSpec, lengths: Sequence[int], *, supervised: float = 1.0, num_ids: int | None = None, seed: int = 0
) -> ToyRows:
    """Rows of random tokens, each supervised with the given probability; ids below `num_ids`, or all but the mask."""
    rng = np.random.default_rng(seed)
    ids = num_ids or spec.mask_token_id
    rows = [(rng.integers(0, ids, n).tolist(), (rng.random(n) < supervised).tolist()) for n in lengths]
    return ToyRows(rows, len(spec.target_layer_ids) * spec.hidden_size, seed)


@dataclass(frozen=True, kw_only=True)
class ToyJob:
    """A padded job beside what it was made of: `rows[r]` is (tokens, mask, features) of its row r."""

    job: PaddedJob
    rows: list[tuple[list[int], list[int], Tensor]]

    @property
    def anchors(self) -> list[tuple[int, int]]:
        """(row, position) of each live anchor."""
        return [divmod(flat, self.job.bucket_length) for flat in self.job.anchors[: self.job.num_anchors].tolist()]


def toy_shape(spec: DrafterSpec, **changes: Any) -> JobShape:
    values: dict[str, Any] = {
        "token_budget": 66,
        "num_anchors": 60,
        "block_size": spec.block_size,
        "gamma": 2.0,
        "anchor_rate": 1.0,
        "num_anchors_per_sample": None,
        "seed": 0,
        "head_index": None,
        **changes,
    }
    return JobShape(**values)


def make_jobs(rows: ToyRows, shape: JobShape, *, buckets: tuple[Bucket, ...] | None = None) -> list[ToyJob]:
    """All jobs of one epoch; by default buckets of a multiple of 4 positions, so that rows and blocks are short."""
    data: Any = rows
    if buckets is None:
        buckets = choose_buckets(rows.lengths, token_budget=shape.token_budget, num_buckets=2, multiple=4)
    schedule = build_epoch(
        rows.lengths,
        buckets,
        seed=1,
        epoch=0,
        order="shuffle",
        draw="seeded",
        min_ready=4,
        jobs_per_step=2,
        data_fingerprint=rows.fingerprint,
        token_budget=shape.token_budget,
    )
    return [
        ToyJob(
            job=pad_job(data, schedule, j, shape),
            rows=[(*(x.tolist() for x in rows.row(i)), rows.features[i]) for i in schedule.rows_of(j).tolist()],
        )
        for j in range(schedule.num_jobs)
    ]


def random_tensors(spec: DrafterSpec, seed: int = 0) -> dict[str, Tensor]:
    """Float64 drafter parameters of a size at which every part of the network matters; norm weights differ from 1."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(
            rng.standard_normal(shape) * 1.5 / sqrt(shape[1]) if len(shape) > 1 else rng.uniform(0.5, 2.0, shape)
        )
        for name, shape in spec.parameter_shapes().items()
    }


class Toy:
    """A `DrafterStep` over its own buffer table, with the float64 tensors that it was made from.

    Args:
        dtype: compute dtype; the default dtype (float64 where a test makes it so) has no compute copy.
        num_slots: S; slot 0 is used unless a test says otherwise.
        loss: what is trained; `shape` must fit it (gamma, with_teacher).
        kernels: implementation of the operators; None is torch on the CPU.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        shape: JobShape,
        *,
        dtype: torch.dtype | None = None,
        num_sizes: int = 1,
        optim: OptimConfig | None = None,
        num_slots: int = 1,
        poisoned: bool = False,
        anchor_groups: int = 1,
        loss: LossConfig | None = None,
        kernels: Implementation | None = None,
    ) -> None:
        self.spec, self.shape = spec, shape
        self.dtype = dtype or torch.get_default_dtype()
        sizes: dict[str, Any] = {
            "token_budget": shape.token_budget,
            "feature_size": len(spec.target_layer_ids) * spec.hidden_size,
            "num_anchors": shape.num_anchors,
            "block_size": spec.block_size,
            "device": CPU,
        }
        if loss is not None and loss.with_teacher:
            sizes["teacher"] = TeacherSpec(
                num_positions=shape.max_teacher_positions,
                hidden_size=spec.hidden_size,
                dtype=self.dtype,
                with_kl=loss.with_kl,
                with_labels=loss.labels == "target",
            )
        self.table = BufferTable(
            [
                *slot_specs(num_slots=num_slots, num_targets=1, feature_dtype=self.dtype, **sizes),
                *workspace_specs(dtype=self.dtype, **sizes),
            ]
        )
        if poisoned:
            self.table.poison()
        self.tensors = random_tensors(spec)
        rng = np.random.default_rng(7)
        self.embed = torch.from_numpy(rng.standard_normal((spec.vocab_size, spec.hidden_size)))
        self.head = torch.from_numpy(rng.standard_normal((spec.head_vocab_size, spec.hidden_size)))
        # Masters have the default dtype, and float32 here means "no compute copy", whatever that default is.
        compute = torch.float32 if self.dtype == torch.get_default_dtype() else self.dtype
        self.parameters = FlatParameters(spec.parameter_shapes(), device=CPU, compute_dtype=compute)
        self.parameters.load(self.tensors)
        self.step = DrafterStep(
            spec,
            self.parameters,
            optim or OptimConfig(),
            sizes=micro_step_sizes(shape.num_anchors, num_sizes),
            table=self.table,
            embed_weight=self.embed.to(self.dtype),
            head_weight=self.head.to(self.dtype),
            anchor_groups=anchor_groups,
            loss=loss,
            kernels=kernels,
        )

    def write_slot(self, toy_job: ToyJob, slot: int = 0) -> None:
        """What a target's worker does: features of real positions, and the job's metadata. Padding is left as it is."""
        features = self.table["slot.features"][slot]
        for r, (_, _, values) in enumerate(toy_job.rows):
            start = r * toy_job.job.bucket_length
            features[start : start + len(values)] = values.to(self.dtype)
        write_metadata(self.table, slot, toy_job.job)

    def load(self, toy_job: ToyJob) -> int:
        self.write_slot(toy_job)
        return self.step.load_slot(0, toy_job.job)

    def accumulate(self, *toy_jobs: ToyJob) -> None:
        """One micro-step over each job."""
        for toy_job in toy_jobs:
            self.step.micro_step(self.load(toy_job))

    def grads(self) -> dict[str, Tensor]:
        """Copies of the accumulated gradients, by parameter name."""
        return {name: grad.clone() for name, grad in self.parameters.views(self.parameters.grads).items()}

    def masters(self) -> dict[str, Tensor]:
        return {name: view.clone() for name, view in self.parameters.views(self.parameters.masters).items()}


def state_bytes(toy: Toy) -> dict[str, bytes]:
    """Masters, gradients, moments and step numbers, for bitwise comparisons."""
    drafter, optimizer = toy.step.state_tensors()
    named = drafter | optimizer | {f"grad.{name}": grad for name, grad in toy.grads().items()}
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in named.items()}


def norm_of(tensors: dict[str, Tensor]) -> float:
    return sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor ||found - truth|| / ||truth||; a tensor below 1e-6 of the whole is measured against that."""
    assert found.keys() == truth.keys()
    floor = 1e-6 * norm_of(truth)
    return {
        name: float((found[name].double() - t).norm()) / max(float(t.norm()), floor, 1e-300)
        for name, t in truth.items()
    }
