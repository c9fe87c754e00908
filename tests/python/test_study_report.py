#!/usr/bin/env python3
"""gyre-study collect and report: what stands in the SQLite file, and what the page shows and links.

Usage: test_study_report.py SOURCE_DIR BUILD_DIR; needs python3-pandas and python3-matplotlib.
"""

import itertools
import json
import random
import re
import sqlite3
import subprocess
import sys
import unittest
import warnings
import xml.etree.ElementTree as xml
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

SOURCE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm"), str(SOURCE / "tests/support")]
try:
    import numpy as np
    import pandas as pd
    from gyre_study.report import write_report
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import study_results as made  # noqa: E402
from study_plans import SMALL, Scratch, app_of  # noqa: E402
from gyre_study import figures, points, predict  # noqa: E402
from gyre_study.app import load_app  # noqa: E402
from gyre_study.cases import expand  # noqa: E402
from gyre_study.collect import collect  # noqa: E402
from gyre_study.compare import compare_files  # noqa: E402
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.files import Site, Study  # noqa: E402
from gyre_study.folder import Folder, write_plan  # noqa: E402
from gyre_study.launches import launches_of  # noqa: E402
from gyre_study.sides import read_sides  # noqa: E402

VOID = "meta link br img input hr".split()


class Page(HTMLParser):
    """Ids, links and open elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        if "id" in found:
            self.ids.append(found["id"] or "")
        for name in ("href", "xlink:href"):
            if name in found:
                self.links.append(found[name] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


class Studies(Scratch):
    def make(self, study: Study, predicted: bool = False,
             results: tuple[str, ...] = ("VALID",)) -> Folder:
        """A planned study and rows for all its cases but those of halo, with the results in turn."""
        site = SMALL
        expansion = expand(study, site, app_of(), "study.toml")
        foretold = ({case.id: {"fwd": 3.0, "bwd": 6.0} for one in expansion.placements
                     for case in one.cases} if predicted else {})
        write_plan(self.path, study, site, app_of(), expansion, foretold)
        folder = Folder(self.path)
        rng, count = random.Random(1), 0
        for one in folder.placements:
            text = made.run_line("r", one.ranks)
            for case in one.cases:
                for direction in ("fwd", "bwd") if case.axes["schedule"] != "halo" else ():
                    tokens = case.axes.get("tokens", 512)
                    key = {"schedule": case.axes["schedule"], "pass": direction, "tokens": tokens,
                           "cp": one.ranks}
                    time = ((tokens / 512) ** 2 / one.ranks * (1 + 0.2 * one.ranks) * (
                                1 if direction == "fwd" else 2))
                    result = results[count % len(results)]
                    count += 1
                    text += made.row_line("r", key, made.times_around(time, 9, 0.01, rng), result,
                                          one.ranks)
            folder.rows_file(one).write_text(text + made.end_line("r"), encoding="utf-8")
        return folder

    def page(self, folder: Folder) -> str:
        made_file = collect(folder)
        output = self.path / "report.html"
        self.figures = write_report(made_file.file, output)
        return output.read_text(encoding="utf-8")

    def study(self, kind: str, **axes: object) -> Study:
        return Study("name", kind, "gyre-attention", {"schedule": "all", **axes}, title="A <title>")

    def test_tables(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2], tokens=[512, 1024]),
                           results=("VALID", "UNOFFICIAL"))
        collected = collect(folder)
        self.assertEqual((collected.runs, collected.rows, collected.cases), (2, 16, 12))
        with sqlite3.connect(collected.file) as database:

            def all_of(query: str) -> list[tuple[object, ...]]:
                return database.execute(query).fetchall()

            self.assertEqual(all_of("SELECT count(*) FROM samples"), [((8 * 1 + 8 * 2) * 9,)])
            self.assertEqual(dict(all_of("SELECT state, count(*) FROM cases GROUP BY state")),
                             {"noisy": 8, "missing": 4})
            self.assertEqual(dict(all_of("SELECT * FROM units"))["rate"], "TF/s/rank")
            self.assertEqual(
                all_of("SELECT DISTINCT hosts, job, launcher, binding FROM runs WHERE ranks = 2"),
                [("n1 n2", "slurm 7", "srun", "0: 0, 1: 1")],
            )
            self.assertEqual(
                all_of(
                    "SELECT count(*) FROM rows JOIN cases USING (case_id) WHERE key_tokens != axis_tokens"
                ),
                [(0,)],
            )
            self.assertEqual(all_of("SELECT metric, unit FROM foms"),
                             [("attention_rate", "TFLOP/s/rank")] * 2)
            row = all_of("SELECT row_id, median_ms FROM rows WHERE key_cp = 2 LIMIT 1")[0]
            times = [
                ms
                for (ms,) in all_of(
                    f"SELECT max(ms) FROM samples WHERE row_id = {row[0]} GROUP BY iteration"
                )
            ]
            self.assertEqual(sorted(times)[4], row[1])

    def test_rows_that_were_measured_again(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2], tokens=[512]))
        file = folder.rows_file(folder.placements[0])
        key = {"schedule": "ring", "pass": "fwd", "tokens": 512, "cp": 1}
        file.write_text(file.read_text() + made.run_line("again", 1)
                        + made.row_line("again", key, [5.0] * 7, ranks=1))
        with sqlite3.connect(collect(folder).file) as database:
            one = "key_schedule = 'ring' AND key_pass = 'fwd' AND key_cp = 1"
            query = f"SELECT is_newest, median_ms FROM rows WHERE {one} ORDER BY row_id"
            found = database.execute(query).fetchall()
        self.assertEqual([is_newest for is_newest, _ in found], [0, 1])
        self.assertEqual(found[1][1], 5.0)

    def test_repetitions(self) -> None:
        """Each is a run of its own for compare; a plot shows the one with the middle median, the table all."""
        folder = self.make(replace(self.study("strong", cp=[1, 2], tokens=[512]), repeat=3))
        found = collect(folder)
        data = points.read_study(found.file)
        self.assertEqual((len(data.every), len(data.rows)), (24, 8))
        for _, rows in data.every.groupby(["kin", "key_pass"]):
            drawn = data.rows[data.rows["row_id"].isin(rows["row_id"])]
            self.assertEqual(drawn["median_ms"].tolist(), [rows["median_ms"].median()])
        page = self.page(folder)
        self.assertEqual(len(re.findall(r'<tr id="row-', page)), 24)
        self.assertIn("each was run 3 times", page)
        for path in (folder.path, found.file):
            sides = read_sides([path], [path])
            self.assertEqual([len(side) for side in (*sides.before, *sides.after)], [8] * 6, path)
        both = compare_files([folder.path], [found.file], 0.05, 0.01, None)  # a file holds what its folder does
        self.assertEqual((both.runs, both.differences, both.only_before), ((3, 3), [], []))
        self.assertEqual({(one.verdict, one.change) for one in both.changes}, {("unchanged", 1.0)})

    def test_efficiency(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2, 4], tokens=[512, 1024]))
        data = points.read_study(collect(folder).file)
        found = points.scaling(data)
        shares = found["efficiency"]
        for ranks, wanted in ((1, 100), (2, 100 * 1.2 / 1.4), (4, 100 * 1.2 / 1.8)):
            for share in shares[data.rows["ranks"] == ranks]:
                self.assertAlmostEqual(share, wanted, delta=3)
            for speed_up in found["speed_up"][data.rows["ranks"] == ranks]:
                self.assertAlmostEqual(speed_up, ranks * wanted / 100, delta=0.1)

    def test_a_case_that_starts_on_more_ranks_starts_on_the_line_of_no_loss(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2, 4], tokens=[512]))
        file = folder.rows_file(folder.placements[0])
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"schedule": "ring"' not in line))
        data = points.read_study(collect(folder).file)
        late = data.rows[data.rows["key_schedule"] == "ring"]
        self.assertEqual(sorted(set(late["ranks"])), [2, 4])
        found = points.scaling(data)
        for ranks, wanted in ((2, 2.0), (4, 2.0 * (1.4 / 2) / (1.8 / 4))):
            for speed_up in found["speed_up"][late.index[late["ranks"] == ranks]]:
                self.assertAlmostEqual(speed_up, wanted, delta=0.1)

    def check_page(self, page: str, figures: int, title: str = "A &lt;title&gt;") -> None:
        parsed = Page(page)
        self.assertEqual((parsed.wrong, parsed.open), ([], []))
        self.assertEqual(len(parsed.ids), len(set(parsed.ids)), "ids of a page are its own")
        for link in parsed.links:
            self.assertTrue(link.startswith("#") and link[1:] in parsed.ids, link)
        self.assertEqual(self.figures, figures)
        for figure in re.findall(r"<figure><div class=scroll>(<svg.*?</svg>)", page, re.DOTALL):
            xml.fromstring(figure)
            self.assertEqual(re.findall(r"#[0-9a-f]{6}", figure), [],
                             "colours are variables, for light and dark")
            self.assertTrue("<title>" in figure, "no point says what it is")
        self.assertNotIn("http://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page),
                         "nothing is loaded from elsewhere")
        self.assertIn(f"<h1>{title}</h1>", page)
        self.assertIn("prefers-color-scheme: dark", page)

    def test_strong(self) -> None:
        page = self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512, 1024]),
                                   results=("VALID", "UNOFFICIAL")))
        self.check_page(page, 3)
        for wanted in ("speed-up and parallel efficiency", "Rate against length", "Exposed communication",
                       "Who wins where", made.REASON, "slurm 7", "0: 0, 1: 1", "missing"):
            self.assertIn(wanted, page)
        first = page[page.index("<figure>") : page.index("</figure>")]
        hollow = len(re.findall(r"fill: var\(--paper\)[^>]*>|fill: var\(--paper\)", first))
        self.assertGreater(hollow, 0, "points that are not VALID are hollow")
        page = self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512, 1024])))
        first = page[page.index("<figure>") : page.index("</figure>")]
        self.assertEqual(len(re.findall(r"fill: var\(--paper\)", first)), 0)

    def test_scaling_has_time_speed_up_and_efficiency_each_in_one_scale(self) -> None:
        page = self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512, 1024])))
        drawn = xml.fromstring(page.split("<figure><div class=scroll>")[1].split("</div>")[0])
        ticks: dict[str, set[tuple[str, ...]]] = {}
        for axis in drawn.iterfind(".//{*}g[@id]"):
            if re.fullmatch(r"figure1-matplotlib\.axis_\d*[02468]", axis.get("id", "")):
                *shown, label = ("".join(text.itertext()).strip() for text in axis.iterfind(".//{*}text"))
                ticks.setdefault(label, set()).add(tuple(shown))
        self.assertEqual(list(ticks), ["time (ms)", "speed-up", "efficiency (%)"])
        self.assertEqual([len(scales) for scales in ticks.values()], [1, 1, 1])
        for scales in ticks.values():
            self.assertGreaterEqual(len(*scales), 2)

    def test_one_value_of_x(self) -> None:
        """Series stand beside one another, not at opposite edges."""
        for scale in ("log2", "log", "names"):
            for connected in (True, False):
                for heights in ((10.0, 10.0), (9.0, 21.0)):
                    lines = {number: [figures.Point(2, height, True, 1, "")] for number, height in enumerate(heights)}
                    axis = figures.Axis("x", scale, connected=connected)
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        svg = figures.figure("f", [(figures.Axis("y", "log"), [figures.Panel("", lines)])], axis)
                    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
                    places = [float(x) for x in re.findall(r'<a href="#row-1"><title></title>\s*<path d="M ([\d.]+)', svg)]
                    self.assertEqual(len(places), 2, (scale, svg))
                    self.assertLess(max(places) - min(places), 0.15 * width, scale)

    def test_colours_can_be_told_apart_by_everybody(self) -> None:
        """CIELAB distances under full protanopia, deuteranopia and tritanopia (Machado and others 2009)."""
        vision = {
            "normal": np.eye(3),
            "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
            "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
            "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
        }
        to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                           [0.0193339, 0.1191920, 0.9503041]])

        def linear(colour: str) -> np.ndarray:
            share = np.array([int(colour[place: place + 2], 16) for place in (1, 3, 5)]) / 255
            return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)

        def lab(light: np.ndarray) -> np.ndarray:
            xyz = to_xyz @ np.clip(light, 0, 1) / [0.95047, 1, 1.08883]
            root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
            return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])

        for part in (SOURCE / "slurm/gyre_study/report.css").read_text(encoding="utf-8").split("@media (prefers")[:2]:
            paper = linear(re.search(r"--paper: (#\w{6})", part)[1])
            colours = [linear(one) for one in re.findall(r"--series-\d: (#\w{6})", part)]
            self.assertEqual(len(colours), len(figures.SERIES))
            for one in colours:
                light = [float(to_xyz[1] @ side) + 0.05 for side in (one, paper)]
                self.assertGreaterEqual(max(light) / min(light), 3)
            for name, matrix in vision.items():
                seen = [lab(np.array(matrix) @ one) for one in colours]
                nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
                self.assertGreater(nearest, 20, name)

    def test_points_have_the_spread_of_the_repetitions(self) -> None:
        data = points.read_study(collect(self.make(self.study("strong", cp=[1, 2], tokens=[512]))).file)
        row = data.rows.iloc[0]
        for power in (1, -1):
            found, _ = points.panels(data, "ranks", lambda one: 2 * one["median_ms"] ** power, power=power)
            point = next(one for panel in found for one in panel.points() if one.row == row["row_id"])
            ends = sorted(2 * row[name] ** power for name in ("min_ms", "p95_ms"))
            self.assertAlmostEqual(point.low or 0, ends[0])
            self.assertAlmostEqual(point.high or 0, ends[1])
            self.assertLess(point.low or 0, point.high or 0)

    def test_head_names_processor_mpi_and_network(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2], tokens=[512]))
        host = {"cpu": "A <fast> one", "sockets": 2, "cores": 64, "memory_bytes": int(512e9), "gpus": ["G"] * 4}
        route = {"small": "rc_mlx5/mlx5_0:1", "large": "rc_mlx5/mlx5_0:1"}
        machine = {"hosts": [{**host, "names": ["n1"]}, {**host, "names": ["n2"]}],
                   "mpi": {"library": "MPICH 4.0.2", "device": "ch4:ucx", "transport": "UCX 1.13.1",
                           "inside_host": {"small": "sysv/memory", "large": "cma/memory"},
                           "between_hosts": route}, "slurm": None}
        for placement in folder.placements:
            file = folder.rows_file(placement)
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            lines[0]["machine"] = machine
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        page = self.page(folder)
        self.check_page(page, 2)
        for wanted in ("2 hosts: A &lt;fast&gt; one, 2 sockets, 64 cores, 512 GB", "4 G",
                       "MPICH 4.0.2, ch4:ucx, UCX 1.13.1",
                       "between hosts: rc_mlx5/mlx5_0:1; inside a host: cma/memory (short messages: sysv/memory)"):
            self.assertIn(f"<td>{wanted}</td>", page)

    def test_rates_have_one_spelling(self) -> None:
        page = self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512, 1024])))
        self.assertEqual(set(re.findall(r"\w*F(?:LOP)?/s/rank", page)), {"GFLOP/s/rank"})

    def test_other_kinds(self) -> None:
        page = self.page(self.make(self.study("weak-work", cp=[1, 2, 4], tokens=[512])))
        self.check_page(page, 2)
        self.assertIn("work a rank constant", page)
        page = self.page(self.make(self.study("network", cp=[2], tokens=[512],
                                              network=["none", "alpha=1us,beta=1G"])))
        self.check_page(page, 2)
        self.assertIn("Time under slower networks", page)
        page = self.page(self.make(self.study("length", cp=[2], lengths=["dist=a", "dist=b"])))
        self.check_page(page, 2)
        self.assertIn("dist=b", page)

    def test_names_on_an_axis_stand_as_in_the_study(self) -> None:
        """However the rows were measured; and tokens, which the drawn lengths make, are no panels."""
        networks = ["none", "beta=9G", "beta=1G"]
        folder = self.make(self.study("network", cp=[2], tokens=[512], network=networks))
        data = points.read_study(collect(folder).file)
        mixed = data.rows.sort_values("axis_network")
        data.rows = mixed.assign(key_tokens=range(len(mixed)), axis_lengths="dist=a")
        found, left_out = points.panels(data, "axis_network", lambda row: row["median_ms"])
        self.assertEqual((len(found), left_out), (data.rows["key_pass"].nunique(), 0))
        for panel in found:
            for line in panel.lines.values():
                self.assertEqual([point.x for point in line], networks)

    def test_predicted_only_where_there_is_a_prediction(self) -> None:
        self.assertNotIn("Measured against predicted",
                         self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512]))))
        page = self.page(self.make(self.study("strong", cp=[1, 2], tokens=[512]), predicted=True))
        self.check_page(page, 3)
        self.assertIn("Measured against predicted", page)

    def test_without_rows(self) -> None:
        folder = self.make(self.study("strong", cp=[1, 2], tokens=[512]))
        for placement in folder.placements:
            folder.rows_file(placement).unlink()
        self.assertIn("No row has been measured yet", self.page(folder))
        (self.path / "study.sqlite").write_bytes(
            b"no database, and longer than a header of one" * 9
        )
        with self.assertRaises(StudyError):
            points.read_study(self.path / "study.sqlite")

    def test_a_program_that_shards(self) -> None:
        """With a real program: nothing is timed, and cp is an option, not the number of ranks."""
        app = load_app(BUILD / "apps", "gyre-shard")
        axes = {"cp": [2, 4],
                "lengths": ["dist=fixed,length=100,count=20", "dist=long-tailed,max=1K,count=20"]}
        study = Study("s", "length", "gyre-shard", {**axes, "layout": "all"}, accept="finished")
        expansion = expand(study, SMALL, app, "s.toml")
        self.assertEqual([one.ranks for one in expansion.placements], [1] * 4)
        write_plan(self.path, study, SMALL, app, expansion, {})
        folder = Folder(self.path)
        for placement in folder.placements:
            for launch in launches_of(placement, placement.cases, app):
                output = ["--json", str(folder.rows_file(placement))]
                subprocess.run([app.path, *launch.arguments, *output], check=True,
                               stdout=subprocess.DEVNULL, timeout=60)
        page = self.page(folder)
        self.check_page(page, 2, "s")
        for wanted in ("Balance of ranks", "Need of others", "cp = 4", "balanced-joint"):
            self.assertIn(wanted, page)

    def test_predictions_are_the_programs(self) -> None:
        app = load_app(BUILD / "apps", "gyre-attention")
        site = Site("here", 4, model={"tflops": 0.1, "gbps": 5.0, "latency_us": 10.0})
        axes = {"cp": [1, 2], "tokens": [512], "schedule": ["ring", "halo"],
                "network": ["none", "alpha=1us,beta=1G"]}
        study = Study("s", "strong", "gyre-attention", axes,
                      options={"heads": 2, "kv_heads": 2, "iters": 3})
        expansion = expand(study, site, app, "s.toml")
        found = predict.predict(expansion, app, site)
        wanted = {case.id for one in expansion.placements for case in one.cases
                  if case.axes["network"] == "none" and case.axes["schedule"] == "ring"}
        self.assertEqual(set(found), wanted)
        for times in found.values():
            self.assertEqual(set(times), {"fwd", "bwd"})
            self.assertTrue(0 < times["fwd"] < times["bwd"] < 100)
        self.assertEqual(predict.predict(expansion, app, Site("here", 4)), {})
        self.assertTrue(pd.notna(list(found.values())[0]["fwd"]))


unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
