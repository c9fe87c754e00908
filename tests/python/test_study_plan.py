#!/usr/bin/env python3
"""gyre-study plan: cases, placements and launches of a study, and what is refused; files of another shape.

Usage: test_study_plan.py SOURCE_DIR BUILD_DIR
"""

import json
import os
import random
import sys
import tomllib
import unittest
from dataclasses import replace
from collections.abc import Iterator
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import SMALL, Scratch, app_of, planned, study_of  # noqa: E402
from gyre_study import sizes  # noqa: E402
from gyre_study.app import App, load_app  # noqa: E402
from gyre_study.cases import expand  # noqa: E402
from gyre_study.collect import Collector  # noqa: E402
from gyre_study.sides import runs_of  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.files import Site, Study, find_file, load_site, load_study  # noqa: E402
from gyre_study.folder import Folder  # noqa: E402
from gyre_study.launches import launches_of  # noqa: E402
from gyre_study.status import statuses  # noqa: E402


class Sizes(unittest.TestCase):
    def test_texts(self) -> None:
        for text, size in (("4K", 4096), ("3", 3), ("1G", 1 << 30), (17, 17), ("2m", 2 << 20)):
            self.assertEqual(sizes.parse_size(text), size)
            self.assertEqual(sizes.parse_size(sizes.size_text(size)), size)
        for wrong in ("K", "4.5K", "", "-1", True, 1.5, None):
            with self.assertRaises(ValueError):
                sizes.parse_size(wrong)

    def test_sweeps_run_exactly_these_sizes(self) -> None:
        rng = random.Random(1)
        for _ in range(300):
            wanted = sorted(rng.sample(range(1, 60), rng.randint(1, 8)))
            wanted = [size * rng.choice([1, 1, 512]) for size in wanted]
            wanted = sorted(set(wanted))
            found: list[int] = []
            for some, options in sizes.sweeps(wanted):
                self.assertEqual(some, swept(options))
                found += some
            self.assertEqual(found, wanted)
        self.assertEqual(len(sizes.sweeps([512, 1024, 2048, 4096])), 1)
        self.assertEqual(len(sizes.sweeps([512, 1024, 1536])), 1)

    def test_equal_work(self) -> None:
        for mask, window in (("causal", 0), ("full", 0), ("causal", 100)):
            for base in (17, 1000, 4096):
                for ranks in (1, 2, 3, 16):
                    tokens = sizes.tokens_of_equal_work(base, ranks, mask, window)
                    work = [sizes.pairs(tokens - off, mask, window) for off in (1, 0)]
                    self.assertTrue(work[0] < ranks * sizes.pairs(base, mask, window) <= work[1])
        brute = [min(query + 1, 100) for query in range(1000)]
        self.assertEqual(sizes.pairs(1000, "causal", 100), sum(brute))
        self.assertEqual(sizes.pairs(1000, "causal", 100, 930), sum(brute[70:]))
        self.assertEqual(sizes.pairs(1000, "full", 0, 30), 30 * 1000)
        tokens = sizes.tokens_of_equal_work(1000, 8, "causal", 0, 64)
        work = [sizes.pairs(tokens - off, "causal", 0, 64) for off in (1, 0)]
        self.assertTrue(work[0] < 8 * sizes.pairs(1000, "causal", 0, 64) <= work[1])


def swept(options: list[str]) -> list[int]:
    """What a program makes of its options (src/report/sweep.cpp)."""
    value = dict(zip(options[::2], options[1::2]))
    if "--tokens" in value:
        return [sizes.parse_size(value["--tokens"])]
    first, last = sizes.parse_size(value["--min"]), sizes.parse_size(value["--max"])
    if "--step" in value:
        return list(range(first, last + 1, sizes.parse_size(value["--step"])))
    return sizes.geometric(first, last, float(value.get("--factor", 2)))


