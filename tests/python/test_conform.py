#!/usr/bin/env python3
"""Checks gyre conform with NumPy's ranks: right functions pass, and planted errors are found and named.

Usage: test_conform.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import ast
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import h5py
import numpy as np

SOURCE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.getcwd()
INPUTS = os.path.join(SOURCE, "inputs")
PATHS = [os.path.join(SOURCE, *parts) for parts in (("python",), ("python", "examples"), ("tests", "support"))]
EXAMPLE = os.path.join(PATHS[1], "ranks_numpy.py")
STEPS = os.path.join(PATHS[1], "step_numpy.py")
sys.dont_write_bytecode = True
sys.path[:0] = PATHS
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}

import gyre  # noqa: E402
import planted_errors  # noqa: E402
import planted_ranks  # noqa: E402
import planted_table  # noqa: E402, I001 (files are read once, by all modules that come after it)
from gyre.distributed import Options, attention_errors, cli, conform, contracts, decoder, gradients, kl, rounding, step, topk_kl  # noqa: E402
from gyre.distributed.conform import one  # noqa: E402
from gyre.distributed.contract import Malformed, Problem, Tolerance, parameters_of, returned  # noqa: E402
from gyre.distributed.launch import Team  # noqa: E402
from gyre.distributed.rank import load  # noqa: E402

GOLDEN = os.path.join(INPUTS, "golden")


def run(function, **options):
    return conform(options.pop("suite", GOLDEN), function, **{"backend": "numpy", **options})


def command(*arguments):
    """Exit code and output of the command, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(arguments)
    return code, said.getvalue()


