"""Errors of losses that ranks compute together: multi-token prediction, routers, policies, label smoothing, z-loss.

Variants of right classes, a method changed in each; the docstring says what a variant does and where it comes from, kind how
the harness calls it.
"""

import numpy as np
import ranks_numpy
import step_numpy
from planted import Bug, bugs_of

from gyre.distributed.decoder import softmax

GRID, DATA, TP = {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"tp": 2}


class Depths:
    """Losses of all depths, each by its own count."""

    options, kind = GRID, "values"

    def __init__(self, logits_shards, labels, group, data_group, first, mtp_weight):
        vars(self).update(locals())
        self.depths = len(labels) - 1

    def all(self, x):
        return self.data_group.all_reduce(x)

    def weight(self, depth):
        return 1 if depth == 0 else self.mtp_weight / self.depths

    def count(self, depth, known):
        return self.all(known.sum())

    def labels_of(self, depth):
        return self.labels[depth]

    def term(self, depth):
        mine, logits = self.labels_of(depth), self.logits_shards[depth]
        known = mine != -100
        factor = self.weight(depth) / max(1, self.count(depth, known))
        top = self.group.all_reduce(logits.max(axis=1, initial=-np.inf), "max")[:, None]
        lse = top + np.log(self.group.all_reduce(np.exp(logits - top).sum(axis=1)))[:, None]
        here = (mine - self.first)[:, None] == np.arange(logits.shape[1])
        target = self.group.all_reduce(np.where(here, logits, 0).sum(axis=1))
        loss = self.all(factor * (known * (lse[:, 0] - target)).sum())
        return loss, (factor * known[:, None] * (np.exp(logits - lse) - here)).astype(logits.dtype)

    def run(self):
        losses, gradients = zip(*(self.term(d) for d in range(self.depths + 1)))
        return np.float32(sum(losses)), lambda d: [d * g for g in gradients]


def depths_of(kind):
    def mtp_loss(logits_shards, labels, group, data_group, first, mtp_weight):
        return kind(logits_shards, labels, group, data_group, first, mtp_weight).run()

    return mtp_loss


class DepthsByOwnCount(Depths):
    """depths are divided by the rank's own count, and averaged: 14/3 for 4 (NVIDIA/Megatron-LM #7452, 3)"""

    kind = "own-count"

    def count(self, depth, known):
        return known.sum() * self.data_group.size if depth else super().count(depth, known)


class AllDepthsByOwnCount(Depths):
    """every head is divided by the rank's own count, and averaged (NVIDIA/Megatron-LM PR #7513)"""

    options, kind = DATA, "own-count"

    def count(self, depth, known):
        return known.sum() * self.data_group.size


class CountOfTheMainHead(Depths):
    """depths are divided by the count of the main head (NVIDIA/Megatron-LM PR #7498)"""

    kind = "other-count"

    def count(self, depth, known):
        return self.all((self.labels[0] != -100).sum())


class CountOfAllDepths(Depths):
    """labels of all depths are in one count (heads that are stacked)"""

    kind = "other-count"

    def count(self, depth, known):
        return self.all(sum((mine != -100).sum() for mine in self.labels))


class DepthsNotDivided(Depths):
    """depths are added, not averaged"""

    kind = "depth-weight"

    def weight(self, depth):
        return self.mtp_weight if depth else 1


class WeightOfTheMainHead(Depths):
    """all heads, the main one too, have the weight of depths"""

    kind = "depth-weight"

    def weight(self, depth):
        return self.mtp_weight / self.depths


class LastDepthLost(Depths):
    """the last depth is missing (range(1, depths))"""

    kind = "depth-lost"

    def weight(self, depth):
        return 0 if depth == self.depths else super().weight(depth)


class LabelsOfTheMainHead(Depths):
    """all depths have the labels of the main head (labels that are not rolled; NVIDIA/Megatron-LM #6205)"""

    kind = "label-shift"

    def labels_of(self, depth):
        return self.labels[0]


