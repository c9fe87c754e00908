#!/usr/bin/env python3
"""gyre-study check and table: which results of official problems are accepted, and what the others are told.

Usage: test_study_official.py SOURCE_DIR BUILD_DIR
"""

import copy
import json
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import jsonschema

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
import official_results as made  # noqa: E402
from study_plans import Scratch, gyre_study  # noqa: E402
from gyre_study.app import load_app  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.files import Site, load_study  # noqa: E402
from gyre_study.folder import Folder  # noqa: E402
from gyre_study.official import OFFICIAL, STUDIES, opened_entry, opened_result, problem_of, sha256  # noqa: E402
from gyre_study.official_judge import judge, lines_schema  # noqa: E402
from gyre_study.official_report import check_text  # noqa: E402
from gyre_study.official_rules import summarize  # noqa: E402
from gyre_study.official_setting import DEFAULTS, defaults_of  # noqa: E402
from gyre_study.official_work import LENGTHS, MODELS  # noqa: E402

SMALL = Site("here", 64)
NO_RESULTS = {"output", "json", "csv", "resume", "columns", "at-least", "machine", "config", "timeout", "progress", "verbose",
              "quiet", "version", "help", "list", "trace", "svg", "goal", "explain", "dry-run", "top"}
Lines = list[dict[str, Any]]


def of_kind(lines: Lines, kind: str) -> dict[str, Any]:
    """The last line of a kind."""
    return next(line for line in reversed(lines) if line["kind"] == kind)


def row(*path: str, **fields: Any) -> Callable[[Lines], None]:
    return of("row", *path, **fields)


def of(kind: str, *path: str, **fields: Any) -> Callable[[Lines], None]:
    """A change of the last line of a kind: of fields of the object at a path."""

    def change(lines: Lines) -> None:
        place: Any = of_kind(lines, kind)
        for name in path:
            place = place[int(name) if isinstance(place, list) else name]
        for name, value in fields.items():
            place[name] = value(place[name]) if callable(value) else value

    return change


def scaled(factor: float) -> dict[str, Callable[[float], float]]:
    """A check whose tolerance and error are larger; their ratio stays."""
    return dict.fromkeys(("tolerance", "max_error"), lambda value: factor * value)


def argv(*more: str) -> Callable[[Lines], None]:
    return lambda lines: of_kind(lines, "run")["run"]["argv"].extend(more)


def all_of(*changes: Callable[[Lines], None]) -> Callable[[Lines], None]:
    return lambda lines: [change(lines) for change in changes] and None


def with_samples(change: Callable[[list[float]], list[float]]) -> Callable[[Lines], None]:
    """Other samples, and all that the row says of them computed from these, but for its verdict."""

    def put(lines: Lines) -> None:
        one = of_kind(lines, "row")
        one["samples_ms"] = [change(times) for times in one["samples_ms"]]
        slowest = [max(times) for times in zip(*one["samples_ms"])]
        found = summarize(slowest) if len(slowest) > 1 else {**one["statistics_ms"], "count": 1}
        scale = one["statistics_ms"]["median"] / found["median"]
        one["statistics_ms"] = found
        one["measurements"] |= {"time": found["median"], "min": found["min"], "p95": found["p95"], "cv": 100 * found["cv"],
                                "reps": found["count"], "rate": one["measurements"]["rate"] * scale}

    return put


def renamed(lines: Lines) -> None:
    """The forward row of the last run becomes its backward row, twice as fast."""
    rows = [line for line in lines if line["kind"] == "row"][-2:]
    lines.remove(rows[1])
    rows[0]["key"]["pass"] = rows[0]["measurements"]["pass"] = "bwd"


def another_host(lines: Lines) -> None:
    head = of_kind(lines, "run")
    head["ranks"][0]["host"] = head["machine"]["hosts"][0]["names"][0] = "other"
    head["machine"]["hosts"][0] |= {"cores": 1, "threads": 1, "numa": [{"index": 0, "cpus": "0", "memory_bytes": 1}]}
    of_kind(lines, "end")["foreign_load"] |= {"host": "other", "of_cores": 1}


