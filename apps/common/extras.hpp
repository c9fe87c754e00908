#pragma once
// Extras of a batch (core/extra.hpp) in the programs that pass them on: compared, and named.

#include <span>
#include <string>

#include "io/packed_file.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Compares bytes, those of an array of this name.
void compare_bytes(Check& check, std::span<const std::byte> actual,
                   std::span<const std::byte> expected, const std::string& name);

/// Compares what two files say of their extras: names, alignments, types, extents; and the bytes of
/// those that are not aligned to slots.
void compare_extras(Check& check, const StoredExtras& actual, const StoredExtras& expected);

/// Compares the bytes of those that are; `where` names the slots.
void compare_slot_extras(Check& check, const PackedSlots& actual, const PackedSlots& expected,
                         const std::string& where);

/// "# extras: image (slots), weights (rows)\n", or "" without extras. `of_shards`: of a stream,
/// which leave the attention mask out; a second line says so.
std::string extras_text(const StoredExtras& extras, bool of_shards = false);

}  // namespace gyre
