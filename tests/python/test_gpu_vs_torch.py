#!/usr/bin/env python3
"""Checks what bench/gpu_vs_torch.py does with times; needs neither PyTorch nor a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.abspath(sys.argv[1])
SCRIPT = os.path.join(SOURCE, "bench", "gpu_vs_torch.py")
spec = importlib.util.spec_from_file_location("gpu_vs_torch", SCRIPT)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


class Times(unittest.TestCase):
    def test_sides_take_turns_and_medians_count(self):
        calls = []

        def side(name, times):
            values = iter(times)

            def run():
                calls.append(name)
                return {"fwd": next(values)}

            return run

        times, errors = bench.in_turns({"gyre": side("a", [1, 9, 2]), "torch": side("b", [4, 6, 5])}, 3)
        self.assertEqual(calls, ["a", "b"] * 3)
        self.assertEqual(times, {"gyre": {"fwd": 2}, "torch": {"fwd": 5}})
        self.assertEqual(errors, {})
        self.assertEqual(bench.ratios(times, "gyre"), {"torch": {"fwd": 2.5}})

    def test_a_side_that_fails_is_left_out_with_its_reason(self):
        def fails():
            raise RuntimeError("no kernel\nmore")

        times, errors = bench.in_turns({"gyre": lambda: {"bwd": 3}, "torch": fails}, 2)
        self.assertEqual(times, {"gyre": {"bwd": 3}})
        self.assertEqual(errors, {"torch": "no kernel"})

    def test_times_come_from_a_result(self):
        result = {"results": [{"key": {"pass": "fwd"}, "statistics_ms": {"median": 1.5}},
                              {"key": {"pass": "bwd"}, "statistics_ms": {"median": 2.5}}]}
        self.assertEqual(bench.times_of(result), {"fwd": 1.5, "bwd": 2.5})

    def test_a_malformed_result_is_refused_by_file_and_place(self):
        entry = {"key": {"pass": "fwd"}, "statistics_ms": {"median": 1.5}}
        for text, want in (
            ("{", "wanted: JSON, gyre-result/1"),
            ("{}", "the file has no 'schema'"),
            ([], "results is []; wanted: a list of at least one"),
            ([entry, 3], "results[1] is 3; wanted: an object"),
            ([{**entry, "key": None}], "results[0].key is null; wanted: an object"),
            ([{**entry, "key": {"pass": 1}}], "results[0].key.pass is 1; wanted: a text of one line"),
            ([{**entry, "statistics_ms": {}}], "results[0].statistics_ms has no 'median'"),
            ([{**entry, "statistics_ms": {"median": None}}], "median is null; wanted: a number above 0"),
            ([{**entry, "statistics_ms": {"median": 0}}], "median is 0; wanted: a number above 0"),
        ):
            if not isinstance(text, str):
                text = json.dumps({"schema": "gyre-result/1", "results": text})
            # A program: it writes the text into the file after --json.
            write = ["/bin/sh", "-c", 'printf "%s" "$0" >"$6"', text]
            with self.assertRaises(bench.gyre_result.Malformed) as caught:
                bench.our_times(write)
            self.assertTrue(str(caught.exception).startswith("the result of sh: "), caught.exception)
            self.assertIn(want, str(caught.exception))

    def test_a_program_that_fails_says_why(self):
        with self.assertRaisesRegex(RuntimeError, "exit code 2: .*unused"):
            bench.our_times(["/bin/sh", "-c", "echo unused >&2; exit 2"])

    def test_records_are_named_after_the_device(self):
        with tempfile.TemporaryDirectory() as folder:
            path = bench.record(folder, "NVIDIA H100 80GB (x)", {})
            self.assertRegex(os.path.basename(path), r"^NVIDIA-H100-80GB-x-\d{8}T\d{6}Z-torch\.json$")

    def test_without_pytorch_or_gpu_it_is_skipped(self):
        done = subprocess.run(
            [sys.executable, SCRIPT], capture_output=True, text=True, check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        self.assertEqual(done.returncode, 77, done.stderr)
        self.assertIn("skipped:", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
