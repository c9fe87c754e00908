// A picture of a layout: the owner of each slot, the rank that computes each part of the attention
// mask, and the ranks whose keys each rank needs.

#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "apps/shard/report.hpp"
#include "report/svg.hpp"
#include "sharding/cost.hpp"

namespace gyre {
namespace {

constexpr double margin = 24, bar_width = 840, mask_size = 300, bars_width = 240, matrix_size = 220,
                 gap = 40, row_height = 430;
constexpr int64_t samples = 400;

using svg::color;
using svg::rect;
using svg::text;

/// A layout of a stream and the boundaries that it was made for.
struct LayoutPicture {
  const Layout& layout;
  SegmentBounds bounds;
};

/// Content of a slot of the stream.
struct SlotView {
  int owner = 0;
  int64_t segment = -1;  ///< -1: padding of the layout
  bool real = false;
  friend bool operator==(const SlotView&, const SlotView&) = default;
};

std::vector<SlotView> view_slots(const LayoutPicture& picture) {
  const std::vector<Owner> owners = slot_owners(picture.layout);
  const std::vector<int32_t> segments = segment_ids(picture.bounds.padded);
  std::vector<SlotView> slots;
  slots.reserve(owners.size());
  for (size_t s = 0; s < owners.size(); ++s) {
    SlotView view{owners[s].rank, -1, false};
    if (s < segments.size()) {
      view.segment = segments[s];
      const int64_t position = static_cast<int64_t>(s) - picture.bounds.begin(view.segment);
      view.real = position < picture.bounds.real_length(view.segment);
    }
    slots.push_back(view);
  }
  return slots;
}

/// Calls f(first slot, slot after the last, view) for each run of equal sampled slots.
template <class F>
void for_each_run(const std::vector<SlotView>& slots, F f) {
  const int64_t n = std::ssize(slots), points = std::min(n, samples);
  int64_t begin = 0;
  for (int64_t i = 0; i < points; ++i) {
    const SlotView& view = slots[i * n / points];
    const int64_t next = (i + 1) * n / points;
    if (i + 1 < points && slots[next] == view) continue;
    f(begin, next, view);
    begin = next;
  }
}

std::string owner_bar(const LayoutPicture& picture, const std::vector<SlotView>& slots, double x,
                      double y) {
  const double unit = bar_width / std::max<double>(1, slots.size());
  std::string svg;
  for_each_run(slots, [&](int64_t begin, int64_t end, const SlotView& view) {
    svg += rect(x + unit * begin, y, unit * (end - begin), 22,
                color(view.owner, picture.layout.cp()), view.real ? 1 : 0.25);
  });
  for (const int32_t bound : picture.bounds.padded)
    svg += rect(x + unit * bound - 0.4, y + 22, 0.8, 6, "#222");
  return svg +
         text(x, y + 40, 11, "start", "who owns which slots (pale: padding; ticks: segments)");
}

std::string mask_picture(const LayoutPicture& picture, const std::vector<SlotView>& slots, double x,
                         double y) {
  const double unit = mask_size / std::max<double>(1, slots.size());
  std::string svg = rect(x, y, mask_size, mask_size, "#f2f2f2");
  for_each_run(slots, [&](int64_t begin, int64_t end, const SlotView& view) {
    if (!view.real) return;
    const double left = x + unit * picture.bounds.begin(view.segment);
    const double top = y + unit * begin, bottom = y + unit * end;
    svg += fmt::format(
        "<polygon points=\"{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}\" "
        "fill=\"{}\"/>\n",
        left, top, x + unit * begin, top, x + unit * end, bottom, left, bottom,
        color(view.owner, picture.layout.cp()));
  });
  return svg +
         text(x, y + mask_size + 16, 11, "start", "who computes what: queries down, keys across");
}

/// `widest`: of a bar, relative to the mean of its layout.
std::string pair_bars(const Layout& layout, const LayoutCost& cost, double widest, double x,
                      double y) {
  const double mean = static_cast<double>(cost.pairs()) / layout.cp();
  const double height = mask_size / layout.cp();
  const double scale = bars_width / widest / std::max(1.0, mean);
  std::string svg = rect(x, y, bars_width, mask_size, "#f2f2f2");
  for (int r = 0; r < layout.cp(); ++r) {
    const double pairs = cost.ranks[r].pairs;
    const double top = y + height * r;
    // Bars are pale, so that the text on them can be read.
    svg += rect(x, top + 0.1 * height, std::min(bars_width, pairs * scale), 0.8 * height,
                color(r, layout.cp()), 0.6);
    if (layout.cp() <= 16)
      svg += text(x + 4, top + 0.5 * height + 4, 10, "start",
                  fmt::format("rank {}: {:.3f}", r, mean > 0 ? pairs / mean : 1));
  }
  svg += rect(x + mean * scale - 0.5, y, 1, mask_size, "#222");
  return svg +
         text(x, y + mask_size + 16, 11, "start",
              fmt::format("pairs of each rank over the mean; max/mean {:.4f}", cost.pair_ratio()));
}

std::string need_matrix(const Layout& layout, const LayoutCost& cost, double x, double y) {
  const std::vector<std::vector<int64_t>> traffic = kv_traffic(layout);
  const double cell = matrix_size / layout.cp();
  std::string svg = rect(x, y, matrix_size, matrix_size, "#f2f2f2");
  for (int r = 0; r < layout.cp(); ++r)
    for (int s = 0; s < layout.cp(); ++s) {
      const double all = cost.ranks[s].real_tokens;
      const double share = r == s ? 0 : traffic[r][s] / std::max(1.0, all);
      if (r == s)
        svg += rect(x + cell * s, y + cell * r, cell, cell, color(r, layout.cp()));
      else if (share > 0)
        svg += rect(x + cell * s, y + cell * r, cell, cell, "#333", share);
    }
  svg += text(x, y + matrix_size + 16, 11, "start", "row: needs keys of column") +
         text(x, y + matrix_size + 30, 11, "start",
              fmt::format("{:.1f} % of a ring's bytes; most {:.1f} %", 100 * cost.needed_share(),
                          100 * cost.largest_needed_share()));
  constexpr int shades = 5;
  constexpr double width = matrix_size / shades;
  for (int i = 0; i < shades; ++i) {
    const double share = static_cast<double>(i) / (shades - 1), left = x + width * i,
                 top = y + matrix_size + 40;
    svg += rect(left, top, width, 14, "#f2f2f2") + rect(left, top, width, 14, "#333", share) +
           text(left + width / 2, top + 26, 10, "middle", fmt::format("{:.0f} %", 100 * share));
  }
  return svg;
}

/// An SVG with one row per layout:
///   - a bar of the stream, coloured by owner; padding is pale, ticks are segment boundaries
///   - the causal mask with its documents as triangles; a query's row has the colour of its owner
///   - bars of the pairs of each rank against the mean, in one scale for all layouts
///   - a matrix: the shade of row r, column s is the share of rank s's tokens whose keys r needs
/// Long streams are sampled at some 400 slots.
std::string layout_svg(const std::string& title, const std::vector<LayoutPicture>& pictures) {
  const double width = 2 * margin + mask_size + bars_width + matrix_size + 2 * gap;
  const double height = 50 + row_height * pictures.size();
  std::string svg = svg::begin(width, height) + text(margin, 30, 16, "start", title);
  std::vector<LayoutCost> costs;
  double widest = 1.1;
  for (const LayoutPicture& picture : pictures) {
    costs.push_back(layout_cost(picture.layout));
    widest = std::max(widest, 1.05 * costs.back().pair_ratio());
  }
  double y = 50;
  for (const LayoutPicture& picture : pictures) {
    const LayoutCost& cost = costs[&picture - pictures.data()];
    const std::vector<SlotView> slots = view_slots(picture);
    svg += text(margin, y + 14, 14, "start",
                fmt::format("{}, cp = {}", picture.layout.name, picture.layout.cp()));
    svg += owner_bar(picture, slots, margin, y + 24);
    svg += mask_picture(picture, slots, margin, y + 76);
    svg += pair_bars(picture.layout, cost, widest, margin + mask_size + gap, y + 76);
    svg += need_matrix(picture.layout, cost, margin + mask_size + bars_width + 2 * gap, y + 76);
    y += row_height;
  }
  return svg + "</svg>\n";
}

}  // namespace

std::string picture_of_bin(const PackedHeader& header, int64_t bin, const LayoutChoice& layout,
                           const LayoutOptions& options, bool repad) {
  std::deque<ShardingPlan> plans;
  std::deque<BinBounds> bounds;
  std::vector<LayoutPicture> pictures;
  for (const LayoutKind& kind : layout_kinds()) {
    if (!layout.wants(kind.name)) continue;
    ShardingPlan& plan = plans.emplace_back(header, kind, options, repad);
    BinBounds& b = bounds.emplace_back(plan.bounds(bin));
    try {
      pictures.push_back({plan.layout(bin), b.view()});
    } catch (const Error&) {
      if (!layout.several()) throw;  // of several, those that refuse the bin are left out
    }
  }
  const int64_t slots = header.cu_seqlens_padded(bin).back();
  return layout_svg(fmt::format("bin {} of {}: {} segments, {} slots", bin, header.bin_count(),
                                header.documents_of(bin).size(), slots),
                    pictures);
}

}  // namespace gyre
