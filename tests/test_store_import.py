"""Hidden states of other programs into a store: layer ids, counts and tokens are checked, refusals name the file.

The files are written here as the programs' sources say (`store_formats.py` names them); `tests/peers/`
has them written by the programs' own code.
"""

import fcntl
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from dflash_graph.__main__ import main
from dflash_graph.config import Config, TargetConfig
from dflash_graph.data import load_tokenizer, prepare_run
from dflash_graph.store import FeatureStore
from dflash_graph.store_build import build_store
from dflash_graph.store_formats import find_files, our_layer_ids
from dflash_graph.store_import import add_features
from dflash_graph.target import Target
from dflash_graph.training import train
from tests.tiny import tiny_config, tiny_settings, weights

LAYERS = (0, 1, 3, 4)  # ours; taps are 1 and 3
THEIRS = {"vllm": [1, 2, 4, 5], "speculators": [1, 2, 4, 5], "specforge": [0, 1, 3, 4]}


def store_config(tiny: Path, folder: Path, *overrides: str) -> Config:
    return tiny_config(tiny, folder / "run", "features.source=store", f"features.path={folder / 's'}", *overrides)


Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def rows(tiny: Path) -> list[Row]:
    """(token ids, loss mask, hidden states (n, layers, D)) of every row of the tiny data."""
    config = tiny_config(tiny, tiny / "unused")
    prepared = prepare_run(config.data, load_tokenizer(config.target))
    output, found = torch.zeros(128, len(LAYERS) * 32), []
    cpu = torch.device("cpu")
    target = Target(config.target, target_layer_ids=LAYERS, output=output, device=cpu, dtype=torch.float32)
    for part in (prepared.rows, prepared.validation):
        assert part is not None
        for i in range(len(part)):
            tokens, mask = (torch.from_numpy(x.astype(np.int64)) for x in part.row(i))
            padded = torch.zeros(128, dtype=torch.int64)
            padded[: len(tokens)] = tokens
            target.forward(padded, 1, 64 if len(tokens) <= 64 else 128)
            found.append((tokens, mask, output[: len(tokens)].view(-1, len(LAYERS), 32).clone()))
    return found


def write_vllm(folder: Path, rows: list[Row], name: Callable[[int], str] = lambda i: f"cmpl-{i:x}-0") -> None:
    folder.mkdir()
    for i, (tokens, _, hidden) in enumerate(rows):
        save_file({"hidden_states": hidden.contiguous(), "token_ids": tokens}, folder / f"{name(i)}.safetensors")
        (folder / f"{name(i)}.safetensors.lock").touch()


def write_speculators(folder: Path, rows: list[Row]) -> None:
    write_vllm(folder, rows, lambda i: f"hs_{i}")


def write_specforge(folder: Path, rows: list[Row], *, batch: bool = True, gz: bool = False) -> None:
    (folder / "rows_0-2000").mkdir(parents=True)
    for i, (tokens, mask, hidden) in enumerate(rows):
        states = hidden.flatten(1).contiguous()
        data = {"input_ids": tokens, "loss_mask": mask, "hidden_states": states[None] if batch else states}
        opened = gzip.open if gz else open
        with opened(folder / "rows_0-2000" / f"data_{i}.ckpt{'.gz' if gz else ''}", "wb") as file:
            torch.save(data, file)


WRITERS: dict[str, Callable[..., None]] = {
    "vllm": write_vllm,
    "speculators": write_speculators,
    "specforge": write_specforge,
}


# ---- what fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(WRITERS))
def test_each_format_gives_the_store_that_our_target_builds(
    tiny: Path, rows: list[Row], tmp_path: Path, kind: str
) -> None:
    WRITERS[kind](tmp_path / "theirs", rows)
    config = store_config(tiny, tmp_path)
    report = add_features(config, tmp_path / "theirs", layers=THEIRS[kind])
    assert (report.format, report.files, report.added, report.missing_rows) == (kind, 68, 68, 0)
    assert report.rounding == 0
    train(config)
    train(tiny_config(tiny, tmp_path / "online"))
    assert weights(tmp_path / "run") == weights(tmp_path / "online")
    again = add_features(config, tmp_path / "theirs", layers=THEIRS[kind])
    assert (again.added, again.known) == (0, 68)


@pytest.mark.parametrize("changes", [{"batch": False}, {"gz": True}], ids=["no batch dimension", "gzip"])
def test_specforges_other_forms(tiny: Path, rows: list[Row], tmp_path: Path, changes: dict[str, bool]) -> None:
    write_specforge(tmp_path / "theirs", rows, **changes)
    assert add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"]).added == 68


