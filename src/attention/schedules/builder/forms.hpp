#pragma once
// Shared arithmetic of closed forms: bytes of rows and heads, copies for messages.

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Bytes of `rows` rows of `heads` heads in a message.
int64_t wire(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// Bytes of `rows` rows of `heads` heads in memory.
int64_t stored(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// Bytes of the copy that a message of `heads` of an array's `all` heads needs.
int64_t copy(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads, int64_t all);
/// Bytes of the copies for a d_kv sent from an array of its heads, and for one that is added.
int64_t hop_copies(const FormContext& c, int64_t sent_rows, int64_t added_rows, int64_t heads);
/// Number of rows of `owner` that `reader` sees.
int64_t needed(const FormContext& c, int reader, int owner);
/// Pairs of the rank's own queries, times query heads; nothing where visible_pairs_of returns
/// nothing.
std::optional<int64_t> own_pairs(const FormContext& c);

}  // namespace gyre
