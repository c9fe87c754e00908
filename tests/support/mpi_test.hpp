#pragma once
// What tests can access of their MPI run. Every test program has the main of gtest_mpi_main.cpp.
//
// All ranks run every test. A failing rank must still take part in all collectives: prefer EXPECT_
// to ASSERT_ where communication follows. A test that fails on one rank fails on all of them.

#include <gtest/gtest.h>

#include <string>

#include "comm/communicator.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre::test {

/// The communicator of all ranks of this test program (MPI backend).
Communicator& world();

/// The MPI environment of this test program.
MpiEnvironment& environment();

/// Whether a test that counts its combinations runs number i: every one on up to three ranks; every
/// third on more ranks, where a run takes longest.
inline bool runs_combination(size_t i) {
  return world().size() <= 3 || i % 3 == 0;
}

/// Says whose a suite is whose tests are written in a header: --file of that file runs them. Always
/// true.
bool assign_suite(const std::string& suite, const std::string& file);

}  // namespace gyre::test
