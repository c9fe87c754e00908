#include "apps/pipeline/score_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// `longest`: tokens of the longest document that is compared.
DecoderShape shape_of(const ScoreCheck& check, int64_t layers, int64_t longest) {
  return decoder_shape(check.config, layers, longest, check.grid.shape().cp);
}

/// Estimates the size of the logits, which a reference does not hold: the least likely target lies
/// below the largest logit by their spread.
double logit_scale(std::span<const double> logprob) {
  double scale = 1;
  for (double x : logprob) scale = std::max(scale, std::abs(x));
  return scale;
}

std::string place(const Documents& documents, int64_t document, int64_t position) {
  return fmt::format("{} position {}", documents.label(document), position);
}

/// Values of the predictions [begin, begin + size) of a document, numbered over all documents.
struct Wanted {
  int64_t document, begin;
  std::span<const double> logprob, entropy;  ///< empty: not compared
  const char* source;                        ///< before the names of arrays in messages
};

/// Compares those that `mine` holds.
void compare(const ScoreCheck& check, double tolerance, const Wanted& want,
             const ScoreRange& mine) {
  const auto each = [&](const char* name, std::span<const double> values,
                        std::span<const float> got) {
    if (values.empty()) return;
    Check& array = check.verification.check(name, tolerance);
    const int64_t first = std::max(want.begin, mine.begin),
                  last = std::min(want.begin + std::ssize(values), mine.end());
    for (int64_t i = first; i < last; ++i)
      array.add(static_cast<double>(got[static_cast<size_t>(i - mine.begin)]),
                values[static_cast<size_t>(i - want.begin)], [&] {
                  return fmt::format("{}{}[{}], {}", want.source, name, i,
                                     place(check.documents, want.document, i - want.begin));
                });
  };
  each("logprob", want.logprob, mine.logprob);
  each("entropy", want.entropy, mine.entropy);
}

std::vector<double> broadcast_values(Communicator& world, std::vector<double> values, int64_t count,
                                     int root) {
  values.resize(static_cast<size_t>(count));
  HostStream stream;
  world
      .broadcast(writable_bytes_of(std::span<double>(values)), root, stream,
                 "scores of the serial twin")
      ->wait();
  return values;
}

}  // namespace

void check_scores(const ScoreCheck& check, const Reference& reference, const ScoreRange& mine) {
  const double logits = reference.logprob ? logit_scale(*reference.logprob) : 1;
  const double tolerance = score_tolerance(
      shape_of(check, check.config.num_hidden_layers, check.documents.longest()), logits);
  const auto part = [](const std::optional<std::vector<double>>& all, int64_t begin,
                       int64_t count) -> std::span<const double> {
    if (!all) return {};
    return std::span(*all).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
  };
  const std::vector<int64_t> offsets = prediction_offsets(check.documents.offsets);
  for (int64_t d = 0; d < check.documents.count(); ++d) {
    const int64_t begin = offsets[static_cast<size_t>(d)],
                  count = offsets[static_cast<size_t>(d) + 1] - begin;
    compare(check, tolerance,
            {d, begin, part(reference.logprob, begin, count), part(reference.entropy, begin, count),
             "/reference/"},
            mine);
  }
}

HiddenShape hidden_shape(const ModelConfig& config) {
  return {config.num_hidden_layers + 1, config.hidden_size};
}

