"""The drafter's mathematics against a dense implementation, what each block sees, and the flat parameters."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_graph.drafter import BlockInputs, DrafterSpec, FlatParameters
from dflash_graph.schedule import Bucket
from tests.dense import dense_with_grads
from tests.toys import (
    CPU,
    FULL,
    SLIDING,
    Toy,
    ToyJob,
    ToyRows,
    make_jobs,
    norm_of,
    random_rows,
    random_tensors,
    relative_error,
    toy_shape,
    toy_spec,
)


@pytest.fixture
def float64() -> Iterator[None]:
    """The package's own path in float64: masters, gradients and accumulators follow the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- loss and gradients against the dense implementation ------------------------------------------------------------

ONE, MIXED = {"num_hidden_layers": 1}, {"num_hidden_layers": 3, "layer_types": (SLIDING, FULL, SLIDING)}
# name: changes of the spec, row lengths, changes of the job's shape, share of supervised tokens
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, Any], float]] = {
    # All tokens supervised: anchors from position 0 (empty context) to the last but one, most places unused.
    "one row": (ONE, [12], {}, 1.0),
    # Rows of 2 and 3 tokens are shorter than a block, 8 and 12 fill their bucket: the next row's tokens follow at once.
    "several rows": ({}, [7, 12, 3, 2, 8, 12, 5], {}, 1.0),
    "gaps in the loss mask": ({}, [17, 12, 9, 20], {}, 0.6),
    "anchors thinned, none unused": ({}, [16, 12, 16], {"num_anchors": 11}, 1.0),
    "three layers": ({"num_hidden_layers": 3}, [7, 12, 3, 2], {}, 1.0),
    "causal": ({"causal": True}, [7, 12, 3, 2], {}, 0.8),
    "sliding": ({"layer_types": (SLIDING, SLIDING), "sliding_window": 5}, [20, 12, 3, 16], {}, 0.8),
    # Window 1: k = 0 sees no context position, and neither do the others, which lie further on.
    "sliding, window 1": ({"layer_types": (SLIDING, FULL), "sliding_window": 1}, [20, 12, 3], {}, 0.8),
    "sliding, window 2": ({"layer_types": (FULL, SLIDING), "sliding_window": 2}, [20, 12, 3], {}, 0.8),
    "sliding, window over the rows": ({"layer_types": (SLIDING, FULL), "sliding_window": 99}, [20, 12, 3], {}, 0.8),
    "mixed": ({**MIXED, "sliding_window": 6}, [20, 12, 3, 16], {}, 0.8),
    "mixed and causal": ({**MIXED, "sliding_window": 6, "causal": True}, [20, 12, 3, 16], {}, 0.8),
    "as many key heads as heads": ({"num_key_value_heads": 4}, [7, 12, 3], {}, 1.0),
    "one key head": ({"num_key_value_heads": 1}, [7, 12, 3], {}, 1.0),
    "one head": ({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}, [7, 12, 3], {}, 1.0),
    "one tap": ({"target_layer_ids": (2,)}, [7, 12, 3], {}, 1.0),
    "three taps": ({"target_layer_ids": (0, 2, 4)}, [7, 12, 3], {}, 1.0),
    # The last blocks reach K - 2 positions beyond the longest row there is, the end of the rotary table.
    "rows of the greatest length": ({"max_trained_length": 12}, [12, 12, 7], {}, 1.0),
    "blocks of 2": ({"block_size": 2}, [7, 12, 3, 2], {}, 1.0),
    "blocks longer than rows": ({"block_size": 9}, [7, 8, 3, 2, 12], {}, 1.0),
    "more anchors than one tile": (ONE, [64], {"num_anchors": 70}, 1.0),
    "slow decay": ({}, [7, 12], {"gamma": 50.0}, 1.0),
    "another theta and eps": ({"rope_theta": 1e6, "rms_norm_eps": 0.1}, [7, 12], {}, 1.0),
    # The reduced head holds a third of the ids: most labels lie outside it and are not trained.
    "reduced head": ({"draft_vocab_size": 8}, [7, 12, 3, 20], {}, 1.0),
}


