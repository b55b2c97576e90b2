"""One picture of a run, from its metrics file: loss, acceptance per position, length mix, and worker waits.

Reads `metrics.jsonl` and an optional evaluation report, writes a PNG. matplotlib is imported when a picture is drawn,
and only its file backend is used. Called by the demo and by users after a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_graph.counts import ratios
from dflash_graph.metrics import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_COLUMNS = 120  # the length mix of a longer run is summed over windows of steps
_RECENT = 5  # training records behind the training curve of acceptance
_CAUSES = {  # fixed colours, so that two runs compare
    "ready": "#c44e52",
    "slot": "#4c72b0",
    "job": "#dd8452",
    "turn": "#8c8c8c",
    "window": "#937860",
    "checkpoint": "#55a868",
    "validation": "#8172b3",
    "evaluation": "#64b5cd",
}


def plot_run(run_dir: str | Path, eval_report: Mapping[str, Any] | None, out_png: str | Path) -> Path:
    """Draw a run's metrics into one PNG and return its path.

    Args:
        eval_report: `EvalReport.to_dict()`; its "drafter", "other_features" and "baselines" are drawn, each with its
            "at_least" (K-1,) and "accept_length". None draws the run alone.

    Raises:
        ValueError: the run folder has no training records.
    """
    records = read_records(run_dir)
    train = [r for r in records if r["kind"] == "train"]
    if not train:
        raise ValueError(f"{run_dir} must hold the metrics of a run; found no training record in its metrics.jsonl")
    validation = [r for r in records if r["kind"] == "validation"]
    decoded = [r for r in records if r["kind"] == "eval"]
    schedules = [r for r in records if r["kind"] == "schedule"]

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _loss(axes[0, 0], train, validation, decoded)
    _acceptance(axes[0, 1], train, validation, eval_report or {})
    _length_mix(axes[1, 0], train, schedules[-1]["bucket_lengths"] if schedules else None)
    _waits(axes[1, 1], train)
    path = Path(out_png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _loss(
    axes: Axes, train: list[dict[str, Any]], validation: list[dict[str, Any]], decoded: list[dict[str, Any]]
) -> None:
    axes.plot(*_series(train, "loss"), color="#4c72b0", linewidth=1.2, label="loss, training")
    axes.plot(*_series(validation, "loss"), "o", color="#1b2f52", markersize=4, label="loss, validation")
    axes.set(title="Loss and expected accept_length", xlabel="step", ylabel="loss")
    right = axes.twinx()
    right.plot(*_series(train, "accept_length"), color="#dd8452", linewidth=1, label="accept_length, training")
    right.plot(*_series(validation, "accept_length"), "s", color="#8a4413", markersize=4, label="same, validation")
    if decoded:
        right.plot(*_series(decoded, "accept_length"), "D", color="#c44e52", markersize=4, label="same, decoding")
    right.set_ylabel("tokens per verification")
    handles = [line for line in (*axes.get_lines(), *right.get_lines()) if len(np.atleast_1d(line.get_xdata()))]
    axes.legend(handles=handles, fontsize=8, loc="center right")
    axes.grid(alpha=0.3)


def _pooled_acceptance(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Per position, over the last few training records, each weighted by its blocks."""
    recent = [r for r in records if r.get("acceptance")][-_RECENT:]
    blocks = np.array([r["blocks_per_k"] for r in recent], dtype=float)
    accepted = np.array([r["acceptance"] for r in recent], dtype=float) * blocks  # None becomes NaN
    return ratios(np.nansum(accepted, axis=0), blocks.sum(axis=0)) if recent else []


def _acceptance(
    axes: Axes, train: list[dict[str, Any]], validation: list[dict[str, Any]], report: Mapping[str, Any]
) -> None:
    from matplotlib.ticker import MaxNLocator

    recent = _pooled_acceptance(train)
    curves: list[tuple[str, Sequence[float | None], float | None, str, str]] = [
        (f"training, last {_RECENT} records", recent, 1 + sum(p or 0 for p in recent), "#4c72b0", "-o")
    ]
    if validation:
        last = validation[-1]
        curves.append(("validation", last["acceptance"], last["accept_length"], "#1b2f52", "-s"))
    decoded = [("speculative decoding", report.get("drafter"), "#c44e52", "-D")]
    decoded.append(("same, features of another prompt", report.get("other_features"), "#e3a6a8", ":D"))
    greys = ("#555555", "#888888", "#aaaaaa", "#c8c8c8")
    for i, (name, baseline) in enumerate((report.get("baselines") or {}).items()):
        decoded.append((name, baseline, greys[i % len(greys)], "--^"))
    for name, result, color, style in decoded:
        if result:
            curves.append((name, result["at_least"], result["accept_length"], color, style))
    for name, values, length, color, style in curves:
        label = name if length is None else f"{name} (accept_length {length:.2f})"
        heights = [float("nan") if value is None else value for value in values]
        axes.plot(range(1, len(heights) + 1), heights, style, color=color, markersize=4, linewidth=1.3, label=label)
    axes.set(title="Acceptance per position", xlabel="position k in the block", ylabel="share with 1..k accepted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _length_mix(axes: Axes, train: list[dict[str, Any]], lengths: Sequence[int] | None) -> None:
    from matplotlib import colormaps

    mix = np.array([step for r in train for step in r["length_mix"]], dtype=float)  # (steps, num_buckets)
    axes.set(title="Length mix per step", xlabel="step of this metrics file", ylabel="share of the step's jobs")
    if not mix.size:
        return
    window = -(-len(mix) // _MAX_COLUMNS)
    starts = np.arange(0, len(mix), window)
    sums = np.add.reduceat(mix, starts, axis=0)
    shares = sums / np.maximum(1, sums.sum(axis=1, keepdims=True))
    widths = np.minimum(window, len(mix) - starts)
    bottom = np.zeros(len(starts))
    buckets = mix.shape[1]
    for bucket in range(buckets):
        color = colormaps["viridis"](bucket / max(1, buckets - 1))
        label = f"{lengths[bucket]}" if lengths else f"bucket {bucket}"
        axes.bar(starts, shares[:, bucket], widths, bottom, align="edge", color=color, label=label, linewidth=0)
        bottom += shares[:, bucket]
    axes.set(xlim=(0, len(mix)), ylim=(0, 1))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], title="row length", fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5)
    )
    if window > 1:
        axes.set_xlabel(f"step of this metrics file (columns of {window} steps)")


def _waits(axes: Axes, train: list[dict[str, Any]]) -> None:
    sums: dict[str, dict[str, float]] = {}
    for record in train:
        for worker, causes in record["waits"].items():
            for cause, seconds in causes.items():
                mine = sums.setdefault(worker, {})
                mine[cause] = mine.get(cause, 0.0) + seconds
    seconds = sum(record["seconds"] for record in train)
    workers = sorted(sums, reverse=True)
    seen = sorted({cause for causes in sums.values() for cause in causes})
    left = np.zeros(len(workers))
    for i, cause in enumerate(seen):
        shares = np.array([sums[worker].get(cause, 0.0) for worker in workers]) / max(1e-9, seconds)
        axes.barh(workers, shares, left=left, color=_CAUSES.get(cause, f"C{i}"), label=cause)
        left += shares
    axes.set(title=f"Waits, as a share of {seconds:.0f} s", xlabel="share of the wall-clock spent waiting")
    axes.set_xlim(0, 1)
    if seen:
        axes.legend(title="waits for", fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.grid(alpha=0.3, axis="x")
