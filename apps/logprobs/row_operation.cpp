// Adapts an operation on rows (logprobs/operations/operation.hpp) to gyre-logprobs: its inputs, its
// closed form of messages, and the comparison with its definition.

#include "apps/logprobs/row_operation.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "harness/expected_operation.hpp"
#include "io/schemas/logprobs_inputs.hpp"
#include "logprobs/operations/operation_scores.hpp"

namespace gyre {
namespace {

bool some(std::span<const double> values) {
  return std::ranges::any_of(values, [](double x) { return x != 0; });
}

class RowOperationOp : public RowsOp {
 public:
  RowOperationOp(LogprobsContext& context, const RowOperation& operation)
      : RowsOp(context),
        operation_(operation),
        parameters_(context.options.parameters_of(operation)) {
    inputs_.ids = operation.ids == "targets" ? rows_.targets()
                  : operation.ids == "ids"   ? rows_.ids()
                                             : std::span<const int32_t>();
    picks_ = operation.ids == "ids" ? context.problem.picks : std::ssize(operation.ids) > 0 ? 1 : 0;
    for (const std::string& name : operation.inputs) arrays_.push_back(read_input(name));
    for (const std::vector<float>& array : arrays_) inputs_.arrays.emplace_back(array);
    for (const RowResult& result : operation.results) {
      const int64_t width = operation.width_of(result, picks_);
      values_.emplace_back(rows_.rows() * width, results_space(*kernels()));
      const bool has_gradient = result.first_gradient >= 0;
      d_values_.push_back(has_gradient ? rows_.gradients(result.first_gradient, width)
                                       : std::vector<float>());
    }
  }

