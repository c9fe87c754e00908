#!/usr/bin/env python3
"""Runs random configurations of all programs on 1 to 8 ranks, and looks at how each ended.

    tests/faults/soak.py SOURCE BUILD [--minutes N] [--seed S] [--apps a,b] [--keep FOLDER] [-J FILE] [-v]

    passed    exit code 0, all verified, all outputs there and readable
    refused   exit code 2 with a reason, before anything was written: not every draw can be run
    failed    any other end, or a result that is not verified
    memory    a process had more memory than at its start, what was planned and a margin
    hangs     it did not end in time
    left      runs that left something behind: a process, a temporary file, shared memory

Exit code 1 when one of the last four is not 0, or when a program never passed. The N-th run of a seed is always the same:
--only N repeats it.
"""

import argparse
import json
import pathlib
import random
import shutil
import sys
import tempfile
import time

import runs
import draws
import faults
import trials

SECONDS = 120  # of one run; its own --timeout is half of that
PASSED, REFUSED, FAILED, MEMORY, HANG = "passed", "refused", "failed", "memory", "hangs"
KINDS = (PASSED, REFUSED, FAILED, MEMORY, HANG)
# Beyond start and plan: a check's reference values and rows, file buffers, what MPI shares for messages.
MARGIN_BYTES, MARGIN_SHARE = 96 << 20, 0.1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=0, metavar="N", help="this run alone, counted from 1")
    parser.add_argument("--apps", default=",".join(draws.PROGRAMS))
    parser.add_argument("-J", "--json", default="")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every run, and what bad ones said")
    chosen = parser.parse_args()
    for app in chosen.apps.split(","):
        if app not in draws.PROGRAMS:
            parser.error(f"--apps {app}: it is one of {', '.join(draws.PROGRAMS)}")
    return chosen


def memory_fault(document):
    """What a result file says of memory: '' when it kept to the plan, or planned nothing."""
    memory = document["memory"]
    if memory["planned_bytes"] is None:
        return ""
    allowed = memory["start_bytes"] + memory["planned_bytes"] * (1 + MARGIN_SHARE) + MARGIN_BYTES
    return "" if memory["peak_bytes"] <= allowed else (
        f"peak {memory['peak_bytes']}, {memory['planned_bytes']} planned, {memory['start_bytes']} at the start")


def judge(program, outcome, out):
    """(kind, why)"""
    if outcome.code is None:
        return HANG, "did not end"
    if outcome.code == 2 and f"gyre-{program.name}: " in outcome.stderr:
        written = [path.name for path in out.iterdir()]
        return (FAILED, f"refused, but wrote {written}") if written else (REFUSED, outcome.stderr.strip().splitlines()[-1])
    if outcome.code != 0:
        return FAILED, f"exit {outcome.code}"
    if program.outputs and ("-J", "out.json") in program.outputs:
        if "\nVERIFY PASSED " not in outcome.stdout:
            return FAILED, "exit 0, but not verified"
        document = json.loads((out / "out.json").read_text())
        if fault := memory_fault(document):
            return MEMORY, fault
    if ("-o", "out.h5") in program.outputs and outcome.output is None:
        return FAILED, "no output, or one that cannot be read"
    return PASSED, ""


def one_run(site, name, number, chosen):
    """(the command, kind, why, what is left, what it said)"""
    program = draws.configuration(site, site.work, name, random.Random(f"{chosen.seed}/{number}/{name}"))
    folder = site.work / f"run-{number}"
    shared = runs.shared_memory()
    process = site.launch(program, folder)
    outcome, left, state = trials.finish(process, folder, SECONDS, shared)
    kind, why = judge(program, outcome, folder / "out")
    shutil.rmtree(folder, ignore_errors=True)
    return site.in_words(program), kind, f"{why} {state}".strip(), left, outcome.text


def table(rows):
    lines = [f"{'app':<10} {'runs':>6} " + " ".join(f"{kind:>8}" for kind in (*KINDS, "left"))]
    total = {kind: sum(row[kind] for row in rows.values()) for kind in (*KINDS, "left")}
    for name, row in [*rows.items(), ("all", total)]:
        lines.append(f"{name:<10} {sum(row[kind] for kind in KINDS):>6} "
                     + " ".join(f"{row[kind]:>8}" for kind in (*KINDS, "left")))
    return "\n".join(lines), total


def show(number, command, kind, why, left, said, verbose):
    bad = kind not in (PASSED, REFUSED) or left
    if bad or verbose:
        print(f"# {number} {command}: {kind} {why}" + "".join(f"; left {x}" for x in left), flush=True)
    if bad and verbose:
        print("".join(f"#   | {line}\n" for line in said.splitlines()), end="", flush=True)


def main():
    chosen = arguments()
    runs.alone()
    names = chosen.apps.split(",")
    rows = {name: {kind: 0 for kind in (*KINDS, "left")} for name in names}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gyre-soak-") as work:
        site = runs.Site(chosen.source.resolve(), chosen.build.resolve(), pathlib.Path(work).resolve(), SECONDS / 2)
        faults.packed_streams(site, site.work)
        number = chosen.only or 1
        while time.monotonic() - start < 60 * chosen.minutes:
            name = names[(number - 1) % len(names)]
            command, kind, why, left, said = one_run(site, name, number, chosen)
            rows[name][kind] += 1
            rows[name]["left"] += bool(left)
            show(number, command, kind, why, left, said, chosen.verbose)
            if chosen.only:
                break
            number += 1
    text, total = table(rows)
    print(text)
    print(f"# seed {chosen.seed}, {time.monotonic() - start:.0f} s")
    if chosen.json:
        pathlib.Path(chosen.json).write_text(json.dumps({"seed": chosen.seed, "rows": rows}, indent=2) + "\n")
    bad = any(total[kind] for kind in (FAILED, MEMORY, HANG, "left"))
    idle = [] if chosen.only else [name for name, row in rows.items() if row[PASSED] == 0]
    if idle:
        print(f"# never passed: {', '.join(idle)}")
    sys.exit(1 if bad or idle else 0)


if __name__ == "__main__":
    main()
