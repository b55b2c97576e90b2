"""Reads a released drafter of either layout (`serving_layouts.py`), ours or anybody's, into our names and sizes.

Whatever would make the drafter compute something else than ours does (a scaled rotary embedding, biases, convolutions,
other names) is refused by name, as are settings that contradict each other. Called by `initialise.py`, by `export.py`
to check what it wrote, and by whoever evaluates an exported folder; no other module reads these files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_graph.drafter import DrafterSpec
from dflash_graph.serving_layouts import SETTINGS, SLIDING, WEIGHTS, Layout

# Borrowed from the target, or only of use to their trainer.
_BORROWED = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d"}
)
# Settings with one value that our forward pass has; absent means that value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "logit_scale": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "pure_draft_prefix_len": (0,),
    "use_swa": (False,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash",),
    "quantization_config": (),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Released:
    """A released drafter.

    Attributes:
        spec: with a stand-in for each setting in `unknown`.
        tensors: float32 on the CPU, by our names: exactly those of `spec.parameter_shapes()`.
        draft_vocab_ids: (V,) full ids of a reduced head in head order, or None.
        unknown: names of the spec that the folder does not say.
    """

    path: Path
    layout: Layout
    spec: DrafterSpec
    tensors: dict[str, Tensor]
    draft_vocab_ids: Tensor | None
    unknown: frozenset[str]


def is_released(folder: str | Path) -> bool:
    """Whether a folder looks like a released drafter: it has a config.json that names one."""
    path = Path(folder) / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and (
        "dflash_config" in settings
        or settings.get("speculators_model_type") is not None
        or "DFlashDraftModel" in (settings.get("architectures") or [])
    )


def read_released(folder: str | Path) -> Released:
    """Read a released drafter.

    Raises:
        ValueError: the folder is not whole, contradicts itself, or holds a drafter that this engine does not have;
            the message names the file and what is wrong.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError) as error:
        raise ValueError(f"a released drafter must have a readable {SETTINGS}; {folder}: {error}") from None
    try:
        reader = _Settings(settings)
        spec = reader.spec()
        tensors, ids = _split(spec, _read_tensors(folder))
    except ValueError as error:
        raise ValueError(f"{folder} is no drafter that this engine can read: {error}") from None
    return Released(
        path=folder,
        layout=reader.layout,
        spec=spec,
        tensors=tensors,
        draft_vocab_ids=ids,
        unknown=frozenset(reader.unknown),
    )


