"""Divergence from a teacher over its largest ids, with all other ids as one."""

from typing import Any

import numpy as np

from .. import checks
from . import Answer, Golden, Operation, Rows

LEAST_TAIL = 1e-6


def _check(values: Any, ids: np.ndarray) -> np.ndarray:
    name = "teacher_topk_logprobs"
    array = checks.reals(name, values, *ids.shape)
    checks.every(name, array, array <= 0, "at most 0, as log-probabilities are")
    for row, (own, log_p) in enumerate(zip(ids, array)):
        listed = own[log_p > -np.inf]
        if len(np.unique(listed)) < len(listed):
            raise ValueError(f"ids of row {row} have an id twice; a place to leave out has a value of -inf")
        if np.exp(log_p.astype(np.float64)).sum() > 1 + 1e-3:
            raise ValueError(f"{name} of row {row} are probabilities whose sum is above 1")
    return array


def _define(rows: Rows) -> dict[str, np.ndarray]:
    log_p = rows.inputs["teacher_topk_logprobs"].astype(np.float64)
    q = np.exp(rows.plain_logp)
    value, slope = np.zeros(len(q)), np.zeros(q.shape)
    for t, ids in enumerate(rows.ids):
        listed = log_p[t] > -np.inf
        own, p = ids[listed], np.exp(log_p[t][listed])
        is_other = np.ones(q.shape[1], bool)
        is_other[own] = False
        rest, other = 1 - p.sum(), q[t][is_other].sum()
        rest = rest if rest >= LEAST_TAIL else 0.0
        some = p > 0
        value[t] = (p[some] * (log_p[t][listed][some] - rows.plain_logp[t][own[some]])).sum()
        value[t] += rest * np.log(rest / max(other, LEAST_TAIL)) if rest else 0
        is_least = other < LEAST_TAIL
        goal = q[t] * (0 if is_least or not rest else rest / other)
        goal[own] = p
        slope[t] = rows.g[t] * (q[t] * (p.sum() if is_least else 1) - goal)
    return {"teacher_topk_kl": value, "d_teacher_topk_kl": slope}


def _problem(rng, full):
    problem = full(rng, 6, 31, 4)
    teacher = problem["teacher"].astype(np.float64)
    log_p = teacher - np.log(np.exp(teacher).sum(axis=1, keepdims=True))
    ids = np.argsort(-log_p, axis=1, kind="stable")[:, :4].astype(np.int32)
    of_ids = np.take_along_axis(log_p, ids, axis=1).astype("f4")
    of_ids[4, 2:] = -np.inf  # a shorter list
    of_ids[5] = np.float32(np.log(0.25))  # nothing is left
    del problem["teacher"]
    return problem | {"ids": ids, "teacher_topk_logprobs": of_ids}


OPERATION = Operation(
    arrays={
        "teacher_topk_kl": Answer("T", ("teacher_topk_logprobs",)),
        "d_teacher_topk_kl": Answer("TV", ("teacher_topk_logprobs",)),
    },
    inputs={"teacher_topk_logprobs": _check},
    define=_define,
    golden=Golden(
        "a teacher's four largest ids and the rest as one; a shorter list, and one that leaves nothing",
        "a truncated divergence, which may be negative and forgets the rest (verl-project/verl #7856); a "
        "rest from the student's ids; no gradient of the rest",
        _problem,
    ),
)
