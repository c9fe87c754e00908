"""Reads the HDF5 files of Gyre, and places in them: FILE.h5 or FILE.h5:/group."""

import contextlib
import errno
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from h5py import h5s, h5t

from . import digest
from .arrays import from_bfloat16_bits
from .schema import check_names
from .storage import SCHEMA_VERSION, bfloat16_type


class Damaged(OSError):
    """The contents of a file are not what was written."""


@dataclass(frozen=True, repr=False)
class Group(Mapping[str, np.ndarray]):
    """The arrays in and below a group, by their paths relative to it, and its attributes.

    bfloat16 arrays are float32 here, which holds them exactly; texts are arrays of str.
    array_attributes are those of arrays that have any; file is where the group was read.
    """

    arrays: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    array_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    file: str = ""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        shapes = [f"{name} {a.dtype} {list(a.shape)}" for name, a in self.arrays.items()]
        values = [f"{name} = {value}" for name, value in self.attributes.items()]
        return "; ".join(", ".join(part) for part in (shapes, values) if part)


@dataclass(frozen=True, repr=False)
class File(Mapping[str, Group]):
    """A file of Gyre: its groups by name, its kind and where it comes from."""

    path: str
    schema: str
    provenance: Mapping[str, Any]
    groups: Mapping[str, Group]

    def __getitem__(self, name: str) -> Group:
        if name in self.groups:
            return self.groups[name]
        raise KeyError(f"{self.path} has no group {name!r}; it has {', '.join(self.groups)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        groups = (f"\n/{name}: {group!r}" for name, group in self.groups.items())
        return f"{self.path}, {self.schema}" + "".join(groups)

    @property
    def inputs(self) -> Group:
        """The group that the file's kind is named after: /logprobs of gyre/logprobs, /row_shards of gyre/row-shards."""
        return self[self.schema.removeprefix("gyre/").replace("-", "_")]

    @property
    def reference(self) -> Group:
        return self["reference"]

    @property
    def results(self) -> Group:
        return self["results"]


@contextlib.contextmanager
def _file(path: str) -> Iterator[h5py.File]:
    """A file open for reading. OSError: it is none of HDF5; Damaged: it is truncated, or the block finds it damaged."""
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        kind = Damaged if "truncated" in str(error) else OSError
        raise kind(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    with file:
        try:
            yield file
        except Damaged:
            raise
        except (OSError, RuntimeError) as error:  # of HDF5, which does not name the file
            raise Damaged(f"{path} is damaged: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[h5py.File]:
    """A file open for reading, after its contents have been compared with their digest."""
    with _file(path) as file:
        recorded = _plain(file.attrs.get(digest.ATTRIBUTE))
        if recorded is not None and os.path.getsize(path) <= digest.MOST_BYTES:
            if recorded != digest.content_sha256(path):
                raise Damaged(f"the contents of {path} are not what was written")
        yield file


def _plain(value: Any) -> Any:
    """An attribute as a number or a text of Python; arrays of several elements stay arrays."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic):
        value = value.item()
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _attributes(item: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    return {name: _plain(value) for name, value in item.attrs.items()}


def _is_uint16(dataset: h5py.Dataset) -> bool:
    return (dataset.dtype.kind, dataset.dtype.itemsize) == ("u", 2)


def _is_bfloat16(dataset: h5py.Dataset) -> bool:
    if _is_uint16(dataset):
        return _plain(dataset.attrs.get("dtype")) == "bfloat16"
    kind, wanted = dataset.id.get_type(), bfloat16_type()
    return (
        isinstance(kind, h5t.TypeFloatID)
        and kind.get_size() == wanted.get_size()
        and kind.get_fields() == wanted.get_fields()
        and kind.get_ebias() == wanted.get_ebias()
    )


def _values(dataset: h5py.Dataset) -> np.ndarray:
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"the elements of {dataset.name} are in other files; copy them into this")
    if dataset.shape is None:
        return np.empty(0)
    if _is_bfloat16(dataset):
        bits = np.empty(dataset.shape, np.uint16)
        if bits.size:
            kind = h5t.NATIVE_UINT16 if _is_uint16(dataset) else bfloat16_type()
            dataset.id.read(h5s.ALL, h5s.ALL, bits, kind)
        return from_bfloat16_bits(bits)
    if h5py.check_string_dtype(dataset.dtype):
        return np.asarray(dataset.asstr("utf-8", "surrogateescape")[()], dtype=object)
    return np.asarray(dataset[()])


def _item(group: h5py.Group, name: str) -> Any:
    """What is in the same file behind a path."""
    try:
        item = group[name]
    except KeyError as error:
        raise ValueError(f"{name} of {group.file.filename}: there is no such object") from error
    if item.file.filename != group.file.filename:
        raise ValueError(f"{name} of {group.file.filename} is behind a link to another file")
    return item


def _datasets(
    group: h5py.Group, front: str = "", above: tuple[h5py.Group, ...] = ()
) -> Iterator[tuple[str, h5py.Dataset]]:
    """All datasets in and below a group; links are followed, but not out of the file."""
    for name in group:
        item = _item(group, name)
        if isinstance(item, h5py.Dataset):
            yield front + name, item
        elif isinstance(item, h5py.Group) and item not in (group, *above):
            yield from _datasets(item, f"{front}{name}/", (group, *above))


def _group(item: h5py.Group) -> Group:
    datasets = dict(sorted(_datasets(item)))
    arrays = {name: _values(dataset) for name, dataset in datasets.items()}
    beside = {name: _attributes(dataset) for name, dataset in datasets.items() if dataset.attrs}
    return Group(arrays, _attributes(item), beside, item.file.filename)


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of a file of Gyre: attention of gyre/attention; "" of another file."""
    with _file(os.fspath(path)) as file:
        schema = _plain(file.attrs.get("schema"))
    return schema.removeprefix("gyre/") if isinstance(schema, str) else ""


def read(path: str | os.PathLike[str]) -> File:
    """All of a file of Gyre: arrays, attributes and provenance.

    ValueError: it is none, of another version, or holds what changes the mathematics of its kind and
    is none of its names (a softcap). Damaged: its contents are not what was written. A warning names
    what else the programs do not read.
    """
    name = os.fspath(path)
    with _opened(name) as file:
        schema = _plain(file.attrs.get("schema"))
        if not isinstance(schema, str):
            raise ValueError(f"{name} is not a file of Gyre: it has no text attribute 'schema'")
        version = _plain(file.attrs.get("schema_version"))
        if version != SCHEMA_VERSION:
            raise ValueError(f"{name} has schema version {version}; it must be {SCHEMA_VERSION}")
        check_names(file, schema, _plain)
        items = {key: _item(file, key) for key in file}
        groups = {key: item for key, item in items.items() if isinstance(item, h5py.Group)}
        origin = groups.pop("provenance", None)
        provenance = {} if origin is None else _attributes(origin)
        return File(name, schema, provenance, {key: _group(item) for key, item in groups.items()})


def extras_of(group: Group) -> dict[str, tuple[str, np.ndarray]]:
    """The arrays that go along with rows, packed streams or shards unread, by name.

    Each with its alignment, slots, rows or none: write_rows takes them as they are here. bfloat16
    arrays are float32.
    """
    found = {}
    for path, array in group.items():
        if path.startswith("extras/"):
            aligned = group.array_attributes.get(path, {}).get("aligned", "")
            found[path.removeprefix("extras/")] = (str(aligned), array)
    return found


def offsets_of(path: str) -> np.ndarray | None:
    """Where the documents of a file of Gyre begin, and the last ends, in its tokens; None: none said."""
    with _file(path) as file:
        schema = _plain(file.attrs.get("schema"))
        name = f"{str(schema).removeprefix('gyre/')}/offsets"
        return np.asarray(file[name]) if name in file else None


def guards_of(path: str) -> str:
    """What a file of the golden suite guards against, as the index beside it says; "" of others."""
    index = os.path.join(os.path.dirname(path), "index.json")
    if not os.path.exists(index):
        return ""
    try:
        with open(index, encoding="utf-8") as file:
            found = json.load(file)
        is_index = isinstance(found, dict) and found.get("schema") == "gyre/golden-index"
        entries = {case["file"]: case["guards"] for case in found["cases"]} if is_index else {}
    except (KeyError, RecursionError, TypeError, ValueError):  # somebody else's index.json
        return ""
    return str(entries.get(os.path.basename(path), ""))


def split_place(place: str) -> tuple[str, str | None]:
    """File and group of FILE.h5:/group; no group of FILE.h5. C:/FILE.h5 is on a drive."""
    colon = place.rfind(":/")
    return (place[:colon], place[colon + 1 :]) if colon > 1 else (place, None)


def read_arrays(path: str, group: str) -> dict[str, np.ndarray]:
    """All arrays in and below a group of any HDF5 file. ValueError: there is no such group."""
    with _opened(path) as file:
        item = _item(file, group)
        if not isinstance(item, h5py.Group):
            raise ValueError(f"{group} of {path} is no group")
        return dict(_group(item).arrays)


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a FILE.npz. Damaged: it is none, or truncated, or holds objects, whose pickles can run code."""
    name = os.fspath(path)
    try:
        with np.load(name, allow_pickle=False) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{name} cannot be read as .npz: {error}") from error
