#pragma once
// What gyre-logprobs works on: tokens, in sequences, and for each of them rows of logits of a
// student and a teacher, ids, and gradients. Every rank can make any part of any row:
//
//     logits of token t   scale · normal(seed, t, column); `height` more in the peaks of the token,
//                         columns that seed and t choose
//     target of token t   one of its peaks, three times out of four; else any id
//     ids of token t      its peaks, then any ids
//     teacher             other normal numbers, the same peaks
//     gradients           normal numbers, or 0 for a share of the tokens; of the log-probabilities
//                         of all ids, for log-softmax, likewise

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/logprobs/options.hpp"
#include "core/token_random.hpp"
#include "io/logprobs_file.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct LogprobsWorkload {
  std::vector<int64_t> offsets{0};  ///< [sequences + 1] tokens
  VocabPartition vocab;
  DType type = DType::f32;         ///< of logits: values are rounded to it
  DType output_type = DType::f32;  ///< of log-softmax and softmax, and of gradients of all ids
  int64_t picks = 1;               ///< K; 0: there are no ids
  int64_t top = 1;                 ///< entries of a row of the largest logits
  bool has_teacher = true, has_teacher_values = true, has_hidden = true;
  int64_t hidden = 1;     ///< D
  SamplingFilter filter;  ///< its temperature is that of all scores
  std::string origin;     ///< what made it, for the report

  int64_t tokens() const { return offsets.back(); }
  int64_t sequences() const { return std::ssize(offsets) - 1; }
  int64_t length(int64_t i) const {
    return offsets[static_cast<size_t>(i) + 1] - offsets[static_cast<size_t>(i)];
  }
  int64_t longest() const;
};

/// Parts of rows of the inputs, of which every rank can have any.
class LogprobsInputs {
 public:
  virtual ~LogprobsInputs() = default;
  /// Columns [first, first + to.size()) of a token's logits, of tensor logits or teacher, rounded
  /// to the case's type; padding is something that nothing may read.
  virtual void row(TokenTensor tensor, int64_t token, int64_t first, std::span<float> to) const = 0;
  /// The id that the token's row is asked for; also the token's own id, for packed sequences.
  virtual int32_t target(int64_t token) const = 0;
  /// The teacher's logit of id k of the token, which is `id`.
  virtual float teacher_value(int64_t token, [[maybe_unused]] int64_t k, int64_t id) const {
    float value = 0;
    row(TokenTensor::teacher, token, id, std::span(&value, 1));
    return value;
  }
  /// Ids of the vocabulary: [K].
  virtual void ids(int64_t token, std::span<int32_t> to) const = 0;
  /// Gradient of the token's result `i`: 0 of its log-probability (or cross entropy), 1 of its
  /// entropy, 2 + k of that of id k.
  virtual float gradient(int64_t token, int64_t i) const = 0;
  /// Gradients of the log-probabilities of ids [first, first + to.size()), rounded to the case's
  /// output type; padding is something that nothing may read.
  virtual void d_logprobs(int64_t token, int64_t first, std::span<float> to) const = 0;
  /// Hidden states and the weight of a head that come with the inputs, in f32; null: none.
  virtual const LinearFactors* linear() const { return nullptr; }
  /// An array of answers that comes with the inputs and is of them; null: there is none.
  virtual const std::vector<double>* answers(const std::string&) const { return nullptr; }
  /// The dataset that these answers depend on and that the run rounds, so that they are answers to
  /// other inputs; "": none.
  virtual std::string rounded_input_of(const std::string&) const { return ""; }
};

/// `tokens` tokens in --sequences, or one pack of made-up documents. Throws usage errors of --gen.
LogprobsWorkload generated_workload(const LogprobsOptions& o, int64_t tokens);
/// What a file holds; its vocabulary, filter and temperature replace those of the options. Throws a
/// usage error if --shards do not fit it.
LogprobsWorkload workload_of(const LogprobsFile& file, LogprobsOptions& o);

std::unique_ptr<LogprobsInputs> random_inputs(const LogprobsWorkload& problem,
                                              const LogprobsOptions& o);
/// The file's, which must outlive them, rounded to `type`, and d_logprobs to `output_type` (none:
/// the same); with those of its answers that depend on no input that is rounded, here or in the
/// file's reader.
std::unique_ptr<LogprobsInputs> inputs_of(const LogprobsFile& file, DType type,
                                          std::optional<DType> output_type = {});

/// A matrix of logits on one rank, in host memory or a device's.
class LogitMatrix {
 public:
  LogitMatrix() = default;
  LogitMatrix(int64_t rows, int64_t cols, DType type, MemorySpace space = MemorySpace::host)
      : bytes_(rows * cols * static_cast<int64_t>(size_of(type)), space),
        ref_(bytes_.data(), type, rows, cols, cols) {}
  MatrixRef ref() { return ref_; }
  ConstMatrixRef ref() const { return ref_; }
  std::span<std::byte> bytes() { return bytes_.span(); }
  /// Fills it with NaN, in the order of `stream`.
  void poison(Stream& stream) { stream.fill(bytes_.data(), std::byte{0xff}, bytes().size()); }

 private:
  Buffer<std::byte> bytes_;
  MatrixRef ref_;
};

/// Fills row r, rounded to the matrix' type, with what make_row(r, to [cols]) makes of it. Complete
/// on return: where the matrix lies on a device, `stream` is waited for.
void fill_rows(MatrixRef matrix, Stream& stream,
               const std::function<void(int64_t row, std::span<float> to)>& make_row);

/// As fill_rows, of row r what make_row(tokens[r], to) makes, or NaN if that token is negative,
/// which is padding.
void fill_rows_of_tokens(std::span<const int64_t> tokens, MatrixRef to, Stream& stream,
                         const std::function<void(int64_t token, std::span<float> to)>& make_row);

/// Fills row r with the columns of tokens[r] from `first` on; with NaN if that is negative, which
/// is padding. Complete on return.
void fill_logits(const LogprobsInputs& inputs, TokenTensor tensor, std::span<const int64_t> tokens,
                 int64_t first, MatrixRef to, Stream& stream);
/// The same in host memory.
void fill_logits(const LogprobsInputs& inputs, TokenTensor tensor, std::span<const int64_t> tokens,
                 int64_t first, MatrixRef to);

/// Rows of matrices, one after the other, for who checks them on the host.
class HostRow {
 public:
  /// Row `row` as a matrix of one row, which holds until the next call: where it lies if that is on
  /// the host, else a copy, for which `stream` is waited for.
  ConstMatrixRef read(ConstMatrixRef matrix, int64_t row, Stream& stream);

 private:
  Buffer<std::byte> copy_;
};

}  // namespace gyre
