// Messages whose two ends are cut differently: all ranks' halves of an exchange are made here and
// carried out by hand.

#include "comm/coalesce.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace GYRE_FILE {

using Bytes = std::vector<std::byte>;
constexpr std::byte unwritten{0xee};

/// One rank's buffers and what it asks for. Slices are taken from the buffers in order, each behind
/// a gap (of 0 bytes: neighbours).
struct Rank {
  Bytes sent, received, staging;
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;

  Rank() {
    sent.reserve(1 << 16);
    received.reserve(1 << 16);
  }
  void send(int peer, const Bytes& data, size_t gap) {
    sent.resize(sent.size() + gap, unwritten);
    sent.insert(sent.end(), data.begin(), data.end());
    sends.push_back({peer, std::span(sent).last(data.size())});
  }
  void recv(int peer, size_t bytes, size_t gap) {
    received.resize(received.size() + gap + bytes, unwritten);
    recvs.push_back({peer, std::span(received).last(bytes)});
  }
  /// Everything received from a peer, and whether the gaps are as they were.
  Bytes from(int peer) const {
    Bytes all;
    for (const RecvSlice& slice : recvs)
      if (slice.peer == peer) all.insert(all.end(), slice.data.begin(), slice.data.end());
    return all;
  }
  int64_t written() const {
    return std::count_if(received.begin(), received.end(),
                         [](std::byte b) { return b != unwritten; });
  }
};

void carry_out(const std::vector<SpanCopy>& copies) {
  for (const auto& copy : copies) {
    ASSERT_EQ(copy.from.size(), copy.to.size());
    std::copy(copy.from.begin(), copy.from.end(), copy.to.begin());
  }
}

/// Delivers one send to one receive of the same length between each two ranks.
void exchange(std::vector<Rank>& ranks) {
  std::vector<CoalescedExchange> halves;
  std::map<std::pair<int, int>, std::span<const std::byte>> wire;
  for (int r = 0; r < std::ssize(ranks); ++r) {
    Rank& rank = ranks[r];
    rank.staging.assign(staging_bytes(rank.sends, rank.recvs, r), unwritten);
    halves.push_back(coalesce(rank.sends, rank.recvs, r, rank.staging, "test"));
    carry_out(halves.back().before);
    for (const SendSlice& send : halves.back().sends) {
      ASSERT_NE(send.peer, r);
      ASSERT_TRUE(wire.emplace(std::pair(r, send.peer), send.data).second) << "two sends";
    }
  }
  for (int r = 0; r < std::ssize(ranks); ++r) {
    for (const RecvSlice& recv : halves[r].recvs) {
      const auto message = wire.extract({recv.peer, r});
      ASSERT_FALSE(message.empty()) << "a receive without its send, or two receives";
      ASSERT_EQ(message.mapped().size(), recv.data.size());
      std::copy(message.mapped().begin(), message.mapped().end(), recv.data.begin());
    }
    carry_out(halves[r].after);
  }
  EXPECT_TRUE(wire.empty()) << "a send without its receive";
}

/// Lengths that add up to `bytes`, zeros among them.
std::vector<size_t> arbitrary_cut(size_t bytes) {
  std::vector<size_t> at = {0, bytes};
  const int cuts = *rc::gen::inRange(0, 4);
  for (int i = 0; i < cuts; ++i) at.push_back(*rc::gen::inRange<size_t>(0, bytes + 1));
  std::sort(at.begin(), at.end());
  std::vector<size_t> lengths;
  for (size_t i = 1; i < at.size(); ++i) lengths.push_back(at[i] - at[i - 1]);
  return lengths;
}

