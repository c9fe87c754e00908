#include "apps/logprobs/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "apps/common/workload_options.hpp"
#include "apps/logprobs/registry.hpp"
#include "core/special_values.hpp"
#include "logprobs/kept_scores.hpp"

namespace gyre {
namespace {

// Offsets in a token's random numbers for ids and filters (TokenTensor::ids). Its peaks begin at 0.
constexpr int64_t first_target = 1 << 20, first_other = 1 << 21, first_filter = 1 << 22;
// The entries of a projection begin here; they take a column's number in the place of a token's.
constexpr int64_t first_entry = 1 << 23;

class RandomInputs final : public LogprobsInputs {
 public:
  RandomInputs(const LogprobsWorkload& problem, const LogprobsOptions& o)
      : vocab_size_(problem.vocab.vocab_size),
        picks_(problem.picks),
        peaks_(std::min(o.peaks, vocab_size_)),
        scale_(static_cast<float>(o.logit_scale)),
        height_(static_cast<float>(o.peak_height)),
        zero_fraction_(o.zero_fraction),
        seed_(static_cast<uint64_t>(o.seed)),
        round_(problem.type == DType::bf16),
        round_gradients_(problem.output_type == DType::bf16),
        filter_(problem.filter) {}

  void row(TokenTensor tensor, int64_t token, int64_t first, std::span<float> to) const override {
    const int64_t valid = std::clamp<int64_t>(vocab_size_ - first, 0, std::ssize(to));
    const auto own = to.first(valid);
    fill_token_row({seed_, tensor}, token, own, first);
    for (float& z : own) z *= scale_;
    for (const int64_t column : peaks(token))
      if (column >= first && column < first + valid) own[column - first] += height_;
    if (round_)
      for (float& z : own) z = to_float(to_bf16(z));
    std::fill(to.begin() + valid, to.end(), nan_of<float>);
  }
  int32_t target(int64_t token) const override {
    const uint64_t bits = token_bits(ids_, token, first_target);
    if (peaks_ > 0 && bits % 4 != 0)
      return static_cast<int32_t>(peak(token, (bits >> 2) % static_cast<uint64_t>(peaks_)));
    return static_cast<int32_t>(bits / 4 % static_cast<uint64_t>(vocab_size_));
  }
  void ids(int64_t token, std::span<int32_t> to) const override {
    for (int64_t k = 0; k < std::ssize(to); ++k)
      to[k] = static_cast<int32_t>(k < peaks_ ? peak(token, k) : column(token, first_other + k));
  }
  std::vector<int32_t> kept(int64_t token) const override {
    const uint64_t bits = token_bits(ids_, token, first_filter - 1);
    std::vector<int32_t> some(bits / 8 % static_cast<uint64_t>(picks_ + 1));
    ids(token, some);
    if (!some.empty() && bits % 8 != 0) some[0] = target(token);
    std::ranges::sort(some);
    some.erase(std::unique(some.begin(), some.end()), some.end());
    return some;
  }
  /// As of a teacher's ids, each spelt by a few of the student's: some by none, and some of the
  /// student's ids spell several.
  StoredProjection projection() const override {
    std::vector<std::pair<int32_t, int32_t>> places;
    for (int64_t c = 0; c < picks_; ++c)
      for (uint64_t e = 0; e < token_bits(ids_, c, first_entry) % 8; ++e)
        places.emplace_back(column(c, first_entry + 1 + static_cast<int64_t>(e)), c);
    std::ranges::sort(places);
    places.erase(std::unique(places.begin(), places.end()), places.end());
    StoredProjection made{picks_, std::vector<int64_t>(vocab_size_ + 1, 0), {}, {}, {}};
    for (const auto& [id, c] : places) {
      ++made.offsets[id + 1];
      made.columns.push_back(c);
      made.weights.push_back(0x1p-8F * static_cast<float>(1 + token_bits(ids_, c, id) % 256));
    }
    std::partial_sum(made.offsets.begin(), made.offsets.end(), made.offsets.begin());
    return made;
  }
  void d_projected(int64_t token, std::span<float> to) const override {
    for (int64_t c = 0; c < std::ssize(to); ++c) to[c] = gradient(token, 2 + c);
  }
  /// Temperatures from half to twice the run's; top-k from 1 to the run's; top-p and min-p from
  /// the run's to no limit. A quarter of the tokens has no limit of a kind.
  SamplingFilter filter(int64_t token) const override {
    const auto share = [&](int64_t i) {
      return 0x1p-64 * static_cast<double>(token_bits(ids_, token, first_filter + i));
    };
    // 0 to 1, and 1, which stands for no limit, for a quarter of the tokens.
    const auto slack = [&](int64_t i) { return std::min(1.0, share(i) / 0.75); };
    const double k = filter_.top_k;
    SamplingFilter one = filter_;
    one.temperature *= std::exp2(2 * share(0) - 1);
    one.top_k = slack(1) == 1 ? 0 : static_cast<int64_t>(k * (1 - slack(1)) + (k > 0 ? 1 : 0));
    one.top_k = std::min(one.top_k, filter_.top_k);
    one.top_p += (1 - one.top_p) * slack(2);
    one.min_p *= 1 - slack(3);
    return one;
  }
  float gradient(int64_t token, int64_t i) const override {
    if (has_no_gradient(token)) return 0;
    float g = 0;
    fill_token_row(gradients_, token, std::span(&g, 1), i + 1);
    return g;
  }
  void d_logprobs(int64_t token, int64_t first, std::span<float> to) const override {
    const int64_t valid = std::clamp<int64_t>(vocab_size_ - first, 0, std::ssize(to));
    const auto own = to.first(valid);
    if (has_no_gradient(token))
      std::ranges::fill(own, 0.0F);
    else
      fill_token_row({seed_, TokenTensor::d_logprobs, round_gradients_}, token, own, first);
    std::fill(to.begin() + valid, to.end(), nan_of<float>);
  }

