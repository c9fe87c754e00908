#!/usr/bin/env python3
"""Checks the lists of docs/upstream.md against checkouts: check_upstream.py REPOSITORY=FOLDER ... [--page FILE]

A list of the page is a table behind a comment

    <!-- upstream OWNER/NAME COMMIT PATH ... [matching REGEX] -->

Its first column must name, in backticks, exactly the public functions and classes at the top level of those files of the
checkout (of those that match). A second column says what is here, or "not here, because ...". FOLDER: a work tree of
OWNER/NAME; REPOSITORY: OWNER/NAME or NAME. Without checkouts, the lists and their commits are shown.

Exit code 0: the lists are right; 1: they are not; 2: bad usage, or a file is missing in the checkout.
"""

import argparse
import ast
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "upstream.md"
COMMENT = re.compile(r"<!-- upstream (?P<repository>\S+) (?P<commit>[0-9a-f]{7,40})\s+(?P<paths>[^>]*?)"
                     r"(?:\s+matching (?P<pattern>\S+))? -->")


class Missing(Exception):
    """Something that the page or the command names is not there."""


@dataclass
class List:
    """A table of the page: names of functions with the cell beside them."""

    line: int
    repository: str
    commit: str
    paths: list[str]
    pattern: str
    rows: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)


def cells(row):
    """The cells of a row of a table; a bar in code is written as \\|."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def lists_of(text):
    """The lists of a page."""
    found = []
    for comment in COMMENT.finditer(text):
        one = List(text.count("\n", 0, comment.start()) + 1, comment["repository"], comment["commit"],
                   comment["paths"].split(), comment["pattern"] or "")
        rows = re.match(r"\s*((?:\|.*\n?)+)", text[comment.end():])
        if rows is None or len(rows[1].splitlines()) < 3:
            raise Missing(f"line {one.line}: there is no table behind the comment")
        for row in rows[1].splitlines()[2:]:
            columns = cells(row)
            for name in re.findall(r"`([^`]+)`", columns[0]):
                if name in one.rows:
                    one.repeated.append(name)
                one.rows[name] = columns[1] if len(columns) > 1 else ""
        found.append(one)
    if not found:
        raise Missing("there is no list")
    return found


def public_names(folder, path):
    """Public functions and classes at the top level of a file, with their lines."""
    file = folder / path
    if not file.is_file():
        raise Missing(f"{folder} has no {path}")
    nodes = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name: n.lineno for n in nodes if isinstance(n, kinds) and not n.name.startswith("_")}


def elsewhere(folder, name):
    """Where else in the checkout the name is defined."""
    definition = re.compile(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)
    for file in sorted(folder.rglob("*.py")):
        if definition.search(file.read_text(encoding="utf-8", errors="replace")):
            return f"; it is in {file.relative_to(folder)}"
    return "; it is nowhere in the checkout"


def faults(one, folder):
    """What is wrong with a list."""
    there = {}
    for path in one.paths:
        for name, line in public_names(folder, path).items():
            if re.search(one.pattern, name):
                there.setdefault(name, f"{path}:{line}")
    if not there:
        raise Missing(f"line {one.line}: no public function of {', '.join(one.paths)} matches")
    for name in sorted(there.keys() - one.rows.keys()):
        yield f"{name} ({there[name]}) is missing"
    for name in sorted(one.rows.keys() - there.keys()):
        yield f"{name} is no public function of {', '.join(one.paths)}{elsewhere(folder, name)}"
    for name in one.repeated:
        yield f"{name} is listed twice"
    for name, here in one.rows.items():
        if not here or (here.startswith("not here") and not re.match(r"not here, because \S", here)):
            yield f"{name}: the second column says neither what is here nor 'not here, because ...'"


def head_of(folder):
    """The commit of a work tree; "" if Git does not know."""
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def checkouts_of(arguments, lists):
    """Folder of each repository that the command names."""
    repositories = sorted({one.repository for one in lists})
    found = {}
    for argument in arguments:
        name, sign, folder = argument.partition("=")
        matches = [r for r in repositories if name in (r, r.split("/")[1])]
        if not sign or len(matches) != 1:
            raise Missing(f"'{argument}' is no REPOSITORY=FOLDER; repositories are {', '.join(repositories)}")
        if not pathlib.Path(folder).is_dir():
            raise Missing(f"there is no folder {folder}")
        found[matches[0]] = pathlib.Path(folder)
    return found


def run(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="*", help="REPOSITORY=FOLDER")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    options = parser.parse_args(arguments)
    lists = lists_of(options.page.read_text(encoding="utf-8"))
    checkouts = checkouts_of(options.checkout, lists)
    wrong = 0
    for one in lists:
        title = f"{options.page.name}:{one.line}: {one.repository} {one.commit[:9]}, {', '.join(one.paths)}"
        folder = checkouts.get(one.repository)
        if folder is None:
            print(f"{title}: {len(one.rows)} functions, not compared")
            continue
        head = head_of(folder)
        if head and not head.startswith(one.commit):
            print(f"# {folder} is at {head[:9]}, and the list of {one.commit[:9]}")
        found = list(faults(one, folder))
        print(f"{title}: {len(one.rows)} functions, {len(found) or 'nothing'} wrong")
        for fault in found:
            print(f"  {fault}")
        wrong += len(found)
    return 1 if wrong else 0


def main(arguments=None):
    try:
        return run(arguments)
    except (Missing, OSError, SyntaxError) as error:
        print(f"check_upstream.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
