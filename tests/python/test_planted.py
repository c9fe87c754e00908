#!/usr/bin/env python3
"""Checks that a golden case finds every planted error, and none a right function: tests/support/planted_table.py.

Usage: test_planted.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import collections
import dataclasses
import functools
import inspect
import os
import sys
import unittest
from unittest import mock

import numpy as np

SOURCE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.getcwd()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "tests", "support"))

import planted_table  # noqa: E402

from planted_attention import Attention, attention_of  # noqa: E402, I001 (planted_table sets the path)
from planted_rows import LogProb, logprob_of  # noqa: E402

ANY_ORDER = {"attention": {"cp": 4}, "logprob": {"tp": 4}, "loss": {"cp": 4}, "gradients": {"dp": 4, "cp": 2}}


class Alone:
    """A group of one rank."""

    rank, size = 0, 1
    all_reduce = staticmethod(lambda array, operation="sum": np.asarray(array))
    all_gather = staticmethod(lambda array: [np.asarray(array)])
    all_to_all = staticmethod(lambda arrays: [np.asarray(arrays[0])])
    broadcast = staticmethod(lambda array, root=0: np.asarray(array))


def spoiled(answer, change):
    """An answer whose arrays, and those of its functions, are changed."""
    if callable(answer):
        return lambda *given: spoiled(answer(*given), change)
    if isinstance(answer, dict):
        return {name: spoiled(part, change) for name, part in answer.items()}
    if isinstance(answer, (tuple, list)):
        return type(answer)(spoiled(part, change) for part in answer)
    return change(answer) if isinstance(answer, (np.ndarray, np.generic)) else 0 if isinstance(answer, int) else answer


def spoiling(function, change):
    @functools.wraps(function)
    def call(*given, **more):
        return spoiled(function(*given, **more), change)

    return call


def alone(function):
    """The function of a rank that is alone: what a backend returns that is compared with itself on one rank."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*given, **more):
        more |= dict(zip(names, given))
        return function(**more | {n: Alone for n in more if n.endswith("group")}
                        | {n: x for n, x in (("rank", 0), ("size", 1)) if n in more})

    return call


RANDOM = np.random.default_rng(7)


def in_any_order(terms):
    """The sum of terms [n, ...] in float32, in another order in each call."""
    return np.add.reduce(np.asarray(terms, np.float32)[RANDOM.permutation(len(terms))], axis=0)


class AnyOrderGroup(planted_table.Group):
    """A group in which each rank adds in its own order, as atomic additions do."""

    def all_reduce(self, array, operation="sum"):
        parts = np.stack(self.all_gather(array))
        if operation == "sum" and parts.dtype.kind == "f":
            return np.asarray(in_any_order(parts), parts.dtype)
        return {"sum": np.add, "max": np.maximum, "min": np.minimum}[operation].reduce(parts, axis=0)


