#!/usr/bin/env python3
"""Checks the Python package gyre beside the programs, torch and its page.

Programs read what the package writes, and the package says what they wrote; the page shows the
examples, which run.

Usage: test_gyre_package_programs.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
Tests of pandas and torch are skipped where these are not.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import h5py
import numpy as np
from test_gyre_package import (INPUTS, SOURCE, Bfloat16Tensor, Scratch, gyre, small_attention,
                               small_logprobs)

from gyre.cli import main

APPS = os.path.join(os.path.abspath(sys.argv[2]), "apps")
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
PAGE = Path(SOURCE, "docs/python.md").read_text(encoding="utf-8")
# Those of functions on ranks are on a page of their own, and run by test_conform.
OF_RANKS = Path(SOURCE, "docs/conformance.md").read_text(encoding="utf-8")
EXAMPLES = sorted(path for path in Path(SOURCE, "python/examples").glob("*.py")
                  if f"python/examples/{path.name}" not in OF_RANKS)
QUICK = ("-n", 1, "-w", 0)


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what is around it
        return False


def needs(module):
    return unittest.skipUnless(is_installed(module), f"{module} is not installed")


class Programs(Scratch):
    """What the package writes, the programs read; what they write, it says too."""

    def run_program(self, ranks, program, *arguments):
        """What a program printed; it must succeed."""
        command = [MPIEXEC, "-n", str(ranks), os.path.join(APPS, program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_log_probabilities(self):
        path = self.place("x.h5")
        inputs = {**small_logprobs(), "logits": small_logprobs()["logits"].astype(np.float32)}
        inputs["teacher"] = inputs["teacher"].astype(np.float32)
        inputs["d_value"] = inputs["d_value"].astype(np.float32)
        gyre.write_logprobs(path, **inputs, reference=gyre.reference.logprobs(**inputs))
        command = ("gyre-logprobs", "--input", path, "--op", "all", *QUICK)
        self.run_program(2, *command, "-o", self.place("y.h5"))
        mine = gyre.reference.logprobs(**inputs)
        results = gyre.read(self.place("y.h5")).results
        comparison = gyre.compare(results, mine, common=True, rtol=1e-5, atol=1e-5)
        self.assertTrue(comparison.passed, comparison)
        self.assertEqual((comparison.only_in_a, comparison.only_in_b), ((), ()))

    def test_log_probabilities_in_part(self):
        path, inputs = self.place("x.h5"), small_logprobs()
        halves = np.round(2 * inputs["logits"]) / 2  # bfloat16 holds them
        few = {"logits": Bfloat16Tensor(halves), "targets": inputs["targets"]}
        reference = gyre.reference.logprobs(["logprob", "d_logprob"], **few)
        gyre.write_logprobs(path, **few, reference=reference)
        self.run_program(2, "gyre-logprobs", "--input", path, "--op", "logprob", *QUICK)
        reference["logprob"][2] += 0.5
        gyre.write_logprobs(path, **few, reference=reference)
        with self.assertRaisesRegex(AssertionError, "RESULT INVALID"):
            self.run_program(2, "gyre-logprobs", "--input", path, "--op", "logprob", *QUICK)

    def test_attention(self):
        path = self.place("x.h5")
        inputs = small_attention(window=2, sinks=np.array([0.5, -1, 0, 2]))
        for name in ("q", "k", "v", "d_out", "sinks"):
            inputs[name] = inputs[name].astype(np.float32)
        reference = gyre.reference.attention(**inputs)
        gyre.write_attention(path, **inputs, reference=reference)
        self.run_program(2, "gyre-attention", "--input", path, *QUICK, "-o", self.place("y.h5"))
        results = gyre.read(self.place("y.h5")).results
        gyre.assert_close(results, reference, common=True, rtol=1e-5, atol=1e-5)

    def test_selected_keys(self):
        """The keys of --mask top-k are those of the definition, by the same draws."""
        scores = [gyre.reference.drawn_scores(40, document, seed=3) for document in range(2)]
        selected = np.concatenate([gyre.reference.selected_keys(s, 6) for s in scores])
        rng = np.random.default_rng(1)
        inputs = {name: rng.normal(size=(80, heads, 8)).astype("f4") for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        inputs |= {"offsets": [0, 40, 80], "mask": "selected", "selected_keys": selected}
        path = self.place("selected.h5")
        gyre.write_attention(path, **inputs, reference=gyre.reference.attention(**inputs))
        said = self.run_program(2, "gyre-attention", "--input", path, *QUICK)
        self.assertRegex(said, "VERIFY PASSED 10/10")
        # The last 9 tokens of the first document have queries, and all of the second.
        rows, last = np.r_[31:80], self.place("last.h5")
        few = inputs | {"q": inputs["q"][rows], "selected_keys": selected[rows], "query_offsets": [0, 9, 49]}
        gyre.write_attention(last, **few, reference=gyre.reference.attention(**few))
        self.assertRegex(self.run_program(3, "gyre-attention", "--input", last, *QUICK), "VERIFY PASSED 10/10")
        shape = ("--batch", 2, "--tokens", 40, "--heads", 4, "--kv-heads", 2, "--head-dim", 8)
        plans = []
        for problem in (("--input", path), (*shape, "--mask", "top-k,keys=6,seed=3")):
            self.run_program(1, "gyre-attention", "--explain", *problem, "--cp", 3, "--schedule", "group-cast", "-J", self.place("plan.json"))
            with open(self.place("plan.json"), encoding="utf-8") as file:
                plans.append(json.load(file)["plans"])
        self.assertEqual(*plans)

    def test_documents_rows_and_shards(self):
        documents, packed = self.place("documents.h5"), self.place("packed.h5")
        rng = np.random.default_rng(4)
        texts = [rng.integers(0, 50, length) for length in (13, 0, 40, 1, 7, 22)]
        gyre.write_documents(documents, texts, vocab_size=50, tokenizer="mine")
        options = ("--capacity", 66, "--cp", 3, "-o", packed)
        self.run_program(1, "gyre-pack", "--input", documents, *options)
        self.compare_shards(packed, 3)
        rows = gyre.read(os.path.join(INPUTS, "bshd_tiny.h5")).inputs
        gyre.write_rows(self.place("rows.h5"), **rows, **rows.attributes)
        options = ("--input", self.place("rows.h5"), "--cp", 2, "-o", packed)
        self.run_program(1, "gyre-pack", *options)
        self.compare_shards(packed, 2)
        options = ("--input", os.path.join(INPUTS, "salm_tiny.h5"), "--cp", 2, "-o", packed)
        self.run_program(1, "gyre-pack", *options)
        self.compare_shards(packed, 2)

    def test_repadded_shards_are_those_of_the_repadded_stream(self):
        packed, wide, shards = (self.place(name) for name in ("p.h5", "w.h5", "s.h5"))
        documents = os.path.join(INPUTS, "docs_tiny.h5")
        self.run_program(1, "gyre-pack", "--input", documents, "--capacity", 150, "-o", packed)
        self.run_program(1, "gyre-pack", "--input", packed, "--repad", "--cp", 3, "-o", wide)
        self.compare_shards(wide, 3)
        for layout in (("dual-chunk-swap",), ("balanced", "--chunk", 8)):
            options = ("--cp", 3, "--layout", *layout)
            self.run_program(1, "gyre-shard", "--input", wide, *options, "-o", shards)
            again = self.place("again.h5")
            self.run_program(3, "gyre-shard", "--input", packed, *options, "--repad", "-o", again)
            gyre.assert_close(again + ":/shards", shards + ":/shards")

    def test_text_with_audio_that_python_wrote(self):
        stored = gyre.read(os.path.join(INPUTS, "golden/audio.h5"))
        rows, path, packed = stored.inputs, self.place("audio.h5"), self.place("packed.h5")
        given = {n: rows[n] for n in ("input_ids", "target_ids", "inputs_embeds", "encoder")}
        audio = np.split(rows["audio"], rows["audio_offsets"][1:-1])
        gyre.write_salm(path, **given, **rows.attributes, audio=audio)
        for cp in (1, 2):
            self.run_program(2, "gyre-pack", "--input", path, "--cp", cp, "-o", packed)
            gyre.assert_close(packed + ":/packed", f"{stored.path}:/reference/cp{cp}")

    def test_rows_without_tables_and_extras(self):
        path, packed = self.place("rows.h5"), self.place("packed.h5")
        rng = np.random.default_rng(5)
        ids = rng.integers(0, 9, (4, 24))
        ids[2, 13:] = ids[3] = 9
        extras = {"image": ("slots", rng.integers(-9, 9, (4, 24, 2, 3)).astype(np.float16)),
                  "flags": ("slots", rng.random((4, 24)) < 0.5),
                  "attention_mask": ("slots", np.ones((4, 24), np.int64)),
                  "weights": ("rows", rng.random((4, 2))),
                  "grid": ("none", np.arange(7, dtype=">u2"))}
        arrays = {"vocab_size": 10, "pad_id": 9, "input_ids": ids, "labels": ids}
        gyre.write_rows(path, **arrays, extras=extras)
        for cp in (2, 3):
            options = ("--input", path, "--cp", cp)
            self.run_program(2, "gyre-pack", *options, "-o", packed)
            stream = gyre.read(packed).inputs
            self.assertEqual(np.diff(stream["cu_seqlens"])[:4].tolist(), [24, 24, 13, 0])
            for name, (aligned, array) in gyre.extras_of(stream).items():
                whole = extras[name][1]
                self.assertEqual((aligned, array.dtype), (extras[name][0], whole.dtype), name)
                wanted = whole.reshape(96, *whole.shape[2:]) if aligned == "slots" else whole
                np.testing.assert_array_equal(array, wanted)
            self.compare_shards(packed, cp)
            shards = gyre.extras_of(gyre.read(self.place("shards.h5")).inputs)
            self.assertEqual(set(extras) - set(shards), {"attention_mask"})
            self.assertEqual(shards["flags"][1].dtype, bool)
            for form in ("thd", "bshd"):
                self.run_program(cp, "gyre-shard", *options, "--format", form)

    def test_documents_with_a_reference(self):
        path, file = self.place("x.h5"), gyre.read(os.path.join(INPUTS, "docs_tiny.h5"))
        texts = np.split(file.inputs["tokens"], file.inputs["offsets"][1:-1])
        logprob = file.reference["logprob"].copy()
        model = ("--model", os.path.join(INPUTS, "model_tiny.h5"), "--cp", 2)
        command = ("gyre-pipeline", "--input", path, *model, *QUICK)
        more = {**file.inputs.attributes, "reference": {"logprob": logprob}}
        gyre.write_documents(path, texts, **more)
        self.run_program(2, *command)
        logprob[7] += 0.5
        gyre.write_documents(path, texts, **more)
        with self.assertRaisesRegex(AssertionError, "RESULT INVALID"):
            self.run_program(2, *command)

    def compare_shards(self, packed, cp):
        """gyre-shard's file against the reference of DualChunkSwap."""
        options = ("--input", packed, "--cp", cp, "--layout", "dual-chunk-swap")
        self.run_program(2, "gyre-shard", *options, "-o", self.place("shards.h5"))
        mine = gyre.reference.shards(gyre.read(packed).inputs, cp)
        gyre.assert_close(mine, self.place("shards.h5") + ":/shards")

    @needs("pandas")
    def test_results_have_the_same_columns_in_all_formats(self):
        files = [self.place(name) for name in ("x.json", "x.jsonl", "x.csv")]
        options = ("--input", os.path.join(INPUTS, "docs_tiny.h5"), "--capacity", 144, "-n", 3)
        self.run_program(1, "gyre-pack", *options, "-J", files[0], "--csv", files[2])
        self.run_program(1, "gyre-pack", *options, "-J", files[1])
        document, lines, table = map(gyre.read_results, files)
        self.assertEqual(list(document), list(table))
        self.assertEqual(list(document), list(lines))
        for name in table.select_dtypes("number"):
            np.testing.assert_allclose(document[name].astype(float), table[name], err_msg=name)
        self.assertEqual(document.attrs["runs"][0]["suite"]["program"], "gyre-pack")
        with open(files[1], "a", encoding="utf-8") as file:
            file.write('{"schema": "gyre-res')  # of a run that was killed
        self.assertEqual(len(gyre.read_results(files[1])), len(lines))
        with self.assertRaisesRegex(ValueError, "not of the schema gyre-result/1"):
            gyre.read_results(os.path.join(SOURCE, "results/cpu-2core/machine.json"))


