#pragma once
// Tests of what several backends do. A header holds the suite, a test program
// runs it on its own backend with GYRE_RUN_ON.

#include <vector>

#include "gpu_test.hpp"
#include "mpi_test.hpp"
#include "simd_targets.hpp"

namespace gyre::test {

/// The fixture `Test` with the backend's stream.
template <class Test>
class OnBackend : public Test, public testing::WithParamInterface<MemorySpace> {
 protected:
  MemorySpace space() const override { return GetParam(); }
  bool on_host() const { return GetParam() == MemorySpace::host; }
  /// The cases of this backend: a GPU that is simulated takes fewer.
  template <class T>
  std::vector<T> pick(std::vector<T> host, std::vector<T> device) const {
    return on_host() ? host : device;
  }
  /// Runs `body` on every instruction set of the host, or once on a GPU.
  template <class Body>
  void on_every_target(Body body) {
    if (on_host())
      on_every_simd_target(body);
    else
      body();
  }
};

using BackendTest = OnBackend<StreamTest>;

}  // namespace gyre::test

/// Runs the tests of a suite of OnBackend on a backend, host or device, as
/// tests of this file.
#define GYRE_RUN_ON(Space, Suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(Space, Suite, testing::Values(::gyre::MemorySpace::Space)); \
  [[maybe_unused]] const bool Suite##_is_assigned =                                    \
      ::gyre::test::assign_suite(#Space "/" #Suite, __FILE__)
