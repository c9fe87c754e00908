#!/usr/bin/env python3
"""Checks that a golden case finds every planted error, and none a right function: tests/support/planted_table.py.

Usage: test_planted.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import collections
import os
import sys
import unittest

SOURCE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.getcwd()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "tests", "support"))

import planted_table  # noqa: E402


class Planted(unittest.TestCase):
    bugs, right = planted_table.bugs_and_right()

    def test_there_are_enough_of_every_contract(self):
        self.assertGreaterEqual(len(self.bugs), 150)
        counts = collections.Counter(bug.contract for bug in self.bugs)
        self.assertEqual({name: counts[name] for name in planted_table.contracts.NAMES if counts[name] < 3}, {})
        self.assertEqual({bug.contract for bug in self.right}, set(planted_table.contracts.NAMES))
        names = [(bug.contract, bug.name) for bug in self.bugs]
        self.assertEqual(sorted(names), sorted(set(names)))
        self.assertEqual([bug.name for bug in self.bugs if not bug.origin], [])

    def test_a_case_finds_each(self):
        for bug in self.bugs:
            with self.subTest(bug.name, contract=bug.contract):
                found = planted_table.verdicts(bug, first=True)
                self.assertTrue(any(found.values()), f"{len(found)} cases pass: {bug.origin}")
                if bug.kind:
                    self.assertEqual(next(filter(None, found.values()))[0], bug.kind)

    def test_right_functions_pass(self):
        for bug in self.right:
            with self.subTest(bug.name, contract=bug.contract, **bug.options):
                found = planted_table.verdicts(bug)
                self.assertGreater(len(found), 1)
                self.assertEqual([name for name, is_found in found.items() if is_found], [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
