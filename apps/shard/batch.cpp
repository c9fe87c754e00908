#include "apps/shard/batch.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "comm/agree.hpp"
#include "core/label.hpp"
#include "packing/cp_batch.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

/// Refuses masks that the shards of this format cannot keep.
void check_mask(const BshdArrays& arrays, const BatchJob& job) {
  const int64_t documents = max_documents_of_row(arrays);
  check_mask_contract(job.cp > 1, job.mask, documents);
  if (job.options.format == "bshd" && job.cp > 1 && documents > 1)
    throw_usage(
        "rows of up to {} documents: "
        "--format bshd has no boundaries between them; use --format thd",
        documents);
}

/// The parts of all ranks of the layout, in rank order, on all ranks of the run.
std::vector<RankPart> all_parts(const std::vector<RankPart>& mine, int cp, Communicator& world) {
  std::vector<RankPart> all;
  for (int r = 0; r < cp; ++r) {
    RankPart part;
    for (const RankPart& candidate : mine)
      if (candidate.rank == r) part = candidate;
    const auto sum = [&](int64_t value) { return all_reduce_value(world, value, ReduceOp::sum); };
    all.push_back(
        {.rank = r,
         .slots = sum(part.slots),
         .tokens = sum(part.tokens),
         .pairs = sum(part.pairs),
         .hidden_pairs = sum(part.hidden_pairs),
         .loss = {all_reduce_value(world, part.loss.loss, ReduceOp::sum), sum(part.loss.tokens)}});
  }
  return all;
}

/// Sets the mean loss over all ranks, and the mean of the ranks' own means.
void set_losses(BatchResult& row, const std::vector<RankPart>& parts) {
  std::vector<LossSums> sums;
  double means = 0, ranks = 0;
  for (const RankPart& part : parts) {
    sums.push_back(part.loss);
    if (part.loss.tokens == 0) continue;
    means += part.loss.loss / part.loss.tokens, ++ranks;
  }
  if (ranks == 0) return;
  row.mean_loss = mean_loss(sums);
  row.mean_of_means = means / ranks;
}

BatchResult result_of(const BatchJob& job, int64_t stream, const std::vector<RankPart>& parts) {
  BatchResult row;
  row.format = job.options.format;
  row.stream = stream;
  row.slots = parts[0].slots;
  row.least_tokens = row.max_tokens = parts[0].tokens;
  row.least_labels = row.max_labels = parts[0].loss.tokens;
  int64_t pairs = 0, max_pairs = 0;
  for (const RankPart& part : parts) {
    row.least_tokens = std::min(row.least_tokens, part.tokens);
    row.max_tokens = std::max(row.max_tokens, part.tokens);
    row.least_labels = std::min(row.least_labels, part.loss.tokens);
    row.max_labels = std::max(row.max_labels, part.loss.tokens);
    row.hidden_pairs += part.hidden_pairs;
    pairs += part.pairs;
    max_pairs = std::max(max_pairs, part.pairs);
  }
  if (pairs > 0) row.pair_ratio = static_cast<double>(max_pairs) * job.cp / pairs;
  set_losses(row, parts);
  return row;
}

/// The mean loss of the unsharded labels of stream `stream` of `streams`.
double whole_mean_loss(const BshdArrays& arrays, int64_t stream, int64_t streams) {
  const int64_t count = arrays.rows / streams * arrays.slots;
  double loss = 0, tokens = 0;
  for (int64_t t = stream * count; t < (stream + 1) * count; ++t) {
    const int64_t label = arrays.labels[t];
    if (label != ignored_label) loss += static_cast<double>(static_cast<float>(label)), ++tokens;
  }
  return tokens > 0 ? loss / tokens : 0;
}

}  // namespace

const std::vector<std::string>& mask_names() {
  static const std::vector<std::string> names{"causal", "causal-segments", "full", "dense"};
  return names;
}

AttentionMask find_mask(const std::string& name) {
  constexpr AttentionMask masks[] = {AttentionMask::causal, AttentionMask::causal_segments,
                                     AttentionMask::full, AttentionMask::dense};
  const auto& names = mask_names();
  return masks[std::find(names.begin(), names.end() - 1, name) - names.begin()];
}

