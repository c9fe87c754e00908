"""Importance ratios of two sets of log-probabilities, a trainer's and a rollout's.

The ratio of a token is exp(trainer - rollout). Were both computed by one function, every ratio would
be 1: what is left of it is kernels, types, filters and weights that differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .arrays import to_numpy

EDGES = (0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2, math.inf)
SLACK = 1e-3  # above 0: rounding of a log-probability near 0


@dataclass(frozen=True)
class RatioStatistics:
    """Ratios of some tokens. `impossible`: tokens that the rollout says it cannot have sampled.

    `k1` is the mean of rollout - trainer, `k3` that of ratio - 1 - log ratio: estimates of the
    Kullback-Leibler divergence of the trainer from the rollout. `sequence` is exp of the mean log
    ratio, the ratio of a whole sequence per token.
    """

    tokens: int
    mean: float
    least: float
    most: float
    deviation: float
    k1: float
    k3: float
    sequence: float
    clipped_below: float
    clipped_above: float
    impossible: int


@dataclass(frozen=True)
class Ratios:
    """The report: of all tokens, of each document, and how many ratios are between two edges."""

    all: RatioStatistics
    documents: tuple[RatioStatistics, ...]
    clip: tuple[float, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __str__(self) -> str:
        lines = [_row("tokens of", _HEAD)]
        lines += [_row(f"document {i}", _cells(s)) for i, s in enumerate(self.documents)]
        lines.append(_row("all", _cells(self.all)))
        low, high = self.clip
        lines.append(f"clipped below {1 - low:g} and above {1 + high:g}: shares of the tokens")
        lines.append("ratio from      to    tokens")
        for begin, end, count in zip(self.edges, self.edges[1:], self.counts):
            lines.append(f"{begin:10g} {end:7g} {count:9d}")
        if self.all.impossible:
            lines.append(
                f"{self.all.impossible} tokens have a log-probability of -inf in the rollout, "
                "which then cannot have sampled them; they are in no figure"
            )
        return "\n".join(lines)


_HEAD = ("count", "mean", "least", "most", "deviation", "k1", "k3", "sequence", "below", "above")


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:14}" + "".join(f" {cell:>11}" for cell in cells)


def _cells(s: RatioStatistics) -> list[str]:
    reals = (s.mean, s.least, s.most, s.deviation, s.k1, s.k3, s.sequence)
    shares = (s.clipped_below, s.clipped_above)
    return [str(s.tokens), *(f"{x:.5g}" for x in reals), *(f"{x:.4f}" for x in shares)]


def _statistics(log_ratio: np.ndarray, impossible: int, clip: tuple[float, float]) -> RatioStatistics:
    """Statistics of tokens with a finite rollout; a trainer's -inf is a ratio of 0."""
    if log_ratio.size == 0:
        nothing = [math.nan] * 9
        return RatioStatistics(0, *nothing, impossible)
    low, high = clip
    with np.errstate(all="ignore"):  # a ratio, or a sum of ratios, beyond float64 is inf
        ratio = np.exp(log_ratio)
        return RatioStatistics(
            tokens=int(ratio.size),
            mean=float(ratio.mean()),
            least=float(ratio.min()),
            most=float(ratio.max()),
            deviation=float(ratio.std()) if np.isfinite(ratio).all() else math.inf,
            k1=float(-log_ratio.mean()),
            k3=float((ratio - 1 - log_ratio).mean()),
            sequence=float(np.exp(log_ratio.mean())),
            clipped_below=float((ratio < 1 - low).mean()),
            clipped_above=float((ratio > 1 + high).mean()),
            impossible=impossible,
        )


def _logprobs(side: str, value: Any) -> np.ndarray:
    array = to_numpy(value).astype(np.float64)
    if array.ndim not in (1, 2):
        raise ValueError(f"{side} has {array.ndim} extents; log-probabilities are [T] or [documents, T]")
    return array


