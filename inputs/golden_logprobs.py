"""The cases of log-probabilities of inputs/golden/: small problems, each for one edge.

A problem is a mapping as in golden_answers.py. Logits are multiples of 1/8 of at most 32 unless a
case says otherwise: bfloat16, float16 and float32 hold them exactly. Shapes: T = tokens, V =
vocabulary, C = columns, K = ids of a token, D = elements of a hidden state.
"""

import numpy as np

import make_logprobs
from golden_files import BFLOAT16, BFLOAT16_WORDS
from golden_problems import case, different_ids, distinct, eighths, full, ids_below, offsets


@case("nothing unusual: two sequences, both filters, a teacher", "a wrong formula", ("plain",))
def plain(rng):
    return full(rng, 7, 48, 4, top_k=10, top_p=0.9, temperature=1.0, offsets=offsets(3, 4))


@case("logits and targets alone: one sequence, gradients of 1, no filter",
      "inputs that are taken for granted", ("optional",))
def minimal(rng):
    return {"vocab_size": 11, "logits": eighths(rng, 5, 11), "targets": ids_below(rng, 11, 5)}


@case(
    "ties at the k-th largest logit, far apart and side by side; all logits equal",
    "top-k that keeps exactly k of the tied logits, so that results depend on a sort and on the "
    "split of the vocabulary (vllm-project/vllm PR #50979)",
    ("ties", "top-k"),
)
def top_k_ties(rng):
    logits = np.zeros((6, 16), "f4") - 2
    logits[0, [0, 5, 9, 15]] = 3, 1, 1, 1  # k = 2: four survive
    logits[1, 6:10] = 2  # side by side, over the middle
    logits[2] = 0.5  # all of them survive
    logits[3, [2, 14]] = 4, 4  # exactly k
    logits[4, ::2] = 1  # every other one
    logits[5, 7] = 6  # one above, all others tied
    targets = np.array([9, 5, 11, 14, 3, 0], np.int32)
    ids = np.array([[15, 0, 1], [6, 9, 10], [0, 8, 15], [2, 14, 3], [0, 1, 2], [7, 8, 0]], "i4")
    return full(rng, 6, 16, 3, logits=logits, targets=targets, ids=ids, top_k=2)


@case(
    "equal probabilities around top-p: of equal logits those of higher ids come first",
    "a sort that is not stable decides which of equal tokens survive",
    ("ties", "top-p"),
)
def top_p_ties(rng):
    logits = np.full((5, 12), -32, "f4")
    logits[0, [1, 4, 7, 11]] = 2  # 1/4 each: three of them are 0.6
    logits[1] = 0  # 1/12 each: eight
    logits[2, [0, 3, 6, 9]] = 2, 1, 1, 1  # one above, then one of the tied
    logits[3, [5, 6]] = 1  # 1/2 each: both
    logits[4, 8] = 9  # alone enough
    targets = np.array([1, 3, 3, 5, 8], np.int32)  # the first three are dropped
    return full(rng, 5, 12, 2, logits=logits, targets=targets, top_p=0.6)


@case(
    "top-p of what top-k left, renormalised: 0 1 2 3 4 keeps two, not three",
    "top-p of the whole row's probabilities; log-probabilities of training without the filters of "
    "sampling (NVIDIA-NeMo/RL #69, vllm-project/vllm #42259)",
    ("top-k", "top-p"),
)
def top_k_then_top_p(rng):
    logits = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]], "f4")
    targets = np.array([3, 2, 1], np.int32)
    return full(rng, 3, 5, 2, logits=logits, targets=targets, top_k=3, top_p=0.9)


