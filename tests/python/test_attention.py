#!/usr/bin/env python3
"""Checks the answers in inputs/attention_*.h5 against attention written another way.

One query at a time, in plain sums: no maximum is subtracted, no matrix is made, no formula of a
gradient is used. Gradients are differentiated by a complex step: for an analytic f,
Im f(x + i h) / h is f'(x) to the last bit, since nothing is subtracted. Run it directly or through
unittest; needs python3-numpy and python3-h5py.
"""

import os
import sys
import tempfile
import unittest

import h5py
import numpy as np

INPUTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "inputs")
sys.dont_write_bytecode = True
sys.path.insert(0, INPUTS)

import make_attention  # noqa: E402  (found through the line above)

FILES = sorted(make_attention.PROBLEMS)
STEP = 1e-30
SAMPLES = 40  # entries of each gradient
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def load(path):
    """Problem and answers of a file: two mappings of arrays and numbers."""
    with h5py.File(path, "r") as file:
        group = file["attention"]
        problem = dict(group.attrs)
        problem.update({name: group[name][...] for name in group})
        return problem, {name: file["reference"][name][...] for name in file["reference"]}


def shown(problem, document, token, other):
    """Whether a region shows a token another one, by the corners of the region."""
    first = problem["offsets"][document]
    q, k = token - first, other - first
    for number, q_begin, q_end, k_begin, k_end, kind, window in problem["regions"]:
        if number != document or q not in range(q_begin, q_end) or k not in range(k_begin, k_end):
            continue
        after_last = (k_end - k) - (q_end - q)
        causal = kind not in (1, 3) or (after_last >= 0 and (window == 0 or after_last < window))
        if causal and (kind not in (2, 3) or k - k_begin >= q - q_begin):
            return True
    return False


