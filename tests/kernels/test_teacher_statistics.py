"""The teacher's statistics against dense float64: plain torch, and Triton, interpreted without a GPU."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dflash_graph.kernels.backend import Implementation, in_the_open
from dflash_graph.kernels.teacher_statistics import TeacherWorkspace, make_workspace, teacher_statistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D = 12
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
both = pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=needs_triton)])
# NaN and infinite logits are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@dataclass
class Case:
    hidden: Tensor  # (U, D)
    head: Tensor  # (V, D)
    bias: Tensor | None = None
    scale: float = 1.0

    @property
    def stats(self) -> torch.dtype:
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def workspace(self, implementation: Implementation, chunk: int | None = 4, num_rows: int = 0) -> TeacherWorkspace:
        return make_workspace(
            num_rows=max(num_rows, len(self.hidden)), hidden_size=self.hidden.shape[1], vocab_size=len(self.head),
            dtype=self.hidden.dtype, device=DEVICE, chunk_rows=chunk, implementation=implementation,
        )  # fmt: skip

    def outputs(self, *, with_mean: bool = True) -> dict[str, Tensor | None]:
        rows = len(self.hidden)
        floats = partial(torch.full, fill_value=float("nan"), dtype=self.stats, device=DEVICE)
        return {
            "mean": floats(self.hidden.shape) if with_mean else None,
            "entropy": floats((rows,)),
            "argmax": torch.full((rows,), -7, device=DEVICE),
            "bias_mean": floats((rows,)) if with_mean and self.bias is not None else None,
        }

    def run(
        self, workspace: TeacherWorkspace, num_rows: Tensor | int | None = None, *, with_mean: bool = True
    ) -> dict[str, Tensor | None]:
        out = self.outputs(with_mean=with_mean)
        teacher_statistics(
            self.hidden, self.head, num_rows, workspace=workspace, bias=self.bias, logit_scale=self.scale, **out
        )  # type: ignore[arg-type]
        return out


def make_case(rows: int, vocab: int, dtype: torch.dtype, *, bias: bool = False, scale: float = 1.0) -> Case:
    hidden = torch.randn(rows, D, dtype=torch.float64).to(dtype).to(DEVICE)
    head = torch.randn(vocab, D, dtype=torch.float64).to(dtype).to(DEVICE)
    case = Case(hidden, head, scale=scale)
    if bias:
        case.bias = torch.randn(vocab, dtype=case.stats).to(DEVICE)
    return case


def assert_matches(case: Case, out: dict[str, Tensor | None], live: int, digits: float, mean_digits: float) -> None:
    """Live rows as float64 says; exact zeros beyond."""
    z = case.hidden[:live].double() @ case.head.double().T
    if case.bias is not None:
        z += case.bias.double()
    z *= case.scale
    p = z.softmax(1)
    truth = {"entropy": -torch.special.xlogy(p, p).sum(1), "mean": p @ case.head.double()}
    if case.bias is not None:
        truth["bias_mean"] = p @ case.bias.double()
    for name, value in truth.items():
        seen = out[name]
        if seen is None:
            continue
        allowed = mean_digits if name == "mean" else digits
        error = (seen[:live].double() - value).abs()
        assert bool((error <= allowed * (1 + value.abs())).all()), name
        assert not seen[live:].any(), name
    argmax = out["argmax"]
    assert argmax is not None
    assert not argmax[live:].any()
    best = z.gather(1, argmax[:live, None])[:, 0]
    assert bool((best >= z.amax(1) - 1e-5 * (1 + z.abs().amax(1))).all()) if live else True


# Probabilities are kept in 16 bits by Triton (and by plain torch on CUDA), so the mean has their digits; the plain
# version on the CPU converts the head instead.
TRITON_DIGITS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}


# Around the chunk of 4 rows; a vocabulary below, around and above one tile of 1,024; odd ones.
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("vocab", [1, 7, 17, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_statistics_equal_the_dense_ones(rows: int, vocab: int, dtype: torch.dtype) -> None:
    case = make_case(rows, vocab, dtype, bias=True, scale=0.8)
    digits = 1e-12 if dtype == torch.float64 else 1e-5
    mean_digits = TRITON_DIGITS[dtype] if DEVICE == "cuda" and dtype.itemsize == 2 else digits
    assert_matches(case, case.run(case.workspace("torch")), rows, digits, mean_digits)


@needs_triton
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("vocab", [1, 7, 257, 1024, 2051])
@pytest.mark.parametrize("dtype", TRITON_DIGITS)
def test_triton_statistics_equal_the_dense_ones(rows: int, vocab: int, dtype: torch.dtype) -> None:
    case = make_case(rows, vocab, dtype, bias=True, scale=0.8)
    assert_matches(case, case.run(case.workspace("triton")), rows, 1e-5, TRITON_DIGITS[dtype])


@both
def test_a_large_vocabulary_needs_several_tiles_of_the_head(implementation: Implementation) -> None:
    case = make_case(3, 9001, torch.float16)  # the plain version converts 4,096 rows of the head at once
    assert_matches(case, case.run(case.workspace(implementation)), 3, 1e-5, TRITON_DIGITS[torch.float16])


@both
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3, -1.5, 0.0])
def test_bias_and_scale(implementation: Implementation, bias: bool, scale: float) -> None:
    case = make_case(5, 1030, torch.float32, bias=bias, scale=scale)
    assert_matches(case, case.run(case.workspace(implementation)), 5, 1e-5, 1e-5)


@both
def test_without_a_mean_the_rest_is_the_same_at_half_the_flops(implementation: Implementation) -> None:
    case = make_case(6, 1030, torch.float32, bias=True)
    ws = case.workspace(implementation)
    whole, part = case.run(ws), case.run(ws, with_mean=False)
    for name in ("entropy", "argmax"):
        assert torch.equal(part[name], whole[name])  # type: ignore[arg-type]
    for with_mean, units in ((True, 4), (False, 2)):
        with FlopCounterMode(display=False) as counter, in_the_open():
            case.run(ws, with_mean=with_mean)
        assert counter.get_total_flops() == units * 6 * 1030 * D


@both
@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("live", [0, 1, 4, 6, 9])
def test_rows_beyond_the_live_ones_are_zero_whatever_they_hold(
    implementation: Implementation, live: int, as_tensor: bool
) -> None:
    case = make_case(9, 130, torch.float32, bias=True)
    case.hidden[live:] = float("nan")
    count = torch.tensor(live, device=DEVICE) if as_tensor else live
    assert_matches(case, case.run(case.workspace(implementation), count), live, 1e-5, 1e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dead_row_in_a_live_chunk_is_zero_where_the_host_cannot_read_the_count(
    implementation: Implementation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA does: every chunk runs, and dead rows are selected away on the device."""
    case = make_case(6, 130, dtype)
    case.hidden[3:] = float("inf")
    count = torch.tensor(3, device=DEVICE)
    monkeypatch.setattr(type(count), "__int__", lambda self: 6, raising=False)
    out = case.run(case.workspace(implementation), count)
    monkeypatch.undo()
    assert_matches(case, out, 3, 1e-5, 2.0**-6)


