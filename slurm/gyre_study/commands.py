"""What each command of gyre-study does with its options; returns exit codes."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from .app import load_app
from .cases import Expansion, expand
from .errors import RUNTIME, StudyError
from .files import APPS, SLURM, find_file, load_site, load_study
from .folder import Folder, write_plan, write_whole
from .history import expected_seconds, seconds_by_kin
from .launches import launches_of
from .predict import predict as predict_all
from .status import counts, report_text, statuses


MOST_REASONS = 20
SEPARATOR = "\0"  # stands for "--"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def aligned(table: list[list[str]]) -> str:
    """Columns with two spaces between; the first line is the header."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table
    )


def axes_text(axes: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in axes.items())


def plan(options: argparse.Namespace) -> int:
    study_file = find_file(options.study, SLURM / "studies")
    site_file = find_file(options.site, SLURM / "sites")
    site = load_site(site_file)
    study = load_study(study_file, options.size, options.set, site.size)
    apps = options.apps or (site_file.parent / site.apps if site.apps else APPS)
    app = load_app(apps, study.app)
    expansion = expand(study, site, app, study_file.name)
    own = [options.output] if options.output else []
    known = seconds_by_kin([*own, *options.previous])
    print(plan_text(expansion, known))
    if study.size:
        why = "" if options.size else " (the site's)" if study.size == site.size else " (the first)"
        print(f"# size {study.size}{why}; --size chooses another")
    if options.cases:
        for placement in expansion.placements:
            for launch in launches_of(placement, placement.cases, app):
                print(f"{placement.name}: {app.name} {shlex.join(launch.arguments)}")
            for case in placement.cases:
                print(f"  {case.id}  {axes_text(case.axes)}")
    if options.output:
        write_plan(options.output, study, site, app, expansion, predict_all(expansion, app, site))
        what = "submit" if site.launcher == "srun" else "run"
        print(f"# {options.output}: gyre-study {what} {options.output} goes on")
    return 0


def plan_text(expansion: Expansion, known: dict[str, float]) -> str:
    table = [["placement", "nodes", "ranks", "cases", "expected", "node-hours", "what"]]
    total, total_hours = 0.0, 0.0
    unknown = 0
    for one in expansion.placements:
        seconds = expected_seconds(one.cases, known)
        hours = None if seconds is None else seconds * one.nodes / 3600
        total, total_hours = total + (seconds or 0), total_hours + (hours or 0)
        unknown += seconds is None
        cells = [one.name, str(one.nodes), str(one.ranks), str(len(one.cases)), duration(seconds)]
        table.append([*cells, "n/a" if hours is None else f"{hours:.3g}", axes_text(one.common)])
    cases = sum(len(one.cases) for one in expansion.placements)
    known_part = (
        f"{duration(total)}, {total_hours:.3g} node-hours"
        if unknown < len(expansion.placements)
        else "n/a"
    )
    lines = [
        aligned(table),
        f"# {cases} cases in {len(expansion.placements)} placements, {expansion.duplicates} duplicates left out",
    ]
    more = f"; {unknown} placements were never run" if unknown else ""
    return "\n".join(
        [*lines, f"# expected, from earlier runs of the same cases: {known_part}{more}"]
    )


def report_writer() -> Callable[[Path, Path], int]:
    """write_report, or an error that says what it needs."""
    try:
        from .report import write_report
    except ImportError as error:
        needed = "report needs pandas and matplotlib (Debian: python3-pandas python3-matplotlib, for /usr/bin/python3; or pip)"
        raise StudyError(f"{needed}; {sys.executable}: {error}", RUNTIME) from error
    return write_report


def submit(options: argparse.Namespace) -> int:
    from .launch import submit as hand_over

    if options.report:
        report_writer()  # its job would fail as well, after hours
    jobs, placements, cases = hand_over(
        Folder(options.folder), options.after, options.retry_refused, options.report
    )
    if not jobs:
        print("# nothing to submit: all cases are done, under way or refused")
    else:
        print(f"# submitted {cases} cases in {placements} placements: jobs {' '.join(jobs)}")
    return 0


def cancel(options: argparse.Namespace) -> int:
    from .launch import cancel as cancel_all

    jobs, local = cancel_all(Folder(options.folder))
    print(f"# cancelled: {' '.join(jobs)}" if jobs else "# nothing to cancel: no job is in the queue")
    for one in local:
        print(f"# gyre-study run goes on: {one}; end it there, with Ctrl-C or kill")
    return 0


def run(options: argparse.Namespace) -> int:
    from .launch import run as run_here

    launches, failed = run_here(Folder(options.folder), options.retry_refused)
    print(
        f"# {launches} launches, {failed} failed"
        if launches
        else "# nothing to run: all cases are done or refused"
    )
    return RUNTIME if failed else 0


