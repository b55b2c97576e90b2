"""What became of every input row, for people: `DataReport`, its text, and the refusal of data with nothing to train on.

Owns no decision. The invariant that it shows, for all rows and for each source: rows in = kept + dropped. Made by
data_writer.py, kept with the rows, printed by the command line.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class CutShare(NamedTuple):
    """What a max_length would cut: shares in [0, 1] of all usable rows, before any truncation."""

    rows: float
    tokens: float
    supervised: float


class SourceReport(NamedTuple):
    """One source: rows_in == kept + sum(dropped.values()); `rows_written` counts copies and parts."""

    name: str
    rows_in: int
    kept: int
    rows_written: int
    dropped: dict[str, int]
    first_dropped: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What became of the input: rows_in == kept + sum(dropped.values()).

    Attributes:
        kept: input rows that are trained on. Rows that are held out count as dropped here, for "held_out".
        rows_written: rows of the result; a row of weight 2 is written twice, one of several parts once per part.
        dropped: rows by reason; `first_dropped` names the first one of each, as file:line and detail.
        parts_dropped: parts of kept rows that were dropped alone, by reason.
        truncated: written rows that were cut to max_length.
        num_tokens, num_supervised: of the written rows, after truncation.
        length_quantiles: share in [0, 1] -> length in tokens of the written rows.
        cut_share: max_length -> share of rows it would truncate, of tokens and of supervised tokens it would lose.
        mask_source: how the tokens of conversations were masked: "generation tags", "prefix rendering", or "the rows"
            themselves, where there is no template.
        max_token_id: highest token id of the written rows.
        sources: the same account for each source.
    """

    rows_in: int
    kept: int
    dropped: dict[str, int]
    first_dropped: dict[str, str]
    truncated: int
    max_length: int
    num_tokens: int
    num_supervised: int
    length_quantiles: dict[float, int]
    cut_share: dict[int, CutShare]
    mask_source: str
    max_token_id: int
    rows_written: int
    parts_dropped: dict[str, int]
    sources: tuple[SourceReport, ...]

    def __post_init__(self) -> None:
        accounts: list[DataReport | SourceReport] = [self, *self.sources]
        for account in accounts:
            assert account.rows_in == account.kept + sum(account.dropped.values()), "rows in = kept + dropped"

    @property
    def supervised_share(self) -> float:
        return self.num_supervised / self.num_tokens if self.num_tokens else 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataReport":
        """The report that `asdict` and JSON made of one: numeric keys came back as text, named tuples as lists."""
        values = dict(values)
        values["length_quantiles"] = {float(k): v for k, v in values["length_quantiles"].items()}
        values["cut_share"] = {int(k): CutShare(*v) for k, v in values["cut_share"].items()}
        values["sources"] = tuple(SourceReport(*v) for v in values["sources"])
        return cls(**values)

    def __str__(self) -> str:
        lines = [f"rows        {_account(self)}"]
        if len(self.sources) > 1:
            for source in self.sources:
                lines.append(f"  {source.name}: {_account(source)}")
                lines += dropped_lines(source.dropped, source.first_dropped, "    ")
        else:
            lines += dropped_lines(self.dropped, self.first_dropped)
        if self.parts_dropped:
            parts = ", ".join(f"{count:,} {reason}" for reason, count in self.parts_dropped.items())
            lines.append(f"  parts of kept rows dropped: {parts}")
        lines.append(f"truncated   {self.truncated:,} kept rows cut to max_length = {self.max_length:,}")
        lines.append(
            f"tokens      {self.num_tokens:,}, of which {self.num_supervised:,} supervised "
            f"({self.supervised_share:.1%}; mask from {self.mask_source})"
        )
        quantiles = "  ".join(f"{share:.0%} {length:,}" for share, length in self.length_quantiles.items())
        lines.append(f"lengths     {quantiles}")
        lines.append("max_length  truncates rows  loses tokens  loses supervised tokens")
        for length, cut in self.cut_share.items():
            lines.append(f"{length:>10,}  {cut.rows:>14.2%}  {cut.tokens:>12.2%}  {cut.supervised:>23.2%}")
        return "\n".join(lines)


def _account(account: DataReport | SourceReport) -> str:
    text = f"{account.rows_in:,} in = {account.kept:,} kept + {sum(account.dropped.values()):,} dropped"
    return text if account.rows_written == account.kept else f"{text}; {account.rows_written:,} written"


def dropped_lines(dropped: dict[str, int], first: dict[str, str], indent: str = "  ") -> list[str]:
    """One line per reason, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return [f"{indent}dropped   {count:,} {reason} (first: {first[reason]})" for reason, count in ordered]


def no_trainable_row(rows_in: int, dropped: dict[str, int], first: dict[str, str], max_length: int) -> str:
    """Why there is nothing to train on, and what a row must be."""
    if rows_in == 0:
        return "no trainable row: the data files hold no line. A file has one JSON object per line"
    reasons = "\n".join(dropped_lines(dropped, first))
    return (
        f"no trainable row among {rows_in:,}:\n{reasons}\n"
        "A row is one JSON object per line, or a record of a table, with `messages` (role, content) or `conversations` "
        "(from, value), `input_ids` and `loss_mask`, `prompt` and `completion`, or `text`. It needs two supervised "
        f"tokens side by side within max_length = {max_length}; raise data.max_length if rows are cut"
    )
