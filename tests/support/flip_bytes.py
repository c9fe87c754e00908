#!/usr/bin/env python3
"""Runs programs on inputs with one changed byte: flip_bytes.py SOURCE_DIR APPS_DIR SCRATCH TRIALS [SEED [LAUNCHER...]]

Every run must end by an exit code, 0 to 4, and say something when it is not 0: never by a signal. Prints how many runs ended how,
and the trials in which a signal was caught. HDF5 keeps most of what it trusts at the beginning of its blocks: half of the changes
are near those, half are anywhere. TRIALS may be a list of changes instead, FILE:OFFSET:VALUE,...
"""
import collections
import os
import random
import re
import subprocess
import sys

source, apps, scratch, trials = sys.argv[1:5]
seed = int(sys.argv[5]) if len(sys.argv) > 5 else 1
launcher = sys.argv[6:]

READERS = {"docs_tiny.h5": ["gyre-pack", "--capacity", "256", "--input"],
           "bshd_tiny.h5": ["gyre-pack", "--input"], "salm_tiny.h5": ["gyre-pack", "--input"],
           "attention_window.h5": ["gyre-attention", "-w", "0", "-n", "1", "--input"],
           "logprobs_ties.h5": ["gyre-logprobs", "-w", "0", "-n", "1", "--input"],
           "model_tiny.h5": ["gyre-pipeline", "-w", "0", "--input", f"{source}/inputs/docs_tiny.h5",
                             "--dry-run", "--model"]}
BLOCKS = re.compile(rb"\x89HDF|TREE|HEAP|SNOD|GCOL|OHDR|\x01\x00.\x00\x01\x00\x00\x00", re.S)


def contents(name):
    with open(f"{source}/inputs/{name}", "rb") as file:
        return file.read()


def drawn_changes(count):
    generator = random.Random(seed)
    names = sorted(READERS)
    data = {name: contents(name) for name in names}
    blocks = {name: [match.start() for match in BLOCKS.finditer(data[name])] for name in names}
    for trial in range(count):
        name = names[trial % len(names)]
        at = generator.randrange(len(data[name]))
        if generator.random() < 0.5:
            at = min(generator.choice(blocks[name]) + generator.randrange(128), len(data[name]) - 1)
        yield name, at, generator.choice([data[name][at] ^ 1 << generator.randrange(8), generator.randrange(256)])


def listed_changes(text):
    for change in text.split(","):
        name, at, value = change.split(":")
        yield name, int(at), int(value)


def run(name, at, value, compare):
    data = bytearray(contents(name))
    data[at] = value
    path = os.path.join(scratch, "flipped.h5")
    with open(path, "wb") as file:
        file.write(data)
    command = ["gyre-compare", "--quiet", path, f"{source}/inputs/{name}"] if compare else READERS[name] + [path]
    command[0] = f"{apps}/{command[0]}"
    try:
        done = subprocess.run(launcher + command + ["--timeout", "5"], cwd=scratch, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "never", "it goes on for 30 seconds"
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


ends = collections.Counter()
failed = False
changes = drawn_changes(int(trials)) if trials.isdigit() else listed_changes(trials)
for number, (name, at, value) in enumerate(changes):
    for compare in (False, True):
        if trials.isdigit() and compare != (number // len(READERS) % 2 == 1):
            continue  # of those that are drawn, each by one of the two
        code, text = run(name, at, value, compare)
        caught = re.search(r"crashes HDF5.*\(signal \d+\)|called abort", text)
        ends["signal caught" if caught else code] += 1
        if caught:
            print(f"{name}:{at}:{value}", "compare" if compare else "", caught.group(), flush=True)
        if code not in range(5) or code > 1 and not text or caught and "flipped.h5" not in text:
            print(f"FAILED: exit code {code} with {name}:{at}:{value}{', compared' if compare else ''}\n{text}", flush=True)
            failed = True
print(", ".join(f"{end}: {count}" for end, count in sorted(ends.items(), key=str)))
sys.exit(failed)
