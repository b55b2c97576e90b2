"""The fused loss at its limits: real vocabularies, random layouts, memory, offsets beyond 2**31, and its operator."""

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dflash_graph.kernels import fused_lm_head_loss as op
from dflash_graph.kernels import gemm
from dflash_graph.kernels.backend import Implementation, in_the_open
from dflash_graph.kernels.fused_lm_head_loss import IGNORE_INDEX, DPace
from tests.kernels.loss_truth import Case, assert_close, dense, error, run

BOTH: tuple[Implementation, ...] = ("torch", "triton")


# Reduced and full vocabularies of real targets: odd ones, multiples of the tile, and one above the largest.
@pytest.mark.parametrize("vocab", [7, 17, 257, 1000, 32001, 129920, 151936, 152064])
def test_vocabularies_with_default_tiles(vocab: int) -> None:
    rows = 5
    labels = torch.tensor([0, vocab - 1, vocab // 2, IGNORE_INDEX, vocab])  # first, last, inside, and two that miss
    case = Case(torch.randn(rows, 16), torch.randn(vocab, 16), labels, torch.rand(rows) + 0.1)
    case.workspace = {}
    found, truth = run(case), dense(case)
    for name in ("loss", "grad", "nll", "logsumexp", "weight_sum"):
        assert error(getattr(found, name), getattr(truth, name)) < 1e-5, name
    # float32 may swap neighbours among so many.
    assert int((found.label_rank - truth.label_rank)[case.keep].abs().max()) <= vocab // 10_000
    assert not found.grad[3:].any()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 17])  # chunks of 8
def test_row_counts_around_a_chunk_in_both_implementations(rows: int, implementation: Implementation) -> None:
    case = Case(torch.randn(rows, 16), torch.randn(300, 16), torch.randint(0, 300, (rows,)), torch.rand(rows) + 0.1)
    found = run(case, case.make_workspace(implementation=implementation, tile_columns=None))
    truth = dense(case)
    for name in ("loss", "grad", "nll", "logsumexp", "weight_sum"):
        assert error(getattr(found, name), getattr(truth, name)) < 1e-5, name
    assert torch.equal(found.label_rank, truth.label_rank)


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """Any shape and mix of options; rows that do not count hold NaN."""
    rows, vocab, hidden = draw(st.integers(0, 11)), draw(st.integers(1, 40)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scale = draw(st.sampled_from([0.0, 1.0, 10.0, 100.0]))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    wrong = torch.tensor([IGNORE_INDEX, -1, vocab, -(2**40), 2**40])
    is_wrong = torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    labels = torch.where(is_wrong, wrong[torch.randint(0, 5, (rows,), generator=generator)], labels)
    weights = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) < 0.8)
    block_size, teach = draw(st.integers(2, 5)), draw(st.booleans())
    case = Case(
        hidden=normal(rows, hidden) * scale,
        head=normal(vocab, hidden),
        labels=labels,
        weights=weights,
        num_rows=draw(st.one_of(st.none(), st.integers(0, rows))),
        bias=normal(vocab) if draw(st.booleans()) else None,
        logit_scale=draw(st.sampled_from([1.0, 0.25, 3.0])),
        soft_cap=None if teach else draw(st.sampled_from([None, 2.0, 50.0])),
        block_size=block_size,
        workspace={"chunk_rows": draw(st.integers(1, 12)), "tile_columns": draw(st.integers(1, 41))},
    )
    if draw(st.booleans()):
        # A block misses some of its rows: any ascending choice of places.
        places = torch.arange(2 * rows) // (block_size - 1) * block_size + 1 + torch.arange(2 * rows) % (block_size - 1)
        chosen = torch.randperm(2 * rows, generator=generator)[:rows].sort().values
        case.alpha, case.places = draw(st.sampled_from([0.0, 0.5, 1.0])), places[chosen]
        case.workspace |= {"num_blocks": 2 * rows + 1}
    if teach:
        case.teacher_logits = normal(3, vocab) * draw(st.sampled_from([0.0, 3.0]))
        case.teacher_rows = torch.randint(0, 3, (rows,), generator=generator)
        case.kl_weight = draw(st.sampled_from([0.0, 0.5, 1.0]))
    case.hidden[~case.keep] = float("nan")
    return case


