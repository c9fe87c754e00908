#pragma once
// Tokens exchanged for heads: the arrays of all ranks' tokens in the heads of one rank, and the
// messages that fill them and return results.
//
// A message holds, array by array, the rows of the rank whose tokens they are, in that rank's order,
// and the columns of the rank whose heads they are.

#include <vector>

#include "comm/communicator.hpp"
#include "recurrence/kernel.hpp"
#include "recurrence/plan.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

class HeadTransfer {
 public:
  /// `layer` is the shape of all heads. Arrays are in the memory of the stream.
  HeadTransfer(const StatePlan& plan, const Layout& layout, const RecurrenceShape& layer,
               Stream& stream);

  /// Arrays of this rank's heads: rows of whole_documents().
  RecurrenceData& gathered() { return gathered_; }
  /// Sets all bytes.
  void overwrite(std::byte value);
  /// Starts a step. `own`: the rank's arrays, with all heads. One step may be under way.
  WorkPtr start(const state_step::HeadExchange& step, const RecurrenceData& own,
                Communicator& group);
  /// Unpacks what has arrived.
  void finish(const state_step::HeadExchange& step, const RecurrenceData& own);

 private:
  /// `count` rows of a rank from `own` on, and their rows gathered, gathered + stride, ...
  struct Rows {
    int64_t own, gathered, stride, count;
  };
  void make_maps();
  /// Calls body(bytes of a row) for what a message holds that is exchanged with `peer`: rows of its
  /// tokens in the gathered arrays, or rows of own tokens in its heads.
  template <class Body>
  void for_each_row(const state_step::HeadExchange& step, bool of_gathered, int peer,
                    const RecurrenceData& own, Body body) const;
  /// Bytes of these rows.
  int64_t bytes_of(const state_step::HeadExchange& step, bool of_gathered, int peer) const;
  /// Copies these rows into `packed`, one behind the other, or back.
  void copy(const state_step::HeadExchange& step, bool of_gathered, int peer,
            const RecurrenceData& own, std::byte* packed, bool pack);
  void copy_on_device(const state_step::HeadExchange& step, bool of_gathered, int peer,
                      const RecurrenceData& own, std::byte* packed, bool pack);

  int rank_;
  Stream& stream_;
  std::vector<std::vector<Rows>> rows_;         // [cp]
  std::vector<Buffer<int32_t>> gathered_rows_;  // [cp] on a device: the row of each token
  std::vector<Buffer<int32_t>> own_blocks_;     // and its blocks of heads in a rank's own arrays
  std::vector<Buffer<std::byte>> arrays_;
  RecurrenceData gathered_;
  Buffer<std::byte> sent_, received_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // [cp]
};

/// The arrays of a rank, `rows` rows each, in new buffers that are added to `buffers`.
RecurrenceData new_arrays(const RecurrenceShape& shape, DType type, int64_t rows, MemorySpace space,
                          std::vector<Buffer<std::byte>>& buffers);

}  // namespace gyre
