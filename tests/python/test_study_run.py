#!/usr/bin/env python3
"""gyre-study run and status: what is measured again and what is not, and what is said of each case.

Usage: test_study_run.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import SMALL, app_of, study_of  # noqa: E402
from gyre_study.cases import expand  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.files import Site, Study  # noqa: E402
from gyre_study.folder import Folder, write_plan  # noqa: E402
from gyre_study.launch import (  # noqa: E402
    Task,
    environment_script,
    job_words,
    launcher,
    wait_for,
)
from gyre_study.status import counts, statuses  # noqa: E402

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


class States(unittest.TestCase):
    """What rows, notes of jobs and logs make of cases; no program is run."""

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.path = Path(scratch.name, "study")

    def plan(self, study: Study) -> Folder:
        expansion = expand(study, SMALL, app_of(), "study.toml")
        write_plan(self.path, study, SMALL, app_of(), expansion, {})
        return Folder(self.path)

    def rows(self, folder: Folder, text: str) -> None:
        folder.rows_file(folder.placements[0]).write_text(text, encoding="utf-8")

    def key(self, direction: str, schedule: str = "ring") -> dict[str, object]:
        return {"schedule": schedule, "pass": direction, "tokens": 64, "cp": 1}

    def both(self, result: str = "VALID", schedule: str = "ring") -> str:
        return "".join(
            made.row_line("r", self.key(one, schedule), [1.0] * 7, result) for one in ("fwd", "bwd")
        )

    def states(self, folder: Folder) -> list[str]:
        return [one.state for one in statuses(folder) if one.placement is not folder.placements[-1]]

    def test_from_rows(self) -> None:
        folder = self.plan(study_of(cp=[1, 2], tokens=[64], schedule=["ring", "halo"]))
        begin, end = made.run_line("r", 1), made.end_line("r")
        fwd = made.row_line("r", self.key("fwd"), [1.0] * 7)
        for text, wanted in (
            ("", "missing"),
            (begin, "missing"),
            (begin + fwd, "missing"),  # backward is not there
            (begin + fwd + end, "done"),  # of an operation that has no backward pass
            (begin + self.both(), "done"),
            (begin + self.both()[:-1], "missing"),  # the last line is torn
            (begin + self.both() + end[:20], "done"),
            (begin + self.both("UNOFFICIAL") + end, "noisy"),
            (begin + self.both("UNVERIFIED") + end, "noisy"),
            (begin + self.both("INVALID") + self.both() + end, "done"),  # the newest counts
            (begin + self.both() + self.both("INVALID") + end, "invalid"),
            (begin.replace("0123abcd", "other") + self.both() + end, "missing"),  # of another build
            (begin + self.both(schedule="halo") + end, "missing"),
        ):
            self.rows(folder, text)
            self.assertEqual(self.states(folder)[0], wanted, text)

    def test_what_is_accepted(self) -> None:
        folder = self.plan(study_of(accept="finished", cp=[1, 2], tokens=[64], schedule=["ring"]))
        self.rows(folder, made.run_line("r", 1) + self.both("UNOFFICIAL"))
        self.assertEqual(self.states(folder), ["done"])
        self.rows(folder, made.run_line("r", 1) + self.both("UNVERIFIED"))
        self.assertEqual(self.states(folder), ["noisy"])
        folder = self.plan(
            study_of(
                accept="finished",
                cp=[1, 2],
                tokens=[64],
                schedule=["ring"],
                options={"check": "none"},
            )
        )
        self.rows(folder, made.run_line("r", 1) + self.both("UNVERIFIED"))
        self.assertEqual(self.states(folder), ["done"])

    def test_from_notes(self) -> None:
        folder = self.plan(study_of(cp=[1, 2], tokens=[64], schedule=["ring", "halo"]))
        place = folder.new_submission()
        cases = [case.id for case in folder.placements[0].cases]
        (place / "submission.json").write_text(
            json.dumps(
                {
                    "number": place.name,
                    "how": "slurm",
                    "time": 0,
                    "host": "h",
                    "pid": 1,
                    "launches": [
                        {"id": "l", "job": "", "log": "l.log", "cases": cases, "kin": cases}
                    ],
                }
            )
        )
        log = folder.path / "logs/l.log"
        note = '{"launch":"l","event":"begin","time":1}\n'
        for notes, said, wanted in (
            ("", "", "missing"),
            (note, "slurmstepd: error: *** STEP 1.0 CANCELLED ***", "cut off"),
            (note + '{"launch":"l","ev', "", "cut off"),
            (
                note + '{"launch":"l","event":"end","time":2,"code":3}\n',
                "gyre-attention: error: rank 1 has died",
                "failed",
            ),
            (
                note + '{"launch":"l","event":"end","time":2,"code":0}\n',
                "# refused: needs a window",
                "refused",
            ),
            (note + '{"launch":"l","event":"end","time":2,"code":0}\n', "", "failed"),
            (note + '[]\n{"launch":1,"event":"end"}\n', "", "cut off"),
        ):
            (place / "1.state").write_text(notes)
            log.write_text(said)
            found = [one for one in statuses(folder) if one.placement is folder.placements[0]]
            self.assertEqual([one.state for one in found], [wanted] * 2)
            self.assertIn(
                said.removeprefix("# ").removeprefix("refused: "), found[1].reason + found[1].state
            )
        log.write_text("# refused: schedule halo: needs a window")
        (place / "1.state").write_text(note + '{"launch":"l","event":"end","time":2,"code":0}\n')
        self.assertEqual(counts(statuses(folder)), {"failed": 1, "refused": 1, "missing": 2})

    def test_only_the_program_refuses(self) -> None:
        """Launchers have an exit code 2, and are killed by signals."""
        folder = self.plan(study_of(cp=[1, 2], tokens=[64]))
        place = folder.new_submission()
        launch = {"id": "l", "job": "", "log": "l.log", "cases": [folder.cases[0].id], "kin": ["k"]}
        submission = {"number": place.name, "how": "run", "time": 0, "host": "h", "pid": 1}
        submission["host"] = socket.gethostname()
        (place / "submission.json").write_text(json.dumps({**submission, "launches": [launch]}))
        for code, said, state, reason in (
            (2, "gyre-attention: error: no", "refused", "gyre-attention: error: no"),
            (2, "mpiexec: unknown option", "failed", "exit code 2: mpiexec: unknown option"),
            (-9, "", "failed", "its launcher was killed by SIGKILL"),
            (124, "", "failed", "it took longer than the study's minutes"),
        ):
            notes = [{"launch": "l", "event": "begin", "time": 1}]
            notes.append({"launch": "l", "event": "end", "time": 2, "code": code})
            (place / "run.state").write_text("".join(json.dumps(one) + "\n" for one in notes))
            (folder.path / "logs/l.log").write_text(said)
            found = statuses(folder)[0]
            self.assertEqual(found.state, state)
            self.assertIn(reason, found.reason)
            self.assertEqual(found.alone, state == "refused")

    def test_a_queue_that_does_not_answer(self) -> None:
        folder = self.plan(study_of(cp=[1, 2], tokens=[64]))
        launch = {
            "id": "l",
            "job": "7_0",
            "log": "l.log",
            "cases": [folder.cases[0].id],
            "kin": ["k"],
        }
        text = json.dumps(
            {
                "number": "001",
                "how": "slurm",
                "time": 0,
                "host": "h",
                "pid": 1,
                "launches": [launch],
            }
        )
        (folder.new_submission() / "submission.json").write_text(text)
        squeue = self.path / "squeue"
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = str(self.path)
        for script, wanted in (
            ("exit 1", "squeue: exit code 1"),
            (None, "jobs were submitted, but squeue does not say"),
        ):
            squeue.write_text(f"#!/bin/sh\n{script}\n") if script else squeue.unlink()
            if script:
                squeue.chmod(0o755)
            with self.assertRaises(StudyError) as caught:
                statuses(folder)
            self.assertIn(wanted, str(caught.exception))
        for answer, state in (
            ("7_0 RUNNING", "queued"),
            ("7_0 PENDING", "queued"),
            ("8_0 RUNNING", "missing"),
        ):
            squeue.write_text(f"#!/bin/sh\necho '{answer}'\n")
            squeue.chmod(0o755)
            self.assertEqual(statuses(folder)[0].state, state)

    def test_words_for_slurm(self) -> None:
        """Of what no node here has: GPUs, modules, an account, mpiexec on several nodes."""
        site = Site("c", 8, gpus_per_node=4, partition="p", account="a", sbatch_options=["--qos=x"])
        site.modules, site.environment = ["mpich/4", "a b"], {"UCX_TLS": "tcp,self"}
        study = study_of(cp=[1, 8], tokens=[64])
        write_plan(self.path, study, site, app_of(), expand(study, site, app_of(), "s.toml"), {})
        folder = Folder(self.path)
        task = Task(folder.placements[1], [])
        words = job_words(folder, self.path / "jobs/001", [task, task], "17")
        for word in (
            "--array=0-1",
            "--nodes=2",
            "--ntasks=8",
            "--ntasks-per-node=4",
            "--cpus-per-task=2",
            "--partition=p",
            "--account=a",
            "--qos=x",
            "--exclusive",
            "--time=30",
            "--dependency=afterany:17",
        ):
            self.assertIn(word, words)
        self.assertNotIn("--gpus-per-node=4", words)
        folder.study.options["backend"] = "cuda"
        self.assertIn("--gpus-per-node=4", job_words(folder, self.path, [task], ""))
        self.assertIn("--cpu-bind=cores", launcher(folder, task.placement, "srun"))
        wanted = ["mpiexec", "-n", "8", "-ppn", "4", "-bind-to", "core"]
        self.assertEqual(launcher(folder, task.placement, "mpiexec"), wanted)
        self.assertEqual(
            environment_script(folder),
            "module load mpich/4\nmodule load 'a b'\nexport UCX_TLS=tcp,self\n",
        )

    def test_a_launcher_that_takes_too_long_is_ended(self) -> None:
        begin = time.monotonic()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.assertEqual(wait_for(process, 0.1), 124)
        self.assertIsNotNone(process.poll())
        self.assertLess(time.monotonic() - begin, 20)


class Command(unittest.TestCase):
    """The whole of it, with a real program on this host."""

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.place = Path(scratch.name)
        (self.place / "site.toml").write_text(SITE, encoding="utf-8")
        self.write(STUDY)

    def write(self, text: str) -> None:
        (self.place / "study.toml").write_text(text, encoding="utf-8")

    def study(self, code: int, *words: object) -> str:
        command = [sys.executable, SOURCE / "slurm/gyre-study", *words]
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.place,
            check=False,
        )
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def plan(self, *more: object) -> str:
        return self.study(0, "plan", "study.toml", "--site", "site.toml", "-o", "out", *more)

    def rows(self) -> int:
        return sum(
            file.read_text().count('"kind":"row"')
            for file in (self.place / "out/rows").glob("*.jsonl")
        )

    def test_run_again_and_more(self) -> None:
        self.assertIn("8 cases in 2 placements, 0 duplicates", self.plan())
        self.assertIn("2 placements were never run", self.plan())
        self.assertIn("# 8 cases: 8 missing", self.study(0, "status", "out"))
        self.assertIn(
            "4 launches, 2 failed", self.study(3, "run", "out")
        )  # halo needs a window: named, it is an error
        said = self.study(0, "status", "out", "--cases")
        self.assertIn("# 8 cases: 4 done, 4 failed", said)
        self.assertIn("one of 2 cases, which are launched one by one next", said)
        self.assertIn("4 launches, 0 failed", self.study(0, "run", "out"))
        self.assertIn("# 8 cases: 4 done, 4 refused", self.study(0, "status", "out"))
        self.assertEqual(self.rows(), 8)
        # The same study with a window: other cases.
        self.write(STUDY.replace("heads = 2", "heads = 2\nwindow = 16", 1))
        self.plan()
        self.assertIn("# 4 launches, 0 failed", self.study(0, "run", "out"))
        self.assertIn("# 8 cases: 8 done", self.study(0, "status", "out"))
        self.assertIn("nothing to run", self.study(0, "run", "out"))
        # One more schedule: only its cases are run, and times are expected of the others.
        self.write(
            STUDY.replace("heads = 2", "heads = 2\nwindow = 16", 1).replace(
                '"halo"', '"halo", "all-gather"'
            )
        )
        before = self.rows()
        self.assertIn("2 placements were never run", self.plan())
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out"))
        self.assertEqual(self.rows(), before + 8)
        self.assertNotIn("never run", self.plan())
        self.assertNotIn(
            "never run",
            self.study(0, "plan", "study.toml", "--site", "site.toml", "--previous", "out"),
        )

    def test_refused_cases_are_left_alone_until_asked(self) -> None:
        self.write(STUDY.replace("[64, 128]", "[64]").replace('["ring", "halo"]', '["halo"]'))
        self.plan()
        self.study(0, "run", "out")
        status = json.loads(self.study(0, "status", "out", "--json"))
        self.assertEqual(status["counts"], {"refused": 2})
        self.assertIn("needs a causal mask with a window", status["cases"][0]["reason"])
        self.assertIn("nothing to run", self.study(0, "run", "out"))
        self.assertIn("# 2 launches, 0 failed", self.study(0, "run", "out", "--retry-refused"))

    def test_a_run_that_is_killed_goes_on(self) -> None:
        slow = (
            STUDY.replace("[64, 128]", "[64]")
            .replace('["ring", "halo"]', '"all"')
            .replace("[1, 2]", "[2, 1]")
        )
        self.write(slow.replace("[options]", 'network = ["alpha=30ms,beta=1G"]\n[options]'))
        self.plan()
        command = [sys.executable, str(SOURCE / "slurm/gyre-study"), "run", "out"]
        process = subprocess.Popen(
            command, cwd=self.place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while not any(
            b'"cp":2' in file.read_bytes() for file in (self.place / "out/rows").glob("cp2*")
        ):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)
        self.assertIn("another gyre-study is submitting or running it", self.study(3, "run", "out"))
        self.assertIn("running", json.loads(self.study(0, "status", "out", "--json"))["counts"])
        process.kill()
        process.wait(timeout=60)
        done = {
            one["case"]
            for one in json.loads(self.study(0, "status", "out", "--json"))["cases"]
            if one["state"] == "done"
        }
        self.study(0, "run", "out")  # waits for the launch, which its death has ended
        self.assertEqual(
            json.loads(self.study(0, "status", "out", "--json"))["counts"],
            {"done": 16, "refused": 2},
        )
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
        self.wait(lambda: "running" in self.study(0, "status", "out"))
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
            done = subprocess.run(
                words, cwd=self.place, capture_output=True, text=True, preexec_fn=no_space, check=False
            )
            self.assertEqual((done.returncode, done.stderr.count("\n")), (3, 1), done.stderr)
            self.assertRegex(done.stderr, r"gyre-study: error: \S+/out/\S+: ")
        left = [one for one in self.place.rglob("*") if one not in before and one.is_file()]
        self.assertEqual([one for one in left if one.stat().st_size], [])

    def test_errors(self) -> None:
        self.assertIn(
            "study.toml: no such file; studies that are there:",
            self.study(2, "plan", "nostudy", "--site", "local").replace("nostudy", "study.toml"),
        )
        self.assertIn(
            "sites that are there: ", self.study(2, "plan", "study.toml", "--site", "nosite")
        )
        self.assertIn("no plan.json", self.study(2, "run", "out"))
        self.plan()
        self.assertIn("collect out makes it", self.study(2, "report", "out"))
        self.assertIn("invalid choice: 'plann'", self.study(2, "plann"))
        self.write(STUDY.replace("gyre-attention", "gyre-atention"))
        self.assertIn(
            "nearest: gyre-attention", self.study(2, "plan", "study.toml", "--site", "site.toml")
        )
        (self.place / "site.toml").write_text(
            SITE.replace(MPIEXEC, "/nowhere/mpiexec"), encoding="utf-8"
        )
        self.write(STUDY)
        self.plan()
        self.assertIn("the site's key mpiexec names it", self.study(3, "run", "out"))
        for command in ("plan", "submit", "run", "status", "collect", "report", "compare"):
            self.assertIn(command, self.study(0, "--help"))
            self.assertIn("usage: gyre-study " + command, self.study(0, command, "--help"))


unittest.main(argv=sys.argv[:1])