@case(
    "-inf: at the ends and in whole parts of the vocabulary, for targets, for ids, in both models",
    "0 times -inf is NaN: in entropies, in cross entropies, in a gather that multiplies by a mask "
    "(NovaSky-AI/SkyRL PR #2259, huggingface/trl #7221)",
    ("minus-infinity",),
    leave_out=("d_topk_kl", "d_topk_kl_advantage"),  # some divergences are infinite
)
def minus_infinity(rng):
    logits, teacher = eighths(rng, 7, 24), eighths(rng, 7, 24)
    logits[0, [0, 23]] = teacher[0, [0, 23]] = -np.inf  # what a clamped index reads
    logits[1, :12] = teacher[1, :12] = -np.inf  # the first half: all of a rank
    logits[2, 12:] = teacher[2, 12:] = -np.inf
    teacher[3, 4:20] = -np.inf  # the student has more
    logits[4, 3:6] = -np.inf  # the teacher has more: an infinite cross entropy
    logits[5, 8:16] = teacher[5, 8:16] = -np.inf
    logits[6, ::3] = teacher[6, ::3] = -np.inf
    targets = np.array([1, 2, 13, 6, 4, 8, 1], np.int32)  # rows 1, 2, 4 and 5: -inf
    ids = np.array([[0, 23, 5], [0, 20, 12], [13, 0, 23], [4, 3, 19], [3, 7, 8], [8, 15, 16],
                    [0, 1, 3]], "i4")
    more = {"logits": logits, "teacher": teacher, "targets": targets, "ids": ids}
    return full(rng, 7, 24, 3, top_k=6, offsets=offsets(4, 3), **more)


@case(
    "one id with all of the probability, or with all but some 1e-40 of it",
    "log of 1 - p; an entropy below 0; a gradient of 0/0",
    ("certain", "minus-infinity"),
)
def certain(rng):
    logits = np.full((4, 9), -np.inf, "f4")
    logits[[0, 1], [8, 0]] = -2, 31
    logits[2:] = eighths(rng, 2, 9)
    logits[[2, 3], [4, 4]] = 96
    teacher = logits.copy()
    targets = np.array([8, 0, 4, 1], np.int32)
    ids = np.array([[8], [0], [4], [5]], "i4")
    return full(rng, 4, 9, 1, logits=logits, teacher=teacher, targets=targets, ids=ids, top_p=0.5)


PADDING = (
    "columns of padding in the softmax, in top-k or in the entropy, so that results depend on how "
    "the vocabulary is split (NVIDIA/Megatron-LM #1754); a sentinel that matches a column of "
    "padding (apple/ml-cross-entropy PR #59)"
)


def padded(rng, fill):
    """A problem with 19 ids in 24 columns; `fill` is what the others hold."""
    logits, teacher = np.full((2, 5, 24), fill, "f4")
    logits[:, :19], teacher[:, :19] = distinct(rng, 5, 19), eighths(rng, 5, 19)
    targets = np.array([0, 18, 19, 23, 24], np.int32)  # two have ids, three are nobody's
    more = {"logits": logits, "teacher": teacher, "targets": targets}
    return full(rng, 5, 19, 3, top_k=5, top_p=0.95, **more)


@case("padding of 3e38", PADDING, ("padding",))
def padding_huge(rng):
    return padded(rng, [[[3e38]], [[1e38]]])


@case("21 ids in 64 columns: ranks that have padding alone", PADDING, ("padding", "uneven-vocabulary"))
def padding_ranks(rng):
    logits, teacher = np.full((2, 4, 64), 30, "f4")
    logits[:, :21], teacher[:, :21] = distinct(rng, 4, 21), eighths(rng, 4, 21)
    more = {"logits": logits, "teacher": teacher, "targets": np.array([20, 21, 63, 7], np.int32)}
    return full(rng, 4, 21, 3, top_k=5, **more)


@case("padding of NaN and infinities", PADDING, ("padding", "nan"))
def padding_nan(rng):
    return padded(rng, np.resize([np.nan, np.inf, -np.inf, np.nan, 3e38], (2, 1, 24)))


@case(
    "targets that no column has: -100, -1, the vocabulary's size, the largest int32",
    "a target that a clamp or a wrap turns into some id; values other than 0, or than -inf under a "
    "filter; gradients of 0",
    ("nobody",),
)
def nobody(rng):
    targets = np.array([-100, 3, -1, 13, 14, 2**31 - 1, -(2**31), 0], np.int32)
    return full(rng, 8, 13, 2, targets=targets, top_k=4, offsets=offsets(3, 5))


