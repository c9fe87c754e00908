"""Errors of the norm of gradients, and of the step of an optimizer, on dp x cp x tp ranks.

Variants of right classes, a method changed in each; the docstring says what a variant does and where it comes from, kind how
the harness calls it.
"""

import numpy as np
import step_numpy
from planted import Bug, bfloat16, bugs_of

TP, FSDP, MIXED = {"cp": 2, "tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}


class Norm:
    """Squares of all gradients, summed over the ranks that have other elements, and a factor."""

    options, kind = TP, "values"

    def __init__(self, gradients, placements, max_norm, copies, dp_group, cp_group, tp_group):
        vars(self).update(locals())
        self.groups = {"dp": dp_group, "cp": cp_group, "tp": tp_group}

    def is_split(self, name, axis):
        return self.placements[name][axis].startswith("shard")

    def counts(self, name):
        """How often a parameter counts."""
        return 1 / self.copies[name]

    def square(self, name, gradient):
        return (gradient.astype(np.float64) ** 2).sum() * self.counts(name)

    def summed(self, name, square):
        for axis, group in self.groups.items():
            square = group.all_reduce(square) if self.is_split(name, axis) else square
        return square

    def total(self):
        return sum((self.summed(n, self.square(n, g)) for n, g in self.gradients.items()), np.float64(0))

    def norm(self):
        return np.sqrt(self.total())

    def factor(self, norm):
        return min(1, self.max_norm / (norm + 1e-6))

    def clipped(self, name, gradient, norm):
        return self.factor(norm) * gradient

    def reported(self, norm):
        return norm

    def run(self):
        norm = self.norm()
        found = {n: self.clipped(n, g, norm).astype(g.dtype) for n, g in self.gradients.items()}
        return np.float32(self.reported(norm)), found


def norm_of(kind):
    def grad_norm(gradients, placements, max_norm, copies, dp_group, cp_group, tp_group):
        return kind(gradients, placements, max_norm, copies, dp_group, cp_group, tp_group).run()

    return grad_norm


class ReplicatedCountedTpTimes(Norm):
    """parameters that all ranks of tp have count tp times: 1.52 and 1.36 times the norm (ROCm/TransformerEngine #715)"""

    kind = "replicated"

    def total(self):
        mine = sum((self.square(n, g) for n, g in self.gradients.items()), np.float64(0))
        return self.tp_group.all_reduce(mine)


class AllRanksSummed(Norm):
    """squares are summed over all ranks, which have the same shards of parameters (an all-reduce over the world)"""

    kind = "replicated"

    def total(self):
        mine = sum((self.square(n, g) for n, g in self.gradients.items()), np.float64(0))
        return self.cp_group.all_reduce(self.tp_group.all_reduce(mine))


class CpSummed(Norm):
    """squares are summed over cp, whose ranks have the same gradients (volcengine/verl #6609)"""

    options, kind = {"cp": 4}, "replicated"

    def summed(self, name, square):
        return self.cp_group.all_reduce(super().summed(name, square))


class NormsCountedTpTimes(Norm):
    """norms under sequence parallelism count tp times (a filter by the attribute sequence_parallel)"""

    kind = "replicated"

    def counts(self, name):
        return super().counts(name) * (self.tp_group.size if "norm" in name else 1)


class RouterCountedTpTimes(Norm):
    """the router counts tp times (an expert's gradient that is reduced over tp)"""

    kind = "replicated"

    def counts(self, name):
        return super().counts(name) * (self.tp_group.size if "mlp.gate." in name else 1)


class CopiesCounted(Norm):
    """KV weights that several ranks have count once for each (replicated KV heads, H_kv < tp)"""

    options, kind = {"tp": 4}, "kv-copies"

    def counts(self, name):
        return 1.0


class SinksOfOneRank(Norm):
    """of sinks, which are split over tp, the shard of one rank counts (NVIDIA/Megatron-LM #7452, 8)"""

    kind = "shard-lost"

    def summed(self, name, square):
        return self.tp_group.broadcast(square) if "sinks" in name else super().summed(name, square)


class BiasesOfOneRank(Norm):
    """of biases of column-parallel layers, the shard of one rank counts (no attribute tensor_model_parallel)"""

    kind = "shard-lost"

    def summed(self, name, square):
        return self.tp_group.broadcast(square) if ".bias" in name else super().summed(name, square)


class EmbeddingOfOneRank(Norm):
    """of the embedding, the shard of one rank counts (taken for a shared parameter)"""

    kind = "shard-lost"

    def summed(self, name, square):
        return self.tp_group.broadcast(square) if "embed" in name else super().summed(name, square)


class EmbeddingLeftOut(Norm):
    """the embedding is left out (is_not_shared of a parameter that is not)"""

    kind = "left-out"

    def counts(self, name):
        return 0 if "embed" in name else super().counts(name)


class ExpertsLeftOut(Norm):
    """experts are left out (a list of parameters of their own, which is not summed)"""

    kind = "left-out"

    def counts(self, name):
        return 0 if ".experts." in name else super().counts(name)


class ReplicatedLeftOut(Norm):
    """parameters that all ranks of tp have are left out on all, not on all but one (param_is_not_tensor_parallel_duplicate)"""

    kind = "replicated-lost"

    def counts(self, name):
        return super().counts(name) if self.is_split(name, "tp") else 0


class OwnShards(Norm):
    """every rank has the norm of its own shards (clip_grad_norm_ of local tensors)"""

    kind = "not-reduced"

    def summed(self, name, square):
        return square


class OwnShardsOfFsdp(OwnShards):
    """every rank has the norm of its own shards over dp (FSDP1's model.parameters() with torch.nn.utils)"""

    options = MIXED

    def summed(self, name, square):
        return self.tp_group.all_reduce(square) if self.is_split(name, "tp") else square


class NotReducedOverTp(Norm):
    """squares are summed over dp, not over tp (a mesh of one dimension)"""

    options, kind = MIXED, "not-reduced"

    def is_split(self, name, axis):
        return axis != "tp" and super().is_split(name, axis)


class SquareOfTheNorm(Norm):
    """the square of the norm (a root that is missing)"""

    kind = "square"

    def norm(self):
        return self.total()


class NormsSummed(Norm):
    """norms of ranks are summed, not their squares (an all-reduce of norms)"""

    options, kind = FSDP, "norms-summed"

    def norm(self):
        mine = sum((self.square(n, g) for n, g in self.gradients.items()), np.float64(0))
        return self.dp_group.all_reduce(np.sqrt(mine))


class NormsOfParametersSummed(Norm):
    """norms of parameters are summed, not their squares"""

    kind = "sum-of-norms"

    def norm(self):
        return sum((np.sqrt(self.summed(n, self.square(n, g))) for n, g in self.gradients.items()), np.float64(0))


class SquaresAveraged(Norm):
    """squares are averaged over the shards of dp (ReduceOp.AVG)"""

    options, kind = FSDP, "averaged"

    def summed(self, name, square):
        found = super().summed(name, square)
        return found / self.dp_group.size if self.is_split(name, "dp") else found


class LargestElement(Norm):
    """the largest element (norm_type = inf)"""

    kind = "largest"

    def norm(self):
        largest = max(float(np.abs(g).max()) for g in self.gradients.values())
        return self.tp_group.all_reduce(np.float64(largest), "max")


class NotClipped(Norm):
    """gradients are not clipped (a copy is)"""

    kind = "not-clipped"

    def clipped(self, name, gradient, norm):
        return gradient


class ScaledUp(Norm):
    """gradients whose norm is smaller are scaled up (a factor without a limit of 1)"""

    kind = "scaled-up"

    def factor(self, norm):
        return self.max_norm / (norm + 1e-6)


class ClippedTwice(Norm):
    """the factor is multiplied in twice (a tied parameter's tensors, foreach and in place)"""

    kind = "clipped-twice"

    def clipped(self, name, gradient, norm):
        return self.factor(norm) ** 2 * gradient


class ClippedAlone(Norm):
    """every parameter is clipped by its own norm (a hook of each parameter)"""

    kind = "per-parameter"

    def clipped(self, name, gradient, norm):
        return self.factor(np.sqrt(self.summed(name, self.square(name, gradient)))) * gradient


class ClippedByValue(Norm):
    """elements are clipped (clip_grad_value_)"""

    kind = "by-value"

    def clipped(self, name, gradient, norm):
        return np.clip(gradient, -self.max_norm, self.max_norm)


class ClippedByOwnNorm(Norm):
    """every rank clips by the norm of its own shards, and reports that of all (a factor made before the all-reduce)"""

    kind = "own-clip"

    def clipped(self, name, gradient, norm):
        own = np.sqrt(sum(self.square(n, g) * self.copies[n] for n, g in self.gradients.items()))
        return self.factor(own) * gradient


class NormAfterClipping(Norm):
    """the norm is that of the clipped gradients (a norm that is taken again for the log)"""

    kind = "norm-after"

    def reported(self, norm):
        return self.factor(norm) * norm


class ZeroOverZero(Norm):
    """the factor of gradients of 0 is 0 / 0 (no epsilon)"""

    kind = "nan"

    def factor(self, norm):
        return np.minimum(1, self.max_norm / np.float64(norm)) if norm else np.float64(np.nan)


class Optimizer:
    """AdamW of reduced and clipped gradients."""

    options, kind = {"dp": 2}, "values"

    def __init__(self, parameters, gradients, placements, settings, copies, dp_group, cp_group, tp_group, data_group):
        vars(self).update(locals())
        vars(self).update(settings)
        self.groups = (dp_group, cp_group, tp_group)

    def sum(self, gradient):
        return self.data_group.all_reduce(gradient)

    def own(self, name, whole):
        is_split = self.placements[name]["dp"] == "shard(0)"
        return np.array_split(whole, self.dp_group.size)[self.dp_group.rank] if is_split else whole

    def reduced(self, gradients):
        return {name: self.own(name, self.sum(g)) for name, g in gradients.items()}

    def clipped(self, gradients):
        return step_numpy.grad_norm(gradients, self.placements, self.max_norm, self.copies, *self.groups)[1]

    def prepared(self, gradients):
        return self.clipped(self.reduced(gradients))

    def decay(self, name):
        return self.weight_decay * (name in self.decayed)

    def shrunk(self, name, p):
        return p * (1 - self.lr * self.decay(name))

    def moments(self, name, p, first, second, g):
        return self.beta1 * first + (1 - self.beta1) * g, self.beta2 * second + (1 - self.beta2) * g**2

    def corrections(self, t):
        return 1 - self.beta1**t, 1 - self.beta2**t

    def update(self, first, second, t):
        c1, c2 = self.corrections(t)
        return self.lr * first / c1 / (np.sqrt(second / c2) + self.eps)

    def state(self, old):
        return old

    def step(self, name, state, g, t):
        p, first, second = self.state(state)
        first, second = self.moments(name, p, first, second, g)
        return [self.shrunk(name, p) - self.update(first, second, t), first, second]

    def run(self):
        states = {name: [p, np.zeros_like(p), np.zeros_like(p)] for name, p in self.parameters.items()}
        for t, gradients in enumerate(self.gradients, 1):
            for name, g in self.prepared(gradients).items():
                states[name] = self.step(name, states[name], g, t)
        return {name: tuple(self.returned(x).astype(p.dtype) for x in states[name]) for name, p in self.parameters.items()}

    def returned(self, x):
        return x


def optimizer_of(kind):
    def optimizer_step(parameters, gradients, placements, settings, copies, dp_group, cp_group, tp_group, data_group):
        return kind(parameters, gradients, placements, settings, copies, dp_group, cp_group, tp_group, data_group).run()

    return optimizer_step


class MeanOfGradients(Optimizer):
    """gradients are averaged over dp x cp (DistributedDataParallel behind a loss that has the global count)"""

    kind = "mean"

    def sum(self, gradient):
        return super().sum(gradient) / self.data_group.size


class NotSummed(Optimizer):
    """gradients are not reduced over cp (ByteDance-Seed/VeOmni #1115)"""

    options, kind = {"dp": 2, "cp": 2}, "not-reduced"

    def sum(self, gradient):
        return self.dp_group.all_reduce(gradient)


class ClippedBeforeTheSum(Optimizer):
    """every rank clips its own gradients, and then they are reduced (clip_grad_norm_ before the all-reduce of a bucket)"""

    kind = "clipped-first"

    def prepared(self, gradients):
        return self.reduced(self.clipped(gradients))


class NormBeforeTheSum(Optimizer):
    """the norm is that of the gradients before they are reduced (an asynchronous reduce that is not awaited)"""

    kind = "order"

    def prepared(self, gradients):
        norm = step_numpy.grad_norm(gradients, self.placements, self.max_norm, self.copies, *self.groups)[0]
        return {n: min(1, self.max_norm / (norm + 1e-6)) * g for n, g in self.reduced(gradients).items()}


class NormOfOwnShards(Optimizer):
    """every rank clips by the norm of its own shards (ZeRO with torch.nn.utils.clip_grad_norm_)"""

    options, kind = {"dp": 2, "tp": 2}, "own-clip"

    def clipped(self, gradients):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        return {n: min(1, self.max_norm / (norm + 1e-6)) * g for n, g in gradients.items()}


class NormOfReplicatedTpTimes(Optimizer):
    """parameters that all ranks of tp have count tp times in the norm (ROCm/TransformerEngine #715)"""

    options, kind = {"tp": 2}, "replicated"

    def clipped(self, gradients):
        squares = {n: (g.astype(np.float64) ** 2).sum() / self.copies[n] for n, g in gradients.items()}
        norm = np.sqrt(self.tp_group.all_reduce(sum(squares.values(), np.float64(0))))
        return {n: min(1, self.max_norm / (norm + 1e-6)) * g for n, g in gradients.items()}


class ClipIsLost(Optimizer):
    """gradients are not clipped (master gradients in float32 beside clipped ones)"""

    kind = "not-clipped"

    def clipped(self, gradients):
        return gradients


class SecondMomentUnclipped(Optimizer):
    """exp_avg_sq is that of the gradients before they are clipped (a factor that is fused in one moment alone)"""

    kind = "unclipped-square"

    def prepared(self, gradients):
        self.before = self.reduced(gradients)
        return self.clipped(self.before)

    def moments(self, name, p, first, second, g):
        found, _ = super().moments(name, p, first, second, g)
        return found, super().moments(name, p, first, second, self.before[name])[1]


class DecayInTheGradient(Optimizer):
    """the weight decay is added to the gradient (Adam with weight_decay for AdamW)"""

    kind = "decay"

    def moments(self, name, p, first, second, g):
        return super().moments(name, p, first, second, g + self.decay(name) * p)

    def shrunk(self, name, p):
        return p


class DecayOfAll(Optimizer):
    """norms and biases are decayed (one parameter group)"""

    kind = "decay"

    def decay(self, name):
        return self.weight_decay


class DecayOfNone(Optimizer):
    """no parameter is decayed (names that a wrapper has changed match no group)"""

    kind = "decay"

    def decay(self, name):
        return 0


class DecayWithoutLr(Optimizer):
    """the weight decay lacks the factor lr (decoupled decay of a paper, not of PyTorch)"""

    kind = "decay"

    def shrunk(self, name, p):
        return p * (1 - self.decay(name))


class DecayAfterTheUpdate(Optimizer):
    """the weight decay comes after the update"""

    kind = "decay"

    def step(self, name, state, g, t):
        first, second = self.moments(name, *state, g)
        return [self.shrunk(name, state[0] - self.update(first, second, t)), first, second]


class NoBiasCorrection(Optimizer):
    """there is no bias correction (bias_correction = False)"""

    kind = "bias-correction"

    def corrections(self, t):
        return 1, 1


class StepOfTheNext(Optimizer):
    """the bias correction is that of the next step (a step that is counted before and after)"""

    kind = "bias-correction"

    def corrections(self, t):
        return super().corrections(t + 1)


class StepOfTheLast(Optimizer):
    """the bias correction is that of the step before (a step that is counted after the update)"""

    kind = "bias-correction"

    def corrections(self, t):
        return super().corrections(t - 1) if t > 1 else (1, 1)


class EpsUnderTheRoot(Optimizer):
    """eps is under the root (optax eps_root)"""

    kind = "eps"

    def update(self, first, second, t):
        c1, c2 = self.corrections(t)
        return self.lr * first / c1 / np.sqrt(second / c2 + self.eps)


class StatesLost(Optimizer):
    """states begin at 0 in every step (an optimizer that is made again after resharding)"""

    kind = "state-lost"

    def state(self, old):
        return [old[0], 0 * old[1], 0 * old[2]]


class BetasExchanged(Optimizer):
    """beta1 and beta2 are exchanged"""

    kind = "betas"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.beta1, self.beta2 = self.beta2, self.beta1


class ParametersNotUpdated(Optimizer):
    """parameters are those before the first step (a copy in float32 is updated, and not copied back)"""

    kind = "not-updated"

    def step(self, name, state, g, t):
        return [state[0], *super().step(name, state, g, t)[1:]]


class StoredInBfloat16(Optimizer):
    """parameters and states are stored in bfloat16 (no master weights)"""

    kind = "rounding"

    def returned(self, x):
        return bfloat16(x)


class StatesShardedOverData(Optimizer):
    """States are shards over dp, as ZeRO has them; parameters are whole."""

    def run(self):
        found = {}
        for name, (p, *states) in super().run().items():
            placement = self.placements[name]
            if placement["dp"] != "shard(0)" and placement["tp"] != "shard(0)":
                part = {"dp": "shard(0)", "tp": placement["tp"]}
                states = [(np.array_split(x, self.dp_group.size)[self.dp_group.rank], part) for x in states]
            found[name] = (p, *states)
        return found


RIGHT = [
    Bug("norm", "grad_norm", "", norm_of(Norm), TP),
    Bug("norm_of_shards", "grad_norm", "", step_numpy.grad_norm, MIXED),
    Bug("norm_of_copies", "grad_norm", "", step_numpy.grad_norm, {"tp": 4}),
    Bug("norm_bfloat16", "grad_norm", "", step_numpy.grad_norm, TP | {"dtype": "bfloat16"}),
    Bug("optimizer", "optimizer_step", "", step_numpy.optimizer_step, MIXED),
    Bug("optimizer_of_shards", "optimizer_step", "", optimizer_of(StatesShardedOverData), {"dp": 2}),
    Bug("optimizer_bfloat16", "optimizer_step", "", step_numpy.optimizer_step, {"cp": 2, "dtype": "bfloat16"}),
]
BUGS = bugs_of(Norm, "grad_norm", norm_of) + [
    bug for bug in bugs_of(Optimizer, "optimizer_step", optimizer_of) if bug.name != "StatesShardedOverData"
]
