#!/usr/bin/env python3
"""Predicts published times of recurrent layers, and says how far off it is: recurrences.py APPS [-o FILE]

inputs/published/recurrences.csv has a row for each figure; README.md beside it says what its columns mean. Figures of one GPU
may set a rate of a machine file, and say so; all others are predicted, and set nothing. An error is predicted time over
published time, minus 1. FILE (results/prediction/recurrences.txt) gets a line for each, and the reasons of errors above 10 %
of figures that set no rate: such an error without a reason is an error of this script, and so is a reason without one.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from published import INPUTS, ROOT, rows_of

MISS = 10.0  # %


def predicted_ms(apps, row, folder):
    schedule = "state-gather" if row["schedule"] == "none" else row["schedule"]
    command = [apps / "gyre-predict", "--machine", INPUTS / "machines" / f"{row['machine']}.toml", "--recurrence", row["kind"],
               "--state-schedule", schedule, "--layout", "contiguous", "--cp", row["gpus"], "--pass", "both", "-d", "bf16",
               "--batch", row["batch"], "--tokens", row["tokens"], "--heads", row["heads"], "--key-heads", row["key_heads"],
               "--head-dim", row["head_dim"], "--json", folder / "prediction.json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"recurrences.py: {row['source']}: {ran.stderr}")
    results = json.loads((folder / "prediction.json").read_text())["results"]
    return sum(r["measurements"]["time"] for r in results if row["pass"] in ("both", r["key"]["pass"]))


def table(rows, times):
    yield (f"{'source':40}{'GPU':6}{'GPUs':>4}  {'kind':5}{'schedule':14}{'tokens':>12}{'heads':>6}  {'pass':5}"
           f"{'published':>12}{'predicted':>12}{'error':>9}")
    for row, time in zip(rows, times):
        source = row["source"].removeprefix("https://github.com/").replace("/pull/", "#").split("/")[1]
        tokens = f"{row['batch']} x {row['tokens']}"
        yield (f"{source:40}{row['gpu']:6}{row['gpus']:>4}  {row['kind']:5}{row['schedule']:14}{tokens:>12}{row['heads']:>6}  "
               f"{row['pass']:5}{float(row['ms']):9.3f} ms{time:9.3f} ms{error_of(row, time):+7.1f} %"
               f"{'  sets a rate' if row['sets_rate'] else ''}")
    yield from ("", "errors above 10 %:")
    for row, time in zip(rows, times):
        if row["reason"]:
            yield f"{error_of(row, time):+7.1f} %  {row['reason']}"


def error_of(row, time):
    return 100 * (time / float(row["ms"]) - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=pathlib.Path, help="folder with gyre-predict")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results" / "prediction" / "recurrences.txt",
                        metavar="FILE")
    options = parser.parse_args()
    rows = rows_of(INPUTS / "published" / "recurrences.csv")
    with tempfile.TemporaryDirectory() as folder:
        times = [predicted_ms(options.apps, row, pathlib.Path(folder)) for row in rows]
    options.output.write_text("\n".join(table(rows, times)) + "\n", encoding="utf-8")
    wrong = [row for row, time in zip(rows, times)
             if not row["sets_rate"] and (abs(error_of(row, time)) > MISS) != bool(row["reason"])]
    for row in wrong:
        print(f"recurrences.py: {row['reason'] and 'a reason, but no miss' or 'a miss without a reason'}: "
              f"{', '.join(row.values())}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
