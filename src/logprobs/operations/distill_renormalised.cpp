// distill-renormalised: log-softmax of a student and of a teacher over the teacher's ids alone. The
// partition function cancels, so that only the logits of the ids are read. Each occurrence of an id
// is a term of the sum. The teacher gets no gradient.

#include <numeric>

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation distill_renormalised_operation() {
  return {.name = "distill-renormalised",
          .summary = "log-probabilities of a teacher's --picks ids, over those ids alone",
          .definition = "distillation_reference, distillation_gradient_reference",
          .ids = "ids",
          .ids_are_largest = true,
          .on_logits = true,
          .at_temperature_1 = true,
          .inputs = {"teacher_values"},
          .results = {{.name = "distilled_renormalised_logprob",
                       .shape = "TK",
                       .check = "student",
                       .error = RowError::logprob,
                       .first_gradient = 2},
                      {.name = "distilled_renormalised_teacher_logprob",
                       .shape = "TK",
                       .check = "teacher",
                       .error = RowError::logprob,
                       .first_gradient = -1,
                       .reads = {"teacher_values"}}},
          .gradient = "d_distilled_renormalised",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                const size_t k = row.ids.size();
                log_softmax_of(row.statistics.of_ids, values.first(k));
                log_softmax_of(row.inputs[0], values.subspan(k, k));
              },
          .slopes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& slopes) {
                std::vector<double> student(row.ids.size());
                log_softmax_of(row.statistics.of_ids, std::span(student));
                const double sum = std::accumulate(g.begin(), g.begin() + std::ssize(student), 0.0);
                for (size_t k = 0; k < student.size(); ++k)
                  slopes.of_ids[k] += g[k] - sum * std::exp(student[k]);
              },
          .sizes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& sizes) {
                std::vector<double> student(row.ids.size());
                log_softmax_of(row.statistics.of_ids, std::span(student));
                const double sum = std::accumulate(g.begin(), g.begin() + std::ssize(student), 0.0);
                for (size_t k = 0; k < student.size(); ++k)
                  sizes.of_ids[k] += std::abs(g[k]) + std::abs(sum) * std::exp(student[k]) *
                                                          (1 + std::min(100.0, -student[k]));
              },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                const std::vector<double> teacher(row.inputs[0].begin(), row.inputs[0].end());
                DistillationReference of =
                    distillation_reference(row.logits, row.ids, teacher, true);
                RowAnswer answer{of.student,
                                 distillation_gradient_reference(row.logits, row.ids,
                                                                 g.first(row.ids.size()), 0, true)};
                if (std::isnan(of.student[0])) {  // ids of -inf alone: no distribution
                  const bool some = std::ranges::any_of(g, [](double x) { return x != 0; });
                  answer.d_logits.assign(row.logits.size(), 0);
                  for (const int32_t id : row.ids) answer.d_logits[id] = some ? of.student[0] : 0;
                }
                answer.values.insert(answer.values.end(), of.teacher.begin(), of.teacher.end());
                return answer;
              }};
}

}  // namespace gyre
