#!/usr/bin/env python3
"""Checks inputs/reference.py, and that the files in inputs/ are what inputs/MANIFEST says.

The reference is compared with a brute-force version of the model that has no arrays at all: plain
Python numbers, one token at a time, the whole prefix anew for every prediction. Run it directly or
through unittest; needs python3-numpy and python3-h5py.
"""

import hashlib
import math
import os
import shutil
import sys
import tempfile
import unittest

import h5py
import numpy as np

INPUTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "inputs")
sys.dont_write_bytecode = True
sys.path.insert(0, INPUTS)

import reference  # noqa: E402  (found through the line above)

MODEL = os.path.join(INPUTS, "model_tiny.h5")
DOCUMENTS = os.path.join(INPUTS, "docs_tiny.h5")


class BruteForce:
    """The decoder in scalar arithmetic on lists."""

    def __init__(self, path):
        with h5py.File(path, "r") as file:
            self.c = {key: value.item() for key, value in file["model"].attrs.items() if key != "tokenizer"}
            self.w = {}
            file["model"].visititems(lambda name, item: self.w.update({name: item[...].tolist()})
                                     if isinstance(item, h5py.Dataset) else None)

    def times(self, x, matrix):
        """Row vector times matrix."""
        out = [0.0] * len(matrix[0])
        for value, row in zip(x, matrix):
            for j, weight in enumerate(row):
                out[j] += value * weight
        return out

    def norm(self, x, weight):
        """RMS norm of a vector."""
        root = math.sqrt(sum(v * v for v in x) / len(x) + self.c["rms_norm_eps"])
        return [v / root * w for v, w in zip(x, weight)]

    def turned(self, x, position):
        """The rotary embedding of one head's vector, as complex rotations."""
        half = len(x) // 2
        out = [0.0] * len(x)
        for i in range(half):
            angle = position / self.c["rope_theta"] ** (i / half)
            value = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = value.real, value.imag
        return out

    def predict(self, prefix):
        """Probabilities of the token after a prefix, and the last residual streams."""
        c, w = self.c, self.w
        dim = c["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        stream = [list(w["embed"][token]) for token in prefix]
        trace = [stream[-1]]
        for layer in range(c["num_hidden_layers"]):
            at = f"layers/{layer}/"
            normed = [self.norm(x, w[at + "attn_norm"]) for x in stream]
            q, k, v = ([self.times(h, w[at + m]) for h in normed] for m in ("wq", "wk", "wv"))
            for t, x in enumerate(stream):
                mixed = []
                for head in range(heads):
                    begin, kv_begin = head * dim, head * kv_heads // heads * dim
                    query = self.turned(q[t][begin : begin + dim], t)
                    scores = []
                    for s in range(t + 1):
                        key = self.turned(k[s][kv_begin : kv_begin + dim], s)
                        scores.append(sum(a * b for a, b in zip(query, key)) / math.sqrt(dim))
                    weights = [math.exp(score) for score in scores]
                    for d in range(kv_begin, kv_begin + dim):
                        total = sum(weights[s] * v[s][d] for s in range(t + 1))
                        mixed.append(total / sum(weights))
                x = [a + b for a, b in zip(x, self.times(mixed, w[at + "wo"]))]
                h = self.norm(x, w[at + "mlp_norm"])
                gate, up = self.times(h, w[at + "w_gate"]), self.times(h, w[at + "w_up"])
                inner = [g / (1.0 + math.exp(-g)) * u for g, u in zip(gate, up)]
                x = [a + b for a, b in zip(x, self.times(inner, w[at + "w_down"]))]
                stream[t] = x
            trace.append(stream[-1])
        logits = self.times(self.norm(stream[-1], w["final_norm"]), w["head"])
        weights = [math.exp(z) for z in logits[: c["vocab_size"]]]
        return [weight / sum(weights) for weight in weights], trace


def documents_of(path):
    """Token arrays of a documents file."""
    with h5py.File(path, "r") as file:
        tokens, offsets = file["documents/tokens"][...], file["documents/offsets"][...]
    return [tokens[a:b] for a, b in zip(offsets[:-1], offsets[1:])]


def manifest():
    """(name, sha256, bytes) of each line of inputs/MANIFEST."""
    with open(os.path.join(INPUTS, "MANIFEST"), encoding="utf-8") as file:
        fields = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
    return [(what.split(":")[0], digest, int(size)) for digest, size, _, what in fields]


def digest_of(path):
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class ReferenceTest(unittest.TestCase):
    """The model itself."""

    @classmethod
    def setUpClass(cls):
        cls.model = reference.Model(MODEL)

    def test_agrees_with_brute_force(self):
        brute = BruteForce(MODEL)
        for tokens in ([256, 71, 121, 114, 101, 46, 257], [258, 0, 255, 255]):
            logprob, entropy, hidden = reference.score(self.model, tokens)
            self.assertEqual(logprob.shape, (len(tokens) - 1,))
            for j in range(len(tokens) - 1):
                p, trace = brute.predict(tokens[: j + 1])
                self.assertAlmostEqual(logprob[j], math.log(p[tokens[j + 1]]), delta=1e-11)
                self.assertAlmostEqual(entropy[j], -sum(x * math.log(x) for x in p), delta=1e-11)
                np.testing.assert_allclose(hidden[:, j], trace, rtol=0, atol=1e-11)

    def test_probabilities_sum_to_one(self):
        tokens = documents_of(DOCUMENTS)[0]
        hidden = reference.forward(self.model, tokens)
        logp = reference.log_probabilities(self.model, hidden[-1])
        self.assertEqual(logp.shape, (tokens.size, self.model.vocab_size))
        np.testing.assert_allclose(np.exp(logp).sum(axis=1), 1.0, rtol=0, atol=1e-13)

    def test_padded_columns_do_not_matter(self):
        tokens = max(documents_of(DOCUMENTS), key=len)
        other = reference.Model(MODEL)
        self.assertGreater(np.abs(other.head[:, other.vocab_size :]).max(), 10.0)
        other.head[:, other.vocab_size :] = np.nan
        other.embed[other.vocab_size :] = np.nan
        results = [reference.score(model, tokens) for model in (self.model, other)]
        for mine, theirs in zip(*results):
            np.testing.assert_array_equal(mine, theirs)

    def test_later_tokens_do_not_matter(self):
        tokens = max(documents_of(DOCUMENTS), key=len)
        whole, part = (reference.score(self.model, t) for t in (tokens, tokens[:40]))
        np.testing.assert_allclose(whole[0][:39], part[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(whole[1][:39], part[1], rtol=0, atol=1e-12)

    def test_blocks_of_queries_do_not_matter(self):
        tokens = max(documents_of(DOCUMENTS), key=len)
        expected = reference.score(self.model, tokens)[0]
        block, reference.QUERY_BLOCK = reference.QUERY_BLOCK, 7
        try:
            found = reference.score(self.model, tokens)[0]
        finally:
            reference.QUERY_BLOCK = block
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)

    def test_refuses_tokens_outside_the_vocabulary(self):
        for token in (-1, 259, 263):
            with self.assertRaises(SystemExit):
                reference.score(self.model, [256, token])


class FilesTest(unittest.TestCase):
    """The files in inputs/."""

    def test_manifest_matches(self):
        listed = manifest()
        present = sorted(name for name in os.listdir(INPUTS) if name.endswith(".h5"))
        self.assertEqual(sorted(name for name, _, _ in listed), present)
        for name, digest, size in listed:
            path = os.path.join(INPUTS, name)
            self.assertEqual((digest_of(path), os.path.getsize(path)), (digest, size), name)

    def test_numbers_are_checksummed(self):
        for name, _, _ in manifest():
            with h5py.File(os.path.join(INPUTS, name), "r") as file:
                self.assertEqual(file.attrs["schema_version"], 1)
                self.assertIn("generator", file["provenance"].attrs)

                def check(path, item, name=name):
                    if isinstance(item, h5py.Dataset) and item.dtype.kind in "if" and item.size:
                        self.assertTrue(item.fletcher32, f"{name}: {path}")

                file.visititems(check)

    def test_stored_references_hold(self):
        for documents, model in (("docs_tiny.h5", "model_tiny.h5"), ("docs_hybrid.h5", "model_hybrid.h5"),
                                 ("docs_small.h5", "model.h5")):
            path = os.path.join(INPUTS, documents)
            loaded = reference.Model(os.path.join(INPUTS, model))
            with h5py.File(path, "r") as file:
                stored = file["reference"]
                self.assertEqual(stored.attrs["model_sha256"], loaded.sha256)
                offsets, logprob = stored["offsets"][...], stored["logprob"][...]
                entropy, hidden = stored["entropy"][...], stored["hidden"][...]
                starts = file["documents/offsets"][...]
            for i, tokens in enumerate(documents_of(path)):
                mine = slice(offsets[i], offsets[i + 1])
                rows = slice(starts[i], starts[i + 1])
                found = reference.score(loaded, tokens)
                self.assertEqual(found[0].shape, logprob[mine].shape)
                np.testing.assert_allclose(found[0], logprob[mine], rtol=0, atol=1e-10)
                np.testing.assert_allclose(found[1], entropy[mine], rtol=0, atol=1e-10)
                exact = 1e-10 if hidden.dtype == np.float64 else 1e-5 * np.abs(hidden).max()
                np.testing.assert_allclose(found[2], hidden[:, rows], rtol=0, atol=exact)
            self.assertTrue((entropy >= 0).all() and (entropy <= math.log(259)).all())
            self.assertTrue((logprob <= 0).all())

    def test_storing_a_reference_again_changes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "documents.h5")
            shutil.copyfile(DOCUMENTS, copy)
            first = reference.add_reference(MODEL, copy, "float64")
            once = digest_of(copy)
            reference.add_reference(MODEL, copy, "float64")
            self.assertEqual(digest_of(copy), once)
            reference.add_reference(MODEL, copy)
            with h5py.File(copy, "r") as file:
                self.assertEqual(sorted(file["reference"]), ["entropy", "logprob", "offsets"])
                np.testing.assert_array_equal(file["reference/logprob"][...], first["logprob"])
            self.assertEqual(os.listdir(folder), ["documents.h5"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])  # CTest passes folders
