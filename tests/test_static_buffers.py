"""Buffers are allocated once, described truthfully, and never move; a slot receives exactly its job's tensors."""

from types import SimpleNamespace

import pytest
import torch

from dflash_graph import static_buffers
from dflash_graph.static_buffers import (
    SLOT_METADATA,
    BufferSpec,
    BufferTable,
    TeacherSpec,
    describe_specs,
    slot_specs,
    write_metadata,
)

CPU = torch.device("cpu")
S, T, FEATURES, A, K = 3, 10, 4, 2, 5
R = A * (K - 1)


def spec(name: str, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32, **kwargs) -> BufferSpec:
    return BufferSpec(name, shape, dtype, CPU, "target", ("drafter", "report"), **kwargs)


def slots(teacher: TeacherSpec | None = None) -> list[BufferSpec]:
    return slot_specs(
        num_slots=S,
        num_targets=2,
        token_budget=T,
        feature_size=FEATURES,
        num_anchors=A,
        block_size=K,
        feature_dtype=torch.bfloat16,
        device="cpu",
        teacher=teacher,
    )


def job() -> SimpleNamespace:
    sizes = {"token_ids": T, "positions": T, "row_ids": T, "anchors": A, "anchor_row_starts": A, "anchor_tokens": A}
    tensors = {name: torch.arange(sizes.get(name, R)) + 100 * i for i, name in enumerate(SLOT_METADATA)}
    tensors["row_ids"] = tensors["row_ids"].to(torch.int32)
    tensors["weights"] = tensors["weights"].to(torch.float32)
    return SimpleNamespace(**tensors)


def test_specs_are_allocated_and_filled() -> None:
    table = BufferTable([spec("a", fill=2.5), spec("b", (), torch.int64, fill=-100), spec("c", (4,), torch.bool)])
    assert table["a"].tolist() == [[2.5] * 3] * 2
    assert table["b"].shape == ()
    assert table["b"].item() == -100
    assert not table["c"].any()
    assert list(table) == ["a", "b", "c"]
    assert len(table) == 3


@pytest.mark.parametrize("shape", [(0,), (3, -1)])
def test_empty_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"every dimension of buffer 'a' must be at least 1; found"):
        spec("a", shape)


def test_names_are_present_and_unique() -> None:
    with pytest.raises(ValueError, match="must have a name"):
        spec("")
    with pytest.raises(ValueError, match="must be unique; found a more than once"):
        BufferTable([spec("a"), spec("b"), spec("a")])
    with pytest.raises(KeyError, match="no buffer is named 'c'; there are a, b"):
        BufferTable([spec("a"), spec("b")])["c"]


def test_out_of_memory_names_the_buffer() -> None:
    with pytest.raises(RuntimeError) as caught:
        BufferTable([spec("small"), spec("huge", (1 << 50,))])
    assert any("buffer 'huge'" in note and "small" in note for note in caught.value.__notes__)


def test_writes_in_place_keep_the_addresses() -> None:
    table = BufferTable([spec("a"), spec("b")])
    before = table.addresses()
    table["a"].fill_(3)
    table["b"].copy_(torch.ones(2, 3, dtype=torch.float64))
    table["a"][1].add_(1)
    table.check_addresses({"a": table["a"]})
    assert table.addresses() == before


def _new_data(table: BufferTable) -> None:
    table["b"].data = torch.zeros(2, 3)


def _new_stride(table: BufferTable) -> None:
    table["b"].data = table["b"].data.as_strided((2, 3), (1, 2))


def _new_dtype(table: BufferTable) -> None:
    table["b"].data = table["b"].data.view(torch.int32)


def _new_shape(table: BufferTable) -> None:
    table["b"].resize_(6)


def _rebound(table: BufferTable) -> None:
    table._tensors["b"] = table["b"].view(2, 3)  # same memory, another object


