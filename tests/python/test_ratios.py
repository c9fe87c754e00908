#!/usr/bin/env python3
"""Checks gyre-ratios and gyre.importance_ratios: figures by their formulas, documents, masks, refusals, exit codes.

Usage: test_ratios.py SOURCE_DIR BUILD_DIR
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

import numpy as np

SOURCE, BUILD = (pathlib.Path(a).resolve() for a in (sys.argv[1:3] if len(sys.argv) > 2 else (".", "build/ci")))
sys.path.insert(0, str(SOURCE / "python"))

import gyre  # noqa: E402

RNG = np.random.default_rng(7)
ROLLOUT = -RNG.exponential(1, 12)
TRAINER = np.minimum(0, ROLLOUT + RNG.normal(0, 0.2, 12))
OFFSETS = [0, 5, 5, 12]


class Figures(unittest.TestCase):
    def test_of_all_tokens(self):
        got = gyre.importance_ratios(TRAINER, ROLLOUT, clip=(0.1, 0.3))
        ratio = [math.exp(a - b) for a, b in zip(TRAINER, ROLLOUT)]
        self.assertEqual(got.all.tokens, 12)
        self.assertAlmostEqual(got.all.mean, sum(ratio) / 12)
        self.assertAlmostEqual(got.all.most, max(ratio))
        self.assertAlmostEqual(got.all.least, min(ratio))
        self.assertAlmostEqual(got.all.k1, sum(b - a for a, b in zip(TRAINER, ROLLOUT)) / 12)
        self.assertAlmostEqual(got.all.k3, sum(r - 1 - math.log(r) for r in ratio) / 12)
        self.assertAlmostEqual(got.all.sequence, math.prod(ratio) ** (1 / 12))
        self.assertAlmostEqual(got.all.clipped_below, sum(r < 0.9 for r in ratio) / 12)
        self.assertAlmostEqual(got.all.clipped_above, sum(r > 1.3 for r in ratio) / 12)
        self.assertEqual(sum(got.counts), 12)
        self.assertEqual(got.counts[1], sum(0.5 <= r < 0.8 for r in ratio))
        self.assertEqual(got.documents, ())

    def test_of_documents(self):
        got = gyre.importance_ratios(TRAINER, ROLLOUT, offsets=OFFSETS)
        self.assertEqual([d.tokens for d in got.documents], [5, 0, 7])
        self.assertEqual(got.documents[2], gyre.importance_ratios(TRAINER[5:], ROLLOUT[5:]).all)
        self.assertTrue(math.isnan(got.documents[1].mean))

    def test_of_rows_of_next_tokens(self):
        rows = np.zeros((2, 4))
        rows[0, :4], rows[1, :2] = -1, -2
        other = rows.copy()
        other[0, :2] -= 0.5
        other[1, 2:] = -9  # behind the second document
        got = gyre.importance_ratios(other, rows, offsets=[0, 5, 8])
        self.assertEqual([d.tokens for d in got.documents], [4, 2])
        self.assertEqual(got.documents[1].most, 1)
        self.assertEqual(gyre.importance_ratios(other[:, :4], rows, offsets=[0, 4, 6]).all.tokens, 6)

    def test_of_a_mask(self):
        mask = np.arange(12) % 3 == 0
        got = gyre.importance_ratios(TRAINER, ROLLOUT, mask=mask, offsets=OFFSETS)
        self.assertEqual(got.all, gyre.importance_ratios(TRAINER[mask], ROLLOUT[mask]).all)
        self.assertEqual([d.tokens for d in got.documents], [2, 0, 2])

    def test_what_does_not_count_may_be_anything(self):
        mask = np.arange(12) % 3 == 0
        trainer, rollout = TRAINER.copy(), ROLLOUT.copy()
        trainer[1], trainer[2], rollout[4], rollout[5] = np.nan, 1.0, np.nan, np.inf
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = gyre.importance_ratios(trainer, rollout, mask=mask)
        self.assertEqual(got, gyre.importance_ratios(TRAINER, ROLLOUT, mask=mask))
        with self.assertRaisesRegex(ValueError, r"rollout\[4\] is nan"):
            gyre.importance_ratios(TRAINER, rollout, mask=mask | (np.arange(12) == 4))
        rows = np.full((2, 4), -1.0)
        rows[1, 2:] = np.nan, 1.0  # behind the second document
        self.assertEqual(gyre.importance_ratios(rows, rows, offsets=[0, 5, 8]).all.tokens, 6)

    def test_ratios_that_are_not_finite_warn_nobody(self):
        trainer, rollout = np.array([-0.5, -0.5, -1e3]), np.array([-1e3, -0.5, -np.inf])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = gyre.importance_ratios(trainer, rollout)
            large = gyre.importance_ratios(np.zeros(2), np.full(2, -709.5))  # their sum is infinite
            gyre.importance_ratios([-np.inf, -1.0], [-1.0, -1.0])
        self.assertEqual((large.all.mean, large.all.most < np.inf), (np.inf, True))
        self.assertEqual((got.all.most, got.all.mean, got.all.deviation, got.all.k3), (np.inf,) * 4)
        self.assertEqual(got.counts[-1], 1)

    def test_of_minus_infinity(self):
        trainer, rollout = TRAINER.copy(), ROLLOUT.copy()
        trainer[3] = rollout[4] = -np.inf
        got = gyre.importance_ratios(trainer, rollout)
        self.assertEqual((got.all.tokens, got.all.least, got.all.impossible), (11, 0, 1))
        self.assertEqual(got.counts[0], 1)
        self.assertIn("1 tokens have a log-probability of -inf in the rollout", str(got))

    def test_of_tensors(self):
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not there")
        got = gyre.importance_ratios(torch.tensor(TRAINER), torch.tensor(ROLLOUT))
        self.assertEqual(got, gyre.importance_ratios(TRAINER, ROLLOUT))

    def test_refusals(self):
        nan, positive = ROLLOUT.copy(), ROLLOUT.copy()
        nan[2], positive[7] = np.nan, 0.5
        for message, a, b, how in (
            ("rollout[2] is nan; a log-probability is not NaN", TRAINER, nan, {}),
            ("trainer[7] is 0.5; a log-probability is not above 0.001", positive, ROLLOUT, {}),
            ("trainer is [11], and rollout [12]", TRAINER[1:], ROLLOUT, {}),
            ("no token counts: nothing was compared", TRAINER, ROLLOUT, {"mask": np.zeros(12)}),
            ("no token counts: nothing was compared", [], [], {}),
            ("the mask is [3], and the log-probabilities [12]", TRAINER, ROLLOUT, {"mask": np.ones(3)}),
            ("offsets[1], the last, is 11; it must be 12, the number of tokens", TRAINER, ROLLOUT, {"offsets": [0, 11]}),
            ("offsets[2] is 7; it must be at least the offset", TRAINER, ROLLOUT, {"offsets": [0, 9, 7, 12]}),
            ("offsets is float64; it must be an integer type", TRAINER, ROLLOUT, {"offsets": [0, 5.5, 12]}),
            ("rows have 4 elements; the longest document has 6 tokens, or 5 next ones", np.zeros((2, 4)),
             np.zeros((2, 4)), {"offsets": [0, 6, 8]}),
            ("it is from 0 to 1 below 1", TRAINER, ROLLOUT, {"clip": (1.5, 0)}),
            ("trainer has 3 extents", np.zeros((1, 1, 1)), ROLLOUT, {}),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), message.replace("[", r"\[").replace("]", r"\]")):
                gyre.importance_ratios(a, b, **how)


class Command(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        np.savez(self.path("a.npz"), logprob=TRAINER, offsets=OFFSETS, mask=np.arange(12) > 1)
        np.savez(self.path("b.npz"), logprob=ROLLOUT, entropy=ROLLOUT)

    def path(self, name):
        return str(pathlib.Path(self.folder.name, name))

    def run_it(self, *arguments):
        return subprocess.run([sys.executable, "-m", "gyre.ratios", *arguments], cwd=SOURCE / "python",
                              capture_output=True, text=True, timeout=120, check=False)

    def test_reports(self):
        a, b, out = self.path("a.npz"), self.path("b.npz"), self.path("r.json")
        done = self.run_it(a, b, "--documents", a, "--mask", a, "--json", out, "--clip", "0.1", "0.2")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"document 0 +3 ")
        self.assertRegex(done.stdout, r"\nall +10 ")
        report = json.loads(pathlib.Path(out).read_text(encoding="utf-8"))
        self.assertEqual(report["all"]["tokens"], 10)
        self.assertIsNone(report["documents"][1]["mean"])
        self.assertEqual(sum(report["counts"]), 10)

    def test_of_a_run_and_its_answers(self):
        problem, results = SOURCE / "inputs/logprobs_golden.h5", self.path("results.h5")
        subprocess.run([BUILD / "apps/gyre-logprobs", "--input", problem, "--op", "logprob,packed", "-n", "1", "-o", results],
                       check=True, capture_output=True, timeout=120)
        for array in ("logprob", "next_token_logprob"):
            done = self.run_it(f"{results}:/results", f"{problem}:/reference", "--array", array, "--documents",
                               f"{problem}:/logprobs", "--most", "1.0001")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertRegex(done.stdout, r"document 1 +" + ("8" if array == "logprob" else "7"))

    def test_exit_codes(self):
        a, b = self.path("a.npz"), self.path("b.npz")
        done = self.run_it(a, b, "--most", "1.001")
        self.assertEqual(done.returncode, 1)
        self.assertIn("are not within 1.001", done.stdout)
        c, bad = self.path("c.npz"), self.path("bad.npz")
        values = np.array(ROLLOUT)
        values[0] = -np.inf
        np.savez(c, logprob=values)
        done = self.run_it(a, c, "--most", "1e9")
        self.assertEqual((done.returncode, "1 tokens have an infinite ratio" in done.stdout), (1, True), done.stdout)
        pathlib.Path(bad).write_bytes(pathlib.Path(a).read_bytes()[:100])
        done = self.run_it(a, bad)
        self.assertEqual((done.returncode, str(bad) in done.stderr), (3, True), done.stderr)
        for message, arguments in (
            ("has 0 arrays entropy; it has logprob, mask, offsets", (a, b, "--array", "entropy")),
            ("--most 0.5 must be 1 or more", (a, b, "--most", "0.5")),
            ("No such file", (a, self.path("none.npz"))),
        ):
            done = self.run_it(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
        done = self.run_it(a, b, "--json", self.path("no/r.json"))
        self.assertEqual((done.returncode, "no/r.json: No such file" in done.stderr), (3, True), done.stderr)
        np.savez(c, logprob=np.full(12, np.nan))
        done = self.run_it(a, c)
        self.assertEqual((done.returncode, c in done.stderr), (2, True), done.stderr)
        for content in (b"", b"text", b"PK"):
            pathlib.Path(bad).write_bytes(content)
            done = self.run_it(a, bad)
            self.assertEqual((done.returncode, str(bad) in done.stderr), (3, True), done.stderr)

    def test_an_input_is_not_overwritten(self):
        a, b, link = self.path("a.npz"), self.path("b.npz"), self.path("link.json")
        pathlib.Path(link).symlink_to(b)
        before = pathlib.Path(a).read_bytes(), pathlib.Path(b).read_bytes()
        for output, inputs in ((a, (a, b)), (link, (a, b)), (a, (b, b, "--mask", a)), (a, (b, b, "--documents", a))):
            done = self.run_it(*inputs, "--json", output)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"--json {output} is the file of the input", done.stderr)
        self.assertEqual((pathlib.Path(a).read_bytes(), pathlib.Path(b).read_bytes()), before)

    def test_a_full_disk(self):
        a, b = self.path("a.npz"), self.path("b.npz")
        with open("/dev/full", "w", encoding="utf-8") as full:
            for module, words in (("gyre.ratios", (a, b)), ("gyre.ratios", ("--help",)), ("gyre", ("--help",)),
                                  ("gyre.cli", (a, a))):
                done = subprocess.run([sys.executable, "-m", module, *words], cwd=SOURCE / "python", stdout=full,
                                      stderr=subprocess.PIPE, text=True, timeout=120, check=False)
                self.assertEqual((done.returncode, "No space left" in done.stderr), (3, True), done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