@case("a temperature of 0.7, with both filters", "gradients without 1/temperature",
      ("temperature", "top-k", "top-p"))
def temperature(rng):
    return full(rng, 5, 30, 3, temperature=0.7, top_k=8, top_p=0.8)


PER_TOKEN = (
    "one temperature or filter of the batch for requests that had their own; top-p of all the "
    "probability, not of what top-k and min-p leave"
)


@case("min-p of 0.2, with a temperature, top-k and top-p", PER_TOKEN,
      ("min-p", "temperature", "top-k", "top-p"))
def min_p(rng):
    return full(rng, 6, 40, 3, temperature=1.3, top_k=20, top_p=0.8, min_p=0.2)


@case("a temperature of each token", PER_TOKEN, ("temperature", "per-token"))
def temperature_of_tokens(rng):
    heats = np.array([0.25, 2, 1, 0.7, 1.3, 1e-3, 50])
    return full(rng, 7, 26, 3, temperature=heats, offsets=offsets(3, 4))


@case("a temperature, top-k, top-p and min-p of each token; some have none", PER_TOKEN,
      ("per-token", "min-p", "temperature", "top-k", "top-p"))
def filter_of_tokens(rng):
    return full(
        rng, 8, 37, 4, offsets=offsets(5, 3),
        temperature=np.array([1, 0.5, 2, 1, 1.5, 0.7, 1, 4]),
        top_k=np.array([0, 0, 9, 0, 12, 30, 37, 1], "i4"),
        top_p=np.array([1, 0.6, 0.7, 1, 0.9, 0.8, 1, 0.5]),
        min_p=np.array([0, 0, 0, 0.3, 0.25, 0.1, 0.4, 1]),
    )


@case("the ids that a sampler kept in each row: one, none, all, the target not among them",
      "the trainer's own filter instead of the sampler's set; log-probabilities over all ids "
      "(NVIDIA-NeMo/RL #69, PRs #1578 and #1938)", ("kept-ids", "per-token", "nobody"),
      leave_out=("d_topk_kl", "d_topk_kl_advantage"))
def sampling_mask(rng):
    logits = distinct(rng, 8, 22)
    logits[6, [0, 21]] = -np.inf
    sizes = np.array([5, 1, 0, 22, 3, 8, 4, 12])
    rows = [rng.permutation(22)[:n] for n in sizes]
    rows[6] = np.array([0, 21, 3, 10])
    targets = np.array([row[0] if row.size else 4 for row in rows], "i4")
    targets[4], targets[5] = -1, np.setdiff1d(np.arange(22), rows[5])[0]  # nobody's; not kept
    return full(
        rng, 8, 22, 3, logits=logits, targets=targets, offsets=offsets(4, 4),
        temperature=np.array([1, 0.5, 1, 2, 1, 0.7, 1, 1.5]),
        sampling_mask_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        sampling_mask_ids=np.concatenate(rows).astype("i4"),
    )


@case("a temperature of 1/1024: exp overflows", "exp of logits before the maximum is subtracted",
      ("temperature", "overflow"))
def cold(rng):
    return full(rng, 5, 14, 3, temperature=2.0**-10, top_p=0.5)


@case("the least temperature, 1e-15", "infinities times 0; 1/temperature out of range",
      ("temperature", "overflow"))
def temperature_least(rng):
    return full(rng, 4, 10, 2, temperature=1e-15, top_k=3)


@case("the largest temperature, 1e30: all ids alike", "numbers below the smallest of float32",
      ("temperature",))
def temperature_most(rng):
    return full(rng, 4, 10, 2, temperature=1e30, top_k=3)


@case("one token", "a next token that is not there", ("one-token",))
def one_token(rng):
    return full(rng, 1, 20, 2, top_k=3, offsets=offsets(1))


@case("no token at all", "a kernel without blocks; a mean of nothing", ("no-token",))
def no_token(rng):
    return full(rng, 0, 20, 2, top_k=3, offsets=offsets())


