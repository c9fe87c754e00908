#include "recurrence/plan.hpp"

#include <numeric>

#include "recurrence/convolution.hpp"

namespace gyre {

namespace {

/// Bytes of a token in the heads that a rank computes.
int64_t bytes_of_token(RecurrenceArray array, const StatePlan& plan, const RecurrenceShape& shape) {
  return width_of(shape, array) / plan.head_ranks() *
         static_cast<int64_t>(size_of(stored_type(array, plan.type)));
}

}  // namespace

int64_t tokens_of_all(const StatePlan& plan) {
  return std::accumulate(plan.rank_tokens.begin(), plan.rank_tokens.end(), int64_t{0});
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

int64_t bytes_of_token(const state_step::HeadExchange& step, const StatePlan& plan,
                       const RecurrenceShape& shape) {
  int64_t bytes = 0;
  for (const RecurrenceArray array : step.arrays) bytes += bytes_of_token(array, plan, shape);
  return bytes;
}

HeadBytes bytes_of_heads(const state_step::HeadExchange& step, const StatePlan& plan,
                         const RecurrenceShape& shape) {
  const int64_t of_token = bytes_of_token(step, plan, shape);
  const int64_t own = plan.rank_tokens[plan.rank];
  const int64_t others = of_token * (tokens_of_all(plan) - own),
                mine = of_token * (plan.head_ranks() - 1) * own;
  return step.home ? HeadBytes{others, mine} : HeadBytes{mine, others};
}

int64_t buffer_bytes(const StatePlan& plan, const RecurrenceShape& shape) {
  int64_t elements = 0, of_token = 0;
  for (const StateKind kind : plan.buffers) elements += elements_of(kind, shape);
  for (int a = 0; a < recurrence_arrays; ++a)
    if (has_array(shape, static_cast<RecurrenceArray>(a)))
      of_token += bytes_of_token(static_cast<RecurrenceArray>(a), plan, shape);
  return elements * static_cast<int64_t>(sizeof(float)) + tokens_of_all(plan) * of_token;
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
  const auto tokens = [&](int part) -> double { return part < 0 ? 0 : plan.parts[part].tokens; };
  if (const auto* run = std::get_if<state_step::Run>(&step))
    return {recurrence_flops(pass, plan.parts[run->part].tokens, plan.computed(shape)), 0};
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
  if (std::holds_alternative<state_step::Join>(step))
    return {0, (shape.delta ? shape.key_dim : 1) * (map + product)};
  const auto convolved = [&](const std::vector<int>& parts) -> std::pair<double, double> {
    int64_t sum = 0;
    for (const int part : parts) sum += plan.parts[part].tokens;
    return {convolution_flops(Pass::forward, sum, plan.computed(shape)), 0};
  };
  if (const auto* convolve = std::get_if<state_step::Convolve>(&step))
    return convolved(convolve->parts);
  if (const auto* back = std::get_if<state_step::ConvolveBack>(&step))
    return convolved(back->parts);
  if (std::holds_alternative<state_step::ConvolveSlopes>(step)) {
    int64_t all = 0;
    for (const StatePart& part : plan.parts) all += part.tokens;
    const double sums = convolution_flops(Pass::forward, all, plan.computed(shape));
    return {sums, sums};  // of weights, and z again
  }
  return {0, 0};
}

ChunkedWork chunked_work(const StateStep& step, const StatePlan& plan, Pass pass,
                         const RecurrenceShape& shape) {
  const auto tokens = [&](int part) { return part < 0 ? 0 : plan.parts[part].tokens; };
  if (const auto* run = std::get_if<state_step::Run>(&step)) {
    const RecurrenceShape computed = plan.computed(shape);
    const int64_t of_part = tokens(run->part), d = computed.key_dim, e = computed.value_dim;
    const double row = 2.0 * recurrence_chunk * computed.value_heads * of_part;
    const double flops = recurrence_flops(pass, of_part, computed);
    if (pass == Pass::forward)
      return {flops + row * static_cast<double>(shape.delta ? 3 * d + 2 * e : d + e), of_part};
    const double again = 2.0 * (shape.delta ? 2 : 1) * computed.value_heads * d * e * of_part;
    const int64_t inside = shape.delta ? 8 * d + 5 * e : 3 * d + 2 * e;
    return {flops + again + row * static_cast<double>(inside), 2 * of_part};
  }
  const double further = flops_of(step, plan, pass, shape).second;
  if (const auto* sum = std::get_if<state_step::Summarize>(&step))
    return {further, tokens(sum->part)};
  if (const auto* sum = std::get_if<state_step::SummarizeBack>(&step))
    return {further, tokens(sum->part)};
  const bool of_states = std::holds_alternative<state_step::Compose>(step) ||
                         std::holds_alternative<state_step::Join>(step);
  return {of_states ? further : 0, 0};
}

StateCount count(const StatePlan& plan, Pass pass, const RecurrenceShape& shape) {
  StateCount counted;
  for (const StateStep& step : plan.steps(pass)) {
    const auto [flops, more] = flops_of(step, plan, pass, shape);
    counted.flops += flops;
    counted.more_flops += more;
    if (const auto* run = std::get_if<state_step::Run>(&step))
      counted.tokens += plan.parts[run->part].tokens * plan.computed(shape).value_heads;
    if (const auto* heads = std::get_if<state_step::HeadExchange>(&step)) {
      const HeadBytes bytes = bytes_of_heads(*heads, plan, shape);
      counted.bytes_sent += bytes.sent;
      counted.bytes_received += bytes.received;
      ++counted.messages;
    }
    const auto* exchange = std::get_if<state_step::Exchange>(&step);
    if (exchange == nullptr) continue;
    for (const StateMessage& m : exchange->sends) {
      const bool to_all = exchange->all_gather || exchange->all_reduce;
      if (!to_all && m.peer == plan.rank) continue;  // a copy
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
