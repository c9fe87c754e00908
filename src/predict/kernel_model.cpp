#include "predict/kernel_model.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.hpp"

namespace gyre {
namespace {

double products_in(const ModelledCall& call) {
  return flops_of_pair(call.pass, call.d_q, call.d_kv, 1, 1) / 2;
}

/// The mean width of the call's products: head_dim if values are as wide as keys.
double mean_dim(const ModelledCall& call) {
  return flops_of_pair(call.pass, call.d_q, call.d_kv, call.head_dim, call.value_dim) /
         (2 * products_in(call));
}

/// Time of the call by one surface, as if the call had the surface's head dimension.
ModelledTime time_on(const KernelSurface& surface, const ModelledCall& call) {
  const double all_products = call.pass == Pass::forward ? 2 : 5;
  const double share = products_in(call) / all_products;
  const double flops_of_pair = 2 * all_products * surface.head_dim;
  ModelledTime time{surface.launch_s + surface.merge_s * static_cast<double>(call.merged), 0};
  double rows = 0, keys = 0, rate = 0;
  bool outside = false;
  for (const Rectangle& r : call.rectangles) {
    const double these_rows = r.q_length;
    const double these_keys = r.k_length;
    if (these_rows != rows || these_keys != keys) {  // most are of the size of the one before
      rows = these_rows;
      keys = these_keys;
      rate = surface.rate(rows, keys);
      outside = surface.outside(rows, keys);
    }
    const double seconds = share * static_cast<double>(call.query_heads) *
                           (flops_of_pair * static_cast<double>(r.pairs()) / rate +
                            surface.diagonal_s * static_cast<double>(mask_edge(r)));
    time.seconds += seconds;
    if (outside) time.extrapolated += seconds;
  }
  return time;
}

}  // namespace

double kernel_flops(const ModelledCall& call) {
  return flops_of_pair(call.pass, call.d_q, call.d_kv, call.head_dim, call.value_dim) *
         static_cast<double>(total_pairs(call.rectangles) * call.query_heads);
}

std::string KernelModel::why_not(Pass pass, DType type) const {
  if (surfaces.empty()) return "";
  std::set<std::string> known;
  for (const KernelSurface& s : surfaces) {
    if (s.pass == pass && s.type == type) return "";
    known.insert(fmt::format("{} {}", name_of(s.type), name_of(s.pass)));
  }
  return fmt::format("no kernel of {} {}; the machine has {}", name_of(type), name_of(pass),
                     fmt::join(known, ", "));
}

std::string KernelModel::why_not_selected() const {
  return surfaces.empty() ? ""
                          : "its rates are of rectangles of queries and keys, none of a kernel "
                            "that gathers the keys that a query selects";
}

bool KernelModel::measured(Pass pass, DType type, int64_t head_dim) const {
  return std::any_of(surfaces.begin(), surfaces.end(), [&](const KernelSurface& s) {
    return s.pass == pass && s.type == type && s.head_dim == head_dim;
  });
}

bool KernelModel::merges() const {
  return std::any_of(surfaces.begin(), surfaces.end(),
                     [](const KernelSurface& s) { return s.merge_s > 0; });
}

ModelledTime KernelModel::time(const ModelledCall& call) const {
  if (surfaces.empty()) return {kernel_flops(call) / flops_per_s, 0};
  const double dim = mean_dim(call);
  const KernelSurface *below = nullptr, *above = nullptr;
  for (const KernelSurface& s : surfaces) {
    if (s.pass != call.pass || s.type != call.type) continue;
    if (s.head_dim <= dim && (below == nullptr || s.head_dim > below->head_dim)) below = &s;
    if (s.head_dim >= dim && (above == nullptr || s.head_dim < above->head_dim)) above = &s;
  }
  if (below == nullptr && above == nullptr) throw_usage("{}", why_not(call.pass, call.type));
  if (below == nullptr || above == nullptr) {
    // The FLOPs of this head dimension at the rates of the nearest one.
    const KernelSurface& nearest = below != nullptr ? *below : *above;
    const ModelledTime time = time_on(nearest, call);
    const double more = dim / nearest.head_dim;
    const double others = nearest.launch_s + nearest.merge_s * static_cast<double>(call.merged);
    const double seconds = others + (time.seconds - others) * more;
    return {seconds, seconds};
  }
  const ModelledTime low = time_on(*below, call);
  if (below->head_dim == above->head_dim) return low;
  const ModelledTime high = time_on(*above, call);
  const double share = (dim - below->head_dim) / (above->head_dim - below->head_dim);
  return {low.seconds + share * (high.seconds - low.seconds),
          low.extrapolated + share * (high.extrapolated - low.extrapolated)};
}

int64_t mask_edge(const Rectangle& r) {
  const Mask& m = r.mask;
  // Number of queries i with i · q_stride + offset < key · k_stride + shift: the first queries.
  const auto before = [&](int64_t key, int64_t shift) {
    const int64_t queries = ceil_div(key * m.k_stride + shift - m.offset, m.q_stride);
    return std::clamp<int64_t>(queries, 0, r.q_length);
  };
  // 0 < end_key(i) < k_length: query i sees key 0, but not key k_length - 1.
  const int64_t ends = m.causal ? before(r.k_length - 1, 0) - before(0, 0) : 0;
  if (m.window == 0) return ends;
  // 0 < begin_key(i) < k_length; begin_key is the end_key of the position `window` earlier.
  return ends + before(r.k_length - 1, m.window) - before(0, m.window);
}

}  // namespace gyre
