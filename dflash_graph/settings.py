"""Which settings a resumed run may change: identity settings never, free settings with a printed line.

Every key of the configuration is in exactly one class; a key in neither is an error, so that a new key cannot be
forgotten. Called by `training.py` when it resumes; knows nothing of files or tensors.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

# They decide which jobs exist, what a job trains, or what the stored tensors mean. "derived" holds facts that follow
# from data and target: data fingerprint, bucket list, resolved taps, mask token, ...
IDENTITY_KEYS = frozenset(
    {
        "seed",
        "derived",
        *(f"target.{key}" for key in ("path", "gguf_file", "revision", "dtype", "trust_remote_code")),
        *(f"data.{key}" for key in ("train", "validation", "max_length", "chat_template")),
        *(f"data.{key}" for key in ("holdout", "deduplicate", "overlong")),
        *(f"schedule.{key}" for key in ("token_budget", "num_buckets", "order", "draw", "jobs_per_step")),
        *(f"drafter.{key}" for key in ("num_hidden_layers", "block_size", "target_layer_ids", "mask_token_id")),
        *(f"drafter.{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")),
        *(f"drafter.{key}" for key in ("layer_types", "sliding_window", "causal", "draft_vocab_size")),
        *(f"drafter.{key}" for key in ("anchor_rate", "num_anchors_per_sample", "num_anchors", "loss_decay_gamma")),
        "drafter.compute_dtype",
        *(f"loss.{key}" for key in ("weighting", "d_pace_alpha", "labels", "kl_weight")),
        "features.dtype",
    }
)
# They decide how fast, where, for how long and how closely watched the run is.
FREE_KEYS = frozenset(
    {
        *("run_dir", "epochs", "optim", "log", "eval", "checkpoint", "devices", "graphs"),
        *(f"features.{key}" for key in ("source", "path", "missing", "readers", "shard_mib")),
        *("data.cache_dir", "data.workers", "drafter.init", "drafter.num_micro_step_sizes"),
        *(f"schedule.{key}" for key in ("slots", "min_ready", "padding_workers", "reorder_window", "wait_timeout_s")),
    }
)
_NOTES = {
    "schedule.min_ready": "epochs that are scheduled already keep their draw order",
    "epochs": "the learning rate follows the new number of jobs from here on",
    "drafter.init": "no effect: the weights come from the checkpoint",
}
# Keys that the first checkpoints lack, and what those runs did.
_ADDED: dict[str, Any] = {
    "data.holdout": None,
    "data.deduplicate": "none",
    "data.overlong": "truncate",
    "data.workers": None,
    "loss.weighting": "decay",
    "loss.d_pace_alpha": 0.5,
    "loss.labels": "data",
    "loss.kl_weight": 0.0,
    "devices.kernels": "auto",
    "devices.anchor_groups": None,
    "devices.target_devices": None,
    "devices.layout": "auto",
    "devices.split_targets": None,
    "devices.ranks": None,
    "devices.rank_jobs": None,
    "devices.rank_timeout_s": 60.0,
    "devices.check_every": 100,
    "graphs.mode": "auto",
    "graphs.warmups": 3,
    "graphs.debug_steps": 3,
    "graphs.debug_every": None,
    "graphs.strict": False,
    "eval.every": None,
    "eval.prompts": [],
    "eval.num_prompts": 32,
    "eval.max_new_tokens": 128,
    "features.source": "online",
    "features.path": None,
    "features.dtype": "auto",
    "features.missing": "error",
    "features.readers": 4,
    "features.shard_mib": 1024,
}
_ABSENT = "(absent)"


def setting_class(key: str) -> Literal["identity", "free"]:
    """Class of a dotted configuration key; a section that is classed as a whole covers its keys.

    Raises:
        ValueError: the key is in no class.
    """
    for name in (key, key.partition(".")[0]):
        if name in IDENTITY_KEYS:
            return "identity"
        if name in FREE_KEYS:
            return "free"
    raise ValueError(f"setting {key!r} must be classed as identity or free in settings.py; found in neither")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def compare_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that resumes it.

    Args:
        old, new: nested plain values of `Config.to_dict()`, with derived facts under the extra key "derived".

    Returns:
        One line `key: old -> new` for each free setting that changed, to be printed.

    Raises:
        ValueError: identity settings changed; the message lists each of them.
    """
    # Through JSON, as the checkpoint's went: tuples become lists, at any depth.
    before, after = (_flatten(json.loads(json.dumps(settings))) for settings in (old, new))
    before = {key: value for key, value in _ADDED.items() if key in after} | before
    changed: dict[str, list[str]] = {"identity": [], "free": []}
    for key in sorted(before.keys() | after.keys()):
        kind, was, now = setting_class(key), before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was != now:
            note = f" ({_NOTES[key]})" if key in _NOTES else ""
            changed[kind].append(f"{key}: {was} -> {now}{note}")
    if changed["identity"]:
        raise ValueError(
            "a resumed run must keep the settings that say what is trained on what; changed since the checkpoint:\n  "
            + "\n  ".join(changed["identity"])
            + "\nSet them back, or start a new run in another run_dir"
        )
    return changed["free"]
