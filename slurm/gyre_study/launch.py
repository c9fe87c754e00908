"""Hands launches over: to Slurm (submit), or to mpiexec one after the other (run)."""

import ctypes
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from . import slurm
from .cases import Case, Placement, digest
from .errors import RUNTIME, StudyError
from .files import BINDINGS, MPIEXEC_BINDINGS
from .folder import Folder, write_whole, writing
from .launches import launches_of
from .status import (
    ENDED,
    TIMED_OUT,
    UNDER_WAY,
    attempts,
    code_text,
    is_alive,
    queue_of,
    report_job,
    report_log,
    statuses,
)

JOB_SCRIPT = Path(__file__).resolve().parent.parent / "job.sbatch"
PR_SET_PDEATHSIG = 1
PATIENCE = 60.0  # seconds that a launch may outlive its gyre-study


@dataclass
class Task:
    """What is left of a placement: its launches, as submission.json has them."""

    placement: Placement
    launches: list[dict[str, Any]]

    @property
    def shape(self) -> str:
        """Shape of the allocation."""
        return f"{self.placement.nodes}x{self.placement.ranks_per_node}-{self.placement.ranks}"


def cpus_per_task(folder: Folder, placement: Placement) -> int:
    threads = int(folder.study.options.get("threads", 0))
    usual = folder.study.ranks_per_node or folder.site.gpus_per_node or folder.site.cores_per_node
    return threads or max(1, folder.site.cores_per_node // max(usual, placement.ranks_per_node))


def launcher(folder: Folder, placement: Placement, how: str) -> list[str]:
    """The words before the program. `how`: "srun", or "mpiexec"."""
    site = folder.site
    own = site.launcher_options if how == site.launcher else []
    if how == "srun":
        shape = [
            f"--nodes={placement.nodes}",
            f"--ntasks={placement.ranks}",
            f"--ntasks-per-node={placement.ranks_per_node}",
        ]
        cpus = f"--cpus-per-task={cpus_per_task(folder, placement)}"
        return ["srun", *shape, cpus, *BINDINGS[site.binding], "--kill-on-bad-exit=1", *own]
    spread = ["-ppn", str(placement.ranks_per_node)] if placement.nodes > 1 else []
    return [
        site.mpiexec,
        "-n",
        str(placement.ranks),
        *spread,
        *MPIEXEC_BINDINGS[site.binding],
        *own,
    ]


@dataclass
class Part:
    """An array of jobs: tasks of one shape. `name`: of its files."""

    name: str
    job_name: str
    tasks: list[Task]


def tasks_to_do(folder: Folder, number: str, how: str, again: bool) -> list[Task]:
    """One task per placement that lacks cases. `again`: includes refused cases."""
    together: dict[str, list[Case]] = {}
    alone: dict[str, list[Case]] = {}
    for status in statuses(folder):
        ended = tuple(state for state in ENDED if not (again and state == "refused"))
        if status.state not in (*ended, *UNDER_WAY):
            (alone if status.alone else together).setdefault(status.placement.id, []).append(
                status.case
            )
    tasks = []
    for placement in folder.placements:
        groups = [together.get(placement.id, [])]
        groups += [[case] for case in alone.get(placement.id, [])]
        kin = {case.id: case.kin for cases in groups for case in cases}
        launches: list[dict[str, Any]] = []
        for launch in (
            one for cases in groups for one in launches_of(placement, cases, folder.app)
        ):
            # Launches start in the study's folder, so that published files name no folder of this host.
            rows = folder.rows_file(placement).relative_to(folder.path)
            output = ["--json", str(rows), "--resume", folder.accept]
            name = f"{number}.{placement.name}.{len(launches) + 1}"
            launches.append(
                {
                    "id": name,
                    "placement": placement.id,
                    "job": "",
                    "log": f"{name}.log",
                    "cases": launch.cases,
                    "kin": [kin[case] for case in launch.cases],
                    "command": [
                        *launcher(folder, placement, how),
                        folder.app.path,
                        *launch.arguments,
                        *output,
                    ],
                }
            )
        if launches:
            tasks.append(Task(placement, launches))
    return tasks


def write_submission(
    folder: Folder, place: Path, how: str, tasks: list[Task], **more: str
) -> None:
    submission = {
        "number": place.name,
        "how": how,
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": slurm.this_user(),
        "launches": [launch for task in tasks for launch in task.launches],
        **more,
    }
    write_whole(place / "submission.json", json.dumps(submission, indent=1) + "\n")


# Slurm


def environment_script(folder: Folder) -> str:
    """Modules and variables of the site, for bash."""
    lines = [f"module load {shlex.quote(module)}" for module in folder.site.modules]
    lines += [
        f"export {name}={shlex.quote(value)}" for name, value in folder.site.environment.items()
    ]
    return "\n".join(lines) + "\n"


def partition_words(folder: Folder) -> list[str]:
    site = folder.site
    words = [f"--partition={site.partition}"] if site.partition else []
    words += [f"--account={site.account}"] if site.account else []
    return words + site.sbatch_options


def job_words(folder: Folder, place: Path, part: Part, after: str) -> list[str]:
    """Words for sbatch: an array with one element per task, all of one shape."""
    placement = part.tasks[0].placement
    gpus = folder.site.gpus_per_node if folder.study.options.get("backend") == "cuda" else 0
    words = [
        f"--job-name={part.job_name}",
        f"--array=0-{len(part.tasks) - 1}",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.ranks}",
        f"--ntasks-per-node={placement.ranks_per_node}",
        f"--cpus-per-task={cpus_per_task(folder, placement)}",
        f"--time={folder.study.minutes}",
        "--exclusive",
        f"--output={folder.path}/logs/{place.name}.slurm-%A_%a.log",
        f"--chdir={folder.path}",
    ]
    words += [f"--gpus-per-node={gpus}"] if gpus else []
    words += [f"--dependency=afterany:{after}"] if after else []
    return [*words, *partition_words(folder), str(JOB_SCRIPT), str(place), part.name]


