"""Which keys an indexer selects (top-k sparse attention), in float64. No gradient passes through the selection.

    I_ts = sum_j w_tj ReLU(<q_tj, k_s>)  for s <= t        S_t = the k best keys of query t

Equal scores are in order of positions, the first one first. Without an order two partitions of the same sums over ranks
or tiles select other keys.
"""

from typing import Any

import numpy as np

NONE = -1  # in the place of a key


def index_scores(q: Any, k: Any, weights: Any) -> np.ndarray:
    """I [T, T] of one document, -inf for keys after the query. q [T, J, D] of J index heads, k [T, D], weights [T, J]."""
    q, k, weights = (np.asarray(array, np.float64) for array in (q, k, weights))
    scores = np.einsum("tj,tjs->ts", weights, np.maximum(np.einsum("tjd,sd->tjs", q, k), 0))
    return np.where(np.tri(len(k), dtype=bool)[len(k) - len(q) :], scores, -np.inf)


def selected_keys(scores: Any, keys: int) -> np.ndarray:
    """[Q, keys] int32: of each row of scores [Q, T] the best keys, the best one first; -1 where no finite score is left."""
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :keys]
    order = np.where(np.take_along_axis(scores, order, axis=1) > -np.inf, order, NONE)
    return np.pad(order, [(0, 0), (0, keys - order.shape[1])], constant_values=NONE).astype(np.int32)


def drawn_scores(length: int, document: int = 0, seed: int = 0) -> np.ndarray:
    """[length, length] scores, those of `--mask top-k,seed=SEED` (src/attention/masks/top_k.cpp); -inf after the query."""
    of_seed = _mix(np.array([seed], np.uint64))
    rows = _mix(_mix(of_seed + np.uint64(document)) + np.arange(length, dtype=np.uint64))
    levels = _mix(rows[:, None] + np.arange(length, dtype=np.uint64)) >> np.uint64(58)
    return np.where(np.tri(length, dtype=bool), levels.astype(np.float64), -np.inf)


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64, of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
