"""Released drafters as others write them: settings in either place, shards, prefixes; the rest is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_graph.released import is_released, read_released
from dflash_graph.serving_layouts import Layout, ServedTarget, write_servable
from tests.toys import FULL, SLIDING, random_tensors, toy_spec

TARGET = ServedTarget(max_position_embeddings=4096, name="Qwen/Qwen3-8B")


def _released(folder: Path, layout: Layout = "hf", **changes: Any) -> dict[str, Any]:
    """Write one, and return its settings."""
    spec = toy_spec(**changes)
    write_servable(folder, spec, random_tensors(spec), TARGET, layout=layout)
    return dict(json.loads((folder / "config.json").read_text()))


def _put(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("place", ["top", "inner"])
def test_settings_may_stand_in_either_place(tmp_path: Path, place: str) -> None:
    """Old writers put them at the top level, new ones into dflash_config; rope has two styles, too."""
    folder = tmp_path / "out"
    settings = _released(folder)
    inner = settings.pop("dflash_config")
    for name in ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids", "max_trained_length"):
        settings.pop(name, None)
    settings.pop("rope_theta" if place == "inner" else "rope_parameters")
    _put(folder, {**settings, "dflash_config": inner} if place == "inner" else {**settings, **inner})
    assert read_released(folder).spec == toy_spec()


def test_what_a_folder_does_not_say_is_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = _released(folder)
    for where in (settings, settings["dflash_config"]):
        for name in ("num_target_layers", "max_trained_length"):
            where.pop(name, None)
    _put(folder, settings)
    found = read_released(folder)
    assert found.unknown == {"num_target_layers", "max_trained_length", "target_path", "gguf_file"}
    assert (found.spec.num_target_layers, found.spec.max_trained_length) == (4, 4096)


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids", "hidden_size", "rms_norm_eps"])
def test_what_could_only_be_guessed_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    settings = _released(folder)
    for where in (settings, settings["dflash_config"]):
        where.pop(name, None)
    _put(folder, settings)
    with pytest.raises(ValueError, match=f"config.json must say {name}"):
        read_released(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 8), ("mask_token_id", 3), ("target_layer_ids", [0, 3]), ("num_target_layers", 9)]
)
def test_two_answers_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    folder = tmp_path / "out"
    settings = _released(folder)
    _put(folder, {**settings, name: value})
    with pytest.raises(ValueError, match=f"{name} has several values"):
        read_released(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' has no counterpart"),
        ({"attention_bias": True}, "attention_bias=True has no counterpart"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale"),
        ({"projector_type": "domino"}, "projector_type='domino'"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling must be a plain rotary embedding"),
        ({"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}, "rope_parameters must be a plain"),
        ({"rope_theta": 7.0}, "rope_theta must have one value"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta must have one value"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures must name one of DFlashDraftModel"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type must be 'dflash'"),
        ({"target_hidden_size": 32}, "target_hidden_size must be hidden_size = 16"),
        ({"layer_types": [FULL]}, "layer_types must be 2 of"),
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types must be 2 of"),
        ({"layer_types": [FULL, SLIDING]}, "need sliding_window"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"must be target_layer_ids \+ 1"),
        ({"draft_vocab_size": 9}, "draft_vocab_size=9 needs a tensor d2t"),
        ({"intermediate_size": 24}, r"gate_proj.weight must have shape \(24, 16\); found \(20, 16\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, "missing layers.2"),
        ({"mask_token_id": 23, "dflash_config": None, "target_layer_ids": [1, 3]}, "mask_token_id must be a row"),
    ],
)
def test_what_we_would_compute_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tmp_path / "out"
    _put(folder, {**_released(folder), **changes})
    with pytest.raises(ValueError, match=message) as raised:
        read_released(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_without_a_word_on_causality_the_kind_of_layer_decides(tmp_path: Path, layout: Layout) -> None:
    for kinds, causal in (((FULL, FULL), False), ((SLIDING, SLIDING), True), ((SLIDING, FULL), None)):
        folder = tmp_path / "-".join(kinds)
        window = 7 if SLIDING in kinds else None
        settings = _released(folder, layout, layer_types=kinds, sliding_window=window)
        for where in (settings, settings.get("dflash_config", {}), settings.get("transformer_layer_config", {})):
            for name in ("is_causal", "causal", "sliding_window_non_causal"):
                where.pop(name, None)
        _put(folder, settings)
        if causal is None:
            with pytest.raises(ValueError, match="is_causal is not set and layer_types mixes kinds"):
                read_released(folder)
        else:
            assert read_released(folder).spec.causal is causal


def test_a_window_beside_full_layers_means_nothing(tmp_path: Path) -> None:
    _put(tmp_path / "out", {**_released(tmp_path / "out"), "sliding_window": 4096})
    assert read_released(tmp_path / "out").spec.sliding_window is None


def test_shards_prefixes_and_borrowed_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _released(folder)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(stored):
        file = f"model-0000{i % 2}-of-00002.safetensors"
        weight_map[f"model.{name}"] = file
    weight_map["embed_tokens.weight"] = "model-00000-of-00002.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in stored.items()} | {"embed_tokens.weight": torch.ones(23, 16)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_released(folder)
    assert found.tensors.keys() == stored.keys()
    assert all(torch.equal(found.tensors[name], tensor.float()) for name, tensor in stored.items())
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="whole or in shards with an index"):
        read_released(folder)


@pytest.mark.parametrize(
    "name", ["layers.0.attention_conv.base_kernel", "layers.0.self_attn.q_proj.bias", "mask_embedding"]
)
def test_tensors_without_a_counterpart_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    _released(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, name: torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing none, without a counterpart {name}"):
        read_released(folder)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _released(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"its weights must be model\.safetensors"):
        read_released(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"must have a readable config\.json"):
        read_released(folder)
    with pytest.raises(ValueError, match=r"must have a readable config\.json"):
        read_released(tmp_path / "nowhere")


def test_a_released_drafter_is_told_from_other_folders(tmp_path: Path) -> None:
    for layout in ("hf", "speculators"):
        _released(tmp_path / layout, layout)
        assert is_released(tmp_path / layout)
    assert not is_released(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert not is_released(tmp_path)
