"""Tracing: the line of what happens in backward, hooks and optimizers, forced capture, and steps that are clean."""

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_graph.config import OptimConfig, TargetConfig
from dflash_graph.findings import SiteFinder
from dflash_graph.kernels.backend import Implementation
from dflash_graph.target import Target
from dflash_graph.tracing import (
    AddressBook,
    Finding,
    Site,
    Trace,
    Tracer,
    capturing_predicate,
    compare_traces,
    find_illegal_ops,
)
from tests import test_losses as losses
from tests.test_step import jobs_of, make_toy
from tests.toys import state_bytes
from tests.traced import World, found_lines, line_of, traced

CPU = torch.device("cpu")
HERE = __file__


# ---- where it happens -----------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if grads[0].sum() > 1e9:  # sync in a backward
            return grads[0]
        grads[0].cpu()  # cpu in a backward
        return grads[0] * 2


def test_faults_in_the_backward_of_a_function_have_its_own_line() -> None:
    w = torch.ones(3, requires_grad=True)
    for run in (
        lambda: Doubled.apply(w).sum().backward(),
        lambda: torch.autograd.backward([Doubled.apply(w).sum()]),
        lambda: torch.autograd.grad(Doubled.apply(w).sum(), w),
    ):
        found = find_illegal_ops(traced(run))
        assert [f.site.line for f in found if f.site] == [
            line_of(HERE, "sync in a backward"),
            line_of(HERE, "cpu in a backward"),
        ]
        assert all("in the backward" in f.what for f in found)


def test_faults_in_a_gradient_hook_have_the_hook_s_line() -> None:
    w = torch.ones(3, requires_grad=True)

    def hook(grad: Tensor) -> None:
        grad.tolist()  # read in a hook

    def step() -> None:
        y = w * 2
        y.register_hook(hook)
        y.sum().backward()

    (found,) = find_illegal_ops(traced(step))
    assert found_lines([found]) == [line_of(HERE, "read in a hook")]


def test_an_illegal_operation_of_autograd_itself_has_the_forward_s_line() -> None:
    """The backward of a product over a dimension looks for zeros; no Python frame of the forward is on the stack."""
    w = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)

    def step() -> None:
        y = w.sin()
        z = y.prod()  # looks for zeros
        (z * 2).backward()

    trace = traced(step)
    found = [f for f in find_illegal_ops(trace) if "backward" in f.what]
    assert found, trace.text()
    assert set(found_lines(found)) == {line_of(HERE, "looks for zeros")}
    assert found[0].what.endswith("on the host (in the backward of this line)")
    cosine = next(op for op in trace.ops if op.name == "aten.cos.default")
    assert (cosine.phase, cosine.node, cosine.of_forward) == ("backward", "SinBackward0", True)
    assert cosine.site is not None
    assert cosine.site.code == "y = w.sin()"


def test_a_backward_whose_forward_was_not_watched_has_the_line_of_its_call() -> None:
    w = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    z = w.prod()

    def step() -> None:
        w.detach().sin()  # no node of its own: z's is the thread's last
        z.backward()  # unwatched forward

    found = find_illegal_ops(traced(step))
    assert found
    assert set(found_lines(found)) == {line_of(HERE, "unwatched forward")}


def test_a_recomputed_forward_has_its_own_line() -> None:
    w = torch.ones(3, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return x.sin()[x > 0]  # recomputed

    trace = traced(lambda: checkpoint(block, w * 1, use_reentrant=False, preserve_rng_state=False).sum().backward())
    (found,) = find_illegal_ops(trace)
    assert found_lines([found]) == [line_of(HERE, "recomputed")]
    assert "2 operations" in found.what


def test_an_optimizer_that_reads_its_step_is_found_at_its_call() -> None:
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([w], lr=1e-3, foreach=False)
    optimizer.step()

    def step() -> None:
        optimizer.step()  # an optimizer that is not capturable

    found = find_illegal_ops(traced(step))
    assert found
    assert set(found_lines(found)) == {line_of(HERE, "an optimizer that is not capturable")}
    assert "in the optimizer" in found[0].what


def test_clipping_that_refuses_non_finite_norms_is_found() -> None:
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    assert find_illegal_ops(traced(lambda: nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)))
    assert not find_illegal_ops(traced(lambda: nn.utils.clip_grad_norm_([w], 1.0)))


