#pragma once
// What files need of the machine: regular files to read, memory to hold them, space to write them.
// The errors name the file, what is needed and what there is.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace gyre {

/// Throws a usage error unless `path` is a regular file that may be read. Asks without opening:
/// opening a pipe waits for its writer, and a device never ends.
void require_regular_file(const std::string& path);

/// Throws "cannot read PATH: ..." for an errno: a usage error when the user named a wrong file, a
/// runtime error when the system could not open or read it.
[[noreturn]] void throw_unreadable(const std::string& path, int error);

/// Hands the bytes of a regular file to `take`, block by block. Errors: as above.
void read_blocks(const std::string& path, const std::function<void(std::string_view)>& take);

/// The bytes of a file of text. Throws a usage error that names a file that cannot be read, is not
/// regular, or is larger than `most` bytes; `wanted`: what it should be.
std::string read_text_file(const std::string& path, const std::string& wanted,
                           int64_t most = int64_t{1} << 24);

/// Throws a runtime error when `what`, of `count` elements of `width` bytes, does not fit into this
/// machine's memory.
void require_memory(const std::string& what, int64_t count, int64_t width);

/// Throws a runtime error when fewer than `bytes` are free where the new file `path` would be.
void require_space(const std::string& path, int64_t bytes);

/// Reserves space for the first `bytes` of an existing file, whose size stays: whoever writes them
/// later finds room. Throws a runtime error when there is not enough, or when a file may not be so
/// large (ulimit -f). Where a file system cannot reserve, compares with what is free.
void reserve_space(const std::string& path, int64_t bytes);

/// Gives back what is reserved behind the end of a file that everybody has closed.
void release_space(const std::string& path);

}  // namespace gyre
