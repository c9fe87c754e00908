"""loss(logits_shard, labels, group) -> loss

A rank has some rows of the logits and, with tp, some columns, as in the contract logprob; labels
[tokens] are shifted already, -100 is ignored. It returns a number, the weighted mean of
-log p(label) over all labels of all ranks that count:

    L = sum_i w_i nll_i / sum_i w_i        over the rows of all ranks

--convention says what a rank returns, and whose gradient it has: mean, L on every rank (losses a
token); partial, the part of L of its rows, so that the sum over ranks is L; times-cp, that times the
ranks of data_group (cp; with --dp, dp x cp), for frameworks whose average over data-parallel ranks
divides by their number. Gradients: of tensors by autograd; of NumPy arrays, a second value is returned,
a function of 1 that returns the gradient of the shard. group: ranks that share the vocabulary. Further
parameters, given where they are taken: data_group (all ranks with other rows), cp_group and dp_group
(those of them in the same replica, and at the same place of other replicas), first (id of the first
column), columns (of all ranks), weights [tokens], count (sum of all weights), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
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
    returned,
)
from .logprob import columns_of, disagreeing, rolled, rows_of, temperature_of, unpacked, values_of
from .rank import Here
from .rounding import rounded

KIND, USES_LAYOUT, USES_DP = "logprobs", False, True
SPLITS = ("cp", "tp")
NEEDS = ("weights",)
CONVENTIONS = ("mean", "partial", "times-cp")
IGNORED = -100


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Two cases of a file of log-probabilities, its targets for labels: with weights of 0 and 1, and with others."""
    inputs = rounded(checked_file(path), options.dtype).inputs
    vocab, temperature = int(inputs.attributes["vocab_size"]), temperature_of(inputs)
    logits, targets = np.asarray(inputs["logits"])[:, :vocab], np.asarray(inputs["targets"]).astype(np.int64)
    labels = np.where((targets >= 0) & (targets < vocab), targets, IGNORED)
    labels[1::4] = IGNORED
    if np.any(temperature != 1) or not (labels != IGNORED).any():
        return
    columns, rows = columns_of(vocab, options.tp), rows_of(len(labels), options.dp * options.cp)
    plain = np.ones(len(labels), np.float32)
    for name, weights in (
        (path.stem, plain),
        (f"{path.stem} with weights", (1 + np.arange(len(labels)) % 3 / 2).astype(np.float32)),
    ):
        counted = np.where(labels == IGNORED, 0, weights)
        problem = {
            "logits": logits.astype(np.float64),
            "targets": labels,
            "temperature": 1.0,
            "vocab_size": vocab,
            "weights": counted,
            "convention": options.convention,
        }
        pieces = []
        for rank in range(len(rows) * options.tp):
            mine, part = rows[rank // options.tp], columns[rank % options.tp]
            pieces.append(
                {
                    "logits": logits[mine][:, part],
                    "labels": labels[mine],
                    "weights": weights[mine],
                    "offers": {"first": part.start, "columns": vocab, "count": float(counted.sum())},
                }
            )
        needs = {} if weights is plain else {"weights": "rows have weights"}
        if np.isfinite(values_of(problem, d_value=plain)["logprob"]).all():
            yield Problem(name, pieces, needs, partial(_judge, name, problem, columns, rows, options.dp))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    offers = dict(piece["offers"], mesh=here.mesh, weights=here.array(piece["weights"]))
    offers |= {f"{name}_group": here.group(name) for name in ("data", "cp", "dp")}
    logits = here.leaf(piece["logits"])
    value, backward = unpacked(
        function(logits, here.ids(piece["labels"]), here.group("tp"), **keywords(function, offers, needs))
    )
    found = {"loss": returned("loss", value, (), [here.kind, "float32", "float64"])}
    for gradient in here.gradients(value, here.array(np.array(1.0)), [logits], backward):
        found["d_loss"] = returned(
            "the gradient of logits_shard", gradient, piece["logits"].shape, [here.kind, "float32", "float64"]
        )
    return found


def loss_of(
    problem: Mapping[str, Any], rows: list[np.ndarray], normaliser: np.ndarray | float | None = None, **changes: Any
) -> dict[str, np.ndarray]:
    """loss of each part of the rows by the convention, and d_loss of all rows.

    normaliser: one of each part, or a number; without, the sum of the weights.
    """
    p = {**problem, **changes}
    weights = p["weights"]
    total = np.broadcast_to(weights.sum() if normaliser is None else normaliser, (len(rows),))
    share = np.zeros(len(weights))
    for mine, one in zip(rows, total):
        share[mine] = -weights[mine] / one if one else 0
    scores = values_of(p, d_value=share)
    parts = np.array([(share[mine] * scores["logprob"][mine]).sum() for mine in rows])
    factor = len(rows) if p["convention"] == "times-cp" else 1
    loss = np.full(len(rows), parts.sum()) if p["convention"] == "mean" else factor * parts
    return {"loss": loss, "d_loss": factor * scores["d_logprob"]}


def _judge(
    name: str,
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    dp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    parts, tp = len(rows), len(columns)
    broken = not_numbers(arrays, lambda rank, array, values: values) or disagreeing(arrays, "loss", parts, tp, tolerance)
    if broken:
        return Verdict(name).fail(*broken)
    expected = loss_of(problem, rows)
    got = {"loss": np.stack([arrays[p * tp]["loss"] for p in range(parts)])}
    if all("d_loss" in mine for mine in arrays):
        got["d_loss"] = np.concatenate(
            [np.concatenate([arrays[p * tp + t]["d_loss"] for t in range(tp)], axis=1) for p in range(parts)]
        )

    def places(array: str, bad: np.ndarray) -> str:
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        where = _part_name(first[0], parts, dp) if array == "loss" else f"row {first[0]}, column {first[1]}"
        return f"{where}: {float(got[array][first]):.6g}, should be {float(expected[array][first]):.6g}"

    verdict = judged(
        name,
        got,
        expected,
        tolerance,
        lambda failing: _hypotheses(got, expected, failing, problem, columns, rows, dp),
        places,
    )
    if (
        verdict.status == "failed"
        and parts > 1
        and problem["convention"] == "mean"
        and not np.allclose(got["loss"], got["loss"][0], rtol=1e-5)
    ):
        verdict.findings.append(
            Finding("ranks-disagree", "ranks with different rows return different losses", ("loss",))
        )
    verdict.note = "" if "d_loss" in got else "not returned: the gradient"
    return verdict


def _part_name(part: int, parts: int, dp: int) -> str:
    replica, cp_rank = divmod(part, parts // dp)
    return f"cp rank {cp_rank}" if dp == 1 else f"dp rank {replica}, cp rank {cp_rank}"


def _hypotheses(
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    dp: int,
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    weights, labels, parts, tp = problem["weights"], problem["targets"], len(rows), len(columns)
    cp = parts // dp

    def known(kind: str, text: str, normaliser: Any = None, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: loss_of(problem, rows, normaliser, **changes))

    if {n for n in failing if not got[n].any()} == failing:
        yield Hypothesis("zero", "it is 0", lambda: {n: np.zeros(got[n].shape) for n in failing})
    named = {"cp": cp, "tp": tp, "dp": dp, "the ranks": parts * tp}
    if min(dp, cp) > 1:
        named["dp x cp"] = parts
    yield from (h for h in factors(got, expected, failing, named) if h.kind.endswith(tuple(named)))
    counts = np.array([weights[mine].sum() for mine in rows])
    yield known("normalisation", "wrong normalisation: rows that are ignored are counted", len(weights))
    yield known("normalisation", "wrong normalisation: a sum, not a mean", 1.0)
    if (weights[weights > 0] != 1).any():
        yield known("weights", "weights are ignored", weights=(weights > 0).astype(float))
        yield known(
            "normalisation",
            "wrong normalisation: by the number of labels, not by their weights",
            float((weights > 0).sum()),
        )
    if dp > 1 and cp > 1:
        of_replica = np.repeat(counts.reshape(dp, cp).sum(axis=1), cp)
        yield known("normalisation", "wrong normalisation: every replica divides by its own weights", of_replica)
        yield known("normalisation", "wrong normalisation: a mean of the replicas' means", of_replica * dp)
    if parts > 1:
        yield known("normalisation", "wrong normalisation: every rank divides by its own weights", counts)
        yield known("normalisation", "wrong normalisation: a mean of the ranks' means", counts * parts)
        for convention in CONVENTIONS:
            text = f"the convention is {convention}, not {problem['convention']}"
            yield known("convention", text, convention=convention)
    yield from factors(got, expected, failing, {})
    yield Hypothesis(
        "sign", "the sign is that of a log-probability", lambda: {n: -np.asarray(expected[n]) for n in failing}
    )
    yield Hypothesis(
        "base", "logarithms are to the base 2", lambda: {n: np.asarray(expected[n]) / np.log(2) for n in failing}
    )
    for step in (-1, 1):
        text = f"shifted labels: row i has the label of row i {'+' if step < 0 else '-'} 1"
        yield known("label-shift", text, targets=np.roll(labels, step), weights=np.roll(weights, step))
        yield known(
            "label-shift",
            text + ", of its rank's rows",
            targets=rolled(labels, rows, step),
            weights=rolled(weights, rows, step),
        )
    padded = np.where(labels == IGNORED, 0, labels)
    yield known(
        "padding", "labels of -100 are counted as id 0", targets=padded, weights=np.where(labels == IGNORED, 1, weights)
    )
    for part in range(parts if parts > 1 else 0):
        dropped = weights.copy()
        dropped[rows[part]] = 0
        text = f"a dropped shard: the rows of {_part_name(part, parts, dp)} are missing"
        yield known("dropped-shard", text, weights=dropped)
