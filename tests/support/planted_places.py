"""Errors of one step of a ring, or of one rank: variants of right classes that are wrong in one place alone.

The docstring of a variant says what it does; WHERE of a class: the step or the rank that is wrong. Some errors are those of
the other modules, on one rank (at_rank) or on one step (at_step).
"""

import numpy as np
import planted_attention as attention
import planted_rows as rows
import planted_streams as streams
from planted import Bug
from planted_attention import INF, Attention
from planted_rows import LogProb, Loss
from planted_streams import Labels, Shard, Unshard

FOUR, LAST = {"cp": 4}, -1


class Stepped(Attention):
    """The right one, which knows its step, forward and backward."""

    def steps(self):
        for self.step, source in enumerate(super().steps()):
            yield source

    def is_last(self):
        return self.step == self.size - 1


def at_step(kind, step):
    """Methods of a variant on one step (-1: the last), those of the right class on others."""

    def choose(name):
        wrong, right = getattr(kind, name), getattr(Stepped, name)

        def method(self, *given):
            is_here = self.is_last() if step == LAST else self.step == step
            return (wrong if is_here and self.size > 1 else right)(self, *given)

        return method

    names = [name for name in vars(kind) if callable(getattr(kind, name))]
    return type(kind.__name__, (kind, Stepped) if kind.__mro__[1] is Attention else (kind,), {n: choose(n) for n in names})


class MaskOffByOne(Stepped):
    """the mask is off by one: a query sees the next key"""

    def seen(self, source):
        keys, slots = self.layout.index[source], self.layout.index.size
        before = np.maximum(keys - 1, 0)
        inside = (self.segment[before] == self.segment[keys]) & self.real[keys] & (keys > 0)
        return self.pairs()[:, keys] | self.pairs()[:, before] & inside if slots else super().seen(source)


class MaskStrict(Stepped):
    """the mask is strict: a query does not see its own key"""

    def seen(self, source):
        return super().seen(source) & (self.mine[:, None] != self.layout.index[source])


class CausalLostInBlock(Stepped):
    """a block is seen whole but for documents: one future block (a flag causal=False)"""

    def seen(self, source):
        keys = self.layout.index[source]
        same = (self.segment[self.mine][:, None] == self.segment[keys]) & self.real[self.mine][:, None] & self.real[keys]
        return same if self.mask == "causal" else super().seen(source)


class BackwardMaskOffByOne(MaskOffByOne):
    """the mask of the backward pass is off by one"""

    seen = Stepped.seen

    def seen_backward(self, source):
        return MaskOffByOne.seen(self, source)


class LseNotUpdated(Stepped):
    """a merge does not update lse"""

    def merge(self, out, lse, more, more_lse):
        return super().merge(out, lse, more, more_lse)[0], lse


class OutNotRescaledByMerge(Stepped):
    """a merge does not rescale the running output"""

    def merge(self, out, lse, more, more_lse):
        whole = np.logaddexp(lse, more_lse)
        return out + more * np.exp(more_lse - np.where(whole == -INF, 0, whole))[:, :, None], whole


class BlockNotWeighted(Stepped):
    """a merge adds the block's output without its weight"""

    def merge(self, out, lse, more, more_lse):
        whole = np.logaddexp(lse, more_lse)
        return out * np.exp(lse - np.where(whole == -INF, 0, whole))[:, :, None] + more, whole


class KeysForValues(Stepped):
    """K and V are exchanged"""

    def block(self, source):
        keys, values = super().block(source)
        return (values, keys) if keys.shape == values.shape else (keys, values)


class ScoresUnscaled(Stepped):
    """scores lack the scale"""

    def score(self, q, keys):
        return super().score(q, keys) / self.scale


class BlockOfTheStepBefore(Stepped):
    """the block of the step before is used again (a buffer that is not swapped)"""

    def block(self, source):
        return super().block((source + 1) % self.size)


class ValuesOfTheStepBefore(Stepped):
    """values are those of the step before (a buffer that is not swapped)"""

    def block(self, source):
        return tuple(super().block(source))[0], tuple(super().block((source + 1) % self.size))[1]


class BlockUnseen(Stepped):
    """a block is not seen (a step that is skipped)"""

    def seen(self, source):
        return np.zeros_like(super().seen(source))


class QueryGradientTwice(Stepped):
    """d_q is added twice"""

    def add_d_q(self, d_q, more):
        return d_q + 2 * more


