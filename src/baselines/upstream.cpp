#include "baselines/upstream.hpp"

#include <algorithm>
#include <cmath>

#include "baselines/upstream_detail.hpp"

namespace gyre::upstream {
namespace {

template <class T>
MatrixView<T> matrix_in(Buffer<T>& buffer, int64_t rows, int64_t cols) {
  if (buffer.size() < rows * cols) {
    buffer = {};  // frees the old memory first
    buffer = Buffer<T>(rows * cols);
  }
  return buffer.matrix(rows, cols);
}

struct Exponentials {
  MatrixView<float> shifted, exp;  // logits - max and its exponential
  Buffer<float> sums;              // [rows], over all ranks
};

/// Computes exponentials and their sums: four passes, five with the cast; two all-reduces.
Exponentials exponentials(const Call& call, ConstMatrixRef logits) {
  const int threads = call.threads();
  const ConstMatrixRef in = logits.columns_from(0, call.valid());
  const auto tensor = [&](size_t slot) { return call.scratch.tensor(slot, in.rows, in.cols); };
  const MatrixView<const float> z = in_f32(in, call.scratch, threads);
  Exponentials result{tensor(shifted), tensor(logprobs), Buffer<float>(in.rows)};
  reduce(Reduction::max, z, result.sums.span(), threads);
  call.all_reduce(result.sums.span(), ReduceOp::max, "maxima of logits");
  apply(RowMap::subtract, z, result.sums.span(), result.shifted, threads);
  apply(Map::exp, result.shifted, result.exp, threads);
  reduce(Reduction::sum, result.exp, result.sums.span(), threads);
  call.all_reduce(result.sums.span(), ReduceOp::sum, "sums of exponentials");
  return result;
}

/// The log-softmax [rows, valid columns], in the slot `logprobs`.
MatrixView<float> log_softmax(const Call& call, ConstMatrixRef logits) {
  Exponentials e = exponentials(call, logits);
  for (float& s : e.sums.span()) s = std::log(s);
  apply(RowMap::subtract, e.shifted, e.sums.span(), e.exp, call.threads());
  return e.exp;
}

/// The softmax of a log-softmax, in the slot `shifted`.
MatrixView<float> softmax_of(const Call& call, MatrixView<const float> logp) {
  const MatrixView<float> p = call.scratch.tensor(shifted, logp.rows, logp.cols);
  apply(Map::exp, logp, p, call.threads());
  return p;
}

/// Column of an id in this rank's shard; -1 if another rank holds it.
int64_t column_of(const Call& call, int32_t id) {
  const int64_t column = id - call.shape.vocab.begin(call.tp.rank());
  return column >= 0 && column < call.valid() ? column : -1;
}

/// values [rows, ids per row] <- x at the ids that this rank holds, 0 elsewhere; then summed over
/// all ranks.
void gather_ids(const Call& call, MatrixView<const float> x, std::span<const int32_t> ids,
                std::span<float> values) {
  const auto of_row = x.rows > 0 ? std::ssize(ids) / x.rows : 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t column = column_of(call, ids[i]);
    values[i] = column < 0 ? 0 : x(i / of_row, column);
  }
  call.all_reduce(values, ReduceOp::sum, "log-probabilities of ids");
}

/// x += g at the ids that this rank holds.
void scatter_ids(const Call& call, std::span<const int32_t> ids, std::span<const float> g,
                 MatrixView<float> x) {
  const auto of_row = x.rows > 0 ? std::ssize(ids) / x.rows : 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t column = column_of(call, ids[i]);
    if (column >= 0) x(i / of_row, column) += g[i];
  }
}

/// The memory in which an f32 gradient is computed: the output itself if that is f32.
MatrixView<float> gradient_tensor(const Call& call, MatrixRef d_logits, size_t slot) {
  if (d_logits.type == DType::f32) return d_logits.columns_from(0, call.valid()).as<float>();
  return call.scratch.tensor(slot, d_logits.rows, call.valid());
}

/// Casts the gradient to the type of the output, and clears padding.
void finish(const Call& call, MatrixView<const float> gradient, MatrixRef d_logits) {
  const int64_t valid = call.valid();
  if (d_logits.type == DType::bf16)
    narrow(gradient, d_logits.columns_from(0, valid).as<bf16>(), call.threads());
  clear(d_logits.columns_from(valid, d_logits.cols - valid), call.threads());
}

// ---- log-probability ---------------------------------------------------------------------------

/// The gradient from the softmax that forward kept: two passes, a cast, no communication.
void backward_from_softmax(const Call& call, std::span<const int32_t> targets,
                           std::span<const float> g, MatrixRef d_logits) {
  const MatrixView<float> p = call.scratch.tensor(shifted, d_logits.rows, call.valid());
  const MatrixView<float> gradient = gradient_tensor(call, d_logits, logprobs);
  apply(Map::negate, p, gradient, call.threads());
  apply(RowMap::multiply, gradient, g, gradient, call.threads());
  scatter_ids(call, targets, g, gradient);
  finish(call, gradient, d_logits);
}

