#include "comm/in_process.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "comm/agree.hpp"
#include "core/bf16.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

template <class T>
T reduced(T a, T b, ReduceOp op) {
  if (op == ReduceOp::sum) return a + b;
  return op == ReduceOp::max ? std::max(a, b) : std::min(a, b);
}
template <>
bf16 reduced(bf16 a, bf16 b, ReduceOp op) {
  return to_bf16(reduced(to_float(a), to_float(b), op));
}

/// results[r][i] <- terms[0][i] + terms[1][i] + ..., in this order, for every r. A result may lie
/// where a term lies.
template <class T>
void reduce_as(const std::vector<const std::byte*>& terms, const std::vector<std::byte*>& results,
               int64_t count, ReduceOp op) {
  const auto element = [](const std::byte* of, int64_t i) {
    return reinterpret_cast<const T*>(of)[i];
  };
  for (int64_t i = 0; i < count; ++i) {
    T sum = element(terms.front(), i);
    for (size_t r = 1; r < terms.size(); ++r) sum = reduced(sum, element(terms[r], i), op);
    for (std::byte* const result : results) reinterpret_cast<T*>(result)[i] = sum;
  }
}

void reduce(const std::vector<const std::byte*>& terms, const std::vector<std::byte*>& results,
            const Collective& call) {
  switch (call.type) {
    case DType::f32:
      return reduce_as<float>(terms, results, call.count(), call.op);
    case DType::f64:
      return reduce_as<double>(terms, results, call.count(), call.op);
    case DType::bf16:
      return reduce_as<bf16>(terms, results, call.count(), call.op);
    case DType::i32:
      return reduce_as<int32_t>(terms, results, call.count(), call.op);
    case DType::i64:
      return reduce_as<int64_t>(terms, results, call.count(), call.op);
  }
}

/// Slices of a message, in their order.
using Sent = std::vector<std::span<const std::byte>>;
using Received = std::vector<std::span<std::byte>>;

/// Copies a message, which the two ranks may cut into slices differently.
void copy_message(const Sent& from, const Received& to, int sender, std::string_view what) {
  const auto bytes = [](const auto& slices) {
    size_t sum = 0;
    for (const auto& slice : slices) sum += slice.size();
    return sum;
  };
  GYRE_CHECK(bytes(from) == bytes(to), "{}: {} bytes from rank {}, {} expected", what, bytes(from),
             sender, bytes(to));
  auto source = from.begin();
  size_t at = 0;
  for (std::span<std::byte> left : to)
    while (!left.empty()) {
      const size_t n = std::min(left.size(), source->size() - at);
      std::memmove(left.data(), source->data() + at, n);
      left = left.subspan(n);
      at += n;
      if (at < source->size()) continue;
      ++source;
      at = 0;
    }
}

/// The part of one rank in a collective.
struct RankPart {
  Collective call;  ///< without its lists of sizes, which end with the call that submits it
  /// [ranks + 1] Where the blocks of ranks begin in `send` and `recv`, and where the last one ends.
  std::vector<int64_t> send_begins = {0}, recv_begins = {0};

  RankPart() = default;
  explicit RankPart(const Collective& of) : call(of) {
    for (const int64_t bytes : of.send_bytes) send_begins.push_back(send_begins.back() + bytes);
    for (const int64_t bytes : of.recv_bytes) recv_begins.push_back(recv_begins.back() + bytes);
    call.send_bytes = call.recv_bytes = {};
  }
  std::span<const std::byte> to(int rank) const {
    if (call.kind == Collective::Kind::all_gather) return call.send;
    return call.send.subspan(send_begins[rank], send_begins[rank + 1] - send_begins[rank]);
  }
  std::span<std::byte> from(int rank) const {
    return call.recv.subspan(recv_begins[rank], recv_begins[rank + 1] - recv_begins[rank]);
  }
};

void reduce(const std::vector<RankPart>& parts, std::string_view what) {
  const Collective& first = parts.front().call;
  std::vector<const std::byte*> terms;
  std::vector<std::byte*> results;
  for (const RankPart& part : parts) {
    const Collective& call = part.call;
    GYRE_CHECK(
        call.recv.size() == first.recv.size() && call.type == first.type && call.op == first.op,
        "{}: rank {} reduces {} bytes of {}, rank 0 {} of {}", what, terms.size(), call.recv.size(),
        name_of(call.type), first.recv.size(), name_of(first.type));
    terms.push_back(call.in_place() ? call.recv.data() : call.send.data());
    results.push_back(call.recv.data());
  }
  if (first.in_place()) return reduce(terms, results, first);
  for (std::byte* const result : results) {
    reduce(terms, {result}, first);
    for (const std::byte*& term : terms) term += first.recv.size();
  }
}