def test_eagle3_files_of_specforge(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    for i, (tokens, mask, hidden) in enumerate(rows):
        data = {"input_ids": tokens, "loss_mask": mask, "hidden_state": hidden[None, :, -1]}
        torch.save({**data, "aux_hidden_state": hidden.flatten(1)[None]}, tmp_path / "theirs" / f"data_{i}.ckpt")
    assert add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"]).added == 68


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_files_go_into_a_sixteen_bit_store(
    tiny: Path, rows: list[Row], tmp_path: Path, dtype: torch.dtype
) -> None:
    write_vllm(tmp_path / "theirs", [(t, m, h.to(dtype)) for t, m, h in rows])
    config = store_config(tiny, tmp_path, "features.dtype=bfloat16")
    report = add_features(config, tmp_path / "theirs", layers=THEIRS["vllm"])
    assert (report.rounding == 0) == (dtype == torch.bfloat16)
    assert report.rounding < 4e-3
    assert FeatureStore(tmp_path / "s").shards[0].origin == {"source": "vllm", "layers": [1, 2, 4, 5]}


def test_loss_masks_that_differ_are_counted(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    write_specforge(
        tmp_path / "theirs", [(t, torch.zeros_like(m) if i < 3 else m, h) for i, (t, m, h) in enumerate(rows)]
    )
    report = add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"])
    assert report.other_masks == 3
    assert "3 files have another loss mask" in str(report)


def test_a_part_and_strangers_are_taken_only_when_asked(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    stranger = (torch.tensor([9, 8, 7]), torch.ones(3, dtype=torch.int64), torch.randn(3, 4, 32))
    write_vllm(tmp_path / "theirs", [*rows[:40], stranger, *rows[:2]])
    config = store_config(tiny, tmp_path)
    with pytest.raises(ValueError, match=r"cmpl-28-0.safetensors must be a row of this run's data.*Nothing was added"):
        add_features(config, tmp_path / "theirs", layers=THEIRS["vllm"])
    (tmp_path / "theirs" / "cmpl-28-0.safetensors").rename(tmp_path / "stranger.safetensors")
    with pytest.raises(ValueError, match="28 have none"):
        add_features(config, tmp_path / "theirs", layers=THEIRS["vllm"])
    assert not (tmp_path / "s").exists()
    (tmp_path / "stranger.safetensors").rename(tmp_path / "theirs" / "cmpl-28-0.safetensors")
    report = add_features(config, tmp_path / "theirs", layers=THEIRS["vllm"], partial=True)
    assert (report.files, report.added, report.repeated, report.unknown, report.missing_rows) == (43, 40, 2, 1, 28)
    assert build_store(config).written_rows == 28


# ---- layer ids ------------------------------------------------------------------------------------------------------


def test_layer_ids_are_converted_between_conventions() -> None:
    assert our_layer_ids("vllm", [2, 18, 36], 36) == [1, 17, 35]
    assert our_layer_ids("speculators", [1], 4) == [0]
    assert our_layer_ids("specforge", [1, 9, 35], 36) == [1, 9, 35]
    for kind, ids in (("vllm", [0, 2]), ("vllm", [2, 37]), ("specforge", [36]), ("vllm", [3, 2]), ("vllm", [2, 2])):
        with pytest.raises(ValueError, match=f"layer ids that {kind} was told to save"):
            our_layer_ids(kind, ids, 36)  # type: ignore[arg-type]


def test_layers_must_cover_the_taps(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    write_vllm(tmp_path / "theirs", rows)
    with pytest.raises(ValueError, match=r"ours \[0, 1, 2, 4\], without \[3\]"):
        add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=[1, 2, 3, 5])


def test_layers_named_in_the_wrong_convention_are_found_by_compare(
    tiny: Path, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM saved the inputs of layers 1, 3, 4, which are the outputs of 0, 2, 3; the user gives our ids + 0."""
    shifted = [(t, m, h[:, [0, 2]]) for t, m, h in rows]  # outputs of 0 and 3
    write_vllm(tmp_path / "theirs", shifted)
    yaml = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.from_dotlist(tiny_settings(tiny, tmp_path / "run")), yaml)
    add = ["store", "add", str(tmp_path / "s"), "--from", str(tmp_path / "theirs"), "--config", str(yaml)]
    assert main([*add, "--layers", "2,4"]) == 0
    assert "68 rows added" in capsys.readouterr().out
    assert main(["store", "compare", str(tmp_path / "s"), "--config", str(yaml)]) == 1
    text = capsys.readouterr().out
    assert "tap 1 is not the output of layer 1: the output of layer 0 fits better" in text
    assert "tap 3 is not" not in text


# ---- damage ---------------------------------------------------------------------------------------------------------


def _save(path: Path, **changes: Any) -> None:
    tensors = load_file(path)
    save_file({k: v.contiguous() for k, v in {**tensors, **changes}.items() if v is not None}, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-50]), "must be a whole file of vllm"),
    "empty": (lambda p: p.write_bytes(b""), "must be a whole file of vllm"),
    "no tokens": (lambda p: _save(p, token_ids=None), "lacks token_ids"),
    "no states": (lambda p: _save(p, hidden_states=None), "lacks hidden_states"),
    "a layer less": (lambda p: _save(p, hidden_states=load_file(p)["hidden_states"][:, 1:]), r"x 4 layers.*are \["),
    "a token less": (lambda p: _save(p, hidden_states=load_file(p)["hidden_states"][1:]), "must hold .* tokens x"),
    "other width": (lambda p: _save(p, hidden_states=load_file(p)["hidden_states"][..., :16]), "hidden size"),
    "integers": (lambda p: _save(p, hidden_states=load_file(p)["hidden_states"].int()), "int32 without scales"),
    "fp8 without scales": (
        lambda p: _save(p, hidden_states=load_file(p)["hidden_states"].to(torch.float8_e4m3fn)),
        "float8_e4m3fn without scales",
    ),
    "another token": (
        lambda p: _save(p, token_ids=torch.cat([load_file(p)["token_ids"][:-1], torch.tensor([91])])),
        "the nearest row, of .* tokens, differs from position .* the file 91: another chat template",
    ),
    "cut short": (
        lambda p: _save(p, token_ids=load_file(p)["token_ids"][:9], hidden_states=load_file(p)["hidden_states"][:9]),
        "they are the first 9 tokens of a row of .*another maximum length",
    ),
    "longer": (
        lambda p: _save(
            p,
            token_ids=torch.cat([load_file(p)["token_ids"], torch.tensor([7])]),
            hidden_states=torch.cat([load_file(p)["hidden_states"], torch.ones(1, 4, 32)]),
        ),
        "a row of .* tokens is their beginning",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_refused_by_name_and_nothing_is_added(
    tiny: Path, rows: list[Row], tmp_path: Path, damage: str
) -> None:
    write_vllm(tmp_path / "theirs", rows)
    change, words = DAMAGES[damage]
    change(tmp_path / "theirs" / "cmpl-7-0.safetensors")
    with pytest.raises(ValueError, match=rf"cmpl-7-0\.safetensors.*{words}"):
        add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["vllm"])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_states_that_carry_nothing_are_refused(tiny: Path, rows: list[Row], tmp_path: Path, value: float) -> None:
    write_vllm(tmp_path / "theirs", rows)
    path = tmp_path / "theirs" / "cmpl-7-0.safetensors"
    _save(path, hidden_states=torch.full_like(load_file(path)["hidden_states"], value))
    with pytest.raises(ValueError, match=r"cmpl-7-0\.safetensors: .*finite and differ between positions"):
        add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["vllm"])


def test_a_file_that_is_being_written_is_refused(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    write_vllm(tmp_path / "theirs", rows)
    with (tmp_path / "theirs" / "cmpl-3-0.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="its writer holds its lock"):
            add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["vllm"])


@pytest.mark.parametrize("gz", [False, True])
def test_a_truncated_file_of_specforge_is_refused(tiny: Path, rows: list[Row], tmp_path: Path, gz: bool) -> None:
    write_specforge(tmp_path / "theirs", rows, gz=gz)
    path = next((tmp_path / "theirs" / "rows_0-2000").glob("data_5.*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"data_5.*must be a whole file of specforge"):
        add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"])


def test_a_pickle_that_runs_code_is_not_run(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    write_specforge(tmp_path / "theirs", rows)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"input_ids": Evil()}, tmp_path / "theirs" / "rows_0-2000" / "data_0.ckpt")
    with pytest.raises(ValueError, match=r"data_0.ckpt must be a whole file"):
        add_features(store_config(tiny, tmp_path), tmp_path / "theirs", layers=THEIRS["specforge"])
    assert not (tmp_path / "ran").exists()


def test_folders_are_told_apart(rows: list[Row], tmp_path: Path) -> None:
    write_speculators(tmp_path / "a", rows[:12])
    kind, files = find_files(tmp_path / "a", "auto")
    assert kind == "speculators"
    assert [p.stem for p in files] == [f"hs_{i}" for i in range(12)]
    assert find_files(tmp_path / "a", "vllm")[0] == "vllm"
    write_vllm(tmp_path / "a" / "more", rows[:2])
    with pytest.raises(ValueError, match="12 of speculators, 2 of vllm"):
        find_files(tmp_path / "a", "auto")
    assert len(find_files(tmp_path / "a", "speculators")[1]) == 12
    with pytest.raises(ValueError, match="found none"):
        find_files(tmp_path / "a", "specforge")
    with pytest.raises(ValueError, match="must name a folder"):
        find_files(tmp_path / "nowhere", "auto")


def test_a_store_of_another_target_is_not_added_to(tiny: Path, rows: list[Row], tmp_path: Path) -> None:
    write_vllm(tmp_path / "theirs", rows)
    config = store_config(tiny, tmp_path)
    add_features(config, tmp_path / "theirs", layers=THEIRS["vllm"])
    with pytest.raises(ValueError, match="dtype is float32, needed is fp8"):
        add_features(store_config(tiny, tmp_path, "features.dtype=fp8"), tmp_path / "theirs", layers=THEIRS["vllm"])
    document = json.loads((tmp_path / "s" / "store.json").read_text())
    assert document["spec"]["target"] == TargetConfig(path=str(tiny / "model")).path