 private:
  bool has_no_gradient(int64_t token) const {
    return 0x1p-64 * static_cast<double>(token_bits(gradients_, token, 0)) < zero_fraction_;
  }
  int64_t column(int64_t token, int64_t element) const {
    return static_cast<int64_t>(token_bits(ids_, token, element) %
                                static_cast<uint64_t>(vocab_size_));
  }
  int64_t peak(int64_t token, int64_t k) const { return column(token, k); }
  /// Distinct peak columns, sorted.
  std::vector<int64_t> peaks(int64_t token) const {
    std::vector<int64_t> columns;
    for (int64_t k = 0; k < peaks_; ++k) columns.push_back(peak(token, k));
    std::sort(columns.begin(), columns.end());
    columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
    return columns;
  }

  int64_t vocab_size_, picks_, peaks_;
  float scale_, height_;
  double zero_fraction_;
  uint64_t seed_;
  bool round_, round_gradients_;
  SamplingFilter filter_;
  TokenRandom ids_{seed_, TokenTensor::ids}, gradients_{seed_, TokenTensor::gradient};
};

class FileInputs final : public LogprobsInputs {
 public:
  FileInputs(const LogprobsFile& file, DType type, DType output_type)
      : file_(file), round_(type == DType::bf16), round_gradients_(output_type == DType::bf16) {
    find_rounded();
  }

