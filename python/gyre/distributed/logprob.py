"""logprob(logits_shard, targets, group) -> logprob

Every rank of the group (tp) has columns of the logits [tokens, columns]: those of torch.chunk, which
may be fewer on the last ranks, and all targets [tokens], ids of the whole vocabulary. It returns the
log-probability of each target [tokens], the same on every rank; 0 of a target that no column has, whose
gradient is not compared. Gradients: of tensors by autograd; of NumPy arrays, a second value is returned, a
function of the gradient [tokens] that returns that of the shard (padding has 0). With cp, ranks have different rows.
Further parameters, given where they are taken: first (id of the first column), columns (of all
ranks), temperature (a number, or [tokens, 1]), vocab_size (columns that count; behind them is padding),
mesh.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
    Finding,
    Hypothesis,
    Problem,
    Tolerance,
    Verdict,
    checked_file,
    factors,
    judged,
    keywords,
    not_numbers,
)
from .parts import on_one_rank
from .rank import Here, differentiated
from .rounding import rounded
from .shards_of_logits import own_maximum, shard_errors

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
NEEDS = ("temperature", "vocab_size")
GROWN = (6, 64)  # rows of files that have further cases of some contracts: fewer could not be dealt to ranks and microbatches
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # what changes nothing


def columns_of(width: int, tp: int) -> list[slice]:
    """Those of torch.chunk: equal parts, rounded up; the last may be short or empty."""
    part = -(-width // tp) if width else 0
    return [slice(min(r * part, width), min((r + 1) * part, width)) for r in range(tp)]


def rows_of(tokens: int, cp: int) -> list[np.ndarray]:
    return np.array_split(np.arange(tokens), cp)


def filter_of(inputs: Any, name: str) -> Any:
    """What a file says of a filter, or of the temperature: a number, or one of each token [tokens, 1]."""
    if name in inputs:
        return np.asarray(inputs[name])[:, None]
    return inputs.attributes.get(name, NEUTRAL[name])


def temperature_of(inputs: Any) -> Any:
    """A number, or [tokens, 1]."""
    return filter_of(inputs, "temperature")


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file of log-probabilities."""
    yield from row_problems(path, options, "logprob", NEEDS, _judge)


