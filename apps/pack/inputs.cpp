#include "apps/pack/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "apps/common/bshd_rows.hpp"
#include "apps/common/extras.hpp"
#include "comm/agree.hpp"
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

/// Checks the gradients that a rank's encoder gets from gradients of all encodings `frames`
/// [items][frames, hidden]. For the items that the rank encoded they must be the sum over ranks
/// (GatherGradient::sum), the rank's own (split), or zero (none). Collective.
void check_encoder_gradients(const std::vector<std::vector<float>>& frames, Communicator& world,
                             Verification& checks) {
  std::vector<std::vector<float>> mine(frames.size());
  for (size_t i = 0; i < frames.size(); ++i)
    for (size_t e = 0; e < frames[i].size(); ++e) mine[i].push_back(gradient(world.rank(), i, e));
  // Blocks have equally many items; the last ones may be shorter.
  const size_t block =
      (frames.size() + static_cast<size_t>(world.size()) - 1) / static_cast<size_t>(world.size());
  const size_t first = std::min(frames.size(), static_cast<size_t>(world.rank()) * block);
  const size_t last = std::min(frames.size(), first + block);
  Verification local(checks.tolerance_scale());
  for (const auto& [name, convention] : conventions) {
    Check& check = local.check(name, 0);
    if (first == last) check.add_nothing();
    const auto encoder = encoder_gradient(world, mine, convention);
    std::vector<std::vector<float>> expected;
    for (size_t i = first; i < last; ++i) {
      std::vector<float>& item = expected.emplace_back();
      for (size_t e = 0; e < frames[i].size(); ++e)
        item.push_back(expected_gradient(convention, world.rank(), world.size(), i, e));
    }
    check.add(encoder.size(), expected.size(), [] { return "items"; });
    for (size_t i = 0; i < std::min(encoder.size(), expected.size()); ++i)
      check.add_all(encoder[i], expected[i], fmt::format("audio {}", first + i));
  }
  local.merge_over(world);
  checks.merge(local);
}

/// Converts ids, labels or positions to the type of packed files. Readers have checked their range.
std::vector<int32_t> narrow(const std::vector<int64_t>& values) {
  std::vector<int32_t> narrow;
  narrow.reserve(values.size());
  for (const int64_t value : values) narrow.push_back(static_cast<int32_t>(value));
  return narrow;
}

template <class T, class U>
void append(std::vector<T>& all, const std::vector<U>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

/// Appends one stream as a bin and continues the numbering of segments. Slots after the last
/// segment become a segment without tokens, so that every slot is in a segment.
void add_stream(ConvertedBatch& batch, std::vector<int32_t> real, std::vector<int32_t> padded,
                int64_t slots) {
  PackedHeader& header = batch.header;
  if (padded.back() < slots) {
    real.push_back(real.back());
    padded.push_back(static_cast<int32_t>(slots));
  }
  std::vector<int64_t> documents(real.size() - 1);
  for (int64_t& document : documents) document = header.documents++;
  header.bins.add_bin(documents, real, padded);
  header.bins.bin_capacity = std::max(header.bins.bin_capacity, slots);
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
        batch, std::span(audio.samples).subspan(i * static_cast<size_t>(audio.width), audio.width),
        audio.lengths[i]);
    for (const auto* gathered : {&padded[i], &ragged[i]})
      check.add_all(*gathered, alone, fmt::format("audio {}", i));
  }
  if (check.count() == 0) check.add_nothing();
  notes = fmt::format(
      "# encoder {} audio items over {} ranks, {} each, dummies included; gathered padded {} B, "
      "ragged {} B (all ranks)\n",
      audio.lengths.size(), world.size(), ceil_div(std::ssize(audio.lengths), world.size()),
      padded_bytes, ragged_bytes);
  return ragged;
}

/// Appends the extras of a stream to those of the streams before it.
void append_extras(ConvertedBatch& batch, const Extras& extras, const StoredExtras& of_file) {
  for (const auto& [name, extra] : extras) {
    const auto [known, is_first] = batch.header.extras.emplace(name, of_file.at(name));
    Extra& all = known->second.extra;
    if (extra.aligned == Extra::Aligned::none) continue;
    if (extra.aligned == Extra::Aligned::slots) {
      all.bytes = nullptr;
      ExtraSlots& slots = batch.slots.extras[name];
      slots.item_bytes = extra.item_bytes;
      slots.fill = extra.fill;
      append(slots.bytes, *extra.bytes);
      continue;
    }
    std::vector<std::byte> rows;
    if (!is_first) rows = *all.bytes;
    append(rows, *extra.bytes);
    all.bytes = std::make_shared<const std::vector<std::byte>>(std::move(rows));
  }
}

