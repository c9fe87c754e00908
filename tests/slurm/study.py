#!/usr/bin/env python3
"""A study on a real Slurm of two nodes: submitted, a rank killed, a job cancelled, resumed, collected, reported.

Usage: study.py SOURCE_DIR BUILD_DIR. As root it installs Slurm's packages; exit code 77, with the reason, where there can
be no such cluster.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
CLUSTER = SOURCE / "tests/support/slurm_cluster.sh"
PACKAGES = (
    "slurm-wlm slurm-wlm-basic-plugins munge iproute2 python3-pandas python3-matplotlib".split()
)

SITE = """
partition = "main"
launcher_options = ["--mpi=pmi2"]
cores_per_node = 2
max_nodes = 2
binding = "cores"
[environment]
OMP_NUM_THREADS = "1"
UCX_HANDLE_ERRORS = "none"
UCX_MEM_EVENTS = "n"
HWLOC_COMPONENTS = "-pci,-linux:pci"
UCX_TLS = "tcp,self,posix,cma"
UCX_NET_DEVICES = "eth0"
"""
# All schedules in 4 placements; those over the slow network take seconds, so that they can be met half-way.
STUDY = """
kind = "network"
title = "Two nodes"
app = "gyre-attention"
accept = "finished"
minutes = 5
[axes]
cp = [2, 4]
tokens = [128]
schedule = "all"
network = ["none", "alpha=30ms,beta=1G"]
[options]
heads = 4
kv_heads = 4
iters = 2
warmup = 1
"""


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    sys.exit(77)


def need_cluster() -> None:
    """Skips where a cluster cannot be had."""
    if os.geteuid() != 0:
        skip("a Slurm cluster on this machine needs root")
    missing = [name for name in PACKAGES
               if subprocess.run(["dpkg", "-s", name], capture_output=True, check=False).returncode]
    if missing:
        install = ("apt-get update -qq && apt-get install -y -qq --no-install-recommends "
                   + " ".join(missing))
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            done = subprocess.run(install, shell=True, capture_output=True, text=True, timeout=200,
                                  env=environment, check=False)
        except subprocess.TimeoutExpired:
            skip(f"{' '.join(missing)} could not be installed in 200 s")
        if done.returncode != 0:
            skip(f"{' '.join(missing)} cannot be installed: {done.stderr.strip()[-300:]}")
    probe = f"gyreprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True,
                          check=False)
    if made.returncode != 0:
        skip(f"no network name space can be made: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", probe], check=True)


class TwoNodes(unittest.TestCase):
    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="gyre"))
        self.folder = self.place / "two-nodes"
        (self.place / "mini.toml").write_text(SITE, encoding="utf-8")
        (self.place / "study.toml").write_text(STUDY, encoding="utf-8")
        self.addCleanup(shutil.rmtree, self.place, True)
        subprocess.run([CLUSTER, "start", self.place / "slurm", "2", "2"], check=True, timeout=60)
        self.addCleanup(subprocess.run, [CLUSTER, "stop", self.place / "slurm"], check=True,
                        timeout=60)

    def on_node(self, *words: object) -> str:
        command = [CLUSTER, "exec", self.place / "slurm", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def study(self, *words: object) -> str:
        return self.on_node("/usr/bin/python3", SOURCE / "slurm/gyre-study", *words)

    def plan(self, folder: Path) -> str:
        study, site = self.place / "study.toml", self.place / "mini.toml"
        return self.study("plan", study, "--site", site, "--apps", BUILD / "apps", "-o", folder)

    def status(self) -> dict[str, object]:
        return json.loads(self.study("status", self.folder, "--json"))

    def wait(self, what: str, is_so, seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                logs = "\n".join(file.read_text()[-2000:]
                                 for file in sorted((self.folder / "logs").glob("*")))
                self.fail(
                    f"{what}: not in {seconds} s\n{self.on_node('squeue')}\n{self.study('status', self.folder)}\n{logs}"
                )
            time.sleep(0.05)

    def rows(self, placement: dict[str, object]) -> int:
        file = self.folder / "rows" / f"{placement['name']}.jsonl"
        return file.read_bytes().count(b'"kind":"row"') if file.exists() else 0

    def job_of(self, placement: dict[str, object]) -> str:
        """ "3_1" """
        submission = json.loads((self.folder / "jobs/001/submission.json").read_text())
        return next(launch["job"] for launch in submission["launches"]
                    if launch["placement"] == placement["id"])

    def ranks(self, placement: dict[str, object]) -> list[int]:
        """Processes of the placement's launch that are no launcher."""
        output = f"rows/{placement['name']}.jsonl".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"/gyre-attention") and output in words:
                    found.append(int(process.name))
            except OSError:
                continue
        self.assertTrue(found, f"no rank of {placement['name']} runs")
        return found

    def test_inside_a_job_with_mpiexec(self) -> None:
        """And what Slurm refuses."""
        site = SITE.replace('launcher_options = ["--mpi=pmi2"]',
                            f'launcher = "mpiexec"\nmpiexec = "{MPIEXEC}"')
        study = STUDY.replace("[2, 4]", "[4]").replace('"all"', '["ring", "all-gather"]')
        study = study.replace('network = ["none", "alpha=30ms,beta=1G"]', "").replace(
            '"network"', '"length"')
        (self.place / "mini.toml").write_text(site, encoding="utf-8")
        (self.place / "study.toml").write_text(study.replace("[128]", "[64, 128]"),
                                               encoding="utf-8")
        self.plan(self.folder)
        self.study("submit", self.folder)
        self.wait("an empty queue", lambda: not self.on_node("squeue", "--noheader"))
        self.assertEqual(self.status()["counts"], {"done": 4},
                         self.study("status", self.folder, "--cases"))
        self.study("collect", self.folder)
        with sqlite3.connect(self.folder / "study.sqlite") as database:
            runs = list(database.execute("SELECT hosts, launcher FROM runs"))
        self.assertEqual(runs, [("n1 n2", "hydra")])
        logs = [file.read_text() for file in (self.folder / "logs").glob("*.cp4-*.log")]
        self.assertTrue(all(log.startswith(f"$ {MPIEXEC} -n 4 -ppn 2 -bind-to core ")
                            for log in logs))
        (self.place / "mini.toml").write_text(site.replace('"main"', '"mian"'), encoding="utf-8")
        self.plan(self.place / "other")
        words = [CLUSTER, "exec", self.place / "slurm", "/usr/bin/python3",
                 SOURCE / "slurm/gyre-study", "submit", self.place / "other"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("invalid partition specified: mian", done.stderr)

    def test_cancel(self) -> None:
        study = STUDY.replace("cp = [2, 4]", "cp = [2]").replace('network = ["none", "alpha=30ms,beta=1G"]',
                                                                 'network = ["alpha=30ms,beta=1G", "alpha=31ms,beta=1G"]')
        (self.place / "study.toml").write_text(study, encoding="utf-8")
        self.plan(self.folder)
        self.study("submit", self.folder)
        queue = self.on_node("squeue", "--noheader", "--format=%j")
        self.assertRegex(queue, r"^gyre-study-[0-9a-f]{6}-001-1x2-2\n")
        plan = json.loads((self.folder / "plan.json").read_text())
        self.wait("a row", lambda: any(self.rows(one) for one in plan["placements"]))
        number = self.job_of(plan["placements"][0]).split("_")[0]
        self.assertEqual(self.study("cancel", self.folder), f"# cancelled: {number}\n")
        self.wait("an empty queue", lambda: not self.on_node("squeue", "--noheader"))
        counts = self.status()["counts"]
        self.assertFalse({"running", "queued", "unknown"} & {*counts}, counts)
        self.assertIn("nothing to cancel", self.study("cancel", self.folder))
        left = sum(many for state, many in counts.items() if state not in ("done", "refused"))
        self.assertIn(f"submitted {left} cases", self.study("submit", self.folder))
        self.study("cancel", self.folder)
        self.wait("an empty queue", lambda: not self.on_node("squeue", "--noheader"))

    def test_killed_cancelled_resumed(self) -> None:
        said = self.plan(self.folder)
        plan = json.loads((self.folder / "plan.json").read_text())
        self.on_node(str(BUILD / "apps/gyre-info"), "--quick", "-J", str(self.place / "info.json"))
        cases = 4 * len(json.loads((self.place / "info.json").read_text())["capabilities"]["schedules"])
        self.assertIn(f"{cases} cases in 4 placements, 0 duplicates", said)
        slow = [one for one in plan["placements"] if one["common"]["network"] != "none"]
        self.assertEqual([one["nodes"] for one in slow], [1, 2])

        self.assertIn(f"submitted {cases} cases in 4 placements", self.study("submit", self.folder))
        self.wait("3 rows on a node", lambda: self.rows(slow[0]) >= 3)
        os.kill(self.ranks(slow[0])[0], signal.SIGKILL)
        self.assertIn("nothing to submit", self.study("submit", self.folder))  # all is under way
        self.wait("a row on two nodes", lambda: self.rows(slow[1]) >= 1)
        for rank in self.ranks(slow[1]):  # Slurm takes seconds to continue and to end them
            os.kill(rank, signal.SIGSTOP)
        self.on_node("scancel", self.job_of(slow[1]))
        self.wait("an empty queue", lambda: not self.on_node("squeue", "--noheader"))

        before = self.status()
        states = {one["case"]: one["state"] for one in before["cases"]}
        by_placement = {one["name"]: {states[case["id"]] for case in one["cases"]}
                        for one in plan["placements"]}
        self.assertIn("failed", by_placement[slow[0]["name"]], before)
        schedule_of = {one["id"]: one["axes"]["schedule"] for one in slow[1]["cases"]}
        unfinished = {schedule for case, schedule in schedule_of.items()
                      if states[case] in ("cut off", "failed")}
        self.assertTrue(unfinished - {"halo"}, before)  # halo is refused here: it never has a row
        self.assertIn("done", by_placement[slow[0]["name"]], "rows before the kill count")
        done = {case for case, state in states.items() if state == "done"}

        self.assertIn(
            f"submitted {sum(state not in ('done', 'refused') for state in states.values())} cases",
            self.study("submit", self.folder, "--report", "--after", self.job_of(slow[1])),
        )
        self.wait("a report", lambda: (self.folder / "report.html").exists())
        self.wait("an empty queue", lambda: not self.on_node("squeue", "--noheader"))
        self.assertEqual(self.status()["counts"], {"done": cases - 4, "refused": 4})  # halo needs a window
        self.assertIn("nothing to submit", self.study("submit", self.folder))
        self.check_rows(done, cases - 4)
        self.check_report()

    def check_rows(self, done: set[str], cases: int) -> None:
        """All cases there, none that was done measured twice; hosts, jobs and binding of each run known."""
        self.study("collect", self.folder)
        with sqlite3.connect(self.folder / "study.sqlite") as database:
            newest = dict(
                database.execute(
                    "SELECT case_id, count(*) FROM rows WHERE is_newest GROUP BY case_id"
                )
            )
            self.assertEqual(set(newest.values()), {2}, "a forward and a backward row of each")
            self.assertEqual(len(newest), cases)
            query = "SELECT case_id, key_pass, count(*) FROM rows WHERE case_id IS NOT NULL GROUP BY case_id, key_pass"
            again = {case for case, _, many in database.execute(query) if many > 1}
            bindings = [binding for (binding,) in database.execute("SELECT binding FROM runs")]
            hosts = dict(database.execute("SELECT placement, hosts FROM runs ORDER BY run_id"))
            jobs = [job for (job,) in database.execute("SELECT job FROM runs")]
            launchers = {launcher for (launcher,) in database.execute("SELECT launcher FROM runs")}
        self.assertTrue(done)
        self.assertEqual(again & done, set(), "done, and measured again")
        self.assertLessEqual(len(again), 2,
                             "of each job that ended early, the case between its passes")
        for binding in bindings:  # each rank of a node on a core of its own
            cores = [entry.split(": ")[1] for entry in binding.split(", ")]
            self.assertEqual(sorted(set(cores)), ["0", "1"], binding)
        for placement, names in hosts.items():
            self.assertEqual(names, "n1 n2", placement) if placement.startswith(
                "cp4") else self.assertIn(names, ("n1", "n2"))
        self.assertTrue(all(job.startswith("slurm ") for job in jobs), jobs)
        self.assertGreaterEqual(len(set(jobs)), 6, "four tasks, and two that resumed")
        self.assertEqual(launchers, {"srun"})

    def check_report(self) -> None:
        page = (self.folder / "report.html").read_text(encoding="utf-8")
        for wanted in ("Two nodes", "Time under slower networks", "<svg", "slurm ", "n1 n2",
                       "not VALID"):
            self.assertIn(wanted, page)


need_cluster()
unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
