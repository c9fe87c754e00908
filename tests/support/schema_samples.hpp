#pragma once
// Right files of every schema, and who reads them.

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "apps/logprobs/registry.hpp"
#include "io/compare.hpp"
#include "io/schemas/attention_file.hpp"
#include "io/schemas/batch_file.hpp"
#include "io/schemas/logprobs_file.hpp"
#include "io/schemas/model_file.hpp"
#include "io/schemas/packed_file.hpp"
#include "io/schemas/recurrence_file.hpp"
#include "io/schemas/results.hpp"
#include "io/schemas/shard_file.hpp"
#include "io/schemas/token_results.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre::test {

using Read = std::function<void(const std::string& path)>;

/// A right file, all of whose items are read by `read`.
struct Sample {
  std::string path, schema;
  Read read;
};

/// Trees of documents with names, as gyre-pack --share-prefixes writes them (inputs/SCHEMA.md), of
/// ids, or of embeddings of `width`.
inline void write_packed_sample(const std::string& path, int64_t width) {
  PackedHeader header;
  header.bins = {12, {0, 1}, {0}, {0, 11}, {0, 12}, {}};
  header.bins.prefixes = {
      {0, 4}, {{-1, 4, 0, 3}, {0, 3, 0, 2}, {1, 2, 1, 1}, {0, 2, 2, 1}}, {0, 2, 1}};
  header.slot_multiple = 4, header.documents = 1, header.vocab_size = 9;
  header.tokenizer = header.algorithm = "test";
  header.names = {"a", "b", "c"};
  PackedSlots slots;
  slots.labels = slots.positions = std::vector<int32_t>(12, 1);
  if (width == 0) slots.ids = slots.labels;
  slots.embeddings.resize(12 * width, 1);
  header.hidden_size = width;
  OutputFile output(world(), path);
  fill_packed(output, header, slots);
  output.commit();
}

inline void write_results_sample(const std::string& path) {
  ResultsHeader header;
  header.model_sha256 = header.input_sha256 = header.teacher_sha256 = "x";
  header.offsets = {0, 4, 4};
  header.names = {"a", "b"};
  header.packed = {12, {0, 1}, {0}, {0, 11}, {0, 12}, {}};
  header.packed.prefixes = {{0, 1}, {{-1, 11, 0, 2}}, {0, 1}};
  const std::vector<float> values(4, -1);
  OutputFile output(world(), path);
  write_results(output, header, {0, values, values, values});
  output.commit();
}

/// Shards of ids, or of embeddings of `width`, and who reads them: gyre-shard, which knows their
/// header.
inline Sample shards_sample(const std::string& path, int64_t width) {
  ShardsHeader header;
  header.layout = header.packed_sha256 = "test";
  header.cp = 2, header.hidden_size = width;
  header.bin_offsets = {0, 1}, header.slot_offsets = {0, 4};
  ShardRows row;
  row.labels = row.positions = row.index = std::vector<int32_t>(4, 1);
  row.cu_seqlens = row.cu_seqlens_padded = {0, 4};
  if (width == 0) row.ids = row.labels;
  row.embeddings.resize(4 * width, 1);
  OutputFile output(world(), path);
  fill_shards(output, header, std::vector<ShardRows>(2, row));
  output.commit();
  return {path, shards_schema,
          [=](const std::string& file) { (void)read_shard_rows(world(), file, header); }};
}

/// Results that gyre-compare alone reads: it says what differs from the right ones.
inline Sample compared_sample(const std::string& path, const char* schema,
                              const std::vector<std::string>& answers = {}) {
  return {path, schema, [=](const std::string& file) {
            (void)open_schema_file(world(), file, schema, answers);
            ConfigErrors errors;
            for (const TensorComparison& tensor : compare_files(file, path, {}))
              if (tensor.match != Match::same)
                errors.add("dataset '/{}': {}", tensor.path, describe(tensor));
            errors.throw_if_any(file + " has other results:");
          }};
}

inline Sample attention_results_sample(const std::string& path) {
  AttentionResultsHeader header{1, 1, 3, 2, 1, {0, 3}, {0, 2}, true, {1}, "x", {}};
  const std::vector<float> values(9, 1);
  const auto rows = [&](int64_t count, int64_t width) {
    return MatrixView<const float>(values.data(), count, width);
  };
  OutputFile output(world(), path);
  write_attention_results(
      output, header,
      {{0, 1}, {0, 1, 2}, rows(2, 2), rows(2, 1), rows(2, 3), rows(3, 2), rows(3, 1), rows(3, 2)});
  output.commit();
  return compared_sample(path, attention_results_schema);
}