class _Settings:
    """One config.json: finds each setting wherever a writer may have put it, and refuses two answers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        kind = settings.get("speculators_model_type")
        if kind not in (None, "dflash"):
            raise ValueError(f"speculators_model_type must be 'dflash'; found {kind!r}")
        self.layout: Layout = "hf" if kind is None else "speculators"
        self.top = settings
        self.inner = settings.get("dflash_config") or {}
        self.layers = settings if kind is None else settings.get("transformer_layer_config") or {}
        self.unknown: set[str] = set()
        names = settings.get("architectures") or []
        known = ("DFlashDraftModel", "DFlashSpeculator")
        if names and not any(name in known for name in names):
            raise ValueError(f"architectures must name one of {', '.join(known)}; found {names}")

    def find(self, name: str, *names: str) -> Any:
        """The setting's value or None; `names` are other names of it."""
        places = [(where, other) for other in (name, *names) for where in (self.inner, self.top, self.layers)]
        values = [where[other] for where, other in places if where.get(other) is not None]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} has several values: {' and '.join(sorted({str(value) for value in values}))}")
        return values[0] if values else None

    def need(self, name: str) -> Any:
        value = self.find(name)
        if value is None:
            raise ValueError(f"{SETTINGS} must say {name}, which a reader can only guess; add it")
        return value

    def or_unknown(self, name: str, value: Any) -> Any:
        found = self.find(name)
        if found is None:
            self.unknown.add(name)
            return value
        return found

    def spec(self) -> DrafterSpec:
        for name, allowed in _NEUTRAL.items():
            if (found := self.find(name)) is not None and found not in allowed:
                raise ValueError(f"{name}={found!r} has no counterpart here; {name} must be {allowed or 'absent'}")
        heads, hidden = int(self.need("num_attention_heads")), int(self.need("hidden_size"))
        if (size := self.find("target_hidden_size")) not in (None, hidden):
            raise ValueError(f"target_hidden_size must be hidden_size = {hidden}; found {size}")
        types = self._layer_types()
        vocab, draft_vocab = int(self.need("vocab_size")), self.find("draft_vocab_size")
        taps = self._taps()
        verifier = (self.top.get("speculators_config") or {}).get("verifier") or {}
        self.unknown |= {"gguf_file"} | (set() if verifier.get("name_or_path") else {"target_path"})
        return DrafterSpec(
            hidden_size=hidden,
            num_hidden_layers=len(types),
            num_attention_heads=heads,
            num_key_value_heads=int(self.find("num_key_value_heads") or heads),
            head_dim=int(self.find("head_dim") or hidden // heads),
            intermediate_size=int(self.need("intermediate_size")),
            rms_norm_eps=float(self.need("rms_norm_eps")),
            rope_theta=self._rope_theta(),
            vocab_size=vocab,
            block_size=int(self.need("block_size")),
            target_layer_ids=taps,
            num_target_layers=int(self.or_unknown("num_target_layers", max(taps) + 1)),
            mask_token_id=int(self.need("mask_token_id")),
            layer_types=types,
            sliding_window=self._window(types),
            causal=self._causal(types),
            draft_vocab_size=None if draft_vocab in (None, vocab) else int(draft_vocab),
            max_trained_length=int(self.or_unknown("max_trained_length", self.find("max_position_embeddings") or 0)),
            target_path=str(verifier.get("name_or_path") or ""),
            gguf_file=None,
        )

    def _taps(self) -> tuple[int, ...]:
        """In our numbering: id k is the output of layer k."""
        if self.layout == "speculators":
            return tuple(int(k) - 1 for k in self.need("aux_hidden_state_layer_ids"))
        taps = tuple(int(k) for k in self.need("target_layer_ids"))
        shifted = self.find("eagle_aux_hidden_state_layer_ids")
        if shifted is not None and tuple(k - 1 for k in shifted) != taps:
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must be target_layer_ids + 1; found {shifted}, {taps}")
        return taps

    def _layer_types(self) -> tuple[str, ...]:
        count, types = int(self.need("num_hidden_layers")), self.find("layer_types")
        types = ("full_attention",) * count if types is None else tuple(types)
        if len(types) != count or set(types) - {"full_attention", SLIDING}:
            raise ValueError(f"layer_types must be {count} of full_attention and {SLIDING}; found {list(types)}")
        return types

    def _window(self, types: tuple[str, ...]) -> int | None:
        if SLIDING not in types:
            return None  # some writers leave the target's window beside layers that do not slide
        window = self.find("swa_window_size", "sliding_window")
        if window is None:
            raise ValueError(f"{SLIDING} layers need sliding_window; {SETTINGS} has none")
        return int(window)

    def _causal(self, types: tuple[str, ...]) -> bool:
        """As vLLM and z-lab's package resolve it: sliding layers are causal, full ones not, unless told otherwise."""
        said = self.find("is_causal", "causal")
        if said is not None:
            return bool(said)
        sliding = SLIDING in types
        if self.layout == "speculators":
            sliding = sliding and not self.find("sliding_window_non_causal")
        if sliding and "full_attention" in types:
            raise ValueError(
                "is_causal is not set and layer_types mixes kinds: its sliding layers are causal inside the block and "
                "its full ones are not; here all layers of a drafter are alike (drafter.causal)"
            )
        return sliding

    def _rope_theta(self) -> float:
        values = []
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.layers.get(name) or {}
            kind = rope.get("rope_type", rope.get("type", "default"))
            scaled = {"factor", "partial_rotary_factor", "mrope_section"} & {k for k, v in rope.items() if v != 1.0}
            if kind != "default" or scaled:
                raise ValueError(f"{name} must be a plain rotary embedding; found {dict(rope)}")
            if rope.get("rope_theta") is not None:
                values.append(float(rope["rope_theta"]))
        if self.layers.get("rope_theta") is not None:
            values.append(float(self.layers["rope_theta"]))
        if not values or len(set(values)) > 1:
            raise ValueError(f"rope_theta must have one value, at the top level or in rope_parameters; found {values}")
        return values[0]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / f"{WEIGHTS}.index.json"
    try:
        names = {WEIGHTS}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"its weights must be {WEIGHTS}, whole or in shards with an index: {error}") from None
    return tensors


def _split(spec: DrafterSpec, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """(the drafter's tensors, ids of its reduced head); every stored tensor is known or refused."""
    found = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    shapes = spec.parameter_shapes()
    missing, unknown = shapes.keys() - found.keys(), found.keys() - shapes.keys() - _BORROWED - {"d2t"}
    if missing or unknown:
        raise ValueError(
            f"{WEIGHTS} must hold this drafter's tensors; missing {_short(missing)}, without a counterpart "
            f"{_short(unknown)}"
        )
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}; found {tuple(found[name].shape)}")
    tensors = {name: found[name].to(torch.float32) for name in shapes}
    if spec.draft_vocab_size is None:
        return tensors, None
    if "d2t" not in found or found["d2t"].shape != (spec.draft_vocab_size,):
        raise ValueError(f"draft_vocab_size={spec.draft_vocab_size} needs a tensor d2t of as many offsets")
    ids = found["d2t"].to(torch.int64) + torch.arange(spec.draft_vocab_size)
    if not bool(((ids >= 0) & (ids < spec.vocab_size)).all()):
        raise ValueError(f"d2t must point into the vocabulary, 0..{spec.vocab_size - 1}")
    return tensors, ids


def _short(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "") or "none"
