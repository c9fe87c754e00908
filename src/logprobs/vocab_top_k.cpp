#include "logprobs/vocab_top_k.hpp"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "logprobs/records/merge_lists.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

constexpr std::string_view call_name = "largest logits";

/// Lists of all ranks: for each rank ids [tokens, entries], then values [tokens, entries].
struct Lists {
  int64_t tokens, entries;  // `entries` of each list, on all ranks
  DType type;

  int64_t block_bytes() const {
    return round_up(tokens * entries * static_cast<int64_t>(sizeof(int32_t) + size_of(type)), 4);
  }
  const int32_t* ids(const std::byte* all, int64_t rank, int64_t token) const {
    return reinterpret_cast<const int32_t*>(all + rank * block_bytes()) + token * entries;
  }
  float value(const std::byte* all, int64_t rank, int64_t token, int64_t entry) const {
    const std::byte* values = all + rank * block_bytes() + tokens * entries * int64_t{4};
    const int64_t at = token * entries + entry;
    return type == DType::f32 ? reinterpret_cast<const float*>(values)[at]
                              : to_float(reinterpret_cast<const bf16*>(values)[at]);
  }
};

}  // namespace

VocabTopK::VocabTopK(int64_t tokens, const VocabPartition& vocab, int64_t k, int threads,
                     Communicator& tp, RowKernels* kernels)
    : tokens_(tokens),
      vocab_(vocab),
      length_(std::min(k, vocab.vocab_size)),
      threads_(threads),
      tp_(tp),
      kernels_(kernels_or_cpu(kernels)) {
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    if (k < 1) throw_usage("the {} largest logits; the smallest valid number is 1", k);
  };
  agree_on_arguments(tp, call_name, check,
                     {{"the number of tokens", tokens}, {"the number of logits a token", k}});
  agree_on_partition(tp, call_name, vocab);
}

double VocabTopK::run(ConstMatrixRef logits, Stream& stream, std::span<float> values,
                      std::span<int32_t> ids) {
  const int rank = tp_.rank();
  GYRE_CHECK(logits.rows == tokens_ && logits.cols == vocab_.columns(rank),
             "a shard of {} x {} logits, not {} x {}", logits.rows, logits.cols, tokens_,
             vocab_.columns(rank));
  GYRE_CHECK(std::ssize(values) == tokens_ * length_ && ids.size() == values.size(),
             "{} values and {} ids of {} x {}", values.size(), ids.size(), tokens_, length_);
  int64_t entries = 0;
  for (int r = 0; r < vocab_.ranks(); ++r) entries = std::max(entries, vocab_.valid(r));
  const Lists lists{tokens_, std::min(length_, entries), logits.type};
  const int64_t count = tokens_ * lists.entries;

  Buffer<std::byte> own(lists.block_bytes());
  const std::span own_ids(reinterpret_cast<int32_t*>(own.data()), count);
  std::byte* const own_values = own.data() + own_ids.size_bytes();
  Buffer<float> wide(logits.type == DType::f32 ? 0 : count);
  const std::span<float> found = logits.type == DType::f32
                                     ? std::span(reinterpret_cast<float*>(own_values), count)
                                     : wide.span();
  kernels_.top(logits, {vocab_.valid(rank), 1, false, threads_},
               {found, own_ids, {}, lists.entries}, {});
  if (logits.type == DType::bf16)
    std::transform(found.begin(), found.end(), reinterpret_cast<bf16*>(own_values), to_bf16);
  for (int32_t& id : own_ids)
    if (id >= 0) id += static_cast<int32_t>(vocab_.begin(rank));

  Buffer<std::byte> all(tp_.size() * lists.block_bytes());
  const Stopwatch watch;
  tp_.all_gather(bytes_of(std::as_const(own).span()), all.span(), stream, call_name)->wait();
  const double waited = watch.seconds();
  const double nanoseconds = 2.0 * (length_ * tp_.size());
  for_each_part(threads_, tokens_, nanoseconds, [&](int64_t begin, int64_t end, int) {
    std::vector<int64_t> heads(tp_.size());
    for (int64_t t = begin; t < end; ++t) {
      const size_t at = t * length_;
      const auto entry = [&](int64_t r, int64_t i) {
        return std::pair(lists.value(all.data(), r, t, i), lists.ids(all.data(), r, t)[i]);
      };
      merge_lists(heads, lists.entries, length_, entry, [&](size_t k, int64_t r, int64_t i) {
        std::tie(values[at + k], ids[at + k]) = entry(r, i);
      });
    }
  });
  return waited;
}

}  // namespace gyre
