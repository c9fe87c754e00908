#include "apps/attention/workload.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/attention/inputs.hpp"
#include "apps/attention/options.hpp"
#include "apps/common/generated_lengths.hpp"
#include "core/error.hpp"
#include "io/attention_file.hpp"

namespace gyre {

int64_t AttentionWorkload::longest() const {
  int64_t most = 0;
  for (int64_t d = 0; d < documents(); ++d) most = std::max(most, length(d));
  return most;
}

int64_t AttentionWorkload::pairs() const {
  return pairs_of_heads(offsets, mask, heads.heads);
}

AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size) {
  AttentionWorkload workload;
  workload.heads = o.head_shape();
  workload.type = o.types().activations;
  workload.offsets = {0};
  std::vector<int64_t> lengths(o.batch, size);
  workload.origin = fmt::format("{} x {} tokens", o.batch, size);
  if (!o.generate.empty()) lengths = generated_lengths(o.generate, o.capacity, workload.origin);
  for (const int64_t length : lengths) workload.offsets.push_back(workload.offsets.back() + length);
  workload.mask = o.mask.of(lengths);
  workload.pairs();  // throws when they cannot be counted
  if (o.sinks) workload.sinks = random_sinks(o.heads, o.seed);
  return workload;
}

namespace {

/// With sinks every query must see a key: a row without keys would be taken for padding, whose
/// statistics are not updated. A log-sum-exp must be -inf exactly where a query sees no key.
void check_queries(const AttentionWorkload& workload, const AttentionFile& file) {
  const bool answered = file.reference && !file.reference->lse.empty();
  if (!answered && workload.sinks.empty()) return;
  const int64_t heads = workload.heads.heads;
  for (int64_t d = 0; d < workload.documents(); ++d) {
    const DocumentMask mask(workload.mask, d, workload.length(d));
    const int64_t first = workload.offsets[d];
    for (int64_t q = 0; q < workload.length(d); ++q) {
      const int64_t keys = mask.keys_of(q);
      if (keys == 0 && !workload.sinks.empty())
        throw_usage(
            "the query at position {} of document {} sees no key; with sinks every query must see "
            "one",
            q, d);
      for (int64_t h = 0; answered && keys > 0 && h < heads; ++h)
        if (std::isinf(file.reference->lse[(first + q) * heads + h]))
          throw_usage(
              "{}: /reference/lse[{}, {}] is -inf, but the query at position {} of document {} "
              "sees {} keys; it must be finite",
              workload.origin, first + q, h, q, d, keys);
    }
  }
}

MaskRule mask_of(const AttentionFile& file, const std::string& path) {
  if (file.mask != "regions")
    return {file.mask == "causal" ? MaskKind::causal : MaskKind::full, file.window};
  std::vector<std::vector<Region>> documents(file.offsets.size() - 1);
  std::vector<int64_t> lengths;
  for (size_t d = 0; d < documents.size(); ++d)
    lengths.push_back(file.offsets[d + 1] - file.offsets[d]);
  for (size_t at = 0; at < file.regions.size(); at += attention_region_columns) {
    const int64_t* const row = &file.regions[at];
    documents[row[0]].push_back(
        {row[1], row[2], row[3], row[4], static_cast<RegionKind>(row[5]), row[6]});
  }
  try {
    return MaskRule(MaskTable(std::move(documents), lengths));
  } catch (const Error& error) {
    throw_usage("{}: /attention/regions: {}", path, error.what());
  }
}

}  // namespace

AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o) {
  o.mask.mask = file.mask;
  AttentionWorkload workload;
  workload.heads = {file.heads, file.kv_heads, file.head_dim, static_cast<float>(file.scale)};
  workload.offsets = file.offsets;
  workload.mask = mask_of(file, o.input);
  workload.sinks = file.sinks;
  workload.origin = o.input;
  check_queries(workload, file);
  workload.type = o.types().activations;
  workload.score_size = sampled_score_size(workload, *rows_of(file, workload.type));
  return workload;
}

}  // namespace gyre
