"""The one configuration of a run: typed, frozen, validated when made, with the ecosystem's key names.

`load_config` reads YAML and `key=value` overrides; everything else of the package receives the finished `Config`.
Values that follow from others are properties, so that a saved configuration holds only what the user chose.
"""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.dataclasses import dataclass
from yaml import YAMLError

from dflash_graph.config_groups import STRICT, require
from dflash_graph.config_groups import CheckpointConfig as CheckpointConfig
from dflash_graph.config_groups import DataConfig as DataConfig
from dflash_graph.config_groups import DeviceConfig as DeviceConfig
from dflash_graph.config_groups import DrafterConfig as DrafterConfig
from dflash_graph.config_groups import EvalConfig as EvalConfig
from dflash_graph.config_groups import FeaturesConfig as FeaturesConfig
from dflash_graph.config_groups import GraphConfig as GraphConfig
from dflash_graph.config_groups import LogConfig as LogConfig
from dflash_graph.config_groups import LossConfig as LossConfig
from dflash_graph.config_groups import OptimConfig as OptimConfig
from dflash_graph.config_groups import ScheduleConfig as ScheduleConfig
from dflash_graph.config_groups import TargetConfig as TargetConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A run. `run_dir` receives everything it writes: configuration, schedules, metrics, checkpoints."""

    run_dir: str
    target: TargetConfig
    data: DataConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    seed: int = 0
    epochs: int = 6

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs must be at least 1; found {self.epochs}")
        require(0 <= self.seed < 2**63, f"seed must be a non-negative 63-bit integer; found {self.seed}")
        require(
            self.token_budget >= self.data.max_length,
            f"schedule.token_budget must hold one row of data.max_length = {self.data.max_length} tokens; found "
            f"{self.token_budget}. Raise the budget or lower max_length",
        )
        mode, device = self.graphs.mode, self.devices.device
        require(
            (mode, device) not in (("cuda_graph", "cpu"), ("recorded", "cuda")),
            f"graphs.mode={mode} needs the other kind of device; found devices.device={device}. On a CPU use recorded, "
            "on CUDA use cuda_graph",
        )
        require(
            self.features.source == "online" or not self.loss.with_teacher,
            "features.source=store holds the target's hidden states at its taps; loss.kl_weight > 0 and "
            "loss.labels=target need its last layers as well, at every step. Set features.source=online, or "
            "loss.kl_weight=0 and loss.labels=data",
        )
        gamma = self.drafter.loss_decay_gamma
        require(
            gamma is None or self.loss.weighting == "decay",
            f"drafter.loss_decay_gamma={gamma} has no effect with loss.weighting={self.loss.weighting}; leave one out",
        )

    @property
    def token_budget(self) -> int:
        """T. The default is max(16384, max_length), rounded up to a multiple of 64."""
        chosen = self.schedule.token_budget
        return chosen if chosen is not None else -(-max(16384, self.data.max_length) // 64) * 64

    @property
    def num_anchors(self) -> int:
        """A, anchors one job can hold."""
        chosen = self.drafter.num_anchors
        return chosen if chosen is not None else max(1, self.token_budget // 8)

    @property
    def graph_mode(self) -> Literal["cuda_graph", "eager", "recorded", "debug"]:
        """`graphs.mode`, with "auto" decided."""
        if self.graphs.mode != "auto":
            return self.graphs.mode
        return "cuda_graph" if self.devices.device == "cuda" else "eager"

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict of every setting, as saved in the run folder."""
        return asdict(self)


def _known_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for f in fields(cls):
        keys.append(prefix + f.name)
        if is_dataclass(f.type) and isinstance(f.type, type):
            keys += _known_keys(f.type, f"{prefix}{f.name}.")
    return keys


def _explain(error: pydantic.ValidationError) -> str:
    known = _known_keys(Config)
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "unexpected_keyword_argument":
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
            lines.append(f"unknown key {key!r}{hint}")
        elif item["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            lines.append(f"missing key {key!r}: set it in the file or as {key}=...")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{key}: {item['msg']}; found {item['input']!r}")
    return "\n".join(lines)


def _misplaced_bools(cls: type, values: Any, prefix: str = "") -> list[str]:
    """Keys that want a number and hold true or false, which pydantic would read as 1 and 0."""
    if not isinstance(values, dict):
        return []
    found = []
    for f in fields(cls):
        value = values.get(f.name)
        if is_dataclass(f.type) and isinstance(f.type, type):
            found += _misplaced_bools(f.type, value, f"{prefix}{f.name}.")
        elif isinstance(value, bool) and "bool" not in str(f.type):
            found.append(f"{prefix}{f.name}: must be a value of its own, not true or false; found {value}")
    return found


def config_from_dict(values: dict[str, Any]) -> Config:
    """Build and validate a `Config` from nested plain values.

    Raises:
        ValueError: an unknown, missing or invalid key; the message names each of them.
    """
    if bools := _misplaced_bools(Config, values):
        raise ValueError("invalid configuration:\n" + "\n".join(bools))
    try:
        return pydantic.TypeAdapter(Config).validate_python(values)
    except pydantic.ValidationError as error:
        raise ValueError(f"invalid configuration:\n{_explain(error)}") from None


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (optional) and apply `key=value` overrides such as `optim.lr=3e-4`.

    Raises:
        ValueError: the file is missing or not YAML, an override has no '=', or a key is unknown or invalid.
    """
    base = OmegaConf.create()
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"--config must name an existing YAML file; found {str(path)!r}")
        try:
            loaded = OmegaConf.load(path)
        except (YAMLError, OSError) as error:
            raise ValueError(f"{path} is not readable YAML: {error}") from None
        if not OmegaConf.is_dict(loaded):
            raise ValueError(f"{path} must hold a mapping of keys to values")
        base = loaded  # type: ignore[assignment]
    for item in overrides:
        if "=" not in item:
            raise ValueError(f"an override must look like key=value; found {item!r}")
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides))), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"cannot read the configuration: {error}") from None
    return config_from_dict(merged)  # type: ignore[arg-type]


def save_config(config: Config, path: str | Path) -> None:
    """Write every setting, defaults included, as YAML that `load_config` reads back to an equal `Config`."""
    OmegaConf.save(OmegaConf.create(pydantic.TypeAdapter(Config).dump_python(config, mode="json")), path)
