"""`dflash-graph config --from specforge|speculators FILE`: another trainer's configuration as one of ours.

Every key of the file is either translated or listed with the reason why it has no counterpart, and so is every default
of theirs that differs from ours: nothing is dropped in silence. Names and defaults are those of SpecForge 0.2.0
(`specforge/config/schema.py`) and speculators 0.9.0 (`speculators/train/config/schema.py`). Called by the command line
and by users.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from dflash_graph.config import TargetConfig, config_from_dict

Peer = Literal["specforge", "speculators"]
SLIDING = "sliding_attention"
MISSING = "???"  # OmegaConf's mark of a value that somebody must still fill in

# Weights that do not decay, for a trainer whose default is uniform: gamma must be a finite number.
_UNIFORM_GAMMA = 1e9


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Settings for a configuration file of ours, and one line for each of theirs that has no counterpart."""

    peer: Peer
    source: str
    values: dict[str, Any]
    unmatched: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"# translated from {self.peer}: {self.source}"]
        if self.unmatched:
            lines += ["# without a counterpart:", *(f"#   {line}" for line in self.unmatched)]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.values, sort_keys=False)


class _Keys:
    """A peer's keys by dotted name. What is read is ticked off; `rest` is what nobody asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = _flat(values)
        self._left = dict(self._values)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or their default where the file has none."""
        self._left.pop(name, None)
        value = self._values.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def rest(self) -> dict[str, Any]:
        return {name: value for name, value in self._left.items() if value not in (None, "", [], {})}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _Draft:
    """The configuration in the making."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unmatched: list[str] = []

    def set(self, name: str, value: Any) -> None:
        if value is None:
            return
        *sections, key = name.split(".")
        place = self.values
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def note(self, line: str) -> None:
        self.unmatched.append(line)


def translate(peer: Peer, path: str | Path) -> Translation:
    """Translate a YAML or JSON configuration.

    Raises:
        ValueError: the file cannot be read, trains something other than DFlash, or holds a value that our
            configuration refuses.
    """
    if peer not in get_args(Peer):
        raise ValueError(f"--from must be one of {', '.join(get_args(Peer))}; found {peer!r}")
    path = Path(path)
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} must be a readable YAML or JSON file: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values")
    draft = _Draft()
    rules: dict[str, Callable[[dict[str, Any], _Draft, Path], None]] = {
        "specforge": _specforge,
        "speculators": _speculators,
    }
    rules[peer](read, draft, path)
    _check(draft.values)
    return Translation(peer=peer, source=str(path), values=draft.values, unmatched=tuple(draft.unmatched))


def _check(values: dict[str, Any]) -> None:
    """Our own validation, with stand-ins for what is still missing."""
    filled = json.loads(json.dumps(values).replace(json.dumps(MISSING), json.dumps("missing")))
    if filled["data"]["train"] == "missing":
        filled["data"]["train"] = ["missing"]
    config_from_dict(filled)


def _list_rest(keys: _Keys, draft: _Draft, reasons: Mapping[str, str]) -> None:
    """Every key that was not translated, with the longest matching reason."""
    for name, value in keys.rest().items():
        match = max((key for key in reasons if name == key or name.startswith(f"{key}.")), key=len, default=None)
        reason = reasons[match] if match else "no such setting here"
        draft.note(f"{name}={value}: {reason}")


# ---- SpecForge ------------------------------------------------------------------------------------------------------

_SPECFORGE_REASONS = {
    "model.target_backend": "the target runs inside this engine",
    "model.shard_target_output": "a target is not sharded here",
    "model.input_modality": "text only",
    "model.use_liger_kernel": "this engine has its own kernels",
    "model.embedding_key": "found by transformers",
    "model.lm_head_key": "found by transformers",
    "model.vocab_mapping_path": "drafter.draft_vocab_size takes the most frequent ids of the data itself",
    "model.load_target_embedding": "the embedding is always the target's, frozen",
    "model.aux_hidden_state_layer_ids": "their DFlash reads dflash_config.target_layer_ids of the draft configuration",
    "model.cache_dir": "the hub's own cache is used",
    "model.tokenizer_pad_token_id": "rows are padded without a pad token",
    "data.hidden_states_path": "`dflash-graph store add --from` takes them in; then features.source=store",
    "data.prompts_path": "name the file in data.train: rows of token ids with their mask are read, too",
    "data.eval_hidden_states_path": "name held-out conversations in data.validation",
    "data.chat_template": "the tokenizer's own template is used, or a Jinja file in data.chat_template",
    "data.is_preformatted": "rows are conversations",
    "data.train_only_last_turn": "every assistant turn is supervised",
    "data.build_dataset_num_proc": "data.workers; None is one per core where the data is worth it",
    "data.dataloader_num_workers": "schedule.padding_workers pads jobs; its default is enough",
    "data.max_prompts": "max_rows of a source: data.train=[{path: FILE, max_rows: N}]",
    "training.max_steps": "a run is epochs long",
    "training.total_steps": "the learning rate follows jobs trained / total jobs",
    "training.batch_size": "a step is schedule.jobs_per_step jobs of schedule.token_budget positions, not rows",
    "training.accumulation_steps": "a step is schedule.jobs_per_step jobs, all accumulated",
    "training.fsdp_sharding": "the drafter is not sharded",
    "training.optimizer_cpu_offload": "masters and moments stay on the drafter's device",
    "training.attention_backend": "this engine has its own attention",
    "training.objective_chunk_blocks": "the head and the loss are one operator here",
    "training.eval_interval": "log.validate_every, with data.validation",
    "training.resume_from": "pass --resume to the command",
    "training.role": "every rank has targets and a drafter; see devices.layout",
    "training.prompt_seed": "seed decides the order, too",
    "tracking": "log.trackers and log.project; each service is configured as its package says",
    "profiling": "no such setting here",
    "runtime": "the ring's size is schedule.slots",
    "deployment": "devices says where the work runs",
}


_TRACKERS = ("wandb", "trackio", "mlflow")


def _specforge(read: dict[str, Any], draft: _Draft, path: Path) -> None:
    keys = _Keys(read)
    strategy = keys.get("training.strategy", "eagle3")
    if strategy != "dflash":
        raise ValueError(f"training.strategy must be dflash to be translated; found {strategy!r} in {path}")
    output, run_id = keys.get("output_dir", "./output"), keys.get("run_id", "specforge-run")
    draft.set("run_dir", str(Path(output) / run_id))
    draft.set("target.path", keys.get("model.target_model_path", MISSING))
    draft.set("target.trust_remote_code", keys.get("model.trust_remote_code"))
    draft.set("target.dtype", keys.get("model.torch_dtype", "bfloat16"))
    train = keys.get("data.train_data_path")
    draft.set("data.train", [train] if train else MISSING)
    draft.set("data.max_length", keys.get("data.max_length", 2048))
    _specforge_drafter(keys, draft, path)
    draft.set("epochs", keys.get("training.num_epochs", 1))
    draft.set("seed", keys.get("training.seed", 42))
    draft.set("optim.lr", keys.get("training.learning_rate", 1e-4))
    draft.set("optim.betas", [0.9, 0.999])
    draft.set("optim.lr_schedule", keys.get("training.lr_scheduler", "cosine"))
    draft.set("optim.warmup_ratio", keys.get("training.warmup_ratio", 0.015))
    draft.set("optim.min_lr_ratio", 0.0)
    draft.set("optim.max_grad_norm", keys.get("training.max_grad_norm", 0.5))
    draft.set("log.every", keys.get("training.log_interval", 50))
    if interval := keys.get("training.save_interval", 0):
        draft.set("checkpoint.every", interval)
    if kept := keys.get("training.max_checkpoints", 0):
        draft.set("checkpoint.keep", kept)
    tracker = keys.get("tracking.report_to", "none")
    _trackers(draft, "tracking.report_to", [] if tracker == "none" else [tracker])
    draft.set("log.project", keys.get("tracking.wandb_project"))
    _list_rest(keys, draft, _SPECFORGE_REASONS)


def _trackers(draft: _Draft, key: str, names: Sequence[str]) -> None:
    draft.set("log.tensorboard", "tensorboard" in names)
    draft.set("log.trackers", [name for name in names if name in _TRACKERS] or None)
    if others := [name for name in names if name not in ("tensorboard", *_TRACKERS)]:
        draft.note(f"{key}={','.join(others)}: log.trackers knows {', '.join(_TRACKERS)}")


def _specforge_drafter(keys: _Keys, draft: _Draft, path: Path) -> None:
    layers, block_size, mask = (
        keys.get(f"model.{name}") for name in ("draft_num_hidden_layers", "draft_block_size", "mask_token_id")
    )
    described = _draft_file(keys.get("model.draft_model_config"), path, draft)
    inner = described.get("dflash_config") or {}
    count = layers or described.get("num_hidden_layers", 1)
    draft.set("drafter.num_hidden_layers", count)
    draft.set("drafter.block_size", block_size or inner.get("block_size") or described.get("block_size", 16))
    draft.set("drafter.mask_token_id", mask if mask is not None else inner.get("mask_token_id"))
    if layers in (None, described.get("num_hidden_layers")):  # they choose the taps anew for another number of layers
        draft.set("drafter.target_layer_ids", inner.get("target_layer_ids"))
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        draft.set(f"drafter.{name}", described.get(name))
    types = list(described.get("layer_types") or [])
    if SLIDING in types:
        if len(types) != count and len(set(types)) == 1:
            types = types[:1] * count
        draft.set("drafter.layer_types", types)
        draft.set("drafter.sliding_window", described.get("sliding_window"))
        draft.set("drafter.causal", True)
        if len(set(types)) > 1:
            draft.note(
                "layer_types mixes kinds: their full layers are bidirectional inside the block; here all are causal"
            )
    draft.set("drafter.init", keys.get("model.draft_checkpoint_path"))
    draft.set("drafter.num_anchors_per_sample", keys.get("training.num_anchors", 512))
    kind, alpha = keys.get("training.loss_type", "dflash"), keys.get("training.dpace_alpha")
    gamma = keys.get("training.loss_decay_gamma")
    if kind == "dpace":
        draft.set("loss.weighting", "d_pace")
        draft.set("loss.d_pace_alpha", alpha)
    elif kind == "dflash":
        draft.set("drafter.loss_decay_gamma", gamma if gamma and gamma > 0 else _UNIFORM_GAMMA)
        if alpha is not None:
            draft.note(f"training.dpace_alpha={alpha}: has no effect with loss_type=dflash")
    else:
        draft.note(f"training.loss_type={kind}: loss.weighting has decay and d_pace only; left at decay")
    if kind != "dflash" and gamma is not None:
        draft.note(f"training.loss_decay_gamma={gamma}: has no effect with loss_type={kind}")


def _draft_file(name: str | None, path: Path, draft: _Draft) -> dict[str, Any]:
    """The draft model's own JSON, where it is a local file or folder."""
    if name is None:
        return {}
    for place in (Path(name), path.parent / name):
        file = place / "config.json" if place.is_dir() else place
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"model.draft_model_config {file} must be JSON: {error}") from None
            return dict(found)
    draft.note(
        f"model.draft_model_config={name}: not a local file; set drafter.num_hidden_layers, block_size, "
        "target_layer_ids, mask_token_id, layer_types and sliding_window as it says"
    )
    return {}


