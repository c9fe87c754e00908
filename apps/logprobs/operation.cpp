#include "apps/logprobs/operation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/registry.hpp"
#include "core/index.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

/// Names an input that the operation reads and the file lacks; empty if it lacks none.
std::string missing_input(const InputNeeds& needs, const LogprobsWorkload& problem) {
  if (needs.ids && problem.picks == 0) return problem.origin + " has no /logprobs/ids";
  if (needs.hidden && !problem.has_hidden) return problem.origin + " has no /logprobs/hidden";
  if (needs.teacher && !problem.has_teacher) return problem.origin + " has no /logprobs/teacher";
  if (needs.teacher_values && !problem.has_teacher_values)
    return problem.origin + " has neither /logprobs/teacher nor /logprobs/teacher_values";
  return "";
}

}  // namespace

bool LogprobsOperation::reads(const std::string& option) const {
  return std::ranges::find(own_options, option) != own_options.end();
}

std::vector<LogprobsRun> runs_of(const LogprobsOptions& o) {
  std::vector<LogprobsRun> runs;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (!o.wants(operation.name) || (o.pass == "bwd" && !operation.has_backward())) continue;
    for (const LogprobsMethod& method : operation.methods)
      if (o.wants_method(method.name)) runs.push_back({operation, method});
  }
  return runs;
}

std::vector<Pass> LogprobsRun::passes(const LogprobsOptions& o) const {
  std::vector<Pass> passes = o.passes();
  if (!operation.has_backward()) std::erase(passes, Pass::backward);
  return passes;
}

std::unique_ptr<LogprobsOp> LogprobsRun::make(LogprobsContext& context) const {
  std::unique_ptr<LogprobsOp> op = method.make(context);
  op->set_names(operation.name, method.name);
  return op;
}

int64_t LogprobsRun::planned_bytes(const LogprobsWorkload& problem, const LogprobsOptions& o,
                                   int rank) const {
  const MemoryCase run{problem, o, rank % o.tp};
  const double picks = std::max(problem.picks, problem.top);
  // A few arrays of one or `picks` numbers per token, and their copies from all ranks.
  const double small = run.tokens() * (40 + 24 * picks + 8 * o.tp * (1 + picks));
  if (operation.bytes_without_logits) return saturated(small + operation.bytes_without_logits(run));
  const MatrixNeeds& needs = operation.matrices;
  const bool differentiates = operation.has_backward() && o.pass != "fwd";
  const double backward = differentiates ? needs.backward : 0;
  double element = run.element_bytes() * (1 + needs.always + backward);
  element += size_of(problem.output_type) * (needs.output + (differentiates ? needs.d_output : 0));
  element += 4 * method.f32_matrices;
  if (!o.output.empty() && backward > 0) element += 4;  // the gradient, kept for the file
  return saturated(small + run.tokens() * run.columns() * element);
}

std::string LogprobsRun::why_not(const LogprobsWorkload& problem, const LogprobsOptions& o,
                                 int64_t memory_bytes, int rank) const {
  if (std::string reason = missing_input(operation.needs, problem); !reason.empty()) return reason;
  if (std::string reason = method.why_not(problem, o); !reason.empty()) return reason;
  const int64_t bytes = planned_bytes(problem, o, rank);
  if (memory_bytes == 0 || bytes <= memory_bytes) return "";
  const double share = static_cast<double>(memory_bytes) / static_cast<double>(bytes);
  const double fit = std::floor(share * static_cast<double>(problem.tokens()));
  return fmt::format("needs {} a rank, and {} are available; {}", si_text(bytes, "B"),
                     si_text(memory_bytes, "B"),
                     fit > 0 ? fmt::format("about {:.0f} tokens fit", fit)
                             : std::string("not even one token fits: take more ranks"));
}

}  // namespace gyre
