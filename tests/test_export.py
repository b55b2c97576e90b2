"""Exported folders: what each loader requires of them, what is checked before they are written, how they are served.

vLLM and SGLang are not installed here. What their loaders read is written out below as they read it, with repository,
commit and file; `tests/peers` runs the packages that are.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_graph.checkpoint import find_latest
from dflash_graph.config import TargetConfig, load_config, save_config
from dflash_graph.drafter import DrafterSpec
from dflash_graph.export import export
from dflash_graph.export_command import add_export_arguments, run_export
from dflash_graph.plan import make_plan
from dflash_graph.released import read_released
from dflash_graph.serving_layouts import (
    Layout,
    ServedTarget,
    check_servable,
    differences,
    hf_settings,
    reduced_head,
    servable_tensors,
    speculators_settings,
    write_servable,
)
from dflash_graph.training import train
from tests.tiny import tiny_config
from tests.toys import FULL, SLIDING, random_tensors, toy_spec

TARGET = ServedTarget(max_position_embeddings=4096, name="Qwen/Qwen3-8B", architectures=("Qwen3ForCausalLM",))
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full causal": {"causal": True},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "sliding causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7, "causal": True},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 7},
    "mixed causal": {"layer_types": (FULL, SLIDING), "sliding_window": 7, "causal": True},
}


def _settings(spec: DrafterSpec, layout: Layout = "hf") -> dict[str, Any]:
    made = hf_settings(spec, TARGET) if layout == "hf" else speculators_settings(spec, TARGET)
    return dict(json.loads(json.dumps(made)))


# ---- vLLM -----------------------------------------------------------------------------------------------------------
# vllm-project/vllm, commit 036a00d1f5d0: vllm/model_executor/models/qwen3_dflash.py and
# vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py; update_dflash of
# vllm/transformers_utils/configs/speculators/algos.py (with `dflash_config.causal`) and
# vllm/transformers_utils/configs/speculators/base.py, commit 052316aeab2a, for the layout speculators.


def _as_vllm_reads_speculators(settings: dict[str, Any]) -> dict[str, Any]:
    """base.py extract_transformers_pre_trained_config, algos.py update_dflash."""
    assert settings["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert settings["speculators_config"]["verifier"]["name_or_path"]
    read = dict(settings["transformer_layer_config"])
    read["architectures"] = ["DFlashDraftModel"]
    read["draft_vocab_size"] = settings.get("draft_vocab_size")
    ids = settings["aux_hidden_state_layer_ids"]
    read["eagle_aux_hidden_state_layer_ids"] = ids
    read["dflash_config"] = {"mask_token_id": settings["mask_token_id"], "target_layer_ids": [i - 1 for i in ids]}
    read["dflash_config"]["causal"] = not settings.get("sliding_window_non_causal", True)
    return read


def _vllm_causal(read: dict[str, Any], layer: int) -> bool:
    """_dflash_layer_causal."""
    if read.get("is_causal") is not None:
        return bool(read["is_causal"])
    if (override := read["dflash_config"].get("causal")) is not None:
        return bool(override)
    return read["layer_types"][layer] == SLIDING


def _vllm_window(read: dict[str, Any], layer: int) -> int | None:
    """_resolve_layer_attention; the window counts from each position of the block."""
    if read["layer_types"][layer] != SLIDING:
        return None
    return int(read["dflash_config"].get("swa_window_size", read["sliding_window"]))


def _vllm_taps(read: dict[str, Any]) -> list[int]:
    """get_eagle3_aux_layers_from_config: id i is the input of layer i."""
    return read.get("eagle_aux_hidden_state_layer_ids") or [i + 1 for i in read["dflash_config"]["target_layer_ids"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["hf", "speculators"])
@pytest.mark.parametrize("knows_is_causal", [True, False])
def test_vllm_reads_the_drafter_that_was_trained(kind: str, layout: Layout, knows_is_causal: bool) -> None:
    spec = toy_spec(**KINDS[kind])
    read = _settings(spec, layout)
    if layout == "speculators":
        read = _as_vllm_reads_speculators(read)
    if not knows_is_causal:  # vLLM before that setting: dflash_config.causal decides
        del read["is_causal"]
    assert read["architectures"] == ["DFlashDraftModel"]  # the name it registers
    assert read["model_type"] == "qwen3"
    assert _vllm_taps(read) == [2, 4]  # the outputs of layers 1 and 3
    assert read["dflash_config"]["mask_token_id"] == spec.mask_token_id
    for layer, layer_type in enumerate(spec.layer_types):
        assert _vllm_causal(read, layer) == spec.causal
        assert _vllm_window(read, layer) == (7 if layer_type == SLIDING else None)
    # DFlashQwen3Attention, Qwen2MLP and the norms: what the layers are made from.
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        assert read[name] == getattr(spec, name)
    assert (read["rms_norm_eps"], read["vocab_size"], read["hidden_act"]) == (1e-5, 23, "silu")
    assert read["attention_bias"] is False
    assert read["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert read["max_position_embeddings"] == 4096


def test_vllm_gets_the_number_of_drafts_from_either_layout() -> None:
    proposal = _settings(toy_spec(), "speculators")["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 3  # K - 1: the anchor is no draft


def _vllm_parameters(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes that DFlashQwen3ForCausalLM has, apart from embedding and head, after its own fusing."""
    d, e, f = spec.hidden_size, spec.head_dim, spec.intermediate_size
    h, hk = spec.num_attention_heads, spec.num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {"model.fc.weight": (d, len(spec.target_layer_ids) * d)}
    for i in range(spec.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.qkv_proj.weight": ((h + 2 * hk) * e, d),
            f"{layer}.self_attn.o_proj.weight": (d, h * e),
            f"{layer}.self_attn.q_norm.weight": (e,),
            f"{layer}.self_attn.k_norm.weight": (e,),
            f"{layer}.mlp.gate_up_proj.weight": (2 * f, d),
            f"{layer}.mlp.down_proj.weight": (d, f),
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
        }
    return shapes | {"model.hidden_norm.weight": (d,), "model.norm.weight": (d,)}


