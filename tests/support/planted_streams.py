"""Errors of streams of documents: packing, shards, labels, layouts; and of models, which need no answers.

Functions of python/examples/ranks_numpy.py or variants of classes; the docstring says what is wrong and where it comes from.
"""

import numpy as np
import ranks_numpy as right
from planted import Bug, bugs_of

from gyre.distributed.layouts import layout_of

IGNORED = -100


class Shard:
    """Rows of a rank under any layout; boundaries are counted again."""

    options = {}

    def __init__(self, batch, rank, size, layout):
        vars(self).update(locals())
        self.bounds = batch["cu_seqlens_padded"]
        self.lengths = np.diff(batch["cu_seqlens"])
        self.slots = int(self.bounds[-1])

    def index(self):
        return layout_of(self.layout, self.bounds, self.size).index[self.rank]

    def sharded(self, name, padding):
        """What is in the rank's slots; those behind the stream have what a layout pads with."""
        whole = self.batch[name]
        wide = np.concatenate([whole, np.full((*whole.shape[:-1], self.size * 2), padding, whole.dtype)], axis=-1)
        return wide[..., self.mine]

    def ids(self):
        return self.sharded("ids", 0)

    def labels(self):
        return self.sharded("labels", IGNORED)

    def positions(self):
        return self.sharded("positions", 0)

    def counts(self, slots):
        """Of each segment, how many of the rank's slots are in these."""
        segment = np.searchsorted(self.bounds, self.mine, side="right") - 1
        return np.array([(slots[(segment == s)]).sum() for s in range(len(self.lengths))], int)

    def real(self):
        ends = self.bounds[:-1] + self.lengths
        segment = np.minimum(np.searchsorted(self.bounds, self.mine, side="right") - 1, len(ends) - 1)
        return np.cumsum([0, *self.counts((self.mine < self.slots) & (self.mine < ends[segment]))])

    def padded(self):
        return np.cumsum([0, *self.counts(self.mine < self.slots)])

    def run(self):
        self.mine = self.index()
        return {"ids": self.ids(), "labels": self.labels(), "positions": self.positions(), "cu_seqlens": self.real(),
                "cu_seqlens_padded": self.padded()}


def shard_of(kind):
    def shard(batch, rank, size, layout):
        return kind(batch, rank, size, layout).run()

    return shard


class NextChunks(Shard):
    """a rank has chunks 2r and 2r + 1 of each document (NVIDIA/Megatron-LM #3282: two meanings of contiguous)"""

    def index(self):
        parts = [np.split(np.arange(a, b), self.size)[self.rank] for a, b in zip(self.bounds, self.bounds[1:])]
        return np.concatenate(parts)


class ChunksSwapped(Shard):
    """a rank's later chunk stands before the earlier one (an order of concatenation)"""

    def index(self):
        parts = []
        for a, b in zip(self.bounds, self.bounds[1:]):
            chunks = np.split(np.arange(a, b), 2 * self.size)
            parts += [chunks[2 * self.size - 1 - self.rank], chunks[self.rank]]
        return np.concatenate(parts)


class LateChunkReversed(Shard):
    """the later chunk of a rank runs backwards (a flip of the whole second half)"""

    def index(self):
        parts = []
        for a, b in zip(self.bounds, self.bounds[1:]):
            chunks = np.split(np.arange(a, b), 2 * self.size)
            parts += [chunks[self.rank], chunks[2 * self.size - 1 - self.rank][::-1]]
        return np.concatenate(parts)


class LateChunkInOrder(Shard):
    """the later chunk of rank r is cp + r, not 2 cp - 1 - r (no swap)"""

    def index(self):
        parts = []
        for a, b in zip(self.bounds, self.bounds[1:]):
            chunks = np.split(np.arange(a, b), 2 * self.size)
            parts += [chunks[self.rank], chunks[self.size + self.rank]]
        return np.concatenate(parts)


class EarlyChunksOfAll(Shard):
    """the earlier chunks of all documents stand before all later ones (a layout of the whole stream in one buffer)"""

    def index(self):
        early, late = [], []
        for a, b in zip(self.bounds, self.bounds[1:]):
            chunks = np.split(np.arange(a, b), 2 * self.size)
            early.append(chunks[self.rank])
            late.append(chunks[2 * self.size - 1 - self.rank])
        return np.concatenate(early + late)


