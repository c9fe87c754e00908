#!/usr/bin/env python3
"""Checks README.md and the pages: check_docs.py ROOT APPS [--static]

Links, anchors and images resolve; schedules, layouts and operations are named; README.md is short; tables and excerpts
equal their recorded runs; programs know the options that the pages show. Blocks marked ```sh are run, each page in a scratch
folder of its own, unless a comment `<!-- not run: REASON -->` stands before them; those of README.md find the programs where
`./run demo` builds them. Drawings in docs/ must be what these commands draw. --static: nothing is run.
"""

import filecmp
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

MAX_LINES, MAX_COLUMNS = 150, 120  # of README.md
MAX_RANKS = 4
SECONDS = 120  # of one block
BLOCK = re.compile(r"(?P<comment><!-- not run: [^>]*-->\n)?^```sh\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"gyre-(import|pack|shard|attention|recurrence|logprobs|pipeline|predict|compare|info)$")
OPTION = re.compile(r"--[a-z][a-z0-9-]*|-[A-Za-z]\b")


def pages(root):
    found = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/*.md")), root / "inputs/README.md", root / "results/README.md"]
    return [page for page in found if page.exists()]


def prose(text):
    """The text without fenced and indented code."""
    return re.sub(r"^    .*$", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE)


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE),
                          flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_size(root):
    lines = (root / "README.md").read_text().splitlines()
    if len(lines) > MAX_LINES:
        yield f"README.md: {len(lines)} lines; at most {MAX_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f"README.md:{number}: {len(line)} columns; at most {MAX_COLUMNS}"


def check_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            yield f"{page.name}: '{target}' does not exist"
        elif anchor and anchor not in anchors(file):
            yield f"{page.name}: '{target}': there is no heading '#{anchor}'"


@functools.lru_cache(None)
def options_of(program):
    return set(OPTION.findall(subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout))


@functools.lru_cache(None)
def options_of_all(apps):
    return set().union(*(options_of(apps / f"gyre-{name}") for name in PROGRAM.pattern[6:-2].split("|")))


@functools.lru_cache(None)
def options_of_package(root):
    """Of the commands of the Python package."""
    environment = dict(os.environ, PYTHONPATH=str(root / "python"), PYTHONDONTWRITEBYTECODE="1")
    found = set()
    for command in (["gyre", "conform"], ["gyre.text"], ["gyre.ratios"]):
        done = subprocess.run(["/usr/bin/python3", "-m", *command, "--help"], capture_output=True, text=True, env=environment)
        found |= set(OPTION.findall(done.stdout))
    return found


@functools.lru_cache(None)
def usage_of(run):
    return subprocess.run([run, "help"], capture_output=True, text=True).stdout if run.exists() else ""


def check_command(page, command, apps):
    """The options of each program in the command."""
    program = None
    for word in shlex.split(command, comments=True):
        if PROGRAM.search(word):
            program = apps / PROGRAM.search(word)[0]
        elif word in ("|", "&&", ";", "done"):
            program = None
        elif program and OPTION.match(word):
            option = OPTION.match(word)[0]
            if option not in options_of(program):
                yield f"{page.name}: {program.name} has no option {option}: {command.strip()}"


def check_options(page, apps, root):
    text = page.read_text()
    shown = [line for block in BLOCK.finditer(text) for line in block["text"].replace("\\\n", " ").splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]
    for command in shown + [code for code in inline if re.match(r"gyre-\w+ |mpirun ", code)]:
        yield from check_command(page, command, apps)
    usage = usage_of(root / "run")
    for option in [code.split()[0] for code in inline if re.match(r"--[a-z]", code)]:
        if option not in options_of_all(apps) | set(OPTION.findall(usage)) | options_of_package(root):
            yield f"{page.name}: no program has the option {option}"
    for command in re.findall(r"\./run ([a-z-]+)", text):
        if usage and not re.search(rf"^  {command}\b", usage, flags=re.MULTILINE):
            yield f"{page.name}: ./run has no command '{command}'"


def run_page(page, apps, root):
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for name in ("inputs", "src", "LICENSE"):
            if (root / name).exists():
                (scratch / name).symlink_to(root / name)
        (scratch / "docs").mkdir()
        (scratch / "bin").mkdir()
        (scratch / "bin/mpirun").write_text(f'#!/bin/sh\nexec {os.environ.get("MPIEXEC", "mpiexec")} "$@"\n')
        (scratch / "bin/mpirun").chmod(0o755)
        environment = dict(os.environ, PATH=f"{scratch / 'bin'}:{apps}:{os.environ['PATH']}")
        if page == root / "README.md":  # the page says itself where the programs are, as ./run demo builds them
            (scratch / "build/cpu").mkdir(parents=True)
            (scratch / "build/cpu/apps").symlink_to(apps)
            environment["PATH"] = f"{scratch / 'bin'}:{os.environ['PATH']}"
        for block in BLOCK.finditer(page.read_text()):
            if block["comment"]:
                continue
            if any(int(n) > MAX_RANKS for n in re.findall(r"mpirun -n (\d+)", block["text"])):
                yield f"{page.name}: more than {MAX_RANKS} ranks: {block['text']}"
                continue
            try:
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]], cwd=scratch, env=environment,
                                      capture_output=True, text=True, timeout=SECONDS)
                if done.returncode:
                    yield f"{page.name}: exit code {done.returncode} of\n{block['text']}{done.stdout[-500:]}{done.stderr[-1500:]}"
            except subprocess.TimeoutExpired:
                yield f"{page.name}: longer than {SECONDS} s:\n{block['text']}"
        for drawing in (scratch / "docs").glob("*.svg"):
            if not filecmp.cmp(drawing, root / "docs" / drawing.name, shallow=False):
                yield f"{page.name}: docs/{drawing.name} is not what its command draws"


def check_names(root, apps):
    """Schedules, layouts and operations that the programs have stand in a table of their page."""
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "info.json"
        subprocess.run([apps / "gyre-info", "--quick", "-J", file], capture_output=True, check=True)
        capabilities = json.loads(file.read_text())["capabilities"]
    for kind, page in (("schedules", "attention.md"), ("layouts", "sharding.md"), ("operations", "log-probabilities.md")):
        text = (root / "docs" / page).read_text() if (root / "docs" / page).exists() else ""
        for name in capabilities[kind]:
            if not re.search(rf"^\|[^|]*`{name}`[^|]*\||^    {name} ", text, re.MULTILINE):
                yield f"docs/{page}: no row of a table has `{name}` of the {kind}"


def faults(root, apps, static):
    yield from check_size(root)
    if (root / "docs").is_dir():
        yield from check_names(root, apps)
    tables = subprocess.run([sys.executable, pathlib.Path(__file__).parents[2] / "results/tables.py", "--check", root],
                            capture_output=True, text=True)
    if tables.returncode:
        yield tables.stderr.strip()
    for page in pages(root):
        yield from check_links(page)
        yield from check_options(page, apps, root)
        if not static:
            yield from run_page(page, apps, root)


def main():
    root, apps = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
    found = list(faults(root, apps, "--static" in sys.argv))
    print("\n".join(found) if found else "docs: links, tables, options and commands are right")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
