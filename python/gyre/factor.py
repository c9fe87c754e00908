"""The factor that all values of an array have in common with those expected.

A gather of gradients that sums over ranks where the caller expects its own slice, or the other way
round, multiplies an array by the number of ranks.
"""

import math

import numpy as np

ROUNDING, WIDEST, LARGEST = 2.0**-20, 0.1, 2**16


class CommonFactor:
    """The positive factors f for which |got - f expected| is within the tolerance of every value.

    They are an interval, which each value narrows.
    """

    def __init__(self) -> None:
        self.least, self.most, self.values = 0.0, math.inf, 0

    def add(self, got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> None:
        """Narrows the factors by values of a floating-point type."""
        if got.size == 0 or not self.least <= self.most:
            return
        with np.errstate(all="ignore"):
            slack = np.maximum(tolerance, ROUNDING * np.abs(got))
            ends = np.stack([(got - slack) / expected, (got + slack) / expected])
            open_to_all = (expected == 0) & (np.abs(got) <= slack)
            open_to_all |= (got == expected) & np.isinf(got)
            ends = ends[:, ~open_to_all]
            if np.isnan(ends).any():
                self.most = -1.0
                return
            self.least = float(max(self.least, ends.min(axis=0).max(initial=0)))
            self.most = float(min(self.most, ends.max(axis=0).min(initial=np.inf)))
        self.values += ends.shape[1]

    def hint(self) -> str:
        """"differs by a factor 2: gather convention?", or nothing.

        One whole number of at least 2, or its inverse, is a factor of all values, and at least two
        values leave no other.
        """
        narrow = 0 < self.least <= self.most <= min(LARGEST, (1 + WIDEST) * self.least)
        if self.values < 2 or not narrow:
            return ""
        for text, first, last in (
            ("", self.least, self.most),
            ("1/", 1 / self.most, 1 / self.least),
        ):
            if math.ceil(first) == math.floor(last) and 2 <= math.ceil(first) <= LARGEST:
                return f"differs by a factor {text}{math.ceil(first)}: gather convention?"
        return ""
