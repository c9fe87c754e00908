#pragma once
// The arithmetic that closed forms share: bytes of rows and heads, copies for messages.

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Bytes of `rows` rows of `heads` heads in a message.
int64_t wire(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// The same where they lie.
int64_t stored(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// Bytes of the copy that a message of `heads` of an array's `all` heads needs.
int64_t copy(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads, int64_t all);
/// Copies of a d_kv that is sent from an array of its heads, and of one that is added.
int64_t hop_copies(const FormContext& c, int64_t sent_rows, int64_t added_rows, int64_t heads);
/// Rows of `owner` that `reader` sees.
int64_t needed(const FormContext& c, int reader, int owner);
/// Pairs of the rank's own queries, each times its query heads; none where visible_pairs_of has
/// none.
std::optional<int64_t> own_pairs(const FormContext& c);

}  // namespace gyre
