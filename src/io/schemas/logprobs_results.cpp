#include <algorithm>
#include <numeric>

#include "comm/agree.hpp"
#include "io/schemas/logprobs_file.hpp"

namespace gyre {
namespace {

constexpr const char* results_group = "/results";

/// Throws unless every element of an array comes from exactly one rank.
void check_coverage(Communicator& comm, const LogprobsPart& part) {
  const int64_t rows = part.shape[0];
  const int64_t width = h5::elements_of(part.shape) / std::max<int64_t>(1, rows);
  std::vector<int64_t> columns(rows, 0);
  for (const int64_t row : part.rows)
    if (row >= 0) columns.at(row) += part.columns;
  HostStream stream;
  comm.all_reduce(columns.data(), rows, DType::i64, ReduceOp::sum, stream, "rows of results")
      ->wait();
  run_agreed(comm, "checking who has which results", [&] {
    for (int64_t row = 0; row < rows; ++row)
      GYRE_CHECK(columns[row] == width, "{}[{}]: {} elements come from ranks, of {}", part.name,
                 row, columns[row], width);
  });
}

void create_results(const std::string& path, const LogprobsResultsHeader& header,
                    const std::vector<LogprobsPart>& parts) {
  h5::File file = h5::File::create(path);
  write_schema(file, logprobs_results_schema, header.provenance);
  file.create_group(results_group);
  file.write_attribute(results_group, "input_sha256", header.input_sha256);
  file.write_attribute(results_group, "vocab_size", header.vocab_size);
  const auto write = [&](const char* name, const auto& number) {
    if (std::ranges::find(header.of_tokens, name) == header.of_tokens.end())
      file.write_attribute(results_group, name, number);
    else
      file.write_attribute(results_group, name, std::string("of each token"));
  };
  write("top_k", header.top_k);
  for (const auto& [name, value] : header.parameters) write(name.c_str(), value);
  write("top_p", header.top_p);
  write("min_p", header.min_p);
  write("temperature", header.temperature);
  for (const LogprobsPart& part : parts)
    file.create_dataset(fmt::format("{}/{}", results_group, part.name),
                        part.whole_numbers ? DType::i32 : DType::f32, part.shape,
                        h5::Checksum::fletcher32);
  file.close();
}

/// Writes this rank's rows, `values` [rows, columns], in file order.
template <class T>
void write_rows(const h5::Dataset& dataset, const LogprobsPart& part,
                const std::vector<T>& values) {
  std::vector<h5::Slab> slabs;
  std::vector<T> ordered;
  if (part.columns > 0) {
    std::vector<size_t> order(part.rows.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::erase_if(order, [&](size_t i) { return part.rows[i] < 0; });
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return part.rows[a] < part.rows[b]; });
    int64_t next = -1;
    for (const size_t i : order) {
      const int64_t row = part.rows[i];
      if (row == next)
        ++slabs.back().count[0];
      else if (part.shape.size() == 1)
        slabs.push_back({{row}, {1}});
      else
        slabs.push_back({{row, part.first}, {1, part.columns}});
      next = row + 1;
      const auto from = values.begin() + static_cast<int64_t>(i) * part.columns;
      ordered.insert(ordered.end(), from, from + part.columns);
    }
  }
  dataset.write<T>(slabs, ordered);
}

}  // namespace

void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const std::vector<LogprobsPart>& mine) {
  Communicator& comm = output.comm();
  run_agreed(comm, "checking the shapes of results", [&] {
    for (const LogprobsPart& part : mine) {
      const size_t elements = part.whole_numbers ? part.integers.size() : part.values.size();
      GYRE_CHECK(elements == part.rows.size() * static_cast<size_t>(part.columns),
                 "{} has {} elements; it must have {} x {}", part.name, elements, part.rows.size(),
                 part.columns);
    }
  });
  for (const LogprobsPart& part : mine) check_coverage(comm, part);
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), header, mine); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const LogprobsPart& part : mine) {
    const h5::Dataset dataset = file.dataset(fmt::format("{}/{}", results_group, part.name));
    if (part.whole_numbers)
      write_rows(dataset, part, part.integers);
    else
      write_rows(dataset, part, part.values);
  }
  file.close();
}

}  // namespace gyre
