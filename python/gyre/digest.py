"""Digest of the whole contents of an HDF5 file (inputs/SCHEMA.md, Digest of contents)."""

import hashlib
import math
import os
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

ATTRIBUTE = "content_sha256"
MOST_BYTES = 1 << 26  # larger files have no digest, and larger values are not part of one

WITH_VALUES = (h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.STRING)
EXTENTS = {h5s.NULL: "null", h5s.SCALAR: "scalar", h5s.SIMPLE: "simple"}
KINDS = {h5g.GroupID: "group", h5d.DatasetID: "dataset"}


class _Digest:
    """SHA-256 of an open file; each part is preceded by its length in bytes."""

    def __init__(self, file: h5py.File) -> None:
        root = file["/"].id
        self.sha256 = hashlib.sha256()
        self.first_path = {h5o.get_info(root).addr: "/"}
        self.add_object(root, "/")

    def add(self, *parts: object) -> None:
        for part in parts:
            text = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
            self.sha256.update(len(text).to_bytes(8, "little"))
            self.sha256.update(text)

    def add_object(self, item: Any, path: str) -> None:
        """A group, a dataset or a named type, by its identifier."""
        kind = KINDS.get(type(item), "type")
        self.add(kind)
        self.add_attributes(item, path)
        if kind == "group":
            self.add_links(item, path)
        elif kind == "type":
            self.add_type(item)
        elif item.get_create_plist().get_layout() == h5d.VIRTUAL:
            self.add("is virtual")
        elif item.get_create_plist().get_external_count() > 0:
            self.add("has external storage")
        else:
            self.add_values(item, lambda *to: item.read(h5s.ALL, h5s.ALL, *to))

    def add_attributes(self, item: Any, path: str) -> None:
        names: list[bytes] = []
        h5a.iterate(item, names.append)
        names = sorted(name for name in names if (path, name) != ("/", ATTRIBUTE.encode()))
        self.add(len(names))
        for name in names:
            attribute = h5a.open(item, name)
            self.add(name)
            self.add_values(attribute, attribute.read)

    def add_links(self, group: Any, path: str) -> None:
        names = sorted(group)
        self.add(len(names))
        for name in names:
            self.add(name)
            kind = group.links.get_info(name).type
            if kind == h5l.TYPE_SOFT:
                self.add("soft", group.links.get_val(name))
            elif kind == h5l.TYPE_EXTERNAL:
                self.add("external", *group.links.get_val(name))
            else:
                below = path.rstrip("/") + "/" + name.decode("utf-8", "surrogateescape")
                self.add_hard_link(h5o.open(group, name), below)

    def add_hard_link(self, item: Any, path: str) -> None:
        address = h5o.get_info(item).addr
        if address in self.first_path:
            self.add("again", self.first_path[address])
        else:
            self.first_path[address] = path
            self.add_object(item, path)

    def add_type(self, kind: Any) -> None:
        if isinstance(kind, h5t.TypeEnumID):
            self.add("enumeration")
            self.add_type(kind.get_super())
            self.add(kind.get_nmembers())
            for i in range(kind.get_nmembers()):
                self.add(kind.get_member_name(i), kind.get_member_value(i))
        elif isinstance(kind, h5t.TypeStringID):
            size = "variable" if kind.is_variable_str() else kind.get_size()
            self.add(f"text {size} {kind.get_strpad()} {kind.get_cset()}")
        elif isinstance(kind, (h5t.TypeIntegerID, h5t.TypeFloatID)):
            words = [kind.get_size(), kind.get_order(), kind.get_precision(), kind.get_offset()]
            words += kind.get_pad()
            if isinstance(kind, h5t.TypeIntegerID):
                words = ["integer", *words, kind.get_sign()]
            else:
                words = ["real", *words, *kind.get_fields()]
                words += [kind.get_ebias(), kind.get_norm(), kind.get_inpad()]
            self.add(" ".join(map(str, words)))
        else:
            self.add(f"class {kind.get_class()} {kind.get_size()}")

    def add_values(self, item: Any, read: Callable[..., object]) -> None:
        """Type, extents and values of a dataset or an attribute."""
        kind, space = item.get_type(), item.get_space()
        extent = space.get_simple_extent_type()
        shape = space.shape if extent == h5s.SIMPLE else ()
        self.add_type(kind)
        self.add(" ".join([EXTENTS[extent], *map(str, shape)]))
        if kind.get_class() not in WITH_VALUES or extent == h5s.NULL:
            return
        is_variable = isinstance(kind, h5t.TypeStringID) and kind.is_variable_str()
        width = 8 if is_variable else kind.get_size()
        if not 0 < math.prod(shape) * width <= MOST_BYTES:
            return
        if is_variable:
            texts = np.empty(shape, kind.dtype)
            read(texts, h5t.py_create(texts.dtype))
            self.add(*(text or b"" for text in texts.reshape(-1)))
        else:
            values = np.zeros(shape, f"V{width}")
            read(values, kind)
            self.add(values.tobytes())


def content_sha256(path: str | os.PathLike[str]) -> str:
    """The digest of a file's contents, 64 hexadecimal digits, whether or not it is recorded."""
    with h5py.File(path, "r") as file:
        return _Digest(file).sha256.hexdigest()


def record(path: str) -> None:
    """Gives a complete file of at most 64 MiB its digest."""
    if os.path.getsize(path) > MOST_BYTES:
        return
    digest = content_sha256(path)
    with h5py.File(path, "r+") as file:
        file.attrs.create(ATTRIBUTE, np.bytes_(digest))
