#!/usr/bin/env python3
"""The programs on inputs/golden: golden.py APPS run [--ranks N]
                               golden.py APPS mutate [--whole N] [--trials N] [--seed S] [--jobs N] [FILE ...]

run      runs the commands of inputs/golden/index.json; every one must pass. --ranks: the programs that take any number
         of them, on so many.
mutate   changes one value of one answer at a time, and runs the commands of its file: one of them must end with exit
         code 1 and name the array and the index, or refuse what is an input, too, with exit code 2. Every value of each
         FILE, or of each file that has at most --whole of them, and --trials values drawn from the others.

MPIEXEC names the launcher. The last line counts; exit code 1 when something went wrong.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shlex
import shutil
import subprocess
import sys
import tempfile

import h5py
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "inputs" / "golden"
PARALLEL = ("gyre-attention", "gyre-logprobs", "gyre-recurrence")  # compute the same on any number of ranks
QUICK = ("-w", "0", "--max-seconds", "0.001")


def cases():
    return json.loads((GOLDEN / "index.json").read_text())["cases"]


class Programs:
    """The programs, run in a folder, with `changed` in the place of a file of the suite."""

    def __init__(self, apps, ranks):
        self.apps, self.ranks = apps, ranks

    def run(self, command, folder, changed=None):
        words = shlex.split(command)
        launch = [os.environ.get("MPIEXEC", "mpiexec"), *words[1:3]] if words[0] == "mpirun" else []
        words = words[3:] if launch else words
        program = words[0]
        for i, word in enumerate(words):
            name, colon, group = word.partition(":")
            if name.startswith("inputs/golden/"):
                file = pathlib.Path(name).name
                words[i] = str(changed if changed and changed.name == file else GOLDEN / file) + colon + group
        words[0] = str(self.apps / program)
        if program in PARALLEL:
            words += QUICK
            if self.ranks > 1:
                words = [os.environ.get("MPIEXEC", "mpiexec"), "-n", str(self.ranks), *words]
        return subprocess.run([*launch, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def is_rounded(case):
    """Its inputs do not fit float32: the programs do not compare its answers."""
    return case["file"] == "logprobs_float64.h5"


def run_all(programs):
    """The number of commands, and the lines of those that failed."""
    count, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            for command in (*case["run"], *case["more"]):
                if programs.ranks > 1 and command.split()[0] not in PARALLEL:
                    continue
                done = programs.run(command, folder)
                count += 1
                if done.returncode != 0:
                    wrong.append(f"{command}: exit code {done.returncode}\n{done.stdout[-600:]}{done.stderr[-600:]}")
    return count, wrong


def is_written(case, name):
    """Whether a program writes the array of this name: gyre-pack writes no padding mask, and nothing writes streams whose
    documents are not in the suite."""
    packs = any(command.startswith("gyre-pack") for command in case["run"])
    return not name.endswith("/padding_mask") and (packs or not name.startswith("packed/"))


def values_of(case):
    """(array, flat index) of every value of its answers that a program writes."""
    with h5py.File(GOLDEN / case["file"]) as file:
        return [(name, i) for name in case["answers"] if is_written(case, name) for i in range(file[name].size)]


def change(path, name, flat):
    """Changes one value by a hundredth of it, or of 1, an integer by 1; returns its index."""
    with h5py.File(path, "r+") as file:
        del file.attrs["content_sha256"]
        array = file[name][()]
        index = np.unravel_index(flat, array.shape)
        old = array[index]
        if array.dtype.kind in "iu":
            array[index] = old + 1
        else:
            array[index] = old + 0.01 * max(1, abs(float(old))) if np.isfinite(old) else 0.5
        file[name][...] = array
    return ", ".join(map(str, index))


def noticed(programs, case, name, flat):
    """None, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        changed = pathlib.Path(folder) / case["file"]
        shutil.copy(GOLDEN / case["file"], changed)
        index = change(changed, name, flat)
        outputs = []
        for command in (*case["run"], *case["more"]):
            done = programs.run(command, folder, changed)
            outputs.append(done.stdout + done.stderr)
            array = name.rpartition("/")[2]
            if done.returncode == 1 and f"[{index}]" in outputs[-1] and array in outputs[-1]:
                return None
            if done.returncode == 2 and array in outputs[-1]:  # an answer that is an input, too, and refused
                return None
    return f"{case['file']} {name}[{index}]: not noticed\n" + "\n".join(outputs)[-1500:]


def draw(options):
    """(case, array, flat index) of the values to change, each of a file once."""
    answered = [case for case in cases() if case["answers"] and not is_rounded(case)]
    values = {case["file"]: values_of(case) for case in answered}
    whole = [case for case in answered
             if case["file"] in options.files or 0 < len(values[case["file"]]) <= options.whole]
    draws = [(case, *value) for case in whole for value in values[case["file"]]]
    others = [case for case in answered if case not in whole and values[case["file"]]]
    rng = random.Random(options.seed)
    for _ in range(0 if options.files else options.trials):
        case = rng.choice(others)
        name = rng.choice(sorted({name for name, _ in values[case["file"]]}))
        draws.append((case, *rng.choice([value for value in values[case["file"]] if value[0] == name])))
    return draws


def mutate(programs, options):
    """The lines of a table, a row a file, and those of the values that were not noticed."""
    rows, wrong = {}, []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        draws = draw(options)
        for (case, name, _), problem in zip(draws, pool.map(lambda d: noticed(programs, *d), draws)):
            row = rows.setdefault(case["file"], {"values": len(values_of(case)), "changed": 0, "not noticed": 0, "arrays": set()})
            row["changed"] += 1
            row["arrays"].add(name)
            if problem:
                row["not noticed"] += 1
                wrong.append(problem)
    table = [f"{'file':<42} {'values':>7} {'changed':>8} {'arrays':>7} {'not noticed':>12}"]
    for file, row in sorted(rows.items()):
        table.append(f"{file:<42} {row['values']:>7} {row['changed']:>8} {len(row['arrays']):>7} {row['not noticed']:>12}")
    changed = sum(row["changed"] for row in rows.values())
    table.append(f"{changed} values changed, one at a time, in {len(rows)} files: {len(wrong)} not noticed")
    return table, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=lambda text: pathlib.Path(text).resolve(), help="folder with the programs")
    parser.add_argument("what", choices=("run", "mutate"))
    parser.add_argument("files", nargs="*", metavar="FILE", help="of inputs/golden, e.g. logprobs_one_token.h5")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="every value of files with at most N")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    programs = Programs(options.apps, options.ranks)
    if options.what == "run":
        count, wrong = run_all(programs)
        table = [f"{count} commands, {len(wrong)} failed"]
    else:
        table, wrong = mutate(programs, options)
    print("\n".join(wrong + table))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
