#include "apps/common/packed_streams.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "apps/common/workload_options.hpp"
#include "comm/agree.hpp"
#include "packing/lengths.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

/// Finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input affects every bit of
/// the result.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// The tokens of some documents, ordered by document number.
struct Gathered {
  std::vector<int32_t> tokens;
  std::map<int64_t, int64_t> first;  ///< document -> index of its first token
};

Gathered documents_of_bins(const PackedHeader& header, int64_t first, int64_t last,
                           const TokenSource& tokens) {
  std::map<int64_t, int32_t> lengths;
  for (int64_t b = first; b < last; ++b) {
    const auto real = header.cu_seqlens(b);
    const auto documents = header.documents_of(b);
    for (size_t i = 0; i < documents.size(); ++i) lengths[documents[i]] = real[i + 1] - real[i];
  }
  Gathered gathered;
  for (const auto& [document, length] : lengths) {
    gathered.first[document] = std::ssize(gathered.tokens);
    for (int32_t p = 0; p < length; ++p) gathered.tokens.push_back(tokens(document, p));
  }
  return gathered;
}

/// Adds the nodes of a tree as segments. The last one gets the rest of the tree's `slots`.
void add_tree(SegmentList& segments, std::span<const PrefixNode> tree, int64_t slots,
              int64_t token) {
  for (const PrefixNode& node : tree)
    segments.add(&node == &tree.back() ? slots - node.begin : node.length,
                 static_cast<int32_t>(node.length), token + node.begin,
                 static_cast<int32_t>(node.position));
}

}  // namespace

TokenSource tokens_of(const Documents& documents) {
  return [&documents](int64_t document, int64_t position) {
    return documents.tokens[documents.begin(document) + position];
  };
}

TokenSource tokens_of(const PrefixForest& forest, const Documents& documents) {
  return [&](int64_t tree, int64_t at) {
    const auto [document, position] = forest.source(tree, at);
    return documents.tokens[documents.begin(document) + position];
  };
}

TokenSource synthetic_tokens(uint64_t seed, int64_t vocab_size) {
  return [=](int64_t document, int64_t position) {
    const uint64_t key = mix(seed + mix(static_cast<uint64_t>(document) + 1)) +
                         static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15ULL;
    return static_cast<int32_t>(mix(key) % static_cast<uint64_t>(vocab_size));
  };
}

Documents generate_documents(const std::string& spec, int64_t vocab_size,
                             const std::string& tokenizer, int64_t memory_bytes) {
  const LengthSpec drawn = parse_length_spec(spec);
  Documents documents;
  documents.vocab_size = vocab_size;
  documents.tokenizer = tokenizer;
  for (const int64_t length : draw_lengths(drawn))
    documents.offsets.push_back(documents.offsets.back() + length);
  check_slots_fit(documents.total(), memory_bytes);
  const TokenSource token = synthetic_tokens(drawn.seed, vocab_size);
  for (int64_t d = 0; d < documents.count(); ++d)
    for (int64_t p = 0; p < documents.length(d); ++p) documents.tokens.push_back(token(d, p));
  return documents;
}

void set_bins(PackedHeader& header, std::span<const PackedBatch> bins, int64_t capacity,
              int64_t slot_multiple) {
  header.bins = {};
  header.bins.bin_capacity = capacity;
  header.slot_multiple = slot_multiple;
  for (const PackedBatch& bin : bins)
    header.bins.add_bin(bin.documents, bin.cu_seqlens, bin.cu_seqlens_padded);
}

PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens, Stream& stream) {
  const Gathered gathered = documents_of_bins(header, first, last, tokens);
  const PrefixForest forest = forest_of(header.bins.prefixes);
  SegmentList segments;
  for (int64_t b = first; b < last; ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    const auto documents = header.documents_of(b);
    for (size_t i = 0; i < documents.size(); ++i) {
      const int64_t slots = padded[i + 1] - padded[i], token = gathered.first.at(documents[i]);
      if (forest.trees() == 0)
        segments.add(slots, real[i + 1] - real[i], token);
      else
        add_tree(segments, forest.tree(documents[i]), slots, token);
    }
  }
  SlotArrays packed = pack_slots(segments, gathered.tokens, stream);
  PackedSlots slots;
  slots.ids = std::move(packed.ids);
  slots.labels = std::move(packed.labels);
  slots.positions = std::move(packed.positions);
  return slots;
}

PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens) {
  HostStream host;
  return fill_slots(header, first, last, tokens, host);
}

void check_slots_fit(int64_t slots, int64_t memory_bytes) {
  constexpr int64_t bytes_of_slot = 16;  // id, label, position, and the token that it is made of
  if (memory_bytes == 0 || slots <= memory_bytes / bytes_of_slot) return;
  throw_usage("--gen: {} slots need {} at least, and {} are available; at most {} slots fit", slots,
              si_text(static_cast<double>(bytes_of_slot) * static_cast<double>(slots), "B"),
              si_text(memory_bytes, "B"), memory_bytes / bytes_of_slot);
}

std::string generate_streams(const std::string& spec, const std::string& packer, BinOptions options,
                             int64_t multiple, int64_t memory_bytes, PackedHeader& header,
                             PackedSlots* slots) {
  const LengthSpec drawn = parse_length_spec(spec);
  const std::vector<int64_t> lengths = draw_lengths(drawn);
  const BinPacker& chosen = find_bin_packer(packer);
  options.seed = drawn.seed;
  set_bins(header, pack_documents(lengths, multiple, chosen, options), options.capacity, multiple);
  header.documents = std::ssize(lengths);
  header.vocab_size = synthetic_vocab;
  if (slots != nullptr) {
    check_slots_fit(header.slot_offsets().back(), memory_bytes);
    *slots =
        fill_slots(header, 0, header.bin_count(), synthetic_tokens(drawn.seed, synthetic_vocab));
  }
  return to_string(drawn) + " " + chosen.name;
}

Documents unpack(const PackedHeader& header, const PackedSlots& slots) {
  if (header.hidden_size > 0)
    throw_usage("packed embeddings of width {} cannot be unpacked into tokens", header.hidden_size);
  std::vector<std::span<const int32_t>> parts(header.documents);
  std::vector<bool> seen(parts.size(), false);
  const std::vector<int64_t> offsets = header.slot_offsets();
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    for (size_t i = 0; i + 1 < real.size(); ++i) {
      const size_t document = header.documents_of(b)[i];
      if (seen[document])
        throw_usage("document {} is in two segments, the second of them segment {} of bin {}",
                    document, i, b);
      seen[document] = true;
      const size_t begin = offsets[b] + padded[i];
      parts[document] = std::span(slots.ids).subspan(begin, real[i + 1] - real[i]);
    }
  }
  Documents documents;
  documents.vocab_size = header.vocab_size;
  documents.tokenizer = header.tokenizer;
  documents.names = header.names;
  RaggedTokens all;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!seen[i]) throw_usage("document {} of {} is in no bin", i, header.documents);
    all.tokens.insert(all.tokens.end(), parts[i].begin(), parts[i].end());
    all.offsets.push_back(std::ssize(all.tokens));
  }
  if (!header.bins.prefixes.empty()) all = separated_tokens(forest_of(header.bins.prefixes), all);
  documents.tokens = std::move(all.tokens);
  documents.offsets = std::move(all.offsets);
  return documents;
}

std::string unpack_file(Communicator& comm, const std::string& from, const std::string& to,
                        const Provenance& provenance, Outputs& outputs) {
  OutputFile output(comm, to);
  const PackedHeader header = read_packed_header(comm, from);
  const PackedSlots slots = read_packed_slots(comm, from, header, 0, header.bin_count());
  Documents documents;
  run_agreed(comm, "unpacking " + from, [&] { documents = unpack(header, slots); });
  write_documents(output, documents, provenance);
  outputs.add(std::move(output));
  return fmt::format("# {} documents, {} tokens in {} bins -> {}\n", documents.count(),
                     documents.total(), header.bin_count(), to);
}

std::vector<int64_t> split_bins(const PackedHeader& header, int parts) {
  const std::vector<int64_t> offsets = header.slot_offsets();
  std::vector<int64_t> first;
  for (int64_t p = 0; p < parts; ++p)
    first.push_back(
        std::lower_bound(offsets.begin(), offsets.end() - 1, offsets.back() * p / parts) -
        offsets.begin());
  first.front() = 0;
  first.push_back(header.bin_count());
  return first;
}

}  // namespace gyre