void check_hidden(const ScoreCheck& check, const std::string& input, Scorer& scorer,
                  Decoder& decoder, Communicator& world) {
  // Every rank compares the rows that it holds. It keeps copies, because reading the reference is
  // collective while the number of bins differs by rank.
  struct Row {
    int64_t token, document, position;
    std::vector<std::vector<float>> x;  // [layers + 1]
  };
  std::vector<Row> rows;
  size_t first = 0;  // first row of the current bin
  scorer.run(decoder, [&](const BinShard& shard, int64_t index, MatrixView<const float> x) {
    if (index == 0) first = rows.size();
    size_t next = first;
    for (const DocumentRun& run : shard.tokens) {
      const int64_t document = run.documents.front();  // all that have the row have the same tokens
      for (int64_t i = 0; i < run.length; ++i, ++next) {
        const int64_t position = run.start + i * run.stride, slot = run.row + i;
        if (index == 0)
          rows.push_back({check.documents.begin(document) + position, document, position, {}});
        rows[next].x.emplace_back(x.row(slot), x.row(slot) + x.cols);
      }
    }
  });
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.token < b.token; });
  std::vector<Rows> ranges;
  for (const Row& row : rows) ranges.push_back({row.token, 1});
  const auto width = static_cast<size_t>(check.config.hidden_size);
  const int64_t longest = check.documents.longest();
  for (int64_t l = 0; l < hidden_shape(check.config).entries; ++l) {
    const Buffer<double> expected = read_reference_hidden(world, input, l, ranges);
    Check& hidden = check.verification.check(fmt::format("hidden[{}]", l),
                                             hidden_tolerance(shape_of(check, l, longest)));
    // Tensor-parallel ranks have the same rows; each shows some of them.
    const auto shares = static_cast<size_t>(check.grid.shape().tp);
    for (auto r = static_cast<size_t>(check.grid.tp_rank()); r < rows.size(); r += shares) {
      const auto want = expected.span().subspan(r * width, width);
      const double squares = std::inner_product(want.begin(), want.end(), want.begin(), 0.0);
      const double rms = std::sqrt(squares / static_cast<double>(width));
      for (size_t i = 0; i < width; ++i)
        hidden.add(
            static_cast<double>(rows[r].x[static_cast<size_t>(l)][i]), want[i],
            [&] {
              return fmt::format("/reference/hidden[{}, {}, {}], {}", l, rows[r].token, i,
                                 place(check.documents, rows[r].document, rows[r].position));
            },
            rms);
    }
  }
}

void check_passes(std::span<const uint64_t> checksums, Verification& checks) {
  Check& same = checks.check("bits of timed passes", 0);
  for (size_t i = 1; i < checksums.size(); ++i) {
    if (checksums[i] == checksums[0])
      same.add_nothing();
    else
      same.add_failure(fmt::format("pass {}: other scores than those of checked messages", i));
  }
}

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
  // Takes every stride-th document, then halves the stride for the rest: an even spread for any
  // budget.
  for (size_t stride = std::max<size_t>(1, order.size() / 8); !order.empty() && left > 1;
       stride = std::max<size_t>(1, stride / 2)) {
    std::vector<int64_t> rest;
    for (size_t i = 0; i < order.size(); ++i) {
      if (i % stride == 0)
        take(order[i]);
      else
        rest.push_back(order[i]);
    }
    order = std::move(rest);
  }
  return samples;
}

namespace {

/// Scores samples one after the other, while there is time.
class TimedTwin {
 public:
  TimedTwin(const ScoreCheck& check, const DecoderWeights& weights, double seconds)
      : check_(check), weights_(weights), seconds_(seconds) {}

  /// Shortens `sample` to what there is time for, and to nothing when that is less than two tokens.
  ReferenceScores score(TwinSample& sample) {
    constexpr int64_t few = 16;
    if (work_ == 0 && sample.tokens > few) score_all({sample.document, few});  // how fast is it?
    while (sample.tokens > 1 && expected(sample.tokens) > seconds_ - watch_.seconds())
      sample.tokens = sample.tokens / 2;
    if (sample.tokens < 2) {
      sample.tokens = 0;
      return {};
    }
    return score_all(sample);
  }

 private:
  /// Multiplications, about.
  double work_of(int64_t tokens) const {
    const ModelConfig& c = check_.config;
    return static_cast<double>(tokens) *
           (static_cast<double>(c.parameters()) +
            static_cast<double>(c.num_hidden_layers * c.query_width() * tokens));
  }
  double expected(int64_t tokens) const {
    return work_ == 0 ? 0 : work_of(tokens) * watch_.seconds() / work_;
  }
  ReferenceScores score_all(const TwinSample& sample) {
    work_ += work_of(sample.tokens);
    return score_document_reference(
        check_.config, weights_,
        check_.documents.document(sample.document).first(static_cast<size_t>(sample.tokens)));
  }

  const ScoreCheck& check_;
  const DecoderWeights& weights_;
  double seconds_, work_ = 0;
  Stopwatch watch_;
};

}  // namespace

