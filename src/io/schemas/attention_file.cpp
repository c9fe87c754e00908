#include "io/schemas/attention_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "comm/agree.hpp"
#include "io/schemas/token_results.hpp"

namespace gyre {
namespace {

struct AttentionParts {
  std::optional<h5::Dataset> offsets, query_offsets, q, k, k_shared, v, d_out, sinks, regions;
  std::optional<h5::Dataset> selected_keys;
  std::optional<h5::Dataset> out, lse, d_q, d_k, d_k_shared, d_v, d_sinks;
  int64_t own_dim = -1, shared_dim = -1;  // elements of k and k_shared; -1: not known
};

/// Rows of the arrays; -1: not known.
struct AttentionExtents {
  int64_t queries = -1, tokens = -1;
};

void open_reference(SchemaReader& reader, const h5::File& file, AttentionFile& a,
                    const AttentionExtents& rows, AttentionParts& parts) {
  const auto [queries, tokens] = rows;
  parts.out = reader.reals_if("/reference/out", {queries, a.heads, a.v_head_dim});
  parts.lse = reader.reals_if("/reference/lse", {queries, a.heads});
  parts.d_q = reader.reals_if("/reference/d_q", {queries, a.heads, a.head_dim});
  parts.d_k = reader.reals_if("/reference/d_k", {tokens, a.kv_heads, parts.own_dim});
  parts.d_k_shared = reader.reals_if("/reference/d_k_shared", {tokens, parts.shared_dim});
  parts.d_v = reader.reals_if("/reference/d_v", {tokens, a.kv_heads, a.v_head_dim});
  parts.d_sinks = reader.reals_if("/reference/d_sinks", {a.heads});
  for (const auto& [is_there, name] :
       {std::pair{parts.d_sinks.has_value(), "sinks"}, {parts.d_k_shared.has_value(), "k_shared"}})
    if (is_there && !reader.is_there(std::string("/attention/") + name))
      reader.errors().add("/reference/d_{} is there, and '/attention/{}', which it is of, is not",
                          name, name);
  a.reference->unknown = unknown_answers(file, attention_schema);
}

void check_attributes(SchemaReader& reader, AttentionFile& a) {
  ConfigErrors& errors = reader.errors();
  a.mask = reader.text("/attention", "mask");
  a.window = reader.integer("/attention", "window");
  a.scale = reader.real("/attention", "scale");
  const std::set<std::string> masks{"causal", "full", "regions", "selected"};
  const bool known = masks.contains(a.mask);
  if (!a.mask.empty() && !known)
    errors.add("mask of '/attention' is '{}'; it must be causal, full, regions or selected",
               a.mask);
  if (a.window < 0)
    errors.add("window of '/attention' is {}; it must be 0, none, or the number of keys", a.window);
  if (known && a.mask != "causal" && a.window > 0)
    errors.add("window of '/attention' is {}, but only a causal mask has one; it must be 0",
               a.window);
  // Scores are computed in f32.
  constexpr double least = std::numeric_limits<float>::min(),
                   most = std::numeric_limits<float>::max();
  if (!(a.scale >= least && a.scale <= most))
    errors.add(
        "scale of '/attention' is {}; it must be from {:.3g} to {:.3g}, as 1 / sqrt(head_dim)",
        a.scale, least, most);
}

/// Opens the dataset that the mask needs. A dataset of another mask is an error.
void open_mask(SchemaReader& reader, AttentionFile& a, int64_t queries, AttentionParts& parts) {
  const auto of_mask = [&](const char* mask, const std::string& dataset,
                           const h5::Shape& shape) -> std::optional<h5::Dataset> {
    if (a.mask == mask) return reader.integers(dataset, shape);
    if (reader.is_there(dataset))
      reader.errors().add("{} is there, but mask of '/attention' is '{}'", dataset, a.mask);
    return std::nullopt;
  };
  parts.regions = of_mask("regions", "/attention/regions", {-1, attention_region_columns});
  parts.selected_keys = of_mask("selected", "/attention/selected_keys", {queries, -1});
  if (parts.selected_keys) {
    a.selected = parts.selected_keys->shape()[1];
    if (a.selected < 1)
      reader.errors().add("/attention/selected_keys is {}; it needs a column",
                          h5::to_string(parts.selected_keys->shape()));
  }
}

AttentionParts open_attention(const h5::File& file, AttentionFile& a) {
  SchemaReader reader(file, attention_schema);
  check_attributes(reader, a);
  AttentionParts parts;
  parts.offsets = reader.integers("/attention/offsets", {-1});
  const bool fewer_queries = reader.is_there("/attention/query_offsets");
  if (fewer_queries) parts.query_offsets = reader.integers("/attention/query_offsets", {-1});
  parts.q = reader.reals("/attention/q", {-1, -1, -1});
  AttentionExtents rows;  // -1 matches any extent, here and in the heads below
  a.heads = a.kv_heads = a.head_dim = a.v_head_dim = -1;
  if (parts.q) {
    const h5::Shape& shape = parts.q->shape();
    rows.queries = shape[0], a.heads = shape[1], a.head_dim = shape[2];
    if (!fewer_queries) rows.tokens = rows.queries;
    if (a.heads < 1 || a.head_dim < 1)
      reader.errors().add("/attention/q is {}; it needs a head and an element of it",
                          h5::to_string(shape));
  }
  parts.k_shared = reader.reals_if("/attention/k_shared", {rows.tokens, -1});
  if (parts.k_shared) a.shared_key_dim = parts.k_shared->shape()[1];
  if (parts.q) parts.own_dim = a.head_dim - a.shared_key_dim;
  if (parts.k_shared) parts.shared_dim = a.shared_key_dim;
  if (parts.q && parts.k_shared && (a.shared_key_dim < 1 || parts.own_dim < 1)) {
    reader.errors().add(
        "/attention/k_shared has {} elements a token; heads of /attention/q have {}, of which 1 to "
        "{} can be shared",
        a.shared_key_dim, a.head_dim, a.head_dim - 1);
    parts.own_dim = -1;
  }
  parts.k = reader.reals("/attention/k", {rows.tokens, -1, parts.own_dim});
  if (parts.k) rows.tokens = parts.k->shape()[0], a.kv_heads = parts.k->shape()[1];
  if (parts.q && parts.k && (a.kv_heads < 1 || a.heads % a.kv_heads != 0))
    reader.errors().add(
        "/attention/q has {} heads and /attention/k has {}; "
        "the former must be a multiple of the latter",
        a.heads, a.kv_heads);
  parts.v = reader.reals("/attention/v", {rows.tokens, a.kv_heads, -1});
  if (parts.v) {
    a.v_head_dim = parts.v->shape()[2];
    if (a.v_head_dim < 1)
      reader.errors().add("/attention/v is {}; it needs an element of a head",
                          h5::to_string(parts.v->shape()));
  }
  parts.d_out = reader.reals("/attention/d_out", {rows.queries, a.heads, a.v_head_dim});
  parts.sinks = reader.reals_if("/attention/sinks", {a.heads});
  open_mask(reader, a, rows.queries, parts);
  if (file.has_group("/reference")) {
    a.reference.emplace();
    a.reference->generator = reader.text("/reference", "generator", "");
    open_reference(reader, file, a, rows, parts);
  }
  reader.throw_if_any();
  return parts;
}

/// Makes the checks of regions that need no document lengths; attention/mask makes the others.
void check_regions(ConfigErrors& errors, const AttentionFile& a) {
  const int64_t documents = std::ssize(a.offsets) - 1;
  for (size_t at = 0; at < a.regions.size(); at += attention_region_columns) {
    const size_t row = at / attention_region_columns;
    if (const int64_t document = a.regions[at]; document < 0 || document >= documents)
      errors.add("/attention/regions[{}] is of document {}; there are {}", row, document,
                 documents);
    if (const int64_t kind = a.regions[at + 5]; kind < 0 || kind > 3)
      errors.add(
          "/attention/regions[{}] is of kind {}; "
          "it must be 0, full, 1, causal, 2, inverse causal, or 3, both",
          row, kind);
  }
}

/// Returns what is wrong with a key that the query at `position` selects; "" if it is right.
/// last: the key in the column before; is_new: whether no column before has the same key.
std::string wrong_key(int64_t key, int64_t position, int64_t document, int64_t last, bool is_new) {
  if (key < -1 || key > position)
    return fmt::format(
        "it must be -1, no key, or the position of a key up to its query, which is at {} of "
        "document {}",
        position, document);
  if (key >= 0 && last == -1) return "keys must come before -1, no key";
  return is_new ? "" : "a query selects a key once";
}

/// Checks the keys that each query selects. Adds an error for the first wrong one alone.
void check_selected(ConfigErrors& errors, const AttentionFile& a) {
  size_t at = 0;
  for (int64_t d = 0; d + 1 < std::ssize(a.offsets); ++d) {
    const int64_t length = a.offsets[d + 1] - a.offsets[d];
    std::vector<int64_t> selected_by(length, -1);  // the last query that selects each key
    for (int64_t query = length - a.queries_of(d); query < length; ++query)
      for (int64_t c = 0, last = 0; c < a.selected; ++c, ++at) {
        const int64_t key = a.selected_keys[at];
        const bool is_new = key < 0 || key > query || selected_by[key] != query;
        const std::string wrong = wrong_key(key, query, d, last, is_new);
        if (!wrong.empty()) {
          errors.add("/attention/selected_keys[{}, {}] is {}; {}", at / a.selected, c, key, wrong);
          return;
        }
        if (key >= 0) selected_by[key] = query;
        last = key;
      }
  }
}

void check_query_offsets(ConfigErrors& errors, const AttentionFile& a) {
  const int64_t queries = std::ssize(a.q) / (a.heads * a.head_dim);
  check_offsets(errors, "/attention/query_offsets", a.query_offsets, queries,
                "the rows of /attention/q");
  if (a.query_offsets.empty() || a.offsets.empty()) return;
  if (a.query_offsets.size() != a.offsets.size()) {
    errors.add("/attention/query_offsets has {} elements; it must have {}, as /attention/offsets",
               a.query_offsets.size(), a.offsets.size());
    return;
  }
  if (queries == 0 && a.offsets.back() > 0)
    errors.add("/attention/query_offsets gives no document a query");
  for (size_t d = 0; d + 1 < a.offsets.size(); ++d)
    if (const int64_t tokens = a.offsets[d + 1] - a.offsets[d],
        of_document = a.query_offsets[d + 1] - a.query_offsets[d];
        of_document > tokens)
      errors.add("/attention/query_offsets gives document {} {} queries; it has {} tokens", d,
                 of_document, tokens);
}

void check_numbers(const h5::File& file, const AttentionFile& a,
                   const std::vector<float>& k_shared) {
  SchemaReader reader(file, attention_schema);
  ConfigErrors& errors = reader.errors();
  const int64_t tokens = std::ssize(a.v) / (a.kv_heads * a.v_head_dim);
  check_offsets(errors, "/attention/offsets", a.offsets, tokens, "the rows of /attention/k");
  if (reader.is_there("/attention/query_offsets")) check_query_offsets(errors, a);
  check_finite(errors, "/attention/q", a.q);
  check_finite(errors, "/attention/k", a.k);
  check_finite(errors, "/attention/k_shared", k_shared);
  check_finite(errors, "/attention/v", a.v);
  check_finite(errors, "/attention/d_out", a.d_out);
  check_finite(errors, "/attention/sinks", a.sinks);
  check_regions(errors, a);
  if (errors.empty()) check_selected(errors, a);  // relies on the checks of the offsets
  if (a.reference) {
    check_finite(errors, "/reference/out", a.reference->out);
    check_finite(errors, "/reference/lse", a.reference->lse, true);
    check_finite(errors, "/reference/d_q", a.reference->d_q);
    check_finite(errors, "/reference/d_k", a.reference->d_k);
    check_finite(errors, "/reference/d_k_shared", a.reference->d_k_shared);
    check_finite(errors, "/reference/d_v", a.reference->d_v);
    check_finite(errors, "/reference/d_sinks", a.reference->d_sinks);
  }
  reader.throw_if_any();
}

/// Keys whose heads each end with the shared elements of their token.
std::vector<float> with_shared(const AttentionFile& a, const std::vector<float>& shared) {
  const int64_t own = a.head_dim - a.shared_key_dim;
  std::vector<float> keys;
  keys.reserve(a.k.size() / own * a.head_dim);
  for (auto head = a.k.begin(); head != a.k.end(); head += own) {
    const auto token = std::distance(a.k.begin(), head) / (own * a.kv_heads);
    const auto of_token = shared.begin() + token * a.shared_key_dim;
    keys.insert(keys.end(), head, head + own);
    keys.insert(keys.end(), of_token, of_token + a.shared_key_dim);
  }
  return keys;
}

std::vector<TokenArray> result_arrays(const AttentionResultsHeader& header,
                                      const AttentionResultRows& mine) {
  const int64_t tokens = header.offsets.back();
  const int64_t queries = header.query_offsets.empty() ? tokens : header.query_offsets.back();
  const int64_t heads = header.heads, kv_heads = header.kv_heads;
  std::vector<TokenArray> arrays;
  const auto add = [&](const char* path, const std::vector<int64_t>& held, h5::Shape shape,
                       const MatrixView<const float>& rows) {
    arrays.push_back({path, std::move(shape), rows, &held});
  };
  add("/results/out", mine.queries, {queries, heads, header.v_head_dim}, mine.out);
  add("/results/lse", mine.queries, {queries, heads}, mine.lse);
  if (header.gradients) {
    add("/results/d_q", mine.queries, {queries, heads, header.head_dim}, mine.d_q);
    const int64_t shared = header.shared_key_dim;
    add("/results/d_k", mine.tokens, {tokens, kv_heads, header.head_dim - shared}, mine.d_k);
    if (shared > 0) add("/results/d_k_shared", mine.tokens, {tokens, shared}, mine.d_k_shared);
    add("/results/d_v", mine.tokens, {tokens, kv_heads, header.v_head_dim}, mine.d_v);
  }
  return arrays;
}

}  // namespace

int64_t AttentionFile::queries_of(int64_t document) const {
  const std::vector<int64_t>& bounds = query_offsets.empty() ? offsets : query_offsets;
  return bounds[document + 1] - bounds[document];
}

int64_t AttentionFile::query_row(int64_t token) const {
  if (query_offsets.empty()) return token;
  const auto document = std::ranges::upper_bound(offsets, token) - offsets.begin();
  return query_offsets[document] - (offsets[document] - token);
}

AttentionFile read_attention_file(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, attention_schema);
  AttentionFile a;
  AttentionParts parts;
  run_agreed(comm, "opening the attention of " + path, [&] { parts = open_attention(file, a); });
  a.offsets = parts.offsets->read_all<int64_t>();
  if (parts.query_offsets) a.query_offsets = parts.query_offsets->read_all<int64_t>();
  a.q = read_floats(*parts.q, a.rounded);
  a.k = read_floats(*parts.k, a.rounded);
  std::vector<float> shared;
  if (parts.k_shared) shared = read_floats(*parts.k_shared, a.rounded);
  a.v = read_floats(*parts.v, a.rounded);
  a.d_out = read_floats(*parts.d_out, a.rounded);
  if (parts.regions) a.regions = parts.regions->read_all<int64_t>();
  if (parts.selected_keys) a.selected_keys = parts.selected_keys->read_all<int64_t>();
  if (parts.sinks) a.sinks = read_floats(*parts.sinks, a.rounded);
  const auto read = [](const std::optional<h5::Dataset>& dataset) {
    return dataset ? dataset->read_all<double>() : std::vector<double>();
  };
  if (a.reference)
    a.reference = {.generator = a.reference->generator,
                   .unknown = a.reference->unknown,
                   .out = read(parts.out),
                   .lse = read(parts.lse),
                   .d_q = read(parts.d_q),
                   .d_k = read(parts.d_k),
                   .d_v = read(parts.d_v),
                   .d_k_shared = read(parts.d_k_shared),
                   .d_sinks = read(parts.d_sinks)};
  run_agreed(comm, "checking the attention of " + path, [&] { check_numbers(file, a, shared); });
  if (parts.k_shared) a.k = with_shared(a, shared);
  return a;
}

void write_attention_results(OutputFile& output, const AttentionResultsHeader& header,
                             const AttentionResultRows& mine) {
  write_token_results(
      output, {attention_results_schema, header.offsets, header.input_sha256, header.provenance},
      result_arrays(header, mine), [&](h5::File& file) {
        if (!header.query_offsets.empty())
          file.write_dataset("/results/query_offsets",
                             std::span<const int64_t>(header.query_offsets));
        if (!header.d_sinks.empty())
          file.write_dataset("/results/d_sinks", std::span<const double>(header.d_sinks));
      });
}

}  // namespace gyre