@both
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_lowest_id_wins_ties(implementation: Implementation, scale: float) -> None:
    vocab = 2500
    case = make_case(4, vocab, torch.float32, scale=scale)
    case.head.zero_()
    case.hidden.fill_(1)
    ties = [[0, 5], [7, 1030], [1023, 1024], [2499, 1025, 2048]]
    for i, ids in enumerate(ties):
        case.hidden[i] = 0
        case.hidden[i, i] = 1
        case.head[ids, i] = scale
    out = case.run(case.workspace(implementation))
    assert out["argmax"].tolist() == [min(ids) for ids in ties]  # type: ignore[union-attr]
    case.head.zero_()
    assert not case.run(case.workspace(implementation))["argmax"].any()  # type: ignore[union-attr]


@both
def test_certain_uniform_and_impossible(implementation: Implementation) -> None:
    vocab = 1100
    case = make_case(4, vocab, torch.float32, bias=True)
    assert case.bias is not None
    case.hidden.zero_()
    case.head.zero_()
    case.bias.zero_()
    case.hidden[0, 0], case.head[5, 0] = 1, 200.0  # certain
    case.hidden[2, 1], case.head[:, 1] = 1, -200.0  # uniform, far below
    case.bias[1000:] = -torch.inf  # impossible in every row
    out = case.run(case.workspace(implementation))
    entropy, mean, bias_mean = out["entropy"], out["mean"], out["bias_mean"]
    assert entropy is not None
    assert mean is not None
    assert bias_mean is not None
    log = torch.log(torch.tensor(1000.0))
    torch.testing.assert_close(entropy.cpu(), torch.stack([torch.tensor(0.0), log, log, log]), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mean[0], case.head[5], rtol=1e-6, atol=1e-6)
    assert bool(bias_mean.isnan().all()), "0 * -inf: a mean of such a bias does not exist"


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_softmax_is_nan_alone(implementation: Implementation, value: float) -> None:
    case = make_case(5, 1100, torch.float32)
    clean = case.run(case.workspace(implementation))
    case.hidden[2] = value  # with heads of both signs: +inf and -inf logits, or NaN everywhere
    out = case.run(case.workspace(implementation))
    assert bool(out["entropy"][2].isnan())  # type: ignore[index]
    assert bool(out["mean"][2].isnan().all())  # type: ignore[index]
    assert 0 <= int(out["argmax"][2]) < 1100  # type: ignore[index]
    others = [0, 1, 3, 4]
    for name in ("entropy", "mean", "argmax"):
        assert torch.equal(out[name][others], clean[name][others]), name  # type: ignore[index]


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("torch", torch.float64),
        ("torch", torch.float32),
        pytest.param("triton", torch.float32, marks=needs_triton),
    ],
)
def test_the_kl_identity_holds(implementation: Implementation, dtype: torch.dtype) -> None:
    """KL(P || q) = lse - scale * (h . M + c) - H, with q the drafter's row over the same head and bias."""
    case = make_case(6, 1030, dtype, bias=True, scale=0.7)
    out = case.run(case.workspace(implementation))
    drafter = (case.hidden + 0.3 * torch.randn(6, D, device=DEVICE)).double()

    def logits(hidden: Tensor) -> Tensor:
        return 0.7 * (hidden.double() @ case.head.double().T + case.bias.double())  # type: ignore[union-attr]

    teacher, lse = logits(case.hidden).log_softmax(1), logits(drafter).logsumexp(1)
    truth = (teacher.exp() * (teacher - logits(drafter).log_softmax(1))).sum(1)
    dot = (drafter * out["mean"].double()).sum(1) + out["bias_mean"].double()  # type: ignore[union-attr]
    error = (lse - 0.7 * dot - out["entropy"].double() - truth).abs()  # type: ignore[union-attr]
    assert bool((error <= (1e-13 if dtype == torch.float64 else 2e-6) * (1 + lse.abs())).all())


