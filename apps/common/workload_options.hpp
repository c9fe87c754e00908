#pragma once
// Options of a workload that several apps have: masks (--mask, --window, --queries), shared prefixes
// (--share-prefixes, --min-prefix), drawn lengths (--gen), heads and element types.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/mask.hpp"
#include "core/dtype.hpp"
#include "core/error.hpp"
#include "io/schemas/prefix_tables.hpp"
#include "packing/prefix_forest.hpp"
#include "report/result.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// The mask of each document, and which of its tokens have queries.
struct MaskOptions {
  std::string mask = "causal";  ///< a name and its numbers; see attention/masks/registry.hpp
  int64_t window = 0;           ///< shorthand for the window of a causal mask
  int64_t queries = 0;          ///< last tokens of each document that have queries; 0: all
  bool operator==(const MaskOptions&) const = default;

  /// Offsets of the documents that the mask is of: of these lengths, or one of all of them if the
  /// mask joins them.
  std::vector<int64_t> offsets_of(std::span<const int64_t> lengths) const;
  /// Prefix sums of the queries of these documents; empty: all tokens have one.
  std::vector<int64_t> query_offsets_of(std::span<const int64_t> offsets) const;
  /// The mask of documents of these lengths.
  MaskRule of(std::span<const int64_t> lengths) const;
  /// Whether each query selects keys of its own, by this mask or that of a file.
  bool selects_keys() const;
};

/// These options, with the visible pairs of `mask` as cost. `mask` and `offsets` must outlive them.
LayoutOptions weighed_by(LayoutOptions options, const MaskRule& mask,
                         std::span<const int64_t> offsets);

void declare_mask_options(OptionTable& table, MaskOptions& o);
void check_mask_options(const MaskOptions& o, ConfigErrors& errors);

struct PrefixChoice {
  bool share = false;
  int64_t min_prefix = 64;

  /// The trees of documents; without sharing, each document is a tree. A tree of several documents
  /// has at most `max_tokens`.
  PrefixForest forest_of(const DocumentView& documents, int64_t max_tokens) const;
};

void declare_prefix_options(OptionTable& table, PrefixChoice& o);
void check_prefix_options(const PrefixChoice& o, ConfigErrors& errors);

/// A "#" line with the savings of sharing.
std::string savings_text(const PrefixForest& forest);

/// Convert between trees and their tables in files. Precondition: the tables were checked.
PrefixTables tables_of(const PrefixForest& forest);
PrefixForest forest_of(const PrefixTables& tables);

/// Adds --gen. Its help lists distributions and their keys, and ends with `more`.
void declare_generated(OptionTable& table, std::string& generate, const std::string& more = "");

/// The document lengths of the first bin of synthetic documents (packing/lengths.hpp) packed into
/// bins of `capacity` slots, in random order if they are drawn. `origin` gets the spec and packer
/// that reproduce them.
std::vector<int64_t> generated_lengths(const std::string& spec, int64_t capacity,
                                       std::string& origin);

/// Adds an error, with the nearest multiple, if key heads do not divide the query heads.
void check_head_groups(int heads, const char* option, int shared, ConfigErrors& errors);
/// Largest values of --heads and --kv-heads, of --head-dim, and of --threads.
inline constexpr int max_heads = 4096, max_head_dim = 1024, max_threads = 1024;
/// Declares --v-head-dim and --shared-key-dim.
void declare_head_widths(OptionTable& table, int& v_head_dim, int& shared_key_dim);
/// Adds an error unless a head of keys has more elements than those that all heads share.
void check_shared_keys(int shared_key_dim, int head_dim, ConfigErrors& errors);

/// The named element type of activations: f32 or bf16.
inline DType activation_type(const std::string& name) {
  return name == "bf16" ? DType::bf16 : DType::f32;
}

/// Names of activation_types.
inline std::vector<std::string> activation_type_names() {
  std::vector<std::string> names;
  for (const DType type : activation_types) names.emplace_back(name_of(type));
  return names;
}

}  // namespace gyre