/// Moves the data of a collective of which all ranks have submitted their parts.
void carry_out(const std::vector<RankPart>& parts, std::string_view what) {
  using Kind = Collective::Kind;
  const Collective& first = parts.front().call;
  const auto ranks = static_cast<int>(parts.size());
  for (const RankPart& part : parts)
    GYRE_CHECK(part.call.kind == first.kind && part.call.root == first.root,
               "{}: ranks call different collectives", what);
  switch (first.kind) {
    case Kind::all_gather:
    case Kind::all_to_all:
      for (int to = 0; to < ranks; ++to)
        for (int from = 0; from < ranks; ++from)
          copy_message({parts[from].to(to)}, {parts[to].from(from)}, from, what);
      break;
    case Kind::reduce_scatter:
    case Kind::all_reduce:
      return reduce(parts, what);
    case Kind::broadcast:
      for (int to = 0; to < ranks; ++to)
        copy_message({parts[first.root].call.recv}, {parts[to].call.recv}, first.root, what);
      break;
    case Kind::barrier:
      break;
  }
}

/// Ends the thread of a rank after another one has failed, whose error is kept.
struct Stopped : std::exception {};

}  // namespace

/// Decides which rank's thread runs.
class RanksInProcess::Turns {
 public:
  explicit Turns(int ranks) : changed_(ranks), live_(ranks, false) {}
  int ranks() const { return static_cast<int>(live_.size()); }

  void run(const std::function<void(int)>& body) {
    if (stops_) std::rethrow_exception(error_);
    turn_ = idle_ = 0;
    error_ = nullptr;
    std::vector<std::thread> threads;
    start(threads, body);
    for (std::thread& thread : threads) thread.join();
    if (error_) std::rethrow_exception(error_);
  }
  /// A rank has submitted something, for which another one may wait.
  void submitted() { idle_ = 0; }
  /// Lets the other ranks run until it is this rank's turn again. `what`: the step that waits.
  void pass_on(const std::string& what) {
    std::unique_lock lock(mutex_);
    const size_t mine = turn_;
    if (++idle_ > std::ranges::count(live_, true))
      throw_runtime("{}: all ranks of a replay wait for each other", what);
    next();
    changed_[mine].wait(lock, [&] { return turn_ == mine; });
    if (stops_) throw Stopped();
  }

 private:
  /// Starts a thread for each rank. They run when all are started, and end at once if one cannot be.
  void start(std::vector<std::thread>& threads, const std::function<void(int)>& body) {
    const std::unique_lock lock(mutex_);
    try {
      for (size_t rank = 0; rank < live_.size(); ++rank) {
        threads.emplace_back([&, rank] { take_part(rank, body); });
        live_[rank] = true;
      }
    } catch (const std::system_error& error) {
      stops_ = true;
      error_ = std::make_exception_ptr(Error(
          ExitCode::runtime,
          fmt::format("a replay of {} ranks needs as many threads, and the system starts {} ({}): "
                      "--cp {} fits",
                      live_.size(), threads.size(), error.code().message(),
                      std::max<size_t>(1, threads.size()))));
    }
  }
  void take_part(size_t rank, const std::function<void(int)>& body) {
    std::unique_lock lock(mutex_);
    changed_[rank].wait(lock, [&] { return turn_ == rank; });
    lock.unlock();
    try {
      if (!stops_) body(static_cast<int>(rank));
    } catch (const AgreedError&) {
      keep_error();  // the others throw it, too
    } catch (...) {
      keep_error();
      stops_ = true;
    }
    lock.lock();
    live_[rank] = false;
    idle_ = 0;
    next();
  }
  /// Later errors may be consequences of the first one.
  void keep_error() {
    if (!error_) error_ = std::current_exception();
  }
  void next() {
    for (size_t i = 1; i <= live_.size(); ++i) {
      const size_t rank = (turn_ + i) % live_.size();
      if (!live_[rank]) continue;
      turn_ = rank;
      break;
    }
    changed_[turn_].notify_one();
  }

  std::mutex mutex_;
  std::vector<std::condition_variable> changed_;  // [ranks]
  std::vector<bool> live_;                        // [ranks] whose body has not returned
  size_t turn_ = 0;
  int64_t idle_ = 0;  // ranks that passed their turn on since anything was submitted
  std::exception_ptr error_;
  bool stops_ = false;  // a rank failed alone: the others end
};

