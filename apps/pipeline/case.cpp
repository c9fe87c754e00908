#include "apps/pipeline/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/agree.hpp"
#include "harness/result_array.hpp"
#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
ScoringCase::ScoringCase(const ScoringPlan& plan, const ScoringInputs& inputs, ProcessGrid& grid,
                         Communicator& world, Progress& progress)
    : plan_(plan),
      in_(inputs),
      config_(inputs.model.config()),
      grid_(grid),
      world_(world),
      progress_(progress),
      scorer_({inputs.documents.tokens, inputs.documents.offsets}, config_, plan, grid),
      offsets_(prediction_offsets(inputs.documents.offsets)) {}

ScoringResult ScoringCase::row() const {
  ScoringResult row;
  row.shape = plan_.setup.grid;
  row.layout = plan_.setup.layout->name;
  row.schedule = plan_.setup.schedule->name;
  row.tokens = plan_.tokens;
  row.predictions = plan_.predictions;
  row.bins = std::ssize(plan_.bins);
  row.packing = packing_efficiency(plan_.bins, plan_.capacity);
  row.flops = plan_.flops(config_);
  row.key = {{"grid", to_string(row.shape)}, {"layout", row.layout}, {"schedule", row.schedule}};
  return row;
}

void ScoringCase::run(Pass) {
  ++passes_;
  scorer_.on_progress([&](int64_t done, int64_t all) {
    progress_.detail(fmt::format("pass {}, bin {} of {}", passes_, done + 1, all));
  });
  times_ = scorer_.run(*decoder_);
  scorer_.on_progress({});
  scores_.reset();
}

SentTraffic ScoringCase::sent() const {
  SentTraffic sent;
  for (const Communicator* group : {&grid_.cp(), &grid_.tp()})
    sent += {group->traffic().messages, group->traffic().bytes_sent};
  return sent;
}

std::optional<uint64_t> ScoringCase::checksum(Pass) {
  if (plan_.predictions == 0) return {};
  return scorer_.checksum();
}

const ScoreRange& ScoringCase::scores() {
  if (!scores_) scores_ = scorer_.in_document_order(world_);
  return *scores_;
}

void ScoringCase::complete(ScoringResult& row, double last_ms) {
  row.exposed = all_reduce_value(world_, 1e3 * times_.exposed() / last_ms, ReduceOp::max);
  row.pair_imbalance =
      imbalance(all_gather_value(world_, static_cast<double>(scorer_.count().pairs)));
  row.time_imbalance = imbalance(all_gather_value(world_, times_.attention));
}

namespace {

/// Part of a document that the twin scores: its first `tokens` tokens (later
/// tokens do not change their scores).
struct TwinSample {
  int64_t document = 0;
  int64_t tokens = 0;
};

std::string place_of(const Documents& documents, int64_t document, int64_t position) {
  return fmt::format("{} position {}", documents.label(document), position);
}

void append(std::vector<double>& all, const std::vector<double>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

std::vector<double> broadcast_values(Communicator& world, std::vector<double> values, int64_t count,
                                     int root) {
  values.resize(count);
  HostStream stream;
  world
      .broadcast(writable_bytes_of(std::span<double>(values)), root, stream,
                 "scores of the serial twin")
      ->wait();
  return values;
}

/// Chooses about `budget` tokens: documents spread evenly over the lengths, and
/// the beginning of the longest one.
std::vector<TwinSample> choose_twin_samples(const Documents& documents, int64_t budget) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < documents.count(); ++d)
    if (documents.length(d) > 1) order.push_back(d);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const int64_t x = documents.length(a), y = documents.length(b);
    return x != y ? x < y : a < b;
  });
  std::vector<TwinSample> samples;
  if (order.empty()) return samples;
  const int64_t part = std::max<int64_t>(2, budget / 4);
  int64_t left = budget;
  const auto take = [&](int64_t document) {
    const int64_t tokens = std::min({documents.length(document), part, left});
    if (tokens < 2) return;
    samples.push_back({document, tokens});
    left -= tokens;
  };
  take(order.back());
  order.pop_back();
  // Takes every stride-th document, then halves the stride for the rest, which
  // spreads the sample evenly for any budget.
  size_t stride = order.size() / 8;
  while (!order.empty() && left > 1) {
    stride = std::max<size_t>(1, stride);
    std::vector<int64_t> rest;
    for (size_t i = 0; i < order.size(); ++i) {
      if (i % stride == 0)
        take(order[i]);
      else
        rest.push_back(order[i]);
    }
    order = std::move(rest);
    stride /= 2;
  }
  return samples;
}