@case(
    "sequences of 0 to 3 tokens, the first and the last one empty",
    "next tokens of another sequence; lengths of 0",
    ("short-sequences", "packed"),
)
def short_sequences(rng):
    return full(rng, 7, 10, 2, offsets=offsets(0, 1, 0, 2, 1, 3, 0))


@case("only sequences without a next token", "an array of no columns", ("short-sequences",))
def no_next_token(rng):
    return full(rng, 3, 10, 2, offsets=offsets(1, 0, 1, 1))


@case(
    "next tokens under both filters: the largest, tied, dropped by either, nobody's, of -inf where "
    "top-k keeps all",
    "the filter of the row of the token that is asked for, not of the row that predicts it; "
    "predictions of a sequence's last token; scores without the filters of sampling "
    "(vllm-project/vllm #42259)",
    ("next-token-filtered", "short-sequences", "packed", "ties", "top-k", "top-p", "temperature",
     "minus-infinity"),
)
def next_token_filtered(rng):
    logits = distinct(rng, 10, 8)
    logits[0, :4] = 3, 2, 2, -2  # of the two that are tied, the filter keeps id 2
    logits[1] = [2, -1, -1, -1, -1, 4, -1, 2]  # id 7
    logits[3] = [-2, 0, 1, 6, 5, -3, -4, -5]  # last of its sequence; 4 would survive
    logits[5, 6] = 1
    logits[6] = [3, 3, 0, -1, 2, 0, 0, 0]
    logits[7, [0, 1, 2, 4, 5, 6, 7]] = -np.inf  # the second largest, too
    logits[8] = [0, 4, 1, 3, 0, 0, 0, 0]
    targets = np.array([0, 2, 0, -100, 4, 3, 6, 4, 0, 3], np.int32)
    return {
        "vocab_size": 8,
        "temperature": 2.0,
        "top_k": 2,
        "top_p": 0.7,
        "logits": logits,
        "targets": targets,
        "d_value": eighths(rng, 10, size=1.0),
        "offsets": offsets(4, 0, 1, 5),
    }


@case(
    "53 ids: no number of ranks divides them; some gradients are 0",
    "sums over the last shard, which is shorter; gradients on shards that do not have the target "
    "(modelscope/ms-swift PR #9947); rows that are left out",
    ("uneven-vocabulary", "zero-gradients"),
)
def uneven_vocabulary(rng):
    g = eighths(rng, 6, size=1.0)
    g[[1, 4, 5]] = 0
    targets = np.array([52, 51, 0, 26, 27, 17], np.int32)  # at the ends of shards
    return full(rng, 6, 53, 5, targets=targets, d_value=g, top_k=7, offsets=offsets(2, 4))


@case(
    "10007 ids: a row of large logits behind column 1024, one of equal ones but one, one whose target has "
    "0.94 of the probability",
    "columns behind the first tile that are lost (volcengine/verl #2656); exponentials, sums or a log-sum-exp "
    "in bfloat16",
    ("large-vocabulary", "uneven-vocabulary", "bfloat16", "partial", "ties", "top-k"),
    stores={"logits": BFLOAT16, "teacher": BFLOAT16},
    leave_out=("log_softmax", "softmax", "d_entropy", "d_logprob_entropy", "d_filtered_logprob",
               "d_next_token_logprob", "d_next_token_filtered_logprob", "d_rollout_logprob", "d_gathered",
               "d_gathered_logits", "d_distilled", "d_distilled_renormalised", "d_soft_cross_entropy",
               "d_topk_kl", "d_topk_kl_advantage"),
    answers_as="f4",
)
def vocabulary_10007(rng):
    logits = eighths(rng, 3, 10007)
    logits[0, 1024:] += 3
    logits[1] = 0.5  # exp(-1.375) is far from the nearest number of bfloat16
    logits[1, 77] = 1.875
    logits[2] = -32
    logits[2, 7 : 54 * 183 : 54] = 22  # beside 30: 0.06 of the probability, and a log-sum-exp of 30.06
    logits[2, 9001] = 30
    more = {"logits": logits, "targets": np.array([10006, 1500, 9001], np.int32), "top_k": 1500}
    return full(rng, 3, 10007, 4, offsets=offsets(2, 1), **more)


