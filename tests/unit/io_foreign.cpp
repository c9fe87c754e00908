// HDF5 files as other programs make them, by accident or on purpose: links, elements in other
// files, sizes that no machine has, paths that are no files.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>

#include "io/h5.hpp"
#include "io/resources.hpp"
#include "io/trust/reading.hpp"
#include "io/trust/sha256.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"
#include "supervision/supervisor.hpp"

namespace gyre::h5 {
namespace GYRE_FILE {

using test::change_file;
using test::expect_error;
using test::SharedFolder;

/// A file with the dataset /data/x, two numbers.
std::string sample(const SharedFolder& folder, const std::string& name = "a.h5") {
  File file = File::create(folder.file(name));
  const std::vector<double> numbers{1, 2};
  file.write_dataset("/data/x", std::span<const double>(numbers));
  file.close();
  return folder.file(name);
}

void soft_link(const std::string& path, const std::string& target, const std::string& link) {
  change_file(path, [&](hid_t file) {
    ASSERT_GE(H5Lcreate_soft(target.c_str(), file, link.c_str(), H5P_DEFAULT, H5P_DEFAULT), 0);
  });
}

/// A dataset of this shape without elements in the file.
void declare_dataset(const std::string& path, const std::string& name,
                     const std::vector<hsize_t>& shape, hid_t type, hid_t creation_list) {
  change_file(path, [&](hid_t file) {
    test::make_dataset(file, name, type, shape, nullptr, creation_list);
  });
}

/// The same, in chunks of one element, so that any extents are possible.
void declare_large(const std::string& path, const std::string& name,
                   const std::vector<hsize_t>& shape, hid_t type) {
  const Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  const std::vector<hsize_t> chunk(shape.size(), 1);
  H5Pset_chunk(list.get(), static_cast<int>(chunk.size()), chunk.data());
  declare_dataset(path, name, shape, type, list.get());
}

TEST(H5Links, InsideTheFileAreFollowed) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  soft_link(path, "/data", "/again");
  soft_link(path, "x", "/data/near");
  soft_link(path, "again/near", "/far");
  soft_link(path, "/", "/data/root");
  const File file = File::open(path);
  for (const char* name : {"/again/x", "/data/near", "/far", "far", "//again/./near"}) {
    EXPECT_TRUE(file.has_dataset(name)) << name;
    EXPECT_EQ(file.dataset(name).read_all<double>(), (std::vector<double>{1, 2})) << name;
  }
  EXPECT_TRUE(file.has_group("/data/root/again"));
  EXPECT_FALSE(file.has_dataset("/again/y")) << "absent, and not because of the link";
  EXPECT_FALSE(file.has_dataset("/far/y"));
  EXPECT_EQ(file.datasets_below("/"),
            (std::vector<std::string>{"again/near", "again/x", "data/near", "data/x", "far"}));
}

TEST(H5Links, ToNothingAreErrors) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  soft_link(path, "/data/y", "/lost");
  soft_link(path, "/round", "/circle");
  soft_link(path, "/circle", "/round");
  const File file = File::open(path);
  expect_error(ExitCode::usage,
               "'/lost' of '" + path +
                   "' is behind the link 'lost' -> '/data/y', which leads to "
                   "nothing",
               [&] { (void)file.has_dataset("/lost"); });
  expect_error(ExitCode::usage, "link 'lost' -> '/data/y'",
               [&] { (void)file.attribute("/lost", "a"); });
  expect_error(ExitCode::usage, "link 'lost' -> '/data/y'",
               [&] { (void)file.has_dataset("/lost/deeper"); });
  expect_error(ExitCode::usage, "which leads in a circle",
               [&] { (void)file.has_group("/circle"); });
  expect_error(ExitCode::usage, "which leads in a circle", [&] { (void)file.datasets_below("/"); });
}

