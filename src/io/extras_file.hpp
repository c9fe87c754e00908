#pragma once
// Arrays that go along with a batch without being read (core/extra.hpp): in a file, the datasets of
// any numeric type below a group `extras`. The attribute `aligned` of each says what its first
// extents are; types and further extents are kept.

#include <map>
#include <string>

#include "core/extra.hpp"
#include "io/schema.hpp"

namespace gyre {

/// An extra, and what a file says of its elements.
struct StoredExtra {
  Extra extra;  ///< item_bytes of Aligned::none: those of the array
  h5::StoredType type;
  h5::Shape item;  ///< extents of a row or of a slot; Aligned::none: of the array
};
using StoredExtras = std::map<std::string, StoredExtra>;  ///< by path below the group

/// "none", "rows" or "slots".
std::string name_of(Extra::Aligned aligned);

/// Datasets of extras by name.
using ExtraDatasets = std::map<std::string, h5::Dataset>;

/// Opens the extras below `group`, if the file has it, and describes them in `extras`, without
/// bytes. `rows` and `slots` are the extents in front of items that are aligned so; -1 is any.
/// Types, attributes and extents that break the schema go to the errors of `reader`. No
/// communication.
ExtraDatasets open_extras(const h5::File& file, SchemaReader& reader, const std::string& group,
                          const h5::Shape& rows, const h5::Shape& slots, StoredExtras& extras);

/// All bytes of the datasets that are of this kind, on every rank. Collective.
void read_extras(const ExtraDatasets& datasets, bool of_slots, StoredExtras& extras);

/// Writes the extras of a file that create() has made below `group`; those aligned to slots, with
/// the extents `slots` in front, wait for open_to_fill.
void create_extras(h5::File& file, const std::string& group, const StoredExtras& extras,
                   const h5::Shape& slots);

}  // namespace gyre
