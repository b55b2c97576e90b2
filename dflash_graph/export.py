"""`dflash-graph export`: one checkpoint, or a random drafter, as a folder that servers load.

Checks the drafter against its target, its data and its settings before anything is written, reads back what was
written, and says which loaders would not run it as trained. Called by `export_command.py` and by users; what the files
hold is `serving_layouts.py`.
"""

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from dflash_graph.checkpoint import find_latest, load_checkpoint
from dflash_graph.checkpoint_files import DRAFTER
from dflash_graph.config import Config, TargetConfig, load_config
from dflash_graph.data import check_mask_token, load_tokenizer, prepare_run
from dflash_graph.drafter import DrafterSpec
from dflash_graph.initialise import random_parameters
from dflash_graph.plan import make_plan
from dflash_graph.released import read_released
from dflash_graph.serving_layouts import (
    WEIGHTS,
    Layout,
    ServedTarget,
    check_servable,
    differences,
    reduced_head,
    servable_tensors,
    write_servable,
)
from dflash_graph.target import ModelFacts, load_full_model, read_facts


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written: its folder, what could not be checked or is not served as trained, and how to serve it."""

    folder: Path
    notes: tuple[str, ...]
    serve: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"exported {self.folder}", *(f"note: {note}" for note in self.notes), "serve it:"]
        return "\n".join([*lines, *(f"  {line}" for line in self.serve)])


@dataclass(kw_only=True)
class _Drafter:
    """A drafter on its way out, with what its card tells."""

    spec: DrafterSpec
    tensors: dict[str, Tensor]
    ids: Tensor | None
    target: TargetConfig
    config: Config | None
    origin: str
    trained: dict[str, str]
    notes: list[str] = field(default_factory=list)


def export(
    run: str | Path,
    *,
    to: Layout = "hf",
    output: str | Path | None = None,
    untrained: bool = False,
    overrides: Sequence[str] = (),
    target: TargetConfig | None = None,
    full_head: bool = False,
) -> ExportResult:
    """Write a drafter as a folder that servers load.

    Args:
        run: run folder (its newest whole checkpoint) or checkpoint folder; with `untrained`, a YAML configuration.
        to: "hf" for z-lab's dflash, vLLM and SGLang, or "speculators".
        output: a new or empty folder; None is `export/NAME-TO` in the run folder (`run_dir` of the configuration).
        untrained: a random drafter as the configuration describes it, to test a serving stack before training.
        overrides: `key=value` settings over the configuration, with `untrained` alone.
        target: where the target is; None takes the run's configuration, else the checkpoint's.
        full_head: write a drafter with a reduced head as "hf" all the same, to be run with the target's full head.

    Raises:
        ValueError: run, target and data cannot be read or do not fit each other, or no server could run the drafter
            as trained; before anything is written.
    """
    if to not in get_args(Layout):
        raise ValueError(f"--to must be one of {', '.join(get_args(Layout))}; found {to!r}")
    if overrides and not untrained:
        raise ValueError(f"settings have an effect only with --untrained; found {' '.join(overrides)}")
    drafter, place = _untrained(run, overrides) if untrained else _trained(Path(run))
    if target is not None:
        drafter.target = target
    folder = Path(output) if output is not None else place.with_name(f"{place.name}-{to}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output must be a new or an empty folder; {folder} is neither")
    spec = drafter.spec
    check_servable(spec)
    if full_head and (to != "hf" or spec.draft_vocab_size is None):
        raise ValueError("--full-head has an effect only with --to hf, for a drafter with a reduced head; leave it out")
    if to == "hf" and spec.draft_vocab_size is not None and not full_head:
        raise ValueError(
            f"the layout hf has no place for a reduced head of {spec.draft_vocab_size} ids: servers would run this "
            "drafter with the target's full head, which it was not trained for, and accept next to nothing. Use --to "
            "speculators, or train without drafter.draft_vocab_size; --full-head writes it all the same"
        )
    facts, served = _check_target(drafter)
    if not untrained:  # the plan of an untrained one has just chosen a mask token that its data does not use
        _check_data(drafter)
    head = None
    if spec.draft_vocab_size is not None:
        if to == "hf":
            drafter.notes.append(
                f"trained with a reduced head of {spec.draft_vocab_size} ids; servers of this layout use the target's "
                "full head, so they accept next to nothing. --to speculators stores the reduced head"
            )
        else:
            head = _reduced_head(drafter)
    drafter.notes += [f"{loader} {reason}" for loader, reason in differences(spec, to).items()]
    if drafter.target.gguf_file is not None:
        drafter.notes.append("the target is a GGUF file: serve the drafter beside the model it was made from")
    # As trained, in numbers too: servers read bf16, so the folder is read back and compared.
    serve = serve_lines(spec, drafter.target.path, folder, to)
    card = _card(drafter, facts, to, serve, _command(run, to, output, untrained, overrides))
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write_servable(temporary, spec, drafter.tensors, served, layout=to, head=head, card=card)
        _check_written(temporary, drafter, to)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportResult(folder=folder, notes=tuple(drafter.notes), serve=serve)


def serve_lines(spec: DrafterSpec, target: str, folder: Path, to: Layout) -> tuple[str, ...]:
    """The commands that serve an exported folder: vLLM drafts K-1 tokens, SGLang counts the anchor too."""
    settings = {"method": "dflash", "model": str(folder), "num_speculative_tokens": spec.block_size - 1}
    lines = [f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"]
    if to == "hf":
        lines.append(
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(str(folder))} "
            f"--speculative-num-draft-tokens {spec.block_size}"
        )
    return tuple(lines)


# ---- where it comes from --------------------------------------------------------------------------------------------


def _trained(run: Path) -> tuple[_Drafter, Path]:
    """The drafter of a run or checkpoint folder, and the default place of its export without the layout's name."""
    folder = run if (run / DRAFTER).is_file() else find_latest(run)
    if folder is None:
        raise ValueError(f"{run} must be a run folder with a whole checkpoint, or a checkpoint folder; found neither")
    checkpoint = load_checkpoint(folder)
    run_dir = folder.resolve().parent.parent
    config = load_config(run_dir / "config.yaml") if (run_dir / "config.yaml").is_file() else None
    spec = DrafterSpec.from_dict(checkpoint.state["drafter"])
    score, progress = checkpoint.accept_length, checkpoint.state.get("progress", {})
    drafter = _Drafter(
        spec=spec,
        tensors=checkpoint.drafter,
        ids=checkpoint.drafter.get("draft_vocab_ids"),
        target=config.target if config else TargetConfig(path=spec.target_path, gguf_file=spec.gguf_file),
        config=config,
        origin=str(folder),
        trained={
            "steps": str(checkpoint.step),
            "jobs": str(progress.get("jobs", "unknown")),
            "held-out accept_length, teacher-forced": "not measured at this step" if score is None else f"{score:.3f}",
        },
    )
    best = run_dir / "checkpoints" / "best.json"
    if folder is not run and best.is_file():
        values = json.loads(best.read_text(encoding="utf-8"))
        if values["folder"] != folder.name:
            drafter.notes.append(
                f"the newest checkpoint, {folder.name}, is exported; the best by held-out accept_length "
                f"({values['accept_length']:.3f}) is {best.parent / values['folder']}"
            )
    return drafter, run_dir / "export" / folder.name


