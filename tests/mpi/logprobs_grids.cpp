// From logits to predictions of sequences and back, over grids of context-parallel and
// tensor-parallel ranks, for everything that has more than one value a token: logits
// and log-probabilities of ids, entropies, filters. Logits are bf16, and gradients take their
// place.

#include "comm/process_grid.hpp"
#include "layout_cases.hpp"
#include "logprobs/sequence_scores.hpp"
#include "selection_operations.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::LogitRows;
using test::Matrix;
using test::world;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

/// Runs body(grid) for every cp x tp of the ranks; six of 8 ranks are also tp = 3 with cp = 2, and
/// the reverse, while the other two are one of the two alone.
void for_each_grid(const std::function<void(ProcessGrid&)>& body) {
  const auto run = [&](Communicator& comm, int tp) {
    const GridShape shape{1, comm.size() / tp, tp};
    SCOPED_TRACE(to_string(shape));
    ProcessGrid grid(comm, shape);
    body(grid);
  };
  for (int tp = 1; tp <= world().size(); ++tp)
    if (world().size() % tp == 0) run(world(), tp);
  if (world().size() != 8) return;
  const std::unique_ptr<Communicator> part = world().split(world().rank() < 6 ? 0 : 1);
  for (const int tp : {part->size() / 2, 2}) run(*part, tp);
}

/// Ways of cutting a vocabulary for the grid; one rank has it whole.
std::vector<VocabPartition> partitions(int64_t vocab_size, const ProcessGrid& grid) {
  std::vector<VocabPartition> all = test::partitions(vocab_size, grid.shape().tp);
  if (grid.shape().tp == 1) all.resize(1);
  return all;
}

/// Sequences in one stream, dealt over cp by dual-chunk-swap where their slots allow it, else in
/// stripes.
struct Pack {
  Bounds bounds;
  LogitRows logits;  ///< [slots, vocab]
  int64_t width;     ///< U - 1

  Layout layout(int cp) const {
    bool even = true;
    for (int64_t i = 0; i < bounds.view().segments(); ++i)
      even = even && bounds.view().slot_length(i) % (2 * cp) == 0;
    LayoutOptions options;
    options.cp = cp;
    return even ? dual_chunk_swap(bounds.view(), cp)
                : find_layout("striped").make(bounds.view(), options);
  }
  int64_t slots() const { return bounds.view().slots(); }
  PredictionShape shape(int64_t row) const { return {bounds.padded, width, row}; }
};

Pack make_pack(const Bounds& bounds, int64_t vocab_size, int64_t width) {
  return {bounds, test::random_logits(bounds.view().slots(), vocab_size, DType::bf16), width};
}
/// Two dense rows of 24, and a pack of uneven sequences with padding.
std::vector<Pack> packs(int64_t vocab_size) {
  return {make_pack(test::full_bounds({24, 24}), vocab_size, 23),
          make_pack(test::bounds_of({9, 0, 30, 1, 17}, {16, 0, 32, 4, 24}), vocab_size, 20)};
}

/// What one rank of a grid has of a pack. Slots past the stream hold NaN, id 0.
class Part {
 public:
  Part(const Pack& pack, ProcessGrid& grid, VocabPartition vocab)
      : pack_(pack),
        grid_(grid),
        vocab_(std::move(vocab)),
        layout_(pack.layout(grid.cp().size())),
        index_(shard_index(layout_, grid.cp_rank())),
        logits_(tokens(), vocab_.columns(grid.tp_rank()), DType::bf16) {
    for (int64_t t = 0; t < tokens(); ++t) {
      if (slot(t) >= layout_.stream_slots) continue;
      const auto row = pack.logits.row(slot(t));
      for (int64_t c = 0; c < vocab_.valid(grid.tp_rank()); ++c)
        logits_.set(t, c, row[vocab_.begin(grid.tp_rank()) + c]);
    }
  }

