"""Speed of the two kernels on a GPU, beside its own ceilings and the public alternatives; small shapes on the CPU.

    python -m bench.bench_kernels [--rounds N] [--device cuda|cpu] [--output FILE]

Ceilings (a large GEMM, a large copy) and contestants are timed in interleaved rounds of one run: CUDA events on a GPU,
process time on the CPU, where the plain-torch implementations run and no target applies. A contestant is timed only if
its results agree with ours; one that is missing, refuses or lacks memory is in the table with the reason. Prints the
machine, the tables, the targets, and one line of JSON last. Exit status 1: our own results are wrong.

Counting: the loss is set against its two GEMMs alone, the same chunks in the same scratch. Attention counts visible
(query, key) pairs only: 4 E operations a pair and head forward, 10 E backward (5 GEMMs). The row pass reads each fp32
logit twice and writes the gradient once.
"""

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op

ROOT = Path(__file__).parent.parent
TARGETS = {"loss: GEMMs alone / loss": 0.8, "attention forward / peak": 0.5, "attention backward / peak": 0.4}
PACKAGES = ("torch", "triton", "liger-kernel", "transformers")
# Of the largest value: results of 16 bits differ by rounding of inputs, logits and probabilities.
LOSS_TOLERANCE, GRAD_TOLERANCE = {2: 2e-2, 4: 1e-4}, {2: 6e-2, 4: 1e-4}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of one run."""

    gemm: int  # side of the square GEMM that gives the ceiling
    copy_bytes: int
    rows: int
    hidden: int
    vocab: int
    tokens: int
    sequences: int  # equal rows of the T positions
    anchors: int
    k: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(
        gemm=8192, copy_bytes=2**31, rows=16384, hidden=4096, vocab=151936, tokens=16384, sequences=4, anchors=2048,
        k=16, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16,
    ),
    "cpu": Sizes(
        gemm=512, copy_bytes=2**22, rows=96, hidden=64, vocab=1024, tokens=256, sequences=4, anchors=24,
        k=4, heads=4, kv_heads=2, dim=32, dtype=torch.float32,
    ),
}  # fmt: skip


@dataclass(kw_only=True)
class Contestant:
    """One timed function; `prepare` runs untimed before each call, `result` gives what must agree, once."""

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None
    failed: str | None = None
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def time_ms(device: str, contestant: Contestant) -> float:
    """One call: GPU time between two events, or the process's CPU time."""
    if contestant.prepare is not None:
        contestant.prepare()
    if device == "cpu":
        begin = time.process_time()
        contestant.run()
        return (time.process_time() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    contestant.run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def reason(error: BaseException) -> str:
    """Why a contestant did not run, in one line."""
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"[:200]


def run_rounds(device: str, contestants: Sequence[Contestant], rounds: int) -> None:
    """Warm up each contestant, then time all of them once per round; the first to fail is left out."""
    for contestant in contestants:
        try:
            for _ in range(2):
                time_ms(device, contestant)
        except Exception as error:
            contestant.failed = contestant.failed or reason(error)
            if device == "cuda":
                torch.cuda.empty_cache()
    for _ in range(rounds):
        for contestant in contestants:
            if contestant.failed is None:
                contestant.ms.append(time_ms(device, contestant))


def error(found: Tensor, truth: Tensor) -> float:
    """max |found - truth| / max |truth|."""
    return float((found.float() - truth.float()).abs().max() / truth.float().abs().max())


def admit(
    contestants: Sequence[Contestant], ours: Sequence[Tensor], tolerances: Sequence[float], names: Sequence[str]
) -> None:
    """Leave out each contestant whose results are not ours."""
    for contestant in contestants:
        try:
            found = contestant.run()
        except Exception as failure:
            contestant.failed = reason(failure)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        for name, value, own, most in zip(names, found, ours, tolerances, strict=True):
            if not error(value, own) <= most:
                contestant.failed = f"{name} differs from ours by {error(value, own):.2g} of the largest value"


# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_contestants(device: str, s: Sizes) -> tuple[list[Contestant], dict[str, Any]]:
    """Our loss, its two GEMMs, its row pass, and the alternatives; sum over rows, all weights 1."""
    torch.manual_seed(0)
    hidden = torch.randn(s.rows, s.hidden, device=device).to(s.dtype).requires_grad_()
    head = (torch.randn(s.vocab, s.hidden, device=device) * s.hidden**-0.5).to(s.dtype)
    labels, weights = torch.randint(0, s.vocab, (s.rows,), device=device), torch.ones(s.rows, device=device)
    ws = loss_op.make_workspace(
        num_rows=s.rows, hidden_size=s.hidden, vocab_size=s.vocab, dtype=s.dtype, device=device
    )  # fmt: skip

    def graded(loss: Tensor) -> tuple[Tensor, Tensor]:
        return loss.detach(), torch.autograd.grad(loss, hidden)[0]

    def ours() -> tuple[Tensor, Tensor]:
        return graded(loss_op.fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, with_rank=True))

    def naive() -> tuple[Tensor, Tensor]:
        return graded(F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="sum"))

    def torch_fused() -> tuple[Tensor, Tensor]:
        options = torch.nn.LinearCrossEntropyOptions()
        return graded(F.linear_cross_entropy(hidden, head, labels, reduction="sum", options=options))

    def liger() -> tuple[Tensor, Tensor]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return graded(LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, hidden, labels))

    expected = naive_in_parts(hidden, head, labels)
    own = ours()
    for name, value, truth, most in zip(
        ("loss", "gradient"), own, expected, (LOSS_TOLERANCE, GRAD_TOLERANCE), strict=True
    ):
        if not error(value, truth) <= most[s.dtype.itemsize]:
            raise ValueError(f"our {name} is wrong: it differs by {error(value, truth):.2g} from whole logits")
    others = [
        Contestant(name="naive", run=naive),
        Contestant(name="torch linear_cross_entropy", run=torch_fused),
        Contestant(name="liger fused_linear_cross_entropy", run=liger),
    ]
    tolerances = [table[s.dtype.itemsize] for table in (LOSS_TOLERANCE, GRAD_TOLERANCE)]
    admit(others, own, tolerances, ("loss", "gradient"))
    mine = [Contestant(name="ours", run=ours), gemms_alone(hidden.detach(), head, ws)]
    facts = {"chunk_rows": ws.chunk_rows, "implementation": ws.implementation, "workspace_bytes": ws.nbytes()}
    if ws.implementation == "triton":
        mine.append(row_pass_alone(labels, ws, s))
    return [*mine, *others], facts


