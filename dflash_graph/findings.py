"""What a check found, and the line of Python that a tensor operation comes from.

`Site` and `Finding` are what every check of the package reports. `SiteFinder` walks the stack of an operation: the
innermost frame of the user's or our own files is its site, and an inner library frame is kept beside it. Operations of
autograd's engine have no forward frame on the stack; the tracer hands over the site that it saw in the forward.
Knows torch's folder layout only, never a model.
"""

import linecache
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import torch

Root = str | Path | ModuleType
Phase = Literal["forward", "backward", "optimizer"]

_PACKAGE = Path(__file__).parent
_TORCH = f"{Path(torch.__file__).parent}/"
_OPTIM = f"{_TORCH}optim/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
# These run or watch a step and are never what it does; their frames would hide the step's own.
_HARNESS_MODULES = (
    "findings", "interception", "op_rules", "traces", "frozen_world", "tracing", "graphs", "graph_backends", "observer",
    "debug_checks", "debugging",
)  # fmt: skip
_HARNESS = frozenset(str(_PACKAGE / f"{name}.py") for name in _HARNESS_MODULES)


@dataclass(frozen=True)
class Site:
    """One line of Python. `inside` is the library line further in, if the operation was not called here directly."""

    file: str
    line: int
    function: str
    code: str
    inside: "Site | None" = None

    def __str__(self) -> str:
        code = self.code if len(self.code) <= 120 else f"{self.code[:117]}..."
        text = f"{short_path(self.file)}:{self.line} in {self.function}: {code}"
        return text if self.inside is None else f"{text} (inside {self.inside})"


@dataclass(frozen=True)
class Finding:
    """One fault: what was seen, what it means in a captured graph, and what to do about it.

    Attributes:
        check: which check found it ("illegal_op", "frozen_world", "capture_branch", ...).
        worker, graph: whose step it is; empty where there is only one.
    """

    check: str
    what: str
    meaning: str
    advice: str
    site: Site | None
    worker: str = ""
    graph: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = " ".join(part for part in (self.worker, self.graph) if part)
        lines = [f"[{self.check}]{f' {where}:' if where else ''} {self.what}"]
        if self.site is not None:
            lines.append(f"  at {self.site}")
        return "\n".join([*lines, f"  In a graph: {self.meaning}", f"  What to do: {self.advice}"])


def short_path(file: str) -> str:
    """A library's file from its package on, another relative to the working directory if it lies below it."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in file:
            return file.rsplit(marker, 1)[1]
    folder = f"{Path.cwd()}/"
    return file.removeprefix(folder)


class SiteFinder:
    """Finds the site of whatever runs now.

    Args:
        root: files, folders or packages whose frames count as the user's; None is everything outside site-packages and
            the standard library, and this package.
    """

    def __init__(self, root: Root | Sequence[Root] | None = None) -> None:
        roots = [] if root is None else [root] if isinstance(root, str | Path | ModuleType) else list(root)
        self._roots = tuple(_root_path(r) for r in roots)
        self._kinds: dict[str, str] = {}  # file -> "torch" | "harness" | "library" | "user"

    def find(self, frame: FrameType | None, backward_of: Site | None = None) -> tuple[Site | None, Phase, bool]:
        """Walk outwards from `frame`.

        Args:
            backward_of: forward site of the autograd node that runs now, if it is known.

        Returns:
            The site, the phase, and whether the site is the forward's (no frame of the backward itself was ours).
        """
        library: FrameType | None = None
        phase: Phase = "forward"
        while frame is not None:
            file = frame.f_code.co_filename
            kind = self._kinds.get(file) or self._classify(file)
            if kind == "user":
                return _site(frame, library), phase, False
            if kind == "library":
                library = library or frame
            elif kind == "torch":
                if frame.f_code.co_name == "_engine_run_backward":
                    if backward_of is not None:
                        return _with_library(backward_of, library), "backward", True
                    phase = "backward"
                elif phase == "forward" and file.startswith(_OPTIM):
                    phase = "optimizer"
            frame = frame.f_back
        return (None if library is None else _site(library, None)), phase, False

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame that is neither torch's nor the harness's."""
        while frame is not None:
            file = frame.f_code.co_filename
            if (self._kinds.get(file) or self._classify(file)) in ("user", "library"):
                return frame
            frame = frame.f_back
        return None

    def _classify(self, file: str) -> str:
        if file.startswith(_TORCH):
            kind = "torch"
        elif file in _HARNESS:
            kind = "harness"
        elif self._roots:
            kind = "user" if any(file == r or file.startswith(f"{r}/") for r in self._roots) else "library"
        elif file.startswith(f"{_PACKAGE}/"):
            kind = "user"
        elif "/site-packages/" in file or "/dist-packages/" in file or file.startswith(_STDLIB):
            kind = "library"
        elif file.startswith("<"):  # generated code (dataclasses, import machinery), except what a person typed
            kind = "user" if file.startswith(("<stdin>", "<ipython")) else "harness"
        else:
            kind = "user"
        self._kinds[file] = kind
        return kind


def _root_path(root: Root) -> str:
    if isinstance(root, ModuleType):
        if root.__file__ is None:
            raise ValueError(f"root must be a file, a folder or a package with a file; found {root!r}. Name its folder")
        path = Path(root.__file__)
        return str(path.parent if path.name == "__init__.py" else path)
    path = Path(root).resolve()
    if not path.exists():
        raise ValueError(f"root must be a file, a folder or a package; found {str(root)!r}, which does not exist")
    return str(path)


def _site(frame: FrameType, library: FrameType | None) -> Site:
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    inside = None if library is None else _site(library, None)
    return Site(code.co_filename, line, code.co_qualname, text, inside)


def _with_library(site: Site, library: FrameType | None) -> Site:
    if library is None:
        return site
    return Site(site.file, site.line, site.function, site.code, _site(library, None))
