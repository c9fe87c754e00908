"""What check.py takes: the suite in plain float32 NumPy, as an example and as a test of check.py.

Every function takes a problem (check.py says what is in it) and returns one array. Shapes: T =
tokens, V = vocabulary, K = ids of a token, H and KV = heads, D = elements of a head, L = slots of a
rank, N = segments. Nothing here is fast.
"""

import numpy as np

F = np.float32
MINUS_INFINITY = F(-np.inf)


def log_softmax(x):
    """float32 log p of the rows [..., V]."""
    x = x - x.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True, dtype=F))


def plogp(logp):
    """p log p, 0 where p is 0."""
    p = np.exp(logp)
    return p * np.where(p > 0, logp, F(0))


class Row:
    """What functions of log-probabilities share."""

    def __init__(self, problem, heat=None, source="logits"):
        self.problem, self.vocab = problem, int(problem["vocab_size"])
        self.z = problem[source][:, : self.vocab].astype(F)
        self.heat = self.numbers("temperature") if heat is None else F(heat)
        self.x = self.z / self.heat
        self.logp = log_softmax(self.x)
        self.g = problem["d_value"].astype(F)[:, None]
        self.g_entropy = problem.get("d_entropies", problem["d_value"]).astype(F)[:, None]
        self.g_ids = problem.get("d_ids", self.g).astype(F)  # [T, K], or [T, 1]: the same for all ids

    def numbers(self, name):
        """[T, 1]: the number of each row, also where it is one of all rows."""
        return np.broadcast_to(self.problem[name], len(self.z)).astype(F)[:, None]

    def at(self, values, ids, nobody):
        """values [T, V] at ids [T, K]."""
        there = (ids >= 0) & (ids < self.vocab)
        found = np.take_along_axis(values, np.where(there, ids, 0), axis=1)
        return np.where(there, found, F(nobody))

    def one_hot(self, ids, weights=F(1)):
        """[T, V]: the sum of the weights, [T, K] or [T, 1], of the ids [T, K] that each column is."""
        of_ids = np.broadcast_to(weights, ids.shape)[:, :, None]
        return np.where(ids[:, :, None] == np.arange(self.vocab), of_ids, F(0)).sum(axis=1, dtype=F)

    def gradient(self, ids, g=None, logp=None):
        """[T, V]: of sum_t sum_k g_tk log p(ids_tk); g [T, K] or [T, 1]."""
        g, logp = self.g if g is None else g, self.logp if logp is None else logp
        total = np.broadcast_to(g, ids.shape).sum(axis=1, keepdims=True, dtype=F)
        return (self.one_hot(ids, g) - total * np.exp(logp)) / self.heat

    def entropy(self):
        return -plogp(self.logp).sum(axis=1)

    def d_entropy(self):
        p = np.exp(self.logp)
        inner = np.where(p > 0, self.logp, F(0)) + self.entropy()[:, None]
        return -self.g_entropy * p * inner / self.heat

    def targets(self):
        return self.problem["targets"][:, None]


def kept(row):
    """[T, V] booleans: what all filters leave."""
    limits = [row.numbers(name)[:, 0] for name in ("top_k", "top_p", "min_p")]
    left = np.ones(row.z.shape, bool)
    for x, z, mask, heat, top_k, top_p, min_p in zip(row.x, row.z, left, row.numbers("temperature"), *limits):
        if top_k:
            mask &= z >= np.sort(z)[-int(top_k)]
        mask &= np.exp(x - x.max()) >= min_p
        if top_p < 1:
            p = np.exp(log_softmax(np.where(mask, z, MINUS_INFINITY) / heat))
            order = np.lexsort((-np.arange(z.size), -z))  # of equal ones the higher id first
            before = np.cumsum(p[order]) - p[order]
            mask[order[1:]] &= before[1:] < top_p
    return left


