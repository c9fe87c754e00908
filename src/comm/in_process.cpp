#include "comm/in_process.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "comm/agree.hpp"
#include "core/bf16.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

using Payload = std::vector<std::byte>;

template <class T>
T reduced(T a, T b, ReduceOp op) {
  if (op == ReduceOp::sum) return a + b;
  return op == ReduceOp::max ? std::max(a, b) : std::min(a, b);
}
template <>
bf16 reduced(bf16 a, bf16 b, ReduceOp op) {
  return to_bf16(reduced(to_float(a), to_float(b), op));
}

/// to [n] <- parts [ranks, n], reduced in the order of ranks.
template <class T>
void reduce_as(const Payload& parts, std::span<std::byte> to, ReduceOp op) {
  const size_t n = to.size() / sizeof(T);
  const auto* const terms = reinterpret_cast<const T*>(parts.data());
  auto* const results = reinterpret_cast<T*>(to.data());
  for (size_t i = 0; i < n; ++i) {
    results[i] = terms[i];
    for (size_t at = i + n; at < parts.size() / sizeof(T); at += n)
      results[i] = reduced(results[i], terms[at], op);
  }
}

void reduce(const Payload& parts, std::span<std::byte> to, DType type, ReduceOp op) {
  switch (type) {
    case DType::f32:
      return reduce_as<float>(parts, to, op);
    case DType::f64:
      return reduce_as<double>(parts, to, op);
    case DType::bf16:
      return reduce_as<bf16>(parts, to, op);
    case DType::i32:
      return reduce_as<int32_t>(parts, to, op);
    case DType::i64:
      return reduce_as<int64_t>(parts, to, op);
  }
}

/// Ends the thread of a rank after another rank has failed.
struct Stopped {};

}  // namespace

/// Decides which rank's thread runs.
class RanksInProcess::Turns {
 public:
  explicit Turns(int ranks) : live_(ranks, false) {}