def check_layout(case: Case) -> None:
    ws = case.make_workspace()
    ws.host_reads = ws.skips_dead_chunks = case.hidden.shape[0] % 2 == 0
    found, truth = run(case, ws), dense(case)
    keep = case.keep
    for name in ("loss", "nll", "kl", "logsumexp", "row_weights", "weight_sum"):
        torch.testing.assert_close(
            getattr(found, name).double(),
            getattr(truth, name),
            rtol=1e-10,
            atol=1e-10,
            msg=lambda m, n=name: f"{n} {m}",
        )
    torch.testing.assert_close(found.grad, truth.grad, rtol=1e-9, atol=1e-9)
    assert not found.grad[~keep].any()
    # Near ties (the label's own value rounds differently) may differ; they are rare in float64.
    assert torch.equal(found.label_rank, truth.label_rank)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(layouts())
def test_random_layouts_equal_the_dense_truth(case: Case) -> None:
    check_layout(case)


# ---- memory and counts ----------------------------------------------------------------------------------------------


def peak_bytes(run_once: object) -> int:
    """Most bytes that torch's CPU allocator held above the start, during a call."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run_once()  # type: ignore[operator]
    held = peak = 0
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_peak_memory_at_a_large_vocabulary_is_under_1_gb_with_exact_flops() -> None:
    """R 7,680, V 151,936: full logits would take 4.7 GB in float32. The CPU's own need is a few megabytes."""
    rows, vocab, hidden = 7680, 151936, 64
    x = (torch.randn(rows, hidden) * 0.1).requires_grad_()
    head, labels, weights = torch.randn(vocab, hidden), torch.randint(0, vocab, (rows,)), torch.ones(rows)
    sizes = {"num_rows": rows, "hidden_size": hidden, "vocab_size": vocab, "dtype": torch.float32}
    ws = op.make_workspace(**sizes, device="cpu")

    def step() -> None:
        with FlopCounterMode(display=False, custom_mapping=gemm.flop_formulas()) as counter, in_the_open():
            op.fused_lm_head_loss(x, head, labels, weights, workspace=ws).backward()
        assert counter.get_total_flops() == 4 * rows * vocab * hidden

    assert ws.nbytes() + peak_bytes(step) < 16 * 2**20
    # What a GPU would allocate, by the same rule: shapes alone decide it.
    for dtype in (torch.float32, torch.bfloat16):
        device_ws = op.make_workspace(**(sizes | {"dtype": dtype}), device="meta", implementation="triton")
        assert device_ws.nbytes() + 2 * rows * hidden * dtype.itemsize < 10**9
        assert device_ws.chunk_rows % 128 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steady_state_holds_nothing_back(dtype: torch.dtype) -> None:
    """After a step that frees its gradient no memory is held, however often it runs."""
    case = Case(
        torch.randn(40, 16).to(dtype), torch.randn(300, 16).to(dtype), torch.randint(0, 300, (40,)), torch.ones(40)
    )
    ws = case.make_workspace()
    run(case, ws)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for _ in range(5):
            run(case, ws)
            gc.collect()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert sum(e.nbytes() for e in events if e.name() == "[memory]") == 0


