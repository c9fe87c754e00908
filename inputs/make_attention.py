#!/usr/bin/env python3
"""Writes small attention problems with their answers in double precision, and inputs/MANIFEST.

    attention_causal.h5   6 documents of 0 to 33 tokens, 4 query heads on 2 KV heads
    attention_window.h5   3 documents, a window of 16 tokens, 8 query heads on one KV head, sinks
    attention_regions.h5  3 documents whose masks are regions of every kind, sinks

The arithmetic, for query row i of head h over the keys j that it sees, with sink z_h if there are
sinks (otherwise its term is missing):

    x_ij = scale <q_i, k_j>          L_i = log(sum_j exp(x_ij) + exp(z_h))
    p_ij = exp(x_ij - L_i)           O_i = sum_j p_ij v_j           delta_i = <O_i, dO_i>
    dv_j = sum_i p_ij dO_i           ds_ij = p_ij (<dO_i, v_j> - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i
    dz_h = - sum_i exp(z_h - L_i) delta_i

Query head h reads KV head h // (heads / kv_heads). A causal query at position p of its document
sees the positions up to p, with a window w the positions p - w + 1 to p. inputs/SCHEMA.md says what
regions show. A query that selects keys sees these.
"""

import os

# The number of threads changes the last bits of a matrix product; must come before NumPy's import.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

import gyre_files  # noqa: E402
import make_inputs  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = 20240301

# File -> problem. make_inputs.CONTENTS describes the files in MANIFEST.
PROBLEMS = {
    "attention_causal.h5": {
        "lengths": [33, 1, 0, 8, 11, 2],
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
    },
    "attention_window.h5": {
        "lengths": [36, 3, 4],
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 8,
        "window": 16,
        "sinks": True,
    },
    "attention_regions.h5": {
        "lengths": [40, 1, 13],
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mask": "regions",
        "sinks": True,
        # document, q_begin, q_end, k_begin, k_end, kind, window
        "regions": [
            [0, 0, 12, 0, 12, 1, 0],  # a prompt, and three answers to it:
            [0, 12, 40, 0, 12, 0, 0],
            [0, 12, 20, 12, 20, 1, 0],
            [0, 20, 34, 20, 34, 1, 5],  # through a window
            [0, 34, 40, 34, 40, 2, 0],  # backwards
            [1, 0, 1, 0, 1, 0, 0],
            [2, 0, 6, 3, 13, 3, 0],  # a band
            [2, 6, 13, 6, 13, 1, 0],
        ],
    },
}


def visible(length, problem, document):
    """[length, length] booleans: does query i of the document see its key j."""
    i, j = np.ogrid[:length, :length]
    window = problem["window"]
    if problem["mask"] == "full":
        return np.ones((length, length), dtype=bool)
    if problem["mask"] == "causal":
        return (j <= i) & ((j > i - window) if window else True)
    seen = np.zeros((length, length), dtype=bool)
    if problem["mask"] == "selected":
        first, end = problem.get("query_offsets", problem["offsets"])[document : document + 2]
        for query, keys in enumerate(problem["selected_keys"][first:end], length - (end - first)):
            seen[query, keys[keys >= 0]] = True
        return seen
    for number, q_begin, q_end, k_begin, k_end, kind, width in problem["regions"]:
        if number != document:
            continue
        last = i + k_end - q_end
        region = (q_begin <= i) & (i < q_end) & (k_begin <= j) & (j < k_end)
        if kind & 1:
            region &= (j <= last) & ((j > last - width) if width else True)
        if kind & 2:
            region &= j >= i + k_begin - q_begin
        seen |= region
    return seen


