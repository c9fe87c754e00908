#!/usr/bin/env python3
"""Recorded tables of the golden suite (results/cpu-2core) have the files, errors and cases that there are today: those that
take too long to be made again by a test.

Usage: test_recorded.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import functools
import importlib.util
import pathlib
import re
import sys
import unittest

SOURCE = pathlib.Path(sys.argv[1]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / place) for place in ("python", "tests/support")]

import planted_table  # noqa: E402
from gyre.distributed import contract, contracts  # noqa: E402
from gyre.distributed.conform import Options, files_of  # noqa: E402

GOLDEN = SOURCE / "inputs" / "golden"
AGAIN = "results/record.sh makes it again"

spec = importlib.util.spec_from_file_location("conform", SOURCE / "results" / "conform.py")
conform = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conform)


def recorded(name):
    return (SOURCE / "results" / "cpu-2core" / name).read_text(encoding="utf-8").splitlines()


@functools.lru_cache(maxsize=None)
def cases(name, options):
    """How many cases of the suite the contract has; a file that has none of its inputs is left out as one."""
    of, count = contracts.named(name), 0
    for path in files_of([str(GOLDEN)], of.KIND, "*"):
        try:
            count += len(list(of.problems(path, options)))
        except contract.LeftOut:
            count += 1
    return count


class Recorded(unittest.TestCase):
    maxDiff = None

    def test_all_planted_errors_are_in_the_table(self):
        lines = recorded("planted.txt")
        bugs, right = planted_table.bugs_and_right()
        heads = {i: match for i, line in enumerate(lines) if (match := re.match(r"(\w+) +\d+ of +\d+  (.+?): ", line))}
        found = [(*head.groups(), (re.match(r" +(named [\w/ -]+|not named); ", lines[i + 1]) or [None, ""])[1])
                 for i, head in heads.items()]
        names = {"": "", "values": "not named"}
        wanted = [(bug.contract, bug.name, names.get(bug.kind, f"named {bug.kind}")) for bug in bugs]
        self.assertEqual(found, wanted, AGAIN)
        said = "\n".join(lines)
        self.assertIn(f"{len(bugs)} errors, 0 found by no case: -; ", said)
        self.assertIn(f"{len(right)} right functions, fault found with: -", said)

    def test_functions_of_pytorch_ran_most_cases(self):
        """Functions of docs/conform may be left out, for want of their packages. Of the others the record has nine in ten of
        today's cases."""
        rows = [line.split() for line in recorded("conform.txt") if re.match(r"\w+:\w+ ", line)]
        found = {row[0] for row in rows}
        adapters = {path.stem for path in (SOURCE / "docs" / "conform").glob("*.py")}
        runs = [
            (function, name, options)
            for function, name, some in conform.RUNS
            for options in some
            if function in found or function.split(":")[0] not in adapters
        ]
        self.assertEqual([row[0] for row in rows], [function for function, _, _ in runs], AGAIN)
        for (function, name, options), row in zip(runs, rows, strict=True):
            if hasattr(contracts.named(name), "CASES") or row[1] == "all":
                self.assertGreater(int(row[-3]), 0, function)
                continue
            grid = {"cp": int(row[1]), "tp": int(row[2]), "dp": 1}
            chosen = Options("", name, **{**options, **grid, "ranks": grid["cp"] * grid["tp"]})
            with self.subTest(function, **grid):
                self.assertGreaterEqual(sum(map(int, row[-3:])), 0.9 * cases(name, chosen), AGAIN)


unittest.main(argv=sys.argv[:1])
