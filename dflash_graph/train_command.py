"""The command `dflash-graph train`: one process, or the launcher of several, or one of the several.

Called by the command line. `training.train` is the same run from Python, in one process.
"""

import argparse
import os

from dflash_graph.config import Config, load_config
from dflash_graph.launch import launch, nodes_of_torchrun
from dflash_graph.layout import Layout, candidates, needs_times, resolve_layout
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
    layout = None
    if RANK_DIR not in os.environ:
        nodes, layout = nodes_of_torchrun(), _layout(config)
        if nodes is not None or layout.kind != "single":
            print(f"layout    {layout}", flush=True)
        if nodes is not None or len(layout.ranks) > 1:
            command = ["-m", "dflash_graph", *args.argv]
            return launch(command, layout, nodes=nodes, max_restarts=args.max_restarts)
        if args.max_restarts:
            raise ValueError("--max-restarts is for runs of several ranks; found one. Leave it out")
    from dflash_graph.training import train

    train(config, resume=args.resume, dry_run=args.dry_run, layout=layout)
    return 0


def _layout(config: Config) -> Layout:
    """The ranks of this machine. Where there is a choice, the fastest layout that fits, and what was compared."""
    import torch

    count = torch.cuda.device_count() if config.devices.device == "cuda" else 0
    times = None
    if needs_times(config.devices, count):
        from dflash_graph.plan import make_plan
        from dflash_graph.stage_times import stage_times

        times = stage_times(make_plan(config), torch.cuda.get_device_properties(0).total_memory)
        compared = ", ".join(map(str, candidates(count, times)))
        print(f"layout    planned for one rate of all GPUs: {compared}", flush=True)
    return resolve_layout(config.devices, num_cuda=count, times=times)
