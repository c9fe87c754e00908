#!/usr/bin/env python3
"""Checks that programs and the package gyre mean the same by the digest of a file's contents (inputs/SCHEMA.md).

Usage: test_contents.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
"""

import os
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

SOURCE, APPS = os.path.abspath(sys.argv[1]), os.path.join(os.path.abspath(sys.argv[2]), "apps")
INPUTS = os.path.join(SOURCE, "inputs")
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
sys.path.insert(0, INPUTS)

import gyre_files  # noqa: E402


def run(ranks, program, *arguments):
    """Runs a program on so many ranks; its exit code and what it says."""
    command = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
    command += [os.path.join(APPS, program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def odd_items(file):
    """Everything that HDF5 has and a file may hold, whether or not a program reads it."""
    some = file.create_group("some/groups/deeper")
    some.attrs["number"] = np.int16(-3)
    some.attrs["unsigned"] = np.arange(3, dtype=">u2")
    some.attrs["text"] = "zwölf"
    some.attrs["fixed"] = np.bytes_("fixed")
    some.attrs["texts"] = ["a", "", "ccc"]
    some.attrs["nothing"] = h5py.Empty("f4")
    some.attrs["flag"] = True
    some.attrs["reals"] = np.zeros((0, 3))
    for name, kind in (("half", "f2"), ("long", np.longdouble), ("big", ">f8"), ("byte", "u1"), ("bool", "bool")):
        some[name] = np.arange(6).reshape(2, 3).astype(kind)
    some["scalar"] = np.float32(0.5)
    some["null"] = h5py.Empty("i4")
    some["empty"] = np.zeros((2, 0), "i8")
    some["fixed"] = np.array([b"a", b"bc"], "S4")
    some.create_dataset("texts", data=["", "é" * 1000, "x"], dtype=h5py.string_dtype())
    some.create_dataset("unwritten", (3,), dtype=h5py.string_dtype("ascii"))
    some.create_dataset("packed", data=np.arange(1000), compression="gzip", shuffle=True, chunks=(10,))
    some.create_dataset("huge", (2**40,), "f4", chunks=(2**16,))
    some["colour"] = np.array([2, 7], h5py.enum_dtype({"RED": 2, "BLÜ": 7}, ">i4"))
    some["pairs"] = np.zeros(3, [("a", "i4"), ("b", "f8")])
    some["references"] = np.array([file["/"].ref], h5py.ref_dtype)
    some["opaque"] = np.zeros(1, "V5")
    lists = some.create_dataset("lists", (2,), h5py.vlen_dtype("i4"))
    lists[0] = np.arange(3)
    file["a type"] = np.dtype("<f4")
    file["again"] = some["half"]
    file["circle/back"] = file["/"]
    file["soft"] = h5py.SoftLink("/some/groups")
    file["nowhere"] = h5py.SoftLink("../ö")
    file["other"] = h5py.ExternalLink("another file.h5", "/x")


class Contents(unittest.TestCase):
    """content_sha256."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = lambda name: os.path.join(folder.name, name)

    def test_odd_files_have_the_same_digest(self):
        path = self.place("odd.h5")
        with h5py.File(path, "w", track_order=True) as file:
            odd_items(file)
        gyre_files.record_content(path)
        # It is opened, which needs the right digest, and then found to be no file of Gyre.
        code, text = run(1, "gyre-pack", "--input", path)
        self.assertEqual((code, "is not a file of Gyre" in text), (2, True), text)
        with h5py.File(path, "r+") as file:
            file["some/groups/deeper/colour"][0] = 7
        code, text = run(1, "gyre-pack", "--input", path)
        self.assertEqual((code, f"the contents of '{path}' are not what was written" in text), (3, True), text)

    def written(self, ranks, *command):
        """Runs a program that writes a file; the digest in the file must be right."""
        path = self.place(command[0] + ".h5")
        code, text = run(ranks, *command, "-o", path)
        self.assertEqual(code, 0, text)
        with h5py.File(path, "r") as file:
            recorded = file.attrs[gyre_files.CONTENT].decode()
        self.assertEqual(recorded, gyre_files.content_digest(path), command)
        return path

    def test_every_program_writes_it(self):
        tiny, quick = os.path.join(INPUTS, "docs_tiny.h5"), ("-w", 0, "-n", 1)
        self.written(2, "gyre-import", os.path.join(SOURCE, "src/core"))
        packed = self.written(2, "gyre-pack", "--input", tiny, "--cp", 2)
        self.written(2, "gyre-shard", "--input", packed, "--cp", 2, "--layout", "zigzag")
        os.rename(packed, self.place("packed.h5"))
        self.written(2, "gyre-pack", "--input", self.place("packed.h5"), "--unpack")
        self.written(2, "gyre-pack", "--input", tiny, "--cp", 2, "--rows", 160)
        self.written(2, "gyre-pipeline", "--input", tiny, "--model", os.path.join(INPUTS, "model_tiny.h5"), "--cp", 2, *quick)
        self.written(2, "gyre-attention", "--input", os.path.join(INPUTS, "attention_window.h5"), *quick)
        self.written(2, "gyre-logprobs", "--input", os.path.join(INPUTS, "logprobs_golden.h5"), *quick)

    def test_provenance_does_not_make_files_differ(self):
        """gyre-compare does not compare attributes, and not this one either."""
        tiny = os.path.join(INPUTS, "docs_tiny.h5")
        one = self.written(1, "gyre-pack", "--input", tiny, "--cp", 2)
        os.rename(one, self.place("one.h5"))
        two = self.written(1, "gyre-pack", "-v", "--input", tiny, "--cp", 2)
        digests = []
        for path in (self.place("one.h5"), two):
            with h5py.File(path, "r") as file:
                digests.append(file.attrs[gyre_files.CONTENT])
        self.assertNotEqual(*digests)  # they name their commands
        self.assertEqual(run(1, "gyre-compare", self.place("one.h5"), two)[0], 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
