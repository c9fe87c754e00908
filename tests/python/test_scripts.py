#!/usr/bin/env python3
"""Every script that a page names is run by a test: here, with its smallest size, or by another one.

Usage: test_scripts.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher; GYRE_TORCH_PYTHON: a Python that has PyTorch)
Scripts that need PyTorch are skipped with their reason where it is missing; what bench/attention_vs_torch.py makes of a
benchmark's times is tested without it.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
PYTHON = os.environ.get("GYRE_TORCH_PYTHON", sys.executable)
PAGES = ("README.md", "docs/*.md", "inputs/*.md", "inputs/golden/*.md", "results/*.md", "slurm/*.md", "python/*.md")
SKIPPED, USAGE = 77, 2
OURS = ["--build", BUILD, "--repetitions", "1"]
# Script: arguments, and exit codes that are right.
RUN = {
    "bench/attention_vs_torch.py": (
        [*OURS, "--min-time", "0.01", "--document", "8", "--dim", "64", "--threads", "1"],
        (0, USAGE),  # 2: bench-kernels is not built
    ),
    "bench/logprobs_vs_torch.py": (
        [*OURS, "--mpiexec", MPIEXEC, "--iterations", "1", "--min-time", "0.001", "--no-compile", "--no-ranks"]
        + ["--op", "logprob-entropy", "--tokens", "8", "--vocab", "128", "--threads", "1"],
        (0,),
    ),
    "bench/model_vs_torch.py": ([*OURS, "--mpiexec", MPIEXEC, "--ranks", "1", SOURCE / "LICENSE"], (0,)),
    "bench/recurrence_vs_torch.py": (OURS, (0,)),
    "inputs/train_model.py": (["--help"], (0,)),  # a run trains for minutes
    "inputs/make_inputs.py": (["--help"], (0,)),  # it writes the inputs in their place
    "results/record.sh": ([], (USAGE,)),  # likewise the recorded runs; it says what there is
}


def scripts_of_pages() -> dict[str, str]:
    """Scripts of this project that pages name, each with a page."""
    found = {}
    for page in (page for pattern in PAGES for page in SOURCE.glob(pattern)):
        for name in re.findall(r"[\w./-]+\.(?:py|sh)\b", page.read_text(encoding="utf-8")):
            for file in (SOURCE / name, page.parent / name):
                if file.is_file() and re.search(r"^if __name__|^#!.*sh$", file.read_text(), re.MULTILINE):
                    found[str(file.resolve().relative_to(SOURCE))] = page.name
    return found


class Scripts(unittest.TestCase):
    def test_each_is_run(self) -> None:
        own = Path(__file__).resolve()
        others = [*(SOURCE / "tests").rglob("*.py"), *(SOURCE / "tests").rglob("*.sh"), SOURCE / "scripts/demo.sh"]
        text = "".join(file.read_text(encoding="utf-8") for file in others if file.resolve() != own)
        named = scripts_of_pages()
        self.assertGreater(len(named), 10)
        for script, page in named.items():
            tested = script in RUN or script.startswith("tests/") or Path(script).stem in text
            self.assertTrue(tested, f"{page} names {script}, which no test runs")
        self.assertEqual(sorted(set(RUN) - set(named)), [], "no page names these")

    def test_smallest_sizes(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            for script, (arguments, right) in RUN.items():
                with self.subTest(script):
                    start = ["bash"] if script.endswith(".sh") else [PYTHON]
                    command = [*start, SOURCE / script, *arguments]
                    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
                    if script.startswith("bench/"):
                        environment["MALLOC_MMAP_MAX_"] = "0"
                    done = subprocess.run([str(word) for word in command], cwd=scratch
                                          if script.startswith("bench/attention") else SOURCE,
                                          env=environment, capture_output=True, text=True,
                                          timeout=250, check=False)
                    if done.returncode == SKIPPED:
                        self.assertIn("skipped: ", done.stderr)
                        print(f"{script}: {done.stderr.splitlines()[0]}")
                        continue
                    self.assertIn(done.returncode, right, done.stdout[-500:] + done.stderr[-1500:])


class AttentionBesideTorch(unittest.TestCase):
    """Times of bench-kernels, as it has written them, beside those of a PyTorch that is not there."""

    def test_names_and_times(self) -> None:
        file = SOURCE / "results/cpu-2core/bench-kernels.json"
        recorded = [row for row in json.loads(file.read_text())["benchmarks"]
                    if re.match(r"attention_\w+/tokens:4096/document:256/.*/dim:64/.*/threads:1/",
                                row["name"])]
        with tempfile.TemporaryDirectory() as scratch:
            program = Path(scratch, "bench/bench-kernels")
            program.parent.mkdir()
            program.write_text(
                f"#!{sys.executable}\nimport json, re, sys\nrows = json.loads({json.dumps(recorded)!r})\n"
                "names = dict.fromkeys(row['run_name'] for row in rows)\n"
                "options = dict(word[2:].split('=', 1) for word in sys.argv[1:])\n"
                "if 'benchmark_list_tests' in options: sys.exit(print('\\n'.join(names)))\n"
                "wanted = re.compile(options['benchmark_filter'])\n"
                "print(json.dumps({'benchmarks': [row for row in rows if wanted.search(row['run_name'])]}))\n"
            )
            program.chmod(0o755)
            torch = mock.MagicMock()
            torch.__version__, torch.backends.cpu.get_cpu_capability.return_value = "2.5", "none"
            modules = {"torch": torch, "torch.nn": torch.nn, "torch.nn.attention": torch.nn.attention}
            words = [f"--build={scratch}", f"--json={scratch}/t.json", "--repetitions=1", "--threads=1"]
            words += ["--document=256", "--dim=64"]
            shown = io.StringIO()
            with (mock.patch.dict(sys.modules, modules),
                  mock.patch.object(sys, "path", [str(SOURCE / "bench"), *sys.path]),
                  mock.patch.object(sys, "argv", ["attention_vs_torch.py", *words]),
                  contextlib.redirect_stdout(shown)):
                place = SOURCE / "bench/attention_vs_torch.py"
                spec = importlib.util.spec_from_file_location("attention_vs_torch", place)
                bench = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(bench)
                with mock.patch.object(bench, "time_torch", lambda case, minimum: 1.0):
                    self.assertEqual(bench.main(), 0)
            rows = json.loads(Path(scratch, "t.json").read_text())["benchmarks"]
        row = next(row for row in rows if row["pass"] == "forward+backward" and row["ours"] and row["threads"] == 1)
        medians = [
            one["cpu_time"] * {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3}[one["time_unit"]]
            for one in recorded
            if one["aggregate_name"] == "median"
            and re.match(
                rf"attention_(forward|backward)/tokens:{row['tokens']}/document:256/heads:{row['heads']}/"
                rf"kv_heads:{row['kv_heads']}/dim:64/window:0/bf16:0/threads:1/",
                one["run_name"],
            )
        ]
        self.assertEqual(len(medians), 2)
        self.assertAlmostEqual(row["ours"], sum(medians))
        self.assertAlmostEqual(row["ratio"], 1e3 / sum(medians))


sys.dont_write_bytecode = True
unittest.main(argv=sys.argv[:1])
