"""The frozen target: what its config says, and the hidden states at its taps.

Owns loading (Hugging Face checkpoints and GGUF files), the truncation after the deepest tap, and the forward hooks
that copy each tap straight into a static output buffer. Where a loss needs the target's own distribution, no layer is
dropped and the rows that its head will read are gathered, too. It never builds an attention mask, never runs lm_head on
a job, and never trains: rows are right-padded, and under causal attention padding on the right cannot reach a real
token.
Called by the target workers (`Target`), by the set-up of a run (`read_facts`, the tap rules) and by evaluation
(`load_full_model`). Tap id k is the output of decoder layer k (0-based), for the last layer before the final norm.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dflash_graph.attention import causal_attention
from dflash_graph.config import TargetConfig

# Name under which `causal_attention` is registered. Transformers takes any name that contains "flash" for a flash
# attention package and looks for it on the hub, so the package's own name cannot be used.
_ATTENTION = "static_causal"
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "linear_attention"})
_FINAL_NORMS = ("norm", "final_layernorm", "final_norm")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a target that the drafter and the buffers need, read from its config alone.

    Attributes:
        vocab_size: rows of the head (and of the embedding).
        rope_theta: base of the rotary embedding; of the full-attention layers where kinds differ. A scaled rotary
            embedding of the target is not carried over: the drafter's own is always plain.
        tied: the head is the embedding.
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
    max_position_embeddings: int
    model_type: str
    tied: bool


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a configured name; "auto" is float32 on the CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _source(config: TargetConfig) -> dict[str, Any]:
    """Keyword arguments that select the checkpoint in every `from_pretrained` call."""
    chosen: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.gguf_file is not None:
        chosen["gguf_file"] = config.gguf_file
    return chosen


def read_facts(config: TargetConfig) -> ModelFacts:
    """Read a target's sizes from its config, flat or nested, without loading weights.

    Raises:
        ValueError: the target has a trait that a drafter cannot represent or that this engine does not run yet; the
            message names it.
    """
    try:
        text = AutoConfig.from_pretrained(config.path, **_source(config)).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        gguf = f" (target.gguf_file {config.gguf_file!r})" if config.gguf_file else ""
        raise ValueError(f"target.path {config.path!r}{gguf} must be a readable model folder or id: {error}") from None
    traits = _unsupported_traits(text)
    if traits:
        raise ValueError(
            f"a drafter needs a plain causal decoder with rotary embeddings; target {config.path!r} (model type "
            f"{text.model_type!r}) has {'; '.join(traits)}. Choose another target"
        )
    heads = int(text.num_attention_heads)
    eps = next((getattr(text, n) for n in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if hasattr(text, n)), 1e-6)
    return ModelFacts(
        hidden_size=int(text.hidden_size),
        num_hidden_layers=int(text.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        intermediate_size=int(text.intermediate_size),
        rms_norm_eps=float(eps),
        rope_theta=float(_ropes(text)[0]["rope_theta"]),
        vocab_size=int(text.vocab_size),
        max_position_embeddings=int(text.max_position_embeddings),
        model_type=str(text.model_type),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
    )


def weights_digest(config: TargetConfig) -> str | None:
    """What tells a local target's weight files from others: names, sizes, first and last MiB. None for a hub id."""
    folder = Path(config.path)
    if not folder.is_dir():
        return None
    patterns = (config.gguf_file,) if config.gguf_file else ("*.safetensors", "*.bin")
    sha = hashlib.sha256()
    for path in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        size = path.stat().st_size
        sha.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            sha.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            sha.update(file.read())
    return sha.hexdigest()


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Rotary parameters of a text config: one dict, or one per layer kind with the full-attention layers' first."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" in parameters:
        return [parameters]
    kinds = sorted(parameters, key=lambda kind: kind != "full_attention")
    return [p for p in (parameters[kind] for kind in kinds) if isinstance(p, dict) and "rope_theta" in p]