@case("300 rows of 5 ids: more than a block of threads has", "rows behind the first block",
      ("many-rows", "partial", "top-k"),
      leave_out=("log_softmax", "softmax", "d_entropy", "d_logprob_entropy", "d_gathered",
                 "d_gathered_logits", "d_distilled", "d_distilled_renormalised"),
      answers_as="f4")
def many_rows(rng):
    return full(rng, 300, 5, 2, top_k=3, offsets=offsets(160, 1, 139))


@case("one id: its probability is 1", "shards without a column", ("one-id", "uneven-vocabulary"))
def one_id(rng):
    logits = np.array([[3.5], [-2], [0]], "f4")
    more = {"logits": logits, "targets": np.array([0, 0, 1], "i4"), "top_k": 1}
    return full(rng, 3, 1, 1, teacher=logits[::-1].copy(), **more)


@case(
    "logits that share an offset of 10000, up or down",
    "log-sum-exps that are added to logits instead of the maximum: 1e-3 is lost in float32",
    ("offset",),
)
def offset(rng):
    logits, teacher = eighths(rng, 4, 20), eighths(rng, 4, 20)
    logits[:2] += 10000
    logits[2:] -= 10000
    return full(rng, 4, 20, 3, logits=logits, teacher=teacher + 10000, top_k=6, top_p=0.9)


@case(
    "logits from 100 to 1e30 apart: exp overflows",
    "exp of logits before the maximum is subtracted; infinity minus infinity",
    ("overflow",),
)
def large(rng):
    logits, teacher = np.zeros((2, 5, 12), "f4")
    logits[0] = 100 * np.arange(12)
    logits[1, ::5] = 1000
    logits[2, [2, 9]] = 2.0**100
    logits[3, 1:] = -(2.0**100)
    logits[4, 3:5] = 88, 89  # about where exp leaves float32
    teacher[:, 4] = 200
    targets = np.array([11, 5, 9, 0, 3], np.int32)
    ids = np.array([[11, 10], [0, 1], [2, 9], [0, 4], [4, 3]], "i4")
    more = {"logits": logits, "teacher": teacher, "targets": targets, "ids": ids}
    return full(rng, 5, 12, 2, top_k=4, **more)


@case("bfloat16, as a type of HDF5", "bfloat16 read as float16", ("bfloat16",),
      stores={"logits": BFLOAT16, "teacher": BFLOAT16, "d_value": BFLOAT16})
def bfloat16(rng):
    return full(rng, 5, 31, 3, top_k=5, top_p=0.9, offsets=offsets(2, 3))


@case("bfloat16, as words of 16 bits with an attribute; ids of 8 bits", "words read as numbers",
      ("bfloat16",), stores={"logits": BFLOAT16_WORDS, "teacher_values": BFLOAT16_WORDS,
                             "ids": "u1"})
def bfloat16_words(rng):
    more = {"teacher_values": eighths(rng, 4, 3), "top_k": 5}
    problem = full(rng, 4, 26, 3, **more)
    del problem["teacher"]
    return problem


@case(
    "float16, with numbers that bfloat16 does not hold; some answers alone, in float32",
    "answers of rounded inputs compared with those of exact ones",
    ("float16", "partial"),
    stores={"logits": "f2", "d_value": "f2"},
    leave_out=("entropy", "log_softmax", "d_entropy", "d_logprob_entropy", "d_filtered_logprob",
               "d_next_token_filtered_logprob"),
    answers_as="f4",
)
def float16(rng):
    logits = (np.round(256 * rng.standard_normal((4, 15))) / 128).astype("f4")  # 10 bits and more
    problem = {"vocab_size": 15, "logits": logits, "targets": ids_below(rng, 15, 4), "top_k": 4}
    return problem | {"d_value": eighths(rng, 4, size=1.0)}