def among_kept(row, ids, g=None):
    """[T]: log p of ids [T, 1] among what all filters leave; with g the gradient, [T, V]."""
    mask = kept(row)
    logp = log_softmax(np.where(mask, row.z, MINUS_INFINITY) / row.heat)
    values = row.at(logp, ids, -np.inf)
    if g is None:
        return values[:, 0]
    return np.where(mask, row.gradient(np.where(np.isfinite(values), ids, -1), g, logp), F(0))


def filtered(problem, gradient):
    row = Row(problem)
    return among_kept(row, row.targets(), row.g if gradient else None)


def among_sampled(problem, gradient):
    """Log p of the targets among the ids that a sampler kept."""
    row, bounds = Row(problem), problem["sampling_mask_offsets"]
    mask = np.zeros(row.z.shape, bool)
    for kept_ids, mine in zip(np.split(problem["sampling_mask_ids"], bounds[1:-1]), mask):
        mine[kept_ids] = True
    x = np.where(mask, row.x, MINUS_INFINITY)
    some = mask.any(axis=1)
    logp = np.full(x.shape, MINUS_INFINITY)
    logp[some] = log_softmax(x[some])
    ids = row.targets()
    values = row.at(logp, ids, -np.inf)
    if not gradient:
        return values[:, 0]
    return np.where(mask, row.gradient(np.where(np.isfinite(values), ids, -1), row.g, logp), F(0))


def projected(problem, gradient):
    """Probabilities, summed with weights into other columns."""
    row, width = Row(problem), problem["projection_width"]
    p, ids = np.exp(row.logp), np.repeat(np.arange(row.z.shape[1]), np.diff(problem["projection_offsets"]))
    columns, weights = problem["projection_columns"], problem["projection_weights"].astype(F)
    if not gradient:
        values = np.zeros((width, len(p)), F)
        np.add.at(values, columns, (p[:, ids] * weights).T)
        return values.T
    above = problem.get("d_projected", np.repeat(row.g, width, axis=1)).astype(F)
    by_p = np.zeros((p.shape[1], len(p)), F)
    np.add.at(by_p, ids, (above[:, columns] * weights).T)
    return p * (by_p.T - (p * by_p.T).sum(axis=1, keepdims=True)) / row.heat


def next_tokens(problem, gradient, under_filter=False):
    row, offsets = Row(problem), problem["offsets"]
    following, counts = np.full((len(row.z), 1), -1), np.zeros_like(row.g)
    rows = [slice(b, max(b, e - 1)) for b, e in zip(offsets[:-1], offsets[1:])]
    for mine in rows:
        following[mine, 0] = problem["targets"][mine.start + 1 : mine.stop + 1]
        counts[mine] = row.g[mine]
    if gradient:
        if under_filter:
            return among_kept(row, following, counts)
        return row.gradient(following, counts)
    flat = among_kept(row, following) if under_filter else row.at(row.logp, following, 0)[:, 0]
    values = np.zeros((len(rows), max([0, *(x.stop - x.start for x in rows)])), F)
    for out, mine in zip(values, rows):
        out[: mine.stop - mine.start] = flat[mine]
    return values


def rollouts(problem, gradient):
    """The first sequence is a prompt, whose last row predicts the first token of every other."""
    row, offsets, ids = Row(problem), problem["offsets"], Row(problem).targets()
    before = np.arange(len(row.z)) - 1
    before[[begin for begin in offsets[1:-1] if begin < len(before)]] = offsets[1:2] - 1
    if not gradient:
        return np.where(before < 0, F(0), row.at(row.logp[before], ids, 0)[:, 0])
    total = np.zeros(row.z.shape, F)
    for t in np.flatnonzero(before >= 0):  # a row has as many as it predicts
        asked, counts = np.full_like(ids, -1), np.zeros_like(row.g)
        asked[before[t]], counts[before[t]] = ids[t], row.g[t]
        total += row.gradient(asked, counts)
    return total


