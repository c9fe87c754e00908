#!/usr/bin/env python3
"""Checks gyre-text: texts and tokens become documents that name their tokenizer and know their bytes.

Usage: test_gyre_text.py SOURCE_DIR BUILD_DIR   (MPIEXEC: the launcher)
Where the package tokenizers is neither installed nor in build/model (./run model), a stand-in with
a token for each pair of characters takes its place, and what only the package can do is skipped.
"""

import contextlib
import hashlib
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

import h5py
import numpy as np

SOURCE, BUILD = (Path(argument).resolve() for argument in sys.argv[1:3])
MPIEXEC = os.environ.get("MPIEXEC", "mpiexec")
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "python"), str(SOURCE / "tests/support"), str(SOURCE / "inputs")]
PACKAGES = SOURCE / "build/model/packages"
if importlib.util.find_spec("tokenizers") is None and PACKAGES.is_dir():
    sys.path.append(str(PACKAGES))
HAS_PACKAGE = importlib.util.find_spec("tokenizers") is not None
needs_package = unittest.skipUnless(HAS_PACKAGE, "the package tokenizers is not installed")

import checkpoints  # noqa: E402  (found through the lines above)
import model_cases  # noqa: E402
import model_files  # noqa: E402
import reference  # noqa: E402

import gyre  # noqa: E402
from gyre.text import main  # noqa: E402


def rolling(tokens, prefix, most, context):
    """get_rolling_token_windows of lm_eval.utils, written again: (inputs, predicted) of each window."""
    first = tokens[:most]
    yield [prefix, *first[:-1]], first
    at = len(first)
    while at < len(tokens):
        count = min(len(tokens) - at, most - context + 1)
        yield tokens[at + count - most - 1 : at + count - 1], tokens[at : at + count]
        at += count


STAND_IN = '''
import json
class Encoding: pass
class Tokenizer:
    """<s>, then a token for each pair of characters: the sum of their code points modulo 30, plus 2."""
    def from_file(path):
        json.load(open(path))
        return Tokenizer()
    def no_truncation(self): self.whole = True
    def no_padding(self): pass
    def encode(self, text):
        assert self.whole
        e, pairs = Encoding(), [text[i : i + 2] for i in range(0, len(text), 2)]
        e.tokens = pairs
        e.ids = [2 + sum(map(ord, pair)) % 30 for pair in pairs]
        e.offsets = [(2 * i, 2 * i + len(pair)) for i, pair in enumerate(pairs)]
        return e
'''
WORDS = [f"w{i}" for i in range(40)]


def name_of(tokens):
    """Name of the tokenizer with these tokens, by the definition."""
    return "sha256:" + hashlib.sha256(b"".join(len(t).to_bytes(8, "little") + t for t in map(str.encode, tokens))).hexdigest()


