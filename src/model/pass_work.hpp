#pragma once
// FLOPs and bytes of a decoder's steps, counted from the same list of steps that the decoder walks.
// For predictions, and for rates of phases, which are compared with the machine's limits.

#include <cstdint>
#include <span>

#include "model/decoder_steps.hpp"

namespace gyre {

/// Work of one tensor-parallel rank.
struct StepWork {
  double flops = 0;  ///< of a product; 2 per multiply-add
  double bytes = 0;  ///< of a step bound by memory: each array read once, each result written once
};

/// Work of a step on `rows` rows: slots, or predictions for Score. Attention, AllReduce and Again
/// have none here. Halos of recurrent layers, a few rows, are not counted.
StepWork work_of(const DecoderOperation& operation, const ModelConfig& config, int tp,
                 const DecoderTypes& types, int64_t rows);

/// Work of a pass by the phases of DecoderTimes.
struct PassWork {
  double linear_flops = 0, attention_flops = 0, head_flops = 0;
  double elementwise_bytes = 0, head_bytes = 0;
  bool recurrent = false;  ///< the model has recurrent layers
  double recurrence_flops = 0;
};
/// Adds the steps of a bin with `slots` slots and `predictions` predictions on one rank.
void add_work(PassWork& work, std::span<const DecoderStep> steps, const ModelConfig& config, int tp,
              const DecoderTypes& types, int64_t slots, int64_t predictions);

}  // namespace gyre
