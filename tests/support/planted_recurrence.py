"""Errors of distributed recurrences: variants of a layer whose ranks gather the maps of all ranks' fragments, a method changed in
each.

The docstring of a variant says what it does and where it comes from, kind how the harness is to call it.
"""

import numpy as np
import ranks_numpy
from planted import Bug, Narrow, bfloat16, bugs_of


class Recurrence:
    """The right one. A fragment is a run of a rank's slots that are consecutive in a document; a state passes a fragment as
    S -> M S + B, and so do gradients of states, by the transpose of M and C. All of it is in float64."""

    options, is_narrow = {"layout": "contiguous", "cp": 4}, False

    def __init__(self, q, k, v, g, cu_seqlens, layout, group, scale, beta, conv_weight):
        vars(self).update(locals())
        self.rank, self.size, self.index = group.rank, group.size, layout.index
        self.heads, self.keys = v.shape[1], k.shape[1]
        self.all = [self.fragments(rank) for rank in range(self.size)]

    # What a rank has

    def document_of(self, slots):
        """[slots]: the document of each slot; the state and the history begin with 0 where it changes."""
        return np.searchsorted(self.cu_seqlens, slots, side="right")

    def order_of(self, rank):
        """[rows]: what the rows of a rank are taken for, in slots."""
        return self.index[rank]

    def fragments(self, rank):
        """(rows of the rank, their slots) of each fragment."""
        slots = self.order_of(rank)
        if not len(slots):
            return []
        cuts = np.flatnonzero((np.diff(slots) != 1) | (np.diff(self.document_of(slots)) != 0)) + 1
        return [(rows, slots[rows]) for rows in np.split(np.arange(len(slots)), cuts)]

    def before(self, slots):
        """(rank, index) of fragments that a state passes before these slots, in order."""
        document = self.document_of(slots[:1])[0]
        found = [(other[0], r, i) for r, mine in enumerate(self.all) for i, (_, other) in enumerate(mine)
                 if self.document_of(other[:1])[0] == document and other[0] < slots[0]]
        return [(r, i) for _, r, i in sorted(found)]

    def behind(self, slots):
        """The same behind them, the last first."""
        document = self.document_of(slots[:1])[0]
        found = [(other[0], r, i) for r, mine in enumerate(self.all) for i, (_, other) in enumerate(mine)
                 if self.document_of(other[:1])[0] == document and other[0] > slots[0]]
        return [(r, i) for _, r, i in sorted(found, reverse=True)]

    # The formula

    def head_of(self):
        return np.arange(self.heads) * self.keys // self.heads

    def decay(self, t):
        return np.exp(self.g[t].astype(np.float64).reshape(self.heads, -1, 1))

    def write(self, t):
        return np.ones(self.heads) if self.beta is None else self.beta[t].astype(np.float64)

    def erase(self, t):
        return np.zeros(self.heads) if self.beta is None else self.beta[t].astype(np.float64)

    def factor(self):
        return self.scale

    def token(self, t, state):
        """The decayed state, u and the state behind a token; a state may have more columns than values."""
        decayed = self.decay(t) * state
        value = np.zeros((self.heads, state.shape[2]))
        value[:, : self.v.shape[2]] = self.y[2][t]
        u = self.write(t)[:, None] * value - self.erase(t)[:, None] * np.einsum("hde,hd->he", decayed, self.key(t))
        return decayed, u, decayed + self.key(t)[:, :, None] * u[:, None, :]

    def key(self, t):
        return self.y[1][t, self.head_of()]

    def query(self, t):
        return self.y[0][t, self.head_of()]

    # Passes

    def maps(self):
        """M [H, D, D] and B [H, D, E] of each fragment of this rank."""
        found = []
        for rows, _ in self.all[self.rank]:
            values, keys = self.v.shape[2], self.k.shape[2]
            state = np.zeros((self.heads, keys, values + keys))
            state[:, :, values:] = np.eye(keys)
            for t in rows:
                state = self.token(t, state)[2]
            found.append((state[:, :, values:], state[:, :, :values]))
        return found

    def gathered(self, mine, *shape):
        """[rank][fragment]: what each fragment has sent, [heads, *shape]."""
        return self.group.all_gather(np.stack(mine) if mine else np.zeros((0, self.heads, *shape)))

    def entry(self, slots):
        """The state before a fragment."""
        state = np.zeros((self.heads, self.k.shape[2], self.v.shape[2]))
        for r, i in self.before(slots):
            state = self.passed(self.m[r][i] @ state + self.b[r][i])
        return state

    def passed(self, state):
        return state

    def exit_gradient(self, slots, sent):
        """The gradient of the state behind a fragment."""
        gradient = np.zeros((self.heads, self.k.shape[2], self.v.shape[2]))
        for r, i in self.behind(slots):
            gradient = self.m[r][i].swapaxes(1, 2) @ gradient + sent[r][i]
        return gradient

    def run(self):
        self.convolve()
        maps, keys = self.maps(), self.k.shape[2]
        self.m = self.gathered([m for m, _ in maps], keys, keys)
        self.b = self.gathered([b for _, b in maps], keys, self.v.shape[2])
        out, self.steps = np.zeros(self.v.shape), {}
        for rows, slots in self.all[self.rank]:
            state = self.entry(slots)
            for t in rows:
                self.steps[t] = self.token(t, state)
                state = self.steps[t][2]
                out[t] = self.factor() * np.einsum("hde,hd->he", state, self.query(t))
        out = out.astype(self.q.dtype)
        return Narrow(out) if self.is_narrow else out, self.backward

    def backward(self, d_out):
        own = [self.fragment(rows, None, d_out, None) for rows, _ in self.all[self.rank]]
        sent = self.gathered(own, self.k.shape[2], self.v.shape[2])
        shapes = [x.shape for x in self.y] + [self.g.shape] + ([] if self.beta is None else [self.beta.shape])
        found = [np.zeros(shape) for shape in shapes]
        for rows, slots in self.all[self.rank]:
            self.fragment(rows, self.exit_gradient(slots, sent), d_out, found)
        return [x.astype(self.q.dtype) for x in self.convolve_back(found)]

    def fragment(self, rows, gradient, d_out, found):
        """The gradient of the state before a fragment; adds the others to `found`."""
        gradient = np.zeros((self.heads, self.k.shape[2], self.v.shape[2])) if gradient is None else gradient
        for t in reversed(rows):
            decayed, u, behind = self.steps[t]
            d = self.factor() * d_out[t].astype(np.float64)
            gradient = gradient + self.query(t)[:, :, None] * d[:, None, :]
            gradient, late = self.through_late_decay(t, gradient, behind)
            d_u = np.einsum("hde,hd->he", gradient, self.key(t))
            d_read = -self.erase(t)[:, None] * d_u
            if found is not None:
                d_key = np.einsum("hde,he->hd", gradient, u) + np.einsum("hde,he->hd", decayed, d_read)
                np.add.at(found[0][t], self.head_of(), np.einsum("hde,he->hd", behind, d))
                np.add.at(found[1][t], self.head_of(), d_key)
                found[2][t] = self.write(t)[:, None] * d_u
                if self.beta is not None:
                    found[4][t] = self.d_beta(t, d_u, np.einsum("hde,hd->he", decayed, self.key(t)))
            gradient = gradient + self.key(t)[:, :, None] * d_read[:, None, :]
            gradient, early = self.through_decay(t, gradient, decayed)
            if found is not None:
                d_g = (late + early).sum(axis=2)
                found[3][t] = d_g if self.g.ndim == 3 else d_g.sum(axis=1)
        return gradient

    def d_beta(self, t, d_u, read):
        return (d_u * (self.y[2][t] - read)).sum(axis=1)

    def through_late_decay(self, t, gradient, behind):
        return gradient, np.zeros(gradient.shape)

    def through_decay(self, t, gradient, decayed):
        return self.decay(t) * gradient, gradient * self.state_of_decay(t, decayed)

    def state_of_decay(self, t, decayed):
        return decayed

    # The convolution

    def history_document(self, slots):
        return self.document_of(slots)

    def convolve(self):
        """y: what the recurrence reads of q, k and v. Every rank gathers all rows, and convolves documents."""
        self.y = [x.astype(np.float64) for x in (self.q, self.k, self.v)]
        self.ends = np.cumsum([0, *(x[0].size for x in self.y)])
        if self.conv_weight is None:
            return
        slots, width = np.arange(self.index.size), self.conv_weight.shape[1]
        self.mine = self.order_of(self.rank)
        document, reads = self.history_document(slots), slots[:, None] - width + 1 + np.arange(width)
        self.reads = self.history(np.where((reads >= 0) & (document[reads] == document[:, None]), reads, -1))
        self.kept = []
        for i, x in enumerate(self.y):
            whole = np.zeros((self.index.size, *x.shape[1:]))
            for rank, part in enumerate(self.group.all_gather(x)):
                whole[self.order_of(rank)] = part
            reads = self.reads[self.mine]
            taps = np.where((reads >= 0)[:, :, None, None], whole[reads], 0)
            z = np.einsum("tjhc,hcj->thc", taps, self.weights(i))
            value, slope = self.silu(z)
            root = np.sqrt((value * value).sum(axis=2, keepdims=True) + 1e-6) if self.normalises(i) else np.ones((1, 1, 1))
            self.kept.append((taps, slope / root))
            self.y[i] = value / root

    def history(self, reads):
        """[slots, width]: the slots that taps read; -1: none."""
        return reads

    def weights(self, i):
        """[heads, elements, width]"""
        return self.conv_weight[self.ends[i] : self.ends[i + 1]].reshape(*self.y[i].shape[1:], -1).astype(np.float64)

    def silu(self, z):
        sigmoid = 1 / (1 + np.exp(-z))
        return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))

    def normalises(self, i):
        return i < 2

    def convolve_back(self, found):
        """Gradients of rows go home, added; those of weights stay."""
        if self.conv_weight is None:
            return found
        home, d_weights, reads = [], [], self.reads[self.mine]
        for i, (taps, slope) in enumerate(self.kept):
            y = self.y[i]
            d_z = slope * (found[i] - y * (y * found[i]).sum(axis=2, keepdims=True) * self.normalises(i))
            d_rows = np.zeros((self.index.size, *y.shape[1:]))
            terms = np.einsum("thc,hcj->tjhc", d_z, self.weights(i))
            np.add.at(d_rows, reads[reads >= 0], terms[reads >= 0])
            home.append(self.home(d_rows))
            d_weights.append(np.einsum("thc,tjhc->hcj", d_z, self.counted(taps)).reshape(-1, reads.shape[1]))
        return [*home, *found[3:], np.concatenate(d_weights)]

    def counted(self, taps):
        return taps

    def home(self, d_rows):
        return sum(self.group.all_to_all([d_rows[self.order_of(rank)] for rank in range(self.size)]))


