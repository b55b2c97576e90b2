"""Loss options, from the configuration to the gradients: KL against the target, its labels, D-PACE, and all of them.

The truth is `dense.py`: the definitions once more, in float64, with whole distributions on both sides.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_graph import training
from dflash_graph.config import LossConfig
from dflash_graph.counters import Counts
from dflash_graph.dispatch import pad_job
from dflash_graph.initialise import initial_parameters
from dflash_graph.kernels.backend import interpreting
from dflash_graph.metrics import read_records
from dflash_graph.plan import RunPlan, make_plan
from dflash_graph.ring import Ring
from dflash_graph.static_buffers import SLOT_METADATA
from dflash_graph.target import Target
from dflash_graph.training import train
from dflash_graph.workers import TeacherHead
from tests.dense import Dense, dense, dense_with_grads
from tests.test_step import LENGTHS, MIXED, allocations, spoil
from tests.test_training import _run_killed
from tests.tiny import make_tiny, tiny_config, weights
from tests.toys import Toy, ToyJob, make_jobs, random_rows, relative_error, state_bytes, toy_shape, toy_spec

LOSSES = {
    "kl": LossConfig(kl_weight=0.3),
    "only-kl": LossConfig(kl_weight=1.0),
    "labels": LossConfig(labels="target"),
    "d_pace": LossConfig(weighting="d_pace", d_pace_alpha=0.3),
    "all": LossConfig(weighting="d_pace", d_pace_alpha=0.0, labels="target", kl_weight=0.5),
}
INTERPRETED = pytest.mark.skipif(
    not interpreting(), reason="the CPU runs Triton kernels in Triton's interpreter only (TRITON_INTERPRET=1)"
)
ALL = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
HEAD_IDS = [0, 3, 4, 5, 8, 11, 12, 13, 16, 19, 20]


# ---- one step over jobs in memory -----------------------------------------------------------------------------------


def make_toy(loss: LossConfig, *, reduced: bool = False, **kwargs: Any) -> Toy:
    spec = toy_spec(**MIXED, draft_vocab_size=len(HEAD_IDS) if reduced else None)
    index = np.full(spec.vocab_size, -1, np.int32)
    index[HEAD_IDS] = np.arange(len(HEAD_IDS))
    shape = toy_shape(
        spec,
        token_budget=42,
        gamma=2.0 if loss.weighting == "decay" else None,
        with_teacher=loss.with_teacher,
        head_index=index if reduced else None,
    )
    return Toy(spec, shape, loss=loss, **kwargs)


def jobs_of(toy: Toy, supervised: float = 0.8) -> list[ToyJob]:
    return make_jobs(random_rows(toy.spec, LENGTHS, supervised=supervised), toy.shape)


def teacher_of(toy: Toy, job: ToyJob) -> list[Tensor]:
    """(n, V) target logits of each row of a job; far from uniform, and a function of the row alone."""
    return [
        3 * torch.from_numpy(np.random.default_rng(sum(tokens)).standard_normal((len(tokens), toy.head.shape[0])))
        for tokens, _, _ in job.rows
    ]


def write_slot(toy: Toy, job: ToyJob, slot: int = 0) -> None:
    """`Toy.write_slot`, and what a target's worker adds where the loss needs it: live positions only."""
    toy.write_slot(job, slot)
    if job.job.teacher_positions is None:
        return
    logits = teacher_of(toy, job)
    for u, flat in enumerate(job.job.teacher_positions[: job.job.num_covered].tolist()):
        row, position = divmod(flat, job.job.bucket_length)
        log_p = torch.log_softmax(logits[row][position], 0)
        values = {
            "teacher_mean": log_p.exp() @ toy.head,
            "teacher_entropy": -(log_p.exp() * log_p).sum(),
            "teacher_argmax": log_p.argmax(),
        }
        for name, value in values.items():
            if f"slot.{name}" in toy.table:
                toy.table[f"slot.{name}"][slot][u] = value


def accumulate(toy: Toy, *jobs: ToyJob) -> None:
    for job in jobs:
        write_slot(toy, job)
        toy.step.micro_step(toy.step.load_slot(0, job.job))