def parts_of(folder: Folder, place: Path, tasks: list[Task]) -> list[Part]:
    """Tasks by shape, in arrays as large as Slurm takes. Names of jobs are unique, so that a job can be found by it."""
    most = slurm.max_array_size(folder.site.max_array_size)
    unique = f"gyre-{folder.study.name}-{digest(str(folder.path))[:6]}-{place.name}"
    parts = []
    for shape in sorted({task.shape for task in tasks}):
        own = [task for task in tasks if task.shape == shape]
        for number, first in enumerate(range(0, len(own), most), 1):
            name = shape if number == 1 else f"{shape}.{number}"
            parts.append(Part(name, f"{unique}-{name}", own[first : first + most]))
    return parts


def submit_part(folder: Folder, place: Path, part: Part, after: str, write: Callable[[], None]) -> slurm.Job:
    """Submits an array. What is known of it is on disk before sbatch is called, and as soon as it has answered."""
    lines = [
        f"{index}\t{launch['id']}\t{folder.path}/logs/{launch['log']}\t{shlex.join(launch['command'])}\n"
        for index, task in enumerate(part.tasks)
        for launch in task.launches
    ]
    write_whole(place / f"{part.name}.launches", "".join(lines))
    launches = [(index, launch) for index, task in enumerate(part.tasks) for launch in task.launches]
    for _, launch in launches:
        launch["name"] = part.job_name
    write()
    try:
        job = slurm.sbatch(job_words(folder, place, part, after))
    except slurm.Unknown:
        raise
    except StudyError as error:
        for _, launch in launches:
            launch["gone"] = f"sbatch did not take it: {error}"
        write()
        raise
    for index, launch in launches:
        launch.update(job=f"{job.number}_{index}", cluster=job.cluster)
    write()
    return job


def submit(
    folder: Folder, after: str = "", again: bool = False, report: bool = False
) -> tuple[list[str], int, int]:
    """Jobs that were submitted, placements and cases in them."""
    with folder.lock():
        place = folder.new_submission()
        tasks = tasks_to_do(folder, place.name, folder.site.launcher, again)
        if not tasks:
            place.rmdir()
            return [], 0, 0
        write_whole(place / "environment.sh", environment_script(folder))
        write = partial(write_submission, folder, place, "slurm", tasks)
        write()
        jobs = [submit_part(folder, place, part, after, write) for part in parts_of(folder, place, tasks)]
        if report:
            jobs.append(submit_report(folder, jobs))
            write(report=jobs[-1].number)
        return (
            [job.number for job in jobs],
            len(tasks),
            sum(len(launch["cases"]) for task in tasks for launch in task.launches),
        )


def submit_report(folder: Folder, jobs: list[slurm.Job]) -> slurm.Job:
    """Submits a job that collects and reports after the others have ended, even if they failed."""
    study = [sys.executable, str(JOB_SCRIPT.parent / "gyre-study")]
    both = [shlex.join([*study, name, str(folder.path)]) for name in ("collect", "report")]
    command = " && ".join(both)
    words = [f"--job-name=gyre-{folder.study.name}-report", "--ntasks=1", "--time=30"]
    words += [
        f"--dependency=afterany:{':'.join(job.number for job in jobs)}",
        f"--output={report_log(folder, '%j')}",
    ]
    return slurm.sbatch([*words, *partition_words(folder), f"--wrap={command}"])