@pytest.fixture
def vast() -> Iterator[Tensor]:
    """2**31 + 2**16 floats of which almost none is ever touched."""
    floats = 2**31 + 2**16
    with mmap.mmap(-1, 4 * floats, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        yield tensor
        del tensor
        gc.collect()


def test_offsets_beyond_2_31(vast: Tensor) -> None:
    """The second row of logits starts 16 elements below 2**31 and ends beyond it."""
    case = Case(torch.randn(2, 16), torch.randn(300, 16), torch.tensor([5, 290]), torch.ones(2))
    ws = case.make_workspace(implementation="triton", tile_columns=None)
    ws.scratch, ws.row_stride = vast, 2**31 - 16
    truth = dense(case)
    assert_close(run(case, ws), truth, 1e-4)
    # In 16 bits the gradient's row starts at twice the stride.
    narrow = Case(case.hidden.bfloat16(), case.head.bfloat16(), case.labels, case.weights)
    ws16 = narrow.make_workspace(implementation="triton", tile_columns=None)
    ws16.scratch, ws16.row_stride = vast, 2**31 - 16
    assert error(run(narrow, ws16).grad, dense(narrow).grad) < 2 * error(
        dense(narrow, torch.bfloat16).grad, dense(narrow).grad
    )


# ---- the operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", BOTH)
def test_schema_and_fake_tensors_of_the_operator(implementation: Implementation) -> None:
    """Only declared arguments are written, the result is nothing, and the operator traces with fake tensors."""
    case = Case(torch.randn(9, 8), torch.randn(50, 8), torch.randint(0, 50, (9,)), torch.ones(9))
    ws = case.make_workspace(implementation=implementation, tile_columns=None)
    options = (
        ws.implementation, ws.chunk_rows, ws.tile_columns, ws.row_stride, ws.host_reads, ws.skips_dead_chunks,
        1.0, None, 0.0, 0.0, True, True,
    )  # fmt: skip
    inputs = (case.hidden, case.head, case.labels, case.weights, None, 9, *[None] * 6, ws.tensors(), *options)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dflash_graph.fused_lm_head_loss.default, inputs, test_utils=tests)
    backward = torch.ops.dflash_graph.fused_lm_head_loss_backward.default
    for out in (None, torch.zeros(9, 8)):
        arguments = (torch.randn(9, 8), torch.rand(9), torch.tensor(2.0), out, implementation)
        torch.library.opcheck(backward, arguments, test_utils=tests)


def test_a_forward_and_a_backward_are_one_node_each() -> None:
    case = Case(torch.randn(9, 8), torch.randn(50, 8), torch.randint(0, 50, (9,)), torch.ones(9))
    ws = case.make_workspace()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run(case, ws)
    names = [e.key for e in prof.key_averages() if e.key.startswith("dflash_graph::")]
    assert sorted(names) == ["dflash_graph::fused_lm_head_loss", "dflash_graph::fused_lm_head_loss_backward"]


@pytest.mark.parametrize("implementation", BOTH)
def test_runs_are_bitwise_equal_with_all_options(implementation: Implementation) -> None:
    case = Case(
        torch.randn(50, 16), torch.randn(300, 16), torch.randint(0, 300, (50,)), torch.ones(50), num_rows=45,
        bias=torch.randn(300), alpha=0.5, places=torch.arange(50) // 3 * 4 + 1 + torch.arange(50) % 3,
        kl_weight=0.5, teacher_logits=torch.randn(5, 300), teacher_rows=torch.arange(50) % 5,
    )  # fmt: skip
    results = [run(case, case.make_workspace(implementation=implementation, tile_columns=None)) for _ in range(3)]
    for again in results[1:]:
        for name, value in vars(results[0]).items():
            assert torch.equal(value, getattr(again, name)), name


def test_d_pace_never_writes_outside_its_blocks() -> None:
    """Places must lie inside; a wrong one is a caller's bug, but not a write into foreign memory."""
    case = Case(torch.randn(6, 8), torch.randn(50, 8), torch.randint(0, 50, (6,)), torch.ones(6))
    ws = case.make_workspace()
    places = torch.tensor([1, 2, 3, 5, 2**40, -(2**40)])
    assert run(case, ws, d_pace=DPace(alpha=0.5, trained_rows=places)).row_weights.isfinite().all()
