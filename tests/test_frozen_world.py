"""Two runs of a step, and where its tensors lie: each kind of change by name, values and line; else no finding."""

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_graph.tracing import (
    AddressBook,
    Finding,
    compare_traces,
)
from tests.traced import World, found_lines, line_of, traced

HERE = __file__


def kinds(findings: list[Finding]) -> list[str]:
    return [f.what for f in findings]


# ---- frozen world ---------------------------------------------------------------------------------------------------


def two_runs(first: Callable[[], Any], second: Callable[[], Any] | None = None, **options: Any) -> list[Finding]:
    """Differences of two runs, the first one kept alive as a trace only."""
    return compare_traces(traced(first), traced(second or first), check="frozen_world", **options)


def test_runs_over_other_data_are_equal() -> None:
    w = World()

    def step() -> None:
        y = torch.where(w.mask, w.x.sin(), 0.0)
        w.table.mul_(y.sum())
        w.x.add_(torch.rand(6, device=w.x.device))

    assert two_runs(step) == []
    first = traced(step)
    w.x.copy_(torch.randn(6))
    w.mask.logical_not_()
    assert compare_traces(first, traced(step), check="frozen_world") == []


def test_a_python_number_that_changes_is_found_with_both_values() -> None:
    w, rates = World(), iter([0.5, 0.25])

    def step() -> None:
        w.x.mul_(next(rates))  # a Python number

    (found,) = two_runs(step)
    assert found.check == "frozen_world"
    assert found.what == "other of aten.mul_.Tensor is 0.5 in the first run and 0.25 in the second run"
    assert found_lines([found]) == [line_of(HERE, "a Python number")]


def test_a_number_wrapped_on_the_host_is_compared_too() -> None:
    w, rates = World(), iter([0.5, 0.25, 3.0, 3.0])
    (found,) = two_runs(lambda: w.x * torch.tensor(next(rates)))
    assert "other (on the host) of aten.mul.Tensor is 0.5 in the first run and 0.25" in found.what
    assert two_runs(lambda: w.x.__setitem__(w.mask, next(rates))) == []
    rates = iter([3.0, 4.0])
    (found,) = two_runs(lambda: w.x.__setitem__(w.mask, next(rates)))
    assert "3.0 in the first run and 4.0" in found.what


def test_nan_equals_nan_and_true_is_not_one() -> None:
    w, values = World(), iter([float("nan"), float("nan"), True, 1])
    assert two_runs(lambda: w.x.mul(next(values))) == []
    assert kinds(two_runs(lambda: w.x.mul(next(values))))[0].startswith("other of aten.mul.Tensor is True")


def test_a_float_learning_rate_is_found_and_a_tensor_is_not() -> None:
    for rate in (1e-3, torch.tensor(1e-3)):
        weight = torch.ones(3, requires_grad=True)
        weight.grad = torch.ones(3)
        optimizer = torch.optim.AdamW([weight], lr=rate, fused=True, capturable=True)
        optimizer.step()

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()  # the learning rate's step

        first = traced(step)
        if isinstance(rate, Tensor):
            rate.fill_(1e-4)
            assert compare_traces(first, traced(step), check="frozen_world") == []
        else:
            optimizer.param_groups[0]["lr"] = 1e-4
            (found,) = compare_traces(first, traced(step), check="frozen_world")
            assert found.what.startswith("lr of aten._fused_adamw_.default is 0.001 in the first run and 0.0001")
            assert found.site is not None
            assert found.site.line == line_of(HERE, "the learning rate's step")


def test_a_shape_that_changes_is_found() -> None:
    w, sizes = World(), iter([4, 3])
    found = two_runs(lambda: torch.zeros(next(sizes), device=w.x.device).exp())
    assert any("result of aten.zeros.default is f32[4] in the first run and f32[3]" in what for what in kinds(found))


