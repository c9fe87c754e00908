"""Answers of a log-probability problem in float64: every array that SCHEMA.md names and that the
problem has the inputs for.

A problem maps names of SCHEMA.md to NumPy arrays and numbers; all but vocab_size, logits and
targets may be missing. Shapes below use: T = tokens, V = vocab_size, C = columns, K = ids of a
token, n = sequences, U = tokens of the longest one, D = elements of a hidden state.

make_logprobs.py has the arithmetic that the files in inputs/ share with these.
"""

import numpy as np

import make_logprobs
from make_logprobs import cross_entropy, entropy, gradient, log_softmax, picked, survivors

# Attributes and arrays that a problem need not have: what stands for them.
DEFAULTS = {
    "temperature": lambda problem: 1.0,
    "top_k": lambda problem: 0,
    "top_p": lambda problem: 1.0,
    "min_p": lambda problem: 0.0,
    "offsets": lambda problem: np.array([0, len(problem["targets"])]),
    "d_value": lambda problem: np.ones(len(problem["targets"])),
}


def complete(problem):
    """The problem with what SCHEMA.md says of everything that it leaves out."""
    return {name: make(problem) for name, make in DEFAULTS.items()} | problem


def of_rows(problem, name):
    """[T]: the number of each row, where the problem has one of all rows, too."""
    return np.broadcast_to(problem[name], len(problem["targets"]))


def heat_of(problem):
    """[T, 1]: what the logits of each row are divided by."""
    return of_rows(problem, "temperature").astype(np.float64)[:, None]


def rows_of(problem, name):
    """[T, V] float64: logits without padding, whatever that holds."""
    return problem[name][:, : problem["vocab_size"]].astype(np.float64)


def above(problem, name):
    """The gradient of the values of ids [T, K], or of entropies [T]; where the problem has none, that of
    every value of the token."""
    return problem.get(name, problem["d_value"]).astype(np.float64)


def d_entropy(logp, h, g, temperature):
    """[T, V]: gradient of sum_t g_t H_t, from logp [T, V] and h [T]."""
    p = np.exp(logp)
    return -g[:, None] * p * (np.where(p > 0, logp, 0) + h[:, None]) / temperature


def scores(problem, z, g):
    """What one softmax at the problem's temperature gives; z [T, V], g [T]."""
    heat, targets = heat_of(problem), problem["targets"][:, None]
    logp, h = log_softmax(z, heat), entropy(z, heat)
    by_target = gradient(logp, targets, g, heat)
    by_entropy = d_entropy(logp, h, above(problem, "d_entropies"), heat)
    return {
        "log_softmax": logp,
        "softmax": np.exp(logp),
        "logprob": picked(logp, targets, 0)[:, 0],
        "entropy": h,
        "d_logprob": by_target,
        "d_entropy": by_entropy,
        "d_logprob_entropy": by_target + by_entropy,
    }


def filtered_rows(problem, z):
    """[T, V]: which columns the filter keeps, and log p among them, -inf for the others."""
    filters = [of_rows(problem, name) for name in ("top_k", "top_p", "temperature", "min_p")]
    kept = np.array([survivors(*row) for row in zip(z, *filters)], bool).reshape(z.shape)
    return kept, log_softmax(np.where(kept, z, -np.inf), heat_of(problem))


def filtered_gradient(problem, kept, left, ids, g):
    """[T, V]: of sum_t g_t left(id_t); ids [T, 1], those that are not kept count elsewhere."""
    counted = np.where(np.isfinite(picked(left, ids, -np.inf)), ids, -1)
    return np.where(kept, gradient(left, counted, g, heat_of(problem)), 0)


def filtered(problem, z, g):
    """Log p of the targets among what the filter keeps. A target of -inf is not among it."""
    targets = problem["targets"][:, None]
    kept, left = filtered_rows(problem, z)
    return {
        "filtered_logprob": picked(left, targets, -np.inf)[:, 0],
        "d_filtered_logprob": filtered_gradient(problem, kept, left, targets, g),
    }


def kept_of(problem, t):
    """The ids that a sampler kept in row t."""
    begin, end = problem["sampling_mask_offsets"][t : t + 2]
    return problem["sampling_mask_ids"][begin:end]


def among_kept(problem, z, g):
    """Log p of the targets among the ids that a sampler kept, and its gradient."""
    value, slope, heats = np.full(len(z), -np.inf), np.zeros(z.shape), heat_of(problem)
    for t, (row, target) in enumerate(zip(z, problem["targets"])):
        ids = kept_of(problem, t)
        if ids.size == 0:
            continue
        logp = log_softmax(row[None, ids], heats[t : t + 1])[0]
        hit = (ids == target) & np.isfinite(row[ids])
        value[t] = logp[hit][0] if hit.any() else -np.inf
        slope[t, ids] = g[t] * (hit - np.exp(logp)) / heats[t, 0]
    return {"kept_logprob": value, "d_kept_logprob": slope}


