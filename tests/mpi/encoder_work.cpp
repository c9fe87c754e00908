// Encoding audio with the work shared by all ranks.

#include "sharding/encoder_work.hpp"

#include <algorithm>
#include <functional>
#include <random>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::world;
using Longs = std::vector<int64_t>;
using Values = std::vector<float>;
using Items = std::vector<Values>;

constexpr int64_t hidden = 3;
constexpr int64_t shortest_input = 2;  ///< of the test encoder

/// Audio of given lengths, the same on all ranks.
struct Audio {
  Longs lengths;
  int64_t width;
  Values samples;
  explicit Audio(Longs lengths_, int64_t width_ = 20)
      : lengths(std::move(lengths_)), width(width_), samples(lengths.size() * width, 0.0f) {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(1, 2);
    for (size_t i = 0; i < lengths.size(); ++i)
      for (int64_t t = 0; t < lengths[i]; ++t) samples[i * width + t] = uniform(random);
  }
  AudioBatch batch() const { return {{samples.data(), std::ssize(lengths), width}, lengths}; }
};

/// A frame for every two samples: scale · their sum, of which each value has its own multiple.
Values encode_item(std::span<const float> samples, int64_t length, float scale) {
  Values frames;
  for (size_t f = 0; f < static_cast<size_t>(length) / 2; ++f)
    for (int64_t e = 0; e < hidden; ++e)
      frames.push_back(scale * (samples[2 * f] + samples[2 * f + 1]) * static_cast<float>(e + 1));
  return frames;
}

/// An encoder that counts its calls, as every one of them may be a collective, and insists on its
/// shortest input.
struct CountingEncoder {
  int64_t calls = 0;
  Longs dummy_lengths;
  AudioEncoder function() {
    return [this](std::span<const float> samples, int64_t length) {
      ++calls;
      EXPECT_GE(length, shortest_input);
      EXPECT_GE(std::ssize(samples), length);
      if (std::all_of(samples.begin(), samples.end(), [](float x) { return x == 0; }))
        dummy_lengths.push_back(length);
      return encode_item(samples, length, 0.5f);
    };
  }
};

Items encode_alone(const Audio& audio) {
  Items items;
  for (size_t i = 0; i < audio.lengths.size(); ++i)
    items.push_back(encode_item({&audio.samples[i * audio.width], static_cast<size_t>(audio.width)},
                                audio.lengths[i], 0.5f));
  return items;
}

