#pragma once
// Heads of each rank after ranks exchange tokens for heads (DeepSpeed Ulysses, arXiv 2309.14509).
//
// Query heads are distributed evenly; a rank gets the KV heads that its query heads read. A KV head
// that several ranks read is sent to each; its gradients of these ranks are added in rank order.
// With more ranks than query heads the last ranks get none and only send and receive.
//
//     6 query heads, 2 KV heads (group 3)      cp = 4           cp = 8
//     rank                                     0  1  2  3       0  1  2  3  4  5  6  7
//     query heads                              01 23 4  5       0  1  2  3  4  5  -  -
//     KV heads                                 0  01 1  1       0  0  0  1  1  1  -  -

#include <cstdint>

namespace gyre {

/// The heads [begin, begin + count).
struct HeadRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

/// The query heads of `member`: evenly distributed; if `members` does not divide `heads`, the first
/// members get one more. May be empty.
HeadRange assigned_heads(int64_t heads, int members, int member);
/// The KV heads that query heads `q` read; each serves `group` query heads.
HeadRange kv_heads_read(HeadRange q, int64_t group);
/// Sum over members of the KV heads that each reads; above kv_heads if some are replicated.
int64_t kv_heads_assigned(int64_t heads, int64_t kv_heads, int members);

}  // namespace gyre
