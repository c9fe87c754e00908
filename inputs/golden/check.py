#!/usr/bin/env python3
"""Checks code against the golden suite: check.py MODULE; needs h5py and NumPy alone.

MODULE is a Python file (or the name of a module) with

    FUNCTIONS = {"KIND/ARRAY": function, ...}

for what it has; what it has not is left out and counted. A function takes a problem, a dict, and
returns the array, which is compared in full: its shape, and every element,

    |found - wanted| <= atol scale + rtol |wanted|      infinities alike; NaN agrees with nothing

where scale is 1, but for gradients (d_...) the largest |wanted| of the array, if that is above 1.
Integers must be equal. Kinds, arrays, and what is in a problem besides what ../SCHEMA.md names:

    logprobs/logprob, entropy, d_logprob, ...     the tables of Log-probabilities. There is what
                                                  the file has, and the defaults of temperature,
                                                  top_k, top_p, offsets, d_value
    attention/out, lse, d_q, d_k, d_v, d_sinks    the table of Attention; there are mask, window,
                                                  scale, offsets, q, k, v, d_out, perhaps sinks,
                                                  regions or selected_keys where these are the mask
    packed/ids, labels, positions, cu_seqlens,    one bin: there are documents, a list of the tokens
      cu_seqlens_padded                           of each, and slot_multiple
    shards/index, ids, labels, positions,         what one rank holds of one bin: there are layout,
      cu_seqlens, cu_seqlens_padded               cp, rank, stripe or chunk, and the bin as above
    shards/extra                                  the same of an array that goes along: also extra,
                                                  of the bin's slots if aligned is slots,
                                                  and padding, what the layout's slots get
    bshd/ids, labels, positions, cu_seqlens,      the streams of a batch of rows: there are the
      cu_seqlens_padded, padding_mask             arrays of Rows, and tail: keep, own-segment or
                                                  absorb; slot_multiple; chunks, if not 1: streams,
                                                  whose boundaries come one behind the other
    bshd/extra                                    the same of an array that goes along: extra, and
                                                  aligned: slots, rows or none; padding
    salm/embeddings, labels, positions,           the stream of a batch of text with audio: there
      cu_seqlens, cu_seqlens_padded               are the arrays of Text with audio, and cp

Reals of 8 bytes stay so; narrower ones arrive as float32, which holds them exactly; integers are
int64. Of each array that differs the first wrong element is printed, and of each file what it
guards against; ten arrays are, or with --all all of them. Exit code: 0 all that was compared agrees, 1 something differs, 2 nothing could be compared:
no function, no file, a damaged one.
"""

import argparse
import fnmatch
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import textwrap
import traceback

import h5py
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def read(dataset):
    """A dataset as float64, float32 or int64; bfloat16 is a type of HDF5, or words that say so."""
    if dataset.id.get_type().get_class() != h5py.h5t.FLOAT:
        if dataset.attrs.get("dtype") in ("bfloat16", b"bfloat16"):
            return (dataset[...].astype(np.uint32) << 16).view(np.float32)
        return dataset[...].astype(np.int64)
    wide = dataset.id.get_type().get_size() == 8
    array = np.zeros(dataset.shape, np.float64 if wide else np.float32)
    if array.size:
        native = h5py.h5t.NATIVE_DOUBLE if wide else h5py.h5t.NATIVE_FLOAT
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, array, native)  # HDF5 converts it
    return array


def contents(group):
    """Attributes and datasets of a group."""
    found = dict(group.attrs)
    found.update({k: read(x) for k, x in group.items() if isinstance(x, h5py.Dataset)})
    return found


def extras(group):
    """Name, array, alignment of each array that goes along, and what is in its padding."""
    for name, dataset in group.get("extras", {}).items():
        yield name, read(dataset), dataset.attrs["aligned"], dataset.attrs.get("padding", 0)


def defaults(problem):
    """What a problem of log-probabilities that leaves something out means."""
    tokens = len(problem["targets"])
    return {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "offsets": np.array([0, tokens]),
        "d_value": np.ones(tokens, np.float32),
    } | problem


def bins(packed):
    """(name, contents) of each bin of packed streams, and its documents."""
    first = 0
    for b in range(len(packed["bin_offsets"]) - 1):
        begin, end = packed["bin_offsets"][b : b + 2]
        bounds = slice(begin + b, end + b + 1)
        part = {name: packed[name][bounds] for name in ("cu_seqlens", "cu_seqlens_padded")}
        slots = slice(first, first + part["cu_seqlens_padded"][-1])
        part.update({name: packed[name][..., slots] for name in ("ids", "labels", "positions")})
        tokens = [part["ids"][begin : begin + n] for begin, n in
                  zip(part["cu_seqlens_padded"], np.diff(part["cu_seqlens"]))]
        first = slots.stop
        yield f"bin {b}", part, tokens


