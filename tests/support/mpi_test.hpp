#pragma once
// What a test can reach of the run it is part of. Every test program has the main of
// gtest_mpi_main.cpp.
//
// All ranks run every test. Before and after a collective, a failing rank must keep in step with
// the others: prefer EXPECT_ to ASSERT_ where communication follows. A test that fails on one rank
// fails on all of them.

#include <gtest/gtest.h>

#include "comm/communicator.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre::test {

/// The communicator of all ranks of this test program (MPI backend).
Communicator& world();

/// The MPI environment of this test program.
MpiEnvironment& environment();

}  // namespace gyre::test
