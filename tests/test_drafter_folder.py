"""Evaluation of every kind of folder: an export decodes as its checkpoint does, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_graph.config import TargetConfig
from dflash_graph.drafter_folder import check_borrowed, read_drafter
from dflash_graph.evaluation import evaluate
from dflash_graph.export import export
from dflash_graph.report import EvalReport
from dflash_graph.serving_layouts import Layout
from tests.eval_tiny import make_prompts, make_run, save_target

KINDS: dict[str, dict[str, Any]] = {
    "full": {"draft_vocab_size": None},
    "reduced": {},
    "causal": {"draft_vocab_size": None, "causal": True},
    "sliding": {
        "draft_vocab_size": None, "num_hidden_layers": 2, "sliding_window": 6,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "K=2": {"draft_vocab_size": None, "block_size": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> dict[str, Path]:
    return {kind: make_run(tmp_path_factory.mktemp("runs"), prompts, **changes) for kind, changes in KINDS.items()}


@pytest.fixture(scope="module")
def exported(runs: dict[str, Path]) -> dict[tuple[str, Layout], Path]:
    folders: dict[tuple[str, Layout], Path] = {}
    layouts: tuple[Layout, ...] = ("hf", "speculators")
    for kind, run in runs.items():
        for layout in layouts:
            folders[kind, layout] = export(
                run, to=layout, output=run.parent / layout, full_head=kind == "reduced" and layout == "hf"
            ).folder
    return folders


def measure(folder: Path, prompts: Path, **options: Any) -> EvalReport:
    values: dict[str, Any] = {"max_new_tokens": 16, "limit": 4, "control_prompts": 0, "alone_prompts": 1, **options}
    return evaluate(folder, prompts, workers=1, step_times=False, **values)


@pytest.mark.parametrize("layout", ["hf", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_decodes_as_its_checkpoint(
    kind: str, layout: Layout, runs: dict[str, Path], exported: dict[tuple[str, Layout], Path], prompts: Path
) -> None:
    """Text by text and verification by verification; the target is the one that the folder names."""
    of_run, found = measure(runs[kind], prompts), measure(exported[kind, layout], prompts)
    assert [t.tokens for t in found.texts] == [t.tokens for t in of_run.texts]
    full_head = kind == "reduced" and layout == "hf"  # servers of this layout use the target's whole head
    same = [t.accepts for t in found.texts] == [t.accepts for t in of_run.texts]
    assert same != full_head
    assert "in no run folder" in found.notes[0]
    spec = read_drafter(exported[kind, layout]).spec
    assert spec.block_size == KINDS[kind].get("block_size", 4)
    if kind == "reduced":
        assert of_run.drafter.accept_length > 1


def test_a_run_is_its_newest_checkpoint(runs: dict[str, Path]) -> None:
    found = read_drafter(runs["full"] / "checkpoints" / "step_00000005")
    assert found.config is not None
    assert read_drafter(runs["full"]).path == found.path


def _settings(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def _copy(source: Path, folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of an export without some settings, in whatever place, and with others changed."""
    folder.mkdir()
    settings = _settings(source)
    for where in (settings, settings.get("dflash_config", {}), settings.get("transformer_layer_config", {})):
        for name in drop:
            where.pop(name, None)
        where |= {name: value for name, value in changes.items() if name in where}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(load_file(source / "model.safetensors"), folder / "model.safetensors")
    if (source / "README.md").exists():
        (folder / "README.md").write_text((source / "README.md").read_text())
    return folder


