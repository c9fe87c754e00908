// Conversion of rows of text with audio.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "apps/common/array_output.hpp"
#include "apps/common/bshd_rows.hpp"
#include "apps/pack/inputs.hpp"
#include "comm/agree.hpp"
#include "core/index.hpp"
#include "packing/slot_packer.hpp"
#include "report/verify.hpp"
#include "sharding/encoder_work.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

/// The slots of a rank, segment by segment.
std::vector<int64_t> slots_of(const SalmPacked& packed, int cp, int rank) {
  std::vector<int64_t> slots;
  const SegmentBounds bounds = packed.bounds();
  for (int64_t i = 0; i < bounds.segments(); ++i)
    for (int64_t t = 0; t < bounds.slot_length(i) / cp; ++t)
      slots.push_back(cp == 1 ? bounds.begin(i) + t
                              : swapped_slot(bounds.begin(i), bounds.slot_length(i), cp, rank, t));
  return slots;
}

/// Checks the stream packed for cp ranks: each rank's embeddings, labels and positions must be
/// those of its slots by the definition of dual-chunk-swap (with cp = 1, of all slots). All ranks
/// together then hold every pair of an embedding and a label once. No communication.
void check_salm_shards(const SalmPacked& packed, int cp, Verification& checks) {
  LayoutOptions options;
  options.cp = cp;
  const Layout layout =
      cp > 1 ? dual_chunk_swap(packed.bounds(), options) : contiguous(packed.bounds(), options);
  Check& check = checks.check("shards of text and audio", 0);
  for (int rank = 0; rank < cp; ++rank) {
    const SalmShard shard = shard_salm(packed, layout, rank);
    std::vector<float> embeddings;
    std::vector<int64_t> labels, positions;
    for (const int64_t slot : slots_of(packed, cp, rank)) {
      const auto row = packed.embeddings.begin() + slot * packed.hidden;
      embeddings.insert(embeddings.end(), row, row + packed.hidden);
      labels.push_back(packed.labels[slot]);
      positions.push_back(packed.positions[slot]);
    }
    check.add_all(shard.embeddings, embeddings, fmt::format("rank {} embeddings", rank));
    check.add_all(shard.labels, labels, fmt::format("rank {} labels", rank));
    check.add_all(shard.positions, positions, fmt::format("rank {} positions", rank));
  }
}

constexpr std::pair<const char*, GatherGradient> conventions[] = {
    {"encoder gradient, sum", GatherGradient::sum},
    {"encoder gradient, split", GatherGradient::split},
    {"encoder gradient, none", GatherGradient::none},
};

/// The gradient on `rank`: small integers, so that sums over ranks are exact.
float gradient(int rank, size_t item, size_t element) {
  return static_cast<float>((rank + 1) * static_cast<int>((item * 31 + element) % 97 + 1));
}

/// The gradient that the encoder of `rank` gets by the definition of the convention.
float expected_gradient(GatherGradient convention, int rank, int ranks, size_t item,
                        size_t element) {
  if (convention == GatherGradient::none) return 0;
  if (convention == GatherGradient::split) return gradient(rank, item, element);
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += gradient(r, item, element);
  return sum;
}

/// The arrays of gyre/encoder. Gradients are those of the items that this rank encoded.
struct EncoderArrays {
  std::vector<float> d_frames;  ///< of all items
  std::map<GatherGradient, std::vector<float>> d_items;
};

/// Bytes that all ranks send in `work`. Collective.
template <class Work>
int64_t bytes_of_all(Communicator& world, const Work& work) {
  const int64_t before = world.traffic().bytes_sent;
  work();
  return all_reduce_value(world, world.traffic().bytes_sent - before, ReduceOp::sum);
}