/// Scores samples one after the other until the time is up.
class TimedTwin {
 public:
  TimedTwin(const Documents& documents, const ModelConfig& config, const DecoderWeights& weights,
            double seconds)
      : documents_(documents), config_(config), weights_(weights), seconds_(seconds) {}

  /// Scores `sample` after shortening it to the remaining time. It becomes empty
  /// if less than two tokens fit.
  ReferenceScores score(TwinSample& sample) {
    constexpr int64_t few = 16;
    if (work_ == 0 && sample.tokens > few) score_all({sample.document, few});  // measures the speed
    while (sample.tokens > 1 && expected(sample.tokens) > seconds_ - watch_.seconds())
      sample.tokens = sample.tokens / 2;
    if (sample.tokens < 2) {
      sample.tokens = 0;
      return {};
    }
    return score_all(sample);
  }

 private:
  /// Approximate number of multiplications.
  double work_of(int64_t tokens) const {
    return static_cast<double>(tokens) *
           (static_cast<double>(config_.parameters()) +
            static_cast<double>(config_.num_hidden_layers * config_.query_width() * tokens));
  }
  double expected(int64_t tokens) const {
    return work_ == 0 ? 0 : work_of(tokens) * watch_.seconds() / work_;
  }
  ReferenceScores score_all(const TwinSample& sample) {
    work_ += work_of(sample.tokens);
    return score_document_reference(config_, weights_,
                                    documents_.document(sample.document).first(sample.tokens));
  }

  const Documents& documents_;
  const ModelConfig& config_;
  const DecoderWeights& weights_;
  double seconds_, work_ = 0;
  Stopwatch watch_;
};

}  // namespace

DecoderShape ScoringCase::shape_of(int64_t layers, int64_t longest, bool of_twin) const {
  DecoderShape shape = decoder_shape(config_, layers, longest, grid_.shape().cp);
  shape.tp = grid_.shape().tp;
  shape.activations = plan_.setup.types.activations;
  shape.residual = plan_.setup.types.residual;
  shape.rounded_weights = !of_twin && shape.activations == DType::bf16 &&
                          in_.model.widest_matrix_type() != h5::Type::bfloat16;
  return shape;
}

double ScoringCase::tolerance(std::span<const double> logprobs, int64_t longest,
                              bool of_twin) const {
  // Estimates the size of the logits, which a reference does not hold. The
  // least likely target is below the largest logit by their spread.
  double logits = 1;
  for (const double x : logprobs) logits = std::max(logits, std::abs(x));
  return score_tolerance(shape_of(config_.num_hidden_layers, longest, of_twin), logits);
}

void ScoringCase::compare_scores(const ScoreComparison& of, Verification& checks) const {
  ResultArray array{of.name, {offsets_.back()}, of.name, of.tolerance};
  for (const auto& [token, value] : of.expected) array.rows.push_back(token);
  array.sigma = sigma(array, of.got, of.perturbed);
  Check& check = check_of(array, "", checks);
  if (world_.rank() == 0) check.add_sample(of.sampled.first, of.sampled.second);
  for (size_t r = 0; r < of.expected.size(); ++r) {
    const auto& [token, value] = of.expected[r];
    const double got = of.got[token - scores_->begin];
    const ExpectedRow expected{{of.answers ? 0 : value}, {1}};
    compare_row(array, r, {&got, 1}, expected, of.answers ? &value : nullptr, check, [&] {
      const auto document = std::ranges::upper_bound(offsets_, token) - offsets_.begin() - 1;
      return ", " + place_of(in_.documents, document, token - offsets_[document]);
    });
  }
}

double ScoringCase::sigma(double squares, int64_t count, double tolerance) const {
  if (plan_.setup.types.activations == DType::f32) return 0;
  constexpr double modelled_values = 4;
  const double modelled = tolerance / narrow_safety;
  squares = all_reduce_value(world_, squares, ReduceOp::sum);
  count = all_reduce_value(world_, count, ReduceOp::sum);
  return std::sqrt((squares + modelled_values * modelled * modelled) / (count + modelled_values));
}

double ScoringCase::sigma(const ResultArray& scores, const std::vector<float>& got,
                          const std::vector<float>& perturbed) const {
  double squares = 0;
  if (!perturbed.empty())
    for (const int64_t row : scores.rows) {
      const int64_t at = row - scores_->begin;
      const double change = perturbed[at] - got[at];
      squares += change * change;
    }
  return sigma(squares, std::ssize(scores.rows), scores.tolerance);
}

