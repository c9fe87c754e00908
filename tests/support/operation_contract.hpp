#pragma once
// What every operation on a split vocabulary promises, for an operation that is described once:
//
//     struct MyOperation {                                  // the operation with one problem
//       static std::vector<MyOperation> cases();            // held against the reference
//       static MyOperation threaded();                      // rows for several threads
//       static constexpr const char* agreement = "...";     // what messages of its agreement name
//       static void construct(int64_t tokens, const VocabPartition&);
//       std::string name() const;
//       LogitRows rows;                                     // whole logits
//       DType type;                                         // of a shard
//       OperationResult run(const Part&) const;
//       void expect_reference(const OperationResult&, const Part&) const;
//       int64_t forward_bytes(int64_t ranks) const;         // that a rank sends
//       static constexpr int64_t collectives = 2;           // forward; without, 1
//       void remove_gradient();                             // zeros come from above
//     };
//     GYRE_TEST_OPERATION(MyOperation);

#include <fmt/ranges.h>

#include <functional>
#include <memory>
#include <utility>

#include "errors.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/parallel.hpp"
#include "score_checks.hpp"

namespace gyre::test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;

/// A matrix in the memory that an operation computes in.
class Placed {
 public:
  virtual ~Placed() = default;
  virtual MatrixRef ref() = 0;
  virtual Matrix host() = 0;
};

/// Where an operation computes: on the host, unless derived.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::unique_ptr<Placed> put(const Matrix& matrix) const {
    struct OnHost final : Placed {
      explicit OnHost(Matrix m) : matrix(std::move(m)) {}
      MatrixRef ref() override { return matrix.ref(); }
      Matrix host() override { return matrix; }
      Matrix matrix;
    };
    return std::make_unique<OnHost>(matrix);
  }
  virtual Stream& stream() const { return host_; }
  virtual RowKernels* kernels() const { return nullptr; }
  virtual Communicator* arrays() const { return nullptr; }

 private:
  mutable HostStream host_;
};

struct OperationResult {
  std::vector<Floats> values;       ///< equal on all ranks
  Floats d_logits;                  ///< of this rank's columns
  int64_t messages = 0, bytes = 0;  ///< that the forward pass sent

  bool same_bits(const OperationResult& other) const {
    const auto digests = [](const OperationResult& r) {
      std::vector<int64_t> all = {digest<float>(r.d_logits)};
      for (const Floats& x : r.values) all.push_back(digest<float>(x));
      return all;
    };
    return digests(*this) == digests(other);
  }
};

/// One rank's part of a run.
struct Part {
  VocabPartition vocab;
  const Place& place;
  Communicator* group = &world();
  int threads = 1;
  bool in_place = false;  ///< the gradient takes the logits' memory

  Communicator& tp() const { return *group; }
  int rank() const { return group->rank(); }
  Stream& stream() const { return place.stream(); }
  std::unique_ptr<Placed> put(const LogitRows& rows, DType type) const {
    return place.put(rows.shard(vocab, rank(), type));
  }
  Traffic sent() const {
    Traffic sent = tp().traffic();
    if (place.arrays() == nullptr) return sent;
    sent.bytes_sent += place.arrays()->traffic().bytes_sent;
    sent.messages += place.arrays()->traffic().messages;
    return sent;
  }
  void forward(OperationResult& result, const std::function<void()>& work) const {
    const Traffic before = sent();
    work();
    result.messages = sent().messages - before.messages;
    result.bytes = sent().bytes_sent - before.bytes_sent;
  }
  /// Calls work(d_logits), which must send nothing and write all of d_logits.
  void backward(OperationResult& result, Placed& logits, DType type,
                const std::function<void(MatrixRef)>& work) const {
    const auto other = place.put(Matrix(logits.ref().rows, logits.ref().cols, type));
    Placed& d_logits = in_place ? logits : *other;
    const Traffic before = sent();
    work(d_logits.ref());
    EXPECT_EQ(sent().messages, before.messages) << "backward";
    result.d_logits = elements(d_logits.host().ref());
  }
};

template <class Operation>
void expect_reference_for_any_partition(const std::vector<Operation>& cases,
                                        const Place& place = Place()) {
  for (const Operation& operation : cases)
    for (const VocabPartition& vocab : partitions(operation.rows.vocab_size, world().size())) {
      SCOPED_TRACE(fmt::format("{} of {}, offsets {}", operation.name(), name_of(operation.type),
                               fmt::join(vocab.offsets, " ")));
      const Part part{vocab, place};
      const OperationResult got = operation.run(part);
      operation.expect_reference(got, part);
      for (const Floats& values : got.values) expect_same_on_all_ranks(values);
    }
}

template <class Operation>
void expect_reference_for_any_size_of_the_group() {
  const Place place;
  for (const Operation& operation : {Operation::cases().front(), Operation::cases().back()})
    for (const int ranks : {1, 2, world().size()}) {
      SCOPED_TRACE(fmt::format("groups of {}", ranks));
      const std::unique_ptr<Communicator> group = world().split(world().rank() / ranks);
      const Part part{balanced_partition(operation.rows.vocab_size, group->size()), place,
                      group.get()};
      operation.expect_reference(operation.run(part), part);
    }
}

