"""Both operators and one whole micro-step with the Triton kernels: on a GPU at real sizes, here in the interpreter.

Every check is written once for a device and shapes. The interpreter runs it on tiny shapes in float32 (its 16-bit
products are wrong); the tests marked `gpu` run it at real sizes and dtypes. What only a GPU has (host syncs, the
caching allocator, graphs) is watched there and passed over on the CPU, where the rest of the check still counts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.config import OptimConfig
from dflash_graph.drafter import FlatParameters
from dflash_graph.kernels import backend, block_attention, fused_lm_head_loss
from dflash_graph.static_buffers import BufferTable, slot_specs, write_metadata
from dflash_graph.step import DrafterStep, micro_step_sizes, workspace_specs
from tests.toys import make_jobs, random_rows, random_tensors, relative_error, toy_shape, toy_spec

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = pytest.mark.skipif(
    not backend.interpreting(), reason="Triton's interpreter is off; the tests marked gpu run the kernels themselves"
)
BOTH = ("torch", "triton")


def on(device: str, *values: Any, name: str) -> Any:
    """A test's parameters with the mark of their device."""
    mark = INTERPRETED if device == "cpu" else pytest.mark.gpu
    return pytest.param(device, *values, marks=mark, id=f"{device}-{name}")


def error(found: Tensor, truth: Tensor) -> float:
    """max |found - truth| / max |truth|."""
    return float((found.detach().double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


def assert_accurate(
    found: dict[str, dict[str, Tensor]],  # implementation -> name -> value
    truth: dict[str, Tensor],  # float64
    naive: dict[str, Tensor] | None,  # plain torch in the inputs' 16-bit dtype; None for float32
    exact: Sequence[str] = (),  # values that are float32 for inputs of any dtype
) -> None:
    """float32: 1e-5 of the largest value; 16 bits: at most twice the error of plain torch in that dtype."""
    for implementation, values in found.items():
        for name, true in truth.items():
            most = 1e-5 if naive is None or name in exact else 2 * error(naive[name], true)
            assert error(values[name], true) <= most, f"{name} of {implementation}"


@contextmanager
def steady(device: str) -> Iterator[None]:
    """On a GPU: refuse host syncs, and device memory that was not there before or is still held afterwards."""
    if device == "cpu":
        yield
        return
    kinds = ("num_device_alloc", "num_device_free", "allocated_bytes.all.current", "reserved_bytes.all.current")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert {k: after[k] for k in kinds} == {k: before[k] for k in kinds}


def capture(device: str, operation: Callable[[], None]) -> Callable[[], None]:
    """A replay of the operation as a CUDA graph; on the CPU the operation itself."""
    if device == "cpu":
        return operation
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and loaded, and cuBLAS has its memory, before the capture
        for _ in range(2):
            operation()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    return graph.replay


# ---- attention ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Sizes of a call; T positions are cut into equal rows, and the live anchors lie at random in them."""

    tokens: int
    rows: int
    anchors: int
    dead: int
    k: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    causal: bool = False
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5


TINY_ATTENTION = Attention(
    tokens=70, rows=3, anchors=6, dead=2, k=4, heads=4, kv_heads=2, dim=64, dtype=torch.float32, causal=True, window=9
)
REAL_ATTENTION = Attention(
    tokens=4096, rows=3, anchors=250, dead=6, k=16, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16
)
ATTENTION_CASES = [
    on("cpu", replace(TINY_ATTENTION, causal=False, window=None), name="64"),
    on("cpu", TINY_ATTENTION, name="64-causal-window"),
    on("cpu", replace(TINY_ATTENTION, dim=96, heads=3, kv_heads=1, window=4), name="96-causal-window"),
    on("cuda", REAL_ATTENTION, name="128-bf16"),
    on("cuda", replace(REAL_ATTENTION, causal=True, window=512), name="128-bf16-causal-window"),
    on("cuda", replace(REAL_ATTENTION, window=1, k=7), name="128-bf16-window-1"),
    on("cuda", replace(REAL_ATTENTION, dtype=torch.float16, window=16), name="128-fp16-window-k"),
    on("cuda", replace(REAL_ATTENTION, dim=64, heads=24, k=8), name="64-bf16"),
    on("cuda", replace(REAL_ATTENTION, dim=96, heads=12, kv_heads=4, causal=True), name="96-bf16-causal"),
    on("cuda", replace(REAL_ATTENTION, dim=256, heads=8, kv_heads=1), name="256-bf16"),
    on("cuda", replace(REAL_ATTENTION, dim=64, heads=8, kv_heads=8, dtype=torch.float32), name="64-fp32"),
    on("cuda", replace(REAL_ATTENTION, heads=8, kv_heads=2, dtype=torch.float32, window=300), name="128-fp32-window"),
]


@dataclass
class AttentionData:
    inputs: list[Tensor]  # q, k_context, v_context, k_block, v_block
    anchors: Tensor
    row_starts: Tensor
    num_anchors: Tensor
    grad: Tensor

    def copy_(self, other: "AttentionData") -> None:
        """Take other values at the same addresses."""
        with torch.no_grad():
            for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
                mine.copy_(theirs)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs, self.anchors, self.row_starts, self.num_anchors, self.grad]


def attention_data(device: str, case: Attention, seed: int = 0, live: int | None = None) -> AttentionData:
    """Random inputs; what belongs to dead anchors is NaN, or an index far outside."""
    g = torch.Generator().manual_seed(seed)
    live, total, length = case.anchors if live is None else live, case.anchors + case.dead, case.tokens // case.rows
    spots = torch.randint(0, length * case.rows, (live,), generator=g)
    spots[:2] = torch.tensor([0, length * case.rows - 1])[:live]
    anchors, row_starts = torch.full((total,), 2**40), torch.full((total,), -(2**40))
    anchors[:live] = spots.sort().values
    row_starts[:live] = anchors[:live] // length * length
    own, context = (total, case.k, case.kv_heads, case.dim), (case.tokens, case.kv_heads, case.dim)
    shapes = [(total, case.k, case.heads, case.dim), context, context, own, own, (total, case.k, case.heads, case.dim)]
    values = [torch.randn(shape, generator=g) for shape in shapes]
    for i in (0, 3, 4, 5):
        values[i][live:] = float("nan")
    *inputs, grad = (x.to(device, case.dtype) for x in values)
    return AttentionData(
        [x.requires_grad_() for x in inputs], anchors.to(device), row_starts.to(device),
        torch.tensor(live, device=device), grad,
    )  # fmt: skip


NAMES = ("out", "dq", "dk_context", "dv_context", "dk_block", "dv_block")


def dense_attention(data: AttentionData, case: Attention, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the live blocks, all keys against all queries, head by head in one dtype."""
    live, group = int(data.num_anchors), case.heads // case.kv_heads
    q, kc, vc, kb, vb = (x.detach().to(dtype) for x in data.inputs)
    q, kb, vb, grad = q[:live], kb[:live], vb[:live], data.grad[:live].to(dtype)
    first, last = data.row_starts[:live, None, None], data.anchors[:live, None, None]
    position = torch.arange(case.tokens, device=q.device)
    offset = torch.arange(case.k, device=q.device)
    visible = (position >= first) & (position < last)
    if case.window is not None:
        visible = visible & (last + offset[:, None] - position < case.window)
    visible = visible.expand(live, case.k, case.tokens)
    later = (offset > offset[:, None]) & case.causal
    total = {name: torch.zeros(x.shape, dtype=torch.float64, device=q.device)
             for name, x in zip(NAMES, (q, q, kc, vc, kb, vb), strict=True)}  # fmt: skip
    for h in range(case.heads):
        shared = h // group
        parts = [x.clone().requires_grad_() for x in (q[:, :, h], kc[:, shared], vc[:, shared], kb[:, :, shared],
                                                      vb[:, :, shared])]  # fmt: skip
        qh, kch, vch, kbh, vbh = parts
        context = (qh.flatten(0, 1) @ kch.t()).view(live, case.k, -1).masked_fill(~visible, float("-inf"))
        block = (qh @ kbh.transpose(1, 2)).masked_fill(later, float("-inf"))
        probs = (torch.cat([context, block], 2) * case.scale).softmax(2)
        out = (probs[..., : case.tokens].flatten(0, 1) @ vch).view(qh.shape) + probs[..., case.tokens :] @ vbh
        grads = torch.autograd.grad(out, parts, grad[:, :, h])
        total["out"][:, :, h] = out.detach()
        total["dq"][:, :, h] = grads[0]
        for name, value in zip(NAMES[2:], grads[1:], strict=True):
            total[name].select(-2, shared).add_(value)
    return total


def attention_workspace(device: str, case: Attention, implementation: backend.Implementation) -> Any:
    """Plain torch takes the path of a device whose values the host must not read, on the CPU too."""
    return block_attention.make_workspace(
        num_anchors=case.anchors + case.dead, block_size=case.k, num_tokens=case.tokens, num_heads=case.heads,
        num_key_value_heads=case.kv_heads, head_dim=case.dim, dtype=case.dtype, device=device,
        implementation=implementation, read_layout=False,
    )  # fmt: skip


def attend(data: AttentionData, case: Attention, workspace: Any) -> list[Tensor]:
    """Output and the five gradients."""
    out = block_attention.block_attention(
        *data.inputs, data.anchors, data.row_starts, num_anchors=data.num_anchors, scale=case.scale,
        causal=case.causal, sliding_window=case.window, workspace=workspace,
    )  # fmt: skip
    return [out, *torch.autograd.grad(out, data.inputs, data.grad)]


@pytest.mark.parametrize(("device", "case"), ATTENTION_CASES)
def test_attention_is_accurate_and_dead_blocks_are_zero(device: str, case: Attention) -> None:
    data, live = attention_data(device, case), case.anchors
    truth = dense_attention(data, case, torch.float64)
    naive = None if case.dtype == torch.float32 else dense_attention(data, case, case.dtype)
    found = {}
    for implementation in BOTH:
        values = attend(data, case, attention_workspace(device, case, implementation))
        for i in (0, 1, 4, 5):
            assert not values[i][live:].any(), f"{NAMES[i]} of dead blocks"
            values[i] = values[i][:live]
        found[implementation] = dict(zip(NAMES, values, strict=True))
    assert_accurate(found, truth, naive)


@pytest.mark.gpu
def test_attention_at_a_whole_job_equals_the_torch_implementation() -> None:
    case = replace(REAL_ATTENTION, tokens=16384, rows=5, anchors=2040, dead=8)
    data = attention_data("cuda", case)
    values = attend(data, case, attention_workspace("cuda", case, "triton"))
    wide = replace(case, dtype=torch.float32)
    data.inputs = [x.detach().float().requires_grad_() for x in data.inputs]
    data.grad = data.grad.float()
    truth = attend(data, wide, attention_workspace("cuda", wide, "torch"))
    for name, value, true in zip(NAMES, values, truth, strict=True):
        # Two units in the last place of the largest value: one for the result, one for the rounded probabilities.
        assert error(value, true) <= 2**-7, name


# ---- loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loss:
    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    bias: bool = False
    logit_scale: float = 1.0
    soft_cap: float | None = None
    chunk_rows: int | None = None


TINY_LOSS = Loss(rows=11, hidden=32, vocab=257, dtype=torch.float32, chunk_rows=4)
REAL_LOSS = Loss(rows=1500, hidden=1024, vocab=151936, dtype=torch.bfloat16)
LOSS_CASES = [
    on("cpu", TINY_LOSS, name="plain"),
    on("cpu", replace(TINY_LOSS, bias=True, logit_scale=0.5, soft_cap=3.0), name="bias-scale-cap"),
    on("cuda", REAL_LOSS, name="bf16"),
    on("cuda", replace(REAL_LOSS, dtype=torch.float16), name="fp16"),
    on("cuda", replace(REAL_LOSS, dtype=torch.float32), name="fp32"),
    on("cuda", replace(REAL_LOSS, bias=True, logit_scale=0.5, soft_cap=30.0), name="bf16-bias-scale-cap"),
    on("cuda", replace(REAL_LOSS, vocab=32001, hidden=4096, rows=7680), name="bf16-odd-vocabulary"),
    on("cuda", replace(REAL_LOSS, vocab=1000, chunk_rows=257), name="bf16-small-vocabulary-odd-chunk"),
]


@dataclass
class LossData:
    hidden: Tensor
    head: Tensor
    labels: Tensor
    weights: Tensor
    num_rows: Tensor
    bias: Tensor | None

    def copy_(self, other: "LossData") -> None:
        with torch.no_grad():
            for name in ("hidden", "head", "labels", "weights", "num_rows"):
                getattr(self, name).copy_(getattr(other, name))


def loss_data(device: str, case: Loss, seed: int = 0, live: int | None = None) -> LossData:
    """Random rows, some ignored, some confident; those beyond the live ones and of weight 0 hold NaN."""
    g = torch.Generator(device).manual_seed(seed)
    live = case.rows - 2 if live is None else live

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    hidden, head = normal(case.rows, case.hidden), normal(case.vocab, case.hidden) * case.hidden**-0.5
    labels = torch.randint(0, case.vocab, (case.rows,), generator=g, device=device)
    labels[0], labels[1] = case.vocab - 1, 0
    hidden[2:4] += 8 * F.normalize(head[labels[2:4]], dim=1)  # nearly sure of the label
    weights = torch.rand(case.rows, generator=g, device=device) + 0.1
    weights[4] = 0.0
    labels[5] = fused_lm_head_loss.IGNORE_INDEX
    hidden[4:6] = hidden[live:] = float("nan")
    bias = normal(case.vocab) if case.bias else None
    hidden = hidden.to(case.dtype).requires_grad_()
    return LossData(hidden, head.to(case.dtype), labels, weights, torch.tensor(live, device=device), bias)


def counting(data: LossData) -> Tensor:
    """(R,) bool, rows that count."""
    index = torch.arange(len(data.labels), device=data.labels.device)
    return (index < data.num_rows) & (data.labels >= 0) & (data.weights != 0)


def dense_loss(data: LossData, case: Loss, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole logits in one dtype; the softmax of 16-bit logits in float32, as everywhere. Rows that count only."""
    rows = counting(data).nonzero().flatten()
    x = data.hidden.detach()[rows].to(dtype).requires_grad_()
    logits = F.linear(x, data.head.to(dtype), None if data.bias is None else data.bias.to(dtype))
    wide = logits if dtype == torch.float64 else logits.float()
    wide = wide * case.logit_scale
    if case.soft_cap is not None:
        wide = case.soft_cap * torch.tanh(wide / case.soft_cap)
    lse = wide.logsumexp(1)
    nll = lse - wide.gather(1, data.labels[rows, None])[:, 0]
    loss = (nll * data.weights[rows]).sum()
    (grad,) = torch.autograd.grad(loss, x)
    return {"loss": loss.detach(), "nll": nll.detach(), "logsumexp": lse.detach(), "grad": grad}


def loss_workspace(device: str, case: Loss, implementation: backend.Implementation, **options: Any) -> Any:
    return fused_lm_head_loss.make_workspace(
        num_rows=case.rows, hidden_size=case.hidden, vocab_size=case.vocab, dtype=case.dtype, device=device,
        chunk_rows=case.chunk_rows, implementation=implementation, **options,
    )  # fmt: skip


def evaluate(data: LossData, case: Loss, workspace: Any, **options: Any) -> list[Tensor]:
    """Loss, gradient, and the per-row results."""
    loss = fused_lm_head_loss.fused_lm_head_loss(
        data.hidden, data.head, data.labels, data.weights, data.num_rows, workspace=workspace, with_rank=True,
        bias=data.bias, logit_scale=case.logit_scale, soft_cap=case.soft_cap, **options,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, data.hidden)
    return [loss.detach(), grad, workspace.nll, workspace.logsumexp, workspace.label_rank, workspace.weight_sum]


@pytest.mark.parametrize(("device", "case"), LOSS_CASES)
def test_loss_is_accurate_and_other_rows_are_zero(device: str, case: Loss) -> None:
    data = loss_data(device, case)
    rows = counting(data)
    truth = dense_loss(data, case, torch.float64)
    naive = None if case.dtype == torch.float32 else dense_loss(data, case, case.dtype)
    found, ranks = {}, []
    for implementation in BOTH:
        loss, grad, nll, lse, rank, weight_sum = evaluate(data, case, loss_workspace(device, case, implementation))
        assert not grad[~rows].any()
        assert not nll[~rows].any()
        assert bool((rank[~rows] == fused_lm_head_loss.NO_RANK).all())
        assert float(weight_sum) == pytest.approx(float(data.weights[rows].double().sum()), rel=1e-5)
        found[implementation] = {"loss": loss, "nll": nll[rows], "logsumexp": lse[rows], "grad": grad[rows]}
        ranks.append(rank[rows])
    assert_accurate(found, truth, naive, exact=("loss", "nll", "logsumexp"))
    # The two sum in different orders, so a logit next to the label's may change sides: a rank may move by a little.
    assert float((ranks[0] - ranks[1]).abs().double().mean()) <= 1e-5 * case.vocab


@pytest.mark.parametrize(("device", "case"), [on("cpu", TINY_LOSS, name="tiny"), on("cuda", REAL_LOSS, name="real")])
@pytest.mark.parametrize("option", ["d_pace", "teacher"])
def test_options_of_the_loss_agree_with_the_torch_implementation(device: str, case: Loss, option: str) -> None:
    """The options' own truth is tested on the CPU; here the two implementations must agree."""
    data, k = loss_data(device, case), 4
    blocks = -(-case.rows // (k - 1))
    index = torch.arange(case.rows, device=device)
    options: dict[str, Any] = {}
    if option == "d_pace":
        options["d_pace"] = fused_lm_head_loss.DPace(alpha=0.5, trained_rows=index // (k - 1) * k + 1 + index % (k - 1))
    else:
        means = torch.randn(7, case.hidden, device=device) * case.hidden**-0.5
        options["teacher"] = fused_lm_head_loss.Teacher(
            weight=0.3, mean=means, entropy=torch.rand(7, device=device), rows=index % 7, bias_mean=None
        )
    results = {
        implementation: evaluate(
            data, case, loss_workspace(device, case, implementation, num_blocks=blocks, block_size=k), **options
        )
        for implementation in BOTH
    }
    plain = evaluate(data, case, loss_workspace(device, case, "torch"))
    assert error(results["torch"][0], plain[0].double()) > 1e-3, "the option must matter"
    for name, ours, theirs in zip(("loss", "grad", "nll"), results["triton"], results["torch"], strict=False):
        # Gradients of 16-bit rows differ by one rounding.
        most = 2 * torch.finfo(case.dtype).eps if name == "grad" and case.dtype != torch.float32 else 1e-5
        assert error(ours, theirs.double()) <= most, name


@pytest.mark.gpu
def test_scratch_beyond_two_to_the_31_elements() -> None:
    case = replace(REAL_LOSS, rows=2**31 // 151936 + 200, hidden=64)
    data = loss_data("cuda", case)
    whole = evaluate(data, case, loss_workspace("cuda", replace(case, chunk_rows=case.rows), "triton"))
    parts = evaluate(data, case, loss_workspace("cuda", replace(case, chunk_rows=1024), "triton"))
    for i, most in ((0, 1e-5), (2, 1e-5), (1, 2**-7)):
        assert error(whole[i][-200:] if whole[i].ndim else whole[i], parts[i][-200:].double() if parts[i].ndim
                     else parts[i].double()) <= most  # fmt: skip


@pytest.mark.gpu
def test_the_loss_needs_less_than_a_gigabyte() -> None:
    case = replace(REAL_LOSS, rows=7680, hidden=64)
    data = loss_data("cuda", case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(data, case, loss_workspace("cuda", case, "triton"))
    assert torch.cuda.max_memory_allocated() - before < 1e9


# ---- repeats, steady state, graphs ----------------------------------------------------------------------------------

OPERATORS = [
    on("cpu", "attention", TINY_ATTENTION, name="attention"),
    on("cpu", "loss", TINY_LOSS, name="loss"),
    on("cuda", "attention", REAL_ATTENTION, name="attention"),
    on("cuda", "attention", replace(REAL_ATTENTION, causal=True, window=512, dim=64), name="attention-window"),
    on("cuda", "loss", REAL_LOSS, name="loss"),
    on("cuda", "loss", replace(REAL_LOSS, dtype=torch.float32, vocab=32001), name="loss-fp32"),
]


def prepare(device: str, operator: str, case: Any, seed: int = 0, live: int | None = None) -> Any:
    """(data, workspace, function from data to results) of one Triton operator."""
    if operator == "attention":
        ws = attention_workspace(device, case, "triton")
        return attention_data(device, case, seed, live), ws, lambda data: attend(data, case, ws)
    ws = loss_workspace(device, case, "triton")
    return loss_data(device, case, seed, live), ws, lambda data: evaluate(data, case, ws)


def tensors_of(workspace: Any) -> list[Tensor]:
    return workspace.scratch if isinstance(workspace.scratch, list) else workspace.tensors()


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"result {i} differs by {float((x.double() - y.double()).abs().max())}"


@pytest.mark.parametrize(("device", "operator", "case"), OPERATORS)
def test_two_runs_agree_bitwise(device: str, operator: str, case: Any) -> None:
    data, _, run = prepare(device, operator, case)
    _, _, other = prepare(device, operator, case)  # a workspace at other addresses
    first = [x.clone() for x in run(data)]
    for again in (run, other):
        assert_same(first, again(data))


@pytest.mark.parametrize(("device", "operator", "case"), OPERATORS)
def test_a_warm_call_neither_syncs_nor_takes_memory(device: str, operator: str, case: Any) -> None:
    data, ws, run = prepare(device, operator, case)
    addresses = [t.data_ptr() for t in tensors_of(ws)]
    for _ in range(2):
        run(data)
    with steady(device):
        for _ in range(3):
            run(data)
    assert any(addresses)
    assert [t.data_ptr() for t in tensors_of(ws)] == addresses


@pytest.mark.parametrize(("device", "operator", "case"), OPERATORS)
def test_a_graph_replayed_on_other_data_equals_eager_bitwise(device: str, operator: str, case: Any) -> None:
    data, _, run = prepare(device, operator, case)
    results = [torch.empty_like(x) for x in run(data)]

    def operation() -> None:
        for into, value in zip(results, run(data), strict=True):
            into.copy_(value)

    replay = capture(device, operation)
    live = (case.anchors if operator == "attention" else case.rows) // 2
    other, _, eager = prepare(device, operator, case, seed=1, live=live)
    expected = [x.clone() for x in eager(other)]
    data.copy_(other)
    for result in results:
        result.zero_()
    replay()
    assert_same(results, expected)
    assert results[1].any()


# ---- one micro-step -------------------------------------------------------------------------------------------------

TINY_STEP = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 41,
    "mask_token_id": 40, "block_size": 4,
}  # fmt: skip
REAL_STEP = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072,
    "vocab_size": 32001, "mask_token_id": 32000, "block_size": 8, "max_trained_length": 1024, "rope_theta": 1e4,
}  # fmt: skip
STEPS = [
    on("cpu", TINY_STEP, {"token_budget": 40, "num_anchors": 7}, (9, 14, 6), torch.float32, name="tiny"),
    on("cuda", REAL_STEP, {"token_budget": 4096, "num_anchors": 250}, (1000, 700, 800, 500), torch.bfloat16,
       name="real-bf16"),
]  # fmt: skip


def make_step(
    device: str,
    spec_changes: dict[str, Any],
    shape_changes: dict[str, Any],
    lengths: Sequence[int],
    dtype: torch.dtype,
    kernels: backend.Implementation,
) -> tuple[DrafterStep, int]:
    """A loaded step and its size. Weights are representable in bfloat16, so that all dtypes start from the same."""
    sliding = {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")}
    spec, where = toy_spec(**{**sliding, **spec_changes}), torch.device(device)
    shape = toy_shape(spec, **shape_changes)
    sizes: dict[str, Any] = {
        "token_budget": shape.token_budget, "feature_size": len(spec.target_layer_ids) * spec.hidden_size,
        "num_anchors": shape.num_anchors, "block_size": spec.block_size, "device": where,
    }  # fmt: skip
    table = BufferTable(
        [*slot_specs(num_slots=1, num_targets=1, feature_dtype=dtype, **sizes), *workspace_specs(dtype=dtype, **sizes)]
    )
    g = torch.Generator().manual_seed(5)

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, spec.hidden_size, generator=g).bfloat16().to(where, dtype)

    parameters = FlatParameters(spec.parameter_shapes(), device=where, compute_dtype=dtype)
    parameters.load({name: t.bfloat16() for name, t in random_tensors(spec).items()})
    step = DrafterStep(
        spec, parameters, OptimConfig(), sizes=micro_step_sizes(shape.num_anchors, 1), table=table,
        embed_weight=matrix(spec.vocab_size), head_weight=matrix(spec.head_vocab_size) * spec.hidden_size**-0.5,
        kernels=kernels,
    )  # fmt: skip
    toy_job = make_jobs(random_rows(spec, lengths), shape)[0]
    for r, (_, _, values) in enumerate(toy_job.rows):
        start = r * toy_job.job.bucket_length
        table["slot.features"][0, start : start + len(values)] = values.bfloat16().to(where, dtype)
    write_metadata(table, 0, toy_job.job)
    return step, step.load_slot(0, toy_job.job)


def step_results(step: DrafterStep) -> dict[str, Tensor]:
    views = step.parameters.views(step.parameters.grads)
    return {name: grad.clone() for name, grad in views.items()} | {"weight_sum": step.weight_sum.clone()}


@pytest.mark.parametrize(("device", "spec", "shape", "lengths", "dtype"), STEPS)
def test_a_micro_step_with_triton_equals_one_with_torch(
    device: str, spec: Any, shape: Any, lengths: Any, dtype: torch.dtype
) -> None:
    runs = (("truth", "torch", torch.float32), ("torch", "torch", dtype), ("triton", "triton", dtype))
    found, losses = {}, {}
    for name, kernels, kind in runs:
        step, size = make_step(device, spec, shape, lengths, kind, kernels)
        step.micro_step(size)
        found[name], losses[name] = step_results(step), step.read_counts().loss_sum
    truth = {name: value.double() for name, value in found["truth"].items()}
    assert truth["weight_sum"] > 5
    assert all(bool(value.any()) for value in truth.values())
    torch_error, triton_error = (relative_error(found[name], truth) for name in BOTH)
    for name, value in triton_error.items():
        assert value <= (1e-5 if dtype == torch.float32 else 2 * torch_error[name] + 1e-4), name
    assert losses["triton"] == pytest.approx(losses["truth"], rel=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("device", "spec", "shape", "lengths", "dtype"), STEPS)
def test_a_captured_micro_step_equals_an_eager_one_bitwise(
    device: str, spec: Any, shape: Any, lengths: Any, dtype: torch.dtype
) -> None:
    step, size = make_step(device, spec, shape, lengths, dtype, "triton")
    for _ in range(2):
        step.micro_step(size)
    with steady(device):
        step.micro_step(size)
    step.parameters.zero_grads()
    step.weight_sum.zero_()
    step.micro_step(size)
    expected = step_results(step)
    replay = capture(device, lambda: step.micro_step(size))
    step.parameters.zero_grads()
    step.weight_sum.zero_()
    replay()
    assert_same(list(step_results(step).values()), list(expected.values()))
    assert expected["weight_sum"] > 5
