#pragma once
// Writes a checkpoint as a gyre/model file.

#include "io/checkpoints/checkpoint.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

/// Rank 0 writes the model tensor by tensor, in blocks of a few MiB, the next of which a thread
/// reads. Floats keep their type; values of GGUF's block formats become float32. A NaN or infinity
/// is a usage error that names the tensor and the place. Collective.
void write_model(OutputFile& output, const Checkpoint& checkpoint, const Provenance& provenance);

}  // namespace gyre