def options_of(loss: LossConfig) -> dict[str, Any]:
    return {
        "kl_weight": loss.kl_weight,
        "labels": loss.labels,
        "d_pace_alpha": loss.d_pace_alpha if loss.weighting == "d_pace" else None,
    }


def truth_of(toy: Toy, job: ToyJob, loss: LossConfig, reduced: bool) -> tuple[Dense, dict[str, Tensor]]:
    return dense_with_grads(
        toy.spec,
        toy.tensors,
        toy.embed,
        toy.head,
        job.rows,
        job.anchors,
        gamma=2.0,
        head_ids=HEAD_IDS if reduced else None,
        teacher=teacher_of(toy, job),
        **options_of(loss),
    )


@ALL
@pytest.mark.parametrize("reduced, groups", [(False, 1), (True, 1), (False, 4)], ids=["full", "reduced", "in groups"])
def test_loss_and_gradients_equal_the_dense_definition(loss: LossConfig, reduced: bool, groups: int) -> None:
    toy = make_toy(loss, reduced=reduced, anchor_groups=groups)
    jobs = jobs_of(toy)[:4]
    accumulate(toy, *jobs)
    truths = [truth_of(toy, job, loss, reduced) for job in jobs]
    counts = toy.step.read_counts()
    assert sum(len(truth.trained) for truth, _ in truths) > 50
    # D-PACE weights are products of up to three exp(-nll), each off by the rounding of logits as large as 30.
    near = 1e-6 if loss.weighting == "decay" else 5e-6
    assert counts.weight_sum == pytest.approx(sum(truth.weight for truth, _ in truths), rel=near)
    assert counts.loss_sum == pytest.approx(sum(float(truth.loss) for truth, _ in truths), rel=near)
    if loss.with_kl:
        assert counts.nll_sum == pytest.approx(sum(truth.nll for truth, _ in truths), rel=near)
        assert counts.kl_sum == pytest.approx(sum(truth.kl for truth, _ in truths), rel=near)
    else:
        assert counts.nll_sum is counts.kl_sum is None
    expected = {name: sum((g[name] for _, g in truths[1:]), truths[0][1][name]) for name in toy.tensors}
    errors = relative_error(toy.grads(), expected)
    assert max(errors.values()) < 1e-4, errors


@INTERPRETED
def test_triton_kernels_give_the_same_step() -> None:
    """`kernels` reaches every operator of the step; interpreted where there is no GPU."""
    loss = LOSSES["all"]
    torch_toy, toy = make_toy(loss), make_toy(loss, kernels="triton")
    assert (torch_toy.step._loss.implementation, torch_toy.step._attention.implementation) == ("torch", "torch")
    assert (toy.step._loss.implementation, toy.step._attention.implementation) == ("triton", "triton")
    job = jobs_of(toy)[0]
    for each in (torch_toy, toy):
        accumulate(each, job)
    truth, grads = truth_of(toy, job, loss, reduced=False)
    assert toy.step.read_counts().loss_sum == pytest.approx(float(truth.loss), rel=1e-5)
    errors = relative_error(toy.grads(), grads)
    assert max(errors.values()) < 1e-4, errors


def test_accuracies_are_against_the_labels_that_are_trained() -> None:
    loss = LOSSES["labels"]
    toy = make_toy(loss)
    jobs = jobs_of(toy)
    accumulate(toy, *jobs)
    counts, right, rows = toy.step.read_counts(), [0, 0, 0], [0, 0, 0]
    for job in jobs:
        truth, _ = truth_of(toy, job, loss, reduced=False)
        for (a, k), label in truth.trained.items():
            rows[k - 1] += 1
            right[k - 1] += int(truth.logits[a, k].argmax()) == label
    assert sum(right) > 0
    assert counts.rows.tolist() == rows
    assert counts.correct.tolist() == right


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_of_the_teachers_buffers_changes_nothing(loss: LossConfig, dtype: torch.dtype) -> None:
    """Bitwise: a table that starts as NaN and huge integers, and slots spoiled beyond what lives in them."""
    results = []
    for spoiled in (False, True):
        toy = make_toy(loss, dtype=dtype, poisoned=spoiled, num_sizes=2, anchor_groups=3)
        counts: list[Counts] = []
        for i, job in enumerate(jobs_of(toy)[:6]):
            write_slot(toy, job)
            if spoiled:
                spoil(toy, job, float("nan"))
                for name in toy.table:
                    if name.startswith("slot.teacher_"):
                        live = job.job.num_trained_rows if name == "slot.teacher_rows" else job.job.num_covered
                        tail = toy.table[name][0][live:]
                        assert len(tail), name
                        tail.fill_(float("nan") if tail.is_floating_point() else 2**63 - 1)
            toy.step.micro_step(toy.step.load_slot(0, job.job))
            if i % 2:
                toy.step.apply(1e-2)
                counts.append(toy.step.read_counts())
        results.append((counts, state_bytes(toy)))
    (clean_counts, clean), (counts, state) = results
    assert state == clean
    for a, b in zip(counts, clean_counts, strict=True):
        assert all(np.array_equal(x, getattr(b, name)) for name, x in vars(a).items())
    assert clean_counts[-1].skipped_steps == 0