def test_a_library_s_line_is_shown_inside_the_user_s(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "somelib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def pick(x):\n    return x[x > 0]\n")
    sys.path.insert(0, str(library.parent))
    try:
        import somelib  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    (found,) = find_illegal_ops(traced(lambda: somelib.pick(torch.ones(3))))  # through a library
    assert found.site is not None
    assert found.site.line == line_of(HERE, "through a library")
    assert found.site.inside is not None
    assert (found.site.inside.line, found.site.inside.function) == (2, "pick")
    assert "(inside somelib/__init__.py:2 in pick: return x[x > 0])" in str(found)
    (rooted,) = find_illegal_ops(traced(lambda: somelib.pick(torch.ones(3)), root=somelib))
    assert rooted.site is not None
    assert (Path(rooted.site.file), rooted.site.inside) == (library / "__init__.py", None)


def test_roots_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="which does not exist"):
        SiteFinder("/nowhere/at/all")


def test_a_finding_is_text_and_plain_data() -> None:
    finding = Finding("illegal_op", "seen", "means", "do", Site("/a/b.py", 3, "f", "x.item()"), "drafter", "apply")
    assert str(finding).splitlines() == [
        "[illegal_op] drafter apply: seen",
        "  at /a/b.py:3 in f: x.item()",
        "  In a graph: means",
        "  What to do: do",
    ]
    assert finding.to_dict()["site"] == {
        "file": "/a/b.py", "line": 3, "function": "f", "code": "x.item()", "inside": None,
    }  # fmt: skip


def test_an_exception_in_the_step_leaves_the_trace_and_the_thread_s_state() -> None:
    before = (torch.autograd.is_multithreading_enabled(), torch.manual_seed, torch.autograd._engine_run_backward)
    tracer = Tracer()
    with pytest.raises(RuntimeError, match="must match"), tracer:
        torch.ones(3) + torch.ones(4)
    assert tracer.trace.ops[-1].name == "aten.add.Tensor"
    assert before == (
        torch.autograd.is_multithreading_enabled(),
        torch.manual_seed,
        torch.autograd._engine_run_backward,
    )
    with tracer, pytest.raises(RuntimeError, match="one run at a time"):
        tracer.__enter__()
    assert len(tracer.trace) == 0


def test_backward_stays_in_the_calling_thread() -> None:
    with Tracer():
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_threads_are_watched_apart() -> None:
    """What one thread does is not in another's trace, and the last to leave takes the watch away."""
    seed = torch.manual_seed
    begun, done = threading.Event(), threading.Event()
    traces: list[Trace] = []

    def other() -> None:
        def step() -> None:
            begun.set()
            assert done.wait(10)
            torch.ones(2, device=CPU).sum()

        traces.append(traced(step))

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(10)
    mine = traced(lambda: torch.manual_seed(0))
    torch.manual_seed(1)  # not watched: this thread has no tracer now
    done.set()
    thread.join()
    assert [f.what for f in find_illegal_ops(mine)] == [
        "torch.manual_seed() sets a generator; torch.cuda.manual_seed_all() sets a generator (in the forward, "
        "2 operations)"
    ]
    assert traces[0].names() == ["aten.ones.default", "aten.sum.default"]
    assert not find_illegal_ops(traces[0])
    assert torch.manual_seed is seed


# ---- capture branch -------------------------------------------------------------------------------------------------


def test_the_predicate_speaks_to_its_thread_alone() -> None:
    from torch.cuda import is_current_stream_capturing as imported_before
    from transformers.utils.import_utils import is_tracing

    answers: list[bool] = []
    with capturing_predicate(True):
        assert torch.cuda.is_current_stream_capturing()
        assert imported_before()
        assert is_tracing()
        thread = threading.Thread(target=lambda: answers.append(is_tracing()))
        thread.start()
        thread.join()
        with capturing_predicate(False):
            assert not torch.cuda.is_current_stream_capturing()
        assert imported_before()
    assert answers == [False]
    assert not is_tracing()


