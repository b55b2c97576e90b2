"""The arguments of `dflash-graph regenerate`, apart from the work, which is `regenerate.py`."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

EXIT_INTERRUPTED = 130


def add_regenerate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dflash-graph regenerate` to its parser."""
    parser.add_argument("sources", nargs="+", help="conversations, of any form that prepare reads")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; an unfinished one is gone on with")
    parser.add_argument(
        "--endpoint", action="append", metavar="URL", help="a server that speaks OpenAI's protocol; may be repeated"
    )
    parser.add_argument("--model", help="its name on the servers (default: the one they serve)")
    parser.add_argument("--concurrency", type=int, default=16, help="rows asked for at once (default 16)")
    parser.add_argument("--retries", type=int, default=5, help="of a request, with growing pauses (default 5)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer (default 600)")
    parser.add_argument("--in-process", metavar="TARGET", help="answer here, with this model folder or hub id")
    parser.add_argument("--target-gguf", metavar="FILE", help="with --in-process: a GGUF file of that folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --in-process")
    parser.add_argument("--chat-template", metavar="FILE", help="with --in-process: a Jinja file")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one answer (default 2048)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--limit", type=int, help="take the first so many rows")
    parser.add_argument("--drop-cut", action="store_true", help="leave out conversations with a cut answer")


def run_regenerate(args: argparse.Namespace) -> int:
    """Run `dflash-graph regenerate`; the key of the servers is OPENAI_API_KEY."""
    if bool(args.endpoint) == bool(args.in_process):
        raise ValueError("either --endpoint (once or more) or --in-process must be given")
    for name in ("concurrency", "limit", "timeout"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name} must be positive; found {value}")
    from dflash_graph.config import TargetConfig
    from dflash_graph.regenerate import Answerer, ModelAnswerer, Sampling, ServerAnswerer, regenerate
    from dflash_graph.server_client import ServerError

    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, seed=args.seed)

    if args.in_process:
        target = TargetConfig(path=args.in_process, gguf_file=args.target_gguf)
        model = args.in_process
        make: Callable[[], Answerer] = partial(
            ModelAnswerer, target, sampling, device=args.device, chat_template=args.chat_template
        )
    else:
        key = os.environ.get("OPENAI_API_KEY")
        options = {"api_key": key, "retries": args.retries, "timeout_s": args.timeout, "model": args.model}
        try:
            servers = ServerAnswerer(args.endpoint, sampling, **options)
        except ServerError as error:
            raise ValueError(str(error)) from error
        model, make = servers.model, lambda: servers
    report = regenerate(
        args.sources,
        args.output,
        make,
        sampling,
        model=model,
        concurrency=1 if args.in_process else args.concurrency,
        limit=args.limit,
        drop_cut=args.drop_cut,
    )
    print(report)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 1 if report.failed else 0
