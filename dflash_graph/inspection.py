"""Rows and their lengths, to look at: text with the supervised tokens highlighted, and a histogram as text or picture.

Owns no decision; it reads finished `TokenRows`. Called by the command line.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_graph.token_rows import TokenRows

_ON, _OFF, _DIM = "\x1b[30;42m", "\x1b[0m", "\x1b[2m"
_OPEN, _CLOSE, _BOUNDARY = "⟦", "⟧", "·"
_BARS = 50  # characters of the longest bar


def choose_rows(rows: TokenRows, count: int, seed: int | None) -> list[int]:
    """The first `count` rows, or, with a seed, so many drawn at random, in order."""
    count = min(count, len(rows))
    if seed is None:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(len(rows), count, replace=False).tolist())


def describe_row(rows: TokenRows, i: int, tokenizer: Any, *, ansi: bool, boundaries: bool = False) -> str:
    """Row i: one line about it, then its text with supervised tokens coloured, or in ⟦ ⟧.

    Args:
        ansi: for a terminal; otherwise plain text.
        boundaries: show where one token ends and the next begins, as ·.
    """
    tokens, mask = rows.row(i)
    full_length = int(rows.origins["full_length"][i])
    cut = f", cut from {full_length:,}" if full_length > len(tokens) else ""
    head = f"row {i} ({rows.where(i)}): {len(tokens):,} tokens{cut}, {int(mask.sum()):,} supervised"
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    text = ""
    for start, stop in zip([0, *edges], [*edges, len(tokens)], strict=True):
        piece = _text(tokenizer, tokens, int(start), int(stop), boundaries)
        if mask[start]:
            # Colour ends at a line's end in many pagers, so each line is coloured anew.
            piece = "\n".join(f"{_ON}{line}{_OFF}" for line in piece.split("\n")) if ansi else f"{_OPEN}{piece}{_CLOSE}"
        text += piece
    if cut:
        note = f"[cut here: {full_length - len(tokens):,} more tokens]"
        text += f"{_DIM}{note}{_OFF}" if ansi else note
    return f"{head}\n{text}"


def _text(tokenizer: Any, tokens: NDArray[np.int32], start: int, stop: int, boundaries: bool) -> str:
    """Tokens [start, stop) as text, special tokens included, the way they read after the tokens before them."""
    if boundaries:
        return _BOUNDARY.join(_text(tokenizer, tokens, k, k + 1, False) for k in range(start, stop))
    # Some decoders drop a blank at the start of what they decode: a few tokens of what goes before keep it.
    begin = max(0, start - 4)
    before, through = (_decode(tokenizer, tokens[begin:end]) for end in (start, stop))
    return through[len(before) :] if through.startswith(before) else _decode(tokenizer, tokens[start:stop])


def _decode(tokenizer: Any, tokens: NDArray[np.int32]) -> str:
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _bins(lengths: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Edges of at most `count` bins of equal width, which is a round number."""
    top = int(lengths.max()) + 1
    width = max(1, -(-top // count))
    scale = 10 ** (len(str(width)) - 1)
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= width)
    return np.arange(0, top + width, width)


def text_histogram(lengths: NDArray[np.int32], max_length: int) -> str:
    """Rows by length in tokens, one line per bin."""
    edges = _bins(lengths, 16)
    counts = np.histogram(lengths, edges)[0]
    lines = ["length (tokens)      rows"]
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * int(np.ceil(_BARS * count / counts.max()))
        mark = "  <- max_length" if low <= max_length < high else ""
        lines.append(f"{low:>6,}-{high - 1:<6,}  {count:>10,}  {bar}{mark}".rstrip())
    return "\n".join(lines)


def write_histogram(sets: Sequence[tuple[str, TokenRows]], path: Path, max_length: int) -> None:
    """Draw the lengths before truncation, and the share of all tokens in rows up to a length, as a picture.

    Raises:
        ValueError: matplotlib is missing, or does not know the ending of `path`.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shares = axes.twinx()
    longest = np.concatenate([rows.origins["full_length"] for _, rows in sets])
    edges = _bins(longest, 60).tolist()
    for name, rows in sets:
        lengths = np.sort(rows.origins["full_length"].astype(np.int64))
        axes.hist(lengths, edges, alpha=0.6, label=f"{name}: {len(rows):,} rows")
        shares.plot(lengths, np.cumsum(lengths) / lengths.sum(), linewidth=1)
    axes.axvline(max_length, color="black", linestyle="--", linewidth=1, label=f"max_length {max_length:,}")
    axes.set(
        xlabel="tokens of a row, before truncation", ylabel="rows", yscale="log" if len(longest) > 1000 else "linear"
    )
    shares.set(ylabel="share of tokens in rows up to this length (line)", ylim=(0, 1))
    axes.set_xlim(0, edges[-1])
    axes.legend()
    figure.savefig(path, dpi=150)


def check_picture(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written.

    Raises:
        ValueError: matplotlib is missing, its folder does not exist, or the ending is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError("--histogram draws with matplotlib, which is not installed: pip install matplotlib") from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known or not path.absolute().parent.is_dir():
        raise ValueError(f"--histogram must name a picture ({', '.join(known)}) in an existing folder; found {path}")
