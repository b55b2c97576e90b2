"""Shared test set-up: seeds, poisoned empty tensors, and the markers `gpu` and `slow`."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter. Triton reads this once, when it is imported, so no test
# module may import it earlier; ahead-of-time compilation runs in a process without it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (minutes each)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Uninitialised memory is NaN (or a huge integer): reading it shows.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # toy sizes: more threads would only wait for each other


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small target, training rows and held-out rows, for whole runs (`tests/tiny.py`)."""
    from tests.tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder
