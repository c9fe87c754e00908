#!/usr/bin/env python3
"""Checks gyre-pack against NumPy written from the formats' descriptions alone, and what it refuses.

Streams of rows and of audio, and shards under every layout, are compared with the answers of
inputs/golden (tests/apps/golden.sh), shards with gyre.reference (test_gyre_package_programs.py).

Usage: test_packing.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
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
IGNORED = -100


def run(ranks, program, *arguments):
    """Runs a program on so many ranks; its output."""
    command = [MPIEXEC, "-n", str(ranks), os.path.join(APPS, program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def read(path, group):
    """All datasets of a group."""
    with h5py.File(path, "r") as file:
        return {name: item[...] for name, item in file[group].items()}


def bins_of(packed):
    """(real bounds, slot bounds, first slot) of each bin."""
    offsets, first = packed["bin_offsets"], 0
    for b in range(offsets.size - 1):
        part = slice(offsets[b] + b, offsets[b + 1] + b + 1)
        real, slots = packed["cu_seqlens"][part], packed["cu_seqlens_padded"][part]
        yield real, slots, first
        first += slots[-1]


def segments_of(real, slots):
    """Segment and position of each slot of a bin, and whether it is a real token."""
    segment = np.repeat(np.arange(slots.size - 1), np.diff(slots))
    position = np.arange(slots[-1]) - slots[segment]
    return segment, position, position < np.diff(real)[segment]


class Pack(unittest.TestCase):
    """gyre-pack."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def test_documents_come_back(self):
        original = read(os.path.join(INPUTS, "docs_tiny.h5"), "documents")
        for algorithm in ("next-fit", "first-fit-decreasing", "first-fit-shuffle", "balanced"):
            out, back = self.path("packed.h5"), self.path("back.h5")
            run(3, "gyre-pack", "--input", os.path.join(INPUTS, "docs_tiny.h5"), "--capacity", 128,
                "--cp", 2, "--algorithm", algorithm, "-o", out)
            packed = read(out, "packed")
            for real, slots, first in bins_of(packed):
                self.assertLessEqual(slots[-1], 128)
                _, position, valid = segments_of(real, slots)
                mine = slice(first, first + slots[-1])
                np.testing.assert_array_equal(packed["positions"][mine], position)
                labels, ids = packed["labels"][mine], packed["ids"][mine]
                last = np.append(~valid[1:] | (position[1:] == 0), True)
                expected = np.where(valid & ~last, np.append(ids[1:], 0), IGNORED)
                np.testing.assert_array_equal(labels, expected)
            run(2, "gyre-pack", "--input", out, "--unpack", "-o", back)
            for name, array in read(back, "documents").items():
                np.testing.assert_array_equal(array, original[name], name)


