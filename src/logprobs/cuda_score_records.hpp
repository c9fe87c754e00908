#pragma once
// Device implementation of score_records.hpp and cross_records.hpp.
//
//     add      launches two kernels, and one for the ids; does not wait
//     merge    launches three kernels around the all-gather, and copies 8 + 4 K bytes per row (4
//              more with entropies) to pinned memory; the host waits only for this copy

#include <memory>

#include "logprobs/cross_records.hpp"
#include "logprobs/score_records.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Creates records. `stream`, a CUDA stream, must outlive them. Results are bitwise reproducible.
std::unique_ptr<ScoreRecords> make_cuda_score_records(Stream& stream, const RecordShape& shape);
/// Creates cross-entropy records. `stream` must outlive them. Results are bitwise reproducible.
std::unique_ptr<CrossRecords> make_cuda_cross_records(Stream& stream, int ranks, int threads);

}  // namespace gyre
