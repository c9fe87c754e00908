#include "apps/shard/slots.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

namespace gyre {

PackedSlots blank_like(const PackedSlots& bin) {
  PackedSlots blank;
  for (const auto& [name, array] : slot_arrays) (blank.*array).assign((bin.*array).size(), -7777);
  blank.embeddings.assign(bin.embeddings.size(), -7777);
  for (const auto& [name, extra] : bin.extras) {
    blank.extras[name] = extra;
    for (std::byte& byte : blank.extras[name].bytes) byte = ~byte;
  }
  return blank;
}

PackedSlots part_of(const PackedSlots& all, int64_t begin, int64_t count, int64_t hidden_size) {
  PackedSlots part;
  const auto cut = [](const auto& from, auto& to, int64_t first, int64_t n) {
    if (!from.empty()) to.assign(from.begin() + first, from.begin() + first + n);
  };
  for (const auto& [name, array] : slot_arrays) {
    const int64_t width = width_of(array, all);
    cut(all.*array, part.*array, begin * width, count * width);
  }
  cut(all.embeddings, part.embeddings, begin * hidden_size, count * hidden_size);
  for (const auto& [name, extra] : all.extras) {
    ExtraSlots& mine = part.extras[name];
    mine.item_bytes = extra.item_bytes;
    mine.fill = extra.fill;
    cut(extra.bytes, mine.bytes, begin * extra.item_bytes, count * extra.item_bytes);
  }
  return part;
}

PackedSlots moved_to(const BinBounds& to, const PackedHeader& header, int64_t bin,
                     const PackedSlots& from) {
  const auto padded = header.cu_seqlens_padded(bin);
  const size_t hidden = header.hidden_size;
  const size_t slots = to.padded.back();
  const size_t axes = from.position_axes();
  if (std::equal(padded.begin(), padded.end(), to.padded.begin())) return from;
  PackedSlots moved;
  if (hidden == 0) moved.ids.assign(slots, 0);
  moved.labels.assign(slots, ignored_label);
  moved.embeddings.assign(slots * hidden, 0);
  for (const auto& [name, extra] : from.extras) {
    moved.extras[name] = extra.padding(static_cast<int64_t>(slots));
  }
  for (size_t i = 0; i + 1 < padded.size(); ++i) {
    const size_t begin = padded[i], there = to.padded[i];
    const size_t room = padded[i + 1] - padded[i];
    for (size_t k = 0; k < room; ++k) {
      if (hidden == 0) moved.ids[there + k] = from.ids[begin + k];
      moved.labels[there + k] = from.labels[begin + k];
    }
    moved.positions.insert(moved.positions.end(), from.positions.begin() + begin * axes,
                           from.positions.begin() + (begin + room) * axes);
    count_on(moved.positions, there * axes, to.padded[i + 1] - to.padded[i] - room, axes);
    std::copy_n(from.embeddings.begin() + (begin * hidden), room * hidden,
                moved.embeddings.begin() + (there * hidden));
    for (auto& [name, extra] : moved.extras) {
      const size_t width = extra.item_bytes;
      std::copy_n(from.extras.at(name).bytes.data() + begin * width, room * width,
                  extra.bytes.data() + there * width);
    }
  }
  return moved;
}

bool holds_labels(const std::string& name, const StoredExtra& extra) {
  return depth_of_labels(name) > 0 && extra.extra.aligned == Extra::Aligned::slots &&
         extra.item.empty() &&
         (extra.type == h5::stored_type_of(h5::Type::i32) ||
          extra.type == h5::stored_type_of(h5::Type::i64));
}

std::string other_labels_text(const StoredExtras& extras) {
  std::string text;
  for (const auto& [name, extra] : extras)
    if (depth_of_labels(name) > 0 && !holds_labels(name, extra))
      text += fmt::format(
          "# extra {} is not compared with labels: "
          "it is not one int32 or int64, little-endian, a slot\n",
          name);
  return text;
}

std::vector<int32_t> labels_of(const ExtraSlots& extra) {
  const auto values = [&](auto all) {
    std::ranges::copy(extra.bytes, std::as_writable_bytes(std::span(all)).begin());
    return all;
  };
  const size_t slots = extra.bytes.size() / extra.item_bytes;
  if (extra.item_bytes == sizeof(int32_t)) return values(std::vector<int32_t>(slots));
  std::vector<int32_t> labels;
  for (const int64_t label : values(std::vector<int64_t>(slots)))
    labels.push_back(static_cast<int32_t>(std::clamp<int64_t>(
        label, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max())));
  return labels;
}

}  // namespace gyre
