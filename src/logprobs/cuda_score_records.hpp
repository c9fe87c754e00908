#pragma once
// Device implementation of score_records.hpp and cross_records.hpp.
//
//     add      two kernels and one for the ids; no wait
//     merge    three kernels around the all-gather, and one copy to pinned memory of 12 bytes per
//              row (16 with entropies) for one id each: the only wait of the host

#include <memory>

#include "logprobs/cross_records.hpp"
#include "logprobs/score_records.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// `stream`, a CUDA stream, must outlive the records. Bits are the same in every run.
std::unique_ptr<ScoreRecords> make_cuda_score_records(Stream& stream, const RecordShape& shape);

std::unique_ptr<CrossRecords> make_cuda_cross_records(Stream& stream, int ranks, int threads);

}  // namespace gyre