template <class Operation>
void expect_same_bits_again() {
  const Place place;
  const Operation operation = Operation::threaded();
  Part part{partitions(operation.rows.vocab_size, world().size()).back(), place};
  const OperationResult once = operation.run(part);
  for (const int threads : {1, 3}) {
    part.threads = threads;
    EXPECT_TRUE(operation.run(part).same_bits(once)) << threads << " threads";
  }
  {
    const SharingLimits one_row_a_task = std::exchange(sharing_limits, {});
    EXPECT_TRUE(operation.run(part).same_bits(once)) << "many rows a task";
    sharing_limits = one_row_a_task;
  }
  part.in_place = true;
  EXPECT_TRUE(operation.run(part).same_bits(once)) << "in the logits' memory";
}

template <class Operation>
constexpr int64_t collectives_of() {
  if constexpr (requires { Operation::collectives; })
    return Operation::collectives;
  else
    return 1;
}

/// Expects the operation's collectives in the forward pass and none in the backward pass
/// (Part::backward).
template <class Operation>
void expect_collectives_forward() {
  const Place place;
  const int n = world().size();
  for (const Operation& operation : Operation::cases()) {
    if (operation.rows.tokens == 0) continue;
    SCOPED_TRACE(operation.name());
    const OperationResult got =
        operation.run({balanced_partition(operation.rows.vocab_size, n), place});
    EXPECT_EQ(got.messages, n > 1 ? collectives_of<Operation>() : 0);
    EXPECT_EQ(got.bytes, operation.forward_bytes(n));
  }
}

template <class Operation>
void expect_zeros_without_a_gradient(const std::vector<Operation>& cases,
                                     const Place& place = Place()) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (Operation operation : cases) {
    operation.remove_gradient();
    for (int64_t t = 0; t < operation.rows.tokens; ++t)
      for (int64_t v = 0; v < operation.rows.vocab_size; ++v)
        operation.rows.at(t, v) = t % 3 == 0 ? NAN : t % 3 == 1 && v % 2 == 0 ? inf : -inf;
    for (const VocabPartition& vocab : partitions(operation.rows.vocab_size, world().size())) {
      const Floats got = operation.run({vocab, place}).d_logits;
      EXPECT_EQ(got, Floats(got.size(), 0)) << operation.name();
    }
  }
}

/// Expects the same message on all ranks, which can communicate afterwards: see agreed_message.
template <class Operation>
void expect_wrong_arguments_end_all_ranks_alike() {
  const int n = world().size(), last = on_last_rank() ? 1 : 0;
  const auto error = [](int64_t tokens, const VocabPartition& vocab) {
    return agreed_message([&] { Operation::construct(tokens, vocab); });
  };
  const VocabPartition vocab = even_partition(16 * n - 1, 16 * n, n);
  const std::string what = Operation::agreement;
  EXPECT_EQ(error(4, vocab), "no error");
  EXPECT_EQ(error(4 + last, vocab), differs(what, "the number of tokens", "4", "5"));
  EXPECT_EQ(error(4 - 9 * last, vocab), "-5 tokens; the fewest are 0" + found_on(n - 1));
  VocabPartition other = vocab;
  other.vocab_size -= last;
  EXPECT_EQ(error(4, other), differs(what, "the number of ids of the vocabulary",
                                     std::to_string(16 * n - 1), std::to_string(16 * n - 2)));
  EXPECT_EQ(error(4, balanced_partition(9, n + 1)),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
  other = vocab;
  other.offsets.back() += 3 * last;
  EXPECT_EQ(error(4, other), differs(what, "the number of columns of the vocabulary",
                                     std::to_string(16 * n), std::to_string(16 * n + 3)));
  other = vocab;
  other.offsets[0] = last;
  EXPECT_EQ(error(4, other),
            "the first shard of the vocabulary begins at column 1; it must be 0" + found_on(n - 1));
  if (n == 1) return;
  other = vocab;
  other.offsets[1] += 2 * last;
  EXPECT_EQ(error(4, other),
            differs(what, "the first column of shard 1 of the vocabulary", "16", "18"));
}

}  // namespace gyre::test

#define GYRE_TEST_OPERATION(Operation)                                     \
  TEST(Operation, EqualsTheReferenceForAnyPartition) {                     \
    ::gyre::test::expect_reference_for_any_partition(Operation::cases());  \
  }                                                                        \
  TEST(Operation, EqualsTheReferenceForAnySizeOfTheGroup) {                \
    ::gyre::test::expect_reference_for_any_size_of_the_group<Operation>(); \
  }                                                                        \
  TEST(Operation, HasTheSameBitsAgainForAnyThreadsAndInPlace) {            \
    ::gyre::test::expect_same_bits_again<Operation>();                     \
  }                                                                        \
  TEST(Operation, SendsItsCollectivesForwardAndNothingBackward) {          \
    ::gyre::test::expect_collectives_forward<Operation>();                 \
  }                                                                        \
  TEST(Operation, HasZerosForTokensWithoutAGradientWhateverTheyHold) {     \
    ::gyre::test::expect_zeros_without_a_gradient(Operation::cases());     \
  }                                                                        \
  TEST(Operation, EndsAllRanksAlikeForWrongArguments) {                    \
    ::gyre::test::expect_wrong_arguments_end_all_ranks_alike<Operation>(); \
  }
