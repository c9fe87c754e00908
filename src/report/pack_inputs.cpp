#include "report/pack_inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "sharding/encoder_work.hpp"

namespace gyre {
namespace {

/// Ids or labels as files hold them. Throws a usage error for one outside the vocabulary.
std::vector<int32_t> narrow(std::span<const int64_t> values, int64_t limit, bool may_be_ignored,
                            const char* what) {
  std::vector<int32_t> narrow;
  narrow.reserve(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const bool good =
        (values[i] >= 0 && values[i] < limit) || (may_be_ignored && values[i] == ignored_label);
    if (!good)
      throw_usage("{} of slot {} is {}; it must be 0 to {}{}", what, i, values[i], limit - 1,
                  may_be_ignored ? fmt::format(", or {}", ignored_label) : "");
    narrow.push_back(static_cast<int32_t>(values[i]));
  }
  return narrow;
}

template <class T, class U>
void append(std::vector<T>& all, const std::vector<U>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

/// Appends one stream as a bin; its segments are numbered on.
void add_stream(ConvertedBatch& batch, std::span<const int32_t> real,
                std::span<const int32_t> padded) {
  PackedHeader& header = batch.header;
  std::vector<int64_t> documents(real.size() - 1);
  for (int64_t& document : documents) document = header.documents++;
  header.bins.add_bin(documents, real, padded);
  header.bins.bin_capacity = std::max<int64_t>(header.bins.bin_capacity, padded.back());
}

/// The row of the table for streams whose slots are given.
void measure(ConvertedBatch& batch, const std::string& algorithm) {
  const PackedHeader& header = batch.header;
  std::vector<int64_t> lengths;
  std::vector<Bin> bins;
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b);
    Bin& bin = bins.emplace_back();
    for (size_t i = 0; i + 1 < real.size(); ++i) {
      bin.push_back(std::ssize(lengths));
      lengths.push_back(real[i + 1] - real[i]);
    }
  }
  PackingRow& row = batch.row;
  const int64_t capacity = std::max<int64_t>(1, header.bins.bin_capacity);
  row.algorithm = algorithm;
  row.items = std::ssize(lengths);
  row.measures = measure_bins(bins, lengths, capacity);
  row.longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const int64_t slots = header.slot_offsets().back(), all = header.bin_count() * capacity;
  row.measures.padding = slots - row.measures.tokens;
  row.measures.waste = all - slots;
  row.measures.utilisation = all > 0 ? static_cast<double>(slots) / static_cast<double>(all) : 0;
  row.measures.waste_ratio = 1 - row.measures.utilisation;
  row.time_ms = std::nan("");  // nothing was packed
  row.check = "-";
}

/// One frame for each full window of samples: samples · encoder.
std::vector<float> encode_frames(const SalmArrays& batch, std::span<const float> samples,
                                 int64_t length) {
  const int64_t frames = length / batch.window;
  std::vector<float> out(static_cast<size_t>(frames * batch.hidden), 0);
  for (int64_t f = 0; f < frames; ++f)
    for (int64_t k = 0; k < batch.window; ++k)
      for (int64_t h = 0; h < batch.hidden; ++h)
        out[static_cast<size_t>(f * batch.hidden + h)] +=
            samples[static_cast<size_t>(f * batch.window + k)] *
            batch.encoder[static_cast<size_t>(k * batch.hidden + h)];
  return out;
}

/// The audio as a rectangle, silence behind each item.
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

std::vector<std::vector<float>> encode_and_compare(const SalmArrays& batch, Communicator& world,
                                                   Verification& checks, std::string& notes) {
  const AudioRectangle audio(batch);
  const AudioEncoder encode = [&](std::span<const float> samples, int64_t length) {
    return encode_frames(batch, samples, length);
  };
  const auto moved = [&](GatherKind kind, std::vector<std::vector<float>>& frames) {
    const int64_t before = world.traffic().bytes_sent;
    frames = encode_distributed(world, audio.view(), encode, {batch.hidden, kind, nullptr});
    return all_reduce_value(world, world.traffic().bytes_sent - before, ReduceOp::sum);
  };
  std::vector<std::vector<float>> padded, ragged;
  const int64_t padded_bytes = moved(GatherKind::padded, padded);
  const int64_t ragged_bytes = moved(GatherKind::ragged, ragged);
  Check& check = checks.check("encodings", 0);
  for (size_t i = 0; i < audio.lengths.size(); ++i) {
    const auto alone = encode_frames(
        batch,
        std::span(audio.samples)
            .subspan(i * static_cast<size_t>(audio.width), static_cast<size_t>(audio.width)),
        audio.lengths[i]);
    for (const auto* gathered : {&padded[i], &ragged[i]}) {
      if (gathered->size() != alone.size())
        check.add_failure(
            fmt::format("audio {}: {} values, not {}", i, gathered->size(), alone.size()));
      else
        for (size_t k = 0; k < alone.size(); ++k)
          check.add(static_cast<double>((*gathered)[k]), static_cast<double>(alone[k]),
                    [&] { return fmt::format("audio {} value {}", i, k); });
    }
  }
  if (check.count() == 0) check.add(0, 0, [] { return ""; });
  notes = fmt::format(
      "# encoder {} audio items over {} ranks, {} each, dummies included; gathered padded {} B, "
      "ragged {} B (all ranks)\n",
      audio.lengths.size(), world.size(), ceil_div(std::ssize(audio.lengths), world.size()),
      padded_bytes, ragged_bytes);
  return ragged;
}

}  // namespace

