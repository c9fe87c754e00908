#include "attention/attention_reference.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/dot.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

template <class T>
double square(const T* a, int64_t n) {
  return dot(a, a, n);
}

/// Keys visible to the query at `position` of a document.
std::vector<int64_t> visible_keys(int64_t position, const DocumentRange& document,
                                  const MaskRule& mask) {
  std::vector<int64_t> keys;
  const DocumentMask of_document(mask, document.index, document.length());
  for (const Region& r : of_document.regions_of(position)) {
    if (position >= r.q_end) continue;
    const Region::Keys seen = r.keys_of(position);
    for (int64_t key = seen.first; key <= seen.last; ++key) keys.push_back(key);
  }
  return keys;
}

/// log(exp a + exp b); either may be -inf.
double log_add(double a, double b) {
  const double top = std::max(a, b), bottom = std::min(a, b);
  return bottom == -infinity_of<double> ? top : top + std::log1p(std::exp(bottom - top));
}

size_t at(int64_t i) {
  return i;
}

void check_heads(const HeadShape& heads, const MaskRule& mask) {
  if (heads.heads < 1 || heads.kv_heads < 1 || heads.heads % heads.kv_heads != 0)
    throw_usage("{} query heads for {} KV heads; wanted: a multiple of the KV heads", heads.heads,
                heads.kv_heads);
  if (heads.head_dim < 1) throw_usage("head_dim {}; wanted: 1 or more", heads.head_dim);
  if (heads.value_dim() < 1) throw_usage("v_head_dim {}; wanted: 1 or more", heads.v_head_dim);
  if (heads.shared_key_dim < 0 || heads.own_key_dim() < 1)
    throw_usage("shared_key_dim {}; wanted: 0 to {}", heads.shared_key_dim, heads.head_dim - 1);
  check_mask(mask);
}

template <class T>
void check_length(const char* name, std::span<const T> tensor, int64_t expected) {
  if (std::ssize(tensor) != expected)
    throw_usage("{} has {} elements, not {}", name, tensor.size(), expected);
}

template <class T>
void check_inputs(const AttentionInputs<T>& in) {
  check_heads(in.heads, in.mask);
  const auto& documents = in.documents;
  if (documents.empty() || documents[0] != 0)
    throw_usage("document boundaries begin with {}, not 0",
                documents.empty() ? "nothing" : std::to_string(documents[0]));
  for (size_t i = 1; i < documents.size(); ++i)
    if (documents[i] < documents[i - 1])
      throw_usage("document {} ends at token {}, before its begin at {}", i - 1, documents[i],
                  documents[i - 1]);
  const int64_t q_rows = documents.back() * in.heads.heads;
  const int64_t kv_rows = documents.back() * in.heads.kv_heads;
  check_length("q", in.q, q_rows * in.heads.head_dim);
  check_length("k", in.k, kv_rows * in.heads.head_dim);
  check_length("v", in.v, kv_rows * in.heads.value_dim());
  if (!in.d_out.empty()) check_length("d_out", in.d_out, q_rows * in.heads.value_dim());
  if (!in.sinks.empty()) check_length("sinks", in.sinks, in.heads.heads);
}

/// Sums the gradients of shared elements over the KV heads into the first one; the others become 0.
/// d_k [rows, kv_heads, head_dim], sizes [rows, kv_heads]. Returns the sizes of the sums: [rows].
std::vector<double> sum_shared_keys(const HeadShape& shape, std::vector<double>& d_k,
                                    const std::vector<double>& sizes) {
  std::vector<double> summed;
  if (shape.shared_key_dim == 0) return summed;
  const int64_t heads = shape.kv_heads, dim = shape.head_dim;
  for (int64_t row = 0; row < std::ssize(sizes) / heads; ++row) {
    for (int64_t i = shape.own_key_dim(); i < dim; ++i)
      for (int64_t head = 1; head < heads; ++head) {
        double& other = d_k[at((row * heads + head) * dim + i)];
        d_k[at(row * heads * dim + i)] += std::exchange(other, 0);
      }
    summed.push_back(std::sqrt(square(&sizes[at(row * heads)], heads)));
  }
  return summed;
}

