#pragma once
// Writes a checkpoint as a gyre/model file.

#include "io/checkpoint.hpp"
#include "io/schema.hpp"

namespace gyre {

/// Writes the model tensor by tensor, in blocks of about 64 MiB a rank. A NaN or infinity is a
/// usage error that names the tensor and the place. Collective.
void write_model(OutputFile& output, const Checkpoint& checkpoint, const Provenance& provenance);

}  // namespace gyre
