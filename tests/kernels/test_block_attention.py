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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_graph.kernels.block_attention import BlockAttentionWorkspace, block_attention, make_workspace
from dflash_graph.kernels.block_attention_tiles import make_tiles

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
    layout: Layout, heads: Heads, dtype: torch.dtype = torch.float64, *, sync_free: bool = False, **options: Any
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


def visible_keys(layout: Layout, k: int, *, causal: bool, window: int | None) -> Tensor:
    """(live anchors, K, T + live * K) bool: what each query sees of all positions and all blocks' own keys."""
    tokens, live = layout.num_tokens, len(layout.anchors)
    visible = torch.zeros(live, k, tokens + live * k, dtype=torch.bool)
    for a, (row, position) in enumerate(layout.anchors):
        first = sum(layout.rows[:row])
        for i in range(k):
            for p in range(position):
                visible[a, i, first + p] = window is None or position + i - p < window
            for j in range(k):
                visible[a, i, tokens + a * k + j] = j <= i or not causal
    return visible


def all_keys(inputs: Sequence[Tensor], live: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of live blocks (live, K, H, E); keys and values of all positions and live blocks (T + live*K, H, E)."""
    q, k_context, v_context, k_block, v_block = inputs
    group = q.shape[2] // k_block.shape[2]
    keys = torch.cat([k_context, k_block[:live].flatten(0, 1)]).repeat_interleave(group, 1)
    values = torch.cat([v_context, v_block[:live].flatten(0, 1)]).repeat_interleave(group, 1)
    return q[:live], keys, values


def dense_attention(inputs: Sequence[Tensor], layout: Layout, *, causal: bool, window: int | None) -> Tensor:
    """Every query against every key of the job in float64, with the visibility rule spelled out as a boolean array."""
    live, (total, k, *_) = len(layout.anchors), inputs[0].shape
    q, keys, values = all_keys([x.double() for x in inputs], live)
    visible = visible_keys(layout, k, causal=causal, window=window)
    scores = torch.einsum("akhe,jhe->akhj", q, keys) * SCALE
    probs = scores.masked_fill(~visible[:, :, None], float("-inf")).softmax(-1)
    out = torch.einsum("akhj,jhe->akhe", probs, values)
    return torch.cat([out, out.new_zeros(total - live, *out.shape[1:])])


def stock_attention(inputs: Sequence[Tensor], layout: Layout, *, causal: bool, window: int | None) -> Tensor:
    """Torch's own attention with a dense mask, in the dtype of the inputs; no dead blocks."""
    q, keys, values = all_keys(inputs, len(layout.anchors))
    mask = visible_keys(layout, q.shape[1], causal=causal, window=window).flatten(0, 1)
    rows, keys, values = (x[None].transpose(1, 2) for x in (q.flatten(0, 1), keys, values))
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=SCALE)
    return out.transpose(1, 2).reshape(q.shape)


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
    "the very first and the very last position": Layout(rows=(5, 6, 4), anchors=((0, 0), (2, 3))),
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
@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
def test_head_shapes(group: int, dim: int) -> None:
    assert_equals_dense(LAYOUTS["every position"], Heads(k=4, heads=2 * group, kv_heads=2, dim=dim), window=6)


@pytest.mark.parametrize("k", [1, 16])
def test_block_sizes(k: int) -> None:
    assert_equals_dense(LAYOUTS["every position"], Heads(k=k), causal=True, window=5)


@pytest.mark.parametrize("hidden_scores", [0, 200, 1000, 10**6])  # one anchor a tile, a few, as many as allowed
@pytest.mark.parametrize("score_bytes", [1, 3000, 2**22])
def test_tile_sizes(hidden_scores: int, score_bytes: int) -> None:
    options = {"hidden_scores": hidden_scores, "score_bytes": score_bytes}
    assert_equals_dense(LAYOUTS["every position"], Heads(), **options)
    assert_equals_dense(LAYOUTS["one row"], Heads(), window=8, max_context=39, **options)


@settings(max_examples=500, deadline=None, derandomize=True)
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
        hidden_scores=data.draw(st.integers(0, 3000), label="hidden_scores"),
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