def largest(problem, ids, count=None):
    """[T, K], or as many as `count` says."""
    row = Row(problem)
    count = problem["ids"].shape[1] if count is None else count
    order = np.argsort(-row.z, axis=1, kind="stable")[:, :count]
    return order if ids else np.take_along_axis(row.z, order, axis=1)


def of_every_id(row):
    g = row.problem["d_logprobs"].astype(F)
    return (g - np.exp(row.logp) * g.sum(axis=1, keepdims=True)) / row.heat


def soft_targets(problem, gradient):
    row, teacher = Row(problem, 1), Row(problem, 1, "teacher")
    p = np.exp(teacher.logp)
    if gradient:
        return row.g * (np.exp(row.logp) - p)
    return -np.where(p > 0, p * np.where(p > 0, row.logp, F(0)), F(0)).sum(axis=1)


def distilled(problem, what, among=False):
    row, ids = Row(problem, 1), problem["ids"]
    if what == "teacher":
        if "teacher_values" in problem:
            return log_softmax(problem["teacher_values"].astype(F))
        return log_softmax(row.at(Row(problem, 1, "teacher").z, ids, 0))
    if what == "entropy":
        return row.entropy()
    values = log_softmax(row.at(row.z, ids, 0)) if among else row.at(row.logp, ids, 0)
    if what == "student":
        return values
    if not among:
        return row.gradient(ids, row.g_ids) + row.d_entropy()
    out = np.zeros_like(row.z)
    g = np.broadcast_to(row.g_ids, ids.shape)
    places = g - g.sum(axis=1, keepdims=True, dtype=F) * np.exp(values)
    np.add.at(out, (np.arange(len(out))[:, None], ids), places)
    return out


