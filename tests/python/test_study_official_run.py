#!/usr/bin/env python3
"""The tiny official problems, run on this host: gyre-study check accepts what they make, noisy or not.

Usage: test_study_official_run.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
"""

import os
import sys
import unittest
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
from study_plans import Scratch, gyre_study  # noqa: E402
from gyre_study.folder import Folder  # noqa: E402
from gyre_study.official import opened_result  # noqa: E402
from gyre_study.official_judge import judge  # noqa: E402
from gyre_study.status import counts, statuses  # noqa: E402

SITE = f"""
launcher = "mpiexec"
mpiexec = "{os.environ.get('MPIEXEC', 'mpiexec')}"
cores_per_node = 2
binding = "none"
apps = "{BUILD / 'apps'}"
"""
# What the build of a test, or its host, may be and an official result may not.
OF_TESTS = ("dirty", "unknown)", "wanted: Release", "sanitizer", " ranks on ")


class Tiny(Scratch):
    def run_study(self, *words: str) -> Folder:
        site = self.place / "site.toml"
        site.write_text(SITE, encoding="utf-8")
        for command in (["plan", *words, "--size", "tiny", "--site", site, "-o", self.path], ["run", self.path]):
            done = gyre_study(*command, timeout=200)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return Folder(self.path)

    def test_official(self) -> None:
        for name in ("attention", "logprobs", "pack", "pipeline"):
            with self.subTest(name):
                self.path = self.place / name
                self.run_study(f"official-{name}")
                with opened_result(self.path) as result:
                    judgement = judge(result, self.path)
                refused = [one for one in judgement.refused if not any(word in one for word in OF_TESTS)]
                self.assertEqual(refused, [])
                done = gyre_study("check", self.path)
                self.assertEqual(done.returncode, 1 if judgement.refused else 0, done.stdout + done.stderr)

    def test_all_masks_of_longca_under_two_of_its_methods(self) -> None:
        folder = self.run_study("longca", "--set", "tokens=1K", "--set", "max_seconds=0.05", "--set", "heads=2",
                                "--set", "schedule=all-to-all-ring,group-cast")
        states = counts(statuses(folder))
        self.assertEqual(sum(states.values()), 14 * 2, states)
        self.assertLessEqual({*states}, {"done", "noisy"})


unittest.main(argv=sys.argv[:1])