def test_another_operation_is_found_with_both_sites() -> None:
    w, calls = World(), iter([True, False])

    def step() -> None:
        y = w.x.sin()
        if next(calls):
            y.cos()  # first branch
        else:
            y.exp()  # second branch

    (found,) = two_runs(step)
    assert re.match(
        r"operation 1 differs: first run aten.cos.default at \S+:(\d+) in .*; second run aten.exp", found.what
    )
    assert f":{line_of(HERE, 'second branch')} " in found.what
    assert found_lines([found]) == [line_of(HERE, "first branch")]


def test_an_operation_too_many_is_found() -> None:
    w, calls = World(), iter([True, False])
    (found,) = two_runs(lambda: (w.x.sin(), w.x.cos() if next(calls) else None))
    assert "first run has 2 operations, second run 1; the first one more: aten.cos.default" in found.what


def test_reading_another_s_result_is_found() -> None:
    w, calls = World(), iter([True, False])

    def step() -> None:
        y, z = w.x.sin(), w.x.cos()
        (y if next(calls) else z).exp()

    (found,) = two_runs(step)
    assert "self of aten.exp.default is the result of aten.sin.default at" in found.what


def test_a_moved_external_tensor_is_found_and_named() -> None:
    w = World()

    def step() -> None:
        w.x.sin()  # reads x

    first, old = traced(step), w.x
    w.x = w.x.clone()
    (found,) = compare_traces(first, traced(step), check="frozen_world", names={"world.x": w.x, "world.table": w.table})
    assert found.what.startswith(f"world.x (self of aten.sin.default) lies at {old.data_ptr():#x} in the first run")
    assert f"{w.x.data_ptr():#x}" in found.what
    assert found_lines([found]) == [line_of(HERE, "reads x")]


def test_a_freed_tensor_is_found_although_its_address_is_taken_again() -> None:
    w, room = World(), bytearray(64)  # the allocator may or may not hand an address out again; this always does
    w.x = torch.frombuffer(room, dtype=torch.float32)
    first = traced(lambda: w.x.sin())
    w.x = torch.frombuffer(room, dtype=torch.float32)
    (found,) = compare_traces(first, traced(lambda: w.x.sin()), check="frozen_world")
    assert "was freed after the first run" in found.what
    kept = w.x
    second = traced(lambda: w.x.sin())
    w.x = torch.frombuffer(room, dtype=torch.float32)
    assert kept.data_ptr() == w.x.data_ptr()
    assert compare_traces(second, traced(lambda: w.x.sin()), check="frozen_world") == []


def test_memory_that_comes_and_goes_is_compared_unless_it_is_a_number() -> None:
    w, rooms = World(), iter([bytearray(24), bytearray(24), bytearray(4), bytearray(4)])
    kept = []

    def step() -> None:
        kept.append(next(rooms))
        w.x.add(torch.frombuffer(kept[-1], dtype=torch.float32).squeeze())

    found = two_runs(step)
    assert len(found) == 1
    assert re.match(r"other of aten.add.Tensor|self of aten.squeeze", found[0].what)
    assert two_runs(step) == []


def test_a_view_at_another_place_is_metadata_not_a_moved_tensor() -> None:
    w, places = World(), iter([0, 1])
    found = two_runs(lambda: w.table[next(places)].sin())
    assert len(found) == 2
    assert found[0].what.startswith("index of aten.select.int is 0 in the first run and 1")
    assert "result of aten.select.int is f32[3] in the first run and f32[3] offset 3" in found[1].what


# ---- addresses ------------------------------------------------------------------------------------------------------


