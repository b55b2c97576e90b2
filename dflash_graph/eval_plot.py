"""One picture of an evaluation: acceptance by block position, by set and by prompt length, and where the time goes.

matplotlib is imported when a picture is drawn, and only its file backend is used. Called by the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_graph.report import Acceptance, EvalReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_evaluation(report: EvalReport, out_png: str | Path) -> Path:
    """Draw a report into one PNG and return its path.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib; install it: pip install 'dflash-graph[plot]'") from None
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    _positions(axes[0], report)
    _lengths(axes[1], report)
    _times(axes[2], report)
    how = "greedy" if report.sampling is None else str(report.sampling)
    figure.suptitle(f"{report.checkpoint}\n{report.num_prompts} prompts, {report.num_tokens} tokens, {how}", fontsize=9)
    path = Path(out_png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _positions(axes: Axes, report: EvalReport) -> None:
    from matplotlib.ticker import MaxNLocator

    curves: list[tuple[str, Acceptance, str]] = [("all sets", report.drafter, "-o")]
    if len(report.sets) > 1:
        curves += [(s.name, s.drafter, "-.") for s in report.sets if s.drafter is not None]
    curves += [(name, table, "--^") for name, table in report.baselines.items()]
    if report.other_features is not None:
        curves.append(("features of another prompt", report.other_features, ":D"))
    for name, acceptance, style in curves:
        label = f"{name} ({acceptance.accept_length:.2f})"
        axes.plot(range(1, report.block_size), acceptance.at_least, style, markersize=4, linewidth=1.3, label=label)
    axes.set(title="Acceptance by position (accept_length)", xlabel="position k", ylabel="share with 1..k accepted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _lengths(axes: Axes, report: EvalReport) -> None:
    for s in report.sets:
        groups = s.by_prompt_length
        middles = [(g.shortest + g.longest) / 2 for g in groups]
        spread = [[m - g.shortest for m, g in zip(middles, groups, strict=True)]] * 2
        heights = [g.accept_length for g in groups]
        axes.errorbar(middles, heights, xerr=spread, fmt="o", markersize=5, capsize=3, label=s.name)
    axes.set(title="By prompt length (quartiles)", xlabel="prompt tokens", ylabel="accept_length")
    axes.set_ylim(1, max(1.5, axes.get_ylim()[1]))
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _times(axes: Axes, report: EvalReport) -> None:
    axes.set(title="Time of one verification", xlabel="ms")
    times, length = report.step_times, report.drafter.accept_length
    if times is None:
        axes.text(0.5, 0.5, "steps not timed", ha="center", transform=axes.transAxes)
        return
    axes.barh(
        ["with the drafter"], [times.target_block_ms], color="#4c72b0", label=f"target, {report.block_size} tokens"
    )
    axes.barh(["with the drafter"], [times.draft_ms], left=[times.target_block_ms], color="#dd8452", label="drafter")
    alone = f"target alone,\n{length:.2f} tokens"
    axes.barh([alone], [length * times.target_1_ms], color="#8c8c8c", label=f"{length:.2f} x target, 1 token")
    measured = "" if report.measured_speedup is None else f", {report.measured_speedup:.2f} measured"
    axes.set_title(
        f"Time of one verification\nspeed-up {report.estimated_speedup:.2f} estimated{measured}", fontsize=11
    )
    axes.set_xlim(0, 1.35 * max(length * times.target_1_ms, times.target_block_ms + times.draft_ms))
    axes.legend(fontsize=7, loc="center right")
    axes.grid(alpha=0.3, axis="x")
