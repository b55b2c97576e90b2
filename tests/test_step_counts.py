"""What one micro-step of the drafter costs: FLOPs, operators, and bytes kept for the backward, each against a formula.

The formulas are those of docs/design.md, written out here from the shapes alone. Every block is live and every row of
it is trained, so that what the CPU skips by reading counts is what a GPU computes for the whole size, too.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, mm_flop
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from dflash_graph.kernels import gemm
from dflash_graph.kernels.backend import in_the_open
from dflash_graph.kernels.fused_lm_head_loss import fused_lm_head_loss
from tests.toys import Toy, relative_error, toy_shape, toy_spec

NUM_ROWS = 4  # of a job
FULL = {"hidden_size": 576, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152}  # SmolLM2-135M
QUARTER = {"hidden_size": 144, "head_dim": 16, "intermediate_size": 384, "vocab_size": 3072}
SHAPES = {"T 1,024": (1024, 64, 16), "T 2,048": (2048, 512, 8), "T 4,096": (4096, 256, 16)}  # T, A, K
ONE_QUICK = [SHAPES["T 1,024"], *(pytest.param(SHAPES[name], marks=pytest.mark.slow) for name in list(SHAPES)[1:])]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Letters of docs/design.md; nd is N*D, pairs the visible (query, key) pairs of one head."""

    t: int
    a: int
    k: int
    r: int
    d: int
    nd: int
    h: int
    hk: int
    e: int
    f: int
    v: int
    layers: int
    pairs: int

    @property
    def n(self) -> int:
        """Block positions."""
        return self.a * self.k


def make_step(shape: tuple[int, int, int], model: dict[str, int]) -> tuple[Toy, Sizes]:
    """A step with its workspace filled: 4 rows, anchors spread evenly over them, all blocks within their row."""
    t, a, k = shape
    spec = toy_spec(
        **model,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        block_size=k,
        target_layer_ids=(1, 2, 3),
        max_trained_length=t // NUM_ROWS,
        mask_token_id=17,
        rope_theta=1e4,
    )
    toy = Toy(spec, toy_shape(spec, token_budget=t, num_anchors=a))
    row, per_row = t // NUM_ROWS, a // NUM_ROWS
    starts = torch.arange(NUM_ROWS).repeat_interleave(per_row) * row
    offsets = (torch.arange(per_row) * (row - k + 1) // per_row).repeat(NUM_ROWS)
    live = torch.arange(a)[:, None] * k + torch.arange(1, k)
    values = {
        "features": torch.randn(t, toy.table["workspace.features"].shape[1]),
        "positions": torch.arange(t) % row,
        "anchors": starts + offsets,
        "anchor_row_starts": starts,
        "anchor_tokens": torch.randint(spec.vocab_size, (a,)),
        "trained_rows": live.flatten(),
        "labels": torch.randint(spec.vocab_size, (a * (k - 1),)),
        "weights": torch.rand(a * (k - 1)),
        "num_anchors": torch.tensor(a),
        "num_trained_rows": torch.tensor(a * (k - 1)),
    }
    for name, value in values.items():
        toy.table[f"workspace.{name}"].copy_(value)
    sizes = Sizes(
        t=t, a=a, k=k, r=a * (k - 1), d=spec.hidden_size, nd=3 * spec.hidden_size, h=9, hk=3, e=spec.head_dim,
        f=spec.intermediate_size, v=spec.vocab_size, layers=3, pairs=k * int(offsets.sum()) + a * k * k,
    )  # fmt: skip
    return toy, sizes


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def least_flops(s: Sizes) -> dict[str, int]:
    """Multiply-adds times 2 of the matrix products that a micro-step cannot do without.

    A product of a forward costs the same again for the gradient of its input and of its weight. Features are frozen.
    """
    q, kv, last, three = s.h * s.e, s.hk * s.e, s.layers - 1, 3 * 2
    # One row stands for all mask positions of the first layer; the last layer needs the queries of trained rows only.
    queries = s.a + 1 + (last - 1) * s.n + s.r
    keys = s.a + 1 + last * s.n
    return {
        "fc": 2 * 2 * s.t * s.nd * s.d,
        "context keys and values": three * s.layers * s.t * s.d * 2 * kv,
        "block projections": three * s.d * (queries * q + keys * 2 * kv),
        "output projections": three * q * s.d * (last * s.n + s.r),
        "MLP": three * 3 * s.d * s.f * (last * s.n + s.r),
        "loss": 2 * 2 * s.r * s.v * s.d,
        # Forward q.k and p.v; backward the scores and dout.v once more, and dq, dk, dv: 2 + 5 products.
        "attention": 2 * (2 + 5) * s.pairs * s.h * s.e * s.layers,
    }


IN_PLACE: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: lambda into, a, b, **_: mm_flop(a, b),
    torch.ops.aten.baddbmm_: lambda into, a, b, **_: bmm_flop(a, b),
}
PRODUCTS = ("mm", "matmul", "linear", "einsum", "conv", "attention", "dot")
NO_PRODUCTS = {"linalg_vector_norm"}