void declare_batch_options(OptionTable& table, BatchOptions& o) {
  const AddOptions add(table, "Advanced");
  add.choice("--format",
             "Form of shards of gyre/bshd: a stream of segments (thd), or masked rows (bshd)",
             o.format, {"thd", "bshd"});
  add("--tp", "bshd: tensor-parallel ranks that share a shard of a row", o.tp, 1);
  add.size("--chunks", "thd: number of streams that the rows become", o.chunks, 1);
  add.choice("--tail",
             "thd: what becomes of padding at the end of a row; "
             "default: own-segment, or absorb with --cp 1",
             o.tail, {"own-segment", "keep", "absorb"});
  add.choice("--pad-positions", "bshd: positions of the padding that a row gets", o.pad_positions,
             {"zero", "counting", "restarted"});
}

const Table<BatchResult>& batch_table() {
  using Row = BatchResult;
  static const Table<Row> table({
      {"format", "", 6, 0, &Row::format, Align::left},
      {"stream", "", 6, 0, &Row::stream},
      {"slots", "rank", 9, 0, &Row::slots},
      {"tokens_min", "rank", 10, 0, &Row::least_tokens},
      {"tokens_max", "rank", 10, 0, &Row::max_tokens},
      {"labels_min", "rank", 10, 0, &Row::least_labels},
      {"labels_max", "rank", 10, 0, &Row::max_labels},
      {"pairs", "max/mean", 9, 4, &Row::pair_ratio},
      {"hidden", "pairs", 9, 0, &Row::hidden_pairs},
      {"mean_loss", "", 10, 3, &Row::mean_loss},
      Column<Row>{"mean_of_means", "", 13, 3, &Row::mean_of_means}.extra(),
      {"check", "", 6, 0, &Row::check, Align::left},
  });
  return table;
}

std::vector<int> ranks_of(const Communicator& world, int cp) {
  std::vector<int> ranks;
  for (int r = world.rank(); r < cp; r += world.size()) ranks.push_back(r);
  return ranks;
}

LossSums stand_in_loss(const std::vector<int64_t>& labels) {
  const std::vector<float> losses(labels.begin(), labels.end());
  return sum_losses(losses, labels);
}

std::vector<BatchResult> shard_batch(const std::string& file, const BshdArrays& arrays,
                                     const BatchJob& job, Communicator& world, Verification& checks,
                                     KeptRows* kept) {
  const bool rows = job.options.format == "bshd";
  Verification mine(checks.tolerance_scale());
  StreamParts streams;
  const auto of_file = [&](const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      throw_usage("'{}': {}", file, error.what());
    }
  };
  BshdBatch batch;
  run_agreed(world, "reading rows", [&] {
    of_file([&] {
      batch = batch_of(arrays);
      if (arrays.seq_lens)  // throws if the tables are invalid
        to_thd(batch, {.sentinel = arrays.sentinel, .tail = Tail::keep});
      else if (rows)
        check_padding_of_rows(arrays);
      check_labels(arrays);
      check_mask(arrays, job);
    });
  });
  agree_on_batch(world, batch);
  run_agreed(world, "sharding rows", [&] {
    of_file([&] {
      streams = rows ? shard_key_masked_rows(arrays, job, world, mine, kept)
                     : shard_streams(arrays, job, world, mine);
    });
  });
  if (rows && world.size() == job.cp) check_rows_over_ranks(arrays, job, world, mine);
  std::vector<BatchResult> results;
  Check& loss = mine.check("mean loss of shards", 1e-12);
  for (size_t s = 0; s < streams.size(); ++s) {
    const int64_t stream = s;
    BatchResult row = result_of(job, stream, all_parts(streams[s], job.cp, world));
    const double whole = whole_mean_loss(arrays, stream, std::ssize(streams));
    loss.add(
        row.mean_loss, whole, [&] { return fmt::format("stream {}", s); },
        std::max(1.0, std::abs(whole)));
    results.push_back(row);
  }
  mine.merge_over(world);
  for (BatchResult& row : results) row.check = mine.passed() ? "ok" : "FAILED";
  checks.merge(mine);
  return results;
}

}  // namespace gyre
