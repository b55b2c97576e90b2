"""Training from a store: bitwise the run that computes its features, refusals by name, and the commands."""

import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dflash_graph import store, store_target, store_writer, target
from dflash_graph.__main__ import main
from dflash_graph.config import Config, TargetConfig
from dflash_graph.debugging import debug
from dflash_graph.metrics import read_records
from dflash_graph.store import FeatureStore
from dflash_graph.store_build import build_store
from dflash_graph.store_codec import TORCH_DTYPES, decode
from dflash_graph.store_identity import StoreSpec
from dflash_graph.store_plan import wanted_spec
from dflash_graph.store_shard import DamagedStoreError, StoredRow
from dflash_graph.store_target import HeadTarget, read_head
from dflash_graph.store_worker import JobRow, StoreWorker, encode_row
from dflash_graph.store_writer import StoreFullError, StoreWriter
from dflash_graph.target import Target
from dflash_graph.training import train
from tests.tiny import tiny_config, tiny_settings, weights

OTHER_SHAPES = ("schedule.token_budget=384", "schedule.num_buckets=2", "drafter.block_size=5", "seed=3")


def store_config(tiny: Path, run: Path, folder: Path, *overrides: str) -> Config:
    return tiny_config(tiny, run, "features.source=store", f"features.path={folder}", *overrides)


@pytest.fixture(scope="module")
def online(tiny: Path) -> Path:
    train(tiny_config(tiny, tiny / "online"))
    return tiny / "online"


@pytest.fixture(scope="module")
def built(tiny: Path) -> Path:
    """A float32 store of all rows, in several shards."""
    folder = tiny / "store"
    config = store_config(tiny, tiny / "unused", folder, "features.shard_mib=1")
    report = build_store(config)
    assert report.written_rows == 68
    assert not report.missing_rows
    assert not (tiny / "unused").exists()
    return folder


def copy_of(built: Path, folder: Path) -> Path:
    shutil.copytree(built, folder)
    return folder


# ---- the same weights -----------------------------------------------------------------------------------------------


def test_a_store_trains_bitwise_what_online_features_train(
    tiny: Path, online: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the layers of the target were loaded")

    monkeypatch.setattr(target, "_load", refuse)
    train(store_config(tiny, tmp_path / "run", built))
    assert weights(tmp_path / "run") == weights(online)
    ours, theirs = (
        [(r["loss"], r["accept_length"]) for r in read_records(run) if r["kind"] == "validation"]
        for run in (tmp_path / "run", online)
    )
    assert ours == theirs


def test_another_budget_bucket_set_block_and_order_reuse_the_store(tiny: Path, built: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "online", *OTHER_SHAPES))
    train(store_config(tiny, tmp_path / "run", built, *OTHER_SHAPES, "devices.num_targets=2"))
    assert weights(tmp_path / "run") == weights(tmp_path / "online")


def test_recorded_steps_train_from_a_store(tiny: Path, built: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "online", "graphs.mode=recorded", "epochs=1"))
    train(store_config(tiny, tmp_path / "run", built, "graphs.mode=recorded", "epochs=1"))
    assert weights(tmp_path / "run") == weights(tmp_path / "online")


def test_bfloat16_features_train_the_same_online_and_stored(tiny: Path, online: Path, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "online", "features.dtype=bfloat16"))
    config = store_config(tiny, tmp_path / "run", tmp_path / "s", "features.dtype=bfloat16")
    build_store(config)
    assert FeatureStore(tmp_path / "s").spec.bytes_per_token == 2 * 2 * 32 + 4
    train(config)
    assert weights(tmp_path / "run") == weights(tmp_path / "online") != weights(online)