@needs("pandas")
class DamagedResults(Scratch):
    """read_results names the file and the line, whatever is damaged there."""

    def refused(self, name, text, wanted):
        with open(self.place(name), "w", encoding="latin-1") as file:
            file.write(text)
        with self.assertRaises(ValueError) as caught:
            gyre.read_results(self.place(name))
        self.assertIn(f"{self.place(name)}: {wanted}", str(caught.exception))

    def test_lines(self):
        with open(os.path.join(SOURCE, "results/cpu-2core/studies/strong/rows/cp1-fa4e917c.jsonl")) as file:
            lines = file.read().splitlines()[:3]
        run, row = map(json.loads, lines[:2])

        def damaged(place, value):
            return "".join(f"{line}\n" for line in [*lines[:place], value, *lines[place + 1:]])

        for text, wanted in ((damaged(1, '{"schema'), "line 2: Unterminated string"),
                             (damaged(1, "[]"), "line 2: it is not of the schema"),
                             (damaged(1, "[" * 100000), "line 2: maximum recursion depth"),
                             ("\n".join(lines[1:]) + "\n", "line 1: no run"),
                             (damaged(1, json.dumps(row | {"key": 3})), "line 2: 'int'"),
                             (damaged(1, json.dumps(row | {"run": []})), "line 2: unhashable"),
                             (damaged(1, json.dumps(row | {"kind": "rows"})), "line 2: kind 'rows'; wanted: run, row or end"),
                             (damaged(1, '{"schema": "\xff"}'), "line 2: invalid start byte of UTF-8: 0xff"),
                             (damaged(0, json.dumps(run | {"ranks": []})), "line 1: list index")):
            self.refused("x.jsonl", text, wanted)
        for name in ("schema", "kind", "id", "suite", "run", "ranks", "configuration"):
            less = json.dumps({key: value for key, value in run.items() if key != name})
            self.refused("x.jsonl", damaged(0, less), "line 1: it ")
        for name in ("kind", "run", "key", "measurements", "units", "samples_ms", "statistics_ms", "status"):
            less = json.dumps({key: value for key, value in row.items() if key != name})
            self.refused("x.jsonl", damaged(1, less), f"line 2: it has no '{name}'")

    def test_documents_and_tables(self):
        with open(os.path.join(SOURCE, "results/cpu-2core/attention-one-rank.json")) as file:
            text = file.read()
        self.refused("x.json", text[:500], "the document: ")
        self.refused("x.json", "[]", "the document: it is not of the schema")
        document = json.loads(text)
        document["results"][1].pop("status")
        self.refused("x.json", json.dumps(document), "results[1]: it has no 'status'")
        document.pop("ranks")
        self.refused("x.json", json.dumps(document), "the document: it has no 'ranks'")
        self.refused("x.csv", "a,b\n1,2\n", "it has no column 'app'")
        self.refused("x.csv", "", "No columns to parse")


