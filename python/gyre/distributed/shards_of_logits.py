"""Known errors of log-probabilities in one shard of the logits: of its sum, its target, its gradient."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .contract import Arrays, Finding, Hypothesis, Tolerance


def shard_errors(
    problem: Mapping[str, Any], columns: list[slice], expected: Arrays, known: Callable[..., Hypothesis]
) -> Iterator[Hypothesis]:
    """Errors of one rank of tp, or of each. known(kind, text, **changes): a hypothesis of a changed problem."""
    logits, temperature, column = problem["logits"], problem["temperature"], np.arange(problem["logits"].shape[1])
    for t, part in enumerate(columns if len(columns) > 1 else ()):
        mine, where = (column >= part.start) & (column < part.stop), f"on tp rank {t}"
        yield known("repeated", f"the rank's sum counts twice, {where}", times=np.where(mine, 2.0, 1.0))
        for what, factor in _temperatures(temperature):
            text = f"the temperature {what}, {where}"
            with np.errstate(invalid="ignore"):
                changed = known("temperature", text, logits=np.where(mine, logits * factor, logits))
            yield changed

            def with_slope(changed: Hypothesis = changed, mine: np.ndarray = mine, factor: Any = factor) -> Arrays:
                found = changed.arrays()
                return found | {"d_logprob": np.where(mine, found["d_logprob"] * factor, found["d_logprob"])}

            yield Hypothesis(changed.kind, changed.text, with_slope)
    ends = [part.stop - 1 for part in columns if part.stop > part.start]
    starts = [part.start for part in columns if part.stop > part.start]
    for what, edge in (("last", ends), ("first", starts)):
        for places in [edge, *([e] for e in edge if len(edge) > 1)]:
            where = "of every shard" if len(places) == len(edge) else f"of tp rank {edge.index(places[0])}"
            yield known("column-lost", f"the {what} column {where} is not in the sum", kept=~np.isin(column, places))
            yield from _unclaimed(problem, expected, np.isin(problem["targets"], places), f"the {what} column {where}")
    yield from _of_target(problem, columns, expected)
    yield from _of_gradient(problem, columns, expected)


def _temperatures(temperature: Any) -> Iterator[tuple[str, Any]]:
    """What a wrong temperature does, and factors of logits that are to be divided by the right one."""
    if np.any(temperature != 1):
        yield "counts twice", 1 / temperature
        yield "is ignored", temperature
        yield "multiplies logits", temperature**2


def _unclaimed(problem: Mapping[str, Any], expected: Arrays, rows: np.ndarray, text: str) -> Iterator[Hypothesis]:
    """Targets that no rank has, or that two have."""
    if not rows.any():
        return
    value, slope = np.asarray(expected["logprob"]), np.asarray(expected.get("d_logprob", np.zeros(0)))
    raw = _scores(problem)
    top = raw.max(axis=1, initial=-np.inf)
    target = raw[np.arange(len(raw)), np.where(rows, problem["targets"], 0)]
    with np.errstate(invalid="ignore"):
        lost = {
            "0": np.zeros(len(value)),
            "minus the log of the sum": value - target,
            "that of the largest logit": value - target + top,
        }
    for what, other in lost.items():
        found = {"logprob": np.where(rows, other, value)}
        yield Hypothesis(
            "lost-target", f"no rank has a target in {text}: its value is {what}", lambda found=found: found
        )
        if slope.size:
            both = found | {"d_logprob": np.where(rows[:, None], 0, slope)}
            yield Hypothesis(
                "lost-target",
                f"no rank has a target in {text}: its value is {what}, its gradient 0",
                lambda both=both: both,
            )


def _scores(problem: Mapping[str, Any]) -> np.ndarray:
    real = np.arange(problem["logits"].shape[1]) < problem["vocab_size"]
    return np.where(real, problem["logits"], -np.inf) / problem["temperature"]


def _of_target(problem: Mapping[str, Any], columns: list[slice], expected: Arrays) -> Iterator[Hypothesis]:
    """The target's logit, read in another column or scaled otherwise than the sum; gradients are right."""
    targets, value, x = problem["targets"], np.asarray(expected["logprob"]), _scores(problem)
    if not x.shape[1]:
        return
    is_known = (targets >= 0) & (targets < problem["vocab_size"])
    at = np.where(is_known, targets, 0)
    here, row = x[np.arange(len(x)), at], np.arange(len(x))
    for what, factor in _temperatures(problem["temperature"]):
        with np.errstate(invalid="ignore"):
            other = value + np.where(is_known, here * np.reshape(factor, -1) - here, 0)
        text = f"the temperature {what} in the target's logit, the sum is right"
        yield Hypothesis("temperature", text, lambda other=other: {"logprob": other})
    for step, text in ((1, "one column on"), (-1, "one column before")):
        for t in [None, *range(len(columns) if len(columns) > 1 else 0)]:
            moved = at.copy()
            for r, part in enumerate(columns):
                mine = (at >= part.start) & (at < part.stop) & (t in (None, r))
                moved[mine] = np.clip(at[mine] + step, part.start, part.stop - 1)
            with np.errstate(invalid="ignore"):
                other = np.where(is_known, value + x[row, moved] - here, value)
            where = "" if t is None else f", on tp rank {t}"
            yield Hypothesis(
                "target-column", f"the target's logit is read {text}{where}", lambda other=other: {"logprob": other}
            )