class Right(unittest.TestCase):
    def test_examples_pass(self):
        # Each case on one grid at least; test_commands_of_the_page has others, test_planted all of a contract in one process.
        runs = {
            "attention": (
                {"ranks": 4, "layout": "zigzag", "case": "attention_[cgsuw]*"},
                {"cp": 3, "tp": 2, "case": "attention_s*"},
                {"ranks": 2, "layout": "contiguous", "dtype": "float64", "case": "attention_[lt]*"},
            ),
            "recurrence": (
                {"ranks": 2, "case": "recurrence_[cgnk]*"},
                {"ranks": 4, "layout": "contiguous", "case": "recurrence_[bdfs]*"},
                {"ranks": 3, "layout": "striped", "dtype": "float64", "case": "recurrence_conv_[ds]*"},
            ),
            "logprob": ({"cp": 2, "tp": 2, "case": "logprobs_[puc]*"},),
            "entropy": ({"tp": 2, "case": "logprobs_[!puc]*"}, {"cp": 2, "tp": 2, "case": "logprobs_[puc]*"}),
            "filtered_logprob": ({"tp": 4, "case": "logprobs_[!ptf]*"}, {"cp": 2, "tp": 2, "case": "logprobs_[ptf]*"}),
            "loss": ({"cp": 2, "tp": 2, "case": "logprobs_[uprst]*"}, {"dp": 2, "cp": 2, "case": "logprobs_[pu]*", "uneven": True}),
            "shard": ({"ranks": 2}, {"ranks": 4}),
            "labels": ({"ranks": 2, "case": "packed_odd_*"},),
            "unshard": ({"ranks": 4},),
            "bshd_shard": ({"ranks": 2}, {"cp": 2, "tp": 2, "case": "rows_p*"}),
            "head_exchange": ({"ranks": 2, "case": "attention_[bgos]*"}, {"ranks": 4, "case": "attention_[gko]*"}),
            "slice": ({"ranks": 2}, {"ranks": 4}),
            "relayout": ({"ranks": 4}, {"cp": 2, "tp": 2, "layout": "zigzag"}),
            "topk_kl": ({"tp": 4, "case": "logprobs_[pu]*"}, {"cp": 2, "tp": 2, "case": "logprobs_[pu]*"}),
            "kl": ({"tp": 4, "case": "logprobs_[pu]*"}, {"cp": 2, "tp": 2, "case": "logprobs_[mp]*"}),
            "sum_over_group": ({"tp": 4, "case": "logprobs_[np]*"}, {"cp": 2, "tp": 2, "case": "logprobs_[np]*"}),
            "pack": ({},),
            "model": ({"ranks": 2, "case": "attention_[abfnuw]*"},),
            "gradients": ({"ranks": 4, "case": "[bort]*"},),
            "mtp_loss": ({"ranks": 2},),
            "router_loss": ({"ranks": 2},),
            "policy_loss": ({"ranks": 2}, {"ranks": 2, "convention": "sequence-mean"}),
            "invariant": ({"ranks": 2, "case": "[bmo]*"},),
            "grad_norm": ({"ranks": 4, "case": "[pks]*"},),
            "optimizer_step": ({"ranks": 2, "case": "[pks]*"},),
        }
        self.assertEqual(set(runs), set(contracts.NAMES))
        for name, some in runs.items():
            for options in some:
                with self.subTest(name, **options):
                    own = hasattr(contracts.named(name), "CASES")
                    report = run(f"{STEPS if own else EXAMPLE}:{name}", suite=() if own else GOLDEN, **options)
                    self.assertTrue(report.passed, str(report))

    def test_parameters_that_only_some_cases_have_are_always_given(self):
        for name, contract in (
            ("model_that_must_get_sinks", "model"),
            ("attention_that_must_get_regions", "attention"),
        ):
            report = run(f"planted_errors:{name}", contract=contract, case="attention_uneven")
            self.assertTrue(report.passed, str(report))

    def test_divergences_average_to_the_whole(self):
        rng, ids = np.random.default_rng(3), np.array([[7, 2, 5]])
        student, teacher = (topk_kl.log_softmax(rng.normal(scale=2, size=(1, 11))) for _ in range(2))
        q, gaps = np.exp(student[0]), (student - teacher)[0]
        found = [
            topk_kl.kl_of({
                "logits": student,
                "ids": ids,
                "targets": np.array([target]),
                "teacher_ids": teacher[:, ids[0]],
                "teacher_targets": teacher[:, target],
                "d_kl": np.ones(1),
                "convention": "unbiased",
            })
            for target in range(11)
        ]
        whole = q @ gaps
        np.testing.assert_allclose(q @ np.concatenate([f["kl"] for f in found]), whole, rtol=1e-12)
        gradient = q @ np.concatenate([f["d_kl"] for f in found])
        np.testing.assert_allclose(gradient, q * (gaps - whole), rtol=1e-9, atol=1e-14)

    def test_divergences_are_those_of_the_files(self):
        found = 0
        for path in sorted(pathlib.Path(GOLDEN).glob("logprobs_*.h5")):
            file = gyre.read(path)
            if "soft_cross_entropy" not in file.reference:
                continue
            for problem in contracts.named("kl").problems(path, Options("", dp=1, cp=1, tp=3, convention="identity", dtype="float64")):
                given, expected = (problem.judge.args[i] for i in (1, 2))
                if given["reverse"]:
                    continue
                vocab, found = given["vocab_size"], found + 1
                wanted = {"kl": file.reference["soft_cross_entropy"] - gyre.reference.entropy(given["teacher"][:, :vocab]),
                          "d_kl": file.reference.get("d_soft_cross_entropy", expected["d_kl"][:, :vocab])}
                for name, array in wanted.items():
                    stored = 1e-11 if file.reference["soft_cross_entropy"].dtype == np.float64 else 4e-6  # some are float32
                    np.testing.assert_allclose(expected[name][..., :vocab] if name == "d_kl" else expected[name], array,
                                               rtol=stored, atol=stored, err_msg=f"{path.stem}: {name}")
                self.assertFalse(expected["d_kl"][:, vocab:].any())
        self.assertGreater(found, 25)

    def test_reversed_divergences_have_the_gradient_of_their_values(self):
        rng, columns = np.random.default_rng(4), [slice(0, 3), slice(3, 7)]
        logits, teacher, along, step = (*rng.normal(scale=2, size=(3, 5, 7)), 1e-6)
        problem = {"logits": logits, "teacher": teacher, "vocab_size": 6, "d_kl": rng.normal(size=(2, 5)), "reverse": True}
        for convention, gradients in (("identity", problem["d_kl"][[0]]), ("sum", problem["d_kl"].sum(axis=0)[None])):
            here = problem | {"convention": convention, "d_kl": problem["d_kl"] if convention == "sum" else gradients.repeat(2, 0)}
            moved = [kl.values_of(here, columns, logits=logits + sign * step * along)["kl"] for sign in (1, -1)]
            wanted = ((moved[0] - moved[1]) / (2 * step) * gradients).sum()
            self.assertAlmostEqual((kl.values_of(here, columns)["d_kl"] * along).sum(), wanted, places=6)
        log_p, log_q = (x[:, :6] - np.log(np.exp(x[:, :6]).sum(axis=1, keepdims=True)) for x in (teacher, logits))
        np.testing.assert_allclose(kl.values_of(here, columns)["kl"], (np.exp(log_q) * (log_q - log_p)).sum(axis=1), rtol=1e-12)

    def test_regions(self):
        report = run(f"{EXAMPLE}:attention", suite=os.path.join(INPUTS, "attention_regions.h5"))
        self.assertTrue(report.passed, str(report))