def make_case(name: str) -> tuple[DrafterSpec, ToyJob, Any, list[int] | None]:
    changes, lengths, shape_changes, supervised = CASES[name]
    spec = toy_spec(**changes)
    head_ids, head_index = None, None
    if spec.draft_vocab_size is not None:
        head_ids = list(range(0, spec.vocab_size, 3))
        head_index = np.full(spec.vocab_size, -1, np.int32)
        head_index[head_ids] = np.arange(spec.draft_vocab_size)
    longest = -(-max(lengths) // 4) * 4
    bucket = Bucket(longest, len(lengths))  # two positions of the budget are left over behind the last row
    shape = toy_shape(spec, head_index=head_index, token_budget=longest * len(lengths) + 2, **shape_changes)
    (job,) = make_jobs(random_rows(spec, lengths, supervised=supervised), shape, buckets=(bucket,))
    return spec, job, shape, head_ids


def compare(toy: Toy, job: ToyJob, head_ids: list[int] | None, tolerance: float) -> None:
    truth, grads = dense_with_grads(
        toy.spec, toy.tensors, toy.embed, toy.head, job.rows, job.anchors, gamma=toy.shape.gamma, head_ids=head_ids
    )
    toy.accumulate(job)
    assert len(truth.trained) == job.job.num_trained_rows > 0
    counts = toy.step.read_counts()
    assert counts.loss_sum == pytest.approx(float(truth.loss), rel=tolerance)
    assert counts.weight_sum == pytest.approx(truth.weight, rel=tolerance)
    assert float(toy.step.weight_sum) == pytest.approx(truth.weight, rel=tolerance)
    errors = relative_error(toy.grads(), grads)
    assert max(errors.values()) <= tolerance, errors
    # Every parameter has a part in the loss, so that a missing gradient cannot hide.
    assert all(grad.abs().sum() > 0 for grad in grads.values())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_in_float64(name: str) -> None:
    spec, job, shape, head_ids = make_case(name)
    toy = Toy(spec, shape)
    assert {t.dtype for t in (*toy.parameters.masters.values(), *toy.parameters.grads.values())} == {torch.float64}
    compare(toy, job, head_ids, 1e-9)


@pytest.mark.parametrize("name", ["several rows", "mixed and causal", "reduced head", "blocks longer than rows"])
def test_equals_dense_in_float32(name: str) -> None:
    spec, job, shape, head_ids = make_case(name)
    compare(Toy(spec, shape), job, head_ids, 1e-4)


def test_cases_reach_the_edges() -> None:
    """The rows and anchors that the cases above are there for do occur in them."""
    _, job, shape, _ = make_case("several rows")
    anchors = set(job.anchors)
    assert {(r, 0) for r in range(7)} <= anchors
    assert {(r, len(tokens) - 2) for r, (tokens, _, _) in enumerate(job.rows)} <= anchors
    assert job.job.num_anchors < shape.num_anchors
    assert any(len(tokens) == job.job.bucket_length for tokens, _, _ in job.rows[:-1])
    assert make_case("anchors thinned, none unused")[1].job.num_anchors == 11
    assert make_case("more anchors than one tile")[1].job.num_anchors == 63
    full = sum(len(tokens) - 1 - a for tokens, _, _ in make_case("reduced head")[1].rows for a in range(3))
    assert make_case("reduced head")[1].job.num_trained_rows < full / 2


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("seed", range(10))
def test_equals_dense_for_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2, 3]))
    layers = int(rng.integers(1, 4))
    types = tuple(rng.choice([FULL, SLIDING], layers).tolist())
    spec = toy_spec(
        num_hidden_layers=layers,
        num_key_value_heads=heads,
        num_attention_heads=heads * int(rng.integers(1, 4)),
        head_dim=2 * int(rng.integers(1, 6)),
        block_size=int(rng.integers(2, 8)),
        layer_types=types,
        sliding_window=int(rng.integers(1, 24)) if SLIDING in types else None,
        causal=bool(rng.integers(2)),
        target_layer_ids=tuple(range(int(rng.integers(1, 4)))),
    )
    shape = toy_shape(spec, num_anchors=int(rng.integers(5, 60)), token_budget=130, seed=seed)
    lengths = [*rng.integers(2, 30, 4).tolist(), 24]
    (job,) = make_jobs(
        random_rows(spec, lengths, supervised=float(rng.uniform(0.5, 1)), seed=seed), shape, buckets=(Bucket(30, 4),)
    )[:1]
    toy = Toy(spec, shape)
    truth, grads = dense_with_grads(
        spec, toy.tensors, toy.embed, toy.head, job.rows, job.anchors, gamma=toy.shape.gamma
    )
    toy.accumulate(job)
    assert toy.step.read_counts().loss_sum == pytest.approx(float(truth.loss), rel=1e-9)
    errors = relative_error(toy.grads(), grads)
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.usefixtures("float64")
def test_gradients_of_several_jobs_add_up() -> None:
    """Jobs of unlike length and weight: gradients are sums over all of them, with no mean taken on the way."""
    spec = toy_spec()
    shape = toy_shape(spec, token_budget=40)
    jobs = make_jobs(random_rows(spec, [30, 9, 12, 4, 40, 2, 17, 8], supervised=0.8), shape)
    assert len(jobs) >= 3
    toy = Toy(spec, shape)
    totals = {name: torch.zeros_like(tensor) for name, tensor in toy.tensors.items()}
    loss = weight = 0.0
    for job in jobs:
        truth, grads = dense_with_grads(spec, toy.tensors, toy.embed, toy.head, job.rows, job.anchors, gamma=2.0)
        totals = {name: total + grads[name] for name, total in totals.items()}
        loss, weight = loss + float(truth.loss), weight + truth.weight
    toy.accumulate(*jobs)
    errors = relative_error(toy.grads(), totals)
    assert max(errors.values()) <= 1e-9, errors
    counts = toy.step.read_counts()
    assert counts.loss_sum / counts.weight_sum == pytest.approx(loss / weight, rel=1e-9)


