"""What losses share that ranks compute together: the call of a function, and the verdict of its values and gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .contract import Arrays, Hypothesis, Tolerance, Verdict, keywords, not_numbers
from .gradients import judge_parameters
from .rank import Here, differentiated


def call_of_loss(
    function: Callable[..., Any], arguments: Callable[[list[Any]], Sequence[Any]], leaves: Mapping[str, np.ndarray],
    offers: Mapping[str, Any], needs: Mapping[str, str], here: Here,
) -> dict[str, np.ndarray]:
    """Calls a function that returns a loss on one rank; arguments: what it gets, from the leaves."""
    offers = dict(offers, mesh=here.mesh) | {f"{name}_group": here.group(name) for name in ("data", "cp", "dp")}
    taken = keywords(function, offers, needs)
    return differentiated(
        lambda *tensors: function(*arguments(list(tensors)), **taken), {f"d_{n}": (n, a) for n, a in leaves.items()},
        "loss", (), np.array(1.0), [here.kind, "float32", "float64"], here,
    )


def judge_loss(
    name: str, arrays: list[dict[str, np.ndarray]], answers: Callable[..., Arrays], grid: Mapping[str, int],
    errors: Callable[[], Iterable[tuple[str, str, Mapping[str, Any]]]], tolerance: Tolerance,
) -> Verdict:
    """The verdict of losses, and of gradients of rows [rows] or of rows and columns [rows, columns].

    answers(**changes): loss, the part of each rank's rows [dp x cp], and gradients of all rows. Every rank returns the
    sum of the parts. errors: kinds, texts and changes of known ones.
    """
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken[:1])
    sizes, tp = [grid[axis] for axis in ("dp", "cp", "tp")], grid["tp"]

    def on_ranks(found: Arrays, summed: bool = True) -> dict[str, np.ndarray]:
        parts = np.asarray(found["loss"]).reshape(*sizes[:2], 1)
        loss = np.broadcast_to(parts.sum() if summed else parts, sizes)
        return {"loss": loss} | {n: np.asarray(a)[None, None, None] for n, a in found.items() if n in got and n != "loss"}

    got = {"loss": np.array([mine["loss"] for mine in arrays]).reshape(sizes).astype(np.float64)}
    for array in sorted(arrays[0].keys() - {"loss"}):
        parts = [mine[array].astype(np.float64) for mine in arrays]
        joined = [parts[i] if parts[i].ndim == 1 else np.concatenate(parts[i : i + tp], axis=1)
                  for i in range(0, len(parts), tp)]
        got[array] = np.concatenate(joined)[None, None, None]

    def hypotheses(failing: set[str], zero: set[str]) -> Iterable[Hypothesis]:
        if zero:
            text = "it is 0 everywhere"
            kind = "zero" if "loss" in zero else "zero-gradient"
            yield Hypothesis(kind, text, lambda: {n: 0 * got[n] for n in zero})
        yield Hypothesis("convention", "the loss is that of the rank's rows, not of all", lambda: on_ranks(answers(), False))
        for kind, text, changes in errors():
            yield Hypothesis(kind, text, lambda changes=changes: on_ranks(answers(**changes)))

    verdict = judge_parameters(name, got, on_ranks(answers()), tolerance, grid, hypotheses, floor=0.0)
    verdict.note = "" if len(got) > 1 else "not returned: the gradient"
    return verdict


def by_rank(rows: list[np.ndarray], of: np.ndarray) -> np.ndarray:
    """[ranks]: the sum of an array [tokens] over the rows of each rank."""
    return np.array([of[mine].sum() for mine in rows])


def spread_rows(rows: list[np.ndarray], of: np.ndarray) -> np.ndarray:
    """[tokens]: of each rank's rows its number of an array [ranks]."""
    found = np.zeros(sum(map(len, rows)))
    for mine, one in zip(rows, of):
        found[mine] = one
    return found
