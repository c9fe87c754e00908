// Verification of gyre-recurrence: rows of this rank against the definition, or the file's answers.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "apps/recurrence/case.hpp"
#include "harness/result_array.hpp"
#include "recurrence/convolution.hpp"

namespace gyre {
namespace {

/// The results of one pass on this rank, and their checks.
class Verifier {
 public:
  Verifier(const RecurrenceWorkload& workload, const PlannedRecurrence& planned,
           const RecurrenceExpectation& expected, const RecurrenceData& data,
           std::span<const float> d_weights, const RecurrenceMachine& machine)
      : workload_(workload),
        shape_(planned.problem.shape),
        shard_(planned.placed.layout.shard(planned.plan.rank)),
        expected_(expected),
        data_(data),
        d_weights_(d_weights),
        group_(machine.world),
        stream_(machine.stream),
        lengths_{workload.longest(), planned.schedule.maps(planned.problem), planned.problem.cp()},
        want_weights_(2 * d_weights.size()) {}

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
                                         head, backward, expected_.weights));
      const bool begins = std::ranges::any_of(shard_.fragments, [&](const Fragment& f) {
        return f.segment == document && f.start.value() == 0;
      });
      for (size_t g = 0; begins && backward && g < heads.size(); ++g)
        add_weights(heads[g], groups[g]);
      for (const Fragment& f : shard_.fragments)
        if (f.segment == document) compare(f, heads, groups);
    }
    if (backward && !d_weights_.empty()) compare_weights(label, heads, checks);
  }

 private:
  struct Compared {
    RecurrenceArray of;
    HostCopy rows;
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
  /// Answers of the file; null: none.
  const std::vector<double>* answers_of(const std::string& name) const {
    if (expected_.reference == nullptr) return nullptr;
    const auto found = expected_.reference->arrays.find(name);
    const bool any = found != expected_.reference->arrays.end() && !found->second.empty();
    return any ? &found->second : nullptr;
  }
  /// Calls body(first channel of all, first of the group's results, channels) of a head of keys.
  template <class Body>
  void for_channels(int64_t key_head, Body body) const {
    int64_t of_group = 0;
    for (size_t i = 0; i < convolved_arrays.size(); ++i) {
      const int64_t count = width_of(shape_, convolved_arrays[i]) / shape_.key_heads;
      body(first_channel(shape_, i) + key_head * count, of_group, count);
      of_group += count;
    }
  }
  void add_weights(int64_t key_head, const RecurrenceGroupResults& results) {
    if (results.d_weights.empty()) return;
    const int64_t width = shape_.convolution, all = std::ssize(d_weights_);
    for_channels(key_head, [&](int64_t channel, int64_t of_group, int64_t count) {
      for (int64_t i = 0; i < count * width; ++i) {
        want_weights_[channel * width + i] += results.d_weights[of_group * width + i];
        want_weights_[all + channel * width + i] += results.d_weight_squares[of_group * width + i];
      }
    });
  }
  /// Collective.
  void compare_weights(const std::string& label, const std::vector<int64_t>& heads,
                       Verification& checks) {
    HostStream stream;
    group_
        .all_reduce(want_weights_.data(), std::ssize(want_weights_), DType::f64, ReduceOp::sum,
                    stream, "expected gradients of weights")
        ->wait();
    const int64_t width = shape_.convolution;
    const std::span<const double> values = std::span(want_weights_).first(d_weights_.size()),
                                  squares = std::span(want_weights_).subspan(d_weights_.size());
    ResultArray array{"d_conv_weight",
                      {shape_.channels(), width},
                      "d_conv_weight",
                      weights_tolerance(shape_, lengths_)};
    Check& check = check_of(array, label, checks);
    const std::vector<double>* const answers = answers_of(array.name);
    for (const int64_t head : heads)
      for_channels(head, [&](int64_t first, int64_t, int64_t count) {
        for (int64_t channel = first; channel < first + count; ++channel) {
          const auto row = [&](auto all) { return all.subspan(channel * width, width); };
          double size = 0;
          for (const double square : row(squares)) size += square / static_cast<double>(width);
          const std::span<const double> want = row(values);
          const auto got = row(d_weights_);
          const double* answer = answers == nullptr ? nullptr : answers->data() + channel * width;
          const double scale =
              error_scale(answer == nullptr ? want : std::span(answer, static_cast<size_t>(width)),
                          std::sqrt(size));
          array.rows = {channel};
          compare_row(
              array, 0, std::vector<double>(got.begin(), got.end()),
              {std::vector<double>(want.begin(), want.end()), std::vector<double>(width, scale)},
              answer, check);
        }
      });
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
    const std::vector<double>* const answers = answers_of(array.name);
    int64_t tokens = 0;
    for (const Fragment& f : shard_.fragments) tokens += f.length;
    if (heads < shape_.key_heads) check.add_sample(tokens * heads, tokens * shape_.key_heads);
    compared_.push_back({of, {data_[of], stream_}, std::move(array), &check, answers});
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
          got[column] = c.rows.at(row, static_cast<int64_t>(column));
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
  std::span<const float> d_weights_;  // [channels, width] of all ranks; empty: no convolution
  Communicator& group_;
  Stream& stream_;
  RecurrenceReductions lengths_;
  std::vector<double> want_weights_;  // their values, then the squares of their sizes
  std::vector<Compared> compared_;
};

}  // namespace

void RecurrenceCase::verify(Pass pass, Verification& checks) {
  const RecurrenceShape& shape = planned_->problem.shape;
  HostCopy d_weights;
  std::span<const float> of_channels;
  if (executor_.convolution() != nullptr) {
    const std::span<const float> there = executor_.convolution()->weight_gradients();
    d_weights = {MatrixView(there.data(), shape.channels(), shape.convolution), machine_.stream};
    of_channels = {d_weights.matrix().as<float>().data, there.size()};
  }
  Verifier(workload_, *planned_, expected_, executor_.data(), of_channels, machine_)
      .verify(label(pass), pass == Pass::backward, checks);
}

}  // namespace gyre
