"""Errors of operations on rows of logits whose columns are split: log-probabilities, losses, divergences, sums.

Variants of right classes, a method changed in each; the docstring says what a variant does and where it comes from.
"""

import numpy as np
from planted import Bug, Narrow, bfloat16, bugs_of

INF, NARROW, IGNORED = np.inf, {"dtype": "bfloat16"}, -100


class LogProb:
    """A maximum, a sum and the target's logit of each rank's columns, reduced over the ranks; blocks of columns and rows."""

    options, tile, rows = {}, 1024, 128

    def __init__(self, logits_shard, targets, group, first, columns, temperature, vocab_size, here=None):
        vars(self).update(locals())
        self.tokens, self.width = logits_shard.shape
        self.last = first + self.width

    def real(self):
        """[columns]: no padding."""
        return self.first + np.arange(self.width) < self.vocab_size

    def heat(self):
        return np.asarray(self.temperature, np.float64)

    def scaled(self):
        return np.where(self.real(), self.logits_shard.astype(np.float64), -INF) / self.heat()

    def largest(self, x):
        return x.max(axis=1, initial=-INF)

    def highest(self, top):
        return self.group.all_reduce(top, "max")

    def exp(self, x, top):
        return np.exp(x - np.where(np.isfinite(top), top, 0)[:, None])

    def total(self, x, top):
        """The sum over this rank's columns, block by block."""
        found = np.zeros(len(x))
        for begin in range(0, self.width, self.tile):
            found = self.add(found, self.exp(x[:, begin : begin + self.tile], top).sum(axis=1))
        return found

    def add(self, total, more):
        return total + more

    def reduced(self, total):
        return self.group.all_reduce(total)

    def column(self):
        """The target's column of this shard, and whether it has it."""
        here = (self.targets >= self.first) & (self.targets < self.last) & (self.targets < self.vocab_size)
        return np.where(here, self.targets - self.first, 0), here

    def target(self, x, here, column):
        """The target's logit: of the rank that has it, summed over the ranks."""
        mine = np.where(here, x[np.arange(self.tokens), column] if self.width else 0, 0)
        return self.group.all_reduce(mine)

    def known(self, here):
        return self.group.all_reduce(here.astype(np.int64)) > 0

    def log(self, total):
        return np.log(total)

    def value(self, target, top, total):
        return target - top - self.log(total)

    def answered(self, value):
        return value

    def gradient(self, p, here, column, d):
        found = -d[:, None] * p
        found[np.flatnonzero(here), column[here]] += d[here]
        return np.where(self.real(), found, 0)

    def run(self):
        x = self.scaled()
        top = self.highest(self.largest(x))
        total = self.reduced(self.total(x, top))
        column, here = self.column()
        known = self.known(here)
        self.x, self.top, self.sum, self.here, self.at = x, top, total, here, column
        self.asked = known
        value = np.where(known, self.value(self.target(x, here, column), top, total), 0)
        return self.answered(value).astype(np.float32), self.backward

    def probability(self):
        return self.exp(self.x, self.top) / self.sum[:, None]

    def slope(self, d_value):
        return np.where(self.asked, d_value, 0) / self.heat().reshape(-1)

    def backward(self, d_value):
        return self.gradient(self.probability(), self.here, self.at, self.slope(d_value)).astype(np.float32)


def logprob_of(kind):
    def logprob(logits_shard, targets, group, first, columns, temperature, vocab_size):
        return kind(logits_shard, targets, group, first, columns, temperature, vocab_size).run()

    return logprob


class ColumnsBehind1024(LogProb):
    """columns behind the first 1024 of a shard are lost (volcengine/verl #2656)"""

    def total(self, x, top):
        return self.exp(x[:, :1024], top).sum(axis=1)


