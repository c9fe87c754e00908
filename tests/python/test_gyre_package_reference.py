#!/usr/bin/env python3
"""Checks gyre.reference against stored answers and definitions in plain sums; names of files.

Gradients are differentiated by a complex step: for an analytic f, Im f(x + i h) / h is f'(x) to the
last bit, since nothing is subtracted.

Usage: test_gyre_package_reference.py SOURCE_DIR BUILD_DIR; needs python3-numpy and python3-h5py.
"""

import re
import sys
import unittest
import warnings
from pathlib import Path

import h5py
import numpy as np
from test_gyre_package import FILES, INF, SOURCE, Scratch, gyre, small_attention, small_logprobs

from gyre import operations, schema
from gyre.logprobs import ANSWERS

STEP = 1e-30
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


class References(unittest.TestCase):
    """gyre.reference"""

    def test_stored_answers(self):
        """Of every file in and below inputs/: an implementation of its own has computed them."""
        references = {"gyre/logprobs": gyre.reference.logprobs,
                      "gyre/attention": gyre.reference.attention}
        compared = 0
        for path in FILES:
            file = gyre.read(path)
            if file.schema not in references or "reference" not in file:
                continue
            mine = references[file.schema](**file.inputs, **file.inputs.attributes)
            for name, answer in file.reference.items():
                if name in operations.ARRAYS:  # the suite has them from this package; the programs compare them
                    continue
                rounding = np.finfo(answer.dtype).eps if answer.dtype.kind == "f" else 0
                close = {"rtol": 1e-11 + rounding, "atol": 1e-12}
                comparison = gyre.compare(mine[name], answer, **close)
                self.assertTrue(comparison.passed, f"{path} {name}\n{comparison}")
            compared += 1
        self.assertGreaterEqual(compared, 5)

    def test_other_log_probabilities_and_all_gradients(self):
        """In plain sums; gradients by a complex step."""
        inputs = small_logprobs()
        found = gyre.reference.logprobs(**inputs)
        found = {name: array for name, array in found.items() if name not in operations.ARRAYS}
        ids, g, heat = inputs["ids"], inputs["d_value"], inputs["temperature"]
        z, teacher = inputs["logits"][:, :7], inputs["teacher"][:, :7]
        kept = gyre.reference.survivors(z, 5, 0.8, heat)
        self.assertGreater(len(set(kept.sum(axis=1))), 1)
        followed = [1, 2, 4]  # rows whose token another one of the sequence follows

        def values(z):
            logs = lambda x: x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # noqa: E731
            at = lambda x, i: np.take_along_axis(x, i, axis=1)  # noqa: E731
            entropy = lambda x: -(np.exp(logs(x)) * logs(x)).sum(axis=1)  # noqa: E731
            logp, targets = logs(z / heat), inputs["targets"][:, None]
            gone = np.log(np.where(kept, np.exp(z / heat), 0).sum(axis=1))
            next_logp, next_left = np.zeros((2, 6), z.dtype)
            following = inputs["targets"][[2, 3, 5]]
            next_logp[followed] = logp[followed, following]
            next_left[followed] = (z / heat)[followed, following] - gone[followed]
            next_left[followed] = np.where(kept[followed, following], next_left[followed], -INF)
            rollout_logp = np.zeros(6, z.dtype)  # a prompt of one token, and three answers
            rollout_logp[1:] = logp[[0, 1, 2, 0, 4], inputs["targets"][1:]]
            logprob, distilled = at(logp, targets)[:, 0], at(logs(z), ids)
            left = at(z / heat, targets)[:, 0] - gone
            top = np.argsort(-z.real, axis=1, kind="stable")[:, :3]
            gaps, gap = logs(z) - logs(teacher), at(logs(z) - logs(teacher), targets)[:, 0]
            gap = np.where((top == targets).any(axis=1), 0, gap)
            divergence = (np.exp(at(logs(z), top)) * at(gaps, top)).sum(axis=1)
            by_advantage = divergence + gap.real * at(logs(z), targets)[:, 0]
            return {"log_softmax": logp, "softmax": np.exp(logp), "logprob": logprob,
                    "entropy": entropy(z / heat), "logprob_entropy": logprob + entropy(z / heat),
                    "gathered": at(logp, ids), "gathered_logits": at(z, ids),
                    "argmax_value": z.max(axis=1), "argmax_id": z.argmax(axis=1),
                    "soft_cross_entropy": -(np.exp(logs(teacher)) * logs(z)).sum(axis=1),
                    "distilled_logprob": distilled, "distilled_entropy": entropy(z),
                    "distilled": distilled.sum(axis=1) + entropy(z),
                    "distilled_teacher_logprob": logs(at(teacher, ids)),
                    "distilled_renormalised_logprob": logs(at(z, ids)),
                    "distilled_renormalised": logs(at(z, ids)),
                    # Its gradient is that of the value, whose real part this is, and of the advantage.
                    "topk_kl": divergence + gap + 1j * (by_advantage - divergence).imag,
                    "topk_kl_advantage": by_advantage,
                    "filtered_logprob": np.where(at(kept, targets)[:, 0], left, -np.inf),
                    "next_token_logprob": next_logp, "rollout_logprob": rollout_logp,
                    "next_token_filtered_logprob": next_left}

        want = {name: value.real for name, value in values(z).items()}
        by_sequence = {}
        for name in ("next_token_logprob", "next_token_filtered_logprob"):
            first, second, third = want[name][followed]
            by_sequence[name] = np.array([[0, 0], [0, 0], [first, second], [third, 0]])
        comparison = gyre.compare({**want, **by_sequence}, found, common=True, **CLOSE)
        self.assertTrue(comparison.passed, comparison)
        self.assertEqual(set(comparison.only_in_a),
                         {n for n in want if f"d_{n}" in found} - set(found))
        gradients = [name for name in found if name.startswith("d_")]
        self.assertEqual(len(gradients), 15)
        for t, v in np.ndindex(*z.shape):
            changed = z.astype(complex)
            changed[t, v] += 1j * STEP
            for name in gradients:
                sums = values(changed)[name[2:]].imag.reshape(6, -1).sum(axis=1)
                slope = (g * sums).sum() / STEP
                if not np.isfinite(want[name[2:]][t]).all():
                    continue  # -inf has no derivative
                np.testing.assert_allclose(found[name][t, v], slope, err_msg=f"{name} {t} {v}",
                                           **CLOSE)

    def test_gradient_through_every_log_probability(self):
        inputs = small_logprobs()
        g = np.random.default_rng(4).normal(0, 1, (6, 7))
        found = gyre.reference.logprobs({"d_log_softmax"}, d_logprobs=g, **inputs)["d_log_softmax"]
        z, heat = inputs["logits"][:, :7], inputs["temperature"]
        for t, v in np.ndindex(*z.shape):
            x = z[t] / heat + 1j * STEP * (np.arange(7) == v) / heat
            slope = (g[t] * (x - np.log(np.exp(x).sum()))).sum().imag / STEP
            np.testing.assert_allclose(found[t, v], slope, **CLOSE)

    def test_gradients_of_ids_and_of_entropies(self):
        """By central differences; each value of a token has its own upstream gradient."""
        rng = np.random.default_rng(7)
        inputs = small_logprobs() | {"d_ids": rng.normal(size=(6, 3)), "d_entropies": rng.normal(size=6),
                                     "hidden": rng.normal(size=(6, 7)), "head": np.eye(7)}
        above = {"logprob": "d_value", "entropy": "d_entropies", "gathered": "d_ids", "gathered_logits": "d_ids",
                 "distilled_logprob": "d_ids", "distilled_entropy": "d_entropies", "linear_logprob": "d_value",
                 "distilled_renormalised_logprob": "d_ids", "linear_entropy": "d_entropies"}
        sums = {"d_entropy": ["entropy"], "d_logprob_entropy": ["logprob", "entropy"], "d_gathered": ["gathered"],
                "d_gathered_logits": ["gathered_logits"], "d_distilled": ["distilled_logprob", "distilled_entropy"],
                "d_distilled_renormalised": ["distilled_renormalised_logprob"],
                "d_hidden": ["linear_logprob", "linear_entropy"]}
        found = gyre.reference.logprobs(list(sums), **inputs)
        for t, v in np.ndindex(6, 7):
            slopes = {name: 0.0 for name in above}
            for step in (1e-5, -1e-5):
                moved = {name: inputs[name].copy() for name in ("logits", "hidden")}
                for array in moved.values():
                    array[t, v] += step
                for name, values in gyre.reference.logprobs(list(above), **(inputs | moved)).items():
                    slopes[name] += np.sign(step) * (values * inputs[above[name]]).sum() / 2e-5
            for name, parts in sums.items():
                np.testing.assert_allclose(found[name][t, v], sum(slopes[part] for part in parts), rtol=1e-5, atol=1e-7,
                                           err_msg=f"{name} {t} {v}")

    def test_gradients_of_single_operations(self):
        """By central differences, on the problem of the golden suite."""
        full = lambda rng, tokens, vocab, picks, **more: {  # noqa: E731
            "logits": rng.standard_normal((tokens, vocab)).astype("f4"), "ids": np.tile(np.arange(picks), (tokens, 1)),
            "teacher": rng.standard_normal((tokens, vocab)), "targets": np.arange(tokens),
            "d_value": rng.standard_normal(tokens)} | more
        self.assertGreaterEqual(len(operations.OPERATIONS), 4)
        for name, operation in operations.OPERATIONS.items():
            inputs = operation.golden.make(np.random.default_rng(1), full)
            inputs["logits"] = inputs["logits"].astype(np.float64)
            value, gradient = operation.arrays
            self.assertEqual(gradient, f"d_{value}")
            found = gyre.reference.logprobs([gradient], **inputs)[gradient]
            for t, v in np.ndindex(*found.shape):
                sums = []
                for step in (1e-5, -1e-5):
                    moved = inputs["logits"].copy()
                    moved[t, v] += step
                    values = gyre.reference.logprobs([value], **(inputs | {"logits": moved}))[value]
                    sums.append((values * inputs["d_value"]).sum())
                slope = (sums[0] - sums[1]) / 2e-5
                np.testing.assert_allclose(found[t, v], slope, rtol=1e-5, atol=1e-7, err_msg=f"{name} {t} {v}")

    def test_full_attention(self):
        inputs = small_attention(mask="full", sinks=np.array([0.5, -1, 0, 2]))

        def loss(q, k, v, sinks):
            total = 0
            for begin, end in ((0, 4), (4, 7)):
                for head in range(4):
                    x = np.exp(q[begin:end, head] @ k[begin:end, head // 2].T / np.sqrt(3))
                    out = (x @ v[begin:end, head // 2] / (x.sum(axis=1) + np.exp(sinks[head]))[
                               :, None])
                    total = total + (out * inputs["d_out"][begin:end, head]).sum()
            return total

        found = gyre.reference.attention(**inputs)
        arrays = [inputs[name].astype(complex) for name in ("q", "k", "v", "sinks")]
        for array, name in zip(arrays, ("d_q", "d_k", "d_v", "d_sinks")):
            for index in np.ndindex(array.shape):
                array[index] += 1j * STEP
                np.testing.assert_allclose(found[name][index], loss(*arrays).imag / STEP, **CLOSE)
                array[index] -= 1j * STEP

    def test_every_answer_of_the_schema_is_there(self):
        page = Path(SOURCE, "inputs/SCHEMA.md").read_text(encoding="utf-8")
        section = page.partition("\n## Log-probabilities\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (`[^|]*) \| \[", section, re.M)
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        self.assertEqual(names, set(ANSWERS))

    def test_names_choose_what_is_computed(self):
        inputs = small_logprobs()
        self.assertEqual(list(gyre.reference.logprobs(["entropy"], **inputs)), ["entropy"])
        with self.assertRaisesRegex(ValueError, "d_hidden needs hidden"):
            gyre.reference.logprobs(["d_hidden"], **inputs)
        alone = {name: inputs[name] for name in ("logits", "targets")}
        with self.assertRaisesRegex(ValueError, "top_ids needs ids"):
            gyre.reference.logprobs(["top_ids"], **alone)
        self.assertNotIn("top_ids", gyre.reference.logprobs(**alone))

    def test_dual_chunk_swap(self):
        index = gyre.reference.dual_chunk_swap([0, 8, 8, 12], 2)
        self.assertEqual(index.tolist(), [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]])
        stream = np.arange(24).reshape(12, 2)
        shards = gyre.reference.shard(stream, index)
        self.assertEqual(shards.shape, (2, 6, 2))
        np.testing.assert_array_equal(gyre.reference.unshard(shards, index), stream)
        real = gyre.reference.local_cu_seqlens([0, 5, 5, 7], [0, 8, 8, 12], index)
        self.assertEqual(real.tolist(), [[0, 2, 2, 3], [0, 3, 3, 4]])
        with self.assertRaisesRegex(ValueError, "segment 1 has 6 slots, no multiple of 2 cp = 4"):
            gyre.reference.dual_chunk_swap([0, 4, 10], 2)

    def test_shards_of_golden_streams(self):
        for name in ("packed_positions_cp2", "packed_bins_cp2"):
            file = gyre.read(Path(SOURCE) / "inputs" / "golden" / f"{name}.h5")
            shards = gyre.reference.shards(file.inputs, 2)
            for array in ("index", "ids", "labels", "positions", "cu_seqlens", "cu_seqlens_padded"):
                wanted = file.reference[f"cp2/dual-chunk-swap/{array}"]
                np.testing.assert_array_equal(shards[array], wanted, f"{name} {array}")


class Names(Scratch):
    """Names that files may have: gyre.schema, and what gyre.read refuses."""

    def changed(self, change):
        """What gyre.read says of a file that `change` has changed: errors, warnings."""
        path = self.place("x.h5")
        gyre.write_attention(path, **small_attention())
        with h5py.File(path, "r+") as file:
            del file.attrs["content_sha256"]
            change(file)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                gyre.read(path)
            except ValueError as error:
                return str(error).removeprefix(f"{path}: "), []
        return "", [str(note.message).removeprefix(f"{path}: ") for note in notes]

    def test_the_tables_are_those_of_the_programs(self):
        text = Path(SOURCE, "src/io/schemas/schema_names.cpp").read_text(encoding="utf-8")
        text = re.sub(r"//.*", "", text)
        tables = text[text.index("tables[] = {") : text.index("constexpr const char* names_of_all")]
        rows = re.findall(r'\{((?:\s*"[^"]*"\s*,?)+)\}', tables)
        strings = [re.findall(r'"([^"]*)"', row) for row in rows]
        found = {name: "".join(table) for name, *table in strings}
        entries = Path(SOURCE, "src/io/schemas/logprobs_inputs.cpp").read_text(encoding="utf-8").split('.name = "')[1:]
        marks = {"required": "", "depends": "~"}
        presence = [re.search(r"\.presence = (\w+)", entry) for entry in entries]
        inputs = [
            re.match(r"\w+", entry)[0] + (marks[said[1]] if said else "?")
            for entry, said in zip(entries, presence, strict=True)
        ]
        head, behind = found["gyre/logprobs"].split("/reference")
        found["gyre/logprobs"] = f"{head}{' '.join(inputs)} /reference{behind}"
        own, numbers = self.of_single_operations()
        self.assertEqual(own, list(operations.INPUTS))
        self.assertEqual(numbers, operations.PARAMETERS)
        parameters = " ".join(f"@{name}?" for name in operations.PARAMETERS)
        found["gyre/logprobs"] += " ".join(["", "/logprobs", *(f"{name}?" for name in own), parameters])
        found["gyre/logprobs-results"] += f" /results {parameters}"
        self.assertEqual(found, schema.TABLES)
        of_all = re.search(r'names_of_all = "([^"]*)"', text)
        self.assertEqual(of_all[1], schema.ALL)
        table = re.search(r'modifier_table =((?:\s*"[^"]*")+);', text)
        words = "".join(re.findall(r'"([^"]*)"', table[1])).split()
        pairs = [word.partition("=") for word in words]
        wanted = {name: int(number) if number else None for name, _, number in pairs}
        self.assertEqual(wanted, schema.MODIFIERS)

    def of_single_operations(self):
        """Inputs and parameters of the programs' entries; and compares their arrays with the package's."""
        inputs, numbers = [], {}
        for name, operation in operations.OPERATIONS.items():
            text = Path(SOURCE, f"src/logprobs/operations/{name}.cpp").read_text(encoding="utf-8")
            results = re.search(r"\.results = \{\{\.name = \"(\w+)\"", text)[1]
            gradient = re.search(r"\.gradient = \"(\w+)\"", text)[1]
            self.assertEqual(list(operation.arrays), [results, gradient])
            inputs += re.findall(r"\.own_inputs = \{\{\.name = \"(\w+)\"", text)
            for found in re.finditer(r"\.parameters = \{\{\.name = \"(\w+)\"(.*?)\}\}", text, re.DOTALL):
                number = r"([-+.\de]+)"
                values = [re.search(rf"\.{key} = {number}", found[2]) for key in ("usual", "least", "most")]
                self.assertNotIn(None, values, f"{name}.cpp: usual, least and most of {found[1]}")
                numbers[found[1]] = tuple(float(value[1]) for value in values)
        return inputs, numbers

    def test_items_of_another_kind_are_refused(self):
        for name in ("mask", "window", "scale"):
            for value in (np.ones(2), h5py.Empty("f8")):
                message, _ = self.changed(lambda f: f["attention"].attrs.__setitem__(name, value))
                self.assertRegex(message, f"^attribute '{name}' of '/attention' is .*one value")

            def as_dataset(file):
                del file["attention"].attrs[name]
                file["attention"][name] = 1

            message, _ = self.changed(as_dataset)
            self.assertRegex(message, f"^'{name}' must be an attribute of '/attention'")
        for name in ("q", "k", "v", "d_out", "offsets"):

            def as_attribute(file):
                del file["attention"][name]
                file["attention"].attrs[name] = 1

            def as_group(file):
                del file["attention"][name]
                file.create_group(f"attention/{name}")

            self.assertRegex(self.changed(as_attribute)[0], f"^'/attention/{name}' must be a data")
            self.assertEqual(self.changed(as_group)[0],
                             f"'/attention/{name}' is no dataset; it must be one")

    def test_other_names_are_warnings_and_modifiers_refused(self):
        def attribute(name, value):
            return lambda file: file["attention"].attrs.__setitem__(name, value)

        refused = "changes what is computed, and nobody reads it; leave it out"
        for name, value in (("softcap", 5.0), ("SoftCap", 1), ("is_causal", True), ("bias", "x")):
            message, _ = self.changed(attribute(name, value))
            self.assertEqual(message, f"attribute '{name}' of '/attention' {refused}")
        for name, value in (("softcap", 0.0), ("alibi", False), ("units", "m")):
            wanted = f"attribute '{name}' of '/attention' is not read by the programs"
            self.assertEqual(self.changed(attribute(name, value)), ("", [wanted]))
        message, _ = self.changed(lambda file: file.__setitem__("attention/alibi_slopes", [1.0]))
        self.assertEqual(message, f"'/attention/alibi_slopes' {refused}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