class Router:
    """Fractions, means and counts over all ranks."""

    options, kind = GRID, "values"

    def __init__(self, router_logits, top_k, aux_weight, z_weight, weights, data_group):
        vars(self).update(locals())
        self.experts, self.w = router_logits.shape[1], weights[:, None]

    def all(self, x):
        return self.data_group.all_reduce(x)

    def chosen(self):
        return np.argsort(np.argsort(-self.router_logits, axis=1), axis=1) < self.top_k

    def fractions(self):
        return self.all((self.w * self.chosen()).sum(axis=0)) / (self.top_k * self.count())

    def count(self):
        return self.all(self.weights.sum())

    def z_count(self):
        return self.count()

    def factor(self):
        return self.experts

    def z(self, lse):
        return lse**2, 2 * lse

    def run(self):
        p, lse = softmax(self.router_logits), np.logaddexp.reduce(self.router_logits, axis=1)[:, None]
        slope = self.aux_weight * self.factor() * self.w * self.fractions() / max(1, self.count())
        z, z_slope = self.z(lse)
        share = self.z_weight * self.w / max(1, self.z_count())
        gradient = p * (slope - (slope * p).sum(axis=1, keepdims=True)) + share * z_slope * p
        loss = self.all((slope * p).sum() + (share * z).sum())
        return np.float32(loss), lambda d: (d * gradient).astype(self.router_logits.dtype)


def router_of(kind):
    def router_loss(router_logits, top_k, aux_weight, z_weight, weights, data_group):
        return kind(router_logits, top_k, aux_weight, z_weight, weights, data_group).run()

    return router_loss


class OwnAuxiliaryLoss(Router):
    """every rank has the loss of its own tokens, and these are averaged (a sequence that cp splits)"""

    kind = "own-count"

    def fractions(self):
        own = max(1, self.weights.sum())
        return (self.w * self.chosen()).sum(axis=0) / (self.top_k * own)

    def count(self):
        return self.weights.sum() * self.data_group.size


class OwnFractions(Router):
    """fractions are those of the rank's own tokens (tokens_per_expert without its reduction)"""

    kind = "own-fractions"

    def fractions(self):
        return (self.w * self.chosen()).sum(axis=0) / (self.top_k * max(1, self.weights.sum()))


class CountOverwritten(Router):
    """the count is that of half of the tokens: the gradient of the loss doubles (NVIDIA/Megatron-LM #7452, 10)"""

    options, kind = {"cp": 4}, "aux-scale"

    def factor(self):
        return 2 * self.experts


class AuxiliaryLossTimesRanks(Router):
    """the auxiliary loss is summed over ranks that have all of it"""

    options, kind = {"dp": 4}, "aux-scale"

    def factor(self):
        return self.data_group.size * self.experts


class FractionsNotOverK(Router):
    """fractions have the sum k (top-1's formula)"""

    kind = "aux-scale"

    def factor(self):
        return self.top_k * self.experts


class ExpertsForgotten(Router):
    """the factor E is missing"""

    kind = "aux-scale"

    def factor(self):
        return 1


class PaddingRouted(Router):
    """padding counts (a router that does not get the mask)"""

    kind = "padding"

    def __init__(self, router_logits, top_k, aux_weight, z_weight, weights, data_group):
        super().__init__(router_logits, top_k, aux_weight, z_weight, np.ones_like(weights), data_group)


class LargestLogitAlone(Router):
    """fractions are those of the largest logit alone (argmax for topk)"""

    kind = "top-k"

    def chosen(self):
        return self.top_k * (np.argsort(np.argsort(-self.router_logits, axis=1), axis=1) < 1)


class ZLossByOwnCount(Router):
    """the z-loss is the mean of each rank, averaged (a mean that is not reduced)"""

    kind = "own-count"

    def z_count(self):
        return self.weights.sum() * self.data_group.size


class ZLossNotSquared(Router):
    """the z-loss is that of lse, not of its square"""

    kind = "z-loss"

    def z(self, lse):
        return lse, np.ones_like(lse)


