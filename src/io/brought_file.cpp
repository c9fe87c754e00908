#include "io/brought_file.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include "core/nearest.hpp"

namespace gyre {
namespace fs = std::filesystem;

std::string find_brought_file(const char* option, const std::string& value, const char* kind,
                              ConfigErrors& errors) {
  std::error_code unreadable;  // the loop then sees no files
  if (value.empty() || fs::path(value).has_parent_path() || fs::exists(value, unreadable))
    return value;
  const fs::path program = fs::read_symlink("/proc/self/exe", unreadable);
  const fs::path folder = program.parent_path() / "../share/gyre/inputs" / kind;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
    const fs::path& file = entry.path();
    if (file.extension() != ".toml" && file.extension() != ".json") continue;
    if (file.stem() == value || file.filename() == value) return fs::canonical(file).string();
    names.push_back(file.stem().string());
  }
  std::ranges::sort(names);
  const std::string near = nearest(value, names);
  if (names.empty())
    errors.add("{} {}: there is no such file, and there are no {} in {}", option, value, kind,
               folder.lexically_normal().string());
  else
    errors.add("{} {}: there is no such file; {} that Gyre brings: {}{}", option, value, kind,
               fmt::join(names, ", "), near.empty() ? "" : "; nearest: '" + near + "'");
  return value;
}

}  // namespace gyre
