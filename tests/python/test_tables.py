#!/usr/bin/env python3
"""Checks what results/tables.py says of runs and comments that are malformed: one line, and exit code 1."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(SOURCE, "results"))
import gyre_result  # noqa: E402

TABLE = "<!-- table run.json where op=a: op n=number:.1f -->"


def run(*measurements, **others):
    """The text of a gyre-result/1 with a result for each of the measurements."""
    return json.dumps({"schema": "gyre-result/1", "results": [{"measurements": m} for m in measurements], **others})


class Tables(unittest.TestCase):
    def tables(self, text, comment=TABLE, mode="--check"):
        """Exit code and stderr, of a README.md with a comment; and the page afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "README.md")
            page.write_text(comment + "\n\n", encoding="utf-8")
            if text is not None:
                data = text if isinstance(text, bytes) else text.encode()
                for name in ("run.json", "run.txt", "bench-run.json", "x-kernels-rows.json", "x-torch.json"):
                    pathlib.Path(folder, name).write_bytes(data)
            script = os.path.join(SOURCE, "results", "tables.py")
            done = subprocess.run([sys.executable, script, mode, folder], capture_output=True, text=True, check=False)
            return done.returncode, done.stderr, page.read_text(encoding="utf-8")

    def refused(self, want, text, comment=TABLE):
        code, said, _ = self.tables(text, comment)
        self.assertEqual(code, 1, said)
        self.assertEqual(said.count("\n"), 1, said)
        self.assertTrue(said.startswith("README.md: "), said)
        self.assertIn(want, said)

    def test_what_is_right_is_written(self):
        row = {"op": "a", "n": 2, "cv": None, "ok": True}
        code, said, page = self.tables(run(row, {"op": "b"}), TABLE.replace("number:.1f", "number:.1f cv ok"), "--write")
        self.assertEqual((code, said), (0, ""))
        self.assertIn("| op | number | cv | ok |\n|---|---:|---:|---:|\n| a | 2.0 | n/a | True |\n", page)

    def test_files_stand_below_one_another(self):
        code, said, page = self.tables(run({"op": "a", "n": 2}), TABLE.replace("run.json", "run.json,run.json"), "--write")
        self.assertEqual((code, said), (0, ""))
        self.assertIn("| a | 2.0 |\n| a | 2.0 |\n", page)

    def test_benchmarks(self):
        comment = "<!-- table bench-run.json where threads=2: benchmark columns B/s=GB/s:.1fG of_peak:.0% -->"
        name = "statistics/wide/columns:64/threads:"
        text = json.dumps({"benchmarks": [{"name": name + "1"}, {"name": name + "2", "B/s": 2.04e10, "of_peak": 0.5}]})
        code, said, page = self.tables(text, comment.replace(" where threads=2", ""), "--write")
        self.assertEqual(code, 1)
        self.assertIn("benchmarks[0] has no 'B/s'", said)
        code, said, page = self.tables(text, comment, "--write")
        self.assertEqual((code, said), (0, ""))
        self.assertIn("| statistics/wide | 64 | 20.4 | 50% |\n", page)
        self.refused("benchmarks[0].name is 7; wanted: a text", '{"benchmarks": [{"name": 7}]}', comment)
        self.refused("wanted: JSON, Google Benchmark", "{", comment)

    def test_kernels_of_a_gpu(self):
        comment = "<!-- table x-kernels-rows.json where id=executor-tiled-graph: name tokens ms flops=TFLOP/s:.1fT ratio -->"
        shape = {"tokens": 8192}
        results = [{"name": "cudnn", "shape": shape, "median_s": 0.5, "flops": 4e12},
                   {"name": "executor tiled, graph", "shape": shape, "median_s": 1, "flops": 2e12, "ratio": 0.5}]
        text = json.dumps({"results": results})
        code, said, page = self.tables(text, comment, "--write")
        self.assertEqual((code, said), (0, ""))
        self.assertIn("| executor tiled, graph | 8192 | 1000 | 2.0 | 0.5 |\n", page)
        code, said, page = self.tables(text, comment.replace("executor-tiled-graph", "cudnn"), "--write")
        self.assertIn("| cudnn | 8192 | 500 | 4.0 | 1 |\n", page)
        self.refused("results[1].median_s is null; wanted: a number above 0", text.replace('"median_s": 1', '"median_s": null'),
                     comment)

    def test_comparisons_with_torch(self):
        comment = "<!-- table x-torch.json: case side pass ms:.2f ratio -->"
        case = {"case": "V=9", "median_ms": {"gyre": {"fwd": 2}, "torch": {"fwd": 5}}, "ratio": {"torch": {"fwd": 2.5}}}
        code, said, page = self.tables(json.dumps({"cases": [case]}), comment, "--write")
        self.assertEqual((code, said), (0, ""))
        self.assertIn("| V=9 | gyre | fwd | 2.00 | n/a |\n| V=9 | torch | fwd | 5.00 | 2.5 |\n", page)
        self.refused("cases[0].ratio is 3; wanted: an object", json.dumps({"cases": [{**case, "ratio": 3}]}), comment)

    def test_files_that_are_no_results(self):
        self.refused("run.json: No such file", None)
        for text in ("", "{", '{"a": 1', "[" * 100000, "NaN", b"\xff\xfe\xff", '{"results": [1' + "0" * 5000 + "]}"):
            self.refused("wanted: JSON, gyre-result/1", text)
        self.refused("run.json: the file is []; wanted: an object", "[]")
        self.refused("the file has no 'schema'; nearest: 'results'", '{"results": []}')
        self.refused('schema is "gyre-fuzz/1"; wanted: "gyre-result/1"', '{"schema": "gyre-fuzz/1", "results": []}')

    def test_results_of_another_shape(self):
        def shape(results):
            return json.dumps({"schema": "gyre-result/1", "results": results})
        for results, found in (({}, "{}"), ([], "[]"), (None, "null"), ("x", '"x"')):
            self.refused(f"results is {found}; wanted: a list of at least one", shape(results))
        self.refused("results[1] is 7; wanted: an object", shape([{"measurements": {"op": "a", "n": 1}}, 7]))
        self.refused("results[0] has no 'measurements'; nearest: 'measurement'", shape([{"measurement": {}}]))
        self.refused("results[0] has no 'measurements'; wanted: an object with it", shape([{}]))
        self.refused("results[0].measurements is []; wanted: an object", shape([{"measurements": []}]))

    def test_fields(self):
        self.refused("run.json: results[0].measurements has no 'op'; nearest: 'n'", run({"n": 1}))
        self.refused("run.json: results[0].measurements has no 'n'; nearest: 'nn'", run({"op": "a", "nn": 1}))
        for value in ([], {}, 10**400, "\n"):
            self.refused("results[1].measurements.n is ", run({"op": "a", "n": 1}, {"op": "a", "n": value}))
        self.refused("wanted: a number", run({"op": "a", "n": 10**400}))

    def test_comments(self):
        self.refused("no row where op=a", run({"op": "b", "n": 1}))
        self.refused("wanted: a format of numbers", run({"op": "a", "n": 1}), TABLE.replace(".1f", "%Q"))
        self.refused("asks for 'op'; wanted: COLUMN=VALUE", run({"op": "a", "n": 1}), TABLE.replace("op=a", "op"))
        self.refused("asks for '='; wanted: COLUMN", run({"op": "a"}), TABLE.replace("op n=number:.1f", "="))
        for lines in ("3-4", "0-1", "2-1", "1", "1-2,"):
            self.refused("a comment asks for", "1\n2\n3\n", f"<!-- excerpt run.txt lines {lines} -->")
        self.refused("run.txt: ", b"\xff", "<!-- excerpt run.txt lines 1-1 -->")
        self.refused("plan[0] has no 'none'", "# ring, striped, cp = 2, 64 tokens\n# forward\n"
                     "# all ranks: 1 pairs, 2 MB sent; 3 ms, compute only 1 ms, exposed 2 ms\n",
                     "<!-- table run.txt: schedule none -->")


class Reading(unittest.TestCase):
    def test_places_are_named(self):
        value = {"a": [{"b": 1}]}
        self.assertEqual(gyre_result.get("f", value, "a", 0, "b", kind=gyre_result.CELL), 1)
        for way, kind, want in ((("a", 0, "b"), gyre_result.TEXT, "f: a[0].b is 1; wanted: a text of one line"),
                                (("a", "b"), gyre_result.TEXT, 'f: a is [{"b": 1}]; wanted: an object'),
                                (("a", 0, "c"), gyre_result.TEXT, "f: a[0] has no 'c'; nearest: 'b'"),
                                (("a", 0, "b", 0), gyre_result.TEXT, "f: a[0].b is 1; wanted: a list of at least one")):
            with self.assertRaises(gyre_result.Malformed) as caught:
                gyre_result.get("f", value, *way, kind=kind)
            self.assertEqual(str(caught.exception), want)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
