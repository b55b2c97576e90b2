"""One training step of the drafter over static buffers: load a slot, micro-step, apply.

`load` copies a drawn slot into the workspace and is the one place that sanitises padding; `micro_step` is forward, loss
and backward over the workspace; `apply` divides by the step's weight sum, clips, and updates the masters. All three
touch only tensors allocated here or in the buffer table, read nothing back to the host, and are what a CUDA graph will
hold. Called by the drafter's worker thread.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_graph.config import LossConfig, OptimConfig
from dflash_graph.counters import Counts, StepCounters
from dflash_graph.dispatch import PaddedJob
from dflash_graph.drafter import BlockInputs, Drafter, DrafterSpec, FlatParameters
from dflash_graph.graphs import WorkerContext
from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op
from dflash_graph.kernels.backend import Implementation
from dflash_graph.kernels.layers import Lender
from dflash_graph.static_buffers import BufferSpec, BufferTable, TeacherSpec


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


class _RowInputs(NamedTuple):
    """Rows of the loss that one anchor group trains, R places."""

    trained: Tensor  # (R,) int64, anchor of the group * K + k
    labels: Tensor  # (R,) int64
    weights: Tensor  # (R,) float32
    teacher: Tensor | None  # (R,) int64, rows of the teacher's statistics
    num_rows: Tensor  # () int64, live rows


class DrafterStep:
    """Forward, loss, backward and update of one drafter on one device.

    Args:
        sizes: anchor counts of `micro_step_sizes`.
        table: buffer table that holds `workspace_specs` and the ring's slots.
        embed_weight: (vocab, D) frozen, compute dtype. head_weight: (V, D) frozen, compute dtype (reduced or full).
        anchor_groups: a micro-step's anchors run in so many groups, one after the other, each forward and backward:
            activations of one group exist at a time. Context keys and values are computed once for all of them.
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
        anchor_groups: int = 1,
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
        self._group_size = math.ceil(sizes[-1] / anchor_groups)  # anchors
        self._attention = attention_op.make_workspace(
            num_anchors=self._group_size,
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
            num_rows=self._group_size * k1,
            hidden_size=spec.hidden_size,
            vocab_size=head_weight.shape[0],
            dtype=embed_weight.dtype,
            device=device,
            implementation=kernels,
            num_blocks=self._group_size if d_pace else None,
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
        self._anchor_index = torch.arange(sizes[-1], device=device)
        self._row_index = torch.arange(sizes[-1] * k1, device=device)
        self._group_edges = torch.arange(anchor_groups + 1, device=device) * self._group_size
        if "teacher_rows" in ws:
            num_positions = next(ws[name].shape[0] for name in self._teacher if name != "teacher_rows")
            self._teacher_index = torch.arange(num_positions, device=device)
        self._zero_float = torch.zeros((), device=device)
        self._zero_int = torch.zeros((), device=device, dtype=torch.int64)
        self._zero_feature = torch.zeros((), device=device, dtype=embed_weight.dtype)
        self._ignored = torch.full((), loss_op.IGNORE_INDEX, device=device)
        self.weight_sum = parameters.weight_sum
        self.counters = StepCounters(block_size=spec.block_size, num_rows=self._group_size * k1, correct=ws["correct"])
        self._loaded: PaddedJob | None = None
        self._taught = False  # what is loaded came with its teacher
        self._make_optimizer(device)
        # What runs: the functions themselves, until `make_graphs` puts a graph in the place of each.
        self._micro_steps: dict[tuple[int, bool], Callable[[], None]] = {
            (size, train): partial(self.micro_step_body, size, train=train)
            for size in self.sizes
            for train in (True, False)
        }
        self._apply: Callable[[], None] = self.apply_body

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
        assert not train or self._taught == bool(self._teacher), "a training job must be loaded with its teacher"
        self._micro_steps[size, train]()
        if (job := self._loaded) is not None:
            self.counters.add_host(job.rows_per_k, job.blocks_per_k, with_kl=train and self.loss.with_kl)

    def micro_step_body(self, size: int, *, train: bool = True) -> None:
        """The device's part of `micro_step`: the same operators over the same tensors whatever the job."""
        count = self._group_size
        if size <= count:
            self._run_group(*self._whole(size), None, train)
            return
        lender, edges = None, self._row_edges(size)
        for first in range(0, size, count):
            x, rows = self._part(first, min(count, size - first), edges[first // count :])
            if lender is None:
                with torch.set_grad_enabled(train):
                    lender = Lender(self.drafter.project_context(x.features, count))
            self._run_group(x, rows, lender.lend(self.drafter.context_rows(x)), train)
        if train and lender is not None:
            lender.backward()

    def _run_group(self, x: BlockInputs, rows: _RowInputs, context: Sequence[Tensor] | None, train: bool) -> None:
        with torch.set_grad_enabled(train):
            loss = loss_op.fused_lm_head_loss(
                self.drafter(x, context),
                self.head_weight,
                rows.labels,
                rows.weights,
                num_rows=rows.num_rows,
                with_rank=True,
                workspace=self._loss,
                lend_grad=train,  # it goes to the final norm, which keeps no gradient
                d_pace=self._d_pace(rows.trained) if train else None,
                teacher=self._kl_teacher(rows.teacher) if train else None,
            )
            if train:
                loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if train:
                self.weight_sum.add_(self._loss.weight_sum)
            self.counters.add_loss(loss.detach(), self._loss.weight_sum)
            n = rows.trained.shape[0]
            if train and self.loss.with_kl:
                self.counters.add_parts(self._loss.row_weights[:n], self._loss.nll[:n], self._loss.kl[:n])
            self.counters.add_ranks(x.anchors.shape[0], rows.trained, rows.num_rows, self._loss.label_rank[:n])

    def inputs(self, size: int) -> BlockInputs:
        """What the drafter reads of a micro-step's anchors, all at once: views of the workspace."""
        return self._whole(size)[0]

    def _whole(self, size: int) -> tuple[BlockInputs, _RowInputs]:
        ws, n = self._ws, size * (self.spec.block_size - 1)
        teacher = ws["teacher_rows"][:n] if "teacher_rows" in ws else None
        rows = _RowInputs(ws["trained_rows"][:n], ws["labels"][:n], ws["weights"][:n], teacher, ws["num_trained_rows"])
        return self._block_inputs(slice(size), rows.trained, ws["num_anchors"]), rows

    def _block_inputs(self, anchors: slice, trained_rows: Tensor, num_anchors: Tensor) -> BlockInputs:
        ws = self._ws
        return BlockInputs(
            features=ws["features"],
            positions=ws["positions"],
            anchors=ws["anchors"][anchors],
            row_starts=ws["anchor_row_starts"][anchors],
            anchor_tokens=ws["anchor_tokens"][anchors],
            trained_rows=trained_rows,
            num_anchors=num_anchors,
        )

    def _row_edges(self, size: int) -> Tensor:
        """Where each anchor group's rows begin in the list of trained rows, and their end: (groups + 1,) int64."""
        k, ws = self.spec.block_size, self._ws
        first = self._group_edges[: -(-size // self._group_size) + 1, None] * k
        live = self._row_index < ws["num_trained_rows"]
        return ((ws["trained_rows"] < first) & live).sum(1)

    def _part(self, first: int, count: int, edges: Tensor) -> tuple[BlockInputs, _RowInputs]:
        """The group of anchors first .. first + count - 1, whose rows in the list are edges[0] .. edges[1] - 1."""
        ws, k = self._ws, self.spec.block_size
        places = self._row_index[: count * (k - 1)]
        num_rows = edges[1] - edges[0]
        live = places < num_rows
        index = (places + edges[0]).clamp_(max=ws["trained_rows"].shape[0] - 1)

        def pick(name: str, dead: Tensor, less: int = 0) -> Tensor:
            return torch.where(live, ws[name].index_select(0, index) - less, dead)

        rows = _RowInputs(
            trained=pick("trained_rows", self._zero_int, first * k),
            labels=pick("labels", self._ignored),
            weights=pick("weights", self._zero_float),
            teacher=pick("teacher_rows", self._zero_int) if "teacher_rows" in ws else None,
            num_rows=num_rows,
        )
        num_anchors = (ws["num_anchors"] - first).clamp_(0, count)
        return self._block_inputs(slice(first, first + count), rows.trained, num_anchors), rows

    def _d_pace(self, trained_rows: Tensor) -> loss_op.DPace | None:
        if self.loss.weighting != "d_pace":
            return None
        return loss_op.DPace(alpha=self.loss.d_pace_alpha, trained_rows=trained_rows)

    def _kl_teacher(self, rows: Tensor | None) -> loss_op.Teacher | None:
        if not self.loss.with_kl:
            return None
        assert rows is not None
        ws = self._ws
        return loss_op.Teacher(
            weight=self.loss.kl_weight,
            mean=ws["teacher_mean"],
            entropy=ws["teacher_entropy"],
            rows=rows,
        )

    # ---- apply ------------------------------------------------------------------------------------------------------

    def apply(self, lr: float) -> None:
        """One update from the accumulated gradients: exact weighted mean, clip, AdamW; then zero the accumulators.

        A non-finite gradient or a weight sum of 0 leaves masters and moments untouched and is counted.
        """
        self.lr.fill_(lr)
        self._apply()

    @torch.no_grad()
    def apply_body(self) -> None:
        """The device's part of `apply`; the rate lies in `lr`."""
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
        self.counters.add_update(norm, self._found_inf)

    # ---- graphs -----------------------------------------------------------------------------------------------------

    def make_graphs(self, context: WorkerContext, *, validation: bool = True) -> None:
        """Hand micro-steps and update to the worker's context, which captures them; from now on they run there.

        Args:
            validation: micro-steps without training are needed, too.
        """
        sums = {"weight_sum": self.weight_sum, **{f"counters.{n}": t for n, t in self.counters.tensors().items()}}
        grads = {f"grad.{group}": grad for group, grad in self.parameters.grads.items()}
        workspace = {f"workspace.{name}": tensor for name, tensor in self._ws.items()}
        weights = {
            name: tensor for name, tensor in self.parameters.buffers() if name.startswith(("master.", "compute."))
        }
        for (size, train), function in self._micro_steps.items():
            if not train and not validation:
                continue
            self._micro_steps[size, train] = context.graph(
                f"{'micro_step' if train else 'validate'}.{size}",
                function,
                inputs=workspace | weights,
                outputs={},
                state=sums | (grads if train else {}),
            )
        moments = {
            f"{kind}.{group}": self.optimizer.state[master][kind]
            for group, master in self.parameters.masters.items()
            for kind in ("step", "exp_avg", "exp_avg_sq")
        }
        self._apply = context.graph(
            "apply", self._apply, inputs={"lr": self.lr}, outputs={}, state=sums | grads | weights | moments
        )

    # ---- host side --------------------------------------------------------------------------------------------------

    def read_counts(self) -> Counts:
        """Read and reset the counters (skipped steps in a row are kept)."""
        return self.counters.read()

    def state_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(drafter tensors by name, optimizer tensors by name), views of the live float32 buffers."""
        groups = {group: self.optimizer.state[master] for group, master in self.parameters.masters.items()}
        optimizer = {f"step.{group}": state["step"] for group, state in groups.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            views = self.parameters.views({group: state[kind] for group, state in groups.items()})
            optimizer |= {f"{kind}.{name}": view for name, view in views.items()}
        return self.parameters.views(self.parameters.masters), optimizer

    def shared_state(self) -> list[Tensor]:
        """The flat tensors that all ranks must hold alike: masters and moments."""
        states = [self.optimizer.state[master] for master in self.parameters.masters.values()]
        kinds = ("step", "exp_avg", "exp_avg_sq")
        return [*self.parameters.masters.values(), *(state[kind] for state in states for kind in kinds)]

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
