"""What gyre-study check and table say of results of official problems."""

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import StudyError
from .official import PREFIX, SCHEMA, Lines, opened_result
from .official_figures import FIGURES
from .official_judge import Judgement, judge
from .official_setting import ROOT, looks_up
from .shapes import parse_json


def entry_text(judgement: Judgement, lines: Lines) -> str:
    """The result as one file: its lines are as the programs wrote them, but name no folder of this host."""
    folder = judgement.folder
    assert judgement.problem is not None
    plan = parse_json(folder.path / "plan.json", (folder.path / "plan.json").read_bytes())
    plan["app"]["path"] = folder.app.name
    rows = {name: [line for _, line in numbered_lines] for name, numbered_lines in lines.items()}
    entry = {"schema": SCHEMA, "problem": judgement.problem.hash, "plan": plan, "rows": rows}
    return json.dumps(entry, separators=(",", ":")).replace(f"{ROOT}/", "") + "\n"


@dataclass
class Figure:
    """The figure of a result, and what is quoted beside it. `ranks`: on how many; `how`: what was tuned."""

    value: str
    beside: str
    ranks: int
    how: str


def figure_of(judgement: Judgement) -> Figure:
    """Of a result that was not refused."""
    assert judgement.problem is not None
    study = judgement.problem.study
    best, value, beside = FIGURES[study.app](judgement.cases)
    tuned = {**study.options, **best.case.axes}
    how = " ".join(
        f"{name}={tuned[name]}" for name in (one.replace("_", "-") for one in study.tunable) if name in tuned
    )
    return Figure(value, beside, best.placement.ranks, how)


def machine_of(judgement: Judgement) -> str:
    head = judgement.runs[-1].head
    host = head["machine"]["hosts"][0]
    devices = sorted({rank["device"].partition(" ")[2] for rank in head["ranks"]} - {""})
    hosts = len({rank["host"] for rank in head["ranks"]})
    nodes = f"{hosts} x " if hosts > 1 else ""
    if devices:  # ranks that share one are refused
        return f"{len(head['ranks'])} x {devices[0]}" + (f", {hosts} hosts" if hosts > 1 else "")
    return f"{nodes}{host['cpu']}, {host['cores']} cores"


def check_text(judgement: Judgement) -> str:
    study = judgement.folder.study
    name = f"{study.name} {study.size}"
    if judgement.problem is not None:
        name += f", problem {judgement.problem.hash}"
    lines = [f"# {judgement.path}: {name}"]
    if judgement.refused:
        return "\n".join([*lines, "REFUSED", *(f"  {reason}" for reason in judgement.refused)])
    figure = figure_of(judgement)
    ranks = f"{figure.ranks} rank{'s' if figure.ranks > 1 else ''}"
    lines.append(f"FIGURE {figure.value}, {figure.beside}; {ranks}, {machine_of(judgement)}; {figure.how}")
    if judgement.noise:
        lines += ["ACCEPTED, NOISY: correct, but its times are not to be quoted"]
        lines += [f"  {reason}" for reason in judgement.noise]
    else:
        lines.append("ACCEPTED")
    if not looks_up():
        lines.append(f"# commit {judgement.runs[-1].build['git']} was not looked up: this is no clone with its whole history")
    return "\n".join(lines)


def row_text(judgement: Judgement, file: str) -> str:
    """The row of an accepted result. `file`: its place beside the table."""
    figure, run, study = figure_of(judgement), judgement.runs[-1], judgement.folder.study
    cells = [
        study.name.removeprefix(PREFIX),
        study.size,
        machine_of(judgement),
        str(figure.ranks),
        f"{'~ ' if judgement.noise else ''}{figure.value}",
        figure.beside,
        figure.how,
        run.head["run"]["start"][:10],
        run.build["git"],
        f"[{Path(file).stem}]({file})",
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def table_text(folder: Path) -> str:
    """A page of Markdown with a row for each result of a folder. All must be accepted."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        with opened_result(path) as result:
            judgement = judge(result, path)
            if judgement.refused:
                raise StudyError(check_text(judgement), 1)
            rows.append(row_text(judgement, f"{folder.name}/{path.name}"))
    if not rows:
        raise StudyError(f"{folder}: no result is there; gyre-study check FOLDER -o FILE makes one")
    head = "| program | size | machine | ranks | figure | beside it | tuned | recorded | commit | result |\n"
    return TABLE_HEAD + head + "|---|---|---|---:|---|---|---|---|---|---|\n" + "".join(rows)


TABLE_HEAD = """# Official results

Accepted results of the [official problems](../docs/official.md), made from the files of [official/](official) by
`slurm/gyre-study table results/official -o results/table.md`. A `~` marks times that break a
[run rule](../docs/run-rules.md): the results are right, but their figures are not to be quoted.

"""
