"""Writing the cases of inputs/golden/: arrays as they are, without chunks, in any type.

Every case is one HDF5 file of a kind that SCHEMA.md describes. Datasets are contiguous, which keeps
small files small; the digest of the contents covers all of them. bfloat16, which NumPy does not
have, is a type of HDF5 here (8 bits of exponent, 7 of mantissa) or words of 16 bits.
"""

import dataclasses

import h5py
import numpy as np

import gyre_files

SEED = 20240501
BFLOAT16, BFLOAT16_WORDS = "bfloat16", "bfloat16 words"
GENERATOR = "inputs/make_golden.py"


@dataclasses.dataclass
class Case:
    """A file of the suite: `write(path)` makes it; the texts are those of the index."""

    name: str  # of the file, without .h5
    kind: str  # the schema, without gyre/
    edge: str  # what it is for
    guards: str  # what it guards against
    write: object
    run: tuple  # commands for Gyre's programs
    tags: tuple
    more: tuple = ()  # such commands that the page leaves out

    @property
    def file(self):
        return self.name + ".h5"


def generator(name):
    """A random generator of the case's own, so that cases do not depend on one another."""
    return np.random.default_rng([SEED, *name.encode()])


def exactly(values, store):
    """Whether the type `store` holds the values; None is their own."""
    if store in (BFLOAT16, BFLOAT16_WORDS):
        bits = np.asarray(values, np.float32).view(np.uint32)
        same = np.asarray(values, np.float32) == values
        return bool(np.all((bits & 0xFFFF == 0) & same))
    stored = np.asarray(values).astype(store)
    return bool(np.all((stored == values) | (np.isnan(values) & np.isnan(stored))))


def bfloat16_type():
    """HDF5's description of bfloat16, little-endian."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def put(group, name, array, store=None):
    """Stores an array in the type `store`, which must hold it exactly; None: in its own."""
    array = np.ascontiguousarray(array)
    if store is None:
        group.create_dataset(name, data=array)
        return
    if not exactly(array, store):
        raise ValueError(f"{name}: {store} does not hold it")
    if store == BFLOAT16_WORDS:
        words = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        group.create_dataset(name, data=words)
        group[name].attrs["dtype"] = "bfloat16"
    elif store == BFLOAT16:
        space = h5py.h5s.create_simple(array.shape)
        plain = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plain.set_obj_track_times(False)  # or the same contents are other bytes
        dataset = h5py.h5d.create(group.id, name.encode(), bfloat16_type(), space, plain)
        everything = h5py.h5s.ALL, h5py.h5s.ALL
        dataset.write(*everything, array.astype(np.float32), h5py.h5t.NATIVE_FLOAT)
    else:
        group.create_dataset(name, data=array.astype(store))


def put_all(group, arrays, stores=None):
    """Stores a mapping of arrays; `stores` maps some names to types."""
    for name, array in arrays.items():
        put(group, name, array, (stores or {}).get(name))


def write_case(path, kind, fill):
    """Writes a file: `fill(file)` puts the contents into it."""
    with gyre_files.new_file(path, "gyre/" + kind) as file:
        fill(file)
        gyre_files.put_provenance(
            file,
            {
                "generator": GENERATOR,
                "command": GENERATOR,
                "sources": "none: formulas, and random numbers from NumPy's default_rng",
                "seed": SEED,
                "licence": "Numbers.",
            },
        )


def reference_group(file):
    """The group of the answers."""
    group = file.create_group("reference")
    group.attrs["generator"] = GENERATOR
    return group
