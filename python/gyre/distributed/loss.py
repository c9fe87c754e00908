"""loss(logits_shard, labels, group) -> loss

A rank has some rows of the logits and, with tp, some columns, as in the contract logprob; labels
[tokens] are shifted already, -100 is ignored. All ranks have as many rows; with --uneven some have one
more than others, or none. It returns a number, the weighted mean of -log p(label) over all labels of all
ranks that count:

    L = sum_i w_i nll_i / sum_i w_i        over the rows of all ranks

--convention says what a rank returns, and whose gradient it has: mean, L on every rank (losses a
token); partial, the part of L of its rows, so that the sum over ranks is L; times-cp, that times the
ranks of data_group (cp; with --dp, dp x cp), for frameworks whose average over data-parallel ranks
divides by their number; mean-times-cp, L on every rank, whose gradient is that of times-cp. Gradients:
of tensors by autograd; of NumPy arrays, a second value is returned, a function of 1 that returns the
gradient of the shard. group: ranks that share the vocabulary. Further parameters, given where they are
taken: data_group (all ranks with other rows), cp_group and dp_group (those of them in the same replica,
and at the same place of other replicas), first (id of the first column), columns (of all ranks), weights
[tokens], count (sum of all weights), label_smoothing e, where nll is (1 - e) nll + e mean(-log p) over
the whole vocabulary, z_loss z, where z lse^2 is added to nll, teacher_shard (the rank's columns of a
teacher's logits), where KL(teacher || student) of the row takes the place of nll, as in the contract kl,
mesh. In cases of microbatches the function is called for each of them, and its values are added: it needs
count, which is of all.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import kl
from .contract import (
    Arrays,
    Finding,
    Hypothesis,
    LeftOut,
    Problem,
    Tolerance,
    Verdict,
    checked_file,
    factors,
    judged,
    keywords,
    not_numbers,
)
from .logprob import GROWN, claimed, columns_of, disagreeing, rolled, rows_of, temperature_of, values_of
from .parts import on_one_rank
from .rank import Here, differentiated
from .rounding import rounded

KIND, USES_LAYOUT, USES_DP, USES_UNEVEN = "logprobs", False, True, True
SPLITS = ("cp", "tp")
NEEDS = ("weights", "label_smoothing", "z_loss", "teacher_shard", "count")
MICROBATCHES = 3
CONVENTIONS = ("mean", "partial", "times-cp", "mean-times-cp")
IGNORED = -100


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Cases of a file of log-probabilities, its targets for labels: with weights of 0 and 1, with others, and more."""
    inputs = rounded(checked_file(path), options.dtype).inputs
    vocab, temperature = int(inputs.attributes["vocab_size"]), temperature_of(inputs)
    logits, targets = np.asarray(inputs["logits"])[:, :vocab], np.asarray(inputs["targets"]).astype(np.int64)
    labels = np.where((targets >= 0) & (targets < vocab), targets, IGNORED)
    labels[1::4] = IGNORED
    parts, tokens = options.dp * options.cp, len(labels)
    if np.any(temperature != 1) or not (labels != IGNORED).any():
        return
    if tokens < parts and not options.uneven:
        raise LeftOut(f"{tokens} rows are fewer than {parts} ranks, and --uneven was not given")
    kept = tokens if options.uneven else tokens // parts * parts
    logits, labels = logits[:kept], labels[:kept]
    columns, rows = columns_of(vocab, options.tp), rows_of(kept, parts)
    teacher = np.asarray(inputs.get("teacher", logits[:0]))[:kept, :vocab]
    for suffix, weights, needs, changes in _variants(labels, rows, logits, teacher):
        counted = np.where(labels == IGNORED, 0, weights)
        problem = {
            "logits": logits.astype(np.float64),
            "targets": labels,
            "temperature": 1.0,
            "vocab_size": vocab,
            "weights": counted,
            "convention": options.convention,
            "microbatches": 1,
            "label_smoothing": 0.0,
            "z_loss": 0.0,
            "teacher": None,
            "given": weights,
        } | changes
        pieces = []
        for rank in range(len(rows) * options.tp):
            part = columns[rank % options.tp]
            offers = {"first": part.start, "columns": vocab, "count": float(counted.sum())}
            offers |= {name: problem[name] for name in ("label_smoothing", "z_loss")}
            batches = [
                {"logits": logits[mine][:, part], "labels": labels[mine], "weights": weights[mine],
                 "teacher_shard": None if problem["teacher"] is None else teacher[mine][:, part]}
                for mine in np.array_split(rows[rank // options.tp], problem["microbatches"])
            ]
            pieces.append({"batches": batches, "offers": offers})
        name = path.stem + suffix
        if np.isfinite(values_of(problem, d_value=np.ones(len(labels)))["logprob"]).all():
            yield Problem(name, pieces, needs, partial(_judge, name, problem, columns, rows, options.dp))


def _variants(
    labels: np.ndarray, rows: list[np.ndarray], logits: np.ndarray, teacher: np.ndarray
) -> Iterator[tuple[str, np.ndarray, dict[str, str], dict[str, Any]]]:
    """Of the cases of a file: a suffix of its name, weights, parameters that it needs, changes of the problem."""
    plain = np.ones(len(labels), np.float32)
    others = (1 + np.arange(len(labels)) % 3 / 2).astype(np.float32)
    weighted = {"weights": "rows have weights"}
    yield "", plain, {}, {}
    yield " with weights", others, weighted, {}
    if not np.isfinite(logits).all() or not GROWN[0] <= len(labels) <= GROWN[1]:
        return
    first, emptied = np.zeros_like(plain), plain.copy()
    first[np.argmax(labels != IGNORED)] = 1
    emptied[rows[-1]] = 0
    yield " of one label", first, weighted, {}
    if len(rows) > 1:
        yield " with a rank without labels", emptied, weighted, {}
    yield " without labels", 0 * plain, weighted, {}
    yield " with label smoothing", plain, {"label_smoothing": "labels are smoothed"}, {"label_smoothing": 0.25}
    yield " with z-loss", plain, {"z_loss": "there is a z-loss"}, {"z_loss": 0.125}
    if len(teacher) and np.isfinite(teacher).all():
        yield " with a teacher", others, weighted | {"teacher_shard": "rows have a teacher"}, {"teacher": teacher.astype(float)}
    lost = others.copy()
    lost[np.array_split(rows[-1], MICROBATCHES)[1]] = 0
    needs = weighted | {"count": f"rows lie in {MICROBATCHES} microbatches"}
    yield " in microbatches", lost, needs, {"microbatches": MICROBATCHES}


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward, for each microbatch."""
    kinds, losses, gradients = [here.kind, "float32", "float64"], [], []
    for batch in piece["batches"]:
        offers = dict(piece["offers"], mesh=here.mesh, weights=here.array(batch["weights"]))
        offers |= {f"{name}_group": here.group(name) for name in ("data", "cp", "dp")}
        offers["teacher_shard"] = None if batch["teacher_shard"] is None else here.array(batch["teacher_shard"])
        taken, labels = keywords(function, offers, needs), here.ids(batch["labels"])
        found = differentiated(
            lambda logits, labels=labels, taken=taken: function(logits, labels, here.group("tp"), **taken),
            {"d_loss": ("logits_shard", batch["logits"])}, "loss", (), np.array(1.0), kinds, here,
        )
        losses.append(found["loss"])
        gradients += [found["d_loss"]] if "d_loss" in found else []
    total = {"loss": np.sum(losses, axis=0, dtype=losses[0].dtype)}
    return total | ({"d_loss": np.concatenate(gradients)} if gradients else {})


def terms_of(problem: Mapping[str, Any], kept: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row [tokens], and its slope [tokens, columns]; kept [columns]: those of the smoothing."""
    smoothing, z_loss, width = problem["label_smoothing"], problem["z_loss"], problem["logits"].shape[1]
    if problem["teacher"] is not None:
        more = {"d_kl": np.ones((1, len(problem["targets"]))), "convention": "identity"}
        found, known = kl.values_of({"reverse": False} | problem | more, [slice(0, width)]), problem["targets"] != IGNORED
        return np.where(known, found["kl"], 0), np.where(known[:, None], found["d_kl"], 0)
    scores = values_of(problem, d_value=-np.ones(len(problem["targets"])))
    value, slope = -scores["logprob"], scores["d_logprob"]
    if smoothing or z_loss:
        known = (problem["targets"] != IGNORED)[:, None]
        lse = np.logaddexp.reduce(problem["logits"], axis=1)
        log_p = problem["logits"] - lse[:, None]
        share = np.full(width, 1 / width) if kept is None else kept / kept.sum()
        value = (1 - smoothing) * value - known[:, 0] * smoothing * (log_p @ share) + known[:, 0] * z_loss * lse**2
        slope = (1 - smoothing) * slope + known * smoothing * (np.exp(log_p) - share)
        slope += known * 2 * z_loss * lse[:, None] * np.exp(log_p)
    return value, slope


def loss_of(
    problem: Mapping[str, Any], rows: list[np.ndarray], normaliser: np.ndarray | float | None = None,
    kept: np.ndarray | None = None, **changes: Any
) -> dict[str, np.ndarray]:
    """loss of each part of the rows by the convention, and d_loss of all rows.

    normaliser: one of each part, of each part's microbatches, or a number; without, the sum of the weights.
    """
    p = {**problem, **changes}
    weights = p["weights"]
    total = weights.sum() if normaliser is None else np.asarray(normaliser)
    total = np.broadcast_to(total[:, None] if np.ndim(total) == 1 else total, (len(rows), p["microbatches"]))
    share = np.zeros(len(weights))
    for mine, of_part in zip(rows, total):
        for batch, one in zip(np.array_split(mine, len(of_part)), of_part):
            share[batch] = weights[batch] / one if one else 0
    value, slope = terms_of(p, kept)
    loss, factor = by_convention(p["convention"], share * value, rows)
    return {"loss": loss, "d_loss": factor * share[:, None] * slope}


def by_convention(convention: str, terms: np.ndarray, rows: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """What ranks return of the terms [tokens] of the mean, and the factor of their gradients."""
    parts = np.array([terms[mine].sum() for mine in rows])
    factor = len(rows) if convention.endswith("times-cp") else 1
    return np.full(len(rows), parts.sum()) if convention.startswith("mean") else factor * parts, factor


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
    broken = (
        not_numbers(arrays, lambda rank, array, values: values)
        or _own_smoothing(problem, columns, rows, arrays, tolerance)
        or disagreeing(arrays, "loss", parts, tp, tolerance)
    )
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

    def of_rows(part: int, array: str) -> np.ndarray | None:
        return None if array == "loss" else np.isin(np.arange(len(problem["targets"])), rows[part])[:, None]

    def everywhere_or_once(failing: set[str]) -> Iterator[Hypothesis]:
        def errors() -> Iterator[Hypothesis]:
            return _hypotheses(got, expected, failing, problem, columns, rows, dp)

        yield from errors()
        names = [(f"on {_part_name(p, parts, dp)}", partial(of_rows, p)) for p in range(parts if parts > 1 else 0)]
        yield from on_one_rank(names, got, expected, failing, errors, {"cp": parts // dp, "dp": dp, "tp": tp},
                               tolerance)

    verdict = judged(name, got, expected, tolerance, everywhere_or_once, places)
    if (
        verdict.status == "failed"
        and parts > 1
        and problem["convention"].startswith("mean")
        and not np.allclose(got["loss"], got["loss"][0], rtol=1e-5)
    ):
        verdict.findings.append(
            Finding("ranks-disagree", "ranks with different rows return different losses", ("loss",))
        )
    verdict.note = "" if "d_loss" in got else "not returned: the gradient"
    return verdict


def _own_smoothing(
    problem: Mapping[str, Any], columns: list[slice], rows: list[np.ndarray], arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> list[Finding]:
    """Ranks of tp whose losses differ because each smooths labels over its own columns."""
    if not problem["label_smoothing"] or len(columns) == 1:
        return []
    ids = np.arange(problem["logits"].shape[1])
    own = [loss_of(problem, rows, kept=(ids >= c.start) & (ids < c.stop))["loss"] for c in columns]
    got = np.array([mine["loss"] for mine in arrays]).reshape(len(rows), len(columns))
    right = loss_of(problem, rows)["loss"]
    if all(tolerance.near("loss", loss, right) for loss in own) or not all(
        tolerance.near("loss", got[:, t], loss) for t, loss in enumerate(own)
    ):
        return []
    text = "labels are smoothed over the rank's own columns, not over the vocabulary"
    return [Finding("local-smoothing", text, ("loss",))]


def _part_name(part: int, parts: int, dp: int) -> str:
    replica, cp_rank = divmod(part, parts // dp)
    return f"cp rank {cp_rank}" if dp == 1 else f"dp rank {replica}, cp rank {cp_rank}"


def _of_terms(known: Callable[..., Hypothesis], problem: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Errors of label smoothing, of a z-loss and of a teacher."""
    smoothing, width = problem["label_smoothing"], problem["logits"].shape[1]
    if problem["teacher"] is not None:
        yield known("teacher", "the teacher is ignored: it is the loss of the labels", teacher=None)
        yield known("teacher", "the direction is exchanged: it is KL(student || teacher)", reverse=True)
    if smoothing:
        yield known("smoothing", "label smoothing is ignored", label_smoothing=0.0)
        text = "labels are smoothed over the other ids alone: e / (V - 1)"
        yield known("smoothing", text, label_smoothing=smoothing * width / max(1, width - 1))
    if problem["z_loss"]:
        yield known("z-loss", "the z-loss is ignored", z_loss=0.0)
        yield known("z-loss", "the z-loss counts twice", z_loss=2 * problem["z_loss"])
        yield known("z-loss", "the z-loss counts half: z / 2 lse^2", z_loss=problem["z_loss"] / 2)


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

    yield from _of_terms(known, problem)
    if {n for n in failing if not got[n].any()} == failing:
        yield Hypothesis("zero", "it is 0", lambda: {n: np.zeros(got[n].shape) for n in failing})
    named = {"cp": cp, "tp": tp, "dp": dp, "the ranks": parts * tp}
    if min(dp, cp) > 1:
        named["dp x cp"] = parts
    if problem["microbatches"] > 1:
        named["microbatches"] = problem["microbatches"]
        of_batch = np.array([[weights[b].sum() for b in np.array_split(mine, MICROBATCHES)] for mine in rows])
        every = np.broadcast_to(of_batch.sum(axis=0), of_batch.shape)
        for own, who in ((every, "every microbatch"), (of_batch, "every microbatch of a rank")):
            for factor, what in ((1, "sum"), (MICROBATCHES, "mean")):
                text = f"wrong normalisation: {who} divides by its own weights; the {what} of these"
                yield known("normalisation", text, own * factor)
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
    yield from _uneven(problem, columns, rows)
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
    names = [f"on {_part_name(p, parts, dp)}" for p in range(parts)]
    yield from _of_ignored(problem, rows, known, expected, names)
    for part in range(parts if parts > 1 else 0):
        text = f"a dropped shard: the rows of {_part_name(part, parts, dp)} are missing"
        dropped = weights.copy()
        dropped[rows[part]] = 0
        yield known("dropped-shard", text, weights=dropped)
        yield known("dropped-shard", text + ", but are in the count", weights.sum(), weights=dropped)
    yield from _of_one_part(problem, rows, known, expected, names)


def _uneven(problem: Mapping[str, Any], columns: list[slice], rows: list[np.ndarray]) -> Iterator[Hypothesis]:
    """A rank of tp takes its rank times its own columns for its first id, where these are fewer than others'."""
    first, labels = [r * (s.stop - s.start) for r, s in enumerate(columns)], problem["targets"]
    if first == [s.start for s in columns] or problem["label_smoothing"] or problem["z_loss"] or problem["teacher"] is not None:
        return

    def arrays() -> Arrays:
        asked = (labels != IGNORED)[:, None]
        found = claimed(problem | {"d_value": -np.ones(len(labels))}, columns, first, asked, {})
        share = problem["weights"] / (problem["weights"].sum() or 1.0)
        terms = -share * np.where(asked[:, 0], found["logprob"], 0)
        loss, factor = by_convention(problem["convention"], terms, rows)
        return {"loss": loss, "d_loss": factor * share[:, None] * found["d_logprob"]}

    text = "shards of different width: a rank takes its rank times its own columns for its first id"
    yield Hypothesis("uneven-shards", text, arrays)


def _of_ignored(
    problem: Mapping[str, Any], rows: list[np.ndarray], known: Callable[..., Hypothesis], expected: Arrays, names: list[str]
) -> Iterator[Hypothesis]:
    """Rows of -100 that count, of all ranks or of one; rows in which gradients alone count. names: "on" and each rank."""
    labels, weights, given = problem["targets"], problem["weights"], problem["given"]
    for part in [None, *range(len(rows) if len(rows) > 1 else 0)]:
        mine, where = np.ones(len(labels), bool), ""
        if part is not None:
            mine, where = np.isin(np.arange(len(labels)), rows[part]), f", {names[part]}"
        ignored = (labels == IGNORED) & mine
        if not ignored.any():
            continue
        zero = {"targets": np.where(ignored, 0, labels), "weights": np.where(ignored, given, weights)}
        text = f"labels of -100 are counted as id 0{where}"
        yield known("padding", text, **zero)
        yield known("padding", text + ", but not in the count", weights.sum() or 1.0, **zero)
        share = given / (weights.sum() or 1.0)
        with np.errstate(all="ignore"):
            x = problem["logits"] - problem["logits"].max(axis=1, keepdims=True)
            soft = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        factor = by_convention(problem["convention"], share, rows)[1]
        gradient = np.asarray(expected["d_loss"]) + np.where(ignored[:, None], factor * share[:, None] * soft, 0)
        text = f"rows of -100 have the gradient of the log-sum-exp{where}"
        yield Hypothesis("ignored-gradient", text, lambda gradient=gradient: {"d_loss": gradient})


def _of_one_part(
    problem: Mapping[str, Any], rows: list[np.ndarray], known: Callable[..., Hypothesis], expected: Arrays, names: list[str]
) -> Iterator[Hypothesis]:
    """Errors of the rows of one rank; the count is right, or counts what is wrong."""
    weights, labels, given = problem["weights"], problem["targets"], problem["given"]
    for part, (mine, where) in enumerate(zip(rows, names) if len(rows) > 1 else ()):
        is_mine = np.isin(np.arange(len(labels)), mine)
        for total in (weights.sum() or 1.0, None):
            for step, way, edge in ((-1, "next row", "last"), (1, "row before", "first")):
                for what, kept in (("", None), (f", whose {edge} row has none", IGNORED)):
                    moved, other = np.roll(labels[mine], step), np.roll(given[mine], step)
                    if kept is not None and len(mine):
                        moved[step if step < 0 else 0] = kept
                    targets, shares = labels.copy(), weights.copy()
                    for carried in (other, given[mine]):
                        targets[mine], shares[mine] = moved, np.where(moved == IGNORED, 0, carried)
                        text = f"labels are shifted once more {where}: a row has that of the {way}{what}"
                        yield known("label-shift", text, total, targets=targets.copy(), weights=shares.copy())
            for kind, text, other in (
                ("weights", "weights are ignored", (weights > 0).astype(float)), ("weights", "weights count twice", weights**2),
            ):
                yield known(kind, f"{text} {where}", total, weights=np.where(is_mine, other, weights))
            for edge, text in ((-1, "last"), (0, "first")):
                shares = weights.copy()
                shares[mine[edge:][:1]] = 0
                yield known("row-lost", f"the {text} row {where} does not count", total, weights=shares)
        value, slope = loss_of(problem, rows), np.asarray(expected["d_loss"])
        for convention in CONVENTIONS:
            other = loss_of(problem, rows, convention=convention)
            found = np.array(value["loss"])
            found[part] = other["loss"][part]
            text = f"the convention is {convention}, not {problem['convention']}, {where}"
            yield Hypothesis("convention", text, lambda found=found, slope=slope: {"loss": found, "d_loss": slope})