TEST(Coalesce, DeliversMessagesThatAreCutDifferentlyAtTheirTwoEnds) {
  EXPECT_TRUE(rc::check([] {
    const int n = *rc::gen::inRange(1, 5);
    std::vector<Rank> ranks(n);
    std::map<std::pair<int, int>, Bytes> messages;
    std::vector<int64_t> total(ranks.size(), 0);
    uint8_t next = 0;
    for (int from = 0; from < n; ++from)
      for (int to = 0; to < n; ++to) {
        Bytes& message = messages[{from, to}];
        message.resize(*rc::gen::element<size_t>(0, 1, 7, 300, 600));
        for (std::byte& b : message) b = static_cast<std::byte>(next++ % 0xee);
        total[to] += std::ssize(message);
        const auto gap = [] { return *rc::gen::element<size_t>(0, 0, 3); };
        auto rest = message.begin();
        for (const size_t length : arbitrary_cut(message.size())) {
          ranks[from].send(to, Bytes(rest, rest + static_cast<std::ptrdiff_t>(length)), gap());
          rest += static_cast<std::ptrdiff_t>(length);
        }
        for (const size_t length : arbitrary_cut(message.size()))
          ranks[to].recv(from, length, gap());
      }
    exchange(ranks);
    for (int to = 0; to < n; ++to) {
      const Rank& rank = ranks[to];
      for (int from = 0; from < n; ++from) RC_ASSERT((rank.from(from) == messages[{from, to}]));
      RC_ASSERT(rank.written() == total[to]);
    }
  }));
}

TEST(Coalesce, SlicesOfTwoPeersMayAlternate) {
  std::vector<Rank> ranks(3);
  for (const int i : {1, 2, 3, 4})
    ranks[0].send(i % 2 == 0 ? 1 : 2, {static_cast<std::byte>(i)}, 1);
  ranks[1].recv(0, 2, 0);
  ranks[2].recv(0, 2, 0);
  exchange(ranks);
  EXPECT_EQ(ranks[1].received, (Bytes{std::byte{2}, std::byte{4}}));
  EXPECT_EQ(ranks[2].received, (Bytes{std::byte{1}, std::byte{3}}));
}

TEST(Coalesce, SpansThatAreSingleStayWhereTheyAre) {
  Rank rank;
  rank.send(1, Bytes(10), 0);
  rank.send(1, Bytes(20), 0);  // its neighbour
  rank.send(1, {}, 5);
  rank.recv(2, 40, 3);
  rank.recv(0, 0, 1);
  EXPECT_EQ(staging_bytes(rank.sends, rank.recvs, 0), 0);
  const CoalescedExchange x = coalesce(rank.sends, rank.recvs, 0, {}, "test");
  EXPECT_TRUE(x.before.empty() && x.after.empty());
  ASSERT_EQ(x.sends.size(), 1U);
  EXPECT_EQ(x.sends[0].peer, 1);
  EXPECT_EQ(x.sends[0].data.data(), rank.sends[0].data.data());
  EXPECT_EQ(x.sends[0].data.size(), 30U);
  ASSERT_EQ(x.recvs.size(), 1U);
  EXPECT_EQ(x.recvs[0].data.data(), rank.recvs[0].data.data());
}

TEST(Coalesce, MessagesInTheStagingAreaAreAlignedAndApart) {
  Rank rank;
  for (const int peer : {1, 2}) {
    for (int i = 0; i < 2; ++i) rank.send(peer, Bytes(150), 1);
    for (int i = 0; i < 2; ++i) rank.recv(peer, 100, 1);
  }
  ASSERT_EQ(staging_bytes(rank.sends, rank.recvs, 0), 4 * 256 + 2 * 256);
  rank.staging.resize(6 * 256);
  const CoalescedExchange x = coalesce(rank.sends, rank.recvs, 0, rank.staging, "test");
  const auto place = [&](std::span<const std::byte> data) {
    return data.data() - rank.staging.data();
  };
  EXPECT_EQ(place(x.sends[0].data), 0);
  EXPECT_EQ(place(x.sends[1].data), 512);
  EXPECT_EQ(place(x.recvs[0].data), 1024);
  EXPECT_EQ(place(x.recvs[1].data), 1280);
  EXPECT_EQ(x.before.size(), 4U);
  EXPECT_EQ(x.after.size(), 4U);
}

TEST(Coalesce, WhatARankSendsItselfItMustReceive) {
  Rank rank;
  rank.send(3, Bytes(10), 1);
  rank.recv(3, 4, 1);
  rank.recv(3, 5, 1);
  EXPECT_EQ(staging_bytes(rank.sends, rank.recvs, 3), 0);
  try {
    coalesce(rank.sends, rank.recvs, 3, {}, "unmatched");
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("unmatched: rank 3 sends itself 10 bytes and receives 9"),
              std::string::npos)
        << text;
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
