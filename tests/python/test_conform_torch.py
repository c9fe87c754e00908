#!/usr/bin/env python3
"""Checks gyre conform with torch (gloo): the examples, PyTorch's own operations, torchrun, errors on one rank.

Usage: test_conform_torch.py SOURCE_DIR BUILD_DIR; needs torch, h5py and NumPy; without them it is skipped.
"""

import os
import subprocess
import sys
import unittest

try:
    import torch
    import torch.distributed  # noqa: F401
    from torch.distributed.tensor import DTensor  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SOURCE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.getcwd()
GOLDEN = os.path.join(SOURCE, "inputs", "golden")
PATHS = [os.path.join(SOURCE, *parts) for parts in (("python",), ("python", "examples"), ("tests", "support"), ("docs", "conform"))]
sys.dont_write_bytecode = True
sys.path[:0] = PATHS
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

from gyre.distributed import Unable, conform  # noqa: E402


def run(function, **options):
    return conform(options.pop("suite", GOLDEN), function, **options)


def torchrun(ranks, *arguments):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "gyre",
            "conform",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


class Peers(unittest.TestCase):
    def test_example_attentions(self):
        for name in ("ring_attention", "ulysses_attention"):
            for options in (
                {"ranks": 2, "suite": [GOLDEN, os.path.join(SOURCE, "inputs", "attention_regions.h5")]},
                {"ranks": 4, "layout": "zigzag"},
                {"cp": 2, "tp": 2, "case": "attention_s*"},
                {"ranks": 2, "dtype": "bfloat16"},
            ):
                with self.subTest(name, **options):
                    report = run(f"{name}:attention", **options)
                    self.assertTrue(report.passed, str(report))

    def test_torch_itself(self):
        for name, contract, options in (
            ("dtensor_log_softmax", "logprob", {"tp": 2}),
            ("dtensor_cross_entropy", "logprob", {"tp": 4}),
            ("dtensor_cross_entropy", "logprob", {"tp": 2, "dtype": "bfloat16"}),
            ("loss_parallel_logprob", "logprob", {"tp": 2}),
            ("loss_parallel_mean", "loss", {"tp": 2}),
            ("dtensor_shard", "shard", {"layout": "contiguous"}),
            ("dtensor_unshard", "unshard", {"layout": "contiguous", "ranks": 4}),
            ("context_parallel_shard", "shard", {"layout": "zigzag"}),
            ("context_parallel_whole", "unshard", {"layout": "zigzag", "ranks": 4}),
        ):
            with self.subTest(name, **options):
                report = run(f"torch_peers:{name}", contract=contract, **options)
                self.assertGreater(
                    sum(v.status == "passed" for v in report.verdicts), len(report.compared) - 2, str(report)
                )
                # ranks without a column, slots that the ranks do not divide
                self.assertLessEqual(set(report.kinds), {"raised", "other-shape"}, str(report))

    def test_conventions_of_a_sum(self):
        for name, right, wrong, kind in (
            ("autograd_all_reduce", "sum", "identity", "convention"),
            ("constant_all_reduce", "none", "identity", "no-gradient"),
            ("autograd_all_reduce", "sum", "none", "gradient"),
        ):
            with self.subTest(name, wrong=wrong):
                options = {"contract": "sum_over_group", "tp": 2, "case": "logprobs_plain"}
                report = run(f"torch_peers:{name}", convention=right, **options)
                self.assertTrue(report.passed, str(report))
                report = run(f"torch_peers:{name}", convention=wrong, **options)
                self.assertEqual(list(report.kinds), [kind], str(report))

    def test_conventions_of_a_divergence(self):
        options = {"contract": "kl", "tp": 2, "case": "logprobs_plain"}
        self.assertTrue((report := run("torch_peers:autograd_kl", convention="sum", **options)).passed, str(report))
        report = run("torch_peers:autograd_kl", **options)
        self.assertEqual(list(report.kinds), ["convention"], str(report))
        self.assertIn("the convention is sum, not identity", str(report))

    def test_fsdp2_and_context_parallel_and_tensor_parallel(self):
        report = run("fsdp2:gradients", suite=[], contract="gradients", ranks=2, case="[pb]*")
        self.assertTrue(report.passed, str(report))
        self.assertEqual([v.status for v in report.verdicts], ["passed"] * 6, str(report))

    def test_mixed_precision_of_fsdp2_is_no_error(self):
        report = run("fsdp2:gradients_in_bfloat16", suite=[], contract="gradients", dp=2, cp=2, tp=1, dtype="bfloat16", case="[bw]*")
        self.assertTrue(report.passed, str(report))

    def test_apply_of_an_autograd_function(self):
        report = run("planted_torch:sum_over_group", case="logprobs_plain")
        self.assertTrue(report.passed, str(report))
        self.assertEqual(list(map(str, report.grids)), ["cp 2 x tp 1", "cp 1 x tp 2"])

    def test_an_empty_shard_needs_no_gradient(self):
        report = run("planted_torch:no_gradient_of_no_token", contract="attention", case="attention_no_[t]*")
        self.assertEqual([v.status for v in report.verdicts], ["passed"], str(report))

    def test_without_gpus(self):
        if torch.cuda.is_available():
            self.skipTest("there is a GPU")
        report = run(
            "torch_peers:context_parallel_attention", contract="attention", layout="zigzag", case="attention_causal"
        )
        self.assertIn("the function needs a GPU: --backend nccl", str(report))
        self.assertFalse(report.passed)
        with self.assertRaisesRegex(Unable, "needs 2 GPUs, one a rank; torch finds 0"):
            run("ring_attention:attention", backend="nccl")


