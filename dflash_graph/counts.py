"""The quantities of a report: host counts summed over jobs, device counters, their ratios, and the bottleneck.

A ratio is always a ratio of sums, never an average of averages. Pure functions of plain numbers; nothing here touches a
device or a file. Called by `metrics.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dflash_graph.counters import Counts
    from dflash_graph.padding import PaddedJob

# (worker, cause) -> seconds waited since the process started, as ring and dispatcher give them.
Waits = Mapping[tuple[str, str], float]


@dataclass(kw_only=True)
class JobCounts:
    """Host counts summed over trained jobs.

    Attributes:
        tokens: real positions; positions: T of each job; anchors: live ones; anchor_places: A of each job.
        supervised, candidates, covered: see `PaddedJob`.
        steps: bucket counts of each step, one list (num_buckets,) per step.
    """

    num_buckets: int
    jobs: int = 0
    tokens: int = 0
    positions: int = 0
    supervised: int = 0
    candidates: int = 0
    covered: int = 0
    anchors: int = 0
    anchor_places: int = 0
    trained_rows: int = 0
    steps: list[list[int]] = field(default_factory=list)

    def add_step(self, jobs: "Sequence[PaddedJob]") -> None:
        buckets = [0] * self.num_buckets
        for job in jobs:
            buckets[job.bucket] += 1
            self.jobs += 1
            self.tokens += job.num_tokens
            self.positions += len(job.token_ids)
            self.supervised += job.num_supervised
            self.candidates += job.num_candidates
            self.covered += job.num_covered
            self.anchors += job.num_anchors
            self.anchor_places += len(job.anchors)
            self.trained_rows += job.num_trained_rows
        self.steps.append(buckets)

    def add(self, other: "JobCounts") -> None:
        """Add the counts of later steps."""
        self._add_sums(other)
        self.steps += other.steps

    def _add_sums(self, other: "JobCounts") -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def merged(cls, ranks: "Sequence[JobCounts]") -> "JobCounts":
        """What all ranks together did in the same steps: sums, step by step."""
        merged = cls(num_buckets=ranks[0].num_buckets)
        for each in ranks:
            merged._add_sums(each)
        merged.steps = [
            [sum(n) for n in zip(*step, strict=True)] for step in zip(*(r.steps for r in ranks), strict=True)
        ]
        return merged

    def metrics(self, seconds: float) -> dict[str, Any]:
        """Rates over `seconds` of wall-clock and ratios; None where nothing was counted.

        train_tok_s: real target tokens trained per second. rows_s: trained rows per second. anchors_per_1k: anchors per
        1,000 supervised tokens. padding_efficiency: real tokens / positions paid. anchor_fill: live anchors / A.
        coverage: share of supervised tokens that some block trains.
        """
        per_1k = ratio(self.anchors, self.supervised)
        return {
            "train_tok_s": ratio(self.tokens, seconds),
            "rows_s": ratio(self.trained_rows, seconds),
            "jobs_s": ratio(self.jobs, seconds),
            "anchors_per_1k": None if per_1k is None else 1000 * per_1k,
            "padding_efficiency": ratio(self.tokens, self.positions),
            "anchor_fill": ratio(self.anchors, self.anchor_places),
            "coverage": ratio(self.covered, self.supervised),
            "candidate_share": ratio(self.candidates, self.supervised),
        }


_SUMMED = tuple(f.name for f in dataclasses.fields(JobCounts) if f.name not in ("num_buckets", "steps"))


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None, not NaN, where there is nothing to divide by."""
    return part / whole if whole else None


def ratios(part: np.ndarray, whole: np.ndarray) -> list[float | None]:
    """Elementwise `ratio`."""
    return [ratio(float(p), float(w)) for p, w in zip(part, whole, strict=True)]


_COUNTED = ("loss_sum", "weight_sum", "rows", "correct", "correct_top_k", "blocks", "leading")


def add_counts(a: "Counts", b: "Counts") -> "Counts":
    """Sum of two read-outs in order; norm and skipped-in-a-row are states, so the later one holds."""
    summed = [*_COUNTED, "skipped_steps"]
    if a.kl_sum is not None and b.kl_sum is not None:
        summed += ["nll_sum", "kl_sum"]
    return dataclasses.replace(b, **{name: getattr(a, name) + getattr(b, name) for name in summed})