def qwen3(implementation: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    config = transformers.Qwen3Config(**sizes, **changes)
    config._attn_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def capture_branch(step: Callable[[], Any]) -> list[Finding]:
    traces = []
    for value in (False, True):
        with capturing_predicate(value):
            traces.append(traced(step))
    return compare_traces(*traces, check="capture_branch")


@pytest.mark.parametrize("given", ["nothing", "positions", "padding"])
@torch.no_grad()
def test_transformers_mask_branch_is_caught_with_stock_attention(given: str) -> None:
    model, ids = qwen3("sdpa").get_decoder(), torch.arange(32).view(2, 16)
    extra = {
        "nothing": {},
        "positions": {"position_ids": torch.arange(16).expand(2, 16)},
        "padding": {"attention_mask": torch.ones(2, 16, dtype=torch.bool)},
    }[given]
    found = capture_branch(lambda: model(input_ids=ids, use_cache=False, **extra))  # stock attention
    assert {f.check for f in found} == {"capture_branch"}
    operation = next(f for f in found if f.what.startswith("operation"))
    assert re.search(
        r"differs: not capturing aten.* at .*; capturing aten.* \(\d+ and \d+ operations in all\)$", operation.what
    )
    assert operation.site is not None
    assert operation.site.line == line_of(HERE, "stock attention")
    assert operation.site.inside is not None
    assert operation.site.inside.file.endswith("transformers/masking_utils.py")
    assert "attention function" in operation.advice


SLIDING = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING}])
def test_the_target_s_forward_is_clean(changes: dict[str, Any], tmp_path: Path) -> None:
    """Through this package's attention function: no illegal operation, one path, a frozen world, the same taps."""
    qwen3("sdpa", **changes).save_pretrained(tmp_path)
    output = torch.zeros(32, 96)
    target = Target(
        TargetConfig(path=str(tmp_path)), target_layer_ids=(1, 3), output=output, device=CPU, dtype=torch.float32
    )
    ids = torch.zeros(32, dtype=torch.int64)
    taps, traces = [], []
    for seed in (0, 1):
        ids.copy_(torch.randint(97, (32,), generator=torch.Generator().manual_seed(seed)))
        traces.append(traced(lambda: target.forward(ids, 2, 16)))
        taps.append(output.clone())
        target.forward(ids, 2, 16)
        assert torch.equal(output, taps[-1])
    assert not torch.equal(*taps)
    assert find_illegal_ops(traces[0]) == []
    assert compare_traces(*traces, check="frozen_world") == []
    assert capture_branch(lambda: target.forward(ids, 2, 16)) == []
    assert len(traces[0]) > 100


# ---- clean steps ----------------------------------------------------------------------------------------------------


class PlainStep:
    """A step as a user would write it for a graph: forward, backward, clip, fused AdamW with a tensor rate."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 7))
        self.module.to(dtype)
        self.ids, self.labels = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        self.rate = torch.tensor(1e-3)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=self.rate, fused=True, capturable=True)
        self.losses = torch.zeros(())
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p)
        self.load(9)
        self.step()

    def load(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(7, (5,), generator=generator))
        self.labels.copy_(torch.randint(7, (5,), generator=generator))
        self.rate.fill_(10.0 ** -(3 + seed % 3))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(self.module(self.ids), self.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            self.losses.add_(loss)

    def state(self) -> list[bytes]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [self.losses, *self.module.parameters(), *(p.grad for p in self.module.parameters()), *moments]
        return [t.detach().float().numpy().tobytes() for t in tensors if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_training_step_is_clean_and_its_numbers_are_left_alone(dtype: torch.dtype) -> None:
    watched, alone = PlainStep(dtype), PlainStep(dtype)
    book = AddressBook(
        lambda: (
            dict(watched.module.named_parameters())
            | {str(i): p.grad for i, p in enumerate(watched.module.parameters())}
        )
    )
    traces = []
    for seed in range(3):
        watched.load(seed)
        alone.load(seed)
        traces.append(traced(watched.step))
        alone.step()
        assert watched.state() == alone.state()
    phases = {op.phase for op in traces[0].ops}
    assert phases == {"forward", "backward", "optimizer"}
    assert all(op.site is not None and op.site.file == HERE for op in traces[0].ops)
    assert find_illegal_ops(traces[0]) == []
    assert compare_traces(traces[0], traces[1], check="frozen_world") == []
    assert compare_traces(traces[1], traces[2], check="frozen_world") == []
    assert capture_branch(watched.step) == []
    assert book.check() == []


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, None),
        ({"num_sizes": 2, "anchor_groups": 2}, None),
        ({"dtype": torch.bfloat16, "optim": OptimConfig(weight_decay=0.1)}, None),
        ({}, "triton"),
    ],
)
def test_the_drafter_s_step_is_clean_and_its_numbers_are_left_alone(
    options: dict[str, Any], kernels: Implementation | None
) -> None:
    watched, alone = make_toy(**options, kernels=kernels), make_toy(**options, kernels=kernels)
    jobs = jobs_of(watched, at_least=3)
    size, traces = watched.step.sizes[-1], []
    for i, job in enumerate(jobs[: 2 if kernels == "triton" else 3]):
        for toy in (watched, alone):
            toy.load(job)
            toy.step.lr.fill_(10.0 ** -(2 + i))

        def body(toy: Any) -> None:
            toy.step.micro_step_body(size)
            toy.step.apply_body()

        traces.append(traced(lambda: body(watched)))
        body(alone)
        assert state_bytes(watched) == state_bytes(alone)
    for before, after in pairwise(traces):
        assert compare_traces(before, after, check="frozen_world") == []
    assert find_illegal_ops(traces[0]) == []
    assert any(op.phase == "backward" for op in traces[0].ops)
    assert all(op.site is not None for op in traces[0].ops)


def test_the_drafter_s_step_with_all_losses_is_clean() -> None:
    """Teacher's distribution and labels, D-PACE weights; two anchor groups and a micro-step that does not train."""
    toy = losses.make_toy(losses.LOSSES["all"], anchor_groups=2)
    size, traces = toy.step.sizes[-1], []

    def body() -> None:
        toy.step.micro_step_body(size)
        toy.step.micro_step_body(size, train=False)
        toy.step.apply_body()

    for job in losses.jobs_of(toy)[:2]:
        losses.write_slot(toy, job)
        toy.step.load_slot(0, job.job)
        traces.append(traced(body))
    assert find_illegal_ops(traces[0]) == []
    assert compare_traces(*traces, check="frozen_world") == []