class Batches(unittest.TestCase):
    """Files that break a rule, one at a time, and unusual ones that do not."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def changed(self, name, change):
        """A copy of an input file, changed."""
        path = os.path.join(self.folder.name, name)
        with open(os.path.join(INPUTS, name), "rb") as old, open(path, "wb") as new:
            new.write(old.read())
        with h5py.File(path, "r+") as file:
            del file.attrs["content_sha256"]
            change(file)
        return path

    def test_positions_of_axes_shared_and_left_out(self):
        def two_axes(file):
            one = file["bshd/position_ids"][:]
            del file["bshd/position_ids"]
            file["bshd/position_ids"] = np.stack([one, one // 2])

        def one_document_a_row(file):
            for name in ("seq_lens", "seq_lens_padded"):
                del file["bshd/" + name]
                file["bshd/" + name] = np.full((4, 1), 16)

        def shared(file):
            one_document_a_row(file)
            del file["bshd/position_ids"]
            file["bshd/position_ids"] = np.arange(16)[None] + 5

        def left_out(file):
            one_document_a_row(file)
            del file["bshd/position_ids"]

        out = os.path.join(self.folder.name, "packed.h5")
        path = self.changed("bshd_tiny.h5", two_axes)
        self.assertIn("VERIFY PASSED 5/5", run(2, "gyre-shard", "--input", path, "--cp", 2))
        run(1, "gyre-pack", "--input", path, "--cp", 2, "-o", out)
        with h5py.File(path, "r") as file:
            rows = file["bshd/position_ids"][:].reshape(2, -1)
        np.testing.assert_array_equal(read(out, "packed")["positions"], rows)
        self.check_axes(out)
        for change, begin in ((shared, 5), (left_out, 0)):
            path = self.changed("bshd_tiny.h5", change)
            run(1, "gyre-pack", "--input", path, "--cp", 2, "-o", out)
            np.testing.assert_array_equal(
                read(out, "packed")["positions"], np.tile(np.arange(16) + begin, 4))
            self.assertIn("VERIFY PASSED", run(2, "gyre-shard", "--input", path, "--cp", 4))

    def check_axes(self, packed):
        """Positions [axes, slots] are moved with the slots, and count on where slots are added."""
        shards, repadded = (os.path.join(self.folder.name, n) for n in ("shards.h5", "repadded.h5"))
        for ranks, options in ((2, ("--layout", "striped")), (4, ("--layout", "dual-chunk-swap", "--repad"))):
            self.assertIn("VERIFY PASSED", run(ranks, "gyre-shard", "--input", packed, "--cp", ranks,
                                               *options, "-o", shards))
        self.assertIn("VERIFY PASSED", run(2, "gyre-shard", "--input", packed, "--ulysses", "--heads", 2,
                                           "--kv-heads", 2))
        run(1, "gyre-pack", "--input", packed, "--repad", "--cp", 4, "-o", repadded)
        held, old, new = read(shards, "shards"), read(packed, "packed"), read(repadded, "packed")
        self.assertEqual(held["positions"].shape, (4, 2, held["index"].shape[1]))
        at = 0
        bounds = zip(old["cu_seqlens_padded"], np.diff(old["cu_seqlens"]), np.diff(new["cu_seqlens_padded"]))
        for begin, tokens, slots in bounds:  # of one bin
            moved = old["positions"][:, begin : begin + tokens]
            last = moved[:, -1:] if tokens else np.full((2, 1), -1)
            more = last + 1 + np.arange(slots - tokens)
            np.testing.assert_array_equal(new["positions"][:, at : at + slots], np.hstack([moved, more]))
            at += slots
        self.assertEqual(at, new["positions"].shape[1])

    def refused(self, message, name, change, *options):
        out = os.path.join(self.folder.name, "none.h5")
        command = [MPIEXEC, "-n", "2", os.path.join(APPS, "gyre-pack"), "--input",
                   self.changed(name, change), "-o", out, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(message, done.stderr)
        self.assertIn(name, done.stderr)
        self.assertEqual(done.stderr.count(message), 1)
        self.assertFalse(os.path.exists(out))

    def test_rows_that_break_a_rule(self):
        def cell(dataset, index, value):
            def change(file):
                file[dataset][index] = value
            return change

        def swap_tables(file):
            file["bshd/seq_lens"][1] = [8, -1000, -1000]

        def widen(file):
            file["bshd"].attrs["vocab_size"] = np.int64(2**40)

        def both(file):
            file["bshd/inputs_embeds"] = np.zeros((4, 16, 2), np.float32)

        def empty_row_first(file):
            for name in ("seq_lens", "seq_lens_padded"):
                file["bshd/" + name][0] = -1000

        def no_ids(file):
            del file["bshd/input_ids"]

        def no_positions(file):
            del file["bshd/position_ids"]

        for message, change in (
            ("/bshd/input_ids[1, 2] is 259; it must be 0 to 258", cell("bshd/input_ids", (1, 2), 259)),
            ("/bshd/labels[0, 3] is 300; it must be 0 to 258, or -100",
             cell("bshd/labels", (0, 3), 300)),
            ("vocab_size of '/bshd' is 1099511627776; it must be 1 to 2147483647", widen),
            ("row 2, segment 0", cell("bshd/seq_lens", (2, 0), 9)),
            ("row 3", cell("bshd/seq_lens_padded", (3, 1), 4)),
            ("row 1, segment 1", swap_tables),
            ("row 0", empty_row_first),
            ("row 0 has 2 documents and no positions of its own", no_positions),
            ("there are both '/bshd/input_ids' and '/bshd/inputs_embeds'", both),
            ("there is no dataset '/bshd/input_ids'; it must be int64 [any, any]", no_ids),
        ):
            with self.subTest(message=message):
                self.refused(message, "bshd_tiny.h5", change)

    def test_audio_that_breaks_a_rule(self):
        def nan(file):
            file["salm/audio"][7] = np.nan

        def one_audio_less(file):
            offsets = file["salm/audio_offsets"][:-1]
            del file["salm/audio_offsets"]
            file["salm/audio_offsets"] = offsets
            samples = file["salm/audio"][: offsets[-1]]
            del file["salm/audio"]
            file["salm/audio"] = samples

        def id_out_of_range(file):
            file["salm/input_ids"][0, 2] = 777

        for message, change in (("/salm/audio[7] is nan; it must be finite", nan),
                                ("placeholder", one_audio_less),
                                ("/salm/input_ids[0, 2] is 777", id_out_of_range)):
            with self.subTest(message=message):
                self.refused(message, "salm_tiny.h5", change)

    def test_rows_of_padding_at_the_end_become_a_segment(self):
        def pad_last_row(file):
            for name in ("seq_lens", "seq_lens_padded"):
                file["bshd/" + name][3] = -1000
            file["bshd/labels"][3] = -100

        path = self.changed("bshd_tiny.h5", pad_last_row)
        for tail in ("keep", "own-segment"):
            out = os.path.join(self.folder.name, tail + ".h5")
            run(2, "gyre-pack", "--input", path, "--tail", tail, "-o", out)
            (real, slots, _), = bins_of(read(out, "packed"))
            self.assertEqual((slots[-1], np.diff(real)[-1]), (64, 0))

    def test_labels_need_not_be_the_next_token(self):
        packed = os.path.join(self.folder.name, "packed.h5")
        run(1, "gyre-pack", "--input", os.path.join(INPUTS, "docs_tiny.h5"), "--cp", 2, "-o", packed)
        with h5py.File(packed, "r+") as file:
            del file.attrs["content_sha256"]
            file["packed/labels"][3] = 17
        for ranks in (1, 2):
            self.assertIn("VERIFY PASSED", run(ranks, "gyre-shard", "--input", packed, "--cp", 2))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
