#include "recurrence/halo.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace gyre {
namespace {

using namespace state_step;

constexpr int history_exchange = 100, weight_sum = 101;  // schedules number theirs from 0

/// Bytes that the best all-reduce of the weights' gradient sends.
int64_t weight_sum_bytes(const RecurrenceProblem& problem) {
  const int64_t elements = problem.shape.channels() * problem.shape.convolution;
  return 2 * (problem.cp() - 1) * elements * static_cast<int64_t>(sizeof(float)) / problem.cp();
}

/// Bytes of a row of queries, keys and values, or of its gradient.
int64_t row_bytes(const RecurrenceProblem& problem, Pass pass) {
  const DType type = pass == Pass::forward ? problem.type : DType::f32;
  return problem.shape.channels() * static_cast<int64_t>(size_of(type));
}

/// One message for each peer with pieces that this rank sends, or receives.
std::vector<StateMessage> messages(const RecurrenceProblem& problem, const StatePlan& plan,
                                   Pass pass, bool sends) {
  std::map<int, StateMessage> of_peers;
  for (size_t i = 0; i < plan.history.size(); ++i) {
    const HistoryPiece& piece = plan.history[i];
    const bool has = sends == (pass == Pass::forward);  // the side that has the tokens
    if ((has ? piece.from : piece.to) != plan.rank) continue;
    const int peer = has ? piece.to : piece.from;
    StateMessage& message = of_peers[peer];
    message.peer = peer;
    message.pieces.push_back(static_cast<int>(i));
    message.row_bytes += piece.rows * row_bytes(problem, pass);
  }
  std::vector<StateMessage> all;
  for (auto& [peer, message] : of_peers) all.push_back(std::move(message));
  return all;
}

Exchange exchange_of(const RecurrenceProblem& problem, const StatePlan& plan, Pass pass) {
  Exchange exchange;
  exchange.id = history_exchange;
  exchange.what = pass == Pass::forward ? "histories" : "gradients of histories";
  exchange.sends = messages(problem, plan, pass, true);
  exchange.recvs = messages(problem, plan, pass, false);
  return exchange;
}

Exchange sum_of_weights(const RecurrenceProblem& problem, int rank) {
  Exchange exchange;
  exchange.id = weight_sum;
  exchange.what = "gradient of the convolution's weights";
  exchange.all_reduce = true;
  const int64_t bytes = weight_sum_bytes(problem);
  exchange.sends = {{rank, {}, {}, bytes}};
  for (int r = 0; r < problem.cp(); ++r)
    exchange.recvs.push_back({r, {}, {}, r == (rank + 1) % problem.cp() ? bytes : 0});
  return exchange;
}

/// Parts of the plan for which `which` holds, and the others.
template <class Which>
std::pair<std::vector<int>, std::vector<int>> split(const StatePlan& plan, Which which) {
  std::vector<int> all(plan.parts.size());
  std::iota(all.begin(), all.end(), 0);
  const auto middle = std::stable_partition(all.begin(), all.end(), which);
  return {{all.begin(), middle}, {middle, all.end()}};
}

}  // namespace

int64_t history_rows(const StatePart& part, int64_t width) {
  return std::min(width - 1, part.start);
}

std::vector<HistoryPiece> history_pieces(const StateParts& parts, int64_t width) {
  std::vector<HistoryPiece> pieces;
  for (const auto& [document, chain] : parts.of_document)
    for (const PartOfRank& reader : chain) {
      const StatePart& to = parts.at(reader);
      const int64_t first = to.start - history_rows(to, width);
      for (const PartOfRank& holder : chain) {
        const StatePart& from = parts.at(holder);
        const int64_t begin = std::max(first, from.start),
                      end = std::min(to.start, from.start + from.tokens);
        if (begin < end)
          pieces.push_back({holder.rank, holder.part, reader.rank, reader.part, begin - from.start,
                            begin - first, end - begin});
      }
    }
  return pieces;
}

void add_convolution(const RecurrenceProblem& problem, StatePlan& plan) {
  const bool heads = !plan.rank_tokens.empty();
  const auto exchange_steps = heads ? 2 : 0;  // at the begin of forward, at the end of backward
  if (!heads)
    for (const HistoryPiece& piece : history_pieces(problem.parts, problem.shape.convolution))
      if (piece.from == plan.rank || piece.to == plan.rank) plan.history.push_back(piece);
  const auto has = [&](int HistoryPiece::*rank, int HistoryPiece::*part) {
    return [&plan, rank, part](int index) {
      return std::ranges::any_of(plan.history, [&](const HistoryPiece& piece) {
        return piece.*rank == plan.rank && piece.*part == index;
      });
    };
  };
  const auto add = [](std::vector<StateStep>& steps, const Exchange& exchange) {
    const bool any = !exchange.sends.empty() || !exchange.recvs.empty();
    if (any) steps.emplace_back(exchange);
    return any;
  };
  const auto wait = [](std::vector<StateStep>& steps, bool any, int id) {
    if (any) steps.emplace_back(Wait{id});
  };

  std::vector<StateStep> forward;
  const auto [reading, beginning] = split(plan, has(&HistoryPiece::to, &HistoryPiece::to_part));
  const bool any = add(forward, exchange_of(problem, plan, Pass::forward));
  forward.emplace_back(Convolve{beginning});
  wait(forward, any, history_exchange);
  forward.emplace_back(Convolve{reading});
  plan.forward.insert(plan.forward.begin() + exchange_steps, forward.begin(), forward.end());

  std::vector<StateStep> backward;
  const auto [given, own] = split(plan, has(&HistoryPiece::from, &HistoryPiece::from_part));
  backward.emplace_back(ConvolveSlopes{});
  const bool any_back = add(backward, exchange_of(problem, plan, Pass::backward));
  if (problem.cp() > 1) backward.emplace_back(sum_of_weights(problem, plan.rank));
  backward.emplace_back(ConvolveBack{own});
  wait(backward, any_back, history_exchange);
  backward.emplace_back(ConvolveBack{given});
  wait(backward, problem.cp() > 1, weight_sum);
  plan.backward.insert(plan.backward.end() - exchange_steps, backward.begin(), backward.end());
}

HaloForm weight_sum_form(const RecurrenceProblem& problem, Pass pass) {
  if (pass == Pass::forward || problem.cp() == 1) return {};
  return {1, weight_sum_bytes(problem)};
}

HaloForm halo_form(const RecurrenceProblem& problem, int rank, Pass pass) {
  const int64_t before = problem.shape.convolution - 1;
  int64_t bytes_sent = 0;
  std::set<int> peers;
  for (const auto& [document, chain] : problem.parts.of_document)
    for (const PartOfRank& holder : chain)
      for (const PartOfRank& reader : chain) {
        const StatePart &from = problem.parts.at(holder), &to = problem.parts.at(reader);
        const int sender = pass == Pass::forward ? holder.rank : reader.rank;
        const int64_t rows =
            std::min(from.start + from.tokens, to.start) - std::max(from.start, to.start - before);
        if (sender != rank || holder.rank == reader.rank || rows <= 0) continue;
        peers.insert(pass == Pass::forward ? reader.rank : holder.rank);
        bytes_sent += rows * row_bytes(problem, pass);
      }
  const HaloForm sum = weight_sum_form(problem, pass);
  return {std::ssize(peers) + sum.messages, bytes_sent + sum.bytes_sent};
}

}  // namespace gyre
