#pragma once
// Writes arrays that a run makes (--output), and compares them with another program's (--yours).

#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "comm/agree.hpp"
#include "io/schemas/array_file.hpp"
#include "report/app.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Paths of files, or "" for one that is not wanted.
struct ArrayPaths {
  std::string output, yours;
  bool wanted() const { return !output.empty() || !yours.empty(); }
};

/// Writes `made`, whose values rank 0 has, as one of the outputs of `context`; if `check`, compares
/// it with the written file. Compares it with yours, and returns a "#" line about that. Collective.
std::string write_and_compare(const ArrayFile& made, const ArrayPaths& paths, bool check,
                              AppContext& context, Verification& checks);

/// Compares the arrays that the file at `path` has with `made`, and adds this check under `name`.
/// `all`: the check fails unless the file has all of them. Returns how many it has, on rank 0.
/// Collective.
int64_t compare_arrays(const std::string& name, const std::string& path, const ArrayFile& made,
                       bool all, Communicator& world, Verification& checks);

/// Throws a usage error if rank 0 cannot hold the arrays of all ranks, which have so many bytes.
/// All ranks pass the same number. Collective.
void check_arrays_fit(double bytes, AppContext& context);

/// The items of all ranks in rank order on rank 0, nothing on others, and the counts of all ranks.
/// Collective.
template <class T>
std::vector<T> gather_on_root(Communicator& world, const std::vector<T>& mine,
                              std::vector<int64_t>& counts) {
  counts = all_gather_value(world, std::ssize(mine));
  std::vector<T> all;
  std::vector<RecvSlice> recvs;
  if (world.rank() == 0) {
    all.resize(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    std::span<T> rest(all);
    for (int r = 0; r < world.size(); ++r) {
      recvs.push_back({r, writable_bytes_of(rest.first(counts[r]))});
      rest = rest.subspan(counts[r]);
    }
  }
  const SendSlice send{0, bytes_of(std::span<const T>(mine))};
  HostStream stream;
  world.exchange({&send, 1}, recvs, stream, "gathering arrays on rank 0")->wait();
  return all;
}

/// The rows of all ranks in order on rank 0, nothing on others. Rank r of the run holds the rows r,
/// r + size, ... of `rows` rows of equal length. Collective.
template <class T>
std::vector<T> rows_on_root(Communicator& world, const std::vector<T>& mine, int64_t rows) {
  std::vector<int64_t> counts, begin{0};
  const std::vector<T> all = gather_on_root(world, mine, counts);
  for (const int64_t count : counts) begin.push_back(begin.back() + count);
  std::vector<T> ordered;
  if (all.empty()) return ordered;
  ordered.reserve(all.size());
  const int64_t width = std::ssize(all) / rows;
  for (int64_t row = 0; row < rows; ++row) {
    const auto from = all.begin() + begin[row % world.size()] + row / world.size() * width;
    ordered.insert(ordered.end(), from, from + width);
  }
  return ordered;
}

}  // namespace gyre
