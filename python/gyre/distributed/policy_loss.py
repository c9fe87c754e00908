"""policy_loss(logprobs, old_logprobs, advantages, weights) -> loss

A clipped policy loss: l_t = -min(r A, clip(r, 1 - clip, 1 + clip) A) with r = exp(logprob - old_logprob). A rank has some
tokens [tokens] of a stream of documents, which may lie on several ranks; tokens of weight 0 (prompts, padding) count
nowhere. Every rank returns L over the tokens of all ranks, which --convention says:

    token-mean       sum w l / sum w
    sequence-mean    the mean over documents of sum w l / sum w of the document
    sequence-sum     the mean over documents of sum w l

where documents without a token that counts are none. Gradients: of tensors by autograd; of NumPy arrays, a second value is
returned, a function of 1 that returns the gradient of the rank's logprobs. Further parameters, given where they are
taken: document [tokens] (its index), documents (their number in all), clip, convention, data_group (all ranks with other
rows), cp_group, dp_group, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .contract import Problem, Tolerance, Verdict
from .logprob import rows_of
from .losses import by_rank, call_of_loss, judge_loss, spread_rows
from .rank import Here
from .rounding import in_type

USES_LAYOUT, USES_DP = False, True
SPLITS = ("dp", "cp")
CONVENTIONS = ("token-mean", "sequence-mean", "sequence-sum")
CASES = ("plain", "prompts", "empty_document", "empty_rank", "one_token", "no_token")
LENGTHS, CLIP = (9, 3, 14, 6, 1, 11), 0.2


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    rng, tokens = np.random.default_rng(len(case)), sum(LENGTHS)
    arrays = {"logprobs": -rng.random(tokens) * 2, "advantages": rng.normal(size=tokens)}
    arrays["old_logprobs"] = arrays["logprobs"] + 0.5 * rng.normal(size=tokens)
    arrays = {n: in_type(a.astype(np.float32), options.dtype).astype(np.float64) for n, a in arrays.items()}
    document, rows = np.repeat(np.arange(len(LENGTHS)), LENGTHS), rows_of(tokens, options.dp * options.cp)
    weights = np.ones(tokens)
    if case != "plain":
        weights[rng.random(tokens) < 0.4] = 0
    if case == "empty_document":
        weights[document == 3] = 0
    if case == "empty_rank":
        weights[rows[-1]] = 0
    if case in ("one_token", "no_token"):
        weights[:] = 0
        weights[20] = case == "one_token"
    arrays |= {"weights": weights, "document": document}
    pieces = [{n: a[mine] for n, a in arrays.items()} | {"convention": options.convention}
              for mine in rows for _ in range(options.tp)]
    grid = {"dp": options.dp, "cp": options.cp, "tp": options.tp}
    if case != "empty_rank" or len(rows) > 1:
        yield Problem(case, pieces, {}, partial(_judge, case, arrays, options.convention, rows, grid))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    old, advantages, weights = (here.array(piece[n]) for n in ("old_logprobs", "advantages", "weights"))
    offers = {"document": here.ids(piece["document"]), "documents": len(LENGTHS), "clip": CLIP,
              "convention": piece["convention"]}
    leaves = {"logprobs": piece["logprobs"]}
    return call_of_loss(function, lambda mine: (*mine, old, advantages, weights), leaves, offers, needs, here)


def share_of(convention: str, weights: np.ndarray, document: np.ndarray) -> np.ndarray:
    """[tokens]: what a token's loss is multiplied by."""
    tokens = np.bincount(document, weights, minlength=document.max(initial=0) + 1)
    if convention == "token-mean":
        return weights / max(weights.sum(), 1e-30)
    count = max(1, int((tokens > 0).sum()))
    return weights / count / (1 if convention == "sequence-sum" else np.where(tokens > 0, tokens, 1)[document])


def _judge(
    name: str, arrays_of: Mapping[str, np.ndarray], convention: str, rows: list[np.ndarray],
    grid: Mapping[str, int], arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    a = arrays_of
    usual = share_of(convention, a["weights"], a["document"])

    def answers(
        share: np.ndarray = usual, clip: float = CLIP, sign: int = 1, advantages: np.ndarray = a["advantages"],
        largest: bool = False, through: bool = False,
    ) -> dict[str, np.ndarray]:
        ratio = np.exp(sign * (a["logprobs"] - a["old_logprobs"]))
        kept, cut = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
        lower = kept <= cut if not largest else kept >= cut
        slope = np.where(lower | (np.clip(ratio, 1 - clip, 1 + clip) == ratio) | through, sign * kept, 0)
        return {"loss": by_rank(rows, -share * np.where(lower, kept, cut)), "d_logprobs": -share * slope}

    return judge_loss(name, arrays, answers, grid, partial(_errors, a, convention, rows), tolerance)


def _errors(
    a: Mapping[str, np.ndarray], convention: str, rows: list[np.ndarray]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    weights, document, ranks = a["weights"], a["document"], len(rows)
    for other in CONVENTIONS:
        if other != convention:
            text = f"the convention is {other}, not {convention}"
            yield "convention", text, {"share": share_of(other, weights, document)}
    own = np.concatenate([share_of(convention, weights[mine], document[mine]) for mine in rows])
    for factor, what in ((1 / ranks, "averaged"), (1.0, "summed")):
        yield "own-count", f"every rank has the loss of its own tokens, and these are {what}", {"share": own * factor}
    if convention != "token-mean":
        parts = np.concatenate([np.bincount(document[mine], weights[mine], len(LENGTHS))[document[mine]] for mine in rows])
        count = max(1, int((np.bincount(document, weights) > 0).sum()))
        if convention == "sequence-mean":
            share = weights / np.where(parts > 0, parts, 1) / count
            yield "own-count", "a document on several ranks is divided by each rank's own tokens of it", {"share": share}
        usual = share_of(convention, weights, document)
        yield "documents", "documents without a token that counts are counted", {"share": usual * count / len(LENGTHS)}
        here = spread_rows(rows, np.array([max(1, int((np.bincount(document[m], weights[m]) > 0).sum())) for m in rows]))
        yield "documents", "every rank divides by the number of documents that it has", {"share": usual * count / here}
        here = spread_rows(rows, np.full(ranks, here[[m[0] for m in rows if len(m)]].sum()))
        text = "a document on several ranks is counted by each of them"
        yield "documents", text, {"share": usual * count / here}
    yield "weights", "weights are ignored", {"share": share_of(convention, np.ones(len(weights)), document)}
    every = share_of(convention, np.ones(len(weights)), document) * (weights > 0)
    yield "weights", "tokens of weight 0 are in the count", {"share": every}
    yield "clip", "ratios are not clipped", {"clip": 1e9}
    yield "clip", "the larger of both is taken, not the smaller", {"largest": True}
    yield "clip", "the gradient of clipped ratios is not 0", {"through": True}
    yield "ratio", "the ratio is the other way round: old over new", {"sign": -1}
    yield "ratio", "the sign of the advantage is the other one", {"advantages": -a["advantages"]}
