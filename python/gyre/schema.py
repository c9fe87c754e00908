"""The names that files of each schema have, and names that change what is computed.

Both tables are those of the programs (src/io/schemas/schema_names.cpp, which explains them); a test
compares them.
"""

import difflib
import math
import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import h5py

from . import operations
from .logprobs import ANSWERS

TABLES = {
    "gyre/documents": (
        "/documents @vocab_size @tokenizer tokens offsets names? text_bytes? unscored? "
        "/reference @model_sha256? @generator? offsets? logprob? entropy? hidden?"
    ),
    "gyre/model": (
        "/model @vocab_size @vocab_padded @hidden_size @num_hidden_layers @num_attention_heads "
        "@num_key_value_heads @head_dim @intermediate_size @rope_theta @rms_norm_eps "
        "@tokenizer? *"
    ),
    "gyre/results": (
        "/results @model_sha256 @input_sha256 @teacher_sha256? logprob entropy kl? offsets names? /packed @cp "
        "@bin_capacity bin_offsets document cu_seqlens cu_seqlens_padded /packed/prefixes "
        "tree_offsets~ nodes~ documents~"
    ),
    "gyre/packed": (
        "/packed @bin_capacity @slot_multiple @documents @vocab_size @hidden_size @tokenizer "
        "@algorithm bin_offsets document cu_seqlens cu_seqlens_padded ids~ embeddings~ labels "
        "positions names? /packed/prefixes tree_offsets~ nodes~ documents~ /packed/extras * "
        "/reference *"
    ),
    "gyre/shards": (
        "/shards @layout @cp @hidden_size @packed_sha256 bin_offsets slot_offsets index ids~ "
        "embeddings~ labels positions cu_seqlens cu_seqlens_padded /shards/extras *"
    ),
    "gyre/bshd": (
        "/bshd @vocab_size @sentinel~ @pad_id~ input_ids~ inputs_embeds~ labels position_ids~ "
        "seq_lens~ seq_lens_padded? /bshd/extras * /reference *"
    ),
    "gyre/salm": (
        "/salm @vocab_size @pad_id @placeholder_id input_ids inputs_embeds target_ids audio "
        "audio_offsets encoder /reference *"
    ),
    "gyre/row-shards": (
        "/row_shards @cp @tp @hidden_size @pad_positions @input_sha256? index? input_ids? "
        "inputs_embeds? key_mask? labels? position_ids?"
    ),
    "gyre/ulysses": (
        "/ulysses @ranks @heads @kv_heads @head_dim @input_sha256? slot_offsets? ids? "
        "positions? cu_seqlens? cu_seqlens_padded? q? kv? q_exchanged? kv_exchanged? "
        "out_token_major? d_kv? swapped_index? swapped_q? swapped_q_exchanged? "
        "swapped_q_ordered?"
    ),
    "gyre/encoder": (
        "/encoder @ranks @hidden_size @input_sha256? frame_offsets? encoder_rank? frames? "
        "d_frames? d_sum? d_split? d_none?"
    ),
    "gyre/attention": (
        "/attention @mask @window @scale offsets query_offsets~ q k k_shared~ v d_out regions~ selected_keys~ sinks~ "
        "/reference @generator? out? lse? d_q? d_k? d_k_shared? d_v? d_sinks? *"
    ),
    "gyre/recurrence": (
        "/recurrence @scale offsets q k v g beta~ conv_weight~ d_out /reference @generator? out? d_q? d_k? d_v? d_g? "
        "d_beta? d_conv_weight? *"
    ),
    "gyre/logprobs": (
        "/logprobs @vocab_size @temperature? @top_k? @top_p? @min_p? @projection_width~ offsets~ "
        "logits targets d_value? d_logprobs? d_entropies? temperature? top_k? top_p? min_p? "
        "sampling_mask_offsets~ sampling_mask_ids~ projection_offsets~ projection_columns~ "
        "projection_weights~ d_projected? ids~ d_ids? teacher? teacher_values? teacher_logprobs~ "
        "teacher_target_logprobs~ hidden~ head~ /reference @generator? *"
    ),
    "gyre/attention-results": "/results @input_sha256 offsets query_offsets? out lse d_q? d_k? d_k_shared? d_v? d_sinks?",
    "gyre/recurrence-results": "/results @input_sha256 offsets out d_q d_k d_v d_g d_beta?",
    "gyre/logprobs-results": "/results @input_sha256 @vocab_size @temperature @top_k @top_p @min_p *",
}
_PARAMETERS = " ".join(f"@{name}?" for name in operations.PARAMETERS)
TABLES["gyre/logprobs"] += " ".join(["", "/logprobs", *(f"{name}?" for name in operations.INPUTS), _PARAMETERS])
TABLES["gyre/logprobs-results"] += f" /results {_PARAMETERS}"

ALL = "/ @schema @schema_version @content_sha256? /provenance *"

