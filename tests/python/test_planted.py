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

import numpy as np

SOURCE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.getcwd()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "tests", "support"))

import planted_table  # noqa: E402


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

    def test_right_functions_pass(self):
        for bug in self.right:
            with self.subTest(bug.name, contract=bug.contract, **bug.options):
                found = planted_table.verdicts(bug)
                self.assertGreater(len(found), 1)
                self.assertEqual([name for name, is_found in found.items() if is_found], [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
