"""entropy(logits_shard, group) -> entropy

Every rank of the group (tp) has columns of the logits [tokens, columns], as in the contract logprob. It
returns the entropy of each row [tokens], -sum p log p in nats, the same on every rank; a logit of -inf
has p = 0 and adds nothing. Gradients: of tensors by autograd; of NumPy arrays, a second value is
returned, a function of the gradient [tokens] that returns that of the shard. With cp, ranks have
different rows. Further parameters, given where they are taken: first (id of the first column), columns
(of all ranks), temperature (a number, or [tokens, 1]), vocab_size (columns that count; behind them is
padding), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Arrays, Hypothesis, Problem, Tolerance, Verdict
from .logprob import call_of_rows, first_guesses, judge_rows, row_problems
from .rank import Here

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
NEEDS = ("temperature", "vocab_size")


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file that has entropies."""
    yield from row_problems(path, options, "entropy", NEEDS, _judge)


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    return call_of_rows(function, piece, needs, here, "entropy", takes_targets=False)


def _judge(
    name: str,
    problem: Mapping[str, Any],
    expected: Arrays,
    columns: list[slice],
    rows: list[np.ndarray],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    errors = partial(_hypotheses, problem, columns, rows, expected)
    every = np.ones(len(problem["targets"]), bool)
    return judge_rows(name, "entropy", every, expected, columns, rows, errors, arrays, tolerance)


def softmax_of(problem: Mapping[str, Any], kept: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """p and log p of every column, both 0 where p is; kept [columns]: those of the softmax."""
    real = np.arange(problem["logits"].shape[1]) < problem["vocab_size"]
    counted = real if kept is None else real & kept
    with np.errstate(all="ignore"):
        x = np.where(counted, problem["logits"], -np.inf) / problem["temperature"]
        top = x.max(axis=1, initial=-np.inf, keepdims=True)
        weights = np.where(counted, np.exp(x - top), 0)
        total = weights.sum(axis=1, keepdims=True)
        share = np.where(total > 0, weights / total, 0)
        return share, np.where(share > 0, x - top - np.log(total), 0)


def values_of(problem: Mapping[str, Any], kept: np.ndarray | None = None, **changes: Any) -> dict[str, np.ndarray]:
    """entropy and d_entropy in float64, of a problem with changes; kept [columns]: those of the softmax."""
    p = {**problem, **changes}
    share, log_p = softmax_of(p, kept)
    value = -(share * log_p).sum(axis=1)
    slope = -share * (log_p + value[:, None]) / p["temperature"]
    return {"entropy": value, "d_entropy": p["d_value"][:, None] * slope}


def _hypotheses(
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    expected: Arrays,
    got: Arrays,
    failing: set[str],
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    tp, width = len(columns), problem["logits"].shape[1]
    owner = np.searchsorted([s.stop for s in columns], np.arange(width), side="right")

    def known(kind: str, text: str, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: values_of(problem, **changes))

    yield from first_guesses("entropy", got, expected, failing, len(rows), tp, "sum p log p")
    if np.any(problem["temperature"] != 1):
        yield known("temperature", "the temperature is ignored", temperature=1.0)
        lost = "the gradient lacks 1 / temperature"
        gradient = np.asarray(expected.get("d_entropy", 0)) * problem["temperature"]
        yield Hypothesis("temperature", lost, lambda: {"d_entropy": gradient})
    if problem["vocab_size"] < width:
        yield known("padding", "columns of padding are counted", vocab_size=width)
    if tp > 1:
        alone = [values_of(problem, kept=owner == rank) for rank in range(tp)]
        text = "a sum of the entropies of the shards, each by itself"
        yield Hypothesis("local-softmax", text, lambda: {n: sum(one[n] for one in alone) for n in alone[0]})
        for rank in range(tp):
            text = f"the softmax is over the columns of tp rank {rank} alone"
            yield known("local-softmax", text, kept=owner == rank)
            text = f"a dropped shard: the softmax lacks the columns of tp rank {rank}"
            yield known("dropped-shard", text, kept=owner != rank)
    yield Hypothesis(
        "base", "logarithms are to the base 2", lambda: {n: np.asarray(expected[n]) / np.log(2) for n in failing}
    )
    text = "the gradient takes 1 for the gradient of every value"
    yield known("no-d-value", text, d_value=np.ones(len(problem["targets"])))
    share, log_p = softmax_of(problem)
    slope = -problem["d_value"][:, None] * share / problem["temperature"]
    text = "the gradient is that of sum p log p by p: the part that keeps the sum of p is missing"
    yield Hypothesis("gradient", text, lambda: {"d_entropy": slope * (log_p + 1)})
