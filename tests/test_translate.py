"""Another trainer's configuration as ours: every key is translated or listed, and the result is one that we accept."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_graph.config import load_config
from dflash_graph.translate import add_config_arguments, run_config, translate

SPECFORGE = {
    "model": {
        "target_model_path": "Qwen/Qwen3-8B",
        "draft_model_config": "draft.json",
        "target_backend": "sglang",
        "sglang_mem_fraction_static": 0.6,
        "mask_token_id": 151669,
    },
    "data": {"train_data_path": "train.jsonl", "max_length": 3072, "chat_template": "qwen"},
    "training": {
        "strategy": "dflash",
        "num_epochs": 6,
        "batch_size": 2,
        "learning_rate": 6e-4,
        "warmup_ratio": 0.04,
        "max_grad_norm": 1.0,
        "num_anchors": 256,
        "loss_decay_gamma": 7.0,
        "save_interval": 500,
        "log_interval": 20,
        "tp_size": 1,
    },
    "tracking": {"report_to": "wandb", "wandb_project": "mine"},
    "output_dir": "./out",
    "run_id": "first",
}
DRAFT = {
    "num_hidden_layers": 5,
    "block_size": 10,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": 2048,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33]},
}
SPECULATORS = {
    "train": {
        "speculator_type": "dflash",
        "verifier": {"verifier_name_or_path": "Qwen/Qwen3-8B"},
        "draft": {"target_layer_ids": [2, 18, 33], "mask_token_id": 151669, "full_attention_indices": [0, 1, 2, 3, 4]},
        "data": {"data_path": "./prepared", "total_seq_len": 8100, "max_anchors": 3072, "num_workers": 4},
        "optimizer": {"optimizer": "adamw", "lr": 3e-4},
        "scheduler": {"scheduler_type": "cosine", "scheduler_warmup_ratio": 0.04},
        "trainer": {"epochs": 10, "save_path": "./ckpt", "checkpoint_freq": 0.5},
    }
}


def _write(folder: Path, values: dict[str, Any], name: str = "theirs.yaml") -> Path:
    (folder / name).write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
    return folder / name


def test_specforge_becomes_a_configuration_of_ours(tmp_path: Path) -> None:
    _write(tmp_path, DRAFT, "draft.json")
    translation = translate("specforge", _write(tmp_path, SPECFORGE))
    (tmp_path / "ours.yaml").write_text(str(translation))
    config = load_config(tmp_path / "ours.yaml")
    drafter, optim = config.drafter, config.optim
    assert config.run_dir == "out/first"
    assert (config.target.path, config.target.dtype) == ("Qwen/Qwen3-8B", "bfloat16")
    assert (config.data.train, config.data.max_length) == (("train.jsonl",), 3072)
    # The draft's own file says what it is; the run's mask token comes before that file's.
    assert (drafter.num_hidden_layers, drafter.block_size, drafter.mask_token_id) == (5, 10, 151669)
    assert drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert (drafter.layer_types, drafter.sliding_window, drafter.causal) == (None, None, False)
    assert (drafter.num_anchors_per_sample, drafter.loss_decay_gamma) == (256, 7.0)
    assert (optim.lr, optim.betas, optim.lr_schedule, optim.min_lr_ratio) == (6e-4, (0.9, 0.999), "cosine", 0.0)
    assert (config.epochs, config.seed, config.checkpoint.every, config.log.every) == (6, 42, 500, 20)
    assert (config.log.tensorboard, config.log.trackers, config.log.project) == (False, ("wandb",), "mine")


def test_specforge_keys_without_a_counterpart_are_listed(tmp_path: Path) -> None:
    _write(tmp_path, DRAFT, "draft.json")
    listed = translate("specforge", _write(tmp_path, SPECFORGE)).unmatched
    assert sorted(line.partition(":")[0] for line in listed) == [
        "data.chat_template=qwen",
        "model.sglang_mem_fraction_static=0.6",
        "model.target_backend=sglang",
        "training.batch_size=2",
        "training.tp_size=1",
    ]
    assert all(line.partition(": ")[2] for line in listed)


def test_specforge_defaults_are_theirs_not_ours(tmp_path: Path) -> None:
    """SpecForge 0.2.0, config/schema.py: uniform weights, one layer, 512 anchors a sample, one epoch."""
    bare = {"model": {"target_model_path": "t"}, "data": {"train_data_path": "d"}, "training": {"strategy": "dflash"}}
    (tmp_path / "ours.yaml").write_text(str(translate("specforge", _write(tmp_path, bare, "theirs.json"))))
    config = load_config(tmp_path / "ours.yaml")
    assert (config.drafter.num_hidden_layers, config.drafter.block_size) == (1, 16)
    assert config.drafter.num_anchors_per_sample == 512
    assert config.drafter.gamma >= 1e6  # exp(-15 / gamma) is 1 in float32
    assert (config.epochs, config.optim.lr, config.optim.warmup_ratio) == (1, 1e-4, 0.015)
    assert (config.optim.max_grad_norm, config.data.max_length) == (0.5, 2048)


def test_specforge_d_pace(tmp_path: Path) -> None:
    changed = {**SPECFORGE, "training": {"strategy": "dflash", "loss_type": "dpace", "dpace_alpha": 0.3}}
    translation = translate("specforge", _write(tmp_path, changed))
    assert translation.values["loss"] == {"weighting": "d_pace", "d_pace_alpha": 0.3}
    assert any("draft.json: not a local file" in line for line in translation.unmatched)
    other = {**SPECFORGE, "training": {"strategy": "dflash", "loss_type": "dpace-continuation-value-only"}}
    assert any("left at decay" in line for line in translate("specforge", _write(tmp_path, other)).unmatched)


def test_specforge_sliding_layers_are_causal(tmp_path: Path) -> None:
    mixed = [*["sliding_attention"] * 4, "full_attention"]
    _write(tmp_path, {**DRAFT, "layer_types": mixed}, "draft.json")
    translation = translate("specforge", _write(tmp_path, SPECFORGE))
    drafter = translation.values["drafter"]
    assert (drafter["layer_types"], drafter["sliding_window"], drafter["causal"]) == (mixed, 2048, True)
    assert any("bidirectional" in line for line in translation.unmatched)


def test_specforge_chooses_taps_anew_for_another_depth(tmp_path: Path) -> None:
    _write(tmp_path, DRAFT, "draft.json")
    changed = {**SPECFORGE, "model": {**SPECFORGE["model"], "draft_num_hidden_layers": 3}}  # type: ignore[dict-item]
    drafter = translate("specforge", _write(tmp_path, changed)).values["drafter"]
    assert drafter["num_hidden_layers"] == 3
    assert "target_layer_ids" not in drafter


def test_speculators_becomes_a_configuration_of_ours(tmp_path: Path) -> None:
    translation = translate("speculators", _write(tmp_path, SPECULATORS))
    assert translation.values["data"]["train"] == "???"  # their rows are tokenised; only a person can say whence
    (tmp_path / "ours.yaml").write_text(str(translation))
    config = load_config(tmp_path / "ours.yaml", ["data.train=[mine.jsonl]"])
    drafter = config.drafter
    assert drafter.target_layer_ids == (1, 17, 32)  # inputs of layers there, outputs here
    assert (drafter.num_hidden_layers, drafter.block_size, drafter.layer_types) == (5, 16, None)
    assert not drafter.causal
    assert (drafter.num_anchors, drafter.anchor_rate) == (3072, 1.0)
    assert (config.data.max_length, config.token_budget) == (8100, 8128)
    assert (config.loss.labels, config.loss.weighting, config.loss.kl_weight) == ("target", "d_pace", 0.0)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.warmup_ratio) == (3e-4, 0.01, 0.04)
    assert (config.optim.lr_schedule, config.optim.min_lr_ratio, config.epochs) == ("cosine", 0.0, 10)
    listed = [line.partition(":")[0] for line in translation.unmatched]
    assert "data.data_path=./prepared" in listed
    assert "trainer.checkpoint_freq=0.5" in listed
    assert "data.num_workers=4" in listed


def test_speculators_defaults_are_theirs_not_ours(tmp_path: Path) -> None:
    """speculators 0.9.0, train/config/schema.py: causal sliding layers of 2,048, Muon, D-PACE, 20 epochs."""
    bare = {"speculator_type": "dflash", "verifier": {"verifier_name_or_path": "t"}}  # without the stage, too
    translation = translate("speculators", _write(tmp_path, bare))
    drafter = translation.values["drafter"]
    assert drafter["layer_types"] == ["sliding_attention"] * 5
    assert (drafter["sliding_window"], drafter["causal"], drafter["num_anchors"]) == (2048, True, 512)
    assert "target_layer_ids" not in drafter
    assert translation.values["epochs"] == 20
    assert translation.values["optim"]["lr_schedule"] == "linear"
    assert translation.values["optim"]["warmup_ratio"] == 0.01
    text = "\n".join(translation.unmatched)
    for word in ("optimizer.optimizer=muon", "draft.target_layer_ids", "counted from the anchor", "data.data_path"):
        assert word in text


def test_speculators_default_taps_follow_from_a_local_target(tmp_path: Path, tiny: Path) -> None:
    """[2, n // 2, n - 3] are inputs of layers; of 5 layers all three are 2, which a run refuses as its package does."""
    bare = {"speculator_type": "dflash", "verifier": {"verifier_name_or_path": str(tiny / "model")}}
    drafter = translate("speculators", _write(tmp_path, bare)).values["drafter"]
    assert drafter["target_layer_ids"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("loss_fn", "kl_weight", "lost"),
    [
        ("ce", 0.0, None),
        ("kl_div", 1.0, None),
        ('{"ce": 0.5, "kl_div": 1.5}', 0.75, None),
        ('{"ce": 1, "tv": 9}', 0.0, "tv"),
    ],
)
def test_speculators_losses(tmp_path: Path, loss_fn: str, kl_weight: float, lost: str | None) -> None:
    values = {
        "speculator_type": "dflash",
        "verifier": {"verifier_name_or_path": "t"},
        "loss": {"loss_fn": loss_fn},
        "dflash": {"per_position_loss_weight": "fixed-exp-decay"},
    }
    translation = translate("speculators", _write(tmp_path, values))
    assert translation.values["loss"] == {"labels": "target", "kl_weight": kl_weight}
    assert translation.values["drafter"]["loss_decay_gamma"] == 4.0
    assert any("tv has no counterpart" in line for line in translation.unmatched) == (lost is not None)


@pytest.mark.parametrize(
    ("peer", "values", "message"),
    [
        ("specforge", {"training": {"strategy": "eagle3"}}, "must be dflash to be translated; found 'eagle3'"),
        ("specforge", {}, "must be dflash to be translated"),  # their default is another strategy
        ("speculators", {"train": {"speculator_type": "dspark"}}, "found 'dspark'"),
        ("speculators", {"speculator_type": "dflash", "dflash": {"sample_from_anchor": True}}, "sample_from_anchor"),
        ("speculators", {"speculator_type": "dflash", "draft": {"target_layer_ids": [0, 4]}}, "0 is the embedding"),
        ("speculators", {"speculator_type": "dflash", "trainer": {"epochs": 0}}, "epochs must be at least 1"),
        ("speculators", {"speculator_type": "dflash", "loss": {"loss_fn": "{x"}}, "loss.loss_fn must be"),
        ("automodel", {}, "--from must be one of specforge, speculators"),
    ],
)
def test_what_cannot_be_translated_is_refused(tmp_path: Path, peer: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate(peer, _write(tmp_path, values))


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"theirs\.yaml must"):
        translate("specforge", tmp_path / "theirs.yaml")


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    theirs = str(_write(tmp_path, SPECULATORS))
    assert run_config(parser.parse_args(["--from", "speculators", theirs])) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["epochs"] == 10
    assert "trainer.checkpoint_freq=0.5: checkpoint.every counts steps" in printed.err
    out = ["--output", str(tmp_path / "ours.yaml")]
    assert run_config(parser.parse_args(["--from", "speculators", theirs, *out])) == 0
    assert (tmp_path / "ours.yaml").read_text() == printed.out
    with pytest.raises(ValueError, match="--output must name a new file"):
        run_config(parser.parse_args(["--from", "speculators", theirs, *out]))
