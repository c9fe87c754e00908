#pragma once
// Arrays that accompany a batch without being interpreted (core/extra.hpp). In a file they are the
// numeric datasets below a group `extras`. The attribute `aligned` of each says what its first
// extents are (none, rows, slots). Types and further extents are kept.

#include <map>
#include <string>

#include "core/extra.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

/// An extra, and the type and shape of its elements in the file.
struct StoredExtra {
  Extra extra;  ///< Aligned::none: item_bytes is the whole array's
  h5::StoredType type;
  h5::Shape item;  ///< extents per row or slot; Aligned::none: of the whole array
};
using StoredExtras = std::map<std::string, StoredExtra>;  ///< by path below the group

/// "none", "rows" or "slots".
std::string name_of(Extra::Aligned aligned);

/// Datasets of extras by name.
using ExtraDatasets = std::map<std::string, h5::Dataset>;

/// Opens the extras below `group`, if present, and describes them in `extras`, without bytes.
/// `rows` and `slots` are the leading extents of items aligned to rows or slots; -1 matches any.
/// Types, attributes and extents that break the schema are added to the reader's errors. No
/// communication.
ExtraDatasets open_extras(const h5::File& file, SchemaReader& reader, const std::string& group,
                          const h5::Shape& rows, const h5::Shape& slots, StoredExtras& extras);

/// Reads onto all ranks the bytes of extras aligned to slots (`of_slots`) or of others. Collective.
void read_extras(const ExtraDatasets& datasets, bool of_slots, StoredExtras& extras);

/// Writes extras below `group` of a file made by create(). Those aligned to slots, whose leading
/// extents are `slots`, are only created; open_to_fill fills them.
void create_extras(h5::File& file, const std::string& group, const StoredExtras& extras,
                   const h5::Shape& slots);

}  // namespace gyre