def row_problems(
    path: Path, options: Any, value: str, needed: Sequence[str], judge: Callable[..., Verdict]
) -> Iterator[Problem]:
    """The case of a file that has answers for a value of each row; needed: parameters that it may need.

    judge(name, problem, expected, columns, rows, arrays, tolerance) gives the verdict.
    """
    file = rounded(checked_file(path), options.dtype)
    inputs, attributes = file.inputs, file.inputs.attributes
    logits, targets = np.asarray(inputs["logits"]), np.asarray(inputs["targets"]).astype(np.int64)
    if value not in file.reference:
        return
    vocab = int(attributes["vocab_size"])
    given = {name: filter_of(inputs, name) for name in NEUTRAL if name in needed}
    needs = {n: f"{n} is {x:g}" if np.ndim(x) == 0 else f"each token has a {n}"
             for n, x in given.items() if np.ndim(x) > 0 or x != NEUTRAL[n]}
    if vocab < logits.shape[1]:
        needs["vocab_size"] = f"{logits.shape[1] - vocab} columns are padding"
    of_all = inputs.get("d_value", np.ones(len(targets), np.float32))
    d_value = np.asarray(inputs.get("d_entropies", of_all) if value == "entropy" else of_all)
    columns, rows = columns_of(logits.shape[1], options.tp), rows_of(len(targets), options.cp)
    pieces = []
    for rank in range(options.cp * options.tp):
        mine, part = rows[rank // options.tp], columns[rank % options.tp]
        offers = {"first": part.start, "columns": logits.shape[1], "vocab_size": vocab}
        offers |= {name: x[mine] if np.ndim(x) > 0 else x for name, x in given.items()}
        pieces.append(
            {"logits": logits[mine][:, part], "targets": targets[mine], "d_value": d_value[mine], "offers": offers}
        )
    expected = {n: np.asarray(file.reference[n]) for n in (value, f"d_{value}") if n in file.reference}
    if f"d_{value}" in expected:  # the file has the columns that count; padding has a gradient of 0
        padding = logits.shape[1] - expected[f"d_{value}"].shape[1]
        expected[f"d_{value}"] = np.pad(expected[f"d_{value}"], ((0, 0), (0, padding)))
    problem = {
        "logits": logits.astype(np.float64),
        "targets": targets,
        "d_value": d_value,
        "temperature": 1.0,
        "vocab_size": vocab,
    }
    yield Problem(path.stem, pieces, needs, partial(judge, path.stem, problem | given, expected, columns, rows))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    return call_of_rows(function, piece, needs, here, "logprob")


def call_of_rows(
    function: Callable[..., Any],
    piece: Mapping[str, Any],
    needs: Mapping[str, str],
    here: Here,
    value: str,
    takes_targets: bool = True,
) -> dict[str, np.ndarray]:
    """Calls a function that returns a value of each row."""
    of_tokens = {
        n: here.array(x) if x.dtype.kind == "f" else here.ids(x)
        for n, x in piece["offers"].items()
        if isinstance(x, np.ndarray)
    }
    taken = keywords(function, {**piece["offers"], **of_tokens, "mesh": here.mesh}, needs)
    asked = (here.ids(piece["targets"]),) if takes_targets else ()
    return differentiated(
        lambda logits: function(logits, *asked, here.group("tp"), **taken),
        {f"d_{value}": ("logits_shard", piece["logits"])}, value, piece["targets"].shape, piece["d_value"],
        [here.kind, "float32", "float64"], here,
    )


def disagreeing(
    arrays: list[dict[str, np.ndarray]], name: str, cp: int, tp: int, tolerance: Tolerance
) -> list[Finding]:
    """Ranks of one tp group that return different values."""
    for c in range(cp):
        mine = [arrays[c * tp + t][name] for t in range(tp)]
        for t in range(1, tp):
            if not tolerance.near(name, mine[t], mine[0]):
                pair = f"ranks {c * tp} and {c * tp + t}"
                text = f"{pair} return different values of {name}; all of a tp group must be the same"
                return [Finding("ranks-disagree", text, (name,), (c * tp, c * tp + t))]
    return []


def _judge(
    name: str,
    problem: Mapping[str, Any],
    expected: Arrays,
    columns: list[slice],
    rows: list[np.ndarray],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    known = (problem["targets"] >= 0) & (problem["targets"] < problem["vocab_size"])

    errors = partial(_hypotheses, problem, columns, rows, expected)
    unequal = partial(own_maximum, problem, columns, tolerance)
    return judge_rows(name, "logprob", known, expected, columns, rows, errors, arrays, tolerance, unequal=unequal)


def first_guesses(
    value: str, got: Arrays, expected: Arrays, failing: set[str], cp: int, tp: int, sign: str
) -> Iterator[Hypothesis]:
    """Known errors of any value of rows: zeros, factors and the sign, of which `sign` says what it is."""
    if zero := {n for n in failing if not got[n].any()}:
        text = f"{', '.join(sorted(zero))} is 0 everywhere"
        kind = "zero-gradient" if zero == {f"d_{value}"} else "zero"
        yield Hypothesis(kind, text, lambda: {n: np.zeros(got[n].shape) for n in zero})
    yield from factors(got, expected, failing, {"tp": tp, "cp": cp})
    yield Hypothesis("sign", f"the sign is that of {sign}", lambda: {n: -np.asarray(expected[n]) for n in failing})


def judge_rows(
    name: str,
    value: str,
    asked: np.ndarray,
    expected: Arrays,
    columns: list[slice],
    rows: list[np.ndarray],
    errors: Callable[[Arrays, set[str]], Iterable[Hypothesis]],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
    defined: np.ndarray | None = None,
    unequal: Callable[[list[np.ndarray]], list[Finding]] | None = None,
) -> Verdict:
    """The verdict of values of rows and their gradients, which count in the rows `asked` [tokens].

    unequal: says what is known of values [tp] that differ between ranks.

    defined [tokens]: rows whose gradient exists; in others NaN is no error.
    """
    cp, tp, gradient = len(rows), len(columns), f"d_{value}"

    def counted(rank: int, array: str, values: np.ndarray) -> np.ndarray:
        return values if array == value or defined is None else values[defined[rows[rank // tp]]]

    broken = not_numbers(arrays, counted)
    if not broken and (broken := disagreeing(arrays, value, cp, tp, tolerance)) and unequal:
        broken = unequal([np.concatenate([arrays[c * tp + t][value] for c in range(cp)]) for t in range(tp)]) or broken
    if broken:
        return Verdict(name).fail(*broken)
    got = {value: np.concatenate([arrays[c * tp][value] for c in range(cp)])}
    if all(gradient in mine for mine in arrays):
        parts = [np.concatenate([arrays[c * tp + t][gradient] for t in range(tp)], axis=1) for c in range(cp)]
        got[gradient] = np.where(asked[:, None], np.concatenate(parts), expected.get(gradient, 0))

    def places(array: str, bad: np.ndarray) -> str:
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        c = next(i for i, mine in enumerate(rows) if first[0] in mine)
        t = next(i for i, s in enumerate(columns) if first[1] < s.stop) if len(first) > 1 else 0
        count = int(bad.reshape(len(bad), -1).any(axis=1).sum())
        return (
            f"{count} of {len(bad)} rows differ; first {list(first)} (rank {c * tp + t}): "
            f"{float(got[array][first]):.6g}, should be {float(expected[array][first]):.6g}"
        )

    def on_rows(c: int, array: str) -> np.ndarray:
        mask = np.isin(np.arange(len(got[value])), rows[c])
        return mask if array == value else mask[:, None]

    def on_columns(t: int, array: str) -> np.ndarray:
        column = np.arange(columns[-1].stop)
        return np.array(False) if array == value else (column >= columns[t].start) & (column < columns[t].stop)

    def everywhere_or_once(failing: set[str]) -> Iterator[Hypothesis]:
        yield from errors(got, failing)
        parts = [(f"on tp rank {t}", partial(on_columns, t)) for t in range(tp if tp > 1 else 0)]
        parts += [(f"on cp rank {c}", partial(on_rows, c)) for c in range(cp if cp > 1 else 0)]
        yield from on_one_rank(parts, got, expected, failing, lambda: errors(got, failing), {"tp": tp, "cp": cp},
                               tolerance)

    verdict = judged(name, got, expected, tolerance, everywhere_or_once, places)
    verdict.note = "" if gradient in got or gradient not in expected else f"not returned: {gradient}"
    return verdict


def values_of(
    problem: Mapping[str, Any], kept: np.ndarray | None = None, times: np.ndarray | None = None, **changes: Any
) -> dict[str, np.ndarray]:
    """logprob and d_logprob in float64, of a problem with changes; kept [columns]: those of the softmax.

    times [columns]: how often the sum has a column, whose gradient has the sum alone from it.
    """
    p = {**problem, **changes}
    logits, targets, vocab = p["logits"], p["targets"], p["vocab_size"]
    real = np.arange(logits.shape[1]) < vocab
    known = (targets >= 0) & (targets < vocab)
    ids = np.where(known, targets, 0)
    with np.errstate(all="ignore"):
        x = np.where(real, logits, -np.inf) / p["temperature"]
        soft = x if kept is None else np.where(kept, x, -np.inf)
        top = soft.max(axis=1, initial=-np.inf)
        total = np.exp(soft - top[:, None]) * (1 if times is None else times)
        log_p = x - top[:, None] - np.log(total.sum(axis=1))[:, None]
        value = np.where(known, np.take_along_axis(log_p, ids[:, None], axis=1)[:, 0] if logits.shape[1] else 0, 0)
        d = np.where(known, p["d_value"], 0)[:, None] / p["temperature"]
        gradient = np.where(real, -d * np.exp(log_p), 0)
        gradient[np.flatnonzero(known), ids[known]] += d[known, 0]
    return {"logprob": value, "d_logprob": gradient}


def claimed(
    problem: Mapping[str, Any], columns: list[slice], first: list[int], asked: np.ndarray, expected: Arrays
) -> dict[str, np.ndarray]:
    """The logit less the maximum, summed over the shards that find the target by their first id, as Megatron sums it."""
    logits, targets = problem["logits"] / problem["temperature"], problem["targets"]
    hits = np.zeros(logits.shape, bool)
    for begin, part in zip(first, columns):
        column = targets - begin
        mine = (column >= 0) & (column < part.stop - part.start)
        hits[np.flatnonzero(mine), part.start + column[mine]] = True
    with np.errstate(all="ignore"):
        x = np.where(np.arange(logits.shape[1]) < problem["vocab_size"], logits, -np.inf)
        x = x - x.max(axis=1, initial=-np.inf, keepdims=True)
        total = np.exp(x).sum(axis=1)
        value = np.where(hits, x, 0).sum(axis=1) - np.log(total)
        gradient = problem["d_value"][:, None] * (hits - np.exp(x) / total[:, None]) / problem["temperature"]
    return {"logprob": value, "d_logprob": np.where(asked, gradient, expected.get("d_logprob", 0))}


def rolled(targets: np.ndarray, rows: list[np.ndarray], by: int) -> np.ndarray:
    """Targets that each rank has shifted among its own rows."""
    return np.concatenate([np.roll(targets[mine], by) for mine in rows])


def _hypotheses(
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    expected: Arrays,
    got: Arrays,
    failing: set[str],
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    targets, tp, width = problem["targets"], len(columns), problem["logits"].shape[1]
    column = np.arange(width)

    asked = ((targets >= 0) & (targets < problem["vocab_size"]))[:, None]

    def known(kind: str, text: str, **changes: Any) -> Hypothesis:
        def arrays() -> Arrays:
            found = values_of(problem, **changes)
            return found | {"d_logprob": np.where(asked, found["d_logprob"], expected.get("d_logprob", 0))}

        return Hypothesis(kind, text, arrays)

    def gradient(kind: str, text: str, change: Callable[[np.ndarray], np.ndarray]) -> Hypothesis:
        return Hypothesis(kind, text, lambda: {"d_logprob": change(np.asarray(expected["d_logprob"]))})

    yield from first_guesses("logprob", got, expected, failing, len(rows), tp, "a loss")
    for step in (-1, 1):
        text = f"shifted labels: row i has the target of row i {'+' if step < 0 else '-'} 1"
        yield known("label-shift", text, targets=np.roll(targets, step))
        yield known("label-shift", text + ", of its rank's rows", targets=rolled(targets, rows, step))
    if np.any(problem["temperature"] != 1):
        yield known("temperature", "the temperature is ignored", temperature=1.0)
        yield gradient("temperature", "the gradient lacks 1 / temperature", lambda g: g * problem["temperature"])
    if problem["vocab_size"] < width:
        yield known("padding", "columns of padding are counted", vocab_size=width)
    if tp > 1:
        owner = np.searchsorted([s.stop for s in columns], column, side="right")
        home = np.searchsorted([s.stop for s in columns], np.clip(targets, 0, max(0, width - 1)), side="right")
        mine, away = owner[None, :] == home[:, None], owner[None, :] != home[:, None]
        local = "the softmax is over the target's shard alone"
        yield known("local-softmax", local, kept=mine)
        yield Hypothesis(
            "local-softmax",
            local,
            lambda: {
                n: a if n == "logprob" else np.where(away, 0, a) for n, a in values_of(problem, kept=mine).items()
            },
        )
        for rank in range(tp):
            yield known(
                "dropped-shard",
                f"a dropped shard: the softmax lacks the columns of tp rank {rank}",
                kept=owner[None, :] != rank,
            )
        yield gradient(
            "gradient-dropped",
            "the gradient is 0 on shards that do not have the target",
            lambda g: np.where(away, 0, g),
        )
        for rank in range(tp):
            yield known(
                "local-softmax", f"the softmax is over the columns of tp rank {rank} alone", kept=owner[None, :] == rank
            )
    for kind, text, first in (
        ("unknown-target", "a target that no column has is given the largest logit", [s.start for s in columns]),
        (
            "uneven-shards",
            "shards of different width: a rank takes its rank times its own columns for its first id",
            [r * (s.stop - s.start) for r, s in enumerate(columns)],
        ),
    ):
        yield Hypothesis(kind, text, lambda first=first: claimed(problem, columns, first, asked, expected))
    yield Hypothesis(
        "base", "logarithms are to the base 2", lambda: {"logprob": np.asarray(expected["logprob"]) / np.log(2)}
    )
    yield Hypothesis(
        "no-d-value",
        "the gradient takes 1 for the gradient of every value",
        lambda: {"d_logprob": values_of(problem, d_value=np.ones(len(targets)))["d_logprob"]},
    )
    yield from shard_errors(problem, columns, expected, known)
    clamped = np.clip(targets, 0, max(0, problem["vocab_size"] - 1))
    yield known("unknown-target", "a target that no column has is clamped to an id", targets=clamped)
    yield known(
        "unknown-target",
        "a target that no column has is counted from the end",
        targets=targets % max(1, problem["vocab_size"]),
    )
    text = "a target of -100 is taken for id 0"
    yield known("unknown-target", text, targets=np.where(targets == -100, 0, targets))
    yield known(
        "unknown-target",
        "a target that no column has is taken for id 0",
        targets=np.where((targets < 0) | (targets >= problem["vocab_size"]), 0, targets),
    )
