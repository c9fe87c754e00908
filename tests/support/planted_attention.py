"""Errors of distributed attention: variants of a ring over tiles of keys with an online softmax, a method changed in each.

The docstring of a variant says what it does and where it comes from. BUGS names them for planted_table.py.
"""

import numpy as np
from planted import Bug, Narrow, bfloat16, bugs_of

INF, NARROW = np.inf, {"dtype": "bfloat16"}


class Attention:
    """The right one. Arrays are heads first: q [H, rows, D], scores [H, rows, keys]; kv [H] is the KV head of each head."""

    tile, is_narrow, options = 64, False, {}

    def __init__(self, q, k, v, cu_seqlens, layout, group, scale, lengths, mask, window, regions, allowed, sinks, k_shared,
                 softcap):
        vars(self).update(locals())
        slots = np.arange(layout.index.size)
        self.rank, self.size, self.mine = group.rank, group.size, layout.index[group.rank]
        self.segment = np.searchsorted(cu_seqlens, slots, side="right") - 1
        self.position = slots - cu_seqlens[self.segment]
        self.real = self.position < np.asarray(lengths)[self.segment]
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.share = self.heads // self.kv_heads
        self.own = k.shape[2]
        if k_shared is not None:
            self.k = np.concatenate([k, np.broadcast_to(k_shared[:, None], (*k.shape[:2], k_shared.shape[1]))], axis=2)
        self.kv = self.head_of()
        self.z = np.full(self.heads, -INF) if sinks is None else self.sink_of(sinks.astype(np.float64))

    def head_of(self):
        return np.arange(self.heads) // self.share

    def sink_of(self, sinks):
        return sinks

    def steps(self):
        """Ranks, in the order in which their keys arrive."""
        return [(self.rank - step) % self.size for step in range(self.size)]

    def block(self, source):
        """Keys and values [H, n, elements] of a rank."""
        return (x[source].astype(np.float64).transpose(1, 0, 2)[self.kv] for x in (self.all_k, self.all_v))

    def causal(self, window, behind=None):
        """[rows, slots]: keys of the same document at most `window` back, or any without one."""
        i = self.mine[:, None]
        behind = i - np.arange(self.layout.index.size) if behind is None else behind
        near = (behind >= 0) & ((behind < window) | (window == 0))
        return near & (self.segment[i] == self.segment) & self.real[i] & self.real

    def pairs(self):
        """[rows, slots]: what the rows of this rank see."""
        return self.allowed

    def seen(self, source):
        return self.pairs()[:, self.layout.index[source]]

    def seen_backward(self, source):
        return self.seen(source)

    def tiles(self, keys):
        return [slice(begin, min(begin + self.tile, keys)) for begin in range(0, keys, self.tile)]

    def score(self, q, keys):
        return self.scale * (q @ keys.swapaxes(1, 2))

    def capped(self, x):
        return self.softcap * np.tanh(x / self.softcap) if self.softcap else x

    def slope(self, x):
        """The slope of capped() where it is x."""
        return 1 - (np.maximum(x, -self.softcap) / self.softcap) ** 2

    def masked(self, seen, x):
        return np.where(seen, x, -INF)

    def start(self, rows):
        return np.full((self.heads, rows), -INF), np.zeros((self.heads, rows)), np.zeros((self.heads, rows, self.v.shape[2]))

    def fold(self, top, total, out, x, values):
        """Adds a tile to a running maximum, sum and output."""
        new = np.maximum(top, x.max(axis=2, initial=-INF))
        safe = np.where(new == -INF, 0, new)
        p, kept = np.exp(x - safe[:, :, None]), np.exp(top - safe)
        return new, total * kept + p.sum(axis=2), out * kept[:, :, None] + p @ values

    def partial(self, q, source):
        """Output and lse of the keys of one rank."""
        (keys, values), seen, state = self.block(source), self.seen(source), self.start(q.shape[1])
        for tile in self.tiles(keys.shape[1]):
            x = self.masked(seen[:, tile], self.capped(self.score(q, keys[:, tile])))
            state = self.fold(*state, x, values[:, tile])
        return self.normal(*state)

    def normal(self, top, total, out):
        with np.errstate(divide="ignore"):
            return out / np.where(total == 0, 1, total)[:, :, None], top + np.log(total)

    def merge(self, out, lse, more, more_lse):
        """Two normalised outputs become one."""
        whole = np.logaddexp(lse, more_lse)
        safe = np.where(whole == -INF, 0, whole)
        return out * np.exp(lse - safe)[:, :, None] + more * np.exp(more_lse - safe)[:, :, None], whole

    def sunk(self, out, lse):
        """What sinks make of it."""
        whole = np.logaddexp(lse, self.z[:, None])
        return out * np.exp(lse - np.where(whole == -INF, 0, whole))[:, :, None], whole

    def delta(self, d_out):
        return (self.out * d_out).sum(axis=2)

    def d_scores(self, p, d_p, delta):
        return p * (d_p - delta[:, :, None])

    def by_kv_head(self, gradient):
        """[n, K, elements]: the sum over the heads that read each KV head."""
        found = np.zeros((gradient.shape[1], self.kv_heads, gradient.shape[2]))
        for head, kv in enumerate(self.kv):
            if kv < self.kv_heads:
                found[:, kv] += gradient[head]
        return found

    def home(self, parts):
        """parts[r]: gradients of the keys of rank r. The sum of what all ranks have for this one."""
        return sum(self.group.all_to_all(parts))

    def sink_gradient(self, lse, delta):
        return -(np.exp(self.z[:, None] - np.where(lse == -INF, 0, lse)) * delta).sum(axis=1)

    def shared_gradient(self, d_k):
        return d_k[..., self.own :].sum(axis=1)

    def answered(self, out, lse):
        return out.transpose(1, 0, 2), lse.T

    def run(self):
        self.all_k, self.all_v = self.group.all_gather(self.k), self.group.all_gather(self.v)
        q = self.q.astype(np.float64).transpose(1, 0, 2)
        found = None
        for source in self.steps():
            mine = self.partial(q, source)
            found = mine if found is None else self.merge(*found, *mine)
        self.out, self.lse = self.sunk(*found)
        out, lse = self.answered(self.out, self.lse)
        out = out.astype(self.q.dtype)
        return Narrow(out) if self.is_narrow else out, lse.astype(self.q.dtype), self.backward

    def weights(self, q, keys, source):
        lse = np.where(self.lse == -INF, 0, self.lse)
        x = self.masked(self.seen_backward(source), self.capped(self.score(q, keys)))
        return np.exp(x - lse[:, :, None])

    def backward(self, d_out):
        q, d_out = (x.astype(np.float64).transpose(1, 0, 2) for x in (self.q, d_out))
        delta, d_q = self.delta(d_out), np.zeros(q.shape)
        d_k = [np.zeros((len(x), *self.k.shape[1:])) for x in self.all_k]
        d_v = [np.zeros((len(x), *self.v.shape[1:])) for x in self.all_v]
        for source in self.steps():
            keys, values = self.block(source)
            p = self.weights(q, keys, source)
            d_x = self.d_scores(p, d_out @ values.swapaxes(1, 2), delta)
            if self.softcap:
                d_x *= self.slope(self.masked(self.seen_backward(source), self.capped(self.score(q, keys))))
            d_q = self.add_d_q(d_q, self.scale * d_x @ keys)
            d_k[source] += self.by_kv_head(self.scale * d_x.swapaxes(1, 2) @ q)
            d_v[source] += self.by_kv_head(p.swapaxes(1, 2) @ d_out)
        return self.gradients(d_q.transpose(1, 0, 2), self.home(d_k), self.home(d_v), delta)

    def add_d_q(self, d_q, more):
        return d_q + more

    def gradients(self, d_q, d_k, d_v, delta):
        found = [d_q, d_k[..., : self.own], d_v]
        if self.k_shared is not None:
            found.append(self.shared_gradient(d_k))
        if self.sinks is not None:
            found.append(self.sink_gradient(self.lse, delta))
        return [x.astype(self.q.dtype) for x in found]