  void row(TokenTensor tensor, int64_t token, int64_t first, std::span<float> to) const override {
    const std::vector<float>& all = tensor == TokenTensor::teacher ? file_.teacher : file_.logits;
    std::copy_n(all.begin() + token * file_.columns + first, to.size(), to.begin());
    if (!round_) return;
    for (float& z : to) z = to_float(to_bf16(z));
  }
  int32_t target(int64_t token) const override { return file_.targets[token]; }
  float teacher_value(int64_t token, int64_t k, int64_t id) const override {
    if (!file_.has_teacher_values) return LogprobsInputs::teacher_value(token, k, id);
    const float value = file_.teacher_values[token * file_.picks + k];
    return round_ ? to_float(to_bf16(value)) : value;
  }
  float teacher_logprob(int64_t token, int64_t k) const override {
    if (k == file_.picks) return file_.teacher_target_logprobs[token];
    return file_.teacher_logprobs[token * file_.picks + k];
  }
  void ids(int64_t token, std::span<int32_t> to) const override {
    std::copy_n(file_.ids.begin() + token * file_.picks, to.size(), to.begin());
  }
  std::vector<int32_t> kept(int64_t token) const override {
    const auto ids = file_.kept_ids.begin();
    return {ids + file_.kept_offsets[token], ids + file_.kept_offsets[token + 1]};
  }
  StoredProjection projection() const override {
    const StoredProjection& p = *file_.projection;
    return {p.width, p.offsets, p.columns, p.weights, {}};
  }
  void d_projected(int64_t token, std::span<float> to) const override {
    const std::vector<float>& all = file_.projection->d_projected;
    if (all.empty())
      std::ranges::fill(to, file_.d_value[token]);
    else
      std::copy_n(all.begin() + token * std::ssize(to), to.size(), to.begin());
  }
  SamplingFilter filter(int64_t token) const override {
    const auto of = [token](const auto& values, auto of_all) {
      return values.empty() ? of_all : static_cast<decltype(of_all)>(values[token]);
    };
    return {of(file_.top_ks, file_.top_k), of(file_.top_ps, file_.top_p),
            of(file_.temperatures, file_.temperature), of(file_.min_ps, file_.min_p)};
  }
  float gradient(int64_t token, int64_t) const override { return file_.d_value[token]; }
  void d_logprobs(int64_t token, int64_t first, std::span<float> to) const override {
    const int64_t valid = std::clamp<int64_t>(file_.vocab_size - first, 0, std::ssize(to));
    const auto own = to.first(valid);
    if (file_.d_logprobs.empty())
      std::ranges::fill(own, file_.d_value[token]);
    else
      std::copy_n(file_.d_logprobs.begin() + token * file_.vocab_size + first, valid, own.begin());
    for (float& g : own)
      if (round_gradients_) g = to_float(to_bf16(g));
    std::fill(to.begin() + valid, to.end(), nan_of<float>);
  }
  const LinearFactors* linear() const override { return file_.linear ? &*file_.linear : nullptr; }
  const std::vector<double>* answers(const std::string& array) const override {
    if (!file_.reference || !rounded_input_of(array).empty()) return nullptr;
    const auto found = file_.reference->arrays.find(array);
    return found == file_.reference->arrays.end() ? nullptr : &found->second;
  }
  std::string rounded_input_of(const std::string& array) const override {
    for (const std::string& input : find_array(array).reads)
      if (rounded_.contains(input)) return "/logprobs/" + input;
    return "";
  }

 private:
  void find_rounded() {
    const auto differs = [](float z) { return to_float(to_bf16(z)) != z; };
    const auto any = [&](const std::vector<float>& values) {
      return std::ranges::any_of(values, differs);
    };
    const auto any_logit = [&](const std::vector<float>& logits) {
      for (int64_t i = 0; i < std::ssize(logits); ++i)
        if (i % file_.columns < file_.vocab_size && differs(logits[i])) return true;
      return false;
    };
    const auto add = [&](const std::string& input, bool narrowed) {
      if (narrowed || file_.rounded.contains("/logprobs/" + input)) rounded_.insert(input);
    };
    add("logits", round_ && any_logit(file_.logits));
    add("teacher", round_ && any_logit(file_.teacher));
    add("teacher_values", round_ && any(file_.teacher_values));
    for (const char* name : {"teacher_logprobs", "teacher_target_logprobs", "d_value",
                             "projection_weights", "d_projected"})
      add(name, false);
    add("d_logprobs",
        round_gradients_ && any(file_.d_logprobs.empty() ? file_.d_value : file_.d_logprobs));
    add("hidden", round_ && file_.linear && any(file_.linear->hidden));
    add("head", round_ && file_.linear && any(file_.linear->head));
    // Absent datasets are derived from others and inherit their rounding.
    if (file_.teacher_values.empty()) add("teacher_values", rounded_.contains("teacher"));
    if (!file_.has_teacher_logprobs) add("teacher_logprobs", rounded_.contains("teacher"));
    if (file_.d_logprobs.empty()) add("d_logprobs", rounded_.contains("d_value"));
    if (file_.projection && file_.projection->d_projected.empty())
      add("d_projected", rounded_.contains("d_value"));
  }