def _fused(stored: dict[str, Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    """hf_to_vllm_mapper.orig_to_new_stacked, and SGLang's stacked_params_mapping: three into one, two into one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in stored.items():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                name = name.replace(f".{part}.", f".{whole}.")
        rows = shapes.get(f"{prefix}{name}", (0,))[0]
        shapes[f"{prefix}{name}"] = (rows + tensor.shape[0], *tensor.shape[1:])
    return shapes


def test_vllm_finds_every_weight_and_no_other(tmp_path: Path) -> None:
    """load_weights puts `model.` before all names but the head's; an unknown name would raise there."""
    spec = toy_spec()
    write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert _fused(stored, "model.") == _vllm_parameters(spec)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_vllm_gets_a_reduced_head_with_its_ids(tmp_path: Path) -> None:
    """load_weights: t2d is skipped, d2t is an offset of draft_vocab_size ids, lm_head has as many rows."""
    spec = toy_spec(draft_vocab_size=3)
    head_weight, ids = torch.randn(23, 16), torch.tensor([2, 5, 21])
    head = reduced_head(spec, ids, head_weight)
    write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET, layout="speculators", head=head)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    read = _as_vllm_reads_speculators(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert read["draft_vocab_size"] == 3
    assert (stored["d2t"] + torch.arange(3)).tolist() == [2, 5, 21]
    assert stored["t2d"].nonzero().flatten().tolist() == [2, 5, 21]
    assert torch.equal(stored["lm_head.weight"], head_weight[ids].to(torch.bfloat16))
    found = read_released(tmp_path / "out")
    assert found.draft_vocab_ids is not None
    assert found.draft_vocab_ids.tolist() == [2, 5, 21]
    for wrong in (torch.tensor([5, 2, 21]), torch.tensor([2, 5])):
        with pytest.raises(ValueError, match="3 ascending ids"):
            reduced_head(spec, wrong, head_weight)


# ---- SGLang ---------------------------------------------------------------------------------------------------------
# sgl-project/sglang: python/sglang/srt/models/dflash.py, commit 003b23d7388e, and
# python/sglang/srt/speculative/dflash_utils.py, commit 00731f0bc9fa.


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_reads_the_drafter_that_was_trained(kind: str) -> None:
    """parse_dflash_draft_config looks into `dflash_config` first, for the mask token there only."""
    spec = toy_spec(**KINDS[kind])
    read = _settings(spec)
    assert read["architectures"] == ["DFlashDraftModel"]  # EntryClass
    for place in (read["dflash_config"], read):
        assert (place["num_target_layers"], place["block_size"], place["target_layer_ids"]) == (5, 4, [1, 3])
        assert all(0 <= k < place["num_target_layers"] for k in place["target_layer_ids"])  # resolve_target_layer_ids
    mask = read["dflash_config"]["mask_token_id"]
    assert isinstance(mask, int)
    assert 0 <= mask < read["vocab_size"]
    assert read["hidden_act"] == "silu"  # DFlashMLP raises on any other
    assert read["rope_theta"] == 100.0  # get_rope_config of an old transformers
    assert read["rope_scaling"] is None
    # _get_dflash_layer_attention_params: a sliding layer is causal, a full one is not, whatever else is said.
    runs = [(layer_type, layer_type == SLIDING) for layer_type in read["layer_types"]]
    trained = [(layer_type, spec.causal) for layer_type in spec.layer_types]
    assert (runs != trained) == ("SGLang" in differences(spec, "hf"))
    if SLIDING in spec.layer_types:
        assert read["sliding_window"] - 1 == 6  # get_dflash_attention_sliding_window_size: positions to the left


def test_sglang_finds_every_weight(tmp_path: Path) -> None:
    """It drops unknown names in silence, and has our names but for the fused projections."""
    spec = toy_spec()
    write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET)
    expected = {name.removeprefix("model."): shape for name, shape in _vllm_parameters(spec).items()}
    assert _fused(load_file(tmp_path / "out" / "model.safetensors"), "") == expected


# ---- both places, both styles, read back ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_what_is_written_is_read_back(kind: str, layout: Layout, tmp_path: Path) -> None:
    spec = toy_spec(**KINDS[kind], target_path=TARGET.name)
    write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET, layout=layout)
    found = read_released(tmp_path / "out")
    assert found.layout == layout
    assert found.spec == (spec if layout == "speculators" else toy_spec(**KINDS[kind]))
    assert found.unknown == ({"gguf_file"} if layout == "speculators" else {"gguf_file", "target_path"})
    for name, tensor in servable_tensors(spec, random_tensors(spec)).items():
        assert torch.equal(found.tensors[name], tensor.float())


