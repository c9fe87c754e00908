#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "apps/attention/options.hpp"
#include "apps/attention/setup.hpp"
#include "core/error.hpp"
#include "core/token_random.hpp"
#include "io/schemas/attention_file.hpp"

namespace gyre {
namespace {

TokenTensor token_tensor(InputTensor tensor) {
  switch (tensor) {
    case InputTensor::q:
      return TokenTensor::q;
    case InputTensor::k:
      return TokenTensor::k;
    case InputTensor::v:
      return TokenTensor::v;
    case InputTensor::d_out:
      break;
  }
  return TokenTensor::d_out;
}

class RandomRows final : public TensorRows {
 public:
  RandomRows(const AttentionWorkload& workload, uint64_t seed)
      : heads_(workload.heads), seed_(seed), round_(workload.type == DType::bf16) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    fill_token_row({seed_, token_tensor(tensor), round_}, token, to);
    if (tensor == InputTensor::k) share_keys(heads_, to);
  }

 private:
  HeadShape heads_;
  uint64_t seed_;
  bool round_;
};

class FileRows final : public TensorRows {
 public:
  FileRows(const AttentionFile& file, DType type) : file_(file), round_(type == DType::bf16) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    const std::vector<float>& all = tensor == InputTensor::q   ? file_.q
                                    : tensor == InputTensor::k ? file_.k
                                    : tensor == InputTensor::v ? file_.v
                                                               : file_.d_out;
    const auto width = std::ssize(to);
    const bool keys = tensor == InputTensor::k || tensor == InputTensor::v;
    const int64_t row = keys ? token : file_.query_row(token);
    std::copy_n(all.begin() + row * width, width, to.begin());
    if (!round_) return;
    for (float& value : to) value = to_float(to_bf16(value));
  }

 private:
  const AttentionFile& file_;
  bool round_;
};

/// The reason why results, or gradients, are not compared with the file's answers; "": they are.
std::string why_not_compared(const AttentionOptions& o, bool gradient) {
  if (o.check == "none") return "--check none";
  // An output file holds gradients, so they are computed and checked for it.
  const bool backward = o.passes().back() == Pass::backward || !o.output.empty();
  return gradient && !backward ? "--pass fwd" : "";
}

/// Datasets that the run rounds, here or in the reader of the file.
std::set<std::string> rounded_inputs(const AttentionFile& file, DType type) {
  const std::map<std::string, const std::vector<float>*> inputs{
      {"q", &file.q}, {"k", &file.k}, {"v", &file.v}, {"d_out", &file.d_out}};
  std::set<std::string> rounded = file.rounded;
  const auto differs = [](float value) { return to_float(to_bf16(value)) != value; };
  for (const auto& [name, values] : inputs)
    if (type == DType::bf16 && std::ranges::any_of(*values, differs))
      rounded.insert("/attention/" + name);
  return rounded;
}

}  // namespace

std::unique_ptr<TensorRows> random_rows(const AttentionWorkload& workload, uint64_t seed) {
  return std::make_unique<RandomRows>(workload, seed);
}

std::vector<float> random_sinks(int64_t heads, uint64_t seed) {
  std::vector<float> sinks(heads);
  fill_token_row({seed, TokenTensor::sinks, false}, 0, sinks);
  return sinks;
}

std::unique_ptr<TensorRows> rows_of(const AttentionFile& file, DType type) {
  return std::make_unique<FileRows>(file, type);
}

std::vector<AnswerUse> keep_answers(AttentionFile& file, const AttentionOptions& o) {
  if (!file.reference) return {};
  AttentionReference& reference = *file.reference;
  struct Answers {
    const char* name;
    std::vector<double>& values;
    std::vector<std::string> reads;
    bool gradient = true;
  };
  const std::vector<std::string> every_input{"q", "k", "k_shared", "v", "d_out", "sinks"};
  const std::vector<Answers> all{
      {"out", reference.out, {"q", "k", "k_shared", "v", "sinks"}, false},
      {"lse", reference.lse, {"q", "k", "k_shared", "sinks"}, false},
      {"d_q", reference.d_q, every_input},
      {"d_k", reference.d_k, every_input},
      {"d_k_shared", reference.d_k_shared, every_input},
      {"d_v", reference.d_v, {"q", "k", "k_shared", "d_out", "sinks"}},
      {"d_sinks", reference.d_sinks, every_input}};
  const std::set<std::string> rounded = rounded_inputs(file, o.types().activations);
  std::vector<AnswerUse> uses;
  for (const Answers& answers : all) {
    if (answers.values.empty()) continue;
    AnswerUse& use =
        uses.emplace_back(AnswerUse{answers.name, why_not_compared(o, answers.gradient), false});
    for (const std::string& input : answers.reads)
      if (use.why_not.empty() && rounded.contains("/attention/" + input)) {
        use = {answers.name, fmt::format("the run rounds /attention/{}", input)};
        answers.values.clear();
      }
  }
  for (const std::string& name : reference.unknown) uses.push_back({name, "not known"});
  return uses;
}

