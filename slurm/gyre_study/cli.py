"""The commands of gyre-study."""

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import TextIO

from .errors import RUNTIME, StudyError
from .files import APPS

DESCRIPTION = """Plans, launches and evaluates studies of Gyre's programs: which schedule, layout, number of ranks,
length or network costs what, on a machine with Slurm or without."""
EPILOG = """Examples:
  slurm/gyre-study plan strong --site local -o strong        # this machine: the study's size for two cores
  slurm/gyre-study run strong                                # through mpiexec; again: only what is not done
  slurm/gyre-study status strong --cases
  slurm/gyre-study collect strong && slurm/gyre-study report strong
  slurm/gyre-study plan strong --site mine -o large          # slurm/studies/strong.toml on slurm/sites/mine.toml
  slurm/gyre-study submit large                              # the same through Slurm
  slurm/gyre-study compare old1 old2 old3 -- strong1 strong2 strong3
  slurm/gyre-study plan official-attention --size small --site mine -o small && slurm/gyre-study submit small
  slurm/gyre-study check small                               # accepted, or why not

Exit codes: 0 ok; 1 compare: a row became slower, status: a result is wrong, check, table: a result is refused; 2 usage;
3 runtime error: a file that cannot be read or written, a launch that failed; 130 interrupted.
slurm/README.md explains the files."""


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="gyre-study",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, what: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}. {more}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def folder_of(one: argparse.ArgumentParser) -> None:
        one.add_argument("folder", type=Path, help="folder of a planned study")

    plan = command("plan", "list the cases of a study, and write its folder", PLAN_TEXT)
    plan.add_argument("study", help="a TOML file, or the name of one in slurm/studies")
    plan.add_argument(
        "--site", required=True, help="a TOML file, or the name of one in slurm/sites"
    )
    plan.add_argument(
        "-o", "--output", type=Path, help="folder of the study; without it the plan is only shown"
    )
    plan.add_argument(
        "--apps", type=Path, help=f"folder of the programs (site's key apps, else {APPS})"
    )
    plan.add_argument(
        "--previous",
        type=Path,
        action="append",
        default=[],
        help="folder of another study, whose times are expected again",
    )
    plan.add_argument("--size", default="", help="size of a study that has several (the site's, else the first)")
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value, or values with commas between them, of an option in the study's list tunable",
    )
    plan.add_argument(
        "--cases", action="store_true", help="list every case, and every launch's command"
    )

    submit = command("submit", "submit to Slurm what is not done yet", SUBMIT_TEXT)
    folder_of(submit)
    submit.add_argument(
        "--after", default="", metavar="JOB", help="start when this job has ended, however it did"
    )
    submit.add_argument(
        "--report",
        action="store_true",
        help="a last job collects and reports when the others have ended",
    )
    cancel = command("cancel", "cancel the jobs of a study that are in Slurm's queue", CANCEL_TEXT)
    folder_of(cancel)
    run = command("run", "run on this host, through mpiexec, what is not done yet")
    folder_of(run)
    for one in (submit, run):
        one.add_argument(
            "--retry-refused",
            action="store_true",
            help="launch cases again that the program refused",
        )

    status = command(
        "status", "say what is done, running, queued, failed, refused and missing", STATUS_TEXT
    )
    folder_of(status)
    status.add_argument(
        "--cases", action="store_true", help="list every case, with what is known of it"
    )
    status.add_argument("--json", action="store_true", help="print cases and counts as JSON")
    collect = command("collect", "read all results into FOLDER/study.sqlite", COLLECT_TEXT)
    folder_of(collect)
    report = command(
        "report", "write FOLDER/report.html, a page with all its plots inside; collect first"
    )
    folder_of(report)
    report.add_argument("-o", "--output", type=Path, help="file of the report, instead of FOLDER/report.html")

    compare = command("compare", "say which rows became slower or faster, beyond noise", COMPARE_TEXT)
    compare.add_argument(
        "runs",
        nargs="+",
        type=str,
        metavar="RUN",
        help="folder of a study, its SQLite file, or a file of results: BEFORE AFTER, or BEFORE ... -- AFTER ...",
    )
    compare.add_argument(
        "--min-effect",
        type=float,
        default=5.0,
        metavar="PERCENT",
        help="smaller changes do not count (5)",
    )
    compare.add_argument(
        "--drift",
        type=float,
        metavar="PERCENT",
        help="standard deviation of the time between runs of one build; with one run a side it is needed (5)",
    )
    compare.add_argument(
        "--alpha",
        type=float,
        default=0.01,
        help="chance of any false alarm among all rows and groups (0.01)",
    )
    compare.add_argument("--all", action="store_true", help="list unchanged rows, too")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")

    check = command(
        "check", "say whether results are those of an official problem, or every reason why not", CHECK_TEXT
    )
    check.add_argument("results", nargs="+", type=Path, help="folder of a study, or a file of results/official")
    check.add_argument(
        "-o", "--output", type=Path, help="write one accepted result as a file, for results/official"
    )
    table = command("table", "print the table of accepted results, as Markdown")
    table.add_argument("folder", type=Path, help="folder of files that check has written")
    table.add_argument("-o", "--output", type=Path, help="file of the table, instead of standard output")
    return whole


