#pragma once
// Arguments and launches of the kernels of cuda_kernel.hpp.

#include <cstddef>

#include "recurrence/kernel.hpp"

namespace gyre {

/// Rows of an array from a run's first on, f32 or bf16.
struct ElementRows {
  std::byte* data = nullptr;
  int64_t stride = 0;
  bool narrow = false;
};

/// Scratch, [heads of the launch, chunks] of each.
struct ChunkScratch {
  float *pairs = nullptr, *key_pairs = nullptr, *inverse = nullptr;  ///< P, R, X [C, C]
  float *states = nullptr, *d_states = nullptr;  ///< before a chunk, and gradient behind it [K, V]
  float *residual = nullptr, *y = nullptr;       ///< [C, V]
  float *d_q = nullptr, *d_k = nullptr;          ///< terms of a head of values [C, K]
};

/// A run in some heads of values.
struct ChunkArgs {
  ElementRows arrays[recurrence_arrays];
  int64_t tokens = 0, chunks = 0;
  int keys = 0, values = 0, group = 1, first_head = 0, heads = 0;
  bool delta = false, channel_decay = false;
  float scale = 1;
  ChunkScratch scratch;
};

/// States of all heads; null: 0 before, not wanted behind.
struct ScanStates {
  const float* before = nullptr;
  float* behind = nullptr;
  float* map = nullptr;     ///< to: M of the delta rule
  bool writes_out = false;  ///< writes out
  bool keeps = false;       ///< writes the states before chunks, and residuals, to the scratch
};
/// Gradients of states of all heads.
struct ScanBackStates {
  const float* d_behind = nullptr;
  float* d_before = nullptr;
  bool keeps = false;  ///< writes d_v, and the gradients behind chunks, and Y, to the scratch
};

/// The most bytes of shared memory of a block.
int64_t chunk_shared_bytes(int64_t keys);

void launch_pairs(const ChunkArgs& args, Stream& stream);
void launch_scan(const ChunkArgs& args, const ScanStates& states, Stream& stream);
void launch_scan_back(const ChunkArgs& args, const ScanBackStates& states, Stream& stream);
/// Also the sums over groups.
void launch_gradients(const ChunkArgs& args, Stream& stream);

}  // namespace gyre