def _unsupported_traits(text: Any) -> list[str]:
    """What keeps a text config from being a target, in words; empty when nothing does."""

    def differs(name: str, *neutral: object) -> bool:
        value = getattr(text, name, None)
        return value is not None and value not in neutral

    found = []
    ropes = _ropes(text)
    if not ropes:
        found.append("no rotary embedding")
    if any((rope.get("partial_rotary_factor") or 1.0) != 1.0 for rope in ropes):
        found.append("a partial rotary embedding (partial_rotary_factor below 1)")
    scale = [n for n in ("embedding_multiplier", "scale_emb", "embed_scale") if differs(n, 1, 1.0)]
    if scale or differs("scale_embedding", False) or "gemma" in str(text.model_type):
        found.append(f"an embedding scale ({scale[0] if scale else 'built into this model type'})")
    if differs("final_logit_softcapping", 0, 0.0):
        found.append("a soft-cap on its final logits (final_logit_softcapping)")
    if differs("kv_lora_rank"):
        found.append("multi-head latent attention (kv_lora_rank)")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS)
    if kinds:
        found.append(f"layers of kind {', '.join(kinds)} (known: {', '.join(sorted(_LAYER_KINDS))})")
    if getattr(text, "is_encoder_decoder", False):
        found.append("an encoder")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        found.append("bidirectional attention")
    return found


def default_target_layer_ids(num_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Taps by the family's rule: the middle layer for one draft layer, else evenly from layer 1 to layer n - 3.

    Raises:
        ValueError: the rule collides on a shallow target.
    """
    if draft_layers == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))
    if any(a >= b for a, b in pairwise(ids)):
        smallest = list(range(min(draft_layers, num_layers)))
        raise ValueError(
            f"the default taps of {draft_layers} draft layers on a target of {num_layers} layers collide: {list(ids)}. "
            f"Set drafter.target_layer_ids, for instance to the smallest valid list {smallest}"
        )
    return ids


def check_target_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the taps as a tuple after checking them.

    Raises:
        TypeError: an id is not an int.
        ValueError: there is none, they are not strictly ascending, or one is outside 0..num_layers-1.
    """
    for tap in ids:
        if isinstance(tap, bool) or not isinstance(tap, int):
            raise TypeError(f"target_layer_ids must be integers; found {tap!r} of type {type(tap).__name__}")
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"target_layer_ids must be a non-empty, strictly ascending list; found {list(ids)}")
    if ids[0] < 0 or ids[-1] >= num_layers:
        raise ValueError(
            f"target_layer_ids must lie in 0..{num_layers - 1} (id k is the output of decoder layer k); found "
            f"{list(ids)}"
        )
    return tuple(ids)