def test_what_a_folder_does_not_say_comes_from_its_target(
    runs: dict[str, Path], exported: dict[tuple[str, Layout], Path], tmp_path: Path
) -> None:
    hf = exported["full", "hf"]
    bare = _copy(hf, tmp_path / "bare", drop=("num_target_layers", "max_trained_length"))
    found = read_drafter(bare)
    assert found.spec.num_target_layers == 4
    assert found.spec.target_path == found.target.path == str(runs["full"].parent / "target")
    (bare / "README.md").unlink()
    with pytest.raises(ValueError, match="does not say which model it drafts for; name it with --target"):
        read_drafter(bare)
    (bare / "README.md").write_text("---\nbase_model: [one, two]\n---\n")
    with pytest.raises(ValueError, match="name it with --target"):
        read_drafter(bare)
    (bare / "README.md").write_text("---\nbase_model: [a\n---\nbroken header")
    with pytest.raises(ValueError, match="name it with --target"):
        read_drafter(bare)
    target = TargetConfig(path=str(runs["full"].parent / "target"))
    assert read_drafter(bare, target).spec == found.spec
    with pytest.raises(ValueError, match="block_size, which a reader can only guess"):
        read_drafter(_copy(hf, tmp_path / "guess", drop=("block_size",)), target)
    with pytest.raises(ValueError, match=r"must be a readable model folder"):
        read_drafter(bare, TargetConfig(path=str(tmp_path / "nowhere")))


def test_a_drafter_of_another_target_is_refused_by_name(
    runs: dict[str, Path], exported: dict[tuple[str, Layout], Path], tmp_path: Path
) -> None:
    save_target(tmp_path / "small", num_hidden_layers=2, vocab_size=300)
    small = TargetConfig(path=str(tmp_path / "small"))
    for folder in (runs["full"], exported["full", "hf"], exported["full", "speculators"]):
        with pytest.raises(ValueError, match=r"layers: 4 in the drafter, 2 in the target; vocabulary: 260 .* 300"):
            read_drafter(folder, small)
    bare = _copy(exported["full", "hf"], tmp_path / "bare", drop=("num_target_layers",))
    with pytest.raises(ValueError, match=r"reads target layers \[0, 2\]; target .* has only 2"):
        read_drafter(bare, small)


def test_a_head_of_its_own_is_refused(exported: dict[tuple[str, Layout], Path], prompts: Path, tmp_path: Path) -> None:
    """A stored copy of the target's tensors is fine, even rounded; another one would decode something else."""
    found = read_drafter(exported["reduced", "speculators"])
    assert set(found.borrowed) == {"lm_head.weight"}
    folder = _copy(exported["full", "hf"], tmp_path / "own")
    model = transformers.AutoModelForCausalLM.from_pretrained(read_drafter(folder).target.path)
    tensors = load_file(folder / "model.safetensors")
    embed = model.get_input_embeddings().weight.detach()
    for name in ("embed_tokens.weight", "model.lm_head.weight"):
        weight = embed if "embed" in name else model.get_output_embeddings().weight.detach()
        save_file({**tensors, name: weight.bfloat16()}, folder / "model.safetensors")
        assert measure(folder, prompts, limit=1).num_prompts == 1
        other = weight.clone()
        other[7] += 0.5
        save_file({**tensors, name: other}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"stores {name.removeprefix('model.')} of its own"):
            measure(folder, prompts, limit=1)
    reduced = load_file(exported["reduced", "speculators"] / "model.safetensors")
    spoiled = _copy(exported["reduced", "speculators"], tmp_path / "spoiled")
    save_file({**reduced, "lm_head.weight": reduced["lm_head.weight"].flip(0)}, spoiled / "model.safetensors")
    with pytest.raises(ValueError, match=r"stores lm_head\.weight of its own"):
        measure(spoiled, prompts, limit=1)


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path, exported: dict[tuple[str, Layout], Path]) -> None:
    with pytest.raises(ValueError, match="run folder with a whole checkpoint, a checkpoint folder, or an exported"):
        read_drafter(tmp_path)
    folder = _copy(exported["full", "hf"], tmp_path / "cut")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="its weights must be"):
        read_drafter(folder)


def test_check_borrowed_knows_the_rows_of_a_reduced_head(exported: dict[tuple[str, Layout], Path]) -> None:
    found = read_drafter(exported["reduced", "speculators"])
    model = transformers.AutoModelForCausalLM.from_pretrained(found.target.path)
    embed, head = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    check_borrowed(found, embed, head)
    with pytest.raises(ValueError, match="not the one of target"):
        check_borrowed(found, embed, torch.roll(head, 1, dims=0))