class Policy:
    """A clipped policy loss, whose documents lie on several ranks."""

    options, kind = GRID | {"convention": "sequence-mean"}, "values"

    def __init__(self, logprobs, old_logprobs, advantages, weights, document, documents, clip, convention, data_group):
        vars(self).update(locals())

    def all(self, x):
        return self.data_group.all_reduce(x)

    def tokens(self):
        """Of each document, of all ranks."""
        return self.all(self.own_tokens())

    def own_tokens(self):
        return np.bincount(self.document, self.weights, self.documents)

    def number(self):
        return max(1, (self.all(self.own_tokens()) > 0).sum())

    def share(self):
        if self.convention == "token-mean":
            return self.weights / max(1, self.tokens().sum())
        tokens = self.tokens() if self.convention == "sequence-mean" else np.ones(self.documents)
        return self.weights / self.number() / np.where(tokens > 0, tokens, 1)[self.document]

    def ratio(self):
        return np.exp(self.logprobs - self.old_logprobs)

    def smaller(self, kept, cut):
        return kept <= cut

    def moves(self, kept, cut):
        return self.smaller(kept, cut) | (kept == cut)

    def run(self):
        share, ratio = self.share(), self.ratio()
        kept, cut = ratio * self.advantages, np.clip(ratio, 1 - self.clip, 1 + self.clip) * self.advantages
        slope = -share * np.where(self.moves(kept, cut), kept, 0)
        loss = self.all((-share * np.where(self.smaller(kept, cut), kept, cut)).sum())
        return np.float32(loss), lambda d: (d * slope).astype(self.logprobs.dtype)


def policy_of(kind):
    def policy_loss(logprobs, old_logprobs, advantages, weights, document, documents, clip, convention, data_group):
        return kind(logprobs, old_logprobs, advantages, weights, document, documents, clip, convention, data_group).run()

    return policy_loss


class DocumentsOfTheRank(Policy):
    """a document on several ranks is divided by each rank's own tokens of it (a mean over dim = 1, sharded)"""

    kind = "own-count"

    def tokens(self):
        return self.own_tokens()


class DocumentsCountedByRank(Policy):
    """a document on several ranks is counted by each of them (a sum of the ranks' numbers)"""

    options, kind = {"cp": 4, "convention": "sequence-mean"}, "documents"

    def number(self):
        return max(1, self.all((self.own_tokens() > 0).sum()))


class EmptyDocumentsCounted(Policy):
    """documents without a token that counts are in the mean (a mean over the batch)"""

    kind = "documents"

    def number(self):
        return self.documents


class TokenMeanForSequenceMean(Policy):
    """the mean over tokens, where that over documents is asked for (google/tunix #1662)"""

    kind = "convention"

    def share(self):
        return self.weights / max(1, self.all(self.weights.sum()))


class SequenceMeanForTokenMean(Policy):
    """the mean over documents, where that over tokens is asked for (loss_agg_mode)"""

    options, kind = GRID | {"convention": "token-mean"}, "convention"

    def share(self):
        tokens = self.tokens()
        return self.weights / self.number() / np.where(tokens > 0, tokens, 1)[self.document]


class TokenMeanOfTheRank(Policy):
    """every rank divides by its own tokens, and the means are averaged (masked_mean, then DDP)"""

    options, kind = {"cp": 4, "convention": "token-mean"}, "own-count"

    def tokens(self):
        return self.own_tokens() * self.data_group.size


class PromptsInTheCount(Policy):
    """tokens of weight 0 are in the count (a mean of masked values)"""

    options, kind = {"cp": 2, "convention": "token-mean"}, "weights"

    def tokens(self):
        return self.all(np.bincount(self.document, minlength=self.documents))


class RatiosNotClipped(Policy):
    """ratios are not clipped"""

    kind = "clip"

    def smaller(self, kept, cut):
        return np.ones(kept.shape, bool)


class LargerOfBoth(Policy):
    """the larger of both is taken (max of losses for min of objectives, once too often)"""

    kind = "clip"

    def smaller(self, kept, cut):
        return kept >= cut


class GradientThroughTheClip(Policy):
    """the gradient of clipped ratios is not 0 (a clip of detached values)"""

    kind = "clip"

    def moves(self, kept, cut):
        return np.ones(kept.shape, bool)


class RatioTheOtherWayRound(Policy):
    """the ratio is old over new"""

    kind = "ratio"

    def run(self):
        ratio = np.exp(self.old_logprobs - self.logprobs)
        share = self.share()
        kept, cut = ratio * self.advantages, np.clip(ratio, 1 - self.clip, 1 + self.clip) * self.advantages
        slope = share * np.where(self.moves(kept, cut), kept, 0)
        return np.float32(self.all((-share * np.minimum(kept, cut)).sum())), lambda d: (d * slope).astype(np.float32)