def projected(problem, z, g):
    """Probabilities, times a sparse matrix of weights that is written out here, [V, C]; and the
    gradient of sum_tc d_projected_tc projected_tc."""
    bounds, width = problem["projection_offsets"], problem["projection_width"]
    matrix = np.zeros((z.shape[1], width))
    for v, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        for column, weight in zip(problem["projection_columns"][begin:end], problem["projection_weights"][begin:end]):
            matrix[v, column] += weight
    above = problem.get("d_projected", np.repeat(g[:, None], width, axis=1)).astype(np.float64)
    p = np.exp(log_softmax(z, heat_of(problem)))
    by_p = above @ matrix.T
    return {
        "projected_probability": p @ matrix,
        "d_projected_probability": p * (by_p - (p * by_p).sum(axis=1)[:, None]) / heat_of(problem),
    }


def followers(problem, g):
    """[T, 1]: the target of the token that follows in the sequence; [T]: the gradient of its
    prediction, g of the token that predicts; -1 and 0 for a sequence's last token."""
    following = np.full((len(g), 1), -1)
    counts = np.zeros(len(g))
    for begin, end in zip(problem["offsets"][:-1], problem["offsets"][1:]):
        rows = slice(begin, max(begin, end - 1))
        following[rows, 0] = problem["targets"][rows.start + 1 : rows.stop + 1]
        counts[rows] = g[rows]
    return following, counts


def by_sequence(problem, values):
    """[n, max(0, U - 1)]: values [T] of the tokens that another one follows, then zeros."""
    counts = [max(0, length - 1) for length in np.diff(problem["offsets"])]
    out = np.zeros((len(counts), max([0, *counts])))
    for row, begin, count in zip(out, problem["offsets"], counts):
        row[:count] = values[begin : begin + count]
    return out


def next_tokens(problem, z, g):
    """Log p of the token that follows, of the whole row and under the filter."""
    heat = heat_of(problem)
    following, counts = followers(problem, g)
    logp = log_softmax(z, heat)
    kept, left = filtered_rows(problem, z)
    values, survived = picked(logp, following, 0), picked(left, following, -np.inf)
    return {
        "next_token_logprob": by_sequence(problem, values[:, 0]),
        "next_token_filtered_logprob": by_sequence(problem, survived[:, 0]),
        "d_next_token_logprob": gradient(logp, following, counts, heat),
        "d_next_token_filtered_logprob": filtered_gradient(problem, kept, left, following, counts),
    }


def rollouts(problem, z, g):
    """Log p of every token in the row that predicts it; of the first one of a sequence behind the
    first, in the first sequence's last row. d_value is that of the token that is predicted."""
    heats, bounds = heat_of(problem), problem["offsets"].tolist()
    value, slope = np.zeros(len(z)), np.zeros(z.shape)
    for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        for t in range(begin, end):
            row = t - 1 if t > begin else bounds[1] - 1 if i > 0 else -1
            if row < 0:
                continue
            ids = problem["targets"][t].reshape(1, 1)
            heat = heats[row : row + 1]
            logp = log_softmax(z[row : row + 1], heat)
            value[t] = picked(logp, ids, 0)[0, 0]
            slope[row] += gradient(logp, ids, g[t : t + 1], heat)[0]
    return {"rollout_logprob": value, "d_rollout_logprob": slope}


def ranking(z):
    """[T, V]: the columns, larger logits first, of equal ones lower ids."""
    return np.lexsort((np.broadcast_to(np.arange(z.shape[1]), z.shape), -z), axis=1)


def largest(z):
    """The largest logit of each row, and its id."""
    first = ranking(z)[:, 0]
    return {"argmax_value": z[np.arange(len(z)), first], "argmax_id": first.astype(np.int32)}


def of_ids(problem, z):
    """What is asked of ids [T, K], and the largest logits, as many as there are ids."""
    ids, heat, g = problem["ids"], heat_of(problem), above(problem, "d_ids")
    logp = log_softmax(z, heat)
    top = ranking(z)[:, : ids.shape[1]]
    return {
        "gathered": picked(logp, ids, 0),
        "gathered_logits": picked(z, ids, 0),
        "top_values": np.take_along_axis(z, top, axis=1),
        "top_ids": top.astype(np.int32),
        "d_gathered": gradient(logp, ids, g, heat),
        "d_gathered_logits": make_logprobs.hits(ids, z.shape[1], make_logprobs.each(g, ids)),
    }


