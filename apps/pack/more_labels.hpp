#pragma once
// Labels of further tokens ahead (--mtp) as extras of packed streams: labels_2, labels_3, ...

#include "apps/pack/options.hpp"
#include "io/schemas/packed_file.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Describes the extras of depths 2 to --mtp in the header. Throws a usage error if it has them.
void describe_more_labels(const PackOptions& o, PackedHeader& header);

/// Adds these extras to the slots of bins [first, last). Adds to `checks`, if given, that they
/// equal the definition. Throws a usage error that names file and bin for padding with a label.
void add_more_labels(const PackOptions& o, const PackedHeader& header, int64_t first, int64_t last,
                     PackedSlots& slots, Verification* checks);

/// Describes these extras in the header and adds them to the slots of all bins.
void add_more_labels(const PackOptions& o, PackedHeader& header, PackedSlots& slots,
                     Verification* checks);

}  // namespace gyre