def test_fp8_features_train_as_what_they_decode_to(tiny: Path, online: Path, tmp_path: Path) -> None:
    """The eight-bit store equals a float32 store of the decoded numbers, which has no code of its own."""
    config = store_config(tiny, tmp_path / "run", tmp_path / "s", "features.dtype=fp8")
    build_store(config)
    short = FeatureStore(tmp_path / "s")
    spec = store_config(tiny, tmp_path / "x", tmp_path / "wide", "features.dtype=float32")
    build_store(spec)
    wide = FeatureStore(tmp_path / "wide")
    shutil.rmtree(tmp_path / "wide")
    wide = FeatureStore.open(tmp_path / "wide", wide.spec, create=True)
    writer = StoreWriter(wide, origin={})
    for key in short:
        tokens = short.token_ids(key)
        values, exponents = torch.empty(len(tokens), 64, dtype=TORCH_DTYPES["fp8"]), np.empty((len(tokens), 2), np.int8)
        short.read(key, values.view(torch.uint8).numpy(), exponents)
        out = torch.empty(len(tokens), 64)
        decode(values, torch.from_numpy(exponents), out)
        writer.add(StoredRow(key, tokens, out.view(torch.uint8).numpy(), None))
    writer.flush()
    train(config)
    train(store_config(tiny, tmp_path / "run2", tmp_path / "wide"))
    assert weights(tmp_path / "run") == weights(tmp_path / "run2") != weights(online)


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_rows_that_are_made_on_the_fly_are_those_of_a_built_store(tiny: Path, tmp_path: Path, dtype: str) -> None:
    build_store(store_config(tiny, tmp_path / "x", tmp_path / "built", f"features.dtype={dtype}"))
    train(store_config(tiny, tmp_path / "from", tmp_path / "built"))
    made = ("features.missing=generate", f"features.dtype={dtype}", "devices.num_targets=2")
    train(store_config(tiny, tmp_path / "made", tmp_path / "s", *made))
    assert weights(tmp_path / "made") == weights(tmp_path / "from")
    assert len(FeatureStore(tmp_path / "s")) == 68
    # All of them were kept: now nothing is missing.
    train(store_config(tiny, tmp_path / "again", tmp_path / "s"))
    assert weights(tmp_path / "again") == weights(tmp_path / "from")


def test_a_grown_data_set_reuses_what_is_there(tiny: Path, built: Path, tmp_path: Path) -> None:
    folder = copy_of(built, tmp_path / "s")
    lines = (tiny / "train.jsonl").read_text().splitlines()
    more = [line.replace("w1 ", "w2 ") for line in lines[:9] if "w1 " in line]
    assert more
    grown = tmp_path / "grown.jsonl"
    grown.write_text("\n".join([*more, *lines]) + "\n")
    config = store_config(tiny, tmp_path / "run", folder, f"data.train=[{grown}]")
    with pytest.raises(ValueError, match=rf"{len(more)} of {68 + len(more)} rows are not.*store build"):
        train(config)
    assert build_store(config).written_rows == len(more)
    train(config)