class Page(Scratch):
    """docs/python.md"""

    def run_example(self, path):
        for name in ("inputs", "results"):
            if name not in self.listed():
                os.symlink(os.path.join(SOURCE, name), self.place(name))
        environment = {**os.environ, "PYTHONPATH": os.path.join(SOURCE, "python")}
        command = [sys.executable, "-B", str(path)]
        done = subprocess.run(command, cwd=self.place("."), env=environment, capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 0, f"{path.name}: {done.stderr}")

    def test_shows_every_example(self):
        shown = dict(re.findall(r"<!-- (python/\S+) -->\n```python\n(.*?)^```$", PAGE, re.S | re.M))
        wanted = {f"python/examples/{path.name}": path.read_text() for path in EXAMPLES}
        self.assertEqual(shown, wanted)

    def test_examples_run(self):
        for path in EXAMPLES:
            text = path.read_text()
            modules = [name for name in ("torch", "pandas") if f"import {name}" in text]
            modules += ["pandas"] if "read_results" in text else []
            # Of torch from 2.0 on.
            modules += ["torch.nn.attention"] if "scaled_dot_product_attention" in text else []
            with self.subTest(path=path.name):
                if all(is_installed(name) for name in modules):
                    self.run_example(path)

    def test_commands_print_what_it_shows(self):
        self.run_example(Path(SOURCE, "python/examples/top_k.py"))
        shown = re.findall(r"```text\n\$ gyre-check (.*?)\n(.*?)^```$", PAGE, re.S | re.M)
        self.assertEqual(len(shown), 1)
        for arguments, wanted in shown:
            output, before = io.StringIO(), os.getcwd()
            os.chdir(self.place("."))
            try:
                with contextlib.redirect_stdout(output):
                    main(arguments.split())
                    self.assertEqual(output.getvalue(), wanted)
                    self.assertEqual(main([*arguments.split(), "--ties", "any"]), 0)
            finally:
                os.chdir(before)

    def test_the_suite_finds_what_a_file_misses(self):
        """What the page says of an inclusive end of a shard."""
        (command, wanted), = re.findall(r"```text\n\$ (python3 \S+check.py .*?)\n(.*?)^```$", PAGE, re.S | re.M)
        _, check, module = command.split()
        run = [sys.executable, "-B", check]
        options = {"capture_output": True, "text": True, "timeout": 60, "cwd": SOURCE}
        done = subprocess.run([*run, module], **options)
        self.assertEqual((done.returncode, done.stdout), (0, wanted))
        text = Path(SOURCE, module).read_text(encoding="utf-8")
        self.assertEqual(text.count("< end)"), 1)
        wrong = Path(self.place("wrong.py"))
        wrong.write_text(text.replace("< end)", "<= end)"), encoding="utf-8")
        namespace = {}
        exec(wrong.read_text(encoding="utf-8"), namespace)
        problem = gyre.read(os.path.join(INPUTS, "logprobs_golden.h5"))
        mine = namespace["logprob"]({**problem.inputs.attributes, **problem.inputs})
        gyre.assert_close(mine, problem.reference["logprob"])
        done = subprocess.run([*run, str(wrong)], **options)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"(?m)^logprobs_\S+ guards against .*\n(    .*\n)*  logprobs/logprob \[\d")

    def test_version_is_that_of_the_programs(self):
        project = Path(SOURCE, "CMakeLists.txt").read_text(encoding="utf-8")
        version = re.search(r"project\(gyre VERSION (\S+)", project)[1]
        self.assertEqual(gyre.__version__, version)


