#include "logprobs/top_k_divergence.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"
#include "logprobs/records/merge_lists.hpp"
#include "logprobs/records/row_total.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

constexpr std::string_view divergence_call = "top-k divergences";

/// One rank's sums over a row, and the logits of the row's target; 0 if another rank owns it.
struct RowSums {
  float student_max = 0, student_sum = 0, teacher_max = 0, teacher_sum = 0;
  float student_target = 0, teacher_target = 0;
};

static_assert(sizeof(RowSums) == 24);

/// Log-probability of a logit, from the sums over all ranks.
struct Normalizer {
  explicit Normalizer(const RowTotal& total) : max(total.max), log_sum(std::log(total.sum)) {}
  double operator()(float logit) const { return (logit - max) - log_sum; }
  double max, log_sum;
};

}  // namespace

/// Scratch of merging a row.
struct TopKDivergence::MergeRoom {
  std::vector<int64_t> heads;        // [ranks]
  std::vector<double> log_q, log_p;  // [length + 1]
};

/// A block for each rank, as ranks exchange them. A block holds sums [tokens], then three lists,
/// each [tokens, entries]: the student's largest logits, their global ids (-1 behind the last), and
/// the teacher's logits of these ids.
struct TopKDivergence::Record {
  Record(int64_t tokens_, int64_t entries_, int64_t ranks)
      : tokens(tokens_), entries(entries_), bytes(ranks * block_bytes()) {}
  int64_t block_bytes() const {
    return tokens * (static_cast<int64_t>(sizeof(RowSums)) + entries * 12);
  }
  RowSums& sums(int64_t rank, int64_t token) {
    return reinterpret_cast<RowSums*>(bytes.data() + rank * block_bytes())[token];
  }
  std::span<float> students(int64_t rank) { return list<float>(rank, 0); }
  std::span<int32_t> ids(int64_t rank) { return list<int32_t>(rank, 1); }
  std::span<float> teachers(int64_t rank) { return list<float>(rank, 2); }

  int64_t tokens, entries;
  Buffer<std::byte> bytes;

 private:
  template <class T>
  std::span<T> list(int64_t rank, int64_t which) {
    static_assert(sizeof(T) == 4);
    std::byte* const sums_end =
        bytes.data() + rank * block_bytes() + tokens * static_cast<int64_t>(sizeof(RowSums));
    const int64_t count = tokens * entries;
    return std::span(reinterpret_cast<T*>(sums_end) + which * count, count);
  }
};

TopKDivergence::TopKDivergence(int64_t tokens, const VocabPartition& vocab,
                               const TopKDivergenceOptions& options, Communicator& tp)
    : tokens_(tokens),
      length_(std::min(options.k, vocab.vocab_size)),
      vocab_(vocab),
      tail_(options.tail),
      threads_(options.threads),
      tp_(tp),
      kernels_(kernels_or_cpu(options.kernels)) {
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    if (options.k < 1 || options.k > most_divergence_ids)
      throw_usage("the {} largest logits; the nearest valid number is {}", options.k,
                  std::clamp<int64_t>(options.k, 1, most_divergence_ids));
  };
  agree_on_arguments(tp, divergence_call, check,
                     {{"the number of tokens", tokens},
                      {"the number of logits a token", options.k},
                      {"the gradient of the sampled term", static_cast<int64_t>(options.tail)},
                      {"whether ids are given", options.ids_are_given ? 1 : 0}});
  agree_on_partition(tp, divergence_call, vocab);
  if (options.ids_are_given)
    scores_ = std::make_unique<VocabScores>(tokens, vocab,
                                            ScoreOptions{.ids_per_token = length_ + 1,
                                                         .threads = options.threads,
                                                         .kernels = options.kernels,
                                                         .arrays = options.arrays},
                                            tp);
  normalizers_ = Buffer<RowNormalizer>(tokens);
  ids_ = Buffer<int32_t>(tokens * (length_ + 1));
  slopes_ = Buffer<float>(ids_.size());
  sums_ = Buffer<double>(tokens);
}

void TopKDivergence::check_call(ConstMatrixRef student, size_t targets, size_t values) const {
  GYRE_CHECK(student.rows == tokens_ && student.cols == vocab_.columns(tp_.rank()) &&
                 std::cmp_equal(targets, tokens_) && std::cmp_equal(values, tokens_),
             "{} x {} logits, {} targets and {} values of {} tokens", student.rows, student.cols,
             targets, values, tokens_);
}