def test_a_job_without_anchors_adds_nothing() -> None:
    spec = toy_spec()
    shape = toy_shape(spec)
    (job,) = make_jobs(random_rows(spec, [5, 9], supervised=0.0), shape)
    assert job.job.num_anchors == 0
    toy = Toy(spec, shape)
    toy.accumulate(job)
    assert norm_of(toy.grads()) == 0
    counts = toy.step.read_counts()
    assert (counts.loss_sum, counts.weight_sum, counts.rows.sum()) == (0, 0, 0)


def test_evaluation_leaves_gradients_and_weight_sum_alone() -> None:
    spec, job, shape, _ = make_case("several rows")
    toy = Toy(spec, shape)
    toy.accumulate(job)
    grads, weight, trained = toy.grads(), float(toy.step.weight_sum), toy.step.read_counts()
    toy.step.micro_step(toy.load(job), train=False)
    assert all(torch.equal(grad, grads[name]) for name, grad in toy.grads().items())
    assert float(toy.step.weight_sum) == weight
    assert toy.step.read_counts().loss_sum == trained.loss_sum


# ---- what each block sees, by hand ----------------------------------------------------------------------------------

# position   0   1   2   3   4   5   6   7   8   9  10  11
TOKENS = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
MASK = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]
# Anchors 3, 4, 7, 10, K = 4. Trained rows (a, k): those whose token anchor + k is in the row and in the loss mask.
TRAINED = [(0, 1), (0, 2), (1, 1), (1, 3), (2, 1), (2, 3), (3, 1)]
SEES_ALL = {
    (0, 1): "012",
    (0, 2): "012",
    (1, 1): "0123",
    (1, 3): "0123",
    (2, 1): "0123456",
    (2, 3): "0123456",
    (3, 1): "0123456789",
}
# Window 4: position p is seen by anchor + k if anchor + k - p < 4, so from anchor + k - 3 to anchor - 1.
SEES_WINDOW = {(0, 1): "12", (0, 2): "2", (1, 1): "23", (1, 3): "", (2, 1): "56", (2, 3): "", (3, 1): "89"}
# Two layers, the first sliding: a block's rows mix in the second, so each sees what any of its four rows sees in the
# first (k = 0 reaches furthest, to anchor - 3). Causal as well: row k sees what rows 0..k see, which is the same here.
SEES_MIXED = {a_k: {0: "012", 1: "123", 2: "456", 3: "789"}[a_k[0]] for a_k in TRAINED}


def outputs(toy: Toy, features: Tensor, job: ToyJob, tokens: Tensor | None = None) -> Tensor:
    """(R, D) hidden states of the trained rows of the one row's job, for features (12, N*D) of its positions."""
    job.rows[0] = (*job.rows[0][:2], features)
    size = toy.load(job)
    if tokens is not None:
        toy.table["workspace.anchor_tokens"][: len(tokens)] = tokens
    with torch.no_grad():
        return toy.step.drafter(toy.step.inputs(size))[: job.job.num_trained_rows].clone()