def shards(packed, group, beside):
    """(kind, place, problem, answers) of each rank and bin of one layout, and of its extras;
    `beside` are those of the streams."""
    held, along = contents(group), list(extras(group))
    asked = {k: held.pop(k) for k in ("layout", "cp", "stripe", "chunk") if k in held}
    bounds, local = held.pop("bin_offsets"), held.pop("slot_offsets")
    first = 0
    for b, (name, part, _) in enumerate(bins(packed)):
        places = {"cu_seqlens": slice(bounds[b] + b, bounds[b + 1] + b + 1)}
        places["cu_seqlens_padded"] = places["cu_seqlens"]
        mine, last = slice(*local[b : b + 2]), first + part["cu_seqlens_padded"][-1]
        for rank in range(asked["cp"]):
            wanted = {k: array[rank][..., places.get(k, mine)] for k, array in held.items()}
            where = f"{group.name} rank {rank} {name}"
            problem = {**asked, "rank": rank, **part}
            yield "shards", where, problem, wanted
            for extra, array, aligned, padding in along:
                whole = beside[extra][first:last] if aligned == "slots" else beside[extra]
                answer = array[rank, mine] if aligned == "slots" else array
                more = {"extra": whole, "aligned": aligned, "padding": padding}
                yield "shards", f"{where} {extra}", {**problem, **more}, {"extra": answer}
        first = last


def problems(file, kind):
    """(kind, place, problem, answers) of everything that a file asks."""
    if kind in ("logprobs", "attention"):
        problem = contents(file[kind])
        answers = {k: read(dataset) for k, dataset in file["reference"].items()}
        yield kind, "", defaults(problem) if kind == "logprobs" else problem, answers
    elif kind == "packed":
        packed = contents(file["packed"])
        beside = {name: array for name, array, *_ in extras(file["packed"])}
        for name, part, tokens in bins(packed):
            problem = {"documents": tokens, "slot_multiple": packed["slot_multiple"]}
            yield kind, name, problem, {k: x for k, x in part.items() if x.ndim == 1}
        for ranks in file["reference"].values():
            for group in ranks.values():
                yield from shards(packed, group, beside)
    elif kind in ("bshd", "salm"):
        for name, group in file["reference"].items():
            left_out = {"bin_offsets", "document"}
            answers = {k: x for k, x in contents(group).items()
                       if k not in left_out and k not in group.attrs}
            yield kind, name, contents(file[kind]) | dict(group.attrs), answers
            wanted = {extra: array for extra, array, *_ in extras(group)}
            for extra, array, aligned, padding in extras(file[kind]):
                problem = {"extra": array, "aligned": aligned, "padding": padding}
                yield kind, f"{name} {extra}", problem, {"extra": wanted[extra]}


def place_text(index, shape, problem):
    """[2, 5] (document 0, position 2), where rows are the tokens of documents."""
    offsets = problem.get("offsets", [])
    if not len(offsets) or shape[0] != offsets[-1]:
        return f"{list(index)}"
    document = int(np.searchsorted(offsets, index[0], side="right")) - 1
    return f"{list(index)} (document {document}, position {index[0] - offsets[document]})"


def difference(found, wanted, gradient, rtol, atol, problem=None):
    """How an array differs, or an empty text. `problem`: has the offsets of its documents, if any."""
    found = np.asarray(found)
    if found.shape != wanted.shape:
        return f"has the shape {list(found.shape)}, should have {list(wanted.shape)}"
    if not wanted.size:
        return ""
    if wanted.dtype.kind == "i":
        if found.dtype.kind not in "biu":
            return f"is {found.dtype}, should be whole numbers"
        wrong = found != wanted
    else:
        size = np.abs(wanted)
        finite = size[np.isfinite(size)]
        scale = max([1.0, *finite]) if gradient else 1.0
        with np.errstate(invalid="ignore"):
            near = np.abs(found.astype(np.float64) - wanted) <= atol * scale + rtol * size
        wrong = ~np.where(np.isfinite(wanted), near, found == wanted)
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    values = f"yours is {found[place]:.9g}, should be {wanted[place]:.9g}"
    place = place_text(place, wanted.shape, problem or {})
    return f"{place}: {values}; {wrong.sum()} of {wanted.size} are wrong"