class AnyOrderAttention(Attention):
    """Blocks, tiles and gradients arrive in any order; all is in float32, as of a kernel."""

    tile = 4

    def score(self, q, keys):
        return super().score(q, keys).astype(np.float32)

    def steps(self):
        return RANDOM.permutation(self.size)

    def tiles(self, keys):
        return [super(AnyOrderAttention, self).tiles(keys)[i] for i in RANDOM.permutation(-(-keys // self.tile))]

    def fold(self, *state):
        return tuple(x.astype(np.float32) for x in super().fold(*state))

    def normal(self, *state):
        return tuple(x.astype(np.float32) for x in super().normal(*state))

    def merge(self, *parts):
        return tuple(x.astype(np.float32) for x in super().merge(*parts))

    def home(self, parts):
        return in_any_order(self.group.all_to_all(parts))


class RoundedLse(Attention):
    """Log-sum-exps of blocks, of merges and of the whole have `bits` bits; the rest is exact."""

    bits = 24

    def rounded(self, out, lse):
        part, power = np.frexp(lse)
        return out, np.ldexp(np.round(np.ldexp(part, self.bits)), power - self.bits)

    def normal(self, *state):
        return self.rounded(*super().normal(*state))

    def merge(self, *parts):
        return self.rounded(*super().merge(*parts))


class LseOf16Bits(RoundedLse):
    """256 times as far off as float32."""

    bits = 16


class AnyOrderLogProb(LogProb):
    """The sum over columns is in float32, in any order."""

    def scaled(self):
        return super().scaled().astype(np.float32)

    def total(self, x, top):
        return in_any_order(self.exp(x, top).T) if self.width else super().total(x, top)


class Planted(unittest.TestCase):
    bugs, right = planted_table.bugs_and_right()
    # Of those that are to be named, the first of each contract and kind: the recorded table has all, test_recorded its names.
    asked = [bug for bug in bugs if not bug.kind]
    asked += {(bug.contract, bug.kind): bug for bug in reversed(bugs) if bug.kind}.values()

    def test_there_are_enough_of_every_contract(self):
        self.assertGreaterEqual(len(self.bugs), 150)
        counts = collections.Counter(bug.contract for bug in self.bugs)
        self.assertEqual({name: counts[name] for name in planted_table.contracts.NAMES if counts[name] < 3}, {})
        self.assertEqual({bug.contract for bug in self.right}, set(planted_table.contracts.NAMES))
        names = [(bug.contract, bug.name) for bug in self.bugs]
        self.assertEqual(sorted(names), sorted(set(names)))
        self.assertEqual([bug.name for bug in self.bugs if not bug.origin], [])

    def test_a_case_finds_each(self):
        for bug in self.asked:
            with self.subTest(bug.name, contract=bug.contract):
                found = planted_table.verdicts(bug, first=True)
                self.assertTrue(any(found.values()), f"{len(found)} cases pass: {bug.origin}")
                if bug.kind and next(filter(None, found.values()))[0] != bug.kind:
                    found = planted_table.verdicts(bug)
                    self.assertTrue(planted_table.is_named(bug, found), found)

    def test_zeros_constants_and_ranks_that_are_alone_fail_every_contract(self):
        for name in planted_table.contracts.NAMES:
            right = next(bug for bug in self.right if bug.contract == name)
            changes = {"zeros": np.zeros_like, "constants": np.ones_like}
            functions = {what: spoiling(right.function, change) for what, change in changes.items()}
            if name != "pack":  # every rank has the bins of all
                functions["alone"] = alone(right.function)
            for what, function in functions.items():
                with self.subTest(what, contract=name):
                    bug = dataclasses.replace(right, name=what, origin=what, function=function, raises=True)
                    found = planted_table.verdicts(bug, first=True)
                    self.assertTrue(any(found.values()), f"{len(found)} cases pass")

    def test_sums_in_any_order_raise_no_alarm(self):
        """Functions are right but for roundings, which are other ones in each call and on each rank."""
        right = {bug.contract: bug for bug in reversed(self.right) if bug.options.get("dtype") != "bfloat16"}
        for name, function in (("attention", attention_of(AnyOrderAttention)), ("logprob", logprob_of(AnyOrderLogProb)),
                               ("loss", right["loss"].function), ("gradients", right["gradients"].function)):
            bug = dataclasses.replace(right[name], origin="", function=function, options={**right[name].options, **ANY_ORDER[name]})
            with self.subTest(name), mock.patch.object(planted_table, "Group", AnyOrderGroup):
                found = planted_table.verdicts(bug)
                self.assertGreater(len(found), 1)
                self.assertEqual({case: kinds for case, kinds in found.items() if kinds}, {})
                self.assertTrue(self.bits_change(bug), "the order made no difference: nothing was tested")

    def test_lse_of_large_scores_is_rounded_as_float32_rounds_it(self):
        """Where scores are of size 130, an lse in float32 is off by 1e-5, and gradients whose terms cancel by more than
        their tolerance elsewhere. That is no error; eight bits less are one."""
        right = next(bug for bug in self.right if bug.contract == "attention")
        for kind, wanted in ((RoundedLse, []), (LseOf16Bits, ["attention_large_scores", "attention_low_scores"])):
            for cp in (2, 8):
                options = {"cp": cp, "layout": "striped"}
                bug = dataclasses.replace(right, origin="", function=attention_of(kind), options=options)
                found = planted_table.verdicts(bug)
                with self.subTest(kind.__name__, cp=cp):
                    self.assertEqual(sorted(set(wanted) - {case for case, kinds in found.items() if kinds}), [])
                    if not wanted:
                        self.assertEqual({case: kinds for case, kinds in found.items() if kinds}, {})

    @staticmethod
    def bits_change(bug):
        """Whether two calls of some case return other bits."""
        options = planted_table.options_of(bug)
        for _, problems in planted_table.problems_of(options, False):
            for problem in problems:
                calls = [planted_table.answers(bug.function, options, problem) for _ in range(2)]
                bits = [[array.tobytes() for one in call if one[0] == "done" for array in one[1].values()] for call in calls]
                if bits[0] != bits[1]:
                    return True
        return False

    def test_right_functions_pass(self):
        for bug in self.right:
            with self.subTest(bug.name, contract=bug.contract, **bug.options):
                found = planted_table.verdicts(bug)
                self.assertGreater(len(found), 1)
                self.assertEqual([name for name, is_found in found.items() if is_found], [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
