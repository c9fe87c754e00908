#include "io/schemas/results.hpp"

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "comm/collective.hpp"

namespace gyre {
namespace {

constexpr const char* logprob_path = "/results/logprob";
constexpr const char* entropy_path = "/results/entropy";
constexpr const char* kl_path = "/results/kl";

/// The predictions of a rank.
struct Claim {
  int64_t begin;
  int64_t count;
  int64_t rank;
};

/// Throws unless the pieces of all ranks cover each of `total` predictions exactly once.
void check_coverage(Communicator& comm, const ResultPiece& mine, int64_t total) {
  GYRE_CHECK(mine.logprob.size() == mine.entropy.size(), "{} log-probs, {} entropies",
             mine.logprob.size(), mine.entropy.size());
  std::vector<Claim> claims =
      all_gather_value(comm, Claim{mine.begin, std::ssize(mine.logprob), comm.rank()});
  std::erase_if(claims, [](const Claim& claim) { return claim.count == 0; });
  run_agreed(comm, "checking who has which results", [&] {
    std::ranges::sort(claims, {}, &Claim::begin);
    int64_t next = 0, owner = -1;
    for (const Claim& claim : claims) {
      GYRE_CHECK(claim.begin <= next, "prediction {} of {} comes from no rank", next, total);
      GYRE_CHECK(claim.begin == next, "prediction {} comes from rank {} and from rank {}",
                 claim.begin, owner, claim.rank);
      next += claim.count;
      owner = claim.rank;
    }
    GYRE_CHECK(next >= total, "prediction {} of {} comes from no rank", next, total);
    GYRE_CHECK(next == total, "rank {} has prediction {}, but there are {}", owner, next - 1,
               total);
  });
}

void create_results(const std::string& path, const ResultsHeader& header) {
  h5::File file = h5::File::create(path);
  write_schema(file, results_schema, header.provenance);
  file.create_group("/results");
  file.write_attribute("/results", "model_sha256", header.model_sha256);
  file.write_attribute("/results", "input_sha256", header.input_sha256);
  file.write_dataset("/results/offsets", std::span<const int64_t>(header.offsets));
  if (!header.names.empty())
    file.write_dataset("/results/names", std::span<const std::string>(header.names));
  std::vector<const char*> datasets = {logprob_path, entropy_path};
  if (!header.teacher_sha256.empty()) {
    file.write_attribute("/results", "teacher_sha256", header.teacher_sha256);
    datasets.push_back(kl_path);
  }
  for (const char* dataset : datasets)
    file.create_dataset(dataset, DType::f32, {header.offsets.back()}, h5::Checksum::fletcher32);
  write_packed_bins(file, header.packed);
  file.write_attribute("/packed", "cp", header.cp);
  file.close();
}

/// Datasets of a results file. open_parts sets all of them, but names and kl only if present.
struct ResultParts {
  std::optional<h5::Dataset> logprob, entropy, kl, offsets, names;
  PackedBinParts bins;
};

ResultParts open_parts(const h5::File& file, ResultsHeader& header) {
  SchemaReader reader(file, results_schema);
  header.model_sha256 = reader.text("/results", "model_sha256");
  header.input_sha256 = reader.text("/results", "input_sha256");
  header.cp = reader.integer("/packed", "cp");
  ResultParts parts;
  parts.logprob = reader.dataset(logprob_path, {h5::Type::f32}, {-1});
  const int64_t predictions = parts.logprob ? parts.logprob->elements() : -1;
  parts.entropy = reader.dataset(entropy_path, {h5::Type::f32}, {predictions});
  header.teacher_sha256 = reader.text("/results", "teacher_sha256", "");
  if (file.has_dataset(kl_path)) parts.kl = reader.dataset(kl_path, {h5::Type::f32}, {predictions});
  parts.offsets = reader.dataset("/results/offsets", {h5::Type::i64}, {-1});
  if (parts.offsets && file.has_dataset("/results/names")) {
    const int64_t count = parts.offsets->elements() - 1;
    parts.names = reader.dataset("/results/names", {h5::Type::text}, {count});
  }
  parts.bins = open_packed_bins(reader, header.packed);
  reader.throw_if_any();
  return parts;
}

void check_results(const h5::File& file, const Results& results) {
  SchemaReader reader(file, results_schema);
  const PackedBins& packed = results.header.packed;
  check_offsets(reader.errors(), "/results/offsets", results.header.offsets,
                std::ssize(results.logprob), fmt::format("the elements of {}", logprob_path));
  check_offsets(reader.errors(), "/packed/bin_offsets", packed.bin_offsets,
                std::ssize(packed.document), "the elements of /packed/document");
  check_prefixes(reader.errors(), packed.prefixes);
  reader.throw_if_any();
}

struct ReferenceParts {
  std::optional<h5::Dataset> offsets, logprob, entropy;
};

ReferenceParts open_reference(const h5::File& file, const Documents& documents,
                              const HiddenShape& model, Reference& reference) {
  SchemaReader reader(file, documents_schema);
  reference.model_sha256 = reader.text("/reference", "model_sha256", "");
  reference.generator = reader.text("/reference", "generator", "");
  const int64_t predictions = prediction_offsets(documents.offsets).back();
  ReferenceParts parts;
  parts.offsets = reader.integers_if("/reference/offsets", {documents.count() + 1});
  parts.logprob = reader.reals_if("/reference/logprob", {predictions});
  parts.entropy = reader.reals_if("/reference/entropy", {predictions});
  if (reader.is_there("/reference/hidden")) {
    reference.has_hidden = true;
    const auto hidden = reader.reals("/reference/hidden", {-1, documents.total(), -1});
    if (hidden && (hidden->shape()[0] != model.entries || hidden->shape()[2] != model.width))
      reader.errors().add(
          "/reference/hidden is of a model of {} layers and hidden size {}; this model has {} and "
          "{}: take the model that the reference was computed with, or --check none",
          hidden->shape()[0] - 1, hidden->shape()[2], model.entries - 1, model.width);
  }
  reference.unknown = unknown_answers(file, documents_schema);
  reader.throw_if_any();
  return parts;
}

/// `offsets`: those of the file's reference; empty if it has none.
void check_reference(const h5::File& file, const Documents& documents,
                     const std::vector<int64_t>& offsets, const Reference& reference) {
  SchemaReader reader(file, documents_schema);
  const std::vector<int64_t> wanted = prediction_offsets(documents.offsets);
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (offsets[i] == wanted[i]) continue;
    reader.errors().add(
        "/reference/offsets[{}] is {}; it must be {}: "
        "a document of n tokens has max(0, n - 1) predictions",
        i, offsets[i], wanted[i]);
    break;
  }
  if (reference.logprob) check_finite(reader.errors(), "/reference/logprob", *reference.logprob);
  if (reference.entropy) check_finite(reader.errors(), "/reference/entropy", *reference.entropy);
  reader.throw_if_any();
}

}  // namespace