def naive_in_parts(hidden: Tensor, head: Tensor, labels: Tensor, rows: int = 2048) -> tuple[Tensor, Tensor]:
    """Loss and gradient from whole logits in float32, some rows at a time: what ours is checked against."""
    total, grads, wide = torch.zeros((), device=hidden.device), [], head.float()
    for i in range(0, len(hidden), rows):
        x = hidden.detach()[i : i + rows].float().requires_grad_()
        loss = F.cross_entropy(F.linear(x, wide), labels[i : i + rows], reduction="sum")
        grads.append(torch.autograd.grad(loss, x)[0])
        total += loss.detach()
    return total, torch.cat(grads)


def gemms_alone(hidden: Tensor, head: Tensor, ws: Any) -> Contestant:
    """Both GEMMs of the loss in its chunks: the first into wide logits, the second from logits of the head's dtype."""
    rows, wide = min(ws.chunk_rows, len(hidden)), torch.float32
    logits = torch.empty(rows, len(head), dtype=wide, device=hidden.device)
    narrow = torch.randn(rows, len(head), device=hidden.device).to(head.dtype)
    out = torch.empty_like(hidden)

    def run() -> None:
        for i in range(0, len(hidden), rows):
            x, n = hidden[i : i + rows], min(rows, len(hidden) - i)
            if head.dtype == wide:
                torch.mm(x, head.t(), out=logits[:n])
            else:
                torch.mm(x, head.t(), out_dtype=wide, out=logits[:n])
            torch.mm(narrow[:n], head, out=out[i : i + n])

    return Contestant(name="GEMMs alone", run=run)


