"""The command line: `dflash-graph config | prepare | debug | train | eval | export | store`, or `python -m ...`.

It parses arguments, calls the functions of the same names in Python, and turns an expected error into one clear line
and exit code 2. Settings come from `--config run.yaml` and `key=value` overrides.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from dflash_graph.config import Config, load_config
from dflash_graph.eval_command import add_eval_arguments, run_eval
from dflash_graph.export_command import add_export_arguments, run_export
from dflash_graph.prepare_command import add_prepare_arguments, run_prepare
from dflash_graph.rank_watch import RANK_DIR
from dflash_graph.regenerate_command import add_regenerate_arguments, run_regenerate
from dflash_graph.store_command import add_store_arguments, run_store
from dflash_graph.train_command import add_train_arguments, run_train
from dflash_graph.translate import add_config_arguments, run_config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash-graph", description="Train DFlash drafters for speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "tokenise the data, check it, and print what a run would train on"
    add_prepare_arguments(commands.add_parser("prepare", help=text, description=text))
    train = commands.add_parser("train", help="train a drafter")
    text = "say, without a GPU, whether a run's steps can be CUDA graphs, or which lines stand in the way"
    debug = commands.add_parser("debug", help=text, description=text)
    for command in (train, debug):
        command.add_argument("--config", type=Path, help="YAML file of settings")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as optim.lr=3e-4")
    add_train_arguments(train)
    debug.add_argument("--dot", type=Path, help="on CUDA, an existing folder for a drawing of each graph")
    debug.add_argument("--json", type=Path, metavar="PATH|-", help="also write the report to this file; - is stdout")
    text = "measure a drafter by speculative decoding, here or on a running server"
    add_eval_arguments(commands.add_parser("eval", help=text, description=text))
    text = "write a drafter as a folder that servers load"
    add_export_arguments(commands.add_parser("export", help=text, description=text))
    text = "rewrite the assistant's turns by the target itself"
    add_regenerate_arguments(commands.add_parser("regenerate", help=text, description=text))
    text = "write, check and fill a store of the target's hidden states"
    add_store_arguments(commands.add_parser("store", help=text, description=text))
    text = "translate another trainer's configuration into one of ours"
    add_config_arguments(commands.add_parser("config", help=text, description=text))
    return parser


def _load(args: argparse.Namespace) -> Config:
    return load_config(args.config, args.overrides)


def _debug(args: argparse.Namespace) -> int:
    config = _load(args)
    _check_json(args.json)
    from dflash_graph.debugging import debug

    if args.dot is not None and not args.dot.is_dir():
        raise ValueError(f"--dot must name an existing folder; found {args.dot}")
    alone = args.json == Path("-")  # stdout is for the JSON, whatever a run prints
    with redirect_stdout(sys.stderr) if alone else nullcontext():
        report = debug(config, dot=args.dot)
        print(report)
    if alone:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        _write_json(args.json, report.to_dict())
    return 1 if report.findings else 0


def _check_json(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--json must name a file in an existing folder; found {path}")


def _write_json(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(values, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (0 done, 1 debug found something, 2 bad input, 130 interrupted)."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)  # several ranks run the same command
    # argparse gives up on positional arguments that follow an option; settings may stand anywhere.
    wrong = [item for item in rest if item.startswith("-") or "=" not in item or not hasattr(args, "overrides")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    try:
        run = {
            "prepare": run_prepare,
            "train": run_train,
            "debug": _debug,
            "eval": run_eval,
            "export": run_export,
            "config": run_config,
            "store": run_store,
            "regenerate": run_regenerate,
        }
        code = run[args.command](args)
    except ValueError as error:
        print(f"dflash-graph {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


def _rank_main() -> NoReturn:
    """One rank of several: its process ends itself, since another thread may sit in a collective for ever."""
    from dflash_graph.rank_watch import EXIT_PEER, PeerFailed, end_with_launcher

    end_with_launcher()
    try:
        code = main()
    except PeerFailed as error:
        print(error, file=sys.stderr)
        code = EXIT_PEER
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if RANK_DIR in os.environ:
        _rank_main()
    sys.exit(main())
