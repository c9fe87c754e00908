#!/usr/bin/env python3
"""gyre-study compare: two runs of one build are the same, what became slower is found, and the exit code says so.

Usage: test_study_compare.py SOURCE_DIR BUILD_DIR
"""

import json
import math
import random
import sys
import unittest
from pathlib import Path

SOURCE = Path(sys.argv[1]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import Scratch, gyre_study  # noqa: E402
from gyre_study import noise  # noqa: E402
from gyre_study.compare import Side, compare  # noqa: E402


def sides(rng: random.Random, cases: int, samples: int, offset: float,
          changed: dict[int, float]) -> list[dict[str, Side]]:
    """Two runs of each case. Cases scatter by 1 to 16 %; a run as a whole is off by `offset` times that."""
    both: list[dict[str, Side]] = [{}, {}]
    for case in range(cases):
        spread, median = 0.01 * 16 ** rng.random(), math.exp(rng.uniform(-3, 5))
        for run, side in enumerate(both):
            factor = changed.get(case, 1.0) if run else 1.0
            own = median * factor * math.exp(rng.gauss(0, offset * spread))
            side[str(case)] = Side(made.times_around(own, samples, spread, rng), False, "")
    return both


class Statistics(unittest.TestCase):
    def test_rank_test_against_all_orders(self) -> None:
        # 3 and 3 samples: 20 orders, of which one each is U = 0 and U = 9, and one each U = 1 and U = 8
        self.assertAlmostEqual(noise.p_value([1, 2, 3], [4, 5, 6]), 2 / 20)
        self.assertAlmostEqual(noise.p_value([1, 2, 4], [3, 5, 6]), 4 / 20)
        self.assertEqual(noise.p_value([1, 4, 5], [2, 3, 6]), 1.0)
        self.assertEqual(sum(noise.ways(4, 5, u) for u in range(21)), math.comb(9, 4))

    def test_rank_test_of_many_and_of_ties(self) -> None:
        rng = random.Random(3)
        found = [noise.p_value([rng.gauss(0, 1) for _ in range(60)],
                               [rng.gauss(0, 1) for _ in range(60)]) for _ in range(200)]
        self.assertLess(sum(p < 0.1 for p in found), 40)
        self.assertGreater(sum(p < 0.1 for p in found), 5)
        self.assertEqual(noise.p_value([2.0] * 9, [2.0] * 9), 1.0)

    def test_interval_holds_the_ratio(self) -> None:
        rng = random.Random(4)
        inside = 0
        for _ in range(300):
            pair = made.times_around(10, 12, 0.05, rng), made.times_around(13, 12, 0.05, rng)
            ratio, low, high = noise.ratio_interval(*pair, 0.05)
            self.assertTrue(low <= ratio <= high)
            inside += low <= 1.3 <= high
        self.assertGreater(inside / 300, 0.92)

    def test_holm(self) -> None:
        for found, wanted in zip(noise.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06]):
            self.assertAlmostEqual(found, wanted)

    def test_scatter_is_of_those_that_did_not_change(self) -> None:
        rng = random.Random(5)
        values = [rng.gauss(0, 0.02) for _ in range(60)] + [rng.gauss(0.7, 0.3) for _ in range(30)]
        self.assertTrue(
            0.01 < noise.scatter(values) < 0.05, noise.scatter(values)
        )  # the standard deviation of all is 0.4
        self.assertEqual(noise.scatter([1.0] * 7), 0.0)

    def test_two_runs_of_one_build_are_the_same(self) -> None:
        rng = random.Random(6)
        for cases, samples, offset in ((1, 7, 0.5),
                                       (4, 10, 0.5),
                                       (12, 7, 0.5),
                                       (40, 12, 0.5),
                                       (40, 30, 1.0)):
            alarms = 0
            for _ in range(25):
                found = compare(*sides(rng, cases, samples, offset, {}), 0.05, 0.01)
                alarms += bool(found.groups) or any(change.verdict in ("slower", "faster")
                                                    for change in found.changes)
            self.assertLessEqual(alarms, 3, (cases, samples, offset))

    def test_what_became_slower_is_found(self) -> None:
        rng = random.Random(7)
        for cases, samples in ((1, 7), (12, 10), (40, 12)):
            changed = {case: 2.0 for case in range(0, cases, 3)}
            for _ in range(5):
                found = compare(*sides(rng, cases, samples, 0.3, changed), 0.05, 0.01)
                right = sum((change.verdict == "slower") == (int(change.case) in changed)
                            for change in found.changes)
                self.assertGreaterEqual(right, 0.8 * cases)
                back = compare(*reversed(sides(rng, cases, samples, 0.3, changed)), 0.05, 0.01)
                self.assertFalse(back.slower)
                self.assertTrue(any(change.verdict == "faster" for change in back.changes))

    def test_a_kernel_that_half_of_the_cases_run(self) -> None:
        """10 % slower: less than one case shows beyond the noise, and half of all, so that no scatter is left."""
        rng = random.Random(9)

        def side(factor: float) -> dict[str, Side]:
            return {f"schedule={schedule} pass={way} cp={cp}": Side(
                        made.times_around(10 * (factor if way == "bwd" else 1) * rng.gauss(1, 0.02),
                                          12, 0.02, rng), False, "") for schedule in "abcdefgh"
                    for way in ("fwd", "bwd") for cp in (1, 2)}

        for _ in range(10):
            found = compare(side(1), side(1.1), 0.05, 0.01)
            self.assertEqual([(one.name, one.verdict) for one in found.groups],
                             [("pass=bwd", "slower")])
            self.assertTrue(found.slower)
            self.assertAlmostEqual(found.groups[0].ratio, 1.1, delta=0.03)
            self.assertFalse(any("fwd" in one.case for one in found.changes
                                 if one.verdict == "slower"))
            self.assertFalse(compare(side(1), side(1), 0.05, 0.01).slower)
        everything = compare({"a": Side([1.0] * 9, False, "")}, {"a": Side([2.0] * 9, False, "")},
                             0.05, 0.01)
        self.assertEqual(everything.groups, [])  # one case is no group

    def test_interval_of_a_median(self) -> None:
        self.assertIsNone(noise.median_interval(range(6), 0.01))
        self.assertEqual(noise.median_interval(range(6), 0.05), (0, 5))  # 2 / 2^6 = 0.031
        self.assertAlmostEqual(
            noise.lowest_rank_sums(noise.MOST_SIGNED, 0.01),
            noise.lowest_rank_sums(noise.MOST_SIGNED + 1, 0.01),
            delta=30,  # of some 560: one more value, and the approximation
        )
        # Tables of the signed-rank test: of 10 values at 5 % the 9th mean from either end.
        values = [0.0, 1.1, 2.3, 3.6, 5.0, 6.5, 8.1, 9.8, 11.6, 13.5]
        means = sorted((x + y) / 2 for i, x in enumerate(values) for y in values[: i + 1])
        self.assertEqual(noise.median_interval(values, 0.05), (means[8], means[-9]))

    def test_noise_is_said(self) -> None:
        rng = random.Random(8)
        both = [{str(case): Side(made.times_around(10, 8, 0.6, rng), False, "")
                 for case in range(9)} for _ in range(2)]
        self.assertEqual({one.verdict for one in compare(*both, 0.05, 0.01).changes}, {"too noisy"})


