"""Block attention against a dense float64 one: values, every gradient, dead blocks, memory, refusals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dflash_graph.kernels.block_attention import BlockAttentionWorkspace, block_attention, make_tiles, make_workspace

SCALE = 0.3


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Row lengths of T positions, and the live anchors as (row, position in row)."""

    rows: tuple[int, ...]
    anchors: tuple[tuple[int, int], ...]
    dead: int = 0
    padding: int = 0  # positions after the last row

    @property
    def num_tokens(self) -> int:
        return sum(self.rows) + self.padding

    def indices(self) -> tuple[Tensor, Tensor]:
        starts = [sum(self.rows[:r]) for r, _ in self.anchors] + [0] * self.dead
        ends = [s + p for s, (_, p) in zip(starts, self.anchors, strict=False)] + [0] * self.dead
        return torch.tensor(ends, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Heads:
    k: int = 3  # block size
    heads: int = 6
    kv_heads: int = 2
    dim: int = 8


def make_inputs(layout: Layout, heads: Heads, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k_context, v_context, k_block, v_block."""
    total, tokens = len(layout.anchors) + layout.dead, layout.num_tokens
    own, context = (total, heads.k, heads.kv_heads, heads.dim), (tokens, heads.kv_heads, heads.dim)
    shapes = [(total, heads.k, heads.heads, heads.dim), context, context, own, own]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def workspace_for(
    layout: Layout, heads: Heads, dtype: torch.dtype = torch.float64, *, sync_free: bool = False, **options: int
) -> BlockAttentionWorkspace:
    """`sync_free` takes the path of devices whose values the host must not read."""
    return make_workspace(
        num_anchors=len(layout.anchors) + layout.dead,
        block_size=heads.k,
        num_tokens=layout.num_tokens,
        num_heads=heads.heads,
        num_key_value_heads=heads.kv_heads,
        head_dim=heads.dim,
        dtype=dtype,
        device="cpu",
        read_layout=not sync_free,
        **options,
    )


def dense_attention(
    inputs: Sequence[Tensor], layout: Layout, *, causal: bool, window: int | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Every query against every key of the job, with the visibility rule spelled out as one boolean array."""
    q, k_context, v_context, k_block, v_block = (x.to(dtype) for x in inputs)
    total, k, heads, _ = q.shape
    tokens, group, live = layout.num_tokens, heads // k_block.shape[2], len(layout.anchors)
    visible = torch.zeros(live, k, tokens + live * k, dtype=torch.bool)
    for a, (row, position) in enumerate(layout.anchors):
        first = sum(layout.rows[:row])
        for i in range(k):
            for p in range(position):
                visible[a, i, first + p] = window is None or position + i - p < window
            for j in range(k):
                visible[a, i, tokens + a * k + j] = j <= i or not causal
    keys = torch.cat([k_context, k_block[:live].flatten(0, 1)]).repeat_interleave(group, 1)
    values = torch.cat([v_context, v_block[:live].flatten(0, 1)]).repeat_interleave(group, 1)
    scores = torch.einsum("akhe,jhe->akhj", q[:live], keys) * SCALE
    probs = scores.masked_fill(~visible[:, :, None], float("-inf")).softmax(-1)
    out = torch.einsum("akhj,jhe->akhe", probs, values)
    return torch.cat([out, out.new_zeros(total - live, *out.shape[1:])])


def run(
    inputs: Sequence[Tensor],
    layout: Layout,
    ws: BlockAttentionWorkspace,
    *,
    causal: bool = False,
    window: int | None = None,
    num_anchors: Tensor | int | None = None,
) -> Tensor:
    anchors, row_starts = layout.indices()
    return block_attention(
        *inputs,
        anchors,
        row_starts,
        num_anchors=len(layout.anchors) if num_anchors is None else num_anchors,
        scale=SCALE,
        causal=causal,
        sliding_window=window,
        workspace=ws,
    )


def assert_equals_dense(
    layout: Layout, heads: Heads, *, causal: bool = False, window: int | None = None, **options: Any
) -> None:
    inputs = make_inputs(layout, heads)
    truth = dense_attention(inputs, layout, causal=causal, window=window)
    grad = torch.randn_like(truth)
    expected = torch.autograd.grad(truth, inputs, grad) if layout.anchors else [torch.zeros_like(x) for x in inputs]
    for sync_free in (False, True):
        ws = workspace_for(layout, heads, sync_free=sync_free, **options)
        out = run(inputs, layout, ws, causal=causal, window=window)
        torch.testing.assert_close(out, truth, rtol=1e-11, atol=1e-12)
        for name, ours, theirs in zip(
            ["q", "kc", "vc", "kb", "vb"], torch.autograd.grad(out, inputs, grad), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


EVERY = tuple((r, p) for r, length in enumerate((9, 2, 14)) for p in range(length))
LAYOUTS = {
    "one row": Layout(rows=(40,), anchors=tuple((0, p) for p in (3, 4, 9, 20, 21, 22, 30, 37))),
    "many rows, the last positions unused": Layout(
        rows=(7, 20, 5, 11), anchors=((0, 2), (1, 3), (1, 17), (2, 4), (3, 8), (3, 9)), padding=6
    ),
    "rows shorter than a block": Layout(rows=(1, 2, 1, 2), anchors=((0, 0), (1, 1), (2, 0), (3, 0), (3, 1))),
    "row starts, no context at all": Layout(rows=(5, 6), anchors=((0, 0), (1, 0))),
    "row starts and last positions": Layout(rows=(5, 6, 4), anchors=((0, 0), (0, 4), (1, 0), (1, 5), (2, 0), (2, 3))),
    "every position": Layout(rows=(9, 2, 14), anchors=EVERY, dead=3),
    "all anchors equal": Layout(rows=(12, 3), anchors=((0, 7),) * 11),
    "one block": Layout(rows=(12,), anchors=((0, 7),)),
    "none live": Layout(rows=(12,), anchors=(), dead=4),
    "not sorted": Layout(rows=(12, 8), anchors=((1, 5), (0, 11), (0, 2), (1, 0), (0, 6), (0, 6))),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_output_and_gradients_equal_the_dense_ones(name: str, causal: bool) -> None:
    assert_equals_dense(LAYOUTS[name], Heads(), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 10**6])  # 1: in-block keys only; 3: the block size
@pytest.mark.parametrize("name", ["one row", "every position", "not sorted", "row starts and last positions"])
def test_sliding_window(name: str, window: int, causal: bool) -> None:
    assert_equals_dense(LAYOUTS[name], Heads(), window=window, causal=causal)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dim", [8, 64])
def test_head_shapes(group: int, dim: int) -> None:
    assert_equals_dense(LAYOUTS["every position"], Heads(k=4, heads=2 * group, kv_heads=2, dim=dim), window=6)


@pytest.mark.parametrize("k", [1, 16])
def test_block_sizes(k: int) -> None:
    assert_equals_dense(LAYOUTS["every position"], Heads(k=k), causal=True, window=5)


@pytest.mark.parametrize("tile_anchors", [1, 2, 5, 64])
@pytest.mark.parametrize("score_bytes", [1, 3000, 2**22])  # one anchor a tile, a few, as many as allowed
def test_tile_sizes(tile_anchors: int, score_bytes: int) -> None:
    options = {"tile_anchors": tile_anchors, "score_bytes": score_bytes}
    assert_equals_dense(LAYOUTS["every position"], Heads(), **options)
    assert_equals_dense(LAYOUTS["one row"], Heads(), window=8, max_context=39, **options)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_layouts(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5), label="rows"))
    every = [(r, p) for r, length in enumerate(rows) for p in range(length)]
    layout = Layout(
        rows=rows,
        anchors=tuple(sorted(data.draw(st.lists(st.sampled_from(every), max_size=12), label="anchors"))),
        dead=data.draw(st.integers(0, 3), label="dead"),
        padding=data.draw(st.integers(0, 3), label="padding"),
    )
    if not layout.anchors and not layout.dead:
        return
    kv_heads = data.draw(st.integers(1, 2), label="kv_heads")
    group = data.draw(st.sampled_from([1, 3]), label="group")
    assert_equals_dense(
        layout,
        Heads(k=data.draw(st.integers(1, 5), label="k"), heads=kv_heads * group, kv_heads=kv_heads, dim=4),
        causal=data.draw(st.booleans(), label="causal"),
        window=data.draw(st.none() | st.integers(1, 30), label="window"),
        tile_anchors=data.draw(st.integers(1, 9), label="tile_anchors"),
    )


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("sync_free", [False, True])
def test_dead_blocks_do_not_spread(sync_free: bool, as_tensor: bool) -> None:
    """NaN in dead blocks, their index entries and their incoming gradient changes nothing, bitwise."""
    layout, heads = Layout(rows=(9, 6), anchors=((0, 1), (0, 5), (1, 3)), dead=4), Heads()
    live = len(layout.anchors)
    inputs = make_inputs(layout, heads)
    grad = torch.randn_like(inputs[0])
    results = []
    for poison in (0.0, float("nan")):
        with torch.no_grad():
            for tensor in (inputs[0], inputs[3], inputs[4]):
                tensor[live:] = poison
        grad[live:] = poison
        ws = workspace_for(layout, heads, sync_free=sync_free)
        out = run(inputs, layout, ws, num_anchors=torch.tensor(live) if as_tensor else live)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    for tensor in (results[1][0], results[1][1], results[1][4], results[1][5]):
        assert not tensor[live:].any()


def test_positions_outside_every_context_are_not_read_on_the_cpu() -> None:
    layout = Layout(rows=(9, 6), anchors=((0, 5), (1, 3)), padding=4)
    inputs = make_inputs(layout, Heads())
    with torch.no_grad():
        for tensor in inputs[1:3]:
            tensor[5:9] = tensor[12:] = float("nan")
    out = run(inputs, layout, workspace_for(layout, Heads()))
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 30.0])  # 30: exp(score) overflows without a maximum
def test_error_in_lower_precision(dtype: torch.dtype, size: float) -> None:
    layout, heads = LAYOUTS["every position"], Heads(dim=64)
    inputs = make_inputs(layout, heads, dtype)
    with torch.no_grad():
        inputs[0] *= size
    truth = dense_attention(inputs, layout, causal=False, window=None)
    plain = dense_attention(inputs, layout, causal=False, window=None, dtype=dtype)
    ours = run(inputs, layout, workspace_for(layout, heads, dtype))
    grad = torch.randn_like(ours)
    exact = [truth, *torch.autograd.grad(truth, inputs, grad.double())]
    for e, p, o in zip(
        exact,
        [plain, *torch.autograd.grad(plain, inputs, grad)],
        [ours, *torch.autograd.grad(ours, inputs, grad)],
        strict=True,
    ):
        assert o.dtype == dtype
        norm = e.double().norm()
        error, reference = (o.double() - e.double()).norm() / norm, (p.double() - e.double()).norm() / norm
        # The backward recomputes probabilities from a rounded logsumexp, which huge scores show in float32.
        assert error < (1e-5 if dtype == torch.float32 else 2 * reference)


