#!/usr/bin/env python3
"""Fuzzes every reader of files and texts: fuzz.py SOURCE BUILD [--seconds S] [--seed N] [--save FOLDER] [-J FILE] [-v]

First the cases of tests/fuzz/corpus are replayed. Then, from the seed and within the time: bytes of valid files are changed
(gyre-fuzz), their structure is changed (h5py), command lines, TOML files and specifications are drawn, result files (JSON)
are changed. Readers run in child processes, thousands of cases in each.

    accepted   read; refused: an error that says what is wrong
    timeout    the watchdog ended it, as it ends a run: exit code 4
    signals    a crash, or an exit that nobody planned; hangs: no end, and no watchdog
    other      an exception that is no error of ours, or a failed check of the program itself
    wrong      accepted, and other data was read than was written under checksums; or accepted without what every such
               file must have

Exit code 1 when there are signals, hangs or others. --save keeps the cases that were found.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import json_cases  # noqa: E402
import structure  # noqa: E402

COLUMNS = ("cases", "accepted", "refused", "timeout", "signal", "hang", "other", "wrong")
FAULTS = ("signal", "hang", "other")
STRUCTURE_BATCH = 400


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("build")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="one reader")
    parser.add_argument("--save", default="", help="folder for the cases that were found")
    parser.add_argument("-J", "--json", default="")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that was found, not three of a kind")
    return parser.parse_args()


class Fuzz:
    """A run: where things are, and what has been counted."""

    def __init__(self, chosen, scratch):
        self.source, self.build = pathlib.Path(chosen.source).resolve(), pathlib.Path(chosen.build).resolve()
        self.chosen, self.scratch = chosen, pathlib.Path(scratch)
        self.rows, self.found = {}, []
        self.save = pathlib.Path(chosen.save).resolve() if chosen.save else self.scratch / "found"
        self.seeds = self.scratch / "seeds"
        for folder in (self.save, self.seeds, self.scratch / "structure"):
            folder.mkdir(parents=True, exist_ok=True)

    def make_seeds(self):
        """Files that programs write, small enough to be copied thousands of times a second."""
        inputs, seeds = self.source / "inputs", self.seeds
        for name, *words in (
                ("import", "-o", seeds / "docs.h5", self.source / "src/core/label.hpp", self.source / "src/core/version.hpp"),
                ("pack", "--input", seeds / "docs.h5", "--capacity", "1K", "--cp", "2", "--oversize", "own-bin",
                 "-o", seeds / "packed.h5"),
                ("pack", "--input", inputs / "salm_tiny.h5", "--cp", "2", "-o", seeds / "embeddings.h5"),
                ("shard", "--input", seeds / "packed.h5", "--cp", "2", "--layout", "striped", "-o", seeds / "shards.h5"),
                ("pipeline", "--input", inputs / "docs_tiny.h5", "--model", inputs / "model_tiny.h5",
                 "-o", seeds / "results.h5")):
            done = subprocess.run([self.build / "apps" / f"gyre-{name}", *words], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"gyre-{name} made no seed:\n{done.stdout}{done.stderr}")

    def count(self, name, counts):
        row = self.rows.setdefault(name, dict.fromkeys(COLUMNS, 0))
        for column, number in counts.items():
            row[column] += number

    def fuzzer(self, *words):
        """What gyre-fuzz prints, by first word: lists of the other words."""
        command = [self.build / "tests" / "gyre-fuzz", self.source / "inputs", self.seeds, self.scratch, *words]
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True)
        lines = {"count": [], "found": [], "case": []}
        for line in done.stdout.decode(errors="replace").splitlines():
            first, *others = line.split("\t")
            lines[first].append(others)
        return lines

    def replay(self, listed):
        """[(target, path)] -> [(target, path, end, message)]"""
        path = self.scratch / "list"
        path.write_text("".join(f"{target}\t{case}\n" for target, case in listed))
        lines = self.fuzzer("list", path)
        return lines["case"], lines["count"]

    def corpus(self):
        """What was found before: each ends as designed now."""
        folder = self.source / "tests/fuzz/corpus"
        lines = [line.split(None, 3) for line in (folder / "cases.txt").read_text().splitlines() if line[:1] not in ("", "#")]
        expected = {str(folder / name): word for name, _, word, _ in lines}
        for target, path, end, message in self.replay([(target, folder / name) for name, target, *_ in lines])[0]:
            if end == "accepted" and expected[path] == "refused":
                end = "wrong"
            self.count("corpus", {"cases": 1, end: 1})
            if end not in ("accepted", "refused"):
                self.found.append(("corpus", end, f"{target} of tests/fuzz/corpus/{pathlib.Path(path).name}: {message}"))

    def bytes_and_texts(self, seconds):
        lines = self.fuzzer("draw", self.chosen.seed, seconds, self.save, *([self.chosen.only] if self.chosen.only else []))
        for name, *numbers in lines["count"]:
            self.count(name, dict(zip(COLUMNS, map(int, numbers))))
        for name, end, path, message in lines["found"]:
            self.found.append((name, end, f"{pathlib.Path(path).name}: {message}"))

    def structure_batch(self, number):
        inputs, listed, facts = self.source / "inputs", [], {}
        seeds = {"documents": [self.seeds / "docs.h5"], "reference": [inputs / "docs_tiny.h5"],
                 "model": [inputs / "model_tiny.h5"], "packed": [self.seeds / "packed.h5", self.seeds / "embeddings.h5"],
                 "shards": [self.seeds / "shards.h5"], "bshd": [inputs / "bshd_tiny.h5", inputs / "bshd_left.h5"],
                 "salm": [inputs / "salm_tiny.h5"], "attention": [inputs / "attention_window.h5"],
                 "logprobs": [inputs / "logprobs_golden.h5", inputs / "logprobs_linear.h5"],
                 "results": [self.seeds / "results.h5"], "compare": [self.seeds / "results.h5"]}
        for index in range(STRUCTURE_BATCH):
            rng = random.Random(f"{self.chosen.seed}/structure/{number}/{index}")
            target = rng.choice(sorted(seeds))
            if self.chosen.only not in ("", target):
                continue
            path = self.scratch / "structure" / f"{target}-structure-{self.chosen.seed}-{number}-{index}.h5"
            facts[str(path)] = structure.mutated(rng.choice(seeds[target]), target, path, rng)
            listed.append((target, path))
        for target, path, end, message in self.replay(listed)[0]:
            words, must_be_refused = facts[path]
            if end == "accepted" and must_be_refused:
                end = "wrong"
            self.count(f"{target}, structure", {"cases": 1, end: 1})
            if end not in ("accepted", "refused"):
                shutil.copy(path, self.save)
                self.found.append((f"{target}, structure", end, f"{pathlib.Path(path).name}: {words}: {message}"))
        shutil.rmtree(self.scratch / "structure")
        (self.scratch / "structure").mkdir()

    def everything(self):
        start, seconds = time.monotonic(), self.chosen.seconds
        self.make_seeds()
        self.corpus()
        if not self.chosen.only:
            counts, found = json_cases.run(self.source, self.scratch, self.chosen.seed, int(20 * seconds))
            for name, count in counts.items():
                self.count(name, count)
            self.found += [(text.split(":")[0], "other", text) for text in found]
        number, until = 0, start + 0.4 * seconds
        while number == 0 or time.monotonic() < until:
            self.structure_batch(number)
            number += 1
        self.bytes_and_texts(max(5.0, seconds - (time.monotonic() - start)))


def print_findings(found, verbose):
    shown = {}
    for name, end, text in found:
        shown[name, end] = shown.get((name, end), 0) + 1
        if verbose or shown[name, end] <= 3:
            print(f"# {end}: {text}"[:400])
    for (name, end), count in shown.items():
        if not verbose and count > 3:
            print(f"# {end}: {count - 3} more of {name}; -v shows them")


def main():
    chosen = arguments()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gyre-fuzz-", dir=memory) as scratch:
        fuzz = Fuzz(chosen, scratch)
        fuzz.everything()
    total = {column: sum(row[column] for row in fuzz.rows.values()) for column in COLUMNS}
    print(f"{'reader':<24}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, row in [*fuzz.rows.items(), ("all", total)]:
        print(f"{name:<24}" + "".join(f"{row[column]:>10}" for column in COLUMNS))
    print_findings(fuzz.found, chosen.verbose)
    print(f"# seed {chosen.seed}, {time.monotonic() - start:.0f} s in all")
    if chosen.json:
        pathlib.Path(chosen.json).write_text(json.dumps(
            {"schema": "gyre-fuzz/1", "seed": chosen.seed, "rows": fuzz.rows, "found": fuzz.found}, indent=2) + "\n")
    return 1 if any(total[column] for column in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