double ScoringCase::sigma(int64_t layer, const std::vector<HiddenRow>& rows,
                          double tolerance) const {
  double squares = 0;
  for (size_t r = 0; r < perturbed_.rows.size(); ++r) {
    const std::vector<float>&x = rows[r].x[layer], &y = perturbed_.rows[r].x[layer];
    double change = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      change += (y[i] - x[i]) * (y[i] - x[i]);
      size += x[i] * x[i];
    }
    if (size > 0) squares += static_cast<double>(x.size()) * change / size;
  }
  const int64_t longest = in_.documents.longest();
  return std::hypot(sigma(squares, std::ssize(rows) * config_.hidden_size, tolerance),
                    residual_sigma(shape_of(layer, longest, false)));
}

HiddenShape hidden_shape(const ModelConfig& config) {
  return {config.num_hidden_layers + 1, config.hidden_size};
}

std::vector<ScoringCase::HiddenRow> ScoringCase::hidden_rows() {
  std::vector<HiddenRow> rows;
  size_t first = 0;  // first row of the current bin
  scorer_.run(*decoder_, [&](const BinShard& shard, int64_t index, MatrixView<const float> x) {
    if (index == 0) first = rows.size();
    size_t next = first;
    for (const DocumentRun& run : shard.tokens) {
      const int64_t document = run.documents.front();  // all documents of the row share its tokens
      for (int64_t i = 0; i < run.length; ++i, ++next) {
        const int64_t position = run.start + i * run.stride, slot = run.row + i;
        if (index == 0)
          rows.push_back({in_.documents.begin(document) + position, document, position, {}});
        rows[next].x.emplace_back(x.row(slot), x.row(slot) + x.cols);
      }
    }
  });
  std::ranges::sort(rows, {}, &HiddenRow::token);
  return rows;
}

void ScoringCase::run_perturbed(bool with_hidden) {
  perturbed_ = {};
  if (plan_.setup.types.activations == DType::f32) return;
  decoder_->perturb_norms(true);
  if (with_hidden)
    perturbed_.rows = hidden_rows();
  else
    scorer_.run(*decoder_);
  decoder_->perturb_norms(false);
  perturbed_.scores = scorer_.in_document_order(world_);
}

void ScoringCase::verify_hidden(const std::vector<HiddenRow>& rows, Verification& checks) {
  std::vector<Rows> ranges;
  for (const HiddenRow& row : rows) ranges.push_back({row.token, 1});
  const size_t width = config_.hidden_size;
  const int64_t longest = in_.documents.longest();
  for (int64_t l = 0; l < hidden_shape(config_).entries; ++l) {
    const Buffer<double> expected = read_reference_hidden(world_, in_.input, l, ranges);
    ResultArray hidden{fmt::format("hidden[{}]", l),
                       {in_.documents.total(), config_.hidden_size},
                       fmt::format("hidden[{}]", l),
                       hidden_tolerance(shape_of(l, longest, false))};
    hidden.sigma = sigma(l, rows, hidden.tolerance);
    Check& check = check_of(hidden, "", checks);
    // Tensor-parallel ranks have the same rows; each compares some of them.
    for (size_t r = grid_.tp_rank(); r < rows.size(); r += grid_.shape().tp) {
      const HiddenRow& row = rows[r];
      const std::vector<double> got(row.x[l].begin(), row.x[l].end());
      const auto want = expected.span().subspan(r * width, width);
      const double squares = std::inner_product(want.begin(), want.end(), want.begin(), 0.0);
      const ExpectedRow scaled{.values = {want.begin(), want.end()},
                               .scales = std::vector<double>(width, std::sqrt(squares / width)),
                               .defined = std::vector<double>(width, 0)};
      hidden.rows = {row.token};
      compare_row(hidden, 0, got, scaled, want.data(), check,
                  [&] { return ", " + place_of(in_.documents, row.document, row.position); });
    }
  }
}

