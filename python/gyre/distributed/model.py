"""model(x, cu_seqlens, layout, group) -> y

Probes of any function of tokens, which need no answers: what may move, and what must. A rank has its
rows [tokens, width] of x, which are those of the contract attention, and returns its rows of y. One
token of x is changed, and y may change for tokens that see it alone; the gradient of one row of y may
reach tokens that it sees alone; the gradient of one rank's rows, doubled, must change that of all
tokens that they see, and of no other; with sinks, a changed sink must change y. Gradients: of tensors
by autograd; of NumPy arrays, a second value is returned, a function of d_y that returns d_x. Tokens see
what they reach in any number of layers, or in FUNCTION.layers. Further parameters, given where they are
taken: mask, window, sinks [4], regions, lengths, allowed, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .attention import needs_of, pairs_of
from .contract import Finding, Problem, Tolerance, Verdict, checked_file, keywords, not_numbers, returned
from .layouts import Layout, layout_of
from .rank import Here, unpacked

KIND, USES_LAYOUT = "attention", True
SPLITS = ("cp",)
NEEDS = ("mask", "regions", "window", "sinks", "lengths")
WIDTH, SINKS, MOST = 8, 4, 9  # elements of a token, sinks, tokens that are changed


def probed(layout: Layout) -> list[int]:
    """Tokens that are changed: the first, a middle and the last one of each document, as far as MOST goes."""
    found: list[int] = []
    for begin, end in pairwise(np.cumsum([0, *layout.lengths])):
        found += sorted({int(begin), int(begin + end) // 2, int(end) - 1}) if end > begin else []
    return found[:MOST]


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The documents and the mask of a file of attention."""
    inputs = checked_file(path).inputs
    layout = layout_of(options.layout, np.asarray(inputs["offsets"]).astype(np.int64), options.cp)
    if not layout.lengths.sum():
        return
    needs = {name: why for name, why in needs_of(inputs, layout).items() if name != "scale"}
    pairs = pairs_of(inputs, layout)
    rng = np.random.default_rng(layout.slots)
    x = rng.normal(size=(layout.slots, WIDTH)).astype(np.float32)
    d_y = np.where(np.isin(np.arange(layout.slots), layout.tokens)[:, None], rng.normal(size=x.shape), 0).astype(
        np.float32
    )
    offers = {
        "mask": inputs.attributes["mask"],
        "window": int(inputs.attributes["window"]),
        "regions": inputs.get("regions"),
    }
    slots = layout.tokens[probed(layout)]
    pieces = []
    for rank in range(options.cp * options.tp):
        rows = layout.index[rank // options.tp]
        pieces.append(
            {
                "x": x[rows],
                "d_y": d_y[rows],
                "layout": layout,
                "offers": offers,
                "allowed": pairs[rows],
                "sinks": "sinks" in inputs,
                "rows": [np.flatnonzero(rows == slot) for slot in slots],
            }
        )
    yield Problem(path.stem, pieces, needs, partial(_judge, path.stem, pairs, layout, options.tp))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function for every probe: y of x, of each changed token and of changed sinks; d_x of each gradient."""
    layout, kinds = piece["layout"], [here.kind, "float32", "float64"]

    def run(x: np.ndarray, d_ys: list[np.ndarray], sinks: float = 0.5) -> tuple[np.ndarray, list[np.ndarray]]:
        offers = dict(
            piece["offers"],
            lengths=here.integers(layout.lengths),
            mesh=here.mesh,
            allowed=here.booleans(piece["allowed"]),
        )
        offers["sinks"] = here.array(np.full(SINKS, sinks)) if piece["sinks"] else None
        gradients = []
        wanted: list[np.ndarray | None] = [*d_ys] or [None]
        for d_y in wanted:  # a graph of autograd is gone after one backward
            leaf = here.leaf(x)
            taken = keywords(function, offers, needs)
            y, backward = unpacked(function(leaf, here.integers(layout.cu_seqlens), layout, here.group("cp"), **taken))
            value = returned("y", y, x.shape, kinds)
            if d_y is not None:
                way = None if backward is None else lambda d, backward=backward: [backward(d)]
                gradients += [
                    returned("d_x", g, x.shape, kinds) for g in here.gradients(y, here.array(d_y), [leaf], way)
                ]
        return value, gradients

    base, d_y = piece["x"], piece["d_y"]
    ones = []
    for row in piece["rows"]:
        one = np.zeros_like(d_y)
        one[row] = 1
        ones.append(one)
    doubled = [d_y * (2 if here.rank // here.tp == rank else 1) for rank in range(here.cp)]
    first, gradients = run(base, [*ones, d_y, *doubled])
    values = [first] + [run(base + one, [])[0] for one in ones] + ([run(base, [], 2.0)[0]] if piece["sinks"] else [])
    layers, again = np.array(getattr(function, "layers", 0)), run(base, [])[0]
    return {"y": np.stack(values, axis=1), "again": again, "layers": layers} | (
        {"d_x": np.stack(gradients, axis=1)} if gradients else {}
    )


def reached(pairs: np.ndarray, layers: int) -> np.ndarray:
    """[slots, slots]: what each token sees through a number of layers; 0: any number."""
    step = pairs | np.eye(len(pairs), dtype=bool)
    found, power = step, 1
    while (layers == 0 and power < len(pairs)) or power < layers:
        found, power = (found.astype(np.float32) @ step.astype(np.float32)) > 0, power + 1
    return found


def _judge(
    name: str, pairs: np.ndarray, layout: Layout, tp: int, arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    real = np.isin(np.arange(layout.slots), layout.tokens)
    broken = not_numbers(
        arrays, lambda rank, array, values: values if array == "layers" else values[real[layout.index[rank // tp]]]
    )
    if broken:
        return Verdict(name).fail(*broken)
    whole = {}
    for array in ("y", "again", "d_x"):
        if array in arrays[0]:
            whole[array] = np.zeros((layout.slots, *arrays[0][array].shape[1:]))
            for rows, mine in zip(layout.index, arrays[::tp]):
                whole[array][rows] = mine[array]
            whole[array] = whole[array][layout.tokens]
    verdict = Verdict(name, values=sum(a.size for a in whole.values()))
    differs = _moved(whole["again"], whole["y"][:, 0], tolerance)
    if differs.any():
        text = "it is not deterministic: two calls with the same x return different y (dropout?)"
        place = f"{int(differs.sum())} tokens differ; first {layout.place(int(np.argmax(differs)))}"
        return verdict.fail(Finding("not-deterministic", text, ("y",)), places=[place])
    sees = reached(pairs, int(arrays[0]["layers"]))[np.ix_(layout.tokens, layout.tokens)]
    own = pairs.diagonal()[layout.tokens]
    _judge_values(verdict, whole["y"], sees, own, layout, tolerance)
    if "d_x" in whole:
        _judge_gradients(verdict, whole["d_x"], sees, layout, tolerance)
    verdict.note = "" if "d_x" in whole else "not returned: the gradient"
    return verdict


def _moved(array: np.ndarray, base: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """[tokens]: whether any element differs."""
    return (np.abs(array - base) > tolerance.atol * np.maximum(1, np.abs(base))).any(axis=1)


def _leak(verdict: Verdict, what: str, source: int, wrong: np.ndarray, layout: Layout) -> None:
    """Names the first token that moved and must not have."""
    bounds = np.cumsum([0, *layout.lengths])
    first = int(np.argmax(wrong))
    document = [int(np.searchsorted(bounds, t, side="right")) - 1 for t in (source, first)]
    if document[0] != document[1]:
        kind, why = "leak", "of another document"
    else:
        kind, why = "mask-lost", "that the mask hides"
    verdict.fail(
        Finding(kind, f"{what} a token {why}"),
        places=[
            f"probe of {layout.place(source)}: {int(wrong.sum())} tokens moved that must not; first {layout.place(first)}"
        ],
    )


def _judge_values(
    verdict: Verdict, y: np.ndarray, sees: np.ndarray, own: np.ndarray, layout: Layout, tolerance: Tolerance
) -> None:
    tokens = probed(layout)
    for probe, token in enumerate(tokens):
        moved = _moved(y[:, 1 + probe], y[:, 0], tolerance)
        wrong = moved & ~sees[:, token]
        if wrong.any():
            _leak(verdict, "y depends on", token, wrong, layout)
            return
        if own[token] and not moved[token]:
            verdict.fail(Finding("nothing-moves", f"y of {layout.place(token)} does not depend on its own x"))
            return
    if y.shape[1] > 1 + len(tokens) and not _moved(y[:, -1], y[:, 0], tolerance).any():
        verdict.fail(Finding("sinks-ignored", "y does not depend on the sinks"))


def _judge_gradients(verdict: Verdict, d_x: np.ndarray, sees: np.ndarray, layout: Layout, tolerance: Tolerance) -> None:
    tokens = probed(layout)
    for probe, token in enumerate(tokens):
        wrong = _moved(d_x[:, probe], np.zeros(d_x[:, 0].shape), tolerance) & ~sees[token]
        if wrong.any():
            _leak(verdict, "the gradient of y reaches", token, wrong, layout)
            return
    base, owner = d_x[:, len(tokens)], layout.owner[layout.tokens]
    for rank in range(layout.cp):
        if not (owner == rank).any():
            continue
        changed = _moved(d_x[:, len(tokens) + 1 + rank], base, tolerance)
        seen = sees[owner == rank].any(axis=0)
        if (changed & ~seen).any():
            text = f"the gradient of rank {rank}, doubled, changes that of tokens that its rows do not see"
            verdict.fail(Finding("leak", text))
            return
        lost = seen & ~changed & (owner != rank)
        if lost.sum() > 0.5 * max(1, (seen & (owner != rank)).sum()):
            text = (
                f"the gradient of rank {rank}, doubled, does not change that of other ranks' tokens that its rows see"
            )
            verdict.fail(
                Finding("gradient-dropped", text),
                places=[f"{int(lost.sum())} tokens; first {layout.place(int(np.argmax(lost)))}"],
            )
            return
