"""The arguments of `dflash-graph store`, apart from the work, so that other commands need not import torch for them.

Called by the command line; the work is `store_build.py`, `store_import.py`, `store_compare.py` and `store_verify.py`.
"""

import argparse
import sys
from pathlib import Path

from dflash_graph.config import Config, load_config


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `dflash-graph store` to its parser."""
    commands = parser.add_subparsers(dest="store_command", required=True)
    text = "write the features of all rows of a run into its store; goes on where it was stopped"
    build = commands.add_parser("build", help=text, description=text)
    build.add_argument("--part", default="1/1", metavar="I/N", help="only every N-th missing row, for N processes")
    build.add_argument("--partial", action="store_true", help="write as many rows as the disk holds")
    text = "say what a store holds"
    info = commands.add_parser("info", help=text, description=text)
    text = "read every row of a store and check it"
    verify = commands.add_parser("verify", help=text, description=text)
    verify.add_argument(
        "--remove", action="store_true", help="remove damaged shards, so that `build` writes them again"
    )
    text = "take in hidden states that vLLM, speculators or SpecForge wrote"
    add = commands.add_parser("add", help=text, description=text)
    text = "compare a store with this run's own target"
    compare = commands.add_parser("compare", help=text, description=text)
    for command in (info, verify, add, compare):
        command.add_argument("path", type=Path, help="the store")
    add.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="folder of hidden states")
    add.add_argument("--format", choices=("auto", "vllm", "speculators", "specforge"), default="auto")
    add.add_argument(
        "--layers",
        type=_ids,
        required=True,
        metavar="ID,ID,...",
        help="the layer ids that were saved, as that program counts them (the files do not say)",
    )
    add.add_argument("--partial", action="store_true", help="rows without a file and files without a row are accepted")
    compare.add_argument("--rows", type=int, default=100, help="rows to compare (100)")
    for command in (build, add, compare):
        command.add_argument("--config", type=Path, required=True, help="YAML file of settings")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as features.dtype=fp8")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, such as 2,18,33") from None


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part must be I/N with 1 <= I <= N, such as 2/8; found {text!r}")
    return int(number) - 1, int(count)


def _config(args: argparse.Namespace) -> Config:
    """The run's settings, over the store that the command names."""
    path = [] if args.store_command == "build" else ["features.source=store", f"features.path={args.path}"]
    return load_config(args.config, [*args.overrides, *path])


def run_store(args: argparse.Namespace) -> int:
    """Run one of the commands; 0 is done, 1 that something was found, or that the disk was full."""
    from dflash_graph.store_writer import StoreFullError

    try:
        return _run(args)
    except StoreFullError as error:
        print(f"dflash-graph store {args.store_command}: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.store_command == "build":
        from dflash_graph.store_build import build_store

        print(build_store(_config(args), part=_part(args.part), partial=args.partial))
        return 0
    if args.store_command == "add":
        from dflash_graph.store_import import add_features

        print(add_features(_config(args), args.source, layers=args.layers, chosen=args.format, partial=args.partial))
        return 0
    if args.store_command == "compare":
        from dflash_graph.store_compare import compare_store

        if args.rows < 1:
            raise ValueError(f"--rows must be at least 1; found {args.rows}")
        compared = compare_store(_config(args), args.path, args.rows)
        print(compared)
        return 1 if compared.findings else 0
    from dflash_graph.store_verify import describe, verify

    if args.store_command == "info":
        text, damaged = describe(args.path)
        print(text)
        return 1 if damaged else 0
    verified = verify(args.path, remove=args.remove)
    print(verified)
    return 1 if verified.damaged else 0