void ScoringCase::verify_by_twin(Verification& checks) {
  const bool logprobs = !in_.reference || !in_.reference->logprob,
             entropies = !in_.reference || !in_.reference->entropy;
  if ((!logprobs && !entropies) || offsets_.back() == 0) return;
  const DecoderWeights weights =
      load_weights(config_, 1, 0, weights_of(in_.model), plan_.setup.types.activations).widened();
  std::vector<TwinSample> samples = choose_twin_samples(in_.documents, in_.check_tokens);
  std::vector<ReferenceScores> scores(samples.size());
  std::vector<int64_t> lengths(samples.size(), 0);  // scored tokens
  TimedTwin twin(in_.documents, config_, weights, in_.check_seconds);
  const size_t ranks = world_.size();
  for (size_t i = world_.rank(); i < samples.size(); i += ranks) {
    scores[i] = twin.score(samples[i]);
    lengths[i] = samples[i].tokens;
  }
  HostStream stream;
  world_
      .all_reduce(lengths.data(), std::ssize(lengths), DType::i64, ReduceOp::sum, stream,
                  "lengths of the samples of the serial twin")
      ->wait();
  // Scores of all samples, and the indices of their predictions.
  std::vector<int64_t> numbers;
  std::vector<double> all_logprobs, all_entropies;
  int64_t longest = 0, tokens = 0, documents = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const int owner = static_cast<int>(i % ranks);
    const int64_t count = std::max<int64_t>(0, lengths[i] - 1);
    append(all_logprobs, broadcast_values(world_, std::move(scores[i].logprob), count, owner));
    append(all_entropies, broadcast_values(world_, std::move(scores[i].entropy), count, owner));
    for (int64_t p = 0; p < count; ++p) numbers.push_back(offsets_[samples[i].document] + p);
    longest = std::max(longest, lengths[i]);
    tokens += lengths[i];
    documents += lengths[i] > 0 ? 1 : 0;
  }
  const double bound = tolerance(all_logprobs, longest, true);
  const auto compare = [&](const char* name, const std::vector<float>& got,
                           const std::vector<float>& perturbed, const std::vector<double>& want) {
    ScoreComparison of{name, bound, got, perturbed};
    of.sampled = {tokens, in_.documents.total()};
    for (size_t i = 0; i < numbers.size(); ++i)
      if (numbers[i] >= scores_->begin && numbers[i] < scores_->end())
        of.expected.emplace_back(numbers[i], want[i]);
    compare_scores(of, checks);
  };
  if (logprobs) compare("logprob", scores_->logprob, perturbed_.scores.logprob, all_logprobs);
  if (entropies) compare("entropy", scores_->entropy, perturbed_.scores.entropy, all_entropies);
  notes_ += fmt::format(
      "# check   {}{}{} of {} of {} tokens, from {} documents, "
      "against the serial double-precision twin\n",
      logprobs ? "log-probabilities" : "", logprobs && entropies ? " and " : "",
      entropies ? "entropies" : "", tokens, in_.documents.total(), documents);
}

WeightReader weights_of(ModelFile& model) {
  return [&model](const std::string& name, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
    const bool vector = name.find("norm") != std::string::npos;
    return vector ? model.read_vector(name) : model.read_matrix(name, row, rows, column, columns);
  };
}

std::vector<AnswerUse> answer_uses(const Reference& reference) {
  std::vector<AnswerUse> uses;
  if (reference.logprob) uses.push_back({"logprob"});
  if (reference.entropy) uses.push_back({"entropy"});
  if (reference.has_hidden) uses.push_back({"hidden"});
  for (const std::string& name : reference.unknown) uses.push_back({name, "not known"});
  return uses;
}

void ScoringCase::verify(Pass, Verification& checks) {
  set_current_step("verification");
  notes_.clear();
  const ScoreRange& mine = scores();
  const bool with_hidden = in_.reference && in_.reference->has_hidden;
  const std::vector<HiddenRow> hidden = with_hidden ? hidden_rows() : std::vector<HiddenRow>();
  run_perturbed(with_hidden);
  if (in_.reference) {
    const Reference& reference = *in_.reference;
    notes_ = answers_text(reference.generator, answer_uses(reference));
    if (!reference.model_sha256.empty() && reference.model_sha256 != in_.model_sha256)
      notes_ += fmt::format(
          "# check   note: that reference was computed with "
          "another model file, sha256 {:.8}...\n",
          reference.model_sha256);
    const auto& logprobs = reference.logprob;
    const double bound =
        tolerance(logprobs ? *logprobs : std::vector<double>(), in_.documents.longest(), false);
    const auto compare = [&](const char* name, const std::vector<float>& got,
                             const std::vector<float>& perturbed,
                             const std::optional<std::vector<double>>& answers) {
      if (!answers || offsets_.back() == 0) return;
      ScoreComparison of{name, bound, got, perturbed};
      of.answers = true;
      for (int64_t token = mine.begin; token < mine.end(); ++token)
        of.expected.emplace_back(token, answers->at(token));
      compare_scores(of, checks);
    };
    compare("logprob", mine.logprob, perturbed_.scores.logprob, reference.logprob);
    compare("entropy", mine.entropy, perturbed_.scores.entropy, reference.entropy);
    if (with_hidden) verify_hidden(hidden, checks);
  }
  verify_by_twin(checks);
}

}  // namespace gyre
