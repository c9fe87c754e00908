"""Known errors of one rank alone: hypotheses about everyone, in the rank's part of the arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from .contract import Arrays, Hypothesis, factors

Masks = Mapping[str, np.ndarray]  # of each array, the elements that are a rank's
SLACK = 1e-3  # of a difference that counts: a right rank has roundings alone


def is_wrong(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    if expected.dtype.kind in "iub":
        return got != expected
    finite = np.abs(expected[np.isfinite(expected)])
    return ~np.isclose(got, expected, rtol=SLACK, atol=SLACK * float(finite.max(initial=0)))


def on_one_rank(
    parts: Iterable[tuple[str, Callable[[str], np.ndarray]]],
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    errors: Callable[[], Iterable[Hypothesis]],
    known: Mapping[str, int],
) -> Iterator[Hypothesis]:
    """Hypotheses for the one rank that all wrong elements are of. parts: what a rank is called, and its elements of an
    array, as a mask that can be broadcast; known: sizes that a factor may be."""
    wrong = {n: is_wrong(np.asarray(got[n]), np.asarray(expected[n])) for n in failing}
    for text, mask_of in parts:
        masks = {n: np.broadcast_to(mask_of(n), np.shape(expected[n])) for n in got.keys() & expected.keys()}
        if any((wrong[n] & ~masks[n]).any() for n in failing):
            continue

        def mixed(error: Hypothesis, masks: Masks, is_part: bool = False) -> dict[str, np.ndarray]:
            found = {}
            for n, array in error.arrays().items():
                if n in masks:
                    found[n] = np.array(expected[n], np.result_type(np.asarray(expected[n]), np.asarray(array)))
                    found[n][masks[n]] = array if is_part else np.asarray(array)[masks[n]]
            return found

        part = [{n: np.asarray(a[n])[masks[n]] for n in failing} for a in (got, expected)]
        found = list(factors(*part, failing, known))
        named = [error for error in found if error.kind.endswith(tuple(known))] if known else []
        for error in named:
            yield Hypothesis(error.kind, f"{error.text}, {text}", partial(mixed, error, masks, True))
        for error in errors():
            yield Hypothesis(error.kind, f"{error.text}; {text} alone", partial(mixed, error, masks))
        for error in (error for error in found if error not in named):
            yield Hypothesis(error.kind, f"{error.text}, {text}", partial(mixed, error, masks, True))