def any_of_ties(found, wanted, problem):
    """The ids wanted, [T, K] or [T], where those found are different ids with the same logits; else
    those found."""
    found, columns = np.asarray(found), int(problem["vocab_size"])
    if found.shape != wanted.shape or not found.size or found.min() < 0 or found.max() >= columns:
        return found
    if wanted.ndim == 1:
        return any_of_ties(found[:, None], wanted[:, None], problem)[:, 0]
    logits = [np.take_along_axis(problem["logits"], ids.astype(int), 1) for ids in (found, wanted)]
    distinct = [len(set(row)) == len(row) for row in found.tolist()]
    equal = (logits[0] == logits[1]).all(axis=1) & np.array(distinct)
    return np.where(equal[:, None], wanted, found)


class Printer:
    """Prints what differs: `most` arrays, and counts the rest."""

    def __init__(self, most):
        self.most, self.said, self.case = most, 0, None

    def add(self, case, text):
        self.said += 1
        if self.said > self.most:
            return
        if case is not self.case:
            head = f"{case['file']} guards against {case['guards']}"
            print(textwrap.fill(head, 100, subsequent_indent="    ", break_on_hyphens=False))
        self.case = case
        print(f"  {text}")

    def finish(self):
        if self.said > self.most:
            print(f"... and {self.said - self.most} arrays more; --all shows them")


def check_case(case, functions, args, counts, printer):
    """Compares everything that one file asks; prints what differs."""
    with h5py.File(os.path.join(HERE, case["file"]), "r") as file:
        for key, place, problem, answers in problems(file, case["kind"]):
            for array, wanted in answers.items():
                function = functions.get(f"{key}/{array}")
                if function is None:
                    counts["left out"] += 1
                    continue
                try:
                    found = function(dict(problem))
                    if args.ties == "any" and array in ("top_ids", "argmax_id"):
                        found = any_of_ties(found, wanted, problem)
                    gradient = array.startswith("d_")
                    said = difference(found, wanted, gradient, args.rtol, args.atol, problem)
                except Exception as error:  # the code under test may do anything
                    said = f"raised {type(error).__name__}: {error}"
                    if args.trace:
                        traceback.print_exc()
                counts["wrong" if said else "right"] += 1
                if said:
                    printer.add(case, f"{place}{' ' if place else ''}{key}/{array} {said}")


def load(module):
    """FUNCTIONS of a module; raises ImportError, whatever is wrong with it."""
    try:
        if not module.endswith(".py"):
            return importlib.import_module(module).FUNCTIONS
        spec = importlib.util.spec_from_file_location("checked", module)
        found = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
        spec.loader.exec_module(found)
        return found.FUNCTIONS
    except Exception as error:  # a module may do anything
        raise ImportError(f"{module}: {type(error).__name__}: {error}") from error


def chosen(args):
    """Entries of the index, of the files to check, which have its checksums."""
    with open(os.path.join(HERE, "index.json"), encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    for case in cases:
        name = case["file"].removesuffix(".h5")
        if not fnmatch.fnmatch(name, args.case.removesuffix(".h5")):
            continue
        if args.tag and args.tag not in case["tags"] or args.without in case["tags"]:
            continue
        path = os.path.join(HERE, case["file"])
        with open(path, "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() != case["sha256"]:
                raise OSError(f"{path} is not the file of index.json")
        yield case


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description="Check code against the golden suite.")
    parser.add_argument("module", help="file or name of a Python module with FUNCTIONS")
    parser.add_argument("--case", default="*", help="files to check, e.g. 'attention_*'")
    parser.add_argument("--tag", help="check files with this tag alone (index.json)")
    parser.add_argument("--without", metavar="TAG", help="leave files with this tag out")
    parser.add_argument("--ties", choices=("exact", "any"), default="exact",
                        help="any: top_ids and argmax_id may name any of equal logits; "
                        "default: %(default)s")
    parser.add_argument("--rtol", type=float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--atol", type=float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="print all arrays that differ, not ten")
    parser.add_argument("--trace", action="store_true", help="show where functions raised")
    args = parser.parse_args()
    counts = {"right": 0, "wrong": 0, "left out": 0}
    printer = Printer(sys.maxsize if args.all else 10)
    try:
        functions = load(args.module)
        for case in chosen(args):
            check_case(case, functions, args, counts, printer)
    except (OSError, ImportError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    printer.finish()
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["wrong"] else 0 if counts["right"] else 2


if __name__ == "__main__":
    sys.exit(main())
