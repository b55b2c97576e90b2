"""Exports against the packages that load them, and drafters that these packages wrote against our reader.

Each package runs unmodified in an environment of its own (`bench/peers/make_envs.sh`); a package without one is
skipped with that reason. All tests: `pytest tests/peers`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_graph.cached_target import CachedTarget
from dflash_graph.config import TargetConfig
from dflash_graph.drafter import DrafterSpec
from dflash_graph.evaluation import evaluate
from dflash_graph.export import export
from dflash_graph.plain_drafter import PlainDrafter
from dflash_graph.released import Released, read_released
from dflash_graph.serving_layouts import ServedTarget, differences, reduced_head, write_servable
from dflash_graph.target import load_full_model
from dflash_graph.training import train
from tests.peers import compare_eval
from tests.peers.compare_eval import compare
from tests.peers.environment import python_of, run_jobs
from tests.tiny import SIZES, SPECIAL, WORDS, make_tiny, tiny_config
from tests.toys import FULL, SLIDING, random_tensors, toy_spec

TOKENS = [7 + (5 * i * i + i) % 80 for i in range(40)]
ANCHORS = [1, 2, 9, 23, 39]  # the shortest context, one shorter than every window, and long ones
MASK, K = 5, 4
REDUCED = [0, 2, *range(9, 60, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full causal": {"causal": True},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "sliding causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7, "causal": True},
    "mixed causal": {"layer_types": (SLIDING, FULL), "sliding_window": 7, "causal": True},
    "mixed": {"layer_types": (FULL, SLIDING), "sliding_window": 7},
}


def _spec(**changes: Any) -> DrafterSpec:
    sizes = {
        "hidden_size": 32,
        "head_dim": 10,
        "vocab_size": 96,
        "mask_token_id": MASK,
        "block_size": K,
        "rope_theta": 5000.0,
        "max_trained_length": 128,
    }
    return toy_spec(**{**sizes, **changes})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 target of 5 layers with its tokenizer and data, which continues most texts as its data goes on."""
    folder = tmp_path_factory.mktemp("qwen3")
    make_tiny(folder, Qwen3Config(**SIZES, head_dim=8))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for word in range(len(WORDS)):  # in the data, word i is followed by word i + 3
            head[len(SPECIAL) + (word + 3) % len(WORDS)] = embed[len(SPECIAL) + word]
    model.save_pretrained(folder / "model")
    return folder


def _hidden(found: Released, target: Path, features: Tensor) -> Tensor:
    """(anchors, K-1, D): our plain drafter's final hidden states, which an identity instead of a head shows."""
    model = load_full_model(TargetConfig(path=str(target / "model")), torch.device("cpu"), torch.float32)
    drafter = PlainDrafter(
        found.spec,
        found.tensors,
        embed_weight=model.get_input_embeddings().weight,
        head_weight=torch.eye(found.spec.hidden_size),
        draft_vocab_ids=None if found.draft_vocab_ids is None else torch.arange(found.spec.draft_vocab_size or 0),
    )
    if found.draft_vocab_ids is not None:
        drafter.head_weight = torch.eye(found.spec.hidden_size)
    rows = []
    for anchor in ANCHORS:
        drafter.reset()
        rows.append(drafter.logits(TOKENS[: anchor + 1], features[:anchor]))
    return torch.stack(rows)


def _features(target: Path, taps: Sequence[int]) -> Tensor:
    """(tokens, N*D) from our own hooks on the target."""
    model = load_full_model(TargetConfig(path=str(target / "model")), torch.device("cpu"), torch.float32)
    with CachedTarget(model, taps) as cached:
        return cached.prefill(TOKENS)[1]


def _assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.01  # hidden states, not zeros
    assert float((ours - theirs).abs().max()) < 1e-5


def _job(folder: Path, **more: Any) -> dict[str, Any]:
    return {"action": "hidden", "folder": str(folder), "tokens": TOKENS, "anchors": ANCHORS, **more}


def _write(folder: Path, target: Path, layout: Any = "hf", **changes: Any) -> None:
    spec = _spec(**changes)
    served = ServedTarget(max_position_embeddings=512, name=str(target / "model"), architectures=("Qwen3ForCausalLM",))
    head = None
    if spec.draft_vocab_size is not None:
        model = load_full_model(TargetConfig(path=served.name), torch.device("cpu"), torch.float32)
        head = reduced_head(spec, torch.tensor(REDUCED), model.get_output_embeddings().weight)
    write_servable(folder, spec, random_tensors(spec), served, layout=layout, head=head)