TEST(DistributeItems, ByCountWithDummiesLast) {
  constexpr int64_t d = dummy_item;
  using Shares = std::vector<Longs>;
  EXPECT_EQ(distribute_items(5, 2), (Shares{{0, 1, 2}, {3, 4, d}}));
  EXPECT_EQ(distribute_items(5, 4), (Shares{{0, 1}, {2, 3}, {4, d}, {d, d}}));
  EXPECT_EQ(distribute_items(1, 4), (Shares{{0}, {d}, {d}, {d}}));
  EXPECT_EQ(distribute_items(9, 4), (Shares{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {d, d, d}}));
  EXPECT_EQ(distribute_items(4, 4), (Shares{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(distribute_items(0, 2), (Shares{{}, {}}));
  EXPECT_EQ(distribute_items(3, 1), (Shares{{0, 1, 2}}));
}

TEST(EncodeDistributed, AllRanksGetWhatOneWouldComputeFromEquallyManyCalls) {
  const int n = world().size();
  for (const size_t items : {1u, 4u, 5u, 9u})
    for (const GatherKind gather : {GatherKind::padded, GatherKind::ragged}) {
      SCOPED_TRACE(items);
      const Longs all = {9, 4, 20, 3, 6, 14, 5, 8, 17};
      const Audio audio(Longs(all.begin(), all.begin() + static_cast<int64_t>(items)));
      CountingEncoder encoder;
      EXPECT_EQ(encode_distributed(world(), audio.batch(), encoder.function(), {hidden, gather}),
                encode_alone(audio));
      const auto share = distribute_items(static_cast<int64_t>(items), n)[world().rank()];
      EXPECT_EQ(encoder.calls, ceil_div(static_cast<int64_t>(items), n));
      // Dummies are as long as the shortest item: an encoder cannot be asked for less.
      EXPECT_EQ(encoder.dummy_lengths,
                Longs(std::count(share.begin(), share.end(), dummy_item),
                      *std::min_element(audio.lengths.begin(), audio.lengths.end())));
    }
}

TEST(EncodeDistributed, NoItemsNeedNoCallAndGiveNothing) {
  CountingEncoder encoder;
  EXPECT_TRUE(encode_distributed(world(), Audio({}).batch(), encoder.function(), {hidden}).empty());
  EXPECT_EQ(encoder.calls, 0);
}

TEST(EncodeDistributed, EncodingsWithoutFramesKeepTheirPlace) {
  // The encoder makes no frame of fewer than two samples.
  const Audio audio({4, 1, 6});
  const AudioEncoder encode = [](std::span<const float> samples, int64_t length) {
    return encode_item(samples, length, 0.5f);
  };
  const Items expected = encode_alone(audio);
  EXPECT_TRUE(expected[1].empty());
  for (const GatherKind gather : {GatherKind::padded, GatherKind::ragged})
    EXPECT_EQ(encode_distributed(world(), audio.batch(), encode, {hidden, gather}), expected);
}

/// Bytes of float data that this rank sends, without what both kinds send alike.
int64_t bytes_sent(const Audio& audio, GatherKind gather) {
  CountingEncoder encoder;
  const Traffic before = world().traffic();
  encode_distributed(world(), audio.batch(), encoder.function(), {hidden, gather});
  return world().traffic().bytes_sent - before.bytes_sent;
}

TEST(EncodeDistributed, RaggedMovesOnlyRealFrames) {
  const int n = world().size();
  // One long item among short ones: padding costs most of the traffic.
  Longs lengths(2 * n - 1, 2);
  lengths[0] = 20;
  const Audio audio(lengths);
  // Two items a rank but for the last; item 0 makes 10 frames, the others 1.
  const int64_t frame = hidden * static_cast<int64_t>(sizeof(float));
  const int64_t mine =
      world().rank() == 0 ? 10 + (n > 1 ? 1 : 0) : (world().rank() == n - 1 ? 1 : 2);
  const int64_t longest_reduction = n > 1 ? 2 * (n - 1) * 8 / n : 0;
  const int64_t padded_rows = n > 1 ? 2 * 10 : 10;
  EXPECT_EQ(bytes_sent(audio, GatherKind::padded) - bytes_sent(audio, GatherKind::ragged),
            (n - 1) * frame * (padded_rows - mine) + longest_reduction);
}

TEST(EncodeDistributed, ARankWithoutAudioJoinsTheEncoderOfTheOthers) {
  // Weights are sharded over all ranks, of which every one is a context-parallel group of its own:
  // rank r has r items, so that rank 0 has text only. The encoder is a collective of all ranks.
  const int n = world().size(), me = world().rank();
  const auto group = world().split(me);
  Longs lengths;
  for (int i = 0; i < me; ++i) lengths.push_back(6 + 2 * i);
  const Audio audio(lengths, me == 0 ? 0 : 40);
  int64_t calls = 0;
  const AudioEncoder encode = [&](std::span<const float> samples, int64_t length) {
    ++calls;
    EXPECT_EQ(all_reduce_value(world(), calls, ReduceOp::min), calls);
    EXPECT_GE(length, 6);
    return encode_item(samples, length, 0.5f);
  };
  EXPECT_EQ(
      encode_distributed(*group, audio.batch(), encode, {hidden, GatherKind::ragged, &world()}),
      encode_alone(audio));
  EXPECT_EQ(calls, n - 1);
}

TEST(EncodeDistributed, AnEncoderOfNoGroupDoesNotCommunicate) {
  // A rank that failed before the encoder's message would leave the others waiting for it.
  const AudioEncoder encode = [](std::span<const float> samples, int64_t length) {
    all_reduce_value(world(), length, ReduceOp::min);
    return encode_item(samples, length, 1);
  };
  const Audio audio({4, 6});
  std::string message;
  try {
    encode_distributed(world(), audio.batch(), encode, {hidden});
  } catch (const AgreedError& error) {
    message = error.what();
  }
  EXPECT_EQ(message.find("communication in work that each rank does alone") != std::string::npos,
            world().size() > 1)
      << message;
}

TEST(EncodeDistributed, GroupsThatAgreeHearOfOneThatDoesNot) {
  // Every rank is a group of its own, but for the last two, whose batches differ.
  const int n = world().size(), me = world().rank();
  if (n == 1) GTEST_SKIP() << "one rank agrees with itself";
  const auto group = world().split(std::min(me, n - 2));
  const Audio audio(me == n - 1 ? Longs{4, 6, 8} : Longs{4, 6});
  const EncodeOptions options{hidden, GatherKind::ragged, &world()};
  EXPECT_EQ(agreed_message([&] {
              encode_distributed(*group, audio.batch(), CountingEncoder().function(), options);
            }),
            "encoding audio: the number of items is 2 on rank 0, but 3 on rank 1; it must be the "
            "same on all ranks of the group" +
                (n == 2 ? std::string() : fmt::format(" (found on rank {})", n - 2)));
}

TEST(EncodeDistributed, BatchesThatDifferAreAnErrorThatNamesBothCounts) {
  const int n = world().size(), last = n - 1;
  if (n == 1) GTEST_SKIP() << "one rank agrees with itself";
  const auto encode = [&](const Audio& audio) {
    return agreed_message([&] {
      encode_distributed(world(), audio.batch(), CountingEncoder().function(), {hidden});
    });
  };
  const bool odd_one = world().rank() == last;
  EXPECT_EQ(encode(Audio(odd_one ? Longs{4, 6, 8} : Longs{4, 6})),
            fmt::format("encoding audio: the number of items is 2 on rank 0, but 3 on rank {}; it "
                        "must be the same on all ranks of the group",
                        last));
  EXPECT_EQ(encode(Audio(odd_one ? Longs{} : Longs{4, 6})),
            fmt::format("encoding audio: the number of items is 2 on rank 0, but 0 on rank {}; it "
                        "must be the same on all ranks of the group",
                        last));
  EXPECT_EQ(encode(Audio(odd_one ? Longs{4, 7} : Longs{4, 6})),
            fmt::format("encoding audio: the total length of the items is 10 on rank 0, but 11 on "
                        "rank {}; it must be the same on all ranks of the group",
                        last));
}

TEST(EncodeDistributed, BadLengthsAndEncodingsAreErrorsOfAllRanks) {
  const int n = world().size();
  Audio audio({4, 6});
  audio.lengths[1] = 21;
  EXPECT_EQ(agreed_message([&] {
              encode_distributed(world(), audio.batch(), CountingEncoder().function(), {hidden});
            }),
            "audio item 1: length 21 is not within 0 to 20, the width of the batch");
  const AudioEncoder odd = [](std::span<const float>, int64_t) { return Values(4); };
  EXPECT_EQ(agreed_message([&] { encode_distributed(world(), Audio({4}).batch(), odd, {hidden}); }),
            "audio item 0: an encoding of 4 values is not a number of rows of 3");
  const AudioEncoder failing = [](std::span<const float> samples, int64_t length) {
    if (samples[0] != 0 && length == 6) throw_usage("the encoder takes no 6 samples");
    return encode_item(samples, length, 1);
  };
  EXPECT_EQ(agreed_message([&] {
              encode_distributed(world(), Audio({4, 6}).batch(), failing, {hidden});
            }),
            std::string("the encoder takes no 6 samples") + (n == 1 ? "" : " (found on rank 1)"));
}

/// Σ weight · encoding over the part of the items' values that a rank's loss has.
double weight_of(int rank, size_t item, size_t value) {
  return static_cast<double>(value % world().size()) == rank
             ? static_cast<double>(1 + item + value % 4)
             : 0.0;
}

TEST(EncoderGradient, ReachesTheEncodersParameterThroughEveryRank) {
  const Audio audio({9, 4, 20, 3, 6});
  const auto share = distribute_items(5, world().size())[world().rank()];
  // The loss of the run for an encoder of this scale: each rank counts a part of the values.
  const auto loss = [&](float scale) {
    const Items items = encode_distributed(
        world(), audio.batch(),
        [&](std::span<const float> s, int64_t length) { return encode_item(s, length, scale); },
        {hidden});
    double mine = 0;
    for (size_t i = 0; i < items.size(); ++i)
      for (size_t k = 0; k < items[i].size(); ++k)
        mine += weight_of(world().rank(), i, k) * static_cast<double>(items[i][k]);
    return all_reduce_value(world(), mine, ReduceOp::sum);
  };
  const double expected = (loss(1.25f) - loss(0.75f)) / 0.5;  // the loss is linear in the scale
  const Items encodings = encode_alone(audio);
  Items grads;
  for (size_t i = 0; i < encodings.size(); ++i) {
    Values& grad = grads.emplace_back();
    for (size_t k = 0; k < encodings[i].size(); ++k)
      grad.push_back(static_cast<float>(weight_of(world().rank(), i, k)));
  }
  /// d(loss)/d(scale) over all ranks, from the gradients of this rank's own items.
  const auto of_scale = [&](GatherGradient convention) {
    const Items mine = encoder_gradient(world(), grads, convention);
    double sum = 0;
    size_t at = 0;
    for (const int64_t item : share) {
      if (item == dummy_item) continue;
      const int64_t i = item;
      EXPECT_EQ(mine.at(at).size(), encodings[i].size());
      for (size_t k = 0; k < encodings[i].size(); ++k)  // encodings are at scale 0.5
        sum += static_cast<double>(mine[at][k]) * static_cast<double>(encodings[i][k]) / 0.5;
      ++at;
    }
    EXPECT_EQ(at, mine.size());
    return all_reduce_value(world(), sum, ReduceOp::sum);
  };
  EXPECT_GT(expected, 1);
  EXPECT_NEAR(of_scale(GatherGradient::sum), expected, 1e-5 * expected);
  EXPECT_EQ(of_scale(GatherGradient::none), 0);
  if (world().size() > 1)
    EXPECT_LT(of_scale(GatherGradient::split), 0.9 * expected);
  else
    EXPECT_NEAR(of_scale(GatherGradient::split), expected, 1e-5 * expected);
}

TEST(EncoderGradient, WithoutItemsThereIsNone) {
  EXPECT_TRUE(encoder_gradient(world(), Items{}, GatherGradient::sum).empty());
}

}  // namespace GYRE_FILE
}  // namespace gyre
