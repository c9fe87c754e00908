#include "apps/pipeline/twin.hpp"

#include <algorithm>

#include "comm/agree.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// Part of a document that the twin scores: its first `tokens` tokens (later
/// tokens do not change their scores).
struct TwinSample {
  int64_t document = 0;
  int64_t tokens = 0;
};

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
  TimedTwin(const Documents& documents, const TwinModel& model, const TwinModel* teacher,
            double seconds)
      : documents_(documents), model_(model), teacher_(teacher), seconds_(seconds) {}

  /// Adds the scores of `sample` after shortening it to the remaining time. It becomes empty if
  /// less than two tokens fit.
  TwinScores score(TwinSample& sample) {
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
  static double work_of(const ModelConfig& config, int64_t tokens) {
    return static_cast<double>(tokens) *
           (static_cast<double>(config.parameters()) +
            static_cast<double>(config.num_hidden_layers * config.query_width() * tokens));
  }
  double work_of(int64_t tokens) const {
    return work_of(model_.config, tokens) +
           (teacher_ == nullptr ? 0 : work_of(teacher_->config, tokens));
  }
  double expected(int64_t tokens) const {
    return work_ == 0 ? 0 : work_of(tokens) * watch_.seconds() / work_;
  }
  TwinScores score_all(const TwinSample& sample) {
    work_ += work_of(sample.tokens);
    const auto tokens = documents_.document(sample.document).first(sample.tokens);
    if (teacher_ == nullptr)
      return {.scores = score_document_reference(model_.config, model_.weights, tokens)};
    const auto logits = logits_reference(model_.config, model_.weights, tokens);
    const auto of_teacher = logits_reference(teacher_->config, teacher_->weights, tokens);
    TwinScores result{.scores = scores_reference(model_.config, logits, tokens)};
    result.teacher_logprob = scores_reference(teacher_->config, of_teacher, tokens).logprob;
    add_divergences_reference(model_.config, logits, teacher_->config, of_teacher, result.scores);
    return result;
  }

  const Documents& documents_;
  const TwinModel& model_;
  const TwinModel* teacher_;
  double seconds_, work_ = 0;
  Stopwatch watch_;
};

/// Appends the first `count` scores of `one`, which rank `root` has, to `all`.
void append_broadcast(Communicator& world, TwinScores& one, int64_t count, int root,
                      bool with_teacher, TwinScores& all) {
  const auto append_to = [&](std::vector<double>& to, std::vector<double>& from) {
    append(to, broadcast_values(world, std::move(from), count, root));
  };
  append_to(all.scores.logprob, one.scores.logprob);
  append_to(all.scores.entropy, one.scores.entropy);
  if (!with_teacher) return;
  append_to(all.scores.kl, one.scores.kl);
  append_to(all.scores.distance, one.scores.distance);
  append_to(all.scores.deviation, one.scores.deviation);
  append_to(all.teacher_logprob, one.teacher_logprob);
}

}  // namespace

TwinScores score_by_twin(const Documents& documents, const TwinModel& model,
                         const TwinModel* teacher, const TwinBudget& budget, Communicator& world) {
  std::vector<TwinSample> samples = choose_twin_samples(documents, budget.tokens);
  std::vector<TwinScores> scores(samples.size());
  std::vector<int64_t> lengths(samples.size(), 0);  // scored tokens
  TimedTwin twin(documents, model, teacher, budget.seconds);
  const size_t ranks = world.size();
  for (size_t i = world.rank(); i < samples.size(); i += ranks) {
    scores[i] = twin.score(samples[i]);
    lengths[i] = samples[i].tokens;
  }
  HostStream stream;
  world
      .all_reduce(lengths.data(), std::ssize(lengths), DType::i64, ReduceOp::sum, stream,
                  "lengths of the samples of the serial twin")
      ->wait();
  const std::vector<int64_t> offsets = prediction_offsets(documents.offsets);
  TwinScores all;
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t count = std::max<int64_t>(0, lengths[i] - 1);
    append_broadcast(world, scores[i], count, static_cast<int>(i % ranks), teacher != nullptr, all);
    for (int64_t p = 0; p < count; ++p) all.predictions.push_back(offsets[samples[i].document] + p);
    all.longest = std::max(all.longest, lengths[i]);
    all.tokens += lengths[i];
    all.documents += lengths[i] > 0 ? 1 : 0;
  }
  return all;
}

}  // namespace gyre
