#include <memory>

#include "apps/common/workload_options.hpp"
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
#include "target.hpp"

namespace gyre::fuzz {
namespace {

using Longs = std::vector<int64_t>;

/// Of arrays, their sizes included; attributes and texts, which have no checksum, do not count.
class Digest {
 public:
  template <class Array>
  Digest& add(const Array& values) {
    const uint64_t count = values.size();
    hash_ = hash_bytes(&count, sizeof(count), hash_);
    hash_ = hash_bytes(values.data(), count * sizeof(*values.data()), hash_);
    return *this;
  }
  template <class... Arrays>
  Digest& add(const Arrays&... arrays) requires(sizeof...(Arrays) > 1) {
    (add(arrays), ...);
    return *this;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = hash_bytes(nullptr, 0);
};

void add(Digest& digest, const StoredExtras& extras) {
  for (const auto& [name, stored] : extras)
    if (stored.extra.bytes) digest.add(*stored.extra.bytes);
}

void add(Digest& digest, const PackedBins& bins) {
  digest.add(bins.bin_offsets, bins.document, bins.cu_seqlens, bins.cu_seqlens_padded);
}

Digests read_text_documents(Communicator& comm, const std::string& path) {
  const Documents documents = read_documents(comm, path);
  return {Digest().add(documents.tokens, documents.offsets, documents.text_bytes).value()};
}

Digests read_references(Communicator& comm, const std::string& path) {
  const Documents documents = read_documents(comm, path);
  Digest digest;
  const uint64_t bare = digest.value();
  const HiddenShape tiny{3, 48};  // of inputs/model_tiny.h5
  if (const auto reference = read_reference(comm, path, documents, tiny)) {
    digest.add(reference->logprob.value_or(std::vector<double>()),
               reference->entropy.value_or(std::vector<double>()));
    const Rows all{0, documents.total()};
    for (int64_t entry = 0; reference->has_hidden && entry < tiny.entries; ++entry)
      digest.add(read_reference_hidden(comm, path, entry, std::span(&all, 1)).span());
  }
  return {digest.value(), bare};
}

Digests read_model(Communicator& comm, const std::string& path) {
  ModelFile model(comm, path);
  Digest digest;
  for (const auto& [name, shape] : model_tensors(model.config())) {
    const int64_t rows = shape.size() == 1 ? 1 : shape[0];
    digest.add(model.read_matrix(name, 0, rows, 0, shape.back()).span());
  }
  return {digest.value()};
}

Digests read_packed(Communicator& comm, const std::string& path) {
  const PackedHeader header = read_packed_header(comm, path);
  const PackedSlots slots = read_packed_slots(comm, path, header, 0, header.bin_count());
  Digest digest;
  add(digest, header.bins);
  digest.add(header.bins.prefixes.tree_offsets, header.bins.prefixes.documents);
  for (const PrefixNode& node : forest_of(header.bins.prefixes).nodes)
    digest.add(std::as_bytes(std::span(&node.position, 1)));
  add(digest, header.extras);
  for (const auto& [name, extra] : slots.extras) digest.add(extra.bytes);
  return {digest.add(slots.ids, slots.embeddings, slots.labels, slots.positions).value()};
}

ShardsHeader shards_header(const std::string& path) {
  const h5::File file = h5::File::open(path);
  ShardsHeader header;
  header.layout = std::get<std::string>(file.attribute("/shards", "layout"));
  header.packed_sha256 = std::get<std::string>(file.attribute("/shards", "packed_sha256"));
  header.cp = std::get<int64_t>(file.attribute("/shards", "cp"));
  header.hidden_size = std::get<int64_t>(file.attribute("/shards", "hidden_size"));
  header.bin_offsets = file.dataset("/shards/bin_offsets").read_all<int64_t>();
  header.slot_offsets = file.dataset("/shards/slot_offsets").read_all<int64_t>();
  return header;
}

/// gyre-shard reads the rows that it has written, and knows their header.
Digests read_shards(Communicator& comm, const std::string& path, const ShardsHeader& header) {
  Digest digest;
  for (const ShardRows& row : read_shard_rows(comm, path, header))
    digest.add(row.ids, row.embeddings, row.labels, row.positions, row.index)
        .add(row.cu_seqlens, row.cu_seqlens_padded);
  return {digest.value()};
}

Digests read_rows(Communicator& comm, const std::string& path) {
  const BshdArrays a = read_bshd(comm, path);
  Digest digest;
  digest.add(a.ids, a.embeddings, a.labels, a.positions);
  for (const auto* table : {&a.seq_lens, &a.seq_lens_padded}) digest.add(table->value_or(Longs()));
  add(digest, a.extras);
  return {digest.value()};
}

Digests read_audio(Communicator& comm, const std::string& path) {
  const SalmArrays a = read_salm(comm, path);
  return {
      Digest().add(a.ids, a.embeddings, a.targets, a.samples, a.audio_offsets, a.encoder).value()};
}

Digests read_attention(Communicator& comm, const std::string& path) {
  const AttentionFile f = read_attention_file(comm, path);
  Digest digest;
  digest.add(f.offsets, f.q, f.k, f.v, f.d_out, f.sinks);
  const uint64_t bare = digest.value();
  if (const auto& r = f.reference) digest.add(r->out, r->lse, r->d_q, r->d_k, r->d_v, r->d_sinks);
  return {digest.value(), bare};
}

Digests read_recurrence(Communicator& comm, const std::string& path) {
  const RecurrenceFile f = read_recurrence_file(comm, path);
  Digest digest;
  digest.add(f.offsets, f.q, f.k, f.v, f.g, f.beta, f.d_out);
  const uint64_t bare = digest.value();
  if (f.reference)
    for (const auto& [name, values] : f.reference->arrays) digest.add(values);
  return {digest.value(), bare};
}

Digests read_logprobs(Communicator& comm, const std::string& path) {
  const LogprobsFile f = read_logprobs_file(comm, path, logprobs_arrays());
  Digest digest;
  digest.add(f.offsets, f.floats("logits"), f.floats("teacher"), f.ints("targets"), f.ints("ids"),
             f.floats("d_value"), f.floats("d_logprobs"));
  const uint64_t bare = digest.value();
  if (f.reference)
    for (const auto& [name, values] : f.reference->arrays) digest.add(values);
  return {digest.value(), bare};
}

Digests read_scores(Communicator& comm, const std::string& path) {
  const Results r = read_results(comm, path);
  Digest digest;
  add(digest, r.header.packed);
  return {digest.add(r.header.offsets, r.logprob, r.entropy, r.kl).value()};
}

/// With itself, so that all of it is read, and with a seed. What differs is reported, and so no
/// wrong result: there is no digest.
Digests compare(const std::string& seed, const std::string& path) {
  compare_files(path, path, {});
  compare_files(seed, path, {});
  return {};
}

}  // namespace

std::vector<Target> file_targets(const std::string& inputs, const std::string& folder) {
  const std::string docs = inputs + "/docs_tiny.h5", shards = folder + "/shards.h5";
  const std::string results = folder + "/results.h5";
  const auto header = std::make_shared<ShardsHeader>();
  const auto rows = [header, shards](Communicator& comm, const std::string& path) {
    if (header->cp == 0) *header = shards_header(shards);
    return read_shards(comm, path, *header);
  };
  const auto comparison = [results](Communicator&, const std::string& path) {
    return compare(results, path);
  };
  std::vector<Target> targets;
  const auto target = [&](const char* name, auto read, std::vector<std::string> seeds) {
    const auto with_ranks = [read](Communicator* comm, const std::string& path) {
      return read(*comm, path);
    };
    targets.push_back({name, true, with_ranks, std::move(seeds)});
  };
  target("documents", read_text_documents, {folder + "/docs.h5", folder + "/tokenised.h5", docs});
  target("reference", read_references, {docs});
  target("model", read_model, {inputs + "/model_tiny.h5", inputs + "/model_hybrid.h5"});
  target("packed", read_packed,
         {folder + "/packed.h5", folder + "/trees.h5", folder + "/embeddings.h5",
          folder + "/packed_extras.h5"});
  target("shards", rows, {shards});
  targets.back().own = true;
  target("bshd", read_rows,
         {inputs + "/bshd_tiny.h5", inputs + "/bshd_left.h5", folder + "/rows_without_tables.h5",
          folder + "/rows_extras.h5"});
  target("salm", read_audio, {inputs + "/salm_tiny.h5"});
  target("attention", read_attention, {inputs + "/attention_window.h5"});
  target("recurrence", read_recurrence,
         {inputs + "/golden/recurrence_documents.h5", inputs + "/golden/recurrence_gla.h5"});
  target("logprobs", read_logprobs,
         {inputs + "/logprobs_golden.h5", inputs + "/logprobs_linear.h5"});
  target("results", read_scores, {results});
  target("compare", comparison, {results});
  return targets;
}

}  // namespace gyre::fuzz