class Seen(TorchDispatchMode):
    """Counts calls of aten functions and of operators that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func in SILENT):
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


# What runs nothing on the data: views that torch does not mark as such, and reads of properties.
# Also allocations that fill nothing.
SILENT = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


def flops(run: Callable[[], None]) -> tuple[int, int]:
    """(FLOPs of batched products, which attention alone has; FLOPs of all others), none of them overlooked."""
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE | gemm.flop_formulas())
    with in_the_open(), Seen() as seen, counter:
        run()
    counted = {str(name).replace(".", "::") for name in counter.get_flop_counts()["Global"]}
    products = {name for name in seen.calls if any(word in name for word in PRODUCTS)}
    assert products - {f"aten::{name}" for name in NO_PRODUCTS} <= counted
    assert not [name for name in seen.calls if not name.startswith(("aten::", "mkldnn::"))], "hidden products"
    batched = sum(n for name, n in counter.get_flop_counts()["Global"].items() if "bmm" in str(name))
    return batched, counter.get_total_flops() - batched


def check_flops(toy: Toy, sizes: Sizes) -> tuple[float, float]:
    """Measured / least FLOPs of everything but attention, and of the whole; the former is held to its bounds here."""
    batched, others = flops(lambda: toy.step.micro_step(sizes.a))
    least = least_flops(sizes)
    attention = least.pop("attention")
    ratio, whole = others / sum(least.values()), (batched + others) / (sum(least.values()) + attention)
    parts = {name: round(count / 1e9, 2) for name, count in (least | {"attention": attention}).items()}
    print(f"\nT {sizes.t} A {sizes.a} K {sizes.k} D {sizes.d} V {sizes.v}: least GFLOP {parts}")
    print(f"measured: {ratio:.4f} of it without attention, attention {batched / attention:.3f}, whole {whole:.4f}")
    assert 1 <= ratio <= 1.005
    # Plain torch computes the rectangle around a tile's ragged end of anchors, as far as that costs less time than a
    # further tile would. Were all anchors of a row, which lie evenly here, one tile, that would be twice the least.
    assert 1 <= batched / attention <= 2
    return ratio, whole


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flops_of_a_small_model_are_within_2_percent_of_the_least(shape: tuple[int, int, int]) -> None:
    check_flops(*make_step(shape, QUARTER))


@pytest.mark.parametrize("shape", ONE_QUICK, ids=SHAPES)
def test_flops_are_within_2_percent_of_the_least(shape: tuple[int, int, int]) -> None:
    """At full size, where attention has its true share: the whole, ragged tiles included."""
    _, whole = check_flops(*make_step(shape, FULL))
    assert 1 <= whole <= 1.02


# ---- operators ------------------------------------------------------------------------------------------------------


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Stock rotary embedding of one tensor: queries and keys lie at different positions here."""
    return x * cos + rotate_half(x) * sin


