"""Errors of a divergence over a split vocabulary, and of its mean: variants of right classes, a method changed in each.

The docstring of a variant says what it does and where it comes from; its kind is the name that the harness is to give it.
"""

import numpy as np
from planted import Bug, bfloat16, bugs_of


class Kl:
    """The right one: KL(p || q), or reversed; p is the teacher, q the student."""

    options = {}

    def __init__(self, logits_shard, teacher_shard, group, first, columns, vocab_size, reverse):
        vars(self).update(locals())
        self.real = first + np.arange(logits_shard.shape[1]) < vocab_size

    def scores(self):
        """The student's and the teacher's logits, -inf in padding."""
        return [np.where(self.real, x.astype(np.float64), -np.inf) for x in (self.logits_shard, self.teacher_shard)]

    def largest(self, x):
        return self.group.all_reduce(x.max(axis=1, initial=-np.inf), "max")

    def total(self, weights):
        return self.group.all_reduce(weights.sum(axis=1))

    def log_softmax(self, x):
        x = x - self.largest(x)[:, None]
        return x - np.log(self.total(np.exp(x)))[:, None]

    def terms(self, share, other):
        """p (log p - log q) of the shard's columns, and their second factor."""
        some = np.isfinite(share)
        gaps = np.where(some, share, 0) - np.where(some, other, 0)
        return np.exp(share) * gaps, gaps

    def summed(self, terms):
        return self.group.all_reduce(terms.sum(axis=1))

    def slope(self, log_q, log_p, gaps, value):
        return np.exp(log_q) * (gaps - value[:, None]) if self.reverse else np.exp(log_q) - np.exp(log_p)

    def home(self, d_kl):
        """The gradient of the values that this rank's columns have."""
        return d_kl

    def run(self):
        log_q, log_p = (self.log_softmax(x) for x in self.scores())
        terms, gaps = self.terms(*((log_q, log_p) if self.reverse else (log_p, log_q)))
        value = self.summed(terms)
        slope = self.slope(log_q, log_p, gaps, value)
        return value.astype(np.float32), lambda d: (self.home(d)[:, None] * slope).astype(np.float32)


def kl_of(kind):
    def kl(logits_shard, teacher_shard, group, first, columns, vocab_size, reverse):
        return kind(logits_shard, teacher_shard, group, first, columns, vocab_size, reverse).run()

    return kl


class MaximumOfTheShard(Kl):
    """each rank subtracts the maximum of its own columns (a maximum that is not reduced)"""

    kind = "local-maximum"

    def largest(self, x):
        top = x.max(axis=1, initial=-np.inf)
        return np.where(np.isfinite(top), top, 0)