class Decoder(unittest.TestCase):
    """The gradients that contracts of a step are held against."""

    KINDS = ({}, {"tie_word_embeddings": True}, {"attention_bias": True, "num_key_value_heads": 1},
             {"attention_sinks": True}, {"num_experts": 4})

    def test_finite_differences(self):
        rng, step = np.random.default_rng(5), 1e-6
        for kind in self.KINDS:
            config = decoder.Config(**kind)
            weights = {n: w.astype(float) for n, w in decoder.weights_of(config, 3).items()}
            ids, labels, share = rng.integers(0, 24, (2, 9)), rng.integers(0, 24, 9), rng.random(9)
            ids, document = ids[0], np.repeat([0, 1], [5, 4])
            positions = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3])
            pairs = (document[:, None] == document) & np.tri(9, dtype=bool)

            def run(weights):
                return decoder.Decoder(config, weights, np.arange(9) % 3, 3).run(ids, positions, pairs)

            def loss(weights):
                return -(share * np.log(decoder.softmax(run(weights)[0])[np.arange(9), labels])).sum()

            logits, backward = run(weights)
            gradients = backward(share[:, None] * (decoder.softmax(logits) - np.eye(24)[labels]))
            gradients = {n: g.sum(axis=0) for n, g in gradients.items()}
            if config.tie_word_embeddings:
                gradients[decoder.EMBEDDING] += gradients.pop(decoder.HEAD)
            self.assertEqual(gradients.keys(), weights.keys())
            for name, weight in weights.items():
                along = rng.normal(size=weight.shape)
                moved = [loss({**weights, name: weight + sign * step * along}) for sign in (1, -1)]
                slope, wanted = (moved[0] - moved[1]) / (2 * step), (gradients[name] * along).sum()
                self.assertAlmostEqual(slope, wanted, delta=1e-6 * max(1, np.abs(gradients[name] * along).sum()), msg=name)

    def test_choices_of_routers_are_not_near_ties(self):
        step = gradients.step_of("router", Options("", dp=1, cp=1, tp=1))
        scores = []
        kept = decoder.softmax
        with mock.patch.object(decoder, "softmax", lambda x: scores.append(x) or kept(x)):
            step.parts(np.ones((1, gradients.MICROBATCHES, 1)))
        of_router = [np.sort(x, axis=1) for x in scores if x.ndim == 2 and x.shape[1] == 4]
        self.assertGreater(min((x[:, 2] - x[:, 1]).min() for x in of_router), 1e-3)


    def test_tolerances_in_bfloat16_follow_what_roundings_change(self):
        here = Options("", dp=1, cp=2, tp=1, dtype="bfloat16")
        narrow = Tolerance(gradients.TOLERANCE["bfloat16"], gradients.TOLERANCE["bfloat16"])
        for case in ("plain", "one_kv_head", "empty_rank"):
            right = gradients.step_of(case, here)
            (problem,) = gradients.problems(case, here)
            one = np.full(right.counts().shape, 1 / right.counts().sum())
            errors = np.random.default_rng(99)  # other ones than the harness draws
            weights = {n: w * (1 + 2**-9 * errors.standard_normal(w.shape)) for n, w in right.weights.items()}
            rounded = dataclasses.replace(right, weights=weights, memo={})

            def verdict(factor):
                parts = {n: factor * step.spread(g)[0, 0, 0] for n, g in rounded.folded(rounded.parts(one)).items()}
                found = step.returned_by_name(parts, {n: w.shape for n, w in weights.items()}, ["float64"])
                return problem.judge([found] * 2, narrow)

            self.assertEqual(verdict(1).status, "passed", (case, verdict(1).findings))
            for factor in (0.5, 2):
                self.assertEqual(verdict(factor).status, "failed", (case, factor))
        wider = gradients.widths(right, one, {n: step.spread(g) for n, g in right.folded(right.parts(one)).items()}, narrow)
        self.assertTrue(all(1 <= w <= gradients.WIDEST for w in wider.values()), wider)
        self.assertTrue(min(wider.values()) == 1 < max(wider.values()), wider)


class Attention(unittest.TestCase):
    """What conform itself computes of attention, against loops and differences."""

    PAIRS, SCALE, CAP, SINKS = np.tri(6, dtype=bool), 0.7, 1.25, np.array([0.5, -1.0])

    def setUp(self):
        self.rng = np.random.default_rng(11)
        shapes = {"q": (6, 2, 3), "k": (6, 1, 3), "v": (6, 1, 3), "d_out": (6, 2, 3)}
        self.streams = {name: self.rng.normal(size=shape) for name, shape in shapes.items()}

    def weights(self, q, k, head):
        x = np.array([[self.CAP * np.tanh(self.SCALE * (a @ b) / self.CAP) for b in k[:, 0]] for a in q[:, head]])
        p = np.exp(x) * self.PAIRS
        return p / (p.sum(axis=1, keepdims=True) + np.exp(self.SINKS[head])), x

    def test_softcap(self):
        found = attention_errors.answers(self.streams, self.PAIRS, self.SCALE, self.SINKS, softcap=self.CAP)

        def value(q, k, v):
            return sum((self.weights(q, k, h)[0] @ v[:, 0] * self.streams["d_out"][:, h]).sum() for h in (0, 1))

        given = [self.streams[n] for n in ("q", "k", "v")]
        for i, name in enumerate(("q", "k", "v")):
            along, step = self.rng.normal(size=given[i].shape), 1e-6
            moved = [value(*(x + sign * step * along * (j == i) for j, x in enumerate(given))) for sign in (1, -1)]
            self.assertAlmostEqual((moved[0] - moved[1]) / (2 * step), (found[f"d_{name}"] * along).sum(), delta=1e-8)
        for head in (0, 1):
            p, x = self.weights(*given[:2], head)
            np.testing.assert_allclose(found["out"][:, head], p @ given[2][:, 0], rtol=1e-12)
            lse = np.log((np.exp(x) * self.PAIRS).sum(axis=1) + np.exp(self.SINKS[head]))
            np.testing.assert_allclose(found["lse"][:, head], lse, rtol=1e-12)

    def test_sizes_of_terms(self):
        q, k, v, d_out = (self.streams[n] for n in ("q", "k", "v", "d_out"))
        found = attention_errors.Weights(self.streams, self.PAIRS, self.SCALE, self.SINKS, softcap=self.CAP)
        squares = {n: np.zeros((6, heads)) for n, heads in (("d_q", 2), ("d_k", 1), ("d_v", 1), ("d_sinks", 2))}
        for h in (0, 1):
            p, x = self.weights(q, k, h)
            for i, j in zip(*np.nonzero(self.PAIRS)):
                a = self.SCALE * p[i, j] * (1 - (x[i, j] / self.CAP) ** 2) * np.linalg.norm(d_out[i, h]) * np.linalg.norm(v[j, 0])
                squares["d_q"][i, h] += a**2 * (k[j, 0] ** 2).sum() / 9
                squares["d_k"][j, 0] += a**2 * (q[i, h] ** 2).sum() / 9
                squares["d_v"][j, 0] += p[i, j] ** 2 * (d_out[i, h] ** 2).sum() / 3
            of_sink = ((1 - p.sum(axis=1)) * np.linalg.norm(p @ v[:, 0], axis=1) * np.linalg.norm(d_out[:, h], axis=1)) ** 2
            squares["d_sinks"][:, h] = of_sink.sum() / 3
        wanted = {n: np.sqrt(s.max()) for n, s in squares.items()}
        self.assertEqual({n: round(size, 9) for n, size in found.sizes().items() if n in wanted},
                         {n: round(size, 9) for n, size in wanted.items()})
        self.assertAlmostEqual(found.largest, max(abs(found.lse).max(), abs(self.weights(q, k, 0)[1][self.PAIRS]).max(),
                                                  abs(self.weights(q, k, 1)[1][self.PAIRS]).max()))