def test_load_leaves_zeros_where_no_teacher_lives() -> None:
    """The workspace itself, from a poisoned table: no later reader has to sanitise again."""
    toy = make_toy(LOSSES["all"], poisoned=True)
    job = next(j for j in jobs_of(toy, 0.5) if j.job.num_covered > 3)
    write_slot(toy, job)
    toy.step.load_slot(0, job.job)
    covered, rows = job.job.num_covered, job.job.num_trained_rows
    for name in ("teacher_mean", "teacher_entropy", "teacher_argmax"):
        found, slot = toy.table[f"workspace.{name}"], toy.table[f"slot.{name}"][0]
        assert torch.equal(found[:covered], slot[:covered]), name
        assert not found[covered:].any(), name
    assert torch.equal(toy.table["workspace.teacher_rows"], job.job.teacher_rows)
    labels = toy.table["workspace.labels"]
    truth, _ = truth_of(toy, job, LOSSES["all"], reduced=False)
    assert labels[:rows].tolist() == list(truth.trained.values())
    assert labels[:rows].tolist() != job.job.labels[:rows].tolist()
    assert (labels[rows:] == -100).all()
    assert int(toy.table["workspace.num_teacher_positions"]) == covered


def test_a_full_jobs_teacher_leaves_nothing_for_the_next() -> None:
    toy, fresh = make_toy(LOSSES["all"]), make_toy(LOSSES["all"])
    jobs = sorted((j for j in jobs_of(toy, 0.5) if j.job.num_covered), key=lambda j: j.job.num_covered)
    accumulate(toy, jobs[-1])
    toy.parameters.zero_grads()
    accumulate(toy, jobs[0])
    accumulate(fresh, jobs[0])
    assert jobs[0].job.num_covered < jobs[-1].job.num_covered
    assert all(torch.equal(grad, fresh.grads()[name]) for name, grad in toy.grads().items())


@ALL
def test_validation_is_decayed_cross_entropy_against_the_data(loss: LossConfig) -> None:
    """Whatever is trained, and however full of it the workspace is: losses of held-out rows compare between runs."""
    toy = make_toy(loss)
    accumulate(toy, *jobs_of(toy)[:2])
    toy.step.read_counts()
    grads = toy.grads()
    plain = make_toy(LossConfig())
    for job in jobs_of(plain)[2:5]:
        plain.write_slot(job)
        source = {name: plain.table[f"slot.{name}"][0] for name in ("features", *SLOT_METADATA)}
        for each in (toy, plain):
            each.step.micro_step(each.step.load(source, job.job), train=False)
    found, expected = toy.step.read_counts(), plain.step.read_counts()
    assert expected.loss_sum > 0
    assert all(np.array_equal(x, getattr(expected, name)) for name, x in vars(found).items() if name != "grad_norm")
    assert all(torch.equal(grad, grads[name]) for name, grad in toy.grads().items())
    if loss.with_teacher:
        with pytest.raises(AssertionError, match="loaded with its teacher"):
            toy.step.micro_step(toy.step.sizes[-1])


def test_every_step_with_all_options_allocates_the_same() -> None:
    toy = make_toy(LOSSES["all"])
    jobs = [job for job in jobs_of(toy) if job.job.num_covered]
    assert len({(j.job.num_anchors, j.job.num_covered) for j in jobs[3:]}) > 3
    found = []
    for job in jobs:
        write_slot(toy, job)
        found.append(allocations(toy, job))
    assert len(set(found[3:])) == 1, found


