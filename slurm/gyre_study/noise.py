"""Statistics of comparisons: what is more than the noise between runs of one build.

Model. The logarithm of a row's time in a run is

    level of the row + change of the row (runs after only) + drift of the run, common to its rows + noise of the row

The drift is normal, of any size; the noise is normal and independent between runs. Rows may differ in their noise, and
rows of one run may share some of it. Both are estimated from the runs, never from the spread of changes over the rows:
a change of half of the rows is not taken for noise.

A *family* divides the rows into cells: all rows as one cell; each row a cell; the values of a variable (pass, schedule),
a cell each. A cell's time in a run is the mean of its rows. What is tested is

    one cell       its mean after minus its mean before
    several cells  the same of a cell minus the mean of the others: the drift of the run cancels

Each is one number a run, so that Student's two-sample test is exact, with as many degrees of freedom as there are runs,
less two. Six runs leave four, whose quantiles are large where many cells are tested; cells of one family therefore lend
each other degrees of freedom, as many as their variances agree (moderated variances: Smyth 2004, Statistical
Applications in Genetics and Molecular Biology 3:3), estimated cautiously.

Multiplicity. A half of alpha goes to all rows, the other half in equal parts to the other families, each part in equal
parts to its cells (Bonferroni): alpha bounds the chance of any false alarm of a comparison.

With fewer than two runs on a side nothing is known of the spread between runs. Then it is stated: the standard deviation
of a run, of any cell, is `drift`; the noise inside of a run comes from its samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
LEAST_SAMPLES = 6  # of a run, where noise inside of a run is estimated: the run rules ask for as many
LEAST_CELLS = 5  # from which on cells lend each other degrees of freedom
MOST_FREEDOM = 400
SURE = 0.999  # level at which runs refute a stated drift


def tail(t: float, freedom: int) -> float:
    """Student's chance of more than t in either direction (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


@lru_cache(maxsize=None)
def t_quantile(chance: float, freedom: int) -> float:
    """The t that is exceeded in either direction with this chance; 0 degrees of freedom: as if they were without end."""
    if freedom == 0 or freedom > MOST_FREEDOM:
        return NormalDist().inv_cdf(1 - chance / 2)
    low, high = 0.0, 1.0
    while tail(high, freedom) > chance:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > chance else (low, middle)
    return high


def quantiles(chance: float, freedom: Array) -> Array:
    """t_quantile of each; degrees of freedom are rounded down."""
    whole = np.clip(np.floor(freedom), 1, MOST_FREEDOM).astype(int)
    different, places = np.unique(whole, return_inverse=True)
    table: Array = np.array([t_quantile(chance, one) for one in different.tolist()])[places]
    return table.reshape(whole.shape)


def polygamma(order: int, x: Array) -> Array:
    """Digamma (0) and trigamma (1) of x > 0: recurrence up to 6, then the asymptotic series."""
    x = np.array(x, float)
    total = np.zeros_like(x)
    for _ in range(6):
        total += 1 / x**2 if order else -1 / x
        x += 1
    if order:
        return total + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)
    return total + np.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


HALVES = np.exp(np.linspace(math.log(0.05), math.log(MOST_FREEDOM / 2), 400))
TRIGAMMAS = polygamma(1, HALVES)


def moderated(variances: Array, freedom: int) -> tuple[Array, Array]:
    """Variances of the cells of a family, [..., cells], drawn to what they have in common, and degrees of freedom.

    Logarithms of equal variances scatter by trigamma(freedom / 2); what they scatter more says how different the true
    ones are. One standard error is added to it.
    """
    cells = variances.shape[-1]
    if cells < LEAST_CELLS:
        return variances, np.full(variances.shape, float(freedom))
    half = np.array(freedom / 2)
    logs = np.log(np.maximum(variances, 1e-30)) - polygamma(0, half) + math.log(half)
    scatter = logs.var(-1, ddof=1, keepdims=True) * (1 + math.sqrt(2 / (cells - 1)))
    excess = np.maximum(scatter - polygamma(1, half), TRIGAMMAS[-1])
    prior = 2 * np.interp(-np.log(excess), -np.log(TRIGAMMAS), HALVES)
    centre = np.exp(logs.mean(-1, keepdims=True) + polygamma(0, prior / 2) - np.log(prior / 2))
    both = np.minimum(prior + freedom, freedom * (cells - 1))
    return (prior * centre + freedom * variances) / (prior + freedom), np.broadcast_to(both, variances.shape)


