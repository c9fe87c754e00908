#!/usr/bin/env python3
"""Checks the Python package gyre: files that it writes and reads, and what it refuses.

Usage: test_gyre_package.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import filecmp
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np

SOURCE = os.path.abspath(sys.argv[1])
INPUTS = os.path.join(SOURCE, "inputs")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "python"))

import gyre  # noqa: E402  (found through the line above)

INF = np.inf
FILES = sorted(map(str, Path(INPUTS).rglob("*.h5")))


def stored(name):
    return gyre.read(os.path.join(INPUTS, name))


def small_logprobs(seed=1):
    """6 tokens of 4 sequences, 7 ids in 9 columns, 3 ids a token."""
    rng = np.random.default_rng(seed)
    return {"logits": rng.normal(0, 2, (6, 9)), "targets": np.array([2, 6, 0, 3, 3, 5]),
            "offsets": np.array([0, 1, 1, 4, 6]), "d_value": rng.normal(0, 1, 6),
            "ids": np.array([[0, 1, 1], [2, 3, 4], [6, 6, 6], [1, 0, 5], [4, 2, 0], [3, 3, 1]]),
            "teacher": rng.normal(0, 1, (6, 9)), "vocab_size": 7, "temperature": 1.7, "top_k": 5,
            "top_p": 0.8}


def projection(columns=(0, 0, 1), weights=np.array([1, 2, 4], "f4"), offsets=(0, 1, 1, 3, 3, 3, 3, 3), above=None):
    """A matrix of 7 ids and 2 columns: id 0 has an entry, id 2 has two."""
    given = {"width": 2, "offsets": offsets, "columns": columns, "weights": weights}
    return {f"projection_{name}": value for name, value in given.items()} | {"d_projected": above}


def small_attention(seed=2, **more):
    rng = np.random.default_rng(seed)
    shapes = {"q": (7, 4, 3), "k": (7, 2, 3), "v": (7, 2, 3), "d_out": (7, 4, 3)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | {"offsets": [0, 4, 4, 7], **more}


class Bfloat16Tensor:
    """What the package asks of a tensor of PyTorch of bfloat16, of values that it holds."""

    dtype = "torch.bfloat16"

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)
        self.detach = self.cpu = self.float = lambda: self

    def numpy(self):
        return self.values


class Scratch(unittest.TestCase):
    """A folder for each test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = lambda name: os.path.join(folder.name, name)
        self.listed = lambda: sorted(os.listdir(folder.name))


class Digests(unittest.TestCase):
    """content_sha256. (test_contents.py asks programs about files of everything that HDF5 has.)"""

    def test_is_what_every_input_has_recorded(self):
        for path in FILES:
            with h5py.File(path, "r") as file:
                self.assertEqual(gyre.content_sha256(path), file.attrs["content_sha256"].decode(), path)


class Reading(Scratch):
    """gyre.read"""

    def test_every_input(self):
        for path in FILES:
            file = gyre.read(path)
            with h5py.File(path, "r") as raw:
                self.assertEqual(file.schema, raw.attrs["schema"])
                self.assertEqual(set(file) | {"provenance"}, set(raw))
                self.assertEqual(file.provenance, dict(raw["provenance"].attrs))
                self.assertEqual(file.inputs.attributes, dict(raw[file.schema[5:].replace("-", "_")].attrs))
                for array in file.inputs:
                    dataset = raw[file.schema[5:].replace("-", "_")][array]
                    want = dataset.asstr()[()] if array == "names" else dataset[()]
                    if "dtype" in dataset.attrs:  # bfloat16 as uint16
                        want = (want.astype(np.uint32) << 16).view(np.float32)
                    np.testing.assert_array_equal(file.inputs[array], want)
            self.assertEqual("reference" in file, "reference" in file.groups)
        self.assertIn("layers/1/wq", stored("model_tiny.h5").inputs)

    def test_a_group_that_is_not_there_is_named(self):
        with self.assertRaisesRegex(KeyError, "has no group 'results'; it has logprobs, reference"):
            stored("logprobs_golden.h5").results

    def test_files_that_are_none_of_gyre_or_damaged(self):
        path = self.place("x.h5")
        with h5py.File(path, "w") as file:
            file["x"] = 1
        with self.assertRaisesRegex(ValueError, "is not a file of Gyre"):
            gyre.read(path)
        with h5py.File(path, "r+") as file:
            file.attrs["schema"], file.attrs["schema_version"] = "gyre/logprobs", 2
        with self.assertRaisesRegex(ValueError, "schema version 2; it must be 1"):
            gyre.read(path)
        gyre.write_logprobs(path, **small_logprobs())
        with h5py.File(path, "r+") as file:
            file["logprobs/targets"][1] = 5
        with self.assertRaisesRegex(gyre.Damaged, "are not what was written"):
            gyre.read(path)
        with self.assertRaises(FileNotFoundError):
            gyre.read(self.place("none.h5"))