@case("float64, with logits that float32 does not hold", "answers that lost digits on the way",
      ("float64",))
def float64(rng):
    more = {"logits": rng.standard_normal((5, 17)), "teacher": rng.standard_normal((5, 17))}
    return full(rng, 5, 17, 3, top_k=5, d_value=rng.standard_normal(5), **more)


@case(
    "big-endian reals, ids of 64, offsets of 32 and targets of 16 bits",
    "a reader that looks at bytes instead of values",
    ("integers", "big-endian"),
    stores={"logits": ">f4", "teacher": ">f8", "targets": ">i2", "ids": "i8", "offsets": "u4"},
)
def integers(rng):
    targets = np.array([-100, 20, 0, 7, 21, 3], np.int32)
    return full(rng, 6, 21, 3, targets=targets, top_k=4, offsets=offsets(4, 2))


EVERY_ID = (
    "a sum of gradients over one shard instead of all; the gradient of a log-softmax whose output "
    "is gathered, for one whose output stays split; -inf times 0"
)


@case("a gradient for the log-probability of every id; -inf in both halves, padding of NaN",
      EVERY_ID, ("every-id", "minus-infinity", "padding", "uneven-vocabulary"))
def every_id(rng):
    logits = np.full((6, 26), np.nan, "f4")
    logits[:, :23] = eighths(rng, 6, 23)
    logits[0, [0, 22]] = logits[1, :12] = logits[2, 11:23] = -np.inf
    above = eighths(rng, 6, 23, size=1.0)
    above[3] = 0  # a row that is left out
    above[4, :12], above[4, 12:] = 2, -2  # halves that nearly cancel
    more = {"logits": logits, "d_logprobs": above, "targets": ids_below(rng, 23, 6)}
    return {"vocab_size": 23, "temperature": 1.5} | more


@case("the same in bfloat16", EVERY_ID, ("every-id", "bfloat16"),
      stores={"logits": BFLOAT16, "d_logprobs": BFLOAT16})
def every_id_narrow(rng):
    more = {"d_logprobs": eighths(rng, 4, 37, size=1.0), "targets": ids_below(rng, 37, 4)}
    return {"vocab_size": 37, "logits": distinct(rng, 4, 37)} | more


DISTILLATION = (
    "a teacher's log-softmax over the vocabulary instead of its ids; a student's partition "
    "function that is computed and cancels (NVIDIA-NeMo/RL #3272)"
)


@case("a teacher's logits of its ids alone", DISTILLATION, ("distillation", "optional"))
def teacher_values(rng):
    problem = full(rng, 5, 28, 6, teacher_values=eighths(rng, 5, 6), top_k=5)
    del problem["teacher"]
    return problem


@case("a teacher's logits of its ids that differ from its rows", DISTILLATION, ("distillation",))
def teacher_differs(rng):
    more = {"teacher_values": eighths(rng, 4, 4) - 20, "temperature": 2.0}
    return full(rng, 4, 28, 4, **more)


TAIL = (
    "a term of the sampled id that has no gradient, or is counted twice for one of the largest; "
    "probabilities that are normalised over the largest (NVIDIA-NeMo/RL PR #3584)"
)


@case("a student's largest ids carry the divergence, a sampled one the rest: among them, equal to "
      "the last of them, nobody's", TAIL, ("distillation", "topk-kl", "ties", "nobody", "padding", "float16"),
      stores={"logits": "f2", "teacher": "f2"})
def topk_kl(rng):
    logits, teacher = np.full((2, 8, 31), np.nan, "f4")
    logits[:, :29], teacher[:, :29] = distinct(rng, 8, 29), eighths(rng, 8, 29)
    logits[1, :29] = 0.5  # of equal logits the lowest ids
    logits[2, [3, 9, 14, 28]] = 6, 5, 5, 5
    logits[3, 4:29] = -np.inf  # four are left
    order = np.argsort(-logits[:, :29], axis=1, kind="stable")
    targets = order[np.arange(8), [0, 4, 3, 3, 20, 28, 2, 0]]  # of row 2: the last of three equal ones
    targets[7] = 29
    more = {"logits": logits, "teacher": teacher, "targets": targets.astype("i4")}
    return full(rng, 8, 29, 3, **more)


