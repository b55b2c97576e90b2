"""dflash_graph's own step, through its public parts: pad the job, load the slot, run the micro-step."""

from contextlib import AbstractContextManager
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.peers.contestant import Contestant
from bench.peers.problem import Problem
from dflash_graph import padding
from dflash_graph.config import OptimConfig
from dflash_graph.drafter import DrafterSpec, FlatParameters
from dflash_graph.kernels import backend
from dflash_graph.padding import JobShape, pad_job
from dflash_graph.schedule import Bucket, build_epoch
from dflash_graph.static_buffers import BufferTable, slot_specs, write_metadata
from dflash_graph.step import DrafterStep, workspace_specs


class Rows:
    """The problem's rows as a data set of full, supervised rows."""

    fingerprint = "bench"

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.numpy().astype(np.int32)
        self.lengths = np.full(len(self.tokens), self.tokens.shape[1], np.int32)
        self.places = np.arange(len(self.tokens))  # row of the job that each sample becomes

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[self.places[i]], np.ones(self.tokens.shape[1], np.uint8)


class Ours(Contestant):
    note = "padding, the sanitising copy of the features, and the label's rank of every row are part of the step"

    def __init__(self, problem: Problem, anchor_groups: int = 1) -> None:
        shape, cpu = problem.shape, torch.device("cpu")
        spec = DrafterSpec(
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            target_layer_ids=tuple(range(1, 2 * shape.num_taps, 2)),
            num_target_layers=2 * shape.num_taps + 1,
            mask_token_id=shape.mask_token_id,
            layer_types=("full_attention",) * shape.num_layers,
            sliding_window=None,
            causal=False,
            draft_vocab_size=None,
            max_trained_length=shape.row_length,
            target_path="",
            gguf_file=None,
        )
        sizes: dict[str, Any] = {
            "token_budget": shape.num_tokens,
            "feature_size": shape.num_taps * shape.hidden_size,
            "num_anchors": shape.num_anchors,
            "block_size": shape.block_size,
            "device": cpu,
        }
        self.table = BufferTable(
            [
                *slot_specs(num_slots=1, num_targets=0, feature_dtype=torch.float32, **sizes),
                *workspace_specs(dtype=torch.float32, **sizes),
            ]
        )
        self.table["slot.features"][0].copy_(problem.take_features().flatten(0, 1))
        self.parameters = FlatParameters(spec.parameter_shapes(), device=cpu, compute_dtype=torch.float32)
        self.parameters.load(problem.take_parameters())
        self.drafter_step = DrafterStep(
            spec,
            self.parameters,
            OptimConfig(),
            sizes=(shape.num_anchors,),
            table=self.table,
            embed_weight=problem.embed,
            head_weight=problem.embed,
            anchor_groups=anchor_groups,
        )
        moments = self.drafter_step.state_tensors()[1].values()
        self.not_extra_bytes = sum(t.nbytes for t in moments)
        self._prepare_padding(problem)

    def _prepare_padding(self, problem: Problem) -> None:
        shape = problem.shape
        self.job_shape = JobShape(
            token_budget=shape.num_tokens,
            num_anchors=shape.num_anchors,
            block_size=shape.block_size,
            gamma=inf,  # uniform weights
            anchor_rate=1.0,
            num_anchors_per_sample=None,
            seed=0,
            head_index=None,
        )
        self.rows: Any = Rows(problem.tokens)
        self.schedule = build_epoch(
            self.rows.lengths,
            (Bucket(length=shape.row_length, rows=shape.num_rows),),
            seed=0,
            epoch=0,
            order="interleave",
            draw="seeded",
            min_ready=1,
            jobs_per_step=1,
            data_fingerprint=Rows.fingerprint,
            token_budget=shape.num_tokens,
        )
        self.rows.places[self.schedule.rows_of(0)] = np.arange(shape.num_rows)  # the schedule may reorder samples
        flat = problem.anchors + torch.arange(shape.num_rows)[:, None] * shape.row_length
        anchors = flat.flatten().numpy()
        # The one replaced function, as for the other trainers: which anchors are drawn.
        padding.draw_anchors = lambda *args, **kwargs: anchors

    def reset(self) -> None:
        self.parameters.zero_grads()
        self.drafter_step.weight_sum.zero_()

    def step(self) -> None:
        job = pad_job(self.rows, self.schedule, 0, self.job_shape)
        write_metadata(self.table, 0, job)
        self.drafter_step.micro_step(self.drafter_step.load_slot(0, job))

    def loss(self) -> float:
        counts = self.drafter_step.read_counts()
        return counts.loss_sum / counts.weight_sum

    def grads(self) -> dict[str, Tensor]:
        views = self.parameters.views(self.parameters.grads)
        return {name: grad / self.drafter_step.weight_sum for name, grad in views.items()}

    def in_the_open(self) -> AbstractContextManager[None]:
        return backend.in_the_open()
