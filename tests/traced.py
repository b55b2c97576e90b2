"""What tests of tracing share: a traced run, a line by its marker, and tensors that stand for a GPU's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_graph.tracing import Finding, Trace, Tracer


def traced(step: Callable[[], Any], **options: Any) -> Trace:
    with Tracer(**options) as tracer:
        step()
    return tracer.trace


def line_of(file: str, marker: str) -> int:
    """The line of `file` that ends in `# <marker>`."""
    lines = [i for i, text in enumerate(Path(file).read_text().splitlines(), 1) if text.endswith(f"# {marker}")]
    assert len(lines) == 1, f"{marker}: {lines}"
    return lines[0]


def found_lines(findings: list[Finding]) -> list[int]:
    """The line of each finding; each must have one."""
    sites = [finding.site for finding in findings]
    assert None not in sites, "\n".join(map(str, findings))
    return [site.line for site in sites if site is not None]


class World:
    """Tensors that a step finds: they stand for tensors on a GPU."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1, 1, 6)
        self.table = torch.arange(12.0).view(4, 3)
        self.mask = self.x > 0
        self.index = torch.tensor([0, 2])
        self.one = torch.tensor(1)
        self.generator = torch.Generator().manual_seed(0)
