"""Attention problems: what a file of the kind gyre/attention holds, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .arrays import is_bfloat16

ROWS = "[tokens, heads, elements], all documents one after another; offsets says where each begins"
ANSWERS = ("out", "lse", "d_q", "d_k", "d_v", "d_sinks", "d_k_shared")
MASKS = ("causal", "full", "regions", "selected")
REGION = "[regions, 7]: document, q_begin, q_end, k_begin, k_end, kind, window"


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
    k_shared: Any = None,
    offsets: Any = None,
    query_offsets: Any = None,
    mask: str = "causal",
    window: int = 0,
    scale: float | None = None,
    regions: Any = None,
    selected_keys: Any = None,
) -> AttentionProblem:
    """Checks the inputs. T tokens, H query heads, K KV heads, D elements of a head of queries and
    keys, E of a head of values and of the output, which is D in most models.

    q [T, H, D]; k [T, K, D]; v [T, K, E]; H is a multiple of K, query head h reads KV head h K / H.
    k_shared [T, R]: the last R elements of every head of keys (the rotary part of multi-head latent
    attention); k is then [T, K, D - R].
    d_out [T, H, E]: gradient of the output; without, 1. sinks [H]: a logit of each head without key or value.
    offsets [documents + 1]: without, all rows are one document. query_offsets [documents + 1]: the
    last tokens of each document alone have queries (chunked prefill, decoding), and q and d_out rows
    for them: [Q, H, D], [Q, H, E]; without, every token has one. mask: causal, full, regions or
    selected. window: a causal query sees that many positions, its own the last; 0: all. scale: of scores;
    without, 1 / sqrt(D). Reals are finite float16, bfloat16, float32 or float64.
    regions [regions, 7], with mask regions: document, q_begin, q_end, k_begin, k_end, kind, window.
    Of the kinds, 0 shows all pairs of the queries and keys, 1 (causal) cuts off what is behind the
    diagonal through the last of both, 2 (inverse) what is before the one through the first of both,
    3 both; a window is of kinds 1 and 3. No pair may be in two regions.
    selected_keys [Q, k], with mask selected: positions in its document of the keys that each query sees,
    up to its own position; -1, no key, comes last. gyre.reference.selected_keys makes them of scores.

    ValueError and TypeError name the array, the place, the value, and what would be right.
    """
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "sinks": sinks, "k_shared": k_shared}
    bfloat16 = frozenset(name for name, value in given.items() if is_bfloat16(value))
    queries = checks.reals("q", q, None, None, None, hint=ROWS)
    rows, heads, width = queries.shape
    tokens = rows if query_offsets is None else len(checks.reals("k", k, None, None, None, hint=ROWS))
    checks.size("the number of heads of q", heads, 1)
    checks.size("the number of elements of a head", width, 1)
    shared = None if k_shared is None else checks.reals("k_shared", k_shared, tokens, None)
    own_width = width
    if shared is not None:
        own_width -= checks.size("the number of elements of k_shared", shared.shape[1], 1, width - 1)
    keys = checks.reals("k", k, tokens, None, own_width, hint=ROWS)
    kv_heads = keys.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; heads must be a multiple of those")
    values = checks.reals("v", v, tokens, kv_heads, None, hint=ROWS)
    checks.size("the number of elements of a head of v", values.shape[2], 1)
    outputs = (rows, heads, values.shape[2])
    gradient = np.ones(outputs, np.float32) if d_out is None else d_out
    arrays = {
        "q": queries,
        "k": keys,
        "v": values,
        "d_out": checks.reals("d_out", gradient, *outputs, hint=ROWS),
    }
    if shared is not None:
        arrays["k_shared"] = shared
    if sinks is not None:
        arrays["sinks"] = checks.reals("sinks", sinks, heads)
    for name, array in arrays.items():
        checks.finite(name, array)
    bounds = [0, tokens] if offsets is None else offsets
    arrays["offsets"] = checks.offsets("offsets", bounds, tokens, "the rows of k")
    if query_offsets is not None:
        arrays["query_offsets"] = check_queries(query_offsets, rows, arrays["offsets"])
    if mask not in MASKS:
        raise ValueError(f"mask is {mask!r}; it must be causal, full, regions or selected")
    window = checks.size("window", window)
    for owner, name, value in (("regions", "regions", regions), ("selected", "selected_keys", selected_keys)):
        if (mask == owner) != (value is not None):
            raise ValueError(f"mask is {mask!r}; {name} go with mask {owner!r}, and it with them")
    if regions is not None:
        arrays["regions"] = check_regions(regions, np.diff(arrays["offsets"]))
    if selected_keys is not None:
        bounds = arrays.get("query_offsets", arrays["offsets"])
        arrays["selected_keys"] = check_selected(selected_keys, arrays["offsets"], bounds)
    if mask != "causal" and window > 0:
        raise ValueError(f"window is {window}, but only a causal mask has one; it must be 0")
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    scale = checks.number("scale", width**-0.5 if scale is None else scale, least, most)
    return AttentionProblem(arrays, bfloat16, mask, window, scale)


def check_queries(query_offsets: Any, rows: int, offsets: np.ndarray) -> np.ndarray:
    """[documents + 1] int64: no document has more queries than tokens."""
    found = checks.offsets("query_offsets", query_offsets, rows, "the rows of q")
    if len(found) != len(offsets):
        raise ValueError(f"query_offsets has {len(found)} elements; it must have {len(offsets)}, as offsets")
    queries, lengths = np.diff(found), np.diff(offsets)
    for document in np.flatnonzero(queries > lengths):
        raise ValueError(
            f"query_offsets gives document {document} {queries[document]} queries; it has {lengths[document]} tokens"
        )
    return found


def whole_keys(arrays: Mapping[str, Any]) -> np.ndarray:
    """The keys [T, K, D]: k, with k_shared appended to every head if there is one."""
    k = np.asarray(arrays["k"])
    if "k_shared" not in arrays:
        return k
    shared = np.asarray(arrays["k_shared"])[:, None]
    return np.concatenate([k, np.broadcast_to(shared, (*k.shape[:2], shared.shape[2]))], axis=2)


def split_gradient(d_k: np.ndarray, own: int) -> dict[str, np.ndarray]:
    """Splits d_k [T, K, D] into d_k [T, K, own] and, if D > own, d_k_shared [T, D - own], summed over KV heads."""
    found = {"d_k": d_k[..., :own]}
    return found if own == d_k.shape[2] else found | {"d_k_shared": d_k[..., own:].sum(axis=1)}


def shown(region: np.ndarray, length: int) -> np.ndarray:
    """[length, length] booleans: pairs of a document that one row of regions makes visible."""
    _, q_begin, q_end, k_begin, k_end, kind, window = region
    q, k = np.ogrid[:length, :length]
    pairs = (q >= q_begin) & (q < q_end) & (k >= k_begin) & (k < k_end)
    behind = (k_end - k) - (q_end - q)  # keys from this one to the causal diagonal
    if kind & 1:
        pairs &= (behind >= 0) & ((behind < window) | (window == 0))
    if kind & 2:
        pairs &= k - k_begin >= q - q_begin
    return pairs


def check_regions(regions: Any, lengths: np.ndarray) -> np.ndarray:
    """[regions, 7] int64, each inside of its document, no pair in two of them."""
    table = checks.integers("regions", regions, None, 7, hint=REGION)
    owner: dict[int, np.ndarray] = {}
    for number, row in enumerate(table):
        document, q_begin, q_end, k_begin, k_end, kind, window = row
        label = f"regions[{number}]"
        checks.size(f"document of {label}", document, 0, len(lengths) - 1)
        length = lengths[document]
        if not (0 <= q_begin < q_end <= length and 0 <= k_begin < k_end <= length):
            raise ValueError(f"{label} is {row.tolist()}; its document has {length} tokens")
        checks.size(f"kind of {label}", kind, 0, 3)
        checks.size(f"window of {label}", window)
        if window > 0 and not kind & 1:
            raise ValueError(f"window of {label} is {window}; kind {kind} has none, it must be 0")
        owners = owner.setdefault(document, np.full((length, length), -1))
        pairs = shown(row, length)
        if (taken := owners[pairs]).max(initial=-1) >= 0:
            raise ValueError(f"regions[{taken.max()}] and {label} share a pair")
        owners[pairs] = number
    return table


def query_positions(offsets: np.ndarray, query_offsets: np.ndarray) -> np.ndarray:
    """[Q] int64: where each query is in its document, of which the last tokens have queries."""
    behind = np.repeat(query_offsets[1:], np.diff(query_offsets)) - np.arange(query_offsets[-1])
    return np.repeat(np.diff(offsets), np.diff(query_offsets)) - behind


def check_selected(selected: Any, offsets: np.ndarray, query_offsets: np.ndarray) -> np.ndarray:
    """[Q, k] int64: of each query the positions of its keys, each once, then -1."""
    name, hint = "selected_keys", "a position in its document of each key that a query sees, or -1"
    keys = checks.integers(name, selected, int(query_offsets[-1]), None, hint=hint)
    checks.size("the number of columns of selected_keys", keys.shape[1], 1)
    positions = query_positions(offsets, query_offsets)
    checks.every(name, keys, (keys >= -1) & (keys <= positions[:, None]), "-1, or a position up to that of its query")
    none = keys < 0
    checks.every(name, keys, none | ~np.maximum.accumulate(none, axis=1), "before -1, no key")
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    new = np.ones(keys.shape, bool)
    np.put_along_axis(new, order[:, 1:], np.diff(ordered, axis=1) > 0, axis=1)
    checks.every(name, keys, none | new, "selected once by its query")
    return keys


def regions_of(selected: np.ndarray, offsets: np.ndarray, query_offsets: np.ndarray) -> np.ndarray:
    """[regions, 7]: runs of consecutive keys that a query selects, as regions of the mask."""
    documents = np.repeat(np.arange(len(offsets) - 1), np.diff(query_offsets))
    rows = []
    for document, p, row in zip(documents, query_positions(offsets, query_offsets), np.sort(selected, axis=1)):
        keys = row[row >= 0]
        for run in np.split(keys, np.flatnonzero(np.diff(keys) > 1) + 1):
            rows += [[document, p, p + 1, run[0], run[-1] + 1, 0, 0]] if len(run) else []
    return np.array(rows, np.int64).reshape(-1, 7)


def selection(keys: np.ndarray, length: int) -> np.ndarray:
    """[len(keys), length] booleans: the keys of a document that its queries select, -1 none."""
    seen = np.zeros((len(keys), length + 1), bool)  # the last column is -1
    np.put_along_axis(seen, keys, True, axis=1)
    return seen[:, :length]


def sees_some(problem: AttentionProblem) -> np.ndarray:
    """[Q] booleans: whether each query sees a key; a sink counts as one."""
    seen = np.ones(len(problem.arrays["q"]), bool)
    if "sinks" in problem.arrays:
        return seen
    if problem.mask == "selected":
        return (problem.arrays["selected_keys"] >= 0).any(axis=1)
    if problem.mask != "regions":
        return seen
    seen[:] = False
    bounds = problem.arrays["offsets"]
    queries = problem.arrays.get("query_offsets", bounds)
    for row in problem.arrays["regions"]:
        begin, end = queries[row[0]], queries[row[0] + 1]
        length = bounds[row[0] + 1] - bounds[row[0]]
        seen[begin:end] |= shown(row, length).any(axis=1)[length - (end - begin) :]
    return seen


def check_reference(
    problem: AttentionProblem, reference: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The arrays of a reference, as a file holds them: any of those below.

    They are finite, but lse is -inf where a query sees no key.
    """
    of = {name: array.shape for name, array in problem.arrays.items()}
    shapes = {"out": of["d_out"], "lse": of["q"][:2], "d_q": of["q"], "d_k": of["k"], "d_v": of["v"]}
    shapes["d_sinks"], shapes["d_k_shared"] = of["q"][1:2], of.get("k_shared", ())
    for name in ("sinks", "k_shared"):
        if f"d_{name}" in reference and name not in problem.arrays:
            raise ValueError(f"reference['d_{name}'] needs the input {name}")
    arrays = {}
    for name, value in reference.items():
        label = f"reference[{name!r}]"
        array = checks.answer(label, value, *shapes[checks.known(name, shapes)])
        if name == "lse":
            right = np.isfinite(array) | ((array == -np.inf) & ~sees_some(problem)[:, None])
            checks.every(label, array, right, "finite, or -inf where a query sees no key")
        else:
            checks.finite(label, array)
        arrays[name] = array
    return arrays
