#pragma once
// State of a rank in the simulation, and messages and collectives in flight.

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "predict/machine.hpp"

namespace gyre::simulation {

/// Messages from one rank to another, in order; those already waited for are dropped.
struct Channel {
  struct Sent {
    double arrival = 0;
    int64_t bytes = 0;
    int step = 0;
    bool taken = false;
  };
  std::vector<Sent> sent;
  int64_t dropped = 0;   ///< messages dropped before the first of `sent`
  size_t taken = 0;      ///< length of the prefix of `sent` that is no longer needed
  int64_t expected = 0;  ///< receives that the receiver has posted

  int64_t count() const { return dropped + std::ssize(sent); }
  Sent& at(int64_t place) { return sent[place - dropped]; }
  void take(int64_t place) {
    at(place).taken = true;
    while (taken < sent.size() && sent[taken].taken) ++taken;
    if (2 * taken < sent.size()) return;  // amortised: each message moves once
    dropped += taken;
    sent.erase(sent.begin(), sent.begin() + taken);
    taken = 0;
  }
};

/// A posted receive.
struct Expected {
  int peer = 0;
  int64_t place = 0;  ///< index into the channel's messages
  int64_t bytes = 0;
};

/// A library collective; it begins when the last rank of its group has joined.
struct LibraryCollective {
  int joined = 0;
  double begin = 0, end = 0;
  std::vector<int> waiting;  ///< ranks that wait for it
};
/// A group of ranks, with its collectives in order.
struct Group {
  int first = 0, ranks = 0;
  std::vector<LibraryCollective> collectives;
  std::vector<size_t> joined;  ///< [ranks] number of collectives that each rank has joined
  bool complete(size_t collective) const { return collectives[collective].joined == ranks; }
};
struct Joined {
  Group* group = nullptr;
  size_t collective = 0;
};

/// An exchange, from its posting to its Wait.
struct Pending {
  std::vector<Joined> collectives;
  std::vector<Expected> receives;
  size_t found = 0;  ///< length of the prefix of `receives` that has been sent, ...
  double end = 0;    ///< ... and the latest arrival among it
  double left = 0;   ///< when the last sent message has left the link
  int step = 0;
};

struct RankState {
  size_t part = 0, op = 0;
  uint32_t time = 0;  ///< repetition of the part
  int steps = 0;      ///< steps of completed blocks
  double clock = 0;
  std::array<double, max_tiers> link_free = {};
  std::vector<Pending> pending;           ///< [exchange]
  std::unordered_map<int, Channel> from;  ///< [sender]
  Channel* recent = nullptr;              ///< channel used last: the one from recent_peer
  int recent_peer = -1;
  int blocked_on = -1;     ///< sender that the rank waits for
  Joined blocked_in = {};  ///< collective that the rank waits for

  Channel& channel(int peer) {
    if (peer != recent_peer) {
      recent = &from[peer];
      recent_peer = peer;
    }
    return *recent;
  }
};

}  // namespace gyre::simulation