std::vector<TwinSample> check_against_twin(const ScoreCheck& check, const Reference* reference,
                                           std::vector<TwinSample> samples, double seconds,
                                           const DecoderWeights& weights, const ScoreRange& mine,
                                           Communicator& world) {
  const int ranks = world.size();
  std::vector<ReferenceScores> scores(samples.size());
  std::vector<int64_t> lengths(samples.size(), 0);  // of what was scored
  TimedTwin twin(check, weights, seconds);
  for (auto i = static_cast<size_t>(world.rank()); i < samples.size();
       i += static_cast<size_t>(ranks)) {
    scores[i] = twin.score(samples[i]);
    lengths[i] = samples[i].tokens;
  }
  HostStream stream;
  world
      .all_reduce(lengths.data(), std::ssize(lengths), DType::i64, ReduceOp::sum, stream,
                  "lengths of the samples of the serial twin")
      ->wait();
  std::vector<double> all;
  int64_t longest = 0, tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const int owner = static_cast<int>(i) % ranks;
    samples[i].tokens = lengths[i];
    const int64_t count = std::max<int64_t>(0, samples[i].tokens - 1);
    scores[i].logprob = broadcast_values(world, std::move(scores[i].logprob), count, owner);
    scores[i].entropy = broadcast_values(world, std::move(scores[i].entropy), count, owner);
    all.insert(all.end(), scores[i].logprob.begin(), scores[i].logprob.end());
    longest = std::max(longest, samples[i].tokens);
    tokens += samples[i].tokens;
  }
  const double tolerance =
      score_tolerance(shape_of(check, check.config.num_hidden_layers, longest), logit_scale(all));
  const bool logprobs = reference == nullptr || !reference->logprob,
             entropies = reference == nullptr || !reference->entropy;
  const std::vector<int64_t> offsets = prediction_offsets(check.documents.offsets);
  for (size_t i = 0; i < samples.size(); ++i) {
    Wanted want{samples[i].document, offsets[static_cast<size_t>(samples[i].document)], {}, {}, ""};
    if (logprobs) want.logprob = scores[i].logprob;
    if (entropies) want.entropy = scores[i].entropy;
    compare(check, tolerance, want, mine);
  }
  if (world.rank() == 0)
    for (const auto& [name, compared] : {std::pair{"logprob", logprobs}, {"entropy", entropies}})
      if (compared)
        check.verification.check(name, tolerance).add_sample(tokens, check.documents.total());
  std::erase_if(samples, [](const TwinSample& sample) { return sample.tokens == 0; });
  return samples;
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

std::string verify_scores(const ScoreCheck& check, const ScoreSources& sources, Scorer& scorer,
                          Decoder& decoder, const ScoreRange& mine, Communicator& world) {
  set_current_step("verification");
  std::string text;
  const Reference* reference = sources.reference ? &*sources.reference : nullptr;
  if (reference != nullptr) {
    text = answers_text(reference->generator, answer_uses(*reference));
    if (!reference->model_sha256.empty() && reference->model_sha256 != sources.model_sha256)
      text += fmt::format(
          "# check   note: that reference was computed with another model file, sha256 {:.8}...\n",
          reference->model_sha256);
    check_scores(check, *reference, mine);
    if (reference->has_hidden) check_hidden(check, sources.input, scorer, decoder, world);
  }
  std::vector<std::string> missing;
  if (reference == nullptr || !reference->logprob) missing.emplace_back("log-probabilities");
  if (reference == nullptr || !reference->entropy) missing.emplace_back("entropies");
  const bool has_predictions = prediction_offsets(check.documents.offsets).back() > 0;
  if (!missing.empty() && has_predictions) {
    const std::vector<TwinSample> samples = check_against_twin(
        check, reference, choose_twin_samples(check.documents, sources.check_tokens),
        sources.check_seconds, load_weights(check.config, 1, 0, weights_of(sources.model)), mine,
        world);
    int64_t tokens = 0;
    for (const TwinSample& sample : samples) tokens += sample.tokens;
    text += fmt::format(
        "# check   {} of {} of {} tokens, from {} documents, against the serial double-precision "
        "twin\n",
        fmt::join(missing, " and "), tokens, check.documents.total(), samples.size());
  }
  check.verification.merge_over(world);
  return text;
}

}  // namespace gyre
