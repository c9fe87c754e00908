#!/usr/bin/env python3
"""Writes small log-probability problems with their answers in double precision, and inputs/MANIFEST.

    logprobs_golden.h5   2 sequences of 8 tokens, 64 ids: round numbers without a tie in a row
    logprobs_ties.h5     17 tokens, 101 ids in 108 columns: ties, -inf, huge padding, targets that
                         no column has, a temperature
    logprobs_linear.h5   14 tokens, 61 ids in 64 columns: hidden states and the weight of a head,
                         whose products are the logits, exactly; in bf16, too

The arithmetic, for a row z of the vocab_size logits of a token, with x = z / temperature:

    log p_v = x_v - log(sum_u exp(x_u))                entropy = - sum_v p_v log p_v
    cross entropy = - sum_v p_v(teacher) log p_v(z)    without a temperature
    filtered: log p of what survives the filter alone, -inf for a target that does not

A filter keeps the top_k largest, with all ties of the last of them; then, of what is left and
renormalised, those before which (larger values first, of equal ones higher ids) lies less than
top_p. An id that no column has scores 0, and -inf when filtered. Gradients are those of
sum_t d_value_t value_t, for ids of sum_t d_value_t sum_k value_tk; nobody's ids count in them like
columns elsewhere. Hidden states and the head's weight, if there are any, have answers of their own:
log-probability and entropy from the product of both, and the gradients by both of
sum_t d_value_t (log-probability_t + entropy_t). Where d_ids [T, K] and d_entropies [T] are there,
they are the gradients of the values of ids and of the entropies instead of d_value.
"""

import os

# The number of threads changes the last bits of a matrix product; must come before NumPy's import.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

import gyre_files  # noqa: E402
import make_inputs  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = 20240401
NEGLIGIBLE = 1e-5  # a sum of probabilities is good to this in f32


def log_softmax(z, temperature=1.0):
    """log p of every column of the rows [..., V]."""
    x = (z - z.max(axis=-1, keepdims=True)) / temperature
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def entropy(z, temperature=1.0):
    """Shannon's, in nats, with 0 log 0 = 0."""
    logp = log_softmax(z, temperature)
    p = np.exp(logp)
    return -(p * np.where(p > 0, logp, 0)).sum(axis=-1)


def picked(values, ids, nobody):
    """values [T, V] at ids [T, K]; `nobody` where no column has the id."""
    there = (ids >= 0) & (ids < values.shape[1])
    found = np.take_along_axis(values, np.where(there, ids, 0), axis=1)
    return np.where(there, found, nobody)


def hits(ids, vocab_size, weights):
    """[T, V]: the sum of the weights [T, K] of the ids [T, K] that each column is."""
    sums = np.zeros((len(ids), vocab_size))
    for row, some, of_some in zip(sums, ids, weights):
        for i, weight in zip(some, of_some):
            if 0 <= i < vocab_size:
                row[i] += weight
    return sums


def survivors(row, top_k, top_p, temperature, min_p=0.0):
    """[V] booleans: which columns of one row a filter keeps."""
    kept = np.ones(row.size, dtype=bool)
    if top_k > 0:
        kept = row >= np.sort(row)[-min(top_k, row.size)]
    if min_p > 0:
        below = (row - row.max()) / temperature - np.log(min_p)
        if abs(below[row < row.max()]).min() < NEGLIGIBLE:
            raise ValueError("a probability is too close to min_p")
        kept &= (row == row.max()) | (below >= 0)
    if top_p < 1:
        p = np.exp(log_softmax(np.where(kept, row, -np.inf), temperature))
        order = np.lexsort((-np.arange(row.size), -row))  # larger first, then higher ids
        before = np.cumsum(p[order]) - p[order]
        if abs(before - top_p).min() < NEGLIGIBLE:
            raise ValueError("a sum of probabilities is too close to top_p")
        first = np.zeros(row.size, dtype=bool)
        first[order] = before < top_p
        first[order[0]] = True
        kept &= first
    return kept