def _load(config: TargetConfig, devices: Sequence[torch.device], dtype: torch.dtype, attention: str) -> Any:
    """The whole causal LM on one device, or placed over several by transformers."""
    spread: dict[str, Any] = {}
    if len(devices) > 1:
        room = {device.index: torch.cuda.mem_get_info(device)[0] * 9 // 10 for device in devices}
        spread = {"device_map": "auto", "max_memory": room}
    model, info = AutoModelForCausalLM.from_pretrained(
        config.path, dtype=dtype, attn_implementation=attention, output_loading_info=True, **_source(config), **spread
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"target.path {config.path!r} must hold every weight of its model; it lacks {', '.join(missing)}, which "
            "transformers fills with random numbers. Use the checkpoint of the whole causal LM: the drafter needs its "
            "lm_head whatever the loss is, loss.kl_weight and loss.labels=target its distribution, too"
        )
    if len(devices) == 1:
        return model.to(devices[0]).eval().requires_grad_(False)
    elsewhere = sorted({str(place) for place in model.hf_device_map.values()} & {"cpu", "disk", "meta"})
    if elsewhere:
        raise ValueError(
            f"target.path {config.path!r} must fit into {', '.join(map(str, devices))}; parts of it would lie on "
            f"{', '.join(elsewhere)}. Name more devices in devices.target_devices, or lower target.dtype"
        )
    return model.eval().requires_grad_(False)


def load_full_model(config: TargetConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole causal LM, frozen, with transformers' own attention: for evaluation with a key/value cache."""
    return _load(config, (device,), dtype, "sdpa")


class Target:
    """A frozen decoder up to its deepest tap, writing its taps into one static buffer.

    Args:
        target_layer_ids: N taps, checked against the target's depth.
        output: (T, N*D) static buffer on `device`; tap i fills columns i*D .. (i+1)*D. Its dtype may differ from the
            target's.
        keep_layers: so many decoder layers' weights are kept on the CPU for the drafter's start.
        teacher_hidden: (U, D) static buffer on `device` of the target's dtype: if given, no layer is dropped, and
            `forward` fills it with what lm_head would read at the positions it is told.
        spread: devices over which the layers are placed, `device` first; empty is `device` alone.

    Attributes:
        embed_weight, head_weight: (V, D) frozen; the same tensor when the target ties them.
        facts: the target's sizes.
        kept_layers: state dicts, float32 on the CPU, of the `keep_layers` layers that follow the deepest tap, or of the
            target's last ones where fewer follow.

    Raises:
        ValueError: the target is refused by `read_facts`, its weights or modules are not where they are expected, a
            buffer has the wrong shape, or, with `teacher_hidden`, its logits are not lm_head(final norm(last layer)).
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        target_layer_ids: Sequence[int],
        output: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        keep_layers: int = 0,
        teacher_hidden: Tensor | None = None,
        spread: Sequence[torch.device] = (),
    ) -> None:
        self.facts = read_facts(config)
        self.target_layer_ids = check_target_layer_ids(target_layer_ids, self.facts.num_hidden_layers)
        width = len(self.target_layer_ids) * self.facts.hidden_size
        if output.dim() != 2 or output.shape[1] != width:
            raise ValueError(f"output must have shape (T, {width}) for taps {target_layer_ids}; found {output.shape}")
        if teacher_hidden is not None and (
            teacher_hidden.dim() != 2 or teacher_hidden.shape[1] != self.facts.hidden_size
        ):
            raise ValueError(
                f"teacher_hidden must have shape (U, {self.facts.hidden_size}); found {tuple(teacher_hidden.shape)}"
            )
        self.output, self.teacher_hidden = output, teacher_hidden
        AttentionInterface.register(_ATTENTION, causal_attention)
        model = _load(config, spread or (device,), dtype, _ATTENTION)
        self.embed_weight: Tensor = model.get_input_embeddings().weight.detach().to(device)
        self.head_weight: Tensor = self._head_weight(model)
        self.decoder: Any = model.get_decoder()
        self.kept_layers = self._keep(keep_layers)
        self._positions = torch.arange(output.shape[0], device=device)
        self._num_positions = 0  # positions of the forward that runs; read by the hooks
        probe = None if teacher_hidden is None else self._probe(model)
        self.final_norm = self._truncate()
        if probe is not None:
            self._check_head(*probe)
        for i, tap in enumerate(self.target_layer_ids):
            self.decoder.layers[tap].register_forward_hook(self._copy_hook(i))

    def _head_weight(self, model: Any) -> Tensor:
        head = model.get_output_embeddings()
        if (
            not isinstance(head, nn.Linear)
            or getattr(head, "bias", None) is not None
            or head.weight.shape != self.embed_weight.shape
        ):
            raise ValueError(
                "lm_head must be a linear layer without bias of the embedding's shape "
                f"{tuple(self.embed_weight.shape)}; found {head}. Choose another target"
            )
        return head.weight.detach().to(self.embed_weight.device)

    def _keep(self, count: int) -> list[dict[str, Tensor]]:
        layers = self.decoder.layers
        first = max(0, min(self.target_layer_ids[-1] + 1, len(layers) - count))
        return [
            {name: value.detach().float().cpu().clone() for name, value in layer.state_dict().items()}
            for layer in layers[first : first + count]
        ]

    def _truncate(self) -> Any:
        """Drop the layers after the deepest tap and the final norm, which is returned (None if it was not found).

        lm_head went with the causal LM around the decoder. With a teacher all layers stay; the norm is taken out all
        the same, so that it runs on the gathered rows only and taps stay before it.
        """
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != self.facts.num_hidden_layers:
            raise ValueError(
                f"{type(self.decoder).__name__} must hold its {self.facts.num_hidden_layers} decoder layers in a "
                "ModuleList named 'layers'. Choose another target"
            )
        if self.teacher_hidden is None:
            self.decoder.layers = layers[: self.target_layer_ids[-1] + 1]
        final_norm = None
        for name in _FINAL_NORMS:
            if isinstance(norm := getattr(self.decoder, name, None), nn.Module):
                final_norm = norm
                setattr(self.decoder, name, nn.Identity())
        return final_norm

    @torch.no_grad()
    def _probe(self, model: Any) -> tuple[Tensor, Tensor]:
        """A short random row (1, n) and the logits (n, V) that the whole causal LM has for it."""
        length = min(16, self.output.shape[0])
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.facts.vocab_size, (1, length), generator=generator).to(self.embed_weight.device)
        return ids, model(input_ids=ids, use_cache=False).logits[0]

    @torch.no_grad()
    def _check_head(self, ids: Tensor, logits: Tensor) -> None:
        """Compare the head on gathered rows, as the teacher runs it, with the causal LM's own logits."""
        logits = logits.to(self.head_weight.device)
        found = torch.zeros_like(logits)
        if self.final_norm is not None:
            found = F.linear(self.final_norm(self._run(ids)[0]).to(logits.device), self.head_weight)
        error = float(((found.float() - logits.float()).norm(dim=-1) / logits.float().norm(dim=-1)).max())
        limit = 1e-4 if self.embed_weight.dtype == torch.float32 else 5e-2
        if not error <= limit:
            raise ValueError(
                "loss.kl_weight and loss.labels=target need a target whose logits are lm_head(final norm(last layer)); "
                f"those of {type(self.decoder).__name__} differ by {error:.2e} (relative; at most {limit:g} is "
                "allowed): it scales or caps them, or its final norm has another place. Set loss.kl_weight=0 and "
                "loss.labels=data, or choose another target"
            )

    def _copy_hook(self, i: int) -> Any:
        d = self.facts.hidden_size

        def copy_tap(module: nn.Module, args: Any, result: Any) -> None:
            hidden = result if isinstance(result, Tensor) else result[0]  # (rows, L, D)
            n = self._num_positions
            self.output[:n, i * d : (i + 1) * d].copy_(hidden.reshape(n, d))

        return copy_tap

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, num_rows: int, row_length: int, teacher_positions: Tensor | None = None
    ) -> None:
        """Run one job: row r lies at positions r*L .. r*L + L - 1; the taps land in `output` at the same positions.

        The whole bucket shape (T // L, L) is run whatever `num_rows` is, so that shapes are fixed; the tail beyond
        T // L rows is left as it is in `output`. On the CPU, rows from `num_rows` on are skipped as an economy and
        left as they are too.

        Args:
            token_ids: (T,) int64 on the target's device; padding holds any valid id.
            teacher_positions: (U,) int64 flat positions on live rows, there too; their final-norm hidden rows land in
                `teacher_hidden`.

        Raises:
            ValueError: T differs from the output buffer's, or the rows do not fit it.
        """
        capacity = token_ids.shape[0] // row_length
        if token_ids.shape[0] != self.output.shape[0] or not 1 <= num_rows <= capacity:
            raise ValueError(
                f"token_ids must have the output buffer's {self.output.shape[0]} positions and hold 1..{capacity} rows "
                f"of {row_length}; found {token_ids.shape[0]} positions and {num_rows} rows"
            )
        rows = num_rows if token_ids.device.type == "cpu" else capacity
        self._num_positions = rows * row_length
        hidden = self._run(token_ids[: self._num_positions].view(rows, row_length))
        if teacher_positions is not None:
            assert self.final_norm is not None
            assert self.teacher_hidden is not None
            hidden = hidden.reshape(-1, hidden.shape[-1]).to(self.teacher_hidden.device)
            torch.index_select(hidden, 0, teacher_positions, out=self.teacher_hidden)
            self.teacher_hidden.copy_(self.final_norm(self.teacher_hidden))

    def _run(self, token_ids: Tensor) -> Tensor:  # (rows, L) -> (rows, L, D)
        """Output of the last layer that was kept."""
        positions = self._positions[: token_ids.shape[1]].expand(token_ids.shape)
        result = self.decoder(input_ids=token_ids, attention_mask=None, position_ids=positions, use_cache=False)
        hidden: Tensor = result.last_hidden_state
        return hidden

    @torch.no_grad()
    def check_attention(self, *, seed: int = 0, tolerance: float | None = None) -> None:
        """Compare this engine's attention with transformers' eager one, layer by layer, on one short random row.

        The row is longer than the sliding window, if there is one and T allows (a window that no row can exceed does
        not matter). Every layer gets the same input in both runs, so that errors do not add up along the depth.
        Overwrites `output`.

        Args:
            tolerance: largest ||a - b|| / ||a|| of a position; None is 1e-4 in float32 and 5e-2 in 16 bits.

        Raises:
            ValueError: a tap is constant or not finite, a layer differs (named), or the decoder changes the embeddings
                before its first layer.
        """
        window = max((getattr(m, "sliding_window", None) or 0 for m in self._attentions()), default=0)
        window = max(window, getattr(self.decoder.config, "sliding_window", None) or 0)
        length = min(self.output.shape[0], max(64, window + 32), self.facts.max_position_embeddings)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.facts.vocab_size, (1, length), generator=generator).to(self.embed_weight.device)
        self._num_positions = length
        inputs, ours = self._record(ids, None)
        self._check_taps(length)
        if not torch.equal(inputs[0], F.embedding(ids, self.embed_weight)):
            raise ValueError(
                f"{type(self.decoder).__name__} changes its embeddings before the first layer (a scale or position "
                "embedding), which a drafter cannot represent. Choose another target"
            )
        self.decoder.set_attn_implementation("eager")
        try:
            _, eager = self._record(ids, inputs)
        finally:
            self.decoder.set_attn_implementation(_ATTENTION)
        limit = tolerance or (1e-4 if self.embed_weight.dtype == torch.float32 else 5e-2)
        for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
            error = ((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp_min(1e-30)).max().item()
            if not error <= limit:
                raise ValueError(
                    f"attention of decoder layer {i} ({type(self.decoder.layers[i]).__name__}) differs from "
                    f"transformers' eager attention by {error:.2e} (relative, worst of {length} positions); at most "
                    f"{limit:g} is allowed. This target needs an attention that the engine does not implement"
                )

    def _check_taps(self, length: int) -> None:
        """Refuse taps that carry nothing: a drafter would train on them without complaint."""
        d = self.facts.hidden_size
        for i, tap in enumerate(self.target_layer_ids):
            hidden = self.output[:length, i * d : (i + 1) * d].float()
            if not bool(torch.isfinite(hidden).all()):
                fault = "hold non-finite values"
            elif float((hidden - hidden[0]).abs().max()) == 0:
                fault = "are the same at every position"
            else:
                continue
            raise ValueError(
                f"the hidden states of tap {tap} must differ between positions and be finite; on a random row they "
                f"{fault}. The target's weights are missing or damaged, or target.dtype overflows"
            )

    def _attentions(self) -> list[nn.Module]:
        """Per layer, the module whose output is compared: its `self_attn`, or the layer itself."""
        return [getattr(layer, "self_attn", layer) for layer in self.decoder.layers]

    def _record(self, ids: Tensor, inputs: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        """Run one row; return each layer's input and attention output. `inputs`, if given, replace the layers' own."""
        seen: list[Tensor] = []
        outputs: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if inputs is not None:
                hidden = inputs[len(seen)]
            seen.append(hidden.clone())
            return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

        def after(module: nn.Module, args: Any, result: Any) -> None:
            outputs.append((result if isinstance(result, Tensor) else result[0]).clone())

        handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in self.decoder.layers]
        handles += [module.register_forward_hook(after) for module in self._attentions()]
        try:
            self._run(ids)
        finally:
            for handle in handles:
                handle.remove()
        return seen, outputs
