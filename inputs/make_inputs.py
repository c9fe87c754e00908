#!/usr/bin/env python3
"""Writes the small input files that Gyre's tests read, and inputs/MANIFEST.

    model_tiny.h5   a model with seeded random weights: 2 layers, 48 wide, fast enough for any test
    docs_tiny.h5    17 short documents, with every edge case of lengths and tokens that could be
                    thought of, and the reference of model_tiny.h5 including residual streams
    model_hybrid.h5, docs_hybrid.h5
                    the same with recurrent layers; residual streams are float32
    docs_small.h5   8 documents of English text, and the reference of the trained model.h5
                    including residual streams (float32)
    bshd_tiny.h5    4 rows of packed segments, as a data loader makes them for cp = 2
    bshd_left.h5    3 rows of embeddings, padded on the left, with positions of 2 axes
    salm_tiny.h5    2 rows of text with places for three pieces of audio
    MANIFEST        per file of inputs/: SHA-256, size in bytes, command that makes it, what it is

The trained model.h5 comes from train_model.py and is only read here. All outputs are a function of
this directory's contents: running this program twice gives the same bytes (on another processor
the last bits of the reference values may differ).
"""

import argparse
import os

# The number of threads changes the last bits of a matrix product; must come before NumPy's import.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

import gyre_files  # noqa: E402
import reference  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
TINY_SEED = 20240229

TINY_CONFIG = {
    "vocab_size": gyre_files.VOCAB_SIZE,
    "vocab_padded": gyre_files.VOCAB_PADDED,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}

