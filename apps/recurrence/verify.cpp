// Verification of gyre-recurrence: rows of this rank against the definition, or the file's answers.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "apps/recurrence/case.hpp"
#include "harness/result_array.hpp"

namespace gyre {
namespace {

/// The results of one pass on this rank, and their checks.
class Verifier {
 public:
  Verifier(const RecurrenceWorkload& workload, const PlannedRecurrence& planned,
           const RecurrenceExpectation& expected, const RecurrenceData& data)
      : workload_(workload),
        shape_(planned.problem.shape),
        shard_(planned.placed.layout.shard(planned.plan.rank)),
        expected_(expected),
        data_(data),
        lengths_{workload.longest(), planned.schedule.maps(planned.problem)} {}

  void verify(const std::string& label, bool backward, Verification& checks) {
    const std::vector<int64_t> heads = sampled_heads();
    for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a) {
      const auto array = static_cast<RecurrenceArray>(a);
      if (!has_array(shape_, array) || (!backward && array != RecurrenceArray::out)) continue;
      add_array(array, label, std::ssize(heads), checks);
    }
    std::set<int64_t> documents;
    for (const Fragment& f : shard_.fragments) documents.insert(f.segment);
    for (const int64_t document : documents) {
      std::vector<RecurrenceGroupResults> groups;
      for (const int64_t head : heads)
        groups.push_back(reference_group(shape_, expected_.inputs, workload_.document(document),
                                         head, backward));
      for (const Fragment& f : shard_.fragments)
        if (f.segment == document) compare(f, heads, groups);
    }
  }

 private:
  struct Compared {
    RecurrenceArray of;
    ResultArray array;
    Check* check;
    const std::vector<double>* answers;  ///< null: none
  };

  /// Heads of keys that are computed again.
  std::vector<int64_t> sampled_heads() const {
    const int64_t tokens = std::max<int64_t>(1, workload_.tokens());
    const bool all = expected_.reference != nullptr;
    const int64_t wanted = all ? shape_.key_heads : expected_.tokens / tokens / shape_.group();
    std::vector<int64_t> heads;
    const int64_t step =
        ceil_div(shape_.key_heads, std::clamp<int64_t>(wanted, 1, shape_.key_heads));
    for (int64_t head = shape_.key_heads - 1; head >= 0; head -= step) heads.push_back(head);
    return heads;
  }
  void add_array(RecurrenceArray of, const std::string& label, int64_t heads,
                 Verification& checks) {
    ResultArray array{name_of(of),
                      {workload_.tokens(), heads_of(shape_, of)},
                      name_of(of),
                      recurrence_tolerance(shape_, lengths_, of, workload_.type),
                      recurrence_sigma(shape_, lengths_, of, workload_.type)};
    if (dim_of(shape_, of) > 1) array.shape.push_back(dim_of(shape_, of));
    Check& check = check_of(array, label, checks);
    const std::vector<double>* answers = nullptr;
    if (expected_.reference != nullptr) {
      const auto found = expected_.reference->arrays.find(array.name);
      if (found != expected_.reference->arrays.end() && !found->second.empty())
        answers = &found->second;
    }
    int64_t tokens = 0;
    for (const Fragment& f : shard_.fragments) tokens += f.length;
    if (heads < shape_.key_heads) check.add_sample(tokens * heads, tokens * shape_.key_heads);
    compared_.push_back({of, std::move(array), &check, answers});
  }
  void compare(const Fragment& f, const std::vector<int64_t>& heads,
               const std::vector<RecurrenceGroupResults>& groups) {
    for (Compared& c : compared_) {
      const auto width = static_cast<size_t>(width_of(shape_, c.of));
      for (int64_t i = 0; i < f.length; ++i) {
        const int64_t row = f.local_begin.value() + i, token = workload_.token_of(f, i),
                      position = token - workload_.offsets[f.segment];
        const double* answer =
            c.answers == nullptr
                ? nullptr
                : c.answers->data() + token * std::ssize(*c.answers) / workload_.tokens();
        std::vector<double> got(width);
        for (size_t column = 0; column < width; ++column)
          got[column] = data_[c.of].at(row, static_cast<int64_t>(column));
        c.array.rows = {token};
        compare_row(c.array, 0, got, expected_row(c, position, heads, groups, answer), answer,
                    *c.check,
                    [&] { return fmt::format(", document {} position {}", f.segment, position); });
      }
    }
  }
  ExpectedRow expected_row(const Compared& c, int64_t position, const std::vector<int64_t>& heads,
                           const std::vector<RecurrenceGroupResults>& groups,
                           const double* answer) const {
    const int64_t dim = dim_of(shape_, c.of), width = width_of(shape_, c.of);
    const int64_t of_group = heads_of(shape_, c.of) / shape_.key_heads;
    ExpectedRow row{std::vector<double>(width, 0.0), std::vector<double>(width, -1.0)};
    for (size_t g = 0; g < heads.size(); ++g) {
      const SizedRows& rows = groups[g][c.of];
      for (int64_t h = 0; h < of_group; ++h) {
        const int64_t from = position * of_group + h, to = (heads[g] * of_group + h) * dim;
        const std::span<const double> values = std::span(rows.values).subspan(from * dim, dim);
        std::ranges::copy(values, row.values.begin() + to);
        const std::span<const double> judged =
            answer == nullptr ? values : std::span(answer + to, static_cast<size_t>(dim));
        std::fill_n(row.scales.begin() + to, dim, error_scale(judged, rows.sizes[from]));
      }
    }
    return row;
  }

  const RecurrenceWorkload& workload_;
  const RecurrenceShape& shape_;
  const Shard& shard_;
  const RecurrenceExpectation& expected_;
  const RecurrenceData& data_;
  RecurrenceReductions lengths_;
  std::vector<Compared> compared_;
};

}  // namespace

void RecurrenceCase::verify(Pass pass, Verification& checks) {
  Verifier(workload_, planned_, expected_, executor_.data())
      .verify(label(pass), pass == Pass::backward, checks);
}

}  // namespace gyre
