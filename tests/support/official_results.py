"""Results of official problems, made up from a recorded one of the same program: any size, grid and schedule."""

import copy
import json
from pathlib import Path
from typing import Any

import study_results as made
from gyre_study.app import App, load_app
from gyre_study.cases import Placement, expand
from gyre_study.files import Site, load_study
from gyre_study.folder import Folder, write_plan
from gyre_study.official import STUDIES, problem_of
from gyre_study.official_figures import figures_of_merit
from gyre_study.official_rules import summarize
from gyre_study.official_setting import git
from gyre_study.official_work import WORK, Work
from gyre_study.results import Row

TIMES = [50.0, 50.1, 49.9, 50.2, 49.8, 50.0, 50.1, 49.9, 50.0]
RUN = "0123456789ab"


def build() -> dict[str, str]:
    """Of a commit that this clone has; of any, where it cannot be looked up."""
    commit = git("rev-parse", "--short=8", "HEAD")
    version = (git("show", "HEAD:CMakeLists.txt") or "VERSION 0.2.0").partition("project(gyre VERSION ")[2].split(" ")[0]
    return {**made.BUILD, "git": commit or made.BUILD["git"], "version": version or "0.2.0"}


def app_of(folder: Path, name: str) -> App:
    """A program with its own options, of a build that is clean."""
    app = load_app(folder, name)
    return App(app.name, app.path, build(), app.options)


def recorded(name: str, size: str = "tiny") -> dict[str, Any]:
    file = STUDIES.parents[1] / f"results/official/xeon-2core-{name.removeprefix('official-')}-{size}.json"
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entry


def row_of(work: Work, key: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    row = copy.deepcopy(template)
    found = summarize(TIMES)
    row |= {"run": RUN, "key": key, "samples_ms": [TIMES] * work.ranks, "statistics_ms": found, "cpu_share": 0.99,
            "time": "2027-01-31T12:00:09Z", "status": {"result": "VALID", "reasons": [], "measured": True},
            "model": {"flops": work.flops(key), "bytes_wire": None if template["model"]["bytes_wire"] is None else 0.0}}
    measured = row["measurements"]
    measured |= {**{name: value for name, value in key.items() if name in measured}, "time": found["median"],
                 "min": found["min"], "p95": found["p95"], "cv": 100 * found["cv"], "reps": len(TIMES), "err_over_tol": 0.0,
                 "finished": row["time"], "sent": 0.0, "of_peak": None, "bins": work.limits(row).get("bins", [1])[0]}
    limits = work.limits(row)
    if "ideal_bytes" in limits:
        measured["ideal_bytes"] = limits["ideal_bytes"][0]
    if "pack" in limits:
        measured["pack"] = limits["pack"][1]
    measured |= work.figures(row, found["median"] / 1e3)
    row["measurements"] = {name: value for name, value in measured.items() if name in template["measurements"]}
    return row


def lines_of(app: App, placement: Placement, work: Work, inputs: dict[str, str], recorded_lines: list[Any]) -> list[Any]:
    first = recorded_lines[0]["id"]
    head, *rows, end = copy.deepcopy([line for line in recorded_lines if first in (line.get("id"), line.get("run"))])
    host = {**head["machine"]["hosts"][0], "sockets": 1, "cores": 64, "threads": 64,
            "numa": [{"index": 0, "cpus": "0-63", "memory_bytes": 1 << 36}]}
    threads = work.size("threads", 1)
    names = [f"n{node + 1}" for node in range((work.ranks + 63) // 64)]
    head["machine"]["hosts"] = [{**host, "names": names}]
    head |= {"id": RUN, "inputs": [{"file": file, "sha256": sha} for file, sha in inputs.items()],
             "ranks": [{"rank": rank, "host": names[rank // 64], "device": "cpu", "numa": "0",
                        "cpus": ",".join(str((rank * threads + one) % 64) for one in range(threads))} for rank in range(work.ranks)]}
    head["suite"] |= {name: app.build[name] for name in ("version", "git", "git_state")}
    head["build"] = {"type": app.build["type"], "compiler": app.build["compiler"], "flags": "-O3 -DNDEBUG"}
    swept = {name: ",".join(dict.fromkeys(str(case.axes[name]) for case in placement.cases)) for name in app.swept
             if name in placement.cases[0].axes}
    head["run"] = {"argv": [app.name, *placement.arguments, *(word for name, value in swept.items() for word in (f"--{name}", value)),
                            "--json", f"rows/{placement.name}.jsonl", "--resume", "measured"],
                   "start": "2027-01-31T12:00:00Z", "launcher": "srun", "job": "slurm 7"}
    facts = {name: value[0] if isinstance(value, tuple) else value for name, value in work.facts().items()}
    given = {name.replace("-", "_"): value for name, value in work.options.items()}
    head["configuration"] |= {name: value for name, value in given.items() if name in head["configuration"]} | facts
    if "kernel" in facts:
        head["configuration"]["kernel"] = "cpu"
    keys = [key for case in placement.cases for key in work.keys(case)]
    made_rows = [row_of(work, key, next((one for one in rows if one["key"].get("pass") == key.get("pass")), rows[0])) for key in keys]
    names_of_checks: dict[str, Any] = {}
    for key in keys:
        names_of_checks |= work.checks(key, len(TIMES))
    check = end["verification"]["checks"][0]
    end["verification"]["checks"] = [
        {**check, "name": name, "count": count(64)[1] if count else 64, "max_error": 0.0, "error_over_tolerance": 0.0,
         "tolerance": work.most_tolerance(name.rpartition(": ")[2]),
         "sampled_tokens": 64 if count and count(64) != count(0) else 0,
         "of_tokens": work.documents.tokens if count and count(64) != count(0) else 0}
        for name, count in names_of_checks.items()]
    foms = figures_of_merit(app.name, work, [Row(0, "", row) for row in made_rows])
    end |= {"run": RUN, "end": "2027-01-31T12:01:00Z", "status": {"result": "VALID", "reasons": []},
            "foreign_load": {"host": names[0], "cores": 0.01, "of_cores": 64},
            "fom": [{"metric": metric, "value": 4.0 if value is None and unit == "bit" else value, "unit": unit, "tags": tags}
                    for metric, value, unit, tags in foms]}
    return [head, *made_rows, end]


def planned(path: Path, apps: Path, site: Site, name: str = "official-attention", size: str = "tiny", *chosen: str) -> Folder:
    """The folder of an official problem, with made-up results of all its cases."""
    study = load_study(STUDIES / f"{name}.toml", size, chosen)
    app = app_of(apps, study.app)
    expansion = expand(study, site, app, name)
    write_plan(path, study, site, app, expansion, {})
    folder = Folder(path)
    lines = next(iter(recorded(name)["rows"].values()))
    for number, placement in enumerate(folder.placements):
        own = lines_of(app, placement, WORK[app.name](study, placement), problem_of(study).inputs, lines)
        text = "".join(json.dumps(line) + "\n" for line in own).replace(RUN, f"{number:012x}")
        folder.rows_file(placement).write_text(text, encoding="utf-8")
    return folder
