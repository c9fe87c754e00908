#pragma once
// Reference definitions of log-probabilities over whole rows: serial, double precision, never
// tuned. All other routines of this folder are compared with them.
//
// A row holds the logits of one token, [vocab_size], without padding. A logit of -inf has
// probability 0, and 0 · log 0 = 0. `temperature` divides the logits. A row with NaN or +inf, or
// with only -inf, is no distribution: its values are NaN. So are its gradients, except that a logit
// of -inf gets the terms of the ids.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/sparse_matrix.hpp"

namespace gyre {

/// log p_v of every column, [vocab_size].
std::vector<double> log_softmax_reference(std::span<const double> logits, double temperature = 1);

struct TokenScore {
  double logprob = 0;  ///< 0 for an id outside the row
  double entropy = 0;  ///< nats, >= 0
};
TokenScore score_row_reference(std::span<const double> logits, int64_t target,
                               double temperature = 1);

/// Gradient of Σ_k g_k log p(id_k) + h · entropy with respect to the logits: [vocab_size]. As in
/// NeMo RL, an id outside the row scores the constant 0 but its g still counts; callers pass g = 0.
std::vector<double> score_gradient_reference(std::span<const double> logits,
                                             std::span<const int32_t> ids,
                                             std::span<const double> g, double h,
                                             double temperature = 1);

/// Gradient of Σ_v g_v log p_v with respect to the logits, (g_v - p_v Σ g) / temperature:
/// [vocab_size]. A column with logit -inf has g_v / temperature, by the same formula as any other.
std::vector<double> log_softmax_gradient_reference(std::span<const double> logits,
                                                   std::span<const double> g,
                                                   double temperature = 1);

/// -Σ_v p_v log q_v for the teacher's distribution p and the student's q; infinite where only the
/// student has -inf. Its gradient is with respect to the student's logits, times g.
double soft_cross_entropy_reference(std::span<const double> student,
                                    std::span<const double> teacher);
std::vector<double> soft_cross_entropy_gradient_reference(std::span<const double> student,
                                                          std::span<const double> teacher,
                                                          double g);

/// Sampling filter: divides by the temperature, then keeps the top_k largest with all ties of the
/// k-th, of these those with at least min_p of the largest probability, then of these,
/// renormalised, those before which the cumulative probability is below top_p. Ties at that
/// boundary survive by descending id. The largest always survives. (vLLM's order.)
struct SamplingFilter {
  int64_t top_k = 0;  ///< 0: no limit
  double top_p = 1;   ///< 1: no limit
  double temperature = 1;
  double min_p = 0;  ///< 0: no limit
  bool active() const { return top_k > 0 || top_p != 1 || min_p > 0; }
  /// Whether min_p keeps a logit, in a row with this largest one; `margin` in log p lets more
  /// survive. NaN survives.
  bool is_likely(double logit, double max, double margin = 0) const {
    return min_p <= 0 || logit == max || !((logit - max) / temperature < std::log(min_p) - margin);
  }
};

/// Survivors of a row in order of rank: those that top_k keeps, by descending logit, equal ones by
/// descending id. min_p and top_p keep the first of them. If a cumulative probability is within
/// `margin` of top_p, or a log-probability within it of min_p's bound, an error of that size
/// changes their number, and several numbers are valid.
class SurvivorsReference {
 public:
  SurvivorsReference(std::span<const double> logits, const SamplingFilter& filter,
                     double margin = 0);

  int64_t usual() const { return usual_; }  ///< number of survivors in exact arithmetic
  int64_t fewest() const { return fewest_; }
  int64_t most() const { return most_; }
  /// Log-probability of an id if `survivors` survive, fewest() to most(): -inf if the id does not,
  /// or is outside the row; NaN if the row is no distribution.
  double logprob(int64_t id, int64_t survivors) const;
  /// Log-probabilities of all ids if `survivors` survive, [vocab_size].
  std::vector<double> logprobs(int64_t survivors) const;
  /// Valid number of survivors for which the id's log-probability is nearest to `value`.
  int64_t nearest(int64_t id, double value) const;
  /// Ids that survive for some valid numbers only, and those with equal logits.
  std::span<const int32_t> doubtful() const;
  /// Valid number of survivors nearest to the case that `kept` of the doubtful ids survive.
  int64_t with_doubtful(int64_t kept) const;
  /// The ids that top_k keeps, and min_p if all errors are in their favour, in order of rank.
  std::span<const int32_t> ranked() const { return order_; }

 private:
  int64_t rank(int64_t id) const;
  int64_t first_doubtful() const;
  double log_sum(int64_t survivors) const;

