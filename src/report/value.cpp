#include "report/value.hpp"

#include <fmt/ranges.h>

#include <array>
#include <cmath>

namespace gyre {

std::string to_text(const Value& value) {
  if (const double* number = std::get_if<double>(&value); number && std::isnan(*number))
    return "n/a";
  return std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
}

std::vector<std::string> texts_of(const Fields& fields) {
  std::vector<std::string> texts;
  for (const auto& [name, value] : fields) {
    std::string shown = to_text(value);
    if (shown.empty() || shown.find_first_of(" \t\n") != std::string::npos)
      shown = '"' + shown + '"';
    texts.push_back(fmt::format("{}={}", name, shown));
  }
  return texts;
}

std::string to_text(const Fields& fields) {
  return fmt::format("{}", fmt::join(texts_of(fields), " "));
}

std::string wrapped(const std::string& first, const std::string& next,
                    std::vector<std::string> pieces, const std::string& between) {
  constexpr size_t most = 119;
  std::string text, line = first;
  bool is_empty = true;
  const auto end_line = [&] {
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    line = next;
    is_empty = true;
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::string piece = pieces[i] + (i + 1 < pieces.size() ? between : "");
    const size_t shown = piece.find_last_not_of(' ') + 1;
    const bool fits_alone = next.size() + shown <= most;
    if (!is_empty && fits_alone && line.size() + shown > most) end_line();
    for (size_t cut = 0; line.size() + piece.size() > most + 1; piece.erase(0, cut + 1)) {
      cut = line.size() > most ? std::string::npos : piece.rfind(' ', most - line.size());
      if (cut == std::string::npos && is_empty) break;  // a word of more than a line
      line += cut == std::string::npos ? "" : piece.substr(0, cut);
      end_line();
    }
    line += piece;
    is_empty = false;
  }
  end_line();
  return text;
}

std::string si_text(double value, const std::string& unit) {
  constexpr std::array prefixes = {"n", "u", "m", "", "k", "M", "G", "T", "P", "E"};
  if (!std::isfinite(value)) return fmt::format("{} {}", value, unit);
  size_t i = 3;
  // Three digits are shown, so a value that rounds to 1000 takes the next prefix.
  for (; std::abs(value) >= 999.5 && i + 1 < prefixes.size(); ++i) value /= 1000;
  for (; value != 0 && std::abs(value) < 0.9995 && i > 0; --i) value *= 1000;
  const std::string name = prefixes.at(i) + unit;
  return fmt::format("{:.3g}{}{}", value, name.empty() ? "" : " ", name);
}

std::string count_text(int64_t count, const std::string& noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::vector<std::string> ranges_text(const std::vector<int>& numbers) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    ranges.push_back(last == i ? fmt::format("{}", numbers[i])
                               : fmt::format("{}-{}", numbers[i], numbers[last]));
    i = last + 1;
  }
  return ranges;
}

}  // namespace gyre