# ---- z-lab's dflash -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_zlab(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Everything that dflash 0.1.0 is asked, in one process: (work folder, tensors of each job)."""
    python_of("dflash")
    work = tmp_path_factory.mktemp("zlab")
    jobs: dict[str, dict[str, Any]] = {}
    for kind, changes in KINDS.items():
        _write(work / kind, target, **changes)
        jobs[kind] = _job(work / kind)
    jobs["auto_map"] = _job(work / "full", through="auto")
    _write(work / "last tap", target, target_layer_ids=(1, 4))
    jobs["last tap"] = _job(work / "last tap")
    jobs["written"] = {"action": "write", "folder": str(work / "theirs"), "config": _their_config()}
    jobs["theirs"] = _job(work / "theirs")
    return work, run_jobs("dflash", target / "model", work, jobs)


def _their_config(**changes: Any) -> dict[str, Any]:
    """A drafter's configuration as a user of their package writes it."""
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "num_target_layers": 5,
        "block_size": K,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
        **changes,
    }


@pytest.mark.parametrize("kind", [*KINDS, "auto_map"])
def test_zlab_computes_our_hidden_states_from_our_export(
    kind: str, target: Path, from_zlab: tuple[Path, dict[str, dict[str, Tensor]]]
) -> None:
    work, theirs = from_zlab
    found = read_released(work / ("full" if kind == "auto_map" else kind))
    features = _features(target, found.spec.target_layer_ids)
    _assert_equal(features, theirs[kind]["features"])
    _assert_equal(_hidden(found, target, features), theirs[kind]["hidden"])


def test_zlab_reads_the_last_layer_after_the_final_norm_as_the_export_says(
    target: Path, from_zlab: tuple[Path, dict[str, dict[str, Tensor]]]
) -> None:
    work, theirs = from_zlab
    found = read_released(work / "last tap")
    assert "after the final norm" in differences(found.spec, "hf")["z-lab's dflash"]
    gap = (_features(target, (1, 4)) - theirs["last tap"]["features"]).abs()
    assert float(gap[:, :32].max()) < 1e-5
    assert float(gap[:, 32:].max()) > 0.1


def test_a_drafter_that_zlab_wrote_is_read_and_agrees(
    target: Path, from_zlab: tuple[Path, dict[str, dict[str, Tensor]]]
) -> None:
    work, theirs = from_zlab
    found = read_released(work / "theirs")
    assert found.layout == "hf"
    assert (found.spec.target_layer_ids, found.spec.mask_token_id, found.spec.block_size) == ((1, 3), MASK, K)
    assert found.spec.rope_theta == 5000.0
    _assert_equal(_hidden(found, target, theirs["theirs"]["features"]), theirs["theirs"]["hidden"])


def test_zlab_decodes_a_trained_export_as_our_evaluation_does(target: Path, tmp_path: Path) -> None:
    """The same tokens and the same accepted drafts, verification by verification, and so the same accept_length."""
    python_of("dflash")
    run = tmp_path / "run"
    train(tiny_config(target, run, "epochs=14", "log.every=1000", "log.validate_every=1000", "checkpoint.every=1000"))
    folder = export(run, output=tmp_path / "hf").folder
    result = compare(
        folder,
        target / "heldout.jsonl",
        tmp_path,
        target=TargetConfig(path=str(target / "model"), dtype="float32"),
        limit=None,
        max_new_tokens=60,
    )
    assert result.faults == ()
    assert len(result.near_ties) <= 1
    assert result.our_length == result.their_length > 1.5
    assert result.num_tokens > 200
    accepts = [a for text in result.report.texts for a in text.accepts]
    assert len(set(accepts)) > 2, f"a drafter that always accepts as many would prove little; found {accepts}"
    if not result.near_ties:
        assert result.report.drafter.accept_length == result.their_length


def test_an_untrained_export_decodes_the_same_tokens(target: Path, tmp_path: Path) -> None:
    python_of("dflash")
    folder = tmp_path / "random"
    _write(folder, target)
    target_config = TargetConfig(path=str(target / "model"), dtype="float32")
    result = compare(folder, target / "heldout.jsonl", tmp_path, target=target_config, limit=3, max_new_tokens=30)
    assert (result.faults, result.our_length) == ((), result.their_length)


