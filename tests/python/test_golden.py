#!/usr/bin/env python3
"""Checks inputs/golden/: files, index, coverage; answers against other formulations.

Gradients are differentiated by a complex step: for an analytic f, Im f(x + i h) / h is f'(x) to the
last bit, since nothing is subtracted. Run it directly or through unittest; needs python3-numpy and
python3-h5py.
"""

import filecmp
import json
import os
import re
import sys
import tempfile
import time
import unittest

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
import golden_batches  # noqa: E402
import golden_packing  # noqa: E402
import gyre_files  # noqa: E402

STEP = 1e-30
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
MAX_BYTES = 20 << 20

with open(os.path.join(GOLDEN, "index.json"), encoding="utf-8") as index_file:
    INDEX = {entry["file"]: entry for entry in json.load(index_file)["cases"]}
LOGPROBS = [name.removesuffix(".h5") for name in INDEX if INDEX[name]["kind"] == "logprobs"]


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
        self.assertLessEqual(names, {key.rpartition("/")[2] for key in example.FUNCTIONS})
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
        for layout in layouts - {"balanced-joint"}:  # of a search, not of a formula
            for cp in (1, 2, 3, 4, 8):
                self.assertIn((f"cp{cp}", layout), covered)


def complex_values(problem, z):
    """[T] complex sums of values by name, of logits [T, V] that may be complex: in plain formulas,
    whatever a derivative does not go through taken from the real parts. An id that is nobody's or
    that does not survive counts like a logit of 0 elsewhere."""
    heat, vocab = problem["temperature"], int(problem["vocab_size"])
    tokens = range(len(z))

    def total(x, kept=True):
        return np.log(np.where(kept, np.exp(x), 0).sum(axis=1))

    def summed(x, ids, kept, norm):
        found = np.zeros(len(z), complex)
        for t in tokens:
            for i in np.atleast_1d(ids[t]):
                found[t] += (x[t, i] if 0 <= i < vocab and kept[t, i] else 0) - norm[t]
        return found

    def entropy(x):
        p = np.exp(x - total(x)[:, None])
        return -(p * np.log(p)).sum(axis=1)

    x, everything, targets = z / heat, np.ones(z.shape, bool), problem["targets"]
    kept = np.array([survivors(row.real, problem) for row in z])
    following = [targets[t + 1] if t + 1 not in problem["offsets"] else None for t in tokens]
    last = np.array([i is None for i in following])
    after = np.array([-1 if i is None else i for i in following])
    found = {
        "logprob": summed(x, targets, everything, total(x)),
        "entropy": entropy(x),
        "filtered_logprob": summed(x, targets, kept, total(x, kept)),
        "next_token_logprob": np.where(last, 0, summed(x, after, everything, total(x))),
        "next_token_filtered_logprob": np.where(last, 0, summed(x, after, kept, total(x, kept))),
    }
    bounds, starts = problem["offsets"], set(problem["offsets"][1:-1].tolist())
    answers = [t for t in sorted(starts) if t < len(z)]  # first tokens of the others
    predicted = [[t + 1] if t + 1 < len(z) and t + 1 not in starts else [] for t in tokens]
    if len(bounds) > 2 and bounds[1] > 0:
        predicted[bounds[1] - 1] = answers
    found["rollout_logprob"] = np.array([  # with the d_value of each token that is predicted
        sum((problem["d_value"][p] * summed(x, np.full(len(z), targets[p]), everything, total(x))[t]
             for p in predicted[t]), 0j) for t in tokens])
    found["logprob_entropy"] = found["logprob"] + found["entropy"]
    if "ids" in problem:
        ids = problem["ids"]
        among = np.log(np.exp(np.take_along_axis(z, ids, 1)).sum(axis=1))
        found |= {
            "gathered": summed(x, ids, everything, total(x)),
            "gathered_logits": np.take_along_axis(z, ids, 1).sum(axis=1),
            "distilled": summed(z, ids, everything, total(z)) + entropy(z),
            "distilled_renormalised": summed(z, ids, everything, among),
        }
    if "d_logprobs" in problem:
        found["log_softmax"] = (problem["d_logprobs"] * (x - total(x)[:, None])).sum(axis=1)
    if "teacher" in problem:
        p = np.exp(problem["teacher"][:, :vocab])
        p /= p.sum(axis=1, keepdims=True)
        found["soft_cross_entropy"] = total(z) - (p * z).sum(axis=1)
    return found


