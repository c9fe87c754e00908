#include "apps/pipeline/score_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// `longest`: tokens of the longest document that is compared.
DecoderShape shape_of(const ScoreCheck& check, int64_t layers, int64_t longest) {
  return decoder_shape(check.config, layers, longest, check.merges);
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

/// Compares those of the predictions [begin, begin + logprob.size()) of `document` that `mine`
/// holds.
void compare(const ScoreCheck& check, double tolerance, int64_t document, int64_t begin,
             std::span<const double> logprob, std::span<const double> entropy,
             const ScoreRange& mine) {
  Check& logprobs = check.verification.check("logprob", tolerance);
  Check& entropies = check.verification.check("entropy", tolerance);
  const int64_t first = std::max(begin, mine.begin),
                last = std::min(begin + std::ssize(logprob), mine.end());
  for (int64_t i = first; i < last; ++i) {
    const auto here = static_cast<size_t>(i - mine.begin), there = static_cast<size_t>(i - begin);
    const auto where = [&] { return place(check.documents, document, i - begin); };
    logprobs.add(static_cast<double>(mine.logprob[here]), logprob[there], where);
    entropies.add(static_cast<double>(mine.entropy[here]), entropy[there], where);
  }
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
  const double tolerance =
      score_tolerance(shape_of(check, check.config.num_hidden_layers, check.documents.longest()),
                      logit_scale(reference.logprob));
  for (int64_t d = 0; d < check.documents.count(); ++d) {
    const int64_t begin = reference.offsets[static_cast<size_t>(d)];
    const auto count = static_cast<size_t>(reference.offsets[static_cast<size_t>(d) + 1] - begin);
    compare(check, tolerance, d, begin,
            std::span(reference.logprob).subspan(static_cast<size_t>(begin), count),
            std::span(reference.entropy).subspan(static_cast<size_t>(begin), count), mine);
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
    scorer.for_each_run(shard, [&](const DocumentRun& run) {
      for (int64_t i = 0; i < run.length; ++i, ++next) {
        const int64_t position = run.start + i * run.stride, slot = run.slot + i;
        if (index == 0)
          rows.push_back(
              {check.documents.begin(run.document) + position, run.document, position, {}});
        rows[next].x.emplace_back(x.row(slot), x.row(slot) + x.cols);
      }
    });
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
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto want = expected.span().subspan(r * width, width);
      const double squares = std::inner_product(want.begin(), want.end(), want.begin(), 0.0);
      const double rms = std::sqrt(squares / static_cast<double>(width));
      for (size_t i = 0; i < width; ++i)
        hidden.add(
            static_cast<double>(rows[r].x[static_cast<size_t>(l)][i]), want[i],
            [&] {
              return place(check.documents, rows[r].document, rows[r].position) +
                     fmt::format(" channel {}", i);
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

void check_against_twin(const ScoreCheck& check, std::span<const TwinSample> samples,
                        const DecoderWeights& weights, const ScoreRange& mine,
                        Communicator& world) {
  const int ranks = world.size();
  std::vector<ReferenceScores> scores(samples.size());
  for (size_t i = 0; i < samples.size(); ++i)
    if (static_cast<int>(i) % ranks == world.rank())
      scores[i] = score_document_reference(check.config, weights,
                                           check.documents.document(samples[i].document)
                                               .first(static_cast<size_t>(samples[i].tokens)));
  std::vector<double> all;
  for (size_t i = 0; i < samples.size(); ++i) {
    const int owner = static_cast<int>(i) % ranks;
    scores[i].logprob =
        broadcast_values(world, std::move(scores[i].logprob), samples[i].tokens - 1, owner);
    scores[i].entropy =
        broadcast_values(world, std::move(scores[i].entropy), samples[i].tokens - 1, owner);
    all.insert(all.end(), scores[i].logprob.begin(), scores[i].logprob.end());
  }
  int64_t longest = 0;
  for (const TwinSample& sample : samples) longest = std::max(longest, sample.tokens);
  const double tolerance =
      score_tolerance(shape_of(check, check.config.num_hidden_layers, longest), logit_scale(all));
  const std::vector<int64_t> offsets = prediction_offsets(check.documents.offsets);
  for (size_t i = 0; i < samples.size(); ++i)
    compare(check, tolerance, samples[i].document,
            offsets[static_cast<size_t>(samples[i].document)], scores[i].logprob, scores[i].entropy,
            mine);
}

WeightReader weights_of(ModelFile& model) {
  return [&model](const std::string& name, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
    const bool vector = name.find("norm") != std::string::npos;
    return vector ? model.read_vector(name) : model.read_matrix(name, row, rows, column, columns);
  };
}

std::string verify_scores(const ScoreCheck& check, const ScoreSources& sources, Scorer& scorer,
                          Decoder& decoder, const ScoreRange& mine, Communicator& world) {
  set_current_step("verification");
  std::string text;
  if (const std::optional<Reference>& reference = sources.reference) {
    text =
        fmt::format("# check   against the reference in the input, by {}\n", reference->generator);
    if (reference->model_sha256 != sources.model_sha256)
      text += fmt::format(
          "# check   note: that reference was computed with another model file, sha256 {:.8}...\n",
          reference->model_sha256);
    check_scores(check, *reference, mine);
    if (reference->has_hidden) check_hidden(check, sources.input, scorer, decoder, world);
  } else {
    const std::vector<TwinSample> samples =
        choose_twin_samples(check.documents, sources.check_tokens);
    int64_t tokens = 0;
    for (const TwinSample& sample : samples) tokens += sample.tokens;
    text = fmt::format(
        "# check   {} of {} tokens, from {} documents, against the serial double-precision twin\n",
        tokens, check.documents.total(), samples.size());
    check_against_twin(check, samples, load_weights(check.config, 1, 0, weights_of(sources.model)),
                       mine, world);
  }
  check.verification.merge_over(world);
  return text;
}

}  // namespace gyre
