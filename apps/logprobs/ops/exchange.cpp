// exchange: turns column shards of the logits into row shards (forward) and back (backward).
//
// Results must equal the logits bitwise. A call is one exchange. It sends one message to every
// other rank for which this rank has a nonempty block of logits.

#include <bit>

#include "apps/logprobs/operation.hpp"
#include "logprobs/vocab_exchange.hpp"

namespace gyre {
namespace {

class ExchangeOp final : public RowsOp {
 public:
  explicit ExchangeOp(LogprobsContext& context)
      : RowsOp(context),
        exchange_(rows_.rows(), vocab(), context.problem.type, tp(), &tp_arrays()),
        by_rows_(exchange_.rows(), vocab().padded(), context.problem.type, space()) {}

  void start() override {
    forward_ = [this] { exchange_.to_sequence(rows_.logits(), stream(), by_rows_.ref()); };
    backward_ = [this] { exchange_.to_vocab(by_rows_.ref(), stream(), rows_.d_logits()); };
  }
  void prepare_backward() override {
    RowsOp::prepare_backward();
    rows_.clobber();  // so that only backward can put the logits there
  }
  void poison() override { by_rows_.poison(stream()); }
  std::optional<SentTraffic> expected(Pass pass) const override {
    SentTraffic sent;
    const int me = c_.grid.tp_rank();
    for (int r = 0; r < tp().size(); ++r) {
      const int64_t end = r + 1 < tp().size() ? exchange_.first_row(r + 1) : rows_.rows();
      const int64_t block = pass == Pass::forward ? (end - exchange_.first_row(r)) * columns()
                                                  : exchange_.rows() * vocab().columns(r);
      if (r == me || block == 0) continue;
      ++sent.messages;
      sent.bytes += block * size_of(c_.problem.type);
    }
    return sent;
  }
  double ideal_bytes(Pass) const override {
    return element_bytes() * (rows_.rows() * columns() + exchange_.rows() * vocab().padded());
  }

 private:
  std::vector<ResultArray> results(Pass pass) override {
    const bool forward = pass == Pass::forward;
    const int64_t first = forward ? exchange_.first_row(c_.grid.tp_rank()) : 0;
    const int64_t first_id = forward ? 0 : first_column();
    const MatrixRef got = forward ? by_rows_.ref() : rows_.d_logits();
    const auto tokens = rows_.tokens().subspan(first, got.rows);
    ResultArray array{"", {c_.problem.tokens(), vocab().padded()}, "bits of logits"};
    array.first = first_id;
    array.columns = got.cols;
    array.rows.assign(tokens.begin(), tokens.end());
    array.of_tokens = false;
    array.read = read_rows(got.cols, [this, got](size_t r, std::span<double> to) {
      const ConstMatrixRef row = host_row(got, r);
      for (int64_t c = 0; c < got.cols; ++c) to[c] = bits(row, 0, c);
    });
    array.expect = expect_rows([this, got, tokens, first_id](size_t r) {
      LogitMatrix want(1, got.cols, got.type);
      HostStream host;
      fill_logits(c_.inputs, TokenTensor::logits, tokens.subspan(r, 1), first_id, want.ref(), host);
      const size_t width = vocab().padded();
      ExpectedRow expected{std::vector<double>(width, 0), std::vector<double>(width, 1)};
      for (int64_t c = 0; c < got.cols; ++c) expected.values[first_id + c] = bits(want.ref(), 0, c);
      return expected;
    });
    return {array};
  }
  static uint32_t bits(ConstMatrixRef m, int64_t row, int64_t col) {
    return m.type == DType::f32 ? std::bit_cast<uint32_t>(m.as<float>()(row, col))
                                : uint32_t{m.as<bf16>()(row, col).bits};
  }

  VocabExchange exchange_;
  LogitMatrix by_rows_;
};

}  // namespace

LogprobsOperation exchange_operation() {
  return {.name = "exchange",
          .summary = "logits from shards of columns to shards of rows (forward) and back",
          .definition = "the logits",
          .methods = {{"gyre", makes<ExchangeOp>()}},
          .forward = RowTraffic::copies,
          .backward = RowTraffic::copies,
          .matrices = {.always = 1}};
}

}  // namespace gyre