struct RanksInProcess::Group {
  explicit Group(int64_t ranks) : size(static_cast<int>(ranks)) {}
  /// Number of parts that others have to submit before an operation is complete.
  using Missing = std::shared_ptr<int64_t>;
  /// A message that its sender or its receiver has submitted; the other is missing.
  struct Message {
    Sent from;
    Received to;
    Missing missing;
  };
  /// A collective that some ranks have submitted.
  struct Meeting {
    std::vector<RankPart> parts;  ///< [ranks]
    Missing missing;
  };
  int size;
  std::map<std::tuple<int, int, int64_t>, Message> messages;  ///< by sender, receiver, and number
  std::map<int64_t, Meeting> meetings;                        ///< by number
  /// Groups that were split off, by the number of the split and the color.
  std::map<std::pair<int64_t, int>, std::shared_ptr<Group>> splits;
};

/// An operation of one rank.
class RanksInProcess::Operation final : public Work {
 public:
  Operation(Turns& turns, Group::Missing missing, std::string_view what)
      : turns_(turns), missing_(std::move(missing)), what_(what) {}
  bool test() override { return *missing_ == 0; }
  void wait() override {
    while (!test()) turns_.pass_on(what_);
  }

 private:
  Turns& turns_;
  Group::Missing missing_;
  std::string what_;
};

class RanksInProcess::Rank final : public Communicator {
 public:
  Rank(Turns& turns, std::shared_ptr<Group> group, int rank)
      : turns_(turns), group_(std::move(group)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_->size; }
  int ranks_of_run() const override { return turns_.ranks(); }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return "in-process"; }

  std::unique_ptr<Communicator> split(int color) override {
    const std::vector<int> colors = all_gather_value(*this, color);
    std::shared_ptr<Group>& part = group_->splits[{splits_++, color}];
    if (part == nullptr) part = std::make_shared<Group>(std::ranges::count(colors, color));
    const auto rank = std::count(colors.begin(), colors.begin() + rank_, color);
    return std::make_unique<Rank>(turns_, part, static_cast<int>(rank));
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream&,
                      std::string_view what) override {
    std::map<int, Sent> outgoing;
    for (const SendSlice& send : sends) outgoing[send.peer].push_back(send.data);
    std::map<int, Received> incoming;
    for (const RecvSlice& recv : recvs) incoming[recv.peer].push_back(recv.data);
    const auto missing = std::make_shared<int64_t>(0);
    for (auto& [peer, slices] : outgoing)
      submit({rank_, peer, sent_[peer]++}, {std::move(slices), {}, missing}, what);
    for (auto& [peer, slices] : incoming)
      submit({peer, rank_, received_[peer]++}, {{}, std::move(slices), missing}, what);
    turns_.submitted();
    return std::make_unique<Operation>(turns_, missing, what);
  }

  WorkPtr do_collective(const Collective& call, Stream&, std::string_view what) override {
    const int64_t number = collectives_++;
    Group::Meeting& meeting = group_->meetings[number];
    if (meeting.parts.empty())
      meeting = {std::vector<RankPart>(size()), std::make_shared<int64_t>(size())};
    meeting.parts[rank_] = RankPart(call);
    const Group::Missing missing = meeting.missing;
    if (--*missing == 0) {
      carry_out(meeting.parts, what);
      group_->meetings.erase(number);
    }
    turns_.submitted();
    return std::make_unique<Operation>(turns_, missing, what);
  }

 private:
  /// Submits one end of a message. Copies it if the other end is there.
  void submit(const std::tuple<int, int, int64_t>& key, Group::Message end, std::string_view what) {
    const auto other = group_->messages.find(key);
    if (other == group_->messages.end()) {
      ++*end.missing;
      group_->messages.emplace(key, std::move(end));
      return;
    }
    const Group::Message message = std::move(group_->messages.extract(other).mapped());
    const bool receives = end.from.empty();
    copy_message(receives ? message.from : end.from, receives ? end.to : message.to,
                 std::get<0>(key), what);
    --*message.missing;
  }

  Turns& turns_;
  std::shared_ptr<Group> group_;
  int rank_;
  int64_t splits_ = 0, collectives_ = 0;
  std::map<int, int64_t> sent_, received_;  // messages so far, by peer
};

RanksInProcess::RanksInProcess(int size) : turns_(std::make_unique<Turns>(size)) {
  const auto group = std::make_shared<Group>(size);
  for (int rank = 0; rank < size; ++rank)
    ranks_.push_back(std::make_unique<Rank>(*turns_, group, rank));
}

RanksInProcess::~RanksInProcess() = default;

void RanksInProcess::run(const std::function<void(int rank)>& body) {
  turns_->run(body);
}

}  // namespace gyre
