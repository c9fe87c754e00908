"""The cases of recurrences of inputs/golden/: small problems, each for one edge.

Queries, keys, values and gradients are multiples of 1/32: bfloat16, float16 and float32 hold them
exactly. Decays and strengths are multiples of 1/64. Answers are those of the definition below, token
by token in float64. Shapes: T = tokens, K = key heads, H = heads of values, D, E = elements of a head
of keys and of values.
"""

import functools
import itertools

import numpy as np

import golden_files

CASES = []


def convolved(problem, name, channels, rows):
    """What a convolution makes of the rows of a document, [tokens, heads, elements] float64: y, and a
    function of dy that returns dx and the gradient of the weights of its channels."""
    x = problem[name][rows].astype("f8")
    weight = problem["conv_weight"][channels].astype("f8").reshape(*x.shape[1:], -1)
    width = weight.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, *x.shape[1:])), x])
    taps = np.stack([padded[j : j + len(x)] for j in range(width)], axis=-1)
    z = np.sum(weight * taps, axis=-1)
    sigmoid = 1 / (1 + np.exp(-z))
    s = z * sigmoid
    root = np.sqrt(np.sum(s * s, axis=-1, keepdims=True) + 1e-6) if name != "v" else np.ones((1, 1, 1))
    y = s / root

    def backward(d_y):
        d_s = (d_y - y * np.sum(y * d_y, axis=-1, keepdims=True)) / root if name != "v" else d_y
        d_z = d_s * sigmoid * (1 + z * (1 - sigmoid))
        d_padded = np.zeros_like(padded)
        for j in range(width):
            d_padded[j : j + len(x)] += weight[..., j] * d_z
        return d_padded[width - 1 :], np.sum(d_z[..., None] * taps, axis=0).reshape(-1, width)

    return y, backward


def states_of(problem, key_head, head, rows):
    """The states [rows + 1, D, E] of a head over a document, before its tokens and behind the last,
    the decayed states, and the residuals that the updates are beta times."""
    k, v = problem["k"][rows, key_head].astype("f8"), problem["v"][rows, head].astype("f8")
    decay = np.exp(problem["g"][rows, head].astype("f8")).reshape(len(k), -1, 1)
    states, decayed, residuals = [np.zeros((k.shape[1], v.shape[1]))], [], []
    for t in range(len(k)):
        decayed.append(decay[t] * states[-1])
        kept = decayed[-1].T @ k[t] if "beta" in problem else 0
        residuals.append(v[t] - kept)
        strength = problem["beta"][rows, head][t].astype("f8") if "beta" in problem else 1.0
        states.append(decayed[-1] + np.outer(k[t], strength * residuals[-1]))
    return states, decayed, residuals


def answer_head(problem, key_head, head, rows, found):
    """Adds the answers of one head over one document to `found`."""
    scale = problem["scale"]
    q, k = (problem[name][rows, key_head].astype("f8") for name in "qk")
    d_out = problem["d_out"][rows, head].astype("f8")
    states, decayed, residuals = states_of(problem, key_head, head, rows)
    decay = np.exp(problem["g"][rows, head].astype("f8")).reshape(len(q), -1, 1)
    first = rows.start
    gradient = np.zeros_like(states[0])  # of the state behind token t
    for t in reversed(range(len(q))):
        found["out"][first + t, head] = scale * states[t + 1].T @ q[t]
        found["d_q"][first + t, key_head] += scale * states[t + 1] @ d_out[t]
        gradient = gradient + scale * np.outer(q[t], d_out[t])
        d_update = gradient.T @ k[t]
        strength = problem["beta"][first + t, head].astype("f8") if "beta" in problem else 1.0
        found["d_v"][first + t, head] = strength * d_update
        found["d_k"][first + t, key_head] += gradient @ (strength * residuals[t])
        if "beta" in problem:
            found["d_beta"][first + t, head] = d_update @ residuals[t]
            found["d_k"][first + t, key_head] -= decayed[t] @ (strength * d_update)
            gradient = gradient - np.outer(k[t], strength * d_update)
        of_channels = np.sum(gradient * decayed[t], axis=1)
        found["d_g"][first + t, head] = of_channels if decay.shape[1] > 1 else of_channels.sum()
        gradient = decay[t] * gradient


