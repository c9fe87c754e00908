#!/usr/bin/env python3
"""Compares the demo that was run last with the recorded screen, of which README.md shows a part: check_demo.py ROOT APPS

Each program makes as many checks as recorded. Numbers of documents and tokens follow the repository's files, and times the
machine: they are not compared. The recorded demo has two ranks; one of four has other checks, and is skipped (exit code 77).
"""

import json
import pathlib
import re
import subprocess
import sys


def checks(screen):
    """(program, what its results are compared with, passed of all checks)"""
    return [(*re.split(r" {2,}", line[15:])[1:2], line[:15].strip(), line.split()[-1])
            for line in screen.splitlines() if re.search(r" \d+/\d+$", line)]


def main():
    root, apps = map(pathlib.Path, sys.argv[1:3])
    ranks = len(json.loads((root / "demo/attention.json").read_text(encoding="utf-8"))["ranks"])
    if ranks != 2:
        print(f"the demo ran on {ranks} ranks; the recorded one on 2: not compared")
        sys.exit(77)
    screen = subprocess.run([sys.executable, root / "scripts/demo_summary.py", root / "demo", apps], capture_output=True,
                            text=True, check=True).stdout
    now, recorded = checks(screen), checks((root / "results/cpu-2core/demo.txt").read_text(encoding="utf-8"))
    for old, new in zip(recorded, now):
        if old != new:
            print(f"{old[1]}, {old[0]}: recorded {old[2]}, now {new[2]}")
    if not now or now != recorded:
        sys.exit("results/cpu-2core/demo.txt is stale: results/record.sh demo, then results/tables.py --write")


if __name__ == "__main__":
    main()
