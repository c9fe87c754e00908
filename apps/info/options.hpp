#pragma once
// The options of gyre-info.

#include <string>
#include <vector>

#include "harness/backend.hpp"

namespace CLI {
class App;
}

namespace gyre {

struct InfoOptions {
  BackendOptions backend;
  bool quick = false, model = false;
  double seconds = 0.1;
  int threads = 1;
  std::string head_dim_list = "32,64,128";
  std::vector<int> head_dims;  ///< set by check_options
  std::string json;
};

void declare_options(CLI::App& app, InfoOptions& o);

/// Throws a usage error that lists all problems of the options in a run of `ranks` ranks.
void check_options(InfoOptions& o, int ranks);

}  // namespace gyre