@needs("torch")
class Torch(Scratch):
    """Tensors in place of arrays, and autograd beside the references."""

    def test_bfloat16_tensors(self):
        import torch

        logits = torch.randn(5, 9).to(torch.bfloat16).requires_grad_()
        path = self.place("x.h5")
        reference = {"logprob": torch.full((5,), -1.5, dtype=torch.bfloat16)}
        gyre.write_logprobs(path, logits=logits, targets=torch.arange(5), reference=reference)
        file = gyre.read(path)
        np.testing.assert_array_equal(file.inputs["logits"], logits.detach().float().numpy())
        gyre.assert_close({"logprob": reference["logprob"]}, file.reference)
        with h5py.File(path, "r") as raw:
            self.assertEqual(raw["logprobs/logits"].id.get_type().get_size(), 2)

    def test_gradients_of_autograd(self):
        import torch

        inputs = small_logprobs()
        logits = torch.tensor(inputs["logits"], requires_grad=True)
        logp = torch.log_softmax(logits[:, :7] / inputs["temperature"], dim=1)
        found = {"logprob": logp[torch.arange(6), torch.tensor(inputs["targets"])],
                 "entropy": -(logp.exp() * logp).sum(dim=1)}
        found["gathered"] = logp.gather(1, torch.tensor(inputs["ids"]))
        expected = gyre.reference.logprobs(**inputs)
        gyre.assert_close(found, expected, common=True, rtol=1e-12, atol=1e-12)
        for name, value in found.items():
            g = torch.tensor(inputs["d_value"]).reshape(6, *[1] * (value.ndim - 1))
            (gradient,) = torch.autograd.grad((g * value).sum(), logits, retain_graph=True)
            gyre.assert_close(gradient[:, :7], expected[f"d_{name}"], rtol=1e-12, atol=1e-12)
        g = torch.randn(6, 7, dtype=torch.float64)
        (gradient,) = torch.autograd.grad((g * logp).sum(), logits)
        expected = gyre.reference.logprobs({"d_log_softmax"}, d_logprobs=g.numpy(), **inputs)
        gyre.assert_close(gradient[:, :7], expected["d_log_softmax"], rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