# ---- whole runs -----------------------------------------------------------------------------------------------------

RUNS = {
    "kl": ["loss.kl_weight=0.5"],
    "labels": ["loss.labels=target"],
    "d_pace": ["loss.weighting=d_pace"],
    "all": ["loss.kl_weight=0.25", "loss.labels=target", "loss.weighting=d_pace", "loss.d_pace_alpha=0.2"],
    "all-reduced": [
        "loss.kl_weight=0.25", "loss.labels=target", "loss.weighting=d_pace", "drafter.draft_vocab_size=40",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a head 30 times as large, so that its distributions are far from uniform."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 30
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def untrained(tiny: Path) -> dict[str, Any]:
    """The validation before the first step of a run with the default loss."""
    train(tiny_config(tiny, tiny / "default", "epochs=1"))
    return next(r for r in read_records(tiny / "default") if r["kind"] == "validation")


def first_step(plan: RunPlan) -> tuple[float, float, float]:
    """(loss, nll, kl) of a run's first step in float64: the target by transformers, the drafter and loss by `dense`."""
    config = plan.config
    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float64).requires_grad_(False)
    head_ids = None if plan.head_ids is None else plan.head_ids.tolist()
    head = model.get_output_embeddings().weight
    head = head if head_ids is None else head[head_ids]
    start = initial_parameters(plan.spec, "random", seed=config.seed, target_layers=[])
    schedule = plan.first_epoch
    parts = []
    for index in schedule.draw_order[: config.schedule.jobs_per_step].tolist():
        job = pad_job(plan.rows, schedule, index, plan.job_shape)
        rows, teacher = [], []
        for sample in schedule.rows_of(index).tolist():
            tokens, mask = (x.tolist() for x in plan.rows.row(sample))
            out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
            features = torch.cat([out.hidden_states[tap + 1][0] for tap in plan.spec.target_layer_ids], -1)
            rows.append((tokens, mask, features))
            teacher.append(out.logits[0] if head_ids is None else out.logits[0][:, head_ids])
        parts.append(
            dense(
                plan.spec,
                {name: tensor.double() for name, tensor in start.items()},
                model.get_input_embeddings().weight,
                head,
                rows,
                [divmod(flat, job.bucket_length) for flat in job.anchors[: job.num_anchors].tolist()],
                gamma=config.drafter.gamma,
                head_ids=head_ids,
                teacher=teacher,
                **options_of(config.loss),
            )
        )
    weight = sum(part.weight for part in parts)
    return tuple(sum(float(getattr(part, x)) for part in parts) / weight for x in ("loss", "nll", "kl"))  # type: ignore[return-value]


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_the_first_steps_loss_is_the_definitions_and_losses_fall(
    tiny: Path, tmp_path: Path, untrained: dict[str, Any], overrides: list[str]
) -> None:
    config = tiny_config(tiny, tmp_path / "run", "log.every=1", "epochs=3", *overrides)
    train(config)
    records = [r for r in read_records(tmp_path / "run") if r["kind"] == "train"]
    plan = make_plan(config)
    loss, nll, kl = first_step(plan)
    assert records[0]["loss"] == pytest.approx(loss, rel=1e-6)
    if config.loss.with_kl:
        assert records[0]["nll"] == pytest.approx(nll, rel=1e-6)
        assert records[0]["kl"] == pytest.approx(kl, rel=1e-6)
        assert kl > 0.5, "the target's distribution is too near the drafter's to show anything"
    else:
        assert not {"nll", "kl"} & records[0].keys()
    losses = [r["loss"] for r in records]
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
    validation = [r for r in read_records(tmp_path / "run") if r["kind"] == "validation"]
    assert not {"nll", "kl"} & validation[-1].keys()
    if plan.head_ids is None:  # the same drafter, so the very same numbers, whatever is trained
        assert {name: validation[0][name] for name in untrained if name not in ("seconds", "time")} == {
            name: value for name, value in untrained.items() if name not in ("seconds", "time")
        }


@pytest.mark.parametrize("target, drafter", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_16_bit_targets_are_near_the_definition(tiny: Path, tmp_path: Path, target: str, drafter: str) -> None:
    dtypes = [f"target.dtype={target}", f"drafter.compute_dtype={drafter}"]
    config = tiny_config(tiny, tmp_path / "run", "log.every=1", "epochs=1", "loss.kl_weight=0.5", *dtypes)
    train(config)
    records = [r for r in read_records(tmp_path / "run") if r["kind"] == "train"]
    _, nll, kl = first_step(make_plan(config))
    assert records[0]["nll"] == pytest.approx(nll, rel=0.02)
    assert records[0]["kl"] == pytest.approx(kl, rel=0.02)
    assert records[-1]["loss"] < records[0]["loss"]


@INTERPRETED
def test_a_run_with_triton_kernels_has_the_same_first_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`devices.kernels` reaches the target's worker, too."""
    used, compute = set(), TeacherHead.compute

    def recording(self: TeacherHead) -> None:
        used.add(self._workspace.implementation)
        compute(self)

    monkeypatch.setattr(TeacherHead, "compute", recording)
    options = ["log.every=1", "epochs=1", "schedule.jobs_per_step=1", "data.validation=[]", *RUNS["all"]]
    (tmp_path / "three.jsonl").write_text("".join((tiny / "train.jsonl").open().readlines()[:3]))
    options.append(f"data.train=[{tmp_path / 'three.jsonl'}]")
    losses = []
    for kernels in ("torch", "triton"):
        train(tiny_config(tiny, tmp_path / kernels, f"devices.kernels={kernels}", *options))
        assert used == {kernels}
        used.clear()
        losses.append(next(r["loss"] for r in read_records(tmp_path / kernels) if r["kind"] == "train"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_pure_kl_brings_the_drafter_to_the_target(tiny: Path, tmp_path: Path) -> None:
    """The KL alone falls by two fifths, which cross-entropy against unrelated text does not bring about."""
    for name, override in (("kl", "loss.kl_weight=1"), ("data", "loss.kl_weight=0.001")):
        train(tiny_config(tiny, tmp_path / name, "log.every=1", "epochs=6", override))
    kl, data = ([r["kl"] for r in read_records(tmp_path / n) if r["kind"] == "train"] for n in ("kl", "data"))
    assert kl[0] == pytest.approx(data[0], rel=1e-6)
    assert np.mean(kl[-3:]) < 0.6 * kl[0]
    assert np.mean(data[-3:]) > 0.8 * data[0]


def test_a_killed_run_with_all_options_resumes_bitwise(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(tiny, tmp_path / "straight", *RUNS["all"]))
    config = tiny_config(tiny, tmp_path / "run", "checkpoint.every=1", "devices.num_targets=2", *RUNS["all"])
    for steps in (2, 0, 3):
        _run_killed(config, steps, monkeypatch)
    assert train(config, resume="auto").complete
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")
    with pytest.raises(ValueError, match=r"loss\.kl_weight: 0\.25 -> 0\.5"):
        train(tiny_config(tiny, tmp_path / "run", *RUNS["all"], "loss.kl_weight=0.5"), resume="auto")


def test_stale_slots_and_teacher_buffers_change_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer starts as NaN or the largest integer, and a slot's teacher gets that again when it is released."""
    train(tiny_config(tiny, tmp_path / "clean", *RUNS["all"]))
    tables: list[Any] = []
    build, release = training.BufferTable, Ring.release

    def make(specs: Any) -> Any:
        tables.append(build(specs))
        tables[-1].poison()
        return tables[-1]

    def poisoning(self: Ring, lease: Any) -> None:
        for name in ("teacher_mean", "teacher_entropy", "teacher_argmax", "teacher_rows"):
            slot = tables[0][f"slot.{name}"][lease.slot]
            slot.fill_(float("nan") if slot.is_floating_point() else 2**63 - 1)
        release(self, lease)

    monkeypatch.setattr(training, "BufferTable", make)
    monkeypatch.setattr(Ring, "release", poisoning)
    train(tiny_config(tiny, tmp_path / "poisoned", *RUNS["all"]))
    assert len(tables) == 1
    assert weights(tmp_path / "poisoned") == weights(tmp_path / "clean")


# ---- off, the plan, and refusals ------------------------------------------------------------------------------------


def test_without_the_options_nothing_is_added(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer, no line in the report, no layer after the deepest tap, and no other argument to the target."""
    plan = make_plan(tiny_config(tiny, tmp_path / "run"))
    assert plan.teacher is None
    assert not [spec.name for spec in plan.buffer_specs() if "teacher" in spec.name]
    assert "teacher" not in str(plan)
    assert "\nloss" not in str(plan)
    calls: list[tuple[int, int]] = []
    forward = Target.forward

    def counting(self: Target, *args: Any) -> None:
        calls.append((len(self.decoder.layers), len(args)))
        forward(self, *args)

    monkeypatch.setattr(Target, "forward", counting)
    train(tiny_config(tiny, tmp_path / "run"), dry_run=True)
    assert set(calls) == {(4, 3)}  # taps 1 and 3


def test_the_plan_counts_the_teacher(tiny: Path, tmp_path: Path) -> None:
    """T 256, A 32, K 4: at most 32 * 3 = 96 positions; V 96 and D 32; the target has one layer after tap 3."""
    plain = make_plan(tiny_config(tiny, tmp_path / "run"))
    plan = make_plan(tiny_config(tiny, tmp_path / "run", "loss.kl_weight=0.5", "loss.labels=target"))
    assert "loss      labels of the target, KL weight 0.5, weighting decay" in str(plan)
    assert "teacher   1 more target layers, and its head at up to 96 positions of a job x 96 head rows" in str(plan)
    assert f"head rows: {4 * 96 * 96 * 32 / 1e9:.4g} GFLOP" in str(plan)
    labels = make_plan(tiny_config(tiny, tmp_path / "run", "loss.labels=target", "drafter.draft_vocab_size=40"))
    assert f"x 40 head rows: {2 * 96 * 40 * 32 / 1e9:.4g} GFLOP" in str(labels)
    slot = 8 * 96 + 96 * (4 * 32 + 4 + 8)  # teacher_rows; mean, entropy and argmax of each position
    target = 96 * (8 + 4 * 32 + 4 + 8 + 4 * 32) + 8
    extra = sum(s.nbytes for s in plan.buffer_specs()) - sum(s.nbytes for s in plain.buffer_specs())
    assert extra == 8 * slot + target + (slot + 8)  # 8 slots, one target, the workspace's sanitised copy


def test_slots_are_as_many_as_fit_with_their_teacher(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the free memory, shared by slots of 256 x 64 features and 96 x (32 + 1) float32 of the teacher."""
    monkeypatch.setattr("dflash_graph.plan._free_bytes", lambda device: 2 * 15 * (4 * 256 * 64 + 4 * 96 * 33) + 7)
    options = ["schedule.slots=null"]
    assert make_plan(tiny_config(tiny, tmp_path / "run", "loss.kl_weight=0.5", *options)).slots == 15
    assert make_plan(tiny_config(tiny, tmp_path / "run", *options)).slots == 17


def test_d_pace_needs_nothing_of_the_target(tiny: Path, tmp_path: Path) -> None:
    plain = make_plan(tiny_config(tiny, tmp_path / "run"))
    plan = make_plan(tiny_config(tiny, tmp_path / "run", "loss.weighting=d_pace"))
    assert plan.buffer_specs() == plain.buffer_specs()
    assert "weighting d_pace, alpha 0.5" in str(plan)
    assert plan.job_shape.gamma is None
    assert vars(plan.validation_shape) == vars(plain.job_shape)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["loss.kl_weight=0.5", "drafter.compute_dtype=bfloat16"], r"found torch\.float32 and torch\.bfloat16"),
        (["devices.kernels=triton"], "Triton kernels need a CUDA device"),
    ],
)
def test_what_cannot_run_is_refused_before_the_target_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(Target, "__init__", lambda *a, **k: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=message):
        train(tiny_config(tiny, tmp_path / "run", *overrides))


@pytest.mark.parametrize("override", ["loss.kl_weight=0.5", "loss.labels=target"])
def test_a_target_without_its_head_is_refused(tiny: Path, tmp_path: Path, override: str) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        train(tiny_config(tiny, tmp_path / "run", f"target.path={tmp_path / 'model'}", override))
