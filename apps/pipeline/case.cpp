#include "apps/pipeline/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/pipeline/twin.hpp"
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
      offsets_(prediction_offsets(inputs.documents.offsets)) {
  if (in_.teacher == nullptr) return;
  teacher_.emplace(DocumentView{in_.documents.tokens, in_.documents.offsets}, in_.teacher->config,
                   config_, in_.teacher->plan, grid);
  scorer_.observe_bins(
      [this](ConstMatrixRef h, ConstMatrixRef head) { teacher_->keep_student(h, head); },
      [this](int64_t shard, std::span<PredictionScore> scores) {
        return teacher_->diverge(shard, scores);
      });
}

WeightReader TeacherModel::read_weights() {
  return with_padding(weights_of(file), file.config().vocab_padded, config.vocab_padded);
}

void ScoringCase::set_decoders(Decoder& decoder, Decoder* of_teacher) {
  decoder_ = &decoder;
  if (teacher_) teacher_->set_decoder(*of_teacher);
}

std::vector<std::tuple<std::string, Value, std::string>> ScoringResult::further() const {
  std::vector<std::tuple<std::string, Value, std::string>> all;
  if (predicted_ms > 0) all.emplace_back("predicted", predicted_ms, "ms");
  if (recurrent) {
    all.emplace_back("recurrent_msgs", recurrent->messages, "");
    all.emplace_back("recurrent_sent", static_cast<double>(recurrent->bytes) / 1e6, "MB/rank");
  }
  return all;
}

PassWork ScoringCase::work() const {
  PassWork work = scorer_.work();
  if (teacher_) teacher_->add_to(work);
  return work;
}

ScoringResult ScoringCase::row() const {
  ScoringResult row;
  row.shape = plan_.setup.grid;
  row.layout = plan_.setup.layout->name;
  row.schedule = plan_.setup.schedule->name;
  row.tokens = plan_.tokens;
  row.predictions = plan_.predictions;
  row.bins = std::ssize(plan_.bins);
  row.packing = packing_efficiency(plan_.bins, plan_.capacity);
  row.predicted_ms = 1e3 * in_.predicted_s;
  row.flops = plan_.flops(config_) + (teacher_ ? teacher_->flops() : 0);
  row.key = {{"grid", to_string(row.shape)}, {"layout", row.layout}, {"schedule", row.schedule}};
  if (plan_.recurrent_layers > 0) {
    row.key.emplace_back("recurrent_layout", plan_.setup.recurrent_layout->name);
    row.key.emplace_back("state_schedule", plan_.setup.state_schedule->name);
  }
  return row;
}

