"""What a comparison found, and how it is shown."""

import bisect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEADER = ("array", "elements", "outside", "max_err", "err_over_tol", "worst", "a", "b", "verdict")
LEFT = ("array", "verdict")
MOST_TEXT = 24
MOST_LINES = 10  # of values that differ


@dataclass(frozen=True)
class Difference:
    """One element that is not equal."""

    index: tuple[int, ...]
    got: Any
    expected: Any
    error: float
    err_over_tol: float


@dataclass(frozen=True)
class ArrayComparison:
    """One array. Errors are infinite where they are undefined, as between a number and NaN.

    verdict: same; differs, by a factor if all values have one whole one, or its inverse, in common;
    the tolerance is larger than the values; only in A (what was got) or B (what was expected);
    shapes that differ; types that cannot be compared. worst: up to ten elements that are not equal, the worst first.
    first: index of the first element outside; rows: the array's first extent.
    """

    name: str
    elements: int
    verdict: str = "same"
    outside: int = 0
    max_error: float = 0.0
    err_over_tol: float = 0.0
    worst: tuple[Difference, ...] = ()
    first: tuple[int, ...] = ()
    rows: int = 0


@dataclass(frozen=True)
class Comparison:
    """All arrays that were compared; only_in_a, only_in_b: names of those that were left out.

    offsets: where the documents of the reference begin, and the last ends, if its file says so; guards: what
    its file guards against, if it is of the golden suite.
    """

    arrays: tuple[ArrayComparison, ...]
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    guards: str = ""

    @property
    def passed(self) -> bool:
        return all(array.verdict == "same" for array in self.arrays)

    @property
    def err_over_tol(self) -> float:
        """The largest error as a share of its tolerance."""
        return max(array.err_over_tol for array in self.arrays)

    def __str__(self) -> str:
        """The table of gyre-compare, then the worst values of what differs."""
        return _text(self)


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."


def _place(difference: Difference) -> list[str]:
    index = "[" + ", ".join(map(str, difference.index)) + "]"
    return [index, _shortened(difference.got), _shortened(difference.expected)]


def _first(array: ArrayComparison, offsets: Sequence[int]) -> str:
    """", the first at [2, 5], document 0, position 2": the latter where rows are the tokens of documents."""
    if not array.first:
        return ""
    place = f", the first at [{', '.join(map(str, array.first))}]"
    if not offsets or array.rows != offsets[-1]:
        return place
    document = bisect.bisect_right(offsets, array.first[0]) - 1
    return f"{place}, document {document}, position {array.first[0] - offsets[document]}"


def _row(array: ArrayComparison) -> list[str]:
    counts = [str(array.elements), str(array.outside)]
    errors = [f"{array.max_error:.3g}", f"{array.err_over_tol:.3g}"]
    worst = _place(array.worst[0]) if array.worst else ["", "", ""]
    return [array.name, *counts, *errors, *worst, array.verdict]


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: names and verdicts to the left, all else to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = []
    for row in (header, *rows):
        cells = (
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(header, row, widths)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def _text(comparison: Comparison) -> str:
    """All arrays, then the worst values of those that differ, ten lines of them in all, then the verdict."""
    lines = _aligned(HEADER, [_row(array) for array in comparison.arrays])
    different = [array for array in comparison.arrays if array.verdict.startswith("differs")]
    for array in different[:MOST_LINES]:
        outside = f"{array.outside} of {array.elements} outside"
        first = _first(array, comparison.offsets)
        lines += ["", f"{array.name or 'the array'}: {outside}{first}"]
        header = ("index", "a", "b", "error", "err_over_tol")
        rows = [[*_place(d), f"{d.error:.3g}", f"{d.err_over_tol:.3g}"] for d in array.worst]
        rows = rows[: max(1, MOST_LINES // len(different))]
        lines += _aligned(header, rows)
    if comparison.guards and not comparison.passed:
        text = f"the file guards against: {comparison.guards}"
        lines += ["", *textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False)]
    for side, names in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if names:
            text = f"left out, only in {side}: {', '.join(names)}"
            lines += textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False)
    same = sum(array.verdict == "same" for array in comparison.arrays)
    verdict = "PASSED" if comparison.passed else "FAILED"
    total = f"{same}/{len(comparison.arrays)} max_err_over_tol={comparison.err_over_tol:.3g}"
    return "\n".join([*lines, f"VERIFY {verdict} {total}"])
