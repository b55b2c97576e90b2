"""One training step of the drafter over static buffers: load a slot, micro-step, apply.

`load` copies a drawn slot into the workspace and is the one place that sanitises padding; `micro_step` is forward, loss
and backward over the workspace; `apply` divides by the step's weight sum, clips, and updates the masters. All three
touch only tensors allocated here or in the buffer table, read nothing back to the host, and are what a CUDA graph will
hold. Called by the drafter's worker thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_graph.config import LossConfig, OptimConfig
from dflash_graph.dispatch import PaddedJob
from dflash_graph.drafter import BlockInputs, Drafter, DrafterSpec, FlatParameters
from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op
from dflash_graph.kernels.backend import Implementation
from dflash_graph.static_buffers import BufferSpec, BufferTable, TeacherSpec

TOP_K = 5


def micro_step_sizes(num_anchors: int, num_sizes: int) -> tuple[int, ...]:
    """Anchor counts for which a micro-step exists: equal shares of A, ascending, the last one A."""
    return tuple(sorted({math.ceil(num_anchors * i / num_sizes) for i in range(1, num_sizes + 1)}))


def learning_rate(optim: OptimConfig, jobs_trained: int, total_jobs: int) -> float:
    """Rate of the step after which `jobs_trained` of `total_jobs` jobs are trained."""
    warmup = optim.warmup_ratio * total_jobs
    if jobs_trained < warmup:
        return optim.lr * jobs_trained / warmup
    if optim.lr_schedule == "constant":
        return optim.lr
    progress = min(1.0, (jobs_trained - warmup) / max(1.0, total_jobs - warmup))
    decay = 1 - progress if optim.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * decay)


def workspace_specs(
    *,
    token_budget: int,
    feature_size: int,
    num_anchors: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    teacher: TeacherSpec | None = None,
) -> list[BufferSpec]:
    """The step's workspace: a sanitised copy of one slot. T positions, N*D features, A anchors, K block positions."""
    rows = num_anchors * (block_size - 1)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "features": ((token_budget, feature_size), dtype),
        "positions": ((token_budget,), torch.int64),
        "anchors": ((num_anchors,), torch.int64),
        "anchor_row_starts": ((num_anchors,), torch.int64),
        "anchor_tokens": ((num_anchors,), torch.int64),
        "trained_rows": ((rows,), torch.int64),
        "labels": ((rows,), torch.int64),
        "weights": ((rows,), torch.float32),
        "num_anchors": ((), torch.int64),
        "num_trained_rows": ((), torch.int64),
        "correct": ((num_anchors * block_size,), torch.float32),
    }
    if teacher is not None:
        shapes |= {"num_teacher_positions": ((), torch.int64), "teacher_rows": ((rows,), torch.int64)}
        shapes |= teacher.statistics
    return [
        BufferSpec(f"workspace.{name}", shape, kind, device, writer="load", readers=("micro_step",))
        for name, (shape, kind) in shapes.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Device counters read back to the host, summed since the last read. Arrays are (K-1,), index k-1.

    Attributes:
        rows, correct, correct_top_k: supervised rows per block position, and those whose label ranks first, or in the
            top k. A label outside the reduced head is a row that is never correct.
        blocks, leading: blocks whose rows 1..k are all supervised, and those of them whose rows 1..k are all correct.
        skipped_steps, skipped_in_a_row: updates not made (non-finite gradient or no trained row), and their longest
            streak.
        nll_sum, kl_sum: the two parts of loss_sum before they are mixed; None where no KL was trained.
    """

    loss_sum: float
    weight_sum: float
    rows: np.ndarray
    correct: np.ndarray
    correct_top_k: np.ndarray
    blocks: np.ndarray
    leading: np.ndarray
    grad_norm: float
    skipped_steps: int
    skipped_in_a_row: int
    nll_sum: float | None = None
    kl_sum: float | None = None

    @property
    def accept_length(self) -> float:
        """Expected tokens per verification under teacher forcing, bonus included: 1 + sum of P(rows 1..k right)."""
        seen = self.blocks > 0
        return 1.0 + float((self.leading[seen] / self.blocks[seen]).sum())


class DrafterStep:
    """Forward, loss, backward and update of one drafter on one device.

    Args:
        sizes: anchor counts of `micro_step_sizes`.
        table: buffer table that holds `workspace_specs` and the ring's slots.
        embed_weight: (vocab, D) frozen, compute dtype. head_weight: (V, D) frozen, compute dtype (reduced or full).
        loss: what is trained; the table holds the teacher's buffers if it needs them. None is the default loss.
        kernels: implementation of the operators; None lets them choose.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        parameters: FlatParameters,
        optim: OptimConfig,
        *,
        sizes: Sequence[int],
        table: BufferTable,
        embed_weight: Tensor,
        head_weight: Tensor,
        loss: LossConfig | None = None,
        kernels: Implementation | None = None,
    ) -> None:
        self.spec, self.parameters, self.optim, self.sizes, self.table = spec, parameters, optim, tuple(sizes), table
        self.head_weight, self.loss = head_weight, loss or LossConfig()
        k1, device = spec.block_size - 1, embed_weight.device
        self._teacher = _teacher_names(self.loss)
        counts = ("num_teacher_positions",) if self._teacher else ()
        ws = {name: table[f"workspace.{name}"] for name in (*_WORKSPACE, *self._teacher, *counts)}
        self._ws = ws
        self._attention = attention_op.make_workspace(
            num_anchors=sizes[-1],
            block_size=spec.block_size,
            num_tokens=ws["positions"].shape[0],
            num_heads=spec.num_attention_heads,
            num_key_value_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            dtype=embed_weight.dtype,
            device=device,
            max_context=spec.max_trained_length,
            implementation=kernels,
        )
        d_pace = self.loss.weighting == "d_pace"
        self._loss = loss_op.make_workspace(
            num_rows=sizes[-1] * k1,
            hidden_size=spec.hidden_size,
            vocab_size=head_weight.shape[0],
            dtype=embed_weight.dtype,
            device=device,
            implementation=kernels,
            num_blocks=sizes[-1] if d_pace else None,
            block_size=spec.block_size if d_pace else None,
        )
        self.drafter = Drafter(
            spec,
            parameters,
            embed_weight=embed_weight,
            rope_length=spec.max_trained_length + spec.block_size,
            attention=self._attention,
            kernels=kernels,
        )
        self.inputs = {a: self._inputs(a) for a in self.sizes}
        self._anchor_index = torch.arange(sizes[-1], device=device)
        self._row_index = torch.arange(sizes[-1] * k1, device=device)
        if "teacher_rows" in ws:
            num_positions = next(ws[name].shape[0] for name in self._teacher if name != "teacher_rows")
            self._teacher_index = torch.arange(num_positions, device=device)
        self._zero_float = torch.zeros((), device=device)
        self._zero_int = torch.zeros((), device=device, dtype=torch.int64)
        self._zero_feature = torch.zeros((), device=device, dtype=embed_weight.dtype)
        self._ignored = torch.full((), loss_op.IGNORE_INDEX, device=device)
        # Accumulators of the step, and counters since the last read.
        self.weight_sum = torch.zeros((), device=device)
        self._sums = torch.zeros(4, device=device, dtype=torch.float64)  # loss, weight, nll, KL
        self._with_kl = False  # the last two were counted
        self._per_k = torch.zeros(3, k1, device=device, dtype=torch.float64)  # correct, leading, top k
        self._rows = np.zeros(k1, dtype=np.int64)  # on the host: padding knows rows and blocks
        self._blocks = np.zeros(k1, dtype=np.int64)
        self._loaded: PaddedJob | None = None
        self._taught = False  # what is loaded came with its teacher
        self._grad_norm = torch.zeros((), device=device)
        self._skipped = torch.zeros(3, device=device)  # in all, in a row now, longest streak
        self._make_optimizer(device)

    def _inputs(self, a: int) -> BlockInputs:
        ws = self._ws
        return BlockInputs(
            features=ws["features"],
            positions=ws["positions"],
            anchors=ws["anchors"][:a],
            row_starts=ws["anchor_row_starts"][:a],
            anchor_tokens=ws["anchor_tokens"][:a],
            trained_rows=ws["trained_rows"][: a * (self.spec.block_size - 1)],
            num_anchors=ws["num_anchors"],
        )

    def _make_optimizer(self, device: torch.device) -> None:
        optim, masters, grads = self.optim, self.parameters.masters, self.parameters.grads
        self.lr = torch.zeros((), device=device)
        self._found_inf = torch.zeros((), device=device)
        for group, master in masters.items():
            master.grad = grads[group]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [masters["decay"]], "weight_decay": optim.weight_decay},
                {"params": [masters["no_decay"]], "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
            capturable=True,
        )
        # Moments exist before the first step, so that loading a checkpoint and stepping both write in place.
        for master in masters.values():
            self.optimizer.state[master] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        self.optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    # ---- load -------------------------------------------------------------------------------------------------------

    def size_for(self, num_anchors: int) -> int:
        """The smallest micro-step that holds so many live anchors."""
        return next(a for a in self.sizes if a >= num_anchors)

    def load_slot(self, slot: int, job: PaddedJob) -> int:
        """Copy slot `slot` of the ring into the workspace; return the micro-step size its live anchors need."""
        return self.load({name: self.table[f"slot.{name}"][slot] for name in (*_SLOT, *self._teacher)}, job)

    @torch.no_grad()
    def load(self, source: dict[str, Tensor], job: PaddedJob) -> int:
        """Sanitised copy of a job's features and metadata into the workspace: what is not live is *selected* to zero.

        A multiplication by zero would not do: 0 * NaN spreads through the weight gradients. A source without a teacher
        (validation) keeps the data's labels and is for micro-steps that do not train.
        """
        ws = self._ws
        self._loaded = job
        ws["num_anchors"].fill_(job.num_anchors)
        ws["num_trained_rows"].fill_(job.num_trained_rows)
        real = source["row_ids"] >= 0  # (T,)
        live = self._anchor_index < ws["num_anchors"]  # (A,)
        trained = self._row_index < ws["num_trained_rows"]  # (R,)
        torch.where(real[:, None], source["features"], self._zero_feature, out=ws["features"])
        torch.where(real, source["positions"], self._zero_int, out=ws["positions"])
        for name in ("anchors", "anchor_row_starts", "anchor_tokens"):
            torch.where(live, source[name], self._zero_int, out=ws[name])
        torch.where(trained, source["trained_rows"], self._zero_int, out=ws["trained_rows"])
        torch.where(trained, source["labels"], self._ignored, out=ws["labels"])
        torch.where(trained, source["weights"], self._zero_float, out=ws["weights"])
        self._taught = bool(self._teacher) and "teacher_rows" in source
        if self._taught:
            self._load_teacher(source, job, trained)
        return self.size_for(job.num_anchors)

    def _load_teacher(self, source: dict[str, Tensor], job: PaddedJob, trained: Tensor) -> None:
        """What the target says: sanitised like the rest, and its labels in place of the data's if they are trained."""
        ws = self._ws
        ws["num_teacher_positions"].fill_(job.num_covered)
        live = self._teacher_index < ws["num_teacher_positions"]  # (U,)
        torch.where(trained, source["teacher_rows"], self._zero_int, out=ws["teacher_rows"])
        if self.loss.with_kl:
            torch.where(live[:, None], source["teacher_mean"], self._zero_float, out=ws["teacher_mean"])
            torch.where(live, source["teacher_entropy"], self._zero_float, out=ws["teacher_entropy"])
        if self.loss.labels == "target":
            torch.where(live, source["teacher_argmax"], self._zero_int, out=ws["teacher_argmax"])
            torch.index_select(ws["teacher_argmax"], 0, ws["teacher_rows"], out=ws["labels"])
            torch.where(ws["weights"] > 0, ws["labels"], self._ignored, out=ws["labels"])

    # ---- micro-step -------------------------------------------------------------------------------------------------

    def micro_step(self, size: int, *, train: bool = True) -> None:
        """Forward and loss over the workspace and, if `train`, backward into the flat gradients (added to them).

        Without `train` the loss is the plain weighted cross-entropy, whatever is trained, so that validations compare.
        """
        rows = size * (self.spec.block_size - 1)
        assert not train or self._taught == bool(self._teacher), "a training job must be loaded with its teacher"
        with torch.set_grad_enabled(train):
            loss = loss_op.fused_lm_head_loss(
                self.drafter(self.inputs[size]),
                self.head_weight,
                self._ws["labels"][:rows],
                self._ws["weights"][:rows],
                num_rows=self._ws["num_trained_rows"],
                with_rank=True,
                workspace=self._loss,
                lend_grad=train,  # it goes to the final norm, which keeps no gradient
                d_pace=self._d_pace(rows) if train else None,
                teacher=self._kl_teacher(rows) if train else None,
            )
            if train:
                loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if train:
                self.weight_sum.add_(self._loss.weight_sum)
            self._sums[0].add_(loss.detach())
            self._sums[1].add_(self._loss.weight_sum)
            if train and self.loss.with_kl:
                weights = self._loss.row_weights[:rows]
                self._sums[2].add_((weights * self._loss.nll[:rows]).sum())
                self._sums[3].add_((weights * self._loss.kl[:rows]).sum())
                self._with_kl = True
            self._count(size, rows)
        if self._loaded is not None:
            self._rows += self._loaded.rows_per_k
            self._blocks += self._loaded.blocks_per_k

    def _d_pace(self, rows: int) -> loss_op.DPace | None:
        if self.loss.weighting != "d_pace":
            return None
        return loss_op.DPace(alpha=self.loss.d_pace_alpha, trained_rows=self._ws["trained_rows"][:rows])

    def _kl_teacher(self, rows: int) -> loss_op.Teacher | None:
        if not self.loss.with_kl:
            return None
        ws = self._ws
        return loss_op.Teacher(
            weight=self.loss.kl_weight,
            mean=ws["teacher_mean"],
            entropy=ws["teacher_entropy"],
            rows=ws["teacher_rows"][:rows],
        )

    def _count(self, size: int, rows: int) -> None:
        k = self.spec.block_size
        index, rank = self._ws["trained_rows"][:rows], self._loss.label_rank[:rows]
        live = self._row_index[:rows] < self._ws["num_trained_rows"]
        # Padded rows point at index 0, an anchor row, which no counter reads; all other indices are distinct.
        right = (live & (rank == 0)).float()
        correct = self._ws["correct"][: size * k].zero_().scatter_(0, index, right).view(size, k)[:, 1:]
        self._per_k[0] += correct.sum(0)
        self._per_k[1] += correct.cumprod(1).sum(0)
        near = (live & (rank < TOP_K)).float()
        self._per_k[2] += self._ws["correct"][: size * k].zero_().scatter_(0, index, near).view(size, k)[:, 1:].sum(0)

    # ---- apply ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, lr: float) -> None:
        """One update from the accumulated gradients: exact weighted mean, clip, AdamW; then zero the accumulators.

        A non-finite gradient or a weight sum of 0 leaves masters and moments untouched and is counted.
        """
        self.lr.fill_(lr)
        grads = list(self.parameters.grads.values())
        scale = torch.where(self.weight_sum > 0, 1 / self.weight_sum, self._zero_float)
        for grad in grads:
            grad.mul_(scale)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        bad = ~torch.isfinite(norm) | (self.weight_sum <= 0)
        clip = torch.clamp(self.optim.max_grad_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(clip)
        self._found_inf.copy_(bad)
        self.optimizer.step()
        self.parameters.refresh_compute()
        self.parameters.zero_grads()
        self.weight_sum.zero_()
        self._grad_norm.copy_(norm)
        self._skipped[0].add_(self._found_inf)
        self._skipped[1].add_(1).mul_(self._found_inf)
        torch.maximum(self._skipped[1], self._skipped[2], out=self._skipped[2])

    # ---- host side --------------------------------------------------------------------------------------------------

    def read_counts(self) -> Counts:
        """Read and reset the counters (skipped steps in a row are kept)."""
        # sync: once per log interval, outside the step
        sums, per_k, skipped = self._sums.tolist(), self._per_k.cpu().numpy().copy(), self._skipped.tolist()
        counts = Counts(
            loss_sum=sums[0],
            weight_sum=sums[1],
            rows=self._rows.astype(np.float64),
            correct=per_k[0],
            blocks=self._blocks.astype(np.float64),
            leading=per_k[1],
            correct_top_k=per_k[2],
            grad_norm=float(self._grad_norm),
            skipped_steps=int(skipped[0]),
            skipped_in_a_row=int(skipped[2]),
            nll_sum=sums[2] if self._with_kl else None,
            kl_sum=sums[3] if self._with_kl else None,
        )
        self._sums.zero_()
        self._with_kl = False
        self._per_k.zero_()
        self._rows[:] = self._blocks[:] = 0
        self._skipped[0].zero_()
        self._skipped[2].zero_()
        return counts

    def state_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(drafter tensors by name, optimizer tensors by name), views of the live float32 buffers."""
        groups = {group: self.optimizer.state[master] for group, master in self.parameters.masters.items()}
        optimizer = {f"step.{group}": state["step"] for group, state in groups.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            views = self.parameters.views({group: state[kind] for group, state in groups.items()})
            optimizer |= {f"{kind}.{name}": view for name, view in views.items()}
        return self.parameters.views(self.parameters.masters), optimizer

    @torch.no_grad()
    def load_state(self, drafter: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Restore masters and moments in place from the tensors of `state_tensors`."""
        self.parameters.load(drafter)
        _, live = self.state_tensors()
        if live.keys() != optimizer.keys():
            raise ValueError(
                f"optimizer tensors do not match: differing names {sorted(live.keys() ^ optimizer.keys())}"
            )
        for name, tensor in live.items():
            tensor.copy_(optimizer[name])

    def addresses(self) -> dict[str, int]:
        """Address of every tensor a step touches that is not in the buffer table."""
        named = dict(self.parameters.buffers())
        named |= dict(
            zip(("optimizer." + n for n in self.state_tensors()[1]), self.state_tensors()[1].values(), strict=True)
        )
        named |= {"lr": self.lr, "weight_sum": self.weight_sum, "found_inf": self._found_inf, "head": self.head_weight}
        return {name: tensor.data_ptr() for name, tensor in named.items()}


def _teacher_names(loss: LossConfig) -> tuple[str, ...]:
    """Slot tensors of the teacher that this loss reads."""
    if not loss.with_teacher:
        return ()
    kl = ("teacher_mean", "teacher_entropy") if loss.with_kl else ()
    return ("teacher_rows", *kl, *(("teacher_argmax",) if loss.labels == "target" else ()))


_SLOT = (
    "features", "positions", "row_ids", "anchors", "anchor_row_starts", "anchor_tokens", "trained_rows", "labels",
    "weights",
)  # fmt: skip
_WORKSPACE = (
    "features", "positions", "anchors", "anchor_row_starts", "anchor_tokens", "trained_rows", "labels", "weights",
    "num_anchors", "num_trained_rows", "correct",
)  # fmt: skip