def cross_entropy(student, teacher):
    """- sum p log q, where 0 log 0 = 0."""
    q, p = log_softmax(student), np.exp(log_softmax(teacher))
    return -(p * np.where(p > 0, q, 0)).sum(axis=-1)


def each(g, ids):
    """[T, K]: gradients of the values of the ids [T, K]; g is that, or [T], the same for all of a token."""
    return g if g.ndim == 2 else np.repeat(g[:, None], ids.shape[1], axis=1)


def gradient(logp, ids, g, temperature):
    """Of sum_t sum_k g_tk log p(id_tk); g as above."""
    of_ids = each(g, ids)
    total = of_ids.sum(axis=1)[:, None]
    return (hits(ids, logp.shape[1], of_ids) - total * np.exp(logp)) / temperature


def next_tokens(problem, logp):
    """[n, longest - 1]: log p of the token that follows, sequence by sequence, then zeros."""
    offsets = problem["offsets"]
    lengths = np.diff(offsets)
    out = np.zeros((len(lengths), max(0, lengths.max() - 1)))
    for i, (begin, length) in enumerate(zip(offsets, lengths)):
        for p in range(length - 1):
            token = problem["targets"][begin + p + 1]
            out[i, p] = picked(logp[begin + p : begin + p + 1], np.array([[token]]), 0)[0, 0]
    return out


def linear_answer(problem):
    """Answers from hidden states and the weight of a head, in float64."""
    x, w = (problem[name].astype(np.float64) for name in ("hidden", "head"))
    g, targets = problem["d_value"].astype(np.float64), problem["targets"][:, None]
    g_entropy = problem.get("d_entropies", g).astype(np.float64)
    heat = np.broadcast_to(problem["temperature"], len(g))[:, None]
    z = x @ w.T
    logp, h = log_softmax(z, heat), entropy(z, heat)
    by_entropy = g_entropy[:, None] * np.exp(logp) * (logp + h[:, None]) / heat
    d_z = gradient(logp, targets, g, heat) - by_entropy
    return {
        "linear_logprob": picked(logp, targets, 0)[:, 0],
        "linear_entropy": h,
        "d_hidden": d_z @ w,
        "d_head": d_z.T @ x,
    }


def answer(problem):
    """All answers of a problem, in float64."""
    vocab, heat = problem["vocab_size"], problem["temperature"]
    z, teacher = (problem[name][:, :vocab].astype(np.float64) for name in ("logits", "teacher"))
    targets, ids = problem["targets"][:, None], problem["ids"]
    g = problem["d_value"].astype(np.float64)
    logp, plain, teachers = log_softmax(z, heat), log_softmax(z), np.exp(log_softmax(teacher))
    p, h = np.exp(logp), entropy(z, heat)
    kept = np.array([survivors(r, problem["top_k"], problem["top_p"], heat) for r in z])
    left = log_softmax(np.where(kept, z, -np.inf), heat)
    order = np.lexsort((np.broadcast_to(np.arange(vocab), z.shape), -z), axis=1)
    top = order[:, : min(ids.shape[1], vocab)]
    linear = linear_answer(problem) if "hidden" in problem else {}
    return linear | {
        "logprob": picked(logp, targets, 0)[:, 0],
        "entropy": h,
        "gathered": picked(logp, ids, 0),
        "soft_cross_entropy": cross_entropy(z, teacher),
        "filtered_logprob": picked(left, targets, -np.inf)[:, 0],
        "top_values": np.take_along_axis(z, top, axis=1),
        "top_ids": top.astype(np.int32),
        "next_token_logprob": next_tokens(problem, logp),
        "d_logprob": gradient(logp, targets, g, heat),
        "d_entropy": -g[:, None] * p * (np.where(p > 0, logp, 0) + h[:, None]) / heat,
        "d_gathered": gradient(logp, ids, g, heat),
        "d_soft_cross_entropy": g[:, None] * (np.exp(plain) - teachers),
        "d_filtered_logprob": np.where(kept, gradient(left, targets, g, heat), 0),
    }


