"""router_loss(router_logits) -> loss

The auxiliary losses of a router with E experts, of which a token has the k with the largest logits:

    L = aux_weight E sum_e f_e P_e + z_weight sum_t w_t lse_t^2 / T,   T = sum_t w_t
    f_e = (tokens that have e) / (k T),   P_e = sum_t w_t softmax(logits_t)_e / T

over the tokens of all ranks, of which those with the weight 0 (padding) count nowhere. A rank has some rows of the logits
[tokens, E], those of a tp group the same; every rank returns L. f has no gradient. Gradients: of tensors by autograd; of
NumPy arrays, a second value is returned, a function of 1 that returns the gradient of the rank's logits. Further
parameters, given where they are taken: top_k, aux_weight, z_weight, weights [tokens], count (T), data_group (all ranks
with other rows), cp_group, dp_group, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .contract import Problem, Tolerance, Verdict
from .decoder import softmax
from .logprob import rows_of
from .losses import by_rank, call_of_loss, judge_loss, spread_rows
from .rank import Here
from .rounding import in_type

USES_LAYOUT, USES_DP = False, True
SPLITS = ("dp", "cp")
NEEDS = ("weights",)
CASES = ("plain", "padding", "empty_rank", "no_z_loss")
EXPERTS, TOKENS, TOP_K = 6, 41, 3


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    rng = np.random.default_rng(len(case))
    order = np.argsort(rng.random((TOKENS, EXPERTS)) + np.linspace(0, 0.7, EXPERTS), axis=1).argsort(axis=1)
    logits = in_type((order + 0.4 * rng.random(order.shape) - 2).astype(np.float32), options.dtype)  # no near ties
    rows, weights = rows_of(TOKENS, options.dp * options.cp), np.ones(TOKENS)
    if case == "padding":
        weights[rng.random(TOKENS) < 0.4] = 0
    if case == "empty_rank":
        weights[rows[-1]] = 0
    if not weights.any():
        return
    settings = {"top_k": TOP_K, "aux_weight": 0.5, "z_weight": 0.0 if case == "no_z_loss" else 0.25}
    grid = {"dp": options.dp, "cp": options.cp, "tp": options.tp}
    pieces = [{"logits": logits[mine], "weights": weights[mine], "offers": settings | {"count": float(weights.sum())}}
              for mine in rows for _ in range(options.tp)]
    needs = {"weights": "some tokens are padding"} if not weights.all() else {}
    yield Problem(case, pieces, needs, partial(_judge, case, logits.astype(np.float64), weights, settings, rows, grid))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    offers = piece["offers"] | {"weights": here.array(piece["weights"])}
    found = call_of_loss(function, lambda leaves: leaves, {"logits": piece["logits"]}, offers, needs, here)
    if "d_logits" in found and here.rank % here.tp:
        found["d_logits"] = found["d_logits"][:, :0]  # all of a tp group have the same
    return found


def answers_of(
    logits: np.ndarray, rows: list[np.ndarray], weights: np.ndarray, top_k: int, aux_weight: float, z_weight: float,
    aux_scale: Any = None, z_scale: Any = None, fractions: np.ndarray | None = None, power: int = 2,
) -> dict[str, np.ndarray]:
    """The part of each rank, and the gradient.

    aux_scale, z_scale: of each rank, in place of 1 / T; fractions [ranks, experts]: each rank's f.
    """
    ranks, experts, total = len(rows), logits.shape[1], weights.sum()
    p, lse = softmax(logits), np.logaddexp.reduce(logits, axis=1)
    f = np.broadcast_to(fraction_of(logits, weights, top_k) if fractions is None else fractions, (ranks, experts))
    aux, z = (np.broadcast_to(1 / total if scale is None else scale, (ranks,)) for scale in (aux_scale, z_scale))
    of_row = np.stack([spread_rows(rows, f[:, e]) for e in range(experts)], axis=1)
    slope = aux_weight * experts * (weights * spread_rows(rows, aux))[:, None] * of_row  # by p
    share = z_weight * weights * spread_rows(rows, z)
    gradient = p * (slope - (slope * p).sum(axis=1, keepdims=True))
    gradient += (share * power * lse ** (power - 1))[:, None] * p
    return {"loss": by_rank(rows, (slope * p).sum(axis=1) + share * lse**power), "d_logits": gradient}


def fraction_of(logits: np.ndarray, weights: np.ndarray, top_k: int) -> np.ndarray:
    chosen = (-logits).argsort(axis=1).argsort(axis=1) < top_k
    return (weights[:, None] * chosen).sum(axis=0) / (top_k * max(1.0, weights.sum()))


def _judge(
    name: str, logits: np.ndarray, weights: np.ndarray, settings: Mapping[str, Any], rows: list[np.ndarray],
    grid: Mapping[str, int], arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    def answers(**changes: Any) -> dict[str, np.ndarray]:
        return answers_of(logits, rows, **({"weights": weights} | dict(settings) | changes))

    return judge_loss(name, arrays, answers, grid, partial(_errors, logits, weights, settings, rows), tolerance)


def _errors(
    logits: np.ndarray, weights: np.ndarray, settings: Mapping[str, Any], rows: list[np.ndarray]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    ranks, own, total, k = len(rows), by_rank(rows, weights), weights.sum(), settings["top_k"]
    inverse = np.divide(1.0, own, out=np.zeros(ranks), where=own > 0)
    local = np.array([fraction_of(logits[mine], weights[mine], k) for mine in rows])
    for scale, what in ((inverse / ranks, "averaged"), (inverse, "summed")):
        yield "own-count", f"every rank has its own loss, of its own fractions and mean, and these are {what}", {
            "fractions": local, "aux_scale": scale, "z_scale": scale}
        yield "own-count", f"every rank divides by its own count, and the means are {what}", {
            "aux_scale": scale, "z_scale": scale}
        yield "own-count", f"the z-loss of every rank is divided by its own count, and these are {what}", {"z_scale": scale}
    yield "own-fractions", "every rank has the fractions of its own tokens", {"fractions": local}
    every = np.ones(len(weights))
    yield "padding", "padding counts", {"weights": every}
    yield "padding", "padding counts in the fractions", {"fractions": fraction_of(logits, every, k)}
    yield "padding", "padding is in the count", {"aux_scale": 1 / len(every), "z_scale": 1 / len(every)}
    for factor in sorted({2.0, float(ranks)} - {1.0}):
        text = f"the auxiliary loss counts {factor:g} times"
        yield "aux-scale", text, {"aux_scale": factor / total}
    yield "aux-scale", "fractions have the sum k, not 1", {"aux_scale": k / total}
    yield "aux-scale", "the factor E is missing", {"aux_scale": 1 / (logits.shape[1] * total)}
    yield "aux-lost", "the auxiliary loss is missing", {"aux_weight": 0.0}
    if settings["z_weight"]:
        yield "z-loss", "the z-loss is missing", {"z_weight": 0.0}
        yield "z-loss", "the z-loss is that of lse, not of its square", {"power": 1}
        yield "z-loss", "the z-loss counts half", {"z_weight": settings["z_weight"] / 2}
    chosen = fraction_of(logits, weights, 1)
    yield "top-k", "fractions are those of the largest logit alone", {"fractions": chosen}
    share = (weights[:, None] * softmax(logits)).sum(axis=0) / total
    yield "top-k", "fractions are means of the probabilities, not of choices", {"fractions": share}
