#!/usr/bin/env python3
"""Recurrent layers predicted and measured on this machine: measured_recurrences.py APPS [-o FILE]

gyre-info --model measures the machine once. Then gyre-predict predicts, and gyre-recurrence runs, each schedule of states on two
ranks: over the links of the machine, and over emulated ones that are slower. What computes is real. Each is run twice, and the
faster run counts: other guests of the host make runs slower, never faster. FILE (results/prediction/measured-recurrences.txt)
gets a line for each, and how often the predicted winner was the fastest. Needs two cores with nothing else to do.
"""

import argparse
import json
import pathlib
import tempfile

import measured

RANKS, ROUNDS = 2, 2
LAYOUTS = ("contiguous", "dual-chunk-swap")
LINKS = ("", "200M", "20M", "4M")  # bytes/s of emulated ones
SHAPES = ("--tokens 8K --heads 8 --key-heads 8", "--tokens 2K --heads 16 --key-heads 16")
HEADER = f"{'shape':40}{'link':>9}  {'schedule':14}{'layout':17}{'pass':5}{'measured':>12}{'predicted':>12}{'error':>9}"


def options_of(shape, **dims):
    return [*shape.split(), "--layout", ",".join(LAYOUTS), "-d", "f32", *(word for name, size in dims.items()
                                                                        for word in (f"--{name.replace('_', '-')}", str(size)))]


def predicted_of(apps, shape, link, machine, folder):
    tier = json.loads(machine.read_text())["model"]["links"][0]["tier"]
    emulated = ["--link", f"{tier}={link}"] if link else []
    measured.run([measured.program(apps, "predict"), "--machine", machine, "--recurrence", "gdn", "--cp", RANKS, "--pass", "both", *emulated,
                  *options_of(shape, head_dim=64), "-J", folder / "out.json"])
    return measured.times_of(folder / "out.json")


def measured_of(apps, shape, link, folder):
    emulated = ["--emulate-network", f"alpha=1us,beta={link}"] if link else []
    measured.run([measured.program(apps, "recurrence"), "--kind", "gdn", "--schedule", "all", *emulated,
                  *options_of(shape, key_dim=64, value_dim=64), "-J", folder / "out.json"], RANKS)
    return measured.times_of(folder / "out.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=lambda text: pathlib.Path(text).resolve(), help="folder with the programs")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=measured.ROOT / "results/prediction/measured-recurrences.txt",
                        metavar="FILE")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        machine = folder / "machine.json"
        measured.run([measured.program(options.apps, "info"), "--model", "-J", machine], RANKS)
        cases = [(shape, link) for shape in SHAPES for link in LINKS]
        runs = [{case: measured_of(options.apps, *case, folder) for case in cases} for _ in range(ROUNDS)]
        for shape, link in cases:
            for key, guess in predicted_of(options.apps, shape, link, machine, folder).items():
                took = min(run[shape, link][key] for run in runs)
                rows.append({"group": (shape, link), "key": key, "pass": key[2], "measured_ms": took, "predicted_ms": guess,
                             "error_percent": 100 * (guess / took - 1)})
    lines = [HEADER]
    for row in rows:
        (shape, link), (schedule, layout, direction) = row["group"], row["key"]
        lines.append(f"{shape:40}{f'{link}B/s' if link else 'real':>9}  {schedule:14}{layout:17}{direction:5}{row['measured_ms']:9.2f} ms"
                     f"{row['predicted_ms']:9.2f} ms{row['error_percent']:+7.1f} %")
    lines += ["", *measured.verdict(rows)]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[-3:]))


if __name__ == "__main__":
    main()