class QueryGradientLost(Stepped):
    """d_q is not added"""

    def add_d_q(self, d_q, more):
        return d_q


class QueryGradientOfOtherHalf(Stepped):
    """d_q is added to the other half of the rank's rows"""

    def add_d_q(self, d_q, more):
        return d_q + np.roll(more, more.shape[1] // 2, axis=1)


class KeyGradientsTwice(Stepped):
    """d_k and d_v are added twice"""

    def by_kv_head(self, gradient):
        return 2 * super().by_kv_head(gradient)


class KeyGradientsLost(Stepped):
    """d_k and d_v are not added"""

    def by_kv_head(self, gradient):
        return 0 * super().by_kv_head(gradient)


class DeltaIsZero(Stepped):
    """<out, d_out> is not subtracted"""

    def d_scores(self, p, d_p, delta):
        return p * d_p


class KeyGradientsTwiceAtHome(Stepped):
    """d_k and d_v of a rank's keys are doubled"""

    def home(self, parts):
        return 2 * super().home(parts)


class KeyGradientsInOtherHalf(Stepped):
    """d_k and d_v of a rank's keys have their halves exchanged"""

    def home(self, parts):
        found = super().home(parts)
        return np.roll(found, len(found) // 2, axis=0)


class ValueGradientTwice(Stepped):
    """d_v is doubled, d_k is not"""

    def gradients(self, d_q, d_k, d_v, delta):
        return super().gradients(d_q, d_k, 2 * d_v, delta)


def halves_exchanged(rows, bounds):
    """Rows of a rank, document by document; the halves of each are exchanged."""
    parts = [rows[(rows >= a) & (rows < b)] for a, b in zip(bounds[:-1], bounds[1:])]
    return np.concatenate([np.zeros(0, int), *(np.roll(part, len(part) // 2) for part in parts)])


class HalvesExchanged(Stepped):
    """the rank takes its later chunks for its earlier ones: zigzag in the other order"""

    def pairs(self):
        return self.causal_of(self.swapped())

    def swapped(self):
        return halves_exchanged(self.mine, self.cu_seqlens)

    def causal_of(self, rows):
        i, j = rows[:, None], np.arange(self.layout.index.size)
        seen = (i >= j) & ((i - j < self.window) | (self.window == 0)) & (self.segment[i] == self.segment)
        return seen & self.real[i] & self.real if self.mask == "causal" and len(rows) == len(self.mine) else self.allowed


class MirrorOffByOne(HalvesExchanged):
    """the rank's later chunks are taken to be one chunk earlier than they are (2 cp - 2 - r)"""

    def swapped(self):
        rows = self.mine.copy()
        for a, b in zip(self.cu_seqlens[:-1], self.cu_seqlens[1:]):
            inside = np.flatnonzero((rows >= a) & (rows < b))
            late = inside[len(inside) // 2 :]
            rows[late] = np.maximum(rows[late] - len(late), a)
        return rows


class HeadMissesTheLastBlock(Stepped):
    """head 0 misses the last block"""

    def merge(self, out, lse, more, more_lse):
        if self.is_last():
            more_lse = more_lse.copy()
            more_lse[0] = -INF
        return super().merge(out, lse, more, more_lse)


ON_A_STEP = [  # variant, step, options
    (MaskOffByOne, 0, {}), (MaskOffByOne, 1, {}), (MaskOffByOne, 2, FOUR), (MaskStrict, 0, {}),
    (CausalLostInBlock, 0, {}), (CausalLostInBlock, LAST, {}), (CausalLostInBlock, 1, FOUR | {"layout": "contiguous"}),
    (BackwardMaskOffByOne, 1, {}), (BackwardMaskOffByOne, 0, FOUR),
    (LseNotUpdated, LAST, {}), (LseNotUpdated, 1, FOUR), (LseNotUpdated, LAST, FOUR),
    (OutNotRescaledByMerge, LAST, {}), (OutNotRescaledByMerge, 1, FOUR), (OutNotRescaledByMerge, LAST, FOUR),
    (BlockNotWeighted, LAST, {}), (BlockNotWeighted, 2, FOUR),
    (KeysForValues, 1, {}), (KeysForValues, 2, FOUR), (ScoresUnscaled, 1, {}), (ScoresUnscaled, 0, FOUR),
    (BlockOfTheStepBefore, 1, {}), (BlockOfTheStepBefore, 2, FOUR), (ValuesOfTheStepBefore, LAST, FOUR),
    (BlockUnseen, 1, FOUR), (BlockUnseen, LAST, FOUR),
    (QueryGradientTwice, 1, {}), (QueryGradientTwice, 2, FOUR), (QueryGradientLost, 0, {}), (QueryGradientLost, LAST, FOUR),
    (QueryGradientOfOtherHalf, 1, {}), (QueryGradientOfOtherHalf, 2, FOUR),
    (KeyGradientsTwice, 1, {}), (KeyGradientsTwice, 0, {}), (KeyGradientsTwice, 2, FOUR), (KeyGradientsLost, 1, {}),
    (KeyGradientsLost, LAST, FOUR), (DeltaIsZero, 1, {}), (DeltaIsZero, LAST, FOUR),
    (attention.MergeAddsLse, 1, FOUR), (attention.MergeByMeans, LAST, FOUR), (attention.MergeSwapped, 1, FOUR),
]
ON_A_RANK = [  # variant, rank, options
    (MaskOffByOne, 1, {}), (MaskStrict, 0, FOUR), (CausalLostInBlock, 1, {}), (CausalLostInBlock, 2, FOUR),
    (BackwardMaskOffByOne, 1, {}), (LseNotUpdated, 0, {}), (OutNotRescaledByMerge, 1, {}), (BlockNotWeighted, 0, FOUR),
    (KeysForValues, 1, {}), (KeysForValues, 3, FOUR), (ScoresUnscaled, 1, {}), (QueryGradientTwice, 1, {}),
    (KeyGradientsTwice, 0, {}), (KeyGradientsLost, 2, FOUR), (KeyGradientsTwiceAtHome, 1, {}), (KeyGradientsTwiceAtHome, 2, FOUR),
    (KeyGradientsInOtherHalf, 1, {}), (KeyGradientsInOtherHalf, 0, FOUR), (ValueGradientTwice, 1, {}), (DeltaIsZero, 1, {}),
    (HalvesExchanged, 1, {}), (HalvesExchanged, 0, FOUR), (MirrorOffByOne, 1, {}), (MirrorOffByOne, 2, FOUR),
    (HeadMissesTheLastBlock, 1, {}), (attention.ScaleTwice, 1, {}), (attention.OwnBlockTwice, 1, {}),
    (attention.DeltaOfOwnKeys, 1, {}), (attention.LseOfTheLastBlock, 0, {}), (attention.RepeatForInterleave, 1, {}),
    (attention.QueryGradientOverwritten, 1, {}), (attention.WindowLostBackward, 1, {}), (attention.KeyGradientScaledTwice, 1, {}),
    (attention.CausalLostBackward, 0, {}), (attention.KeyAndValueGradientSwapped, 1, {}), (attention.PaddedApart, 0, {}),
]


class MaximumNotReduced(LogProb):
    """the maximum is not reduced on the rank"""

    def highest(self, top):
        super().highest(top)
        return top


class GradientOfOwnMaximum(LogProb):
    """the softmax of the gradient has the rank's own maximum"""

    def probability(self):
        return self.exp(self.x, self.largest(self.x)) / self.sum[:, None]


class TargetTemperatureTwice(LogProb):
    """the target's logit is divided by the temperature twice"""

    def target(self, x, here, column):
        return super().target(x, here, column) / self.heat().reshape(-1)


class IgnoredIsIdZero(LogProb):
    """a target of -100 is taken for id 0"""

    def column(self):
        self.targets = np.where(self.targets == -100, 0, self.targets)
        return super().column()


class OneHotLost(LogProb):
    """the gradient lacks the target's one"""

    def gradient(self, p, here, column, d):
        return np.where(self.real(), -d[:, None] * p, 0)


class SumTwice(LogProb):
    """the rank's sum of exponentials counts twice"""

    def total(self, x, top):
        return 2 * super().total(x, top)


class TargetColumnOffByOne(LogProb):
    """the target's logit is read one column on"""

    def target(self, x, here, column):
        return super().target(x, here, np.minimum(column + 1, max(self.width - 1, 0)))


class LastColumnLost(LogProb):
    """the last column of the rank is not in the sum"""

    def total(self, x, top):
        return super().total(x[:, :-1], top)


class GradientTwice(LogProb):
    """the rank's gradient is doubled"""

    def slope(self, d_value):
        return 2 * super().slope(d_value)


class GradientInNextColumn(LogProb):
    """the one of the one-hot stands one column on"""

    def gradient(self, p, here, column, d):
        return super().gradient(p, here, np.minimum(column + 1, max(self.width - 1, 0)), d)


LOGPROBS = [  # variant, rank (None: all), options
    (MaximumNotReduced, 1, {}), (MaximumNotReduced, 0, {"tp": 4}), (GradientOfOwnMaximum, None, {}), (GradientOfOwnMaximum, 1, {"tp": 4}),
    (TargetTemperatureTwice, None, {}), (IgnoredIsIdZero, None, {}), (IgnoredIsIdZero, None, {"tp": 4}),
    (OneHotLost, 1, {}), (SumTwice, 1, {}),
    (SumTwice, 2, {"tp": 4}), (TargetColumnOffByOne, None, {}), (TargetColumnOffByOne, 1, {}), (LastColumnLost, 0, {}),
    (LastColumnLost, None, {}), (GradientTwice, 1, {}), (GradientInNextColumn, 0, {}), (rows.TemperatureTwice, 1, {}),
    (rows.TemperatureTimes, 0, {}), (rows.TemperatureIgnored, 1, {}), (rows.GradientWithoutSoftmax, 1, {}),
    (rows.GradientOfTheOwnSum, 1, {}), (rows.FirstColumnExclusive, 1, {}), (rows.LastColumnInclusive, 0, {}),
]


class LossOfIdZero(Loss):
    """a label of -100 is taken for id 0"""

    def __init__(self, logits_shard, labels, *more):
        super().__init__(logits_shard, np.where(labels == -100, 0, labels), *more)


class LossGradientOfIgnoredRows(Loss):
    """rows of -100 have the gradient of the log-sum-exp (a value that is masked afterwards)"""

    def run(self):
        value, _ = super().run()
        return value, lambda d: self.gradient(self.probability(), self.here, self.at, -d * self.weights / self.total_weight).astype(np.float32)


class LossGradientTwice(Loss):
    """the rank's gradient is doubled"""

    def factor(self):
        return 2.0


class WeightsOfOne(Loss):
    """the rank's weights are not applied"""

    def counted(self):
        return np.where(self.labels == -100, 0.0, 1.0)


class RowsLost(Loss):
    """the rank's rows do not count"""

    def counted(self):
        return 0 * super().counted()


class FirstByRank(Loss):
    """the first column is the rank times its own columns (NVIDIA/Megatron-LM, VocabUtility)"""

    def column(self):
        begin = self.group.rank * self.width
        here = (self.targets >= begin) & (self.targets < begin + self.width)
        return np.where(here, self.targets - begin, 0), here


class OwnLoss(Loss):
    """the rank returns its own part of the sum"""

    def over_ranks(self, part):
        super().over_ranks(part)
        return part


LOSSES = [
    (LossOfIdZero, None, {}), (LossOfIdZero, 1, {"cp": 2}), (LossGradientOfIgnoredRows, None, {}), (LossGradientOfIgnoredRows, 1, {"cp": 2}),
    (LossGradientTwice, 1, {"cp": 2}), (LossGradientTwice, 0, FOUR), (WeightsOfOne, 1, {"cp": 2}), (RowsLost, 1, {"cp": 2}), (RowsLost, 2, FOUR),
    (rows.ShiftedOnTheRank, 1, {"cp": 2}), (rows.LastRowUncounted, 1, {"cp": 2}), (rows.WeightsTwice, 1, {"cp": 2}),
    (rows.GradientIsASum, 1, {"cp": 2}), (OwnLoss, 1, {"cp": 2}), (FirstByRank, None, {}),
]


def chunks(a, b, size):
    return np.array_split(np.arange(a, b), 2 * size)


class ChunksInOtherOrder(Shard):
    """the rank's later chunks stand first: zigzag in the other order"""

    def index(self):
        parts = [np.concatenate([chunks(a, b, self.size)[c] for c in (2 * self.size - 1 - self.rank, self.rank)])
                 for a, b in zip(self.bounds, self.bounds[1:])]
        return np.concatenate([np.zeros(0, int), *parts])


class ShardMirrorOffByOne(Shard):
    """the later chunk is 2 cp - 2 - r"""

    def index(self):
        parts = [np.concatenate([chunks(a, b, self.size)[c % (2 * self.size)] for c in (self.rank, 2 * self.size - 2 - self.rank)])
                 for a, b in zip(self.bounds, self.bounds[1:])]
        return np.concatenate([np.zeros(0, int), *parts])


class LabelsInOtherOrder(Shard):
    """the rank's labels have the later chunks first, ids do not"""

    def labels(self):
        right, self.mine = self.mine, ChunksInOtherOrder.index(self)
        found = super().labels()
        self.mine = right
        return found


class PositionsContinue(Shard):
    """positions of the later chunk continue those of the earlier one"""

    def positions(self):
        found = super().positions().copy()
        segment = np.searchsorted(self.bounds, self.mine, side="right") - 1
        for s in range(len(self.lengths)):
            at = np.flatnonzero(segment == s)
            found[..., at] = found[..., at[:1]] + np.arange(len(at))
        return found


class LabelsShiftedTwice(Shard):
    """the rank's labels are shifted once more"""

    def labels(self):
        return np.append(super().labels()[1:], -100)


class LabelsCrossDocuments(Labels):
    """labels cross documents: the next tokens of the stream"""

    def whole(self):
        return np.append(self.ids[self.shift :], np.full(self.shift, -100))[: len(self.ids)]


class DeeperLabelsCrossDocuments(LabelsCrossDocuments):
    """labels of depth 2 and more cross documents, those of depth 1 do not"""

    def whole(self):
        return super().whole() if self.shift > 1 else Labels.whole(self)


class LabelsCrossIntoPadding(Labels):
    """the last tokens of a document have the first tokens of the next one for labels"""

    def whole(self):
        found, begins = super().whole(), list(self.bounds[:-1])
        for a, n, b in zip(begins, self.lengths, begins[1:]):
            last = np.arange(max(a, a + n - self.shift), a + n)
            found[last] = self.ids[np.minimum(b + last - (a + n - self.shift), len(self.ids) - 1)]
        return found


class PlacesExchanged(Unshard):
    """the rank's later chunks are put into the place of the earlier ones"""

    wrong = 1

    def index(self):
        found = super().index().copy()
        found[self.wrong] = halves_exchanged(found[self.wrong], self.cu_seqlens_padded)
        return found


class ShardOfTheFirstTwice(Unshard):
    """rank 1's shard is that of rank 0 again (a buffer that is not waited for)"""

    def gathered(self, part):
        found = super().gathered(part)
        return [found[0], found[0], *found[2:]]


LABELS = [
    (LabelsCrossDocuments, None, {}), (LabelsCrossDocuments, 1, {}), (DeeperLabelsCrossDocuments, None, {}), (LabelsCrossIntoPadding, None, {}),
    (LabelsCrossIntoPadding, 1, {}), (streams.ShiftLessOne, 1, {}), (streams.RolledInTheDocument, 0, {}),
]
UNSHARDS = [(PlacesExchanged, None, {}), (ShardOfTheFirstTwice, None, {}), (ShardOfTheFirstTwice, None, FOUR)]
SHARDS = [
    (ChunksInOtherOrder, 1, {}), (ChunksInOtherOrder, 2, FOUR), (ShardMirrorOffByOne, 1, {}), (ShardMirrorOffByOne, 0, FOUR), (ShardMirrorOffByOne, None, {}),
    (LabelsInOtherOrder, 1, {}), (PositionsContinue, 1, {}), (PositionsContinue, None, {}), (LabelsShiftedTwice, 1, {}),
    (streams.NextChunks, 1, {}), (streams.LateChunkReversed, 1, {}), (streams.LateChunkInOrder, 1, {}), (streams.PositionsOfTheShard, 1, {}),
    (streams.LabelsOfTheTokens, 0, {}), (streams.PositionsFromOne, 1, {}),
]


KINDS = {  # what the harness is to call them
    "shifted-mask": "MaskOffByOne",
    "own-key": "MaskStrict",
    "mask-lost": "CausalLostInBlock",
    "backward-mask": "BackwardMaskOffByOne WindowLostBackward CausalLostBackward",
    "lse-not-updated": "LseNotUpdated MergeAddsLse",
    "not-rescaled": "OutNotRescaledByMerge",
    "not-weighted": "BlockNotWeighted MergeByMeans MergeSwapped",
    "exchanged": "KeysForValues KeyAndValueGradientSwapped",
    "scale": "ScoresUnscaled ScaleTwice",
    "stale": "BlockOfTheStepBefore ValuesOfTheStepBefore",
    "dropped-shard": "BlockUnseen HeadMissesTheLastBlock RowsLost ShardOfTheFirstTwice",
    "repeated-gradient": "QueryGradientTwice KeyGradientsTwice KeyGradientsTwiceAtHome ValueGradientTwice",
    "gradient-dropped": "QueryGradientLost KeyGradientsLost QueryGradientOverwritten",
    "other-half": "QueryGradientOfOtherHalf KeyGradientsInOtherHalf",
    "delta-lost": "DeltaIsZero",
    "chunk-order": "HalvesExchanged MirrorOffByOne ChunksInOtherOrder ShardMirrorOffByOne LabelsInOtherOrder LateChunkReversed LateChunkInOrder PlacesExchanged",
    "repeated": "OwnBlockTwice SumTwice",
    "saved-block": "DeltaOfOwnKeys LseOfTheLastBlock",
    "kv-heads": "RepeatForInterleave PaddedApart",
    "scale-lost": "KeyGradientScaledTwice",
    "local-maximum": "MaximumNotReduced",
    "local-softmax": "GradientOfOwnMaximum GradientOfTheOwnSum",
    "temperature": "TargetTemperatureTwice TemperatureTwice TemperatureTimes TemperatureIgnored",
    "unknown-target": "IgnoredIsIdZero",
    "one-hot": "OneHotLost GradientInNextColumn",
    "target-column": "TargetColumnOffByOne",
    "column-lost": "LastColumnLost",
    "softmax-lost": "GradientWithoutSoftmax",
    "lost-target": "FirstColumnExclusive LastColumnInclusive",
    "padding": "LossOfIdZero",
    "ignored-gradient": "LossGradientOfIgnoredRows",
    "weights": "WeightsOfOne WeightsTwice",
    "label-shift": "ShiftedOnTheRank LabelsShiftedTwice LabelsOfTheTokens ShiftLessOne",
    "row-lost": "LastRowUncounted",
    "normalisation": "GradientIsASum",
    "convention": "OwnLoss",
    "uneven-shards": "FirstByRank",
    "layout": "NextChunks",
    "positions": "PositionsContinue PositionsOfTheShard PositionsFromOne",
    "labels-rolled": "LabelsCrossDocuments DeeperLabelsCrossDocuments LabelsCrossIntoPadding RolledInTheDocument",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()} | {
    "CausalLostInBlock in last step of 2": "mask-lost-under-cp", "GradientTwice": "factor-tp", "LossGradientTwice on rank 1 of 2": "factor-cp",
    "LossGradientTwice on rank 0 of 4": "factor-2",
} | dict.fromkeys(  # found, but not named
    ("HeadMissesTheLastBlock", "RepeatForInterleave", "PaddedApart", "DeltaOfOwnKeys"), "values")


def on(rank, wrong, right, rank_of):
    """A variant on one rank, the right class on others; rank: None for all."""
    return wrong if rank is None else lambda *given: (wrong if rank_of(given) == rank else right)(*given)


def bugs():
    for kind, step, options in ON_A_STEP:
        wrong = at_step(kind, step)
        where = f"last step of {options.get('cp', 2)}" if step == LAST else f"step {step} of {options.get('cp', 2)}"
        name = f"{kind.__name__} in {where}"
        called = KIND_OF.get(name) or KIND_OF[kind.__name__]
        yield Bug(name, "attention", kind.__doc__, attention.attention_of(wrong), options, kind=called)
    for contract, right, of, listed, rank_of in (
        ("attention", Stepped, attention.attention_of, ON_A_RANK, lambda given: given[5].rank),
        ("logprob", LogProb, rows.logprob_of, LOGPROBS, lambda given: given[2].rank),
        ("loss", Loss, rows.loss_of, LOSSES, lambda given: given[3].rank),
        ("shard", Shard, streams.shard_of, SHARDS, lambda given: given[1]),
        ("labels", Labels, streams.labels_of, LABELS, lambda given: given[2]),
        ("unshard", Unshard, streams.unshard_of, UNSHARDS, None),
    ):
        for kind, rank, options in listed:
            where = "" if rank is None else f" on rank {rank}"
            name = f"{kind.__name__}{where} of {max(options.values(), default=2)}"
            called = KIND_OF.get(name) or KIND_OF[kind.__name__]
            yield Bug(name, contract, kind.__doc__, of(on(rank, kind, right, rank_of)), options, kind=called)


BUGS, RIGHT = list(bugs()), [Bug("Stepped", "attention", "", attention.attention_of(Stepped), FOUR)]
