"""mtp_loss(logits_shards, labels, group) -> loss

Multi-token prediction. logits_shards and labels: of each depth, the main head first; a rank has rows of the logits
and, with tp, columns, as in the contract loss; labels [tokens] are shifted already, further for each depth, and -100 is
ignored. Every rank returns

    L = L_0 + mtp_weight / D sum_{d = 1}^D L_d

where L_d is the mean of -log p over all labels of depth d of all ranks, by their own number. Gradients: of tensors by
autograd; of NumPy arrays, a second value is returned, a function of 1 that returns the gradients of all logits_shards; each
rank has that of L by its own logits. group: ranks that share the vocabulary. Further parameters, given where they are
taken: mtp_weight, data_group (all ranks with other rows), cp_group, dp_group, first (id of the first column), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .contract import Problem, Tolerance, Verdict
from .decoder import softmax
from .logprob import columns_of, rows_of
from .losses import by_rank, call_of_loss, judge_loss, spread_rows
from .rank import Here
from .rounding import in_type
from .step import IGNORED

USES_LAYOUT, USES_DP = False, True
SPLITS = ("dp", "cp", "tp")
CASES = ("plain", "empty_rank", "one_label")
DEPTHS, VOCABULARY, WEIGHT = 2, 24, 0.75
LENGTHS = (7, 5, 2, 9, 4, 11, 3)


def labels_of(ids: np.ndarray, lengths: tuple[int, ...], shift: int) -> np.ndarray:
    """The id that is so many places on in the same document."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    place = np.arange(len(ids)) + shift
    return np.where(place < ends, np.append(ids, [0] * shift)[place], IGNORED)


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    rng, tokens = np.random.default_rng(len(case)), sum(LENGTHS)
    logits = in_type(rng.normal(size=(DEPTHS + 1, tokens, VOCABULARY)).astype(np.float32) * 2, options.dtype)
    ids = rng.integers(0, VOCABULARY, tokens)
    labels = np.array([labels_of(ids, LENGTHS, 1 + d) for d in range(DEPTHS + 1)])
    columns, rows = columns_of(VOCABULARY, options.tp), rows_of(tokens, options.dp * options.cp)
    if case == "empty_rank":
        labels[1:, rows[-1]] = IGNORED
    if case == "one_label":
        labels[:, np.arange(tokens) != 3] = IGNORED
    pieces = [
        {"logits": logits[:, rows[r // options.tp]][:, :, columns[r % options.tp]].astype(np.float64),
         "labels": labels[:, rows[r // options.tp]], "first": columns[r % options.tp].start}
        for r in range(len(rows) * options.tp)
    ]
    grid = {"dp": options.dp, "cp": options.cp, "tp": options.tp}
    yield Problem(case, pieces, {}, partial(_judge, case, logits.astype(np.float64), ids, labels, rows, grid))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    labels = [here.ids(one) for one in piece["labels"]]
    leaves = {f"logits_{d}": one for d, one in enumerate(piece["logits"])}
    offers = {"mtp_weight": WEIGHT, "first": piece["first"]}
    return call_of_loss(function, lambda shards: (shards, labels, here.group("tp")), leaves, offers, needs, here)


def answers_of(
    logits: np.ndarray, labels: np.ndarray, rows: list[np.ndarray], factors: np.ndarray,
    counts: Callable[[np.ndarray], Any] = np.sum,
) -> dict[str, np.ndarray]:
    """The part of each rank, and gradients; factors: of each depth; counts of what counts [tokens]: a number, or [ranks]."""
    found: dict[str, np.ndarray] = {"loss": np.zeros(len(rows))}
    for d, (x, mine, factor) in enumerate(zip(logits, labels, factors)):
        known, p = mine != IGNORED, softmax(x)
        total = np.broadcast_to(counts(known), (len(rows),)).astype(np.float64)
        inverse = np.divide(factor, total, out=np.zeros(len(rows)), where=total > 0)
        share = known * spread_rows(rows, inverse)
        place = np.where(known, mine, 0)
        found["loss"] = found["loss"] + by_rank(rows, -share * np.log(p[np.arange(len(p)), place]))
        found[f"d_logits_{d}"] = share[:, None] * (p - np.eye(p.shape[1])[place])
    return found


def _judge(
    name: str, logits: np.ndarray, ids: np.ndarray, labels: np.ndarray, rows: list[np.ndarray],
    grid: Mapping[str, int], arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    usual = np.array([1.0] + [WEIGHT / DEPTHS] * DEPTHS)

    def answers(factors: np.ndarray = usual, labels: np.ndarray = labels, **more: Any) -> dict[str, np.ndarray]:
        return answers_of(logits, labels, rows, factors, **more)

    return judge_loss(name, arrays, answers, grid, partial(_errors, ids, labels, rows, usual), tolerance)


def _errors(
    ids: np.ndarray, labels: np.ndarray, rows: list[np.ndarray], usual: np.ndarray
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    ranks, main = len(rows), labels[0] != IGNORED

    def of_depths(counts: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
        """Another count of all depths but the main one."""
        return lambda known: known.sum() if np.array_equal(known, main) else counts(known)

    for times, what in ((ranks, "averaged"), (1, "summed")):
        mine = lambda known, times=times: times * by_rank(rows, known)  # noqa: E731
        yield "own-count", f"every rank divides depths by its own count, and the means are {what}", {"counts": of_depths(mine)}
        yield "own-count", f"every rank divides by its own count, and the means are {what}", {"counts": mine}
    yield "other-count", "depths are divided by the number of labels of the main head", {"counts": lambda known: main.sum()}
    yield "other-count", "all depths are divided by the number of all labels of all depths", {
        "counts": lambda known: (labels != IGNORED).sum()}
    yield "depth-weight", "depths are not divided by their number", {"factors": np.array([1.0] + [WEIGHT] * DEPTHS)}
    yield "depth-weight", "the weight of depths is ignored", {"factors": np.array([1.0] + [1 / DEPTHS] * DEPTHS)}
    yield "depth-weight", "depths are divided by their number and one, for the main head", {
        "factors": np.array([1.0] + [WEIGHT / (DEPTHS + 1)] * DEPTHS)}
    yield "depth-weight", "all depths, the main head too, have the same weight", {"factors": np.full(DEPTHS + 1, usual[1])}
    for lost in range(DEPTHS + 1):
        factors = np.where(np.arange(DEPTHS + 1) == lost, 0, usual)
        yield "depth-lost", f"depth {lost} is missing", {"factors": factors}
    shifts = [labels_of(ids, (len(ids),), 1 + d) for d in range(DEPTHS + 1)]
    yield "documents", "labels of depths cross documents", {"labels": np.array([labels[0], *shifts[1:]])}
    yield "label-shift", "all depths have the labels of the main head", {"labels": np.array([labels[0]] * (DEPTHS + 1))}
    yield "label-shift", "depths are shifted once too often", {
        "labels": np.array([labels[0]] + [labels_of(ids, LENGTHS, 2 + d) for d in range(1, DEPTHS + 1)])}
