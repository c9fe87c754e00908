"""Log-probabilities as defined, in float64: serial, whole rows, never tuned.

A row z of logits stands for the distribution log p_v = z_v / temperature - log sum_u exp(z_u /
temperature). -inf is a logit of probability 0, and 0 log 0 = 0. Every function takes arrays of
NumPy or tensors and returns arrays of NumPy. T: tokens, V: ids, K: ids of a token, n: sequences.
Temperatures and limits of filters are numbers, or [T], one of each row.
"""

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..checks import known
from .. import operations
from ..logprobs import ANSWERS, LogprobProblem, logprob_problem


def _float64(logits: Any) -> np.ndarray:
    return to_numpy(logits).astype(np.float64)


def _column(number: Any) -> Any:
    """A number of every row as it is; numbers [T] of rows as a column [T, 1]."""
    return number if np.ndim(number) == 0 else to_numpy(number)[:, None]


def log_softmax(logits: Any, temperature: Any = 1.0) -> np.ndarray:
    """log p of every column, [..., V]. A row of nothing but -inf is no distribution: NaN."""
    z = _float64(logits)
    with np.errstate(invalid="ignore"):
        x = (z - z.max(axis=-1, keepdims=True)) / _column(temperature)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def entropy(logits: Any, temperature: Any = 1.0) -> np.ndarray:
    """-sum p log p of rows [..., V], in nats."""
    logp = log_softmax(logits, temperature)
    p = np.exp(logp)
    return -(p * np.where(p > 0, logp, 0)).sum(axis=-1)


def gather(rows: Any, ids: Any, nobody: float = 0.0) -> np.ndarray:
    """Elements `ids` [T, K] of rows [T, V]; `nobody` for an id that no column has."""
    values, places = to_numpy(rows), to_numpy(ids).astype(np.int64)
    there = (places >= 0) & (places < values.shape[1])
    return np.where(there, np.take_along_axis(values, np.where(there, places, 0), 1), nobody)


def logprob(logits: Any, targets: Any, temperature: Any = 1.0) -> np.ndarray:
    """log p of targets [T] in rows [T, V]; 0 for a target that no column has."""
    return gather(log_softmax(logits, temperature), to_numpy(targets)[:, None])[:, 0]


