#!/usr/bin/env python3
"""gyre-study: what rows, notes of jobs and logs make of cases, and the words for launchers.

Usage: test_study_states.py SOURCE_DIR BUILD_DIR
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

SOURCE = Path(sys.argv[1]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import study_results as made  # noqa: E402
from study_plans import Scratch, gyre_study, planned, study_of  # noqa: E402
from gyre_study.commands import submit  # noqa: E402
from gyre_study.errors import RUNTIME, StudyError  # noqa: E402
from gyre_study.files import Site  # noqa: E402
from gyre_study.folder import Folder  # noqa: E402
from gyre_study import launch, slurm  # noqa: E402
from gyre_study.launch import (  # noqa: E402
    Part,
    Task,
    environment_script,
    job_words,
    launcher,
    wait_for,
)
from gyre_study.status import counts, report_text, statuses  # noqa: E402


class States(Scratch):
    """What rows, notes of jobs and logs make of cases; no program is run."""

    def submit(self, folder: Folder, how: str, cases: list[str], **more: object) -> Path:
        """The folder of a submission of one launch."""
        place = folder.new_submission()
        launch = {"id": "l", "job": "", "log": "l.log", "cases": cases, "kin": cases, **more}
        (place / "submission.json").write_text(json.dumps(
            {"number": place.name, "how": how, "time": 0, "host": socket.gethostname(), "pid": 1,
             "launches": [launch]}))
        return place

    def rows(self, folder: Folder, text: str) -> None:
        folder.rows_file(folder.placements[0]).write_text(text, encoding="utf-8")

    def key(self, direction: str, schedule: str = "ring") -> dict[str, object]:
        return {"schedule": schedule, "pass": direction, "tokens": 64, "cp": 1}

    def both(self, result: str = "VALID", schedule: str = "ring") -> str:
        return "".join(made.row_line("r", self.key(one, schedule), [1.0] * 7, result)
                       for one in ("fwd", "bwd"))

    def states(self, folder: Folder) -> list[str]:
        return [one.state for one in statuses(folder) if one.placement is not folder.placements[-1]]

    def test_a_report_that_cannot_be_made_is_refused_before_jobs_are_submitted(self) -> None:
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64], schedule=["ring"]))
        options = argparse.Namespace(folder=folder.path, after="", retry_refused=False, report=True)
        with mock.patch.dict(sys.modules, {"pandas": None, "gyre_study.report": None}):
            with self.assertRaisesRegex(StudyError, "needs pandas and matplotlib .*or pip") as caught:
                submit(options)
        self.assertEqual(caught.exception.code, RUNTIME)
        self.assertEqual(list((folder.path / "jobs").glob("*")), [])

    def begin(self, options: str) -> str:
        words = json.dumps(["gyre-attention", *options.split()])
        return made.run_line("r", 1).replace('["gyre-attention"]', words)

    def test_from_rows(self) -> None:
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64], schedule=["ring", "halo"]))
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
            (self.begin("--cp 1 --schedule ring -n 3 --json rows/x.jsonl --resume measured") + self.both() + end, "done"),
            (self.begin("--cp 1 --heads 16 --schedule ring") + self.both() + end, "missing"),  # other options
            (self.begin("--cp 1 --schedule ring --sinks") + self.both() + end, "missing"),
            (begin.replace("GNU 12.2.0", 'GNU 12.2.0", "flags": "-O3') + self.both() + end, "done"),
            (begin + self.both() + end + begin.replace('"r"', '"s"').replace("GNU 12.2.0", 'GNU 12.2.0", "flags": "-O1'),
             "missing"),  # the last run was compiled otherwise
        ):
            self.rows(folder, text)
            self.assertEqual(self.states(folder)[0], wanted, text)
        self.assertEqual(statuses(folder)[0].state, "missing")
        self.rows(folder, self.begin("--cp 1 --heads 16") + self.both() + end)
        self.assertEqual(statuses(folder)[0].reason, "its rows are of a run with --heads 16")

    def test_what_is_accepted(self) -> None:
        folder = planned(self.path, study_of(accept="finished", cp=[1, 2], tokens=[64], schedule=["ring"]))
        self.rows(folder, made.run_line("r", 1) + self.both("UNOFFICIAL"))
        self.assertEqual(self.states(folder), ["done"])
        self.rows(folder, made.run_line("r", 1) + self.both("UNVERIFIED"))
        self.assertEqual(self.states(folder), ["noisy"])
        folder = planned(self.path, study_of(accept="finished", cp=[1, 2], tokens=[64], schedule=["ring"],
                                    options={"check": "none"}))
        self.rows(folder, made.run_line("r", 1) + self.both("UNVERIFIED"))
        self.assertEqual(self.states(folder), ["done"])

    def test_from_notes(self) -> None:
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64], schedule=["ring", "halo"]))
        place = self.submit(folder, "slurm", [case.id for case in folder.placements[0].cases])
        log = folder.path / "logs/l.log"
        note = '{"launch":"l","event":"begin","time":1}\n'
        for notes, said, wanted in (("", "", "missing"),
                                    (note, "slurmstepd: error: *** STEP 1.0 CANCELLED ***",
                                     "cut off"),
                                    (note + '{"launch":"l","ev', "", "cut off"),
                                    (note + '{"launch":"l","event":"end","time":2,"code":3}\n',
                                     "gyre-attention: error: rank 1 has died", "failed"),
                                    (note + '{"launch":"l","event":"end","time":2,"code":0}\n',
                                     "# refused: needs a window", "refused"),
                                    (note + '{"launch":"l","event":"end","time":2,"code":0}\n', "",
                                     "failed"),
                                    (note + '[]\n{"launch":1,"event":"end"}\n', "", "cut off")):
            (place / "1.state").write_text(notes)
            log.write_text(said)
            found = [one for one in statuses(folder) if one.placement is folder.placements[0]]
            self.assertEqual([one.state for one in found], [wanted] * 2)
            self.assertIn(said.removeprefix("# ").removeprefix("refused: "), found[1].reason
                          + found[1].state)
        log.write_text("# refused: schedule halo: needs a window")
        (place / "1.state").write_text(note + '{"launch":"l","event":"end","time":2,"code":0}\n')
        self.assertEqual(counts(statuses(folder)), {"failed": 1, "refused": 1, "missing": 2})

    def test_only_the_program_refuses(self) -> None:
        """Launchers have an exit code 2, and are killed by signals."""
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64]))
        place = self.submit(folder, "run", [folder.cases[0].id])
        for code, said, state, reason in (
            (2, "gyre-attention: error: no", "refused", "gyre-attention: error: no"),
            (2, "mpiexec: unknown option", "failed", "exit code 2: mpiexec: unknown option"),
            (3, "gyre-attention: error: the launcher started 4 ranks, but", "failed", "the launcher started 4 ranks"),
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
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64]))
        self.submit(folder, "slurm", [folder.cases[0].id], job="7_0")
        squeue = self.path / "squeue"
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = str(self.path)
        for script, wanted in (("exit 1", "what became of them: squeue --user="),
                               (None, "jobs were submitted, but squeue does not say")):
            squeue.write_text(f"#!/bin/sh\n{script}\n") if script else squeue.unlink()
            if script:
                squeue.chmod(0o755)
            with self.assertRaises(StudyError) as caught:
                statuses(folder)
            self.assertIn(wanted, str(caught.exception))
        for answer, state in (("7_0 RUNNING", "queued"),
                              ("7_0 PENDING", "queued"),
                              ("8_0 RUNNING", "missing")):
            squeue.write_text(f"#!/bin/sh\necho '{answer}'\n")
            squeue.chmod(0o755)
            self.assertEqual(statuses(folder)[0].state, state)

    def test_a_report_that_failed_is_said(self) -> None:
        folder = planned(self.path, study_of(cp=[1, 2], tokens=[64]))
        self.assertEqual(report_text(folder), "")
        place = self.submit(folder, "slurm", [folder.cases[0].id])
        told = json.loads((place / "submission.json").read_text())
        (place / "submission.json").write_text(json.dumps({**told, "report": "9"}))
        squeue = self.path / "squeue"
        squeue.write_text("#!/bin/sh\necho '9 PENDING'\n")
        squeue.chmod(0o755)
        with mock.patch.dict(os.environ, {"PATH": f"{self.path}:{os.environ['PATH']}"}):
            self.assertEqual(report_text(folder), "job 9 is pending")
            squeue.write_text("#!/bin/sh\n")
            (folder.path / "logs/report-9.log").write_text("gyre-study: error: report needs pandas\n")
            self.assertEqual(report_text(folder), "job 9 failed: gyre-study: error: report needs pandas")
            done = gyre_study("status", folder.path)
            self.assertIn("# report: job 9 failed: gyre-study: error: report needs pandas", done.stdout)
            (folder.path / "report.html").write_text("made")
            self.assertEqual(report_text(folder), "")

    def test_words_for_slurm(self) -> None:
        """Of what no node here has: GPUs, modules, an account, mpiexec on several nodes."""
        site = Site("c", 8, gpus_per_node=4, partition="p", account="a", sbatch_options=["--qos=x"])
        site.modules, site.environment = ["mpich/4", "a b"], {"UCX_TLS": "tcp,self"}
        study = study_of(cp=[1, 8], tokens=[64])
        folder = planned(self.path, study, site)
        task = Task(folder.placements[1], [])
        part = Part("2x4-8", "gyre-study-001-2x4-8", [task, task])
        words = job_words(folder, self.path / "jobs/001", part, "17")
        for word in ("--array=0-1", "--job-name=gyre-study-001-2x4-8", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4",
                     "--cpus-per-task=2", "--partition=p", "--account=a", "--qos=x", "--exclusive",
                     "--time=30", "--dependency=afterany:17"):
            self.assertIn(word, words)
        self.assertNotIn("--gpus-per-node=4", words)
        folder.study.options["backend"] = "cuda"
        self.assertIn("--gpus-per-node=4", job_words(folder, self.path, part, ""))
        self.assertIn("--cpu-bind=cores", launcher(folder, task.placement, "srun"))
        wanted = ["mpiexec", "-n", "8", "-ppn", "4", "-bind-to", "core"]
        self.assertEqual(launcher(folder, task.placement, "mpiexec"), wanted)
        self.assertEqual(environment_script(folder),
                         "module load mpich/4\nmodule load 'a b'\nexport UCX_TLS=tcp,self\n")

    def test_a_launcher_that_takes_too_long_is_ended(self) -> None:
        begin = time.monotonic()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.assertEqual(wait_for(process, 0.1), 124)
        self.assertIsNotNone(process.poll())
        self.assertLess(time.monotonic() - begin, 20)


SBATCH = """#!/bin/bash
echo "$*" >>"$FAKE/calls"
for word; do case $word in --job-name=*) name=${word#--job-name=} ;; --array=0-*) last=${word#--array=0-} ;; esac; done
number=$(($(cat "$FAKE/next" 2>/dev/null || echo 17) + 0))
[[ ! -e $FAKE/refuses ]] || { echo "sbatch: error: Batch job submission failed: no such partition" >&2; exit 1; }
echo $((number + 1)) >"$FAKE/next"
for ((task = 0; task <= ${last:-0}; ++task)); do echo "${number}_$task PENDING $name" >>"$FAKE/queue"; done
answer=$(cat "$FAKE/answer" 2>/dev/null)
printf "${answer:-%s\\n}" "$number"
"""
SQUEUE = """#!/bin/bash
[[ -e $FAKE/cluster && " $* " != *" --clusters=$(cat "$FAKE/cluster") "* ]] || cat "$FAKE/queue" 2>/dev/null
exit 0
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$FAKE/calls"
for word; do
  case $word in --name=*) sed -i "/ ${word#--name=}$/d" "$FAKE/queue" ;; [0-9]*) sed -i "/^${word}_/d" "$FAKE/queue" ;; esac
