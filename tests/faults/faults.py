#!/usr/bin/env python3
"""Runs with faults: messages that are corrupted, cut, lost or late; calls that fail, memory that is not there; ranks that
are killed, stopped or told to end.

    tests/faults/faults.py SOURCE BUILD [--trials N] [--seed S] [--apps a,b] [--faults a,b] [--timeout S]
                           [--supervisors] [-J FILE] [-v]

For each program and fault, N runs on four ranks. Which message or process is struck, where and when, follows from the seed.

    noticed    the run ended as designed: exit code 1, 3 or 4 (after what one rank finds, not 4); after a signal 3 or 4, with
               lines that name rank and step
    harmless   it ended with exit code 0, and output file and counted figures are those of a clean run
    missed     it ended otherwise: a wrong result, wrong timed values, another exit code, a report that names nobody
    hangs      it did not end within the timeout and 5 s
    left       trials that left something behind: a process, a temporary file, shared memory

Exit code 1 when anything was missed, hung or left behind.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import runs  # noqa: E402
import trials  # noqa: E402

FAULTS = (*trials.MESSAGE_FAULTS, *trials.SIGNALS)
KINDS = (trials.NOTICED, trials.HARMLESS, trials.MISSED, trials.HANG)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("build")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apps", default="pack,shard,attention,logprobs,pipeline")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--timeout", type=float, default=3)
    parser.add_argument("--supervisors", action="store_true", help="signal the parents of ranks, too")
    parser.add_argument("-J", "--json", default="")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every trial, and what the run said in those that were not well")
    chosen = parser.parse_args()
    for fault in chosen.faults.split(","):
        if fault not in FAULTS:
            parser.error(f"--faults {fault}: it is one of {', '.join(FAULTS)}")
    return chosen


def packed_streams(site, work):
    """The input of gyre-shard."""
    process = site.launch(runs.programs(site.source, work)[0], work / "packing")
    if process.wait(timeout=120) != 0:
        raise RuntimeError(f"gyre-pack failed: {(work / 'packing' / 'stderr').read_text()}")
    shutil.move(work / "packing" / "out" / "out.h5", work / "packed.h5")


def one_trial(site, program, baseline, fault, number, chosen):
    """(words, verdict); what a trial of no interest wrote is removed."""
    folder = site.work / f"{program.name}-{fault}-{number}"
    rng = random.Random(f"{chosen.seed}/{program.name}/{fault}/{number}")
    if fault in trials.SIGNALS:
        words, verdict = trials.signal_trial(site, program, baseline, folder, fault, rng, chosen.supervisors)
    else:
        words, verdict = trials.message_trial(site, program, baseline, folder, fault, rng)
    shutil.rmtree(folder, ignore_errors=True)
    return words, verdict


def one_program(site, program, chosen):
    """Rows of the table, and the trials that were not well."""
    baseline = trials.Baseline(site, program, site.work / program.name)
    sent = [m for rank in baseline.messages.values() for m in rank]
    print(f"# {site.in_words(program)}: {baseline.seconds:.2f} s, {len(sent)} messages of {sum(s for _, s in sent)} bytes",
          flush=True)
    rows, found = [], []
    for fault in chosen.faults.split(","):
        row = {"app": program.name, "fault": fault, "trials": 0, "left": 0, trials.IDLE: 0, **{k: 0 for k in KINDS}}
        for number in range(chosen.trials):
            words, verdict = one_trial(site, program, baseline, fault, number, chosen)
            row["trials"] += 1
            row[verdict.kind] += 1
            row["left"] += bool(verdict.left)
            bad = verdict.kind in (trials.MISSED, trials.HANG) or verdict.left
            line = f"{program.name}: {words}: {verdict.kind}: {verdict.why}" + "".join(f"; left {x}" for x in verdict.left)
            if bad:
                found.append(line)
            if bad or chosen.verbose:
                print(f"#   {line}", flush=True)
            if bad and chosen.verbose:
                print("".join(f"#     | {said}\n" for said in verdict.said.splitlines()), end="", flush=True)
        rows.append(row)
    return rows, found


def table(rows):
    names = ["app", "fault", "trials", trials.NOTICED, trials.HARMLESS, trials.MISSED, trials.HANG, "left"]
    lines = [f"{'app':<10} {'fault':<10} {'trials':>7} {'noticed':>8} {'harmless':>9} {'missed':>7} {'hangs':>6} {'left':>5}"]
    total = {n: sum(r[n] for r in rows) for n in names[2:]}
    for row in [*rows, {"app": "all", "fault": "", **total}]:
        lines.append(f"{row['app']:<10} {row['fault']:<10} {row['trials']:>7} {row[trials.NOTICED]:>8} "
                     f"{row[trials.HARMLESS]:>9} {row[trials.MISSED]:>7} {row[trials.HANG]:>6} {row['left']:>5}")
    return "\n".join(lines), total


def main():
    chosen = arguments()
    runs.alone()
    trials.check_judges()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gyre-faults-") as work:
        work = pathlib.Path(work).resolve()
        site = runs.Site(pathlib.Path(chosen.source).resolve(), pathlib.Path(chosen.build).resolve(), work, chosen.timeout)
        packed_streams(site, work)
        rows, found = [], []
        for program in runs.programs(site.source, work):
            if program.name in chosen.apps.split(","):
                more = one_program(site, program, chosen)
                rows += more[0]
                found += more[1]
    text, total = table(rows)
    idle = sum(row[trials.IDLE] for row in rows)
    print(text)
    print(f"# seed {chosen.seed}, timeout {chosen.timeout:g} s, {time.monotonic() - start:.0f} s in all"
          + (f"; {idle} trials struck no message" if idle else ""))
    if chosen.json:
        pathlib.Path(chosen.json).write_text(json.dumps(
            {"schema": "gyre-faults/1", "seed": chosen.seed, "timeout_s": chosen.timeout, "rows": rows, "found": found},
            indent=2) + "\n")
    return 1 if total[trials.MISSED] + total[trials.HANG] + total["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