  int64_t tokens() const { return std::ssize(index_); }
  int64_t slot(int64_t t) const { return index_[t]; }
  const VocabPartition& vocab() const { return vocab_; }
  Communicator& tp() { return grid_.tp(); }
  Matrix& logits() { return logits_; }
  /// local [tokens, row] of values [stream slots, row].
  template <class T>
  std::vector<T> take(const std::vector<T>& values, int64_t row) const {
    std::vector<T> local(index_.size() * row, T(0));
    for (int64_t t = 0; t < tokens(); ++t)
      if (slot(t) < layout_.stream_slots)
        std::copy_n(values.begin() + slot(t) * row, row, local.begin() + t * row);
    return local;
  }
  Floats gather(const Floats& local, int64_t row) const {
    return gather_predictions(layout_, pack_.shape(row), local, grid_.cp());
  }
  Floats gather_back(const Floats& d, int64_t row) const {
    return gather_predictions_backward(layout_, pack_.shape(row), d, grid_.cp(),
                                       GatherGradient::split);
  }
  Ints next_targets(const Ints& tokens) const {
    return next_token_targets(layout_, pack_.bounds.padded, tokens, grid_.cp_rank());
  }
  /// Compares the gradients, which took the logits' place, with gradient(slot, scales) of slots
  /// that have a prediction; all other rows are 0.
  void expect_gradients(
      const std::function<Doubles(int64_t slot, Doubles& scales)>& gradient) const {
    const Floats got = test::elements(logits_.ref());
    for (int64_t t = 0; t < tokens(); ++t) {
      const int64_t size = pack_.logits.vocab_size;
      Doubles want(size, 0), scales(size, 0x1p-80);
      if (place_of(slot(t)) >= 0) want = gradient(slot(t), scales);
      test::expect_gradient_row(got, DType::bf16, t, vocab_, grid_.tp_rank(), want, scales);
    }
  }
  /// Place of a slot's prediction in [segments * width]; -1: none.
  int64_t place_of(int64_t slot) const {
    for (int64_t i = 0; i < pack_.bounds.view().segments(); ++i) {
      const int64_t p = slot - pack_.bounds.view().begin(i);
      if (p >= 0 && p < pack_.bounds.view().slot_length(i))
        return p < pack_.shape(1).predictions(i) ? i * pack_.width + p : -1;
    }
    return -1;
  }
  /// Calls body(slot, place) for all predictions of the pack, and expects 0 of `got`
  /// [segments, width, row] elsewhere.
  void for_each_prediction(const Floats& got, int64_t row,
                           const std::function<void(int64_t slot, int64_t place)>& body) const {
    std::vector<bool> used(pack_.bounds.view().segments() * pack_.width);
    ASSERT_EQ(got.size(), used.size() * row);
    for (int64_t slot = 0; slot < pack_.slots(); ++slot)
      if (const int64_t place = place_of(slot); place >= 0) {
        used[place] = true;
        body(slot, place);
      }
    for (size_t i = 0; i < got.size(); ++i)
      if (!used[i / row]) {
        EXPECT_EQ(got[i], 0) << "no prediction has a place at " << i;
      }
  }

 private:
  const Pack& pack_;
  ProcessGrid& grid_;
  VocabPartition vocab_;
  Layout layout_;
  Ints index_;
  Matrix logits_;
};

TEST(LogprobGrids, LogitsOfIdsAreThoseOfTheStreamAndTheirGradientsComeBack) {
  const int64_t vocab_size = 61, picks = 4;
  // Every slot's own ids, nobody's among them; then columns that all tokens share.
  for (const bool shared : {false, true})
    for (const Pack& pack : packs(vocab_size)) {
      Ints ids = test::mixed_ids(pack.slots(), picks, vocab_size);
      for (size_t i = 0; shared && i < ids.size(); ++i)
        ids[i] = std::vector<int32_t>{60, 3, 3, 20}[i % 4];
      for_each_grid([&](ProcessGrid& grid) {
        for (const VocabPartition& vocab : partitions(vocab_size, grid)) {
          Part part(pack, grid, vocab);
          GatheredLogits gathered(part.tokens(), vocab, picks, 1, part.tp());
          const Ints local_ids = part.take(ids, picks);
          Floats local(local_ids.size());
          HostStream stream;
          gathered.forward(part.logits().ref(), local_ids, stream, local);
          const Floats all = part.gather(local, picks);
          part.for_each_prediction(all, picks, [&](int64_t slot, int64_t place) {
            for (int64_t k = 0; k < picks; ++k) {
              const int32_t id = ids[slot * picks + k];
              const double want = id < 0 || id >= vocab_size ? 0 : pack.logits.row(slot)[id];
              EXPECT_EQ(static_cast<double>(all[place * picks + k]), want)
                  << "id " << id << " of slot " << slot;
            }
          });
          const Floats g = test::gradients(pack.bounds.view().segments() * pack.width, picks);
          gathered.backward(local_ids, part.gather_back(g, picks), part.logits().ref());
          part.expect_gradients([&](int64_t slot, Doubles& scales) {
            Doubles want(vocab_size, 0);
            for (int64_t k = 0; k < picks; ++k) {
              const int32_t id = ids[slot * picks + k];
              if (id < 0 || id >= vocab_size) continue;
              const double x = static_cast<double>(g[part.place_of(slot) * picks + k]);
              want[id] += x;
              scales[id] += std::abs(x);
            }
            return want;
          });
        }
      });
    }
}

