#include "apps/attention/results.hpp"

#include "core/index.hpp"

namespace gyre {
namespace {

/// An f32 view of a matrix in host memory. Only a matrix of another type is converted.
class AsFloat {
 public:
  AsFloat(const MatrixRef& from, Stream& stream) : here_(from, stream) {
    const ConstMatrixRef& matrix = here_.matrix();
    if (matrix.type == DType::f32) {
      view_ = matrix.as<float>();
      return;
    }
    values_ = Buffer<float>(matrix.rows * matrix.cols);
    for (int64_t r = 0; r < matrix.rows; ++r)
      for (int64_t c = 0; c < matrix.cols; ++c) values_[r * matrix.cols + c] = here_.at(r, c);
    view_ = {values_.data(), matrix.rows, matrix.cols, matrix.cols};
  }
  const MatrixView<const float>& view() const { return view_; }

 private:
  HostCopy here_;
  Buffer<float> values_;
  MatrixView<const float> view_;
};

}  // namespace

void write_results(OutputFile& output, AttentionCase& of, const std::string& input_sha256,
                   const Provenance& provenance) {
  const AttentionWorkload& workload = of.workload();
  AttentionExecutor& executor = of.executor();
  const std::vector<double> all_lse = of.statistics(0);
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
  mine.tokens.assign(of.shard().slots, -1);
  Buffer<float> lse(of.shard().slots * header.heads);
  for (const TokenRow& own : token_rows(workload, of.shard())) {
    mine.tokens[own.row] = own.token;
    for (int64_t h = 0; h < header.heads; ++h)
      lse[own.row * header.heads + h] = static_cast<float>(all_lse[own.token * header.heads + h]);
  }
  const AsFloat out(executor.matrix(ArrayKind::out), of.stream()),
      d_q(executor.matrix(ArrayKind::d_q), of.stream()), d_k(executor.d_keys(), of.stream()),
      d_v(executor.d_values(), of.stream());
  mine.out = out.view();
  mine.lse = lse.matrix(of.shard().slots, header.heads);
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

int64_t writing_bytes(const std::string& output, const AttentionWorkload& workload, int ranks) {
  if (output.empty()) return 0;
  constexpr int64_t copies = 4, bytes = sizeof(float);
  const int64_t rows = ceil_div(workload.tokens(), int64_t{ranks});
  return copies * rows * workload.heads.heads * workload.heads.head_dim * bytes;
}

}  // namespace gyre