/// The one-hot, in f32, of the targets that this rank holds; computed through two int64 tensors.
MatrixView<float> chosen(const Call& call, std::span<const int32_t> targets) {
  const auto rows = std::ssize(targets);
  Buffer<int64_t> columns(rows), here(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t column = column_of(call, targets[r]);
    columns[r] = std::max<int64_t>(column, 0);
    here[r] = column < 0 ? 0 : 1;
  }
  const MatrixView<int64_t> a = call.scratch.integers(0, rows, call.valid());
  const MatrixView<int64_t> b = call.scratch.integers(1, rows, call.valid());
  one_hot(columns.span(), a, call.threads());
  multiply_rows(a, here.span(), b, call.threads());
  const MatrixView<float> result = call.scratch.tensor(product, rows, call.valid());
  to_float(b, result, call.threads());
  return result;
}

/// The gradient of a slice of rows. Computes the log-softmax again, with its two all-reduces.
void backward_of_slice(const Call& call, ConstMatrixRef logits, std::span<const int32_t> targets,
                       std::span<const float> g, MatrixRef d_logits) {
  const int threads = call.threads();
  const MatrixView<float> p = softmax_of(call, log_softmax(call, logits));
  const MatrixView<float> gradient = chosen(call, targets);
  apply(Zip::subtract, gradient, p, gradient, threads);
  apply(RowMap::multiply, gradient, g, gradient, threads);
  clear(d_logits, threads);  // the gradient of all slices starts as zeros
  if (d_logits.type == DType::f32)
    apply(Map::copy, gradient, d_logits.columns_from(0, call.valid()).as<float>(), threads);
  finish(call, gradient, d_logits);
}

// ---- entropy -----------------------------------------------------------------------------------

struct EntropyTensors {
  MatrixView<float> logp, p;
  Buffer<float> entropy;  // [rows]
};

/// Computes entropies, with three all-reduces.
EntropyTensors entropy_of(const Call& call, ConstMatrixRef logits) {
  const int threads = call.threads();
  EntropyTensors t;
  t.logp = log_softmax(call, logits);
  t.p = softmax_of(call, t.logp);
  const MatrixView<float> terms = call.scratch.tensor(product, t.p.rows, t.p.cols);
  apply(Zip::multiply, t.p, t.logp, terms, threads);
  t.entropy = Buffer<float>(t.p.rows);
  reduce(Reduction::sum, terms, t.entropy.span(), threads);
  call.all_reduce(t.entropy.span(), ReduceOp::sum, "entropies");
  for (float& h : t.entropy.span()) h = -h;
  return t;
}

/// The gradient of a slice of rows: -g p (log p + H).
void backward_of_entropy(const Call& call, ConstMatrixRef logits, std::span<const float> g,
                         MatrixView<float> gradient) {
  const int threads = call.threads();
  EntropyTensors t = entropy_of(call, logits);
  const MatrixView<float> terms = call.scratch.tensor(product, t.p.rows, t.p.cols);
  Buffer<float> factors(t.p.rows);
  for (int64_t r = 0; r < t.p.rows; ++r) {
    t.entropy[r] = -t.entropy[r];
    factors[r] = -g[r];
  }
  apply(RowMap::subtract, t.logp, t.entropy.span(), terms, threads);
  apply(Zip::multiply, t.p, terms, terms, threads);
  apply(RowMap::multiply, terms, factors.span(), terms, threads);
  apply(Map::copy, terms, gradient, threads);
}

// ---- several ids -------------------------------------------------------------------------------

/// The gradient of a slice of rows: -p Σ g + Σ_k {id_k = v} g_k.
void backward_of_ids(const Call& call, ConstMatrixRef logits, std::span<const int32_t> ids,
                     std::span<const float> g, MatrixView<float> gradient) {
  const int threads = call.threads();
  const MatrixView<float> p = softmax_of(call, log_softmax(call, logits));
  const MatrixView<float> terms = call.scratch.tensor(product, p.rows, p.cols);
  Buffer<float> sums(p.rows);
  const size_t picks = p.rows > 0 ? g.size() / p.rows : 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    sums[r] = 0;
    for (const float x : g.subspan(r * picks, picks)) sums[r] += x;
  }
  apply(Map::negate, p, terms, threads);
  apply(RowMap::multiply, terms, sums.span(), terms, threads);
  scatter_ids(call, ids, g, terms);
  clear(gradient, threads);  // the gradient of all slices starts as zeros
  apply(Map::copy, terms, gradient, threads);
}

}  // namespace

MatrixView<float> Scratch::tensor(size_t slot, int64_t rows, int64_t cols) {
  return matrix_in(tensors_.at(slot), rows, cols);
}

