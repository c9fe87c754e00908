"""Writing HDF5 files: complete or not at all, with checksums and a digest of their contents."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping

import h5py
import numpy as np

from . import digest
from .arrays import bfloat16_bits

SCHEMA_VERSION = 1
MOST_CHUNK_BYTES = 1 << 24


@contextlib.contextmanager
def new_file(
    path: str | os.PathLike[str], schema: str, provenance: Mapping[str, object]
) -> Iterator[h5py.File]:
    """A file open for writing that takes the place of `path` once the block has succeeded.

    The same contents give the same bytes: no time stamps are stored. A link is followed; a device or
    a pipe is refused, since renaming would replace it.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(errno.EEXIST, "it is there and no regular file", path)
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with h5py.File(temporary, "w") as file:
            file.attrs["schema"] = schema
            file.attrs["schema_version"] = np.int64(SCHEMA_VERSION)
            group = file.create_group("provenance")
            for name, text in provenance.items():
                group.attrs[name] = str(text)
            yield file
        digest.record(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def bfloat16_type() -> h5py.h5t.TypeFloatID:
    """HDF5's description of bfloat16, little-endian: 8 bits of exponent, 7 of mantissa."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign, exponent and its bits, mantissa and its bits
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def put(group: h5py.Group, name: str, array: np.ndarray, as_bfloat16: bool = False) -> None:
    """Stores an array, checksummed; `as_bfloat16`: of values that bfloat16 holds exactly."""
    options: dict[str, object] = {}
    if array.size and array.ndim:  # an empty dataset cannot be chunked, nor a scalar
        row_bytes = max(1, array[:1].nbytes)
        rows = min(array.shape[0], max(1, MOST_CHUNK_BYTES // row_bytes))
        options = {"chunks": (rows, *array.shape[1:]), "fletcher32": True}
    if not as_bfloat16:
        group.create_dataset(name, data=array, **options)
        return
    kind = bfloat16_type()
    dataset = group.create_dataset(name, array.shape, h5py.Datatype(kind), **options)
    if array.size:
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, bfloat16_bits(array), kind)