/// Computes all results query by query and pair by pair.
template <class T>
class FullReference {
 public:
  explicit FullReference(const AttentionInputs<T>& in)
      : in_(in),
        heads_(in.heads.heads),
        kv_heads_(in.heads.kv_heads),
        dim_(in.heads.head_dim),
        value_dim_(in.heads.value_dim()) {}

  AttentionResults run() {
    const int64_t tokens = in_.documents.back();
    r_.out.resize(at(tokens * heads_ * value_dim_));
    r_.lse.resize(at(tokens * heads_));
    r_.out_size.resize(at(tokens * heads_));
    if (!in_.d_out.empty()) {
      r_.delta.resize(at(tokens * heads_));
      r_.d_q.resize(in_.q.size());
      r_.d_q_size.resize(at(tokens * heads_));
      r_.d_k.resize(in_.k.size());
      r_.d_v.resize(in_.v.size());
      for (auto* size : {&r_.d_k_size, &r_.d_v_size}) size->resize(at(tokens * kv_heads_));
      for (auto* sinks : {&r_.d_sinks, &r_.d_sinks_size}) sinks->resize(in_.sinks.size());
    }
    for (size_t d = 0; d + 1 < in_.documents.size(); ++d)
      for (int64_t token = in_.documents[d]; token < in_.documents[d + 1]; ++token)
        for (int64_t head = 0; head < heads_; ++head)
          row({in_.documents[d], in_.documents[d + 1], static_cast<int64_t>(d)}, token, head);
    for (auto* size : {&r_.d_q_size, &r_.d_k_size})
      for (double& x : *size) x = std::sqrt(x / dim_);
    for (auto* size : {&r_.out_size, &r_.d_v_size, &r_.d_sinks_size})
      for (double& x : *size) x = std::sqrt(x / value_dim_);
    r_.d_k_shared_size = sum_shared_keys(in_.heads, r_.d_k, r_.d_k_size);
    return std::move(r_);
  }

 private:
  /// Computes the results of one query and head, with sums of squares in place of sizes.
  void row(const DocumentRange& document, int64_t token, int64_t head) {
    const std::vector<int64_t> keys = visible_keys(token - document.begin, document, in_.mask);
    const int64_t kv_head = head / in_.heads.group();
    const T* const q = &in_.q[at((token * heads_ + head) * dim_)];
    const auto kv_row = [&](int64_t key) { return (document.begin + key) * kv_heads_ + kv_head; };
    std::vector<double> p;
    double lse = -infinity_of<double>;
    for (const int64_t j : keys) {
      p.push_back(scale() * dot(q, &in_.k[at(kv_row(j) * dim_)], dim_));
      lse = log_add(lse, p.back());
    }
    if (!in_.sinks.empty()) lse = log_add(lse, in_.sinks[at(head)]);
    double* const out = &r_.out[at((token * heads_ + head) * value_dim_)];
    double& out_size = r_.out_size[at(token * heads_ + head)];
    for (size_t i = 0; i < keys.size(); ++i) {
      double& x = p[i];
      x = std::exp(x - lse);
      const T* const v = &in_.v[at(kv_row(keys[i]) * value_dim_)];
      add_scaled(out, x, v, value_dim_);
      out_size += x * x * square(v, value_dim_);
    }
    r_.lse[at(token * heads_ + head)] = lse;
    if (in_.d_out.empty()) return;
    for (size_t i = 0; i < keys.size(); ++i) pair(token, head, kv_row(keys[i]), p[i]);
    sink(token, head, lse);
  }

