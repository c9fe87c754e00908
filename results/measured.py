#!/usr/bin/env python3
"""Predicts what this machine then measures: measured.py APPS [--only TEXT] [--machine FILE] [--continue] [-o FOLDER]

Needs two cores with nothing else to do, for about three quarters of an hour. The machine is calibrated once (gyre-info
--model), and configurations that the calibration did not measure are predicted (gyre-predict) and run (gyre-attention,
gyre-pipeline). Those whose ranks compute are run in ROUNDS, minutes apart, and the fastest round counts: what else uses the
processor (another guest of the host, say) makes a run slower and never faster.

    real        one and two ranks: schedules, layouts, lengths, heads, head dimensions, packed documents
    scoring     whole passes of gyre-pipeline over pages of docs/, on one and two ranks of every grid
    emulated    4 to 64 ranks that sleep instead of computing, over links of three speeds (results/prediction/emulated.toml)

FOLDER (results/prediction) gets machine.json, measured.csv, a row for each configuration and direction, and measured.txt,
a summary; rows as soon as they are there, and --continue measures the groups that have none. An error is predicted time
over measured median, minus 1. --only: groups whose name contains TEXT, written nowhere. --machine: instead of calibrating.
"""

import argparse
import collections
import csv
import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMULATED = ROOT / "results" / "prediction" / "emulated.toml"
PAGES = ("architecture.md", "demo.md", "extending.md", "packing.md")  # that scoring passes score
MARGIN = 1.05  # of a winner
CORES = 2  # of this machine
ROUNDS = 2
SECONDS = 1200  # of a program
REPETITIONS = 3  # of ranks that sleep: they vary little
ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n", "HWLOC_COMPONENTS": "-pci,-linux:pci", "OMP_NUM_THREADS": "1"}

# Name of the group, ranks, options of both programs, options of the run, bytes/s of an emulated link.
Group = collections.namedtuple("Group", "name ranks both run beta", defaults=("", None))


def real_groups():
    one = [("8 over 8 heads of 64", "--heads 8 --kv-heads 8 --head-dim 64", ("1536", "3K", "6K")),
           ("8 over 2 heads of 128", "--heads 8 --kv-heads 2 --head-dim 128", ("1536", "3K")),
           ("12 over 4 heads of 32", "--heads 12 --kv-heads 4 --head-dim 32", ("2500", "5K")),
           ("4 over 1 heads of 96", "--heads 4 --kv-heads 1 --head-dim 96", ("2K",))]
    for shape, heads, lengths in one:
        for tokens in lengths:
            yield Group(f"1 rank, {shape}, {tokens}", 1, f"{heads} --tokens {tokens} --schedule ring")
    two = [("8 over 8 heads of 64", "--heads 8 --kv-heads 8 --head-dim 64", "3K"),
           ("8 over 2 heads of 64", "--heads 8 --kv-heads 2 --head-dim 64", "5K"),
           ("4 over 2 heads of 128", "--heads 4 --kv-heads 2 --head-dim 128", "3K"),
           ("6 over 2 heads of 48", "--heads 6 --kv-heads 2 --head-dim 48", "2500")]
    for shape, heads, tokens in two:
        yield Group(f"2 ranks, {shape}, {tokens}", 2, f"{heads} --tokens {tokens} --schedule all")
    yield Group("2 ranks, a ring under every layout", 2,
                "--heads 8 --kv-heads 4 --head-dim 64 --tokens 3K --schedule ring --layout all")
    yield Group("2 ranks, packed documents", 2, "--heads 8 --kv-heads 4 --head-dim 64 --schedule all --capacity 6K"
                " --gen dist=long-tailed,count=200,max=3K,seed=5")


def emulated_groups():
    for ranks, tokens, heads in ((4, "8K", "--heads 4 --kv-heads 2"), (8, "16K", "--heads 4 --kv-heads 2"),
                                 (16, "32K", "--heads 4 --kv-heads 2"), (64, "16K", "--heads 32 --kv-heads 1")):
        # Messages are real, and two cores copy what all ranks send: at most 1.6 GB/s. More ranks take longer.
        for rate in (1600 / ranks / slower for slower in ((1, 4, 16) if ranks <= 8 else (1, 2, 4))):
            yield Group(f"{ranks} ranks, emulated, {rate:g}MB/s", ranks, f"{heads} --head-dim 64 --tokens {tokens} --schedule all",
                        f"--emulate-compute {EMULATED} --emulate-network alpha=50us,beta={rate:g}M --iters {REPETITIONS}",
                        1e6 * rate)


# Of scoring passes: name, slots of a bin, dp, cp, tp.
ScoringGroup = collections.namedtuple("ScoringGroup", "name bin dp cp tp")


