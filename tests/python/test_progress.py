#!/usr/bin/env python3
"""The progress of a run behind a launcher: one line of the launcher's terminal, cleared before all else; none in a file.

Usage: test_progress.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import unittest
from pathlib import Path

BUILD = Path(sys.argv[2]).resolve()
COLUMNS = 60
# Two ranks that sleep: 16.8 MFLOP each, at 10 MFLOP/s, four times.
COMMAND = [
    os.environ.get("MPIEXEC", "mpiexec"), "-n", "2", str(BUILD / "apps/gyre-attention"), "--tokens", "512", "--heads", "4",
    "--kv-heads", "1", "--head-dim", "16", "--schedule", "ring", "--pass", "fwd", "-n", "4", "-w", "0",
    "--emulate-compute", "tflops=0.00001,launch=1us",
]  # fmt: skip


def read_all(terminal: int) -> str:
    data = b""
    while True:
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:  # nobody has the other end any more
            return data.decode()
        if not block:
            return data.decode()
        data += block


def screen(text: str) -> list[str]:
    """Lines as a terminal shows them."""
    lines, line, column = [], "", 0
    for part in re.findall(r"\033\[K|\r|\n|[^\033\r\n]+", text):
        if part == "\033[K":
            line = line[:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            lines, line, column = [*lines, line], "", 0
        else:
            line = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [*lines, line]


class Progress(unittest.TestCase):
    def test_redraws_on_the_launchers_terminal_alone(self) -> None:
        terminal, other_end = pty.openpty()
        fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            shown = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL, stdout=other_end, stderr=other_end)
            kept = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
            os.close(other_end)
            text = read_all(terminal)
            codes = shown.wait(60), kept.wait(60)
            self.assertEqual(codes, (0, 0), text)
            drawn = re.findall(r"\r(gyre-attention: [^\r\033]*)\033\[K", text)
            self.assertGreater(len(drawn), 0, text)
            self.assertLess(max(map(len, drawn)), COLUMNS)
            self.assertIn("gyre-attention: 0 of 1 row, ", drawn[0])
            lines = screen(text)
            self.assertFalse([line for line in lines if " of 1 row, " in line], text)
            self.assertTrue([line for line in lines if line.startswith("  ring ")], text)
            self.assertEqual(lines[-1], "")
            errors.seek(0)
            self.assertNotIn("\033", errors.read())


unittest.main(argv=sys.argv[:1])