class Cases(unittest.TestCase):
    def expand(self, study: Study, site: Site = SMALL):
        return expand(study, site, app_of(), "study.toml")

    def refused(self, wanted: str, study: Study, site: Site = SMALL) -> None:
        with self.assertRaises(StudyError) as caught:
            self.expand(study, site)
        self.assertIn(wanted, str(caught.exception))

    def test_duplicates_and_placements(self) -> None:
        found = self.expand(study_of(cp=[1, 2, 8], tokens=[1024, "1K", "2K"], schedule="all",
                                     layout=["zigzag"]))
        self.assertEqual([len(one.cases) for one in found.placements], [6, 6, 6])
        self.assertEqual(found.duplicates, 9)
        self.assertEqual([(one.nodes, one.ranks, one.ranks_per_node) for one in found.placements],
                         [(1, 1, 1), (1, 2, 2), (2, 8, 4)])
        ids = [case.id for one in found.placements for case in one.cases]
        self.assertEqual(len(set(ids)), 18)
        again = self.expand(study_of(cp=[8, 2, 1], tokens=["2K", "1K"], schedule="all",
                                     layout=["zigzag"]))
        self.assertEqual({case.id for one in again.placements for case in one.cases}, set(ids))

    def test_an_id_is_of_build_machine_and_options(self) -> None:
        def first(study: Study, site: Site = SMALL, app: App | None = None):
            return expand(study, site, app or app_of(), "f").placements[0].cases[0]

        study = study_of(cp=[1, 2], tokens=[64])
        same = first(study)
        other = app_of()
        other.build["git"] = "4567"
        try:
            newer = first(study, app=other)
        finally:
            other.build["git"] = "0123abcd"
        self.assertNotEqual(newer.id, same.id)
        self.assertEqual(newer.kin, same.kin)
        self.assertNotEqual(first(study, Site("there", 4)).kin, same.kin)
        self.assertNotEqual(first(study_of(cp=[1, 2], tokens=[64], options={"heads": 2})).kin,
                            same.kin)

    def test_repetitions_are_interleaved(self) -> None:
        once = study_of(cp=[1, 2], tokens=[64])
        thrice = replace(once, repeat=3)
        one, all_of = self.expand(once).placements, self.expand(thrice).placements
        self.assertEqual([place.name for place in all_of],
                         [f"{place.name}{turn}" for turn in ("", "-r2", "-r3") for place in one])
        self.assertEqual(all_of[:2], one)  # what is done stays done
        cases = [case for place in all_of for case in place.cases]
        self.assertEqual(len({case.id for case in cases}), 6)
        self.assertEqual(len({case.kin for case in cases}), 2)  # expected times are those of the first

    def test_weak(self) -> None:
        found = self.expand(study_of("weak-tokens", cp=[1, 2, 3], tokens=["4K"]))
        self.assertEqual([one.cases[0].axes["tokens"] for one in found.placements],
                         [4096, 8192, 12288])
        found = self.expand(study_of("weak-work", cp=[1, 2, 4], tokens=["4K"],
                                     options={"stripe": 16}), Site("s", 4))
        tokens = [one.cases[0].axes["tokens"] for one in found.placements]
        for one, ranks in zip(tokens, (1, 2, 4)):
            self.assertEqual(one % (2 * 16 * ranks), 0)
            self.assertLess(abs(sizes.pairs(one, "causal", 0) / sizes.pairs(
                                    4096, "causal", 0) / ranks - 1), 0.02)

    def test_problems(self) -> None:
        study = study_of("weak-tokens", cp=[1, 2], tokens=["4K"], schedule=["ring", "halo"])
        study.problems = {"a": {"lengths": "tokens={tokens}", "capacity": "{tokens}", "mask": "full"},
                          "b": {"lengths": "length={tokens}", "mask": "causal"}}
        found = self.expand(study)
        self.assertEqual([one.arguments for one in found.placements],
                         [["--cp", str(cp), *words] for cp, size in ((1, "4K"), (2, "8K")) for words in (
                             ["--gen", f"tokens={size}", "--capacity", size, "--mask", "full"],
                             ["--gen", f"length={size}", "--mask", "causal"])])
        self.assertEqual([len(one.cases) for one in found.placements], [2, 2, 2, 2])
        self.assertNotIn("tokens", found.placements[0].cases[0].axes)

        for wanted, problem in (
            ("problems.a.heds: gyre-attention has no such axis; nearest: problems.a.heads", {"heds": 1}),
            ("problems.a.mask: 'ful' is not one of causal, full; nearest: full", {"mask": "ful"}),
            ("problems.a.mask = ['full']: wanted: one value", {"mask": ["full"]}),
            ("problems.a.schedule: it is an axis, too", {"schedule": "ring"}),
            ("axes.lengths draws documents, which cannot be made to fit", {"lengths": "count=3"})):
            study.problems = {"a": problem}
            self.refused(wanted, study)
        filled = study_of(cp=[1, 2], lengths=["tokens={tokens}"])
        self.refused("{tokens} is in a text: axes.tokens is needed", filled)

    def test_launches_are_exactly_the_cases(self) -> None:
        rng = random.Random(2)
        app = app_of()
        placement = self.expand(study_of(cp=[1, 2], tokens=["1K", "2K", "3K", "8K"], schedule="all",
                                         layout="all")).placements[0]
        for _ in range(200):
            some = rng.sample(placement.cases, rng.randint(1, len(placement.cases)))
            measured = []
            for launch in launches_of(placement, some, app):
                runs = self.cases_run(launch.arguments, app)
                listed = [tuple(case.axes[name] for name in ("schedule", "layout", "tokens"))
                          for case in some if case.id in launch.cases]
                self.assertEqual(sorted(runs), sorted(listed))
                measured += runs
            self.assertEqual(len(measured), len(set(measured)))
            self.assertEqual(len(measured), len(some))
        self.assertEqual(
            len(launches_of(placement, placement.cases, app)), 2
        )  # 1K 2K 3K by steps, and 8K
        self.assertEqual(launches_of(placement, [], app), [])
        two = [case for case in placement.cases if case.axes["schedule"] in ("halo", "ring")]
        self.assertEqual([one.arguments[-6:] for one in launches_of(placement, two, app)][-1],
                         ["--schedule", "ring,halo", "--layout", "all", "--tokens", "8K"])
        self.assertEqual(len(launches_of(placement, two, app)), 2)

    def cases_run(self, arguments: list[str], app: App) -> list[tuple[str, str, int]]:
        value = dict(zip(arguments[::2], arguments[1::2]))
        pairs = [app.options[n].choices if value[f"--{n}"] == "all" else value[f"--{n}"].split(",")
                 for n in ("schedule", "layout")]
        tail = [word for name in ("--tokens", "--min", "--max", "--factor", "--step")
                if name in value for word in (name, value[name])]
        return [(a, b, size) for a in pairs[0] for b in pairs[1] for size in swept(tail)]

    def test_what_is_refused(self) -> None:
        two = {"cp": [1, 2], "tokens": [64]}
        for wanted, study in (
            ("study.toml: axes.tp: gyre-attention has no such axis; nearest: axes.cp (its grid is cp)",
             study_of(**two, tp=[1])),
            ("axes.shedule: gyre-attention has no such axis; nearest: axes.schedule",
             study_of(**two, shedule=["ring"])),
            ("'rink' is not one of all, ring, halo, all-gather; nearest: ring",
             study_of(**two, schedule=["rink"])),
            ("'all' stands alone", study_of(**two, schedule=["all", "ring"])),
            ("axes.tokens: '4X' is no size", study_of(cp=[1, 2], tokens=["4X"])),
            ("axes.cp: 0 is not above 0", study_of(cp=[0, 1], tokens=[64])),
            ("axes.tokens = []: wanted: one value at least", study_of(cp=[1, 2], tokens=[])),
            ("options.headz: gyre-attention has no --headz; nearest: options.heads",
             study_of(**two, options={"headz": 1})),
            ("no --json", study_of(**two, options={"json": "x"})),
            ("options.heads: 'x' is no INT", study_of(**two, options={"heads": "x"})),
            ("options.sinks: 3 is not true or false", study_of(**two, options={"sinks": 3})),
            ("options.gen: it is an axis, too",
             study_of(cp=[1, 2], lengths=["a", "b"], options={"gen": "x"})),
            ("kind = 'strong': axes.cp needs two values at least", study_of(cp=[2], tokens=[64])),
            ("kind = 'weak-work': axes.tokens is needed", study_of("weak-work", cp=[1, 2])),
            ("axes.lengths draws documents",
             study_of("weak-tokens", cp=[1, 2], tokens=[1], lengths=["a"])),
            ("axes.network needs two values",
             study_of("network", cp=[1], tokens=[64], network=["none"])),
            ("axes.tokens or axes.lengths needs two values",
             study_of("length", cp=[1], tokens=[64])),
            ("exclude each other", study_of(**two, lengths=["a"]))):
            self.refused(wanted, study)
        self.refused("8 ranks, 4 a node, take 2 nodes; here has max_nodes = 1; nearest: 4 ranks",
                     study_of(cp=[1, 8], tokens=[64]), Site("here", 4, max_nodes=1))
        crowded = study_of(**two)
        crowded.ranks_per_node = 9
        self.refused("ranks_per_node = 9: here has 4 cores a node; nearest: 4", crowded)


