"""Attention as defined, forward and backward, in float64: serial, head by head, never tuned.

For query row i of head h over the keys j that it sees, with sink z_h if there are sinks (otherwise
its term is missing):

    x_ij = scale <q_i, k_j>          L_i = log(sum_j exp(x_ij) + exp(z_h))
    p_ij = exp(x_ij - L_i)           O_i = sum_j p_ij v_j           delta_i = <O_i, dO_i>
    dv_j = sum_i p_ij dO_i           ds_ij = p_ij (<dO_i, v_j> - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i
    dz_h = - sum_i exp(z_h - L_i) delta_i
"""

from itertools import pairwise
from typing import Any

import numpy as np

from ..attention import attention_problem, selection, shown, split_gradient, whole_keys


def visible(
    length: int, mask: str = "causal", window: int = 0, regions: np.ndarray | None = None
) -> np.ndarray:
    """[length, length] booleans: whether the query at position i sees the key at position j.

    regions: those of this document, as gyre.attention_problem has them.
    """
    if regions is not None:
        return np.any([np.zeros((length, length), bool), *(shown(r, length) for r in regions)], axis=0)
    i, j = np.ogrid[:length, :length]
    if mask == "full":
        return np.ones((length, length), dtype=bool)
    return (j <= i) & ((j > i - window) | (window == 0))


def attention(**inputs: Any) -> dict[str, np.ndarray]:
    """out [T, H, E], lse [T, H], d_q [T, H, D], d_k [T, K, D], d_v [T, K, E], with sinks d_sinks [H].

    With k_shared, d_k is [T, K, D - R] and d_k_shared [T, R], the sum over all heads. With query_offsets,
    out, lse and d_q have rows of queries alone. The inputs are those of gyre.write_attention. A token sees tokens of its own document only.
    """
    problem = attention_problem(**inputs)
    arrays = {name: array.astype(np.float64) for name, array in problem.arrays.items()}
    q, v, d_out = (arrays[name] for name in ("q", "v", "d_out"))
    k = whole_keys(arrays)
    queries, heads, _ = q.shape
    group = heads // k.shape[1]
    sinks = arrays.get("sinks", np.full(heads, -np.inf))
    out, lse, d_sinks = np.zeros(d_out.shape), np.zeros((queries, heads)), np.zeros(heads)
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    offsets = problem.arrays["offsets"]
    table = problem.arrays.get("regions")
    bounds = zip(pairwise(offsets), pairwise(problem.arrays.get("query_offsets", offsets)))
    for document, ((begin, end), (first, last)) in enumerate(bounds):
        regions = None if table is None else table[table[:, 0] == document]
        seen = visible(end - begin, problem.mask, problem.window, regions)[end - begin - (last - first) :]
        if problem.mask == "selected":
            seen = selection(problem.arrays["selected_keys"][first:last], end - begin)
        for head in range(heads if last > first else 0):
            mine, shared = (slice(first, last), head), (slice(begin, end), head // group)
            x = problem.scale * (q[mine] @ k[shared].T)
            x[~seen] = -np.inf
            top = np.maximum(x.max(axis=1), sinks[head])
            top[top == -np.inf] = 0  # a query that sees nothing, without a sink
            total = np.exp(x - top[:, None]).sum(axis=1) + np.exp(sinks[head] - top)
            with np.errstate(divide="ignore"):
                lse[mine] = top + np.log(total)
            p = np.where(x == -np.inf, 0, np.exp(x - np.maximum(lse[mine], -1e300)[:, None]))
            out[mine] = p @ v[shared]
            delta = (out[mine] * d_out[mine]).sum(axis=1)
            d_x = p * (d_out[mine] @ v[shared].T - delta[:, None])
            d_q[mine] = problem.scale * (d_x @ k[shared])
            d_k[shared] += problem.scale * (d_x.T @ q[mine])
            d_v[shared] += p.T @ d_out[mine]
            if "sinks" in arrays:
                d_sinks[head] -= (np.exp(sinks[head] - lse[mine]) * delta).sum()
    answers = {"out": out, "lse": lse, "d_q": d_q, "d_v": d_v} | split_gradient(d_k, arrays["k"].shape[2])
    return answers | ({"d_sinks": d_sinks} if "sinks" in arrays else {})
