"""Which keys an indexer selects (top-k sparse attention), in float64. No gradient passes through the selection.

    I_ts = sum_j w_tj ReLU(<q_tj, k_s>)  for s <= t        S_t = the keys with the best scores I_ts

t is the position of a query in its document, s that of a key, j an index head. Scores have no unit. Of equal scores,
that of the earlier position is better. Without such a rule, two ranks or two tiles may select different keys from the
same scores.

Shapes: T tokens of one document, Q queries of its last Q tokens (Q <= T), J index heads, D elements of a head.
"""

from typing import Any

import numpy as np

NONE = -1  # in the place of a key


def index_scores(q: Any, k: Any, weights: Any) -> np.ndarray:
    """The scores I [Q, T] of one document, float64: row i is of the query at position T - Q + i.

    q [Q, J, D], k [T, D], weights [Q, J]. The score of a key after its query is -inf.
    Shapes that do not fit each other are a ValueError of numpy.
    """
    q, k, weights = (np.asarray(array, np.float64) for array in (q, k, weights))
    scores = np.einsum("tj,tjs->ts", weights, np.maximum(np.einsum("tjd,sd->tjs", q, k), 0))
    return np.where(np.tri(len(k), dtype=bool)[len(k) - len(q) :], scores, -np.inf)


def selected_keys(scores: Any, keys: int) -> np.ndarray:
    """The positions [Q, keys] of the keys that each query selects, int32, the best one first.

    scores [Q, T]: -inf, or NaN, where the query must not select the key. Where a query has fewer than `keys` other
    scores, its row ends with -1, no key. A negative number of keys is a ValueError.
    """
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :keys]
    order = np.where(np.take_along_axis(scores, order, axis=1) > -np.inf, order, NONE)
    return np.pad(order, [(0, 0), (0, keys - order.shape[1])], constant_values=NONE).astype(np.int32)


def drawn_scores(length: int, document: int = 0, seed: int = 0) -> np.ndarray:
    """The scores [length, length] that `--mask top-k,seed=SEED` draws for a document, float64.

    They are those of src/attention/masks/top_k.cpp. length: tokens of the document; document: its number in the stream,
    from 0; seed: a non-negative integer. Scores are integers from 0 to 63, so that many are equal. The score of a key
    after its query is -inf.
    """
    of_seed = _mix(np.array([seed], np.uint64))
    rows = _mix(_mix(of_seed + np.uint64(document)) + np.arange(length, dtype=np.uint64))
    levels = _mix(rows[:, None] + np.arange(length, dtype=np.uint64)) >> np.uint64(58)
    return np.where(np.tri(length, dtype=bool), levels.astype(np.float64), -np.inf)


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64, of each element of an array of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