def test_a_difference_is_found(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another token, and another number of accepted drafts, each in one text."""
    python_of("dflash")
    folder = tmp_path / "random"
    _write(folder, target)

    def spoiled(*args: Any) -> dict[str, dict[str, Tensor]]:
        found = run_jobs(*args)
        found["generated"]["tokens.1"][5] += 1
        found["generated"]["accepts.2"][0] += 1
        return found

    monkeypatch.setattr(compare_eval, "run_jobs", spoiled)
    target_config = TargetConfig(path=str(target / "model"), dtype="float32")
    result = compare(folder, target / "heldout.jsonl", tmp_path, target=target_config, limit=3, max_new_tokens=30)
    assert [fault.split(" ")[0] for fault in result.faults] == ["heldout/1", "heldout/2"]
    assert "DIFFERENT" in str(result)


def test_our_evaluation_reads_what_the_packages_wrote(
    target: Path,
    from_zlab: tuple[Path, dict[str, dict[str, Tensor]]],
    from_speculators: tuple[Path, dict[str, dict[str, Tensor]]],
) -> None:
    """`evaluate` on folders of z-lab's and speculators' own writers, by the folder alone and the target's path."""
    model = TargetConfig(path=str(target / "model"), dtype="float32")
    for folder in (from_zlab[0] / "theirs", from_speculators[0] / "their full", from_speculators[0] / "their reduced"):
        report = evaluate(folder, target / "heldout.jsonl", target=model, limit=3, max_new_tokens=20)
        assert (report.num_prompts, report.block_size, report.near_ties) == (3, K, ())
        assert report.drafter.num_verifications > 10
    report = evaluate(from_speculators[0] / "their full", target / "heldout.jsonl", limit=1, max_new_tokens=20)
    assert report.num_prompts == 1, "that layout names its target"


# ---- speculators ----------------------------------------------------------------------------------------------------

# Its own forward counts a window from the anchor and runs full layers bidirectionally, so only these agree with ours.
ALIKE: dict[str, dict[str, Any]] = {"full": {}, "reduced": {"draft_vocab_size": len(REDUCED)}}


@pytest.fixture(scope="module")
def from_speculators(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Everything that speculators 0.9.0 is asked, in one process: (work folder, tensors of each job)."""
    python_of("speculators")
    work = tmp_path_factory.mktemp("speculators")
    settings = {"block_size": K, "aux_hidden_state_layer_ids": [2, 4], "mask_token_id": MASK}
    config = _their_config()
    for name in ("num_target_layers", "block_size", "dflash_config"):
        del config[name]
    jobs: dict[str, dict[str, Any]] = {}
    for kind in ("sliding", "sliding causal"):
        _write(work / kind, target, "speculators", **KINDS[kind])
        jobs[kind] = _job(work / kind)
    for kind, changes in ALIKE.items():
        _write(work / kind, target, "speculators", **changes)
        jobs[kind] = _job(work / kind)
        ids = REDUCED if kind == "reduced" else None
        size = len(REDUCED) if kind == "reduced" else 96
        folder = str(work / f"their {kind}")
        jobs[f"written {kind}"] = {
            "action": "write",
            "folder": folder,
            "config": config,
            "settings": {**settings, "draft_vocab_size": size},
            "draft_vocab_ids": ids,
        }
        jobs[f"their {kind}"] = _job(work / f"their {kind}")
    return work, run_jobs("speculators", target / "model", work, jobs)


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("writer", ["our", "their"])
def test_speculators_and_we_compute_the_same_from_the_same_folder(
    kind: str, writer: str, target: Path, from_speculators: tuple[Path, dict[str, dict[str, Tensor]]]
) -> None:
    work, theirs = from_speculators
    name = kind if writer == "our" else f"their {kind}"
    found = read_released(work / name)
    assert found.layout == "speculators"
    assert found.spec.target_layer_ids == (1, 3)  # theirs are 2 and 4
    assert (found.spec.block_size, found.spec.mask_token_id) == (K, MASK)
    assert int(theirs[name]["speculative_tokens"]) == K - 1
    features = _features(target, found.spec.target_layer_ids)
    _assert_equal(features, theirs[name]["features"])
    hidden = _hidden(found, target, features)
    _assert_equal(hidden, theirs[name]["hidden"])
    # The head: the target's own, or its rows of the reduced vocabulary (stored in bf16 by us).
    model = load_full_model(TargetConfig(path=str(target / "model")), torch.device("cpu"), torch.float32)
    head = model.get_output_embeddings().weight
    if kind == "reduced":
        assert found.draft_vocab_ids is not None
        assert found.draft_vocab_ids.tolist() == REDUCED
        head = head[REDUCED] if writer == "their" else head[REDUCED].to(torch.bfloat16).float()
    assert torch.allclose(hidden @ head.T, theirs[name]["logits"], atol=1e-5)


@pytest.mark.parametrize("kind", ["sliding", "sliding causal"])
def test_speculators_counts_a_window_from_the_anchor_as_the_export_says(
    kind: str, target: Path, from_speculators: tuple[Path, dict[str, dict[str, Tensor]]]
) -> None:
    """Equal where the whole context is inside every window, different where it is not."""
    work, theirs = from_speculators
    found = read_released(work / kind)
    assert found.spec.causal == (kind == "sliding causal")
    assert "window from the anchor" in differences(found.spec, "speculators")["speculators"]
    gap = (_hidden(found, target, theirs[kind]["features"]) - theirs[kind]["hidden"]).abs().amax(dim=(1, 2))
    short = torch.tensor(ANCHORS) + K - 1 <= 7
    assert short.any()
    assert bool((gap[short] < 1e-5).all())
    assert bool((gap[~short] > 1e-2).all())