void TopKDivergence::make_record(ConstMatrixRef student, ConstMatrixRef teacher,
                                 std::span<const int32_t> targets, Record& record) const {
  const int rank = tp_.rank();
  const int64_t valid = vocab_.valid(rank), first = vocab_.begin(rank), count = record.entries;
  const RowScan scan{valid, 1, false, threads_};
  const size_t tokens = tokens_;
  Buffer<SoftmaxPartial> of_student(tokens_), of_teacher(tokens_);
  Buffer<float> target(2 * tokens_);
  const std::span<int32_t> ids = record.ids(0);
  kernels_.top(student, scan, {record.students(0), ids, {}, count}, of_student.span());
  for (int32_t& id : ids)
    if (id >= 0) id += static_cast<int32_t>(first);
  kernels_.partials(teacher, scan, of_teacher.span());
  std::ranges::fill(target.span(), 0.0F);
  kernels_.gather_token_logits(teacher, ids, count, first, valid, record.teachers(0));
  kernels_.gather_token_logits(student, targets, 1, first, valid, target.span().first(tokens));
  kernels_.gather_token_logits(teacher, targets, 1, first, valid, target.span().last(tokens));
  for (int64_t t = 0; t < tokens_; ++t)
    record.sums(0, t) = {of_student[t].max, of_student[t].sum, of_teacher[t].max,
                         of_teacher[t].sum, target[t],         target[tokens_ + t]};
}

float TopKDivergence::finish(int64_t row, std::span<const double> log_q,
                             std::span<const double> log_p) {
  constexpr double nothing = -infinity_of<double>;
  const int64_t first = row * (length_ + 1);
  double value = 0, sum = 0;
  for (int64_t k = 0; k <= length_; ++k) {
    const bool is_target = k == length_;
    const size_t at = k;
    const double gap = log_q[at] == nothing ? nothing : log_q[at] - log_p[at];
    double term = gap, slope = gap + (tail_ == TailGradient::unbiased ? 1 : 0);
    if (!is_target) {
      const double q = std::exp(log_q[at]);
      term = gap == nothing ? 0 : gap == -nothing ? gap : q * gap;
      slope = gap == nothing ? 0 : q * (gap + 1);
    } else if (ids_[first + k] < 0) {
      term = slope = 0;
    }
    value += term;
    sum += slope;
    slopes_[first + k] = static_cast<float>(slope);
  }
  sums_[row] = sum;
  const auto rounded = static_cast<float>(value);
  if (!std::isfinite(rounded)) normalizers_[row].log_sum = nan_of<float>;  // the gradient is NaN
  return rounded;
}

float TopKDivergence::merge_row(Record& all, int64_t t, int32_t target, MergeRoom& room) {
  RowTotal of_student, of_teacher;
  for (int64_t r = 0; r < tp_.size(); ++r) {
    const RowSums& part = all.sums(r, t);
    of_student.add({part.student_max, part.student_sum, 0}, 1);
    of_teacher.add({part.teacher_max, part.teacher_sum, 0}, 1);
  }
  const Normalizer students(of_student), teachers(of_teacher);
  normalizers_[t] = {of_student.max, static_cast<float>(students.log_sum)};
  int32_t* const ids = ids_.data() + t * (length_ + 1);
  const int owner = vocab_.owner(target);
  ids[length_] = owner < 0 ? -1 : target;
  const size_t first = t * all.entries;
  merge_lists(
      room.heads, all.entries, length_,
      [&](int64_t r, size_t i) {
        return std::pair(all.students(r)[first + i], all.ids(r)[first + i]);
      },
      [&](size_t k, int64_t r, size_t i) {
        ids[k] = all.ids(r)[first + i];
        room.log_q[k] = students(all.students(r)[first + i]);
        room.log_p[k] = teachers(all.teachers(r)[first + i]);
        if (ids[k] == target) ids[length_] = -1;
      });
  const RowSums& of_target = all.sums(std::max(owner, 0), t);
  room.log_q.back() = students(of_target.student_target);
  room.log_p.back() = teachers(of_target.teacher_target);
  return finish(t, room.log_q, room.log_p);
}