ConvertedBatch convert(const BshdArrays& batch, int64_t chunks, const ThdOptions& options) {
  const LengthTable real{batch.rows, batch.segments_per_row, batch.seq_lens};
  const LengthTable padded{batch.rows, batch.segments_per_row, batch.seq_lens_padded};
  BshdBatch input;
  input.rows = batch.rows;
  input.slots = batch.slots;
  if (batch.hidden == 0)
    input.inputs = batch.ids;
  else
    input.inputs = TokenEmbeddings{batch.hidden, batch.embeddings};
  input.labels = batch.labels;
  input.positions = PositionIds{1, batch.positions};
  input.seq_lens = real;
  input.seq_lens_padded = padded;

  ConvertedBatch converted;
  converted.header.slot_multiple = options.slot_multiple;
  converted.header.vocab_size = batch.vocab_size;
  converted.header.hidden_size = batch.hidden;
  converted.header.tokenizer = "unknown";
  converted.header.algorithm = "bshd";
  int64_t real_tokens = 0, supervised = 0;
  for (const ThdBatch& stream : split_into_chunks(input, chunks, options)) {
    const SegmentBounds bounds = stream.bounds();
    add_stream(converted, bounds.real, bounds.padded);
    PackedSlots& slots = converted.slots;
    append(slots.labels, narrow(stream.labels, batch.vocab_size, true, "the label"));
    append(slots.positions,
           narrow(stream.positions->values, int64_t{1} << 31, false, "the position"));
    if (const auto* ids = std::get_if<TokenIds>(&stream.inputs))
      append(slots.ids, narrow(*ids, batch.vocab_size, false, "the id"));
    else
      append(slots.embeddings, std::get<TokenEmbeddings>(stream.inputs).values);
    real_tokens += count_real_tokens(stream.padding_mask);
    supervised += count_supervised_tokens(stream.labels);
    converted.notes += fmt::format(
        "# stream {}: {} segments, {} slots, max_seqlen {}{}\n", converted.header.bin_count() - 1,
        bounds.segments(), stream.slots, *stream.max_seqlen,
        stream.absorbed ? ", trailing padding absorbed by the last segment" : "");
  }
  measure(converted, "bshd");
  converted.notes += fmt::format("# tokens {} real by the padding mask, {} with a label\n",
                                 real_tokens, supervised);
  return converted;
}

ConvertedBatch convert(const SalmArrays& batch, const SalmOptions& options, Communicator& world,
                       Verification& checks) {
  ConvertedBatch converted;
  const std::vector<std::vector<float>> frames =
      encode_and_compare(batch, world, checks, converted.notes);
  run_agreed(world, "packing utterances", [&] {
    std::vector<MatrixView<const float>> audio;
    for (const std::vector<float>& item : frames)
      audio.push_back({item.data(), std::ssize(item) / batch.hidden, batch.hidden});
    const SalmPacked packed = pack_salm(
        {batch.rows, batch.hidden, batch.ids, batch.embeddings, batch.targets, audio}, options);
    PackedHeader& header = converted.header;
    header.slot_multiple = options.cp > 1 ? 2 * options.cp : 1;
    header.vocab_size = batch.vocab_size;
    header.hidden_size = batch.hidden;
    header.tokenizer = "unknown";
    header.algorithm = "salm";
    add_stream(converted, packed.cu_seqlens, packed.cu_seqlens_padded);
    converted.slots.embeddings = packed.embeddings;
    converted.slots.labels = narrow(packed.labels, batch.vocab_size, true, "the label");
    converted.slots.positions = narrow(packed.positions, int64_t{1} << 31, false, "the position");
    measure(converted, "salm");
  });
  return converted;
}

}  // namespace gyre
