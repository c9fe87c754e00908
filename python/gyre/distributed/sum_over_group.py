"""sum_over_group(x, group) -> y

Every rank of the group (tp) has its x [tokens, width]; y [tokens, width] is the sum of x over the ranks
of the group, the same on all of them. --convention says what the gradient of x is: identity, that of the
rank's own y, for ranks that all compute the same loss of y; sum, those of y of all ranks, for ranks whose
losses are parts of one; none: y is a constant, and has no gradient. A gradient of sum where identity is
right is too large by the group's size; identity where sum is right loses the other ranks' gradients.
Gradients: of tensors by autograd; of NumPy arrays, a second value is returned, a function of the gradient
of y that returns that of x. Further parameters, given where they are taken:
data_group (ranks with another sum), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
    Hypothesis,
    Malformed,
    Problem,
    Tolerance,
    Verdict,
    checked_file,
    factors,
    judged,
    keywords,
    not_numbers,
    returned,
)
from .rank import Here, differentiated, unpacked
from .rounding import in_type

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
CONVENTIONS = ("identity", "sum", "none")
WIDTH = 3


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Vectors for the tokens of a file of log-probabilities."""
    tokens = len(checked_file(path).inputs["targets"])
    rng = np.random.default_rng(tokens)
    x, d_y = in_type(rng.normal(size=(2, options.cp, options.tp, tokens, WIDTH)).astype(np.float32), options.dtype)
    if options.convention == "identity":
        d_y[:] = d_y[:, :1]
    pieces = [
        {"x": x[divmod(r, options.tp)], "d_y": d_y[divmod(r, options.tp)], "convention": options.convention}
        for r in range(options.cp * options.tp)
    ]
    yield Problem(path.stem, pieces, {}, partial(_judge, path.stem, x, d_y, options.convention))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    taken = keywords(function, {"data_group": here.group("cp"), "mesh": here.mesh}, needs)
    if piece["convention"] != "none":
        return differentiated(lambda x: function(x, here.group("tp"), **taken), {"d_x": ("x", piece["x"])}, "y",
                              piece["x"].shape, piece["d_y"], [here.kind], here)
    value, backward = unpacked(function(here.leaf(piece["x"]), here.group("tp"), **taken))
    if backward is not None or getattr(value, "requires_grad", False):
        raise Malformed("gradient", "y has a gradient; with --convention none it must be a constant")
    return {"y": returned("y", value, piece["x"].shape, [here.kind])}


def _judge(
    name: str,
    x: np.ndarray,
    d_y: np.ndarray,
    convention: str,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken)
    x, d_y = x.astype(np.float64), d_y.astype(np.float64)
    got = {n: np.stack([mine[n] for mine in arrays]).reshape(x.shape) for n in arrays[0]}
    expected = {"y": _summed(x), "d_x": _summed(d_y) if convention == "sum" else d_y}

    def places(array: str, bad: np.ndarray) -> str:
        c, t, row, _ = (int(i) for i in np.argwhere(bad)[0])
        return f"{int(bad.sum())} of {bad.size} differ; first [rank {c * x.shape[1] + t}, row {row}]" + (
            f": {float(got[array][bad][0]):.6g}, should be {float(expected[array][bad][0]):.6g}"
        )

    verdict = judged(
        name, got, expected, tolerance, lambda failing: _hypotheses(got, expected, failing, x, d_y, convention), places
    )
    verdict.note = "" if "d_x" in got or convention == "none" else "not returned: the gradient"
    return verdict


def _summed(parts: np.ndarray) -> np.ndarray:
    """[cp, tp, ...]: the sum over tp, on each rank."""
    return np.broadcast_to(parts.sum(axis=1, keepdims=True), parts.shape)


def _hypotheses(
    got: Arrays, expected: Arrays, failing: set[str], x: np.ndarray, d_y: np.ndarray, convention: str
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    cp, tp = x.shape[:2]
    if convention == "identity":
        text = f"gradients are summed over the group again, a factor tp = {tp}: the convention is sum, not identity"
        yield Hypothesis("convention", text, lambda: {"d_x": _summed(d_y)})
    else:
        text = "gradients of other ranks are lost: the convention is identity, not sum"
        yield Hypothesis("convention", text, lambda: {"d_x": d_y})
    yield Hypothesis("zero", "the gradient is 0", lambda: {"d_x": np.zeros(x.shape)})
    yield Hypothesis("not-summed", "y is the rank's own x", lambda: {"y": x})
    largest = np.broadcast_to(x.max(axis=1, keepdims=True), x.shape)
    yield Hypothesis("not-summed", "y is the largest x, not the sum", lambda: {"y": largest})
    everyone = np.broadcast_to(x.sum(axis=(0, 1)), x.shape)
    yield Hypothesis("wrong-group", "the sum is over all ranks, not over the group", lambda: {"y": everyone})
    others = np.broadcast_to(x.sum(axis=0, keepdims=True), x.shape)
    yield Hypothesis("wrong-group", "the sum is over the ranks with other rows", lambda: {"y": others})
    yield from factors(got, expected, failing, {"tp": tp, "cp": cp, "the ranks": cp * tp})