def merge_counts(ranks: Sequence["Counts"]) -> "Counts":
    """All ranks' read-outs of the same steps: what each counted of its own jobs is summed, the updates are common."""
    merged: dict[str, Any] = {name: sum(getattr(each, name) for each in ranks) for name in _COUNTED}
    mixed = [each for each in ranks if each.kl_sum is not None]  # a rank without a job has none
    for name in ("nll_sum", "kl_sum") if mixed else ():
        merged[name] = sum(getattr(each, name) for each in mixed)
    return dataclasses.replace(ranks[0], **merged)


def count_metrics(counts: "Counts", *, top_k: bool = True) -> dict[str, Any]:
    """Loss, accuracies and expected accept_length of summed device counters; lists are (K-1,), index k-1.

    accuracy: P(row k right). acceptance: P(rows 1..k all right) among blocks whose rows 1..k are all trained.
    accept_length: 1 + the sum of acceptance, tokens per verification under teacher forcing, bonus included.
    rows_per_k, blocks_per_k: the denominators of accuracy and acceptance, so that records can be pooled.
    nll, kl: the two parts of the loss before they are mixed, where a KL was trained.
    """
    metrics = {
        "loss": ratio(counts.loss_sum, counts.weight_sum),
        "weight_sum": counts.weight_sum,
        "accept_length": counts.accept_length if counts.rows.sum() > 0 else None,
        "accuracy": ratios(counts.correct, counts.rows),
        "acceptance": ratios(counts.leading, counts.blocks),
        "rows_per_k": counts.rows,
        "blocks_per_k": counts.blocks,
    }
    if counts.nll_sum is not None and counts.kl_sum is not None:
        metrics |= {"nll": ratio(counts.nll_sum, counts.weight_sum), "kl": ratio(counts.kl_sum, counts.weight_sum)}
    if top_k:
        metrics["top_k_accuracy"] = ratios(counts.correct_top_k, counts.rows)
    return metrics


def bottleneck(waits: Waits, seconds: float, threshold: float = 0.1) -> str:
    """What held the run back, in one word, from the seconds waited during `seconds` of wall-clock.

    The drafter's waits tell most: "checkpoint" and "validation" by name; "ready" (no READY slot to draw) means that the
    side that fills slots is slow: "padding" if the targets' wait for padded jobs makes up at least half of it, else
    "target". Targets that wait for a FREE slot mean "drafter". A target that waits for its turn to take a job waits for
    what the one inside waits for, so "turn" is shared out between "job" and "slot" as these stand to each other;
    targets' waits are means over targets, drafters' over drafters. "ranks" is a drafter's wait for the other ranks'
    gradients: some rank is slower. The largest wait names the bottleneck; below `threshold` of the wall-clock the run
    is "balanced".
    """
    sums: dict[str, float] = {}
    for (_, cause), waited in waits.items():
        sums[cause] = sums.get(cause, 0.0) + waited
    targets = len({worker for worker, cause in waits if cause in ("job", "slot", "turn")}) or 1
    taking = sums.get("job", 0.0) + sums.get("slot", 0.0)
    with_turns = 1 + (ratio(sums.get("turn", 0.0), taking) or 0.0)
    for_job, for_slot = (sums.get(cause, 0.0) * with_turns / targets for cause in ("job", "slot"))
    drafters = len({worker for worker, cause in waits if cause in ("ready", "validation", "ranks")}) or 1
    ready, others, validation = (sums.get(cause, 0.0) / drafters for cause in ("ready", "ranks", "validation"))
    scores = {
        "padding" if 0 < ready <= 2 * for_job else "target": ready,
        "drafter": for_slot,
        "ranks": others,
        "checkpoint": sums.get("checkpoint", 0.0),
        "validation": validation,
    }
    word = max(scores, key=lambda name: scores[name])
    return word if seconds > 0 and scores[word] >= threshold * seconds else "balanced"


def slowest_rank(waits: Waits, world: int) -> dict[str, Any]:
    """The rank for which the others wait, and how long they do, seconds of the drafter that waited longest."""
    waited = [waits.get((f"rank{rank}.drafter", "ranks"), 0.0) for rank in range(world)]
    return {"slowest_rank": waited.index(min(waited)), "waited_for_ranks_s": round(max(waited) - min(waited), 4)}