@pytest.mark.parametrize("change", [_new_data, _new_stride, _new_dtype, _new_shape, _rebound])
def test_a_changed_buffer_is_named(change) -> None:
    table = BufferTable([spec("a"), spec("b"), spec("c")])
    change(table)
    with pytest.raises(RuntimeError, match=r"must keep their memory.*\nb: ") as caught:
        table.check_addresses()
    assert "\na: " not in str(caught.value)
    assert "\nc: " not in str(caught.value)


def test_every_changed_buffer_is_named() -> None:
    table = BufferTable([spec("a"), spec("b"), spec("c")])
    table["a"].data = torch.zeros(2, 3)
    table["c"].data = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"\na: was .*\nc: was "):
        table.check_addresses()


def test_a_holder_that_rebinds_its_buffer_is_named() -> None:
    table = BufferTable([spec("target.0.output")])
    target = SimpleNamespace(output=table["target.0.output"])
    table.check_addresses({"target.0.output": target.output})
    target.output = target.output * 1
    with pytest.raises(RuntimeError, match=r"target\.0\.output: its holder was given"):
        table.check_addresses({"target.0.output": target.output})


def test_bytes_are_those_of_the_tensors() -> None:
    table = BufferTable(slots())
    real = sum(table[name].untyped_storage().nbytes() for name in table)
    assert table.nbytes() == table.nbytes("cpu") == real
    assert table.nbytes("cuda") == 0
    mixed = [spec("a"), BufferSpec("b", (8,), torch.float64, torch.device("meta"), "w", ())]
    assert BufferTable(mixed).nbytes("meta") == 64


def test_the_plan_is_readable_and_adds_up() -> None:
    mib = 1 << 20
    text = describe_specs(
        [
            spec("slot.features", (3, mib), torch.bfloat16),
            spec("slot.tokens", (mib,), torch.int64),
            BufferSpec("copy", (1 << 30,), torch.float32, torch.device("cuda", 1), "target", ()),
        ]
    )
    lines = text.splitlines()
    assert lines[1].split() == [
        "slot.features",
        "3x1048576",
        "bfloat16",
        "cpu",
        "target",
        "drafter,",
        "report",
        "6.00",
        "MiB",
    ]
    assert lines[-2].split() == ["total", "on", "cpu", "14.00", "MiB"]
    assert lines[-1].split() == ["total", "on", "cuda:1", "4.00", "GiB"]
    assert len({len(line) for line in lines}) == 1
    table = BufferTable([spec("a")])
    assert str(table) == describe_specs(table.specs)


def test_poison_overwrites_every_element() -> None:
    table = BufferTable([spec("f"), spec("h", dtype=torch.bfloat16), spec("i", dtype=torch.int32), spec("kept")])
    table.poison(["f", "h", "i"])
    assert table["f"].isnan().all()
    assert table["h"].isnan().all()
    assert (table["i"] == 2**31 - 1).all()
    assert (table["kept"] == 0).all()
    table.poison()
    assert table["kept"].isnan().all()
    table.check_addresses()


def test_slot_specs_have_the_shapes_of_the_design() -> None:
    expected = {
        "slot.features": ((S, T, FEATURES), torch.bfloat16, 0),
        "slot.token_ids": ((S, T), torch.int64, 0),
        "slot.positions": ((S, T), torch.int64, 0),
        "slot.row_ids": ((S, T), torch.int32, -1),
        "slot.anchors": ((S, A), torch.int64, 0),
        "slot.anchor_row_starts": ((S, A), torch.int64, 0),
        "slot.anchor_tokens": ((S, A), torch.int64, 0),
        "slot.trained_rows": ((S, R), torch.int64, 0),
        "slot.labels": ((S, R), torch.int64, -100),
        "slot.weights": ((S, R), torch.float32, 0),
        "target.0.token_ids": ((T,), torch.int64, 0),
        "target.1.token_ids": ((T,), torch.int64, 0),
        "target.0.output": ((T, FEATURES), torch.bfloat16, 0),
        "target.1.output": ((T, FEATURES), torch.bfloat16, 0),
    }
    assert {s.name: (s.shape, s.dtype, s.fill) for s in slots()} == expected