std::optional<Reference> read_reference(Communicator& comm, const std::string& path,
                                        const Documents& documents, const HiddenShape& model) {
  const h5::File file = open_schema_file(comm, path, documents_schema);
  Reference reference;
  ReferenceParts parts;
  bool found = false;
  run_agreed(comm, "opening the reference of " + path, [&] {
    found = file.has_group("/reference");
    if (found) parts = open_reference(file, documents, model, reference);
  });
  if (!found) return {};
  std::vector<int64_t> offsets;
  if (parts.offsets) offsets = parts.offsets->read_all<int64_t>();
  if (parts.logprob) reference.logprob = parts.logprob->read_all<double>();
  if (parts.entropy) reference.entropy = parts.entropy->read_all<double>();
  run_agreed(comm, "checking the reference of " + path,
             [&] { check_reference(file, documents, offsets, reference); });
  return reference;
}

Buffer<double> read_reference_hidden(Communicator& comm, const std::string& path, int64_t entry,
                                     std::span<const Rows> rows) {
  const h5::File file = open_schema_file(comm, path, documents_schema);
  std::optional<h5::Dataset> hidden;
  run_agreed(comm, "opening the hidden states of " + path,
             [&] { hidden = file.dataset("/reference/hidden"); });
  const int64_t width = hidden->shape().back();
  std::vector<h5::Slab> slabs;
  int64_t count = 0;
  for (const Rows& range : rows) {
    if (range.count == 0) continue;
    slabs.push_back({{entry, range.begin, 0}, {1, range.count, width}});
    count += range.count;
  }
  Buffer<double> values;
  hidden->make_room(count * width, sizeof(double), [&] { values = Buffer<double>(count * width); });
  hidden->read<double>(slabs, values.span());
  return values;
}

void write_results(OutputFile& output, const ResultsHeader& header, const ResultPiece& mine) {
  Communicator& comm = output.comm();
  check_coverage(comm, mine, header.offsets.back());
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), header); });
  std::vector<h5::Slab> slabs;
  if (!mine.logprob.empty()) slabs.push_back({{mine.begin}, {std::ssize(mine.logprob)}});
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  file.dataset(logprob_path).write<float>(slabs, mine.logprob);
  file.dataset(entropy_path).write<float>(slabs, mine.entropy);
  if (!header.teacher_sha256.empty()) file.dataset(kl_path).write<float>(slabs, mine.kl);
  file.close();
}

Results read_results(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, results_schema);
  Results results;
  ResultsHeader& header = results.header;
  ResultParts parts;
  run_agreed(comm, "opening the results of " + path, [&] { parts = open_parts(file, header); });
  results.logprob = parts.logprob->read_all<float>();
  results.entropy = parts.entropy->read_all<float>();
  if (parts.kl) results.kl = parts.kl->read_all<float>();
  header.offsets = parts.offsets->read_all<int64_t>();
  if (parts.names) header.names = parts.names->read_texts();
  read_packed_bins(parts.bins, header.packed);
  run_agreed(comm, "checking the results of " + path, [&] { check_results(file, results); });
  return results;
}

}  // namespace gyre