class MaximumOfTheShardOfTheTeacher(MaximumOfTheShard):
    """the teacher's maximum is that of a rank's columns (one of two reductions)"""

    def largest(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return Kl.largest(self, x) if self.calls == 1 else super().largest(x)


class DirectionExchanged(Kl):
    """KL(q || p) for KL(p || q), and the other way round (the order of torch.nn.functional.kl_div)"""

    kind = "direction"

    def __init__(self, *given):
        super().__init__(*given[:-1], not given[-1])


class DirectionOfTheGradient(Kl):
    """the gradient is that of the other direction (q - p for every divergence)"""

    kind = "direction"

    def slope(self, log_q, log_p, gaps, value):
        return np.exp(log_q) - np.exp(log_p) if self.reverse else super().slope(log_q, log_p, gaps, value)


class PartOfTheShard(Kl):
    """each rank returns what its own columns add (a sum that is not reduced)"""

    kind = "not-summed"

    def summed(self, terms):
        return terms.sum(axis=1)


class SummedTwice(Kl):
    """the divergence counts tp times, and its gradient (an all-reduce of what is whole already)"""

    kind = "factor-tp"

    def summed(self, terms):
        return self.group.size * super().summed(terms)

    def slope(self, log_q, log_p, gaps, value):
        return self.group.size * super().slope(log_q, log_p, gaps, value / self.group.size)


class GradientSummedAgain(Kl):
    """the gradient is summed over tp again (NVIDIA-NeMo/Automodel #3776: an all-reduce with the gradient of one)"""

    kind = "convention"

    def home(self, d_kl):
        return self.group.all_reduce(d_kl)


class GradientOfOwnValues(Kl):
    """ranks' losses are added, and a rank has the gradient of its own alone (an all-reduce without a gradient)"""

    kind, options = "convention", {"convention": "sum"}


class SoftmaxOfTheShard(Kl):
    """each shard is normalised by itself (vocabulary-parallel logits without a reduction)"""

    kind = "local-softmax"

    def largest(self, x):
        return MaximumOfTheShard.largest(self, x)

    def total(self, weights):
        return weights.sum(axis=1)


class CrossEntropy(Kl):
    """-sum p log q, without the teacher's entropy (a cross entropy with soft labels)"""

    kind = "entropy-lost"

    def terms(self, share, other):
        some = np.isfinite(share)
        return -np.exp(share) * np.where(some, other, 0), super().terms(share, other)[1]

    def slope(self, log_q, log_p, gaps, value):
        return super().slope(log_q, log_p, gaps, Kl.summed(self, np.exp(log_q) * gaps))


class MeanOverColumns(Kl):
    """a mean over the vocabulary in place of a sum (torch.nn.functional.kl_div's reduction "mean")"""

    kind = "mean"

    def summed(self, terms):
        return super().summed(terms) / self.vocab_size

    def slope(self, log_q, log_p, gaps, value):
        return super().slope(log_q, log_p, gaps, value * self.vocab_size) / self.vocab_size


class TeacherOfTheNextRow(Kl):
    """the teacher's rows are those of the next token (a shift of one side)"""

    kind = "label-shift"

    def scores(self):
        student, teacher = super().scores()
        return student, np.roll(teacher, -1, axis=0)


class GradientWithoutTeacher(Kl):
    """the gradient lacks the teacher (that of a log-sum-exp)"""

    kind = "teacher-lost"

    def slope(self, log_q, log_p, gaps, value):
        return np.exp(log_q)


class PaddingCounts(Kl):
    """columns of padding count (NVIDIA/Megatron-LM #1754), which are NaN or huge in some files"""

    def __init__(self, *given):
        super().__init__(*given)
        self.real = np.ones(self.real.shape, bool)


class ZeroTimesInfinity(Kl):
    """a column of p = 0 is 0 times -inf (p log p without a case for 0)"""

    kind = "nan"

    def terms(self, share, other):
        gaps = share - other
        return np.exp(share) * gaps, gaps


class InBits(Kl):
    """the divergence is in bits (log2)"""

    kind = "base"

    def summed(self, terms):
        return super().summed(terms) / np.log(2)

    def slope(self, log_q, log_p, gaps, value):
        return super().slope(log_q, log_p, gaps, value * np.log(2)) / np.log(2)


class GradientOfOnes(Kl):
    """the gradient of every value is 1 (a backward that takes no argument)"""

    kind = "no-d-value"

    def home(self, d_kl):
        return np.ones_like(d_kl)


class ClampedAtZero(Kl):
    """terms below 0 are clamped, which a divergence has in columns of p < q (a clamp of the wrong array)"""

    kind = "values"

    def terms(self, share, other):
        terms, gaps = super().terms(share, other)
        return np.maximum(terms, 0), gaps


class SumInBfloat16(Kl):
    """the sum over columns is in bfloat16 (autocast around the divergence)"""

    kind = "values"

    def summed(self, terms):
        return bfloat16(super().summed(bfloat16(terms)))


class KlOfParts(Kl):
    """Right: ranks' losses are added, and gradients are summed over them."""

    home = GradientSummedAgain.home


class KlLoss:
    """The mean of divergences over all rows that count, by their weights."""

    options, of = {"cp": 2, "tp": 2}, Kl

    def __init__(self, logits_shard, labels, group, data_group, first, columns, weights, count, teacher_shard):
        if teacher_shard is None:
            raise NotImplementedError("no teacher")
        vars(self).update(locals())

    def counted(self):
        return np.where(self.labels == -100, 0, self.weights.astype(np.float64))

    def normaliser(self, counted):
        return self.count or 1

    def reverse(self):
        return False

    def run(self):
        columns, counted = self.columns, self.counted()
        shards = self.logits_shard, self.teacher_shard
        value, backward = self.of(*shards, self.group, self.first, columns, columns, self.reverse()).run()
        share = counted / self.normaliser(counted)
        return np.asarray(self.data_group.all_reduce((share * value).sum()), np.float32), lambda d: backward(d * share)


def loss_of(kind):
    def loss(logits_shard, labels, group, data_group, first, columns, weights, count, teacher_shard):
        return kind(logits_shard, labels, group, data_group, first, columns, weights, count, teacher_shard).run()

    return loss


class KlMeanOverPadding(KlLoss):
    """the mean divergence counts rows that are ignored (a mean over padded rows)"""

    kind = "normalisation"

    def normaliser(self, counted):
        return self.data_group.all_reduce(len(self.labels))


class KlMeanOfTheRank(KlLoss):
    """every rank divides its divergences by its own weights (NVIDIA/Megatron-LM PR #7513)"""

    kind = "normalisation"

    def normaliser(self, counted):
        return counted.sum() or 1


class KlSumOverVocabularyRanks(KlLoss):
    """the mean divergence counts tp times (a sum over all ranks)"""

    kind, of = "factor-tp", SummedTwice
    options = {"cp": 1, "tp": 4}


class KlMeanReversed(KlLoss):
    """the mean is of the divergences in the other direction (the order of torch.nn.functional.kl_div)"""

    kind = "teacher"

    def reverse(self):
        return True


class KlMeanOfIgnoredRows(KlLoss):
    """rows that are ignored add their divergence (a mask of labels that a loss with a teacher does not read)"""

    kind = "padding"

    def counted(self):
        return self.weights.astype(np.float64)


RIGHT = [
    Bug("KlLoss", "loss", "", loss_of(KlLoss), {"cp": 2, "tp": 2}),
    Bug("Kl", "kl", "", kl_of(Kl), {}),
    Bug("Kl", "kl", "", kl_of(Kl), {"cp": 2, "tp": 4}),
    Bug("KlOfParts", "kl", "", kl_of(KlOfParts), {"tp": 4, "convention": "sum"}),
]
BUGS = [bug for bug in bugs_of(Kl, "kl", kl_of) if bug.name != "KlOfParts"] + bugs_of(KlLoss, "loss", loss_of)