inline Sample recurrence_results_sample(const std::string& path) {
  const std::vector<float> values(6, 1);
  const MatrixView<const float> pairs(values.data(), 3, 2), ones(values.data(), 3, 1);
  const std::vector<int64_t> tokens{0, 1, 2};
  std::vector<TokenArray> arrays;
  for (const char* name : {"out", "d_q", "d_k", "d_v"})
    arrays.push_back({std::string("/results/") + name, {3, 1, 2}, pairs, &tokens});
  for (const char* name : {"d_g", "d_beta"})
    arrays.push_back({std::string("/results/") + name, {3, 1}, ones, &tokens});
  OutputFile output(world(), path);
  write_token_results(output, {recurrence_results_schema, {0, 3}, "x", {}}, arrays);
  output.commit();
  return compared_sample(path, recurrence_results_schema);
}

inline Sample logprobs_results_sample(const std::string& path) {
  LogprobsPart part{"logprob", {3}};
  part.rows = {0, 1, 2}, part.values = {-1, -2, -3};
  OutputFile output(world(), path);
  LogprobsResultsHeader header;
  header.vocab_size = 9;
  header.input_sha256 = "x";
  for (const RowParameter& parameter : row_parameters())
    header.parameters.emplace_back(parameter.name, parameter.usual);
  write_logprobs_results(output, header, {part});
  output.commit();
  return compared_sample(path, logprobs_results_schema, {"/results/logprob"});
}

inline void read_packed(const std::string& path) {
  const PackedHeader header = read_packed_header(world(), path);
  (void)read_packed_slots(world(), path, header, 0, header.bin_count());
}

inline void read_with_reference(const std::string& path) {
  const Documents documents = read_documents(world(), path);
  (void)read_reference(world(), path, documents, {3, 48});
}

/// Documents with the bytes of their text.
inline void write_documents_sample(const std::string& path) {
  Documents documents;
  documents.tokens = {3, 4, 5};
  documents.offsets = {0, 2, 3};
  documents.names = {"a", "b"};
  documents.text_bytes = {7, 0};
  documents.unscored = {1, 0};
  OutputFile output(world(), path);
  write_documents(output, documents, {});
  output.commit();
}

inline std::vector<Sample> samples(const SharedFolder& folder) {
  write_packed_sample(folder.file("packed.h5"), 0);
  write_packed_sample(folder.file("embeddings.h5"), 2);
  write_results_sample(folder.file("results.h5"));
  write_documents_sample(folder.file("documents.h5"));
  const Read rows = [](const std::string& path) { (void)read_bshd(world(), path); };
  const Read attention = [](const std::string& path) { (void)read_attention_file(world(), path); };
  const Read logprobs = [](const std::string& path) {
    (void)read_logprobs_file(world(), path, logprobs_arrays());
  };
  std::vector<Sample> all{
      {input("docs_tiny.h5"), documents_schema, read_with_reference},
      {folder.file("documents.h5"), documents_schema,
       [](const std::string& path) { (void)read_documents(world(), path); }},
      {input("model_tiny.h5"), model_schema,
       [](const std::string& path) { ModelFile(world(), path); }},
      {folder.file("results.h5"), results_schema,
       [](const std::string& path) { (void)read_results(world(), path); }},
      {folder.file("packed.h5"), packed_schema, read_packed},
      {folder.file("embeddings.h5"), packed_schema, read_packed},
      {input("bshd_tiny.h5"), bshd_schema, rows},
      {input("bshd_left.h5"), bshd_schema, rows},
      {input("golden/rows_padded.h5"), bshd_schema, rows},
      {input("salm_tiny.h5"), salm_schema,
       [](const std::string& path) { (void)read_salm(world(), path); }},
      {input("golden/attention_keys_shared_groups.h5"), attention_schema, attention},
      {input("golden/attention_decode.h5"), attention_schema, attention},
      {input("attention_regions.h5"), attention_schema, attention},
      {input("golden/attention_selected.h5"), attention_schema, attention},
      {input("golden/recurrence_kda.h5"), recurrence_schema,
       [](const std::string& path) { (void)read_recurrence_file(world(), path); }},
      {input("golden/recurrence_conv.h5"), recurrence_schema,
       [](const std::string& path) { (void)read_recurrence_file(world(), path); }},
      {input("logprobs_golden.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_fused_linear.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_teacher_values.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_every_id.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_gradients_of_ids.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_min_p.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_filter_of_tokens.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_sampling_mask.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_projected.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_topk_kl_of_ids.h5"), logprobs_schema, logprobs},
      shards_sample(folder.file("shards.h5"), 0),
      shards_sample(folder.file("shards_of_embeddings.h5"), 2),
      attention_results_sample(folder.file("attention_results.h5")),
      recurrence_results_sample(folder.file("recurrence_results.h5")),
      logprobs_results_sample(folder.file("logprobs_results.h5")),
  };
  for (const RowOperation& operation : row_operations()) {
    std::string name = operation.name;
    std::ranges::replace(name, '-', '_');
    const std::string path = input("golden/logprobs_" + name + ".h5");
    if (std::filesystem::exists(path)) all.push_back({path, logprobs_schema, logprobs});
  }
  return all;
}

}  // namespace gyre::test