@pytest.mark.parametrize(
    "changes, table",
    [
        ({"num_hidden_layers": 1}, SEES_ALL),
        ({"num_hidden_layers": 3}, SEES_ALL),
        ({"num_hidden_layers": 1, "causal": True}, SEES_ALL),
        ({"num_hidden_layers": 1, "layer_types": (SLIDING,), "sliding_window": 4}, SEES_WINDOW),
        ({"num_hidden_layers": 2, "layer_types": (SLIDING, SLIDING), "sliding_window": 4}, SEES_MIXED),
        ({"num_hidden_layers": 2, "layer_types": (SLIDING, SLIDING), "sliding_window": 4, "causal": True}, SEES_MIXED),
        ({"num_hidden_layers": 2, "layer_types": (FULL, SLIDING), "sliding_window": 4}, SEES_ALL),
    ],
    ids=["full", "three layers", "causal", "sliding", "two sliding", "two sliding, causal", "mixed"],
)
def test_context_that_each_row_sees_by_hand(changes: dict[str, Any], table: dict[tuple[int, int], str]) -> None:
    spec = toy_spec(**changes)
    shape = toy_shape(spec, num_anchors=6)
    rows = ToyRows([(TOKENS, MASK)], len(spec.target_layer_ids) * spec.hidden_size)
    (job,) = make_jobs(rows, shape)
    assert job.anchors == [(0, 3), (0, 4), (0, 7), (0, 10)]
    toy = Toy(spec, shape)
    features = rows.features[0]
    clean = outputs(toy, features, job)
    seen: dict[tuple[int, int], str] = dict.fromkeys(TRAINED, "")
    for position in range(12):
        moved = features.clone()
        moved[position] = -moved[position] + 1
        changed = (outputs(toy, moved, job) != clean).any(1)
        for a_k, differs in zip(TRAINED, changed.tolist(), strict=True):
            seen[a_k] += str(position) if differs else ""
    assert seen == table


def test_a_block_sees_its_own_anchor_token_only() -> None:
    spec = toy_spec()
    shape = toy_shape(spec, num_anchors=6)
    rows = ToyRows([(TOKENS, MASK)], len(spec.target_layer_ids) * spec.hidden_size)
    (job,) = make_jobs(rows, shape)
    toy = Toy(spec, shape)
    tokens = torch.tensor([13, 14, 17, 20])
    clean = outputs(toy, rows.features[0], job)
    for a in range(4):
        other = tokens.clone()
        other[a] = 1
        changed = (outputs(toy, rows.features[0], job, other) != clean).any(1).tolist()
        assert changed == [block == a for block, _ in TRAINED]


def test_rows_of_a_job_do_not_see_each_other() -> None:
    """A row's outputs are the same whatever its neighbours' features are."""
    spec = toy_spec()
    shape = toy_shape(spec)
    (job,) = make_jobs(random_rows(spec, [8, 8, 5]), shape)
    toy = Toy(spec, shape)

    def hidden() -> Tensor:
        with torch.no_grad():
            return toy.step.drafter(toy.step.inputs(toy.load(job)))[: job.job.num_trained_rows].clone()

    clean = hidden()
    anchors = [job.anchors[i // spec.block_size] for i in job.job.trained_rows[: len(clean)].tolist()]
    for r in range(3):
        tokens, mask, features = job.rows[r]
        job.rows[r] = (tokens, mask, features + 1)
        changed = (hidden() != clean).any(1).tolist()
        job.rows[r] = (tokens, mask, features)
        # The anchor at position 0 has an empty context, so nothing of its block can change.
        assert changed == [row == r and p > 0 for row, p in anchors]
        assert any(changed)


def test_trained_rows_are_gathered_in_their_order() -> None:
    """Any list of trained rows gives those rows of the whole output, and k = 0 is there to be asked for."""
    spec, job, shape, _ = make_case("several rows")
    toy = Toy(spec, shape)
    inputs = toy.step.inputs(toy.load(job))
    total = shape.num_anchors * spec.block_size
    rows = shape.num_anchors * (spec.block_size - 1)

    def hidden(index: Tensor) -> Tensor:
        with torch.no_grad():
            return toy.step.drafter(BlockInputs(**{**vars(inputs), "trained_rows": index}))

    everything = torch.cat([hidden(torch.arange(total)[i : i + rows]) for i in range(0, total, rows)])
    shuffled = torch.randperm(job.job.num_anchors * spec.block_size)[:rows]
    assert torch.allclose(hidden(shuffled), everything[shuffled], atol=1e-6)


# ---- flat parameters ------------------------------------------------------------------------------------------------


def inside(view: Tensor, buffer: Tensor) -> bool:
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    return start <= view.data_ptr() and view.data_ptr() + view.nbytes <= end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_leaf_and_gradient_is_a_view_of_the_flat_buffers(dtype: torch.dtype) -> None:
    spec = toy_spec()
    shapes = spec.parameter_shapes()
    parameters = FlatParameters(shapes, device=CPU, compute_dtype=dtype)
    masters = parameters.views(parameters.masters)
    taken: dict[str, list[tuple[int, int]]] = {"decay": [], "no_decay": []}
    for name, shape in shapes.items():
        group = "decay" if name.endswith(("proj.weight", "fc.weight")) else "no_decay"
        leaf = parameters.leaves[name]
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.shape == shape
        assert leaf.dtype == dtype
        assert leaf.grad is not None
        assert leaf.grad.dtype == masters[name].dtype == torch.float32
        assert inside(leaf, parameters.compute[group])
        assert inside(leaf.grad, parameters.grads[group])
        assert inside(masters[name], parameters.masters[group])
        assert (leaf.data_ptr() == masters[name].data_ptr()) == (dtype == torch.float32)
        begin = (masters[name].data_ptr() - parameters.masters[group].data_ptr()) // 4
        assert (leaf.grad.data_ptr() - parameters.grads[group].data_ptr()) // 4 == begin
        taken[group].append((begin, begin + leaf.numel()))
    for group, places in taken.items():
        places.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places)), group
    # The optimizer works on whole buffers: what no parameter owns must stay zero and count for nothing.
    parameters.load(random_tensors(spec))
    owned = norm_of(parameters.views(parameters.masters))
    assert norm_of(parameters.masters) == pytest.approx(owned, rel=1e-12)