@both
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_the_number_of_chunks_does_not_matter(implementation: Implementation, chunk: int) -> None:
    case = make_case(11, 130, torch.float32, bias=True)
    ws = case.workspace(implementation, chunk)
    assert ws.chunk_rows == chunk
    assert_matches(case, case.run(ws), 11, 1e-5, 1e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bitwise_equal(implementation: Implementation, dtype: torch.dtype) -> None:
    case = make_case(11, 1030, dtype, bias=True)
    ws = case.workspace(implementation, num_rows=20)
    first = case.run(ws, 7)
    ws.logits.fill_(float("nan"))  # scratch carries nothing over
    for _ in range(2):
        again = case.run(ws, torch.tensor(7, device=DEVICE))
        assert all(torch.equal(again[name], first[name]) for name in first)  # type: ignore[arg-type]


def check_random_rows(data: st.DataObject, implementation: Implementation, dtype: torch.dtype) -> None:
    vocab = data.draw(st.one_of(st.integers(1, 40), st.integers(1020, 1030), st.integers(1, 2100)))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    rows, scale = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([1.0, -0.4, 3.0]))
    case = make_case(rows, vocab, dtype, bias=data.draw(st.booleans()), scale=scale)
    live = data.draw(st.integers(0, rows))
    ws = case.workspace(implementation, data.draw(st.integers(1, 7)))
    out = case.run(ws, data.draw(st.sampled_from([live, torch.tensor(live, device=DEVICE)])))
    digits = 1e-12 if dtype == torch.float64 else 3e-5
    assert_matches(case, out, live, digits, digits)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_random_rows_in_float64(data: st.DataObject) -> None:
    check_random_rows(data, "torch", torch.float64)


@needs_triton
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_rows_in_triton(data: st.DataObject) -> None:
    check_random_rows(data, "triton", torch.float32)


@needs_triton
@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_many_random_rows_in_triton(data: st.DataObject) -> None:
    check_random_rows(data, "triton", torch.float32)


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of every allocation of a call by torch's CPU allocator, in order."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the CPU allocator's calls")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_allocated(dtype: torch.dtype) -> None:
    case = make_case(100, 9000, dtype, bias=True)
    ws, out = case.workspace("torch", 16), case.outputs()
    for live in (0, 1, 50, 100):
        count = torch.tensor(live)
        step = partial(teacher_statistics, case.hidden, case.head, count, workspace=ws, bias=case.bias, **out)
        assert allocations(step) == []
    assert allocations(lambda: torch.ones(10)) == [40], "an allocation would show"


