#pragma once
// A library of attention over ragged batches (attention_library.hpp) that is as plain as can be, so
// that what is built around such libraries runs where there is none of them. For tests.
//
// It reads and writes what the tables name, and nothing else; and as a library may, it
//   - leaves NaN in up to a tile of rows behind each entry, as far as no other one begins;
//   - holds all accesses to rows below batch · longest and below the last offset, and cuts longer
//     entries: what is beyond is left out, and `dropped` set, as it is by a query without a key;
//   - begins with NaN in all of its workspace;
//   - writes dK and dV of ragged batches as K and V lie, if there are as many heads of queries;
//   - where a test asks for it, multiplies what lies behind an entry, up to a tile, by 0.
// One thread for each row and head: nothing is summed by two.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "attention/kernels/attention_library.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre::test {

/// What a test has the library do, and what the library was asked for.
struct PlainAttention {
  /// Why the library does not take a shape; empty: it does.
  std::function<std::string(const AttentionGraphShape&)> refuses = {};
  /// Whether it has backward graphs that give the same bits in every run.
  bool ordered_gradients = true;
  /// Bytes of workspace that these ask for beyond what they use, and that all backward graphs do.
  int64_t ordered_extra_bytes = 0, extra_bytes = 0;
  /// Of even batches; by default they are ragged ones, as all others.
  int64_t least_even_queries = std::numeric_limits<int64_t>::max();
  /// Whether rows behind entries are multiplied by weights of 0, and whether the library says so.
  bool multiplies_masked_rows = false, says_so = false;

  struct Calls {
    int64_t asked = 0, built = 0;
    int64_t executed = 0, ordered = 0;  ///< runs, and those of deterministic graphs among them
    int64_t even = 0;                   ///< and those of even batches
  };
  Calls forward, backward;
  int64_t largest_batch = 0;  ///< entries that a graph was built for
  int64_t empty = 0;          ///< lengths of 0
  AttentionAddresses last;    ///< of the last run
  /// One number in device memory: not 0 when something was left out.
  Buffer<int32_t> dropped;
};

/// `asked` must outlive the library and its graphs.
std::unique_ptr<AttentionLibrary> make_plain_attention(Stream& stream, PlainAttention& asked);

}  // namespace gyre::test
