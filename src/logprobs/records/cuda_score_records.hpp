#pragma once
// Device implementation of score_records.hpp and cross_records.hpp.
//
//     add      launches two kernels: one sums the parts of rows; the other adds the sums to the
//              totals and finds the logits of ids; on one rank, if the tile is the whole shard, it
//              also writes the results
//     merge    otherwise launches one kernel after the all-gather; always waits for the stream
//
// Ids are read from, and 8 + 4 K bytes of results per row (4 more with entropies) written to,
// pinned memory of the host.

#include <memory>

#include "logprobs/records/cross_records.hpp"
#include "logprobs/records/score_records.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Creates records. `stream`, a CUDA stream, must outlive them. Results are bitwise reproducible.
std::unique_ptr<ScoreRecords> make_cuda_score_records(Stream& stream, const RecordShape& shape);
/// Creates cross-entropy records. `stream` must outlive them. Results are bitwise reproducible.
std::unique_ptr<CrossRecords> make_cuda_cross_records(Stream& stream, int ranks, int threads);

}  // namespace gyre
