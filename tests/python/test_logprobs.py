#!/usr/bin/env python3
"""Checks the answers in inputs/logprobs_*.h5 against log-probabilities written another way.

One row at a time, in plain sums of Python numbers: no maximum is subtracted where that can be
avoided, no formula of a gradient is used. Gradients are differentiated by a complex step: for an
analytic f, Im f(x + i h) / h is f'(x) to the last bit, since nothing is subtracted. Run it directly
or through unittest; needs python3-numpy and python3-h5py.
"""

import cmath
import math
import os
import sys
import tempfile
import unittest

import h5py
import numpy as np

INPUTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "inputs")
sys.dont_write_bytecode = True
sys.path.insert(0, INPUTS)

import make_logprobs  # noqa: E402  (found through the line above)

FILES = sorted(make_logprobs.PROBLEMS)
STEP = 1e-30
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def load(path):
    """Problem and answers of a file: two mappings of arrays and numbers."""
    with h5py.File(path, "r") as file:
        group = file["logprobs"]
        problem = dict(group.attrs)
        problem.update({name: group[name][...] for name in group})
        return problem, {name: file["reference"][name][...] for name in file["reference"]}


def logs(row, kept, temperature):
    """{id: log p} of the ids in `kept` with a logit above -inf; logits may be complex."""
    offset = max(complex(row[v]).real for v in kept)  # a constant: no derivative goes through it
    terms = {v: (row[v] - offset) / temperature for v in kept if complex(row[v]).real > -math.inf}
    total = cmath.log(sum(cmath.exp(x) for x in terms.values()))
    return {v: x - total for v, x in terms.items()}


def keeps(row, top_k, top_p, temperature):
    """The ids that a filter keeps: a walk down the ranking."""
    ranking = sorted(range(len(row)), key=lambda v: (-row[v], -v))
    if top_k:
        ranking = [v for v in ranking if row[v] >= row[ranking[top_k - 1]]]
    if top_p == 1:
        return ranking
    p = {v: math.exp(x.real) for v, x in logs(row, ranking, temperature).items()}
    kept, mass = [], 0.0
    for v in ranking:
        if kept and mass >= top_p:
            break
        kept.append(v)
        mass += p.get(v, 0.0)
    return kept


def values(problem, t, row):
    """What is differentiated, of one token, by the names of the answers."""
    heat, everything = problem["temperature"], range(problem["vocab_size"])
    target, ids = int(problem["targets"][t]), problem["ids"][t]
    mine = logs(row, everything, heat)
    real = [complex(z).real for z in row]
    left = logs(row, keeps(real, problem["top_k"], problem["top_p"], heat), heat)
    plain = logs(row, everything, 1)
    teacher = problem["teacher"][t, : problem["vocab_size"]].astype(float)
    cross = sum(-cmath.exp(x) * plain[v] if v in plain else math.inf for v,
                x in logs(teacher, everything, 1).items())
    present = 0 <= target < problem["vocab_size"]
    return {"logprob": mine.get(target, -math.inf) if present else 0.0,
            "entropy": -sum(cmath.exp(x) * x for x in mine.values()),
            "gathered": [mine.get(int(i), -math.inf) for i in ids], "soft_cross_entropy": cross,
            "filtered_logprob": left.get(target, -math.inf)}


def linear_sum(problem, hidden, head):
    """sum_t d_value_t (log-probability_t + entropy_t) of hidden states and a head's weight, lists of
    lists of numbers that may be complex; and the two scores of each token."""
    total, scores = 0, []
    for t, x in enumerate(hidden):
        row = [sum(a * b for a, b in zip(x, w)) for w in head]
        found = values(problem, t, row)
        scores.append((found["logprob"], found["entropy"]))
        total += float(problem["d_value"][t]) * sum(scores[-1])
    return total, scores


def row_of(problem, t):
    """The token's logits as Python numbers."""
    return [float(z) for z in problem["logits"][t, : problem["vocab_size"]]]