/// The gradient of a row's logits by the reference from g and, without a filter, h of the entropy;
/// scales <- what it is made of.
Doubles score_gradient(std::span<const double> row, int32_t target, double g, double h,
                       const SamplingFilter& filter, Doubles& scales) {
  Doubles left(row.begin(), row.end());
  const std::vector<bool> kept = filter_reference(row, filter);
  for (size_t v = 0; v < left.size(); ++v)
    if (!kept[v]) left[v] = -std::numeric_limits<double>::infinity();
  scales = test::score_gradient_scales(left, {&target, 1}, {&g, 1}, h, filter.temperature);
  for (double& scale : scales) scale += 0x1p-80;
  return filter.active()
             ? filtered_gradient_reference(row, target, filter, g)
             : score_gradient_reference(row, {&target, 1}, {&g, 1}, h, filter.temperature);
}

/// Next-token log-probabilities and entropies (filtered: without), forward and backward.
void expect_scores(const Pack& pack, const Ints& tokens, Part& part, const SamplingFilter& filter) {
  const bool filtered = filter.active();
  const Ints targets = part.next_targets(tokens);
  const auto size = targets.size();
  Floats local(size), h(filtered ? 0 : size);
  HostStream stream;
  std::unique_ptr<FilteredScores> of_filter;
  std::unique_ptr<VocabScores> scores;
  if (filtered) {
    of_filter = std::make_unique<FilteredScores>(part.tokens(), part.vocab(), DType::bf16,
                                                 FilterOptions{filter, 8, 1}, part.tp());
    of_filter->forward(part.logits().ref(), targets, stream, local);
  } else {
    scores = std::make_unique<VocabScores>(
        part.tokens(), part.vocab(),
        ScoreOptions{.ids_per_token = 1, .entropy = true, .temperature = filter.temperature},
        part.tp());
    scores->forward(part.logits().ref(), targets, stream, local, h);
  }
  const Floats all = part.gather(local, 1);
  const Floats entropies = filtered ? Floats() : part.gather(h, 1);
  const auto next = [&](int64_t slot) { return tokens[slot + 1]; };
  int64_t dropped = 0;
  part.for_each_prediction(all, 1, [&](int64_t slot, int64_t place) {
    const int64_t at = place;
    const auto row = pack.logits.row(slot);
    const TokenScore plain = score_row_reference(row, next(slot), filter.temperature);
    const double want =
        filtered ? filtered_logprob_reference(row, next(slot), filter) : plain.logprob;
    dropped += std::isinf(want) ? 1 : 0;
    test::expect_logprob(all[at], want, fmt::format("log p of slot {}", slot));
    if (!filtered)
      test::expect_entropy(entropies[at], plain.entropy, pack.logits.vocab_size,
                           fmt::format("entropy of slot {}", slot));
  });
  EXPECT_EQ(dropped > 0, filtered);
  const int64_t places = pack.bounds.view().segments() * pack.width;
  const Floats g = test::gradients(places, 1), g_h = test::gradients(places, 1, 2);
  if (filtered)
    of_filter->backward(part.logits().ref(), targets, part.gather_back(g, 1), part.logits().ref());
  else
    scores->backward(part.logits().ref(), targets,
                     {part.gather_back(g, 1), part.gather_back(g_h, 1)}, part.logits().ref());
  part.expect_gradients([&](int64_t slot, Doubles& scales) {
    const int64_t at = part.place_of(slot);
    return score_gradient(pack.logits.row(slot), next(slot), double{g[at]},
                          filtered ? 0 : double{g_h[at]}, filter, scales);
  });
}

