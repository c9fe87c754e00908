// HDF5 files of all ranks: what one rank leaves half written keeps no other waiting, and a file
// that asks for too much is refused by all ranks alike.

#include <gtest/gtest.h>

#include "io/h5.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::on_root;
using test::SharedFolder;
using test::world;

TEST(H5Collective, AFileThatAnExceptionLeavesKeepsNobodyWaiting) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  on_root([&] {
    h5::File file = h5::File::create(path);
    file.create_dataset("/x", DType::f32, {1000}, h5::Checksum::fletcher32);
    file.close();
  });
  const auto all_ranks = [] {
    HostStream stream;
    world().barrier(stream, "a barrier that rank 0 reaches from a handler")->wait();
  };
#ifdef __SANITIZE_ADDRESS__
  const __lsan::ScopedDisabler leaks;  // such a file is not closed: MPI-IO keeps its memory
#endif
  bool met = false;
  try {
    const h5::File file = h5::File::open_to_fill(world(), path);
    if (world().rank() == 0) throw_runtime("rank 0 fails");
    all_ranks();
    met = true;
    throw_runtime("the others fail later");
  } catch (const Error&) {
    if (!met) all_ranks();
  }
  EXPECT_EQ(met, world().rank() != 0);
}

TEST(H5Collective, TooLargeIsAnErrorOfAllRanks) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  on_root([&] {
    const h5::Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT),
                          H5Fclose);
    const h5::Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    const hsize_t many = hsize_t{1} << 50, one = 1;
    H5Pset_chunk(list.get(), 1, &one);
    const h5::Handle space(H5Screate_simple(1, &many, nullptr), H5Sclose);
    const h5::Handle dataset(H5Dcreate2(file.get(), "/x", H5T_NATIVE_FLOAT, space.get(),
                                        H5P_DEFAULT, list.get(), H5P_DEFAULT),
                             H5Dclose);
  });
  const h5::File file = h5::File::open(world(), path);
  expect_error(ExitCode::runtime,
               "dataset '/x' of '" + path +
                   "', [1125899906842624], needs 4503599627370496 bytes "
                   "of memory",
               [&] { (void)file.dataset("/x").read_all<float>(); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