def cancel(folder: Folder) -> tuple[list[str], list[str]]:
    """Cancels what is in the queue, and what may be. Returns numbers or names of jobs, and local runs that go on."""
    with folder.lock():
        handed = {one.id: one for one in attempts(folder).values() if one.code is None and not one.gone}
        queue = queue_of(folder, handed.values())
        local = [one for one in handed.values() if one.is_local and is_alive(folder, one.submission)]
        waits = [one for one in handed.values() if not one.is_local and one.name]
        known = {slurm.Job(one.job.split("_")[0], one.cluster) for one in waits
                 if one.job and (one.cluster, one.job) in queue}
        unknown = {one.name for one in waits if not one.job}
        report = report_job(folder)
        known |= {slurm.Job(report)} if report else set()
        slurm.scancel(known, unknown, slurm.this_user())
        for submission in folder.submissions():
            ended = [launch for launch in submission["launches"] if launch["id"] in {one.id for one in waits}]
            for launch in ended:
                launch["gone"] = "it was cancelled"
            if ended:
                place = folder.job_folder(submission)
                write_whole(place / "submission.json", json.dumps(submission, indent=1) + "\n")
        jobs = [*sorted((job.number for job in known), key=int), *sorted(unknown)]
        return jobs, sorted({f"process {one.submission['pid']} on {one.submission['host']}" for one in local})


# Without Slurm


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code; 124 when the time is over. Whatever happens, the launcher is ended before this returns."""
    try:
        return process.wait(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            if process.poll() is None:
                os.killpg(process.pid, sign)
                try:
                    process.wait(timeout=patience)
                except subprocess.TimeoutExpired:
                    continue


def await_launches(folder: Folder) -> None:
    """Waits for launches of a `gyre-study run` that was killed: they end soon, as its death ends them."""
    until = time.monotonic() + PATIENCE
    told = False
    for attempt in {one.id: one for one in attempts(folder).values()}.values():
        while attempt.is_local and is_alive(folder, attempt.submission):
            process = f"process group {attempt.process}" if attempt.process else "about to begin"
            which = f"launch {attempt.id} ({process} on {attempt.submission['host']})"
            if attempt.submission["host"] != socket.gethostname() or time.monotonic() > until:
                raise StudyError(
                    f"{folder.path}: {which} of another gyre-study run still runs; wait for it, or end it", RUNTIME
                )
            if not told:
                print(f"# waiting for {which}, whose gyre-study run has ended", flush=True)
            told = True
            time.sleep(0.05)


def run(folder: Folder, again: bool = False) -> tuple[int, int]:
    """Launches one after the other on this host: how many there were, and how many failed.

    A case that is refused did not fail. SIGTERM and SIGHUP interrupt it, as Ctrl-C does: the launch is ended first.
    """
    for sign in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:
            signal.signal(sign, signal.default_int_handler)
    with folder.lock():
        await_launches(folder)
        place = folder.new_submission()
        tasks = tasks_to_do(folder, place.name, "mpiexec", again)
        if not tasks:
            place.rmdir()
            return 0, 0
        with (place / "held").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            write_submission(folder, place, "run", tasks)
            return run_tasks(folder, tasks, held)


def run_tasks(folder: Folder, tasks: list[Task], held: IO[str]) -> tuple[int, int]:
    total, failed, number = sum(len(task.launches) for task in tasks), 0, 0
    for task in tasks:
        until = time.monotonic() + 60 * folder.study.minutes
        for launch in task.launches:
            number += 1
            code = run_launch(folder, held, launch, until, f"[{number}/{total}]")
            attempt = attempts(folder)[launch["cases"][0]]
            failed += code != 0 and not (attempt.is_refused(folder.app) and attempt.cases == 1)
    return total, failed


def dies_with_parent() -> Callable[[], None]:
    """Called first in a child: sends it SIGTERM when this process dies for any reason (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    parent = os.getpid()

    def prepare() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM.value)
        if os.getppid() != parent:  # the parent has died already
            os._exit(TIMED_OUT)

    return prepare


def run_launch(
    folder: Folder, held: IO[str], launch: dict[str, Any], until: float, which: str
) -> int:
    """The exit code. The launch keeps `held` open, and with it locked, until its last process has ended."""
    state = Path(held.name).with_name("run.state")

    def note(event: str, **more: object) -> None:
        record = {
            "launch": launch["id"],
            "event": event,
            "time": time.time(),
            "nodes": socket.gethostname(),
            **more,
        }
        with writing(state), state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    print(f"{which} {launch['id']}: {len(launch['cases'])} cases", flush=True)
    environment = {**os.environ, **folder.site.environment}
    begin = time.monotonic()
    log_file = folder.path / "logs" / launch["log"]
    with writing(log_file), log_file.open("ab", buffering=0) as log:
        log.write(f"$ {shlex.join(launch['command'])}\n".encode())
        try:
            process = subprocess.Popen(
                launch["command"],
                cwd=folder.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(held.fileno(),),
                preexec_fn=dies_with_parent(),
            )
        except OSError as error:
            raise StudyError(
                f"{launch['command'][0]}: {error.strerror}; the site's key mpiexec names it",
                RUNTIME,
            ) from error
    try:
        note("begin", process=process.pid)
    except StudyError:
        wait_for(process, 0)
        raise
    code = wait_for(process, until - time.monotonic())
    note("end", code=code)
    print(f"{which} {launch['id']}: {code_text(code)}, {time.monotonic() - begin:.1f} s", flush=True)
    return code
