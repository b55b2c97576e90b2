"""Structure: imports point one way, kernels stand alone, and importing the package does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_graph

PACKAGE = Path(dflash_graph.__file__).parent
# A module may import those before it. docs/design.md has the same order.
ORDER = [
    "control", "findings", "op_rules", "traces", "frozen_world", "interception", "tracing", "graph_backends", "graphs",
    "observer", "config_groups", "config", "row_values", "row_messages", "row_shapes", "chat_template", "turn_marks",
    "turn_spans", "tag_spans", "chat", "row_keys", "json_documents", "source_files", "spill", "sources", "shards",
    "shard_worker", "shard_runner", "work_folder", "tokenizer", "data_report", "selection", "data_writer", "token_rows",
    "mask_token", "data", "held_out_rows", "inspection", "schedule", "padding", "dispatch", "ring", "pool",
    "static_buffers", "memory", "attention", "target", "store_codec", "store_identity", "store_shard", "store",
    "store_writer", "store_target", "store_plan", "kernels", "counters", "drafter", "step", "counts", "trackers",
    "metrics", "settings", "serving_layouts", "released", "checkpoint_files", "checkpoint", "initialise",
    "plain_drafter", "sampling", "cached_target", "decoding", "step_times", "near_ties", "drafter_folder", "prompts",
    "baselines", "report", "evaluation", "eval_plot", "server_client", "server_eval", "answer_log", "regenerate",
    "regenerate_command", "eval_command", "plot", "balance", "plan", "layout", "stage_times", "rank_share",
    "rank_watch", "ranks", "export", "export_command", "prepare_command", "translate", "handoff", "workers",
    "store_worker", "store_build", "store_formats", "store_import", "store_compare", "store_verify", "store_command",
    "held_out", "progress", "rank_checks", "trainer", "training", "launch", "train_command", "debug_checks",
    "debugging", "__init__", "__main__",
]  # fmt: skip


def _imported(path: Path) -> set[str]:
    """Package modules that a file imports at run time (imports for type checkers alone do not count)."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dflash_graph":
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dflash_graph.")}
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_imports_point_one_way(path: Path) -> None:
    assert path.stem in ORDER, f"{path.stem} has no place in the order"
    later = [name for name in _imported(path) if name in ORDER and ORDER.index(name) >= ORDER.index(path.stem)]
    assert not later, f"{path.stem} imports {later}, which come after it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=lambda p: p.stem)
def test_kernels_import_nothing_else_of_the_package(path: Path) -> None:
    assert _imported(path) <= {"kernels"}


def test_import_does_nothing_heavy_and_needs_no_triton() -> None:
    code = (
        "import sys\n"
        "class NoTriton:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTriton())\n"
        "import dflash_graph\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy imports'\n"
        "import dflash_graph.data, dflash_graph.schedule, dflash_graph.training\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
