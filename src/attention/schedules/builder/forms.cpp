#include "attention/schedules/builder/forms.hpp"

#include "attention/closed_forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"

namespace gyre {

int64_t wire(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads) {
  const Slice slice = {0, 0, rows, {0, heads}};
  return wire_bytes(kind, slice, c.problem.heads, c.types);
}

int64_t stored(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads) {
  const PlanArray array = {kind, {{0, LocalToken(0), rows}}, {0, heads}};
  return stored_bytes(array, c.problem.heads, c.types);
}

int64_t copy(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads, int64_t all) {
  const bool same_types = c.types.stored(kind) == c.types.on_wire(kind);
  const bool lies =
      heads == all && same_types && !sends_shared_keys_once(kind, heads, c.problem.heads);
  return lies ? 0 : wire(c, kind, rows, heads);
}

int64_t kv_copies(const FormContext& c, int64_t sent_rows, int64_t received_rows, int64_t heads) {
  return copy(c, ArrayKind::kv, sent_rows + received_rows, heads, heads);
}

int64_t hop_copies(const FormContext& c, int64_t sent_rows, int64_t added_rows, int64_t heads) {
  return copy(c, ArrayKind::d_kv, sent_rows, heads, heads) +
         wire(c, ArrayKind::d_kv, added_rows, heads);
}

int64_t needed(const FormContext& c, int reader, int owner) {
  int64_t rows = 0;
  for (const RankRows& run : needed_rows(c.problem, reader, owner)) rows += run.length;
  return rows;
}

std::optional<int64_t> own_pairs(const FormContext& c) {
  const auto pairs = visible_pairs_of(c.problem, c.rank);
  return pairs ? std::optional(*pairs * c.problem.heads.heads) : std::nullopt;
}

}  // namespace gyre
