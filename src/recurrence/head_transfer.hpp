#pragma once
// Tokens exchanged for heads: the arrays of all ranks' tokens in the heads of one rank, and the
// messages that fill them and return results.
//
// A message holds, array by array, the rows of the rank whose tokens they are, in that rank's order,
// and the columns of the rank whose heads they are.

#include <vector>

#include "comm/communicator.hpp"
#include "recurrence/chunk.hpp"
#include "recurrence/plan.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

class HeadTransfer {
 public:
  /// `layer` is the shape of all heads.
  HeadTransfer(const StatePlan& plan, const Layout& layout, const RecurrenceShape& layer);

  /// Arrays of this rank's heads: rows of whole_documents().
  RecurrenceData& gathered() { return gathered_; }
  /// Sets all bytes.
  void overwrite(std::byte value);
  /// Starts a step. `own`: the rank's arrays, with all heads. One step may be under way.
  WorkPtr start(const state_step::HeadExchange& step, const RecurrenceData& own,
                Communicator& group, Stream& stream);
  /// Unpacks what has arrived.
  void finish(const state_step::HeadExchange& step, const RecurrenceData& own);

 private:
  /// `count` rows of a rank from `own` on, and their rows gathered, gathered + stride, ...
  struct Rows {
    int64_t own, gathered, stride, count;
  };
  /// Calls body(bytes of a row) for what a message holds that is exchanged with `peer`: rows of its
  /// tokens in the gathered arrays, or rows of own tokens in its heads.
  template <class Body>
  void for_each_row(const state_step::HeadExchange& step, bool of_gathered, int peer,
                    const RecurrenceData& own, Body body) const;

  int rank_;
  std::vector<std::vector<Rows>> rows_;  // [cp]
  std::vector<Buffer<std::byte>> arrays_;
  RecurrenceData gathered_;
  std::vector<std::byte> sent_, received_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // [cp]
};

/// The arrays of a rank, `rows` rows each, in new buffers that are added to `buffers`.
RecurrenceData new_arrays(const RecurrenceShape& shape, DType type, int64_t rows,
                          std::vector<Buffer<std::byte>>& buffers);

}  // namespace gyre