def survivors(row, problem):
    """[V] booleans: a walk down the ranking of one row."""
    ranking = sorted(range(len(row)), key=lambda v: (-row[v], -v))
    if problem["top_k"]:
        ranking = [v for v in ranking if row[v] >= row[ranking[int(problem["top_k"]) - 1]]]
    weights = [float(np.exp((row[v] - row[ranking[0]]) / problem["temperature"])) for v in ranking]
    kept, mass = np.zeros(len(row), bool), 0.0
    for v, weight in zip(ranking, weights):
        kept[v] = problem["top_p"] == 1 or v == ranking[0] or mass < problem["top_p"] * sum(weights)
        mass += weight
    return kept


class Answers(unittest.TestCase):
    """Other formulations, and known numbers."""

    def test_gradients_of_logprobs(self):
        compared = set()
        for name in ("plain", "minimal", "top_k_ties", "top_k_then_top_p", "nobody", "temperature",
                     "short_sequences", "uneven_vocabulary", "repeated_ids", "float64", "one_id",
                     "every_id_narrow"):
            problem, answers = load("logprobs_" + name)
            z = problem["logits"][:, : problem["vocab_size"]]
            for v in range(problem["vocab_size"]):
                changed = z.astype(complex)
                changed[:, v] += 1j * STEP
                for array, value in complex_values(problem, changed).items():
                    weighed = array in ("log_softmax", "rollout_logprob")
                    g = 1 if weighed else problem["d_value"]
                    wanted = g * value.imag / STEP
                    np.testing.assert_allclose(answers["d_" + array][:, v], wanted, **CLOSE,
                                               err_msg=f"{name} d_{array} column {v}")
                    compared.add("d_" + array)
        rest = {"d_hidden", "d_head"}  # the next test's
        self.assertEqual(compared | rest, {a.rpartition("/")[2] for e in INDEX.values()
                                           if e["kind"] == "logprobs" for a in e["answers"]
                                           if "/d_" in a})

    def test_values_of_logprobs(self):
        """Of ids that there are: what nobody has is 0, or -inf when filtered."""
        for name in ("plain", "nobody", "temperature", "bfloat16", "integers", "padding_nan"):
            problem, answers = load("logprobs_" + name)
            vocab = int(problem["vocab_size"])
            problem["teacher"] = problem["teacher"][:, :vocab]
            values = complex_values(problem, problem["logits"][:, :vocab].astype(complex))
            targets = problem["targets"]
            there = (targets >= 0) & (targets < vocab)
            self.assertTrue((answers["logprob"][~there] == 0).all())
            self.assertTrue(np.isneginf(answers["filtered_logprob"][~there]).all())
            there &= np.isfinite(answers["filtered_logprob"])
            for key in ("logprob", "filtered_logprob"):
                np.testing.assert_allclose(answers[key][there], values[key].real[there], **CLOSE)
            for array in ("gathered", "gathered_logits", "entropy", "soft_cross_entropy"):
                found = answers[array].reshape(len(targets), -1).sum(axis=1)
                np.testing.assert_allclose(found, values[array].real, **CLOSE)

    def test_next_tokens(self):
        """One after another; what nobody has is 0, or -inf when filtered."""
        values, ways = ("next_token_logprob", "next_token_filtered_logprob"), set()
        arrays = (*values, *("d_" + array for array in values))
        for name in sorted(set(LOGPROBS) - {"logprobs_float16"}):  # which has fewer answers
            problem, answers = load(name)
            bounds, vocab = problem["offsets"].tolist(), int(problem["vocab_size"])
            wanted = {array: np.zeros(answers[array].shape) for array in arrays}
            for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
                for t in range(begin, end - 1):
                    row, token = problem["logits"][t, :vocab], problem["targets"][t + 1]
                    for array, filtered in zip(values, (False, True)):
                        kept = survivors(row, problem) if filtered else np.ones(vocab, bool)
                        x = np.where(kept, row - row.max(), -np.inf) / problem["temperature"]
                        there, p = 0 <= token < vocab, np.exp(x) / np.exp(x).sum()
                        value = x[token] - np.log(np.exp(x).sum()) if there else -np.inf
                        wanted[array][i, t - begin] = value if filtered or there else 0
                        counted = there and (not filtered or value > -np.inf)
                        d_x = problem["d_value"][t] * ((np.arange(vocab) == token) * counted - p)
                        wanted["d_" + array][t] = d_x / problem["temperature"]
                        ways.add((filtered, there, value > -np.inf))
            for array in arrays:
                np.testing.assert_allclose(answers[array], wanted[array], **CLOSE,
                                           err_msg=f"{name} {array}")
        self.assertEqual(len(ways), 6)  # all but an id of nobody's with a finite value

    def test_largest_logits(self):
        """The first of the largest ones, where these are there."""
        tied = 0
        for name in LOGPROBS:
            problem, answers = load(name)
            for t, row in enumerate(problem["logits"][:, : problem["vocab_size"]].tolist()):
                best = max(range(len(row)), key=lambda v, row=row: (row[v], -v))
                self.assertEqual((answers["argmax_value"][t], answers["argmax_id"][t]),
                                 (row[best], best), f"{name} token {t}")
                tied += row.count(row[best]) > 1
            if "top_ids" in answers:
                for first, all_ in (("argmax_value", "top_values"), ("argmax_id", "top_ids")):
                    np.testing.assert_array_equal(answers[first], answers[all_][:, 0])
        self.assertGreater(tied, 5)

    def test_fused_linear(self):
        for name in ("fused_linear", "fused_linear_narrow"):
            problem, answers = load("logprobs_" + name)
            for array, element in (("hidden", (0, 0)), ("hidden", (2, -1)), ("head", (3, 0)),
                                   ("head", (-1, -1))):
                parts = {k: problem[k].astype(complex) for k in ("hidden", "head")}
                parts[array][element] += 1j * STEP
                value = complex_values(problem, parts["hidden"] @ parts["head"].T)
                slope = (problem["d_value"] * value["logprob_entropy"].imag).sum() / STEP
                np.testing.assert_allclose(answers[f"d_{array}"][element], slope, **CLOSE)

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

    def test_attention(self):
        rng = np.random.default_rng(3)
        for name in ("causal", "full", "groups_8", "window_1", "window_sinks", "sinks_full",
                     "sinks_extreme", "uneven", "scale", "identical_keys"):
            problem, answers = load("attention_" + name)
            out, lse = self.attend(problem)
            np.testing.assert_allclose(answers["out"], out, **CLOSE)
            np.testing.assert_allclose(answers["lse"], lse, **CLOSE)
            for array in ("q", "k", "v", "sinks"):
                for flat in rng.choice(problem[array].size, 3) if array in problem else ():
                    place = np.unravel_index(flat, problem[array].shape)
                    changed = {**problem, array: problem[array].astype(complex)}
                    changed[array][place] += 1j * STEP
                    slope = (self.attend(changed)[0] * problem["d_out"]).sum().imag / STEP
                    np.testing.assert_allclose(answers["d_" + array][place], slope, **CLOSE,
                                               err_msg=f"{name} d_{array}{place}")

    @staticmethod
    def attend(problem):
        """Over all tokens at once, masked; no maximum is subtracted."""
        tokens, heads, _ = problem["q"].shape
        document = np.searchsorted(problem["offsets"], np.arange(tokens), side="right")
        distance = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        seen = np.equal.outer(document, document)
        if problem["mask"] == "causal":
            seen &= (distance >= 0) & (distance < (problem["window"] or tokens))
        repeat = heads // problem["k"].shape[1]
        k, v = (np.repeat(problem[name], repeat, axis=1) for name in ("k", "v"))
        weights = np.exp(problem["scale"] * np.einsum("ihd,jhd->hij", problem["q"], k)) * seen
        total = weights.sum(axis=2).T
        if "sinks" in problem:
            total = total + np.exp(problem["sinks"])
        return np.einsum("hij,jhd->ihd", weights, v) / total[:, :, None], np.log(total)

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