  void start() override {
    const std::vector<double> temperatures = c_.temperatures(rows_.tokens());
    auto scores = std::make_shared<OperationScores>(
        operation_, rows_.rows(), vocab(),
        OperationOptions{.ids_per_token = picks_,
                         .parameters = parameters_,
                         .temperature = c_.problem.filter.temperature,
                         .threads = c_.options.threads,
                         .kernels = kernels(),
                         .arrays = &tp_arrays(),
                         .temperatures = temperatures},
        tp());
    forward_ = [this, scores] { scores->forward(rows_.logits(), inputs_, stream(), outputs()); };
    backward_ = [this, scores] {
      const std::vector<std::span<const float>> above(d_values_.begin(), d_values_.end());
      scores->backward(rows_.logits(), inputs_, above, rows_.d_logits());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    const int64_t bytes = 4 * operation_.sent_floats(picks_) * rows_.rows();
    return operation_.on_logits ? all_reduce_of(tp(), bytes) : all_gather_of(tp(), bytes);
  }
  double ideal_bytes(Pass pass) const override {
    if (!operation_.on_logits) return RowsOp::ideal_bytes(pass);
    return pass == Pass::forward ? nan_of<double> : shard_bytes(rows_.rows());
  }

 protected:
  std::vector<std::span<float>> outputs() override {
    std::vector<std::span<float>> all;
    for (Buffer<float>& values : values_) all.push_back(values.span());
    return all;
  }
  /// Whether each term of a gradient is rounded. Gyre rounds only their sum.
  virtual bool rounds_terms() const { return false; }

  const RowOperation& operation_;
  std::vector<double> parameters_;
  int64_t picks_;  // ids of a row
  OperationInputs inputs_;
  std::vector<std::vector<float>> arrays_;    // of operation_.inputs, [rows, width]
  std::vector<Buffer<float>> values_;         // of operation_.results
  std::vector<std::vector<float>> d_values_;  // their gradients, or empty

 private:
  std::vector<float> read_input(const std::string& name) const {
    const int64_t width = logprobs_input(name).shape == "T" ? 1 : picks_;
    std::vector<float> all(rows_.rows() * width, 0);
    for (int64_t r = 0; r < rows_.rows(); ++r)
      if (token(r) >= 0)
        c_.inputs.row_of_input(name, token(r), std::span(all).subspan(r * width, width));
    return all;
  }
  std::vector<double> gradients_of(size_t r) const {
    std::vector<double> g;
    for (size_t i = 0; i < d_values_.size(); ++i) {
      const size_t width = operation_.width_of(operation_.results[i], picks_);
      for (size_t k = 0; k < width; ++k)
        g.push_back(d_values_[i].empty() ? 0 : d_values_[i][r * width + k]);
    }
    return g;
  }
  bool has_gradient(int64_t r) const override { return some(gradients_of(r)); }

  /// Calls check(ExpectedOperation) for row r.
  template <class Check>
  ExpectedRow expected_row(size_t r, const Check& check) const {
    const std::vector<double> logits = row_of(r);
    const size_t picks = picks_;
    OperationCase row{.operation = operation_,
                      .logits = logits,
                      .ids = inputs_.ids.subspan(r * picks, picks),
                      .parameters = parameters_,
                      .temperature = operation_.at_temperature_1 ? 1 : temperature(token(r)),
                      .rounds_terms = rounds_terms()};
    for (const std::vector<float>& array : arrays_) {
      const size_t width = array.size() / static_cast<size_t>(rows_.rows());
      row.inputs.push_back(std::span(array).subspan(r * width, width));
    }
    return check(ExpectedOperation(row));
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward) {
      ResultArray gradient = row_gradient(operation_.gradient.c_str(), [this](size_t r) {
        return expected_row(
            r, [&](const ExpectedOperation& row) { return row.gradient(gradients_of(r)); });
      });
      gradient.sum_of = operation_.gradient_is_sum_of;
      return {gradient};
    }
    std::vector<ResultArray> arrays;
    for (size_t i = 0; i < values_.size(); ++i) {
      const RowResult& result = operation_.results[i];
      arrays.push_back(row_values(result.name.c_str(), result.check, values_[i].span(),
                                  result.shape == "T" ? 0 : picks_, [this, i](size_t r) {
                                    return expected_row(r, [&](const ExpectedOperation& row) {
                                      return row.values(i);
                                    });
                                  }));
      if (result.error == RowError::exact) arrays.back().tolerance = 0;
    }
    return arrays;
  }
};

/// NeMo RL's algorithm for an operation whose results are statistics.
class UpstreamRowOperationOp final : public RowOperationOp {
 public:
  using RowOperationOp::RowOperationOp;

  static bool has(const RowOperation& operation) {
    const bool one_kind = operation.ids.empty() ? operation.entropy : !operation.entropy;
    return operation.is_statistic() && one_kind && !operation.on_logits;
  }

  void start() override {
    const upstream::Shape shape{rows_.rows(), vocab(), c_.options.chunk, c_.options.threads};
    if (operation_.entropy) {
      auto theirs = std::make_shared<upstream::Entropy>(shape, tp());
      forward_ = [this, theirs] { theirs->forward(rows_.logits(), stream(), values_[0].span()); };
      backward_ = [this, theirs] {
        theirs->backward(rows_.logits(), d_values_[0], stream(), rows_.d_logits());
      };
    } else if (gathers()) {
      start_with_ids(std::make_shared<upstream::GatherLogprob>(shape, picks_, tp()));
    } else {
      start_with_ids(std::make_shared<upstream::Logprob>(shape, tp()));
    }
  }
  /// A log-softmax takes two all-reduces of one number per row, and values take one more.
  std::optional<SentTraffic> expected(Pass pass) const override {
    const int64_t rows = rows_.rows(), chunk = c_.options.chunk;
    const bool recomputes = gathers() || operation_.entropy || chunk > 0;
    if (pass == Pass::backward && !recomputes) return SentTraffic{};
    SentTraffic sent;
    const int64_t step = chunk > 0 ? chunk : std::max<int64_t>(rows, 1);
    for (int64_t at = 0; at < rows; at += step) {
      const int64_t n = std::min(step, rows - at);
      std::vector<int64_t> numbers{n, n};
      if (pass == Pass::forward) numbers.push_back(operation_.entropy ? n : n * picks_);
      if (pass == Pass::backward && operation_.entropy) numbers.push_back(n);
      for (const int64_t count : numbers) sent += all_reduce_of(tp(), 4 * count);
    }
    return sent;
  }