void ScoringCase::run(Pass) {
  ++passes_;
  scorer_.on_progress([&](int64_t done, int64_t all) {
    progress_.detail(fmt::format("pass {}, bin {} of {}", passes_, done + 1, all));
  });
  const RecurrentTraffic before = decoder_->recurrent_traffic();
  times_ = scorer_.run(*decoder_);
  const RecurrentTraffic after = decoder_->recurrent_traffic();
  recurrent_sent_ = {after.messages - before.messages, after.bytes - before.bytes};
  scorer_.on_progress({});
  scores_.reset();
  document_scores_.clear();
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

const std::vector<DocumentScore>& ScoringCase::document_scores() {
  if (document_scores_.empty())
    document_scores_ = score_documents(scores(), offsets_, in_.documents.unscored, world_);
  return document_scores_;
}

void ScoringCase::complete(ScoringResult& row, double last_ms) {
  row.exposed = all_reduce_value(world_, 1e3 * times_.exposed() / last_ms, ReduceOp::max);
  row.pair_imbalance =
      imbalance(all_gather_value(world_, static_cast<double>(scorer_.count().pairs)));
  row.time_imbalance = imbalance(all_gather_value(world_, times_.attention));
  if (plan_.recurrent_layers > 0)
    row.recurrent = {all_reduce_value(world_, recurrent_sent_.messages, ReduceOp::max),
                     all_reduce_value(world_, recurrent_sent_.bytes, ReduceOp::max)};
  row.kl = std::nan("");
  if (!teacher_) return;
  double sum = 0, count = 0;
  for (const DocumentScore& score : document_scores()) {
    sum += score.kl;
    count += static_cast<double>(score.predictions);
  }
  row.kl = sum / count;
}

namespace {

std::string place_of(const Documents& documents, int64_t document, int64_t position) {
  return fmt::format("{} position {}", documents.label(document), position);
}

}  // namespace

DecoderShape ScoringCase::shape_of(const ModelConfig& config, int64_t layers, int64_t longest,
                                   bool of_twin) const {
  DecoderShape shape = decoder_shape(config, layers, longest, grid_.shape().cp);
  shape.tp = grid_.shape().tp;
  shape.activations = plan_.setup.types.activations;
  shape.residual = plan_.setup.types.residual;
  shape.rounded_weights = !of_twin && shape.activations == DType::bf16 &&
                          in_.model.widest_matrix_type() != h5::Type::bfloat16;
  return shape;
}

double ScoringCase::tolerance(const ModelConfig& config, std::span<const double> logprobs,
                              int64_t longest, bool of_twin) const {
  // Estimates the size of the logits, which a reference does not hold. The
  // least likely target is below the largest logit by their spread.
  double logits = 1;
  for (const double x : logprobs) logits = std::max(logits, std::abs(x));
  return score_tolerance(shape_of(config, config.num_hidden_layers, longest, of_twin), logits);
}

double ScoringCase::over_change_of(const ModelConfig& config, int64_t longest, bool of_twin) const {
  return tolerance_over_change(shape_of(config, config.num_hidden_layers, longest, of_twin));
}

void ScoringCase::compare_scores(const ScoreComparison& of, Verification& checks) const {
  ResultArray array{of.name, {offsets_.back()}, of.name, of.tolerance};
  double squares = 0;
  std::vector<double> scales;
  for (const ExpectedScore& e : of.expected) {
    array.rows.push_back(e.token);
    const double change = of.changes.empty() ? 0 : of.changes[e.token - scores_->begin];
    scales.push_back(scale_of(e.scale, change, of.over_change, of.tolerance));
    squares += change / (scales.back() * scales.back());
  }
  array.sigma = sigma(squares, std::ssize(of.expected), of.tolerance);
  Check& check = check_of(array, "", checks);
  if (world_.rank() == 0) check.add_sample(of.sampled.first, of.sampled.second);
  int64_t wide = 0;
  for (size_t r = 0; r < of.expected.size(); ++r) {
    const auto& [token, value, least] = of.expected[r];
    wide += of.tolerance * scales[r] > std::max(least, std::abs(value)) ? 1 : 0;
    const double got = of.got[token - scores_->begin];
    const ExpectedRow expected{{of.answers ? 0 : value}, {scales[r]}};
    compare_row(array, r, {&got, 1}, expected, of.answers ? &value : nullptr, check, [&] {
      const auto document = std::ranges::upper_bound(offsets_, token) - offsets_.begin() - 1;
      return ", " + place_of(in_.documents, document, token - offsets_[document]);
    });
  }
  require_verified(wide, std::ssize(of.expected), check);
}

void ScoringCase::require_verified(int64_t wide, int64_t all, Check& check) const {
  wide = all_reduce_value(world_, wide, ReduceOp::sum);
  all = all_reduce_value(world_, all, ReduceOp::sum);
  if (world_.rank() == 0 && 2 * wide > all)
    check.add_failure(fmt::format(
        "the tolerances of {} of {} values are larger than the values: nothing was verified", wide,
        all));
}

double ScoringCase::sigma(double squares, int64_t count, double tolerance) const {
  if (plan_.setup.types.activations == DType::f32) return 0;
  constexpr double modelled_values = 4;
  const double modelled = tolerance / narrow_safety;
  squares = all_reduce_value(world_, squares, ReduceOp::sum);
  count = all_reduce_value(world_, count, ReduceOp::sum);
  return std::sqrt((squares + modelled_values * modelled * modelled) / (count + modelled_values));
}

double ScoringCase::sigma(int64_t layer, const std::vector<HiddenRow>& rows, double tolerance,
                          double over_change) const {
  double squares = 0;
  for (size_t r = 0; r < changes_.rows.size(); ++r) {
    const std::vector<float>& x = rows[r].x[layer];
    const double size = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    const double count = std::ssize(x), change = changes_.rows[r][layer];
    const double scale = scale_of(std::sqrt(size / count), change, over_change, tolerance);
    if (scale > 0) squares += count * change / (scale * scale);
  }
  const int64_t longest = in_.documents.longest();
  return std::hypot(sigma(squares, std::ssize(rows) * config_.hidden_size, tolerance),
                    residual_sigma(shape_of(config_, layer, longest, false)));
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

void ScoringCase::measure_changes(const std::vector<HiddenRow>* hidden) {
  changes_ = {};
  Perturbation by = perturbation_of(shape_of(config_, 1, 1, true));
  if (teacher_) {
    const Perturbation other = perturbation_of(shape_of(teacher_->config(), 1, 1, true));
    if (other.passes > by.passes) by = other;
  }
  const auto perturb = [&](double deviation, int pass) {
    decoder_->perturb_norms(deviation, 2 * pass + 1);  // errors of both models are independent
    if (teacher_) teacher_->perturb_norms(deviation, 2 * pass + 2);
  };
  const auto add = [&](const std::vector<float>& x, const std::vector<float>& y,
                       std::vector<double>& changes) {
    changes.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) changes[i] += (y[i] - x[i]) * (y[i] - x[i]) / by.passes;
  };
  for (int pass = 0; pass < by.passes; ++pass) {
    perturb(by.deviation, pass);
    if (hidden != nullptr) {
      const std::vector<HiddenRow> rows = hidden_rows();
      changes_.rows.resize(rows.size(), std::vector<double>(hidden_shape(config_).entries));
      for (size_t r = 0; r < rows.size(); ++r)
        for (size_t l = 0; l < rows[r].x.size(); ++l) {
          std::vector<double> changes;
          add((*hidden)[r].x[l], rows[r].x[l], changes);
          changes_.rows[r][l] += std::reduce(changes.begin(), changes.end()) / std::ssize(changes);
        }
    } else {
      scorer_.run(*decoder_);
    }
    const ScoreRange scores = scorer_.in_document_order(world_);
    add(scores_->logprob, scores.logprob, changes_.logprob);
    add(scores_->entropy, scores.entropy, changes_.entropy);
    add(scores_->kl, scores.kl, changes_.kl);
  }
  perturb(0, 0);
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
                       hidden_tolerance(shape_of(config_, l, longest, false))};
    const double over_change = tolerance_over_change(shape_of(config_, l, longest, false));
    hidden.sigma = sigma(l, rows, hidden.tolerance, over_change);
    Check& check = check_of(hidden, "", checks);
    // Tensor-parallel ranks have the same rows; each compares some of them.
    int64_t wide = 0, compared = 0;
    for (size_t r = grid_.tp_rank(); r < rows.size(); r += grid_.shape().tp) {
      const HiddenRow& row = rows[r];
      const std::vector<double> got(row.x[l].begin(), row.x[l].end());
      const auto want = expected.span().subspan(r * width, width);
      const double squares = std::inner_product(want.begin(), want.end(), want.begin(), 0.0);
      const double change = changes_.rows.empty() ? 0 : changes_.rows[r][l];
      const double size = std::sqrt(squares / width),
                   scale = scale_of(size, change, over_change, hidden.tolerance);
      ++compared;
      wide += hidden.tolerance * scale > size ? 1 : 0;
      const ExpectedRow scaled{.values = {want.begin(), want.end()},
                               .scales = std::vector<double>(width, scale),
                               .defined = std::vector<double>(width, 0)};
      hidden.rows = {row.token};
      compare_row(hidden, 0, got, scaled, want.data(), check,
                  [&] { return ", " + place_of(in_.documents, row.document, row.position); });
    }
    require_verified(wide, compared, check);
  }
}

