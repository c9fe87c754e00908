#include "apps/pack/more_labels.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"
#include "packing/labels_ahead.hpp"

namespace gyre {
namespace {

std::vector<std::byte> bytes_of(std::span<const int32_t> values) {
  const auto bytes = std::as_bytes(values);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void describe_more_labels(const PackOptions& o, PackedHeader& header) {
  for (int depth = 2; depth <= o.mtp; ++depth) {
    StoredExtra stored;
    stored.extra = {Extra::Aligned::slots, sizeof(int32_t), nullptr, bytes_of({&ignored_label, 1})};
    stored.type = h5::stored_type_of(h5::Type::i32);
    if (!header.extras.emplace(labels_ahead_name(depth), std::move(stored)).second)
      throw_usage("--mtp {}: '{}' has the extra {} already; leave --mtp out, or the extra", o.mtp,
                  o.input, labels_ahead_name(depth));
  }
}

void add_more_labels(const PackOptions& o, const PackedHeader& header, int64_t first, int64_t last,
                     PackedSlots& slots, Verification* checks) {
  if (o.mtp < 2) return;
  for (int depth = 2; depth <= o.mtp; ++depth)
    slots.extras[labels_ahead_name(depth)] = {sizeof(int32_t), {}, bytes_of({&ignored_label, 1})};
  const std::vector<int64_t> offsets = header.slot_offsets();
  for (int64_t b = first; b < last; ++b) {
    const SegmentBounds bounds{header.cu_seqlens(b), header.cu_seqlens_padded(b)};
    const auto labels =
        std::span(slots.labels).subspan(offsets[b] - offsets[first], bounds.slots());
    const auto ahead = labels_ahead(
        bounds, labels, o.mtp, fmt::format("{}, bin {}", o.input.empty() ? "--gen" : o.input, b));
    for (int depth = 2; depth <= o.mtp; ++depth) {
      const std::string name = labels_ahead_name(depth);
      const std::vector<int32_t>& mine = ahead[depth - 2];
      std::vector<std::byte>& all = slots.extras.at(name).bytes;
      const std::vector<std::byte> bytes = bytes_of(mine);
      all.insert(all.end(), bytes.begin(), bytes.end());
      if (checks == nullptr) continue;
      Check& check = checks->check(name, 0);
      if (mine.empty()) check.add_nothing();
      check.add_all(mine, labels_ahead_reference(bounds, labels, depth),
                    fmt::format("bin {} {}", b, name));
    }
  }
}

void add_more_labels(const PackOptions& o, PackedHeader& header, PackedSlots& slots,
                     Verification* checks) {
  describe_more_labels(o, header);
  add_more_labels(o, header, 0, header.bin_count(), slots, checks);
}

}  // namespace gyre
