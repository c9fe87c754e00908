#include "apps/pack/streams.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre {
namespace {

std::vector<int64_t> widths(std::span<const int32_t> bounds) {
  std::vector<int64_t> lengths;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) lengths.push_back(bounds[i + 1] - bounds[i]);
  return lengths;
}

/// Checks that documents begin at their multiples and that streams have the requested lengths.
void check_rounded(Check& check, const RoundedStream& stream, const std::vector<int64_t>& lengths,
                   const RoundOptions& options, int64_t bin) {
  int64_t needed = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto where = [&] { return fmt::format("stream {} segment {}", bin, i); };
    check.add(stream.cu_seqlens[i + 1] - stream.cu_seqlens[i], lengths[i], where);
    check.add(stream.cu_seqlens_padded[i], needed, where);
    needed += (lengths[i] + options.multiple - 1) / options.multiple * options.multiple;
  }
  const int64_t unit = options.stream_multiple;
  const int64_t slots =
      options.stream_slots > 0 ? options.stream_slots : (needed + unit - 1) / unit * unit;
  check.add(stream.cu_seqlens_padded.back(), slots,
            [&] { return fmt::format("slots of stream {}", bin); });
}

/// One bin out of all slots, without its padding.
struct Gapless {
  std::vector<int64_t> ids, labels;
};
Gapless without_padding(const PackedHeader& header, const PackedSlots& slots, int64_t bin) {
  const auto real = header.cu_seqlens(bin), padded = header.cu_seqlens_padded(bin);
  const int64_t first = header.slot_offsets()[bin];
  Gapless stream;
  for (size_t i = 0; i + 1 < real.size(); ++i)
    for (int64_t t = first + padded[i]; t < first + padded[i] + real[i + 1] - real[i]; ++t) {
      stream.ids.push_back(slots.ids[t]);
      stream.labels.push_back(slots.labels[t]);
    }
  return stream;
}

/// Moves the extras of a bin's real tokens to its segments `to`; padding holds zeros.
void move_extras(const PackedHeader& header, const PackedSlots& slots, int64_t bin,
                 std::span<const int32_t> to, PackedSlots& repadded) {
  const auto real = header.cu_seqlens(bin), from = header.cu_seqlens_padded(bin);
  const int64_t first = header.slot_offsets()[bin];
  for (const auto& [name, extra] : slots.extras) {
    ExtraSlots& moved = repadded.extras[name];
    const int64_t width = moved.item_bytes = extra.item_bytes, begin = std::ssize(moved.bytes);
    moved.bytes.resize(begin + to.back() * width);
    for (size_t i = 0; i + 1 < real.size(); ++i)
      std::copy_n(extra.bytes.begin() + (first + from[i]) * width, (real[i + 1] - real[i]) * width,
                  moved.bytes.begin() + begin + to[i] * width);
  }
}

/// Checks the extras of one slot: those of the old slot if `held`, else zeros.
void check_moved_extras(Check& check, const PackedSlots& slots, const PackedSlots& repadded,
                        bool held, size_t there, size_t here) {
  for (const auto& [name, extra] : slots.extras) {
    const std::vector<std::byte>& moved = repadded.extras.at(name).bytes;
    const size_t width = extra.item_bytes;
    for (size_t k = 0; k < width; ++k)
      check.add(static_cast<double>(moved[here * width + k]),
                held ? static_cast<double>(extra.bytes[there * width + k]) : 0, [&, &name = name] {
                  return fmt::format("extra {} slot {} byte {}", name, here, k);
                });
  }
}

/// Checks every slot: the segment's old content, then padding; positions start at 0 and continue.
void check_repadded(Check& check, const PackedHeader& header, const PackedSlots& slots,
                    const RepaddedStreams& repadded) {
  const std::vector<int64_t> old_first = header.slot_offsets();
  const std::vector<int64_t> new_first = repadded.header.slot_offsets();
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), from = header.cu_seqlens_padded(b);
    const auto to = repadded.header.cu_seqlens_padded(b);
    for (size_t i = 0; i + 1 < to.size(); ++i)
      for (int64_t p = 0; p < to[i + 1] - to[i]; ++p) {
        const bool held = p < real[i + 1] - real[i];
        const size_t there = old_first[b] + from[i] + p;
        const size_t here = new_first[b] + to[i] + p;
        const auto where = [&] { return fmt::format("bin {} segment {} slot {}", b, i, p); };
        check.add(repadded.slots.ids[here], held ? slots.ids[there] : 0, where);
        check.add(repadded.slots.labels[here], held ? slots.labels[there] : ignored_label, where);
        check.add(repadded.slots.positions[here], p, where);
        check_moved_extras(check, slots, repadded.slots, held, there, here);
      }
  }
}

}  // namespace

void round_streams(PackedHeader& header, const RoundOptions& options, Verification& checks) {
  Check& check = checks.check("rounded streams", 0);
  if (header.bin_count() == 0) check.add_nothing();
  PackedBins bins;
  bins.bin_capacity = header.bins.bin_capacity;
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const std::vector<int64_t> lengths = widths(header.cu_seqlens(b));
    RoundedStream stream;
    try {
      stream = round_sequences(lengths, options);
    } catch (const Error& error) {
      throw_usage("stream {}: {}", b, error.what());
    }
    check_rounded(check, stream, lengths, options, b);
    std::vector<int64_t> documents(header.documents_of(b).begin(), header.documents_of(b).end());
    if (documents.size() + 1 < stream.cu_seqlens.size()) {
      if (!header.names.empty()) header.names.push_back(fmt::format("padding of stream {}", b));
      documents.push_back(header.documents++);
    }
    bins.add_bin(documents, stream.cu_seqlens, stream.cu_seqlens_padded);
    bins.bin_capacity = std::max<int64_t>(bins.bin_capacity, stream.cu_seqlens_padded.back());
  }
  header.bins = std::move(bins);
}

RepaddedStreams repad_streams(const PackedHeader& header, const PackedSlots& slots,
                              int64_t multiple, Verification& checks) {
  if (header.hidden_size > 0)
    throw_usage("--repad pads ids; these streams hold embeddings of {}", header.hidden_size);
  if (!header.bins.prefixes.empty())
    throw_usage(
        "--repad pads documents; these streams hold trees of them (--share-prefixes): unpack them, "
        "and pack them for another --cp");
  RepaddedStreams result;
  result.header = header;
  result.header.bins = {};
  result.header.slot_multiple = multiple;
  const auto append = [](std::vector<int32_t>& all, const std::vector<int64_t>& part) {
    for (const int64_t value : part) all.push_back(static_cast<int32_t>(value));
  };
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const Gapless stream = without_padding(header, slots, b);
    const auto real = header.cu_seqlens(b);
    const PaddedSequences padded = pad_thd_sequences(stream.ids, stream.labels, real, multiple);
    const std::vector<int64_t> documents(header.documents_of(b).begin(),
                                         header.documents_of(b).end());
    PackedBins& bins = result.header.bins;
    bins.add_bin(documents, real, padded.cu_seqlens_padded);
    bins.bin_capacity = std::max<int64_t>(bins.bin_capacity, padded.cu_seqlens_padded.back());
    append(result.slots.ids, padded.ids);
    append(result.slots.labels, padded.labels);
    append(result.slots.positions, packed_positions(padded.cu_seqlens_padded));
    move_extras(header, slots, b, result.header.cu_seqlens_padded(b), result.slots);
  }
  Check& check = checks.check("repadded", 0);
  if (result.slots.ids.empty()) check.add_nothing();
  check_repadded(check, header, slots, result);
  return result;
}

}  // namespace gyre
