"""recurrence(q, k, v, g, cu_seqlens, layout, group) -> out

A recurrent layer. A rank has rows [tokens, heads, elements] of q, k and v, and of g [tokens, heads] or
[tokens, heads, elements of k], the logarithms of decays: those of layout.index[group's rank].
cu_seqlens: where documents begin, in slots of the whole stream; the last slots of a document may be
padding. A head of v has a state S [elements of k, elements of v], which is 0 where a document begins:

    S' = exp(g_t) S;  u = beta_t (v_t - S'^T k_t), or v_t without beta;  S = S' + k_t u^T;  out_t = scale S^T q_t

Head h of v reads head h * K // H of q and k. It returns its rows of the output. Gradients: of tensors by
autograd; of NumPy arrays, a second value is returned, a function of d_out that returns those of q, k, v,
g and, where they are given, beta and conv_weight. A rank's d_conv_weight is its share of the sum. Further
parameters, given where they are taken: beta [tokens, heads] (the delta rule), scale, conv_weight, mesh.
conv_weight [channels of q, k and v, width]: q, k and v are what a causal depthwise convolution reads, SiLU
follows, and each head of q and k is divided by sqrt(sum of squares + 1e-6). A rank has all of it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from .attention import rows_that_differ, value_text
from .contract import LeftOut, Problem, Tolerance, Verdict, judged, keywords, not_numbers, returned
from .layouts import Layout, layout_of
from .rank import Here, unpacked
from .recurrence_errors import LEAVES, Stream, answers, hypotheses
from .rounding import in_type

KIND, USES_LAYOUT = "recurrence", True
SPLITS = ("cp",)
NEEDS = ("beta", "scale", "conv_weight")
ROWS = ("q", "k", "v", "g", "beta", "d_out")


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file of a recurrence."""
    if options.tp > 1:
        raise LeftOut("heads are not divided here: tp must be 1")
    file = reading.read(path)
    inputs, expected = {n: in_type(a, options.dtype) for n, a in file.inputs.items()}, dict(file.reference)
    layout = layout_of(options.layout, np.asarray(inputs["offsets"]).astype(np.int64), options.cp)
    stream = _stream(inputs, layout, float(file.inputs.attributes["scale"]))
    for name in LEAVES:
        if f"d_{name}" in expected and expected[f"d_{name}"].shape != np.shape(inputs[name]):
            raise ValueError(f"/reference/d_{name} has another shape than /recurrence/{name}")
    if any(not np.array_equal(a, file.inputs[n]) for n, a in inputs.items()):
        exact = answers(stream)
        expected = {n: exact[n] if n == "d_conv_weight" else exact[n][layout.tokens] for n in expected.keys() & exact.keys()}
    pieces = [_piece(stream, rank) for rank in range(options.cp)]
    yield Problem(path.stem, pieces, needs_of(stream), partial(_judge, path.stem, stream, expected))


def needs_of(stream: Stream) -> dict[str, str]:
    """Parameters that a file cannot be asked without, and why."""
    needs, width = {}, stream.arrays["q"].shape[2]
    if "beta" in stream.arrays:
        needs["beta"] = "there is the delta rule"
    if not np.isclose(stream.scale, width**-0.5):
        needs["scale"] = f"the scale is {stream.scale:.4g}, not 1 / sqrt({width})"
    if "conv_weight" in stream.arrays:
        needs["conv_weight"] = "there is a convolution"
    return needs


def _stream(inputs: Mapping[str, np.ndarray], layout: Layout, scale: float) -> Stream:
    """Inputs in slots. Padding repeats other rows; its d_out is 0."""
    found = {}
    for name in ROWS:
        if name not in inputs:
            continue
        array = np.asarray(inputs[name])
        rows = np.zeros((layout.slots, *array.shape[1:]), array.dtype)
        if len(array) and name != "d_out":
            rows[:] = array[(7 + 3 * np.arange(layout.slots)) % len(array)]
        rows[layout.tokens] = array
        found[name] = rows
    if "conv_weight" in inputs:
        found["conv_weight"] = np.asarray(inputs["conv_weight"])
    return Stream(found, layout, scale)


def _piece(stream: Stream, rank: int) -> dict[str, Any]:
    """The arguments of a rank."""
    rows = stream.layout.index[rank]
    mine = {n: a if n == "conv_weight" else a[rows] for n, a in stream.arrays.items()}
    return mine | {"layout": stream.layout, "scale": stream.scale}


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    layout: Layout = piece["layout"]
    leaves = {name: here.leaf(piece[name]) for name in LEAVES if name in piece}
    offers = {"scale": piece["scale"], "mesh": here.mesh} | {n: leaves.get(n) for n in ("beta", "conv_weight")}
    taken = keywords(function, offers, needs)
    given = [leaves[name] for name in ("q", "k", "v", "g")]
    out, backward = unpacked(function(*given, here.integers(layout.cu_seqlens), layout, here.group("cp"), **taken))
    found = {"out": returned("out", out, piece["d_out"].shape, [here.kind])}
    gradients = here.gradients(out, here.array(piece["d_out"]), list(leaves.values()), backward)
    for name, gradient in zip(leaves, gradients):
        kinds = [here.kind, "float32", "float64"]
        found[f"d_{name}"] = returned(f"d_{name}", gradient, piece[name].shape, kinds)
    return found


def _judge(
    name: str,
    stream: Stream,
    expected: Mapping[str, np.ndarray],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    layout = stream.layout
    real = np.zeros(layout.slots, bool)
    real[layout.tokens] = True

    def counted(rank: int, array: str, values: np.ndarray) -> np.ndarray:
        return values if array == "d_conv_weight" else values[real[layout.index[rank]]]

    broken = not_numbers(arrays, counted)
    if broken:
        return Verdict(name).fail(*broken)
    got = {}
    for array in set.intersection(*(set(mine) for mine in arrays)):
        parts = [mine[array] for mine in arrays]
        if array == "d_conv_weight":
            got[array] = np.sum(parts, axis=0)
            continue
        whole = np.zeros((layout.slots, *parts[0].shape[1:]), parts[0].dtype)
        for rows, part in zip(layout.index, parts):
            whole[rows] = part
        got[array] = whole[layout.tokens]

    def places(array: str, bad: np.ndarray) -> str:
        if array == "d_conv_weight":
            channels = np.flatnonzero(bad.any(axis=1))
            return f"{len(channels)} of {len(bad)} channels differ, first {channels[0]}" + value_text(got[array], expected[array], bad)
        rows = bad.reshape(len(bad), -1).any(axis=1)
        return rows_that_differ(rows, layout) + value_text(got[array], expected[array], bad)

    verdict = judged(name, got, expected, tolerance, lambda failing: hypotheses(stream, got, expected, failing, tolerance), places)
    missing = sorted(expected.keys() - got.keys())
    verdict.note = f"not returned: {', '.join(missing)}" if missing else ""
    return verdict
