#!/usr/bin/env python3
"""Checks results/links.py: the rates of a link from the output of nccl-tests, and what it refuses.

test_links.py SOURCE_DIR BUILD_DIR
"""

import pathlib
import subprocess
import sys
import tempfile
import tomllib
import unittest

SOURCE, BUILD = (pathlib.Path(a).resolve() for a in (sys.argv[1:3] if len(sys.argv) > 2 else (".", "build/ci")))
MACHINE = SOURCE / "inputs/machines/h100-sxm-8.toml"
LATENCY, RATE = 11.8e-6, 200e9  # of MACHINE's tier node; of a link that is made up
SIZES = [1 << 16, 1 << 23, 1 << 26, 1 << 30]


def printed(gpus, rate, sizes=tuple(SIZES), wrong="0", name="all_gather_perf"):
    """What nccl-tests prints of links that take LATENCY and bytes over `rate`; out of place half as fast."""
    lines = [f"# Collective test starting: {name}", *(f"#  Rank {r:2} Group  0 Pid 1 on host device {r} [0] H200" for r in range(gpus))]
    for size in sizes:
        seconds = LATENCY + size * (gpus - 1) / gpus / rate
        times = [(2e6 * seconds, size / seconds / 2e9), (1e6 * seconds, size / seconds / 1e9)]
        cells = "".join(f" {us:.4f} {alg:.3f} {alg * (gpus - 1) / gpus:.3f} {wrong}" for us, alg in times)
        lines.append(f"{size:12} {size // 2:13} half none -1{cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", ""])


class Links(unittest.TestCase):
    def made(self, pair, *arguments, together=None):
        """(exit code, errors, the machine file) of links.py on a copy of MACHINE."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "pair.txt").write_text(pair, encoding="utf-8")
            (root / "m.toml").write_bytes(MACHINE.read_bytes())
            if together:
                (root / "all.txt").write_text(together, encoding="utf-8")
                arguments += ("--together", "all.txt")
            arguments = arguments if "--tier" in arguments else (*arguments, "--tier", "node")
            done = subprocess.run(["/usr/bin/python3", SOURCE / "results/links.py", "pair.txt", *arguments, "--source", "here", "m.toml"],
                                  cwd=root, capture_output=True, text=True, timeout=60, check=False)
            text = (root / "m.toml").read_text(encoding="utf-8")
            if text != MACHINE.read_text(encoding="utf-8"):  # what is written can be read
                predicted = subprocess.run([BUILD / "apps/gyre-predict", "--machine", "m.toml", "--cp", "8", "--tokens", "4K"],
                                           cwd=root, capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(predicted.returncode, 0, predicted.stderr)
            return done.returncode, done.stderr, text

    def test_a_link_is_what_its_times_say(self):
        code, said, text = self.made(printed(2, RATE), together=printed(8, RATE / 2))
        self.assertEqual((code, said), (0, ""))
        links = {link["tier"]: link for link in tomllib.loads(text)["model"]["links"]}
        before = {link["tier"]: link for link in tomllib.loads(MACHINE.read_text(encoding="utf-8"))["model"]["links"]}
        self.assertEqual(links["switch"], before["switch"])
        node = links["node"]
        self.assertEqual(node["message_bytes"], [size // 2 for size in SIZES[1:]])  # the shortest takes less than 2 latencies
        for rate in node["bytes_per_s"]["value"]:
            self.assertAlmostEqual(rate / RATE, 1, delta=5e-3)
        self.assertAlmostEqual(node["all_at_once"]["value"], 0.5, delta=5e-3)
        self.assertEqual(node["latency_s"], before["node"]["latency_s"])
        self.assertIn("here, 2 GPUs, all_gather_perf in place", node["bytes_per_s"]["source"])

    def test_without_all_gpus_their_share_stays(self):
        _, _, text = self.made(printed(2, RATE))
        node = tomllib.loads(text)["model"]["links"][0]
        self.assertEqual(node["all_at_once"]["value"], 1.0)
        self.assertIn("DistCA", node["all_at_once"]["source"])

    def test_check_writes_nothing(self):
        code, said, text = self.made(printed(2, RATE), "--check")
        self.assertEqual((code, text), (1, MACHINE.read_text(encoding="utf-8")))
        self.assertIn("m.toml differs from pair.txt", said)

    def test_what_says_nothing_of_a_link_is_refused(self):
        for message, pair, arguments in (
            ("4 GPUs; wanted: two", printed(4, RATE), ()),
            ("not the output of all_gather_perf", printed(2, RATE, name="all_reduce_perf"), ()),
            ("pair.txt:4: 3 wrong values; wanted: 0", printed(2, RATE, wrong="3"), ()),
            ("no line of a size and its times", printed(2, RATE, sizes=()), ()),
            ("no time of at least 23.6 us, twice the latency", printed(2, RATE, sizes=SIZES[:1]), ()),
            ("--tier rack: m.toml has node, switch", printed(2, RATE), ("--tier", "rack")),
        ):
            code, said, text = self.made(pair, *arguments)
            self.assertEqual((code, text), (1, MACHINE.read_text(encoding="utf-8")), message)
            self.assertIn(message, said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
