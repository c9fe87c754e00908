#!/usr/bin/env python3
"""Checks inputs/published/, results/published.py and results/errors.py: figures have sources, recorded predictions are those of the program
that is built, misses have reasons, and mistakes are refused.

test_published.py SOURCE_DIR BUILD_DIR
"""

import csv
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE, BUILD = (pathlib.Path(a).resolve() for a in (sys.argv[1:3] if len(sys.argv) > 2 else (".", "build/ci")))
sys.path.insert(0, str(SOURCE / "results"))

import errors


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

    def test_copies_are_of_predicted_figures_of_several_gpus(self):
        predicted = {row["record"] for row in self.rows if row["machine"] and row["gpus"] != "1"}
        records = [record for row in rows_of(SOURCE / "inputs/published/copies.csv") for record in row["records"].split()]
        self.assertEqual(len(records), len(set(records)))
        self.assertLessEqual(set(records), predicted)
        self.assertGreater(len(records), 30)

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


class Recurrences(unittest.TestCase):
    def setUp(self):
        self.rows = rows_of(SOURCE / "inputs/published/recurrences.csv")

    def test_rates_are_of_one_gpu_and_their_source_is_in_the_machine_file(self):
        for row in self.rows:
            self.assertRegex(row["source"], r"^https://github\.com/\S+/pull/\d+$")
            if row["sets_rate"]:
                self.assertEqual((row["gpus"], row["reason"]), ("1", ""), row)
                text = (SOURCE / "inputs/machines" / f"{row['machine']}.toml").read_text(encoding="utf-8")
                self.assertIn(row["source"], text, row)
        self.assertGreater(sum(row["gpus"] != "1" for row in self.rows), 4)

    def predicted(self, change=lambda rows: None):
        """The script in a tree of changed figures: exit code, what it wrote, its errors."""
        rows = [dict(row) for row in self.rows]
        change(rows)
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "results").mkdir()
            (root / "inputs/published").mkdir(parents=True)
            (root / "inputs/machines").symlink_to(SOURCE / "inputs/machines")
            for script in ("recurrences.py", "published.py", "surface.py", "gyre_result.py"):
                shutil.copy(SOURCE / "results" / script, root / "results")
            with open(root / "inputs/published/recurrences.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
            done = subprocess.run(["/usr/bin/python3", root / "results/recurrences.py", BUILD / "apps", "-o", root / "out.txt"],
                                  capture_output=True, text=True, timeout=120, check=False)
            text = (root / "out.txt").read_text(encoding="utf-8") if (root / "out.txt").exists() else ""
            return done.returncode, text, done.stderr

    def test_recorded_predictions_are_those_of_this_program(self):
        recorded = (SOURCE / "results/prediction/recurrences.txt").read_text(encoding="utf-8")
        self.assertEqual(self.predicted(), (0, recorded, ""))

    def test_a_miss_needs_a_reason_and_a_reason_a_miss(self):
        missed = [i for i, row in enumerate(self.rows) if row["reason"]][0]
        met = [i for i, row in enumerate(self.rows) if not row["reason"] and not row["sets_rate"]][0]
        code, _, said = self.predicted(lambda rows: rows[missed].update(reason=""))
        self.assertEqual((code, "a miss without a reason: " in said), (1, True), said)
        code, _, said = self.predicted(lambda rows: rows[met].update(reason="none"))
        self.assertEqual((code, "a reason, but no miss: " in said), (1, True), said)

    def test_a_kind_that_the_machine_lacks_is_refused(self):
        code, _, said = self.predicted(lambda rows: rows[0].update(kind="ssd"))
        self.assertEqual((code, "no recurrence ssd fwd of bf16" in said), (1, True), said)


class Errors(unittest.TestCase):
    def test_machine_files_state_those_of_published_figures(self):
        done = subprocess.run(["/usr/bin/python3", SOURCE / "results/errors.py", "--check", *(SOURCE / "inputs/machines").glob("*.toml")],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_they_cover_figures_that_they_are_not_made_of(self):
        rows = [row for row in errors.figures() if row["head_dim"] != "32"]  # no kernel of it was measured
        covered = []
        for row in rows:
            rest = [other for other in rows if other["source"].split(", ")[0] != row["source"].split(", ")[0]]
            share, _ = errors.error_of(rest, errors.gpu_of(row), *errors.group_of(row))
            covered.append(errors.error_size(row) <= share)
        self.assertGreater(len(covered), 150)
        self.assertTrue(0.85 <= sum(covered) / len(covered) <= 0.95, sum(covered) / len(covered))

    def test_margins_divide_right_orders_from_others(self):
        def figure(predicted, published):
            return {"gpu": "X", "source": "s", "gpus": "8", "tokens": "1", "heads": "1", "kv_heads": "1", "head_dim": "1",
                    "mask": "m", "pass": "fwd", "machine": "x", "predicted_ms": predicted, "copied_ms": 0, "published_ms": published}
        # The ten pairs of the first five are in the other order; three of them are 2.9 % apart or more.
        times = [1, 1.01, 1.02, 1.03, 1.04, 2, 3, 4, 5, 6]
        rows = [figure(t, 1 / t if t < 1.1 else t) for t in times]
        self.assertEqual(errors.order_margin(rows, "x"), (0.03, "45 pairs of X, 38 so far apart"))
        rows = [figure(t, -t) for t in times]
        self.assertEqual(errors.order_margin(rows, "x"), (5.001, "45 pairs of X, 0 so far apart"))


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

    def test_braces_stand_for_the_mean_of_several_predictions(self):
        def predicted(schedules):
            with tempfile.TemporaryDirectory() as folder:
                root = self.copy(folder, predict=f"--schedule {schedules} --layout contiguous")
                (root / "inputs/published/reasons.csv").write_text("records,reason\n", encoding="utf-8")
                (root / "inputs/published/copies.csv").write_text("records,bytes,of\n", encoding="utf-8")
                done = run(root, "--only", "README")
                self.assertEqual(done.returncode, 0, done.stderr)
                return [float(field) for field in done.stdout.split(", ")[14:17]]  # predicted, naive, error
        one, other, both = (predicted(text) for text in ("ring", "all-to-all", "{ring,all-to-all}"))
        self.assertGreater(one[0], 1.2 * other[0])
        self.assertAlmostEqual(both[0], (one[0] + other[0]) / 2, delta=1e-3 * both[0])
        self.assertAlmostEqual(both[1], (one[1] + other[1]) / 2, delta=1e-3 * both[1])
        self.assertAlmostEqual(both[2], (one[2] + other[2]) / 2, delta=0.11)

    def ends(self, reasons, message, copies="", **changes):
        with tempfile.TemporaryDirectory() as folder:
            root = self.copy(folder, **changes)
            (root / "inputs/published/reasons.csv").write_text(f"records,reason\n{reasons}\n", encoding="utf-8")
            (root / "inputs/published/copies.csv").write_text(f"records,bytes,of\n{copies}\n", encoding="utf-8")
            done = run(root, "-o", folder)
            self.assertEqual(done.returncode, 1 if message else 0, done.stderr)
            self.assertIn(message, done.stderr)

    def test_a_miss_needs_a_reason_and_a_reason_a_miss(self):
        self.ends("50,a slow host", "")
        self.ends("", "a miss without a reason: 50, ")
        self.ends("50 6,a slow host", "a reason, but no miss: record 6: a slow host")

    def test_copies_of_a_source_take_the_rate_of_copies(self):
        # Record 6: 65536 tokens of 32 heads (8 KV) of 128 on 8 GPUs; an H800 copies 2.9e12 B/s.
        of_rank = 65536 // 8 * 128 * 2
        for copies, size in (("2Q + K", (2 * 32 + 8) * of_rank), ("0.5A", 4 * 8 * of_rank)):
            with tempfile.TemporaryDirectory() as folder:
                root = self.copy(folder)
                times = []
                for line in ("", f"6,{copies},none"):
                    (root / "inputs/published/copies.csv").write_text(f"records,bytes,of\n{line}\n", encoding="utf-8")
                    (root / "inputs/published/reasons.csv").write_text("records,reason\n50,a slow host\n", encoding="utf-8")
                    done = run(root, "-o", folder)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    times += [float(row["copied_ms"]) for row in rows_of(root / "published.csv") if row["record"] == "6"]
                self.assertEqual(times[0], 0)
                self.assertAlmostEqual(times[1] / (1e3 * size / 2.9e12), 1, delta=1e-3)

    def test_mistakes_are_refused(self):
        self.ends("50,a slow host", "copies for record 7, which is not predicted", copies="7,Q,none")
        self.ends("50,a slow host", "copies of '3X'; wanted: as 2Q + 3K + A", copies="6,3X,none")
        self.ends("", "record 6: unit 'furlong'; wanted: iter/s", unit="furlong")
        self.ends("", "record 6: ", predict="--schedule rings")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