# ---- speculators ----------------------------------------------------------------------------------------------------

_SPECULATORS_REASONS = {
    "dry_run": "pass --dry-run to the command",
    "deterministic_cuda": "runs are reproducible as far as the GPU's own kernels are",
    "draft.draft_config": "set drafter.num_hidden_layers, heads and sizes as it says",
    "draft.draft_arch": "layers are Qwen3's",
    "draft.draft_hidden_act": "layers are Qwen3's, with silu",
    "draft.draft_mrope_full_head_hack": "the rotary embedding is plain",
    "draft.token_freq_path": "the most frequent ids are counted in the data itself",
    "draft.d2t_path": "the most frequent ids are counted in the data itself",
    "draft.t2d_path": "the most frequent ids are counted in the data itself",
    "draft.norm_before_residual": "not of DFlash",
    "draft.embed_requires_grad": "the embedding is the target's, frozen",
    "draft.norm_before_fc": "not of DFlash",
    "draft.fc_norm": "not of DFlash",
    "draft.norm_output": "not of DFlash",
    "draft.draft_attn_impl": "this engine has its own attention",
    "data.data_path": "their preprocessed rows are not read; name the conversations in data.train",
    "data.train_data_ratio": "data.holdout is the other share, 1 - ratio",
    "data": "hidden states are computed as they are needed",
    "generation": "the target runs inside this engine",
    "loss": "not of DFlash",
    "scheduler": "the learning rate follows jobs trained / total jobs",
    "optimizer": "AdamW only, over all parameters",
    "trainer.checkpoint_freq": "checkpoint.every counts steps",
    "trainer.save_best": "the best by held-out accept_length is always kept",
    "trainer.no_resume_from_checkpoint": "a run resumes only with --resume",
    "trainer": "no such setting here",
    "logging": "log.trackers and log.project; each service is configured as its package says",
    "dflash2": "not of DFlash",
    "dspark": "not of DFlash",
    "xpress": "not of DFlash",
    "peagle": "not of DFlash",
    "mtp": "not of DFlash",
    "backend": "hidden states are computed as they are needed",
}


