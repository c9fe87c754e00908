"""head_exchange(x, rank, size, group) -> y

The exchange before attention of Ulysses: x [tokens / size, heads, elements] has all heads of the rank's
tokens, which are contiguous; y [tokens, heads of the rank, elements] has all tokens, in order, of heads
rank heads / size to (rank + 1) heads / size. With fewer heads than ranks, as KV heads may be, each goes to
the size / heads ranks in a row whose query heads it serves, and its gradient is the sum of theirs. If the
function takes back, it is true for the exchange after attention, from y to x. Gradients: of tensors by
autograd; of NumPy arrays, a second value is returned, a function of the gradient of y that returns that
of x. Further parameters, given where they are taken: mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
    Hypothesis,
    LeftOut,
    Problem,
    Tolerance,
    Verdict,
    checked_file,
    factors,
    judged,
    keywords,
    not_numbers,
)
from .rank import Here, differentiated

KIND, USES_LAYOUT = "attention", False
SPLITS = ("cp",)
NEEDS = ("back",)


def heads_of(heads: int, size: int) -> np.ndarray:
    """[size, heads of a rank]: which heads each rank has; a head of several ranks stands in each row of them."""
    return (np.arange(size) * heads // size)[:, None] + np.arange(max(1, heads // size))


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Queries and keys of a file of attention to the ranks' heads, and queries back."""
    inputs, size = checked_file(path).inputs, options.cp
    heads = inputs["q"].shape[1]
    if heads % size:
        raise LeftOut(f"{heads} heads over {size} ranks")
    if not len(inputs["q"]):
        raise LeftOut("there is no token")
    for name, back in (("q", False), ("k", False), ("q", True)):
        x = np.asarray(inputs[name], np.float32)
        if x.shape[1] % size and size % x.shape[1]:
            continue  # neither are KV heads a multiple of the ranks, nor ranks of them
        x = np.pad(x, ((0, -len(x) % size), (0, 0), (0, 0)))
        of_rank = x[:, heads_of(x.shape[1], size)[0]].shape
        d = np.random.default_rng(len(x)).normal(size=(size, *of_rank)).astype(np.float32)
        label = f"{path.stem} {name}" + " back" * back
        needs = {"back": "heads are exchanged for tokens"} if back else {}
        yield _problem(label, x, d, back, needs, options)


def _problem(
    name: str, x: np.ndarray, d: np.ndarray, back: bool, needs: Mapping[str, str], options: Any
) -> Problem:
    """One exchange; d [size, tokens, heads of a rank, elements]: gradients of y, or back, those of x."""
    size, exchanged = options.cp, _with_heads(x, d, heads_of(x.shape[1], options.cp))
    by_heads, by_tokens, d_tokens = exchanged["y"], np.stack(np.split(x, size)), exchanged["d_x"]
    given, d_given, whole = (by_heads, d_tokens, by_tokens) if back else (by_tokens, d, by_heads)
    expected = {"y": whole, "d_x": d if back else d_tokens}
    ranks = [r // options.tp for r in range(size * options.tp)]
    pieces = [{"x": given[r], "d_y": d_given[r].astype(np.float32), "shape": whole[r].shape} for r in ranks]
    pieces = [piece | {"back": back} for piece in pieces]
    return Problem(name, pieces, needs, partial(_judge, name, x, d, back, expected, options.tp))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    taken = keywords(function, {"back": piece["back"], "mesh": here.mesh}, needs)
    return differentiated(
        lambda x: function(x, here.rank // here.tp, here.cp, here.group("cp"), **taken),
        {"d_x": ("x", piece["x"])}, "y", piece["shape"], piece["d_y"], [here.kind], here,
    )


def _judge(
    name: str,
    x: np.ndarray,
    d: np.ndarray,
    back: bool,
    expected: Arrays,
    tp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken)
    got = {n: np.stack([mine[n] for mine in arrays[::tp]]) for n in arrays[0]}

    def places(array: str, bad: np.ndarray) -> str:
        rows = bad.any(axis=3)
        rank, token, head = (int(i) for i in np.argwhere(rows)[0])
        return f"{int(rows.sum())} of {rows.size} rows differ; first [rank {rank}, token {token}, head {head}]"

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        return _hypotheses(got, expected, failing, x, d, back)

    verdict = judged(name, got, expected, tolerance, errors, places)
    verdict.note = "" if "d_x" in got else "not returned: the gradient"
    return verdict


def _hypotheses(
    got: Arrays, expected: Arrays, failing: set[str], x: np.ndarray, d: np.ndarray, back: bool
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    heads, size = x.shape[1], len(d)
    held = heads_of(heads, size)
    yield Hypothesis("zero", "the gradient is 0", lambda: {"d_x": np.zeros(expected["d_x"].shape)})
    yield from factors(got, expected, failing, {"cp": size, "the ranks of a head": max(1, size // heads)})
    if back:
        turned = {n: np.roll(a, 1, axis=0) for n, a in expected.items()}
        yield Hypothesis("wrong-rows", "rank r has the tokens of rank r - 1", lambda: turned)
        mixed = np.concatenate(expected["y"])[:, np.argsort(held.T.reshape(-1), kind="stable")]
        yield Hypothesis("heads", "heads are joined in another order", lambda: {"y": np.stack(np.split(mixed, size))})
        return
    dealt = np.arange(size)[:, None] % heads + size * np.arange(held.shape[1])[None, :]
    mine = "head r mod heads" if heads < size else "heads r, r + size, ..."
    yield Hypothesis("heads", f"heads are dealt out by turns: rank r has {mine}", lambda: _with_heads(x, d, dealt))
    for step in range(1, size):
        text = f"rank r has the heads of rank r + {step} (mod size)"
        yield Hypothesis("heads", text, lambda step=step: _with_heads(x, d, np.roll(held, -step, axis=0)))
    for step in range(1, size):
        rows = np.concatenate(np.roll(np.arange(len(x)).reshape(size, -1), -step, axis=0))
        text = f"tokens begin with those of rank {step}"
        yield Hypothesis("wrong-rows", text, lambda rows=rows: {"y": np.stack([x[rows][:, mine] for mine in held])})
    if heads < size:
        for text, kept in (("first", 0), ("last", -1)):
            alone = [np.flatnonzero(held[:, 0] == head)[kept] for head in range(heads)]
            mine = np.stack([d[rank][:, 0] for rank in alone], axis=1)
            said = f"the gradient of a head is that of the {text} rank that has it, not the sum"
            yield Hypothesis("group-gradient", said, lambda mine=mine: {"d_x": np.stack(np.split(mine, size))})


def _with_heads(x: np.ndarray, d: np.ndarray, held: np.ndarray) -> dict[str, np.ndarray]:
    """y and d_x if the ranks have these heads [size, heads of a rank]."""
    summed = np.zeros(x.shape)
    for mine, gradient in zip(held, d):
        np.add.at(summed, (slice(None), mine), gradient)
    return {"y": np.stack([x[:, mine] for mine in held]), "d_x": np.stack(np.split(summed, len(held)))}