TEST(H5Links, ToOtherFilesAreRefused) {
  const SharedFolder folder;
  const std::string path = sample(folder), other = sample(folder, "b.h5");
  mkfifo(folder.file("pipe").c_str(), 0600);
  change_file(path, [&](hid_t file) {
    H5Lcreate_external(other.c_str(), "/data", file, "/other", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external(folder.file("pipe").c_str(), "/", file, "/pipe", H5P_DEFAULT, H5P_DEFAULT);
  });
  soft_link(path, "/other/x", "/near");
  const File file = File::open(path);
  for (const char* name : {"/other", "/other/x", "/near"})
    expect_error(ExitCode::usage,
                 std::string("'") + name + "' of '" + path +
                     "' is behind a link to another file ('" + other + "', '/data')",
                 [&] { (void)file.has_dataset(name); });
  expect_error(ExitCode::usage, "is behind a link to another file",
               [&] { (void)file.has_group("/pipe"); });
  expect_error(ExitCode::usage, "is behind a link to another file",
               [&] { (void)file.datasets_below("/"); });
}

TEST(H5Storage, InOtherFilesIsRefused) {
  const SharedFolder folder;
  const std::string path = sample(folder), other = sample(folder, "b.h5");
  const hsize_t two = 2;
  const Handle space(H5Screate_simple(1, &two, nullptr), H5Sclose);
  const Handle virtual_list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_virtual(virtual_list.get(), space.get(), other.c_str(), "/data/x", space.get());
  declare_dataset(path, "/virtual", {2}, H5T_NATIVE_DOUBLE, virtual_list.get());
  const Handle external_list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_external(external_list.get(), other.c_str(), 0, 16);
  declare_dataset(path, "/external", {2}, H5T_NATIVE_DOUBLE, external_list.get());
  const File file = File::open(path);
  expect_error(ExitCode::usage,
               "dataset '/virtual' of '" + path + "' is virtual: its elements are in other files",
               [&] { (void)file.dataset("/virtual"); });
  expect_error(ExitCode::usage, "dataset '/external' of '" + path + "' has external storage",
               [&] { (void)file.dataset("/external"); });
}

TEST(H5Sizes, ThatNoMachineHasAreErrors) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  const Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(text.get(), H5T_VARIABLE);
  const Handle wide(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(wide.get(), size_t{1} << 31);
  declare_large(path, "/many", {hsize_t{1} << 40, hsize_t{1} << 40}, H5T_NATIVE_FLOAT);
  declare_large(path, "/large", {hsize_t{1} << 30, hsize_t{1} << 20}, H5T_NATIVE_FLOAT);
  declare_large(path, "/texts", {hsize_t{1} << 50}, text.get());
  declare_large(path, "/wide", {hsize_t{1} << 40}, wide.get());
  const File file = File::open(path);
  expect_error(ExitCode::runtime,
               "cannot open dataset '/many' of '" + path +
                   "': its shape [1099511627776, 1099511627776] has more than 2^63 elements",
               [&] { (void)file.dataset("/many"); });
  const Dataset large = file.dataset("/large");
  expect_error(ExitCode::runtime,
               "dataset '/large' of '" + path +
                   "', [1073741824, 1048576], needs 4503599627370496 "
                   "bytes of memory; this machine has ",
               [&] { (void)large.read_all<float>(); });
  expect_error(ExitCode::runtime, "dataset '/texts' of '" + path + "', [1125899906842624], needs ",
               [&] { (void)file.dataset("/texts").read_texts(); });
  expect_error(ExitCode::runtime, "needs more than 2^63 bytes of memory",
               [&] { (void)file.dataset("/wide").read_texts(); });
}

TEST(H5Inputs, OnlyRegularFiles) {
  const SharedFolder folder;
  mkfifo(folder.file("pipe").c_str(), 0600);
  for (const std::string& path : {folder.file("pipe"), std::string("/dev/zero")}) {
    const std::string message = "cannot read '" + path + "': it is no regular file";
    expect_error(ExitCode::usage, message, [&] { File::open(path); });
    expect_error(ExitCode::usage, message, [&] { (void)sha256_of_file(path); });
  }
}

/// Bytes on the disk, of them those behind the end of the file.
std::pair<int64_t, int64_t> bytes_on_disk(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0);
  return {status.st_blocks * 512, status.st_blocks * 512 - status.st_size};
}

TEST(H5Space, IsReservedUntilAllIsWritten) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  File file = File::create(path);
  file.write_attribute("/", "text", std::string(100'000, 't'));
  file.create_dataset("/x", DType::f32, {3'000'000}, Checksum::fletcher32);
  file.close();
  EXPECT_GT(bytes_on_disk(path).first, 12'100'000);
  EXPECT_GT(bytes_on_disk(path).second, 11'000'000) << "its elements are not there yet";

  const Slab all{{0}, {3'000'000}};
  const std::vector<float> ones(3'000'000, 1);
  file = File::open_to_fill(test::world(), path);
  file.dataset("/x").write<float>(std::span(&all, 1), std::span<const float>(ones));
  file.close();
  EXPECT_GT(bytes_on_disk(path).first, 12'100'000);
  EXPECT_LT(bytes_on_disk(path).second, 8192) << "nothing stays reserved";
}

TEST(H5Space, NothingStaysReservedOfACompleteFile) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  EXPECT_LT(bytes_on_disk(path).second, 8192);
}

TEST(H5Space, TooLittleIsAnErrorThatNamesBoth) {
  const SharedFolder folder;
  const int64_t much = int64_t{1} << 55;
  expect_error(ExitCode::runtime,
               "no space left for '" + folder.file("a") +
                   "': at least 36028797018963968 bytes are "
                   "needed, ",
               [&] { require_space(folder.file("a"), much); });
  test::write_bytes(folder.file("a"), "text");
  expect_error(ExitCode::runtime, "no space left for '" + folder.file("a") + "': at least ",
               [&] { reserve_space(folder.file("a"), much); });
  EXPECT_EQ(test::read_bytes(folder.file("a")), "text");
}

TEST(H5Crash, InTheChildIsAnError) {
  if (library_version() != "1.10.8") GTEST_SKIP() << "the bytes that crash 1.10.8";
  const SharedFolder folder;
  const std::string path = folder.file("flipped.h5");
  std::string bytes = test::read_bytes(test::input("bshd_tiny.h5"));
  bytes[2074] = 32;
  test::write_bytes(path, bytes);
  expect_error(ExitCode::runtime, "reading '" + path + "' crashes HDF5 1.10.8 (",
               [&] { File::open(path); });
}

TEST(H5Crash, InTheProgramNamesTheFile) {
  const std::string file = "some/damaged.h5";
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE}) {
    const auto ends = [signal](int status) {  // the supervisor makes 3 of the signal
      return has_supervisor() ? testing::KilledBySignal(signal)(status)
                              : testing::ExitedWithCode(3)(status);
    };
    EXPECT_EXIT(
        {
          const Reading outer("opening", file);
          const Reading inner("reading", file);
          raise(signal);
        },
        ends, "error: reading 'some/damaged.h5' crashes HDF5 1.*signal.*damaged");
  }
  EXPECT_EXIT(
      {
        std::signal(SIGFPE, SIG_DFL);
        { const Reading over("opening", file); }
        raise(SIGFPE);
      },
      testing::KilledBySignal(SIGFPE), "");
}

}  // namespace GYRE_FILE
}  // namespace gyre::h5
