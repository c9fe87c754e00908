#pragma once
// score_records.hpp and cross_records.hpp on a device.
//
//     add      two kernels and one for the ids; nothing is waited for
//     merge    three kernels around the all-gather, and one copy of 12 (16 with entropies) bytes a
//              row, for one id each, to pinned memory: the one time that the host waits

#include <memory>

#include "logprobs/cross_records.hpp"
#include "logprobs/score_records.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// `stream`, a CUDA stream, must outlive the records. Bits are the same in every run.
std::unique_ptr<ScoreRecords> make_cuda_score_records(Stream& stream, const RecordShape& shape);

std::unique_ptr<CrossRecords> make_cuda_cross_records(Stream& stream, int ranks, int threads);

}  // namespace gyre