class StateOfAnotherDocument(Recurrence):
    """the state is not reset where a document begins (a packed stream without cu_seqlens)"""

    kind = "leak"

    def document_of(self, slots):
        return np.zeros(np.shape(slots), int)

    def history_document(self, slots):
        return Recurrence.document_of(self, slots)


class StateAndHistoryOfAnotherDocument(StateOfAnotherDocument):
    """neither the state nor the history is reset (a packed stream without cu_seqlens)"""

    def history_document(self, slots):
        return self.document_of(slots)


class IdentityMissing(Recurrence):
    """a rank whose document ends with it passes its state on (an identity that is not sent)"""

    kind = "identity"

    def document_of(self, slots):
        begins = np.zeros(self.index.size + 1, int)
        inner = [c for a, c in zip(self.cu_seqlens, self.cu_seqlens[1:]) if a < c < self.index.size]
        begins[[c for c in inner if c % self.index.shape[1]]] = 1
        return np.cumsum(begins)[slots]

    def history_document(self, slots):
        return Recurrence.document_of(self, slots)


class DividedBoundaries(Recurrence):
    """cu_seqlens of a rank are cu_seqlens // cp, and no state comes from another rank (packed sequences)"""

    kind = "boundaries"

    def document_of(self, slots):
        rank, row = np.divmod(slots, self.index.shape[1])
        return rank * len(self.cu_seqlens) + np.searchsorted(np.asarray(self.cu_seqlens) // self.size, row, side="right")


class DividedBoundariesOfAChain(DividedBoundaries):
    """cu_seqlens of a rank are cu_seqlens // cp, and its first document goes on from the rank before (NVIDIA/Megatron-LM)"""

    kind = "boundaries"

    def document_of(self, slots):
        local = np.asarray(self.cu_seqlens)[1:-1] // self.size
        local = np.unique(local[(local > 0) & (local < self.index.shape[1])])
        begins = np.zeros(self.index.size, int)
        for rank in range(self.size):
            begins[rank * self.index.shape[1] + local] = 1
        return np.cumsum(begins)[slots]


class StreamForDocuments(Recurrence):
    """blocks of the stream are taken for a block of every document (layouts of packed sequences)"""

    kind = "layout"

    def __init__(self, *given):
        cu_seqlens, index = np.asarray(given[4]), given[5].index
        local = [np.split(rows, cu_seqlens[1:-1] // len(index)) for rows in index]
        # The slot that each slot is taken for: documents are their blocks, rank by rank.
        taken = np.concatenate([np.concatenate(parts) for parts in zip(*local)])
        self.place = np.empty(index.size, int)
        self.place[taken] = np.arange(index.size)
        lengths = [sum(map(len, parts)) for parts in zip(*local)]
        super().__init__(*given[:4], np.cumsum([0, *lengths]), *given[5:])

    def order_of(self, rank):
        return self.place[self.index[rank]]


class SwapForContiguous(Recurrence):
    """rows of dual-chunk-swap are taken for a block of every document (a shard of another layer)"""

    kind, options = "layout", {"cp": 2}

    def order_of(self, rank):
        bounds, size = np.asarray(self.cu_seqlens), self.size
        return np.concatenate([np.arange(0)] + [np.arange(a + rank * ((b - a) // size), a + (rank + 1) * ((b - a) // size))
                                                for a, b in zip(bounds, bounds[1:])])


class MapsInBfloat16(Recurrence):
    """maps and states between ranks are rounded to bfloat16 (fla-org/flash-linear-attention, context parallelism)"""

    kind = "narrow-states"

    def maps(self):
        return [tuple(bfloat16(x) for x in pair) for pair in super().maps()]

    def passed(self, state):
        return bfloat16(state)


class StatesInBfloat16(Recurrence):
    """states between ranks are rounded to bfloat16 (a buffer of the activations' type)"""

    kind = "narrow-states"

    def passed(self, state):
        return bfloat16(state)


class DecayGradientLost(Recurrence):
    """d_g of a rank is lost (a gradient of a gate's parameters that is not accumulated)"""

    kind = "zero"

    def convolve_back(self, found):
        return super().convolve_back([x * (i != 3 or self.rank != 1) for i, x in enumerate(found)])


class DecayGradientOfOwnStates(Recurrence):
    """d_g is computed of states that begin with 0 on each rank (states that backward computes again)"""

    kind = "decay-gradient"

    def run(self):
        answer = super().run()
        self.own = {}
        for rows, _ in self.all[self.rank]:
            state = np.zeros((self.heads, self.k.shape[2], self.v.shape[2]))
            for t in rows:
                self.own[t], _, state = self.token(t, state)
        return answer

    def state_of_decay(self, t, decayed):
        return self.own[t]


class DecayBehindTheUpdate(Recurrence):
    """the decay is applied behind the update (S = exp(g) (S + k u))"""

    kind = "decay-late"

    def token(self, t, state):
        value = np.zeros((self.heads, state.shape[2]))
        value[:, : self.v.shape[2]] = self.y[2][t]
        u = self.write(t)[:, None] * value - self.erase(t)[:, None] * np.einsum("hde,hd->he", state, self.key(t))
        return state, u, self.decay(t) * (state + self.key(t)[:, :, None] * u[:, None, :])

    def through_late_decay(self, t, gradient, behind):
        return self.decay(t) * gradient, gradient * behind

    def through_decay(self, t, gradient, decayed):
        return gradient, np.zeros(gradient.shape)


class NoDecay(Recurrence):
    """there is no decay (linear attention without a gate)"""

    kind = "decay-lost"

    def decay(self, t):
        return np.ones_like(super().decay(t))

    def convolve_back(self, found):
        return super().convolve_back([x * (i != 3) for i, x in enumerate(found)])


class BetaMissingOnTheWrite(Recurrence):
    """beta is missing where v is written (beta of k alone)"""

    kind = "beta-write"

    def write(self, t):
        return np.ones(self.heads)

    def d_beta(self, t, d_u, read):
        return -(d_u * read).sum(axis=1)


class BetaIgnored(Recurrence):
    """beta is ignored (a delta rule of strength 1)"""

    kind = "beta-lost"

    def write(self, t):
        return np.ones(self.heads)

    def erase(self, t):
        return super().erase(t) if self.beta is None else np.ones(self.heads)

    def d_beta(self, t, d_u, read):
        return 0


class DeltaRuleLost(Recurrence):
    """nothing is replaced (a kernel of Mamba-2)"""

    kind = "delta-lost"

    def erase(self, t):
        return np.zeros(self.heads)

    def d_beta(self, t, d_u, read):
        return (d_u * self.y[2][t]).sum(axis=1)


class NoScale(Recurrence):
    """the scale is 1 (a kernel that leaves it to its caller)"""

    kind = "scale"

    def factor(self):
        return 1.0


class UsualScale(Recurrence):
    """the scale is 1 / sqrt(D), whatever was asked for (a default)"""

    kind = "scale"

    def factor(self):
        return self.k.shape[2] ** -0.5


class HeadsByTurns(Recurrence):
    """head h of values reads head h mod K of keys (repeat for repeat_interleave)"""

    kind = "heads"

    def head_of(self):
        return np.arange(self.heads) % self.keys


class StateOfEachRankAlone(Recurrence):
    """states do not cross ranks (a layer that is not wired to context parallelism)"""

    kind = "local-state"

    def before(self, slots):
        return []

    def behind(self, slots):
        return []


class GradientOfEachRankAlone(Recurrence):
    """gradients of states do not cross ranks (a backward without communication)"""

    kind = "state-gradient"

    def behind(self, slots):
        return []


class HistoryOfAnotherDocument(Recurrence):
    """a history is of another document (a convolution of the packed stream)"""

    kind = "history-leak"

    def history_document(self, slots):
        return np.zeros(len(slots), int)


class HaloOfAnotherDocument(Recurrence):
    """a document that begins with a rank gets the history that the rank before has sent (a halo without boundaries)"""

    kind = "history-leak"
    history_document = IdentityMissing.document_of


class HistoryOfOneNeighbour(Recurrence):
    """a history is of the rank before alone, with zeros where its part is shorter (a halo of one neighbour)"""

    kind, options = "history-short", {"layout": "contiguous", "cp": 8}

    def history(self, reads):
        rank = self.index.shape[1]
        return np.where(reads // rank < np.arange(len(reads))[:, None] // rank - 1, -1, reads)


class NoHistory(Recurrence):
    """a rank begins with no history (a convolution that is not wired to context parallelism)"""

    kind = "history-lost"

    def history_document(self, slots):
        return self.document_of(slots) + len(self.cu_seqlens) * (slots // self.index.shape[1])


class HistoryGradientLost(Recurrence):
    """gradients of histories are not added (a halo exchange without a backward)"""

    kind = "history-gradient"

    def home(self, d_rows):
        return d_rows[self.order_of(self.rank)]


class WeightGradientOfOwnRows(Recurrence):
    """gradients of weights are without the tokens of histories (a halo that is detached)"""

    kind = "weight-gradient"

    def counted(self, taps):
        reads = self.reads[self.mine]
        return np.where(np.isin(reads, self.mine)[:, :, None, None], taps, 0)


class NoSilu(Recurrence):
    """there is no SiLU behind the convolution (activation=None)"""

    kind = "silu-lost"

    def silu(self, z):
        return z, np.ones(z.shape)


class NotNormalised(Recurrence):
    """queries and keys are not normalised (use_qk_l2norm_in_kernel=False)"""

    kind = "not-normalised"

    def normalises(self, i):
        return False


class TapsInReverse(Recurrence):
    """weights are in reverse order (a convolution for a correlation)"""

    kind = "taps"

    def weights(self, i):
        return super().weights(i)[..., ::-1]

    def convolve_back(self, found):
        answer = super().convolve_back(found)
        return answer if self.conv_weight is None else [*answer[:-1], answer[-1][:, ::-1]]


class InBfloat16(Recurrence):
    """"""

    options, is_narrow = {"dtype": "bfloat16", "cp": 2}, True


def recurrence_of(kind):
    def recurrence(q, k, v, g, cu_seqlens, layout, group, scale, beta, conv_weight):
        return kind(q, k, v, g, cu_seqlens, layout, group, scale, beta, conv_weight).run()

    return recurrence


BUGS = [bug for bug in bugs_of(Recurrence, "recurrence", recurrence_of) if bug.origin]
RIGHT = [
    Bug("recurrence", "recurrence", "", ranks_numpy.recurrence, {"cp": 4, "layout": "contiguous"}),
    Bug("recurrence_of_maps", "recurrence", "", recurrence_of(Recurrence), {"cp": 2}),
    Bug("recurrence_in_bfloat16", "recurrence", "", recurrence_of(InBfloat16), {"cp": 2, "dtype": "bfloat16"}),
]
