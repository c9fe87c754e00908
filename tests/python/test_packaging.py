#!/usr/bin/env python3
"""What packaging/ holds, as far as it goes without Spack, ReFrame and a container engine.

Usage: test_packaging.py SOURCE_DIR BUILD_DIR
The checks of ReFrame read the rates of a program's FOM lines; recipes compile; Spack's recipe has the dependencies, and
the Dockerfile the packages, of the table in docs/building.md.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
RECIPES = SOURCE / "packaging/spack/spack_repo/gyre/packages"


def table():
    """Rows of the table of dependencies: {column: names without marks}."""
    lines = (SOURCE / "docs/building.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| needed |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:]
             if line.startswith("|") or not line][: lines[begin:].index("")]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def names(cell):
    return re.findall(r"`([^` ]+)[^`]*`", cell)


class Packaging(unittest.TestCase):
    def test_rates_are_those_of_the_result(self) -> None:
        spec = importlib.util.spec_from_file_location("checks", SOURCE / "packaging/reframe/gyre_checks.py")
        checks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(checks)
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "a.json")
            words = ["--tokens", "64", "--schedule", "all", "-n", "8", "-J", str(result)]
            output = subprocess.run([BUILD / "apps/gyre-attention", *words], capture_output=True, text=True, check=True).stdout
            wanted = json.loads(result.read_text())["fom"]
        found = checks.rates(output)
        self.assertGreater(len(found), 2)
        self.assertEqual(len(found), len(wanted))
        for fom in wanted:
            tags = {key: value for key, value in fom["tags"].items() if key not in ("schedule", "layout")}
            name = " ".join([fom["metric"], *(f"{key}={value}" for key, value in tags.items())])
            value, unit = found[name]
            self.assertEqual(unit, fom["unit"])
            self.assertAlmostEqual(value, fom["value"], delta=1e-5 * fom["value"])
        case = {"name": "attention", "result": "pass", "perfvalues": {"here:cpu:rate a=b": [2.5, 0, None, None, "GB/s"]}}
        wrong = {**case, "result": "fail", "name": "other"}
        report = {"runs": [{"testcases": [case, wrong]}]}
        self.assertEqual(checks.references_of(report), {"here:cpu": {"attention": {"rate a=b": 2.5}}})

    def test_recipes(self) -> None:
        recipe = (RECIPES / "gyre/package.py").read_text(encoding="utf-8")
        for file in RECIPES.glob("*/package.py"):
            ast.parse(file.read_text(encoding="utf-8"))
        ours = {name.split("@")[0].split()[0] for name in re.findall(r'depends_on\("([^"]+)"', recipe)}
        wanted = {name for row in table() for name in names(row["Spack"]) if not row["needed"].startswith("benchmarks")}
        other = {"gcc": "cxx", "pkgconf": "pkgconfig", "mpich": "mpi"}  # compilers and virtual packages
        for name in wanted:
            if name != "gmake" and not name.startswith("py-"):  # of Python's tests and reports
                self.assertIn(other.get(name, name), ours)

    def test_packages(self) -> None:
        needed = [name for row in table() if ":" not in row["needed"] or row["needed"].startswith("MPI")
                  for name in names(row["Debian"])]
        self.assertGreater(len(needed), 12)
        for file in ("packaging/container/Dockerfile", "run"):
            text = (SOURCE / file).read_text(encoding="utf-8")
            for name in needed:
                self.assertRegex(text, rf"(?m)(^|[ (]){re.escape(name)}( |$|\))", file)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