def test_the_operator_is_one_node_with_a_sound_schema() -> None:
    case = make_case(3, 9, torch.float32)
    ws, out = case.workspace("torch"), case.outputs()
    arguments = (
        case.hidden, case.head, torch.tensor(2, device=DEVICE), 3, out["mean"], out["entropy"], out["argmax"], None,
        None, ws.logits, None, None, None, ws.spare, ws.row_stats, ws.row_index, ws.counts, 1.0,
    )  # fmt: skip
    operator = torch.ops.dflash_graph.teacher_statistics.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_head_that_wants_gradients_gets_none() -> None:
    case = make_case(3, 9, torch.float32)
    case.head.requires_grad_()
    out = case.run(case.workspace("torch"))
    assert all(value is None or not value.requires_grad for value in out.values())


def test_workspace_follows_implementation_and_dtype() -> None:
    make = partial(make_workspace, num_rows=5000, hidden_size=64, vocab_size=1001, device="cpu")
    ws = make(dtype=torch.float32)
    assert ws.implementation == "torch"
    assert ws.logits.stride() == (1008, 1), "rows start at multiples of 16 elements"
    assert ws.head_tile is None
    assert ws.nbytes() > ws.logits.nbytes
    assert make(dtype=torch.bfloat16).head_tile is not None
    assert make(dtype=torch.float32, scratch_bytes=100 * 1008 * 4).chunk_rows == 100
    assert make(dtype=torch.float64).logits.dtype == torch.float64
    assert make_workspace(num_rows=0, hidden_size=1, vocab_size=1, dtype=torch.float32, device="cpu").chunk_rows == 1


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"dtype": torch.int64}, TypeError, "dtype must be float16"),
        ({"hidden_size": 0}, ValueError, "at least 1"),
        ({"chunk_rows": 0}, ValueError, "at least 1"),
        ({"num_rows": -1}, ValueError, "at least 0"),
        ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
        ({"implementation": "triton", "dtype": torch.float64}, ValueError, "use implementation='torch' for float64"),
    ],
)
def test_wrong_workspaces_are_refused(change: dict[str, object], error: type[Exception], match: str) -> None:
    fields = {"num_rows": 4, "hidden_size": D, "vocab_size": 9, "dtype": torch.float32, "device": DEVICE, **change}
    with pytest.raises(error, match=match):
        make_workspace(**fields)  # type: ignore[arg-type]


ones = partial(torch.ones, device=DEVICE)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden": ones(3, D + 1)}, ValueError, r"head_weight \(V, D\); found \(3, 13\)"),
        ({"hidden": ones(D)}, ValueError, r"must be \(U, D\)"),
        ({"hidden": ones(6, D)}, ValueError, "the workspace holds U <= 5"),
        ({"head_weight": ones(8, D)}, ValueError, "V = 9; found"),
        ({"hidden": ones(3, D).half()}, TypeError, "must share a dtype; found torch.float16"),
        ({"hidden": ones(D, 3).t()}, ValueError, "hidden must be contiguous"),
        ({"mean": ones(3, D).half()}, TypeError, "mean must be torch.float32"),
        ({"mean": ones(4, D)}, ValueError, r"mean must have shape \(3, 12\)"),
        ({"entropy": ones(3, 1)}, ValueError, r"entropy must have shape \(3,\)"),
        ({"argmax": ones(3)}, TypeError, "argmax must be torch.int64"),
        ({"bias": ones(9)}, ValueError, "bias given, mean given, bias_mean missing"),
        ({"bias_mean": ones(3)}, ValueError, "bias missing, mean given, bias_mean given"),
        ({"bias": ones(8), "bias_mean": ones(3)}, ValueError, r"bias must have shape \(9,\)"),
        ({"bias": ones(9).half(), "bias_mean": ones(3)}, TypeError, "bias must be torch.float32"),
        ({"num_rows": 4}, ValueError, r"num_rows must lie in \[0, 3\]"),
        ({"num_rows": -1}, ValueError, r"num_rows must lie in \[0, 3\]"),
        ({"num_rows": ones(1).long()}, ValueError, "num_rows must be an integer or an int64"),
        ({"num_rows": ones(())}, ValueError, "num_rows must be an integer or an int64"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale must be finite"),
        ({"entropy": torch.ones(3, device="meta")}, ValueError, "entropy must be on the workspace's device"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], error: type[Exception], match: str) -> None:
    case = make_case(3, 9, torch.float32)
    arguments = {
        "hidden": case.hidden,
        "head_weight": case.head,
        "workspace": case.workspace("torch", num_rows=5),
        **case.outputs(),
        **change,
    }
    with pytest.raises(error, match=match):
        teacher_statistics(**arguments)  # type: ignore[arg-type]