class RanksReversed(Shard):
    """rank r has the shard of rank cp - 1 - r (a reversed group)"""

    def index(self):
        return layout_of(self.layout, self.bounds, self.size).index[self.size - 1 - self.rank]


class WholeStreamHeadAndTail(Shard):
    """the whole stream is cut, not each document (PyTorch context_parallel for packed documents)"""

    def index(self):
        return layout_of("zigzag", self.bounds, self.size).index[self.rank][: self.slots // self.size]


class TailDropped(Shard):
    """slots that the ranks do not divide are dropped: the last rank has padding in their place (fla-org/flash-linear-attention #1092)"""

    options = {"layout": "contiguous"}

    def ids(self):
        kept = self.slots // self.size * self.size
        return np.where(self.mine < kept, super().ids(), 0)


class StripesOfTwo(Shard):
    """stripes are two slots wide (a stripe in elements of 32 bits)"""

    options = {"layout": "striped"}

    def index(self):
        return np.arange(-(-self.slots // (2 * self.size)) * 2 * self.size).reshape(-1, self.size, 2)[:, self.rank].reshape(-1)[
            : -(-self.slots // self.size)]


class ContiguousForStriped(Shard):
    """rows are split, not dealt (reshape of [cp, n] for [n, cp])"""

    options = {"layout": "striped"}

    def index(self):
        return layout_of("contiguous", self.bounds, self.size).index[self.rank]


class ZigzagWithoutTail(Shard):
    """the stream's second half is not mirrored (zigzag without zag)"""

    options = {"layout": "zigzag"}

    def index(self):
        chunks = np.split(np.arange(-(-self.slots // (2 * self.size)) * 2 * self.size), 2 * self.size)
        return np.concatenate([chunks[self.rank], chunks[self.size + self.rank]])


class PaddingOfALayoutIsTokenZero(Shard):
    """padding that a layout adds wraps to the first token of the stream (an index modulo the slots)"""

    options = {"layout": "contiguous"}

    def sharded(self, name, padding):
        return self.batch[name][..., self.mine % max(1, self.slots)]


class PaddingOfALayoutHasLabels(Shard):
    """padding that a layout adds has the label 0 (zeros in place of -100)"""

    options = {"layout": "contiguous"}

    def labels(self):
        return self.sharded("labels", 0)


class LengthsOverRanks(Shard):
    """a rank has length // cp real tokens of each document (NVIDIA/TransformerEngine #1929)"""

    def real(self):
        return np.cumsum([0, *(self.lengths // self.size)])


class LengthsRoundedUp(Shard):
    """a rank has ceil(length / cp) real tokens of each document (NVIDIA/TransformerEngine #3331)"""

    def real(self):
        return np.cumsum([0, *-(-self.lengths // self.size)])


class BoundariesOverRanks(Shard):
    """real boundaries, not lengths, are divided by cp (ISEEKYAN/Megatron-LM #111)"""

    def real(self):
        return self.batch["cu_seqlens"] // self.size


class BoundariesOfTheStream(Shard):
    """boundaries of the rank are those of the whole stream (NVIDIA-NeMo/Megatron-Bridge #1964)"""

    def padded(self):
        return self.bounds


class BoundariesWithPadding(Shard):
    """real boundaries count padding, too (cu_seqlens for cu_seqlens_padded)"""

    def real(self):
        return self.padded()


class BoundariesWithoutPadding(Shard):
    """boundaries of slots do not count padding (cu_seqlens_padded for cu_seqlens)"""

    def padded(self):
        return self.real()


class EmptyDocumentsHaveOne(Shard):
    """a document of no token counts as one (max(length, 1))"""

    def real(self):
        return np.cumsum([0, *np.maximum(np.diff(super().real()), 1)])


class LengthsNotSummed(Shard):
    """boundaries are lengths, not their running sums (seqlens for cu_seqlens)"""

    def real(self):
        return np.concatenate([[0], np.diff(super().real())])



class PositionsOfTheShard(Shard):
    """positions begin anew with each document's part on the rank (NVIDIA/Megatron-LM #5243)"""

    def positions(self):
        found, bounds = super().positions().copy(), self.padded()
        for a, b in zip(bounds, bounds[1:]):
            found[..., a:b] = np.arange(b - a)
        return found


class PositionsOfPaddingAreZero(Shard):
    """positions of padding are 0 (a mask that multiplies)"""

    def positions(self):
        ends = self.bounds[:-1] + self.lengths
        segment = np.minimum(np.searchsorted(self.bounds, self.mine, side="right") - 1, len(ends) - 1)
        return super().positions() * (self.mine < ends[segment])


class PositionsFromOne(Shard):
    """positions begin at 1 (cumsum of the mask)"""

    def positions(self):
        return super().positions() + 1


class PositionsOfLastAxis(Shard):
    """every axis has the positions of the last one (width for time)"""

    def positions(self):
        found = super().positions()
        return np.broadcast_to(found[-1:], found.shape) if found.ndim > 1 else found


class AxesReversed(Shard):
    """axes of positions come in the other order (h, w for w, h)"""

    def positions(self):
        found = super().positions()
        return found[::-1] if found.ndim > 1 else found


class LabelsOfTheShard(Shard):
    """labels are the next ids of the shard, the last one's is -100 (hiyouga/LLaMA-Factory #10475)"""

    def labels(self):
        return np.append(self.ids()[1:], IGNORED)[: len(self.mine)]


class LabelsOfTheTokens(Shard):
    """labels are the ids themselves (a shift left to a loss that has none)"""

    def labels(self):
        return np.where(super().labels() == IGNORED, IGNORED, self.ids())


class LabelsOfTheTokenBefore(Shard):
    """labels are the ids before (a shift in the other direction)"""

    def labels(self):
        return np.where(super().labels() == IGNORED, IGNORED, np.roll(self.batch["ids"], 1)[np.minimum(self.mine, self.slots - 1)])


class LastTokenHasALabel(Shard):
    """the last token of a document has its own first token for a label (a roll of each document)"""

    def labels(self):
        whole = self.batch["labels"].copy()
        for a, n in zip(self.bounds, self.lengths):
            if n:
                whole[a + n - 1] = self.batch["ids"][a]
        return np.append(whole, [IGNORED] * 2 * self.size)[self.mine]


class LabelZeroIsPadding(Shard):
    """a label of id 0 is taken for padding (padding that is found by its id, NVIDIA-NeMo/Automodel #3223)"""

    def labels(self):
        found = super().labels()
        return np.where(found == 0, IGNORED, found)


class IdsOfOneByte(Shard):
    """ids are stored in 6 bits (a type that is too narrow for the vocabulary)"""

    def ids(self):
        return super().ids() & 63


class Labels:
    """Labels `shift` tokens on of the whole stream, then the rows of the rank."""

    options = {}

    def __init__(self, batch, shift, rank, size, group):
        vars(self).update(locals())
        self.ids, self.bounds, self.lengths = batch["ids"], batch["cu_seqlens_padded"], np.diff(batch["cu_seqlens"])

    def count(self):
        return self.shift

    def of_document(self, ids, shift):
        """Labels of a document's tokens."""
        return np.append(ids[shift:], [IGNORED] * shift)[: len(ids)]

    def whole(self):
        found = np.full(len(self.ids), IGNORED)
        for a, n in zip(self.bounds, self.lengths):
            found[a : a + n] = self.of_document(self.ids[a : a + n], self.count())
        return found

    def sharded(self, whole):
        return right.shard({**self.batch, "labels": whole}, self.rank, self.size, "dual-chunk-swap")["labels"]

    def run(self):
        return self.sharded(self.whole())


def labels_of(kind):
    def labels(batch, shift, rank, size, group):
        return kind(batch, shift, rank, size, group).run()

    return labels


class ShiftedAfterSharding(Labels):
    """each shard shifts its own ids and masks its last rows (hiyouga/LLaMA-Factory #10475)"""

    def run(self):
        ids = self.sharded(self.ids)
        return np.append(ids[self.shift :], [IGNORED] * self.shift)[: len(ids)]


class RolledInTheDocument(Labels):
    """a document's labels are rolled: its last tokens have its first ones (NVIDIA/Megatron-LM #6205)"""

    def of_document(self, ids, shift):
        return np.roll(ids, -shift)


class RolledWithOneMasked(Labels):
    """a document's labels are rolled, and the last one alone is masked (multi-token prediction of depth 1)"""

    def of_document(self, ids, shift):
        return np.append(np.roll(ids, -shift)[:-1], [IGNORED])[: len(ids)]


class ShiftLessOne(Labels):
    """depth k is shifted by k - 1 (depths that count from 0)"""

    def count(self):
        return self.shift - 1


class ShiftMoreOne(Labels):
    """depth k is shifted by k + 1 (labels that were shifted already)"""

    def count(self):
        return self.shift + 1


class ShiftsAddUp(Labels):
    """every depth shifts the labels of the one before by its own number (NVIDIA/Megatron-LM #6205)"""

    def count(self):
        return self.shift * (self.shift + 1) // 2


class ShiftByAtMostTwo(Labels):
    """the halo between ranks has two tokens (a fixed halo for multi-token prediction)"""

    def count(self):
        return min(self.shift, 2)


class ShortDocumentsKeepTheirs(Labels):
    """a document that is not longer than the shift keeps its ids (a slice of -0)"""

    def of_document(self, ids, shift):
        return ids if len(ids) <= shift else super().of_document(ids, shift)


class NextRankForNextChunk(Labels):
    """the last rows of a chunk get the first of the same chunk of the next rank (NVIDIA/Megatron-LM #4495)"""

    def run(self):
        found, ids = super().run(), self.sharded(self.ids)
        ahead = self.group.all_gather(ids)[(self.rank + 1) % self.size]
        rows = self.sharded(np.arange(len(self.ids)))
        breaks = np.flatnonzero(np.diff(rows) != 1)
        for at in breaks:
            if found[at] != IGNORED:
                found[at] = ahead[at]
        return found


class PaddingHasIds(Labels):
    """labels are shifted over slots: the last tokens have padding's ids (cu_seqlens_padded for cu_seqlens)"""

    def whole(self):
        found = np.full(len(self.ids), IGNORED)
        for a, b in zip(self.bounds, self.bounds[1:]):
            found[a:b] = self.of_document(self.ids[a:b], self.shift)
        return found


class Unshard:
    """All shards are gathered, and each row goes to its slot."""

    options = {}

    def __init__(self, shard, rank, size, group, layout, cu_seqlens_padded):
        vars(self).update(locals())

    def index(self):
        return layout_of(self.layout, self.cu_seqlens_padded, self.size).index

    def gathered(self, part):
        return self.group.all_gather(part)

    def restored(self, part):
        found = np.zeros((*part.shape[:-1], self.index().size), part.dtype)
        for rows, piece in zip(self.index(), self.gathered(part)):
            found[..., rows] = piece
        return found

    def run(self):
        return {name: self.restored(part) for name, part in self.shard.items()}


def unshard_of(kind):
    def unshard(shard, rank, size, group, layout, cu_seqlens_padded):
        return kind(shard, rank, size, group, layout, cu_seqlens_padded).run()

    return unshard


class GatheredFromTheNext(Unshard):
    """shards are gathered beginning with the next rank (a ring of sends)"""

    def gathered(self, part):
        found = super().gathered(part)
        return found[1:] + found[:1]


class OwnShardForAll(Unshard):
    """every rank puts its own shard everywhere (a gather that is not waited for)"""

    def gathered(self, part):
        return [part] * self.size


class OwnRowsAlone(Unshard):
    """other ranks' rows stay 0 (a reduction that is missing)"""

    def gathered(self, part):
        return [x if r == self.rank else 0 * x for r, x in enumerate(super().gathered(part))]


class InverseForIndex(Unshard):
    """rows are taken by the index, not put (argsort that is missing)"""

    def restored(self, part):
        whole = np.concatenate(self.gathered(part), axis=-1)
        return whole[..., self.index().reshape(-1)]


class WholeStreamRestored(Unshard):
    """the whole stream is put together head and tail, not each document (PyTorch context_parallel_unshard)"""

    def index(self):
        return layout_of("zigzag", self.cu_seqlens_padded, self.size).index


class SumOfOverlaps(Unshard):
    """shards are added into the stream twice (scatter_add over two axes)"""

    def restored(self, part):
        return 2 * super().restored(part)


class ChunksRestoredInRankOrder(Unshard):
    """chunks are put together as 0, 1, 2, 3 by rank: rank 0's two, then rank 1's (NVIDIA/Megatron-LM, gather of THD)"""

    def index(self):
        parts = [np.split(np.arange(a, b), self.size) for a, b in zip(self.cu_seqlens_padded, self.cu_seqlens_padded[1:])]
        return np.stack([np.concatenate([p[r] for p in parts]) for r in range(self.size)])


class FirstAxisRestored(Unshard):
    """of positions of several axes the first one is restored, the others repeat it (a view of [1, slots])"""

    def restored(self, part):
        found = super().restored(part)
        return np.broadcast_to(found[:1], found.shape) if found.ndim > 1 else found


class Relayout:
    """Every row goes to its owner under the other layout, and its gradient comes back the same way."""

    options = {}

    def __init__(self, rows, rank, size, group, cu_seqlens_padded, source, target):
        vars(self).update(locals())

    def index(self, name):
        return layout_of(name, self.cu_seqlens_padded, self.size).index

    def moved(self, rows, source, target):
        whole = np.empty((self.index(source).size, rows.shape[1]), rows.dtype)
        for mine, part in zip(self.index(source), self.group.all_gather(rows)):
            whole[mine] = part
        return whole[self.index(target)[self.rank]]

    def forward(self):
        return self.moved(self.rows, self.source, self.target)

    def backward(self, d_rows):
        return self.moved(d_rows, self.target, self.source)

    def run(self):
        return self.forward(), self.backward


def relayout_of(kind):
    def relayout(rows, rank, size, group, cu_seqlens_padded, source, target):
        return kind(rows, rank, size, group, cu_seqlens_padded, source, target).run()

    return relayout


class ForwardForBackward(Relayout):
    """the gradient takes the way of the rows, not the way back (a permutation for its inverse)"""

    def backward(self, d_rows):
        return self.moved(d_rows, self.source, self.target)


class GradientStays(Relayout):
    """the gradient is not moved (an identity)"""

    def backward(self, d_rows):
        return d_rows


class GradientIsAMean(Relayout):
    """the gradient is divided by the ranks (a reduce-scatter of type AVG)"""

    def backward(self, d_rows):
        return super().backward(d_rows) / self.size


class GradientOfGather(Relayout):
    """the gradient of an all-gather is summed over the ranks, which have other rows (NVIDIA/Megatron-LM #673)"""

    def backward(self, d_rows):
        return self.group.all_reduce(super().backward(d_rows))


class ToTheBackAlone(Relayout):
    """the way back is the way there (one table for both directions)"""

    def forward(self):
        return self.moved(self.rows, "dual-chunk-swap", "contiguous")


class BoundariesOfTheRank(Relayout):
    """documents are found by boundaries over cp (ISEEKYAN/Megatron-LM #111)"""

    def index(self, name):
        bounds = self.cu_seqlens_padded // self.size
        index = layout_of("dual-chunk-swap", bounds * self.size, self.size).index if name == "dual-chunk-swap" else super().index(name)
        order = np.argsort(index[self.rank] % max(1, int(bounds[-1])), kind="stable")
        return index[:, order] if name == "dual-chunk-swap" else index


class OneDocument(Relayout):
    """the stream is taken for one document (one sequence in the parity test, ISEEKYAN/Megatron-LM #111)"""

    def index(self, name):
        return layout_of("zigzag", self.cu_seqlens_padded, self.size).index if name == "dual-chunk-swap" else super().index(name)


class RowsInFloat16(Relayout):
    """rows travel as float16 (compressed messages)"""

    def forward(self):
        return self.moved(self.rows.astype(np.float16), self.source, self.target).astype(self.rows.dtype)


class RowsOfTheFirstAlone(Relayout):
    """every rank has the rows of rank 0 (a broadcast)"""

    def forward(self):
        return self.group.broadcast(super().forward())


class StripedForContiguous(Relayout):
    """rows are dealt, not split (reshape of [n, cp] for [cp, n])"""

    def index(self, name):
        found = super().index(name)
        return np.arange(found.size).reshape(-1, self.size).T if name == "contiguous" else found


class Pack:
    """First-fit decreasing."""

    options = {}

    def __init__(self, lengths, capacity, rank, size):
        vars(self).update(locals())

    def order(self):
        return sorted(range(len(self.lengths)), key=lambda d: -self.lengths[d])

    def length(self, document):
        return self.lengths[document]

    def room(self):
        return self.capacity

    def fits(self, free, length):
        return free >= length

    def run(self):
        bins, room = [], []
        for d in self.order():
            n = self.length(d)
            at = next((b for b, free in enumerate(room) if self.fits(free, n)), len(bins))
            if at == len(bins):
                bins.append([])
                room.append(self.room())
            bins[at].append(d)
            room[at] -= n
        return self.packed(bins)

    def packed(self, bins):
        return bins


def pack_of(kind):
    def pack(lengths, capacity, rank, size):
        return kind(lengths, capacity, rank, size).run()

    return pack


class PackByCount(Pack):
    """as many bins as the sum of lengths needs, evened out (volcengine/verl #7553)"""

    def run(self):
        bins = [[] for _ in range(max(1, -(-sum(self.lengths) // self.capacity)))]
        load = [0] * len(bins)
        for d in self.order():
            b = int(np.argmin(load))
            bins[b].append(d)
            load[b] += self.lengths[d]
        return bins


class BinsOfTheRanks(PackByCount):
    """as many bins as there are ranks, evened out (sequence-length balancing without a bound)"""

    def run(self):
        self.capacity = max(self.capacity, -(-sum(self.lengths) // self.size))
        return super().run()


class RoomForOneMore(Pack):
    """a document fits if the bin is not full yet (a test before the addition)"""

    def fits(self, free, length):
        return free > 0


class OverfullByOne(Pack):
    """a bin takes one token more (<= for <)"""

    def fits(self, free, length):
        return free + 1 >= length


class LengthsLessTheLast(Pack):
    """lengths are counted without the last token, which has no label (tokens and labels mixed up)"""

    def length(self, document):
        return max(0, self.lengths[document] - 1)


class LongOnesDropped(Pack):
    """documents longer than a bin are dropped (a filter before packing)"""

    def packed(self, bins):
        return [[d for d in one if self.lengths[d] <= self.capacity] for one in bins]


class LongOnesSplit(Pack):
    """documents longer than a bin are in two bins (a split that keeps the index)"""

    def packed(self, bins):
        return bins + [[d] for one in bins for d in one if self.lengths[d] > self.capacity]


class LongOnesShareABin(Pack):
    """a document longer than a bin leaves room for others (a negative room that is clamped)"""

    def fits(self, free, length):
        return free >= length or free < 0 and length <= 3


class PlacesForDocuments(Pack):
    """bins hold places of the sorted list, not documents (an argsort that is lost)"""

    def packed(self, bins):
        place = {d: i for i, d in enumerate(self.order())}
        return [[place[d] for d in one if self.lengths[place[d]] or True] for one in bins]


class PlacesAreUnsorted(Pack):
    """lengths are sorted, the indices of bins are not mapped back: bins are too full (an argsort that is lost)"""

    def order(self):
        return list(range(len(self.lengths)))

    def length(self, document):
        return sorted(self.lengths, reverse=True)[document]


class LastBinDropped(Pack):
    """the last bin, which is not full, is dropped (drop_last)"""

    def packed(self, bins):
        return bins[:-1]


class BinsMadeEven(Pack):
    """bins are dropped until the ranks divide them (drop_last over data-parallel ranks)"""

    def packed(self, bins):
        return bins[: len(bins) // self.size * self.size]


class BinsRepeated(Pack):
    """bins are repeated until the ranks divide them (DistributedSampler)"""

    def packed(self, bins):
        return bins + bins[: -len(bins) % self.size]


class SixtyFourDocuments(Pack):
    """documents from the 64th on share places with the first ones (a mask of 64 bits)"""

    def packed(self, bins):
        return [[d % 64 for d in one] for one in bins]


class LengthsOfFourBits(Pack):
    """lengths are stored modulo 16 (a type that is too narrow)"""

    def length(self, document):
        return self.lengths[document] % 16


class OtherOrderOnEveryRank(Pack):
    """equal lengths are ordered by chance, which ranks do not share (an unseeded shuffle)"""

    def order(self):
        return sorted(super().order(), key=lambda d: (-self.lengths[d], d if self.rank == 0 else -d))


class WorstFitWithoutLimit(Pack):
    """the emptiest bin takes the document if no bin has room (a limit on the number of bins)"""

    def run(self):
        most = max(1, -(-sum(self.lengths) // self.capacity))
        bins, load = [], []
        for d in self.order():
            at = next((b for b, n in enumerate(load) if n + self.lengths[d] <= self.capacity), len(bins))
            if at == len(bins) and len(bins) < most:
                bins.append([])
                load.append(0)
            at = min(at, int(np.argmin(load)) if at >= len(load) else at)
            bins[at].append(d)
            load[at] += self.lengths[d]
        return bins


class Model:
    """One layer of attention whose heads are parts of a token, by the example's."""

    options = {}

    def __init__(self, x, cu_seqlens, layout, group, allowed, sinks, lengths):
        vars(self).update(locals())
        slots = np.arange(layout.index.size)
        self.mine = layout.index[group.rank]
        self.segment = np.searchsorted(cu_seqlens, slots, side="right") - 1

    def seen(self):
        return self.allowed

    def before(self, x):
        return x, lambda d: d

    def run(self):
        x, way = self.before(self.x)
        y, backward = right.model(x, self.cu_seqlens, self.layout, self.group, self.seen(), self.sinks)
        return y, lambda d_y: way(backward(d_y)).astype(self.x.dtype)


def model_of(kind):
    def model(x, cu_seqlens, layout, group, allowed, sinks, lengths):
        return kind(x, cu_seqlens, layout, group, allowed, sinks, lengths).run()

    model.layers = 1
    return model


class NormOverRows(Model):
    """tokens are centred by the mean of the rank's rows (batch statistics in place of a token's)"""

    def before(self, x):
        return x - x.mean(axis=0, keepdims=True), lambda d: d - d.mean(axis=0, keepdims=True)


class TokenBeforeOfTheRank(Model):
    """a convolution takes the row before on the rank, whatever its document (fla-org/flash-linear-attention, halo of a convolution)"""

    def before(self, x):
        def way(d):
            return d + np.append(d[1:], 0 * d[:1], axis=0) / 2

        return x + np.append(0 * x[:1], x[:-1], axis=0) / 2, way


class StateAcrossDocuments(Model):
    """a running mean of the rank's rows is not reset at documents (a recurrent state)"""

    def before(self, x):
        n = np.arange(1, len(x) + 1)[:, None]
        return x + np.cumsum(x, axis=0) / n, lambda d: d + np.cumsum((d / n)[::-1], axis=0)[::-1]


class FirstTokenSeenByAll(Model):
    """the first token of the stream is seen by all (attention sinks of the first tokens)"""

    def seen(self):
        found = self.allowed.copy()
        found[self.allowed.any(axis=1), 0] = True
        return found


class NextDocumentSeen(Model):
    """a document's last token sees the next one's first (a boundary that is off by one)"""

    def seen(self):
        found = self.allowed.copy()
        for row, slot in enumerate(self.mine):
            after = slot + 1
            if after < found.shape[1] and self.allowed[row].any() and self.segment[after] != self.segment[slot]:
                found[row, after] = True
        return found


class OwnTokenAlone(Model):
    """keys of other ranks are detached: their gradient is lost (all-gather without a backward)"""

    options = {"cp": 2}

    def run(self):
        y, backward = super().run()
        owner = np.empty(self.layout.index.size, int)
        owner[self.layout.index] = np.arange(self.layout.cp)[:, None]
        mine = right.model(self.x, self.cu_seqlens, self.layout, self.group, self.seen() & (owner == self.group.rank), self.sinks)[1]
        return y, mine


BUGS = [
    *bugs_of(Shard, "shard", shard_of), *bugs_of(Labels, "labels", labels_of), *bugs_of(Unshard, "unshard", unshard_of),
    *bugs_of(Relayout, "relayout", relayout_of), *bugs_of(Pack, "pack", pack_of), *bugs_of(Model, "model", model_of),
]
RIGHT = [
    *(Bug("Shard", "shard", "", shard_of(Shard), {"layout": layout}) for layout in ("dual-chunk-swap", "contiguous", "striped", "zigzag")),
    Bug("Labels", "labels", "", labels_of(Labels), {}),
    Bug("Unshard", "unshard", "", unshard_of(Unshard), {"cp": 4}),
    Bug("Relayout", "relayout", "", relayout_of(Relayout), {"cp": 4, "layout": "striped"}),
    Bug("Relayout", "relayout", "", relayout_of(Relayout), {}),
    Bug("Pack", "pack", "", pack_of(Pack), {}),
    Bug("Model", "model", "", model_of(Model), {}),
]
