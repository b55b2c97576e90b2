"""Fixed-shape training engine for DFlash drafters: `load_config`, then `prepare`, `debug`, `train`, `evaluate`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_graph.config import Config, load_config
    from dflash_graph.data import prepare
    from dflash_graph.debugging import debug
    from dflash_graph.evaluation import evaluate
    from dflash_graph.training import train

__all__ = ["Config", "debug", "evaluate", "load_config", "prepare", "train"]
__version__ = "0.1.0"

_PLACES = {
    "Config": "config",
    "load_config": "config",
    "prepare": "data",
    "debug": "debugging",
    "evaluate": "evaluation",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Import on first use: importing the package does nothing and costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'dflash_graph' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dflash_graph.{_PLACES[name]}"), name)
