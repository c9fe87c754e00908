#pragma once
// What the body of an app gets, in a test.

#include "io/outputs.hpp"
#include "mpi_test.hpp"
#include "report/app.hpp"
#include "report/progress.hpp"
#include "report/row_log.hpp"

namespace gyre::test {

struct TestContext {
  AppInfo info{"gyre-test", "A test", ""};
  Outputs outputs{world()};
  RowLog rows{world()};
  Progress progress{"gyre-test", "off", false};
  OptionTable options{"A test", "gyre-test"};
  AppContext context{info, environment(), world(), {"gyre-test", "-v"}, "gyre-test -v", outputs,
                     rows, progress,      options};
};

}  // namespace gyre::test