class StoredAnswers(unittest.TestCase):
    """The files in inputs/."""

    def test_values(self):
        for name in FILES:
            problem, answers = load(os.path.join(INPUTS, name))
            for t in range(len(problem["targets"])):
                found = values(problem, t, row_of(problem, t))
                for key, value in found.items():
                    wanted = np.real(np.array(value))
                    np.testing.assert_allclose(answers[key][t], wanted,
                                               err_msg=f"{name} {key}[{t}]", **CLOSE)

    def test_gradients(self):
        rng = np.random.default_rng(1)
        for name in FILES:
            problem, answers = load(os.path.join(INPUTS, name))
            for t in range(len(problem["targets"])):
                row, g = row_of(problem, t), float(problem["d_value"][t])
                some = [v for v in rng.choice(len(row), 12, replace=False) if row[v] > -math.inf]
                for v in {*some, max(range(len(row)), key=lambda u: row[u])}:
                    changed = list(row)
                    changed[v] = row[v] + 1j * STEP
                    for key, value in values(problem, t, changed).items():
                        self.compare(f"{name} d_{key}[{t}, {v}]", answers[f"d_{key}"][t, v], g, value)

    def test_linear_scores_and_their_gradients(self):
        rng = np.random.default_rng(2)
        problem, answers = load(os.path.join(INPUTS, "logprobs_linear.h5"))
        # Nobody's score is a constant 0 that yet has a gradient: it takes no part here.
        there = (problem["targets"] >= 0) & (problem["targets"] < problem["vocab_size"])
        problem["d_value"] = np.where(there, problem["d_value"], 0)
        parts = {name: problem[name].astype(float).tolist() for name in ("hidden", "head")}
        _, scores = linear_sum(problem, **parts)
        wanted = np.array(scores).real
        np.testing.assert_allclose(answers["linear_logprob"], wanted[:, 0], **CLOSE)
        np.testing.assert_allclose(answers["linear_entropy"], wanted[:, 1], **CLOSE)
        found = make_logprobs.linear_answer(problem)
        for name, part in parts.items():
            for _ in range(12):
                i, d = rng.integers(len(part)), rng.integers(len(part[0]))
                if name == "hidden" and not there[i]:
                    continue
                before, part[i][d] = part[i][d], part[i][d] + 1j * STEP
                slope = linear_sum(problem, **parts)[0].imag / STEP
                part[i][d] = before
                np.testing.assert_allclose(found[f"d_{name}"][i, d], slope, **CLOSE)
                if name == "hidden":
                    np.testing.assert_allclose(answers["d_hidden"][i, d], slope, **CLOSE)

    def test_linear_logits_are_exact_in_both_types(self):
        problem, answers = load(os.path.join(INPUTS, "logprobs_linear.h5"))
        product = problem["hidden"].astype(float) @ problem["head"].astype(float).T
        logits = problem["logits"][:, : problem["vocab_size"]]
        np.testing.assert_array_equal(logits, product)
        for name in ("logits", "teacher", "hidden", "head"):
            bits = problem[name].view(np.uint32)
            self.assertFalse((bits & 0xFFFF).any(), f"{name} has more bits than bf16")
        np.testing.assert_allclose(answers["linear_logprob"], answers["logprob"], **CLOSE)
        self.assertTrue((problem["d_value"] == 0).any())

    def compare(self, place, stored, g, value):
        """An infinite value has the gradient of what is left of it, which has no derivative."""
        if not np.all(np.isfinite(np.real(np.array(value)))):
            return
        found = g * float(np.imag(np.array(value)).sum()) / STEP
        # Nobody's id: 0 whatever the logits, and yet -g p.
        if np.all(np.array(value) == 0):
            return
        np.testing.assert_allclose(stored, found, err_msg=place, **CLOSE)

    def test_ids_of_nobody_count_like_columns_elsewhere(self):
        problem, answers = load(os.path.join(INPUTS, "logprobs_ties.h5"))
        vocab = problem["vocab_size"]
        nobody = [t for t, i in enumerate(problem["targets"]) if not 0 <= i < vocab]
        self.assertEqual(len(nobody), 3)
        for t in nobody:
            mine = logs(row_of(problem, t), range(vocab), problem["temperature"])
            p = np.array([math.exp(mine[v].real) if v in mine else 0.0 for v in range(vocab)])
            wanted = -float(problem["d_value"][t]) * p / problem["temperature"]
            np.testing.assert_allclose(answers["d_logprob"][t], wanted, **CLOSE)
            self.assertEqual(answers["logprob"][t], 0)
            self.assertEqual(answers["filtered_logprob"][t], -math.inf)

    def test_files_hold_the_cases_they_are_for(self):
        problem, answers = load(os.path.join(INPUTS, "logprobs_ties.h5"))
        rows = problem["logits"][:, : problem["vocab_size"]]
        self.assertTrue(all(len(set(row)) < len(row) for row in rows))
        self.assertTrue(np.isneginf(rows).any() and (rows.max(axis=1) > 1e4).any())
        self.assertGreater(problem["logits"][:, problem["vocab_size"] :].min(), 1e38)
        self.assertTrue(np.isposinf(answers["soft_cross_entropy"]).any())
        self.assertTrue(np.isneginf(answers["filtered_logprob"]).any())
        kept = [len(keeps(list(map(float, r)), 12, 0.75, 2.0)) for r in rows]
        self.assertGreater(len(set(kept)), 4)
        golden, _ = load(os.path.join(INPUTS, "logprobs_golden.h5"))
        self.assertTrue(all(len(set(row)) == 64 for row in golden["logits"]))

    def test_stored_files_are_what_the_program_makes(self):
        for name, make in make_logprobs.PROBLEMS.items():
            problem, answers = load(os.path.join(INPUTS, name))
            fresh = make()
            self.assertEqual(set(fresh), set(problem))
            for key, value in fresh.items():
                np.testing.assert_array_equal(problem[key], value, err_msg=f"{name} {key}")
            with np.errstate(divide="ignore"):
                again = make_logprobs.answer(fresh)
            self.assertEqual(set(again), set(answers))
            for key, value in again.items():
                np.testing.assert_allclose(answers[key], value, err_msg=f"{name} {key}", **CLOSE)

    def test_known_numbers_are_compared(self):
        problem = make_logprobs.golden_problem()
        with np.errstate(divide="ignore"):
            answers = make_logprobs.answer(problem)
            make_logprobs.check_golden(problem, answers)
            answers["entropy"][0] += 1e-6
            with self.assertRaises(AssertionError):
                make_logprobs.check_golden(problem, answers)


class OtherProblems(unittest.TestCase):
    """What the stored files do not have."""

    def test_filters_that_are_too_close_to_call_are_refused(self):
        with self.assertRaises(ValueError):
            make_logprobs.survivors(np.zeros(4), 0, 0.5, 1.0)

    def test_problem_without_answers(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "bare.h5")
            make_logprobs.write_logprobs(path, make_logprobs.golden_problem(), None)
            with h5py.File(path, "r") as file:
                self.assertEqual(sorted(file), ["logprobs", "provenance"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])  # CTest passes folders
