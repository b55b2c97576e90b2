"""One micro-step's inputs, the same for every contestant, made from a seed: data, anchors, embedding, drafter weights.

Rows are full (no padding, everything supervised), every row has the same number of anchors and every block lies inside
its row, so that the trainers' rules for ragged data do not matter: each trains the A * (K-1) rows k >= 1 with weight 1.
The head is the embedding (tied). Imports torch alone, because it also runs in the peers' environments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a step; the defaults are SmolLM2-135M's. T must be a multiple of L, and A of the rows T / L."""

    num_tokens: int  # T
    num_anchors: int  # A
    block_size: int  # K
    row_length: int = 1024  # L
    hidden_size: int = 576  # D
    num_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    num_layers: int = 3
    num_taps: int = 3
    vocab_size: int = 49152  # V
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0

    def __post_init__(self) -> None:
        if self.num_tokens % self.row_length or self.num_anchors % self.num_rows:
            raise ValueError(f"T must be a multiple of the row length, and A of the rows; found {self}")
        if self.anchors_per_row > self.row_length - self.block_size:
            raise ValueError(f"a row of {self.row_length} cannot hold {self.anchors_per_row} anchors")

    @property
    def num_rows(self) -> int:
        return self.num_tokens // self.row_length

    @property
    def anchors_per_row(self) -> int:
        return self.num_anchors // self.num_rows

    @property
    def trained_rows(self) -> int:
        """R = A * (K-1)."""
        return self.num_anchors * (self.block_size - 1)

    @property
    def mask_token_id(self) -> int:
        """The last token id; no row holds it."""
        return self.vocab_size - 1

    def __str__(self) -> str:
        return f"T {self.num_tokens} A {self.num_anchors} K {self.block_size}"


@dataclass(kw_only=True, eq=False)
class Problem:
    """Tensors of one step. A contestant may take the weights and the features over; it then holds the only copy."""

    shape: Shape
    tokens: Tensor  # (B, L) int64
    features: Tensor | None  # (B, L, N*D) float32
    anchors: Tensor  # (B, A/B) int64 position in the row, ascending
    embed: Tensor  # (V, D) float32; embedding and head
    parameters: dict[str, Tensor]  # the drafter's tensors by their usual names, float32

    def take_features(self) -> Tensor:
        """The features, which this object gives up, so that a contestant may keep them where it wants."""
        features, self.features = self.features, None
        assert features is not None
        return features

    def take_parameters(self) -> dict[str, Tensor]:
        """The weights, given up likewise."""
        parameters, self.parameters = self.parameters, {}
        return parameters

    def labels(self) -> Tensor:
        """(B, A/B, K-1) int64, token at anchor + k for k >= 1."""
        positions = self.anchors[..., None] + torch.arange(1, self.shape.block_size)
        return torch.gather(self.tokens[:, None].expand(-1, self.anchors.shape[1], -1), 2, positions)


def parameter_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the drafter's tensors, as all trainers store them."""
    d, e, f = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q, kv = shape.num_heads * e, shape.num_key_value_heads * e
    yield "fc.weight", (d, shape.num_taps * d)
    yield "hidden_norm.weight", (d,)
    for i in range(shape.num_layers):
        yield f"layers.{i}.self_attn.q_proj.weight", (q, d)
        yield f"layers.{i}.self_attn.k_proj.weight", (kv, d)
        yield f"layers.{i}.self_attn.v_proj.weight", (kv, d)
        yield f"layers.{i}.self_attn.o_proj.weight", (d, q)
        yield f"layers.{i}.self_attn.q_norm.weight", (e,)
        yield f"layers.{i}.self_attn.k_norm.weight", (e,)
        yield f"layers.{i}.mlp.gate_proj.weight", (f, d)
        yield f"layers.{i}.mlp.up_proj.weight", (f, d)
        yield f"layers.{i}.mlp.down_proj.weight", (d, f)
        yield f"layers.{i}.input_layernorm.weight", (d,)
        yield f"layers.{i}.post_attention_layernorm.weight", (d,)
    yield "norm.weight", (d,)


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    """The step's inputs; a pure function of shape, seed and the version of torch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(size, generator=generator).mul_(std)

    parameters = {}
    for name, size in parameter_shapes(shape):
        if len(size) > 1:
            parameters[name] = normal(*size, std=size[1] ** -0.5)
        else:
            parameters[name] = torch.rand(size, generator=generator).add_(0.5)
    drawn = torch.rand((shape.num_rows, shape.row_length - shape.block_size), generator=generator)
    return Problem(
        shape=shape,
        tokens=torch.randint(0, shape.mask_token_id, (shape.num_rows, shape.row_length), generator=generator),
        features=normal(shape.num_rows, shape.row_length, shape.num_taps * shape.hidden_size, std=1.0),
        anchors=drawn.argsort(1)[:, : shape.anchors_per_row].sort(1).values,
        # Logits of a few units, as after some training: the softmax is neither flat nor a point.
        embed=normal(shape.vocab_size, shape.hidden_size, std=2 * shape.hidden_size**-0.5),
        parameters=parameters,
    )


def qwen3_config(shape: Shape) -> Any:
    """transformers' Qwen3Config as the trainers expect it: their extra fields included, attention by SDPA."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    taps = list(range(1, 2 * shape.num_taps, 2))
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=2 * shape.row_length,
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * shape.num_layers,
    )
    config.num_target_layers = 2 * shape.num_taps + 1
    config.block_size = shape.block_size
    config.dflash_config = {"target_layer_ids": taps, "mask_token_id": shape.mask_token_id}
    config._attn_implementation = "sdpa"
    return config


def frozen_embedding(embed: Tensor) -> torch.nn.Embedding:
    """An embedding module over the given (V, D) tensor, without a copy."""
    return torch.nn.Embedding.from_pretrained(embed, freeze=True)


def frozen_head(embed: Tensor) -> torch.nn.Linear:
    """A bias-free linear module over the given (V, D) tensor, without a copy."""
    with torch.device("meta"):
        head = torch.nn.Linear(embed.shape[1], embed.shape[0], bias=False)
    head.weight = torch.nn.Parameter(embed, requires_grad=False)
    return head