def test_repeats_are_bitwise_equal_and_layers_share_a_workspace() -> None:
    layout, heads = LAYOUTS["every position"], Heads()
    ws = workspace_for(layout, heads, torch.float32)
    layers = [make_inputs(layout, heads, torch.float32) for _ in range(2)]
    results = []
    for _ in range(2):
        outs = [run(inputs, layout, ws) for inputs in layers]  # both forwards before both backwards
        results.append([g for o, i in zip(outs, layers, strict=True) for g in torch.autograd.grad(o.square().sum(), i)])
    alone = [torch.autograd.grad(run(i, layout, ws).square().sum(), i) for i in layers]
    for one, two, three in zip(*results, [g for grads in alone for g in grads], strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def allocations(step: Any) -> list[int]:
    """Bytes of every allocation of a call by torch's CPU allocator, in order."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_allocations_do_not_depend_on_the_layout(dtype: torch.dtype, window: int | None) -> None:
    heads = Heads(k=16, dim=16)
    layouts = [
        Layout(rows=(600,), anchors=tuple((0, p) for p in range(100, 580, 30))),
        Layout(rows=(10,) * 60, anchors=tuple((r, 7) for r in range(0, 60, 5)), dead=4),
        Layout(rows=(600,), anchors=(), dead=16),
    ]
    inputs = make_inputs(layouts[0], heads, dtype)
    ws = workspace_for(layouts[0], heads, dtype)

    def step(layout: Layout) -> None:
        out = run(inputs, layout, ws, window=window, causal=True, num_anchors=torch.tensor(len(layout.anchors)))
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    seen = [allocations(partial(step, layout)) for layout in layouts]
    assert seen[0]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert max(seen[0]) <= max(x.nbytes for x in inputs)
    assert max(seen[0]) < 16 * 16 * 600  # no (A*K, T) mask, even of one byte each


def test_tiles_stay_in_a_row_within_their_limits() -> None:
    ends, starts = [3, 5, 9, 22, 25, 60, 61], [0, 0, 0, 20, 20, 20, 20]
    tiles = make_tiles(ends, starts, block_size=4, window=None, most_anchors=3, most_cells=90)
    assert [(t.first, t.last, t.start, t.stop) for t in tiles] == [
        (0, 3, 0, 9),
        (3, 5, 20, 25),  # a third anchor would make 3 * 40 cells
        (5, 7, 20, 61),
    ]
    assert [t.clear_stop for t in tiles] == [3, 22, 60]
    assert all(t.clear_start == t.start for t in tiles)
    assert make_tiles([7], [7], block_size=4, window=None, most_anchors=3, most_cells=90) == []


def test_a_window_narrows_the_tiles_range() -> None:
    (tile,) = make_tiles([50, 52], [0, 0], block_size=4, window=10, most_anchors=8, most_cells=10**6)
    assert (tile.start, tile.stop) == (41, 52)
    assert tile.clear_start == 46  # query 52 + 3 sees p > 45
    assert tile.clear_stop == 50


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("q", torch.zeros(3, 3, 5, 8), ValueError, "q must have shape"),
        ("q", torch.zeros(3, 3, 6, 8, dtype=torch.float64), TypeError, "q must be torch.float32"),
        ("q", torch.zeros(3, 6, 3, 8).transpose(1, 2), ValueError, "q must be contiguous"),
        ("q", torch.zeros(4, 3, 6, 8), ValueError, "1 to 3 blocks"),
        ("k_context", torch.zeros(99, 2, 8), ValueError, "positions"),
        ("v_context", torch.zeros(11, 2, 8), ValueError, "v_context must have shape"),
        ("k_block", torch.zeros(3, 3, 2, 8, device="meta"), ValueError, "device"),
        ("anchors", torch.zeros(3, dtype=torch.int32), TypeError, "anchors must be torch.int64"),
        ("anchors", torch.tensor([3, 4, 12]), ValueError, "0 <= row_start <= anchor < T = 12"),
        ("row_starts", torch.tensor([0, 0, -1]), ValueError, "0 <= row_start"),
        ("row_starts", torch.tensor([0, 0, 7]), ValueError, r"found \(row_start, anchor\) \(7, 6\)"),
        ("sliding_window", 0, ValueError, "sliding_window"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: object, error: type[Exception], match: str) -> None:
    layout = Layout(rows=(12,), anchors=((0, 3), (0, 4), (0, 6)))
    inputs = make_inputs(layout, Heads(), torch.float32)
    names = ["q", "k_context", "v_context", "k_block", "v_block", "anchors", "row_starts", "sliding_window"]
    arguments: dict[str, Any] = dict(zip(names, [*inputs, *layout.indices(), None], strict=True)) | {name: value}
    ws = workspace_for(layout, Heads(), torch.float32)
    with pytest.raises(error, match=match):
        block_attention(**arguments, num_anchors=3, scale=SCALE, causal=False, workspace=ws)


def test_a_context_longer_than_promised_is_refused() -> None:
    layout = Layout(rows=(40,), anchors=((0, 39),))
    ws = workspace_for(layout, Heads(), max_context=20, score_bytes=1)
    with pytest.raises(ValueError, match="larger max_context"):
        run(make_inputs(layout, Heads()), layout, ws)


@pytest.mark.parametrize(("change", "error"), [({"num_heads": 5}, ValueError), ({"dtype": torch.int32}, TypeError)])
def test_workspace_refuses_wrong_settings(change: dict[str, Any], error: type[Exception]) -> None:
    sizes = {
        "num_anchors": 2,
        "block_size": 3,
        "num_tokens": 9,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    with pytest.raises(error):
        make_workspace(**({**sizes, "dtype": torch.float32, "device": "cpu"} | change))
