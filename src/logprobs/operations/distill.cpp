// distill: a student's log-probabilities of a teacher's ids over the vocabulary, its entropy, and
// the teacher's own over those ids, which get no gradient. Ids may repeat: their gradients add up.
// Based on get_distillation_topk_logprobs_from_logits of NeMo RL (zero_outside_topk), but with
// Shannon's sign of the entropy.

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation distill_operation() {
  return {.name = "distill",
          .summary = "log-probabilities of a teacher's --picks ids, and entropy",
          .definition = "distillation_reference, distillation_gradient_reference",
          .ids = "ids",
          .ids_are_largest = true,
          .entropy = true,
          .at_temperature_1 = true,
          .inputs = {"teacher_values"},
          .results = {{.name = "distilled_logprob",
                       .shape = "TK",
                       .check = "student",
                       .error = RowError::logprob,
                       .first_gradient = 2},
                      {.name = "distilled_teacher_logprob",
                       .shape = "TK",
                       .check = "teacher",
                       .error = RowError::logprob,
                       .first_gradient = -1,
                       .reads = {"teacher_values"}},
                      {.name = "distilled_entropy",
                       .check = "entropies",
                       .error = RowError::entropy,
                       .first_gradient = 1}},
          .gradient = "d_distilled",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                const size_t k = row.ids.size();
                std::ranges::copy(row.statistics.of_ids, values.begin());
                log_softmax_of(row.inputs[0], values.subspan(k, k));
                values.back() = row.statistics.entropy;
              },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                const std::vector<double> teacher(row.inputs[0].begin(), row.inputs[0].end());
                DistillationReference of =
                    distillation_reference(row.logits, row.ids, teacher, false);
                of.student.insert(of.student.end(), of.teacher.begin(), of.teacher.end());
                of.student.push_back(of.entropy);
                return RowAnswer{
                    of.student, distillation_gradient_reference(
                                    row.logits, row.ids, g.first(row.ids.size()), g.back(), false)};
              }};
}

}  // namespace gyre
