#!/usr/bin/env python3
"""Checks inputs/published/ and results/published.py: figures have sources, recorded predictions are those of the program
that is built, misses have reasons, and mistakes are refused.

test_published.py SOURCE_DIR BUILD_DIR
"""

import collections
import csv
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest

SOURCE, BUILD = (pathlib.Path(a).resolve() for a in (sys.argv[1:3] if len(sys.argv) > 2 else (".", "build/ci")))


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(root, *arguments):
    return subprocess.run(["/usr/bin/python3", root / "results/published.py", BUILD / "apps",
                           *arguments], capture_output=True, text=True, timeout=120, check=False)


class Inputs(unittest.TestCase):
    def setUp(self):
        self.rows = rows_of(SOURCE / "inputs/published/attention.csv")

    def test_each_figure_is_once_there_with_a_source(self):
        records = [row["record"] for row in self.rows]
        self.assertEqual(len(records), len(set(records)))
        for row in self.rows:
            own, _, case = row["source"].partition(":")
            if own.startswith("results/"):
                self.assertTrue((SOURCE / own).is_file() and case, row)
                continue
            self.assertRegex(row["source"], r"^(https://github\.com/\S+|[\w-]+/[\w-]+@[0-9a-f^]{7,}:\S+)", row)

    def test_each_is_predicted_or_left_out(self):
        for row in self.rows:
            self.assertEqual(bool(row["machine"]), not row["left_out"], row)
            self.assertEqual(bool(row["machine"]), bool(row["predict"]), row)

    def test_no_machine_file_is_made_of_what_it_predicts(self):
        for row in self.rows:
            if row["machine"]:
                name, _, without = row["machine"].partition(" without ")
                text = (SOURCE / "inputs/machines" / f"{name}.toml").read_text(encoding="utf-8")
                if without:  # made of the other lengths of the same run
                    self.assertEqual(without, row["tokens"], row)
                    self.assertIn(row["source"].split(":")[0], text, row)
                else:
                    self.assertNotIn(row["source"].split(", ")[0], text, row)


    def test_machine_files_state_the_errors_of_what_was_published(self):
        sizes = collections.defaultdict(list)
        for row in rows_of(SOURCE / "results/prediction/published.csv"):
            gpu = row["gpu"].split("-")[0].split(" ")[0].lower()
            sizes[gpu, int(row["head_dim"])].append(abs(float(row["error_percent"])))
        for path in sorted((SOURCE / "inputs/machines").glob("*.toml")):
            model = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
            heads = {kernel["head_dim"] for kernel in model["kernels"]}
            own = sorted(size for head in heads for size in sizes[path.stem.split("-")[0], head])
            stated = model.get("error", {"value": 0, "source": "0 figures"})
            self.assertAlmostEqual(stated["value"], own[math.ceil(0.9 * len(own)) - 1] / 100 if own else 0, 9, path.name)
            self.assertIn(f"{len(own)} figures", stated["source"], path.name)


class Predictions(unittest.TestCase):
    def test_recorded_ones_are_those_of_this_program(self):
        recorded = rows_of(SOURCE / "results/prediction/published.csv")
        done = run(SOURCE, "--only", "zhuzilin")
        self.assertEqual(done.returncode, 0, done.stderr)
        wanted = [", ".join(row.values()) for row in recorded if "zhuzilin" in row["source"]]
        self.assertEqual(done.stdout.splitlines(), wanted)

    def test_misses_of_the_record_have_reasons(self):
        recorded = rows_of(SOURCE / "results/prediction/published.csv")
        self.assertGreater(len(recorded), 100)
        for row in recorded:
            limit = 10 if row["source"].startswith("results/") else 20
            self.assertEqual(abs(float(row["error_percent"])) > limit, bool(row["reason"]), row)

    def copy(self, folder, **changes):
        """A tree with two figures, of which the first is changed."""
        root = pathlib.Path(folder)
        for name in ("results", "inputs/published"):
            (root / name).mkdir(parents=True)
        (root / "inputs/machines").symlink_to(SOURCE / "inputs/machines")
        for script in ("published.py", "surface.py", "gyre_result.py"):
            shutil.copy(SOURCE / "results" / script, root / "results")
        rows = [row for row in rows_of(SOURCE / "inputs/published/attention.csv") if row["record"] in ("6", "50")]
        rows[0].update(changes)
        with open(root / "inputs/published/attention.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        return root

    def ends(self, reasons, message, **changes):
        with tempfile.TemporaryDirectory() as folder:
            root = self.copy(folder, **changes)
            (root / "inputs/published/reasons.csv").write_text(f"records,reason\n{reasons}\n", encoding="utf-8")
            done = run(root, "-o", folder)
            self.assertEqual(done.returncode, 1 if message else 0, done.stderr)
            self.assertIn(message, done.stderr)

    def test_a_miss_needs_a_reason_and_a_reason_a_miss(self):
        self.ends("50,a slow host", "")
        self.ends("", "a miss without a reason: 50, ")
        self.ends("50 6,a slow host", "a reason, but no miss: record 6: a slow host")

    def test_mistakes_are_refused(self):
        self.ends("", "record 6: unit 'furlong'; wanted: iter/s", unit="furlong")
        self.ends("", "record 6: ", predict="--schedule rings")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
