"""topk_kl(logits_shard, ids, targets, teacher_ids, teacher_targets, group) -> kl

The Kullback-Leibler divergence KL(q || p) of each token; q is the student, p the teacher. teacher_ids
[tokens, K] is log p of ids, which have the student's K largest logits. teacher_targets [tokens] is log p of
the target, the token that the student sampled. q and p are normalised over the whole vocabulary. It returns

    sum over ids of q (log q - log p)  +  log q(target) - log p(target), unless the target is among the ids

The last term estimates what other ids add: its mean over targets of q is their part of the divergence.
--convention says what its gradient is: unbiased, (log q - log p + 1) times that of log q(target), whose
mean over targets of q gives the gradient of the whole divergence; advantage, the same without the 1, as
of a policy gradient whose advantage is log p - log q. Every rank of the group (tp) has columns of the
logits, as in the contract logprob, all ids and all targets, and returns the same. Gradients: of tensors
by autograd; of NumPy arrays, a second value is returned, a function of the gradient [tokens] that returns
that of the shard. Further parameters, given where they are taken: first (id of the first column), columns
(of all ranks), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
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
from .logprob import columns_of, disagreeing, rows_of
from .rank import Here, differentiated
from .rounding import in_type, rounded

KIND, USES_LAYOUT = "logprobs", False
SPLITS = ("cp", "tp")
CONVENTIONS = ("unbiased", "advantage")
MOST = 4  # ids of a token


def log_softmax(logits: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """In float64; kept: the columns that the sum is of."""
    with np.errstate(all="ignore"):
        summed = logits if kept is None else np.where(kept, logits, -np.inf)
        top = summed.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(summed - top).sum(axis=1, keepdims=True))


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The case of a file that has a teacher; every second target is among the ids."""
    inputs = rounded(checked_file(path), options.dtype).inputs
    vocab = int(inputs.attributes["vocab_size"])
    logits, targets = np.asarray(inputs["logits"])[:, :vocab], np.asarray(inputs["targets"]).astype(np.int64)
    if "teacher" not in inputs or not len(targets) or vocab <= MOST:
        return
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :MOST]
    targets = np.clip(targets, 0, vocab - 1)
    targets[::2] = ids[::2, 1]
    log_p = log_softmax(np.asarray(inputs["teacher"])[:, :vocab].astype(np.float64))
    problem = {
        "logits": logits.astype(np.float64),
        "ids": ids,
        "targets": targets,
        "teacher_ids": in_type(np.take_along_axis(log_p, ids, 1).astype(np.float32), options.dtype),
        "teacher_targets": in_type(np.take_along_axis(log_p, targets[:, None], 1)[:, 0].astype(np.float32), options.dtype),
        "d_kl": np.asarray(inputs.get("d_value", np.ones(len(targets), np.float32))),
        "convention": options.convention,
    }
    if not all(np.isfinite(a).all() for a in kl_of(problem).values()):
        return  # an id of probability 0
    columns, rows = columns_of(vocab, options.tp), rows_of(len(targets), options.cp)
    pieces = []
    for rank in range(options.cp * options.tp):
        mine, part = rows[rank // options.tp], columns[rank % options.tp]
        piece = {name: problem[name][mine] for name in ("ids", "targets", "teacher_ids", "teacher_targets", "d_kl")}
        offers = {"first": part.start, "columns": vocab}
        pieces.append(piece | {"logits": logits[mine][:, part], "offers": offers})
    yield Problem(path.stem, pieces, {}, partial(_judge, path.stem, problem, columns, rows))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    taken = keywords(function, dict(piece["offers"], mesh=here.mesh), needs)
    given = [here.ids(piece[n]) for n in ("ids", "targets")]
    given += [here.array(piece[n]) for n in ("teacher_ids", "teacher_targets")]
    return differentiated(
        lambda logits: function(logits, *given, here.group("tp"), **taken), {"d_kl": ("logits_shard", piece["logits"])},
        "kl", piece["targets"].shape, piece["d_kl"], [here.kind, "float32", "float64"], here,
    )


def kl_of(
    problem: Mapping[str, Any],
    kept: np.ndarray | None = None,
    tail: str = "outside",
    of_ids: bool = False,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """kl [tokens] and d_kl [tokens, columns] in float64.

    kept [tokens, columns]: columns of the student's softmax. tail: of which targets there is a term,
    outside, all or none. of_ids: both distributions are normalised over the ids.
    """
    p = {**problem, **changes}
    ids, targets, rows = p["ids"], p["targets"], np.arange(len(p["targets"]))
    if of_ids:
        kept = np.zeros(p["logits"].shape, bool)
        kept[rows[:, None], ids] = True
    with np.errstate(all="ignore"):
        log_q = log_softmax(p["logits"], kept)
        q = np.exp(log_q) if kept is None else np.where(kept, np.exp(log_q), 0)
        teacher = p["teacher_ids"].astype(np.float64)
        teacher = log_softmax(teacher) if of_ids else teacher
        of_rows = np.take_along_axis(log_q, ids, 1)
        gaps = of_rows - teacher
        sampled = log_q[rows, targets] - p["teacher_targets"]
        outside = (ids != targets[:, None]).all(axis=1)
        counts = {"outside": outside, "all": np.ones(len(rows), bool), "none": np.zeros(len(rows), bool)}[tail]
        value = (np.exp(of_rows) * gaps).sum(axis=1) + np.where(counts, sampled, 0)
        weights = np.exp(of_rows) * (gaps + 1)
        more = np.where(counts, sampled + (p["convention"] == "unbiased"), 0)
        gradient = -q * (weights.sum(axis=1) + more)[:, None]
        np.add.at(gradient, (rows[:, None], ids), weights)
        gradient[rows, targets] += more
    return {"kl": value, "d_kl": p["d_kl"][:, None] * gradient}


def _judge(
    name: str,
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    cp, tp = len(rows), len(columns)
    broken = not_numbers(arrays, lambda rank, array, values: values) or disagreeing(arrays, "kl", cp, tp, tolerance)
    if broken:
        return Verdict(name).fail(*broken)
    expected = kl_of(problem)
    got = {"kl": np.concatenate([arrays[c * tp]["kl"] for c in range(cp)])}
    if all("d_kl" in mine for mine in arrays):
        got["d_kl"] = np.concatenate(
            [np.concatenate([arrays[c * tp + t]["d_kl"] for t in range(tp)], axis=1) for c in range(cp)]
        )

    def places(array: str, bad: np.ndarray) -> str:
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        count = int(bad.reshape(len(bad), -1).any(axis=1).sum())
        values = f"{float(got[array][first]):.6g}, should be {float(expected[array][first]):.6g}"
        return f"{count} of {len(bad)} rows differ; first {list(first)}: {values}"

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        return _hypotheses(got, expected, failing, problem, columns, rows)

    verdict = judged(name, got, expected, tolerance, errors, places)
    verdict.note = "" if "d_kl" in got else "not returned: the gradient"
    return verdict


def _hypotheses(
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    problem: Mapping[str, Any],
    columns: list[slice],
    rows: list[np.ndarray],
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    tp, width = len(columns), problem["logits"].shape[1]

    def known(kind: str, text: str, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: kl_of(problem, **changes))

    other = next(c for c in CONVENTIONS if c != problem["convention"])
    yield known("convention", f"the convention is {other}, not {problem['convention']}", convention=other)
    yield known("tail", "the term of targets outside of the ids is missing", tail="none")
    yield known("tail", "targets that are among the ids are counted twice", tail="all")
    yield Hypothesis(
        "tail", "the term of targets has no gradient", lambda: {"d_kl": kl_of(problem, tail="none")["d_kl"]}
    )
    yield known("renormalised", "both distributions are normalised over the ids", of_ids=True)
    yield from factors(got, expected, failing, {"tp": tp, "cp": len(rows)})
    yield Hypothesis("sign", "the sign is that of a reward", lambda: {n: -np.asarray(expected[n]) for n in failing})
    for rank in range(tp if tp > 1 else 0):
        mine = np.zeros((1, width), bool)
        mine[:, columns[rank]] = True
        text = f"the softmax is over the columns of tp rank {rank} alone"
        yield known("local-softmax", text, kept=np.broadcast_to(mine, problem["logits"].shape))
    shifted = {name: np.roll(problem[name], -1) for name in ("targets", "teacher_targets")}
    yield known("label-shift", "row i has the target of row i + 1", **shifted)