def test_a_served_folder_can_be_read_by_another_user(tmp_path: Path) -> None:
    spec = toy_spec()
    files = write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET, card="a card\n")
    assert sorted(path.name for path in files) == ["README.md", "config.json", "dflash.py", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in files)
    assert len({path.stat().st_mode for path in files}) == 1
    with pytest.raises(ValueError, match="exported into a new or an empty folder"):
        write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 5)}, r"layers of the target, 0\.\.4; found \[1, 5\]"),
        ({"target_layer_ids": ()}, r"layers of the target"),
        ({"layer_types": (SLIDING, FULL), "sliding_window": 3}, "at least block_size = 4 to be served as trained"),
        ({"layer_types": (SLIDING, FULL)}, "a sliding one goes with sliding_window"),
        ({"sliding_window": 9}, "a sliding one goes with sliding_window"),
    ],
)
def test_a_drafter_that_no_server_would_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    spec = toy_spec(**changes)
    with pytest.raises(ValueError, match=message):
        check_servable(spec)
    with pytest.raises(ValueError, match=message):
        write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET)
    assert not (tmp_path / "out").exists()


def test_a_mask_token_outside_the_exported_vocabulary_is_refused() -> None:
    spec = toy_spec()
    object.__setattr__(spec, "mask_token_id", 23)  # DrafterSpec refuses it, too
    with pytest.raises(ValueError, match=r"row of the exported vocabulary, 0\.\.22; found 23"):
        check_servable(spec)


