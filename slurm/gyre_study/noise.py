"""Statistics of comparisons: by how much one set of times differs from another, and whether that is more than noise."""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median, quantiles

LEAST_SAMPLES = (
    6  # of each side: the run rules ask for as many; with fewer, p-values are not small enough
)
MOST_SIGNED = 60  # values up to which signed ranks are counted and not approximated
MOST_EXACT = 20  # samples of the smaller side, up to which ranks are counted and not approximated
LEAST_CASES = 8  # from which on the scatter of the cases says how far two runs of one build differ


@lru_cache(maxsize=None)
def ways(n: int, m: int, u: int) -> int:
    """Orders of n and m samples in which the rank sum U is u."""
    if u < 0 or u > n * m:
        return 0
    if n == 0 or m == 0:
        return int(u == 0)
    return ways(n - 1, m, u - m) + ways(n, m - 1, u)


def spread_of_u(n: int, m: int, pooled: Sequence[float]) -> float:
    """Standard deviation of U, corrected for ties."""
    total = n + m
    ties = sum(count**3 - count for count in (pooled.count(value) for value in set(pooled)))
    return math.sqrt(n * m / 12 * (total + 1 - ties / (total * (total - 1))))


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Mann and Whitney's test, two-sided: exact for few samples without ties, else by the normal distribution."""
    n, m = len(a), len(b)
    u = sum((x < y) + 0.5 * (x == y) for x in a for y in b)
    pooled = [*a, *b]
    low = min(u, n * m - u)
    if len(set(pooled)) == n + m and min(n, m) <= MOST_EXACT and n + m <= 2 * MOST_EXACT:
        return min(1.0, 2 * sum(ways(n, m, k) for k in range(int(low) + 1)) / math.comb(n + m, n))
    spread = spread_of_u(n, m, pooled)
    if spread == 0:
        return 1.0
    return min(1.0, 2 * NormalDist().cdf((low + 0.5 - n * m / 2) / spread))


def ratio_interval(
    before: Sequence[float], after: Sequence[float], alpha: float
) -> tuple[float, float, float]:
    """after / before as Hodges and Lehmann estimate it, and its confidence interval of level 1 - alpha.

    The estimate is the median of all ratios of a sample and a sample; the interval lies between two of these, by the
    normal approximation of the rank sum.
    """
    logs = sorted(math.log(y / x) for x in before for y in after)
    n, m = len(before), len(after)
    outside = n * m / 2 - NormalDist().inv_cdf(1 - alpha / 2) * spread_of_u(n, m, [*before, *after])
    k = max(0, math.floor(outside))
    return math.exp(median(logs)), math.exp(logs[k]), math.exp(logs[len(logs) - 1 - k])


def lowest_rank_sums(count: int, alpha: float) -> int:
    """The largest k with P(W <= k) <= alpha / 2, of Wilcoxon's W over signs of `count` ranks; -1: there is none."""
    if count > MOST_SIGNED:
        spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return math.floor(count * (count + 1) / 4 + NormalDist().inv_cdf(alpha / 2) * spread) - 1
    orders = [1] + [0] * (count * (count + 1) // 2)  # signs with each rank sum
    for rank in range(1, count + 1):
        for total in range(len(orders) - 1, rank - 1, -1):
            orders[total] += orders[total - rank]
    largest, outside = -1, 2 * orders[0]
    while outside <= alpha * 2**count:
        largest += 1
        outside += 2 * orders[largest + 1]
    return largest


def median_interval(values: Sequence[float], alpha: float) -> tuple[float, float] | None:
    """Confidence interval of level 1 - alpha of the centre of a symmetric distribution; None: too few values.

    By Wilcoxon's signed-rank test: between two of the means of a value and a value.
    """
    count = len(values)
    inside = lowest_rank_sums(count, alpha)
    means = sorted((values[i] + values[j]) / 2 for i in range(count) for j in range(i + 1))
    return (means[inside], means[-1 - inside]) if inside >= 0 else None


def holm(values: Sequence[float]) -> list[float]:
    """p-values, corrected for their number after Holm: the chance of any false alarm among them."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected, largest = [1.0] * len(values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, values[index] * (len(values) - place)))
        corrected[index] = largest
    return corrected


def spread(samples: Sequence[float]) -> float:
    """Standard deviation of most logarithms, from the distance of the quartiles; at least 0.1 %."""
    logs = sorted(math.log(sample) for sample in samples)
    low, _, high = quantiles(logs, n=4, method="inclusive")
    return max(1e-3, (high - low) / (2 * NormalDist().inv_cdf(0.75)))


def scatter(values: Sequence[float]) -> float:
    """Standard deviation of most values: from the shortest interval that holds half of them.

    Up to half of the cases may have changed by any amount without widening it. 0 with too few values.
    """
    count = len(values)
    if count < LEAST_CASES:
        return 0.0
    ordered, half = sorted(values), count // 2 + 1
    shortest = min(ordered[i + half - 1] - ordered[i] for i in range(count - half + 1))
    return (
        shortest / (2 * NormalDist().inv_cdf(0.75)) * (1 + 5 / count)
    )  # small sets make the interval too short
