#!/usr/bin/env python3
"""gyre-study compare: two runs of one build are the same, what became slower is found, and the exit code says so.

Usage: test_study_compare.py SOURCE_DIR BUILD_DIR
"""

import argparse
import json
import math
import random
import sys
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

SOURCE = Path(sys.argv[1]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import Scratch, gyre_study  # noqa: E402
from gyre_study import commands, noise  # noqa: E402
from gyre_study.compare import ALL_ROWS, Family, Tester, changed, compare, families_of  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.identity import Experiment, given_options  # noqa: E402
from gyre_study.sides import Compared, Side  # noqa: E402

LEAST = math.log(1.05)
TEN_PERCENT = math.log(1.1)
SAMPLES = 10
SPREAD_OF_MEDIAN = 0.371  # of ten normal samples; a test draws them


def experiments(rows: int) -> list[Experiment]:
    """As many rows as wanted: schedules x passes x tokens."""
    passes = ("fwd", "bwd") if rows % 2 == 0 else ("fwd",)
    schedules = "abcdefgh"[: max(1, rows // len(passes))]
    each = [{"schedule": one, "pass": way, "tokens": 1024 << size}
            for size in range(-(-rows // (len(passes) * len(schedules))))
            for one in schedules for way in passes]
    return [Experiment("gyre-attention", 2, 1, key) for key in each[:rows]]


class Machine:
    """Draws logarithms of times, [comparisons, runs, rows]. Shares of the time: `drift` of a run, common to its rows;
    `own` of a row in a run; `inside` of a sample, or None: each row another, between 0.5 and 10 %."""

    def __init__(self, seed: int, drift: float, own: float, inside: float | None) -> None:
        self.rng = np.random.default_rng(seed)
        self.drift, self.own, self.inside = drift, own, inside

    def draw(self, comparisons: int, runs: int, rows: int) -> np.ndarray:
        normal = self.rng.standard_normal
        spread = 0.005 * 20 ** self.rng.random((comparisons, 1, rows)) if self.inside is None else self.inside
        medians = SPREAD_OF_MEDIAN * spread * normal((comparisons, runs, rows))
        return (medians + self.drift * normal((comparisons, runs, 1))
                + self.own * normal((comparisons, runs, rows)))


def alarms(times: np.ndarray, before: int, cases: list[Experiment]) -> np.ndarray:
    """Of each comparison, whether anything counts as changed: the first step of changed(), for all at once."""
    bad = np.zeros(len(times), bool)
    for family in families_of(cases, 0.01):
        cells = noise.cell_means(times, family.cells)
        test = noise.test_by_runs(cells, before, family.level)
        shift = cells[:, before:].mean(1) - cells[:, :before].mean(1)
        large = np.abs(test.change) >= LEAST
        if len(family.cells) > 1:
            large |= ((2 * np.abs(test.change) >= LEAST) & (np.abs(shift) >= LEAST)
                      & (test.change * shift > 0))
        bad |= ((test.strength > 1) & large).any(-1)
    return bad


def found_in(times: np.ndarray, before: int, families: list[Family], drift: float | None = None) -> dict[str, float]:
    """Names and changes of one comparison, [runs, rows]."""
    tester = Tester(times.copy(), before, np.full(times.shape[1], 0.0001), SAMPLES - 1, drift)
    return {name: one.change for name, one in changed(tester, families, LEAST).items()}


class Simulation(unittest.TestCase):
    """The model of noise.py, and what it can find."""

    # drift of a run, of a row in a run, inside of a run (None: each row another)
    NOISE = ((0, 0, 0.005), (0, 0, 0.1), (0, 0, None), (0.03, 0, 0.01), (0.05, 0, 0.02), (0.15, 0, 0.1),
             (0, 0.05, 0.01), (0, 0.15, 0.02), (0.1, 0.1, 0.005), (0.1, 0.03, None))

    def test_false_alarms(self) -> None:
        """Two sides of one build: 1 % of comparisons have a verdict, whatever the noise and the number of rows."""
        total = []
        for rows in (1, 2, 4, 7, 8, 16, 64):
            cases, comparisons = experiments(rows), 2000 if rows < 16 else 1000
            for seed, noise_of in enumerate(self.NOISE):
                times = Machine(seed, *noise_of).draw(comparisons, 6, rows)
                share = float(alarms(times, 3, cases).mean())
                total.append(share)
                self.assertLess(share, 0.01 + 3.3 * math.sqrt(0.01 / comparisons), (rows, noise_of))
        self.assertLessEqual(float(np.mean(total)), 0.01)
        self.assertGreater(float(np.mean(total)), 0.003)  # not because nothing is ever found

    def test_false_alarms_of_the_whole_comparison(self) -> None:
        """changed() finds something exactly where the first step does."""
        for rows in (1, 4, 16):
            cases = experiments(rows)
            times = Machine(1, 0.1, 0.05, 0.02).draw(2000, 6, rows)
            bad = alarms(times, 3, cases)
            for place in [*np.flatnonzero(bad)[:10], *np.flatnonzero(~bad)[:20]]:
                self.assertEqual(bool(found_in(times[place], 3, families_of(cases, 0.01))), bool(bad[place]), (rows, place))

    def found(self, rows: int, what: str, runs: int, noise_of: tuple[float, float, float],
              comparisons: int = 80, drift: float | None = None) -> float:
        """Share of comparisons in which a change of 10 % of some rows is found, and nothing else is said to be slower."""
        cases = experiments(rows)
        times = Machine(rows, *noise_of).draw(comparisons, 2 * runs, rows)
        names = {"all": ALL_ROWS, "half": "pass=bwd", "schedule": "schedule=b", "one": cases[1].name}
        own = [place for place, case in enumerate(cases)
               if what == "all" or names[what] in (case.name, *(f"{key}={value}" for key, value in case.key.items()))]
        times[:, runs:, own] += TEN_PERCENT
        good, families = 0, families_of(cases, 0.01)
        for one in times:
            found = found_in(one, runs, families, drift)
            slower = {name for name, change in found.items() if change > 0}
            good += slower == {names[what]}
        return good / comparisons

    def test_three_runs_at_a_drift_that_rows_share(self) -> None:
        for rows in (4, 8, 16, 64):
            for what in ("half", "schedule", "one"):
                self.assertGreaterEqual(self.found(rows, what, 3, (0.03, 0, 0.01)), 0.9, (rows, what))
        self.assertGreaterEqual(self.found(2, "one", 3, (0.03, 0, 0.01)), 0.9)

    def test_three_runs_at_a_drift_of_each_row(self) -> None:
        for rows, what in ((8, "all"), (16, "all"), (64, "all"), (64, "half"), (64, "schedule")):
            self.assertGreaterEqual(self.found(rows, what, 3, (0, 0.03, 0.01)), 0.9, (rows, what))

    def test_limits_that_the_page_states(self) -> None:
        """What three runs cannot find at 3 %: README says so, and how many runs do."""
        shared, own = (0.03, 0, 0.01), (0, 0.03, 0.01)
        self.assertLess(self.found(16, "all", 3, shared), 0.5)
        self.assertGreaterEqual(self.found(16, "all", 6, shared), 0.9)
        self.assertGreaterEqual(self.found(16, "all", 4, shared, drift=0.03), 0.9)
        self.assertLess(self.found(16, "one", 3, own), 0.5)
        for what, runs in (("half", 4), ("schedule", 5), ("one", 8)):
            self.assertGreaterEqual(self.found(16, what, runs, own), 0.9, what)

    def test_any_half_of_the_rows(self) -> None:
        """Rows that have no value in common: something became slower, by a group that holds most of them, or by rows."""
        rng = np.random.default_rng(3)
        families = families_of(experiments(16), 0.01)
        for times in Machine(5, 0.01, 0, 0.01).draw(30, 6, 16):
            times[3:, rng.permutation(16)[:8]] += TEN_PERCENT
            self.assertTrue(any(change > 0 for change in found_in(times, 3, families).values()))

    def test_one_run_a_side(self) -> None:
        """A verdict is what exceeds the stated drift: false alarms are 1 % where it is true."""
        for rows in (1, 8):
            families, bad = families_of(experiments(rows), 0.01), 0
            for times in Machine(7, 0.05, 0.0, 0.01).draw(300, 2, rows):
                bad += bool(found_in(times, 1, families, 0.05))
            self.assertLessEqual(bad, 9, rows)
        cases = experiments(16)
        families = families_of(cases, 0.01)
        for times in Machine(8, 0.03, 0, 0.01).draw(20, 2, 16):
            times[1] += [math.log(2) if case.key["pass"] == "fwd" else 0 for case in cases]
            self.assertEqual([*found_in(times, 1, families, 0.05)], ["pass=fwd"])
            times[1] += [0 if case.key["pass"] == "fwd" else math.log(2) for case in cases]
            self.assertEqual([*found_in(times, 1, families, 0.05)], [ALL_ROWS])

    def test_a_stated_drift_that_runs_refute(self) -> None:
        times = np.zeros((6, 2))
        times[:, :] = np.array([-0.2, 0, 0.2, -0.1, 0.1, 0.3])[:, None]
        tester = Tester(times, 3, np.full(2, 1e-6), 9, 0.01)
        self.assertIsNone(tester.drift)
        self.assertIn("they scatter more than the stated 1 %", tester.source)
        self.assertEqual(Tester(times / 100, 3, np.full(2, 1e-6), 9, 0.01).drift, 0.01)


class Statistics(unittest.TestCase):
    def test_students_t(self) -> None:
        for freedom, wanted in ((1, 63.657), (2, 9.925), (3, 5.841), (4, 4.604), (5, 4.032), (10, 3.169), (60, 2.660)):
            self.assertAlmostEqual(noise.t_quantile(0.01, freedom), wanted, delta=6e-4)
        self.assertAlmostEqual(noise.t_quantile(0.0001, 4), 15.544, delta=1e-3)
        self.assertAlmostEqual(noise.t_quantile(0.05, 0), 1.95996, delta=1e-5)

    def test_spread_of_a_median(self) -> None:
        samples = np.random.default_rng(1).standard_normal((40000, SAMPLES))
        self.assertAlmostEqual(float(np.median(samples, -1).std()), SPREAD_OF_MEDIAN, delta=0.005)
        found = [noise.variance_of_median(np.exp(0.05 * one)) for one in samples[:2000]]
        self.assertAlmostEqual(float(np.mean(found)), (0.05 * SPREAD_OF_MEDIAN) ** 2, delta=1e-4)

    def test_polygamma(self) -> None:
        self.assertAlmostEqual(float(noise.polygamma(0, np.array(1.0))), -0.5772156649, delta=1e-8)
        self.assertAlmostEqual(float(noise.polygamma(1, np.array(0.5))), math.pi**2 / 2, delta=1e-7)

    def test_cells_lend_degrees_of_freedom_where_they_agree(self) -> None:
        rng = np.random.default_rng(2)
        same = rng.chisquare(4, 64) / 4
        _, freedom = noise.moderated(same, 4)
        self.assertGreater(freedom[0], 12)
        variance, freedom = noise.moderated(same * 100.0 ** rng.uniform(-1, 1, 64), 4)
        self.assertLess(freedom[0], 7)
        self.assertGreater(variance.max() / variance.min(), 100)
        few = noise.moderated(same[:4], 4)
        self.assertEqual((few[0].tolist(), few[1].tolist()), (same[:4].tolist(), [4] * 4))

    def test_families(self) -> None:
        names = [family.names for family in families_of(experiments(8), 0.01)]
        self.assertEqual(names[0], [ALL_ROWS])
        self.assertEqual(len(names[1]), 8)
        self.assertEqual(names[2:], [[f"schedule={one}" for one in "abcd"], ["pass=fwd", "pass=bwd"]])
        self.assertAlmostEqual(sum(family.level for family in families_of(experiments(8), 0.01)), 0.01)


class Verdicts(unittest.TestCase):
    def sides(self, seed: int, factors: list[float], **more: object) -> list[dict[str, Side]]:
        rng, found = random.Random(seed), []
        for factor in factors:
            found.append({case.name: Side(made.times_around(10 * (factor if case.key["pass"] == "bwd" else 1), 9, 0.01, rng),
                                          False, "") for case in experiments(8)})
        return found

    def compare(self, before, after, **more):
        cases = {case.name: case for case in experiments(8)}
        return compare(Compared(before, after, cases, ([], [])), 0.05, 0.01, **more)

    def test_a_kernel_that_half_of_the_rows_run(self) -> None:
        found = self.compare(self.sides(1, [1, 1, 1]), self.sides(2, [1.12, 1.12, 1.12]))
        self.assertEqual([(one.name, one.verdict) for one in found.groups], [("pass=bwd", "slower")])
        self.assertAlmostEqual(found.groups[0].ratio, 1.12, delta=0.02)
        self.assertEqual([one.verdict for one in found.changes].count("slower"), 4)
        self.assertEqual({one.group for one in found.changes}, {"", "pass=bwd"})
        self.assertIn("estimated from 3 runs before and 3 after", found.between)
        self.assertIsNone(found.stated)
        back = self.compare(self.sides(2, [1.12, 1.12, 1.12]), self.sides(1, [1, 1, 1]))
        self.assertEqual([(one.name, one.verdict) for one in back.groups], [("pass=bwd", "faster")])
        self.assertFalse(back.slower)

    def test_one_row_of_two(self) -> None:
        """What the other is held against is the row without its change."""
        before, after = self.sides(1, [1, 1, 1]), self.sides(2, [1.3, 1.3, 1.3])
        names = [*before[0]][:2]
        sides = [[{name: run[name] for name in names} for run in side] for side in (before, after)]
        found = self.compare(*sides)
        self.assertEqual([one.verdict for one in found.changes], ["unchanged", "slower"])
        self.assertAlmostEqual(found.changes[0].change, 1, delta=0.03)
        self.assertAlmostEqual(found.changes[1].change, 1.3, delta=0.03)

    def test_without_numpy(self) -> None:
        options = argparse.Namespace(runs=["a", "b"])
        with mock.patch.dict(sys.modules, {"gyre_study.compare": None}):
            with self.assertRaisesRegex(StudyError, "compare needs numpy .*or pip"):
                commands.compare(options)

    def test_a_row_that_a_run_lacks_or_has_wrong(self) -> None:
        before, after = self.sides(1, [1, 1, 1]), self.sides(2, [1, 1, 1])
        names = [*before[0]]
        del before[1][names[0]]
        after[2][names[1]].wrong = True
        before[0][names[2]].samples.clear()
        found = {one.case: one.verdict for one in self.compare(before, after).changes}
        self.assertEqual([found[name] for name in names[:4]], ["not in all runs", "wrong result", "no time", "unchanged"])

    def test_noise_is_said(self) -> None:
        rng = random.Random(8)
        both = [[{case.name: Side(made.times_around(10 * math.exp(rng.gauss(0, 0.5)), 8, 0.1, rng), False, "")
                  for case in experiments(8)} for _ in range(3)] for _ in range(2)]
        self.assertEqual({one.verdict for one in self.compare(*both).changes}, {"too noisy"})


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

    def test_several_runs_a_side(self) -> None:
        before = [self.write(f"a{run}.jsonl", 1, run) for run in range(3)]
        same = [self.write(f"b{run}.jsonl", 1, 10 + run) for run in range(3)]
        slow = [self.write(f"c{run}.jsonl", 1.1, 20 + run) for run in range(3)]
        code, said = self.compare(*before, "--", *same)
        self.assertEqual(code, 0, said)
        self.assertIn("# noise between runs: estimated from 3 runs before and 3 after", said)
        code, said = self.compare(*before, "--", *slow, "--json")
        self.assertEqual(code, 1, said)
        self.assertEqual([one["name"] for one in json.loads(said)["groups"]], ["schedule=ring"])
        self.assertEqual(json.loads(said)["runs"], [3, 3])
        code, said = self.compare(before[0], slow[0])  # too little for one run a side
        self.assertEqual(code, 0, said)
        self.assertIn("4 unchanged, beyond a stated drift of 5 %", said)
        self.assertEqual(self.compare(before[0], slow[0], "--drift", 1)[0], 1)
        # A file in which every row was measured three times holds three runs; one more of one row replaces the last.
        together = self.place / "all.jsonl"
        texts = [file.read_text().replace('"r1"', f'"r{number}"') for number, file in enumerate(before)]
        together.write_text("".join(texts))
        self.assertIn("3 runs before and 3 after", self.compare(together, "--", *slow)[1])
        row = next(line for line in texts[2].splitlines() if '"kind": "row"' in line)
        together.write_text(texts[0] + texts[2].splitlines()[0] + "\n" + row + "\n")
        found = json.loads(self.compare(together, before[0], "--json")[1])
        self.assertEqual((found["runs"], [one["before"] for one in found["changes"]][0]), ([1, 1], "all.jsonl:8"))

    def test_different_experiments_are_no_row(self) -> None:
        def given(*options: str):
            return lambda text: text.replace('"argv": ["gyre-attention"]', json.dumps(
                {"argv": ["gyre-attention", *options]})[1:-1])

        plain = self.write("a.jsonl", 1, 1, change=given("--tokens", "512"))
        other = self.write("b.jsonl", 1, 2, change=given("--collectives", "library", "--json", "b.jsonl"))
        code, said = self.compare(plain, other)
        self.assertEqual((code, "the two are different experiments: collectives: default before, library after" in said),
                         (2, True), said)
        # The configuration says it, and the other side, which is older, was not given it.
        newer = self.write("c.jsonl", 1, 3, change=lambda text: given("--collectives", "messages")(text).replace(
            '"heads": 8', '"heads": 8, "collectives": "messages", "seed": 1'))
        self.assertIn("collectives: default before, messages after", self.compare(plain, newer)[1])
        usual = self.write("d.jsonl", 1, 4, change=lambda text: text.replace(
            '"heads": 8', '"heads": 8, "collectives": "messages", "seed": 1'))
        self.assertIn("4 unchanged", self.compare(plain, usual)[1])
        self.assertIn("4 unchanged", self.compare(usual, newer)[1])
        inputs = [self.write(f"{name}.jsonl", 1, 5, change=lambda text: text.replace(
            '"inputs": []', f'"inputs": [{{"file": "x.h5", "sha256": "{name * 64}"}}]')) for name in "01"]
        self.assertIn(f"inputs: {'0' * 64} before, {'1' * 64} after", self.compare(*inputs)[1])
        self.assertEqual(given_options("gyre-x --heads 8K --sinks -n 3 --mask=full --gen a=-1 --drift -0.5".split()),
                         {"heads": "8192", "sinks": "true", "mask": "full", "gen": "a=-1", "drift": "-0.5"})

    def test_recorded_results(self) -> None:
        """Of programs that recorded fewer options in the configuration: the command line tells them apart."""
        folder = SOURCE / "results/cpu-2core"
        for name in ("all-gather", "all-to-all"):
            code, said = self.compare(*(folder / f"attention-{name}-{how}.json" for how in ("messages", "library")))
            self.assertEqual(code, 2, said)
            self.assertIn("collectives: messages before, library after", said)

    def test_builds_and_environments_are_named(self) -> None:
        def of(flags: str, kind: str = "Release", threads: str = "1"):
            return lambda text: text.replace('"compiler": "GNU 12.2.0"', f'"compiler": "GNU 12.2.0", "flags": "{flags}"'
                                             ).replace('"Release"', f'"{kind}"').replace(
                '"environment": {}', f'"environment": {{"OMP_NUM_THREADS": "{threads}"}}')

        plain = self.write("a.jsonl", 1, 1, change=of("-O3 -DNDEBUG"))
        self.assertNotIn("differs", self.compare(plain, plain)[1])
        fast = self.write("b.jsonl", 1, 2, change=of("-O1 -ffast-math -DNDEBUG", threads="2"))
        said = self.compare(plain, fast)[1]
        self.assertIn("# differs: build flags: -O3 -DNDEBUG before, -O1 -ffast-math -DNDEBUG after", said)
        self.assertIn("# differs: environment OMP_NUM_THREADS: 1 before, 2 after", said)
        self.assertIn("4 unchanged, beyond a stated drift of 5 %; NOT COMPARABLE: build flags: ", said)
        harmless = self.write("c.jsonl", 1, 3, change=of("-O3 -DNDEBUG -DOTHER"))
        said = self.compare(plain, harmless)[1]
        self.assertIn("# differs: build flags", said)
        self.assertNotIn("NOT COMPARABLE", said)
        debug = self.write("d.jsonl", 1, 4, change=of("-O3 -DNDEBUG", "Debug"))
        self.assertIn("NOT COMPARABLE: build type: Release before, Debug after", self.compare(plain, debug)[1])

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
        self.assertIn("\nslower~          +50", said)
        self.assertIn("# 4 rows in both: 2 slower, 2 unchanged", said)

    def test_refused(self) -> None:
        before = self.write("a.jsonl", 1, 1)
        other = self.write("b.jsonl", 1, 2,
                           change=lambda text: text.replace('"heads": 8', '"heads": 9'))
        for words, code, wanted in (((before, other), 2, "the two are different experiments: heads: 8 before, 9 after"),
                                    ((before, self.place / "none.jsonl"), 2, "no such file"),
                                    ((self.place, before), 2, "no rows/*.jsonl are there"),
                                    ((before, before, before), 2, "wanted: BEFORE AFTER, or BEFORE ... -- AFTER"),
                                    ((before, "--"), 2, "wanted: BEFORE AFTER, or BEFORE ... -- AFTER"),
                                    ((before, before, "--drift", -1), 2, "--drift -1.0: wanted: at least 0"),
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


unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