done
"""
SCONTROL = """#!/bin/bash
[[ -e $FAKE/most ]] || exit 1
echo "MaxArraySize            = $(cat "$FAKE/most")"
"""
BANNER = "\\n-----\\n  Welcome to the Example3 Supercomputer 2026\\n-----\\n--> Verifying valid submit host (login4)...OK\\n"


class Submissions(Scratch):
    """submit, status and cancel with a Slurm that is a few scripts."""

    def setUp(self) -> None:
        super().setUp()
        self.fake = self.place / "fake"
        self.fake.mkdir()
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            (self.fake / name).write_text(text)
            (self.fake / name).chmod(0o755)
        patch = mock.patch.dict(os.environ, {"PATH": f"{self.fake}:{os.environ['PATH']}", "FAKE": str(self.fake)})
        patch.start()
        self.addCleanup(patch.stop)
        self.folder = planned(self.path, study_of(cp=[1, 2], tokens=[64], schedule=["ring"], heads=[4, 8]))

    def say(self, **files: str) -> None:
        for name, text in files.items():
            (self.fake / name).write_text(text)

    def calls(self) -> list[str]:
        return (self.fake / "calls").read_text().splitlines() if (self.fake / "calls").exists() else []

    def jobs(self) -> list[str]:
        return [one["job"] for submission in self.folder.submissions() for one in submission["launches"]]

    def states(self) -> dict[str, int]:
        return counts(statuses(self.folder))

    def test_number_of_a_job(self) -> None:
        for text, number, cluster in (("17\n", "17", ""), ("17;north\n", "17", "north"), ("\n17", "17", ""),
                                      ("Welcome 2026\n\n 519605 \n", "519605", "")):
            self.assertEqual(slurm.job_of(text), slurm.Job(number, cluster))
        for text in ("", "\n", "Submitted batch job 17\n", "17\nWelcome\n", "17_3\n", "-17", "17;\n", "\u0661\n"):
            with self.assertRaises(slurm.Unknown) as caught:
                slurm.job_of(text)
            self.assertIn(repr(text.strip()), str(caught.exception))

    def test_a_banner_before_the_number(self) -> None:
        self.say(answer=BANNER + "%s\\n")
        self.assertEqual(launch.submit(self.folder)[0], ["17", "18"])
        self.assertEqual(self.jobs(), ["17_0", "17_1", "18_0", "18_1"])
        self.assertEqual(self.states(), {"queued": 4})
        self.assertEqual(launch.submit(self.folder)[0], [])
        self.assertEqual(len(self.calls()), 2)

    def test_an_answer_that_cannot_be_read(self) -> None:
        """It is an error that shows the answer, and nothing is submitted again before it is cancelled by its name."""
        self.say(answer="Your job %s has been submitted, thank you")
        done = gyre_study("submit", self.path)
        self.assertEqual(done.returncode, RUNTIME, done.stderr)
        self.assertIn("sbatch --parsable printed 'Your job 17 has been submitted, thank you'", done.stderr)
        self.assertEqual(self.states(), {"queued": 2, "missing": 2})  # squeue knows the name of the first
        self.say(queue="")
        self.assertEqual(self.states(), {"unknown": 2, "missing": 2})
        said = gyre_study("status", self.path).stdout
        self.assertIn("sbatch's answer is not known; gyre-study cancel ends it", said)
        self.assertNotIn("job  ", said)
        self.say(answer="%s\\n")
        self.assertEqual(launch.submit(self.folder)[1:], (2, 2))  # those that were not handed over
        self.assertEqual(self.states(), {"queued": 2, "unknown": 2})
        name = self.folder.submissions()[0]["launches"][0]["name"]
        self.assertRegex(name, r"^gyre-study-[0-9a-f]{6}-001-1x1-1$")
        done = gyre_study("cancel", self.path)
        self.assertEqual(done.stdout, f"# cancelled: 18 {name}\n", done.stderr)
        self.assertIn(f"--name={name}", self.calls()[-1])
        self.assertEqual(self.states(), {"missing": 4})
        self.assertIn("missing: it was cancelled", gyre_study("status", self.path).stdout)
        self.assertEqual(launch.submit(self.folder)[1:], (4, 4))

    def test_what_sbatch_refuses_is_not_in_the_queue(self) -> None:
        self.say(refuses="")
        with self.assertRaisesRegex(StudyError, "no such partition"):
            launch.submit(self.folder)
        self.assertEqual(self.states(), {"missing": 4})
        said = gyre_study("status", self.path).stdout
        self.assertIn("missing: sbatch did not take it: sbatch --parsable", said)
        self.assertIn("missing: it was not handed to sbatch", said)
        (self.fake / "refuses").unlink()
        self.assertEqual(launch.submit(self.folder)[1:], (4, 4))

    def test_an_end_while_sbatch_is_waited_for(self) -> None:
        """As when gyre-study is killed: what was handed over is known by its name."""
        with mock.patch.object(slurm, "sbatch", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                launch.submit(self.folder)
        self.assertEqual(self.states(), {"unknown": 2, "missing": 2})
        with mock.patch.object(slurm, "sbatch", side_effect=slurm.Unknown("sbatch does not answer in 120 s")):
            with self.assertRaises(slurm.Unknown):
                launch.submit(self.folder)
        self.assertEqual(self.states(), {"unknown": 4})

    def test_a_number_of_an_older_version_that_is_none(self) -> None:
        launch.submit(self.folder)
        place = self.folder.job_folder(self.folder.submissions()[0])
        told = json.loads((place / "submission.json").read_text())
        for one in told["launches"]:
            del one["name"], one["cluster"]
            one["job"] = "-----\nWelcome\n17_0"
        (place / "submission.json").write_text(json.dumps(told))
        self.assertEqual(self.states(), {"unknown": 4})

    def test_a_job_of_another_cluster(self) -> None:
        self.say(answer="%s;south\\n", cluster="south")
        launch.submit(self.folder)
        self.assertEqual(self.states(), {"queued": 4})
        self.assertEqual(launch.cancel(self.folder), (["17", "18"], []))
        self.assertIn("scancel --clusters=south 17 18", self.calls())
        self.assertEqual(self.states(), {"missing": 4})

    def test_arrays_are_split(self) -> None:
        study = study_of("length", cp=[1], tokens=[64, 128], schedule=["ring"], heads=list(range(1, 8)))
        folder = planned(self.place / "many", study)
        self.assertEqual(len(folder.placements), 7)
        self.say(most="3")
        self.assertEqual(launch.submit(folder)[0], ["17", "18", "19"])
        arrays = [word for call in self.calls() for word in call.split() if word.startswith("--array")]
        self.assertEqual(arrays, ["--array=0-2", "--array=0-2", "--array=0-0"])
        lines = [line.split("\t")[:2] for name in ("1x1-1", "1x1-1.2", "1x1-1.3")
                 for line in (folder.path / f"jobs/001/{name}.launches").read_text().splitlines()]
        self.assertEqual([number for number, _ in lines], list("0120120"))
        self.assertEqual(len({one for _, one in lines}), 7)
        self.assertEqual([one["job"] for one in folder.submissions()[0]["launches"]],
                         ["17_0", "17_1", "17_2", "18_0", "18_1", "18_2", "19_0"])
        self.assertEqual(slurm.max_array_size(9), 3)
        (self.fake / "most").unlink()
        self.assertEqual(slurm.max_array_size(9), 9)
        self.assertEqual(Site("x", 1).max_array_size, 1001)

    def test_cancel_of_nothing(self) -> None:
        self.assertEqual(gyre_study("cancel", self.path).stdout, "# nothing to cancel: no job is in the queue\n")
        launch.submit(self.folder, report=True)
        self.say(queue=(self.fake / "queue").read_text().replace("19_0", "19"))  # the report is no array
        self.assertEqual(launch.cancel(self.folder), (["17", "18", "19"], []))


unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
