"""attention(q, k, v, cu_seqlens, layout, group) -> out, lse

A rank has rows [tokens, heads, elements] of q, k and v: those of layout.index[group's rank]; with tp,
its part of the heads. cu_seqlens: where documents begin, in slots of the whole stream; the last slots
of a document may be padding. It returns its rows of the output and the log-sum-exps [tokens, heads],
or None for them. Gradients: of tensors by autograd; of NumPy arrays, a third value is returned, a
function of d_out that returns d_q, d_k, d_v and, where they are given, d_k_shared and d_sinks. A rank's
d_sinks, and with tp its d_k_shared, is its share of the sum. Further parameters, given where they are
taken: k_shared [tokens, elements] (what every head of k ends with: the rotary part of multi-head latent
attention; k has the elements before), mask, window, scale, softcap (c: the scaled scores x become
c tanh(x / c), before the mask), sinks, regions, lengths (tokens of each document, without padding),
allowed (booleans [rows of the rank, slots]: the keys that each row sees), mesh.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from ..reference import visible
from .attention_errors import Weights, answers, hypotheses
from .attention_places import Answered
from .contract import (
    LeftOut,
    Malformed,
    Problem,
    Tolerance,
    Verdict,
    checked_file,
    judged,
    keywords,
    not_numbers,
    returned,
)
from .layouts import Layout, layout_of
from .rank import Here
from .rounding import rounded

KIND, USES_LAYOUT = "attention", True
SPLITS = ("cp",)
NEEDS = ("mask", "regions", "window", "scale", "softcap", "sinks", "k_shared", "lengths")
ROWS = ("q", "k", "v", "d_out")
LEAVES = ("q", "k", "v", "k_shared", "sinks")
ANSWERS = ("out", "lse", *(f"d_{name}" for name in LEAVES))
SAFETY = 32.0  # of src/core/tolerance.hpp
# Files that have a second case, with a softcap: causal, of every key, of regions, with a window, with scores that it needs.
SOFTCAPPED = ("attention_causal", "attention_full", "attention_blocks", "attention_window_documents", "attention_large_scores")


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file of attention, and one with a softcap of half of its largest score."""
    file = rounded(checked_file(path), options.dtype)
    inputs, expected = file.inputs, dict(file.reference)
    if "query_offsets" in inputs:
        raise LeftOut("the last tokens alone have queries; functions of this contract have a query for each key")
    layout = layout_of(options.layout, np.asarray(inputs["offsets"]).astype(np.int64), options.cp)
    heads, kv_heads = inputs["q"].shape[1], inputs["k"].shape[1]
    if heads % options.tp or kv_heads % options.tp:
        raise LeftOut(f"{kv_heads} KV heads are no multiple of tp = {options.tp}")
    needs, streams, pairs = needs_of(inputs, layout), _streams(inputs, layout), pairs_of(inputs, layout)
    attributes = {**inputs.attributes, "softcap": 0.0}
    problem = partial(_problem, streams, pairs, inputs.get("regions"), layout, options)
    yield problem(path.stem, needs, attributes, expected)
    if path.stem in SOFTCAPPED:
        exact = partial(Weights, streams, pairs, float(attributes["scale"]), streams.get("sinks"))
        cap = float(np.float32(exact().largest / 2))
        found = answers(streams, pairs, float(attributes["scale"]), streams.get("sinks"), softcap=cap)
        capped = {n: a if n == "d_sinks" else a[layout.tokens] for n, a in found.items() if n in expected}
        needs = needs | {"softcap": f"the softcap is {cap:.4g}"}
        yield problem(f"{path.stem} with softcap", needs, attributes | {"softcap": cap}, capped)


def _problem(
    streams: Mapping[str, np.ndarray],
    pairs: np.ndarray,
    regions: np.ndarray | None,
    layout: Layout,
    options: Any,
    name: str,
    needs: Mapping[str, str],
    attributes: Mapping[str, Any],
    expected: Mapping[str, np.ndarray],
) -> Problem:
    offers = {n: attributes[n] for n in ("mask", "scale")} | {"window": int(attributes["window"])}
    offers |= {"regions": regions, "softcap": attributes["softcap"] or None}
    pieces = [_piece(streams, pairs, layout, offers, rank, options) for rank in range(options.cp * options.tp)]
    eps = float(np.finfo("float64" if options.dtype == "float64" else "float32").eps)
    return Problem(name, pieces, needs, partial(_judge, name, streams, pairs, attributes, expected, layout, options.tp, eps))


