#include "logprobs/vocab_partition.hpp"

#include <algorithm>
#include <utility>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

void check_size(const VocabPartition& vocab) {
  if (vocab.vocab_size < 1 || vocab.vocab_size > vocab.padded())
    throw_usage(
        "a vocabulary of {} ids in {} columns; it needs at least one id and one column each",
        vocab.vocab_size, vocab.padded());
}

VocabPartition checked(VocabPartition vocab) {
  check_size(vocab);
  return vocab;
}

}  // namespace

int64_t VocabPartition::valid(int rank) const {
  return std::clamp<int64_t>(vocab_size - begin(rank), 0, columns(rank));
}

VocabPartition even_partition(int64_t vocab_size, int64_t padded, int ranks) {
  if (ranks < 1 || padded % ranks != 0)
    throw_usage("{} columns cannot be dealt evenly to {} ranks; {} can", padded, ranks,
                round_up(padded, std::max(1, ranks)));
  VocabPartition vocab{{}, vocab_size};
  for (int64_t r = 0; r <= ranks; ++r) vocab.offsets.push_back(padded / ranks * r);
  return checked(std::move(vocab));
}

VocabPartition partition_of(std::span<const int64_t> columns, int64_t vocab_size) {
  VocabPartition vocab{{0}, vocab_size};
  for (const int64_t count : columns) {
    if (count < 0)
      throw_usage("shard {} has {} columns; the fewest are 0", vocab.offsets.size() - 1, count);
    vocab.offsets.push_back(vocab.offsets.back() + count);
  }
  return checked(std::move(vocab));
}

VocabPartition balanced_partition(int64_t vocab_size, int ranks) {
  std::vector<int64_t> columns;
  for (int64_t r = 0; r < ranks; ++r)
    columns.push_back(vocab_size / ranks + (r < vocab_size % ranks ? 1 : 0));
  return partition_of(columns, vocab_size);
}

void check_partition(const VocabPartition& vocab, int ranks) {
  if (std::ssize(vocab.offsets) != ranks + 1)
    throw_usage("a vocabulary in {} shards for a group of {} ranks; it must be one shard a rank",
                std::ssize(vocab.offsets) - 1, ranks);
  if (vocab.offsets[0] != 0)
    throw_usage("the first shard of the vocabulary begins at column {}; it must be 0",
                vocab.offsets[0]);
  for (int r = 0; r < ranks; ++r)
    if (vocab.columns(r) < 0)
      throw_usage("shard {} has {} columns; the fewest are 0", r, vocab.columns(r));
  check_size(vocab);
}

void agree_on_partition(Communicator& tp, std::string_view what, const VocabPartition& vocab) {
  std::vector<int64_t> mine = vocab.offsets;
  mine.push_back(vocab.vocab_size);
  std::vector<int64_t> all(mine.size() * tp.size());
  HostStream stream;
  tp.all_gather(bytes_of(std::span<const int64_t>(mine)),
                writable_bytes_of(std::span<int64_t>(all)), stream, what)
      ->wait();
  const size_t shards = mine.size() - 2;
  for (size_t i = 0; i < mine.size(); ++i)
    for (size_t r = 1; r * mine.size() < all.size(); ++r) {
      const int64_t other = all[r * mine.size() + i];
      if (other == all[i]) continue;
      std::string name = fmt::format("first column of shard {} of the vocabulary", i);
      if (i == shards) name = "number of columns of the vocabulary";
      if (i > shards) name = "number of ids of the vocabulary";
      throw_to_all(tp, ExitCode::usage,
                   fmt::format("{}: the {} is {} on rank 0, but {} on rank {}; it must be the same "
                               "on all ranks of the group",
                               what, name, all[i], other, r));
    }
}

}  // namespace gyre