  /// Adds the terms of one query, head and key, row `kv` of the heads of keys, to the gradients.
  void pair(int64_t token, int64_t head, int64_t kv, double p) {
    const int64_t row = token * heads_ + head;
    const T* const q = &in_.q[at(row * dim_)];
    const T* const d_out = &in_.d_out[at(row * value_dim_)];
    const T* const k = &in_.k[at(kv * dim_)];
    const T* const v = &in_.v[at(kv * value_dim_)];
    const double delta = dot(&r_.out[at(row * value_dim_)], d_out, value_dim_);
    const double ds = scale() * p * (dot(d_out, v, value_dim_) - delta);
    add_scaled(&r_.d_q[at(row * dim_)], ds, k, dim_);
    add_scaled(&r_.d_k[at(kv * dim_)], ds, q, dim_);
    add_scaled(&r_.d_v[at(kv * value_dim_)], p, d_out, value_dim_);
    const double d_out2 = square(d_out, value_dim_);
    const double term = scale() * scale() * p * p * d_out2 * square(v, value_dim_) / value_dim_;
    r_.d_q_size[at(row)] += term * square(k, dim_);
    r_.d_k_size[at(kv)] += term * square(q, dim_);
    r_.d_v_size[at(kv)] += p * p * d_out2;
  }

  void sink(int64_t token, int64_t head, double lse) {
    const int64_t row = token * heads_ + head;
    const double* const out = &r_.out[at(row * value_dim_)];
    const T* const d_out = &in_.d_out[at(row * value_dim_)];
    const double delta = dot(out, d_out, value_dim_);
    r_.delta[at(row)] = delta;
    if (in_.sinks.empty()) return;
    const double p = std::exp(in_.sinks[at(head)] - lse);
    r_.d_sinks[at(head)] -= p * delta;
    r_.d_sinks_size[at(head)] += p * p * square(out, value_dim_) * square(d_out, value_dim_);
  }

  double scale() const { return in_.heads.scale; }

  const AttentionInputs<T>& in_;
  int64_t heads_, kv_heads_, dim_, value_dim_;
  AttentionResults r_;
};

void check_tokens(const DocumentRange& document, std::span<const int64_t> tokens) {
  for (const int64_t token : tokens)
    if (token < document.begin || token >= document.end)
      throw_usage("token {} is not in the document of tokens [{}, {})", token, document.begin,
                  document.end);
}

/// Running sums of a query and head over its keys. With m the largest score so far, w = exp(x-m):
///   sum = Σ w   out = Σ w v   with_dp = Σ w <dO, v> k   with_one = Σ w k
/// Then dq = scale · (with_dp - delta · with_one) / sum needs no second pass over the keys.
struct OnlineRow {
  double max = -infinity_of<double>, sum = 0, out_size = 0, d_q_size = 0;
  std::vector<double> out, with_dp, with_one;

  /// Returns the factor of a new term with score x; if x exceeds `max`, rescales the earlier terms.
  double weight(double x) {
    if (x > max) {
      const double factor = std::exp(max - x);
      for (std::vector<double>* values : {&out, &with_dp, &with_one})
        for (double& y : *values) y *= factor;
      sum *= factor;
      out_size *= factor * factor;
      d_q_size *= factor * factor;
      max = x;
    }
    return std::exp(x - max);
  }
};

/// A requested query: its rows and the running sums of each head.
struct SampledQuery {
  int64_t position = 0;
  std::vector<double> q, d_out;  ///< all heads
  std::vector<OnlineRow> heads;
};

class QuerySampler {
 public:
  QuerySampler(const AttentionRows& rows, const DocumentRange& document,
               std::span<const int64_t> tokens)
      : rows_(rows),
        heads_(rows.heads.heads),
        dim_(rows.heads.head_dim),
        value_dim_(rows.heads.value_dim()) {
    for (const int64_t token : tokens) {
      SampledQuery query;
      query.position = token - document.begin;
      const float* const q = rows.q(token);
      query.q.assign(q, q + heads_ * dim_);
      if (backward()) {
        const float* const d_out = rows.d_out(token);
        query.d_out.assign(d_out, d_out + heads_ * value_dim_);
      }
      query.heads.resize(at(heads_));
      for (OnlineRow& row : query.heads) {
        row.out.resize(at(value_dim_));
        row.with_dp.resize(at(backward() ? dim_ : 0));
        row.with_one = row.with_dp;
      }
      queries_.push_back(std::move(query));
    }
  }