MatrixView<int64_t> Scratch::integers(size_t slot, int64_t rows, int64_t cols) {
  return matrix_in(integers_.at(slot), rows, cols);
}

void Logprob::forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
                      std::span<float> logprob) {
  check(shape_, tp_, logits);
  const Call call{shape_, tp_, stream, scratch_};
  for_each_slice(shape_, [&](Rows rows) {
    const MatrixView<float> logp = log_softmax(call, rows_of(logits, rows));
    if (shape_.chunk == 0) softmax_of(call, logp);  // kept for backward
    gather_ids(call, logp, rows_of(targets, rows), rows_of(logprob, rows));
  });
}

void Logprob::backward(ConstMatrixRef logits, std::span<const int32_t> targets,
                       std::span<const float> d_logprob, Stream& stream, MatrixRef d_logits) {
  check(shape_, tp_, d_logits);
  const Call call{shape_, tp_, stream, scratch_};
  if (shape_.chunk == 0) return backward_from_softmax(call, targets, d_logprob, d_logits);
  for_each_slice(shape_, [&](Rows rows) {
    backward_of_slice(call, rows_of(logits, rows), rows_of(targets, rows), rows_of(d_logprob, rows),
                      rows_of(d_logits, rows));
  });
}

void Entropy::forward(ConstMatrixRef logits, Stream& stream, std::span<float> entropy) {
  check(shape_, tp_, logits);
  const Call call{shape_, tp_, stream, scratch_};
  for_each_slice(shape_, [&](Rows rows) {
    const EntropyTensors tensors = entropy_of(call, rows_of(logits, rows));
    std::ranges::copy(tensors.entropy.span(), rows_of(entropy, rows).begin());
  });
}

void Entropy::backward(ConstMatrixRef logits, std::span<const float> d_entropy, Stream& stream,
                       MatrixRef d_logits) {
  check(shape_, tp_, d_logits);
  const Call call{shape_, tp_, stream, scratch_};
  const MatrixView<float> gradient = gradient_tensor(call, d_logits, whole);
  for_each_slice(shape_, [&](Rows rows) {
    backward_of_entropy(call, rows_of(logits, rows), rows_of(d_entropy, rows),
                        rows_of(gradient, rows));
  });
  finish(call, gradient, d_logits);
}

void GatherLogprob::forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                            std::span<float> logprob) {
  check(shape_, tp_, logits);
  const Call call{shape_, tp_, stream, scratch_};
  for_each_slice(shape_, [&](Rows rows) {
    const MatrixView<float> logp = log_softmax(call, rows_of(logits, rows));
    gather_ids(call, logp, rows_of(ids, rows, picks_), rows_of(logprob, rows, picks_));
  });
}

void GatherLogprob::backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                             std::span<const float> d_logprob, Stream& stream, MatrixRef d_logits) {
  check(shape_, tp_, d_logits);
  const Call call{shape_, tp_, stream, scratch_};
  const MatrixView<float> gradient = gradient_tensor(call, d_logits, whole);
  for_each_slice(shape_, [&](Rows rows) {
    backward_of_ids(call, rows_of(logits, rows), rows_of(ids, rows, picks_),
                    rows_of(d_logprob, rows, picks_), rows_of(gradient, rows));
  });
  finish(call, gradient, d_logits);
}

void SoftCrossEntropy::forward(ConstMatrixRef student, ConstMatrixRef teacher, Stream& stream,
                               std::span<float> value) {
  check(shape_, tp_, student);
  check(shape_, tp_, teacher);
  const Call call{shape_, tp_, stream, scratch_};
  const int64_t tokens = shape_.tokens, valid = call.valid();
  const MatrixView<float> p = scratch_.tensor(product, tokens, valid);
  const Exponentials of_teacher = exponentials(call, teacher);
  apply(RowMap::divide, of_teacher.exp, of_teacher.sums.span(), p, shape_.threads);
  const MatrixView<float> log_q = log_softmax(call, student);
  softmax_of(call, log_q);  // kept for backward
  dot(p, log_q, value, shape_.threads);
  call.all_reduce(value, ReduceOp::sum, "cross entropies");
  for (float& x : value) x = -x;
}

void SoftCrossEntropy::backward(std::span<const float> d_value, MatrixRef d_student) {
  check(shape_, tp_, d_student);
  HostStream unused;
  const Call call{shape_, tp_, unused, scratch_};
  const int64_t tokens = shape_.tokens, valid = call.valid();
  const MatrixView<float> gradient = gradient_tensor(call, d_student, logprobs);
  apply(Zip::subtract, scratch_.tensor(shifted, tokens, valid),
        scratch_.tensor(product, tokens, valid), gradient, shape_.threads);
  apply(RowMap::multiply, gradient, d_value, gradient, shape_.threads);
  finish(call, gradient, d_student);
}

}  // namespace gyre::upstream