class Stock(nn.Module):
    """The same drafter and loss from transformers' modules: the truth of its own kind, and the count to beat."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        spec = self.spec = toy.spec
        config = Qwen3Config(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_attention_heads=spec.num_attention_heads,
            num_key_value_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        )
        d, e, eps = spec.hidden_size, spec.head_dim, spec.rms_norm_eps
        q, kv = spec.num_attention_heads * e, spec.num_key_value_heads * e
        self.rotary = Qwen3RotaryEmbedding(config)
        self.fc, self.hidden_norm = nn.Linear(3 * d, d, bias=False), Qwen3RMSNorm(d, eps)
        self.norm = Qwen3RMSNorm(d, eps)
        self.layers = nn.ModuleList()
        for _ in range(spec.num_hidden_layers):
            layer = nn.Module()
            attention = {
                "q_proj": nn.Linear(d, q, bias=False), "k_proj": nn.Linear(d, kv, bias=False),
                "v_proj": nn.Linear(d, kv, bias=False), "o_proj": nn.Linear(q, d, bias=False),
                "q_norm": Qwen3RMSNorm(e, eps), "k_norm": Qwen3RMSNorm(e, eps),
            }  # fmt: skip
            layer.self_attn, layer.mlp = nn.ModuleDict(attention), Qwen3MLP(config)
            layer.input_layernorm, layer.post_attention_layernorm = Qwen3RMSNorm(d, eps), Qwen3RMSNorm(d, eps)
            self.layers.append(layer)
        self.load_state_dict(toy.masters())
        self.embed, self.head = toy.step.drafter.embed_weight, toy.step.head_weight
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def prepare(self, toy: Toy, s: Sizes) -> None:
        """Mask, ids and positions of the job: made once, and not counted."""
        ws = {name: toy.table[f"workspace.{name}"] for name in ("anchors", "anchor_row_starts", "positions")}
        at, offsets = torch.arange(s.t), torch.arange(s.k)
        context = (at >= ws["anchor_row_starts"][:, None]) & (at < ws["anchors"][:, None])  # (A, T)
        block = torch.arange(s.n) // s.k
        self.mask = torch.cat([context.repeat_interleave(s.k, 0), block[:, None] == block], 1)[None, None]
        ids = torch.full((s.a, s.k), self.spec.mask_token_id)
        ids[:, 0] = toy.table["workspace.anchor_tokens"]
        self.ids = ids.view(1, -1)
        block_positions = (ws["anchors"] - ws["anchor_row_starts"])[:, None] + offsets
        self.positions = torch.cat([ws["positions"], block_positions.view(-1)])[None]
        self.features = toy.table["workspace.features"][None]
        self.labels, self.weights = toy.table["workspace.labels"], toy.table["workspace.weights"]

    def forward(self) -> Tensor:
        spec, length = self.spec, self.features.shape[1]
        x = F.embedding(self.ids, self.embed)
        context = self.hidden_norm(self.fc(self.features))
        cos, sin = self.rotary(x, self.positions)
        for layer in self.layers:
            attn, inner = layer.self_attn, layer.input_layernorm(x)
            source = torch.cat([context, inner], 1)

            shape = (1, -1, spec.num_key_value_heads, spec.head_dim)
            q = attn["q_norm"](attn["q_proj"](inner).view(1, inner.shape[1], -1, spec.head_dim)).transpose(1, 2)
            k = attn["k_norm"](attn["k_proj"](source).view(shape)).transpose(1, 2)
            v = attn["v_proj"](source).view(shape).transpose(1, 2)
            q = turn(q, cos[:, None, length:], sin[:, None, length:])
            k = turn(k, cos[:, None], sin[:, None])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
            x = x + attn["o_proj"](out.transpose(1, 2).reshape(*x.shape[:-1], -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows = self.norm(x).view(-1, spec.block_size, x.shape[-1])[:, 1:]
        logits = F.linear(rows, self.head).flatten(0, 1).float()
        return (F.cross_entropy(logits, self.labels, reduction="none") * self.weights).sum()


def operators(run: Callable[[], None], *, opened: bool = False) -> Counter[str]:
    with in_the_open() if opened else nullcontext(), Seen() as seen:
        run()
    return seen.calls


@pytest.mark.parametrize("shape", ONE_QUICK, ids=SHAPES)
def test_operators_are_30_percent_fewer_than_with_stock_modules(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, loss and backward; on both sides the attention of a layer is one operator forward and one backward.

    Counted as a GPU runs them: oneDNN's products on the CPU need a pass of their own to add to a tensor in place.
    """
    monkeypatch.setattr(gemm, "_ONEDNN", False)
    toy, sizes = make_step(shape, QUARTER)
    stock = Stock(toy)
    stock.prepare(toy, sizes)
    toy.step.micro_step(sizes.a)
    loss = stock()
    loss.backward()
    # The same step: one loss, one gradient.
    counts = toy.step.read_counts()
    assert counts.loss_sum == pytest.approx(float(loss.detach()), rel=1e-4)
    truth = {name: parameter.grad for name, parameter in stock.named_parameters()}
    errors = relative_error(toy.grads(), truth)
    assert max(errors.values()) <= 2e-3, errors

    theirs = operators(lambda: stock().backward())
    step = toy.step
    ours = operators(
        lambda: fused_lm_head_loss(
            step.drafter(step.inputs(sizes.a)),
            step.head_weight,
            toy.table["workspace.labels"],
            toy.table["workspace.weights"],
            num_rows=toy.table["workspace.num_trained_rows"],
            workspace=step._loss,
        ).backward()
    )
    print(f"\n{shape}: {ours.total()} operators, stock modules {theirs.total()}")
    assert ours.total() <= 0.7 * theirs.total()


# ---- bytes kept for the backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_saved_bytes_are_those_of_the_formula(shape: tuple[int, int, int]) -> None:
    toy, sizes = make_step(shape, QUARTER)
    assert math.prod(toy.step._attention.stats_shape(sizes.a)) == 2 * sizes.n * sizes.h
    parameters = {buffer.untyped_storage().data_ptr() for _, buffer in toy.parameters.buffers()}
    static = parameters | {tensor.untyped_storage().data_ptr() for tensor in (toy.table[name] for name in toy.table)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in static:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = toy.step.drafter(toy.step.inputs(sizes.a))
    print(f"\n{shape}: {sum(kept.values()) / 2**20:.1f} MiB")
    assert hidden.requires_grad
    assert sum(kept.values()) == toy.spec.kept_bytes(sizes.t, sizes.a, 4)