class Smoothed:
    """The contract loss with label smoothing and z-loss: right."""

    options, kind = TP, "values"

    def __init__(self, logits_shard, labels, group, data_group, first, weights, count, label_smoothing, z_loss):
        vars(self).update(locals())

    def run(self):
        return ranks_numpy.loss(self.logits_shard, self.labels, self.group, self.data_group, self.first, self.weights,
                                self.count, self.label_smoothing, self.z_loss)


def smoothed_of(kind):
    def loss(logits_shard, labels, group, data_group, first, weights, count, label_smoothing, z_loss):
        return kind(logits_shard, labels, group, data_group, first, weights, count, label_smoothing, z_loss).run()

    return loss


class SmoothedOverOwnColumns(Smoothed):
    """labels are smoothed over the rank's own columns (NVIDIA/Megatron-LM #7452, 1)"""

    kind = "local-smoothing"

    def run(self):
        if not self.label_smoothing:
            return super().run()
        value, backward = ranks_numpy.loss(self.logits_shard, self.labels, self.group, self.data_group, self.first,
                                           self.weights, self.count)
        x = self.logits_shard.astype(np.float64)
        lse = np.log(self.group.all_reduce(np.exp(x).sum(axis=1)))[:, None]
        share = (self.weights * (self.labels != -100) / (self.count or 1))[:, None]
        e, width = self.label_smoothing, x.shape[1]
        smooth = self.data_group.all_reduce(-(share * (x - lse)).sum() / width)
        gradient = share * (np.exp(x - lse) - 1 / width)
        loss = np.asarray((1 - e) * value + e * smooth, x.dtype)
        return loss.astype(np.float32), lambda d: (d * ((1 - e) * backward(1.0) + e * gradient)).astype(np.float32)


class SmoothingIgnored(Smoothed):
    """label smoothing is ignored (a parallel cross entropy without it)"""

    kind = "smoothing"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.label_smoothing = 0.0


class SmoothingOverOthers(Smoothed):
    """the label has no part of what is smoothed: e / (V - 1) (NVIDIA/Megatron-LM's factor, for PyTorch's)"""

    kind = "smoothing"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        width = int(self.group.all_reduce(np.int64(self.logits_shard.shape[1])))
        self.label_smoothing *= width / max(1, width - 1)


class ZLossTwice(Smoothed):
    """the z-loss counts twice (added by the kernel, and by the trainer)"""

    kind = "z-loss"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.z_loss *= 2


class ZLossIgnored(Smoothed):
    """the z-loss is ignored (a backward without it is another error)"""

    kind = "z-loss"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.z_loss = 0.0


class CountOfTheMicrobatch(Smoothed):
    """every microbatch divides by its own count, and the means are summed (no num_items_in_batch)"""

    options, kind = {"cp": 2}, "normalisation"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.count = float(self.data_group.all_reduce((self.weights * (self.labels != -100)).sum()))


class MeanOfNoLabel(Smoothed):
    """the mean over no label is 0 / 0 (reduction="mean")"""

    options, kind = {"cp": 2}, "nan"

    def run(self):
        value, backward = super().run()
        return (value if self.count else np.float32(np.nan)), backward


RIGHT = [
    Bug("mtp_loss", "mtp_loss", "", step_numpy.mtp_loss, GRID),
    Bug("depths", "mtp_loss", "", depths_of(Depths), DATA),
    Bug("router_loss", "router_loss", "", step_numpy.router_loss, GRID),
    Bug("router", "router_loss", "", router_of(Router), DATA),
    Bug("policy_loss", "policy_loss", "", step_numpy.policy_loss, GRID | {"convention": "token-mean"}),
    Bug("policy", "policy_loss", "", policy_of(Policy), DATA | {"convention": "sequence-mean"}),
    Bug("policy_sum", "policy_loss", "", step_numpy.policy_loss, DATA | {"convention": "sequence-sum"}),
    Bug("loss_smoothed", "loss", "", smoothed_of(Smoothed), GRID),
]
BUGS = [
    *bugs_of(Depths, "mtp_loss", depths_of), *bugs_of(Router, "router_loss", router_of),
    *bugs_of(Policy, "policy_loss", policy_of), *bugs_of(Smoothed, "loss", smoothed_of),
]