def attend(problem, answers, document, head):
    """Fills in the answers of one head on the rows of one document; adds to the other gradients."""
    rows = slice(*problem["offsets"][document : document + 2])
    queries = slice(*problem.get("query_offsets", problem["offsets"])[document : document + 2])
    group = problem["q"].shape[1] // problem["k"].shape[1]
    q, d_out = (problem[name][queries, head].astype(np.float64) for name in ("q", "d_out"))
    k, v = (problem[name][rows, head // group].astype(np.float64) for name in ("k", "v"))
    own = k.shape[1]
    if "k_shared" in problem:
        k = np.hstack([k, problem["k_shared"][rows]])
    if len(q) == 0:
        return
    scores = problem["scale"] * (q @ k.T)
    scores[~visible(len(k), problem, document)[len(k) - len(q) :]] = -np.inf
    sink = -np.inf
    if "sinks" in problem:
        sink = np.float64(problem["sinks"][head])
    top = np.maximum(scores.max(axis=1), sink)
    top[top == -np.inf] = 0  # a query that sees nothing: lse is -inf, all else 0
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(scores - top[:, None]).sum(axis=1) + np.exp(sink - top))
    p = np.exp(scores - np.where(lse == -np.inf, 0, lse)[:, None])
    out = p @ v
    delta = (out * d_out).sum(axis=1)
    d_scores = p * (d_out @ v.T - delta[:, None])
    answers["out"][queries, head] = out
    answers["lse"][queries, head] = lse
    answers["d_q"][queries, head] = problem["scale"] * (d_scores @ k)
    d_k = problem["scale"] * (d_scores.T @ q)
    answers["d_k"][rows, head // group] += d_k[:, :own]
    if "k_shared" in problem:
        answers["d_k_shared"][rows] += d_k[:, own:]
    answers["d_v"][rows, head // group] += p.T @ d_out
    if "sinks" in problem:
        answers["d_sinks"][head] -= (np.exp(sink - lse) * delta).sum()


def answer(problem):
    """out, lse and all gradients of a problem, in float64."""
    queries, heads, _ = problem["q"].shape
    answers = {
        "out": np.zeros(problem["d_out"].shape),
        "lse": np.zeros((queries, heads)),
        "d_q": np.zeros(problem["q"].shape),
        "d_k": np.zeros(problem["k"].shape),
        "d_v": np.zeros(problem["v"].shape),
    }
    for name in ("k_shared", "sinks"):
        if name in problem:
            answers[f"d_{name}"] = np.zeros(problem[name].shape)
    for document in range(len(problem["offsets"]) - 1):
        for head in range(heads):
            attend(problem, answers, document, head)
    return answers


def make_problem(
    lengths, heads, kv_heads, head_dim, mask="causal", window=0, sinks=False, regions=None
):
    """Standard normal inputs; the same for the same arguments."""
    rng = np.random.default_rng(SEED)
    tokens = sum(lengths)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    problem = {
        "mask": mask,
        "window": window,
        "scale": head_dim**-0.5,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "q": normal(tokens, heads, head_dim),
        "k": normal(tokens, kv_heads, head_dim),
        "v": normal(tokens, kv_heads, head_dim),
        "d_out": normal(tokens, heads, head_dim),
    }
    if sinks:
        problem["sinks"] = normal(heads)
    if regions is not None:
        problem["regions"] = np.array(regions, np.int64)
    return problem


def write_attention(path, problem, answers):
    """Writes a gyre/attention file; `answers` may be None."""
    with gyre_files.new_file(path, "gyre/attention") as file:
        group = file.create_group("attention")
        group.attrs["mask"] = problem["mask"]
        group.attrs["window"] = np.int64(problem["window"])
        group.attrs["scale"] = np.float64(problem["scale"])
        for name in ("offsets", "q", "k", "v", "d_out", "sinks", "regions"):
            if name in problem:
                gyre_files.put(group, name, problem[name])
        if answers is not None:
            group = file.create_group("reference")
            group.attrs["generator"] = "inputs/make_attention.py"
            for name, array in answers.items():
                gyre_files.put(group, name, array)
        gyre_files.put_provenance(
            file,
            {
                "generator": "inputs/make_attention.py",
                "command": "inputs/make_attention.py",
                "sources": "none: random numbers from NumPy's default_rng",
                "seed": SEED,
                "licence": "Random numbers.",
            },
        )


def main():
    """Writes all files."""
    for name, arguments in PROBLEMS.items():
        problem = make_problem(**arguments)
        write_attention(os.path.join(HERE, name), problem, answer(problem))
    make_inputs.make_manifest()


if __name__ == "__main__":
    main()
