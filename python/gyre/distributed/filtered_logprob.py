"""filtered_logprob(logits_shard, targets, group) -> logprob

The contract logprob under the filter of a sampler: the log-probability of each target [tokens] among the
ids that the filter keeps; -inf of a target that it drops, and of one that no column has, whose gradients
are not compared. The filter keeps the top_k largest logits, and all that equal the last of them (0: all);
of these those with at least min_p of the largest probability; of what is left, renormalised, those before
which (larger first, of equals higher ids first) lies less probability than top_p. Logits are divided by
the temperature first. Every rank of the group (tp) has columns of the logits, as in the contract logprob,
and the filter is over all of them. Gradients: of tensors by autograd; of NumPy arrays, a second value is
returned, a function of the gradient [tokens] that returns that of the shard. Further parameters, given
where they are taken: temperature, top_k, top_p, min_p (numbers, or [tokens, 1]), first (id of the first
column), columns (of all ranks), vocab_size (columns that count; behind them is padding), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..reference import survivors
from .contract import Arrays, Hypothesis, Problem, Tolerance, Verdict
from .logprob import NEUTRAL, call_of_rows, first_guesses, judge_rows, row_problems
from .logprob import values_of as logprobs_of
from .rank import Here

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
NEEDS = (*NEUTRAL, "vocab_size")
NAME, GRADIENT = "filtered_logprob", "d_filtered_logprob"


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file that has filtered log-probabilities."""
    yield from row_problems(path, options, NAME, NEEDS, _judge)


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    return call_of_rows(function, piece, needs, here, NAME)


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
    kept = np.isfinite(expected[NAME])
    return judge_rows(name, NAME, kept, expected, columns, rows, errors, arrays, tolerance, defined=kept)


def kept_by(problem: Mapping[str, Any], **changes: Any) -> np.ndarray:
    """[tokens, columns] booleans: what the filter keeps."""
    p = {**problem, **changes}
    found = np.zeros(p["logits"].shape, bool)
    if len(found):
        given = (p[name] for name in ("top_k", "top_p", "temperature", "min_p"))
        limits = (np.asarray(x).reshape(-1) if np.ndim(x) else x for x in given)
        found[:, : p["vocab_size"]] = survivors(p["logits"][:, : p["vocab_size"]], *limits)
    return found


def values_of(problem: Mapping[str, Any], kept: np.ndarray, softmax: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The value and its gradient in float64; kept: ids that the filter keeps; softmax: those of the sum (kept)."""
    targets = problem["targets"]
    known = (targets >= 0) & (targets < problem["vocab_size"])
    known[known] = kept[np.flatnonzero(known), targets[known]]
    found = logprobs_of({**problem, "targets": np.where(known, targets, -1)}, kept=kept if softmax is None else softmax)
    gradient = np.where(kept if softmax is None else softmax, found["d_logprob"], 0)
    return {NAME: np.where(known, found["logprob"], -np.inf), GRADIENT: gradient}


def _hypotheses(
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    expected: Arrays,
    got: Arrays,
    failing: set[str],
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    tp, width, targets = len(columns), problem["logits"].shape[1], problem["targets"]
    right, asked = kept_by(problem), np.isfinite(expected[NAME])[:, None]

    def known(
        kind: str, text: str, kept: np.ndarray = right, softmax: np.ndarray | None = None, **changes: Any
    ) -> Hypothesis:
        def arrays() -> Arrays:
            found = values_of(problem | changes, kept, softmax)
            return found | {GRADIENT: np.where(asked, found[GRADIENT], expected.get(GRADIENT, 0))}

        return Hypothesis(kind, text, arrays)

    yield from first_guesses(NAME, got, expected, failing, len(rows), tp, "a loss")
    every = np.broadcast_to(np.arange(width) < problem["vocab_size"], right.shape)
    yield known("filter-ignored", "the filter is ignored", kept=every)
    yield known("not-renormalised", "the softmax is over all ids, not over those that are kept", softmax=every)
    yield from _wrong_filters(known, problem)
    for step in (-1, 1):
        text = f"shifted labels: row i has the target of row i {'+' if step < 0 else '-'} 1"
        yield known("label-shift", text, targets=np.roll(targets, step))
    if problem["vocab_size"] < width:
        wide = kept_by(problem, vocab_size=width)
        yield known("padding", "columns of padding are counted", kept=wide, vocab_size=width)
    if tp > 1:
        text = "every shard is filtered by itself"
        yield known("local-filter", text, kept=_by_shard(problem, columns))
        owner = np.searchsorted([s.stop for s in columns], np.arange(width), side="right")
        for rank in range(tp):
            text = f"a dropped shard: the softmax lacks the columns of tp rank {rank}"
            yield known("dropped-shard", text, softmax=right & (owner != rank))
            text = f"the softmax is over the columns of tp rank {rank} alone"
            yield known("local-softmax", text, softmax=right & (owner == rank))
    dropped = np.isneginf(expected[NAME])
    text = "a target that the filter drops has a finite value"
    yield Hypothesis("dropped-target", text, lambda: {NAME: np.where(dropped, got[NAME], expected[NAME])})


def _wrong_filters(known: Callable[..., Hypothesis], problem: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Filters that lack a limit, or have it elsewhere."""
    given = {name: np.any(problem[name] != neutral) for name, neutral in NEUTRAL.items()}
    for name in ("top_k", "top_p", "min_p"):
        if given[name]:
            kept = kept_by(problem, **{name: NEUTRAL[name]})
            yield known("limit-ignored", f"{name} is ignored", kept=kept)
    if given["temperature"]:
        before = kept_by(problem, temperature=1.0)
        yield known("temperature", "the temperature is ignored", kept=before, temperature=1.0)
        yield known("temperature", "limits are those of logits before the temperature", kept=before)
    if given["top_k"]:
        ranked = np.argsort(np.argsort(-problem["logits"], axis=1, kind="stable"), axis=1)
        exact = (ranked < problem["top_k"]) | (np.asarray(problem["top_k"]) == 0)
        text = "top_k keeps exactly k: logits that equal the last of them are lost"
        yield known("ties", text, kept=kept_by(problem) & exact)
    if given["top_p"] and (given["top_k"] or given["min_p"]):
        alone = kept_by(problem, top_k=0, min_p=0.0) & kept_by(problem, top_p=1.0)
        yield known("order", "top_p is of all ids, not of those that the other limits leave", kept=alone)


def _by_shard(problem: Mapping[str, Any], columns: list[slice]) -> np.ndarray:
    """What is kept if each shard is filtered as if it were the whole vocabulary."""
    parts = []
    for part in columns:
        real = max(0, min(part.stop, problem["vocab_size"]) - part.start)
        of_part = {"logits": problem["logits"][:, part], "vocab_size": real}
        parts.append(kept_by(problem, **of_part) if real else np.zeros(of_part["logits"].shape, bool))
    return np.concatenate(parts, axis=1)
