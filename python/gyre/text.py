"""gyre-text: turns texts, or tokens already made, into a documents file, by a model's tokenizer."""

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import reprlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from .console import complain, ended
from .tokenizer import Tokenizer
from .writing import write_documents

DESCRIPTION = """\
Writes documents (HDF5, gyre/documents) in the tokens of a model, for gyre-pack and gyre-pipeline.
The file names the tokenizer as gyre-import --model does; a model with another one refuses it."""
EPILOG = """\
inputs:   NAME.jsonl   a document a line: a text, a list of tokens, or an object with one of these
                       in the field that --field names; blank lines are skipped
          NAME.npy     tokens: integers [T] of one document, [n, T], or an object array of n arrays
          others       a document each: UTF-8 text

Texts need the package tokenizers (pip install tokenizers).
exit code: 0 done; 2 bad usage or input; 3 the output cannot be written

examples: gyre-text -o docs.h5 --tokenizer SmolLM2/tokenizer.json README.md LICENSE
          gyre-text -o docs.h5 --tokenizer SmolLM2/tokenizer.json --bos --window 2048 book.txt
          gyre-text -o docs.h5 --tokenizer model.gguf --field content corpus.jsonl"""

_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # of byte order, which a file of UTF-8 may begin with

Document = tuple[str, "str | list[Any] | np.ndarray"]  # a name, and a text or tokens


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "number from 1 on"  # argparse names it: "invalid number from 1 on value"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre-text",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", required=True, help="file to write")
    add("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or a model NAME.gguf")
    add("--field", default="text", help="field of the objects in NAME.jsonl (default: text)")
    add("--bos", action="store_true", help="begin every document with bos_token of "
        "tokenizer_config.json, or with eos_token if there is none, unless it begins so")
    add("--window", type=_positive, metavar="L", help="cut documents into windows, in which each "
        "token is predicted once, from at most L tokens before it, as lm-eval does")
    add("--stride", type=_positive, metavar="S", help="tokens that a window predicts, at most L: "
        "each has L - S + 1 tokens before it, or more (default: L)")
    add("inputs", nargs="+", metavar="FILE", help="texts or tokens")
    return parser


