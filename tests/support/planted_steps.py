"""Errors of a training step: gradients of parameters, of a decoder on dp x cp x tp ranks.

Variants of a right class, a method changed in each; the docstring says what a variant does and where it comes from, kind how
the harness calls it.
"""

import numpy as np
import ranks_numpy
import step_numpy
from planted import Bug, bfloat16, bugs_of
from step_numpy import EMBEDDING, HEAD, Rank

DATA, TP, ALL = {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}


class Step(Rank):
    """A right step, whose variants have errors."""

    options, kind = TP, "values"


def gradients_of(kind):
    def gradients(weights, microbatches, config, dp_group, cp_group, tp_group, data_group):
        return kind(weights, microbatches, config, dp_group, cp_group, tp_group, data_group).step()

    return gradients


# Reductions over ranks that have other tokens.


class AveragedOverData(Step):
    """gradients are averaged over dp x cp, not summed (torchtitan #2206)"""

    options, kind = DATA, "factor-1/dp x cp"

    def over_data(self, name, gradient):
        return super().over_data(name, gradient) / self.data_group.size


class AveragedOverCp(Step):
    """gradients are averaged over cp, and summed over dp (a mesh of dp and cp for one of dp)"""

    options, kind = {"dp": 4, "cp": 2}, "factor-1/cp"

    def over_data(self, name, gradient):
        return super().over_data(name, gradient) / self.cp_group.size


class TimesCp(Step):
    """the loss is times cp, for an average that is a sum (NVIDIA/Megatron-LM PR #906)"""

    options, kind = {"dp": 4, "cp": 2}, "factor-cp"

    def over_data(self, name, gradient):
        return super().over_data(name, gradient) * self.cp_group.size


class SummedAgain(Step):
    """gradients are summed over the replicas a second time (a hook and the optimizer)"""

    options, kind = {"dp": 4, "cp": 2}, "factor-dp"

    def over_data(self, name, gradient):
        return self.dp_group.all_reduce(super().over_data(name, gradient))


class NotReducedOverCp(Step):
    """the group of the reduction excludes cp (ByteDance-Seed/VeOmni #1115)"""

    options, kind = DATA, "not-reduced-cp"

    def over_data(self, name, gradient):
        return self.dp_group.all_reduce(gradient)


class NotReducedOverDp(Step):
    """the group of the reduction is that of cp (a mesh without dp)"""

    options, kind = DATA, "not-reduced-dp"

    def over_data(self, name, gradient):
        return self.cp_group.all_reduce(gradient)


class NotReduced(Step):
    """gradients are not reduced (no_sync in the last microbatch)"""

    options, kind = DATA, "not-reduced-dp-cp"

    def over_data(self, name, gradient):
        return gradient


class EmbeddingNotReducedOverCp(Step):
    """the embedding is reduced over dp alone (a hook of its own)"""

    options, kind = ALL, "not-reduced-cp"

    def over_data(self, name, gradient):
        return self.dp_group.all_reduce(gradient) if name == EMBEDDING else super().over_data(name, gradient)


class LargestInPlaceOfSum(Step):
    """gradients of replicas are reduced by a maximum (the operation of another all-reduce)"""

    options, kind = {"dp": 2}, "values"

    def over_data(self, name, gradient):
        return self.data_group.all_reduce(gradient, "max")


class NormsNotReducedOverTp(Step):
    """norms are not reduced over tp under sequence parallelism (NVIDIA/Megatron-LM, parameters without the attribute sequence_parallel)"""

    kind = "not-reduced-tp"

    def over_tp(self, name, gradient):
        return gradient if "norm" in name else super().over_tp(name, gradient)


class LastNormNotReducedOverTp(Step):
    """the last norm is not reduced over tp under sequence parallelism (one module without the attribute)"""

    kind = "not-reduced-tp"

    def over_tp(self, name, gradient):
        return gradient if name == "model.norm.weight" else super().over_tp(name, gradient)


