#include "io/schemas/token_results.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "comm/agree.hpp"

namespace gyre {
namespace {

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

int64_t width_of(const TokenArray& array) {
  return std::accumulate(array.shape.begin() + 1, array.shape.end(), int64_t{1},
                         std::multiplies<>());
}

void create_results(const std::string& path, const TokenResults& results,
                    const std::vector<TokenArray>& arrays,
                    const std::function<void(h5::File&)>& more) {
  h5::File file = h5::File::create(path);
  write_schema(file, results.schema, results.provenance);
  file.create_group("/results");
  file.write_attribute("/results", "input_sha256", results.input_sha256);
  file.write_dataset("/results/offsets", std::span<const int64_t>(results.offsets));
  for (const TokenArray& array : arrays)
    file.create_dataset(array.path, DType::f32, array.shape, h5::Checksum::fletcher32);
  if (more) more(file);
  file.close();
}

}  // namespace

void write_token_results(OutputFile& output, const TokenResults& results,
                         const std::vector<TokenArray>& arrays,
                         const std::function<void(h5::File&)>& more) {
  Communicator& comm = output.comm();
  run_agreed(comm, "checking the shapes of results", [&] {
    for (const TokenArray& array : arrays)
      GYRE_CHECK(array.rows.rows == std::ssize(*array.tokens) && array.rows.cols == width_of(array),
                 "{} is [{}, {}]; it must be [{}, {}]", array.path, array.rows.rows,
                 array.rows.cols, array.tokens->size(), width_of(array));
  });
  std::map<const std::vector<int64_t>*, Routes> all_routes;
  for (const TokenArray& array : arrays)
    if (!all_routes.contains(array.tokens))
      all_routes.try_emplace(array.tokens, comm, *array.tokens, array.shape[0]);
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), results, arrays, more); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const TokenArray& array : arrays) {
    const Routes& routes = all_routes.at(array.tokens);
    const std::vector<float> block = routes.collect(array.rows, width_of(array));
    h5::Slab slab{h5::Shape(array.shape.size(), 0), array.shape};
    slab.start[0] = routes.block().begin;
    slab.count[0] = routes.block().size();
    const size_t slabs = block.empty() ? 0 : 1;
    file.dataset(array.path).write<float>(std::span(&slab, slabs), block);
  }
  file.close();
}

}  // namespace gyre