class Files(Scratch):
    def setUp(self) -> None:
        super().setUp()
        self.file = self.place / "x.toml"

    def refused(self, load, text: str, *wanted: str) -> None:
        self.file.write_text(text, encoding="utf-8")
        with self.assertRaises(StudyError) as caught:
            load(self.file)
        for line in wanted:
            self.assertIn(line, str(caught.exception))

    def test_all_that_come_with_it_are_read(self) -> None:
        self.assertGreaterEqual(len([load_site(file)
                                     for file in (SOURCE / "slurm/sites").glob("*.toml")]), 2)
        kinds = {load_study(file).kind for file in (SOURCE / "slurm/studies").glob("*.toml")}
        self.assertEqual(kinds, {"strong", "weak-tokens", "weak-work", "network", "length"})

    def test_all_studies_that_come_with_it_can_be_planned(self) -> None:
        site = Site("any", 64)
        for file in (SOURCE / "slurm/studies").glob("*.toml"):
            for size in tomllib.loads(file.read_text()).get("sizes", {"": {}}):
                study = load_study(file, size)
                self.assertGreater(len(expand(study, site, load_app(BUILD / "apps", study.app),
                                              file.name).placements), 0)

    def test_sizes_and_choices(self) -> None:
        text = """
kind = "strong"
app = "gyre-attention"
tunable = ["cp", "threads", "sinks"]
[axes]
cp = [1, 2]
tokens = [64]
[problems.p]
lengths = "dist=list,file=./x.toml"
[options]
heads = 2
[sizes.little]
[sizes.large]
kind = "weak-tokens"
axes = { tokens = [128] }
problems.p.mask = "full"
"""
        self.file.write_text(text, encoding="utf-8")
        little, large = load_study(self.file), load_study(self.file, "large", ["cp=1,4", "threads=2", "sinks=true"])
        self.assertEqual((little.size, little.kind, little.axes), ("little", "strong", {"cp": [1, 2], "tokens": [64]}))
        self.assertEqual(little.problems, {"p": {"lengths": f"dist=list,file={self.file.resolve()}"}})
        self.assertEqual((large.kind, large.axes, large.problems),
                         ("weak-tokens", {"cp": [1, 4], "tokens": [128]}, {"p": {"mask": "full"}}))
        self.assertEqual(large.options, {"heads": 2, "threads": 2, "sinks": True})
        self.assertEqual(large.chosen, {"cp": [1, 4], "threads": [2], "sinks": ["true"]})
        for wanted, size, chosen in (
            ("--size huge: no such size; nearest: large; there are little, large", "huge", []),
            ("--set heads: it is part of the problem; nearest: threads; tunable: cp, threads, sinks", "", ["heads=3"]),
            ("--set cp: wanted: NAME=VALUE", "", ["cp"])):
            with self.assertRaisesRegex(StudyError, wanted):
                load_study(self.file, size, chosen)
        self.refused(load_study, text.replace("[sizes.little]", "[sizes.little]\nacept = 1"),
                     "x.toml: sizes.little: acept: unknown key; nearest: repeat")
        self.refused(load_study, "problems.q = 1" + text.replace("[problems.p]\nlengths", "[other]\nlengths"),
                     "problems.q = 1: wanted: a table")
        self.refused(lambda file: load_study(file, "little"), 'kind = "strong"\napp = "a"\n[axes]\n',
                     "--size little: no such size; it has one size")

    def test_each_study_has_a_size_for_this_machine(self) -> None:
        """What --site local chooses fits its cores; another site begins with the first size."""
        local = load_site(SOURCE / "slurm/sites/local.toml")
        for file in (SOURCE / "slurm/studies").glob("*.toml"):
            study = load_study(file, usual=local.size)
            self.assertEqual(study.size, "tiny", file)
            ranks = [sizes.parse_size(max(study.axes.get(name, [1]), key=sizes.parse_size)) for name in ("dp", "cp", "tp")]
            self.assertLessEqual(max(ranks), local.cores_per_node, file)
            if not file.stem.startswith("official"):
                self.assertEqual(load_study(file).size, "large", file)
            self.assertEqual(load_study(file, "tiny").axes, study.axes)
        app = app_of()
        study = load_study(SOURCE / "slurm/studies/strong.toml", usual=local.size)
        study.options = {"heads": study.options["heads"]}
        self.assertEqual(sum(len(one.cases) for one in expand(study, local, app, "strong.toml").placements), 12)

    def test_a_folder_of_the_name_of_a_study(self) -> None:
        """`plan strong -o strong`, again."""
        (self.place / "strong").mkdir()
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.place)
        self.assertEqual(find_file("strong", SOURCE / "slurm/studies").name, "strong.toml")

    def test_sites(self) -> None:
        node = "cores_per_node = 1\n"
        for text, *wanted in (
            ("cores = 3", "x.toml: cores: unknown key; nearest: cores_per_node",
             "cores_per_node is needed"),
            ("cores_per_node = 0", "cores_per_node = 0: wanted: at least 1"),
            ("cores_per_node = true", "cores_per_node = True: wanted: a whole number"),
            (node + 'launcher = "srum"', "'srum': not one of srun, mpiexec; nearest: srun"),
            (node + "modules = [1]", "modules = [1]: wanted: a list of texts"),
            (node + "[environment]\nA = 1", "environment.A = 1: wanted: a text"),
            (node + "[model]\ntflop = 1", "model.tflop: unknown key; nearest: model.tflops",
             "has no tflops"),
            (node + "[model]\ntflops = -1", "model.tflops = -1: wanted: a number above 0"),
            (node + 'sbatch_options = ["--qos=high", "--nodes=4", "-N4", "-n", "--array"]',
             "sbatch_options: --nodes=4: the study sets --nodes itself; leave it out",
             "sbatch_options: -N4: the study sets --nodes", "sbatch_options: -n: the study sets --ntasks ",
             "sbatch_options: --array: the study sets --array"),
            (node + 'launcher_options = ["-c4"]', "launcher_options: -c4: the study sets --cpus-per-task"),
            ("a b", "x.toml: ")):
            self.refused(load_site, text, *wanted)
        for words in ('sbatch_options = ["--constraint=h100", "--nice", "-Cgpu", "--ntasks-per-core=1"]',
                      'launcher = "mpiexec"\nlauncher_options = ["-n", "1"]'):
            self.file.write_text(node + words, encoding="utf-8")
            load_site(self.file)

    def test_studies(self) -> None:
        self.refused(load_study, 'kind = "weak"', "'weak': not one of", "nearest: weak-work",
                     "app is needed", "axes is needed")
        self.refused(load_study, 'kind="strong"\napp="gyre-attention"\naxis=1\n[axes]',
                     "axis: unknown key; nearest: axes")
        self.refused(load_study, 'kind="strong"\napp="a"\nminutes=0\n[axes]',
                     "minutes = 0: wanted: at least 1")

    def test_files_that_options_name_are_found_from_the_study_on(self) -> None:
        text = 'kind = "strong"\napp = "a"\n[axes]\ngen = ["./x.toml", "x.toml"]\n[options]\ninput = "./x.toml"\n'
        self.file.write_text(text, encoding="utf-8")
        study = load_study(self.file)
        whole = str(self.file.resolve())
        self.assertEqual((study.options, study.axes),
                         ({"input": whole}, {"gen": [whole, "x.toml"]}))

    def test_programs(self) -> None:
        with self.assertRaises(StudyError) as caught:
            load_app(BUILD / "apps", "gyre-atention")
        self.assertIn("nearest: gyre-attention", str(caught.exception))
        with self.assertRaises(StudyError):
            load_app(BUILD / "apps", "gyre-compare")  # makes no rows
        app = load_app(BUILD / "apps", "gyre-attention")
        self.assertEqual(app.swept, ("schedule", "layout", "tokens"))
        self.assertEqual(app.options["sinks"].kinds, ())
        self.assertEqual(app.options["iters"].kinds, ("INT", "auto"))
        self.assertEqual(set(app.build), {"version", "git", "git_state", "type", "compiler"})
        noise = self.place / "gyre-attention"  # what UCX prints where it finds no network
        noise.write_text(f"#!/bin/sh\necho '[x:1] tcp_iface.c:816  UCX  ERROR opendir(net) failed'\nexec {BUILD}/apps/gyre-attention $*\n")
        noise.chmod(0o755)
        self.assertEqual(load_app(self.place, "gyre-attention").build, app.build)


