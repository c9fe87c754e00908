#include "io/outputs.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "comm/agree.hpp"
#include "runtime/process.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

Outputs::~Outputs() {
  for (const auto& [path, descriptor] : special_) close(descriptor);
}

void Outputs::plan(const RunFiles& files) {
  run_on_root(world_, "outputs", [&] {
    check_output_places(files);
    for (const auto* outputs : {&files.outputs, &files.texts})
      for (const NamedPath& output : *outputs) writes_files_ |= !output.path.empty();
    for (const NamedPath& text : files.texts) {
      if (text.path.empty() || special_.contains(text.path) || !is_special(text.path)) continue;
      const WaitScope scope("a reader of " + text.path);
      special_[text.path] = open_special(text.path);
    }
  });
}

void Outputs::add(OutputFile file) {
  if (auto guard = file.take_guard()) files_.push_back(std::move(guard));
}

void Outputs::add_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  if (special_.contains(path))
    special_texts_.emplace_back(path, text);
  else
    texts_.push_back(write_temporary(path, text));
}

void Outputs::print(const std::string& text) {
  if (world_.rank() != 0) return;
  write_stdout(text);
  if (!writes_files_) require_stdout();
}

std::vector<std::string> Outputs::name_as_invalid() {
  std::vector<std::string> names;
  for (const auto& guard : files_) names.push_back(guard->name_as_invalid());
  return names;
}

void Outputs::publish(const std::string& text) {
  run_on_root(world_, "writing the outputs", [&] {
    for (const auto& [path, content] : std::exchange(special_texts_, {})) {
      const WaitScope scope("writing " + path);
      if (const int error = write_all(special_.at(path), content); error != 0)
        throw_runtime("cannot write '{}': {}", path, std::strerror(error));
    }
  });
  Watchdog::begin_to_finish();
  HostStream stream;
  world_.barrier(stream, "all ranks before the outputs get their names")->wait();
  run_on_root(world_, "naming the outputs", [&] {
    for (auto* guards : {&files_, &texts_})
      for (const auto& guard : std::exchange(*guards, {})) guard->commit();
    write_stdout(text);
    require_stdout();
  });
}

void require_stdout() {
  const bool buffered = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;  // libraries' text
  const int error = stdout_error() != 0 ? stdout_error() : buffered ? errno : 0;
  if (error != 0) throw_runtime("cannot write to standard output: {}", std::strerror(error));
}

}  // namespace gyre
