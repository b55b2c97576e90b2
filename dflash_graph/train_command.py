"""The command `dflash-graph train`: one process, or the launcher of several, or one of the several.

Called by the command line. `training.train` is the same run from Python, in one process.
"""

import argparse
import os

from dflash_graph.config import load_config
from dflash_graph.launch import launch, nodes_of_torchrun
from dflash_graph.rank_watch import RANK_DIR


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dflash-graph train`, beside --config and the overrides."""
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|PATH",
        help="'auto' continues from the run folder's newest whole checkpoint or starts fresh; PATH names a checkpoint",
    )
    parser.add_argument(
        "--graphs",
        choices=("auto", "cuda_graph", "eager", "recorded", "debug"),
        help="how steps run, short for graphs.mode; debug checks the first steps and names what a graph cannot hold",
    )
    parser.add_argument("--dry-run", action="store_true", help="validate, print the plan and its buffers, run one step")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="with several ranks: start all of them again after a failure, from the last checkpoint, at most N times",
    )


def run_train(args: argparse.Namespace) -> int:
    """Run `dflash-graph train`."""
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts must not be negative; found {args.max_restarts}")
    overrides = [*args.overrides] if args.graphs is None else [*args.overrides, f"graphs.mode={args.graphs}"]
    config = load_config(args.config, overrides)
    from dflash_graph.layout import resolve_layout

    if RANK_DIR not in os.environ:
        import torch

        layout = resolve_layout(config.devices, num_cuda=torch.cuda.device_count())
        nodes = nodes_of_torchrun()
        if nodes is not None or len(layout.ranks) > 1:
            command = ["-m", "dflash_graph", *args.argv]
            return launch(command, len(layout.ranks), nodes=nodes, max_restarts=args.max_restarts)
        if args.max_restarts:
            raise ValueError("--max-restarts is for runs of several ranks; found one. Leave it out")
    from dflash_graph.training import train

    train(config, resume=args.resume, dry_run=args.dry_run)
    return 0