class BiasNotReducedOverTp(Step):
    """biases of row-parallel layers are not reduced over tp under sequence parallelism (NVIDIA/Megatron-LM)"""

    kind = "not-reduced-tp"

    def over_tp(self, name, gradient):
        return gradient if "bias" in name else super().over_tp(name, gradient)


class RouterNotReducedOverTp(Step):
    """the router is not reduced over tp under sequence parallelism (NVIDIA/Megatron-LM)"""

    kind = "not-reduced-tp"

    def over_tp(self, name, gradient):
        return gradient if "mlp.gate" in name else super().over_tp(name, gradient)


class NormsAveragedOverTp(Step):
    """replicated parameters are averaged over tp under sequence parallelism (AVG of equal copies)"""

    options, kind = {"cp": 4, "tp": 2}, "factor-1/tp"

    def over_tp(self, name, gradient):
        return super().over_tp(name, gradient) / self.tp


class NormsSummedWithoutSequenceParallel(Step):
    """replicated parameters are summed over tp, whose ranks have the same tokens (a hook that is always there)"""

    options, kind, sequence_parallel = {"cp": 4, "tp": 2}, "factor-tp", False

    def reduced(self, name, gradient):
        gradient = super().reduced(name, gradient)
        return self.over_tp(name, gradient) if self.dim(name) is None else gradient


class NormsDividedByTp(Step):
    """replicated parameters are divided by tp without sequence parallelism (a sum that is not there)"""

    options, kind, sequence_parallel = {"cp": 4, "tp": 2}, "factor-1/tp", False

    def reduced(self, name, gradient):
        return super().reduced(name, gradient) / (self.tp if self.dim(name) is None else 1)


class ReducedOverTp(Step):
    """norms are reduced over tp in place of cp (a group of the wrong axis)"""

    kind = "not-reduced-cp"

    def over_data(self, name, gradient):
        return gradient if "norm" in name else super().over_data(name, gradient)


class KvNotSummed(Step):
    """KV weights that several ranks have are not summed over these (replicated KV heads, H_kv < tp)"""

    options, kind = {"tp": 4}, "kv-not-summed"

    def over_copies(self, gradient):
        return gradient


