"""The drafter: its architecture, its flat parameters, and the forward pass of a micro-step.

Parameters live in two flat float32 master buffers (weights that decay, norm weights that do not); every parameter is
a view of one of them, or of a low-precision compute copy, and every gradient is a view of a flat float32 gradient.
Nothing here allocates or rebinds a parameter after construction. Embedding and lm_head are the target's, frozen, and
are not part of the drafter. Called by `step.py`; architecture after DFlash (z-lab), tensor names likewise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dflash_graph.kernels import layers, pointwise
from dflash_graph.kernels.backend import Implementation
from dflash_graph.kernels.block_attention import BlockAttentionWorkspace, block_attention


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Everything that defines a drafter's forward pass. Saved in each checkpoint.

    Attributes:
        target_layer_ids: taps; id k is the output of the target's decoder layer k (0-based).
        draft_vocab_size: rows of the reduced head, or None for the target's full head.
        max_trained_length: longest row the drafter was trained on, tokens.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: bool
    draft_vocab_size: int | None
    max_trained_length: int
    target_path: str
    gguf_file: str | None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads; found {self.num_attention_heads} and "
                f"{self.num_key_value_heads}. Set drafter.num_attention_heads or drafter.num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings; found {self.head_dim}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a row of the target's embedding, 0..{self.vocab_size - 1}; found "
                f"{self.mask_token_id}"
            )

    @property
    def head_vocab_size(self) -> int:
        """V, rows of the head that the loss uses."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterSpec":
        lists = {name: tuple(values[name]) for name in ("target_layer_ids", "layer_types")}
        return cls(**{**values, **lists})

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all parameters, in the order they lie in the flat buffers."""
        d, e, f = self.hidden_size, self.head_dim, self.intermediate_size
        q, kv = self.num_attention_heads * e, self.num_key_value_heads * e
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, len(self.target_layer_ids) * d),
            "hidden_norm.weight": (d,),
        }
        for i in range(self.num_hidden_layers):
            layer = {
                "self_attn.q_proj.weight": (q, d),
                "self_attn.k_proj.weight": (kv, d),
                "self_attn.v_proj.weight": (kv, d),
                "self_attn.o_proj.weight": (d, q),
                "self_attn.q_norm.weight": (e,),
                "self_attn.k_norm.weight": (e,),
                "mlp.gate_proj.weight": (f, d),
                "mlp.up_proj.weight": (f, d),
                "mlp.down_proj.weight": (d, f),
                "input_layernorm.weight": (d,),
                "post_attention_layernorm.weight": (d,),
            }
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (d,)}

    def kept_bytes(self, num_tokens: int, num_anchors: int, itemsize: int) -> int:
        """Bytes that a forward pass over T positions and a anchors, all rows trained, keeps for its backward.

        docs/design.md has the formula; in 16 bits the true number is a little higher, by float32 numbers of each row.
        """
        t, a, k, d, e = num_tokens, num_anchors, self.block_size, self.hidden_size, self.head_dim
        n, r, last = a * k, a * (k - 1), self.num_hidden_layers - 1
        h, hk = self.num_attention_heads, self.num_key_value_heads

        def inputs(rows: int) -> int:  # of a layer's norms: hidden rows, queries, and keys of context and blocks
            return rows * (d + 1) + (rows * h + (t + rows) * hk) * (e + 1)

        attention = 2 * n * h * e + 2 * (t + n) * hk * e + 2 * n * h
        mlps = (last * n + r) * (d + 1 + 2 * self.intermediate_size)
        trained = r * (h * e + d + 1)
        context = t * (d + 1) + 2 * (t + n) * e
        layers = inputs(a + 1) + last * inputs(n) + self.num_hidden_layers * attention
        return itemsize * (context + layers + mlps + trained)


_ALIGNMENT = 16  # elements: every parameter starts on a 64-byte boundary of its flat float32 buffer


class FlatParameters:
    """Masters, gradients and (in low precision) the compute copy of all parameters, as flat buffers of views.

    Attributes:
        masters, grads: {"decay": Tensor, "no_decay": Tensor}, each (n,) float32, where matrices decay and vectors not.
        sums: (n,) float32, what ranks add up after a step: `grads` and `weight_sum` are views of it.
        weight_sum: () float32, the loss weights of the step so far.
        compute: the same two keys in the compute dtype; the masters themselves when that is float32.
        leaves: parameter name -> leaf Tensor (a view of `compute`) whose `.grad` is a view of `grads`.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        self.shapes = dict(shapes)
        self._places: dict[str, tuple[str, int]] = {}
        sizes = {"decay": 0, "no_decay": 0}
        for name, shape in self.shapes.items():
            group = "decay" if len(shape) > 1 else "no_decay"
            self._places[name] = (group, sizes[group])
            sizes[group] += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self.masters = {g: torch.zeros(n, device=device) for g, n in sizes.items()}
        self.sums = torch.zeros(sum(sizes.values()) + 1, device=device)
        decay = sizes["decay"]
        self.grads = {"decay": self.sums[:decay], "no_decay": self.sums[decay:-1]}
        self.weight_sum = self.sums[-1]
        self.low_precision = compute_dtype != torch.float32
        self.compute = (
            {g: torch.zeros(n, device=device, dtype=compute_dtype) for g, n in sizes.items()}
            if self.low_precision
            else self.masters
        )
        self.leaves: dict[str, Tensor] = {}
        for name in self.shapes:
            leaf = self._view(self.compute, name).detach().requires_grad_(True)
            if self.low_precision:
                leaf.grad_dtype = torch.float32  # gradients accumulate in float32
            leaf.grad = self._view(self.grads, name)
            self.leaves[name] = leaf

    def _view(self, buffers: Mapping[str, Tensor], name: str) -> Tensor:
        group, start = self._places[name]
        shape = self.shapes[name]
        return buffers[group][start : start + prod(shape)].view(shape)

    def views(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named views of flat buffers of this layout (masters, gradients, or optimizer moments)."""
        return {name: self._view(buffers, name) for name in self.shapes}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every flat buffer with a name, for the address check."""
        kinds = {"master": self.masters, "grad": self.grads}
        if self.low_precision:
            kinds["compute"] = self.compute
        for kind, groups in kinds.items():
            for group, buffer in groups.items():
                yield f"{kind}.{group}", buffer
        yield "sums", self.sums
        for name, leaf in self.leaves.items():
            yield f"leaf.{name}", leaf
            assert leaf.grad is not None
            yield f"leaf.{name}.grad", leaf.grad

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors into the masters (no rebinding) and refresh the compute copy.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs.
        """
        missing, unknown = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or unknown:
            raise ValueError(f"drafter tensors do not match: missing {sorted(missing)}, unknown {sorted(unknown)}")
        for name, view in self.views(self.masters).items():
            if view.shape != tensors[name].shape:
                raise ValueError(f"{name} must have shape {tuple(view.shape)}; found {tuple(tensors[name].shape)}")
            view.copy_(tensors[name])
        self.refresh_compute()

    def refresh_compute(self) -> None:
        """Round the masters into the compute copy; nothing to do in float32."""
        if self.low_precision:
            for group, master in self.masters.items():
                self.compute[group].copy_(master)

    def zero_grads(self) -> None:
        """Begin a step: gradients and weight sum are 0."""
        self.sums.zero_()


def rope_table(spec: DrafterSpec, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding for positions 0..length-1, each (length, E), computed in float64."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), spec.rope_theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """Static views that one micro-step size reads; all sanitised (see `step.py`).

    a anchors of this size, R = a * (K-1) rows, T positions.
    """

    features: Tensor  # (T, N*D) compute dtype, zero in padding
    positions: Tensor  # (T,) int64
    anchors: Tensor  # (a,) int64 flat index of the anchor
    row_starts: Tensor  # (a,) int64 flat index of the first position of the anchor's row
    anchor_tokens: Tensor  # (a,) int64
    trained_rows: Tensor  # (R,) int64, anchor * K + k
    num_anchors: Tensor  # () int64, live anchors


class Drafter(nn.Module):
    """The drafter's forward pass over static inputs: trained rows of final hidden states.

    Args:
        parameters: flat parameters whose leaves this module reads.
        embed_weight: (vocab, D) the target's frozen embedding, compute dtype.
        rope_length: positions that the rotary table covers (longest row + K).
        attention: scratch of the attention operator, shared by all layers.
        kernels: of norms, rotary embedding and SwiGLU; None chooses by device, see `pointwise.choose`.

    A backward adds weight gradients to the leaves' `.grad` directly; autograd hands none out.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        parameters: FlatParameters,
        *,
        embed_weight: Tensor,
        rope_length: int,
        attention: BlockAttentionWorkspace,
        kernels: Implementation | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.weights = parameters.leaves
        self.embed_weight = embed_weight
        self.cos, self.sin = rope_table(spec, rope_length, embed_weight.device, embed_weight.dtype)
        self.offsets = torch.arange(spec.block_size, device=embed_weight.device)
        self.attention = attention
        self.pointwise = pointwise.choose(
            kernels, eps=spec.rms_norm_eps, device=embed_weight.device, dtype=embed_weight.dtype
        )

    # Not traced: its backward adds weight gradients in place.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: BlockInputs, context: Sequence[Tensor] | None = None) -> Tensor:  # (R, D)
        """Final-norm hidden states of the rows listed in `x.trained_rows`.

        Args:
            context: what `project_context` gave for as many anchors and the same features, if it is used more than
                once; its room for the blocks' keys is overwritten.
        """
        spec, embed = self.spec, self.embed_weight
        rope = self._rope(x)
        if context is None:
            context = self.project_context(x.features, x.anchors.shape[0])
        # All mask positions enter with the same row, so the first layer's norms and projections see a + 1 rows.
        hidden = torch.cat([embed.index_select(0, x.anchor_tokens), embed[spec.mask_token_id, None]])
        for i in range(spec.num_hidden_layers):
            q, k, v, hidden = self._heads(i, hidden, context[2 * i])
            if i == 0:
                q, v, hidden = (layers.spread(t, spec.block_size) for t in (q, v, hidden))
                k = layers.spread(k, spec.block_size, skip=x.positions.shape[0])
            mixed = self._attend(i, q, k, v, context[2 * i + 1], rope, x)
            if i == spec.num_hidden_layers - 1:
                # Only trained rows go on: neither anchor rows nor dead ones pay for the MLP.
                hidden, mixed = layers.gather(hidden, x.trained_rows), layers.gather(mixed, x.trained_rows)
            hidden = self._finish_layer(i, hidden, mixed)
        return self._norm(hidden, "norm")

    def _rope(self, x: BlockInputs) -> tuple[Tensor, Tensor]:
        """cos and sin, (T + a*K, E) each, of the context's positions and behind them the blocks'."""
        block_positions = (x.anchors - x.row_starts)[:, None] + self.offsets  # (a, K)
        positions = torch.cat([x.positions, block_positions.view(-1)])
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def project_context(self, features: Tensor, num_blocks: int) -> tuple[Tensor, ...]:
        """Projected keys and values of all layers: k, v, k, v, ..., (T, Hk*E) each, k with room for the blocks'.

        Args:
            features: (T, N*D). num_blocks: a, anchors of the `forward` that takes them.
        """
        w, num_layers = self.weights, self.spec.num_hidden_layers
        kinds = [w[f"layers.{i}.self_attn.{kind}_proj.weight"] for i in range(num_layers) for kind in "kv"]
        fused = layers.project(features, w["fc.weight"])  # (T, D)
        return layers.norm_project(fused, w["hidden_norm.weight"], kinds, self.pointwise, rooms=self._rooms(num_blocks))

    def _rooms(self, num_blocks: int) -> list[int]:
        """Rows behind the context's in each result of `project_context`."""
        return [num_blocks + 1, 0] + [num_blocks * self.spec.block_size, 0] * (self.spec.num_hidden_layers - 1)

    def context_rows(self, x: BlockInputs) -> list[int]:
        """Rows of each tensor that `forward` takes as its context."""
        return [x.positions.shape[0] + room for room in self._rooms(x.anchors.shape[0])]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layers.norm(x, self.weights[f"{name}.weight"], self.pointwise)

    def _heads(self, i: int, hidden: Tensor, context_keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (n, H, E) and keys of context and blocks (T + n, Hk, E), normalised; values (n, Hk, E); hidden.

        hidden: (n, D). context_keys: (T + n, Hk*E), written up to T. One tensor for all keys, so that one norm and one
        rotation serve context and blocks.
        """
        w, prefix = self.weights, f"layers.{i}.self_attn"
        k, q, v, hidden = layers.norm_project(
            hidden,
            w[f"layers.{i}.input_layernorm.weight"],
            [w[f"{prefix}.{kind}_proj.weight"] for kind in "kqv"],
            self.pointwise,
            behind=context_keys,
            carry=True,
        )
        k, q, v = (t.view(t.shape[0], -1, self.spec.head_dim) for t in (k, q, v))
        return self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm"), v, hidden

    def _attend(
        self,
        i: int,
        q: Tensor,  # (a*K, H, E), normalised
        k: Tensor,  # (T + a*K, Hk, E), normalised
        v_block: Tensor,  # (a*K, Hk, E)
        v_context: Tensor,  # (T, Hk*E)
        rope: tuple[Tensor, Tensor],
        x: BlockInputs,
    ) -> Tensor:  # (a*K, H*E)
        spec = self.spec
        q, k_context, k_block = layers.rotate_heads(q, k, *rope, v_context.shape[0], self.pointwise)
        blocks = (x.anchors.shape[0], spec.block_size, -1, spec.head_dim)
        out = block_attention(
            q.view(blocks),
            k_context,
            v_context.view(k_context.shape),
            k_block.view(blocks),
            v_block.view(blocks),
            x.anchors,
            x.row_starts,
            num_anchors=x.num_anchors,
            scale=spec.head_dim**-0.5,
            causal=spec.causal,
            sliding_window=spec.sliding_window if spec.layer_types[i] == "sliding_attention" else None,
            workspace=self.attention,
        )
        return out.view(q.shape[0], -1)

    def _finish_layer(self, i: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residuals, and the SwiGLU MLP of layer i, on any rows (n, D)."""
        w, prefix = self.weights, f"layers.{i}"
        hidden = layers.add_project(hidden, mixed, w[f"{prefix}.self_attn.o_proj.weight"])
        return layers.mlp(
            hidden,
            w[f"{prefix}.post_attention_layernorm.weight"],
            w[f"{prefix}.mlp.gate_proj.weight"],
            w[f"{prefix}.mlp.up_proj.weight"],
            w[f"{prefix}.mlp.down_proj.weight"],
            self.pointwise,
        )
