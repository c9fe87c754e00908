#pragma once
// Which heads a rank gets when ranks exchange tokens for heads (DeepSpeed Ulysses, arXiv
// 2309.14509).
//
// Query heads are dealt evenly; a rank gets the KV heads that its query heads read. A KV head which
// several ranks read is sent to each, and their gradients are added in rank order. With more ranks
// than query heads the last ranks get none and only send and receive.
//
//     6 query heads, 2 KV heads (group 3)      cp = 4           cp = 8
//     rank                                     0  1  2  3       0  1  2  3  4  5  6  7
//     query heads                              01 23 4  5       0  1  2  3  4  5  -  -
//     KV heads                                 0  01 1  1       0  0  0  1  1  1  -  -

#include <cstdint>

namespace gyre {

/// Query heads or KV heads [begin, begin + count) of all.
struct HeadRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

/// The query heads of member `member` of `members`: dealt evenly, one more for each of the first
/// ones if they do not divide. May be none.
HeadRange dealt_heads(int64_t heads, int members, int member);
/// The KV heads that query heads read, each of which serves `group` of them.
HeadRange kv_heads_read(HeadRange q, int64_t group);
/// KV heads that all members read together; one that several read counts for each. More than
/// kv_heads: some are replicated.
int64_t kv_heads_dealt(int64_t heads, int64_t kv_heads, int members);

}  // namespace gyre
