"""A program that is not there, a site and studies, for the tests of gyre-study. slurm/ is on the path of modules."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import study_results as made
from gyre_study.app import App, Option
from gyre_study.cases import expand
from gyre_study.files import Site, Study
from gyre_study.folder import Folder, write_plan


def app_of(name: str = "gyre-attention") -> App:
    """A program that is not there, with a few options."""
    schedule = Option("schedule", ("all", "ring", "halo", "all-gather"), "ring")
    layout = Option("layout", ("all", "zigzag", "striped"), "zigzag")
    options = [schedule, layout, Option("pass", ("fwd", "bwd", "both"), "both"),
               Option("check", ("none", "last"), "last")]
    options += [Option(word, ("SIZE",), "0")
                for word in ("tokens", "min", "window", "stripe", "capacity")]
    options += [Option("mask", ("causal", "full"), "causal"), Option("heads", ("INT",), "8"),
                Option("gen", ("TEXT",), "")]
    options += [Option("emulate-network", ("TEXT",), ""), Option("cp", ("INT",), "0"),
                Option("sinks", (), "")]
    return App(name, "/nowhere/gyre-attention", made.BUILD,
               {option.name: option for option in options})


def study_of(kind: str = "strong", accept: str = "measured",
             options: dict[str, object] | None = None, **axes: object) -> Study:
    return Study("study", kind, "gyre-attention", axes, accept=accept, options=options or {})


SMALL = Site("here", 4)


class Scratch(unittest.TestCase):
    """A folder for each test."""

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.place = Path(scratch.name)
        self.path = self.place / "study"


def gyre_study(*words: object, **options: object) -> subprocess.CompletedProcess:
    """Runs gyre-study of the source tree."""
    command = [sys.executable, Path(sys.argv[1], "slurm/gyre-study").resolve(), *words]
    given = {"capture_output": True, "text": True, "timeout": 120, "check": False, **options}
    return subprocess.run([str(word) for word in command], **given)


def planned(path: Path, study: Study, site: Site = SMALL) -> Folder:
    """The folder of a study of app_of()."""
    write_plan(path, study, site, app_of(), expand(study, site, app_of(), "study.toml"), {})
    return Folder(path)
