"""Does z-lab's `dflash_generate` decode an export as our evaluation does? Tokens, and accepted drafts of each block.

    python -m tests.peers.compare_eval EXPORT --prompts FILE [--limit 10] [--target PATH [--target-gguf FILE]]

Both decode greedily in float32 over the same target, each with its own package versions; the environment of `dflash`
is made by `bench/peers/make_envs.sh`. A token may differ only where the top-2 gap of a full forward is tiny. Only
verifications whose block fits below the limit are compared: z-lab cuts the last blocks short, which changes what a
bidirectional drafter drafts.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash_graph.cached_target import target_settings
from dflash_graph.config import TargetConfig
from dflash_graph.decoding import full_forward_gaps
from dflash_graph.drafter_folder import read_drafter
from dflash_graph.evaluation import eos_ids, evaluate
from dflash_graph.near_ties import NEAR_TIE_GAP
from dflash_graph.prompts import load_prompt_sets
from dflash_graph.report import EvalReport
from dflash_graph.target import load_full_model
from dflash_graph.tokenizer import load_tokenizer
from tests.peers.environment import run_jobs

GAP = NEAR_TIE_GAP[torch.float32]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What both found. Lengths are over the verifications that both made from the same text.

    Attributes:
        near_ties: texts that part where the target's choice is open.
        faults: texts or blocks that differ without such a reason; empty is agreement.
    """

    report: EvalReport
    num_tokens: int
    num_verifications: int
    our_length: float
    their_length: float
    near_ties: tuple[str, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.report.num_prompts} prompts, {self.num_tokens} tokens in common, {self.num_verifications} "
            f"verifications: accept_length {self.our_length:.4f} here, {self.their_length:.4f} by dflash_generate; "
            f"near-ties (gap < {GAP:g}) in {len(self.near_ties)} texts; "
            + ("; ".join(["DIFFERENT", *self.faults]) if self.faults else "the same")
        )


def counted(produced: Sequence[int], max_new_tokens: int, block_size: int) -> list[int]:
    """Of z-lab's tokens per verification, those of blocks that fit below the limit, as accepted drafts."""
    length, found = 1, []
    for count in produced:
        if length + block_size > max_new_tokens:
            break
        found.append(count - 1)
        length += count
    return found


def compare(
    folder: Path, prompts: Path, work: Path, *, target: TargetConfig, limit: int | None, max_new_tokens: int
) -> Comparison:
    """Decode the same prompts by both.

    Args:
        target: an ordinary model folder, which both load.
    """
    report = evaluate(
        folder,
        prompts,
        target=target,
        limit=limit,
        max_new_tokens=max_new_tokens,
        control_prompts=0,
        alone_prompts=0,
        step_times=False,
    )
    tokenizer = load_tokenizer(target)
    (found,) = load_prompt_sets([prompts], tokenizer, limit=limit)
    model = load_full_model(target, torch.device("cpu"), torch.float32)
    decoded = [found.prompts[text.index] for text in report.texts]
    job = {
        "action": "generate",
        "folder": str(folder),
        "prompts": decoded,
        "max_new_tokens": max_new_tokens,
        "stop_ids": sorted(eos_ids(model, tokenizer)),
    }
    theirs = run_jobs("dflash", Path(target.path), work, {"generated": job})["generated"]
    ours_accepted: list[int] = []
    their_accepted: list[int] = []
    common, near_ties, faults = 0, [], []
    for i, text in enumerate(report.texts):
        name = f"{text.set}/{text.index}"
        other = theirs[f"tokens.{i}"].tolist()
        pairs = zip(text.tokens, other, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text.tokens), len(other)))
        blocks = counted(theirs[f"accepts.{i}"].tolist(), max_new_tokens, report.block_size)
        mine = list(text.accepts)
        if tuple(other) != text.tokens:
            gaps = full_forward_gaps(model, decoded[i], text.tokens)[1]
            if same < len(gaps) and float(gaps[same]) < GAP:
                near_ties.append(name)
                mine, blocks = _before(mine, same), _before(blocks, same)
            else:
                faults.append(f"{name} differs from token {same} on")
                continue
        if mine != blocks:
            faults.append(f"{name} accepts {mine} here, {blocks} there")
        common += same
        ours_accepted += mine
        their_accepted += blocks
    lengths = [1 + sum(a) / max(1, len(a)) for a in (ours_accepted, their_accepted)]
    return Comparison(
        report=report,
        num_tokens=common,
        num_verifications=len(ours_accepted),
        our_length=lengths[0],
        their_length=lengths[1],
        near_ties=tuple(near_ties),
        faults=tuple(faults),
    )


def _before(accepts: Sequence[int], tokens: int) -> list[int]:
    """The verifications that are over before generated token `tokens`."""
    end, found = 1, []
    for accepted in accepts:
        end += accepted + 1
        if end > tokens:
            break
        found.append(accepted)
    return found


def ordinary_target(target: TargetConfig, work: Path) -> TargetConfig:
    """A target that z-lab's environment can load, too: a GGUF file is written out as an ordinary folder first."""
    if target.gguf_file is None:
        return replace(target, dtype="float32")
    folder = work / "target"
    loaded = load_full_model(target, torch.device("cpu"), torch.float32)
    model = AutoModelForCausalLM.from_config(target_settings(target), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())  # one that was read from GGUF cannot be saved itself
    model.save_pretrained(folder)
    load_tokenizer(target).save_pretrained(folder)
    return TargetConfig(path=str(folder), dtype="float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="an exported folder, layout hf")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--target")
    parser.add_argument("--target-gguf")
    args = parser.parse_args()
    given = None if args.target is None else TargetConfig(path=args.target, gguf_file=args.target_gguf)
    with tempfile.TemporaryDirectory(prefix="compare-eval-") as name:
        target = ordinary_target(read_drafter(args.export, given).target, Path(name))
        result = compare(
            args.export.resolve(),
            args.prompts,
            Path(name),
            target=target,
            limit=args.limit,
            max_new_tokens=args.max_new_tokens,
        )
    print(result.report, result, sep="\n")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
