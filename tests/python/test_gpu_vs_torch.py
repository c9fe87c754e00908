#!/usr/bin/env python3
"""Checks what bench/gpu_vs_torch.py does with times; needs neither PyTorch nor a GPU."""

import importlib.util
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
        result = {
            "results": [
                {"key": {"pass": "fwd"}, "statistics_ms": {"median": 1.5}},
                {"key": {"pass": "bwd"}, "statistics_ms": {"median": 2.5}},
            ]
        }
        self.assertEqual(bench.times_of(result), {"fwd": 1.5, "bwd": 2.5})

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