void check_products(const AttentionFile& file, bool with_gradients) {
  // |<a, b>| <= |a| |b|; the norms are those of the heads of all tokens.
  const auto norm = [](const std::vector<float>& values, int64_t dim) {
    double largest = 0;
    for (auto head = values.begin(); head != values.end(); head += dim) {
      double square = 0;
      for (const double x : std::span(head, head + dim)) square += x * x;
      largest = std::max(largest, square);
    }
    return std::sqrt(largest);
  };
  const double q = norm(file.q, file.head_dim), k = norm(file.k, file.head_dim);
  const double v = norm(file.v, file.v_head_dim), d_out = norm(file.d_out, file.v_head_dim);
  const double tokens = file.tokens(), queries = tokens * (file.heads / file.kv_heads);
  const double d_score = 2 * d_out * v * std::max(1.0, file.scale);
  struct Product {
    const char *arrays, *what;
    double size;
  };
  std::vector<Product> products{{"q and k", "scores", q * k * std::max(1.0, file.scale)},
                                {"v", "sums over all keys", tokens * v}};
  if (with_gradients)
    products.insert(products.end(), {{"d_out and v", "gradients of scores", d_score},
                                     {"d_out, v and k", "gradients of queries", d_score * k},
                                     {"d_out, v and q", "gradients of keys", d_score * q * queries},
                                     {"d_out", "gradients of values", d_out * queries}});
  constexpr double most = std::numeric_limits<float>::max() / 2;
  for (const Product& product : products)
    if (product.size > most)
      throw_usage("{} of /attention have elements that make {} of up to {:.3g}; at most {:.3g}",
                  product.arrays, product.what, product.size, most);
}

double sampled_score_size(const AttentionWorkload& workload, const TensorRows& inputs) {
  constexpr int64_t most = 32;
  const auto stride = [](int64_t count, int64_t some) {
    return std::max<int64_t>(1, ceil_div(count, some));
  };
  std::vector<float> q(workload.width(InputTensor::q));
  std::vector<float> k(workload.width(InputTensor::k));
  const size_t dim = workload.heads.head_dim;
  const size_t group = workload.heads.group();
  double largest = 1;
  const auto sample = [&](int64_t first, const Region& region, int64_t rows) {
    std::vector<double> squares(workload.heads.heads, 0.0);
    int64_t pairs = 0;
    for (int64_t i = region.q_end - 1; i >= region.q_begin;
         i -= stride(region.q_end - region.q_begin, rows)) {
      const Region::Keys keys = region.keys_of(i);
      inputs.row(InputTensor::q, first + i, q);
      // The pair of a token with itself is mostly visible, and often has the largest score.
      for (int64_t j = keys.last; j >= keys.first; j -= stride(keys.count(), rows), ++pairs) {
        inputs.row(InputTensor::k, first + j, k);
        for (size_t h = 0; h < squares.size(); ++h) {
          double score = 0;
          for (size_t e = 0; e < dim; ++e)
            score +=
                static_cast<double>(q[h * dim + e]) * static_cast<double>(k[h / group * dim + e]);
          score *= workload.heads.scale;
          squares[h] += score * score;
        }
      }
    }
    for (const double sum : squares)
      if (pairs > 0) largest = std::max(largest, std::sqrt(sum / pairs));
  };
  for (int64_t d = 0; d < workload.documents(); d += stride(workload.documents(), most)) {
    const DocumentMask mask(workload.mask, d, workload.length(d));
    const auto regions = mask.regions().all;
    const auto count = std::ssize(regions);
    const int64_t rows = most / std::sqrt(std::clamp<double>(count, 1, most));
    for (int64_t r = 0; r < count; r += stride(count, most))
      sample(workload.offsets[d], regions[r], rows);
  }
  return largest;
}

std::vector<TokenRow> token_rows(const AttentionWorkload& workload, const Shard& shard) {
  std::vector<TokenRow> rows;
  for (const Fragment& f : shard.fragments) {
    const int64_t document = f.segment;
    const int64_t first = workload.offsets[document] + f.start.value();
    for (int64_t i = 0; i < f.length; ++i)
      rows.push_back({first + i * f.stride, f.local_begin.value() + i, document});
  }
  return rows;
}

void fill_rows(const AttentionWorkload& workload, const TensorRows& inputs, InputTensor tensor,
               const Shard& shard, MatrixRef to) {
  std::vector<float> row(to.cols, std::numeric_limits<float>::quiet_NaN());
  const auto put = [&](int64_t at) {
    for (int64_t c = 0; c < to.cols; ++c) {
      if (to.type == DType::f32)
        to.as<float>()(at, c) = row[c];
      else
        to.as<bf16>()(at, c) = to_bf16(row[c]);
    }
  };
  for (int64_t at = 0; at < to.rows; ++at) put(at);
  for (const TokenRow& own : token_rows(workload, shard)) {
    inputs.row(tensor, own.token, row);
    put(own.row);
  }
}

}  // namespace gyre
