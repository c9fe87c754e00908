#pragma once
// Emulates a slower network than the machine has: point-to-point messages between nodes take the
// time of an α-β (latency-bandwidth) model.
//
//     now ---- link busy with earlier messages ----|---- bytes/β ----|---- α ----> message arrives
//                                                  |                 |
//                                         link_free before   link_free after
//
//     link_free = max(now, link_free) + bytes / β;   the receive completes at link_free + α
//
// The message itself is sent at once and travels during the emulated time. The receive completes
// with the release: one byte that follows at link_free + α. The receive buffer may therefore hold
// the data before the receive is complete.
//
// Each rank has one egress link, which its messages to other nodes share one after another. The
// slices of one exchange to one rank are one message; the messages of an exchange take the link in
// rank order. Messages within a node and to the rank itself need no release. The model has no
// bottleneck at the receiver.
//
// Example, α = 10 us, β = 1 GB/s, one rank per node: at t = 0 a rank sends 100 kB to each of two
// neighbours. The first arrives at 100 + 10 = 110 us, the second at 200 + 10 = 210 us.
//
// Only the sending rank can release a message, in its first call of test() or wait() on any
// operation of an emulated communicator after the due time. A rank that computes for 1 ms without
// such a call may be up to 1 ms late, as with MPI libraries that progress only inside calls.

#include <memory>
#include <string_view>

#include "comm/communicator.hpp"

namespace gyre {

/// Parameters of the emulated network.
struct NetworkModel {
  double latency_s = 0;    ///< α: from the end of transmission to arrival
  double bytes_per_s = 0;  ///< β: of one rank's egress link
  int ranks_per_node = 1;  ///< rank r is on node r / ranks_per_node
};

/// Parses "alpha=10us,beta=5G,node=4". alpha: a number with the unit us, ms or s (0 needs none);
/// beta: bytes per second, with K, M or G for 10^3, 10^6, 10^9; node: ranks per node, default 1. A
/// usage error names the key, the value and the valid values.
NetworkModel parse_network_model(std::string_view text);

/// Egress link of one rank: computes when its messages leave and arrive.
class EgressLink {
 public:
  /// Puts a message of `bytes` on the link at time `now`, in seconds; returns its arrival time.
  /// Arrival times do not decrease from call to call if `now` does not.
  double send(const NetworkModel& model, double now, int64_t bytes);

 private:
  double free_at_ = 0;
};

/// Returns a communicator over `real`, which must outlive it, with `model`'s network. Collective.
///
/// `real` is the communicator of all ranks, in host memory. Smaller groups come from split() of the
/// result, share each rank's link, and keep every rank on its node. Only exchange() is delayed;
/// collectives run at real speed and progress delayed messages during their waits. Waits on other
/// communicators do not progress them.
///
/// traffic() of the result counts every operation once, at submission; that of `real` counts none.
///
/// Destroying a communicator releases its messages at once. Destroying an operation before its wait
/// drops the releases of its messages.
///
/// Usage errors: device memory; a negative latency, no bandwidth, less than one rank per node.
std::unique_ptr<Communicator> emulate_network(Communicator& real, const NetworkModel& model);

}  // namespace gyre