void ScoringCase::verify_by_twin(Verification& checks) {
  const bool logprobs = !in_.reference || !in_.reference->logprob,
             entropies = !in_.reference || !in_.reference->entropy, kls = teacher_.has_value();
  if ((!logprobs && !entropies && !kls) || offsets_.back() == 0) return;
  const auto model_of = [&](const ModelConfig& config, const WeightReader& read) {
    return TwinModel{config,
                     load_weights(config, 1, 0, read, plan_.setup.types.activations).widened()};
  };
  const TwinModel model = model_of(config_, weights_of(in_.model));
  std::optional<TwinModel> teacher;
  if (kls) teacher = model_of(teacher_->config(), in_.teacher->read_weights());
  const TwinScores twin = score_by_twin(in_.documents, model, teacher ? &*teacher : nullptr,
                                        {in_.check_tokens, in_.check_seconds}, world_);
  const double bound = tolerance(config_, twin.scores.logprob, twin.longest, true);
  const auto compare = [&](ScoreComparison of, const std::vector<double>& want,
                           const std::vector<double>& bounds = {}) {
    of.sampled = {twin.tokens, in_.documents.total()};
    for (size_t i = 0; i < want.size(); ++i)
      if (const int64_t at = twin.predictions[i]; at >= scores_->begin && at < scores_->end())
        of.expected.push_back({at, want[i], bounds.empty() ? 1 : bounds[i] / of.tolerance});
    compare_scores(of, checks);
  };
  const double over_change = over_change_of(config_, twin.longest, true);
  if (logprobs)
    compare({"logprob", bound, over_change, scores_->logprob, changes_.logprob},
            twin.scores.logprob);
  if (entropies)
    compare({"entropy", bound, over_change, scores_->entropy, changes_.entropy},
            twin.scores.entropy);
  if (kls) {
    const double of_teacher = tolerance(teacher->config, twin.teacher_logprob, twin.longest, true);
    std::vector<double> bounds;
    for (size_t i = 0; i < twin.scores.kl.size(); ++i)
      bounds.push_back(kl_tolerance(bound, of_teacher, twin.scores.distance[i],
                                    twin.scores.deviation[i], config_.vocab_size));
    const double largest = bounds.empty() ? 0 : std::ranges::max(bounds);
    const double either =
        std::max(over_change, over_change_of(teacher->config, twin.longest, true));
    compare({"kl", largest, either, scores_->kl, changes_.kl}, twin.scores.kl, bounds);
  }
  std::vector<std::string> compared;
  if (logprobs) compared.emplace_back("log-probabilities");
  if (entropies) compared.emplace_back("entropies");
  if (kls) compared.emplace_back("divergences");
  notes_ += fmt::format(
      "# check   {} of {} of {} tokens, from {} documents, "
      "against the serial double-precision twin\n",
      fmt::join(compared, " and "), twin.tokens, in_.documents.total(), twin.documents);
}