# Masks


class WindowNarrower(Attention):
    """a window of w keys sees w - 1 (`<` in place of `<=`)"""

    def pairs(self):
        return self.causal(self.window - 1) if self.window > 1 else self.allowed


class WindowOfRows(Attention):
    """a window counts rows of the rank, not positions (huggingface/accelerate PR #4177)"""

    def pairs(self):
        row = np.empty(self.layout.index.size, int)
        row[self.layout.index] = np.arange(self.layout.index.shape[1])
        near = row[self.mine][:, None] - row < self.window
        return self.causal(0) & near if self.window and self.mask == "causal" else self.allowed


class WindowOfEveryBlock(Attention):
    """each block of a ring counts the window from its own first row (zhuzilin/ring-flash-attention, windows)"""

    def seen(self, source):
        if not self.window or source == self.rank:
            return super().seen(source)
        rows = np.arange(len(self.mine))
        return self.causal(0)[:, self.layout.index[source]] & (abs(rows[:, None] - rows) < self.window)


class WindowLostBehindOwnBlock(Attention):
    """blocks of other ranks are seen without the window (zhuzilin/ring-flash-attention, windows)"""

    def seen(self, source):
        return super().seen(source) if source == self.rank or not self.window else self.causal(0)[:, self.layout.index[source]]


