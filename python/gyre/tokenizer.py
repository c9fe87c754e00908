"""Tokenizers of models: that of a tokenizer.json, and the one inside a GGUF file.

Encoding a text needs Hugging Face's package tokenizers. The tokenizer of a GGUF file is built from
its vocabulary as in llama.cpp (src/llama-vocab.cpp): byte-level BPE with a pre-tokenizer of KINDS,
or SentencePiece's BPE by scores. Other kinds are refused.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .gguf import gguf_keys

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class Kind:
    """A pre-tokenizer of byte-level BPE: expressions that split a text one after another."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word of the vocabulary is one token, whatever the merges say
    begins: bool = False  # a document begins with bos unless the file says otherwise
    composes: bool = False  # letters and accents are composed (NFC) before


_LLAMA3 = Kind((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",), True, True)
KINDS = {
    "default": Kind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Kind((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": Kind((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}",), composes=True),
    "smollm": Kind((r"\p{N}", _GPT2)),
}
_BY_SCORES = Kind((), begins=True)  # SentencePiece's, which splits nothing

# Keys of a GGUF file, behind "tokenizer.ggml.", that are read here or change no token.
_READ = (
    "model",
    "pre",
    "tokens",
    "token_type",
    "merges",
    "scores",
    "add_bos_token",
    "add_eos_token",
)
_OFF = ("add_space_prefix", "remove_extra_whitespaces")  # which may be false
_HARMLESS = r"token_type_count|\w+_token_ids?"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of token_type
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece
_BLANKS = (_SPACE, "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")  # a lone blank, also byte-level
_MOST_TOKENS = 1 << 24


def _package(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise ValueError(
            f"{purpose} needs the package {name}, and {missing} is not there; pip install {name}"
        ) from error


@contextlib.contextmanager
def _package_errors(what: str) -> Iterator[None]:
    """Turns what the package tokenizers raises into ValueError; a panic is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


class Tokenizer:
    """A tokenizer as models name it. encode() needs the package tokenizers."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads a tokenizer.json or a NAME.gguf. Raises OSError or ValueError."""
        self.path = os.fspath(path)
        self._rule: Any = None
        self._before: list[int] = []  # what the rule of a GGUF file does not add itself
        self._after: list[int] = []
        self._keys: dict[str, Any] = {}
        self._ids: dict[str, int] = {}
        read = self._read_gguf if self.path.endswith(".gguf") else self._read_json
        self.name, self.vocab_size = read()

    def encode(self, text: str) -> tuple[list[int], int]:
        """Tokens of a text, and the bytes of it that those after the first stand for."""
        ids, ends = self.encode_ends(text)
        return ids, ends[-1] - ends[0] if ids else 0

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text, and the bytes of it that the tokens up to each one stand for."""
        if self._rule is None:
            self._rule = self._gguf_rule() if self._keys else self._json_rule()
        with _package_errors(f"{self.path} cannot encode it"):
            encoding = self._rule.encode(text)
        ids = [*self._before, *encoding.ids, *self._after]
        ends = [0] * len(self._before)
        at = place = 0  # the same place of the text in characters and in bytes
        for _, end in encoding.offsets:
            if not ends:
                ends.append(_bytes_of_first(encoding, text))
                continue
            if end > at:
                place += len(text[at:end].encode())
                at = end
            ends.append(max(ends[-1], place))
        ends += [ends[-1]] * len(self._after) if ends else []
        if len(ids) > 1:
            ends[-1] = len(text.encode())
        return ids, ends

    def beginning(self) -> int:
        """The token that begins a document: bos of the model, or eos where it has none."""
        for which in ("bos", "eos"):
            if self._keys:
                token = self._key(f"{which}_token_id")
                found = token if isinstance(token, int) and 0 <= token < self.vocab_size else None
            else:
                token = self.settings().get(f"{which}_token")
                token = token.get("content") if isinstance(token, dict) else token
                found = self._ids.get(token) if isinstance(token, str) else None
            if found is not None:
                return found
        place = self.path if self._keys else self._settings_path()
        raise ValueError(f"{place} names no bos_token and no eos_token of {self.path}")

    def settings(self) -> dict[str, Any]:
        """What the tokenizer_config.json beside a tokenizer.json says, if it is there."""
        path = self._settings_path()
        if self._keys or not os.path.lexists(path):
            return {}
        with open(path, "rb") as file:
            data = file.read()
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        return found if isinstance(found, dict) else {}

    def _settings_path(self) -> str:
        return os.path.join(os.path.dirname(self.path), "tokenizer_config.json")

    def _read_json(self) -> tuple[str, int]:
        with open(self.path, "rb") as file:
            data = file.read()
        try:
            document = json.loads(data)
            vocabulary = document["model"]["vocab"]
            if isinstance(vocabulary, dict):
                listed = list(vocabulary.items())
            else:
                listed = [(entry[0], i) for i, entry in enumerate(vocabulary)]
            listed += [(t["content"], t["id"]) for t in document.get("added_tokens") or ()]
            tokens = {}
            for token, index in listed:
                if type(index) is not int or not 0 <= index < _MOST_TOKENS:
                    wanted = f"a whole number below {_MOST_TOKENS}"
                    raise ValueError(f"the id of {token!r} is {index!r}; wanted: {wanted}")
                tokens[index] = token.encode()
                self._ids[token] = index
            size = max(tokens) + 1
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{self.path} is no tokenizer.json: {shown}") from error
        return _name_of([tokens.get(index, b"") for index in range(size)]), size

    def _json_rule(self) -> Any:
        tokenizers = _package("tokenizers", "reading text")
        with _package_errors(self.path):
            rule = tokenizers.Tokenizer.from_file(self.path)
        rule.no_truncation()  # a tokenizer.json may ask for both
        rule.no_padding()
        return rule

    def _read_gguf(self) -> tuple[str, int]:
        self._keys = gguf_keys(self.path)
        tokens = self._list("tokens", bytes)
        return _name_of(tokens), len(tokens)

    def _key(self, name: str, otherwise: Any = None) -> Any:
        value = self._keys.get(f"tokenizer.ggml.{name}", otherwise)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def _list(self, name: str, of: type, otherwise: Any = None) -> list[Any]:
        value = self._key(name, otherwise)
        if not isinstance(value, list) or not value or not all(isinstance(x, of) for x in value):
            raise ValueError(f"{self.path}: tokenizer.ggml.{name} is no list of {of.__name__}")
        return value

    def _kind(self) -> Kind:
        """The kind of tokenizer; all keys are known to be read, or to change no token."""
        model, pre = self._key("model"), self._key("pre")
        if model not in ("gpt2", "llama"):
            raise ValueError(
                f"{self.path}: its tokenizer is of the kind {model!r}, which cannot be reproduced; "
                "wanted: gpt2 or llama"
            )
        if model == "gpt2" and pre not in KINDS:
            raise ValueError(
                f"{self.path}: its pre-tokenizer is {pre!r}, which cannot be reproduced; "
                f"wanted: {', '.join(KINDS)}"
            )
        kind = _BY_SCORES if model == "llama" else KINDS[pre]
        for key in self._keys:
            name = key.removeprefix("tokenizer.ggml.")
            off = name in _OFF and not self._key(name)
            read = name in _READ or (name == "add_space_prefix" and kind is _BY_SCORES)
            if name != key and not read and not off and not re.fullmatch(_HARMLESS, name):
                raise ValueError(f"{self.path}: {key} = {self._key(name)!r} is not supported")
        return kind

    def _gguf_rule(self) -> Any:
        kind = self._kind()
        tokenizers = _package("tokenizers", "reading text")
        with _package_errors(f"{self.path}: its tokenizer cannot be built"):
            tokens = [token.decode() for token in self._list("tokens", bytes)]
            types = self._list("token_type", int, [_NORMAL] * len(tokens))
            vocabulary = {token: index for index, token in enumerate(tokens)}
            if len(vocabulary) != len(tokens) or len(types) != len(tokens):
                counts = f"{len(tokens)} tokens, {len(vocabulary)} different, {len(types)} types"
                raise ValueError(f"its vocabulary has {counts}")
            if kind is _BY_SCORES:
                rule = self._by_scores(tokenizers, vocabulary, types)
            else:
                rule = self._byte_level(tokenizers, vocabulary, kind)
        rule.add_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=of_type != _USER_DEFINED)
                for token, of_type in zip(tokens, types)
                if of_type in (_CONTROL, _USER_DEFINED, _UNKNOWN)
            ]
        )
        self._before = self._added("bos", kind.begins)
        self._after = self._added("eos", False)
        return rule

    def _byte_level(self, tokenizers: Any, vocabulary: dict[str, int], kind: Kind) -> Any:
        """BPE on bytes, by a list of merges."""
        merges = [tuple(merge.decode().split(" ", 1)) for merge in self._list("merges", bytes)]
        model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=kind.ignore_merges)
        rule = tokenizers.Tokenizer(model)
        if kind.composes:
            rule.normalizer = tokenizers.normalizers.NFC()
        pre = tokenizers.pre_tokenizers
        steps = [pre.Split(tokenizers.Regex(split), "isolated") for split in kind.splits]
        rule.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(False, use_regex=False)])
        return rule

    def _by_scores(self, tokenizers: Any, vocabulary: dict[str, int], types: list[int]) -> Any:
        """SentencePiece's BPE: of adjacent tokens, the pair whose merge scores highest merges."""
        scores = self._list("scores", float)
        if len(scores) != len(vocabulary):
            raise ValueError(f"it has {len(scores)} scores for {len(vocabulary)} tokens")
        merges = []
        for token, index in vocabulary.items():
            for cut in range(1, len(token) if types[index] == _NORMAL else 0):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    order = (-scores[index], index, vocabulary[left])
                    merges.append((order, (left, right)))
        unknown = [token for token, index in vocabulary.items() if types[index] == _UNKNOWN]
        model = tokenizers.models.BPE(
            vocabulary,
            [merge for _, merge in sorted(merges)],
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
        rule = tokenizers.Tokenizer(model)
        normalizers = tokenizers.normalizers
        before = [normalizers.Prepend(_SPACE)] if self._key("add_space_prefix", True) else []
        rule.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
        return rule

    def _added(self, which: str, otherwise: bool) -> list[int]:
        """The token that begins or ends every document, if the file asks for it."""
        if not self._key(f"add_{which}_token", otherwise):
            return []
        token = self._key(f"{which}_token_id")
        if not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise ValueError(
                f"{self.path}: tokenizer.ggml.{which}_token_id is {token}; every document has it, "
                f"and it must be 0 to {self.vocab_size - 1}"
            )
        return [token]


def _name_of(tokens: list[bytes]) -> str:
    """Name of a tokenizer, as gyre-import gives it: of its tokens in the order of their ids."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(struct.pack("<Q", len(token)) + token)
    return "sha256:" + digest.hexdigest()


def _bytes_of_first(encoding: Any, text: str) -> int:
    """Bytes of the text that the first token stands for; none if it was added."""
    if encoding.tokens[0] in _BLANKS and not text.startswith((" ", encoding.tokens[0])):
        return 0  # a blank that the tokenizer puts before the text
    end = encoding.offsets[0][1]
    covered = len(text[:end].encode())
    if len(encoding.ids) > 1 and encoding.offsets[1][0] < end:
        # Tokens share a character: each of their letters is a byte, or <0xNN> is.
        token = encoding.tokens[0]
        return min(covered, 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token))
    return covered