# ---- the record -----------------------------------------------------------------------------------------------------


def test_a_trace_keeps_no_memory_alive() -> None:
    kept: list[Tensor] = []
    world = World()

    def step() -> None:
        kept.append(world.x.sin())
        world.x.cos().exp()

    gc.disable()
    try:
        with Tracer() as tracer:
            step()
            result = weakref.ref(kept.pop())
            assert result() is None
        argument = weakref.ref(world.x)
        world.x = world.one
        assert argument() is None
    finally:
        gc.enable()
    assert [memory.external for memory in tracer.trace.memories] == [True, False, False, False]
    assert all(memory.ref is None for memory in tracer.trace.memories if not memory.external)


def test_memory_use_stays_flat_within_a_run() -> None:
    """Twenty intermediates of 64 MiB pass through, one at a time (so large that the allocator maps each by itself)."""
    x, process = torch.zeros(2**24), psutil.Process()

    def step() -> None:
        for i in range(20):
            x.add(i)

    traced(step)  # what torch imports for its first mode
    before = process.memory_info().rss
    with Tracer() as tracer:
        step()
        used = process.memory_info().rss - before
    assert len(tracer.trace) == 20
    assert used < 100 * 2**20


def test_external_memory_is_what_the_run_did_not_make() -> None:
    w = World()
    trace = traced(lambda: torch.add(w.x, w.x.sin(), out=w.table.view(-1)[:6]))
    assert set(trace.external_addresses().values()) == {w.x.data_ptr(), w.table.data_ptr()}


def test_the_stream_as_text() -> None:
    w = World()

    def step() -> None:
        y = w.x.sin().t()  # shown
        w.table[:, :1].mul_(y.sum() * 2.0)

    lines = traced(step).text(mark=1).splitlines()
    assert lines[0].startswith("       0 forward: aten.sin.default(self=@0:f32[6]) -> %1:f32[6]  # ")
    assert lines[0].endswith(
        f"test_tracing.py:{line_of(HERE, 'shown')} in {test_the_stream_as_text.__qualname__}.<locals>.step: "
        "y = w.x.sin().t()  # shown"
    )
    assert lines[1].startswith("->     1 forward: aten.t.default(self=%1:f32[6])")
    multiplied = next(line for line in lines if "aten.mul.Tensor" in line)
    assert "other=2.0" in multiplied
    assert "f32[4, 1] strides (3, 1)" in lines[-1]
    assert "!! boolean_index: aten.index with a boolean index" in traced(lambda: w.x[w.mask]).text()
    assert len(traced(step).text(1, 3).splitlines()) == 2
