"""Cross entropy of the target, times (1 - p) to a power."""

import numpy as np

from . import Answer, Golden, Operation, Parameter, Rows


def _define(rows: Rows) -> dict[str, np.ndarray]:
    gamma = rows.parameters["focal_gamma"]
    of_target = np.where(rows.hits > 0, rows.logp, 0).sum(axis=1, keepdims=True)
    p, other = np.exp(of_target), -np.expm1(of_target)
    weight = other**gamma
    by_logp = -weight
    if gamma > 0:
        likely = np.where(other > 0, other, 1) ** (gamma - 1) * (other > 0)
        by_logp = by_logp + gamma * likely * p * np.where(p > 0, of_target, 0)
    value = np.where(weight > 0, -weight * np.where(weight > 0, of_target, 0), 0)
    slope = rows.g * by_logp * (rows.hits - np.exp(rows.logp)) / rows.heat
    return {
        "focal_loss": np.where(rows.has_target, value, 0)[:, 0],
        "d_focal_loss": np.where(rows.has_target, slope, 0),
    }


def _problem(rng, full):
    logits = np.zeros((6, 17), "f4")
    logits[0, 3], logits[1, 4], logits[2, 5] = 24, -24, 2
    logits[3:] = full(rng, 3, 17, 2)["logits"]
    targets = np.array([3, 4, 5, 16, -1, 0], np.int32)
    return full(rng, 6, 17, 2, logits=logits, targets=targets, focal_gamma=1.5)


OPERATION = Operation(
    arrays={"focal_loss": Answer("T"), "d_focal_loss": Answer("TV")},
    parameters={"focal_gamma": Parameter(2, 0, 16)},
    define=_define,
    golden=Golden(
        "targets that are nearly certain, nearly impossible, and neither; an exponent of 1.5",
        "a gradient without that of the weight; 1 - p that rounds to 0; weights by another id's p",
        _problem,
    ),
)
