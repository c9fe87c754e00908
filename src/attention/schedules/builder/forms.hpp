#pragma once
// Shared arithmetic of closed forms of schedules: bytes of rows, copies for messages.

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Bytes of `rows` rows of `heads` heads in a message.
int64_t wire(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// Bytes of `rows` rows of `heads` heads in memory.
int64_t stored(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads);
/// Bytes of the copy that a message with `heads` of an array's `all` heads needs; may be 0.
int64_t copy(const FormContext& c, ArrayKind kind, int64_t rows, int64_t heads, int64_t all);
/// Bytes of the copies of a kv exchange that sends and receives all heads of its rows: none, unless
/// heads share elements of their keys.
int64_t kv_copies(const FormContext& c, int64_t sent_rows, int64_t received_rows, int64_t heads);
/// Bytes of the copies of a d_kv exchange that sends all heads of its rows and adds what it gets.
int64_t hop_copies(const FormContext& c, int64_t sent_rows, int64_t added_rows, int64_t heads);
/// Number of rows of `owner` that `reader` needs: needed_rows().
int64_t needed(const FormContext& c, int reader, int owner);
/// Visible pairs of the rank's own queries, times query heads; nullopt if visible_pairs_of() is.
std::optional<int64_t> own_pairs(const FormContext& c);

}  // namespace gyre