TINY = {"model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)}, "unk_token": "w1"},
        "added_tokens": [{"id": 41, "content": "<s>"}]}  # fmt: skip


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.tokenizer = self.file("tokenizer.json", json.dumps(TINY))

    def file(self, name, content):
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def array(self, name, value):
        np.save(self.folder / name, value, allow_pickle=True)
        return self.folder / name

    def gyre_text(self, *inputs, tokenizer=None, output="docs.h5", path=None, options=()):
        """In this process, or in one that finds packages in the folder `path`."""
        words = ["-o", self.folder / output, "--tokenizer", tokenizer or self.tokenizer, *options, *inputs]
        words = [str(word) for word in words]
        if path is None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                code = main(words)
            return subprocess.CompletedProcess(words, code, stderr=said.getvalue())
        environment = {**os.environ, "PYTHONPATH": f"{SOURCE}/python:{path}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "gyre.text", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)

    def written(self, *inputs, **how):
        done = self.gyre_text(*inputs, **how)
        self.assertEqual(done.returncode, 0, done.stderr)
        return gyre.read(self.folder / "docs.h5").inputs

    def refused(self, text, *inputs, keep=True, **how):
        if not keep:
            os.remove(self.folder / "docs.h5")
        done = self.gyre_text(*inputs, **how)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, r"\Agyre-text: .*\n\Z")
        self.assertIn(text, done.stderr)
        self.assertFalse([name for name in os.listdir(self.folder) if name.startswith("docs.h5")])

    def program(self, ranks, name, *words):
        command = [MPIEXEC, "-n", ranks, BUILD / "apps" / name, *words]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)

    def model(self, vocab, tokenizer=None, name="model.h5"):
        """A model of random weights; its folder holds the tokenizer."""
        source = self.folder / f"{name}.source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(checkpoints.config(vocab)))
        random = np.random.default_rng(40)
        values = lambda shape: random.standard_normal(shape).astype(np.float32) / (1 if len(shape) == 1 else 6)
        (source / "model.safetensors").write_bytes(checkpoints.safetensors(vocab, values))
        (source / "tokenizer.json").write_bytes((tokenizer or self.tokenizer).read_bytes())
        done = self.program(1, "gyre-import", "-o", self.folder / name, "--model", source)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return self.folder / name

    def scored(self, model, ranks, *words):
        """Bits per byte and per token that gyre-pipeline prints, verified."""
        done = self.program(ranks, "gyre-pipeline", "--input", self.folder / "docs.h5", "--model", model, "-n", 1, *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^VERIFY PASSED ")
        score = re.search(r"(?m)^# score .*?: (?:(\S+) bits/byte, )?(\S+) bits/token", done.stdout)
        return [None if x is None else float(x) for x in score.groups()]


class Tokens(Scratch):
    """Tokens already made need no package."""

    def test_lists_of_tokens(self):
        lines = self.file("a.jsonl", '[3, 4]\n\n{"text": [5], "n": 1}\n[]\n')
        whole, rows = self.array("b.npy", np.array([7, 8, 9], np.uint16)), self.array("c.npy", np.array([[1], [2]]))
        ragged = np.empty(2, object)
        ragged[:] = [np.array([1, 2, 3]), [41]]
        found = self.written(lines, whole, rows, self.array("d.npy", ragged))
        self.assertEqual(found["tokens"].tolist(), [3, 4, 5, 7, 8, 9, 1, 2, 1, 2, 3, 41])
        self.assertEqual(found["offsets"].tolist(), [0, 2, 3, 3, 6, 7, 8, 11, 12])
        names = [f"{lines}:1", f"{lines}:3", f"{lines}:4", f"{whole}", *(f"{self.folder}/{n}" for n in ("c.npy[0]", "c.npy[1]", "d.npy[0]", "d.npy[1]"))]
        self.assertEqual([str(name) for name in found["names"]], names)
        self.assertNotIn("text_bytes", found)
        self.assertEqual(found.attributes["tokenizer"], name_of([*WORDS, "", "<s>"]))
        self.assertEqual(found.attributes["vocab_size"], 42)

    def test_a_model_takes_the_tokens_of_its_own_tokenizer_alone(self):
        model = self.model(42)
        self.written(self.array("a.npy", np.arange(42)))
        one, two = self.scored(model, 1), self.scored(model, 2, "--cp", 2)
        self.assertEqual((one, one[0]), (two, None))
        again = dict(reversed(TINY.items())) | {"truncation": None}  # saved again: blanks, order, defaults
        self.written(self.folder / "a.npy", tokenizer=self.file("again.json", json.dumps(again, indent=2, ensure_ascii=True)))
        self.assertEqual(self.scored(model, 1), one)
        vocabulary = {"w39" if word == "w38" else "w38" if word == "w39" else word: i for i, word in enumerate(WORDS)}
        other = self.file("other.json", json.dumps(TINY | {"model": TINY["model"] | {"vocab": vocabulary}}))
        self.written(self.folder / "a.npy", tokenizer=other)
        done = self.program(2, "gyre-pipeline", "--input", self.folder / "docs.h5", "--model", model)
        self.assertEqual(done.returncode, 2)
        theirs, ours = name_of([*WORDS[:38], "w39", "w38", "", "<s>"]), name_of([*WORDS, "", "<s>"])
        self.assertIn(f"of the tokenizer {theirs}, the model of {ours}", done.stderr)

    def test_tokenizers_of_every_form_have_one_name_here_and_in_the_program(self):
        """A list with scores, escapes, gaps, and tokens that are added again under another text."""
        texts = ["a", "\u00e4\U0001f60e", "", '"\\', *WORDS[:3]]
        forms = {
            "list": {"model": {"type": "Unigram", "vocab": [[text, -1.5] for text in texts]}},
            "object": {"model": {"vocab": {text: i for i, text in enumerate(texts)}}, "added_tokens": []},
            "added": {"added_tokens": [{"id": 2, "content": ""}, {"id": 0, "content": "a"}],
                      "model": {"vocab": {text: i for i, text in reversed(list(enumerate(["z", *texts[1:]])))}}},
        }  # fmt: skip
        for form, content in forms.items():
            file = self.file(f"{form}.json", json.dumps(content, ensure_ascii=form == "list"))
            self.assertEqual(gyre.Tokenizer(file).name, name_of(texts), form)
            with h5py.File(self.model(len(texts), file, f"{form}.h5")) as model:
                self.assertEqual(str(model["model"].attrs["tokenizer"]), name_of(texts), form)
        for i, (bad, text) in enumerate((({"model": {"vocab": {"a": 1.0}}}, "the id of the token 'a' is 1.0; wanted: a whole number below 16777216"),
                                         ({"model": {"vocab": {"a": True}}}, "the id of the token 'a' is true"),
                                         ({"model": {"vocab": {"a": 1 << 24}}}, "is 16777216; wanted"),
                                         ({"model": {"vocab": [1, 2]}}, "no tokens in 'model.vocab'"),
                                         ({"model": {}}, "no tokens in 'model.vocab'"))):  # fmt: skip
            file = self.file("bad.json", json.dumps(bad))
            self.refused("bad.json is no tokenizer.json", self.array("a.npy", np.arange(3)), tokenizer=file)
            with self.assertRaisesRegex(AssertionError, re.escape(text)):
                self.model(8, file, f"bad{i}.h5")

    def test_windows_are_those_of_lm_eval(self):
        """Every token is predicted once."""
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "w2"}))
        random = np.random.default_rng(3)
        for length, window, stride in ((9, 4, 4), (9, 4, 1), (10, 4, 3), (8, 4, 4), (3, 4, 2), (1, 1, 1), (5, 1, 1), (12, 5, 2)):
            tokens = random.integers(0, 40, length).tolist()
            found = self.written(self.array("a.npy", np.array(tokens)), options=["--bos", "--window", window, "--stride", stride])
            ends = found["offsets"]
            got = [found["tokens"][a:b].tolist() for a, b in zip(ends, ends[1:])]
            want = list(rolling(tokens, 41, window, window - stride + 1))
            self.assertEqual(got, [[*inputs, predicted[-1]] for inputs, predicted in want])
            unscored = found["unscored"].tolist() if "unscored" in found else [0] * len(got)
            self.assertEqual([len(w) - 1 - u for w, u in zip(got, unscored)], [len(p) for _, p in want])
            self.assertEqual(sum(len(w) - 1 - u for w, u in zip(got, unscored)), length)
        self.refused("--stride 3: wanted: a --window", self.folder / "a.npy", options=["--stride", 3], keep=False)
        self.refused("--stride 3: wanted: a --window, and at most", self.folder / "a.npy", options=["--window", 2, "--stride", 3])

    def test_predictions_that_are_left_out_are_some_of_the_document(self):
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<s>"}))
        self.written(self.array("a.npy", np.arange(23)), options=["--bos", "--window", 7, "--stride", 3])
        with h5py.File(self.folder / "docs.h5", "r+") as file:
            del file.attrs["content_sha256"]
            file["documents/unscored"][0] = 9
        done = self.program(1, "gyre-pipeline", "--input", self.folder / "docs.h5", "--model", self.model(42))
        self.assertEqual(done.returncode, 2)
        self.assertIn("/documents/unscored[0] is 9; it must be 0 to 7, the predictions of document 0", done.stderr)
        for wrong, text in ([0], "unscored"), ([0, 3], "unscored"), ([-1, 0], "0 to the predictions of the document"):
            with self.assertRaisesRegex(ValueError, text):
                gyre.write_documents(self.folder / "x.h5", [[1, 2, 3], [4, 5, 6]], vocab_size=9, unscored=wrong)

    def test_a_document_longer_than_the_model_was_made_for_is_noted(self):
        model = self.model(42)  # made for 512 tokens
        for length, noted in ((513, False), (514, True)):
            self.written(self.array("a.npy", np.arange(length) % 40))
            done = self.program(1, "gyre-pipeline", "--input", self.folder / "docs.h5", "--model", model, "--dry-run")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("made for 512 tokens (max_position_embeddings); longer here: 1 document, up to the 514" in done.stdout, noted)

    def test_a_token_that_begins_documents(self):
        settings, tokens = self.folder / "tokenizer_config.json", self.array("a.npy", np.array([[41, 3], [4, 5]]))
        lines = self.file("a.jsonl", "[6]\n[]\n")
        for content, token in ({"bos_token": "<s>"}, 41), ({"bos_token": None, "eos_token": {"content": "w7"}}, 7):
            settings.write_text(json.dumps(content))
            found = self.written(tokens, lines, options=["--bos"])
            first = [] if token == 41 else [token]
            self.assertEqual(found["tokens"].tolist(), [*first, 41, 3, token, 4, 5, token, 6, token])
        os.remove(self.folder / "docs.h5")
        settings.write_text("{}")
        self.refused("tokenizer_config.json names no bos_token and no eos_token of", tokens, options=["--bos"])
        settings.write_text("{")
        self.refused("tokenizer_config.json is not JSON", tokens, options=["--bos"])
        file = self.file("model.gguf", checkpoints.gguf(WORDS, {"tokenizer.ggml.bos_token_id": 9}))
        self.assertEqual(self.written(lines, tokenizer=file, options=["--bos"])["tokens"].tolist(), [9, 6, 9])

    def test_a_mark_of_byte_order_and_a_full_disk(self):
        found = self.written(self.file("a.jsonl", b"\xef\xbb\xbf[3]\n[4]\n"))
        self.assertEqual(found["tokens"].tolist(), [3, 4])
        self.assertEqual(self.written(self.file("a.jsonl", b"\xef\xbb\xbf\n[4]"))["tokens"].tolist(), [4])
        environment = {**os.environ, "PYTHONPATH": f"{SOURCE}/python", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "gyre.text", "-o", self.folder / "x.h5", "--tokenizer", self.tokenizer, self.folder / "a.jsonl"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
        self.assertEqual((done.returncode, done.stderr), (3, "gyre-text: cannot write to standard output: No space left on device\n"))

    def test_a_gguf_file_names_its_tokenizer_as_its_model_does(self):
        file = self.file("model.gguf", checkpoints.gguf(["a", "ä", "", *WORDS], {"tokenizer.ggml.scores": [1] * 43}))
        done = self.program(1, "gyre-import", "-o", self.folder / "model.h5", "--model", file)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = self.written(self.array("a.npy", np.arange(43)), tokenizer=file)
        with h5py.File(self.folder / "model.h5") as model:
            name = model["model"].attrs["tokenizer"]
            name = name if isinstance(name, str) else name.decode()
            self.assertEqual((found.attributes["tokenizer"], found.attributes["vocab_size"]), (name, 43))

    def test_what_is_refused(self):
        made, good, evil = self.folder / "made", self.array("good.npy", np.arange(3)), np.empty(1, object)
        evil[0] = type("Evil", (), {"__reduce__": lambda self: (os.mkdir, (str(made),))})()
        self.refused("a.jsonl:2: token 1 is 42; wanted: an id of", self.file("a.jsonl", "[1]\n[1, 42]\n"))
        self.refused("a.jsonl:1: token 0 is -1; wanted: an id of", self.file("a.jsonl", "[-1]"))
        self.refused("a.jsonl:1: token 0 is True;", self.file("a.jsonl", "[true]"))
        self.refused("a.jsonl:1: token 2 is 1.5;", self.file("a.jsonl", "[1, 2, 1.5]"))
        self.refused("a.jsonl:1: token 0 is 10000000000", self.file("a.jsonl", f"[{10**90}]"))
        self.refused("has no field 'text'; its fields are: 'body', 'n'", self.file("a.jsonl", '{"body": "x", "n": 1}'))
        self.refused("the field 'text' is 7; wanted: a text or a list", self.file("a.jsonl", '{"text": 7}'))
        self.refused("a.jsonl:1 is not JSON: Expecting property name", self.file("a.jsonl", "{]\n"))
        self.refused("a.jsonl:1 is not JSON: ", self.file("a.jsonl", "[" * 100000))
        self.refused("a.jsonl:1: byte 1 is 0xff, which is not UTF-8", self.file("a.jsonl", b'"\xff"'))
        self.refused("half of a surrogate pair", self.file("a.jsonl", r'"\ud800"'))
        self.refused("a.npy is float64 [3]; wanted: integers", self.array("a.npy", np.ones(3)))
        self.refused("a.npy is int64 [1, 1, 1]; wanted: integers", self.array("a.npy", np.ones((1, 1, 1), int)))
        self.refused("a.npy cannot be read: it holds a", self.array("a.npy", evil))
        self.assertFalse(made.exists())
        self.refused("a.npy cannot be read: ", self.file("a.npy", good.read_bytes()[:-3]))
        self.refused("nothing to write: 0 documents", self.file("a.jsonl", "\n"))
        self.refused("nothing to write: 1 documents", self.array("a.npy", np.empty(0, int)))
        self.refused("cannot read nowhere.txt: No such file", "nowhere.txt")
        self.refused("Is a directory", self.folder)
        self.refused("cannot read nowhere.json: No such file", good, tokenizer="nowhere.json")
        self.refused("is no tokenizer.json", good, tokenizer=self.file("bad.json", "{}"))
        self.refused("is no tokenizer.json", good, tokenizer=self.file("bad.json", "{"))
        done = self.gyre_text(good, output="good.npy")
        self.assertEqual(done.returncode, 2)
        self.assertIn("is the file of the input", done.stderr)
        self.assertEqual(self.gyre_text(good, output="no/docs.h5").returncode, 3)

    def test_damaged_gguf_files(self):
        file, tokens = self.folder / "bad.gguf", self.array("a.npy", np.arange(3))
        whole = checkpoints.gguf(WORDS)
        for data, text in ((b"", "is no GGUF file"), (b"GGML" + whole[4:], "does not begin with GGUF"),
                           (whole[:4] + b"\x07" + whole[5:], "its version is 7"), (whole[:200], "it is truncated"),
                           (whole[:16] + b"\xff" * 8 + whole[24:], "is no GGUF file"),
                           (checkpoints.gguf(WORDS, {"tokenizer.ggml.tokens": 1}), "tokenizer.ggml.tokens is no list of")):  # fmt: skip
            file.write_bytes(data)
            self.refused(text, tokens, tokenizer=file)
        random = np.random.default_rng(1)
        for _ in range(300):  # each is read or refused
            data = bytearray(whole)
            at = random.integers(len(whole) // 3)
            data[at : at + 8] = random.choice([0, 1, 9, 255], 8).astype(np.uint8).tobytes()
            file.write_bytes(data)
            try:
                gyre.Tokenizer(file)
            except ValueError as error:
                self.assertIn("bad.gguf", str(error))


class Texts(Scratch):
    """Texts, by the package or, where it is not, the stand-in."""

    def setUp(self):
        super().setUp()
        self.stand_in = self.folder / "packages"
        self.stand_in.mkdir()
        (self.stand_in / "tokenizers.py").write_text(STAND_IN)

    def test_texts_know_their_bytes(self):
        lines = self.file("a.jsonl", '{"text": "h\\u00e9llo"}\n"x"\n{"text": ""}\n')
        text = self.file("b.txt", "a\r\nß\N{SMILING FACE WITH SUNGLASSES}")
        found = self.written(lines, text, path=self.stand_in)
        want = [[2 + sum(map(ord, pair)) % 30 for pair in pairs] for pairs in (["hé", "ll", "o"], ["x"], [], ["a\r", "\nß", "\U0001f60e"])]
        self.assertEqual(found["tokens"].tolist(), sum(want, []))
        self.assertEqual(found["offsets"].tolist(), np.cumsum([0, *map(len, want)]).tolist())
        self.assertEqual(found["text_bytes"].tolist(), [3, 0, 0, 7])  # those of "llo", and of "\nß" and the face
        model = self.model(42)
        for ranks in (1, 2):
            per_byte, per_token = self.scored(model, ranks, "--cp", ranks)
            self.assertAlmostEqual(per_byte * 10, per_token * 4, delta=2e-3)
        mixed = self.written(text, self.array("a.npy", np.arange(3)), path=self.stand_in)
        self.assertNotIn("text_bytes", mixed)

    def test_a_model_from_its_files_to_its_scores(self):
        """scripts/model.sh, which ./run model starts, on a small model."""
        self.model(42)
        source, out = self.folder / "model.h5.source", self.folder / "out"
        out.mkdir()
        environment = {**os.environ, "PYTHONPATH": f"python:{self.stand_in}", "PYTHONDONTWRITEBYTECODE": "1"}

        def run():
            command = [SOURCE / "scripts/model.sh", BUILD, out, source, "LICENSE"]
            return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)

        done = run()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count(" 3/3 against the float64 twin"), 2, done.stdout)
        scores = json.loads((out / "two-ranks.json").read_text())
        bits = next(f["value"] for f in scores["fom"] if f["metric"] == "bits_per_byte")
        self.assertRegex(done.stdout, rf"(?m)^2 ranks, cp = 2 +{bits:.4f} ")
        (source / "tokenizer.json").write_text("{}")
        done = run()
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("tokenizer.json': no tokens in 'model.vocab'", done.stderr)

    def test_the_command_of_each_architecture(self):
        """The commands of docs/models.md, on small models of these architectures."""
        page = (SOURCE / "docs/models.md").read_text(encoding="utf-8")
        commands = dict(re.findall(r"(?m)^\| `(\w+)` \| `\./run model ~/(\S+)` \|$", page))
        small = {model_cases.config_of(case)["model_type"]: case for case in model_cases.CASES}
        self.assertEqual(commands.keys(), small.keys())
        environment = {**os.environ, "PYTHONPATH": f"python:{self.stand_in}", "PYTHONDONTWRITEBYTECODE": "1"}
        for architecture, name in commands.items():
            config = model_cases.config_of(small[architecture])
            tensors = model_files.safetensors_of(model_cases.weights_of(config), config=config)
            source = model_files.write_folder(self.folder / name, config, tensors)
            (source / "tokenizer.json").write_bytes(self.tokenizer.read_bytes())
            out = self.folder / architecture
            out.mkdir()
            text = self.file(f"{name}.txt", "Forty characters, or two to each token.")
            command = [SOURCE / "scripts/model.sh", BUILD, out, source, text]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
            self.assertEqual(done.returncode, 0, (architecture, done.stdout + done.stderr))
            checks = "4/4" if config["model_type"] in model_files.HYBRIDS else "3/3"  # messages of recurrent layers are counted, too
            self.assertEqual(done.stdout.count(f" {checks} against the float64 twin"), 2, done.stdout)

    def test_text_that_is_refused(self):
        how = {"path": self.stand_in}
        self.refused("b.txt: byte 2 is 0xe9, which is not UTF-8", self.file("b.txt", b"ab\xe9"), **how)
        self.refused("nothing to write: 1 documents", self.file("b.txt", ""), **how)
        (self.stand_in / "tokenizers.py").write_text("import is_not_there")
        self.refused("pip install tokenizers", self.file("b.txt", "ab"), **how)

    def test_what_the_package_raises(self):
        """A panic of Rust, as pyo3 passes it on, is no Exception."""
        text = self.file("b.txt", "ab")
        for place in ("json.load(open(path))", "assert self.whole"):
            panics = STAND_IN.replace(place, 'raise type("PanicException", (BaseException,), {})("called unwrap")')
            (self.stand_in / "tokenizers.py").write_text(panics)
            self.refused(f"{self.tokenizer}", text, path=self.stand_in)
            self.refused("called unwrap", text, path=self.stand_in)

    def test_the_score_of_windows_is_the_rolling_one(self):
        """Bits per byte beside the NumPy reference, which scores the windows of rolling()."""
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<s>"}))
        model, content = self.model(42), "Each token is scored \u00f6nce, from at most seven before it."
        loaded = reference.Model(model)
        tokens = [2 + sum(map(ord, content[i : i + 2])) % 30 for i in range(0, len(content), 2)]
        for stride in (7, 3):
            windows = list(rolling(tokens, 41, 7, 7 - stride + 1))
            scores = [reference.score(loaded, np.array([*inputs, predicted[-1]]))[0][-len(predicted) :] for inputs, predicted in windows]
            bits = -np.concatenate(scores).sum() / np.log(2)
            self.written(self.file("b.txt", content), path=self.stand_in, options=["--bos", "--window", 7, "--stride", stride])
            for ranks in (1, 2):
                per_byte, per_token = self.scored(model, ranks, "--cp", ranks)
                self.assertAlmostEqual(per_byte, bits / len(content.encode()), delta=2e-4)
                self.assertAlmostEqual(per_token, bits / len(tokens), delta=2e-4)

    def test_files_of_a_model_that_disagree_on_the_first_token(self):
        settings, text = self.folder / "tokenizer_config.json", self.file("b.txt", "abcd")
        for content, options, noted in (({"add_bos_token": True, "bos_token": "<s>"}, (), True), ({"add_bos_token": True, "bos_token": "<s>"}, ("--bos",), False),
                                        ({"add_bos_token": False, "bos_token": "<s>"}, (), False)):  # fmt: skip
            settings.write_text(json.dumps(content))
            done = self.gyre_text(text, path=self.stand_in, options=options)
            self.assertEqual((done.returncode, "add_bos_token = true, and tokenizer.json adds none" in done.stderr), (0, noted), done.stderr)
        marked = self.written(self.file("marked.txt", b"\xef\xbb\xbf" + text.read_bytes()), path=self.stand_in)
        self.assertEqual(marked["tokens"].tolist(), self.written(text, path=self.stand_in)["tokens"].tolist())
        found = self.written(text, path=self.stand_in, options=("--bos", "--window", 1))
        self.assertEqual(found["text_bytes"].tolist(), [2, 2])  # all of the text
        self.assertEqual([str(name) for name in found["names"]], [f"{text}", f"{text}#2"])

    def test_kinds_that_are_refused(self):
        base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["w 0"]}
        for keys, text in (({"tokenizer.ggml.model": "t5"}, "its tokenizer is of the kind 't5'"),
                           ({"tokenizer.ggml.pre": "tekken"}, "its pre-tokenizer is 'tekken', which cannot be"),
                           ({"tokenizer.ggml.add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = True is not"),
                           ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.remove_extra_whitespaces": True}, "whitespaces = True is not"),
                           ({"tokenizer.ggml.mystery": 4}, "tokenizer.ggml.mystery = 4 is not supported")):  # fmt: skip
            file = self.file("bad.gguf", checkpoints.gguf(WORDS, base | keys))
            self.refused(text, self.file("b.txt", "ab"), tokenizer=file, path=self.stand_in)
        file = self.file("bad.gguf", checkpoints.gguf(WORDS, {"tokenizer.ggml.model": "gpt2"}))
        self.refused("its pre-tokenizer is None", self.file("b.txt", "ab"), tokenizer=file, path=self.stand_in)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HARD = "I'LLX  don't\n\n  x1234567½Ⅷ ²,.. <|end|>a\t\r\n\u3000é e\u0301 naïve 日本語 \U0001f60e\U0001f60e $+<=>^~| end  \n "


@needs_package
class Package(Scratch):
    """The package itself, and the rules that are built from GGUF files."""

    def trained(self):
        """A byte-level BPE of 400 tokens, trained on this file; without a pre-tokenizer."""
        import tokenizers

        rule = tokenizers.Tokenizer(tokenizers.models.BPE())
        rule.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>", "<s>"], show_progress=False)
        rule.train_from_iterator([Path(__file__).read_text(), HARD, *["1234567", "123", "LLX"] * 99], trainer)
        return rule

    def test_a_tokenizer_json(self):
        import tokenizers

        rule = self.trained()
        rule.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        rule.enable_truncation(5)
        rule.enable_padding(length=4096)
        rule.save(str(self.tokenizer))
        rule.no_truncation()
        rule.no_padding()
        found = self.written(self.file("a.txt", HARD), SOURCE / "LICENSE")
        texts = [HARD, (SOURCE / "LICENSE").read_text()]
        self.assertEqual(found["tokens"].tolist(), sum((rule.encode(text).ids for text in texts), []))
        self.assertEqual(found["text_bytes"].tolist(), [len(text.encode()) for text in texts])
        self.assertEqual(found["tokens"][0], 1)
        model = self.model(400)
        one, two = self.scored(model, 1), self.scored(model, 2, "--cp", 2)
        np.testing.assert_allclose(one, two, atol=2e-4)
        self.assertAlmostEqual(one[0] * found["text_bytes"].sum(), one[1] * (len(found["tokens"]) - 2), delta=2)

    def test_bytes_of_the_first_token(self):
        rule = self.trained()
        rule.save(str(self.tokenizer))
        tokenizer = gyre.Tokenizer(self.tokenizer)
        for text in ("unittest", "x", "\U0001f60f?", "é", "日本", ""):
            ids, size = tokenizer.encode(text)
            first = rule.id_to_token(ids[0]) if ids else ""  # a letter a byte
            self.assertEqual(size, len(text.encode()) - len(first), text)

    def test_pre_tokenizers_of_gguf_files(self):
        """Each beside the rule that its models publish, which is written in another way here."""
        from tokenizers import Regex, Tokenizer, normalizers
        from tokenizers import pre_tokenizers as pre

        def split_at(expression):
            return pre.Sequence([pre.Split(Regex(expression), "isolated"), pre.ByteLevel(False, use_regex=False)])

        published = {
            "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)]),
            "gpt-2": pre.ByteLevel(False),
            "llama-bpe": split_at(LLAMA3),
            "qwen2": split_at(LLAMA3.replace("{1,3}", "")),
        }
        trained = self.trained()
        stored = json.loads(trained.to_str())
        vocabulary = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
        merges = [" ".join(m) if isinstance(m, list) else m for m in stored["model"]["merges"]]
        unmerged = [merge for merge in merges if merge.replace(" ", "") != "123"]  # a token that no merge makes
        self.assertEqual(len(unmerged), len(merges) - 1)
        stored["model"]["merges"] = merges = unmerged
        keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges, "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.token_type": [3, 3] + [1] * 398, "tokenizer.ggml.bos_token_id": 1}  # fmt: skip
        for kind, rule in published.items():
            file = self.file("model.gguf", checkpoints.gguf(vocabulary, keys | {"tokenizer.ggml.pre": kind}))
            found = self.written(self.file("a.txt", HARD), tokenizer=file)
            stored["model"]["ignore_merges"] = kind == "llama-bpe"
            expected = Tokenizer.from_str(json.dumps(stored))
            expected.pre_tokenizer = rule
            if kind == "qwen2":
                expected.normalizer = normalizers.NFC()
            before = [1] if kind == "llama-bpe" else []
            self.assertEqual(found["tokens"].tolist(), before + expected.encode(HARD).ids, kind)
            self.assertIn(0, found["tokens"])  # <|end|>
        keys |= {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 0}
        file = self.file("model.gguf", checkpoints.gguf(vocabulary, keys))
        tokens = self.written(self.file("a.txt", "ab"), tokenizer=file)["tokens"].tolist()
        self.assertEqual(tokens[-1], 0)
        self.assertNotIn(1, tokens)

    def test_scores_of_sentencepiece(self):
        """Beside merges by hand."""
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc"]
        tokens += ["bc", "ab", "\u2581a", "\u2581\u2581"]
        keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.scores": [0.0] * 263 + [-1.0, -2.0, -3.0, -4.0],
                "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8}  # fmt: skip
        for text, prefix, want in (("abc", True, ["\u2581a", "bc"]), ("abc", False, ["a", "bc"]), ("ab  c", True, ["\u2581", "ab", "\u2581\u2581", "c"]),
                                   ("\u00e9", False, ["<0xC3>", "<0xA9>"]), ("a</s>a", True, ["\u2581a", "</s>", "\u2581a"])):  # fmt: skip
            file = self.file("model.gguf", checkpoints.gguf(tokens, keys | {"tokenizer.ggml.add_space_prefix": prefix}))
            found = self.written(self.file("a.txt", text), tokenizer=file)
            self.assertEqual([tokens[i] for i in found["tokens"]], ["<s>", *want], text)
            self.assertEqual(found["text_bytes"].tolist(), [len(text.encode())])
        file.write_bytes(checkpoints.gguf(tokens, keys | {"tokenizer.ggml.scores": [0.0]}))
        os.remove(self.folder / "docs.h5")
        self.refused("it has 1 scores for 267 tokens", self.folder / "a.txt", tokenizer=file)

    @unittest.skipUnless(importlib.util.find_spec("sentencepiece"), "the package sentencepiece is not installed")
    def test_sentencepiece(self):
        import sentencepiece

        model, text = io.BytesIO(), (SOURCE / "LICENSE").read_text()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*text.splitlines(), HARD.replace("\n", " ")]), model_writer=model, vocab_size=500, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)  # fmt: skip
        rule = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ids = range(rule.get_piece_size())
        kinds = [6 if rule.is_byte(i) else 3 if rule.is_control(i) else 2 if rule.is_unknown(i) else 1 for i in ids]
        keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float(rule.get_score(i)) for i in ids],
                "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.add_bos_token": False}  # fmt: skip
        file = self.file("model.gguf", checkpoints.gguf([rule.id_to_piece(i) for i in ids], keys))
        for content in (text, HARD):
            found = self.written(self.file("a.txt", content), tokenizer=file)
            self.assertEqual(found["tokens"].tolist(), rule.encode(content))

    def test_a_blank_that_the_tokenizer_adds_is_no_byte_of_the_text(self):
        from tokenizers import Tokenizer, models
        from tokenizers import pre_tokenizers as pre

        for blank, rule in (("\u2581", pre.Metaspace()), ("\u0120", pre.ByteLevel(add_prefix_space=True))):
            whole = Tokenizer(models.BPE({"?": 0, blank: 1, "a": 2, "b": 3}, [], unk_token="?"))
            whole.pre_tokenizer = rule
            file = self.file("blank.json", whole.to_str())
            for text, want in (("ab", 2), (" ab", 2), ("  a", 2)):
                found = self.written(self.file("a.txt", text), tokenizer=file)
                self.assertEqual((found["tokens"][0], found["text_bytes"].tolist()), (1, [want]), (blank, text))

    def test_models_without_a_token_for_what_they_do_not_know(self):
        for kind in ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}, {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}):
            file = self.file("bad.json", json.dumps({"version": "1.0", "added_tokens": [], "model": kind}))
            self.refused("bad.json cannot encode it: ", self.file("b.txt", "xy"), tokenizer=file)

    def test_default_pre_tokenizer(self):
        """Beside what the four expressions of llama.cpp leave of a text, by hand."""
        from tokenizers import Regex
        from tokenizers import pre_tokenizers as pre

        from gyre.tokenizer import KINDS

        rule = pre.Sequence([pre.Split(Regex(split), "isolated") for split in KINDS["default"].splits])
        pieces = [piece for piece, _ in rule.pre_tokenize_str("it's 12345$x\n\n y")]
        self.assertEqual(pieces, ["it", "'", "s", " ", "123", "45", "$", "x", "\n\n", " y"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