def scoring_groups():
    for slots in ("2K", "8K"):
        for dp, cp, tp in ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1)):
            yield ScoringGroup(f"scoring, dp={dp} cp={cp} tp={tp}, bins of {slots}", slots, dp, cp, tp)


def program(apps, name):
    return str(apps / f"gyre-{name}")


def run(command, ranks=1, cwd=None):
    words = list(map(str, command))
    if ranks > 1:
        # Ranks that sleep must wake up in time.
        first = ["chrt", "-r", "1"] if ranks > 2 and os.geteuid() == 0 and shutil.which("chrt") else []
        words = [*first, shutil.which("mpiexec.mpich") or "mpiexec", "-n", str(ranks), *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=cwd,
                          env={**os.environ, **ENVIRONMENT})
    if done.returncode != 0:
        sys.exit(f"measured.py: exit code {done.returncode} of {shlex.join(words)}:\n{done.stdout[-500:]}{done.stderr[-1500:]}")


def times_of(path):
    """{(schedule, layout, pass): ms}"""
    results = json.loads(path.read_text())["results"]
    return {tuple(r["key"][k] for k in ("schedule", "layout", "pass")): r["measurements"]["time"] for r in results}


def emulated_machine(group, folder):
    """EMULATED with the link of the group, and with copies as CORES make them for all ranks."""
    text = EMULATED.read_text(encoding="utf-8")
    share = min(1, CORES / group.ranks)
    for name, value in (("copy_bytes_per_s", lambda old: share * old), ("bytes_per_s", lambda _: group.beta)):
        text, found = re.subn(rf"(\n{name} = \{{ value = )([\d.e]+)", lambda m, v=value: f"{m[1]}{v(float(m[2])):g}", text)
        assert found == 1, name
    path = folder / EMULATED.name
    path.write_text(text, encoding="utf-8")
    return path


def predict(apps, group, machine, output):
    """What times_of() gives, predicted."""
    run([program(apps, "predict"), "--machine", emulated_machine(group, output.parent) if group.beta else machine,
         *shlex.split(group.both), "-d", "f32", "--cp", group.ranks, "--pass", "both", "-J", output])
    return times_of(output)


def with_prediction(row, guess):
    """The row with what is predicted for it, in ms."""
    error = 100 * (guess / float(row["measured_ms"]) - 1)
    return {**row, "predicted_ms": f"{guess:.4g}", "error_percent": f"{error:.1f}"}


def predict_again(apps, groups, rows, machine, folder):
    """The rows of these groups with new predictions of what was measured."""
    for group in groups:
        predicted = predict(apps, group, machine, folder / "out.json")
        for key, row in rows.items():
            if row["group"] == group.name:
                rows[key] = with_prediction(row, predicted[row["schedule"], row["layout"], row["pass"]])


def compare(apps, group, machine, folder):
    output = folder / "out.json"
    run([program(apps, "attention"), *shlex.split(group.both), *shlex.split(group.run), "--pass", "both", "-c", "none",
         "--max-seconds", "2", "-J", output], group.ranks)
    measured = times_of(output)
    predicted = predict(apps, group, machine, output)
    for (schedule, layout, direction), time in measured.items():
        row = {"group": group.name, "ranks": group.ranks, "emulated": "yes" if "emulated" in group.name else "no",
               "schedule": schedule, "layout": layout, "pass": direction, "measured_ms": f"{time:.4g}"}
        yield with_prediction(row, predicted[schedule, layout, direction])


def scoring_time(path):
    (result,) = json.loads(path.read_text())["results"]
    return result["measurements"]["time"]


def compare_scoring(apps, group, machine, folder):
    """As compare(), of a pass of the decoder over PAGES."""
    documents, output = folder / "documents.h5", folder / "out.json"
    if not documents.exists():
        run([program(apps, "import"), "-o", documents, *(ROOT / "docs" / page for page in PAGES)])
    model = ROOT / "inputs" / "model.h5"
    grid = ["--dp", group.dp, "--cp", group.cp, "--tp", group.tp]
    run([program(apps, "pipeline"), "--input", documents, "--model", model, "--bin", group.bin, *grid, "-c", "none",
         "--max-seconds", "2", "-J", output], group.dp * group.cp * group.tp)
    time = scoring_time(output)
    run([program(apps, "predict"), "--machine", machine, "--model", model, "--input", documents, "--capacity", group.bin,
         *grid, "-d", "f32", "--schedule", "ring", "--layout", "dual-chunk-swap", "-J", output])
    guess = scoring_time(output)
    row = {"group": group.name, "ranks": group.dp * group.cp * group.tp, "emulated": "no", "schedule": "ring",
           "layout": "dual-chunk-swap", "pass": "fwd", "measured_ms": f"{time:.4g}"}
    yield with_prediction(row, guess)