def _untrained(path: str | Path, overrides: Sequence[str]) -> tuple[_Drafter, Path]:
    config = load_config(path, overrides)
    plan = make_plan(config)
    drafter = _Drafter(
        spec=plan.spec,
        tensors=random_parameters(plan.spec, config.seed),
        ids=None if plan.head_ids is None else torch.from_numpy(plan.head_ids),
        target=config.target,
        config=config,
        origin=f"{path} (untrained)",
        trained={"steps": "0: random weights, to test a serving stack"},
    )
    return drafter, Path(config.run_dir) / "export" / "untrained"


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_target(drafter: _Drafter) -> tuple[ModelFacts, ServedTarget]:
    """Hold the drafter against the target that it will be served with; every difference is named."""
    spec, facts = drafter.spec, read_facts(drafter.target)
    expected = {
        "hidden_size": (spec.hidden_size, facts.hidden_size),
        "layers": (spec.num_target_layers, facts.num_hidden_layers),
        "vocabulary": (spec.vocab_size, facts.vocab_size),
    }
    shape = (spec.vocab_size, spec.hidden_size)
    stored = _head_shapes(drafter.target)
    expected |= {f"shape of {name}": (shape, found) for name, found in stored.items()}  # type: ignore[misc]
    wrong = [
        f"{name}: {ours} in the drafter, {theirs} in the target"
        for name, (ours, theirs) in expected.items()
        if ours != theirs
    ]
    if wrong:
        raise ValueError(f"the drafter does not belong to target {drafter.target.path}: {'; '.join(wrong)}")
    if not stored:
        drafter.notes.append(
            "shapes of head and embedding are taken from the target's configuration: its weights are no local "
            "safetensors files"
        )
    if drafter.target.gguf_file is None:
        settings = AutoConfig.from_pretrained(
            drafter.target.path,
            revision=drafter.target.revision,
            trust_remote_code=drafter.target.trust_remote_code,
        )
        architectures = tuple(settings.architectures or ())
    else:
        architectures = ()
    return facts, ServedTarget(
        max_position_embeddings=facts.max_position_embeddings, name=drafter.target.path, architectures=architectures
    )