def test_a_killed_run_that_makes_rows_resumes(
    tiny: Path, tmp_path: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = store_config(tiny, tmp_path / "run", tmp_path / "s", "features.missing=generate")
    count, fill = 0, StoreWorker._fill

    def dying(self: StoreWorker, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt("stands for a kill")
        fill(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StoreWorker, "_fill", dying)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config, resume="auto")
    assert weights(tmp_path / "run") == weights(online)


def test_a_drafter_of_the_targets_layers_starts_from_them(tiny: Path, built: Path, tmp_path: Path) -> None:
    more = ("drafter.init=target", "drafter.num_hidden_layers=1", "epochs=1", "drafter.draft_vocab_size=50")
    train(tiny_config(tiny, tmp_path / "online", *more))
    train(store_config(tiny, tmp_path / "run", built, *more))
    assert weights(tmp_path / "run") == weights(tmp_path / "online")


def test_evaluation_during_training_has_its_whole_model(tiny: Path, built: Path, tmp_path: Path) -> None:
    more = ("eval.every=100", "eval.num_prompts=2", "eval.max_new_tokens=4", "epochs=1")
    train(tiny_config(tiny, tmp_path / "online", *more))
    train(store_config(tiny, tmp_path / "run", built, *more))
    ours, theirs = (
        [r["accept_length"] for r in read_records(run) if r["kind"] == "eval"]
        for run in (tmp_path / "run", tmp_path / "online")
    )
    assert ours == theirs
    assert ours


def test_the_debug_command_checks_the_target_of_a_run_with_a_store(tiny: Path, built: Path, tmp_path: Path) -> None:
    report = debug(store_config(tiny, tmp_path / "run", built), trained_steps=1)
    assert not report.findings
    assert any(step.name.startswith("target.") for step in report.steps)


def test_a_dry_run_keeps_nothing(tiny: Path, built: Path, tmp_path: Path) -> None:
    train(store_config(tiny, tmp_path / "run", tmp_path / "s", "features.missing=generate"), dry_run=True)
    train(store_config(tiny, tmp_path / "run", built), dry_run=True)
    assert not list(tmp_path.iterdir())


def test_a_row_of_one_repeated_token_is_legal(tiny: Path, tmp_path: Path) -> None:
    row = JobRow(0, np.full(6, 9, np.int32), b"key")
    spec = FeatureStore.open(tmp_path / "s", _spec(tiny), create=True).spec
    same = torch.randn(1, 64).expand(6, 64)
    assert encode_row(spec, row, same).values.shape == (6, 256)
    with pytest.raises(ValueError, match="tap 1 is the same at every position"):
        encode_row(spec, replace(row, token_ids=np.arange(6, dtype=np.int32)), same)
    with pytest.raises(ValueError, match="non-finite"):
        encode_row(spec, row, same * float("inf"))


def _spec(tiny: Path) -> StoreSpec:
    config = store_config(tiny, tiny / "unused", tiny / "unused")
    return wanted_spec(config, (1, 3), 32, torch.float32)


# ---- embedding and head ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_and_embedding_are_the_targets(tiny: Path, tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder)
    if form == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    config = TargetConfig(path=str(folder))
    cpu = torch.device("cpu")
    whole = Target(config, target_layer_ids=(1, 3), output=torch.zeros(64, 64, dtype=dtype), device=cpu, dtype=dtype)
    head = HeadTarget(config, target_layer_ids=(1, 3), device=cpu, dtype=dtype)
    assert head.whole == (form == "bin")
    assert torch.equal(head.embed_weight, whole.embed_weight)
    assert torch.equal(head.head_weight, whole.head_weight)
    assert head.embed_weight.dtype == dtype


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from tests.tiny import SIZES, make_tiny

    make_tiny(tmp_path, LlamaConfig(**{**SIZES, "tie_word_embeddings": True}))
    config = TargetConfig(path=str(tmp_path / "model"))
    head = HeadTarget(config, target_layer_ids=(1,), device=torch.device("cpu"), dtype=torch.float32)
    assert not head.whole
    assert head.head_weight is head.embed_weight
    assert torch.equal(head.embed_weight[:6], torch.zeros(6, 32))


def test_a_checkpoint_with_other_names_is_loaded_whole(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TargetConfig(path=str(tiny / "model"))
    assert read_head(config) is not None
    monkeypatch.setattr(store_target, "_names", lambda config: ("elsewhere.weight", "lm_head.weight"))
    assert read_head(config) is None
    assert HeadTarget(config, target_layer_ids=(1,), device=torch.device("cpu"), dtype=torch.float32).whole


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["features.source=store"], "needs features.path"),
        (["features.path=x"], "no effect with features.source=online"),
        (["features.missing=generate"], "no effect"),
        (["features.dtype=fp8"], "how a store keeps features"),
        (["features.source=store", "features.path=x", "features.readers=0"], "readers must be at least 1"),
        (["features.source=store", "features.path=x", "loss.kl_weight=0.5"], "loss.kl_weight > 0 and loss.labels"),
        (["features.source=store", "features.path=x", "loss.labels=target"], "need its last layers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tiny: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(tiny, "unused", *overrides)


def test_a_run_without_its_store_is_refused(tiny: Path, built: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must name a feature store.*store build"):
        train(store_config(tiny, tmp_path / "run", tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"taps is \[1, 3\], needed is \[1, 2\]"):
        train(store_config(tiny, tmp_path / "run", built, "drafter.target_layer_ids=[1, 2]"))
    with pytest.raises(ValueError, match="dtype is float32, needed is bfloat16"):
        train(store_config(tiny, tmp_path / "run", built, "features.dtype=bfloat16"))
    other = tmp_path / "model"
    shutil.copytree(tiny / "model", other)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.4.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="its target has other weights"):
        train(store_config(tiny, tmp_path / "run", built, f"target.path={other}"))


@pytest.mark.parametrize("missing", ["error", "generate"])
def test_a_row_that_rots_ends_the_run_by_name(tiny: Path, built: Path, tmp_path: Path, missing: str) -> None:
    folder = copy_of(built, tmp_path / "s")
    (path,) = (folder / "shards").iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[-1000] ^= 64
    path.write_bytes(damaged)
    config = store_config(tiny, tmp_path / "run", folder, f"features.missing={missing}")
    with pytest.raises(DamagedStoreError, match=f"{path.name}.*differs from its checksum.*verify"):
        train(config)
    assert main(["store", "verify", str(folder), "--remove"]) == 1
    assert build_store(config).written_rows == 68
    assert main(["store", "verify", str(folder)]) == 0


def test_no_room_is_said_before_anything_is_loaded(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = (64 << 20) + 500_000
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(1, 1, free))
    monkeypatch.setattr(target, "_load", None)
    config = store_config(tiny, tmp_path / "run", tmp_path / "s", "features.missing=generate")
    for begin in (train, build_store):
        with pytest.raises(ValueError, match=r"room for 68 rows: 3758 tokens x 260 bytes = 0.93 MiB.*has 0.48 MiB"):
            begin(config)
    monkeypatch.undo()
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(1, 1, free))
    report = build_store(config, partial=True)
    assert 0 < report.written_bytes <= 500_000
    assert report.written_rows + report.missing_rows == 68
    monkeypatch.undo()
    assert build_store(config).written_rows == report.missing_rows


def test_a_disk_that_fills_during_training_stops_it_and_it_resumes(
    tiny: Path, online: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = store_config(tiny, tmp_path / "run", tmp_path / "s", "features.missing=generate", "checkpoint.every=1")
    writer = StoreWriter.__init__

    def small(self: StoreWriter, *args: Any, **kwargs: Any) -> None:
        writer(self, *args, **{**kwargs, "shard_bytes": 100_000})

    def full(*args: Any) -> None:
        if len(list((tmp_path / "s" / "shards").iterdir())) >= 3:
            raise OSError(28, "No space left on device")
        written(*args)

    written = store_writer.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "__init__", small)
        patch.setattr(store_writer, "write_shard", full)
        with pytest.raises(StoreFullError, match="No space left on device"):
            train(config)
    assert 0 < len(FeatureStore(tmp_path / "s")) < 68
    train(config, resume="auto")
    assert weights(tmp_path / "run") == weights(online)


def test_a_resumed_run_may_change_to_a_store_of_the_same_numbers(
    tiny: Path, built: Path, online: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(tiny, tmp_path / "run", "epochs=1"))
    train(store_config(tiny, tmp_path / "run", built), resume="auto")
    assert "changed since the checkpoint: features.source: online -> store" in capsys.readouterr().out
    assert weights(tmp_path / "run") == weights(online)
    build_store(store_config(tiny, tmp_path / "x", tmp_path / "s", "features.dtype=fp8"))
    with pytest.raises(ValueError, match=r"derived\.feature_dtype"):
        train(store_config(tiny, tmp_path / "run", tmp_path / "s"), resume="auto")


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def yaml(tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.from_dotlist(tiny_settings(tiny, tmp_path / "run")), path)
    return path


def test_the_commands_say_what_they_find(
    tiny: Path, yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    build = ["store", "build", "--config", str(yaml), "features.source=store", f"features.path={folder}"]
    assert main([*build, "--part", "1/2"]) == 0
    assert "34 rows of the data are still missing" in capsys.readouterr().out
    assert main([*build, "--part", "2/2"]) == 0
    assert "missing" not in capsys.readouterr().out
    assert main(build) == 0
    assert "written   0 rows" in capsys.readouterr().out
    assert main(["store", "info", str(folder)]) == 0
    assert "68 rows, 3758 tokens" in capsys.readouterr().out
    assert main(["store", "verify", str(folder)]) == 0
    assert "verified  68 rows" in capsys.readouterr().out
    assert main(["store", "compare", str(folder), "--config", str(yaml)]) == 0
    assert "the store agrees with this target" in capsys.readouterr().out
    assert main([*build, "--part", "3/2"]) == 2
    assert main(["store", "build", "--config", str(yaml)]) == 2
    assert main(["store", "info", str(tmp_path)]) == 2


def test_compare_names_the_layer_that_a_tap_really_is(
    tiny: Path, yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features of layers 0 and 4 under the names of 1 and 3, as other counting would give them."""
    wrong = store_config(tiny, tmp_path / "x", tmp_path / "wrong", "drafter.target_layer_ids=[0, 4]")
    build_store(wrong)
    right = FeatureStore(tmp_path / "wrong")
    mixed = FeatureStore.open(tmp_path / "mixed", replace(right.spec, target_layer_ids=(1, 3)), create=True)
    writer = StoreWriter(mixed, origin={})
    for key in right:
        values = np.empty((len(right.token_ids(key)), 256), np.uint8)
        right.read(key, values, None)
        writer.add(StoredRow(key, right.token_ids(key), values, None))
    writer.flush()
    assert main(["store", "compare", str(tmp_path / "mixed"), "--config", str(yaml), "--rows", "10"]) == 1
    text = capsys.readouterr().out
    assert "tap 1 is not the output of layer 1: the output of layer 0 fits better" in text
    assert "tap 3 is not the output of layer 3: the output of layer 4 fits better" in text


def _limited(args: list[str], limit: int | None) -> subprocess.CompletedProcess[str]:
    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dflash_graph", *args],
        capture_output=True,
        text=True,
        preexec_fn=lower,
        env=environment,
        timeout=120,
    )


def test_a_limit_of_the_system_stops_a_build_cleanly(built: Path, yaml: Path, tmp_path: Path) -> None:
    """The system's own refusal in the middle of a write (EFBIG stands for ENOSPC); `built` has made the data cache."""
    folder = tmp_path / "s"
    build = ["store", "build", "--config", str(yaml), "features.source=store", f"features.path={folder}"]
    stopped = _limited(build, 300_000)
    assert stopped.returncode == 1, stopped.stderr
    assert "is full" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not list((folder / "shards").iterdir())
    done = _limited(build, None)
    assert done.returncode == 0, done.stderr
    assert len(FeatureStore(folder)) == 68
