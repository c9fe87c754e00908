#include "machine/system_files.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace gyre {

std::string read_small_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  std::string all = file ? text.str() : "";
  all.erase(all.find_last_not_of(" \t\n") + 1);
  return all;
}

std::string value_in(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t sign = line.find_first_of(":=");
    if (sign == std::string::npos) continue;
    std::string key = line.substr(0, sign);
    key.erase(key.find_last_not_of(" \t") + 1);
    if (key != name) continue;
    std::string value = line.substr(sign + 1);
    value.erase(0, value.find_first_not_of(" \t"));
    value.erase(value.find_last_not_of(" \t") + 1);
    if (value.size() > 1 && value.front() == '"' && value.back() == '"')
      value = value.substr(1, value.size() - 2);
    return value;
  }
  return "";
}

std::string chosen_in(const std::string& text) {
  const size_t begin = text.find('['), end = text.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "";
  return text.substr(begin + 1, end - begin - 1);
}

std::string joined_kinds(const std::vector<std::string>& texts) {
  std::vector<std::string> kinds;
  std::string joined;
  for (const std::string& text : texts) {
    if (text.empty() || std::find(kinds.begin(), kinds.end(), text) != kinds.end()) continue;
    joined += (kinds.empty() ? "" : "+") + text;
    kinds.push_back(text);
  }
  return joined;
}

}  // namespace gyre
