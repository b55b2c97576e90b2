"""CUDA graphs over a strict stand-in: order, streams, pools, failures; and the stand-in's own rules."""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_graph.graph_backends import CudaBackend, TapeBackend
from dflash_graph.graphs import CapturePhase, GraphError, WorkerContext
from tests.graph_backend import FakeCuda
from tests.graph_toys import Counter, in_thread, none, open_context


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    gc.collect()
    assert fake.leftovers() == []


# ---- a life with CUDA graphs -----------------------------------------------------------------------------------------


def test_the_order_of_a_life_with_cuda_graphs(cuda: FakeCuda) -> None:
    c = Counter()
    with open_context("fake cuda_graph", cuda=cuda) as context:
        graphs = c.make(context, "a"), c.make(context, "b")
        assert cuda.events() == ["set stream-1"]
        context.prepare()
        anchor = ["pool 2", "begin on stream-1 pool 2", "end"]
        warm_up = ["warm-up pool 2", "sync stream-1"]
        capture = ["sync stream-1", "begin on stream-1 pool 2", "end"]
        assert cuda.events()[1:] == anchor + 2 * (3 * warm_up + capture) + ["sync stream-1", "empty cache"]
        done = len(cuda.log)
        for graph in graphs:
            graph()
        assert len(cuda.log) == done, "a replay does nothing else"
        assert context.memory() == {"allocated": 1000, "reserved": 2000, "graph_pool": 0}
    assert cuda.events()[done:] == ["reset", "reset", "sync stream-1", "reset", "drop pool 2", "set default-0"]


def test_the_pool_of_a_worker_is_measured(cuda: FakeCuda) -> None:
    x, y = torch.ones(1000), torch.zeros(1000)
    with open_context("fake cuda_graph", cuda=cuda) as context:
        context.graph("f", none(lambda: y.copy_(x.exp())), inputs={"x": x}, outputs={"y": y}, state={})
        context.prepare()
        assert context.memory()["graph_pool"] == 4000