@case("the same where the teacher answered for those ids alone, in any order; of equal logits a higher "
      "id", TAIL, ("distillation", "topk-kl", "ties", "optional", "bfloat16"),
      stores={"logits": BFLOAT16})
def topk_kl_of_ids(rng):
    logits = distinct(rng, 6, 26)
    ids = np.argsort(-logits, axis=1)[:, :5].astype("i4")
    ids = ids[:, rng.permutation(5)]
    logits[2, [1, 20]] = logits[2, ids[2]].min()
    ids[2, logits[2, ids[2]].argmin()] = 20
    targets = ids_below(rng, 26, 6)
    targets[:3] = ids[0, 2], -1, 1
    log_p = make_logprobs.log_softmax(eighths(rng, 6, 26).astype(np.float64))
    at = np.where(targets < 0, 0, targets)[:, None]
    return {
        "vocab_size": 26, "logits": logits, "targets": targets, "ids": ids,
        "d_value": eighths(rng, 6, size=1.0),
        "teacher_logprobs": np.take_along_axis(log_p, ids, axis=1).astype("f4"),
        "teacher_target_logprobs": np.take_along_axis(log_p, at, axis=1)[:, 0].astype("f4"),
    }


@case("log-probabilities of a teacher for ids that are not the student's largest; targets among them, "
      "beside them and nobody's", TAIL + "; the student's largest ids in the place of those that were asked for",
      ("distillation", "topk-kl", "optional", "nobody"))
def topk_kl_of_given_ids(rng):
    targets = ids_below(rng, 23, 5)
    ids = different_ids(rng, 5, 23, 4)
    targets[:2] = ids[0, 3], -100
    log_p = make_logprobs.log_softmax(eighths(rng, 5, 23).astype(np.float64))
    at = np.where(targets < 0, 0, targets)[:, None]
    return {
        "vocab_size": 23, "logits": distinct(rng, 5, 23), "targets": targets, "ids": ids,
        "d_value": eighths(rng, 5, size=1.0),
        "teacher_logprobs": np.take_along_axis(log_p, ids, axis=1).astype("f4"),
        "teacher_target_logprobs": np.take_along_axis(log_p, at, axis=1)[:, 0].astype("f4"),
    }


@case(
    "a gradient of its own for the value of each id of a token, and for its entropy; ids that repeat, "
    "gradients of 0, of a token's ids alone and of its entropy alone",
    "a gradient of one id that all ids of the token get; the sum over ids of a mean; the gradient of the "
    "log-probability taken for that of the entropy",
    ("repeated-ids", "distillation", "fused-linear", "zero-gradients", "padding"),
)
def gradients_of_ids(rng):
    ids = different_ids(rng, 6, 19, 4)
    ids[1, 2:] = ids[1, 0]
    of_ids, of_entropies = eighths(rng, 6, 4, size=1.0), eighths(rng, 6, size=1.0)
    of_ids[2], of_entropies[3], of_ids[4, 1:] = 0, 0, 0
    logits, teacher = np.full((2, 6, 20), np.nan, "f4")
    logits[:, :19], teacher[:, :19] = distinct(rng, 6, 19), eighths(rng, 6, 19)
    more = {"logits": logits, "teacher": teacher, "ids": ids, "d_ids": of_ids, "d_entropies": of_entropies}
    return linear(rng, 6, 19, 3, temperature=1.25, **more)


@case(
    "ids that repeat, up to all of a token's; the largest logits among them",
    "a scatter that overwrites instead of adding",
    ("repeated-ids", "distillation"),
)
def repeated_ids(rng):
    ids = ids_below(rng, 16, 5, 6)
    ids[0], ids[1, 3:], ids[2, ::2] = 7, ids[1, :3], 15
    return full(rng, 5, 16, 6, ids=ids, targets=np.array([7, 0, 15, 3, 3], "i4"))