def needs_of(inputs: reading.Group, layout: Layout) -> dict[str, str]:
    """Parameters that a file cannot be asked without, and why."""
    mask, window, width = inputs.attributes["mask"], int(inputs.attributes["window"]), inputs["q"].shape[2]
    needs: dict[str, str] = {}
    if mask != "causal":
        needs["mask"] = f"the mask is {mask}"
    if mask == "regions":
        needs["regions"] = "the mask is of regions"
    if window:
        needs["window"] = f"the window is {window}"
    if not np.isclose(inputs.attributes["scale"], width**-0.5):
        needs["scale"] = f"the scale is {inputs.attributes['scale']:.4g}, not 1 / sqrt({width})"
    if "sinks" in inputs:
        needs["sinks"] = "there are sinks"
    if "k_shared" in inputs:
        needs["k_shared"] = "heads share elements of their keys"
    padded = (layout.lengths < np.diff(layout.cu_seqlens)) & (layout.lengths > 0)
    if mask == "full" and padded.any():
        needs["lengths"] = "every query sees the padding of its document"
    return needs


def _streams(inputs: reading.Group, layout: Layout) -> dict[str, np.ndarray]:
    """q, k, v, d_out in slots, and sinks. Padding repeats other rows; its d_out is 0."""
    found = {}
    for name in (*ROWS, *(["k_shared"] if "k_shared" in inputs else [])):
        array = np.asarray(inputs[name])
        rows = np.zeros((layout.slots, *array.shape[1:]), array.dtype)
        if len(array) and name != "d_out":
            rows[:] = array[(7 + 3 * np.arange(layout.slots)) % len(array)]
        rows[layout.tokens] = array
        found[name] = rows
    if "sinks" in inputs:
        found["sinks"] = np.asarray(inputs["sinks"])
    return found


def _piece(
    streams: Mapping[str, np.ndarray],
    pairs: np.ndarray,
    layout: Layout,
    offers: Mapping[str, Any],
    rank: int,
    options: Any,
) -> dict[str, Any]:
    """The arguments of a rank."""
    cp_rank, tp_rank = divmod(rank, options.tp)
    rows = layout.index[cp_rank]
    mine = {
        name: np.split(streams[name][rows], options.tp, axis=1)[tp_rank]
        if streams[name].shape[1] % options.tp == 0
        else streams[name][rows]
        for name in ROWS
    }
    if "k_shared" in streams:
        mine["k_shared"] = streams["k_shared"][rows]
    if "sinks" in streams:
        mine["sinks"] = np.array_split(streams["sinks"], options.tp)[tp_rank]
    return mine | {"layout": layout, "allowed": pairs[rows], "offers": dict(offers)}


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    layout: Layout = piece["layout"]
    leaves = {name: here.leaf(piece[name]) for name in LEAVES if name in piece}
    offers = dict(
        piece["offers"], lengths=here.integers(layout.lengths), mesh=here.mesh, allowed=here.booleans(piece["allowed"])
    )
    offers |= {name: leaves.get(name) for name in ("sinks", "k_shared")}
    taken = keywords(function, offers, needs)
    d_out, kind = here.array(piece["d_out"]), here.kind
    answer = function(
        leaves["q"], leaves["k"], leaves["v"], here.integers(layout.cu_seqlens), layout, here.group("cp"), **taken
    )
    values = answer if isinstance(answer, tuple) else (answer,)
    if not 1 <= len(values) <= 3:
        raise Malformed("other-type", f"{len(values)} values were returned; they must be out, lse")
    out, lse, backward = (*values, None, None)[:3]
    found = {"out": returned("out", out, piece["d_out"].shape, [kind])}
    if lse is not None:
        found["lse"] = returned("lse", lse, piece["q"].shape[:2], ["float32", "float64"]).astype(np.float64)
    gradients = here.gradients(out, d_out, list(leaves.values()), backward)
    for name, gradient in zip(leaves, gradients):
        found[f"d_{name}"] = returned(f"d_{name}", gradient, piece[name].shape, [kind, "float32", "float64"])
    return found


def gathered(arrays: list[dict[str, np.ndarray]], layout: Layout, tp: int) -> dict[str, np.ndarray]:
    """Joins the ranks' arrays into arrays of the whole stream, in slots; sums d_sinks over cp, d_k_shared over tp."""
    found = {}
    for name in set.intersection(*(set(mine) for mine in arrays)):
        join = {"d_sinks": np.concatenate, "d_k_shared": sum}.get(name, partial(np.concatenate, axis=1))
        by_cp = [join([arrays[c * tp + t][name] for t in range(tp)]) for c in range(layout.cp)]
        if name == "d_sinks":
            found[name] = np.sum(by_cp, axis=0)
            continue
        whole = np.zeros((layout.slots, *by_cp[0].shape[1:]), by_cp[0].dtype)
        for rows, part in zip(layout.index, by_cp):
            whole[rows] = part
        found[name] = whole
    return found


