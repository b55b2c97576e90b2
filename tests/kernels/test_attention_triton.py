"""The Triton kernels of block attention in Triton's interpreter, against a dense float64 truth.

Every launch is watched: no element outside the tensors is read or written, inputs are only read, and every output is
given as NaN. The kernels are called through `forward` and `backward`; `block_attention` itself has its own tests.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_graph.kernels.backend import interpreting

if not interpreting():
    pytest.skip(
        "needs TRITON_INTERPRET=1; tests/kernels/test_gpu.py tests the compiled kernels", allow_module_level=True
    )

import triton
from triton.runtime import interpreter

from dflash_graph.kernels import block_attention_triton as kernels
from dflash_graph.kernels.block_attention_triton import Launch, Launches

# Blocks so small that some tens of positions have a masked head, a middle and a masked tail.
SMALL = Launches(*(Launch(32, 8, 4, num_warps=4, num_stages=1),) * 2, *(Launch(16, 16, 8, 4, 1),) * 2)
OUTPUTS = ("out", "lse", "dq", "dk_context", "dv_context", "dk_block", "dv_block")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row lengths of the context; live anchors as (row, position in row); shapes; the visibility rule."""

    rows: tuple[int, ...]
    anchors: tuple[tuple[int, int], ...]
    dead: int = 0
    padding: int = 0  # positions after the last row
    k: int = 3  # block size
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    causal: bool = False
    window: int | None = None
    scale: float = 0.3

    @property
    def num_tokens(self) -> int:
        return sum(self.rows) + self.padding

    @property
    def num_blocks(self) -> int:
        return len(self.anchors) + self.dead

    def indices(self) -> tuple[Tensor, Tensor]:
        """Flat anchors and row starts; those of dead blocks are far outside."""
        starts = [sum(self.rows[:r]) for r, _ in self.anchors]
        ends = [s + p for s, (_, p) in zip(starts, self.anchors, strict=True)]
        return torch.tensor(ends + [2**40] * self.dead), torch.tensor(starts + [-(2**40)] * self.dead)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """q, k_context, v_context, k_block, v_block and the gradient of the output."""
        own, context = (self.num_blocks, self.k, self.kv_heads, self.dim), (self.num_tokens, self.kv_heads, self.dim)
        rows = (self.num_blocks, self.k, self.kv_heads * self.group, self.dim)
        return [torch.randn(shape).to(dtype) for shape in (rows, context, context, own, own, rows)]


def dense(case: Case, inputs: list[Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every query against every key, with the visibility rule written out as one boolean array."""
    q, k_context, v_context, k_block, v_block = leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:5]]
    live, k = len(case.anchors), case.k
    anchors, starts = (x[:live, None, None] for x in case.indices())
    positions, offsets = torch.arange(case.num_tokens), torch.arange(k)
    context = (positions >= starts) & (positions < anchors)
    reach = context.new_ones(()) if case.window is None else anchors + offsets[:, None] - positions < case.window
    context = (context & reach).expand(live, k, -1)
    pairs = torch.ones(k, k, dtype=torch.bool)
    pairs = pairs.tril() if case.causal else pairs  # (query, key)
    own = torch.zeros(live, k, live, k, dtype=torch.bool)
    for a in range(live):
        own[a, :, a] = pairs
    visible = torch.cat([context, own.flatten(2)], -1)[:, :, None]
    keys = torch.cat([k_context, k_block[:live].flatten(0, 1)]).repeat_interleave(case.group, 1)
    values = torch.cat([v_context, v_block[:live].flatten(0, 1)]).repeat_interleave(case.group, 1)
    scores = (torch.einsum("akhe,jhe->akhj", q[:live], keys) * case.scale).masked_fill(~visible, float("-inf"))
    out = torch.einsum("akhj,jhe->akhe", scores.softmax(-1), values)
    grads = torch.autograd.grad(out, leaves, inputs[5][:live].to(dtype))

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(case.dead, *x.shape[1:])])

    results = [padded(out.detach()), padded(scores.detach().logsumexp(-1)), *grads]
    return dict(zip(OUTPUTS, results, strict=True))


class Watch:
    """Stands before the interpreter's memory functions and refuses what lies outside the tensors it was told of."""

    def __init__(self, inner: Any, read: list[Tensor], written: list[Tensor]) -> None:
        self.inner = inner
        spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in written + read]
        self.readable, self.writable = spans, spans[: len(written)]
        self.reads = self.writes = 0

    @staticmethod
    def check(spans: list[tuple[int, int]], pointers: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        used = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)]
        if used.size and not any(first <= used.min() and used.max() + itemsize <= end for first, end in spans):
            raise AssertionError("memory outside the tensors is touched")

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self.check(self.readable, pointers, mask, np.dtype(dtype).itemsize)
        self.reads += 1
        return self.inner.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Any:
        self.check(self.writable, pointers, mask, values.dtype.itemsize)
        self.writes += 1
        return self.inner.store(pointers, values, mask)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the kernels must not use {name}")  # atomics