def _of_gradient(problem: Mapping[str, Any], columns: list[slice], expected: Arrays) -> Iterator[Hypothesis]:
    """The softmax and the one-hot of the gradient."""
    if "d_logprob" not in expected:
        return
    targets, x, gradient = problem["targets"], _scores(problem), np.asarray(expected["d_logprob"], np.float64)
    known = (targets >= 0) & (targets < problem["vocab_size"])
    d = np.where(known, problem["d_value"], 0)[:, None] / problem["temperature"]
    hot = np.zeros(x.shape)
    hot[np.flatnonzero(known), targets[known]] = 1
    soft = d * hot - gradient
    with np.errstate(all="ignore"):
        own_top, own_sum = np.zeros(x.shape), np.ones(x.shape)
        top = x.max(axis=1, initial=-np.inf, keepdims=True)
        moved = np.zeros(x.shape)
        for part in columns:
            mine = x[:, part]
            own = mine.max(axis=1, initial=-np.inf, keepdims=True)
            own_top[:, part] = np.where(np.isfinite(own), top - own, 0)
            own_sum[:, part] = np.exp(x - top).sum(axis=1, keepdims=True) / np.exp(mine - top).sum(
                axis=1, keepdims=True
            )
            if part.stop > part.start:
                moved[:, part.start + 1 : part.stop] = hot[:, part.start : part.stop - 1]
                moved[:, part.stop - 1] += hot[:, part.stop - 1]
        for kind, text, found in (
            ("one-hot", "the gradient lacks the one of the target", -soft),
            ("one-hot", "the gradient has the one of the target one column on", d * moved - soft),
            ("softmax-lost", "the gradient lacks the softmax", d * hot),
            (
                "local-softmax",
                "the softmax of the gradient has the shard's own maximum",
                d * hot - soft * np.exp(own_top),
            ),
            ("local-softmax", "the softmax of the gradient has the shard's own sum", d * hot - soft * own_sum),
        ):
            yield Hypothesis(kind, text, lambda found=found: {"d_logprob": found})


def own_maximum(
    problem: Mapping[str, Any], columns: list[slice], tolerance: Tolerance, values: list[np.ndarray]
) -> list[Finding]:
    """Whether values [tp] differ because some rank subtracts the maximum of its own columns."""
    x, targets = _scores(problem), problem["targets"]
    known = (targets >= 0) & (targets < problem["vocab_size"])
    with np.errstate(all="ignore"):
        top = x.max(axis=1, initial=-np.inf)
        own = [x[:, part].max(axis=1, initial=-np.inf) for part in columns]
        at = x[np.arange(len(x)), np.where(known, targets, 0)] if x.shape[1] else np.zeros(len(x))
        for wrong in [range(len(columns)), *([t] for t in range(len(columns)))]:
            tops = [own[t] if t in wrong else top for t in range(len(columns))]
            total = sum(np.exp(x[:, part] - one[:, None]).sum(axis=1) for part, one in zip(columns, tops))
            if all(
                tolerance.near("logprob", got, np.where(known, at - one - np.log(total), 0))
                for got, one in zip(values, tops)
            ):
                who = "every tp rank" if len(wrong) > 1 else f"tp rank {wrong[0]}"
                return [
                    Finding(
                        "local-maximum",
                        f"{who} subtracts the maximum of its own columns: it is not reduced",
                        ("logprob",),
                    )
                ]
    return []