# Layers as in Qwen3-Next, of which three of four are recurrent; heads of values share those of keys.
HYBRID_CONFIG = {
    **TINY_CONFIG,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-3,  # the norm of a head's output amplifies errors where its terms cancel
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

LICENCE = "Text written for this project, BSD-3-Clause as the rest of it."

# File -> (command, description), the order of MANIFEST.
CONTENTS = {
    "model.h5": (
        "inputs/train_model.py",
        "trained byte-level model, 4 layers, 192 wide",
    ),
    "model_tiny.h5": (
        "inputs/make_inputs.py tiny",
        "random-weight model, 2 layers, 48 wide",
    ),
    "docs_tiny.h5": (
        "inputs/make_inputs.py tiny",
        "edge-case documents with the float64 reference of model_tiny.h5",
    ),
    "model_hybrid.h5": (
        "inputs/make_inputs.py hybrid",
        "random-weight model, 3 recurrent layers and 1 of softmax attention, 48 wide",
    ),
    "docs_hybrid.h5": (
        "inputs/make_inputs.py hybrid",
        "edge-case documents with the float64 reference of model_hybrid.h5",
    ),
    "docs_small.h5": (
        "inputs/make_inputs.py small",
        "English documents with the float64 reference of model.h5",
    ),
    "bshd_tiny.h5": (
        "inputs/make_inputs.py batches",
        "rows of packed segments, padded for cp = 2",
    ),
    "bshd_left.h5": (
        "inputs/make_inputs.py batches",
        "rows of embeddings, padded on the left, with positions of 2 axes",
    ),
    "salm_tiny.h5": (
        "inputs/make_inputs.py batches",
        "rows of text with places for audio, and the audio",
    ),
    "attention_causal.h5": (
        "inputs/make_attention.py",
        "causal attention of documents of 0 to 33 tokens with float64 answers",
    ),
    "attention_window.h5": (
        "inputs/make_attention.py",
        "causal attention with a window and sinks, with float64 answers",
    ),
    "attention_regions.h5": (
        "inputs/make_attention.py",
        "documents whose masks are regions, with sinks and float64 answers",
    ),
    "logprobs_golden.h5": (
        "inputs/make_logprobs.py",
        "logits in round numbers without ties, with float64 answers",
    ),
    "logprobs_ties.h5": (
        "inputs/make_logprobs.py",
        "logits with ties, -inf, padding and a temperature, with float64 answers",
    ),
    "logprobs_linear.h5": (
        "inputs/make_logprobs.py",
        "hidden states, the weight of a head and their logits, with float64 answers",
    ),
}

# Text for docs_small.h5; (name, text).
SMALL_TEXTS = [
    (
        "rings",
        "A ring of processes passes blocks of keys and values from neighbour to neighbour. Each\n"
        "process keeps its own queries, attends to the block that it holds, and adds the result\n"
        "to what it has so far. After as many steps as there are processes, every query has seen\n"
        "every key that it may see. With a causal mask about half of that work is masked out,\n"
        "and the schedule decides who idles.\n",
    ),
    ("yes", "y"),
    ("blank", ""),
    ("usage", "Usage: ls [OPTION]... [FILE]...\n"),
    ("header", "#include <stdio.h>\n\nint main(void)\n{\n    return 0;\n}\n"),
    ("prose", "The permission is granted to use, copy and modify this software.\n"),
    ("names", "Zürich, Kraków, 東京: naïve café €5\n"),
    (
        "manual",
        ".SH DESCRIPTION\nThe\n.B sort\nprogram writes the lines of all files in order to the\n"
        "standard output.\n",
    ),
]


def random_weights(config, seed):
    """Random weights scaled so that every layer matters and no prediction is near certain."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in gyre_files.model_shapes(config).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm"):
            weights[name] = 1.0 + 0.25 * values
        elif name == "embed" or name.endswith(("a_log", "dt_bias")):
            weights[name] = values
        else:
            gain = 2.0 if name.endswith(("wq", "wk", "head")) else 1.2
            weights[name] = gain * values / np.sqrt(shape[0])
    gyre_files.fill_padding(weights, config, seed + 1)
    return weights


def tiny_documents():
    """The documents of docs_tiny.h5: (name, tokens)."""
    text = gyre_files.encode
    bos, eos, pad = gyre_files.BOS, gyre_files.EOS, gyre_files.PAD
    return [
        ("length-3", text(b"A")),
        ("empty", []),
        ("length-1", [bos]),
        ("length-2", text(b"")),
        ("length-5", text(b"yes")),
        ("length-7", text(b"Gyre.")),
        ("length-15", text(b"to be, or not")),
        ("length-16", text(b"a power of two")),
        ("length-17", text(b"I am seventeen.")),
        (
            "length-120",
            text(
                b"Under a causal mask the last rows of a long document cost the most, "
                b"so an even split of the rows splits the work badly"
            ),
        ),
        ("same-byte", text(b"a" * 31)),
        ("bytes-0-and-255", text(b"\x00\xff\x00\x00\xff\xff\x00\xff\x01\xfe")),
        ("not-ascii", text("Größe: 3 µm; Łódź → 東京 🙂\n".encode("utf-8"))),
        ("header", text(b"#ifndef GYRE_H\n#define GYRE_H\n\n#include <mpi.h>\n\n#endif\n")),
        ("no-bos-no-eos", list(b"in the middle")),
        ("specials-anywhere", [pad, eos, bos, ord("x"), pad, pad, bos, ord("y"), eos, eos]),
        ("empty-at-the-end", []),
    ]


def make_random(name, config, seed, hidden):
    """model_NAME.h5 with random weights, and docs_NAME.h5."""
    model = os.path.join(HERE, f"model_{name}.h5")
    documents = os.path.join(HERE, f"docs_{name}.h5")
    provenance = {"generator": "inputs/make_inputs.py", "command": f"inputs/make_inputs.py {name}"}
    gyre_files.write_model(
        model,
        config,
        random_weights(config, seed),
        {
            **provenance,
            "sources": "none: random weights from NumPy's default_rng",
            "seed": seed,
            "licence": "Random numbers.",
        },
    )
    gyre_files.write_documents(
        documents,
        tiny_documents(),
        {**provenance, "sources": "inputs/make_inputs.py", "licence": LICENCE},
    )
    reference.add_reference(model, documents, hidden)


def make_tiny():
    """model_tiny.h5 and docs_tiny.h5."""
    make_random("tiny", TINY_CONFIG, TINY_SEED, "float64")


def make_hybrid():
    """model_hybrid.h5 and docs_hybrid.h5."""
    make_random("hybrid", HYBRID_CONFIG, TINY_SEED + 5, "float32")


def make_small():
    """docs_small.h5; needs the trained model.h5."""
    model = os.path.join(HERE, "model.h5")
    documents = os.path.join(HERE, "docs_small.h5")
    gyre_files.write_documents(
        documents,
        [(name, gyre_files.encode(text.encode("utf-8"))) for name, text in SMALL_TEXTS],
        {
            "generator": "inputs/make_inputs.py",
            "command": "inputs/make_inputs.py small",
            "sources": "inputs/make_inputs.py",
            "licence": LICENCE,
        },
    )
    reference.add_reference(model, documents, "float32")


def bshd_arrays():
    """Rows of 16 slots in segments of multiples of 4, with every kind of padding.

    The padding id is also the id that ends documents, so that ids do not tell what is padding.
    """
    rng = np.random.default_rng(TINY_SEED + 2)
    real = [[3, 8], [8, 5], [1, 0, 5], [7, 3]]
    slots = [[4, 12], [8, 8], [4, 4, 8], [8, 8]]
    rows, width, most, none = len(real), 16, 3, -1000
    arrays = {
        "input_ids": np.full((rows, width), gyre_files.EOS),
        "labels": np.full((rows, width), -100),
        "position_ids": np.zeros((rows, width), np.int64),
        "seq_lens": np.full((rows, most), none),
        "seq_lens_padded": np.full((rows, most), none),
    }
    for row in range(rows):
        begin = 0
        for i, (n, room) in enumerate(zip(real[row], slots[row])):
            tokens = rng.integers(0, 256, n)
            tokens[-1:] = gyre_files.EOS
            arrays["input_ids"][row, begin : begin + n] = tokens
            arrays["labels"][row, begin : begin + max(0, n - 1)] = tokens[1:]
            arrays["position_ids"][row, begin : begin + room] = np.arange(room)
            arrays["seq_lens"][row, i], arrays["seq_lens_padded"][row, i] = n, room
            begin += room
    return arrays


def left_padded_arrays():
    """Rows of 10 slots with one document each, padding in front: a segment without tokens."""
    rng = np.random.default_rng(TINY_SEED + 4)
    width, hidden, none = 10, 2, -1000
    lengths = [10, 7, 4]
    arrays = {
        "inputs_embeds": np.zeros((len(lengths), width, hidden), np.float32),
        "labels": np.full((len(lengths), width), -100),
        "position_ids": np.zeros((2, len(lengths), width), np.int64),
        "seq_lens": np.full((len(lengths), 2), none),
        "seq_lens_padded": np.full((len(lengths), 2), none),
    }
    for row, n in enumerate(lengths):
        pad = width - n
        segments = [(n, n)] if pad == 0 else [(0, pad), (n, n)]
        arrays["inputs_embeds"][row, pad:] = rng.integers(-8, 9, (n, hidden))
        arrays["labels"][row, pad : width - 1] = rng.integers(0, 256, n - 1)
        arrays["position_ids"][0, row, pad:] = np.arange(n)
        arrays["position_ids"][1, row, pad:] = np.arange(n) // 3
        for i, (real, slots) in enumerate(segments):
            arrays["seq_lens"][row, i], arrays["seq_lens_padded"][row, i] = real, slots
    return arrays


def make_batches():
    """bshd_tiny.h5, bshd_left.h5 and salm_tiny.h5."""
    provenance = {
        "generator": "inputs/make_inputs.py",
        "command": "inputs/make_inputs.py batches",
        "sources": "none: random numbers from NumPy's default_rng",
        "licence": "Random numbers.",
    }
    gyre_files.write_bshd(
        os.path.join(HERE, "bshd_tiny.h5"), bshd_arrays(), gyre_files.VOCAB_SIZE, provenance
    )
    gyre_files.write_bshd(
        os.path.join(HERE, "bshd_left.h5"), left_padded_arrays(), gyre_files.VOCAB_SIZE, provenance
    )
    rng = np.random.default_rng(TINY_SEED + 3)
    hidden, window, pad, place = 6, 5, 0, 99
    ids = np.array([[7, place, 1, 2, place, 1], [pad, pad, 3, place, 4, 5]])
    targets = np.full(ids.shape, -100)
    targets[0, -1], targets[1, -2:] = ids[0, -1], ids[1, -2:]
    # Small whole numbers: sums of their products are exact in any order.
    small = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)  # noqa: E731
    gyre_files.write_salm(
        os.path.join(HERE, "salm_tiny.h5"),
        {
            "input_ids": ids,
            "target_ids": targets,
            "inputs_embeds": small(*ids.shape, hidden),
            "encoder": small(window, hidden),
        },
        # 4, 3 and 2 frames; samples of a last frame that is not full are left out
        [small(4 * window), small(3 * window + 2), small(2 * window + 4)],
        {"vocab_size": 100, "pad_id": pad, "placeholder_id": place},
        provenance,
    )


def make_manifest():
    """MANIFEST: a line of four tab-separated fields for every file that is there."""
    lines = ["# sha256\tbytes\tcommand\twhat it is\n"]
    for name, (command, what) in CONTENTS.items():
        path = os.path.join(HERE, name)
        if os.path.exists(path):
            digest, size = gyre_files.sha256_of(path), os.path.getsize(path)
            lines.append(f"{digest}\t{size}\t{command}\t{name}: {what}\n")
    target = os.path.join(HERE, "MANIFEST")
    temporary = f"{target}.tmp{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(temporary, target)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Write the small test inputs, with their references, and inputs/MANIFEST."
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        default=["tiny", "hybrid", "small", "batches"],
        help="tiny, hybrid, small (needs inputs/model.h5), batches, or manifest (nothing else); "
        "default: tiny hybrid small batches",
    )
    args = parser.parse_args()
    makers = {
        "tiny": make_tiny,
        "hybrid": make_hybrid,
        "small": make_small,
        "batches": make_batches,
        "manifest": lambda: None,
    }
    for what in args.what:
        if what not in makers:
            parser.error(f"{what!r} is none of {', '.join(makers)}")
    for what in args.what:
        makers[what]()
    make_manifest()


if __name__ == "__main__":
    main()
