"""Valid HDF5 files with one to three changes of their structure, made with h5py.

The digest of their contents is renewed: it is the schema that is to refuse them.
"""

import pathlib
import re
import shutil
import sys

import h5py
import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "inputs"))
import gyre_files  # noqa: E402

# Datasets without which a file of a kind is nothing, by reader. A wrong type, rank or extent of them must be refused.
REQUIRED = {
    "documents": r"/documents/(tokens|offsets)",
    "reference": r"/documents/(tokens|offsets)",
    "model": r"/model/.+",
    "packed": r"/packed/(bin_offsets|document|cu_seqlens|cu_seqlens_padded|ids|embeddings|labels|positions)",
    "bshd": r"/bshd/(labels|seq_lens|seq_lens_padded|input_ids|inputs_embeds)",
    "salm": r"/salm/(input_ids|target_ids|inputs_embeds|audio|audio_offsets|encoder)",
    "attention": r"/attention/(q|k|v|d_out|offsets)",
    "recurrence": r"/recurrence/(q|k|v|g|d_out|offsets)",
    "logprobs": r"/logprobs/(logits|targets)",
    "results": r"/results/(logprob|entropy|offsets)|/packed/(bin_offsets|document|cu_seqlens|cu_seqlens_padded)",
}
# Of these, what a file may do without.
OPTIONAL = r"/bshd/seq_lens_padded"
# Readers that check that reals are numbers.
FINITE = ("reference", "model", "packed", "bshd", "salm", "attention", "recurrence", "logprobs")
# Extents that a file of the kind may choose.
FREE = r"/salm/encoder|/bshd/inputs_embeds|/bshd/position_ids"
# Attributes that a file may have; what others write that changes the mathematics.
UNREAD = {"attention": ((), ("softcap", "alibi_slopes")),
          "logprobs": (("top_k", "top_p", "min_p", "temperature"), ("typical_p", "final_logit_softcapping"))}
EXTREMES = (0, 1, -1, 2, 7, 127, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -2**63)


def items_of(file):
    datasets, groups = [], ["/"]

    def visit(name, item):
        (datasets if isinstance(item, h5py.Dataset) else groups).append("/" + name)

    file.visititems(visit)
    return [d for d in datasets if not d.startswith("/provenance")], [g for g in groups if g != "/provenance"]


def replace(file, path, values, **how):
    """The dataset anew, with its attributes; contiguous unless told otherwise."""
    attributes = dict(file[path].attrs) if isinstance(file.get(path), h5py.Dataset) else {}
    del file[path]
    file.create_dataset(path, data=values, **how)
    file[path].attrs.update(attributes)


def copy_with_checksums(seed, path):
    """The inputs of a file, kept in chunks with checksums, as programs write them."""
    shutil.copy(seed, path)
    with h5py.File(path, "r+") as file:
        file.pop("reference", None)
        for name in items_of(file)[0]:
            values = file[name][()]
            replace(file, name, values, chunks=values.shape, fletcher32=True)
    gyre_files.record_content(path)


def retype(file, path, rng):
    old = file[path]
    types = ["i1", "i2", "i4", "i8", "u4", "u8", "f2", "f4", "f8", "S5", [("a", "i4"), ("b", "f8")], "bool"]
    types = [t for t in types if isinstance(t, list) or numpy.dtype(t) != old.dtype]
    kind = rng.choice(types)
    replace(file, path, numpy.zeros(old.shape, kind))
    # Some readers take reals, or integers, of any width.
    alike = any({old.dtype.kind, file[path].dtype.kind} <= set(kinds) for kinds in ("f", "iu"))
    return f"{path} is of type {kind}", not alike


def reshape(file, path, rng):
    values = file[path][()]
    shape = rng.choice([(values.size,) if values.ndim != 1 else (values.size, 1), (1, *values.shape), (), (0,) * values.ndim])
    if shape == values.shape:
        shape = (*values.shape, 1)
    new = values.reshape(shape) if numpy.prod(shape, dtype=int) == values.size else numpy.zeros(shape, values.dtype)
    replace(file, path, new)
    return f"{path} has the shape {shape}, not {values.shape}", values.size > 0


def resize(file, path, rng):
    values = file[path][()]
    if values.ndim == 0 or values.shape[0] == 0:
        return f"{path} as it is", False
    axis = rng.randrange(values.ndim)
    new = values.take(range(values.shape[axis] - 1), axis) if rng.random() < 0.5 else \
        numpy.concatenate([values, values.take([0], axis)], axis)
    replace(file, path, new)
    return f"{path} has the shape {new.shape}, not {values.shape}", True


def value(file, path, rng):
    data = file[path]
    if data.size == 0 or data.dtype.kind not in "iuf":
        return f"{path} as it is", False
    at = tuple(rng.randrange(n) for n in data.shape)
    if data.dtype.kind == "f":
        new = rng.choice(["nan", "inf", "-inf", "1e300", "-0.0"])
        with numpy.errstate(over="ignore"):
            data[at] = numpy.float64(new).astype(data.dtype)
        return f"{path}{list(at)} is {new}", new == "nan"
    new = max(numpy.iinfo(data.dtype).min, min(numpy.iinfo(data.dtype).max, rng.choice(EXTREMES)))
    data[at] = new
    return f"{path}{list(at)} is {new}", False


def delete(file, path, _rng):
    del file[path]
    return f"{path} is missing", True


