#pragma once
// Where a rank is in the simulation of its program, and what is under way between ranks.

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "predict/machine.hpp"

namespace gyre::simulation {

/// Messages that one rank has sent to another, in order; those that were waited for are dropped.
struct Channel {
  struct Sent {
    double arrival = 0;
    int64_t bytes = 0;
    int step = 0;
    bool taken = false;
  };
  std::vector<Sent> sent;
  int64_t dropped = 0;   ///< before the first of `sent`
  size_t taken = 0;      ///< the first so many of `sent` are no longer needed
  int64_t expected = 0;  ///< messages that the receiver has posted

  int64_t count() const { return dropped + std::ssize(sent); }
  Sent& at(int64_t place) { return sent[static_cast<size_t>(place - dropped)]; }
  void take(int64_t place) {
    at(place).taken = true;
    while (taken < sent.size() && sent[taken].taken) ++taken;
    if (2 * taken < sent.size()) return;  // moves each message once on average
    dropped += static_cast<int64_t>(taken);
    sent.erase(sent.begin(), sent.begin() + static_cast<ptrdiff_t>(taken));
    taken = 0;
  }
};

/// A receive that a rank has posted.
struct Expected {
  int peer = 0;
  int64_t place = 0;  ///< index into the channel's messages
  int64_t bytes = 0;
};

/// An operation of a library: it begins when the last rank of its group has joined it.
struct Operation {
  int joined = 0;
  double begin = 0, end = 0;
  std::vector<int> waiting;  ///< ranks
};
/// A group of ranks, and its operations in their order.
struct Group {
  int first = 0, ranks = 0;
  std::vector<Operation> operations;
  std::vector<size_t> joined;  ///< [ranks] operations that each has joined
  bool complete(size_t operation) const { return operations[operation].joined == ranks; }
};
struct Joined {
  Group* group = nullptr;
  size_t operation = 0;
};

/// An exchange from its posting to its Wait.
struct Pending {
  std::vector<Joined> operations;
  std::vector<Expected> receives;
  size_t found = 0;  ///< the first so many receives have been sent, ...
  double end = 0;    ///< ... and have arrived by then
  double left = 0;   ///< when the last message sent has left the link
  int step = 0;
};

struct RankState {
  size_t part = 0, op = 0;
  uint32_t time = 0;  ///< of the part
  int steps = 0;      ///< of blocks that are done
  double clock = 0;
  std::array<double, most_tiers> link_free = {};
  std::vector<Pending> pending;           ///< [exchange]
  std::unordered_map<int, Channel> from;  ///< [sender]
  Channel* recent = nullptr;              ///< the channel used last, which is from recent_peer
  int recent_peer = -1;
  int blocked_on = -1;     ///< a sender
  Joined blocked_in = {};  ///< an operation

  Channel& channel(int peer) {
    if (peer != recent_peer) {
      recent = &from[peer];
      recent_peer = peer;
    }
    return *recent;
  }
};

}  // namespace gyre::simulation