/// Checks that extras equal the file's. Slot t is slot t mod S of row t / S (S slots a row).
void check_extras(Check& check, const BshdArrays& batch, const ConvertedBatch& converted) {
  for (const auto& [name, stored] : batch.extras) {
    const std::vector<std::byte>& from = *stored.extra.bytes;
    if (stored.extra.aligned != Extra::Aligned::slots) {
      compare_bytes(check, *converted.header.extras.at(name).extra.bytes, from, name);
      continue;
    }
    const std::vector<std::byte>& slots = converted.slots.extras.at(name).bytes;
    const size_t width = stored.extra.item_bytes;
    const size_t row_slots = batch.slots;
    if (slots.size() != from.size()) {
      check.add_failure(fmt::format("{}: {} bytes, not {}", name, slots.size(), from.size()));
      continue;
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t t = i / width, row = t / row_slots, slot = t % row_slots;
      check.add(static_cast<double>(slots[i]),
                static_cast<double>(from[(row * row_slots + slot) * width + i % width]),
                [&, &name = name] {
                  return fmt::format("{} row {} slot {} byte {}", name, row, slot, i % width);
                });
    }
  }
  if (check.count() == 0) check.add_nothing();
}

/// Checks that positions equal the file's on each axis. Slot t is slot t mod S of row t / S.
void check_positions(Check& check, const BshdArrays& batch, const PackedSlots& slots) {
  if (slots.positions.size() != batch.positions.size())
    return check.add_failure(
        fmt::format("{} positions, not {}", slots.positions.size(), batch.positions.size()));
  for (int64_t axis = 0; axis < batch.position_axes; ++axis)
    for (int64_t row = 0; row < batch.rows; ++row)
      for (int64_t t = 0; t < batch.slots; ++t) {
        const int64_t slot = row * batch.slots + t;
        check.add(slots.positions[slot * batch.position_axes + axis],
                  batch.positions[(axis * batch.rows + row) * batch.slots + t],
                  [&] { return fmt::format("axis {} row {} slot {}", axis, row, t); });
      }
  if (check.count() == 0) check.add_nothing();
}

/// Checks the documents of rows without tables: the ids before the padding at the end of each row.
void check_documents(Check& check, const BshdArrays& batch, const PackedHeader& header) {
  std::vector<int64_t> expected, tokens(batch.rows, 0);
  for (int64_t row = 0; row < batch.rows; ++row) {
    int64_t end = batch.slots;
    while (end > 0 && batch.ids[row * batch.slots + end - 1] == *batch.pad_id) --end;
    expected.push_back(end);
  }
  const std::vector<int64_t> first = header.slot_offsets();
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    for (size_t i = 0; i + 1 < real.size(); ++i) {
      if (real[i + 1] == real[i]) continue;
      const int64_t slot = first[b] + padded[i];
      tokens[slot / batch.slots] += real[i + 1] - real[i];
      check.add(slot % batch.slots, 0,
                [&] { return fmt::format("begin of stream {} segment {}", b, i); });
    }
  }
  check.add_all(tokens, expected, "tokens of row");
  if (check.count() == 0) check.add_nothing();
}