  std::span<const double> logits_;
  double max_, temperature_;
  std::vector<int32_t> order_;
  std::vector<double> sums_;  // [order + 1] prefix sums of exp((z - max) / temperature)
  int64_t usual_, fewest_, most_;
};

/// Returns [vocab_size] booleans: whether the id survives.
std::vector<bool> filter_reference(std::span<const double> logits, const SamplingFilter& filter);

/// Log-probability of the target among the survivors: -inf for an id that does not survive or is
/// outside the row.
double filtered_logprob_reference(std::span<const double> logits, int64_t target,
                                  const SamplingFilter& filter);
/// g times the gradient of that log-probability: 0 for dropped logits; -g p_v / temperature for the
/// others if the target did not survive.
std::vector<double> filtered_gradient_reference(std::span<const double> logits, int64_t target,
                                                const SamplingFilter& filter, double g);

/// Log-probability of the target among different ids of the row; -inf if it is not among them, or
/// there are none; NaN if all have logits of -inf.
double kept_logprob_reference(std::span<const double> logits, std::span<const int32_t> kept,
                              int64_t target, double temperature = 1);
/// g times the gradient of that log-probability: 0 for other ids, or if g is 0;
/// -g p_v / temperature for the kept ones if the target is not among them.
std::vector<double> kept_gradient_reference(std::span<const double> logits,
                                            std::span<const int32_t> kept, int64_t target, double g,
                                            double temperature = 1);

struct TopEntry {
  double value = 0;
  int32_t id = 0;
};
/// The min(k, vocab_size) largest, in descending order; equal values by ascending id.
std::vector<TopEntry> top_k_reference(std::span<const double> logits, int64_t k);

/// Scores for the distillation from a teacher's K largest logits.
struct DistillationReference {
  std::vector<double> student;  ///< [K] log-probabilities of the ids
  std::vector<double> teacher;  ///< [K] log-softmax over the K logits
  double entropy = 0;           ///< of the student, all ids
};
/// `renormalise`: the student's log-softmax is over the K ids only (an id that occurs twice counts
/// twice), otherwise over the vocabulary.
DistillationReference distillation_reference(std::span<const double> student,
                                             std::span<const int32_t> ids,
                                             std::span<const double> teacher_logits,
                                             bool renormalise);
/// Gradient of Σ_k g_k student_k + h · entropy with respect to the student's logits.
std::vector<double> distillation_gradient_reference(std::span<const double> student,
                                                    std::span<const int32_t> ids,
                                                    std::span<const double> g, double h,
                                                    bool renormalise);

/// Σ_v p_v M_vc for each column c of a matrix with a row for each id.
std::vector<double> projected_reference(std::span<const double> logits,
                                        const SparseMatrixRef& matrix, double temperature = 1);
/// Gradient of Σ_c g_c projected_c with respect to the logits; zeros if g is 0, whatever they are.
std::vector<double> projected_gradient_reference(std::span<const double> logits,
                                                 const SparseMatrixRef& matrix,
                                                 std::span<const double> g, double temperature = 1);
/// Divergence of a student q from a teacher p, of the student's K largest ids and a sampled target
/// (top_k_divergence.hpp).
struct TopKDivergenceReference {
  double value = 0;
  std::vector<int32_t> ids;    ///< the K ids, and the target if it adds a term
  std::vector<double> log_q;   ///< log-probabilities of `ids` by the student
  std::vector<double> log_p;   ///< by the teacher
  std::vector<double> slopes;  ///< derivatives of `value` by log_q
  /// Whether `value` is finite in f32, the type of results.
  bool has_gradient() const { return std::abs(value) <= std::numeric_limits<float>::max(); }
};
/// log_p [ids + 1]: the teacher's log-probabilities of `ids`, then of the target. The derivative of
/// the target's term is log q - log p, plus 1 if `unbiased`.
TopKDivergenceReference top_k_divergence_reference(std::span<const double> student,
                                                   std::span<const int32_t> ids,
                                                   std::span<const double> log_p, int64_t target,
                                                   bool unbiased);
/// Takes the student's min(k, vocab_size) largest ids, and log p from the teacher's logits.
TopKDivergenceReference top_k_divergence_reference(std::span<const double> student, int64_t k,
                                                   std::span<const double> teacher, int64_t target,
                                                   bool unbiased);
/// g times the gradient by the student's logits; NaN throughout if g is not 0 and the value has no
/// gradient.
std::vector<double> top_k_divergence_gradient_reference(std::span<const double> student,
                                                        const TopKDivergenceReference& of,
                                                        double g);

}  // namespace gyre
