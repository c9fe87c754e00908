"""What is asked of Slurm: sbatch, squeue, scontrol, scancel, and how their answers are read."""

import os
import re
import shlex
import subprocess
from collections.abc import Collection
from dataclasses import dataclass

from .errors import RUNTIME, StudyError

MAX_ARRAY_SIZE = 1001  # Slurm's own default


class Unknown(StudyError):
    """Slurm may have done what was asked: its answer did not come, or cannot be read."""


@dataclass(frozen=True)
class Job:
    """`cluster`: of a federation, or ""."""

    number: str
    cluster: str = ""


def this_user() -> str:
    """Slurm takes ids for names, which not every container knows."""
    return str(os.getuid())


def answer(command: list[str], seconds: float = 60) -> str:
    """Standard output. An error where the command does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise StudyError(f"there is no {command[0]} here; gyre-study run does without Slurm", RUNTIME) from error
    except subprocess.TimeoutExpired as error:
        raise Unknown(f"{command[0]} does not answer in {seconds:g} s", RUNTIME) from error
    except OSError as error:
        raise StudyError(f"{command[0]}: {error.strerror}", RUNTIME) from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise StudyError(f"{shlex.join(command)}: exit code {done.returncode}: {said}", RUNTIME)
    return done.stdout


def job_of(text: str) -> Job:
    """Of what sbatch --parsable prints: "NUMBER" or "NUMBER;CLUSTER" in the last line; sites print more before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = re.fullmatch(r"([0-9]+)(?:;([\w.-]+))?", lines[-1]) if lines else None
    if not found:
        raise Unknown(
            f"sbatch --parsable printed {text.strip()[-500:]!r}; wanted: a last line such as 17 or 17;cluster", RUNTIME
        )
    return Job(found[1], found[2] or "")


def sbatch(words: list[str]) -> Job:
    """Submits a job."""
    return job_of(answer(["sbatch", "--parsable", *words], 120))


def max_array_size(usual: int) -> int:
    """Most tasks of an array: as Slurm says, or `usual` where it does not."""
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer(["scontrol", "show", "config"]), re.MULTILINE)
    except StudyError:
        found = None
    return max(1, int(found[1]) if found else usual)


def queued_jobs(users: Collection[str], clusters: Collection[str] = ("",)) -> dict[tuple[str, str], str]:
    """State by cluster and job ("12_3" of an array), and by cluster and name, of all that these users have in the queue.

    An error where Slurm does not answer: what is not known to have ended must not be submitted again.
    """
    found = {}
    for cluster in clusters:
        command = ["squeue", f"--user={','.join(sorted(users))}", "--noheader", "--array", "--format=%i %T %j"]
        try:
            text = answer([*command, f"--clusters={cluster}"] if cluster else command)
        except StudyError as error:
            raise StudyError(f"jobs were submitted, but squeue does not say what became of them: {error}", RUNTIME) from error
        for line in text.splitlines():
            if match := re.match(r"\s*(\d+(?:_\d+)?) (\w+)(?: (\S+))?\s*$", line):
                found[cluster, match[1]] = match[2]
                if match[3]:
                    found[cluster, match[3]] = match[2]
    return found


def scancel(jobs: Collection[Job], names: Collection[str], user: str) -> None:
    """Cancels jobs by number, and this user's jobs by name."""
    for cluster in sorted({job.cluster for job in jobs}):
        numbers = sorted({job.number for job in jobs if job.cluster == cluster}, key=int)
        answer(["scancel", *([f"--clusters={cluster}"] if cluster else []), *numbers], 120)
    for name in sorted(names):
        answer(["scancel", f"--user={user}", f"--name={name}"], 120)
