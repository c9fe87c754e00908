#pragma once
// Slots of packed streams: copies of some, and the labels among their extras.

#include <cstdint>
#include <utility>
#include <vector>

#include "apps/shard/report.hpp"
#include "io/schemas/packed_file.hpp"
#include "packing/labels_ahead.hpp"

namespace gyre {

/// The arrays of slots by name, except embeddings and extras.
inline constexpr std::pair<const char*, std::vector<int32_t> PackedSlots::*> slot_arrays[] = {
    {"ids", &PackedSlots::ids},
    {"labels", &PackedSlots::labels},
    {"positions", &PackedSlots::positions},
};

/// Elements of an array of slot_arrays per slot.
inline int64_t width_of(std::vector<int32_t> PackedSlots::*array, const PackedSlots& slots) {
  return array == &PackedSlots::positions ? slots.position_axes() : 1;
}

/// A stream to restore a bin into. It is filled with values that no bin holds.
PackedSlots blank_like(const PackedSlots& bin);

/// The slots of one bin, copied from those of several.
PackedSlots part_of(const PackedSlots& all, int64_t begin, int64_t count, int64_t hidden_size);

/// The bin's slots, moved to their places in a repadded layout.
PackedSlots moved_to(const BinBounds& to, const PackedHeader& header, int64_t bin,
                     const PackedSlots& from);

/// Labels of a depth, from the bytes of an extra for which holds_labels() is true. Numbers beyond
/// int32 become its least or largest one, which no label is.
std::vector<int32_t> labels_of(const ExtraSlots& extra);

/// Whether an extra holds labels of further tokens ahead: one int32 or int64 a slot, by that name.
bool holds_labels(const std::string& name, const StoredExtra& extra);

/// A "#" line for each extra that is named like labels but has another type, and so is not
/// compared.
std::string other_labels_text(const StoredExtras& extras);

/// Calls visit(depth, labels) for the labels of further tokens ahead among the bin's extras.
template <class Visit>
void for_each_depth(const PackedHeader& header, const PackedSlots& bin, Visit visit) {
  for (const auto& [name, extra] : bin.extras)
    if (holds_labels(name, header.extras.at(name))) visit(depth_of_labels(name), labels_of(extra));
}

}  // namespace gyre
