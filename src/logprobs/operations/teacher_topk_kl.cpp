// teacher-topk-kl: divergence of a teacher p from a student q over the teacher's K largest ids,
// with all other ids in one bucket (verl issue 7856): never negative, and blind to nothing but the
// shape of the tail.
//
//     value = Σ_k p_k (log p_k - log q_k) + P (log P - log Q)    P = 1 - Σ p_k, Q = 1 - Σ q_k
//     d value / d log q_k = -p_k + q_k P / Q
//
// An id with p = 0 pads a shorter list: neither it nor its q belongs to the ids. Rounding of log p
// and log q alone makes a P or a Q of 1e-6: below it, P is 0, and Q is 1e-6, without a gradient.

#include "logprobs/operations/list.hpp"

namespace gyre {
namespace {

constexpr double least_tail = 1e-6;

/// Probabilities of all ids that are not listed, by teacher and student.
struct Tail {
  double teacher = 1, student = 1;
  bool is_least = false;  ///< the student's is below what is resolved
  Tail(std::span<const float> log_p, std::span<const double> log_q) {
    for (size_t k = 0; k < log_p.size(); ++k) {
      if (log_p[k] == -HUGE_VALF) continue;
      teacher -= std::exp(static_cast<double>(log_p[k]));
      student -= std::exp(log_q[k]);
    }
    if (teacher < least_tail) teacher = 0;
    is_least = student < least_tail;
    student = std::max(student, least_tail);
  }
  /// P / Q, the derivative by Q times -1.
  double ratio() const { return teacher == 0 || is_least ? 0 : teacher / student; }
};

void add_slopes(const OperationRow& row, double g, RowSlopes& slopes, bool sizes) {
  const auto log_p = row.inputs[0];
  const auto log_q = row.statistics.of_ids;
  const Tail tail(log_p, log_q);
  for (size_t k = 0; k < log_p.size(); ++k) {
    if (log_p[k] == -HUGE_VALF) continue;
    const double p = std::exp(static_cast<double>(log_p[k])), q = std::exp(log_q[k]);
    // An error of Q is that of the sum of all q.
    const double error = sizes ? (2 + std::min(100.0, -log_q[k])) * (1 + 1 / tail.student) : 1;
    slopes.of_ids[k] += sizes ? std::abs(g) * (p + q * tail.teacher / tail.student * error)
                              : g * (q * tail.ratio() - p);
  }
}

std::string fault_of_row(std::span<const int32_t> ids, std::span<const float> log_p) {
  std::vector<int32_t> listed;
  double sum = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    if (!(log_p[k] <= 0)) return "has a value above 0; a log-probability is at most 0";
    if (log_p[k] == -HUGE_VALF) continue;
    listed.push_back(ids[k]);
    sum += std::exp(static_cast<double>(log_p[k]));
  }
  std::ranges::sort(listed);
  if (std::ranges::adjacent_find(listed) != listed.end())
    return "lists an id twice; a place to leave out has a value of -inf";
  return sum <= 1 + 1e-3 ? "" : "has probabilities whose sum is above 1";
}

/// Nine tenths of the probability, in random parts. Repeated ids and some others are left out.
void make_row(std::span<const int32_t> ids, std::span<const double> random,
              std::span<float> log_p) {
  double sum = 0;
  for (const double x : random) sum -= std::log(x);
  for (size_t k = 0; k < ids.size(); ++k) {
    const auto before = ids.first(k);
    const bool again = std::ranges::find(before, ids[k]) != before.end();
    log_p[k] = again || random[k] < 0x1p-4
                   ? -HUGE_VALF
                   : static_cast<float>(std::log(-0.9 * std::log(random[k]) / sum));
  }
}

}  // namespace

RowOperation teacher_topk_kl_operation() {
  return {.name = "teacher-topk-kl",
          .summary = "divergence from a teacher's --picks largest ids, with the rest as one",
          .definition = "log_softmax_reference",
          .ids = "ids",
          .ids_are_largest = true,
          .at_temperature_1 = true,
          .inputs = {"teacher_topk_logprobs"},
          .own_inputs = {{.name = "teacher_topk_logprobs",
                          .shape = "TK",
                          .fault = fault_of_row,
                          .make = make_row}},
          .results = {{.name = "teacher_topk_kl",
                       .check = "divergences",
                       .reads = {"logits", "teacher_topk_logprobs"}}},
          .gradient = "d_teacher_topk_kl",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                const auto log_p = row.inputs[0];
                const Tail tail(log_p, row.statistics.of_ids);
                values[0] =
                    tail.teacher == 0 ? 0 : tail.teacher * std::log(tail.teacher / tail.student);
                for (size_t k = 0; k < log_p.size(); ++k)
                  if (const double p = std::exp(static_cast<double>(log_p[k])); p > 0)
                    values[0] += p * (static_cast<double>(log_p[k]) - row.statistics.of_ids[k]);
              },
          .slopes = [](const OperationRow& row, std::span<const double> g,
                       RowSlopes& slopes) { add_slopes(row, g[0], slopes, false); },
          .sizes = [](const OperationRow& row, std::span<const double> g,
                      RowSlopes& sizes) { add_slopes(row, g[0], sizes, true); },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                // The teacher's target of each id: p of a listed one, else its share of the tail, q
                // / Q.
                std::vector<double> p(row.logits.size(), -1);
                double rest = 1, other = 0, value = 0;
                for (size_t k = 0; k < row.ids.size(); ++k)
                  if (const double log_p = row.inputs[0][k]; log_p != -HUGE_VAL)
                    rest -= p[row.ids[k]] = std::exp(log_p);
                if (rest < least_tail) rest = 0;
                for (size_t v = 0; v < p.size(); ++v) {
                  const double q = std::exp(row.logprobs[v]);
                  if (p[v] < 0) other += q;
                  if (p[v] > 0) value += p[v] * (std::log(p[v]) - row.logprobs[v]);
                }
                const bool is_least = other < least_tail;
                if (rest > 0) value += rest * std::log(rest / std::max(other, least_tail));
                RowAnswer answer{{value}, {}};
                double all = is_least ? 0 : 1;  // of the teacher's targets
                for (size_t v = 0; is_least && v < p.size(); ++v) all += std::max(p[v], 0.0);
                for (size_t v = 0; v < p.size(); ++v) {
                  const double q = std::exp(row.logprobs[v]),
                               of_tail = is_least ? 0 : q * rest / other;
                  answer.d_logits.push_back(g[0] * (q * all - (p[v] >= 0 ? p[v] : of_tail)));
                }
                return answer;
              }};
}

}  // namespace gyre