double TopKDivergence::forward(ConstMatrixRef student, ConstMatrixRef teacher,
                               std::span<const int32_t> targets, Stream& stream,
                               std::span<float> value) {
  GYRE_CHECK(scores_ == nullptr && teacher.rows == tokens_ && teacher.cols == student.cols,
             "{} x {} logits of a teacher, for {} x {} of a student", teacher.rows, teacher.cols,
             student.rows, student.cols);
  check_call(student, targets.size(), value.size());
  const int64_t ranks = tp_.size();
  int64_t most = 0;
  for (int r = 0; r < vocab_.ranks(); ++r) most = std::max(most, vocab_.valid(r));
  Record own(tokens_, std::min(length_, most), 1);
  make_record(student, teacher, targets, own);
  Record gathered(ranks == 1 ? 0 : tokens_, own.entries, ranks);
  double waited = 0;
  if (ranks > 1) {
    const Stopwatch watch;
    tp_.all_gather(bytes_of(std::as_const(own.bytes).span()), gathered.bytes.span(), stream,
                   divergence_call)
        ->wait();
    waited = watch.seconds();
  }
  Record& all = ranks == 1 ? own : gathered;
  const double nanoseconds = 2.0 * (length_ * ranks) + 20.0 * length_;
  for_each_part(threads_, tokens_, nanoseconds, [&](int64_t begin, int64_t end, int) {
    MergeRoom room{std::vector<int64_t>(ranks), std::vector<double>(length_ + 1),
                   std::vector<double>(length_ + 1)};
    for (int64_t t = begin; t < end; ++t) value[t] = merge_row(all, t, targets[t], room);
  });
  return waited;
}

double TopKDivergence::forward(ConstMatrixRef student, const TeacherLogprobs& teacher,
                               std::span<const int32_t> targets, Stream& stream,
                               std::span<float> value) {
  check_call(student, targets.size(), value.size());
  GYRE_CHECK(scores_ != nullptr && std::ssize(teacher.ids) == tokens_ * length_ &&
                 teacher.of_ids.size() == teacher.ids.size() &&
                 teacher.of_targets.size() == targets.size(),
             "{} ids, {} log-probabilities of them and {} of targets", teacher.ids.size(),
             teacher.of_ids.size(), teacher.of_targets.size());
  const int64_t width = length_ + 1;
  for (int64_t t = 0; t < tokens_; ++t) {
    const auto own = teacher.ids.subspan(t * length_, length_);
    std::ranges::copy(own, ids_.data() + t * width);
    const bool adds =
        vocab_.owner(targets[t]) >= 0 && std::ranges::find(own, targets[t]) == own.end();
    ids_[t * width + length_] = adds ? targets[t] : -1;
  }
  Buffer<float> logprob(ids_.size(), results_space(kernels_));
  const double waited = scores_->forward(student, ids_.span(), stream, logprob.span(), {});
  std::ranges::copy(scores_->normalizers(), normalizers_.data());
  const double nanoseconds = 20.0 * length_;
  for_each_part(threads_, tokens_, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float *own = logprob.data() + t * width, *theirs = teacher.of_ids.data() + t * length_;
      std::vector<double> log_p(theirs, theirs + length_);
      log_p.push_back(teacher.of_targets[t]);
      value[t] = finish(t, std::vector<double>(own, own + width), log_p);
    }
  });
  return waited;
}

void TopKDivergence::backward(ConstMatrixRef student, std::span<const float> d_value,
                              MatrixRef d_student) const {
  check_call(student, d_value.size(), d_value.size());
  // A logit near the lowest f32 makes a coefficient that overflows, where its product with p does
  // not: a power of 2 of it moves to p.
  constexpr double largest = 0x1p120, power = 0x1p16;
  Buffer<GradientCoefficients> coefficients(tokens_);
  Buffer<RowNormalizer> normalizers(tokens_);
  Buffer<float> weights(slopes_.size());
  for (int64_t t = 0, at = 0; t < tokens_; ++t) {
    const double g = d_value[t], a = g == 0 ? 0 : -g * sums_[t];
    const bool moves = std::abs(a) > largest;
    coefficients[t] = {static_cast<float>(moves ? a / power : a), 0};
    normalizers[t] = normalizers_[t];
    if (moves) normalizers[t].log_sum -= static_cast<float>(std::log(power));
    for (int64_t k = 0; k <= length_; ++k, ++at) {
      weights[at] = g == 0 ? 0 : static_cast<float>(g * slopes_[at]);
      if (std::isinf(weights[at])) normalizers[t].log_sum = nan_of<float>;  // it leaves f32
    }
  }
  kernels_.gradient(
      student, {vocab_.valid(tp_.rank()), 1, threads_}, normalizers.span(), coefficients.span(),
      {ids_.span(), weights.span(), length_ + 1, vocab_.begin(tp_.rank())}, d_student);
}

}  // namespace gyre
