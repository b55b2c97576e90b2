"""A replay is the function, bit for bit; what it freezes shows on a CPU; what it cannot hold is refused by line."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.graph_backends import Tape
from dflash_graph.graphs import GraphError, StepGraph, WorkerContext
from tests.graph_toys import REPLAYING, Counter, bits, none, open_context, snapshot
from tests.traced import line_of


@torch.library.custom_op("dflash_graph_test::square_into", mutates_args=("out",))
def square_into(out: Tensor, x: Tensor) -> None:
    """Like the kernels' operators: it writes into its caller's tensor. What it does inside is no graph's business."""
    if x.sum().item() == x.sum().item():
        out.copy_(x * x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        square_into(out, x.detach())
        ctx.save_for_backward(x)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        twice = torch.empty_like(x)
        torch.ops.dflash_graph_test.square_into(twice, x.detach())
        return 2 * x.detach() * grad + 0 * twice, None


class Training:
    """Embedding, two layers, an own operator, a loss, its backward, and AdamW with a rate on the device."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = {"embed": (11, 6), "w1": (6, 8), "w2": (8, 11)}
        self.weights = {n: torch.randn(s, generator=generator).requires_grad_() for n, s in shapes.items()}
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self.tokens, self.labels = torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long)
        self.lr, self.loss, self.steps = torch.tensor(0.0), torch.zeros(()), torch.zeros((), dtype=torch.long)
        self.square = torch.zeros(5, 8)
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=self.lr, fused=True, capturable=True)
        for weight in self.weights.values():
            self.optimizer.state[weight] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)
            }  # fmt: skip

    def micro_step(self) -> None:
        hidden = self.weights["embed"][self.tokens] @ self.weights["w1"]
        hidden = F.layer_norm(Square.apply(hidden, self.square.detach()), (8,))
        first, second = hidden.chunk(2, dim=1)
        hidden = torch.cat([F.silu(first), second * torch.rand(5, 4)], dim=1)
        loss = F.cross_entropy(hidden @ self.weights["w2"], self.labels, reduction="none")
        loss.sum().backward()
        self.loss.copy_(loss.detach().mean())

    @torch.no_grad()
    def apply(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        for weight in self.weights.values():
            assert weight.grad is not None
            weight.grad.zero_()
        self.steps.add_(1)

    def tensors(self) -> dict[str, Tensor]:
        named = dict(self.weights) | {"loss": self.loss, "steps": self.steps}
        for name, weight in self.weights.items():
            assert weight.grad is not None
            named[f"grad.{name}"] = weight.grad
            named |= {f"{kind}.{name}": tensor for kind, tensor in self.optimizer.state[weight].items()}
        return named

    def make(self, context: WorkerContext) -> tuple[StepGraph, StepGraph]:
        state = self.tensors()
        loss = {"loss": state.pop("loss")}
        inputs = {"tokens": self.tokens, "labels": self.labels}
        return (
            context.graph("micro_step", self.micro_step, inputs=inputs, outputs=loss, state=state),
            context.graph("apply", self.apply, inputs={"lr": self.lr}, outputs={}, state=state),
        )

    def load(self, i: int) -> None:
        generator = torch.Generator().manual_seed(100 + i)
        for static in (self.tokens, self.labels):
            static.copy_(torch.randint(0, 11, (5,), generator=generator))


# ---- a replay is the function ----------------------------------------------------------------------------------------


def train_steps(mode: str, num_steps: int) -> list[dict[str, bytes]]:
    """Every tensor after each of the steps, two micro-steps to an update, under a changing learning rate."""
    run, seen = Training(), []
    with open_context(mode) as context:
        micro_step, apply = run.make(context)
        run.load(0)
        context.prepare()
        torch.manual_seed(11)  # the step draws; warm-up and capture drew other times
        for i in range(num_steps):
            for j in range(2):
                run.load(2 * i + j)
                micro_step()
            run.lr.fill_(0.05 / (1 + i))
            apply()
            seen.append(snapshot(run.tensors()))
        assert (micro_step.captured is not None) == (mode in REPLAYING)
        assert (micro_step.calls, apply.calls) == (2 * num_steps, num_steps)
    return seen


@pytest.mark.parametrize("mode", [*REPLAYING, "debug"])
def test_fifty_steps_of_training_equal_eager_ones_bit_for_bit(mode: str) -> None:
    eager, other = train_steps("eager", 50), train_steps(mode, 50)
    for i, (a, b) in enumerate(zip(eager, other, strict=True)):
        assert not [name for name in a if a[name] != b[name]], f"step {i}"
    assert len({step["loss"] for step in eager}) == 50, "nothing was trained"
    assert eager[-1]["w1"] != eager[0]["w1"]


def multiple(x: Tensor, y: Tensor) -> None:
    values, indices = x.topk(2, dim=1)
    y[:, :2] = values + indices
    variance, mean = torch.var_mean(x, dim=1)
    y[:, 2] = variance * mean


def lists(x: Tensor, y: Tensor) -> None:
    parts = [p.clone() for p in x.split(1)]
    torch._foreach_mul_(parts, 3.0)
    added = torch._foreach_add(parts, parts)
    parts.clear()  # as an optimizer that fills its lists anew
    torch.stack([a[0, :3] for a in added], out=y)


def unfilled(x: Tensor, y: Tensor) -> None:
    scratch = torch.empty_like(x)
    scratch.copy_(x)
    scratch.t().mul_(2)
    y.copy_(scratch[:, :3])


def strided(x: Tensor, y: Tensor) -> None:
    y.copy_((x.t() + 1).t()[:, 1:])
    y.view(-1)[::2] *= 0.5


def reshaped(x: Tensor, y: Tensor) -> None:
    scratch = x.clone()
    scratch.t_()
    scratch.mul_(2)
    scratch.unsqueeze_(0)
    y.copy_(scratch[0, :3])


def constants(x: Tensor, y: Tensor) -> None:
    y.copy_(x[:, :3])
    y[0] = torch.arange(3.0)
    y.masked_fill_(y > 1, torch.full((), 9.0))
    y.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones(1, 3))


@torch.inference_mode()
def inference(x: Tensor, y: Tensor) -> None:
    scratch = x.exp()
    scratch[0] += 1
    y.copy_(scratch[:, :3])


def random(x: Tensor, y: Tensor) -> None:
    y.copy_(F.dropout(x, 0.5)[:, :3] + torch.rand(x.shape, generator=torch.default_generator)[:, :3])


def autocast(x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y.copy_((x.t() @ x)[:3, :3] + F.softmax(x, 1).sum())


FUNCTIONS = [multiple, lists, unfilled, strided, reshaped, constants, inference, random, autocast]


@pytest.mark.parametrize("mode", REPLAYING)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_kinds_of_operators_replay_bit_for_bit(mode: str, function: Callable[[Tensor, Tensor], None]) -> None:
    """Several outputs, lists, memory nobody filled, views, constants, inference mode, random numbers, autocast."""
    x, y = torch.randn(3, 4), torch.zeros(3, 3)
    with open_context(mode) as context:
        graph = context.graph("f", lambda: function(x, y), inputs={"x": x}, outputs={"y": y}, state={})
        context.prepare()
        for i in range(5):
            x.normal_()
            torch.manual_seed(i)
            function(x, y)
            expected = bits(y)
            y.fill_(float("nan"))
            torch.manual_seed(i)
            graph()
            assert bits(y) == expected, f"replay {i}"


def test_a_replay_does_not_care_for_the_modes_of_its_caller() -> None:
    """Neither autocast nor gradients of the caller reach a recorded step."""
    x, w, y = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.zeros(3, 4)

    @torch.no_grad()
    def step() -> None:
        y.copy_(x @ w)

    with open_context("recorded") as context:
        graph = context.graph("f", step, inputs={"x": x, "w": w}, outputs={"y": y}, state={})
        context.prepare()
        step()
        expected = bits(y)
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            graph()
        assert bits(y) == expected
        assert not y.requires_grad


def test_an_operator_of_ones_own_is_one_entry_whatever_it_does_inside() -> None:
    x, out, tape = torch.tensor([2.0]), torch.zeros(1), Tape()
    with tape:
        square_into(out, x)
    assert len(tape) == 1
    x.fill_(3.0)
    tape.replay()
    assert out.item() == 9.0


def test_views_and_allocations_are_no_work_of_a_replay() -> None:
    x, tape = torch.ones(4, 6), Tape()
    with tape:
        torch.empty_like(x).view(3, 8).t().unsqueeze_(0)
        x[1:, ::2].detach()
    assert len(tape) == 0


@pytest.mark.parametrize("mode", REPLAYING)
def test_every_replay_rewrites_the_outputs(mode: str) -> None:
    c = Counter()
    with open_context(mode) as context:
        graph = c.make(context)
        context.prepare()
        graph()
        first, kept = c.out, c.out.clone()
        c.x.fill_(10.0)
        graph()
        assert first.tolist() == [20.0, 20.0]
        assert kept.tolist() == [2.0, 4.0]
        assert c.total.tolist() == [11.0, 12.0]


# ---- what a graph freezes --------------------------------------------------------------------------------------------


def final(mode: str, build: Callable[[WorkerContext], Callable[[], Tensor]]) -> list[float]:
    with open_context(mode) as context:
        steps = build(context)
        return [float(x) for x in steps().flatten()]


def _python_lr(context: WorkerContext) -> Callable[[], Tensor]:
    weight, grad, rate = torch.zeros(1), torch.ones(1), {"lr": 1.0}
    graph = context.graph(
        "sgd", none(lambda: weight.add_(grad, alpha=-rate["lr"])), inputs={"grad": grad}, outputs={}, state={}
    )
    return _then(context, graph, weight, lambda: rate.update(lr=100.0))


def _branch(context: WorkerContext) -> Callable[[], Tensor]:
    weight, world = torch.zeros(1), {"double": False}

    def step() -> None:
        weight.add_(1.0)
        if world["double"]:
            weight.mul_(2.0)

    graph = context.graph("branch", step, inputs={}, outputs={}, state={"weight": weight})
    return _then(context, graph, weight, lambda: world.update(double=True))


def _rebound_input(context: WorkerContext) -> Callable[[], Tensor]:
    weight, world = torch.zeros(1), {"x": torch.ones(1)}
    graph = context.graph(
        "rebound", none(lambda: weight.add_(world["x"])), inputs=world, outputs={}, state={"weight": weight}
    )
    return _then(context, graph, weight, lambda: world.update(x=torch.full((1,), 100.0)))


def _moved_weight(context: WorkerContext) -> Callable[[], Tensor]:
    """As `.to(dtype)` or `p.data = ...` do: the graph goes on writing to the memory that it recorded."""
    weight = torch.zeros(1)
    graph = context.graph("moved", none(lambda: weight.add_(1)), inputs={}, outputs={}, state={"weight": weight})

    def move() -> None:
        weight.data = weight.clone()

    context.prepare()

    def run() -> Tensor:
        graph()
        move()
        graph()
        return weight

    return run


def _rebound_grad(context: WorkerContext) -> Callable[[], Tensor]:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.zeros(1)

    def step() -> None:
        (weight * 3).sum().backward()

    graph = context.graph("backward", step, inputs={"weight": weight}, outputs={}, state={"grad": weight.grad})

    def clear() -> None:
        weight.grad = None

    context.prepare()
    graph()

    def run() -> Tensor:
        clear()
        graph()
        return torch.full((1,), -1.0) if weight.grad is None else weight.grad

    return run


def _then(context: WorkerContext, graph: StepGraph, weight: Tensor, change: Callable[[], Any]) -> Callable[[], Tensor]:
    context.prepare()

    def run() -> Tensor:
        weight.zero_()
        graph()
        change()
        graph()
        return weight

    return run


FROZEN = {
    "a Python learning rate": (_python_lr, [-101.0], [-2.0]),
    "a Python branch": (_branch, [4.0], [2.0]),
    "a rebound input": (_rebound_input, [101.0], [2.0]),
    "other memory under the same tensor": (_moved_weight, [2.0], [1.0]),
    "a gradient set to None": (_rebound_grad, [3.0], [-1.0]),
}


@pytest.mark.parametrize("mode", ["eager", *REPLAYING])
@pytest.mark.parametrize("build, eager, frozen", FROZEN.values(), ids=FROZEN)
def test_what_python_decides_is_baked_in(
    mode: str, build: Callable[..., Any], eager: list[float], frozen: list[float]
) -> None:
    assert final(mode, build) == (eager if mode == "eager" else frozen)


@pytest.mark.parametrize("mode", REPLAYING)
def test_python_itself_runs_in_warm_up_and_capture_only(mode: str) -> None:
    c = Counter()
    with open_context(mode, warmups=4) as context:
        graph = c.make(context)
        context.prepare()
        assert c.runs == 4 + 1
        for _ in range(7):
            graph()
        assert (c.runs, graph.calls) == (5, 7)


def test_memory_of_a_pool_is_not_a_graphs_own() -> None:
    """What one graph leaves in its pool for another is lost; the stand-in shows it, as a GPU would only sometimes."""
    world: dict[str, Tensor] = {}
    x, y = torch.ones(2), torch.zeros(2)

    def first() -> None:
        world["kept"] = x + 1

    with open_context("fake cuda_graph") as context:
        a = context.graph("first", first, inputs={"x": x}, outputs={}, state={})
        b = context.graph("second", none(lambda: y.copy_(world["kept"])), inputs={}, outputs={"y": y}, state={})
        context.prepare()
        a()
        b()
        assert y.isnan().all()


# ---- what cannot be recorded -----------------------------------------------------------------------------------------


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.max().item()  # line: backward


def _item(x: Tensor) -> None:
    x.mul_(x.sum().item())  # line: item


def _boolean(x: Tensor) -> None:
    x.mul_(x[x > 0].sum())  # line: boolean


def _nonzero(x: Tensor) -> None:
    torch.nonzero(x)  # line: nonzero


def _branching(x: Tensor) -> None:
    if x.sum() > 0:  # line: branching
        x.mul_(2)


def _repeat(x: Tensor) -> None:
    x.repeat_interleave(torch.ones(3, dtype=torch.long))  # line: repeat


def _generator(x: Tensor) -> None:
    x.bernoulli_(0.5, generator=torch.Generator())  # line: generator


def _in_backward(x: Tensor) -> None:
    Reading.apply(x.clone().requires_grad_()).sum().backward()


ILLEGAL = {
    "item": _item, "boolean": _boolean, "nonzero": _nonzero, "branching": _branching, "repeat": _repeat,
    "generator": _generator, "backward": _in_backward,
}  # fmt: skip


@pytest.mark.parametrize("marker, function", ILLEGAL.items(), ids=ILLEGAL)
@pytest.mark.parametrize("mode", REPLAYING)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(
    mode: str, marker: str, function: Callable[[Tensor], None]
) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    before = bits(x)
    with open_context(mode, name="drafter") as context:
        graph = context.graph("loss", lambda: function(x), inputs={}, outputs={}, state={"x": x})
        line = line_of(__file__, f"line: {marker}")
        with pytest.raises(
            GraphError, match=rf"worker 'drafter' could not capture loss: .*test_graph_tape\.py:{line} in "
        ) as e:
            context.prepare()
        assert "dflash-graph debug" in str(e.value)
        assert bits(x) == before, "warm-up and the attempt are undone"
        with pytest.raises(GraphError, match="must be captured before it runs"):
            graph()
    assert gc.isenabled()


def test_eager_runs_what_cannot_be_captured() -> None:
    x = torch.tensor([1.0, 2.0])
    with open_context("eager") as context:
        graph = context.graph("loss", lambda: _item(x), inputs={}, outputs={}, state={"x": x})
        context.prepare()
        graph()
    assert x.tolist() == [3.0, 6.0]
