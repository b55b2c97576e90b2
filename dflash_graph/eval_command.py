"""The arguments of `dflash-graph eval`, apart from the work, so that other commands need not import torch for them.

Checks what can be checked before anything is loaded, runs the evaluation and prints, writes or draws its report. With
`--server` the same prompts go to a running server, too. Called by the command line; the work is `evaluation.py` and
`server_eval.py`.
"""

import argparse
import importlib.util
import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_graph.config_groups import TargetConfig

if TYPE_CHECKING:
    from dflash_graph.report import EvalReport
    from dflash_graph.sampling import Sampling

_EPILOG = """\
Texts are greedy, and equal to the target's own greedy text, unless --temperature is above 0: then they are drawn
losslessly from the target's distribution at that temperature (accept with min(1, p/q), replace from the residual).
"""


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dflash-graph eval` to its parser."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="run folder, checkpoint folder, or exported folder of either layout")
    parser.add_argument(
        "--prompts",
        action="append",
        required=True,
        metavar="[NAME=]PATH",
        help="conversations to answer (JSONL, JSON, Parquet, Arrow, a datasets folder); repeat it for several sets",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use the first so many prompts of each set")
    parser.add_argument("--target", metavar="PATH", help="the target model (default: the one that the folder recorded)")
    parser.add_argument("--target-gguf", metavar="FILE", help="a GGUF file in the folder --target")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file instead of the tokenizer's template")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="default: the target's")
    parser.add_argument("--workers", type=int, help="prompts decoded at once (default: one per core, 4 at most)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy decoding (default)")
    sampling.add_argument("--top-p", type=float, help="default 1: all tokens")
    sampling.add_argument("--top-k", type=int, help="default 0: all tokens")
    sampling.add_argument(
        "--draft",
        choices=("greedy", "sampled"),
        help="greedy (default): the drafter's most likely tokens, as vLLM (unless draft_sample_method says otherwise) "
        "and SGLang draft; sampled: drawn from its distribution, as z-lab's dflash does",
    )
    sampling.add_argument("--seed", type=int, help="of all draws (default 0)")
    server = parser.add_argument_group("a running server")
    server.add_argument("--server", metavar="URL", help="vLLM or SGLang with this drafter: compare what it accepts")
    server.add_argument("--baseline-server", metavar="URL", help="the same target served without a drafter")
    server.add_argument("--concurrency", type=int, help="requests at once (default 1)")
    server.add_argument("--no-local", action="store_true", help="ask the server only")
    parser.add_argument("--json", type=Path, metavar="PATH|-", help="also write the report to this file; - is stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the report (needs matplotlib)")


def run_eval(args: argparse.Namespace) -> int:
    """Run `dflash-graph eval`."""
    _check(args)
    from dflash_graph.evaluation import evaluate

    sampling, target = _sampling(args), _target(args)
    alone = args.json == Path("-")  # stdout is for the JSON, whatever a run prints
    with redirect_stdout(sys.stderr) if alone else nullcontext():
        report: EvalReport | None = None
        if not args.no_local:
            report = evaluate(
                args.run,
                args.prompts,
                max_new_tokens=args.max_new_tokens,
                limit=args.limit,
                device=args.device,
                target=target,
                dtype=args.dtype,
                chat_template=args.chat_template,
                sampling=sampling,
                workers=args.workers,
            )
            print(report, flush=True)
            if args.plot is not None:
                from dflash_graph.eval_plot import plot_evaluation

                print(f"picture: {plot_evaluation(report, args.plot)}")
        values = {} if report is None else report.to_dict()
        if args.server is not None:
            served = _serve(args, target, report)
            print(served)
            values = {"local": values or None, "server": served.to_dict()}
    text = json.dumps(values, indent=1) + "\n"
    if alone:
        sys.stdout.write(text)
    elif args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    return 0


def _serve(args: argparse.Namespace, target: TargetConfig | None, local: "EvalReport | None") -> Any:
    """The server's part: the same prompts, with the same limits."""
    from dflash_graph.drafter_folder import read_drafter
    from dflash_graph.prompts import load_prompt_sets
    from dflash_graph.server_eval import evaluate_server
    from dflash_graph.tokenizer import load_tokenizer

    found = read_drafter(args.run, target)
    template = args.chat_template or (found.config.data.chat_template if found.config else None)
    return evaluate_server(
        args.server,
        load_prompt_sets(args.prompts, load_tokenizer(found.target), template, limit=args.limit),
        baseline_server=args.baseline_server,
        max_new_tokens=args.max_new_tokens,
        concurrency=args.concurrency or 1,
        temperature=args.temperature,
        seed=args.seed or 0,
        local=local,
        api_key=os.environ.get("OPENAI_API_KEY"),
    )


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, and options without an effect, before anything is loaded."""
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise ValueError(f"--json must name a file in an existing folder; found {args.json}")
    if args.plot is not None:
        if args.plot.suffix != ".png" or not args.plot.absolute().parent.is_dir():
            raise ValueError(f"--plot must name a .png file in an existing folder; found {args.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib; install it: pip install 'dflash-graph[plot]'")
    idle: list[tuple[str, bool]] = [
        ("--target-gguf without --target", args.target_gguf is not None and args.target is None),
        ("--plot with --no-local", args.plot is not None and args.no_local),
    ]
    if args.temperature == 0:
        drawn = ("top_p", "top_k", "draft", "seed")
        idle += [
            (f"--{name.replace('_', '-')} without --temperature", getattr(args, name) is not None) for name in drawn
        ]
    if args.server is None:
        idle += [
            ("--baseline-server without --server", args.baseline_server is not None),
            ("--concurrency without --server", args.concurrency is not None),
            ("--no-local without --server", args.no_local),
        ]
    else:
        idle += [
            (f"--{name} with --server", getattr(args, name.replace("-", "_")) is not None)
            for name in ("top-p", "top-k")
        ]
    if found := [name for name, given in idle if given]:
        raise ValueError(f"options must have an effect; found {', '.join(found)}")
    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1; found {args.concurrency}")


def _sampling(args: argparse.Namespace) -> "Sampling | None":
    if args.temperature == 0:
        return None
    from dflash_graph.sampling import Sampling

    given: dict[str, Any] = {name: getattr(args, name) for name in ("top_p", "top_k", "draft", "seed")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Sampling(temperature=args.temperature, **chosen)


def _target(args: argparse.Namespace) -> TargetConfig | None:
    if args.target is None:
        return None
    return TargetConfig(path=args.target, gguf_file=args.target_gguf)