def row_pass_alone(labels: Tensor, ws: Any, s: Sizes) -> Contestant:
    """The Triton row pass over one chunk of logits, as the loss calls it."""
    from dflash_graph.kernels import fused_lm_head_loss_triton as passes

    rows, device = min(ws.chunk_rows, s.rows), labels.device
    logits = ws.scratch.as_strided((rows, s.vocab), (ws.row_stride, 1))
    fresh = torch.randn(rows, s.vocab, device=device)
    counts = torch.ones(rows, dtype=torch.bool, device=device)
    narrow = s.dtype if s.dtype.itemsize == 2 else None

    def run() -> None:
        passes.row_pass(
            logits, labels[:rows], counts, None, ws.nll[:rows], ws.logsumexp[:rows], ws.label_rank[:rows],
            logit_scale=1.0, soft_cap=None, label_share=1.0, with_grad=True, with_rank=True, narrow=narrow,
        )  # fmt: skip

    return Contestant(name="row pass", run=run, prepare=lambda: logits.copy_(fresh))


# ---- attention -------------------------------------------------------------------------------------------------------


@dataclass
class AttentionProblem:
    """Inputs, and what sees what. q (A, K, H, E), context (T, Hk, E), block keys and values (A, K, Hk, E)."""

    sizes: Sizes
    device: str
    inputs: list[Tensor]
    grad: Tensor
    anchors: Tensor
    row_starts: Tensor
    pairs: int  # visible (query, key) pairs of one head

    @classmethod
    def make(cls, device: str, s: Sizes) -> "AttentionProblem":
        torch.manual_seed(0)
        anchors = torch.randint(0, s.tokens, (s.anchors,)).sort().values
        length = s.tokens // s.sequences
        row_starts = anchors // length * length
        own, context = (s.anchors, s.k, s.kv_heads, s.dim), (s.tokens, s.kv_heads, s.dim)
        shapes = [(s.anchors, s.k, s.heads, s.dim), context, context, own, own]
        inputs = [torch.randn(shape, device=device).to(s.dtype).requires_grad_() for shape in shapes]
        grad = torch.randn(shapes[0], device=device).to(s.dtype)
        pairs = s.k * int((anchors - row_starts).sum()) + s.anchors * s.k**2
        return cls(s, device, inputs, grad, anchors.to(device), row_starts.to(device), pairs)

    def joined(self) -> list[Tensor]:
        """q (1, H, A*K, E), keys and values (1, Hk, T + A*K, E), as stock attention takes them."""
        q, kc, vc, kb, vb = self.inputs
        keys, values = (torch.cat([c, b.flatten(0, 1)]) for c, b in ((kc, kb), (vc, vb)))
        return [x.transpose(0, 1)[None] for x in (q.flatten(0, 1), keys, values)]

    def split(self, out: Tensor) -> Tensor:
        """(1, H, A*K, E) -> (A, K, H, E)."""
        return out[0].transpose(0, 1).reshape(self.grad.shape)

    def mask(self) -> Tensor:
        """(A*K, T + A*K) bool."""
        s, a = self.sizes, torch.arange(self.sizes.anchors, device=self.device)
        position = torch.arange(s.tokens, device=self.device)
        context = (position >= self.row_starts[:, None]) & (position < self.anchors[:, None])
        own = (a[:, None] == a).repeat_interleave(s.k, 1)
        return torch.cat([context, own], 1).repeat_interleave(s.k, 0)

    def mask_mod(self, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        s = self.sizes
        block = query // s.k
        context = (key >= self.row_starts[block]) & (key < self.anchors[block])
        return context | ((key - s.tokens) // s.k == block) & (key >= s.tokens)


def attention_outputs(problem: AttentionProblem) -> dict[str, Callable[[], Tensor]]:
    """Function from inputs to output (A, K, H, E), by contestant; the mask of each is made once, on first use."""
    p, s, made = problem, problem.sizes, {}
    ws = attention_op.make_workspace(
        num_anchors=s.anchors, block_size=s.k, num_tokens=s.tokens, num_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.dim, dtype=s.dtype, device=p.device,
    )  # fmt: skip
    live = torch.tensor(s.anchors, device=p.device)

    def ours() -> Tensor:
        return attention_op.block_attention(
            *p.inputs, p.anchors, p.row_starts, num_anchors=live, scale=s.dim**-0.5, causal=False,
            sliding_window=None, workspace=ws,
        )  # fmt: skip

    def sdpa() -> Tensor:
        if "mask" not in made:
            made["mask"] = p.mask()
        q, k, v = p.joined()
        # The kernels that take a mask know no groups of query heads.
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
        return p.split(F.scaled_dot_product_attention(q, k, v, attn_mask=made["mask"]))

    def flex() -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if p.device == "cpu":
            raise NotImplementedError("flex_attention has no backward on the CPU")
        q, k, v = p.joined()
        if "block_mask" not in made:
            made["block_mask"] = create_block_mask(p.mask_mod, None, None, q.shape[2], k.shape[2], device=p.device)
            made["flex"] = torch.compile(flex_attention, dynamic=False)
        return p.split(made["flex"](q, k, v, block_mask=made["block_mask"], enable_gqa=True))

    return {"ours": ours, "flex_attention": flex, "SDPA with a mask": sdpa}


def attention_contestants(device: str, s: Sizes) -> tuple[list[Contestant], AttentionProblem]:
    """Forward and backward of each attention, apart: "ours forward", "ours backward", and so on."""
    p = AttentionProblem.make(device, s)
    names = ("output", "dq", "dk of the context", "dv of the context", "dk of the blocks", "dv of the blocks")
    tolerances = [GRAD_TOLERANCE[s.dtype.itemsize]] * len(names)
    own: list[Tensor] = []
    contestants = []
    for name, output in attention_outputs(p).items():

        def both(output: Callable[[], Tensor] = output) -> list[Tensor]:
            out = output()
            return [out.detach(), *torch.autograd.grad(out, p.inputs, p.grad)]

        whole = Contestant(name=name, run=both)
        if name == "ours":
            own = both()
        else:
            admit([whole], own, tolerances, names)

        def forward(output: Callable[[], Tensor] = output) -> None:
            with torch.no_grad():
                output()

        held: dict[str, Tensor] = {}

        def keep(output: Callable[[], Tensor] = output, held: dict[str, Tensor] = held) -> None:
            held["out"] = output()

        def backward(held: dict[str, Tensor] = held) -> None:
            torch.autograd.grad(held.pop("out"), p.inputs, p.grad)

        contestants += [
            Contestant(name=f"{name} forward", run=forward, failed=whole.failed),
            Contestant(name=f"{name} backward", run=backward, prepare=keep, failed=whole.failed),
        ]
    return contestants, p


# ---- run -------------------------------------------------------------------------------------------------------------


def ceilings(device: str, s: Sizes) -> list[Contestant]:
    """A square GEMM in the benchmark's dtype and a copy, both large enough to reach the machine's limits."""
    a, b = (torch.randn(s.gemm, s.gemm, device=device).to(s.dtype) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.ones(s.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return [
        Contestant(name="GEMM", run=lambda: torch.mm(a, b, out=c)),
        Contestant(name="copy", run=lambda: target.copy_(source)),
    ]


def processor() -> str:
    """The processor's name, or at least its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def commit() -> str:
    """The commit and whether files differ from it; "unknown" where the tree came without its history."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if git("status", "--porcelain") else "")


def source_hash() -> str:
    """Of the files in dflash_graph/kernels: says what was measured even without a commit."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "dflash_graph" / "kernels").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def describe(device: str) -> dict[str, Any]:
    """Machine, versions, commit and command."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "machine": f"{processor()}, Python {platform.python_version()}, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": versions,
        "commit": commit(),
        "kernels_sha256": source_hash(),
        "command": "python -m bench.bench_kernels " + " ".join(sys.argv[1:]),
    }


def table(title: str, contestants: Sequence[Contestant], rates: dict[str, str]) -> None:
    print(f"\n{title}\n{'':36}{'median':>11}{'min':>11}{'max':>11}  ms")
    for c in contestants:
        if c.failed is not None:
            print(f"{c.name:36} not timed: {c.failed}")
        else:
            print(f"{c.name:36}{c.median:11.3f}{min(c.ms):11.3f}{max(c.ms):11.3f}  {rates.get(c.name, '')}")


def measure(device: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Everything, printed and returned.

    Raises:
        ValueError: our loss is wrong.
    """
    report = describe(device) | {"device": device, "sizes": {k: str(v) for k, v in asdict(sizes).items()}}
    print("\n".join(f"{name}: {report[name]}" for name in ("machine", "gpu", "versions", "commit")))
    top = ceilings(device, sizes)
    losses, facts = loss_contestants(device, sizes)
    run_rounds(device, [*top, *losses], rounds)
    peak = 2 * sizes.gemm**3 / top[0].median / 1e9  # TFLOP/s
    copied = 2 * sizes.copy_bytes / top[1].median / 1e6  # GB/s
    table("ceilings", top, {"GEMM": f"{peak:.3g} TFLOP/s", "copy": f"{copied:.1f} GB/s"})
    by_name = {c.name: c for c in losses}
    flops = 4 * sizes.rows * sizes.vocab * sizes.hidden
    rates = {c.name: f"{flops / c.median / 1e9:.3g} TFLOP/s" for c in losses if c.failed is None}
    passed = None
    if "row pass" in by_name:
        rows = min(facts["chunk_rows"], sizes.rows)
        passed = rows * sizes.vocab * (8 + sizes.dtype.itemsize) / by_name["row pass"].median / 1e6
        rates["row pass"] = f"{passed:.1f} GB/s, {rows} rows"
    table(f"loss, R {sizes.rows}, D {sizes.hidden}, V {sizes.vocab}, {facts}", losses, rates)
    share = {"loss: GEMMs alone / loss": by_name["GEMMs alone"].median / by_name["ours"].median}
    report |= {
        "rounds": rounds,
        "ceilings": {"gemm_tflops": peak, "copy_gb_s": copied},
        "loss": facts | {"row_pass_gb_s": passed, "contestants": times(losses)},
    }
    del losses, by_name
    if device == "cuda":
        torch.cuda.empty_cache()

    attention, problem = attention_contestants(device, sizes)
    top = top[:1]
    run_rounds(device, [*top, *attention], rounds)
    peak = 2 * sizes.gemm**3 / statistics.median(top[0].ms) / 1e9
    work = {"forward": 4, "backward": 10}
    tflops = {
        c.name: work[c.name.rsplit(" ", 1)[1]] * problem.pairs * sizes.heads * sizes.dim / c.median / 1e9
        for c in attention
        if c.failed is None
    }
    title = (
        f"attention, T {sizes.tokens} in {sizes.sequences} rows, A {sizes.anchors}, K {sizes.k}, {problem.pairs} pairs"
    )
    table(title, attention, {name: f"{rate:.3g} TFLOP/s" for name, rate in tflops.items()})
    share |= {f"attention {part} / peak": tflops[f"ours {part}"] / peak for part in work}
    report["attention"] = {"pairs": problem.pairs, "tflops": tflops, "contestants": times(attention)}
    report["targets"] = {
        name: {"value": share[name], "target": target, "met": share[name] >= target if device == "cuda" else None}
        for name, target in TARGETS.items()
    }
    print()
    for name, outcome in report["targets"].items():
        verdict = {True: "met", False: "MISSED", None: "counts on a GPU only"}[outcome["met"]]
        print(f"{name}: {outcome['value']:.3f}, target {outcome['target']}: {verdict}")
    return report


def times(contestants: Sequence[Contestant]) -> dict[str, Any]:
    return {
        c.name: {"failed": c.failed}
        if c.failed is not None
        else {"median_ms": c.median, "min_ms": min(c.ms), "max_ms": max(c.ms)}
        for c in contestants
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contestant")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    try:
        report = measure(args.device, SIZES[args.device], args.rounds)
    except ValueError as wrong:
        print(f"not timed: {wrong}", file=sys.stderr)
        return 1
    line = json.dumps(report)
    if args.output is not None:
        args.output.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