class Placements(unittest.TestCase):
    def test_of_torch_and_in_plain_names(self):
        class Shard:
            dim = 1
            is_shard, is_partial, is_replicate = (staticmethod(lambda yes=yes: yes) for yes in (True, False, False))

        for given, wanted in (("partial", ("replicated", "replicated", "partial")),
                              ({"dp": "shard(0)", "tp": Shard()}, ("shard(0)", "replicated", "shard(1)"))):
            self.assertEqual(step.placement_of(given, "w"), dict(zip(step.AXES, wanted)))
        for given in ("shard", "shard(x)", {"pp": "partial"}, 3):
            with self.assertRaisesRegex(Malformed, "the placement of w is .*it must be replicated, partial or shard"):
                step.placement_of(given, "w")

    def test_distributed_tensors_are_whole(self):
        class Distributed:
            full_tensor = staticmethod(lambda: np.ones((2, 3), np.float32))

        arrays = step.returned_by_name({"w": Distributed(), "v": None}, {"w": (2, 3), "v": (1,)}, ["float32"])
        self.assertEqual(sorted(arrays), ["placements", "w"])
        for found, words in (({"x": 1}, "there is no parameter 'x'; there are w"), ([], "list was returned"),
                             ({"w": np.ones((3, 2), np.float32)}, r"w is \[3, 2\]; it must be \[2, 3\], replicated"),
                             ({"w": (np.ones((2, 2), np.float32), "shard(0)")}, r"\[2, 3\], a shard of"),
                             ({"w": np.ones((2, 3), int)}, "w is int64; it must be float32")):
            with self.assertRaisesRegex(Malformed, words):
                step.returned_by_name(found, {"w": (2, 3)}, ["float32"])

    def test_neighbours_may_have_copies(self):
        arrays = [{"w": np.full((1, 2), r // 2, float)} for r in range(4)]
        whole, findings = step.assembled(arrays, (1, 1, 4), {"w": (2, 2)}, {"w": step.placement_of("shard(0)", "w")})
        self.assertEqual((whole["w"][0, 0].tolist(), findings), ([[[0, 0], [1, 1]]] * 4, []))
        _, findings = step.assembled(arrays, (1, 1, 4), {"w": (3, 2)}, {"w": step.placement_of("shard(0)", "w")})
        self.assertIn("shards of w make [4, 2]; they must make [3, 2]", findings[0].text)


class Rounding(unittest.TestCase):
    def test_bfloat16(self):
        values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7, 1 + 2**-8 + 2**-20, 3.4e38, np.inf, -np.inf, np.nan])
        wanted = np.array([1, 1, 1 + 2**-6, -1 - 2**-7, 1 + 2**-7, np.inf, np.inf, -np.inf, np.nan])
        np.testing.assert_array_equal(rounding.in_type(values, "bfloat16"), wanted)
        np.testing.assert_array_equal(rounding.in_type(np.array(1 + 2**-9), "bfloat16"), 1)
        self.assertEqual(rounding.in_type(values, "float64").dtype, np.float64)
        self.assertEqual(rounding.in_type(np.arange(3), "bfloat16").dtype.kind, "i")

    def test_answers_are_those_of_the_inputs(self):
        for name, arrays in (("attention_sinks_offset", ("sinks",)), ("logprobs_offset", ("logits", "teacher"))):
            file = gyre.read(os.path.join(GOLDEN, f"{name}.h5"))
            found = rounding.rounded(file, "bfloat16")
            changed = tuple(n for n in file.inputs if not np.array_equal(found.inputs[n], file.inputs[n]))
            self.assertEqual(changed, arrays)
            answers = gyre.reference.attention if "attention" in name else gyre.reference.logprobs
            wanted = answers(**found.inputs, **found.inputs.attributes)
            for array in file.reference:
                np.testing.assert_array_equal(found.reference[array], wanted[array], array)
            self.assertFalse(np.allclose(found.reference[key := next(iter(file.reference))], file.reference[key], rtol=1e-6))
        exact = gyre.read(os.path.join(GOLDEN, "attention_causal.h5"))
        self.assertIs(rounding.rounded(exact, "bfloat16"), exact)

    def test_statistics_that_are_wider_than_inputs_have_a_tolerance_of_their_own(self):
        tolerance = Tolerance(1e-2, 1e-2, 2e-4)
        wide, narrow = (np.ones(1, kind) for kind in ("float64", "float32"))
        self.assertEqual(tolerance.of("logprob", wide, wide), (2e-4, 2e-4))
        self.assertEqual(tolerance.of("logprob", wide, narrow), (1e-2, 1e-2))
        self.assertEqual(tolerance.of("out", wide, wide), (1e-2, 1e-2))
        self.assertEqual(returned("logprob", narrow, (1,), ["bfloat16", "float32"]).dtype, np.float64)
        self.assertEqual(returned("logprob", narrow, (1,), ["float32"]).dtype, np.float32)


class Threads:
    """Ranks as threads of this process, in the place of launch.Team."""

    is_over = False

    def __init__(self, setting, timeout):
        self.setting = setting

    def start(self):
        self.function = load(self.setting.function)
        self.parameters = parameters_of(self.function)

    def run(self, pieces, needs, grid):
        sizes = {"dp": grid.dp, "cp": grid.cp, "tp": grid.tp}
        options = Options("", self.setting.contract, grid.ranks, dtype=self.setting.kind, **sizes)
        return planted_table.answers(self.function, options, Problem("", pieces, needs, None))

    def stop(self):
        pass


class Planted(unittest.TestCase):
    OF_PROCESSES = ("hang", "dead-rank", "raised", "other-type", "other-shape")

    def test_there_are_enough(self):
        self.assertGreaterEqual(len(planted_errors.ERRORS), 20)

    def test_each_is_found_and_named(self):
        all_errors = [(module, *error) for module in (planted_errors, planted_ranks) for error in module.ERRORS.items()]
        for module, name, (contract, kind, words, options) in all_errors:
            team = Team if kind in self.OF_PROCESSES else Threads
            with self.subTest(name), mock.patch.object(sys.modules["gyre.distributed.conform"], "Team", team):
                report = run(f"{module.__name__}:{name}", contract=contract, **options)
                self.assertFalse(report.passed)
                self.assertEqual(next(iter(report.kinds)), kind, str(report))
                self.assertIn(words, str(report))


class Judges(unittest.TestCase):
    def test_answers_that_cannot_be_compared_are_one_verdict(self):
        def judge(arrays, tolerance):
            raise IndexError("index 3 is out of bounds")

        verdict = one(Problem("case", [{}], {}, judge), [("done", {"y": np.zeros(1)}, False)], Tolerance(0, 0))
        self.assertEqual((verdict.status, verdict.findings[0].text),
                         ("failed", "it cannot be compared: IndexError: index 3 is out of bounds"))


class Grids(unittest.TestCase):
    """Without cp and tp, the ranks are split in every way that the contract is about."""

    def test_of_contracts(self):
        for contract, ranks, grids in (("loss", 2, ["cp 2 x tp 1", "cp 1 x tp 2"]), ("logprob", 1, ["cp 1 x tp 1"]),
                                       ("logprob", 4, ["cp 4 x tp 1", "cp 2 x tp 2", "cp 1 x tp 4"]),
                                       ("attention", 2, ["cp 2 x tp 1"]), ("pack", 2, ["cp 1 x tp 2"])):
            case = {"attention": "attention_causal", "pack": "documents_short"}.get(contract, "logprobs_plain")
            report = run(f"{EXAMPLE}:{contract}", ranks=ranks, case=case)
            self.assertTrue(report.passed, str(report))
            self.assertEqual(list(map(str, report.grids)), grids)
            self.assertTrue(str(report).endswith(f"0 left out; {', '.join(grids)}"), str(report))
            self.assertEqual(list(dict.fromkeys(v.grid for v in report.verdicts)), grids)

    def test_a_grid_on_which_nothing_was_compared_is_named(self):
        report = run("planted_ranks:refuses_columns", contract="logprob", ranks=2, case="logprobs_plain")
        self.assertTrue(str(report).endswith("1 left out; cp 2 x tp 1, cp 1 x tp 2 (nothing compared)"), str(report))

    def test_rows_of_a_loss_are_equally_many_unless_uneven_ones_are_asked_for(self):
        path = pathlib.Path(GOLDEN, "logprobs_plain.h5")
        rows = len(gyre.read(path).inputs["logits"])
        for uneven, ranks, wanted in ((False, rows - 1, [1] * (rows - 1)), (True, rows - 1, [2] + [1] * (rows - 2)),
                                      (True, rows + 1, [1] * rows + [0])):
            options = Options("", dp=1, cp=ranks, tp=1, convention="mean", uneven=uneven)
            pieces = next(iter(contracts.named("loss").problems(path, options))).pieces
            self.assertEqual([len(piece["batches"][0]["labels"]) for piece in pieces], wanted)
        report = run(f"{EXAMPLE}:loss", cp=rows + 1, case="logprobs_plain")
        self.assertIn(f"{rows} rows are fewer than {rows + 1} ranks, and --uneven was not given", str(report))

    def test_of_options(self):
        report = run(f"{EXAMPLE}:loss", ranks=4, dp=2, case="logprobs_plain")
        self.assertEqual(list(map(str, report.grids)), ["dp 2 x cp 2 x tp 1", "dp 2 x cp 1 x tp 2"])
        report = run(f"{EXAMPLE}:loss", ranks=4, tp=2, case="logprobs_plain")
        self.assertEqual((report.options.cp, list(map(str, report.grids))), (2, ["cp 2 x tp 2"]))


class Functions(unittest.TestCase):
    """Functions of other kinds than a def with all parameters."""

    def test_apply_takes_no_further_parameters(self):
        report = run("planted_ranks:sum_over_group", case="logprobs_plain")
        self.assertTrue(report.passed, str(report))

    def test_without_a_signature(self):
        report = run("planted_ranks:logprob", case="logprobs_[pt]*", tp=2)
        self.assertTrue(report.passed, str(report))
        self.assertIn("no parameter 'temperature'; nothing says what it takes: wrap it in a def", str(report))

    def test_parameters_that_no_case_needed_are_named(self):
        report = run(f"{EXAMPLE}:attention", case="attention_causal")
        self.assertIn("\nnot tested: scale, sinks, k_shared, which the function takes and no case needed", str(report))
        report = run(f"{EXAMPLE}:attention", case="attention_sinks_offset")
        self.assertNotIn("sinks", "".join(report.unasked))
        for function in ("filter_without_a_new_sum", "top_p_ignored"):  # **more takes all
            report = run(f"planted_ranks:{function}", contract="filtered_logprob", case="logprobs_plain")
            self.assertEqual(report.unasked, ["temperature", "min_p", "vocab_size"])

    def test_an_empty_shard_needs_no_gradient(self):
        report = run("planted_ranks:empty_shards_are_constants", contract="logprob", case="logprobs_one_id", tp=2)
        self.assertTrue(report.passed, str(report))

    def test_advice_on_forward_only_says_what_it_costs(self):
        report = run("planted_errors:sum_without_gradient", contract="sum_over_group", case="logprobs_plain", tp=2)
        self.assertIn("ranks 0, 1 returned nothing that has a gradient; for a function that has none in any case there "
                      "is --forward-only, which compares no gradient at all", str(report))

    def test_ranks_import_the_main_module_if_the_function_is_there(self):
        script = ("import sys\nfrom gyre.distributed import conform\nfrom ranks_numpy import logprob as mine\n"
                  "print('imported', flush=True)\nif __name__ == '__main__':\n"
                  f"    print(conform({GOLDEN!r}, sys.argv[1], contract='logprob', backend='numpy', tp=2, case='logprobs_plain'))\n")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "own.py")
            path.write_text(script, encoding="utf-8")
            for function, times in ((f"{EXAMPLE}:logprob", 1), ("__main__:mine", 3)):
                done = subprocess.run([sys.executable, str(path), function], capture_output=True, text=True, timeout=60)
                self.assertIn("CONFORM PASSED 1/1", done.stdout, done.stderr)
                self.assertEqual(done.stdout.count("imported"), times)

    def test_processes_of_a_function_end_with_it(self):
        words = [sys.executable, "-m", "gyre", "conform", GOLDEN, "--backend", "numpy", "--function",
                 "planted_ranks:starts_a_process", "--contract", "sum_over_group", "--case", "logprobs_plain"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=40)  # the pipes are open as long as one lives
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Command(unittest.TestCase):
    ARGUMENTS = (GOLDEN, "--backend", "numpy", "--function")

    def test_passes(self):
        code, text = command(*self.ARGUMENTS, f"{EXAMPLE}:attention", "--case", "attention_causal")
        self.assertEqual(code, 0, text)
        self.assertIn("CONFORM PASSED 2/2 cases, 1848 values, 0 left out", text)

    def test_fails(self):
        code, text = command(
            *self.ARGUMENTS, "planted_errors:dead_rank", "--contract", "attention", "--case", "attention_[cg]*"
        )
        self.assertEqual(code, 1, text)
        self.assertIn("dead-rank in 5 cases", text)  # each case has new ranks after the death

    def test_nothing_compared_fails(self):
        code, text = command(*self.ARGUMENTS, f"{EXAMPLE}:attention", "--case", "attention_no_token")
        self.assertEqual(code, 1, text)
        self.assertIn("nothing was compared", text)

    def test_commands_of_the_page(self):
        with open(os.path.join(SOURCE, "docs", "conformance.md"), encoding="utf-8") as page:
            shown = [line.split()[1:] for line in page if line.startswith("    python3 -m gyre conform")]
        self.assertEqual(len(shown), 7)
        for words in shown:
            done = subprocess.run(
                [sys.executable, *(word.strip('"') for word in words)], capture_output=True, text=True, cwd=SOURCE
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_adapters_of_other_code_have_at_most_20_lines(self):
        for path in sorted(pathlib.Path(SOURCE, "docs", "conform").glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and path.stem != "decoder":
                    self.assertLessEqual(node.end_lineno - node.lineno + 1, 20, f"{path.name}: {node.name}")

    def test_explains_every_contract(self):
        for name in contracts.NAMES:
            code, text = command("--contract", name, "--explain")
            self.assertEqual((code, text[: len(name) + 1]), (0, f"{name}("))

    def test_bad_usage(self):
        here = (f"{EXAMPLE}:attention",)
        for arguments, words in (
            ((), "--function is needed, and a SUITE"),
            (("--function", *here), "the contract attention needs a SUITE"),
            ((GOLDEN, "--function", f"{STEPS}:gradients"), "but the contract gradients has cases of its own: plain, tied"),
            (("--function", f"{STEPS}:gradients", "--case", "x*"), "--case is 'x*'; the contract gradients has plain"),
            (
                (GOLDEN, "--function", f"{EXAMPLE}:attend", "--backend", "numpy", "--contract", "attention"),
                "has no function 'attend'; it has attention",
            ),
            ((GOLDEN, "--function", "none.py:attention", "--backend", "numpy"), "none.py cannot be imported"),
            ((GOLDEN, "--function", "attention"), "--function is 'attention'; it must be MODULE:NAME"),
            ((GOLDEN, "--function", "a:attend"), "the contract is 'attend'"),
            (("none", "--function", *here), "none does not exist"),
            ((os.path.join(GOLDEN, "audio.h5"), "--function", *here), "the contract needs a file of the kind attention"),
            ((GOLDEN, "--function", *here, "--case", "x*"), "with a name like 'x*'"),
            ((GOLDEN, "--function", *here, "--layout", "zig"), "--layout is 'zig'; it must be one of dual-chunk-swap"),
            ((GOLDEN, "--function", *here, "--ranks", "4", "--cp", "3", "--tp", "2"), "a group of the wrong size"),
            ((GOLDEN, "--function", *here, "--ranks", "0"), "--ranks is 0; it must be 1 or more"),
            ((GOLDEN, "--function", *here, "--tp", "-2"), "--tp is -2; it must be 1 or more"),
            ((GOLDEN, "--function", *here, "--convention", "mean"), "--convention is 'mean'; attention has none"),
            ((GOLDEN, "--function", *here, "--uneven"), "--uneven was given, but rows of the contract attention are dealt in one way"),
            ((GOLDEN, "--function", *here, "--rtol", "nan"), "--rtol is nan; it must be 0 or more"),
            ((GOLDEN, "--function", *here, "--timeout", "-1"), "--timeout is -1.0; it must be positive"),
            ((GOLDEN, "--function", *here, "--timeout", "1e308"), "--timeout is 1e+308; it must be positive seconds, at most"),
            ((GOLDEN, "--function", *here, "--backend", "numpy", "--dtype", "bfloat16"), "NumPy has no bfloat16"),
            (
                (GOLDEN, "--function", f"{EXAMPLE}:loss", "--convention", "sum"),
                "--convention is 'sum'; it must be one of mean",
            ),
        ):
            with self.subTest(words):
                code, text = command(*arguments)
                self.assertEqual(code, 2, text)
                self.assertIn(words, text)

    def test_forward_only_errors_are_explained(self):
        for name in ("heads_by_turns", "entropies_of_shards", "no_filter"):
            contract, kind, words, options = planted_ranks.ERRORS[name]
            report = run(f"planted_ranks:{name}", contract=contract, forward_only=True, **options)
            self.assertEqual(next(iter(report.kinds)), kind, str(report))
            self.assertIn(words, str(report))

    def test_forward_only(self):
        run = (*self.ARGUMENTS, "planted_errors:sum_without_gradient", "--contract", "sum_over_group", "--case",
               "logprobs_plain", "--tp", "2")
        self.assertEqual(command(*run)[0], 1)
        code, text = command(*run, "--forward-only")
        self.assertEqual(code, 0, text)
        self.assertIn("compared in part: 1 cases lack", text)
        code, text = command(*run, "--convention", "none")
        self.assertEqual(code, 0, text)
        self.assertNotIn("compared in part", text)

    def test_a_tolerance_that_zeros_pass_fails(self):
        right = (*self.ARGUMENTS, f"{EXAMPLE}:logprob", "--case", "logprobs_plain", "--tp", "2")
        for option in (("--atol", "10"), ("--rtol", "1"), ("--rtol", "0.9", "--atol", "0.9")):
            code, text = command(*right, *option)
            self.assertEqual(code, 1, text)
            self.assertIn("the tolerance is larger than the values: nothing was verified", text)
        self.assertEqual(command(*right, "--atol", "0.1")[0], 0)

    def test_answers_that_do_not_fit(self):
        def without(file):
            del file["reference"]

        def short(file):
            del file["reference/logprob"]
            file["reference/logprob"] = np.zeros(2)

        def nan(file):
            file["logprobs/logits"][0, 0] = np.nan

        for change, words in ((without, "has no group 'reference'"), (short, "reference['logprob'] is [2]"),
                              (nan, "logits[0, 0] is nan")):
            with self.subTest(words), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "logprobs_plain.h5")
                shutil.copy(os.path.join(GOLDEN, "logprobs_plain.h5"), path)
                with h5py.File(path, "r+") as file:
                    del file.attrs["content_sha256"]
                    change(file)
                code, text = command(path, "--function", f"{EXAMPLE}:logprob", "--backend", "numpy")
                self.assertEqual(code, 3, text)
                self.assertIn(path, text)
                self.assertIn(words, text)

    def test_a_full_disk(self):
        words = [sys.executable, "-m", "gyre", "conform", *self.ARGUMENTS, f"{EXAMPLE}:logprob", "--case", "logprobs_plain"]
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, "No space left" in done.stderr), (3, True), done.stderr)

    def test_few_values_are_said(self):
        code, text = command(*self.ARGUMENTS, "planted_errors:gradient_of_a_gather_that_is_summed", "--contract",
                             "relayout", "--case", "packed_short_cp4", "--cp", "4")
        self.assertEqual(code, 1, text)
        self.assertIn("a factor 4 = cp", text)
        self.assertNotIn("only", text)
        code, text = command(*self.ARGUMENTS, "planted_errors:loss_times_cp", "--contract", "loss", "--case",
                             "logprobs_plain", "--cp", "2", "--forward-only")
        self.assertIn("a factor 2 = cp or the ranks (only 2 values differ)", text)

    def test_ctrl_c_ends_the_run_and_its_ranks(self):
        words = [sys.executable, "-m", "gyre", "conform", *self.ARGUMENTS, "planted_errors:hang", "--contract",
                 "attention", "--case", "attention_causal"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              start_new_session=True) as process:
            line = process.stdout.readline()  # a rank is in the function
            os.killpg(process.pid, signal.SIGINT)
            text = process.stdout.read()  # ends when no rank has the pipe
            code = process.wait()
        self.assertEqual((line, code, text), ("hanging\n", 130, "gyre conform: interrupted\n"))

    def test_ranks_end_when_the_command_is_killed(self):
        words = [sys.executable, "-m", "gyre", "conform", *self.ARGUMENTS, "planted_errors:hang", "--contract",
                 "attention", "--case", "attention_causal"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            self.assertEqual(process.stdout.readline(), "hanging\n")
            process.kill()
            process.stdout.read()  # ends when no rank has the pipe

    def test_damaged_file(self):
        def changed(path):
            with h5py.File(path, "r+") as file:
                file["reference/out"][0] = 0

        def cut(path):
            with open(path, "r+b") as file:
                file.truncate(2000)

        for damage, words in ((changed, "are not what was written"), (cut, "truncated")):
            with self.subTest(words), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "attention_damaged.h5")
                for name in ("attention_causal.h5", "logprobs_plain.h5"):
                    shutil.copy(os.path.join(GOLDEN, name), folder)
                shutil.copy(os.path.join(GOLDEN, "attention_causal.h5"), path)
                damage(path)
                code, text = command(folder, "--function", f"{EXAMPLE}:attention", "--backend", "numpy")
                self.assertEqual(code, 3, text)
                self.assertIn(path, text)
                self.assertIn(words, text)

    def test_without_torch(self):
        hidden = {"PYTHONPATH": os.pathsep.join([os.path.join(SOURCE, "tests", "support", "no_torch"), *PATHS])}
        done = subprocess.run(
            [sys.executable, "-m", "gyre", "conform", GOLDEN, "--function", f"{EXAMPLE}:attention"],
            capture_output=True,
            text=True,
            env=os.environ | hidden,
        )
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("--backend numpy needs none", done.stderr)


