#!/usr/bin/env python3
"""Checks gyre.compare and gyre-check: figures, verdicts, and that gyre-compare says the same.

Usage: test_gyre_package_compare.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

import h5py
import numpy as np
from test_gyre_package import INPUTS, Scratch, gyre

from gyre.cli import main

APPS = os.path.join(os.path.abspath(sys.argv[2]), "apps")
INF, NAN = np.inf, np.nan
END = "$|VERIFY|left out"  # what follows the rows of a table
TIES = os.path.join(INPUTS, "logprobs_ties.h5")


def one(got, expected, **options):
    (array,) = gyre.compare(np.array(got), np.array(expected), **options).arrays
    return array


class Compare(Scratch):
    """gyre.compare"""

    def test_figures(self):
        got = np.arange(12.0).reshape(3, 4)
        expected = got.copy()
        expected[1, 2] += 0.5  # 6.5
        expected[2, 0] -= 4  # 4
        array = one(got, expected, rtol=0.1, atol=0.35)
        self.assertEqual((array.verdict, array.elements, array.outside), ("differs", 12, 1))
        self.assertEqual((array.max_error, array.err_over_tol), (4, 4 / 0.75))
        first, second = array.worst
        self.assertEqual((first.index, first.got, first.expected, first.error), ((2, 0), 8, 4, 4))
        self.assertEqual((second.index, second.err_over_tol), ((1, 2), 0.5 / (0.35 + 0.1 * 6.5)))

    def test_the_ten_worst_over_blocks(self):
        expected = np.zeros(3_000_000, np.float32)
        got = expected.copy()
        places = np.arange(20) * 140_001 + 7
        got[places] = 1 + np.arange(20) % 7
        array = one(got, expected, rtol=0, atol=1)
        ranking = sorted(places, key=lambda i: (-got[i], i))[:10]
        self.assertEqual([difference.index[0] for difference in array.worst], ranking)
        self.assertEqual((array.outside, array.max_error), (17, 7))

    def test_what_a_type_cannot_hold_is_infinite(self):
        least = float(np.finfo(np.float32).min)
        expected = gyre.reference.log_softmax(np.array([[0.0, least]]), 0.7)
        with np.errstate(over="ignore"):
            self.assertEqual(one(expected.astype(np.float32), expected).verdict, "same")
            self.assertEqual(one(np.float16([-INF, -7e4]), [-7e4, INF]).outside, 1)
        self.assertEqual(one([[0.0, -INF]], expected).outside, 1)  # a float64 holds it
        self.assertEqual(one(np.float32([[0, INF]]), expected).outside, 1)
        self.assertEqual(one(np.float32([-INF]), [least]).outside, 1)

    def test_values_whose_sum_is_infinite_are_no_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(one([1e308, 1e308], [1e308, 1e308]).verdict, "same")
            verdict = one([1e308, 1e308], [1e308, -1e308], atol=1.5e308).verdict
        self.assertEqual(verdict, "the tolerance is larger than the values")

    def test_a_common_factor_is_named(self):
        expected = np.array([[1.0, -2.5, 0.0], [1e-3, 7.0, -0.125]])
        hint = "differs by a factor {}: gather convention?"
        for factor, named in ((2, "2"), (0.5, "1/2"), (3, "3"), (1 / 8, "1/8")):
            for noise in (1, 1 + 2e-6):
                verdict = one(factor * noise * expected, expected).verdict
                self.assertEqual(verdict, hint.format(named))
        for got in (2.5 * expected, -2 * expected, np.array([[2, -5, 0.1], [2e-3, 14, -0.25]])):
            self.assertEqual(one(got, expected).verdict, "differs")
        self.assertEqual(one([2.0], [1.0]).verdict, "differs")  # of one value any is a factor
        self.assertEqual(one([2.0, NAN, 2], [1.0, 1, 1]).verdict, "differs")
        text = str(gyre.compare(2 * expected, expected))
        self.assertIn("the array: 5 of 6 outside", text)

    def test_names_shapes_and_kinds(self):
        got = {"a": np.zeros(2), "b": np.zeros(2), "c": ["x", "y"], "d": np.zeros(1)}
        expected = {"a": np.zeros(3), "c": ["x", "z"], "d": ["t"], "e": 1.0}
        found = {array.name: array for array in gyre.compare(got, expected).arrays}
        self.assertEqual({name: array.verdict for name, array in found.items()},
                         {"a": "shapes [2] and [3]", "b": "only in A", "c": "differs",
                          "d": "types that cannot be compared", "e": "only in B"})
        (worst,) = found["c"].worst
        self.assertEqual((worst.index, worst.got, worst.expected), ((1,), "y", "z"))
        comparison = gyre.compare({"x": 1.0, "y": 1}, {"x": 1.0, "z": 1}, common=True)
        self.assertEqual((comparison.only_in_a, comparison.only_in_b), (("y",), ("z",)))
        self.assertTrue(comparison.passed)
        nested = gyre.compare({"x": {"y": [1]}}, {"x/y": [1]})
        self.assertEqual(nested.arrays[0].name, "x/y")

    def test_bad_usage(self):
        for got, expected, options in ((1.0, 1.0, {"rtol": -1}),
                                       (1.0, 1.0, {"atol": NAN}),
                                       (1.0, 1.0, {"atol": INF}),
                                       (1.0, 1.0, {"rtol": INF}),
                                       (1.0, 1.0, {"ties": "some"}),
                                       (1.0, {"x": 1.0}, {}),
                                       ({"x": 1.0}, {"y": 1.0}, {"common": True}),
                                       ({}, {}, {})):
            with self.assertRaises(ValueError):
                gyre.compare(got, expected, **options)

    def test_assert_close(self):
        gyre.assert_close([1.0], [1.0])
        with self.assertRaisesRegex(AssertionError, r"(?s)VERIFY FAILED 0/1 max_err_over_tol=2"):
            gyre.assert_close([1.0], [3.0], rtol=0, atol=1)

    def test_places(self):
        file = gyre.read(TIES)
        everything = gyre.compare(TIES, TIES)
        self.assertIn("logprobs/logits", [array.name for array in everything.arrays])
        for got, expected in ((file, TIES + ":/"),
                              (file.reference, TIES),
                              (f"{TIES}:/reference", file.reference),
                              (file["logprobs"], TIES + ":/logprobs")):
            self.assertTrue(gyre.compare(got, expected).passed)
        np.savez(self.place("x.npz"), **file.reference)
        self.assertTrue(gyre.compare(self.place("x.npz"), TIES).passed)
        self.assertTrue(gyre.compare(TIES, self.place("x.npz")).passed)
        with self.assertRaisesRegex(ValueError, "/results of .* no such object"):
            gyre.compare(TIES + ":/results", TIES)


class Check(Scratch):
    """gyre-check"""

    def check(self, *arguments):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code = main(arguments)
            except SystemExit as stopped:  # argparse
                code = stopped.code
        return code, output.getvalue(), errors.getvalue()

    def test_exit_codes(self):
        mine = self.place("mine.npz")
        logprob = gyre.read(TIES).reference["logprob"].copy()
        np.savez(mine, logprob=logprob)
        code, output, _ = self.check(mine, TIES, "--common")
        self.assertEqual(code, 0, output)
        self.assertIn(f"# B  {TIES}:/reference", output)
        self.assertIn("left out, only in B: d_entropy", output)
        self.assertIn("VERIFY PASSED 1/1 max_err_over_tol=0", output)
        self.assertEqual(self.check(mine, TIES)[0], 1)
        logprob[3] += 0.5
        np.savez(mine, logprob=logprob)
        code, output, _ = self.check(mine, TIES, "--common", "--atol", "0.25", "--rtol", "0")
        self.assertEqual(code, 1)
        self.assertIn("logprob: 1 of 17 outside", output)
        self.assertRegex(output, r"\[3\] .* 0\.5 +2\n")

    def test_bad_usage(self):
        broken, damaged = self.place("broken.npz"), self.place("damaged.h5")
        Path(broken).write_bytes(b"PK\x03\x04 and no more")
        gyre.write_logprobs(damaged, logits=[[1.0, 2.0]], targets=[0])
        with h5py.File(damaged, "r+") as file:
            file["logprobs/targets"][0] = 1
        for arguments, wanted, message in (((), 2, "required"),
                                           ((TIES, TIES, "--ties", "some"), 2, "invalid choice"),
                                           ((TIES, TIES, "--rtol", "-1"), 2,
                                            "must be finite, not negative"),
                                           (("none.npz", TIES), 2, "none.npz"),
                                           (("none.h5", TIES), 2, "none.h5"),
                                           ((broken, TIES), 3, "broken.npz"),
                                           ((TIES, f"{TIES}:/nothing"), 2, "no such object"),
                                           ((damaged, damaged), 3, "not what was written")):
            code, _, errors = self.check(*arguments)
            self.assertEqual(code, wanted, arguments)
            self.assertIn(message, errors)

    def test_files_that_cannot_be_read_are_named(self):
        text, cut, folder, damaged = (self.place(name) for name in ("text.h5", "cut.h5", "folder.h5", "sum.h5"))
        Path(text).write_text("no HDF5", encoding="utf-8")
        Path(cut).write_bytes(Path(TIES).read_bytes()[:3000])
        os.mkdir(folder)
        with h5py.File(damaged, "w") as file:
            file.create_dataset("x", data=np.arange(1000.0), chunks=(100,), fletcher32=True)
            place = file["x"].id.get_chunk_info(0).byte_offset
        with open(damaged, "r+b") as file:
            file.seek(place)
            file.write(b"damage!!")
        for path, wanted in ((text, 2), (cut, 3), (folder, 2), (damaged, 3), (self.place("none.h5"), 2)):
            code, _, errors = self.check(path, path)
            self.assertEqual((code, path in errors), (wanted, True), errors)

    def test_streams_that_cannot_be_written(self):
        environment = {**os.environ, "PYTHONPATH": os.path.join(sys.argv[1], "python")}
        for stream, arguments, wanted in (("stdout", (TIES, TIES), 3), ("stderr", ("none.h5", TIES), 2)):
            with open("/dev/full", "w", encoding="utf-8") as full:
                command = [sys.executable, "-m", "gyre.cli", *arguments]
                done = subprocess.run(command, check=False, env=environment, **{stream: full})
            self.assertEqual(done.returncode, wanted, stream)


class SameAsGyreCompare(Scratch):
    """The same files and options have the same verdict and the same figures."""

    def write(self, name, **arrays):
        with h5py.File(self.place(name), "w") as file:
            for path, value in arrays.items():
                file[path.replace("__", "/")] = value
        return self.place(name)

    @staticmethod
    def figures(text):
        """Of each array: name, counts, errors, the last word of the verdict; then VERIFY."""
        lines = [line for line in text.splitlines() if not re.match("#|array ", line)]
        end = next((i for i, line in enumerate(lines) if re.match(END, line)), 0)
        return [[*row.split()[:5], row.split()[-1]] for row in lines[:end]] + lines[-1:]

    def agree(self, a, b, *flags):
        """Runs both, which must say the same of every array; the exit code."""
        command = [os.path.join(APPS, "gyre-compare"), a, b, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main([a, b, *flags])
        said = f"{flags}\n{done.stdout}{done.stderr}{output.getvalue()}{errors.getvalue()}"
        self.assertEqual(code, done.returncode, said)
        self.assertEqual(self.figures(done.stdout), self.figures(output.getvalue()), said)
        return code

    def test_says_where_and_what_for(self):
        golden = os.path.join(INPUTS, "golden/logprobs_uneven_vocabulary.h5")
        reference = gyre.read(golden).reference
        mine = {name: reference[name].copy() for name in ("entropy", "logprob", "d_logprob")}
        self.assertNotIn("guards", str(gyre.compare(mine, reference, common=True)))
        mine["entropy"][5] += 1
        mine["logprob"] += 1
        mine["d_logprob"][4:, 2] -= 1
        offsets = gyre.read(golden).inputs["offsets"].tolist()
        document = max(i for i, offset in enumerate(offsets) if offset <= 4)
        place = f"document {document}, position {4 - offsets[document]}"
        for expected in (reference, f"{golden}:/reference", golden):
            found = gyre.compare(mine, expected, common=True)
            text = str(found)
            self.assertIn(f"outside, the first at [4, 2], {place}\n", text)
            self.assertIn("the file guards against: sums over the last shard", text)
            self.assertEqual({array.name: array.first for array in found.arrays},
                             {"d_logprob": (4, 2), "entropy": (5,), "logprob": (0,)})
            self.assertLessEqual(len(re.findall(r"(?m)^ *\[", text)), 10)
        copied = self.place("copied.h5")
        shutil.copy(golden, copied)
        for index in ("", "{", "[]", '{"schema": "gyre/golden-index"}'):  # of somebody else
            Path(self.place("index.json")).write_text(index, encoding="utf-8")
            text = str(gyre.compare(mine, copied, common=True))
            self.assertIn(place, text)
            self.assertNotIn("guards", text)

    def test_numbers(self):
        rng = np.random.default_rng(3)
        special = np.array([0, -0.0, INF, -INF, NAN, 1e-320, 1e300, -1e300, 1, 3])
        reals = rng.normal(size=(40, 25))
        a, b = {}, {}
        for kinds in (("f8", "f8"), ("f4", "f8"), ("f2", "f4"), ("f4", "f4")):
            name = "".join(kinds)
            with np.errstate(over="ignore"):
                x, y = (special.astype(kind) for kind in kinds)
            a |= {f"{name}_{i}": x for i in range(len(special))}
            b |= {f"{name}_{i}": np.full(len(y), y[i]) for i in range(len(special))}
            a[name] = reals.astype(kinds[0])
            b[name] = (reals + 1e-5 * rng.normal(size=(40, 25))).astype(kinds[1])
        files = self.write("a.h5", **a), self.write("b.h5", **b)
        for flags in ((),
                      ("--equal-nan",),
                      ("--rtol", "0"),
                      ("--atol", "0", "--rtol", "0"),
                      ("--rtol", "1"),
                      ("--atol", "0.3", "--rtol", "0.9"),
                      ("--atol", "1e308"),
                      ("--atol", "inf")):
            self.agree(*files, *flags)
        x = np.array([1.0, 1.5])
        zeros = np.zeros(2)
        files = [self.write(name, x=x, zeros=zeros, n=[1, 2]) for name in ("a.h5", "b.h5")]
        for flags, code in ((("--rtol", "1"), 1), (("--atol", "1.26"), 1), (("--atol", "1e-3"), 0),
                            (("--atol", "0.9", "--rtol", "0.5"), 1), (("--atol", "0.6", "--rtol", "0.5"), 0)):
            self.assertEqual(self.agree(*files, *flags), code, flags)
        files = self.write("a.h5", x=np.float32([-INF, 1])), self.write("b.h5", x=[-4e38, 1])
        self.assertEqual(self.agree(*files), 0)
        self.assertEqual(self.agree(*files[::-1]), 1)
        files = self.write("a.h5", x=2 * x), self.write("b.h5", x=x)
        self.assertEqual(self.agree(*files), 1)
        files = self.write("a.h5", x=x), self.write("b.h5", x=x + 0.5)
        self.assertEqual(self.agree(*files, "--atol", "0.5", "--rtol", "0"), 0)
        self.assertEqual(self.agree(*files, "--atol", "0.4999999", "--rtol", "0"), 1)

    def test_kinds(self):
        values = {"i4": np.array([1, 2], "i4"), "i8": np.array([1, 2**60], "i8"),
                  "u8": np.array([1, 2**63], "u8"), "i1": np.array([1, -2], "i1"),
                  "f4": np.array([1, 2], "f4"), "big": np.array([1, 2], ">f8"),
                  "flag": np.array([True, False]), "text": np.array(["1", "2"], dtype=object),
                  "fixed": np.array([b"1", b"2"], "S3"), "pair": np.zeros(2, [("a", "i4")]),
                  "row": np.array([[1, 2]], "f4"), "none": np.zeros(0, "f4"), "one": np.float64(1)}
        pairs = [(x, y) for x in values for y in values]
        a = self.write("a.h5", **{f"{x}_{y}": values[x] for x, y in pairs})
        b = self.write("b.h5", **{f"{x}_{y}": values[y] for x, y in pairs})
        for flags in ((), ("--atol", "5")):
            self.assertEqual(self.agree(a, b, *flags), 1)

    def test_groups_and_links(self):
        a = self.write("a.h5", g__x=[1.0], g__deep__y=[2], h=["a"])
        b = self.write("b.h5", g__x=[1.0], g__deep__y=[3], g__z=[1])
        with h5py.File(b, "r+") as file:
            file["soft"] = h5py.SoftLink("/g")
            file["g/again"] = file["g/x"]
            file["g/deep/circle"] = file["g"]
        for groups in (("", ""),
                       (":/g", ":/g"),
                       (":/g", ":/soft"),
                       (":/g/deep", ":/g/deep/"),
                       (":/g", ":/none"),
                       (":/g/x", "")):
            for flags in ((), ("--common",)):
                self.agree(a + groups[0], b + groups[1], *flags)
        with h5py.File(b, "r+") as file:
            file["g/nowhere"] = h5py.SoftLink("/nothing")
        self.assertEqual(self.agree(a, b), 2)
        with h5py.File(b, "r+") as file:
            del file["g/nowhere"]
            file["g/elsewhere"] = h5py.ExternalLink(a, "/g")
        self.assertEqual(self.agree(a, b), 2)

    def test_ties(self):
        rng = np.random.default_rng(5)
        values = -np.sort(-rng.integers(0, 6, (200, 6)).astype("f4"), axis=1)
        ids = rng.integers(0, 8, (2, 200, 6))
        others = {"x_ids": ids[1].astype(">i4"), "y_ids": ids[1], "z_ids": ids[1] * 1.0}
        more = {"y_values": values[:, :3], "z_values": values, "r__ids": ids[0],
                "r__values": values}
        a = self.write("a.h5", x_ids=ids[0], y_ids=ids[0], z_ids=ids[0], x_values=values, **more)
        b = self.write("b.h5", x_values=values + 1, **others, **more)
        for flags in ((), ("--ties", "any"), ("--ties", "exact", "--common")):
            self.assertEqual(self.agree(a, b, *flags), 1)
        top = "top_ids", "top_values"
        file = gyre.read(TIES)
        same = {name: file.reference[name].copy() for name in top}
        same["top_ids"][3, :3] = same["top_ids"][3, 2::-1]  # a row of equal logits
        a = self.write("a.h5", **same)
        self.assertEqual(self.agree(a, f"{TIES}:/reference", "--common"), 1)
        self.assertEqual(self.agree(a, f"{TIES}:/reference", "--common", "--ties", "any"), 0)

    def test_inputs(self):
        names = ("logprobs_golden.h5", "logprobs_ties.h5", "docs_tiny.h5", "model_tiny.h5")
        places = [os.path.join(INPUTS, name) for name in names]
        for a, b in ((0, 0), (0, 1), (2, 2), (2, 3), (3, 3)):
            self.agree(places[a], places[b])
        self.agree(places[0] + ":/reference", places[1] + ":/reference", "--common")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
