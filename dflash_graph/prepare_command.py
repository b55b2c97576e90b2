"""`dflash-graph prepare`: tokenise the data, check it, and print what a run would train on; no weights are loaded.

Arguments and printing only; the plan prepares the rows. Called by the command line.
"""

import argparse
import sys
from pathlib import Path

from dflash_graph.config import load_config


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dflash-graph prepare` to its parser."""
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument(
        "--inspect", type=int, default=0, metavar="N", help="print N rows, supervised tokens highlighted"
    )
    parser.add_argument("--first", action="store_true", help="--inspect the first rows instead of random ones")
    parser.add_argument("--tokens", action="store_true", help="--inspect shows where tokens end")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png", help="draw the rows' lengths (needs matplotlib)")
    parser.add_argument(
        "--write-holdout",
        type=Path,
        metavar="FILE.jsonl",
        help="write the held-out conversations, for `eval --prompts` or data.validation",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as data.holdout=0.01")


def run_prepare(args: argparse.Namespace) -> int:
    """Run `dflash-graph prepare`."""
    config = load_config(args.config, args.overrides)
    if args.inspect < 0:
        raise ValueError(f"--inspect must be a number of rows; found {args.inspect}")
    if (args.first or args.tokens) and not args.inspect:
        raise ValueError("--first and --tokens belong to --inspect N")
    target: Path | None = args.write_holdout
    if target is not None and config.data.holdout is None:
        raise ValueError("--write-holdout writes what data.holdout holds out; set it, for example data.holdout=0.01")
    if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
        raise ValueError(f"--write-holdout must name a file in an existing folder; found {target}")
    from dflash_graph.data import load_tokenizer
    from dflash_graph.held_out_rows import write_holdout
    from dflash_graph.inspection import check_picture, choose_rows, describe_row, text_histogram, write_histogram
    from dflash_graph.plan import make_plan

    if args.histogram is not None:
        check_picture(args.histogram)
    plan = make_plan(config)
    rows, build = plan.rows, plan.rows.build
    print(rows.report)
    print(text_histogram(rows.lengths, config.data.max_length))
    if plan.validation_rows is not None:
        print(f"validation\n{plan.validation_rows.report}")
    print(plan)
    print(
        f"prepared  in {build['seconds']:,.1f} s by {build['workers']} processes: {build['rows_per_s']:,.0f} rows/s, "
        f"{build['tokens_per_s']:,.0f} tokens/s; kept in {rows.folder}"
    )
    if target is not None:
        count = write_holdout(config.data, rows, target)
        print(f"held out  {count:,} conversations written to {target}")
    if args.histogram is not None:
        sets = [("train", rows), *([("validation", plan.validation_rows)] if plan.validation_rows is not None else [])]
        write_histogram(sets, args.histogram, config.data.max_length)
        print(f"histogram {args.histogram}")
    if args.inspect:
        tokenizer = load_tokenizer(config.target)
        for i in choose_rows(rows, args.inspect, None if args.first else config.seed):
            print(f"\n{describe_row(rows, i, tokenizer, ansi=sys.stdout.isatty(), boundaries=args.tokens)}")
    return 0