/// Checks the gradients that a rank's encoder gets from gradients of all encodings `frames`
/// [items][frames, hidden]. For the items that the rank encoded they must be the sum over ranks
/// (GatherGradient::sum), the rank's own (split), or zero (none). The sum is a reduce-scatter, in
/// which each rank has as much as the largest share; for the others the ranks agree, and send
/// nothing else. Collective.
EncoderArrays check_encoder_gradients(const std::vector<std::vector<float>>& frames,
                                      Communicator& world, Verification& checks) {
  EncoderArrays arrays;
  std::vector<std::vector<float>> mine(frames.size());
  for (size_t i = 0; i < frames.size(); ++i)
    for (size_t e = 0; e < frames[i].size(); ++e) mine[i].push_back(gradient(world.rank(), i, e));
  for (const std::vector<float>& item : mine) append(arrays.d_frames, item);
  // Blocks have equally many items; the last ones may be shorter.
  const size_t ranks = world.size(), block = (frames.size() + ranks - 1) / ranks;
  const size_t first = std::min(frames.size(), world.rank() * block);
  const size_t last = std::min(frames.size(), first + block);
  std::map<size_t, int64_t> shares{{0, 0}};  // values of each rank
  for (size_t i = 0; i < frames.size(); ++i) shares[i / block] += std::ssize(frames[i]);
  int64_t largest = 0;
  for (const auto& [rank, values] : shares) largest = std::max(largest, values);
  Verification local(checks.tolerance_scale());
  std::map<GatherGradient, int64_t> sent;
  for (const auto& [name, convention] : conventions) {
    Check& check = local.check(name, 0);
    if (first == last) check.add_nothing();
    std::vector<std::vector<float>> encoder;
    sent[convention] =
        bytes_of_all(world, [&] { encoder = encoder_gradient(world, mine, convention); });
    std::vector<std::vector<float>> expected;
    for (size_t i = first; i < last; ++i) {
      std::vector<float>& item = expected.emplace_back();
      for (size_t e = 0; e < frames[i].size(); ++e)
        item.push_back(expected_gradient(convention, world.rank(), world.size(), i, e));
    }
    check.add(encoder.size(), expected.size(), [] { return "items"; });
    for (size_t i = 0; i < std::min(encoder.size(), expected.size()); ++i)
      check.add_all(encoder[i], expected[i], fmt::format("audio {}", first + i));
    for (const std::vector<float>& item : encoder) append(arrays.d_items[convention], item);
  }
  local.merge_over(world);
  checks.merge(local);
  Check& bytes = checks.check("encoder gradient bytes", 0);
  const int64_t agreement = sent[GatherGradient::none];
  bytes.add(sent[GatherGradient::split] - agreement, 0, [] { return "split"; });
  bytes.add(sent[GatherGradient::sum] - agreement,
            world.size() * (world.size() - 1) * largest * int64_t{sizeof(float)},
            [] { return "sum"; });
  return arrays;
}

/// Returns one frame, samples · encoder, for each full window of samples.
std::vector<float> encode_frames(const SalmArrays& batch, std::span<const float> samples,
                                 int64_t length) {
  const int64_t frames = length / batch.window;
  std::vector<float> out(frames * batch.hidden, 0);
  for (int64_t f = 0; f < frames; ++f)
    for (int64_t k = 0; k < batch.window; ++k)
      for (int64_t h = 0; h < batch.hidden; ++h)
        out[f * batch.hidden + h] +=
            samples[f * batch.window + k] * batch.encoder[k * batch.hidden + h];
  return out;
}

/// The audio as a rectangle; silence follows each item.
struct AudioRectangle {
  std::vector<float> samples;
  std::vector<int64_t> lengths;
  int64_t width = 0;
  explicit AudioRectangle(const SalmArrays& batch) {
    for (size_t i = 0; i + 1 < batch.audio_offsets.size(); ++i)
      lengths.push_back(batch.audio_offsets[i + 1] - batch.audio_offsets[i]);
    for (int64_t length : lengths) width = std::max(width, length);
    samples.assign(lengths.size() * static_cast<size_t>(width), 0);
    for (size_t i = 0; i < lengths.size(); ++i)
      std::copy_n(batch.samples.begin() + batch.audio_offsets[i], lengths[i],
                  samples.begin() + static_cast<std::ptrdiff_t>(i) * width);
  }
  AudioBatch view() const { return {{samples.data(), std::ssize(lengths), width}, lengths}; }
};