class RingStopsEarly(Attention):
    """a ring of window // rows steps, rounded down (NVIDIA/TransformerEngine, windows under context parallelism)"""

    options = {"layout": "contiguous", "cp": 4}

    def steps(self):
        return super().steps()[: 1 + self.window // len(self.mine)] if self.window and len(self.mine) else super().steps()


class HaloOfOneNeighbour(Attention):
    """a window's keys come from the rank before this one alone (a halo exchange of one step)"""

    options = {"layout": "contiguous", "cp": 4}

    def steps(self):
        return super().steps()[:2] if self.window else super().steps()


class WindowLostBackward(Attention):
    """the window is lost backward (a mask that one pass has)"""

    def seen_backward(self, source):
        return self.causal(0)[:, self.layout.index[source]] if self.window else self.seen(source)


class CausalLostBackward(Attention):
    """the causal mask is lost backward (a mask that one pass has)"""

    def seen_backward(self, source):
        i, index = self.mine[:, None], self.layout.index[source]
        return (self.segment[i] == self.segment[index]) & self.real[i] & self.real[index]


class OwnKeyLost(Attention):
    """a strict causal mask: a query does not see its own key (tril of -1)"""

    def pairs(self):
        return self.allowed & (self.mine[:, None] != np.arange(self.layout.index.size))


class SoftcapLost(Attention):
    """a softcap is ignored (kernels without one behind a common interface)"""

    kind = "softcap"

    def capped(self, x):
        return x

    def slope(self, x):
        return 1


class SoftcapAfterMask(Attention):
    """the softcap comes after the mask: hidden keys have -c in place of -inf (a mask that is added to the products)"""

    kind = "softcap"

    def masked(self, seen, x):
        return np.where(seen, x, -(self.softcap or INF))


class SoftcapBeforeScale(Attention):
    """the softcap comes before the scale: scale c tanh(<q, k> / c) (products that are capped and then scaled)"""

    kind = "softcap"

    def capped(self, x):
        return self.scale * super().capped(x / self.scale)

    def slope(self, x):
        return super().slope(x / self.scale)


class SoftcapWithoutFactor(Attention):
    """tanh(x / c) is not multiplied with c again (one of two factors that kernels fold into the scale)"""

    kind = "softcap"

    def capped(self, x):
        return super().capped(x) / self.softcap if self.softcap else x

    def slope(self, x):
        return super().slope(x * self.softcap) / self.softcap


class SoftcapWithoutSlope(Attention):
    """gradients lack the slope of the softcap (a backward pass that computes scores again without it)"""

    kind = "softcap"

    def slope(self, x):
        return 1


class NextKeySeen(Attention):
    """a query sees the next key (triu of 2 in place of 1)"""

    def pairs(self):
        slots = np.arange(self.layout.index.size)
        return self.allowed | self.causal(0, self.mine[:, None] - slots + 1) if self.mask == "causal" else self.allowed


class AlwaysCausal(Attention):
    """a causal mask where there is none (huggingface/trl PR #6843)"""

    def pairs(self):
        return self.allowed & (self.mine[:, None] >= np.arange(self.layout.index.size))


class FirstRegionAlone(Attention):
    """of several regions of a query the first one alone counts (one range of keys a query)"""

    def pairs(self):
        if self.mask != "regions":
            return self.allowed
        found = np.zeros_like(self.allowed)
        for row, slot in enumerate(self.mine):
            mine = self.regions[(self.regions[:, 0] == self.segment[slot]) & (self.regions[:, 1] <= self.position[slot])
                                & (self.position[slot] < self.regions[:, 2])]
            if len(mine):
                found[row] = self.allowed[row] & (mine[0, 3] <= self.position) & (self.position < mine[0, 4])
        return found


class TopLeftCausal(Attention):
    """a causal region is aligned at its first query and key, not the last (Dao-AILab/flash-attention 2.1)"""

    def pairs(self):
        return self.of_regions(lambda i, j, r: j - r[3] <= i - r[1])

    def of_regions(self, rule):
        """Pairs of regions, whose causal ones follow another rule."""
        if self.mask != "regions":
            return self.allowed
        found, i, j = np.zeros_like(self.allowed), self.position[self.mine][:, None], self.position
        same = (self.segment[self.mine][:, None] == self.segment) & self.real & self.real[self.mine][:, None]
        for r in self.regions:
            inside = same & (self.segment == r[0]) & (r[1] <= i) & (i < r[2]) & (r[3] <= j) & (j < r[4])
            last = i + r[4] - r[2]
            found |= inside & ((r[5] & 1 == 0) | rule(i, j, r) & ((j > last - r[6]) | (r[6] == 0)))
        return found


class RegionWindowLost(TopLeftCausal):
    """the windows of regions are lost (block masks without a window)"""

    def pairs(self):
        if self.mask == "regions":
            self.regions = np.where(np.arange(7) == 6, 0, self.regions)
        return self.of_regions(lambda i, j, r: j <= i + r[4] - r[2])


class RegionsAllCausal(TopLeftCausal):
    """whole regions are taken for causal ones (huggingface/trl PR #6843)"""

    def pairs(self):
        if self.mask == "regions":
            self.regions = np.where(np.arange(7) == 5, 1, self.regions)
        return self.of_regions(lambda i, j, r: j <= i + r[4] - r[2])


class OneRangeOfKeys(Attention):
    """a query sees all from its first to its last key (FlashMask: one range a row)"""

    def pairs(self):
        keys = np.arange(self.layout.index.size)
        if not len(keys):
            return self.allowed
        some = self.allowed.any(axis=1)
        first, last = self.allowed.argmax(axis=1), len(keys) - 1 - self.allowed[:, ::-1].argmax(axis=1)
        return some[:, None] & self.real & (first[:, None] <= keys) & (keys <= last[:, None])


class EndsAtHiddenTile(Attention):
    """the loop over tiles ends with the first hidden tile after a seen one (break in place of continue)"""

    options = {"cp": 1}

    def partial(self, q, source):
        (keys, values), seen, state = self.block(source), self.seen(source), self.start(q.shape[1])
        for rows in range(0, q.shape[1], self.tile):
            mine, found = slice(rows, rows + self.tile), tuple(x[:, rows : rows + self.tile] for x in state)
            begun = False
            for tile in self.tiles(keys.shape[1]):
                if not seen[mine, tile].any():
                    if begun:
                        break
                    continue
                begun = True
                x = np.where(seen[mine, tile], self.score(q[:, mine], keys[:, tile]), -INF)
                found = self.fold(*found, x, values[:, tile])
            for whole, part in zip(state, found):
                whole[:, mine] = part
        return self.normal(*state)


class WholeTilesSeen(Attention):
    """a tile of which a row sees something is seen whole (a block mask without the mask inside of blocks)"""

    tile = 16

    def seen(self, source):
        found = super().seen(source).copy()
        for tile in self.tiles(found.shape[1]):
            found[:, tile] = found[:, tile].any(axis=1, keepdims=True)
        return found


class HiddenTilesAreNaN(Attention):
    """a tile that is hidden from a row makes exp(-inf + inf) (vllm-project/vllm PR #4405)"""

    def fold(self, top, total, out, x, values):
        new = np.maximum(top, x.max(axis=2, initial=-INF))
        safe = np.where((new == -INF) & (total == 0) & (x.shape[2] < self.tile), 0, new)
        p, kept = np.exp(x - safe[:, :, None]), np.exp(top - safe)
        return new, total * kept + p.sum(axis=2), out * kept[:, :, None] + p @ values


class BoundaryBelongsBefore(Attention):
    """the first token of a document is counted with the one before it (bisect on the wrong side)"""

    def pairs(self):
        if self.mask != "causal" or self.window:
            return self.allowed
        slots = np.arange(self.layout.index.size)
        self.segment = np.maximum(0, np.searchsorted(self.cu_seqlens, slots, side="left") - 1)
        return self.causal(0)


class EndsAtEmptyDocument(Attention):
    """a document of no token ends the loop over documents (flash-linear-attention, empty cu_seqlens)"""

    def pairs(self):
        empty = np.flatnonzero(np.diff(self.cu_seqlens) == 0)
        last = empty[0] if len(empty) else len(self.cu_seqlens)
        return self.allowed & (self.segment[self.mine] < last)[:, None]


class UnpaddedBoundaries(Attention):
    """boundaries of real tokens are taken for those of slots (NVIDIA/TransformerEngine #1929)"""

    def pairs(self):
        if self.mask == "regions" or self.window:
            return self.allowed
        bounds = np.concatenate([[0], np.cumsum(self.lengths)])
        self.segment = np.searchsorted(bounds, np.arange(self.layout.index.size), side="right") - 1
        return self.causal(0) if self.mask == "causal" else self.causal(0) | self.allowed


class LengthsDivided(Attention):
    """a rank takes length // cp rows of every document for real (NVIDIA/TransformerEngine #3331, #1930)"""

    def pairs(self):
        allowed = self.allowed.copy()
        for (begin, end), n in zip(zip(self.cu_seqlens, self.cu_seqlens[1:]), self.lengths):
            for rows in self.layout.index:
                allowed[:, np.sort(rows[(begin <= rows) & (rows < end)])[int(n) // self.size :]] = False
        return allowed


class SkipsLaterRanks(Attention):
    """blocks of later ranks are skipped, as if ranks had consecutive chunks (causal skip of a plain ring)"""

    def steps(self):
        return [r for r in super().steps() if r <= self.rank or self.mask != "causal"]


class HalvesOfTheRank(Attention):
    """half of a rank's rows, not of each document's, are its first chunks (zigzag ring without cu_seqlens)"""

    def seen(self, source):
        seen, half = super().seen(source).copy(), len(self.mine) // 2
        if source < self.rank and self.mask == "causal":
            seen[:, half:] = False
        if source > self.rank and self.mask == "causal":
            seen[:half] = False
        return seen


# Heads


class PowersOfTwo(Attention):
    """groups are taken as powers of two (flashinfer-ai/flashinfer #140, PR #2684)"""

    def head_of(self):
        return np.minimum(np.arange(self.heads) // (1 << (self.share - 1).bit_length()), self.kv_heads - 1)


class RepeatForInterleave(Attention):
    """after an exchange of tokens for heads KV heads are repeated, not interleaved (huggingface/accelerate, Ulysses)"""

    def head_of(self):
        if self.heads % self.size or self.kv_heads % self.size:
            return super().head_of()
        mine, held = self.heads // self.size, self.kv_heads // self.size
        head = np.arange(self.heads)
        return head // mine * held + head % mine % held


class RepeatForInterleaveOfFour(RepeatForInterleave):
    """the same on four ranks"""

    options = {"cp": 4}


class PaddedApart(Attention):
    """query and KV heads are padded to the ranks apart (vllm-project/vllm-omni PR #5716)"""

    def head_of(self):
        heads, kv_heads = (-(-n // self.size) * self.size for n in (self.heads, self.kv_heads))
        return np.arange(self.heads) // (heads // kv_heads) if self.kv_heads >= self.size else super().head_of()

    def block(self, source):
        for x in (self.all_k, self.all_v):
            wide = np.pad(x[source].astype(np.float64), ((0, 0), (0, self.heads), (0, 0)))
            yield wide.transpose(1, 0, 2)[self.kv]


class PaddedApartOfFour(PaddedApart):
    """the same on four ranks"""

    options = {"cp": 4}


class ReplicasByTurns(Attention):
    """fewer KV heads than ranks: rank r reads head r mod K (vllm-project/vllm, KV replication)"""

    options = {"cp": 4}

    def head_of(self):
        if self.kv_heads >= self.size or self.heads % self.size:
            return super().head_of()
        return np.arange(self.heads) // (self.heads // self.size) % self.kv_heads


class FirstKvHead(Attention):
    """all query heads read KV head 0 (a kernel for MQA)"""

    def head_of(self):
        return np.zeros(self.heads, int)


class MeanOverTheGroup(Attention):
    """gradients of KV heads are means over their query heads (expand and mean)"""

    def by_kv_head(self, gradient):
        return super().by_kv_head(gradient) / self.share


class LastHeadOfTheGroup(Attention):
    """gradients of KV heads are those of the last query head (a store in place of an atomic add)"""

    def by_kv_head(self, gradient):
        last = np.arange(self.heads) % self.share == self.share - 1
        return super().by_kv_head(gradient * last[:, None, None])


class GradientOfOtherGroups(Attention):
    """gradients go to KV head h mod K, values come from h // group (repeat and repeat_interleave mixed)"""

    def by_kv_head(self, gradient):
        return gradient.reshape(self.share, self.kv_heads, *gradient.shape[1:]).sum(axis=0).transpose(1, 0, 2)


class ExpandedTwice(Attention):
    """gradients of KV heads are added up once more by every head of the group (expand, then all-reduce)"""

    def by_kv_head(self, gradient):
        return super().by_kv_head(gradient) * self.share


class SinkOfKvHead(Attention):
    """sinks are indexed by the KV head (sgl-project/sglang, gpt-oss)"""

    def sink_of(self, sinks):
        return sinks[self.kv]


class SinksNotExchanged(Attention):
    """after an exchange of heads every rank takes the first sinks (PrimeIntellect-ai/prime-rl #3397)"""

    def sink_of(self, sinks):
        mine = max(1, self.heads // self.size)
        return sinks[np.arange(self.heads) % mine]


# Scales, sinks, logarithms


class ScaleOfValues(Attention):
    """the scale is that of the width of values (NVIDIA/TransformerEngine #2868)"""

    def score(self, q, keys):
        return super().score(q, keys) * np.sqrt(q.shape[2] / self.v.shape[2])


class ScaleTwice(Attention):
    """queries are scaled before a kernel that scales (huggingface/transformers, sdpa and eager)"""

    def score(self, q, keys):
        return super().score(q, keys) * self.scale



class ExpToTheBaseTwo(Attention):
    """exp2 of scores that were not multiplied by log2(e) (triton-lang/triton tutorials, fused attention)"""

    def score(self, q, keys):
        return super().score(q, keys) * np.log(2)


class SinkScaled(Attention):
    """sinks are scaled like scores (openai/gpt-oss, sinks)"""

    def sink_of(self, sinks):
        return sinks * self.scale


class SinkToTheBaseTwo(Attention):
    """sinks are not multiplied by log2(e) in a kernel of exp2 (Dao-AILab/flash-attention, sinks)"""

    def sink_of(self, sinks):
        return sinks * np.log(2)


class SinkOfEveryTile(Attention):
    """every tile adds the sink (InternLM/lmdeploy #3951)"""

    def sink_of(self, sinks):
        return sinks + np.log(max(1, sum(len(self.tiles(rows)) for rows in (len(x) for x in self.layout.index))))


class SinkMissesLse(Attention):
    """out has the sink, lse does not (Dao-AILab/flash-attention, sinks)"""

    def answered(self, out, lse):
        with np.errstate(divide="ignore"):
            return out.transpose(1, 0, 2), np.log(np.exp(lse) - np.exp(self.z[:, None])).T if self.sinks is not None else lse.T


class SinkMissesBackward(Attention):
    """the weights of the backward pass lack the sink (NVIDIA/TransformerEngine PR #3551)"""

    def sunk(self, out, lse):
        self.plain = lse
        return super().sunk(out, lse)

    def weights(self, q, keys, source):
        x = np.where(self.seen_backward(source), self.score(q, keys), -INF)
        return np.exp(x - np.where(self.plain == -INF, 0, self.plain)[:, :, None])


class SinkGradientSummedTwice(Attention):
    """d_sinks is summed over the ranks of a ring, then by the data-parallel group again (NVIDIA/TransformerEngine #2541)"""

    def sink_gradient(self, lse, delta):
        return self.group.all_reduce(super().sink_gradient(lse, delta))


class SinkGradientSign(Attention):
    """d_sinks has the other sign (NVIDIA/TransformerEngine PR #3551)"""

    def sink_gradient(self, lse, delta):
        return -super().sink_gradient(lse, delta)


class SinkGradientOfScores(Attention):
    """d_sinks is that of one more score, without <out, d_out> of all rows: a mean over the rows (PrimeIntellect-ai/prime-rl #3397)"""

    def sink_gradient(self, lse, delta):
        return super().sink_gradient(lse, delta) / max(1, delta.shape[1])


class LseOfNothingIsZero(Attention):
    """a row that sees nothing has an lse of 0 (flashinfer-ai/flashinfer PR #4401)"""

    def answered(self, out, lse):
        return super().answered(out, np.where(lse == -INF, 0, lse))


class LseOfNothingIsInfinite(Attention):
    """a row that sees nothing has an lse of +inf (Dao-AILab/flash-attention, softmax_lse)"""

    def answered(self, out, lse):
        return super().answered(out, np.where(lse == -INF, INF, lse))


class LseWithoutMaximum(Attention):
    """lse is the logarithm of the sum, without the maximum (a running sum that is returned as it is)"""

    top = -INF

    def fold(self, top, total, out, x, values):
        self.top = np.maximum(top, x.max(axis=2, initial=-INF))
        return super().fold(top, total, out, x, values)

    def answered(self, out, lse):
        return out.transpose(1, 0, 2), (lse - np.where(np.isfinite(self.top), self.top, 0)).T


class LseOfHeadsFirst(Attention):
    """lse [heads, rows] is viewed as [rows, heads] (NVIDIA/TransformerEngine, THD lse)"""

    def answered(self, out, lse):
        return out.transpose(1, 0, 2), lse.reshape(lse.shape[1], lse.shape[0])


class OutOfHeadsFirst(Attention):
    """out [heads, rows] is viewed as [rows, heads] (view in place of transpose)"""

    def answered(self, out, lse):
        return out.reshape(out.shape[1], out.shape[0], out.shape[2]), lse.T


# Online softmax and merges


class NoMaximum(Attention):
    """exp of scores before the maximum is subtracted, in float32 (overflow)"""

    def fold(self, top, total, out, x, values):
        p = np.exp(x.astype(np.float32)).astype(np.float64)
        return np.where(np.isneginf(x).all(axis=2), top, 0), total + p.sum(axis=2), out + p @ values


class MaximumStartsAtZero(Attention):
    """the running maximum starts at 0: rows of low scores underflow in float32 (m_i = zeros)"""

    def fold(self, top, total, out, x, values):
        new = np.maximum(np.maximum(top, 0), x.max(axis=2, initial=0))
        p, kept = np.exp((x - new[:, :, None]).astype(np.float32)).astype(np.float64), np.exp(top - new)
        return new, total * kept + p.sum(axis=2), out * kept[:, :, None] + p @ values


class MaximumWithoutSink(Attention):
    """the maximum is that of scores alone: exp(sink - maximum) overflows float32 (openai/gpt-oss, sinks)"""

    def sunk(self, out, lse):
        with np.errstate(over="ignore"):
            beside = np.exp((self.z[:, None] - np.where(lse == -INF, 0, lse)).astype(np.float32)).astype(np.float64)
        return out / (1 + beside)[:, :, None], np.where(lse == -INF, self.z[:, None], lse + np.log1p(beside))


class MaskOfMinus10000(Attention):
    """hidden scores are -10000, so that a row that sees nothing sees all (a finite mask value)"""

    def fold(self, top, total, out, x, values):
        return super().fold(top, total, out, np.maximum(x, -10000), values)


class OutNotRescaled(Attention):
    """a new maximum rescales the sum, not the output (online softmax)"""

    def fold(self, top, total, out, x, values):
        new, whole, right = super().fold(top, total, out, x, values)
        safe = np.where(new == -INF, 0, new)
        return new, whole, right + out * (1 - np.exp(top - safe))[:, :, None]


class SumNotRescaled(Attention):
    """a new maximum rescales the output, not the sum (online softmax)"""

    def fold(self, top, total, out, x, values):
        new, whole, right = super().fold(top, total, out, x, values)
        safe = np.where(new == -INF, 0, new)
        return new, whole + total * (1 - np.exp(top - safe)), right


class RescaledByTheTile(Attention):
    """the maximum is that of the last tile, not the running one, in what is rescaled (a ring's m without max)"""

    def fold(self, top, total, out, x, values):
        new, whole, right = super().fold(top, total, out, x, values)
        return np.where(np.isneginf(x).all(axis=2), top, x.max(axis=2, initial=-INF)), whole, right


class MergeOfNothingIsNaN(Attention):
    """a merge of two partial results that are both empty makes NaN (-inf minus -inf)"""

    def merge(self, out, lse, more, more_lse):
        whole = np.logaddexp(lse, more_lse)
        return out * np.exp(lse - whole)[:, :, None] + more * np.exp(more_lse - whole)[:, :, None], whole


class MergeByMeans(Attention):
    """partial outputs are averaged, not weighted (a ring without lse)"""

    def merge(self, out, lse, more, more_lse):
        return (out + more) / 2, np.logaddexp(lse, more_lse)


class MergeSwapped(Attention):
    """each partial output has the weight of the other (lse and block_lse mixed up)"""

    def merge(self, out, lse, more, more_lse):
        return super().merge(more, lse, out, more_lse)


class MergeAddsLse(Attention):
    """lse of a merge is the larger one (max in place of logaddexp)"""

    def merge(self, out, lse, more, more_lse):
        return super().merge(out, lse, more, more_lse)[0], np.maximum(lse, more_lse)


class MergeUnnormalised(Attention):
    """partial outputs are added, weighted by exp(lse) of their own alone (overwrites the running lse)"""

    def merge(self, out, lse, more, more_lse):
        return super().merge(out, lse, more, more_lse)[0], more_lse


class EmptyBlockResets(Attention):
    """a block of which a row sees nothing resets the row (lse of -inf is taken for the first block)"""

    def merge(self, out, lse, more, more_lse):
        found, whole = super().merge(out, lse, more, more_lse)
        gone = more_lse == -INF
        return np.where(gone[:, :, None], more, found), np.where(gone, more_lse, whole)


# Tiles


class LastTileLost(Attention):
    """the last tile, which is not full, is lost (n // tile)"""

    def tiles(self, keys):
        return super().tiles(keys)[: max(1, keys // self.tile)]


class KeysBehind128(Attention):
    """keys behind the first 128 are lost (a grid of one tile)"""

    def tiles(self, keys):
        return super().tiles(min(keys, 128))


class RowsBehind128(Attention):
    """rows behind the first 128 of a rank are 0 (a grid of one tile of rows)"""

    def answered(self, out, lse):
        return super().answered(out * (np.arange(out.shape[1]) < 128)[:, None], lse)


class TilePaddingCounts(Attention):
    """keys behind the end of the last tile count with a score of 0, if the mask is not causal (no bound check)"""

    def sunk(self, out, lse):
        if self.mask == "full":
            spare = sum(-len(x) % self.tile for x in self.layout.index)
            whole = np.logaddexp(lse, np.log(spare) if spare else -INF)
            out, lse = out * np.exp(lse - np.where(whole == -INF, 0, whole))[:, :, None], whole
        return super().sunk(out, lse)


class WindowSkipsATile(Attention):
    """the first tile that a window reaches is rounded up (a start of ceil(begin / tile))"""

    def seen(self, source):
        seen = super().seen(source)
        if not self.window:
            return seen
        first = -(-np.where(seen.any(axis=1), seen.argmax(axis=1), 0) // self.tile) * self.tile
        some = seen.any(axis=1) & (first < seen.shape[1])
        return seen & ((np.arange(seen.shape[1]) >= first[:, None]) | ~some[:, None])


class DiagonalTileLost(Attention):
    """causal tiles end before the diagonal one (a bound of row // tile, not + 1)"""

    def seen(self, source):
        seen = super().seen(source)
        if self.mask != "causal" or source != self.rank:
            return seen
        last = np.maximum(np.arange(len(seen)) // self.tile * self.tile, self.tile)
        return seen & (np.arange(seen.shape[1]) < last[:, None])


# Rings and gathers


class OwnBlockTwice(Attention):
    """the rank's own keys come round once more (size + 1 steps)"""

    def steps(self):
        return [*super().steps(), self.rank]


class MaskOfTheNextStep(Attention):
    """the mask is that of the block that arrives next (a double buffer)"""

    def seen(self, source):
        return super().seen((source - 1) % self.size)


class ValuesOfTheNextStep(Attention):
    """values are those of the block that arrives next (Cornstarch #70: a stream race)"""

    def block(self, source):
        keys, _ = super().block(source)
        _, values = super().block((source - 1) % self.size)
        return keys, values


class InnerRingAlone(Attention):
    """a double ring visits the ranks of its node alone (feifeibear/long-context-attention, hybrid rings)"""

    options = {"cp": 4}

    def steps(self):
        return [r for r in super().steps() if r // 2 == self.rank // 2]


class GatheredInStreamOrder(Attention):
    """gathered keys are taken to be in the order of the stream (all-gather without the way back from the layout)"""

    def seen(self, source):
        return self.pairs()[:, np.split(np.arange(self.layout.index.size), self.size)[source]]


class HeadsComeBackInterleaved(Attention):
    """heads come back as [heads of a rank, rank] (microsoft/DeepSpeed, Ulysses: a transpose)"""

    def answered(self, out, lse):
        if self.heads % self.size:
            return super().answered(out, lse)
        order = np.arange(self.heads).reshape(self.size, -1).T.reshape(-1)
        return super().answered(out[order], lse[order])


class GradientsOneRankOn(Attention):
    """gradients of keys and values end one rank further (a ring's backward of one step less)"""

    def home(self, parts):
        return super().home(parts[-1:] + parts[:-1])


class GradientsOfOwnBlockTwice(Attention):
    """gradients of the rank's own block are added once more at home (d_kv starts with the first step)"""

    def home(self, parts):
        return super().home(parts) + parts[self.rank]


class GradientsReduceScatteredAsMean(Attention):
    """gradients of keys and values are averaged over the ranks (ReduceOp.AVG)"""

    def home(self, parts):
        return super().home(parts) / self.size


# Gradients


class DeltaLost(Attention):
    """gradients lack <out, d_out> (softmax backward)"""

    def delta(self, d_out):
        return np.zeros(d_out.shape[:2])


class DeltaOfOwnKeys(Attention):
    """<out, d_out> is that of the last block, not of the merged output (a ring that saves the block's out)"""

    def merge(self, out, lse, more, more_lse):
        self.last = more
        return super().merge(out, lse, more, more_lse)

    def delta(self, d_out):
        return (self.last * d_out).sum(axis=2)


class LseOfTheLastBlock(Attention):
    """the backward pass normalises by the lse of the last block (a ring that saves the block's lse)"""

    def merge(self, out, lse, more, more_lse):
        self.last = more_lse
        return super().merge(out, lse, more, more_lse)

    def weights(self, q, keys, source):
        x = np.where(self.seen_backward(source), self.score(q, keys), -INF)
        return np.exp(x - np.where(self.last == -INF, 0, self.last)[:, :, None])


class QueryGradientOverwritten(Attention):
    """d_q is that of the last block (a store in place of an add)"""

    def add_d_q(self, d_q, more):
        return more


class QueryGradientScaleLost(Attention):
    """d_q lacks the scale (scaled queries that are saved)"""

    def gradients(self, d_q, d_k, d_v, delta):
        return super().gradients(d_q / self.scale, d_k, d_v, delta)


class KeyGradientScaledTwice(Attention):
    """d_k is scaled twice (scaled queries that are saved, then the scale of scores)"""

    def gradients(self, d_q, d_k, d_v, delta):
        return super().gradients(d_q, d_k * self.scale, d_v, delta)


class KeyAndValueGradientSwapped(Attention):
    """d_k and d_v are swapped where they are equally wide (a stacked buffer)"""

    def gradients(self, d_q, d_k, d_v, delta):
        same = d_k.shape == d_v.shape
        return super().gradients(d_q, d_v if same else d_k, d_k if same else d_v, delta)


class SharedGradientIsAMean(Attention):
    """the gradient of shared elements is a mean over the heads (pytorch/torchtitan PR #4313)"""

    def shared_gradient(self, d_k):
        return super().shared_gradient(d_k) / self.kv_heads


class SharedElementsFirst(Attention):
    """shared elements stand before the others of a key (pytorch/torchtitan PR #4760)"""

    def score(self, q, keys):
        if self.k_shared is None:
            return super().score(q, keys)
        return super().score(q, np.roll(keys, self.k_shared.shape[1], axis=2))


class LogitsSquared(Attention):
    """the gradient of scores is p (1 - p) d_p, that of a sigmoid (softmax backward)"""

    def d_scores(self, p, d_p, delta):
        return p * (1 - p) * d_p


# Precision, in float32 runs and in those of bfloat16


class SumsInBfloat16(Attention):
    """sums of weights are added one by one in bfloat16 (an accumulator in the type of the inputs)"""

    options, is_narrow = NARROW, True
    tile = 1

    def fold(self, top, total, out, x, values):
        new, total, out = super().fold(top, total, out, x, values)
        return new, bfloat16(total), out


class SumsInBfloat16WithoutLse(SumsInBfloat16):
    """the same in a function that returns no lse"""

    def run(self):
        out, _, backward = super().run()
        return out, None, backward


class OutputsInBfloat16(SumsInBfloat16):
    """outputs are added one by one in bfloat16 (an accumulator in the type of the inputs)"""

    def fold(self, top, total, out, x, values):
        new, total, out = Attention.fold(self, top, total, out, x, values)
        return new, total, bfloat16(out)


class LseInBfloat16(Attention):
    """lse is kept in bfloat16 between the steps of a ring (zhuzilin/ring-flash-attention #42)"""

    options, is_narrow = NARROW, True

    def normal(self, top, total, out):
        out, lse = super().normal(top, total, out)
        return out, bfloat16(lse)


class ScoresInBfloat16(Attention):
    """scores are rounded to bfloat16 before exp (a matmul that returns the type of its inputs)"""

    options, is_narrow = NARROW, True

    def score(self, q, keys):
        return bfloat16(super().score(q, keys))


class KeyGradientsInBfloat16(Attention):
    """gradients of keys and values are added row by row in bfloat16 (atomics of the type of the inputs)"""

    options, is_narrow = NARROW, True

    def by_kv_head(self, gradient):
        return bfloat16(super().by_kv_head(gradient))

    def backward(self, d_out):
        steps, mine = self.seen_backward, np.arange(len(self.mine))
        total = None
        for row in range(0, len(self.mine), max(1, len(self.mine) // 100)):
            part = (mine >= row) & (mine < row + max(1, len(self.mine) // 100))
            self.seen_backward = lambda source, part=part: steps(source) & part[:, None]
            found = super().backward(d_out * part[:, None, None])
            total = found if total is None else [bfloat16(a + b) for a, b in zip(total, found)]
        self.seen_backward = steps
        return total if total is not None else super().backward(d_out)


class Float16Scores(Attention):
    """scores are float16, whose largest number is 65504 (huggingface/transformers, fp16 attention)"""

    def score(self, q, keys):
        with np.errstate(over="ignore"):
            return super().score(q, keys).astype(np.float16).astype(np.float64)


def attention_of(kind):
    def attention(q, k, v, cu_seqlens, layout, group, scale, lengths, mask, window, regions, allowed, sinks, k_shared, softcap):
        return kind(q, k, v, cu_seqlens, layout, group, scale, lengths, mask, window, regions, allowed, sinks, k_shared, softcap).run()

    return attention


class NarrowWeights(Attention):
    """Right: weights are rounded to bfloat16 before the product with values, sums are not."""

    options, is_narrow = NARROW, True

    def fold(self, top, total, out, x, values):
        new, total, _ = super().fold(top, total, out, x, values)
        safe = np.where(new == -INF, 0, new)
        p = bfloat16(np.exp(x - safe[:, :, None]))
        return new, total, out * np.exp(top - safe)[:, :, None] + p @ values


RIGHT = [
    Bug("Attention", "attention", "", attention_of(Attention), {}),
    Bug("Attention", "attention", "", attention_of(Attention), {"cp": 4, "layout": "contiguous"}),
    Bug("NarrowWeights", "attention", "", attention_of(NarrowWeights), NARROW),
]
BUGS = [bug for bug in bugs_of(Attention, "attention", attention_of) if bug.name != "NarrowWeights"]
