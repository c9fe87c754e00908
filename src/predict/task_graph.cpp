#include "predict/task_graph.hpp"

#include <map>

#include "core/error.hpp"

namespace gyre {
namespace {

class TaskWriter {
 public:
  TaskWriter(int rank, int ranks, const std::string& format)
      : rank_(rank), ranks_(ranks), format_(format) {}

  void add(const Op& op) {
    switch (op.kind) {
      case OpKind::spend:
        last_ = add({.seconds = op.seconds, .required = after(last_)});
        return;
      case OpKind::send:
      case OpKind::receive:
        open_[op.exchange].push_back(add(message(op)));
        return;
      case OpKind::join:
        throw_usage(
            "{} has messages, and a collective of the library has none that the plan names; leave "
            "out --collectives library",
            format_);
      case OpKind::wait: {
        std::vector<int64_t>& open = open_[op.exchange];
        if (open.empty()) return;
        if (last_ > 0) open.push_back(last_);
        last_ = add({.required = open});
        open.clear();
      }
    }
  }
  std::vector<Task> tasks() && { return std::move(tasks_); }

 private:
  Task message(const Op& op) {
    const bool sends = op.kind == OpKind::send;
    const int peer = (rank_ + op.hop) % ranks_;
    return {.kind = sends ? Task::Kind::send : Task::Kind::receive,
            .bytes = op.bytes,
            .peer = peer,
            .tag = (sends ? sent_ : received_)[peer]++,
            .required = after(last_)};
  }
  static std::vector<int64_t> after(int64_t label) {
    return label > 0 ? std::vector{label} : std::vector<int64_t>();
  }
  /// Returns the label.
  int64_t add(Task task) {
    tasks_.push_back(std::move(task));
    return std::ssize(tasks_);
  }

  int rank_, ranks_;
  const std::string& format_;
  int64_t last_ = 0;                          // label of the last computation; 0: none
  std::map<int, std::vector<int64_t>> open_;  // labels of the messages of open exchanges
  std::map<int, int64_t> sent_, received_;    // messages by peer
  std::vector<Task> tasks_;
};

}  // namespace

std::vector<Task> tasks_of(const std::vector<Programs>& passes, int rank,
                           const std::string& format) {
  TaskWriter writer(rank, passes.front().ranks(), format);
  for (const Programs& programs : passes)
    for (const RankProgram::Part& part : programs.rank(rank).parts)
      for (uint32_t time = 0; time < part.times; ++time)
        for (const Op& op : programs.block(part.block).ops) writer.add(op);
  return std::move(writer).tasks();
}

}  // namespace gyre