def divergence(problem, constant=None):
    """[T]: of the largest ids and a sampled tail; with a constant, a gradient, [T, V]."""
    row, ids, target = Row(problem, 1), problem["ids"], problem["targets"][:, None]
    if "teacher_logprobs" in problem:
        log_p = problem["teacher_logprobs"].astype(F)
        of_target = problem["teacher_target_logprobs"].astype(F)[:, None]
    else:
        teacher = Row(problem, 1, "teacher").logp
        ids = np.argsort(-row.z, axis=1, kind="stable")[:, : ids.shape[1]]
        log_p, of_target = row.at(teacher, ids, 0), row.at(teacher, target, 0)
    tail = (target >= 0) & (target < row.vocab) & (ids != target).all(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        q, log_q, sampled = np.exp(row.logp), row.at(row.logp, ids, 0), row.at(row.logp, target, 0)
        gaps = np.where(np.isneginf(log_q), F(0), log_q - log_p)
        rest = np.where(tail, np.where(np.isneginf(sampled), MINUS_INFINITY, sampled - of_target), F(0))
        if constant is None:
            return (row.at(q, ids, 0) * gaps).sum(axis=1) + rest[:, 0]
        slopes = np.zeros_like(row.z)
        np.put_along_axis(slopes, ids, row.at(q, ids, 0) * (gaps + 1), axis=1)
        slopes += row.one_hot(target) * np.where(tail, rest + F(constant), F(0))
        return row.g * (slopes - q * slopes.sum(axis=1, keepdims=True))


def linear(problem, what):
    x, w = problem["hidden"].astype(F), problem["head"].astype(F)
    row = Row(problem | {"logits": x @ w.T})
    if what == "logprob":
        return row.at(row.logp, row.targets(), 0)[:, 0]
    if what == "entropy":
        return row.entropy()
    d_logits = row.gradient(row.targets()) + row.d_entropy()
    return d_logits @ w if what == "hidden" else d_logits.T @ x


def visible(problem, document, length):
    """[length, length] booleans: the keys that each query of a document sees."""
    i, j = np.ogrid[:length, :length]
    if problem["mask"] == "full":
        return np.ones((length, length), bool)
    if problem["mask"] == "causal":
        return (j <= i) & (j > i - (problem["window"] or length + 1))
    seen = np.zeros((length, length), bool)
    if problem["mask"] == "selected":
        first, last = problem.get("query_offsets", problem["offsets"])[document : document + 2]
        for row in range(first, last):
            keys = problem["selected_keys"][row]
            seen[length - (last - row), keys[keys >= 0]] = True
        return seen
    for number, q_begin, q_end, k_begin, k_end, kind, window in problem["regions"]:
        behind = (k_end - j) - (q_end - i)  # keys from this one to the causal diagonal
        pairs = (i >= q_begin) & (i < q_end) & (j >= k_begin) & (j < k_end) & (number == document)
        causal = (behind >= 0) & (behind < (window or k_end + q_end + 1))
        inverse = j - k_begin >= i - q_begin
        seen |= pairs & (causal if kind & 1 else True) & (inverse if kind & 2 else True)
    return seen


def attention(problem, what):
    """One head of one document after another."""
    q, d_out = problem["q"], problem["d_out"]
    inputs = ("q", "k", "v", *({"k_shared"} & problem.keys()))
    found = {f"d_{name}": np.zeros(problem[name].shape, F) for name in inputs}
    found |= {"out": np.zeros(d_out.shape, F), "lse": np.zeros(q.shape[:2], F)}
    found["d_sinks"] = np.zeros(q.shape[1], F)
    group, scale = q.shape[1] // problem["k"].shape[1], F(problem["scale"])
    bounds = problem["offsets"]
    queries = problem.get("query_offsets", bounds)  # of the last tokens of each document
    for document, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        first, last = queries[document : document + 2]
        seen = visible(problem, document, end - begin)[end - begin - (last - first) :]
        for h in range(q.shape[1] if last > first else 0):
            mine, shared = (slice(first, last), h), (slice(begin, end), h // group)
            k, v = problem["k"][shared], problem["v"][shared]
            own = k.shape[1]
            if "k_shared" in problem:
                k = np.hstack([k, problem["k_shared"][shared[0]]])
            x = np.where(seen, scale * (q[mine] @ k.T), MINUS_INFINITY)
            sink = problem["sinks"][h] if "sinks" in problem else MINUS_INFINITY
            top = np.maximum(x.max(axis=1), sink)
            top[top == MINUS_INFINITY] = 0  # a query that sees nothing
            total = np.exp(x - top[:, None]).sum(axis=1, dtype=F) + np.exp(sink - top)
            with np.errstate(divide="ignore"):
                found["lse"][mine] = lse = top + np.log(total)
            p = np.exp(x - top[:, None]) / np.where(total == 0, F(1), total)[:, None]
            found["out"][mine] = out = p @ v
            delta = (out * d_out[mine]).sum(axis=1)
            d_x = p * (d_out[mine] @ v.T - delta[:, None])
            found["d_q"][mine] = scale * (d_x @ k)
            d_k = scale * (d_x.T @ q[mine])
            found["d_k"][shared] += d_k[:, :own]
            if "k_shared" in problem:
                found["d_k_shared"][shared[0]] += d_k[:, own:]
            found["d_v"][shared] += p.T @ d_out[mine]
            if sink > MINUS_INFINITY:
                found["d_sinks"][h] -= (np.exp(sink - lse) * delta).sum()
    return found[what]


def running(lengths):
    """int32 [N + 1]: 0 and the running sums."""
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def pack(problem, what):
    """A stream, slot by slot."""
    multiple = problem["slot_multiple"]
    real = [len(tokens) for tokens in problem["documents"]]
    slots = [-(-n // multiple) * multiple for n in real]
    rows = []  # of each slot: id, label, position
    for tokens, room in zip(problem["documents"], slots):
        for p in range(room):
            label = tokens[p + 1] if p + 1 < len(tokens) else -100
            rows.append((tokens[p] if p < len(tokens) else 0, label, p))
    columns = dict(zip(("ids", "labels", "positions"), np.array(rows).T))
    return (columns | {"cu_seqlens": running(real), "cu_seqlens_padded": running(slots)})[what]


def local_slots(problem):
    """[L] slots of the stream that a rank holds, by the formula of each layout."""
    bounds, cp, r = problem["cu_seqlens_padded"], int(problem["cp"]), problem["rank"]
    slots, layout = int(bounds[-1]), problem["layout"]
    if layout == "contiguous":
        n = -(-slots // cp)
        return np.arange(r * n, (r + 1) * n)
    if layout == "contiguous-documents":
        pieces = [(begin, (end - begin) // cp) for begin, end in zip(bounds[:-1], bounds[1:])]
        return np.concatenate([np.arange(b + r * n, b + (r + 1) * n) for b, n in pieces])
    if layout == "striped":
        s = int(problem["stripe"])
        return np.array([t for t in range(-(-slots // (s * cp)) * s * cp) if t // s % cp == r])
    if layout == "balanced":
        return dealt(problem, slots, cp, int(problem["chunk"]))[r]
    ranges = [(0, slots)] if layout == "zigzag" else zip(bounds[:-1], bounds[1:])
    index = []
    for begin, end in ranges:
        c = -(-(end - begin) // (2 * cp))
        for chunk in (r, 2 * cp - 1 - r):
            index += range(begin + chunk * c, begin + (chunk + 1) * c)
    return np.array(index, int)


def dealt(problem, slots, cp, chunk):
    """Chunks by descending cost, the causal pairs of their queries, to the rank with the least."""
    count = -(-slots // (chunk * cp)) * cp
    cost = [0] * count
    real, padded = problem["cu_seqlens"], problem["cu_seqlens_padded"]
    for i, n in enumerate(np.diff(real)):
        for p in range(n):
            cost[(padded[i] + p) // chunk] += p + 1
    load, held = [0] * cp, [[] for _ in range(cp)]
    for c in sorted(range(count), key=lambda c: (-cost[c], c)):
        r = min((load[r], r) for r in range(cp) if len(held[r]) < count // cp)[1]
        load[r] += cost[c]
        held[r].append(c)
    return [np.array([c * chunk + t for c in sorted(h) for t in range(chunk)]) for h in held]


def shard(problem, what):
    if what == "extra" and problem["aligned"] != "slots":
        return problem["extra"]
    index, bounds = local_slots(problem), problem["cu_seqlens_padded"]
    if what == "extra":
        blank = np.full(problem["extra"].shape[1:], problem["padding"], problem["extra"].dtype)
        found = [problem["extra"][t] if t < bounds[-1] else blank for t in index]
        return np.array(found, blank.dtype).reshape(-1, *blank.shape)
    if what == "index":
        return index
    if what in ("ids", "labels", "positions"):
        array, inside = problem[what], index < bounds[-1]
        return np.where(inside, array[..., np.where(inside, index, 0)], -100 if what == "labels" else 0)
    used = np.diff(problem[what])  # the slots, or those with tokens, of each segment
    ends = bounds[:-1] + used
    return running([((index >= b) & (index < e)).sum() for b, e in zip(bounds[:-1], ends)])


def segments(problem):
    """Real lengths and slots of each row's segments; a row without tables is one, unless it only
    pads."""
    width = problem["input_ids"].shape[1]
    if "seq_lens" not in problem:
        for ids in problem["input_ids"]:
            n = int(np.append(np.flatnonzero(ids != problem["pad_id"]) + 1, 0).max())
            yield [n] * (n > 0), [width] * (n > 0)
        return
    for n, room in zip(problem["seq_lens"], problem["seq_lens_padded"]):
        yield list(n[n != problem["sentinel"]]), list(room[room != problem["sentinel"]])


def stream_of_rows(problem, what, parts):
    """The boundaries of a stream of rows, or which of its slots hold no token."""
    real, slots = [], []
    for n, room in parts:
        if problem["tail"] == "own-segment" and room:
            used = -(-n[-1] // problem["slot_multiple"]) * problem["slot_multiple"]
            if used < room[-1]:
                n, room = n + [0], room[:-1] + [used, room[-1] - used]
        real, slots = real + n, slots + room
    total = len(parts) * problem["input_ids"].shape[1]
    if what == "padding_mask":
        mask = np.ones(total, int)
        for begin, n in zip(running(slots), real):
            mask[begin : begin + n] = 0
        return mask
    absorb = problem["tail"] == "absorb" and "seq_lens_padded" in problem
    if absorb and real[:-1] == slots[:-1] and sum(real) < total:
        real[-1] = slots[-1] = total - sum(real[:-1])
    if sum(slots) < total:
        real, slots = real + [0], slots + [total - sum(slots)]
    return running(real if what == "cu_seqlens" else slots)


def rows(problem, what):
    """The streams of a batch of rows, one after another."""
    if what == "extra":
        array = problem["extra"]
        return array.reshape(-1, *array.shape[2:]) if problem["aligned"] == "slots" else array
    if what == "positions" and "position_ids" not in problem:
        return np.indices(problem["input_ids"].shape)[1].reshape(-1)
    flat = {"ids": "input_ids", "labels": "labels", "positions": "position_ids"}
    if what in flat:
        array = problem[flat[what]]
        return array.reshape(*array.shape[:-2], -1)
    parts, chunks = list(segments(problem)), int(problem.get("chunks", 1))
    each = len(parts) // chunks
    return np.concatenate([stream_of_rows(problem, what, parts[c * each : (c + 1) * each])
                           for c in range(chunks)])


def audio(problem, what):
    """A stream of text and audio."""
    place, bounds, encoder = (problem[k] for k in ("placeholder_id", "audio_offsets", "encoder"))
    window = len(encoder)
    vectors, labels, lengths, slots, item = [], [], [], [], 0
    unit = 2 * problem["cp"] if problem["cp"] > 1 else 1
    names = ("input_ids", "target_ids", "inputs_embeds")
    for ids, targets, text in zip(*(problem[name] for name in names)):
        mine = []  # (vector, label)
        for t in range(np.argmax(ids != problem["pad_id"]), len(ids)):
            if ids[t] != place:
                mine.append((text[t], -100 if ids[t] == problem["pad_id"] else targets[t]))
                continue
            samples = problem["audio"][bounds[item] : bounds[item + 1]]
            item += 1
            for f in range(len(samples) // window):
                mine.append((samples[f * window : (f + 1) * window] @ encoder, -100))
        padding = -len(mine) % unit
        vectors += [v for v, _ in mine] + [np.zeros(text.shape[1], F)] * padding
        labels += [label for _, label in mine[1:]] + [-100] * (padding + 1)
        lengths.append(len(mine))
        slots.append(len(mine) + padding)
    found = {"embeddings": np.array(vectors), "labels": np.array(labels)}
    found["positions"] = np.concatenate([np.arange(n) for n in slots])
    return (found | {"cu_seqlens": running(lengths), "cu_seqlens_padded": running(slots)})[what]


def scores(function):
    """A function of Row as one of a problem."""
    return lambda problem: function(Row(problem))


def parts(kind, function, names):
    """Entries whose function takes the name of the array."""
    return {f"{kind}/{name}": lambda problem, n=name: function(problem, n)
            for name in names.split()}


FUNCTIONS = {
    "logprobs/log_softmax": scores(lambda row: row.logp),
    "logprobs/softmax": scores(lambda row: np.exp(row.logp)),
    "logprobs/logprob": scores(lambda row: row.at(row.logp, row.targets(), 0)[:, 0]),
    "logprobs/entropy": scores(Row.entropy),
    "logprobs/gathered": scores(lambda row: row.at(row.logp, row.problem["ids"], 0)),
    "logprobs/gathered_logits": scores(lambda row: row.at(row.z, row.problem["ids"], 0)),
    "logprobs/d_logprob": scores(lambda row: row.gradient(row.targets())),
    "logprobs/d_entropy": scores(Row.d_entropy),
    "logprobs/d_logprob_entropy": scores(lambda row: row.gradient(row.targets()) + row.d_entropy()),
    "logprobs/d_log_softmax": scores(of_every_id),
    "logprobs/d_gathered": scores(lambda row: row.gradient(row.problem["ids"], row.g_ids)),
    "logprobs/d_gathered_logits": scores(lambda row: row.one_hot(row.problem["ids"], row.g_ids)),
    "logprobs/filtered_logprob": lambda problem: filtered(problem, False),
    "logprobs/d_filtered_logprob": lambda problem: filtered(problem, True),
    "logprobs/kept_logprob": lambda problem: among_sampled(problem, False),
    "logprobs/d_kept_logprob": lambda problem: among_sampled(problem, True),
    "logprobs/projected_probability": lambda problem: projected(problem, False),
    "logprobs/d_projected_probability": lambda problem: projected(problem, True),
    "logprobs/next_token_logprob": lambda problem: next_tokens(problem, False),
    "logprobs/d_next_token_logprob": lambda problem: next_tokens(problem, True),
    "logprobs/rollout_logprob": lambda problem: rollouts(problem, False),
    "logprobs/d_rollout_logprob": lambda problem: rollouts(problem, True),
    "logprobs/next_token_filtered_logprob": lambda problem: next_tokens(problem, False, True),
    "logprobs/d_next_token_filtered_logprob": lambda problem: next_tokens(problem, True, True),
    "logprobs/argmax_value": lambda problem: largest(problem, False, 1)[:, 0],
    "logprobs/argmax_id": lambda problem: largest(problem, True, 1)[:, 0],
    "logprobs/top_values": lambda problem: largest(problem, False),
    "logprobs/top_ids": lambda problem: largest(problem, True),
    "logprobs/soft_cross_entropy": lambda problem: soft_targets(problem, False),
    "logprobs/d_soft_cross_entropy": lambda problem: soft_targets(problem, True),
    "logprobs/distilled_logprob": lambda problem: distilled(problem, "student"),
    "logprobs/distilled_teacher_logprob": lambda problem: distilled(problem, "teacher"),
    "logprobs/distilled_entropy": lambda problem: distilled(problem, "entropy"),
    "logprobs/d_distilled": lambda problem: distilled(problem, "gradient"),
    "logprobs/distilled_renormalised_logprob": lambda p: distilled(p, "student", True),
    "logprobs/distilled_renormalised_teacher_logprob": lambda p: distilled(p, "teacher", True),
    "logprobs/d_distilled_renormalised": lambda p: distilled(p, "gradient", True),
    "logprobs/topk_kl": divergence,
    "logprobs/d_topk_kl": lambda problem: divergence(problem, 1),
    "logprobs/d_topk_kl_advantage": lambda problem: divergence(problem, 0),
    "logprobs/linear_logprob": lambda problem: linear(problem, "logprob"),
    "logprobs/linear_entropy": lambda problem: linear(problem, "entropy"),
    "logprobs/d_hidden": lambda problem: linear(problem, "hidden"),
    "logprobs/d_head": lambda problem: linear(problem, "head"),
    **parts("attention", attention, "out lse d_q d_k d_k_shared d_v d_sinks"),
    **parts("packed", pack, "ids labels positions cu_seqlens cu_seqlens_padded"),
    **parts("shards", shard, "index ids labels positions cu_seqlens cu_seqlens_padded extra"),
    **parts("bshd", rows, "ids labels positions cu_seqlens cu_seqlens_padded padding_mask extra"),
    **parts("salm", audio, "embeddings labels positions cu_seqlens cu_seqlens_padded"),
}
