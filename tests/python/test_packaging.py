#!/usr/bin/env python3
"""What packaging/ holds, as far as it goes without Spack, ReFrame and a container engine.

Usage: test_packaging.py SOURCE_DIR BUILD_DIR
The checks of ReFrame read the rates of a program's FOM lines, and so does the application of Ramble, whose commands are
those of the official problems; recipes compile; Spack's recipe has the dependencies, and the Dockerfile the packages, of
the table in docs/building.md.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
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


def load(file):
    spec = importlib.util.spec_from_file_location("loaded", SOURCE / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ramble_application():
    """What packaging/ramble tells Ramble: {directive: {name: arguments}}, {workload: {variable: default}}."""
    told, variables = {}, {}

    def directive(kind):
        return lambda name, *words, **named: told.setdefault(kind, {}).update({name: (words, named)})

    def workload_variable(name, default, workloads, **_):
        for workload in workloads:
            variables.setdefault(workload, {})[name] = default

    kit = types.ModuleType("ramble.appkit")
    for kind in ("tags", "software_spec", "required_package", "executable", "workload", "figure_of_merit", "success_criteria"):
        setattr(kit, kind, directive(kind))
    kit.workload_variable, kit.ExecutableApplication = workload_variable, object
    sys.modules.update({"ramble": types.ModuleType("ramble"), "ramble.appkit": kit})
    load("packaging/ramble/applications/gyre/application.py")
    return told, variables


def ramble_command(told, variables, problem, size, ranks):
    """The words of a workload's command, as Ramble expands it: from the inside out."""
    named = {**variables[problem], "size": size, "n_ranks": ranks, "inputs": str(SOURCE / "inputs")}
    command = told["executable"][problem][0][0].replace("{gyre_path}/bin", "{apps}")
    named["apps"] = str(BUILD / "apps")
    while match := re.search(r"\{(\w+)\}", command):
        command = command[: match.start()] + str(named[match[1]]) + command[match.end():]
    return command.split()


def options(words):
    return dict(zip(words[::2], words[1::2]))


class Packaging(unittest.TestCase):
    def test_rates_are_those_of_the_result(self) -> None:
        checks = load("packaging/reframe/gyre_checks.py")
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

    def test_ramble_runs_the_official_problems(self) -> None:
        told, variables = ramble_application()
        self.assertEqual(set(told["workload"]), {"attention", "log-probs", "packing", "pipeline"})
        for problem in told["workload"]:
            for size in ("tiny", "small"):
                program, *words = ramble_command(told, variables, problem, size, 1)
                study = "official-" + Path(program).name.removeprefix("gyre-")
                plan = [sys.executable, SOURCE / "slurm/gyre-study", "plan", study, "--size", size, "--site", "local"]
                cases = subprocess.run([*plan, "--apps", BUILD / "apps", "--cases"], capture_output=True, text=True, check=True)
                official = re.search(r"(?m)^\S+: (gyre-.+)$", cases.stdout)[1].split()
                self.assertEqual(options(words), options(official[1:]), study)

    def test_figures_of_ramble_are_those_of_the_result(self) -> None:
        told, variables = ramble_application()
        for problem in told["workload"]:
            with tempfile.TemporaryDirectory() as scratch:
                result = Path(scratch, "a.json")
                variables[problem]["more"] = f"--max-seconds 0.05 -J {result}"
                command = ramble_command(told, variables, problem, "tiny", 1)
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                wanted = json.loads(result.read_text())["fom"]
            found = {}
            for name, (_, named) in told["figure_of_merit"].items():
                for line in output.splitlines(keepends=True):  # as Ramble reads it
                    if match := re.match(named["fom_regex"], line):
                        found[name.format(tags=match["tags"])] = (float(match["value"]), named["units"])
            self.assertEqual(len(found), len(wanted), problem)
            self.assertEqual(sorted(unit for _, unit in found.values()), sorted(fom["unit"] for fom in wanted))
            for fom in wanted:
                values = [value for name, (value, _) in found.items() if name.split()[0] == fom["metric"]]
                self.assertTrue(any(abs(value - fom["value"]) <= 1e-5 * abs(fom["value"]) for value in values), fom)
            for _, named in told["success_criteria"].values():
                self.assertTrue(any(re.match(named["match"], line) for line in output.splitlines()), named)

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
