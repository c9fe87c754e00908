#include "apps/common/mask_options.hpp"

#include <fmt/format.h>

#include "attention/masks/registry.hpp"
#include "report/options.hpp"

namespace gyre {

MaskRule MaskOptions::of(std::span<const int64_t> lengths) const {
  return window > 0 ? MaskRule(MaskKind::causal, window) : parse_mask(mask).of(lengths);
}

MaskRule MaskOptions::of_offsets(std::span<const int64_t> offsets) const {
  std::vector<int64_t> lengths;
  for (size_t d = 0; d + 1 < offsets.size(); ++d) lengths.push_back(offsets[d + 1] - offsets[d]);
  return of(lengths);
}

LayoutOptions weighed_by(LayoutOptions options, const MaskRule& mask,
                         std::span<const int64_t> offsets) {
  if (mask.plain_causal()) return options;
  options.pairs = [&mask, offsets](int64_t document, int64_t queries) {
    const size_t d = document;
    return DocumentMask(mask, document, offsets[d + 1] - offsets[d]).pairs(queries);
  };
  return options;
}

void declare_mask_options(CLI::App& app, MaskOptions& o) {
  add_option(app, {"--mask", "Inside a document: " + mask_choices()}, o.mask);
  add_size_option(app, {"--window", "For --mask causal,window=N; 0: none"}, o.window);
}

void check_mask_options(const MaskOptions& o, ConfigErrors& errors) {
  try {
    parse_mask(o.mask);
  } catch (const Error& error) {
    errors.add("{}", error.what());
  }
  if (o.window > 0 && o.mask != "causal") errors.add("--window {} needs --mask causal", o.window);
}

}  // namespace gyre