def largest(z, k):
    """[T, k] ids of the largest logits, lower ids first among equals."""
    order = np.lexsort((np.broadcast_to(np.arange(z.shape[1]), z.shape), -z), axis=1)
    return order[:, :k].astype(np.int32)


def golden_problem():
    """Logits in whole eighths: exact in bf16, all different in a row."""
    b, s, v = np.ogrid[:2, :8, :64]
    logits = (((131 * b + 31 * s + 17 * v) % 97) / 8 - 6).reshape(16, 64)
    teacher = (((71 * b + 19 * s + 23 * v + 11) % 97) / 8 - 6).reshape(16, 64)
    return {
        "vocab_size": 64,
        "top_k": 10,
        "top_p": 0.9,
        "temperature": 1.0,
        "offsets": np.array([0, 8, 16], np.int64),
        "logits": logits.astype(np.float32),
        "teacher": teacher.astype(np.float32),
        "targets": ((7 * b + 13 * s + 5) % 64).reshape(16).astype(np.int32),
        "ids": largest(teacher, 4),
        "d_value": (((5 * np.arange(16)) % 7 - 3) / 2).astype(np.float32),
    }


def ties_problem():
    """Logits in halves, so that many are equal, and rows that are hard in other ways."""
    rng = np.random.default_rng(SEED)
    tokens, vocab, columns, picks = 17, 101, 108, 5
    halves = lambda size: np.round(2 * size * rng.standard_normal((tokens, columns))) / 2  # noqa: E731
    logits, teacher = halves(2), halves(1.5)
    absent = rng.random((tokens, vocab)) < 0.2  # of a probability of 0
    logits[:, :vocab][absent] = -np.inf
    teacher[:, :vocab][absent | (rng.random((tokens, vocab)) < 0.1)] = -np.inf
    logits[3, :vocab] = 1  # all equal
    logits[4, :vocab] = -np.inf
    logits[4, 70] = -2  # certain
    teacher[4, :vocab] = logits[4, :vocab]
    logits[5, :vocab] += 16384  # a common offset; halves are still exact in f32
    logits[6, :34] = -np.inf  # the first third
    teacher[6, :34] = -np.inf
    logits[7, 67:vocab] = -np.inf  # the last third; the teacher has it
    logits[:, vocab:], teacher[:, vocab:] = 3e38, 1e30  # padding
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    targets[[0, 1, 2]] = -100, vocab, columns + 7  # nobody's; the second is a padded column
    targets[4], targets[8] = 70, np.flatnonzero(absent[8])[0]
    ids = rng.integers(0, vocab, (tokens, picks)).astype(np.int32)
    ids[9] = 42  # one id, five times
    g = rng.standard_normal(tokens).astype(np.float32)
    g[[10, 11]] = 0
    return {
        "vocab_size": vocab,
        "top_k": 12,
        "top_p": 0.75,
        "temperature": 2.0,  # logits over it are exact in f32, offset or not
        "offsets": np.array([0, 1, 1, 7, 17], np.int64),
        "logits": logits.astype(np.float32),
        "teacher": teacher.astype(np.float32),
        "targets": targets,
        "ids": ids,
        "d_value": g,
    }


def linear_problem():
    """Halves, whose products and their sums f32 and bf16 hold exactly."""
    rng = np.random.default_rng(SEED + 1)
    tokens, vocab, columns, width = 14, 61, 64, 12
    hidden = rng.integers(-2, 3, (tokens, width)) / 2
    head = rng.integers(-3, 4, (vocab, width)) / 2
    hidden[5] = 0  # all ids alike
    head[17] = head[18]  # two ids that no hidden state tells apart
    logits = np.full((tokens, columns), 7.0)  # padding
    logits[:, :vocab] = hidden @ head.T
    teacher = rng.integers(-16, 17, (tokens, columns)) / 4
    targets = rng.integers(0, vocab, tokens)
    targets[[2, 9]] = -100, vocab
    g = rng.integers(-8, 9, tokens) / 4
    g[[3, 11]] = 0
    return {
        "vocab_size": vocab,
        "top_k": 9,
        "top_p": 1.0,
        "temperature": 1.25,
        "offsets": np.array([0, 5, 14], np.int64),
        "logits": logits.astype(np.float32),
        "teacher": teacher.astype(np.float32),
        "targets": targets.astype(np.int32),
        "ids": largest(teacher[:, :vocab], 3),
        "d_value": g.astype(np.float32),
        "hidden": hidden.astype(np.float32),
        "head": head.astype(np.float32),
    }


