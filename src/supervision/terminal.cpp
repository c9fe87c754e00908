#include "supervision/terminal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

namespace gyre {
namespace {

constexpr int usual_columns = 80;  // of a terminal that does not say
constexpr std::array launchers = {"mpiexec", "mpirun", "orterun", "prterun"};

int columns_of(int descriptor) {
  if (isatty(descriptor) != 1) return 0;
  winsize size{};
  return ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : usual_columns;
}

bool is_launcher(int process) {
  std::ifstream file(fmt::format("/proc/{}/comm", process));
  std::string name;
  std::getline(file, name);
  return std::ranges::any_of(launchers, [&](const char* one) { return name.starts_with(one); });
}

/// 0 if there is none.
int parent_of(int process) {
  std::ifstream file(fmt::format("/proc/{}/status", process));
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("PPid:")) return std::stoi(line.substr(5));
  return 0;
}

}  // namespace

int stderr_columns() {
  if (isatty(STDERR_FILENO) == 1) return columns_of(STDERR_FILENO);
  int process = getppid();
  while (process > 1 && !is_launcher(process)) process = parent_of(process);
  if (process <= 1) return 0;
  // Without O_NONBLOCK, a pipe that nobody reads would be waited for.
  const int shown = open(fmt::format("/proc/{}/fd/2", process).c_str(),
                         O_WRONLY | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
  if (shown < 0) return 0;
  const int columns = columns_of(shown);
  close(shown);
  return columns;
}

}  // namespace gyre
