#!/usr/bin/env python3
"""Checks inputs/golden/: files, index, coverage; known numbers, index lists and boundaries.

Two other implementations compute every answer once more: gyre.reference, whose gradients are
differentiated by a complex step (test_gyre_package_reference.py), and inputs/golden/example.py
(test_golden_check.py). Run it directly or through unittest; needs python3-numpy and python3-h5py.
"""

import filecmp
import json
import os
import re
import sys
import tempfile
import time
import unittest
from unittest import mock

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
INPUTS = os.path.join(SOURCE, "inputs")
GOLDEN = os.path.join(INPUTS, "golden")
sys.dont_write_bytecode = True
sys.path[:0] = [INPUTS, GOLDEN]

import make_golden  # noqa: E402  (found through the line above; sets NumPy's threads)

import h5py  # noqa: E402
import numpy as np  # noqa: E402

import check  # noqa: E402
import example  # noqa: E402
import golden_attention  # noqa: E402
import golden_batches  # noqa: E402
import golden_files  # noqa: E402
import golden_packing  # noqa: E402
import gyre_files  # noqa: E402

CLOSE = {"rtol": 1e-10, "atol": 1e-11}
MAX_BYTES = 20 << 20

with open(os.path.join(GOLDEN, "index.json"), encoding="utf-8") as index_file:
    INDEX = {entry["file"]: entry for entry in json.load(index_file)["cases"]}


def items(path):
    """(problem, answers) of everything that a file asks, by place."""
    kind = INDEX[os.path.basename(path)]["kind"]
    with h5py.File(path, "r") as file:
        return {(k, place): (p, a) for k, place, p, a in check.problems(file, kind)}


def load(name):
    """Problem and answers of a file with one problem, in double precision."""
    (problem, answers), = items(os.path.join(GOLDEN, name + ".h5")).values()
    wide = {k: x.astype(float) for k, x in problem.items() if isinstance(x, np.ndarray) and
            x.dtype == np.float32}
    return problem | wide, answers