@contextmanager
def watching(read: list[Tensor], written: list[Tensor]) -> Iterator[None]:
    inner = interpreter._interpreter
    watch = interpreter._interpreter = Watch(inner, read, written)  # type: ignore[assignment]
    try:
        yield
    finally:
        interpreter._interpreter = inner
    assert watch.reads
    assert watch.writes


def run(case: Case, inputs: list[Tensor], tiles: Launches | None = SMALL) -> dict[str, Tensor]:
    """Forward and backward with watched memory, from NaN in every output."""
    *tensors, grad_out = (x.detach() for x in inputs)
    out, lse = torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan)
    delta, grads = torch.full_like(lse, torch.nan), [torch.full_like(x, torch.nan) for x in tensors]
    index = [*case.indices(), torch.tensor(len(case.anchors))]
    rule: dict[str, Any] = {"scale": case.scale, "causal": case.causal, "sliding_window": case.window, "tiles": tiles}
    with watching([*tensors, *index], [out, lse]):
        kernels.forward(*tensors, *index, out, lse, **rule)
    with watching([*tensors, *index, out, lse, grad_out], [delta, *grads]):
        kernels.backward(*tensors, *index, out, lse, grad_out, delta, *grads, **rule)
    assert delta.isfinite().all()
    return dict(zip(OUTPUTS, [out, lse, *grads], strict=True))


def error(ours: Tensor, truth: Tensor) -> float:
    """Largest error relative to the largest element, or to 0.1 where that is less (a query that sees one key: dq 0)."""
    return (ours.double() - truth.double()).abs().max().item() / max(truth.abs().max().item(), 0.1)


def assert_equals_dense(case: Case, tiles: Launches | None = SMALL) -> None:
    inputs = case.inputs()
    truth, ours = dense(case, inputs), run(case, inputs, tiles)
    for name in OUTPUTS:
        assert error(ours[name], truth[name]) < 1e-5, name
    for name in ("out", "lse", "dq", "dk_block", "dv_block"):
        assert not ours[name][len(case.anchors) :].any(), name
    for name in ("dk_context", "dv_context"):
        unseen = ~truth["dv_context"].any(-1).any(-1)
        assert not ours[name][unseen].any(), name