PLAN_TEXT = """Cases that stand twice are left out. Cases that share ranks,
nodes, grid and options are one placement, which is one task of a job; schedules, layouts, operations and
lengths are run over inside of the program where it can. Times are expected only of cases that were run
before. With the folder of an older plan as --output, results that are there stay."""
SUBMIT_TEXT = """One array of jobs for each shape of an allocation; a task of an array is
one placement. What is done, running or queued is left alone, so that submit after a failure resumes; so is what may
be in the queue, because the number of its job is not known. Arrays are as large as Slurm's MaxArraySize."""
CANCEL_TEXT = """Jobs whose number is not known, because sbatch's answer could not be read or
gyre-study was ended while it waited for it, are cancelled by their name. submit hands over again what is left."""
STATUS_TEXT = """
  done      verified, and measured as the study's key accept wants it
  noisy     verified, but the timing does not meet the run rules (accept = "measured"); submit measures it again
  invalid   a result is wrong
  failed    the launch ended with an error; cut off: it was ended from outside
  refused   the program cannot run this combination
  unknown   handed to sbatch, whose answer is not known: not submitted again before gyre-study cancel
Exit code 1: a result is wrong."""
CHECK_TEXT = """docs/official.md has the rules. Exit code 1: a result was refused.
  ACCEPTED          the problem as it is, complete and right, by one clean build; the timing meets the run rules
  ACCEPTED, NOISY   the same, but its times break a run rule, and are not to be quoted
  REFUSED           anything else; every reason follows"""
COLLECT_TEXT = """Tables: cases, runs, rows (one a measured row; key and
measurements as columns), units (of columns), samples (one an iteration and rank), foms."""
COMPARE_TEXT = """Rows are the same when program, ranks,
nodes, key, inputs and all options are, but for those of measurement and output. How far two runs of one build
are apart is estimated from several runs a side (two at least, better three; a study with repeat = 3 is three runs):
  gyre-study compare old1 old2 old3 -- new1 new2 new3
All rows together, groups (rows with one value of a variable, such as pass=bwd) and rows are tested with Student's t;
groups and rows against the other rows of the same run, so that what a run drifts as a whole does not count. The
chance of any false alarm is --alpha. With one run a side nothing tells drift from change: a verdict is what exceeds
--drift, and the output says so. slurm/README.md has what three runs can find. Differences of options, build,
compiler flags, libraries and environment are named. Verdicts on rows that break a run rule are marked ~.
Exit code 1: something became slower, or a result is wrong."""


def run_command(arguments: list[str] | None) -> int:
    from . import commands

    try:
        words = sys.argv[1:] if arguments is None else arguments
        # argparse drops the first "--"; no argument of a process holds a zero byte.
        options = parser().parse_args([commands.SEPARATOR if word == "--" else word for word in words])
        return int(getattr(commands, options.command)(options))
    finally:
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    try:
        return run_command(arguments)
    except StudyError as error:
        return failed(str(error), error.code)
    except BrokenPipeError:  # the reader has closed the pipe
        silence(sys.stdout)
        return 0
    except OSError as error:
        silence(sys.stdout)
        return failed(f"{error.filename or 'the output'}: {error.strerror}", RUNTIME)
    except KeyboardInterrupt:
        return failed("interrupted; the same command goes on with what is left", 130)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return failed(f"unexpected {type(error).__name__} in {where}: {error}", RUNTIME)


def silence(stream: TextIO) -> None:
    """Drops what is left in the stream's buffer if its file accepts no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def failed(message: str, code: int) -> int:
    """Prints the reason to standard error, line by line, if possible."""
    try:
        for line in message.splitlines():
            print(f"gyre-study: error: {line}", file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)
    return code
