"""What a CUDA graph cannot hold: each illegal operation on its own, by line, and legal ones that look like them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_graph.tracing import (
    Tracer,
    find_illegal_ops,
)
from tests.traced import World, traced

CPU = torch.device("cpu")
HERE = __file__


def _ignore(call: Callable[[], Any]) -> None:
    try:
        call()
    except (RuntimeError, AssertionError):  # no pinned memory and no CUDA without a GPU
        return


ILLEGAL: dict[str, tuple[Callable[[World], Any], str]] = {
    "item": (lambda w: w.one.item(), r"\.item\(\)"),
    "tolist": (lambda w: w.x.tolist(), r"\.tolist\(\)"),
    "numpy": (lambda w: w.x.numpy(), r"\.numpy\(\)"),
    "asarray": (lambda w: np.asarray(w.x), "numpy"),
    "if": (lambda w: 1 if w.one else 0, "bool"),
    "float": (lambda w: float(w.one), "float"),
    "int": (lambda w: int(w.one), "int"),
    "index": (lambda w: [1, 2][w.one], "Python index"),
    "range": (lambda w: list(range(w.one)), "Python index"),
    "in": (lambda w: 1.0 in w.x, "'in'"),
    "print": (lambda w: str(w.x), "printing"),
    "format": (lambda w: f"{w.one}", "formatting"),
    "select by tensor": (lambda w: w.x[w.one], "_local_scalar_dense"),
    "slice by tensor": (lambda w: w.x[w.one :], "_local_scalar_dense"),
    "cpu": (lambda w: w.x.cpu(), r"\.cpu\(\)"),
    "to cpu": (lambda w: w.x.to("cpu"), r"\.to\('cpu'\)"),
    "to cpu device": (lambda w: w.x.to(device=torch.device("cpu"), dtype=torch.float64), r"\.to\('cpu'\)"),
    "equal": (lambda w: torch.equal(w.x, w.x), "aten.equal"),
    "allclose": (lambda w: torch.allclose(w.x, w.x), "aten.allclose"),
    "one_hot": (lambda w: F.one_hot(w.index), "_local_scalar_dense"),
    "inverse": (lambda w: torch.linalg.inv(w.table[:3] + 9 * torch.eye(3, device=CPU)), "_linalg_check_errors"),
    "normal": (lambda w: torch.normal(w.x, w.x.abs()), "aten.normal"),
    "multinomial": (lambda w: torch.multinomial(w.table[1], 1), "aten.multinomial"),
    "singular values": (lambda w: torch.linalg.svdvals(w.table), "aten._linalg_svd"),
    "full of a tensor": (lambda w: torch.full((2,), w.one, device=w.x.device), "_local_scalar_dense"),
    "range to a tensor": (lambda w: torch.arange(w.one, device=w.x.device), "_local_scalar_dense"),
    "backward of a product": (lambda w: w.x.clone().requires_grad_().prod().backward(), "ProdBackward0 looks"),
    "frombuffer": (lambda w: torch.frombuffer(bytearray(8), dtype=torch.float32), r"torch.frombuffer\(\) makes"),
    "legacy constructor": (lambda w: torch.Tensor([1.0, 2.0]), "host data"),
    "nonzero": (lambda w: w.mask.nonzero(), "aten.nonzero"),
    "where": (lambda w: torch.where(w.mask), "aten.nonzero"),
    "masked_select": (lambda w: torch.masked_select(w.x, w.mask), "aten.masked_select"),
    "unique": (lambda w: torch.unique(w.index), "aten._unique2"),
    "bincount": (lambda w: torch.bincount(w.index), "aten.bincount"),
    "repeat_interleave": (lambda w: w.index.repeat_interleave(w.index), "without output_size"),
    "boolean index": (lambda w: w.x[w.mask], "boolean index"),
    "byte index": (lambda w: w.x[w.mask.byte()], "boolean index"),
    "boolean assignment": (lambda w: w.x.__setitem__(w.mask, w.one.float()), "boolean index"),
    "boolean and integer": (lambda w: w.table.__setitem__((w.table[:, 0] > 4, w.index[:1]), w.x[:3]), "boolean index"),
    "two masks": (lambda w: w.table.__setitem__((w.table[:, 0] > 4, w.table[0] > 1), 0.0), "boolean index"),
    "tensor of a list": (lambda w: torch.tensor([1.0, 2.0]), r"torch\.tensor\(\)"),
    "tensor on the device": (lambda w: torch.tensor(1.0, device=w.x.device), r"torch\.tensor\(\)"),
    "as_tensor": (lambda w: torch.as_tensor([1, 2]), r"torch\.as_tensor\(\)"),
    "new_tensor": (lambda w: w.x.new_tensor([1.0]), r"\.new_tensor\(\)"),
    "from_numpy": (lambda w: torch.from_numpy(np.ones(3, np.float32)), "host data"),
    "index by a list": (lambda w: w.x[[0, 1]], "Python list"),
    "index by an array": (lambda w: w.x[np.array([0, 1])], "NumPy array"),
    "number through an index": (lambda w: w.x.__setitem__(w.index, 5.0), "through an index tensor"),
    "number to an element": (lambda w: w.table.__setitem__((0, 1), 5.0), "one element"),
    "index made on the host": (lambda w: w.x[torch.arange(2)], r"host tensor of shape \(2,\) as indices\[0\]"),
    "host tensor moved": (lambda w: torch.arange(2).to(w.x.device), "moves a host tensor"),
    "host tensor by name": (lambda w: w.x + torch.zeros(6, device="cpu"), "host tensor"),
    "host computation": (lambda w: w.x + (torch.arange(6) * 2).float().sqrt(), "host tensor"),
    "copied from the host": (lambda w: w.x.copy_(torch.ones(6)), "copies a host tensor to the device"),
    "copied to the host": (lambda w: torch.zeros(6).copy_(w.x), "copies a tensor to the host"),
    "pinned": (lambda w: w.x.pin_memory(), "pinned"),
    "pinned factory": (lambda w: torch.empty(3, device=w.x.device, pin_memory=True), "pinned"),
    "generator": (lambda w: torch.rand(3, generator=w.generator, device=w.x.device), "explicit generator"),
    "generator in place": (lambda w: w.x.normal_(generator=w.generator), "explicit generator"),
    "random host scalar": (lambda w: w.x * torch.rand(()), "random host scalar"),
    "seed": (lambda w: torch.manual_seed(0), "manual_seed"),
    "synchronise": (lambda w: torch.cuda.synchronize(), r"torch.cuda.synchronize\(\) waits"),
    "other device": (lambda w: w.x.to("meta"), "copies from cpu to meta"),
    "two devices": (lambda w: w.x.copy_(torch.empty(6, device="meta")), "copies from meta to cpu"),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_operation_is_found_once_with_its_line(name: str) -> None:
    step, what = ILLEGAL[name]
    world = World()
    with Tracer() as tracer:
        _ignore(lambda: step(world))
    found = find_illegal_ops(tracer.trace)
    assert len(found) == 1, "\n".join(map(str, found))
    assert found[0].check == "illegal_op"
    assert re.search(what, found[0].what), found[0]
    site = found[0].site
    assert site is not None
    assert (site.file, site.code) == (HERE, Path(HERE).read_text().splitlines()[site.line - 1].strip())
    assert f'"{name}": ' in site.code
    assert found[0].meaning
    assert found[0].advice


LEGAL: dict[str, Callable[[World], Any]] = {
    "to the step's device": lambda w: w.x.to(w.one.device).to(w.x.device, torch.float64).to(w.x),
    "a cast": lambda w: w.x.to(torch.bfloat16).float(),
    "where": lambda w: torch.where(w.mask, w.x, 0.0),
    "masked fill by assignment": lambda w: w.x.__setitem__(w.mask, 0.0),
    "masked fill of rows": lambda w: w.table.__setitem__((slice(None), w.table[0] > 1), 0.0),
    "number to a slice": lambda w: w.table.__setitem__((slice(None), 0), 5.0),
    "integer index": lambda w: (w.x[w.index], w.x.__setitem__(w.index, w.table[0, :2])),
    "repeat_interleave of a fixed size": lambda w: torch.repeat_interleave(w.index, w.index, output_size=2),
    "numbers": lambda w: (w.x * 2, 1 - w.x, 2.0**w.x, w.x.clamp(max=0.5), w.x.add_(w.x, alpha=2)),
    "a host scalar": lambda w: w.x * torch.tensor(2.0),
    "host work alone": lambda w: [torch.arange(3).tolist(), int(torch.tensor(3)), torch.zeros(2).numpy()],
    "made on the device": lambda w: w.x + torch.arange(6, device=w.x.device) + torch.zeros_like(w.x),
    "default generator": lambda w: (torch.rand(6, device=w.x.device), F.dropout(w.x, 0.5), w.x.normal_()),
    "default generator by name": lambda w: torch.rand(6, device=w.x.device, generator=torch.default_generator),
    "shapes": lambda w: (len(w.x), w.x.shape[0], w.x.numel(), w.x.dim(), list(w.x.unbind())),
    "sorting": lambda w: (w.x.sort(), w.x.topk(2), w.x.argmax(), w.x.cumsum(0)),
    "attention": lambda w: F.scaled_dot_product_attention(w.table[None], w.table[None], w.table[None], is_causal=True),
    "random on the device": lambda w: w.x * torch.rand((), device=w.x.device),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_operation_is_not_found(name: str) -> None:
    world = World()
    trace = traced(lambda: LEGAL[name](world))
    assert len(trace) > 0 or name in ("shapes", "to the step's device")
    assert not find_illegal_ops(trace), "\n".join(map(str, find_illegal_ops(trace)))


def test_a_call_and_its_operator_are_one_problem() -> None:
    world = World()
    (found,) = find_illegal_ops(traced(lambda: world.one.item()))
    assert found.what == ".item() reads a tensor's value on the host (in the forward)"


@torch.library.custom_op("dflash_graph_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    torch.manual_seed(int(x[0].item()))
    return x + torch.tensor(x.tolist())


def test_inside_an_operator_of_one_s_own_nothing_is_looked_at() -> None:
    """On a GPU it is another implementation that runs."""
    world = World()
    trace = traced(lambda: opaque(world.x))
    assert trace.names() == ["dflash_graph_tests.opaque.default"]
    assert find_illegal_ops(trace) == []


def test_under_a_default_device_nothing_is_made_on_the_host() -> None:
    world = World()
    with torch.device("cpu"), Tracer() as tracer:
        world.x[torch.arange(2)]
    assert not find_illegal_ops(tracer.trace)


def test_tensors_of_a_cpu_beside_a_gpu_are_on_the_host() -> None:
    """On a machine with a GPU the step's device says so: reading a CPU tensor does not wait."""
    world = World()
    assert find_illegal_ops(traced(lambda: world.x.tolist()))
    assert not find_illegal_ops(traced(lambda: world.x.tolist(), device="cuda"))


def test_a_registered_generator_is_legal() -> None:
    world = World()
    trace = traced(lambda: world.x.normal_(generator=world.generator))
    assert find_illegal_ops(trace)
    assert find_illegal_ops(trace, known_generators=[torch.Generator()])
    assert not find_illegal_ops(trace, known_generators=[world.generator])
