#include "io/schemas/attention_file.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "comm/agree.hpp"

namespace gyre {
namespace {

struct AttentionParts {
  std::optional<h5::Dataset> offsets, q, k, k_shared, v, d_out, sinks, regions;
  std::optional<h5::Dataset> out, lse, d_q, d_k, d_k_shared, d_v, d_sinks;
  int64_t own_dim = -1, shared_dim = -1;  // elements of k and k_shared; -1: not known
};

void open_reference(SchemaReader& reader, const h5::File& file, AttentionFile& a, int64_t tokens,
                    AttentionParts& parts) {
  parts.out = reader.reals_if("/reference/out", {tokens, a.heads, a.v_head_dim});
  parts.lse = reader.reals_if("/reference/lse", {tokens, a.heads});
  parts.d_q = reader.reals_if("/reference/d_q", {tokens, a.heads, a.head_dim});
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
  if (!a.mask.empty() && a.mask != "causal" && a.mask != "full" && a.mask != "regions")
    errors.add("mask of '/attention' is '{}'; it must be causal, full or regions", a.mask);
  if (a.window < 0)
    errors.add("window of '/attention' is {}; it must be 0, none, or the number of keys", a.window);
  if ((a.mask == "full" || a.mask == "regions") && a.window > 0)
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

AttentionParts open_attention(const h5::File& file, AttentionFile& a) {
  SchemaReader reader(file, attention_schema);
  check_attributes(reader, a);
  AttentionParts parts;
  parts.offsets = reader.integers("/attention/offsets", {-1});
  parts.q = reader.reals("/attention/q", {-1, -1, -1});
  int64_t tokens = -1;  // -1 matches any extent, here and in the heads below
  a.heads = a.kv_heads = a.head_dim = a.v_head_dim = -1;
  if (parts.q) {
    const h5::Shape& shape = parts.q->shape();
    tokens = shape[0], a.heads = shape[1], a.head_dim = shape[2];
    if (a.heads < 1 || a.head_dim < 1)
      reader.errors().add("/attention/q is {}; it needs a head and an element of it",
                          h5::to_string(shape));
  }
  parts.k_shared = reader.reals_if("/attention/k_shared", {tokens, -1});
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
  parts.k = reader.reals("/attention/k", {tokens, -1, parts.own_dim});
  if (parts.k) a.kv_heads = parts.k->shape()[1];
  if (parts.q && parts.k && (a.kv_heads < 1 || a.heads % a.kv_heads != 0))
    reader.errors().add(
        "/attention/q has {} heads and /attention/k has {}; "
        "the former must be a multiple of the latter",
        a.heads, a.kv_heads);
  parts.v = reader.reals("/attention/v", {tokens, a.kv_heads, -1});
  if (parts.v) {
    a.v_head_dim = parts.v->shape()[2];
    if (a.v_head_dim < 1)
      reader.errors().add("/attention/v is {}; it needs an element of a head",
                          h5::to_string(parts.v->shape()));
  }
  parts.d_out = reader.reals("/attention/d_out", {tokens, a.heads, a.v_head_dim});
  parts.sinks = reader.reals_if("/attention/sinks", {a.heads});
  if (a.mask == "regions")
    parts.regions = reader.integers("/attention/regions", {-1, attention_region_columns});
  else if (reader.is_there("/attention/regions"))
    reader.errors().add("/attention/regions is there, but mask of '/attention' is '{}'", a.mask);
  if (file.has_group("/reference")) {
    a.reference.emplace();
    a.reference->generator = reader.text("/reference", "generator", "");
    open_reference(reader, file, a, tokens, parts);
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

void check_numbers(const h5::File& file, const AttentionFile& a,
                   const std::vector<float>& k_shared) {
  SchemaReader reader(file, attention_schema);
  ConfigErrors& errors = reader.errors();
  const int64_t tokens = std::ssize(a.q) / (a.heads * a.head_dim);
  check_offsets(errors, "/attention/offsets", a.offsets, tokens, "the rows of /attention/q");
  check_finite(errors, "/attention/q", a.q);
  check_finite(errors, "/attention/k", a.k);
  check_finite(errors, "/attention/k_shared", k_shared);
  check_finite(errors, "/attention/v", a.v);
  check_finite(errors, "/attention/d_out", a.d_out);
  check_finite(errors, "/attention/sinks", a.sinks);
  check_regions(errors, a);
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

/// Tokens [begin, end), the block that rank `rank` of `ranks` writes.
struct Block {
  int64_t begin, end;
  Block(int64_t tokens, int rank, int ranks)
      : begin(tokens * rank / ranks), end(tokens * (rank + 1) / ranks) {}
  int64_t size() const { return end - begin; }
};

/// Maps each row to the rank that writes it, and to its position in that rank's block.
class Routes {
 public:
  /// Collective; throws an agreed error unless every token of every block occurs exactly once.
  Routes(Communicator& comm, const std::vector<int64_t>& tokens, int64_t total)
      : comm_(comm), block_(total, comm.rank(), comm.size()) {
    run_agreed(comm, "looking for the tokens of results", [&] { sort(tokens, total); });
    std::vector<int64_t> sorted;
    for (const int64_t row : rows_) sorted.push_back(tokens[row]);
    counts_in_.resize(counts_out_.size());
    HostStream stream;
    comm.all_to_all(bytes_of(std::span<const int64_t>(counts_out_)),
                    writable_bytes_of(std::span(counts_in_)), stream, "counting rows of results")
        ->wait();
    arrived_.resize(std::accumulate(counts_in_.begin(), counts_in_.end(), int64_t{0}));
    move<int64_t>(sorted, arrived_, 1);
    run_agreed(comm, "checking who has which results", [&] { check_coverage(total); });
  }

  /// Rows of this rank's block, in token order: [block, width] <- [rows, width].
  std::vector<float> collect(const MatrixView<const float>& rows, int64_t width) const {
    std::vector<float> out, in(arrived_.size() * static_cast<size_t>(width));
    out.reserve(rows_.size() * static_cast<size_t>(width));
    for (const int64_t row : rows_) out.insert(out.end(), rows.row(row), rows.row(row) + width);
    move<float>(out, in, width);
    out = {};  // frees the memory before the next array of this size
    std::vector<float> ordered(in.size());
    for (size_t i = 0; i < arrived_.size(); ++i)
      std::copy_n(in.begin() + static_cast<int64_t>(i) * width, width,
                  ordered.begin() + (arrived_[i] - block_.begin) * width);
    return ordered;
  }
  const Block& block() const { return block_; }

 private:
  /// Sorts the rows by destination rank.
  void sort(const std::vector<int64_t>& tokens, int64_t total) {
    counts_out_.assign(comm_.size(), 0);
    for (int64_t row = 0; row < std::ssize(tokens); ++row) {
      const int64_t token = tokens[row];
      if (token < 0) continue;
      GYRE_CHECK(token < total, "row {} holds token {}, but there are {}", row, token, total);
      rows_.push_back(row);
    }
    std::stable_sort(rows_.begin(), rows_.end(),
                     [&](int64_t a, int64_t b) { return tokens[a] < tokens[b]; });
    int rank = 0;
    for (const int64_t row : rows_) {
      while (tokens[row] >= Block(total, rank, comm_.size()).end) ++rank;
      ++counts_out_[rank];
    }
  }
  void check_coverage(int64_t total) const {
    std::vector<bool> there(block_.size(), false);
    for (const int64_t token : arrived_) {
      const size_t place = token - block_.begin;
      GYRE_CHECK(!there[place], "token {} comes from two rows", token);
      there[place] = true;
    }
    for (int64_t i = 0; i < block_.size(); ++i)
      GYRE_CHECK(there[i], "token {} of {} comes from no rank", block_.begin + i, total);
  }
  template <class T>
  void move(const std::vector<T>& out, std::vector<T>& in, int64_t width) const {
    const auto bytes = [&](const std::vector<int64_t>& counts) {
      std::vector<int64_t> scaled;
      for (const int64_t n : counts) scaled.push_back(n * width * static_cast<int64_t>(sizeof(T)));
      return scaled;
    };
    HostStream stream;
    comm_
        .all_to_all_v(bytes_of(std::span<const T>(out)), bytes(counts_out_),
                      writable_bytes_of(std::span<T>(in)), bytes(counts_in_), stream,
                      "rows of results")
        ->wait();
  }

  Communicator& comm_;
  Block block_;
  std::vector<int64_t> rows_;                    // rows that hold a token, sorted by token
  std::vector<int64_t> counts_out_, counts_in_;  // [ranks] numbers of rows
  std::vector<int64_t> arrived_;                 // tokens of the received rows
};

struct AttentionArray {
  std::string path;
  MatrixView<const float> rows;
  h5::Shape shape;
  int64_t width() const {
    return std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
  }
};

std::vector<AttentionArray> result_arrays(const AttentionResultsHeader& header,
                                          const AttentionResultRows& mine) {
  const int64_t tokens = header.offsets.back();
  const int64_t heads = header.heads, kv_heads = header.kv_heads;
  std::vector<AttentionArray> arrays{{"/results/out", mine.out, {tokens, heads, header.v_head_dim}},
                                     {"/results/lse", mine.lse, {tokens, heads}}};
  if (header.gradients) {
    arrays.push_back({"/results/d_q", mine.d_q, {tokens, heads, header.head_dim}});
    const int64_t shared = header.shared_key_dim;
    arrays.push_back({"/results/d_k", mine.d_k, {tokens, kv_heads, header.head_dim - shared}});
    if (shared > 0) arrays.push_back({"/results/d_k_shared", mine.d_k_shared, {tokens, shared}});
    arrays.push_back({"/results/d_v", mine.d_v, {tokens, kv_heads, header.v_head_dim}});
  }
  return arrays;
}

void create_results(const std::string& path, const AttentionResultsHeader& header,
                    const std::vector<AttentionArray>& arrays) {
  h5::File file = h5::File::create(path);
  write_schema(file, attention_results_schema, header.provenance);
  file.create_group("/results");
  file.write_attribute("/results", "input_sha256", header.input_sha256);
  file.write_dataset("/results/offsets", std::span<const int64_t>(header.offsets));
  for (const AttentionArray& array : arrays)
    file.create_dataset(array.path, DType::f32, array.shape, h5::Checksum::fletcher32);
  if (!header.d_sinks.empty())
    file.write_dataset("/results/d_sinks", std::span<const double>(header.d_sinks));
  file.close();
}

}  // namespace

AttentionFile read_attention_file(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, attention_schema);
  AttentionFile a;
  AttentionParts parts;
  run_agreed(comm, "opening the attention of " + path, [&] { parts = open_attention(file, a); });
  a.offsets = parts.offsets->read_all<int64_t>();
  a.q = read_floats(*parts.q, a.rounded);
  a.k = read_floats(*parts.k, a.rounded);
  std::vector<float> shared;
  if (parts.k_shared) shared = read_floats(*parts.k_shared, a.rounded);
  a.v = read_floats(*parts.v, a.rounded);
  a.d_out = read_floats(*parts.d_out, a.rounded);
  if (parts.regions) a.regions = parts.regions->read_all<int64_t>();
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
  Communicator& comm = output.comm();
  const std::vector<AttentionArray> arrays = result_arrays(header, mine);
  run_agreed(comm, "checking the shapes of results", [&] {
    for (const AttentionArray& array : arrays)
      GYRE_CHECK(array.rows.rows == std::ssize(mine.tokens) && array.rows.cols == array.width(),
                 "{} is [{}, {}]; it must be [{}, {}]", array.path, array.rows.rows,
                 array.rows.cols, mine.tokens.size(), array.width());
  });
  const Routes routes(comm, mine.tokens, header.offsets.back());
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), header, arrays); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const AttentionArray& array : arrays) {
    const std::vector<float> block = routes.collect(array.rows, array.width());
    h5::Slab slab{h5::Shape(array.shape.size(), 0), array.shape};
    slab.start[0] = routes.block().begin;
    slab.count[0] = routes.block().size();
    const size_t slabs = block.empty() ? 0 : 1;
    file.dataset(array.path).write<float>(std::span(&slab, slabs), block);
  }
  file.close();
}

}  // namespace gyre