  void visit(const DocumentRange& document, int64_t key) {
    const float *k = nullptr, *v = nullptr;
    const DocumentMask mask(rows_.mask, document.index, document.length());
    for (SampledQuery& query : queries_) {
      if (!mask.sees(query.position, key)) continue;
      if (k == nullptr) {
        k = rows_.k(document.begin + key);
        v = rows_.v(document.begin + key);
      }
      for (int64_t head = 0; head < heads_; ++head) {
        const int64_t kv_head = head / rows_.heads.group();
        add(query, head, k + kv_head * dim_, v + kv_head * value_dim_);
      }
    }
  }

  QueryResults take() {
    QueryResults results;
    for (SampledQuery& query : queries_)
      for (int64_t head = 0; head < heads_; ++head) finish(query, head, results);
    return results;
  }

 private:
  bool backward() const { return static_cast<bool>(rows_.d_out); }
  double scale() const { return rows_.heads.scale; }

  void add(SampledQuery& query, int64_t head, const float* k, const float* v) {
    OnlineRow& row = query.heads[at(head)];
    const double w = row.weight(scale() * dot(&query.q[at(head * dim_)], k, dim_));
    const double v2 = square(v, value_dim_);
    row.sum += w;
    add_scaled(row.out.data(), w, v, value_dim_);
    row.out_size += w * w * v2;
    if (!backward()) return;
    const double dp = dot(&query.d_out[at(head * value_dim_)], v, value_dim_);
    add_scaled(row.with_dp.data(), w * dp, k, dim_);
    add_scaled(row.with_one.data(), w, k, dim_);
    row.d_q_size += w * w * v2 * square(k, dim_);
  }

  void finish(SampledQuery& query, int64_t head, QueryResults& results) {
    OnlineRow& row = query.heads[at(head)];
    double lse = row.sum > 0 ? row.max + std::log(row.sum) : -infinity_of<double>;
    if (!rows_.sinks.empty()) lse = log_add(lse, rows_.sinks[at(head)]);
    // exp(x - lse) = w · factor
    const double factor = row.sum > 0 ? std::exp(row.max - lse) : 0;
    for (double& x : row.out) x *= factor;
    results.out.insert(results.out.end(), row.out.begin(), row.out.end());
    results.lse.push_back(lse);
    results.out_size.push_back(factor * std::sqrt(row.out_size / value_dim_));
    if (!backward()) return;
    const double* const d_out = &query.d_out[at(head * value_dim_)];
    const double delta = dot(row.out.data(), d_out, value_dim_);
    results.delta.push_back(delta);
    for (size_t d = 0; d < row.with_dp.size(); ++d)
      results.d_q.push_back(scale() * factor * (row.with_dp[d] - delta * row.with_one[d]));
    results.d_q_size.push_back(
        scale() * factor *
        std::sqrt(row.d_q_size * square(d_out, value_dim_) / (1.0 * dim_ * value_dim_)));
  }

  const AttentionRows& rows_;
  int64_t heads_, dim_, value_dim_;
  std::vector<SampledQuery> queries_;
};

/// Gradients of the requested keys, summed over queries; sizes are sums of squares until take().
class KeySampler {
 public:
  KeySampler(const AttentionRows& rows, const DocumentRange& document,
             std::span<const int64_t> tokens)
      : rows_(rows), document_(document), tokens_(tokens) {
    for (const int64_t token : tokens) {
      const float *k = rows.k(token), *v = rows.v(token);
      k_.insert(k_.end(), k, k + kv_heads() * dim());
      v_.insert(v_.end(), v, v + kv_heads() * value_dim());
    }
    r_.d_k.resize(k_.size());
    r_.d_v.resize(v_.size());
    r_.d_k_size.resize(tokens.size() * at(kv_heads()));
    r_.d_v_size = r_.d_k_size;
  }