# Of a recorded result: program, placement, a change of its lines and a part of the reason.
FORGED: list[tuple[str, str, Callable[[Lines], None], str]] = [
    ("attention", "cp2", row(samples_ms=lambda both: [[-time for time in times] for times in both]), "at least 0"),
    ("attention", "cp2", row("model", flops=1.824e12), "model.flops 1.824e+12; computed: 1.824e+09"),
    ("attention", "cp2", all_of(row("model", flops=1.824e12), row("measurements", rate=lambda rate: 1e3 * rate)),
     "measurements.rate 109.250924; computed: 0.109250924"),
    ("pipeline", "dp1-cp2", all_of(row("measurements", tokens=3540, rate=lambda rate: 10 * rate)), "tokens 3540; computed: 354"),
    ("attention", "cp2", of("end", "verification", passed=False), "verification.passed False; computed: True"),
    ("attention", "cp2", of("end", "verification", "checks", "3", passed=False), "passed False"),
    ("attention", "cp2", of("end", "verification", "checks", "3", outside=7), "outside 7"),
    ("attention", "cp2", of("end", "verification", checks=[]), "verification has no check 'ring, balanced, 2048 tokens, bwd: d_q'"),
    ("attention", "cp2", of("end", verification=None), "end.verification null; wanted: object"),
    ("attention", "cp2", of("end", "verification", tolerance_scale=1e6), "tolerance_scale 1000000; computed: 1"),
    ("attention", "cp2", of("end", "verification", "checks", "2", tolerance=lambda t: 1e6 * t), "error_over_tolerance"),
    ("attention", "cp2", of("end", "verification", "checks", "2", **scaled(2)), "fwd: out'.tolerance 3.81986"),
    ("attention", "cp2", of("end", "verification", "checks", "7", **scaled(2)), "bwd: d_k'.tolerance 7.8"),
    ("logprobs", "cp1-tp2", of("end", "verification", "checks", "-1", tolerance=1e-6), "calls'.tolerance 1e-06; wanted: at most 0"),
    ("logprobs", "cp1-tp2", of("end", "verification", "checks", "-2", **scaled(2)), "d_logits'.tolerance 1.017"),
    ("logprobs small", "cp1-tp2", of("end", "verification", "checks", "-2", **scaled(2)), "d_logits'.tolerance 0.0833"),
    ("pipeline", "dp1-cp2", of("end", "verification", "checks", "0", **scaled(9)), "'logprob'.tolerance "),
    ("pipeline", "dp1-cp2", of("end", "verification", "checks", "3", **scaled(9)), "'hidden[1]'.tolerance 0.000122"),
    ("attention", "cp2", row("measurements", check="FAILED"), "measurements.check 'FAILED'; computed: 'ok'"),
    ("attention", "cp2", row("status", result="UNOFFICIAL"), "status.result 'UNOFFICIAL'; computed: 'VALID'"),
    ("attention", "cp2", row("status", result="HELLO"), 'row.status.result "HELLO"; wanted: VALID, UNVERIFIED, UNOFFICIAL, INVALID'),
    ("attention", "cp2", row("status", result="INVALID", reasons=["verification failed"]), "INVALID (verification failed)"),
    ("attention", "cp2", of("end", "status", result="UNOFFICIAL", reasons=["8 ranks on 2 cores"]), "8 ranks on 2 cores"),
    ("attention", "cp2", with_samples(lambda times: times[:1]), "samples_ms: 1, 1 repetitions; wanted"),
    ("attention", "cp2", with_samples(lambda times: [(5 if i % 2 else 1) * t for i, t in enumerate(times)]),
     "status.reasons lacks 'noisy: CV"),
    ("attention", "cp2", of("end", "foreign_load", cores=1.9),
     "status.reasons lacks 'noisy: other processes kept 1.9 of 2 cores of vm busy, at most 0.5'"),
    ("attention", "cp2", row(samples_ms=lambda both: both[:1]), "samples_ms of 1 ranks; wanted: 2"),
    ("attention", "cp1", another_host, "host other is of another kind than those of the run with most ranks"),
    ("attention", "cp2", of("run", "ranks", "0", cpus="1"), "2 ranks of 1 threads are bound to 1 CPUs of vm (1); wanted: a core each"),
    ("attention", "cp2", of("run", "configuration", dtype="bf16"), "configuration.dtype 'bf16'; the problem has 'f32'"),
    ("attention", "cp2", of("run", "configuration", check="none"), "configuration.check 'none'; the problem has '' or 'last'"),
    ("attention", "cp2", of("run", "configuration", mask="full"), "configuration.mask 'full'; the problem has 'causal'"),
    ("attention", "cp2", of("run", "configuration", network="alpha=1us"), "configuration.network 'alpha=1us'; the problem has 'none'"),
    ("attention", "cp2", of("run", configuration={}), "configuration has no head_dim"),
    ("attention", "cp2", renamed, "no result of fwd of the case cp=2 schedule=ring"),
    ("attention", "cp2", renamed, "model.flops 729600000; computed: 1.824e+09"),
    ("logprobs", "cp1-tp2", all_of(row("measurements", share_of_limit=5.0, of_bw=500.0)), "share_of_limit 5.0; wanted: 1e-08 to 1.05"),
    ("logprobs", "cp1-tp2", row("measurements", ideal_bytes=lambda n: 10 * n), "ideal_bytes 671088640; computed: 67108864"),
    ("attention", "cp2", row("measurements", of_peak=500.0), "of_peak 500.0; wanted: 1e-06 to 105"),
    ("pack", "ranks1", row("measurements", items=204800), "items 204800; computed: 20480"),
    ("pack", "ranks1", row("measurements", tokens=214508260), "tokens 214508260; computed: 21450826"),
    ("pack", "ranks1", row("measurements", bins=True), "measurements.bins True; wanted: a whole number"),
    ("pack", "ranks1", row("measurements", cost=1.0), "measurements.cost 1; computed: 2.25978469"),
    ("attention", "cp2", argv("-n", "6", "-w", "0"), "'-n' belongs to no option; the problem has no such word"),
    ("attention", "cp2", argv("--tol-scale", "9"), "--tol-scale 9; the problem has no --tol-scale"),
    ("attention", "cp2", argv("--tol-scale=9"), "--tol-scale=9"),
    ("attention", "cp2", argv("--dtype", "bf16"), "'--dtype' belongs to no option"),
    ("attention", "cp2", of("run", "inputs", "0", sha256="0" * 64), f"SHA-256 of prolong64k.csv {'0' * 64}; the problem has "),
    ("attention", "cp2", of("run", "build", type="Debug"), "Debug build; wanted: Release"),
    ("attention", "cp2", of("run", "build", flags="-O3 -ffast-math"), "build.flags -ffast-math; wanted: an optimised build"),
    ("attention", "cp2", of("run", "build", flags="-O3 -O1"), "build.flags -O1; wanted: an optimised build"),
    ("attention", "cp2", of("run", "libraries", mpi="MPICH 4.2"), "libraries.mpi 'MPICH 4.2' and 'MPICH 4.0.2' in runs of one result"),
    ("attention", "cp2", of("run", "environment", OMP_NUM_THREADS="2"), "environment.OMP_NUM_THREADS '2' and '1'"),
    ("attention", "cp2", of("run", hello=1), "run has the unknown field 'hello'"),
    ("attention", "cp2", row("measurements", hello=1), "measurements.hello: unknown; nearest: "),
    ("attention", "cp2", of("run", "configuration", hello=1), "configuration.hello 1: unknown; nearest: "),
    ("attention", "cp2", of("run", "configuration", seed=2), "configuration.seed 2; the problem has '1'"),
    ("attention", "cp2", of("end", "fom", "0", value=1.0), "fom[0].value 1; computed: 0.0779498006"),
    ("attention", "cp2", of("run", "run", start="2020-01-01T00:00:00Z"), "run.start 2020-01-01T00:00:00Z; its commit"),
    ("attention", "cp2", lambda lines: lines.pop() and None, "a run was cut off"),
]


