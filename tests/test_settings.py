"""Settings on resume: every key has a class, identity is refused, free changes are listed."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from dflash_graph.config import Config, config_from_dict
from dflash_graph.settings import FREE_KEYS, IDENTITY_KEYS, compare_settings, setting_class


def make(**changes: Any) -> dict[str, Any]:
    """Settings of a run; `changes` by dotted key, with __ for the dot."""
    values: dict[str, Any] = {"run_dir": "runs/a", "target": {"path": "t"}, "data": {"train": ["a.jsonl"]}}
    for key, value in changes.items():
        *section, name = key.split("__")
        (values.setdefault(section[0], {}) if section else values)[name] = value
    derived = values.pop("derived", {"data_fingerprint": "f", "buckets": [[64, 4]]})
    return config_from_dict(values).to_dict() | {"derived": derived}


def leaves(cls: type, prefix: str = "") -> list[str]:
    found = []
    for f in fields(cls):
        nested = f.type if isinstance(f.type, type) and is_dataclass(f.type) else None
        found += leaves(nested, f"{prefix}{f.name}.") if nested else [prefix + f.name]
    return found


def test_every_key_is_in_exactly_one_class() -> None:
    keys = leaves(Config)
    assert len(keys) > 50
    for key in keys:
        assert setting_class(key) in ("identity", "free")
    sections = {key.partition(".")[0] for key in keys}
    assert not IDENTITY_KEYS & FREE_KEYS
    stale = (IDENTITY_KEYS | FREE_KEYS) - set(keys) - sections - {"derived"}
    assert not stale, "classed, but not a key of the configuration"
    for key in IDENTITY_KEYS | FREE_KEYS:
        assert key == key.partition(".")[0] or key.partition(".")[0] not in IDENTITY_KEYS | FREE_KEYS, key


def test_an_unclassed_key_is_an_error() -> None:
    old = make()
    with pytest.raises(ValueError, match=r"'drafter\.new_option' must be classed"):
        compare_settings(old, old | {"drafter": old["drafter"] | {"new_option": 1}})


def test_equal_settings_through_json() -> None:
    assert compare_settings(json.loads(json.dumps(make())), make()) == []


def test_free_changes_are_listed_old_to_new() -> None:
    old = json.loads(json.dumps(make()))
    new = make(
        run_dir="runs/b", epochs=9, optim__lr=1e-3, log__every=5, checkpoint__keep=1, devices__num_targets=2,
        schedule__slots=15, schedule__min_ready=4, data__cache_dir="c", drafter__init="target",
        drafter__num_micro_step_sizes=2, optim__betas=(0.8, 0.9), schedule__wait_timeout_s=5,
    )  # fmt: skip
    lines = compare_settings(old, new)
    assert len(lines) == 13
    assert "run_dir: runs/a -> runs/b" in lines
    assert "optim.lr: 0.0006 -> 0.001" in lines
    assert "optim.betas: [0.9, 0.95] -> [0.8, 0.9]" in lines
    assert any(
        line.startswith("schedule.min_ready: None -> 4 (epochs that are scheduled already keep") for line in lines
    )


@pytest.mark.parametrize(
    "change, text",
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"target__path": "u"}, "target.path: t -> u"),
        ({"data__train": ["b.jsonl"]}, r"data.train: \['a.jsonl'\] -> \['b.jsonl'\]"),
        ({"data__max_length": 512}, "data.max_length: 4096 -> 512"),
        ({"schedule__draw": "ready"}, "schedule.draw: seeded -> ready"),
        ({"schedule__jobs_per_step": 4}, "schedule.jobs_per_step: 8 -> 4"),
        ({"drafter__block_size": 8}, "drafter.block_size: 16 -> 8"),
        ({"drafter__target_layer_ids": (1, 2)}, r"drafter.target_layer_ids: None -> \[1, 2\]"),
        ({"drafter__loss_decay_gamma": 3.0}, "drafter.loss_decay_gamma: None -> 3.0"),
        ({"loss__kl_weight": 0.5}, "loss.kl_weight: 0.0 -> 0.5"),
        ({"loss__labels": "target"}, "loss.labels: data -> target"),
        ({"loss__weighting": "d_pace"}, "loss.weighting: decay -> d_pace"),
        ({"loss__weighting": "d_pace", "loss__d_pace_alpha": 0.2}, "loss.d_pace_alpha: 0.5 -> 0.2"),
        ({"derived": {"data_fingerprint": "g", "buckets": [[64, 4]]}}, "derived.data_fingerprint: f -> g"),
        ({"derived": {"buckets": [[64, 4]]}}, r"derived.data_fingerprint: f -> \(absent\)"),
    ],
)
def test_identity_changes_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compare_settings(make(), make(**change))


def test_a_checkpoint_from_before_the_loss_options_has_their_defaults() -> None:
    old = make()
    del old["loss"]
    del old["devices"]["kernels"]
    assert compare_settings(old, make()) == []
    assert compare_settings(old, make(devices__kernels="torch")) == ["devices.kernels: auto -> torch"]
    with pytest.raises(ValueError, match=r"loss\.kl_weight: 0\.0 -> 0\.5"):
        compare_settings(old, make(loss__kl_weight=0.5))


def test_all_identity_changes_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)drafter\.causal: False -> True.*seed: 0 -> 5.*another run_dir") as error:
        compare_settings(make(), make(seed=5, drafter__causal=True, epochs=7))
    assert "epochs" not in str(error.value)