  const LogprobsFile& file_;
  bool round_, round_gradients_;
  std::set<std::string> rounded_;  // datasets below /logprobs
};

/// Partitions the file's columns by --shards, or as evenly as possible without it.
VocabPartition partition_of_file(const LogprobsFile& file, const LogprobsOptions& o) {
  LogprobsOptions shape = o;
  shape.vocab = file.vocab_size;
  VocabPartition vocab;
  if (!o.shards.empty()) {
    vocab = shape.partition();
    if (vocab.padded() != file.columns)
      throw_usage("--shards {} are {} columns; {} has {}", o.shards, vocab.padded(), o.input,
                  file.columns);
    return vocab;
  }
  vocab = balanced_partition(file.columns, o.tp);
  vocab.vocab_size = file.vocab_size;
  return vocab;
}

void store_row(std::span<const float> from, MatrixRef to, int64_t row) {
  for (int64_t c = 0; c < to.cols; ++c) {
    const float z = from[c];
    if (to.type == DType::f32)
      to.as<float>()(row, c) = z;
    else
      to.as<bf16>()(row, c) = to_bf16(z);
  }
}

/// Rows [begin, begin + count) of a matrix.
MatrixRef rows_of(MatrixRef m, int64_t begin, int64_t count) {
  return {m.data + begin * m.stride * static_cast<int64_t>(size_of(m.type)), m.type, count, m.cols,
          m.stride};
}

}  // namespace

int64_t LogprobsWorkload::longest() const {
  int64_t most = 0;
  for (int64_t i = 0; i < sequences(); ++i) most = std::max(most, length(i));
  return most;
}

LogprobsWorkload generated_workload(const LogprobsOptions& o, int64_t tokens) {
  LogprobsWorkload problem;
  problem.vocab = o.partition();
  problem.type = o.type();
  problem.output_type = o.output_type();
  problem.picks = o.picks;
  problem.top = std::min(o.picks, problem.vocab.vocab_size);
  problem.projected = o.picks;
  problem.hidden = o.hidden;
  problem.filter = o.filter();
  if (o.filter_per_token) problem.of_tokens = {"temperature", "top_k", "top_p", "min_p"};
  if (!o.generate.empty()) {
    for (const int64_t length : generated_lengths(o.generate, o.capacity, problem.origin))
      problem.offsets.push_back(problem.offsets.back() + length);
    return problem;
  }
  problem.origin =
      fmt::format("{} tokens in {} sequence{}", tokens, o.sequences, o.sequences == 1 ? "" : "s");
  for (int64_t i = 1; i <= o.sequences; ++i) problem.offsets.push_back(tokens * i / o.sequences);
  return problem;
}

LogprobsWorkload workload_of(const LogprobsFile& file, LogprobsOptions& o) {
  LogprobsWorkload problem;
  problem.vocab = partition_of_file(file, o);
  if (file.linear && o.hidden != LogprobsOptions().hidden)
    throw_usage("--hidden is that of the hidden states of {}, {}: leave it out", o.input,
                file.linear->width);
  if (!file.linear && o.hidden != LogprobsOptions().hidden)
    throw_usage("--hidden {}: {} has no hidden states; leave it out", o.hidden, o.input);
  if (file.linear) o.hidden = file.linear->width;
  o.vocab = file.vocab_size;
  const int64_t usual = std::min(LogprobsOptions().picks, file.vocab_size);
  problem.top = file.picks > 0 ? std::min(file.picks, file.vocab_size)
                : file.top > 0 ? file.top
                               : usual;
  problem.has_hidden = file.linear.has_value();
  problem.has_kept = !file.kept_offsets.empty();
  problem.kept_refusal = too_many_kept({file.kept_offsets, file.kept_ids}, problem.vocab);
  problem.projected = file.projection ? file.projection->width : 0;
  problem.has_teacher = file.has_teacher;
  problem.has_teacher_values = file.has_teacher || file.has_teacher_values;
  problem.has_teacher_logprobs = file.has_teacher_logprobs;
  o.picks = file.picks;
  o.top_k = file.top_k;
  o.top_p = file.top_p;
  o.min_p = file.min_p;
  o.temperature = file.temperature;
  problem.offsets = file.offsets;
  problem.type = o.type();
  problem.output_type = o.output_type();
  problem.picks = file.picks;
  problem.hidden = o.hidden;
  problem.filter = o.filter();
  const auto add_if = [&](const char* name, bool is_there) {
    if (is_there) problem.of_tokens.push_back(name);
  };
  add_if("temperature", !file.temperatures.empty());
  add_if("top_k", !file.top_ks.empty());
  add_if("top_p", !file.top_ps.empty());
  add_if("min_p", !file.min_ps.empty());
  problem.origin = o.input;
  return problem;
}

std::vector<SamplingFilter> LogprobsContext::filters(std::span<const int64_t> tokens) const {
  std::vector<SamplingFilter> all;
  for (const int64_t token : problem.per_token() ? tokens : std::span<const int64_t>())
    all.push_back(filter(token));
  return all;
}

std::vector<double> LogprobsContext::temperatures(std::span<const int64_t> tokens) const {
  std::vector<double> all;
  for (const SamplingFilter& one : filters(tokens)) all.push_back(one.temperature);
  return all;
}

std::unique_ptr<LogprobsInputs> random_inputs(const LogprobsWorkload& problem,
                                              const LogprobsOptions& o) {
  return std::make_unique<RandomInputs>(problem, o);
}

std::unique_ptr<LogprobsInputs> inputs_of(const LogprobsFile& file, DType type,
                                          std::optional<DType> output_type) {
  return std::make_unique<FileInputs>(file, type, output_type.value_or(type));
}

void fill_rows(MatrixRef matrix, Stream& stream,
               const std::function<void(int64_t row, std::span<float> to)>& make_row) {
  if (matrix.rows * matrix.cols == 0) return;
  const bool on_host = stream.space() == MemorySpace::host;
  std::vector<float> row(matrix.cols);
  constexpr int64_t max_bytes = int64_t{1} << 24;
  const int64_t row_bytes = matrix.cols * static_cast<int64_t>(size_of(matrix.type));
  const int64_t most =
      on_host ? matrix.rows : std::clamp<int64_t>(max_bytes / row_bytes, 1, matrix.rows);
  LogitMatrix copy(on_host ? 0 : most, matrix.cols, matrix.type);
  GYRE_CHECK(on_host || matrix.stride == matrix.cols, "rows of {} elements, {} apart", matrix.cols,
             matrix.stride);
  for (int64_t begin = 0; begin < matrix.rows; begin += most) {
    const MatrixRef there = rows_of(matrix, begin, std::min(most, matrix.rows - begin));
    const MatrixRef here = on_host ? there : rows_of(copy.ref(), 0, there.rows);
    for (int64_t r = 0; r < here.rows; ++r) {
      make_row(begin + r, row);
      store_row(row, here, r);
    }
    if (on_host) continue;
    stream.copy(there.data, here.data, there.rows * row_bytes);
    stream.synchronize();
  }
}

void fill_rows_of_tokens(std::span<const int64_t> tokens, MatrixRef to, Stream& stream,
                         const std::function<void(int64_t token, std::span<float> to)>& make_row) {
  GYRE_CHECK(std::ssize(tokens) == to.rows, "{} tokens for {} rows", tokens.size(), to.rows);
  fill_rows(to, stream, [&](int64_t r, std::span<float> row) {
    const int64_t token = tokens[r];
    if (token < 0)
      std::ranges::fill(row, nan_of<float>);
    else
      make_row(token, row);
  });
}

void fill_logits(const LogprobsInputs& inputs, TokenTensor tensor, std::span<const int64_t> tokens,
                 int64_t first, MatrixRef to, Stream& stream) {
  fill_rows_of_tokens(tokens, to, stream, [&](int64_t token, std::span<float> row) {
    inputs.row(tensor, token, first, row);
  });
}

ConstMatrixRef HostRow::read(ConstMatrixRef matrix, int64_t row, Stream& stream) {
  const int64_t element = size_of(matrix.type);
  const std::byte* from = matrix.data + row * matrix.stride * element;
  if (stream.space() == MemorySpace::host) return {from, matrix.type, 1, matrix.cols, matrix.cols};
  const int64_t bytes = matrix.cols * element;
  if (copy_.size() < bytes) copy_ = Buffer<std::byte>(bytes);
  stream.copy(copy_.data(), from, bytes);
  stream.synchronize();
  return {copy_.data(), matrix.type, 1, matrix.cols, matrix.cols};
}

}  // namespace gyre
