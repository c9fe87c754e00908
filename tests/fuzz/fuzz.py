#!/usr/bin/env python3
"""Fuzzes every reader of files and texts:
fuzz.py SOURCE BUILD [--seconds S] [--seed N] [--jobs N] [--save FOLDER] [-J FILE] [-v]

First the cases of tests/fuzz/corpus are replayed. Then, from the seed and within the time: bytes of valid files are changed
(gyre-fuzz), their structure is changed (h5py), command lines, TOML files and specifications are drawn, result files (JSON)
are changed. Readers run in child processes, thousands of cases in each. Programs are started among special files, streams
that cannot be written and limits (processes.py), and with one wrong answer in their input (answers.py), one a case.

Each of --jobs gives a quarter of its time to structure, a fifth to programs and the rest to gyre-fuzz, where texts get a
tenth. A job's gyre-fuzz has a seed drawn from --seed and the job's number; other cases are numbered over all jobs. So a case
depends on the seed and its number alone; how many there are depends on time and jobs.

    accepted   read; refused: an error that says what is wrong
    timeout    the watchdog ended it, as it ends a run: exit code 4
    signals    a crash, or an exit that nobody planned; hangs: no end, and no watchdog
    other      an exception that is no error of ours, or a failed check of the program itself
    wrong      accepted, and other data was read than was written under checksums; or accepted without what every such
               file must have, or with an attribute of another kind; of programs, see there

Exit code 1 when there are signals, hangs, others or wrongs. --save keeps the cases that were found, each named after its
reader, end, seed and number.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path[1:1] = [str(pathlib.Path(__file__).resolve().parents[2] / name) for name in ("python", "tests/support")]
import answers  # noqa: E402
import checkpoints  # noqa: E402
import gyre  # noqa: E402
import json_cases  # noqa: E402
import processes  # noqa: E402
import structure  # noqa: E402

COLUMNS = ("cases", "accepted", "refused", "timeout", "signal", "hang", "other", "wrong")
FAULTS = ("signal", "hang", "other", "wrong")
STRUCTURE_BATCH = 50  # cases, of one reader
STRUCTURE_SHARE, PROCESS_SHARE = 0.25, 0.2  # of a job's time
PROGRAMS = (*processes.CLASSES, "answers")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("build")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="jobs at a time; default: the cores")
    parser.add_argument("--only", default="", help="one reader")
    parser.add_argument("--save", default="", help="folder for the cases that were found")
    parser.add_argument("-J", "--json", default="")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that was found, not three of a kind")
    chosen = parser.parse_args()
    if chosen.jobs < 1 or chosen.seconds <= 0:
        parser.error(f"--jobs {chosen.jobs} must be at least 1, --seconds {chosen.seconds} above 0")
    return chosen


class Fuzz:
    """A run: where things are, and what has been counted."""

    def __init__(self, chosen, scratch):
        self.source, self.build = pathlib.Path(chosen.source).resolve(), pathlib.Path(chosen.build).resolve()
        self.chosen, self.scratch = chosen, pathlib.Path(scratch)
        self.sanitized = re.search(r"^GYRE_SANITIZE:[A-Z]*=.", (self.build / "CMakeCache.txt").read_text(), re.MULTILINE)
        self.rows, self.found, self.lock = {}, [], threading.Lock()
        self.batches, self.started = itertools.count(), itertools.count()
        self.save = pathlib.Path(chosen.save).resolve() if chosen.save else self.scratch / "found"
        self.seeds = self.scratch / "seeds"
        for folder in (self.save, self.seeds):
            folder.mkdir(parents=True, exist_ok=True)

    def make_seeds(self):
        """Files that programs write, small enough to be copied thousands of times a second."""
        inputs, seeds = self.source / "inputs", self.seeds
        for name, *words in (
                ("import", "-o", seeds / "docs.h5", self.source / "src/core/label.hpp", self.source / "src/core/version.hpp"),
                ("pack", "--input", seeds / "docs.h5", "--capacity", "1K", "--cp", "2", "--oversize", "own-bin",
                 "-o", seeds / "packed.h5"),
                ("pack", "--input", seeds / "docs.h5", "--share-prefixes", "--min-prefix", "2", "-o", seeds / "trees.h5"),
                ("pack", "--input", inputs / "salm_tiny.h5", "--cp", "2", "-o", seeds / "embeddings.h5"),
                ("shard", "--input", seeds / "packed.h5", "--cp", "2", "--layout", "striped", "-o", seeds / "shards.h5"),
                ("pipeline", "--input", inputs / "docs_tiny.h5", "--model", inputs / "model_tiny.h5",
                 "-o", seeds / "results.h5"),
                ("pack", "--input", inputs / "golden/rows_extras.h5", "-o", seeds / "packed_extras.h5"),
                ("info", "--quick", "-J", seeds / "machine.json")):
            done = subprocess.run([self.build / "apps" / f"gyre-{name}", *words], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"gyre-{name} made no seed:\n{done.stdout}{done.stderr}")
        for name in ("rows_without_tables.h5", "rows_extras.h5"):
            structure.copy_with_checksums(inputs / "golden" / name, seeds / name)
        gyre.write_documents(seeds / "tokenised.h5", [[4, 0, 9], [], [7]], vocab_size=10, text_bytes=[5, 0, 0])
        checkpoints.write(seeds)
        answers.write_close_calls(seeds / "close_calls.h5", ties=False)
        answers.write_close_calls(seeds / "close_ties.h5", ties=True)
        self.site = {"apps": self.build / "apps", "seeds": seeds, "programs": processes.programs(self.source, seeds),
                     "mpiexec": os.environ.get("MPIEXEC", "mpiexec"), "answered": answers.files(self.source, seeds)}

    def count(self, name, counts):
        with self.lock:
            row = self.rows.setdefault(name, dict.fromkeys(COLUMNS, 0))
            for column, number in counts.items():
                row[column] += number

    def fuzzer(self, folder, *words):
        """What gyre-fuzz prints, by first word: lists of the other words. `folder` is for it alone."""
        command = [self.build / "tests" / "gyre-fuzz", self.source / "inputs", self.seeds, folder, *words]
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True)
        lines = {"count": [], "found": [], "case": []}
        for line in done.stdout.decode(errors="replace").splitlines():
            first, *others = line.split("\t")
            lines[first].append(others)
        return lines

    def replay(self, folder, listed):
        """[(target, path)] -> [(target, path, end, message)]"""
        path = folder / "list"
        path.write_text("".join(f"{target}\t{case}\n" for target, case in listed))
        return self.fuzzer(folder, "list", path)["case"]

    def corpus(self):
        """What was found before: each ends as designed now."""
        folder = self.source / "tests/fuzz/corpus"
        lines = [line.split(None, 3) for line in (folder / "cases.txt").read_text().splitlines() if line[:1] not in ("", "#")]
        expected = {str(folder / name): word for name, _, word, _ in lines}
        for target, path, end, message in self.replay(self.scratch, [(target, folder / name) for name, target, *_ in lines]):
            if end == "accepted" and expected[path] == "refused":
                end = "wrong"
            self.count("corpus", {"cases": 1, end: 1})
            if end not in ("accepted", "refused"):
                self.found.append(("corpus", end, f"{target} of tests/fuzz/corpus/{pathlib.Path(path).name}: {message}"))

    def results(self):
        if self.chosen.only:
            return
        counts, found = json_cases.run(self.source, self.scratch, self.chosen.seed, int(10 * self.chosen.seconds))
        for name, count in counts.items():
            self.count(name, count)
        self.found += [(text.split(":")[0], "other", text) for text in found]

    def bytes_and_texts(self, job, folder, seconds):
        seed = random.Random(f"{self.chosen.seed}/bytes/{job}").getrandbits(63)
        lines = self.fuzzer(folder, "draw", seed, seconds, self.save, *([self.chosen.only] if self.chosen.only else []))
        for name, *numbers in lines["count"]:
            self.count(name, dict(zip(COLUMNS, map(int, numbers))))
        for name, end, path, message in lines["found"]:
            self.found.append((name, end, f"{pathlib.Path(path).name}: {message}"))

    def structure_seeds(self):
        inputs = self.source / "inputs"
        return {"documents": [self.seeds / "docs.h5", self.seeds / "tokenised.h5"], "reference": [inputs / "docs_tiny.h5"],
                "model": [inputs / "model_tiny.h5"], "packed": [self.seeds / "packed.h5", self.seeds / "trees.h5", self.seeds / "embeddings.h5", self.seeds / "packed_extras.h5"],
                "shards": [self.seeds / "shards.h5"], "bshd": [inputs / "bshd_tiny.h5", inputs / "bshd_left.h5", self.seeds / "rows_without_tables.h5",
                         self.seeds / "rows_extras.h5"],
                "salm": [inputs / "salm_tiny.h5"], "attention": [inputs / "attention_window.h5"],
                "recurrence": [inputs / "golden/recurrence_documents.h5", inputs / "golden/recurrence_gla.h5"],
                "logprobs": [inputs / "logprobs_golden.h5", inputs / "logprobs_linear.h5"],
                "results": [self.seeds / "results.h5"], "compare": [self.seeds / "results.h5"]}

    def structure_batch(self, target, number, folder):
        seeds, listed, facts, cases = self.structure_seeds()[target], [], {}, folder / "structure"
        cases.mkdir()
        for index in range(STRUCTURE_BATCH):
            rng = random.Random(f"{self.chosen.seed}/structure/{number}/{index}")
            path = cases / f"{target}-structure-{self.chosen.seed}-{number}-{index}.h5"
            facts[str(path)] = structure.mutated(rng.choice(seeds), target, path, rng)
            listed.append((target, path))
        for _, path, end, message in self.replay(folder, listed):
            words, must_be_refused = facts[path]
            if end == "accepted" and must_be_refused:
                end = "wrong"
            self.count(f"{target}, structure", {"cases": 1, end: 1})
            if end not in ("accepted", "refused"):
                shutil.copy(path, self.save)
                self.found.append((f"{target}, structure", end, f"{pathlib.Path(path).name}: {words}: {message}"))
        shutil.rmtree(cases)

    def structures(self, folder, seconds):
        """Batches, readers in turns."""
        until, targets = time.monotonic() + seconds, sorted(self.structure_seeds())
        while time.monotonic() < until:
            number = next(self.batches)
            target = targets[number % len(targets)]
            if self.chosen.only in ("", target):
                self.structure_batch(target, number, folder)

    def programs(self, folder, seconds):
        """Classes in turns."""
        until, only = time.monotonic() + seconds, self.chosen.only
        while time.monotonic() < until:
            number = next(self.started)
            kind = PROGRAMS[number % len(PROGRAMS)]
            if only not in ("", kind):
                continue
            rng = random.Random(f"{self.chosen.seed}/{kind}/{number}")
            run = answers.run_case if kind == "answers" else functools.partial(processes.run_case, kind=kind)
            end, text = run(site=self.site, folder=folder / "case", rng=rng)
            self.count(f"programs, {kind}", {"cases": 1, end: 1})
            if end not in ("accepted", "refused"):
                self.found.append((f"programs, {kind}", end, f"case {number}: {text}"))

    def job(self, number, seconds):
        """Every other job begins with structure, so that some of both runs at a time: h5py uses one core."""
        folder, only = self.scratch / f"job-{number}", self.chosen.only
        folder.mkdir()
        if only in PROGRAMS:
            return self.programs(folder, seconds)
        share = STRUCTURE_SHARE if only in ("", *self.structure_seeds()) else 0
        started = PROCESS_SHARE if only == "" and not self.sanitized else 0  # a sanitizer takes all addresses
        steps = [lambda: self.structures(folder, share * seconds), lambda: self.programs(folder, started * seconds),
                 lambda: self.bytes_and_texts(number, folder, max(2.0, (1 - share - started) * seconds))]
        for step in steps if number % 2 == 0 else reversed(steps):
            step()
        return None

    def everything(self):
        start, jobs = time.monotonic(), self.chosen.jobs
        self.make_seeds()
        self.corpus()
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            seconds = self.chosen.seconds - (time.monotonic() - start)
            running = [pool.submit(self.job, number, seconds) for number in range(jobs)]
            self.results()
        for done in running:
            done.result()


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
    for name, row in [*sorted(fuzz.rows.items()), ("all", total)]:
        print(f"{name:<24}" + "".join(f"{row[column]:>10}" for column in COLUMNS))
    print_findings(fuzz.found, chosen.verbose)
    print(f"# seed {chosen.seed}, jobs {chosen.jobs}, {time.monotonic() - start:.0f} s in all")
    if chosen.json:
        pathlib.Path(chosen.json).write_text(json.dumps(
            {"schema": "gyre-fuzz/1", "seed": chosen.seed, "jobs": chosen.jobs, "rows": fuzz.rows, "found": fuzz.found}, indent=2) + "\n")
    return 1 if any(total[column] for column in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