/// Tokens of which the next is, mostly, among the 12 largest logits; then the vocabulary's last.
Ints likely_tokens(const Pack& pack) {
  Ints tokens(pack.slots(), 0);
  for (size_t slot = 0; slot + 1 < tokens.size(); ++slot)
    tokens[slot + 1] =
        slot % 9 == 8
            ? static_cast<int32_t>(pack.logits.vocab_size - 1)
            : top_k_reference(pack.logits.row(static_cast<int64_t>(slot)), 12)[slot * 5 % 12].id;
  return tokens;
}

TEST(LogprobGrids, ScoresWithAndWithoutAFilter) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 130; ++i) lengths.push_back((i * 7) % 5);
  std::vector<Pack> all = packs(61);
  all.push_back(make_pack(test::full_bounds(lengths), 61, 3));
  for (const Pack& pack : all) {
    const Ints tokens = likely_tokens(pack);
    for_each_grid([&](ProcessGrid& grid) {
      for (const VocabPartition& vocab : partitions(61, grid))
        for (const SamplingFilter& filter : {SamplingFilter{0, 1, 1.25}, {6, 1, 1}, {6, 0.8, 1}}) {
          SCOPED_TRACE(fmt::format("top_k {}, top_p {}", filter.top_k, filter.top_p));
          Part part(pack, grid, vocab);
          expect_scores(pack, tokens, part, filter);
        }
    });
  }
}

TEST(LogprobGrids, ScoresOfAPackAreBitByBitThoseOfEachSequenceAlone) {
  const int64_t length = 2 * 12 * world().size();
  const Pack pack = make_pack(test::full_bounds({length, length, length}), 61, length - 1);
  const Ints tokens = likely_tokens(pack);
  for_each_grid([&](ProcessGrid& grid) {
    const VocabPartition vocab = partitions(61, grid).front();
    const auto scores_of = [&](const Pack& p, const Ints& ids) {
      Part part(p, grid, vocab);
      VocabScores scores(part.tokens(), vocab, {}, part.tp());
      Floats local(part.tokens());
      HostStream stream;
      scores.forward(part.logits().ref(), part.next_targets(ids), stream, local, {});
      return part.gather(local, 1);
    };
    Floats alone;
    for (int64_t i = 0; i < 3; ++i) {
      Pack one{test::full_bounds({length}), LogitRows(length, 61), length - 1};
      std::copy_n(pack.logits.values.begin() + i * length * 61, length * 61,
                  one.logits.values.begin());
      const Floats row =
          scores_of(one, {tokens.begin() + i * length, tokens.begin() + (i + 1) * length});
      alone.insert(alone.end(), row.begin(), row.end());
    }
    EXPECT_EQ(scores_of(pack, tokens), alone);
  });
}

TEST(LogprobGrids, BetweenTheTrueAndThePaddedLengthAreScoresOfPaddingIds) {
  // abc, defgh, ij in 4, 8, 4 slots; id 0 behind them; rows of 6 tokens.
  const Pack pack = make_pack(test::bounds_of({3, 5, 2}, {4, 8, 4}), 64, 5);
  const Ints tokens = {11, 12, 13, 0, 21, 22, 23, 24, 25, 0, 0, 0, 31, 32, 0, 0};
  const Ints targets[] = {{12, 13, 0}, {22, 23, 24, 25, 0}, {32, 0, 0}};
  for_each_grid([&](ProcessGrid& grid) {
    Part part(pack, grid, partitions(64, grid).front());
    VocabScores scores(part.tokens(), part.vocab(), {}, part.tp());
    const Ints local_targets = part.next_targets(tokens);
    Floats local(local_targets.size());
    HostStream stream;
    scores.forward(part.logits().ref(), local_targets, stream, local, {});
    const Floats rows = part.gather(local, 1);
    ASSERT_EQ(rows.size(), 15U);
    for (size_t i = 0; i < 3; ++i)
      for (size_t p = 0; p < 5; ++p) {
        const int64_t slot = pack.bounds.padded[i] + static_cast<int64_t>(p);
        const bool scored = p < targets[i].size();
        const double want =
            scored ? score_row_reference(pack.logits.row(slot), targets[i][p]).logprob : 0;
        EXPECT_EQ(rows[5 * i + p] != 0, scored);
        test::expect_logprob(rows[5 * i + p], want, fmt::format("sequence {}, entry {}", i, p));
      }
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