class LastColumnsLost(LogProb):
    """the last block of columns, which is not full, is lost where there are several (columns // block)"""

    def total(self, x, top):
        return self.exp(x[:, : max(self.width // 1024 * 1024, 1024)], top).sum(axis=1)


class BlockPaddingCounts(LogProb):
    """columns behind the end of the last block count with a logit of 0 (a load without `other=-inf`)"""

    def total(self, x, top):
        return super().total(x, top) + self.exp(np.zeros((len(x), -self.width % 16)), top).sum(axis=1)


class SentinelColumn(LogProb):
    """a target of another shard has the sentinel `columns`, which a column of padding of the last block has, too (apple/ml-cross-entropy PR #59)"""

    def target(self, x, here, column):
        wide = np.pad(x, ((0, 0), (0, -self.width % 16)), constant_values=-INF)
        if wide.shape[1] == self.width:
            return super().target(x, here, column)
        return self.group.all_reduce(wide[np.arange(self.tokens), np.where(here, column, self.width)])


class NoMaximum(LogProb):
    """exp of logits before the maximum is subtracted, in float32 (overflow)"""

    def highest(self, top):
        return np.zeros_like(super().highest(top))

    def exp(self, x, top):
        return super().exp(x.astype(np.float32), top.astype(np.float32)).astype(np.float64)


class OwnMaximum(LogProb):
    """each rank subtracts its own maximum, and sums are added as they are (NVIDIA/Megatron-LM, cross entropy)"""

    def highest(self, top):
        super().highest(top)
        return np.where(np.isfinite(top), top, 0)


class MaximumOfTheFirstRank(LogProb):
    """the maximum is that of rank 0's columns: the others' overflow float32 (a broadcast in place of a reduction)"""

    def highest(self, top):
        return self.group.broadcast(top)

    def exp(self, x, top):
        return super().exp(x, top).astype(np.float32).astype(np.float64)


class MaximumIsSummed(LogProb):
    """maxima are summed over the ranks: all terms underflow float32 (ReduceOp.SUM in place of MAX)"""

    def highest(self, top):
        return self.group.all_reduce(np.where(np.isfinite(top), abs(top), 0))

    def exp(self, x, top):
        return super().exp(x, top).astype(np.float32).astype(np.float64)


class SumNotReduced(LogProb):
    """the sum of exponentials is not reduced over the ranks (vLLM, logits of a shard)"""

    def reduced(self, total):
        return total


class SumAveraged(LogProb):
    """the sum of exponentials is averaged over the ranks (ReduceOp.AVG)"""

    def reduced(self, total):
        return super().reduced(total) / self.group.size


class TargetByMaximum(LogProb):
    """the target's logit is the maximum over ranks of 0 where they do not have it (negative logits become 0)"""

    def target(self, x, here, column):
        return self.group.all_reduce(np.where(here, x[np.arange(self.tokens), column] if self.width else 0, 0), "max")


class TargetOfEveryShard(LogProb):
    """targets of other shards are clamped, and what is read there is added (a mask that is forgotten)"""

    def target(self, x, here, column):
        at = np.clip(self.targets - self.first, 0, max(0, self.width - 1))
        mine = x[np.arange(self.tokens), at] if self.width else np.zeros(self.tokens)
        return self.group.all_reduce(np.where(np.isfinite(mine), mine, 0))


class MaskTimesLogit(LogProb):
    """what a shard does not have is multiplied by 0: -inf times 0 is NaN (NovaSky-AI/SkyRL PR #2259)"""

    def target(self, x, here, column):
        mine = x[np.arange(self.tokens), np.clip(self.targets - self.first, 0, max(0, self.width - 1))] if self.width else 0.0
        return self.group.all_reduce(mine * here)


class LastColumnInclusive(LogProb):
    """a shard claims the first column of the next one (first <= target <= last)"""

    def target(self, x, here, column):
        edge = (self.targets == self.last) & (self.last < self.columns)
        mine = np.where(here, x[np.arange(self.tokens), column] if self.width else 0, 0)
        return self.group.all_reduce(mine + np.where(edge, x[:, -1] if self.width else 0, 0))


class FirstColumnExclusive(LogProb):
    """a shard does not claim its first column (first < target)"""

    def target(self, x, here, column):
        return super().target(x, here & (self.targets > self.first), column)


class FirstByRank(LogProb):
    """the first column is the rank times its own columns (NVIDIA/Megatron-LM, VocabUtility)"""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begin = self.group.rank * self.width

    def column(self):
        here = (self.targets >= self.begin) & (self.targets < self.begin + self.width) & (self.targets < self.vocab_size)
        return np.where(here, self.targets - self.begin, 0), here


class FirstRoundedDown(FirstByRank):
    """the first column is rank * (V // tp), shards are rounded up (pytorch/pytorch: chunk and tensor_split)"""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begin = self.group.rank * (self.columns // self.group.size)


class TemperatureIgnored(LogProb):
    """logits are not divided by the temperature (volcengine/verl #5957)"""

    def heat(self):
        return np.ones_like(np.asarray(self.temperature, np.float64))


class TemperatureTimes(LogProb):
    """logits are multiplied by the temperature (a scale that was its inverse)"""

    def heat(self):
        return 1 / super().heat()


class TemperatureTwice(LogProb):
    """logits are divided by the temperature by the sampler and by the loss (a trainer that scales what is scaled)"""

    def heat(self):
        return super().heat() ** 2


class TemperatureOfTheValue(LogProb):
    """the log-probability, not the logits, is divided by the temperature (log_softmax(z) / T)"""

    def scaled(self):
        return super().scaled() * self.heat()

    def value(self, target, top, total):
        return super().value(target, top, total) / self.heat().reshape(-1)


class TemperatureMissesTheSum(LogProb):
    """the target's logit has the temperature, the sum has not (a fused logsumexp of raw logits)"""

    def total(self, x, top):
        heat = self.heat()
        self.raw = self.highest(self.largest(x * heat))
        return super().total(x * heat, self.raw)

    def value(self, target, top, total):
        return target - self.raw - np.log(total)


class TemperatureOfTheFirst(LogProb):
    """one temperature of the batch, that of the first token (volcengine/verl #5957)"""

    def heat(self):
        heat = super().heat()
        return heat if heat.ndim == 0 else np.broadcast_to(heat[:1], heat.shape) if len(heat) else heat


class MeanTemperature(LogProb):
    """one temperature of the batch, the mean (volcengine/verl #5957)"""

    def heat(self):
        heat = super().heat()
        return heat if heat.ndim == 0 else np.full(heat.shape, heat.mean()) if len(heat) else heat



class GradientTemperatureTwice(LogProb):
    """the gradient has 1 / temperature twice (autograd of the division and of the kernel)"""

    def slope(self, d_value):
        return super().slope(d_value) / self.heat().reshape(-1)


class UnknownCountsFromTheEnd(LogProb):
    """a target of -100 or -1 is counted from the end (negative indices)"""

    def __init__(self, logits_shard, targets, *more):
        super().__init__(logits_shard, np.where((targets < 0) & (targets >= -more[4]), targets % more[4], targets), *more)



class UnknownIsMinusLse(LogProb):
    """a target that no column has is given a logit of 0, and the value minus the log-sum-exp (a masked sum)"""

    def known(self, here):
        return super().known(here) | True


class UnknownIsMinusInfinity(LogProb):
    """a target that no column has is given -inf (a filter's convention)"""

    def value(self, target, top, total):
        self.asked = np.ones(self.tokens, bool)
        return super().value(target, top, total)

    def answered(self, value):
        return np.where(self.known(self.here), value, -INF)


class PaddingOfOtherRanks(LogProb):
    """columns of padding count on every rank but the last (NVIDIA/Megatron-LM #1754)"""

    def real(self):
        return super().real() | (self.group.rank < self.group.size - 1)



class PaddingTimesZero(LogProb):
    """columns of padding are multiplied by 0: NaN stays (a mask that multiplies)"""

    def scaled(self):
        return (self.logits_shard.astype(np.float64) * super().real() + np.where(super().real(), 0, -1e30)) / self.heat()


class PaddingOfTheNextMultiple(LogProb):
    """padding is taken to begin at the next multiple of 8 of the vocabulary (make-vocab-size-divisible-by)"""

    def real(self):
        return self.first + np.arange(self.width) < -(-self.vocab_size // 8) * 8


class LogOfSumAndEpsilon(LogProb):
    """log(sum + 1e-3): nothing where sums are large, much where one column has all (an epsilon against log 0)"""

    def log(self, total):
        return np.log(total + 1e-3)


class LogOfProbability(LogProb):
    """log of a float32 probability: -inf, or a clamp at 1e-10, for what is unlikely (torch.log(softmax))"""

    def value(self, target, top, total):
        return np.log(np.maximum(np.exp(target - top) / total, 1e-10))


class LogOfProbabilityUnderflows(LogProb):
    """log of a float32 probability, which is 0 from e^-104 on (torch.log(softmax))"""

    def value(self, target, top, total):
        return np.log((np.exp(target - top) / total).astype(np.float32)).astype(np.float64)


class SumAddedFirst(LogProb):
    """maximum and log of the sum are added in float32 before the logit is subtracted (offsets of 10000)"""

    def value(self, target, top, total):
        return target.astype(np.float32) - (top.astype(np.float32) + np.log(total).astype(np.float32))


class EmptyShardIsNaN(LogProb):
    """a shard whose logits are all -inf subtracts -inf from -inf (a maximum that is not finite)"""

    def highest(self, top):
        self.own = top
        return super().highest(top)

    def total(self, x, top):
        return self.exp(x, self.own).sum(axis=1) * np.exp(self.own - top)

    def exp(self, x, top):
        return np.exp(x - top[:, None]) if x.shape[1] else x


class GradientOfColumnZero(LogProb):
    """shards without the target have the one of the one-hot in their column 0 (a masked index of 0 that is not masked)"""

    def gradient(self, p, here, column, d):
        return super().gradient(p, here | (self.width > 0) & self.asked, column, d)


class GradientOfTheOwnerAlone(LogProb):
    """the gradient is 0 on shards that do not have the target (modelscope/ms-swift PR #9947)"""

    def gradient(self, p, here, column, d):
        return super().gradient(p, here, column, d) * here[:, None]


class GradientWithoutSoftmax(LogProb):
    """the gradient is that of the logit alone (a log-sum-exp that is a constant)"""

    def probability(self):
        return 0 * super().probability()


class GradientOfTheOwnSum(LogProb):
    """the softmax of the gradient is normalised over the shard (saved before the reduction)"""

    def reduced(self, total):
        self.local = total
        return super().reduced(total)

    def probability(self):
        return self.exp(self.x, self.top) / np.where(self.local == 0, 1, self.local)[:, None]


class GradientOfOnes(LogProb):
    """the gradient takes 1 for the gradient of every value (a sum that is taken for granted)"""

    def slope(self, d_value):
        return super().slope(np.ones_like(d_value))


class GradientOfTheFirst(LogProb):
    """the gradient takes that of the first token for all (a broadcast of grad_output[0])"""

    def slope(self, d_value):
        return super().slope(np.broadcast_to(d_value[:1], d_value.shape) if len(d_value) else d_value)


class GradientAveraged(LogProb):
    """the gradient is divided by the tokens (reduction='mean')"""

    def slope(self, d_value):
        return super().slope(d_value) / max(1, len(d_value))


class GradientOfALoss(LogProb):
    """the gradient is that of the negative log-probability (a sign)"""

    def slope(self, d_value):
        return -super().slope(d_value)


class GradientSummedOverRanks(LogProb):
    """the gradient of the value is summed over the ranks, which all have the same (NVIDIA/Megatron-LM #906)"""

    def slope(self, d_value):
        return super().slope(self.group.all_reduce(d_value))


class RowsBehind128(LogProb):
    """rows behind the first 128 are 0 (a grid of one block of rows)"""

    def answered(self, value):
        return np.where(np.arange(len(value)) < 128, value, 0)


class LastRowsLost(LogProb):
    """the last chunk of rows, which is not full, is lost (tokens // chunk)"""

    def answered(self, value):
        return np.where(np.arange(len(value)) < max(len(value) // 128 * 128, 128), value, 0)


class ChunkGradientOverwritten(LogProb):
    """the gradient of a chunk of rows lacks its first half (a buffer of chunks that is written over)"""

    def gradient(self, p, here, column, d):
        kept = np.arange(len(d)) % 256 < 128
        return super().gradient(p, here, column, d) * kept[:, None]


class SumInBfloat16(LogProb):
    """exponentials are added one by one in bfloat16 (an accumulator in the type of the logits)"""

    options, tile = NARROW, 1

    def add(self, total, more):
        return bfloat16(total + more)

    def total(self, x, top):
        e, found = self.exp(x, top), np.zeros(len(x))
        for begin in range(e.shape[1]):
            found = self.add(found, e[:, begin])
        return found


class NarrowSumInBfloat16(SumInBfloat16):
    """the same, and the value is bfloat16, too: 0.06 of rounding are right, 3 nats are not"""

    def run(self):
        value, backward = super().run()
        return Narrow(value), backward


class SumOfBlocksInBfloat16(LogProb):
    """sums of blocks of 64 columns are added in bfloat16 (an accumulator in the type of the logits)"""

    options, tile = NARROW, 64

    def add(self, total, more):
        return bfloat16(total + more)


class LogSoftmaxInBfloat16(LogProb):
    """log_softmax returns bfloat16, and its values become float32 afterwards (huggingface/trl, OpenRLHF: logprobs of half precision)"""

    options = NARROW

    def answered(self, value):
        return bfloat16(value)


class LseInBfloat16(LogProb):
    """the log-sum-exp is kept in bfloat16 (logsumexp of bfloat16 logits)"""

    options = NARROW

    def value(self, target, top, total):
        return target - bfloat16(top + np.log(total))


class ProbabilityInBfloat16(LogProb):
    """exponentials are rounded to bfloat16 before they are added in float32 (exp of bfloat16 logits)"""

    options = NARROW

    def exp(self, x, top):
        return bfloat16(super().exp(x, top))


class ScaledInBfloat16(LogProb):
    """logits are divided by the temperature in bfloat16 (an in-place division)"""

    options = NARROW

    def scaled(self):
        return bfloat16(super().scaled())


class LogitsInFloat16(LogProb):
    """logits are float16, whose largest number is 65504 (autocast)"""

    def scaled(self):
        return np.where(self.real(), self.logits_shard.astype(np.float16).astype(np.float64), -INF) / self.heat()


class Loss(LogProb):
    """The weighted mean of -log p over all labels of all ranks."""

    options, base = {"cp": 2, "tp": 2}, LogProb

    def __init__(self, logits_shard, labels, group, data_group, cp_group, dp_group, first, columns, weights, count):
        super().__init__(logits_shard, labels, group, first, columns, 1.0, columns)
        vars(self).update(data_group=data_group, cp_group=cp_group, dp_group=dp_group, labels=labels, weights=weights, count=count)

    def counted(self):
        return np.where(self.labels == IGNORED, 0, self.weights.astype(np.float64))

    def normaliser(self, counted):
        return self.count or 1

    def gradient_normaliser(self, counted):
        return self.total_weight

    def summed(self, terms):
        return terms.sum()

    def over_ranks(self, part):
        return self.data_group.all_reduce(part)

    def factor(self):
        return 1.0

    def run(self):
        value, backward = super().run()
        counted = self.counted()
        self.total_weight = self.normaliser(counted)
        loss = self.over_ranks(self.summed(-counted * self.nll(value.astype(np.float64)))) / self.total_weight
        slope = -counted * self.factor() / self.gradient_normaliser(counted)
        return np.asarray(self.returned(loss), np.float32), lambda d_loss: backward(d_loss * slope)

    def nll(self, value):
        return value

    def returned(self, loss):
        return loss


def loss_of(kind):
    def loss(logits_shard, labels, group, data_group, cp_group, dp_group, first, columns, weights, count):
        return kind(logits_shard, labels, group, data_group, cp_group, dp_group, first, columns, weights, count).run()

    return loss


class OwnCount(Loss):
    """every rank divides by its own labels, and the ranks are averaged (NVIDIA/Megatron-LM PR #7513)"""

    def normaliser(self, counted):
        return counted.sum()

    def over_ranks(self, part):
        return self.data_group.all_reduce(part / max(self.counted().sum(), 1e-30)) * self.counted().sum() / self.data_group.size

    def factor(self):
        return 1 / self.data_group.size


class OwnLoss(Loss):
    """every rank returns the mean over its own labels (volcengine/verl #4250)"""

    def normaliser(self, counted):
        return max(counted.sum(), 1.0)

    def over_ranks(self, part):
        return part



class CountOfOwnRowsTimesRanks(Loss):
    """the count is that of this rank's labels times the ranks (an even split that is taken for granted)"""

    def normaliser(self, counted):
        return max(counted.sum(), 1.0) * self.data_group.size


class LabelsForWeights(Loss):
    """the sum of weighted losses is divided by the number of labels (weights of another normalisation)"""

    def normaliser(self, counted):
        return self.data_group.all_reduce(float((counted > 0).sum()))


class WeightsTwice(Loss):
    """weights are applied by the loss and by the reduction (huggingface/trl, loss masks)"""

    def nll(self, value):
        return value * self.weights

    def gradient_normaliser(self, counted):
        return self.total_weight / np.where(counted > 0, self.weights, 1)



class WeightsAreCut(Loss):
    """weights are cast to integers (labels' type)"""

    def counted(self):
        return np.floor(super().counted())


class IgnoredIsLast(Loss):
    """labels of -100 are counted from the end of the vocabulary (negative indices)"""

    def counted(self):
        return self.weights.astype(np.float64)

    def known(self, here):
        return super().known(here) | True


class IgnoreIndexMinusOne(Loss):
    """-1, not -100, is ignored: a label of -100 counts with a logit of 0 (ignore_index)"""

    def counted(self):
        return np.where(self.labels == -1, 0, self.weights.astype(np.float64))

    def known(self, here):
        return super().known(here) | True


class SumOfTheVocabularyRanks(Loss):
    """the loss is summed over the ranks that share the vocabulary, too (an all-reduce over the default group)"""

    def over_ranks(self, part):
        return super().over_ranks(self.group.all_reduce(part))


class MeanOverTheVocabularyRanks(Loss):
    """gradients are divided by the ranks that share the vocabulary (an average over the default group)"""

    def factor(self):
        return 1 / self.group.size


class GradientTimesRanks(Loss):
    """gradients are multiplied by the ranks that share the rows (NovaSky-AI/SkyRL #1420)"""

    def factor(self):
        return self.data_group.size


class GradientOfOwnCount(Loss):
    """the value has the count of all ranks, the gradient that of its own (loss for the log, loss for backward)"""

    def gradient_normaliser(self, counted):
        return max(counted.sum(), 1.0)


class GradientIsASum(Loss):
    """the gradient is that of the sum, not of the mean (calculate_per_token_loss without its count)"""

    def gradient_normaliser(self, counted):
        return 1.0


class NaNWithoutLabels(Loss):
    """a rank with rows and no label divides 0 by 0 (axolotl-ai-cloud/axolotl #3026)"""

    options = {"cp": 4}

    def returned(self, loss):
        return loss + (0 if self.counted().sum() or not len(self.labels) else np.nan)


class NaNWithoutRows(Loss):
    """a rank without a row takes the mean of nothing (allenai/OLMo-core PR #657)"""

    options = {"cp": 8, "uneven": True}

    def returned(self, loss):
        return loss if len(self.labels) else np.nan


class CountAtLeastOne(Loss):
    """every rank counts at least one label (clamp(min=1) before the reduction)"""

    options = {"cp": 4}

    def normaliser(self, counted):
        return self.data_group.all_reduce(max(counted.sum(), 1.0))


class GroupOfContextAlone(Loss):
    """replicas are not in the group of the reduction (ByteDance-Seed/VeOmni #1115)"""

    options = {"cp": 2, "dp": 2}

    def over_ranks(self, part):
        return self.cp_group.all_reduce(part)

    def normaliser(self, counted):
        return self.cp_group.all_reduce(counted.sum())


class GroupOfReplicasAlone(Loss):
    """ranks of the same replica are not in the group of the reduction (ByteDance-Seed/VeOmni #1115)"""

    options = {"cp": 2, "dp": 2}

    def over_ranks(self, part):
        return self.dp_group.all_reduce(part)

    def normaliser(self, counted):
        return max(self.dp_group.all_reduce(counted.sum()), 1.0)



class SmoothedOverTheShard(Loss):
    """labels are smoothed by 0.1 where none asked for it, over the rank's own vocabulary (NVIDIA/Megatron-LM #7452)"""

    def nll(self, value):
        return 0.9 * value + 0.1 * self.group.all_reduce(np.log(np.maximum(self.probability(), 1e-30)).mean(axis=1)) / 2


class LossInBfloat16(Loss):
    """losses of rows are added one by one in bfloat16 (an accumulator in the type of the logits)"""

    options = {"cp": 2, "dtype": "bfloat16"}

    def summed(self, terms):
        total = 0.0
        for term in terms:
            total = float(bfloat16(total + term))
        return total


class LastRowUncounted(Loss):
    """the last row of a rank has no label: labels were shifted after sharding (NVIDIA/Megatron-LM #6205)"""

    def counted(self):
        found = super().counted()
        found[-1:] = 0
        return found


class ShiftedOnTheRank(Loss):
    """labels are shifted once more by the loss (a causal LM's own shift)"""

    def __init__(self, logits_shard, labels, *more):
        super().__init__(logits_shard, np.append(labels[1:], IGNORED)[: len(labels)], *more)


LOSSES = [bug for bug in bugs_of(Loss, "loss", loss_of)]
LOGPROBS = [bug for bug in bugs_of(LogProb, "logprob", logprob_of) if bug.name not in {"Loss", *(b.name for b in LOSSES)}]


class Divergence:
    """sum q (log q - log p) over ids, and of a sampled target that is not among them; q of split columns."""

    options, of = {}, LogProb

    def __init__(self, logits_shard, ids, targets, teacher_ids, teacher_targets, group, first, columns):
        vars(self).update(locals())
        self.asked = np.concatenate([ids, targets[:, None]], axis=1)
        self.log_p = np.concatenate([teacher_ids, teacher_targets[:, None]], axis=1).astype(np.float64)

    def scored(self):
        """log q of each id and target, and the way back."""
        return [self.of(self.logits_shard, ids, self.group, self.first, self.columns, 1.0, self.columns).run()
                for ids in self.asked.T]

    def outside(self):
        """[tokens]: whether the target has a term of its own."""
        return (self.ids != self.targets[:, None]).all(axis=1)

    def weights(self, log_q):
        return np.concatenate([np.exp(log_q[:, :-1]), self.outside()[:, None].astype(float)], axis=1)

    def value(self, weights, gaps):
        return (weights * gaps).sum(axis=1)

    def slopes(self, weights, gaps):
        return weights * (gaps + 1)

    def run(self):
        scored = self.scored()
        log_q = np.stack([value for value, _ in scored], axis=1).astype(np.float64)
        gaps, weights = log_q - self.log_p, self.weights(log_q)
        slopes = self.slopes(weights, gaps)

        def backward(d_kl):
            return sum(way(d_kl * slope) for (_, way), slope in zip(scored, slopes.T))

        return self.value(weights, gaps).astype(np.float32), backward


def topk_kl_of(kind):
    def topk_kl(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first, columns):
        return kind(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first, columns).run()

    return topk_kl


class ForwardDivergence(Divergence):
    """KL(p || q) in place of KL(q || p) (the order of torch.nn.functional.kl_div)"""

    def weights(self, log_q):
        return np.concatenate([np.exp(self.log_p[:, :-1]), self.outside()[:, None].astype(float)], axis=1)

    def value(self, weights, gaps):
        return super().value(weights * [*[-1] * self.ids.shape[1], 1], gaps)


class ClampedAtZero(Divergence):
    """a divergence below 0 is clamped (volcengine/verl PR #7806)"""

    def value(self, weights, gaps):
        return np.maximum(super().value(weights, gaps), 0)


class TailOfEveryTarget(Divergence):
    """a target among the ids has a term of its own, too (NVIDIA-NeMo/RL PR #3584)"""

    def outside(self):
        return np.ones(len(self.targets), bool)



class TailByFirstId(Divergence):
    """a target is among the ids if it is the first one (a comparison with the arg max)"""

    def outside(self):
        return self.ids[:, 0] != self.targets


class WeightedTail(Divergence):
    """the sampled term is weighted by q, as if it were one of the ids (an importance weight that is there twice)"""

    def weights(self, log_q):
        found = super().weights(log_q)
        found[:, -1] *= np.exp(log_q[:, -1])
        return found


class DetachedWeights(Divergence):
    """q is a constant of the gradient (weights that are detached)"""

    def slopes(self, weights, gaps):
        return weights


class DetachedTail(Divergence):
    """the sampled term has no gradient (NVIDIA-NeMo/RL PR #3584)"""

    def slopes(self, weights, gaps):
        found = super().slopes(weights, gaps)
        found[:, -1] = 0
        return found


class ConstantForgotten(Divergence):
    """the gradient of q log q lacks its 1 (the gradient of a fixed distribution)"""

    def slopes(self, weights, gaps):
        return weights * gaps


class LogQAlone(Divergence):
    """the teacher's log p is left out of the value (a negative entropy)"""

    def value(self, weights, gaps):
        return super().value(weights, gaps + self.log_p)


class AbsoluteGaps(Divergence):
    """the sampled term is its absolute value (the k2 or absolute estimator of a KL)"""

    def value(self, weights, gaps):
        return super().value(weights, np.where(np.arange(gaps.shape[1]) == gaps.shape[1] - 1, abs(gaps), gaps))


class EstimatorK3(Divergence):
    """the sampled term is p/q - 1 + log q/p, not log q/p (the k3 estimator)"""

    def value(self, weights, gaps):
        tail = np.arange(gaps.shape[1]) == gaps.shape[1] - 1
        return super().value(weights, np.where(tail, np.exp(-gaps) - 1 + gaps, gaps))


class TeacherInOrderOfIds(Divergence):
    """ids are sorted, the teacher's answers for them are not (a gather from a sorted index)"""

    def __init__(self, logits_shard, ids, targets, *more):
        super().__init__(logits_shard, np.sort(ids, axis=1), targets, *more)


class TeacherOfTheNextRow(Divergence):
    """the teacher's rows are those of the next token (a shift of one side)"""

    def __init__(self, logits_shard, ids, targets, teacher_ids, teacher_targets, *more):
        rolled = (np.roll(x, -1, axis=0) for x in (teacher_ids, teacher_targets))
        super().__init__(logits_shard, ids, targets, *rolled, *more)


class TeacherRenormalised(Divergence):
    """the teacher is normalised over the ids, the student over the vocabulary (NVIDIA-NeMo/RL #3272)"""

    def __init__(self, logits_shard, ids, targets, teacher_ids, *more):
        total = np.log(np.exp(teacher_ids.astype(np.float64)).sum(axis=1, keepdims=True))
        super().__init__(logits_shard, ids, targets, teacher_ids - total, *more)


class StudentOfTheShard(Divergence):
    """the student's softmax is over its shard (vocabulary-parallel logits without a reduction)"""

    of = SumNotReduced


class DivergenceBehind1024(Divergence):
    """columns behind the first 1024 are lost (a kernel of one block)"""

    of = ColumnsBehind1024


class DivergenceInBitsOfTwo(Divergence):
    """the divergence is in bits (log2)"""

    def value(self, weights, gaps):
        return super().value(weights, gaps) / np.log(2)


class FirstThreeIds(Divergence):
    """the last of the ids is left out (top-k of k - 1)"""

    def weights(self, log_q):
        found = super().weights(log_q)
        found[:, -2] = 0
        return found


class SumOverGroup:
    """y is the sum of x over the group; its gradient that of y."""

    options = {}

    def __init__(self, x, group, data_group):
        vars(self).update(locals())

    def value(self):
        return self.group.all_reduce(self.x)

    def back(self, d_y):
        return d_y

    def run(self):
        return self.value().astype(self.x.dtype), lambda d_y: np.asarray(self.back(d_y), self.x.dtype)


def sum_of(kind):
    def sum_over_group(x, group, data_group):
        return kind(x, group, data_group).run()

    return sum_over_group


class MaximumOverGroup(SumOverGroup):
    """the largest x of the group (ReduceOp.MAX)"""

    def value(self):
        return self.group.all_reduce(self.x, "max")


class BroadcastOfTheFirst(SumOverGroup):
    """every rank gets the first rank's x (a broadcast after a reduction to no one)"""

    def value(self):
        return self.group.broadcast(self.x)


class ReducedToTheFirst(SumOverGroup):
    """the first rank alone has the sum (reduce in place of all-reduce)"""

    def value(self):
        total = super().value()
        return total if self.group.rank == 0 else self.x


class SumOfDataRanks(SumOverGroup):
    """the sum is over the ranks with other rows (the wrong axis of the mesh)"""

    options = {"cp": 2, "tp": 2}

    def value(self):
        return self.data_group.all_reduce(self.x)


class OwnPartTwice(SumOverGroup):
    """the rank's own x is added once more (a residual that is added before and after)"""

    def value(self):
        return super().value() + self.x


class LastPartLost(SumOverGroup):
    """the last rank's x does not arrive (a ring of size - 2 steps)"""

    options = {"tp": 4}

    def value(self):
        return sum(self.group.all_gather(self.x)[:-1])


class SumInFloat16(SumOverGroup):
    """messages are float16 (compressed all-reduce)"""

    def value(self):
        return self.group.all_reduce(self.x.astype(np.float16))


class RowsBehind128NotSent(SumOverGroup):
    """rows behind the first 128 are not sent (one block of a message)"""

    def value(self):
        return np.concatenate([super().value()[:128], self.x[128:]])


class GradientOfTheFirstRow(SumOverGroup):
    """every row has the gradient of the first one (an expand of a sum)"""

    def back(self, d_y):
        return np.broadcast_to(d_y[:1], d_y.shape) if len(d_y) else d_y


class GradientAveragedOverGroup(SumOverGroup):
    """the gradient is averaged over the group, all of which have the same: a factor (ReduceOp.AVG of a sum)"""

    def back(self, d_y):
        return d_y / self.group.size


class SumWithGradientOfOnes(SumOverGroup):
    """the convention is sum, and the gradient is summed and averaged (an all-reduce of type AVG)"""

    options = {"convention": "sum", "tp": 2}

    def back(self, d_y):
        return self.group.all_reduce(d_y) / self.group.size


BUGS = [*LOGPROBS, *LOSSES, *bugs_of(Divergence, "topk_kl", topk_kl_of), *bugs_of(SumOverGroup, "sum_over_group", sum_of)]
RIGHT = [
    Bug("LogProb", "logprob", "", logprob_of(LogProb), {}),
    Bug("LogProb", "logprob", "", logprob_of(LogProb), {"tp": 4}),
    Bug("LogProb", "logprob", "", logprob_of(LogProb), NARROW),
    Bug("Loss", "loss", "", loss_of(Loss), {"cp": 2, "tp": 2}),
    Bug("Loss", "loss", "", loss_of(Loss), {"cp": 8, "uneven": True}),
    Bug("Loss", "loss", "", loss_of(Loss), {"cp": 2, "dp": 2, "dtype": "bfloat16"}),
    Bug("GradientTimesRanks", "loss", "", loss_of(GradientTimesRanks), {"cp": 2, "convention": "mean-times-cp"}),
    Bug("Divergence", "topk_kl", "", topk_kl_of(Divergence), {}),
    Bug("SumOverGroup", "sum_over_group", "", sum_of(SumOverGroup), {"tp": 4}),
]