@case("more ids of a token than the vocabulary has", "a top-k of more than there are",
      ("repeated-ids", "few-ids"))
def more_ids_than_vocabulary(rng):
    return full(rng, 4, 3, 5, top_k=3, top_p=0.75)


LINEAR = (
    "logits summed in a narrow type; the gradient of the head rounded after every part of the "
    "tokens (huggingface/trl PR #6863)"
)


def linear(rng, tokens, vocab, width, **more):
    """A problem of hidden states and a head in halves: sums of their products are exact."""
    hidden = (rng.integers(-4, 5, (tokens, width)) / 2).astype("f4")
    head = (rng.integers(-3, 4, (vocab, width)) / 2).astype("f4")
    hidden[-1] = 0  # all ids alike
    return full(rng, tokens, vocab, 2, hidden=hidden, head=head, **more)


@case("hidden states and a head; other logits", LINEAR, ("fused-linear",))
def fused_linear(rng):
    targets = np.array([0, 36, -1, 37, 5, 17], np.int32)  # two are nobody's
    return linear(rng, 6, 37, 10, temperature=1.25, targets=targets)


@case("the same in bfloat16, with one element of a hidden state", LINEAR,
      ("fused-linear", "bfloat16"), stores={"hidden": BFLOAT16, "head": BFLOAT16})
def fused_linear_narrow(rng):
    return linear(rng, 4, 9, 1)


PROJECTION = (
    "a projection of a shard's own softmax; a gradient without the mean over all ids; columns or ids "
    "without an entry that are left out; padding that is projected (NVIDIA-NeMo/RL, "
    "project_student_to_teacher_vocab)"
)


def projection(rng, vocab, rows, width, **more):
    """Rows of a sparse matrix, id -> {column: weight}, and gradients of the projected tokens."""
    listed = [rows.get(v, {}) for v in range(vocab)]
    return {
        "projection_width": width,
        "projection_offsets": offsets(*(len(row) for row in listed)),
        "projection_columns": np.array([c for row in listed for c in row], "i4"),
        "projection_weights": np.array([w for row in listed for w in row.values()], "f4"),
    } | more


@case(
    "probabilities projected to 9 columns: ids with no, one and several entries, a column with none, "
    "weights of 0, logits of -inf, padding, temperatures",
    PROJECTION,
    ("projection", "padding", "minus-infinity", "temperature", "per-token"),
    leave_out=("d_topk_kl", "d_topk_kl_advantage"),  # a divergence is infinite
)
def projected(rng):
    logits = np.full((6, 24), 3e38, "f4")
    logits[:, :21] = distinct(rng, 6, 21)
    logits[2, [0, 7, 20]] = logits[3, :11] = -np.inf
    rows = {0: {8: 1}, 2: {0: 0.5, 3: 0.25, 8: 0.25}, 3: {3: 1}, 7: {1: 0}, 9: {2: 0.75, 5: 0.125}}
    rows |= {13: {7: 1, 6: 3, 1: 100}, 14: {3: 0.5}, 19: {5: 1}, 20: {0: 1, 3: 2.0**-20}}  # 4: none
    return full(
        rng, 6, 21, 3, logits=logits, teacher=logits, offsets=offsets(2, 4),
        temperature=np.array([1, 0.5, 1, 2, 4, 1]),
        **projection(rng, 21, rows, 9, d_projected=eighths(rng, 6, 9, size=1.0)),
    )


@case(
    "entries for ids of one shard alone; more columns than ids; one gradient for all columns of a "
    "token, 0 for some tokens",
    PROJECTION,
    ("projection", "zero-gradients", "float16"),
    stores={"logits": "f2"},
)
def projected_one_shard(rng):
    columns = rng.permutation(40)
    rows = {5: {int(c): 0.125 for c in columns[:30]}, 6: {int(c): 2 for c in columns[8:20]}}
    g = np.array([1, 0, -0.5, 0, 2], "f4")
    return full(rng, 5, 32, 2, d_value=g, **projection(rng, 32, rows, 40))
