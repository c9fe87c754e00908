"""The square of the log-sum-exp of a row."""

import numpy as np

from . import Answer, Golden, Operation, Rows


def _define(rows: Rows) -> dict[str, np.ndarray]:
    x = rows.z / rows.heat
    top = x.max(axis=1, keepdims=True)
    lse = top + np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    size = rows.g * 2 * lse
    beyond = np.maximum(abs(size), abs(size / rows.heat)) > np.finfo(np.float32).max  # then there is none
    slope = np.where(beyond, np.nan, size * np.exp(x - lse) / rows.heat)
    return {"z_loss": lse[:, 0] ** 2, "d_z_loss": slope}


def _problem(rng, full):
    problem = full(rng, 5, 26, 2, temperature=1.5)
    problem["logits"][[1, 2]] += np.array([[24], [-24]], "f4")
    return problem


OPERATION = Operation(
    arrays={"z_loss": Answer("T"), "d_z_loss": Answer("TV")},
    define=_define,
    golden=Golden(
        "the square of log-sum-exps, of which one is far above 0 and one far below",
        "a log-sum-exp without the largest logit, of a rank's ids alone, or without the temperature",
        _problem,
    ),
)