# Whole words of a name, and the number that says that it changes nothing, if there is one.
MODIFIERS: dict[str, int | None] = {
    "softcap": 0,
    "soft_cap": 0,
    "softcapping": 0,
    "logit_cap": 0,
    "alibi": None,
    "bias": None,
    "relative_position": None,
    "dropout": 0,
    "dropout_p": 0,
    "scale": None,
    "scaling": None,
    "sm_scale": None,
    "qk_norm": None,
    "q_norm": None,
    "k_norm": None,
    "rope": None,
    "rotary": None,
    "sink": None,
    "sinks": None,
    "window": None,
    "window_size": None,
    "regions": None,
    "mask": None,
    "mask_mod": None,
    "score_mod": None,
    "causal": None,
    "is_causal": None,
    "chunk_size": 0,
    "cu_seqlens": None,
    "segment_ids": None,
    "temperature": 1,
    "temperatures": None,
    "top_k": 0,
    "top_p": 1,
    "top_a": 0,
    "min_p": 0,
    "typical_p": 1,
    "top_n_sigma": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "repetition_penalty": 1,
    "penalty": 0,
    "penalties": None,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "allowed_token_ids": None,
    "logit_scale": 1,
    "logits_scale": 1,
    "guidance_scale": 1,
    "label_smoothing": 0,
    "z_loss": 0,
}

OFF = ("none", "None", "null", "False", "false")


def places(schema: str) -> list[str]:
    """All names of a schema: "/logprobs/ids", "/logprobs@top_k", "/provenance/*"."""
    found, within = [], ""
    for word in f"{ALL} {TABLES[schema]}".split():
        if word.startswith("/"):
            within = word
        else:
            found.append(within + ("" if word.startswith("@") else "/") + word.rstrip("?~"))
    return found


def modifier_in(name: str) -> str | None:
    """The longest modifier whose words stand in a name."""
    words = "_" + re.sub(r"[^a-z0-9]", "_", name.lower()) + "_"
    return max((m for m in MODIFIERS if f"_{m}_" in words), key=len, default=None)


def is_neutral(value: Any, neutral: float) -> bool:
    """Whether a value says that its modifier changes nothing."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value == neutral
    return isinstance(value, str) and (value in OFF or value == f"{neutral:g}")


def _faults(file: h5py.File, known: Collection[str], plain: Any) -> Iterator[tuple[bool, str]]:
    """What is wrong with the names of a file: whether it is an error, and its text."""

    def unread(name: str, what: str, value: Any) -> tuple[bool, str]:
        last = name.rsplit("/", 1)[-1]
        modifier = modifier_in(last)
        names = sorted(re.split("[/@]", place)[-1] for place in known)
        meant = difflib.get_close_matches(last, names, 1)
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        neutral = None if modifier is None else MODIFIERS[modifier]
        if modifier is None or is_neutral(value, math.nan if neutral is None else neutral):
            return False, f"{what} is not read by the programs{hint}"
        return True, f"{what} changes what is computed, and nobody reads it; leave it out{hint}"

    def attributes(owner: str, item: h5py.HLObject) -> Iterator[tuple[bool, str]]:
        if f"{owner}/*" in known and not any(k.startswith(f"{owner}@") for k in known):
            return
        for name, value in item.attrs.items():
            front, value = "" if owner == "/" else owner, plain(value)
            if f"{owner}@{name}" in known:
                if not isinstance(value, bool | int | float | str):
                    shape = list(getattr(value, "shape", None) or ["empty"])
                    yield True, f"attribute {name!r} of {owner!r} is {shape}; it must be one value"
            elif name == "dtype" and owner in known:
                continue
            elif f"{front}/{name}" in known:
                yield True, f"'{front}/{name}' must be a dataset, and is an attribute of '{owner}'"
            else:
                yield unread(name, f"attribute {name!r} of {owner!r}", value)

    def look(above: str, group: h5py.Group) -> Iterator[tuple[bool, str]]:
        owner = above or "/"
        yield from attributes(owner, group)
        for name in group:
            place = f"{above}/{name}"
            inner = any(k.startswith((f"{place}/", f"{place}@")) for k in known)
            item = group.get(name) if place in known or inner else None
            if place in known and not isinstance(item, h5py.Dataset):
                yield True, f"'{place}' is no dataset; it must be one"
            elif place in known:
                yield from attributes(place, item)
            elif f"{owner}@{name}" in known:
                wanted = f"'{name}' must be an attribute of '{owner}'"
                yield True, f"{wanted}, and is a dataset or a group"
            elif inner and not isinstance(item, h5py.Group):
                yield True, f"'{place}' is no group; it must be one"
            elif inner:
                yield from look(place, item)
            elif f"{above}/*" not in known:
                yield unread(name, f"'{place}'", None)

    yield from look("", file)


def check_names(file: h5py.File, schema: str, plain: Any) -> None:
    """Refuses names that change what is computed and that nobody reads, and items of another kind.

    Other names that the schema does not have are warnings. `plain` makes a Python value of an
    attribute's. Models have names of their own: the programs refuse those that they do not compute.
    """
    if schema not in TABLES or schema == "gyre/model":
        return
    answers = ANSWERS if schema == "gyre/logprobs" else ()
    known = {*places(schema), *(f"/reference/{answer}" for answer in answers)}
    for is_error, text in _faults(file, known, plain):
        if is_error:
            raise ValueError(f"{file.filename}: {text}")
        warnings.warn(f"{file.filename}: {text}", stacklevel=3)