class Official(Scratch):
    def planned(self, name: str = "official-attention", size: str = "tiny", *chosen: str) -> Folder:
        return made.planned(self.path, BUILD / "apps", SMALL, name, size, *chosen)

    def change(self, folder: Folder, change: Callable[[Lines], object]) -> None:
        """Changes lines of the last placement."""
        file = folder.rows_file(folder.placements[-1])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        change(lines)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def reasons(self, entry: dict[str, Any]) -> list[str]:
        """Why the content of a file is refused; [] if it is not."""
        with opened_entry(Path("entry.json"), entry) as result:
            judgement = judge(result, Path("entry.json"))
            self.assertEqual("REFUSED" in check_text(judgement), judgement.refused != [])
            return judgement.refused

    def refused(self, folder: Folder, *reasons: str) -> None:
        """Exactly these reasons, each a part of what is said."""
        with opened_result(folder.path) as result:
            said = judge(result, self.path).refused
        self.assertEqual(len(said), len(reasons), said)
        for reason in reasons:
            self.assertTrue(any(reason in one for one in said), (reason, said))
        done = gyre_study("check", folder.path)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertIn("REFUSED", done.stdout)

    def check(self, *words: object) -> str:
        done = gyre_study("check", *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return "".join(line for line in done.stdout.splitlines(keepends=True) if "was not looked up" not in line)

    def test_good_results_of_all_problems(self) -> None:
        figures = {
            "official-attention": "FIGURE 0.01277 TFLOP/s/rank, 50.0 % of one rank; 2 ranks",
            "official-logprobs": "FIGURE 59.6 % of measured bandwidth, 1.007 GB/s/rank; 2 ranks",
            "official-pack": "FIGURE 4.096e+05 documents/s, cost 2.2598 max/mean; 1 rank, ",
            "official-pipeline": "FIGURE 3540 tokens/s/rank, 34.8 % of the limit; 2 ranks",
        }
        self.assertEqual(sorted(figures), sorted(OFFICIAL))
        results = self.place / "results"
        results.mkdir()
        for name, figure in figures.items():
            self.planned(name)
            said = self.check(self.path, "-o", results / f"{name}.json")
            self.assertIn(figure, said)
            self.assertTrue(said.endswith("\nACCEPTED\n"), said)
            self.assertEqual(self.check(results / f"{name}.json").splitlines()[1:], said.splitlines()[1:])
            self.assertNotIn(str(SOURCE), (results / f"{name}.json").read_text())
        for given, output in ((self.path, self.path / "plan.json"), (results / f"{name}.json",) * 2):
            before = output.read_bytes()
            done = gyre_study("check", given, "-o", output)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"--output {output}: it would overwrite the result {given}; wanted: a new file", done.stderr)
            self.assertEqual(output.read_bytes(), before)
        done = gyre_study("table", results)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("| tiny |"), len(figures))
        self.assertIn("| Intel(R) Xeon(R) Processor, 64 cores | 2 | 0.01277 TFLOP/s/rank | 50.0 % of one rank |", done.stdout)

    def test_results_of_larger_problems(self) -> None:
        for name, size, *chosen in (
            ("attention", "base"), ("attention", "large", "cp=1,128"), ("logprobs", "small"), ("logprobs", "large"),
            ("pipeline", "base"), ("attention", "tiny", "cp=1,4", "schedule=all", "threads=1,2"),
        ):
            self.planned(f"official-{name}", size, *chosen)
            self.assertIn("\nACCEPTED\n", self.check(self.path))

    def test_problems_are_those_of_the_page_and_of_this_program(self) -> None:
        page = (SOURCE / "docs/official.md").read_text(encoding="utf-8")
        self.assertEqual(sorted(OFFICIAL), sorted(file.stem for file in STUDIES.glob("official-*.toml")))
        for name, (of_file, hashes) in OFFICIAL.items():
            self.assertEqual(sha256(STUDIES / f"{name}.toml"), of_file, name)
            self.assertEqual({size: problem_of(load_study(STUDIES / f"{name}.toml", size)).hash for size in hashes}, hashes)
            self.assertEqual([*hashes], ["tiny", "small", "base", "large"])
            self.assertIn(f"| `{name}` | {' | '.join(f'`{one}`' for one in hashes.values())} |", page)

    def test_an_edited_study(self) -> None:
        """In a copy of the tree: a check that may be turned off would be the same problem otherwise."""
        copied = self.place / "copy"
        for folder in ("slurm", "inputs/lengths"):
            shutil.copytree(SOURCE / folder, copied / folder)
        (copied / "results").mkdir()
        shutil.copy(SOURCE / "results/gyre-result-1.schema.json", copied / "results")
        command = [sys.executable, copied / "slurm/gyre-study", "check", SOURCE / "results/official/xeon-2core-attention-tiny.json"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("# commit 3259fe20 was not looked up", done.stdout)
        study = copied / "slurm/studies/official-attention.toml"
        for file, old, new, said in (
            (study, '"threads", "cuda_graph"', '"threads", "check"', "official-attention.toml: SHA-256 "),
            (copied / "inputs/lengths/prolong64k.csv", "64,0.041225", "64,0.5", "official-attention tiny: problem "),
        ):
            text = file.read_text(encoding="utf-8")
            self.assertIn(old, text)
            file.write_text(text.replace(old, new), encoding="utf-8")
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(said, done.stdout)
            self.assertIn("the study or an input of it was edited", done.stdout)
            file.write_text(text, encoding="utf-8")

    def test_forged_results(self) -> None:
        entries = {name: made.recorded(*name.split()) for name in ("attention", "logprobs", "logprobs small", "pack", "pipeline")}
        for name, placement, change, reason in FORGED:
            with self.subTest(reason):
                entry = copy.deepcopy(entries[name])
                change(next(lines for own, lines in entry["rows"].items() if own.startswith(placement)))
                said = self.reasons(entry)
                self.assertTrue(any(reason in one for one in said), (reason, said))
        for entry in entries.values():
            self.assertEqual(self.reasons(entry), [])

    def test_a_commit_that_no_repository_has(self) -> None:
        entry = json.loads(json.dumps(made.recorded("attention")).replace("3259fe20", "deadbee5"))
        said = self.reasons(entry)
        if made.git("rev-parse", "--is-shallow-repository") == "false":
            self.assertIn("cp2-e8c7d0f2: git deadbee5: unknown commit; this clone does not have it", said)
        entry = json.loads(json.dumps(made.recorded("attention")).replace('"3259fe20"', '"unknown"'))
        self.assertIn("cp2-e8c7d0f2: git unknown; wanted: a commit, such as 0123abcd", self.reasons(entry))

    def test_results_of_later_programs(self) -> None:
        """They record all options, the flags of the compiler and more; without flags they are refused."""
        entry = made.recorded("attention")
        for lines in entry["rows"].values():
            for line in lines:
                if line["kind"] == "run":
                    line["build"]["flags"] = "-O3 -DNDEBUG -march=native"
                    line["configuration"] |= {"collectives": "messages", "seed": 1, "tol_scale": 1.0, "share_gpus": False,
                                              "gen": line["run"]["argv"][4], "capacity": 2048, "schedule": "ring", "comm": "mpi"}
                    line["configuration"]["schedule"] = line["run"]["argv"][line["run"]["argv"].index("--schedule") + 1]
        self.assertEqual(self.reasons(entry), [])
        text = json.dumps(made.recorded("attention")).replace('"version": "0.2.0"', '"version": "0.3.0"')
        self.assertTrue(any("build has no flags, which programs of version 0.3.0" in one for one in self.reasons(json.loads(text))))
        with mock.patch("gyre_study.official_setting.git", lambda *words: "false" if words[0] == "rev-parse" else "1"):
            self.assertTrue(any("build has no flags, which programs of version 0.2.0, commit 3259fe20 write" in one
                                for one in self.reasons(made.recorded("attention"))))

    def test_known_defaults_are_those_of_the_programs(self) -> None:
        """A new option that tells results apart, or another default, belongs into DEFAULTS of official_setting.py."""
        for name in DEFAULTS:
            options = load_app(BUILD / "apps", name).options
            shown = {option.name: option.usual if option.kinds else "false" for option in options.values()}
            known = defaults_of(name)
            self.assertEqual({*shown} - NO_RESULTS - {*known}, set(), f"{name}: options that DEFAULTS has not")
            # --in-place is a flag that is usually set.
            other = {one: (shown.get(one), known[one]) for one in known if shown.get(one) not in known[one] and one != "in-place"}
            self.assertEqual(other, {}, name)

    def test_what_is_known_of_inputs_is_in_them(self) -> None:
        for name, model in MODELS.items():
            with h5py.File(SOURCE / "inputs" / name) as file:
                of = file["model"].attrs
                stated = [of[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                              "head_dim", "intermediate_size", "vocab_size", "vocab_padded")]
            self.assertEqual(stated, [model.hidden, model.layers, model.heads, model.kv_heads, model.head_dim,
                                      model.intermediate, model.vocab, model.padded])
        for name, lengths in LENGTHS.items():
            with h5py.File(SOURCE / "inputs" / name) as file:
                offsets = file["documents/offsets"][:].tolist()
            self.assertEqual([end - begin for begin, end in zip(offsets, offsets[1:])], lengths)

    def test_the_schema_means_what_jsonschema_makes_of_it(self) -> None:
        """Of lines of a recorded result, each with one value replaced."""
        document = lines_schema().document
        jsonschema.Draft202012Validator.check_schema(document)
        theirs, ours = jsonschema.Draft202012Validator(document), lines_schema().compile(document)
        changed = {True: 0, False: 0}

        def visit(line: Any, value: Any) -> None:
            for key in [*value] if isinstance(value, dict) else [*range(min(1, len(value)))]:
                own = value[key]
                for new in (None, True, -1, 0.5, "", "a b", [], {}, [1], {"x": 1}):
                    value[key] = new
                    fits = ours(line, "it") == ""
                    self.assertEqual(theirs.is_valid(line), fits, (line["kind"], key, new))
                    changed[fits] += 1
                value[key] = own
                if isinstance(own, (dict, list)):
                    visit(line, own)

        lines = next(iter(made.recorded("logprobs")["rows"].values()))
        for kind in ("run", "row", "end"):
            line = next(one for one in lines if one["kind"] == kind)
            visit(line, line)
        self.assertGreater(min(changed.values()), 100)

    def test_one_number_of_ranks_and_options_with_several_values(self) -> None:
        folder = self.planned("official-attention", "tiny", "cp=2", "threads=1,2")
        self.assertEqual({(case.axes["cp"], case.axes["threads"]) for case in folder.cases}, {(2, 1), (2, 2)})
        self.assertIn("ACCEPTED", self.check(self.path))

    def test_files_of_results_are_compared_and_judged_one_by_one(self) -> None:
        self.planned()
        entry = self.place / "entry.json"
        self.check(self.path, "-o", entry)
        done = gyre_study("compare", entry, self.path)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = gyre_study("check", self.place / "none.json", entry)
        self.assertEqual(done.returncode, 2)
        self.assertIn("none.json", done.stderr)
        self.assertIn("ACCEPTED", done.stdout)

    def test_what_is_tuned_makes_no_other_problem(self) -> None:
        same = self.planned().study
        folder = self.planned("official-attention", "tiny", "cp=1,4", "schedule=ring", "threads=1")
        self.assertEqual(problem_of(folder.study).hash, problem_of(same).hash)
        self.assertIn("cp=4 schedule=ring layout=balanced threads=1\nACCEPTED", self.check(self.path))
        with self.assertRaisesRegex(StudyError, "--set heads: it is part of the problem"):
            load_study(STUDIES / "official-attention.toml", "tiny", ["heads=8"])

    def test_noise_is_said_and_accepted(self) -> None:
        folder = self.planned()

        def noisy(lines: Lines) -> None:
            lines[1] |= {"cpu_share": 0.5, "status": {"result": "UNOFFICIAL", "measured": False,
                                                      "reasons": ["noisy: a rank had 50 % of its core, at least 90"]}}
            of_kind(lines, "end")["foreign_load"]["cores"] = 1.1
            of_kind(lines, "end")["status"] = {"result": "UNOFFICIAL", "reasons": [
                "noisy: a rank had 50 % of its core in 1 of 6 rows, at least 90",
                "noisy: other processes kept 1.1 of 64 cores of n1 busy, at most 0.5"]}

        self.change(folder, noisy)
        said = self.check(self.path)
        self.assertIn("ACCEPTED, NOISY: correct, but its times are not to be quoted\n", said)
        self.assertIn("noisy: a rank had 50 % of its core in 1 of 6 rows", said)
        self.assertIn("kept 1.1 of 64 cores", said)
        results = self.place / "results"
        results.mkdir()
        self.check(self.path, "-o", results / "a.json")
        self.assertIn("| ~ 0.01277 TFLOP/s/rank |", gyre_study("table", results).stdout)

    def test_rows_that_were_measured_again_are_forgotten(self) -> None:
        folder = self.planned()

        def again(lines: Lines) -> None:
            newer = json.loads(json.dumps(lines).replace(lines[0]["id"], "f" * 12))
            of_kind(lines, "end")["foreign_load"]["cores"] = 1.1
            of_kind(lines, "end")["status"] = {"result": "UNOFFICIAL", "reasons": [
                "noisy: other processes kept 1.1 of 64 cores of n1 busy, at most 0.5"]}
            lines += newer

        self.change(folder, again)
        self.assertTrue(self.check(self.path).endswith("\nACCEPTED\n"))
        self.change(folder, lambda lines: lines.__delitem__(slice(len(lines) // 2, None)))
        self.assertIn("ACCEPTED, NOISY", self.check(self.path))

    def test_another_problem(self) -> None:
        folder = self.planned()
        plan = json.loads((self.path / "plan.json").read_text())
        for change, reasons in (
            ({"options": {**plan["study"]["options"], "heads": 2}}, ["plan: options.heads 2; the problem has 4"]),
            ({"accept": "finished"}, ["plan: accept finished; the problem has measured"]),
            ({"tunable": [*plan["study"]["tunable"], "check"]}, ["plan: tunable check; it is part of the problem"]),
            ({"name": "strong"}, ["strong is no official problem; nearest: official-"]),
        ):
            (self.path / "plan.json").write_text(json.dumps({**plan, "study": {**plan["study"], **change}}))
            self.refused(folder, *reasons)

    def test_a_dirty_build(self) -> None:
        folder = self.planned()
        self.change(folder, of("run", "suite", git_state="dirty"))
        commit = made.build()["git"]
        self.refused(folder, f"build {commit} (dirty); planned with {commit}", "not those of a commit (dirty)")

    def test_a_missing_case(self) -> None:
        folder = self.planned()
        file = folder.rows_file(folder.placements[-1])
        cases = len(folder.placements[-1].cases)

        def two_rows_fewer(lines: Lines) -> None:
            del lines[3:7]  # all-to-all and group-cast
            end = of_kind(lines, "end")
            end["verification"]["checks"] = [one for one in end["verification"]["checks"] if one["name"].startswith("ring")]
            end["fom"] = end["fom"][:2] + [{**end["fom"][2], "value": sum(one["value"] for one in end["fom"][:2]) / 2,
                                            "tags": {"rows": 2}}]

        self.change(folder, two_rows_fewer)
        self.refused(folder, *["no result of any pass of the case cp=2 schedule="] * (cases - 1))
        file.unlink()
        self.refused(folder, *["no result of any pass of the case"] * cases)

    def test_an_older_schema(self) -> None:
        folder = self.planned()
        file = self.place / "result.json"
        self.check(self.path, "-o", file)
        entry = json.loads(file.read_text())
        for name, value, wanted in (
            ("schema", "gyre-official/0", "schema 'gyre-official/0'; wanted: gyre-official/1"),
            ("schema", None, "schema None; wanted: gyre-official/1"),
            ("rows", [], "the file: rows is no object; wanted: gyre-official/1"),
            ("rows", {**entry["rows"], "x": []}, "rows of 'x'; the plan has no such placement"),
            ("plan", {**entry["plan"], "placements": [{**entry["plan"]["placements"][0], "name": "../x"}]},
             "placement '../x'; wanted: a name"),
        ):
            file.write_text(json.dumps({**entry, name: value}))
            done = gyre_study("check", file)
            self.assertEqual((done.returncode, done.stdout), (3, ""))
            self.assertIn(wanted, done.stderr)
        file.write_text(json.dumps({**entry, "problem": "0123"}))
        done = gyre_study("check", file)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"problem 0123; official-attention tiny is {entry['problem']}", done.stdout)
        self.change(folder, row(schema="gyre-result/0"))
        done = gyre_study("check", self.path)
        self.assertEqual(done.returncode, 3)
        self.assertIn("it is no line of results; wanted: gyre-result/1", done.stderr)

    def test_the_table_prints_nothing_that_check_refuses(self) -> None:
        entry = made.recorded("pack")
        results = self.place / "results"
        results.mkdir()
        (results / "a.json").write_text(json.dumps(entry))
        self.assertEqual(gyre_study("table", results).returncode, 0)
        next(iter(entry["rows"].values()))[1]["measurements"]["items"] = 7
        (results / "b.json").write_text(json.dumps(entry))
        done = gyre_study("table", results)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("b.json: official-pack tiny", done.stderr)

    def test_the_table_is_that_of_the_accepted_results(self) -> None:
        done = gyre_study("table", SOURCE / "results/official")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, (SOURCE / "results/table.md").read_text(encoding="utf-8"))

    def test_results_are_of_commits_of_this_repository(self) -> None:
        def git(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(["git", "-C", SOURCE, *words], capture_output=True, text=True)

        if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            self.skipTest("no clone, or a shallow one: its history is not there")
        files = sorted((SOURCE / "results/official").glob("*.json"))
        self.assertTrue(files)
        commits = {json.loads(file.read_text())["plan"]["app"]["build"]["git"]: file.name for file in files}
        for commit, file in commits.items():
            done = git("merge-base", "--is-ancestor", commit, "HEAD")
            self.assertEqual(done.returncode, 0, f"{file}: {commit} is not in the history: {done.stderr}")


unittest.main(argv=sys.argv[:1])
