#pragma once
// Coalesces an exchange into one message per peer, for a backend whose messages are single spans.
//
// All slices that a rank sends to a peer form one message. Sender and receiver may cut it
// differently: A sends 3 slices, B receives them as 1. A side that holds the message in one span (a
// single slice, or slices that are contiguous in memory) passes that span on. A side that holds it
// in several spans goes through a staging area:
//
//     before: copy the slices to each peer, in order, into the staging area
//     one send to each peer, one receive from each peer
//     after:  copy the received messages out of the staging area, in the order of the slices
//
// Example, rank 0 to rank 1, 2 + 3 + 1 bytes received as 4 + 2:
//
//     rank 0   before: [0,2) [2,5) [5,6) of its staging area <- the three slices;   sends [0,6)
//     rank 1   receives [0,6) of its staging area;   after: the two slices <- [0,4) [4,6)
//
// Messages of a rank to itself are copies and need no staging area. Empty slices are ignored; both
// sides omit a message of 0 bytes.

#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {

struct CoalescedExchange {
  /// Each span is part of one slice or of the staging area; none overlap.
  std::vector<SpanCopy> before;
  std::vector<SendSlice> sends;  ///< at most one per peer, in rank order; none to the rank itself
  std::vector<RecvSlice> recvs;  ///< at most one per peer, in rank order; none from the rank itself
  std::vector<SpanCopy> after;   ///< includes messages of the rank to itself
};

/// Messages that go through the staging area: those in several spans, or all.
enum class Staged { scattered, all };

/// Bytes of staging area that coalesce() needs.
int64_t staging_bytes(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, int rank,
                      Staged staged = Staged::scattered);

/// Returns the exchange of rank `rank` through `staging`, an area of staging_bytes() bytes, in
/// which messages begin at multiples of 256 bytes. Throws a runtime error that begins with `what`
/// when the rank's sends to itself and receives from itself differ in size.
CoalescedExchange coalesce(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                           int rank, std::span<std::byte> staging, std::string_view what,
                           Staged staged = Staged::scattered);

}  // namespace gyre