def _check_values(side: str, array: np.ndarray, counts: np.ndarray) -> None:
    """Refuses what is no log-probability; what does not count may be anything."""
    for what, wrong in (("NaN", np.isnan(array)), (f"above {SLACK}", array > SLACK)):
        if (counts & wrong).any():
            place = np.argwhere(counts & wrong)[0].tolist()
            raise ValueError(f"{side}{place} is {array[tuple(place)]}; a log-probability is not {what}")


def _counting(shape: tuple[int, ...], lengths: np.ndarray | None, mask: Any) -> np.ndarray:
    """Which elements are tokens: the first of each row of [documents, T], and those of the mask."""
    counts = np.ones(shape, dtype=bool)
    if lengths is not None and len(shape) == 2:
        # A document of n tokens has n - 1 next tokens.
        longest = int(lengths.max(initial=0))
        if shape[1] < longest - 1:
            raise ValueError(
                f"rows have {shape[1]} elements; the longest document has {longest} tokens, or {longest - 1} next ones"
            )
        own = lengths - (1 if shape[1] == longest - 1 else 0)
        counts &= np.arange(shape[1]) < own[:, None]
    if mask is not None:
        array = to_numpy(mask)
        if array.shape != shape:
            raise ValueError(f"the mask is {list(array.shape)}, and the log-probabilities {list(shape)}")
        counts &= array != 0
    return counts


def importance_ratios(
    trainer: Any,
    rollout: Any,
    *,
    offsets: Any = None,
    mask: Any = None,
    clip: tuple[float, float] = (0.2, 0.2),
    edges: Sequence[float] = EDGES,
) -> Ratios:
    """Ratios exp(trainer - rollout) of log-probabilities [T], or [documents, T].

    offsets [documents + 1]: document i of [T] is offsets[i] to offsets[i + 1] - 1; rows of
    [documents, T] hold its tokens first, or its tokens but one, of next tokens. mask, of the same
    shape: where it is 0, nothing counts, and values may be anything; so it is behind the tokens of a
    row. clip: how far below and above 1 an objective clips.
    ValueError, TypeError name the array, the place and the value.
    """
    a, b = _logprobs("trainer", trainer), _logprobs("rollout", rollout)
    if a.shape != b.shape:
        raise ValueError(f"trainer is {list(a.shape)}, and rollout {list(b.shape)}")
    if not all(0 <= x < math.inf for x in clip) or clip[0] > 1:
        raise ValueError(f"clip is {clip}; it is from 0 to 1 below 1, and 0 or more above it")
    bounds = None
    if offsets is not None:
        bounds = checks.offsets("offsets", offsets, len(a) if a.ndim == 1 else None, "the number of tokens")
        if a.ndim == 2 and len(bounds) - 1 != len(a):
            raise ValueError(f"offsets are of {len(bounds) - 1} documents; there are {len(a)} rows")
    counts = _counting(a.shape, None if bounds is None else np.diff(bounds), mask)
    for side, array in (("trainer", a), ("rollout", b)):
        _check_values(side, array, counts)
    possible = counts & np.isfinite(b)
    if not possible.any():
        raise ValueError("no token counts: nothing was compared")
    with np.errstate(invalid="ignore"):
        log_ratio = a - b

    def some(where: Any) -> RatioStatistics:
        mine = possible[where]
        return _statistics(log_ratio[where][mine], int((counts[where] & ~mine).sum()), clip)

    if a.ndim == 2:
        documents = [some(row) for row in range(len(a))]
    elif bounds is not None:
        documents = [some(slice(begin, end)) for begin, end in zip(bounds, bounds[1:])]
    else:
        documents = []
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio[possible])
    # A histogram's last interval is closed; no ratio is above inf.
    counted, _ = np.histogram(ratio, bins=np.asarray(edges, dtype=np.float64))
    return Ratios(some(...), tuple(documents), clip, tuple(edges), tuple(map(int, counted)))
