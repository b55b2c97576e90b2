"""Configuration: overrides, refusals, and the round trip through the run folder."""

from pathlib import Path

import pytest

from dflash_graph.config import Config, config_from_dict, load_config, save_config

LEAST = ["run_dir=runs/x", "target.path=some/model", "data.train=[a.jsonl]"]


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: r\ntarget: {path: m}\ndata: {train: [a.jsonl, b.jsonl]}\nepochs: 3\noptim: {lr: 1e-3}\n")
    config = load_config(file, ["optim.lr=3e-4", "drafter.target_layer_ids=[1, 5]"])
    assert config.optim.lr == 3e-4
    assert config.epochs == 3
    assert config.data.train == ("a.jsonl", "b.jsonl")
    assert config.drafter.target_layer_ids == (1, 5)
    assert config.optim.betas == (0.9, 0.95)


def test_derived_values() -> None:
    config = load_config(None, LEAST)
    assert (config.token_budget, config.num_anchors, config.drafter.gamma) == (16384, 2048, 7.0)
    config = load_config(None, [*LEAST, "data.max_length=20000", "drafter.block_size=8"])
    assert (config.token_budget, config.drafter.gamma) == (20032, 4.0)
    assert load_config(None, [*LEAST, "drafter.loss_decay_gamma=2.5"]).drafter.gamma == 2.5


def test_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, [*LEAST, "optim.lr=3e-4", "drafter.num_hidden_layers=2", "schedule.slots=14"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'"),
        ("drafter.block=4", "did you mean 'drafter.block_size'"),
        ("zzz=1", "unknown key 'zzz'"),
        ("optim.lr=-1", "optim.lr must be positive and finite; found -1"),
        ("optim.lr=fast", "optim.lr"),
        ("epochs=0", "epochs must be at least 1; found 0"),
        ("epochs=1.5", "epochs"),
        ("drafter.block_size=1", "drafter.block_size must be at least 2"),
        ("drafter.anchor_rate=0", "drafter.anchor_rate must be in"),
        ("drafter.layer_types=[full_attention]", "must name all 5 layers"),
        ("drafter.sliding_window=64", "go together"),
        ("schedule.draw=lottery", "schedule.draw"),
        ("schedule.token_budget=512", "must hold one row of data.max_length"),
        ("data.train=[]", "at least one JSONL file"),
        ("devices.device=tpu", "devices.device"),
        ("optim.warmup_ratio=1", "optim.warmup_ratio"),
        ("log.every=0", "log.every must be at least 1"),
        ("graphs.warmups=2", "graphs.warmups must be at least 3; found 2"),
        ("graphs.debug_every=0", "graphs.debug_every must be at least 1"),
        ("graphs.mode=cuda_graph", "found devices.device=cpu. On a CPU use recorded"),
        ("devices.anchor_groups=0", "devices.anchor_groups must be at least 1"),
        ("checkpoint.keep=0", "checkpoint.keep"),
        ("seed=-1", "seed"),
        ("loss.kl_weight=1.5", "loss.kl_weight must be in [0, 1]; found 1.5"),
        ("loss.kl_weight=-0.1", "loss.kl_weight must be in [0, 1]"),
        ("loss.kl_weight=nan", "loss.kl_weight"),
        ("loss.d_pace_alpha=-1", "loss.d_pace_alpha must be in [0, 1]; found -1"),
        ("loss.d_pace_alpha=0.4", "has no effect with loss.weighting=decay; set loss.weighting=d_pace"),
        ("loss.labels=mine", "loss.labels"),
        ("loss.weighting=linear", "loss.weighting"),
        ("devices.kernels=cuda", "devices.kernels"),
    ],
)
def test_bad_setting_is_refused_with_its_name(override: str, message: str) -> None:
    with pytest.raises(ValueError, match="invalid configuration") as caught:
        load_config(None, [*LEAST, override])
    assert message in str(caught.value)


def test_loss_options() -> None:
    plain = load_config(None, LEAST)
    assert not plain.loss.with_teacher
    assert (plain.loss.weighting, plain.loss.labels, plain.loss.kl_weight) == ("decay", "data", 0.0)
    assert plain.devices.implementation is None
    both = load_config(None, [*LEAST, "loss.weighting=d_pace", "loss.d_pace_alpha=0", "loss.kl_weight=1"])
    assert both.loss.with_teacher
    assert both.loss.with_kl
    labels = load_config(None, [*LEAST, "loss.labels=target", "devices.kernels=torch"])
    assert labels.loss.with_teacher
    assert not labels.loss.with_kl
    assert labels.devices.implementation == "torch"
    with pytest.raises(ValueError, match=r"loss_decay_gamma=3\.0 has no effect with loss\.weighting=d_pace"):
        load_config(None, [*LEAST, "loss.weighting=d_pace", "drafter.loss_decay_gamma=3"])


def test_missing_settings_are_all_named() -> None:
    with pytest.raises(ValueError, match="missing key 'run_dir'") as caught:
        config_from_dict({})
    assert "'target'" in str(caught.value)
    assert "'data'" in str(caught.value)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="existing YAML file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="key=value"):
        load_config(None, [*LEAST, "epochs"])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match="YAML"):
        load_config(tmp_path / "broken.yaml")


def test_configuration_is_frozen() -> None:
    config: Config = load_config(None, LEAST)
    with pytest.raises(AttributeError):
        config.epochs = 2  # type: ignore[misc]