  void run(const std::function<void(int)>& body) {
    live_.assign(live_.size(), true);
    turn_ = idle_ = 0;
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < live_.size(); ++rank)
      threads.emplace_back([&, rank] { take_part(rank, body); });
    for (std::thread& thread : threads) thread.join();
    if (error_) std::rethrow_exception(error_);
  }
  /// A rank has sent something, for which another one may wait.
  void sent() { idle_ = 0; }
  /// Lets the other ranks run until it is this rank's turn again.
  void pass_on() {
    std::unique_lock lock(mutex_);
    const size_t mine = turn_;
    if (++idle_ > std::ranges::count(live_, true))
      throw_runtime("all ranks of a replay wait for messages that nobody has sent");
    next();
    changed_.wait(lock, [&] { return turn_ == mine; });
    if (error_) throw Stopped();
  }

 private:
  void take_part(size_t rank, const std::function<void(int)>& body) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return turn_ == rank; });
    lock.unlock();
    try {
      if (!error_) body(static_cast<int>(rank));
    } catch (const Stopped&) {
      // The rank that failed has the error.
    } catch (...) {
      error_ = std::current_exception();
    }
    lock.lock();
    live_[rank] = false;
    idle_ = 0;
    next();
  }
  void next() {
    for (size_t i = 1; i <= live_.size(); ++i) {
      const size_t rank = (turn_ + i) % live_.size();
      if (!live_[rank]) continue;
      turn_ = rank;
      break;
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> live_;  // [ranks] whose body has not returned
  size_t turn_ = 0;
  int64_t idle_ = 0;  // ranks that passed their turn on since anything was sent
  std::exception_ptr error_;
};

struct RanksInProcess::Group {
  explicit Group(int64_t ranks) : size(static_cast<int>(ranks)) {}
  int size;
  /// Messages that were sent and not received yet, by sender, receiver, and number.
  std::map<std::tuple<int, int, int64_t>, Payload> messages;
  /// Groups that were split off, by the number of the split and the color.
  std::map<std::pair<int64_t, int>, std::shared_ptr<Group>> parts;
};

/// Messages that a rank is to receive in one operation.
class RanksInProcess::Receipt final : public Work {
 public:
  Receipt(Turns& turns, std::shared_ptr<Group> group, int rank, std::string_view what)
      : turns_(turns), group_(std::move(group)), rank_(rank), what_(what) {}
  void expect(int peer, int64_t number, std::vector<std::span<std::byte>> to) {
    expected_.push_back({{peer, rank_, number}, std::move(to)});
  }
  /// Calls `f` once all messages are there.
  void then(std::function<void()> f) { then_ = std::move(f); }

  bool test() override {
    if (done_) return true;
    for (const auto& [key, to] : expected_)
      if (!group_->messages.contains(key)) return false;
    for (const auto& [key, to] : expected_) {
      const Payload message = std::move(group_->messages.extract(key).mapped());
      size_t at = 0;
      for (const std::span<std::byte> part : to) {
        GYRE_CHECK(at + part.size() <= message.size(), "{}: {} bytes from rank {} are too few",
                   what_, message.size(), std::get<0>(key));
        std::copy_n(message.begin() + static_cast<int64_t>(at), part.size(), part.begin());
        at += part.size();
      }
      GYRE_CHECK(at == message.size(), "{}: {} bytes from rank {}, {} expected", what_,
                 message.size(), std::get<0>(key), at);
    }
    if (then_) then_();
    return done_ = true;
  }
  void wait() override {
    while (!test()) turns_.pass_on();
  }

 private:
  using Key = std::tuple<int, int, int64_t>;
  Turns& turns_;
  std::shared_ptr<Group> group_;
  int rank_;
  std::string what_;
  std::vector<std::pair<Key, std::vector<std::span<std::byte>>>> expected_;
  std::function<void()> then_;
  bool done_ = false;
};

class RanksInProcess::Rank final : public Communicator {
 public:
  Rank(Turns& turns, std::shared_ptr<Group> group, int rank)
      : turns_(turns), group_(std::move(group)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_->size; }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return "in-process"; }

  std::unique_ptr<Communicator> split(int color) override {
    const std::vector<int> colors = all_gather_value(*this, color);
    std::shared_ptr<Group>& part = group_->parts[{splits_++, color}];
    if (part == nullptr) part = std::make_shared<Group>(std::ranges::count(colors, color));
    const auto rank = std::count(colors.begin(), colors.begin() + rank_, color);
    return std::make_unique<Rank>(turns_, part, static_cast<int>(rank));
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream&,
                      std::string_view what) override {
    return transfer(sends, recvs, what);
  }

  WorkPtr do_collective(const Collective& call, Stream&, std::string_view what) override {
    using Kind = Collective::Kind;
    std::vector<SendSlice> sends;
    std::vector<RecvSlice> recvs;
    const auto each = [&](const auto& f) {
      for (int r = 0; r < size(); ++r) f(r);
    };
    const auto receive_blocks = [&](std::span<std::byte> left, const auto& bytes_from) {
      each([&](int r) {
        recvs.push_back({r, left.first(bytes_from(r))});
        left = left.subspan(bytes_from(r));
      });
    };
    const auto received = [&](int r) { return static_cast<size_t>(call.recv_bytes[r]); };
    switch (call.kind) {
      case Kind::all_gather:
        each([&](int r) { sends.push_back({r, call.send}); });
        receive_blocks(call.recv, received);
        break;
      case Kind::all_to_all: {
        std::span<const std::byte> left = call.send;
        each([&](int r) {
          sends.push_back({r, left.first(call.send_bytes[r])});
          left = left.subspan(call.send_bytes[r]);
        });
        receive_blocks(call.recv, received);
        break;
      }
      case Kind::reduce_scatter:
      case Kind::all_reduce: {
        const size_t block = call.recv.size();
        each([&](int r) {
          sends.push_back({r, call.in_place() ? std::span<const std::byte>(call.recv)
                                              : call.send.subspan(r * block, block)});
        });
        const auto parts = std::make_shared<Payload>(block * size());
        receive_blocks(*parts, [&](int) { return block; });
        auto work = transfer(sends, recvs, what);
        work->then([parts, to = call.recv, type = call.type, op = call.op] {
          reduce(*parts, to, type, op);
        });
        return work;
      }
      case Kind::broadcast:
        if (rank_ != call.root) recvs.push_back({call.root, call.recv});
        each([&](int r) {
          if (rank_ == call.root && r != rank_) sends.push_back({r, call.recv});
        });
        break;
      case Kind::barrier:
        each([&](int r) { sends.push_back({r, {}}); });
        each([&](int r) { recvs.push_back({r, {}}); });
        break;
    }
    return transfer(sends, recvs, what);
  }

 private:
  std::unique_ptr<Receipt> transfer(std::span<const SendSlice> sends,
                                    std::span<const RecvSlice> recvs, std::string_view what) {
    std::map<int, Payload> outgoing;
    for (const SendSlice& send : sends) {
      Payload& message = outgoing[send.peer];
      message.insert(message.end(), send.data.begin(), send.data.end());
    }
    for (auto& [peer, message] : outgoing)
      group_->messages[{rank_, peer, sent_[peer]++}] = std::move(message);
    if (!outgoing.empty()) turns_.sent();
    std::map<int, std::vector<std::span<std::byte>>> incoming;
    for (const RecvSlice& recv : recvs) incoming[recv.peer].push_back(recv.data);
    auto work = std::make_unique<Receipt>(turns_, group_, rank_, what);
    for (auto& [peer, to] : incoming) work->expect(peer, received_[peer]++, std::move(to));
    return work;
  }

  Turns& turns_;
  std::shared_ptr<Group> group_;
  int rank_;
  int64_t splits_ = 0;
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