class Command(Scratch):
    def write(self, name: str, factor: float, seed: int, count: int = 12,
              change=lambda text: text) -> Path:
        rng = random.Random(seed)
        keys = [{"schedule": one, "pass": "fwd", "tokens": tokens, "cp": 2}
                for one in ("ring", "halo") for tokens in (512, 1024)]
        rows = [(key,
                 made.times_around(10 * (factor if key["schedule"] == "ring" else 1), count, 0.01,
                                   rng)) for key in keys]
        made.write_results(self.place / name, rows, change=change)
        return self.place / name

    def compare(self, *words: object) -> tuple[int, str]:
        done = gyre_study("compare", *words)
        return done.returncode, done.stdout + done.stderr

    def test_files(self) -> None:
        before, same, slow = (self.write("a.jsonl", 1, 1), self.write("b.jsonl", 1, 2),
                              self.write("c.jsonl", 1.5, 3))
        self.assertEqual(self.compare(before, same)[0], 0)
        self.assertIn("4 unchanged", self.compare(before, same)[1])
        code, said = self.compare(before, slow)
        self.assertEqual(code, 1, said)
        self.assertIn("2 slower, 2 unchanged", said)
        self.assertIn("schedule=ring", said)
        self.assertNotIn("schedule=halo", said)
        self.assertIn("schedule=halo", self.compare(before, slow, "--all")[1])
        self.assertEqual(self.compare(slow, before)[0], 0)
        self.assertIn("2 faster", self.compare(slow, before)[1])
        self.assertEqual(self.compare(before, slow, "--min-effect", 80)[0], 0)
        data = json.loads(self.compare(before, slow, "--json")[1])
        self.assertEqual([one["verdict"] for one in data["changes"]].count("slower"), 2)

    def test_a_folder_and_a_document(self) -> None:
        before = self.write("study/rows/cp2.jsonl", 1, 1)
        lines = [json.loads(line) for line in before.read_text().splitlines()]
        rows = [line for line in lines if line["kind"] == "row"]
        document = {**lines[0], "results": rows, "status": lines[-1]["status"]}
        del document["kind"]
        (self.place / "one.json").write_text(json.dumps(document))
        self.assertIn("4 unchanged", self.compare(before.parent.parent, self.place / "one.json")[1])

    def test_what_cannot_be_said(self) -> None:
        before, few = self.write("a.jsonl", 1, 1), self.write("b.jsonl", 3, 2, count=2)
        code, said = self.compare(before, few)
        self.assertEqual((code, "4 too few samples" in said), (0, True), said)
        wrong = self.write("c.jsonl", 1, 3,
                           change=lambda text: text.replace('"result": "VALID"',
                                                            '"result": "INVALID"', 1))
        code, said = self.compare(before, wrong)
        self.assertEqual((code, "1 wrong result" in said), (1, True), said)
        torn = self.write("d.jsonl", 1, 4, change=lambda text: text[: text.rindex('{"schema')]
                          + '{"schema": "gy')
        self.assertIn("4 unchanged", self.compare(before, torn)[1])

    def test_rows_that_break_a_run_rule_are_named_first(self) -> None:
        def noisy(text: str) -> str:
            return text.replace('"result": "VALID", "reasons": []',
                                '"result": "UNOFFICIAL", "reasons": ["noisy: CV 31 %"]', 2)

        before, slow = self.write("a.jsonl", 1, 1), self.write("b.jsonl", 1.5, 2, change=noisy)
        self.assertNotIn("~", self.compare(before, before)[1])
        code, said = self.compare(before, slow)
        self.assertEqual(code, 1, said)
        self.assertTrue(said.startswith("# after: 2 of 4 rows break a run rule, such as: noisy: CV 31 %\n# a verdict"), said)
        self.assertEqual(said.count("\nslower~ "), 2, said)
        self.assertIn("# 4 rows in both: 2 slower, 2 unchanged", said)

    def test_refused(self) -> None:
        before = self.write("a.jsonl", 1, 1)
        other = self.write("b.jsonl", 1, 2,
                           change=lambda text: text.replace('"heads": 8', '"heads": 9'))
        for words, code, wanted in (((before, other), 2, "no row in common"),
                                    ((before, self.place / "none.jsonl"), 2, "no such file"),
                                    ((self.place, before), 2, "no rows/*.jsonl are there"),
                                    ((before, before, "--alpha", 1), 2,
                                     "--alpha 1.0: wanted: above 0, below 1"),
                                    ((before, before, "--min-effect", -1), 2, "--min-effect -1.0")):
            found = self.compare(*words)
            self.assertEqual(found[0], code, found[1])
            self.assertIn(wanted, found[1])
        for text, wanted in (("{}\n", "line 1: it is no line of results"), ("[\n", "line 1: ")):
            before.write_text(text)
            code, said = self.compare(before, other)
            self.assertEqual(code, 3, said)
            self.assertIn(wanted, said)
        (self.place / "x.sqlite").write_text("no database at all, but long enough to be one")
        self.assertIn("wanted: a file that gyre-study collect wrote",
                      self.compare(self.place / "x.sqlite", other)[1])


unittest.main(argv=sys.argv[:1])