@dataclass
class Test:
    """Of each cell, [..., cells]: estimated change of the logarithm, its standard error, and the quantile of the test."""

    change: Array
    error: Array
    quantile: Array

    @property
    def strength(self) -> Array:
        """Beyond 1: more than noise."""
        return np.abs(self.change) / np.maximum(self.error * self.quantile, 1e-12)


def contrasts(cells: Array) -> Array:
    """Each cell minus the mean of the others, [..., cells]; of one cell, itself."""
    count = cells.shape[-1]
    if count == 1:
        return cells
    return (cells - cells.mean(-1, keepdims=True)) * count / (count - 1)


def tests_in(cells: int) -> int:
    """Two cells are one contrast."""
    return 1 if cells == 2 else cells


def test_by_runs(cells: Array, before: int, level: float) -> Test:
    """`cells`: [..., runs, cells], logarithms; the first `before` runs are before. Two runs a side at least."""
    values = contrasts(cells)
    sides = values[..., :before, :], values[..., before:, :]
    means = [side.mean(-2) for side in sides]
    freedom = cells.shape[-2] - 2
    squares = sum(((side - mean[..., None, :]) ** 2).sum(-2) for side, mean in zip(sides, means))
    variance, left = moderated(squares / freedom, freedom)
    share = 1 / before + 1 / (cells.shape[-2] - before)
    return Test(
        means[1] - means[0], np.sqrt(variance * share), quantiles(level / tests_in(cells.shape[-1]), left)
    )


def test_by_drift(cells: Array, before: int, level: float, drift: float, inside: Array, freedom: int) -> Test:
    """`drift`: standard deviation of a run. `inside`: [cells], variance of a cell's change by noise inside of runs, with
    `freedom` degrees."""
    count, runs = cells.shape[-1], cells.shape[-2]
    values = contrasts(cells)
    change = values[..., before:, :].mean(-2) - values[..., :before, :].mean(-2)
    between = drift**2 * (1 / before + 1 / (runs - before))
    if count > 1:
        between *= count / (count - 1)
        inside = inside + (inside.sum() - inside) / (count - 1) ** 2
    total = np.maximum(between + inside, 1e-12)
    left = np.minimum(freedom * (total / np.maximum(inside, 1e-15)) ** 2, MOST_FREEDOM)  # Welch and Satterthwaite
    return Test(change, np.sqrt(total), quantiles(level / tests_in(count), left))


def refutes(cell: Array, before: int, drift: float, inside: float) -> bool:
    """Whether runs, [runs] of one cell, scatter more than the stated drift allows (chi square, Wilson and Hilferty)."""
    sides = cell[:before], cell[before:]
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    freedom = len(cell) - 2
    share = 2 / (9 * freedom)
    most = freedom * (1 - share + NormalDist().inv_cdf(SURE) * math.sqrt(share)) ** 3
    return squares > most * (drift**2 + inside)


def variance_of_median(samples: Sequence[float]) -> float:
    """Of the median of logarithms: pi / 2 of that of their mean."""
    logs = np.log(np.array(samples))
    return float(logs.var(ddof=1)) / len(logs) * math.pi / 2 if len(logs) > 1 else 0.0


def levels(families: int, alpha: float) -> list[float]:
    """Levels of all rows, which come first, and of the other families."""
    return [alpha] if families == 1 else [alpha / 2] + [alpha / 2 / (families - 1)] * (families - 1)


def cell_means(rows: Array, cells: Sequence[Sequence[int]]) -> Array:
    """[..., rows] -> [..., cells]; each cell: the indices of its rows."""
    shares = np.zeros((rows.shape[-1], len(cells)))
    for place, cell in enumerate(cells):
        shares[list(cell), place] = 1 / len(cell)
    means: Array = rows @ shares
    return means