/// Bytes that all ranks send for encodings [items][frames, hidden], without agreements. Each rank
/// sends its block of items to all others: `padded`, dummies included, as long as the longest item,
/// which an all-reduce finds; else as they are. The number of values of each item goes with them.
int64_t gathered_bytes(const std::vector<std::vector<float>>& frames, GatherKind kind, int ranks) {
  if (frames.empty()) return 0;
  const int64_t others = ranks - 1, block = ceil_div(std::ssize(frames), ranks);
  int64_t longest = 0, values = 0;
  for (const std::vector<float>& item : frames) {
    longest = std::max(longest, std::ssize(item));
    values += std::ssize(item);
  }
  const int64_t sizes = ranks * others * block * int64_t{sizeof(int64_t)};
  if (kind == GatherKind::ragged) return sizes + others * values * int64_t{sizeof(float)};
  const int64_t all_reduce = ranks * (2 * others * int64_t{sizeof(int64_t)} / ranks);
  return sizes + all_reduce + ranks * others * block * longest * int64_t{sizeof(float)};
}

std::vector<std::vector<float>> encode_and_compare(const SalmArrays& batch, Communicator& world,
                                                   Verification& checks, std::string& notes) {
  const AudioRectangle audio(batch);
  const AudioEncoder encode = [&](std::span<const float> samples, int64_t length) {
    return encode_frames(batch, samples, length);
  };
  const auto moved = [&](GatherKind kind, const AudioBatch& items,
                         std::vector<std::vector<float>>& frames) {
    return bytes_of_all(world, [&] {
      frames = encode_distributed(world, items, encode, {batch.hidden, kind, nullptr});
    });
  };
  std::vector<std::vector<float>> padded, ragged, none;
  // A batch without items sends what the ranks agree with, and nothing else.
  const int64_t agreement = moved(GatherKind::padded, {}, none);
  const int64_t padded_bytes = moved(GatherKind::padded, audio.view(), padded) - agreement;
  const int64_t ragged_bytes = moved(GatherKind::ragged, audio.view(), ragged) - agreement;
  Check& check = checks.check("encodings", 0);
  std::vector<std::vector<float>> alone;
  for (size_t i = 0; i < audio.lengths.size(); ++i) {
    const auto samples =
        std::span(audio.samples).subspan(i * static_cast<size_t>(audio.width), audio.width);
    alone.push_back(encode_frames(batch, samples, audio.lengths[i]));
    for (const auto* gathered : {&padded[i], &ragged[i]})
      check.add_all(*gathered, alone[i], fmt::format("audio {}", i));
  }
  if (check.count() == 0) check.add_nothing();
  Check& bytes = checks.check("encoder bytes", 0);
  bytes.add(padded_bytes, gathered_bytes(alone, GatherKind::padded, world.size()),
            [] { return "padded"; });
  bytes.add(ragged_bytes, gathered_bytes(alone, GatherKind::ragged, world.size()),
            [] { return "ragged"; });
  notes = fmt::format(
      "# encoder {} audio items over {} ranks, {} each, dummies included; gathered padded {} B, "
      "ragged {} B (all ranks)\n",
      audio.lengths.size(), world.size(), ceil_div(std::ssize(audio.lengths), world.size()),
      padded_bytes, ragged_bytes);
  return ragged;
}

