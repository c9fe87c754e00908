#!/usr/bin/env python3
"""gyre-study check and table: which results of official problems are accepted, and what the others are told.

Usage: test_study_official.py SOURCE_DIR BUILD_DIR
"""

import json
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import SMALL, Scratch, gyre_study  # noqa: E402
from gyre_study.app import App, load_app  # noqa: E402
from gyre_study.cases import expand  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.files import load_study  # noqa: E402
from gyre_study.folder import Folder, write_plan  # noqa: E402
from gyre_study.official import judge, problem_of  # noqa: E402

STUDIES = SOURCE / "slurm/studies"
OFFICIAL = sorted(file.stem for file in STUDIES.glob("official-*.toml"))
MEASURED = {"rate": 0.2, "share_of_limit": 0.8, "ideal_bytes": 1e7, "items": 1000, "cost": 1.01, "of_limit": 50.0}
SAID = {"heads": 1, "head_dim": 1, "mask": "causal", "tokens": 100, "source": "dist=histogram,count=1000"}


def app_of(name: str) -> App:
    """A program with its own options, of a build that is clean."""
    app = load_app(BUILD / "apps", name)
    return App(app.name, app.path, made.BUILD, app.options)


class Official(Scratch):
    def planned(self, name: str = "official-attention", size: str = "tiny", *chosen: str) -> Folder:
        """The folder of an official problem, with made-up results of all its cases."""
        study = load_study(STUDIES / f"{name}.toml", size, chosen)
        app = app_of(study.app)
        expansion = expand(study, SMALL, app, name)
        write_plan(self.path, study, SMALL, app, expansion, {})
        folder = Folder(self.path)
        inputs = [{"file": file, "sha256": sha} for file, sha in problem_of(study).inputs.items()]
        directions = ("fwd", "bwd") if "pass" in app.options else (None,)
        for placement in folder.placements:
            head = json.loads(made.run_line("r", placement.ranks, inputs=inputs))
            head["configuration"] |= SAID
            head["run"]["argv"] = [app.name, *placement.arguments, "--json", "x"]
            lines = [json.dumps(head) + "\n"]
            for case in placement.cases:
                key = {name: value for name, value in case.axes.items() if name in app.swept}
                for direction in directions:
                    own = {**key, **({"pass": direction, "tokens": 1 << 20} if direction else {})}
                    measured = {**own, **MEASURED}
                    if app.name == "gyre-pipeline":
                        measured |= {"tokens": 100, "rate": 2000.0}
                    lines.append(made.row_line("r", own, [50.0] * 9, ranks=placement.ranks, measurements=measured,
                                               model={"flops": 1e10 * placement.ranks, "bytes_wire": 0.0}))
            folder.rows_file(placement).write_text("".join([*lines, made.end_line("r")]), encoding="utf-8")
        return folder

    def change(self, folder: Folder, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes the first line of a kind in the file of the last placement."""
        file = folder.rows_file(folder.placements[-1])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        change(next(line for line in lines if line["kind"] == kind))
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def refused(self, folder: Folder, *reasons: str) -> None:
        """Exactly these reasons, each a part of what is said."""
        said = judge(Folder(folder.path), self.path).refused
        self.assertEqual(len(said), len(reasons), said)
        for reason in reasons:
            self.assertTrue(any(reason in one for one in said), (reason, said))
        done = gyre_study("check", folder.path)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertIn("REFUSED", done.stdout)

    def check(self, *words: object) -> str:
        done = gyre_study("check", *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_good_results_of_all_problems(self) -> None:
        figures = {
            "official-attention": "FIGURE 0.2 TFLOP/s/rank, 100.0 % of one rank; 2 ranks",
            "official-logprobs": "FIGURE 80.0 % of measured bandwidth, 0.2 GB/s/rank; 2 ranks",
            "official-pack": "FIGURE 2e+04 documents/s, cost 1.0100 max/mean; 1 rank, ",
            "official-pipeline": "FIGURE 1000 tokens/s/rank, 50.0 % of the limit; 2 ranks",
        }
        self.assertEqual(sorted(figures), OFFICIAL)
        results = self.place / "results"
        results.mkdir()
        for name, figure in figures.items():
            self.planned(name)
            said = self.check(self.path, "-o", results / f"{name}.json")
            self.assertIn(figure, said)
            self.assertTrue(said.endswith("\nACCEPTED\n"), said)
            self.assertEqual(self.check(results / f"{name}.json").splitlines()[1:], said.splitlines()[1:])
            self.assertNotIn(str(SOURCE), (results / f"{name}.json").read_text())
        done = gyre_study("table", results)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("| tiny |"), len(figures))
        self.assertIn("| attention | tiny | 2 x unknown, ? cores | 2 | 0.2 TFLOP/s/rank | 100.0 % of one rank |",
                      done.stdout)

    def test_all_sizes(self) -> None:
        for name in OFFICIAL:
            hashes = set()
            for size in ("tiny", "small", "base", "large"):
                study = load_study(STUDIES / f"{name}.toml", size)
                self.assertEqual(study.size, size)
                app = app_of(study.app)
                self.assertTrue(expand(study, SMALL, app, name).placements)
                hashes.add(problem_of(study).hash)
            self.assertEqual(len(hashes), 4)

    def test_a_median_that_is_not_that_of_the_samples(self) -> None:
        folder = self.planned()
        self.change(folder, "row", lambda row: row["statistics_ms"].update(median=0.05))
        self.refused(folder, "its median is not that of its samples")

    def test_rates_are_computed_again(self) -> None:
        for name, change, reason in (
            ("attention", lambda row: row["measurements"].update(rate=0.3), "its rate is 0.3; work over time is 0.2"),
            ("attention", lambda row: row["measurements"].pop("rate"), "its rate is nan; work over time is 0.2"),
            ("attention", lambda row: row["model"].update(flops=1e10 + 1), "10000000001 FLOPs are 2500000000.25 pairs"),
            ("attention", lambda row: row["model"].update(flops=1e16), "wanted: a whole number up to 549756338176"),
            ("attention", lambda row: row["model"].pop("flops"), "no FLOPs, tokens, heads, head_dim or v_head_dim"),
            ("logprobs", lambda row: row["measurements"].update(rate=0.3), "its rate is 0.3; work over time is 0.2"),
            ("logprobs", lambda row: row["measurements"].pop("ideal_bytes"), "work over time is nan"),
            ("pipeline", lambda row: row["measurements"].update(tokens=200, rate=4e3), "200 tokens; the run has 100"),
            ("pipeline", lambda row: row["measurements"].update(rate=4e3), "work over time is 2000"),
            ("pack", lambda row: row["measurements"].update(items=2000), "2000 items; the source has 1000"),
        ):
            folder = self.planned(f"official-{name}")
            self.change(folder, "row", change)
            self.refused(folder, reason)

    def test_one_number_of_ranks_and_options_with_several_values(self) -> None:
        folder = self.planned("official-attention", "tiny", "cp=2", "threads=1,2")
        self.assertEqual({(case.axes["cp"], case.axes["threads"]) for case in folder.cases}, {(2, 1), (2, 2)})
        self.assertIn("ACCEPTED", self.check(self.path))

    def test_files_of_results_are_compared_and_judged_one_by_one(self) -> None:
        self.planned()
        entry = self.place / "entry.json"
        self.check(self.path, "-o", entry)
        done = gyre_study("compare", entry, self.path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"# \d+ rows in both: \d+ unchanged")
        done = gyre_study("check", self.place / "none.json", entry)
        self.assertEqual(done.returncode, 2)
        self.assertIn("none.json", done.stderr)
        self.assertIn("ACCEPTED", done.stdout)

    def test_what_is_tuned_makes_no_other_problem(self) -> None:
        same = self.planned().study
        folder = self.planned("official-attention", "tiny", "cp=1,4", "schedule=ring", "threads=1")
        self.assertEqual(problem_of(folder.study).hash, problem_of(same).hash)
        self.assertIn("cp=4 schedule=ring layout=balanced threads=1\nACCEPTED", self.check(self.path))
        with self.assertRaisesRegex(StudyError, "--set heads: it is part of the problem"):
            load_study(STUDIES / "official-attention.toml", "tiny", ["heads=8"])

    def test_noise_is_said_and_accepted(self) -> None:
        folder = self.planned()
        noisy = {"result": "UNOFFICIAL", "reasons": ["noisy: CV 31 %, at most 20"], "measured": False}
        self.change(folder, "row", lambda row: row.update(status=noisy))
        other = {"result": "UNOFFICIAL", "reasons": ["noisy: other processes kept 1.1 of 2 cores of n1 busy"]}
        self.change(folder, "end", lambda end: end.update(status=other))
        said = self.check(self.path)
        self.assertIn("ACCEPTED, NOISY: correct, but its times are not to be quoted\n", said)
        self.assertIn("noisy: CV 31 %", said)
        self.assertIn("kept 1.1 of 2 cores", said)
        results = self.place / "results"
        results.mkdir()
        self.check(self.path, "-o", results / "a.json")
        self.assertIn("| ~ 0.2 TFLOP/s/rank |", gyre_study("table", results).stdout)

    def test_rows_that_were_measured_again_are_forgotten(self) -> None:
        folder = self.planned()
        file = folder.rows_file(folder.placements[-1])
        again = file.read_text().replace('"run": "r"', '"run": "s"').replace('"id": "r"', '"id": "s"')
        other = {"result": "UNOFFICIAL", "reasons": ["noisy: other processes kept 1.1 of 2 cores of n1 busy"]}
        self.change(folder, "end", lambda end: end.update(status=other))
        self.assertIn("ACCEPTED, NOISY", self.check(self.path))
        file.write_text(file.read_text() + again)
        self.assertTrue(self.check(self.path).endswith("\nACCEPTED\n"))

    def test_another_problem(self) -> None:
        folder = self.planned()
        plan = json.loads((self.path / "plan.json").read_text())
        plan["study"]["options"]["heads"] = 2
        (self.path / "plan.json").write_text(json.dumps(plan))
        self.refused(folder, "plan: options.heads 2; the problem has 4")
        folder = self.planned()

        def fewer_heads(run: dict[str, Any]) -> None:
            argv = run["run"]["argv"]
            argv[argv.index("--heads") + 1] = "2"

        self.change(folder, "run", fewer_heads)
        self.refused(folder, "--heads 2; the problem has 4")
        folder = self.planned()
        self.change(folder, "run", lambda run: run["run"]["argv"].extend(["--tol-scale", "9"]))
        self.refused(folder, "--tol-scale 9; the problem has no --tol-scale")
        folder = self.planned()
        self.change(folder, "run", lambda run: run["inputs"][0].update(sha256="0" * 64))
        self.refused(folder, f"SHA-256 of prolong64k.csv {'0' * 64}; the problem has ")
        plan["study"]["name"] = "strong"
        (self.path / "plan.json").write_text(json.dumps(plan))
        self.refused(folder, "strong is no official problem; nearest: official-")

    def test_a_failed_check(self) -> None:
        for result in ("INVALID", "UNVERIFIED"):
            folder = self.planned()
            status = {"result": result, "reasons": ["verification failed"], "measured": True}
            self.change(folder, "row", lambda row, status=status: row.update(status=status))
            self.refused(folder, f"{result} (verification failed): cp=2 schedule=ring")
        folder = self.planned()
        crowd = {"result": "UNOFFICIAL", "reasons": ["8 ranks on 2 cores", "too short: 0.01 s measured, at least 0.1"]}
        self.change(folder, "end", lambda end: end.update(status=crowd))
        self.refused(folder, "8 ranks on 2 cores")

    def test_a_dirty_build(self) -> None:
        folder = self.planned()
        self.change(folder, "run", lambda run: run["suite"].update(git_state="dirty"))
        # Rows of another build than the plan's count as missing.
        self.refused(folder, "build 0123abcd (dirty); planned with 0123abcd", "not those of a commit (dirty)",
                     *["no result of any pass of the case"] * len(folder.placements[-1].cases))

    def test_a_missing_case(self) -> None:
        folder = self.planned()
        file = folder.rows_file(folder.placements[-1])
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join([*lines[:2], *lines[3:]]))
        self.refused(folder, "no result of bwd of the case cp=2 schedule=ring")
        file.write_text("".join(lines[:-1]))
        self.refused(folder, "a run was cut off")
        file.unlink()
        self.refused(folder, *["no result of any pass of the case"] * len(folder.placements[-1].cases))

    def test_an_older_schema(self) -> None:
        folder = self.planned()
        file = self.place / "result.json"
        self.check(self.path, "-o", file)
        entry = json.loads(file.read_text())
        for name, value, wanted in (
            ("schema", "gyre-official/0", "schema 'gyre-official/0'; wanted: gyre-official/1"),
            ("schema", None, "schema None; wanted: gyre-official/1"),
            ("rows", [], "the file: rows is no object; wanted: gyre-official/1"),
            ("plan", {**entry["plan"], "placements": [{**entry["plan"]["placements"][0], "name": "../x"}]},
             "placement '../x'; wanted: a name"),
        ):
            file.write_text(json.dumps({**entry, name: value}))
            done = gyre_study("check", file)
            self.assertEqual((done.returncode, done.stdout), (3, ""))
            self.assertIn(wanted, done.stderr)
        file.write_text(json.dumps({**entry, "problem": "0123"}))
        done = gyre_study("check", file)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"problem 0123; official-attention tiny is {entry['problem']}", done.stdout)
        self.change(folder, "row", lambda row: row.update(schema="gyre-result/0"))
        self.assertIn("it is no line of results; wanted: gyre-result/1",
                      "".join(judge(Folder(self.path), self.path).refused))

    def test_the_table_is_that_of_the_accepted_results(self) -> None:
        done = gyre_study("table", SOURCE / "results/official")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, (SOURCE / "results/table.md").read_text(encoding="utf-8"))

    def test_results_are_of_commits_of_this_repository(self) -> None:
        def git(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(["git", "-C", SOURCE, *words], capture_output=True, text=True)

        if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            self.skipTest("no clone, or a shallow one: its history is not there")
        files = sorted((SOURCE / "results/official").glob("*.json"))
        self.assertTrue(files)
        commits = {json.loads(file.read_text())["plan"]["app"]["build"]["git"]: file.name for file in files}
        for commit, file in commits.items():
            done = git("merge-base", "--is-ancestor", commit, "HEAD")
            self.assertEqual(done.returncode, 0, f"{file}: {commit} is not in the history: {done.stderr}")


unittest.main(argv=sys.argv[:1])
