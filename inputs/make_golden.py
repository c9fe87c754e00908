#!/usr/bin/env python3
"""Writes inputs/golden/: small problems with answers in float64, one file for each edge, and their
index, INDEX.md to read and index.json for programs.

    golden_logprobs.py    log-probabilities, filters, distillation, gradients: logprobs_*.h5; made
                          with golden_problems.py
    golden_operations.py  single operations on rows, as gyre.operations has them
    golden_attention.py   attention: attention_*.h5
    golden_recurrence.py  recurrent layers: recurrence_*.h5
    golden_packing.py     documents, packed streams, what ranks hold of them: documents_*.h5,
                          packed_*.h5
    golden_batches.py     batches of data loaders: rows_*.h5, audio.h5
    golden_exchanges.py   what ranks hold and exchange of these: row_shards_*.h5, ulysses_*.h5,
                          encoder_*.h5

The files are a function of these programs: running this twice gives the same bytes (on another
processor the last bits of answers may differ).
"""

import argparse
import json
import os

# Before NumPy's import: the number of threads changes the last bits of a matrix product.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import h5py  # noqa: E402

import golden_attention  # noqa: E402
import golden_batches  # noqa: E402, F401  (adds to those of golden_packing)
import golden_exchanges  # noqa: E402, F401  (the same)
import golden_logprobs  # noqa: E402, F401  (adds to those of golden_problems)
import golden_operations  # noqa: E402, F401  (the same)
import golden_packing  # noqa: E402
import golden_problems  # noqa: E402
import golden_recurrence  # noqa: E402
import gyre_files  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "golden")
CASES = (golden_problems.CASES + golden_attention.CASES + golden_recurrence.CASES
         + golden_packing.CASES)

HEADINGS = {
    "logprobs": "Log-probabilities",
    "attention": "Attention",
    "recurrence": "Recurrences",
    "documents": "Documents",
    "packed": "Packed streams, and what ranks hold of them",
    "bshd": "Rows of packed segments",
    "salm": "Text with audio",
    "row-shards": "Shards of rows",
    "ulysses": "Heads exchanged for tokens",
    "encoder": "Encodings of audio",
}

# Arrays that come together, for the index.
FAMILIES = {
    "scores": "log_softmax softmax logprob entropy filtered_logprob argmax_value argmax_id "
    "next_token_logprob next_token_filtered_logprob d_logprob d_entropy d_logprob_entropy "
    "d_filtered_logprob d_next_token_logprob d_next_token_filtered_logprob rollout_logprob "
    "d_rollout_logprob",
    "ids": "gathered gathered_logits top_values top_ids d_gathered d_gathered_logits",
    "kept ids": "kept_logprob d_kept_logprob",
    "projection": "projected_probability d_projected_probability",
    "soft targets": "soft_cross_entropy d_soft_cross_entropy",
    "distillation": "distilled_logprob distilled_teacher_logprob distilled_entropy "
    "distilled_renormalised_logprob distilled_renormalised_teacher_logprob d_distilled "
    "d_distilled_renormalised",
    "fused linear": "linear_logprob linear_entropy d_hidden d_head",
    "attention": "out lse d_q d_k d_k_shared d_v",
    "recurrence": "out d_q d_k d_v d_g",
    "shards": "bin_offsets cu_seqlens cu_seqlens_padded ids index labels positions slot_offsets",
    "stream": "bin_offsets cu_seqlens cu_seqlens_padded document labels positions",
}

INTRODUCTION = """\
# Golden suite

{count} small problems with answers in float64, {size} in all, one file for each edge that kernels,
partitions and data loaders get wrong. An independent NumPy implementation computed the answers; the
formats are those of [SCHEMA.md](../SCHEMA.md). [index.json](index.json) is this index for programs.
Made by [make_golden.py](../make_golden.py), as is this page.

Your code against the suite, without Gyre's programs; h5py and NumPy are all it needs:

    python3 inputs/golden/check.py inputs/golden/example.py     # your module in its place

[check.py](check.py) says what your module must have; [example.py](example.py) has it all in plain
float32 NumPy. Exit code 1 says that something differs, and the lines before it, where.

Gyre's programs against the suite, from the root of the repository, with the programs on `PATH`: the
commands below; of streams, for one of their folders (index.json has them for all). `-n 1` is one
timed iteration; more ranks do as well (`mpirun -n 4`).

A name in italics stands for the arrays of a family: the last table says which. Folders below
/reference are named where there are several; a number behind a layout is its stripe or chunk.

Logits, queries, keys and values are exact in bfloat16 and float16, too, unless the file is for what
is not (offsets, large numbers, float16, float64). Answers are those of the numbers as they are
stored; a run whose type rounds these is compared with its program's own double precision instead.
"""


