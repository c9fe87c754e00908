"""The cases of attention of inputs/golden/: small problems, each for one edge.

Queries, keys, values, gradients and sinks are multiples of 1/32 of at most 4: bfloat16, float16 and
float32 hold them exactly. make_attention.py has the arithmetic of the answers. Shapes: T = tokens,
H = query heads, K = KV heads, D = elements of a head.
"""

import functools

import numpy as np

import golden_files
import make_attention

CASES = []


def thirty_seconds(rng, *shape):
    """float32: about normal numbers, rounded to multiples of 1/32."""
    return (np.clip(np.round(32 * rng.standard_normal(shape)), -128, 128) / 32).astype("f4")


def make_problem(rng, lengths, heads, kv_heads, head_dim, mask="causal", window=0, scale=None,
                 sinks=False, regions=None, v_head_dim=None, shared=0, queries=None, selected=0, **arrays):
    """A problem as make_attention.py has them; functions in the place of `sinks`, and `arrays`,
    change what was drawn. With regions, the mask is of them. v_head_dim: elements of a head of
    values; without, those of keys. shared: the last elements of keys, which all heads share. queries:
    how many of the last tokens of each document have queries; without, all. selected: with the mask
    selected, how many keys a query selects."""
    tokens, v_head_dim = sum(lengths), v_head_dim or head_dim
    rows = tokens if queries is None else sum(queries)
    problem = {
        "mask": "regions" if regions else mask,
        "window": window,
        "scale": head_dim**-0.5 if scale is None else scale,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "q": thirty_seconds(rng, rows, heads, head_dim),
        "k": thirty_seconds(rng, tokens, kv_heads, head_dim - shared),
        "v": thirty_seconds(rng, tokens, kv_heads, v_head_dim),
        "d_out": thirty_seconds(rng, rows, heads, v_head_dim),
    }
    if queries is not None:
        problem["query_offsets"] = np.concatenate([[0], np.cumsum(queries)]).astype(np.int64)
    if shared:
        problem["k_shared"] = thirty_seconds(rng, tokens, shared)
    if sinks:
        drawn = thirty_seconds(rng, heads)
        problem["sinks"] = sinks(drawn) if callable(sinks) else drawn
    if selected:
        problem["selected_keys"] = select(rng, lengths, queries or lengths, selected)
    if regions:
        problem["regions"] = np.array(regions, np.int64)
    for name, change in arrays.items():
        problem[name] = change(problem[name]).astype("f4")
    return problem


def goodness(score, position):
    """The least one is the best: of equal scores, that of the first position."""
    return -score, position


def select(rng, lengths, queries, keys):
    """[queries, keys]: what an indexer of two heads of 4 elements selects. Its numbers are whole and
    small, so that scores are exact in every type, and many are equal."""
    rows = []
    for length, count in zip(lengths, queries):
        q, k = rng.integers(-2, 3, (length, 2, 4)), rng.integers(-1, 2, (length, 4))
        weights = rng.integers(1, 3, (length, 2))
        for t in range(length - count, length):
            scores = (weights[t] * np.maximum(k[: t + 1] @ q[t].T, 0)).sum(axis=1)
            best = sorted(range(t + 1), key=lambda s: goodness(scores[s], s))[:keys]
            rows.append(best + [-1] * (keys - len(best)))
    return np.array(rows, np.int32)


def write_problem(path, name, arguments, stores=None, only=None, answers_as="f8"):
    """Writes a gyre/attention file with its answers, or those named in `only`; `stores` maps names
    of inputs to types."""
    problem = make_problem(golden_files.generator(name), **arguments)
    answers = make_attention.answer(problem)
    answers = {key: answers[key].astype(answers_as) for key in only or answers}

    def fill(file):
        group = file.create_group("attention")
        group.attrs["mask"] = problem["mask"]
        group.attrs["window"] = np.int64(problem["window"])
        group.attrs["scale"] = np.float64(problem["scale"])
        arrays = ("offsets", "query_offsets", "q", "k", "k_shared", "v", "d_out", "sinks", "regions",
                  "selected_keys")
        golden_files.put_all(group, {key: problem[key] for key in arrays if key in problem}, stores)
        golden_files.put_all(golden_files.reference_group(file), answers)

    golden_files.write_case(path, "attention", fill)


