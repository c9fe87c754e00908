"""Which cases of two sets of runs became slower or faster; noise.py has the statistics."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from .errors import StudyError
from .identity import Experiment, fact_differences, setting_differences
from .noise import (
    LEAST_SAMPLES,
    Array,
    Test,
    cell_means,
    levels,
    refutes,
    test_by_drift,
    test_by_runs,
    variance_of_median,
)
from .sides import Compared, Side, Sides, read_sides

VERDICTS = (
    "wrong result",
    "slower",
    "faster",
    "too noisy",
    "too few samples",
    "not in all runs",
    "no time",
    "unchanged",
)
MOST_THRESHOLD = 2.0  # where the noise hides more than a doubling, a case is not called unchanged
USUAL_DRIFT = 0.05  # that is taken where neither runs nor --drift say how far runs are apart
ALL_ROWS = "all rows"


@dataclass
class Change:
    """`ratio`: after / before, of medians. `change`, `low`, `high`: what was tested, with its interval: of several rows
    the ratio over that of the other rows."""

    case: str
    verdict: str  # one of VERDICTS
    ratio: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None  # smallest change that counts
    group: str = ""  # that changed, and the row with it
    before: str = ""
    after: str = ""
    broken: dict[str, str] = field(default_factory=dict)  # run rules that a side breaks


@dataclass
class Group:
    """Rows with one value of a variable, or all rows, that changed together. `ratio` is over that of the other rows; of
    all rows, after / before."""

    name: str
    verdict: str  # "slower" or "faster"
    ratio: float
    low: float
    high: float
    cases: list[str]


@dataclass
class Comparison:
    """`between`: what the noise between runs was taken from. `differences`: of settings, builds, libraries, environments;
    `grave`: those between which times cannot be compared. `stated`: drift, as a share, where runs do not measure it."""

    groups: list[Group]
    changes: list[Change]
    only_before: list[str]
    only_after: list[str]
    runs: tuple[int, int]
    between: str
    stated: float | None = None
    differences: list[str] = field(default_factory=list)
    grave: list[str] = field(default_factory=list)

    @property
    def slower(self) -> list[Change | Group]:
        both: list[Change | Group] = [*self.groups, *self.changes]
        return [one for one in both if one.verdict in ("slower", "wrong result")]


@dataclass
class Family:
    """Cells of rows: `names` and the rows of each, as indices."""

    names: list[str]
    cells: list[list[int]]
    level: float = 0.0

    def among(self, free: Collection[int]) -> "Family":
        """The cells with the free rows alone; empty ones are left out."""
        left = {*free}
        both = [(name, [row for row in cell if row in left]) for name, cell in zip(self.names, self.cells)]
        kept = [(name, cell) for name, cell in both if cell]
        return Family([name for name, _ in kept], [cell for _, cell in kept], self.level)


def families_of(cases: Sequence[Experiment], alpha: float) -> list[Family]:
    """All rows, each row, and each variable that divides the rows in another way; with their levels."""
    found = [Family([ALL_ROWS], [list(range(len(cases)))])]
    if len(cases) > 1:
        found.append(Family([case.name for case in cases], [[row] for row in range(len(cases))]))
    variables = [case.variables for case in cases]
    for name in dict.fromkeys(name for one in variables for name in one):
        cells: dict[str, list[int]] = {}
        for row, one in enumerate(variables):
            cells.setdefault(f"{name}={one[name]}" if name in one else f"no {name}", []).append(row)
        if 1 < len(cells) < len(cases) and [*cells.values()] not in [family.cells for family in found]:
            found.append(Family([*cells], [*cells.values()]))
    for family, level in zip(found, levels(len(found), alpha)):
        family.level = level
    return found


@dataclass
class Found:
    """A change of a group or a row: logarithms, and the rows as indices."""

    change: float
    low: float
    high: float
    rows: list[int]


class Tester:
    """Tests families of the rows that all runs have. `times`: [runs, rows], logarithms; the first `before` runs are
    before. `inside`: of each row, variance of its change by noise inside of runs."""

    def __init__(self, times: Array, before: int, inside: Array, freedom: int, drift: float | None) -> None:
        self.times, self.before, self.inside, self.freedom = times, before, inside, freedom
        self.estimates = min(before, len(times) - before) > 1
        self.drift = drift if drift is not None or self.estimates else USUAL_DRIFT
        self.doubt = ""
        if self.estimates and self.drift is not None:
            share = 1 / before + 1 / (len(times) - before)
            if refutes(times.mean(1), before, self.drift, self.within([*range(times.shape[1])]) / share):
                self.doubt = f"; they scatter more than the stated {100 * self.drift:g} %, which was not used"
                self.drift = None

    def within(self, cell: Sequence[int]) -> float:
        return float(self.inside[list(cell)].sum()) / len(cell) ** 2

    def test(self, family: Family) -> Test:
        cells = cell_means(self.times, family.cells)
        if self.drift is None or (self.estimates and len(family.cells) > 1):
            return test_by_runs(cells, self.before, family.level)
        inside = np.array([self.within(cell) for cell in family.cells])
        return test_by_drift(cells, self.before, family.level, self.drift, inside, self.freedom)

    def shifts(self, family: Family) -> Array:
        """By how much cells changed, the drift of the runs included."""
        cells = cell_means(self.times, family.cells)
        shift: Array = cells[self.before :].mean(0) - cells[: self.before].mean(0)
        return shift

    @property
    def source(self) -> str:
        after = len(self.times) - self.before
        runs = f"{self.before} run{'s' * (self.before > 1)} before and {after} after"
        stated = f"runs of one build that differ by {100 * (self.drift or 0):g} % (standard deviation, --drift)"
        if not self.estimates:
            return f"stated, not measured: a verdict is what exceeds {stated}; two runs a side would measure it"
        return f"estimated from {runs}" + self.doubt + (f"; of all rows stated: {stated}" if self.drift is not None else "")


def is_large(change: float, shift: float, least: float) -> bool:
    """Whether a change over the other rows is worth a verdict.

    Where many rows changed, those that did differ less from the mean of the others: half of it is enough for a row or
    group that was shifted as a whole by `least` in the same direction.
    """
    return abs(change) >= least or (2 * abs(change) >= least and abs(shift) >= least and change * shift > 0)


def strongest(tester: Tester, families: Sequence[Family], free: Sequence[int], least: float,
              done: Sequence[str]) -> tuple[Family, Test, int] | None:
    """The family whose change explains most of how the rows shifted, and the cell of it that was shifted most."""
    best: tuple[float, Family, Test, int] | None = None
    for whole in families:
        family = whole.among(free)
        if len(family.cells) < 2:
            continue
        test, shifts = tester.test(family), tester.shifts(family)
        found = [
            cell
            for cell, name in enumerate(family.names)
            if name not in done and test.strength[cell] > 1 and is_large(test.change[cell], shifts[cell], least)
        ]
        own = [len(cell) for cell in family.cells]
        # sum of squares between the rows of the cell and the others
        explained = [own[cell] * (1 - own[cell] / len(free)) * float(test.change[cell]) ** 2 for cell in found]
        if found and (best is None or max(explained) > best[0]):
            best = max(explained), family, test, max(found, key=lambda cell: abs(float(shifts[cell])))
    return best[1:] if best else None


def changed(tester: Tester, families: Sequence[Family], least: float) -> dict[str, Found]:
    """Groups and rows that changed, by name: what explains most comes first, all rows come last.

    A row that changed is left out of what follows; from the rows of a group its change is subtracted.
    """
    found: dict[str, Found] = {}
    free = list(range(tester.times.shape[1]))

    def note(name: str, test: Test, cell: int, rows: list[int]) -> float:
        change, margin = float(test.change[cell]), float(test.error[cell] * test.quantile[cell])
        found[name] = Found(change, change - margin, change + margin, rows)
        return change

    while best := strongest(tester, families[1:], free, least, [*found]):
        family, test, cell = best
        rows = family.cells[cell]
        change = note(family.names[cell], test, cell, rows)
        if len(rows) == 1:
            free.remove(rows[0])
        else:
            tester.times[tester.before :, rows] -= change
    everything = families[0].among(free)
    test = tester.test(everything)
    if test.strength[0] > 1 and abs(test.change[0]) >= least:
        note(ALL_ROWS, test, 0, free)
    return found


def first_verdict(before: Sequence[Side | None], after: Sequence[Side | None]) -> str:
    """The verdict that needs no test, or ""."""
    sides = [*before, *after]
    if any(one is not None and one.wrong for one in after):
        return "wrong result"
    if any(one is None for one in sides):
        return "not in all runs"
    samples = [len(one.samples) for one in sides if one is not None]
    if min(samples) == 0:
        return "no time"
    measures = min(len(before), len(after)) > 1
    return "too few samples" if not measures and min(samples) < LEAST_SAMPLES else ""


def change_of(name: str, before: Sequence[Sides], after: Sequence[Sides]) -> Change:
    sides = [[one.get(name) for one in runs] for runs in (before, after)]
    there = [[one for one in side if one] for side in sides]
    broken = [next((one.broken for one in side if one.broken), "") for side in there]
    return Change(
        name,
        first_verdict(*sides),
        before=there[0][0].where,
        after=there[1][0].where,
        broken={side: reason for side, reason in zip(("before", "after"), broken) if reason},
    )


def tester_of(names: Sequence[str], before: Sequence[Sides], after: Sequence[Sides], drift: float | None) -> Tester:
    samples = [[run[name].samples for name in names] for run in (*before, *after)]
    times = np.array([[math.log(median(one)) for one in run] for run in samples])
    inside = np.array([[variance_of_median(one) for one in run] for run in samples])
    count = len(before)
    change = inside[:count].sum(0) / count**2 + inside[count:].sum(0) / len(after) ** 2
    freedom = max(1, min(len(one) for run in samples for one in run) - 1)
    return Tester(times, count, change, freedom, drift)


def judge_rows(tested: list[Change], families: Sequence[Family], tester: Tester, least: float) -> list[Group]:
    """Sets what was found of each row, and returns the groups."""
    shifts = tester.shifts(Family([], [[row] for row in range(len(tested))]))
    found = changed(tester, families, least)
    for one in found.values():
        if len(one.rows) == 1:
            tester.times[tester.before :, one.rows] -= one.change
    test = tester.test(families[min(1, len(families) - 1)])  # of each row, without what was found
    for row, change in enumerate(tested):
        margin, middle = float(test.error[row] * test.quantile[row]), float(test.change[row])
        change.ratio, change.change = math.exp(float(shifts[row])), math.exp(middle)
        change.low, change.high = math.exp(middle - margin), math.exp(middle + margin)
        change.threshold = math.exp(max(least, margin))
        change.verdict = "too noisy" if change.threshold > MOST_THRESHOLD else "unchanged"
    groups = []
    for name, own in found.items():
        verdict = "slower" if own.change > 0 else "faster"
        ratio, low, high = (math.exp(end) for end in (own.change, own.low, own.high))
        if len(own.rows) > 1:
            groups.append(Group(name, verdict, ratio, low, high, [tested[row].case for row in own.rows]))
        for row in own.rows:
            change = tested[row]
            if len(own.rows) == 1:
                change.verdict, change.group = verdict, ""
                change.change, change.low, change.high = ratio, low, high
            elif change.verdict not in ("slower", "faster"):  # else its own change was said before
                change.verdict, change.group = verdict, name
    return groups


def compare(sides: Compared, min_effect: float, alpha: float, drift: float | None = None) -> Comparison:
    """`min_effect`, `drift`: as shares (0.05). A change counts that is more than noise, and min_effect at least."""
    before, after = sides.before, sides.after
    names = [list(dict.fromkeys(name for run in side for name in run)) for side in (before, after)]
    both = [name for name in names[0] if name in {*names[1]}]
    only = [[name for name in own if name not in {*other}] for own, other in zip(names, names[::-1])]
    settings = setting_differences(*([sides.cases[name] for name in side] for side in only))
    if not both:
        if settings:
            raise StudyError("the two are different experiments: " + "; ".join(settings))
        raise StudyError("the two have no row in common: program, ranks, nodes, options, inputs and key must be equal")
    changes = [change_of(name, before, after) for name in both]
    tested = [change for change in changes if not change.verdict]
    groups: list[Group] = []
    between, stated = "not asked for: no row was tested", None
    if tested:
        least = math.log1p(min_effect)
        tester = tester_of([one.case for one in tested], before, after, drift)
        between, stated = tester.source, None if tester.estimates else tester.drift
        groups = judge_rows(tested, families_of([sides.cases[one.case] for one in tested], alpha), tester, least)
    facts, grave = fact_differences(*sides.runs)
    runs = len(before), len(after)
    return Comparison(
        groups, changes, only[0], only[1], runs, between, stated, [*settings, *facts], grave
    )


def compare_files(before: Sequence[Path], after: Sequence[Path], min_effect: float, alpha: float,
                  drift: float | None) -> Comparison:
    return compare(read_sides(before, after), min_effect, alpha, drift)