def test_damaged_tensors_are_refused_by_name(tmp_path: Path) -> None:
    spec = toy_spec()
    tensors = random_tensors(spec)
    for change, message in (
        ({"norm.weight": torch.full((16,), float("nan"))}, r"norm\.weight must be finite"),
        ({"fc.weight": torch.zeros(16, 16)}, r"fc\.weight must have shape \(16, 32\); found \(16, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            write_servable(tmp_path / "out", spec, {**tensors, **change}, TARGET)
    del tensors["hidden_norm.weight"]
    with pytest.raises(ValueError, match=r"hidden_norm\.weight is missing"):
        write_servable(tmp_path / "out", spec, tensors, TARGET)
    assert not (tmp_path / "out").exists()


def test_a_reduced_head_belongs_to_one_layout(tmp_path: Path) -> None:
    spec = toy_spec(draft_vocab_size=3)
    with pytest.raises(ValueError, match="stored by the layout speculators"):
        write_servable(tmp_path / "out", spec, random_tensors(spec), TARGET, layout="speculators")


def test_differences_name_each_loader_that_runs_something_else() -> None:
    named = {kind: sorted(differences(toy_spec(**changes), "hf")) for kind, changes in KINDS.items()}
    assert named == {
        "full": [],
        "full causal": ["SGLang"],
        "sliding": ["SGLang"],
        "sliding causal": [],
        "mixed": ["SGLang"],
        "mixed causal": ["SGLang"],
    }
    named = {kind: sorted(differences(toy_spec(**changes), "speculators")) for kind, changes in KINDS.items()}
    assert named["full"] == ["SGLang"]
    assert all("speculators" in names for kind, names in named.items() if kind != "full")
    assert list(differences(toy_spec(target_layer_ids=(1, 4)), "hf")) == ["z-lab's dflash"]  # the last of 5 layers


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny_config(tiny, folder, "epochs=1"))
    return folder


def _copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_export_of_a_run(run: Path, tiny: Path, tmp_path: Path) -> None:
    result = export(run, output=tmp_path / "out")
    assert result.folder == tmp_path / "out"
    assert result.notes == ()
    assert not list(tmp_path.glob(".tmp-*"))
    newest = find_latest(run)
    assert newest is not None
    stored, masters = load_file(tmp_path / "out" / "model.safetensors"), load_file(newest / "drafter.safetensors")
    assert stored.keys() == masters.keys()  # neither embedding nor head
    for name, tensor in stored.items():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["max_position_embeddings"] == 512  # the target's
    assert settings["dflash_config"]["max_trained_length"] == 128
    vllm, sglang = result.serve
    assert vllm.startswith(f"vllm serve {tiny / 'model'} --speculative-config '{{")
    assert json.loads(vllm.split("'")[1]) == {
        "method": "dflash",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 3,
    }
    assert "--speculative-algorithm DFLASH" in sglang
    assert sglang.endswith("--speculative-num-draft-tokens 4")
    assert all(line in str(result) for line in result.serve)


def test_the_card_says_what_the_drafter_is(run: Path, tiny: Path, tmp_path: Path) -> None:
    result = export(run, output=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == str(tiny / "model")
    newest = find_latest(run)
    assert newest is not None
    score = json.loads((newest / "state.json").read_text())["accept_length"]
    for text in (
        f"| held-out accept_length, teacher-forced | {score:.3f} |",
        f"| steps | {int(newest.name[5:])} |",
        "| longest row in training | 128 tokens |",
        f"- `{tiny / 'train.jsonl'}`",
        f"- held out: `{tiny / 'heldout.jsonl'}`",
        f"dflash-graph export {run} --to hf --output {tmp_path / 'out'}",
        *result.serve,
    ):
        assert text in card
    saved = card.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(saved)["optim"]["lr"] == 3e-3


def test_export_of_one_checkpoint_and_the_default_place(run: Path, tmp_path: Path) -> None:
    copy = _copy(run, tmp_path)
    first = copy / "checkpoints" / "step_00000009"
    result = export(first, to="speculators")
    assert result.folder == copy / "export" / "step_00000009-speculators"
    assert result.notes == ("SGLang does not read this layout; export --to hf",)
    assert len(result.serve) == 1
    settings = json.loads((result.folder / "config.json").read_text())
    verifier = settings["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["LlamaForCausalLM"]  # read from the target
    with pytest.raises(ValueError, match="--output must be a new or an empty folder"):
        export(first, to="speculators")


def test_export_names_the_best_checkpoint_where_it_is_another(run: Path, tmp_path: Path) -> None:
    copy = _copy(run, tmp_path)
    best = {"step": 6, "folder": "step_00000006", "accept_length": 9.0}
    (copy / "checkpoints" / "best.json").write_text(json.dumps(best))
    (note,) = export(copy, output=tmp_path / "out").notes
    assert note.endswith(f"(9.000) is {copy / 'checkpoints' / 'step_00000006'}")


def test_export_checks_the_target(run: Path, tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 6, "vocab_size": 128}))
    with pytest.raises(ValueError, match=r"layers: 5 in the drafter, 6 in the target; vocabulary: 96 .* 128"):
        export(run, output=tmp_path / "out", target=TargetConfig(path=str(model)))
    # The weights may say something else than the settings beside them.
    (model / "config.json").write_text(json.dumps(settings))
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(80, 32)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"shape of lm_head.weight: \(96, 32\) in the drafter, \(80, 32\)"):
        export(run, output=tmp_path / "out", target=TargetConfig(path=str(model)))
    assert not (tmp_path / "out").exists()