def top_k(logits: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids [T, min(k, V)] of the largest logits, descending; equals by ascending id."""
    z = _float64(logits)
    ids = np.argsort(-z, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(z, ids, axis=1), ids


def survivors(
    logits: Any, top_k: Any = 0, top_p: Any = 1.0, temperature: Any = 1.0, min_p: Any = 0.0
) -> np.ndarray:
    """[T, V] booleans: what a sampling filter keeps.

    Of a row the top_k largest, with all that equal the last of them (0: all); of these, those with
    at least min_p of the largest probability; then, of what is left and renormalised, those before
    which (larger first, of equals higher ids) lies less probability than top_p. Where a sum of
    probabilities is as near top_p as rounding, float32 may differ.
    """
    z = _float64(logits)
    count = np.broadcast_to(to_numpy(top_k), len(z)).astype(np.int64)
    count = np.where((count > 0) & (count < z.shape[1]), count, z.shape[1])
    kept = z >= np.take_along_axis(np.sort(z, axis=1), z.shape[1] - count[:, None], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        below = (z - z.max(axis=1, keepdims=True)) / _column(temperature)
        kept &= (z == z.max(axis=1, keepdims=True)) | (below >= np.log(_column(min_p)))
    if np.any(np.less(to_numpy(top_p), 1)):
        p = np.exp(log_softmax(np.where(kept, z, -np.inf), temperature))
        order = z.shape[1] - 1 - np.argsort(-z[:, ::-1], axis=1, kind="stable")
        ranked = np.take_along_axis(p, order, axis=1)
        before = np.zeros(z.shape)
        before[:, 1:] = np.cumsum(ranked, axis=1)[:, :-1]
        first = np.zeros(z.shape, dtype=bool)
        limit = np.broadcast_to(_column(top_p), (len(z), 1))
        np.put_along_axis(first, order, (before < limit) | (limit == 1), axis=1)
        kept &= first
    return kept


def filtered(
    logits: Any, top_k: Any = 0, top_p: Any = 1.0, temperature: Any = 1.0, min_p: Any = 0.0
) -> np.ndarray:
    """Logits [T, V] with -inf where they do not survive the filter."""
    kept = survivors(logits, top_k, top_p, temperature, min_p)
    return np.where(kept, _float64(logits), -np.inf)


def soft_cross_entropy(logits: Any, teacher: Any) -> np.ndarray:
    """-sum p(teacher) log p(logits), [T]; +inf where the teacher has what the student has not."""
    z, log_q, log_p = _float64(teacher), log_softmax(logits), log_softmax(teacher)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(log_q), -np.inf, np.exp(log_p) * log_q)
    return -np.where(np.isneginf(z), 0, terms).sum(axis=1)


def next_tokens(logprobs: Any, tokens: Any, offsets: Any, nobody: float = 0.0) -> np.ndarray:
    """[n, longest - 1]: row i, column p is log p, in the row of its token p, of its token p + 1.

    logprobs [T, V], tokens [T], offsets [n + 1]: sequence i is the rows offsets[i] to
    offsets[i + 1] - 1. `nobody` for a token that no column has; behind a sequence there are zeros.
    """
    bounds, ids = to_numpy(offsets), to_numpy(tokens)
    lengths = np.diff(bounds)
    values = gather(logprobs, np.append(ids[1:], -1)[:, None], nobody)[:, 0]
    out = np.zeros((len(lengths), max(0, lengths.max(initial=0) - 1)))
    for row, begin, length in zip(out, bounds, lengths):
        count = max(0, length - 1)
        row[:count] = values[begin : begin + count]
    return out


def score_gradient(
    logits: Any, ids: Any, g: Any, h: Any = 0.0, temperature: Any = 1.0
) -> np.ndarray:
    """Gradient by logits [T, V] of sum_t (sum_k g_tk log p(ids_tk) + h_t entropy_t).

    ids [T, K]; g: [T, K], [T, 1] or a number; h: [T, 1] or a number. An id that no column has counts like one elsewhere:
    -g p_v.
    """
    logp = log_softmax(logits, temperature)
    p = np.exp(logp)
    finite_logp = np.where(p > 0, logp, 0)
    of_id = np.broadcast_to(g, to_numpy(ids).shape)
    of_ids = _scattered(ids, of_id, logp.shape[1]) - of_id.sum(axis=1, keepdims=True) * p
    of_entropy = -h * p * (finite_logp + entropy(logits, temperature)[:, None])
    return (of_ids + of_entropy) / _column(temperature)


def _scattered(ids: Any, values: np.ndarray, vocab_size: int) -> np.ndarray:
    """[T, V]: for each column the sum of the values [T, K] whose ids [T, K] it is."""
    places = to_numpy(ids).astype(np.int64)
    sums = np.zeros((len(places), vocab_size))
    row, k = np.nonzero((places >= 0) & (places < vocab_size))
    np.add.at(sums, (row, places[row, k]), values[row, k])
    return sums


class _Definitions:
    """A method for each array of /reference, of the same name. g is d_value, [T, 1]; h is that of
    entropies; g_ids [T, K] is that of values of ids."""

    def __init__(self, problem: LogprobProblem) -> None:
        vocab, arrays = problem.vocab_size, problem.arrays
        self.problem = problem
        self.heat = problem.filters["temperature"]
        self.z = _float64(arrays["logits"])[:, :vocab]
        self.targets = arrays["targets"][:, None]
        self.ids = arrays.get("ids", np.empty((len(self.z), 0), np.int64))
        self.g = _float64(arrays.get("d_value", np.ones(len(self.z))))[:, None]
        self.h = _float64(arrays["d_entropies"])[:, None] if "d_entropies" in arrays else self.g
        self.g_ids = _float64(arrays.get("d_ids", np.tile(self.g, self.ids.shape[1])))
        self.following = np.append(arrays["targets"][1:], -1)[: len(self.z), None]
        self.is_followed = ~np.isin(np.arange(len(self.z)) + 1, problem.offsets)[:, None]

    def of(self, name: str) -> np.ndarray:
        """An array by its name."""
        for operation in operations.OPERATIONS.values():
            if name in operation.arrays:
                return operation.define(self.rows)[name]
        return getattr(self, name)()

    @property
    def rows(self) -> operations.Rows:
        """What definitions of single operations take."""
        usual = {name: number.usual for name, number in operations.PARAMETERS.items()}
        return operations.Rows(
            self.logp, log_softmax(self.z), self.z, _column(self.heat), self.targets[:, 0], self.ids, self.g,
            self.problem.arrays, usual | self.problem.parameters,
        )

    @cached_property
    def logp(self) -> np.ndarray:
        return log_softmax(self.z, self.heat)

    @cached_property
    def left(self) -> np.ndarray:
        return filtered(self.z, **self.problem.filters)

    @property
    def teacher(self) -> np.ndarray:
        return _float64(self.problem.arrays["teacher"])[:, : self.problem.vocab_size]

    @property
    def hidden(self) -> np.ndarray:
        return _float64(self.problem.arrays["hidden"])

    @property
    def head(self) -> np.ndarray:
        return _float64(self.problem.arrays["head"])

    def logprob(self) -> np.ndarray:
        return gather(self.logp, self.targets)[:, 0]

    def entropy(self) -> np.ndarray:
        return entropy(self.z, self.heat)

    def log_softmax(self) -> np.ndarray:
        return self.logp

    def softmax(self) -> np.ndarray:
        return np.exp(self.logp)

    def filtered_logprob(self) -> np.ndarray:
        return gather(log_softmax(self.left, self.heat), self.targets, -np.inf)[:, 0]

    @cached_property
    def kept(self) -> np.ndarray:
        """[T, V]: which ids a sampler kept."""
        bounds, ids = (self.problem.arrays[f"sampling_mask_{name}"] for name in ("offsets", "ids"))
        mask = np.zeros(self.z.shape, dtype=bool)
        mask[np.repeat(np.arange(len(self.z)), np.diff(bounds)), ids] = True
        return mask

    @cached_property
    def logp_kept(self) -> np.ndarray:
        """[T, V]: log p among the kept ids; -inf for others, and in rows without any."""
        some = self.kept.any(axis=1)
        logp = log_softmax(np.where(self.kept | ~some[:, None], self.z, -np.inf), self.heat)
        return np.where(self.kept, logp, -np.inf)

    def kept_logprob(self) -> np.ndarray:
        return gather(self.logp_kept, self.targets, -np.inf)[:, 0]

    def d_kept_logprob(self) -> np.ndarray:
        hits = _scattered(self.targets, np.ones(self.targets.shape), self.problem.vocab_size)
        hits = hits * np.isfinite(self.logp_kept)
        return self.g * self.kept * (hits - np.exp(self.logp_kept)) / _column(self.heat)

    @cached_property
    def matrix(self) -> np.ndarray:
        """[V, C]: the weights of the projection."""
        arrays = self.problem.arrays
        weights = np.zeros((self.problem.vocab_size, self.problem.projection_width or 0))
        rows = np.repeat(np.arange(len(weights)), np.diff(arrays["projection_offsets"]))
        weights[rows, arrays["projection_columns"]] = arrays["projection_weights"]
        return weights

    def projected_probability(self) -> np.ndarray:
        return np.exp(self.logp) @ self.matrix

    def d_projected_probability(self) -> np.ndarray:
        above = self.problem.arrays.get("d_projected", np.tile(self.g, self.matrix.shape[1]))
        by_p, p = _float64(above) @ self.matrix.T, np.exp(self.logp)
        return p * (by_p - (p * by_p).sum(axis=1, keepdims=True)) / _column(self.heat)

    def next_token_logprob(self) -> np.ndarray:
        return next_tokens(self.logp, self.targets[:, 0], self.problem.offsets)

    def next_token_filtered_logprob(self) -> np.ndarray:
        logp = log_softmax(self.left, self.heat)
        return next_tokens(logp, self.targets[:, 0], self.problem.offsets, -np.inf)

    @cached_property
    def predicting(self) -> np.ndarray:
        """[T]: the row that predicts the token; -1: none. Sequence 0 is a prompt of the others."""
        bounds = self.problem.offsets
        rows = np.arange(len(self.z)) - 1
        rows[[b for b in bounds[1:-1] if b < len(rows)]] = bounds[1] - 1 if len(bounds) > 1 else -1
        return rows

    def rollout_logprob(self) -> np.ndarray:
        values = gather(self.logp[self.predicting], self.targets)[:, 0]
        return np.where(self.predicting < 0, 0, values)

    def gathered(self) -> np.ndarray:
        return gather(self.logp, self.ids)

    def gathered_logits(self) -> np.ndarray:
        return gather(self.z, self.ids)

    def top_values(self) -> np.ndarray:
        return top_k(self.z, self.ids.shape[1])[0]

    def top_ids(self) -> np.ndarray:
        return top_k(self.z, self.ids.shape[1])[1].astype(np.int32)

    def argmax_value(self) -> np.ndarray:
        return self.z.max(axis=1)

    def argmax_id(self) -> np.ndarray:
        return self.z.argmax(axis=1).astype(np.int32)

    def soft_cross_entropy(self) -> np.ndarray:
        return soft_cross_entropy(self.z, self.teacher)

    def distilled_logprob(self) -> np.ndarray:
        return gather(log_softmax(self.z), self.ids)

    def distilled_teacher_logprob(self) -> np.ndarray:
        values = self.problem.arrays.get("teacher_values")
        return log_softmax(gather(self.teacher, self.ids) if values is None else values)

    def distilled_entropy(self) -> np.ndarray:
        return entropy(self.z)

    def distilled_renormalised_logprob(self) -> np.ndarray:
        return log_softmax(gather(self.z, self.ids))

    distilled_renormalised_teacher_logprob = distilled_teacher_logprob

    @cached_property
    def _largest(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids of the divergence [T, K], and the teacher's log p of them and of the targets [T, 1]."""
        arrays = self.problem.arrays
        if "teacher_logprobs" in arrays:
            of_ids, of_targets = arrays["teacher_logprobs"], arrays["teacher_target_logprobs"]
            return self.ids.astype(np.int64), _float64(of_ids), _float64(of_targets)[:, None]
        ids, log_p = top_k(self.z, self.ids.shape[1])[1], log_softmax(self.teacher)
        return ids, gather(log_p, ids), gather(log_p, self.targets)

    @cached_property
    def _gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """log q - log p of the largest ids [T, K], 0 where q is 0, and of targets [T, 1] that are not
        among them, else 0."""
        ids, log_p, of_targets = self._largest
        log_q = log_softmax(self.z)
        own, sampled = gather(log_q, ids), gather(log_q, self.targets)
        with np.errstate(invalid="ignore"):
            gaps = np.where(np.isneginf(own), 0, own - log_p)
            tail = np.where(np.isneginf(sampled), -np.inf, sampled - of_targets)
        return gaps, np.where(self._is_tail, tail, 0)

    @property
    def _is_tail(self) -> np.ndarray:
        """[T, 1]: whether the target is an id, and not among the largest."""
        is_id = (self.targets >= 0) & (self.targets < self.problem.vocab_size)
        return is_id & ~(self._largest[0] == self.targets).any(axis=1, keepdims=True)

    def topk_kl(self) -> np.ndarray:
        gaps, tail = self._gaps
        q = np.exp(gather(log_softmax(self.z), self._largest[0]))
        with np.errstate(invalid="ignore"):
            terms = np.where(np.isposinf(gaps), np.inf, q * gaps)
            return terms.sum(axis=1) + tail[:, 0]

    def linear_logprob(self) -> np.ndarray:
        return logprob(self.hidden @ self.head.T, self.targets[:, 0], self.heat)

    def linear_entropy(self) -> np.ndarray:
        return entropy(self.hidden @ self.head.T, self.heat)

    def d_logprob(self) -> np.ndarray:
        return score_gradient(self.z, self.targets, self.g, 0, self.heat)

    def d_entropy(self) -> np.ndarray:
        return score_gradient(self.z, self.targets, 0, self.h, self.heat)

    def d_logprob_entropy(self) -> np.ndarray:
        return score_gradient(self.z, self.targets, self.g, self.h, self.heat)

    def d_filtered_logprob(self) -> np.ndarray:
        return self._filtered_gradient(self.targets, self.g)

    def d_next_token_logprob(self) -> np.ndarray:
        return score_gradient(self.z, self.following, self.g * self.is_followed, 0, self.heat)

    def d_next_token_filtered_logprob(self) -> np.ndarray:
        return self._filtered_gradient(self.following, self.g * self.is_followed)

    def _filtered_gradient(self, ids: np.ndarray, g: np.ndarray) -> np.ndarray:
        gradient = score_gradient(self.left, ids, g, 0, self.heat)
        return np.where(np.isneginf(self.left), 0, gradient)

    def _heat_of(self, rows: np.ndarray) -> Any:
        return self.heat if np.ndim(self.heat) == 0 else self.heat[rows]

    def d_rollout_logprob(self) -> np.ndarray:
        gradient = np.zeros(self.z.shape)
        is_predicted = self.predicting >= 0
        rows = self.predicting[is_predicted]
        np.add.at(
            gradient,
            rows,
            score_gradient(
                self.z[rows], self.targets[is_predicted], self.g[is_predicted], 0, self._heat_of(rows)
            ),
        )
        return gradient

    def d_gathered(self) -> np.ndarray:
        return score_gradient(self.z, self.ids, self.g_ids, 0, self.heat)

    def d_gathered_logits(self) -> np.ndarray:
        return _scattered(self.ids, self.g_ids, self.problem.vocab_size)

    def d_soft_cross_entropy(self) -> np.ndarray:
        return self.g * (np.exp(log_softmax(self.z)) - np.exp(log_softmax(self.teacher)))

    def d_distilled(self) -> np.ndarray:
        return score_gradient(self.z, self.ids, self.g_ids, self.h)

    def d_distilled_renormalised(self) -> np.ndarray:
        places = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape)
        of_places = score_gradient(gather(self.z, self.ids), places, self.g_ids)
        gradient = np.zeros(self.z.shape)
        np.add.at(gradient, (np.arange(len(self.z))[:, None], self.ids), of_places)
        return gradient

    def d_topk_kl(self) -> np.ndarray:
        return self._divergence_gradient(1)

    def d_topk_kl_advantage(self) -> np.ndarray:
        return self._divergence_gradient(0)

    def _divergence_gradient(self, constant: int) -> np.ndarray:
        """NaN where the divergence or a derivative leaves float32, but 0 where none comes from above."""
        ids, (gaps, tail), q = self._largest[0], self._gaps, np.exp(log_softmax(self.z))
        slopes = np.zeros(self.z.shape)
        bad = ~np.isfinite(self.topk_kl())[:, None]
        with np.errstate(invalid="ignore"):
            np.put_along_axis(slopes, ids, gather(q, ids) * (gaps + 1), axis=1)
            at = np.clip(self.targets, 0, self.z.shape[1] - 1)
            sampled = np.where(self._is_tail, tail + constant, gather(slopes, at))
            np.put_along_axis(slopes, at, sampled, axis=1)
            bad |= (abs(self.g * slopes) > np.finfo(np.float32).max).any(axis=1, keepdims=True)
            gradient = self.g * (slopes - q * slopes.sum(axis=1, keepdims=True))
        return np.where(self.g == 0, 0, np.where(bad, np.nan, gradient))

    def d_log_softmax(self) -> np.ndarray:
        g = _float64(self.problem.arrays.get("d_logprobs", np.tile(self.g, self.z.shape[1])))
        return (g - np.exp(self.logp) * g.sum(axis=1, keepdims=True)) / _column(self.heat)

    @property
    def d_product(self) -> np.ndarray:
        """Of linear_logprob + linear_entropy by the product of hidden and head, [T, V]."""
        z = self.hidden @ self.head.T
        return score_gradient(z, self.targets, self.g, self.h, self.heat)

    def d_hidden(self) -> np.ndarray:
        return self.d_product @ self.head

    def d_head(self) -> np.ndarray:
        return self.d_product.T @ self.hidden


def logprobs(names: Collection[str] | None = None, **inputs: Any) -> dict[str, np.ndarray]:
    """The arrays of /reference that a problem defines, or those in `names`, in float64.

    The inputs are those of gyre.write_logprobs; inputs/SCHEMA.md, Log-probabilities, has the
    definitions. ValueError: an input breaks a rule, or is missing for one of the names.
    """
    problem = logprob_problem(**inputs)
    definitions = _Definitions(problem)
    if names is None:
        names = [name for name in ANSWERS if _missing(problem, name) is None]
    for name in names:
        if need := _missing(problem, known(name, ANSWERS)):
            raise ValueError(f"{name} needs {need}, which was not given")
    return {name: definitions.of(name) for name in names}


def _missing(problem: LogprobProblem, name: str) -> str | None:
    """An input without which the array has no definition, or no known shape."""
    if need := problem.lacks(name):
        return need
    return "ids" if None in problem.shape_of(name) else None