def relative_errors(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [((o.double() - e).norm() / e.norm()).item() for o, e in zip(ours, exact, strict=True)]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 6)])
@pytest.mark.parametrize("name", ["one row", "every position of three rows", "all anchors equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 30.0])  # 30: exp(score) overflows without a maximum
def test_error_in_lower_precision(dtype: torch.dtype, size: float, name: str, causal: bool, window: int | None) -> None:
    layout = Layout(rows=(9, 2, 14), anchors=EVERY) if name.startswith("every") else LAYOUTS[name]
    heads = Heads(dim=64)
    inputs = make_inputs(layout, heads, dtype)
    with torch.no_grad():
        inputs[0] *= size
    truth = dense_attention(inputs, layout, causal=causal, window=window)
    stock = stock_attention(inputs, layout, causal=causal, window=window)
    ours = run(inputs, layout, workspace_for(layout, heads, dtype), causal=causal, window=window)
    grad = torch.randn_like(ours)
    exact = [truth, *torch.autograd.grad(truth, inputs, grad.double())]
    results = [[x, *torch.autograd.grad(x, inputs, grad)] for x in (ours, stock)]
    assert all(x.dtype == dtype for x in results[0])
    errors, allowed = (relative_errors(x, exact) for x in results)
    if dtype == torch.float32 and size == 1.0:  # scores of hundreds carry rounding errors of 1e-5 themselves
        assert max(errors) < 1e-5
    else:
        assert all(e <= 2 * a for e, a in zip(errors, allowed, strict=True)), (errors, allowed)


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
    """Bytes of every allocation of a call by torch's CPU allocator, in order; nothing may stay allocated."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e.nbytes() for e in events if e.name() == "[memory]"]
    assert sum(changes) == 0
    return [change for change in changes if change > 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_their_schema_and_trace_as_one_node(dtype: torch.dtype) -> None:
    layout, heads = LAYOUTS["every position"], Heads()
    ws = workspace_for(layout, heads, dtype)
    inputs = [x.detach() for x in make_inputs(layout, heads, dtype)]
    where = [*layout.indices(), torch.tensor(len(layout.anchors))]
    out = torch.zeros_like(inputs[0])
    stats = torch.zeros(ws.stats_shape(out.shape[0]))
    options = (SCALE, True, 5, ws.most_cells, ws.most_hidden, ws.read_layout, ws.implementation)
    # Autograd is the Function's; "aot_dispatch" would differentiate the operator itself.
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.dflash_graph
    saved = [*inputs, *where, out, stats]
    torch.library.opcheck(
        operators.block_attention_forward.default, (saved[:8], out, stats, ws.scratch, *options), test_utils=checks
    )
    grads = [torch.zeros_like(x) for x in inputs]
    torch.library.opcheck(
        operators.block_attention_backward.default,
        (saved, torch.randn_like(out), grads, ws.scratch, *options),
        test_utils=checks,
    )


def test_fake_tensors_see_one_operator_each_way() -> None:
    layout, heads = LAYOUTS["every position"], Heads()
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Record():
        inputs = make_inputs(layout, heads, torch.float32)
        ws = workspace_for(layout, heads, torch.float32)
        index = torch.zeros(inputs[0].shape[0], dtype=torch.int64)
        seen.clear()
        out = block_attention(
            *inputs, index, index, num_anchors=torch.zeros((), dtype=torch.int64), scale=SCALE, causal=False,
            sliding_window=None, workspace=ws,
        )  # fmt: skip
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    assert [name for name in seen if name.startswith("dflash_graph::")] == [
        "dflash_graph::block_attention_forward",
        "dflash_graph::block_attention_backward",
    ]
    assert not any("mm" in name or "softmax" in name for name in seen)


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


def cut(ends: list[int], starts: list[int], **limits: int | None) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"block_size": 4, "window": None, "most_cells": 10**6, "most_hidden": 10**6} | limits
    return [tuple(tile) for tile in make_tiles(ends, starts, **options)]


def test_tiles_stay_in_a_row_within_their_limits() -> None:
    ends, starts = [3, 5, 9, 22, 25, 60, 61], [0, 0, 0, 20, 20, 20, 20]
    assert cut(ends, starts, most_cells=90) == [  # a third anchor of the second row would make 3 * 40 cells
        (0, 3, 0, 9, 0, 3),
        (3, 5, 20, 25, 20, 22),
        (5, 7, 20, 61, 20, 60),
    ]
    assert cut(ends, starts, most_hidden=10) == [  # three anchors that stop at 9 hide 6 + 4 cells
        (0, 3, 0, 9, 0, 3),
        (3, 5, 20, 25, 20, 22),
        (5, 7, 20, 61, 20, 60),
    ]
    assert [tile[:2] for tile in cut(ends, starts, most_hidden=9)] == [(0, 2), (2, 3), (3, 5), (5, 7)]
    assert [tile[:2] for tile in cut(ends, starts, most_cells=1)] == [(i, i + 1) for i in range(7)]
    assert [tile[:2] for tile in cut([9, 5, 7], [0, 0, 0])] == [(0, 1), (1, 3)]  # not ascending
    assert cut([], []) == []


def test_anchors_without_context_cost_no_tile_of_their_own() -> None:
    assert cut([0, 20, 40], [0, 20, 40]) == [(0, 3, 0, 0, 0, 0)]
    assert cut([0, 20, 23, 40], [0, 20, 20, 40]) == [(0, 2, 0, 0, 0, 0), (2, 3, 20, 23, 20, 23), (3, 4) + (40,) * 4]
    assert cut([3, 7], [0, 0], window=1) == [(0, 2, 3, 3, 3, 3)]


def test_a_window_narrows_the_tiles_range() -> None:
    assert cut([50, 52], [0, 0], window=10) == [
        (0, 2, 41, 52, 46, 50)  # query 52 + 3 sees p > 45
    ]
    # The second anchor sees 55..63: positions 50..54 are nobody's and not in any tile.
    assert [tile[2:4] for tile in cut([50, 64], [0, 0], window=10)] == [(41, 50), (55, 64)]


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


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 5)])
@pytest.mark.parametrize("name", ["many rows, the last positions unused", "row starts and last positions", "none live"])
def test_the_triton_implementation_agrees_and_keeps_no_scratch_of_torch(
    name: str, causal: bool, window: int | None
) -> None:
    layout, heads = LAYOUTS[name], Heads(k=4, dim=16)
    inputs = make_inputs(layout, heads, torch.float32)
    ws = workspace_for(layout, heads, torch.float32, implementation="triton")
    assert ws.nbytes() == inputs[0][..., 0].numel() * 4
    truth = dense_attention(inputs, layout, causal=causal, window=window)
    ours = run(inputs, layout, ws, causal=causal, window=window)
    grad = torch.randn_like(ours)
    expected = [truth.detach(), *(x.new_zeros(x.shape) for x in inputs)]
    if layout.anchors:
        expected[1:] = torch.autograd.grad(truth, inputs, grad.double())
    for o, e in zip([ours, *torch.autograd.grad(ours, inputs, grad)], expected, strict=True):
        torch.testing.assert_close(o.double(), e.double(), rtol=1e-5, atol=1e-5)
