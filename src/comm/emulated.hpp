#pragma once
// A slower network than the machine has: point-to-point messages between nodes take the time that a
// model says.
//
//     sender:  now ---- link busy with earlier messages ---|-- bytes/β --|---- α ----> message
//     leaves
//                                                 link_free before   link_free after
//
//     link_free = max(now, link_free) + bytes / β;   the message is really sent at link_free + α
//
// Each rank has one egress link, which all its messages to other nodes share, one after another.
// What goes to one rank in one exchange is one message; messages of one exchange take the link in
// order of their ranks. Messages inside a node and to the rank itself are sent at once. The
// receiving side is not a bottleneck in this model.
//
// Example, α = 10 us, β = 1 GB/s, one rank a node: at t = 0 a rank sends 100 kB to each of two
// neighbours. The first arrives at 100 + 10 = 110 us, the second at 200 + 10 = 210 us.
//
// What is delayed is the send: nobody but the sending rank can start it. It starts when that rank
// next calls test() or wait() on any operation of an emulated communicator once its time has come.
// A rank that computes without a call for 1 ms may therefore send up to 1 ms late, as it is with
// MPI libraries that progress only when called.

#include <memory>
#include <string_view>

#include "comm/communicator.hpp"

namespace gyre {

/// What the emulated network costs.
struct NetworkModel {
  double latency_s = 0;    ///< α: from the end of transmission to arrival
  double bytes_per_s = 0;  ///< β: of one rank's egress link
  int ranks_per_node = 1;  ///< ranks r and s are on one node iff r and s / ranks_per_node agree
};

/// Reads "alpha=10us,beta=5G,node=4". alpha: a number with the unit us, ms or s (0 needs none);
/// beta: bytes per second, with K, M or G for 10^3, 10^6, 10^9; node: ranks of a node, 1 when not
/// given. A usage error names key, value and what is allowed.
NetworkModel parse_network_model(std::string_view text);

/// When messages of one rank leave.
class EgressLink {
 public:
  /// Puts a message of `bytes` on the link at time `now`, in seconds; the time at which it arrives.
  /// Times never decrease from call to call, if `now` does not.
  double send(const NetworkModel& model, double now, int64_t bytes);

 private:
  double free_at_ = 0;
};

/// A communicator like `real`, which must outlive it, on the network of `model`.
///
/// `real` is the communicator of all ranks, in host memory; smaller groups come from split() of the
/// result, share each rank's link, and keep every rank on its node. Only exchange() is delayed;
/// collectives pass through at the real speed, and drive delayed messages while they are waited
/// for. Waits on other communicators do not drive them.
///
/// traffic() of the result counts every operation once, when it is submitted. traffic() of `real`
/// goes on counting what it is asked to do, so that the same bytes appear there too once they are
/// really sent: read one of the two.
///
/// Destroying a communicator sends what is still delayed at once. Destroying an operation that
/// nobody has waited for drops what is still delayed of it.
///
/// Usage errors: device memory; a negative latency, no bandwidth, less than one rank a node.
std::unique_ptr<Communicator> emulate_network(Communicator& real, const NetworkModel& model);

}  // namespace gyre