def test_two_workers_on_one_gpu_share_nothing() -> None:
    cuda, phase, both = FakeCuda(), CapturePhase(), threading.Barrier(2, timeout=30)

    def work(name: str) -> Any:
        c = Counter()
        with open_context("fake cuda_graph", cuda=cuda, phase=phase, name=name) as context:
            graph = c.make(context)
            context.prepare()
            both.wait()
            for _ in range(100):
                graph()
            both.wait()
            assert isinstance(context.backend, CudaBackend)
            return context.stream, context.backend._pool.id, c.total.tolist()

    results: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: work(n)}), name=n) for n in ("w0", "w1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (stream_0, pool_0, total_0), (stream_1, pool_1, total_1) = results["w0"], results["w1"]
    assert stream_0 is not stream_1
    assert pool_0 != pool_1
    assert total_0 == total_1 == [100.0, 200.0]
    assert not cuda.faults
    captures = [name for name, what in cuda.log if what == "end"]
    assert captures in (["w0"] * 2 + ["w1"] * 2, ["w1"] * 2 + ["w0"] * 2), "one worker's captures after the other's"


def test_another_stream_or_device_is_refused(cuda: FakeCuda) -> None:
    cuda, c = FakeCuda(num_devices=2), Counter()
    with open_context("fake cuda_graph", cuda=cuda) as context:
        graph = c.make(context)
        other = cuda.Stream(torch.device("cuda", 0))
        cuda.set_stream(other)
        with pytest.raises(GraphError, match=r"prepare\(\) must run on its worker's own stream, stream-1 of cuda:0"):
            context.prepare()
        cuda.set_stream(context.stream)
        context.prepare()
        cuda.set_stream(other)
        with pytest.raises(GraphError, match=r"count must run on .*; the current one is stream-2"):
            graph()
        cuda.set_stream(context.stream)
        cuda.set_device(1)
        with pytest.raises(GraphError, match=r"the current device cuda:1"):
            graph()
        cuda.set_device(0)
        graph()
    assert c.total.tolist() == [1.0, 2.0]


def test_a_capture_that_a_synchronisation_kills_says_so(cuda: FakeCuda) -> None:
    """Another thread synchronises the device in the middle of the capture; warm-ups bear it."""
    c = Counter()

    def disturbed() -> None:
        c.step()
        in_thread(lambda: cuda.synchronize(0) or 0)

    with open_context("fake cuda_graph", cuda=cuda) as context:
        c.make(context, function=disturbed)
        with pytest.raises(
            GraphError, match="could not capture count: RuntimeError: operation failed due to a previous"
        ):
            context.prepare()
        assert c.runs == 4
        assert c.total.tolist() == [0.0, 0.0]


def test_a_capture_that_leaves_its_stream_fails(cuda: FakeCuda) -> None:
    c = Counter()

    def leaving() -> None:
        c.step()
        if cuda.capturing:
            cuda.set_stream(cuda.Stream(torch.device("cuda", 0)))

    with open_context("fake cuda_graph", cuda=cuda) as context:
        c.make(context, function=leaving)
        with pytest.raises(GraphError, match="could not capture count"):
            context.prepare()
        assert not cuda.capturing


def test_the_end_goes_on_whatever_fails_in_it() -> None:
    cuda, c = FakeCuda(), Counter()
    context = open_context("fake cuda_graph", cuda=cuda)
    context.__enter__()
    c.make(context, "a"), c.make(context, "b")
    context.prepare()
    cuda.fail["reset"] = RuntimeError("reset failed")
    with pytest.raises(RuntimeError, match="reset failed"):
        context.close()
    assert cuda.events()[-6:] == ["reset", "reset", "sync stream-1", "reset", "drop pool 2", "set default-0"]
    assert torch.autograd.is_multithreading_enabled()
    context.close()


def test_an_error_at_the_end_is_a_note_of_the_first(cuda: FakeCuda) -> None:
    def live() -> None:
        with open_context("fake cuda_graph", cuda=cuda):
            cuda.fail["sync stream-1"] = RuntimeError("device in an error state")
            raise ZeroDivisionError("the first error")

    with pytest.raises(ZeroDivisionError) as error:
        live()
    assert error.value.__notes__ == ["the end of worker 'worker' failed, too: RuntimeError: device in an error state"]
    assert cuda.events()[-1] == "set default-0"


def test_an_empty_graph_that_fails_leaves_no_pool_behind(cuda: FakeCuda) -> None:
    c = Counter()
    with open_context("fake cuda_graph", cuda=cuda) as context:
        graph = c.make(context)
        cuda.fail["end"] = RuntimeError("no graphs today")
        with pytest.raises(GraphError, match="no graphs today"):
            context.prepare()
        context.prepare()
        graph()
    assert c.total.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("version", [(2, 11), (2, 13)])
def test_debugging_asks_for_what_the_torch_version_has(version: tuple[int, int], tmp_path: Path) -> None:
    cuda, c = FakeCuda(version=version), Counter()
    backend = CudaBackend(torch.device("cuda", 0), debug=True, cuda=cuda)
    with WorkerContext("w", "cpu", mode="debug", phase=CapturePhase(), backend=backend) as context:
        with context.phase.turn("w"):
            captured: Any = backend.capture(c.step)
        assert captured.instantiated
        new = version >= (2, 13)
        assert getattr(captured, "live", None) is (True if new else None)
        assert backend.census(captured) == ({"aten::add_.Tensor": 1, "aten::mul.out": 1} if new else None)
        backend.dump(captured, tmp_path / "step.dot")
        assert (tmp_path / "step.dot").read_text().startswith("digraph")
        captured.reset()
    plain = CudaBackend(torch.device("cuda", 0), cuda=cuda)
    with WorkerContext("w", "cpu", mode="cuda_graph", phase=CapturePhase(), backend=plain) as context:
        c.make(context)
        context.prepare()
        fast: Any = context.graphs[0].captured
        assert not getattr(fast, "live", False), "a check by Python before each replay is for debugging"
        assert backend.census(fast) is None


# ---- the stand-in refuses what a GPU would, and more -----------------------------------------------------------------


class Raw:
    """A stream, a pool and captures by hand, in the state that `capture_begin` wants."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.stream, self.pool = self.cuda.Stream(torch.device("cuda", 0)), self.cuda.MemPool()
        self.cuda.set_stream(self.stream)
        self.x, self.y = torch.tensor([2.0]), torch.tensor([7.0])

    def begin(self, **options: Any) -> Any:
        graph = self.cuda.CUDAGraph()
        graph.capture_begin(**({"pool": self.pool.id, "capture_error_mode": "thread_local"} | options))
        return graph


@pytest.fixture
def raw() -> Iterator[Raw]:
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield Raw()
    finally:
        gc.enable()


def test_the_stand_in_runs_nothing_in_a_capture_and_rewrites_recorded_addresses(raw: Raw) -> None:
    graph = raw.begin()
    inner = raw.x * 3
    raw.y.copy_(inner)
    assert torch.cuda.is_current_stream_capturing()
    graph.capture_end()
    assert raw.y.item() == 7.0
    assert inner.isnan().all()
    raw.x.fill_(5.0)
    graph.replay()
    assert (raw.y.item(), inner.item()) == (15.0, 15.0)
    graph.reset()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()


@pytest.mark.parametrize("case", ["mode", "stream", "pool", "collector", "engine", "nested", "synchronising"])
def test_the_stand_in_refuses_a_capture(raw: Raw, case: str) -> None:
    outer = None
    if case == "stream":
        raw.cuda.set_stream(raw.cuda._defaults[0])
    elif case == "collector":
        gc.enable()
    elif case == "engine":
        torch.autograd.set_multithreading_enabled(True)
    elif case == "nested":
        outer = raw.begin()
    options: dict[str, Any] = {"mode": {"capture_error_mode": "global"}, "pool": {"pool": (0, 99)}}.get(case, {})
    message = {
        "mode": "police other threads", "stream": "non-default stream", "pool": "does not live",
        "collector": "garbage collection", "engine": "calling thread", "nested": "capture in a capture",
        "synchronising": "another thread synchronises",
    }[case]  # fmt: skip
    with ExitStack() as stack:
        if case == "synchronising":
            stack.enter_context(raw.cuda.device_wide(0))
        with pytest.raises(RuntimeError, match=message):
            raw.begin(**options)
    if outer is not None:
        outer.capture_end()
        outer.reset()


def test_the_stand_in_refuses_the_wrong_end_and_the_wrong_replay(raw: Raw) -> None:
    graph = raw.begin()
    raw.y.add_(raw.x)
    with pytest.raises(RuntimeError, match="must end in the thread that began it"):
        in_thread(graph.capture_end)
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()
    with pytest.raises(RuntimeError, match="emptied in a capture"):
        raw.cuda.empty_cache()
    graph.capture_end()
    with pytest.raises(RuntimeError, match="another stream"):
        in_thread(graph.replay)
    second = raw.begin()
    with pytest.raises(RuntimeError, match="a replay in a capture"):
        graph.replay()
    second.capture_end()
    second.reset()
    graph.replay()
    raw.pool = None  # type: ignore[assignment]
    assert raw.cuda.faults == ["pool (0, 2) was dropped before its graphs were reset"]
    with pytest.raises(RuntimeError, match="pool of this graph is gone"):
        graph.replay()
    del graph
    gc.collect()
    assert len(raw.cuda.faults) == 1, "the device still knows the graph"


def test_the_stand_in_refuses_a_synchronisation_of_a_capturing_stream(raw: Raw) -> None:
    graph = raw.begin()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        raw.stream.synchronize()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.capture_end()
    graph.reset()


def test_backends_of_a_cpu_have_nothing_to_measure() -> None:
    backend = TapeBackend()
    assert backend.pool_bytes() == 0
    assert backend.free_bytes() > 1 << 50
