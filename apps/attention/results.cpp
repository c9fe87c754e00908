#include "apps/attention/results.hpp"

#include "apps/attention/check.hpp"

namespace gyre {
namespace {

/// A host copy of a matrix, as f32.
class AsFloat {
 public:
  AsFloat(const MatrixRef& from, Stream& stream)
      : values_(from.rows * from.cols), cols_(from.cols) {
    const HostCopy here(from, stream);
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t c = 0; c < from.cols; ++c) values_[r * from.cols + c] = here.at(r, c);
  }
  MatrixView<const float> view() const {
    return values_.matrix(cols_ == 0 ? 0 : values_.size() / cols_, cols_);
  }

 private:
  Buffer<float> values_;
  int64_t cols_;
};

}  // namespace

void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world) {
  const AttentionWorkload& workload = run.workload();
  AttentionExecutor& executor = run.executor();
  const std::vector<double> all_lse = gather_statistics(run, 0, world);
  AttentionResultsHeader header;
  header.heads = workload.heads.heads;
  header.kv_heads = workload.heads.kv_heads;
  header.head_dim = workload.heads.head_dim;
  header.offsets = workload.offsets;
  header.gradients = true;
  header.d_sinks = executor.d_sinks();
  header.input_sha256 = input_sha256;
  header.provenance = provenance;
  AttentionResultRows mine;
  mine.tokens.assign(static_cast<size_t>(run.shard().slots), -1);
  Buffer<float> lse(run.shard().slots * header.heads);
  for (const TokenRow& own : token_rows(workload, run.shard())) {
    mine.tokens[static_cast<size_t>(own.row)] = own.token;
    for (int64_t h = 0; h < header.heads; ++h)
      lse[own.row * header.heads + h] =
          static_cast<float>(all_lse[static_cast<size_t>(own.token * header.heads + h)]);
  }
  const AsFloat out(executor.matrix(ArrayKind::out), run.stream()),
      d_q(executor.matrix(ArrayKind::d_q), run.stream()), d_k(executor.d_keys(), run.stream()),
      d_v(executor.d_values(), run.stream());
  mine.out = out.view();
  mine.lse = lse.matrix(run.shard().slots, header.heads);
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

}  // namespace gyre
