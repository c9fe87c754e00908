#include "apps/pack/cuda_packing.hpp"

#include <map>

#include "packing/cuda_packing.hpp"
#include "sharding/cuda_gather.hpp"

namespace gyre {
namespace {

/// The tokens of some documents, in the order of their numbers: bins take them in another one.
struct Gathered {
  std::vector<int32_t> tokens;
  std::map<int64_t, int64_t> first;  ///< token of each document
};

Gathered documents_of_bins(const PackedHeader& header, int64_t first, int64_t last,
                           const TokenSource& tokens) {
  std::map<int64_t, int32_t> lengths;
  for (int64_t b = first; b < last; ++b) {
    const auto real = header.cu_seqlens(b);
    const auto documents = header.documents_of(b);
    for (size_t i = 0; i < documents.size(); ++i) lengths[documents[i]] = real[i + 1] - real[i];
  }
  Gathered gathered;
  for (const auto& [document, length] : lengths) {
    gathered.first[document] = std::ssize(gathered.tokens);
    for (int32_t p = 0; p < length; ++p) gathered.tokens.push_back(tokens(document, p));
  }
  return gathered;
}

template <class T>
std::vector<T> download(const Buffer<T>& from, Stream& stream) {
  std::vector<T> values(static_cast<size_t>(from.size()));
  stream.copy(values.data(), from.data(), values.size() * sizeof(T));
  stream.synchronize();
  return values;
}

}  // namespace

PackedSlots fill_slots_on_device(const PackedHeader& header, int64_t first, int64_t last,
                                 const TokenSource& tokens, Stream& stream) {
  const Gathered gathered = documents_of_bins(header, first, last, tokens);
  SegmentLists segments;
  for (int64_t b = first; b < last; ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    const auto documents = header.documents_of(b);
    for (size_t i = 0; i < documents.size(); ++i)
      segments.add(padded[i + 1] - padded[i], real[i + 1] - real[i],
                   gathered.first.at(documents[i]));
  }
  const DeviceSlots there = pack_slots_on_device(segments, gathered.tokens, stream);
  PackedSlots slots;
  slots.ids = download(there.ids, stream);
  slots.labels = download(there.labels, stream);
  slots.positions = download(there.positions, stream);
  return slots;
}

std::vector<float> gather_rows_on_device(std::span<const float> rows,
                                         std::span<const int32_t> sources, int64_t row,
                                         Stream& stream) {
  Buffer<float> from(std::ssize(rows), MemorySpace::device);
  Buffer<int32_t> map(std::ssize(sources), MemorySpace::device);
  Buffer<float> to(std::ssize(sources) * row, MemorySpace::device);
  stream.copy(from.data(), rows.data(), rows.size_bytes());
  stream.copy(map.data(), sources.data(), sources.size_bytes());
  gather_rows(stream, to.data(), from.data(), map.data(), map.size(), from.size() / row,
              row * static_cast<int64_t>(sizeof(float)), RowFill::of(0.0F));
  return download(to, stream);
}

}  // namespace gyre
