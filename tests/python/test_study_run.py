#!/usr/bin/env python3
"""gyre-study run and status with a real program on this host: what is measured again and what is not, and how it ends.

Usage: test_study_run.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(sys.argv[1], part)) for part in ("slurm", "tests/support")]
from study_plans import Scratch, gyre_study  # noqa: E402

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")

SITE = f"""
launcher = "mpiexec"
mpiexec = "{MPIEXEC}"
cores_per_node = 2
max_nodes = 1
binding = "none"
apps = "{BUILD / 'apps'}"
[environment]
OMP_NUM_THREADS = "1"
"""
STUDY = """
kind = "strong"
app = "gyre-attention"
accept = "finished"
[axes]
cp = [1, 2]
tokens = [64, 128]
schedule = ["ring", "halo"]
[options]
heads = 2
kv_heads = 2
iters = 1
warmup = 0
"""


class Command(Scratch):
    """The whole command, with a real program on this host."""

    def setUp(self) -> None:
        super().setUp()
        (self.place / "site.toml").write_text(SITE, encoding="utf-8")
        self.write(STUDY)

    def write(self, text: str) -> None:
        (self.place / "study.toml").write_text(text, encoding="utf-8")

    def study(self, code: int, *words: object) -> str:
        done = gyre_study(*words, cwd=self.place)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def plan(self, *more: object) -> str:
        return self.study(0, "plan", "study.toml", "--site", "site.toml", "-o", "out", *more)

    def rows(self) -> int:
        return sum(file.read_text().count('"kind":"row"')
                   for file in (self.place / "out/rows").glob("*.jsonl"))

    def test_run_again_and_more(self) -> None:
        self.assertIn("8 cases in 2 placements, 0 duplicates", self.plan())
        self.assertIn("2 placements were never run", self.plan())
        self.assertIn("# 8 cases: 8 missing", self.study(0, "status", "out"))
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out"))  # of both schedules
        self.assertIn("# 8 cases: 4 done, 4 refused", self.study(0, "status", "out"))  # halo needs a window
        self.assertEqual(self.rows(), 8)
        # The same study with a window: other cases.
        self.write(STUDY.replace("heads = 2", "heads = 2\nwindow = 16", 1))
        self.plan()
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out"))
        self.assertIn("# 8 cases: 8 done", self.study(0, "status", "out"))
        self.assertIn("nothing to run", self.study(0, "run", "out"))
        # One more schedule: only its cases are run, and times are expected of the others.
        self.write(STUDY.replace("heads = 2", "heads = 2\nwindow = 16", 1).replace(
                       '"halo"', '"halo", "all-gather"'))
        before = self.rows()
        self.assertIn("2 placements were never run", self.plan())
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out"))
        self.assertEqual(self.rows(), before + 8)
        self.assertNotIn("never run", self.plan())
        self.assertNotIn("never run",
                         self.study(0, "plan", "study.toml", "--site", "site.toml", "--previous",
                                    "out"))

    def test_refused_cases_are_left_alone_until_asked(self) -> None:
        self.write(STUDY.replace("[64, 128]", "[64]").replace('["ring", "halo"]', '["halo"]'))
        self.plan()
        self.study(0, "run", "out")
        status = json.loads(self.study(0, "status", "out", "--json"))
        self.assertEqual(status["counts"], {"refused": 2})
        self.assertIn("needs a causal mask with a window", status["cases"][0]["reason"])
        self.assertIn("nothing to run", self.study(0, "run", "out"))
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out", "--retry-refused"))

    def test_a_launch_that_is_refused_as_a_whole_is_split(self) -> None:
        self.write(STUDY.replace('["ring", "halo"]', '["halo"]'))
        self.plan()
        self.assertIn("# 2 launches, 2 failed", self.study(3, "run", "out"))
        said = self.study(0, "status", "out", "--cases")
        self.assertIn("# 4 cases: 4 failed", said)
        self.assertIn("one of 2 cases, which are launched one by one next", said)
        self.assertIn("# 4 launches, 0 failed", self.study(0, "run", "out"))
        self.assertIn("# 4 cases: 4 refused", self.study(0, "status", "out"))

    def test_a_run_that_is_killed_goes_on(self) -> None:
        slow = (STUDY.replace("[64, 128]", "[64]").replace('["ring", "halo"]', '"all"').replace(
                    "[1, 2]", "[2, 1]"))
        self.write(slow.replace("[options]", 'network = ["alpha=30ms,beta=1G"]\n[options]'))
        self.plan()
        command = [sys.executable, str(SOURCE / "slurm/gyre-study"), "run", "out"]
        process = subprocess.Popen(command, cwd=self.place, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while not any(b'"cp":2' in file.read_bytes()
                      for file in (self.place / "out/rows").glob("cp2*")):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)
        self.assertIn("another gyre-study is submitting or running it", self.study(3, "run", "out"))
        self.assertIn("running", json.loads(self.study(0, "status", "out", "--json"))["counts"])
        process.kill()
        process.wait(timeout=60)
        done = {one["case"] for one in json.loads(self.study(0, "status", "out", "--json"))["cases"]
                if one["state"] == "done"}
        self.study(0, "run", "out")  # waits for the launch, which its death has ended
        status = json.loads(self.study(0, "status", "out", "--json"))
        subprocess.run([BUILD / "apps/gyre-info", "--quick", "-J", "info.json"], cwd=self.place, capture_output=True, check=True)
        many = len(json.loads((self.place / "info.json").read_text())["capabilities"]["schedules"])
        self.assertEqual(status["counts"], {"done": 2 * many - 2, "refused": 2})  # halo needs a window
        launches = json.loads((self.place / "out/jobs/002/submission.json").read_text())["launches"]
        self.assertFalse(done & {case for launch in launches for case in launch["cases"]})

    def wait(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not is_so():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)

    def start(self, script: str) -> subprocess.Popen[str]:
        """`gyre-study run out` with this launcher, which writes its process's number into the file pid."""
        launcher = self.place / "launcher"
        pid = self.place / "pid"
        launcher.write_text(f"#!/bin/sh\necho $$ >{pid}.new\nmv {pid}.new {pid}\n{script}")
        launcher.chmod(0o755)
        (self.place / "site.toml").write_text(SITE.replace(MPIEXEC, str(launcher)), encoding="utf-8")
        self.plan()
        pid.unlink(missing_ok=True)
        command = [sys.executable, str(SOURCE / "slurm/gyre-study"), "run", "out"]
        process = subprocess.Popen(command, cwd=self.place, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.wait(pid.exists)
        self.wait(lambda: "running" in self.study(0, "status", "out"))  # its begin is noted
        return process

    def launch_lives(self) -> bool:
        try:
            status = Path("/proc", (self.place / "pid").read_text().strip(), "stat").read_text()
        except OSError:
            return False
        return status.rpartition(") ")[2][0] != "Z"

    def test_a_run_ends_its_launch(self) -> None:
        """However it is ended itself."""
        for sign, code in ((signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -9)):
            process = self.start("exec sleep 600\n")
            self.assertTrue(self.launch_lives())
            process.send_signal(sign)
            self.assertEqual(process.wait(timeout=60), code)
            self.wait(lambda: not self.launch_lives())
            self.assertIn("cut off", self.study(0, "status", "out"))

    def test_a_launch_that_does_not_end_is_waited_for(self) -> None:
        stay = self.place / "stay"
        stay.touch()
        self.addCleanup(stay.unlink, missing_ok=True)
        process = self.start(f"trap '' TERM\nwhile [ -e {stay} ]; do sleep 0.01; done\n")
        process.kill()
        process.wait(timeout=60)
        self.assertIn("running", self.study(0, "status", "out"))
        pid = (self.place / "pid").read_text().strip()
        command = [sys.executable, str(SOURCE / "slurm/gyre-study"), "run", "out"]
        again = subprocess.Popen(command, cwd=self.place, stdout=subprocess.PIPE, text=True)
        self.addCleanup(again.stdout.close)
        self.assertIn(f"(process group {pid} on", again.stdout.readline())
        self.assertTrue(self.launch_lives())
        stay.unlink()
        self.assertTrue(again.stdout.readline().startswith("[1/"))
        self.assertEqual(again.wait(timeout=60), 0)
        self.assertIn("exit code 0, but its rows are missing", self.study(0, "status", "out"))

    def test_what_cannot_be_written(self) -> None:
        self.plan()
        for command in (["status", "out"], ["--help"], ["plan", "study.toml", "--site", "site.toml"]):
            with open("/dev/full", "w") as full:
                words = [sys.executable, SOURCE / "slurm/gyre-study", *command]
                for err in (full, subprocess.PIPE):
                    done = subprocess.run(words, cwd=self.place, stdout=full, stderr=err, text=True, check=False)
                    self.assertEqual(done.returncode, 3)
            self.assertEqual(done.stderr, "gyre-study: error: the output: No space left on device\n")

        def no_space() -> None:  # as on a full disk: a file may not grow
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

        before = sorted(self.place.rglob("*"))
        for command in ("run", "collect"):
            words = [sys.executable, SOURCE / "slurm/gyre-study", command, "out"]
            done = subprocess.run(words, cwd=self.place, capture_output=True, text=True,
                                  preexec_fn=no_space, check=False)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (3, 1), done.stderr)
            self.assertRegex(done.stderr, r"gyre-study: error: \S+/out/\S+: ")
        left = [one for one in self.place.rglob("*") if one not in before and one.is_file()]
        self.assertEqual([one for one in left if one.stat().st_size], [])

    def test_the_first_example_of_help(self) -> None:
        """It plans on this machine; the others name a site of the reader's own."""
        said = gyre_study("--help").stdout
        example = re.search(r"^  slurm/gyre-study (plan .*?) +#", said, re.MULTILINE)[1].split()
        place = self.place / example.pop()
        self.assertEqual(example[-1], "-o")
        said = self.study(0, *example, place, "--apps", BUILD / "apps")
        self.assertIn("# size tiny (the site's); --size chooses another", said)
        self.assertIn(f"# {place}: gyre-study run {place} goes on", said)

    def test_errors(self) -> None:
        self.assertIn("study.toml: no such file; studies that are there:",
                      self.study(2, "plan", "nostudy", "--site", "local").replace(
                          "nostudy", "study.toml"))
        self.assertIn("sites that are there: ",
                      self.study(2, "plan", "study.toml", "--site", "nosite"))
        self.assertIn("no plan.json", self.study(2, "run", "out"))
        self.plan()
        self.assertIn("collect out makes it", self.study(2, "report", "out"))
        self.assertIn("invalid choice: 'plann'", self.study(2, "plann"))
        self.write(STUDY.replace("gyre-attention", "gyre-atention"))
        self.assertIn("nearest: gyre-attention",
                      self.study(2, "plan", "study.toml", "--site", "site.toml"))
        (self.place / "site.toml").write_text(SITE.replace(MPIEXEC, "/nowhere/mpiexec"),
                                              encoding="utf-8")
        self.write(STUDY)
        self.plan()
        self.assertIn("the site's key mpiexec names it", self.study(3, "run", "out"))
        for command in ("plan", "submit", "run", "status", "collect", "report", "compare"):
            self.assertIn(command, self.study(0, "--help"))
            self.assertIn("usage: gyre-study " + command, self.study(0, command, "--help"))


unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
