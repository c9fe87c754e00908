#include "io/resources.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// Free bytes on the file system of an existing path, if it reports them.
std::optional<int64_t> free_bytes(const std::string& path) {
  struct statvfs status;
  if (statvfs(path.c_str(), &status) != 0 || status.f_blocks == 0) return {};
  return static_cast<int64_t>(status.f_bavail * status.f_frsize);
}

[[noreturn]] void refuse(const std::string& path, int64_t needed, int64_t free,
                         const std::string& why) {
  throw_runtime("no space left for '{}': at least {} bytes are needed, {} are free{}", path, needed,
                free, why);
}

void require_permitted_size(const std::string& path, int64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      limit.rlim_cur >= static_cast<rlim_t>(bytes))
    return;
  throw_runtime(
      "no space left for '{}': at least {} bytes are needed, files are limited to {} (ulimit -f)",
      path, bytes, limit.rlim_cur);
}

int64_t allocated_bytes(int file) {
  struct stat status {};
  return fstat(file, &status) == 0 ? int64_t{512} * status.st_blocks : 0;
}

}  // namespace

void throw_unreadable(const std::string& path, int error) {
  for (const int users : {ENOENT, EACCES, EPERM, ENOTDIR, ELOOP, ENAMETOOLONG, EISDIR})
    if (error == users) throw_usage("cannot read '{}': {}", path, std::strerror(error));
  throw_runtime("cannot read '{}': {}", path, std::strerror(error));
}

void require_regular_file(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) throw_unreadable(path, error ? error.value() : ENOENT);
  if (std::filesystem::is_directory(status)) throw_usage("cannot read '{}': it is a folder", path);
  if (!std::filesystem::is_regular_file(status))
    throw_usage("cannot read '{}': it is no regular file", path);
  if (access(path.c_str(), R_OK) != 0) throw_unreadable(path, errno);
}

void read_blocks(const std::string& path, const std::function<void(std::string_view)>& take) {
  require_regular_file(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"),
                                                             std::fclose);
  if (file == nullptr) throw_unreadable(path, errno);
  std::vector<char> block(size_t{1} << 20);
  while (true) {
    const WaitScope scope("reading " + path);  // per block: a whole file may time out
    errno = 0;
    const size_t count = std::fread(block.data(), 1, block.size(), file.get());
    if (std::ferror(file.get()) != 0) throw_unreadable(path, errno);
    if (count == 0) return;
    take({block.data(), count});
  }
}

std::string read_text_file(const std::string& path, const std::string& wanted, int64_t most) {
  require_regular_file(path);
  std::error_code none;
  if (const auto bytes = std::filesystem::file_size(path, none);
      !none && bytes > static_cast<uintmax_t>(most))
    throw_usage("{}: {} bytes; wanted: {}, at most {} bytes", path, bytes, wanted, most);
  std::string text;
  read_blocks(path, [&](std::string_view block) { text += block; });
  return text;
}

void require_memory(const std::string& what, int64_t count, int64_t width) {
  const int64_t memory = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  int64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(count, width, &bytes);
  if (!overflow && bytes <= memory) return;
  throw_runtime("{} needs {} bytes of memory; this machine has {}", what,
                overflow ? "more than 2^63" : std::to_string(bytes), memory);
}

void require_space(const std::string& path, int64_t bytes) {
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  const std::optional<int64_t> free = free_bytes(folder);
  if (free && *free < bytes) refuse(path, bytes, *free, "");
}

void reserve_space(const std::string& path, int64_t bytes) {
  require_permitted_size(path, bytes);
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (file < 0) throw_runtime("cannot write '{}': {}", path, std::strerror(errno));
  const std::optional<int64_t> free = free_bytes(path);
  const int64_t needed = bytes - allocated_bytes(file);
  int result = 0;
  do {
    result = fallocate(file, FALLOC_FL_KEEP_SIZE, 0, bytes);
  } while (result != 0 && errno == EINTR);
  const int error = result == 0 ? 0 : errno;
  close(file);
  if (error == 0) return;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    refuse(path, needed, free.value_or(0),
           error == ENOSPC ? "" : fmt::format(" ({})", std::strerror(error)));
  if (free && *free < needed) refuse(path, needed, *free, "");
}

void release_space(const std::string& path) {
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);  // updates network file systems
  if (file < 0) return;
  struct stat status {};
  if (fstat(file, &status) == 0 && allocated_bytes(file) > status.st_size) {
    [[maybe_unused]] const int result = ftruncate(file, status.st_size);
  }
  close(file);
}

}  // namespace gyre