ConvertedBatch convert_rows(const BshdArrays& batch, int64_t chunks, const ThdOptions& options) {
  BshdBatch input = batch_of(batch);
  if (!input.seq_lens) add_tables_of_rows(input, batch, chunks);
  ConvertedBatch converted;
  converted.header.slot_multiple = options.slot_multiple;
  converted.header.vocab_size = batch.vocab_size;
  converted.header.hidden_size = batch.hidden;
  converted.header.position_axes = batch.position_axes;
  converted.header.tokenizer = "unknown";
  converted.header.algorithm = "bshd";
  int64_t real_tokens = 0, supervised = 0;
  const std::vector<ThdBatch> streams = split_into_chunks(input, chunks, options);
  check_labels(batch);
  // Puts the boundaries of all streams in one table, like the micro-batches of a pipeline. Its rows
  // end in sentinels, which are stripped before use.
  const ChunkBounds stacked = stack_chunk_bounds(streams);
  for (size_t c = 0; c < streams.size(); ++c) {
    const ThdBatch& stream = streams[c];
    const int64_t chunk = c;
    const auto real = strip_sentinels(stacked.cu_seqlens.row(chunk));
    const auto padded =
        stacked.cu_seqlens_padded ? strip_sentinels(stacked.cu_seqlens_padded->row(chunk)) : real;
    const SegmentBounds bounds{real, padded};
    add_stream(converted, {real.begin(), real.end()}, {padded.begin(), padded.end()}, stream.slots);
    PackedSlots& slots = converted.slots;
    append(slots.labels, narrow(stream.labels));
    append(slots.positions,
           transposed(narrow(stream.positions->values), batch.position_axes, stream.slots));
    if (const auto* ids = std::get_if<TokenIds>(&stream.inputs))
      append(slots.ids, narrow(*ids));
    else
      append(slots.embeddings, std::get<TokenEmbeddings>(stream.inputs).values);
    append_extras(converted, stream.extras, batch.extras);
    real_tokens += count_real_tokens(stream.padding_mask);
    supervised += count_supervised_tokens(stream.labels);
    converted.notes += fmt::format(
        "# stream {}: {} segments, {} slots, max_seqlen {}{}\n", converted.header.bin_count() - 1,
        bounds.segments(), stream.slots, stacked.max_seqlen[c],
        stream.absorbed ? ", trailing padding absorbed by the last segment" : "");
  }
  converted.row = measured_row(converted.header, "bshd");
  converted.notes += fmt::format("# tokens {} real by the padding mask, {} with a label\n",
                                 real_tokens, supervised);
  converted.notes += extras_text(batch.extras);
  return converted;
}

/// Runs `work` on every rank. Its errors name `file`.
void run_on_file(Communicator& world, const std::string& file, const std::function<void()>& work) {
  run_agreed(world, "converting " + file, [&] {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      throw_usage("'{}': {}", file, error.what());
    }
  });
}

}  // namespace

ConvertedBatch convert(const std::string& file, const BshdArrays& batch, int64_t chunks,
                       int64_t slot_multiple, const std::string& tail, Communicator& world) {
  ThdOptions options;
  options.sentinel = batch.sentinel;
  options.slot_multiple = slot_multiple;
  options.tail = tail_of(batch, tail);
  ConvertedBatch converted;
  run_on_file(world, file, [&] { converted = convert_rows(batch, chunks, options); });
  return converted;
}

void check_converted(const BshdArrays& batch, const ConvertedBatch& converted,
                     Verification& checks) {
  if (!batch.extras.empty()) check_extras(checks.check("extras", 0), batch, converted);
  if (batch.position_axes > 1)
    check_positions(checks.check("positions of axes", 0), batch, converted.slots);
  if (!batch.seq_lens)
    check_documents(checks.check("documents of rows", 0), batch, converted.header);
}

ConvertedBatch convert(const std::string& file, const SalmArrays& batch, int cp, int tp,
                       Communicator& world, Verification& checks, Backend* backend) {
  const bool on_gpu = backend != nullptr && backend->on_gpu();
  const SalmOptions options{batch.pad_id, batch.placeholder_id, cp, tp, TpRounding::per_rank};
  ConvertedBatch converted;
  Communicator& links = on_gpu ? backend->host_staging() : world;
  const std::vector<std::vector<float>> frames =
      encode_and_compare(batch, links, checks, converted.notes);
  check_encoder_gradients(frames, links, checks);
  run_on_file(world, file, [&] {
    std::vector<MatrixView<const float>> audio;
    for (const std::vector<float>& item : frames)
      audio.push_back({item.data(), std::ssize(item) / batch.hidden, batch.hidden});
    const SalmPacked packed = pack_salm(
        {batch.rows, batch.hidden, batch.ids, batch.embeddings, batch.targets, audio}, options);
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
    std::vector<float> rows = batch.embeddings;
    for (const std::vector<float>& item : frames) append(rows, item);
    converted.gathered_slots = converted.slots;
    HostStream host;
    const auto packer = make_slot_packer(backend == nullptr ? host : backend->stream());
    converted.gathered_slots->embeddings = packer->gather(rows, packed.sources, batch.hidden);
  });
  return converted;
}

}  // namespace gyre