 private:
  bool gathers() const { return operation_.ids == "ids"; }
  template <class Theirs>
  void start_with_ids(const std::shared_ptr<Theirs>& theirs) {
    forward_ = [this, theirs] {
      theirs->forward(rows_.logits(), inputs_.ids, stream(), values_[0].span());
    };
    backward_ = [this, theirs] {
      theirs->backward(rows_.logits(), inputs_.ids, d_values_[0], stream(), rows_.d_logits());
    };
  }
  bool rounds_terms() const override { return true; }
};

std::string without_temperature(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (std::ranges::find(problem.of_tokens, "temperature") != problem.of_tokens.end())
    return "upstream has one temperature for all tokens";
  if (problem.filter.temperature == 1) return "";
  return fmt::format("upstream has no temperature but 1, not {}", problem.filter.temperature);
}

std::string distinct_picks(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (problem.picks <= problem.vocab.vocab_size) return "";
  return fmt::format("a teacher has no {} largest of {} logits; the most are {}", problem.picks,
                     problem.vocab.vocab_size, problem.vocab.vocab_size);
}

/// The arrays of results, and that of the gradient.
std::vector<LogprobsArray> arrays_of(const RowOperation& operation) {
  std::vector<LogprobsArray> arrays;
  std::vector<std::string> reads;
  const auto read = [&](const std::string& input) {
    if (std::ranges::find(reads, input) == reads.end()) reads.push_back(input);
  };
  for (const RowResult& result : operation.results) {
    arrays.push_back({result.name, result.shape, false, result.reads});
    if (result.first_gradient < 0) continue;
    std::ranges::for_each(result.reads, read);
    read(gradient_input(result.first_gradient));
  }
  const bool own = !operation.gradient_reads.empty();
  arrays.push_back({operation.gradient, "TV", false, own ? operation.gradient_reads : reads});
  return arrays;
}

LogprobsOperation entry_of(const RowOperation& operation) {
  LogprobsOperation entry;
  entry.name = operation.name;
  entry.summary = operation.summary;
  entry.definition = operation.definition;
  entry.backward = operation.on_logits ? RowTraffic::writes : RowTraffic::updates;
  if (operation.headline) entry.figure.shown = RateShown::headline;
  if (operation.ids == "ids") entry.needs.push_back({"ids"});
  for (const std::string& input : operation.inputs) {
    const std::string& stand_in = logprobs_input(input).stand_in;
    entry.needs.push_back(stand_in.empty() ? std::vector{input} : std::vector{stand_in, input});
  }
  for (const RowParameter& parameter : operation.parameters)
    entry.own_options.push_back(parameter.option());
  entry.arrays = arrays_of(operation);
  const auto makes_it = [&operation](LogprobsContext& context) {
    return std::make_unique<RowOperationOp>(context, operation);
  };
  entry.methods = {{"gyre", makes_it}};
  if (operation.ids_are_largest) entry.methods[0].why_not = distinct_picks;
  if (!UpstreamRowOperationOp::has(operation)) return entry;
  // NeMo RL goes through an f32 log-softmax.
  const auto makes_theirs = [&operation](LogprobsContext& context) {
    return std::make_unique<UpstreamRowOperationOp>(context, operation);
  };
  entry.methods.push_back({"upstream", makes_theirs, 5, without_temperature});
  return entry;
}

}  // namespace

std::vector<LogprobsOperation> row_operation_entries() {
  std::vector<LogprobsOperation> entries;
  for (const RowOperation& operation : row_operations()) entries.push_back(entry_of(operation));
  return entries;
}

}  // namespace gyre
