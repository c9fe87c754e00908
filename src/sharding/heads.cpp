#include "sharding/heads.hpp"

#include <algorithm>

#include "core/index.hpp"

namespace gyre {

HeadRange assigned_heads(int64_t heads, int members, int member) {
  const int64_t each = heads / members, more = heads % members;
  return {member * each + std::min<int64_t>(member, more), each + (member < more ? 1 : 0)};
}

HeadRange kv_heads_read(HeadRange q, int64_t group) {
  if (q.count == 0) return {};
  const int64_t begin = q.begin / group, end = ceil_div(q.end(), group);
  return {begin, end - begin};
}

int64_t kv_heads_assigned(int64_t heads, int64_t kv_heads, int members) {
  int64_t read = 0;
  for (int m = 0; m < members; ++m)
    read += kv_heads_read(assigned_heads(heads, members, m), heads / kv_heads).count;
  return read;
}

}  // namespace gyre
