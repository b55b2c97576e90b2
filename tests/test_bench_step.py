"""The bench of the whole step: contestants compute the same, counts count what they say, and failures are told."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import bench_step
from bench.bench_step import Result, Worker, WorkerFailed, check, judge, parse_shape, run
from bench.peers.contestant import Contestant
from bench.peers.counting import count, forget_peak, peak, resident
from bench.peers.problem import Problem, Shape, make_problem
from bench.peers.worker import LOSSES, STEPS, answer, start
from dflash_graph import padding

# Sizes that all differ, two rows, more than one query head per key head.
TINY = Shape(
    num_tokens=80, num_anchors=12, block_size=4, row_length=40, hidden_size=24, num_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=28, num_layers=2, num_taps=2, vocab_size=50,
)  # fmt: skip
NOWHERE = Path("no/such/folder")


@pytest.fixture(autouse=True)
def _draw_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our contestant replaces the anchor draw of its process; put it back."""
    monkeypatch.setattr(padding, "draw_anchors", padding.draw_anchors)


def stepped(name: str, shape: Shape = TINY) -> Contestant:
    contestant = (STEPS | LOSSES)[name](make_problem(shape))
    contestant.reset()
    contestant.step()
    return contestant


def dense_loss(problem: Problem, w: dict[str, Tensor]) -> Tensor:
    """Mean loss, float64, each block on its own and written from the architecture's definition."""
    s = problem.shape
    e, groups = s.head_dim, s.num_heads // s.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + s.rms_norm_eps).sqrt() * weight

    def rotate(x: Tensor, positions: Tensor) -> Tensor:  # (positions, heads, e)
        angles = positions[:, None] * s.rope_theta ** -(torch.arange(0, e, 2).double() / e)
        a, b = x[..., : e // 2], x[..., e // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    assert problem.features is not None
    embed, losses = problem.embed.double(), []
    for row in range(s.num_rows):
        context = norm(problem.features[row].double() @ w["fc.weight"].T, w["hidden_norm.weight"])
        for anchor in problem.anchors[row].tolist():
            ids = [int(problem.tokens[row, anchor]), *[s.mask_token_id] * (s.block_size - 1)]
            x, seen = embed[ids], context[:anchor]
            for i in range(s.num_layers):
                p = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}
                inner = norm(x, p["input_layernorm.weight"])
                source = torch.cat([seen, inner])
                own, all_ = torch.arange(anchor, anchor + s.block_size), torch.arange(anchor + s.block_size)
                q = (inner @ p["self_attn.q_proj.weight"].T).unflatten(-1, (-1, e))
                k, v = ((source @ p[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, e)) for n in "kv")
                q = rotate(norm(q, p["self_attn.q_norm.weight"]), own)
                k = rotate(norm(k, p["self_attn.k_norm.weight"]), all_)
                k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
                mixed = torch.einsum("hqk,khe->qhe", (torch.einsum("qhe,khe->hqk", q, k) / e**0.5).softmax(-1), v)
                x = x + mixed.flatten(1) @ p["self_attn.o_proj.weight"].T
                inner = norm(x, p["post_attention_layernorm.weight"])
                gate, up = (inner @ p[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
                x = x + (F.silu(gate) * up) @ p["mlp.down_proj.weight"].T
            logits = norm(x, w["norm.weight"])[1:] @ embed.T
            losses.append(F.cross_entropy(logits, problem.tokens[row, anchor + 1 : anchor + s.block_size]))
    return torch.stack(losses).mean()


def test_steps_agree_with_a_dense_float64_drafter() -> None:
    problem = make_problem(TINY)
    weights = {name: t.double().requires_grad_() for name, t in problem.parameters.items()}
    loss = dense_loss(problem, weights)
    loss.backward()
    for name in ("ours", "naive", "linear_cross_entropy"):
        contestant = stepped(name)
        assert contestant.loss() == pytest.approx(loss.item(), rel=1e-6), name
        found = contestant.grads()
        assert found.keys() == weights.keys()
        for tensor, truth in weights.items():
            assert truth.grad is not None
            error = (found[tensor].double() - truth.grad).norm() / truth.grad.norm()
            assert error < 1e-5, (name, tensor)


def test_losses_agree() -> None:
    truth = stepped("loss:naive")
    for name in ("loss:ours", "loss:linear_cross_entropy"):
        found = stepped(name)
        assert found.loss() == pytest.approx(truth.loss(), rel=1e-6)
        torch.testing.assert_close(found.grads()["hidden"], truth.grads()["hidden"], rtol=1e-4, atol=1e-7)


def test_a_second_step_after_reset_repeats_the_first() -> None:
    for name in ("ours", "naive"):
        contestant = stepped(name)
        loss, grads = contestant.loss(), {n: g.clone() for n, g in contestant.grads().items()}
        contestant.reset()
        contestant.step()
        assert contestant.loss() == loss
        assert all(torch.equal(g, grads[n]) for n, g in contestant.grads().items())


@pytest.mark.parametrize("name", bench_step.PEERS)
def test_public_trainers_agree_where_they_are_installed(name: str, tmp_path: Path) -> None:
    try:
        python = bench_step.find_python(name, bench_step.ROOT / ".cache/peers")
    except WorkerFailed as reason:
        pytest.skip(str(reason))
    truth = stepped("naive")
    worker = Worker(name, TINY, python=python, threads=1)
    try:
        result = worker.ask(f"check {tmp_path / 'grads'}")
        counts = worker.ask("count")
    finally:
        worker.close()
    assert result["loss"] == pytest.approx(truth.loss(), rel=1e-5)
    error = bench_step._grad_error(torch.load(tmp_path / "grads", weights_only=True), truth.grads())
    assert error < 1e-4
    assert counts["flops"] > counts["flops_torch"] > 0


# ---- counting -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("bench_test::product", mutates_args=())
def _opaque(x: Tensor, y: Tensor) -> Tensor:
    return x @ y + 1


class Known(Contestant):
    """3 operators that work (product, addition, SDPA), a view and an allocation that do not."""

    def reset(self) -> None:
        pass

    def step(self) -> None:
        x = _opaque(torch.ones(4, 5), torch.ones(5, 6)).view(24)
        torch.empty_like(x)
        q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 7, 8)
        F.scaled_dot_product_attention(q, k, k)

    def loss(self) -> float:
        return 0.0

    def grads(self) -> dict[str, Tensor]:
        return {}


def test_counts_are_of_what_a_step_does() -> None:
    found = count(Known())
    product, attention = 2 * 4 * 5 * 6, 2 * (2 * 2 * 3 * 7 * 8)
    assert found["flops"] == product + attention
    assert found["flops_torch"] == product
    made = found["operators_by_op"].pop("aten::ones", 0) + found["operators_by_op"].pop("aten::fill_", 0)
    assert found["operators_by_op"] == {
        "aten::mm": 1, "aten::add": 1, "aten::_scaled_dot_product_flash_attention_for_cpu": 1
    }  # fmt: skip
    assert found["operators"] == made + 3
    assert found["operators_closed"] == made + 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_products_of_onednn_are_counted() -> None:
    class Product(Known):
        def step(self) -> None:
            torch.ops.mkldnn._linear_pointwise(torch.ones(4, 5), torch.ones(6, 5), None, "none", [], "")

    assert count(Product())["flops"] == 2 * 4 * 5 * 6


def test_our_step_counts_what_its_operators_do() -> None:
    found = count(stepped("ours"))
    rows, d, v = TINY.trained_rows, TINY.hidden_size, TINY.vocab_size
    assert found["flops"] > 4 * rows * d * v
    assert found["flops"] == found["flops_torch"]
    assert found["operators_closed"] <= found["operators"]


def test_peak_memory_sees_a_passing_tensor() -> None:
    before = resident()
    forget_peak()
    torch.ones(2**24)  # 64 MiB, gone at once
    assert 60 * 2**20 < peak() - before < 80 * 2**20
    assert resident() - before < 16 * 2**20


def test_a_worker_reports_and_answers(tmp_path: Path) -> None:
    contestant, report = start("loss:naive", TINY)
    assert report["loss"] == pytest.approx(stepped("loss:naive").loss())
    assert {"wall_s", "cpu_s", "loss"} <= answer(contestant, "time").keys()
    answer(contestant, f"check {tmp_path / 'grads'}")
    assert torch.load(tmp_path / "grads")["hidden"].shape == (TINY.trained_rows, TINY.hidden_size)
    with pytest.raises(ValueError, match="unknown command 'sleep'"):
        answer(contestant, "sleep")


# ---- the report -----------------------------------------------------------------------------------------------------


def test_report_is_complete_and_says_why_a_contestant_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    report = run([TINY], peers=NOWHERE, threads=1, rounds=2, steps=("ours", "naive", "specforge"), losses=())
    (entry,) = report["shapes"]
    ours, naive, missing = entry["step"]
    for result in (ours, naive):
        assert result["loss"] == pytest.approx(stepped("naive").loss(), rel=1e-6)
        assert result["grad_error"] < 1e-4
        assert len(result["cpu_s"]) == len(result["wall_s"]) == 2
        assert result["cpu_median_s"] > 0
        assert result["counts"]["flops"] > 0
        assert result["versions"]["torch"] == torch.__version__
        assert 0 <= result["extra_bytes"] < 2**30
    assert "make_envs.sh" in missing["failed"]
    assert {"cpu", "cores", "threads", "commit", "command", "torch"} <= report["machine"].keys()
    assert len(report["verdict"]) == 7
    assert json.loads(json.dumps(report)) == report
    printed = capfd.readouterr().out
    assert "specforge: did not run: no environment" in printed
    assert "fewer FLOPs" in printed


def result(name: str, *, flops: float, seconds: float, megabytes: int, operators: int, loss: float = 1.0) -> Result:
    return Result(
        name=name, loss=loss, grad_error=0.0, extra_bytes=megabytes * 10**6, cpu_s=[seconds], wall_s=[seconds],
        counts={"flops": flops, "operators": 100 - operators, "operators_closed": operators},
    )  # fmt: skip


def test_verdict_is_against_the_best_other_at_each_measure() -> None:
    ours = result("ours", flops=10, seconds=1.0, megabytes=50, operators=7)
    a = result("a", flops=11, seconds=1.4, megabytes=99, operators=8)
    b = result("b", flops=10, seconds=3.0, megabytes=400, operators=9)
    broken = Result(name="c", failed="no environment")
    lean = result("ours:groups=4", flops=1, seconds=0.1, megabytes=1, operators=1)  # no other, in whatever setting
    lines = {line.what.removesuffix(", 1e9"): line for line in judge([ours, lean, a, b, broken], "ours", "here")}
    assert (lines["fewer FLOPs"].who, lines["fewer FLOPs"].holds) == ("b", False)  # equal is not fewer
    assert (lines["fewer operators, closed"].who, lines["fewer operators, closed"].holds) == ("a", True)
    assert (lines["fewer operators, opened"].who, lines["fewer operators, opened"].holds) == ("b", False)
    half = lines["at most half the peak memory, MB"]
    assert (half.who, half.ours, half.other, half.holds) == ("a", 50, 99, False)
    assert lines["not slower, CPU s"].holds
    assert lines["not slower, wall s"].holds
    aim = lines["1.5 times faster, CPU s"]
    assert (aim.holds, aim.hard) == (False, False)
    assert str(aim).startswith("not reached")
    assert str(lines["fewer FLOPs"]).startswith("FAILS")


def test_contestants_that_compute_something_else_are_refused() -> None:
    truth = result("naive", flops=1, seconds=1, megabytes=1, operators=1)
    for wrong in (1.001, math.nan):
        other = result("other", flops=1, seconds=1, megabytes=1, operators=1, loss=wrong)
        with pytest.raises(ValueError, match="other must agree with naive"):
            check([truth, other], "naive")
    other = result("other", flops=1, seconds=1, megabytes=1, operators=1)
    other.grad_error = math.nan
    with pytest.raises(ValueError, match="gradient error nan"):
        check([truth, other], "naive")
    other.grad_error = 1e-6
    check([truth, other, Result(name="gone", failed="x")], "naive")


def test_a_worker_that_fails_says_so_in_one_line() -> None:
    with pytest.raises(WorkerFailed, match="KeyError"):
        Worker("nobody", TINY, python=bench_step.find_python("ours", NOWHERE), threads=1)


def test_shapes_are_read_and_checked() -> None:
    assert parse_shape("2048x512x8") == Shape(num_tokens=2048, num_anchors=512, block_size=8)
    assert parse_shape("2048x512x8").trained_rows == 3584
    with pytest.raises(ValueError, match="multiple of the row length"):
        parse_shape("1000x10x4")
    with pytest.raises(ValueError, match="cannot hold"):
        parse_shape("1024x1020x8")