EVERY = tuple((r, p) for r, length in enumerate((9, 2, 14)) for p in range(length))
LONG = Case(rows=(57,), anchors=tuple((0, p) for p in (0, 3, 4, 9, 20, 21, 22, 37, 50, 56)))
CASES = {
    "one row": LONG,
    "many rows, T not a multiple of the tile": Case(
        rows=(7, 30, 5, 21), anchors=((0, 2), (1, 3), (1, 27), (2, 4), (3, 18), (3, 19)), padding=6, dead=2
    ),
    "rows shorter than a block": Case(rows=(1, 2, 1, 2), anchors=((0, 0), (1, 1), (2, 0), (3, 0), (3, 1))),
    "row starts, no context at all": Case(rows=(5, 6), anchors=((0, 0), (1, 0))),
    "row starts and last positions": Case(
        rows=(5, 26, 4), anchors=((0, 0), (0, 4), (1, 0), (1, 25), (2, 0), (2, 3)), dead=1
    ),
    "every position": Case(rows=(9, 2, 14), anchors=EVERY, dead=3, kv_heads=1),
    "all anchors equal": Case(rows=(22, 3), anchors=((0, 17),) * 11),
    "one block": Case(rows=(12,), anchors=((0, 7),)),
    "none live": Case(rows=(12,), anchors=(), dead=7),
    "not sorted": Case(rows=(12, 18), anchors=((1, 15), (0, 11), (0, 2), (1, 0), (0, 6), (0, 6), (1, 9))),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_dense_ones(name: str, causal: bool) -> None:
    assert_equals_dense(replace(CASES[name], causal=causal))


@pytest.mark.parametrize(
    "window", [1, 2, 3, 4, 13, 10**6, 2**40]
)  # 1: no context but by later slots; 3: the block size
@pytest.mark.parametrize("name", ["one row", "row starts and last positions", "not sorted"])
def test_sliding_window(name: str, window: int) -> None:
    assert_equals_dense(replace(CASES[name], window=window, causal=window % 2 == 0))


def test_a_window_that_ends_inside_blocks() -> None:
    """Enough blocks for a middle between two masked edges, and blocks of which the first slots alone see a tile."""
    assert_equals_dense(Case(rows=(48,), anchors=tuple((0, p) for p in range(12, 44)), kv_heads=1, window=30))


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_head_shapes(group: int, dim: int) -> None:
    """With the launch configurations of production."""
    case = replace(CASES["row starts and last positions"], group=group, dim=dim, kv_heads=2, k=4, window=20)
    assert_equals_dense(replace(case, scale=dim**-0.5), tiles=None)


@pytest.mark.parametrize("k", [1, 16])
def test_block_sizes(k: int) -> None:
    case = Case(rows=(33,), anchors=((0, 4), (0, 20), (0, 30)), k=k, kv_heads=1, causal=True, window=25)
    assert_equals_dense(case)


@pytest.mark.parametrize("block_a", [1, 4])
def test_anchors_are_searched_in_several_goes(block_a: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK_A", block_a)
    assert_equals_dense(LONG)
    assert_equals_dense(CASES["not sorted"])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_layouts(data: st.DataObject) -> None:
    check_random_layout(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_random_layouts_at_length(data: st.DataObject) -> None:
    check_random_layout(data)


def check_random_layout(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3), label="rows"))
    every = [(r, p) for r, length in enumerate(rows) for p in range(length)]
    anchors = data.draw(st.lists(st.sampled_from(every), max_size=6), label="anchors")
    case = Case(
        rows=rows,
        anchors=tuple(sorted(anchors) if data.draw(st.integers(0, 3), label="order") else anchors),
        dead=data.draw(st.integers(0 if anchors else 1, 3), label="dead"),
        padding=data.draw(st.integers(0, 3), label="padding"),
        k=data.draw(st.integers(1, 4), label="k"),
        kv_heads=data.draw(st.integers(1, 2), label="kv_heads"),
        group=data.draw(st.sampled_from([1, 3]), label="group"),
        dim=data.draw(st.sampled_from([4, 6]), label="dim"),
        causal=data.draw(st.booleans(), label="causal"),
        window=data.draw(st.none() | st.integers(1, 27), label="window"),
    )
    assert_equals_dense(case)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_error_in_float16(dim: int) -> None:
    """At most twice the error of plain torch in float16, with the tiles of production; bf16 needs a GPU."""
    case = Case(rows=(150,), anchors=((0, 5), (0, 60), (0, 149)), k=16, group=4, kv_heads=1, dim=dim, scale=dim**-0.5)
    inputs = case.inputs(torch.float16)
    truth, plain, ours = dense(case, inputs), dense(case, inputs, torch.float16), run(case, inputs, tiles=None)
    assert error(ours["lse"], truth["lse"]) < 1e-5  # of the same rounded inputs, in float32
    for name in OUTPUTS:
        assert ours[name].dtype == (torch.float32 if name == "lse" else torch.float16)
        norm = truth[name].norm()
        reference = (plain[name].double() - truth[name]).norm() / norm
        assert (ours[name].double() - truth[name]).norm() / norm < 2 * reference, name


def test_large_scores() -> None:
    """Scores of some hundreds overflow exp without a maximum."""
    inputs = LONG.inputs()
    inputs[0] *= 100
    truth, ours = dense(LONG, inputs), run(LONG, inputs)
    assert truth["lse"].max() > 200
    for name in ("out", "lse"):
        assert error(ours[name], truth[name]) < 1e-5, name
    for name in OUTPUTS[2:]:
        # The probabilities are recomputed from scores rounded to 6e-8 of some hundreds.
        assert error(ours[name], truth[name]) < 1e-4, name


def test_dead_blocks_do_not_spread() -> None:
    """NaN in dead blocks and in their incoming gradient changes nothing, bitwise."""
    case = replace(CASES["row starts and last positions"], dead=5)
    inputs, live = case.inputs(), len(case.anchors)
    results = []
    for poison in (0.0, torch.nan):
        for i in (0, 3, 4, 5):
            inputs[i][live:] = poison
        results.append(run(case, inputs))
    for name in OUTPUTS:
        assert torch.equal(results[0][name], results[1][name]), name
        assert results[0][name].isfinite().all(), name


def test_positions_outside_every_context_are_not_read() -> None:
    """Tiles of one block each; a tile that spans two rows also reads what lies between their contexts."""
    case = Case(rows=(17, 16), anchors=((0, 15), (1, 13)), padding=9, k=16, group=1)
    tiles = SMALL._replace(forward=Launch(16, 8, 4, 4, 1), dq=Launch(16, 8, 4, 4, 1))
    inputs = case.inputs()
    clean = run(case, inputs, tiles)
    for tensor in inputs[1:3]:
        tensor[15:17] = tensor[30:] = torch.nan
    poisoned = run(case, inputs, tiles)
    for name in ("out", "dq", "dk_block", "dv_block"):
        assert torch.equal(clean[name], poisoned[name]), name


@contextmanager
def program_order(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Run the programs of every launch in a random order; yields the ids in the order in which they ran."""
    builder, original = interpreter.interpreter_builder, interpreter.interpreter_builder.set_grid_idx
    ran: list[tuple[int, int]] = []

    def set_grid_idx(x: int, y: int, z: int) -> None:
        across = builder.grid_dim[1]
        order = np.random.default_rng(seed).permutation(builder.grid_dim[0] * across)
        x, y = divmod(int(order[x * across + y]), across)
        ran.append((x, y))
        original(x, y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield ran
    finally:
        del builder.set_grid_idx


@pytest.mark.parametrize("name", ["not sorted", "many rows, T not a multiple of the tile"])
def test_repeats_and_any_order_of_the_programs_give_equal_bits(name: str) -> None:
    case = replace(CASES[name], window=20, group=2)
    inputs, tiles = case.inputs(), Launches(*(Launch(8, 8, 8, 4, 1),) * 4)
    first = run(case, inputs, tiles)
    orders = []
    for seed in (None, 1, 2):
        if seed is None:
            again = run(case, inputs, tiles)
        else:
            with program_order(seed) as ran:
                again = run(case, inputs, tiles)
            assert len(ran) > 30
            orders.append(ran)
        for output in OUTPUTS:
            assert torch.equal(first[output], again[output]), output
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def virtual(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros that take memory only where they are touched."""
    count = int(np.prod(shape))
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    except OSError as failure:
        pytest.skip(f"the system gives no {count * dtype.itemsize} bytes of address space: {failure}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@contextmanager
def last_program_only() -> Iterator[None]:
    """Of every launch, run the program with the last key head and the last rows or keys."""
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    original, call, restore = builder.set_grid_idx, executor.__call__, executor._restore_args_dev

    def call_last(self: Any, *args: Any, **kwargs: Any) -> None:
        (across, down), self.grid = self.grid, (1, 1)
        x = across - 1 if "dkv" in self.fn.__name__ else 0  # the others count their rows from the end

        def set_grid_idx(*_: int) -> None:
            builder.set_grid_dim(across, down, 1)
            original(x, down - 1, 0)

        builder.set_grid_idx = set_grid_idx
        try:
            call(self, *args, **kwargs)
        finally:
            del builder.set_grid_idx

    executor.__call__ = call_last
    executor._restore_args_dev = lambda *_: None  # it copies each tensor onto itself, which would take its memory
    try:
        yield
    finally:
        executor.__call__, executor._restore_args_dev = call, restore


@pytest.mark.parametrize("which", ["context", "blocks"])
def test_offsets_beyond_2_to_the_31(which: str) -> None:
    """Tensors of more than 2**31 elements whose last two blocks and last 30 positions alone hold values."""
    near = Case(rows=(30,), anchors=((0, 29), (0, 29)), k=16, kv_heads=8, group=2, dim=256, window=20, scale=0.1)
    values = near.inputs(torch.float16)
    truth = dense(near, values)
    total, tokens = 2, 30
    if which == "context":
        tokens = 2**31 // (8 * 256) + 32
    else:
        total = 2**31 // (16 * 8 * 256) + 2
    shapes = [(tokens if i in (1, 2) else total, *x.shape[1:]) for i, x in enumerate(values)]
    *inputs, grad_out = [virtual(*shape) for shape in shapes]
    for large, small in zip([*inputs, grad_out], values, strict=True):
        large[-small.shape[0] :] = small
    out, *grads = [virtual(*shape) for shape in (shapes[0], *shapes[:5])]
    lse, delta = (virtual(*shapes[0][:3], dtype=torch.float32) for _ in range(2))
    anchors, starts = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    anchors[-2:] = tokens - 1
    rule: dict[str, Any] = {"scale": 0.1, "causal": False, "sliding_window": 20}
    # The last program of each kernel has both blocks, or the last half of the 32 positions.
    tiles = Launches(*(Launch(64, 16, 16, 4, 1),) * 2, Launch(32, 16, 16, 4, 1), Launch(32, 32, 32, 4, 1))
    index = (anchors, starts, torch.tensor(total))
    with (
        last_program_only(),
        watching([*inputs, grad_out, *index, out, lse, delta], [out, lse, delta, *grads]),
    ):
        kernels.forward(*inputs, *index, out, lse, **rule, tiles=tiles)
        kernels.backward(*inputs, *index, out, lse, grad_out, delta, *grads, **rule, tiles=tiles)
    for name, ours in zip(OUTPUTS, [out, lse, *grads], strict=True):
        assert ("context" in name) != (which == "blocks") or ours.numel() < 2**31
        heads, last = slice(-1 if name[0] == "d" and "_" in name else -2, None), slice(-2, None)
        if "context" in name:
            assert error(ours[-14:, heads], truth[name][-14:, heads]) < 3e-3, name
        else:
            assert error(ours[last, :, heads], truth[name][last, :, heads]) < 3e-3, name


@pytest.mark.parametrize(
    ("change", "match"),
    [({"scale": 0.0}, "scale must be positive"), ({"head_dim": 257}, "at most 256"), ({"tokens": 2**30}, "32 bits")],
)
def test_what_the_kernels_cannot_do_is_refused(change: dict[str, Any], match: str) -> None:
    wanted: dict[str, Any] = {"scale": 1.0, "head_dim": 8, "tokens": 5} | change
    q, own = torch.zeros(1, 2, 2, wanted["head_dim"]), torch.zeros(1, 2, 1, wanted["head_dim"])
    context = torch.zeros(1, 1, wanted["head_dim"]).expand(wanted["tokens"], -1, -1)
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=match):
        kernels.forward(
            *(q, context, context, own, own, index, index, index[0], torch.zeros_like(q), torch.zeros(1, 2, 2)),
            scale=wanted["scale"],
            causal=False,
            sliding_window=None,
        )


def test_compile_cases_name_every_argument() -> None:
    cases = kernels.compile_cases()
    assert len({case.name for case in cases}) == len(cases)
    # Four kernels, six (head dim, dtype); dkv_context of 96 and 128 in bf16 differs on an A100.
    assert sum(len(case.chips) for case in cases) == 4 * 6 * 3
    assert len(cases) == 4 * 6 + 2
    for case in cases:
        assert sorted([*case.signature, *case.constexprs]) == sorted(case.kernel.arg_names)
        assert set(case.divisible) <= set(case.signature)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_tiles_fit_the_instructions(dtype: torch.dtype, chip: int) -> None:
    """Powers of two, at least 16 in every dimension of a product, no masked step above the unmasked one."""
    for head_dim in range(1, 257):
        for tile in kernels.launches(head_dim, dtype, chip):
            sizes = (tile.block_m, tile.block_n, tile.edge)
            assert min(sizes) >= 16
            assert all(size == triton.next_power_of_2(size) for size in sizes)
            assert tile.edge <= min(tile.block_m, tile.block_n)
