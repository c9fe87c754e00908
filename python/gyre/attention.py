"""Attention problems: what a file of the kind gyre/attention holds, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .arrays import is_bfloat16

ROWS = "[tokens, heads, elements], all documents one after another; offsets says where each begins"
MASKS = ("causal", "full")


@dataclass(frozen=True)
class AttentionProblem:
    """Checked inputs, with defaults filled in; `arrays` has sinks only when they were given.

    `bfloat16` names the arrays that were of that type.
    """

    arrays: dict[str, np.ndarray]
    bfloat16: frozenset[str]
    mask: str
    window: int
    scale: float


def attention_problem(
    *,
    q: Any,
    k: Any,
    v: Any,
    d_out: Any = None,
    sinks: Any = None,
    offsets: Any = None,
    mask: str = "causal",
    window: int = 0,
    scale: float | None = None,
) -> AttentionProblem:
    """Checks the inputs. T tokens, H query heads, K KV heads, D elements of a head.

    q, d_out [T, H, D]; k, v [T, K, D]; H is a multiple of K, query head h reads KV head h K / H.
    d_out: gradient of the output; without, 1. sinks [H]: a logit of each head without key or value.
    offsets [documents + 1]: without, all rows are one document. mask: causal or full. window: a
    causal query sees that many positions, its own the last; 0: all. scale: of scores; without,
    1 / sqrt(D). Reals are finite float16, bfloat16, float32 or float64.

    ValueError and TypeError name the array, the place, the value, and what would be right.
    """
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "sinks": sinks}
    bfloat16 = frozenset(name for name, value in given.items() if is_bfloat16(value))
    queries = checks.reals("q", q, None, None, None, hint=ROWS)
    tokens, heads, width = queries.shape
    checks.size("the number of heads of q", heads, 1)
    checks.size("the number of elements of a head", width, 1)
    keys = checks.reals("k", k, tokens, None, width, hint=ROWS)
    kv_heads = keys.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; heads must be a multiple of those")
    gradient = np.ones(queries.shape, np.float32) if d_out is None else d_out
    arrays = {
        "q": queries,
        "k": keys,
        "v": checks.reals("v", v, *keys.shape, hint=ROWS),
        "d_out": checks.reals("d_out", gradient, *queries.shape, hint=ROWS),
    }
    if sinks is not None:
        arrays["sinks"] = checks.reals("sinks", sinks, heads)
    for name, array in arrays.items():
        checks.finite(name, array)
    bounds = [0, tokens] if offsets is None else offsets
    arrays["offsets"] = checks.offsets("offsets", bounds, tokens, "the rows of q")
    if mask not in MASKS:
        raise ValueError(f"mask is {mask!r}; it must be causal or full")
    window = checks.size("window", window)
    if mask == "full" and window > 0:
        raise ValueError(f"window is {window}, but only a causal mask has one; it must be 0")
    scale = checks.positive("scale", width**-0.5 if scale is None else scale)
    return AttentionProblem(arrays, bfloat16, mask, window, scale)


def check_reference(
    problem: AttentionProblem, reference: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The arrays of a reference, as a file holds them: any of those below, finite."""
    queries, keys = problem.arrays["q"].shape, problem.arrays["k"].shape
    shapes = {"out": queries, "lse": queries[:2], "d_q": queries, "d_k": keys, "d_v": keys}
    shapes["d_sinks"] = queries[1:2]
    if "d_sinks" in reference and "sinks" not in problem.arrays:
        raise ValueError("reference['d_sinks'] needs sinks, which were not given")
    arrays = {}
    for name, value in reference.items():
        label = f"reference[{name!r}]"
        array = checks.answer(label, value, *shapes[checks.known(name, shapes)])
        arrays[name] = checks.finite(label, array)
    return arrays