def link(file, path, rng):
    kind = rng.choice(["itself", "nowhere", "a file that is not there", "the root", "another"])
    others = [p for p in items_of(file)[0] if p != path]
    another = file[rng.choice(others)] if others else file["/"]
    del file[path]
    if kind == "another":
        file[path] = another
        return f"{path} is a link to another dataset", False
    file[path] = {"itself": h5py.SoftLink(path), "nowhere": h5py.SoftLink("/nowhere"), "the root": h5py.SoftLink("/"),
                  "a file that is not there": h5py.ExternalLink("nosuch.h5", path)}[kind]
    return f"{path} is a link to {kind}", True


def storage(file, path, rng):
    """The same values, kept otherwise: must be read as well."""
    values = file[path][()]
    if values.size == 0 or values.ndim == 0 or values.dtype.kind not in "iuf":
        return f"{path} as it is", False
    kind = rng.choice(["contiguous", "compressed", "other byte order", "without values"])
    if kind == "other byte order":
        replace(file, path, values.astype(values.dtype.newbyteorder()))
    elif kind == "without values":
        del file[path]
        file.create_dataset(path, values.shape, values.dtype, chunks=values.shape)
    else:
        replace(file, path, values, **({"compression": "gzip", "shuffle": True} if kind == "compressed" else {}))
    return f"{path} is {kind}", False


def odd(file, path, rng):
    """Something else under the name of a dataset."""
    kind = rng.choice(["a group", "empty", "texts", "texts of variable length", "huge", "references", "a type"])
    del file[path]
    if kind == "a group":
        file.create_group(path)
    elif kind == "empty":
        file[path] = h5py.Empty("i4")
    elif kind == "texts":
        file[path] = numpy.array([b"\xff\xfe", b"x"], "S2")
    elif kind == "texts of variable length":
        file.create_dataset(path, data=["", "é" * 1000], dtype=h5py.string_dtype())
    elif kind == "huge":
        file.create_dataset(path, (2**40,), rng.choice(["i4", "i8", "f4"]), chunks=(2**16,))
    elif kind == "references":
        file[path] = numpy.array([file["/"].ref], h5py.ref_dtype)
    else:
        file[path] = numpy.dtype("i4")
    return f"{path} is {kind}", kind != "empty"


def attribute(file, path, rng):
    """All attributes of a group are read: present, and not what they should be, they must be refused."""
    names = [name for name in file[path].attrs if name != "content_sha256"]
    if not names:
        return f"{path} has no attributes", False
    name = rng.choice(names)
    old = file[path].attrs[name]
    number, whole = not isinstance(old, (str, bytes)), isinstance(old, numpy.integer)
    kind = rng.choice(["missing", "renamed", "text", "extreme", "real", "array", "rows", "empty"])
    if kind == "extreme" and number:
        file[path].attrs[name] = numpy.int64(rng.choice(EXTREMES))
        return f"attribute {name} of {path} is {file[path].attrs[name]}", False
    del file[path].attrs[name]
    if kind == "renamed":
        file[path].attrs[name + "_"] = old
    elif kind != "missing":
        file[path].attrs[name] = {"text": "x" * rng.choice([0, 1, 60000]), "extreme": "", "real": rng.choice([0.5, float("nan"), 1e300]),
                                  "array": numpy.arange(3), "rows": [old, old], "empty": h5py.Empty("f4")}[kind]
    refused = kind in ("array", "rows", "empty") or kind == "text" and number or kind == "real" and (whole or not number)
    return f"attribute {name} of {path} is {kind}", refused


def unread(file, target, rng):
    """What a file may have, of another kind, or what would change its meaning and is not known here: both must be refused."""
    optional, modifiers = UNREAD[target]
    group = "/" + target.replace("reference", "documents")
    if rng.random() < 0.5 and optional:
        name, value = rng.choice(optional), rng.choice([[0.5, 0.5], [1, 2, 3], "x", h5py.Empty("f4")])
        file[group].attrs[name] = value
        return f"attribute {name} of {group} is {value}", True
    name = rng.choice(modifiers)
    if rng.random() < 0.5:
        file[group].attrs[name] = rng.choice([0.5, 30.0, 3])
    elif name not in file[group]:  # else of an earlier change
        file[group][name] = numpy.full(rng.choice([1, 8]), 0.5, "f4")
    return f"{group} has {name}", True


CHANGES = (retype, reshape, resize, value, value, delete, link, storage, odd)


def mutated(seed, target, path, rng):
    """Writes a case to `path`: (what it is, whether it must be refused)."""
    shutil.copy(seed, path)
    words, refused = [], False
    with h5py.File(path, "r+") as file:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            datasets, groups = items_of(file)
            datasets = [d for d in datasets if file[d].shape is not None and file[d].size < 10**6]  # as changed before
            if rng.random() < 0.25 or not datasets:
                text, wrong = unread(file, target, rng) if target in UNREAD and rng.random() < 0.3 else \
                    attribute(file, rng.choice(groups), rng)
                words.append(text)
                refused |= wrong and target in REQUIRED
                continue
            at, change = rng.choice(datasets), rng.choice(CHANGES)
            if file[at].dtype.hasobject and change in (retype, reshape, resize):
                change = delete
            if target == "compare" and change is odd:
                change = retype if file[at].dtype.kind in "iuf" else delete  # 4 TB of nothing take long to compare
            text, wrong = change(file, at, rng)
            words.append(text)
            required = target in REQUIRED and re.fullmatch(REQUIRED[target], at)
            allowed = (change is value and target not in FINITE or change is resize and re.fullmatch(FREE, at)
                       or change is delete and re.fullmatch(OPTIONAL, at))
            refused |= bool(wrong and required and not allowed)
    gyre_files.record_content(path)
    return "; ".join(words), refused and len(words) == 1