def add(name, edge, guards, tags, lengths, heads, kv_heads, head_dim, stored=None, **more):
    """Adds a case; `stored` are options of write_problem."""
    name = "attention_" + name
    shape = {"lengths": lengths, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    write = functools.partial(write_problem, name=name, arguments=shape | more,
                              **(stored or {}))
    command = f"gyre-attention --input inputs/golden/{name}.h5 -n 1"
    CASES.append(golden_files.Case(name, "attention", edge, guards, write, (command,), tags))


def same_as_first(keys):
    """Every key of a head as the first one."""
    return np.broadcast_to(keys[:1], keys.shape)


def whole_with_16(vectors):
    """Whole numbers, the first of each vector 16: products of two have 256 in common."""
    whole = np.round(vectors)
    whole[..., 0] = 16
    return whole


def opposite_to_16(vectors):
    """The same with -16: products with those have -256 in common."""
    return whole_with_16(vectors) * np.where(np.arange(vectors.shape[2]) == 0, -1, 1)


def extreme(sinks):
    """One sink that outweighs all keys, one that none notices, and the others."""
    sinks[:2] = 64, -64
    return sinks


def beside_128(sinks):
    """Sinks about as large as scores of 128."""
    return sinks + 128


LAST = (
    "a causal mask through the first query and the first key, where the queries are the last tokens "
    "(FlashAttention before 2.1)"
)
GROUPS = "KV heads that are repeated or mixed up: query head h reads h K / H, rounded down"
WINDOW = "a window that is ignored or off by one (huggingface/accelerate #4177)"
SINKS = (
    "sinks that are ignored, or that every block or rank of a ring adds again "
    "(PrimeIntellect-ai/prime-rl #3397, InternLM/lmdeploy #3951)"
)
SINK_GRADIENTS = (
    "sinks whose gradient is 0, which no other value shows while a sink is small beside the scores "
    "(NVIDIA/TransformerEngine #2541, PR #3551)"
)
VALUES = (
    "values, outputs and their gradients that are padded to the width of keys, or read as if they had "
    "it; a scale of the values' width (NVIDIA/TransformerEngine #2719, #2868)"
)
SHARED = (
    "a gradient of the shared elements that lacks some heads or ranks, or is repeated by each of them; "
    "keys whose elements are in another order (pytorch/torchtitan PR #4313, PR #4760)"
)
MASKS = (
    "masks that context parallelism replaces by a causal one (huggingface/accelerate PR #4177, "
    "huggingface/trl PR #6843)"
)
SELECTED = (
    "another order of equally good keys, so that two ranks or kernels see other keys (ROCm/ATOM PR #1832, "
    "vllm-project/vllm-ascend PR #15053); "
    "positions in the stream taken for positions in the document; -1 read as the last key"
)
NO_KEY = (
    "rows without a key: -inf minus -inf, weights of exp(0), a part of a ring that is empty "
    "(flashinfer-ai/flashinfer PR #4401, NVIDIA/TensorRT-LLM #17477)"
)
OVERFLOW = "exp of scores before the maximum is subtracted"
EXCHANGE = (
    "query heads that meet other KV heads once ranks have exchanged tokens for heads: repeat for "
    "repeat_interleave, query and KV heads that are padded apart (vllm-project/vllm-omni PR #5716)"
)
TILES = (
    "NaN of a tile that a window hides from a row (vllm-project/vllm PR #4405); a window that every "
    "block of a ring counts from its own first row; a ring that stops a step too early"
)
BFLOAT16_SUMS = "sums in bfloat16, which 1 no longer changes from 256 on; an lse in bfloat16"

add("causal", "two documents, as many KV heads as query heads", "a key of another document or of "
    "the future", ("causal", "groups-1"), [9, 5], 2, 2, 8)
add("full", "every token sees its whole document", "a causal mask where there is none",
    ("full", "groups-2"), [7, 10], 4, 2, 8, mask="full")
add("groups_4", "four query heads read each KV head", GROUPS, ("causal", "groups-4"),
    [12], 8, 2, 8)
add("groups_8", "eight query heads read each KV head", GROUPS, ("causal", "groups-8"),
    [11], 16, 2, 4)
add("groups_3", "three query heads read each KV head", GROUPS + "; groups in powers of two "
    "(flashinfer-ai/flashinfer #140, PR #2684)", ("causal", "groups-3"), [9, 4], 6, 2, 4)
add("groups_7", "seven query heads read each KV head", GROUPS + "; groups in powers of two "
    "(flashinfer-ai/flashinfer #140, PR #2684)", ("causal", "groups-7"), [11], 14, 2, 4)
add("kv_heads_3", "three KV heads, which no even number of ranks divides, under twelve query heads",
    EXCHANGE, ("causal", "groups-4"), [10, 3], 12, 3, 4)
add("kv_heads_5", "five KV heads, which two to four ranks do not divide, under ten query heads",
    EXCHANGE, ("causal", "groups-2"), [9, 5], 10, 5, 4)
add("kv_heads_8", "eight KV heads under sixteen query heads: two and four ranks have several of them",
    EXCHANGE, ("causal", "groups-2"), [10, 6], 16, 8, 4)
add("one_kv_head", "all query heads read one KV head", GROUPS, ("causal", "groups-4", "mqa"),
    [6, 7], 4, 1, 8)
add("window_1", "a window of one token: each sees itself alone", WINDOW, ("causal", "window"),
    [8, 1], 2, 1, 8, window=1)
add("window_wide", "a window wider than every document", WINDOW, ("causal", "window"),
    [10, 6], 2, 1, 8, window=16)
add("window_sinks", "a window and sinks", WINDOW, ("causal", "window", "sinks"),
    [17, 3], 4, 2, 8, window=5, sinks=True)
add("window_documents", "a window of 7 tokens on documents of 40, 75 and 9", WINDOW,
    ("causal", "window", "long"), [40, 75, 9], 2, 1, 4, window=7)
add("window_long", "one document of 220 tokens, a window of 16, no sinks", TILES,
    ("causal", "window", "long"), [220], 2, 1, 4, window=16)
add("window_ranks", "a window of 100 of a document's 230 tokens: it reaches over several ranks", TILES,
    ("causal", "window", "long"), [230], 2, 1, 4, window=100)
add("sinks", "a sink for each head", SINKS, ("causal", "sinks"), [9, 4], 4, 2, 8, sinks=True)
add("sinks_full", "sinks without a causal mask", SINKS, ("full", "sinks"),
    [6, 5], 2, 2, 8, mask="full", sinks=True)
add("sinks_extreme", "a sink that outweighs all keys, and one that none notices", SINKS,
    ("causal", "sinks", "overflow"), [7, 1], 4, 4, 8, sinks=extreme)
add("sinks_far", "sinks of about 128 beside scores of about 1", "a maximum without the sink, whose exp overflows",
    ("causal", "sinks", "overflow"), [8, 4], 4, 2, 8, sinks=beside_128)
add("sinks_offset", "sinks about as large as the scores, both about 128", SINK_GRADIENTS,
    ("causal", "sinks", "overflow"), [10, 3], 4, 2, 8, scale=0.5, sinks=beside_128,
    q=whole_with_16, k=whole_with_16)
add("last_queries", "the last 5 to 30 tokens of documents have queries, and keys before them", LAST,
    ("causal", "queries"), [40, 9, 30, 6], 4, 2, 8, queries=[13, 5, 30, 0])
add("last_queries_window", "the last queries of documents through a window of 7, which does not reach the first keys",
    LAST, ("causal", "queries", "window"), [40, 9], 4, 2, 8, window=7, queries=[13, 4])
add("decode", "one query a document, sinks", LAST, ("causal", "queries", "sinks", "decode"),
    [23, 1, 12], 8, 2, 8, queries=[1, 1, 1], sinks=True)
# Regions: document, q_begin, q_end, k_begin, k_end, kind (0 all, 1 causal), window.
add("prefix", "two answers to one prompt: each sees the prompt and itself", MASKS,
    ("regions", "prefix"), [14, 3], 4, 2, 8, regions=[
        [0, 0, 5, 0, 5, 1, 0], [0, 5, 14, 0, 5, 0, 0], [0, 5, 9, 5, 9, 1, 0],
        [0, 9, 14, 9, 14, 1, 0], [1, 0, 3, 0, 3, 1, 0]])
add("prefix_long", "a prompt of 70 tokens and two answers to it, of 130 and 80: the second one does not "
    "see the first", MASKS + "; a loop over tiles that ends with the first hidden one",
    ("regions", "prefix", "long"), [280], 2, 1, 2, regions=[
        [0, 0, 70, 0, 70, 1, 0], [0, 70, 280, 0, 70, 0, 0], [0, 70, 200, 70, 200, 1, 0],
        [0, 200, 280, 200, 280, 1, 0]])
add("blocks", "blocks that see themselves alone, whole or causal, through a window, too", MASKS,
    ("regions", "blocks", "window"), [13, 6], 4, 2, 8, regions=[
        [0, 0, 4, 0, 4, 0, 0], [0, 4, 9, 4, 9, 1, 0], [0, 9, 13, 9, 13, 1, 2],
        [1, 0, 2, 0, 2, 0, 0], [1, 2, 6, 2, 6, 0, 0]])
add("no_key", "queries that see no key, in one document all of them", NO_KEY,
    ("regions", "no-key"), [11, 4, 6], 4, 2, 8, regions=[
        [0, 2, 7, 0, 4, 0, 0], [2, 3, 6, 0, 6, 1, 0]])
add("fewer_keys", "nine queries that see three keys, causal through the last of both", NO_KEY,
    ("regions", "no-key", "fewer-keys"), [9, 9], 4, 2, 8, regions=[
        [0, 0, 9, 0, 3, 1, 0], [1, 0, 9, 6, 9, 0, 0]])
add("selected", "each query sees the 6 keys that an indexer selects, or all up to its own position; many of the "
    "indexer's scores are equal", SELECTED, ("selected", "ties"), [37, 5, 0, 11], 4, 1, 8, mask="selected",
    selected=6, v_head_dim=6)
add("head_dim_1", "heads of one element", "kernels that load several elements at a time",
    ("causal", "head-dim"), [9], 2, 1, 1)
add("head_dim_3", "heads of three elements", "kernels that load several elements at a time",
    ("causal", "head-dim"), [9], 2, 1, 3)
add("head_dim_64", "heads of 64 elements", "tiles of one head dimension alone",
    ("causal", "head-dim"), [9], 2, 1, 64)
add("head_dim_128", "heads of 128 elements", "tiles of one head dimension alone",
    ("causal", "head-dim"), [7], 2, 1, 128)
add("values_narrow", "heads of 12 elements of queries and keys, 8 of values",
    VALUES, ("causal", "head-dim", "value-dim", "sinks"), [9, 5], 4, 2, 12, v_head_dim=8, sinks=True)
add("values_wide", "heads of 8 elements of queries and keys, 20 of values, a full mask",
    VALUES, ("full", "head-dim", "value-dim"), [11, 3], 2, 1, 8, v_head_dim=20, mask="full")
add("keys_shared", "the last 6 of 14 elements of a key are the same in all four KV heads", SHARED,
    ("causal", "head-dim", "value-dim", "shared-keys"), [9, 5], 4, 4, 14, v_head_dim=8, shared=6)
add("keys_shared_groups", "two KV heads, each of two query heads, share the last 2 of 6 elements of a key; a window, sinks",
    SHARED, ("causal", "window", "head-dim", "shared-keys", "sinks"), [11, 4], 4, 2, 6, shared=2,
    window=3, sinks=True)
add("uneven", "documents of 0 to 19 tokens, the first and the last one empty",
    "an empty document that ends a loop", ("causal", "empty-document", "one-token"),
    [0, 1, 0, 19, 1, 2, 0], 2, 1, 8)
add("uneven_full", "the same without a causal mask", "an empty document that ends a loop",
    ("full", "empty-document", "one-token"), [0, 1, 13, 1, 0], 2, 1, 8, mask="full")
add("long", "one document of 200 tokens", "a maximum that is not updated from block to block",
    ("causal", "long"), [200], 2, 1, 4)
add("tiles", "documents of 257 and 130 tokens: more rows and keys than tiles have",
    "a tile's keys that are left out, or counted for the document behind it",
    ("causal", "long"), [257, 130], 2, 1, 4)
add("equal_keys_long", "600 equal keys", BFLOAT16_SUMS, ("causal", "ties", "long"),
    [600], 1, 1, 2, k=same_as_first)
add("scale", "scores times 0.3, not by the root of the head's elements",
    "a scale that is taken for granted", ("causal", "scale"), [11], 2, 2, 16, scale=0.3)
add("large_scores", "scores of about 128, some apart", OVERFLOW, ("causal", "overflow"),
    [12, 4], 2, 1, 8, scale=0.5, q=whole_with_16, k=whole_with_16)
add("low_scores", "scores of about -128", "a running maximum that starts at 0, so that all weights are 0",
    ("causal", "overflow"), [9, 5], 2, 1, 8, scale=0.5, q=whole_with_16, k=opposite_to_16)
add("identical_keys", "equal keys, so that every output is a mean of values",
    "ties in the maximum", ("causal", "ties"), [8, 5], 2, 1, 8, k=same_as_first)
add("no_token", "no token at all", "a kernel without blocks", ("causal", "no-token"),
    [], 2, 1, 8)
add("types", "bfloat16, float16 and float64; some answers alone, in float32",
    "numbers that are read as another type", ("causal", "sinks", "bfloat16", "float16", "float64",
    "partial"), [6, 3], 2, 1, 8, sinks=True,
    stored={"stores": {"q": golden_files.BFLOAT16, "k": golden_files.BFLOAT16_WORDS, "v": "f2",
                       "d_out": "f8", "offsets": "i4"},
            "only": ("out", "d_k", "d_sinks"), "answers_as": "f4"})