void ScoringCase::verify_recurrent_traffic(Verification& checks) const {
  if (plan_.recurrent_layers == 0) return;
  const RecurrentTraffic form = scorer_.recurrent_expected();
  Check& check = checks.check("messages of recurrent layers", 0);
  const auto where = [&](const char* what) {
    return [this, what] { return fmt::format("{} of rank {}", what, world_.rank()); };
  };
  check.add(recurrent_sent_.messages, form.messages, where("messages"));
  check.add(recurrent_sent_.bytes, form.bytes, where("bytes"));
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
  measure_changes(with_hidden ? &hidden : nullptr);
  if (in_.reference) {
    const Reference& reference = *in_.reference;
    notes_ = answers_text(reference.generator, answer_uses(reference));
    if (!reference.model_sha256.empty() && reference.model_sha256 != in_.model_sha256)
      notes_ += fmt::format(
          "# check   note: that reference was computed with "
          "another model file, sha256 {:.8}...\n",
          reference.model_sha256);
    const auto& logprobs = reference.logprob;
    const double bound = tolerance(config_, logprobs ? *logprobs : std::vector<double>(),
                                   in_.documents.longest(), false);
    const double over_change = over_change_of(config_, in_.documents.longest(), false);
    const auto compare = [&](const char* name, const std::vector<float>& got,
                             const std::vector<double>& changes,
                             const std::optional<std::vector<double>>& answers) {
      if (!answers || offsets_.back() == 0) return;
      ScoreComparison of{name, bound, over_change, got, changes};
      of.answers = true;
      for (int64_t token = mine.begin; token < mine.end(); ++token)
        of.expected.push_back({token, answers->at(token)});
      compare_scores(of, checks);
    };
    compare("logprob", mine.logprob, changes_.logprob, reference.logprob);
    compare("entropy", mine.entropy, changes_.entropy, reference.entropy);
    if (with_hidden) verify_hidden(hidden, checks);
  }
  verify_by_twin(checks);
  verify_recurrent_traffic(checks);
}

}  // namespace gyre