def _decoded(label: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8"
        raise ValueError(f"{label}: {wrong}") from error


def _of_line(label: str, line: bytes, field: str) -> "str | list[Any]":
    try:
        value = json.loads(_decoded(label, line).removeprefix(_MARK))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{label} is not JSON: {error}") from error
    what = "it"
    if isinstance(value, dict):
        if field not in value:
            there = ", ".join(map(repr, value)) or "none"
            raise ValueError(f"{label} has no field {field!r}; its fields are: {there}")
        what, value = f"the field {field!r}", value[field]
    if not isinstance(value, str | list):
        shown = reprlib.repr(value)
        raise ValueError(f"{label}: {what} is {shown}; wanted: a text or a list of tokens")
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
        raise ValueError(f"{label}: {what} holds half of a surrogate pair, which is no character")
    return value


def _of_jsonl(path: str, file: BinaryIO, field: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if line.removeprefix(_MARK.encode() if number == 1 else b"").strip():
            yield f"{path}:{number}", _of_line(f"{path}:{number}", line, field)


class _ArraysOnly(pickle.Unpickler):
    """Reads the pickle of an object array, and builds nothing but arrays: a pickle can run code."""

    BUILDERS = {
        "_reconstruct": np.empty(0).__reduce__()[0],
        "scalar": np.int64(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self.BUILDERS:
            return self.BUILDERS[name]
        raise pickle.UnpicklingError(f"it holds a {module}.{name}; wanted: arrays of integers")


def _loaded(file: BinaryIO) -> np.ndarray:
    """The array of a .npy file; object arrays too."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0}
    read_header = readers.get(np.lib.format.read_magic(file), np.lib.format.read_array_header_2_0)
    if not read_header(file)[2].hasobject:
        file.seek(0)
        return np.load(file, allow_pickle=False)
    return np.asarray(_ArraysOnly(file).load())


def _of_npy(path: str, file: BinaryIO) -> Iterator[Document]:
    try:
        array = _loaded(file)
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{path} cannot be read: {error}") from error
    if array.ndim == 1 and array.dtype.kind in "iu":
        yield path, array
    elif (array.ndim == 2 and array.dtype.kind in "iu") or (array.ndim == 1 and array.dtype == "O"):
        for i, row in enumerate(array):
            yield f"{path}[{i}]", row
    else:
        raise ValueError(
            f"{path} is {array.dtype} {list(array.shape)}; wanted: integers [T] or [n, T], or an "
            "object array [n] of integer arrays"
        )


def documents_of(path: str, field: str) -> Iterator[Document]:
    """Names and contents of the documents of a file. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        if path.endswith(".jsonl"):
            yield from _of_jsonl(path, file, field)
        elif path.endswith(".npy"):
            yield from _of_npy(path, file)
        else:
            yield path, _decoded(path, file.read()).removeprefix(_MARK)


def checked_tokens(label: str, tokens: Any, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens as int32, if each is an id of the tokenizer."""
    values = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    if not isinstance(values, list):
        raise ValueError(f"{label} is {reprlib.repr(values)}; wanted: a list of tokens")
    top = tokenizer.vocab_size
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value < top:
            wanted = f"an id of {tokenizer.path}, 0 to {top - 1}"
            raise ValueError(f"{label}: token {i} is {reprlib.repr(value)}; wanted: {wanted}")
    return np.array(values, np.int32)


def _check_places(output: str, files: Sequence[str]) -> None:
    for file in files:
        if os.path.exists(output) and os.path.exists(file) and os.path.samefile(output, file):
            raise ValueError(f"the output {output} is the file of the input {file}")
        if not _is_text(file):
            raise ValueError(f"the name of {file!r} is not UTF-8")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Cut:
    """How documents are made of texts: the token that begins each, and windows."""

    bos: int | None = None
    window: int | None = None
    stride: int | None = None

    def windows(self, predictions: int) -> Iterator[tuple[int, int, int]]:
        """First and last token of each window, and its predictions that another one makes.

        The windows of lm_eval.utils.get_rolling_token_windows, whose context_len is
        window - stride + 1.
        """
        length = self.window or max(1, predictions)
        stride = self.stride or length
        end = min(length, predictions)
        yield 0, end, 0
        while end < predictions:
            count = min(predictions - end, stride)
            end += count
            yield end - length, end, length - count


@dataclasses.dataclass
class _Documents:
    """Documents to be written."""

    cut: Cut
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    text_bytes: list[int] | None = dataclasses.field(default_factory=list)  # None: one had tokens alone
    unscored: list[int] = dataclasses.field(default_factory=list)

    def add(self, name: str, ids: "np.ndarray | list[int]", ends: list[int] | None) -> None:
        """`ends`: bytes of text that the tokens up to each one stand for."""
        if self.cut.bos is not None and (len(ids) == 0 or ids[0] != self.cut.bos):
            ids, ends = [self.cut.bos, *ids], None if ends is None else [0, *ends]
        if ends is None:
            self.text_bytes = None
        for i, (begin, end, unscored) in enumerate(self.cut.windows(max(0, len(ids) - 1))):
            self.names.append(name if i == 0 else f"{name}#{i + 1}")
            self.tokens.append(np.array(ids[begin : end + 1], np.int32))
            self.unscored.append(unscored)
            if self.text_bytes is not None and ends is not None:
                self.text_bytes.append(ends[end] - ends[begin + unscored] if len(ids) else 0)


def convert(
    output: str, tokenizer: Tokenizer, inputs: Sequence[str], field: str, cut: Cut = Cut()
) -> str:
    """Writes the documents of files; returns a line about them. Raises OSError or ValueError."""
    documents = _Documents(cut)
    count, note = 0, None
    for path in inputs:
        for name, content in documents_of(path, field):
            count += 1
            if isinstance(content, str):
                try:
                    ids, ends = tokenizer.encode_ends(content)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                if note is None:
                    note = _note_on_bos(tokenizer, ids) if cut.bos is None else ""
                documents.add(name, ids, ends)
            else:
                documents.add(name, checked_tokens(name, content, tokenizer), None)
    total = sum(map(len, documents.tokens))
    if total == 0:
        raise ValueError(f"nothing to write: {count} documents, and no token in them")
    try:
        write_documents(
            output,
            documents.tokens,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.name,
            names=documents.names,
            text_bytes=documents.text_bytes,
            unscored=documents.unscored if any(documents.unscored) else None,
            provenance={"tokenizer": tokenizer.path, "sources": "\n".join(inputs)},
        )
    except OSError as error:
        raise _Unwritable(f"cannot write {output}: {error}") from error
    sys.stderr.write(note or "")
    of_windows = f"{len(documents.tokens)} windows of " if cut.window else ""
    sizes = documents.text_bytes
    text = "" if sizes is None else f", {sum(sizes)} bytes predicted"
    counts = f"{of_windows}{count} documents, {total} tokens{text}"
    return f"{output}: {counts}, tokenizer {tokenizer.name}"


def _note_on_bos(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What to say of files of a model that disagree on a token at the beginning."""
    if tokenizer.settings().get("add_bos_token") is not True or ids[:1] == [tokenizer.beginning()]:
        return ""
    return (
        "gyre-text: note: tokenizer_config.json has add_bos_token = true, and tokenizer.json adds "
        "none: some programs add it; --bos does\n"
    )


class _Unwritable(Exception):
    pass


def _cut_of(options: argparse.Namespace, tokenizer: Tokenizer) -> Cut:
    if options.stride is not None and options.stride > (options.window or 0):
        wanted = "a --window, and at most its tokens" if options.window else "a --window"
        raise ValueError(f"--stride {options.stride}: wanted: {wanted}")
    return Cut(tokenizer.beginning() if options.bos else None, options.window, options.stride)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return ended("gyre-text", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    code = 2
    try:
        _check_places(options.output, [options.tokenizer, *options.inputs])
        tokenizer = Tokenizer(options.tokenizer)
        cut = _cut_of(options, tokenizer)
        written = convert(options.output, tokenizer, options.inputs, options.field, cut)
    except _Unwritable as error:
        code, text = 3, str(error)
    except OSError as error:
        text = f"cannot read {error.filename}: {error.strerror}" if error.filename else str(error)
    except ValueError as error:
        text = str(error)
    else:
        print(written)
        return 0
    return complain("gyre-text", " ".join(text.split()), code)


if __name__ == "__main__":
    sys.exit(main())