def answers_of(path):
    """Paths of the answers in a file: the datasets below /reference, and of packed streams and of
    what ranks hold and exchange all."""
    found, groups = [], ("packed/", "reference/", "row_shards/", "ulysses/", "encoder/")

    def add(name, item):
        if isinstance(item, h5py.Dataset) and name.startswith(groups):
            found.append(name)

    with h5py.File(path, "r") as file:
        file.visititems(add)
    return sorted(found)


def entry(case, folder):
    """What index.json says of a case."""
    path = os.path.join(folder, case.file)
    return {
        "file": case.file,
        "kind": case.kind,
        "edge": case.edge,
        "guards": case.guards,
        "tags": list(case.tags),
        "answers": answers_of(path),
        "run": list(case.run),
        "more": list(case.more),
        "bytes": os.path.getsize(path),
        "sha256": gyre_files.sha256_of(path),
    }


def families_of(names):
    """The names of arrays, those of a whole family by the family's name."""
    left, words = set(names), []
    for family, members in FAMILIES.items():
        if left >= set(members.split()):
            left -= set(members.split())
            words.append(f"*{family}*")
    return ", ".join(words + [f"`{name}`" for name in names if name in left])


def shortened(answers):
    """The answers of a file in a few words: folders with the same ones together."""
    folders = {}
    for path in answers:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    together = {}
    for folder, names in folders.items():
        together.setdefault(tuple(names), []).append(folder)
    parts = []
    for names, places in together.items():
        where = ", ".join(f"`{place.removeprefix('reference/')}`" for place in places)
        alone = places == ["reference"]
        parts.append(families_of(names) + ("" if alone else f": {where}"))
    return "; ".join(parts) or "none"


def page(entries):
    """INDEX.md: a table for each kind."""
    size = sum(e["bytes"] for e in entries) / 2**20
    text = INTRODUCTION.format(count=len(entries), size=f"{size:.1f} MiB")
    for kind, heading in HEADINGS.items():
        text += f"\n## {heading}\n\n| file | what it is for | what it guards against | answers |"
        text += " run |\n|---|---|---|---|---|\n"
        for e in entries:
            if e["kind"] == kind:
                run = "<br>".join(f"`{command}`" for command in e["run"])
                cells = [f"`{e['file']}`", e["edge"], e["guards"], shortened(e["answers"]), run]
                text += "| " + " | ".join(cells) + " |\n"
    text += "\n## Families of arrays\n\n| family | arrays |\n|---|---|\n"
    for family, members in FAMILIES.items():
        text += f"| *{family}* | {', '.join(f'`{name}`' for name in members.split())} |\n"
    return text


def replace(path, text):
    """Writes a text that takes the place of a file at once."""
    temporary = f"{path}.tmp{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def make(folder, missing_alone=False):
    """Writes all cases, or those without a file alone, and the index."""
    os.makedirs(folder, exist_ok=True)
    for case in CASES:
        path = os.path.join(folder, case.file)
        if not (missing_alone and os.path.exists(path)):
            case.write(path)
    entries = [entry(case, folder) for case in CASES]
    index = {"schema": "gyre/golden-index", "schema_version": 1, "cases": entries}
    replace(os.path.join(folder, "index.json"), json.dumps(index, indent=1) + "\n")
    replace(os.path.join(folder, "INDEX.md"), page(entries))


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the golden suite, inputs/golden/.")
    parser.add_argument("--folder", default=FOLDER, help="where to; default: %(default)s")
    parser.add_argument("--missing", action="store_true",
                        help="write the cases that have no file yet, and the index")
    options = parser.parse_args()
    make(options.folder, options.missing)


if __name__ == "__main__":
    main()
