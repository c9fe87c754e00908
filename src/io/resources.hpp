#pragma once
// Resources that files need: regular files to read, memory to hold them, disk space to write them.
// Errors name the file, what is needed and what is available.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace gyre {

/// Throws a usage error unless `path` is a readable regular file. It does not open the path:
/// opening a pipe waits for its writer, and a device never ends.
void require_regular_file(const std::string& path);

/// Throws "cannot read PATH: ..." for an errno: a usage error if the user named a wrong file, a
/// runtime error if the system could not open or read it.
[[noreturn]] void throw_unreadable(const std::string& path, int error);

/// Passes the bytes of a regular file to `take`, block by block. Throws as the two above.
void read_blocks(const std::string& path, const std::function<void(std::string_view)>& take);

/// Reads a text file. Throws as read_blocks(), and a usage error for a file larger than `most`
/// bytes; `wanted`: what it should be.
std::string read_text_file(const std::string& path, const std::string& wanted,
                           int64_t most = int64_t{1} << 24);

/// Throws a runtime error if `what`, of `count` elements of `width` bytes, exceeds this machine's
/// memory.
void require_memory(const std::string& what, int64_t count, int64_t width);

/// Throws a runtime error if fewer than `bytes` are free where the new file `path` would be.
void require_space(const std::string& path, int64_t bytes);

/// Reserves disk space for the first `bytes` of an existing file, whose size stays the same, for
/// later writes. Throws a runtime error if there is not enough, or if a file may not be so large
/// (ulimit -f). If the file system cannot reserve, the free space must suffice.
void reserve_space(const std::string& path, int64_t bytes);

/// Releases the space reserved after the end of a file that every rank has closed.
void release_space(const std::string& path);

}  // namespace gyre