def status(options: argparse.Namespace) -> int:
    folder = Folder(options.folder)
    found = statuses(folder)
    number, report_state = counts(found), report_text(folder)
    if options.json:
        cases = [
            {
                "case": one.case.id,
                "placement": one.placement.name,
                "state": one.state,
                "reason": one.reason,
                "axes": one.case.axes,
            }
            for one in found
        ]
        print(json.dumps({"cases": cases, "counts": number, "report": report_state}, indent=1))
    else:
        if options.cases:
            header = ["case", "state", "placement", "what", "why"]
            rows = [
                [one.case.id, one.state, one.placement.name, axes_text(one.case.axes), one.reason]
                for one in found
            ]
            print(aligned([header, *rows]))
        print(
            f"# {len(found)} cases: {', '.join(f'{many} {state}' for state, many in number.items())}"
        )
        if not options.cases:
            reasons = list(dict.fromkeys((one.state, one.reason) for one in found if one.reason))
            for state, reason in reasons[:MOST_REASONS]:
                print(f"#   {state}: {reason.removeprefix(f'{state}: ')}")
            if len(reasons) > MOST_REASONS:
                print(f"#   and {len(reasons) - MOST_REASONS} more: --cases lists them")
        if report_state:
            print(f"# report: {report_state}")
    return 1 if "invalid" in number else 0


def collect(options: argparse.Namespace) -> int:
    from .collect import collect as collect_all

    made = collect_all(Folder(options.folder))
    print(f"# {made.file}: {made.rows} rows of {made.runs} runs, {made.cases} cases")
    return 0


def report(options: argparse.Namespace) -> int:
    write_report = report_writer()
    folder = Folder(options.folder)
    database = folder.path / "study.sqlite"
    if not database.is_file():
        raise StudyError(
            f"{database}: it is not there; gyre-study collect {options.folder} makes it"
        )
    output: Path = options.output or folder.path / "report.html"
    figures = write_report(database, output)
    print(f"# {output}: {figures} figures")
    return 0


def sides_of(words: list[str]) -> tuple[list[Path], list[Path]]:
    """BEFORE AFTER, or several paths on either side of SEPARATOR."""
    place = words.index(SEPARATOR) if SEPARATOR in words else 1
    before, after = words[:place], words[place + (SEPARATOR in words) :]
    if not before or not after or SEPARATOR in after or (SEPARATOR not in words and len(words) != 2):
        said = shlex.join("--" if word == SEPARATOR else word for word in words).replace("'--'", "--")
        raise StudyError(f"compare {said}: wanted: BEFORE AFTER, or BEFORE ... -- AFTER ..., a path for each run")
    return [Path(word) for word in before], [Path(word) for word in after]


def compare(options: argparse.Namespace) -> int:
    try:
        from .compare import compare_files
        from .compare_text import comparison_json, comparison_text
    except ImportError as error:
        needed = "compare needs numpy (Debian: python3-numpy, for /usr/bin/python3; or pip)"
        raise StudyError(f"{needed}; {sys.executable}: {error}", RUNTIME) from error

    if not 0 < options.alpha < 1:
        raise StudyError(f"--alpha {options.alpha}: wanted: above 0, below 1; nearest: 0.01")
    for name, value, usual in (("min-effect", options.min_effect, 5), ("drift", options.drift, 5)):
        if value is not None and not 0 <= value < 1000:
            raise StudyError(f"--{name} {value}: wanted: at least 0, below 1000; nearest: {usual}")
    drift = None if options.drift is None else options.drift / 100
    found = compare_files(*sides_of(options.runs), options.min_effect / 100, options.alpha, drift)
    print(comparison_json(found) if options.json else comparison_text(found, options.all))
    return 1 if found.slower else 0


def keep_inputs(output: Path | None, inputs: list[Path]) -> None:
    """An error if the output is an input, or a file that is in one."""
    if not output or not output.exists():
        return
    for path in inputs:
        if path.exists() and (path.samefile(output) or path.resolve() in output.resolve().parents):
            raise StudyError(f"--output {output}: it would overwrite the result {path}; wanted: a new file")


def check(options: argparse.Namespace) -> int:
    from .official import opened_result
    from .official_judge import judge
    from .official_report import check_text, entry_text

    if options.output and len(options.results) > 1:
        raise StudyError(f"--output {options.output}: it takes one result, not {len(options.results)}")
    keep_inputs(options.output, options.results)
    code = 0
    for path in options.results:
        try:
            with opened_result(path) as result:
                judgement = judge(result, path)
                print(check_text(judgement))
                if judgement.refused:
                    code = max(code, 1)
                elif options.output:
                    write_whole(options.output, entry_text(judgement, result.lines))
        except StudyError as error:  # the others are judged all the same
            print(f"gyre-study: error: {error}", file=sys.stderr)
            code = max(code, error.code)
    return code


def table(options: argparse.Namespace) -> int:
    from .official_report import table_text

    text = table_text(options.folder)
    if options.output:
        write_whole(options.output, text)
    else:
        print(text, end="")
    return 0