def answer(problem):
    """All answers, float64."""
    if "conv_weight" not in problem:
        return answer_recurrence(problem)
    inner = {name: array for name, array in problem.items() if name != "conv_weight"}
    inner |= {name: np.zeros(problem[name].shape) for name in "qkv"}
    sizes = [problem[name][0].size for name in "qkv"]
    ends = np.cumsum([0, *sizes])
    parts = []
    for begin, end in itertools.pairwise(problem["offsets"]):
        for name, first, last in zip("qkv", ends[:-1], ends[1:]):
            rows, channels = slice(begin, end), slice(first, last)
            inner[name][rows], backward = convolved(problem, name, channels, rows)
            parts.append((name, rows, channels, backward))
    found = answer_recurrence(inner)
    found["d_conv_weight"] = np.zeros(problem["conv_weight"].shape)
    for name, rows, channels, backward in parts:
        found["d_" + name][rows], d_weight = backward(found["d_" + name][rows])
        found["d_conv_weight"][channels] += d_weight
    return found


def answer_recurrence(problem):
    """The answers of the recurrence alone."""
    found = {"out": np.zeros(problem["v"].shape)}
    for name in ("q", "k", "v", "g", "beta"):
        if name in problem:
            found["d_" + name] = np.zeros(problem[name].shape)
    heads, key_heads = problem["v"].shape[1], problem["q"].shape[1]
    offsets = problem["offsets"]
    for begin, end in zip(offsets[:-1], offsets[1:]):
        for head in range(heads) if end > begin else ():
            answer_head(problem, head * key_heads // heads, head, slice(begin, end), found)
    return found


def exact(rng, *shape, size=1.0):
    """float32: about normal numbers of this size, rounded to multiples of 1/32."""
    return (np.clip(np.round(32 * size * rng.standard_normal(shape)), -128, 128) / 32).astype("f4")


def make_problem(rng, lengths, key_heads, heads, key_dim, value_dim, channels=False, delta=True,
                 decay=0.1, conv=0, scale=None, **arrays):
    """A problem; functions in `arrays` change what was drawn. channels: a decay of each channel of
    the keys. decay: the mean of -g. conv: the width of a convolution. scale: another than 1 / sqrt(key_dim)."""
    tokens = sum(lengths)
    problem = {
        "scale": key_dim**-0.5 if scale is None else scale,
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "q": exact(rng, tokens, key_heads, key_dim, size=key_dim**-0.5),
        "k": exact(rng, tokens, key_heads, key_dim, size=key_dim**-0.5),
        "v": exact(rng, tokens, heads, value_dim),
        "g": -np.round(64 * rng.exponential(decay, (tokens, heads, key_dim)[: 3 if channels else 2])) / 64,
        "beta": np.round(64 * rng.uniform(0, 1, (tokens, heads))) / 64,
        "d_out": exact(rng, tokens, heads, value_dim),
    }
    # With beta |k|^2 above 2 the delta rule makes states grow.
    long = np.sum(problem["k"].astype("f8") ** 2, axis=-1, keepdims=True) > 1.9
    problem["k"] = np.where(long, np.round(16 * problem["k"]) / 32, problem["k"])
    if not delta:
        del problem["beta"]
    if conv:
        problem |= {"q": exact(rng, *problem["q"].shape), "k": exact(rng, *problem["k"].shape)}
        problem["conv_weight"] = exact(rng, 2 * key_heads * key_dim + heads * value_dim, conv, size=conv**-0.5)
    for name, change in arrays.items():
        problem[name] = change(problem[name])
    return {k: v.astype("f4") if isinstance(v, np.ndarray) and v.dtype != np.int64 else v
            for k, v in problem.items()}


def write_problem(path, name, arguments):
    """Writes a gyre/recurrence file with its answers."""
    problem = make_problem(golden_files.generator(name), **arguments)

    def fill(file):
        group = file.create_group("recurrence")
        group.attrs["scale"] = np.float64(problem["scale"])
        golden_files.put_all(group, {k: v for k, v in problem.items() if k != "scale"})
        golden_files.put_all(golden_files.reference_group(file), answer(problem))

    golden_files.write_case(path, "recurrence", fill)


def add(name, edge, guards, tags, lengths, key_heads, heads, key_dim, value_dim, options="", **more):
    """Adds a case, which the program runs with these options too."""
    name = "recurrence_" + name
    shape = {"lengths": lengths, "key_heads": key_heads, "heads": heads, "key_dim": key_dim,
             "value_dim": value_dim}
    write = functools.partial(write_problem, name=name, arguments=shape | more)
    command = f"gyre-recurrence --input inputs/golden/{name}.h5 --schedule all{options} -n 1"
    CASES.append(golden_files.Case(name, "recurrence", edge, guards, write, (command,), tags))


def nothing(array):
    """0 everywhere."""
    return np.zeros_like(array)


LAYOUTS = " --layout all --stripe 6"
PARTS = (
    "a rank's second part of a document that goes on from its first; maps that are composed in the order of ranks, not of "
    "tokens; one map a rank"
)
HEADS = (
    "decays and strengths of another rank's heads; tokens that are not put in the order of their document when they arrive; "
    "results that go home to other rows"
)
FORMULA = "a wrong formula; a decay that is applied behind the update, or to the output of its own token"
RESET = (
    "a state that is not 0 where a document begins; `cu_seqlens` divided by the ranks; what is "
    "consecutive in the stream taken for what is in a document"
)
CHAIN = (
    "maps that are composed in the wrong order, or without the second one, over two ranks and more; "
    "states and maps that are composed in bfloat16"
)
IDENTITY = (
    "ranks whose document ends with them, or that have no tokens, and that pass on a state all the "
    "same, or nothing where the others wait"
)
GROUPS = "heads of values that read another head of keys; gradients of keys that lack some of their heads"

add("gdn", "nothing unusual: gated delta rule, a decay of each head", FORMULA, ("gdn",),
    [70], 2, 4, 8, 6)
add("kda", "nothing unusual: delta rule, a decay of each channel of the keys", FORMULA, ("kda",),
    [70], 2, 2, 8, 6, channels=True)
add("ssd", "nothing unusual: a decay of each head, no delta rule (Mamba-2)", FORMULA, ("ssd",),
    [70], 1, 4, 8, 6, delta=False)
add("gla", "nothing unusual: a decay of each channel, no delta rule", FORMULA, ("gla",),
    [70], 2, 2, 8, 6, channels=True, delta=False)
add("documents", "documents of 1, 0, 5, 40, 0, 2 and 24 tokens", RESET, ("documents", "gdn"),
    [1, 0, 5, 40, 0, 2, 24], 1, 2, 8, 6)
add("documents_channels", "the same with a decay of each channel", RESET, ("documents", "kda"),
    [1, 0, 5, 40, 0, 2, 24], 1, 2, 8, 6, channels=True)
add("chain", "one document whose state lasts: every rank's map matters to those behind it", CHAIN,
    ("chain", "gdn"), [96], 1, 2, 8, 6, decay=0.005)
add("chain_channels", "the same with a decay of each channel", CHAIN, ("chain", "kda"),
    [96], 1, 2, 8, 6, channels=True, decay=0.005)
add("two_parts", "documents of which a rank may have two parts, with those of others between", PARTS, ("layouts", "gdn"),
    [96, 37, 1], 1, 2, 8, 6, options=LAYOUTS, decay=0.005)
add("two_parts_channels", "the same with a decay of each channel", PARTS, ("layouts", "kda"),
    [96, 37, 1], 1, 2, 8, 6, options=LAYOUTS, channels=True, decay=0.005)
add("eight_heads", "8 heads of keys and 16 of values, which 2, 4 and 8 ranks divide", HEADS, ("heads", "gdn"),
    [29, 0, 7], 8, 16, 4, 3, options=LAYOUTS)
add("eight_heads_ssd", "the same without the delta rule", HEADS, ("heads", "ssd"),
    [29, 0, 7], 8, 16, 4, 3, options=LAYOUTS, delta=False)
add("boundaries", "documents that end where ranks of 2, 3, 4 and 6 end, and one that goes on", IDENTITY,
    ("ranks", "gdn"), [12, 12, 8, 4, 0, 12, 18, 6], 1, 2, 8, 6, decay=0.02)
add("few_tokens", "3 tokens: ranks without any", IDENTITY, ("ranks", "gdn"), [3], 1, 2, 8, 6)
add("groups", "6 heads of values over 2 of keys", GROUPS, ("groups", "gdn"), [40], 2, 6, 8, 5)
add("groups_of_one_key", "5 heads of values over 1 of keys, no delta rule", GROUPS, ("groups", "ssd"),
    [40], 1, 5, 8, 5, delta=False)
add("scale", "a scale of 0.75: neither 1 nor 1 / sqrt(D)", "1 / sqrt(D), or 1, whatever was asked for", ("scale", "gdn"),
    [40], 1, 2, 8, 6, scale=0.75)
add("no_decay", "g = 0: a state that keeps all", "a decay of 0 for one of 1; log(0)", ("gdn",),
    [80], 1, 1, 8, 6, g=nothing)
add("strong_decay", "decays of exp(-40) and less, between others",
    "quotients of products of decays: 0/0, or infinite", ("kda",), [80], 1, 2, 8, 6, channels=True,
    g=lambda g: np.where(np.arange(g.shape[0])[:, None, None] % 5 == 3, g - 40, g))
add("strength_0_1_2", "beta of 0, of 1 and of up to 2 / |k|²",
    "strengths that are clamped to 1: states with negative eigenvalues", ("gdn",), [80], 1, 2, 8, 6,
    beta=lambda beta: np.choose(np.arange(beta.shape[0])[:, None] % 3, [0 * beta, 0 * beta + 1, 1 + beta / 64]))

CONVOLUTION = (
    "weights in another order; SiLU or the normalisation left out; gradients of histories that are not sent "
    "back and added; gradients of weights of one rank, or without the tokens of a history"
)
HISTORY = "a history that is another document's; `cu_seqlens` divided by the ranks"
SHORT = "histories that come from the rank before alone: some of their tokens lie further ahead"

add("conv", "a convolution of 4 tokens before the recurrence", CONVOLUTION, ("convolution", "gdn"),
    [70], 2, 4, 8, 6, conv=4)
add("conv_channels", "the same with a decay of each channel, of 2 tokens", CONVOLUTION, ("convolution", "kda"),
    [70], 1, 2, 8, 6, channels=True, conv=2)
add("conv_no_delta", "no delta rule, a convolution of 3 tokens (Mamba-2)", CONVOLUTION, ("convolution", "ssd"),
    [70], 1, 4, 8, 6, delta=False, conv=3)
add("conv_one", "a convolution of one token: no history", CONVOLUTION, ("convolution", "gdn"), [20], 1, 2, 8, 6, conv=1)
add("conv_documents", "documents of 1, 0, 5, 40, 0, 2 and 24 tokens, a convolution of 4", HISTORY,
    ("convolution", "documents"), [1, 0, 5, 40, 0, 2, 24], 1, 2, 8, 6, conv=4)
add("conv_short_parts", "13 tokens and a convolution of 8: a history is on several ranks", SHORT,
    ("convolution", "ranks"), [11, 2], 1, 2, 8, 6, conv=8)
add("conv_boundaries", "the documents of recurrence_boundaries, a convolution of 3 tokens", HISTORY,
    ("convolution", "ranks"), [12, 12, 8, 4, 0, 12, 18, 6], 1, 2, 8, 6, decay=0.02, conv=3)
add("conv_zero_rows", "queries and keys of 0, which are divided by their length",
    "0/0; the 1e-6 under the root left out, or outside of it", ("convolution", "gdn"), [30], 1, 2, 8, 6, conv=4,
    q=lambda q: np.where(np.arange(q.shape[0])[:, None, None] // 5 % 2 == 0, 0, q),
    k=lambda k: np.where(np.arange(k.shape[0])[:, None, None] // 6 % 2 == 0, 0, k))
