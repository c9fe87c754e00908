"""Reads the keys of a GGUF file, the models of llama.cpp.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from typing import Any, BinaryIO

_TEXT, _LIST = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # letters of struct


class _Reader:
    """Reads without mapping: a mapped file that shrinks meanwhile ends the process (SIGBUS)."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.at, self.size = file, 0, os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size - self.at else b""
        if len(data) < count:
            wanted = f"{count} bytes are needed at byte {self.at} of {self.size}"
            raise ValueError(f"it is truncated: {wanted}")
        self.at += count
        return data

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}")))

    def text(self) -> bytes:
        return self.take(self.numbers("Q")[0])

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind != _LIST:
            raise ValueError(f"a value at byte {self.at} has the unknown type {kind}")
        of, count = self.numbers("I")[0], self.numbers("Q")[0]
        if of in _NUMBERS:
            return list(self.numbers(_NUMBERS[of], count))
        return [self.value(of) for _ in range(count)]


def gguf_keys(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a file: numbers, texts as bytes, lists. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        try:
            reader = _Reader(file)
            if reader.take(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            version = reader.numbers("I")[0]
            if version not in (2, 3):
                raise ValueError(f"its version is {version}; 2 and 3 can be read")
            _, count = reader.numbers("Q", 2)
            keys = {}
            for _ in range(count):
                name = reader.text().decode()
                keys[name] = reader.value(reader.numbers("I")[0])
            return keys
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is no GGUF file: {error}") from error