@pytest.mark.parametrize("with_kl, with_labels", [(True, False), (False, True), (True, True)])
def test_a_teacher_adds_its_buffers_and_no_more(with_kl: bool, with_labels: bool) -> None:
    u, d = 7, 6
    teacher = TeacherSpec(num_positions=u, hidden_size=d, dtype=torch.float16, with_kl=with_kl, with_labels=with_labels)
    expected = {"slot.teacher_rows": ((S, R), torch.int64)}
    if with_kl:
        expected["slot.teacher_mean"] = ((S, u, d), torch.float32)
        expected["slot.teacher_entropy"] = ((S, u), torch.float32)
    if with_labels:
        expected["slot.teacher_argmax"] = ((S, u), torch.int64)
    for i in range(2):
        expected |= {
            f"target.{i}.teacher_positions": ((u,), torch.int64),
            f"target.{i}.num_teacher_positions": ((), torch.int64),
            f"target.{i}.teacher_hidden": ((u, d), torch.float16),
            f"target.{i}.teacher_entropy": ((u,), torch.float32),
            f"target.{i}.teacher_argmax": ((u,), torch.int64),
        }
        if with_kl:
            expected[f"target.{i}.teacher_mean"] = ((u, d), torch.float32)
    plain = {s.name for s in slots()}
    assert {s.name: (s.shape, s.dtype) for s in slots(teacher) if s.name not in plain} == expected
    extra = sum(s.nbytes for s in slots(teacher)) - sum(s.nbytes for s in slots())
    per_position = (4 * d + 4) * with_kl + 8 * with_labels  # bytes that a slot holds of one position
    per_target = u * (8 + 2 * d + 4 + 8 + 4 * d * with_kl) + 8
    assert teacher.nbytes == u * per_position
    assert extra == S * (8 * R + u * per_position) + 2 * per_target


def test_a_job_padded_without_its_teacher_is_refused() -> None:
    padded = job()
    padded.teacher_rows = None
    teacher = TeacherSpec(num_positions=7, hidden_size=6, dtype=torch.float32, with_kl=True, with_labels=False)
    with pytest.raises(ValueError, match="padded with 'teacher_rows'"):
        write_metadata(BufferTable(slots(teacher)), 0, padded)
    padded.teacher_rows = torch.arange(R)
    table = BufferTable(slots(teacher))
    write_metadata(table, 1, padded)
    assert table["slot.teacher_rows"].tolist() == [[0] * R, list(range(R)), [0] * R]


def test_metadata_lands_in_its_slot_only() -> None:
    table = BufferTable(slots())
    table.poison()
    write_metadata(table, 1, job())
    for name in SLOT_METADATA:
        buffer, source = table[f"slot.{name}"], getattr(job(), name)
        assert torch.equal(buffer[1], source)
        poisoned = buffer[[0, 2]]
        assert (poisoned.isnan() if poisoned.is_floating_point() else poisoned == torch.iinfo(buffer.dtype).max).all()
    table.check_addresses()


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("labels", torch.zeros(R, dtype=torch.int32)),  # would be cast
        ("anchors", torch.zeros(1, dtype=torch.int64)),  # would be broadcast
        ("weights", torch.zeros(R + 1)),
    ],
)
def test_metadata_of_another_shape_or_dtype_is_refused(name: str, wrong: torch.Tensor) -> None:
    padded = job()
    setattr(padded, name, wrong)
    with pytest.raises(ValueError, match=rf"job tensor '{name}' must be"):
        write_metadata(BufferTable(slots()), 0, padded)


def test_every_public_name_exists() -> None:
    assert all(hasattr(static_buffers, name) for name in static_buffers.__all__)
