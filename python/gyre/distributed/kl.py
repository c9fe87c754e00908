"""kl(logits_shard, teacher_shard, group) -> kl

The Kullback-Leibler divergence KL(p || q) of each token over the whole vocabulary, in nats; p is the teacher, q the
student. Every rank of the group (tp) has columns of both logits [tokens, columns], as in the contract logprob, and returns
the divergence [tokens] of all columns, the same on every rank; a column that has p = 0 adds nothing. The teacher has no
gradient. --convention says which one the student has: identity, that of the rank's own values, for ranks that all compute
the same loss of them; sum, those of the values of all ranks, for ranks whose losses are added. A gradient of sum where
identity is right is too large by the group's size. Gradients: of tensors by autograd; of NumPy arrays, a second value is
returned, a function of the gradient [tokens] that returns that of the shard. With cp, ranks have different rows. Further
parameters, given where they are taken: reverse (whether it is KL(q || p)), first (id of the first column), columns (of all
ranks), vocab_size (columns that count; behind them is padding), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Arrays, Finding, Hypothesis, Problem, Tolerance, Verdict, checked_file, keywords
from .logprob import GROWN, columns_of, first_guesses, judge_rows, rows_of
from .rank import Here, differentiated
from .rounding import rounded

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
NEEDS = ("vocab_size", "reverse")
CONVENTIONS = ("identity", "sum")


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file that has a teacher, and one of the other direction, where the divergence is finite."""
    inputs = rounded(checked_file(path), options.dtype).inputs
    if "teacher" not in inputs:
        return
    logits, teacher = np.asarray(inputs["logits"]), np.asarray(inputs["teacher"])
    (tokens, width), vocab = logits.shape, int(inputs.attributes["vocab_size"])
    columns, rows = columns_of(width, options.tp), rows_of(tokens, options.cp)
    d_value = np.asarray(inputs.get("d_value", np.ones(tokens, np.float32)))
    parts = 1 + np.arange(options.tp, dtype=np.float32)[:, None] / 2 * (options.convention == "sum")
    padded = {"vocab_size": f"{width - vocab} columns are padding"} if vocab < width else {}
    for suffix, reverse in (("", False), (" reversed", True))[: 1 + (GROWN[0] <= tokens <= GROWN[1])]:
        problem = {
            "logits": logits.astype(np.float64),
            "teacher": teacher.astype(np.float64),
            "d_kl": d_value * parts,  # [tp, tokens]
            "vocab_size": vocab,
            "reverse": reverse,
            "convention": options.convention,
        }
        expected = values_of(problem, columns)
        if not all(np.isfinite(array).all() for array in expected.values()):
            continue
        pieces = []
        for rank in range(options.cp * options.tp):
            mine, part = rows[rank // options.tp], columns[rank % options.tp]
            offers = {"first": part.start, "columns": width, "vocab_size": vocab, "reverse": reverse}
            piece = {"d_kl": problem["d_kl"][rank % options.tp, mine], "offers": offers}
            pieces.append(piece | {"logits": logits[mine][:, part], "teacher": teacher[mine][:, part]})
        needs = padded | ({"reverse": "the divergence is that of the student from the teacher"} if reverse else {})
        judge = partial(_judge, path.stem + suffix, problem, expected, columns, rows)
        yield Problem(path.stem + suffix, pieces, needs, judge)


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    taken = keywords(function, dict(piece["offers"], mesh=here.mesh), needs)
    teacher = here.array(piece["teacher"])
    return differentiated(
        lambda logits: function(logits, teacher, here.group("tp"), **taken), {"d_kl": ("logits_shard", piece["logits"])},
        "kl", piece["d_kl"].shape, piece["d_kl"], [here.kind, "float32", "float64"], here,
    )


def log_softmax(logits: np.ndarray, real: np.ndarray, columns: list[slice], own: str = "") -> np.ndarray:
    """Of the real columns [columns], -inf of others. own: "maximum", shards subtract their own maximum and add up what
    they have then; "sum", each shard is normalised by itself."""
    x = np.where(real, logits, -np.inf)
    with np.errstate(all="ignore"):
        tops = np.concatenate([np.broadcast_to(x[:, part].max(axis=1, initial=-np.inf, keepdims=True), x[:, part].shape)
                               for part in columns], axis=1)
        x = x - (tops if own else x.max(axis=1, initial=-np.inf, keepdims=True))
        sums = [np.exp(x[:, part]).sum(axis=1, keepdims=True) for part in columns]
        if own != "sum":
            return np.where(real, x - np.log(sum(sums)), -np.inf)
        return np.concatenate([x[:, part] - np.log(one) for part, one in zip(columns, sums)], axis=1)


def values_of(
    problem: Mapping[str, Any], columns: list[slice], own: str = "", own_teacher: str | None = None, **changes: Any
) -> dict[str, np.ndarray]:
    """kl [tokens] and d_kl [tokens, columns] in float64, of a problem with changes; own: as in log_softmax, of the
    student, and of the teacher unless own_teacher says something else."""
    p = {**problem, **changes}
    real = np.arange(p["logits"].shape[1]) < p["vocab_size"]
    log_q = log_softmax(p["logits"], real, columns, own)
    log_p = log_softmax(p["teacher"], real, columns, own if own_teacher is None else own_teacher)
    with np.errstate(all="ignore"):
        first, second = (log_q, log_p) if p["reverse"] else (log_p, log_q)
        gaps = np.where(np.exp(first) > 0, first - second, 0)
        value = (np.exp(first) * gaps).sum(axis=1)
        slope = np.exp(log_q) * (gaps - value[:, None]) if p["reverse"] else np.exp(log_q) - np.exp(log_p)
    return {"kl": value, "d_kl": given(p, columns) * slope}


def given(problem: Mapping[str, Any], columns: list[slice]) -> np.ndarray:
    """The gradient of the values [tokens, columns] that columns have: of the rank's own values, or the sum."""
    d_kl, width = problem["d_kl"].astype(np.float64), problem["logits"].shape[1]
    if problem["convention"] == "sum":
        return np.broadcast_to(d_kl.sum(axis=0)[:, None], (d_kl.shape[1], width))
    return np.concatenate([np.repeat(d[:, None], c.stop - c.start, axis=1) for d, c in zip(d_kl, columns)], axis=1)


def _judge(
    name: str,
    problem: Mapping[str, Any],
    expected: Arrays,
    columns: list[slice],
    rows: list[np.ndarray],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    every = np.ones(len(problem["logits"]), bool)
    errors = partial(_hypotheses, problem, columns, rows, expected)
    unequal = partial(_own_part, problem, columns, tolerance)
    return judge_rows(name, "kl", every, expected, columns, rows, errors, arrays, tolerance, unequal=unequal)


def _own_part(
    problem: Mapping[str, Any], columns: list[slice], tolerance: Tolerance, values: list[np.ndarray]
) -> list[Finding]:
    """Whether values [tp] are those of each rank's own columns."""
    whole = [values_of(problem, columns, own)["kl"] for own in ("", "sum")]
    for text, p in (("its own columns' part of the divergence", whole[0]), ("the divergence of its own columns", whole[1])):
        found = [_part(problem, columns, t, "sum" if p is whole[1] else "") for t in range(len(columns))]
        if all(tolerance.near("kl", got, one) for got, one in zip(values, found)):
            return [Finding("not-summed", f"every tp rank returns {text}: it is not summed over the group", ("kl",))]
    return []


def _part(problem: Mapping[str, Any], columns: list[slice], rank: int, own: str) -> np.ndarray:
    """What the columns of a rank add to the divergence [tokens]."""
    real = np.arange(problem["logits"].shape[1]) < problem["vocab_size"]
    logs = [log_softmax(problem[n], real, columns, own)[:, columns[rank]] for n in ("teacher", "logits")]
    first, second = reversed(logs) if problem["reverse"] else logs
    with np.errstate(all="ignore"):
        return (np.exp(first) * np.where(np.exp(first) > 0, first - second, 0)).sum(axis=1)


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

    def known(kind: str, text: str, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: values_of(problem, columns, **changes))

    def gradient(kind: str, text: str, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: {"d_kl": values_of(problem, columns, **changes)["d_kl"]})

    if problem["convention"] == "identity":
        text = f"gradients are summed over the group again, a factor tp = {tp}: the convention is sum, not identity"
        yield gradient("convention", text, convention="sum")
    else:
        text = "gradients of other ranks are lost: the convention is identity, not sum"
        yield gradient("convention", text, convention="identity")
    exchanged = f"the direction is exchanged: it is KL({'p || q' if problem['reverse'] else 'q || p'})"
    yield known("direction", exchanged, reverse=not problem["reverse"])
    yield gradient("direction", f"{exchanged}, of gradients alone", reverse=not problem["reverse"])
    if problem["vocab_size"] < width:
        yield known("padding", "columns of padding are counted", vocab_size=width)
    text = f"it is a mean over {problem['vocab_size']} columns, not a sum"
    mean = {n: np.asarray(expected[n]) / problem["vocab_size"] for n in expected}
    yield Hypothesis("mean", text, lambda: mean)
    yield from first_guesses("kl", got, expected, failing, len(rows), tp, "a negative divergence")
    for own, kind, text in (("maximum", "local-maximum", "subtracts the maximum of its own columns: it is not reduced"),
                            ("sum", "local-softmax", "normalises its own columns by themselves")) if tp > 1 else ():
        yield known(kind, f"every tp rank {text}", own=own)
        yield known(kind, f"every tp rank {text}, for the student alone", own=own, own_teacher="")
        yield known(kind, f"every tp rank {text}, for the teacher alone", own_teacher=own)
        yield gradient(kind, f"every tp rank {text}, in gradients", own=own)
    real = np.arange(width) < problem["vocab_size"]
    log_q, log_p = (log_softmax(problem[n], real, columns) for n in ("logits", "teacher"))
    first = log_q if problem["reverse"] else log_p
    lost = np.asarray(expected["kl"]) - (np.exp(first) * np.where(np.exp(first) > 0, first, 0)).sum(axis=1)
    what = "student" if problem["reverse"] else "teacher"
    yield Hypothesis("entropy-lost", f"it is a cross entropy: the entropy of the {what} is missing", lambda: {"kl": lost})
    yield known("label-shift", "row i has the teacher of row i + 1", teacher=np.roll(problem["teacher"], -1, axis=0))
    yield Hypothesis("teacher-lost", "the gradient lacks the teacher: it is the student's softmax",
                     lambda: {"d_kl": given(problem, columns) * np.exp(log_q)})
    yield Hypothesis("base", "logarithms are to the base 2",
                     lambda: {n: np.asarray(expected[n]) / np.log(2) for n in failing})
    yield gradient("no-d-value", "the gradient takes 1 for the gradient of every value", d_kl=np.ones_like(problem["d_kl"]))
