#!/usr/bin/env python3
"""Predictions against what a machine measured (results/prediction): the summary is of the rows, and configurations are
predicted again, from the recorded machine file, within the errors that the summary states.

Usage: test_measured.py SOURCE_DIR BUILD_DIR
"""

import csv
import importlib.util
import pathlib
import re
import statistics
import sys
import tempfile
import unittest

SOURCE, BUILD = (pathlib.Path(argument) for argument in sys.argv[1:3])
RECORDED = SOURCE / "results" / "prediction"
# Small ones, of each kind.
AGAIN = ("1 rank, 8 over 2 heads of 128, 3K", "2 ranks, a ring under every layout", "4 ranks, emulated, 100MB/s")

spec = importlib.util.spec_from_file_location("measured", SOURCE / "results" / "measured.py")
measured = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measured)


def rows():
    with open(RECORDED / "measured.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Measured(unittest.TestCase):
    def test_the_summary_is_of_the_rows(self):
        self.assertEqual((RECORDED / "measured.txt").read_text(encoding="utf-8"), measured.summary(rows()))

    def test_configurations_are_enough_and_not_those_of_the_calibration(self):
        names = {(row["group"], row["schedule"], row["layout"]) for row in rows()}
        self.assertGreaterEqual(len(names), 60)
        self.assertLessEqual({1, 2, 4}, {int(row["ranks"]) for row in rows()})

    def test_predicted_again_within_the_stated_error(self):
        text = (RECORDED / "measured.txt").read_text(encoding="utf-8")
        (bound,) = re.findall(r"^all  +\d+ +[\d.]+ % +([\d.]+) %", text, re.MULTILINE)
        groups = {group.name: group for group in (*measured.real_groups(), *measured.emulated_groups())}
        with tempfile.TemporaryDirectory() as folder:
            for name in AGAIN:
                predicted = measured.predict(BUILD / "apps", groups[name], RECORDED / "machine.json",
                                             pathlib.Path(folder) / "out.json")
                errors = [abs(100 * (predicted[row["schedule"], row["layout"], row["pass"]] / float(row["measured_ms"]) - 1))
                          for row in rows() if row["group"] == name]
                with self.subTest(group=name):
                    self.assertTrue(errors)
                    self.assertLessEqual(statistics.median(errors), float(bound))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