def pairs_of(inputs: reading.Group, layout: Layout) -> np.ndarray:
    """[slots, slots] booleans: the key that each query sees; padding sees nothing, and nothing sees it."""
    found = np.zeros((layout.slots, layout.slots), bool)
    attributes = inputs.attributes
    for document, (begin, length) in enumerate(zip(layout.cu_seqlens, layout.lengths)):
        regions = inputs["regions"][inputs["regions"][:, 0] == document] if "regions" in inputs else None
        found[begin : begin + length, begin : begin + length] = visible(
            int(length), attributes["mask"], int(attributes["window"]), regions
        )
    return found


def error_of_merges(largest: float, partials: int, eps: float) -> float:
    """The error of weights whose scores and log-sum-exps are rounded at their size, in every merge and in the final one.

    It is the part of the model of src/attention/tolerance.hpp that grows with the scores: 3 X^2 P + 3 L^2 P roundings.
    Kernels keep log-sum-exps in float32, so this error is no fault; where terms of a gradient cancel, it is what is left.
    """
    return SAFETY / 6 * eps * math.sqrt(6 * partials) * largest


def _judge(
    name: str,
    streams: Mapping[str, np.ndarray],
    pairs: np.ndarray,
    attributes: Mapping[str, Any],
    expected: Mapping[str, np.ndarray],
    layout: Layout,
    tp: int,
    eps: float,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    real = np.zeros(layout.slots, bool)
    real[layout.tokens] = True
    exact = Weights(streams, pairs, float(attributes["scale"]), streams.get("sinks"), softcap=attributes["softcap"])
    tolerance = tolerance.widened(error_of_merges(exact.largest, layout.cp, eps), exact.sizes())

    def counted(rank: int, array: str, values: np.ndarray) -> np.ndarray:
        return values if array == "d_sinks" else values[real[layout.index[rank // tp]]]

    broken = not_numbers(arrays, counted)
    if broken:
        return Verdict(name).fail(*broken)
    whole = gathered(arrays, layout, tp)
    got = {n: a if n == "d_sinks" else a[layout.tokens] for n, a in whole.items()}

    def places(array: str, bad: np.ndarray) -> str:
        if array == "d_sinks":
            return f"heads {', '.join(map(str, np.flatnonzero(bad)))}"
        rows = bad.reshape(len(bad), -1).any(axis=1)
        heads = np.flatnonzero(bad.reshape(*bad.shape[:2], -1).any(axis=(0, 2))) if array != "d_k_shared" else []
        of_heads = f"; heads {', '.join(map(str, heads))} alone" if 0 < len(heads) < bad.shape[1] else ""
        blocks = _blocks_behind(rows, pairs, layout) if array in ("out", "lse", "d_q") else ""
        return rows_that_differ(rows, layout) + value_text(got[array], expected[array], bad) + of_heads + blocks

    def known(failing: set[str]) -> Iterator[Any]:
        return hypotheses(Answered(got, expected, failing, streams, pairs, attributes, layout, tp, tolerance))

    verdict = judged(name, got, {n: a for n, a in expected.items() if n in ANSWERS}, tolerance, known, places)
    missing = sorted(n for n in expected if n in ANSWERS and n not in got)
    verdict.note = f"not returned: {', '.join(missing)}" if missing else ""
    return verdict


def _blocks_behind(rows: np.ndarray, pairs: np.ndarray, layout: Layout) -> str:
    """The rank whose keys all rows [tokens] that differ see, and no row that is right on their ranks."""
    owner, seen = layout.owner[layout.tokens], pairs[layout.tokens]
    mine = np.isin(owner, owner[rows])
    for rank in range(layout.cp if layout.cp > 1 else 0):
        sees = seen[:, layout.owner == rank].any(axis=1)
        if (rows[mine] == sees[mine]).all() and not sees[mine].all():
            return f"; they are the rows that see keys of rank {rank}"
    return ""


def rows_that_differ(rows: np.ndarray, layout: Layout) -> str:
    """Counts of rows by rank and by document, and the first."""
    owner = layout.owner[layout.tokens]
    ranks = [f"{int(rows[owner == r].sum())} of {int((owner == r).sum())}" for r in range(layout.cp)]
    bounds = np.cumsum([0, *layout.lengths])
    documents = [
        f"document {d}: {int(rows[a:b].sum())} of {b - a}"
        for d, (a, b) in enumerate(pairwise(bounds))
        if rows[a:b].any()
    ]
    by_rank = ", ".join(f"rank {r}: {text}" for r, text in enumerate(ranks))
    more = f" and {len(documents) - 4} more" if len(documents) > 4 else ""
    return (
        f"{int(rows.sum())} of {len(rows)} rows differ ({by_rank}; {', '.join(documents[:4])}{more}); "
        f"first {layout.place(int(np.argmax(rows)))}"
    )


def value_text(got: np.ndarray, expected: np.ndarray, bad: np.ndarray) -> str:
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return f": {float(got[place]):.6g}, should be {float(expected[place]):.6g}"