def test_export_checks_the_data_for_the_mask_token(run: Path, tiny: Path, tmp_path: Path) -> None:
    copy = _copy(run, tmp_path)
    data = tmp_path / "train.jsonl"
    row = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 <mask> w3"}]}
    data.write_text((tiny / "train.jsonl").read_text() + json.dumps(row) + "\n")
    save_config(tiny_config(tiny, copy, f"data.train=[{data}]"), copy / "config.yaml")
    with pytest.raises(ValueError, match="mask token must not occur in the training data; id 5"):
        export(copy, output=tmp_path / "out")
    data.unlink()
    (note,) = export(copy, output=tmp_path / "out").notes
    assert note.startswith("the data was not checked for the mask token: ")


def test_export_outside_a_run_folder_says_what_it_cannot_know(run: Path, tmp_path: Path) -> None:
    newest = find_latest(run)
    assert newest is not None
    alone = tmp_path / newest.name
    shutil.copytree(newest, alone)
    result = export(alone, output=tmp_path / "out")
    assert result.notes == ("the data was not checked for the mask token: the checkpoint lies in no run folder",)
    assert "not known: exported outside its run folder" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ValueError, match="run folder with a whole checkpoint, or a checkpoint folder; found neither"):
        export(tmp_path / "nowhere")


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_an_untrained_drafter_from_a_configuration(layout: Layout, tiny: Path, tmp_path: Path) -> None:
    save_config(tiny_config(tiny, tmp_path / "run"), tmp_path / "run.yaml")
    overrides = ["drafter.draft_vocab_size=20", "drafter.block_size=6"]
    with pytest.raises(ValueError, match=r"no place for a reduced head of 20 ids.*--to speculators"):
        export(tmp_path / "run.yaml", untrained=True, overrides=overrides)
    full_head = layout == "hf"
    result = export(tmp_path / "run.yaml", to=layout, untrained=True, overrides=overrides, full_head=full_head)
    assert result.folder == tmp_path / "run" / "export" / f"untrained-{layout}"
    found = read_released(result.folder)
    assert (found.spec.block_size, found.spec.target_layer_ids, found.spec.mask_token_id) == (6, (1, 3), 5)
    assert found.tensors["fc.weight"].std() > 0.01
    assert "random weights" in (result.folder / "README.md").read_text()
    if layout == "speculators":
        assert found.draft_vocab_ids is not None
        plan = make_plan(load_config(tmp_path / "run.yaml", overrides))
        assert plan.head_ids is not None
        assert found.draft_vocab_ids.tolist() == plan.head_ids.tolist()
        head = load_file(tiny / "model" / "model.safetensors")["lm_head.weight"]
        with safe_open(result.folder / "model.safetensors", framework="pt") as file:
            assert torch.equal(file.get_tensor("lm_head.weight"), head[found.draft_vocab_ids].to(torch.bfloat16))
    else:
        assert found.spec.draft_vocab_size is None
        assert any("reduced head of 20 ids" in note for note in result.notes)


def test_checkpoints_of_a_reduced_head_serve_with_it(tiny: Path, tmp_path: Path) -> None:
    """The layout that has a place for the head; `hf` would be run with the whole head."""
    train(tiny_config(tiny, tmp_path / "run", "drafter.draft_vocab_size=20", "epochs=1"))
    newest = find_latest(tmp_path / "run")
    assert newest is not None
    found, exported = read_released(newest / "servable"), export(tmp_path / "run", to="speculators").folder
    assert (found.layout, found.spec.draft_vocab_size) == ("speculators", 20)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (newest / "servable", exported))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_full_head_needs_a_reason(run: Path) -> None:
    with pytest.raises(ValueError, match="--full-head has an effect only"):
        export(run, full_head=True)


def test_an_export_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        assert list(tmp_path.glob(".tmp-*"))
        raise OSError("no space left")

    monkeypatch.setattr("dflash_graph.export._check_written", fail)
    with pytest.raises(OSError, match="no space left"):
        export(run, output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    assert run_export(parser.parse_args([str(run), "--to", "hf", "--output", str(tmp_path / "out")])) == 0
    assert f"exported {tmp_path / 'out'}\nserve it:\n  vllm serve" in capsys.readouterr().out
    with pytest.raises(ValueError, match="settings have an effect only with --untrained"):
        run_export(parser.parse_args([str(run), "optim.lr=1"]))
    with pytest.raises(ValueError, match="--to must be one of hf, speculators"):
        export(run, to="gguf")  # type: ignore[arg-type]
