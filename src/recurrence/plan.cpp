#include "recurrence/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "recurrence/convolution.hpp"

namespace gyre {

std::map<int64_t, std::vector<DocumentPart>> parts_of(const Layout& layout) {
  std::map<int64_t, std::vector<DocumentPart>> documents;
  for (int rank = 0; rank < layout.cp(); ++rank) {
    const std::vector<Fragment>& fragments = layout.shard(rank).fragments;
    for (size_t i = 0; i < fragments.size(); ++i)
      documents[fragments[i].segment].push_back(
          {fragments[i].start.value(), fragments[i].length, rank, static_cast<int>(i)});
  }
  for (auto& [document, parts] : documents) std::ranges::sort(parts, {}, &DocumentPart::start);
  return documents;
}

StateChain chain_of(const Layout& layout, int rank) {
  StateChain chain;
  const std::vector<Fragment>& own = layout.shard(rank).fragments;
  if (own.empty()) return chain;
  const auto documents = parts_of(layout);
  for (const DocumentPart& part : documents.at(own.front().segment))
    if (part.start < own.front().start.value()) chain.before.push_back(part.rank);
  for (const DocumentPart& part : documents.at(own.back().segment))
    if (part.start > own.back().start.value()) chain.behind.push_back(part.rank);
  chain.passes_through = own.size() == 1 && !chain.before.empty() && !chain.behind.empty();
  return chain;
}

bool crosses_ranks(const Layout& layout) {
  return std::ranges::any_of(parts_of(layout),
                             [](const auto& parts) { return parts.second.size() > 1; });
}

std::string state_refusal(const Layout& layout) {
  constexpr const char* what_works =
      "states pass from the last part of a rank to the first of another, where ranks own "
      "consecutive slots";
  for (int rank = 0; rank < layout.cp(); ++rank)
    for (const Fragment& f : layout.shard(rank).fragments)
      if (f.stride != 1 && f.length > 1)
        return fmt::format("under {} rank {} has every {}th token of document {}; {}", layout.name,
                           rank, f.stride, f.segment, what_works);
  for (const auto& [document, parts] : parts_of(layout))
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const DocumentPart &here = parts[i], &next = parts[i + 1];
      const auto last = std::ssize(layout.shard(here.rank).fragments) - 1;
      if (here.index != last || next.index != 0)
        return fmt::format(
            "under {} part {} of rank {} continues as part {} of rank {} (document {}); {}",
            layout.name, here.index, here.rank, next.index, next.rank, document, what_works);
    }
  return "";
}

int64_t elements_of(StateKind kind, const RecurrenceShape& shape) {
  return shape.value_heads *
         (kind == StateKind::state ? shape.state_elements() : shape.map_elements());
}

int64_t bytes_of_message(const StateMessage& message, const StatePlan& plan,
                         const RecurrenceShape& shape) {
  int64_t elements = 0;
  for (const int buffer : message.buffers) elements += elements_of(plan.buffers[buffer], shape);
  return elements * static_cast<int64_t>(sizeof(float)) + message.row_bytes;
}

int64_t buffer_bytes(const StatePlan& plan, const RecurrenceShape& shape) {
  int64_t elements = 0;
  for (const StateKind kind : plan.buffers) elements += elements_of(kind, shape);
  return elements * static_cast<int64_t>(sizeof(float));
}

double recurrence_flops(Pass pass, int64_t tokens, const RecurrenceShape& shape) {
  const int products = (pass == Pass::forward ? 2 : 4) + (shape.delta ? 1 : 0) +
                       (shape.delta && pass == Pass::backward ? 1 : 0);
  return 2.0 * products * shape.value_heads * shape.state_elements() * tokens;
}

std::pair<double, double> flops_of(const StateStep& step, const StatePlan& plan, Pass pass,
                                   const RecurrenceShape& shape) {
  const double product = 2.0 * shape.value_heads * shape.state_elements();
  const double map = 2.0 * shape.value_heads * shape.map_elements();
  const auto tokens = [&](int part) -> double { return part < 0 ? 0 : plan.parts[part]; };
  if (const auto* run = std::get_if<state_step::Run>(&step))
    return {recurrence_flops(pass, plan.parts[run->part], shape), 0};
  if (const auto* sum = std::get_if<state_step::Summarize>(&step)) {
    const double products = shape.delta ? 2 : 1;  // k uᵀ, and Sᵀk; of S and of M
    const double of_map = shape.delta && !sum->begins ? map : 0;
    return {0, tokens(sum->part) * products * (product + of_map)};
  }
  if (const auto* sum = std::get_if<state_step::SummarizeBack>(&step))
    return {0, tokens(sum->part) * (shape.delta ? 3 : 1) * product};
  if (const auto* compose = std::get_if<state_step::Compose>(&step)) {
    const auto maps = std::ssize(compose->terms) - (compose->start < 0 ? 1 : 0);
    return {0, maps * (shape.delta ? shape.key_dim : 1) * product};
  }
  if (std::holds_alternative<state_step::ConvolveSlopes>(step)) {
    const int64_t all = std::accumulate(plan.parts.begin(), plan.parts.end(), int64_t{0});
    const double sums = convolution_flops(Pass::forward, all, shape);  // of weights, and z again
    return {sums, sums};
  }
  const auto convolved = [&](const std::vector<int>& parts) -> std::pair<double, double> {
    int64_t sum = 0;
    for (const int part : parts) sum += plan.parts[part];
    return {convolution_flops(Pass::forward, sum, shape), 0};
  };
  if (const auto* convolve = std::get_if<state_step::Convolve>(&step))
    return convolved(convolve->parts);
  if (const auto* back = std::get_if<state_step::ConvolveBack>(&step))
    return convolved(back->parts);
  return {0, 0};
}

StateCount count(const StatePlan& plan, Pass pass, const RecurrenceShape& shape) {
  StateCount counted;
  for (const StateStep& step : plan.steps(pass)) {
    const auto [flops, more] = flops_of(step, plan, pass, shape);
    counted.flops += flops;
    counted.more_flops += more;
    if (const auto* run = std::get_if<state_step::Run>(&step))
      counted.tokens += plan.parts[run->part];
    const auto* exchange = std::get_if<state_step::Exchange>(&step);
    if (exchange == nullptr) continue;
    for (const StateMessage& m : exchange->sends) {
      if (m.peer == plan.rank && !m.pieces.empty()) continue;  // of its own part
      const auto copies = exchange->all_gather ? std::ssize(exchange->recvs) - 1 : 1;
      counted.bytes_sent += copies * bytes_of_message(m, plan, shape);
      ++counted.messages;
    }
    for (const StateMessage& m : exchange->recvs)
      if (m.peer != plan.rank) counted.bytes_received += bytes_of_message(m, plan, shape);
  }
  return counted;
}

}  // namespace gyre