def _speculators(read: dict[str, Any], draft: _Draft, path: Path) -> None:
    stage = read.get("train")
    keys = _Keys(stage if isinstance(stage, dict) else read)
    kind = keys.get("speculator_type", "eagle3")
    if kind != "dflash":
        raise ValueError(f"speculator_type must be dflash to be translated; found {kind!r} in {path}")
    if keys.get("dflash.sample_from_anchor", False):
        raise ValueError("dflash.sample_from_anchor=true trains another block than ours: position 0 is the anchor here")
    draft.set("run_dir", keys.get("trainer.save_path", "./output/checkpoints"))
    target = keys.get("verifier.verifier_name_or_path", MISSING)
    draft.set("target.path", target)
    draft.set("target.trust_remote_code", keys.get("verifier.trust_remote_code"))
    draft.set("data.train", MISSING)
    if not keys.has("data.data_path"):
        draft.note("data.data_path=./output: their preprocessed rows are not read; name conversations in data.train")
    length = keys.get("data.total_seq_len", 8192)
    draft.set("data.max_length", length)
    draft.set("schedule.token_budget", -(-length // 64) * 64)
    draft.note("one packed sequence of data.total_seq_len a GPU and step there: set schedule.jobs_per_step accordingly")
    dtype = keys.get("data.hidden_states_dtype", "bfloat16")
    draft.set("target.dtype", dtype)
    draft.set("drafter.compute_dtype", dtype)
    _speculators_drafter(keys, draft, target)
    _speculators_loss(keys, draft)
    draft.set("epochs", keys.get("trainer.epochs", 20))
    draft.set("seed", keys.get("seed", 42))
    draft.set("log.every", keys.get("trainer.log_freq", 1))
    loggers = [name for name in str(keys.get("logging.logger", "")).split(",") if name]
    _trackers(draft, "logging.logger", loggers)
    _speculators_optimizer(keys, draft)
    _list_rest(keys, draft, _SPECULATORS_REASONS)


def _speculators_drafter(keys: _Keys, draft: _Draft, target: str) -> None:
    count = keys.get("draft.num_layers", 5)
    draft.set("drafter.num_hidden_layers", count)
    draft.set("drafter.block_size", keys.get("dflash.block_size", 16))
    draft.set("drafter.mask_token_id", keys.get("draft.mask_token_id"))
    draft.set("drafter.draft_vocab_size", keys.get("draft.draft_vocab_size"))
    draft.set("drafter.init", keys.get("draft.from_pretrained"))
    # Their id names a layer's input, ours its output.
    taps = keys.get("draft.target_layer_ids")
    if taps is None and Path(target).is_dir():
        from dflash_graph.target import read_facts  # torch and transformers only where they are needed

        n = read_facts(TargetConfig(path=target)).num_hidden_layers
        taps = [2, n // 2, n - 3]
    if taps is None:
        draft.note("draft.target_layer_ids: [2, n/2, n-3] there for n layers; set drafter.target_layer_ids to one less")
    elif 0 in taps:
        raise ValueError(f"draft.target_layer_ids 0 is the embedding, which is no tap here; found {taps}")
    else:
        draft.set("drafter.target_layer_ids", [k - 1 for k in taps])
    full, window = keys.get("draft.full_attention_indices", []), keys.get("draft.sliding_window", 2048)
    free = keys.get("draft.sliding_window_non_causal", False)
    types = ["full_attention" if i in full else SLIDING for i in range(count)]
    if SLIDING in types:
        draft.set("drafter.layer_types", types)
        draft.set("drafter.sliding_window", window)
        draft.set("drafter.causal", not free)
        draft.note(
            "draft.sliding_window: counted from the anchor there, from each position of the block here and in vLLM"
        )
        if full and not free:
            draft.note(
                "draft.full_attention_indices: full layers are bidirectional inside the block there, causal here"
            )
    draft.set("drafter.num_anchors", keys.get("data.max_anchors", 512))
    draft.set("drafter.anchor_rate", 1.0)  # then thinned to num_anchors: as many as fit, as there


def _speculators_loss(keys: _Keys, draft: _Draft) -> None:
    draft.set("loss.labels", "target")  # their cross-entropy is against the verifier's most likely token
    name = keys.get("loss.loss_fn", "ce")
    try:
        parts = json.loads(name) if str(name).lstrip().startswith("{") else {name: 1.0}
    except ValueError as error:
        raise ValueError(f"loss.loss_fn must be a name or a JSON mapping; found {name!r}: {error}") from None
    known = {part: float(share) for part, share in parts.items() if part in ("ce", "kl_div")}
    if lost := sorted(parts.keys() - known.keys()):
        draft.note(f"loss.loss_fn={name}: {', '.join(lost)} has no counterpart (cross-entropy and KL only)")
    if total := sum(known.values()):
        draft.set("loss.kl_weight", known.get("kl_div", 0.0) / total)
    weighting = keys.get("dflash.per_position_loss_weight", "dpace")
    alpha, gamma = keys.get("dflash.dpace_alpha"), keys.get("dflash.dflash_decay_gamma")
    if weighting == "dpace":
        draft.set("loss.weighting", "d_pace")
        draft.set("loss.d_pace_alpha", alpha)
        if gamma is not None:
            draft.note(f"dflash.dflash_decay_gamma={gamma}: has no effect with per_position_loss_weight=dpace")
    else:
        draft.set("drafter.loss_decay_gamma", 4.0 if gamma is None else gamma)
        if alpha is not None:
            draft.note(f"dflash.dpace_alpha={alpha}: has no effect with per_position_loss_weight={weighting}")


def _speculators_optimizer(keys: _Keys, draft: _Draft) -> None:
    draft.set("optim.lr", keys.get("optimizer.lr", 1e-3))
    draft.set("optim.weight_decay", keys.get("optimizer.weight_decay", 0.01))
    draft.set("optim.betas", [0.9, 0.999])
    draft.set("optim.max_grad_norm", 1.0)
    draft.set("optim.min_lr_ratio", 0.0)
    kind = keys.get("optimizer.optimizer", "muon")
    if kind != "adamw":
        draft.note(f"optimizer.optimizer={kind}: AdamW only, over all parameters; tune optim.lr")
    schedule = keys.get("scheduler.scheduler_type", "linear")
    draft.set("optim.lr_schedule", "constant" if schedule == "none" else schedule)
    steps = keys.get("scheduler.scheduler_warmup_steps")
    draft.set("optim.warmup_ratio", keys.get("scheduler.scheduler_warmup_ratio", 0.01))
    if steps is not None:
        draft.note(f"scheduler.scheduler_warmup_steps={steps}: a share of all jobs here; set optim.warmup_ratio")


# ---- the command line -----------------------------------------------------------------------------------------------


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dflash-graph config`."""
    parser.add_argument("--from", dest="peer", choices=get_args(Peer), required=True, help="whose configuration it is")
    parser.add_argument("file", type=Path, help="their YAML or JSON file")
    parser.add_argument("--output", type=Path, help="write ours here instead of printing it; must not exist")


def run_config(args: argparse.Namespace) -> int:
    """`dflash-graph config`: our YAML on stdout or in `--output`; what has no counterpart is also listed on stderr."""
    translation = translate(args.peer, args.file)
    if args.output is None:
        print(translation, end="")
    else:
        try:
            with args.output.open("x", encoding="utf-8") as file:
                file.write(str(translation))
        except OSError as error:
            raise ValueError(f"--output must name a new file in an existing folder: {error}") from None
        print(f"wrote {args.output}")
    for line in translation.unmatched:
        print(f"without a counterpart: {line}", file=sys.stderr)
    return 0
