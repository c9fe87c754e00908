#!/usr/bin/env python3
"""Measures how far attention drifts as ranks are added: drift.py APPS [-o FOLDER] [--quick]

One causal document is attended, forward and backward, by every schedule under every layout on 1 to 32 ranks, which one
process replays (gyre-attention --replay), so that only the order of the sums differs. FOLDER (results/cpu-2core) gets

    drift.csv   a row for each array of each case: its error against float64, and its distance from one rank's bits, both
                as rms over the rms of the answer; the share of elements whose bits are not those of one rank
    drift.txt   two of these figures by schedule, type and number of ranks, under the default layout
    drift.svg   the same as a picture

--quick: few cases, f32, of 1 and 4 ranks. Inputs are bf16 numbers, so that the answers are the same for all types.
"""

import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile

import h5py
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import gyre  # noqa: E402  (found beside this file)
import gyre.reference  # noqa: E402

TOKENS, HEADS, KV_HEADS, DIM = 1024, 4, 2, 32
ARRAYS = ("out", "d_q", "d_k", "d_v")
TYPES = {
    "f32": ["-d", "f32"],
    "bf16": ["-d", "bf16"],
    "bf16, dKV in f32": ["-d", "bf16", "--wire-dkv", "f32"],
    "bf16 sums": ["-d", "bf16", "--partial-out", "bf16", "--partial-dq", "bf16"],
}
SCHEDULES = {
    "ring": ["--schedule", "ring"],
    "ring, merged at the end": ["--schedule", "ring", "--merge", "at-end"],
    "all-gather": ["--schedule", "all-gather"],
    "all-to-all": ["--schedule", "all-to-all"],
    "group-cast": ["--schedule", "group-cast"],
    "canonical": ["--schedule", "canonical"],
}
LAYOUTS = ("dual-chunk-swap", "contiguous", "striped")
SHOWN = ("out", "d_k")


def bf16_numbers(rng, *shape):
    """Normal numbers, rounded towards zero to bf16."""
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def write_problem(path):
    rng = np.random.default_rng(42)
    inputs = {
        "q": bf16_numbers(rng, TOKENS, HEADS, DIM),
        "k": bf16_numbers(rng, TOKENS, KV_HEADS, DIM),
        "v": bf16_numbers(rng, TOKENS, KV_HEADS, DIM),
        "d_out": bf16_numbers(rng, TOKENS, HEADS, DIM),
    }
    gyre.write_attention(path, **inputs)
    return gyre.reference.attention(**inputs)


def results_of(apps, problem, cp, options):
    """The arrays that a replay of `cp` ranks computes."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.h5"
        command = [str(apps / "gyre-attention"), "--input", str(problem), "--replay", "--cp", str(cp), "-n", "1",
                   "-w", "0", "-o", str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            sys.exit(f"drift.py: {' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        with h5py.File(out) as file:
            return {name: file[f"results/{name}"][...] for name in ARRAYS}


def rms(values):
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def rows_of_case(case, got, one, answers):
    for name in ARRAYS:
        size = rms(answers[name])
        figures = {
            "error": rms(got[name] - answers[name]) / size,
            "distance": rms(got[name].astype(np.float64) - one[name]) / size,
            "changed": np.mean(got[name].view(np.uint32) != one[name].view(np.uint32)),
        }
        yield {**case, "array": name, **{figure: float(f"{value:.4g}") for figure, value in figures.items()}}


def measure(apps, ranks, layouts, kinds):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        problem = pathlib.Path(folder) / "problem.h5"
        answers = write_problem(problem)
        for kind in kinds:
            for schedule, scheduled in SCHEDULES.items():
                one = None
                for layout in layouts:
                    for cp in ranks:
                        got = results_of(apps, problem, cp, [*TYPES[kind], *scheduled, "--layout", layout])
                        one = one or got  # the first case has one rank
                        case = {"type": kind, "schedule": schedule, "layout": layout, "cp": cp}
                        rows += rows_of_case(case, got, one, answers)
    return rows


def picked(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def text_of(rows, ranks, kinds):
    """For each shown array and figure a table: lines are types and schedules, columns numbers of ranks."""
    words = {"error": "rms error against float64", "distance": "rms distance from one rank's bits"}
    lines = [f"# {TOKENS} tokens, causal, {HEADS} heads over {KV_HEADS} of {DIM}, {LAYOUTS[0]}",
             "# in 1e-6 of the rms of the answer"]
    for array in SHOWN:
        for figure, word in words.items():
            lines.append("")
            lines.append(f"{array + ': ' + word:<54}" + "".join(f"{f'cp {cp}':>9}" for cp in ranks))
            for kind in kinds:
                for schedule in SCHEDULES:
                    found = picked(rows, type=kind, schedule=schedule, layout=LAYOUTS[0], array=array)
                    values = {row["cp"]: 1e6 * row[figure] for row in found}
                    lines.append(f"  {kind:<18}{schedule:<34}" + "".join(f"{values[cp]:>9.3g}" for cp in ranks))
    return "\n".join(lines) + "\n"


def draw(rows, ranks, kinds, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "drift", "font.size": 9, "axes.spines.top": False,
             "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.5}
    with plt.rc_context(style):
        figure, panels = plt.subplots(len(SHOWN), len(kinds), figsize=(9.6, 5.8), sharex=True, squeeze=False)
        for array, line in zip(SHOWN, panels):
            for kind, axes in zip(kinds, line):
                for number, schedule in enumerate(SCHEDULES):
                    found = picked(rows, type=kind, schedule=schedule, layout=LAYOUTS[0], array=array)
                    for name, dashes in (("error", "-"), ("distance", ":")):
                        values = [row[name] or np.nan for row in found]  # equal bits have no place on a logarithmic axis
                        width = 3.4 - 0.5 * number  # equal lines lie on one another, the thinnest above
                        axes.plot(ranks, values, dashes, color=f"C{number}", marker="o", markersize=width + 1.5,
                                  linewidth=width, label=schedule if name == "error" else None)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(ranks, [str(cp) for cp in ranks])
                axes.set_title(f"{array}, {kind}", loc="left", fontsize=9.5)
        for axes in panels[-1]:
            axes.set_xlabel("ranks")
        for axes in panels[:, 0]:
            axes.set_ylabel("rms, relative")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        for dashes, label in (("-", "error against float64"), (":", "distance from one rank's bits")):
            handles.append(plt.Line2D([], [], color="black", linestyle=dashes))
            labels.append(label)
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.09, 1, 1))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("apps", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results/cpu-2core")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    ranks = (1, 4) if arguments.quick else (1, 2, 4, 8, 16, 32)
    layouts, kinds = (LAYOUTS[:1], ["f32"]) if arguments.quick else (LAYOUTS, list(TYPES))
    rows = measure(arguments.apps.resolve(), ranks, layouts, kinds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with open(arguments.output / "drift.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (arguments.output / "drift.txt").write_text(text_of(rows, ranks, kinds), encoding="utf-8")
    draw(rows, ranks, kinds, arguments.output / "drift.svg")


if __name__ == "__main__":
    main()