class Certificate(unittest.TestCase):
    def test_runs_are_added_and_replaced(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "report.json")
            for name in ("heads_by_turns", "heads_by_turns"):
                code, text = command(GOLDEN, "--backend", "numpy", "--function", f"planted_ranks:{name}", "--contract",
                                     "head_exchange", "--case", "attention_groups_4", "--report", path)
                self.assertEqual(code, 1, text)
            code, text = command("--function", f"{STEPS}:policy_loss", "--backend", "numpy", "--ranks", "2", "--report", path)
            self.assertEqual(code, 0, text)
            with open(path, encoding="utf-8") as file:
                whole = json.load(file)
            self.assertEqual((whole["schema"], [run["passed"] for run in whole["runs"]]), ("gyre-conform/1", [False, True]))
            self.assertEqual(whole["runs"][1]["grids"], ["dp 2 x cp 1 x tp 1", "cp 2 x tp 1"])
            self.assertIn("dealt out by turns", whole["runs"][0]["cases"][0]["findings"][0]["text"])
            with open(path.replace(".json", ".html"), encoding="utf-8") as file:
                page = file.read()
            for words in ("1 of 2 functions keep", 'class="passed">6 of 6 cases', 'class="failed">2 of 3 cases', "by turns: rank r"):
                self.assertIn(words, page)
            self.assertEqual(sorted(os.listdir(folder)), ["report.html", "report.json"])

    def test_another_file_is_not_replaced(self):
        run = ("--function", f"{STEPS}:policy_loss", "--backend", "numpy", "--ranks", "1", "--case", "plain", "--report")
        with tempfile.TemporaryDirectory() as folder:
            for name, content, words in (("a.json", "[]", "is no report of gyre conform"), ("b.txt", "", "must end in .json"),
                                         ("c.json", '{"schema": "gyre-result/1", "runs": []}', "it must be 'gyre-conform/1'")):
                path = os.path.join(folder, name)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(content)
                code, text = command(*run, path)
                self.assertEqual(code, 3, text)
                self.assertIn(words, text)
                with open(path, encoding="utf-8") as file:
                    self.assertEqual(file.read(), content)


class Plugin(unittest.TestCase):
    def test_fixture(self):
        try:
            import pytest  # noqa: F401
        except ImportError as error:
            self.skipTest(str(error))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "test_it.py")
            with open(path, "w", encoding="utf-8") as file:
                for name, function in (("right", f"{EXAMPLE}:attention"), ("wrong", "planted_errors:other_shape")):
                    print(
                        f"def test_{name}(gyre_conform):\n    gyre_conform({GOLDEN!r}, {function!r}, contract='attention', "
                        "backend='numpy', case='attention_causal')\n",
                        file=file,
                    )
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-p",
                    "gyre.distributed.pytest_plugin",
                    "-p",
                    "no:cacheprovider",
                    path,
                ],
                capture_output=True,
                text=True,
                cwd=folder,
            )
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("1 failed, 1 passed", done.stdout)
        self.assertIn("rank 1: out is", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