def _head_shapes(target: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of embedding and (untied) head from the headers of a local target's weight files; no tensor is read."""
    folder = Path(target.path)
    if target.gguf_file is not None or not folder.is_dir():
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                        found[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"target file {path} cannot be read: {error}") from None
    return found


def _check_data(drafter: _Drafter) -> None:
    """The mask token must not occur in the rows that the drafter was trained on, wherever these can be read."""
    config = drafter.config
    if config is None:
        drafter.notes.append("the data was not checked for the mask token: the checkpoint lies in no run folder")
        return
    try:
        rows = prepare_run(config.data, load_tokenizer(drafter.target)).rows
    except (OSError, ValueError) as error:
        drafter.notes.append(f"the data was not checked for the mask token: {error}")
        return
    check_mask_token(rows, drafter.spec.mask_token_id, "the training data")


def _reduced_head(drafter: _Drafter) -> dict[str, Tensor]:
    if drafter.ids is None:
        raise ValueError("a drafter with a reduced head must know its ids; the checkpoint has no draft_vocab_ids")
    model = load_full_model(drafter.target, torch.device("cpu"), torch.bfloat16)
    return reduced_head(drafter.spec, drafter.ids, model.get_output_embeddings().weight)


def _check_written(folder: Path, drafter: _Drafter, to: Layout) -> None:
    """Read the folder as a stranger would: settings equal the drafter's, tensors its bf16 ones, and nothing else."""
    found, spec = read_released(folder), drafter.spec
    ours, theirs = spec.to_dict(), found.spec.to_dict()
    skipped = {"gguf_file", "target_path"} | ({"draft_vocab_size"} if to == "hf" else set())
    assert not found.unknown - skipped, f"{folder} does not say {found.unknown}"
    for name in ours.keys() - skipped:
        assert ours[name] == theirs[name], f"{name} was written as {theirs[name]}; it is {ours[name]}"
    for name, tensor in servable_tensors(spec, drafter.tensors).items():
        assert torch.equal(found.tensors[name].to(torch.bfloat16), tensor), f"{name} was written wrongly"
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        extra = set(file.keys()) - spec.parameter_shapes().keys()
    assert extra == ({"lm_head.weight", "d2t", "t2d"} if theirs["draft_vocab_size"] else set()), f"{extra} in {folder}"


# ---- the model card -------------------------------------------------------------------------------------------------


def _command(run: str | Path, to: str, output: str | Path | None, untrained: bool, overrides: Sequence[str]) -> str:
    parts = ["dflash-graph", "export", str(run), "--to", to]
    parts += ["--output", str(output)] if output is not None else []
    parts += ["--untrained", *overrides] if untrained else []
    return shlex.join(parts)


def _card(drafter: _Drafter, facts: ModelFacts, to: Layout, serve: Sequence[str], command: str) -> str:
    spec, config = drafter.spec, drafter.config
    layers = ", ".join(sorted(set(spec.layer_types)))
    window = f", window {spec.sliding_window}" if spec.sliding_window is not None else ""
    rows: dict[str, Any] = {
        "target": f"`{drafter.target.path}` ({facts.model_type}, {facts.num_hidden_layers} layers)",
        "block": f"{spec.block_size} positions: {spec.block_size - 1} drafted tokens per verification",
        "target layers read": f"{list(spec.target_layer_ids)} (outputs, counted from 0)",
        "layers": f"{spec.num_hidden_layers} ({layers}{window}), {'causal' if spec.causal else 'bidirectional'} blocks",
        "mask token": spec.mask_token_id,
        "vocabulary": f"{spec.vocab_size}"
        + (f", head trained on {spec.draft_vocab_size}" if spec.draft_vocab_size else ""),
        "longest row in training": f"{spec.max_trained_length} tokens",
        "layout": f"{to}, bf16; embedding and head are the target's",
        **drafter.trained,
        "made from": f"`{drafter.origin}`",
    }
    text = [
        "---",
        f"base_model: {json.dumps(drafter.target.path)}",
        "tags: [speculative-decoding, dflash]",
        "---",
        f"# DFlash drafter for {drafter.target.path}",
        "",
        "Drafts blocks of tokens for speculative decoding; it is of no use without its target.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Serve",
        *_code(serve),
        *([f"- {note}" for note in drafter.notes] + [""] if drafter.notes else []),
        "## Data",
    ]
    data = [f"- `{path}`" for path in config.data.train] if config else ["- not known: exported outside its run folder"]
    if config and config.data.validation:
        data += [f"- held out: `{path}`" for path in config.data.validation]
    text += [*data, "", "## Command", *_code(["dflash-graph train --config config.yaml", command])]
    if config is not None:
        settings = yaml.safe_dump(json.loads(json.dumps(config.to_dict())), sort_keys=False)
        text += ["`config.yaml`, every setting:", *_code([settings.rstrip()], "yaml")]
    return "\n".join(text)


def _code(lines: Sequence[str], language: str = "bash") -> list[str]:
    return ["", f"```{language}", *lines, "```", ""]
