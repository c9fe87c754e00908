#!/usr/bin/env python3
"""Checks scripts/check_upstream.py on a small made-up checkout: right lists pass, each kind of fault is named; and that the
lists of docs/upstream.md can be read.

Usage: test_upstream.py SOURCE_DIR BUILD_DIR
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()

MODULE = '''
import os
LIMIT = 3
class Softmax:
    def forward(self): ...
def logprob(x):
    def inner(): ...
async def gathered(x): ...
def _private(x): ...
if os.name == "none":
    def hidden_in_a_branch(x): ...
'''
OTHER = "def entropy_of(x): ...\ndef pad(x): ...\n"
PAGE = """# Title

<!-- upstream makers/frame 0123456789abcdef0123456789abcdef01234567 src/model.py -->

| function | here |
|---|---|
| `Softmax`, `logprob` | `softmax` |
| `gathered` | not here, because it waits |

Text.

<!-- upstream makers/frame 0123456
     src/other.py matching entropy|no\\|thing -->
| function | here |
|---|---|
| `entropy_of` | `entropy` \\| `both` |
"""


class Script(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.checkout = self.root / "frame"
        (self.checkout / "src").mkdir(parents=True)
        (self.checkout / "src/model.py").write_text(MODULE)
        (self.checkout / "src/other.py").write_text(OTHER)

    def run_it(self, page=PAGE, *arguments):
        file = self.root / "page.md"
        file.write_text(page)
        arguments = arguments or (f"frame={self.checkout}",)
        return subprocess.run([sys.executable, SOURCE / "scripts/check_upstream.py", *arguments, "--page", file],
                              capture_output=True, text=True, timeout=60, check=False)

    def test_right_lists(self):
        done = self.run_it()
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertIn("page.md:3: makers/frame 012345678, src/model.py: 3 functions, nothing wrong", done.stdout)
        self.assertIn("src/other.py: 1 functions, nothing wrong", done.stdout)

    def test_faults(self):
        for message, old, new in (
            ("gathered (src/model.py:8) is missing", "| `gathered` |", "| gathered |"),
            ("pad is no public function of src/model.py; it is in src/other.py", "`gathered`", "`gathered`, `pad`"),
            ("_private is no public function of src/model.py; it is in src/model.py", "`gathered`", "`gathered`, `_private`"),
            ("shard_for_cp is no public function of src/model.py; it is nowhere in the checkout", "`gathered`",
             "`gathered`, `shard_for_cp`"),
            ("pad (src/other.py:2) is missing", " matching entropy|no\\|thing", ""),
            ("logprob is listed twice", "`gathered`", "`gathered`, `logprob`"),
            ("gathered: the second column says neither", "not here, because it waits", "not here"),
            ("gathered: the second column says neither", "not here, because it waits", "not here, because"),
            ("Softmax: the second column says neither", "| `softmax` |", "| |"),
        ):
            self.assertIn(old, PAGE)
            done = self.run_it(PAGE.replace(old, new))
            self.assertEqual(done.returncode, 1, message + done.stdout + done.stderr)
            self.assertIn(message, done.stdout)

    def test_what_is_not_there(self):
        for message, page, arguments in (
            ("there is no list", "# Title\n", ()),
            ("line 3: there is no table behind the comment", PAGE.replace("\n| function", "\ntext\n| function", 1), ()),
            (f"{self.checkout} has no src/none.py", PAGE.replace("src/model.py", "src/none.py"), ()),
            ("no public function of src/other.py matches", PAGE.replace("entropy|no", "soft|no"), ()),
            ("'other=.' is no REPOSITORY=FOLDER; repositories are makers/frame", PAGE, ("other=.",)),
            ("is no REPOSITORY=FOLDER", PAGE, ("frame",)),
            ("there is no folder none", PAGE, ("makers/frame=none",)),
        ):
            done = self.run_it(page, *arguments)
            self.assertEqual(done.returncode, 2, message + done.stdout + done.stderr)
            self.assertIn(message, done.stderr)
        (self.checkout / "src/model.py").write_text("def broken(:\n")
        self.assertEqual(self.run_it().returncode, 2)

    def test_another_commit_is_noted(self):
        for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
            subprocess.run(["git", "-C", self.checkout, *command], check=True, capture_output=True)
        done = self.run_it()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"# \S+ is at [0-9a-f]{9}, and the list of 012345678")

    def test_the_page(self):
        done = subprocess.run([sys.executable, SOURCE / "scripts/check_upstream.py"], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for repository in ("NVIDIA-NeMo/RL", "NVIDIA-NeMo/Automodel", "NovaSky-AI/SkyRL", "volcengine/verl"):
            self.assertIn(f" {repository} ", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
