"""Known errors of one rank alone: hypotheses about everyone, in the rank's part of the arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from .contract import Arrays, Hypothesis, Tolerance, factors

Masks = Mapping[str, np.ndarray | None]  # of each array, the elements that are a rank's; None: ranks share it


def on_one_rank(
    parts: Iterable[tuple[str, Callable[[str], np.ndarray | None]]],
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    errors: Callable[[], Iterable[Hypothesis]],
    known: Mapping[str, int],
    tolerance: Tolerance,
) -> Iterator[Hypothesis]:
    """Hypotheses for the one rank that all wrong elements are of. parts: what a rank is called, and its elements of an
    array, as a mask that can be broadcast; known: sizes that a factor may be.

    Of an array that ranks share (None) a rank's error leaves no trace; an error that changes an array of which the rank
    has nothing is not the rank's.
    """
    wrong = {n: tolerance.wrong(n, np.asarray(got[n]), np.asarray(expected[n])) for n in failing}
    for text, mask_of in parts:
        masks: dict[str, np.ndarray | None] = {}
        for n in got.keys() & expected.keys():
            mask = mask_of(n)
            masks[n] = None if mask is None else np.broadcast_to(mask, np.shape(expected[n]))
        if not all(_has_all(masks[n], wrong[n]) for n in failing):
            continue

        def mixed(error: Hypothesis, masks: Masks, is_part: bool = False) -> dict[str, np.ndarray]:
            found = {}
            for n, array in error.arrays().items():
                mask = masks.get(n)
                if mask is not None and not mask.any():
                    found[n] = np.asarray(array)
                elif mask is not None:
                    found[n] = np.array(expected[n], np.result_type(np.asarray(expected[n]), np.asarray(array)))
                    found[n][mask] = array if is_part else np.asarray(array)[mask]
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


def _has_all(mask: np.ndarray | None, wrong: np.ndarray) -> bool:
    """Whether a mask selects something, and all wrong elements."""
    return mask is not None and bool(mask.any()) and not (wrong & ~mask).any()
