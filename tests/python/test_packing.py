#!/usr/bin/env python3
"""Checks gyre-pack and gyre-shard against NumPy written from the formats' descriptions alone.

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

    def test_rows_become_streams(self):
        batch = read(os.path.join(INPUTS, "bshd_tiny.h5"), "bshd")
        rows = batch["input_ids"].shape[0]
        for chunks, ranks in ((1, 1), (2, 3), (4, 2)):
            out = self.path("packed.h5")
            run(ranks, "gyre-pack", "--input", os.path.join(INPUTS, "bshd_tiny.h5"), "--cp", 2,
                "--chunks", chunks, "--tail", "keep", "-o", out)
            packed = read(out, "packed")
            for name, array in (("ids", "input_ids"), ("labels", "labels"),
                                ("positions", "position_ids")):
                np.testing.assert_array_equal(packed[name], batch[array].reshape(-1), name)
            for c, (real, slots, _) in enumerate(bins_of(packed)):
                mine = slice(c * rows // chunks, (c + 1) * rows // chunks)
                for bounds, table in ((real, "seq_lens"), (slots, "seq_lens_padded")):
                    cells = batch[table][mine].reshape(-1)
                    lengths = cells[cells != -1000]
                    np.testing.assert_array_equal(bounds, np.append(0, np.cumsum(lengths)), table)

    def test_tail_padding_gets_segments_of_its_own(self):
        out = self.path("packed.h5")
        run(1, "gyre-pack", "--input", os.path.join(INPUTS, "bshd_tiny.h5"), "--cp", 2, "-o", out)
        (real, slots, _), = bins_of(read(out, "packed"))
        self.assertEqual(np.diff(real).tolist(), [3, 8, 0, 8, 5, 1, 0, 5, 7, 3, 0])
        self.assertEqual(np.diff(slots).tolist(), [4, 8, 4, 8, 8, 4, 4, 8, 8, 4, 4])

    def test_audio_takes_the_place_of_placeholders(self):
        salm = read(os.path.join(INPUTS, "salm_tiny.h5"), "salm")
        window = salm["encoder"].shape[0]
        audio = []
        for a, b in zip(salm["audio_offsets"][:-1], salm["audio_offsets"][1:]):
            frames = (b - a) // window
            samples = salm["audio"][a : a + frames * window].reshape(frames, window)
            audio.append(samples @ salm["encoder"])
        for cp, ranks in ((1, 1), (2, 4), (4, 3)):
            out = self.path("packed.h5")
            run(ranks, "gyre-pack", "--input", os.path.join(INPUTS, "salm_tiny.h5"), "--cp", cp,
                "-o", out)
            packed = read(out, "packed")
            pending = list(audio)
            (real, slots, _), = bins_of(packed)
            for row, (ids, targets) in enumerate(zip(salm["input_ids"], salm["target_ids"])):
                rows, labels = [], []
                for i in range(np.flatnonzero(ids != 0)[0], ids.size):
                    frames = pending.pop(0) if ids[i] == 99 else salm["inputs_embeds"][row, i][None]
                    rows.append(frames)
                    labels += [IGNORED] * len(frames) if ids[i] == 99 else [targets[i]]
                rows, labels = np.concatenate(rows), np.array(labels[1:] + [IGNORED])
                begin, n, room = slots[row], len(rows), slots[row + 1] - slots[row]
                self.assertEqual(real[row + 1] - real[row], n)
                self.assertEqual(room, -(-n // (2 * cp)) * 2 * cp if cp > 1 else n)
                np.testing.assert_array_equal(packed["embeddings"][begin : begin + n], rows)
                np.testing.assert_array_equal(packed["embeddings"][begin + n : begin + room], 0)
                np.testing.assert_array_equal(packed["labels"][begin : begin + n], labels)
                np.testing.assert_array_equal(packed["labels"][begin + n : begin + room], IGNORED)
                np.testing.assert_array_equal(
                    packed["positions"][begin : begin + room], np.arange(room))

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


def chunked(slots, cp, chunks_of):
    """Slots of each rank when a row is cut into 2 cp (or cp) chunks."""
    parts = np.split(np.arange(slots), cp if chunks_of == "contiguous" else 2 * cp)
    if chunks_of == "contiguous":
        return parts
    return [np.concatenate([parts[r], parts[2 * cp - 1 - r]]) for r in range(cp)]


def greedy(real, slots, cp, chunk):
    """Equal counts of chunks by descending cost, each to the lightest rank with room."""
    padded = -(-slots[-1] // (chunk * cp)) * chunk * cp
    cost = np.zeros(padded, np.int64)
    _, position, valid = segments_of(real, slots)
    cost[: slots[-1]] = np.where(valid, position + 1, 0)
    costs = cost.reshape(-1, chunk).sum(axis=1)
    load, held = [0] * cp, [[] for _ in range(cp)]
    for c in np.argsort(-costs, kind="stable"):
        rank = min((r for r in range(cp) if len(held[r]) < costs.size // cp), key=lambda r: load[r])
        load[rank] += costs[c]
        held[rank].append(c)
    every = np.arange(padded).reshape(-1, chunk)
    return [every[sorted(chunks)].reshape(-1) for chunks in held]


class Shard(unittest.TestCase):
    """gyre-shard."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.packed_path = os.path.join(self.folder.name, "packed.h5")

    def expected(self, layout, real, slots, cp, options):
        """Index list of every rank."""
        if layout == "dual-chunk-swap":
            ranks = [[] for _ in range(cp)]
            for begin, end in zip(slots[:-1], slots[1:]):
                for r, part in enumerate(chunked(end - begin, cp, "zigzag")):
                    ranks[r].append(begin + part)
            return [np.concatenate(parts) for parts in ranks]
        if layout == "balanced":
            return greedy(real, slots, cp, options["--chunk"])
        stripe = options.get("--stripe", 1)
        multiple = {"contiguous": cp, "zigzag": 2 * cp, "striped": cp * stripe}[layout]
        padded = -(-slots[-1] // multiple) * multiple
        if layout == "striped":
            return [s.reshape(-1) for s in
                    np.arange(padded).reshape(-1, cp, stripe).transpose(1, 0, 2)]
        return chunked(padded, cp, layout)

    def check(self, layout, cp, ranks, options, repad=False):
        out = os.path.join(self.folder.name, "shards.h5")
        flags = [str(x) for item in options.items() for x in item] + ["--repad"] * repad
        run(ranks, "gyre-shard", "--input", self.packed_path, "--cp", cp, "--layout", layout,
            *flags, "-o", out)
        packed, shards = read(self.packed_path, "packed"), read(out, "shards")
        local = 0
        for b, (real, slots, first) in enumerate(bins_of(packed)):
            arrays = {name: packed[name][first : first + slots[-1]]
                      for name in ("ids", "labels", "positions", "embeddings") if name in packed}
            if repad:
                slots, arrays = self.repadded(slots, arrays, 2 * cp)
            indices = self.expected(layout, real, slots, cp, options)
            part = slice(packed["bin_offsets"][b] + b, packed["bin_offsets"][b + 1] + b + 1)
            segment, _, valid = segments_of(real, slots)
            for r, index in enumerate(indices):
                mine = slice(local, local + index.size)
                np.testing.assert_array_equal(shards["index"][r, mine], index)
                inside = index[index < slots[-1]]
                for name, array in arrays.items():
                    got = shards[name][r, mine]
                    np.testing.assert_array_equal(got[: inside.size], array[inside], name)
                    np.testing.assert_array_equal(
                        got[inside.size :], IGNORED if name == "labels" else 0, name)
                counts = [np.bincount(segment[inside][keep], minlength=slots.size - 1)
                          for keep in (valid[inside], np.ones(inside.size, bool))]
                for name, count in zip(("cu_seqlens", "cu_seqlens_padded"), counts):
                    np.testing.assert_array_equal(
                        shards[name][r, part], np.append(0, np.cumsum(count)), name)
            local += indices[0].size
        self.assertEqual(local, shards["slot_offsets"][-1])

    @staticmethod
    def repadded(slots, arrays, multiple):
        """A bin with the slots of each segment rounded up."""
        rooms = -(-np.diff(slots) // multiple) * multiple
        wide = np.append(0, np.cumsum(rooms))
        moved = {}
        for name, array in arrays.items():
            fill = IGNORED if name == "labels" else 0
            moved[name] = np.full((wide[-1],) + array.shape[1:], fill, array.dtype)
            for i, begin in enumerate(slots[:-1]):
                count = slots[i + 1] - begin
                moved[name][wide[i] : wide[i] + count] = array[begin : begin + count]
                if name == "positions":
                    moved[name][wide[i] : wide[i + 1]] = np.arange(rooms[i])
        return wide, moved

    def test_shards_of_documents(self):
        run(1, "gyre-pack", "--input", os.path.join(INPUTS, "docs_tiny.h5"), "--capacity", 144,
            "--cp", 6, "-o", self.packed_path)
        for layout, cp, ranks, options in (
            ("contiguous", 3, 3, {}), ("zigzag", 4, 1, {}), ("dual-chunk-swap", 6, 2, {}),
            ("dual-chunk-swap", 3, 3, {}), ("striped", 5, 2, {"--stripe": 1}),
            ("striped", 2, 2, {"--stripe": 7}), ("balanced", 4, 4, {"--chunk": 4}),
            ("balanced", 3, 1, {"--chunk": 16}),
        ):
            with self.subTest(layout=layout, cp=cp):
                self.check(layout, cp, ranks, options)

    def test_shards_of_repadded_segments(self):
        run(1, "gyre-pack", "--input", os.path.join(INPUTS, "docs_tiny.h5"), "--capacity", 150,
            "-o", self.packed_path)
        self.check("dual-chunk-swap", 3, 3, {}, repad=True)
        self.check("balanced", 2, 1, {"--chunk": 8}, repad=True)

    def test_shards_of_embeddings(self):
        run(1, "gyre-pack", "--input", os.path.join(INPUTS, "salm_tiny.h5"), "--cp", 2,
            "-o", self.packed_path)
        self.check("dual-chunk-swap", 2, 2, {})
        self.check("contiguous", 3, 2, {})
        self.check("dual-chunk-swap", 5, 5, {}, repad=True)


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
        with self.assertRaisesRegex(AssertionError, "position_ids has 2 axes"):
            run(1, "gyre-pack", "--input", path, "--cp", 2, "-o", out)
        for change, begin in ((shared, 5), (left_out, 0)):
            path = self.changed("bshd_tiny.h5", change)
            run(1, "gyre-pack", "--input", path, "--cp", 2, "-o", out)
            np.testing.assert_array_equal(
                read(out, "packed")["positions"], np.tile(np.arange(16) + begin, 4))
            self.assertIn("VERIFY PASSED", run(2, "gyre-shard", "--input", path, "--cp", 4))

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