def query(problem, token, head):
    """Output and log-sum-exp of one query; complex inputs give complex answers."""
    offsets = problem["offsets"]
    document = np.searchsorted(offsets, token, side="right") - 1
    group = problem["q"].shape[1] // problem["k"].shape[1]
    total = np.exp(problem["sinks"][head]) if "sinks" in problem else 0.0
    weighted = 0.0 * problem["v"][token, head // group]
    for other in range(offsets[document], offsets[document + 1]):
        if problem["mask"] == "causal" and other > token:
            continue
        if problem["window"] and token - other >= problem["window"]:
            continue
        if problem["mask"] == "regions" and not shown(problem, document, token, other):
            continue
        key, value = problem["k"][other, head // group], problem["v"][other, head // group]
        weight = np.exp(problem["scale"] * (problem["q"][token, head] * key).sum())
        total = total + weight
        weighted = weighted + weight * value
    return weighted / total, np.log(total)


def loss(problem, tokens, heads):
    """What the gradients are gradients of, as far as it depends on the outputs of these tokens and heads."""
    return sum((problem["d_out"][t, h] * query(problem, t, h)[0]).sum() for t in tokens for h in heads)


def derivative(problem, name, index):
    """d loss / d problem[name][index]."""
    changed = dict(problem)
    changed[name] = problem[name].astype(np.complex128)
    changed[name][index] += 1j * STEP
    offsets = problem["offsets"]
    if name == "sinks":  # of all queries of a head
        return loss(changed, range(offsets[-1]), [index[0]]).imag / STEP
    if name == "q":  # of its own output
        return loss(changed, [index[0]], [index[1]]).imag / STEP
    # A key or a value is seen by the document's queries, and by the heads of its group.
    group = problem["q"].shape[1] // problem["k"].shape[1]
    document = np.searchsorted(offsets, index[0], side="right") - 1
    tokens = range(offsets[document], offsets[document + 1])
    return loss(changed, tokens, range(index[1] * group, (index[1] + 1) * group)).imag / STEP


def in_double(problem):
    """The problem with float64 arrays."""
    return {name: value.astype(np.float64) if getattr(value, "dtype", None) == np.float32 else value
            for name, value in problem.items()}


class StoredAnswers(unittest.TestCase):
    """The files in inputs/."""

    def test_outputs_and_log_sum_exps(self):
        for name in FILES:
            problem, answers = load(os.path.join(INPUTS, name))
            problem = in_double(problem)
            self.assertEqual(answers["lse"].shape, problem["q"].shape[:2])
            for token, head in np.ndindex(*answers["lse"].shape):
                out, lse = query(problem, token, head)
                np.testing.assert_allclose(answers["out"][token, head], out, **CLOSE)
                np.testing.assert_allclose(answers["lse"][token, head], lse, **CLOSE)

    def test_gradients(self):
        rng = np.random.default_rng(1)
        for name in FILES:
            problem, answers = load(os.path.join(INPUTS, name))
            problem = in_double(problem)
            for array in ("q", "k", "v", "sinks"):
                if array not in problem:
                    self.assertNotIn(f"d_{array}", answers)
                    continue
                stored = answers[f"d_{array}"]
                self.assertEqual(stored.shape, problem[array].shape)
                every = np.arange(stored.size)
                for flat in rng.choice(every, min(SAMPLES, stored.size), replace=False):
                    index = np.unravel_index(flat, stored.shape)
                    found = derivative(problem, array, index)
                    np.testing.assert_allclose(stored[index], found,
                                               err_msg=f"{name} d_{array}{index}", **CLOSE)

    def test_files_hold_the_cases_they_are_for(self):
        causal, _ = load(os.path.join(INPUTS, "attention_causal.h5"))
        self.assertEqual(set(np.diff(causal["offsets"])), {33, 1, 0, 8, 11, 2})
        self.assertEqual((causal["q"].shape[1:], causal["k"].shape[1:]), ((4, 16), (2, 16)))
        window, answers = load(os.path.join(INPUTS, "attention_window.h5"))
        self.assertEqual((window["mask"], window["window"]), ("causal", 16))
        self.assertGreater(np.diff(window["offsets"]).max(), 2 * window["window"])
        self.assertEqual((window["sinks"].shape, window["k"].shape[1]), ((8,), 1))
        self.assertGreater(np.abs(answers["d_sinks"]).min(), 1e-3)

    def test_stored_files_are_what_the_program_makes(self):
        for name in FILES:
            problem, answers = load(os.path.join(INPUTS, name))
            fresh = make_attention.make_problem(**make_attention.PROBLEMS[name])
            self.assertEqual(set(fresh), set(problem))
            for key, value in fresh.items():
                np.testing.assert_array_equal(problem[key], value, err_msg=f"{name} {key}")
            for key, value in make_attention.answer(fresh).items():
                np.testing.assert_allclose(answers[key], value, err_msg=f"{name} {key}", **CLOSE)


class OtherProblems(unittest.TestCase):
    """What the stored files do not have."""

    def test_full_mask(self):
        problem = in_double(make_attention.make_problem([5, 3], 2, 2, 4, mask="full"))
        answers = make_attention.answer(problem)
        for token, head in np.ndindex(*answers["lse"].shape):
            out, lse = query(problem, token, head)
            np.testing.assert_allclose(answers["out"][token, head], out, **CLOSE)
            np.testing.assert_allclose(answers["lse"][token, head], lse, **CLOSE)
        for array in ("q", "k", "v"):
            for index in np.ndindex(*problem[array].shape):
                found = derivative(problem, array, index)
                np.testing.assert_allclose(answers[f"d_{array}"][index], found, **CLOSE)

    def test_problem_without_answers(self):
        problem = make_attention.make_problem([3], 1, 1, 2)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "bare.h5")
            make_attention.write_attention(path, problem, None)
            with h5py.File(path, "r") as file:
                self.assertEqual(sorted(file), ["attention", "provenance"])
                np.testing.assert_array_equal(file["attention/q"][...], problem["q"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])  # CTest passes folders