class KvAveraged(Step):
    """KV weights that several ranks have are averaged over these (AVG of equal copies)"""

    options, kind = {"cp": 4, "tp": 2}, "factor-1/tp"

    def over_copies(self, gradient):
        return super().over_copies(gradient) / max(1, self.tp // self.kv_heads)


class ReducedAfterEveryMicrobatch(Step):
    """the sum over ranks is made of the accumulated gradient, after every microbatch (no no_sync)"""

    options, kind = {"cp": 2}, "reduced-again"

    def step(self):
        for batch in self.microbatches:
            self.backward(batch)
            self.gradients = {n: self.reduced(n, g).astype(self.type) for n, g in self.gradients.items()}
        return {name: (g, self.placement(name)) for name, g in self.gradients.items()}


# Counts.


class OwnCount(Step):
    """every rank divides by its own count, and gradients are summed (NVIDIA/Megatron-LM PR #7513)"""

    options, kind = DATA, "own-count"

    def count(self, batch):
        return sum(self.weight(b).sum() for b in self.microbatches)


class OwnCountAveraged(OwnCount):
    """every rank divides by its own count, and gradients are averaged (NVIDIA/Megatron-LM #7452, 9)"""

    def count(self, batch):
        return super().count(batch) * self.data_group.size


class CountOfReplica(Step):
    """every replica divides by its own count, and gradients are averaged over dp (NovaSky-AI/SkyRL #1420)"""

    options, kind = DATA, "own-count"

    def count(self, batch):
        return self.cp_group.all_reduce(sum(self.weight(b).sum() for b in self.microbatches)) * self.dp_group.size


class CountOfCpRank(Step):
    """ranks of cp divide by what their place has in all replicas, and gradients are averaged (an all-reduce over dp)"""

    options, kind = DATA, "own-count"

    def count(self, batch):
        return self.dp_group.all_reduce(sum(self.weight(b).sum() for b in self.microbatches)) * self.cp_group.size


class CountOfMicrobatch(Step):
    """every microbatch divides by its own count, and the means are averaged (huggingface/transformers #34191)"""

    options, kind = {"dp": 2}, "own-count"

    def count(self, batch):
        return self.data_group.all_reduce(self.weight(batch).sum()) * len(self.microbatches)


class CountOfMicrobatchSummed(Step):
    """every microbatch divides by its own count, and the means are summed (no division by accumulation steps)"""

    options, kind = {"cp": 2}, "own-count"

    def count(self, batch):
        return self.data_group.all_reduce(self.weight(batch).sum())


class CountOfRankAndMicrobatch(Step):
    """every microbatch of every rank divides by its own count, and all is averaged (a mean as loss, then DDP)"""

    options, kind = DATA, "own-count"

    def count(self, batch):
        return self.weight(batch).sum() * len(self.microbatches) * self.data_group.size


class MicrobatchesAveraged(Step):
    """gradients are divided by the number of microbatches after the global count (volcengine/verl #4250)"""

    options, kind = {"dp": 2}, "factor-1/microbatches"

    def count(self, batch):
        return super().count(batch) * len(self.microbatches)


class CountOfLabels(Step):
    """labels whose weight is 0 are in the count (a mask that multiplies, and a mean)"""

    options, kind = {"cp": 2}, "count"

    def count(self, batch):
        return self.data_group.all_reduce(sum((b["labels"] != -100).sum() for b in self.microbatches))


class CountOfSlots(Step):
    """padding is in the count (a mean over the rows)"""

    options, kind = {"cp": 2}, "count"

    def count(self, batch):
        return self.data_group.all_reduce(np.int64(sum(len(b["labels"]) for b in self.microbatches)))


class CountOfTokens(Step):
    """tokens without a label are in the count (cu_seqlens[-1] for the number of labels)"""

    options, kind = {"cp": 2}, "count"

    def count(self, batch):
        rows = sum(np.isin(b["layout"].index[self.cp_group.rank], b["layout"].tokens).sum() for b in self.microbatches)
        return self.data_group.all_reduce(rows)


class NoCount(Step):
    """a sum, not a mean (reduction="sum")"""

    options, kind = {"cp": 2}, "count"

    def count(self, batch):
        return 1.0


class WeightsIgnored(Step):
    """weights are ignored (a loss mask that is not passed on)"""

    options, kind = {"cp": 2}, "weights"

    def weight(self, batch):
        return (batch["labels"] != -100).astype(self.type)


class WeightsNotInTheCount(Step):
    """the count is the number of labels, not the sum of their weights (num_items_in_batch with weights)"""

    options, kind = {"cp": 2}, "count"

    def count(self, batch):
        return self.data_group.all_reduce(sum((self.weight(b) > 0).sum() for b in self.microbatches))


class NotANumberWithoutLabels(Step):
    """a mean over no label is 0 / 0 (CrossEntropyLoss of a shard without labels)"""

    options, kind = {"cp": 2}, "nan"

    def d_logits(self, logits, batch):
        found = super().d_logits(logits, batch)
        return found if self.weight(batch).any() else found * np.float32(np.nan)


# Microbatches, and parameters by themselves.


class LastMicrobatch(Step):
    """gradients are set to 0 before every microbatch (zero_grad in the inner loop)"""

    options, kind = {"dp": 2}, "microbatch-lost"

    def backward(self, batch):
        self.gradients = {name: np.zeros_like(g) for name, g in self.gradients.items()}
        super().backward(batch)


class FirstMicrobatch(Step):
    """gradients are reduced after the first microbatch, and those behind it are lost (main_grad, a stale bucket)"""

    options, kind = {"dp": 2}, "microbatch-lost"

    def backward(self, batch):
        kept = {name: g.copy() for name, g in self.gradients.items()}
        super().backward(batch)
        self.gradients = self.gradients if batch is self.microbatches[0] else kept


class OneGradientStored(Step):
    """the gradient of the output projection is stored, not added (beta = 0 of a fused wgrad kernel)"""

    options, kind = {"cp": 2}, "microbatch-lost"

    def add(self, name, gradient):
        if "o_proj" in name:
            self.gradients[name] = gradient
        else:
            super().add(name, gradient)


class TiedHeadLost(Step):
    """the tied head adds nothing to the embedding (a copy of the weight, as between pipeline stages)"""

    kind = "tied"

    def linear(self, name, x, bias=True):
        logits, back = super().linear(name, x, bias)

        def backward(d):
            kept = self.gradients[EMBEDDING].copy()
            found = back(d)
            self.gradients[EMBEDDING] = kept
            return found

        return logits, backward if name == EMBEDDING.removesuffix(".weight") else back


class TiedEmbeddingLost(Step):
    """the gradient of the tied head is stored over that of the embedding (two hooks of one parameter)"""

    kind = "tied"

    def embed(self, batch):
        x, add = super().embed(batch)

        def backward(d):
            kept = self.gradients[EMBEDDING].copy()
            add(d)
            if self.config.tie_word_embeddings:
                self.gradients[EMBEDDING] = kept

        return x, backward


class ParameterLeftOut(Step):
    """a parameter has no gradient: it is not in the graph (a buffer, or requires_grad = False)"""

    options, kind = {"cp": 2}, "missing-parameter"

    def step(self):
        return {name: g for name, g in super().step().items() if name != "model.layers.1.mlp.up_proj.weight"}


class SinksDetached(Step):
    """sinks get no gradient (NVIDIA/TransformerEngine PR #3551)"""

    options, kind = {"cp": 2}, "zero-gradient"

    def add(self, name, gradient):
        super().add(name, 0 * gradient if "sinks" in name else gradient)


class SinksNotReducedOverCp(Step):
    """sinks are reduced over dp alone (a gradient that the kernel writes, outside the bucket)"""

    options, kind = ALL, "not-reduced-cp"

    def over_data(self, name, gradient):
        return self.dp_group.all_reduce(gradient) if "sinks" in name else super().over_data(name, gradient)


class SinksSummedOverTp(Step):
    """sinks of other ranks' heads are added to the rank's own (taken for replicated ones)"""

    kind = "values"

    def over_data(self, name, gradient):
        gradient = super().over_data(name, gradient)
        return self.tp_group.all_reduce(gradient) if "sinks" in name else gradient


class ExpertsDividedByTp(Step):
    """gradients of experts are divided by the ranks that have a part of each (expert parallelism's scale)"""

    options, kind = {"cp": 4, "tp": 2}, "factor-1/tp"

    def over_data(self, name, gradient):
        return super().over_data(name, gradient) / (self.tp if ".experts." in name else 1)


class AccumulatedInBfloat16(Step):
    """gradients are stored in bfloat16 (reduce_dtype of mixed precision)"""

    options, kind = {"cp": 2}, "rounding"

    def reduced(self, name, gradient):
        return bfloat16(super().reduced(name, gradient)).astype(self.type)


class NegativeGradients(Step):
    """gradients of a log-probability, not of a loss (maximize)"""

    options, kind = {"cp": 2}, "sign"

    def reduced(self, name, gradient):
        return -super().reduced(name, gradient)


class ShardsOfTheNextRank(Step):
    """shards of the head are those of the next rank (ranks in another order in a reduce-scatter)"""

    options, kind = {"tp": 4}, "wrong-shards"

    def reduced(self, name, gradient):
        found = super().reduced(name, gradient)
        return self.tp_group.all_gather(found)[(self.t + 1) % self.tp] if name == HEAD else found


# Layers.


class DocumentsSeen(Step):
    """tokens see earlier documents of their stream (a mask that is causal alone; huggingface/accelerate PR #4177)"""

    options, kind = {"cp": 2}, "documents"

    def allowed(self, batch):
        layout = batch["layout"]
        return np.arange(layout.slots) <= layout.index[self.cp_group.rank][:, None]


class PositionsOfTheRows(Step):
    """positions count the rows of the rank (arange behind a sharding)"""

    options, kind = {"cp": 2}, "positions"

    def positions(self, batch):
        return np.arange(len(batch["ids"]))


class LabelsShiftedAgain(Step):
    """labels are shifted again by the model (huggingface/transformers: labels that a collator has shifted)"""

    options, kind = {"cp": 1, "dp": 2}, "label-shift"

    def d_logits(self, logits, batch):
        return super().d_logits(logits, {**batch, "labels": np.append(batch["labels"][1:], -100)})


class KeysOfTheRank(Step):
    """tokens see the keys of their own rank alone (attention without context parallelism)"""

    options, kind = {"cp": 2}, "dropped-shard"

    def allowed(self, batch):
        layout = batch["layout"]
        return super().allowed(batch) & (layout.owner == self.cp_group.rank)


class KeysDetached(Step):
    """keys and values of other ranks get no gradient (an all-gather of torch.distributed, which has none)"""

    options, kind = {"cp": 2}, "gradient-dropped"

    def attend(self, q, k, v, batch, sinks):
        out, lse, back = super().attend(q, k, v, batch, sinks)
        layout, me = batch["layout"], self.cp_group.rank

        class Alone:
            rank, size = me, self.cp_group.size
            all_gather = self.cp_group.all_gather

            @staticmethod
            def all_to_all(parts):
                return [parts[me]]

        alone = ranks_numpy.attention(q, k, v, batch["cu_seqlens"], layout, Alone, self.allowed(batch),
                                      self.config.head_dim**-0.5, sinks)[2]
        return out, lse, lambda d: [back(d)[0], *alone(d)[1:]]


class BiasOnEveryRank(Step):
    """every rank of tp adds the bias of a row-parallel layer before the sum (a linear layer, sharded)"""

    options, kind, sequence_parallel = TP, "bias-repeated", False

    def row_bias(self, name, y):
        bias = self.own.get(name + ".bias")
        y, back = super().row_bias(name, y)
        return (y if bias is None else y + (self.tp - 1) * bias), back


class LossOfEveryTpRank(Step):
    """the loss is back-propagated on every rank of tp, and summed (an all-reduce whose backward is a sum)"""

    options, kind = {"cp": 4, "tp": 2}, "factor-tp"

    def d_logits(self, logits, batch):
        return self.tp * super().d_logits(logits, batch)


class InputGradientsNotSummed(Step):
    """gradients of the inputs of column-parallel layers are not summed over tp (a copy without a backward)"""

    kind, sequence_parallel = "input-gradient", False

    def enter(self, x):
        return x, lambda d: d


class GatherWithoutReduceScatter(Step):
    """the backward of the gather of sequence parallelism is a slice, not a reduce-scatter (all-gather of a tensor that is not R)"""

    kind = "values"

    def enter(self, x):
        return self.gather(x), lambda d: np.array_split(d, self.tp)[self.t]


class LogitsOfTheShard(Step):
    """the softmax is over the rank's own columns (logits that are not gathered)"""

    kind = "local-softmax"

    def d_logits(self, logits, batch):
        class Alone:
            all_reduce = staticmethod(lambda x, operation="sum": x)

        mine, self.tp_group = self.tp_group, Alone
        found = super().d_logits(logits, batch)
        self.tp_group = mine
        return found


# Right steps that reduce otherwise.


class ShardedOverData(Step):
    """Gradients of what tp does not split by rows are shards over dp, as FSDP has them."""

    def reduced(self, name, gradient):
        whole = super().reduced(name, gradient)
        return whole if self.dim(name) == 0 else np.array_split(whole, self.dp_group.size)[self.dp_group.rank]

    def placement(self, name):
        return {"tp": super().placement(name), "dp": "replicated" if self.dim(name) == 0 else "shard(0)"}


class PartialOverData(Step):
    """Gradients are returned before they are summed over dp and cp."""

    def over_data(self, name, gradient):
        return gradient

    def placement(self, name):
        return {"tp": super().placement(name), "dp": "partial", "cp": "partial"}


class WithoutSequenceParallel(Step):
    """Ranks of tp have the same tokens."""

    sequence_parallel = False


class OtherOrder(Step):
    """Sums are made in another order, in float32."""

    def over_data(self, name, gradient):
        parts = self.data_group.all_gather(gradient)
        return sum(parts[::-1][1:], parts[::-1][0])

    def add(self, name, gradient):
        self.gradients[name] = (gradient.astype(np.float32) + self.gradients[name]).astype(np.float32)


class Bfloat16Activations(Step):
    """What layers return is rounded to bfloat16; gradients are summed in float32."""

    def linear(self, name, x, bias=True):
        y, back = super().linear(name, x, bias)
        return bfloat16(y).astype(self.type), lambda d: bfloat16(back(d)).astype(self.type)


# The same steps without answers: a model with weights of its own, whose runs are held against one another.


class ZeroGradients(Step):
    """gradients are 0 (a path that returns zeros on both sides of a comparison; NVIDIA/TransformerEngine #3536)"""

    kind = "zero-gradient"

    def reduced(self, name, gradient):
        return 0 * super().reduced(name, gradient)


class ConstantGradients(Step):
    """gradients do not depend on the input (buffers that are not written)"""

    kind = "values"

    def reduced(self, name, gradient):
        return np.ones_like(super().reduced(name, gradient))


def invariant_of(kind):
    def invariant(microbatches, dp_group, cp_group, tp_group, data_group):
        return gradients_of(kind)(step_numpy.WEIGHTS, microbatches, step_numpy.CONFIG, dp_group, cp_group, tp_group, data_group)

    invariant.layouts = step_numpy.NAMES
    return invariant


INVARIANTS = {  # how the harness calls errors that have no answers, and the grid
    AveragedOverData: ("depends-on-cp", {"cp": 2}),
    TimesCp: ("depends-on-cp", {"cp": 2}),
    NotReducedOverCp: ("ranks-disagree", {"cp": 2}),
    NormsNotReducedOverTp: ("ranks-disagree", {"tp": 2}),
    NormsAveragedOverTp: ("depends-on-tp", {"tp": 2}),
    KvNotSummed: ("ranks-disagree", {"tp": 4}),
    OwnCountAveraged: ("depends-on-dp", {"dp": 2}),
    CountOfMicrobatch: ("depends-on-microbatches", {"cp": 2}),
    CountOfSlots: ("depends-on-cp", {"cp": 4}),
    MicrobatchesAveraged: ("depends-on-microbatches", {"cp": 2}),
    LastMicrobatch: ("depends-on-microbatches", {"cp": 2}),
    PositionsOfTheRows: ("depends-on-cp", {"cp": 2}),
    KeysDetached: ("depends-on-cp", {"cp": 2}),
    ZeroGradients: ("zero", {"cp": 2}),
    ConstantGradients: ("constant", {"cp": 2}),
}
VARIANTS = (ShardedOverData, PartialOverData, WithoutSequenceParallel, OtherOrder, Bfloat16Activations)
RIGHT = [
    Bug("step", "gradients", "", gradients_of(Step), TP),
    Bug("step_tp", "gradients", "", gradients_of(Step), {"tp": 4}),
    Bug("step_sharded", "gradients", "", gradients_of(ShardedOverData), ALL),
    Bug("step_partial", "gradients", "", gradients_of(PartialOverData), DATA | {"layout": "striped"}),
    Bug("step_without_sp", "gradients", "", gradients_of(WithoutSequenceParallel), {"tp": 2, "layout": "contiguous"}),
    Bug("step_in_another_order", "gradients", "", gradients_of(OtherOrder), DATA | {"layout": "zigzag"}),
    Bug("invariant", "invariant", "", step_numpy.invariant, TP),
    Bug("step_bfloat16_weights", "gradients", "", gradients_of(Step), TP | {"dtype": "bfloat16"}),
    Bug("step_bfloat16_activations", "gradients", "", gradients_of(Bfloat16Activations), TP | {"dtype": "bfloat16"}),
]
BUGS = [bug for bug in bugs_of(Step, "gradients", gradients_of) if bug.name not in {v.__name__ for v in VARIANTS}] + [
    Bug(step.__name__, "invariant", step.__doc__, invariant_of(step), options, kind=kind)
    for step, (kind, options) in INVARIANTS.items()
]