def winners(rows):
    """(comparisons won by over MARGIN, those whose winner is predicted, what the predicted winner takes longer than the
    fastest, of each comparison). As --auto chooses: a group's schedules and layouts by the sum of their passes."""
    groups = collections.defaultdict(lambda: collections.defaultdict(lambda: (0, 0)))
    for row in rows:
        cases, case = groups[row["group"]], (row["schedule"], row["layout"])
        cases[case] = cases[case][0] + float(row["measured_ms"]), cases[case][1] + float(row["predicted_ms"])
    several = [list(cases.values()) for cases in groups.values() if len(cases) > 1]
    decided = [times for times in several if sorted(times)[1][0] > MARGIN * min(times)[0]]
    lost = [min(times, key=lambda time: time[1])[0] / min(times)[0] - 1 for times in several]
    return len(decided), sum(min(times)[1] == min(p for _, p in times) for times in decided), lost


def verdict(rows):
    """How often the fastest was predicted."""
    decided, right, lost = winners(rows)
    return [f"of {decided} comparisons that the fastest wins by over {100 * MARGIN - 100:.0f} %, {right} are predicted to be won"
            " by it",
            f"the predicted winner is the fastest in {lost.count(0)} of {len(lost)} comparisons, and takes"
            f" {100 * statistics.mean(lost):.1f} % longer in the mean, at most {100 * max(lost):.1f} %"]


def summary(rows):
    lines = [f"{'group':44}{'rows':>6}{'median |error|':>16}{'9 in 10 within':>16}{'worst':>9}"]
    groups = collections.defaultdict(list)
    for row in rows:
        for name in (row["group"], "all, emulated" if row["emulated"] == "yes" else "all, real", "all"):
            groups[name].append(float(row["error_percent"]))
    for name in [*(n for n in groups if not n.startswith("all")), *sorted(n for n in groups if n.startswith("all"))]:
        sizes = sorted(abs(e) for e in groups[name])
        lines.append(f"{name:44}{len(sizes):6}{statistics.median(sizes):14.1f} %{sizes[-(-9 * len(sizes) // 10) - 1]:14.1f} %"
                     f"{max(groups[name], key=abs):+7.1f} %")
    return "\n".join([*lines, "", *verdict(rows)]) + "\n"


def key_of(row):
    return tuple(row[k] for k in ("group", "schedule", "layout", "pass"))


def read_rows(folder):
    with open(folder / "measured.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(folder, rows):
    with open(folder / "measured.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "measured.txt").write_text(summary(rows), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=lambda text: pathlib.Path(text).resolve(), help="folder with the programs")
    parser.add_argument("--only", metavar="TEXT", help="groups whose name contains TEXT; print, write nothing")
    parser.add_argument("--machine", type=pathlib.Path, metavar="FILE", help="instead of calibrating")
    parser.add_argument("--continue", action="store_true", dest="resume", help="only groups without rows in measured.csv")
    parser.add_argument("--predict-again", action="store_true", dest="again",
                        help="measure nothing: predict what measured.csv has of one attention")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results" / "prediction", metavar="FOLDER")
    options = parser.parse_args()
    groups = [g for g in (*real_groups(), *scoring_groups(), *emulated_groups()) if options.only is None or options.only in g.name]
    if not groups:
        parser.error(f"--only {options.only}: no group's name contains it")
    rows = {}
    if options.resume or options.again:
        rows = {key_of(row): row for row in read_rows(options.output)}
        groups = [g for g in groups if (g.name in {row["group"] for row in rows.values()}) == options.again]
    computing = [g for g in groups if "emulated" not in g.name]
    visits = [*ROUNDS * computing, *(g for g in groups if "emulated" in g.name)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        machine = options.machine or (options.output if rows else folder) / "machine.json"
        if options.again:
            predict_again(options.apps, [g for g in groups if isinstance(g, Group)], rows, machine, folder)
            write_rows(options.output, list(rows.values()))
            print(summary(rows.values()), end="")
            return
        if not machine.exists():
            run([program(options.apps, "info"), "--model", "-J", machine.name], 2, cwd=machine.parent)
        if options.only is None and machine.parent != options.output:
            shutil.copy(machine, options.output / "machine.json")
        for group in visits:
            method = compare_scoring if isinstance(group, ScoringGroup) else compare
            for row in method(options.apps, group, machine, folder):
                old = rows.get(key_of(row))
                if old is None or float(row["measured_ms"]) < float(old["measured_ms"]):
                    rows[key_of(row)] = row
            print(next(line for line in summary(rows.values()).splitlines() if line.startswith(group.name)), flush=True)
            if options.only is None:
                write_rows(options.output, list(rows.values()))
    if options.only is not None:
        for row in rows.values():
            print(", ".join(map(str, row.values())))
    else:
        print(summary(rows.values()).splitlines()[-1])


if __name__ == "__main__":
    main()
