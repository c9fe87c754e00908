#include "io/outputs.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "comm/agree.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

void Outputs::add(OutputFile file) {
  if (auto guard = file.take_guard()) files_.push_back(std::move(guard));
}

void Outputs::add_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  texts_.push_back(write_temporary(path, text));
}

std::vector<std::string> Outputs::name_as_invalid() {
  std::vector<std::string> names;
  for (const auto& guard : files_) names.push_back(guard->name_as_invalid());
  return names;
}

void Outputs::publish(const std::string& text) {
  Watchdog::begin_to_finish();
  HostStream stream;
  world_.barrier(stream, "all ranks before the outputs get their names")->wait();
  run_on_root(world_, "naming the outputs", [&] {
    for (auto* guards : {&files_, &texts_})
      for (const auto& guard : std::exchange(*guards, {})) guard->commit();
    std::fputs(text.c_str(), stdout);
    flush_output();
  });
}

void flush_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw_runtime("cannot write to standard output: {}", std::strerror(errno));
}

}  // namespace gyre
