#include "apps/common/workload_options.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "apps/common/packed_streams.hpp"
#include "attention/masks/registry.hpp"
#include "packing/lengths.hpp"
#include "report/options.hpp"

namespace gyre {
MaskRule MaskOptions::of(std::span<const int64_t> lengths) const {
  MaskRule rule = window > 0 ? MaskRule(MaskKind::causal, window) : parse_mask(mask).of(lengths);
  if (queries == 0) return rule;
  const std::vector<int64_t> offsets = offsets_of(lengths);
  return of_last_queries(rule, offsets, query_offsets_of(offsets));
}

std::vector<int64_t> MaskOptions::offsets_of(std::span<const int64_t> lengths) const {
  std::vector<int64_t> offsets{0};
  for (const int64_t length : parse_mask(mask).documents_of(lengths))
    offsets.push_back(offsets.back() + length);
  return offsets;
}

std::vector<int64_t> MaskOptions::query_offsets_of(std::span<const int64_t> offsets) const {
  if (queries == 0) return {};
  std::vector<int64_t> sums{0};
  for (size_t d = 0; d + 1 < offsets.size(); ++d)
    sums.push_back(sums.back() + std::min(queries, offsets[d + 1] - offsets[d]));
  return sums;
}

bool MaskOptions::selects_keys() const {
  const std::vector<NamedMask>& all = named_masks();
  const auto named = std::ranges::find(all, mask.substr(0, mask.find(',')), &NamedMask::name);
  return named == all.end() ? mask == "selected" : named->selects;
}

LayoutOptions weighed_by(LayoutOptions options, const MaskRule& mask,
                         std::span<const int64_t> offsets) {
  if (mask.plain_causal()) return options;
  if (mask.table != nullptr) {  // may have millions of regions, and is asked often
    auto sums = std::make_shared<std::vector<std::vector<int64_t>>>();
    for (size_t d = 0; d + 1 < offsets.size(); ++d) {
      const DocumentMask document(mask, static_cast<int64_t>(d), offsets[d + 1] - offsets[d]);
      const std::vector<int64_t> keys = document.keys_of_queries();
      std::vector<int64_t>& up_to = sums->emplace_back(1, 0);
      for (const int64_t more : keys) up_to.push_back(up_to.back() + more);
    }
    options.pairs = [sums](int64_t document, int64_t queries) {
      const std::vector<int64_t>& up_to = (*sums)[document];
      return up_to[std::min(queries, std::ssize(up_to) - 1)];
    };
    return options;
  }
  options.pairs = [&mask, offsets](int64_t document, int64_t queries) {
    const size_t d = document;
    return DocumentMask(mask, document, offsets[d + 1] - offsets[d]).pairs(queries);
  };
  return options;
}

void declare_mask_options(OptionTable& table, MaskOptions& o) {
  const AddOptions add(table, "Problem");
  add("--mask", "Mask inside a document: " + mask_choices(), o.mask).in_problem_file();
  add.size("--window", "Keys that a query sees under --mask causal, its own included; 0: no limit",
           o.window)
      .in_problem_file();
  add.size(
         "--queries",
         "Last tokens of each document that have queries, as in chunked prefill, or 1 in decoding; "
         "0: all",
         o.queries)
      .in_problem_file();
}

void check_mask_options(const MaskOptions& o, ConfigErrors& errors) {
  try {
    parse_mask(o.mask);
  } catch (const Error& error) {
    errors.add("{}", error.what());
  }
  if (o.window > 0 && o.mask != "causal") errors.add("--window {} needs --mask causal", o.window);
}

namespace {

double ratio(int64_t a, int64_t b) {
  return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 1;
}

}  // namespace

PrefixForest PrefixChoice::forest_of(const DocumentView& documents, int64_t max_tokens) const {
  if (!share) return separate_documents(documents.offsets);
  return share_prefixes(documents, {min_prefix, max_tokens});
}

void declare_prefix_options(OptionTable& table, PrefixChoice& o) {
  const AddOptions add(table, "Problem");
  add.flag("--share-prefixes",
           "Store what documents begin with in common once: a prompt and its answers", o.share);
  add.size("--min-prefix", "With --share-prefixes: tokens of the shortest prefix that is shared",
           o.min_prefix, 1);
}

void check_prefix_options(const PrefixChoice& o, ConfigErrors& errors) {
  if (!o.share && o.min_prefix != PrefixChoice().min_prefix)
    errors.add("--min-prefix {} needs --share-prefixes", o.min_prefix);
}

std::string savings_text(const PrefixForest& forest) {
  const PrefixSavings s = savings_of(forest);
  return fmt::format(
      "# prefixes  {} documents in {} tree{}: {} tokens instead of {} ({:.2f}x), "
      "{} pairs instead of {} ({:.2f}x)\n",
      s.documents, s.trees, s.trees == 1 ? "" : "s", s.stored_tokens, s.tokens,
      ratio(s.tokens, s.stored_tokens), s.stored_pairs, s.pairs, ratio(s.pairs, s.stored_pairs));
}

PrefixTables tables_of(const PrefixForest& forest) {
  PrefixTables tables;
  if (!forest.shares()) return tables;
  tables.tree_offsets = forest.tree_offsets;
  tables.documents = forest.documents;
  for (const PrefixNode& node : forest.nodes)
    tables.nodes.push_back({node.parent, node.length, node.first_document, node.documents});
  return tables;
}

PrefixForest forest_of(const PrefixTables& tables) {
  PrefixForest forest;
  forest.tree_offsets = tables.tree_offsets;
  forest.documents = tables.documents;
  for (int64_t t = 0; t < tables.trees(); ++t) {
    const size_t first = tables.tree_offsets[t];
    int64_t begin = 0;
    for (const StoredNode& stored : tables.tree(t)) {
      PrefixNode node;
      node.parent = static_cast<int32_t>(stored.parent);
      node.begin = begin;
      node.length = stored.tokens;
      node.first_document = stored.first_document;
      node.documents = stored.documents;
      for (int64_t a = stored.parent; a >= 0;) {
        PrefixNode& ancestor = forest.nodes[first + a];
        if (a == stored.parent) node.position = ancestor.position + ancestor.length;
        ++ancestor.descendants;
        a = ancestor.parent;
      }
      begin += node.length;
      forest.nodes.push_back(node);
    }
  }
  return forest;
}

void declare_generated(OptionTable& table, std::string& generate, const std::string& more) {
  std::string text = "Draw lengths of documents: dist=NAME,count=N (or tokens=N),seed=N and, of";
  for (const LengthDistribution& d : length_distributions())
    text += fmt::format(" {}: {};", d.name, fmt::join(d.keys, ","));
  text.back() = '.';
  AddOptions(table, "Problem")("--gen", text + more, generate)
      .show(Shown::never)  // the source shows it, with all its defaults
      .names_file([](const std::string& spec) { return parse_length_spec(spec).file; });
}

std::vector<int64_t> generated_lengths(const std::string& spec, int64_t capacity,
                                       std::string& origin) {
  PackedHeader header;
  const bool draws = find_length_distribution(parse_length_spec(spec).distribution).draws;
  origin = generate_streams(spec, draws ? "first-fit-shuffle" : "next-fit", {.capacity = capacity},
                            1, 0, header, nullptr);
  std::vector<int64_t> lengths;
  if (header.bin_count() == 0) throw_usage("--gen {}: there is no document", spec);
  const auto cu_seqlens = header.cu_seqlens(0);
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i)
    lengths.push_back(cu_seqlens[i + 1] - cu_seqlens[i]);
  return lengths;
}

void check_head_groups(int heads, const char* option, int shared, ConfigErrors& errors) {
  if (heads % shared != 0)
    errors.add("--heads {} is not a multiple of {} {}; the nearest is {}", heads, option, shared,
               std::max(1, (heads + shared / 2) / shared) * shared);
}

void declare_head_widths(OptionTable& table, int& v_head_dim, int& shared_key_dim) {
  const AddOptions add(table, "Problem");
  add("--v-head-dim", "Elements of a head of values and of the output; 0: --head-dim", v_head_dim,
      0, max_head_dim)
      .in_problem_file();
  add("--shared-key-dim",
      "Elements at the end of a key that all KV heads share, sent once (MLA: the rotary part)",
      shared_key_dim, 0, max_head_dim)
      .in_problem_file();
}

void check_shared_keys(int shared_key_dim, int head_dim, ConfigErrors& errors) {
  if (shared_key_dim >= head_dim)
    errors.add("--shared-key-dim {}: heads of keys have {} elements; at most {} can be shared",
               shared_key_dim, head_dim, head_dim - 1);
}

}  // namespace gyre