def datasets(path):
    """Attributes of all objects, and all datasets as stored, by path."""
    found = {}

    def add(name, item):
        found[name, "attributes"] = {k: str(v) for k, v in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            found[name, "type"] = item.id.get_type().encode()
            found[name, "values"] = item[...]

    with h5py.File(path, "r") as file:
        file.visititems(add)
    return found


class Files(unittest.TestCase):
    """What is in the folder."""

    def test_files_are_what_the_program_makes(self):
        """To the byte; or where this processor's exp and log end in other bits, but for those."""
        with tempfile.TemporaryDirectory() as folder:
            make_golden.make(folder)
            made = sorted(name for name in os.listdir(folder))
            self.assertEqual(made, sorted(set(os.listdir(GOLDEN)) - {"check.py", "example.py",
                                                                     "__pycache__"}))
            for name in made:
                stored, fresh = os.path.join(GOLDEN, name), os.path.join(folder, name)
                if filecmp.cmp(stored, fresh, shallow=False) or name == "index.json":
                    continue
                self.assertTrue(name.endswith(".h5"), name)
                old, new = datasets(stored), datasets(fresh)
                self.assertEqual(old.keys(), new.keys(), name)
                for key, value in new.items():
                    if key[0].startswith("reference") and key[1] == "values":
                        where = {"err_msg": f"{name} {key}"}
                        np.testing.assert_allclose(old[key], value, **where, **CLOSE)
                    else:
                        np.testing.assert_equal(old[key], value, err_msg=f"{name} {key}")

    def test_index_is_that_of_the_files(self):
        self.assertEqual([case.file for case in make_golden.CASES], list(INDEX))
        for case in make_golden.CASES:
            self.assertEqual(make_golden.entry(case, GOLDEN), INDEX[case.file])
            self.assertTrue(case.edge and case.guards and case.run and case.tags, case.name)
            self.assertLessEqual(max(map(len, (case.edge, case.guards))), 250, case.name)
        with open(os.path.join(GOLDEN, "INDEX.md"), encoding="utf-8") as file:
            self.assertEqual(file.read(), make_golden.page(list(INDEX.values())))

    def test_files_are_small_and_have_digests(self):
        self.assertLess(sum(entry["bytes"] for entry in INDEX.values()), MAX_BYTES)
        for name, entry in INDEX.items():
            path = os.path.join(GOLDEN, name)
            with h5py.File(path, "r") as file:
                self.assertEqual(file.attrs["schema"], "gyre/" + entry["kind"])
                self.assertEqual(file.attrs["content_sha256"].decode(),
                                 gyre_files.content_digest(path))

    def test_files_do_not_depend_on_the_time(self):
        with tempfile.TemporaryDirectory() as folder:
            first, again = os.path.join(folder, "first"), os.path.join(folder, "again")
            make_golden.make(first)
            time.sleep(1.1)  # HDF5 counts seconds
            make_golden.make(again)
            _, wrong, missing = filecmp.cmpfiles(first, again, os.listdir(first), shallow=False)
            self.assertEqual((wrong, missing), ([], []))

    def test_no_answer_is_nan(self):
        for name in INDEX:
            for (kind, place), (_, answers) in items(os.path.join(GOLDEN, name)).items():
                for array, values in answers.items():
                    self.assertFalse(np.isnan(values).any(), f"{name} {kind} {place} {array}")

    def test_inputs_are_exact_in_narrow_types(self):
        """But for those of files that are there for what is not."""
        wide = {"offset", "overflow", "padding", "nan", "float16", "float64"}
        for name, entry in INDEX.items():
            if entry["kind"] not in ("logprobs", "attention") or wide & set(entry["tags"]):
                continue
            problem, _ = load(name.removesuffix(".h5"))
            for array in ("logits", "teacher", "hidden", "head", "q", "k", "v", "d_out"):
                values = np.asarray(problem.get(array, 0), np.float32)
                bits = values.view(np.uint32) if values.ndim else np.uint32(0)
                self.assertFalse(np.any(bits & 0xFFFF), f"{name} {array}")
                np.testing.assert_array_equal(values.astype(np.float16), values)


class Coverage(unittest.TestCase):
    """Every name of SCHEMA.md and of the layouts is there."""

    def section(self, begin, end):
        with open(os.path.join(INPUTS, "SCHEMA.md"), encoding="utf-8") as file:
            return re.search(f"\n## {begin}\n(.*?)\n## {end}\n", file.read(), re.DOTALL)[1]

    def answers(self, kind):
        found = [a for entry in INDEX.values() if entry["kind"] == kind for a in entry["answers"]]
        return {path.rpartition("/")[2] for path in found}

    def test_arrays(self):
        text = self.section("Log-probabilities", "Log-probability results")
        tables = text[text.index("Answers are in") :]
        rows = re.findall(r"^\| (`.*?) \| \[", tables, re.MULTILINE)
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        self.assertGreater(len(names), 25)
        self.assertEqual(names, self.answers("logprobs"))
        # The example has what is everyone's; single operations are left to who has them.
        single = {a.rpartition("/")[2] for e in INDEX.values() if "operation" in e["tags"] for a in e["answers"]}
        self.assertLessEqual(names - single, {key.rpartition("/")[2] for key in example.FUNCTIONS})
        inputs = text[: text.index("Answers are in")]
        named = set(re.findall(r"^\| `/logprobs/(\w+)`", inputs, re.MULTILINE))
        present, absent = set(), set()
        for name in INDEX:
            with h5py.File(os.path.join(GOLDEN, name), "r") as file:
                if "logprobs" in file:
                    present |= named & set(file["logprobs"])
                    absent |= named - set(file["logprobs"])
        self.assertGreater(len(named), 7)
        self.assertEqual(present, named)
        self.assertEqual(absent, named - {"logits", "targets"})  # what may be missing is
        rows = re.findall(r"`/reference/.*?\|", self.section("Attention", "Attention results"))
        names = {name for row in rows for name in re.findall(r"\b(\w+)`", row)}
        self.assertEqual(names - {"generator"}, self.answers("attention"))

    def test_types(self):
        kinds = set()
        for name in INDEX:
            with h5py.File(os.path.join(GOLDEN, name), "r") as file:
                if "logprobs" in file:
                    logits = file["logprobs/logits"]
                    kinds.add((logits.id.get_type().get_size(), logits.dtype.kind, *logits.attrs))
        self.assertLessEqual({(2, "f"), (2, "u", "dtype"), (4, "f"), (8, "f")}, kinds)

    def test_masks_layouts_and_edges(self):
        tags = {tag for entry in INDEX.values() for tag in entry["tags"]}
        masks = re.search(r"attribute `mask` .*", self.section("Attention", "Attention results"))[0]
        names = set(re.findall(r"`(\w+)`: a", masks))
        self.assertEqual(len(names), 2)
        self.assertLessEqual(names, tags)
        self.assertLessEqual({"causal", "full", "window", "sinks", "mqa", "groups-1", "groups-2",
                              "groups-4", "groups-8", "head-dim", "empty-document", "long", "scale",
                              "ties", "overflow", "minus-infinity", "certain", "padding", "nobody",
                              "temperature", "one-token", "no-token", "short-sequences", "offset",
                              "uneven-vocabulary", "bfloat16", "float16", "float64", "distillation",
                              "optional", "partial", "fused-linear", "rows", "audio", "bins",
                              "next-token-filtered", "without-tables", "extras"}, tags)
        with open(os.path.join(SOURCE, "src/sharding/layouts/list.hpp"), encoding="utf-8") as file:
            layouts = {x.replace("_", "-") for x in re.findall(r"^  X\((\w+)\)", file.read(), re.M)}
        places = {tuple(a.split("/")[1:3]) for e in INDEX.values() if e["kind"] == "packed"
                  for a in e["answers"] if a.startswith("reference/")}
        covered = {(cp, re.sub(r"-\d+$", "", layout)) for cp, layout in places}
        for layout in layouts - {"balanced-joint", "hybrid"}:  # of a search, not of a formula
            for cp in (1, 2, 3, 4, 8):
                self.assertIn((f"cp{cp}", layout), covered)


class Answers(unittest.TestCase):
    """Known numbers."""

    def test_known_numbers(self):
        """Of a ramp, of -inf and of an offset, computed by other means."""
        _, answers = load("logprobs_top_k_then_top_p")
        known = {"atol": 1e-9, "rtol": 0}
        np.testing.assert_allclose(answers["log_softmax"][0], np.arange(5) - 4.451914396, **known)
        np.testing.assert_allclose(answers["entropy"][0], 0.999972828, **known)
        wanted = [-1.313261688, -np.inf, -0.313261688]
        np.testing.assert_allclose(answers["filtered_logprob"], wanted, **known)
        _, answers = load("logprobs_one_id")
        self.assertFalse(answers["log_softmax"].any() or answers["d_entropy"].any())
        _, answers = load("logprobs_minus_infinity")
        self.assertEqual(np.isposinf(answers["soft_cross_entropy"]).tolist(),
                         [False, False, False, False, True, False, False])
        self.assertEqual(np.isneginf(answers["logprob"]).sum(), 4)

    def test_another_order_of_ties_selects_other_keys(self):
        cases = [case for case in golden_attention.CASES if "selected" in case.tags]
        self.assertTrue(cases)
        for case in cases:
            inputs, answers = load(case.name)
            arguments = {"rng": golden_files.generator(case.name), **case.write.keywords["arguments"]}
            with mock.patch.object(golden_attention, "goodness", lambda score, position: (-score, -position)):
                remade = golden_attention.make_problem(**arguments)
            np.testing.assert_array_equal(remade["q"], inputs["q"])
            other = example.attention(inputs | {"selected_keys": remade["selected_keys"]}, "out")
            self.assertGreater((abs(other - answers["out"]).max(axis=(1, 2)) > 0.1).sum(), len(other) / 4)

    def test_slots_of_ranks(self):
        def index(bounds, cp, layout="dual-chunk-swap", option=1):
            bin_ = {"cu_seqlens_padded": np.array(bounds), "cu_seqlens": np.array(bounds)}
            return [row.tolist() for row in golden_packing.index_of(layout, bin_, cp, option)]

        self.assertEqual(index([0, 12], 2), [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]])
        self.assertEqual(index([0, 8, 12], 2), [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]])
        self.assertEqual(index([0, 0, 8], 2), [[0, 1, 6, 7], [2, 3, 4, 5]])
        self.assertEqual(index([0, 16], 4)[1], [2, 3, 12, 13])
        self.assertEqual(index([0, 8, 16, 24, 40], 4)[2], [2, 5, 10, 13, 18, 21, 28, 29, 34, 35])
        self.assertEqual(index([0, 4, 7], 2, "zigzag"), [[0, 1, 6, 7], [2, 3, 4, 5]])
        self.assertEqual(index([0, 7], 2, "striped", 3), [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]])
        self.assertEqual(index([0, 5], 2, "contiguous"), [[0, 1, 2], [3, 4, 5]])
        for real, slots, wanted in ((7, 8, [3, 4]), (9, 12, [3, 6]), (1, 8, [1, 0]),
                                    (3, 8, [1, 1, 1, 0]), (698, 704, [170, 176, 176, 176])):
            tokens = [np.arange(real, dtype=np.int32)]
            bin_ = golden_packing.packed_bin(tokens, slots)
            held = golden_packing.shards_of_bin("dual-chunk-swap", bin_, len(wanted), 1)
            self.assertEqual(held["cu_seqlens"][:, 1].tolist(), wanted)

    def test_extras(self):
        """Slot by slot, of a stream and of each rank; types, too."""
        with h5py.File(os.path.join(GOLDEN, "rows_extras.h5"), "r") as file:
            rows, stream = file["bshd/extras"], file["reference/keep/extras"]
            self.assertEqual(set(rows), set(stream))
            for name, dataset in rows.items():
                self.assertEqual(dataset.id.get_type(), stream[name].id.get_type(), name)
            width = file["bshd/input_ids"].shape[1]
            for t, items in enumerate(stream["image"][()]):
                np.testing.assert_array_equal(items, rows["image"][t // width, t % width])
            for name in ("grid", "weight", "word"):
                np.testing.assert_array_equal(stream[name][()], rows[name][()])
            self.assertEqual({d.attrs["aligned"] for d in rows.values()}, {"slots", "rows", "none"})
        with h5py.File(os.path.join(GOLDEN, "packed_extras_cp2.h5"), "r") as file:
            packed = file["packed"]
            bounds, padded = packed["bin_offsets"][()], packed["cu_seqlens_padded"][()]
            for layout, group in file["reference/cp2"].items():
                self.assertEqual(set(packed["extras"]) - set(group["extras"]), {"attention_mask"})
                index, offsets, first = group["index"][()], group["slot_offsets"][()], 0
                for b in range(len(bounds) - 1):
                    slots = padded[bounds[b + 1] + b]
                    for name in ("image", "loss_mask"):
                        whole, held = packed["extras"][name][()], group["extras"][name][()]
                        for rank, t in np.ndindex(2, offsets[b + 1] - offsets[b]):
                            t += offsets[b]
                            slot = index[rank, t]
                            wanted = whole[first + slot] if slot < slots else 0 * whole[0]
                            np.testing.assert_array_equal(held[rank, t], wanted, f"{layout} {name}")
                    first += slots

    def test_boundaries_of_rows(self):
        def bounds(real, slots, width, tail):
            return [x.tolist() for x in golden_batches.boundaries(real, slots, width, tail)]

        self.assertEqual(bounds([[3, 2], [2, 3]], [[4, 2], [3, 3]], 6, "absorb"),
                         [[0, 3, 5, 7, 10], [0, 4, 6, 9, 12]])
        self.assertEqual(bounds([[8, 5]], [[8, 8]], 16, "absorb"), [[0, 8, 16]] * 2)
        self.assertEqual(bounds([[3, 8], [8, 5], [1, 0, 5], [7, 3]],
                                [[4, 12], [8, 8], [4, 4, 8], [8, 8]], 16, "own-segment"),
                         [[0, 3, 11, 11, 19, 24, 25, 25, 30, 37, 40, 40],
                          [0, 4, 12, 16, 24, 32, 36, 40, 48, 56, 60, 64]])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])  # CTest passes folders
