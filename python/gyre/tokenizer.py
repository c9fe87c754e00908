"""Tokenizers of models: that of a tokenizer.json, and the one inside a GGUF file.

The rules are those of the package tokenizers, which texts need. That of a GGUF file is
built from its vocabulary, its merges and the kind of its pre-tokenizer, for the kinds of llama.cpp
(src/llama-vocab.cpp) that are in KINDS. The others are refused.
"""

import hashlib
import importlib
import json
import os
import re
import struct
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

# Keys of a GGUF file, behind "tokenizer.ggml.", that are read here or change no token.
_READ = ("model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token")
_HARMLESS = r"scores|token_type_count|\w+_token_ids?"
_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # of token_type


def _package(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise ValueError(
            f"{purpose} needs the package {name}, and {missing} is not there; pip install {name}"
        ) from error


class Tokenizer:
    """A tokenizer as models name it. encode() needs the package tokenizers."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads a tokenizer.json or a NAME.gguf. Raises OSError or ValueError."""
        self.path = os.fspath(path)
        self._rule: Any = None
        self._before: list[int] = []  # what the rule of a GGUF file does not add itself
        self._after: list[int] = []
        self._keys: dict[str, Any] = {}
        read = self._read_gguf if self.path.endswith(".gguf") else self._read_json
        self.name, self.vocab_size = read()

    def encode(self, text: str) -> tuple[list[int], int]:
        """Tokens of a text, and the bytes of it that those after the first stand for."""
        if self._rule is None:
            self._rule = self._gguf_rule() if self._keys else self._json_rule()
        encoding = self._rule.encode(text)
        ids = [*self._before, *encoding.ids, *self._after]
        of_first = 0 if self._before or not encoding.ids else _bytes_of_first(encoding, text)
        return ids, len(text.encode()) - of_first

    def _read_json(self) -> tuple[str, int]:
        with open(self.path, "rb") as file:
            data = file.read()
        try:
            document = json.loads(data)
            vocabulary = document["model"]["vocab"]
            listed = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
            ids = [*listed, *(token["id"] for token in document.get("added_tokens") or ())]
            size = max(ids) + 1
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} is no tokenizer.json: {error!r}") from error
        return "sha256:" + hashlib.sha256(data).hexdigest(), size

    def _json_rule(self) -> Any:
        tokenizers = _package("tokenizers", "reading text")
        try:
            rule = tokenizers.Tokenizer.from_file(self.path)
        except Exception as error:  # the package raises no narrower one
            raise ValueError(f"{self.path}: {error}") from error
        rule.no_truncation()  # a tokenizer.json may ask for both
        rule.no_padding()
        return rule

    def _read_gguf(self) -> tuple[str, int]:
        self._keys = gguf_keys(self.path)
        tokens = self._list("tokens", bytes)
        digest = hashlib.sha256()
        for token in tokens:
            digest.update(struct.pack("<Q", len(token)) + token)
        return "sha256:" + digest.hexdigest(), len(tokens)

    def _key(self, name: str, otherwise: Any = None) -> Any:
        value = self._keys.get(f"tokenizer.ggml.{name}", otherwise)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def _list(self, name: str, of: type, otherwise: Any = None) -> list[Any]:
        value = self._key(name, otherwise)
        if not isinstance(value, list) or not value or not all(isinstance(x, of) for x in value):
            raise ValueError(f"{self.path}: tokenizer.ggml.{name} is no list of {of.__name__}")
        return value

    def _kind(self) -> Kind:
        model, pre = self._key("model"), self._key("pre")
        if model != "gpt2":
            raise ValueError(
                f"{self.path}: its tokenizer is of the kind {model!r}, which cannot be reproduced; "
                "wanted: gpt2, or the model's tokenizer.json"
            )
        if pre not in KINDS:
            raise ValueError(
                f"{self.path}: its pre-tokenizer is {pre!r}, which cannot be reproduced; "
                f"wanted: {', '.join(KINDS)}, or the model's tokenizer.json"
            )
        for key in self._keys:
            name = key.removeprefix("tokenizer.ggml.")
            off = name == "add_space_prefix" and not self._key(name)
            known = name in _READ or off or re.fullmatch(_HARMLESS, name)
            if key.startswith("tokenizer.ggml.") and not known:
                raise ValueError(f"{self.path}: {key} = {self._key(name)!r} is not supported")
        return KINDS[pre]

    def _gguf_rule(self) -> Any:
        tokenizers = _package("tokenizers", "reading text")
        kind = self._kind()
        try:
            tokens = [token.decode() for token in self._list("tokens", bytes)]
            vocabulary = {token: index for index, token in enumerate(tokens)}
            merges = [tuple(m.decode().split(" ", 1)) for m in self._list("merges", bytes)]
            types = self._list("token_type", int, [1] * len(tokens))
            model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=kind.ignore_merges)
        except Exception as error:  # the package raises no narrower one
            raise ValueError(f"{self.path}: its tokenizer is damaged: {error!r}") from error
        if len(vocabulary) != len(tokens) or len(types) != len(tokens):
            counts = f"{len(tokens)} tokens, {len(vocabulary)} different ones, {len(types)} types"
            raise ValueError(f"{self.path}: its vocabulary has {counts}")
        rule = tokenizers.Tokenizer(model)
        if kind.composes:
            rule.normalizer = tokenizers.normalizers.NFC()
        steps = [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
            for split in kind.splits
        ]
        bytes_as_letters = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
        rule.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, bytes_as_letters])
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


def _bytes_of_first(encoding: Any, text: str) -> int:
    """Bytes of the text that the first token stands for; none if it was added."""
    end = encoding.offsets[0][1]
    covered = len(text[:end].encode())
    if len(encoding.ids) > 1 and encoding.offsets[1][0] < end:
        # Tokens share a character: each of their letters is a byte, or <0xNN> is.
        token = encoding.tokens[0]
        return min(covered, 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token))
    return covered