# File -> its problem. make_inputs.CONTENTS describes the files in MANIFEST.
PROBLEMS = {
    "logprobs_golden.h5": golden_problem,
    "logprobs_ties.h5": ties_problem,
    "logprobs_linear.h5": linear_problem,
}


def check_golden(problem, answers):
    """Numbers that were computed by other means."""
    close = lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-9)  # noqa: E731
    close(answers["logprob"][:3], [-3.123163688, -7.825016135, -12.917737857])
    close(answers["logprob"].sum(), -127.545396938)
    close(answers["next_token_logprob"].sum(), -97.727189536)
    close(answers["entropy"][0], 2.643832576)
    close(answers["entropy"].sum(), 42.577899221)
    close(answers["soft_cross_entropy"].sum(), 124.937161405)
    close(answers["gathered"][0], [-12.748163688, -4.498163688, -12.498163688, -4.248163688])
    row = answer({**problem, "d_value": np.ones(16, np.float32)})["d_logprob"][0]
    close([row[5], row[57], abs(row).sum()], [0.955982310, -0.174093340, 1.911964621])
    z = problem["logits"].astype(np.float64)
    assert list(largest(z, 5)[0]) == [57, 17, 34, 51, 11]
    assert list(largest(z, 5)[15]) == [8, 25, 42, 2, 59]
    for k, p, wanted in (
        (0, 1.0, [-1.748163688, -1.950016135, -2.042737857]),
        (10, 1.0, [-1.590189817, -1.790390795, -1.885388871]),
        (0, 0.9, [-1.644316089, -1.847203671, -1.953223396]),
        (10, 0.9, [-1.500657778, -1.707621019, -1.804886470]),
        (5, 0.5, [-0.632599035, -0.825939420, -np.inf]),
    ):
        kept = np.array([survivors(r, k, p, 1.0) for r in z])
        left = log_softmax(np.where(kept, z, -np.inf))
        close([left[s, t] for s, t in enumerate([57, 55, 19])], wanted)


def write_logprobs(path, problem, answers):
    """Writes a gyre/logprobs file; `answers` may be None."""
    with gyre_files.new_file(path, "gyre/logprobs") as file:
        group = file.create_group("logprobs")
        for name in ("vocab_size", "top_k"):
            group.attrs[name] = np.int64(problem[name])
        for name in ("top_p", "temperature"):
            group.attrs[name] = np.float64(problem[name])
        for name in ("offsets", "logits", "teacher", "targets", "ids", "d_value", "hidden", "head"):
            if name in problem:
                gyre_files.put(group, name, problem[name])
        if answers is not None:
            group = file.create_group("reference")
            group.attrs["generator"] = "inputs/make_logprobs.py"
            for name, array in answers.items():
                gyre_files.put(group, name, array)
        gyre_files.put_provenance(
            file,
            {
                "generator": "inputs/make_logprobs.py",
                "command": "inputs/make_logprobs.py",
                "sources": "none: formulas, and random numbers from NumPy's default_rng",
                "seed": SEED,
                "licence": "Numbers.",
            },
        )


def main():
    """Writes all files."""
    with np.errstate(divide="ignore"):
        for name, make in PROBLEMS.items():
            problem = make()
            answers = answer(problem)
            if name == "logprobs_golden.h5":
                check_golden(problem, answers)
            write_logprobs(os.path.join(HERE, name), problem, answers)
    make_inputs.make_manifest()


if __name__ == "__main__":
    main()