  /// Adds the terms of the query at `position`, with lse and delta [heads].
  void visit(int64_t position, const double* lse, const double* delta) {
    const DocumentMask mask(rows_.mask, document_.index, document_.length());
    const float *q = nullptr, *d_out = nullptr;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const int64_t key = tokens_[i] - document_.begin;
      if (!mask.sees(position, key)) continue;
      if (q == nullptr) {
        q = rows_.q(document_.begin + position);
        d_out = rows_.d_out(document_.begin + position);
      }
      for (int64_t head = 0; head < rows_.heads.heads; ++head)
        add(i, head, q + head * dim(), d_out + head * value_dim(), lse[head], delta[head]);
    }
  }

  KeyResults take() {
    for (double& x : r_.d_k_size) x = std::sqrt(x / dim());
    for (double& x : r_.d_v_size) x = std::sqrt(x / value_dim());
    r_.d_k_shared_size = sum_shared_keys(rows_.heads, r_.d_k, r_.d_k_size);
    return std::move(r_);
  }

 private:
  int64_t kv_heads() const { return rows_.heads.kv_heads; }
  int64_t dim() const { return rows_.heads.head_dim; }
  int64_t value_dim() const { return rows_.heads.value_dim(); }

  void add(int64_t i, int64_t head, const float* q, const float* d_out, double lse, double delta) {
    const double scale = rows_.heads.scale;
    const int64_t kv_row = i * kv_heads() + head / rows_.heads.group();
    const double* const k = &k_[at(kv_row * dim())];
    const double* const v = &v_[at(kv_row * value_dim())];
    const double p = std::exp(scale * dot(q, k, dim()) - lse);
    const double ds = scale * p * (dot(d_out, v, value_dim()) - delta);
    add_scaled(&r_.d_k[at(kv_row * dim())], ds, q, dim());
    add_scaled(&r_.d_v[at(kv_row * value_dim())], p, d_out, value_dim());
    const double d_out2 = square(d_out, value_dim());
    r_.d_k_size[at(kv_row)] +=
        scale * scale * p * p * d_out2 * square(v, value_dim()) * square(q, dim()) / value_dim();
    r_.d_v_size[at(kv_row)] += p * p * d_out2;
  }

  const AttentionRows& rows_;
  DocumentRange document_;
  std::span<const int64_t> tokens_;
  std::vector<double> k_, v_;  // of the requested keys
  KeyResults r_;
};

}  // namespace

template <class T>
AttentionResults attention_reference(const AttentionInputs<T>& inputs) {
  check_inputs(inputs);
  return FullReference<T>(inputs).run();
}
template AttentionResults attention_reference(const AttentionInputs<float>&);
template AttentionResults attention_reference(const AttentionInputs<double>&);

QueryResults reference_queries(const AttentionRows& rows, const DocumentRange& document,
                               std::span<const int64_t> tokens) {
  check_heads(rows.heads, rows.mask);
  check_tokens(document, tokens);
  QuerySampler sampler(rows, document, tokens);
  for (int64_t key = 0; key < document.length(); ++key) sampler.visit(document, key);
  return sampler.take();
}

KeyResults reference_keys(const AttentionRows& rows, const DocumentRange& document,
                          std::span<const int64_t> tokens, std::span<const double> lse,
                          std::span<const double> delta) {
  check_heads(rows.heads, rows.mask);
  check_tokens(document, tokens);
  if (!rows.d_out) throw_usage("gradients of keys need d_out");
  check_length("lse", lse, document.length() * rows.heads.heads);
  check_length("delta", delta, document.length() * rows.heads.heads);
  KeySampler sampler(rows, document, tokens);
  for (int64_t i = 0; i < document.length(); ++i)
    sampler.visit(i, &lse[at(i * rows.heads.heads)], &delta[at(i * rows.heads.heads)]);
  return sampler.take();
}

}  // namespace gyre
