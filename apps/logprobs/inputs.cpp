#include "apps/logprobs/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "apps/common/workload_options.hpp"
#include "apps/logprobs/registry.hpp"
#include "core/special_values.hpp"
#include "io/schemas/logprobs_inputs.hpp"
#include "logprobs/kept_scores.hpp"
#include "logprobs/operations/operation.hpp"

namespace gyre {
namespace {

// Offsets in a token's random numbers for ids and filters (TokenTensor::ids). Its peaks begin at 0.
constexpr int64_t first_target = 1 << 20, first_other = 1 << 21, first_filter = 1 << 22;
// The entries of a projection begin here; they take a column's number in the place of a token's.
constexpr int64_t first_entry = 1 << 23;
// The numbers of inputs of single operations begin here.
constexpr int64_t first_input = 1 << 24;

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
  void row_of_input(const std::string& name, int64_t token, std::span<float> to) const override {
    const auto input = std::ranges::find(row_inputs(), name, &RowInput::name);
    if (input == row_inputs().end()) return teacher_at_ids(token, to);
    std::vector<int32_t> own(to.size());
    ids(token, own);
    std::vector<double> random;
    for (int64_t k = 0; k < std::ssize(to); ++k)
      random.push_back(0x1p-64 *
                       (0.5 + static_cast<double>(token_bits(gradients_, token, first_input + k))));
    input->make(own, random, to);
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
  SparseMatrix projection() const override {
    std::vector<std::pair<int32_t, int32_t>> places;
    for (int64_t c = 0; c < picks_; ++c)
      for (uint64_t e = 0; e < token_bits(ids_, c, first_entry) % 8; ++e)
        places.emplace_back(column(c, first_entry + 1 + static_cast<int64_t>(e)), c);
    std::ranges::sort(places);
    places.erase(std::unique(places.begin(), places.end()), places.end());
    SparseMatrix made(picks_);
    made.offsets.resize(vocab_size_ + 1, 0);
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
      : file_(file),
        round_(type == DType::bf16),
        round_gradients_(output_type == DType::bf16),
        rounded_(rounded_inputs(file, type, output_type)) {}

  void row(TokenTensor tensor, int64_t token, int64_t first, std::span<float> to) const override {
    const auto& all = file_.floats(tensor == TokenTensor::teacher ? "teacher" : "logits");
    std::copy_n(all.begin() + token * file_.columns + first, to.size(), to.begin());
    if (!round_) return;
    for (float& z : to) z = to_float(to_bf16(z));
  }
  int32_t target(int64_t token) const override { return targets_[token]; }
  void row_of_input(const std::string& name, int64_t token, std::span<float> to) const override {
    if (!file_.has(name)) return teacher_at_ids(token, to);
    std::copy_n(file_.floats(name).begin() + token * std::ssize(to), to.size(), to.begin());
    if (!round_ || logprobs_input(name).rounded != LogprobsInput::Rounded::logits) return;
    for (float& value : to) value = to_float(to_bf16(value));
  }
  void ids(int64_t token, std::span<int32_t> to) const override {
    std::copy_n(file_.ints("ids").begin() + token * file_.picks, to.size(), to.begin());
  }
  std::vector<int32_t> kept(int64_t token) const override {
    const auto& offsets = file_.arrays.of<int64_t>("sampling_mask_offsets");
    const auto ids = file_.ints("sampling_mask_ids").begin();
    return {ids + offsets[token], ids + offsets[token + 1]};
  }
  SparseMatrix projection() const override { return SparseMatrix(file_.projection()); }
  void d_projected(int64_t token, std::span<float> to) const override {
    gradients_of("d_projected", token, std::ssize(to), 0, to);
  }
  SamplingFilter filter(int64_t token) const override {
    const auto of = [token](const auto& values, auto of_all) {
      return values.empty() ? of_all : static_cast<decltype(of_all)>(values[token]);
    };
    const LogprobsArrays& arrays = file_.arrays;
    return {of(arrays.of<int32_t>("top_k"), file_.top_k),
            of(arrays.of<double>("top_p"), file_.top_p),
            of(arrays.of<double>("temperature"), file_.temperature),
            of(arrays.of<double>("min_p"), file_.min_p)};
  }
  float gradient(int64_t token, int64_t i) const override {
    if (i == 0) return d_value_[token];
    float g = 0;
    if (i == 1)
      gradients_of("d_entropies", token, 1, 0, {&g, 1});
    else
      gradients_of("d_ids", token, file_.picks, i - 2, {&g, 1});
    return g;
  }
  void d_logprobs(int64_t token, int64_t first, std::span<float> to) const override {
    const int64_t valid = std::clamp<int64_t>(file_.vocab_size - first, 0, std::ssize(to));
    const auto own = to.first(valid);
    gradients_of("d_logprobs", token, file_.vocab_size, first, own);
    for (float& g : own)
      if (round_gradients_) g = to_float(to_bf16(g));
    std::fill(to.begin() + valid, to.end(), nan_of<float>);
  }
  std::optional<LinearFactors> linear() const override {
    if (!file_.has("hidden")) return {};
    return LinearFactors{file_.hidden, file_.floats("hidden"), file_.floats("head")};
  }
  const std::vector<double>* answers(const std::string& array) const override {
    if (!file_.reference || !rounded_input_of(array).empty()) return nullptr;
    const auto found = file_.reference->arrays.find(array);
    return found == file_.reference->arrays.end() ? nullptr : &found->second;
  }
  std::string rounded_input_of(const std::string& array) const override {
    for (const std::string& name : find_array(array).reads) {
      if (!rounded_.contains(name)) continue;
      const LogprobsInput& input = logprobs_input(name);
      return (file_.has(name) ? input : logprobs_input(input.stand_in)).path();
    }
    return "";
  }

 private:
  /// Copies elements from `first` on of the token's row of an array [tokens, width], or the token's
  /// d_value if the file has no such array.
  void gradients_of(const char* name, int64_t token, int64_t width, int64_t first,
                    std::span<float> to) const {
    if (file_.has(name))
      std::copy_n(file_.floats(name).begin() + token * width + first, to.size(), to.begin());
    else
      std::ranges::fill(to, d_value_[token]);
  }

  const LogprobsFile& file_;
  const std::vector<int32_t>& targets_ = file_.ints("targets");
  const std::vector<float>& d_value_ = file_.floats("d_value");
  bool round_, round_gradients_;
  std::set<std::string> rounded_;  // names of inputs
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

/// Says which products of the fused linear layer may leave float32: |<a, b>| <= |a| |b|, and the
/// gradients of a token's logits have a sum of at most 2 (g + h ln V) / T. "" if none may.
std::string too_large_products(const LogprobsFile& file, bool with_gradients) {
  if (!file.has("hidden")) return "";
  const LinearFactors factors{file.hidden, file.floats("hidden"), file.floats("head")};
  const std::vector<double>& heats = file.arrays.of<double>("temperature");
  const auto& g = file.floats("d_value");
  const auto& h = file.has("d_entropies") ? file.floats("d_entropies") : g;
  double least = 1, d_logits = 0;
  for (int64_t t = 0; t < file.tokens(); ++t) {
    const double heat = heats.empty() ? file.temperature : heats[t];
    least = std::min(least, heat);
    const double of_token = std::abs(g[t]) + std::abs(h[t]) * std::log(file.vocab_size);
    d_logits = std::max(d_logits, 2 * of_token / heat);
  }
  const double hidden = factors.norm(factors.hidden), head = factors.norm(factors.head);
  struct Product {
    const char* what;
    double size;
  };
  std::vector<Product> products{{"hidden states and head make logits", hidden * head / least}};
  if (with_gradients)
    products.insert(products.end(), {{"the head makes gradients of hidden states", d_logits * head},
                                     {"hidden states make gradients of the head",
                                      d_logits * hidden * static_cast<double>(file.tokens())}});
  constexpr double most = std::numeric_limits<float>::max() / 2;
  for (const Product& product : products)
    if (product.size > most)
      return fmt::format("{} of up to {:.3g}; at most {:.3g}", product.what, product.size, most);
  return "";
}

}  // namespace

void LogprobsInputs::teacher_at_ids(int64_t token, std::span<float> to) const {
  std::vector<int32_t> own(to.size());
  ids(token, own);
  for (size_t k = 0; k < own.size(); ++k)
    row(TokenTensor::teacher, token, own[k], to.subspan(k, 1));
}

double LinearFactors::norm(std::span<const float> factor) const {
  double most = 0;
  for (; !factor.empty(); factor = factor.subspan(width)) {
    double sum = 0;
    for (const float x : factor.first(width))
      sum += static_cast<double>(x) * static_cast<double>(x);
    most = std::max(most, sum);
  }
  return std::sqrt(most);
}

double LinearFactors::logit_size() const {
  return norm(hidden) * norm(head) / std::sqrt(static_cast<double>(width));
}

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
  for (const LogprobsInput& input : logprobs_inputs())
    if (input.set != "teacher_logprobs") problem.inputs.insert(input.name);
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
  if (o.hidden != LogprobsOptions().hidden) {
    if (file.hidden > 0)
      throw_usage("--hidden is that of the hidden states of {}, {}: leave it out", o.input,
                  file.hidden);
    throw_usage("--hidden {}: {} has no hidden states; leave it out", o.hidden, o.input);
  }
  if (file.hidden > 0) o.hidden = file.hidden;
  o.vocab = file.vocab_size;
  const int64_t usual = std::min(LogprobsOptions().picks, file.vocab_size);
  problem.top = file.picks > 0 ? std::min(file.picks, file.vocab_size)
                : file.top > 0 ? file.top
                               : usual;
  for (const LogprobsInput& input : logprobs_inputs())
    if (file.has(input.name)) problem.inputs.insert(input.name);
  const KeptIds kept{file.arrays.of<int64_t>("sampling_mask_offsets"),
                     file.ints("sampling_mask_ids")};
  if (const std::string reason = too_many_kept(kept, problem.vocab); !reason.empty())
    problem.refused["sampling_mask_ids"] = reason;
  if (const std::string reason = too_large_products(file, o.pass != "fwd"); !reason.empty())
    problem.refused["hidden"] = reason;
  problem.projected = file.projected;
  o.picks = file.picks;
  o.top_k = file.top_k;
  o.top_p = file.top_p;
  o.min_p = file.min_p;
  o.temperature = file.temperature;
  o.parameters = file.parameters;
  problem.offsets = file.offsets;
  problem.type = o.type();
  problem.output_type = o.output_type();
  problem.picks = file.picks;
  problem.hidden = o.hidden;
  problem.filter = o.filter();
  for (const char* name : {"temperature", "top_k", "top_p", "min_p"})
    if (file.has(name)) problem.of_tokens.emplace_back(name);
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

void fill_logits(const LogprobsInputs& inputs, TokenTensor tensor, std::span<const int64_t> tokens,
                 int64_t first, MatrixRef to, Stream& stream) {
  fill_rows_of_tokens(tokens, to, stream, [&](int64_t token, std::span<float> row) {
    inputs.row(tensor, token, first, row);
  });
}

}  // namespace gyre