class Planted(unittest.TestCase):
    ERRORS = (
        ("dead_rank", "dead-rank", "rank 1 died: exit code 5"),
        ("hang", "hang", "rank"),
        ("raises", "raised", "rank 1: ValueError: no such head"),
        ("detached_keys", "zero-gradient", "d_k is 0 everywhere"),
        ("all_reduced", "factor-cp", "a factor 2 = cp"),
    )

    def test_each_is_found_and_named(self):
        for name, kind, words in self.ERRORS:
            with self.subTest(name):
                report = run(f"planted_torch:{name}", contract="attention", case="attention_causal", timeout=5 if name == "hang" else 60)
                self.assertEqual(next(iter(report.kinds)), kind, str(report))
                self.assertIn(words, str(report))

    def test_a_group_of_the_wrong_size(self):
        report = run("planted_torch:wrong_group", contract="attention", case="attention_causal", timeout=20)
        self.assertFalse(report.passed, str(report))
        self.assertIn("rank", str(report))


class Torchrun(unittest.TestCase):
    ARGUMENTS = (GOLDEN, "--case", "attention_[cg]*", "--contract", "attention", "--function")

    def test_passes(self):
        code, text = torchrun(2, *self.ARGUMENTS, "ring_attention:attention")
        self.assertEqual(code, 0, text)
        self.assertIn("CONFORM PASSED 5/5 cases", text)

    def test_all_grids(self):
        code, text = torchrun(2, GOLDEN, "--case", "logprobs_plain", "--function", "planted_torch:sum_over_group")
        self.assertEqual(code, 0, text)
        self.assertIn("CONFORM PASSED 2/2 cases, 168 values, 0 left out; cp 2 x tp 1, cp 1 x tp 2", text)

    def test_wrong_sizes(self):
        code, text = torchrun(2, *self.ARGUMENTS, "ring_attention:attention", "--ranks", "4")
        self.assertEqual(code, 1, text)  # that of torchrun
        self.assertIn("--ranks is 4, but 2 ranks were started: a group of the wrong size", text)

    def test_errors_on_one_rank(self):
        for name, words in (
            ("dead_rank", "rank 1 died"),
            ("hang", "hang"),
            ("raises", "rank 1: ValueError: no such head"),
        ):
            with self.subTest(name):
                code, text = torchrun(2, *self.ARGUMENTS, f"planted_torch:{name}", "--timeout", "8" if name == "hang" else "60")
                self.assertEqual(code, 1, text)
                self.assertIn(words, text)
                self.assertIn("not run after attention_causal", text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