def trained(*, steps: int = 1) -> tuple[nn.Linear, torch.optim.AdamW, Callable[[], dict[str, Tensor | None]]]:
    """A module, its optimizer, and the names of all that a step reaches."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-3), fused=True, capturable=True)

    def names() -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for name, parameter in module.named_parameters():
            found |= {name: parameter, f"grad.{name}": parameter.grad}
            found |= {f"{key}.{name}": value for key, value in optimizer.state[parameter].items()}
        return found

    for _ in range(steps):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return module, optimizer, names


def test_a_step_in_place_moves_nothing() -> None:
    module, optimizer, names = trained()
    book = AddressBook(names)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    assert book.check() == []
    views = AddressBook(lambda: {"view": module.weight.detach()[0]})  # another tensor object at each look
    assert views.check() == []


def test_gradients_set_to_none_are_found_also_at_the_same_address() -> None:
    module, optimizer, names = trained()
    book = AddressBook(names)

    def step() -> None:
        torch.zeros(2).data = torch.ones(2)  # another's
        optimizer.zero_grad(set_to_none=True)  # gradients go
        module(torch.ones(1, 3)).sum().backward()

    trace = traced(step)
    found = book.check(trace)
    assert [f.what.split()[0] for f in found] == ["grad.weight", "grad.bias"]
    assert set(found_lines(found)) == {line_of(HERE, "gradients go")}
    assert "set_to_none=False" in found[0].advice
    optimizer.zero_grad(set_to_none=True)
    gone = book.check()
    assert all("was set to None or is gone" in f.what for f in gone)
    assert len(gone) == 2
    book.rewrite()
    module(torch.ones(1, 3)).sum().backward()
    assert all("did not exist before" in f.what for f in book.check())
    assert len(book.check()) == 2


def test_a_tensor_allocated_anew_at_its_old_address_is_found() -> None:
    room = bytearray(64)
    tensors = {"grad.weight": torch.frombuffer(room, dtype=torch.float32)}
    book = AddressBook(lambda: dict(tensors))
    tensors["grad.weight"] = torch.frombuffer(room, dtype=torch.float32)
    (found,) = book.check()
    assert found.what.startswith("grad.weight was freed and allocated anew; by chance it lies at")
    assert "set_to_none=False" in found.advice
    book.rewrite()
    assert book.check() == []


def test_a_tensor_of_another_shape_is_found() -> None:
    tensors = {"mask": torch.ones(2, 3)}
    book = AddressBook(lambda: dict(tensors))
    tensors["mask"] = tensors["mask"].t()
    (found,) = book.check()
    assert "mask changed from shape (2, 3), strides (3, 1) to shape (3, 2), strides (1, 3)" in found.what


def test_a_reloaded_optimizer_is_found() -> None:
    _, optimizer, names = trained()
    saved = dict(optimizer.state_dict())
    saved["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}
    book = AddressBook(names)
    optimizer.load_state_dict(saved)
    found = book.check()
    assert {f.what.split(" moved from")[0] for f in found} == {
        f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")
    }
    assert "load_state_dict" in found[0].advice


def test_parameters_that_are_cast_are_found() -> None:
    module, _, names = trained(steps=0)
    book = AddressBook(names)
    trace = traced(lambda: module.to(torch.bfloat16))  # cast
    found = book.check(trace)
    assert [f.what.split(" was cast")[0] for f in found] == ["weight", "bias"]
    assert "from torch.float32 on cpu to torch.bfloat16 on cpu" in found[0].what
    assert found_lines(found[:1]) == [line_of(HERE, "cast")]


@pytest.mark.parametrize("how", ["data", "assign", "buffer"])
def test_rebound_tensors_are_found(how: str) -> None:
    module, *_ = trained(steps=0)
    module.register_buffer("scale", torch.ones(2))
    book = AddressBook(lambda: dict(module.state_dict()))

    def step() -> None:
        if how == "data":
            module.weight.data = module.weight.data.clone()
        elif how == "assign":
            module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)
        else:
            module.scale = module.scale * 2  # type: ignore[operator]

    found = book.check(traced(step))
    assert [f.what.split()[0] for f in found] == {
        "data": ["weight"], "assign": ["weight", "bias", "scale"], "buffer": ["scale"],
    }[how]  # fmt: skip
    assert all(f.site is not None and f.site.file == HERE for f in found)


def test_the_book_holds_nothing_alive() -> None:
    tensors = {"a": torch.ones(1000)}
    ref = weakref.ref(tensors["a"])
    book = AddressBook(lambda: dict(tensors))
    tensors.clear()
    assert ref() is None
    assert kinds(book.check())[0].startswith("a was set to None or is gone")
