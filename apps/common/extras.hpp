#pragma once
// Comparison and names of the extras of a batch (core/extra.hpp).

#include <span>
#include <string>

#include "io/schemas/packed_file.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Compares the bytes of the array `name`.
void compare_bytes(Check& check, std::span<const std::byte> actual,
                   std::span<const std::byte> expected, const std::string& name);

/// Compares the extras of two files: names, alignments, types and extents, and the bytes of extras
/// that are not aligned to slots.
void compare_extras(Check& check, const StoredExtras& actual, const StoredExtras& expected);

/// Compares the bytes of extras that are aligned to slots; `where` names the slots.
void compare_slot_extras(Check& check, const PackedSlots& actual, const PackedSlots& expected,
                         const std::string& where);

/// "# extras: image (slots), weights (rows)\n", or "" without extras. `of_shards`: the extras of a
/// stream's shards, which omit the attention mask; a second line says so.
std::string extras_text(const StoredExtras& extras, bool of_shards = false);

}  // namespace gyre