def distilled(problem, z):
    """Student and teacher at a teacher's ids [T, K], at temperature 1: the student's
    log-probabilities over the vocabulary, or over those ids alone, each place a term of its own."""
    ids = problem["ids"]
    if "teacher_values" in problem:
        teacher_z = problem["teacher_values"].astype(np.float64)
    else:
        teacher_z = picked(rows_of(problem, "teacher"), ids, 0)
    plain, teacher = log_softmax(z), log_softmax(teacher_z)
    among = log_softmax(picked(z, ids, 0))
    h, g = entropy(z), make_logprobs.each(above(problem, "d_ids"), ids)
    weights = g - g.sum(axis=1)[:, None] * np.exp(among)
    scattered = np.zeros(z.shape)
    np.add.at(scattered, (np.arange(len(z))[:, None], ids), weights)
    return {
        "distilled_logprob": picked(plain, ids, 0),
        "distilled_teacher_logprob": teacher,
        "distilled_entropy": h,
        "distilled_renormalised_logprob": among,
        "distilled_renormalised_teacher_logprob": teacher,
        "d_distilled": gradient(plain, ids, g, 1) + d_entropy(plain, h, above(problem, "d_entropies"), 1),
        "d_distilled_renormalised": scattered,
    }


def teacher_at(problem, z, t):
    """The ids of row t that carry a divergence, log p of them by the teacher, and log p of the target."""
    if "teacher_logprobs" in problem:
        return problem["ids"][t], problem["teacher_logprobs"][t], problem["teacher_target_logprobs"][t]
    ids = ranking(z)[t, : problem["ids"].shape[1]]
    log_p = log_softmax(rows_of(problem, "teacher")[t])
    target = problem["targets"][t]
    return ids, log_p[ids], log_p[target] if 0 <= target < z.shape[1] else np.nan


def divergences(problem, z, g):
    """sum q (log q - log p) over the student's largest ids, and log q - log p of a target that is not
    among them; at temperature 1. Two gradients, which differ in that of the target's term."""
    log_qs, value = log_softmax(z), np.zeros(len(z))
    slopes = {"d_topk_kl": np.zeros(z.shape), "d_topk_kl_advantage": np.zeros(z.shape)}
    for t, target in enumerate(problem["targets"]):
        ids, log_p, of_target = teacher_at(problem, z, t)
        log_q, by_log_q = log_qs[t], np.zeros(z.shape[1])
        for v, theirs in zip(ids, np.asarray(log_p, np.float64)):
            if np.isneginf(log_q[v]):
                continue
            value[t] += np.inf if np.isneginf(theirs) else np.exp(log_q[v]) * (log_q[v] - theirs)
            by_log_q[v] = np.exp(log_q[v]) * (log_q[v] - theirs + 1)
        gap = 0
        is_tail = 0 <= target < z.shape[1] and target not in ids
        if is_tail:
            gap = -np.inf if np.isneginf(log_q[target]) else log_q[target] - np.float64(of_target)
        value[t] += gap
        for constant, slope in zip((1, 0), slopes.values()):
            total = by_log_q.copy()
            if is_tail:
                total[target] = gap + constant
            if g[t] != 0 and not np.isfinite(value[t]):
                slope[t] = np.nan
            elif g[t] != 0:
                slope[t] = g[t] * (total - np.exp(log_q) * total.sum())
    return {"topk_kl": value} | slopes


def of_every_id(problem, z):
    """The gradient of log-softmax, from one of the log-probability of every id."""
    above = problem["d_logprobs"].astype(np.float64)
    p = np.exp(log_softmax(z, heat_of(problem)))
    return {"d_log_softmax": (above - p * above.sum(axis=1)[:, None]) / heat_of(problem)}


def soft_targets(problem, z, g):
    """Cross entropies with a teacher's whole rows, at temperature 1."""
    teacher = rows_of(problem, "teacher")
    difference = np.exp(log_softmax(z)) - np.exp(log_softmax(teacher))
    return {
        "soft_cross_entropy": cross_entropy(z, teacher),
        "d_soft_cross_entropy": g[:, None] * difference,
    }


def answer(problem, leave_out=()):
    """All answers but those named in `leave_out`: name -> array; raises where one has a NaN."""
    problem = complete(problem)
    z, g = rows_of(problem, "logits"), problem["d_value"].astype(np.float64)
    with np.errstate(divide="ignore"):
        found = scores(problem, z, g) | filtered(problem, z, g) | next_tokens(problem, z, g)
        found |= largest(z) | rollouts(problem, z, g)
        if "sampling_mask_ids" in problem:
            found |= among_kept(problem, z, g)
        if "projection_offsets" in problem:
            found |= projected(problem, z, g)
        if "d_logprobs" in problem:
            found |= of_every_id(problem, z)
        if "teacher" in problem:
            found |= soft_targets(problem, z, g)
        if "ids" in problem:
            found |= of_ids(problem, z)
            asked = "teacher" in problem or "teacher_values" in problem
            if asked and problem["ids"].shape[1] <= z.shape[1]:
                found |= distilled(problem, z)
            if "teacher" in problem or "teacher_logprobs" in problem:
                found |= divergences(problem, z, g)
        if "hidden" in problem:
            found |= make_logprobs.linear_answer(problem)
    for name in leave_out:
        del found[name]
    for name, array in found.items():
        if np.isnan(array).any():
            raise ValueError(f"{name} has a NaN")
    return found
