#!/usr/bin/env python3
"""Checks inputs/golden/check.py: it finds every fault of the kinds that the suite is there for, in
the files that are there for them, and none in example.py; its messages and exit codes.

Run it directly or through unittest; needs python3-numpy and python3-h5py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
GOLDEN = os.path.join(SOURCE, "inputs", "golden")
sys.dont_write_bytecode = True
sys.path.insert(0, GOLDEN)

import check  # noqa: E402  (found through the line above)
import example  # noqa: E402

with open(os.path.join(GOLDEN, "index.json"), encoding="utf-8") as index_file:
    CASES = json.load(index_file)["cases"]
INDEX = {entry["file"]: entry["kind"] for entry in CASES}


class Faulty:
    """Functions with a fault each: (key, function, a file that must show it)."""

    @staticmethod
    def no_maximum(problem):
        row = example.Row(problem)
        with np.errstate(all="ignore"):
            return row.x - np.log(np.exp(row.x).sum(axis=1, keepdims=True))

    @staticmethod
    def sum_first(problem):
        row = example.Row(problem)
        top = row.x.max(axis=1, keepdims=True)
        return row.x - (top + np.log(np.exp(row.x - top).sum(axis=1, keepdims=True)))

    @staticmethod
    def all_columns(problem):
        columns = problem["logits"].shape[1]
        with np.errstate(all="ignore"):
            return example.Row(problem | {"vocab_size": columns}).entropy()

    @staticmethod
    def nothing_at_minus_infinity(problem):
        row = example.Row(problem)
        return np.where(np.isneginf(row.z), 0, example.of_every_id(row))

    @staticmethod
    def zero_times_log(problem):
        row = example.Row(problem)
        with np.errstate(invalid="ignore"):
            return -(np.exp(row.logp) * row.logp).sum(axis=1)

    @staticmethod
    def exactly_k(problem):
        row = example.Row(problem)
        order = np.argsort(-row.z, axis=1, kind="stable")
        left = row.z.copy()
        for mine, ids, kept in zip(left, order, row.numbers("top_k")[:, 0].astype(int)):
            mine[ids[kept or row.vocab :]] = -np.inf
        return example.filtered(problem | {"logits": left, "top_k": 0}, False)

    @staticmethod
    def multiplied_mask(problem):
        """Two shards: an id of the other one is clamped, and what is read times 0."""
        row, ids, total = example.Row(problem), problem["ids"], 0
        for columns in np.array_split(np.arange(row.vocab), 2):
            if columns.size:
                clamped = np.clip(ids, columns[0], columns[-1])
                with np.errstate(invalid="ignore"):
                    total = total + np.take_along_axis(row.logp, clamped, 1) * (clamped == ids)
        return total

    @staticmethod
    def no_temperature(problem):
        return example.FUNCTIONS["logprobs/d_logprob"](problem) * example.Row(problem).numbers("temperature")

    @staticmethod
    def temperature_of_the_first(problem):
        first = example.Row(problem).numbers("temperature")[:1, 0]
        return example.FUNCTIONS["logprobs/logprob"](problem | {"temperature": first})

    @staticmethod
    def no_min_p(problem):
        return example.filtered(problem | {"min_p": 0.0}, False)

    @staticmethod
    def nobody_is_ignored(problem):
        row = example.Row(problem)
        there = (row.targets() >= 0) & (row.targets() < row.vocab)
        return np.where(there, row.gradient(row.targets()), 0)

    @staticmethod
    def overwriting_scatter(problem):
        row = example.Row(problem)
        hot = np.minimum(row.one_hot(problem["ids"]), 1)
        return row.g * (hot - problem["ids"].shape[1] * np.exp(row.logp)) / row.heat

    @staticmethod
    def other_sequence(problem):
        return example.next_tokens(problem | {"offsets": problem["offsets"][[0, -1]]}, True)

    @staticmethod
    def shifted_stream(problem):
        """Each token predicted by the one before it in the stream: an answer by another one."""
        return example.rollouts(problem | {"offsets": problem["offsets"][[0, -1]]}, False)

    @staticmethod
    def filter_of_the_next_row(problem):
        """The survivors of the row of the token that is asked for."""
        row, ends = example.Row(problem), problem["offsets"][1:] - 1
        mask = np.roll(example.kept(row), -1, axis=0)
        mask[ends[ends >= 0]] = True
        left = np.where(mask, row.z, -np.inf)
        with np.errstate(invalid="ignore"):
            return example.next_tokens(problem | {"logits": left, "top_k": 0, "top_p": 1.0}, False,
                                       True)

    @staticmethod
    def no_filter(problem):
        return example.next_tokens(problem | {"top_k": 0, "top_p": 1.0}, True, True)

    @staticmethod
    def last_tokens_predict(problem):
        """Targets that are shifted over the ends of sequences."""
        ids = np.append(problem["targets"][1:], -1)[: len(problem["targets"])]
        return example.filtered(problem | {"targets": ids}, True)

    @staticmethod
    def last_of_ties(problem):
        row = example.Row(problem)
        return row.vocab - 1 - row.z[:, ::-1].argmax(axis=1)

    @staticmethod
    def largest_of_all_columns(problem):
        return problem["logits"].max(axis=1)

    @staticmethod
    def wide_window(problem):
        return example.attention(problem | {"window": problem["window"] and problem["window"] + 1},
                                 "out")

    @staticmethod
    def shared_of_some_heads(problem):
        """The gradient of shared elements of keys, of as many query heads as there are KV heads."""
        heads = np.arange(problem["q"].shape[1])
        d_out = problem["d_out"] * (heads < problem["k"].shape[1])[:, None].astype("f4")
        return example.attention(problem | {"d_out": d_out}, "d_k_shared")

    @staticmethod
    def without_sinks(problem):
        return example.attention({k: v for k, v in problem.items() if k != "sinks"}, "lse")

    @staticmethod
    def scores_as_they_are(problem):
        """One document, one query head, exp before the maximum is subtracted; else right."""
        out = example.attention(problem, "out")
        if "k_shared" in problem:
            return out
        plain = not problem["window"] and "sinks" not in problem and len(out)
        if problem["mask"] == "causal" and plain:
            end = problem["offsets"][1]
            q, k, v = problem["q"][:end, 0], problem["k"][:end, 0], problem["v"][:end, 0]
            with np.errstate(all="ignore"):
                weights = np.tril(np.exp(np.float32(problem["scale"]) * (q @ k.T)))
                out[:end, 0] = weights @ v / weights.sum(axis=1, keepdims=True)
        return out

    @staticmethod
    def divided_lengths(problem):
        lengths = np.diff(problem["cu_seqlens"]) // problem["cp"]
        return example.running(lengths)

    @staticmethod
    def local_positions(problem):
        return np.arange(example.local_slots(problem).size)

    @staticmethod
    def one_axis_for_all(problem):
        found = example.shard(problem, "positions")
        return np.repeat(found[:1], len(found), axis=0) if found.ndim > 1 else found

    @staticmethod
    def cut_along_axes(problem):
        positions = np.asarray(example.rows(problem, "positions"))
        return positions.reshape(-1, *positions.shape[:-1]).T

    @staticmethod
    def shifted_late(problem):
        ids = example.shard(problem, "ids")
        return np.append(ids[1:], -100)

    @staticmethod
    def padding_by_id(problem):
        return (problem["input_ids"].reshape(-1) == 100).astype(int)

    @staticmethod
    def aligned_by_rank(problem):
        array = problem["extra"]
        return array.reshape(-1, *array.shape[2:]) if array.ndim > 1 else array

    @staticmethod
    def last_for_padding(problem):
        if problem["aligned"] != "slots":
            return problem["extra"]
        return problem["extra"].take(example.local_slots(problem), axis=0, mode="clip")

    @staticmethod
    def zeros_for_padding(problem):
        return example.shard(problem | {"padding": 0}, "extra")

    ALL = {"no_maximum": ("logprobs/log_softmax", "logprobs_large logprobs_cold"),
           "sum_first": ("logprobs/log_softmax", "logprobs_offset"),
           "all_columns": ("logprobs/entropy", "logprobs_padding_huge logprobs_padding_nan"),
           "zero_times_log": ("logprobs/entropy", "logprobs_minus_infinity logprobs_certain"),
           "exactly_k": ("logprobs/filtered_logprob", "logprobs_top_k_ties"),
           "multiplied_mask": ("logprobs/gathered", "logprobs_minus_infinity"),
           "nothing_at_minus_infinity": ("logprobs/d_log_softmax", "logprobs_every_id"),
           "no_temperature": ("logprobs/d_logprob", "logprobs_temperature"),
           "temperature_of_the_first": ("logprobs/logprob",
                                        "logprobs_temperature_of_tokens logprobs_filter_of_tokens"),
           "no_min_p": ("logprobs/filtered_logprob", "logprobs_min_p logprobs_filter_of_tokens"),
           "zeros_for_padding": ("shards/extra", "packed_labels_ahead_cp2"),
           "nobody_is_ignored": ("logprobs/d_logprob", "logprobs_nobody"),
           "overwriting_scatter": ("logprobs/d_gathered", "logprobs_repeated_ids"),
           "other_sequence": ("logprobs/d_next_token_logprob", "logprobs_short_sequences"),
           "shifted_stream": ("logprobs/rollout_logprob",
                              "logprobs_no_next_token logprobs_next_token_filtered"),
           "filter_of_the_next_row": ("logprobs/next_token_filtered_logprob",
                                      "logprobs_next_token_filtered"),
           "no_filter": ("logprobs/d_next_token_filtered_logprob",
                         "logprobs_next_token_filtered logprobs_top_k_then_top_p"),
           "last_tokens_predict": ("logprobs/d_next_token_filtered_logprob",
                                   "logprobs_next_token_filtered logprobs_short_sequences"),
           "last_of_ties": ("logprobs/argmax_id", "logprobs_top_k_ties logprobs_top_p_ties"),
           "largest_of_all_columns": ("logprobs/argmax_value",
                                      "logprobs_padding_huge logprobs_padding_nan"),
           "wide_window": ("attention/out", "attention_window_1 attention_window_sinks"),
           "shared_of_some_heads": ("attention/d_k_shared", "attention_keys_shared_groups"),
           "without_sinks": ("attention/lse", "attention_sinks attention_sinks_full"),
           "scores_as_they_are": ("attention/out", "attention_large_scores"),
           "divided_lengths": ("shards/cu_seqlens", "packed_odd_cp2 packed_long_cp4"),
           "local_positions": ("shards/positions", "packed_odd_cp4"),
           "one_axis_for_all": ("shards/positions", "packed_positions_cp2"),
           "cut_along_axes": ("bshd/positions", "rows_positions"),
           "shifted_late": ("shards/labels", "packed_odd_cp8"),
           "padding_by_id": ("bshd/padding_mask", "rows_padding"),
           "aligned_by_rank": ("bshd/extra", "rows_extras"),
           "last_for_padding": ("shards/extra", "packed_extras_cp2")}


class Check(unittest.TestCase):
    """check.py."""

    def run_check(self, module, *options, folder=GOLDEN):
        command = [sys.executable, "-B", os.path.join(folder, "check.py"), module, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_example_has_it_all_right(self):
        code, said = self.run_check(os.path.join(GOLDEN, "example.py"))
        # Arrays of single operations are left to who has them.
        single = sum(len(e["answers"]) for e in CASES if "operation" in e["tags"])
        self.assertRegex(said, rf"\A\d{{4}} right, 0 wrong, {single} left out\n\Z")
        self.assertEqual(code, 0)
        code, said = self.run_check(os.path.join(GOLDEN, "example.py"), "--ties", "any", "--case",
                                    "logprobs_top*", "--without", "top-p")
        self.assertRegex(said, r"\A\d\d+ right, 0 wrong, 0 left out\n\Z")

    def test_faults_are_found(self):
        everything = {}
        for name, kind in INDEX.items():
            with h5py.File(os.path.join(GOLDEN, name), "r") as file:
                everything[name] = list(check.problems(file, kind))
        for fault, (key, files) in Faulty.ALL.items():
            kind, array = key.split("/")
            found, held = set(), set()
            for name, asked in everything.items():
                for mine, _, problem, answers in asked:
                    if mine == kind and array in answers:
                        held.add(name.removesuffix(".h5"))
                        value = getattr(Faulty, fault)(dict(problem))
                        gradient = array.startswith("d_")
                        if check.difference(value, answers[array], gradient, 1e-5, 1e-5):
                            found.add(name.removesuffix(".h5"))
            self.assertLessEqual(set(files.split()), found, fault)
            if kind in ("logprobs", "attention"):
                self.assertLess(found, held, f"{fault}: no file is needed to find it")

    def test_what_differs_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            module = os.path.join(folder, "mine.py")

            def check_text(text, *options):
                with open(module, "w", encoding="utf-8") as file:
                    file.write(text)
                return self.run_check(module, *options)

            begin = f"import sys; sys.path.insert(0, {GOLDEN!r})\nimport example\n"
            wrong = begin + ("def f(p):\n    x = example.FUNCTIONS['logprobs/entropy'](p)\n"
                             "    x[2] += 0.5\n    return x\n"
                             "FUNCTIONS = {'logprobs/entropy': f}\n")
            code, said = check_text(wrong, "--case", "logprobs_plain")
            self.assertEqual(code, 1)
            self.assertRegex(said, r"\Alogprobs_plain.h5 guards against a wrong formula\n"
                                   r"  logprobs/entropy \[2\] \(document 0, position 2\): yours is "
                                   r"\S+, should be \S+; 1 of 7 are wrong\n0 right, 1 wrong, 34 left")
            self.assertEqual(check_text(wrong, "--atol", "1", "--case", "logprobs_plain")[0], 0)
            many = begin + "FUNCTIONS = {'logprobs/logprob': lambda p: example.FUNCTIONS['logprobs/logprob'](p) + 1}\n"
            code, said = check_text(many)
            self.assertEqual(len(re.findall("should be", said)), 10)
            wrong = int(re.search(r"(\d+) wrong", said)[1])
            self.assertIn(f"... and {wrong - 10} arrays more; --all shows them\n", said)
            self.assertEqual(len(re.findall("should be", check_text(many, "--all")[1])), wrong)
            self.assertLessEqual(max(map(len, said.splitlines())), 120)
            shape = begin + "FUNCTIONS = {'logprobs/entropy': lambda p: 0 * p['logits']}\n"
            code, said = check_text(shape, "--case", "logprobs_plain")
            self.assertIn("has the shape [7, 48], should have [7]", said)
            raising = "FUNCTIONS = {'attention/out': lambda p: 1 / 0}\n"
            code, said = check_text(raising, "--case", "attention_causal")
            self.assertEqual((code, "raised ZeroDivisionError" in said), (1, True))
            for text in ("FUNCTIONS = {}\n", "", "1 / 0\n", "(\n"):
                self.assertEqual(check_text(text)[0], 2, text)
            self.assertEqual(self.run_check(os.path.join(folder, "none.py"))[0], 2)
            self.assertEqual(check_text(raising, "--case", "none")[0], 2)

    def test_damaged_files_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("check.py", "example.py", "index.json"):
                shutil.copy(os.path.join(GOLDEN, name), folder)
            with open(os.path.join(GOLDEN, "audio.h5"), "rb") as old:
                data = bytearray(old.read())
            data[len(data) // 2] ^= 1
            with open(os.path.join(folder, "audio.h5"), "wb") as new:
                new.write(data)
            example_py = os.path.join(folder, "example.py")
            code, said = self.run_check(example_py, "--case", "audio", folder=folder)
            self.assertEqual((code, "is not the file of index.json" in said), (2, True))
            self.assertEqual(self.run_check(example_py, folder=folder)[0], 2)

    def test_any_of_equal_logits(self):
        problem = {"vocab_size": 4, "logits": np.array([[1.0, 1, 1, 0]])}
        for found, agrees in (([1, 2], True), ([2, 0], True), ([1, 1], False), ([0, 3], False)):
            same = check.any_of_ties(np.array([found]), np.array([[0, 1]]), problem)
            self.assertEqual(same.tolist() == [[0, 1]], agrees, found)
        for found, agrees in ((0, True), (2, True), (3, False), (4, False), (-1, False)):
            same = check.any_of_ties(np.array([found]), np.array([0]), problem)
            self.assertEqual(same.tolist() == [0], agrees, found)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])  # CTest passes folders