def test_parameters_are_those_of_the_public_drafter() -> None:
    """Names and shapes by hand; no bias, no embedding, no head."""
    layer = {
        "self_attn.q_proj": (24, 16),
        "self_attn.k_proj": (12, 16),
        "self_attn.v_proj": (12, 16),
        "self_attn.o_proj": (16, 24),
        "self_attn.q_norm": (6,),
        "self_attn.k_norm": (6,),
        "mlp.gate_proj": (20, 16),
        "mlp.up_proj": (20, 16),
        "mlp.down_proj": (16, 20),
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
    }
    expected = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    expected |= {"fc.weight": (16, 32), "hidden_norm.weight": (16,), "norm.weight": (16,)}
    assert toy_spec().parameter_shapes() == expected


def test_load_refuses_wrong_names_and_shapes() -> None:
    spec = toy_spec()
    parameters = FlatParameters(spec.parameter_shapes(), device=CPU, compute_dtype=torch.float32)
    good = random_tensors(spec)
    short = {name: tensor for name, tensor in good.items() if name != "norm.weight"}
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\], unknown \[\]"):
        parameters.load(short)
    with pytest.raises(ValueError, match=r"missing \[\], unknown \['lm_head.weight'\]"):
        parameters.load({**good, "lm_head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"norm.weight must have shape \(16,\); found \(1,\)"):
        parameters.load({**good, "norm.weight": torch.ones(1)})  # a copy would broadcast without a word


def test_load_writes_in_place_and_refreshes_the_compute_copy() -> None:
    spec = toy_spec()
    parameters = FlatParameters(spec.parameter_shapes(), device=CPU, compute_dtype=torch.bfloat16)
    before = {name: buffer.data_ptr() for name, buffer in parameters.buffers()}
    tensors = random_tensors(spec)
    parameters.load(tensors)
    assert {name: buffer.data_ptr() for name, buffer in parameters.buffers()} == before
    for name, leaf in parameters.leaves.items():
        assert torch.equal(leaf.detach(), tensors[name].float().bfloat16())


def test_spec_survives_json_and_refuses_nonsense() -> None:
    spec = toy_spec(layer_types=(SLIDING, FULL), sliding_window=7, draft_vocab_size=9)
    assert DrafterSpec.from_dict(spec.to_dict()) == spec
    assert (spec.head_vocab_size, toy_spec().head_vocab_size) == (9, 23)
    for changes, message in [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; found 4 and 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"mask_token_id": 23}, r"0\.\.22; found 23"),
    ]:
        with pytest.raises(ValueError, match=message):
            toy_spec(**changes)
