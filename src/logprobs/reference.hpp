#pragma once
// Log-probabilities as defined, over whole rows: serial, double precision, never tuned. What every
// other routine of this folder is compared with.
//
// A row holds the logits of one token, [vocab_size], padding left out. -inf is a logit with
// probability 0, and 0 · log 0 = 0. `temperature` divides the logits. A row with a NaN or +inf, or
// of nothing but -inf, is no distribution: its values are NaN, and its gradients NaN or, where the
// logit is -inf, what ids add alone.

#include <cstdint>
#include <span>
#include <vector>

namespace gyre {

/// log p_v of every column, [vocab_size].
std::vector<double> log_softmax_reference(std::span<const double> logits, double temperature = 1);

struct TokenScore {
  double logprob = 0;  ///< 0 for an id that the row does not have
  double entropy = 0;  ///< nats, >= 0
};
TokenScore score_row_reference(std::span<const double> logits, int64_t target,
                               double temperature = 1);

/// Gradient of Σ_k g_k log p(id_k) + h · entropy by the logits: [vocab_size]. As in NeMo RL, an id
/// that the row does not have scores the constant 0 and yet its g counts: callers give it g = 0.
std::vector<double> score_gradient_reference(std::span<const double> logits,
                                             std::span<const int32_t> ids,
                                             std::span<const double> g, double h,
                                             double temperature = 1);

/// Gradient of Σ_v g_v log p_v by the logits, (g_v - p_v Σ g) / temperature: [vocab_size]. A column
/// whose logit is -inf has g_v / temperature, as if its derivative were that of any other.
std::vector<double> log_softmax_gradient_reference(std::span<const double> logits,
                                                   std::span<const double> g,
                                                   double temperature = 1);

/// -Σ_v p_v log q_v with p the teacher's distribution and q the student's: infinite where the
/// student alone has a logit of -inf. And its gradient by the student's logits times g.
double soft_cross_entropy_reference(std::span<const double> student,
                                    std::span<const double> teacher);
std::vector<double> soft_cross_entropy_gradient_reference(std::span<const double> student,
                                                          std::span<const double> teacher,
                                                          double g);

/// Which logits survive: temperature first, then the top_k largest, with all ties of the k-th; then
/// of what is left, renormalised, those ranked before which lies a probability below top_p. Ties at
/// that boundary go to higher ids first. The largest always survives.
struct SamplingFilter {
  int64_t top_k = 0;  ///< 0: no such limit
  double top_p = 1;   ///< 1: no such limit
  double temperature = 1;
  bool active() const { return top_k > 0 || top_p != 1; }
};

/// The survivors of a row in order of rank: those that top_k leaves, larger logits first, of equal
/// ones higher ids first. top_p keeps the first of them; where a sum of probabilities is nearer to
/// top_p than `margin`, an error of that size changes how many, and several numbers are right.
class SurvivorsReference {
 public:
  SurvivorsReference(std::span<const double> logits, const SamplingFilter& filter,
                     double margin = 0);

  int64_t usual() const { return usual_; }  ///< how many survive in exact arithmetic
  int64_t fewest() const { return fewest_; }
  int64_t most() const { return most_; }
  /// Log-probability of an id when `survivors` survive, fewest() to most(): -inf for one that does
  /// not, or that the row does not have; NaN if the row is no distribution.
  double logprob(int64_t id, int64_t survivors) const;
  /// Log-probabilities of all ids among so many survivors, [vocab_size].
  std::vector<double> logprobs(int64_t survivors) const;
  /// The right number of survivors for which the log-probability of the id is nearest to `value`.
  int64_t nearest(int64_t id, double value) const;
  /// The ids that survive for some right numbers only, and those with equal logits.
  std::span<const int32_t> doubtful() const;
  /// How many survive when `kept` of the doubtful ones do: the nearest right number.
  int64_t with_doubtful(int64_t kept) const;
  /// All ids in order of rank.
  std::span<const int32_t> ranked() const { return order_; }

 private:
  int64_t rank(int64_t id) const;
  int64_t first_doubtful() const;
  double log_sum(int64_t survivors) const;

  std::span<const double> logits_;
  double max_, temperature_;
  std::vector<int32_t> order_;
  std::vector<double> sums_;  // [order + 1] exp((z - max) / temperature), over the first ones
  int64_t usual_, fewest_, most_;
};

/// [vocab_size] booleans.
std::vector<bool> filter_reference(std::span<const double> logits, const SamplingFilter& filter);

/// Log-probability of the target among the survivors: -inf for an id that did not survive or that
/// the row does not have.
double filtered_logprob_reference(std::span<const double> logits, int64_t target,
                                  const SamplingFilter& filter);
/// Its gradient times g, as if dropped logits were not there: 0 for them; -g p_v for the others
/// when the target did not survive.
std::vector<double> filtered_gradient_reference(std::span<const double> logits, int64_t target,
                                                const SamplingFilter& filter, double g);

struct TopEntry {
  double value = 0;
  int32_t id = 0;
};
/// The min(k, vocab_size) largest, in descending order; equal values by ascending id.
std::vector<TopEntry> top_k_reference(std::span<const double> logits, int64_t k);

/// Distillation from a teacher's K largest logits.
struct DistillationReference {
  std::vector<double> student;  ///< [K] log-probabilities of the ids
  std::vector<double> teacher;  ///< [K] log-softmax over the K logits
  double entropy = 0;           ///< of the student, all ids
};
/// `renormalise`: the student's log-softmax over the K ids alone (an id that occurs twice counts
/// twice); otherwise over the vocabulary.
DistillationReference distillation_reference(std::span<const double> student,
                                             std::span<const int32_t> ids,
                                             std::span<const double> teacher_logits,
                                             bool renormalise);
/// Gradient of Σ_k g_k student_k + h · entropy by the student's logits.
std::vector<double> distillation_gradient_reference(std::span<const double> student,
                                                    std::span<const int32_t> ids,
                                                    std::span<const double> g, double h,
                                                    bool renormalise);

}  // namespace gyre
