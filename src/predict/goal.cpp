#include "predict/goal.hpp"

#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "predict/task_graph.hpp"

namespace gyre {
namespace {

std::string text_of(const Task& task) {
  if (task.kind == Task::Kind::compute)
    return fmt::format("calc {}", std::llround(task.seconds * 1e9));
  const bool sends = task.kind == Task::Kind::send;
  return fmt::format("{} {}b {} {} tag {}", sends ? "send" : "recv", task.bytes,
                     sends ? "to" : "from", task.peer, task.tag);
}

}  // namespace

std::string goal_text(const std::vector<Programs>& passes) {
  const int ranks = passes.front().ranks();
  std::string text = fmt::format("num_ranks {}\n", ranks);
  const auto to = std::back_inserter(text);
  for (int r = 0; r < ranks; ++r) {
    fmt::format_to(to, "\nrank {} {{\n", r);
    int64_t label = 0;
    for (const Task& task : tasks_of(passes, r, "a GOAL schedule")) {
      fmt::format_to(to, "l{}: {}\n", ++label, text_of(task));
      for (const int64_t other : task.required)
        fmt::format_to(to, "l{} requires l{}\n", label, other);
    }
    text += "}\n";
  }
  return text;
}

}  // namespace gyre
