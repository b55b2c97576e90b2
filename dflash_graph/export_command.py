"""The arguments of `dflash-graph export`, apart from the work, so that other commands need not import torch for them.

Called by the command line; the work is `export.py`.
"""

import argparse
from pathlib import Path


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dflash-graph export` to its parser."""
    parser.add_argument("run", type=Path, help="run folder or checkpoint folder; with --untrained a YAML configuration")
    parser.add_argument(
        "--to",
        choices=("hf", "speculators"),
        default="hf",
        help="hf: z-lab's dflash, vLLM and SGLang; speculators: that package, and vLLM",
    )
    parser.add_argument("--output", type=Path, help="a new or empty folder (default: export/ in the run folder)")
    parser.add_argument(
        "--untrained", action="store_true", help="a random drafter as configured, to test a serving stack"
    )
    parser.add_argument(
        "--full-head", action="store_true", help="a drafter with a reduced head as hf, to be run with the full one"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, with --untrained")


def run_export(args: argparse.Namespace) -> int:
    """Run `dflash-graph export` and print where the drafter is and how to serve it."""
    from dflash_graph.export import export

    print(
        export(
            args.run,
            to=args.to,
            output=args.output,
            untrained=args.untrained,
            overrides=args.overrides,
            full_head=args.full_head,
        )
    )
    return 0