def variants(value: object) -> Iterator[object]:
    """The value with one part of it missing, or of another kind."""
    for other in (None, [], {}, "x"):
        yield other
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            for part in variants(value[key]):
                yield {**value, key: part}
    elif isinstance(value, list) and value:
        for part in variants(value[0]):
            yield [part, *value[1:]]


class Shapes(Scratch):
    """Files of gyre-study and of programs with a part missing or of another kind: read, or refused by name."""

    def test_a_plan_that_is_none(self) -> None:
        with self.assertRaises(StudyError) as caught:
            Folder(self.path)
        self.assertIn("no plan.json is there", str(caught.exception))
        planned(self.path, study_of(cp=[1, 2], tokens=[64]))
        file = self.path / "plan.json"
        plan = json.loads(file.read_text())
        for text in ("", "[]", "nul", "[" * 99999, '{"schema": "gyre-study/2"}', "\xff"):
            file.write_text(text, encoding="latin-1")
            with self.assertRaises(StudyError):
                Folder(self.path)
        for wrong in variants(plan):
            file.write_text(json.dumps(wrong))
            try:
                statuses(Folder(self.path))
            except StudyError as error:
                self.assertIn("plan.json", str(error))

    def test_results_of_another_shape(self) -> None:
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64], schedule=["ring"]))
        file = folder.rows_file(folder.placements[0])
        key = {"schedule": "ring", "pass": "fwd", "tokens": 64, "cp": 1}
        lines = [made.run_line("r", 1), made.row_line("r", key, [1.0]), made.end_line("r")]
        for number, line in enumerate(lines):
            for wrong in variants(json.loads(line)):
                changed = [*lines[:number], json.dumps(wrong) + "\n", *lines[number + 1 :]]
                file.write_text("".join(changed), encoding="utf-8")
                try:
                    statuses(folder)
                    runs_of(folder.path)
                    Collector(folder).add_file(file)
                except StudyError as error:
                    self.assertIn(file.name, str(error))


unittest.main(argv=sys.argv[:1])