/// The file of all ranks' arrays, on rank 0. Collective.
ArrayFile encoder_file(const std::vector<std::vector<float>>& frames, int64_t hidden,
                       const EncoderArrays& mine, Communicator& world) {
  std::vector<int64_t> offsets{0}, counts;
  std::vector<int32_t> rank_of;
  std::vector<float> all;
  const int64_t block = ceil_div(std::ssize(frames), int64_t{world.size()});
  for (const std::vector<float>& item : frames) {
    rank_of.push_back(static_cast<int32_t>(std::ssize(rank_of) / block));
    offsets.push_back(offsets.back() + std::ssize(item) / hidden);
    append(all, item);
  }
  const h5::Shape shape{offsets.back(), hidden};
  ArrayFile file{encoder_schema, "/encoder", {{"ranks", world.size()}, {"hidden_size", hidden}}};
  const auto d_items = [&](GatherGradient convention) {
    const auto found = mine.d_items.find(convention);
    return gather_on_root(world, found == mine.d_items.end() ? std::vector<float>() : found->second,
                          counts);
  };
  file.arrays = {{"frame_offsets", {std::ssize(offsets)}, offsets},
                 {"encoder_rank", {std::ssize(rank_of)}, rank_of},
                 {"frames", shape, all},
                 {"d_frames",
                  {world.size(), offsets.back(), hidden},
                  rows_on_root(world, mine.d_frames, world.size())},
                 {"d_sum", shape, d_items(GatherGradient::sum)},
                 {"d_split", shape, d_items(GatherGradient::split)},
                 {"d_none", shape, d_items(GatherGradient::none)}};
  return file;
}

}  // namespace

double encoder_bytes(const SalmArrays& batch, int ranks) {
  double frames = 0;
  for (size_t i = 0; i + 1 < batch.audio_offsets.size(); ++i)
    frames += (batch.audio_offsets[i + 1] - batch.audio_offsets[i]) / batch.window;
  // Encodings and three gradients of theirs, and those of each rank.
  return frames * batch.hidden * (4.0 + ranks) * sizeof(float);
}

ConvertedBatch convert(const std::string& file, const SalmArrays& batch, const SalmJob& job,
                       Communicator& world, Verification& checks, Backend* backend) {
  const bool on_gpu = backend != nullptr && backend->on_gpu();
  const SalmOptions options{batch.pad_id, batch.placeholder_id, job.cp, job.tp, job.rounding};
  ConvertedBatch converted;
  Communicator& links = on_gpu ? backend->host_staging() : world;
  const std::vector<std::vector<float>> frames =
      encode_and_compare(batch, links, checks, converted.notes);
  const EncoderArrays arrays = check_encoder_gradients(frames, links, checks);
  if (job.keep_encoder) converted.encoder = encoder_file(frames, batch.hidden, arrays, links);
  run_on_file(world, file, [&] {
    std::vector<MatrixView<const float>> audio;
    for (const std::vector<float>& item : frames)
      audio.push_back({item.data(), std::ssize(item) / batch.hidden, batch.hidden});
    SalmPacked packed;
    Repeats times(job.repeats, nullptr);
    while (times.next())
      times.time([&] {
        packed = pack_salm(
            {batch.rows, batch.hidden, batch.ids, batch.embeddings, batch.targets, audio}, options);
      });
    check_salm_shards(packed, options.cp, checks);
    PackedHeader& header = converted.header;
    header.slot_multiple = options.cp > 1 ? 2 * options.cp : 1;
    header.vocab_size = batch.vocab_size;
    header.hidden_size = batch.hidden;
    header.tokenizer = "unknown";
    header.algorithm = "salm";
    add_stream(converted, packed.cu_seqlens, packed.cu_seqlens_padded, packed.slots());
    converted.slots.embeddings = packed.embeddings;
    converted.slots.labels = narrow(packed.labels);
    converted.slots.positions = narrow(packed.positions);
    converted.row = measured_row(header, "salm");
    set_times(converted.row, times, job.repeats);
    std::vector<float> rows = batch.embeddings;
    for (const std::vector<float>& item : frames) append(rows, item);
    converted.gathered_slots = converted.slots;
    HostStream host;
    Stream& stream = backend == nullptr ? host : backend->stream();
    converted.gathered_slots->embeddings =
        gather_embeddings(rows, packed.sources, batch.hidden, stream);
  });
  return converted;
}

}  // namespace gyre