class Writing(Scratch):
    """gyre.write_*"""

    def test_log_probabilities_come_back(self):
        inputs, path = small_logprobs(), self.place("x.h5")
        reference = gyre.reference.logprobs(**inputs)
        gyre.write_logprobs(path, **inputs, reference=reference, provenance={"generator": "me"})
        file = gyre.read(path)
        self.assertEqual((file.schema, file.provenance), ("gyre/logprobs", {"generator": "me"}))
        self.assertEqual(file.reference.attributes, {"generator": "me"})
        for name, value in file.inputs.attributes.items():
            self.assertEqual(value, inputs.pop(name, 0))
        gyre.assert_close(file.inputs, inputs, rtol=0, atol=0)
        gyre.assert_close(file.reference, reference, rtol=0, atol=0)
        self.assertEqual(file.inputs["targets"].dtype, np.int32)
        self.assertEqual(self.listed(), ["x.h5"])

    def test_filters_of_tokens_and_kept_ids_come_back(self):
        own = {"temperature": np.array([1, 2, 0.5, 1, 1, 3]), "top_k": [0, 3, 7, 0, 1, 2],
               "top_p": np.array([1, 0.5, 0.9, 1, 1, 0.7], "f4"), "min_p": [0, 0, 0.1, 1, 0.5, 0],
               "sampling_mask_offsets": [0, 2, 2, 5, 6, 6, 9], "sampling_mask_ids": [3, 0, 6, 1, 2, 3, 5, 4, 0]}
        inputs, path = small_logprobs() | own, self.place("x.h5")
        gyre.write_logprobs(path, **inputs, reference=gyre.reference.logprobs(**inputs))
        file = gyre.read(path)
        self.assertEqual(set(file.inputs.attributes), {"vocab_size"})
        gyre.assert_close({name: file.inputs[name] for name in own},
                          {name: np.asarray(value) for name, value in own.items()}, rtol=1e-7, atol=0)
        for name in ("kept_logprob", "d_kept_logprob", "filtered_logprob"):
            self.assertIn(name, file.reference)
        # A row is that of a problem whose filter is of all rows.
        for row, (heat, k, p, least) in enumerate(zip(*(own[n] for n in ("temperature", "top_k", "top_p", "min_p")))):
            one = gyre.reference.filtered(inputs["logits"][:, :7], k, p, heat, least)[row]
            limits = (own[name] for name in ("top_k", "top_p", "temperature", "min_p"))
            all_ = gyre.reference.filtered(inputs["logits"][:, :7], *limits)
            np.testing.assert_array_equal(one, all_[row])

    def test_projections_come_back(self):
        inputs, path = small_logprobs() | projection(above=np.ones((6, 2), "f4")), self.place("x.h5")
        answers = gyre.reference.logprobs(**inputs)
        gyre.write_logprobs(path, **inputs, reference=answers)
        file = gyre.read(path)
        self.assertEqual(file.inputs.attributes["projection_width"], 2)
        self.assertEqual(file.reference["projected_probability"].shape, (6, 2))
        p = answers["softmax"]  # id 0: column 0; id 2: columns 0 and 1
        np.testing.assert_allclose(answers["projected_probability"], np.stack([p[:, 0] + 2 * p[:, 2], 4 * p[:, 2]], 1))
        np.testing.assert_allclose(answers["d_projected_probability"].sum(axis=1), 0, atol=1e-12)

    def test_a_teacher_of_the_largest_ids_comes_back(self):
        inputs, path = small_logprobs(), self.place("x.h5")
        z, targets = inputs["logits"][:, :7], inputs["targets"]
        log_p = gyre.reference.log_softmax(inputs.pop("teacher")[:, :7])
        ids = gyre.reference.top_k(z, 3)[1][:, ::-1]
        inputs |= {"ids": ids, "teacher_logprobs": np.take_along_axis(log_p, ids, 1),
                   "teacher_target_logprobs": log_p[np.arange(6), targets]}
        answers = gyre.reference.logprobs(**inputs)
        gyre.write_logprobs(path, **inputs, reference=answers)
        file = gyre.read(path)
        gyre.assert_close(file.inputs, {name: inputs[name] for name in ("teacher_logprobs", "ids")}, rtol=1e-7,
                          common=True)
        # The same as of the teacher's whole rows.
        rows = gyre.reference.logprobs(["topk_kl", "d_topk_kl"], **small_logprobs())
        gyre.assert_close({name: answers[name] for name in rows}, rows, rtol=1e-12, atol=1e-14)

    def test_the_same_contents_are_the_same_bytes(self):
        files = [self.place("a.h5"), self.place("b.h5")]
        for path in files:
            gyre.write_attention(path, **small_attention())
        self.assertTrue(filecmp.cmp(*files, shallow=False))

    def test_links_and_special_files_stay(self):
        link, pipe = self.place("link.h5"), self.place("pipe.h5")
        os.symlink("x.h5", link)
        os.mkfifo(pipe)
        gyre.write_logprobs(link, **small_logprobs())
        self.assertTrue(os.path.islink(link))
        self.assertEqual(gyre.read(self.place("x.h5")).schema, "gyre/logprobs")
        with self.assertRaisesRegex(FileExistsError, "no regular file"):
            gyre.write_logprobs(pipe, **small_logprobs())
        self.assertEqual(self.listed(), ["link.h5", "pipe.h5", "x.h5"])

    def test_part_of_inputs_and_reference(self):
        path, logits = self.place("x.h5"), np.zeros((2, 3), np.float16)
        top = {"top_ids": [[0, 1], [0, 1]], "top_values": np.zeros((2, 2), np.float16)}
        reference = {"entropy": np.full(2, np.log(3)), **top}
        gyre.write_logprobs(path, logits=logits, targets=[-100, 2**31 - 1], reference=reference)
        file = gyre.read(path)
        self.assertEqual(file.inputs.attributes["vocab_size"], 3)
        self.assertEqual(set(file.inputs), {"logits", "targets"})
        self.assertEqual(file.inputs["logits"].dtype, np.float16)
        self.assertEqual(file.reference["top_values"].dtype, np.float16)
        self.assertEqual(set(file.reference), {"entropy", "top_ids", "top_values"})
        gyre.write_attention(path, q=np.ones((2, 1, 4)), k=np.ones((2, 1, 4)), v=np.ones((2, 1, 4)))
        file = gyre.read(path)
        self.assertEqual(file.inputs.attributes, {"mask": "causal", "window": 0, "scale": 0.5})
        self.assertNotIn("reference", file)
        np.testing.assert_array_equal(file.inputs["d_out"], np.ones((2, 1, 4)))

    def test_bfloat16(self):
        bits = np.array([[0x3F80, 0xFF80, 0x0001], [0x8000, 0x7F7F, 0x4049]], np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        path = self.place("x.h5")
        gyre.write_logprobs(path, logits=Bfloat16Tensor(values), targets=[0, 1])
        with h5py.File(path, "r") as file:
            self.assertEqual(file["logprobs/logits"].id.get_type().get_size(), 2)
            np.testing.assert_array_equal(file["logprobs/logits"][1], values[1])
        np.testing.assert_array_equal(gyre.read(path).inputs["logits"], values)
        with h5py.File(path, "r+") as file:
            del file["logprobs/logits"], file.attrs["content_sha256"]
            file["logprobs/logits"] = bits
            file["logprobs/logits"].attrs["dtype"] = "bfloat16"
        np.testing.assert_array_equal(gyre.read(path).inputs["logits"], values)

    def test_documents(self):
        path = self.place("x.h5")
        texts = [np.array([1, 2, 3]), [], [4]]
        gyre.write_documents(path, texts, vocab_size=5, names=["a", "", "ü"], tokenizer="mine")
        file = gyre.read(path).inputs
        self.assertEqual(file["tokens"].tolist(), [1, 2, 3, 4])
        self.assertEqual(file["offsets"].tolist(), [0, 3, 3, 4])
        self.assertEqual(file["names"].tolist(), ["a", "", "ü"])
        self.assertEqual(file.attributes, {"vocab_size": 5, "tokenizer": "mine"})
        gyre.write_documents(path, [], vocab_size=1)
        self.assertEqual(set(gyre.read(path).inputs), {"tokens", "offsets"})

    def test_documents_with_a_reference(self):
        for name in ("docs_tiny.h5", "docs_small.h5"):
            file, path = stored(name), self.place(name)
            texts = np.split(file.inputs["tokens"], file.inputs["offsets"][1:-1])
            names, reference = file.inputs["names"], dict(file.reference)
            offsets = reference.pop("offsets")
            more = {**file.inputs.attributes, "names": names, "reference": reference}
            gyre.write_documents(path, texts, **more)
            gyre.assert_close(gyre.read(path), path + ":/")
            gyre.assert_close(gyre.read(path).inputs, file.inputs)
            gyre.assert_close(gyre.read(path).reference, {**reference, "offsets": offsets})

    def test_rows_come_back(self):
        for name in ("bshd_tiny.h5", "bshd_left.h5"):
            rows, path = stored(name).inputs, self.place(name)
            gyre.write_rows(path, **rows, **rows.attributes)
            gyre.assert_close(gyre.read(path).inputs, rows)
            self.assertEqual(gyre.read(path).inputs.attributes, rows.attributes)

    def test_rows_without_tables_come_back(self):
        for name in ("golden/rows_without_tables.h5", "golden/rows_padded.h5"):
            rows, path = stored(name).inputs, self.place("x.h5")
            gyre.write_rows(path, **rows, **rows.attributes)
            gyre.assert_close(gyre.read(path).inputs, rows)
            self.assertEqual(gyre.read(path).inputs.attributes, {"vocab_size": 101, "pad_id": 100})
        ids = np.array([[9, 1, 2, 9], [9, 9, 9, 9], [3, 4, 5, 6]])  # as rows with a key mask have it
        gyre.write_rows(path, vocab_size=10, input_ids=ids, labels=ids, pad_id=9)
        only = {"seq_lens": [[1, 3]], "input_ids": ids[2:], "labels": ids[2:]}
        gyre.write_rows(path, vocab_size=10, **only, position_ids=[[0, 0, 1, 2]])
        self.assertNotIn("seq_lens_padded", gyre.read(path).inputs)

    def test_text_with_audio_comes_back(self):
        for name in ("golden/audio.h5", "salm_tiny.h5"):
            rows, path = stored(name).inputs, self.place("x.h5")
            given = {n: rows[n] for n in ("input_ids", "target_ids", "inputs_embeds", "encoder")}
            given["audio"] = np.split(rows["audio"], rows["audio_offsets"][1:-1])
            gyre.write_salm(path, **given, **rows.attributes)
            gyre.assert_close(gyre.read(path).inputs, rows, rtol=0, atol=0)
            self.assertEqual(gyre.read(path).inputs.attributes, rows.attributes)
        os.remove(path)
        for message, wrong in (
            ("there are 0 audio items; there must be", {"audio": []}),
            ("audio[1][0] is nan; it must be finite", {"audio": [given["audio"][0], [np.nan]]}),
            ("both 3; they must be different", {"pad_id": 3, "placeholder_id": 3}),
            ("target_ids[0, 0] is -7", {"target_ids": np.full(rows["input_ids"].shape, -7)}),
            ("input_ids[0, 0] is", {"input_ids": np.full(rows["input_ids"].shape, 2**30)}),
            ("encoder is", {"encoder": np.ones((4, 1))}),
            ("the number of rows of encoder is 0", {"encoder": np.ones((0, rows["encoder"].shape[1]))}),
            ("inputs_embeds is", {"inputs_embeds": rows["inputs_embeds"][1:]}),
            ("float32 holds", {"encoder": np.full(rows["encoder"].shape, 1e-12 + 1)}),
        ):
            with self.assertRaisesRegex(ValueError, re.escape(message)):
                gyre.write_salm(path, **{**given, **rows.attributes, **wrong})
            self.assertFalse(os.path.exists(path), message)

    def test_extras_come_back_with_their_types(self):
        rows, path = stored("golden/rows_extras.h5").inputs, self.place("x.h5")
        extras = gyre.extras_of(rows)
        self.assertEqual({name: aligned for name, (aligned, _) in extras.items()},
                         {"attention_mask": "slots", "grid": "none", "image": "slots",
                          "weight": "rows", "word": "rows"})
        extras["below/flags"] = ("slots", np.eye(3, 12, dtype=bool))
        extras["scalar"] = ("none", np.uint64(2**63))
        arrays = {name: x for name, x in rows.items() if not name.startswith("extras/")}
        gyre.write_rows(path, **arrays, **rows.attributes, extras=extras)
        again = gyre.extras_of(gyre.read(path).inputs)
        self.assertEqual(again.keys(), extras.keys())
        for name, (aligned, array) in extras.items():
            self.assertEqual((again[name][0], again[name][1].dtype), (aligned, array.dtype), name)
            np.testing.assert_array_equal(again[name][1], array)


WITHOUT_TABLES = {"seq_lens": None, "seq_lens_padded": None}


class Refusals(Scratch):
    """A message names the array, the place, the value, and what would be right."""

    def refused(self, write, cases):
        for message, changes in cases:
            with self.subTest(message=message):
                with self.assertRaises((ValueError, TypeError)) as caught:
                    write(changes)
                self.assertIn(message, str(caught.exception))
                self.assertEqual(self.listed(), [])

    def test_log_probabilities(self):
        def with_cell(name, index, value):
            array = np.array(small_logprobs()[name])
            array[index] = value
            return {name: array}

        def write(changes):
            gyre.write_logprobs(self.place("x.h5"), **{**small_logprobs(), **changes})

        def answered(**changes):
            return {"ids": np.full((6, 3), [0, 1, 2]), "teacher_logprobs": np.full((6, 3), -1.0),
                    "teacher_target_logprobs": np.zeros(6), **changes}

        answers = lambda **arrays: {"reference": arrays}  # noqa: E731
        self.refused(write,
                     (("logits[3, 5] is nan; it must be finite or -inf",
                       with_cell("logits", (3, 5), np.nan)),
                      ("logits[2, 0] is inf; it must be finite",
                       with_cell("logits", (2, 0), np.inf)),
                      ("logits[4, 0] is -inf; it must be finite in",
                       with_cell("logits", 4, -np.inf)),
                      ("logits is [2, 3, 9]; it must be [any, any]: rows are tokens",
                       {"logits": np.zeros((2, 3, 9))}),
                      ("logits is int64; it must be one of float16",
                       {"logits": np.zeros((6, 9), int)}),
                      ("teacher[0, 1] is nan", with_cell("teacher", (0, 1), np.nan)),
                      ("teacher is [6, 7]; it must be [6, 9]", {"teacher": np.zeros((6, 7))}),
                      ("targets is [5]; it must be [6]", {"targets": np.zeros(5, int)}),
                      ("targets is float64; it must be an integer type", {"targets": np.zeros(6)}),
                      ("targets[2] is 2147483648; it must be an integer of 32 bits",
                       with_cell("targets", 2, 2**31)),
                      ("ids[1, 2] is 7; it must be 0 to 6", with_cell("ids", (1, 2), 7)),
                      ("ids[0, 0] is -1; it must be 0 to 6", with_cell("ids", (0, 0), -1)),
                      ("offsets[0] is 1; it must be 0", with_cell("offsets", 0, 1)),
                      ("offsets[3] is 0; it must be at least the offset before",
                       with_cell("offsets", 3, 0)),
                      ("offsets[4], the last, is 5; it must be 6, the rows of logits",
                       with_cell("offsets", 4, 5)),
                      ("offsets is empty", {"offsets": np.zeros(0, int)}),
                      ("d_value[5] is inf; it must be finite", with_cell("d_value", 5, np.inf)),
                      ("d_logprobs is [6, 9]; it must be [6, 7]", {"d_logprobs": np.zeros((6, 9))}),
                      ("d_value[1] is 2e+31; a gradient at a temperature of 1.7 is from -1e+31 to 1e+31",
                       with_cell("d_value", 1, 2e31)),
                      ("d_logprobs[2, 0] is -2e+21; a gradient at a temperature of 1e-05 is from -1e+21 to 1e+21",
                       {"d_logprobs": np.full((6, 7), -2e21), "temperature": [1, 1, 1e-5, 1, 1, 1]}),
                      ("d_projected[0, 0] is 1.0000000452706117e+31; a gradient at a temperature of 3 is",
                       projection(above=np.full((6, 2), np.nextafter(np.float32(1e31), np.float32(2e31))))
                       | {"temperature": 3}),
                      ("vocab_size is 10; it must be 1 to 9", {"vocab_size": 10}),
                      ("temperature is 0; it must be 1e-15 to 1e+30", {"temperature": 0}),
                      ("temperature is nan", {"temperature": np.nan}),
                      ("top_k is 8; it must be 0 to 7", {"top_k": 8}),
                      ("top_p is 0; it must be above 0", {"top_p": 0}),
                      ("top_p[3] is 0.0; it must be above 0 and at most 1", {"top_p": [1, 1, 1, 0, 1, 1]}),
                      ("min_p is 2; it must be 0 to 1", {"min_p": 2}),
                      ("top_k[1] is 8; it must be 0 to 7", {"top_k": [0, 8, 0, 0, 0, 0]}),
                      ("temperature is [2]; it must be [6]", {"temperature": [1, 2]}),
                      ("sampling_mask_offsets and sampling_mask_ids are one list", {"sampling_mask_ids": [1]}),
                      ("sampling_mask_ids[1] is 7; it must be 0 to 6",
                       {"sampling_mask_ids": [1, 7], "sampling_mask_offsets": [0, 2, 2, 2, 2, 2, 2]}),
                      ("sampling_mask_ids of row 1 have an id twice",
                       {"sampling_mask_ids": [1, 1, 1], "sampling_mask_offsets": [0, 1, 3, 3, 3, 3, 3]}),
                      ("sampling_mask_offsets are 2; 6 rows need 7",
                       {"sampling_mask_ids": [1], "sampling_mask_offsets": [0, 1]}),
                      ("a projection has width, offsets, columns and weights; projection_width is missing",
                       {"d_projected": np.zeros((6, 2))}),
                      ("projection_columns[1] is 2; it must be 0 to 1", projection(columns=[0, 2, 1])),
                      ("projection_weights[2] is -1.0; it must be finite and at least 0",
                       projection(weights=np.array([1.0, 0, -1]))),
                      ("projection_offsets are 3; 7 ids need 8", projection(offsets=[0, 1, 3])),
                      ("projection_columns of row 2 have a column twice", projection(columns=[0, 1, 1])),
                      ("d_projected is [6, 3]; it must be [6, 2]", projection(above=np.zeros((6, 3)))),
                      ("hidden and head are factors of logits; one", {"hidden": np.zeros((6, 2))}),
                      ("head is [9, 2]; it must be [7, 2]",
                       {"hidden": np.zeros((6, 2)), "head": np.zeros((9, 2))}),
                      ("teacher_values are logits of ids; there are no",
                       {"ids": None, "teacher_values": np.zeros((6, 3))}),
                      ("teacher_logprobs and teacher_target_logprobs go together",
                       {"teacher_target_logprobs": np.zeros(6)}),
                      ("teacher_logprobs is [6, 2]; it must be [6, 3]", answered(teacher_logprobs=np.zeros((6, 2)))),
                      ("teacher_logprobs[1, 0] is 0.5; it must be at most 0",
                       answered(teacher_logprobs=np.full((6, 3), [[0], [0.5]] * 3))),
                      ("ids of row 0 have an id twice", answered(ids=np.full((6, 3), 2))),
                      ("d_ids are gradients of values of ids; there are no", {"ids": None, "d_ids": np.zeros((6, 3))}),
                      ("d_ids is [6, 2]; it must be [6, 3]", {"d_ids": np.zeros((6, 2))}),
                      ("d_entropies[4] is nan; it must be finite", {"d_entropies": np.array([0, 0, 0, 0, np.nan, 0])}),
                      ("reference['topk_kl'] needs teacher or teacher_logprobs",
                       {"teacher": None, **answers(topk_kl=np.zeros(6))}),
                      ("a reference has no array 'logprobs'; nearest: 'logprob'",
                       answers(logprobs=np.zeros(6))),
                      ("reference['logprob'][1] is nan; it must be a number",
                       answers(logprob=np.full(6, [0, np.nan] * 3))),
                      ("reference['entropy'] is [5]; it must be [6]", answers(entropy=np.zeros(5))),
                      ("reference['gathered'] needs ids",
                       {"ids": None, **answers(gathered=np.zeros((6, 3)))}),
                      ("reference['d_head'] needs hidden", answers(d_head=np.zeros((7, 3)))),
                      ("reference['distilled_entropy'] needs teacher or teacher_values",
                       {"teacher": None, **answers(distilled_entropy=np.zeros(6))}),
                      ("reference['top_ids'] is [6, 2]; it must be [6, 3]",
                       answers(top_ids=np.zeros((6, 2), int))),
                      ("unexpected keyword argument 'logit'", {"logit": 1})))
        write({"d_value": np.full(6, 1e31)})  # float32's 1e31 is a little less

    def test_attention(self):
        def write(changes):
            gyre.write_attention(self.place("x.h5"), **{**small_attention(), **changes})

        broken = np.zeros((7, 2, 3))
        broken[1, 0, 2] = np.inf
        self.refused(write,
                     (("q is [1, 4, 7, 3]; it must be [any, any, any]: [tokens, heads",
                       {"q": np.zeros((1, 4, 7, 3))}),
                      ("k is [6, 2, 3]; it must be [7, any, 3]", {"k": np.zeros((6, 2, 3))}),
                      ("q has 4 heads and k 3; heads must be a multiple",
                       {"k": np.zeros((7, 3, 3))}),
                      ("v[1, 0, 2] is inf; it must be finite", {"v": broken}),
                      ("sinks is [2]; it must be [4]", {"sinks": np.zeros(2)}),
                      ("mask is 'banded'; it must be causal, full, regions or selected", {"mask": "banded"}),
                      ("mask is 'causal'; selected_keys go with mask 'selected'", {"selected_keys": np.zeros((7, 1), int)}),
                      ("mask is 'selected'; selected_keys go with mask 'selected'", {"mask": "selected"}),
                      *[(f"selected_keys[{place}; it must be {wanted}",
                         {"mask": "selected", "selected_keys": [[0, -1], [1, 0], [2, -1], row, [0, -1], [1, 0], last]})
                        for place, wanted, row, last in (
                            ("3, 0] is 4", "-1, or a position up to that of its query", [4, 0], [2, 1]),
                            ("6, 0] is 3", "-1, or a position up to that of its query", [3, 0], [3, 1]),
                            ("3, 1] is 0", "before -1, no key", [-1, 0], [2, 1]),
                            ("6, 1] is 2", "selected once by its query", [3, 0], [2, 2]))],
                      ("selected_keys is [6, 1]; it must be [7, any]", {"mask": "selected", "selected_keys": np.zeros((6, 1), int)}),
                      ("window is 4, but only a causal mask has one",
                       {"mask": "full", "window": 4}),
                      ("scale is -1; it must be 1.17", {"scale": -1}),
                      ("scale is 1e+300; it must be 1.17", {"scale": 1e300}),
                      ("offsets[3], the last, is 6; it must be 7, the rows of k",
                       {"offsets": [0, 4, 4, 6]}),
                      ("query_offsets gives document 1 1 queries; it has 0 tokens",
                       {"query_offsets": [0, 4, 5, 7]}),
                      ("query_offsets has 2 elements; it must have 4, as offsets", {"query_offsets": [0, 7]}),
                      ("query_offsets[3], the last, is 5; it must be 7, the rows of q",
                       {"query_offsets": [0, 2, 2, 5]}),
                      ("the number of elements of k_shared is 3; it must be 1 to 2",
                       {"k_shared": np.zeros((7, 3))}),
                      ("k is [7, 2, 3]; it must be [7, any, 2]", {"k_shared": np.zeros((7, 1))}),
                      ("k_shared is [6, 1]; it must be [7, any]", {"k_shared": np.zeros((6, 1))}),
                      ("reference['d_k_shared'] needs the input k_shared",
                       {"reference": {"d_k_shared": np.zeros((7, 1))}}),
                      ("reference['d_sinks'] needs the input sinks", {"reference": {"d_sinks": np.zeros(4)}}),
                      ("reference['lse'] is [7, 2]; it must be [7, 4]",
                       {"reference": {"lse": np.zeros((7, 2))}}),
                      ("reference['lse'][0, 0] is -inf; it must be finite, or -inf where",
                       {"reference": {"lse": np.full((7, 4), -np.inf)}})))

    def test_queries_of_the_last_tokens(self):
        inputs = small_attention()  # documents of 4, 0 and 3 tokens
        rows = np.r_[2:4, 4:7]
        some = {**inputs, "q": inputs["q"][rows], "d_out": inputs["d_out"][rows], "query_offsets": [0, 2, 2, 5]}
        # The same as gradients of all outputs where those of the other queries are 0.
        masked = np.zeros_like(inputs["d_out"])
        masked[rows] = inputs["d_out"][rows]
        few, all_of = gyre.reference.attention(**some), gyre.reference.attention(**{**inputs, "d_out": masked})
        for name in ("out", "lse", "d_q"):
            np.testing.assert_array_equal(few[name], all_of[name][rows])
        for name in ("d_k", "d_v"):
            np.testing.assert_allclose(few[name], all_of[name], rtol=1e-13, atol=1e-15)

    def test_selected_keys(self):
        rng, select = np.random.default_rng(5), gyre.reference.selected_keys
        q, k, w = rng.integers(-2, 3, (9, 2, 3)), rng.integers(-1, 2, (9, 3)), rng.integers(-1, 3, (9, 2))
        scores = gyre.reference.index_scores(q, k, w)
        selected = select(scores, 4)
        ties = 0
        for t in range(9):
            wanted = [sum(w[t, j] * max(0, int(q[t, j] @ k[s])) for j in range(2)) for s in range(t + 1)]
            self.assertEqual(scores[t].tolist(), wanted + [-np.inf] * (8 - t))
            best = sorted(range(t + 1), key=lambda s: (-wanted[s], s))
            self.assertEqual(selected[t].tolist(), (best + [-1] * 4)[:4])
            ties += len(best) > 4 and wanted[best[3]] == wanted[best[4]]
        self.assertGreater(ties, 1)
        self.assertEqual(select(scores[:, :3], 5)[8].tolist()[3:], [-1, -1])
        np.testing.assert_array_equal(gyre.reference.index_scores(q[6:], k, w[6:]), scores[6:])
        # Each query sees these keys alone, at positions of its document.
        inputs = small_attention()  # documents of 4, 0 and 3 tokens
        keys = np.concatenate([select(gyre.reference.drawn_scores(n, d), 2) for d, n in enumerate((4, 0, 3))])
        found = gyre.reference.attention(**inputs, mask="selected", selected_keys=keys)
        for t, begin in enumerate([0, 0, 0, 0, 4, 4, 4]):
            rows = begin + keys[t][keys[t] >= 0]
            x = inputs["q"][t, 3] @ inputs["k"][rows, 1].T / np.sqrt(3)
            np.testing.assert_allclose(found["out"][t, 3], np.exp(x) @ inputs["v"][rows, 1] / np.exp(x).sum(), rtol=1e-13)
        rows = [2, 3, 4, 5, 6]
        some = {**inputs, "q": inputs["q"][rows], "d_out": inputs["d_out"][rows], "query_offsets": [0, 2, 2, 5]}
        last = gyre.reference.attention(**some, mask="selected", selected_keys=keys[rows])
        np.testing.assert_array_equal(last["out"], found["out"][rows])

    def test_a_query_that_sees_no_key(self):
        regions = [[0, 1, 4, 0, 3, 1, 0], [2, 0, 2, 0, 2, 0, 0]]  # of documents of 4, 0, 3 tokens
        inputs = {**small_attention(), "mask": "regions", "regions": regions, "window": 0}
        answers = gyre.reference.attention(**inputs)
        blind = answers["lse"] == -np.inf
        self.assertEqual(np.flatnonzero(blind.all(axis=1)).tolist(), [0, 6])
        self.assertTrue(np.isfinite(answers["lse"][~blind]).all())
        path = self.place("blind.h5")
        gyre.write_attention(path, **inputs, reference=answers)
        np.testing.assert_array_equal(gyre.read(path).reference["lse"], answers["lse"])
        for place, value in (((0, 0), np.nan), ((6, 1), np.inf), ((1, 0), -np.inf)):
            wrong = answers["lse"].copy()
            wrong[place] = value
            text = re.escape(f"reference['lse'][{place[0]}, {place[1]}] is {value}; it must be")
            with self.assertRaisesRegex(ValueError, text):
                gyre.write_attention(path, **inputs, reference={"lse": wrong})

    def test_documents_and_rows(self):
        def documents(changes):
            arguments = {"documents": [[1, 2]], "vocab_size": 3, **changes}
            gyre.write_documents(self.place("x.h5"), **arguments)

        self.refused(documents,
                     (("documents[1][0] is 3; it must be 0 to 2", {"documents": [[], [3]]}),
                      ("there are 2 names; there must be 1", {"names": ["a", "b"]}),
                      ("tokenizer is empty", {"tokenizer": ""}),
                      ("reference['logprob'] is [2]; it must be [1]",
                       {"reference": {"logprob": [0.0, 0.0]}}),
                      ("reference['entropy'][0] is inf; it must be finite",
                       {"reference": {"entropy": [INF]}})))
        rows = stored("bshd_tiny.h5").inputs

        def write_rows(changes):
            gyre.write_rows(self.place("x.h5"), **{**rows, **rows.attributes, **changes})

        def changed(name, index, value):
            array = rows[name].copy()
            array[index] = value
            return {name: array}

        self.refused(write_rows,
                     (("input_ids[1, 2] is 259; it must be 0 to 258",
                       changed("input_ids", (1, 2), 259)),
                      ("labels[0, 3] is 300; it must be 0 to 258, or -100",
                       changed("labels", (0, 3), 300)),
                      ("seq_lens[2, 0] is 9; it must be at least 0",
                       changed("seq_lens", (2, 0), 9)),
                      ("seq_lens_padded[1, 1] is -1000", changed("seq_lens_padded", (1, 1), -1000)),
                      ("the sums of the rows of seq_lens_padded[3]",
                       changed("seq_lens_padded", (3, 0), 12)),
                      ("the number of documents of row[0] is", {"position_ids": None}),
                      ("one of input_ids and inputs_embeds",
                       {"inputs_embeds": np.zeros((4, 16, 2))}),
                      ("the sums of the rows of seq_lens[0] is 11", {"seq_lens_padded": None}),
                      ("seq_lens_padded needs seq_lens, which was not given", {"seq_lens": None}),
                      ("one of seq_lens and pad_id is needed", WITHOUT_TABLES),
                      ("pad_id is 259; it must be 0 to 258", {"pad_id": 259}),
                      ("it must be another id than pad_id between other ids of a row",
                       {**WITHOUT_TABLES, "pad_id": int(rows["input_ids"][0, 1])}),
                      ("extras['x'] is aligned to 'row'", {"extras": {"x": ("row", [1])}}),
                      ("extras['x'] is [3]; it must be [4, ...]",
                       {"extras": {"x": ("rows", [1] * 3)}}),
                      ("extras['x'] is [4, 15]; it must be [4, 16, ...]",
                       {"extras": {"x": ("slots", np.zeros((4, 15)))}}),
                      ("extras['x'] is [4, 0]", {"extras": {"x": ("rows", np.zeros((4, 0)))}}),
                      ("extras['x'] is <U1; it must be of", {"extras": {"x": ("none", ["a"])}})))
        embeds = {"input_ids": None, "inputs_embeds": np.zeros((4, 16, 2), np.float32)}
        message = "inputs_embeds needs seq_lens, which was not given"
        self.refused(write_rows, ((message, {**WITHOUT_TABLES, **embeds}),))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
