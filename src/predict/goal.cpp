#include "predict/goal.hpp"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <map>

#include "core/error.hpp"

namespace gyre {
namespace {

/// The schedule of one rank.
class GoalRank {
 public:
  GoalRank(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  void add(const Op& op) {
    switch (op.kind) {
      case OpKind::spend:
        last_ = line(fmt::format("calc {}", std::llround(op.seconds * 1e9)), {last_});
        return;
      case OpKind::send:
      case OpKind::receive:
        message(op);
        return;
      case OpKind::join:
        throw_usage(
            "a GOAL schedule has messages, and a collective of the library has none that "
            "the plan names; leave out --collectives library");
      case OpKind::wait: {
        std::vector<int64_t>& open = open_[op.exchange];
        if (open.empty()) return;
        open.push_back(last_);
        last_ = line("calc 0", open);
        open.clear();
      }
    }
  }
  std::string text() const { return fmt::format("\nrank {} {{\n{}}}\n", rank_, lines_); }

 private:
  void message(const Op& op) {
    const bool sends = op.kind == OpKind::send;
    const int peer = (rank_ + op.hop) % ranks_;
    const int64_t tag = (sends ? sent_ : received_)[peer]++;
    open_[op.exchange].push_back(line(fmt::format("{} {}b {} {} tag {}", sends ? "send" : "recv",
                                                  op.bytes, sends ? "to" : "from", peer, tag),
                                      {last_}));
  }
  /// Adds an operation, and returns its label. Label 0 is the beginning.
  int64_t line(const std::string& what, const std::vector<int64_t>& required) {
    const int64_t label = ++labels_;
    fmt::format_to(std::back_inserter(lines_), "l{}: {}\n", label, what);
    for (const int64_t other : required)
      if (other > 0) fmt::format_to(std::back_inserter(lines_), "l{} requires l{}\n", label, other);
    return label;
  }

  int rank_, ranks_;
  int64_t labels_ = 0, last_ = 0;
  std::map<int, std::vector<int64_t>> open_;  // labels of the messages of open exchanges
  std::map<int, int64_t> sent_, received_;    // messages by peer
  std::string lines_;
};

}  // namespace

std::string goal_text(const std::vector<Programs>& passes) {
  const int ranks = passes.front().ranks();
  std::string text = fmt::format("num_ranks {}\n", ranks);
  for (int r = 0; r < ranks; ++r) {
    GoalRank rank(r, ranks);
    for (const Programs& programs : passes)
      for (const RankProgram::Part& part : programs.rank(r).parts)
        for (uint32_t time = 0; time < part.times; ++time)
          for (const Op& op : programs.block(part.block).ops) rank.add(op);
    text += rank.text();
  }
  return text;
}

}  // namespace gyre
